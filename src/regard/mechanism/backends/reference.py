"""The definition of attention in plain PyTorch; tests compare every backend with it.

    scores  = softcap(scale * Q K^T) + bias         softcap(s) = c tanh(s / c), if c is given
    weights = softmax(scores over the keys that the mask allows, and the sink)
    output  = weights V                             over the keys: the sink has no value

If a query may attend to no key, its weights and its output are 0. Half-precision inputs are
converted to float32, and the output is rounded once, at the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from regard.mechanism.call import Call
from regard.mechanism.geometry import Tile
from regard.mechanism.seeing import Joining, Pairs, Seen, observe

ROWS = 64  # the most queries of a block of scores


def run(call: Call) -> tuple[Tensor, Seen | None]:
    """Compute all queries at once."""
    output, fields = attend(call, range(call.extent.queries), range(call.extent.keys))
    if call.see is None:
        return output, None
    joining = Joining(call.see, call.extent)
    joining.add(fields)
    return output, joining.seen()


def attend(call: Call, rows: range, columns: range) -> tuple[Tensor, dict[str, Tensor]]:
    """The output and the requested fields of some rows, differentiable to any order.

    The mask must forbid every key outside of ``columns`` for all of these rows.
    """
    tile = Tile(call.extent, rows, columns)
    allowed = None if call.mask is None else call.mask.tile(tile)
    raw = scores(call, tile, allowed)  # [b, h, q, k]

    highest = raw.amax(-1, keepdim=True) if columns else raw.new_full((1,), -math.inf)
    empty = (highest == -math.inf).expand(*raw.shape[:-1], 1)  # queries that may attend to no key
    inputs = raw.masked_fill(empty, 0)
    if call.sinks is not None:
        column = call.sinks.to(raw.dtype)[:, None, None].expand(*raw.shape[:-1], 1)
        inputs = torch.cat((inputs, column), dim=-1)
    weights = inputs.softmax(-1)[..., : len(columns)].masked_fill(empty, 0)
    if allowed is not None:
        weights = weights.masked_fill(~allowed, 0)  # in a row of NaN, forbidden keys get weight 0

    dropped = torch.nn.functional.dropout(weights, call.dropout) if call.dropout else weights
    value = spread(call, call.value[:, :, columns.start : columns.stop])
    if allowed is None:
        output = dropped @ value
    else:
        output = dropped @ finite(value)
        allowed = allowed.expand(*allowed.shape[:-1], len(columns))
        broken = allowed.to(value.dtype) @ (~value.isfinite()).to(value.dtype)
        output = output.masked_fill(broken > 0, math.nan)

    fields = {}
    if call.see is not None:
        lse = inputs.logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
        sinks = None if call.sinks is None else call.sinks[:, None]
        fields = observe(call.see, tile, raw, weights, lse, sinks)
    return output.to(call.query.dtype), fields


def scores(call: Call, tile: Tile, allowed: Tensor | None) -> Tensor:
    """The scores before the softmax, [batch, heads, q, k]: -inf where the mask forbids a key."""
    query = call.query[:, :, tile.rows.start : tile.rows.stop].to(compute_dtype(call))
    key = spread(call, call.key[:, :, tile.columns.start : tile.columns.stop])
    if allowed is None:
        result = (query * call.scale) @ key.transpose(-1, -2)
    else:
        # 0 * NaN is NaN: keep NaN and infinity out of products with masked positions.
        result = (finite(query) * call.scale) @ finite(key).transpose(-1, -2)
        broken = ~query.isfinite().all(-1)[..., :, None] | ~key.isfinite().all(-1)[..., None, :]
        result = result.masked_fill(broken, math.nan)
    if call.softcap is not None:
        result = call.softcap * torch.tanh(result / call.softcap)
    if call.bias is not None:
        result = result + call.bias.tile(tile).to(result.dtype)
    if allowed is not None:
        result = result.masked_fill(~allowed, -math.inf)
    return result


def chosen_scores(call: Call, chosen: Pairs | Sequence[Any] | Tensor) -> Tensor:
    """The scores of rows, [batch, heads, rows, keys], or of pairs, [batch, heads, pairs]."""
    if isinstance(chosen, Pairs):
        blocks = []
        for run in runs(chosen.queries.tolist()):
            tile = Tile(call.extent, run, range(call.extent.keys))
            _, *places = chosen.of(tile)
            blocks.append(Pairs.pick(_masked_scores(call, tile), *places))
        return torch.cat(blocks, dim=-1)[..., chosen.places.to(call.extent.device)]
    queries, keys = call.extent.queries, range(call.extent.keys)
    rows = [row % queries for row in chosen]
    by_row: dict[int, Tensor] = {}
    for run in runs(rows):
        block = _masked_scores(call, Tile(call.extent, run, keys))
        by_row |= dict(zip(run, block.split_with_sizes([1] * len(run), dim=2), strict=True))
    # Without an index tensor: a CUDA graph cannot capture its copy to the GPU.
    return torch.cat([by_row[row] for row in rows], dim=2)


def _masked_scores(call: Call, tile: Tile) -> Tensor:
    return scores(call, tile, None if call.mask is None else call.mask.tile(tile))


def runs(rows: Iterable[int]) -> list[range]:
    """Consecutive rows of a request as ranges of at most ROWS, in ascending order."""
    ranges: list[range] = []
    for row in sorted(set(rows)):
        if ranges and row == ranges[-1].stop and len(ranges[-1]) < ROWS:
            ranges[-1] = range(ranges[-1].start, row + 1)
        else:
            ranges.append(range(row, row + 1))
    return ranges


def spread(call: Call, tensor: Tensor) -> Tensor:
    """Keys or values in the dtype of the computation, repeated for each head of the query."""
    tensor = tensor.to(compute_dtype(call))
    return tensor if call.groups == 1 else tensor.repeat_interleave(call.groups, dim=1)


def compute_dtype(call: Call) -> torch.dtype:
    """The dtype of the computation: float32 for half precision."""
    return torch.promote_types(call.query.dtype, torch.float32)


def finite(tensor: Tensor) -> Tensor:
    """The tensor with NaN and infinity replaced by 0."""
    return torch.where(tensor.isfinite(), tensor, 0)
