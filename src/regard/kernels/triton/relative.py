"""Transformer-XL's term, computed for some queries at a time.

The product of a query with the embedding of a distance is added to its score for the key at that
distance. As the distance decreases, the key increases. From one query to the next, the keys at all
distances move by one place:

    query i          r(3)  r(2)  r(1)  r(0)
    query i + 1            r(3)  r(2)  r(1)  r(0)

So the product of queries and embeddings, with each row shifted one place more than the row above,
is the term by query and key: https://arxiv.org/abs/1901.02860, appendix B. A call is split into
parts, so that the memory for the term, [queries, keys], is limited. The kernel that computes the
term writes shifted rows. The kernels for the gradients of relative queries and embeddings read
shifted rows of the scores' gradients.

``askew`` has the kernels. Called by ``launch``.

Test: ``pytest tests/kernels/test_triton.py -k transformer_xl``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.kernels.compat import FUSED
from regard.kernels.plan import Structure, View, ceil, power
from regard.kernels.sizes import CAUSAL
from regard.kernels.triton import askew

# The most bytes for the term, unless BLOCK queries need more. The backward pass also stores as many
# gradients of scores, in the dtype of the query, and with a softcap twice as many.
SCRATCH = 2**29
BLOCK = 128  # a multiple of the block sizes of the kernels, for queries and for keys
PROGRAMS = 1024  # with fewer programs, several programs share each range of distances


class Part(NamedTuple):
    """A part of a call: a range of queries of some sequences."""

    sequence: int  # the first sequence
    sequences: int
    start: int
    stop: int
    keys: int  # its queries attend only to keys before this one

    def view(self, room: Tensor, heads: int) -> View:
        """Return a view [sequences, heads, queries, keys] of this memory, with aligned rows."""
        rows, step = self.stop - self.start, _up(self.keys)
        return View(room, heads * rows * step, rows * step, step)


def _up(keys: int) -> int:
    return ceil(keys, BLOCK) * BLOCK


def room(query: Tensor, parts: Sequence[Part], dtype: torch.dtype) -> Tensor:
    """Allocate memory for the largest part; the parts use it in turn."""
    most = max(part.sequences * (part.stop - part.start) * _up(part.keys) for part in parts)
    return query.new_empty(query.shape[1] * most, dtype=dtype)


def parts(query: Tensor, keys: int, kind: int) -> list[Part]:
    """Split a call into parts that fit: several sequences, or a range of queries of one."""
    batch, heads, queries, _ = query.shape
    most = SCRATCH // (4 * heads)
    together = max(1, most // (queries * _up(keys)))
    together = ceil(batch, ceil(batch, together))  # so that the parts are about equally large

    def seen(stop: int) -> int:
        return max(keys - queries + stop, 0) if kind == CAUSAL else keys

    pieces = []
    for sequence in range(0, batch, together):
        start = 0
        while start < queries:
            stop = min(start + BLOCK, queries)
            while stop < queries:
                more = min(stop + BLOCK, queries)
                if (more - start) * _up(seen(more)) > most:
                    break
                stop = more
            pieces.append(Part(sequence, min(together, batch - sequence), start, stop, seen(stop)))
            start = stop
    return pieces


def shifted(structure: Structure, part: Part, queries: int, keys: int, room: Tensor) -> View:
    """Return the term of a part, base 2: [sequences, heads, queries, keys]."""
    relative_query = structure.relative_query
    assert relative_query is not None
    heads, width = relative_query.shape[1], relative_query.shape[3]
    view = part.view(room, heads)
    wide = power(width)
    exact = relative_query.dtype == torch.float32
    some = max(32, min((4096 if exact else 16384) // wide, BLOCK))  # limited by registers
    squares = ceil(part.stop - part.start, BLOCK)
    askew.spread[4 * squares, part.sequences * heads, ceil(view.row + BLOCK, some)](
        view, structure.ends, structure.relative, heads, queries, keys, part.sequence, part.start,
        part.stop, BN=some, BU=wide, BLOCK=BLOCK, EVEN=wide == width, KIND=structure.kind,
        PRECISION="ieee" if exact else "tf32", **FUSED, num_warps=4, num_stages=1,
    )  # fmt: skip
    return view


class Gradients:
    """The gradients of queries, relative queries and embeddings, from those of the scores."""

    def __init__(self, query: Tensor, key: Tensor, structure: Structure, train: bool) -> None:
        relative_query, table = structure.relative_query, structure.table
        assert relative_query is not None
        assert table is not None
        self.key, self.structure = key, structure
        self.query, self.relative_query = torch.empty_like(query), torch.empty_like(relative_query)
        self.exact = query.dtype == torch.float32
        widest = max(query.shape[3], relative_query.shape[3])
        self.block = 64 if not self.exact and widest <= 128 else 32
        batch, heads, queries, _ = query.shape
        # Programs that share distances each keep a sum; ``table`` adds these sums.
        self.nearest = 0 if structure.kind == CAUSAL else 1 - queries
        self.blocks = ceil(key.shape[2] - self.nearest, self.block)
        shares = max(1, min(PROGRAMS // (self.blocks * heads), batch))
        self.far = None
        if train:
            shape = shares, heads, self.blocks * self.block, relative_query.shape[3]
            self.far = query.new_zeros(shape, dtype=torch.float32)
        all_parts = parts(query, key.shape[2], structure.kind)
        self.changes = self.inners = room(query, all_parts, query.dtype)
        if structure.softcap is not None:
            self.inners = torch.empty_like(self.changes)

    def rooms(self, part: Part) -> tuple[View, View]:
        """Return views for the gradients of a part's scores and of its products query . key."""
        heads = self.query.shape[1]
        return part.view(self.changes, heads), part.view(self.inners, heads)

    def add(self, part: Part) -> None:
        """Add the gradients of a part, from the scores' gradients in ``rooms(part)``."""
        structure, relative = self.structure, self.structure.relative
        _, heads, queries, width = self.query.shape
        keys, wide = self.key.shape[2], power(relative.width)
        changes, inners = self.rooms(part)
        both: Any = {
            "BM": self.block, "BN": self.block, "BU": wide,
            "EVEN": (wide, power(width)) == (relative.width, width), "KIND": structure.kind,
            "PRECISION": "ieee" if self.exact else "tf32", "num_warps": 4,
        }  # fmt: skip
        blocks = ceil(part.stop - part.start, self.block)
        fits = not self.exact and wide <= 64  # four programs fit on a multiprocessor
        askew.to_queries[blocks, part.sequences * heads](
            View.of(self.key), changes, inners, View.of(self.query), View.of(self.relative_query),
            structure.ends, relative, structure.scale, part.sequence, part.start, heads,
            heads // self.key.shape[1], queries, keys, width, BD=power(width), **both,
            num_stages=1 if self.exact else 3,
        )  # fmt: skip
        if self.far is not None:
            askew.to_embeddings[self.blocks, heads, self.far.shape[0]](
                changes, self.far, structure.ends, relative, self.nearest, part.sequence,
                part.sequences, part.start, part.stop, queries, keys, **both,
                num_stages=1 if self.exact else 2, maxnreg=128 if fits else None,
            )  # fmt: skip

    @property
    def table(self) -> Tensor | None:
        """The gradient of the embeddings, [heads or 1, distances, dim]."""
        table = self.structure.table
        if self.far is None or table is None:
            return None
        far = self.far.sum((0, 1))[None] if table.shape[0] == 1 else self.far.sum(0)
        # Distances beyond the table use its ends.
        total = far.new_zeros(table.shape)
        lead = self.structure.reach - self.nearest  # the index of the table's first row
        end = far.shape[1]
        low, high = (min(max(place, 0), end) for place in (lead, lead + table.shape[1]))
        total[:, low - lead : high - lead] = far[:, low:high]
        total[:, 0] += far[:, :low].sum(1)
        total[:, -1] += far[:, high:].sum(1)
        return total.to(table.dtype)
