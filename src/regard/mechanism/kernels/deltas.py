# mypy: ignore-errors
"""What all gradients in a row of scores have in common; ``backward`` says what it is for."""

import triton
import triton.language as tl

from regard.mechanism.kernels.tiles import (
    INTERVAL,
    LOG2E,
    PLAIN,
    TABLE,
    allowed,
    key_stretches,
    scores,
)

ABSENT = tl.constexpr(1.0e30)  # a log-sum-exp that leaves no weight, and yet 0 times it is 0


@triton.jit
def rows_lse(at, inside):
    """Base-2 log-sum-exp of some rows; a row that attends to nothing gets no weight."""
    lse = tl.load(at, mask=inside, other=float("-inf"))
    return tl.where(lse == float("-inf"), ABSENT, lse * LOG2E)


@triton.jit
def cells_of(grid, query, key_at, queries, keys, bins, columns):
    """The map's gradient for each pair of a tile."""
    row = query.to(tl.int64) * bins // queries
    column = key_at.to(tl.int64) * columns // keys
    inside = (query < queries) & (key_at < keys)
    return tl.load(grid + row * columns + column, mask=inside, other=0.0)


@triton.jit
def delta(
    Out, Grad, Lse, LseGrad, Entropy, EntropyGrad, Distance, DistanceGrad, Extra, Delta,
    o_batch, o_head, o_row, g_batch, g_head, g_row, heads, queries, value_width,
    BM: tl.constexpr, BV: tl.constexpr, GRAD: tl.constexpr, LSE: tl.constexpr,
    ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, EXTRA: tl.constexpr,
):  # fmt: skip
    """What every gradient in a row has in common."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    dims = tl.arange(0, BV)
    inside = rows < queries
    both = inside[:, None] & (dims[None, :] < value_width)
    at = tl.program_id(1).to(tl.int64) * queries + rows
    sums = tl.zeros([BM], tl.float32)
    if GRAD:
        there = rows[:, None].to(tl.int64)
        out = tl.load(
            Out + batch * o_batch + head * o_head + there * o_row + dims[None, :], both, other=0.0
        )
        grad = tl.load(
            Grad + batch * g_batch + head * g_head + there * g_row + dims[None, :], both, other=0.0
        )
        sums = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    if LSE:
        sums -= tl.load(LseGrad + at, inside, other=0.0)
    if ENTROPY:
        sums += tl.load(Entropy + at, inside, other=0.0) * tl.load(EntropyGrad + at, inside, 0.0)
    if DISTANCE:
        sums += tl.load(Distance + at, inside, other=0.0) * tl.load(DistanceGrad + at, inside, 0.0)
    if EXTRA:
        sums += tl.load(Extra + at, inside, other=0.0)
    lost = tl.load(Lse + at, inside, other=0.0) == float("-inf")
    tl.store(Delta + at, tl.where(lost, 0.0, sums), mask=inside)


@triton.jit(do_not_specialize=["queries", "keys"])
def expected(
    Q, K, Lse, ReceivedGrad, MapGrad, Extra, Low, High, Table,
    q_batch, q_head, q_row, k_batch, k_head, k_row, low_batch, high_batch, table_head,
    heads, groups, queries, keys, width, scale, softcap, reach, bins, columns,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, RECEIVED: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """For each query the gradient of received and map that its weights expect."""
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    row = tl.program_id(0) * BM
    offset = keys - queries
    rows = row + tl.arange(0, BM)
    dims, near = tl.arange(0, BD), tl.arange(0, BN)
    inside = rows < queries
    query_at = rows + offset
    q_at = Q + batch * q_batch + head * q_head + rows[:, None].to(tl.int64) * q_row + dims[None, :]
    q = tl.load(q_at, mask=inside[:, None] & (dims[None, :] < width), other=0.0)
    k_tile = K + batch * k_batch + (head // groups) * k_head + near[None, :] * k_row + dims[:, None]
    at = tl.program_id(1).to(tl.int64) * queries + rows
    lse = rows_lse(Lse + at, inside)
    table = Table
    if BIAS != PLAIN:
        table += head * table_head
    low_at, high_at = Low, High
    low = rows
    high = rows
    if KIND == INTERVAL:
        low_at += batch * low_batch
        high_at += batch * high_batch
        low = tl.load(low_at + rows, mask=inside, other=0)
        high = tl.load(high_at + rows, mask=inside, other=0)
    start, _a, _b, _c, _d, _first, stop = key_stretches(
        low_at,
        high_at,
        row,
        tl.minimum(row + BM, queries) - 1,
        offset,
        keys,
        reach,
        BN,
        KIND,
        False,
    )
    sums = tl.zeros([BM], tl.float32)
    for n in tl.range(start, stop, BN, num_stages=1 if BIAS == TABLE else None):
        n = tl.multiple_of(n, BN)
        key_at = n + near
        real = key_at < keys
        k = tl.load(
            k_tile + n.to(tl.int64) * k_row, mask=(dims[:, None] < width) & real[None, :], other=0.0
        )
        dots = tl.dot(q, k, input_precision=PRECISION)
        s, _slope = scores(
            dots, query_at[:, None], key_at[None, :], 1.0, scale, softcap, table, reach,
            BIAS, SOFTCAP, False,
        )  # fmt: skip
        p = tl.exp2(s - lse[:, None])
        may = allowed(query_at[:, None], key_at[None, :], low[:, None], high[:, None], keys, KIND)
        p = tl.where(may, p, 0.0)
        gain = tl.zeros([BM, BN], tl.float32)
        if RECEIVED:
            at_key = ReceivedGrad + tl.program_id(1).to(tl.int64) * keys + key_at
            gain += tl.load(at_key, mask=real, other=0.0)[None, :]
        if MAP:
            cells = MapGrad + tl.program_id(1).to(tl.int64) * bins * columns
            gain += cells_of(cells, rows[:, None], key_at[None, :], queries, keys, bins, columns)
        sums += tl.sum(p * gain, 1)
    tl.store(Extra + at, sums, mask=inside)
