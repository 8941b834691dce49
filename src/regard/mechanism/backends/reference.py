"""The definition of attention in plain PyTorch; tests compare every backend with it.

    scores  = softcap(scale * Q K^T) + bias         softcap(s) = c tanh(s / c), if c is given
    weights = softmax(scores over the keys that the mask allows)
    output  = weights V

If a query may attend to no key, its weights and its output are 0. Half-precision inputs are
computed in float32 and rounded once, at the end.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.mechanism.call import Call
from regard.mechanism.geometry import Tile
from regard.mechanism.seeing import Joining, Seen, observe


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
    weights = raw.masked_fill(empty, 0).softmax(-1).masked_fill(empty, 0)
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
        lse = raw.masked_fill(empty, 0).logsumexp(-1).masked_fill(empty[..., 0], -math.inf)
        fields = observe(call.see, tile, raw, weights, lse)
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
