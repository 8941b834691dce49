# mypy: ignore-errors
"""What all kernels share on the device: where tiles begin and end, and what a score is.

A tile has queries along one axis and keys along the other; which is which is the caller's affair,
since positions arrive shaped to broadcast. Exponents are base 2: scores are scaled by log2(e) once.

Over a block of queries the keys fall into five stretches, and over a block of keys so do the
queries:

    masked | free, on one side | masked | free, on the other side | masked

Free tiles need no comparison and no look at single distances: all their pairs are allowed, and all
their keys lie on one side of all their queries (``side`` is 1 where the keys come first), beyond
the reach of a table of distances. The middle stretch exists only where distances matter.
"""

import triton
import triton.language as tl

FULL = tl.constexpr(0)  # kinds of structure
CAUSAL = tl.constexpr(1)
INTERVAL = tl.constexpr(2)

PLAIN = tl.constexpr(0)  # kinds of bias
ALIBI = tl.constexpr(1)
TABLE = tl.constexpr(2)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
# Finite stand-ins for -inf: 0 * NOTHING is 0, and NOTHING - LOWEST is still far below any exponent.
NOTHING = tl.constexpr(-3.0e38)
LOWEST = tl.constexpr(-1.0e37)


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
    dots, query_at, key_at, side, scale, softcap, table, reach,
    BIAS: tl.constexpr, SOFTCAP: tl.constexpr, FREE: tl.constexpr,
):  # fmt: skip
    """Base-2 scores of a tile, and what the softcap leaves of a gradient; a head has its table."""
    slope = 1.0
    if SOFTCAP:
        bent = tanh(dots * (scale / softcap))
        result = bent * (softcap * LOG2E)
        slope = 1 - bent * bent
    else:
        result = dots * (scale * LOG2E)
    if BIAS == ALIBI:
        distance = (query_at - key_at).to(tl.float32)
        steepness = tl.load(table) * LOG2E
        if FREE:
            result -= (steepness * side) * distance
        else:
            result -= steepness * tl.abs(distance)
    if BIAS == TABLE:
        if FREE:
            result += tl.load(table + tl.where(side > 0, 2 * reach, 0)) * LOG2E
        else:
            distance = tl.minimum(tl.maximum(query_at - key_at, -reach), reach)
            result += tl.load(table + reach + distance) * LOG2E
    return result, slope


@triton.jit
def allowed(query_at, key_at, low, high, keys, KIND: tl.constexpr):
    """Whether each query of a tile may attend to each key."""
    if KIND == CAUSAL:
        return key_at <= query_at
    if KIND == INTERVAL:
        return (key_at >= low) & (key_at < high)
    return (key_at < keys) & (query_at == query_at)


@triton.jit
def key_stretches(
    low, high, row, last, offset, keys, reach, BN: tl.constexpr, KIND: tl.constexpr,
    SIDES: tl.constexpr,
):  # fmt: skip
    """The ends of the five stretches of keys for the queries ``row`` to ``last``, tiles of BN.

    Also the first and last + 1 of the keys that any of these queries may attend to.
    """
    first, stop = 0, keys
    inner_first, inner_stop = 0, keys
    if KIND == CAUSAL:
        stop = tl.maximum(last + offset + 1, 0)
        inner_stop = tl.maximum(row + offset + 1, 0)
    if KIND == INTERVAL:  # ends never move backwards from one query to the next
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
    if KIND == INTERVAL:  # an empty middle must not reach outside
        end = tl.maximum((stop + BN - 1) // BN * BN, start)
        a, b, c, d = tl.minimum(a, end), tl.minimum(b, end), tl.minimum(c, end), tl.minimum(d, end)
    return start, a, b, c, d, first, stop


@triton.jit
def edge(index, length, bins):
    """The first of ``length`` positions that falls into a bin, when they are spread evenly."""
    return ((index.to(tl.int64) * length + bins - 1) // bins).to(tl.int32)


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
        b = tl.minimum(tl.maximum((key - reach - offset + 1) // BM * BM, a), d)
        c = tl.minimum(tl.maximum((last + reach - offset + BM - 1) // BM * BM, b), d)
    return start, a, b, c, d, end
