"""Seeing at full speed on the GPU, with our own kernels.

A mask that is a range of keys for each query, and a bias that depends on the distance alone, go
into the kernel as they are: two numbers a query, some numbers a head. What depends on one query's
row of weights (lse, entropy, peak, distance) comes out of the forward pass itself; what sums over
queries (received, map) needs the final lse, and takes a second pass over the keys, or comes out of
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn.functional import embedding

from regard.mechanism import reference
from regard.mechanism.biases import Alibi, RelativeBuckets, RelativeContent
from regard.mechanism.call import TRANSFORMED, Call
from regard.mechanism.geometry import Extent
from regard.mechanism.keeping import Kept
from regard.mechanism.kernels import operators
from regard.mechanism.kernels.operators import NAMED, Request
from regard.mechanism.kernels.structure import (
    ALIBI,
    CAUSAL,
    FULL,
    INTERVAL,
    PLAIN,
    RELATIVE,
    TABLE,
    Structure,
)
from regard.mechanism.masks import And, Causal, Mask, Padding, Prefix, Segments, Window
from regard.mechanism.seeing import Owing, See, Seen, finish, grid_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256  # of a head; beyond it a block no longer fits the registers of a multiprocessor
HEADS = 2**16 - 1  # of all sequences together: the most programs of a grid's second axis
FARTHEST = 2**20  # keys under RelativeContent: its distances are a grid's third axis
MOST = 64  # top keys; a tile has 128 places to find them by
_TRITON = find_spec("triton") is not None


def unavailable() -> str | None:
    if not _TRITON:
        return "Triton is not installed. It comes with PyTorch for CUDA."
    if not torch.cuda.is_available():
        return "there is no CUDA device."
    return None


def refuses(call: Call) -> str | None:
    if not call.query.is_cuda:
        return "the tensors are not on a CUDA device, which Triton compiles for."
    if call.see is None and call.bias is None and call.softcap is None:
        # Causal at one corner, or not at all.
        if call.mask is None or (
            isinstance(call.mask, Causal) and call.extent.queries in (1, call.extent.keys)
        ):
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
    if call.transformed:
        return TRANSFORMED
    if max(call.query.shape[-1], call.value.shape[-1]) > WIDEST:
        return f"a head is wider than {WIDEST}."
    if call.extent.batch * call.extent.heads > HEADS:
        return f"there are more than {HEADS} sequences times heads."
    if call.scale < 0:
        return "the kernels need a scale that is not below 0."
    if not _ranges(call.mask):
        return f"the mask {call.mask!r} is not one range of keys for each query."
    if not isinstance(call.bias, Alibi | RelativeBuckets | RelativeContent | None):
        return f"the kernels have no {type(call.bias).__name__} bias."
    if isinstance(call.bias, RelativeContent):
        if any(tensor.dtype != call.query.dtype for tensor in call.bias.tensors):
            return f"the kernels need RelativeContent in the query's own {call.query.dtype}."
        if call.bias.query.shape[-1] > WIDEST:
            return f"RelativeContent is wider than {WIDEST}."
        if call.extent.keys > FARTHEST:
            return f"RelativeContent has more than {FARTHEST:,} keys."
        if call.see is not None and call.see.top:
            return "the kernels do not find the top keys under RelativeContent."
    if call.see is not None:
        if call.see.top > MOST:
            return f"the kernels find at most {MOST} top keys."
        if call.see.pairs is not None:
            return "the kernels do not look at single pairs."
        if call.see.weights:
            return "all weights at once are not streamed: rows and map are."
    return None


def _ranges(mask: Mask | None) -> bool:
    """Whether a mask is certain to be one range of keys for each query."""
    if isinstance(mask, And):
        return _ranges(mask.left) and _ranges(mask.right)
    return mask is None or isinstance(mask, Causal | Window | Prefix | Padding | Segments)


def run(call: Call) -> tuple[Tensor, Seen | None]:
    see, extent = call.see, call.extent
    structure = _structure(call)
    query, key, value = _dense(call.query), _dense(call.key), _dense(call.value)
    if see is None:
        return _attend(query, key, value, structure, Request())[0]["output"], None
    wanted = [name for name in NAMED if getattr(see, name)]
    # Single rows have a gradient as plain PyTorch only.
    plain_rows = bool(see.rows) and (call.wants_gradient or structure.bias == RELATIVE)
    if plain_rows:
        wanted.remove("rows")
    if see.top:
        wanted += ["top_weights", "top_keys"]
    grid = (1, 1) if see.map is None else grid_of(see, extent)
    rows = () if plain_rows else tuple(see.rows)
    request = Request(tuple(wanted), grid, see.top, rows)
    found, settle = _attend(query, key, value, structure, request)
    output = found.pop("output")
    if not see.lse:
        del found["lse"]
    in_order = found.pop("rows", None)  # as they were asked for, so nothing is left to finish
    seen = finish(see, found, extent)
    if settle is not None:
        seen = Owing.of(seen, settle)
    seen.rows = _rows(call, see) if plain_rows else in_order
    return output, seen


def _attend(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, request: Request
) -> tuple[dict[str, Tensor], Callable[[], None] | None]:
    if torch.compiler.is_compiling():
        from regard.mechanism.kernels import graphs  # registers an operator, which takes a while

        return graphs.attend(query, key, value, structure, request), None
    return operators.attend(query, key, value, structure, request)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _structure(call: Call) -> Structure:
    kind, low, high = _lowered(call.mask, call.extent)
    structure = Structure(
        kind, low, high, PLAIN, None, 0, call.scale, call.softcap, longest=_longest(call.mask)
    )
    bias = call.bias
    if isinstance(bias, Alibi):
        slopes = bias.slopes.float()[:, None].contiguous()
        return replace(structure, bias=ALIBI, table=slopes)
    if isinstance(bias, RelativeBuckets):
        reach = bias.max_distance  # from here on all distances share a bucket
        given = bias.table.shape[0], bias.bidirectional, reach, bias.table.device
        keep = not torch.compiler.is_compiling()
        buckets = _kept_buckets(*given) if keep else _buckets(*given)
        table = embedding(buckets, bias.table).t().float().contiguous()
        return replace(structure, bias=TABLE, table=table, reach=reach)
    if isinstance(bias, RelativeContent):
        shift = bias.query.shape[-1] ** -0.5 if bias.scale is None else bias.scale
        table, second = _dense(bias.relative), _dense(bias.query)
        return replace(
            structure, bias=RELATIVE, table=table, second=second, reach=bias.first, shift=shift
        )
    return structure


def _buckets(count: int, bidirectional: bool, reach: int, device: torch.device) -> Tensor:
    """The bucket of each distance from -reach to reach."""
    with torch.inference_mode(False):  # what is kept may be used where gradients are
        rule = RelativeBuckets(torch.empty(count, 1, device=device), bidirectional, reach)
        return rule.bucket(torch.arange(-reach, reach + 1, device=device))


_kept_buckets = Kept(_buckets)


def _lowered(mask: Mask | None, extent: Extent) -> tuple[int, Tensor | None, Tensor | None]:
    if mask is None:
        return FULL, None, None
    if isinstance(mask, Causal):
        return CAUSAL, None, None
    keep = mask.static and not torch.compiler.is_compiling()
    return INTERVAL, *(_kept_ends(mask, extent) if keep else _ends(mask, extent))


def _longest(mask: Mask | None) -> int:
    """The most keys a query sees, where a mask says so; else 0."""
    if isinstance(mask, And):
        both = _longest(mask.left), _longest(mask.right)
        return min(both) or max(both)
    return min(mask.left + 1 + mask.right, 2**31) if isinstance(mask, Window) else 0


def _ends(mask: Mask, extent: Extent) -> tuple[Tensor, Tensor]:
    """Both ends of a mask's ranges: int32, [1 or batch, queries]."""

    def table(end: int | Tensor) -> Tensor:
        if isinstance(end, int):
            end = torch.full((1, 1), end, device=extent.device)
        return end.clamp(0, extent.keys).to(torch.int32).expand(-1, extent.queries).contiguous()

    interval = mask.interval(extent)
    return table(interval.low), table(interval.high)


_kept_ends = Kept(_ends)


def _rows(call: Call, see: See) -> Tensor:
    """The rows asked for: the reference, on these rows alone."""
    only = replace(call, see=See(weights=True))
    queries, keys = call.extent.queries, range(call.extent.keys)
    rows: dict[int, Tensor] = {}
    asked = sorted({row % queries for row in see.rows})
    for start in (row for row in asked if row - 1 not in asked):
        stop = start + 1
        while stop in asked:  # rows that follow each other go together
            stop += 1
        run = range(start, stop)
        weights = reference.attend(only, run, keys)[1]["weights"]
        rows |= {row: weights[:, :, row - start : row - start + 1] for row in run}
    # No index tensor: sending one to a GPU could not be captured in a graph.
    return torch.cat([rows[row % queries] for row in see.rows], dim=2)
