"""Seeing block by block in plain PyTorch: any device, O(n) memory.

A block is some rows of queries against all the keys they may attend to, so its softmax is whole
and everything there is to see of it is at hand. Two ways to go through the blocks:

- ``by_rows``: the reference itself, a block at a time, recomputed in the backward pass. It has
  every gradient, of every field, to any order.
- ``stream``: the same numbers without gradients, in place, in two buffers that stay in the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from regard.kernels.plan import bins
from regard.mechanism.backends import reference
from regard.mechanism.call import TRANSFORMED, Call
from regard.mechanism.geometry import Hull, Tile
from regard.mechanism.masks import hulls
from regard.mechanism.seeing import Joining, Pairs, See, Seen, bin_rows, chosen, finish, grid_of

ROWS = 64  # queries a block; enough of them for a matrix product to run at full speed
SMALL = 60.0  # thousands of e to this power, a value among them, are far less than float32 holds
BLOCK = 2**20  # scores a block of ``stream`` holds, where it can choose: a few MB, near the cores


def refuses(call: Call) -> str | None:
    return TRANSFORMED if call.transformed else None


def run(call: Call) -> tuple[Tensor, Seen | None]:
    if call.wants_gradient or call.dropout or call.empty:
        return by_rows(call)
    if torch.compiler.is_compiling():  # it asks for numbers and writes in place: left as it is
        eager: Callable[[Call], tuple[Tensor, Seen | None]] = torch.compiler.disable(stream)  # type: ignore[no-untyped-call]
        return eager(call)
    return stream(call)


def all_finite(call: Call) -> bool:
    """Whether query, key and value hold numbers only; a sum is finite only if all its terms are.

    A bias may be -inf, where it keeps a query from a key.
    """
    given = [call.query, call.key, call.value]
    if call.bias is not None:
        given += [bias.where(bias != -math.inf, 0) for bias in call.bias.tensors]
    return all(math.isfinite(tensor.sum(dtype=torch.float32).item()) for tensor in given)


def by_rows(call: Call) -> tuple[Tensor, Seen | None]:
    """The reference, some rows at a time; in the backward pass each block is computed again."""
    outputs = []
    joining = None if call.see is None else Joining(call.see, call.extent)
    for rows, columns, _ in hulls(call.mask, call.extent, ROWS):
        if call.wants_gradient:
            output, found = checkpoint(
                reference.attend, call, rows, columns, use_reentrant=False,
                preserve_rng_state=call.dropout > 0,
            )  # fmt: skip
        else:
            output, found = reference.attend(call, rows, columns)
        outputs.append(output)
        if joining is not None:
            joining.add(found)
    output = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    return output, None if joining is None else joining.seen()


def stream(call: Call) -> tuple[Tensor, Seen | None]:
    """All blocks without gradients: two buffers, everything in place."""
    if not all_finite(call):
        return by_rows(call)
    with torch.no_grad():
        return _Stream(call).run()


class _Stream:
    """One streamed call: the buffers, and what has been gathered so far.

    In a block the scores of a row become powers of e, and a weight is its power over the row's
    total. So that no power overflows, a row first loses its highest score, unless queries and keys
    are too short, and values too small, for any product to be large. What can wait for the end
    waits.
    """

    def __init__(self, call: Call) -> None:
        extent, self.call, self.groups = call.extent, call, call.groups
        self.dtype = dtype = reference.compute_dtype(call)
        rows = (extent.batch, extent.heads, extent.queries)
        self.output = call.value.new_empty(*rows, call.value.shape[-1])
        self.query = call.query.to(dtype) * call.scale
        self.key = call.key.to(dtype).transpose(-1, -2)  # [b, g, d, k]
        longest = self.query.norm(dim=-1).max() * self.key.norm(dim=-2).max()
        largest = max(call.value.abs().max().item(), 1.0)
        self.small = call.bias is None and longest.item() + math.log(largest) < SMALL
        # Powers of e are summed before they are divided: a long row's would pass float16's 65,504.
        self.value = call.value.to(dtype) if call.value.dtype == torch.float16 else call.value
        # Rows that no block reaches have nothing to attend to: no highest, no total.
        self.highest = call.query.new_full((*rows, 1), -math.inf, dtype=dtype)
        self.total = call.query.new_zeros(*rows, 1, dtype=dtype)
        self.found = {} if call.see is None else _room(call, dtype)
        if call.see is not None and call.see.map is not None:
            self.column_of = bins(extent.keys, call.see.grid[1], extent.device)

        self.hulls = hulls(call.mask, extent, ROWS)
        largest = max(self._heads(hull) * self._size(hull) for hull in self.hulls)
        self.buffers = [call.query.new_empty(largest, dtype=dtype) for _ in range(2)]

    def _size(self, hull: Hull) -> int:
        """How many scores one key head has in these rows."""
        return self.groups * len(hull.rows) * len(hull.columns)

    def _heads(self, hull: Hull) -> int:
        """How many key heads make a block."""
        return min(self.call.key.shape[1], max(1, BLOCK // max(self._size(hull), 1)))

    def run(self) -> tuple[Tensor, Seen | None]:
        call = self.call
        for hull in self.hulls:
            if not hull.columns:
                self.output[:, :, hull.rows.start : hull.rows.stop] = 0
                continue
            tile = Tile(call.extent, hull.rows, hull.columns)
            bias = None if call.bias is None else self._grouped(call.bias.tile(tile))
            closed = [(fringe, self._closed(hull.rows, fringe)) for fringe in hull.fringes]
            select = self._select(hull.rows)
            for batch in range(call.extent.batch):
                step = self._heads(hull)
                for head in range(0, call.key.shape[1], step):
                    self._block(tile, batch, slice(head, head + step), bias, closed, select)
        return self.output, None if call.see is None else self._finish(call.see)

    def _closed(self, rows: range, columns: range) -> Tensor:
        """Where the mask forbids, for the columns where that depends on the row."""
        assert self.call.mask is not None
        return self._grouped(~self.call.mask.tile(Tile(self.call.extent, rows, columns)))

    def _grouped(self, tensor: Tensor) -> Tensor:
        """[b, h, q, k] with heads split into key heads and the queries' heads that share one."""
        tensor = tensor.expand(*(1,) * (4 - tensor.dim()), *tensor.shape)
        batch, heads, *rest = tensor.shape
        split = (1, 1) if heads == 1 else (heads // self.groups, self.groups)
        return tensor.reshape(batch, *split, *rest)  # [b, g, r, q, k]

    def _select(self, rows: range) -> Tensor | None:
        """Which of these rows are summed together: all, or those of each bin of the map."""
        see = self.call.see
        if see is None or not (see.received or see.map is not None):
            return None
        if see.map is None:
            return self.total.new_ones(1, 1, len(rows))
        binned = bin_rows(see, self.call.extent, rows)
        select = self.total.new_zeros(1, len(binned), len(rows))
        for place, (_, inside) in enumerate(binned):
            select[:, place, inside.start - rows.start : inside.stop - rows.start] = 1
        return select

    def _block(
        self,
        tile: Tile,
        batch: int,
        heads: slice,
        bias: Tensor | None,
        closed: list[tuple[range, Tensor]],
        select: Tensor | None,
    ) -> None:
        call, groups, rows, columns = self.call, self.groups, tile.rows, tile.columns
        key = self.key[batch, heads, :, columns.start : columns.stop]  # [g, d, k]
        count, width = key.shape[0], len(columns)
        wide = slice(heads.start * groups, (heads.start + count) * groups)
        place = (batch, wide, slice(rows.start, rows.stop))
        size = count * groups * len(rows) * width

        # Heads that share a key head are so many more rows of one product.
        scores, powers = (
            buffer[:size].view(count, groups * len(rows), width) for buffer in self.buffers
        )
        torch.bmm(self.query[place].reshape(count, groups * len(rows), -1), key, out=scores)
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        split = scores.view(count, groups, len(rows), width)
        if bias is not None:
            split += _pick(bias, batch, heads)
        fringes = []
        for fringe, forbidden in closed:
            part = split[..., fringe.start - columns.start : fringe.stop - columns.start]
            fringes.append(part.masked_fill_(_pick(forbidden, batch, heads), -math.inf))

        scores = scores.view(count * groups, len(rows), width)
        powers = powers.view(count * groups, len(rows), width)
        highest, total = self.highest[place], self.total[place]  # [h, q, 1]
        torch.amax(scores, -1, keepdim=True, out=highest)
        least = torch.finfo(self.dtype).min
        if not self.small:
            # Where a row may have nothing to attend to, -inf less -inf must not become NaN.
            scores.sub_(highest.clamp(min=least) if closed or bias is not None else highest)
        torch.exp(scores, out=powers)
        torch.sum(powers, -1, keepdim=True, out=total)
        inverse = total.reciprocal()
        if closed or bias is not None:
            inverse.masked_fill_(total == 0, 0)

        value = self.value[batch, heads, columns.start : columns.stop]
        grouped = powers.view(count, groups * len(rows), width)
        output = torch.bmm(grouped.to(value.dtype), value).view(*scores.shape[:2], -1)
        self.output[place] = output * inverse
        if call.see is None:
            return
        if select is not None:
            self._pool(call.see, tile, batch, wide, select * inverse.transpose(1, 2), powers)
        if call.see.top:
            self._top(call.see, tile, place, scores, inverse)
        if call.see.entropy:
            for part in [split] if bias is not None else fringes:
                part.clamp_(min=least)  # 0 * (-inf) must count as 0
            torch.sum(scores.mul_(powers), -1, out=self.found["entropy"][place])
        self._see(call.see, tile, place, scores, powers, inverse)

    def _pool(
        self, see: See, tile: Tile, batch: int, heads: slice, select: Tensor, powers: Tensor
    ) -> None:
        """Sums over queries, one for each bin of the map."""
        columns = slice(tile.columns.start, tile.columns.stop)
        sums = torch.bmm(select, powers)  # [h, bins, k]
        if see.received:
            self.found["received"][batch, heads, columns] += sums.sum(1)
        if see.map is not None:
            first = bin_rows(see, self.call.extent, tile.rows)[0][0]
            cells = self.found["map"][batch, heads, first : first + sums.shape[1]]
            cells.index_add_(2, self.column_of[columns], sums)

    def _top(
        self,
        see: See,
        tile: Tile,
        place: tuple[int, slice, slice],
        scores: Tensor,  # [h, q, k], whose powers were taken
        inverse: Tensor,  # [h, q, 1]
    ) -> None:
        """Highest scores have the largest weights, and tell a weight of 0 from a masked key."""
        values, keys = scores.topk(min(see.top, len(tile.columns)), dim=-1)
        keys = (keys + tile.columns.start).masked_fill_(values == -math.inf, -1)
        self.found["top_keys"][place][..., : keys.shape[-1]] = keys
        self.found["top_weights"][place][..., : keys.shape[-1]] = values.exp_() * inverse

    def _see(
        self,
        see: See,
        tile: Tile,
        place: tuple[int, slice, slice],
        spare: Tensor,  # [h, q, k], free to write on
        powers: Tensor,  # [h, q, k]
        inverse: Tensor,  # [h, q, 1]
    ) -> None:
        """What needs the weights one by one."""
        found, (batch, heads, _) = self.found, place
        columns = slice(tile.columns.start, tile.columns.stop)
        if see.distance:
            distance = (tile.query_positions() - tile.key_positions()).abs()
            mean = torch.mul(powers, distance, out=spare).sum(-1, keepdim=True) * inverse
            found["distance"][place] = mean[..., 0]
        if isinstance(see.pairs, Pairs):
            places, rows, keys = see.pairs.of(tile)
            picked = Pairs.pick(powers, rows, keys) * inverse[:, rows, 0]
            found["pairs"][batch, heads, places] = picked
        if not (see.rows or see.weights or see.map_peak):
            return
        weights = powers.mul_(inverse)
        if see.map_peak:
            for row, inside in bin_rows(see, self.call.extent, tile.rows):
                part = weights[:, inside.start - tile.rows.start : inside.stop - tile.rows.start]
                largest = part.amax(1)
                cells = found["map_peak"][batch, heads, row]
                into = self.column_of[columns].expand_as(largest)
                cells.scatter_reduce_(1, into, largest, "amax")
        if see.rows:
            order, inside_tile = chosen(see, tile)
            found["rows"][batch, heads, order, columns] = weights[:, inside_tile]
        if see.weights:
            found["weights"][place][..., columns] = weights

    def _finish(self, see: See) -> Seen:
        """What could wait: fields that follow from each row's highest score and total."""
        found, extent = self.found, self.call.extent
        highest, total = self.highest[..., 0], self.total[..., 0]
        lost = total == 0
        taken = torch.zeros_like(highest) if self.small else highest  # from each score of the row
        if see.lse:
            found["lse"] = taken + total.log()
        if see.peak:
            found["peak"] = ((highest - taken).exp() / total).masked_fill_(lost, 0)
        if see.max_logit:
            found["max_logit"] = highest.amax(-1)
        if see.entropy:
            entropy = total.log() - found["entropy"] / total  # rounding may leave it just below 0
            found["entropy"] = entropy.clamp_(min=0).masked_fill_(lost, 0)
        if see.map is not None:
            rows = grid_of(see, extent)[0]
            count = total.new_zeros(*total.shape[:2], rows)
            row_of = bins(extent.queries, rows, extent.device)
            found["map_count"] = count.index_add_(2, row_of, (~lost).to(count.dtype))
        return finish(see, found, extent)


def _pick(tensor: Tensor, batch: int, heads: slice) -> Tensor:
    """One sequence and some key heads of a [b, g, r, q, k] tensor that may have 1 of either."""
    tensor = tensor[batch if tensor.shape[0] > 1 else 0]
    return tensor[heads] if tensor.shape[0] > 1 else tensor


def _room(call: Call, dtype: torch.dtype) -> dict[str, Tensor]:
    """Where the fields asked for are gathered; what no block touches holds what nothing means."""
    see, extent = call.see, call.extent
    assert see is not None
    b, h, q, k = extent.batch, extent.heads, extent.queries, extent.keys
    shapes: dict[str, tuple[int, ...]] = {
        "entropy": (b, h, q),
        "distance": (b, h, q),
        "received": (b, h, k),
        "rows": (b, h, len(see.rows), k),
        "pairs": (b, h, len(see.pairs or ())),
        "weights": (b, h, q, k),
    }
    room = {name: torch.zeros(shapes[name], device=extent.device, dtype=dtype)
            for name in see.asked if name in shapes}  # fmt: skip
    if see.map is not None:
        grid = (b, h, *grid_of(see, extent))
        room["map"] = torch.zeros(grid, device=extent.device, dtype=dtype)
        if see.map_peak:
            room["map_peak"] = torch.zeros_like(room["map"])
    if see.top:
        top = (b, h, q, see.top)
        room["top_weights"] = torch.zeros(top, device=extent.device, dtype=dtype)
        room["top_keys"] = torch.full(top, -1, device=extent.device)
    return room
