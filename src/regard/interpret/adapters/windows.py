"""The attention of Longformer and of LED's encoder, whose softmax is over slots instead of keys.

Their weights are [batch, queries, heads, slots]. The first slots are the keys with global
attention. After them come the 2 * window + 1 slots of the window, from the key ``window`` places
before the query to the one as many after it. A query with global attention has weights for all
keys, of a second softmax [batch * heads, global queries, keys].

transformers documents this layout as that of the attentions that these models return. Not promised
are the names of the classes, of the module's window and of the argument that marks global keys.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.mechanism.geometry import Extent, Tile

CLASSES = (
    "transformers.models.longformer.modeling_longformer.LongformerSelfAttention",
    "transformers.models.led.modeling_led.LEDEncoderSelfAttention",
)
SCORES = 2**22  # the most scores of a block of queries


class Softmax(NamedTuple):
    """A softmax in an attention module: its scores and weights."""

    scores: Tensor
    weights: Tensor
    in_parts: bool = False  # whether a function took a part of the weights, or extended them


def computes_windows(module: nn.Module) -> bool:
    return f"{type(module).__module__}.{type(module).__qualname__}" in CLASSES


@dataclass(eq=False, slots=True)
class Windows:
    """One call of such a module."""

    window: int  # the keys on either side of a query
    is_global: Tensor | None  # [batch, n]: the positions with global attention
    of_global_queries: list[Softmax] = field(default_factory=list)  # one, or none

    @classmethod
    def of(cls, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Windows:
        given = inspect.signature(module.forward).bind(*args, **kwargs).arguments
        window = module.one_sided_attn_window_size
        assert isinstance(window, int)
        return cls(window, given["is_index_global_attn"] if given.get("is_global_attn") else None)

    @property
    def complete(self) -> bool:
        """Whether the queries with global attention, if there are any, have their softmax."""
        return len(self.of_global_queries) == (self.is_global is not None)

    def tiles(self, local: Softmax) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        """Blocks of queries, and their scores and weights [batch, heads, queries, keys]."""
        batch, queries, heads, slots = local.weights.shape
        extent = Extent(batch, heads, queries, queries, local.weights.device)
        own = 2 * self.window + 1
        # Without global keys, a block as long as the window has keys for three windows at most.
        most, columns = (queries, queries) if slots > own else (self.window, 3 * self.window)
        step = max(1, min(most, SCORES // (batch * heads * columns)))
        for start in range(0, queries, step):
            rows = range(start, min(start + step, queries))
            keys = range(max(0, start - self.window), min(queries, rows.stop + self.window))
            if slots > own:
                keys = range(queries)
            scores, weights = (
                self._dense(part, slots - own, rows, keys, outside)
                for part, outside in ((local.scores, -torch.inf), (local.weights, 0.0))
            )
            for softmax in self.of_global_queries:
                self._put(scores, softmax.scores, rows)
                self._put(weights, softmax.weights, rows)
            yield Tile(extent, rows, keys), scores, weights

    def _dense(
        self, slots: Tensor, leading: int, rows: range, keys: range, outside: float
    ) -> Tensor:
        """[batch, heads, rows, keys] of slots, with ``outside`` for keys that have no slot."""
        block = slots[:, rows.start : rows.stop].transpose(1, 2)
        shape = (*block.shape[:3], len(rows) + 2 * self.window)
        own = torch.arange(2 * self.window + 1, device=slots.device)
        places = (own + torch.arange(len(rows), device=slots.device)[:, None]).expand(
            *shape[:3], -1
        )
        wide = slots.new_full(shape, outside).scatter(3, places, block[..., leading:])
        first = rows.start - self.window  # the key of the first column, which may not exist
        dense = pad(wide, (first - keys.start, keys.stop - first - shape[3]), value=outside)
        for each, found in enumerate(self._global_positions()):
            dense[each][:, :, found] = block[each, :, :, : len(found)]
        return dense

    def _put(self, dense: Tensor, of_queries: Tensor, rows: range) -> None:
        """Write the rows of queries with global attention."""
        parts = of_queries.view(*dense.shape[:2], *of_queries.shape[1:]).to(dense.dtype)
        for each, found in enumerate(self._global_positions()):
            inside = (found >= rows.start) & (found < rows.stop)
            dense[each][:, found[inside] - rows.start] = parts[each, :, : len(found)][:, inside]

    def _global_positions(self) -> Iterator[Tensor]:
        """Of each sequence."""
        for each in () if self.is_global is None else self.is_global:
            yield each.nonzero()[:, 0]
