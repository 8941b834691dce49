"""The loss of a language model, without all of its logits in memory.

They are the largest tensor of training: 16,384 tokens of GPT-2 have 0.8 billion logits, written and
read several times over. Here some rows at a time become logits, then their loss and its gradient,
and that at once the gradients of what they were made from.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import BackendError, InputError

NOTHING = -100  # a label that does not count
ROOM = 6 * 10**8  # bytes of logits at a time, or more on a large GPU
TILE = 128  # rows of a matrix product that a GPU computes as one


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled, it would hold all logits
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """The summed cross-entropy of ``labels`` [...] under the logits ``hidden @ weight.T + bias``.

    ``hidden`` is [..., dim], ``weight`` [vocabulary, dim]. Labels that are -100 do not count. With
    ``smoothing``, that share of each target is spread over the vocabulary. It has a gradient, but
    not a second one.

    >>> hidden, weight = torch.ones(1, 2, 4), torch.eye(4)
    >>> round(linear_cross_entropy(hidden, weight, torch.tensor([[3, -100]])).item(), 4)
    1.3863
    """
    if not 0 <= smoothing < 1:
        raise InputError(f"smoothing is a share from 0 to below 1, but got {smoothing!r}.")
    if not torch.is_grad_enabled():  # a parameter would have its gradient computed all the same
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else bias.detach()
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    loss: Tensor = _Chunked.apply(  # type: ignore[no-untyped-call]
        hidden.flatten(0, -2), weight, bias, labels.flatten(), smoothing, dtype
    )
    return loss


class _Chunked(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        smoothing: float,
        dtype: torch.dtype,
    ) -> Tensor:
        wanted = _Wanted(*ctx.needs_input_grad[:3])
        needed = any(wanted)
        words = len(weight)
        turned = _aligned(weight, dtype)
        offset = None if bias is None else _aligned(bias, dtype)
        into_hidden = torch.empty_like(hidden, dtype=dtype) if wanted.hidden else None
        # Sums over all rows are kept in the weights' own precision.
        into_weight = into_bias = None
        exact = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        size = _share(len(hidden), len(turned) * turned.element_size(), _room(hidden.device))
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), size):
                rows = slice(start, start + size)
                states = hidden[rows].to(dtype)
                logits = torch.nn.functional.linear(states, turned, offset)
                total += _loss(logits, words, labels[rows], smoothing, needed)
                # Now they are their gradient.
                if into_hidden is not None:
                    torch.mm(logits, turned, out=into_hidden[rows])
                if wanted.weight:
                    into_weight = _added((logits.T @ states)[:words], into_weight, weight)
                if wanted.bias and bias is not None:
                    into_bias = _added(logits[:, :words].sum(0), into_bias, bias)
        ctx.save_for_backward(into_hidden, into_weight, into_bias)
        ctx.given = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        if torch.is_grad_enabled():  # create_graph: what comes out would be taken for constant
            raise BackendError(
                "linear_cross_entropy has no gradients of gradients. torch's cross_entropy of the "
                "logits has."
            )
        hidden, weight, bias = ctx.saved_tensors
        return (
            None if hidden is None else (hidden * scale).to(ctx.given),
            None if weight is None else weight * scale.to(weight.dtype),
            None if bias is None else bias * scale.to(bias.dtype),
            None,
            None,
            None,
        )


def _added(part: Tensor, so_far: Tensor | None, like: Tensor) -> Tensor:
    return part.to(like.dtype) if so_far is None else so_far.add_(part)


def _room(device: torch.device) -> int:
    """A small part of a GPU's memory: the fewer shares, the fewer sums over them."""
    if device.type != "cuda":
        return ROOM
    return max(ROOM, torch.cuda.get_device_properties(device).total_memory // 64)


def _share(rows: int, each: int, room: int) -> int:
    """How many rows of ``each`` bytes go at a time: as good as equal shares, of whole tiles."""
    shares = max(-(-rows * each // room), 1)
    return max(-(-rows // shares // TILE) * TILE, TILE)


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Weights of the output with zeros for some more words, so that their number is a whole 16.

    Rows of logits then start at whole 16 bytes, as a GPU's matrix units want them, and its threads
    take 16 bytes at once; GPT-2 has 50,257 words, an odd number.
    """
    if len(weight) % 16 == 0:
        return weight.to(dtype)
    words = len(weight)
    whole = weight.new_empty(words + -words % 16, *weight.shape[1:], dtype=dtype)
    whole[:words], whole[words:] = weight, 0
    return whole


class _Wanted(NamedTuple):
    """Which gradients."""

    hidden: bool
    weight: bool
    bias: bool


def _loss(logits: Tensor, words: int, labels: Tensor, smoothing: float, gradient: bool) -> Tensor:
    """The summed loss of logits [rows, ``words`` or more]; with ``gradient`` they become that."""
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton") is not None:
        from regard.kernels.triton.softmax import cross_entropy

        return cross_entropy(logits, words, labels, smoothing, gradient)
    logits = logits[:, :words]  # the gradient of what was added is 0, as it is already
    counts = labels != NOTHING
    at = labels.where(counts, 0)[:, None]
    logs = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    told = logs.gather(1, at)[:, 0]
    share = smoothing / logits.shape[1]
    losses = -(1 - smoothing) * told
    if smoothing:
        losses = losses - share * logs.sum(-1)
    if gradient:
        chances = logs.exp_().sub_(share)
        chances.scatter_add_(1, at, torch.full_like(at, smoothing - 1, dtype=logs.dtype))
        torch.mul(chances, counts[:, None], out=logits)
    return losses.where(counts, 0.0).sum()
