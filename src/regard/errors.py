"""The exceptions of regard. A message says what is wrong, what was given, and what to do."""


class RegardError(Exception):
    """The base of every exception that regard raises.

    >>> from regard import RegardError, Window
    >>> try:
    ...     Window(-1)
    ... except RegardError as error:
    ...     print(error)
    Window(left=...) counts keys from 0 on, but got -1.
    """


class InputError(RegardError, ValueError):
    """Arguments that are invalid or do not fit together.

    >>> from regard import Padding
    >>> Padding([3, 2], side="top")
    Traceback (most recent call last):
    regard.errors.InputError: Padding(side=...) is "left" or "right", but got 'top'.
    """


class BackendError(RegardError, RuntimeError):
    """The requested backend cannot run a call; the message gives the reason.

    >>> import torch
    >>> from regard import BackendError, See, attention
    >>> x = torch.zeros(3, 4)
    >>> try:
    ...     attention(x, x, x, see=See(entropy=True), backend="sdpa")
    ... except BackendError as error:
    ...     print(str(error).partition(": ")[2])
    PyTorch's fused kernels do not show their weights.
    """


class CheckpointError(RegardError, ValueError):
    """A checkpoint cannot be used: it is missing, broken, unsafe or made for another model.

    >>> from regard import load
    >>> load("./nowhere")  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    regard.errors.UnknownModelError: There is no folder ./nowhere...
    """


class UnknownModelError(CheckpointError, InputError):
    """A model name is unknown.

    >>> from regard import UnknownModelError, load
    >>> try:
    ...     load("./nowhere")
    ... except UnknownModelError as error:
    ...     print(str(error)[:29])
    There is no folder ./nowhere.
    """
