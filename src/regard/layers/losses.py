"""The loss of a language model, computed without all logits in memory.

Logits are the largest tensor of training: 0.8 billion numbers for 16,384 tokens of GPT-2. Here the
forward pass takes one chunk of rows at a time and computes its logits, its loss and the gradients
of hidden states, weights and bias.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from regard.errors import BackendError, InputError

IGNORED = -100  # the label that losses ignore
CHUNK_BYTES = 6 * 10**8  # bytes of logits per chunk; more on a large GPU
TILE = 128  # rows of a tile of a matrix product on a GPU


@torch.compiler.disable  # type: ignore[untyped-decorator]  # compiled code would hold all logits
def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    bias: Tensor | None = None,
    smoothing: float = 0.0,
) -> Tensor:
    """The summed cross-entropy of ``labels`` [...] under the logits ``hidden @ weight.T + bias``.

    ``hidden`` is [..., dim], ``weight`` [vocabulary, dim]. Labels of -100 are ignored.
    ``smoothing`` is the share of each target that is spread over the vocabulary. Second
    derivatives are not supported.

    >>> hidden, weight = torch.ones(1, 2, 4), torch.eye(4)
    >>> round(linear_cross_entropy(hidden, weight, torch.tensor([[3, -100]])).item(), 4)
    1.3863
    """
    if not 0 <= smoothing < 1:
        raise InputError(f"smoothing must be at least 0 and below 1, but got {smoothing!r}.")
    if not torch.is_grad_enabled():  # parameters would still need gradients in ``forward``
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
        want_hidden, want_weight, want_bias, *_ = ctx.needs_input_grad
        needed = want_hidden or want_weight or want_bias
        words = len(weight)
        padded = _aligned(weight, dtype)
        offset = None if bias is None else _aligned(bias, dtype)
        hidden_gradient = torch.empty_like(hidden, dtype=dtype) if want_hidden else None
        # The gradients of weight and bias are summed in the dtype of the weights.
        weight_gradient = bias_gradient = None
        exact = torch.promote_types(dtype, torch.float32)
        total = torch.zeros((), dtype=exact, device=hidden.device)
        size = _chunk_rows(
            len(hidden), len(padded) * padded.element_size(), _chunk_bytes(hidden.device)
        )
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), size):
                rows = slice(start, start + size)
                states = hidden[rows].to(dtype)
                logits = torch.nn.functional.linear(states, padded, offset)
                total += _loss(logits, words, labels[rows], smoothing, needed)
                # ``_loss`` has replaced the logits by their gradient.
                if hidden_gradient is not None:
                    torch.mm(logits, padded, out=hidden_gradient[rows])
                if want_weight:
                    weight_gradient = _added((logits.T @ states)[:words], weight_gradient, weight)
                if want_bias and bias is not None:
                    bias_gradient = _added(logits[:, :words].sum(0), bias_gradient, bias)
        ctx.save_for_backward(hidden_gradient, weight_gradient, bias_gradient)
        ctx.given = hidden.dtype
        return total

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        if (
            torch.is_grad_enabled()
        ):  # create_graph=True: autograd would take the gradients as constants
            raise BackendError(
                "linear_cross_entropy has no second derivatives. Compute the logits and use "
                "torch.nn.functional.cross_entropy."
            )
        hidden, weight, bias = ctx.saved_tensors
        hidden = None if hidden is None else (hidden * scale).to(ctx.given)
        sums = [None if sum_ is None else sum_ * scale.to(sum_.dtype) for sum_ in (weight, bias)]
        return hidden, *sums, None, None, None


def _added(part: Tensor, so_far: Tensor | None, like: Tensor) -> Tensor:
    return part.to(like.dtype) if so_far is None else so_far.add_(part)


def _chunk_bytes(device: torch.device) -> int:
    """The bytes of logits per chunk."""
    if device.type != "cuda":
        return CHUNK_BYTES
    # With fewer chunks there are fewer additions to the gradient of the weights.
    return max(CHUNK_BYTES, torch.cuda.get_device_properties(device).total_memory // 64)


def _chunk_rows(rows: int, row_bytes: int, limit: int) -> int:
    """The rows per chunk, for nearly equal chunks of whole tiles."""
    chunks = max(-(-rows * row_bytes // limit), 1)
    return max(-(-rows // chunks // TILE) * TILE, TILE)


def _aligned(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Pad output weights with zeros to a vocabulary that is a multiple of 16.

    Rows of logits then start at multiples of 16 bytes, which makes a GPU faster. GPT-2's vocabulary
    of 50,257 is odd.
    """
    if len(weight) % 16 == 0:
        return weight.to(dtype)
    words = len(weight)
    padded = weight.new_empty(words + -words % 16, *weight.shape[1:], dtype=dtype)
    padded[:words], padded[words:] = weight, 0
    return padded


def _loss(logits: Tensor, words: int, labels: Tensor, smoothing: float, gradient: bool) -> Tensor:
    """The summed loss of logits [rows, ``words`` or more].

    If ``gradient``, overwrite the logits with their gradient.
    """
    if logits.is_cuda and logits.dtype != torch.float64 and find_spec("triton") is not None:
        from regard.kernels.triton.softmax import cross_entropy

        return cross_entropy(logits, words, labels, smoothing, gradient)
    logits = logits[:, :words]  # the logits of the padding are 0, and so is their gradient
    counts = labels != IGNORED
    at = labels.where(counts, 0)[:, None]
    logs = torch.log_softmax(logits, dim=-1, dtype=torch.promote_types(logits.dtype, torch.float32))
    log_likelihood = logs.gather(1, at)[:, 0]
    share = smoothing / logits.shape[1]
    losses = -(1 - smoothing) * log_likelihood
    if smoothing:
        losses = losses - share * logs.sum(-1)
    if gradient:
        chances = logs.exp_().sub_(share)
        chances.scatter_add_(1, at, torch.full_like(at, smoothing - 1, dtype=logs.dtype))
        torch.mul(chances, counts[:, None], out=logits)
    return losses.where(counts, 0.0).sum()
