"""What a kernel needs to know of a call beside its tensors: its mask, its bias and its numbers."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

BY_ROW = ("entropy", "peak", "max_logit", "distance")  # what the forward pass itself can tell
OVER_QUERIES = ("received", "map", "map_peak")  # fields that need every row's final lse
NAMED = (*BY_ROW, *OVER_QUERIES, "rows")  # as See names them
STREAMED = (*NAMED, "top_weights", "top_keys")
KEPT = ("output", "lse", "entropy", "distance")  # for the backward pass
# Which keys are highest does not change smoothly, so these have no gradient here.
ROUGH = ("peak", "max_logit", "map_peak", "top_weights", "rows")


# The same numbers as in tiles.py, which cannot be imported without Triton.
FULL, CAUSAL, INTERVAL = 0, 1, 2
PLAIN, ALIBI, TABLE, RELATIVE = 0, 1, 2, 3


LOG2E = 1.4426950408889634


# Triton has these too, at 10 µs a call.
def ceil(number: int, by: int) -> int:
    """How many pieces of one size hold a number."""
    return -(-number // by)


def next_power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def power(width: int) -> int:
    """The width of a tile that holds ``width`` numbers; matrix products need at least 16."""
    return max(16, next_power(width))


def outputs(query: Tensor, value: Tensor, wanted: Collection[str]) -> dict[str, Tensor]:
    """Room for what a forward pass writes: "output", "lse", and what is wanted for each query."""
    found = {"output": value.new_empty(*query.shape[:3], value.shape[3])}
    for name in ("lse", "entropy", "peak", "distance"):
        if name == "lse" or name in wanted:
            found[name] = query.new_empty(query.shape[:3], dtype=torch.float32)
    return found


class View(NamedTuple):
    """A tensor [batch, heads, length, dim] as a kernel takes it: its last axis is dense."""

    data: Tensor | None
    batch: int = 0
    head: int = 0
    row: int = 0

    @classmethod
    def of(cls, tensor: Tensor | None) -> View:
        return cls(None) if tensor is None else cls(tensor, *tensor.stride()[:3])


class Ends(NamedTuple):
    """Both ends of each query's range of keys, and their strides along the batch."""

    low: Tensor | None
    high: Tensor | None
    low_batch: int
    high_batch: int


class Terms(NamedTuple):
    """What makes a score of a product: scale, softcap, and a bias by distance."""

    scale: float
    softcap: float
    table: Tensor | None
    table_head: int
    reach: int


class Relative(NamedTuple):
    """Transformer-XL's term: a second query, and an embedding of each distance."""

    query: View
    table: Tensor | None
    head: int
    row: int
    first: int  # the distance of the table's first row
    last: int  # the table's last row
    scale: float
    width: int


class Work(NamedTuple):
    """How the kernels for Hopper deal out a call to programs; see hopper/roles.py."""

    items: int  # blocks of all heads; under a causal mask a long and a short one together
    blocks: int  # of a head
    heads: int
    groups: int  # heads that share keys
    programs: int
    singly: int  # of the last items, the blocks of which are dealt out one by one
    length: int = 1  # steps that an item has: tiles it goes over
    share: int = 1  # steps that a program has of the last items, which are fewer than programs

    @property
    def cut(self) -> int:
        """How many items are cut."""
        return self.items % self.programs if self.share < self.length else 0

    @property
    def whole(self) -> Work:
        """The items that are not."""
        return self._replace(items=self.items - self.cut)


class Sizes(NamedTuple):
    """What the passes by keys for Hopper have to know of a call."""

    keys: int
    offset: int  # of the first query
    tiles: int  # of queries
    per_bin: int  # tiles a bin of the map has
    bins: int
    together: int  # tiles between which no block is cut
    units: int  # of keys in a row of the map


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """A mask as a range of keys for each query, a bias as some numbers for each head.

    ``kind`` is FULL, CAUSAL, or INTERVAL with its ends ``low`` and ``high``, int32 as
    [1 or batch, queries]; ``longest`` is the most keys a query sees, if a mask says so, or 0.
    ``bias`` is

    - PLAIN: there is none;
    - ALIBI: ``table`` holds slopes as [heads, 1];
    - TABLE: ``table`` holds a number for each distance from -reach to reach as
      [heads, 2 * reach + 1], the ends standing for all beyond;
    - RELATIVE: ``shift * second . table[distance - reach]``, with ``second`` [batch, heads,
      queries, dim] and ``table`` [heads or 1, distances, dim], both in the dtype of the query.

    Slopes and tables of numbers are float32.
    """

    kind: int
    low: Tensor | None
    high: Tensor | None
    bias: int
    table: Tensor | None
    reach: int
    scale: float
    softcap: float | None
    second: Tensor | None = None
    shift: float = 0.0
    longest: int = 0

    @property
    def ends(self) -> Ends:
        low, high = self.low, self.high
        if low is None or high is None:
            return Ends(None, None, 0, 0)
        steps = (0 if end.shape[0] == 1 else end.stride(0) for end in (low, high))
        return Ends(low, high, *steps)

    @property
    def terms(self) -> Terms:
        table = self.table if self.bias in (ALIBI, TABLE) else None
        step = 0 if table is None else table.stride(0)
        reach = self.reach if self.bias == TABLE else 0
        return Terms(self.scale, self.softcap or 0.0, table, step, reach)

    @property
    def relative(self) -> Relative:
        table, second = self.table, self.second
        if table is None or second is None:
            return Relative(View(None), None, 0, 0, 0, 0, 0.0, 0)
        head = 0 if table.shape[0] == 1 else table.stride(0)
        return Relative(
            View.of(second), table, head, table.stride(1), self.reach, table.shape[1] - 1,
            self.shift, table.shape[2],
        )  # fmt: skip

    def bounds(self, first: Tensor, last: Tensor) -> Tensor:
        """For each block of keys ``first`` to ``last``, the queries that matter to it.

        As [1 or batch, blocks, 4]: where those begin that see some of these keys, where those begin
        that see beyond the last, where those end that see the first, where all end.
        """
        assert self.low is not None
        assert self.high is not None
        both = torch.cat((first, last)).to(torch.int32)
        ends = []
        for side in (self.high, self.low):
            spread = both.expand(side.shape[0], -1).contiguous()
            ends.append(torch.searchsorted(side, spread, right=True, out_int32=True))
        batch = max(end.shape[0] for end in ends)
        high, low = (end.reshape(len(end), 2, -1).expand(batch, -1, -1) for end in ends)
        return torch.stack((high[:, 0], high[:, 1], low[:, 0], low[:, 1]), dim=-1).contiguous()


class Request(NamedTuple):
    """What to stream beside the output and lse: some of STREAMED, and the numbers they need."""

    fields: tuple[str, ...] = ()
    grid: tuple[int, int] = (1, 1)
    top: int = 0
    rows: tuple[int, ...] = ()

    @property
    def names(self) -> list[str]:
        """What comes back, in order."""
        return ["output", "lse", *(name for name in STREAMED if name in self.fields)]


def bins(length: int, count: int, device: torch.device) -> Tensor:
    """The bin of each of ``length`` positions, when they are spread evenly over ``count`` bins."""
    return torch.arange(length, device=device) * min(count, length) // max(length, 1)
