"""Generated calls of attention, with all kinds of shapes, layouts, dtypes, masks and biases.

Hypothesis draws the structure, so that it can shrink a failing call. The numbers come from a seeded
generator. Every tensor is a view into a larger buffer of NaN, so a read outside of a tensor shows
in the output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from regard import See
from regard.mechanism import biases, masks
from regard.mechanism.biases import Alibi, Bias, RelativeBuckets, RelativeContent
from regard.mechanism.call import check
from regard.mechanism.geometry import Extent, Tile
from regard.mechanism.masks import Causal, Dilated, Mask, Padding, Prefix, Segments, Window

Draw = st.DrawFn

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
LENGTHS = (1, 2, 3, 5, 5, 17, 17, 0)
LONG = (63, 111, 257)  # drawn less often; shorter and longer than a backend's blocks of rows
FLAGS = dict.fromkeys(
    (
        "lse",
        "entropy",
        "peak",
        "max_logit",
        "distance",
        "distance_variance",
        "received",
        "weights",
    ),
    True,
)
LAYOUTS = ("plain", "sliced", "transposed", "strided", "expanded")


@dataclass(frozen=True, repr=False)
class Case:
    """The arguments of a call of attention(), without ``see`` and ``backend``."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | Tensor | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    query_start: int | list[int] | Tensor | None
    sinks: Tensor | None

    def __repr__(self) -> str:
        """Shapes and strides without the numbers, as needed to understand a failure."""
        shown = [f"{t.dtype} {tuple(t.shape)} by {t.stride()}" for t in self.inputs]
        return f"Case({', '.join(shown)}, {self.arguments})"

    def _repr_pretty_(self, printer: Any, _cycle: bool) -> None:  # hypothesis prints this
        printer.text(repr(self))

    @property
    def arguments(self) -> dict[str, object]:
        names = ("mask", "bias", "scale", "softcap", "query_start", "sinks")
        return {name: getattr(self, name) for name in names}

    @property
    def inputs(self) -> tuple[Tensor, ...]:
        """Every tensor that can have a gradient."""
        others = self.bias.tensors if self.bias else ()
        others += () if self.sinks is None else (self.sinks,)
        return self.query, self.key, self.value, *others

    def double(self) -> Case:
        """The same numbers in float64."""
        return self._with(lambda tensor: tensor.detach().double())

    def leaves(self) -> Case:
        """The same call with leaves that require a gradient, in the same layouts."""
        return self._with(lambda tensor: tensor.detach().requires_grad_())

    def _with(self, change) -> Case:  # type: ignore[no-untyped-def]
        bias = self.bias
        if bias is not None:
            tensors = {
                f.name: change(value)
                for f in fields(bias)  # type: ignore[arg-type]
                if isinstance(value := getattr(bias, f.name), Tensor)
            }
            bias = replace(bias, **tensors)  # type: ignore[type-var]
        query, key, value = (change(t) for t in (self.query, self.key, self.value))
        sinks = None if self.sinks is None else change(self.sinks)
        return replace(self, query=query, key=key, value=value, bias=bias, sinks=sinks)

    @property
    def extent(self) -> Extent:
        given: Any = self.arguments
        return check(self.query, self.key, self.value, **given, dropout=0.0, see=None).extent

    def allowed(self) -> Tensor:
        """The whole mask, [batch, heads, queries, keys]."""
        e = self.extent
        shape = (e.batch, e.heads, e.queries, e.keys)
        mask = masks.Dense(self.mask) if isinstance(self.mask, Tensor) else self.mask
        if mask is None:
            return torch.ones(shape, dtype=torch.bool)
        return mask.tile(Tile(e, range(e.queries), range(e.keys))).expand(shape)


def poisoned(
    shape: Sequence[int], dtype: torch.dtype, layout: str, generator: torch.Generator
) -> Tensor:
    """Random numbers in the given layout, inside a buffer that is NaN everywhere else."""
    shape = tuple(shape)
    if layout == "transposed" and len(shape) >= 2:  # like heads after a projection: [b, n, h, d]
        swapped = (*shape[:-3], shape[-2], shape[-3], shape[-1]) if len(shape) > 2 else shape[::-1]
        inner = poisoned(swapped, dtype, "sliced", generator)
        return inner.transpose(-3, -2) if len(shape) > 2 else inner.transpose(0, 1)
    wide = [axis for axis, size in enumerate(shape[:-1]) if size > 1]
    if layout == "expanded" and wide:
        along = wide[int(torch.randint(len(wide), (), generator=generator))]
        narrow = (*shape[:along], 1, *shape[along + 1 :])
        return poisoned(narrow, dtype, "plain", generator).expand(shape)
    step = 2 if layout == "strided" else 1
    margin = 0 if layout == "plain" else 1
    outer = [step * size + 2 * margin for size in shape]
    flat = torch.full((math.prod(outer) + 64,), math.nan, dtype=dtype)
    buffer = flat[32 : 32 + math.prod(outer)].view(outer)
    inner = buffer[tuple(slice(margin, margin + step * size, step) for size in shape)]
    inner.copy_(torch.randn(shape, generator=generator, dtype=torch.float64))
    return inner


@st.composite
def lengths(draw: Draw, batch: int, keys: int) -> Tensor | list[int] | int:
    form = draw(st.sampled_from(("one", "list", "tensor")))
    if form == "one":
        return draw(st.integers(0, keys))
    each = [draw(st.integers(0, keys)) for _ in range(batch)]
    return each if form == "list" else torch.tensor(each, dtype=torch.long)


@st.composite
def starts(draw: Draw, batch: int, keys: int) -> int | list[int] | Tensor | None:
    """The position of the first query, rarely far outside of the keys."""
    form = draw(st.sampled_from((None, None, None, "one", "list", "tensor")))
    place = st.integers(-keys - 1, keys + 1) | st.sampled_from((0, 0, 1000, -1000))
    if form is None or form == "one":
        return None if form is None else draw(place)
    each = [draw(place) for _ in range(batch)]
    return each if form == "list" else torch.tensor(each, dtype=torch.long)


@st.composite
def packing(draw: Draw, total: int, count: int | None = None) -> list[int]:
    """``total`` positions cut into sequences, some of which may be empty."""
    count = draw(st.integers(1, 4)) if count is None else count
    cuts = sorted(draw(st.integers(0, total)) for _ in range(count - 1))
    return [stop - start for start, stop in pairwise((0, *cuts, total))]


@st.composite
def broadcastable(draw: Draw, extent: Extent) -> tuple[int, ...]:
    full = (extent.batch, extent.heads, extent.queries, extent.keys)
    shape = tuple(size if draw(st.booleans()) else 1 for size in full)
    return shape[draw(st.integers(0, 2)) :]


@st.composite
def mask_leaves(draw: Draw, extent: Extent, seed: int) -> Mask:
    kinds = ("causal", "window", "prefix", "padding", "dense", "segments", "dilated")
    kind = draw(st.sampled_from(kinds))
    if kind == "causal":
        return Causal()
    if kind == "window":
        most = max(extent.keys, 1)
        side = st.none() | st.integers(0, most)
        return Window(draw(side), draw(side))
    if kind == "dilated":
        return Dilated(draw(st.sampled_from((1, 2, 2, 3, 7, 64))))
    if kind == "prefix":
        return Prefix(draw(lengths(extent.batch, extent.keys)))
    if kind == "padding":
        side = draw(st.sampled_from(("left", "right")))
        return Padding(draw(lengths(extent.batch, extent.keys)), side)
    if kind == "dense":
        generator = torch.Generator().manual_seed(seed)
        shape = draw(broadcastable(extent))
        return masks.Dense(
            torch.rand(shape, generator=generator) < draw(st.sampled_from((0.2, 0.8)))
        )
    rows = draw(st.sampled_from((1, extent.batch))) or 1
    within = draw(st.sampled_from((None, None, Causal(), Window(2, 1), Window(None, 0))))
    if draw(st.booleans()):
        counts = [draw(st.integers(1, 4)) for _ in range(rows)]
        starts = None
        keys = [draw(packing(extent.keys, count)) for count in counts]
        if draw(st.booleans()):  # leave gaps between the keys of the segments
            starts = [list(accumulate(row, initial=0))[:-1] for row in keys]
            keys = [[draw(st.integers(0, length)) for length in row] for row in keys]
        return Segments(
            [draw(packing(extent.queries, count)) for count in counts],
            keys,
            key_starts=starts,
            query_starts=draw(st.sampled_from((None, None, 0, -1, 2))),
            within=within,
        )
    return Segments([draw(packing(extent.keys)) for _ in range(rows)], within=within)


@st.composite
def any_mask(draw: Draw, extent: Extent, depth: int = 3) -> Mask:
    """A mask, or masks combined by up to ``depth`` levels of & | ~."""
    join = draw(st.sampled_from(("leaf", "leaf", "and", "and", "or", "not"))) if depth else "leaf"
    if join == "leaf":
        return draw(mask_leaves(extent, draw(st.integers(0, 2**16))))
    left = draw(any_mask(extent, depth - 1))
    if join == "not":
        return ~left
    right = draw(any_mask(extent, depth - 1))
    return left & right if join == "and" else left | right


@st.composite
def any_bias(draw: Draw, extent: Extent, dtype: torch.dtype, generator: torch.Generator) -> Bias:
    kind = draw(st.sampled_from(("dense", "alibi", "buckets", "content")))
    layout = draw(st.sampled_from(("plain", "sliced", "strided")))
    if kind == "dense":
        return biases.Dense(poisoned(draw(broadcastable(extent)), dtype, layout, generator))
    if kind == "alibi":
        if draw(st.booleans()):
            return Alibi(Alibi.standard(extent.heads).slopes.to(dtype))
        return Alibi(poisoned((extent.heads,), dtype, layout, generator))
    if kind == "buckets":
        both = draw(st.booleans())
        buckets = draw(st.sampled_from((4, 8, 32) if both else (2, 5, 32)))
        table = poisoned((buckets, extent.heads), dtype, layout, generator)
        return RelativeBuckets(table, both, draw(st.sampled_from((20, 128))))
    dim = draw(st.sampled_from((1, 4)))
    shape = (extent.batch, extent.heads, extent.queries, dim)
    distances = draw(st.integers(1, 2 * extent.keys + 2))
    heads = draw(st.sampled_from((1, extent.heads)))
    return RelativeContent(
        poisoned(shape, dtype, layout, generator),
        poisoned((heads, distances, dim), dtype, layout, generator),
        draw(st.integers(-extent.keys, 1)),
        draw(st.sampled_from((None, 0.3))),
    )


@st.composite
def cases(draw: Draw, dtype: torch.dtype, *, softcap: bool = True) -> Case:
    """A whole call. With ``softcap=False``, PyTorch's kernels can run it, and it has no sinks."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32 - 1)))
    long = draw(st.integers(0, 19)) == 0
    pool = LONG if long else LENGTHS
    queries, keys = draw(st.sampled_from(pool)), draw(st.sampled_from(pool))
    if draw(st.booleans()):
        queries = keys
    batch = draw(st.sampled_from((1, 1, 2) if long else (1, 2, 2, 3, 0)))
    key_heads, groups = draw(st.sampled_from((1, 2))), draw(st.sampled_from((1, 1, 2, 3)))
    dim = draw(st.sampled_from((1, 4, 8, 16)))
    width = draw(st.sampled_from((dim, dim, 2, 24)))
    extent = Extent(batch, key_heads * groups, queries, keys, torch.device("cpu"))

    shapes = (
        (batch, extent.heads, queries, dim),
        (batch, key_heads, keys, dim),
        (batch, key_heads, keys, width),
    )
    query, key, value = (
        poisoned(shape, dtype, draw(st.sampled_from(LAYOUTS)), generator) for shape in shapes
    )
    if extent.heads == 1 and draw(st.booleans()):
        query, key, value = query[:, 0], key[:, 0], value[:, 0]
        if batch == 1 and draw(st.booleans()):
            query, key, value = query[0], key[0], value[0]
    return Case(
        query,
        key,
        value,
        draw(any_mask(extent)) if draw(st.integers(0, 3)) else None,
        draw(any_bias(extent, dtype, generator)) if draw(st.booleans()) else None,
        draw(st.sampled_from((None, None, 0.3, 2.0, -1.0, 0.0))),
        draw(st.sampled_from((None, None, 1.5))) if softcap else None,
        draw(starts(batch, keys)),
        poisoned((extent.heads,), dtype, "strided", generator) * 2
        if softcap and draw(st.integers(0, 2)) == 0
        else None,
    )


@st.composite
def sights(draw: Draw, case: Case) -> See:
    """What to record: any set of fields, with any rows and any map size."""
    queries = case.extent.queries
    asked = {name: draw(st.booleans()) for name in FLAGS}
    asked["sink"] = case.sinks is not None and draw(st.booleans())
    rows = draw(st.lists(st.integers(-queries, queries - 1), max_size=3)) if queries else []
    pairs, scores = [], []
    if queries and case.extent.keys:
        pair = st.tuples(st.integers(0, queries - 1), st.integers(0, case.extent.keys - 1))
        pairs = draw(st.lists(pair, max_size=4))
        scores = draw(st.sampled_from((rows, pairs, [])))
    size = st.sampled_from((1, 2, 3, 7, 64))
    grid = draw(st.none() | st.tuples(size, size))
    peak = grid is not None and draw(st.booleans())
    top = draw(st.sampled_from((0, 1, 3, 300)))
    if not (any(asked.values()) or rows or pairs or scores or grid or top):
        asked["lse"] = True
    return See(**asked, rows=rows, pairs=pairs, scores=scores, map=grid, map_peak=peak, top=top)
