"""Seeing block by block in plain PyTorch: any device, O(n) memory.

A block is some rows of queries against all the keys they may attend to, so its softmax is whole
and everything there is to see of it is at hand. Two ways to go through the blocks:

- ``by_rows``: the reference itself, a block at a time, recomputed in the backward pass. It has
  every gradient, of every field, to any order.
- ``stream``: the same numbers without gradients, in place, in two buffers that stay in the cache.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.mechanism import reference
from regard.mechanism.call import Call
from regard.mechanism.masks import Hull, Tile, hulls
from regard.mechanism.seeing import See, Seen, bin_rows, bins, chosen, finish, grid_of, join

ROWS = 128  # queries a block; enough of them for a matrix product to run at full speed
BLOCK = 2**20  # scores a block of ``stream`` holds, where it can choose: a few MB, near the cores


def run(call: Call) -> tuple[Tensor, Seen | None]:
    if call.wants_gradient or call.dropout or call.empty or not all_finite(call):
        return by_rows(call)
    return stream(call)


def all_finite(call: Call) -> bool:
    """Whether query, key and value hold numbers only; a sum is finite only if all its terms are."""
    total = sum(t.sum(dtype=torch.float32) for t in (call.query, call.key, call.value))
    return bool(torch.as_tensor(total).isfinite())


def by_rows(call: Call) -> tuple[Tensor, Seen | None]:
    """The reference, some rows at a time; in the backward pass each block is computed again."""
    outputs, parts = [], []
    for rows, columns, _ in hulls(call.mask, call.extent, ROWS):
        if call.wants_gradient:
            output, found = checkpoint(
                reference.attend, call, rows, columns, use_reentrant=False,
                preserve_rng_state=call.dropout > 0,
            )  # fmt: skip
        else:
            output, found = reference.attend(call, rows, columns)
        outputs.append(output)
        parts.append(found)
    output = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    return output, None if call.see is None else join(call.see, parts, call.extent)


def stream(call: Call) -> tuple[Tensor, Seen | None]:
    """All blocks without gradients: two buffers, everything in place."""
    with torch.no_grad():
        return _Stream(call).run()


class _Stream:
    """One streamed call: the buffers, and what has been gathered so far."""

    def __init__(self, call: Call) -> None:
        self.call, self.see = call, call.see
        extent, self.groups = call.extent, call.groups
        self.dtype = reference.compute_dtype(call)
        self.output = call.value.new_empty(
            extent.batch, extent.heads, extent.queries, call.value.shape[-1]
        )
        self.key = call.key.to(self.dtype).transpose(-1, -2)  # [b, g, d, k]
        self.value = call.value
        self.hulls = hulls(call.mask, extent, ROWS)
        widest = max(len(hull.columns) for hull in self.hulls)
        rows = min(ROWS, extent.queries) * self.groups
        key_heads = call.key.shape[1]
        self.heads = min(key_heads, max(1, BLOCK // max(rows * widest, 1)))  # key heads a block
        size = self.heads * rows * widest
        self.buffers = [call.query.new_empty(size, dtype=self.dtype) for _ in range(2)]
        self.found = _room(call, self.dtype)

    def run(self) -> tuple[Tensor, Seen | None]:
        call = self.call
        for hull in self.hulls:
            if not hull.columns:
                self.output[:, :, hull.rows.start : hull.rows.stop] = 0
                continue
            tile = Tile(call.extent, hull.rows, hull.columns)
            bias = None if call.bias is None else self._grouped(call.bias.tile(tile))
            closed = None if hull.full or call.mask is None else self._grouped(~call.mask.tile(tile))
            for batch in range(call.extent.batch):
                for head in range(0, call.key.shape[1], self.heads):
                    self._block(hull, tile, batch, slice(head, head + self.heads), bias, closed)
        return self.output, None if self.see is None else finish(self.see, self.found, call.extent)

    def _grouped(self, tensor: Tensor) -> Tensor:
        """[b, h, q, k] with heads split into key heads and the queries' heads that share one."""
        tensor = tensor.expand(*(1,) * (4 - tensor.dim()), *tensor.shape)
        heads = (1, 1) if tensor.shape[1] == 1 else (-1, self.groups)
        return tensor.unflatten(1, heads)  # [b, g, r, q, k]

    def _block(
        self,
        hull: Hull,
        tile: Tile,
        batch: int,
        heads: slice,
        bias: Tensor | None,
        closed: Tensor | None,
    ) -> None:
        call, groups = self.call, self.groups
        rows, columns = hull.rows, hull.columns
        key = self.key[batch, heads, :, columns.start : columns.stop]  # [g, d, k]
        count, width = key.shape[0], len(columns)
        wide = slice(heads.start * groups, heads.start * groups + count * groups)

        query = call.query[batch, wide, rows.start : rows.stop].to(self.dtype) * call.scale
        query = query.reshape(count, groups * len(rows), -1)
        size = count * groups * len(rows) * width
        scores, powers = (b[:size].view(count, groups * len(rows), width) for b in self.buffers)
        torch.bmm(query, key, out=scores)
        split = scores.view(count, groups, len(rows), width)
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        if bias is not None:
            split += _pick(bias, batch, heads)
        if closed is not None:
            split.masked_fill_(_pick(closed, batch, heads), -math.inf)

        highest = scores.amax(-1, keepdim=True)  # [g, r*q, 1]
        lost = highest == -math.inf
        scores.sub_(highest.masked_fill(lost, 0))
        torch.exp(scores, out=powers)
        total = powers.sum(-1, keepdim=True)
        inverse = (1 / total).masked_fill_(lost, 0)  # also the largest weight: its power is 1

        value = self.value[batch, heads, columns.start : columns.stop]
        output = torch.bmm(powers.to(value.dtype), value) * inverse
        split_rows = (count * groups, len(rows))
        self.output[batch, wide, rows.start : rows.stop] = output.view(*split_rows, -1).to(
            self.output.dtype
        )
        if self.see is not None:
            place = (batch, wide, slice(rows.start, rows.stop))
            flat = [t.view(*split_rows, -1) for t in (scores, powers, highest, total, inverse)]
            self._see(self.see, tile, place, *flat)

    def _see(
        self,
        see: See,
        tile: Tile,
        place: tuple[int, slice, slice],
        scores: Tensor,  # [h, q, k], less the row's highest
        powers: Tensor,  # [h, q, k], their exponentials
        highest: Tensor,  # [h, q, 1]
        total: Tensor,  # [h, q, 1]
        inverse: Tensor,  # [h, q, 1]
    ) -> None:
        found, call = self.found, self.call
        batch, heads, _ = place
        columns = slice(tile.columns.start, tile.columns.stop)
        if see.lse:
            found["lse"][place] = (highest + total.log())[..., 0]
        if see.peak:
            found["peak"][place] = inverse[..., 0]
        if see.max_logit:
            here = found["max_logit"][batch, heads]
            torch.maximum(here, highest.amax((1, 2)), out=here)
        if see.received or see.map is not None:
            self._pool(see, tile, batch, heads, powers, inverse)
        if see.entropy:
            if call.mask is not None or call.bias is not None:
                scores.clamp_(min=torch.finfo(scores.dtype).min)  # 0 * (-inf) must count as 0
            mean = torch.mul(scores, powers, out=scores).sum(-1, keepdim=True) * inverse
            found["entropy"][place] = (total.log() - mean).masked_fill_(inverse == 0, 0)[..., 0]
        if see.distance:
            distance = (tile.query_positions() - tile.key_positions()).abs()
            mean = torch.mul(powers, distance, out=scores).sum(-1, keepdim=True) * inverse
            found["distance"][place] = mean[..., 0]
        if see.top or see.rows or see.weights or see.map_peak:
            powers.mul_(inverse)  # now the weights themselves
        if see.map_peak:
            column_of = bins(call.extent.keys, see.grid[1], powers.device)[columns]
            for row, inside in bin_rows(see, call.extent, tile.rows):
                part = powers[:, inside.start - tile.rows.start : inside.stop - tile.rows.start]
                largest = part.amax(1)
                cells = found["map_peak"][batch, heads, row]
                cells.scatter_reduce_(1, column_of.expand_as(largest), largest, "amax")
        if see.rows:
            order, inside = chosen(see, tile)
            found["rows"][batch, heads, order, columns] = powers[:, inside]
        if see.top:
            values, keys = powers.topk(min(see.top, len(tile.columns)), dim=-1)
            keys = (keys + columns.start).masked_fill_(values == 0, -1)
            found["top_weights"][place][..., : values.shape[-1]] = values
            found["top_keys"][place][..., : values.shape[-1]] = keys
        if see.weights:
            found["weights"][place][..., columns] = powers

    def _pool(
        self, see: See, tile: Tile, batch: int, heads: slice, powers: Tensor, inverse: Tensor
    ) -> None:
        """Sums over queries: one product with a row of 1/total for each bin of the map."""
        found, extent = self.found, self.call.extent
        columns = slice(tile.columns.start, tile.columns.stop)
        if see.map is None:
            inverse = inverse.transpose(1, 2)  # [h, 1, q]
            found["received"][batch, heads, columns] += torch.bmm(inverse, powers)[:, 0]
            return
        binned = bin_rows(see, extent, tile.rows)
        select = inverse.new_zeros(inverse.shape[0], len(binned), len(tile.rows))
        for place, (_, inside) in enumerate(binned):
            part = slice(inside.start - tile.rows.start, inside.stop - tile.rows.start)
            select[:, place, part] = inverse[:, part, 0]
        sums = torch.bmm(select, powers)  # [h, bins, k]
        if see.received:
            found["received"][batch, heads, columns] += sums.sum(1)
        column_of = bins(extent.keys, see.grid[1], powers.device)[columns]
        first, last = binned[0][0], binned[-1][0] + 1
        found["map"][batch, heads, first:last].index_add_(2, column_of, sums)
        attends = (select > 0).sum(-1).to(select.dtype)
        found["map_count"][batch, heads, first:last] += attends


def _pick(tensor: Tensor, batch: int, heads: slice) -> Tensor:
    """One sequence and some key heads of a [b, g, r, q, k] tensor that may have 1 of either."""
    tensor = tensor[batch if tensor.shape[0] > 1 else 0]
    return tensor[heads] if tensor.shape[0] > 1 else tensor


def _room(call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
    """Where each field asked for is gathered; what no block touches holds what nothing means."""
    see, extent = call.see, call.extent
    if see is None:
        return {}
    options: Any = {"device": extent.device, "dtype": dtype}
    b, h, q, k = extent.batch, extent.heads, extent.queries, extent.keys
    room = {}
    for name in ("entropy", "peak", "distance"):
        if getattr(see, name):
            room[name] = torch.zeros(b, h, q, **options)
    if see.lse:
        room["lse"] = torch.full((b, h, q), -math.inf, **options)
    if see.max_logit:
        room["max_logit"] = torch.full((b, h), -math.inf, **options)
    if see.received:
        room["received"] = torch.zeros(b, h, k, **options)
    if see.top:
        room["top_weights"] = torch.zeros(b, h, q, see.top, **options)
        room["top_keys"] = torch.full((b, h, q, see.top), -1, device=extent.device)
    if see.rows:
        room["rows"] = torch.zeros(b, h, len(see.rows), k, **options)
    if see.map is not None:
        rows, columns = grid_of(see, extent)
        room["map"] = torch.zeros(b, h, rows, columns, **options)
        room["map_count"] = torch.zeros(b, h, rows, **options)
        if see.map_peak:
            room["map_peak"] = torch.zeros(b, h, rows, columns, **options)
    if see.weights:
        room["weights"] = torch.zeros(b, h, q, k, **options)
    return room
