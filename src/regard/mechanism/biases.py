"""Biases: numbers added to the scaled scores, before the mask and the softmax.

A bias, like a mask, is a small frozen description. Backends compute it tile by tile, so that no
[queries, keys] tensor is needed. Gradients reach every tensor of a bias.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from regard.errors import InputError
from regard.mechanism.geometry import (
    MAX_FLOAT,
    MAX_START,
    Extent,
    Tile,
    check_broadcast,
    check_device,
    check_tensor,
    number,
    slice_tile,
)


class Bias(ABC):
    """The base of all biases."""

    __slots__ = ()

    @abstractmethod
    def check(self, extent: Extent) -> None:
        """Raise InputError if this bias does not fit a call with these sizes."""

    @abstractmethod
    def tile(self, tile: Tile) -> Tensor:
        """The bias of one tile: broadcasts to [batch, heads, q, k]."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """The fields that are tensors; each may require a gradient."""
        values = (getattr(self, f.name) for f in fields(self))  # type: ignore[arg-type]
        return tuple(value for value in values if isinstance(value, Tensor))


@dataclass(frozen=True, slots=True, eq=False)
class Dense(Bias):
    """A tensor of numbers that broadcasts to [batch, heads, queries, keys].

    >>> from regard import attention, biases
    >>> x = torch.eye(2)
    >>> far = biases.Dense(torch.tensor([[0.0, -1e9], [-1e9, 0.0]]))
    >>> attention(x, x, x, bias=far).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    values: Tensor

    def __post_init__(self) -> None:
        check_tensor(self.values, "biases.Dense(values)")
        if not self.values.is_floating_point():
            raise InputError(
                f"A bias must hold floating-point numbers to add, but is {self.values.dtype}. "
                "Pass a boolean mask as mask=tensor, True where a query may attend."
            )

    def check(self, extent: Extent) -> None:
        check_broadcast(self.values, extent, "bias")

    def tile(self, tile: Tile) -> Tensor:
        return slice_tile(self.values, tile)


@dataclass(frozen=True, slots=True, eq=False)
class Alibi(Bias):
    """``-slope * distance``, one slope per head (https://arxiv.org/abs/2108.12409)."""

    slopes: Tensor  # [heads]

    def __post_init__(self) -> None:
        check_tensor(self.slopes, "Alibi(slopes)")
        if self.slopes.is_complex():
            raise InputError(f"Alibi(slopes) must be real numbers, but is {self.slopes.dtype}.")

    @classmethod
    def standard(cls, heads: int, device: torch.device | str | None = None) -> Alibi:
        """Use the slopes of the paper: a geometric sequence, for any number of heads.

        >>> Alibi.standard(4).slopes.tolist()
        [0.25, 0.0625, 0.015625, 0.00390625]
        """
        if heads < 1:
            raise InputError(f"Alibi needs at least one head, but got {heads}.")
        whole = 2 ** math.floor(math.log2(heads))
        slopes = [2 ** (-8 * (i + 1) / whole) for i in range(whole)]
        # Heads beyond a power of two take every other slope of the next power of two.
        slopes += [2 ** (-8 * (2 * i + 1) / (2 * whole)) for i in range(heads - whole)]
        return cls(torch.tensor(slopes, device=device))

    def check(self, extent: Extent) -> None:
        if self.slopes.shape != (extent.heads,):
            raise InputError(
                f"Alibi needs one slope per head, [{extent.heads}], but got "
                f"{list(self.slopes.shape)}. Alibi.standard({extent.heads}) has the paper's slopes."
            )
        check_device(self.slopes, extent, "tensor of slopes")

    def tile(self, tile: Tile) -> Tensor:
        distance = (tile.query_positions() - tile.key_positions()).abs()
        return -_wide(self.slopes)[:, None, None] * distance


@dataclass(frozen=True, slots=True, eq=False)
class RelativeBuckets(Bias):
    """T5's learned bias per head and bucket of distances (https://arxiv.org/abs/1910.10683).

    Each short distance has its own bucket. Longer distances share buckets that widen
    logarithmically; all distances beyond ``max_distance`` share the last bucket. If
    ``bidirectional``, half of the buckets are for keys after the query; otherwise those keys share
    the bucket of distance 0.

    >>> from regard import RelativeBuckets, attention
    >>> table = torch.randn(32, 2)  # [buckets, heads]
    >>> x = torch.randn(1, 2, 5, 8)  # [batch, heads, length, dim]
    >>> list(attention(x, x, x, bias=RelativeBuckets(table)).shape)
    [1, 2, 5, 8]
    """

    table: Tensor  # [buckets, heads]
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        check_tensor(self.table, "RelativeBuckets(table)")
        buckets = self.table.shape[0] if self.table.dim() else 0
        least = 4 if self.bidirectional else 2
        if self.table.dim() != 2 or buckets < least or (self.bidirectional and buckets % 2):
            raise InputError(
                f"RelativeBuckets needs a table of [buckets, heads] with at least {least} buckets"
                f"{', an even number' if self.bidirectional else ''}, but got "
                f"{list(self.table.shape)}."
            )
        if self.max_distance <= self._exact:
            raise InputError(
                f"RelativeBuckets(max_distance={self.max_distance}) must exceed "
                f"{self._exact}: {self._exact} distances have a bucket of their own."
            )
        if self.max_distance > MAX_START:
            raise InputError(
                f"RelativeBuckets(max_distance=...) must be at most {MAX_START:,}, but got "
                f"{self.max_distance}."
            )

    @property
    def _exact(self) -> int:
        """The number of distances with a bucket of their own."""
        return self._one_way // 2

    @property
    def _one_way(self) -> int:
        """The number of buckets for the keys on one side of a query."""
        return self.table.shape[0] // (2 if self.bidirectional else 1)

    def check(self, extent: Extent) -> None:
        if self.table.shape[1] != extent.heads:
            raise InputError(
                f"RelativeBuckets has a table for {self.table.shape[1]} heads, but the query has "
                f"{extent.heads}."
            )
        check_device(self.table, extent, "table of the bias")

    def bucket(self, distance: Tensor) -> Tensor:
        """The bucket of each distance; keys after the query have negative distances."""
        exact, buckets = self._exact, self._one_way
        after = buckets * (distance < 0) * self.bidirectional
        distance = distance.abs() if self.bidirectional else distance.clamp(min=0)
        # Float32 as in T5: its rounding determines the edges of some buckets.
        ratio = torch.log(distance.clamp(min=1).float() / exact) / math.log(
            self.max_distance / exact
        )
        far = exact + (ratio * (buckets - exact)).long()
        return after + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))

    def tile(self, tile: Tile) -> Tensor:
        # A tile has few distinct distances: look each up once, then gather.
        rows, columns, offset = tile.rows, tile.columns, tile.extent.offset
        if not rows or not columns:
            return self.table.new_zeros(1, self.table.shape[1], len(rows), len(columns))
        count, device = len(rows) + len(columns) - 1, self.table.device
        least = offset + rows.start - (columns.stop - 1)
        distances = (torch.arange(count, device=device) + least).view(-1, count)  # [1 or b, count]
        by_distance = _wide(self.table)[self.bucket(distances)].transpose(1, 2)
        index = torch.arange(len(rows), device=device)[:, None] + len(columns) - 1
        index = index - torch.arange(len(columns), device=device)
        return by_distance[:, :, index]  # [1 or b, heads, q, k]


@dataclass(frozen=True, slots=True, eq=False)
class RelativeContent(Bias):
    """Transformer-XL's term ``scale * (q_i + v) . r_(i-j)`` (https://arxiv.org/abs/1901.02860).

    ``query`` is ``q + v``, [batch, heads, queries, dim]. ``relative[h, t]`` embeds a distance of
    ``first + t`` positions from a key to a later query. Distances outside of the table use the
    nearest row.

    >>> from regard import Causal, RelativeContent, attention
    >>> q, k, v = torch.randn(3, 1, 2, 5, 8)  # each [batch, heads, length, dim]
    >>> bias = RelativeContent(q, relative=torch.randn(2, 5, 8))  # for the distances 0 to 4
    >>> list(attention(q, k, v, mask=Causal(), bias=bias).shape)
    [1, 2, 5, 8]
    """

    query: Tensor  # [batch, heads, queries, dim]
    relative: Tensor  # [heads or 1, distances, dim]
    first: int = 0
    scale: float | None = None

    def __post_init__(self) -> None:
        check_tensor(self.query, "RelativeContent(query)")
        check_tensor(self.relative, "RelativeContent(relative)")
        if not -MAX_START <= self.first <= MAX_START:
            raise InputError(
                f"RelativeContent(first=...) must be at most {MAX_START:,} from 0, but got "
                f"{self.first}."
            )
        if self.scale is not None and not abs(number(self.scale, "scale")) <= MAX_FLOAT:
            raise InputError(
                "RelativeContent(scale=...) must be a finite number of float32, but got "
                f"{self.scale}."
            )

    def check(self, extent: Extent) -> None:
        expected = (extent.batch, extent.heads, extent.queries, self.query.shape[-1])
        if tuple(self.query.shape) != expected:
            raise InputError(
                f"RelativeContent(query=...) must be {list(expected)}, but got "
                f"{list(self.query.shape)}."
            )
        fits = self.relative.dim() == 3 and self.relative.shape[0] in (1, extent.heads)
        if not fits or self.relative.shape[2] != expected[3] or not self.relative.shape[1]:
            raise InputError(
                f"RelativeContent(relative=...) must be [{extent.heads} or 1, distances, "
                f"{expected[3]}], but got {list(self.relative.shape)}."
            )
        check_device(self.query, extent, "query of the bias")
        check_device(self.relative, extent, "table of the bias")

    def tile(self, tile: Tile) -> Tensor:
        rows, columns, offset = tile.rows, tile.columns, tile.extent.offset
        query = self.query[:, :, rows.start : rows.stop]
        if not rows or not columns:
            return query.new_zeros(1, 1, len(rows), len(columns))
        # The number of distances is rounded up to a multiple of 8, which makes products faster.
        most = offset + (rows.stop - 1 - columns.start - self.first)
        count = -(-(len(rows) + len(columns) - 1) // 8) * 8
        relative = self._between(most, count)
        kind = torch.promote_types(query.dtype, relative.dtype)
        query, relative = _wide(query.to(kind)), _wide(relative.to(kind))
        scale = query.shape[-1] ** -0.5 if self.scale is None else float(self.scale)
        # Distances decrease along a row, and the keys of each row start one column left of those of
        # the row before: a view with rows one element shorter aligns them.
        product = (query * scale) @ relative.flip(-2).transpose(-1, -2)
        if len(rows) > 1:
            shifted = product.flatten(2)[..., len(rows) - 1 : -1]
            product = shifted.view(*product.shape[:3], count - 1)
        return product[..., : len(columns)]

    def _between(self, most: int | Tensor, count: int) -> Tensor:
        """The embeddings of ``count`` distances up to ``first + most``: [.., count, dim]."""
        last = self.relative.shape[1] - 1
        if isinstance(most, Tensor):  # [batch, 1]
            index = most + torch.arange(1 - count, 1, device=most.device)
            return self.relative[:, index.clamp(0, last)].transpose(0, 1)  # [b, heads, count, dim]
        least = most - count + 1
        below, above = min(most, -1) - least + 1, most - max(least, last + 1) + 1
        parts = [self.relative[:, max(least, 0) : max(most, -1) + 1]]
        if below > 0:
            parts.insert(0, self.relative[:, :1].expand(-1, below, -1))
        if above > 0:
            parts.append(self.relative[:, -1:].expand(-1, above, -1))
        return torch.cat(parts, dim=1) if len(parts) > 1 else parts[0]


def _wide(tensor: Tensor) -> Tensor:
    """Convert half precision to float32, the lowest precision of scores."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
