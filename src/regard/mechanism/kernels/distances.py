# mypy: ignore-errors
"""Gradients of what belongs to distances: a table of biases, Transformer-XL's embeddings.

``backward`` has the formulas. A program has some distances of one head, and some of all the pairs
of blocks in which they occur, whatever the sequence: it adds up in its own registers, writes once,
and the few programs that share distances are summed afterwards. No two add to one number.
"""

import triton
import triton.language as tl

from regard.mechanism.kernels.backward import gradient, to_distances
from regard.mechanism.kernels.deltas import cells_of
from regard.mechanism.kernels.tiles import (
    CAUSAL,
    LOG2E,
    RELATIVE,
    embeddings,
    head_of,
    range_of,
    rows_lse,
    rows_of,
)


@triton.jit
def _change(
    dots, gain, shift, batch, head, flat, rows, inside, key_at, fits, Lse, Delta, EntropyGrad,
    DistanceGrad, ReceivedGrad, MapGrad, ends, terms, queries, keys, bins, columns,
    KIND: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr,
    RECEIVED: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """The gradient of a tile's scores; ``shift`` is their bias, ``fits`` tells which are there."""
    at = flat * queries + rows
    query_at = (rows + keys - queries)[:, None]
    if RECEIVED:
        gain += tl.load(ReceivedGrad + flat * keys + key_at, mask=fits, other=0.0)
    if MAP:
        cells = MapGrad + flat * bins * columns
        gain += cells_of(cells, rows[:, None], tl.maximum(key_at, 0), queries, keys, bins, columns)
    lse = rows_lse(Lse + at, inside)
    common = tl.load(Delta + at, inside, other=0.0)
    entropy = common
    if ENTROPY:
        entropy = tl.load(EntropyGrad + at, inside, other=0.0)
    distance = common
    if DISTANCE:
        distance = tl.load(DistanceGrad + at, inside, other=0.0)
    low, high = range_of(ends, batch, rows, inside, KIND)
    _, change, _ = gradient(
        dots, shift, gain, lse[:, None], common[:, None], entropy[:, None], distance[:, None],
        query_at, key_at, 1, low[:, None], high[:, None], keys, terms, head, KIND, RELATIVE,
        SOFTCAP, False, ENTROPY, DISTANCE,
    )  # fmt: skip
    return tl.where(fits, change, 0.0)


@triton.jit(do_not_specialize=["lowest", "diagonals", "batches", "queries", "keys"])
def by_diagonal(
    query, key, value, grad, Lse, Delta, EntropyGrad, DistanceGrad, ReceivedGrad, MapGrad,
    Diagonals, ends, terms, lowest, diagonals, batches, heads, groups, queries, keys, width,
    value_width, bins, columns,
    B: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, KIND: tl.constexpr,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, RECEIVED: tl.constexpr,
    MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of the scores, summed over all tiles of B x B that have the same distances.

    Tiles follow the diagonal: on the one with number x, query i and key j of a tile are x B + i - j
    apart, from x B - (B - 1) on. A program writes a number for each of these 2 B distances.
    """
    head = tl.program_id(1).to(tl.int64)
    offset = keys - queries
    least = (lowest + tl.program_id(0) % diagonals) * B
    near = tl.arange(0, B)
    apart = near[:, None] - near[None, :]
    # The bias of every tile of this program: it is read once.
    distance = tl.minimum(tl.maximum(least + apart, -terms.reach), terms.reach)
    table = terms.table + head * terms.table_head + terms.reach
    shift = tl.load(table + distance) * LOG2E
    total = tl.zeros([B, B], tl.float32)
    # Blocks of queries that have keys on this diagonal.
    start = tl.cdiv(tl.maximum(least - offset - (B - 1), 0), B)
    stop = tl.cdiv(tl.minimum(keys - offset + least, queries), B)
    steps = tl.maximum(stop - start, 0)
    for index in range(
        tl.program_id(0) // diagonals, batches * steps, tl.num_programs(0) // diagonals
    ):
        batch = (index // steps).to(tl.int64)
        rows = (start + index % steps) * B + near
        inside = rows < queries
        key_at = (start + index % steps) * B + offset - least + near
        real = (key_at >= 0) & (key_at < keys)
        q = rows_of(query, batch, head, rows, inside, width, BD)
        its_grad = rows_of(grad, batch, head, rows, inside, value_width, BV)
        k = rows_of(key, batch, head // groups, key_at, real, width, BD)
        v = rows_of(value, batch, head // groups, key_at, real, value_width, BV)
        dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        gain = tl.dot(its_grad, tl.trans(v), input_precision=PRECISION)
        total += _change(
            dots, gain, shift, batch, head, batch * heads + head, rows, inside, key_at[None, :],
            inside[:, None] & real[None, :], Lse, Delta, EntropyGrad, DistanceGrad, ReceivedGrad,
            MapGrad, ends, terms, queries, keys, bins, columns, KIND, SOFTCAP, ENTROPY, DISTANCE,
            RECEIVED, MAP,
        )  # fmt: skip
    place = (head * tl.num_programs(0) + tl.program_id(0)) * (2 * B) + tl.arange(0, 2 * B)
    tl.store(Diagonals + place, tl.sum(to_distances(total, B), 0))


@triton.jit
def _aligned(product, B: tl.constexpr):
    """From the keys around B queries, [queries, 2 B], to their distances: [queries, B]."""
    near = tl.arange(0, B)
    return tl.gather(product, near[:, None] - near[None, :] + (B - 1), 1)


@triton.jit(do_not_specialize=["count", "batches", "queries", "keys"])
def by_far(
    query, key, value, grad, Lse, Delta, EntropyGrad, DistanceGrad, ReceivedGrad, MapGrad,
    FarGrad, ends, terms, relative, count, batches, heads, groups, queries, keys, width,
    value_width, bins, columns,
    B: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, BU: tl.constexpr, KIND: tl.constexpr,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, RECEIVED: tl.constexpr,
    MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of Transformer-XL's embeddings; a program has one of ``count`` blocks of them.

    Here the embeddings lie straight, and keys and values are multiplied with too many and shifted.
    Distances run from 1 - queries, where the first query meets the last key, to keys - 1.
    """
    head = tl.program_id(1).to(tl.int64)
    offset = keys - queries
    near = tl.arange(0, B)
    dims, value_dims = tl.arange(0, BD)[:, None], tl.arange(0, BV)[:, None]
    least = tl.program_id(0) % count * B - (queries - 1)  # from a key to a query after it
    table = embeddings(relative, head, least, B, BU)
    total = tl.zeros([B, BU], tl.float32)
    # Queries at positions that have keys at these distances: 0 <= position - distance < keys.
    start = tl.maximum(least - offset, 0) // B * B
    stop = tl.minimum(least + B - 1 + keys - offset, queries)
    if KIND == CAUSAL and least + B <= 0:
        stop = 0
    steps = tl.cdiv(tl.maximum(stop - start, 0), B)
    for index in range(tl.program_id(0) // count, batches * steps, tl.num_programs(0) // count):
        batch = (index // steps).to(tl.int64)
        row = start + index % steps * B
        rows = row + near
        inside = rows < queries
        # The keys at these distances from these queries, and some more: 2 B in a row.
        around = row + offset - (least + B - 1) + tl.arange(0, 2 * B)
        real = ((around >= 0) & (around < keys))[None, :]
        beside = around[None, :].to(tl.int64)
        k_at = head_of(key, batch, head // groups) + beside * key.row + dims
        v_at = head_of(value, batch, head // groups) + beside * value.row + value_dims
        k = tl.load(k_at, mask=real & (dims < width), other=0.0)
        v = tl.load(v_at, mask=real & (value_dims < value_width), other=0.0)
        q = rows_of(query, batch, head, rows, inside, width, BD)
        its_grad = rows_of(grad, batch, head, rows, inside, value_width, BV)
        second = rows_of(relative.query, batch, head, rows, inside, relative.width, BU)
        dots = _aligned(tl.dot(q, k, input_precision=PRECISION), B)
        gain = _aligned(tl.dot(its_grad, v, input_precision=PRECISION), B)
        shift = tl.dot(second, table, input_precision=PRECISION) * (relative.scale * LOG2E)
        key_at = (rows + offset)[:, None] - (least + near)[None, :]
        fits = (key_at >= 0) & (key_at < keys) & inside[:, None]
        change = _change(
            dots, gain, shift, batch, head, batch * heads + head, rows, inside, key_at, fits, Lse,
            Delta, EntropyGrad, DistanceGrad, ReceivedGrad, MapGrad, ends, terms, queries, keys,
            bins, columns, KIND, SOFTCAP, ENTROPY, DISTANCE, RECEIVED, MAP,
        )  # fmt: skip
        total = tl.dot(tl.trans(change.to(second.dtype)), second, total, input_precision=PRECISION)
    dims = tl.arange(0, BU)[None, :]
    place = (head * tl.num_programs(0) + tl.program_id(0)) * B + near
    tl.store(
        FarGrad + place[:, None] * relative.width + dims,
        total * relative.scale,
        mask=dims < relative.width,
    )
