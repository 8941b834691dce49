# mypy: ignore-errors
"""delta [batch, heads, queries], a term of the gradients of all scores of a row.

``backward`` has the formula. Called by ``launch.backward``.
"""

import triton
import triton.language as tl

from regard.kernels.triton.tiles import (
    RELATIVE,
    TABLE,
    allowed,
    columns_at,
    key_stretches,
    range_of,
    rows_lse,
    rows_of,
    scores,
    shifts,
    start_of,
    whose,
)


@triton.jit
def cells_of(grid, query, key_at, queries, keys, bins, columns):
    """Load the gradient of the map's cell for each pair of a tile."""
    row = query.to(tl.int64) * bins // queries
    column = key_at.to(tl.int64) * columns // keys
    inside = (query < queries) & (key_at < keys)
    return tl.load(grid + row * columns + column, mask=inside, other=0.0)


@triton.jit
def delta(
    out, grad, Lse, LseGrad, Entropy, EntropyGrad, Distance, DistanceGrad, Extra, Delta,
    heads, queries, value_width,
    BM: tl.constexpr, BV: tl.constexpr, GRAD: tl.constexpr, LSE: tl.constexpr,
    ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """Store the delta of BM rows."""
    batch, head = whose(heads)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < queries
    at = tl.program_id(1).to(tl.int64) * queries + rows
    sums = tl.zeros([BM], tl.float32)
    if GRAD:
        output = rows_of(out, batch, head, rows, inside, value_width, BV)
        its_grad = rows_of(grad, batch, head, rows, inside, value_width, BV)
        sums = tl.sum(output.to(tl.float32) * its_grad.to(tl.float32), 1)
    if LSE:
        sums -= tl.load(LseGrad + at, inside, other=0.0)
    if ENTROPY:
        sums += tl.load(Entropy + at, inside, other=0.0) * tl.load(EntropyGrad + at, inside, 0.0)
    if DISTANCE:
        sums += tl.load(Distance + at, inside, other=0.0) * tl.load(DistanceGrad + at, inside, 0.0)
    if EXTRA:
        sums += tl.load(Extra + at, inside, other=0.0)
    empty = tl.load(Lse + at, inside, other=0.0) == float("-inf")
    tl.store(Delta + at, tl.where(empty, 0.0, sums), mask=inside)


@triton.jit(do_not_specialize=["sequence", "origin", "queries", "keys"])
def expected(
    query, key, Lse, ReceivedGrad, MapGrad, Extra, ends, terms, shifted, sequence, origin,
    heads, groups, queries, keys, width, bins, columns,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, RECEIVED: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store for each query the sum of its weights times the gradients of received and map."""
    batch, head = whose(heads)
    row = tl.program_id(0) * BM
    if BIAS == RELATIVE:
        row += origin
        batch += sequence
    offset = start_of(ends, batch, queries, keys)
    rows = row + tl.arange(0, BM)
    dims, near = tl.arange(0, BD)[:, None], tl.arange(0, BN)
    inside = rows < queries
    query_at = rows + offset
    q = rows_of(query, batch, head, rows, inside, width, BD)
    k_tile = columns_at(key, batch, head // groups, BN, BD)
    flat = batch * heads + head
    lse = rows_lse(Lse + flat * queries + rows, inside)
    low, high = range_of(ends, batch, rows, inside, KIND)
    last = tl.minimum(row + BM, queries) - 1
    parts = key_stretches(ends, batch, row, last, offset, keys, terms.reach, BN, KIND, False)
    sums = tl.zeros([BM], tl.float32)
    for n in tl.range(parts[0], parts[5], BN, num_stages=1 if BIAS == TABLE else None):
        n = tl.multiple_of(n, BN)
        key_at = n + near
        real = key_at < keys
        k = tl.load(
            k_tile + n.to(tl.int64) * key.row, mask=(dims < width) & real[None, :], other=0.0
        )
        dots = tl.dot(q, k, input_precision=PRECISION)
        s, _slope = scores(
            dots, query_at[:, None], key_at[None, :], 1.0, terms, head, BIAS, SOFTCAP, False
        )
        may = allowed(query_at[:, None], key_at[None, :], low[:, None], high[:, None], keys, KIND)
        if BIAS == RELATIVE:
            its_row = (rows - origin)[:, None]
            s += shifts(shifted, batch - sequence, head, its_row, inside[:, None], key_at[None, :])
        p = tl.exp2(s - lse[:, None])
        p = tl.where(may, p, 0.0)
        gain = tl.zeros([BM, BN], tl.float32)
        if RECEIVED:
            at_key = ReceivedGrad + flat * keys + key_at
            gain += tl.load(at_key, mask=real, other=0.0)[None, :]
        if MAP:
            cells = MapGrad + flat * bins * columns
            gain += cells_of(cells, rows[:, None], key_at[None, :], queries, keys, bins, columns)
        sums += tl.sum(p * gain, 1)
    tl.store(Extra + flat * queries + rows, sums, mask=inside)
