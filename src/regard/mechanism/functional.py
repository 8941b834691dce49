"""The functions :func:`attention` and :func:`why`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import overload

import torch
from torch import Tensor

from regard.mechanism import backends
from regard.mechanism.biases import Bias
from regard.mechanism.call import Call, check
from regard.mechanism.geometry import autocasts
from regard.mechanism.masks import Mask
from regard.mechanism.seeing import See, Seen

# What explain_model() sets while a watched layer runs: it gets each call with ``see``.
observer: ContextVar[Callable[[Call], None] | None] = ContextVar("regard_observer", default=None)


@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Bias | Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout: float = ...,
    sinks: Tensor | None = ...,
    see: None = ...,
    query_start: int | Sequence[int] | Tensor | None = ...,
    backend: str = ...,
) -> Tensor: ...
@overload
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = ...,
    bias: Bias | Tensor | None = ...,
    scale: float | None = ...,
    softcap: float | None = ...,
    dropout: float = ...,
    sinks: Tensor | None = ...,
    see: See,
    query_start: int | Sequence[int] | Tensor | None = ...,
    backend: str = ...,
) -> tuple[Tensor, Seen]: ...
def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    see: See | None = None,
    query_start: int | Sequence[int] | Tensor | None = None,
    backend: str = "auto",
) -> Tensor | tuple[Tensor, Seen]:
    """Compute softmax(scale * Q K^T + bias) V over the keys that the mask allows.

    Tensors are [batch, heads, length, dim], [batch, length, dim] or [length, dim]. Keys and values
    may have fewer heads than queries, and values may have another dim. ``mask`` is True where a
    query may attend. ``scale`` is 1/sqrt(dim) by default. ``softcap`` bounds the scaled scores
    before the bias is added. ``dropout`` applies whenever it is above 0: pass 0 in evaluation. If
    ``see`` is given, the result is (output, Seen). The fields of Seen ignore dropout and always
    have the axes [batch, heads, ...].

    Key ``j`` is at position ``j``, and the last query is at the position of the last key.
    ``query_start`` gives the first query another position: one number, or a list or tensor with a
    number for each sequence. Masks, biases by distance and ``See(distance=True)`` use it. A list is
    copied to the GPU once. Only the backend "tiled" reads a tensor on a GPU, and waits for it.

    ``sinks`` [heads] adds a learned, finite score to the softmax of each query. It takes a part of
    the weight and has no value, so the weights of the keys sum to less than 1.

    ``backend`` is "auto" or a name that :func:`why` lists. Second derivatives need "tiled" or
    "reference"; other backends raise an error. Under torch.func "auto" chooses "reference" if no
    kernel supports the call.

    >>> import torch
    >>> from regard import See, Causal, attention
    >>> q = k = v = torch.eye(3)
    >>> output, seen = attention(q, k, v, mask=Causal(), see=See(entropy=True))
    >>> [f"{keys:.2f}" for keys in seen.entropy[0, 0].exp()]  # the effective number of keys
    ['1.00', '1.92', '2.88']

    >>> _, seen = attention(q[:2], k, v, mask=Causal(), query_start=0, see=See(weights=True))
    >>> (seen.weights[0, 0] > 0).tolist()
    [[True, False, False], [True, True, False]]

    With a sink a query may attend to nothing:

    >>> _, seen = attention(q, k, v, sinks=torch.tensor([4.0]), see=See(sink=True))
    >>> [round(weight, 2) for weight in seen.sink[0, 0].tolist()]
    [0.94, 0.94, 0.94]
    """
    call = check(query, key, value, mask, bias, scale, softcap, dropout, see, query_start, sinks)
    run = backends.runner(call, backend)
    if see is not None and autocasts(query):
        # Autocast would lower the precision of the fields of Seen.
        with torch.autocast(query.device.type, enabled=False):
            output, seen = run()
            seen = backends.complete(call, see, seen)
    else:
        output, seen = run()
        if see is not None:
            seen = backends.complete(call, see, seen)
    if see is not None and not torch.compiler.is_compiling() and (observe := observer.get()):
        observe(call)
    if call.query is not query:  # the caller gave tensors without a heads axis
        output = output[:, 0] if query.dim() == 3 else output[0, 0]
    if seen is None:
        return output
    return output, seen


def why(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Mask | Tensor | None = None,
    bias: Bias | Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    sinks: Tensor | None = None,
    see: See | None = None,
    query_start: int | Sequence[int] | Tensor | None = None,
) -> backends.Why:
    """Return why each backend can or cannot run :func:`attention` with these arguments.

    >>> import torch
    >>> from regard import See, why
    >>> q = k = v = torch.zeros(3, 4)
    >>> why(q, k, v, see=See(entropy=True)).chosen
    'tiled'
    """
    call = check(query, key, value, mask, bias, scale, softcap, dropout, see, query_start, sinks)
    return backends.why(call)
