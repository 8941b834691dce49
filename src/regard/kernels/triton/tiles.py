# mypy: ignore-errors
# ruff: noqa: RET505 - a branch that is not taken must not be compiled
"""What all Triton kernels share on the device: the ends of tiles, and the score of a pair.

A tile has queries along one axis and keys along the other; positions arrive shaped to broadcast, so
the order is the caller's. Exponents are base 2: scores are scaled by log2(e) once.

For a block of queries the keys fall into five stretches; so do the queries for a block of keys:

    masked | free, on one side | masked | free, on the other side | masked

Free tiles compare nothing and read no single distance: all their pairs are allowed, and all their
keys lie on one side of all their queries (``side`` is 1 where the keys come first), beyond the
reach of a table of distances. The middle stretch exists only where distances matter.

A kernel goes over the stretches in an unrolled loop; those that a kind of call cannot have, as
``by_keys`` and ``by_queries`` say, are never compiled. Tensors and numbers that belong together
arrive as the tuples of plan.py.

Test: ``pytest tests/kernels/test_triton.py -k "every_field and window"``.
"""

import triton
import triton.language as tl

from regard.kernels import sizes

FULL = tl.constexpr(sizes.FULL)  # kinds of mask
CAUSAL = tl.constexpr(sizes.CAUSAL)
INTERVAL = tl.constexpr(sizes.INTERVAL)

PLAIN = tl.constexpr(sizes.PLAIN)  # kinds of bias
ALIBI = tl.constexpr(sizes.ALIBI)
TABLE = tl.constexpr(sizes.TABLE)
RELATIVE = tl.constexpr(sizes.RELATIVE)

LOG2E = tl.constexpr(sizes.LOG2E)
LN2 = tl.constexpr(sizes.LN2)
# Finite stand-ins for -inf: 0 * NOTHING is 0, and NOTHING - LOWEST is far below any exponent.
NOTHING = tl.constexpr(-3.0e38)
LOWEST = tl.constexpr(-1.0e37)
# A log-sum-exp that leaves no weight, and is finite, so that 0 times it is 0.
ABSENT = tl.constexpr(1.0e30)


@triton.jit
def whose(heads):
    """The sequence and the head of a program, as int64 because they are multiplied by strides."""
    return (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)


@triton.jit
def head_of(view, batch, head):
    """A pointer to the first row of one head."""
    return view.data + batch * view.batch + head * view.head


@triton.jit
def rows_of(view, batch, head, rows, inside, width, BD: tl.constexpr, EVEN: tl.constexpr = False):
    """Load some rows of one head, [rows, BD], with 0 where there are none; EVEN: rows fill BD."""
    dims = tl.arange(0, BD)[None, :]
    at = head_of(view, batch, head) + rows[:, None].to(tl.int64) * view.row + dims
    there = inside[:, None]
    if not EVEN:  # compare each number's place
        there = there & (dims < width)
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def columns_at(view, batch, head, N: tl.constexpr, BD: tl.constexpr):
    """Pointers to one head's first N rows, each row a column: [BD, N]."""
    near, dims = tl.arange(0, N), tl.arange(0, BD)
    return head_of(view, batch, head) + near[None, :] * view.row + dims[:, None]


@triton.jit
def rows_at(view, batch, head, N: tl.constexpr, BD: tl.constexpr):
    """Pointers to one head's first N rows: [N, BD]."""
    near, dims = tl.arange(0, N), tl.arange(0, BD)
    return head_of(view, batch, head) + near[:, None] * view.row + dims[None, :]


@triton.jit
def read(at, dims, width, there, EVEN: tl.constexpr, FREE: tl.constexpr):
    """Load a tile; FREE: all of its rows exist; EVEN: rows fill their place."""
    if FREE and EVEN:
        return tl.load(at)
    elif EVEN:
        return tl.load(at, mask=there, other=0.0)
    elif FREE:
        return tl.load(at, mask=dims < width, other=0.0)
    else:
        return tl.load(at, mask=(dims < width) & there, other=0.0)


@triton.jit
def rows_lse(at, inside):
    """Base-2 log-sum-exp of some rows; a row that attends to nothing gets no weight."""
    lse = tl.load(at, mask=inside, other=float("-inf"))
    return tl.where(lse == float("-inf"), ABSENT, lse * LOG2E)


@triton.jit
def tanh(x):
    """tanh, accurate near 0 too, where 1 - exp would lose its digits."""
    square = x * x
    series = x * (
        1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * 62 / 2835)))
    )
    power = tl.exp2(-2 * LOG2E * tl.abs(x))
    far = (1 - power) / (1 + power)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -far, far))


@triton.jit
def scores(
    dots, query_at, key_at, side, terms, head,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """Base-2 scores of a tile, and the derivative of the softcap."""
    slope = 1.0
    if SOFTCAP:
        bent = tanh(dots * (terms.scale / terms.softcap))
        result = bent * (terms.softcap * LOG2E)
        slope = 1 - bent * bent
    else:
        result = dots * (terms.scale * LOG2E)
    if BIAS == ALIBI:
        distance = (query_at - key_at).to(tl.float32)
        steepness = tl.load(terms.table + head * terms.table_head) * LOG2E
        if FREE:
            result -= (steepness * side) * distance
        else:
            result -= steepness * tl.abs(distance)
    if BIAS == TABLE:
        table = terms.table + head * terms.table_head + terms.reach
        if FREE:
            result += tl.load(table + tl.where(side > 0, terms.reach, -terms.reach)) * LOG2E
        else:
            distance = tl.minimum(tl.maximum(query_at - key_at, -terms.reach), terms.reach)
            result += tl.load(table + distance) * LOG2E
    return result, slope


@triton.jit
def shift_at(shifted, batch, head, rows, key_at):
    """Pointers to Transformer-XL's term of rows and keys, which are shaped to broadcast."""
    return head_of(shifted, batch, head) + rows.to(tl.int64) * shifted.row + key_at


@triton.jit
def allowed(query_at, key_at, low, high, keys, KIND: tl.constexpr):
    """Whether the mask allows each pair of a tile."""
    if KIND == CAUSAL:
        return key_at <= query_at
    if KIND == INTERVAL:
        return (key_at >= low) & (key_at < high)
    return (key_at < keys) & (query_at == query_at)


@triton.jit
def shifts(shifted, batch, head, rows, inside, key_at):
    """Transformer-XL's term of a tile, 0 where there is none."""
    return tl.load(shift_at(shifted, batch, head, rows, key_at), mask=inside, other=0.0)


@triton.jit
def range_of(ends, batch, rows, inside, KIND: tl.constexpr):
    """The range of keys of some queries, where the mask gives ranges."""
    if KIND == INTERVAL:
        low = tl.load(ends.low + batch * ends.low_batch + rows, mask=inside, other=0)
        high = tl.load(ends.high + batch * ends.high_batch + rows, mask=inside, other=0)
        return low, high
    else:
        return rows, rows


@triton.constexpr_function
def by_keys(part, kind, sides):
    """Whether a block of queries can have this stretch of keys."""
    if part == 0:
        return kind == INTERVAL
    return part in (1, 4) or (sides and kind != CAUSAL)


@triton.constexpr_function
def by_queries(part, kind, sides):
    """Whether a block of keys can have this stretch of queries."""
    if part == 0:
        return kind != FULL
    if part == 1:
        return sides and kind != CAUSAL
    return part > 2 or sides


@triton.constexpr_function
def by_distance(bias):
    """Whether a bias depends on single distances."""
    return bias in (ALIBI, TABLE)


@triton.jit
def key_stretches(
    ends, batch, row, last, offset, keys, reach, BN: tl.constexpr, KIND: tl.constexpr,
    SIDES: tl.constexpr,
):  # fmt: skip
    """The ends of the five stretches of keys for the queries ``row`` to ``last``, tiles of BN.

    Also the first key that any of these queries may attend to; the last end is the end of those
    keys.
    """
    first, stop = 0, keys
    inner_first, inner_stop = 0, keys
    if KIND == CAUSAL:
        stop = tl.maximum(last + offset + 1, 0)
        inner_stop = tl.maximum(row + offset + 1, 0)
    if KIND == INTERVAL:  # ends never decrease from one query to the next
        low, high = ends.low + batch * ends.low_batch, ends.high + batch * ends.high_batch
        first, inner_first = tl.load(low + row), tl.load(low + last)
        inner_stop, stop = tl.load(high + row), tl.load(high + last)
    start = first // BN * BN
    a = (inner_first + BN - 1) // BN * BN
    d = tl.maximum(inner_stop // BN * BN, a)
    b = d
    c = d
    if SIDES:
        b = tl.minimum(tl.maximum((row + offset - reach + 1) // BN * BN, a), d)
        c = tl.minimum(tl.maximum((last + offset + reach + BN - 1) // BN * BN, b), d)
        if KIND == CAUSAL:  # nothing is free after a query: one masked stretch to the end
            c = b
            d = b
    if KIND == INTERVAL:  # an empty middle must stay inside of the range
        end = tl.maximum((stop + BN - 1) // BN * BN, start)
        a, b, c, d = tl.minimum(a, end), tl.minimum(b, end), tl.minimum(c, end), tl.minimum(d, end)
    return start, a, b, c, d, stop, first


@triton.jit
def query_stretches(
    bounds, key, last, offset, queries, reach, BM: tl.constexpr, KIND: tl.constexpr,
    SIDES: tl.constexpr,
):  # fmt: skip
    """The ends of the five stretches of queries for the keys ``key`` to ``last``, tiles of BM."""
    first, inner_first, inner_stop, stop = 0, 0, queries, queries
    if KIND == CAUSAL:
        first = tl.minimum(tl.maximum(key - offset, 0), queries)
        inner_first = tl.minimum(tl.maximum(last - offset, 0), queries)
    if KIND == INTERVAL:
        first, inner_first = tl.load(bounds), tl.load(bounds + 1)
        inner_stop, stop = tl.load(bounds + 2), tl.load(bounds + 3)
    end = (stop + BM - 1) // BM * BM
    start = tl.minimum(first // BM * BM, end)
    a = tl.minimum((inner_first + BM - 1) // BM * BM, end)
    d = tl.maximum(inner_stop // BM * BM, a)
    b = a
    c = a
    if SIDES:
        if KIND != CAUSAL:
            b = tl.minimum(tl.maximum((key - reach - offset + 1) // BM * BM, a), d)
        c = tl.minimum(tl.maximum((last + reach - offset + BM - 1) // BM * BM, b), d)
    return start, a, b, c, d, end


@triton.jit
def edge(index, length, bins):
    """The first of ``length`` positions in a bin, when they are spread evenly over the bins."""
    return ((index.to(tl.int64) * length + bins - 1) // bins).to(tl.int32)
