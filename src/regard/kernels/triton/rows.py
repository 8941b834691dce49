# mypy: ignore-errors
"""Chosen rows of weights, and the top k weights of every row.

The top k are found in two passes over the keys, without sorting tiles. The first pass keeps, for
each query and each place of a tile, the highest score over all tiles. The k-th highest of these
(equal scores count once) is a threshold that at least k scores reach. The second pass collects the
few scores that reach it. It must round scores exactly as the first pass does, or a score equal to
the threshold may be missed. ``pick`` sorts the collected scores; among equal scores the earlier key
is first. If more scores reach the threshold than the buffers or ``pick`` can take (because of equal
scores, or a pattern that repeats from tile to tile), ``search`` reads all keys of the row again.

Called by ``launch.rows`` and ``launch.top``.

Test: ``pytest tests/kernels/test_triton.py -k top_keys``.
"""

import triton
import triton.language as tl

from regard.kernels import sizes
from regard.kernels.compat import gdc_wait
from regard.kernels.triton.tiles import (
    LOWEST,
    NOTHING,
    TABLE,
    allowed,
    by_distance,
    by_keys,
    columns_at,
    key_stretches,
    range_of,
    read,
    rows_lse,
    rows_of,
    scores,
    start_of,
    whose,
)

MISSING = tl.constexpr(-(2**63))  # sorts after every score
HIGHEST = tl.constexpr(2**31 - 1)  # larger than any key
LANES = tl.constexpr(sizes.LANES)  # threads that share a row; each has its own candidates
FEW = tl.constexpr(16)  # the most unfinished rows that a program searches one by one
NARROW = tl.constexpr(64)  # keys at a time when rows are searched together


@triton.jit(do_not_specialize=["queries", "keys"])
def rows(
    query, key, Lse, Index, Weights, ends, terms, heads, groups, queries, keys, width, count,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr,
    SOFTCAP: tl.constexpr, LOGS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the weights of the rows in Index, or with LOGS their logarithms to base 2."""
    batch, head = whose(heads)
    blocks = tl.cdiv(count, BM)
    place = tl.program_id(0) % blocks * BM + tl.arange(0, BM)
    wanted = place < count
    index = tl.load(Index + place, mask=wanted, other=0)
    key_at = tl.program_id(0) // blocks * BN + tl.arange(0, BN)
    real = key_at < keys
    query_at = index + start_of(ends, batch, queries, keys)
    flat = tl.program_id(1).to(tl.int64)
    q = rows_of(query, batch, head, index, wanted, width, BD)
    low, high = range_of(ends, batch, index, wanted, KIND)
    may = allowed(query_at[:, None], key_at[None, :], low[:, None], high[:, None], keys, KIND)
    seen = (tl.max((may & wanted[:, None]).to(tl.int32), 0) > 0) & real
    k = rows_of(key, batch, head // groups, key_at, seen, width, BD)
    dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s, _slope = scores(
        dots, query_at[:, None], key_at[None, :], 1.0, terms, head, BIAS, SOFTCAP, False
    )
    lse = rows_lse(Lse + flat * queries + index, wanted)
    if LOGS:
        result = tl.where(may, s - lse[:, None], float("-inf"))
    else:
        result = tl.where(may, tl.exp2(s - lse[:, None]), 0.0)
    at = Weights + (flat * count + place[:, None]) * keys + key_at[None, :]
    tl.store(at, result, mask=wanted[:, None] & real[None, :])


@triton.jit
def _ranked(s, key_at):
    """Pack a score and its key into a number: larger for higher scores, then for earlier keys."""
    bits = s.to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (order.to(tl.int64) << 32) | (0x7FFFFFFF - key_at).to(tl.int64)


@triton.jit
def _keep(cell, threshold, counts, place, n, Candidates, BN: tl.constexpr, ROOM: tl.constexpr):
    """Store each cell's highest score if it reaches the threshold; return counts and columns."""
    column = tl.reshape(tl.arange(0, BN), [1, BN // (2 * LANES), LANES, 2])
    value = tl.max(tl.max(cell, 3), 1)  # [BM, LANES]
    which = tl.where(cell == value[:, None, :, None], column, BN)
    which = tl.min(tl.min(which, 3), 1)
    reach = value >= threshold[:, None]
    at = Candidates + (place[:, None] * LANES + tl.arange(0, LANES)[None, :]) * ROOM + counts
    tl.store(at, _ranked(value, n + which), mask=reach & (counts < ROOM))
    return counts + reach.to(tl.int32), which


@triton.jit
def _stretch(
    best, counts, threshold, q, k_tile, k_row, start, stop, place, query_at, low, high, keys, side,
    terms, head, Candidates, width,
    BN: tl.constexpr, BD: tl.constexpr, ROOM: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FREE: tl.constexpr,
    COLLECT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    near, dims = tl.arange(0, BN), tl.arange(0, BD)[:, None]
    for n in tl.range(start, stop, BN, num_stages=1 if BIAS == TABLE and not FREE else None):
        n = tl.multiple_of(n, BN)
        key_at = n + near
        k = read(k_tile + n.to(tl.int64) * k_row, dims, width, (key_at < keys)[None, :], EVEN, FREE)
        dots = tl.dot(q, k, input_precision=PRECISION)
        s, _slope = scores(
            dots, query_at[:, None], key_at[None, :], side, terms, head, BIAS, SOFTCAP, FREE
        )
        if not FREE:
            may = allowed(
                query_at[:, None], key_at[None, :], low[:, None], high[:, None], keys, KIND
            )
            s = tl.where(may, s, NOTHING)
        if COLLECT:
            # A cell has the scores of one row that one thread holds. In most cells at most one
            # score reaches the threshold. If there are more, the thread stores them one by one.
            cell = tl.reshape(s, [s.shape[0], BN // (2 * LANES), LANES, 2])
            many = tl.sum(tl.sum((cell >= threshold[:, None, None, None]).to(tl.int32), 3), 1)
            remaining = tl.max(tl.max(many, 1), 0)
            if remaining > 0:
                counts, which = _keep(cell, threshold, counts, place, n, Candidates, BN, ROOM)
                while remaining > 1:
                    column = tl.reshape(near, [1, BN // (2 * LANES), LANES, 2])
                    cell = tl.where(column == which[:, None, :, None], NOTHING, cell)
                    counts, which = _keep(cell, threshold, counts, place, n, Candidates, BN, ROOM)
                    remaining -= 1
        else:
            best = tl.maximum(best, s)
    return best, counts


@triton.jit(do_not_specialize=["queries", "keys", "from_head"])
def collect(
    query, key, Counts, Candidates, ends, terms, heads, groups, queries, keys, width, count,
    from_head, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, ROOM: tl.constexpr,
    EVEN: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Collect for each query the scores that may be among its ``count`` highest."""
    flat = tl.program_id(1) + from_head
    batch, head = (flat // heads).to(tl.int64), (flat % heads).to(tl.int64)
    SIDES: tl.constexpr = by_distance(BIAS)
    row = tl.program_id(0) * BM
    offset = start_of(ends, batch, queries, keys)
    rows = row + tl.arange(0, BM)
    inside = rows < queries
    query_at = rows + offset
    q = rows_of(query, batch, head, rows, inside, width, BD)
    k_tile = columns_at(key, batch, head // groups, BN, BD)
    low, high = range_of(ends, batch, rows, inside, KIND)
    last = tl.minimum(row + BM, queries) - 1
    parts = key_stretches(ends, batch, row, last, offset, keys, terms.reach, BN, KIND, SIDES)
    place = tl.program_id(1).to(tl.int64) * queries + rows
    best = tl.full([BM, BN], NOTHING, tl.float32)
    threshold = tl.full([BM], NOTHING, tl.float32)
    counts = tl.zeros([BM, LANES], tl.int32)
    for PASS in tl.static_range(2):
        for PART in tl.static_range(5):
            if by_keys(PART, KIND, SIDES):
                best, counts = _stretch(
                    best, counts, threshold, q, k_tile, key.row, parts[PART], parts[PART + 1],
                    place, query_at, low, high, keys, -1.0 if PART == 3 else 1.0, terms, head,
                    Candidates, width, BN, BD, ROOM, EVEN, KIND, BIAS, SOFTCAP, PART % 2 == 1,
                    PASS == 1, PRECISION,
                )  # fmt: skip
        if PASS == 0:
            for _ in range(count):
                threshold = tl.max(best, 1)
                best = tl.where(best >= threshold[:, None], NOTHING, best)
            # If fewer than ``count`` keys are allowed, exactly these must reach the threshold.
            threshold = tl.where(inside, tl.maximum(threshold, LOWEST), float("inf"))
    at = Counts + place[:, None] * LANES + tl.arange(0, LANES)[None, :]
    tl.store(at, counts, mask=inside[:, None])


@triton.jit
def _unranked(rank):
    """Unpack a number of ``_ranked`` into score and key."""
    order = (rank >> 32).to(tl.int32)
    s = (order ^ ((order >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    s = tl.where(rank == MISSING, NOTHING, s)
    return s, (0x7FFFFFFF - (rank & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _highest(Candidates, place, ends, SLOTS: tl.constexpr, ROOM: tl.constexpr, COUNT: tl.constexpr):
    """Return the COUNT highest candidates of each row, in order; see ``_in_order``.

    ``ends`` are the numbers of candidates of the first 1, 2, 3 and 4 lanes, at most SLOTS.
    """
    slot = tl.arange(0, SLOTS)[None, :]
    first, second, third = ends[0][:, None], ends[1][:, None], ends[2][:, None]
    lane = tl.where(slot < first, 0, tl.where(slot < second, 1, tl.where(slot < third, 2, 3)))
    before = tl.where(lane == 0, 0, tl.where(lane == 1, first, tl.where(lane == 2, second, third)))
    at = (place[:, None] * LANES + lane) * ROOM + slot - before
    ranks = tl.load(Candidates + at, mask=slot < ends[3][:, None], other=MISSING)
    s, key = _unranked(ranks)
    return _in_order(s, key, COUNT)


@triton.jit
def _in_order(s, key, COUNT: tl.constexpr):
    """Return each row's COUNT highest scores and their keys; equal scores in order of keys."""
    column = tl.arange(0, COUNT)[None, :]
    highest = tl.full([s.shape[0], COUNT], NOTHING, tl.float32)
    keys = tl.full([s.shape[0], COUNT], -1, tl.int32)
    for place in range(COUNT):
        top = tl.max(s, 1)[:, None]
        first = tl.min(tl.where(s == top, key, 0x7FFFFFFF), 1)[:, None]
        highest = tl.where(column == place, top, highest)
        keys = tl.where(column == place, first, keys)
        s = tl.where((s == top) & (key == first), NOTHING, s)
    return highest, keys


@triton.jit
def _write(s, key, lse, at, Weights, Keys, mask):
    there = s > LOWEST
    tl.store(Weights + at, tl.where(there, tl.exp2(s - lse), 0.0), mask=mask)
    tl.store(Keys + at, tl.where(there, key, -1).to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["queries", "from_head"])
def pick(
    Lse, Counts, Candidates, Unfinished, Weights, Keys, queries, count, from_head,
    BM: tl.constexpr, ROOM: tl.constexpr, MOST: tl.constexpr, COUNT: tl.constexpr,
):  # fmt: skip
    """Store the weights and keys of the ``count`` highest candidates of each query.

    Mark rows with too many candidates in ``Unfinished``; ``search`` finishes them.
    """
    flat = (tl.program_id(1) + from_head).to(tl.int64)
    rows = tl.program_id(0) * BM + tl.arange(0, BM)
    inside = rows < queries
    place = tl.program_id(1).to(tl.int64) * queries + rows
    lse = rows_lse(Lse + flat * queries + rows, inside)
    first = tl.load(Counts + place * LANES, mask=inside, other=0)
    second = tl.load(Counts + place * LANES + 1, mask=inside, other=0)
    third = tl.load(Counts + place * LANES + 2, mask=inside, other=0)
    fourth = tl.load(Counts + place * LANES + 3, mask=inside, other=0)
    most = tl.maximum(tl.maximum(first, second), tl.maximum(third, fourth))
    unfinished = (most > ROOM) | (first + second + third + fourth > MOST)
    tl.store(Unfinished + flat * queries + rows, unfinished, mask=inside)
    first = tl.minimum(first, ROOM)
    second = first + tl.minimum(second, ROOM)
    third = second + tl.minimum(third, ROOM)
    ends = first, second, third, third + tl.minimum(fourth, ROOM)
    # Usually there are few more than COUNT candidates. Rows with more than MOST are left to
    # ``search``, because larger tiles would cost registers for every row.
    if tl.max(ends[3], 0) <= MOST // 2:
        s, keys = _highest(Candidates, place, ends, MOST // 2, ROOM, COUNT)
    else:
        s, keys = _highest(Candidates, place, ends, MOST, ROOM, COUNT)
    column = tl.arange(0, COUNT)[None, :]
    at = (flat * queries + rows)[:, None] * count + column
    _write(s, keys, lse[:, None], at, Weights, Keys, inside[:, None] & (column < count))


@triton.jit
def _search(
    query, key, Lse, Unfinished, Weights, Keys, ends, terms, flat, row, until, heads, groups,
    queries, keys, width, count,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, COUNT: tl.constexpr, KIND: tl.constexpr,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the top keys of the unfinished rows among BM rows that are before ``until``."""
    batch, head = (flat // heads).to(tl.int64), (flat % heads).to(tl.int64)
    flat = flat.to(tl.int64)
    offset = start_of(ends, batch, queries, keys)
    rows = row + tl.arange(0, BM)
    inside = rows < queries
    unfinished = tl.load(Unfinished + flat * queries + rows, mask=rows < until, other=0) > 0
    query_at = rows + offset
    lse = rows_lse(Lse + flat * queries + rows, inside)
    last = tl.minimum(row + BM, queries) - 1
    parts = key_stretches(ends, batch, row, last, offset, keys, terms.reach, BN, KIND, False)
    q = rows_of(query, batch, head, rows, inside, width, BD)
    low, high = range_of(ends, batch, rows, inside, KIND)
    # The highest scores so far, unsorted. Places beyond ``count`` hold inf and are never replaced.
    column = tl.arange(0, COUNT)[None, :]
    best = tl.zeros([BM, COUNT], tl.float32) + tl.where(column < count, NOTHING, float("inf"))
    best_keys = tl.zeros([BM, COUNT], tl.int32) - 1 - column
    lowest = tl.full([BM], NOTHING, tl.float32)
    for n in range(parts[0], parts[5], BN):
        key_at = n + tl.arange(0, BN)
        k = rows_of(key, batch, head // groups, key_at, key_at < keys, width, BD)
        if BM == 1:
            dots = tl.sum(k.to(tl.float32) * q.to(tl.float32), 1)[None, :]
        else:
            dots = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        s, _slope = scores(
            dots, query_at[:, None], key_at[None, :], 1.0, terms, head, BIAS, SOFTCAP, False
        )
        may = allowed(query_at[:, None], key_at[None, :], low[:, None], high[:, None], keys, KIND)
        s = tl.where(may & unfinished[:, None], s, NOTHING)
        top = tl.max(s, 1)
        while tl.max((top > lowest).to(tl.int32), 0) > 0:
            # The highest new score replaces the lowest kept one. Among equal scores the first key
            # enters and the last one leaves.
            chosen = tl.min(tl.where(s == top[:, None], key_at[None, :], HIGHEST), 1)
            latest = tl.max(tl.where(best == lowest[:, None], best_keys, -HIGHEST), 1)
            replaced = (best_keys == latest[:, None]) & (top > lowest)[:, None]
            best = tl.where(replaced, top[:, None], best)
            best_keys = tl.where(replaced, chosen[:, None], best_keys)
            s = tl.where(key_at[None, :] == chosen[:, None], NOTHING, s)
            lowest = tl.min(best, 1)
            top = tl.max(s, 1)
    s, best_keys = _in_order(tl.where(column < count, best, NOTHING), best_keys, COUNT)
    at = (flat * queries + rows)[:, None] * count + column
    mask = unfinished[:, None] & (column < count)
    _write(s, best_keys, lse[:, None], at, Weights, Keys, mask)


@triton.jit(do_not_specialize=["rows", "queries", "keys"])
def search(
    query, key, Lse, Unfinished, Weights, Keys, ends, terms, rows, heads, groups, queries, keys,
    width, count,
    LOOKED: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr,
    COUNT: tl.constexpr, KIND: tl.constexpr, BIAS: tl.constexpr, SOFTCAP: tl.constexpr,
    PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Finish the rows that ``pick`` left unfinished, by reading all of their keys again.

    Nearly always there are no or few such rows, and later kernels wait for this one. So a program
    checks many rows of all heads at once. If few of them are unfinished, it searches these one by
    one.
    """
    if EARLY:  # this program may start before the launch that marks the rows has ended
        gdc_wait()
    start = tl.program_id(0) * LOOKED
    place = tl.arange(0, LOOKED)
    unfinished = tl.load(Unfinished + start + place, mask=place < rows - start, other=0) > 0
    at = tl.min(tl.where(unfinished, place, LOOKED), 0)
    many = tl.sum(unfinished.to(tl.int32), 0) > FEW
    while at < LOOKED:
        flat, row = (start + at) // queries, (start + at) % queries
        until = tl.minimum(row + LOOKED - at, queries)
        if many:
            _search(
                query, key, Lse, Unfinished, Weights, Keys, ends, terms, flat, row, until, heads,
                groups, queries, keys, width, count, BM, NARROW, BD, COUNT, KIND, BIAS, SOFTCAP,
                PRECISION,
            )  # fmt: skip
        else:
            _search(
                query, key, Lse, Unfinished, Weights, Keys, ends, terms, flat, row, until, heads,
                groups, queries, keys, width, count, 1, BN, BD, COUNT, KIND, BIAS, SOFTCAP,
                PRECISION,
            )  # fmt: skip
        at += tl.where(many, tl.minimum(BM, queries - row), 1)
        at = tl.min(tl.where(unfinished & (place >= at), place, LOOKED), 0)
