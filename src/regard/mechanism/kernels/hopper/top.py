# mypy: ignore-errors
"""The highest weights of each query; see rows.py for the way they are found.

Here the forward pass has told the highest scores in 16 sets of a query's keys, so one stream over
the keys is enough to collect what may be among the highest.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from regard.mechanism.kernels.hopper.roles import (
    BLOCK,
    GROUPED,
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
    by_height,
    by_lanes,
    fill,
    fill_teams,
    halves_of,
    may_see,
    product,
    release,
    ring_of,
)

ROOM = gl.constexpr(16)  # records of a row that a thread can collect
SURE = gl.constexpr(4)  # how many it may store before it looks for room: it stops with fewer left
RECORD = gl.constexpr(6)  # numbers of one: two pairs of scores, the first key, and nothing
FOUR = gl.constexpr(4)  # scores of a record
MOST = gl.constexpr(32)  # records of a row that are put in order
PICKED = gl.constexpr(8)  # rows of a warp that puts them in order


@gluon.jit
def _load_collect(loader, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    q_ring, k_ring, q_desc, k_desc, work, groups, offset, tiles, from_head = loader
    items, pairs, blocks, heads = work
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(halves_of(item, pairs, blocks, CAUSAL)):
            flat, block = block_of(item, half, pairs, blocks, CAUSAL)
            batch, head = (flat + from_head) // heads, (flat + from_head) % heads
            row = block * (TEAMS * ROWS)
            fill_teams(q_ring, turn, q_desc, batch, head, row, D)
            stop = _last_tile(row + (TEAMS - 1) * ROWS, offset, tiles, CAUSAL) + 1
            for i in range(stop):
                place = [batch, head // groups, (stop - 1 - i) * BLOCK, 0]
                fill(k_ring, step, STAGES, k_desc, place, BLOCK * D * 2)
                step += 1
            turn += 1


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
        bar = gl.where(used <= (ROOM - SURE) * RECORD, bar, float("inf"))
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


@gluon.jit
def _collect(
    shared,
    PART: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    EVEN: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 queries of every block, and the keys they see, the last first."""
    q_ring, k_ring, Heights, Count, Found, work, sizes = shared
    items, pairs, blocks, _heads = work
    queries, keys, offset, tiles, count = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    none = by_lanes(gl.zeros([ROWS, BLOCK], gl.float32, layout))
    of_heights: gl.constexpr = by_height(none).type.layout
    of_lanes: gl.constexpr = gl.max(none, 2).type.layout
    of_rows: gl.constexpr = along(none.type.layout, 3, 0)
    lane = gl.arange(0, LANES, gl.SliceLayout(0, of_lanes))[None, :]
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(halves_of(item, pairs, blocks, CAUSAL)):
            flat, block = block_of(item, half, pairs, blocks, CAUSAL)
            row = block * (TEAMS * ROWS) + PART * ROWS
            first = flat.to(gl.int64) * queries
            query_at = row + gl.arange(0, ROWS, of_rows) + offset
            # The bar: of the highest of each set the count-th, where equal ones count once. As
            # many scores reach it; a little lower, should products differ in their last bit.
            rows = row + gl.arange(0, ROWS, along(of_heights, 3, 0))
            group = gl.arange(0, GROUPED, along(of_heights, 3, 2))[None, None, :]
            height_at = (first + rows[:, None, None]) * (LANES * GROUPED) + group
            mine = gl.arange(0, LANES, along(of_heights, 3, 1))[None, :, None] * GROUPED
            inside = (rows < queries)[:, None, None]
            h = gl.load(Heights + height_at + mine, mask=inside, other=NOTHING)
            top = gl.max(gl.max(h, 2), 1)
            for _ in range(1, count):
                h = gl.where(h >= top[:, None, None], NOTHING, h)
                top = gl.max(gl.max(h, 2), 1)
            top = gl.maximum(top - gl.abs(top) * 1e-6, LOWEST)
            bar = gl.convert_layout(
                gl.where(rows < queries, top, float("inf")), gl.SliceLayout(1, of_lanes)
            )[:, None]
            mine = row + gl.arange(0, ROWS, gl.SliceLayout(1, of_lanes))
            place = (first + mine[:, None]) * LANES + lane
            room = Found + place * (ROOM * RECORD)
            used = gl.zeros([ROWS, LANES], gl.int32, of_lanes)
            last = _last_tile(row, offset, tiles, CAUSAL)
            q = await_team(q_ring, turn, PART, D)
            ahead = _last_tile(row + (TEAMS - 1 - PART) * ROWS, offset, tiles, CAUSAL) - last
            for i in range(ahead):
                await_tile(k_ring, step + i, STAGES)
                release(k_ring, step + i, STAGES)
            step += ahead
            s = hopper.warpgroup_mma_wait(0, deps=[product(q, k_ring, step, D, STAGES)])
            key = last * BLOCK
            scores = by_lanes(s)
            seen = may_see(scores, query_at, key, keys, CAUSAL)
            scores = gl.where(seen, scores, NOTHING)
            used = _keep(_in_pairs(scores), bar, used, room, key + lane * PAIR, 0)
            for tile in range(1, last + 1):
                key = (last - tile) * BLOCK
                release(k_ring, step, STAGES)
                step += 1
                s = hopper.warpgroup_mma_wait(0, deps=[product(q, k_ring, step, D, STAGES)])
                scores = by_lanes(s)
                if CAUSAL and not EVEN:
                    seen = may_see(scores, query_at, key, keys, CAUSAL)
                    scores = gl.where(seen, scores, NOTHING)
                used = _keep(_in_pairs(scores), bar, used, room, key + lane * PAIR, 0)
            release(k_ring, step, STAGES)
            release(q_ring, turn, 2)
            step += 1
            turn += 1
            # Where some may be missing, more are told than there is room for.
            records = gl.where(used <= (ROOM - SURE) * RECORD, used // RECORD, ROOM + 1)
            gl.store(Count + place, records, mask=(mine < queries)[:, None])


@gluon.jit(
    do_not_specialize=[
        "items",
        "pairs",
        "blocks",
        "queries",
        "keys",
        "tiles",
        "count",
        "from_head",
    ]
)
def collect(
    q_desc, k_desc, Heights, Count, Found, items, pairs, blocks, heads, groups, queries, keys,
    tiles, count, from_head,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
):  # fmt: skip
    """Collect the scores of each query that may be among its ``count`` highest; see rows.py.

    ``Heights`` are what the forward pass found highest in 16 sets of a query's keys.
    """
    offset = keys - queries
    q_ring = ring_of(q_desc, 2 * TEAMS, 2, TEAMS)
    k_ring = ring_of(k_desc, STAGES, STAGES, TEAMS)
    hopper.fence_async_shared()
    work = items, pairs, blocks, heads
    sizes = queries, keys, offset, tiles, count
    shared = q_ring, k_ring, Heights, Count, Found, work, sizes
    loader = q_ring, k_ring, q_desc, k_desc, work, groups, offset, tiles, from_head
    gl.warp_specialize(
        [
            (_collect, (shared, 0, D, STAGES, CAUSAL, EVEN)),
            (_collect, (shared, 1, D, STAGES, CAUSAL, EVEN)),
            (_collect, (shared, 2, D, STAGES, CAUSAL, EVEN)),
            (_collect, (shared, 3, D, STAGES, CAUSAL, EVEN)),
            (_load_collect, (loader, D, STAGES, CAUSAL)),
        ],
        [4, 4, 4, 1], [112, 112, 112, 24],
    )  # fmt: skip


@gluon.jit
def _reached(Count, row, lane, inside):
    return gl.minimum(gl.load(Count + row * LANES + lane, mask=inside, other=0), ROOM)


@gluon.jit
def _order(Found, Lse, Weights, Keys, row, rows, c, ends, SLOTS: gl.constexpr, COUNT: gl.constexpr):
    """Write the COUNT highest of what was collected, in order; four threads share a row."""
    layout: gl.constexpr = gl.BlockedLayout([1, SLOTS], [PICKED, LANES], [1, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    row = gl.convert_layout(row, of_rows)
    inside = row < rows
    first = gl.convert_layout(ends[0], of_rows)[:, None]
    second = gl.convert_layout(ends[1], of_rows)[:, None]
    third = gl.convert_layout(ends[2], of_rows)[:, None]
    last = gl.convert_layout(ends[3], of_rows)[:, None]
    entry = gl.arange(0, FOUR * SLOTS, gl.SliceLayout(0, layout))[None, :]
    number = entry // FOUR
    lane = gl.where(number < first, 0, gl.where(number < second, 1, gl.where(number < third, 2, 3)))
    before = gl.where(number < first, 0, gl.where(number < second, first, second))
    before = gl.where(number < third, before, third)
    at = ((row[:, None] * LANES + lane) * ROOM + number - before) * RECORD
    there = number < last
    s = gl.load(Found + at + entry % FOUR, mask=there, other=NOTHING)
    key = gl.load(Found + at + FOUR, mask=there, other=0.0).to(gl.int32, bitcast=True)
    key += entry // PAIR % 2 * (LANES * PAIR) + entry % PAIR
    lse = gl.load(Lse + row, mask=inside, other=0.0) * (1 / LN2)
    for place in range(COUNT):
        top = gl.max(s, 1)
        which = gl.min(gl.where(s == top[:, None], key, 0x7FFFFFFF), 1)
        real = top > LOWEST
        weight = gl.where(real, gl.exp2(top * c - lse), 0.0)
        gl.store(Weights + row * COUNT + place, weight, mask=inside)
        gl.store(Keys + row * COUNT + place, gl.where(real, which, -1).to(gl.int64), mask=inside)
        s = gl.where((s == top[:, None]) & (key == which[:, None]), NOTHING, s)


@gluon.jit(do_not_specialize=["rows"])
def pick(Count, Found, Lse, Weights, Keys, rows, c, COUNT: gl.constexpr):
    """Of what was collected, the COUNT highest of each query: their weights and keys."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    row = gl.program_id(0).to(gl.int64) * PICKED + gl.arange(0, PICKED, layout)
    inside = row < rows
    first = _reached(Count, row, 0, inside)
    second = first + _reached(Count, row, 1, inside)
    third = second + _reached(Count, row, 2, inside)
    ends = first, second, third, third + _reached(Count, row, 3, inside)
    if gl.max(ends[3], 0) <= MOST // 2:
        _order(Found, Lse, Weights, Keys, row, rows, c, ends, MOST // 2, COUNT)
    else:
        _order(Found, Lse, Weights, Keys, row, rows, c, ends, MOST, COUNT)
