"""Lower a call to arguments of the kernels: key ranges, bias tables, tensors, fields.

Kernels take a mask as one range of keys for each query, and a bias by distance as a small table for
each head. The backends 'hopper' and 'triton' share ``run_kernels``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from regard.kernels import autograd, passes
from regard.kernels.memo import GraphSafeCache
from regard.kernels.plan import NAMED, Plan, Structure, Wanted
from regard.kernels.sizes import ALIBI, CAUSAL, FULL, INTERVAL, PLAIN, RELATIVE, TABLE
from regard.mechanism.backends import reference
from regard.mechanism.biases import Alibi, RelativeBuckets, RelativeContent
from regard.mechanism.call import Call
from regard.mechanism.geometry import Extent
from regard.mechanism.masks import Causal, Mask, lower
from regard.mechanism.seeing import Deferred, See, Seen, finish, grid_of


def key_ranges(mask: Mask | None) -> bool:
    """Whether a mask always allows exactly one range of keys for each query."""
    return mask is None or mask.is_ranges


def run_kernels(call: Call, hopper: bool) -> tuple[Tensor, Seen | None]:
    """Run a call on the kernels; ``hopper`` allows the Hopper kernels where they fit."""
    see = call.see
    structure = lower_structure(call)
    wanted = lower_fields(call)
    query, key, value = map(_dense, (call.query, call.key, call.value))
    compute: Callable[[], None] | None = None
    if torch.compiler.is_compiling():
        from regard.kernels import compiled  # registers an operator, which is slow

        results = compiled.attend(query, key, value, structure, wanted, hopper)
    else:
        results, compute = autograd.attend(query, key, value, structure, wanted, hopper)
    output = results.pop("output")
    if see is None:
        return output, None
    if not see.lse:
        del results["lse"]
    in_order = results.pop("rows", None)  # in request order; ``finish`` expects sorted rows
    seen = finish(see, results, call.extent)
    if compute is not None:
        seen = Deferred.of(seen, compute)
    seen.rows = row_blocks(call, see) if see.rows and not wanted.rows else in_order
    return output, seen


def plan_kernels(call: Call, hopper: bool) -> Plan:
    """Return the plan of a call that the kernels can compute."""
    structure, wanted = lower_structure(call), lower_fields(call)
    return passes.plan_call(call.query, call.key, call.value, structure, wanted, hopper)


def lower_fields(call: Call) -> Wanted:
    """Return the requested fields that the kernels compute."""
    see = call.see
    if see is None:
        return Wanted()
    fields = [name for name in NAMED if getattr(see, name)]
    rows = tuple(see.rows)
    # The kernels have no gradient of single rows: ``row_blocks`` computes them in PyTorch.
    if rows and (call.wants_gradient or isinstance(call.bias, RelativeContent)):
        fields.remove("rows")
        rows = ()
    if see.top:
        fields += ["top_weights", "top_keys"]
    grid = (1, 1) if see.map is None else grid_of(see, call.extent)
    return Wanted(tuple(fields), grid, see.top, rows)


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def mask_kind(mask: Mask | None, extent: Extent) -> int:
    """Return the kind of a mask that ``key_ranges`` accepts."""
    if mask is None:
        return FULL
    # CAUSAL: the last query has the last key's position.
    return CAUSAL if isinstance(mask, Causal) and extent.query_start is None else INTERVAL


def lower_structure(call: Call) -> Structure:
    """Return the mask and the bias of a call in the form the kernels take."""
    extent = call.extent
    kind = mask_kind(call.mask, extent)
    low, high, max_keys, starts = None, None, 0, None
    if kind == INTERVAL and call.mask is not None:
        low, high, max_keys = lower(call.mask, extent)
    if extent.query_start is not None:
        starts = extent.positions()[:, 0].to(torch.int32).expand(extent.batch).contiguous()
    structure = Structure(
        kind, low, high, PLAIN, None, 0, call.scale, call.softcap, max_keys=max_keys,
        starts=starts, sinks=None if call.sinks is None else call.sinks.float(),
    )  # fmt: skip
    bias = call.bias
    if isinstance(bias, Alibi):
        slopes = bias.slopes.float()[:, None].contiguous()
        return replace(structure, bias=ALIBI, table=slopes)
    if isinstance(bias, RelativeBuckets):
        reach = bias.max_distance  # this and all larger distances share a bucket
        given = bias.table.shape[0], bias.bidirectional, reach, bias.table.device
        keep = not torch.compiler.is_compiling()
        buckets = _kept_buckets(*given) if keep else _buckets(*given)
        table = embedding(buckets, bias.table).t().float().contiguous()
        return replace(structure, bias=TABLE, table=table, reach=reach)
    if isinstance(bias, RelativeContent):
        scale = bias.query.shape[-1] ** -0.5 if bias.scale is None else bias.scale
        table, relative_query = _dense(bias.relative), _dense(bias.query)
        # The kernels of this term assume that the last query has the last key's position.
        assert isinstance(extent.offset, int)
        moved = extent.offset - (extent.keys - extent.queries)
        return replace(
            structure,
            bias=RELATIVE,
            table=table,
            relative_query=relative_query,
            reach=bias.first - moved,
            relative_scale=scale,
        )
    return structure


def _buckets(count: int, bidirectional: bool, reach: int, device: torch.device) -> Tensor:
    """The bucket of each distance from -reach to reach."""
    with torch.inference_mode(False):  # gradients cannot use a tensor cached in inference mode
        rule = RelativeBuckets(torch.empty(count, 1, device=device), bidirectional, reach)
        return rule.bucket(torch.arange(-reach, reach + 1, device=device))


_kept_buckets = GraphSafeCache(_buckets)


def row_blocks(call: Call, see: See) -> Tensor:
    """Compute the requested rows by the reference, [batch, heads, rows, keys]."""
    only = replace(call, see=See(weights=True))
    queries, keys = call.extent.queries, range(call.extent.keys)
    rows: dict[int, Tensor] = {}
    for run in reference.runs(row % queries for row in see.rows):
        weights = reference.attend(only, run, keys)[1]["weights"]
        rows |= dict(zip(run, weights.split_with_sizes([1] * len(run), dim=2), strict=True))
    # Without an index tensor: a CUDA graph cannot capture its copy to the GPU.
    return torch.cat([rows[row % queries] for row in see.rows], dim=2)
