"""Launching the kernels: raw tensors in and out, everything else decided here.

Tensors are [batch, heads, length, dim], their last axis dense.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from regard.mechanism.kernels import backward as backward_kernels
from regard.mechanism.kernels import deltas
from regard.mechanism.kernels.columns import columns as columns_kernel
from regard.mechanism.kernels.forward import forward as forward_kernel
from regard.mechanism.kernels.structure import ALIBI, INTERVAL, TABLE, Structure

WARP = 16  # rows of a matrix product that one warp holds


class Blocks(NamedTuple):
    """How a kernel cuts its work."""

    queries: int
    keys: int
    warps: int
    stages: int


def _forward_blocks(query: Tensor, width: int) -> Blocks:
    if query.dtype == torch.float32:
        return Blocks(64, 32, 4, 2)
    if width <= 64:
        return Blocks(128, 64, 4, 3)
    return Blocks(128, 128, 8, 3) if width <= 128 else Blocks(128, 64, 8, 2)


def _columns_blocks(query: Tensor, width: int, pooled: bool) -> Blocks:
    if query.dtype == torch.float32:
        return Blocks(32, 64, 4, 2)
    if width > 128:
        return Blocks(64, 64, 4, 2)
    # A map sums each tile along both axes: fewer keys a thread, fewer sums across threads.
    return Blocks(128, 64, 4, 3) if pooled else Blocks(64, 128, 4, 3)


def _backward_blocks(query: Tensor, width: int) -> tuple[Blocks, Blocks]:
    """For the pass by queries, and for the one by keys."""
    if query.dtype == torch.float32:
        return Blocks(32, 32, 4, 1), Blocks(32, 32, 4, 1)
    if width <= 64:
        return Blocks(64, 64, 4, 3), Blocks(32, 128, 4, 1)
    if width <= 128:
        return Blocks(128, 64, 8, 3), Blocks(64, 128, 8, 1)
    return Blocks(64, 32, 8, 1), Blocks(32, 64, 8, 1)


def _power(width: int) -> int:
    """The width of a tile that holds ``width`` numbers; matrix products need at least 16."""
    return max(16, int(triton.next_power_of_2(width)))


def _precision(tensor: Tensor) -> str:
    return "ieee" if tensor.dtype == torch.float32 else "tf32"


def _ends(structure: Structure) -> tuple[int, int]:
    """The strides of low and high along the batch."""
    return tuple(  # type: ignore[return-value]
        0 if end is None or end.shape[0] == 1 else end.stride(0)
        for end in (structure.low, structure.high)
    )


def _table_step(structure: Structure) -> int:
    return 0 if structure.table is None else structure.table.stride(0)


def forward(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, wanted: Collection[str]
) -> dict[str, Tensor]:
    """Attend. Always "output" and "lse"; "entropy", "peak", "max_logit", "distance" if wanted."""
    batch, heads, queries, width = query.shape
    keys, value_width = key.shape[2], value.shape[3]
    blocks = _forward_blocks(query, max(width, value_width))
    wide = _power(width), _power(value_width)
    count = triton.cdiv(queries, blocks.queries)
    options: Any = {"device": query.device, "dtype": torch.float32}
    found = {
        "output": value.new_empty(batch, heads, queries, value_width),
        "lse": torch.empty(batch, heads, queries, **options),
    }
    for name in ("entropy", "peak", "distance"):
        if name in wanted:
            found[name] = torch.empty(batch, heads, queries, **options)
    highest = torch.empty(batch, heads, count, **options) if "max_logit" in wanted else None
    output = found["output"]
    forward_kernel[count, batch * heads](
        query, key, value, output, found["lse"], found.get("entropy"), found.get("peak"), highest,
        found.get("distance"), structure.low, structure.high, structure.table,
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *output.stride()[:3],
        *_ends(structure), _table_step(structure), heads, heads // key.shape[1], queries, keys,
        width, value_width, structure.scale, structure.softcap or 0.0, structure.reach,
        BM=blocks.queries, BN=blocks.keys, BD=wide[0], BV=wide[1], D_EVEN=wide[0] == width,
        V_EVEN=wide[1] == value_width, KIND=structure.kind, BIAS=structure.bias,
        SOFTCAP=structure.softcap is not None, ENTROPY="entropy" in wanted, PEAK="peak" in wanted,
        HIGHEST=highest is not None, DISTANCE="distance" in wanted, PRECISION=_precision(query),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    if highest is not None:
        found["max_logit"] = highest.amax(-1)
    return found


class _Cut(NamedTuple):
    """How one axis of ``length`` positions in ``bins`` bins is cut into blocks of whole bins."""

    together: int  # bins a block
    width: int  # places for a bin in a block
    parts: int  # blocks a bin
    even: bool  # whether no place is empty, save at the very end
    blocks: int  # in all


def _cut(length: int, bins: int, size: int, least: int) -> _Cut:
    """Blocks of ``size`` places, or of fewer down to ``least`` where bins are narrower."""
    if bins == 1:
        return _Cut(1, size, triton.cdiv(length, size), True, triton.cdiv(length, size))
    widest = -(-length // bins)
    width = min(size, triton.next_power_of_2(widest))
    together, parts = max(least // width, 1), triton.cdiv(widest, width)
    even = length == bins * width * parts
    return _Cut(together, width, parts, even, triton.cdiv(bins, together) * parts)


def columns(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    structure: Structure,
    wanted: Collection[str],
    grid: tuple[int, int] = (1, 1),
) -> dict[str, Tensor]:
    """Sums over queries of the weights: "received", and in a grid of bins "map" and "map_peak".

    A map's cells are sums too, not yet divided by the number of queries in a bin.
    """
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    pooled = "map" in wanted
    blocks = _columns_blocks(query, width, pooled)
    rows, cols = grid if pooled else (1, 1)
    across = _cut(keys, cols, blocks.keys, blocks.keys)
    down = _cut(queries, rows, blocks.queries, 16)  # no matrix product is narrower
    unit = min(across.width, WARP)  # keys that are summed at once
    units = across.together * across.width // unit  # in a block
    options: Any = {"device": query.device, "dtype": torch.float32}
    found: dict[str, Tensor] = {}
    if "received" in wanted:
        found["received"] = torch.empty(batch, heads, keys, **options)
    for name in ("map", "map_peak"):
        if name in wanted:
            found[name] = torch.zeros(batch, heads, rows, across.blocks, units, **options)
    bounds = None
    if structure.kind == INTERVAL:
        block = torch.arange(across.blocks, device=query.device)
        column, part = block // across.parts * across.together, block % across.parts
        first = -(-column * keys // cols) + part * across.width
        after = -(-(column + across.together).clamp(max=cols) * keys // cols)
        if across.together == 1:
            after = torch.minimum(first + across.width, after)
        bounds = structure.bounds(first, after - 1)
    wide = _power(width)
    columns_kernel[across.blocks, batch * heads](
        query, key, lse, found.get("received"), found.get("map"), found.get("map_peak"), bounds,
        structure.low, structure.high, structure.table,
        *query.stride()[:3], *key.stride()[:3], *_ends(structure),
        0 if bounds is None or bounds.shape[0] == 1 else bounds.stride(0), _table_step(structure),
        heads, heads // key.shape[1], queries, keys, width, structure.scale,
        structure.softcap or 0.0, structure.reach, rows, down.parts, cols, across.parts,
        G=across.together, W=across.width, H=down.together, U=down.width,
        X=unit, BD=wide,
        D_EVEN=wide == width, EVEN=down.even, KIND=structure.kind, BIAS=structure.bias,
        SOFTCAP=structure.softcap is not None, RECEIVED="received" in wanted, MAP=pooled,
        MAP_PEAK="map_peak" in wanted, PRECISION=_precision(query),
        num_warps=blocks.warps, num_stages=blocks.stages,
    )  # fmt: skip
    for name in ("map", "map_peak"):
        if name in found:
            cells = found[name].reshape(batch, heads, rows, -1, across.parts * across.width // unit)
            found[name] = (cells.sum(4) if name == "map" else cells.amax(4))[..., :cols]
    return found


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    kept: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    train_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """The gradients of query, key, value and, if asked for, of the structure's table.

    ``kept`` is what the forward pass gave. ``grads`` are those of what it gave, by the same names:
    of "output", "lse", "entropy", "distance", "received" and of the sums in "map", where present.
    """
    batch, heads, queries, width = query.shape
    key_heads, keys, value_width = key.shape[1], key.shape[2], value.shape[3]
    options: Any = {"device": query.device, "dtype": torch.float32}
    grads = {name: grad.contiguous() for name, grad in grads.items()}
    lse, output = kept["lse"], kept["output"]
    grad = grads.get("output")
    if grad is None:
        grad = torch.zeros_like(output)
    wide = _power(width), _power(value_width)
    rows, cols = grads["map"].shape[2:] if "map" in grads else (1, 1)
    by_query, by_key = _backward_blocks(query, max(width, value_width))
    precision = _precision(query)
    numbers = (structure.scale, structure.softcap or 0.0, structure.reach)
    shared: Any = {
        "KIND": structure.kind,
        "BIAS": structure.bias,
        "SOFTCAP": structure.softcap is not None,
        "RECEIVED": "received" in grads,
        "MAP": "map" in grads,
        "PRECISION": precision,
    }
    both: Any = {"BD": wide[0], "BV": wide[1], "ENTROPY": "entropy" in grads} | {
        "DISTANCE": "distance" in grads,
        "EVEN": wide == (width, value_width),
    }

    extra = None
    if "received" in grads or "map" in grads:
        extra = torch.empty(batch, heads, queries, **options)
        blocks = _forward_blocks(query, max(width, value_width))
        deltas.expected[triton.cdiv(queries, blocks.queries), batch * heads](
            query, key, lse, grads.get("received"), grads.get("map"), extra,
            structure.low, structure.high, structure.table,
            *query.stride()[:3], *key.stride()[:3], *_ends(structure), _table_step(structure),
            heads, heads // key_heads, queries, keys, width, *numbers, rows, cols,
            BM=blocks.queries, BN=blocks.keys, BD=wide[0], **shared,
            num_warps=blocks.warps, num_stages=blocks.stages,
        )  # fmt: skip

    delta = torch.empty(batch, heads, queries, **options)
    deltas.delta[triton.cdiv(queries, 64), batch * heads](
        output, grad, lse, grads.get("lse"), kept.get("entropy"), grads.get("entropy"),
        kept.get("distance"), grads.get("distance"), extra, delta,
        *output.stride()[:3], *grad.stride()[:3], heads, queries, value_width,
        BM=64, BV=wide[1], GRAD="output" in grads, LSE="lse" in grads, ENTROPY="entropy" in grads,
        DISTANCE="distance" in grads, EXTRA=extra is not None, num_warps=4,
    )  # fmt: skip

    table_grad = None
    if train_bias and structure.bias == ALIBI:
        table_grad = torch.empty(batch, heads, queries, **options)
    elif train_bias and structure.bias == TABLE:
        assert structure.table is not None
        table_grad = torch.zeros_like(structure.table)
    query_grad = torch.empty_like(query)
    key_grad, value_grad = torch.empty_like(key), torch.empty_like(value)
    inputs = (
        query, key, value, grad, lse, delta, grads.get("entropy"), grads.get("distance"),
        grads.get("received"), grads.get("map"),
    )  # fmt: skip
    strides = (
        *query.stride()[:3], *key.stride()[:3], *value.stride()[:3], *grad.stride()[:3],
    )  # fmt: skip
    sizes = (heads // key_heads, queries, keys, width, value_width, *numbers, rows, cols)
    backward_kernels.by_query[triton.cdiv(queries, by_query.queries), batch * heads](
        *inputs, query_grad, table_grad, structure.low, structure.high, structure.table,
        *strides, *query_grad.stride()[:3], *_ends(structure), _table_step(structure), heads,
        *sizes, BM=by_query.queries, BN=by_query.keys, TRAIN=train_bias, **shared, **both,
        num_warps=by_query.warps, num_stages=by_query.stages,
    )  # fmt: skip

    count, bounds = triton.cdiv(keys, by_key.keys), None
    if structure.kind == INTERVAL:
        first = torch.arange(count, device=query.device) * by_key.keys
        bounds = structure.bounds(first, (first + by_key.keys).clamp(max=keys) - 1)
    backward_kernels.by_key[count, batch * key_heads](
        *inputs, key_grad, value_grad, bounds, structure.low, structure.high, structure.table,
        *strides, *key_grad.stride()[:3], *value_grad.stride()[:3], *_ends(structure),
        0 if bounds is None or bounds.shape[0] == 1 else bounds.stride(0), _table_step(structure),
        key_heads, *sizes, BM=by_key.queries, BN=by_key.keys, **shared, **both,
        num_warps=by_key.warps, num_stages=by_key.stages,
    )  # fmt: skip
    if table_grad is not None and structure.bias == ALIBI:
        table_grad = table_grad.sum((0, 2))[:, None]
    return query_grad, key_grad, value_grad, table_grad
