# mypy: ignore-errors
# ruff: noqa: E741
"""The forward pass for Hopper: output, lse and fields of each query; formulas in triton/forward.py.

Two warpgroups have 64 queries each. While a group computes the weights of a tile, the tensor cores
compute the scores of the next tile and the output of the previous tile.

In: query, key, value [batch, heads, length, D], with D 64 or 128. Out: output, lse, the requested
fields and, for later passes, ``Threshold`` and ``NegLse``. Weights of masked pairs are exactly 0,
and every query attends to at least one key. Called by ``launch.forward``.

Test: ``pytest tests/kernels/test_hopper.py -k forward_is_the_definition``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from regard.kernels import sizes
from regard.kernels.hopper.pipeline import (
    BAND,
    BLOCK,
    LANES,
    LN2,
    LOWEST,
    NOT_SPECIALIZED,
    NOTHING,
    PAIR,
    ROWS,
    allocate_messages,
    axis_layout,
    block_of,
    by_fours,
    by_lanes,
    count_done_block,
    end_of,
    first_message,
    first_numbers,
    first_split_item,
    item_at,
    key_offsets,
    may_attend,
    multiply_wide,
    neg_lse_by_copy,
    next_number,
    next_place,
    partial_slot,
    receive_next_block,
    release,
    ring_of,
    ring_start,
    scheduling_barrier,
    send_next_block,
    split_lane_halves,
    steps_within,
    unpack_message,
    wait_for_previous_launch,
    wait_until_empty,
    wait_until_full,
)
from regard.kernels.hopper.sorting import eighth_highest
from regard.kernels.plan import Work

GROUPS = gl.constexpr(2)  # warpgroups, with ROWS queries each
SETS = gl.constexpr(sizes.SETS)  # sets of a lane's scores, whose maxima are kept
JOINED = gl.constexpr(sizes.JOINED)  # programs that can share a block
# How far a score, base 2, may exceed the reference score that weights are relative to.
SLACK = gl.constexpr(8.0)


@gluon.jit
def _set_maxima(s, SETS: gl.constexpr):
    """The highest score of each set of a lane; consecutive scores are in different sets."""
    return gl.max(gl.reshape(s, [ROWS, LANES, s.shape[2] // SETS, SETS]), 2)


@gluon.jit
def _tiles(block, keys, offset, CAUSAL: gl.constexpr):
    """The number of tiles of keys that a block of queries attends to."""
    if CAUSAL:
        keys = gl.minimum(keys, (block + 1) * BLOCK + offset)
    return (keys + BLOCK - 1) // BLOCK


@gluon.jit
def _steps(number, block, work, keys, offset, CAUSAL: gl.constexpr, SPLIT: gl.constexpr):
    """The range of tiles of a block that a program takes, and the number of the block's tiles."""
    stop = _tiles(block, keys, offset, CAUSAL)
    first, last = 0, stop
    if SPLIT:
        first, last = steps_within(gl.program_id(0), number - first_split_item(work), work)
    return first, last, stop


@gluon.jit
def _tile_at(i, stop, row, offset, FROM_DIAGONAL: gl.constexpr):
    """The first key of the i-th tile, counted down from the last or up from the diagonal."""
    if FROM_DIAGONAL:
        tile = (row + offset) // BLOCK + i
        return gl.where(tile < stop, tile, tile - stop) * BLOCK
    return (stop - 1 - i) * BLOCK


@gluon.jit
def _load_pair(ring, values, place, k_desc, v_desc, k_at, v_at, D: gl.constexpr):
    """Load a tile of keys and a tile of values once their ring slot is empty."""
    keys, full = wait_until_empty(ring, place)
    mbarrier.expect(full, 2 * BLOCK * D * 2)
    tma.async_copy_global_to_shared(k_desc, [k_at[0], k_at[1], k_at[2], 0], full, keys)
    values = values.index(place[0])
    tma.async_copy_global_to_shared(v_desc, [v_at[0], v_at[1], v_at[2], 0], full, values)


@gluon.jit
def _load(
    loader, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    FROM_DIAGONAL: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Run the loading warp: load each tile of keys with the values of the previous tile.

    Both are needed at the same time. The first values and the last keys are not used.
    """
    q_ring, messages, counts, ring, values, q_desc, k_desc, v_desc, work, keys, offset = loader
    Counter, Done, begin, end = counts
    place = ring_start()
    q_place = ring_start()
    before = gl.to_tensor(0), gl.to_tensor(0), gl.to_tensor(0)
    third, second, latest = gl.to_tensor(-1), gl.to_tensor(-1), gl.to_tensor(-1)
    tiles = 0
    number, after = first_numbers(work, SPLIT)
    while number < end_of(work, SPLIT):
        item = item_at(number, work, CAUSAL, False, SPLIT)
        for half in range(item[2]):
            flat, block = block_of(item, half, work)
            batch, head = flat // work.heads, flat % work.heads
            row = block * BLOCK
            first, last, stop = _steps(number, block, work, keys, offset, CAUSAL, SPLIT)
            rows, full = wait_until_empty(q_ring, q_place)
            send_next_block(messages, q_place, item, half, after, work, CAUSAL, False, SPLIT)
            mbarrier.expect(full, BLOCK * D * 2)
            tma.async_copy_global_to_shared(q_desc, [batch, head, row, 0], full, rows)
            q_place = next_place(q_place, 2)
            if Done is not None:  # the slot is empty, so the third block before is stored
                count_done_block(Done, third, begin, end)
                third, second, latest = second, latest, flat
            for i in range(first, last):
                at = batch, head // work.groups, _tile_at(i, stop, row, offset, FROM_DIAGONAL)
                _load_pair(ring, values, place, k_desc, v_desc, at, before, D)
                place = next_place(place, STAGES)
                before = at
                tiles += 1
        number, after = after, next_number(after, Counter, work, SPLIT)
    if tiles > 0:
        _load_pair(ring, values, place, k_desc, v_desc, before, before, D)


@gluon.jit
def _from_lanes(parts):
    """The inverse of ``by_lanes``."""
    N: gl.constexpr = parts.shape[2]
    tile = gl.reshape(parts, [ROWS, LANES, N // PAIR, PAIR])
    return gl.reshape(gl.permute(tile, (0, 2, 1, 3)), [ROWS, LANES * N])


@gluon.constexpr_function
def _summands(D, CAUSAL, DISTANCE, THRESHOLD):
    """The fastest numbers of partial sums, measured, for weights, entropy and distance."""
    if D == 128:
        if THRESHOLD:
            return (2, 1, 2) if CAUSAL else (4, 4, 1)
        if DISTANCE:
            return (4, 2, 1)
        return (2, 4, 1) if CAUSAL else (2, 1, 1)
    if THRESHOLD:
        return (2, 1, 1) if CAUSAL else (2, 1, 2)
    if DISTANCE:
        return (1, 2, 2) if CAUSAL else (1, 2, 1)
    return (1, 1, 1) if CAUSAL else (1, 4, 1)


@gluon.jit
def _sum(x, SUMMANDS: gl.constexpr, of_lanes: gl.constexpr):
    """The sum of a lane, from SUMMANDS independent partial sums."""
    if SUMMANDS == 1:
        sums = gl.sum(x, 2)
    else:
        sums = gl.sum(gl.sum(gl.reshape(x, [ROWS, LANES, SUMMANDS, x.shape[2] // SUMMANDS]), 3), 2)
    return gl.convert_layout(sums, of_lanes)


@gluon.jit
def _followed_by_zeros(p, s):
    """Pad the weights ``p`` of the first half of the keys with zeros to the shape of ``s``."""
    halves = gl.permute(gl.join(p, gl.full_like(p, 0.0)), (0, 1, 3, 2))
    return gl.convert_layout(gl.reshape(halves, s.shape), s.type.layout)


@gluon.constexpr_function
def _rescales_lazily(D):
    """Whether to rescale the accumulated output only where the maximum rose by more than SLACK.

    At a width of 64 the 32 multiplications are free, but a branch around them is not.
    """
    return D == 128


@gluon.constexpr_function
def _multiply_if_ptx(count):
    """PTX: multiply ``count`` numbers by ``count`` factors if the flag of the warp is set."""
    lines = [f"setp.ne.u32 p, ${3 * count}, 0;"]
    lines += [f"mov.f32 ${i}, ${count + i};" for i in range(count)]
    lines += ["@!p bra DONE;"]
    lines += [f"mul.f32 ${i}, ${i}, ${2 * count + i};" for i in range(count)]
    return "{ .reg .pred p; " + " ".join(lines) + " DONE: }"


@gluon.constexpr_function
def _multiply_if_constraints(count):
    """The constraints of ``_multiply_if_ptx``: results, numbers, factors and flags."""
    return ",".join(["=f"] * count + ["f"] * (2 * count) + ["r"] * count)


@gluon.jit
def _rescaled(o, rescale, LAZY: gl.constexpr):
    """Rescale the accumulated output to the new reference score.

    LAZY: skip the multiplications where all factors of a warp are 1.
    """
    of_rows: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    if LAZY:
        N: gl.constexpr = o.shape[1] // 2  # numbers of a thread, which holds two rows
        some = gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.neu.f32 p, $2, 0f3F800000; setp.neu.or.f32 p, $3, 0f3F800000, p; "
            "vote.sync.any.pred p, p, 0xffffffff; selp.u32 $0, 1, 0, p; selp.u32 $1, 1, 0, p; }",
            "=r,=r,f,f", [rescale], gl.int32, is_pure=True, pack=2,
        )  # fmt: skip
        by, some = gl.convert_layout(rescale, of_rows), gl.convert_layout(some, of_rows)
        rescaled = gl.inline_asm_elementwise(
            _multiply_if_ptx(N), _multiply_if_constraints(N), [o, by[:, None], some[:, None]],
            gl.float32, is_pure=True, pack=N,
        )  # fmt: skip
    else:
        rescaled = o * gl.convert_layout(rescale, of_rows)[:, None]
    return rescaled


@gluon.jit
def _weigh_tile(
    s, l, m, top, e, t, h, c, query_at, key, keys,
    D: gl.constexpr, CAUSAL: gl.constexpr, MASKED: gl.constexpr, SEEN: gl.constexpr,
    FREE: gl.constexpr, ENTROPY: gl.constexpr, DISTANCE: gl.constexpr, THRESHOLD: gl.constexpr,
):  # fmt: skip
    """Compute the weights of a tile and update the running sums; see triton/forward.py.

    MASKED: some pairs may be masked, but not those of the first SEEN keys. FREE: no pair is masked,
    and all keys lie on one side of all queries. ``s`` may have fewer keys than a tile. ``m`` is the
    reference score. If rescaling is lazy, ``top`` is the highest score of unmasked tiles, which may
    exceed ``m``.
    """
    SUMMANDS: gl.constexpr = _summands(D, CAUSAL, DISTANCE, THRESHOLD)
    LAZY: gl.constexpr = _rescales_lazily(D)
    of_rows: gl.constexpr = axis_layout(s.type.layout, 3, 0)
    fixed, lane = key_offsets(s)
    if MASKED:
        seen = may_attend(s, gl.convert_layout(query_at, of_rows), key, keys, CAUSAL)
        if SEEN > 0:
            seen = seen | (fixed < SEEN)
        s = gl.where(seen, s * c, NOTHING)
        if THRESHOLD:  # rounding may make the maxima slightly too low; c is not negative
            high = _set_maxima(s, h.shape[2])
            h = gl.maximum(h, gl.convert_layout(high, h.type.layout) * _inverse(c))
            highest = gl.max(gl.max(high, 2), 1)
        else:
            highest = gl.max(gl.max(s, 2), 1)
        highest = gl.convert_layout(highest, m.type.layout)
    else:
        high = _set_maxima(s, h.shape[2])
        if THRESHOLD:
            h = gl.maximum(h, high)
        highest = gl.convert_layout(gl.max(gl.max(high, 2), 1), m.type.layout)
        if LAZY:
            top = gl.maximum(top, highest)
        highest = highest * c
    if LAZY and not MASKED:  # raise the reference score only if a score exceeds it by SLACK
        higher = gl.where(highest > m + SLACK, highest, m)
    else:
        higher = gl.maximum(m, highest)
    if MASKED:
        x = s - gl.convert_layout(higher, of_rows)[:, None, None]
    else:
        x = s * c - higher[:, None, None]
    p = gl.exp2(x)
    rescale = gl.exp2(m - higher)
    smaller = rescale[:, None]
    # Each lane keeps separate sums until all tiles are done.
    of_lanes: gl.constexpr = l.type.layout
    whole = _sum(p, SUMMANDS[0], of_lanes)
    if ENTROPY:
        e = (e + (m - higher)[:, None] * l) * smaller + _sum(p * x, SUMMANDS[1], of_lanes)
    if DISTANCE:
        if FREE or CAUSAL:  # all unmasked keys lie on one side of each query
            inside = _sum(p * fixed.to(gl.float32), SUMMANDS[2], of_lanes)
            own = gl.arange(0, LANES, gl.SliceLayout(0, of_lanes)) * PAIR
            away = (query_at - key)[:, None] - own[None, :]
            t = t * smaller + gl.abs(away.to(gl.float32) * whole - inside)
        else:
            ahead = query_at[:, None, None] - key - lane
            apart = gl.abs(ahead.to(gl.float32) - fixed.to(gl.float32))
            t = t * smaller + gl.sum(p * apart, 2)
    l = l * smaller + whole
    return p, l, higher, top, e, t, h, rescale


@gluon.jit
def _top_threshold(h, near, WARPS: gl.constexpr = 4):
    """The threshold of the top keys: slightly below the eighth highest of the sets' maxima.

    The margin covers products that differ in their last bit. The result is NaN if the threshold is
    infinite.
    """
    threshold = eighth_highest(h, near, WARPS)
    lower = threshold - gl.abs(threshold) * 1e-6
    return gl.where(lower < LOWEST, LOWEST, lower)


@gluon.jit
def _inverse(x):
    """1 / x for x far from 0 and infinity, in one instruction; a division takes eight."""
    return gl.inline_asm_elementwise(
        "{ rcp.approx.ftz.f32 $0, $1; }", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _log2(x):
    """log2(x) for x >= 1, with an error of 2e-7 up to x = 2, and of 1 or 2 ulp above."""
    return gl.inline_asm_elementwise(
        "{ lg2.approx.ftz.f32 $0, $1; }", "=f,f", [x], gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _store_rows(
    l, m, above, e, t, threshold, seen, flat, block, part, queries, bits,
    D: gl.constexpr, ENTROPY: gl.constexpr, PEAK: gl.constexpr, HIGHEST: gl.constexpr,
    DISTANCE: gl.constexpr, THRESHOLD: gl.constexpr, NEG_LSE: gl.constexpr,
):  # fmt: skip
    """Store the fields of 64 rows, one part of a block, after all tiles.

    ``above`` is the highest score minus the reference score; it is 0 unless rescaling is lazy.
    """
    Lse, Entropy, Peak, Highest, Distance, Threshold, NegLse = seen
    here = part * ROWS + gl.arange(0, ROWS, m.type.layout)
    inside = here < queries - block * BLOCK
    at = multiply_wide(flat, queries) + block * BLOCK + here
    # Every query attends to at least one key, so l is at least 1.
    inverse = _inverse(l)
    length = _log2(l)
    gl.store(Lse + at, (m + length) * LN2, mask=inside)
    if ENTROPY:
        gl.store(Entropy + at, (length - e * inverse) * LN2, mask=inside)
    if PEAK:
        peak = inverse * gl.exp2(above) if _rescales_lazily(D) else inverse
        gl.store(Peak + at, peak, mask=inside)
    if DISTANCE:
        gl.store(Distance + at, t * inverse, mask=inside)
    if THRESHOLD:
        of_rows: gl.constexpr = gl.SliceLayout(1, threshold.type.layout)
        lane = gl.arange(0, LANES, gl.SliceLayout(0, threshold.type.layout))[None, :]
        its_at = gl.convert_layout(at, of_rows)[:, None] + lane
        mask = gl.convert_layout(inside, of_rows)[:, None] & (lane == 0)
        gl.store(Threshold + its_at, threshold, mask=mask)
    block_at = flat * ((queries + BLOCK - 1) // BLOCK) + block
    if NEG_LSE:  # stored in the order in which a tile of the columns pass holds its queries
        # Each eight places hold one pair of queries for each lane, which has a bin of queries.
        in_bin = here & (1 << bits) - 1
        place = (here >> bits + 2 << bits + 2) + in_bin // PAIR * (LANES * PAIR)
        place += (here >> bits & LANES - 1) * PAIR + here % PAIR
        if neg_lse_by_copy(D):
            place = by_fours(place)
        neg_lse = gl.where(inside, 0.0 - (m + length), float("-inf"))
        gl.store(NegLse + block_at.to(gl.int64) * BLOCK + place, neg_lse)
    if HIGHEST:  # one maximum per warp: a maximum over more rows would need a barrier
        BANDS: gl.constexpr = ROWS // BAND
        highest = (m + above if _rescales_lazily(D) else m) * LN2
        highest = gl.where(inside, highest, float("-inf"))
        highest = gl.max(gl.reshape(highest, [BANDS, BAND]), 1)
        its_head = flat + gl.arange(0, BANDS, highest.type.layout) * 0
        gl.atomic_max(Highest + its_head, highest, sem="relaxed")


@gluon.jit
def _rounded(l, above, dtype: gl.constexpr, D: gl.constexpr):
    """The sum of weights, with the largest weight rounded to ``dtype`` as in the output.

    If one weight dominates, its rounding error then cancels in the normalized output.
    """
    if _rescales_lazily(D):
        largest = gl.exp2(above)
        l += largest.to(dtype).to(gl.float32) - largest
    return l


@gluon.jit
def _store_by_copy(tile, desc, flat, row, o):
    """Store the output of 64 rows with the copy engine."""
    tma.store_wait(0)  # until the previous block, which has used this memory, is stored
    tile.reshape([o.shape[0], o.shape[1]]).store(o.to(desc.dtype))
    hopper.fence_async_shared()
    tma.async_copy_shared_to_global(desc, [flat, row, 0], tile)


@gluon.jit
def _write(Out, flat, row, o, queries, WARPS: gl.constexpr):
    """Store the output of 64 rows."""
    D: gl.constexpr = o.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    o = gl.convert_layout(o.to(Out.dtype.element_ty), layout)
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))[None, :]
    first = Out + (multiply_wide(flat, queries) + row) * D
    gl.store(first + (rows * D + dims), o, mask=rows < queries - row)


@gluon.constexpr_function
def _partial_size(D):
    """The size of a row's partial result: the output, five numbers, and the maxima of the sets."""
    return D + 5 + LANES * SETS


@gluon.jit
def _partial_pointer(Partials, program, first, part, D: gl.constexpr):
    """The pointer to a program's partial result of a block, whose first tile is ``first``."""
    slot = partial_slot(program, first == 0)
    return Partials + (slot * BLOCK + part * ROWS).to(gl.int64) * _partial_size(D)


@gluon.jit
def _attend_block(
    shared, flat, block, first, last, stop, place, q_place,
    PART: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, FROM_DIAGONAL: gl.constexpr, EVEN: gl.constexpr, ENTROPY: gl.constexpr,
    PEAK: gl.constexpr, HIGHEST: gl.constexpr, DISTANCE: gl.constexpr, THRESHOLD: gl.constexpr,
    NEG_LSE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Attend to the tiles ``first`` to ``last`` of the ``stop`` tiles of a block.

    ``place`` is the place in the ring of the keys of tile ``first``. The values of the last tile
    share a place with the next block's keys, so this place is returned, and not released here.
    """
    q_ring, messages, ring, values, outs, out_desc, seen, Partials, _work, sizes = shared
    queries, keys, offset, bits, c = sizes
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    dtype: gl.constexpr = out_desc.dtype
    none = gl.zeros([ROWS, BLOCK], gl.float32, s_layout)
    of_rows: gl.constexpr = axis_layout(by_lanes(none).type.layout, 3, 0)
    of_lanes: gl.constexpr = gl.SliceLayout(2, by_lanes(none).type.layout)
    # Without a threshold only the overall maximum is needed; 512 // D sets are fastest.
    MAXIMA: gl.constexpr = SETS if THRESHOLD else 512 // D
    of_maxima: gl.constexpr = _set_maxima(by_lanes(none), MAXIMA).type.layout
    row = block * BLOCK
    rows = row + PART * ROWS + gl.arange(0, ROWS, of_rows)
    query_at = rows + offset
    # The end of the tiles with masked pairs, or with keys on both sides of a query.
    masked_end = first + 1
    if CAUSAL and not EVEN:
        masked_end = gl.maximum(stop - (row + PART * ROWS + offset + 1) // BLOCK, masked_end)
    elif FROM_DIAGONAL and not EVEN:
        masked_end = gl.maximum(1 + ((row + offset) % BLOCK != 0).to(gl.int32), masked_end)
    masked_end = gl.minimum(masked_end, last)
    o = gl.zeros([ROWS, D], gl.float32, o_layout)
    l = gl.zeros([ROWS, LANES], gl.float32, of_lanes)
    e = gl.zeros([ROWS, LANES], gl.float32, of_lanes)
    t = gl.zeros([ROWS, LANES], gl.float32, of_lanes)
    m = gl.full([ROWS], LOWEST, gl.float32, of_rows)
    top = gl.full([ROWS], float("-inf"), gl.float32, of_rows)  # highest score of unmasked tiles
    h = gl.full([ROWS, LANES, MAXIMA], NOTHING, gl.float32, of_maxima)

    q = wait_until_full(q_ring, q_place).reshape([BLOCK, D]).slice(PART * ROWS, ROWS)
    k = wait_until_full(ring, place).reshape([BLOCK, D]).permute((1, 0))
    s = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
    s = hopper.warpgroup_mma_wait(0, deps=[s])
    release(ring, place)
    place = next_place(place, STAGES)
    key = _tile_at(first, stop, row, offset, FROM_DIAGONAL)
    scores = by_lanes(s)
    # In the tile on the diagonal, queries of group 0 attend to none of the last 64 keys; queries of
    # group 1 attend to all of the first 64.
    DIAGONAL: gl.constexpr = CAUSAL and EVEN
    SEEN: gl.constexpr = PART * ROWS if DIAGONAL else 0
    seeable = scores
    if DIAGONAL and PART == 0:
        seeable, _ = split_lane_halves(scores)
    p, l, m, top, e, t, h, rescale = _weigh_tile(
        seeable, l, m, top, e, t, h, c, query_at, key, keys, D, CAUSAL,
        CAUSAL or not (FROM_DIAGONAL or EVEN), SEEN, False, ENTROPY, DISTANCE, THRESHOLD,
    )  # fmt: skip
    if DIAGONAL and PART == 0:
        p = _followed_by_zeros(p, scores)
    for FREE in gl.static_range(2):
        if FREE or ((CAUSAL or FROM_DIAGONAL) and not EVEN):
            start, end = (masked_end, last) if FREE else (first + 1, masked_end)
            for i in range(start, end):
                # Start the scores of this tile, convert the weights of the previous tile, and
                # start their product with its values.
                k = wait_until_full(ring, place).reshape([BLOCK, D]).permute((1, 0))
                s = hopper.warpgroup_mma(q, k, none, use_acc=False, is_async=True)
                weights = gl.convert_layout(_from_lanes(p).to(dtype), operand)
                v = values.index(place[0]).reshape([BLOCK, D])
                o = hopper.warpgroup_mma(weights, v, o, is_async=True)
                s = hopper.warpgroup_mma_wait(1, deps=[s])
                key = _tile_at(i, stop, row, offset, FROM_DIAGONAL)
                p, l, m, top, e, t, h, rescale = _weigh_tile(
                    by_lanes(s), l, m, top, e, t, h, c, query_at, key, keys, D, CAUSAL,
                    CAUSAL and FREE == 0, 0, FREE == 1, ENTROPY, DISTANCE, THRESHOLD,
                )  # fmt: skip
                # The queries are loaded already, but this wait has a branch. Without it, ptxas
                # moves the wait for the product before the exponentials.
                wait_until_full(q_ring, q_place)
                o, weights = hopper.warpgroup_mma_wait(0, deps=[o, weights])
                release(ring, place)
                place = next_place(place, STAGES)
                o = _rescaled(o, rescale, _rescales_lazily(D))
    message = receive_next_block(messages, q_place)
    release(q_ring, q_place)
    weights = gl.convert_layout(_from_lanes(p).to(dtype), operand)
    wait_until_full(ring, place)
    v = values.index(place[0]).reshape([BLOCK, D])
    o = hopper.warpgroup_mma(weights, v, o, is_async=True)
    if D == 128:  # at 64 the product starts early enough
        scheduling_barrier(place[0])

    l, e, t = gl.sum(l, 1), gl.sum(e, 1), gl.sum(t, 1)
    above = gl.full_like(m, 0.0)
    if _rescales_lazily(D):  # rounded as the weights are
        above = gl.maximum(gl.fma(top, c, 0.0 - m), 0.0)
    if not SPLIT or last - first == stop:
        threshold = m
        if THRESHOLD:
            threshold = _top_threshold(h, m * _inverse(c))
        _store_rows(
            l, m, above, e, t, threshold, seen, flat, block, PART, queries, bits,
            D, ENTROPY, PEAK, HIGHEST, DISTANCE, THRESHOLD, NEG_LSE,
        )  # fmt: skip
        inverse = _inverse(_rounded(l, above, dtype, D))
        whole, _ = hopper.warpgroup_mma_wait(0, deps=[o, weights])
        whole = whole * gl.convert_layout(inverse, gl.SliceLayout(1, o_layout))[:, None]
        _store_by_copy(outs.index(PART), out_desc, flat, row + PART * ROWS, whole)
    else:
        kept = _partial_pointer(Partials, gl.program_id(0), first, PART, D)
        sums = kept + gl.arange(0, ROWS, of_rows) * _partial_size(D) + D
        gl.store(sums, l)
        gl.store(sums + 1, m)
        gl.store(sums + 2, e)
        gl.store(sums + 3, t)
        gl.store(sums + 4, above)
        if THRESHOLD:
            its_row = gl.arange(0, ROWS, axis_layout(of_maxima, 3, 0))[:, None, None]
            its_lane = gl.arange(0, LANES, axis_layout(of_maxima, 3, 1))[None, :, None]
            its_set = gl.arange(0, SETS, axis_layout(of_maxima, 3, 2))[None, None, :]
            its_place = its_set + its_row * _partial_size(D) + (D + 5) + its_lane * SETS
            gl.store(kept + its_place, h)
        some, _ = hopper.warpgroup_mma_wait(0, deps=[o, weights])
        at_rows = gl.arange(0, ROWS, gl.SliceLayout(1, o_layout))[:, None] * _partial_size(D)
        at_dims = gl.arange(0, D, gl.SliceLayout(0, o_layout))[None, :]
        gl.store(kept + at_rows + at_dims, some)
    return place, message


@gluon.jit
def _attend(
    shared,
    PART: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    CAUSAL: gl.constexpr, FROM_DIAGONAL: gl.constexpr, EVEN: gl.constexpr, ENTROPY: gl.constexpr,
    PEAK: gl.constexpr, HIGHEST: gl.constexpr, DISTANCE: gl.constexpr, THRESHOLD: gl.constexpr,
    NEG_LSE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Run a warpgroup: its 64 queries of every block, with two tiles of keys in flight."""
    work, sizes = shared[8:]
    _queries, keys, offset, _bits, _c = sizes
    place = ring_start()
    q_place = ring_start()
    message = first_message(work, CAUSAL, False, SPLIT)
    number, _ = first_numbers(work, SPLIT)
    wait_for_previous_launch()
    while message[0] >= 0:
        flat, block, _half = unpack_message(message)
        first, last, stop = _steps(number, block, work, keys, offset, CAUSAL, SPLIT)
        place, message = _attend_block(
            shared, flat, block, first, last, stop, place, q_place, PART, D, STAGES,
            CAUSAL, FROM_DIAGONAL, EVEN, ENTROPY, PEAK, HIGHEST, DISTANCE, THRESHOLD, NEG_LSE,
            SPLIT,
        )  # fmt: skip
        q_place = next_place(q_place, 2)
        number += 1  # used only if items are split
    tma.store_wait(0)


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "begin", "end", "queries", "keys", "bits"])
def forward(
    q_desc, k_desc, v_desc, out_desc, Lse, Entropy, Peak, Highest, Distance, Threshold, NegLse,
    Partials, Counter, Done, begin, end, items, blocks, heads, groups, programs, single_items,
    steps, share, queries, keys, bits, c,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    ENTROPY: gl.constexpr, PEAK: gl.constexpr, HIGHEST: gl.constexpr, DISTANCE: gl.constexpr,
    THRESHOLD: gl.constexpr, NEG_LSE: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Compute the output and fields; the formulas are in triton/forward.py.

    THRESHOLD: store a score that at least eight of a query's scores reach, for ``top``. NEG_LSE:
    store -lse for ``columns``, in whose tiles each lane holds a bin of 2**bits queries. SPLIT:
    programs store their parts of split items in ``Partials``, for ``join``. EVEN: BLOCK divides
    keys - queries or, without a mask and distances, the number of keys. Distances without a mask
    always require that BLOCK divides the number of keys.
    """
    work = Work(items, blocks, heads, groups, programs, single_items, steps, share)
    # i - j changes its sign along a row; tiles with both signs are processed first.
    FROM_DIAGONAL: gl.constexpr = DISTANCE and not CAUSAL
    offset = keys - queries
    q_ring = ring_of(q_desc, 2, 2, GROUPS)
    messages = allocate_messages(2)
    ring = ring_of(k_desc, STAGES, STAGES, GROUPS)
    values = gl.allocate_shared_memory(v_desc.dtype, [STAGES] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    outs = gl.allocate_shared_memory(out_desc.dtype, [GROUPS, 1, ROWS, D], out_desc.layout)
    hopper.fence_async_shared()
    sizes = queries, keys, offset, bits, c
    seen = Lse, Entropy, Peak, Highest, Distance, Threshold, NegLse
    shared = q_ring, messages, ring, values, outs, out_desc, seen, Partials, work, sizes
    counts = Counter, Done, begin, end
    loader = q_ring, messages, counts, ring, values, q_desc, k_desc, v_desc, work, keys, offset
    gl.warp_specialize(
        [
            (_attend, (
                shared, 0, D, STAGES, CAUSAL, FROM_DIAGONAL, EVEN, ENTROPY, PEAK, HIGHEST, DISTANCE,
                THRESHOLD, NEG_LSE, SPLIT,
            )),
            (_attend, (
                shared, 1, D, STAGES, CAUSAL, FROM_DIAGONAL, EVEN, ENTROPY, PEAK, HIGHEST, DISTANCE,
                THRESHOLD, NEG_LSE, SPLIT,
            )),
            (_load, (loader, D, STAGES, CAUSAL, FROM_DIAGONAL, SPLIT)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "queries", "bits"])
def join(
    Out, Lse, Entropy, Peak, Highest, Distance, Threshold, NegLse, Partials,
    items, blocks, heads, groups, programs, single_items, steps, share,
    queries, bits,
    D: gl.constexpr, ENTROPY: gl.constexpr, PEAK: gl.constexpr, HIGHEST: gl.constexpr,
    DISTANCE: gl.constexpr, THRESHOLD: gl.constexpr, NEG_LSE: gl.constexpr,
):  # fmt: skip
    """Combine the partial results of a block from up to JOINED programs, 64 rows per program.

    A thread loads the same element from all partial results, so that the loads overlap.
    """
    work = Work(items, blocks, heads, groups, programs, single_items, steps, share)
    WARPS: gl.constexpr = D // 8
    layout: gl.constexpr = gl.BlockedLayout(
        [JOINED, 1, 4], [1, 128 // D, D // 4], [1, WARPS, 1], [2, 1, 0]
    )
    of_rows: gl.constexpr = gl.SliceLayout(2, layout)
    of_sets: gl.constexpr = gl.BlockedLayout(
        [JOINED, 1, SETS], [1, 8, LANES], [1, WARPS, 1], [2, 1, 0]
    )
    number, part = gl.program_id(0), gl.program_id(1)
    flat, block, _ = item_at(first_split_item(work) + number, work, False, False, True)
    start = number * work.steps
    one = start // work.share
    other = (start + work.steps - 1) // work.share
    if one < other:
        program = one + gl.arange(0, JOINED, gl.SliceLayout(1, of_rows))
        rows = gl.arange(0, ROWS, gl.SliceLayout(0, of_rows))
        mine = (program <= other)[:, None] & (rows < ROWS)[None, :]
        kept = _partial_pointer(Partials, program, program - one, part, D)[:, None] + rows[
            None, :
        ] * _partial_size(D)
        its_m = gl.load(kept + (D + 1), mask=mine, other=LOWEST)
        m = gl.max(its_m, 0)
        rescale = gl.exp2(its_m - m[None, :])
        its_l = gl.load(kept + D, mask=mine, other=0.0)
        l = gl.sum(its_l * rescale, 0)
        its_above = gl.load(kept + (D + 4), mask=mine, other=0.0)
        above = gl.max(its_m + its_above, 0) - m
        e, t, threshold = l, l, l
        if ENTROPY:
            its_e = gl.load(kept + (D + 2), mask=mine, other=0.0)
            e = gl.sum((its_e + (its_m - m[None, :]) * its_l) * rescale, 0)
        if DISTANCE:
            t = gl.sum(gl.load(kept + (D + 3), mask=mine, other=0.0) * rescale, 0)
        if THRESHOLD:
            sets = gl.arange(0, LANES * SETS, axis_layout(of_sets, 3, 2))[None, None, :]
            at = gl.convert_layout(kept, gl.SliceLayout(2, of_sets))[:, :, None] + (D + 5) + sets
            mask = gl.convert_layout(mine, gl.SliceLayout(2, of_sets))[:, :, None]
            h = gl.max(gl.load(at, mask=mask, other=NOTHING), 0)
            threshold = _top_threshold(gl.reshape(h, [ROWS, LANES, SETS]), gl.max(h, 1), WARPS)
        dims = gl.arange(0, D, axis_layout(layout, 3, 2))
        o = gl.load(kept[:, :, None] + dims[None, None, :], mask=mine[:, :, None], other=0.0)
        o = gl.sum(o * rescale[:, :, None], 0)
        seen = Lse, Entropy, Peak, Highest, Distance, Threshold, NegLse
        _store_rows(
            l, m, above, e, t, threshold, seen, flat, block, part, queries, bits,
            D, ENTROPY, PEAK, HIGHEST, DISTANCE, THRESHOLD, NEG_LSE,
        )  # fmt: skip
        rounded = _rounded(its_l, its_above, Out.dtype.element_ty, D)
        inverse = _inverse(gl.sum(rounded * rescale, 0))
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, o.type.layout))
        _write(Out, flat, block * BLOCK + part * ROWS, o * inverse[:, None], queries, WARPS)
