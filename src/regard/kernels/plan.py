"""The description of a call, and the plan: which kernels run each pass, and why.

``Structure`` describes the mask, the bias and the scale of a call. ``plan_for`` takes a
``Problem``, which holds shapes and options but no tensors, and returns a frozen ``Plan``: for each
pass the variant that runs ("cudnn", "hopper" or "triton"), why no faster variant runs, and the
buffers that one pass writes for later passes. ``passes`` follows the plan.

Pure Python: Triton is not imported.

Tests: ``pytest tests -k "plan or calls_that_do_not_fit"``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from regard.kernels.sizes import (
    ALIBI,
    BLOCK,
    CAUSAL,
    FULL,
    LANES,
    MAX_SHARES,
    MAX_TOP_KEYS,
    PAIR,
    PLAIN,
    ROWS,
    TABLE,
    TEAMS,
)

BY_ROW = ("entropy", "peak", "max_logit", "distance")  # fields that the forward pass computes
OVER_QUERIES = ("received", "map", "map_peak")  # over all queries; they need the final lse
NAMED = (*BY_ROW, *OVER_QUERIES, "rows")  # named as in See
STREAMED = (*NAMED, "top_weights", "top_keys")
KEPT = ("output", "lse", "entropy", "distance")  # saved for the backward pass
# Fields that no kernel differentiates.
ROUGH = ("peak", "max_logit", "map_peak", "top_weights", "rows")

# Chosen by measurements on an H200 (docs/log.md, "Kernels for the GPU").
MIN_STEPS_SAVED = 24  # split the last items only if the longest program saves more steps
MIN_QUERIES = 256  # the least for the kernels for Hopper: their largest blocks have 256 rows
# By head width, the least number of queries at which the backward pass for Hopper, which also
# computes the columns, is faster than cuDNN's backward pass and a separate columns pass.
MIN_QUERIES_BACKWARD = {64: 256, 128: 2048}
COUNTERS = 3  # work counters: one each for the passes forward, columns and top


# Triton has these functions too, but each call of them takes 10 µs.
def ceil(number: int, by: int) -> int:
    """Return ``number / by``, rounded up."""
    return -(-number // by)


def next_power(number: int) -> int:
    """Return the least power of two that is ``number`` or more."""
    return 1 << (number - 1).bit_length()


def power(width: int) -> int:
    """Return the width of a tile for rows of ``width`` numbers; matrix products need 16 or more."""
    return max(16, next_power(width))


def bins(length: int, count: int, device: torch.device) -> Tensor:
    """Return the bin of each of ``length`` positions, which are spread evenly over the bins."""
    return torch.arange(length, device=device) * min(count, length) // max(length, 1)


def outputs(query: Tensor, value: Tensor, fields: Collection[str]) -> dict[str, Tensor]:
    """Allocate the results of a forward pass: "output", "lse", and the wanted fields of queries."""
    written = {"output": value.new_empty(*query.shape[:3], value.shape[3])}
    for name in ("lse", "entropy", "peak", "distance"):
        if name == "lse" or name in fields:
            written[name] = query.new_empty(query.shape[:3], dtype=torch.float32)
    return written


class View(NamedTuple):
    """A tensor [batch, heads, length, dim] and its strides; its last axis is contiguous."""

    data: Tensor | None
    batch: int = 0
    head: int = 0
    row: int = 0

    @classmethod
    def of(cls, tensor: Tensor | None) -> View:
        return cls(None) if tensor is None else cls(tensor, *tensor.stride()[:3])


class Ends(NamedTuple):
    """The ends of each query's range of keys, and the strides of both tensors along the batch.

    ``starts`` are the positions of the first queries. If it is None, the last query has the last
    key's position.
    """

    low: Tensor | None
    high: Tensor | None
    low_batch: int
    high_batch: int
    starts: Tensor | None


class Terms(NamedTuple):
    """Scale, softcap and bias by distance, which turn a product of query and key into a score."""

    scale: float
    softcap: float
    table: Tensor | None
    table_head: int
    reach: int


class Relative(NamedTuple):
    """The tensors of Transformer-XL's term: a second query, and an embedding of each distance."""

    query: View
    table: Tensor | None
    head: int
    row: int
    first: int  # the distance of the table's first row
    last: int  # the index of the table's last row
    scale: float
    width: int


@dataclass(frozen=True, slots=True, eq=False)
class Structure:
    """The mask as a range of keys for each query, the bias as numbers for each head, and the scale.

    ``kind`` is FULL, CAUSAL or INTERVAL. An INTERVAL goes from ``low`` to ``high``, which are int32
    [1 or batch, queries]. ``max_keys`` is the most keys that a query may attend to, or 0 if the
    mask sets no limit. ``starts`` [batch], int32, are the positions of the first queries. If it is
    None, the last query has the last key's position; CAUSAL and RELATIVE require this. ``bias`` is

    - PLAIN: no bias;
    - ALIBI: ``table`` [heads, 1] has the slopes;
    - TABLE: ``table`` [heads, 2 * reach + 1] has a number for each distance from -reach to reach;
      distances beyond the reach use its first or last number;
    - RELATIVE: ``relative_scale * relative_query . table[distance - reach]``, with
      ``relative_query`` [batch, heads, queries, dim] and ``table`` [heads or 1, distances, dim],
      both in the dtype of the query.

    The tables of ALIBI and TABLE are float32. ``sinks`` [heads], float32, has for each head a score
    without a key and value that enters the softmax of every row.
    """

    kind: int
    low: Tensor | None
    high: Tensor | None
    bias: int
    table: Tensor | None
    reach: int
    scale: float
    softcap: float | None
    relative_query: Tensor | None = None
    relative_scale: float = 0.0
    max_keys: int = 0
    starts: Tensor | None = None
    sinks: Tensor | None = None

    @property
    def ends(self) -> Ends:
        low, high = self.low, self.high
        if low is None or high is None:
            return Ends(None, None, 0, 0, self.starts)
        low_batch, high_batch = (0 if end.shape[0] == 1 else end.stride(0) for end in (low, high))
        return Ends(low, high, low_batch, high_batch, self.starts)

    @property
    def terms(self) -> Terms:
        table = self.table if self.bias in (ALIBI, TABLE) else None
        step = 0 if table is None else table.stride(0)
        reach = self.reach if self.bias == TABLE else 0
        return Terms(self.scale, self.softcap or 0.0, table, step, reach)

    @property
    def relative(self) -> Relative:
        table, relative_query = self.table, self.relative_query
        if table is None or relative_query is None:
            return Relative(View(None), None, 0, 0, 0, 0, 0.0, 0)
        head = 0 if table.shape[0] == 1 else table.stride(0)
        return Relative(
            View.of(relative_query), table, head, table.stride(1), self.reach, table.shape[1] - 1,
            self.relative_scale, table.shape[2],
        )  # fmt: skip

    def bounds(self, first: Tensor, last: Tensor) -> Tensor:
        """Return the ranges of queries that attend to each block of keys ``first`` to ``last``.

        Shape [1 or batch, blocks, 4]. The four numbers are: the first query that attends to a key
        of the block; the first query whose range reaches the last key; one past the last
        query that attends to the first key; one past the last query that attends to any key.
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


class Wanted(NamedTuple):
    """The fields to compute besides the output and lse (names in STREAMED), and their options."""

    fields: tuple[str, ...] = ()
    grid: tuple[int, int] = (1, 1)
    top: int = 0
    rows: tuple[int, ...] = ()

    @property
    def names(self) -> list[str]:
        """The names of all results, in order."""
        return ["output", "lse", *(name for name in STREAMED if name in self.fields)]

    @property
    def map(self) -> tuple[int, int] | None:
        """The grid of the map, or None if no map is wanted."""
        return self.grid if "map" in self.fields else None


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor [batch, heads, length, dim] whose rows begin at multiples of 16 bytes.

    PyTorch's kernels for GPUs read 16 bytes at once. They check neither where a tensor begins nor
    all of its strides, so other layouts are copied.
    """
    batch, head, row, last = tensor.stride()
    steps = (batch | head | row) * tensor.element_size()
    if last == 1 and row and not (tensor.data_ptr() | steps) & 15:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


class Layout(NamedTuple):
    """The properties of a tensor [batch, heads, length, dim] that a plan depends on."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool  # whether it begins at a multiple of 16 bytes, as the copy engine needs

    @classmethod
    def of(cls, tensor: Tensor) -> Layout:
        strides = tensor.stride()
        if strides[3] != 1:  # kernels get a contiguous copy
            return cls(
                tensor.shape, torch.empty_like(tensor, device="meta").contiguous().stride(), True
            )
        return cls(tensor.shape, strides, tensor.data_ptr() % 16 == 0)


class Device(NamedTuple):
    """The properties of a device that a plan depends on."""

    capability: tuple[int, int]  # CUDA's compute capability; (0, 0) without CUDA
    processors: int  # number of streaming multiprocessors
    why_not_hopper: str | None  # why the kernels for Hopper cannot run on it


class Problem(NamedTuple):
    """Everything that a plan depends on, without tensors."""

    query: Layout
    key: Layout
    value: Layout
    dtype: torch.dtype
    device: Device
    kind: int
    bias: int
    softcap: bool
    scale: float
    wanted: Wanted
    hopper: bool  # whether the backend may use the kernels for Hopper
    cudnn: bool  # whether cuDNN's attention is available and enabled
    deterministic: bool  # whether PyTorch requires deterministic algorithms
    deferrable: bool  # whether a backward pass may compute OVER_QUERIES later


class Choice(NamedTuple):
    """The variant of a pass that runs, and the reasons against each faster variant."""

    variant: str
    reasons: tuple[tuple[str, str], ...] = ()

    def why_not(self, variant: str) -> str | None:
        return dict(self.reasons).get(variant)

    def __str__(self) -> str:
        reasons = (f"not {variant}: {reason}" for variant, reason in self.reasons)
        return "; ".join((self.variant, *reasons))


class Buffer(NamedTuple):
    """A tensor that one pass writes for others."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    writer: str
    readers: tuple[str, ...]


class Interleave(NamedTuple):
    """The steps from one sequence or head to the next in a view of interleaved queries.

    A thread holds two of every eight columns of a product. If a tile has several bins, its queries
    are read in an order that gives one thread all queries of a bin.
    """

    batch: int = 0  # along the outermost axis
    head: int = 0  # along the outermost axis
    inner: int = 0  # from head to head along the innermost axis, if heads lie side by side


class Bins(NamedTuple):
    """How the kernels for Hopper place the bins of a map in tiles."""

    per_tile: int = 1  # bins of queries, or parts of bins, in a tile
    tiles: int = 1  # tiles that a bin spans
    unit: int = 16  # keys whose weights are summed before they are stored
    interleave: Interleave | None = None
    parts: int = 1  # parts of a bin that are stored separately; the kernel ``pool`` adds them

    @property
    def lane_rows(self) -> int:
        """The consecutive queries that a lane holds: a bin (or part) if interleaved, or PAIR."""
        return PAIR if self.interleave is None else BLOCK // self.per_tile


class Work(NamedTuple):
    """How the kernels for Hopper split a call over programs; see hopper/pipeline.py."""

    items: int  # blocks of all heads; with a causal mask a long and a short block are one item
    blocks: int  # blocks of a head
    heads: int
    groups: int  # query heads that share a key head
    programs: int
    single_items: int  # the number of last items whose two blocks are scheduled separately
    steps: int = 1  # tiles that an item loops over
    share: int = 1  # steps that each program takes of the last items, which are split

    @property
    def split_items(self) -> int:
        """The number of items that are split over several programs."""
        return self.items % self.programs if self.share < self.steps else 0

    @property
    def whole(self) -> Work:
        """The same work without the items that are split."""
        return self._replace(items=self.items - self.split_items)


class Sizes(NamedTuple):
    """The sizes of a call for those kernels for Hopper whose programs own blocks of keys."""

    keys: int
    offset: int  # the position of the first query
    tiles: int  # tiles of queries
    per_bin: int  # tiles that a bin of the map spans
    bins: int
    together: int  # consecutive tiles that one program must take, because they share a bin
    units: int  # units of keys in a row of the map; see ``Bins.unit``


@dataclass(slots=True)
class Intermediates:
    """The tensors that the forward pass for Hopper writes for later passes; see ``Plan.buffers``.

    ``neg_lse`` is -lse to base 2, in the order in which a tile holds its queries, and -inf in the
    empty places of the last tile. ``top_threshold`` is, for each query, a score that at least
    MAX_TOP_KEYS of its scores reach. ``work_counters`` counts the items that the passes forward,
    columns and top have taken from the counter and, if the columns pass may begin early, the
    finished blocks of each head. All counts start at UNSET_COUNTER.
    """

    neg_lse: Tensor | None = None
    top_threshold: Tensor | None = None
    work_counters: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Which kernels run each pass of a call. A pass that the call does not need is None."""

    problem: Problem
    forward: Choice
    columns: Choice | None  # for the fields in OVER_QUERIES
    top: Choice | None
    backward: Choice  # for gradients of the output alone; "triton" runs all others
    deferred: bool  # whether to compute the columns in the backward pass or on first access
    bins: Bins | None  # for the columns pass for Hopper
    early_heads: range  # heads that the columns pass starts with before the forward pass ends
    buffers: Mapping[str, Buffer]

    @property
    def choices(self) -> dict[str, Choice]:
        """The choice for each pass that runs, by the name of the pass."""
        passes = {"forward": self.forward, "columns": self.columns, "top": self.top}
        return {name: choice for name, choice in passes.items() if choice is not None}


@lru_cache(maxsize=256)
def plan_for(problem: Problem) -> Plan:
    """Decide which kernels run each pass of a call."""
    wanted = problem.wanted
    not_cudnn = why_not_cudnn(problem)
    not_hopper = why_not_forward(problem)
    top = None
    if wanted.top:
        not_top = why_not_top(problem)
        top = _choose(hopper=not_top)
    by_row = [name for name in BY_ROW if name in wanted.fields]
    forward_not_cudnn = not_cudnn
    if by_row:
        forward_not_cudnn = f"it does not compute {', '.join(by_row)}."
    if top is not None and top.variant == "hopper":
        forward_not_cudnn = "it does not find a threshold for the top keys."
    forward = _choose(cudnn=forward_not_cudnn, hopper=not_hopper)
    columns, map_bins = None, None
    if "received" in wanted.fields or "map" in wanted.fields:
        columns = _choose(hopper=why_not_columns(problem))
        if columns.variant == "hopper":
            placed = place_bins(problem.query, problem.key.shape[2], wanted.map)
            assert isinstance(placed, Bins)
            map_bins = placed
    reusable = forward.variant == "hopper" and map_bins is not None
    not_backward = why_not_backward(problem)
    if not reusable:
        not_backward = "the passes forward and columns do not both run on the kernels for Hopper."
    elif not problem.deferrable:
        not_backward = "the columns cannot be deferred to the backward pass."
    deferred = reusable and not_cudnn is None and not_backward is None
    backward = _choose(hopper=None if deferred else not_backward or not_cudnn, cudnn=not_cudnn)
    early = range(0)
    buffers: dict[str, Buffer] = {}
    if forward.variant == "hopper":
        batch, heads, queries, _ = problem.query.shape
        if reusable:
            early = _early_heads(problem)
            shape = batch, heads, ceil(queries, BLOCK) * BLOCK
            buffers["neg_lse"] = Buffer(shape, torch.float32, "forward", ("columns", "backward"))
        if top is not None and top.variant == "hopper":
            shape = batch, heads, queries
            buffers["top_threshold"] = Buffer(shape, torch.float32, "forward", ("top",))
        count = COUNTERS + (batch * heads if early else 0)
        buffers["work_counters"] = Buffer(
            (count,), torch.int32, "forward", ("forward", "columns", "top")
        )
    return Plan(problem, forward, columns, top, backward, deferred, map_bins, early, buffers)


def _choose(**reasons: str | None) -> Choice:
    """Return the first variant without a reason against it, or "triton"."""
    against: list[tuple[str, str]] = []
    for variant, reason in reasons.items():
        if reason is None:
            return Choice(variant, tuple(against))
        against.append((variant, reason))
    return Choice("triton", tuple(against))


def why_not_cudnn(problem: Problem) -> str | None:
    """Return why cuDNN, the fastest on Hopper, cannot compute the output and its gradients."""
    query, key, value = problem.query.shape, problem.key.shape, problem.value.shape
    if not problem.cudnn:
        return "cuDNN's attention is switched off, or the GPU is older than compute capability 9.0."
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it does not support {problem.dtype}."
    if problem.kind != FULL and not (problem.kind == CAUSAL and query[2] == key[2]):
        return "it needs no mask, or Causal() with as many queries as keys."
    if problem.bias != PLAIN or problem.softcap:
        return "it supports neither bias nor softcap."
    if query[1] != key[1]:
        return "query heads share heads of keys."
    if problem.deterministic:
        return "its gradients are not deterministic."
    if query[3] != value[3] or query[3] > 128 or query[3] % 8:
        return "it needs one head width for all tensors, a multiple of 8 up to 128."
    return _why_not_read(problem.query, problem.key, problem.value)


def _why_not_read(*layouts: Layout) -> str | None:
    """Return why kernels that read 16 bytes at once cannot read 16-bit tensors, or None."""
    if not all(layout.aligned for layout in layouts):
        return "a tensor does not begin at a multiple of 16 bytes."
    if any(step <= 0 or step % 8 for layout in layouts for step in layout.strides[:3]):
        return "a stride of a tensor is 0 or not a multiple of 8."
    return None


def why_not_hopper(
    kind: int, bias: int, softcap: bool, dtype: torch.dtype, *shapes: tuple[int, ...]
) -> str | None:
    """Return why the kernels for Hopper cannot run a call of these shapes, whatever its strides."""
    query, key = shapes[:2]
    if kind not in (FULL, CAUSAL):
        return "the kernels for Hopper support no mask but Causal()."
    if bias != PLAIN:
        return "the kernels for Hopper support no bias."
    if softcap:
        return "the kernels for Hopper support no softcap."
    if dtype not in (torch.bfloat16, torch.float16):
        return "the kernels for Hopper need bfloat16 or float16."
    if query[2] < MIN_QUERIES:
        return f"there are fewer than {MIN_QUERIES} queries."
    if query[2] > key[2]:
        return "there are more queries than keys."
    widths = [shape[3] for shape in shapes]
    if widths[0] not in (64, 128) or any(width != widths[0] for width in widths):
        return "the kernels for Hopper need one head width, 64 or 128."
    return None


def _why_not_layout(problem: Problem, *layouts: Layout) -> str | None:
    """Return why the kernels for Hopper cannot run the call on tensors of these layouts."""
    if not problem.hopper:
        return "the backend 'triton' does not use the kernels for Hopper."
    if problem.device.why_not_hopper is not None:
        return problem.device.why_not_hopper
    reason = why_not_hopper(
        problem.kind, problem.bias, problem.softcap, problem.dtype,
        *(layout.shape for layout in layouts),
    )  # fmt: skip
    return reason or _why_not_read(*layouts)


def _why_too_few(problem: Problem, length: int, rows: int) -> str | None:
    """Return why blocks of ``rows`` rows leave processors idle, or None."""
    work = work_for(problem, length, rows)
    if work.items < problem.device.processors:
        return f"{work.items} blocks do not keep {problem.device.processors} processors busy."
    return None


def why_not_forward(problem: Problem) -> str | None:
    """Return why the forward pass for Hopper cannot run, or None."""
    reason = _why_not_layout(problem, problem.query, problem.key, problem.value)
    reason = reason or _why_too_few(problem, problem.query.shape[2], BLOCK)
    if reason is None and problem.kind != CAUSAL and "distance" in problem.wanted.fields:
        # For the distance without a mask, the kernel masks no tile, so the last one must be full.
        if problem.key.shape[2] % BLOCK:
            return f"without a mask, distance needs a multiple of {BLOCK} keys."
    return reason


def why_not_columns(problem: Problem) -> str | None:
    """Return why the columns pass for Hopper, which sums over queries, cannot run, or None."""
    batch, heads, _, _ = problem.query.shape
    keys, grid = problem.key.shape[2], problem.wanted.map
    reason = _why_not_layout(problem, problem.query, problem.key)
    reason = reason or _why_too_few(problem, keys, TEAMS * ROWS)
    if reason is not None:
        return reason
    rows, cols = grid or (1, 1)
    if batch * heads * rows * cols >= 2**31:
        return "the map has 2**31 cells or more."
    placed = place_bins(problem.query, keys, grid)
    return placed if isinstance(placed, str) else None


def why_not_top(problem: Problem) -> str | None:
    """Return why the kernels for Hopper cannot find the top keys, or None."""
    if problem.wanted.top > MAX_TOP_KEYS:
        return f"the kernels for Hopper find at most {MAX_TOP_KEYS} top keys."
    if problem.scale <= 0:
        return "the scale is 0 or negative."
    reason = why_not_forward(problem)
    return reason or _why_too_few(problem, problem.query.shape[2], TEAMS * ROWS)


def why_not_backward(problem: Problem) -> str | None:
    """Return why not to run the backward pass for Hopper, which also computes the columns."""
    query, key = problem.query.shape, problem.key.shape
    reason = _why_not_layout(problem, problem.query, problem.key, problem.value)
    if reason is not None:
        return reason
    if problem.kind != CAUSAL and key[2] % BLOCK:
        return f"without a mask it needs a multiple of {BLOCK} keys."
    least = MIN_QUERIES_BACKWARD[query[3]]
    if query[2] < least:
        return f"with a head width of {query[3]}, cuDNN's pass is faster below {least} queries."
    if query[1] != key[1]:
        return "query heads share heads of keys."
    return why_not_columns(problem)


def place_bins(query: Layout, keys: int, grid: tuple[int, int] | None) -> Bins | str:
    """Place the bins of a map in tiles, or return the reason why they do not fit.

    Without a grid all queries are one bin.
    """
    _, heads, queries, width = query.shape
    if grid is None:
        return Bins(tiles=ceil(queries, BLOCK))
    rows, columns = grid
    if queries % rows or keys % columns:
        return "the bins of the map do not divide queries and keys evenly."
    high, wide = queries // rows, keys // columns
    unit = 16 if wide % 16 == 0 else 8
    if wide % unit or (unit == 8 and wide != 8):
        return "a bin of the map is neither 8 keys wide nor a multiple of 16."
    if rows * keys // unit > 2**29:  # offsets in the map of a head are 32-bit
        return "the map has too many cells."
    if high % BLOCK == 0:
        return Bins(1, high // BLOCK, unit)
    if queries % BLOCK or high not in (8, 16, 32, 64):
        return f"a bin of the map is not 8, 16, 32, 64 or a multiple of {BLOCK} queries high."
    together = max(BLOCK // high, LANES)  # at least one bin or part for each lane
    groups = queries // (LANES * BLOCK // together)  # groups of a head
    step = query.strides
    if step[1] == queries * step[2] and step[0] == heads * step[1]:
        interleave = Interleave(heads * groups, groups, 0)
    elif step[1] == width and step[0] == queries * step[2]:
        interleave = Interleave(groups, 0, width)
    elif BLOCK // high < LANES:
        return Bins(BLOCK // high, 1, unit)
    else:
        return "the memory layout of the queries does not allow interleaved bins."
    return Bins(together, 1, unit, interleave, together * high // BLOCK)


def work_for(problem: Problem, length: int, rows: int) -> Work:
    """Split the ``length`` queries or keys of all heads into blocks of ``rows`` rows."""
    batch, heads = problem.query.shape[:2]
    blocks = ceil(length, rows)
    causal = problem.kind == CAUSAL
    items = batch * heads * (ceil(blocks, 2) if causal else blocks)
    programs = min(items, problem.device.processors)
    single_items = programs if causal and blocks % 2 == 0 else 0  # if odd, one has no partner
    return Work(items, blocks, heads, heads // problem.key.shape[1], programs, single_items)


def share_steps(work: Work, steps: int, together: int = 1) -> Work:
    """Split the last items of a call without a mask into shares, if that saves enough steps.

    An item has ``steps`` steps. Groups of ``together`` steps are not split.
    """
    share = max(ceil(work.items % work.programs * steps, work.programs), ceil(steps, MAX_SHARES))
    share = ceil(share, together) * together
    if steps - share - (together - 1) <= MIN_STEPS_SAVED:
        share = steps
    return work._replace(steps=steps, share=share)


def _early_heads(problem: Problem) -> range:
    """Return the heads that the columns pass starts with, before the forward pass has ended.

    There are none if the call has few blocks, or if it is causal: its last blocks are short.
    """
    work = work_for(problem, problem.key.shape[2], TEAMS * ROWS)
    if problem.kind == CAUSAL or work.items < 4 * work.programs:
        return range(0)
    half = work.items // 2  # must match _from_the_middle in hopper/pipeline.py
    return range(half // work.blocks, (half + work.programs - 1) // work.blocks + 1)
