"""Statistics of attention weights: the request (See), the result (Seen) and their definitions.

``observe`` defines the fields in plain PyTorch on the dense weights of a block of rows. ``Joining``
combines the fields of several blocks. Backends compute the same numbers faster.
"""

from __future__ import annotations

import html
import json
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from os import PathLike
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.errors import InputError
from regard.kernels.plan import OVER_QUERIES, bins
from regard.mechanism.geometry import Extent, Tile
from regard.mechanism.labelled import (
    MAX_NUMBERS,
    Array,
    Convertible,
    Labelled,
    Labels,
    bin_start,
    bins_from,
    value_range,
)


class Pairs:
    """Pairs of a query and a key, sorted by query so that the pairs of a tile are one slice."""

    __slots__ = ("keys", "places", "queries")

    def __init__(self, pairs: Sequence[tuple[int, int]] | Tensor, expected: str) -> None:
        try:
            table = torch.as_tensor(pairs, device="cpu")
        except (TypeError, ValueError):
            raise InputError(f"{expected}, but got {pairs!r}.") from None
        if table.dim() != 2 or table.shape[1] != 2 or table.is_floating_point():
            raise InputError(f"{expected}, but got {list(table.shape)} of {table.dtype}.")
        order = table[:, 0].argsort(stable=True)
        self.queries, self.keys = table[order].t().contiguous()  # [p] each
        self.places = order.argsort()  # the index of each requested pair in the sorted order

    def check(self, extent: Extent, name: str) -> None:
        """Raise InputError if the call has no such query or key; ``name`` is the field of See."""
        for indices, what, several, most in (
            (self.queries, "query", "queries", extent.queries),
            (self.keys, "key", "keys", extent.keys),
        ):
            least, largest = (int(end) for end in indices.aminmax())
            if least < 0 or largest >= most:
                wrong = least if least < 0 else largest
                raise InputError(
                    f"See({name}=...) names {what} {wrong}, but the call has {most} {several}."
                )

    def __len__(self) -> int:
        return len(self.queries)

    def __repr__(self) -> str:
        return f"{len(self)} pairs"

    def of(self, tile: Tile) -> tuple[slice, Tensor, Tensor]:
        """The pairs in the tile's rows: their slice, and the row and column of each in the tile.

        The column is -1 if the key is outside of the tile; the weight of such a pair is 0.
        """
        ends = torch.tensor([tile.rows.start, tile.rows.stop], device="cpu")
        first, last = torch.searchsorted(self.queries, ends).tolist()
        rows = self.queries[first:last] - tile.rows.start
        keys = self.keys[first:last]
        inside = (keys >= tile.columns.start) & (keys < tile.columns.stop)
        columns = torch.where(inside, keys - tile.columns.start, -1)
        return slice(first, last), rows.to(tile.extent.device), columns.to(tile.extent.device)

    @staticmethod
    def pick(weights: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Pick [..., p] from weights [..., q, k] by row and column; 0 where the column is -1."""
        if not weights.shape[-1]:
            return weights.new_zeros(*weights.shape[:-2], len(rows))
        return weights[..., rows, columns.clamp(min=0)].masked_fill(columns < 0, 0)


@dataclass(frozen=True, slots=True)
class See:
    """The fields of :class:`Seen` to compute while attention runs.

    >>> See(entropy=True, top=8, map=64)
    See(entropy, top=8, map=(64, 64))
    """

    lse: bool = False
    entropy: bool = False
    peak: bool = False
    max_logit: bool = False
    distance: bool = False
    distance_variance: bool = False
    sink: bool = False
    received: bool = False
    top: int = 0
    rows: Sequence[int] = ()
    pairs: Pairs | Sequence[tuple[int, int]] | Tensor | None = None
    scores: Pairs | Sequence[int] | Sequence[tuple[int, int]] | Tensor | None = None
    map: int | tuple[int, int] | None = None
    map_peak: bool = False
    weights: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "rows", _whole(self.rows, "rows", "queries"))
        object.__setattr__(self, "pairs", _pairs(self.pairs, _PAIRS))
        scores = self.scores
        if isinstance(scores, Tensor) and scores.dim() == 1:
            scores = scores.tolist()
        if isinstance(scores, Sequence) and all(hasattr(row, "__index__") for row in scores):
            scores = _whole(scores, "scores", "queries") or None
        else:
            scores = _pairs(scores, _SCORES)
        object.__setattr__(self, "scores", scores)
        top = operator.index(self.top) if hasattr(self.top, "__index__") else -1
        if isinstance(self.top, bool) or top < 0:
            raise InputError(
                f"See(top=...) must be a number of keys, 0 or more, but got {self.top!r}."
            )
        object.__setattr__(self, "top", top)
        if self.map is not None:
            sizes = self.map if isinstance(self.map, Sequence) else (self.map, self.map)
            grid = _whole(sizes, "map", "rows and columns")
            if len(grid) != 2 or min(grid) < 1:
                raise InputError(
                    f"See(map=...) must be a size or (rows, columns), but got {self.map!r}."
                )
            object.__setattr__(self, "map", grid)
        if self.map_peak and self.map is None:
            raise InputError("See(map_peak=True) needs a grid: give map=(rows, columns).")
        if not self.requested:
            raise InputError(
                "See() requests no field. Name one, as in See(entropy=True, received=True)."
            )

    @property
    def requested(self) -> list[str]:
        """The names of the requested fields."""
        return [f.name for f in fields(self) if getattr(self, f.name) not in (False, 0, (), None)]

    @property
    def chooses(self) -> bool:
        """Whether a field is of chosen queries or keys, or of all pairs."""
        return bool(self.rows or self.pairs or self.scores or self.top or self.map or self.weights)

    @property
    def uses_positions(self) -> bool:
        """Whether a field depends on the positions of the queries."""
        return self.distance or self.distance_variance

    @property
    def of_backend(self) -> See | None:
        """The request to a backend: without the fields that ``backends.complete`` adds."""
        if self.scores is None and not self.sink:
            return self
        if self.requested == ["scores"]:
            return None
        return replace(self, scores=None, sink=False, lse=self.lse or self.sink)

    @property
    def grid(self) -> tuple[int, int]:
        """The rows and columns of the map."""
        assert isinstance(self.map, tuple)
        return self.map

    def check(self, extent: Extent) -> None:
        """Raise InputError if the request does not fit a call with these sizes."""
        if not self.chooses:
            return
        chosen: dict[str, Any] = {"rows": self.rows, "pairs": self.pairs, "scores": self.scores}
        for name, given in chosen.items():
            if isinstance(given, Pairs):
                given.check(extent, name)
                continue
            for row in given or ():
                if not -extent.queries <= row < extent.queries:
                    raise InputError(
                        f"See({name}=...) names query {row}, but the call has {extent.queries} "
                        "queries."
                    )
        scores = 0 if isinstance(self.scores, Pairs | None) else len(self.scores)
        for name, numbers in {
            "rows": len(self.rows) * extent.keys,
            "scores": scores * extent.keys,
            "map": 0 if self.map is None else math.prod(grid_of(self, extent)),
            "top": extent.queries * self.top,
            "weights": extent.queries * extent.keys * self.weights,
        }.items():
            if (kept := extent.batch * extent.heads * numbers) > MAX_NUMBERS:
                raise InputError(
                    f"See({name}=...) would keep {kept:,} numbers ({kept * 4 / 2**30:.1f} GiB). "
                    "Ask for fewer numbers: rows=[...] keeps some rows, and map=(rows, columns) "
                    "keeps a pooled map."
                )

    def __repr__(self) -> str:
        shown = (
            name if (value := getattr(self, name)) is True else f"{name}={value!r}"
            for name in self.requested
        )
        return f"See({', '.join(shown)})"


_PAIRS = "See(pairs=...) must be a list of (query, key)"
_SCORES = "See(scores=...) must be a list of queries or of (query, key)"


def _pairs(given: Any, expected: str) -> Pairs | None:
    """The pairs of a request; None if it has none. An error message begins with ``expected``."""
    if given is None or isinstance(given, Pairs):
        return given
    try:
        pairs = given if isinstance(given, Tensor | Sequence) else list(given)
    except TypeError:
        raise InputError(f"{expected}, but got {given!r}.") from None
    return Pairs(pairs, expected) if len(pairs) else None


def _whole(numbers: Any, field: str, what: str) -> tuple[int, ...]:
    """Check integers and return them as a tuple."""
    try:
        return tuple(operator.index(number) for number in numbers)
    except TypeError:
        raise InputError(
            f"See({field}=...) must be whole numbers of {what}, but got {numbers!r}."
        ) from None


def check_heads(heads: Any) -> tuple[int, ...]:
    """Check the numbers of chosen heads and return them as a tuple."""
    numbers = heads if isinstance(heads, Sequence) and not isinstance(heads, str) else ()
    if not numbers or not all(isinstance(n, int) and n >= 0 for n in numbers):
        raise InputError(f"heads is a list of numbers from 0 on, such as [0, 3], not {heads!r}.")
    if len(set(numbers)) < len(numbers):
        raise InputError(f"heads names a head twice: {heads!r}.")
    return tuple(numbers)


class Top(NamedTuple):
    """The largest weights of each query, largest first, and their keys.

    A query that may attend to fewer keys has weight 0 and key -1 in the remaining places.

    >>> from regard import Causal, See, attention
    >>> q, k = torch.tensor([[1.0, 0.0]] * 2), torch.tensor([[9.0, 0.0], [0.0, 9.0]])
    >>> _, seen = attention(q, k, k, mask=Causal(), see=See(top=2))
    >>> seen.top.keys[0, 0].tolist()
    [[0, -1], [0, 1]]
    """

    weights: Tensor  # [batch, heads, queries, top]
    keys: Tensor  # [batch, heads, queries, top]


@dataclass(slots=True)
class Seen(Convertible):
    """The requested statistics of one attention call. Fields that were not requested are None.

    On a GPU, if gradients are needed, the fields that combine queries (``received``, ``map``,
    ``map_peak``) are computed in the backward pass or on first access, whichever is earlier.

    >>> from regard import Causal, See, attention
    >>> x = torch.zeros(1, 1, 3, 4)  # [batch, heads, length, dim]; all scores are equal
    >>> _, seen = attention(x, x, x, mask=Causal(), see=See(peak=True))
    >>> seen.entropy is None, [round(peak, 2) for peak in seen.peak[0, 0].tolist()]
    (True, [1.0, 0.5, 0.33])
    """

    lse: Tensor | None = None  # [b, h, q] log-sum-exp of the scores
    entropy: Tensor | None = None  # [b, h, q] in nats; 0 where no key may be attended to
    peak: Tensor | None = None  # [b, h, q] the largest weight
    max_logit: Tensor | None = None  # [b, h] the largest score before the softmax
    distance: Tensor | None = None  # [b, h, q] weighted mean distance to the keys, in positions
    distance_variance: Tensor | None = None  # [b, h, q] its variance; a sink is at distance 0
    sink: Tensor | None = None  # [b, h, q] the weight of the sink
    received: Tensor | None = None  # [b, h, k] the weight on each key, summed over queries
    top: Top | None = None  # weights and keys, [b, h, q, top] each
    rows: Tensor | None = None  # [b, h, r, k] the requested rows
    pairs: Tensor | None = None  # [b, h, p] the weights of the requested pairs
    scores: Tensor | None = None  # [b, h, r, k] or [b, h, p] scores; -inf where the mask forbids
    map: Tensor | None = None  # [b, h, r, c] weight on a bin of keys, mean over a bin of queries
    map_peak: Tensor | None = None  # [b, h, r, c] the largest weight in each cell of the map
    weights: Tensor | None = None  # [b, h, q, k] all weights
    extent: tuple[int, int, int, int] = field(default=(0, 0, 0, 0))  # batch, heads, queries, keys
    heads: tuple[int, ...] | None = None  # the numbers of the heads, if only some were chosen

    def select_heads(self, heads: Sequence[int]) -> Seen:
        """The fields of some heads, named by their numbers in the layer.

        >>> from regard import See, attention
        >>> x = torch.zeros(1, 4, 3, 8)
        >>> _, seen = attention(x, x, x, see=See(entropy=True))
        >>> seen.select_heads([3, 1])
        Seen: 1 x 2 heads (3, 1), 3 queries, 3 keys
          entropy      1 x 2 x 3            1.099 to 1.099, mean 1.099
        """
        held = self.heads or tuple(range(self.extent[1]))
        chosen = check_heads(heads)
        if missing := [head for head in chosen if head not in held]:
            there = f"0 to {held[-1]}" if self.heads is None else ", ".join(map(str, held))
            raise InputError(f"There is no head {missing[0]}: the heads are {there}.")
        places = torch.tensor([held.index(head) for head in chosen])
        tensors = {name: t[:, places.to(t.device)] for name, t in self.to_dict().items()}
        batch, _, queries, keys = self.extent
        return Seen.from_dict(tensors, (batch, len(chosen), queries, keys), chosen)

    def to_dict(self) -> dict[str, Tensor]:
        """The fields that are not None; ``top`` becomes ``top_weights`` and ``top_keys``."""
        tensors: dict[str, Tensor] = {}
        for name in _FIELDS:
            value = getattr(self, name)
            if isinstance(value, Top):
                tensors |= {"top_weights": value.weights, "top_keys": value.keys}
            elif value is not None:
                tensors[name] = value
        return tensors

    @classmethod
    def from_dict(
        cls,
        tensors: Mapping[str, Tensor],
        extent: tuple[int, int, int, int],
        heads: tuple[int, ...] | None = None,
    ) -> Seen:
        """The inverse of :meth:`to_dict`."""
        plain = {name: tensors[name] for name in _FIELDS if name in tensors}
        top = Top(tensors["top_weights"], tensors["top_keys"]) if "top_keys" in tensors else None
        return cls(**plain, top=top, extent=extent, heads=heads)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the fields to a safetensors file."""
        from safetensors.torch import save_file

        tensors = {name: t.detach().contiguous() for name, t in self.to_dict().items()}
        metadata = {"regard": "seen", "extent": json.dumps(self.extent)}
        if self.heads is not None:
            metadata["heads"] = json.dumps(self.heads)
        save_file(tensors, path, metadata)

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Seen:
        """Read a file that :meth:`save` wrote."""
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(path, framework="pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("regard") != "seen":
                    raise InputError(f"{path} is a safetensors file, but not written by Seen.save.")
                tensors = {name: file.get_tensor(name) for name in file.keys()}
        except FileNotFoundError:
            raise InputError(f"There is no file {path}.") from None
        except SafetensorError as error:
            raise InputError(f"{path} cannot be read as safetensors: {error}.") from None
        batch, heads, queries, keys = json.loads(metadata["extent"])
        chosen = tuple(json.loads(metadata["heads"])) if "heads" in metadata else None
        return cls.from_dict(tensors, (batch, heads, queries, keys), chosen)

    def _labelled(self) -> Labelled:
        tensors = self.to_dict()
        arrays = {
            name: Array(("batch", "head", *_dimensions(name, tensor)), tensor)
            for name, tensor in tensors.items()
        }
        labels: dict[str, Labels] = {}
        if self.heads is not None:
            labels["head"] = Labels(("head",), self.heads)
        for name in _POOLED:
            if name in tensors:
                whole = [range(count) for count in self.extent[2:]]
                labels |= bins_from(_DIMENSIONS[name], tensors[name].shape[-2:], whole)
        return Labelled(arrays, labels)

    @property
    def sizes(self) -> str:
        """The batch, the heads, the queries and the keys, in words."""
        batch, heads, queries, keys = self.extent
        which = "" if self.heads is None else f" ({', '.join(map(str, self.heads))})"
        return f"{batch} x {heads} heads{which}, {queries} queries, {keys} keys"

    def _summary(self) -> Iterator[tuple[str, str, str]]:
        """The name of each field, its shape, and the range of its numbers."""
        for name, tensor in self.to_dict().items():
            if name != "top_keys":
                yield name, " x ".join(map(str, tensor.shape)), value_range(tensor)

    def __repr__(self) -> str:
        lines = [f"Seen: {self.sizes}"]
        parts = list(self._summary())
        width = max([12, *(len(name) for name, *_ in parts)])
        lines += [f"  {name:<{width}} {shape:<20} {text}" for name, shape, text in parts]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
            for line in self._summary()
        )
        return (
            f"<table><caption>Seen: {self.sizes.replace(' x ', ' &times; ')}</caption>"
            "<thead><tr><th>field</th><th>shape</th><th>values</th></tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )


class Deferred(Seen):
    """A Seen that computes the fields that combine queries on first access."""

    __slots__ = ("compute",)

    def __init__(self, compute: Callable[[], None] | None = None, **given: Any) -> None:
        self.compute = compute
        super().__init__(**given)

    @classmethod
    def of(cls, seen: Seen, compute: Callable[[], None]) -> Deferred:
        """Copy ``seen``; ``compute`` sets its deferred fields when one of them is read."""
        return cls(compute, **{f.name: getattr(seen, f.name) for f in fields(seen)})

    def __getattribute__(self, name: str) -> Any:
        if name in OVER_QUERIES and (compute := self.compute) is not None:
            compute()
        return object.__getattribute__(self, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return Seen.from_dict, (self.to_dict(), self.extent, self.heads)


_FIELDS = [f.name for f in fields(Seen) if f.name not in ("extent", "heads")]
_BY_QUERY = (
    "lse", "entropy", "peak", "distance", "distance_variance", "top_weights", "top_keys", "rows",
    "pairs", "weights",
)  # fmt: skip
_POOLED = ("map", "map_peak")
# The names of the dimensions of each tensor after batch and head; see _dimensions() for scores.
_DIMENSIONS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("lse", "entropy", "peak", "distance", "distance_variance", "sink"), ("query",)
    ),
    "max_logit": (),
    "received": ("key",),
    **dict.fromkeys(("top_weights", "top_keys"), ("query", "rank")),
    "rows": ("row", "key"),
    "pairs": ("pair",),
    **dict.fromkeys(_POOLED, ("query_bin", "key_bin")),
    "weights": ("query", "key"),
}


def _dimensions(name: str, tensor: Tensor) -> tuple[str, ...]:
    """The names of the dimensions after batch and head."""
    if name == "scores":  # of rows or of pairs, which need not be those of the other fields
        return ("score_row", "key") if tensor.dim() == 4 else ("score_pair",)
    return _DIMENSIONS[name]


def bin_rows(see: See, extent: Extent, rows: range) -> list[tuple[int, range]]:
    """The bins of the map that overlap ``rows``, each with the rows in both."""
    count = min(see.grid[0], extent.queries)
    if not rows:
        return []
    first, last = (index * count // extent.queries for index in (rows.start, rows.stop - 1))
    # Bin r holds the rows i with floor(i * count / queries) == r.
    edges = [bin_start(r, count, extent.queries) for r in range(first, last + 2)]
    return [
        (r, range(max(start, rows.start), min(stop, rows.stop)))
        for r, (start, stop) in enumerate(pairwise(edges), first)
    ]


def grid_of(see: See, extent: Extent) -> tuple[int, int]:
    """The map's size: never more bins than there are queries or keys."""
    return min(see.grid[0], extent.queries), min(see.grid[1], extent.keys)


def zeros(see: See, extent: Extent, dtype: torch.dtype) -> dict[str, Tensor]:
    """Tensors for the requested fields, initialized for queries without keys.

    ``max_logit`` and ``map_count`` are missing: they are computed from other fields at the end.
    """
    heads, queries, keys = (extent.batch, extent.heads), extent.queries, extent.keys
    grid = grid_of(see, extent) if see.map is not None else ()
    shapes: dict[str, tuple[int, ...]] = {
        **dict.fromkeys(("lse", "entropy", "peak", "distance", "distance_variance"), (queries,)),
        "received": (keys,),
        "rows": (len(see.rows), keys),
        "pairs": (len(see.pairs or ()),),
        "map": grid,
        "map_peak": grid,
        "weights": (queries, keys),
        "top_weights": (queries, see.top),
    }
    names = ["top_weights" if name == "top" else name for name in see.requested]
    values = {
        name: torch.zeros(*heads, *shapes[name], dtype=dtype, device=extent.device)
        for name in names
        if name in shapes
    }
    if see.top:
        values["top_keys"] = torch.full((*heads, queries, see.top), -1, device=extent.device)
    return values


def count_rows(see: See, extent: Extent, attends: Tensor) -> Tensor:
    """Count the queries of each bin of the map that attend to any key (``attends`` [b, h, q])."""
    rows = grid_of(see, extent)[0]
    row_of = bins(extent.queries, rows, attends.device)
    return attends.new_zeros(*attends.shape[:2], rows).index_add_(2, row_of, attends)


def observe(
    see: See, tile: Tile, scores: Tensor, weights: Tensor, lse: Tensor, sinks: Tensor | None
) -> dict[str, Tensor]:
    """Compute every requested field from the scores and weights [batch, heads, q, k] of a tile.

    No query of the tile may attend to keys outside of it. Scores are -inf and weights 0 where the
    mask forbids a key. ``lse`` is -inf for a query without keys, with or without ``sinks``, scores
    that broadcast to [batch, heads, q]. Fields that combine queries (received, map, max_logit)
    cover only the queries of the tile; :class:`Joining` combines tiles.
    """
    extent, device = tile.extent, weights.device
    columns = tile.columns
    attends = lse > -math.inf  # [b, h, q]
    log_sink = None if sinks is None else (sinks.to(lse.dtype) - lse).masked_fill(~attends, 0)
    values: dict[str, Tensor] = {}

    def all_keys(part: Tensor) -> Tensor:
        return pad(part, (columns.start, extent.keys - columns.stop))

    if see.lse:
        values["lse"] = lse
    if see.entropy:
        # -sum w log w, where log w = score - lse; a masked 0 * (-inf) counts as 0.
        log_weights = scores - lse.masked_fill(~attends, 0)[..., None]
        log_weights = log_weights.masked_fill(scores == -math.inf, 0)
        values["entropy"] = -(weights * log_weights).sum(-1)
        if log_sink is not None:
            values["entropy"] = values["entropy"] - log_sink.exp() * log_sink
    if see.peak:
        values["peak"] = weights.amax(-1) if columns else torch.zeros_like(lse)
    if see.max_logit:
        empty = scores.new_full(scores.shape[:2], -math.inf)
        values["max_logit"] = scores.flatten(2).amax(-1) if tile.rows and columns else empty
    if see.uses_positions:
        distance = (tile.query_positions() - tile.key_positions()).abs()
        mean = (weights * distance).sum(-1)
        if see.distance:
            values["distance"] = mean
        if see.distance_variance:
            # Not the mean of squares minus the square of the mean, which loses all digits far away.
            variance = (weights * (distance - mean[..., None]).square()).sum(-1)
            if log_sink is not None:
                variance = variance + log_sink.exp() * mean.square()
            values["distance_variance"] = variance
    if see.received:
        values["received"] = all_keys(weights.sum(-2))
    if see.top:
        # Select by score: the weight on an allowed key may round to 0.
        highest, keys = scores.topk(min(see.top, len(columns)), dim=-1)
        missing = (0, see.top - keys.shape[-1])
        values["top_weights"] = pad(weights.gather(-1, keys), missing)
        keys = (keys + columns.start).masked_fill(highest == -math.inf, -1)
        values["top_keys"] = pad(keys, missing, value=-1)
    if see.rows:
        inside = chosen(see, tile)[1]
        values["rows"] = all_keys(weights[:, :, inside])
    if isinstance(see.pairs, Pairs):
        _, *places = see.pairs.of(tile)
        values["pairs"] = Pairs.pick(weights, *places)
    if see.map is not None:
        grid = grid_of(see, extent)
        row_of = bins(extent.queries, grid[0], device)[tile.rows.start : tile.rows.stop]
        column_of = bins(extent.keys, grid[1], device)[columns.start : columns.stop]
        pooled = weights.new_zeros(*weights.shape[:2], grid[0], len(columns))
        cells = weights.new_zeros(*weights.shape[:2], *grid)
        values["map"] = cells.index_add(3, column_of, pooled.index_add(2, row_of, weights))
        count = lse.new_zeros(*lse.shape[:2], grid[0])
        values["map_count"] = count.index_add(2, row_of, attends.to(lse.dtype))
        if see.map_peak:
            largest = pooled.scatter_reduce(2, row_of[:, None].expand_as(weights), weights, "amax")
            into = column_of.expand_as(largest)
            values["map_peak"] = cells.scatter_reduce(3, into, largest, "amax")
    if see.weights:
        values["weights"] = all_keys(weights)
    return values


def chosen(see: See, tile: Tile) -> tuple[slice, list[int]]:
    """The requested rows in a tile: their slice of the sorted request, and their tile indices."""
    rows = sorted(row % tile.extent.queries for row in see.rows)
    # Not bisect, which torch.compile cannot trace.
    first, last = (sum(row < end for row in rows) for end in (tile.rows.start, tile.rows.stop))
    return slice(first, last), [row - tile.rows.start for row in rows[first:last]]


class Joining:
    """Combines the fields of consecutive tiles of rows, one tile at a time.

    Sums accumulate immediately: to keep one per tile could take [queries, keys] memory.
    """

    def __init__(self, see: See, extent: Extent) -> None:
        self.see, self.extent = see, extent
        self.pieces: dict[str, list[Tensor]] = {}

    def add(self, values: Mapping[str, Tensor]) -> None:
        for name, piece in values.items():
            pieces = self.pieces.setdefault(name, [])
            if name in _BY_QUERY or not pieces:
                pieces.append(piece)
            elif name in ("max_logit", "map_peak"):
                pieces[0] = torch.maximum(pieces[0], piece)
            else:
                pieces[0] = pieces[0] + piece

    def seen(self) -> Seen:
        values = {
            name: torch.cat(pieces, dim=2) if len(pieces) > 1 else pieces[0]
            for name, pieces in self.pieces.items()
        }
        return finish(self.see, values, self.extent)


def finish(see: See, values: dict[str, Tensor], extent: Extent) -> Seen:
    """Turn the map's sums into averages, and sort rows and pairs in the order of the request."""
    if "map_count" in values:
        values["map"] = values["map"] / values.pop("map_count").clamp(min=1)[..., None]
    if "rows" in values:
        rows = [row % extent.queries for row in see.rows]
        # The rows are sorted; a row that was requested twice is at its first index.
        place: dict[int, int] = {}
        for index, row in enumerate(sorted(rows)):
            place.setdefault(row, index)
        values["rows"] = values["rows"][:, :, [place[row] for row in rows]]
    if isinstance(see.pairs, Pairs):
        values["pairs"] = values["pairs"][:, :, see.pairs.places.to(extent.device)]
    sizes: Any = (extent.batch, extent.heads, extent.queries, extent.keys)
    return Seen.from_dict(values, sizes)
