# mypy: ignore-errors
"""The highest weights of each query; see rows.py for the way they are found.

Here the forward pass has told the bar, so one stream over the keys collects what may be among the
highest. What a block collects is put in order at its end, while it is still in the cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from regard.mechanism.kernels.hopper.roles import (
    BLOCK,
    CHANGING,
    LANES,
    LN2,
    LOWEST,
    NOTHING,
    PAIR,
    ROWS,
    TEAMS,
    along,
    await_team,
    await_tile,
    block_of,
    by_lanes,
    fill,
    fill_teams,
    first_place,
    following,
    halves_of,
    item_of,
    may_see,
    part_of,
    product,
    release,
    ring_of,
    turns_of,
)
from regard.mechanism.kernels.structure import Work

ROOM = gl.constexpr(24)  # records of a row that a thread can collect
SURE = gl.constexpr(4)  # how many it may store before it looks for room: it stops with fewer left
RECORD = gl.constexpr(8)  # numbers of one: two pairs of scores, the first key, and nothing
FOUR = gl.constexpr(4)  # scores of a record
BEYOND = gl.constexpr(0x7FFFFFFF)  # every key
SLOTS = gl.constexpr(16)  # records of a row that are put in order at a time
PLACES = gl.constexpr(8)  # of a row that can be asked for


@gluon.jit
def _load_keys(loader, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    q_ring, k_ring, q_desc, k_desc, work, offset, tiles = loader
    place = first_place()
    q_place = first_place()
    for number in range(turns_of(work, False)):
        item, _low, _high = item_of(number, work, False)
        for half in range(halves_of(item, work, CAUSAL)):
            flat, block = block_of(item, half, work, CAUSAL)
            batch, head = flat // work.heads, flat % work.heads
            row = block * (TEAMS * ROWS)
            fill_teams(q_ring, q_place, q_desc, batch, head, row, D)
            stop = _last_tile(row + (TEAMS - 1) * ROWS, offset, tiles, CAUSAL) + 1
            for i in range(stop):
                at = [batch, head // work.groups, (stop - 1 - i) * BLOCK, 0]
                fill(k_ring, place, k_desc, at, BLOCK * D * 2)
                place = following(place, STAGES)
            q_place = following(q_place, 2)


@gluon.jit
def _last_tile(row, offset, tiles, CAUSAL: gl.constexpr):
    """Of the keys that the 64 queries from a row on see."""
    if CAUSAL:
        return gl.minimum(tiles - 1, (row + ROWS - 1 + offset) // BLOCK)
    return tiles - 1


@gluon.jit
def _in_pairs(s):
    """Scores by lanes, and by neighbours: [ROWS, LANES, ., PAIR]."""
    return gl.reshape(s, [ROWS, LANES, s.shape[2] // PAIR, PAIR])


@gluon.jit
def _store_pair(pair, slot, reaches):
    layout: gl.constexpr = pair.type.layout
    near = gl.arange(0, PAIR, along(layout, 3, 2))[None, None, :]
    slot = gl.convert_layout(slot, gl.SliceLayout(2, layout))[:, :, None]
    reaches = gl.convert_layout(reaches, gl.SliceLayout(2, layout))[:, :, None]
    gl.store(slot + near, pair, mask=reaches)


@gluon.jit
def _keep(pairs, bar, used, room, key, FIRST: gl.constexpr):
    """Store those of a thread's scores that reach the bar, with three others each, and their key.

    ``pairs`` is [rows, LANES, ., PAIR], ``used`` how many numbers were stored: [rows, LANES].
    Where there might be no more room, nothing is stored.
    """
    N: gl.constexpr = pairs.shape[2]
    if N == 2 * SURE:
        bar = gl.where(used <= (ROOM - SURE) * RECORD, bar, float("nan"))  # which none reaches
    halves = gl.permute(gl.reshape(pairs, [ROWS, LANES, 2, N // 2, PAIR]), (0, 1, 3, 4, 2))
    near, far = gl.split(halves)
    if N > 2:
        used = _keep(near, bar, used, room, key, FIRST)
        used = _keep(far, bar, used, room, key, FIRST + N // 2)
    else:
        near, far = gl.reshape(near, [ROWS, LANES, PAIR]), gl.reshape(far, [ROWS, LANES, PAIR])
        high = gl.maximum(gl.max(near, 2), gl.max(far, 2))
        reaches = gl.convert_layout(high, used.type.layout) >= bar
        slot = room + used
        _store_pair(near, slot, reaches)
        _store_pair(far, slot + PAIR, reaches)
        which = key + FIRST * (LANES * PAIR)
        gl.store(slot + 2 * PAIR, which.to(gl.float32, bitcast=True), mask=reaches)
        used = gl.where(reaches, used + RECORD, used)
    return used


@gluon.constexpr_function
def _records(slots):
    """Records of rows, [ROWS, slots, FOUR]: a thread has a share of the two rows it multiplies."""
    share = slots // 4
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], *[[0, slot, 0] for slot in (1, 2, 4) if slot < share], [8, 0, 0]],
        [[0, share, 0], [0, 2 * share, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, slots, 4],
    )


@gluon.jit
def _order(Found, row, records, count):
    """The ``count`` highest of what was collected and their keys, in order: [ROWS, PLACES].

    ``records`` says how many each thread has: [ROWS, LANES].
    """
    layout: gl.constexpr = _records(SLOTS)
    of_slots: gl.constexpr = gl.SliceLayout(2, layout)
    of_places: gl.constexpr = gl.SliceLayout(2, _records(PLACES))
    of_rows: gl.constexpr = gl.SliceLayout(1, of_slots)
    thread = gl.arange(0, LANES, gl.SliceLayout(0, records.type.layout))[None, :]
    first = gl.sum(gl.where(thread < 1, records, 0), 1)
    second = gl.sum(gl.where(thread < 2, records, 0), 1)
    third = gl.sum(gl.where(thread < 3, records, 0), 1)
    last = gl.sum(records, 1)
    most = gl.max(last, 0)
    first, second = gl.convert_layout(first, of_rows), gl.convert_layout(second, of_rows)
    third, last = gl.convert_layout(third, of_rows), gl.convert_layout(last, of_rows)
    first, second, third, last = first[:, None], second[:, None], third[:, None], last[:, None]
    row = gl.convert_layout(row, of_rows)[:, None]
    four = gl.arange(0, FOUR, along(layout, 3, 2))[None, None, :]
    place = gl.arange(0, PLACES, gl.SliceLayout(0, of_places))[None, :]
    highest = gl.full([ROWS, PLACES], NOTHING, gl.float32, of_places)
    chosen = gl.full([ROWS, PLACES], -1, gl.int32, of_places)
    # Nearly all rows have no more than SLOTS; where some have, theirs compete with the best so far.
    for start in range(0, most, SLOTS):
        number = start + gl.arange(0, SLOTS, gl.SliceLayout(0, of_slots))[None, :]
        lane = gl.where(number < second, 1, gl.where(number < third, 2, 3))
        lane = gl.where(number < first, 0, lane)
        before = gl.where(number < second, first, gl.where(number < third, second, third))
        before = gl.where(number < first, 0, before)
        at = Found + ((row * LANES + lane) * ROOM + number - before) * RECORD
        there = number < last
        s = gl.load(at[:, :, None] + four, mask=there[:, :, None], other=NOTHING)
        key = gl.load(at + FOUR, mask=there, other=0.0).to(gl.int32, bitcast=True)
        key = key[:, :, None] + (four // PAIR * (LANES * PAIR) + four % PAIR)
        rest, rest_keys = highest, chosen
        for i in range(count):
            mine = gl.max(gl.reshape(gl.max(s, 2), [ROWS, LANES, SLOTS // LANES]), 2)
            also = gl.max(gl.reshape(rest, [ROWS, LANES, PLACES // LANES]), 2)
            top = gl.max(gl.maximum(mine, gl.convert_layout(also, mine.type.layout)), 1)
            of_new = gl.convert_layout(top, of_rows)[:, None, None]
            of_old = gl.convert_layout(top, gl.SliceLayout(1, of_places))[:, None]
            highest = gl.where(place == i, of_old, highest)
            mine = gl.min(gl.where(s == of_new, key, BEYOND), 2)
            mine = gl.min(gl.reshape(mine, [ROWS, LANES, SLOTS // LANES]), 2)
            also = gl.where(rest == of_old, rest_keys, BEYOND)
            also = gl.min(gl.reshape(also, [ROWS, LANES, PLACES // LANES]), 2)
            which = gl.min(gl.minimum(mine, gl.convert_layout(also, mine.type.layout)), 1)
            of_new = gl.convert_layout(which, of_rows)[:, None, None]
            of_old = gl.convert_layout(which, gl.SliceLayout(1, of_places))[:, None]
            chosen = gl.where(place == i, of_old, chosen)
            s = gl.where(key == of_new, NOTHING, s)
            rest = gl.where(rest_keys == of_old, NOTHING, rest)
    return highest, chosen


@gluon.jit
def _find(
    shared,
    PART: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 queries of every block, and the keys they see, the last first."""
    q_ring, k_ring, Bar, Lse, Found, Left, Weights, Keys, work, sizes = shared
    queries, keys, offset, tiles, count, c = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    none = by_lanes(gl.zeros([ROWS, BLOCK], gl.float32, layout))
    of_lanes: gl.constexpr = gl.max(none, 2).type.layout
    of_rows: gl.constexpr = along(none.type.layout, 3, 0)
    of_places: gl.constexpr = gl.SliceLayout(2, _records(PLACES))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, of_lanes))[None, :]
    here = gl.program_id(0) * (TEAMS * ROWS) + PART * ROWS
    here += gl.arange(0, ROWS, gl.SliceLayout(1, of_lanes))
    room = Found + (here[:, None] * LANES + lane) * (ROOM * RECORD)
    place = first_place()
    q_place = first_place()
    for number in range(turns_of(work, False)):
        item, _low, _high = item_of(number, work, False)
        for half in range(halves_of(item, work, CAUSAL)):
            flat, block = block_of(item, half, work, CAUSAL)
            part = part_of(half, PART, CAUSAL)
            row = block * (TEAMS * ROWS) + part * ROWS
            first = flat.to(gl.int64) * queries
            query_at = row + gl.arange(0, ROWS, of_rows) + offset
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, of_lanes))
            bar = gl.load(Bar + first + rows, mask=rows < queries, other=float("nan"))[:, None]
            used = gl.zeros([ROWS, LANES], gl.int32, of_lanes)
            last = _last_tile(row, offset, tiles, CAUSAL)
            q = await_team(q_ring, q_place, part, D)
            ahead = _last_tile(row + (TEAMS - 1 - part) * ROWS, offset, tiles, CAUSAL) - last
            for _ in range(ahead):
                await_tile(k_ring, place)
                release(k_ring, place)
                place = following(place, STAGES)
            s = hopper.warpgroup_mma_wait(0, deps=[product(q, k_ring, place, D)])
            key = last * BLOCK
            scores = by_lanes(s)
            if CAUSAL or not EVEN:
                seen = may_see(scores, query_at, key, keys, CAUSAL)
                scores = gl.where(seen, scores, NOTHING)
            used = _keep(_in_pairs(scores), bar, used, room, key + lane * PAIR, 0)
            for tile in range(1, last + 1):
                key = (last - tile) * BLOCK
                release(k_ring, place)
                place = following(place, STAGES)
                s = hopper.warpgroup_mma_wait(0, deps=[product(q, k_ring, place, D)])
                scores = by_lanes(s)
                if CAUSAL and not EVEN:
                    seen = may_see(scores, query_at, key, keys, CAUSAL)
                    scores = gl.where(seen, scores, NOTHING)
                used = _keep(_in_pairs(scores), bar, used, room, key + lane * PAIR, 0)
            release(k_ring, place)
            release(q_ring, q_place)
            place = following(place, STAGES)
            q_place = following(q_place, 2)

            records = used // RECORD
            full = gl.max(records, 1) > ROOM - SURE
            gl.store(Left + first + rows, full.to(gl.int8), mask=rows < queries)
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, of_places))
            lse = gl.load(Lse + first + rows, mask=rows < queries, other=0.0) * (1 / LN2)
            gl.thread_barrier()  # what the threads of a row stored, all of them read
            highest, chosen = _order(Found, here, records, count)
            gl.thread_barrier()  # and before the next block's are stored
            rank = gl.arange(0, PLACES, gl.SliceLayout(0, of_places))[None, :]
            real = highest > LOWEST
            weights = gl.where(real, gl.exp2(highest * c - lse[:, None]), 0.0)
            at = (first + rows)[:, None] * count + rank
            mask = (rows < queries)[:, None] & (rank < count)
            gl.store(Weights + at, weights, mask=mask)
            gl.store(Keys + at, gl.where(real, chosen, -1).to(gl.int64), mask=mask)


@gluon.jit(do_not_specialize=[*CHANGING, "queries", "keys", "tiles"])
def top(
    q_desc, k_desc, Bar, Lse, Found, Left, Weights, Keys,
    items, pairs, blocks, heads, groups, programs, length, share, queries, keys, tiles, count, c,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """The ``count`` highest weights of each query and their keys; see rows.py.

    ``Bar`` is a score that as many of a query's reach. ``Found`` is room for what reaches it, of
    one block for each program. ``Left`` tells rows that had not enough of it. EVEN: queries and
    keys end a multiple of 64 apart; without a mask: keys fill their tiles.
    """
    work = Work(items, pairs, blocks, heads, groups, programs, length, share)
    offset = keys - queries
    q_ring = ring_of(q_desc, 2 * TEAMS, 2, TEAMS)
    k_ring = ring_of(k_desc, STAGES, STAGES, TEAMS)
    hopper.fence_async_shared()
    sizes = queries, keys, offset, tiles, count, c
    shared = q_ring, k_ring, Bar, Lse, Found, Left, Weights, Keys, work, sizes
    loader = q_ring, k_ring, q_desc, k_desc, work, offset, tiles
    gl.warp_specialize(
        [
            (_find, (shared, 0, D, STAGES, CAUSAL, EVEN)),
            (_find, (shared, 1, D, STAGES, CAUSAL, EVEN)),
            (_find, (shared, 2, D, STAGES, CAUSAL, EVEN)),
            (_find, (shared, 3, D, STAGES, CAUSAL, EVEN)),
            (_load_keys, (loader, D, STAGES, CAUSAL)),
        ],
        [4, 4, 4, 1], [112, 112, 112, 24],
    )  # fmt: skip
