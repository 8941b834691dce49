# mypy: ignore-errors
# ruff: noqa: RET505 - a branch that is not taken must not be compiled
"""Device functions that the Triton kernels share: loads, scores, and the bounds of loops.

A tile has queries along one axis and keys along the other. The caller chooses which, by passing
positions that broadcast. Exponents are base 2: scores are multiplied by log2(e) once.

A kernel that owns a block of queries divides the keys into five consecutive stretches. A kernel
that owns a block of keys divides the queries in the same way:

    masked | free, on one side | masked | free, on the other side | masked

A free tile needs no mask and no distance of a single pair: all its pairs are allowed, all its keys
lie on one side of all its queries (``side`` is 1 if the keys come first), and all its distances are
beyond the reach of a table. The middle stretch exists only if a bias or field uses distances.

A kernel loops over the stretches in an unrolled loop. ``by_keys`` and ``by_queries`` exclude the
stretches that a kind of call cannot have, so these are never compiled. View, Ends, Terms and
Relative of plan.py are passed to kernels as tuples.

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
# Finite replacements for -inf: 0 * NOTHING is 0, and 2^(NOTHING - LOWEST) is 0.
NOTHING = tl.constexpr(-3.0e38)
LOWEST = tl.constexpr(-1.0e37)
# A log-sum-exp that makes all weights 0. It is finite, so that 0 * ABSENT is 0.
ABSENT = tl.constexpr(1.0e30)


@triton.jit
def whose(heads):
    """Return the sequence and head of a program, as int64 because strides multiply them."""
    return (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)


@triton.jit
def start_of(ends, batch, queries, keys):
    """Return the position of the first query of a sequence."""
    if ends.starts is None:  # the last query has the last key's position
        return keys - queries
    else:
        return tl.load(ends.starts + batch)


@triton.jit
def head_of(view, batch, head):
    """Return a pointer to the first row of one head."""
    return view.data + batch * view.batch + head * view.head


@triton.jit
def rows_of(view, batch, head, rows, inside, width, BD: tl.constexpr, EVEN: tl.constexpr = False):
    """Load rows of one head, [rows, BD], with 0 outside of the tensor; EVEN: ``width`` is BD."""
    dims = tl.arange(0, BD)[None, :]
    at = head_of(view, batch, head) + rows[:, None].to(tl.int64) * view.row + dims
    there = inside[:, None]
    if not EVEN:
        there = there & (dims < width)
    return tl.load(at, mask=there, other=0.0)


@triton.jit
def columns_at(view, batch, head, N: tl.constexpr, BD: tl.constexpr):
    """Return pointers to the first N rows of a head, transposed: [BD, N]."""
    near, dims = tl.arange(0, N), tl.arange(0, BD)
    return head_of(view, batch, head) + near[None, :] * view.row + dims[:, None]


@triton.jit
def rows_at(view, batch, head, N: tl.constexpr, BD: tl.constexpr):
    """Return pointers to the first N rows of a head: [N, BD]."""
    near, dims = tl.arange(0, N), tl.arange(0, BD)
    return head_of(view, batch, head) + near[:, None] * view.row + dims[None, :]


@triton.jit
def read(at, dims, width, there, EVEN: tl.constexpr, FREE: tl.constexpr):
    """Load a tile; FREE: all of its rows exist; EVEN: ``width`` is the width of the tile."""
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
    """Load the log-sum-exp of rows, base 2; a row that attends to nothing gets ABSENT."""
    lse = tl.load(at, mask=inside, other=float("-inf"))
    return tl.where(lse == float("-inf"), ABSENT, lse * LOG2E)


@triton.jit
def tanh(x):
    """Return the tanh; near 0, where 1 - exp loses digits, from its series."""
    square = x * x
    series = x * (
        1 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315 - square * 62 / 2835)))
    )
    power = tl.exp2(tl.abs(x) * (-2 * LOG2E))
    far = (1 - power) / (1 + power)
    return tl.where(square < 0.0625, series, tl.where(x < 0, -far, far))


@triton.jit
def scores(
    dots, query_at, key_at, side, terms, head,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """Return the scores of a tile, base 2, and the derivative of the softcap."""
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
    """Return pointers to Transformer-XL's term; ``rows`` and ``key_at`` broadcast."""
    return head_of(shifted, batch, head) + rows.to(tl.int64) * shifted.row + key_at


@triton.jit
def allowed(query_at, key_at, low, high, keys, KIND: tl.constexpr):
    """Return for each pair of a tile whether the mask allows it."""
    if KIND == CAUSAL:
        return key_at <= query_at
    if KIND == INTERVAL:
        return (key_at >= low) & (key_at < high)
    return (key_at < keys) & (query_at == query_at)


@triton.jit
def shifts(shifted, batch, head, rows, inside, key_at):
    """Load Transformer-XL's term of a tile, with 0 outside of ``inside``."""
    return tl.load(shift_at(shifted, batch, head, rows, key_at), mask=inside, other=0.0)


@triton.jit
def range_of(ends, batch, rows, inside, KIND: tl.constexpr):
    """Load the range of keys of each query; only INTERVAL uses the ranges."""
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
    """Return the bounds of the five stretches of keys for the queries ``row`` to ``last``.

    The first six of the seven numbers are the start of each stretch and the end of the last one.
    The keys that any of these queries may attend to go from the seventh number to the sixth. The
    other numbers are multiples of the tile size BN.
    """
    first, stop = 0, keys
    inner_first, inner_stop = 0, keys
    if KIND == CAUSAL:
        stop = tl.maximum(last + offset + 1, 0)
        inner_stop = tl.maximum(row + offset + 1, 0)
    if KIND == INTERVAL:  # low and high never decrease from one query to the next
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
        if KIND == CAUSAL:  # no tile after a query is free: the rest is one masked stretch
            c = b
            d = b
    if KIND == INTERVAL:  # an empty middle stretch must stay inside of the range
        end = tl.maximum((stop + BN - 1) // BN * BN, start)
        a, b, c, d = tl.minimum(a, end), tl.minimum(b, end), tl.minimum(c, end), tl.minimum(d, end)
    return start, a, b, c, d, stop, first


@triton.jit
def query_stretches(
    bounds, key, last, offset, queries, reach, BM: tl.constexpr, KIND: tl.constexpr,
    SIDES: tl.constexpr,
):  # fmt: skip
    """Return the bounds of the five stretches of queries for the keys ``key`` to ``last``.

    These are six numbers, multiples of the tile size BM.
    """
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
    """Return the first position in a bin, with ``length`` positions spread evenly over the bins."""
    return ((index.to(tl.int64) * length + bins - 1) // bins).to(tl.int32)
