# mypy: ignore-errors
"""Sums over queries; see columns.py.

Four groups of warps have 64 keys each, and all go over the queries. They are one role; see
together.py.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from regard.kernels.hopper.pipeline import (
    BAND,
    BLOCK,
    CHANGING,
    LANES,
    PAIR,
    ROWS,
    TEAMS,
    along,
    await_launch,
    await_room,
    block_of,
    block_told,
    carried,
    end_of,
    first_cut,
    first_numbers,
    first_place,
    first_told,
    following,
    is_done,
    item_at,
    next_number,
    part_of,
    slot_of,
    tell_next,
    told_of,
    wide,
    within_cut,
)
from regard.kernels.hopper.teams import (
    HELD,
    LINES,
    OWN,
    STRIP,
    TILES,
    await_alone,
    fail_unless,
    fill_rows,
    is_there,
    own_place,
    release_alone,
    ring_in,
    room_after,
    scores,
    slips_in,
    team_of_thread,
    told_alone,
)
from regard.kernels.plan import Sizes, Work


@gluon.jit
def _by_bins(p, BINS: gl.constexpr):
    """The weights of a tile as [keys, groups of bins, ., LANES, PAIR].

    What a bin has lies along . and PAIR, and with one or two bins a tile along LANES too.
    """
    A: gl.constexpr = BINS // LANES if BINS >= LANES else BINS
    return gl.reshape(p, [p.shape[0], A, p.shape[1] // (A * LANES * PAIR), LANES, PAIR])


@gluon.jit
def _causal(parts, first, BINS: gl.constexpr, HIGH: gl.constexpr):
    """What keys get of the queries that may see them: from the place ``first`` in the tile on."""
    A: gl.constexpr = parts.shape[1]
    T: gl.constexpr = parts.shape[2]
    layout: gl.constexpr = parts.type.layout
    group = gl.arange(0, A, along(layout, 5, 1))[None, :, None, None, None]
    turn = gl.arange(0, T, along(layout, 5, 2))[None, None, :, None, None]
    lane = gl.arange(0, LANES, along(layout, 5, 3))[None, None, None, :, None]
    place = gl.arange(0, PAIR, along(layout, 5, 4))[None, None, None, None, :]
    first = gl.convert_layout(first, along(layout, 5, 0))[:, None, None, None, None]
    # A thread compares numbers known beforehand with one of its own.
    if BINS >= LANES:
        known = group * (LANES * HIGH) + turn * PAIR + place
        mine = first - lane * HIGH
    else:
        known = group * HIGH + turn * (LANES * PAIR) + place
        mine = first - lane * PAIR
    return gl.where(known >= mine, parts, 0.0)


@gluon.constexpr_function
def _exchanged(warps, rows, parts, lanes):
    """[warps, 2, rows, parts, 2, lanes], where a thread has both rows, and one part of two.

    It had both parts, and one row of two: so it gives one number of two away, and gets one.
    """
    bits = [2**i for i in range(5)]
    return gl.DistributedLinearLayout(
        [[0, 1, 0, 0, 0, 0], *[[0, 0, 0, bit, 0, 0] for bit in bits if bit < parts]],
        [
            *[[0, 0, 0, 0, 0, bit] for bit in bits if bit < LANES],
            *[[0, 0, bit, 0, 0, 0] for bit in bits if bit < rows],
            [0, 0, 0, 0, 1, 0],
            *[[0, 0, 0, 0, 0, bit] for bit in reversed(bits) if LANES <= bit < lanes],
        ],
        [[bit, 0, 0, 0, 0, 0] for bit in bits if bit < warps],
        [],
        [warps, 2, rows, parts, 2, lanes],
    )


@gluon.jit
def _over(x, axis: gl.constexpr, LARGEST: gl.constexpr):
    """The LARGEST along an axis, or the sum."""
    return gl.max(x, axis) if LARGEST else gl.sum(x, axis)


@gluon.jit
def _over_rows(x, LARGEST: gl.constexpr):
    """Of [warps, rows, parts, lanes] what all rows of a warp have: [warps, parts * lanes].

    While a thread has several parts it hands half of them on, and goes on with the others.
    """
    WARPS: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1] // 2
    P: gl.constexpr = x.shape[2] // 2
    N: gl.constexpr = x.shape[3]
    if R > 0 and P > 0:
        pairs = gl.reshape(x, [WARPS, 2, R, P, 2, N])
        pairs = gl.convert_layout(pairs, _exchanged(WARPS, R, P, N))
        half = gl.reshape(_over(pairs, 1, LARGEST), [WARPS, R, P, 2 * N])
        found = _over_rows(half, LARGEST)
    else:
        found = gl.reshape(_over(x, 1, LARGEST), [WARPS, x.shape[2] * N])
    return found


@gluon.jit
def _put(
    Cells, at, units, sums, per_query,
    UNIT: gl.constexpr, BINS: gl.constexpr, LARGEST: gl.constexpr, DONE: gl.constexpr,
):  # fmt: skip
    """Write a tile's share of the map: over UNIT keys each, and over lanes that share a bin.

    DONE: those are a cell, whose sum is an average once it is multiplied by ``per_query``.
    """
    A: gl.constexpr = sums.shape[1]
    R: gl.constexpr = sums.shape[0]
    if BINS >= LANES:
        cells = gl.reshape(sums, [R // BAND, BAND // UNIT, UNIT // 8, 8, A, LANES])
        cells = gl.permute(_over(cells, 2, LARGEST), (0, 2, 1, 3, 4))
        cells = gl.reshape(cells, [R // BAND, 8, BAND // UNIT * A, LANES])
        cells = _over_rows(cells, LARGEST)
        cells = gl.reshape(cells, [R // UNIT, BINS])
    else:
        cells = gl.reshape(sums, [R // UNIT, UNIT, A, LANES])
        cells = _over(_over(cells, 1, LARGEST), 2, LARGEST)
    if DONE and not LARGEST:
        cells = cells * per_query
    unit = gl.arange(0, R // UNIT, gl.SliceLayout(1, cells.type.layout)) % (ROWS // UNIT)
    bin_at = gl.arange(0, BINS, gl.SliceLayout(0, cells.type.layout))
    gl.store(Cells + at + bin_at[None, :] * units + unit[:, None], cells)


@gluon.jit
def put_bins(
    pooled, largest, cells, at,
    UNIT: gl.constexpr, BINS: gl.constexpr, MAP: gl.constexpr, MAP_PEAK: gl.constexpr,
    DONE: gl.constexpr,
):  # fmt: skip
    """Write what bins have: [keys, ., LANES]."""
    Map, MapPeak, units, per_query = cells
    if MAP:
        _put(Map, at, units, pooled, per_query, UNIT, BINS, False, DONE)
        if MAP_PEAK:
            _put(MapPeak, at, units, largest, per_query, UNIT, BINS, True, DONE)


@gluon.jit
def longer(pooled, largest, sums, peaks, here, next_bin, at, per_bin, units):
    """What bins of several tiles, or steps, have with this one: with it they begin, or go on.

    And where the next ones begin, and these are written.
    """
    fresh = here == next_bin
    pooled = gl.where(fresh, 0.0, pooled) + sums
    largest = gl.maximum(gl.where(fresh, 0.0, largest), peaks)
    return pooled, largest, next_bin + gl.where(fresh, per_bin, 0), at + gl.where(fresh, units, 0)


@gluon.jit
def put_nothing(Cells, at, units, R: gl.constexpr, UNIT: gl.constexpr, BINS: gl.constexpr):
    """Write zeros instead, for R keys."""
    layout: gl.constexpr = gl.BlockedLayout(  # each team has units of its own
        [1, 1], [ROWS // UNIT, 32 * UNIT // ROWS], [R // ROWS, 4], [1, 0]
    )
    unit = gl.arange(0, R // UNIT, gl.SliceLayout(1, layout)) % (ROWS // UNIT)
    bin_at = gl.arange(0, BINS, gl.SliceLayout(0, layout))
    nothing = gl.zeros([R // UNIT, BINS], gl.float32, layout)
    gl.store(Cells + (at + bin_at[None, :] * units + unit[:, None]), nothing)  # in 32 bits


@gluon.jit
def begin_of(block, sizes, CAUSAL: gl.constexpr, KEYS: gl.constexpr):
    """The first tile of queries that see some key of a block of KEYS."""
    if CAUSAL:
        return gl.maximum(block * KEYS - sizes.offset, 0) // BLOCK
    return 0


@gluon.jit
def _begin(block, sizes, CAUSAL: gl.constexpr):
    return begin_of(block, sizes, CAUSAL, TEAMS * ROWS)


@gluon.jit
def _stretch(program, number, block, work, sizes, CAUSAL: gl.constexpr, CUT: gl.constexpr):
    """From which tile to which a program goes over a block; bins of the map are not cut."""
    begin, end = _begin(block, sizes, CAUSAL), sizes.tiles
    if CUT:
        first, last = within_cut(program, number - first_cut(work), work)
        begin = (first + sizes.together - 1) // sizes.together * sizes.together
        stop = (last + sizes.together - 1) // sizes.together * sizes.together
        end = gl.minimum(stop, end)
    return begin, end


@gluon.jit
def _load_columns(
    loader, D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr, CAUSAL: gl.constexpr,
    CUT: gl.constexpr,
):  # fmt: skip
    k_ring, slips, Drawn, Done, q_ring, drops, k_desc, q_desc, drop, dealt, work, sizes = loader
    CARRIED: gl.constexpr = carried(D)
    place = first_place()
    team_place = first_place()
    number, after = first_numbers(work, CUT)
    early = gl.to_tensor(False)
    if Done is not None and CARRIED:  # what is told of the first item's queries is there
        early = is_done(Done, item_at(number, work, CAUSAL, True, CUT)[0], sizes.tiles)
    while number < end_of(work, CUT):
        item = item_at(number, work, CAUSAL, True, CUT)
        for half in range(item[2]):
            flat, block = block_of(item, half, work)
            batch, head = flat // work.heads, flat % work.heads
            begin, end = _stretch(gl.program_id(0), number, block, work, sizes, CAUSAL, CUT)
            if not CUT or begin < end:
                key = block * (TEAMS * ROWS)
                await_room(k_ring, team_place)
                tell_next(slips, team_place, item, half, after, work, CAUSAL, True, CUT)
                fill_rows(
                    k_ring, team_place, k_desc, batch, head // work.groups, key, half, D, CAUSAL
                )  # fmt: skip
                for i in range(begin, end):
                    _, full = await_room(q_ring, place)
                    mbarrier.expect(full, BLOCK * (D * 2 + (4 if CARRIED else 0)))
                    for strip in gl.static_range(D // STRIP):
                        if BINS >= LANES:
                            outer = batch * dealt.batch + head * dealt.head + i * (BINS // LANES)
                            at = [outer, 0, 0, 0, head * dealt.inner + strip * STRIP]
                        else:
                            at = [batch, head, i * BLOCK, strip * STRIP]
                        tile = q_ring[0].index(place[0] * (D // STRIP) + strip)
                        tma.async_copy_global_to_shared(q_desc, at, full, tile)
                    if CARRIED:
                        if not early:
                            await_launch()
                        at = [flat * sizes.tiles + i, 0]
                        tma.async_copy_global_to_shared(drop, at, full, drops.index(place[0]))
                    place = following(place, STAGES)
                team_place = following(team_place, 2)
        early = gl.to_tensor(False)
        number, after = after, next_number(after, Drawn, work, CUT)


@gluon.jit
def weights_of(
    s, drop, c, first, masked, BINS: gl.constexpr, HIGH: gl.constexpr, MASK: gl.constexpr
):  # fmt: skip
    """The weights of a tile, or of half of one, whose bins have HIGH queries there; by bins.

    Where some are masked, 0 before a key's ``first`` query.
    """
    parts = _by_bins(gl.exp2(s * c + drop), BINS)
    if MASK:
        if masked:
            parts = _causal(parts, first, BINS, HIGH)
    return parts


@gluon.jit
def sums_of(parts, PEAK: gl.constexpr):
    """Of a tile's weights what each key gets, and the largest: [keys, ., LANES]."""
    sums = gl.sum(gl.sum(parts, 4), 2)
    peaks = sums
    if PEAK:
        # As integers, whose order is that of numbers from 0 on: of those three are compared at
        # once, where they come one after the other.
        A: gl.constexpr = parts.shape[1]
        T: gl.constexpr = parts.shape[2]
        row = gl.reshape(gl.permute(parts, (0, 1, 3, 2, 4)), [parts.shape[0], A, LANES, T * PAIR])
        peaks = gl.max(row.to(gl.int32, bitcast=True), 3).to(gl.float32, bitcast=True)
        peaks = gl.convert_layout(peaks, sums.type.layout)
    return sums, peaks


@gluon.constexpr_function
def _fours(count, warps):
    """A number for each of some queries: a lane has four in sixteen, and all rows have the same."""
    more = [[bit] for bit in (16, 32, 64) if bit < count]
    return gl.DistributedLinearLayout(
        [[1], [2], *more], [[4], [8], [0], [0], [0]], [[0]] * (warps.bit_length() - 1), [], [count]
    )


@gluon.jit
def carried_with(rows, place, COUNT: gl.constexpr, layout: gl.constexpr):
    """Numbers that were copied with COUNT queries, one of each, ``by_fours``."""
    found = rows.index(place[0]).reshape([COUNT]).load(_fours(COUNT, layout.warps_per_cta[0]))
    found = gl.reshape(found, [COUNT // (LANES * 2 * PAIR), LANES, 2, PAIR])
    found = gl.reshape(gl.permute(found, (0, 2, 1, 3)), [COUNT])
    return gl.convert_layout(found, gl.SliceLayout(0, layout))


@gluon.jit
def _place_of(Kept, program, begins):
    """Where a program keeps what keys receive from its part of a block."""
    return Kept + slot_of(program, begins) * (TEAMS * ROWS)


@gluon.jit
def _halves(tile):
    """The first and the last queries of a tile whose halves have bins of their own."""
    halves = gl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2])
    return gl.split(gl.permute(halves, (0, 2, 1)))


@gluon.jit
def _whole(near, far, layout: gl.constexpr):
    """What the bins of a tile have, of what those of its halves have."""
    bins = gl.permute(gl.join(near, far), (0, 3, 1, 2))
    bins = gl.reshape(bins, [near.shape[0], 2 * near.shape[1], near.shape[2]])
    return gl.convert_layout(bins, layout)


@gluon.jit
def _sums_on_diagonal(
    s, drop, c, first, later, layout: gl.constexpr, BINS: gl.constexpr, PEAK: gl.constexpr
):  # fmt: skip
    """``sums_of`` a tile on the diagonal, for its first 64 keys or, if ``later``, its last.

    All of the last queries see the first keys, and none of the first ones the last keys.
    """
    HIGH: gl.constexpr = BLOCK // BINS
    near, far = _halves(s * c + drop)
    far = _causal(_by_bins(gl.exp2(far), BINS // 2), first - BLOCK // 2, BINS // 2, HIGH)
    sums, peaks = sums_of(far, PEAK)
    early, early_peaks = gl.full_like(sums, 0.0), gl.full_like(peaks, 0.0)
    if later == 0:
        parts = _causal(_by_bins(gl.exp2(near), BINS // 2), first, BINS // 2, HIGH)
        early, early_peaks = sums_of(parts, PEAK)
    return _whole(early, sums, layout), _whole(early_peaks, peaks, layout)


@gluon.jit
def _receive_block(
    shared, flat, block, part, begin, end, place, team_place, team,
    D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr,
    UNIT: gl.constexpr, LONG: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    DIAGONAL: gl.constexpr, RECEIVED: gl.constexpr, MAP: gl.constexpr, MAP_PEAK: gl.constexpr,
    DONE: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """What the 64 keys get of the queries in tiles ``begin`` to ``end``; see attend.py."""
    k_ring, slips_at, q_ring, drops, Received, Kept, Map, MapPeak, _, _, sizes, c, _ = shared
    CARRIED: gl.constexpr = carried(D)
    tiles, per_bin, bins = sizes.tiles, sizes.per_bin, sizes.bins
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [HELD // BAND, 1], [16, BLOCK, 16])
    first = block * (TEAMS * ROWS) + part * ROWS
    key_at = first + gl.arange(0, HELD, gl.SliceLayout(1, layout)) % ROWS - sizes.offset
    units = sizes.units
    cell = wide(flat * bins, units) + block * (TEAMS * ROWS // UNIT)
    cell += part * (ROWS // UNIT)
    # Before the tile ``start`` no query sees these keys, and from ``free`` on all do.
    start, free = begin, 0
    if CAUSAL:
        start = gl.maximum(gl.maximum(first - sizes.offset, 0) // BLOCK, begin)
        start = gl.minimum(start, end - 1)
        free = gl.maximum(first + ROWS - 1 - sizes.offset + BLOCK - 1, 0) // BLOCK
    begins = begin == _begin(block, sizes, CAUSAL)
    if MAP and DONE and CAUSAL:
        unseen, row = gl.where(begins, 0, begin), start
        if LONG:
            unseen, row = unseen // per_bin, row // per_bin
        for i in range(unseen, row):
            put_nothing(Map + cell, i * BINS * units, units, HELD, UNIT, BINS)
            if MAP_PEAK:
                put_nothing(MapPeak + cell, i * BINS * units, units, HELD, UNIT, BINS)
    per_query = BINS / BLOCK
    if LONG:
        per_query = BINS / (per_bin * BLOCK)
    cells = Map, MapPeak, units, per_query
    if not CARRIED:
        drop_at = drops + (flat * tiles).to(gl.int64) * BLOCK
        drop_at += gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        drop = gl.load(drop_at + start * BLOCK)
    mine = own_place(team)
    await_alone(k_ring, team_place)
    for _ in range(begin, start):
        await_alone(q_ring, place)
        release_alone(q_ring, place)
        place = following(place, STAGES)
    # The first tile by itself: where queries and keys end EVEN, no other is masked.
    await_alone(q_ring, place)
    s = scores(k_ring, team_place, q_ring, place, mine, 2, D)
    if CARRIED:
        drop = carried_with(drops, place, BLOCK, layout)
    s = hopper.warpgroup_mma_wait(0, deps=[s])
    HIGH: gl.constexpr = BLOCK // BINS
    here = key_at - start * BLOCK
    of_bins: gl.constexpr = sums_of(_by_bins(s, BINS), False)[0].type.layout
    if DIAGONAL:
        pooled, largest = _sums_on_diagonal(
            s, drop[None, :], c, here, team % 2, of_bins, BINS, MAP_PEAK
        )
    else:
        parts = weights_of(s, drop[None, :], c, here, True, BINS, HIGH, CAUSAL)
        pooled, largest = sums_of(parts, MAP_PEAK)
    map_row = start // per_bin if LONG else start * BINS
    next_bin = (map_row + 1) * per_bin
    at = cell + map_row * units
    put_bins(pooled, largest, cells, at, UNIT, BINS, MAP, MAP_PEAK, DONE)
    received = gl.sum(pooled, 1)  # [keys, LANES]
    for tile in range(start + 1, end):
        if not CARRIED:
            drop = gl.load(drop_at + tile * BLOCK)
        # Not before the tile is through: what goes with it is read by then. What is loaded after
        # the wait for the product comes too late.
        release_alone(q_ring, place)
        place = following(place, STAGES)
        await_alone(q_ring, place)
        s = scores(k_ring, team_place, q_ring, place, mine, 2, D)
        if CARRIED:
            drop = carried_with(drops, place, BLOCK, layout)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        parts = weights_of(
            s, drop[None, :], c, key_at - tile * BLOCK, tile < free, BINS, HIGH,
            CAUSAL and not EVEN,
        )  # fmt: skip
        sums, peaks = sums_of(parts, MAP_PEAK)
        if LONG:  # a bin has several tiles: written after each, faster than a branch at its end
            pooled, largest, next_bin, at = longer(
                pooled, largest, sums, peaks, tile, next_bin, at, per_bin, units
            )
        else:
            pooled, largest, at = sums, peaks, cell + tile * BINS * units
        put_bins(pooled, largest, cells, at, UNIT, BINS, MAP, MAP_PEAK, DONE)
        received += gl.sum(sums, 1)
    release_alone(q_ring, place)
    told = told_alone(slips_at, team_place)
    release_alone(k_ring, team_place)
    if RECEIVED:
        received = gl.sum(received, 1)
        at = first + gl.arange(0, HELD, received.type.layout) % ROWS
        if not CUT or (begins & (end == tiles)):
            gl.store(Received + wide(flat, sizes.keys) + at, received, mask=at < sizes.keys)
        else:
            kept = _place_of(Kept, gl.program_id(0), begins)
            gl.store(kept + (at - block * (TEAMS * ROWS)), received)
    return following(place, STAGES), told


@gluon.jit
def _receive(
    shared,
    D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr,
    UNIT: gl.constexpr, LONG: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    DIAGONAL: gl.constexpr, RECEIVED: gl.constexpr, MAP: gl.constexpr, MAP_PEAK: gl.constexpr,
    DONE: gl.constexpr, CUT: gl.constexpr,
):  # fmt: skip
    """All teams: the 64 keys of each in every block of keys, and all queries."""
    Done, work, sizes, _c, told = shared[8:]
    team = team_of_thread()
    place = first_place()
    team_place = first_place()
    number, _ = first_numbers(work, CUT)
    CARRIED: gl.constexpr = carried(D)
    if Done is None:
        await_launch()
    elif not CARRIED:  # else the loader waits for what is told of queries
        if not is_done(Done, told[0], sizes.tiles):
            await_launch()
    while told[0] >= 0:
        flat, block, half = block_told(told)
        part = part_of(half, team, CAUSAL)
        begin, end = _stretch(gl.program_id(0), number, block, work, sizes, CAUSAL, CUT)
        if not CUT or begin < end:
            place, told = _receive_block(
                shared, flat, block, part, begin, end, place, team_place, team, D, STAGES,
                BINS, UNIT, LONG, CAUSAL, EVEN, DIAGONAL, RECEIVED, MAP, MAP_PEAK, DONE, CUT,
            )  # fmt: skip
            team_place = following(team_place, 2)
        if Done is not None and not CARRIED:  # only the first block may be early
            await_launch()
        number += 1
        if CUT:  # the next one, if any; of some nothing is loaded, and so no word is left
            told = told_of(number, work, CAUSAL, True, CUT)


@gluon.jit(do_not_specialize=[*CHANGING, *Sizes._fields])
def columns(
    q_desc, k_desc, drop, dealt, Received, Kept, Map, MapPeak, Drawn,
    Done, items, blocks, heads, groups, programs, singly, length, share,
    keys, offset, tiles, per_bin, bins, together, units, c,
    D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr, UNIT: gl.constexpr,
    LONG: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr, DIAGONAL: gl.constexpr,
    RECEIVED: gl.constexpr, MAP: gl.constexpr, MAP_PEAK: gl.constexpr, DONE: gl.constexpr,
    CUT: gl.constexpr,
):  # fmt: skip
    """Sums over queries; see columns.py.

    ``drop`` is the log-sum-exp, base 2 and with a minus, in the order in which a tile holds its
    queries, and -inf to the end of the last tile: a query that is not there gives nothing. Where
    it is ``carried`` it is described for the copy engine, else a pointer.
    Of items that are CUT, programs leave in ``Kept`` what they have of a block, for ``add``.
    DIAGONAL: each block's first tile is on the diagonal of a causal mask, and the halves of a tile
    have bins of their own. (Blocks beyond the last key have another; what they give is not read.)
    Maps are sums over UNIT keys; DONE: these are cells, averages, and 0 where no query sees a key.
    """
    work = Work(items, blocks, heads, groups, programs, singly, length, share)
    sizes = Sizes(keys, offset, tiles, per_bin, bins, together, units)
    STRIPS: gl.constexpr = D // STRIP
    CARRIED: gl.constexpr = carried(D)
    BEFORE: gl.constexpr = (2 * TEAMS * ROWS + STAGES * BLOCK) * D * 2  # bytes of both rings
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    room = gl.allocate_shared_memory(gl.int32, [LINES, 32], plain)
    begin = room_after(BEFORE + (STAGES * BLOCK * 4 if CARRIED else 0))
    k_ring = ring_in(room, begin, k_desc, 2 * STRIPS * TEAMS, 2, OWN)
    q_ring = ring_in(room, begin, q_desc, STAGES * STRIPS, STAGES, TILES)
    slips, slips_at = slips_in(room, begin)
    drops = drop
    if CARRIED:
        drops = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK], drop.layout)
    fail_unless(is_there(room, begin))
    hopper.fence_async_shared()
    told = first_told(work, CAUSAL, True, CUT)
    shared = (
        k_ring, slips_at, q_ring, drops, Received, Kept, Map, MapPeak, Done, work, sizes, c, told,
    )  # fmt: skip
    loader = k_ring, slips, Drawn, Done, q_ring, drops, k_desc, q_desc, drop, dealt, work, sizes
    gl.warp_specialize(
        [
            (_receive, (
                shared, D, STAGES, BINS, UNIT, LONG, CAUSAL, EVEN, DIAGONAL, RECEIVED, MAP,
                MAP_PEAK, DONE, CUT,
            )),
            (_load_columns, (loader, D, STAGES, BINS, CAUSAL, CUT)),
        ],
        [1], [24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*CHANGING, *Sizes._fields])
def add(
    Received, Kept,
    items, blocks, heads, groups, programs, singly, length, share,
    keys, offset, tiles, per_bin, bins, together, units,
):  # fmt: skip
    """What the keys of a block receive in all, where programs of ``columns`` have shared it."""
    work = Work(items, blocks, heads, groups, programs, singly, length, share)
    sizes = Sizes(keys, offset, tiles, per_bin, bins, together, units)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    number = gl.program_id(0)
    flat, block, _ = item_at(first_cut(work) + number, work, False, True, True)
    start = number * work.length
    at = gl.arange(0, TEAMS * ROWS, layout)
    received = gl.zeros([TEAMS * ROWS], gl.float32, layout)
    parts = 0
    for program in range(start // work.share, (start + work.length - 1) // work.share + 1):
        begin, end = _stretch(program, first_cut(work) + number, block, work, sizes, False, True)
        if (begin < end) & (end - begin < sizes.tiles):
            received += gl.load(_place_of(Kept, program, begin == 0) + at)
            parts += 1
    if parts > 0:
        key = block * (TEAMS * ROWS) + at
        place = wide(flat, sizes.keys) + key
        gl.store(Received + place, received, mask=key < sizes.keys)
