"""Arrays with named dimensions, and their conversion to NumPy, pandas and xarray.

Every result that holds arrays describes them as :class:`Labelled` or, if it holds several results,
as :class:`Parts`. Only this module knows how the other libraries store them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError

if TYPE_CHECKING:
    import numpy
    import pandas
    import xarray

    Columns = dict[str, numpy.ndarray]

MAX_NUMBERS = 2**28  # the maximum number of elements of one array


class Convertible:
    """A result that becomes NumPy arrays, a pandas table or an xarray dataset."""

    __slots__ = ()

    @abstractmethod
    def _labelled(self) -> Labelled | Parts:
        """The arrays of the result with their dimensions."""

    def to_numpy(self) -> dict[str, numpy.ndarray]:
        """The arrays by name, on the CPU. bfloat16 becomes float32."""
        return self._labelled().to_numpy()

    def to_pandas(self, *fields: str) -> pandas.DataFrame:
        """A table with a row for each element and a column for each of ``fields`` (default: all).

        The index has a level for each dimension, such as layer, head, query and key. Labels, such
        as tokens, are columns. Fields with different dimensions need tables of their own.
        """
        return self._labelled().to_pandas(fields)

    def to_xarray(self) -> xarray.Dataset:
        """A dataset with named dimensions, whose coordinates are the labels, such as tokens."""
        return self._labelled().to_xarray()


class Labels(NamedTuple):
    """Text or numbers along a dimension. Labels named like a dimension are its index.

    Stacked labels have several dimensions, and are nested tuples.
    """

    dims: tuple[str, ...]
    values: tuple[Any, ...]


class Array(NamedTuple):
    """A tensor and the names of its dimensions."""

    dims: tuple[str, ...]
    values: Tensor


@dataclass(frozen=True)
class Labelled:
    """Arrays, the labels of their dimensions, and facts about all of them."""

    arrays: Mapping[str, Array]
    labels: Mapping[str, Labels] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    def to_numpy(self) -> dict[str, numpy.ndarray]:
        return {name: _numpy(array.values) for name, array in self.arrays.items()}

    def to_pandas(self, fields: Sequence[str]) -> pandas.DataFrame:
        return Parts((), {(): self}).to_pandas(fields)

    def to_xarray(self) -> xarray.Dataset:
        dataset: xarray.Dataset = _package("xarray").Dataset(
            {name: (dims, _numpy(values)) for name, (dims, values) in self.arrays.items()},
            coords={name: (dims, list(values)) for name, (dims, values) in self.labels.items()},
            attrs=dict(self.facts),
        )
        return dataset

    def of_one_table(self, fields: Sequence[str]) -> list[str]:
        """The names of ``fields``, or of all; InputError unless they have the same dimensions."""
        names = list(dict.fromkeys(fields or self.arrays))
        if not names:
            raise InputError("to_pandas() has nothing to convert: no field was recorded.")
        by_dims: dict[tuple[str, ...], list[str]] = {}
        for name in names:
            if name not in self.arrays:
                raise InputError(
                    f"to_pandas() got the field {name!r}. There are: {', '.join(self.arrays)}."
                )
            by_dims.setdefault(self.arrays[name].dims, []).append(name)
        if len(by_dims) > 1:
            given = "; ".join(f"{', '.join(g)} by {', '.join(d)}" for d, g in by_dims.items())
            example = ", ".join(map(repr, next(iter(by_dims.values()))))
            raise InputError(
                f"The fields have different dimensions: {given}. Name the fields of one table, as "
                f"in to_pandas({example})."
            )
        return names

    def index(self, dim: str, size: int) -> Sequence[str | int]:
        """The values of a dimension: its labels, or its places."""
        return self.labels[dim].values if dim in self.labels else range(size)

    def columns(self, fields: Sequence[str], places: Sequence[numpy.ndarray]) -> Columns:
        """The labels and ``fields`` of a table, whose rows are at ``places`` of each dimension."""
        import numpy

        dims = self.arrays[fields[0]].dims
        columns = {}
        for name, labels in self.labels.items():
            if name not in dims and set(labels.dims) <= set(dims):
                text = isinstance(labels.values[0], str)
                values = numpy.array(labels.values, dtype=object if text else None)
                columns[name] = values[places[dims.index(labels.dims[0])]]
        return columns | {name: _numpy(self.arrays[name].values).reshape(-1) for name in fields}

    def summary(self) -> str:
        """A line of facts, then the sizes and the range of the values of each array."""
        lines = [", ".join(f"{name} {fact}" for name, fact in self.facts.items())]
        width = max(map(len, self.arrays), default=0)
        sizes = {
            name: " x ".join(f"{d} {n}" for d, n in zip(dims, values.shape, strict=True))
            for name, (dims, values) in self.arrays.items()
        }
        across = max(map(len, sizes.values()), default=0)
        lines += [
            f"  {name:<{width}}  {sizes[name]:<{across}}  {value_range(values)}"
            for name, (_, values) in self.arrays.items()
        ]
        return "\n".join(lines)


@dataclass(frozen=True)
class Parts:
    """Several :class:`Labelled`, each at its own place along ``dims``, such as layer and call.

    A table holds the rows of each part. In arrays, the parts are stacked; a smaller part is filled
    up with NaN, or with -1 where the array holds integers.
    """

    dims: tuple[str, ...]
    parts: Mapping[tuple[Any, ...], Labelled]

    def to_numpy(self) -> dict[str, numpy.ndarray]:
        return self.stacked().to_numpy()

    def to_xarray(self) -> xarray.Dataset:
        return self.stacked().to_xarray()

    def to_pandas(self, fields: Sequence[str]) -> pandas.DataFrame:
        package = _package("pandas")
        import numpy

        if not self.parts:
            raise InputError("to_pandas() has nothing to convert: no call was recorded.")
        names = [part.of_one_table(fields) for part in self.parts.values()]
        arrays = [part.arrays[own[0]] for own, part in zip(names, self.parts.values(), strict=True)]
        dims = arrays[0].dims
        if any(array.dims != dims for array in arrays):
            raise InputError(
                "The results have fields with different dimensions. Name the fields of one table, "
                f"as in to_pandas({names[0][0]!r})."
            )
        levels: list[dict[Any, int]] = [{} for _ in (*self.dims, *dims)]  # values and their codes
        codes: list[list[numpy.ndarray]] = [[] for _ in levels]
        tables: list[Columns] = []
        for (key, part), own, (_, values) in zip(self.parts.items(), names, arrays, strict=True):
            places = [
                where.reshape(-1) for where in numpy.indices(tuple(values.shape), dtype=numpy.int32)
            ]
            tables.append(part.columns(own, places))
            within = [part.index(*each) for each in zip(dims, values.shape, strict=True)]
            constant = [numpy.zeros(values.numel(), dtype=numpy.int32)] * len(key)
            indices = zip([*((one,) for one in key), *within], [*constant, *places], strict=True)
            for level, code, (index, where) in zip(levels, codes, indices, strict=True):
                known = [level.setdefault(value, len(level)) for value in index]
                code.append(numpy.array(known, dtype=numpy.int32)[where])
        index = package.MultiIndex(
            levels=[list(level) for level in levels],
            codes=[numpy.concatenate(code) for code in codes],
            names=[*self.dims, *dims],
        )
        columns = {
            name: numpy.concatenate(
                [
                    table[name] if name in table else numpy.full(values.numel(), math.nan)
                    for table, (_, values) in zip(tables, arrays, strict=True)
                ]
            )
            for name in dict.fromkeys(name for table in tables for name in table)
        }
        single = len(levels) == 1
        table: pandas.DataFrame = package.DataFrame(
            columns, index=index.get_level_values(0) if single else index
        )
        return table

    def summary(self) -> str:
        """The places of the parts in a line, then the summary of each part."""
        named = [(", ".join(map(str, key)), part) for key, part in self.parts.items()]
        lines = [f"{key}: {part.summary()}" for key, part in named]
        return "\n".join([" and ".join(key for key, _ in named), *lines])

    def stacked(self) -> Labelled:
        """All parts in one."""
        if not self.parts:
            return Labelled({})
        places = [list(dict.fromkeys(keys)) for keys in zip(*self.parts, strict=True)]
        labels = {
            dim: Labels((dim,), tuple(values))
            for dim, values in zip(self.dims, places, strict=True)
        }
        for name in dict.fromkeys(name for part in self.parts.values() for name in part.labels):
            labels[name] = self._stack_labels(name, places)
        arrays = {
            name: self._stack(name, places)
            for name in dict.fromkeys(name for part in self.parts.values() for name in part.arrays)
        }
        facts = [part.facts.items() for part in self.parts.values()]
        shared = {n: v for n, v in (facts[0] if facts else ()) if all((n, v) in f for f in facts)}
        return Labelled(arrays, labels, shared)

    def _stack_labels(self, name: str, places: list[list[Any]]) -> Labels:
        """The labels of all parts if they are equal, else stacked as the arrays are."""
        given = {key: part.labels[name] for key, part in self.parts.items() if name in part.labels}
        first = next(iter(given.values()))
        if all(labels == first for labels in given.values()):
            return first
        if name in first.dims:
            raise InputError(
                f"The results are of different places ({name}), so their arrays cannot be stacked. "
                "Use to_pandas(), which keeps the places of each result, or convert each result."
            )
        most = max(len(labels.values) for labels in given.values())
        missing = "" if isinstance(first.values[0], str) else -1

        def nested(key: tuple[Any, ...]) -> tuple[Any, ...]:
            if len(key) < len(places):
                return tuple(nested((*key, one)) for one in places[len(key)])
            values = given[key].values if key in given else ()
            return (*values, *[missing] * (most - len(values)))

        return Labels((*self.dims, *first.dims), nested(()))

    def _stack(self, name: str, places: list[list[Any]]) -> Array:
        given = {key: p.arrays[name] for key, p in self.parts.items() if name in p.arrays}
        dims, first = next(iter(given.values()))
        shapes = [array.values.shape for array in given.values()]
        most = [max(sizes) for sizes in zip(*shapes, strict=True)]
        shape = [*map(len, places), *most]
        if (count := math.prod(shape)) > MAX_NUMBERS:
            raise InputError(
                f"{name} would be stacked to {count:,} numbers, more than {MAX_NUMBERS:,}. "
                "Convert the results one by one, or use to_pandas()."
            )
        dtype = torch.float32 if first.dtype == torch.bfloat16 else first.dtype
        whole = torch.full(shape, math.nan if first.is_floating_point() else -1, dtype=dtype)
        for key, array in given.items():
            place = whole
            for keys, one in zip(places, key, strict=True):
                place = place[keys.index(one)]
            values = array.values.detach().to(whole)
            place[tuple(slice(size) for size in values.shape)] = values
        return Array((*self.dims, *dims), whole)


def value_range(values: Tensor) -> str:
    """The range and the mean of the finite numbers of a tensor."""
    finite = values.detach().float()
    finite = finite[finite.isfinite()]
    if not finite.numel():
        return "nothing finite"
    low, mean, high = (finite.min() + 0.0, finite.mean() + 0.0, finite.max() + 0.0)
    return f"{low:.4g} to {high:.4g}, mean {mean:.4g}"


def bin_start(index: int, bins: int, places: int) -> int:
    """The first place of a bin, where bin r holds the places i with floor(i * bins / places) == r.

    >>> [bin_start(r, 3, 8) for r in range(3)]
    [0, 3, 6]
    """
    return -(-index * places // bins)


def bins_from(
    dims: Sequence[str], sizes: Sequence[int], places: Sequence[range]
) -> dict[str, Labels]:
    """The first query and the first key of the bins of a pooled map, as labels."""
    return {
        f"first_{dim.removesuffix('_bin')}": Labels(
            (dim,),
            tuple(whole.start + bin_start(r, size, len(whole)) for r in range(size)),
        )
        for dim, size, whole in zip(dims, sizes, places, strict=True)
    }


def _numpy(values: Tensor) -> numpy.ndarray:
    values = values.detach().cpu()
    array: numpy.ndarray = (values.float() if values.dtype == torch.bfloat16 else values).numpy()
    return array


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ModuleNotFoundError:
        raise InputError(
            f"to_{name}() needs {name}, which is not installed: pip install {name}."
        ) from None
