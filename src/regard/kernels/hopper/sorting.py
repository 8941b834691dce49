# mypy: ignore-errors
"""The eighth highest and the eight highest of a row's numbers, by sorting networks (Batcher, 1968).

A thread sorts its own numbers without a branch. Of two sorted lists, its own and another thread's,
the higher half takes one comparison a place, and a few more to sort it.

The eighth highest alone is approximate: of the last lists only the lowest number is wanted, and a
thread packs its two rows into one register as bfloat16, which halves comparisons and shuffles. The
rounding is that of a number's distance from ``near``: the result is below the eighth by 0.016 of
that distance at most.

Callers: ``forward`` (threshold of the top keys) and ``top``.

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

COUNT = gl.constexpr(8)  # numbers of a row that a lane holds, and the rank that is wanted


@gluon.jit
def _listed(x):
    """Split [., ., n] into n tensors [., .]."""
    if x.shape[2] == 1:
        parts = (gl.reshape(x, [x.shape[0], x.shape[1]]),)
    else:
        near, far = split_lane_halves(x)
        parts = _listed(near) + _listed(far)
    return parts


@gluon.constexpr_function
def _sorting_network(kind):
    """Return the lines of a PTX program, and functions that append comparisons to it.

    ``kind`` is the PTX type of the numbers.
    """
    lines = []

    def made(operation, *of):
        name = f"x{len(lines)}"
        lines.append(f"{operation} {name}, {', '.join(of)};")
        return name

    def chosen(which, x, y):  # place by place of two lists
        return [made(f"{which}.{kind}", a, b) for a, b in zip(x, y, strict=True)]

    def compared(a, b):
        return chosen("max", [a], [b]) + chosen("min", [a], [b])

    def merged(x, y):  # two sorted lists as one
        if len(x) == 1:
            return compared(x[0], y[0])
        even, odd = merged(x[::2], y[::2]), merged(x[1::2], y[1::2])
        result = even[:1]
        for a, b in zip(odd[:-1], even[1:], strict=True):
            result += compared(a, b)
        return result + odd[-1:]

    def in_order(x):  # the highest first
        half = len(x) // 2
        return merged(in_order(x[:half]), in_order(x[half:])) if half else x

    def settled(x):  # sort a bitonic list: it rises and then falls, or the reverse
        half = len(x) // 2
        if not half:
            return x
        pairs = [compared(x[i], x[i + half]) for i in range(half)]
        return settled([high for high, _ in pairs]) + settled([low for _, low in pairs])

    def of_lane(x, away):  # the reversed list of another lane
        return [made("shfl.sync.bfly.b32", a, str(away), "31", "-1") for a in reversed(x)]

    return lines, made, chosen, in_order, settled, of_lane


@gluon.constexpr_function
def _eighth_ptx(count):
    """PTX: the approximate eighth highest of two rows.

    In: the numbers of both rows, $2 to $9 and $10 to $17, and a number near each row's highest.
    Out: $0 and $1, a number slightly below each row's eighth, the same in all lanes.
    """
    lines, made, chosen, in_order, settled, of_lane = _sorting_network("bf16x2")

    def packed(i):
        near = made("sub.f32", f"${2 + i}", f"${2 + 2 * count}")
        far = made("sub.f32", f"${2 + count + i}", f"${3 + 2 * count}")
        return made("cvt.rn.bf16x2.f32", far, near)

    highest = in_order([packed(i) for i in range(count)])
    highest = settled(chosen("max", highest, of_lane(highest, 1)))
    highest = chosen("max", highest, of_lane(highest, 2))
    while len(highest) > 1:
        highest = highest[2:] + chosen("min", highest[:1], highest[1:2])
    for row in range(2):
        x = (
            made("shl.b32", highest[0], "16")
            if row == 0
            else made("and.b32", highest[0], "0xFFFF0000")
        )
        lower = made("fma.rn.f32", made("abs.f32", x), "0fBC000000", x)  # lower by 2**-7 of it
        lines.append(f"add.f32 ${row}, {lower}, ${2 + 2 * count + row};")
    return f"{{ .reg .b32 x<{len(lines)}>; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _eight_highest_ptx(count):
    """PTX: the eight highest of sixteen numbers; two neighbouring threads hold eight each, $5 to
    $12.

    Out: $0 to $3 are the higher four of them or, in the second thread, the lower, with their place
    among the sixteen in the last four bits. $4 is 1 where two consecutive ones differ in no other
    bits. $13 is -16 in the first thread and -8 in the second.
    """
    lines, made, chosen, in_order, settled, of_lane = _sorting_network("f32")
    half = count // 2
    # The bits of a number, the bit of $13 for the value 8, and the bits of the place among eight.
    placed = [made("lop3.b32", f"${5 + i}", "$13", str(i - 16), "0xE6") for i in range(count)]
    mine = in_order(placed)
    theirs = of_lane(mine, 1)
    highest = settled(chosen("max", mine, theirs))
    left = chosen("min", mine[:half], theirs[:half])  # the neighbour has the other half
    while len(left) > 1:
        left = left[2:] + chosen("max", left[:1], left[1:2])
    (ninth,) = chosen("max", left, of_lane(left, 1))
    lines.append("setp.eq.s32 p, $13, -8;")
    for i in range(half):
        lines.append(f"selp.b32 ${i}, {highest[half + i]}, {highest[i]}, p;")
    after = made("selp.b32", ninth, highest[half], "p")
    lines.append("mov.b32 $4, 0;")
    for i in range(half):
        lower = f"${i + 1}" if i + 1 < half else after
        apart = made("xor.b32", f"${i}", lower)
        # 0fFCF0BDC2 is LOWEST: absent numbers need no order.
        lines.append(f"setp.gt.f32 q, {lower}, 0fFCF0BDC2;")
        lines.append(f"setp.lt.and.u32 q, {apart}, 16, q; @q mov.b32 $4, 1;")
    return f"{{ .reg .pred p, q; .reg .b32 x<{len(lines)}>; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _as_in_product(warps):
    """The layout [ROWS, LANES, COUNT] of a product: a thread holds two rows, neighbours other
    lanes.
    """
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
    """Return about the eighth highest of each row in each lane, [ROWS, LANES].

    ``x`` is [ROWS, LANES, COUNT]. The result is lower than the eighth, in proportion to the
    eighth's distance from ``near``, [ROWS].
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
    """Return the places of the eight highest of sixteen numbers, [rows, 2, COUNT], in order.

    A thread holds COUNT of the numbers and its neighbour the others; likewise of the places, [rows,
    2, .]. Also return whether some of a row were too close to order, [rows, 2], in either or both.
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
