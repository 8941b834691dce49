# mypy: ignore-errors
"""The top keys of each query for Hopper; triton/rows.py describes the method.

The forward pass has computed a threshold, so one pass over the keys collects the candidates, the
scores that reach it. Each thread stores its candidates in its slots of shared memory. At the end of
a block they move to a list for each row, which two threads sort with a sorting network. In Gluon a
thread cannot address shared memory freely, so this part is inline PTX. All teams run as one role;
see teams.py.

In: query, key, ``Threshold``, lse. Out: ``Weights`` and ``Keys`` [batch, heads, queries, COUNT],
and ``Unfinished``, which marks rows for triton/rows.search. Called by ``launch.top``.

Test: ``pytest tests/kernels/test_hopper.py -k top_keys_are_the_definition``.
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
    TEAMS,
    axis_layout,
    block_of,
    by_lanes,
    end_of,
    first_message,
    first_numbers,
    item_at,
    may_attend,
    multiply_wide,
    next_number,
    next_place,
    ring_start,
    send_next_block,
    split_lane_halves,
    split_row_pairs,
    team_part,
    unpack_message,
    wait_for_previous_launch,
    wait_until_empty,
)
from regard.kernels.hopper.sorting import eight_highest
from regard.kernels.hopper.teams import (
    LINES,
    OWN_ROWS,
    STRIP,
    TEAM_ROWS,
    TILES,
    load_team_rows,
    messages_in,
    read,
    read_two,
    receive_next_block_per_warp,
    release_per_warp,
    ring_in,
    room_after,
    room_begins_at,
    scores,
    team_of_thread,
    team_rows_index,
    wait_until_full_per_warp,
    write_marks,
)
from regard.kernels.plan import Work

THREADS = gl.constexpr(ROWS // 2 * LANES)  # threads of a team; each has a lane of two rows
PAIRS = gl.constexpr(BLOCK // (LANES * PAIR))  # pairs of neighbouring scores per thread and row
FOUR = gl.constexpr(4)  # consecutive scores of a thread: a pair from each of its rows
ENTRY = gl.constexpr(8)  # bytes of a score and its key, or of a pair of scores
SLOTS = gl.constexpr(22)  # slots of a thread; its two rows fill them from opposite ends
SPARE = gl.constexpr(4)  # slots for overrun: addresses are clamped only after every SPARE pairs
USUALLY = gl.constexpr(8)  # slots per row that nearly always suffice
SPAN = gl.constexpr(SLOTS * ENTRY)  # bytes of a thread's slots
ROOM = gl.constexpr(32 * SPAN)  # bytes of a warp's slots
LISTED = gl.constexpr(16)  # entries of a row that the network sorts, half in each of two threads
MOST = gl.constexpr(28)  # most entries of a row that this kernel can sort
LIST = gl.constexpr(240)  # bytes from one list to the next: entries, then the list's length
LENGTH = gl.constexpr(MOST * ENTRY)
MAX_TOP_KEYS = gl.constexpr(sizes.MAX_TOP_KEYS)
BITS_BASE = gl.constexpr(
    8388608.0
)  # 2**23: adding an integer below 2**23 sets the low bits of the float
OVERFLOWED = gl.constexpr(63)  # a length that marks overflow: no list is so long


@gluon.constexpr_function
def _query_blocks(D):
    """The number of ring slots for blocks of queries."""
    return 128 // D


@gluon.jit
def _load_key_tile(ring, place, desc, batch, head, key, D: gl.constexpr):
    """Load a tile of keys by strips, once its ring slot is empty."""
    _, full = wait_until_empty(ring, place)
    mbarrier.expect(full, BLOCK * D * 2)
    for strip in gl.static_range(D // STRIP):
        at = [batch, head, key, strip * STRIP]
        tile = ring[0].index(place[0] * (D // STRIP) + strip)
        tma.async_copy_global_to_shared(desc, at, full, tile)


@gluon.jit
def _load_keys(loader, D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr):
    """Run the loading warp: load blocks of queries, and tiles of keys from last to first."""
    q_ring, messages, Counter, k_ring, q_desc, k_desc, work, offset, tiles, addressable = loader
    QUERIES: gl.constexpr = _query_blocks(D)
    place = ring_start()
    q_place = ring_start()
    number, after = first_numbers(work, False)
    end = gl.where(addressable, end_of(work, False), 0)
    while number < end:
        item = item_at(number, work, CAUSAL, False, False)
        for half in range(item[2]):
            flat, block = block_of(item, half, work)
            batch, head = flat // work.heads, flat % work.heads
            row = block * (TEAMS * ROWS)
            wait_until_empty(q_ring, q_place)
            send_next_block(messages, q_place, item, half, after, work, CAUSAL, False, False)
            load_team_rows(q_ring, q_place, q_desc, batch, head, row, half, D, CAUSAL)
            stop = _last_tile(row + (TEAMS - 1) * ROWS, offset, tiles, CAUSAL) + 1
            for i in range(stop):
                key = (stop - 1 - i) * BLOCK
                _load_key_tile(k_ring, place, k_desc, batch, head // work.groups, key, D)
                place = next_place(place, STAGES)
            q_place = next_place(q_place, QUERIES)
        number, after = after, next_number(after, Counter, work, False)


@gluon.jit
def _last_tile(row, offset, tiles, CAUSAL: gl.constexpr):
    """The last tile of keys to which any of the 64 queries from ``row`` attends."""
    if CAUSAL:
        return gl.minimum(tiles - 1, (row + ROWS - 1 + offset) // BLOCK)
    return tiles - 1


@gluon.jit
def _in_fours(s):
    """Reshape scores by lanes to [TEAM_ROWS // 2, LANES, N, FOUR], a thread's two rows together."""
    N: gl.constexpr = s.shape[2] // PAIR
    parts = gl.reshape(s, [TEAM_ROWS // BAND, 2, BAND // 2, LANES, N, PAIR])
    return gl.reshape(gl.permute(parts, (0, 2, 3, 4, 1, 5)), [TEAM_ROWS // 2, LANES, N, FOUR])


@gluon.constexpr_function
def _keep_ptx(number, spare):
    """PTX: store a pair of scores of each row in a slot if one of them reaches the row's threshold.

    The first row fills a thread's slots from the first up, the second from the last down. In: the
    pairs, thresholds, each row's next slot, the bits of the kept pairs, and each row's end slot, to
    which the next slot is clamped after every ``spare`` pairs.
    """
    bit = f"0f{0x3F800000 + (number << 23):08X}"
    lines = [".reg .pred p;", ".reg .f32 high;"]
    for row in range(2):
        near, far, at, kept = f"${4 + 2 * row}", f"${5 + 2 * row}", f"${row}", f"${2 + row}"
        lines += [
            f"max.f32 high, {near}, {far};",
            f"setp.ge.f32 p, high, ${8 + row};",
            f"@p st.shared.v2.f32 [{at}], {{{near}, {far}}};",
            f"@p add.s32 {at}, {at}, {8 - 16 * row};",
            f"@p add.f32 {kept}, {kept}, {bit};",
        ]
        if number % spare == 0:
            lines += [f"{'max' if row else 'min'}.s32 {at}, {at}, ${14 + row};"]
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def _keep(fours, thresholds, at, kept, ends, FIRST: gl.constexpr):
    """Keep the pairs in which a score reaches its row's threshold; ``fours`` is from ``_in_fours``.

    Pairs are stored from last to first. Return the next slots, and the kept pairs of the tile as
    the low bits of a float of at least 2**23.
    """
    N: gl.constexpr = fours.shape[2]
    if N > 1:
        halves = gl.reshape(fours, [TEAM_ROWS // 2, LANES, 2, N // 2, FOUR])
        near, far = gl.split(gl.permute(halves, (0, 1, 3, 4, 2)))
        at, kept = _keep(far, thresholds, at, kept, ends, FIRST + N // 2)
        at, kept = _keep(near, thresholds, at, kept, ends, FIRST)
    else:
        of_lanes: gl.constexpr = at[0].type.layout
        first, second = gl.split(gl.reshape(fours, [TEAM_ROWS // 2, LANES, 2, PAIR]))
        one, other = gl.split(first)
        next_one, next_other = gl.split(second)
        results = gl.inline_asm_elementwise(
            _keep_ptx(FIRST, SPARE), "=&r,=&r,=&f,=&f,f,f,f,f,f,f,0,1,2,3,r,r",
            [
                gl.convert_layout(one, of_lanes), gl.convert_layout(next_one, of_lanes),
                gl.convert_layout(other, of_lanes), gl.convert_layout(next_other, of_lanes),
                thresholds[0], thresholds[1], at[0], at[1], kept[0], kept[1], ends[0], ends[1],
            ],
            (gl.int32, gl.int32, gl.float32, gl.float32), is_pure=False, pack=1,
        )  # fmt: skip
        at, kept = (results[0], results[1]), (results[2], results[3])
    return at, kept


@gluon.constexpr_function
def _add_keys_ptx():
    """PTX: turn the kept pairs of two tiles into entries, each a score and its key.

    If both scores of a pair reach the threshold, the second becomes a new entry. In, for both rows:
    the bits of the kept pairs of the current tile ($2, $3) and the previous tile ($4, $5), the slot
    of the first pair ($6, $7), thresholds ($8, $9), next slots ($0, $1) and end slots ($13, $14);
    and the thread's first key of the current tile ($10). A row whose next slot is its end slot has
    overflowed and gets no keys. A warp loops while any of its threads has a pair left.
    """
    names = "left", "slot", "bit", "key", "next"
    lines = [
        ".reg .pred p<2>, q, here<2>, there<2>;",
        f".reg .b32 {', '.join(f'{name}<2>' for name in names)};",
        ".reg .f32 near<2>, far<2>, high<2>;",
        "prmt.b32 left0, $2, $4, 0x5410;", "prmt.b32 left1, $3, $5, 0x5410;",
        "setp.ne.s32 p0, $0, $13;", "setp.ne.s32 p1, $1, $14;",
        "selp.b32 left0, left0, 0, p0;", "selp.b32 left1, left1, 0, p1;",
        "mov.b32 slot0, $6;", "mov.b32 slot1, $7;",
        "LOOP:",
        "setp.ne.u32 p0, left0, 0;", "setp.ne.u32 p1, left1, 0;", "or.pred q, p0, p1;",
        "vote.sync.any.pred q, q, -1;", "@!q bra DONE;",
    ]  # fmt: skip
    of_rows = [
        [
            f"@p{row} ld.shared.v2.f32 {{near{row}, far{row}}}, [slot{row}];",
            f"bfind.u32 bit{row}, left{row};", f"shl.b32 next{row}, 1, bit{row};",
            f"xor.b32 left{row}, left{row}, next{row};",
            f"mad.lo.s32 key{row}, bit{row}, 8, $10;", f"add.s32 next{row}, key{row}, 1;",
            f"setp.ge.and.f32 here{row}, near{row}, ${8 + row}, p{row};",
            f"setp.ge.and.f32 there{row}, far{row}, ${8 + row}, here{row};",
            f"selp.f32 high{row}, near{row}, far{row}, here{row};",
            f"selp.b32 key{row}, key{row}, next{row}, here{row};",
            f"@p{row} st.shared.v2.b32 [slot{row}], {{high{row}, key{row}}};",
            f"@there{row} st.shared.v2.b32 [${row}], {{far{row}, next{row}}};",
            f"@there{row} add.s32 ${row}, ${row}, {on};",
            f"{end}.s32 ${row}, ${row}, ${13 + row};",
            f"add.s32 slot{row}, slot{row}, {on};",
        ]
        for row, end, on in ((0, "min", 8), (1, "max", -8))
    ]  # fmt: skip
    # Interleave the instructions of both rows, so that their loads overlap.
    lines += [line for both in zip(*of_rows, strict=True) for line in both]
    return "{ " + " ".join([*lines, "bra LOOP;", "DONE:"]) + " }"


@gluon.jit
def _add_keys(at, kept, before, since, thresholds, key, ends):
    """Add keys to the kept scores of a tile and the previous tile."""
    return gl.inline_asm_elementwise(
        _add_keys_ptx(), "=&r,=&r,f,f,f,f,r,r,f,f,r,0,1,r,r",
        [
            kept[0], kept[1], before[0], before[1], since[0], since[1], thresholds[0],
            thresholds[1], key, at[0], at[1], ends[0], ends[1],
        ],
        (gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _opaque(x):
    """Hide a number's origin, so that its uses are not hoisted out of the loop over blocks."""
    return gl.inline_asm_elementwise(
        "{ mov.b32 $0, $1; }", "=r,r", [x], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def _sync_warp():
    """Make a warp's writes visible to all its threads; no other warp uses its lists."""
    gl.inline_asm_elementwise(
        "{ bar.warp.sync -1; mov.b32 $0, $1; }", "=r,r", [gl.to_tensor(0)], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def _entries(at):
    """Load scores and keys from shared memory, two entries at a time."""
    s, key = gl.inline_asm_elementwise(
        "{ ld.volatile.shared.v4.b32 {$0, $2, $1, $3}, [$4]; }", "=r,=r,=r,=r,r,r", [at],
        (gl.int32, gl.int32), is_pure=False, pack=2,
    )  # fmt: skip
    return s.to(gl.float32, bitcast=True), key


@gluon.jit
def _write(at, what):
    """Store integers at addresses of shared memory."""
    gl.inline_asm_elementwise(
        "{ st.shared.b32 [$1], $2; mov.b32 $0, $2; }", "=r,r,r", [at, what], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _list_ptx(slots, most, often, listed):
    """PTX: move entries from a thread's slots to the lists of its rows, in the same memory.

    $1: the first slot. $2, $3: the number of entries of the first row, from the first slot up, and
    of the second row, from the last slot down. $4, $5: each row's list address for an entry in the
    first slot. $6: the half of a list that this thread clears first. A row has at most ``most``
    entries, and rarely more than ``often``; if no row of the warp has more, fewer slots are read.
    """

    def moved(count):  # the first ``count`` entries of each row
        chosen = [i for i in range(slots) if min(i, slots - 1 - i) < count]
        lines = [
            f"ld.shared.v4.b32 {{s{i}, key{i}, s{i + 1}, key{i + 1}}}, [$1+{i * 8}];"
            for i in chosen[::2]
        ]
        lines += ["bar.warp.sync -1;"]  # from here, the slots' memory holds lists
        lines += [f"st.shared.v4.b32 [$6+{i * 16}], {{x, x, x, x}};" for i in range(listed // 4)]
        lines += ["bar.warp.sync -1;"]
        for i in chosen:
            for number, row in ((i, 0), (slots - 1 - i, 1)):
                if number < count:
                    lines += [
                        f"setp.gt.s32 p, ${2 + row}, {number};",
                        f"@p st.shared.v2.b32 [${4 + row}+{i * 8}], {{s{i}, key{i}}};",
                    ]
        return lines

    lines = [
        f".reg .pred p; .reg .b32 x, s<{slots}>, key<{slots}>;",
        "mov.b32 $0, $1;", "mov.b32 x, 0fFF61B1E6;",  # NOTHING
        f"setp.gt.s32 p, $2, {often};", f"setp.gt.or.s32 p, $3, {often}, p;",
        "vote.sync.any.pred p, p, -1;",
        "@p bra ALL;", *moved(often), "bra DONE;", "ALL:", *moved(most), "DONE:",
    ]  # fmt: skip
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def _list_of(lists, row):
    """The addresses of rows' lists, which reuse the slots of their warp."""
    return lists + row // BAND * ROOM + row % BAND * LIST


@gluon.constexpr_function
def _of_threads():
    """The layout [TEAM_ROWS // 2, LANES]: one number per thread, with rows as in a product."""
    return gl.DistributedLinearLayout(
        [],
        [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]],
        [[8, 0], [16, 0], [32, 0], [64, 0]],
        [],
        [128, 4],
    )


@gluon.jit
def _summed(hits, by):
    """The number of a row's entries in lower lanes, and the number in all lanes.

    The counts of the lanes are the bytes of one integer, each shifted left by ``by``.
    """
    hits = gl.sum(hits << by, 1)[:, None]
    return (hits * 0x01010100 >> by) & 0xFF, (hits * 0x01010101 >> 24) & 0xFF


@gluon.jit
def _list(slots, at, thresholds, lists):
    """Move the entries of each row from its threads' slots to the row's list."""
    of_threads: gl.constexpr = _of_threads()
    both = gl.arange(0, TEAM_ROWS // 2, gl.SliceLayout(1, of_threads))[:, None]
    by = gl.arange(0, LANES, gl.SliceLayout(0, of_threads))[None, :] * 8
    slots = gl.convert_layout(slots, of_threads)
    one = (gl.convert_layout(at[0], of_threads) - slots) // ENTRY
    other = SLOTS - 1 - (gl.convert_layout(at[1], of_threads) - slots) // ENTRY
    lost = (one + other > SLOTS) | (gl.maximum(one, other) >= SLOTS - SPARE)
    before, length = _summed(gl.where(lost, OVERFLOWED, one), by)
    other_before, other_length = _summed(gl.where(lost, OVERFLOWED, other), by)
    one = gl.where(length > MOST, 0, one)
    other = gl.where(other_length > MOST, 0, other)
    begin = _list_of(lists, both // (BAND // 2) * BAND + both % (BAND // 2))
    other_begin = begin + BAND // 2 * LIST
    to = begin + before * ENTRY
    other_to = other_begin + (other_before + other - SLOTS) * ENTRY
    half = begin + (by // 16) * (BAND // 2 * LIST) + (by // 8) % 2 * (LISTED // 2 * ENTRY)
    gl.inline_asm_elementwise(
        _list_ptx(SLOTS, SLOTS - SPARE - 1, USUALLY, LISTED), "=r,r,r,r,r,r,r",
        [slots, one, other, to, other_to, half], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    thresholds = (
        gl.convert_layout(thresholds[0], of_threads),
        gl.convert_layout(thresholds[1], of_threads),
    )
    _write(begin + LENGTH, gl.where(thresholds[0] == thresholds[0], length, OVERFLOWED))
    _write(other_begin + LENGTH, gl.where(thresholds[1] == thresholds[1], other_length, OVERFLOWED))
    _sync_warp()


@gluon.constexpr_function
def _by_pairs(many):
    """The layout [TEAM_ROWS, many] with a warp's rows as in a product, and two threads per row."""
    half = many // 2
    return gl.DistributedLinearLayout(
        [[0, bit] for bit in (1, 2, 4, 8) if bit < half],
        [[0, half], [1, 0], [2, 0], [4, 0], [8, 0]],
        [[16, 0], [32, 0], [64, 0], [128, 0]],
        [],
        [256, many],
    )


@gluon.jit
def _places(lists, N: gl.constexpr):
    """The addresses of the first N entries of each list."""
    layout: gl.constexpr = _by_pairs(N)
    row = gl.arange(0, TEAM_ROWS, gl.SliceLayout(1, layout))
    number = gl.arange(0, N, gl.SliceLayout(0, layout))
    return _list_of(lists, row)[:, None] + (number * ENTRY)[None, :]


@gluon.constexpr_function
def _order_ptx(listed, most):
    """PTX: the eight highest entries of a list in order, smaller keys first among equal scores.

    Each of two threads ranks every second entry by counting the entries that precede it. This is
    rare, so the code is short rather than fast: it runs for lists with a length ($4) above
    ``listed`` and up to ``most``, or with scores too close to order ($5). $1: the list. $2: the
    address for the highest entries. $3: 8 in the second thread, else 0. Out: $0, whether the list
    was ordered here, equal in both threads. A warp loops until all its lists are done.
    """
    lines = [
        ".reg .pred p, q, r, equal;", ".reg .f32 s, its_s;",
        ".reg .b32 x, at, end, key, rank, other, its_key;",
        f"setp.gt.s32 p, $4, {listed};", "selp.b32 x, 1, $5, p;",
        f"setp.gt.s32 p, $4, {most};", "selp.b32 x, 0, x, p;",
        "shfl.sync.bfly.b32 other, x, 1, 31, -1;", "or.b32 $0, x, other;",
        "setp.ne.s32 p, $0, 0;", "vote.sync.any.pred q, p, -1;", "@!q bra DONE;",
        "mad.lo.s32 at, $3, 4, $2;", "mov.b32 x, 0fFF61B1E6;",  # NOTHING
        "st.shared.v4.b32 [at], {x, x, x, x};", "st.shared.v4.b32 [at+16], {x, x, x, x};",
        "bar.warp.sync -1;",
        "mad.lo.s32 end, $4, 8, $1;", "selp.b32 end, end, $1, p;", "add.s32 at, $1, $3;",
        "NEXT:",
        "setp.lt.s32 p, at, end;", "vote.sync.any.pred q, p, -1;", "@!q bra ORDERED;",
        "@p ld.shared.v2.b32 {s, key}, [at];", "mov.b32 rank, 0;", "mov.b32 other, $1;",
        "COMPARE:",
        "setp.lt.and.s32 r, other, end, p;", "vote.sync.any.pred q, r, -1;", "@!q bra RANKED;",
        "@r ld.shared.v2.b32 {its_s, its_key}, [other];",
        "setp.eq.and.f32 equal, its_s, s, r;", "setp.lt.and.s32 equal, its_key, key, equal;",
        "setp.gt.and.f32 r, its_s, s, r;", "or.pred r, r, equal;",
        "@r add.s32 rank, rank, 1;", "add.s32 other, other, 8;", "bra COMPARE;",
        "RANKED:",
        "setp.lt.and.s32 r, rank, 8, p;", "mad.lo.s32 other, rank, 8, $2;",
        "@r st.shared.v2.b32 [other], {s, key};", "add.s32 at, at, 16;", "bra NEXT;",
        "ORDERED:", "bar.warp.sync -1;",
        "DONE:",
    ]  # fmt: skip
    return "{ " + " ".join(lines) + " }"


@gluon.jit
def _order(lists):
    """The addresses of each list's highest entries, highest first, and the lists' lengths."""
    s, _key = _entries(_places(lists, LISTED))
    place, near = eight_highest(gl.reshape(s, [TEAM_ROWS, 2, LISTED // 2]))
    of_two: gl.constexpr = near.type.layout
    of_found: gl.constexpr = gl.SliceLayout(2, place.type.layout)
    row = gl.arange(0, TEAM_ROWS, gl.SliceLayout(1, of_two))
    second = gl.arange(0, 2, gl.SliceLayout(0, of_two))[None, :]
    begin = _list_of(lists, row)
    room = (
        lists + row // BAND * ROOM + BAND * LIST + row % BAND * (MAX_TOP_KEYS * ENTRY)
    )  # after the lists
    length = read(begin + LENGTH)
    again = gl.inline_asm_elementwise(
        _order_ptx(LISTED, MOST), "=&r,r,r,r,r,r",
        [begin[:, None], room[:, None], second * ENTRY, length[:, None], near], gl.int32,
        is_pure=False, pack=1,
    )  # fmt: skip
    begin = gl.convert_layout(gl.where(again > 0, room[:, None], begin[:, None]), of_found)
    again = gl.convert_layout(again, of_found)[:, :, None]
    second = gl.convert_layout(second, of_found)[:, :, None]
    number = gl.arange(0, MAX_TOP_KEYS // 2, axis_layout(place.type.layout, 3, 2))[None, None, :]
    place = gl.where(again > 0, second * (MAX_TOP_KEYS // 2) + number, place)
    highest = gl.reshape(begin[:, :, None] + place * ENTRY, [TEAM_ROWS, MAX_TOP_KEYS])
    return gl.convert_layout(highest, _by_pairs(MAX_TOP_KEYS)), length


@gluon.jit
def _store_rows(
    at, length, lse, Unfinished, Weights, Keys, first, rows_left, c, COUNT: gl.constexpr
):
    """Store the COUNT highest entries of a team's rows, of which ``first`` is the first."""
    s, key = read_two(at)
    s = s.to(gl.float32, bitcast=True)
    _sync_warp()  # the memory of the lists may now be reused as slots
    row = gl.arange(0, TEAM_ROWS, gl.SliceLayout(1, at.type.layout)) % ROWS
    place = gl.arange(0, MAX_TOP_KEYS, gl.SliceLayout(0, at.type.layout))[None, :]
    real = s > LOWEST
    weights = gl.where(real, gl.exp2(s * c - lse[:, None]), 0.0)
    to = row[:, None] * COUNT + place
    mask = (row < rows_left)[:, None] & (place < COUNT)
    gl.store(Weights + first * COUNT + to, weights, mask=mask)
    gl.store(Keys + first * COUNT + to, gl.where(real, key, -1).to(gl.int64), mask=mask)
    row = gl.arange(0, TEAM_ROWS, length.type.layout) % ROWS
    gl.store(Unfinished + first + row, (length > MOST).to(gl.int8), mask=row < rows_left)


@gluon.jit
def _mark_all_unfinished(Unfinished, queries, work, CAUSAL: gl.constexpr):
    """Mark all rows of a program's blocks as unfinished, for triton/rows.search."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [TEAM_ROWS // BAND], [0])
    for number in range(gl.program_id(0), end_of(work, False), work.programs):
        item = item_at(number, work, CAUSAL, False, False)
        for half in range(item[2]):
            flat, block = block_of(item, half, work)
            for first in gl.static_range(0, TEAMS * ROWS, TEAM_ROWS):
                row = block * (TEAMS * ROWS) + first + gl.arange(0, TEAM_ROWS, layout)
                gl.store(Unfinished + multiply_wide(flat, queries) + row, 1, mask=row < queries)


@gluon.jit
def _find_top(
    shared,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    COUNT: gl.constexpr,
):  # fmt: skip
    """Run all teams: each finds the top keys of its 64 queries of every block, last key first."""
    q_ring, k_ring, messages_at, room, begin, addressable = shared[:6]
    Threshold, Lse, Unfinished, Weights, Keys, ready, work, sizes = shared[6:]
    queries, keys, offset, tiles, c = sizes
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [TEAM_ROWS // BAND, 1], [16, BLOCK, 16]
    )
    none = by_lanes(gl.zeros([TEAM_ROWS, BLOCK], gl.float32, layout))
    of_lanes: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, _in_fours(none).type.layout))
    of_rows: gl.constexpr = axis_layout(none.type.layout, 3, 0)
    of_places: gl.constexpr = gl.SliceLayout(1, _by_pairs(MAX_TOP_KEYS))
    lane = gl.arange(0, LANES, gl.SliceLayout(0, of_lanes))[None, :]
    both = gl.arange(0, TEAM_ROWS // 2, gl.SliceLayout(1, of_lanes))[:, None]
    team = team_of_thread()
    mine = team_rows_index(team)
    lists = begin + mine * (TEAM_ROWS // BAND * ROOM)
    slots = lists + (both * LANES + lane) * SPAN
    begins = slots, slots + (SPAN - ENTRY)
    ends = slots + (SLOTS - SPARE) * ENTRY, slots + (SPARE - 1) * ENTRY
    nothing = gl.full([TEAM_ROWS // 2, LANES], BITS_BASE, gl.float32, of_lanes)
    place = ring_start()
    q_place = ring_start()
    message = first_message(work, CAUSAL, False, False)
    if (ready == 0) | (not addressable):
        wait_for_previous_launch()
    if not addressable:
        _mark_all_unfinished(Unfinished, queries, work, CAUSAL)
        message = gl.to_tensor(-1), message[1]
    while message[0] >= 0:
        flat, block, half = unpack_message(message)
        part = team_part(half, team, CAUSAL)
        row = block * (TEAMS * ROWS) + part * ROWS
        first = multiply_wide(flat, queries)
        rows = row + gl.arange(0, TEAM_ROWS, of_rows) % ROWS
        query_at = rows + offset
        thresholds = split_row_pairs(
            gl.load(Threshold + first + rows, mask=rows < queries, other=float("nan"))
        )
        thresholds = (
            gl.convert_layout(thresholds[0], of_lanes),
            gl.convert_layout(thresholds[1], of_lanes),
        )
        at = begins
        since = at
        before = nothing, nothing  # pairs of the previous tile that need keys
        last = _last_tile(row, offset, tiles, CAUSAL)
        masked_end = 1  # the end of the tiles with masked scores
        if CAUSAL and not EVEN:
            masked_end = last + 1 - (row + offset + 1) // BLOCK
        wait_until_full_per_warp(q_ring, q_place)
        ahead = _last_tile(row + (TEAMS - 1 - part) * ROWS, offset, tiles, CAUSAL) - last
        for _ in range(ahead):
            wait_until_full_per_warp(k_ring, place)
            release_per_warp(k_ring, place)
            place = next_place(place, STAGES)
        # One loop for all tiles: separating the first adds a fifth to the code, and is slower.
        for tile in range(last + 1):
            wait_until_full_per_warp(k_ring, place)
            s = scores(q_ring, q_place, k_ring, place, mine, _query_blocks(D), D)
            s = hopper.warpgroup_mma_wait(0, deps=[s])
            release_per_warp(k_ring, place)
            place = next_place(place, STAGES)
            if tile == last:
                message = receive_next_block_per_warp(messages_at, q_place)
                release_per_warp(q_ring, q_place)
            key = (last - tile) * BLOCK
            by_lane = by_lanes(s)
            kept = nothing, nothing
            if CAUSAL and EVEN:
                near, far = split_lane_halves(by_lane)
                if tile < masked_end:
                    at_half = gl.convert_layout(query_at, axis_layout(near.type.layout, 3, 0))
                    near = gl.where(may_attend(near, at_half, key, keys, CAUSAL), near, NOTHING)
                    beyond = key + BLOCK // 2
                    far = gl.where(may_attend(far, at_half, beyond, keys, CAUSAL), far, NOTHING)
                if (tile >= masked_end) | (
                    team % 2 == 1
                ):  # in the tile on the diagonal, ``far`` is masked for even teams
                    at, kept = _keep(_in_fours(far), thresholds, at, kept, ends, PAIRS // 2)
                at, kept = _keep(_in_fours(near), thresholds, at, kept, ends, 0)
            else:
                if CAUSAL or not EVEN:
                    if tile < masked_end:
                        seen = may_attend(by_lane, query_at, key, keys, CAUSAL)
                        by_lane = gl.where(seen, by_lane, NOTHING)
                at, kept = _keep(_in_fours(by_lane), thresholds, at, kept, ends, 0)
            if (tile % 2 == 1) | (tile == last):
                at = _add_keys(at, kept, before, since, thresholds, key + lane * PAIR, ends)
                since = at
                kept = nothing, nothing
            before = kept
        q_place = next_place(q_place, _query_blocks(D))

        wait_for_previous_launch()  # that launch may still use the memory written below
        here = _opaque(lists)
        at_end = row + gl.arange(0, TEAM_ROWS, of_places) % ROWS
        lse = gl.load(Lse + first + at_end, mask=at_end < queries, other=0.0) * (1 / LN2)
        _list(slots, at, thresholds, here)
        places, length = _order(here)
        _store_rows(
            places, length, lse, Unfinished, Weights, Keys, first + row, queries - row, c, COUNT
        )
    write_marks(room)  # a use of the room, so that until here no other buffer takes its memory


@gluon.jit(do_not_specialize=[*NOT_SPECIALIZED, "queries", "keys", "tiles", "ready"])
def top(
    q_desc, k_desc, Threshold, Lse, Unfinished, Weights, Keys, Counter,
    items, blocks, heads, groups, programs, single_items, steps, share,
    queries, keys, tiles, ready, c,
    D: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr,
    COUNT: gl.constexpr,
):  # fmt: skip
    """Find the COUNT highest weights of each query and their keys; see triton/rows.py.

    At least eight of a query's scores reach its ``Threshold``, or all if it has fewer.
    ``Unfinished`` marks rows with too many candidates for the lists. ``ready``: another launch ran
    after the forward pass. EVEN: BLOCK divides keys - queries or, without a mask, the number of
    keys.
    """
    work = Work(items, blocks, heads, groups, programs, single_items, steps, share)
    offset = keys - queries
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    # The largest buffer: slots, which become lists, and then LINES lines.
    room = gl.allocate_shared_memory(gl.int32, [TEAMS * SLOTS + LINES, 2 * THREADS], plain)
    begin = room_after(0)
    addressable = room_begins_at(room, begin)
    STRIPS: gl.constexpr = D // STRIP
    q_ring = ring_in(
        room, begin, q_desc, _query_blocks(D) * STRIPS * TEAMS, _query_blocks(D), OWN_ROWS
    )
    k_ring = ring_in(room, begin, k_desc, STAGES * STRIPS, STAGES, TILES)
    messages, messages_at = messages_in(room, begin)
    hopper.fence_async_shared()
    sizes = queries, keys, offset, tiles, c
    shared = (
        q_ring, k_ring, messages_at, room, begin, addressable, Threshold, Lse, Unfinished, Weights,
        Keys, ready, work, sizes,
    )  # fmt: skip
    loader = q_ring, messages, Counter, k_ring, q_desc, k_desc, work, offset, tiles, addressable
    gl.warp_specialize(
        [
            (_find_top, (shared, D, STAGES, CAUSAL, EVEN, COUNT)),
            (_load_keys, (loader, D, STAGES, CAUSAL)),
        ],
        [1], [24],
    )  # fmt: skip
