# mypy: ignore-errors
# ruff: noqa: E741
"""The forward pass, with the fields that it computes for each query.

One program owns a block of queries of one head, and streams over the keys with a running maximum
(https://arxiv.org/abs/1805.02867, https://arxiv.org/abs/2205.14135). Besides the running sum l of
p = 2^x, where x = score - maximum, it keeps

    e = sum of p x          entropy  = ln 2 (log2 l - e / l)
    t = sum of p |i - j|    distance = t / l

each at the cost of one multiplication and one addition per weight. The largest weight is 1 / l.

If there are too few queries to keep the device busy, several programs split the keys of a block and
store partial sums, which ``merge`` combines. For a query without keys the output and entropy are 0
and lse is -inf. Called by ``launch.forward``.

Test: ``pytest tests/kernels/test_triton.py -k every_field``.
"""

import triton
import triton.language as tl

from regard.kernels.triton.tiles import (
    CAUSAL,
    LN2,
    LOG2E,
    LOWEST,
    NOTHING,
    PLAIN,
    RELATIVE,
    TABLE,
    allowed,
    by_distance,
    by_keys,
    columns_at,
    head_of,
    key_stretches,
    range_of,
    read,
    rows_at,
    rows_of,
    scores,
    shifts,
    start_of,
    whose,
)


@triton.jit
def _stretch(
    acc, l, m, e, t, q, k_tile, v_tile, k_row, v_row, start, stop, first, last, rows, query_at,
    low, high, queries, keys, side, terms, shifted, its_batch, its_row, head, width, value_width,
    BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, D_EVEN: tl.constexpr,
    V_EVEN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    FREE: tl.constexpr, ENTROPY: tl.constexpr, DISTANCE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the keys from ``start`` to ``stop``; load no values outside ``first`` to ``last``."""
    near = tl.arange(0, BN)
    dims, value_dims = tl.arange(0, BD)[:, None], tl.arange(0, BV)[None, :]
    # With a table, a masked tile loads as many biases as it has scores: do not prefetch them.
    for n in tl.range(start, stop, BN, num_stages=1 if BIAS == TABLE and not FREE else None):
        n = tl.multiple_of(n, BN)
        key_at = n + near
        there = (key_at < keys)[None, :]
        k = read(k_tile + n.to(tl.int64) * k_row, dims, width, there, D_EVEN, FREE)
        dots = tl.dot(q, k, input_precision=PRECISION)  # [BM, BN]
        if FREE and BIAS == PLAIN and not SOFTCAP:
            higher = tl.maximum(m, tl.max(dots, 1) * (terms.scale * LOG2E))
            x = dots * (terms.scale * LOG2E) - higher[:, None]
        else:
            s, _slope = scores(
                dots, query_at[:, None], key_at[None, :], side, terms, head, BIAS, SOFTCAP, FREE
            )
            if BIAS == RELATIVE:
                s += shifts(
                    shifted, its_batch, head, its_row[:, None], (rows < queries)[:, None],
                    key_at[None, :],
                )  # fmt: skip
            if not FREE:
                may = allowed(
                    query_at[:, None], key_at[None, :], low[:, None], high[:, None], keys, KIND
                )
                s = tl.where(may, s, NOTHING)
            higher = tl.maximum(m, tl.max(s, 1))
            x = s - higher[:, None]
        p = tl.exp2(x)
        rescale = tl.exp2(m - higher)
        total = tl.sum(p, 1)
        if ENTROPY:
            e = (e + (m - higher) * l) * rescale + tl.sum(p * x, 1)
        if DISTANCE:
            if FREE:
                ahead = (query_at - n).to(tl.float32)
                inside = tl.sum(p * near.to(tl.float32)[None, :], 1)
                t = t * rescale + side * (ahead * total - inside)
            else:
                apart = tl.abs(query_at[:, None] - key_at[None, :]).to(tl.float32)
                t = t * rescale + tl.sum(p * apart, 1)
        l = l * rescale + total
        m = higher
        acc = acc * rescale[:, None]
        # Values that no query of the block attends to may be NaN, so they are not loaded.
        seen = ((key_at >= first) & (key_at < last))[:, None]
        v = read(v_tile + n.to(tl.int64) * v_row, value_dims, value_width, seen, V_EVEN, FREE)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, l, m, e, t


@triton.jit
def _finish(
    acc, l, m, e, t, rows, inside, flat, place, out, o_row, Lse, Entropy, Peak, Highest, Distance,
    queries, value_width, BV: tl.constexpr, ENTROPY: tl.constexpr, PEAK: tl.constexpr,
    HIGHEST: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Store the results of a block of rows; ``place`` is its index over all heads."""
    value_dims = tl.arange(0, BV)
    empty = l == 0  # no keys to attend to
    inverse = tl.where(empty, 0.0, 1 / tl.where(empty, 1.0, l))
    length = tl.log2(tl.where(empty, 1.0, l))
    at = flat * queries + rows
    tl.store(Lse + at, tl.where(empty, float("-inf"), (m + length) * LN2), mask=inside)
    if ENTROPY:
        tl.store(Entropy + at, (length - e * inverse) * LN2, mask=inside)
    if PEAK:
        tl.store(Peak + at, inverse, mask=inside)
    if DISTANCE:
        tl.store(Distance + at, t * inverse, mask=inside)
    if HIGHEST:
        highest = tl.max(tl.where(empty | (rows >= queries), float("-inf"), m * LN2), 0)
        tl.store(Highest + place, highest)
    tl.store(
        out + rows[:, None].to(tl.int64) * o_row + value_dims[None, :],
        (acc * inverse[:, None]).to(out.dtype.element_ty),
        mask=inside[:, None] & (value_dims[None, :] < value_width),
    )


@triton.jit(do_not_specialize=["sequence", "origin", "queries", "keys", "splits"])
def forward(
    query, key, value, out, Lse, Entropy, Peak, Highest, Distance, Partials, ends, terms, shifted,
    sequence, origin, heads, groups, queries, keys, width, value_width, splits,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BV: tl.constexpr, D_EVEN: tl.constexpr,
    V_EVEN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    ENTROPY: tl.constexpr, PEAK: tl.constexpr, HIGHEST: tl.constexpr, DISTANCE: tl.constexpr,
    SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Run attention: a program has BM queries of a head and, with SPLIT, a share of their keys."""
    # With a causal mask the longest rows run first, so that no long row remains at the end.
    block = tl.num_programs(0) - 1 - tl.program_id(0) if KIND == CAUSAL else tl.program_id(0)
    batch, head = whose(heads)
    if BIAS == RELATIVE:  # a part of the call, whose queries start at ``origin``
        block += origin // BM
        batch += sequence
    flat = batch * heads + head
    SIDES: tl.constexpr = by_distance(BIAS) or DISTANCE

    row = block * BM
    offset = start_of(ends, batch, queries, keys)
    rows = row + tl.arange(0, BM)
    inside = rows < queries
    query_at = rows + offset
    q = rows_of(query, batch, head, rows, inside, width, BD)
    k_tile = columns_at(key, batch, head // groups, BN, BD)
    v_tile = rows_at(value, batch, head // groups, BN, BV)
    low, high = range_of(ends, batch, rows, inside, KIND)
    last = tl.minimum(row + BM, queries) - 1
    parts = key_stretches(ends, batch, row, last, offset, keys, terms.reach, BN, KIND, SIDES)
    begin, end = parts[0], parts[5]
    if SPLIT:  # take this program's share of the keys, in whole tiles
        share = tl.cdiv(tl.cdiv(tl.maximum(end - begin, 0), BN), splits) * BN
        begin += tl.program_id(2) * share
        end = tl.minimum(begin + share, end)
    acc = tl.zeros([BM, BV], tl.float32)
    l = tl.zeros([BM], tl.float32)
    e = tl.zeros([BM], tl.float32)
    t = tl.zeros([BM], tl.float32)
    m = tl.full([BM], LOWEST, tl.float32)
    for PART in tl.static_range(5):
        if by_keys(PART, KIND, SIDES):
            start, stop = parts[PART], parts[PART + 1]
            if SPLIT:
                start, stop = tl.maximum(start, begin), tl.minimum(stop, end)
            acc, l, m, e, t = _stretch(
                acc, l, m, e, t, q, k_tile, v_tile, key.row, value.row, start, stop, parts[6],
                parts[5], rows, query_at, low, high, queries, keys, -1.0 if PART == 3 else 1.0,
                terms, shifted, batch - sequence, rows - origin, head, width, value_width, BN, BD,
                BV, D_EVEN, V_EVEN, KIND, BIAS, SOFTCAP, PART % 2 == 1, ENTROPY, DISTANCE,
                PRECISION,
            )  # fmt: skip
    if SPLIT:
        # Rows of BV + 4 numbers: the sums of values, then l, m, e and t.
        place = (flat * splits + tl.program_id(2)) * queries + rows
        partial = Partials + place * (BV + 4)
        tl.store(partial[:, None] + tl.arange(0, BV)[None, :], acc, mask=inside[:, None])
        tl.store(partial + BV, l, mask=inside)
        tl.store(partial + BV + 1, m, mask=inside)
        tl.store(partial + BV + 2, e, mask=inside)
        tl.store(partial + BV + 3, t, mask=inside)
    else:
        place = flat * tl.cdiv(queries, BM) + block
        _finish(
            acc, l, m, e, t, rows, inside, flat, place, head_of(out, batch, head), out.row, Lse,
            Entropy, Peak, Highest, Distance, queries, value_width, BV, ENTROPY, PEAK, HIGHEST,
            DISTANCE,
        )  # fmt: skip


@triton.jit(do_not_specialize=["queries", "splits"])
def merge(
    Partials, out, Lse, Entropy, Peak, Highest, Distance, heads, queries, value_width, splits,
    BM: tl.constexpr, BV: tl.constexpr, ENTROPY: tl.constexpr, PEAK: tl.constexpr,
    HIGHEST: tl.constexpr, DISTANCE: tl.constexpr,
):  # fmt: skip
    """Combine the partial sums of the programs that split the keys of the same rows."""
    batch, head = whose(heads)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < queries
    acc = tl.zeros([BM, BV], tl.float32)
    l = tl.zeros([BM], tl.float32)
    e = tl.zeros([BM], tl.float32)
    t = tl.zeros([BM], tl.float32)
    m = tl.full([BM], LOWEST, tl.float32)
    for split in range(splits):
        place = (tl.program_id(1) * splits + split).to(tl.int64) * queries + rows
        partial = Partials + place * (BV + 4)
        more = tl.load(
            partial[:, None] + tl.arange(0, BV)[None, :], mask=inside[:, None], other=0.0
        )
        its_l = tl.load(partial + BV, mask=inside, other=0.0)
        its_m = tl.load(partial + BV + 1, mask=inside, other=LOWEST)
        higher = tl.maximum(m, its_m)
        rescale, its_rescale = tl.exp2(m - higher), tl.exp2(its_m - higher)
        if ENTROPY:
            its_e = tl.load(partial + BV + 2, mask=inside, other=0.0)
            e = (e + (m - higher) * l) * rescale + (its_e + (its_m - higher) * its_l) * its_rescale
        if DISTANCE:
            t = t * rescale + tl.load(partial + BV + 3, mask=inside, other=0.0) * its_rescale
        l = l * rescale + its_l * its_rescale
        acc = acc * rescale[:, None] + more * its_rescale[:, None]
        m = higher
    flat = tl.program_id(1).to(tl.int64)
    place = flat * tl.num_programs(0) + tl.program_id(0)
    _finish(
        acc, l, m, e, t, rows, inside, flat, place, head_of(out, batch, head), out.row, Lse,
        Entropy, Peak, Highest, Distance, queries, value_width, BV, ENTROPY, PEAK, HIGHEST,
        DISTANCE,
    )  # fmt: skip
