# mypy: ignore-errors
# ruff: noqa: E741
"""The forward pass, and in the same pass what each query's row of weights is like.

One program is one block of queries of one head; it streams over the keys with a running maximum
(https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2205.14135). Beside the running sum l of
p = 2^x, where x = score - maximum, it keeps

    e = sum of p x          entropy  = ln 2 (log2 l - e / l)
    t = sum of p |i - j|    distance = t / l

which cost one multiplication and addition for each weight. The largest weight is 1 / l.
"""

import triton
import triton.language as tl

from regard.mechanism.kernels.tiles import (
    CAUSAL,
    INTERVAL,
    LN2,
    LOG2E,
    LOWEST,
    NOTHING,
    PLAIN,
    TABLE,
    allowed,
    key_stretches,
    scores,
)


@triton.jit
def _stretch(
    acc, l, m, e, t, q, k_tile, v_tile, k_step, v_step, start, stop, first, last,
    query_at, low, high, keys, side, scale, softcap, table, reach, width, value_width,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, D_EVEN: tl.constexpr,
    V_EVEN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    FREE: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Go over the keys from ``start`` to ``stop``; ``first`` to ``last`` are those that count."""
    near = tl.arange(0, BN)
    dims, value_dims = tl.arange(0, BD), tl.arange(0, BV)
    # What a tile reads of a table of distances is as large as the tile: one in flight is enough.
    for n in tl.range(start, stop, BN, num_stages=1 if BIAS == TABLE and not FREE else None):
        n = tl.multiple_of(n, BN)
        key_at = n + near
        k_at = k_tile + n.to(tl.int64) * k_step
        v_at = v_tile + n.to(tl.int64) * v_step
        if FREE:
            if D_EVEN:
                k = tl.load(k_at)
            else:
                k = tl.load(k_at, mask=dims[:, None] < width, other=0.0)
        else:
            k = tl.load(k_at, mask=(dims[:, None] < width) & (key_at < keys)[None, :], other=0.0)
        dots = tl.dot(q, k, input_precision=PRECISION)  # [BM, BN]
        if FREE and BIAS == PLAIN and not SOFTCAP:
            higher = tl.maximum(m, tl.max(dots, 1) * (scale * LOG2E))
            x = dots * (scale * LOG2E) - higher[:, None]
        else:
            s, _slope = scores(
                dots, query_at[:, None], key_at[None, :], side, scale, softcap, table, reach,
                BIAS, SOFTCAP, FREE,
            )  # fmt: skip
            if not FREE:
                may = allowed(
                    query_at[:, None], key_at[None, :], low[:, None], high[:, None], keys, KIND
                )
                s = tl.where(may, s, NOTHING)
            higher = tl.maximum(m, tl.max(s, 1))
            x = s - higher[:, None]
        p = tl.exp2(x)
        shrink = tl.exp2(m - higher)
        total = tl.sum(p, 1)
        if ENTROPY:
            e = (e + (m - higher) * l) * shrink + tl.sum(p * x, 1)
        if DISTANCE:
            if FREE:
                ahead = (query_at - n).to(tl.float32)
                inside = tl.sum(p * near.to(tl.float32)[None, :], 1)
                t = t * shrink + side * (ahead * total - inside)
            else:
                apart = tl.abs(query_at[:, None] - key_at[None, :]).to(tl.float32)
                t = t * shrink + tl.sum(p * apart, 1)
        l = l * shrink + total
        m = higher
        acc = acc * shrink[:, None]
        if FREE:
            if V_EVEN:
                v = tl.load(v_at)
            else:
                v = tl.load(v_at, mask=value_dims[None, :] < value_width, other=0.0)
        else:  # what no query of the block may see is not read, whatever it holds
            seen = (key_at >= first) & (key_at < last)
            v = tl.load(v_at, mask=seen[:, None] & (value_dims[None, :] < value_width), other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l, m, e, t


@triton.jit(do_not_specialize=["queries", "keys"])
def forward(
    Q, K, V, Out, Lse, Entropy, Peak, Highest, Distance, Low, High, Table,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, o_batch, o_head, o_row,
    low_batch, high_batch, table_head, heads, groups, queries, keys, width, value_width,
    scale, softcap, reach,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr,
    D_EVEN: tl.constexpr, V_EVEN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, PEAK: tl.constexpr, HIGHEST: tl.constexpr,
    DISTANCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    # The longest rows of a causal call first, so that no long one is left for the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if KIND == CAUSAL else tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    SIDES: tl.constexpr = (BIAS != PLAIN) or DISTANCE

    row = block * BM
    offset = keys - queries
    rows = row + tl.arange(0, BM)
    dims, value_dims, near = tl.arange(0, BD), tl.arange(0, BV), tl.arange(0, BN)
    inside = rows < queries
    query_at = rows + offset

    q_tile = (
        Q + batch * q_batch + head * q_head + rows[:, None].to(tl.int64) * q_row + dims[None, :]
    )
    k_tile = K + batch * k_batch + (head // groups) * k_head + near[None, :] * k_row + dims[:, None]
    v_tile = V + batch * v_batch + (head // groups) * v_head
    v_tile += near[:, None] * v_row + value_dims[None, :]
    q = tl.load(q_tile, mask=inside[:, None] & (dims[None, :] < width), other=0.0)
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

    start, a, b, c, d, first, stop = key_stretches(
        low_at,
        high_at,
        row,
        tl.minimum(row + BM, queries) - 1,
        offset,
        keys,
        reach,
        BN,
        KIND,
        SIDES,
    )
    acc = tl.zeros([BM, BV], tl.float32)
    l = tl.zeros([BM], tl.float32)
    e = tl.zeros([BM], tl.float32)
    t = tl.zeros([BM], tl.float32)
    m = tl.full([BM], LOWEST, tl.float32)
    # fmt: off
    if KIND == INTERVAL:
        acc, l, m, e, t = _stretch(
            acc, l, m, e, t, q, k_tile, v_tile, k_row, v_row, start, a, first, stop,
            query_at, low, high, keys, 1.0, scale, softcap, table, reach, width, value_width,
            BN, BD, BV, D_EVEN, V_EVEN, KIND, BIAS, SOFTCAP, False, ENTROPY, DISTANCE, PRECISION,
        )
    acc, l, m, e, t = _stretch(
        acc, l, m, e, t, q, k_tile, v_tile, k_row, v_row, a, b, first, stop,
        query_at, low, high, keys, 1.0, scale, softcap, table, reach, width, value_width,
        BN, BD, BV, D_EVEN, V_EVEN, KIND, BIAS, SOFTCAP, True, ENTROPY, DISTANCE, PRECISION,
    )
    if SIDES and KIND != CAUSAL:
        acc, l, m, e, t = _stretch(
            acc, l, m, e, t, q, k_tile, v_tile, k_row, v_row, b, c, first, stop,
            query_at, low, high, keys, 1.0, scale, softcap, table, reach, width, value_width,
            BN, BD, BV, D_EVEN, V_EVEN, KIND, BIAS, SOFTCAP, False, ENTROPY, DISTANCE, PRECISION,
        )
        acc, l, m, e, t = _stretch(
            acc, l, m, e, t, q, k_tile, v_tile, k_row, v_row, c, d, first, stop,
            query_at, low, high, keys, -1.0, scale, softcap, table, reach, width, value_width,
            BN, BD, BV, D_EVEN, V_EVEN, KIND, BIAS, SOFTCAP, True, ENTROPY, DISTANCE, PRECISION,
        )
    acc, l, m, e, t = _stretch(
        acc, l, m, e, t, q, k_tile, v_tile, k_row, v_row, b if KIND == CAUSAL else d, stop,
        first, stop, query_at, low, high, keys, 1.0, scale, softcap, table, reach, width,
        value_width,
        BN, BD, BV, D_EVEN, V_EVEN, KIND, BIAS, SOFTCAP, False, ENTROPY, DISTANCE, PRECISION,
    )
    # fmt: on

    lost = l == 0  # nothing to attend to
    inverse = tl.where(lost, 0.0, 1 / tl.where(lost, 1.0, l))
    length = tl.log2(tl.where(lost, 1.0, l))
    at = tl.program_id(1).to(tl.int64) * queries + rows
    tl.store(Lse + at, tl.where(lost, float("-inf"), (m + length) * LN2), mask=inside)
    if ENTROPY:
        tl.store(Entropy + at, (length - e * inverse) * LN2, mask=inside)
    if PEAK:
        tl.store(Peak + at, inverse, mask=inside)
    if DISTANCE:
        tl.store(Distance + at, t * inverse, mask=inside)
    if HIGHEST:
        highest = tl.max(tl.where(lost | (rows >= queries), float("-inf"), m * LN2), 0)
        tl.store(Highest + tl.program_id(1) * tl.num_programs(0) + block, highest)
    out = Out + batch * o_batch + head * o_head + rows[:, None].to(tl.int64) * o_row
    acc = acc * inverse[:, None]
    tl.store(
        out + value_dims[None, :],
        acc.to(Out.dtype.element_ty),
        mask=inside[:, None] & (value_dims[None, :] < value_width),
    )
