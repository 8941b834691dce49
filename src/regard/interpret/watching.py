"""watch(model, See(...)): record what every attention layer computes while the model runs.

Each library has an adapter that watches its layers. A watcher records only the calls of the thread
or asyncio task that entered its ``with`` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from regard.errors import InputError
from regard.interpret.adapters import huggingface, ours
from regard.interpret.watched import Watched, Watcher, active_watchers
from regard.mechanism.seeing import See, Seen


@contextmanager
def watch(
    model: nn.Module, see: See, each: Callable[[str, Seen], None] | None = None
) -> Iterator[Watched]:
    """Record the fields of ``see`` for each call of each attention layer of ``model``.

    ``model`` is a model of regard, any module that holds :class:`MultiHeadAttention`, or a model of
    transformers 4.57 or later whose attention goes through the attention registry. (Before
    transformers 5, BERT and T5 do not use the registry, and are refused.) Watching changes the
    output by rounding at most, and leaves the model unchanged. Run the model under
    ``torch.no_grad()`` unless you need gradients of the recorded fields. A query whose keys are
    all masked, such as padding on the left, yields zeros, as everywhere in regard.

    With ``each``, nothing is stored: after every call, ``each`` is called with the layer's name and
    its ``Seen``. This saves memory for long texts.

    >>> import torch
    >>> from regard import See, watch
    >>> from regard.layers.modules import MultiHeadAttention
    >>> model = torch.nn.ModuleDict({"first": MultiHeadAttention(8, heads=2)})
    >>> with watch(model, See(entropy=True)) as watched:
    ...     _ = model["first"](torch.zeros(1, 5, 8))
    >>> watched
    Watched: 1 layer, 1 call of entropy
      first  1 call  1 x 2 heads, 5 queries, 5 keys
    >>> [list(seen.entropy.shape) for seen in watched["first"]]
    [[1, 2, 5]]
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"watch takes a model, a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(see, See):
        raise InputError(f"watch takes See(...), as in See(entropy=True), not {see!r}.")
    watcher = Watcher(model, see, each)
    for other in active_watchers.get():
        shared = [type(module).__name__ for module in watcher.names if module in other.names]
        if shared:
            raise InputError(
                f"{shared[0]} is being watched already. Give all fields to the outer watch(...), "
                "as in See(entropy=True, top=8)."
            )
    with ExitStack() as stack:
        attached = [adapter.attach(watcher, stack) for adapter in (ours, huggingface)]
        if not any(attached):
            raise InputError(
                f"There is nothing to watch in {type(model).__name__}: it holds no "
                "MultiHeadAttention of regard and is no model of the transformers library."
            )
        token = active_watchers.set((*active_watchers.get(), watcher))
        stack.callback(active_watchers.reset, token)
        yield watcher.watched
