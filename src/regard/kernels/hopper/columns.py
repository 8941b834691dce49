# mypy: ignore-errors
"""Sums over queries for Hopper: received, map and map_peak; the formulas are in triton/columns.py.

Four teams (warpgroups) have 64 keys each, and each iterates over all queries. They run as one role;
see teams.py. Called by ``launch.columns``; ``backward`` also uses the functions that sum a tile. No
two programs add to the same number, so results are bitwise reproducible.

Test: ``pytest tests/kernels/test_hopper.py -k columns_are_the_definition``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from regard.kernels.hopper.pipeline import (
    BAND,
    BLOCK,
    LANES,
    NOT_SPECIALIZED,
    PAIR,
    ROWS,
    TEAMS,
    axis_layout,
    block_of,
    end_of,
    first_message,
    first_numbers,
    first_split_item,
    is_done,
    item_at,
    message_of,
    multiply_wide,
    neg_lse_by_copy,
    next_number,
    next_place,
    partial_slot,
    ring_start,
    send_next_block,
    steps_within,
    team_part,
    unpack_message,
    wait_for_previous_launch,
    wait_until_empty,
)
from regard.kernels.hopper.teams import (
    LINES,
    OWN_ROWS,
    STRIP,
    TEAM_ROWS,
    TILES,
    fail_launch_unless,
    load_team_rows,
    messages_in,
    receive_next_block_per_warp,
    release_per_warp,
    ring_in,
    room_after,
    room_begins_at,
    scores,
    team_of_thread,
    team_rows_index,
    wait_until_full_per_warp,
)
from regard.kernels.plan import Sizes, Work


@gluon.jit
def _by_bins(p, BINS: gl.constexpr):
    """Reshape the weights of a tile to [keys, groups of bins, turns, LANES, PAIR].

    The weights of a bin lie along turns and PAIR. With fewer bins than LANES, also along LANES.
    """
    A: gl.constexpr = BINS // LANES if BINS >= LANES else BINS
    return gl.reshape(p, [p.shape[0], A, p.shape[1] // (A * LANES * PAIR), LANES, PAIR])


@gluon.jit
def _mask_causal(parts, first, BINS: gl.constexpr, HIGH: gl.constexpr):
    """Set the weights of each key to 0 for queries before its index ``first`` in the tile."""
    A: gl.constexpr = parts.shape[1]
    T: gl.constexpr = parts.shape[2]
    layout: gl.constexpr = parts.type.layout
    group = gl.arange(0, A, axis_layout(layout, 5, 1))[None, :, None, None, None]
    turn = gl.arange(0, T, axis_layout(layout, 5, 2))[None, None, :, None, None]
    lane = gl.arange(0, LANES, axis_layout(layout, 5, 3))[None, None, None, :, None]
    place = gl.arange(0, PAIR, axis_layout(layout, 5, 4))[None, None, None, None, :]
    first = gl.convert_layout(first, axis_layout(layout, 5, 0))[:, None, None, None, None]
    # A thread then compares compile-time constants with a single number.
    if BINS >= LANES:
        fixed = group * (LANES * HIGH) + turn * PAIR + place
        own = first - lane * HIGH
    else:
        fixed = group * HIGH + turn * (LANES * PAIR) + place
        own = first - lane * PAIR
    return gl.where(fixed >= own, parts, 0.0)


@gluon.constexpr_function
def _exchange_layout(warps, rows, parts, lanes):
    """The layout [warps, 2, rows, parts, 2, lanes] in which a thread holds both rows of one part.

    Converting from two parts of one row to this layout swaps one number with the paired thread.
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
def _reduce_axis(x, axis: gl.constexpr, LARGEST: gl.constexpr):
    """The maximum (LARGEST) or the sum along an axis."""
    return gl.max(x, axis) if LARGEST else gl.sum(x, axis)


@gluon.jit
def _reduce_warp_rows(x, LARGEST: gl.constexpr):
    """Reduce [warps, rows, parts, lanes] over all rows of a warp to [warps, parts * lanes].

    While a thread holds several parts, it swaps half of them with another thread, then reduces.
    """
    WARPS: gl.constexpr = x.shape[0]
    R: gl.constexpr = x.shape[1] // 2
    P: gl.constexpr = x.shape[2] // 2
    N: gl.constexpr = x.shape[3]
    if R > 0 and P > 0:
        pairs = gl.reshape(x, [WARPS, 2, R, P, 2, N])
        pairs = gl.convert_layout(pairs, _exchange_layout(WARPS, R, P, N))
        half = gl.reshape(_reduce_axis(pairs, 1, LARGEST), [WARPS, R, P, 2 * N])
        reduced = _reduce_warp_rows(half, LARGEST)
    else:
        reduced = gl.reshape(_reduce_axis(x, 1, LARGEST), [WARPS, x.shape[2] * N])
    return reduced


@gluon.jit
def _store_cells(
    Cells, at, units, sums, per_query,
    UNIT: gl.constexpr, BINS: gl.constexpr, LARGEST: gl.constexpr, DONE: gl.constexpr,
):  # fmt: skip
    """Reduce a tile's sums over UNIT keys, and over lanes that share a bin; store them in the map.

    DONE: units are cells of the map, and sums times ``per_query`` are averages.
    """
    A: gl.constexpr = sums.shape[1]
    R: gl.constexpr = sums.shape[0]
    if BINS >= LANES:
        cells = gl.reshape(sums, [R // BAND, BAND // UNIT, UNIT // 8, 8, A, LANES])
        cells = gl.permute(_reduce_axis(cells, 2, LARGEST), (0, 2, 1, 3, 4))
        cells = gl.reshape(cells, [R // BAND, 8, BAND // UNIT * A, LANES])
        cells = _reduce_warp_rows(cells, LARGEST)
        cells = gl.reshape(cells, [R // UNIT, BINS])
    else:
        cells = gl.reshape(sums, [R // UNIT, UNIT, A, LANES])
        cells = _reduce_axis(_reduce_axis(cells, 1, LARGEST), 2, LARGEST)
    if DONE and not LARGEST:
        cells = cells * per_query
    unit = gl.arange(0, R // UNIT, gl.SliceLayout(1, cells.type.layout)) % (ROWS // UNIT)
    bin_at = gl.arange(0, BINS, gl.SliceLayout(0, cells.type.layout))
    gl.store(Cells + at + bin_at[None, :] * units + unit[:, None], cells)


@gluon.jit
def store_bins(
    pooled, largest, cells, at,
    UNIT: gl.constexpr, BINS: gl.constexpr, MAP: gl.constexpr, MAP_PEAK: gl.constexpr,
    DONE: gl.constexpr,
):  # fmt: skip
    """Store the sums of bins, [keys, groups of bins, LANES]."""
    Map, MapPeak, units, per_query = cells
    if MAP:
        _store_cells(Map, at, units, pooled, per_query, UNIT, BINS, False, DONE)
        if MAP_PEAK:
            _store_cells(MapPeak, at, units, largest, per_query, UNIT, BINS, True, DONE)


@gluon.jit
def accumulate_bins(pooled, largest, sums, peaks, here, next_bin, at, per_bin, units):
    """Add a tile or step to the sums of its bin, which are reset first if ``here == next_bin``.

    Also return the index at which the next bin begins, and the offset at which to store this bin.
    """
    fresh = here == next_bin
    pooled = gl.where(fresh, 0.0, pooled) + sums
    largest = gl.maximum(gl.where(fresh, 0.0, largest), peaks)
    return pooled, largest, next_bin + gl.where(fresh, per_bin, 0), at + gl.where(fresh, units, 0)


@gluon.jit
def store_zero_bins(Cells, at, units, R: gl.constexpr, UNIT: gl.constexpr, BINS: gl.constexpr):
    """Store zeros in the BINS bins of R keys."""
    layout: gl.constexpr = gl.BlockedLayout(  # each team stores the units of its own keys
        [1, 1], [ROWS // UNIT, 32 * UNIT // ROWS], [R // ROWS, 4], [1, 0]
    )
    unit = gl.arange(0, R // UNIT, gl.SliceLayout(1, layout)) % (ROWS // UNIT)
    bin_at = gl.arange(0, BINS, gl.SliceLayout(0, layout))
    nothing = gl.zeros([R // UNIT, BINS], gl.float32, layout)
    gl.store(Cells + (at + bin_at[None, :] * units + unit[:, None]), nothing)  # 32-bit offsets


@gluon.jit
def first_tile(block, sizes, CAUSAL: gl.constexpr, KEYS: gl.constexpr):
    """The first tile with queries that attend to any key of a block of KEYS keys."""
    if CAUSAL:
        return gl.maximum(block * KEYS - sizes.offset, 0) // BLOCK
    return 0


@gluon.jit
def _first_step(block, sizes, CAUSAL: gl.constexpr):
    return first_tile(block, sizes, CAUSAL, TEAMS * ROWS)


@gluon.jit
def _tile_range(program, number, block, work, sizes, CAUSAL: gl.constexpr, SPLIT: gl.constexpr):
    """The range of tiles of a block that a program takes; it never splits a bin of the map."""
    begin, end = _first_step(block, sizes, CAUSAL), sizes.tiles
    if SPLIT:
        first, last = steps_within(program, number - first_split_item(work), work)
        begin = (first + sizes.together - 1) // sizes.together * sizes.together
        stop = (last + sizes.together - 1) // sizes.together * sizes.together
        end = gl.minimum(stop, end)
    return begin, end


@gluon.jit
def _load_columns(
    loader, D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr, CAUSAL: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Run the loading warp: load blocks of keys, and tiles of queries."""
    (
        k_ring,
        messages,
        Counter,
        Done,
        q_ring,
        neg_lse_tiles,
        k_desc,
        q_desc,
        neg_lse,
        interleave,
        work,
        sizes,
    ) = loader
    BY_COPY: gl.constexpr = neg_lse_by_copy(D)
    place = ring_start()
    team_place = ring_start()
    number, after = first_numbers(work, SPLIT)
    early = gl.to_tensor(False)
    if Done is not None and BY_COPY:  # the forward pass may have stored neg_lse of the first item
        early = is_done(Done, item_at(number, work, CAUSAL, True, SPLIT)[0], sizes.tiles)
    while number < end_of(work, SPLIT):
        item = item_at(number, work, CAUSAL, True, SPLIT)
        for half in range(item[2]):
            flat, block = block_of(item, half, work)
            batch, head = flat // work.heads, flat % work.heads
            begin, end = _tile_range(gl.program_id(0), number, block, work, sizes, CAUSAL, SPLIT)
            if not SPLIT or begin < end:
                key = block * (TEAMS * ROWS)
                wait_until_empty(k_ring, team_place)
                send_next_block(messages, team_place, item, half, after, work, CAUSAL, True, SPLIT)
                load_team_rows(
                    k_ring, team_place, k_desc, batch, head // work.groups, key, half, D, CAUSAL
                )  # fmt: skip
                for i in range(begin, end):
                    _, full = wait_until_empty(q_ring, place)
                    mbarrier.expect(full, BLOCK * (D * 2 + (4 if BY_COPY else 0)))
                    for strip in gl.static_range(D // STRIP):
                        if BINS >= LANES:
                            outer = (
                                batch * interleave.batch
                                + head * interleave.head
                                + i * (BINS // LANES)
                            )
                            at = [outer, 0, 0, 0, head * interleave.inner + strip * STRIP]
                        else:
                            at = [batch, head, i * BLOCK, strip * STRIP]
                        tile = q_ring[0].index(place[0] * (D // STRIP) + strip)
                        tma.async_copy_global_to_shared(q_desc, at, full, tile)
                    if BY_COPY:
                        if not early:
                            wait_for_previous_launch()
                        at = [flat * sizes.tiles + i, 0]
                        tma.async_copy_global_to_shared(
                            neg_lse, at, full, neg_lse_tiles.index(place[0])
                        )
                    place = next_place(place, STAGES)
                team_place = next_place(team_place, 2)
        early = gl.to_tensor(False)
        number, after = after, next_number(after, Counter, work, SPLIT)


@gluon.jit
def weights_of(
    s, neg_lse, c, first, masked, BINS: gl.constexpr, HIGH: gl.constexpr, MASK: gl.constexpr
):  # fmt: skip
    """The weights of a tile or of half a tile, by bins of HIGH queries.

    If MASK and ``masked``, the weights of queries before a key's ``first`` are 0.
    """
    parts = _by_bins(gl.exp2(s * c + neg_lse), BINS)
    if MASK:
        if masked:
            parts = _mask_causal(parts, first, BINS, HIGH)
    return parts


@gluon.jit
def sums_of(parts, PEAK: gl.constexpr):
    """The sum and maximum of each key's weights in a tile, [keys, groups of bins, LANES] each."""
    sums = gl.sum(gl.sum(parts, 4), 2)
    peaks = sums
    if PEAK:
        # Non-negative floats compare like integers, and the hardware takes the maximum of three
        # integers at once if they are consecutive.
        A: gl.constexpr = parts.shape[1]
        T: gl.constexpr = parts.shape[2]
        row = gl.reshape(gl.permute(parts, (0, 1, 3, 2, 4)), [parts.shape[0], A, LANES, T * PAIR])
        peaks = gl.max(row.to(gl.int32, bitcast=True), 3).to(gl.float32, bitcast=True)
        peaks = gl.convert_layout(peaks, sums.type.layout)
    return sums, peaks


@gluon.constexpr_function
def _by_fours_layout(count, warps):
    """The layout of one number per query: a lane holds four of each sixteen; rows hold the same."""
    more = [[bit] for bit in (16, 32, 64) if bit < count]
    return gl.DistributedLinearLayout(
        [[1], [2], *more], [[4], [8], [0], [0], [0]], [[0]] * (warps.bit_length() - 1), [], [count]
    )


@gluon.jit
def load_by_fours(rows, place, COUNT: gl.constexpr, layout: gl.constexpr):
    """Load the numbers, in ``by_fours`` order, that were copied with COUNT queries."""
    numbers = (
        rows.index(place[0]).reshape([COUNT]).load(_by_fours_layout(COUNT, layout.warps_per_cta[0]))
    )
    numbers = gl.reshape(numbers, [COUNT // (LANES * 2 * PAIR), LANES, 2, PAIR])
    numbers = gl.reshape(gl.permute(numbers, (0, 2, 1, 3)), [COUNT])
    return gl.convert_layout(numbers, gl.SliceLayout(0, layout))


@gluon.jit
def _partial_pointer(Partials, program, begins):
    """The pointer to a program's partial sums of the weights that a block of keys receives."""
    return Partials + partial_slot(program, begins) * (TEAMS * ROWS)


@gluon.jit
def _halves(tile):
    """Split a tile into the first and last half of its queries, which have different bins."""
    halves = gl.reshape(tile, [tile.shape[0], 2, tile.shape[1] // 2])
    return gl.split(gl.permute(halves, (0, 2, 1)))


@gluon.jit
def _join_halves(near, far, layout: gl.constexpr):
    """Join the sums of bins of the two halves of a tile."""
    bins = gl.permute(gl.join(near, far), (0, 3, 1, 2))
    bins = gl.reshape(bins, [near.shape[0], 2 * near.shape[1], near.shape[2]])
    return gl.convert_layout(bins, layout)


@gluon.jit
def _sums_on_diagonal(
    s, neg_lse, c, first, later, layout: gl.constexpr, BINS: gl.constexpr, PEAK: gl.constexpr
):  # fmt: skip
    """``sums_of`` a tile on the diagonal, for its first 64 keys or, if ``later``, its last 64.

    The first half of the queries attends to none of the last 64 keys.
    """
    HIGH: gl.constexpr = BLOCK // BINS
    near, far = _halves(s * c + neg_lse)
    far = _mask_causal(_by_bins(gl.exp2(far), BINS // 2), first - BLOCK // 2, BINS // 2, HIGH)
    sums, peaks = sums_of(far, PEAK)
    early, early_peaks = gl.full_like(sums, 0.0), gl.full_like(peaks, 0.0)
    if later == 0:
        parts = _mask_causal(_by_bins(gl.exp2(near), BINS // 2), first, BINS // 2, HIGH)
        early, early_peaks = sums_of(parts, PEAK)
    return _join_halves(early, sums, layout), _join_halves(early_peaks, peaks, layout)


@gluon.jit
def _sum_block(
    shared, flat, block, part, begin, end, place, team_place, team,
    D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr,
    UNIT: gl.constexpr, LONG: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    DIAGONAL: gl.constexpr, RECEIVED: gl.constexpr, MAP: gl.constexpr, MAP_PEAK: gl.constexpr,
    DONE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Sum the weights of 64 keys over the queries in the tiles ``begin`` to ``end``."""
    (
        k_ring,
        messages_at,
        q_ring,
        neg_lse_tiles,
        Received,
        Partials,
        Map,
        MapPeak,
        _,
        _,
        sizes,
        c,
        _,
    ) = shared
    BY_COPY: gl.constexpr = neg_lse_by_copy(D)
    tiles, per_bin, bins = sizes.tiles, sizes.per_bin, sizes.bins
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [TEAM_ROWS // BAND, 1], [16, BLOCK, 16]
    )
    first = block * (TEAMS * ROWS) + part * ROWS
    key_at = first + gl.arange(0, TEAM_ROWS, gl.SliceLayout(1, layout)) % ROWS - sizes.offset
    units = sizes.units
    cell = multiply_wide(flat * bins, units) + block * (TEAMS * ROWS // UNIT)
    cell += part * (ROWS // UNIT)
    # No query before tile ``start`` attends to these keys; from tile ``free``, all queries do.
    start, free = begin, 0
    if CAUSAL:
        start = gl.maximum(gl.maximum(first - sizes.offset, 0) // BLOCK, begin)
        start = gl.minimum(start, end - 1)
        free = gl.maximum(first + ROWS - 1 - sizes.offset + BLOCK - 1, 0) // BLOCK
    begins = begin == _first_step(block, sizes, CAUSAL)
    if MAP and DONE and CAUSAL:
        unseen, row = gl.where(begins, 0, begin), start
        if LONG:
            unseen, row = unseen // per_bin, row // per_bin
        for i in range(unseen, row):
            store_zero_bins(Map + cell, i * BINS * units, units, TEAM_ROWS, UNIT, BINS)
            if MAP_PEAK:
                store_zero_bins(MapPeak + cell, i * BINS * units, units, TEAM_ROWS, UNIT, BINS)
    per_query = BINS / BLOCK
    if LONG:
        per_query = BINS / (per_bin * BLOCK)
    cells = Map, MapPeak, units, per_query
    if not BY_COPY:
        neg_lse_at = neg_lse_tiles + (flat * tiles).to(gl.int64) * BLOCK
        neg_lse_at += gl.arange(0, BLOCK, gl.SliceLayout(0, layout))
        neg_lse = gl.load(neg_lse_at + start * BLOCK)
    mine = team_rows_index(team)
    wait_until_full_per_warp(k_ring, team_place)
    for _ in range(begin, start):
        wait_until_full_per_warp(q_ring, place)
        release_per_warp(q_ring, place)
        place = next_place(place, STAGES)
    # The first tile is separate: if EVEN, no other tile is masked.
    wait_until_full_per_warp(q_ring, place)
    s = scores(k_ring, team_place, q_ring, place, mine, 2, D)
    if BY_COPY:
        neg_lse = load_by_fours(neg_lse_tiles, place, BLOCK, layout)
    s = hopper.warpgroup_mma_wait(0, deps=[s])
    HIGH: gl.constexpr = BLOCK // BINS
    here = key_at - start * BLOCK
    of_bins: gl.constexpr = sums_of(_by_bins(s, BINS), False)[0].type.layout
    if DIAGONAL:
        pooled, largest = _sums_on_diagonal(
            s, neg_lse[None, :], c, here, team % 2, of_bins, BINS, MAP_PEAK
        )
    else:
        parts = weights_of(s, neg_lse[None, :], c, here, True, BINS, HIGH, CAUSAL)
        pooled, largest = sums_of(parts, MAP_PEAK)
    map_row = start // per_bin if LONG else start * BINS
    next_bin = (map_row + 1) * per_bin
    at = cell + map_row * units
    store_bins(pooled, largest, cells, at, UNIT, BINS, MAP, MAP_PEAK, DONE)
    received = gl.sum(pooled, 1)  # [keys, LANES]
    for tile in range(start + 1, end):
        if not BY_COPY:
            neg_lse = gl.load(neg_lse_at + tile * BLOCK)
        # Release the previous tile only here, after its neg_lse has been read. neg_lse is loaded
        # before the wait for the product, so that the load overlaps with it.
        release_per_warp(q_ring, place)
        place = next_place(place, STAGES)
        wait_until_full_per_warp(q_ring, place)
        s = scores(k_ring, team_place, q_ring, place, mine, 2, D)
        if BY_COPY:
            neg_lse = load_by_fours(neg_lse_tiles, place, BLOCK, layout)
        s = hopper.warpgroup_mma_wait(0, deps=[s])
        parts = weights_of(
            s, neg_lse[None, :], c, key_at - tile * BLOCK, tile < free, BINS, HIGH,
            CAUSAL and not EVEN,
        )  # fmt: skip
        sums, peaks = sums_of(parts, MAP_PEAK)
        if LONG:  # storing after each tile of a bin is faster than a branch at the end of the bin
            pooled, largest, next_bin, at = accumulate_bins(
                pooled, largest, sums, peaks, tile, next_bin, at, per_bin, units
            )
        else:
            pooled, largest, at = sums, peaks, cell + tile * BINS * units
        store_bins(pooled, largest, cells, at, UNIT, BINS, MAP, MAP_PEAK, DONE)
        received += gl.sum(sums, 1)
    release_per_warp(q_ring, place)
    message = receive_next_block_per_warp(messages_at, team_place)
    release_per_warp(k_ring, team_place)
    if RECEIVED:
        received = gl.sum(received, 1)
        at = first + gl.arange(0, TEAM_ROWS, received.type.layout) % ROWS
        if not SPLIT or (begins & (end == tiles)):
            gl.store(
                Received + multiply_wide(flat, sizes.keys) + at, received, mask=at < sizes.keys
            )
        else:
            kept = _partial_pointer(Partials, gl.program_id(0), begins)
            gl.store(kept + (at - block * (TEAMS * ROWS)), received)
    return next_place(place, STAGES), message


@gluon.jit
def _sum_columns(
    shared,
    D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr,
    UNIT: gl.constexpr, LONG: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    DIAGONAL: gl.constexpr, RECEIVED: gl.constexpr, MAP: gl.constexpr, MAP_PEAK: gl.constexpr,
    DONE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Run all teams: each sums its 64 keys of every block over all queries."""
    Done, work, sizes, _c, message = shared[8:]
    team = team_of_thread()
    place = ring_start()
    team_place = ring_start()
    number, _ = first_numbers(work, SPLIT)
    BY_COPY: gl.constexpr = neg_lse_by_copy(D)
    if Done is None:
        wait_for_previous_launch()
    elif not BY_COPY:  # if BY_COPY, the loading warp waits for neg_lse instead
        if not is_done(Done, message[0], sizes.tiles):
            wait_for_previous_launch()
    while message[0] >= 0:
        flat, block, half = unpack_message(message)
        part = team_part(half, team, CAUSAL)
        begin, end = _tile_range(gl.program_id(0), number, block, work, sizes, CAUSAL, SPLIT)
        if not SPLIT or begin < end:
            place, message = _sum_block(
                shared, flat, block, part, begin, end, place, team_place, team, D, STAGES,
                BINS, UNIT, LONG, CAUSAL, EVEN, DIAGONAL, RECEIVED, MAP, MAP_PEAK, DONE, SPLIT,
            )  # fmt: skip
            team_place = next_place(team_place, 2)
        if Done is not None and not BY_COPY:  # only the first block may start early
            wait_for_previous_launch()
        number += 1
        if SPLIT:  # an empty part of a block sends no message, so compute the next one here
            message = message_of(number, work, CAUSAL, True, SPLIT)


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *Sizes._fields])
def columns(
    q_desc, k_desc, neg_lse, interleave, Received, Partials, Map, MapPeak, Counter,
    Done, items, blocks, heads, groups, programs, single_items, steps, share,
    keys, offset, tiles, per_bin, bins, together, units, c,
    D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr, UNIT: gl.constexpr,
    LONG: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr, DIAGONAL: gl.constexpr,
    RECEIVED: gl.constexpr, MAP: gl.constexpr, MAP_PEAK: gl.constexpr, DONE: gl.constexpr,
    SPLIT: gl.constexpr,
):  # fmt: skip
    """Compute sums over queries; the formulas are in triton/columns.py.

    ``neg_lse`` is -lse to base 2 in the order of a tile's queries, and -inf for padding, whose
    weights are then 0. It is a descriptor if ``neg_lse_by_copy``, else a pointer. SPLIT: programs
    store their parts of split items in ``Partials``, for ``add``. DIAGONAL: each block's first tile
    is on the diagonal of a causal mask, and the halves of a tile have different bins. (Blocks past
    the last key begin elsewhere; their sums are never read.) Maps have units, which are sums over
    UNIT keys. DONE: units are the cells, so averages are stored, and 0 where no query attends.
    """
    work = Work(items, blocks, heads, groups, programs, single_items, steps, share)
    sizes = Sizes(keys, offset, tiles, per_bin, bins, together, units)
    STRIPS: gl.constexpr = D // STRIP
    BY_COPY: gl.constexpr = neg_lse_by_copy(D)
    BEFORE: gl.constexpr = (2 * TEAMS * ROWS + STAGES * BLOCK) * D * 2  # bytes of both rings
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    room = gl.allocate_shared_memory(gl.int32, [LINES, 32], plain)
    begin = room_after(BEFORE + (STAGES * BLOCK * 4 if BY_COPY else 0))
    k_ring = ring_in(room, begin, k_desc, 2 * STRIPS * TEAMS, 2, OWN_ROWS)
    q_ring = ring_in(room, begin, q_desc, STAGES * STRIPS, STAGES, TILES)
    messages, messages_at = messages_in(room, begin)
    neg_lse_tiles = neg_lse
    if BY_COPY:
        neg_lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK], neg_lse.layout)
    fail_launch_unless(room_begins_at(room, begin))
    hopper.fence_async_shared()
    message = first_message(work, CAUSAL, True, SPLIT)
    shared = (
        k_ring, messages_at, q_ring, neg_lse_tiles, Received, Partials, Map, MapPeak, Done, work,
        sizes, c, message,
    )  # fmt: skip
    loader = (
        k_ring,
        messages,
        Counter,
        Done,
        q_ring,
        neg_lse_tiles,
        k_desc,
        q_desc,
        neg_lse,
        interleave,
        work,
        sizes,
    )
    gl.warp_specialize(
        [
            (_sum_columns, (
                shared, D, STAGES, BINS, UNIT, LONG, CAUSAL, EVEN, DIAGONAL, RECEIVED, MAP,
                MAP_PEAK, DONE, SPLIT,
            )),
            (_load_columns, (loader, D, STAGES, BINS, CAUSAL, SPLIT)),
        ],
        [1], [24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *Sizes._fields])
def add(
    Received, Partials,
    items, blocks, heads, groups, programs, single_items, steps, share,
    keys, offset, tiles, per_bin, bins, together, units,
):  # fmt: skip
    """Add the partial sums of several programs: the weights that a block of keys receives."""
    work = Work(items, blocks, heads, groups, programs, single_items, steps, share)
    sizes = Sizes(keys, offset, tiles, per_bin, bins, together, units)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    number = gl.program_id(0)
    flat, block, _ = item_at(first_split_item(work) + number, work, False, True, True)
    start = number * work.steps
    at = gl.arange(0, TEAMS * ROWS, layout)
    received = gl.zeros([TEAMS * ROWS], gl.float32, layout)
    parts = 0
    for program in range(start // work.share, (start + work.steps - 1) // work.share + 1):
        begin, end = _tile_range(
            program, first_split_item(work) + number, block, work, sizes, False, True
        )
        if (begin < end) & (end - begin < sizes.tiles):
            received += gl.load(_partial_pointer(Partials, program, begin == 0) + at)
            parts += 1
    if parts > 0:
        key = block * (TEAMS * ROWS) + at
        place = multiply_wide(flat, sizes.keys) + key
        gl.store(Received + place, received, mask=key < sizes.keys)
