# mypy: ignore-errors
"""What the kernels for Hopper share: rings of tiles, the split of work, and layouts of products.

One warp loads: it has the copy engine (TMA) fill a ring of tiles in shared memory. Warpgroups (four
warps each) multiply, 64 rows each: while one takes exponentials, the products of another run. Each
place of a ring has two barriers: ``full`` after a load, ``empty`` after all readers have released
it. A barrier's phase changes with each round.

There are as many programs as multiprocessors, and each processes several items. The loading warp
takes the number of the next item but one from a global counter, so a slow program gets fewer items,
and sends it to the warpgroups in shared memory. With a causal mask an item is a long block and a
short one of the same head; the last items are single blocks, the short ones at the end. Without a
mask the last items may be fewer than the programs: a launch of its own splits them into shares of
steps (tiles), and small kernels join the partial results.

Callers: ``forward``, ``columns``, ``backward``, ``top``.

Test: ``pytest tests/kernels/test_hopper.py -k dealt_out``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from regard.kernels import sizes
from regard.kernels.plan import Work

# Kernels are not compiled anew for these. Heads take few values, and most calls have 1 group.
NOT_SPECIALIZED = [name for name in Work._fields if name not in ("heads", "groups")]
LN2 = gl.constexpr(sizes.LN2)
NOTHING = gl.constexpr(-3.0e38)  # as in triton/tiles.py
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
    """The layout of a vector along one axis of a tensor."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def neg_lse_by_copy(D):
    """Whether the columns pass has the copy engine load neg_lse, with the queries.

    At a width of 128 the products keep shared memory busy, and loads from the cache are faster.
    """
    return D == 64


@gluon.jit
def by_fours(place):
    """The place of a number where a lane's next pair follows each of its pairs."""
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
    """The first place of a ring; see ``next_place``."""
    return gl.to_tensor(0), gl.to_tensor(0)


@gluon.jit
def next_place(place, STAGES: gl.constexpr):
    """The place after one in a ring: its slot, and whether the round is odd."""
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
    """Tell the loading warp that this reader is done with a place."""
    mbarrier.arrive(ring[2].index(place[0]), count=1)


@gluon.jit
def wait_for_previous_launch():
    """Wait until the previous launch has ended, and let the next one begin as programs end.

    When a launch begins, all programs of the previous one have passed this point. So all launches
    before that have ended, and their results can be read at once.
    """
    gl.inline_asm_elementwise(
        "{ griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1; }", "=r,r",
        [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def count_done_block(Done, flat, begin, end):
    """Count a finished block, if the columns pass begins with its head."""
    if (flat >= begin) & (flat < end):
        gl.atomic_add(Done + flat, 1, sem="release")


@gluon.jit
def is_done(Done, flat, blocks):
    """Whether all blocks of a head are done: then their results can be read, by copies too."""
    all_of_them = gl.inline_asm_elementwise(
        "{ .reg .pred p; fence.acq_rel.gpu; fence.proxy.async.global; setp.eq.s32 p, $1, $2; "
        "vote.sync.all.pred p, p, -1; selp.b32 $0, 1, 0, p; }",
        "=r,r,r", [gl.load(Done + flat, volatile=True), UNSET_COUNTER + blocks], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    return all_of_them > 0


@gluon.jit(do_not_specialize=["count"])
def reset_counters(Counters, count, WARPS: gl.constexpr):
    """Set counters to their start. The next launch may begin at once, and wait for this."""
    gl.inline_asm_elementwise(
        "{ griddepcontrol.launch_dependents; mov.b32 $0, $1; }", "=r,r",
        [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = gl.program_id(0) * (32 * WARPS) + gl.arange(0, 32 * WARPS, layout)
    gl.store(Counters + at, UNSET_COUNTER, mask=at < count)


@gluon.jit
def _share(program, work):
    """The steps that a program takes, as a range over the steps of all split items."""
    steps = work.items % work.programs * work.steps
    start = gl.minimum(program * work.share, steps)
    return start, gl.minimum(start + work.share, steps)


@gluon.jit
def steps_within(program, number, work):
    """The range of steps that a program takes of one split item."""
    start, end = _share(program, work)
    before = number * work.steps
    return gl.maximum(start - before, 0), gl.minimum(end - before, work.steps)


@gluon.jit
def first_split_item(work):
    """The number of the first split item; items are split that follow the last full round."""
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
    """Take the number of the item after the next from the counter."""
    if SPLIT:
        number = after + 1
    else:
        wait_for_previous_launch()  # the previous launch may reset the counter
        number = 2 * work.programs + gl.atomic_add(Counter, 1, sem="relaxed") - UNSET_COUNTER
    return number


@gluon.jit
def end_of(work, SPLIT: gl.constexpr):
    """One more than the number of a program's last item."""
    if SPLIT:
        start, end = _share(gl.program_id(0), work)
        last = first_split_item(work) + gl.where(start < end, (end - 1) // work.steps + 1, 0)
    else:
        last = work.items + work.single_items
    return last


@gluon.jit
def _from_the_middle(number, work):
    """Reverse the order of items, except that each program starts with an item from the middle.

    ``plan._early_heads`` tells the forward pass which heads those of the middle belong to.
    """
    half, late = work.items // 2, work.items - 1 - number
    reordered = gl.where(late < half, late, late + work.programs)
    reordered = gl.where(number < work.programs, half + work.programs - 1 - number, reordered)
    return gl.where(work.items < 4 * work.programs, late, reordered)


@gluon.jit
def item_at(number, work, CAUSAL: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """Return the head of an item (over all sequences), its first block, and its number of blocks.

    With a causal mask an item is a long block and a short one: of queries the long ones are the
    last. The last items are single blocks: all the long ones, then the short ones. Passes over
    blocks of keys (KEYS) begin where the others end, whose last reads are still in the cache.
    Without a mask their first items come from the middle, so they need not wait for the last blocks
    of the forward pass.
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
    """Return the head of one half of an item, and its block."""
    flat, block, _ = item
    return flat, gl.where(half == 0, block, work.blocks - 1 - block)


@gluon.jit
def message_of(number, work, CAUSAL: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """The first block of an item as a message; see ``unpack_message``."""
    flat, block, _ = item_at(number, work, CAUSAL, KEYS, SPLIT)
    return gl.where(number < end_of(work, SPLIT), flat, -1), 2 * block


@gluon.jit
def allocate_messages(SLOTS: gl.constexpr):
    """Allocate a message about the next block, beside each place of a ring of blocks."""
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
    """Return the head, the block, and which half of its item it is.

    The head is negative if no block is left.
    """
    flat, both = message
    return flat, both >> 1, both & 1


@gluon.jit
def uniform_in_warp(x):
    """Tell the compiler that all threads of a warp hold the same number."""
    return gl.inline_asm_elementwise(
        "{ shfl.sync.idx.b32 $0, $1, 0, 31, -1; }", "=r,r", [x], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def scheduling_barrier(x):
    """Keep the compiler from moving code across this point.

    ptxas starts products late and waits for them early, but not across a branch. This is a branch
    that is never taken: ``x`` is not negative.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $1, 0; AGAIN: @p bra ON; nanosleep.u32 32; bra AGAIN; "
        "ON: mov.b32 $0, $1; }",
        "=r,r", [x], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def team_part(half, PART: gl.constexpr, CAUSAL: gl.constexpr):
    """Which ROWS of a block a team takes.

    With a causal mask the rows in one half have a tile more than those in the other, where the
    lengths differ by a multiple of tiles. In an item's second block each team takes the other half,
    so all teams have as many tiles.
    """
    if CAUSAL:
        return PART ^ half * (TEAMS // 2)
    return PART


@gluon.jit
def partial_slot(program, begins):
    """The slot in which a program stores its part of a split block: it has two at most.

    One block may begin before the program's share, and another begins in it and ends after it.
    """
    return program * 2 + gl.where(begins, 1, 0)


@gluon.jit
def by_lanes(tile):
    """Reshape scores [rows, keys] to [rows, LANES, .]: a thread holds one lane of a row."""
    R: gl.constexpr = tile.shape[0]
    N: gl.constexpr = tile.shape[1]
    parts = gl.reshape(tile, [R, N // (LANES * PAIR), LANES, PAIR])
    return gl.reshape(gl.permute(parts, (0, 2, 1, 3)), [R, LANES, N // LANES])


@gluon.jit
def split_row_pairs(x):
    """Split numbers of rows into those of each thread's two rows: [rows // 2, 1] each."""
    R: gl.constexpr = x.shape[0]
    parts = gl.permute(gl.reshape(x, [R // BAND, 2, BAND // 2]), (0, 2, 1))
    one, other = gl.split(gl.reshape(parts, [R // 2, 2]))
    return one[:, None], other[:, None]


@gluon.jit
def split_lane_halves(parts):
    """Split numbers of lanes, [rows, LANES, .], into the first and the second half."""
    N: gl.constexpr = parts.shape[2]
    halves = gl.reshape(parts, [parts.shape[0], parts.shape[1], 2, N // 2])
    return gl.split(gl.permute(halves, (0, 1, 3, 2)))


@gluon.jit
def key_offsets(s):
    """Offsets in a tile of the keys of scores by lanes: their sum is the whole offset.

    The first is known at compile time, the second depends on the lane.
    """
    layout: gl.constexpr = s.type.layout
    turn = gl.arange(0, s.shape[2], axis_layout(layout, 3, 2))[None, None, :]
    lane = gl.arange(0, LANES, axis_layout(layout, 3, 1))[None, :, None]
    return turn // PAIR * (LANES * PAIR) + turn % PAIR, lane * PAIR


@gluon.jit
def may_attend(s, query_at, key, keys, CAUSAL: gl.constexpr):
    """Which scores by lanes are allowed by the mask, for a tile that begins at ``key``."""
    fixed, lane = key_offsets(s)
    if CAUSAL:  # causal: no query attends beyond the last key
        allowed = fixed <= query_at[:, None, None] - key - lane
    else:
        allowed = fixed < keys - key - lane
    return allowed


@gluon.jit
def multiply_wide(one, other):
    """The 64-bit product of two numbers that are not negative: one instruction."""
    return one.to(gl.uint32).to(gl.int64) * other.to(gl.uint32).to(gl.int64)


@gluon.jit
def row_pointers(view, flat, rows, dims, heads):
    """Pointers to some rows of one head."""
    batch, head = (flat // heads).to(gl.int64), (flat % heads).to(gl.int64)
    first = view.data + batch * view.batch + head * view.head
    return first + rows[:, None].to(gl.int64) * view.row + dims[None, :]
