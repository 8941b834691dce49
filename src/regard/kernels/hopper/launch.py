"""Launch the Hopper kernels according to a plan; ``plan`` decides which calls they take.

Called by ``passes``. Tensors are [batch, heads, length, dim]; ``plan`` has checked that their last
axis is contiguous.

Tests: ``pytest tests -k "hopper and definition"``.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.kernels.compat import OVERLAPPING, tensor_descriptor
from regard.kernels.plan import (
    COUNTERS,
    Bins,
    Interleave,
    Intermediates,
    Layout,
    Plan,
    Sizes,
    Structure,
    View,
    Work,
    ceil,
    next_power,
    outputs,
    place_bins,
    share_steps,
    why_not_hopper,
    work_for,
)
from regard.kernels.sizes import (
    BLOCK,
    CAUSAL,
    LANES,
    LOG2E,
    PAIR,
    ROWS,
    SETS,
    SPLIT_BLOCKS,
    STRIP,
    TEAMS,
)

# Chosen by measurements on an H200 (docs/log.md, "Kernels for the GPU").
# The keys of dicts are head widths.
STAGES = 2  # ring slots for tiles of keys and values in the forward pass
TILE_STAGES = {64: 8, 128: 3}  # ring slots for tiles of queries in the columns pass
KEY_STAGES = {64: 4, 128: 2}  # ring slots for tiles of keys in the top keys pass
STEP_STAGES = {64: 2, 128: 3}  # ring slots for steps of queries in the backward pass
NEG_LSE_BY_COPY = 64  # width at which the copy engine loads neg_lse in the columns pass
COUNTED_BACKWARD = 64  # width at which programs of the backward pass take items from a counter
POOLED_CELLS = 2048  # numbers that a program of ``pool`` reads at a time

ONE_TEAM: Any = OVERLAPPING | {"num_warps": 4}
ALL_TEAMS: Any = OVERLAPPING | {"num_warps": 4 * TEAMS}  # one role runs all teams


@cache
def _kernels() -> Any:
    from regard.kernels import hopper

    return hopper


def _descriptor(tensor: Tensor, rows: int, columns: int | None = None) -> Any:
    """Return a TMA descriptor with tiles of ``rows`` rows and ``columns`` columns of a head."""
    block = (1, 1, rows, columns or tensor.shape[3])
    return tensor_descriptor(tensor, tensor.shape, tensor.stride(), block)


def _row_descriptor(numbers: Tensor, count: int = BLOCK) -> Any:
    """Return a TMA descriptor of one number per query, with tiles of ``count`` numbers."""
    rows = numbers.view(-1, count)
    return tensor_descriptor(rows, rows.shape, rows.stride(), (1, count))


def _new_counters(query: Tensor, count: int = 1) -> Tensor:
    """Allocate counters set to UNSET_COUNTER. As float32 this is -inf, where maxima start."""
    counters = torch.empty(count, device=query.device, dtype=torch.int32)
    _kernels().reset_counters[(ceil(count, 128),)](counters, count, WARPS=4, num_warps=4)
    return counters


def numbers_kept_of_a_row(width: int) -> int:
    """Return the size of a row's partial result where several programs share a block."""
    return width + 5 + LANES * SETS


def forward(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, plan: Plan
) -> tuple[dict[str, Tensor], Intermediates]:
    """Return the output, lse and fields of each query, and tensors that later passes read."""
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    fields = plan.problem.wanted.fields
    causal = structure.kind == CAUSAL
    work = work_for(plan.problem, queries, BLOCK)
    if not causal:
        work = share_steps(work, ceil(keys, BLOCK))
    results = outputs(query, value, fields)
    buffers = plan.buffers
    lse = results["lse"]
    neg_lse = lse.new_empty(buffers["neg_lse"].shape) if "neg_lse" in buffers else None
    threshold = torch.empty_like(lse) if "top_threshold" in buffers else None
    lane_rows = PAIR if neg_lse is None or plan.bins is None else plan.bins.lane_rows
    # One launch resets the work counters of all passes, the number of finished blocks of each head,
    # and the highest scores.
    (count,) = buffers["work_counters"].shape
    early = plan.early_heads
    counters = _new_counters(query, count + batch * heads)
    counters, highest = counters[:count], counters[count:]
    counting = counters, counters[COUNTERS:] if early else None, early.start, early.stop
    if "max_logit" in fields:
        results["max_logit"] = highest.view(torch.float32).view(batch, heads)
    tiles = _descriptor(query, BLOCK), _descriptor(key, BLOCK), _descriptor(value, BLOCK)
    output = results["output"].view(batch * heads, queries, width)
    out_tiles = tensor_descriptor(output, output.shape, output.stride(), (1, ROWS, width))
    written = (
        lse, results.get("entropy"), results.get("peak"), results.get("max_logit"),
        results.get("distance"), threshold, neg_lse,
    )  # fmt: skip
    bits = lane_rows.bit_length() - 1
    options: Any = {
        "D": width, "ENTROPY": "entropy" in fields, "PEAK": "peak" in fields,
        "HIGHEST": "max_logit" in fields, "DISTANCE": "distance" in fields,
        "THRESHOLD": threshold is not None, "NEG_LSE": neg_lse is not None,
    }  # fmt: skip
    apart = keys - queries if causal or "distance" in fields else keys
    constants: Any = options | {
        "c": structure.scale * LOG2E, "STAGES": STAGES, "CAUSAL": causal,
        "EVEN": apart % BLOCK == 0,
    }  # fmt: skip
    _kernels().forward[(work.programs,)](
        *tiles, out_tiles, *written, None, *counting, *work.whole, queries, keys, bits,
        **constants, SPLIT=False, **ONE_TEAM,
    )  # fmt: skip
    if work.split_items:
        kept_shape = work.programs, SPLIT_BLOCKS, BLOCK, numbers_kept_of_a_row(width)
        kept = lse.new_empty(kept_shape)
        _kernels().forward[(work.programs,)](
            *tiles, out_tiles, *written, kept, None, None, 0, 0, *work, queries, keys, bits,
            **constants, SPLIT=True, **ONE_TEAM,
        )  # fmt: skip
        _kernels().join[(work.split_items, BLOCK // ROWS)](
            output, *written, kept, *work, queries, bits, **options, num_warps=width // 8
        )
    return results, Intermediates(neg_lse, threshold, counters)


def _interleaved_tiles(
    query: Tensor, bins: Bins, interleave: Interleave, steps: int, strip: int | None
) -> Any:
    """Return a TMA descriptor of queries in interleaved bins.

    Its shape is [groups, turns, LANES, PAIR, width]. A tile is split into ``steps`` steps. A step
    has several groups, or several turns of one group.
    """
    batch, heads, queries, width = query.shape
    high = BLOCK // bins.per_tile
    row = query.stride(2)
    beside = interleave.inner > 0
    groups = (batch if beside else batch * heads) * queries // (LANES * high)
    shape = (groups, high // PAIR, LANES, PAIR, heads * width if beside else width)
    strides = (LANES * high * row, PAIR * row, high * row, row, 1)
    together = bins.per_tile // LANES
    turns = high // PAIR if together >= steps else high // PAIR // steps
    block = (max(together // steps, 1), turns, LANES, PAIR, strip or width)
    return tensor_descriptor(query, shape, strides, block)


def _query_tiles(query: Tensor, bins: Bins, steps: int = 1, strip: int | None = None) -> Any:
    """Return a TMA descriptor of queries in the order of ``bins``; tiles have ``steps`` parts."""
    if bins.interleave is None:
        return _descriptor(query, BLOCK // steps, strip)
    return _interleaved_tiles(query, bins, bins.interleave, steps, strip)


def order_neg_lse(lse: Tensor, bins: Bins, width: int) -> Tensor:
    """Return -lse to base 2 in the order in which ``forward`` stores it for tiles of queries."""
    neg_lse = pad(lse * -LOG2E, (0, -lse.shape[2] % BLOCK), value=-torch.inf)
    if bins.interleave is not None:
        turns = bins.lane_rows // PAIR
        neg_lse = neg_lse.reshape(-1, LANES, turns, PAIR).transpose(1, 2)
    if width == NEG_LSE_BY_COPY:
        neg_lse = neg_lse.reshape(-1, 2, LANES, PAIR).transpose(1, 2)
    return neg_lse.contiguous()


class _ColumnSums(NamedTuple):
    """Arguments for sums over queries that ``columns`` and ``backward`` share."""

    bins: Bins
    work: Work
    sizes: Sizes
    units: dict[str, Tensor]  # maps before pooling, with a number for each unit of keys
    constants: dict[str, Any]


def new_columns(query: Tensor, key: Tensor, plan: Plan) -> dict[str, Tensor]:
    """Allocate the requested sums over queries, which ``columns`` and ``backward`` fill."""
    batch, heads = query.shape[:2]
    wanted = plan.problem.wanted
    grid = wanted.map or ()
    shapes = {"received": (key.shape[2],), "map": grid, "map_peak": grid}
    return {
        name: query.new_empty(batch, heads, *shape, dtype=torch.float32)
        for name, shape in shapes.items()
        if name in wanted.fields
    }


def _column_sums(
    query: Tensor,
    key: Tensor,
    structure: Structure,
    plan: Plan,
    fields: dict[str, Tensor],
    block: int,
) -> _ColumnSums:
    """Prepare the sums over queries for programs that process blocks of ``block`` keys."""
    batch, heads, queries, width = query.shape
    keys, grid, bins = key.shape[2], plan.problem.wanted.map, plan.bins
    assert bins is not None
    rows, cols = grid or (1, 1)
    work = work_for(plan.problem, keys, block)
    tiles = ceil(queries, BLOCK)
    kept_rows = rows * bins.parts
    count = work.blocks * block // bins.unit  # units in a row of the map
    done = keys // cols // bins.unit * bins.parts == 1  # each unit is a cell: no pooling
    units = {name: cells for name, cells in fields.items() if name != "received"}
    if not done or count > cols:
        units = {
            name: cells.new_empty(batch, heads, kept_rows, count) for name, cells in units.items()
        }
    sizes = Sizes(
        keys, keys - queries, tiles, bins.tiles, kept_rows,
        bins.tiles if "map" in fields else 1, count,
    )  # fmt: skip
    constants: Any = {
        "c": structure.scale * LOG2E, "D": width, "BINS": bins.per_tile, "UNIT": bins.unit,
        "LONG": bins.tiles > 1 or grid is None, "CAUSAL": structure.kind == CAUSAL,
        "RECEIVED": "received" in fields, "MAP": "map" in fields, "MAP_PEAK": "map_peak" in fields,
        "DONE": done,
    }  # fmt: skip
    return _ColumnSums(bins, work, sizes, units, constants)


def _pool(
    sums: _ColumnSums, fields: dict[str, Tensor], queries: int, grid: tuple[int, int] | None
) -> None:
    """Compute the cells of the maps from their units."""
    bins, _, sizes, units, constants = sums
    rows, cols = grid or (1, 1)
    if constants["DONE"]:
        for name, cells in units.items():
            if cells is not fields[name]:
                fields[name].copy_(cells[..., :cols])
    elif units:
        from regard.kernels.triton.columns import pool

        each = sizes.keys // cols // bins.unit  # units per cell
        wide = min(64, next_power(each))
        some = POOLED_CELLS // wide
        count = fields["map"].numel()
        pool[(ceil(count, some),)](
            units["map"], units.get("map_peak"), fields["map"], fields.get("map_peak"), count,
            rows, cols, units["map"].shape[3], each, queries // rows, sizes.offset,
            PARTS=bins.parts, UNIT=bins.unit, BC=some, BK=wide, EVEN=each == wide,
            CAUSAL=constants["CAUSAL"], PEAK="map_peak" in units, num_warps=4,
        )  # fmt: skip


def columns(
    query: Tensor,
    key: Tensor,
    structure: Structure,
    plan: Plan,
    fields: dict[str, Tensor],
    neg_lse: Tensor,
    counters: Tensor | None = None,
) -> None:
    """Fill ``fields``, allocated by ``new_columns``, with sums over queries.

    ``counters`` are the work counters of ``forward``, if it has just run.
    """
    queries, width = query.shape[2:]
    sums = _column_sums(query, key, structure, plan, fields, TEAMS * ROWS)
    bins, work, sizes, units, constants = sums
    causal = constants["CAUSAL"]
    if not causal:
        work = share_steps(work, sizes.tiles, sizes.together)
    read = (
        _query_tiles(query, bins, strip=STRIP), _descriptor(key, ROWS, STRIP),
        _row_descriptor(neg_lse) if width == NEG_LSE_BY_COPY else neg_lse,
        bins.interleave or Interleave(), fields.get("received"),
    )  # fmt: skip
    written = units.get("map"), units.get("map_peak")
    constants |= {"STAGES": TILE_STAGES[width], "EVEN": sizes.offset % ROWS == 0}
    diagonal = causal and sizes.offset == 0 and bins.per_tile >= 2 * LANES
    done = counters[COUNTERS:] if counters is not None and len(counters) > COUNTERS else None
    counter = _new_counters(query) if counters is None else counters[1:]
    _kernels().columns[(work.programs,)](
        *read, None, *written, counter, done, *work.whole, *sizes, **constants,
        DIAGONAL=diagonal, SPLIT=False, **ALL_TEAMS,
    )  # fmt: skip
    if work.split_items:
        kept = neg_lse.new_empty(work.programs, SPLIT_BLOCKS, TEAMS * ROWS)
        _kernels().columns[(work.programs,)](
            *read, kept, *written, None, None, *work, *sizes, **constants, DIAGONAL=False,
            SPLIT=True, **ALL_TEAMS,
        )  # fmt: skip
        if "received" in fields:
            _kernels().add[(work.split_items,)](
                fields["received"], kept, *work, *sizes, num_warps=4
            )
    _pool(sums, fields, queries, plan.problem.wanted.map)


def _as_queries(grad: Tensor, key: Tensor, structure: Structure, plan: Plan) -> tuple[Tensor, Bins]:
    """Return the output's gradient, copied if kernels cannot read its layout, and its bins."""
    bins, layout = plan.bins, Layout.of(grad)
    assert bins is not None
    keys, grid = key.shape[2], plan.problem.wanted.map
    readable = (
        why_not_hopper(
            structure.kind, structure.bias, structure.softcap is not None, grad.dtype,
            grad.shape, key.shape,
        ) is None
        and grad.stride(3) == 1
        and layout.aligned
        and all(step > 0 and step % 8 == 0 for step in layout.strides[:3])
    )  # fmt: skip
    if readable:
        if bins.interleave is None:
            return grad, bins
        own = place_bins(layout, keys, grid)
        if isinstance(own, Bins) and own.interleave is not None:
            return grad, own
    grad = grad.clone(memory_format=torch.contiguous_format)  # .contiguous() does not align
    own = bins if bins.interleave is None else place_bins(Layout.of(grad), keys, grid)
    assert isinstance(own, Bins)
    return grad, own


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    grad: Tensor,
    structure: Structure,
    plan: Plan,
    fields: dict[str, Tensor],
    neg_lse: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of query, key and value; also fill ``fields``, like ``columns``."""
    batch, heads, queries, width = query.shape
    sums = _column_sums(query, key, structure, plan, fields, BLOCK)
    bins, work, sizes, units, constants = sums
    if width != COUNTED_BACKWARD:
        work = work._replace(single_items=0)
    grad, grad_bins = _as_queries(grad, key, structure, plan)
    bits = bins.lane_rows.bit_length() - 1
    query_sums = neg_lse.new_empty(batch, heads, sizes.tiles * BLOCK, width)
    delta = torch.empty_like(neg_lse)
    counter = torch.empty(1, dtype=torch.int32, device=query.device)
    by_fours = neg_lse if width == NEG_LSE_BY_COPY else torch.empty_like(neg_lse)
    halves = sizes.tiles * BLOCK // ROWS, batch * heads
    _kernels().prepare[halves](
        View.of(output), View.of(grad), neg_lse, by_fours, delta, query_sums, counter, heads,
        queries, bits, D=width, num_warps=4,
    )  # fmt: skip
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    steps = width // 64  # per tile
    _kernels().backward[(work.programs,)](
        _query_tiles(query, bins, steps), _query_tiles(grad, grad_bins, steps),
        _descriptor(key, BLOCK), _descriptor(value, BLOCK),
        _row_descriptor(by_fours, BLOCK // steps), _row_descriptor(delta, BLOCK // steps),
        bins.interleave or Interleave(), grad_bins.interleave or Interleave(), query_sums,
        View.of(grads[1]), View.of(grads[2]), fields.get("received"), units.get("map"),
        units.get("map_peak"), counter, *work, *sizes, **constants, scale=structure.scale,
        STAGES=STEP_STAGES[width], num_warps=4,
    )  # fmt: skip
    _kernels().gather[halves](
        query_sums, View.of(grads[0]), heads, queries, bits, structure.scale, D=width, num_warps=4
    )
    _pool(sums, fields, queries, plan.problem.wanted.map)
    return grads


def top(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    structure: Structure,
    plan: Plan,
    left: Intermediates,
    results: dict[str, Tensor],
    unfinished: Tensor,
) -> None:
    """Write the top keys into ``results``, and mark ``unfinished`` rows for ``search``.

    ``left`` has the intermediates that ``forward`` returned.
    """
    queries, width = query.shape[2:]
    # Whether another launch ran after the forward pass, which has then ended.
    ready = left.work_counters is None or (plan.columns is not None and not plan.deferred)
    keys = key.shape[2]
    causal = structure.kind == CAUSAL
    work = work_for(plan.problem, queries, TEAMS * ROWS)
    counter = _new_counters(query) if left.work_counters is None else left.work_counters[2:]
    _kernels().top[(work.programs,)](
        _descriptor(query, ROWS, STRIP), _descriptor(key, BLOCK, STRIP), left.top_threshold, lse,
        unfinished, *results.values(), counter, *work, queries, keys, ceil(keys, BLOCK),
        int(ready), structure.scale * LOG2E, D=width, STAGES=KEY_STAGES[width], CAUSAL=causal,
        EVEN=(keys - queries if causal else keys) % BLOCK == 0, COUNT=plan.problem.wanted.top,
        **ALL_TEAMS,
    )  # fmt: skip
