# mypy: ignore-errors
"""The backward pass: of the output, and of what was seen.

With weights P, scores S and gradients of the output O, log-sum-exp L, entropy E, mean distance T,
received R and the sums M of the map's cells,

    dP_ij = dO_i . V_j + dR_j + dM_cell(i,j) + dT_i |i - j|
    dS_ij = P_ij (dP_ij - dE_i log P_ij - delta_i)
    delta_i = dO_i . O_i + dT_i T_i + dE_i E_i - dL_i + sum over j of P_ij (dR_j + dM_cell(i,j))

so that every field adds a term to each score's gradient and a number to each row's delta. Only the
last sum is not at hand after the forward pass. ``deltas`` has delta, and streams that sum.
"""

import triton
import triton.language as tl

from regard.mechanism.kernels.deltas import cells_of, rows_lse
from regard.mechanism.kernels.tiles import (
    ALIBI,
    CAUSAL,
    INTERVAL,
    LN2,
    PLAIN,
    TABLE,
    allowed,
    key_stretches,
    query_stretches,
    scores,
)


@triton.jit
def _gradient(
    dots, gain, lse, common, entropy, distance, query_at, key_at, side, low, high, keys,
    scale, softcap, table, reach, KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    FREE: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """The weights of a tile, the gradient of its scores, and that of its products of q and k."""
    s, slope = scores(
        dots, query_at, key_at, side, scale, softcap, table, reach, BIAS, SOFTCAP, FREE
    )
    x = s - lse
    p = tl.exp2(x)
    gain -= common
    if ENTROPY:
        gain -= entropy * (x * LN2)
    if DISTANCE:
        gain += distance * tl.abs(query_at - key_at).to(tl.float32)
    change = p * gain
    if not FREE:
        may = allowed(query_at, key_at, low, high, keys, KIND)
        p = tl.where(may, p, 0.0)
        change = tl.where(may, change, 0.0)
    inner = change
    if SOFTCAP:
        inner = change * slope
    return p, change, inner


@triton.jit
def _query_stretch(
    dq, before, after, q, grad, k_tile, v_tile, k_step, v_step, received, cells, TableGrad,
    start, stop, first, last, rows, query_at, low, high, lse, common, entropy, distance,
    queries, keys, side, scale, softcap, table, reach, bins, columns, width, value_width,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FREE: tl.constexpr, ENTROPY: tl.constexpr,
    DISTANCE: tl.constexpr, RECEIVED: tl.constexpr, MAP: tl.constexpr, TRAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    near, dims, value_dims = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    for n in tl.range(start, stop, BN, num_stages=1 if BIAS == TABLE and not FREE else None):
        n = tl.multiple_of(n, BN)
        key_at = n + near
        if FREE and EVEN:
            k = tl.load(k_tile + n.to(tl.int64) * k_step)
            v = tl.load(v_tile + n.to(tl.int64) * v_step)
        elif FREE:
            k = tl.load(k_tile + n.to(tl.int64) * k_step, mask=dims[:, None] < width, other=0.0)
            v = tl.load(
                v_tile + n.to(tl.int64) * v_step, mask=value_dims[:, None] < value_width, other=0.0
            )
        else:
            seen = ((key_at >= first) & (key_at < last))[None, :]
            k = tl.load(
                k_tile + n.to(tl.int64) * k_step, mask=(dims[:, None] < width) & seen, other=0.0
            )
            v = tl.load(
                v_tile + n.to(tl.int64) * v_step,
                mask=(value_dims[:, None] < value_width) & seen,
                other=0.0,
            )
        dots = tl.dot(q, k, input_precision=PRECISION)
        gain = tl.dot(grad, v, input_precision=PRECISION)
        if RECEIVED:
            gain += tl.load(received + key_at, mask=key_at < keys, other=0.0)[None, :]
        if MAP:
            gain += cells_of(cells, rows[:, None], key_at[None, :], queries, keys, bins, columns)
        _, change, inner = _gradient(
            dots, gain, lse[:, None], common[:, None], entropy[:, None], distance[:, None],
            query_at[:, None], key_at[None, :], side, low[:, None], high[:, None], keys,
            scale, softcap, table, reach, KIND, BIAS, SOFTCAP, FREE, ENTROPY, DISTANCE,
        )  # fmt: skip
        if TRAIN and BIAS == ALIBI:
            apart = tl.abs(query_at[:, None] - key_at[None, :]).to(tl.float32)
            before -= tl.sum(change * apart, 1)
        if TRAIN and BIAS == TABLE:
            if not FREE:
                apart = query_at[:, None] - key_at[None, :]
                apart = tl.minimum(tl.maximum(apart, -reach), reach) + reach
                tl.atomic_add(TableGrad + apart, change, sem="relaxed")
            elif side > 0:
                before += tl.sum(change, 1)
            else:
                after += tl.sum(change, 1)
        dq = tl.dot(inner.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)
    return dq, before, after


@triton.jit(do_not_specialize=["queries", "keys"])
def by_query(
    Q, K, V, Grad, Lse, Delta, EntropyGrad, DistanceGrad, ReceivedGrad, MapGrad, QueryGrad,
    TableGrad, Low, High, Table,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    d_batch, d_head, d_row, low_batch, high_batch, table_head, heads, groups, queries, keys,
    width, value_width, scale, softcap, reach, bins, columns,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr,
    RECEIVED: tl.constexpr, MAP: tl.constexpr, TRAIN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of the queries, and with TRAIN that of the bias; a program has some queries."""
    block = tl.num_programs(0) - 1 - tl.program_id(0) if KIND == CAUSAL else tl.program_id(0)
    batch, head = tl.program_id(1) // heads, tl.program_id(1) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    SIDES: tl.constexpr = BIAS != PLAIN
    row = block * BM
    offset = keys - queries
    rows = row + tl.arange(0, BM)
    near, dims, value_dims = tl.arange(0, BN), tl.arange(0, BD), tl.arange(0, BV)
    inside = rows < queries
    query_at = rows + offset
    there = rows[:, None].to(tl.int64)
    fits = inside[:, None] & (dims[None, :] < width)
    q = tl.load(
        Q + batch * q_batch + head * q_head + there * q_row + dims[None, :], fits, other=0.0
    )
    grad_at = Grad + batch * g_batch + head * g_head + there * g_row + value_dims[None, :]
    grad = tl.load(grad_at, inside[:, None] & (value_dims[None, :] < value_width), other=0.0)
    k_tile = K + batch * k_batch + (head // groups) * k_head + near[None, :] * k_row + dims[:, None]
    v_tile = V + batch * v_batch + (head // groups) * v_head
    v_tile += near[None, :] * v_row + value_dims[:, None]
    at = tl.program_id(1).to(tl.int64) * queries + rows
    lse = rows_lse(Lse + at, inside)
    common = tl.load(Delta + at, inside, other=0.0)
    entropy = common
    if ENTROPY:
        entropy = tl.load(EntropyGrad + at, inside, other=0.0)
    distance = common
    if DISTANCE:
        distance = tl.load(DistanceGrad + at, inside, other=0.0)
    received = ReceivedGrad
    if RECEIVED:
        received += tl.program_id(1).to(tl.int64) * keys
    cells = MapGrad
    if MAP:
        cells += tl.program_id(1).to(tl.int64) * bins * columns
    table = Table
    table_grad = TableGrad
    if BIAS != PLAIN:
        table += head * table_head
        if TRAIN and BIAS == TABLE:
            table_grad += head * table_head
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
    dq = tl.zeros([BM, BD], tl.float32)
    before = tl.zeros([BM], tl.float32)
    after = tl.zeros([BM], tl.float32)
    # fmt: off
    if KIND == INTERVAL:
        dq, before, after = _query_stretch(
            dq, before, after, q, grad, k_tile, v_tile, k_row, v_row, received, cells, table_grad,
            start, a, first, stop, rows, query_at, low, high, lse, common, entropy, distance,
            queries, keys, 1, scale, softcap, table, reach, bins, columns, width, value_width,
            BN, BD, BV, EVEN, KIND, BIAS, SOFTCAP, False, ENTROPY, DISTANCE, RECEIVED, MAP, TRAIN,
            PRECISION,
        )
    dq, before, after = _query_stretch(
        dq, before, after, q, grad, k_tile, v_tile, k_row, v_row, received, cells, table_grad,
        a, b, first, stop, rows, query_at, low, high, lse, common, entropy, distance,
        queries, keys, 1, scale, softcap, table, reach, bins, columns, width, value_width,
        BN, BD, BV, EVEN, KIND, BIAS, SOFTCAP, True, ENTROPY, DISTANCE, RECEIVED, MAP, TRAIN,
        PRECISION,
    )
    if SIDES and KIND != CAUSAL:
        dq, before, after = _query_stretch(
            dq, before, after, q, grad, k_tile, v_tile, k_row, v_row, received, cells, table_grad,
            b, c, first, stop, rows, query_at, low, high, lse, common, entropy, distance,
            queries, keys, 1, scale, softcap, table, reach, bins, columns, width, value_width,
            BN, BD, BV, EVEN, KIND, BIAS, SOFTCAP, False, ENTROPY, DISTANCE, RECEIVED, MAP, TRAIN,
            PRECISION,
        )
        dq, before, after = _query_stretch(
            dq, before, after, q, grad, k_tile, v_tile, k_row, v_row, received, cells, table_grad,
            c, d, first, stop, rows, query_at, low, high, lse, common, entropy, distance,
            queries, keys, -1, scale, softcap, table, reach, bins, columns, width, value_width,
            BN, BD, BV, EVEN, KIND, BIAS, SOFTCAP, True, ENTROPY, DISTANCE, RECEIVED, MAP, TRAIN,
            PRECISION,
        )
    dq, before, after = _query_stretch(
        dq, before, after, q, grad, k_tile, v_tile, k_row, v_row, received, cells, table_grad,
        b if KIND == CAUSAL else d, stop, first, stop, rows, query_at, low, high, lse, common,
        entropy, distance, queries, keys, 1, scale, softcap, table, reach, bins, columns, width,
        value_width,
        BN, BD, BV, EVEN, KIND, BIAS, SOFTCAP, False, ENTROPY, DISTANCE, RECEIVED, MAP, TRAIN,
        PRECISION,
    )
    # fmt: on
    out = QueryGrad + batch * d_batch + head * d_head + there * d_row + dims[None, :]
    tl.store(out, (dq * scale).to(QueryGrad.dtype.element_ty), mask=fits)
    if TRAIN and BIAS == ALIBI:
        tl.store(TableGrad + at, before, mask=inside)
    if TRAIN and BIAS == TABLE:
        tl.atomic_add(table_grad + 2 * reach, tl.sum(before, 0), sem="relaxed")
        tl.atomic_add(table_grad, tl.sum(after, 0), sem="relaxed")


@triton.jit
def _key_stretch(
    dk, dv, k, v, q_tile, g_tile, q_step, g_step, at, received, cells, Lse, Delta, EntropyGrad,
    DistanceGrad, low_at, high_at, start, stop, key_at, offset, queries, keys, side, scale, softcap,
    table, reach, bins, columns, width, value_width,
    BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FREE: tl.constexpr, ENTROPY: tl.constexpr,
    DISTANCE: tl.constexpr, RECEIVED: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    near, dims, value_dims = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BV)
    for m in tl.range(start, stop, BM, num_stages=1 if BIAS == TABLE and not FREE else None):
        m = tl.multiple_of(m, BM)
        rows = m + near
        inside = rows < queries
        query_at = rows + offset
        if FREE and EVEN:
            q = tl.load(q_tile + m.to(tl.int64) * q_step)
            grad = tl.load(g_tile + m.to(tl.int64) * g_step)
        elif FREE:
            q = tl.load(q_tile + m.to(tl.int64) * q_step, mask=dims[:, None] < width, other=0.0)
            grad = tl.load(
                g_tile + m.to(tl.int64) * g_step, mask=value_dims[:, None] < value_width, other=0.0
            )
        else:
            q = tl.load(
                q_tile + m.to(tl.int64) * q_step,
                mask=(dims[:, None] < width) & inside[None, :],
                other=0.0,
            )
            grad = tl.load(
                g_tile + m.to(tl.int64) * g_step,
                mask=(value_dims[:, None] < value_width) & inside[None, :],
                other=0.0,
            )
        lse = rows_lse(Lse + at + rows, inside)
        common = tl.load(Delta + at + rows, inside, other=0.0)
        entropy = common
        if ENTROPY:
            entropy = tl.load(EntropyGrad + at + rows, inside, other=0.0)
        distance = common
        if DISTANCE:
            distance = tl.load(DistanceGrad + at + rows, inside, other=0.0)
        low = rows
        high = rows
        if KIND == INTERVAL and not FREE:
            low = tl.load(low_at + rows, mask=inside, other=0)
            high = tl.load(high_at + rows, mask=inside, other=0)
        dots = tl.dot(k, q, input_precision=PRECISION)  # [keys, queries]
        gain = tl.dot(v, grad, input_precision=PRECISION)
        if RECEIVED:
            gain += received[:, None]
        if MAP:
            gain += cells_of(cells, rows[None, :], key_at[:, None], queries, keys, bins, columns)
        p, _, inner = _gradient(
            dots, gain, lse[None, :], common[None, :], entropy[None, :], distance[None, :],
            query_at[None, :], key_at[:, None], side, low[None, :], high[None, :], keys,
            scale, softcap, table, reach, KIND, BIAS, SOFTCAP, FREE, ENTROPY, DISTANCE,
        )  # fmt: skip
        dv = tl.dot(p.to(grad.dtype), tl.trans(grad), dv, input_precision=PRECISION)
        dk = tl.dot(inner.to(q.dtype), tl.trans(q), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["queries", "keys"])
def by_key(
    Q, K, V, Grad, Lse, Delta, EntropyGrad, DistanceGrad, ReceivedGrad, MapGrad, KeyGrad,
    ValueGrad, Bounds, Low, High, Table,
    q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, g_batch, g_head, g_row,
    dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row, low_batch, high_batch, bounds_batch,
    table_head, key_heads, groups, queries, keys, width, value_width, scale, softcap, reach,
    bins, columns,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr,
    RECEIVED: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradients of keys and values; a program has some keys, for all heads that share them."""
    block = tl.program_id(0)
    batch, key_head = tl.program_id(1) // key_heads, tl.program_id(1) % key_heads
    batch, key_head = batch.to(tl.int64), key_head.to(tl.int64)
    SIDES: tl.constexpr = BIAS != PLAIN
    offset = keys - queries
    key = block * BN
    last = tl.minimum(key + BN, keys) - 1
    key_at = key + tl.arange(0, BN)
    near, dims, value_dims = tl.arange(0, BM), tl.arange(0, BD), tl.arange(0, BV)
    real = key_at < keys
    there = key_at[:, None].to(tl.int64)
    fits = real[:, None] & (dims[None, :] < width)
    value_fits = real[:, None] & (value_dims[None, :] < value_width)
    k_at = K + batch * k_batch + key_head * k_head + there * k_row + dims[None, :]
    v_at = V + batch * v_batch + key_head * v_head + there * v_row + value_dims[None, :]
    k = tl.load(k_at, fits, other=0.0)
    v = tl.load(v_at, value_fits, other=0.0)
    low_at, high_at, bounds = Low, High, Bounds
    if KIND == INTERVAL:
        low_at += batch * low_batch
        high_at += batch * high_batch
        bounds += batch * bounds_batch + block * 4
    start, a, b, c, d, end = query_stretches(
        bounds, key, last, offset, queries, reach, BM, KIND, SIDES
    )
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BV], tl.float32)
    for group in range(groups):
        head = key_head * groups + group
        q_tile = Q + batch * q_batch + head * q_head + near[None, :] * q_row + dims[:, None]
        g_tile = Grad + batch * g_batch + head * g_head + near[None, :] * g_row
        g_tile += value_dims[:, None]
        flat = batch * key_heads * groups + head
        at = flat * queries
        table = Table
        if BIAS != PLAIN:
            table += head * table_head
        received = key_at
        if RECEIVED:
            received = tl.load(ReceivedGrad + flat * keys + key_at, real, other=0.0)
        cells = MapGrad
        if MAP:
            cells += flat * bins * columns
        # fmt: off
        if KIND != 0:
            dk, dv = _key_stretch(
                dk, dv, k, v, q_tile, g_tile, q_row, g_row, at, received, cells, Lse, Delta,
                EntropyGrad, DistanceGrad, low_at, high_at, start, a, key_at, offset, queries,
                keys, 1, scale, softcap, table, reach, bins, columns, width, value_width,
                BM, BD, BV, EVEN, KIND, BIAS, SOFTCAP, False, ENTROPY, DISTANCE, RECEIVED, MAP,
                PRECISION,
            )
        if SIDES:
            if KIND != CAUSAL:
                dk, dv = _key_stretch(
                    dk, dv, k, v, q_tile, g_tile, q_row, g_row, at, received, cells, Lse, Delta,
                    EntropyGrad, DistanceGrad, low_at, high_at, a, b, key_at, offset, queries,
                    keys, -1, scale, softcap, table, reach, bins, columns, width, value_width,
                    BM, BD, BV, EVEN, KIND, BIAS, SOFTCAP, True, ENTROPY, DISTANCE, RECEIVED, MAP,
                    PRECISION,
                )
            dk, dv = _key_stretch(
                dk, dv, k, v, q_tile, g_tile, q_row, g_row, at, received, cells, Lse, Delta,
                EntropyGrad, DistanceGrad, low_at, high_at, a if KIND == CAUSAL else b, c, key_at,
                offset, queries, keys, 1, scale, softcap, table, reach, bins, columns, width,
                value_width,
                BM, BD, BV, EVEN, KIND, BIAS, SOFTCAP, False, ENTROPY, DISTANCE, RECEIVED, MAP,
                PRECISION,
            )
        dk, dv = _key_stretch(
            dk, dv, k, v, q_tile, g_tile, q_row, g_row, at, received, cells, Lse, Delta,
            EntropyGrad, DistanceGrad, low_at, high_at, c, d, key_at, offset, queries,
            keys, 1, scale, softcap, table, reach, bins, columns, width, value_width,
            BM, BD, BV, EVEN, KIND, BIAS, SOFTCAP, True, ENTROPY, DISTANCE, RECEIVED, MAP,
            PRECISION,
        )
        dk, dv = _key_stretch(
            dk, dv, k, v, q_tile, g_tile, q_row, g_row, at, received, cells, Lse, Delta,
            EntropyGrad, DistanceGrad, low_at, high_at, d, end, key_at, offset, queries,
            keys, 1, scale, softcap, table, reach, bins, columns, width, value_width,
            BM, BD, BV, EVEN, KIND, BIAS, SOFTCAP, False, ENTROPY, DISTANCE, RECEIVED, MAP,
            PRECISION,
        )
        # fmt: on
    dk_at = KeyGrad + batch * dk_batch + key_head * dk_head + there * dk_row + dims[None, :]
    dv_at = ValueGrad + batch * dv_batch + key_head * dv_head + there * dv_row + value_dims[None, :]
    tl.store(dk_at, (dk * scale).to(KeyGrad.dtype.element_ty), mask=fits)
    tl.store(dv_at, dv.to(ValueGrad.dtype.element_ty), mask=value_fits)
