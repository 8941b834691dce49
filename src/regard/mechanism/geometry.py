"""Geometry: the sizes of a call, blocks of its score matrix, and ranges of keys.

Positions are absolute: key ``j`` is at position ``j``. Unless a call gives the position of its
first query, the last query has the last key's position.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor

from regard.errors import InputError
from regard.kernels.memo import GraphSafeCache

MAX_START = 2**30  # kernels compute positions as 32-bit integers
FAR = 2**40  # more than the distance of any two positions of a call
MAX_FLOAT = torch.finfo(torch.float32).max


class Extent(NamedTuple):
    """The sizes of a call, and the position of its first query."""

    batch: int
    heads: int
    queries: int
    keys: int
    device: torch.device
    # One number, or one for each sequence: a tensor [1 or batch] of int64 on the device of the
    # call. None: the last query has the last key's position.
    query_start: int | tuple[int, ...] | Tensor | None = None

    @property
    def static(self) -> bool:
        """Whether plans made for these sizes can be cached: no position is in a tensor."""
        return not isinstance(self.query_start, Tensor)

    @property
    def offset(self) -> int | Tensor:
        """The position of the first query: an int if all sequences share it, else [batch, 1]."""
        start = self.query_start
        if start is None:
            return self.keys - self.queries
        if isinstance(start, tuple):
            column = _column if torch.compiler.is_compiling() else _kept_column
            return column(start, self.device)
        return start[:, None] if isinstance(start, Tensor) else start

    def positions(self) -> Tensor:
        """The position of every query, [1 or batch, queries]."""
        return torch.arange(self.queries, device=self.device)[None] + self.offset


def _column(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    return torch.tensor(numbers, dtype=torch.long, device=device)[:, None]


_kept_column = GraphSafeCache(_column)


@dataclass(frozen=True, slots=True)
class Tile:
    """A block of the score matrix: consecutive queries against consecutive keys."""

    extent: Extent
    rows: range
    columns: range

    def query_positions(self) -> Tensor:  # [q, 1] or [b, 1, q, 1]
        rows = torch.arange(self.rows.start, self.rows.stop, device=self.extent.device)[:, None]
        offset = self.extent.offset
        return rows + (offset if isinstance(offset, int) else offset[..., None, None])

    def key_positions(self) -> Tensor:  # [k]
        return torch.arange(self.columns.start, self.columns.stop, device=self.extent.device)


class Hull(NamedTuple):
    """Consecutive queries (rows) of a call, and the keys (columns) they may attend to."""

    rows: range
    columns: range  # every key that any of the rows may attend to, and perhaps others
    inner: range  # the keys that all of the rows may attend to

    @property
    def fringes(self) -> list[range]:
        """The columns that some rows may attend to and others may not."""
        if not self.inner:
            return [self.columns] if self.columns else []
        left = range(self.columns.start, self.inner.start)
        right = range(self.inner.stop, self.columns.stop)
        return [fringe for fringe in (left, right) if fringe]


class Interval(NamedTuple):
    """For each query the keys ``low <= j < high``; ends broadcast to [batch, queries].

    No query attends to a key outside of its range. If ``exact``, it may attend to every key of its
    range, otherwise to some of them. Neither end decreases from one query to the next. An end that
    is the same for all queries is an int or a [batch, 1] tensor.
    """

    low: int | Tensor
    high: int | Tensor
    exact: bool

    def tile(self, tile: Tile) -> Tensor:
        """Whether each key of the tile lies in its query's range: broadcasts to [b, h, q, k]."""
        columns = tile.key_positions()[None]  # [1, k]
        low, high = _rows(self.low, tile.rows), _rows(self.high, tile.rows)
        return (columns >= low) & (columns < high)

    def hulls(self, extent: Extent, step: int) -> list[Hull]:
        """Split the queries into blocks of ``step``, each with the keys they may attend to."""
        starts = range(0, max(extent.queries, 1), step)
        blocks = [range(start, min(start + step, extent.queries)) for start in starts]
        least_low, most_low = _extremes(self.low, blocks)
        least_high, most_high = _extremes(self.high, blocks)
        hulls = []
        for index, rows in enumerate(blocks):
            start = min(max(least_low[index], 0), extent.keys)
            stop = min(max(most_high[index], start), extent.keys)
            inner = range(max(most_low[index], start), min(least_high[index], stop))
            hulls.append(Hull(rows, range(start, stop), inner if self.exact else range(0)))
        return hulls


def _rows(end: int | Tensor, rows: range) -> int | Tensor:
    """One end of an interval for the queries ``rows``: an int or [b, 1, q, 1]."""
    if isinstance(end, int):
        return end
    if end.shape[-1] != 1:
        end = end[:, rows.start : rows.stop]
    return end[:, None, :, None]


def _extremes(end: int | Tensor, blocks: list[range]) -> tuple[list[int], list[int]]:
    """The smallest and the largest value of one end of an interval in each block of rows."""
    if isinstance(end, int):
        return [end] * len(blocks), [end] * len(blocks)
    if not end.numel():
        return [0] * len(blocks), [0] * len(blocks)
    least, most = end.amin(0), end.amax(0)  # over the batch
    if end.shape[1] == 1:
        return least.tolist() * len(blocks), most.tolist() * len(blocks)
    # Ends never decrease, so the extremes of a block are at its first and last row.
    first, last = [rows.start for rows in blocks], [rows.stop - 1 for rows in blocks]
    return least[first].tolist(), most[last].tolist()


def check_tensor(given: object, what: str) -> None:
    """Raise InputError unless ``given`` is a dense tensor."""
    if not isinstance(given, Tensor):
        raise InputError(
            f"{what} must be a torch.Tensor, but got {type(given).__name__}. "
            "Convert it with torch.as_tensor(...)."
        )
    if given.is_nested:
        raise InputError(
            f"{what} must be a dense tensor, but is a nested tensor. Convert it with "
            "torch.nested.to_padded_tensor(tensor, 0.0), and pass mask=Padding(lengths)."
        )
    if given.layout is not torch.strided:
        raise InputError(
            f"{what} must be a dense tensor, but has the layout {given.layout}. "
            "Convert it with .to_dense()."
        )


def is_whole(dtype: torch.dtype) -> bool:
    """Whether a tensor of this dtype holds whole numbers."""
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def check_device(tensor: Tensor, extent: Extent, what: str) -> None:
    """Raise InputError unless the tensor is on the device of the call."""
    if tensor.device != extent.device:
        raise InputError(
            f"The {what} is on {tensor.device}, but the query is on {extent.device}. "
            f"Move it with .to({str(extent.device)!r})."
        )


def check_values(tensor: Tensor, extent: Extent, what: str) -> None:
    """Raise InputError if the tensor has no values, but the tensors of the call have some."""
    if tensor.is_meta and extent.device.type != "meta":
        raise InputError(
            f"{what} is a tensor on meta, which has no values, but the query is on "
            f"{extent.device}. Pass a tensor with values."
        )


def number(given: Any, name: str) -> float:
    """A number of Python or NumPy. Tensors are refused: reading one on a GPU would wait."""
    if isinstance(given, float):
        return given
    if isinstance(given, Real):
        try:
            return float(given)
        except OverflowError:
            return -math.inf if given < 0.0 else math.inf
    raise InputError(
        f"{name} must be a Python number, but got {given!r}. Convert a tensor of one number with "
        f"{name}.item(). For a learned scale, multiply the query by it."
    )


def has_values(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers. Those on meta and of FakeTensorMode only have sizes."""
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


def transforms_keep_tensors() -> bool:
    """Whether tensors that are computed now can be used when all transforms of torch.func end."""
    kinds = _functorch.TransformType
    ends = (kinds.Vmap, kinds.Functionalize)
    return not any(level.key() in ends for level in _functorch.get_interpreter_stack() or ())


def can_read(tensor: Tensor) -> bool:
    """Whether reading values neither waits for a GPU nor breaks torch.compile or torch.func."""
    if torch.compiler.is_compiling() or not tensor.is_cpu:
        return False
    return _functorch.peek_interpreter_stack() is None and has_values(tensor)


def autocasts(tensor: Tensor) -> bool:
    """Whether autocast converts a tensor on this device."""
    return not tensor.is_meta and torch.is_autocast_enabled(tensor.device.type)


def check_broadcast(tensor: Tensor, extent: Extent, what: str) -> None:
    """Raise InputError unless the tensor broadcasts to [batch, heads, queries, keys]."""
    expected = (extent.batch, extent.heads, extent.queries, extent.keys)
    # Not `in`, which torch.compile evaluates wrongly for a dynamic size.
    fits = tensor.dim() <= 4 and all(
        size == 1 or size == want  # noqa: PLR1714
        for size, want in zip(reversed(tensor.shape), reversed(expected), strict=False)
    )
    if not fits:
        raise InputError(
            f"The {what} of shape {list(tensor.shape)} does not broadcast to "
            f"[batch, heads, queries, keys] = {list(expected)}."
        )
    check_device(tensor, extent, what)


def slice_tile(tensor: Tensor, tile: Tile) -> Tensor:
    """Slice a tile out of a tensor that broadcasts to [batch, heads, queries, keys]."""
    tensor = tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))
    if tensor.shape[2] != 1:
        tensor = tensor[:, :, tile.rows.start : tile.rows.stop]
    if tensor.shape[3] != 1:
        tensor = tensor[:, :, :, tile.columns.start : tile.columns.stop]
    return tensor
