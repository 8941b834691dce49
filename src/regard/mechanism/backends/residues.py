"""Dilated masks as ranges: queries and keys are sorted by the residue of their position.

A query of a ``Dilated(step)`` mask attends only to keys whose position has the same residue modulo
``step``. After a sort by residue these keys are one range: the mask is :class:`Segments`, in which
Causal and Window still hold, with the distances divided by ``step``. ``sort`` copies query, key and
value once; ``restore`` brings the output and the fields of Seen back into the order of the call.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.kernels.memo import GraphSafeCache
from regard.mechanism.call import Call
from regard.mechanism.geometry import Extent, has_values
from regard.mechanism.masks import And, Causal, Dilated, Mask, Segments, Window
from regard.mechanism.seeing import Pairs, See, Seen

_AXES = {
    "lse": "q", "entropy": "q", "peak": "q", "distance": "q", "distance_variance": "q",
    "top_weights": "q", "top_keys": "q", "received": "k", "rows": " k", "weights": "qk",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sorted:
    """A call in the order of residues, and the way back."""

    call: Call
    step: int
    keys: Tensor  # the original place of each key
    inverse: dict[str, Tensor]  # the sorted place of each query "q" and key "k"

    def restore(self, output: Tensor, seen: Seen | None) -> tuple[Tensor, Seen | None]:
        """The output and the fields in the order of the original call."""
        output = output.index_select(2, self.inverse["q"])
        if seen is None:
            return output, None
        fields = seen.to_dict()
        for name, tensor in fields.items():
            for dim, axis in enumerate(_AXES.get(name, ""), 2):
                if axis in self.inverse:
                    tensor = tensor.index_select(dim, self.inverse[axis])
            fields[name] = tensor
        if "distance" in fields:
            fields["distance"] = fields["distance"] * self.step
        if "distance_variance" in fields:
            fields["distance_variance"] = fields["distance_variance"] * self.step**2
        if "top_keys" in fields and len(self.keys):
            places = fields["top_keys"]
            fields["top_keys"] = torch.where(places < 0, -1, self.keys[places.clamp(min=0).long()])
        return output, Seen.from_dict(fields, seen.extent)


def sort(call: Call) -> Sorted | None:
    """Sort a call by residues, or return None if its mask does not become ranges that way."""
    extent, see = call.extent, call.see
    dilated = None if call.mask is None else _dilated(call.mask)
    if dilated is None or not isinstance(extent.offset, int) or call.bias is not None:
        return None
    step, within = dilated
    aligned = extent.offset == 0 and extent.queries == extent.keys
    if step > extent.queries or (
        see and (see.map is not None or (see.uses_positions and not aligned))
    ):
        return None

    offset, device = extent.offset, extent.device
    compiling = torch.compiler.is_compiling()
    if see is not None and (see.rows or see.pairs is not None):
        if compiling or not has_values(call.query):
            return None  # the sorted places of rows and pairs are read
    orders = _orders if compiling or call.transformed else _kept_orders
    queries, query_inverse = orders(extent.queries, offset % step, step, device)
    keys, key_inverse = orders(extent.keys, 0, step, device)
    if see is not None and (see.rows or see.pairs is not None):
        cpu = torch.device("cpu")
        query_places = orders(extent.queries, offset % step, step, cpu)[1]
        see = _moved(see, query_places, orders(extent.keys, 0, step, cpu)[1])
    ordered = replace(
        call,
        query=call.query.index_select(2, queries),
        key=call.key.index_select(2, keys),
        value=call.value.index_select(2, keys),
        mask=_segments(extent, offset, step, within),
        see=see,
        extent=extent._replace(query_start=None),
    )
    return Sorted(ordered, step, keys, {"q": query_inverse, "k": key_inverse})


def _dilated(mask: Mask) -> tuple[int, Window | None] | None:
    """The step and the window within a residue; None unless ``&`` joins one Dilated with windows.

    Causal counts as a window.
    """
    if not isinstance(mask, Dilated | And):
        return None
    steps, left, right = [], [], []
    for leaf in _leaves(mask):
        if isinstance(leaf, Dilated):
            steps.append(leaf.step)
        elif isinstance(leaf, Causal | Window):
            window = Window(None) if isinstance(leaf, Causal) else leaf
            left += [] if window.left is None else [window.left]
            right += [] if window.right is None else [window.right]
        else:
            return None
    if len(steps) != 1:
        return None
    (step,) = steps
    sides = [min(side) // step if side else None for side in (left, right)]
    return step, Window(*sides) if left or right else None


def _leaves(mask: Mask) -> Iterator[Mask]:
    if isinstance(mask, And):
        yield from _leaves(mask.left)
        yield from _leaves(mask.right)
    else:
        yield mask


def _segments(extent: Extent, offset: int, step: int, within: Window | None) -> Segments:
    """The mask after the sort: one segment for each residue."""
    first = [(residue - offset) % step for residue in range(step)]  # the first query of each
    return Segments(
        [len(range(query, extent.queries, step)) for query in first],
        [len(range(residue, extent.keys, step)) for residue in range(step)],
        query_starts=[(offset + query) // step for query in first],
        within=within,
    )


def _orders(count: int, offset: int, step: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """The places of positions sorted by residue, and the inverse permutation."""
    with torch.inference_mode(False):  # gradients cannot use a tensor cached in inference mode
        residues = (torch.arange(count, device=device) + offset) % step
        order = residues.argsort(stable=True)
        return order, order.argsort()


_kept_orders = GraphSafeCache(_orders)


def _moved(see: See, queries: Tensor, keys: Tensor) -> See:
    """The request with the sorted places of its rows and pairs; the places are on the CPU."""
    pairs = see.pairs
    if isinstance(pairs, Pairs):
        moved = torch.stack((queries[pairs.queries], keys[pairs.keys]), 1)
        pairs = moved[pairs.places]
    return replace(see, rows=queries[list(see.rows)].tolist() if see.rows else (), pairs=pairs)
