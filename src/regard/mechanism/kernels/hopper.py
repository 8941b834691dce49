# mypy: ignore-errors
# ruff: noqa: E741
"""The passes over all scores for Hopper, where groups of warps have roles.

The same as in forward.py, columns.py and (``collect``) rows.py, for calls without a bias that have
no mask or are causal. One warp loads: it asks the copy engine for tiles, as many ahead as there is
room for.
Groups of four warps multiply and weigh, each its own 64 rows: while one takes exponentials, the
products of another are under way. A tile's place in a ring has two barriers: ``full`` once it is
loaded, ``empty`` once all groups are through with it; a barrier's phase changes each time round.

There are as many programs as multiprocessors, and each has one item of work after another. Of a
causal head an item is a long block and the short one that makes up for it.

Triton decides such things itself, and not so well: these are written in Gluon, its lower language
(https://triton-lang.org/main/gluon). Nothing but a Hopper runs them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(-3.0e38)  # as in tiles.py
LOWEST = gl.constexpr(-1.0e37)
ROWS = gl.constexpr(64)  # of a product that a group of four warps holds
GROUPS = gl.constexpr(2)  # of warps that attend
BLOCK = gl.constexpr(128)  # ROWS * GROUPS queries of a block; keys, and later queries, of a tile
TEAMS = gl.constexpr(4)  # groups of warps that share the queries there, each with keys of its own
LANES = gl.constexpr(4)  # threads that share a row
PAIR = gl.constexpr(2)  # neighbours in a row that one thread holds
GROUPED = gl.constexpr(4)  # sets of its scores of which a thread keeps the highest
ROOM = gl.constexpr(16)  # scores of a row that a thread can collect, each with three others
SURE = gl.constexpr(4)  # how many it stores before it looks whether there is still room
RECORD = gl.constexpr(6)  # numbers that one takes: two pairs, the first key, and nothing
FOUR = gl.constexpr(4)  # scores of a record
MOST = gl.constexpr(32)  # records of a row that are put in order
PICKED = gl.constexpr(8)  # rows of a warp that puts them in order


@gluon.constexpr_function
def _along(layout, rank, axis):
    """The layout of a vector along one axis of a tensor."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.jit
def _ring(dtype: gl.constexpr, STAGES: gl.constexpr, desc):
    """Room for some tiles, and the barriers of each: full, and empty."""
    tiles = gl.allocate_shared_memory(dtype, [STAGES] + desc.block_shape, desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    return tiles, full, empty


@gluon.jit
def _open(ring, STAGES: gl.constexpr, READERS: gl.constexpr):
    for slot in gl.static_range(STAGES):
        mbarrier.init(ring[1].index(slot), count=1)
        mbarrier.init(ring[2].index(slot), count=READERS)


@gluon.jit
def _fill(ring, step, STAGES: gl.constexpr, desc, at, BYTES: gl.constexpr):
    """Have a tile loaded once its place is free: the ``step``-th that goes through a ring."""
    slot = step % STAGES
    mbarrier.wait(ring[2].index(slot), (step // STAGES & 1) ^ 1)
    full = ring[1].index(slot)
    mbarrier.expect(full, BYTES)
    tma.async_copy_global_to_shared(desc, at, full, ring[0].index(slot))


@gluon.jit
def _await(ring, step, STAGES: gl.constexpr):
    """The place of a tile, once it is loaded."""
    mbarrier.wait(ring[1].index(step % STAGES), step // STAGES & 1)
    return ring[0].index(step % STAGES)


@gluon.jit
def _release(ring, step, STAGES: gl.constexpr):
    mbarrier.arrive(ring[2].index(step % STAGES), count=1)


@gluon.jit
def _halves(item, pairs, blocks, CAUSAL: gl.constexpr):
    """How many blocks an item of work has."""
    if CAUSAL:
        return gl.where(item % pairs * 2 + 1 == blocks, 1, 2)
    return 1


@gluon.jit
def _block(item, half, pairs, blocks, CAUSAL: gl.constexpr):
    """Which of all heads, and which block of it."""
    block = item % pairs
    if CAUSAL:
        block = gl.where(half == 0, blocks - 1 - block, block)
    return item // pairs, block


@gluon.jit
def _tiles(row, keys, offset, CAUSAL: gl.constexpr):
    """How many tiles of keys a block of queries has."""
    if CAUSAL:
        keys = gl.minimum(keys, row + BLOCK + offset)
    return (keys + BLOCK - 1) // BLOCK


@gluon.jit
def _tile_at(i, stop, row, offset, AROUND: gl.constexpr):
    """The first key of the i-th tile: from the last one down, or from the diagonal up."""
    if AROUND:
        tile = (row + offset) // BLOCK + i
        return gl.where(tile < stop, tile, tile - stop) * BLOCK
    return (stop - 1 - i) * BLOCK


@gluon.jit
def _load(
    loader, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, AROUND: gl.constexpr,
):  # fmt: skip
    q_ring, k_ring, v_ring, q_desc, k_desc, v_desc, work, groups, keys, offset = loader
    items, pairs, blocks, heads = work
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(_halves(item, pairs, blocks, CAUSAL)):
            flat, block = _block(item, half, pairs, blocks, CAUSAL)
            batch, head = flat // heads, flat % heads
            row = block * BLOCK
            stop = _tiles(row, keys, offset, CAUSAL)
            _fill(q_ring, turn, 2, q_desc, [batch, head, row, 0], BLOCK * D * 2)
            for i in range(stop):
                at = [batch, head // groups, _tile_at(i, stop, row, offset, AROUND), 0]
                _fill(k_ring, step, STAGES, k_desc, at, BLOCK * D * 2)
                _fill(v_ring, step, STAGES, v_desc, at, BLOCK * D * 2)
                step += 1
            turn += 1


@gluon.jit
def _by_lanes(tile):
    """A tile of scores as [ROWS, LANES, .]: a thread has one lane of a row, all of it."""
    N: gl.constexpr = tile.shape[1]
    parts = gl.reshape(tile, [ROWS, N // (LANES * PAIR), LANES, PAIR])
    return gl.reshape(gl.permute(parts, (0, 2, 1, 3)), [ROWS, LANES, N // LANES])


@gluon.jit
def _by_keys(parts):
    """As it was before ``_by_lanes``."""
    N: gl.constexpr = parts.shape[2]
    tile = gl.reshape(parts, [ROWS, LANES, N // PAIR, PAIR])
    return gl.reshape(gl.permute(tile, (0, 2, 1, 3)), [ROWS, LANES * N])


@gluon.jit
def _by_height(s):
    """The highest of every fourth score of a lane: 16 of a row, none of neighbouring keys."""
    return gl.max(gl.reshape(s, [ROWS, LANES, s.shape[2] // GROUPED, GROUPED]), 2)


@gluon.jit
def _weigh(
    s, l, m, e, t, h, c, query_at, key, keys,
    CAUSAL: gl.constexpr, FREE: gl.constexpr, ENTROPY: gl.constexpr, DISTANCE: gl.constexpr,
    HEIGHTS: gl.constexpr,
):  # fmt: skip
    """The weights of a tile, and the running sums with them; see forward.py."""
    # A key's place in the tile: a part that is known beforehand, and the lane's own.
    layout: gl.constexpr = s.type.layout
    turn = gl.arange(0, s.shape[2], _along(layout, 3, 2))[None, None, :]
    known = turn // PAIR * (LANES * PAIR) + turn % PAIR
    lane = gl.arange(0, LANES, _along(layout, 3, 1))[None, :, None] * PAIR
    ahead = query_at[:, None, None] - key
    if FREE:
        high = _by_height(s)
        if HEIGHTS:
            h = gl.maximum(h, high)
        highest = gl.convert_layout(gl.max(gl.max(high, 2), 1), m.type.layout)
        higher = gl.maximum(m, highest * c)
        x = s * c - higher[:, None, None]
    else:
        if CAUSAL:  # no query sees beyond the last key
            seen = known <= ahead - lane
        else:
            seen = known < keys - key - lane
        if HEIGHTS:
            h = gl.maximum(h, _by_height(gl.where(seen, s, NOTHING)))
        s = gl.where(seen, s * c, NOTHING)
        higher = gl.maximum(m, gl.max(gl.max(s, 2), 1))
        x = s - higher[:, None, None]
    p = gl.exp2(x)
    shrink = gl.exp2(m - higher)
    smaller = shrink[:, None]
    whole = gl.sum(p, 2)  # the sums are a lane's own until all tiles are through
    if ENTROPY:
        e = (e + (m - higher)[:, None] * l) * smaller + gl.sum(p * x, 2)
    if DISTANCE:
        if FREE or CAUSAL:  # all keys with a weight lie on one side
            inside = gl.sum(p * known.to(gl.float32), 2)
            mine = gl.arange(0, LANES, gl.SliceLayout(0, whole.type.layout)) * PAIR
            away = (query_at - key)[:, None] - mine[None, :]
            t = t * smaller + gl.abs(away.to(gl.float32) * whole - inside)
        else:
            apart = gl.abs((ahead - lane).to(gl.float32) - known.to(gl.float32))
            t = t * smaller + gl.sum(p * apart, 2)
    l = l * smaller + whole
    return p, l, higher, e, t, h, shrink


@gluon.jit
def _attend(
    shared,
    PART: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, AROUND: gl.constexpr, EVEN: gl.constexpr, ENTROPY: gl.constexpr,
    PEAK: gl.constexpr, HIGHEST: gl.constexpr, DISTANCE: gl.constexpr, HEIGHTS: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 queries of every block, two tiles of keys at a time."""
    q_ring, k_ring, v_ring, out, Lse, seen, work, sizes = shared
    Entropy, Peak, Highest, Distance, Heights = seen
    items, pairs, blocks, heads = work
    queries, keys, offset, c = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = out.data.dtype.element_ty
    none = gl.zeros([ROWS, BLOCK], gl.float32, s_layout)
    of_rows: gl.constexpr = _along(_by_lanes(none).type.layout, 3, 0)
    of_lanes: gl.constexpr = gl.SliceLayout(2, _by_lanes(none).type.layout)
    of_heights: gl.constexpr = _by_height(_by_lanes(none)).type.layout
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(_halves(item, pairs, blocks, CAUSAL)):
            flat, block = _block(item, half, pairs, blocks, CAUSAL)
            batch, head = flat // heads, flat % heads
            row = block * BLOCK
            stop = _tiles(row, keys, offset, CAUSAL)
            rows = row + PART * ROWS + gl.arange(0, ROWS, of_rows)
            query_at = rows + offset
            # Tiles in which some pair is masked, or lies on another side than the rest.
            careful = 1
            if CAUSAL and not EVEN:
                careful = gl.maximum(stop - (row + PART * ROWS + offset + 1) // BLOCK, 1)
            elif AROUND and not EVEN:
                careful = gl.minimum(stop, 1 + ((row + offset) % BLOCK != 0).to(gl.int32))
            o = gl.zeros([ROWS, D], gl.float32, o_layout)
            l = gl.zeros([ROWS, LANES], gl.float32, of_lanes)
            e = gl.zeros([ROWS, LANES], gl.float32, of_lanes)
            t = gl.zeros([ROWS, LANES], gl.float32, of_lanes)
            m = gl.full([ROWS], LOWEST, gl.float32, of_rows)
            h = gl.full([ROWS, LANES, GROUPED], NOTHING, gl.float32, of_heights)

            q = _await(q_ring, turn, 2).reshape([BLOCK, D]).slice(PART * ROWS, ROWS)
            k = _await(k_ring, step, STAGES).reshape([BLOCK, D]).permute((1, 0))
            s = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            _release(k_ring, step, STAGES)
            key = _tile_at(0, stop, row, offset, AROUND)
            p, l, m, e, t, h, shrink = _weigh(
                _by_lanes(s), l, m, e, t, h, c, query_at, key, keys, CAUSAL, False, ENTROPY,
                DISTANCE, HEIGHTS,
            )  # fmt: skip
            for FREE in gl.static_range(2):
                if FREE or ((CAUSAL or AROUND) and not EVEN):
                    start, end = (careful, stop) if FREE else (1, careful)
                    for i in range(start, end):
                        # This tile's scores, and the last tile's values while its weights are made.
                        k = _await(k_ring, step + i, STAGES).reshape([BLOCK, D]).permute((1, 0))
                        s = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
                        weights = gl.convert_layout(_by_keys(p).to(dtype), operand)
                        v = _await(v_ring, step + i - 1, STAGES).reshape([BLOCK, D])
                        o = hopper.warpgroup_mma(weights, v, o, is_async=True)
                        s = hopper.warpgroup_mma_wait(1, deps=[s])
                        key = _tile_at(i, stop, row, offset, AROUND)
                        p, l, m, e, t, h, shrink = _weigh(
                            _by_lanes(s), l, m, e, t, h, c, query_at, key, keys, CAUSAL,
                            FREE == 1, ENTROPY, DISTANCE, HEIGHTS,
                        )  # fmt: skip
                        o, weights = hopper.warpgroup_mma_wait(0, deps=[o, weights])
                        # Both at once: the warps of a group wait for each other to release.
                        _release(k_ring, step + i, STAGES)
                        _release(v_ring, step + i - 1, STAGES)
                        o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
            _release(q_ring, turn, 2)
            step += stop
            turn += 1
            weights = gl.convert_layout(_by_keys(p).to(dtype), operand)
            v = _await(v_ring, step - 1, STAGES).reshape([BLOCK, D])
            o = hopper.warpgroup_mma(weights, v, o, is_async=True)

            # Every query attends to something here, so l is at least 1.
            l, e, t = gl.sum(l, 1), gl.sum(e, 1), gl.sum(t, 1)
            inside = rows < queries
            inverse = 1 / l
            length = gl.log2(l)
            at = (batch * heads + head).to(gl.int64) * queries + rows
            gl.store(Lse + at, (m + length) * LN2, mask=inside)
            if ENTROPY:
                gl.store(Entropy + at, (length - e * inverse) * LN2, mask=inside)
            if PEAK:
                gl.store(Peak + at, inverse, mask=inside)
            if DISTANCE:
                gl.store(Distance + at, t * inverse, mask=inside)
            if HEIGHTS:
                lane = gl.arange(0, LANES, _along(of_heights, 3, 1))[None, :, None]
                group = gl.arange(0, GROUPED, _along(of_heights, 3, 2))[None, None, :]
                height_at = gl.convert_layout(at, _along(of_heights, 3, 0))[:, None, None]
                whose = gl.convert_layout(inside, _along(of_heights, 3, 0))[:, None, None]
                height_at = (height_at * LANES + lane) * GROUPED + group
                gl.store(Heights + height_at, h, mask=whose)
            if HIGHEST:
                highest = gl.max(gl.where(inside, m * LN2, float("-inf")), 0)
                place = ((batch * heads + head) * blocks + block) * GROUPS + PART
                gl.store(Highest + place, highest)
            o, weights = hopper.warpgroup_mma_wait(0, deps=[o, weights])
            _release(v_ring, step - 1, STAGES)
            o = o * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
            o = gl.convert_layout(o.to(dtype), stored)
            rows_at = row + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
            dims = gl.arange(0, D, gl.SliceLayout(0, stored))
            first = out.data + batch.to(gl.int64) * out.batch + head.to(gl.int64) * out.head
            gl.store(
                first + rows_at[:, None].to(gl.int64) * out.row + dims[None, :],
                o, mask=(rows_at < queries)[:, None],
            )  # fmt: skip


@gluon.jit(do_not_specialize=["items", "pairs", "blocks", "queries", "keys"])
def forward(
    q_desc, k_desc, v_desc, out, Lse, Entropy, Peak, Highest, Distance, Heights, items, pairs,
    blocks, heads, groups, queries, keys, c,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    ENTROPY: gl.constexpr, PEAK: gl.constexpr, HIGHEST: gl.constexpr, DISTANCE: gl.constexpr,
    HEIGHTS: gl.constexpr,
):  # fmt: skip
    """Attend; see forward.py. ``Heights`` are for ``collect``."""
    # |i - j| has two signs along a row: those tiles come first in which both occur.
    AROUND: gl.constexpr = DISTANCE and not CAUSAL
    dtype: gl.constexpr = q_desc.dtype
    offset = keys - queries
    q_ring = _ring(dtype, 2, q_desc)
    k_ring = _ring(dtype, STAGES, k_desc)
    v_ring = _ring(dtype, STAGES, v_desc)
    _open(q_ring, 2, GROUPS)
    _open(k_ring, STAGES, GROUPS)
    _open(v_ring, STAGES, GROUPS)
    hopper.fence_async_shared()
    work = items, pairs, blocks, heads
    sizes = queries, keys, offset, c
    seen = Entropy, Peak, Highest, Distance, Heights
    shared = q_ring, k_ring, v_ring, out, Lse, seen, work, sizes
    loader = q_ring, k_ring, v_ring, q_desc, k_desc, v_desc, work, groups, keys, offset
    gl.warp_specialize(
        [
            (_attend, (
                shared, 0, D, STAGES, CAUSAL, AROUND, EVEN, ENTROPY, PEAK, HIGHEST, DISTANCE,
                HEIGHTS,
            )),
            (_attend, (
                shared, 1, D, STAGES, CAUSAL, AROUND, EVEN, ENTROPY, PEAK, HIGHEST, DISTANCE,
                HEIGHTS,
            )),
            (_load, (loader, D, STAGES, CAUSAL, AROUND)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _by_bins(p, BINS: gl.constexpr):
    """The weights of a tile as [keys, groups of bins, ., LANES, PAIR].

    What a bin has lies along . and PAIR, and with fewer than four bins a tile along LANES too.
    """
    A: gl.constexpr = BINS // LANES if BINS >= LANES else BINS
    return gl.reshape(p, [ROWS, A, BLOCK // (A * LANES * PAIR), LANES, PAIR])


@gluon.jit
def _causal(parts, first, BINS: gl.constexpr):
    """What keys get of the queries that may see them: from the place ``first`` in the tile on."""
    A: gl.constexpr = parts.shape[1]
    T: gl.constexpr = parts.shape[2]
    layout: gl.constexpr = parts.type.layout
    group = gl.arange(0, A, _along(layout, 5, 1))[None, :, None, None, None]
    turn = gl.arange(0, T, _along(layout, 5, 2))[None, None, :, None, None]
    lane = gl.arange(0, LANES, _along(layout, 5, 3))[None, None, None, :, None]
    place = gl.arange(0, PAIR, _along(layout, 5, 4))[None, None, None, None, :]
    first = gl.convert_layout(first, _along(layout, 5, 0))[:, None, None, None, None]
    # A thread compares numbers known beforehand with one of its own.
    if BINS >= LANES:
        known = group * (BLOCK // A) + turn * PAIR + place
        mine = first - lane * (BLOCK // BINS)
    else:
        known = group * (BLOCK // A) + turn * (LANES * PAIR) + place
        mine = first - lane * PAIR
    return gl.where(known >= mine, parts, 0.0)


@gluon.jit
def _put(Cells, at, units, sums, UNIT: gl.constexpr, BINS: gl.constexpr, LARGEST: gl.constexpr):
    """Write a tile's share of the map: over UNIT keys each, and over lanes that share a bin."""
    A: gl.constexpr = sums.shape[1]
    cells = gl.reshape(sums, [ROWS // UNIT, UNIT, A, LANES])
    if LARGEST:
        cells = gl.max(cells, 1)
        if BINS < LANES:
            cells = gl.max(cells, 2)
    else:
        cells = gl.sum(cells, 1)
        if BINS < LANES:
            cells = gl.sum(cells, 2)
    cells = gl.reshape(cells, [ROWS // UNIT, BINS])
    unit = gl.arange(0, ROWS // UNIT, gl.SliceLayout(1, cells.type.layout))
    bin_at = gl.arange(0, BINS, gl.SliceLayout(0, cells.type.layout))
    gl.store(Cells + at + bin_at[None, :] * units + unit[:, None], cells)


@gluon.jit
def _end_bin(
    received, pooled, largest, Map, MapPeak, at, units,
    UNIT: gl.constexpr, BINS: gl.constexpr, MAP: gl.constexpr, MAP_PEAK: gl.constexpr,
):  # fmt: skip
    """Write what bins got, and add it to what keys receive in all: [keys, LANES]."""
    if MAP:
        _put(Map, at, units, pooled, UNIT, BINS, False)
        if MAP_PEAK:
            _put(MapPeak, at, units, largest, UNIT, BINS, True)
    return received + gl.sum(pooled, 1)


@gluon.jit
def _fill_teams(ring, turn, desc, batch, head, row, D: gl.constexpr):
    """Have the rows of a block loaded, those of each team as a tile."""
    slot = turn % 2
    mbarrier.wait(ring[2].index(slot), (turn // 2 & 1) ^ 1)
    full = ring[1].index(slot)
    mbarrier.expect(full, TEAMS * ROWS * D * 2)
    for part in gl.static_range(TEAMS):
        tile = ring[0].index(slot * TEAMS + part)
        tma.async_copy_global_to_shared(desc, [batch, head, row + part * ROWS, 0], full, tile)


@gluon.jit
def _await_team(ring, turn, PART: gl.constexpr, D: gl.constexpr):
    mbarrier.wait(ring[1].index(turn % 2), turn // 2 & 1)
    return ring[0].index(turn % 2 * TEAMS + PART).reshape([ROWS, D])


@gluon.jit
def _load_columns(
    loader, D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    k_ring, q_ring, k_desc, q_desc, dealt, work, groups, offset, tiles = loader
    items, pairs, blocks, heads = work
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(_halves(item, pairs, blocks, CAUSAL)):
            flat, block = _block(item, half, pairs, blocks, CAUSAL)
            batch, head = flat // heads, flat % heads
            key = block * (TEAMS * ROWS)
            _fill_teams(k_ring, turn, k_desc, batch, head // groups, key, D)
            start = 0
            if CAUSAL:
                start = gl.maximum(key - offset, 0) // BLOCK
            for i in range(start, tiles):
                if BINS >= LANES:
                    outer = batch * dealt.batch + head * dealt.head + i * (BINS // LANES)
                    place = [outer, 0, 0, 0, head * dealt.inner]
                else:
                    place = [batch, head, i * BLOCK, 0]
                _fill(q_ring, step, STAGES, q_desc, place, BLOCK * D * 2)
                step += 1
            turn += 1


@gluon.jit
def _product(rows, ring, step, D: gl.constexpr, STAGES: gl.constexpr):
    """The scores of a team's rows and the next tile, on their way."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, layout)
    tile = _await(ring, step, STAGES).reshape([BLOCK, D]).permute((1, 0))
    return hopper.warpgroup_mma(rows, tile, zeros, use_acc=False, is_async=True)


@gluon.jit
def _sums(s, drop, c, first, masked, BINS: gl.constexpr, MASK: gl.constexpr, PEAK: gl.constexpr):
    """Of one tile what each key gets, and the largest weight: [keys, ., LANES]."""
    parts = _by_bins(gl.exp2(s * c + drop[None, :]), BINS)
    if MASK:
        if masked:
            parts = _causal(parts, first, BINS)
    sums = gl.sum(gl.sum(parts, 4), 2)
    peaks = sums
    if PEAK:
        peaks = gl.max(gl.max(parts, 4), 2)
    return sums, peaks


@gluon.jit
def _receive(
    shared,
    PART: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr,
    UNIT: gl.constexpr, LONG: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    RECEIVED: gl.constexpr, MAP: gl.constexpr, MAP_PEAK: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 keys of every block of keys, and all queries."""
    k_ring, q_ring, Drop, Received, Map, MapPeak, work, sizes = shared
    items, pairs, blocks, heads = work
    keys, offset, tiles, per_bin, bins, c = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, layout)
    none = gl.sum(gl.sum(_by_bins(zeros, BINS), 4), 2)  # [keys, ., LANES]
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(_halves(item, pairs, blocks, CAUSAL)):
            flat, block = _block(item, half, pairs, blocks, CAUSAL)
            batch, head = flat // heads, flat % heads
            flat = (batch * heads + head).to(gl.int64)
            first = block * (TEAMS * ROWS) + PART * ROWS
            key_at = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout)) - offset
            units = blocks * (TEAMS * ROWS // UNIT)
            cell = flat * bins * units + block * (TEAMS * ROWS // UNIT)
            cell += PART * (ROWS // UNIT)
            drop_at = Drop + flat * tiles * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
            # Before the tile ``start`` no query sees these keys, and from ``free`` on all do.
            begin, start, free = 0, 0, 0
            if CAUSAL:
                begin = gl.maximum(block * (TEAMS * ROWS) - offset, 0) // BLOCK
                start = gl.minimum(gl.maximum(first - offset, 0) // BLOCK, tiles - 1)
                free = gl.maximum(first + ROWS - 1 - offset + BLOCK - 1, 0) // BLOCK
            k = _await_team(k_ring, turn, PART, D)
            for tile in range(begin, start):
                _await(q_ring, step + tile - begin, STAGES)
                _release(q_ring, step + tile - begin, STAGES)
            step += start - begin
            # The first tile by itself: where queries and keys end EVEN, no other is masked.
            drop = gl.load(drop_at + start * BLOCK)
            s = hopper.warpgroup_mma_wait(0, deps=[_product(k, q_ring, step, D, STAGES)])
            pooled, largest = _sums(
                s, drop, c, key_at - start * BLOCK, True, BINS, CAUSAL, MAP_PEAK
            )
            received = gl.sum(none, 1)
            if not LONG:
                at = cell + start * BINS * units
                received = _end_bin(
                    received, pooled, largest, Map, MapPeak, at, units, UNIT, BINS, MAP, MAP_PEAK
                )
            next_bin = (start // per_bin + 1) * per_bin
            for tile in range(start + 1, tiles):
                if LONG:  # a bin has several tiles
                    if tile == next_bin:
                        at = cell + (tile // per_bin - 1) * units
                        received = _end_bin(
                            received, pooled, largest, Map, MapPeak, at, units, UNIT, BINS, MAP,
                            MAP_PEAK,
                        )  # fmt: skip
                        pooled = none
                        largest = none
                        next_bin += per_bin
                # Not sooner: the warps of a group wait for each other to release, and here they
                # do so anyway for the product.
                _release(q_ring, step, STAGES)
                step += 1
                drop = gl.load(drop_at + tile * BLOCK)  # on its way during the product
                s = hopper.warpgroup_mma_wait(0, deps=[_product(k, q_ring, step, D, STAGES)])
                sums, peaks = _sums(
                    s, drop, c, key_at - tile * BLOCK, tile < free, BINS, CAUSAL and not EVEN,
                    MAP_PEAK,
                )  # fmt: skip
                if LONG:
                    pooled += sums
                    largest = gl.maximum(largest, peaks)
                else:
                    at = cell + tile * BINS * units
                    received = _end_bin(
                        received, sums, peaks, Map, MapPeak, at, units, UNIT, BINS, MAP, MAP_PEAK
                    )
            _release(q_ring, step, STAGES)
            _release(k_ring, turn, 2)
            step += 1
            turn += 1
            if LONG:
                at = cell + (tiles - 1) // per_bin * units
                received = _end_bin(
                    received, pooled, largest, Map, MapPeak, at, units, UNIT, BINS, MAP, MAP_PEAK
                )
            if RECEIVED:
                received = gl.sum(received, 1)
                at = first + gl.arange(0, ROWS, received.type.layout)
                gl.store(Received + flat * keys + at, received, mask=at < keys)


@gluon.jit(
    do_not_specialize=["items", "pairs", "blocks", "queries", "keys", "tiles", "per_bin", "bins"]
)
def columns(
    q_desc, k_desc, dealt, Drop, Received, Map, MapPeak, items, pairs, blocks, heads, groups,
    queries, keys, tiles, per_bin, bins, c,
    D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr, UNIT: gl.constexpr,
    LONG: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr, RECEIVED: gl.constexpr,
    MAP: gl.constexpr, MAP_PEAK: gl.constexpr,
):  # fmt: skip
    """Sums over queries; see columns.py.

    ``Drop`` is the log-sum-exp, base 2 and with a minus, and -inf to the end of the last tile: a
    query that is not there gives nothing.
    """
    dtype: gl.constexpr = q_desc.dtype
    offset = keys - queries
    k_ring = _ring(dtype, 2 * TEAMS, k_desc)
    q_ring = _ring(dtype, STAGES, q_desc)
    _open(k_ring, 2, TEAMS)
    _open(q_ring, STAGES, TEAMS)
    hopper.fence_async_shared()
    work = items, pairs, blocks, heads
    sizes = keys, offset, tiles, per_bin, bins, c
    shared = k_ring, q_ring, Drop, Received, Map, MapPeak, work, sizes
    loader = k_ring, q_ring, k_desc, q_desc, dealt, work, groups, offset, tiles
    gl.warp_specialize(
        [
            (_receive, (
                shared, 0, D, STAGES, BINS, UNIT, LONG, CAUSAL, EVEN, RECEIVED, MAP, MAP_PEAK,
            )),
            (_receive, (
                shared, 1, D, STAGES, BINS, UNIT, LONG, CAUSAL, EVEN, RECEIVED, MAP, MAP_PEAK,
            )),
            (_receive, (
                shared, 2, D, STAGES, BINS, UNIT, LONG, CAUSAL, EVEN, RECEIVED, MAP, MAP_PEAK,
            )),
            (_receive, (
                shared, 3, D, STAGES, BINS, UNIT, LONG, CAUSAL, EVEN, RECEIVED, MAP, MAP_PEAK,
            )),
            (_load_columns, (loader, D, STAGES, BINS, CAUSAL)),
        ],
        [4, 4, 4, 1], [112, 112, 112, 24],
    )  # fmt: skip


@gluon.jit
def _load_collect(loader, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    q_ring, k_ring, q_desc, k_desc, work, groups, offset, tiles, from_head = loader
    items, pairs, blocks, heads = work
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(_halves(item, pairs, blocks, CAUSAL)):
            flat, block = _block(item, half, pairs, blocks, CAUSAL)
            batch, head = (flat + from_head) // heads, (flat + from_head) % heads
            row = block * (TEAMS * ROWS)
            _fill_teams(q_ring, turn, q_desc, batch, head, row, D)
            stop = _last_tile(row + (TEAMS - 1) * ROWS, offset, tiles, CAUSAL) + 1
            for i in range(stop):
                place = [batch, head // groups, (stop - 1 - i) * BLOCK, 0]
                _fill(k_ring, step, STAGES, k_desc, place, BLOCK * D * 2)
                step += 1
            turn += 1


@gluon.jit
def _last_tile(row, offset, tiles, CAUSAL: gl.constexpr):
    """Of the keys that the 64 queries from a row on see."""
    if CAUSAL:
        return gl.minimum(tiles - 1, (row + ROWS - 1 + offset) // BLOCK)
    return tiles - 1


@gluon.jit
def _unseen(s, query_at, key, keys, CAUSAL: gl.constexpr):
    """Scores by lanes, lowered where a query may not see the key."""
    layout: gl.constexpr = s.type.layout
    turn = gl.arange(0, s.shape[2], _along(layout, 3, 2))[None, None, :]
    known = turn // PAIR * (LANES * PAIR) + turn % PAIR
    lane = gl.arange(0, LANES, _along(layout, 3, 1))[None, :, None] * PAIR
    if CAUSAL:  # none sees beyond the last key
        return gl.where(known <= query_at[:, None, None] - key - lane, s, NOTHING)
    else:  # noqa: RET505 - Gluon follows both ways
        return gl.where(known < keys - key - lane, s, NOTHING)


@gluon.jit
def _in_pairs(s):
    """Scores by lanes, and by neighbours: [ROWS, LANES, ., PAIR]."""
    return gl.reshape(s, [ROWS, LANES, s.shape[2] // PAIR, PAIR])


@gluon.jit
def _store_pair(pair, slot, reaches):
    layout: gl.constexpr = pair.type.layout
    near = gl.arange(0, PAIR, _along(layout, 3, 2))[None, None, :]
    slot = gl.convert_layout(slot, gl.SliceLayout(2, layout))[:, :, None]
    reaches = gl.convert_layout(reaches, gl.SliceLayout(2, layout))[:, :, None]
    gl.store(slot + near, pair, mask=reaches)


@gluon.jit
def _keep(pairs, bar, found, room, key, FIRST: gl.constexpr):
    """Store those of a thread's scores that reach the bar, with three others each, and their key.

    ``pairs`` is [rows, LANES, ., PAIR], ``found`` how many numbers are stored: [rows, LANES].
    Where there might be no more room, nothing is stored.
    """
    N: gl.constexpr = pairs.shape[2]
    if N == 2 * SURE:
        bar = gl.where(found <= (ROOM - SURE) * RECORD, bar, float("inf"))
    halves = gl.permute(gl.reshape(pairs, [ROWS, LANES, 2, N // 2, PAIR]), (0, 1, 3, 4, 2))
    near, far = gl.split(halves)
    if N > 2:
        found = _keep(near, bar, found, room, key, FIRST)
        found = _keep(far, bar, found, room, key, FIRST + N // 2)
    else:
        near, far = gl.reshape(near, [ROWS, LANES, PAIR]), gl.reshape(far, [ROWS, LANES, PAIR])
        high = gl.maximum(gl.max(near, 2), gl.max(far, 2))
        reaches = gl.convert_layout(high, found.type.layout) >= bar
        slot = room + found
        _store_pair(near, slot, reaches)
        _store_pair(far, slot + PAIR, reaches)
        which = key + FIRST * (LANES * PAIR)
        gl.store(slot + 2 * PAIR, which.to(gl.float32, bitcast=True), mask=reaches)
        found = gl.where(reaches, found + RECORD, found)
    return found


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
    none = _by_lanes(gl.zeros([ROWS, BLOCK], gl.float32, layout))
    of_heights: gl.constexpr = _by_height(none).type.layout
    of_lanes: gl.constexpr = gl.max(none, 2).type.layout
    of_rows: gl.constexpr = _along(none.type.layout, 3, 0)
    lane = gl.arange(0, LANES, gl.SliceLayout(0, of_lanes))[None, :]
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(_halves(item, pairs, blocks, CAUSAL)):
            flat, block = _block(item, half, pairs, blocks, CAUSAL)
            row = block * (TEAMS * ROWS) + PART * ROWS
            first = flat.to(gl.int64) * queries
            query_at = row + gl.arange(0, ROWS, of_rows) + offset
            # The bar: of the highest of each set the count-th, where equal ones count once. As
            # many scores reach it; a little lower, should products differ in their last bit.
            rows = row + gl.arange(0, ROWS, _along(of_heights, 3, 0))
            group = gl.arange(0, GROUPED, _along(of_heights, 3, 2))[None, None, :]
            height_at = (first + rows[:, None, None]) * (LANES * GROUPED) + group
            mine = gl.arange(0, LANES, _along(of_heights, 3, 1))[None, :, None] * GROUPED
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
            found = gl.zeros([ROWS, LANES], gl.int32, of_lanes)
            last = _last_tile(row, offset, tiles, CAUSAL)
            q = _await_team(q_ring, turn, PART, D)
            ahead = _last_tile(row + (TEAMS - 1 - PART) * ROWS, offset, tiles, CAUSAL) - last
            for i in range(ahead):
                _await(k_ring, step + i, STAGES)
                _release(k_ring, step + i, STAGES)
            step += ahead
            s = hopper.warpgroup_mma_wait(0, deps=[_product(q, k_ring, step, D, STAGES)])
            key = last * BLOCK
            scores = _unseen(_by_lanes(s), query_at, key, keys, CAUSAL)
            found = _keep(_in_pairs(scores), bar, found, room, key + lane * PAIR, 0)
            for tile in range(1, last + 1):
                key = (last - tile) * BLOCK
                _release(k_ring, step, STAGES)
                step += 1
                s = hopper.warpgroup_mma_wait(0, deps=[_product(q, k_ring, step, D, STAGES)])
                scores = _by_lanes(s)
                if CAUSAL and not EVEN:
                    scores = _unseen(scores, query_at, key, keys, True)
                found = _keep(_in_pairs(scores), bar, found, room, key + lane * PAIR, 0)
            _release(k_ring, step, STAGES)
            _release(q_ring, turn, 2)
            step += 1
            turn += 1
            # Where some may be missing, more are told than there is room for.
            found = gl.where(found <= (ROOM - SURE) * RECORD, found // RECORD, ROOM + 1)
            gl.store(Count + place, found, mask=(mine < queries)[:, None])


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
    dtype: gl.constexpr = q_desc.dtype
    offset = keys - queries
    q_ring = _ring(dtype, 2 * TEAMS, q_desc)
    k_ring = _ring(dtype, STAGES, k_desc)
    _open(q_ring, 2, TEAMS)
    _open(k_ring, STAGES, TEAMS)
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
