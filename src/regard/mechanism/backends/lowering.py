"""From masks and biases to what kernels need: ranges of keys, buckets, dense tensors."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import embedding

from regard.kernels.memo import Kept
from regard.kernels.plan import ALIBI, CAUSAL, FULL, INTERVAL, PLAIN, RELATIVE, TABLE, Structure
from regard.mechanism.backends import reference
from regard.mechanism.biases import Alibi, RelativeBuckets, RelativeContent
from regard.mechanism.call import Call
from regard.mechanism.geometry import Extent
from regard.mechanism.masks import Causal, Mask, lower
from regard.mechanism.seeing import See


def key_ranges(mask: Mask | None) -> bool:
    """Whether a mask is certain to be one range of keys for each query."""
    return mask is None or mask.is_ranges


def dense_tensors(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def lower_structure(call: Call) -> Structure:
    kind, low, high, longest = _lowered(call.mask, call.extent)
    structure = Structure(
        kind, low, high, PLAIN, None, 0, call.scale, call.softcap, longest=longest
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
        table, second = dense_tensors(bias.relative), dense_tensors(bias.query)
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


def _lowered(mask: Mask | None, extent: Extent) -> tuple[int, Tensor | None, Tensor | None, int]:
    if mask is None:
        return FULL, None, None, 0
    if isinstance(mask, Causal):
        return CAUSAL, None, None, 0
    return INTERVAL, *lower(mask, extent)


def row_blocks(call: Call, see: See) -> Tensor:
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
