# mypy: ignore-errors
"""The gradient of a table of biases by distance; ``backward`` has the formulas.

A program owns a range of distances of a head, and a share of the tiles of all sequences that have
these distances. It sums in its registers and stores once; PyTorch adds the shares afterwards.
Called by ``launch._by_diagonal``.

Test: ``pytest tests/kernels/test_triton.py -k gradient_of_a_table``.
"""

import triton
import triton.language as tl

from regard.kernels.triton.backward import gradient
from regard.kernels.triton.deltas import cells_of
from regard.kernels.triton.tiles import LOG2E, RELATIVE, range_of, rows_lse, rows_of, start_of


@triton.jit
def _change(
    dots, gain, shift, batch, head, flat, rows, inside, query_at, key_at, fits, Lse, Delta,
    EntropyGrad, DistanceGrad, ReceivedGrad, MapGrad, ends, terms, queries, keys, bins, columns,
    KIND: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr,
    RECEIVED: tl.constexpr, MAP: tl.constexpr,
):  # fmt: skip
    """Return the gradient of a tile's scores; ``shift`` is the bias, ``fits`` the mask."""
    at = flat * queries + rows
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
        query_at[:, None], key_at, 1, low[:, None], high[:, None], keys, terms, head, KIND,
        RELATIVE, SOFTCAP, False, ENTROPY, DISTANCE,
    )  # fmt: skip
    return tl.where(fits, change, 0.0)


@triton.jit
def to_distances(change, B: tl.constexpr):
    """Rearrange a tile [queries, keys] to [queries, distances], [B, 2 B], least distance first."""
    back = tl.arange(0, B)[:, None] + (B - 1) - tl.arange(0, 2 * B)[None, :]
    spread = tl.gather(change, tl.minimum(tl.maximum(back, 0), B - 1), 1)
    return tl.where((back >= 0) & (back < B), spread, 0.0)


@triton.jit(do_not_specialize=["lowest", "diagonals", "batches", "queries", "keys"])
def by_diagonal(
    query, key, value, grad, Lse, Delta, EntropyGrad, DistanceGrad, ReceivedGrad, MapGrad,
    Diagonals, ends, terms, lowest, diagonals, batches, heads, groups, queries, keys, width,
    value_width, bins, columns,
    B: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, KIND: tl.constexpr,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, RECEIVED: tl.constexpr,
    MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of scores, summed over all B x B tiles with the same distances.

    Tiles lie along diagonals: on diagonal x, query i and key j of a tile have the distance
    x B + i - j. A program stores a number for each of 2 B distances, from x B - (B - 1) up.
    """
    head = tl.program_id(1).to(tl.int64)
    least = (lowest + tl.program_id(0) % diagonals) * B
    near = tl.arange(0, B)
    apart = near[:, None] - near[None, :]
    # All tiles of this program have the same bias, so it is loaded once.
    distance = tl.minimum(tl.maximum(least + apart, -terms.reach), terms.reach)
    table = terms.table + head * terms.table_head + terms.reach
    shift = tl.load(table + distance) * LOG2E
    total = tl.zeros([B, B], tl.float32)
    # The blocks of queries with keys on this diagonal; all blocks, if sequences differ in them.
    start, stop = 0, tl.cdiv(queries, B)
    if ends.starts is None:
        offset = keys - queries
        start = tl.cdiv(tl.maximum(least - offset - (B - 1), 0), B)
        stop = tl.cdiv(tl.minimum(keys - offset + least, queries), B)
    steps = tl.maximum(stop - start, 0)
    for index in range(
        tl.program_id(0) // diagonals, batches * steps, tl.num_programs(0) // diagonals
    ):
        batch = (index // steps).to(tl.int64)
        rows = (start + index % steps) * B + near
        inside = rows < queries
        query_at = rows + start_of(ends, batch, queries, keys)
        key_at = (start + index % steps) * B + query_at - rows - least + near
        real = (key_at >= 0) & (key_at < keys)
        q = rows_of(query, batch, head, rows, inside, width, BD)
        its_grad = rows_of(grad, batch, head, rows, inside, value_width, BV)
        k = rows_of(key, batch, head // groups, key_at, real, width, BD)
        v = rows_of(value, batch, head // groups, key_at, real, value_width, BV)
        dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        gain = tl.dot(its_grad, tl.trans(v), input_precision=PRECISION)
        total += _change(
            dots, gain, shift, batch, head, batch * heads + head, rows, inside, query_at,
            key_at[None, :], inside[:, None] & real[None, :], Lse, Delta, EntropyGrad,
            DistanceGrad, ReceivedGrad, MapGrad, ends, terms, queries, keys, bins, columns, KIND,
            SOFTCAP, ENTROPY, DISTANCE, RECEIVED, MAP,
        )  # fmt: skip
    place = (head * tl.num_programs(0) + tl.program_id(0)) * (2 * B) + tl.arange(0, 2 * B)
    tl.store(Diagonals + place, tl.sum(to_distances(total, B), 0))
