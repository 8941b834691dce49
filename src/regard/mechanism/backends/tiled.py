"""The backend 'tiled': attention by blocks in plain PyTorch, on any device, with O(n) memory.

A block is some queries with all the keys they may attend to, so its softmax is complete. There are
two loops over blocks:

- ``by_rows`` runs the reference on each block, and again in the backward pass. Every field has
  gradients of any order.
- ``stream`` computes the same numbers without gradients, in two buffers that fit the CPU cache.

A decoding step has so few queries that a block needs no buffers: ``step`` computes it in a few
operations.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch._C import _functorch
from torch.utils.checkpoint import checkpoint

from regard.errors import BackendError
from regard.kernels.plan import bins
from regard.mechanism.backends import reference
from regard.mechanism.call import TRANSFORMED, Call, vmap_randomness
from regard.mechanism.geometry import Extent, Hull, Tile
from regard.mechanism.masks import hulls
from regard.mechanism.seeing import (
    Joining,
    Pairs,
    See,
    Seen,
    bin_rows,
    chosen,
    count_rows,
    finish,
    observe,
    zeros,
)

ROWS = 64  # queries of a block; enough for fast matrix products
SMALL_SCORE = 60.0  # thousands of exp(SMALL_SCORE) sum to a number in float32's range
COMPILED_SCORES = 2**26  # the most scores of a call that a compiled graph computes at once
BLOCK_SCORES = 2**20  # the most scores of a block of ``stream`` with several heads: a few MB


def refuses(call: Call) -> str | None:
    return TRANSFORMED if call.transformed else None


def run(call: Call) -> tuple[Tensor, Seen | None]:
    if call.wants_gradient or call.dropout or call.empty:
        return by_rows(call)
    if torch.compiler.is_compiling():  # stream reads tensor values, which cannot be compiled
        if _fits_a_graph(call.extent):
            return by_rows(call)
        eager: Callable[[Call], tuple[Tensor, Seen | None]] = torch.compiler.disable(stream)  # type: ignore[no-untyped-call]
        return eager(call)
    return stream(call) if call.see is None or not has_few_rows(call) else step(call, call.see)


def has_few_rows(call: Call) -> bool:
    """Whether a call computes no more scores than there are numbers in its keys."""
    return call.groups * call.extent.queries <= call.query.shape[-1]


def _fits_a_graph(extent: Extent) -> bool:
    """Whether a compiled graph may compute all scores of a call at once."""
    return extent.batch * extent.heads * extent.queries * extent.keys <= COMPILED_SCORES


def _blocks(call: Call) -> list[tuple[range, range]]:
    """Blocks of queries with the keys they may attend to; in a compiled graph one block."""
    if torch.compiler.is_compiling() and _fits_a_graph(call.extent):
        return [(range(call.extent.queries), range(call.extent.keys))]
    return [(rows, columns) for rows, columns, _ in hulls(call.mask, call.extent, ROWS)]


def all_finite(call: Call) -> bool:
    """Whether query, key, value and bias are finite, by their sums.

    -inf in a bias is allowed: it masks a key.
    """
    tensors = [call.query, call.key, call.value]
    if call.bias is not None:
        tensors += [bias.where(bias != -math.inf, 0) for bias in call.bias.tensors]
    return all(math.isfinite(tensor.sum(dtype=torch.float32).item()) for tensor in tensors)


def by_rows(call: Call) -> tuple[Tensor, Seen | None]:
    """Run the reference block by block; the backward pass recomputes each block."""
    outputs = []
    joining = None if call.see is None else Joining(call.see, call.extent)
    for rows, columns in _blocks(call):
        if call.wants_gradient:
            output, fields = checkpoint(
                _attend_again if call.dropout else reference.attend,
                call, rows, columns, use_reentrant=False,
                preserve_rng_state=call.dropout > 0,
            )  # fmt: skip
        else:
            output, fields = reference.attend(call, rows, columns)
        outputs.append(output)
        if joining is not None:
            joining.add(fields)
    output = torch.cat(outputs, dim=2) if len(outputs) > 1 else outputs[0]
    return output, None if joining is None else joining.seen()


def _attend_again(call: Call, rows: range, columns: range) -> tuple[Tensor, dict[str, Tensor]]:
    """The reference on a block whose dropout the backward pass draws again.

    Under vmap PyTorch may refuse to draw, or draw once for each gradient of the batch.
    """
    reason = (
        "The backend 'tiled' draws dropout again in the backward pass, which batched gradients "
        "(vmap, is_grads_batched) do not allow. Pass backend='reference', take one gradient at a "
        "time, or pass randomness='same' to torch.func.vmap."
    )
    if _functorch.RandomnessType.Different in vmap_randomness():
        raise BackendError(reason)
    try:
        return reference.attend(call, rows, columns)
    except RuntimeError as error:
        if str(error).startswith("vmap: "):
            raise BackendError(reason) from error
        raise


def step(call: Call, see: See) -> tuple[Tensor, Seen | None]:
    """Compute a few queries at once, without gradients."""
    extent, groups, dtype = call.extent, call.groups, reference.compute_dtype(call)
    if call.mask is None:
        columns = range(extent.keys)
    else:
        blocks = [hull.columns for hull in hulls(call.mask, extent, ROWS)]
        columns = range(min(b.start for b in blocks), max(b.stop for b in blocks))
    if not columns:
        return by_rows(call)
    tile = Tile(extent, range(extent.queries), columns)
    batch, heads, queries, dim = call.query.shape
    inside = slice(columns.start, columns.stop)
    key, value = (t[:, :, inside].to(dtype) for t in (call.key, call.value))
    with torch.no_grad():
        # Query heads that share a key head are stacked as rows of one product.
        rows = (call.query.to(dtype) * call.scale).reshape(batch, -1, groups * queries, dim)
        scores = (rows @ key.mT).view(batch, heads, queries, len(columns))
        if call.softcap is not None:
            scores.div_(call.softcap).tanh_().mul_(call.softcap)
        if call.bias is not None:
            scores += call.bias.tile(tile)
        if call.mask is not None:
            scores.masked_fill_(~call.mask.tile(tile), -math.inf)
        inputs, sinks = scores, None
        if call.sinks is not None:
            sinks = call.sinks[:, None].to(dtype).expand(batch, -1, queries)
            inputs = torch.cat((scores, sinks[..., None]), dim=-1)
        weights = inputs.softmax(-1)
        if sinks is not None:
            weights = weights[..., :-1]
        output = weights.reshape(batch, -1, groups * queries, len(columns)) @ value
        # Not finite: a query without keys, or an input that is not, which a mask must keep out.
        if not math.isfinite(output.sum(dtype=torch.float32).item()):
            return by_rows(call)
        output = output.view(batch, heads, queries, -1).to(call.query.dtype)
        others = see.chooses or see.uses_positions or see.lse or see.max_logit
        if not others and sinks is None and len(columns) == extent.keys:
            # What is recorded of most generations, with the fewest operations.
            fields = {}
            if see.entropy:
                fields["entropy"] = torch.special.entr(weights).sum(-1)
            if see.peak:
                fields["peak"] = weights.amax(-1)
            if see.received:
                fields["received"] = weights.sum(-2)
            return output, Seen.from_dict(fields, (batch, heads, queries, extent.keys))
        lse = inputs.logsumexp(-1)
        if sinks is not None:  # all of the weight is on the sink
            lse.masked_fill_(scores.amax(-1) == -math.inf, -math.inf)
        joining = Joining(see, extent)
        joining.add(observe(see, tile, scores, weights, lse, sinks))
        return output, joining.seen()


def stream(call: Call) -> tuple[Tensor, Seen | None]:
    """Compute all blocks without gradients, in two buffers."""
    if not all_finite(call):
        return by_rows(call)
    with torch.no_grad():
        return _Stream(call).run()


class _Stream:
    """The buffers and the results of one streamed call.

    ``powers`` are the exponentials of the scores; a weight is a power divided by the total of its
    row. To avoid overflow the highest score of each row is subtracted first, unless the norms of
    queries, keys and values are small enough. Fields that need only the highest score and total of
    each row are computed at the end.
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
        bounded = call.bias is None and call.sinks is None
        self.small = bounded and longest.item() + math.log(largest) < SMALL_SCORE
        self.sinks = None if call.sinks is None else call.sinks.to(dtype)[:, None, None]
        self.value = call.value.to(dtype)
        # The values of rows without keys, which no block computes.
        self.highest = call.query.new_full((*rows, 1), -math.inf, dtype=dtype)
        self.total = call.query.new_zeros(*rows, 1, dtype=dtype)
        self.fields = {} if call.see is None else zeros(call.see, extent, dtype)
        if call.see is not None and call.see.map is not None:
            self.column_of = bins(extent.keys, call.see.grid[1], extent.device)

        self.hulls = hulls(call.mask, extent, ROWS)
        largest = max(self._heads(hull) * self._size(hull) for hull in self.hulls)
        self.buffers = [call.query.new_empty(largest, dtype=dtype) for _ in range(2)]

    def _size(self, hull: Hull) -> int:
        """The number of scores of these rows for one key head."""
        return self.groups * len(hull.rows) * len(hull.columns)

    def _heads(self, hull: Hull) -> int:
        """The number of key heads that one block computes."""
        return min(self.call.key.shape[1], max(1, BLOCK_SCORES // max(self._size(hull), 1)))

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
        """The pairs of these rows and columns that the mask forbids, grouped by key head."""
        assert self.call.mask is not None
        return self._grouped(~self.call.mask.tile(Tile(self.call.extent, rows, columns)))

    def _grouped(self, tensor: Tensor) -> Tensor:
        """Reshape [b, h, q, k] to [b, key heads, query heads per key head, q, k]."""
        tensor = tensor.expand(*(1,) * (4 - tensor.dim()), *tensor.shape)
        batch, heads, *rest = tensor.shape
        split = (1, 1) if heads == 1 else (heads // self.groups, self.groups)
        return tensor.reshape(batch, *split, *rest)  # [b, g, r, q, k]

    def _select(self, rows: range) -> Tensor | None:
        """A matrix [1, bins, rows] of 0 and 1 that sums the rows of each bin, or all rows."""
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

        # Query heads that share a key head are stacked as rows of one product.
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
        shift = self._shift(highest, wide)
        if not self.small:
            scores.sub_(shift)
        torch.exp(scores, out=powers)
        torch.sum(powers, -1, keepdim=True, out=total)
        sink = None if self.sinks is None else (self.sinks[wide] - shift).exp_()
        if sink is not None:
            total += sink
        inverse = total.reciprocal()
        if closed or bias is not None:
            inverse.masked_fill_(total == 0, 0)

        value = self.value[batch, heads, columns.start : columns.stop]
        grouped = powers.view(count, groups * len(rows), width)
        output = torch.bmm(grouped, value).view(*scores.shape[:2], -1)
        self.output[place] = output * inverse
        if call.see is None:
            return
        if select is not None:
            self._pool(call.see, tile, batch, wide, select * inverse.transpose(1, 2), powers)
        if call.see.top:
            self._top(call.see, tile, place, scores, inverse)
        if call.see.entropy:
            for part in [split] if bias is not None else fringes:
                part.clamp_(min=least)  # 0 * (-inf) counts as 0
            torch.sum(scores.mul_(powers), -1, out=self.fields["entropy"][place])
        self._see(call.see, tile, place, scores, powers, inverse, sink)

    def _shift(self, highest: Tensor, heads: slice = slice(None)) -> Tensor:
        """The number subtracted from each row's scores; finite, so that -inf minus it is -inf."""
        if self.small:
            return torch.zeros_like(highest)
        if self.sinks is not None:
            return torch.maximum(highest, self.sinks[heads])
        return highest.clamp(min=torch.finfo(self.dtype).min)

    def _pool(
        self, see: See, tile: Tile, batch: int, heads: slice, select: Tensor, powers: Tensor
    ) -> None:
        """Add to the fields that sum over queries."""
        columns = slice(tile.columns.start, tile.columns.stop)
        sums = torch.bmm(select, powers)  # [h, bins, k]
        if see.received:
            self.fields["received"][batch, heads, columns] += sums.sum(1)
        if see.map is not None:
            first = bin_rows(see, self.call.extent, tile.rows)[0][0]
            cells = self.fields["map"][batch, heads, first : first + sums.shape[1]]
            cells.index_add_(2, self.column_of[columns], sums)

    def _top(
        self,
        see: See,
        tile: Tile,
        place: tuple[int, slice, slice],
        scores: Tensor,  # [h, q, k], minus the highest score of each row
        inverse: Tensor,  # [h, q, 1]
    ) -> None:
        """Select the top keys by score: the weight of an allowed key may round to 0."""
        values, keys = scores.topk(min(see.top, len(tile.columns)), dim=-1)
        keys = (keys + tile.columns.start).masked_fill_(values == -math.inf, -1)
        self.fields["top_keys"][place][..., : keys.shape[-1]] = keys
        self.fields["top_weights"][place][..., : keys.shape[-1]] = values.exp_() * inverse

    def _see(
        self,
        see: See,
        tile: Tile,
        place: tuple[int, slice, slice],
        spare: Tensor,  # [h, q, k], a buffer to overwrite
        powers: Tensor,  # [h, q, k]
        inverse: Tensor,  # [h, q, 1]
        sink: Tensor | None,  # [h, q, 1], the power of the sink
    ) -> None:
        """Compute the fields that need single weights."""
        fields, (batch, heads, _) = self.fields, place
        columns = slice(tile.columns.start, tile.columns.stop)
        if see.uses_positions:
            distance = (tile.query_positions() - tile.key_positions()).abs()
            if distance.dim() == 4:  # each sequence has positions of its own
                distance = distance[batch]
            mean = torch.mul(powers, distance, out=spare).sum(-1, keepdim=True) * inverse
            if see.distance:
                fields["distance"][place] = mean[..., 0]
            if see.distance_variance:
                squares = torch.sub(distance, mean, out=spare).square_().mul_(powers)
                total = squares.sum(-1, keepdim=True)
                if sink is not None:
                    total += sink * mean.square()
                fields["distance_variance"][place] = (total * inverse)[..., 0]
        if isinstance(see.pairs, Pairs):
            places, rows, keys = see.pairs.of(tile)
            picked = Pairs.pick(powers, rows, keys) * inverse[:, rows, 0]
            fields["pairs"][batch, heads, places] = picked
        if not (see.rows or see.weights or see.map_peak):
            return
        weights = powers.mul_(inverse)
        if see.map_peak:
            for row, inside in bin_rows(see, self.call.extent, tile.rows):
                part = weights[:, inside.start - tile.rows.start : inside.stop - tile.rows.start]
                largest = part.amax(1)
                cells = fields["map_peak"][batch, heads, row]
                into = self.column_of[columns].expand_as(largest)
                cells.scatter_reduce_(1, into, largest, "amax")
        if see.rows:
            order, inside_tile = chosen(see, tile)
            fields["rows"][batch, heads, order, columns] = weights[:, inside_tile]
        if see.weights:
            fields["weights"][place][..., columns] = weights

    def _finish(self, see: See) -> Seen:
        """Compute the fields that need only the highest score and the total of each row."""
        fields, extent = self.fields, self.call.extent
        highest, total = self.highest[..., 0], self.total[..., 0]
        empty = highest == -math.inf
        shift = self._shift(self.highest)
        if see.entropy and self.sinks is not None:
            exponent = self.sinks - shift
            fields["entropy"] += (exponent.exp() * exponent)[..., 0]
        shift = shift[..., 0]
        if see.lse:
            fields["lse"] = (shift + total.log()).masked_fill_(empty, -math.inf)
        if see.peak:
            fields["peak"] = ((highest - shift).exp() / total).masked_fill_(empty, 0)
        if see.max_logit:
            fields["max_logit"] = highest.amax(-1)
        if see.entropy:
            entropy = total.log() - fields["entropy"] / total  # rounding may make it negative
            fields["entropy"] = entropy.clamp_(min=0).masked_fill_(empty, 0)
        if see.map is not None:
            fields["map_count"] = count_rows(see, extent, (~empty).to(total.dtype))
        return finish(see, fields, extent)


def _pick(tensor: Tensor, batch: int, heads: slice) -> Tensor:
    """Select one sequence and some key heads of a [b or 1, g or 1, r, q, k] tensor."""
    tensor = tensor[batch if tensor.shape[0] > 1 else 0]
    return tensor[heads] if tensor.shape[0] > 1 else tensor
