"""Masks: who may attend to whom. True means *may attend*, always.

A mask is a small frozen description, joined with ``&``, ``|`` and ``~``. It can say two things
about itself:

- ``tile``: the answer for a block of queries and keys, as a boolean tensor;
- ``interval``: for each query the range of keys it may attend to, in O(n) memory. Causal, Window,
  Prefix, Padding and Segments, and whatever ``&`` makes of them, *are* such ranges, and both ends
  never move backwards from one query to the next. Backends live on this: a range is sliced,
  skipped or compared, where an n x n tensor would have to be read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from operator import index
from typing import Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.mechanism.geometry import Extent, Hull, Interval, Tile, check_broadcast, slice_tile


class Mask:
    """What all masks share: how they are joined."""

    __slots__ = ()

    def __and__(self, other: Mask) -> Mask:
        return And(self, _mask(other, "&"))

    def __or__(self, other: Mask) -> Mask:
        return Or(self, _mask(other, "|"))

    def __rand__(self, other: Mask) -> Mask:
        return And(_mask(other, "&"), self)

    def __ror__(self, other: Mask) -> Mask:
        return Or(_mask(other, "|"), self)

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


def hulls(mask: Mask | None, extent: Extent, step: int) -> list[Hull]:
    """The rows of a call, ``step`` at a time, each with the keys that matter to it."""
    if mask is None:
        return Interval(0, extent.keys, True).hulls(extent, step)
    return on_host(mask, extent).hulls(extent, step)


def on_host(mask: Mask, extent: Extent) -> Interval:
    """The mask's ranges where they can be read without waiting for a device, if that can be."""
    host = extent._replace(device=torch.device("cpu")) if mask.static else extent
    return mask.interval(host)


def _mask(other: object, symbol: str) -> Mask:
    if isinstance(other, Mask):
        return other
    raise InputError(
        f"'{symbol}' joins two masks, but one side is {type(other).__name__}. "
        "Wrap a boolean tensor as masks.Dense(tensor)."
    )


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
    numbers = tuple(lengths) if isinstance(lengths, Iterable) else (lengths,)
    return tuple(_count(number, f"{what} must be whole numbers") for number in numbers)


def _count(number: Any, what: str) -> int:
    """A whole number from 0 on, NumPy's among them."""
    try:
        found = number if isinstance(number, int) else index(number)
    except TypeError:
        found = -1
    if found < 0:
        raise InputError(f"{what} from 0 on, but got {number!r}.")
    return found


def _column(lengths: Tensor | tuple[int, ...], extent: Extent) -> int | Tensor:
    """Lengths as an end of an interval: an int, or [batch, 1]."""
    if isinstance(lengths, tuple):
        if len(set(lengths)) == 1:
            return lengths[0]
        lengths = torch.tensor(lengths, dtype=torch.long)
    return lengths.to(extent.device)[:, None]


def _check_lengths(lengths: Tensor | tuple[int, ...], what: str, extent: Extent) -> None:
    if len(lengths) not in (1, extent.batch):
        raise InputError(
            f"{what} has {len(lengths)} entries for a batch of {extent.batch}. "
            "Give one length per sequence, or one for all."
        )
    if isinstance(lengths, tuple) and max(lengths, default=0) > extent.keys:
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
    """A query attends to ``left`` keys before it, to itself, and to ``right`` keys after it.

    >>> from regard import See, Window, attention
    >>> x = torch.zeros(4, 2)  # [length, dim]; all scores are equal
    >>> _, seen = attention(x, x, x, mask=Window(1), see=See(weights=True))
    >>> seen.weights[0, 0].tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """

    left: int
    right: int = 0

    def __post_init__(self) -> None:
        for name, size in (("left", self.left), ("right", self.right)):
            object.__setattr__(self, name, _count(size, f"Window({name}=...) counts keys"))

    def interval(self, extent: Extent) -> Interval:
        at = extent.positions()
        low, high = (at - self.left).clamp(min=0), (at + self.right + 1).clamp(0, extent.keys)
        return Interval(low, high, True)


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Prefix(Mask):
    """Causal, but the first ``length`` keys are open to every query (a prefix language model).

    >>> from regard import Prefix, See, attention
    >>> x = torch.zeros(3, 2)  # [length, dim]; all scores are equal
    >>> _, seen = attention(x, x, x, mask=Prefix(2), see=See(weights=True))
    >>> (seen.weights[0, 0] > 0).tolist()
    [[True, True, False], [True, True, False], [True, True, True]]
    """

    length: Tensor | tuple[int, ...]

    def __init__(self, length: Tensor | Sequence[int] | int) -> None:
        object.__setattr__(self, "length", _lengths(length, "Prefix(length)"))

    @property
    def static(self) -> bool:
        return isinstance(self.length, tuple)

    def check(self, extent: Extent) -> None:
        _check_lengths(self.length, "Prefix(length)", extent)

    def interval(self, extent: Extent) -> Interval:
        return Interval(0, _larger(extent.positions() + 1, _column(self.length, extent)), True)


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Padding(Mask):
    """Only the first ``lengths[b]`` keys of sequence ``b`` are real; with side "left", the last.

    It speaks of keys. What a padded *query* yields is not meant to be used.

    >>> from regard import Padding, See, attention
    >>> x = torch.zeros(2, 1, 3, 4)  # [batch, heads, length, dim]; all scores are equal
    >>> _, seen = attention(x, x, x, mask=Padding([3, 2]), see=See(received=True))
    >>> [[round(weight, 2) for weight in row] for row in seen.received[:, 0].tolist()]
    [[1.0, 1.0, 1.0], [1.5, 1.5, 0.0]]
    """

    lengths: Tensor | tuple[int, ...]
    side: str

    def __init__(self, lengths: Tensor | Sequence[int] | int, side: str = "right") -> None:
        if side not in ("left", "right"):
            raise InputError(f'Padding(side=...) is "left" or "right", but got {side!r}.')
        object.__setattr__(self, "lengths", _lengths(lengths, "Padding(lengths)"))
        object.__setattr__(self, "side", side)

    @property
    def static(self) -> bool:
        return isinstance(self.lengths, tuple)

    def check(self, extent: Extent) -> None:
        _check_lengths(self.lengths, "Padding(lengths)", extent)

    def interval(self, extent: Extent) -> Interval:
        length = _column(self.lengths, extent)
        if self.side == "right":
            return Interval(0, length, True)
        return Interval(extent.keys - length, extent.keys, True)


@dataclass(frozen=True, slots=True, init=False)
class Segments(Mask):
    """Sequences packed one after another into a row: a query attends within its own sequence only.

    ``lengths`` are those of the packed sequences, the same for the whole batch, or one list per
    row. For cross-attention between two packed rows give those of the keys as well.

    >>> Segments([3, 2]) & Causal()
    Segments(lengths=((3, 2),), keys=None) & Causal()
    """

    lengths: tuple[tuple[int, ...], ...]
    keys: tuple[tuple[int, ...], ...] | None

    def __init__(
        self,
        lengths: Sequence[int] | Sequence[Sequence[int]] | Tensor,
        keys: Sequence[int] | Sequence[Sequence[int]] | Tensor | None = None,
    ) -> None:
        packed = _packing(lengths)
        across = None if keys is None else _packing(keys)
        if across is not None and [len(row) for row in packed] != [len(row) for row in across]:
            raise InputError(
                "Segments: the queries and the keys are packed from different numbers of "
                f"sequences: {packed} and {across}."
            )
        object.__setattr__(self, "lengths", packed)
        object.__setattr__(self, "keys", across)

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
        return cls(rows)

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
                if sum(row) != expected:
                    raise InputError(
                        f"Segments({name}=...) must add up to {expected} positions, but "
                        f"{list(row)} is {sum(row)}."
                    )

    def interval(self, extent: Extent) -> Interval:
        lows, highs = [], []
        for row, across in zip(self.lengths, self.keys or self.lengths, strict=True):
            ends = list(accumulate(across))
            counts = torch.tensor(row, dtype=torch.long)
            lows.append(torch.tensor([0, *ends[:-1]][: len(row)]).repeat_interleave(counts))
            highs.append(torch.tensor(ends).repeat_interleave(counts))
        low, high = torch.stack(lows), torch.stack(highs)
        if self.keys is None:  # one packing for both sides: queries look up their own position
            at = extent.positions().cpu()
            inside = at.clamp(min=0).expand(len(low), -1)
            low, high = low.gather(1, inside), high.gather(1, inside).masked_fill(at < 0, 0)
        return Interval(low.to(extent.device), high.to(extent.device), True)


def _packing(lengths: Any) -> tuple[tuple[int, ...], ...]:
    """Packed lengths, numbers or rows of numbers, as one tuple per row of the batch."""
    if not isinstance(lengths, Sequence):
        lengths = lengths.tolist() if hasattr(lengths, "tolist") else [lengths]
    rows: list[Sequence[int]] = []
    for length in lengths:
        if not isinstance(length, Sequence):
            rows = [lengths]  # numbers only, as checked below
            break
        rows.append(length)
    for length in chain.from_iterable(rows):
        if not isinstance(length, int) or length < 1:
            raise InputError(
                f"Segments are whole numbers of positions from 1 on, but got {length!r}."
            )
    return tuple(tuple(row) for row in rows)


@dataclass(frozen=True, slots=True, eq=False)
class Dense(Mask):
    """A boolean tensor that broadcasts to [batch, heads, queries, keys].

    >>> from regard import attention, masks
    >>> x = torch.eye(2)
    >>> mask = masks.Dense(torch.tensor([[True, False], [False, False]]))
    >>> attention(x, x, x, mask=mask).tolist()  # who may attend to nothing gets zeros
    [[1.0, 0.0], [0.0, 0.0]]
    """

    allowed: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.allowed, Tensor):
            raise InputError(
                f"masks.Dense(...) holds a boolean tensor, not {type(self.allowed).__name__}. "
                "torch.as_tensor(mask) makes one."
            )
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
        return Interval(_larger(a.low, b.low), _smaller(a.high, b.high), a.exact and b.exact)

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
        joined = isinstance(a.low, int) and isinstance(b.low, int) and a.low == b.low == 0
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
