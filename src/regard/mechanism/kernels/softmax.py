# mypy: ignore-errors
"""The loss of rows of logits and its gradient, in two readings and one writing of them."""

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
    columns: tl.constexpr,
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
            for start in tl.range(0, columns, block):
                here = start + index
                tl.store(at + here, tl.zeros([block], tl.float32), mask=here < columns)
    else:
        # Read before all threads meet in a sum, after which it is written over.
        told = tl.load(at + label).to(tl.float32)
        lowest = -3.0e38  # finite: the difference of two infinities is no number
        highest = tl.full([block], lowest, tl.float32)  # of each lane by itself
        total = tl.zeros([block], tl.float32)
        plain = tl.zeros([block], tl.float32)
        for start in tl.range(0, columns, block):
            here = start + index
            inside = here < columns
            x = tl.load(at + here, mask=inside, other=0.0).to(tl.float32)
            plain += x
            x = tl.where(inside, x, lowest)
            grown = tl.maximum(highest, x)
            total = total * tl.exp(highest - grown) + tl.where(inside, tl.exp(x - grown), 0.0)
            highest = grown
        top = tl.max(highest, axis=0)
        lse = top + tl.log(tl.sum(total * tl.exp(highest - top), axis=0))
        loss = lse - (1 - smoothing) * told - smoothing / columns * tl.sum(plain, axis=0)
        tl.store(losses + row, loss)
        if gradient:
            for start in tl.range(0, columns, block):
                here = start + index
                inside = here < columns
                x = tl.load(at + here, mask=inside, other=0.0).to(tl.float32)
                wanted = smoothing / columns + tl.where(here == label, 1 - smoothing, 0.0)
                tl.store(at + here, tl.exp(x - lse) - wanted, mask=inside)


def cross_entropy(logits: Tensor, labels: Tensor, smoothing: float, gradient: bool) -> Tensor:
    """The summed loss of logits [rows, vocabulary]; they become its gradient if that is wanted."""
    rows, columns = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    block = min(triton.next_power_of_2(columns), BLOCK)
    _row[(rows,)](
        logits,
        labels,
        losses,
        logits.stride(0),
        smoothing,
        columns=columns,
        nothing=-100,
        gradient=gradient,
        block=block,
        num_warps=8 if block >= 2048 else 4,
    )
    return losses.sum()
