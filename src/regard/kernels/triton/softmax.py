# mypy: ignore-errors
"""Cross entropy of rows of logits, and its gradient in place: two reads and one write.

    loss = lse - (1 - smoothing) logit_label - smoothing * mean of logits

Rows may be wider than the vocabulary; the logits beyond it are ignored. If the width and stride of
rows are multiples of 16, a thread reads and writes 16 bytes at once. Called by
``regard.layers.losses``.

Test: ``pytest tests/layers -k losses``.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from regard.kernels.compat import FUSED

BLOCK = 4096


@triton.jit
def _row(
    logits,
    labels,
    losses,
    stride,
    smoothing,
    width: tl.constexpr,
    vocabulary: tl.constexpr,
    ignored: tl.constexpr,
    gradient: tl.constexpr,
    block: tl.constexpr,
):
    """Store the loss of one row and, with ``gradient``, its gradient."""
    row = tl.program_id(0)
    label = tl.load(labels + row)
    at = logits + row.to(tl.int64) * stride
    index = tl.arange(0, block)
    if label == ignored:
        tl.store(losses + row, 0.0)
        if gradient:
            for start in tl.range(0, width, block):
                here = start + index
                tl.store(at + here, tl.zeros([block], tl.float32), mask=here < width)
    else:
        # Loaded before the sums synchronize the threads; later another thread overwrites it.
        label_logit = tl.load(at + label).to(tl.float32)
        lowest = -3.0e38  # finite: the difference of two infinities is NaN
        highest = tl.full([block], lowest, tl.float32)  # a maximum for each lane
        total = tl.zeros([block], tl.float32)
        plain = tl.zeros([block], tl.float32)
        for start in tl.range(0, width, block):
            here = start + index
            inside = here < vocabulary
            x = tl.load(at + here, mask=here < width, other=0.0).to(tl.float32)
            plain += tl.where(inside, x, 0.0)
            x = tl.where(inside, x, lowest)
            # Of both exponentials, that of the new maximum is 1, so only the other is computed.
            factor = tl.where(inside, tl.exp(-tl.abs(x - highest)), 0.0)
            total = tl.where(x > highest, total * factor + 1, total + factor)
            highest = tl.maximum(highest, x)
        top = tl.max(highest, axis=0)
        lse = top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0))
        loss = lse - (1 - smoothing) * label_logit - smoothing / vocabulary * tl.sum(plain, axis=0)
        tl.store(losses + row, loss)
        if gradient:
            for start in tl.range(0, width, block):
                here = start + index
                x = tl.load(at + here, mask=here < width, other=0.0).to(tl.float32)
                target = smoothing / vocabulary + tl.where(here == label, 1 - smoothing, 0.0)
                slope = tl.where(here < vocabulary, tl.exp(x - lse) - target, 0.0)
                tl.store(at + here, slope, mask=here < width)


def cross_entropy(
    logits: Tensor, vocabulary: int, labels: Tensor, smoothing: float, gradient: bool
) -> Tensor:
    """Return the summed loss of logits [rows, ``vocabulary`` or more].

    With ``gradient`` the logits are overwritten with their gradient.
    """
    rows, width = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(triton.next_power_of_2(width), BLOCK)
    _row[(rows,)](
        logits,
        labels,
        losses,
        logits.stride(0),
        smoothing,
        width=width,
        vocabulary=vocabulary,
        ignored=-100,
        gradient=gradient,
        block=block,
        **FUSED,
        num_warps=8 if block >= 2048 else 4,
    )
    return losses.sum()
