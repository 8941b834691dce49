# mypy: ignore-errors
"""The backward pass, from gradients of the output and of every differentiable field.

P are the weights, S the scores, O the output, L the log-sum-exp, E the entropy, T the mean
distance, R the received weight and M the sums of the map's cells. dX is the gradient of X:

    dP_ij = dO_i . V_j + dR_j + dM_cell(i,j) + dT_i |i - j|
    dS_ij = P_ij (dP_ij - dE_i log P_ij - delta_i)
    delta_i = dO_i . O_i + dT_i T_i + dE_i E_i - dL_i + sum over j of P_ij (dR_j + dM_cell(i,j))

So each field adds a term to a score's gradient and to a row's delta. Only the last sum of delta
needs another pass over the keys. ``deltas`` computes delta and that sum.

One kernel computes the gradient of queries, another those of keys and values. Each program owns the
rows that it sums, so there are no atomics. ``distances`` has the gradient of a table of biases,
``askew`` the gradients of Transformer-XL's queries and embeddings. Called by ``launch.backward``.

Test: ``pytest tests/kernels/test_triton.py -k through_one_field``.
"""

import triton
import triton.language as tl

from regard.kernels.triton.deltas import cells_of
from regard.kernels.triton.tiles import (
    ALIBI,
    CAUSAL,
    INTERVAL,
    LN2,
    RELATIVE,
    TABLE,
    allowed,
    by_distance,
    by_keys,
    by_queries,
    columns_at,
    head_of,
    key_stretches,
    query_stretches,
    range_of,
    read,
    rows_lse,
    rows_of,
    scores,
    shift_at,
    start_of,
    whose,
)


@triton.jit
def gradient(
    dots, shift, gain, lse, common, entropy, distance, query_at, key_at, side, low, high, keys,
    terms, head, KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    FREE: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Return a tile's weights, and the gradients of its scores and of its products q . k."""
    s, slope = scores(dots, query_at, key_at, side, terms, head, BIAS, SOFTCAP, FREE)
    if BIAS == RELATIVE:
        s += shift
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
    dq, before, after, q, grad, k_tile, v_tile, k_row, v_row, received, cells, start, stop, first,
    last, rows, query_at, low, high, lse, common, entropy, distance, queries, keys, side, terms,
    head, bins, columns, width, value_width,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FREE: tl.constexpr, ENTROPY: tl.constexpr,
    DISTANCE: tl.constexpr, RECEIVED: tl.constexpr, MAP: tl.constexpr, TRAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    near = tl.arange(0, BN)
    dims, value_dims = tl.arange(0, BD)[:, None], tl.arange(0, BV)[:, None]
    for n in tl.range(start, stop, BN, num_stages=1 if BIAS == TABLE and not FREE else None):
        n = tl.multiple_of(n, BN)
        key_at = n + near
        seen = ((key_at >= first) & (key_at < last))[None, :]
        k = read(k_tile + n.to(tl.int64) * k_row, dims, width, seen, EVEN, FREE)
        v = read(v_tile + n.to(tl.int64) * v_row, value_dims, value_width, seen, EVEN, FREE)
        dots = tl.dot(q, k, input_precision=PRECISION)
        gain = tl.dot(grad, v, input_precision=PRECISION)
        if RECEIVED:
            gain += tl.load(received + key_at, mask=key_at < keys, other=0.0)[None, :]
        if MAP:
            gain += cells_of(cells, rows[:, None], key_at[None, :], queries, keys, bins, columns)
        _, change, inner = gradient(
            dots, 0.0, gain, lse[:, None], common[:, None], entropy[:, None], distance[:, None],
            query_at[:, None], key_at[None, :], side, low[:, None], high[:, None], keys,
            terms, head, KIND, BIAS, SOFTCAP, FREE, ENTROPY, DISTANCE,
        )  # fmt: skip
        if TRAIN and BIAS == ALIBI:
            apart = tl.abs(query_at[:, None] - key_at[None, :]).to(tl.float32)
            before -= tl.sum(change * apart, 1)
        if TRAIN and BIAS == TABLE:
            # Distances beyond the table use its ends; ``distances`` sums all others.
            if not FREE:
                apart = query_at[:, None] - key_at[None, :]
                before += tl.sum(tl.where(apart >= terms.reach, change, 0.0), 1)
                if KIND != CAUSAL:
                    after += tl.sum(tl.where(apart <= -terms.reach, change, 0.0), 1)
            elif side > 0:
                before += tl.sum(change, 1)
            else:
                after += tl.sum(change, 1)
        dq = tl.dot(inner.to(k.dtype), tl.trans(k), dq, input_precision=PRECISION)
    return dq, before, after


@triton.jit(do_not_specialize=["queries", "keys"])
def by_query(
    query, key, value, grad, Lse, Delta, EntropyGrad, DistanceGrad, ReceivedGrad, MapGrad,
    query_grad, TableGrad, ends, terms, heads, groups, queries, keys, width, value_width, bins,
    columns,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
    DISTANCE: tl.constexpr, RECEIVED: tl.constexpr, MAP: tl.constexpr, TRAIN: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradient of the queries; a program has BM of them.

    With TRAIN also store each query's gradient of the bias: of Alibi's slope, or of both ends of a
    table. Calls with Transformer-XL's term use ``askew.to_queries`` instead.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0) if KIND == CAUSAL else tl.program_id(0)
    batch, head = whose(heads)
    SIDES: tl.constexpr = by_distance(BIAS)
    row = block * BM
    offset = start_of(ends, batch, queries, keys)
    rows = row + tl.arange(0, BM)
    inside = rows < queries
    query_at = rows + offset
    q = rows_of(query, batch, head, rows, inside, width, BD)
    its_grad = rows_of(grad, batch, head, rows, inside, value_width, BV)
    k_tile = columns_at(key, batch, head // groups, BN, BD)
    v_tile = columns_at(value, batch, head // groups, BN, BV)
    flat = tl.program_id(1).to(tl.int64)
    at = flat * queries + rows
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
        received += flat * keys
    cells = MapGrad
    if MAP:
        cells += flat * bins * columns
    low, high = range_of(ends, batch, rows, inside, KIND)
    last = tl.minimum(row + BM, queries) - 1
    parts = key_stretches(ends, batch, row, last, offset, keys, terms.reach, BN, KIND, SIDES)
    dq = tl.zeros([BM, BD], tl.float32)
    before = tl.zeros([BM], tl.float32)
    after = tl.zeros([BM], tl.float32)
    for PART in tl.static_range(5):
        if by_keys(PART, KIND, SIDES):
            dq, before, after = _query_stretch(
                dq, before, after, q, its_grad, k_tile, v_tile, key.row, value.row, received, cells,
                parts[PART], parts[PART + 1], parts[6], parts[5], rows, query_at, low, high, lse,
                common, entropy, distance, queries, keys, -1 if PART == 3 else 1, terms, head, bins,
                columns, width, value_width, BN, BD, BV, EVEN, KIND, BIAS, SOFTCAP, PART % 2 == 1,
                ENTROPY, DISTANCE, RECEIVED, MAP, TRAIN, PRECISION,
            )  # fmt: skip
    there = rows[:, None].to(tl.int64)
    dims = tl.arange(0, BD)[None, :]
    tl.store(
        head_of(query_grad, batch, head) + there * query_grad.row + dims,
        (dq * terms.scale).to(query_grad.data.dtype.element_ty),
        mask=inside[:, None] & (dims < width),
    )
    if TRAIN:
        tl.store(TableGrad + at, before, mask=inside)
        if BIAS == TABLE:
            tl.store(TableGrad + tl.num_programs(1).to(tl.int64) * queries + at, after, mask=inside)


@triton.jit
def _key_stretch(
    dk, dv, k, v, q_tile, g_tile, q_row, g_row, at, received, cells, Lse, Delta, EntropyGrad,
    DistanceGrad, start, stop, key_at, batch, head, offset, queries, keys, side, ends, terms,
    shifted, changes, inners, step, origin, bins, columns, width, value_width,
    BM: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FREE: tl.constexpr, ENTROPY: tl.constexpr,
    DISTANCE: tl.constexpr, RECEIVED: tl.constexpr, MAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    near = tl.arange(0, BM)
    dims, value_dims = tl.arange(0, BD)[:, None], tl.arange(0, BV)[:, None]
    for m in tl.range(start, stop, BM, num_stages=1 if BIAS >= TABLE and not FREE else None):
        m = tl.multiple_of(m, BM)
        rows = m + near
        inside = rows < queries
        query_at = rows + offset
        q = read(q_tile + m.to(tl.int64) * q_row, dims, width, inside[None, :], EVEN, FREE)
        grad = read(
            g_tile + m.to(tl.int64) * g_row, value_dims, value_width, inside[None, :], EVEN, FREE
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
        if not FREE:
            low, high = range_of(ends, batch, rows, inside, KIND)
        dots = tl.dot(k, q, input_precision=PRECISION)  # [keys, queries]
        gain = tl.dot(v, grad, input_precision=PRECISION)
        if RECEIVED:
            gain += received[:, None]
        if MAP:
            gain += cells_of(cells, rows[None, :], key_at[:, None], queries, keys, bins, columns)
        shift = 0.0
        if BIAS == RELATIVE:
            past = (m - origin).to(tl.int64) * step
            if FREE:
                shift = tl.load(shifted + past)
            else:
                shift = tl.load(shifted + past, mask=inside[None, :], other=0.0)
        p, change, inner = gradient(
            dots, shift, gain, lse[None, :], common[None, :], entropy[None, :], distance[None, :],
            query_at[None, :], key_at[:, None], side, low[None, :], high[None, :], keys,
            terms, head, KIND, BIAS, SOFTCAP, FREE, ENTROPY, DISTANCE,
        )  # fmt: skip
        if BIAS == RELATIVE:  # ``askew`` computes further gradients from these
            there = None if FREE else inside[None, :]
            tl.store(changes + past, change.to(q.dtype), mask=there)
            if SOFTCAP:
                tl.store(inners + past, inner.to(q.dtype), mask=there)
        dv = tl.dot(p.to(grad.dtype), tl.trans(grad), dv, input_precision=PRECISION)
        dk = tl.dot(inner.to(q.dtype), tl.trans(q), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["sequence", "origin", "until", "queries", "keys"])
def by_key(
    query, key, value, grad, Lse, Delta, EntropyGrad, DistanceGrad, ReceivedGrad, MapGrad,
    key_grad, value_grad, Bounds, bounds_batch, ends, terms, shifted, changes, inners, sequence,
    origin, until, key_heads, groups, queries, keys, width, value_width, bins, columns,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, ENTROPY: tl.constexpr,
    DISTANCE: tl.constexpr, RECEIVED: tl.constexpr, MAP: tl.constexpr, ADD: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of keys and values; a program has BN keys and all heads that share them.

    With Transformer-XL's term a launch covers the queries from ``origin`` to ``until``, and stores
    the gradients of their scores in ``changes``. ADD: add to the sums of earlier launches.
    """
    block = tl.program_id(0)
    batch, key_head = whose(key_heads)
    if BIAS == RELATIVE:
        batch += sequence
    SIDES: tl.constexpr = by_distance(BIAS)
    offset = start_of(ends, batch, queries, keys)
    first = block * BN
    last = tl.minimum(first + BN, keys) - 1
    key_at = first + tl.arange(0, BN)
    real = key_at < keys
    bounds = Bounds
    if KIND == INTERVAL:
        bounds += batch * bounds_batch + block * 4
    parts = query_stretches(bounds, first, last, offset, queries, terms.reach, BM, KIND, SIDES)
    if ADD:  # do not change keys that none of these queries attends to
        real = key_at < tl.where((parts[0] < until) & (parts[5] > origin), keys, 0)
    k = rows_of(key, batch, key_head, key_at, real, width, BD, EVEN)
    v = rows_of(value, batch, key_head, key_at, real, value_width, BV, EVEN)
    dk = tl.zeros([BN, BD], tl.float32)
    dv = tl.zeros([BN, BV], tl.float32)
    for group in range(groups):
        head = key_head * groups + group
        q_tile = columns_at(query, batch, head, BM, BD)
        g_tile = columns_at(grad, batch, head, BM, BV)
        flat = batch * key_heads * groups + head
        its_shifts, its_changes, its_inners = q_tile, q_tile, q_tile
        if BIAS == RELATIVE:
            near, its_batch = tl.arange(0, BM)[None, :], batch - sequence
            its_shifts = shift_at(shifted, its_batch, head, near, key_at[:, None])
            its_changes = shift_at(changes, its_batch, head, near, key_at[:, None])
            its_inners = shift_at(inners, its_batch, head, near, key_at[:, None])
        received = key_at
        if RECEIVED:
            received = tl.load(ReceivedGrad + flat * keys + key_at, real, other=0.0)
        cells = MapGrad
        if MAP:
            cells += flat * bins * columns
        for PART in tl.static_range(5):
            if by_queries(PART, KIND, SIDES):
                start, stop = parts[PART], parts[PART + 1]
                if BIAS == RELATIVE:
                    start, stop = tl.maximum(start, origin), tl.minimum(stop, until)
                dk, dv = _key_stretch(
                    dk, dv, k, v, q_tile, g_tile, query.row, grad.row, flat * queries, received,
                    cells, Lse, Delta, EntropyGrad, DistanceGrad, start, stop, key_at, batch, head,
                    offset, queries, keys, -1 if PART == 1 else 1, ends, terms, its_shifts,
                    its_changes, its_inners, shifted.row, origin, bins, columns, width, value_width,
                    BM, BD, BV, EVEN, KIND, BIAS, SOFTCAP, PART % 2 == 1, ENTROPY, DISTANCE,
                    RECEIVED, MAP, PRECISION,
                )  # fmt: skip
    there = key_at[:, None].to(tl.int64)
    dims, value_dims = tl.arange(0, BD)[None, :], tl.arange(0, BV)[None, :]
    k_at = head_of(key_grad, batch, key_head) + there * key_grad.row + dims
    v_at = head_of(value_grad, batch, key_head) + there * value_grad.row + value_dims
    k_there, v_there = real[:, None], real[:, None]
    if not EVEN:
        k_there, v_there = k_there & (dims < width), v_there & (value_dims < value_width)
    dk *= terms.scale
    if ADD:
        dk += tl.load(k_at, mask=k_there, other=0.0)
        dv += tl.load(v_at, mask=v_there, other=0.0)
    tl.store(k_at, dk.to(key_grad.data.dtype.element_ty), mask=k_there)
    tl.store(v_at, dv.to(value_grad.data.dtype.element_ty), mask=v_there)
