"""Launches of the Triton kernels: block sizes, allocation of results, arguments.

Called by ``passes``. Tensors are [batch, heads, length, dim], and their last axis is contiguous.
These kernels can run every pass of every call that the backend 'triton' accepts.

Test: ``pytest tests -k "kernels and output_and_every_field"``.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.kernels.compat import FUSED, OVERLAPPING
from regard.kernels.memo import GraphSafeCache
from regard.kernels.plan import (
    Structure,
    View,
    bins,
    ceil,
    next_power,
    outputs,
    power,
)
from regard.kernels.sizes import ALIBI, CAUSAL, FULL, INTERVAL, LANES, LOG2E, RELATIVE, TABLE
from regard.kernels.triton import backward as backward_kernels
from regard.kernels.triton import deltas, distances, relative
from regard.kernels.triton import rows as rows_kernels
from regard.kernels.triton.columns import columns as columns_kernel
from regard.kernels.triton.forward import forward as forward_kernel
from regard.kernels.triton.forward import merge as merge_kernel

WARP = 16  # rows of a matrix product that one warp holds

# Chosen by measurements on an H200 (docs/log.md, "Kernels for the GPU").
PROGRAMS = 256  # programs that keep a large device busy: about two for each multiprocessor
NEAR = 2048  # the most keys per query for which smaller blocks, which mask fewer pairs, are faster
SHARE = 512  # the fewest keys that each of several programs takes of one block of queries
LOOKED = 64  # rows that a program of ``search`` checks for unfinished rows
MANY = 2**18  # with this many rows or more, each program checks 32 * LOOKED
TILE = 2**14  # numbers in a tile of keys that ``search`` loads for a single row
SCRATCH = 2**29  # the most bytes for candidates of top keys; it limits the heads of a launch


class Blocks(NamedTuple):
    """The block sizes of a kernel, and its numbers of warps and pipeline stages."""

    queries: int
    keys: int
    warps: int
    stages: int


def _forward_blocks(query: Tensor, width: int, structure: Structure) -> Blocks:
    if query.dtype == torch.float32:
        return Blocks(64, 32, 4, 2)
    if query.shape[2] <= WARP:  # decoding: bound by reading keys and values
        return Blocks(WARP, 64, 4, 3 if width <= 128 else 2)
    if structure.bias == RELATIVE:  # a tile of the term is larger than its keys and values
        return Blocks(64, 64, 4, 2)
    # With few queries, small blocks give more programs and mask fewer pairs.
    if query.shape[2] <= 1024 and (width > 64 or structure.kind == CAUSAL) and width <= 128:
        return Blocks(64, 64, 4, 3)
    if width <= 64 and 0 < structure.max_keys <= NEAR:
        return Blocks(64, 64, 4, 3)
    if width <= 64:
        return Blocks(128, 64, 4, 3)
    return Blocks(128, 128, 8, 3) if width <= 128 else Blocks(128, 64, 8, 2)


def _columns_blocks(query: Tensor, width: int, structure: Structure, pooled: bool) -> Blocks:
    if query.dtype == torch.float32:
        return Blocks(32, 64, 4, 2)
    if width > 128:
        return Blocks(64, 64, 4, 2)
    if not pooled:
        return Blocks(64, 128, 4, 3)
    # A map sums each tile along both axes: fewer keys per thread need fewer sums across threads.
    if query.shape[2] < 1024 and (width > 64 or structure.kind != FULL):
        return Blocks(64, 64, 4, 3 if width <= 64 else 2)
    return Blocks(128, 64, 4, 3)


def _backward_blocks(query: Tensor, width: int, structure: Structure) -> tuple[Blocks, Blocks]:
    """Return the block sizes of the kernel ``by_query``, and of ``by_key``."""
    if query.dtype == torch.float32:
        return Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)
    relative_bias = structure.bias == RELATIVE  # a tile of the term is larger than its queries
    if width <= 64:
        return Blocks(64, 64, 4, 3), Blocks(64, 64, 4, 1) if relative_bias else Blocks(
            32, 128, 4, 1
        )
    if width <= 128:
        return Blocks(128, 64, 8, 3), Blocks(32 if relative_bias else 64, 128, 8, 1)
    return Blocks(64, 32, 8, 1), Blocks(32, 64, 8, 1)


def _top_blocks(query: Tensor, width: int, count: int) -> Blocks:
    places = 64 if count <= 16 else 128  # the first pass keeps the highest score at each place
    return Blocks(32 if query.dtype == torch.float32 or width > 128 else 64, places, 4, 2)


def _tile_widths(width: int, value_width: int) -> tuple[int, int]:
    """Return the widths of the tiles of keys and of values.

    Tiles of values are at least as wide as tiles of keys: on an H200 (Triton 3.6), ``forward`` gave
    wrong numbers for widths of 128 (keys) and 32 (values).
    """
    return power(width), power(max(width, value_width))


def _precision(tensor: Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


def forward(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, fields: Collection[str]
) -> dict[str, Tensor]:
    """Return "output", "lse", and those of BY_ROW that are in ``fields``."""
    batch, heads, queries, width = query.shape
    keys, value_width = key.shape[2], value.shape[3]
    blocks = _forward_blocks(query, max(width, value_width), structure)
    wide = _tile_widths(width, value_width)
    count = ceil(queries, blocks.queries)
    splits = _splits(count * batch * heads, keys)
    options: Any = {"device": query.device, "dtype": torch.float32}
    results = outputs(query, value, fields)
    if splits > 1:
        kept = torch.empty(batch * heads * splits * queries, wide[1] + 4, **options)
        count_merged = ceil(queries, WARP)
    else:
        kept, count_merged = None, count
    highest = torch.empty(batch, heads, count_merged, **options) if "max_logit" in fields else None
    written = (
        View.of(results["output"]), results["lse"], results.get("entropy"), results.get("peak"),
        highest, results.get("distance"),
    )  # fmt: skip
    fields_of_rows: Any = {
        "ENTROPY": "entropy" in fields,
        "PEAK": "peak" in fields,
        "HIGHEST": highest is not None,
        "DISTANCE": "distance" in fields,
    }
    for part, shifted in _parts(query, keys, structure):
        count = ceil(part.stop - part.start, blocks.queries)
        forward_kernel[count, part.sequences * heads, splits](
            View.of(query), View.of(key), View.of(value), *written, kept,
            structure.ends, structure.terms, shifted, part.sequence, part.start,
            heads, heads // key.shape[1], queries, keys, width, value_width, splits,
            BM=blocks.queries, BN=blocks.keys, BD=wide[0], BV=wide[1], D_EVEN=wide[0] == width,
            V_EVEN=wide[1] == value_width, KIND=structure.kind, BIAS=structure.bias,
            SOFTCAP=structure.softcap is not None, SPLIT=splits > 1, PRECISION=_precision(query),
            **fields_of_rows, **FUSED, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
    if splits > 1:
        merge_kernel[count_merged, batch * heads](
            kept, *written, heads, queries, value_width, splits, BM=WARP, BV=wide[1],
            **fields_of_rows, **FUSED, num_warps=4,
        )  # fmt: skip
    if highest is not None:
        results["max_logit"] = highest.amax(-1) if count_merged > 1 else highest[..., 0]
    return results


def _parts(query: Tensor, keys: int, structure: Structure) -> Iterator[tuple[relative.Part, View]]:
    """Yield the call as one part or, with Transformer-XL's term, its parts with their terms."""
    if structure.bias != RELATIVE:
        yield relative.Part(0, query.shape[0], 0, query.shape[2], keys), View(None)
        return
    parts = relative.parts(query, keys, structure.kind)
    room = relative.room(query, parts, torch.float32)
    for part in parts:
        yield part, relative.shifted(structure, part, query.shape[2], keys, room)


def _splits(programs: int, keys: int) -> int:
    """Return the number of programs that split the keys of a block, to keep the device busy."""
    return max(1, min(PROGRAMS // programs, keys // SHARE))


class _Cut(NamedTuple):
    """How one axis is cut into blocks of whole bins, or of parts of one bin."""

    together: int  # bins per block
    width: int  # places of a bin in a block
    parts: int  # blocks per bin
    even: bool  # whether no place is empty, except at the end of the axis
    blocks: int  # number of blocks


def _cut(length: int, bins: int, size: int, lanes: int) -> _Cut:
    """Cut into blocks of ``size`` places with at least ``lanes`` bins, or else with one bin."""
    if bins == 1:
        return _Cut(1, size, ceil(length, size), True, ceil(length, size))
    widest = -(-length // bins)
    width = min(size, next_power(widest))
    together = size // width if size // width >= lanes else 1
    if together == 1:
        width = max(width, 16)  # no matrix product is narrower than 16
    parts = ceil(widest, width)
    even = length == bins * width * parts
    return _Cut(together, width, parts, even, ceil(bins, together) * parts)


def columns(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    structure: Structure,
    fields: Collection[str],
    grid: tuple[int, int] = (1, 1),
) -> dict[str, Tensor]:
    """Return those of OVER_QUERIES in ``fields``; the maps have ``grid`` rows and columns."""
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    pooled = "map" in fields
    blocks = _columns_blocks(query, width, structure, pooled)
    rows, cols = grid if pooled else (1, 1)
    across = _cut(keys, cols, blocks.keys, 1)
    down = _cut(queries, rows, blocks.queries, LANES)
    unit = min(across.width, WARP)  # keys over which the kernel sums
    units = across.together * across.width // unit  # units per block
    options: Any = {"device": query.device, "dtype": torch.float32}
    bounds = None
    if structure.kind == INTERVAL:
        block = torch.arange(across.blocks, device=query.device)
        column = block // across.parts * across.together
        first = -(-column * keys // cols) + block % across.parts * across.width
        after = -(-(column + across.together).clamp(max=cols) * keys // cols)
        if across.together == 1:
            after = torch.minimum(first + across.width, after)
        bounds = structure.bounds(first, after - 1)
    # A row without any weight (mask or bias of -inf) must add 0: its neg_lse stays -inf.
    neg_lse = torch.where(lse == -torch.inf, lse, lse * -LOG2E)
    wide = power(width)
    cells = batch, heads, rows, across.blocks, units
    shapes = {"received": (batch, heads, keys), "map": cells, "map_peak": cells}
    # Cells that no tile covers stay 0; without a mask every cell is covered.
    covered = structure.kind == FULL and across.even and structure.bias != RELATIVE
    new = torch.empty if covered else torch.zeros
    results: dict[str, Tensor] = {}
    for part, shifted in _parts(query, keys, structure):
        some = {name: new(shape, **options) for name, shape in shapes.items() if name in fields}
        columns_kernel[across.blocks, part.sequences * heads](
            View.of(query), View.of(key), neg_lse, some.get("received"), some.get("map"),
            some.get("map_peak"), bounds, _batch_step(bounds), structure.ends, structure.terms,
            shifted, part.sequence, part.start, part.stop, heads, heads // key.shape[1], queries,
            keys, width, rows, down.parts, cols, across.parts, G=across.together, W=across.width,
            H=down.together, U=down.width, X=unit, BD=wide, D_EVEN=wide == width, EVEN=down.even,
            FULL_KEYS=across.even and keys % (across.together * across.width) == 0,
            KIND=structure.kind, BIAS=structure.bias, SOFTCAP=structure.softcap is not None,
            RECEIVED="received" in fields, MAP=pooled, MAP_PEAK="map_peak" in fields,
            PRECISION=_precision(query), **FUSED, num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip
        for name, tensor in some.items():
            join = torch.maximum if name == "map_peak" else torch.add
            results[name] = join(results[name], tensor) if name in results else tensor
    for name in ("map", "map_peak"):
        if name in results:
            pieces = results[name].reshape(
                batch, heads, rows, -1, across.parts * across.width // unit
            )
            if pieces.shape[4] > 1:
                pieces = pieces.sum(4, keepdim=True) if name == "map" else pieces.amax(4, True)
            results[name] = pieces[..., :cols, 0]
    if pooled:
        results["map"] = _averages(results["map"], lse, structure, keys)
    return results


def _averages(cells: Tensor, lse: Tensor, structure: Structure, keys: int) -> Tensor:
    """Divide sums over a map's bins by the number of queries in each that attend to any key."""
    queries, rows = lse.shape[2], cells.shape[2]
    sees = structure.kind == FULL or (structure.kind == CAUSAL and keys >= queries)
    if not sees or structure.bias == TABLE:  # a table may have -inf
        count = lse.new_zeros(*lse.shape[:2], rows)
        row_of = bins(queries, rows, lse.device)
        count = count.index_add(2, row_of, (lse > -torch.inf).to(lse.dtype)).clamp(min=1)
    elif queries % rows == 0:
        return cells / (queries // rows)
    else:
        edges = -(torch.arange(rows + 1, device=lse.device) * -queries // rows)
        count = edges.diff()
    return cells / count[..., None]


def _batch_step(bounds: Tensor | None) -> int:
    return 0 if bounds is None or bounds.shape[0] == 1 else bounds.stride(0)


def rows(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    structure: Structure,
    places: Sequence[int],
    logs: bool = False,
) -> Tensor:
    """Return rows of the weights, or their logarithms to base 2: [batch, heads, rows, keys]."""
    batch, heads, queries, width = query.shape
    keys, count = key.shape[2], len(places)
    index = _index(tuple(place % queries for place in places), query.device)
    weights = torch.empty(batch, heads, count, keys, device=query.device, dtype=torch.float32)
    rows_kernels.rows[ceil(count, WARP) * ceil(keys, 64), batch * heads](
        View.of(query), View.of(key), lse, index, weights, structure.ends, structure.terms,
        heads, heads // key.shape[1], queries, keys, width, count, BM=WARP, BN=64,
        BD=power(width), KIND=structure.kind, BIAS=structure.bias,
        SOFTCAP=structure.softcap is not None, LOGS=logs, PRECISION=_precision(query),
        **FUSED, num_warps=4,
    )  # fmt: skip
    return weights


@GraphSafeCache
def _index(places: tuple[int, ...], device: torch.device) -> Tensor:
    """Return the places as a tensor, cached: CUDA graphs cannot capture a copy from the host."""
    return torch.tensor(places, dtype=torch.int32, device=device)


def top(
    query: Tensor, key: Tensor, lse: Tensor, structure: Structure, count: int
) -> dict[str, Tensor]:
    """Return the largest weights of each query and their keys: "top_weights" and "top_keys"."""
    if query.shape[2] <= WARP:
        return _top_of_few(query, key, lse, structure, count)
    results, unfinished = new_top(query, count)
    _collect(query, key, lse, structure, count, results, unfinished)
    search_top(query, key, lse, structure, count, results, unfinished)
    return results


def _top_of_few(
    query: Tensor, key: Tensor, lse: Tensor, structure: Structure, count: int
) -> dict[str, Tensor]:
    """Return the results of ``top`` for few queries, by sorting all of their weights."""
    keys = key.shape[2]
    logs = rows(query, key, lse, structure, range(query.shape[2]), logs=True)
    best = logs.topk(min(count, keys))
    weights = best.values.exp2()
    chosen = best.indices.masked_fill(best.values == -torch.inf, -1)
    if count > keys:
        missing = (0, count - keys)
        weights, chosen = pad(weights, missing), pad(chosen, missing, value=-1)
    return {"top_weights": weights, "top_keys": chosen}


def new_top(query: Tensor, count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Allocate the top weights and keys, and the marks of rows that ``search_top`` must finish."""
    shape = (*query.shape[:3], count)
    results = {
        "top_weights": torch.empty(shape, device=query.device, dtype=torch.float32),
        "top_keys": torch.empty(shape, device=query.device, dtype=torch.int64),
    }
    return results, torch.empty(query.shape[:3], device=query.device, dtype=torch.int8)


def search_top(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    structure: Structure,
    count: int,
    results: dict[str, Tensor],
    unfinished: Tensor,
    overlap: bool = False,
) -> None:
    """Write the top weights and keys of the rows that are marked ``unfinished``.

    ``overlap``: programs may start before the launch that marks the rows has ended.
    """
    _, heads, queries, width = query.shape
    keys, count_rows = key.shape[2], unfinished.numel()
    options = OVERLAPPING if overlap and query.is_cuda else {}
    wide = power(width)
    looked = LOOKED if count_rows < MANY else 32 * LOOKED
    rows_kernels.search[(ceil(count_rows, looked),)](
        View.of(query), View.of(key), lse, unfinished, *results.values(), structure.ends,
        structure.terms, count_rows, heads, heads // key.shape[1], queries, keys, width, count,
        LOOKED=looked, BM=WARP, BN=TILE // wide, BD=wide, COUNT=next_power(count),
        KIND=structure.kind, BIAS=structure.bias, SOFTCAP=structure.softcap is not None,
        PRECISION=_precision(query), EARLY=bool(options), num_warps=8, num_stages=1, **FUSED,
        **options,
    )  # fmt: skip


def _collect(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    structure: Structure,
    count: int,
    results: dict[str, Tensor],
    unfinished: Tensor,
) -> None:
    """Write the top weights and keys of most rows, and mark the other rows as ``unfinished``."""
    batch, heads, queries, width = query.shape
    places = next_power(count)
    most = 4 * max(8, places)  # the most candidates of a row that ``pick`` sorts
    room = 2 * max(LANES, places)  # candidates of one lane
    turns = max(1, SCRATCH // (queries * LANES * room * 8))  # heads per launch
    turns = min(turns, batch * heads)
    reached = torch.empty(turns * queries, LANES, device=query.device, dtype=torch.int32)
    candidates = torch.empty(turns * queries, LANES, room, device=query.device, dtype=torch.int64)
    wide = power(width)
    blocks = _top_blocks(query, width, count)
    for first in range(0, batch * heads, turns):
        some = min(turns, batch * heads - first)
        rows_kernels.collect[ceil(queries, blocks.queries), some](
            View.of(query), View.of(key), reached, candidates, structure.ends, structure.terms,
            heads, heads // key.shape[1], queries, key.shape[2], width, count, first,
            BM=blocks.queries, BN=blocks.keys, BD=wide, ROOM=room, EVEN=wide == width,
            KIND=structure.kind, BIAS=structure.bias, SOFTCAP=structure.softcap is not None,
            PRECISION=_precision(query), num_warps=blocks.warps, num_stages=blocks.stages,
            enable_fp_fusion=False,  # both passes must round scores alike
        )  # fmt: skip
        rows_kernels.pick[ceil(queries, WARP), some](
            lse, reached, candidates, unfinished, *results.values(), queries, count, first,
            BM=WARP, ROOM=room, MOST=most, COUNT=places, **FUSED, num_warps=4,
        )  # fmt: skip


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    kept: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    train_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor]:
    """Return the gradients of query, key, value, table and relative query, and the delta.

    ``kept`` are the saved results of the forward pass. ``grads`` are the gradients of results by
    name, any of "output", "lse", "entropy", "distance", "received" and "map".
    """
    batch, heads, queries, width = query.shape
    key_heads, keys, value_width = key.shape[1], key.shape[2], value.shape[3]
    groups = heads // key_heads
    options: Any = {"device": query.device, "dtype": torch.float32}
    grads = {name: grad.contiguous() for name, grad in grads.items()}
    lse, output = kept["lse"], kept["output"]
    grad = grads.get("output")
    if grad is None:
        grad = torch.zeros_like(output)
    wide = _tile_widths(width, value_width)
    rows, cols = 1, 1
    if "map" in grads:
        rows, cols = grads["map"].shape[2:]
        grads["map"] = _averages(grads["map"], lse, structure, keys)
    widest = max(width, value_width)
    by_query, by_key = _backward_blocks(query, widest, structure)
    views = View.of(query), View.of(key), View.of(value), View.of(grad)
    shared: Any = {
        "BD": wide[0],
        "KIND": structure.kind,
        "SOFTCAP": structure.softcap is not None,
        "RECEIVED": "received" in grads,
        "MAP": "map" in grads,
        "PRECISION": _precision(query),
    }
    both: Any = {"BV": wide[1], "ENTROPY": "entropy" in grads, "DISTANCE": "distance" in grads}
    even: Any = {"EVEN": wide == (width, value_width), "BIAS": structure.bias}

    extra = None
    if "received" in grads or "map" in grads:
        blocks = _forward_blocks(query, widest, structure)
        extra = _expected(query, key, lse, grads, structure, (rows, cols), blocks, shared)
    delta = torch.empty(batch, heads, queries, **options)
    deltas.delta[ceil(queries, 64), batch * heads](
        View.of(output), views[3], lse, grads.get("lse"), kept.get("entropy"),
        grads.get("entropy"), kept.get("distance"), grads.get("distance"), extra, delta,
        heads, queries, value_width,
        BM=64, GRAD="output" in grads, LSE="lse" in grads, EXTRA=extra is not None, **both,
        **FUSED, num_warps=4,
    )  # fmt: skip

    # Each query's gradient of Alibi's slope, or of the two ends of a table.
    own_bias = train_bias and structure.bias in (ALIBI, TABLE)
    far_grad = torch.empty(2, batch, heads, queries, **options) if own_bias else None
    table_grad = None
    key_grad, value_grad = torch.empty_like(key), torch.empty_like(value)
    inputs = (
        *views, lse, delta, grads.get("entropy"), grads.get("distance"), grads.get("received"),
        grads.get("map"),
    )  # fmt: skip
    sizes = (groups, queries, keys, width, value_width, rows, cols)
    relative_grads = None
    if structure.bias == RELATIVE:
        relative_grads = relative.Gradients(query, key, structure, train_bias)
        query_grad = relative_grads.query
    else:
        query_grad = torch.empty_like(query)
        backward_kernels.by_query[ceil(queries, by_query.queries), batch * heads](
            *inputs, View.of(query_grad), far_grad, structure.ends, structure.terms, heads, *sizes,
            BM=by_query.queries, BN=by_query.keys, TRAIN=own_bias, **shared, **both,
            **even, **FUSED, num_warps=by_query.warps, num_stages=by_query.stages,
        )  # fmt: skip

    bounds = None
    if structure.kind == INTERVAL:
        first = torch.arange(ceil(keys, by_key.keys), device=query.device) * by_key.keys
        bounds = structure.bounds(first, (first + by_key.keys).clamp(max=keys) - 1)
    for part, shifted in _parts(query, keys, structure):
        changes, inners = (
            (View(None), View(None)) if relative_grads is None else relative_grads.rooms(part)
        )
        add = part.stop - part.start < queries  # the keys' gradients are sums over parts
        if add and part.sequence == part.start == 0:
            key_grad, value_grad = (torch.zeros(tensor.shape, **options) for tensor in (key, value))
        backward_kernels.by_key[ceil(part.keys, by_key.keys), part.sequences * key_heads](
            *inputs, View.of(key_grad), View.of(value_grad), bounds, _batch_step(bounds),
            structure.ends, structure.terms, shifted, changes, inners, part.sequence, part.start,
            part.stop, key_heads, *sizes, BM=by_key.queries, BN=by_key.keys, ADD=add, **shared,
            **both, **even, **FUSED, num_warps=by_key.warps, num_stages=by_key.stages,
        )  # fmt: skip
        if relative_grads is not None:
            relative_grads.add(part)

    if far_grad is not None and structure.bias == ALIBI:
        table_grad = far_grad[0].sum((0, 2))[:, None]
    elif far_grad is not None:
        table_grad = _by_diagonal(inputs, sizes, structure, shared | both)
        table_grad[:, -1], table_grad[:, 0] = far_grad.sum((1, 3))
    elif relative_grads is not None:
        table_grad = relative_grads.table
    second_grad = None if relative_grads is None else relative_grads.relative_query
    return (
        query_grad, key_grad.to(key.dtype), value_grad.to(value.dtype), table_grad, second_grad,
        delta,
    )  # fmt: skip


def _expected(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    grads: Mapping[str, Tensor],
    structure: Structure,
    grid: tuple[int, int],
    blocks: Blocks,
    shared: Any,
) -> Tensor:
    """Return what the gradients of ``received`` and the map add to the delta of each row."""
    _, heads, queries, width = query.shape
    keys = key.shape[2]
    extra = torch.empty_like(lse)
    for part, shifted in _parts(query, keys, structure):
        deltas.expected[ceil(part.stop - part.start, blocks.queries), part.sequences * heads](
            View.of(query), View.of(key), lse, grads.get("received"), grads.get("map"), extra,
            structure.ends, structure.terms, shifted, part.sequence, part.start, heads,
            heads // key.shape[1], queries, keys, width, *grid, BM=blocks.queries, BN=blocks.keys,
            BIAS=structure.bias, **shared, **FUSED, num_warps=blocks.warps,
            num_stages=blocks.stages,
        )  # fmt: skip
    return extra


def _shares(programs: int, tiles: int) -> int:
    """Return the number of programs that share the same distances, to keep the device busy."""
    return max(1, min(2 * PROGRAMS // programs, tiles))


def _by_diagonal(
    inputs: tuple[Any, ...], sizes: tuple[int, ...], structure: Structure, options: Any
) -> Tensor:
    """Return the gradient of a table, in the table's shape, for the distances below its reach."""
    query, reach = inputs[0].data, structure.reach
    batch, heads, queries, _ = query.shape
    narrow = query.dtype != torch.float32 and max(options["BD"], options["BV"]) <= 128
    size = 64 if narrow else 32
    low = 0 if structure.kind == CAUSAL else max(1 - queries, 1 - reach)
    high = min(sizes[2], reach) - 1
    if structure.starts is not None:  # any distance may occur
        low, high = 1 - reach, reach - 1
    lowest, highest = -((size - 1 - low) // size), (high + size - 1) // size
    count = highest - lowest + 1
    shares = _shares(count * heads, batch * ceil(queries, size))
    diagonals = torch.empty(heads, shares, count, 2 * size, device=query.device)
    distances.by_diagonal[shares * count, heads](
        *inputs, diagonals, structure.ends, structure.terms, lowest, count, batch, heads, *sizes,
        B=size, **options, **FUSED, num_warps=4, num_stages=2,
    )  # fmt: skip
    # The distances of neighbouring diagonals overlap by half.
    sums = diagonals.sum(1)
    near, far = sums[..., :size].flatten(1), sums[..., size:].flatten(1)
    total = pad(near, (0, size)) + pad(far, (size, 0))
    first = lowest * size - (size - 1)
    return pad(total[:, low - first : high + 1 - first], (reach + low, reach - high))
