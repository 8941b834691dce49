# mypy: ignore-errors
# ruff: noqa: E741
"""The forward pass; see forward.py for its sums.

Two groups of warps have 64 queries each. While a group makes the weights of a tile, the next tile's
scores and the last one's values are multiplied.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from regard.mechanism.kernels.hopper.roles import (
    BLOCK,
    LANES,
    LN2,
    LOWEST,
    NOTHING,
    PAIR,
    ROWS,
    along,
    await_tile,
    block_of,
    by_lanes,
    fill,
    halves_of,
    may_see,
    places_in,
    release,
    ring_of,
)

GROUPS = gl.constexpr(2)  # of warps that attend: ROWS queries each, BLOCK together


@gluon.jit
def _by_height(s, SETS: gl.constexpr):
    """The highest of each of some sets of a lane's scores: neighbours are in different ones."""
    return gl.max(gl.reshape(s, [ROWS, LANES, s.shape[2] // SETS, SETS]), 2)


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
        for half in range(halves_of(item, pairs, blocks, CAUSAL)):
            flat, block = block_of(item, half, pairs, blocks, CAUSAL)
            batch, head = flat // heads, flat % heads
            row = block * BLOCK
            stop = _tiles(row, keys, offset, CAUSAL)
            fill(q_ring, turn, 2, q_desc, [batch, head, row, 0], BLOCK * D * 2)
            for i in range(stop):
                at = [batch, head // groups, _tile_at(i, stop, row, offset, AROUND), 0]
                fill(k_ring, step, STAGES, k_desc, at, BLOCK * D * 2)
                fill(v_ring, step, STAGES, v_desc, at, BLOCK * D * 2)
                step += 1
            turn += 1


@gluon.jit
def _by_keys(parts):
    """As it was before ``by_lanes``."""
    N: gl.constexpr = parts.shape[2]
    tile = gl.reshape(parts, [ROWS, LANES, N // PAIR, PAIR])
    return gl.reshape(gl.permute(tile, (0, 2, 1, 3)), [ROWS, LANES * N])


@gluon.constexpr_function
def _parts(D, CAUSAL, DISTANCE, BAR):
    """How many parts a tile's sums have: of weights, for entropy and distance. By measurement."""
    if not DISTANCE:
        return 1, 1, 1
    if D == 64:
        return 1 if BAR else 4, 4, 4
    if BAR:
        return 4, 4, 4
    return (1, 1, 1) if CAUSAL else (4, 1, 4)


@gluon.jit
def _sum(x, PARTS: gl.constexpr):
    """A lane's sum: of as many sums, so that fewer additions wait for each other."""
    if PARTS == 1:
        found = gl.sum(x, 2)
    else:
        parts = gl.reshape(x, [ROWS, LANES, PARTS, x.shape[2] // PARTS])
        found = gl.convert_layout(gl.sum(gl.sum(parts, 3), 2), gl.SliceLayout(2, x.type.layout))
    return found


@gluon.jit
def _weigh(
    s, l, m, e, t, h, c, query_at, key, keys,
    D: gl.constexpr, CAUSAL: gl.constexpr, FREE: gl.constexpr, ENTROPY: gl.constexpr,
    DISTANCE: gl.constexpr, BAR: gl.constexpr,
):  # fmt: skip
    """The weights of a tile, and the running sums with them; see forward.py."""
    SETS: gl.constexpr = h.shape[2]
    PARTS: gl.constexpr = _parts(D, CAUSAL, DISTANCE, BAR)
    known, lane = places_in(s)
    if FREE:
        high = _by_height(s, SETS)
        if BAR:
            h = gl.maximum(h, high)
        highest = gl.convert_layout(gl.max(gl.max(high, 2), 1), m.type.layout)
        higher = gl.maximum(m, highest * c)
        x = s * c - higher[:, None, None]
    else:
        seen = may_see(s, query_at, key, keys, CAUSAL)
        if BAR:
            h = gl.maximum(h, _by_height(gl.where(seen, s, NOTHING), SETS))
        s = gl.where(seen, s * c, NOTHING)
        higher = gl.maximum(m, gl.max(gl.max(s, 2), 1))
        x = s - higher[:, None, None]
    p = gl.exp2(x)
    shrink = gl.exp2(m - higher)
    smaller = shrink[:, None]
    # The sums are a lane's own until all tiles are through.
    whole = _sum(p, PARTS[0])
    if ENTROPY:
        e = (e + (m - higher)[:, None] * l) * smaller + _sum(p * x, PARTS[1])
    if DISTANCE:
        if FREE or CAUSAL:  # all keys with a weight lie on one side
            inside = _sum(p * known.to(gl.float32), PARTS[2])
            mine = gl.arange(0, LANES, gl.SliceLayout(0, whole.type.layout)) * PAIR
            away = (query_at - key)[:, None] - mine[None, :]
            t = t * smaller + gl.abs(away.to(gl.float32) * whole - inside)
        else:
            ahead = query_at[:, None, None] - key - lane
            apart = gl.abs(ahead.to(gl.float32) - known.to(gl.float32))
            t = t * smaller + gl.sum(p * apart, 2)
    l = l * smaller + whole
    return p, l, higher, e, t, h, shrink


@gluon.jit
def _bar(h, count):
    """Of the highest of each set the count-th, where equal ones count once: as many reach it.

    A little lower, should products differ in their last bit.
    """
    top = gl.max(gl.max(h, 2), 1)
    for _ in range(1, count):
        h = gl.where(h >= top[:, None, None], NOTHING, h)
        top = gl.max(gl.max(h, 2), 1)
    return gl.maximum(top - gl.abs(top) * 1e-6, LOWEST)


@gluon.jit
def _attend(
    shared,
    PART: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, AROUND: gl.constexpr, EVEN: gl.constexpr, ENTROPY: gl.constexpr,
    PEAK: gl.constexpr, HIGHEST: gl.constexpr, DISTANCE: gl.constexpr, BAR: gl.constexpr,
):  # fmt: skip
    """One group of warps: its 64 queries of every block, two tiles of keys at a time."""
    q_ring, k_ring, v_ring, out, Lse, seen, work, sizes = shared
    Entropy, Peak, Highest, Distance, Bar = seen
    items, pairs, blocks, heads = work
    queries, keys, offset, count, c = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    dtype: gl.constexpr = out.data.dtype.element_ty
    none = gl.zeros([ROWS, BLOCK], gl.float32, s_layout)
    of_rows: gl.constexpr = along(by_lanes(none).type.layout, 3, 0)
    of_lanes: gl.constexpr = gl.SliceLayout(2, by_lanes(none).type.layout)
    SETS: gl.constexpr = 512 // D  # more make a closer bar, and take registers
    of_heights: gl.constexpr = _by_height(by_lanes(none), SETS).type.layout
    step = 0
    turn = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        for half in range(halves_of(item, pairs, blocks, CAUSAL)):
            flat, block = block_of(item, half, pairs, blocks, CAUSAL)
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
            h = gl.full([ROWS, LANES, SETS], NOTHING, gl.float32, of_heights)

            q = await_tile(q_ring, turn, 2).reshape([BLOCK, D]).slice(PART * ROWS, ROWS)
            k = await_tile(k_ring, step, STAGES).reshape([BLOCK, D]).permute((1, 0))
            s = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            release(k_ring, step, STAGES)
            key = _tile_at(0, stop, row, offset, AROUND)
            p, l, m, e, t, h, shrink = _weigh(
                by_lanes(s), l, m, e, t, h, c, query_at, key, keys, D, CAUSAL, False, ENTROPY,
                DISTANCE, BAR,
            )  # fmt: skip
            for FREE in gl.static_range(2):
                if FREE or ((CAUSAL or AROUND) and not EVEN):
                    start, end = (careful, stop) if FREE else (1, careful)
                    for i in range(start, end):
                        # This tile's scores, and the last tile's values while its weights are made.
                        k = await_tile(k_ring, step + i, STAGES).reshape([BLOCK, D]).permute((1, 0))
                        s = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
                        weights = gl.convert_layout(_by_keys(p).to(dtype), operand)
                        v = await_tile(v_ring, step + i - 1, STAGES).reshape([BLOCK, D])
                        o = hopper.warpgroup_mma(weights, v, o, is_async=True)
                        s = hopper.warpgroup_mma_wait(1, deps=[s])
                        key = _tile_at(i, stop, row, offset, AROUND)
                        p, l, m, e, t, h, shrink = _weigh(
                            by_lanes(s), l, m, e, t, h, c, query_at, key, keys, D, CAUSAL,
                            FREE == 1, ENTROPY, DISTANCE, BAR,
                        )  # fmt: skip
                        # Once more, for what is there: ptxas moves the wait for the values before
                        # the exponentials otherwise, but not across a branch.
                        await_tile(v_ring, step + i - 1, STAGES)
                        o, weights = hopper.warpgroup_mma_wait(0, deps=[o, weights])
                        # Both at once: the warps of a group wait for each other to release.
                        release(k_ring, step + i, STAGES)
                        release(v_ring, step + i - 1, STAGES)
                        o = o * gl.convert_layout(shrink, gl.SliceLayout(1, o_layout))[:, None]
            release(q_ring, turn, 2)
            step += stop
            turn += 1
            weights = gl.convert_layout(_by_keys(p).to(dtype), operand)
            v = await_tile(v_ring, step - 1, STAGES).reshape([BLOCK, D])
            o = hopper.warpgroup_mma(weights, v, o, is_async=True)

            # Every query attends to something here, so l is at least 1.
            l, e, t = gl.sum(l, 1), gl.sum(e, 1), gl.sum(t, 1)
            inside = rows < queries
            inverse = 1 / l
            length = gl.log2(l)
            at = flat.to(gl.int64) * queries + rows
            gl.store(Lse + at, (m + length) * LN2, mask=inside)
            if ENTROPY:
                gl.store(Entropy + at, (length - e * inverse) * LN2, mask=inside)
            if PEAK:
                gl.store(Peak + at, inverse, mask=inside)
            if DISTANCE:
                gl.store(Distance + at, t * inverse, mask=inside)
            if BAR:
                gl.store(Bar + at, gl.convert_layout(_bar(h, count), of_rows), mask=inside)
            if HIGHEST:
                highest = gl.max(gl.where(inside, m * LN2, float("-inf")), 0)
                place = (flat * blocks + block) * GROUPS + PART
                gl.store(Highest + place, highest)
            o, weights = hopper.warpgroup_mma_wait(0, deps=[o, weights])
            release(v_ring, step - 1, STAGES)
            o = o * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
            o = gl.convert_layout(o.to(dtype), stored)
            rows_at = row + PART * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, stored))
            dims = gl.arange(0, D, gl.SliceLayout(0, stored))
            first = out.data + batch.to(gl.int64) * out.batch + head.to(gl.int64) * out.head
            gl.store(
                first + rows_at[:, None].to(gl.int64) * out.row + dims[None, :],
                o, mask=(rows_at < queries)[:, None],
            )  # fmt: skip


@gluon.jit(do_not_specialize=["items", "pairs", "blocks", "queries", "keys", "count"])
def forward(
    q_desc, k_desc, v_desc, out, Lse, Entropy, Peak, Highest, Distance, Bar, items, pairs, blocks,
    heads, groups, queries, keys, count, c,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    ENTROPY: gl.constexpr, PEAK: gl.constexpr, HIGHEST: gl.constexpr, DISTANCE: gl.constexpr,
    BAR: gl.constexpr,
):  # fmt: skip
    """Attend; see forward.py. ``Bar``: a score that ``count`` of a query's reach; for ``top``."""
    # |i - j| has two signs along a row: those tiles come first in which both occur.
    AROUND: gl.constexpr = DISTANCE and not CAUSAL
    offset = keys - queries
    q_ring = ring_of(q_desc, 2, 2, GROUPS)
    k_ring = ring_of(k_desc, STAGES, STAGES, GROUPS)
    v_ring = ring_of(v_desc, STAGES, STAGES, GROUPS)
    hopper.fence_async_shared()
    work = items, pairs, blocks, heads
    sizes = queries, keys, offset, count, c
    seen = Entropy, Peak, Highest, Distance, Bar
    shared = q_ring, k_ring, v_ring, out, Lse, seen, work, sizes
    loader = q_ring, k_ring, v_ring, q_desc, k_desc, v_desc, work, groups, keys, offset
    gl.warp_specialize(
        [
            (_attend, (
                shared, 0, D, STAGES, CAUSAL, AROUND, EVEN, ENTROPY, PEAK, HIGHEST, DISTANCE,
                BAR,
            )),
            (_attend, (
                shared, 1, D, STAGES, CAUSAL, AROUND, EVEN, ENTROPY, PEAK, HIGHEST, DISTANCE,
                BAR,
            )),
            (_load, (loader, D, STAGES, CAUSAL, AROUND)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip
