# mypy: ignore-errors
# ruff: noqa: RET505 - a branch that is not taken must not be compiled
"""Sums over queries, from the final log-sum-exp: received, map and map_peak.

    P_ij = 2^(score_ij + neg_lse_i)         received_j = sum over i of P_ij
    map_peak = the largest P_ij of a cell   map = (sum of the P_ij of a cell) / n

Here n is the number of queries in the map row that attend to at least one key. The kernel stores
the sums, and ``launch`` divides them by n.

One program owns a block of keys of one head, and streams over the queries. Its tiles are K Q^T, so
a thread sums over queries in its own registers. Programs share no sums, so there are no atomics,
and repeated calls give bitwise equal results.

Blocks follow the map's bins. A block has G bins of at most W keys, or a part of one bin (G is 1).
A tile has H bins of at most U queries, or a part of one bin (H is 1). If the width of a bin is not
a power of two, the rest of its W or U places stays empty. The kernel sums over X keys at a time, as
many as one warp holds: a sum over all keys of a bin would need shared memory and a barrier for each
tile. PyTorch adds these sums afterwards, a small tensor.

A thread holds two of every eight columns of a product, and four threads share a row. So if a tile
has several bins, its queries are interleaved such that one thread gets all queries of a bin.

Called by ``launch.columns``.

Test: ``pytest tests/kernels/test_triton.py -k maps_of_any_grid``.
"""

import triton
import triton.language as tl

from regard.kernels import sizes
from regard.kernels.triton.tiles import (
    INTERVAL,
    RELATIVE,
    TABLE,
    allowed,
    by_distance,
    by_queries,
    edge,
    head_of,
    query_stretches,
    range_of,
    rows_of,
    scores,
    shifts,
    start_of,
    whose,
)

LANES = tl.constexpr(sizes.LANES)
PAIR = tl.constexpr(sizes.PAIR)
TEAM, TILE = (
    tl.constexpr(sizes.ROWS),
    tl.constexpr(sizes.BLOCK),
)  # keys of a warpgroup and queries of a tile, in hopper/


@triton.jit
def _tile_of(query, queries, bins, tiles, H: tl.constexpr, U: tl.constexpr, EVEN: tl.constexpr):
    """Return the index of the tile that has a query."""
    if EVEN:
        return query // (H * U)
    index = (query.to(tl.int64) * bins // queries).to(tl.int32)
    return index // H * tiles + (query - edge(index, queries, bins)) // U * (tiles > 1)


@triton.constexpr_function
def _interleaved(H, U):
    """Whether the queries of a tile are interleaved by bins."""
    return H % LANES.value == 0 and U % PAIR.value == 0


@triton.jit
def _places(H: tl.constexpr, U: tl.constexpr):
    """Return for each place in a tile the bin of its query, and the query's index in the bin."""
    place = tl.arange(0, H * U)
    if _interleaved(H, U):
        lane = place // PAIR % LANES
        turn = place // (PAIR * LANES)
        return turn // (U // PAIR) * LANES + lane, turn % (U // PAIR) * PAIR + place % PAIR
    else:
        return place // U, place % U


@triton.jit
def _binned(p, KEYS: tl.constexpr, H: tl.constexpr, U: tl.constexpr, PEAK: tl.constexpr):
    """Return the sum, or with PEAK the maximum, of a tile's weights over the queries of each bin.

    The shape is [KEYS, ., .]: the bins lie along two axes. Along a single axis they could leave a
    gap between the threads that share a row, and Triton 3.6 cannot sum across this gap.
    """
    if _interleaved(H, U):
        parts = tl.reshape(p, [KEYS, H // LANES, U // PAIR, LANES, PAIR])
        if PEAK:
            return tl.max(tl.max(parts, 4), 2)
        else:
            return tl.sum(tl.sum(parts, 4), 2)
    else:
        parts = tl.reshape(p, [KEYS, H, U])
        if PEAK:
            return tl.max(parts, 2)[:, None, :]
        else:
            return tl.sum(parts, 2)[:, None, :]


@triton.jit
def _stretch(
    received, pooled, largest, k, query, neg_lse_at, Map, MapPeak, start, stop, key_at, valid, side,
    batch, head, ends, terms, shifted, its_batch, origin, until, offset, queries, keys, bins, tiles,
    units, width,
    G: tl.constexpr, W: tl.constexpr, H: tl.constexpr, U: tl.constexpr, X: tl.constexpr,
    BD: tl.constexpr, D_EVEN: tl.constexpr, EVEN: tl.constexpr, FULL_KEYS: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FREE: tl.constexpr,
    RECEIVED: tl.constexpr, MAP: tl.constexpr, MAP_PEAK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the weights of the tiles from ``start`` to ``stop``."""
    dims = tl.arange(0, BD)[:, None]
    slot, within = _places(H, U)
    unit = tl.arange(0, G * W // X)
    q_at = head_of(query, batch, head) + dims
    if EVEN:  # from tile to tile all places move by the same step
        inner = slot * U + within
        q_at += inner[None, :].to(tl.int64) * query.row
    for tile in tl.range(start, stop, num_stages=1 if BIAS == TABLE and not FREE else None):
        if EVEN:
            first = tile * (H * U)
            row = first + inner
            real = row < queries
            tile_at = q_at + first.to(tl.int64) * query.row
        else:
            index = tile // tiles * H + slot
            row = edge(index, queries, bins) + tile % tiles * U + within
            real = (index < bins) & (row < edge(index + 1, queries, bins))
            row = tl.minimum(row, queries - 1)
            tile_at = q_at + row[None, :].to(tl.int64) * query.row
        if EVEN and D_EVEN and FREE:
            q = tl.load(tile_at)
        else:
            q = tl.load(tile_at, mask=real[None, :] & (dims < width), other=0.0)
        if BIAS == RELATIVE:
            real &= (row >= origin) & (row < until)
        # A query without keys, or an empty place, has weight 2^-inf = 0.
        neg_lse = tl.load(neg_lse_at + row, mask=real, other=float("-inf"))
        dots = tl.dot(k, q, input_precision=PRECISION)  # [keys, queries]
        query_at = row + offset
        s, _slope = scores(
            dots, query_at[None, :], key_at[:, None], side, terms, head, BIAS, SOFTCAP, FREE
        )
        may = real[None, :]
        if not FREE:
            low, high = range_of(ends, batch, row, real, KIND)
            may &= allowed(
                query_at[None, :], key_at[:, None], low[None, :], high[None, :], keys, KIND
            )
        if BIAS == RELATIVE:
            its_row, there = (row - origin)[None, :], may & valid[:, None]
            s += shifts(shifted, its_batch, head, its_row, there, key_at[:, None])
        p = tl.exp2(s + neg_lse[None, :])
        if not FREE:
            p = tl.where(may, p, 0.0)
        if MAP and not FULL_KEYS:
            p = tl.where(valid[:, None], p, 0.0)
        if MAP:
            if H == 1:
                fresh = tile % tiles == 0  # the first tile of a bin
                sums = tl.sum(p, 1)
                received += sums
                pooled = tl.where(fresh, 0.0, pooled) + sums
                if MAP_PEAK:
                    largest = tl.maximum(tl.where(fresh, 0.0, largest), tl.max(p, 1))
                if (tile % tiles == tiles - 1) | (tile == stop - 1):  # or the last tile of the loop
                    at = tile // tiles * units + unit
                    tl.store(Map + at, tl.sum(tl.reshape(pooled, [G * W // X, X]), 1))
                    if MAP_PEAK:
                        tl.store(MapPeak + at, tl.max(tl.reshape(largest, [G * W // X, X]), 1))
            else:
                sums = _binned(p, G * W, H, U, False)
                if RECEIVED:
                    received += tl.sum(tl.sum(sums, 1), 1)
                bin_at = tile * H + tl.arange(0, H)
                at = bin_at[None, :] * units + unit[:, None]
                fits = (bin_at < bins)[None, :] & (unit == unit)[:, None]
                cells = tl.reshape(sums, [G * W // X, X, H])
                tl.store(Map + at, tl.sum(cells, 1), mask=fits)
                if MAP_PEAK:
                    cells = tl.reshape(_binned(p, G * W, H, U, True), [G * W // X, X, H])
                    tl.store(MapPeak + at, tl.max(cells, 1), mask=fits)
        else:
            received += tl.sum(p, 1)
    return received, pooled, largest


@triton.jit(do_not_specialize=["sequence", "origin", "until", "queries", "keys"])
def columns(
    query, key, NegLse, Received, Map, MapPeak, Bounds, bounds_batch, ends, terms, shifted,
    sequence, origin, until, heads, groups, queries, keys, width, bins, tiles, columns, parts,
    G: tl.constexpr, W: tl.constexpr, H: tl.constexpr, U: tl.constexpr, X: tl.constexpr,
    BD: tl.constexpr, D_EVEN: tl.constexpr, EVEN: tl.constexpr, FULL_KEYS: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, RECEIVED: tl.constexpr,
    MAP: tl.constexpr, MAP_PEAK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store sums for a block of keys.

    With Transformer-XL's term, sum only over the queries from ``origin`` to ``until``.
    """
    batch, head = whose(heads)
    if BIAS == RELATIVE:
        batch += sequence
    SIDES: tl.constexpr = by_distance(BIAS)
    offset = start_of(ends, batch, queries, keys)

    block = tl.program_id(0)
    place = tl.arange(0, G * W)
    if FULL_KEYS:  # blocks follow each other without gaps
        first = block * (G * W)
        last = first + G * W - 1
        key_at = first + place
        valid = key_at < keys
    else:
        column, part = block // parts * G, block % parts
        index = column + place // W
        key_at = edge(index, keys, columns) + part * W + place % W
        valid = (index < columns) & (key_at < edge(index + 1, keys, columns))
        first = edge(column, keys, columns) + part * W
        last = edge(tl.minimum(column + G, columns), keys, columns) - 1
        if G == 1:
            last = tl.minimum(first + W - 1, last)

    k = rows_of(key, batch, head // groups, tl.minimum(key_at, keys - 1), valid, width, BD)
    flat = batch * heads + head
    neg_lse_at = NegLse + flat * queries
    bounds = Bounds
    if KIND == INTERVAL:
        bounds += batch * bounds_batch + block * 4
    map_at, peak_at = Map, MapPeak
    units = (tl.num_programs(0) * (G * W // X)).to(tl.int64)
    if MAP:
        cell = flat * bins * units + block * (G * W // X)
        map_at += cell
        if MAP_PEAK:
            peak_at += cell

    if first <= last:
        received = tl.zeros([G * W], tl.float32)
        pooled = tl.zeros([G * W], tl.float32)
        largest = tl.zeros([G * W], tl.float32)
        if EVEN:
            ends_at = query_stretches(
                bounds, first, last, offset, queries, terms.reach, H * U, KIND, SIDES
            )
            for PART in tl.static_range(5):
                if by_queries(PART, KIND, SIDES):
                    start, stop = ends_at[PART] // (H * U), ends_at[PART + 1] // (H * U)
                    if BIAS == RELATIVE:
                        start = tl.maximum(start, origin // (H * U))
                        stop = tl.minimum(stop, tl.cdiv(until, H * U))
                    received, pooled, largest = _stretch(
                        received, pooled, largest, k, query, neg_lse_at, map_at, peak_at, start,
                        stop, key_at, valid, -1.0 if PART == 1 else 1.0, batch, head, ends, terms,
                        shifted, batch - sequence, origin, until, offset, queries, keys, bins,
                        tiles, units, width, G, W, H, U, X, BD, D_EVEN, EVEN, FULL_KEYS, KIND, BIAS,
                        SOFTCAP, PART % 2 == 1, RECEIVED, MAP, MAP_PEAK, PRECISION,
                    )  # fmt: skip
        else:  # any tile may have empty places, so all tiles are masked
            ends_at = query_stretches(
                bounds, first, last, offset, queries, terms.reach, 1, KIND, SIDES
            )
            final = tl.maximum(ends_at[5] - 1, 0)
            stop = tl.where(
                ends_at[0] < ends_at[5], _tile_of(final, queries, bins, tiles, H, U, EVEN) + 1, 0
            )
            start = tl.minimum(
                _tile_of(tl.minimum(ends_at[0], queries - 1), queries, bins, tiles, H, U, EVEN),
                stop,
            )
            if BIAS == RELATIVE:
                begin = _tile_of(origin, queries, bins, tiles, H, U, EVEN)
                start = tl.maximum(start, begin)
                stop = tl.minimum(stop, _tile_of(until - 1, queries, bins, tiles, H, U, EVEN) + 1)
            received, pooled, largest = _stretch(
                received, pooled, largest, k, query, neg_lse_at, map_at, peak_at, start, stop,
                key_at, valid, 1.0, batch, head, ends, terms, shifted, batch - sequence, origin,
                until, offset, queries, keys, bins,
                tiles, units, width, G, W, H, U, X, BD, D_EVEN, EVEN, FULL_KEYS, KIND, BIAS,
                SOFTCAP, False, RECEIVED, MAP, MAP_PEAK, PRECISION,
            )  # fmt: skip
        if RECEIVED:
            tl.store(Received + flat * keys + key_at, received, mask=valid)


@triton.jit(do_not_specialize=["count", "each", "high", "offset"])
def pool(
    Cells, Peaks, Map, MapPeak, count, rows, columns, units, each, high, offset,
    PARTS: tl.constexpr, UNIT: tl.constexpr, BC: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, CAUSAL: tl.constexpr, PEAK: tl.constexpr,
):  # fmt: skip
    """Make a map from the sums over UNIT keys that the kernels for Hopper store.

    A cell has ``each`` units of keys, and ``high`` queries in PARTS parts. EVEN: ``each`` is BK, so
    a thread can load several units at once. CAUSAL: the kernels for Hopper store no sums where no
    query of a tile attends to any key of a warpgroup, so these places are not read.
    """
    cell = tl.program_id(0) * BC + tl.arange(0, BC)
    inside = cell < count
    row = cell // columns
    sums = tl.zeros([BC], tl.float32)
    highest = tl.zeros([BC], tl.float32)
    if EVEN:
        each = BK
    for start in range(0, each, BK):
        step = start + tl.arange(0, BK)[None, :]
        unit = (cell % columns * each)[:, None] + step
        there = inside[:, None] & (step < each)
        if CAUSAL:
            first = tl.maximum(unit * UNIT // TEAM * TEAM - offset, 0) // TILE
            there &= ((row % rows + 1) * high - 1)[:, None] // TILE >= first
        for part in tl.static_range(PARTS):
            at = (row.to(tl.int64) * PARTS + part)[:, None] * units + unit
            sums += tl.sum(tl.load(Cells + at, mask=there, other=0.0), 1)
            if PEAK:
                highest = tl.maximum(highest, tl.max(tl.load(Peaks + at, mask=there, other=0.0), 1))
    tl.store(Map + cell, sums / high, mask=inside)
    if PEAK:
        tl.store(MapPeak + cell, highest, mask=inside)
