"""Masks: which keys each query may attend to. True means *may attend*, always.

A mask is a small frozen description; ``&``, ``|`` and ``~`` combine masks. It has two methods:

- ``tile`` returns a boolean tensor for a block of queries and keys: the pairs it allows;
- ``interval`` returns, for each query, a range that contains every key it may attend to.

A :class:`RangeMask` (Causal, Window, Prefix, Padding, Segments) allows exactly one range of keys
for each query, and neither end of the range decreases from one query to the next. Backends slice,
skip or compare ranges instead of reading a [queries, keys] tensor. :func:`lower` turns a mask into
ranges for kernels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate, chain
from operator import index
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError
from regard.kernels.memo import Kept
from regard.mechanism.geometry import Extent, Hull, Interval, Tile, check_broadcast, slice_tile


class Mask(ABC):
    """The base of all masks. A subclass defines ``tile`` and may define a narrower ``interval``."""

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

    def check(self, extent: Extent) -> None:  # noqa: B027 - a mask may fit every call
        """Raise InputError if this mask does not fit a call with these sizes."""

    @abstractmethod
    def tile(self, tile: Tile) -> Tensor:
        """Whether each query of the tile may attend to each key: broadcasts to [b, h, q, k]."""

    def interval(self, extent: Extent) -> Interval:
        """For each query a range with every key it may attend to; by default all keys."""
        return Interval(0, extent.keys, False)

    @property
    def is_ranges(self) -> bool:
        """Whether the mask allows exactly one range of keys for each query, in every call."""
        return False

    @property
    def max_keys(self) -> int:
        """The maximum number of keys per query if the mask alone bounds it; else 0."""
        return 0

    @property
    def static(self) -> bool:
        """Whether the mask is immutable, so that plans made from it can be cached.

        False if a field is a tensor or another object whose content may change.
        """
        parameters = type(self).__dict__.get("__dataclass_params__")
        if parameters is None or not parameters.frozen:
            return False
        values = {f.name: getattr(self, f.name) for f in fields(self)}  # type: ignore[arg-type]
        more = getattr(self, "__dict__", {}).keys() - values.keys()
        return not more and all(map(_is_static, values.values()))


def _is_static(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_static, value))
    return value.static if isinstance(value, Mask) else isinstance(value, int | float | str | None)


class RangeMask(Mask):
    """A mask that allows exactly one range of keys for each query, defined by ``ends``."""

    __slots__ = ()

    @abstractmethod
    def ends(self, extent: Extent) -> tuple[int | Tensor, int | Tensor]:
        """``low`` and ``high`` of each query: it attends to keys ``low <= j < high``."""

    def interval(self, extent: Extent) -> Interval:
        return Interval(*self.ends(extent), True)

    def tile(self, tile: Tile) -> Tensor:
        return self.interval(tile.extent).tile(tile)

    @property
    def is_ranges(self) -> bool:
        return True


class KeyRanges(NamedTuple):
    """A mask in the form kernels take: each query attends to the keys ``low <= j < high``."""

    low: Tensor  # int32 [1 or batch, queries]
    high: Tensor  # int32 [1 or batch, queries]
    max_keys: int  # the maximum number of keys per query if the mask alone bounds it; else 0


def lower(mask: Mask | None, extent: Extent) -> KeyRanges:
    """Return the ranges of a mask whose interval is exact, on the device of the call.

    >>> low, high, _ = lower(Causal() & Window(1), Extent(1, 1, 3, 3, torch.device("cpu")))
    >>> low.tolist(), high.tolist()
    ([[0, 0, 1]], [[1, 2, 3]])
    """
    keep = not torch.compiler.is_compiling() and (mask is None or mask.static)
    return (_kept_ranges if keep else _ranges)(mask, extent)


def _ranges(mask: Mask | None, extent: Extent) -> KeyRanges:
    def table(end: int | Tensor) -> Tensor:
        if isinstance(end, int):
            end = torch.full((1, 1), end, device=extent.device)
        return end.clamp(0, extent.keys).to(torch.int32).expand(-1, extent.queries).contiguous()

    interval = Interval(0, extent.keys, True) if mask is None else mask.interval(extent)
    assert interval.exact, f"{mask!r} is not one range of keys for each query"
    return KeyRanges(table(interval.low), table(interval.high), mask.max_keys if mask else 0)


_kept_ranges = Kept(_ranges)


def hulls(mask: Mask | None, extent: Extent, step: int) -> list[Hull]:
    """Split the queries into blocks of ``step``, each with the keys its queries may attend to."""
    if mask is None:
        return Interval(0, extent.keys, True).hulls(extent, step)
    return interval_on_host(mask, extent).hulls(extent, step)


def interval_on_host(mask: Mask, extent: Extent) -> Interval:
    """The mask's interval, on the CPU if the mask is static, so that reading it does not wait."""
    host = extent._replace(device=torch.device("cpu")) if mask.static else extent
    return mask.interval(host)


def _mask(other: object, symbol: str) -> Mask:
    if isinstance(other, Mask):
        return other
    raise InputError(
        f"'{symbol}' combines two masks, but one side is {type(other).__name__}. "
        "Wrap a boolean tensor as masks.Dense(tensor)."
    )


def _lengths(lengths: Tensor | Sequence[int] | int, what: str) -> Tensor | tuple[int, ...]:
    """Check lengths; keep a tensor of integers, turn Python numbers into a tuple."""
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
    """An integer of 0 or more, from Python or NumPy."""
    try:
        count = number if isinstance(number, int) else index(number)
    except TypeError:
        count = -1
    if count < 0:
        raise InputError(f"{what} from 0 on, but got {number!r}.")
    return count


def _column(lengths: Tensor | tuple[int, ...], extent: Extent) -> int | Tensor:
    """Lengths as an end of an Interval: an int if all are equal, else [batch, 1]."""
    if isinstance(lengths, tuple):
        if len(set(lengths)) == 1:
            return lengths[0]
        lengths = torch.tensor(lengths, dtype=torch.long, device=extent.device)
    return lengths.to(extent.device)[:, None]


def _check_lengths(lengths: Tensor | tuple[int, ...], what: str, extent: Extent) -> None:
    # Not `in`, which torch.compile evaluates wrongly for a batch of dynamic size.
    if len(lengths) != 1 and len(lengths) != extent.batch:
        raise InputError(
            f"{what} has {len(lengths)} entries for a batch of {extent.batch}. "
            "Give one length per sequence, or one for all."
        )
    if isinstance(lengths, tuple) and max(lengths, default=0) > extent.keys:
        raise InputError(
            f"{what} has a length of {max(lengths)}, but there are only {extent.keys} keys."
        )


@dataclass(frozen=True, slots=True)
class Causal(RangeMask):
    """A query attends to its own position and to all earlier positions.

    >>> Causal() & Window(2)
    Causal() & Window(left=2, right=0)
    """

    def ends(self, extent: Extent) -> tuple[int | Tensor, int | Tensor]:
        return 0, (extent.positions() + 1).clamp(min=0)


@dataclass(frozen=True, slots=True)
class Window(RangeMask):
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

    @property
    def max_keys(self) -> int:
        return min(self.left + 1 + self.right, 2**31)

    def ends(self, extent: Extent) -> tuple[int | Tensor, int | Tensor]:
        at = extent.positions()
        return (at - self.left).clamp(min=0), (at + self.right + 1).clamp(0, extent.keys)


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Prefix(RangeMask):
    """A causal mask whose first ``length`` keys are visible to every query (prefix language model).

    >>> from regard import Prefix, See, attention
    >>> x = torch.zeros(3, 2)  # [length, dim]; all scores are equal
    >>> _, seen = attention(x, x, x, mask=Prefix(2), see=See(weights=True))
    >>> (seen.weights[0, 0] > 0).tolist()
    [[True, True, False], [True, True, False], [True, True, True]]
    """

    length: Tensor | tuple[int, ...]

    def __init__(self, length: Tensor | Sequence[int] | int) -> None:
        object.__setattr__(self, "length", _lengths(length, "Prefix(length)"))

    def check(self, extent: Extent) -> None:
        _check_lengths(self.length, "Prefix(length)", extent)

    def ends(self, extent: Extent) -> tuple[int | Tensor, int | Tensor]:
        return 0, _larger(extent.positions() + 1, _column(self.length, extent))


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Padding(RangeMask):
    """Masks the padding keys: the first ``lengths[b]`` keys of sequence ``b`` are real.

    With side "left" the last ``lengths[b]`` keys are real. Padded *queries* still have an output:
    ignore it.

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

    def check(self, extent: Extent) -> None:
        _check_lengths(self.lengths, "Padding(lengths)", extent)

    def ends(self, extent: Extent) -> tuple[int | Tensor, int | Tensor]:
        length = _column(self.lengths, extent)
        return (0, length) if self.side == "right" else (extent.keys - length, extent.keys)


@dataclass(frozen=True, slots=True, init=False)
class Segments(RangeMask):
    """Packed sequences: a query attends only to keys of its own sequence.

    ``lengths`` are the lengths of the packed sequences: one list for the whole batch, or one list
    per row. For cross-attention, ``keys`` are the lengths of the packed key sequences.

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
        """Create the mask from the sequence id of each position, [length] or [batch, length].

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
                    "The positions of a segment must be contiguous, but an id occurs in two "
                    f"places: {names.tolist()}. Pass masks.Dense for such a pattern."
                )
            rows.append(tuple(counts.tolist()))
        return cls(rows)

    def check(self, extent: Extent) -> None:
        sides = [("lengths", self.lengths, extent.keys if self.keys is None else extent.queries)]
        if self.keys is not None:
            sides.append(("keys", self.keys, extent.keys))
        for name, rows, expected in sides:
            if len(rows) != 1 and len(rows) != extent.batch:
                raise InputError(
                    f"Segments({name}=...) packs {len(rows)} rows for a batch of {extent.batch}."
                )
            for row in rows:
                if sum(row) != expected:
                    raise InputError(
                        f"Segments({name}=...) must add up to {expected} positions, but "
                        f"{list(row)} is {sum(row)}."
                    )

    def ends(self, extent: Extent) -> tuple[int | Tensor, int | Tensor]:
        lows, highs = [], []
        for row, across in zip(self.lengths, self.keys or self.lengths, strict=True):
            ends = list(accumulate(across))
            counts = torch.tensor(row, dtype=torch.long, device="cpu")
            starts = torch.tensor([0, *ends[:-1]][: len(row)], device="cpu")
            lows.append(starts.repeat_interleave(counts))
            highs.append(torch.tensor(ends, device="cpu").repeat_interleave(counts))
        low, high = torch.stack(lows), torch.stack(highs)
        if self.keys is None:  # queries and keys share one packing: look up each query's position
            at = extent.positions().cpu()
            inside = at.clamp(min=0).expand(len(low), -1)
            low, high = low.gather(1, inside), high.gather(1, inside).masked_fill(at < 0, 0)
        return low.to(extent.device), high.to(extent.device)


def _packing(lengths: Any) -> tuple[tuple[int, ...], ...]:
    """Lengths of packed sequences (numbers or rows of numbers) as one tuple per batch row."""
    if not isinstance(lengths, Sequence):
        lengths = lengths.tolist() if hasattr(lengths, "tolist") else [lengths]
    rows: list[Sequence[int]] = []
    for length in lengths:
        if not isinstance(length, Sequence):
            rows = [lengths]  # the check below rejects a mix of numbers and rows
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
    >>> attention(x, x, x, mask=mask).tolist()  # the output of a query without keys is 0
    [[1.0, 0.0], [0.0, 0.0]]
    """

    allowed: Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.allowed, Tensor):
            raise InputError(
                f"masks.Dense(...) holds a boolean tensor, not {type(self.allowed).__name__}. "
                "Convert it with torch.as_tensor(mask)."
            )
        if self.allowed.dtype != torch.bool:
            raise InputError(
                f"A mask is boolean, True where a query may attend, but got {self.allowed.dtype}. "
                "Pass numbers to add to the scores as bias=tensor. "
                "Convert a 0/1 mask with mask.bool()."
            )

    def check(self, extent: Extent) -> None:
        check_broadcast(self.allowed, extent, "mask")

    def tile(self, tile: Tile) -> Tensor:
        return slice_tile(self.allowed, tile)


@dataclass(frozen=True, slots=True, repr=False)
class _Joined(Mask):
    """Two masks combined by an operator."""

    left: Mask
    right: Mask
    operator: ClassVar[str]

    def __repr__(self) -> str:
        return f"{_operand(self.left)} {self.operator} {_operand(self.right)}"

    def check(self, extent: Extent) -> None:
        self.left.check(extent)
        self.right.check(extent)


@dataclass(frozen=True, slots=True, repr=False)
class And(_Joined):
    """A query may attend to a key if both masks allow it."""

    operator = "&"

    @property
    def is_ranges(self) -> bool:
        return self.left.is_ranges and self.right.is_ranges

    @property
    def max_keys(self) -> int:
        both = self.left.max_keys, self.right.max_keys
        return min(both) or max(both)

    def interval(self, extent: Extent) -> Interval:
        a, b = self.left.interval(extent), self.right.interval(extent)
        return Interval(_larger(a.low, b.low), _smaller(a.high, b.high), a.exact and b.exact)

    def tile(self, tile: Tile) -> Tensor:
        return self.left.tile(tile) & self.right.tile(tile)


@dataclass(frozen=True, slots=True, repr=False)
class Or(_Joined):
    """A query may attend to a key if at least one of the masks allows it."""

    operator = "|"

    def interval(self, extent: Extent) -> Interval:
        a, b = self.left.interval(extent), self.right.interval(extent)
        low, high = _smaller(a.low, b.low), _larger(a.high, b.high)
        # Two ranges that start at the first key unite to one range; other ranges may leave a gap.
        joined = isinstance(a.low, int) and isinstance(b.low, int) and a.low == b.low == 0
        return Interval(low, high, joined and a.exact and b.exact)

    def tile(self, tile: Tile) -> Tensor:
        return self.left.tile(tile) | self.right.tile(tile)


@dataclass(frozen=True, slots=True, repr=False)
class Not(Mask):
    """A query may attend to a key if the mask forbids it."""

    inner: Mask

    def __repr__(self) -> str:
        return f"~{_operand(self.inner)}"

    def check(self, extent: Extent) -> None:
        self.inner.check(extent)

    def tile(self, tile: Tile) -> Tensor:
        return ~self.inner.tile(tile)


def _operand(mask: Mask) -> str:
    return f"({mask!r})" if isinstance(mask, _Joined) else repr(mask)


def _larger(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, Tensor):
        return torch.maximum(a, b) if isinstance(b, Tensor) else a.clamp(min=b)
    return _larger(b, a) if isinstance(b, Tensor) else max(a, b)


def _smaller(a: int | Tensor, b: int | Tensor) -> int | Tensor:
    if isinstance(a, Tensor):
        return torch.minimum(a, b) if isinstance(b, Tensor) else a.clamp(max=b)
    return _smaller(b, a) if isinstance(b, Tensor) else min(a, b)
