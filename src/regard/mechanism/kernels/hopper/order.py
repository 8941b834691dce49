# mypy: ignore-errors
"""Nearly the eighth highest of a row's numbers, by networks of comparisons (Batcher, 1968).

A thread puts its own in order without a branch. Of two such lists, its own and another thread's,
the higher half takes one comparison a place, and a few to put it in order; of that and the other
two threads' only the lowest is wanted.

A thread has two rows. It has them in the two halves of one register, as bfloat16, and so needs half
as many comparisons and shuffles. What is rounded is how far a number is from its row's highest or
so: if that is 1, the result is lower than the eighth by 0.016 at most.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard.mechanism.kernels.hopper.roles import (
    BAND,
    BOTH,
    LANES,
    ROWS,
    along,
    in_two,
    of_both,
)

COUNT = gl.constexpr(8)  # numbers of a row that a lane has; the place that is asked for


@gluon.jit
def _listed(x):
    """[BOTH, LANES, .] as a list of [BOTH, LANES]."""
    if x.shape[2] == 1:
        found = (gl.reshape(x, [BOTH, LANES]),)
    else:
        near, far = in_two(x)
        found = _listed(near) + _listed(far)
    return found


@gluon.constexpr_function
def _eighth(count):
    """PTX: given the numbers of two rows, $2 to $9 and $10 to $17, and what is near their highest.

    $0 and $1: of each row a number that is hardly lower than the eighth, the same in all lanes.
    """
    lines = []

    def made(operation, *of):
        name = f"x{len(lines)}"
        lines.append(f"{operation} {name}, {', '.join(of)};")
        return name

    def packed(i):
        near = made("sub.f32", f"${2 + i}", f"${2 + 2 * count}")
        far = made("sub.f32", f"${2 + count + i}", f"${3 + 2 * count}")
        return made("cvt.rn.bf16x2.f32", far, near)

    def compared(a, b):
        return [made("max.bf16x2", a, b), made("min.bf16x2", a, b)]

    def merged(x, y):  # two lists that are in order as one
        if len(x) == 1:
            return compared(x[0], y[0])
        even, odd = merged(x[::2], y[::2]), merged(x[1::2], y[1::2])
        found = even[:1]
        for a, b in zip(odd[:-1], even[1:], strict=True):
            found += compared(a, b)
        return found + odd[-1:]

    def in_order(x):  # the highest first
        half = len(x) // 2
        return merged(in_order(x[:half]), in_order(x[half:])) if half else x

    def settled(x):  # in order what rises and then falls, or falls and then rises
        half = len(x) // 2
        if not half:
            return x
        pairs = [compared(x[i], x[i + half]) for i in range(half)]
        return settled([high for high, _ in pairs]) + settled([low for _, low in pairs])

    def higher(x, away):  # of this list and that of another lane the higher half
        others = [made("shfl.sync.bfly.b32", a, str(away), "31", "-1") for a in reversed(x)]
        return [made("max.bf16x2", a, b) for a, b in zip(x, others, strict=True)]

    found = higher(settled(higher(in_order([packed(i) for i in range(count)]), 1)), 2)
    while len(found) > 1:
        found = [*found[2:], made("min.bf16x2", *found[:2])]
    for row in range(2):
        x = made("shl.b32", found[0], "16") if row == 0 else made("and.b32", found[0], "0xFFFF0000")
        lower = made("fma.rn.f32", made("abs.f32", x), "0fBC000000", x)  # by 2**-7 of it
        lines.append(f"add.f32 ${row}, {lower}, ${2 + 2 * count + row};")
    return f"{{ .reg .b32 x<{len(lines)}>; " + " ".join(lines) + " }"


@gluon.constexpr_function
def _as_in_product(warps):
    """[ROWS, LANES, COUNT]: a thread has two rows, and neighbours have their other lanes."""
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
    """Of each row nearly the eighth, in each lane: [ROWS, LANES] from [ROWS, LANES, COUNT].

    It is the lower, the farther the eighth is from ``near``, [ROWS].
    """
    layout: gl.constexpr = _as_in_product(WARPS)
    near = gl.convert_layout(near, along(layout, 3, 0))
    parts = gl.reshape(gl.convert_layout(x, layout), [ROWS // BAND, 2, BAND // 2, LANES, COUNT])
    one, other = gl.split(gl.reshape(gl.permute(parts, (0, 2, 3, 4, 1)), [BOTH, LANES, COUNT, 2]))
    numbers = _listed(one) + _listed(other)
    of_lanes: gl.constexpr = numbers[0].type.layout
    near_one, near_other = of_both(near)
    numbers += (gl.convert_layout(near_one, of_lanes), gl.convert_layout(near_other, of_lanes))
    one, other = gl.inline_asm_elementwise(
        _eighth(COUNT), "=&f,=&f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f,f", numbers,
        (gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip
    parts = gl.reshape(gl.join(one, other), [ROWS // BAND, BAND // 2, LANES, 2])
    return gl.reshape(gl.permute(parts, (0, 3, 1, 2)), [ROWS, LANES])
