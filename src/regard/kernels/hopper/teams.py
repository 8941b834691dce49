# mypy: ignore-errors
"""Run all teams (warpgroups) as one warp-specialized role, with their rows in one tensor.

One copy of the code fits the instruction cache; four would not. Teams run at different speeds and
may have different numbers of tiles, so no code synchronizes all teams. Values that differ between
teams derive from ``team_of_thread()``, which Triton treats as uniform. Each warp waits for barriers
and arrives at them in PTX, because Triton would synchronize all warps.

PTX needs the addresses of the barriers, which Triton does not expose. The barriers lie in the last
lines of a ``room``, a shared buffer of integers. Triton places larger shared buffers first, so the
offset of the room is the size of the larger buffers. The kernels check this at their start.

Callers: ``columns``, ``top``.

Test: ``pytest tests/kernels/test_hopper.py -k "shared_memory"``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from regard.kernels import sizes
from regard.kernels.hopper.pipeline import BAND, BLOCK, ROWS, TEAMS, team_part, uniform_in_warp

TEAM_ROWS = gl.constexpr(TEAMS * ROWS)  # rows of the tensor that holds all teams' rows
STRIP = gl.constexpr(sizes.STRIP)
# Lines at the end of a room: two with the barriers of the ring of a block's rows, two with those of
# the ring of tiles, one with messages, and one with a known pattern. LINES is their number.
OWN_ROWS, TILES, MESSAGES, MARKS, LINES = (gl.constexpr(at) for at in (0, 2, 4, 5, 6))


@gluon.jit
def read(at):
    """Read an integer at an address of shared memory."""
    return gl.inline_asm_elementwise(
        "{ ld.shared.b32 $0, [$1]; }", "=r,r", [at], gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def read_two(at):
    """Read two consecutive integers at an address of shared memory."""
    return gl.inline_asm_elementwise(
        "{ ld.shared.v2.b32 {$0, $1}, [$2]; }", "=r,=r,r", [at], (gl.int32, gl.int32),
        is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def room_after(BEFORE: gl.constexpr):
    """The shared address of a room after BEFORE bytes of larger buffers."""
    return gl.inline_asm_elementwise(
        "{ mov.u32 $0, global_smem; add.u32 $0, $0, $1; }", "=r,r", [gl.to_tensor(BEFORE)],
        gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.constexpr_function
def _line(room, number):
    """The index of one of a room's last lines."""
    return room.shape[0] - LINES + number


@gluon.constexpr_function
def _bytes_before(room, number):
    """The offset in bytes of one of the last lines from the start of the room."""
    return _line(room, number) * room.shape[1] * 4


@gluon.jit
def write_marks(room):
    """Write 0, 1, 2, ... to the line MARKS of a room, and return these numbers."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [TEAM_ROWS // BAND], [0])
    marks = gl.arange(0, room.shape[1], layout)
    room.index(_line(room, MARKS)).store(marks)
    return marks


@gluon.jit
def room_begins_at(room, begin):
    """Whether a room begins at an address: numbers stored in the room are read back from there."""
    marks = write_marks(room)
    gl.thread_barrier()
    same = read(begin + _bytes_before(room, MARKS) + marks * 4) == marks
    return gl.min(same.to(gl.int32), 0) > 0


@gluon.jit
def fail_launch_unless(true):
    """Make the launch fail unless ``true`` holds, by a store to address 0.

    A trap would make ptxas wait for each product separately.
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
    """Like ``ring_of``, with barriers in two lines of ``room``; also return their addresses."""
    tiles = gl.allocate_shared_memory(desc.dtype, [COUNT] + desc.block_shape, desc.layout)  # noqa: RUF005
    kind: gl.constexpr = mbarrier.MBarrierLayout()
    shape: gl.constexpr = [room.shape[1] // 2, 1]
    full = room.index(_line(room, FULL))._reinterpret(gl.int64, shape, kind)
    empty = room.index(_line(room, FULL + 1))._reinterpret(gl.int64, shape, kind)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=TEAMS * 4)  # each warp arrives once
    full_at, empty_at = begin + _bytes_before(room, FULL), begin + _bytes_before(room, FULL + 1)
    return tiles, full, empty, full_at, empty_at


@gluon.jit
def wait_until_full_per_warp(ring, place):
    """Like ``wait_until_full``, but each warp waits independently."""
    slot, odd = place
    gl.inline_asm_elementwise(
        "{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared.b64 p, [$1], $2; @!p bra AGAIN; "
        "mov.b32 $0, $1; }",
        "=r,r,r", [ring[3] + slot * 8, odd], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def release_per_warp(ring, place):
    """Like ``release``, but each warp arrives once."""
    gl.inline_asm_elementwise(
        "{ .reg .pred p; .reg .b32 lane; mov.u32 lane, %laneid; setp.eq.u32 p, lane, 0; "
        "bar.warp.sync -1; @p mbarrier.arrive.shared.b64 _, [$1]; mov.b32 $0, $1; }",
        "=r,r", [ring[4] + place[0] * 8], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def messages_in(room, begin):
    """Like ``allocate_messages``, in a line of ``room``; also return the address."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    messages = room.index(_line(room, MESSAGES))._reinterpret(
        gl.int64, [room.shape[1] // 2, 1], plain
    )
    return messages, begin + _bytes_before(room, MESSAGES)


@gluon.jit
def receive_next_block_per_warp(messages_at, place):
    """Like ``receive_next_block``, from an address of shared memory."""
    both, flat = read_two(messages_at + place[0] * 8)
    return uniform_in_warp(flat), uniform_in_warp(both)


@gluon.jit
def team_of_thread():
    """The index of the team that the thread belongs to."""
    team = gl.inline_asm_elementwise(
        "{ mov.u32 $0, %tid.x; shr.u32 $0, $0, 7; add.u32 $0, $0, $1; }", "=r,r",
        [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip
    return uniform_in_warp(team)


@gluon.jit
def team_rows_index(team):
    """Return which block of TEAM_ROWS rows a team computes.

    On a GPU one tensor holds the rows of all teams, so the index is 0. The interpreter of the tests
    sets TEAM_ROWS to the rows of one team, so the index is the team.
    """
    return team if TEAM_ROWS == ROWS else 0


@gluon.jit
def load_team_rows(
    ring, place, desc, batch, head, row, half, D: gl.constexpr, CAUSAL: gl.constexpr
):  # fmt: skip
    """Load the rows of a block into an empty ring slot, by strips and teams."""
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
    """Start the product of all teams' rows and a tile; ``ring`` has BLOCKS slots of rows."""
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
