# mypy: ignore-errors
"""All teams of warps as one role, which holds their rows as one tensor.

So there is one copy of the code instead of four, and it stays in the instruction cache. But a team
is to go on when it can, and may have fewer tiles than another: nothing is waited for by all of
them. What differs between teams is made of ``team_of_thread()``, a number that Triton takes for the
same everywhere; and barriers are waited for and arrived at in PTX, each warp by itself, where
Triton would have all warps wait for each other.

PTX has to know where barriers are, and Triton does not tell. They are in lines of a buffer of
numbers, a ``room``, and Triton puts larger buffers before smaller ones. That is looked up at the
start.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from regard.kernels.hopper.pipeline import BAND, BLOCK, ROWS, TEAMS, team_part, uniform_in_warp

TEAM_ROWS = gl.constexpr(TEAMS * ROWS)  # rows of one tensor: those of all teams
STRIP = gl.constexpr(64)  # columns of rows that are loaded as a tile
# The last LINES of a room: the ring of a block's own rows has two for its barriers, so has that of
# tiles, word of what comes next has one, and so has what shows where they are.
OWN_ROWS, TILES, MESSAGES, MARKS, LINES = (gl.constexpr(at) for at in (0, 2, 4, 5, 6))


@gluon.jit
def read(at):
    """A number from shared memory."""
    return gl.inline_asm_elementwise(
        "{ ld.shared.b32 $0, [$1]; }", "=r,r", [at], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def read_two(at):
    """Two numbers from shared memory."""
    return gl.inline_asm_elementwise(
        "{ ld.shared.v2.b32 {$0, $1}, [$2]; }", "=r,=r,r", [at], (gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def room_after(BEFORE: gl.constexpr):
    """Where a room begins for PTX that comes after so many bytes of larger buffers."""
    return gl.inline_asm_elementwise(
        "{ mov.u32 $0, global_smem; add.u32 $0, $0, $1; }", "=r,r", [gl.to_tensor(BEFORE)],
        gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _line(room, number):
    """Which line of a room one of the last is."""
    return room.shape[0] - LINES + number


@gluon.constexpr_function
def _bytes_before(room, number):
    """How far from a room's begin that line is."""
    return _line(room, number) * room.shape[1] * 4


@gluon.jit
def write_marks(room):
    """Write numbers to a line of a room."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [TEAM_ROWS // BAND], [0])
    marks = gl.arange(0, room.shape[1], layout)
    room.index(_line(room, MARKS)).store(marks)
    return marks


@gluon.jit
def room_begins_at(room, begin):
    """Whether a room begins there, by what is written to it."""
    marks = write_marks(room)
    gl.thread_barrier()
    same = read(begin + _bytes_before(room, MARKS) + marks * 4) == marks
    return gl.min(same.to(gl.int32), 0) > 0


@gluon.jit
def fail_launch_unless(true):
    """Have the launch fail where that is not so, by writing to no memory at all.

    A trap would be the plain way; with one ptxas waits for every product by itself.
    """
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b64 nowhere; mov.b64 nowhere, 0; setp.eq.s32 p, $1, 0; "
        "@p st.global.b32 [nowhere], $1; mov.b32 $0, $1; }",
        "=r,r", [true.to(gl.int32)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def ring_in(
    room, begin, desc, COUNT: gl.constexpr, SLOTS: gl.constexpr, FULL: gl.constexpr
):  # fmt: skip
    """As ``ring_of``, with barriers in two lines of a room, OWN or TILES, and where these are."""
    tiles = gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)  # noqa: RUF005
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    shape: gl.constexpr = [room.shape[1] // 2, 1]
    full = room.index(_line(room, FULL))._reinterpret(gl.int64, shape, kind)
    empty = room.index(_line(room, FULL + 1))._reinterpret(gl.int64, shape, kind)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=TEAMS * 4)  # each warp arrives by itself
    full_at, empty_at = begin + _bytes_before(room, FULL), begin + _bytes_before(room, FULL + 1)
    return tiles, full, empty, full_at, empty_at


@gluon.jit
def wait_until_full_per_warp(ring, place):
    """As ``await_tile``, each warp by itself."""
    slot, odd = place
    gl.inline_asm_elementwise(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [$1], $2; @!p bra AGAIN; "
        "mov.b32 $0, $1; }",
        "=r,r,r", [ring[3] + slot * 8, odd], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def release_per_warp(ring, place):
    """As ``release``, each warp by itself."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        "bar.warp.sync -1; @p mbarrier.arrive.shared.b64 _, [$1]; mov.b32 $0, $1; }",
        "=r,r", [ring[4] + place[0] * 8], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def messages_in(room, begin):
    """As ``slips_of``, in a line of a room, and where these are."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    messages = room.index(_line(room, MESSAGES))._reinterpret(
        gl.int64, [room.shape[1] // 2, 1], plain
    )
    return messages, begin + _bytes_before(room, MESSAGES)


@gluon.jit
def receive_next_block_per_warp(messages_at, place):
    """As ``next_told``, from where the slips are."""
    both, flat = read_two(messages_at + place[0] * 8)
    return uniform_in_warp(flat), uniform_in_warp(both)


@gluon.jit
def team_of_thread():
    """Which team a thread is of."""
    team = gl.inline_asm_elementwise(
        "{ mov.u32 $0, %tid.x; shr.u32 $0, $0, 7; add.u32 $0, $0, $1; }", "=r,r",
        [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return uniform_in_warp(team)


@gluon.jit
def team_rows_index(team):
    """Which of the tensors of HELD rows a role has: if one is a team's, as in tests, its own."""
    return team if TEAM_ROWS == ROWS else 0


@gluon.jit
def load_team_rows(
    ring, place, desc, batch, head, row, half, D: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """Have the rows of a block loaded, for which there is room: strip by strip, by teams."""
    full = ring[1].index(place[0])
    mbarrier.expect(full, TEAMS * ROWS * D * 2)
    for strip in gl.static_range(D // STRIP):
        for team in gl.static_range(TEAMS):
            at = [batch, head, row + team_part(half, team, CAUSAL) * ROWS, strip * STRIP]
            tile = ring[0].index((place[0] * (D // STRIP) + strip) * TEAMS + team)
            tma.async_copy_global_to_shared(desc, at, full, tile)


@gluon.jit
def scores(
    ring, ring_place, tiles, place, mine, BLOCKS: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """Of all teams' rows, of BLOCKS that a ring has room for, and a tile: on their way."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        [3, 0], [TEAM_ROWS // BAND, 1], [16, BLOCK, 16]
    )
    kind: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    VIEWS: gl.constexpr = TEAMS * ROWS // TEAM_ROWS
    STRIPS: gl.constexpr = D // STRIP
    rows = ring[0]._reinterpret(ring[0].dtype, [BLOCKS * STRIPS * VIEWS, TEAM_ROWS, STRIP], kind)
    s = gl.zeros([TEAM_ROWS, BLOCK], gl.float32, layout)
    for strip in gl.static_range(STRIPS):
        some = rows.index((ring_place[0] * STRIPS + strip) * VIEWS + mine)
        tile = tiles[0].index(place[0] * STRIPS + strip).reshape([BLOCK, STRIP]).permute((1, 0))
        s = hopper.warpgroup_mma(some, tile, s, use_acc=strip > 0, is_async=True)
    return s
