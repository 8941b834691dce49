# mypy: ignore-errors
"""Code that the Hopper kernels share: rings of tiles, the split of work, and layouts of products.

The loading warp has the copy engine (TMA) fill a ring of tiles in shared memory. Each warpgroup
(four warps) multiplies 64 rows: while one computes exponentials, the products of another run. Each
slot of a ring has two barriers: ``full`` completes after a load, and ``empty`` after all readers
have released the slot. A barrier's phase changes with each round of the ring.

There are as many programs as multiprocessors, and each processes several items. The loading warp
takes the numbers of items from a global counter two items ahead, so a slow program gets fewer
items. It sends them to the warpgroups through shared memory. With a causal mask an item is a long
and a short block of the same head, and the last items are single blocks, short ones last. Without a
mask the last round may have fewer items than programs. A separate launch splits these items into
shares of steps (tiles), and small kernels join the partial results.

Callers: ``forward``, ``columns``, ``backward``, ``top``.

Test: ``pytest tests/kernels/test_hopper.py -k dealt_out``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from regard.kernels import sizes
from regard.kernels.plan import Work

# The fields of Work that vary from call to call: Triton must not specialize kernels on them.
NOT_SPECIALIZED = [name for name in Work._fields if name not in ("heads", "groups")]
LN2 = gl.constexpr(sizes.LN2)
NOTHING = gl.constexpr(-3.0e38)  # the value in triton/tiles.py
LOWEST = gl.constexpr(-1.0e37)
ROWS = gl.constexpr(sizes.ROWS)
BAND = gl.constexpr(sizes.BAND)
BLOCK = gl.constexpr(sizes.BLOCK)
TEAMS = gl.constexpr(sizes.TEAMS)
LANES = gl.constexpr(sizes.LANES)
UNSET_COUNTER = gl.constexpr(sizes.UNSET_COUNTER)
PAIR = gl.constexpr(sizes.PAIR)


@gluon.constexpr_function
def axis_layout(layout, rank, axis):
    """The layout of a vector along one axis of a tensor with ``rank`` axes."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def neg_lse_by_copy(D):
    """Whether the copy engine loads neg_lse with the queries in the columns pass.

    At a width of 128 the products saturate shared memory, and loads from the cache are faster.
    """
    return D == 64


@gluon.jit
def by_fours(place):
    """The index of a number after each 16 are reordered: a lane's two pairs become neighbours."""
    return place & -16 | (place & 6) << 1 | place >> 2 & 2 | place & 1


@gluon.jit
def ring_of(desc, TILES: gl.constexpr, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Allocate a ring of tiles, with a full and an empty barrier for each slot."""
    tiles = gl.allocate_shared_memory(desc.dtype, [TILES] + desc.block_shape, desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return tiles, full, empty


@gluon.jit
def ring_start():
    """The first place of a ring: its slot, and whether the round is odd."""
    return gl.to_tensor(0), gl.to_tensor(0)


@gluon.jit
def next_place(place, STAGES: gl.constexpr):
    """The place in a ring after ``place``; see ``ring_start``."""
    slot, odd = place
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, odd ^ 1, odd)


@gluon.jit
def wait_until_empty(ring, place):
    """Wait until all readers have released a place; return its tile and full barrier."""
    slot, odd = place
    mbarrier.wait(ring[2].index(slot), odd ^ 1)
    return ring[0].index(slot), ring[1].index(slot)


@gluon.jit
def wait_until_full(ring, place):
    """Wait until a place is loaded; return its tile."""
    slot, odd = place
    mbarrier.wait(ring[1].index(slot), odd)
    return ring[0].index(slot)


@gluon.jit
def release(ring, place):
    """Signal to the loading warp that this reader is done with a place."""
    mbarrier.arrive(ring[2].index(place[0]), count=1)


@gluon.jit
def wait_for_previous_launch():
    """Wait until the previous launch has ended, and let the next launch start as programs end.

    A launch starts after all programs of the previous launch have passed this point. All launches
    before that one have then ended, so a kernel may read their results without this wait.
    """
    gl.inline_asm_elementwise(
        "{ griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1; }", "=r,r",
        [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def count_done_block(Done, flat, begin, end):
    """Count a finished block of one of the columns pass's first heads, ``begin`` to ``end``."""
    if (flat >= begin) & (flat < end):
        gl.atomic_add(Done + flat, 1, sem="release")


@gluon.jit
def is_done(Done, flat, blocks):
    """Whether all blocks of a head are done, so that loads and TMA copies may read the results."""
    all_of_them = gl.inline_asm_elementwise(
        "{ .reg .pred p; fence.acq_rel.gpu; fence.proxy.async.global; setp.eq.s32 p, $1, $2; "
        "vote.sync.all.pred p, p, -1; selp.b32 $0, 1, 0, p; }",
        "=r,r,r", [gl.load(Done + flat, volatile=True), UNSET_COUNTER + blocks], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    return all_of_them > 0


@gluon.jit(do_not_specialize=["count"])
def reset_counters(Counters, count, WARPS: gl.constexpr):
    """Set counters to UNSET_COUNTER. The next launch may start early; it waits for this one."""
    gl.inline_asm_elementwise(
        "{ griddepcontrol.launch_dependents; mov.b32 $0, $1; }", "=r,r",
        [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = gl.program_id(0) * (32 * WARPS) + gl.arange(0, 32 * WARPS, layout)
    gl.store(Counters + at, UNSET_COUNTER, mask=at < count)


@gluon.jit
def _share(program, work):
    """A program's share of the steps of all split items, as a range."""
    steps = work.items % work.programs * work.steps
    start = gl.minimum(program * work.share, steps)
    return start, gl.minimum(start + work.share, steps)


@gluon.jit
def steps_within(program, number, work):
    """The range of steps of one split item that a program takes."""
    start, end = _share(program, work)
    before = number * work.steps
    return gl.maximum(start - before, 0), gl.minimum(end - before, work.steps)


@gluon.jit
def first_split_item(work):
    """The number of the first split item, after the last full round of all programs."""
    return work.items // work.programs * work.programs


@gluon.jit
def first_numbers(work, SPLIT: gl.constexpr):
    """The numbers of a program's first and second item."""
    if SPLIT:
        number = first_split_item(work) + _share(gl.program_id(0), work)[0] // work.steps
        after = number + 1
    else:
        number = gl.program_id(0)
        after = number + work.programs
    return number, after


@gluon.jit
def next_number(after, Counter, work, SPLIT: gl.constexpr):
    """The number of the item that follows item ``after``, taken from the counter unless SPLIT."""
    if SPLIT:
        number = after + 1
    else:
        wait_for_previous_launch()  # that launch may reset the counter
        number = 2 * work.programs + gl.atomic_add(Counter, 1, sem="relaxed") - UNSET_COUNTER
    return number


@gluon.jit
def end_of(work, SPLIT: gl.constexpr):
    """The end (exclusive) of the numbers of a program's items."""
    if SPLIT:
        start, end = _share(gl.program_id(0), work)
        last = first_split_item(work) + gl.where(start < end, (end - 1) // work.steps + 1, 0)
    else:
        last = work.items + work.single_items
    return last


@gluon.jit
def _from_the_middle(number, work):
    """Reverse the order of items, but let each program start with an item from the middle.

    ``plan._early_heads`` names the heads of these items, whose blocks the forward pass counts.
    """
    half, late = work.items // 2, work.items - 1 - number
    reordered = gl.where(late < half, late, late + work.programs)
    reordered = gl.where(number < work.programs, half + work.programs - 1 - number, reordered)
    return gl.where(work.items < 4 * work.programs, late, reordered)


@gluon.jit
def item_at(number, work, CAUSAL: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """Return an item's head (counted over the batch), first block, and number of blocks.

    With a causal mask an item is a long and a short block; the last blocks of queries are the long
    ones. The last items are single blocks: first all long ones, then the short ones. Passes over
    blocks of keys (KEYS) start with the items that passes over queries process last, because their
    data is still in the cache. Without a mask they start with items from the middle, so that they
    need not wait for the last blocks of the forward pass.
    """
    later = number - work.items
    if CAUSAL:
        number = gl.where(later < 0, number, work.items - 1 - later)
    alone = number >= work.items - work.single_items
    if KEYS and not SPLIT:
        number = work.items - 1 - number if CAUSAL else _from_the_middle(number, work)
    if CAUSAL:
        pairs = (work.blocks + 1) // 2
        flat, block = number // pairs, number % pairs
        count = gl.where(alone | (2 * block + 1 == work.blocks), 1, 2)
        block = gl.where((later < 0) == KEYS, block, work.blocks - 1 - block)
    else:
        flat, block = number // work.blocks, number % work.blocks
        count = 1
    return flat, block, count


@gluon.jit
def block_of(item, half, work):
    """Return the head and block of an item: its first block, or its second if ``half`` is 1."""
    flat, block, _ = item
    return flat, gl.where(half == 0, block, work.blocks - 1 - block)


@gluon.jit
def message_of(number, work, CAUSAL: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """The message about the first block of an item; see ``unpack_message``."""
    flat, block, _ = item_at(number, work, CAUSAL, KEYS, SPLIT)
    return gl.where(number < end_of(work, SPLIT), flat, -1), 2 * block


@gluon.jit
def allocate_messages(SLOTS: gl.constexpr):
    """Allocate a message about the next block for each slot of a ring of blocks."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int64, [SLOTS, 1], plain)


@gluon.jit
def send_next_block(
    messages, place, item, half, after, work,
    CAUSAL: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Write the message about the next block, before the loads of this block begin."""
    flat, both = message_of(after, work, CAUSAL, KEYS, SPLIT)
    if half + 1 < item[2]:
        flat, block = block_of(item, half + 1, work)
        both = 2 * block + half + 1
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    both = flat.to(gl.int64) << 32 | both.to(gl.int64)
    messages.index(place[0]).store(gl.full([1], both, gl.int64, layout))


@gluon.jit
def first_message(work, CAUSAL: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """The message about a program's first block."""
    return message_of(first_numbers(work, SPLIT)[0], work, CAUSAL, KEYS, SPLIT)


@gluon.jit
def receive_next_block(messages, place):
    """Read the message about the next block, after this block is loaded."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    both = gl.max(messages.index(place[0]).load(layout), 0)
    return uniform_in_warp((both >> 32).to(gl.int32)), uniform_in_warp(both.to(gl.int32))


@gluon.jit
def unpack_message(message):
    """Return the head and the block of a message, and whether it is its item's second block (1).

    The head is negative if there are no more blocks.
    """
    flat, both = message
    return flat, both >> 1, both & 1


@gluon.jit
def uniform_in_warp(x):
    """Make the compiler treat a number as uniform in a warp: all threads hold the same value."""
    return gl.inline_asm_elementwise(
        "{ shfl.sync.idx.b32 $0, $1, 0, 31, -1; }", "=r,r", [x], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def scheduling_barrier(x):
    """Keep the compiler from moving code across this point.

    ptxas starts products late and waits for them early, but does not move either across a branch.
    This adds a loop that never runs, because ``x`` is not negative.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $1, 0; AGAIN: @p bra ON; nanosleep.u32 32; bra AGAIN; "
        "ON: mov.b32 $0, $1; }",
        "=r,r", [x], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def team_part(half, PART: gl.constexpr, CAUSAL: gl.constexpr):
    """The index of the ROWS rows of a block that a team takes.

    With a causal mask, the two teams with one half of a block's rows may have one tile more to
    process than the other two. In the second block of an item (``half`` is 1) the teams swap, so
    that all teams process equally many tiles.
    """
    if CAUSAL:
        return PART ^ half * (TEAMS // 2)
    return PART


@gluon.jit
def partial_slot(program, begins):
    """The slot in which a program stores its part of a split block; a program has two slots.

    ``begins``: whether the part is the start of its block. A program's share may begin inside one
    block and end inside another.
    """
    return program * 2 + gl.where(begins, 1, 0)


@gluon.jit
def by_lanes(tile):
    """Reshape scores [rows, keys] to [rows, LANES, keys // LANES]: a thread has a lane of a row."""
    R: gl.constexpr = tile.shape[0]
    N: gl.constexpr = tile.shape[1]
    parts = gl.reshape(tile, [R, N // (LANES * PAIR), LANES, PAIR])
    return gl.reshape(gl.permute(parts, (0, 2, 1, 3)), [R, LANES, N // LANES])


@gluon.jit
def split_row_pairs(x):
    """Split one number per row, [rows], by the two rows of a thread into two of [rows // 2, 1]."""
    R: gl.constexpr = x.shape[0]
    parts = gl.permute(gl.reshape(x, [R // BAND, 2, BAND // 2]), (0, 2, 1))
    one, other = gl.split(gl.reshape(parts, [R // 2, 2]))
    return one[:, None], other[:, None]


@gluon.jit
def split_lane_halves(parts):
    """Split numbers by lanes, [rows, LANES, n], into their first and second n // 2."""
    N: gl.constexpr = parts.shape[2]
    halves = gl.reshape(parts, [parts.shape[0], parts.shape[1], 2, N // 2])
    return gl.split(gl.permute(halves, (0, 1, 3, 2)))


@gluon.jit
def key_offsets(s):
    """Return two tensors whose sum is the offset in a tile of each key of scores by lanes.

    The first is known at compile time; the second depends on the lane.
    """
    layout: gl.constexpr = s.type.layout
    turn = gl.arange(0, s.shape[2], axis_layout(layout, 3, 2))[None, None, :]
    lane = gl.arange(0, LANES, axis_layout(layout, 3, 1))[None, :, None]
    return turn // PAIR * (LANES * PAIR) + turn % PAIR, lane * PAIR


@gluon.jit
def may_attend(s, query_at, key, keys, CAUSAL: gl.constexpr):
    """Return where the mask allows scores in the layout of ``by_lanes``: [rows, LANES, n].

    Only the layout of ``s`` is used. ``query_at`` holds the positions of the rows, ``key`` is the
    tile's first key, and ``keys`` the number of keys.
    """
    fixed, lane = key_offsets(s)
    if CAUSAL:  # this also excludes padding: no query attends beyond the last key
        allowed = fixed <= query_at[:, None, None] - key - lane
    else:
        allowed = fixed < keys - key - lane
    return allowed


@gluon.jit
def multiply_wide(one, other):
    """The 64-bit product of two non-negative 32-bit numbers, in one instruction."""
    return one.to(gl.uint32).to(gl.int64) * other.to(gl.uint32).to(gl.int64)


@gluon.jit
def row_pointers(view, flat, rows, dims, heads):
    """Pointers to elements [rows, dims] of one head of a view."""
    batch, head = (flat // heads).to(gl.int64), (flat % heads).to(gl.int64)
    first = view.data + batch * view.batch + head * view.head
    return first + rows[:, None].to(gl.int64) * view.row + dims[None, :]
