# mypy: ignore-errors
# ruff: noqa: E741
"""The forward pass and the second pass for Hopper, where groups of warps have roles.

The same sums as in forward.py and columns.py, for calls without a bias that have no mask or are
causal. One warp loads: it asks the copy engine for tiles, as many ahead as there is room for.
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
def _block(item, half, pairs, blocks, heads, CAUSAL: gl.constexpr):
    """The sequence, the head, and which block of it."""
    flat = item // pairs
    block = item % pairs
    if CAUSAL:
        block = gl.where(half == 0, blocks - 1 - block, block)
    return flat // heads, flat % heads, block


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
            batch, head, block = _block(item, half, pairs, blocks, heads, CAUSAL)
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
def _weigh(
    s, l, m, e, t, c, query_at, key, keys,
    CAUSAL: gl.constexpr, FREE: gl.constexpr, ENTROPY: gl.constexpr, DISTANCE: gl.constexpr,
):  # fmt: skip
    """The weights of a tile, and the running sums with them; see forward.py."""
    # A key's place in the tile: a part that is known beforehand, and the lane's own.
    layout: gl.constexpr = s.type.layout
    turn = gl.arange(0, s.shape[2], _along(layout, 3, 2))[None, None, :]
    known = turn // PAIR * (LANES * PAIR) + turn % PAIR
    lane = gl.arange(0, LANES, _along(layout, 3, 1))[None, :, None] * PAIR
    ahead = query_at[:, None, None] - key
    if FREE:
        higher = gl.maximum(m, gl.max(gl.max(s, 2), 1) * c)
        x = s * c - higher[:, None, None]
    else:
        s = gl.where(known < keys - key - lane, s * c, NOTHING)
        if CAUSAL:
            s = gl.where(known <= ahead - lane, s, NOTHING)
        higher = gl.maximum(m, gl.max(gl.max(s, 2), 1))
        x = s - higher[:, None, None]
    p = gl.exp2(x)
    shrink = gl.exp2(m - higher)
    whole = gl.sum(p, 2)
    total = gl.sum(whole, 1)
    if ENTROPY:
        e = (e + (m - higher) * l) * shrink + gl.sum(gl.sum(p * x, 2), 1)
    if DISTANCE:
        if FREE or CAUSAL:  # all keys with a weight lie on one side
            inside = gl.sum(p * known.to(gl.float32), 2)
            mine = gl.arange(0, LANES, gl.SliceLayout(0, whole.type.layout)) * PAIR
            inside += whole * mine.to(gl.float32)[None, :]
            t = t * shrink + gl.abs((query_at - key).to(gl.float32) * total - gl.sum(inside, 1))
        else:
            apart = gl.abs((ahead - lane).to(gl.float32) - known.to(gl.float32))
            t = t * shrink + gl.sum(gl.sum(p * apart, 2), 1)
    l = l * shrink + total
    return p, l, higher, e, t, shrink


@gluon.jit
def _attend(
    shared,
    PART: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, AROUND: gl.constexpr, ENTROPY: gl.constexpr, PEAK: gl.constexpr,
    HIGHEST: gl.constexpr, DISTANCE: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 queries of every block, two tiles of keys at a time."""
    q_ring, k_ring, v_ring, out, Lse, Entropy, Peak, Highest, Distance, work, sizes = shared
    items, pairs, blocks, heads = work
    queries, keys, offset, c = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = out.data.dtype.element_ty
    none = gl.zeros([ROWS, BLOCK], gl.float32, s_layout)
    of_rows: gl.constexpr = _along(_by_lanes(none).type.layout, 3, 0)
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(_halves(item, pairs, blocks, CAUSAL)):
            batch, head, block = _block(item, half, pairs, blocks, heads, CAUSAL)
            row = block * BLOCK
            stop = _tiles(row, keys, offset, CAUSAL)
            rows = row + PART * ROWS + gl.arange(0, ROWS, of_rows)
            query_at = rows + offset
            # Tiles in which some pair is masked, or lies on another side than the rest.
            careful = 1
            if CAUSAL:
                careful = gl.maximum(stop - (row + PART * ROWS + offset + 1) // BLOCK, 1)
            elif AROUND:
                careful = gl.minimum(stop, 1 + ((row + offset) % BLOCK != 0).to(gl.int32))
            o = gl.zeros([ROWS, D], gl.float32, o_layout)
            l = gl.zeros([ROWS], gl.float32, of_rows)
            e = gl.zeros([ROWS], gl.float32, of_rows)
            t = gl.zeros([ROWS], gl.float32, of_rows)
            m = gl.full([ROWS], LOWEST, gl.float32, of_rows)

            q = _await(q_ring, turn, 2).reshape([BLOCK, D]).slice(PART * ROWS, ROWS)
            k = _await(k_ring, step, STAGES).reshape([BLOCK, D]).permute((1, 0))
            s = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            _release(k_ring, step, STAGES)
            key = _tile_at(0, stop, row, offset, AROUND)
            p, l, m, e, t, shrink = _weigh(
                _by_lanes(s), l, m, e, t, c, query_at, key, keys, CAUSAL, False, ENTROPY, DISTANCE
            )
            for FREE in gl.static_range(2):
                if FREE or CAUSAL or AROUND:
                    start, end = (careful, stop) if FREE else (1, careful)
                    for i in range(start, end):
                        # This tile's scores, and the last tile's values while its weights are made.
                        k = _await(k_ring, step + i, STAGES).reshape([BLOCK, D]).permute((1, 0))
                        s = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
                        weights = gl.convert_layout(_by_keys(p).to(dtype), operand)
                        v = _await(v_ring, step + i - 1, STAGES).reshape([BLOCK, D])
                        o = hopper.warpgroup_mma(weights, v, o, is_async=True)
                        s = hopper.warpgroup_mma_wait(1, deps=[s])
                        _release(k_ring, step + i, STAGES)
                        key = _tile_at(i, stop, row, offset, AROUND)
                        p, l, m, e, t, shrink = _weigh(
                            _by_lanes(s), l, m, e, t, c, query_at, key, keys, CAUSAL, FREE == 1,
                            ENTROPY, DISTANCE,
                        )  # fmt: skip
                        o, weights = hopper.warpgroup_mma_wait(0, deps=[o, weights])
                        _release(v_ring, step + i - 1, STAGES)
                        o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
            _release(q_ring, turn, 2)
            step += stop
            turn += 1
            weights = gl.convert_layout(_by_keys(p).to(dtype), operand)
            v = _await(v_ring, step - 1, STAGES).reshape([BLOCK, D])
            o = hopper.warpgroup_mma(weights, v, o, is_async=True)

            # Every query attends to something here, so l is at least 1.
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
    q_desc, k_desc, v_desc, out, Lse, Entropy, Peak, Highest, Distance, items, pairs, blocks,
    heads, groups, queries, keys, c,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    ENTROPY: gl.constexpr, PEAK: gl.constexpr, HIGHEST: gl.constexpr, DISTANCE: gl.constexpr,
):  # fmt: skip
    """Attend; see forward.py."""
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
    shared = q_ring, k_ring, v_ring, out, Lse, Entropy, Peak, Highest, Distance, work, sizes
    loader = q_ring, k_ring, v_ring, q_desc, k_desc, v_desc, work, groups, keys, offset
    gl.warp_specialize(
        [
            (_attend, (
                shared, 0, D, STAGES, CAUSAL, AROUND, ENTROPY, PEAK, HIGHEST, DISTANCE,
            )),
            (_attend, (
                shared, 1, D, STAGES, CAUSAL, AROUND, ENTROPY, PEAK, HIGHEST, DISTANCE,
            )),
            (_load, (loader, D, STAGES, CAUSAL, AROUND)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _places(BINS: gl.constexpr, layout: gl.constexpr):
    """The queries of a tile, in the order in which it holds them.

    Where a tile has four bins or more, its queries are dealt out to them as in columns.py.
    """
    place = gl.arange(0, BLOCK, layout)
    if BINS >= LANES:
        U: gl.constexpr = BLOCK // BINS
        lane = place // PAIR % LANES
        turn = place // (PAIR * LANES)
        place = (turn // (U // PAIR) * LANES + lane) * U + turn % (U // PAIR) * PAIR + place % PAIR
    return place


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
def _load_columns(
    loader, D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr, CAUSAL: gl.constexpr,
):  # fmt: skip
    k_ring, q_ring, k_desc, q_desc, dealt, work, groups, offset, tiles = loader
    items, pairs, blocks, heads = work
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(_halves(item, pairs, blocks, CAUSAL)):
            batch, head, block = _block(item, half, pairs, blocks, heads, CAUSAL)
            key = block * (TEAMS * ROWS)
            slot = turn % 2
            mbarrier.wait(k_ring[2].index(slot), (turn // 2 & 1) ^ 1)
            full = k_ring[1].index(slot)
            mbarrier.expect(full, TEAMS * ROWS * D * 2)
            for part in gl.static_range(TEAMS):
                at = [batch, head // groups, key + part * ROWS, 0]
                tile = k_ring[0].index(slot * TEAMS + part)
                tma.async_copy_global_to_shared(k_desc, at, full, tile)
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
def _sums(
    k, q_ring, step, drop_at, c, first, masked,
    D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr, CAUSAL: gl.constexpr,
    PEAK: gl.constexpr,
):  # fmt: skip
    """Of one tile what each key gets, and the largest weight: [keys, ., LANES]."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, layout)
    drop = gl.load(drop_at)  # on its way during the product
    q = _await(q_ring, step, STAGES).reshape([BLOCK, D]).permute((1, 0))
    s = hopper.warpgroup_mma(k, q, zeros, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=[s])
    _release(q_ring, step, STAGES)
    parts = _by_bins(gl.exp2(s * c + drop[None, :]), BINS)
    if CAUSAL:
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
    UNIT: gl.constexpr, LONG: gl.constexpr, CAUSAL: gl.constexpr, RECEIVED: gl.constexpr,
    MAP: gl.constexpr, MAP_PEAK: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 keys of every block of keys, and all queries."""
    k_ring, q_ring, Drop, Received, Map, MapPeak, work, sizes = shared
    items, pairs, blocks, heads = work
    keys, offset, tiles, per_bin, bins, c = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    of_queries: gl.constexpr = gl.SliceLayout(0, layout)
    zeros = gl.zeros([ROWS, BLOCK], gl.float32, layout)
    none = gl.sum(gl.sum(_by_bins(zeros, BINS), 4), 2)  # [keys, ., LANES]
    places = _places(BINS, of_queries)
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(_halves(item, pairs, blocks, CAUSAL)):
            batch, head, block = _block(item, half, pairs, blocks, heads, CAUSAL)
            flat = (batch * heads + head).to(gl.int64)
            first = block * (TEAMS * ROWS) + PART * ROWS
            key_at = first + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
            units = blocks * (TEAMS * ROWS // UNIT)
            cell = flat * bins * units + block * (TEAMS * ROWS // UNIT)
            cell += PART * (ROWS // UNIT)
            drop_at = Drop + flat * tiles * BLOCK + places
            # Before ``start`` no query sees these keys, and from the tile ``free`` on all do.
            begin, start, free = 0, 0, 0
            if CAUSAL:
                begin = gl.maximum(block * (TEAMS * ROWS) - offset, 0) // BLOCK
                start = gl.minimum(gl.maximum(first - offset, 0) // BLOCK, tiles)
                free = gl.maximum(first + ROWS - 1 - offset + BLOCK - 1, 0) // BLOCK
            mbarrier.wait(k_ring[1].index(turn % 2), turn // 2 & 1)
            k = k_ring[0].index(turn % 2 * TEAMS + PART).reshape([ROWS, D])
            for tile in range(begin, start):
                _await(q_ring, step + tile - begin, STAGES)
                _release(q_ring, step + tile - begin, STAGES)
            received = gl.sum(none, 1)
            # One loop for masked and other tiles: of two, ptxas took the second's first operand
            # from the first, even where that had no turn.
            if LONG:  # a bin has several tiles
                for index in range(start // per_bin, (tiles + per_bin - 1) // per_bin):
                    pooled = none
                    largest = none
                    first_tile = gl.maximum(index * per_bin, start)
                    for tile in range(first_tile, gl.minimum((index + 1) * per_bin, tiles)):
                        sums, peaks = _sums(
                            k, q_ring, step + tile - begin, drop_at + tile * BLOCK, c,
                            key_at - offset - tile * BLOCK, tile < free, D, STAGES, BINS, CAUSAL,
                            MAP_PEAK,
                        )  # fmt: skip
                        pooled += sums
                        largest = gl.maximum(largest, peaks)
                    received += gl.sum(pooled, 1)
                    if MAP:
                        at = cell + index * units
                        _put(Map, at, units, pooled, UNIT, BINS, False)
                        if MAP_PEAK:
                            _put(MapPeak, at, units, largest, UNIT, BINS, True)
            else:
                for tile in range(start, tiles):
                    pooled, largest = _sums(
                        k, q_ring, step + tile - begin, drop_at + tile * BLOCK, c,
                        key_at - offset - tile * BLOCK, tile < free, D, STAGES, BINS, CAUSAL,
                        MAP_PEAK,
                    )  # fmt: skip
                    received += gl.sum(pooled, 1)
                    at = cell + tile * BINS * units
                    _put(Map, at, units, pooled, UNIT, BINS, False)
                    if MAP_PEAK:
                        _put(MapPeak, at, units, largest, UNIT, BINS, True)
            _release(k_ring, turn, 2)
            step += tiles - begin
            turn += 1
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
    LONG: gl.constexpr, CAUSAL: gl.constexpr, RECEIVED: gl.constexpr, MAP: gl.constexpr,
    MAP_PEAK: gl.constexpr,
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
                shared, 0, D, STAGES, BINS, UNIT, LONG, CAUSAL, RECEIVED, MAP, MAP_PEAK,
            )),
            (_receive, (
                shared, 1, D, STAGES, BINS, UNIT, LONG, CAUSAL, RECEIVED, MAP, MAP_PEAK,
            )),
            (_receive, (
                shared, 2, D, STAGES, BINS, UNIT, LONG, CAUSAL, RECEIVED, MAP, MAP_PEAK,
            )),
            (_receive, (
                shared, 3, D, STAGES, BINS, UNIT, LONG, CAUSAL, RECEIVED, MAP, MAP_PEAK,
            )),
            (_load_columns, (loader, D, STAGES, BINS, CAUSAL)),
        ],
        [4, 4, 4, 1], [112, 112, 112, 24],
    )  # fmt: skip
