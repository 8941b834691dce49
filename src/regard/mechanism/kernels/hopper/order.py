# mypy: ignore-errors
# ruff: noqa: E741
"""The eighth highest of a row's numbers, by networks of comparisons (Batcher, 1968).

A thread puts its own in order without a branch. Of two such lists, its own and another thread's,
the higher half takes one comparison a place, and a few to put it in order; of that and the other
two threads' only the lowest is wanted.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from regard.mechanism.kernels.hopper.roles import in_two


@gluon.jit
def _listed(x):
    """[rows, lanes, .] as a list of [rows, lanes]."""
    if x.shape[2] == 1:
        found = (gl.reshape(x, [x.shape[0], x.shape[1]]),)
    else:
        near, far = in_two(x)
        found = _listed(near) + _listed(far)
    return found


@gluon.jit
def _merged(x, y):
    """Two lists that are in order as one."""
    N: gl.constexpr = len(x)
    if N == 1:
        found = (gl.maximum(x[0], y[0]), gl.minimum(x[0], y[0]))
    else:
        even, odd = _merged(x[::2], y[::2]), _merged(x[1::2], y[1::2])
        found = even[:1]
        for i in gl.static_range(N - 1):
            found += (gl.maximum(odd[i], even[i + 1]), gl.minimum(odd[i], even[i + 1]))
        found += odd[N - 1 :]
    return found


@gluon.jit
def _in_order(x):
    """The highest first."""
    N: gl.constexpr = len(x)
    found = x
    if N > 1:
        found = _merged(_in_order(x[: N // 2]), _in_order(x[N // 2 :]))
    return found


@gluon.jit
def _settled(x):
    """In order what rises and then falls, or falls and then rises."""
    N: gl.constexpr = len(x)
    found = x
    if N > 1:
        high, low = (), ()
        for i in gl.static_range(N // 2):
            high += (gl.maximum(x[i], x[i + N // 2]),)
            low += (gl.minimum(x[i], x[i + N // 2]),)
        found = _settled(high) + _settled(low)
    return found


@gluon.jit
def _higher(a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p):
    """Of two lists of eight that are in order the higher half."""
    high = gl.maximum(a, p), gl.maximum(b, o), gl.maximum(c, n), gl.maximum(d, m)
    high += gl.maximum(e, l), gl.maximum(f, k), gl.maximum(g, j), gl.maximum(h, i)
    return high


@gluon.jit
def eighth_highest(x):
    """Of each row: [rows] from [rows, 4 lanes, 8]."""
    mine = _in_order(_listed(x))
    pairs = ()
    for i in gl.static_range(8):
        pairs += (gl.reshape(mine[i], [x.shape[0], 2, 2]),)
    high = gl.reduce(_settled(gl.reduce(pairs, 2, _higher)), 1, _higher)
    lowest = high[0]
    for i in gl.static_range(1, 8):
        lowest = gl.minimum(lowest, high[i])
    return lowest
