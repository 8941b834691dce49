"""Masks: which keys each query may attend to. True means *may attend*, always.

``docs/meanings.md`` says how queries and keys line up, and where other libraries differ.

A mask is a small frozen description; ``&``, ``|`` and ``~`` combine masks. It has two methods:

- ``tile`` returns a boolean tensor for a block of queries and keys: the pairs it allows;
- ``interval`` returns, for each query, a range that contains every key it may attend to.

A :class:`RangeMask` (Causal, Window, Prefix, Padding, Segments) allows exactly one range of keys
for each query, and neither end of the range decreases from one query to the next. Backends slice,
skip or compare ranges instead of reading a [queries, keys] tensor. :func:`lower` turns a mask into
ranges for kernels. A :class:`Dilated` mask is ranges once positions are sorted by their residue
(:mod:`regard.mechanism.backends.residues`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import accumulate
from operator import index
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError
from regard.kernels.memo import GraphSafeCache
from regard.mechanism.geometry import (
    FAR,
    MAX_START,
    Extent,
    Hull,
    Interval,
    Tile,
    can_read,
    check_broadcast,
    check_tensor,
    check_values,
    is_whole,
    slice_tile,
)


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
    keep = not torch.compiler.is_compiling() and (mask is None or mask.static) and extent.static
    return (_kept_ranges if keep else _ranges)(mask, extent)


def _ranges(mask: Mask | None, extent: Extent) -> KeyRanges:
    def table(end: int | Tensor) -> Tensor:
        if isinstance(end, int):
            end = torch.full((1, 1), end, device=extent.device)
        return end.clamp(0, extent.keys).to(torch.int32).expand(-1, extent.queries).contiguous()

    interval = Interval(0, extent.keys, True) if mask is None else mask.interval(extent)
    assert interval.exact, f"{mask!r} is not one range of keys for each query"
    return KeyRanges(table(interval.low), table(interval.high), mask.max_keys if mask else 0)


_kept_ranges = GraphSafeCache(_ranges)


def hulls(mask: Mask | None, extent: Extent, step: int) -> list[Hull]:
    """Split the queries into blocks of ``step``, each with the keys its queries may attend to."""
    if mask is None:
        return Interval(0, extent.keys, True).hulls(extent, step)
    return interval_on_host(mask, extent).hulls(extent, step)


def interval_on_host(mask: Mask, extent: Extent) -> Interval:
    """The mask's interval; for a mask of Python numbers on the CPU, so that reads do not wait."""
    fixed = mask.static and extent.static
    return mask.interval(extent._replace(device=torch.device("cpu")) if fixed else extent)


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
        check_tensor(lengths, what)
        if lengths.dim() > 1 or not is_whole(lengths.dtype):
            raise InputError(
                f"{what} must hold one whole number per sequence, but got a {lengths.dtype} tensor "
                f"of shape {list(lengths.shape)}. For a boolean mask of keys pass "
                "masks.Dense(mask[:, None, None, :])."
            )
        return lengths.reshape(-1)
    numbers = tuple(lengths) if isinstance(lengths, Iterable) else (lengths,)
    return tuple(_count(number, f"{what} must be whole numbers") for number in numbers)


def _count(number: Any, what: str, least: int = 0) -> int:
    """An integer of ``least`` or more, from Python or NumPy."""
    try:
        count = number if isinstance(number, int) else index(number)
    except TypeError:
        count = least - 1
    if count < least:
        raise InputError(f"{what} from {least} on, but got {number!r}.")
    return count


def _column(lengths: Tensor | tuple[int, ...], extent: Extent) -> int | Tensor:
    """Lengths as an end of an Interval: an int for equal Python numbers, else [1 or batch, 1]."""
    if isinstance(lengths, tuple):
        if len(set(lengths)) == 1:
            return lengths[0]
        lengths = torch.tensor(lengths, dtype=torch.long, device=extent.device)
    return lengths.to(extent.device, torch.long)[:, None]


def _check_lengths(lengths: Tensor | tuple[int, ...], what: str, extent: Extent) -> None:
    # Not `in`, which torch.compile evaluates wrongly for a batch of dynamic size.
    if len(lengths) != 1 and len(lengths) != extent.batch:
        raise InputError(
            f"{what} has {len(lengths)} entries for a batch of {extent.batch}. "
            "Give one length per sequence, or one for all."
        )
    if isinstance(lengths, Tensor):
        check_values(lengths, extent, what)
        if not can_read(lengths):
            return
        lengths = tuple(_count(n, f"{what} must be whole numbers") for n in lengths.tolist())
    if max(lengths, default=0) > extent.keys:
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

    None stands for all keys on that side.

    >>> from regard import See, Window, attention
    >>> x = torch.zeros(4, 2)  # [length, dim]; all scores are equal
    >>> _, seen = attention(x, x, x, mask=Window(1), see=See(weights=True))
    >>> seen.weights[0, 0].tolist()
    [[1.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.0, 0.5, 0.5, 0.0], [0.0, 0.0, 0.5, 0.5]]
    """

    left: int | None
    right: int | None = 0

    def __post_init__(self) -> None:
        for name, size in (("left", self.left), ("right", self.right)):
            if size is not None:
                count = _count(size, f"Window({name}=...) counts keys")
                object.__setattr__(self, name, count)

    @property
    def max_keys(self) -> int:
        if self.left is None or self.right is None:
            return 0
        return min(self.left + 1 + self.right, 2**31)

    @property
    def _reach(self) -> tuple[int | None, int | None]:
        """``left`` and ``right``, in the range of the integers of tensors."""
        left, right = self.left, self.right
        return None if left is None else min(left, FAR), None if right is None else min(right, FAR)

    def ends(self, extent: Extent) -> tuple[int | Tensor, int | Tensor]:
        at = extent.positions()
        left, right = self._reach
        low = 0 if left is None else (at - left).clamp(min=0)
        high = extent.keys if right is None else (at + right + 1).clamp(0, extent.keys)
        return low, high


@dataclass(frozen=True, slots=True, eq=False, init=False)
class Prefix(RangeMask):
    """A causal mask whose first ``length`` keys are visible to every query (prefix language model).

    A tensor on a GPU is not read: its lengths are clamped to 0 and the number of keys. On the CPU a
    length outside of this range is an error.

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
    ignore it. A tensor on a GPU is not read: its lengths are clamped to 0 and the number of keys.
    On the CPU a length outside of this range is an error.

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


@dataclass(frozen=True, slots=True)
class Dilated(Mask):
    """A query attends to the keys whose distance from it is a multiple of ``step``, on both sides.

    Alone, or with Causal() and Window, its cost falls by the factor ``step`` on every backend but
    "reference", except with a bias, ``See(map=...)`` or a ``query_start`` for each sequence.

    >>> from regard import Dilated, See, attention
    >>> x = torch.zeros(5, 2)  # [length, dim]; all scores are equal
    >>> _, seen = attention(x, x, x, mask=Dilated(2) & Causal(), see=See(weights=True))
    >>> (seen.weights[0, 0, 3:] > 0).int().tolist()
    [[0, 1, 0, 1, 0], [1, 0, 1, 0, 1]]
    """

    step: int

    def __post_init__(self) -> None:
        step = _count(self.step, "Dilated(step) is a number of positions", least=1)
        object.__setattr__(self, "step", step)

    def tile(self, tile: Tile) -> Tensor:
        return (tile.query_positions() - tile.key_positions()) % min(self.step, FAR) == 0


Packing = tuple[tuple[int, ...], ...]  # a number for each segment of each row of the batch
_Packed = Sequence[int] | Sequence[Sequence[int]] | Tensor


@dataclass(frozen=True, slots=True, init=False, repr=False)
class Segments(RangeMask):
    """Packed sequences: a query attends only to keys of its own sequence.

    ``lengths`` are the lengths of the packed sequences: one list for the whole batch, or one list
    per row. Lengths may be 0. If queries and keys are packed differently, ``lengths`` counts the
    queries of each segment, and ``keys`` counts its keys. ``key_starts`` gives the first key of
    each segment and may leave gaps; by default there are no gaps.

    ``within``, Causal() or a Window, applies in each segment, where the last query is at the
    position of the last key. ``query_starts`` gives the first query another position, counted from
    the first key of the segment: one number for all segments, or one for each. A bias by distance
    and ``See(distance=True)`` use positions in the whole row.

    >>> Segments([3, 2]) & Causal()
    Segments(lengths=((3, 2),)) & Causal()

    Two new tokens of one sequence and one of another, whose caches have room for four keys:

    >>> from regard import See, attention
    >>> mask = Segments([2, 1], keys=[3, 2], key_starts=[0, 4], within=Causal())
    >>> q, k = torch.zeros(3, 2), torch.zeros(8, 2)  # [length, dim]
    >>> _, seen = attention(q, k, k, mask=mask, see=See(weights=True))
    >>> (seen.weights[0, 0] > 0).int().tolist()
    [[1, 1, 0, 0, 0, 0, 0, 0], [1, 1, 1, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1, 0, 0]]
    """

    lengths: Packing
    keys: Packing | None
    key_starts: Packing | None
    query_starts: Packing | int | None
    within: Causal | Window | None

    def __init__(
        self,
        lengths: _Packed,
        keys: _Packed | None = None,
        *,
        key_starts: _Packed | None = None,
        query_starts: _Packed | int | None = None,
        within: Causal | Window | None = None,
    ) -> None:
        if within is not None and not isinstance(within, Causal | Window):
            raise InputError(
                f"Segments(within=...) is Causal() or a Window, but got {within!r}. "
                "Combine other masks with '&'."
            )
        packed = _packing(lengths, "lengths")
        if isinstance(query_starts, int) or getattr(query_starts, "ndim", None) == 0:
            query_starts = _position(query_starts, "query_starts", None)
        own_keys = keys is not None or key_starts is not None or query_starts is not None
        given: dict[str, Packing | int | None] = {
            "keys": _packing(lengths if keys is None else keys, "keys") if own_keys else None,
            "key_starts": None if key_starts is None else _packing(key_starts, "key_starts"),
            "query_starts": query_starts
            if query_starts is None or isinstance(query_starts, int)
            else _packing(query_starts, "query_starts", least=None),
        }
        for name, rows in given.items():
            if isinstance(rows, tuple) and [*map(len, rows)] != [*map(len, packed)]:
                raise InputError(
                    f"Segments: lengths and {name} have different numbers of sequences: "
                    f"{packed} and {rows}."
                )
        for name, value in {"lengths": packed, **given, "within": within}.items():
            object.__setattr__(self, name, value)
        for starts, counts in zip(self.key_starts or (), self.keys or (), strict=False):
            stops = (start + count for start, count in zip(starts, counts, strict=True))
            if any(start < stop for start, stop in zip(starts[1:], stops, strict=False)):
                raise InputError(
                    "Segments(key_starts=...) must ascend without overlap, but got "
                    f"{list(starts)} for segments of {list(counts)} keys."
                )

    def __repr__(self) -> str:
        given = {f.name: getattr(self, f.name) for f in fields(self)}
        shown = (f"{name}={value!r}" for name, value in given.items() if value is not None)
        return f"Segments({', '.join(shown)})"

    @property
    def max_keys(self) -> int:
        return 0 if self.within is None else self.within.max_keys

    @classmethod
    def from_ids(cls, ids: Tensor) -> Segments:
        """Create the mask from the sequence id of each position, [length] or [batch, length].

        >>> Segments.from_ids(torch.tensor([7, 7, 7, 9, 9]))
        Segments(lengths=((3, 2),))
        """
        check_tensor(ids, "Segments.from_ids(ids)")
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
        if self.keys is not None and self.key_starts is None:
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
        for starts, counts in zip(self.key_starts or (), self.keys or (), strict=False):
            if starts and starts[-1] + counts[-1] > extent.keys:
                raise InputError(
                    f"Segments(key_starts=...): the last segment has keys {starts[-1]} to "
                    f"{starts[-1] + counts[-1] - 1}, but there are only {extent.keys} keys."
                )

    def ends(self, extent: Extent) -> tuple[int | Tensor, int | Tensor]:
        # On the CPU, unless that would wait for positions on a GPU.
        device = torch.device("cpu") if extent.static else extent.device
        if self.keys is None:  # queries and keys share one packing: look up each query's position
            at = extent._replace(device=device).positions()
        else:
            at = torch.arange(extent.queries, device=device)[None]
        within = Window(None) if isinstance(self.within, Causal) else self.within
        left, right = (None, None) if within is None else within._reach
        lows, highs = [], []
        for number, lengths in enumerate(self.lengths):
            own = at if len(self.lengths) == 1 or len(at) == 1 else at[number : number + 1]
            stops = torch.tensor([*accumulate(lengths)], dtype=torch.long, device=device)
            segment = torch.searchsorted(stops, own, right=True)
            table = torch.tensor(self._places(number), dtype=torch.long, device=device)
            start, count, moved = table[segment].unbind(-1)
            count = count.masked_fill(own < 0, 0)  # no segment is before the first key
            place = own + moved
            low = torch.zeros_like(place) if left is None else (place - left).clamp(min=0)
            high = count if right is None else (place + right + 1).clamp(min=0)
            lows.append(start + torch.minimum(low, count))
            highs.append(start + torch.minimum(high, count))
        return torch.cat(lows).to(extent.device), torch.cat(highs).to(extent.device)

    def _places(self, row: int) -> list[tuple[int, int, int]]:
        """For each segment of a row its first key, its number of keys, and a shift.

        A query's index (its position, if queries and keys share one packing) plus the shift is its
        position in the segment. The last entry, without keys, is for positions after all segments.
        """
        queries = self.lengths[row]
        keys = queries if self.keys is None else self.keys[row]
        first_queries = [0, *accumulate(queries)][: len(queries)]
        starts = [0, *accumulate(keys)][: len(keys)]
        if self.key_starts is not None:
            starts = list(self.key_starts[row])
        first = [key - query for key, query in zip(keys, queries, strict=True)]
        if isinstance(self.query_starts, int):
            first = [self.query_starts] * len(keys)
        elif self.query_starts is not None:
            first = list(self.query_starts[row])
        moved = [at - query for at, query in zip(first, first_queries, strict=True)]
        stop = starts[-1] + keys[-1] if keys else 0
        return [*zip(starts, keys, moved, strict=True), (stop, 0, 0)]


def _packing(numbers: Any, what: str, least: int | None = 0) -> Packing:
    """Turn one list of numbers per packed sequence, or one list per row, into tuples per row."""
    if isinstance(numbers, Tensor):
        check_tensor(numbers, f"Segments({what}=...)")
    if hasattr(numbers, "tolist"):
        numbers = numbers.tolist()
    if not isinstance(numbers, Sequence):
        numbers = [numbers]
    rows: list[Sequence[Any]] = []
    for number in numbers:
        if not isinstance(number, Sequence):
            rows = [numbers]  # the check below rejects a mix of numbers and rows
            break
        rows.append(number)
    return tuple(tuple(_position(number, what, least) for number in row) for row in rows)


def _position(number: Any, what: str, least: int | None) -> int:
    position: int | None
    try:
        position = index(number)
    except TypeError:
        position = None
    if position is None or (least is not None and position < least):
        raise InputError(
            f"Segments({what}=...) must be whole numbers of positions"
            f"{'' if least is None else f' from {least} on'}, but got {number!r}."
        )
    if least is None and not -MAX_START <= position <= MAX_START:
        raise InputError(
            f"Segments({what}=...) must be at most {MAX_START:,} from 0, but got {number!r}."
        )
    return position


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
        check_tensor(self.allowed, "masks.Dense(allowed)")
        if self.allowed.dtype != torch.bool:
            raise InputError(
                "A mask must be boolean, True where a query may attend, but is "
                f"{self.allowed.dtype}. "
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
