# mypy: ignore-errors
"""The highest weights of each query; see rows.py for the way they are found.

Here the forward pass has told the bar, so one stream over the keys collects what may be among the
highest. What a block collects is put in order at its end, while it is still in the cache.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from regard.mechanism.kernels.hopper.roles import (
    BAND,
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
    first_item,
    first_place,
    following,
    halves_of,
    may_see,
    next_item,
    part_of,
    places_in,
    product,
    release,
    ring_of,
    stride_of,
    turns_of,
    wide,
)
from regard.mechanism.kernels.structure import Work

ROOM = gl.constexpr(40)  # records of two rows that a thread can collect
SURE = gl.constexpr(4)  # how many it may store before it looks for room: it stops with fewer left
RECORD = gl.constexpr(8)  # numbers of one: a pair of scores of each row, the first key, and nothing
SIZE = gl.constexpr(RECORD * 4)  # bytes of one
FOUR = gl.constexpr(4)  # scores of a record
BOTH = gl.constexpr(ROWS // 2)  # pairs of rows: a thread has some of each of its two
BEYOND = gl.constexpr(0x7FFFFFFF)  # every key
SLOTS = gl.constexpr(32)  # records of two rows that are put in order at a time
PLACES = gl.constexpr(8)  # of a row that can be asked for


@gluon.jit
def _load_keys(loader, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    q_ring, k_ring, q_desc, k_desc, work, offset, tiles = loader
    place = first_place()
    q_place = first_place()
    item, stride = first_item(work, False), stride_of(work, False)
    for _ in range(turns_of(work, False)):
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
        item = next_item(item, stride, work)


@gluon.jit
def _last_tile(row, offset, tiles, CAUSAL: gl.constexpr):
    """Of the keys that the 64 queries from a row on see."""
    if CAUSAL:
        return gl.minimum(tiles - 1, (row + ROWS - 1 + offset) // BLOCK)
    return tiles - 1


@gluon.jit
def _in_fours(s):
    """Scores by lanes, of two rows side by side as a thread holds them: [BOTH, LANES, ., FOUR]."""
    N: gl.constexpr = s.shape[2] // PAIR
    parts = gl.reshape(s, [ROWS // BAND, 2, BAND // 2, LANES, N, PAIR])
    return gl.reshape(gl.permute(parts, (0, 2, 3, 4, 1, 5)), [BOTH, LANES, N, FOUR])


@gluon.jit
def _in_rows(x, COUNT: gl.constexpr, EACH: gl.constexpr):
    """[BOTH, ., both rows, .] as [ROWS, ., .]."""
    parts = gl.permute(gl.reshape(x, [ROWS // BAND, BAND // 2, COUNT, 2, EACH]), (0, 3, 1, 2, 4))
    return gl.reshape(parts, [ROWS, COUNT, EACH])


@gluon.jit
def _of_both(x):
    """What each row has, as what the one and the other row of two have: [BOTH, 1]."""
    parts = gl.permute(gl.reshape(x, [ROWS // BAND, 2, BAND // 2]), (0, 2, 1))
    one, other = gl.split(gl.reshape(parts, [BOTH, 2]))
    return one[:, None], other[:, None]


@gluon.jit
def _keep(fours, bars, at, last, room, key, FIRST: gl.constexpr):
    """Store the fours of a thread in which a score reaches its row's bar, and their first key.

    ``fours`` is [BOTH, LANES, ., FOUR]. ``at`` is the thread's next place in ``room``, [BOTH,
    LANES]: in bytes and without a sign, so that an address is one addition. Beyond ``last`` there
    might be no room for the next SURE, and nothing is stored.
    """
    N: gl.constexpr = fours.shape[2]
    if N == SURE:
        free = at <= last
        none = float("nan")  # which no score reaches
        bars = gl.where(free, bars[0], none), gl.where(free, bars[1], none)
    if N > 1:
        halves = gl.reshape(fours, [BOTH, LANES, 2, N // 2, FOUR])
        near, far = gl.split(gl.permute(halves, (0, 1, 3, 4, 2)))
        at = _keep(near, bars, at, last, room, key, FIRST)
        at = _keep(far, bars, at, last, room, key, FIRST + N // 2)
    else:
        of_lanes: gl.constexpr = at.type.layout
        one, other = gl.split(gl.max(gl.reshape(fours, [BOTH, LANES, 2, PAIR]), 3))
        reaches = gl.convert_layout(one, of_lanes) >= bars[0]
        reaches = reaches | (gl.convert_layout(other, of_lanes) >= bars[1])
        slot = (room + at.to(gl.uint32)).to(gl.pointer_type(gl.float32))
        which = key + FIRST * (LANES * PAIR)
        gl.store(slot + FOUR, which.to(gl.float32, bitcast=True), mask=reaches)
        four = gl.reshape(fours, [BOTH, LANES, FOUR])
        of_fours: gl.constexpr = gl.SliceLayout(2, four.type.layout)
        slots = gl.convert_layout(slot, of_fours)[:, :, None]
        slots += gl.arange(0, FOUR, along(four.type.layout, 3, 2))[None, None, :]
        gl.store(slots, four, mask=gl.convert_layout(reaches, of_fours)[:, :, None])
        at = gl.where(reaches, at + SIZE, at)
    return at


@gluon.constexpr_function
def _records():
    """Records of two rows, [BOTH, SLOTS, FOUR]: a thread has a share of the rows it multiplies."""
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[0, 8, 0], [0, 16, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[8, 0, 0], [16, 0, 0]],
        [],
        [32, 32, 4],
    )


@gluon.constexpr_function
def _of_rows(slots):
    """The same of each row: [ROWS, slots, PAIR]."""
    share = slots // 4
    return gl.DistributedLinearLayout(
        [[0, 0, 1], *[[0, slot, 0] for slot in (1, 2, 4) if slot < share], [8, 0, 0]],
        [[0, share, 0], [0, 2 * share, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        [[16, 0, 0], [32, 0, 0]],
        [],
        [64, slots, 2],
    )


@gluon.jit
def _without(s, other, key, which):
    """Pairs where the one with a certain key was taken: the other is then the higher one.

    As an addition, of nothing, it takes a unit that has nothing to do; all else here compares and
    selects. The compiler would take two instructions for the key. 0fFF61B1E6 is NOTHING.
    """
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.eq.s32 p, $5, $6; mov.f32 $0, $3; mov.f32 $1, $4; mov.b32 $2, $5; "
        "@p add.ftz.f32 $0, $4, 0f80000000; @p mov.f32 $1, 0fFF61B1E6; @p xor.b32 $2, $5, 1; }",
        "=&f,=&f,=&r,f,f,r,r", [s, other, key, which], (gl.float32, gl.float32, gl.int32),
        is_pure=True, pack=1,
    )  # fmt: skip


@gluon.jit
def _in_slots(x, layout: gl.constexpr):
    """What a row's places hold, two to a lane, four times: so many slots a lane has."""
    two = gl.reshape(x, [ROWS, LANES, PLACES // LANES])
    four = gl.join(two, two)
    eight = gl.permute(gl.join(four, four), (0, 1, 3, 4, 2))
    return gl.convert_layout(gl.reshape(eight, [ROWS, SLOTS]), layout)


@gluon.jit
def _order(Found, both, records, count):
    """The ``count`` highest of what was collected and their keys, in order: [ROWS, PLACES].

    ``records`` says how many each thread has: [BOTH, LANES].
    """
    layout: gl.constexpr = _records()
    by_rows: gl.constexpr = _of_rows(SLOTS)
    of_slots: gl.constexpr = gl.SliceLayout(2, layout)
    of_places: gl.constexpr = gl.SliceLayout(2, _of_rows(PLACES))
    of_slots_of_rows: gl.constexpr = gl.SliceLayout(2, by_rows)
    of_rows: gl.constexpr = gl.SliceLayout(1, of_slots_of_rows)
    of_both: gl.constexpr = gl.SliceLayout(1, of_slots)
    thread = gl.arange(0, LANES, gl.SliceLayout(0, records.type.layout))[None, :]
    first = gl.sum(gl.where(thread < 1, records, 0), 1)
    second = gl.sum(gl.where(thread < 2, records, 0), 1)
    third = gl.sum(gl.where(thread < 3, records, 0), 1)
    last = gl.sum(records, 1)
    most = gl.max(last, 0)
    first, second = gl.convert_layout(first, of_both), gl.convert_layout(second, of_both)
    third, last = gl.convert_layout(third, of_both), gl.convert_layout(last, of_both)
    first, second, third, last = first[:, None], second[:, None], third[:, None], last[:, None]
    both = gl.convert_layout(both, of_both)[:, None]
    four = gl.arange(0, FOUR, along(layout, 3, 2))[None, None, :]
    place = gl.arange(0, PLACES, gl.SliceLayout(0, of_places))[None, :]
    highest = gl.full([ROWS, PLACES], NOTHING, gl.float32, of_places)
    chosen = gl.full([ROWS, PLACES], -1, gl.int32, of_places)
    # Nearly all rows have no more than SLOTS. Where some have, the best so far then take the last
    # places of each lane, and compete with those that come.
    EACH: gl.constexpr = SLOTS // LANES
    NEW: gl.constexpr = (SLOTS - PLACES) // LANES
    slot = gl.arange(0, SLOTS, gl.SliceLayout(0, of_slots))[None, :]
    turn = gl.arange(0, SLOTS, gl.SliceLayout(0, of_slots_of_rows))[None, :] % EACH
    for begin in range(0, gl.maximum(most - PLACES, gl.minimum(most, 1)), SLOTS - PLACES):
        again = begin > 0
        number = gl.where(again, begin + PLACES + slot // EACH * NEW, begin)
        number += gl.where(again, slot % EACH, slot)
        skip = gl.where(number < third, 2 * ROOM - second, 3 * ROOM - third)
        skip = gl.where(number < second, ROOM - first, skip)
        skip = gl.where(number < first, 0, skip)
        at = Found + (both * (LANES * ROOM) + number + skip) * RECORD
        there = (number < last) & ((slot % EACH < NEW) | (begin == 0))
        s = gl.load(at[:, :, None] + four, mask=there[:, :, None], other=NOTHING)
        near, far = gl.split(gl.convert_layout(_in_rows(s, SLOTS, PAIR), by_rows))
        key = gl.load(at + FOUR, mask=there, other=0.0).to(gl.int32, bitcast=True)
        key = gl.reshape(_in_rows(gl.join(key, key), SLOTS, 1), [ROWS, SLOTS])
        # Of each pair the higher one, its key, and the other one until it is its turn.
        key = gl.convert_layout(key, of_slots_of_rows)
        key = gl.where(near >= far, key, key + 1)
        s, other = gl.maximum(near, far), gl.minimum(near, far)
        if again:
            old = turn >= NEW
            s = gl.where(old, _in_slots(highest, of_slots_of_rows), s)
            other = gl.where(old, NOTHING, other)
            key = gl.where(old, _in_slots(chosen, of_slots_of_rows), key)
        for i in range(count):
            mine = gl.max(gl.reshape(s, [ROWS, LANES, EACH]), 2)
            top = gl.max(mine, 1)
            of_place = gl.convert_layout(top, gl.SliceLayout(1, of_places))[:, None]
            highest = gl.where(place == i, of_place, highest)
            mine = gl.where(s == gl.convert_layout(top, of_rows)[:, None], key, BEYOND)
            mine = gl.min(gl.reshape(mine, [ROWS, LANES, EACH]), 2)
            which = gl.min(mine, 1)
            of_place = gl.convert_layout(which, gl.SliceLayout(1, of_places))[:, None]
            chosen = gl.where(place == i, of_place, chosen)
            s, other, key = _without(s, other, key, gl.convert_layout(which, of_rows)[:, None])
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
    of_lanes: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, _in_fours(none).type.layout))
    of_rows: gl.constexpr = along(none.type.layout, 3, 0)
    of_places: gl.constexpr = gl.SliceLayout(2, _of_rows(PLACES))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, of_lanes))[None, :]
    here = gl.program_id(0) * (TEAMS * BOTH) + PART * BOTH
    here += gl.arange(0, BOTH, gl.SliceLayout(1, of_lanes))
    room = Found.to(gl.pointer_type(gl.int8))
    mine = (here[:, None] * LANES + lane) * (ROOM * SIZE)
    full = mine + (ROOM - SURE) * SIZE
    place = first_place()
    q_place = first_place()
    item, stride = first_item(work, False), stride_of(work, False)
    for _ in range(turns_of(work, False)):
        for half in range(halves_of(item, work, CAUSAL)):
            flat, block = block_of(item, half, work, CAUSAL)
            part = part_of(half, PART, CAUSAL)
            row = block * (TEAMS * ROWS) + part * ROWS
            first = wide(flat, queries)
            rows = row + gl.arange(0, ROWS, of_rows)
            query_at = rows + offset
            bars = _of_both(gl.load(Bar + first + rows, mask=rows < queries, other=float("nan")))
            bars = gl.convert_layout(bars[0], of_lanes), gl.convert_layout(bars[1], of_lanes)
            at = mine
            last = _last_tile(row, offset, tiles, CAUSAL)
            careful = 1  # tiles in which some pair is masked
            if CAUSAL and not EVEN:
                careful = last + 1 - (row + offset + 1) // BLOCK
            q = await_team(q_ring, q_place, part, D)
            ahead = _last_tile(row + (TEAMS - 1 - part) * ROWS, offset, tiles, CAUSAL) - last
            for _ in range(ahead):
                await_tile(k_ring, place)
                release(k_ring, place)
                place = following(place, STAGES)
            # One loop for all tiles: the first by itself is a fifth more code, and takes longer.
            for tile in range(last + 1):
                if tile > 0:
                    release(k_ring, place)
                    place = following(place, STAGES)
                s = hopper.warpgroup_mma_wait(0, deps=[product(q, k_ring, place, D)])
                key = (last - tile) * BLOCK
                scores = by_lanes(s)
                if CAUSAL or not EVEN:
                    if tile < careful:
                        seen = may_see(scores, query_at, key, keys, CAUSAL)
                        if CAUSAL and EVEN:  # on the diagonal, as in attend.py
                            near = places_in(scores)[0] < ROWS
                            seen = seen | near if PART % 2 else seen & near
                        scores = gl.where(seen, scores, NOTHING)
                at = _keep(_in_fours(scores), bars, at, full, room, key + lane * PAIR, 0)
            release(k_ring, place)
            release(q_ring, q_place)
            place = following(place, STAGES)
            q_place = following(q_place, 2)

            records = (at - mine) // SIZE
            # No score reaches a bar that is NaN: such a row takes no room from the other one.
            left = (gl.max(records, 1) > ROOM - SURE)[:, None]
            one, other = _of_both(rows)
            one, other = gl.convert_layout(one, of_lanes), gl.convert_layout(other, of_lanes)
            lost, other_lost = left | (bars[0] != bars[0]), left | (bars[1] != bars[1])
            gl.store(Left + first + one, lost.to(gl.int8), mask=one < queries)
            gl.store(Left + first + other, other_lost.to(gl.int8), mask=other < queries)
            rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, of_places))
            lse = gl.load(Lse + first + rows, mask=rows < queries, other=0.0) * (1 / LN2)
            gl.thread_barrier()  # what the threads of a row stored, all of them read
            highest, chosen = _order(Found, here, records, count)
            gl.thread_barrier()  # and before the next block's are stored
            rank = gl.arange(0, PLACES, gl.SliceLayout(0, of_places))[None, :]
            real = highest > LOWEST
            weights = gl.where(real, gl.exp2(highest * c - lse[:, None]), 0.0)
            to = (first + rows)[:, None] * count + rank
            mask = (rows < queries)[:, None] & (rank < count)
            gl.store(Weights + to, weights, mask=mask)
            gl.store(Keys + to, gl.where(real, chosen, -1).to(gl.int64), mask=mask)
        item = next_item(item, stride, work)


@gluon.jit(do_not_specialize=[*CHANGING, "queries", "keys", "tiles"])
def top(
    q_desc, k_desc, Bar, Lse, Found, Left, Weights, Keys,
    items, pairs, blocks, heads, groups, programs, heads_on, items_on, length, share,
    queries, keys, tiles, count, c,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """The ``count`` highest weights of each query and their keys; see rows.py.

    ``Bar`` is a score that as many of a query's reach. ``Found`` is room for what reaches it, of
    one block for each program. ``Left`` tells rows that had not enough of it. EVEN: queries and
    keys end a multiple of tiles apart; without a mask: keys fill their tiles.
    """
    work = Work(items, pairs, blocks, heads, groups, programs, heads_on, items_on, length, share)
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
