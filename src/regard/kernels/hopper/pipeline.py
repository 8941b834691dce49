# mypy: ignore-errors
"""What the kernels for Hopper share: rings of tiles, blocks of work, and who holds what.

One warp loads: it asks the copy engine for tiles, as many ahead as there is room for. Groups of
four warps multiply and weigh, each its own 64 rows: while one takes exponentials, the products of
another are under way. A tile's place in a ring has two barriers: ``full`` once it is loaded,
``empty`` once all groups are through with it; a barrier's phase changes each time round.

There are as many programs as multiprocessors, and each has one item of work after another. Its
loading warp draws the number of the next one but one, so that a program that is slower has fewer,
and leaves word of it to the others. Of a causal head an item is a long block and the short one that
makes up for it; the last ones are handed out one by one, the short ones at the end. Without a mask
there may be fewer items left than programs: in a launch of their own these are cut into steps,
tiles that go through the ring, and every program has a share of those. Small kernels put the parts
together.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from regard.kernels.plan import Work

# No kernel is compiled anew for these. Heads are few, and most calls have no groups to divide by.
NOT_SPECIALIZED = [name for name in Work._fields if name not in ("heads", "groups")]
LN2 = gl.constexpr(0.6931471805599453)
NOTHING = gl.constexpr(-3.0e38)  # as in tiles.py
LOWEST = gl.constexpr(-1.0e37)
ROWS = gl.constexpr(64)  # of a product that a group of four warps holds
BAND = gl.constexpr(16)  # rows of those that a warp holds: a thread has two, 8 apart
BLOCK = gl.constexpr(128)  # rows of a tile
TEAMS = gl.constexpr(4)  # groups of warps that share tiles, each with ROWS rows of its own
LANES = gl.constexpr(4)  # threads that share a row
UNSET_COUNTER = gl.constexpr(-8388608)  # from where items are counted: the bits of -inf
PAIR = gl.constexpr(2)  # neighbours in a row that one thread holds


@gluon.constexpr_function
def axis_layout(layout, rank, axis):
    """The layout of a vector along one axis of a tensor."""
    for other in reversed(range(rank)):
        if other != axis:
            layout = gl.SliceLayout(other, layout)
    return layout


@gluon.constexpr_function
def neg_lse_by_copy(D):
    """Whether the second pass has what queries lose copied to shared memory with them.

    At 128 the products keep that memory busy, and it is faster to read it from the cache.
    """
    return D == 64


@gluon.jit
def by_fours(place):
    """The place in a tile's row of numbers where a lane finds its next pair beside each."""
    return place & -16 | (place & 6) << 1 | place >> 2 & 2 | place & 1


@gluon.jit
def ring_of(desc, TILES: gl.constexpr, SLOTS: gl.constexpr, READERS: gl.constexpr):
    """Room for some tiles, and barriers for as many places: full, and empty for all readers."""
    tiles = gl.allocate_shared_memory(desc.dtype, [TILES] + desc.block_shape, desc.layout)  # noqa: RUF005
    full = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [TILES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=READERS)
    return tiles, full, empty


@gluon.jit
def ring_start():
    """Where a ring begins; see ``following``."""
    return gl.to_tensor(0), gl.to_tensor(0)


@gluon.jit
def next_place(place, STAGES: gl.constexpr):
    """The place after one in a ring: its number, and whether that is an odd time round."""
    slot, odd = place
    last = slot == STAGES - 1
    return gl.where(last, 0, slot + 1), gl.where(last, odd ^ 1, odd)


@gluon.jit
def wait_until_empty(ring, place):
    """A tile's place and its barrier, once all readers are through with what was there."""
    slot, odd = place
    mbarrier.wait(ring[2].index(slot), odd ^ 1)
    return ring[0].index(slot), ring[1].index(slot)


@gluon.jit
def wait_until_full(ring, place):
    """A tile, once it is loaded."""
    slot, odd = place
    mbarrier.wait(ring[1].index(slot), odd)
    return ring[0].index(slot)


@gluon.jit
def release(ring, place):
    mbarrier.arrive(ring[2].index(place[0]), count=1)


@gluon.jit
def wait_for_previous_launch():
    """Wait for the launch before this one, and let the next one begin as programs end.

    When a launch begins, all programs of the one before have passed this: what was launched before
    that one has ended, and can be read at once.
    """
    gl.inline_asm_elementwise(
        "{ griddepcontrol.wait; griddepcontrol.launch_dependents; mov.b32 $0, $1; }", "=r,r",
        [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def count_done_block(Done, flat, begin, end):
    """Count a block of which all is told that the second pass needs, of heads it begins with."""
    if (flat >= begin) & (flat < end):
        gl.atomic_add(Done + flat, 1, sem="release")


@gluon.jit
def is_done(Done, flat, blocks):
    """Whether so many are told of a head. Then what is told can be read, by copies too."""
    all_of_them = gl.inline_asm_elementwise(
        "{ .reg .pred p; fence.acq_rel.gpu; fence.proxy.async.global; setp.eq.s32 p, $1, $2; "
        "vote.sync.all.pred p, p, -1; selp.b32 $0, 1, 0, p; }",
        "=r,r,r", [gl.load(Done + flat, volatile=True), UNSET_COUNTER + blocks], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    return all_of_them > 0


@gluon.jit(do_not_specialize=["count"])
def reset_counters(Counters, count, WARPS: gl.constexpr):
    """So many counts, begun. The next launch may begin at once, and wait for it."""
    gl.inline_asm_elementwise(
        "{ griddepcontrol.launch_dependents; mov.b32 $0, $1; }", "=r,r",
        [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    at = gl.program_id(0) * (32 * WARPS) + gl.arange(0, 32 * WARPS, layout)
    gl.store(Counters + at, UNSET_COUNTER, mask=at < count)


@gluon.jit
def _share(program, work):
    """Which steps of the last items a program has, counted through all of them."""
    steps = work.items % work.programs * work.steps
    start = gl.minimum(program * work.share, steps)
    return start, gl.minimum(start + work.share, steps)


@gluon.jit
def steps_within(program, number, work):
    """From which step to which one of the items that are cut is a program's own."""
    start, end = _share(program, work)
    before = number * work.steps
    return gl.maximum(start - before, 0), gl.minimum(end - before, work.steps)


@gluon.jit
def first_split_item(work):
    """The first of the items that are cut: those after the last full round."""
    return work.items // work.programs * work.programs


@gluon.jit
def first_numbers(work, SPLIT: gl.constexpr):
    """The number of a program's first item, and of its second one."""
    if SPLIT:
        number = first_split_item(work) + _share(gl.program_id(0), work)[0] // work.steps
        after = number + 1
    else:
        number = gl.program_id(0)
        after = number + work.programs
    return number, after


@gluon.jit
def next_number(after, Counter, work, SPLIT: gl.constexpr):
    """The number of the item after the next: who comes first has the first that is left."""
    if SPLIT:
        found = after + 1
    else:
        wait_for_previous_launch()  # it may be what begins the count
        found = 2 * work.programs + gl.atomic_add(Counter, 1, sem="relaxed") - UNSET_COUNTER
    return found


@gluon.jit
def end_of(work, SPLIT: gl.constexpr):
    """The number after that of a program's last item."""
    if SPLIT:
        start, end = _share(gl.program_id(0), work)
        found = first_split_item(work) + gl.where(start < end, (end - 1) // work.steps + 1, 0)
    else:
        found = work.items + work.single_items
    return found


@gluon.jit
def _from_the_middle(number, work):
    """The last item first, but before it one of the middle for each program, if there are enough.

    Which heads those of the middle belong to, ``specialised._begins_with`` tells the forward pass.
    """
    half, late = work.items // 2, work.items - 1 - number
    found = gl.where(late < half, late, late + work.programs)
    found = gl.where(number < work.programs, half + work.programs - 1 - number, found)
    return gl.where(work.items < 4 * work.programs, late, found)


@gluon.jit
def item_at(number, work, CAUSAL: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """Which of all heads has an item, its first block, and how many blocks it has.

    Under a causal mask an item is a long block and the short one that makes up for it: of queries
    the long ones are the last. Of the last items all long blocks come first, then the short ones.
    The passes over blocks of KEYS start where others end: what these read last is in the cache.
    Without a mask the very first are from the middle, so that they need not wait for the last.
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
    """Which of all heads, and which block of it."""
    flat, block, _ = item
    return flat, gl.where(half == 0, block, work.blocks - 1 - block)


@gluon.jit
def message_of(number, work, CAUSAL: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """The first block of an item, as ``block_told`` takes it."""
    flat, block, _ = item_at(number, work, CAUSAL, KEYS, SPLIT)
    return gl.where(number < end_of(work, SPLIT), flat, -1), 2 * block


@gluon.jit
def allocate_messages(SLOTS: gl.constexpr):
    """Room for word of what comes next, beside each place for what is loaded of a block."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    return gl.allocate_shared_memory(gl.int64, [SLOTS, 1], plain)


@gluon.jit
def send_next_block(
    messages, place, item, half, after, work,
    CAUSAL: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr,
):  # fmt: skip
    """Leave word of the next block, before what is loaded of this one is under way."""
    flat, both = message_of(after, work, CAUSAL, KEYS, SPLIT)
    if half + 1 < item[2]:
        flat, block = block_of(item, half + 1, work)
        both = 2 * block + half + 1
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    both = flat.to(gl.int64) << 32 | both.to(gl.int64)
    messages.index(place[0]).store(gl.full([1], both, gl.int64, layout))


@gluon.jit
def first_message(work, CAUSAL: gl.constexpr, KEYS: gl.constexpr, SPLIT: gl.constexpr):
    """The first of a program's blocks, as ``next_told``."""
    return message_of(first_numbers(work, SPLIT)[0], work, CAUSAL, KEYS, SPLIT)


@gluon.jit
def receive_next_block(messages, place):
    """The next block, once what was loaded of this one is there; see ``block_told``."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    both = gl.max(messages.index(place[0]).load(layout), 0)
    return uniform_in_warp((both >> 32).to(gl.int32)), uniform_in_warp(both.to(gl.int32))


@gluon.jit
def unpack_message(message):
    """Which of all heads, below 0 if no block is left, which block, and which half of its item."""
    flat, both = message
    return flat, both >> 1, both & 1


@gluon.jit
def uniform_in_warp(x):
    """A number that all threads of a warp have, so that the compiler knows it."""
    return gl.inline_asm_elementwise(
        "{ shfl.sync.idx.b32 $0, $1, 0, 31, -1; }", "=r,r", [x], gl.int32, is_pure=True, pack=1
    )


@gluon.jit
def scheduling_barrier(x):
    """What comes before stays before: ptxas begins products late and waits for them early.

    But not across a branch. This is one, never taken: ``x`` is not negative.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ge.s32 p, $1, 0; AGAIN: @p bra ON; nanosleep.u32 32; bra AGAIN; "
        "ON: mov.b32 $0, $1; }",
        "=r,r", [x], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def team_part(half, PART: gl.constexpr, CAUSAL: gl.constexpr):
    """Which ROWS of a block are a team's.

    Under a causal mask those in one half have a tile more than those in the other, where queries
    and keys end a multiple of tiles apart. In an item's second block a team is in the other half,
    so that all teams have as many.
    """
    if CAUSAL:
        return PART ^ half * (TEAMS // 2)
    return PART


@gluon.jit
def partial_slot(program, begins):
    """Where a program leaves what it has of a block that is cut: of two such at most.

    One may begin before its share does, and one begins in it and ends after it.
    """
    return program * 2 + gl.where(begins, 1, 0)


@gluon.jit
def by_lanes(tile):
    """A tile of scores as [rows, LANES, .]: a thread has one lane of a row, all of it."""
    R: gl.constexpr = tile.shape[0]
    N: gl.constexpr = tile.shape[1]
    parts = gl.reshape(tile, [R, N // (LANES * PAIR), LANES, PAIR])
    return gl.reshape(gl.permute(parts, (0, 2, 1, 3)), [R, LANES, N // LANES])


@gluon.jit
def split_row_pairs(x):
    """What each row has, as what the one and the other row of two have: [rows // 2, 1]."""
    R: gl.constexpr = x.shape[0]
    parts = gl.permute(gl.reshape(x, [R // BAND, 2, BAND // 2]), (0, 2, 1))
    one, other = gl.split(gl.reshape(parts, [R // 2, 2]))
    return one[:, None], other[:, None]


@gluon.jit
def split_lane_halves(parts):
    """What lanes have, [rows, LANES, .], as its first half and its last."""
    N: gl.constexpr = parts.shape[2]
    halves = gl.reshape(parts, [parts.shape[0], parts.shape[1], 2, N // 2])
    return gl.split(gl.permute(halves, (0, 1, 3, 2)))


@gluon.jit
def key_offsets(s):
    """Where in a tile the keys of scores by lanes lie: a part known beforehand, and the lane's."""
    layout: gl.constexpr = s.type.layout
    turn = gl.arange(0, s.shape[2], axis_layout(layout, 3, 2))[None, None, :]
    lane = gl.arange(0, LANES, axis_layout(layout, 3, 1))[None, :, None]
    return turn // PAIR * (LANES * PAIR) + turn % PAIR, lane * PAIR


@gluon.jit
def may_attend(s, query_at, key, keys, CAUSAL: gl.constexpr):
    """Which of a tile's scores by lanes count, where ``key`` is its first key."""
    known, lane = key_offsets(s)
    if CAUSAL:  # no query sees beyond the last key
        may = known <= query_at[:, None, None] - key - lane
    else:
        may = known < keys - key - lane
    return may


@gluon.jit
def multiply_wide(one, other):
    """The product of two numbers in 64 bits: not negative, so that it is one instruction."""
    return one.to(gl.uint32).to(gl.int64) * other.to(gl.uint32).to(gl.int64)


@gluon.jit
def row_pointers(view, flat, rows, dims, heads):
    """Where some rows of one of all heads lie."""
    batch, head = (flat // heads).to(gl.int64), (flat % heads).to(gl.int64)
    first = view.data + batch * view.batch + head * view.head
    return first + rows[:, None].to(gl.int64) * view.row + dims[None, :]
