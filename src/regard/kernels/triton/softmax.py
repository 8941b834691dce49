# mypy: ignore-errors
"""The loss of rows of logits and its gradient, in two readings and one writing of them.

Rows may be wider than the vocabulary: where both their width and the step to the next row are whole
16s, a thread reads and writes 16 bytes at once. What is beyond the vocabulary counts for nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _row(
    logits,
    labels,
    losses,
    stride,
    smoothing,
    width: tl.constexpr,
    words: tl.constexpr,
    nothing: tl.constexpr,
    gradient: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0)
    label = tl.load(labels + row)
    at = logits + row.to(tl.int64) * stride
    index = tl.arange(0, block)
    if label == nothing:
        tl.store(losses + row, 0.0)
        if gradient:
            for start in tl.range(0, width, block):
                here = start + index
                tl.store(at + here, tl.zeros([block], tl.float32), mask=here < width)
    else:
        # Read before all threads meet in a sum, after which it is written over.
        told = tl.load(at + label).to(tl.float32)
        lowest = -3.0e38  # finite: the difference of two infinities is no number
        highest = tl.full([block], lowest, tl.float32)  # of each lane by itself
        total = tl.zeros([block], tl.float32)
        plain = tl.zeros([block], tl.float32)
        for start in tl.range(0, width, block):
            here = start + index
            inside = here < words
            x = tl.load(at + here, mask=here < width, other=0.0).to(tl.float32)
            plain += tl.where(inside, x, 0.0)
            x = tl.where(inside, x, lowest)
            # Of the lane's highest and this one, the higher counts 1, the other so much less.
            less = tl.where(inside, tl.exp(-tl.abs(x - highest)), 0.0)
            total = tl.where(x > highest, total * less + 1, total + less)
            highest = tl.maximum(highest, x)
        top = tl.max(highest, axis=0)
        lse = top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0))
        loss = lse - (1 - smoothing) * told - smoothing / words * tl.sum(plain, axis=0)
        tl.store(losses + row, loss)
        if gradient:
            for start in tl.range(0, width, block):
                here = start + index
                x = tl.load(at + here, mask=here < width, other=0.0).to(tl.float32)
                wanted = smoothing / words + tl.where(here == label, 1 - smoothing, 0.0)
                slope = tl.where(here < words, tl.exp(x - lse) - wanted, 0.0)
                tl.store(at + here, slope, mask=here < width)


def cross_entropy(
    logits: Tensor, words: int, labels: Tensor, smoothing: float, gradient: bool
) -> Tensor:
    """The summed loss of logits [rows, ``words`` or more]; with ``gradient`` they become that."""
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
        words=words,
        nothing=-100,
        gradient=gradient,
        block=block,
        num_warps=8 if block >= 2048 else 4,
    )
    return losses.sum()
