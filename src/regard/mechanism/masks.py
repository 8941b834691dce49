"""Masks: who may attend to whom. True means *may attend*, always.

A mask is a small frozen description, joined with ``&``, ``|`` and ``~``. It can say two things
about itself:

- ``tile``: the answer for a block of queries and keys, as a boolean tensor;
- ``interval``: for each query the range of keys it may attend to, in O(n) memory. Causal, Window,
  Prefix, Padding and Segments, and whatever ``&`` makes of them, *are* such ranges, and both ends
  never move backwards from one query to the next. Backends live on this: a range is sliced,
  skipped or compared, where an n x n tensor would have to be read.

Positions are absolute: key ``j`` stands at ``j``, and the last query lines up with the last key.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError


@dataclass(frozen=True, slots=True)
class Extent:
    """How far a call reaches: its sizes, and where its queries stand among its keys."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device

    @property
    def offset(self) -> int:
        """What turns a query's index into its position: the last query is at the last key."""
        return self.keys - self.queries

    def positions(self) -> Tensor:
        """The position of every query, as [1, queries]."""
        return torch.arange(self.offset, self.keys, device=self.device)[None]


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of the score matrix: some consecutive queries against some consecutive keys."""

    extent: Extent
    rows: range
    columns: range

    def query_positions(self) -> Tensor:  # [q, 1]
        offset = self.extent.offset
        rows = torch.arange(
            self.rows.start + offset, self.rows.stop + offset, device=self.extent.device
        )
        return rows[:, None]

    def key_positions(self) -> Tensor:  # [k]
        return torch.arange(self.columns.start, self.columns.stop, device=self.extent.device)


class Interval(NamedTuple):
    """For each query the keys ``low <= j < high``; ends broadcast to [batch, queries].

    ``exact`` says whether that is the whole mask, or only the keys outside which nothing is
    allowed. An end that is the same for all queries is a plain int or a [batch, 1] tensor.
    """

    low: int | Tensor
    high: int | Tensor
    exact: bool

    def tile(self, tile: Tile) -> Tensor:
        """Whether each key of the tile lies in its query's range: broadcasts to [b, h, q, k]."""
        columns = tile.key_positions()
        low, high = _rows(self.low, tile.rows), _rows(self.high, tile.rows)
        return (columns >= low) & (columns < high)


class Hull(NamedTuple):
    """Some consecutive rows of a call, and the keys outside which none of them may attend."""

    rows: range
    columns: range
    full: bool  # whether every one of these rows may attend to every one of these keys


def hulls(mask: Mask | None, extent: Extent, step: int) -> list[Hull]:
    """The rows of a call, ``step`` at a time, each with the keys that matter to it."""
    starts = range(0, max(extent.queries, 1), step)
    blocks = [range(start, min(start + step, extent.queries)) for start in starts]
    if mask is None:
        return [Hull(rows, range(extent.keys), True) for rows in blocks]
    low, high, exact = mask.interval(extent)

    def ends(end: int | Tensor, outer: str) -> tuple[list[int], list[int]]:
        """The outermost and innermost value of one end over each block of rows."""
        if isinstance(end, int) or not extent.queries or not end.shape[0]:
            plain = end if isinstance(end, int) else 0
            return [plain] * len(blocks), [plain] * len(blocks)
        flat = [end.amin(0), end.amax(0)]  # over the batch
        if end.shape[1] == 1:
            least, most = ([bound.item()] * len(blocks) for bound in flat)
        else:
            # Ends never move backwards, so a block's extremes are those of its first and last row.
            first = [rows.start for rows in blocks]
            last = [rows.stop - 1 for rows in blocks]
            least, most = flat[0][first].tolist(), flat[1][last].tolist()
        return (least, most) if outer == "least" else (most, least)

    low_outer, low_inner = ends(low, "least")
    high_outer, high_inner = ends(high, "most")
    found = []
    for index, rows in enumerate(blocks):
        start = min(max(low_outer[index], 0), extent.keys)
        stop = min(max(high_outer[index], start), extent.keys)
        inside = low_inner[index] <= start and high_inner[index] >= stop
        found.append(Hull(rows, range(start, stop), exact and inside))
    return found


class Mask:
    """What all masks share: how they are joined."""

    __slots__ = ()

    def __and__(self, other: Mask) -> Mask:
        return And(self, _mask(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _mask(other, "|"))

    def __invert__(self) -> Mask:
        return Not(self)

    def check(self, extent: Extent) -> None:
        """Raise InputError where this mask cannot belong to a call of that extent."""

    def interval(self, extent: Extent) -> Interval:
        raise NotImplementedError

    def tile(self, tile: Tile) -> Tensor:
        """Whether each query of the tile may attend to each key: broadcasts to [b, h, q, k]."""
        return self.interval(tile.extent).tile(tile)

    @property
    def static(self) -> bool:
        """Whether the mask is all Python numbers, so that plans made from it can be kept."""
        return True


def _mask(other: object, symbol: str) -> Mask:
    if isinstance(other, Mask):
        return other
    raise InputError(
        f"'{symbol}' joins two masks, but one side is {type(other).__name__}. "
        "Wrap a boolean tensor as masks.Dense(tensor)."
    )


def _rows(end: int | Tensor, rows: range) -> int | Tensor:
    """One end of an interval for some of its queries: [b, 1, q, 1]."""
    if isinstance(end, int):
        return end
    if end.shape[-1] != 1:
        end = end[:, rows.start : rows.stop]
    return end[:, None, :, None]


def _lengths(lengths: Tensor | Sequence[int] | int, what: str) -> Tensor | tuple[int, ...]:
    """Lengths as they were meant: a tensor of whole numbers stays, numbers become a tuple."""
    if isinstance(lengths, Tensor):
        if lengths.dim() > 1 or lengths.is_floating_point() or lengths.dtype == torch.bool:
            raise InputError(
                f"{what} must hold one whole number per sequence, but got a {lengths.dtype} tensor "
                f"of shape {list(lengths.shape)}. For a boolean mask of keys pass "
                "masks.Dense(mask[:, None, None, :])."
            )
        return lengths.reshape(-1)
    numbers = (lengths,) if isinstance(lengths, int) else tuple(lengths)
    for number in numbers:
        if not isinstance(number, int) or number < 0:
            raise InputError(f"{what} must be whole numbers from 0 on, but got {number!r}.")
    return numbers


def _column(lengths: Tensor | tuple[int, ...], extent: Extent) -> int | Tensor:
    """Lengths as an end of an interval: an int, or [batch, 1]."""
    if isinstance(lengths, tuple):
        if len(set(lengths)) == 1:
            return lengths[0]
        lengths = torch.tensor(lengths)
    return lengths.to(extent.device)[:, None]


def _check_lengths(lengths: Tensor | tuple[int, ...], what: str, extent: Extent) -> None:
    if len(lengths) not in (1, extent.batch):
        raise InputError(
            f"{what} has {len(lengths)} entries for a batch of {extent.batch}. "
            "Give one length per sequence, or one for all."
        )
    if isinstance(lengths, tuple) and max(lengths) > extent.keys:
        raise InputError(
            f"{what} has a length of {max(lengths)}, but there are only {extent.keys} keys."
        )


@dataclass(frozen=True, slots=True)
class Causal(Mask):
    """A query attends to its own position and to those before it.

    >>> Causal() & Window(2)
    Causal() & Window(left=2, right=0)
    """

    def interval(self, extent: Extent) -> Interval:
        return Interval(0, (extent.positions() + 1).clamp(min=0), True)


@dataclass(frozen=True, slots=True)
class Window(Mask):
    """A query attends to ``left`` keys before it, to itself, and to ``right`` keys after it."""

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        for name, size in (("left", self.left), ("right", self.right)):
            if not isinstance(size, int) or size < 0:
                raise InputError(f"Window({name}=...) counts keys from 0 on, but got {size!r}.")

    def interval(self, extent: Extent) -> Interval:
        at = extent.positions()
        low, high = (at - self.left).clamp(min=0), (at + self.right + 1).clamp(0, extent.keys)
        return Interval(low, high, True)


@dataclass(frozen=True, slots=True, eq=False)
class Prefix(Mask):
    """Causal, but the first ``length`` keys are open to every query (a prefix language model)."""

    length: Tensor | Sequence[int] | int

    def __post_init__(self) -> None:
        object.__setattr__(self, "length", _lengths(self.length, "Prefix(length)"))

    @property
    def static(self) -> bool:
        return isinstance(self.length, tuple)

    def check(self, extent: Extent) -> None:
        _check_lengths(self.length, "Prefix(length)", extent)  # type: ignore[arg-type]

    def interval(self, extent: Extent) -> Interval:
        prefix = _column(self.length, extent)  # type: ignore[arg-type]
        causal = extent.positions() + 1
        if isinstance(prefix, int):
            return Interval(0, causal.clamp(min=prefix), True)
        return Interval(0, torch.maximum(causal, prefix), True)


@dataclass(frozen=True, slots=True, eq=False)
class Padding(Mask):
    """Only the first ``lengths[b]`` keys of sequence ``b`` are real; with ``side="left"``, the last.

    It speaks of keys. What a padded *query* yields is not meant to be used.
    """

    lengths: Tensor | Sequence[int] | int
    side: str = "right"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _lengths(self.lengths, "Padding(lengths)"))
        if self.side not in ("left", "right"):
            raise InputError(f'Padding(side=...) is "left" or "right", but got {self.side!r}.')

    @property
    def static(self) -> bool:
        return isinstance(self.lengths, tuple)

    def check(self, extent: Extent) -> None:
        _check_lengths(self.lengths, "Padding(lengths)", extent)  # type: ignore[arg-type]

    def interval(self, extent: Extent) -> Interval:
        length = _column(self.lengths, extent)  # type: ignore[arg-type]
        if self.side == "right":
            return Interval(0, length, True)
        return Interval(extent.keys - length, extent.keys, True)


@dataclass(frozen=True, slots=True)
class Segments(Mask):
    """Sequences packed one after another into a row: a query attends within its own sequence only.

    ``lengths`` are those of the packed sequences, the same for the whole batch, or one list per
    row. For cross-attention between two packed rows give those of the keys as well.

    >>> Segments([3, 2]) & Causal()
    Segments(lengths=((3, 2),), keys=None) & Causal()
    """

    lengths: Sequence[int] | Sequence[Sequence[int]]
    keys: Sequence[int] | Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _packing(self.lengths))
        if self.keys is not None:
            object.__setattr__(self, "keys", _packing(self.keys))
            if [len(row) for row in self.lengths] != [len(row) for row in self.keys]:  # type: ignore[arg-type]
                raise InputError(
                    "Segments: the queries and the keys are packed from different numbers of "
                    f"sequences: {self.lengths} and {self.keys}."
                )

    @classmethod
    def from_ids(cls, ids: Tensor) -> Segments:
        """From the number of the sequence each position belongs to, as [length] or [batch, length].

        >>> Segments.from_ids(torch.tensor([7, 7, 7, 9, 9]))
        Segments(lengths=((3, 2),), keys=None)
        """
        if ids.dim() not in (1, 2):
            raise InputError(f"Segment ids are [length] or [batch, length], not {list(ids.shape)}.")
        rows = []
        for row in ids.reshape(-1, ids.shape[-1]).cpu():
            names, counts = torch.unique_consecutive(row, return_counts=True)
            if len(names) != len(names.unique()):
                raise InputError(
                    "Segments lie one after another, but an id comes back after another one: "
                    f"{names.tolist()}. For a pattern like this pass masks.Dense."
                )
            rows.append(tuple(counts.tolist()))
        return cls(tuple(rows))

    def check(self, extent: Extent) -> None:
        sides = [("lengths", self.lengths, extent.keys if self.keys is None else extent.queries)]
        if self.keys is not None:
            sides.append(("keys", self.keys, extent.keys))
        for name, rows, expected in sides:
            if len(rows) not in (1, extent.batch):
                raise InputError(
                    f"Segments({name}=...) packs {len(rows)} rows for a batch of {extent.batch}."
                )
            for row in rows:
                if sum(row) != expected:  # type: ignore[arg-type]
                    raise InputError(
                        f"Segments({name}=...) must add up to {expected} positions, but "
                        f"{list(row)} is {sum(row)}."  # type: ignore[arg-type]
                    )

    def interval(self, extent: Extent) -> Interval:
        lows, highs = [], []
        for index, row in enumerate(self.lengths):
            packed = row if self.keys is None else self.keys[index]
            ends = list(accumulate(packed))  # type: ignore[arg-type]
            starts = [0, *ends[:-1]]
            counts = torch.tensor(row)
            lows.append(torch.tensor(starts).repeat_interleave(counts))
            highs.append(torch.tensor(ends).repeat_interleave(counts))
        low, high = torch.stack(lows), torch.stack(highs)
        if self.keys is None:  # one packing for both sides: queries look up their own position
            at = extent.positions().cpu()
            outside = at < 0
            at = at.clamp(min=0).expand(len(low), -1)
            low, high = low.gather(1, at), high.gather(1, at).masked_fill(outside, 0)
        return Interval(low.to(extent.device), high.to(extent.device), True)


def _packing(
    lengths: Sequence[int] | Sequence[Sequence[int]],
) -> tuple[tuple[int, ...], ...]:
    flat = all(isinstance(length, int) for length in lengths)
    rows = tuple(tuple(row) for row in ([lengths] if flat else lengths))  # type: ignore[arg-type]
    for length in chain.from_iterable(rows):
        if not isinstance(length, int) or length < 1:
            raise InputError(
                f"Segments are whole numbers of positions from 1 on, but got {length!r}."
            )
    return rows


@dataclass(frozen=True, slots=True, eq=False)
class Dense(Mask):
    """A boolean tensor that broadcasts to [batch, heads, queries, keys]."""

    allowed: Tensor

    def __post_init__(self) -> None:
        if self.allowed.dtype != torch.bool:
            raise InputError(
                f"A mask is boolean, True where a query may attend, but got {self.allowed.dtype}. "
                "Numbers to be added to the scores are a bias: pass bias=tensor. "
                "A 0/1 mask becomes one by mask.bool()."
            )

    @property
    def static(self) -> bool:
        return False

    def check(self, extent: Extent) -> None:
        check_broadcast(self.allowed, extent, "mask")

    def interval(self, extent: Extent) -> Interval:
        return Interval(0, extent.keys, False)

    def tile(self, tile: Tile) -> Tensor:
        return slice_tile(self.allowed, tile)


def check_broadcast(tensor: Tensor, extent: Extent, what: str) -> None:
    expected = (extent.batch, extent.heads, extent.queries, extent.keys)
    fits = tensor.dim() <= 4 and all(
        size in (1, want)
        for size, want in zip(reversed(tensor.shape), reversed(expected), strict=False)
    )
    if not fits:
        raise InputError(
            f"The {what} of shape {list(tensor.shape)} does not broadcast to "
            f"[batch, heads, queries, keys] = {list(expected)}."
        )
    if tensor.device != extent.device:
        raise InputError(
            f"The {what} is on {tensor.device}, but the query is on {extent.device}. "
            f"Move it: {what}.to({str(extent.device)!r})."
        )


def slice_tile(tensor: Tensor, tile: Tile) -> Tensor:
    """The part of a broadcastable [batch, heads, queries, keys] tensor that a tile covers."""
    tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    if tensor.shape[2] != 1:
        tensor = tensor[:, :, tile.rows.start : tile.rows.stop]
    if tensor.shape[3] != 1:
        tensor = tensor[:, :, :, tile.columns.start : tile.columns.stop]
    return tensor


class _Joined(Mask):
    __slots__ = ()
    left: Mask
    right: Mask

    @property
    def static(self) -> bool:
        return self.left.static and self.right.static

    def check(self, extent: Extent) -> None:
        self.left.check(extent)
        self.right.check(extent)


@dataclass(frozen=True, slots=True, repr=False)
class And(_Joined):
    """Both masks allow it."""

    left: Mask
    right: Mask

    def __repr__(self) -> str:
        return f"{_operand(self.left)} & {_operand(self.right)}"

    def interval(self, extent: Extent) -> Interval:
        a, b = self.left.interval(extent), self.right.interval(extent)
        return Interval(
            _larger(a.low, b.low), _smaller(a.high, b.high), a.exact and b.exact
        )

    def tile(self, tile: Tile) -> Tensor:
        return self.left.tile(tile) & self.right.tile(tile)


@dataclass(frozen=True, slots=True, repr=False)
class Or(_Joined):
    """Either mask allows it."""

    left: Mask
    right: Mask

    def __repr__(self) -> str:
        return f"{_operand(self.left)} | {_operand(self.right)}"

    def interval(self, extent: Extent) -> Interval:
        a, b = self.left.interval(extent), self.right.interval(extent)
        low, high = _smaller(a.low, b.low), _larger(a.high, b.high)
        # Two ranges that both start at the first key join into one; others may leave a gap.
        joined = isinstance(low, int) and a.low == b.low == 0
        return Interval(low, high, joined and a.exact and b.exact)

    def tile(self, tile: Tile) -> Tensor:
        return self.left.tile(tile) | self.right.tile(tile)


@dataclass(frozen=True, slots=True, repr=False)
class Not(Mask):
    """The mask does not allow it."""

    inner: Mask

    def __repr__(self) -> str:
        return f"~{_operand(self.inner)}"

    @property
    def static(self) -> bool:
        return self.inner.static

    def check(self, extent: Extent) -> None:
        self.inner.check(extent)

    def interval(self, extent: Extent) -> Interval:
        return Interval(0, extent.keys, False)

    def tile(self, tile: Tile) -> Tensor:
        return ~self.inner.tile(tile)


def _operand(mask: Mask) -> str:
    return f"({mask!r})" if isinstance(mask, _Joined) else repr(mask)


def _larger(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, int) and isinstance(b, int):
        return max(a, b)
    if isinstance(a, int):
        a, b = b, a
    assert isinstance(a, Tensor)
    return a.clamp(min=b) if isinstance(b, int) else torch.maximum(a, b)


def _smaller(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, int) and isinstance(b, int):
        return min(a, b)
    if isinstance(a, int):
        a, b = b, a
    assert isinstance(a, Tensor)
    return a.clamp(max=b) if isinstance(b, int) else torch.minimum(a, b)
