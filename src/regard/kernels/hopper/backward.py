# mypy: ignore-errors
"""The backward pass for Hopper, which also computes sums over queries.

Formulas: triton/backward.py (gradients) and triton/columns.py (sums). This pass recomputes the
weights, so their sums over queries are almost free. Two warpgroups have 64 keys each and iterate
over the queries together. A query's gradient needs the gradients of scores of both groups, so the
groups exchange these in shared memory, and use them one step later so that neither waits. Programs
add gradients of queries atomically in float32, in the register order of a product; ``gather``
reorders them.

At a width of 64 a step is a tile of queries, and at 128 half a tile, because registers hold the
step's scores, their gradients, and the accumulated gradients of keys and values. Called by
``launch.backward``. Gradients of queries differ in their last bits between runs.

Test: ``pytest tests/kernels/test_hopper.py -k backward_is_the_definition``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from regard.kernels.hopper.columns import (
    accumulate_bins,
    first_tile,
    load_by_fours,
    store_bins,
    store_zero_bins,
    sums_of,
    weights_of,
)
from regard.kernels.hopper.pipeline import (
    BLOCK,
    LANES,
    NOT_SPECIALIZED,
    PAIR,
    ROWS,
    UNSET_COUNTER,
    allocate_messages,
    block_of,
    by_fours,
    end_of,
    first_message,
    first_numbers,
    item_at,
    neg_lse_by_copy,
    next_number,
    next_place,
    receive_next_block,
    release,
    ring_of,
    ring_start,
    row_pointers,
    send_next_block,
    unpack_message,
    wait_until_empty,
    wait_until_full,
)
from regard.kernels.plan import Sizes, Work

GROUPS = gl.constexpr(2)  # warpgroups, with ROWS keys each
EXCHANGED = gl.constexpr(2)  # slots in which the groups exchange gradients of scores


@gluon.constexpr_function
def _queries(D):
    """The number of queries in a step."""
    return 8192 // D


@gluon.constexpr_function
def _slots(D):
    """The number of ring slots for blocks of keys and values; 1 takes fewer registers."""
    return 2 if D == 64 else 1


@gluon.constexpr_function
def _uses_counter(D):
    """Whether programs take items from a counter; at a width of 128, registers do not suffice."""
    return D == 64


@gluon.constexpr_function
def _writes_bin_once(D, BINS, CAUSAL):
    """Whether storing a bin of several steps once, at its end, is faster than after each step."""
    return D == 128 and (BINS == 4 or not CAUSAL)


@gluon.constexpr_function
def _step_has_part_of_bins(D, BINS):
    """Whether a step holds only a part of the queries of a bin.

    Half a tile holds whole bins, unless a tile has a single bin or one bin per lane.
    """
    return D > 64 and BINS in (1, 4)


@gluon.jit
def _first_step(block, sizes, CAUSAL: gl.constexpr, D: gl.constexpr):
    """The first step with queries that attend to any key of a block."""
    return first_tile(block, sizes, CAUSAL, BLOCK) * (BLOCK // _queries(D))


@gluon.jit
def _step_at(batch, head, i, interleave, D: gl.constexpr, BINS: gl.constexpr):
    """The TMA coordinates of the i-th step's queries, in the order of bins if interleaved."""
    STEPS: gl.constexpr = BLOCK // _queries(D)
    if BINS >= LANES:
        first = batch * interleave.batch + head * interleave.head
        if _step_has_part_of_bins(D, BINS):
            turns: gl.constexpr = BLOCK // (STEPS * LANES * PAIR)
            at = [first + i // STEPS, i % STEPS * turns, 0, 0, head * interleave.inner]
        else:
            at = [first + i * (BINS // (STEPS * LANES)), 0, 0, 0, head * interleave.inner]
    else:
        at = [batch, head, i * _queries(D), 0]
    return at


@gluon.jit
def _load(loader, D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr, CAUSAL: gl.constexpr):
    """Run the loading warp: load blocks of keys and values, and steps with neg_lse and delta."""
    rings, messages, Counter, described, work, sizes = loader
    key_ring, values, query_ring, grads, neg_lse_tiles, deltas = rings
    STEPS: gl.constexpr = BLOCK // _queries(D)
    q_desc, grad_desc, k_desc, v_desc, neg_lse_desc, delta_desc, interleave, grad_interleave = (
        described
    )
    place = ring_start()
    block_place = ring_start()
    number, after = first_numbers(work, False)
    while number < end_of(work, False):
        item = item_at(number, work, CAUSAL, _uses_counter(D), False)
        for half in range(item[2]):
            flat, block = block_of(item, half, work)
            batch, head = flat // work.heads, flat % work.heads
            keys, loaded = wait_until_empty(key_ring, block_place)
            if _uses_counter(D):
                send_next_block(messages, block_place, item, half, after, work, CAUSAL, True, False)
            mbarrier.expect(loaded, 2 * BLOCK * D * 2)
            key_at = [batch, head, block * BLOCK, 0]
            tma.async_copy_global_to_shared(k_desc, key_at, loaded, keys)
            tma.async_copy_global_to_shared(v_desc, key_at, loaded, values.index(block_place[0]))
            for i in range(_first_step(block, sizes, CAUSAL, D), sizes.tiles * STEPS):
                tile, full = wait_until_empty(query_ring, place)
                mbarrier.expect(full, _queries(D) * (2 * D * 2 + 2 * 4))
                at = _step_at(batch, head, i, interleave, D, BINS)
                tma.async_copy_global_to_shared(q_desc, at, full, tile)
                grad_at = _step_at(batch, head, i, grad_interleave, D, BINS)
                tma.async_copy_global_to_shared(grad_desc, grad_at, full, grads.index(place[0]))
                row = [flat * sizes.tiles * STEPS + i, 0]
                tma.async_copy_global_to_shared(
                    neg_lse_desc, row, full, neg_lse_tiles.index(place[0])
                )
                tma.async_copy_global_to_shared(delta_desc, row, full, deltas.index(place[0]))
                place = next_place(place, STAGES)
            block_place = next_place(block_place, _slots(D))
        if _uses_counter(D):
            number, after = after, next_number(after, Counter, work, False)
        else:
            number += work.programs


@gluon.constexpr_function
def _register_layout(D):
    """The layout [D // 8, 512] of 64 rows of a product in register order."""
    columns = [2**i for i in range(20) if 2**i < D // 8]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], *[[bit, 0] for bit in columns]],
        [[0, 4], [0, 8], [0, 16], [0, 32], [0, 64]],
        [[0, 128], [0, 256]],
        [],
        [D // 8, 512],
    )


@gluon.jit
def _in_register_order(x):
    """Reshape 64 rows of a product to [D // 8, 512]: eight columns; warp, row, lane, 4 values."""
    D: gl.constexpr = x.shape[1]
    parts = gl.reshape(x, [4, 2, 8, D // 8, LANES, PAIR])  # a thread has two rows, 8 apart
    parts = gl.reshape(gl.permute(parts, (3, 0, 2, 4, 1, 5)), [D // 8, 512])
    return gl.convert_layout(parts, _register_layout(D))


@gluon.jit
def _register_offsets(D: gl.constexpr):
    """The memory offsets of the numbers of ``_in_register_order``."""
    eight = gl.arange(0, D // 8, gl.SliceLayout(1, _register_layout(D)))
    its = gl.arange(0, 512, gl.SliceLayout(0, _register_layout(D)))
    return eight[:, None] * 512 + its[None, :]


@gluon.jit
def _add_query_gradients(QueryGrad, at, x):
    """Add a group's gradients of queries atomically to the sums over all programs."""
    gl.atomic_add(
        QueryGrad + at + _register_offsets(x.shape[1]), _in_register_order(x), sem="relaxed"
    )


@gluon.jit
def _query_gradient_product(score_ring, place, keys, nothing, PART: gl.constexpr, D: gl.constexpr):
    """A group's share of the gradients of a step's queries, [64, 64], from the score gradients.

    Its share is half of the queries if a step has 128, otherwise half of the width.
    """
    changes = wait_until_full(score_ring, place).permute((1, 0))
    if D == 64:
        changes = changes.slice(PART * ROWS, ROWS)
    else:
        keys = keys.slice(PART * 64, 64, 1)
    product = hopper.warpgroup_mma(changes, keys, nothing, use_acc=False, is_async=True)
    return hopper.warpgroup_mma_wait(0, deps=[product])


@gluon.jit
def _write(out, flat, row, x, heads, keys):
    """Store the gradient of 64 keys or values."""
    D: gl.constexpr = x.shape[1]
    x = x.to(out.data.dtype.element_ty)
    if D == 64:  # store whole rows; at 128 store directly, without shared memory
        x = gl.convert_layout(x, gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    layout: gl.constexpr = x.type.layout
    rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    gl.store(row_pointers(out, flat, rows, dims, heads), x, mask=(rows < keys)[:, None])


@gluon.jit
def _differentiate_block(
    shared, flat, block, place, block_place, exchange_place,
    PART: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr,
    UNIT: gl.constexpr, LONG: gl.constexpr, CAUSAL: gl.constexpr, RECEIVED: gl.constexpr,
    MAP: gl.constexpr, MAP_PEAK: gl.constexpr, DONE: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of 64 keys and values, and add their share to those of the queries."""
    rings, messages, score_ring, written, work, sizes, c, scale = shared
    key_ring, values, query_ring, grads, neg_lse_tiles, deltas = rings
    QueryGrad, key_grad, value_grad, Received, Map, MapPeak = written
    dtype: gl.constexpr = key_grad.data.dtype.element_ty
    QUERIES: gl.constexpr = _queries(D)
    STEPS: gl.constexpr = BLOCK // QUERIES
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, QUERIES, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    q_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    none = gl.zeros([ROWS, QUERIES], gl.float32, s_layout)
    nothing = gl.zeros([ROWS, 64], gl.float32, q_layout)
    k_grad = gl.zeros([ROWS, D], gl.float32, o_layout)
    v_grad = gl.zeros([ROWS, D], gl.float32, o_layout)
    head = flat.to(gl.int64)
    first = block * BLOCK + PART * ROWS
    key_at = first + gl.arange(0, ROWS, gl.SliceLayout(1, s_layout)) - sizes.offset
    begin, end = _first_step(block, sizes, CAUSAL, D), sizes.tiles * STEPS
    free = begin
    if CAUSAL:
        free = gl.maximum(first + ROWS - 1 - sizes.offset + BLOCK - 1, 0) // BLOCK * STEPS
    STEP_HAS_PART: gl.constexpr = _step_has_part_of_bins(D, BINS)
    HIGH: gl.constexpr = BLOCK // BINS
    STEP_BINS: gl.constexpr = BINS if STEP_HAS_PART else BINS // STEPS
    LONGER: gl.constexpr = LONG or STEP_HAS_PART  # a bin spans several steps
    per_bin = sizes.per_bin * STEPS if LONGER else 1
    units = work.blocks * (BLOCK // UNIT)  # equal to sizes.units, but spills fewer registers
    cell = head * sizes.bins * units + block * (BLOCK // UNIT) + PART * (ROWS // UNIT)
    if MAP and DONE and CAUSAL:
        for row in range(begin // per_bin):
            store_zero_bins(Map + cell, row * STEP_BINS * units, units, ROWS, UNIT, STEP_BINS)
            if MAP_PEAK:
                store_zero_bins(
                    MapPeak + cell, row * STEP_BINS * units, units, ROWS, UNIT, STEP_BINS
                )
    cells = Map, MapPeak, units, 1 / (sizes.per_bin * HIGH)
    query_at = (head * end + begin) * (QUERIES * D) + PART * (ROWS * 64)
    next_bin = (begin // per_bin + 1) * per_bin
    at = cell + begin // per_bin * STEP_BINS * units

    k_all = wait_until_full(key_ring, block_place).reshape([BLOCK, D])
    k = k_all.slice(PART * ROWS, ROWS)
    v = values.index(block_place[0]).reshape([BLOCK, D]).slice(PART * ROWS, ROWS)
    like, _ = sums_of(weights_of(none, none, c, key_at, False, STEP_BINS, HIGH, False), MAP_PEAK)
    pooled, largest = gl.zeros_like(like), gl.zeros_like(like)
    received = gl.sum(pooled, 1)
    # A new value, not exchange_place: in the loop, Triton would treat both names as one variable.
    before = ring_start()
    for step in range(begin, end):
        q = wait_until_full(query_ring, place).reshape([QUERIES, D])
        grad = grads.index(place[0]).reshape([QUERIES, D])
        s = hopper.warpgroup_mma(k, q.permute((1, 0)), none, use_acc=False, is_async=True)
        p_grad = hopper.warpgroup_mma(v, grad.permute((1, 0)), none, use_acc=False, is_async=True)
        s = hopper.warpgroup_mma_wait(1, deps=[s])
        neg_lse = load_by_fours(neg_lse_tiles, place, QUERIES, s_layout)
        first_query = step * QUERIES
        if STEP_HAS_PART and BINS == LANES:  # a step has a part of each lane's bin of queries
            first_query = step // STEPS * BLOCK + step % STEPS * (HIGH // STEPS)
        parts = weights_of(
            s, neg_lse[None, :], c, key_at - first_query, step < free, STEP_BINS, HIGH, CAUSAL
        )
        sums, peaks = sums_of(parts, MAP_PEAK)
        if LONGER:
            pooled, largest, next_bin, at = accumulate_bins(
                pooled, largest, sums, peaks, step, next_bin, at, per_bin, STEP_BINS * units
            )
        else:
            pooled, largest = sums, peaks
        if LONGER and _writes_bin_once(D, BINS, CAUSAL):
            if step + 1 == next_bin:
                store_bins(pooled, largest, cells, at, UNIT, STEP_BINS, MAP, MAP_PEAK, DONE)
        else:
            store_bins(pooled, largest, cells, at, UNIT, STEP_BINS, MAP, MAP_PEAK, DONE)
        received += gl.sum(sums, 1)
        if not LONGER:
            at += STEP_BINS * units
        p = gl.convert_layout(gl.reshape(parts, [ROWS, QUERIES]), s_layout)
        wait_until_full(
            key_ring, block_place
        )  # a branch for ptxas: see the same wait in forward.py
        p_grad = hopper.warpgroup_mma_wait(0, deps=[p_grad])
        delta = load_by_fours(deltas, place, QUERIES, s_layout)
        s_grad = (p * (p_grad + delta[None, :])).to(dtype)
        weights = gl.convert_layout(p.to(dtype), operand)
        v_grad = hopper.warpgroup_mma(weights, grad, v_grad, is_async=True)
        changes = gl.convert_layout(s_grad, operand)
        k_grad = hopper.warpgroup_mma(changes, q, k_grad, is_async=True)
        room, full = wait_until_empty(score_ring, exchange_place)
        room.slice(PART * ROWS, ROWS).store(s_grad)
        hopper.fence_async_shared()
        mbarrier.arrive(full, count=1)
        if step > begin:
            q_grad = _query_gradient_product(score_ring, before, k_all, nothing, PART, D)
            release(score_ring, before)
            _add_query_gradients(QueryGrad, query_at, q_grad)
            query_at += QUERIES * D
        v_grad, k_grad, weights, changes = hopper.warpgroup_mma_wait(
            0, deps=[v_grad, k_grad, weights, changes]
        )
        release(query_ring, place)
        place = next_place(place, STAGES)
        before = exchange_place
        exchange_place = next_place(exchange_place, EXCHANGED)
    q_grad = _query_gradient_product(score_ring, before, k_all, nothing, PART, D)
    release(score_ring, before)
    message = receive_next_block(messages, block_place) if _uses_counter(D) else (0, 0)
    release(key_ring, block_place)
    _add_query_gradients(QueryGrad, query_at, q_grad)
    _write(key_grad, flat, first, k_grad * scale, work.heads, sizes.keys)
    _write(value_grad, flat, first, v_grad, work.heads, sizes.keys)
    if RECEIVED:
        received = gl.sum(received, 1)
        its_key = first + gl.arange(0, ROWS, received.type.layout)
        gl.store(Received + head * sizes.keys + its_key, received, mask=its_key < sizes.keys)
    return place, exchange_place, message


@gluon.jit
def _differentiate(
    shared,
    PART: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr,
    UNIT: gl.constexpr, LONG: gl.constexpr, CAUSAL: gl.constexpr, RECEIVED: gl.constexpr,
    MAP: gl.constexpr, MAP_PEAK: gl.constexpr, DONE: gl.constexpr,
):  # fmt: skip
    """Run a warpgroup: its 64 keys of every block of keys, over all queries."""
    work = shared[4]
    place = ring_start()
    block_place = ring_start()
    exchange_place = ring_start()
    if _uses_counter(D):
        message = first_message(work, CAUSAL, True, False)
        while message[0] >= 0:
            flat, block, _half = unpack_message(message)
            place, exchange_place, message = _differentiate_block(
                shared, flat, block, place, block_place, exchange_place, PART, D, STAGES, BINS,
                UNIT, LONG, CAUSAL, RECEIVED, MAP, MAP_PEAK, DONE,
            )  # fmt: skip
            block_place = next_place(block_place, _slots(D))
    else:
        for number in range(gl.program_id(0), work.items, work.programs):
            item = item_at(number, work, CAUSAL, False, False)
            for half in range(item[2]):
                flat, block = block_of(item, half, work)
                place, exchange_place, _message = _differentiate_block(
                    shared, flat, block, place, block_place, exchange_place, PART, D, STAGES, BINS,
                    UNIT, LONG, CAUSAL, RECEIVED, MAP, MAP_PEAK, DONE,
                )  # fmt: skip
                block_place = next_place(block_place, _slots(D))


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, *Sizes._fields])
def backward(
    q_desc, grad_desc, k_desc, v_desc, neg_lse_desc, delta_desc, interleave, grad_interleave,
    QueryGrad, key_grad, value_grad, Received, Map, MapPeak, Counter,
    items, blocks, heads, groups, programs, single_items, steps, share,
    keys, offset, tiles, per_bin, bins, together, units, c, scale,
    D: gl.constexpr, STAGES: gl.constexpr, BINS: gl.constexpr, UNIT: gl.constexpr,
    LONG: gl.constexpr, CAUSAL: gl.constexpr, RECEIVED: gl.constexpr, MAP: gl.constexpr,
    MAP_PEAK: gl.constexpr, DONE: gl.constexpr,
):  # fmt: skip
    """Compute gradients, and the sums over queries that ``columns`` computes."""
    work = Work(items, blocks, heads, groups, programs, single_items, steps, share)
    sizes = Sizes(keys, offset, tiles, per_bin, bins, together, units)
    QUERIES: gl.constexpr = _queries(D)
    SLOTS: gl.constexpr = _slots(D)
    key_ring = ring_of(k_desc, SLOTS, SLOTS, GROUPS)
    messages = allocate_messages(SLOTS)
    values = gl.allocate_shared_memory(v_desc.dtype, [SLOTS] + v_desc.block_shape, v_desc.layout)  # noqa: RUF005
    query_ring = ring_of(q_desc, STAGES, STAGES, GROUPS)
    grads = gl.allocate_shared_memory(q_desc.dtype, [STAGES] + q_desc.block_shape, q_desc.layout)  # noqa: RUF005
    neg_lse_tiles = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], neg_lse_desc.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, 1, QUERIES], neg_lse_desc.layout)
    scores: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    exchange_place = gl.allocate_shared_memory(q_desc.dtype, [EXCHANGED, BLOCK, QUERIES], scores)
    full = gl.allocate_shared_memory(gl.int64, [EXCHANGED, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [EXCHANGED, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(EXCHANGED):
        mbarrier.init(full.index(slot), count=GROUPS)
        mbarrier.init(empty.index(slot), count=GROUPS)
    hopper.fence_async_shared()
    rings = key_ring, values, query_ring, grads, neg_lse_tiles, deltas
    score_ring = exchange_place, full, empty
    written = QueryGrad, key_grad, value_grad, Received, Map, MapPeak
    described = (
        q_desc,
        grad_desc,
        k_desc,
        v_desc,
        neg_lse_desc,
        delta_desc,
        interleave,
        grad_interleave,
    )
    shared = rings, messages, score_ring, written, work, sizes, c, scale
    gl.warp_specialize(
        [
            (_differentiate, (
                shared, 0, D, STAGES, BINS, UNIT, LONG, CAUSAL, RECEIVED, MAP, MAP_PEAK,
                DONE,
            )),
            (_differentiate, (
                shared, 1, D, STAGES, BINS, UNIT, LONG, CAUSAL, RECEIVED, MAP, MAP_PEAK,
                DONE,
            )),
            (_load, ((rings, messages, Counter, described, work, sizes), D, STAGES, BINS, CAUSAL)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


@gluon.jit
def _row_of(place, bits):
    """The index of the query at a position of a tile whose lanes hold bins of 2**bits queries."""
    within = place & (LANES << bits) - 1
    lane, turn = within // PAIR % LANES, within // (LANES * PAIR)
    return place - within + (lane << bits) + turn * PAIR + place % PAIR


@gluon.jit(do_not_specialize=["heads", "queries", "bits"])
def prepare(
    out,
    grad,
    NegLse,
    NegLseByFours,
    Delta,
    QueryGrad,
    Counter,
    heads,
    queries,
    bits,
    D: gl.constexpr,
):
    """Compute -delta of each row in ``by_fours`` order, and set the gradients of queries to zero.

    Also reorder ``NegLse`` if it is not in that order, and reset the counter of items. A program
    processes ROWS positions of a tile.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    of_rows: gl.constexpr = gl.SliceLayout(1, layout)
    flat, part = gl.program_id(1), gl.program_id(0)
    first = part * ROWS
    place = first + gl.arange(0, ROWS, of_rows)
    rows = _row_of(place, bits)
    inside = rows < queries
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = row_pointers(out, flat, rows, dims, heads)
    its_output = gl.load(at, mask=inside[:, None], other=0.0)
    at = row_pointers(grad, flat, rows, dims, heads)
    its_grad = gl.load(at, mask=inside[:, None], other=0.0)
    delta = gl.sum(its_output.to(gl.float32) * its_grad.to(gl.float32), 1)
    tiles = (queries + BLOCK - 1) // BLOCK
    tile = flat.to(gl.int64) * (tiles * BLOCK)
    gl.store(Delta + tile + by_fours(place), 0.0 - delta)
    if not neg_lse_by_copy(D):
        gl.store(NegLseByFours + tile + by_fours(place), gl.load(NegLse + tile + place))
    if (flat == 0) & (part == 0):
        gl.store(Counter, UNSET_COUNTER)
    zeros = gl.zeros([D // 8, 512], gl.float32, _register_layout(D))
    start = (tile + first) * D
    gl.store(QueryGrad + start + _register_offsets(D), zeros)


@gluon.jit(do_not_specialize=["heads", "queries", "bits"])
def gather(QueryGrad, query_grad, heads, queries, bits, scale, D: gl.constexpr):
    """Scale ROWS gradients of queries, and store them in the layout of the queries."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    flat, part = gl.program_id(1), gl.program_id(0)
    tiles = (queries + BLOCK - 1) // BLOCK
    start = (flat.to(gl.int64) * tiles * BLOCK + part * ROWS) * D
    x = gl.load(QueryGrad + start + _register_offsets(D)) * scale
    x = gl.reshape(x.to(query_grad.data.dtype.element_ty), [D // 8, 4, 8, LANES, 2, PAIR])
    x = gl.reshape(gl.permute(x, (1, 4, 2, 0, 3, 5)), [ROWS, D])
    x = gl.convert_layout(x, layout)
    rows = _row_of(part * ROWS + gl.arange(0, ROWS, gl.SliceLayout(1, layout)), bits)
    dims = gl.arange(0, D, gl.SliceLayout(0, layout))
    at = row_pointers(query_grad, flat, rows, dims, heads)
    gl.store(at, x, mask=(rows < queries)[:, None])
