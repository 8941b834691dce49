"""Seeing at full speed on the GPU, with our own kernels.

A mask that is a range of keys for each query, and a bias that depends on the distance alone, go
into the kernel as they are: two numbers a query, some numbers a head. What depends on one query's
row of weights (lse, entropy, peak, distance) comes out of the forward pass itself; what sums over
queries (received, map) needs the final lse, and takes a second pass over the keys.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache, lru_cache
from importlib.util import find_spec
from itertools import groupby
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.errors import BackendError
from regard.mechanism import reference
from regard.mechanism.biases import Alibi, Bias, RelativeBuckets
from regard.mechanism.call import Call
from regard.mechanism.geometry import Extent
from regard.mechanism.kernels.structure import (
    ALIBI,
    CAUSAL,
    FULL,
    INTERVAL,
    PLAIN,
    TABLE,
    Structure,
)
from regard.mechanism.masks import And, Causal, Mask, Padding, Prefix, Segments, Window
from regard.mechanism.seeing import See, Seen, bins, finish, grid_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# What the kernels stream, in the order in which the differentiable function returns it.
_STREAMED = ("entropy", "peak", "max_logit", "distance", "received", "map", "map_peak")
WIDEST = 256  # of a head; beyond it a block no longer fits the registers of a multiprocessor


@cache
def unavailable() -> str | None:
    if find_spec("triton") is None:
        return "Triton is not installed. It comes with PyTorch for CUDA."
    if not torch.cuda.is_available():
        return "there is no CUDA device."
    return None


def refuses(call: Call) -> str | None:
    if call.extent.device.type != "cuda":
        return f"the tensors are on {call.extent.device}, and Triton compiles for CUDA devices."
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace how its kernels are launched."
    if call.see is None and call.bias is None and call.softcap is None:
        plain = call.extent.queries in (1, call.extent.keys)  # causal at one corner, or not at all
        if call.mask is None or (isinstance(call.mask, Causal) and plain):
            return "PyTorch's own kernel is faster for a plain call."
    return unsupported(call)


def unsupported(call: Call) -> str | None:
    """Why the kernels cannot compute a call, wherever they run."""
    if call.empty:
        return "there is nothing to compute: a size is 0."
    if call.query.dtype not in DTYPES:
        return f"the kernels have no {call.query.dtype}."
    if call.dropout:
        return "the kernels have no dropout."
    if max(call.query.shape[-1], call.value.shape[-1]) > WIDEST:
        return f"a head is wider than {WIDEST}."
    if call.scale < 0:
        return "the kernels need a scale that is not below 0."
    if not _ranges(call.mask):
        return f"the mask {call.mask!r} is not one range of keys for each query."
    if not isinstance(call.bias, Alibi | RelativeBuckets | None):
        return f"the kernels have no {type(call.bias).__name__} bias."
    if call.see is not None:
        if call.see.top:
            return "the kernels do not keep the top keys."
        if call.see.pairs is not None:
            return "the kernels do not look at single pairs."
        if call.see.weights:
            return "all weights at once are not streamed: rows and map are."
    if call.wants_gradient and torch.are_deterministic_algorithms_enabled():
        if isinstance(call.bias, RelativeBuckets) and call.bias.table.requires_grad:
            return "the gradient of a table of buckets is not the same in every repeat."
    return None


def _ranges(mask: Mask | None) -> bool:
    """Whether a mask is certain to be one range of keys for each query."""
    if isinstance(mask, And):
        return _ranges(mask.left) and _ranges(mask.right)
    return mask is None or isinstance(mask, Causal | Window | Prefix | Padding | Segments)


def run(call: Call) -> tuple[Tensor, Seen | None]:
    see = call.see
    wanted = () if see is None else tuple(see.asked)
    grid = (1, 1) if see is None or see.map is None else grid_of(see, call.extent)
    structure = _structure(call)
    query, key, value = _dense(call.query), _dense(call.key), _dense(call.value)
    if call.wants_gradient:
        values = _Attend.apply(  # type: ignore[no-untyped-call]
            query, key, value, structure.table, structure, wanted, grid
        )
        found = dict(zip(_Attend.names(wanted), values, strict=True))
    else:
        found = _attend(query, key, value, structure, wanted, grid)
    output, lse = found.pop("output"), found["lse"]
    if see is None:
        return output, None
    if see.map is not None:
        found["map_count"] = _attending(lse, see, call.extent)
    if see.rows:
        found["rows"] = _rows(call, see)
    if not see.lse:
        del found["lse"]
    return output, finish(see, found, call.extent)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    wanted: Collection[str],
    grid: tuple[int, int],
) -> dict[str, Tensor]:
    """The output, lse and whatever else is wanted; the map as sums."""
    from regard.mechanism.kernels import launch

    found = launch.forward(query, key, value, structure, wanted)
    if "received" in wanted or "map" in wanted:
        found |= launch.columns(query, key, found["lse"], structure, wanted, grid)
    return found


class _Attend(torch.autograd.Function):
    """``_attend`` with its backward pass; the fields come in the order of ``names``."""

    @staticmethod
    def names(wanted: Collection[str]) -> list[str]:
        return ["output", "lse", *(name for name in _STREAMED if name in wanted)]

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        structure: Structure,
        wanted: Collection[str],
        grid: tuple[int, int],
    ) -> tuple[Tensor, ...]:
        found = _attend(query, key, value, structure, wanted, grid)
        ctx.structure, ctx.names = structure, _Attend.names(wanted)
        ctx.kept = [name for name in ("output", "lse", "entropy", "distance") if name in found]
        ctx.save_for_backward(query, key, value, table, *(found[name] for name in ctx.kept))
        ctx.set_materialize_grads(False)
        return tuple(found[name] for name in ctx.names)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        from regard.mechanism.kernels import launch

        query, key, value, table, *kept = ctx.saved_tensors
        given = {name: g for name, g in zip(ctx.names, grads, strict=True) if g is not None}
        for name in ("peak", "max_logit", "map_peak"):
            if name in given:
                raise BackendError(
                    f"The backend 'triton' has no gradient through {name}. "
                    "Pass backend='tiled', which has them all."
                )
        found = dict(zip(ctx.kept, kept, strict=True))
        if given.keys() == {"output"} and _plain(query, key, value, ctx.structure):
            causal, scale = ctx.structure.kind == CAUSAL, ctx.structure.scale
            plain = _plain_backward(given["output"], query, key, value, found, causal, scale)
            return *plain, None, None, None, None
        structure = replace(ctx.structure, table=table)
        train_bias = ctx.needs_input_grad[3]
        gradients = launch.backward(query, key, value, structure, found, given, train_bias)
        return *gradients, None, None, None


def _plain(query: Tensor, key: Tensor, value: Tensor, structure: Structure) -> bool:
    """Whether cuDNN has the backward pass of such a call; on Hopper it is faster than ours."""
    square = query.shape[2] == key.shape[2]
    width = query.shape[3]
    return (
        query.is_cuda
        and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        and torch.cuda.get_device_capability(query.device) >= (9, 0)
        and query.dtype in (torch.float16, torch.bfloat16)
        and (structure.kind == FULL or (structure.kind == CAUSAL and square))
        and structure.bias == PLAIN
        and structure.softcap is None
        and query.shape[1] == key.shape[1]
        and not torch.are_deterministic_algorithms_enabled()  # cuDNN's gradients are not
        and all(0 not in tensor.stride() for tensor in (query, key, value))
        and width == value.shape[3]
        and width <= 128
        and width % 8 == 0
    )


def _plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    found: dict[str, Tensor],
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a plain call by cuDNN, from the output and lse of our forward pass."""
    output, lse = found["output"], found["lse"][..., None]
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of no dropout
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        grad.contiguous(), query, key, value, output, lse, seed, seed, None, None, None,
        query.shape[2], key.shape[2], 0.0, causal, scale=scale,
    )  # fmt: skip


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _structure(call: Call) -> Structure:
    kind, low, high = _lowered(call.mask, call.extent)
    bias, table, reach = _table(call.bias)
    return Structure(kind, low, high, bias, table, reach, call.scale, call.softcap)


def _lowered(mask: Mask | None, extent: Extent) -> tuple[int, Tensor | None, Tensor | None]:
    if mask is None:
        return FULL, None, None
    if isinstance(mask, Causal):
        return CAUSAL, None, None
    return INTERVAL, *(_kept_ends(mask, extent) if mask.static else _ends(mask, extent))


def _ends(mask: Mask, extent: Extent) -> tuple[Tensor, Tensor]:
    """Both ends of a mask's ranges: int32, [1 or batch, queries]."""

    def table(end: int | Tensor) -> Tensor:
        if isinstance(end, int):
            end = torch.full((1, 1), end, device=extent.device)
        return end.clamp(0, extent.keys).to(torch.int32).expand(-1, extent.queries).contiguous()

    interval = mask.interval(extent)
    return table(interval.low), table(interval.high)


_kept_ends = lru_cache(maxsize=64)(_ends)


def _table(bias: Bias | None) -> tuple[int, Tensor | None, int]:
    if isinstance(bias, Alibi):
        return ALIBI, bias.slopes.float()[:, None].contiguous(), 0
    if isinstance(bias, RelativeBuckets):
        reach = bias.max_distance  # from here on all distances share a bucket
        distances = torch.arange(-reach, reach + 1, device=bias.table.device)
        return TABLE, bias.table[bias.bucket(distances)].t().float().contiguous(), reach
    return PLAIN, None, 0


def _attending(lse: Tensor, see: See, extent: Extent) -> Tensor:
    """How many queries of each of the map's bins attend to anything: [batch, heads, rows]."""
    count = lse.new_zeros(*lse.shape[:2], grid_of(see, extent)[0])
    row_of = bins(extent.queries, see.grid[0], lse.device)
    return count.index_add_(2, row_of, (lse > -torch.inf).to(lse.dtype))


def _rows(call: Call, see: See) -> Tensor:
    """The rows asked for, in order of their place: the reference, on these rows alone."""
    only = replace(call, see=See(weights=True))
    asked = sorted(row % call.extent.queries for row in see.rows)
    parts = []
    # Rows that follow each other go together.
    for _, run in groupby(enumerate(asked), key=lambda place: place[1] - place[0]):
        places = [row for _, row in run]
        rows = range(places[0], places[-1] + 1)
        parts.append(reference.attend(only, rows, range(call.extent.keys))[1]["weights"])
    return torch.cat(parts, dim=2)
