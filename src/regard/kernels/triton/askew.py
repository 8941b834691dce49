# mypy: ignore-errors
"""Kernels for Transformer-XL's term; relative.py describes the term and launches the kernels.

They read or write a matrix [queries, keys] of a part of a call: the term itself, or the gradients
of scores. Shifting each row by one place more than the row above turns keys into distances.
"""

import triton
import triton.language as tl

from regard.kernels.triton.tiles import (
    CAUSAL,
    INTERVAL,
    LOG2E,
    allowed,
    head_of,
    key_stretches,
    range_of,
    rows_of,
    shift_at,
    shifts,
    whose,
)


@triton.jit
def embeddings(relative, head, distance, BU: tl.constexpr, EVEN: tl.constexpr):
    """Load Transformer-XL's embeddings of the given distances: [distances, BU]."""
    dims = tl.arange(0, BU)[None, :]
    place = tl.minimum(tl.maximum(distance - relative.first, 0), relative.last)[:, None]
    at = relative.table + head * relative.head + place.to(tl.int64) * relative.row + dims
    return tl.load(at) if EVEN else tl.load(at, mask=dims < relative.width, other=0.0)


@triton.jit(do_not_specialize=["queries", "keys", "sequence", "origin", "until"])
def spread(
    shifted, ends, relative, heads, queries, keys, sequence, origin, until,
    BN: tl.constexpr, BU: tl.constexpr, BLOCK: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store Transformer-XL's term, base 2, for the queries from ``origin`` to ``until``.

    A program computes a range of distances for every fourth query of a square of BLOCK x BLOCK.
    From one of these queries to the next the keys at a distance shift by four, so stores stay
    aligned to four numbers. A square with any allowed pair is stored completely, because other
    kernels read whole tiles of it.
    """
    its_batch, head = whose(heads)
    batch = its_batch + sequence
    offset = keys - queries
    square = origin + tl.program_id(0) // 4 * BLOCK
    row = square + tl.program_id(0) % 4
    last = tl.minimum(square + BLOCK, until) - 1
    parts = key_stretches(ends, batch, square, last, offset, keys, 0, BLOCK, KIND, False)
    start, stop = parts[0], tl.cdiv(parts[5], BLOCK) * BLOCK
    # The keys of the last of these queries start at ``first``. The keys of every other query start
    # four places before the keys of the query that follows it.
    first = start + tl.program_id(2) * BN
    past = BLOCK - 4
    if (first - past < stop) & (row < until):
        near = 4 * tl.arange(0, BLOCK // 4)
        rows = row + near
        inside = rows < until
        second = rows_of(relative.query, batch, head, rows, inside, relative.width, BU, EVEN)
        key_at = first + tl.arange(0, BN)
        table = embeddings(relative, head, row + past + offset - key_at, BU, EVEN)
        product = tl.dot(second, tl.trans(table), input_precision=PRECISION)
        its_key = key_at[None, :] + (near - past)[:, None]
        there = inside[:, None] & (its_key >= start) & (its_key < stop)
        at = shift_at(shifted, its_batch, head, (rows - origin)[:, None], its_key)
        tl.store(at, product * (relative.scale * LOG2E), mask=there)


@triton.jit
def may_attend(distance, key_at, low, high, keys, KIND: tl.constexpr):
    """Whether the mask allows the keys at the given distances: [queries, distances]."""
    if KIND == CAUSAL:
        return (distance >= 0)[None, :] & (key_at >= 0)
    if KIND == INTERVAL:
        return (key_at >= low) & (key_at < high)
    return (key_at >= 0) & (key_at < keys)


@triton.jit
def askew(changes, batch, head, row, key_at, may):
    """Load rows of ``changes``, starting at ``row``, with different keys in each row."""
    near = tl.arange(0, key_at.shape[0])[:, None]
    at = head_of(changes, batch, head) + row.to(tl.int64) * changes.row + near * changes.row
    return tl.load(at + key_at, mask=may, other=0.0)


@triton.jit(do_not_specialize=["sequence", "origin", "queries", "keys"])
def to_queries(
    key, changes, inner, query_grad, second_grad, ends, relative, scale, sequence, origin, heads,
    groups, queries, keys, width,
    BM: tl.constexpr, BN: tl.constexpr, BD: tl.constexpr, BU: tl.constexpr, EVEN: tl.constexpr,
    KIND: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Store the gradients of query and relative query, from the gradients of the scores.

    A program has BM queries. It reads the gradients of scores twice: by key, for the query, and
    shifted, by distance, for the relative query.
    """
    block = tl.num_programs(0) - 1 - tl.program_id(0) if KIND == CAUSAL else tl.program_id(0)
    its_batch, head = whose(heads)
    batch = its_batch + sequence
    row = origin + block * BM
    offset = keys - queries
    near = tl.arange(0, BM)
    rows = row + near
    inside = rows < queries
    query_at = (rows + offset)[:, None]
    low, high = range_of(ends, batch, rows, inside, KIND)
    low, high = low[:, None], high[:, None]
    its_row, there = (rows - origin)[:, None], inside[:, None]
    last = tl.minimum(row + BM, queries) - 1
    parts = key_stretches(ends, batch, row, last, offset, keys, 0, BN, KIND, False)
    dq = tl.zeros([BM, BD], tl.float32)
    second = tl.zeros([BM, BU], tl.float32)
    for tile in range(parts[0] // BN - BM // BN, tl.cdiv(parts[5], BN)):
        key_at = tile * BN + tl.arange(0, BN)
        seen = (key_at >= parts[6]) & (key_at < parts[5])  # all other keys may be NaN
        k = rows_of(key, batch, head // groups, key_at, seen, width, BD, EVEN)
        straight = shifts(inner, its_batch, head, its_row, there & (tile >= 0), key_at[None, :])
        may = allowed(query_at, key_at[None, :], low, high, keys, KIND)
        dq = tl.dot(tl.where(may, straight, 0.0), k, dq, input_precision=PRECISION)
        distance = row + offset - key_at
        table = embeddings(relative, head, distance, BU, EVEN)
        its_key = key_at[None, :] + near[:, None]
        may = there & may_attend(distance, its_key, low, high, keys, KIND)
        part = askew(changes, its_batch, head, row - origin, its_key, may)
        second = tl.dot(part, table, second, input_precision=PRECISION)
    its_row, dims = rows[:, None].to(tl.int64), tl.arange(0, BD)[None, :]
    at = head_of(query_grad, batch, head) + its_row * query_grad.row + dims
    dq = (dq * scale).to(query_grad.data.dtype.element_ty)
    tl.store(at, dq, mask=there & (dims < width))
    dims = tl.arange(0, BU)[None, :]
    at = head_of(second_grad, batch, head) + its_row * second_grad.row + dims
    second = (second * relative.scale).to(second_grad.data.dtype.element_ty)
    tl.store(at, second, mask=there & (dims < relative.width))


@triton.jit(do_not_specialize=[
    "nearest", "sequence", "sequences", "origin", "until", "queries", "keys",
])  # fmt: skip
def to_embeddings(
    changes, Far, ends, relative, nearest, sequence, sequences, origin, until, queries, keys,
    BM: tl.constexpr, BN: tl.constexpr, BU: tl.constexpr, EVEN: tl.constexpr, KIND: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to the gradient of Transformer-XL's embeddings, from a part of the call.

    A program has BN distances of a head, the farthest first, and a share of the query blocks.
    """
    head = tl.program_id(1).to(tl.int64)
    offset = keys - queries
    least = nearest + tl.program_id(0) * BN
    distance = least + BN - 1 - tl.arange(0, BN)
    # The queries that have keys at any of these distances.
    start = tl.maximum(tl.maximum(least - offset, 0) // BM * BM, origin)
    stop = tl.minimum(keys + least + BN - 1 - offset, until)
    steps = tl.cdiv(tl.maximum(stop - start, 0), BM)
    total = tl.zeros([BN, BU], tl.float32)
    for index in range(tl.program_id(2), sequences * steps, tl.num_programs(2)):
        its_batch = (index // steps).to(tl.int64)
        batch = its_batch + sequence
        rows = start + index % steps * BM + tl.arange(0, BM)
        inside = rows < until
        low, high = range_of(ends, batch, rows, inside, KIND)
        key_at = (rows + offset)[:, None] - distance[None, :]
        may = inside[:, None] & may_attend(
            distance, key_at, low[:, None], high[:, None], keys, KIND
        )
        row = start + index % steps * BM - origin
        part = askew(changes, its_batch, head, row, key_at, may)
        second = rows_of(relative.query, batch, head, rows, inside, relative.width, BU, EVEN)
        total = tl.dot(tl.trans(part), second, total, input_precision=PRECISION)
    if steps > 0:
        dims = tl.arange(0, BU)[None, :]
        place = tl.program_id(0) * BN + BN - 1 - tl.arange(0, BN)[:, None]
        share = tl.program_id(2) * tl.num_programs(1) + head
        at = Far + (share * (tl.num_programs(0) * BN) + place) * relative.width + dims
        there = dims < relative.width
        total = total * relative.scale + tl.load(at, mask=there, other=0.0)
        tl.store(at, total, mask=there)
