# mypy: ignore-errors
"""The eighth highest and the eight highest numbers of a row, by sorting networks (Batcher, 1968).

A thread sorts its own numbers without branches. It then merges its sorted list with another
thread's: one comparison for each position selects the higher half, and a few more sort that half.

``eighth_highest`` is approximate. A thread packs its two rows into one register as bfloat16, which
halves comparisons and shuffles. It rounds each number's distance from ``near``, so the result is at
most 0.016 of that distance below the eighth highest number.

Called by ``forward``, for the threshold of the top keys, and by ``top``.

Test: ``pytest tests/kernels/test_hopper.py -k eight``.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard.kernels.hopper.pipeline import (
    BAND,
    LANES,
    ROWS,
    axis_layout,
    split_lane_halves,
    split_row_pairs,
)

COUNT = gl.constexpr(8)  # numbers of a row that a lane holds; also the rank of ``eighth_highest``


@gluon.jit
def _listed(x):
    """Split a tensor [a, b, n] into n tensors [a, b]."""
    if x.shape[2] == 1:
        parts = (gl.reshape(x, [x.shape[0], x.shape[1]]),)
    else:
        near, far = split_lane_halves(x)
        parts = _listed(near) + _listed(far)
    return parts


@gluon.constexpr_function
def _sorting_network(kind):
    """Return the lines of a PTX program, and functions that append instructions to them.

    ``kind`` is the PTX type of the numbers.
    """
    lines = []

    def emit(operation, *of):
        name = f"x{len(lines)}"
        lines.append(f"{operation} {name}, {', '.join(of)};")
        return name

    def elementwise(which, x, y):  # max or min of two lists
        return [emit(f"{which}.{kind}", a, b) for a, b in zip(x, y, strict=True)]

    def compare(a, b):
        return elementwise("max", [a], [b]) + elementwise("min", [a], [b])

    def merge(x, y):  # two sorted lists
        if len(x) == 1:
            return compare(x[0], y[0])
        even, odd = merge(x[::2], y[::2]), merge(x[1::2], y[1::2])
        result = even[:1]
        for a, b in zip(odd[:-1], even[1:], strict=True):
            result += compare(a, b)
        return result + odd[-1:]

    def sort(x):  # highest first
        half = len(x) // 2
        return merge(sort(x[:half]), sort(x[half:])) if half else x

    def sort_bitonic(x):  # a list that rises, then falls, or falls, then rises
        half = len(x) // 2
        if not half:
            return x
        pairs = [compare(x[i], x[i + half]) for i in range(half)]
        return sort_bitonic([high for high, _ in pairs]) + sort_bitonic([low for _, low in pairs])

    def from_lane(x, away):  # the reversed list of another lane
        return [emit("shfl.sync.bfly.b32", a, str(away), "31", "-1") for a in reversed(x)]

    return lines, emit, elementwise, sort, sort_bitonic, from_lane


@gluon.constexpr_function
def _eighth_ptx(count):
    """PTX: the approximate eighth highest number of each of two rows.

    In: the numbers of the rows in $2 to $9 and $10 to $17, and a number near each row's highest in
    $18 and $19. Out: in $0 and $1, a number slightly below each row's eighth, equal in all lanes.
    """
    lines, emit, elementwise, sort, sort_bitonic, from_lane = _sorting_network("bf16x2")

    def packed(i):
        near = emit("sub.f32", f"${2 + i}", f"${2 + 2 * count}")
        far = emit("sub.f32", f"${2 + count + i}", f"${3 + 2 * count}")
        return emit("cvt.rn.bf16x2.f32", far, near)

    highest = sort([packed(i) for i in range(count)])
    highest = sort_bitonic(elementwise("max", highest, from_lane(highest, 1)))
    highest = elementwise("max", highest, from_lane(highest, 2))
    while len(highest) > 1:
        highest = highest[2:] + elementwise("min", highest[:1], highest[1:2])
    for row in range(2):
        x = (
            emit("shl.b32", highest[0], "16")
            if row == 0
            else emit("and.b32", highest[0], "0xFFFF0000")
        )
        lower = emit("fma.rn.f32", emit("abs.f32", x), "0fBC000000", x)  # x - |x| * 2**-7
        lines.append(f"add.f32 ${row}, {lower}, ${2 + 2 * count + row};")
    return f"{{ .reg .b32 x<{len(lines)}>; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _eight_highest_ptx(count):
    """PTX: the eight highest of sixteen numbers, of which two paired threads hold eight each.

    In: $5 to $12, the thread's numbers; $13, -16 in the first thread and -8 in the second. Out: $0
    to $3, four of the eight highest: the higher four in the first thread, the lower four in the
    second. Their last four bits are their index among the sixteen. $4 is 1 if two consecutive
    results differ only in these bits.
    """
    lines, emit, elementwise, sort, sort_bitonic, from_lane = _sorting_network("f32")
    half = count // 2
    # The last four bits of a number become its index: 8 from $13, and the index among eight.
    placed = [emit("lop3.b32", f"${5 + i}", "$13", str(i - 16), "0xE6") for i in range(count)]
    mine = sort(placed)
    theirs = from_lane(mine, 1)
    highest = sort_bitonic(elementwise("max", mine, theirs))
    left = elementwise("min", mine[:half], theirs[:half])  # the paired thread has the other half
    while len(left) > 1:
        left = left[2:] + elementwise("max", left[:1], left[1:2])
    (ninth,) = elementwise("max", left, from_lane(left, 1))
    lines.append("setp.eq.s32 p, $13, -8;")
    for i in range(half):
        lines.append(f"selp.b32 ${i}, {highest[half + i]}, {highest[i]}, p;")
    after = emit("selp.b32", ninth, highest[half], "p")
    lines.append("mov.b32 $4, 0;")
    for i in range(half):
        lower = f"${i + 1}" if i + 1 < half else after
        apart = emit("xor.b32", f"${i}", lower)
        # 0fFCF0BDC2 is LOWEST: entries without a number need no order.
        lines.append(f"setp.gt.f32 q, {lower}, 0fFCF0BDC2;")
        lines.append(f"setp.lt.and.u32 q, {apart}, 16, q; @q mov.b32 $4, 1;")
    return f"{{ .reg .pred p, q; .reg .b32 x<{len(lines)}>; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _as_in_product(warps):
    """The layout [ROWS, LANES, COUNT] of a product: a thread holds one lane of two rows."""
    of_warps = [[16, 0, 0], [32, 0, 0], [0, 0, 0], [0, 0, 0]]
    return gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 0, 4], [8, 0, 0]],
        [[0, 1, 0], [0, 2, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]],
        of_warps[: warps.bit_length() - 1],
        [],
        [64, 4, 8],
    )


@gluon.jit
def eighth_highest(x, near, WARPS: gl.constexpr = 4):
    """Return the approximate eighth highest number of each row, [ROWS, LANES], equal in all lanes.

    ``x`` is [ROWS, LANES, COUNT]. The result is lower than the eighth highest number, in proportion
    to its distance from ``near``, [ROWS].
    """
    layout: gl.constexpr = _as_in_product(WARPS)
    near = gl.convert_layout(near, axis_layout(layout, 3, 0))
    parts = gl.reshape(gl.convert_layout(x, layout), [ROWS // BAND, 2, BAND // 2, LANES, COUNT])
    one, other = gl.split(
        gl.reshape(gl.permute(parts, (0, 2, 3, 4, 1)), [ROWS // 2, LANES, COUNT, 2])
    )
    numbers = _listed(one) + _listed(other)
    of_lanes: gl.constexpr = numbers[0].type.layout
    near_one, near_other = split_row_pairs(near)
    numbers += (gl.convert_layout(near_one, of_lanes), gl.convert_layout(near_other, of_lanes))
    one, other = gl.inline_asm_elementwise(
        _eighth_ptx(COUNT), "=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f", numbers,
        (gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    parts = gl.reshape(gl.join(one, other), [ROWS // BAND, BAND // 2, LANES, 2])
    return gl.reshape(gl.permute(parts, (0, 3, 1, 2)), [ROWS, LANES])


@gluon.jit
def eight_highest(x):
    """Return the indices of the eight highest of a row's sixteen numbers, in descending order.

    ``x`` is [rows, 2, COUNT], and the indices are [rows, 2, COUNT // 2]: of two paired threads each
    holds half. Also return [rows, 2], which is 1 in either or both threads where two numbers of a
    row were too close to order.
    """
    numbers = _listed(x)
    layout: gl.constexpr = numbers[0].type.layout
    neighbour = gl.arange(0, 2, gl.SliceLayout(0, layout))[None, :]
    numbers += (gl.full([x.shape[0], 2], -2 * COUNT, gl.int32, layout) + neighbour * COUNT,)
    one, two, three, four, near = gl.inline_asm_elementwise(
        _eight_highest_ptx(COUNT), "=&r,=&r,=&r,=&r,=&r,f,f,f,f,f,f,f,f,r", numbers,
        (gl.int32, gl.int32, gl.int32, gl.int32, gl.int32), is_pure=True, pack=1,
    )  # fmt: skip
    places = gl.permute(gl.join(gl.join(one, two), gl.join(three, four)), (0, 1, 3, 2))
    return gl.reshape(places, [x.shape[0], 2, COUNT // 2]) & (2 * COUNT - 1), near
