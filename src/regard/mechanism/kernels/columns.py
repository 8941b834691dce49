# mypy: ignore-errors
"""What keys receive, and the map of the weights: sums over queries, from the final log-sum-exp.

One program is one block of keys of one head, and streams over the queries. Its tiles are K Q^T, so
that sums over queries run along the registers of a thread, and no two programs add to one number:
no atomics, and every repeat gives the same bits.

Blocks follow the map's bins. Along the keys a block is G bins of at most W keys (or a part of one
bin), along the queries a tile is H bins of at most U queries (or a part of one, and then H is 1); a
bin that is not a power of two wide leaves the rest of its W or U places empty. Keys are summed X at
a time only, as many as one warp holds: summing all keys of a bin would take shared memory and a
barrier for each tile. The rest is a sum over a small tensor afterwards.
"""

import triton
import triton.language as tl

from regard.mechanism.kernels.tiles import (
    CAUSAL,
    INTERVAL,
    LOG2E,
    PLAIN,
    TABLE,
    allowed,
    edge,
    query_stretches,
    scores,
)


@triton.jit
def _tile_of(query, queries, bins, tiles, H: tl.constexpr, U: tl.constexpr, EVEN: tl.constexpr):
    """The tile a query is in."""
    if EVEN:
        return query // (H * U)
    index = (query.to(tl.int64) * bins // queries).to(tl.int32)
    return index // H * tiles + (query - edge(index, queries, bins)) // U * (tiles > 1)


@triton.jit
def _stretch(
    received, pooled, largest, k, q_head_at, lse_at, low_at, high_at, Map, MapPeak, start, stop,
    key_at, valid, side, offset, queries, keys, bins, tiles, units, q_row, scale,
    softcap, table, reach, width,
    G: tl.constexpr, W: tl.constexpr, H: tl.constexpr, U: tl.constexpr, X: tl.constexpr,
    BD: tl.constexpr,
    D_EVEN: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, FREE: tl.constexpr, RECEIVED: tl.constexpr, MAP: tl.constexpr,
    MAP_PEAK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go over the tiles from ``start`` to ``stop``."""
    dims, place = tl.arange(0, BD), tl.arange(0, H * U)
    unit = tl.arange(0, G * W // X)
    for tile in tl.range(start, stop, num_stages=1 if BIAS == TABLE and not FREE else None):
        if EVEN:
            query = tile * (H * U) + place
            real = query < queries
        else:
            index = tile // tiles * H + place // U
            query = edge(index, queries, bins) + tile % tiles * U + place % U
            real = (index < bins) & (query < edge(index + 1, queries, bins))
            query = tl.minimum(query, queries - 1)
        q_at = q_head_at + query[None, :].to(tl.int64) * q_row + dims[:, None]
        if EVEN and D_EVEN and FREE:
            q = tl.load(q_at)
        else:
            q = tl.load(q_at, mask=real[None, :] & (dims[:, None] < width), other=0.0)
        lse = tl.load(lse_at + query, mask=real, other=float("inf"))
        # A query that attends to nothing, or is not there, gives nothing: 2^-inf.
        lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
        dots = tl.dot(k, q, input_precision=PRECISION)  # [keys, queries]
        query_at = query + offset
        s, _slope = scores(
            dots, query_at[None, :], key_at[:, None], side, scale, softcap, table, reach,
            BIAS, SOFTCAP, FREE,
        )  # fmt: skip
        p = tl.exp2(s - lse[None, :])
        if not FREE:
            low = query
            high = query
            if KIND == INTERVAL:
                low = tl.load(low_at + query, mask=real, other=0)
                high = tl.load(high_at + query, mask=real, other=0)
            may = allowed(
                query_at[None, :], key_at[:, None], low[None, :], high[None, :], keys, KIND
            )
            p = tl.where(may & real[None, :], p, 0.0)
        if MAP:
            fresh = tile % tiles == 0  # the first tile of a bin
            if H == 1:
                sums = tl.sum(p, 1)
                if RECEIVED:
                    received += sums
                pooled = tl.where(fresh, 0.0, pooled) + sums
                cells = tl.reshape(tl.where(valid, pooled, 0.0), [G * W // X, X])
                at = tile // tiles * units + unit
                tl.store(Map + at, tl.sum(cells, 1))
                if MAP_PEAK:
                    largest = tl.maximum(tl.where(fresh, 0.0, largest), tl.max(p, 1))
                    cells = tl.reshape(tl.where(valid, largest, 0.0), [G * W // X, X])
                    tl.store(MapPeak + at, tl.max(cells, 1))
            else:  # bins narrower than any tile
                binned = tl.reshape(tl.where(valid[:, None], p, 0.0), [G * W, H, U])
                sums = tl.sum(binned, 2)
                if RECEIVED:
                    received += tl.sum(sums, 1)
                row = tile * H + tl.arange(0, H)
                at = row[None, :] * units + unit[:, None]
                fits = (row < bins)[None, :] & (unit == unit)[:, None]
                tl.store(Map + at, tl.sum(tl.reshape(sums, [G * W // X, X, H]), 1), mask=fits)
                if MAP_PEAK:
                    cells = tl.reshape(tl.max(binned, 2), [G * W // X, X, H])
                    tl.store(MapPeak + at, tl.max(cells, 1), mask=fits)
        else:
            received += tl.sum(p, 1)
    return received, pooled, largest


@triton.jit(do_not_specialize=["queries", "keys"])
def columns(
    Q, K, Lse, Received, Map, MapPeak, Bounds, Low, High, Table,
    q_batch, q_head, q_row, k_batch, k_head, k_row, low_batch, high_batch, bounds_batch, table_head,
    heads, groups, queries, keys, width, scale, softcap, reach, bins, tiles, columns, parts,
    G: tl.constexpr, W: tl.constexpr, H: tl.constexpr, U: tl.constexpr, X: tl.constexpr,
    BD: tl.constexpr,
    D_EVEN: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, RECEIVED: tl.constexpr, MAP: tl.constexpr, MAP_PEAK: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    SIDES: tl.constexpr = BIAS != PLAIN
    offset = keys - queries

    block = tl.program_id(0)
    column, part = block // parts * G, block % parts
    place = tl.arange(0, G * W)
    index = column + place // W
    key_at = edge(index, keys, columns) + part * W + place % W
    valid = (index < columns) & (key_at < edge(index + 1, keys, columns))
    key = edge(column, keys, columns) + part * W
    last = edge(tl.minimum(column + G, columns), keys, columns) - 1
    if G == 1:
        last = tl.minimum(key + W - 1, last)

    dims = tl.arange(0, BD)
    k_at = K + batch * k_batch + (head // groups) * k_head + dims[None, :]
    k_at += tl.minimum(key_at, keys - 1)[:, None].to(tl.int64) * k_row
    k = tl.load(k_at, mask=valid[:, None] & (dims[None, :] < width), other=0.0)
    q_head_at = Q + batch * q_batch + head * q_head
    lse_at = Lse + tl.program_id(1).to(tl.int64) * queries
    table = Table
    if BIAS != PLAIN:
        table += head * table_head
    low_at, high_at, bounds = Low, High, Bounds
    if KIND == INTERVAL:
        low_at += batch * low_batch
        high_at += batch * high_batch
        bounds += batch * bounds_batch + block * 4
    map_at, peak_at = Map, MapPeak
    units = tl.num_programs(0) * (G * W // X)
    if MAP:
        cell = tl.program_id(1).to(tl.int64) * bins * units + block * (G * W // X)
        map_at += cell
        if MAP_PEAK:
            peak_at += cell

    if key <= last:
        if EVEN:
            start, a, b, c, d, end = query_stretches(
                bounds, key, last, offset, queries, reach, H * U, KIND, SIDES
            )
            start, a, b = start // (H * U), a // (H * U), b // (H * U)
            c, d, end = c // (H * U), d // (H * U), end // (H * U)
        else:  # every tile may have empty places: all of them are masked
            start, a, b, c, d, end = query_stretches(
                bounds, key, last, offset, queries, reach, 1, KIND, SIDES
            )
            final = tl.maximum(end - 1, 0)
            end = tl.where(start < end, _tile_of(final, queries, bins, tiles, H, U, EVEN) + 1, 0)
            start = tl.minimum(
                _tile_of(tl.minimum(start, queries - 1), queries, bins, tiles, H, U, EVEN), end
            )
            a, b, c, d = end, end, end, end
        received = tl.zeros([G * W], tl.float32)
        pooled = tl.zeros([G * W], tl.float32)
        largest = tl.zeros([G * W], tl.float32)
        # fmt: off
        if KIND != 0 or not EVEN:
            received, pooled, largest = _stretch(
                received, pooled, largest, k, q_head_at, lse_at, low_at, high_at, map_at, peak_at,
                start, a, key_at, valid, 1.0, offset, queries, keys, bins, tiles, units, q_row,
                scale, softcap, table, reach, width,
                G, W, H, U, X, BD, D_EVEN, EVEN, KIND, BIAS, SOFTCAP, False, RECEIVED, MAP,
                MAP_PEAK,
                PRECISION,
            )
        if EVEN and SIDES:
            if KIND != CAUSAL:
                received, pooled, largest = _stretch(
                    received, pooled, largest, k, q_head_at, lse_at, low_at, high_at, map_at,
                    peak_at, a, b, key_at, valid, -1.0, offset, queries, keys, bins, tiles, units,
                    q_row, scale, softcap, table, reach, width,
                    G, W, H, U, X, BD, D_EVEN, EVEN, KIND, BIAS, SOFTCAP, True, RECEIVED, MAP,
                    MAP_PEAK, PRECISION,
                )
            received, pooled, largest = _stretch(
                received, pooled, largest, k, q_head_at, lse_at, low_at, high_at, map_at, peak_at,
                a if KIND == CAUSAL else b, c, key_at, valid, 1.0, offset, queries, keys,
                bins, tiles, units, q_row, scale, softcap, table, reach, width,
                G, W, H, U, X, BD, D_EVEN, EVEN, KIND, BIAS, SOFTCAP, False, RECEIVED, MAP,
                MAP_PEAK,
                PRECISION,
            )
        if EVEN:
            received, pooled, largest = _stretch(
                received, pooled, largest, k, q_head_at, lse_at, low_at, high_at, map_at, peak_at,
                c, d, key_at, valid, 1.0, offset, queries, keys, bins, tiles, units,
                q_row, scale, softcap, table, reach, width,
                G, W, H, U, X, BD, D_EVEN, EVEN, KIND, BIAS, SOFTCAP, True, RECEIVED, MAP, MAP_PEAK,
                PRECISION,
            )
            received, pooled, largest = _stretch(
                received, pooled, largest, k, q_head_at, lse_at, low_at, high_at, map_at, peak_at,
                d, end, key_at, valid, 1.0, offset, queries, keys, bins, tiles, units, q_row,
                scale, softcap, table, reach, width,
                G, W, H, U, X, BD, D_EVEN, EVEN, KIND, BIAS, SOFTCAP, False, RECEIVED, MAP,
                MAP_PEAK,
                PRECISION,
            )
        # fmt: on
        if RECEIVED:
            at = tl.program_id(1).to(tl.int64) * keys + key_at
            tl.store(Received + at, received, mask=valid)
