"""Transformer-XL's term, made for some queries at a time.

A query's product with the embedding of a distance is added to its score for the key at that
distance. Where distances descend keys ascend, and from each query to the next they move on by one:

    query i          r(3)  r(2)  r(1)  r(0)
    query i + 1            r(3)  r(2)  r(1)  r(0)

So what is a product of queries and distances to a matrix product is, read askew, a number for each
query and key to the kernels of attention: the shift of https://arxiv.org/abs/1901.02860, appendix
B. Those of one part of a call lie in memory as [queries, keys]; the kernel that makes them writes
askew, and those that make gradients of the term's two sides read askew what the backward pass left
of scores. There is room for some queries at a time, whatever the length.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.mechanism.kernels import askew
from regard.mechanism.kernels.structure import CAUSAL, Structure, View

SCRATCH = 2**29  # bytes for the term; a backward pass has half as much again, for gradients
BLOCK = 128  # a multiple of what kernels have of queries or keys at a time
PROGRAMS = 1024  # that share distances, where there are few of them


class Part(NamedTuple):
    """Some queries of some sequences."""

    sequence: int  # the first
    sequences: int
    start: int
    stop: int
    keys: int  # those up to here matter to them

    def room(self, heads: int, **options: Any) -> View:
        """For a number for each of its queries and keys; rows are aligned."""
        rows, step = self.stop - self.start, _up(self.keys, BLOCK)
        data = torch.empty(self.sequences * heads * rows * step, **options)
        return View(data, heads * rows * step, rows * step, step)


def _up(number: int, to: int) -> int:
    return -(-number // to) * to


def parts(query: Tensor, keys: int, kind: int) -> Iterator[Part]:
    """What there is room for at a time: several sequences, or some queries of one."""
    batch, heads, queries, _ = query.shape
    room = SCRATCH // (4 * heads)
    together = max(1, room // (queries * _up(keys, BLOCK)))
    together = -(-batch // -(-batch // together))  # about the same number each time

    def seen(stop: int) -> int:
        return max(keys - queries + stop, 0) if kind == CAUSAL else keys

    for sequence in range(0, batch, together):
        start = 0
        while start < queries:
            stop = min(start + BLOCK, queries)
            while stop < queries:
                more = min(stop + BLOCK, queries)
                if (more - start) * _up(seen(more), BLOCK) > room:
                    break
                stop = more
            yield Part(sequence, min(together, batch - sequence), start, stop, seen(stop))
            start = stop


def shifted(structure: Structure, part: Part, queries: int, keys: int) -> View:
    """The term of a part's queries, base 2, as a number for each of their keys."""
    second = structure.second
    assert second is not None
    heads = second.shape[1]
    room = part.room(heads, device=second.device, dtype=torch.float32)
    wide = _power(second.shape[3])
    exact = second.dtype == torch.float32
    some = 32 if exact or wide > 128 else BLOCK
    squares = -(-(part.stop - part.start) // BLOCK)
    askew.spread[4 * squares, part.sequences * heads, -(-(room.row + BLOCK) // some)](
        room, structure.ends, structure.relative, heads, queries, keys, part.sequence, part.start,
        part.stop, BN=some, BU=wide, BLOCK=BLOCK, EVEN=wide == second.shape[3],
        KIND=structure.kind, PRECISION="ieee" if exact else "tf32", num_warps=4, num_stages=1,
    )  # fmt: skip
    return room


def _power(number: int) -> int:
    """Places for so many; matrix products need at least 16."""
    return max(16, 1 << (number - 1).bit_length())


class Gradients:
    """Of queries, and of the term's two sides: what the gradients of all scores make of them."""

    def __init__(self, query: Tensor, key: Tensor, structure: Structure, train: bool) -> None:
        second, table = structure.second, structure.table
        assert second is not None
        assert table is not None
        self.key, self.structure = key, structure
        self.query, self.second = torch.empty_like(query), torch.empty_like(second)
        self.exact = query.dtype == torch.float32
        widest = max(query.shape[3], second.shape[3])
        self.block = 64 if not self.exact and widest <= 128 else 32
        batch, heads, queries, _ = query.shape
        # Embeddings get something of each sequence: programs that share them sum up by themselves.
        self.nearest = 0 if structure.kind == CAUSAL else 1 - queries
        self.blocks = -(-(key.shape[2] - self.nearest) // self.block)
        shares = max(1, min(PROGRAMS // (self.blocks * heads), batch))
        self.far = None
        if train:
            shape = shares, heads, self.blocks * self.block, second.shape[3]
            self.far = query.new_zeros(shape, dtype=torch.float32)

    def add(self, part: Part, changes: View, inner: View) -> None:
        """With the gradients of a part's scores, and of its products of queries and keys."""
        structure, relative = self.structure, self.structure.relative
        _, heads, queries, width = self.query.shape
        keys, wide = self.key.shape[2], _power(relative.width)
        both: Any = {
            "BM": self.block, "BN": self.block, "BU": wide,
            "EVEN": (wide, _power(width)) == (relative.width, width), "KIND": structure.kind,
            "PRECISION": "ieee" if self.exact else "tf32", "num_warps": 4,
        }  # fmt: skip
        blocks = -(-(part.stop - part.start) // self.block)
        fits = not self.exact and wide <= 64  # four programs, in what a multiprocessor has
        askew.to_queries[blocks, part.sequences * heads](
            View.of(self.key), changes, inner, View.of(self.query), View.of(self.second),
            structure.ends, relative, structure.scale, part.sequence, part.start, heads,
            heads // self.key.shape[1], queries, keys, width, BD=_power(width), **both,
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
        """Of the embeddings, [heads or 1, distances, dim]."""
        table = self.structure.table
        if self.far is None or table is None:
            return None
        far = self.far.sum((0, 1))[None] if table.shape[0] == 1 else self.far.sum(0)
        # Distances beyond the table belong to its ends.
        total = far.new_zeros(table.shape)
        lead = self.structure.reach - self.nearest  # the place of the table's first row
        end = far.shape[1]
        low, high = (min(max(place, 0), end) for place in (lead, lead + table.shape[1]))
        total[:, low - lead : high - lead] = far[:, low:high]
        total[:, 0] += far[:, :low].sum(1)
        total[:, -1] += far[:, high:].sum(1)
        return total.to(table.dtype)
