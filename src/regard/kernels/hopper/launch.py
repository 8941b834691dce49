"""Launching the kernels for Hopper: which calls they take, and how those are handed over."""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor
from torch.nn.functional import pad

from regard.kernels.plan import CAUSAL, FULL, LOG2E, PLAIN, Sizes, Structure, View, Work, outputs
from regard.kernels.triton.columns import pool

GLUON = "3.6."  # Gluon is young: each release of Triton may change it, and has to be tried
ROWS = 64  # as in hopper/
BLOCK = 128
LANES, PAIR = 4, 2
PLACES = 8  # top keys that can be asked for
SETS = 8  # of a lane's scores, of each of which the highest is kept
TEAMS = 4  # groups of warps that share tiles
CARRIED = 64  # width at which the second pass has what queries lose copied with them
STRIP = 64  # columns of a tile where all teams are one role
STAGES = 2  # tiles of keys and of values that are loaded ahead
TILE_STAGES = {64: 8, 128: 3}  # tiles of queries in the second pass
KEY_STAGES = {64: 4, 128: 2}  # of keys for the top ones
STEP_STAGES = {64: 2, 128: 3}  # steps of queries in the backward pass
WORTH = 24  # steps: where the longest program saves no more, the last items are not cut
PARTS = 7  # shares that a block is long at most: so no more than JOINED programs have some of it
POOLED = 2048  # numbers of which a program makes a map's cells at a time
SHORTEST = {64: 256, 128: 2048}  # queries with which ``backward`` is the faster way
LAUNCHES = 3  # that draw items: of the forward pass, the second one, and for the top keys
EARLY: Any = {"num_warps": 4, "launch_pdl": True}  # programs may come before the last launch ends
ALL_TEAMS: Any = EARLY | {"num_warps": 4 * TEAMS}  # as one role
DRAWING = 64  # width at which the backward pass draws items; else each program has its own, whole
FEWEST = 256  # queries: below, most of a block would be empty


@cache
def _processors(device: torch.device) -> int:
    """How many multiprocessors a Hopper has; 0 where the kernels cannot run."""
    if device.type != "cuda" or not triton.__version__.startswith(GLUON):
        return 0
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count if (properties.major, properties.minor) == (9, 0) else 0


@cache
def _kernels() -> Any:
    from regard.kernels import hopper

    return hopper


def _fits(structure: Structure, *tensors: Tensor) -> bool:
    """Whether the copy engine can read these tensors, and the kernels know their structure."""
    query, key = tensors[:2]
    return (
        structure.kind in (FULL, CAUSAL)
        and structure.bias == PLAIN
        and structure.softcap is None
        and query.dtype in (torch.bfloat16, torch.float16)
        and FEWEST <= query.shape[2] <= key.shape[2]
        and all(tensor.shape[3] in (64, 128) for tensor in tensors)
        and len({tensor.shape[3] for tensor in tensors}) == 1
        and all(tensor.data_ptr() % 16 == 0 for tensor in tensors)
        and all(step > 0 and step % 8 == 0 for tensor in tensors for step in tensor.stride()[:3])
        and _processors(query.device) > 0
    )


def _described(tensor: Tensor, rows: int, columns: int | None = None) -> Any:
    """A tensor as the copy engine takes it: tiles of some rows of one head, or of their columns."""
    block = (1, 1, rows, columns or tensor.shape[3])
    return _tiles(tensor, tensor.shape, tensor.stride(), block)


def _described_rows(drop: Tensor, count: int = BLOCK) -> Any:
    """A number for each query as it takes them: a row for so many."""
    rows = drop.view(-1, count)
    return _tiles(rows, rows.shape, rows.stride(), (1, count))


def _tiles(tensor: Tensor, shape: Any, strides: Any, block: tuple[int, ...]) -> Any:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _layout(len(block), tensor.element_size())
    return TensorDescriptor(tensor, list(shape), list(strides), list(block), layout)


@cache
def _layout(rank: int, size: int) -> Any:
    """In shared memory: matrices as products want them, and float32 as it comes."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    swizzled = 128 if size == 2 else 0
    return NVMMASharedLayout(swizzle_byte_width=swizzled, element_bitwidth=size * 8, rank=rank)


def _work(query: Tensor, key: Tensor, length: int, rows: int, structure: Structure) -> Work:
    """Of the queries or keys of all heads, so many rows a block."""
    batch, heads = query.shape[:2]
    blocks = -(-length // rows)
    causal = structure.kind == CAUSAL
    items = batch * heads * (-(-blocks // 2) if causal else blocks)
    programs = min(items, _processors(query.device))
    singly = programs if causal and blocks % 2 == 0 else 0  # an odd one has no counterpart
    return Work(items, blocks, heads, heads // key.shape[1], programs, singly)


def _sharing(work: Work, length: int, together: int = 1) -> Work:
    """With the last items cut into shares, where that saves enough; none of a causal call.

    An item has ``length`` steps, and is not cut between those that are ``together``.
    """
    share = max(-(-(work.items % work.programs) * length // work.programs), -(-length // PARTS))
    share = -(-share // together) * together
    if length - share - (together - 1) <= WORTH:
        share = length
    return work._replace(length=length, share=share)


def _undrawn(query: Tensor, count: int = 1) -> Tensor:
    """Some counts, begun: from the bits of -inf, which are also where a highest score begins."""
    fresh = torch.empty(count, device=query.device, dtype=torch.int32)
    _kernels().undrawn[(-(-count // 128),)](fresh, count, WARPS=4, num_warps=4)
    return fresh


def _busy(query: Tensor, work: Work) -> bool:
    """Whether a call keeps the device busy."""
    return work.items >= _processors(query.device)


def attends(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, wanted: Collection[str]
) -> bool:
    """Whether ``forward`` takes a call."""
    if not _fits(structure, query, key, value):
        return False
    if not _busy(query, _work(query, key, query.shape[2], BLOCK, structure)):
        return False  # launch.forward shares out the keys of few blocks
    # Distances without a mask start on the diagonal: a last tile that is not full has no turn.
    return structure.kind == CAUSAL or "distance" not in wanted or key.shape[2] % BLOCK == 0


def _kept_of_a_row(width: int) -> int:
    """Numbers of a row that a program keeps of each of the two blocks it may have a part of."""
    return width + 5 + LANES * SETS


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    wanted: Collection[str],
    count: int,
    grid: tuple[int, int],
) -> dict[str, Tensor]:
    """Attend, as ``launch.forward``."""
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    causal = structure.kind == CAUSAL
    work = _work(query, key, queries, BLOCK, structure)
    if not causal:
        work = _sharing(work, -(-keys // BLOCK))
    found = outputs(query, value, wanted)
    if count:
        found["bar"] = torch.empty_like(found["lse"])
    high = PAIR
    if "received" in wanted or "map" in wanted:
        bins = _second_pass(query, key, structure, grid if "map" in wanted else None)
        if bins is not None:
            found["drop"] = found["lse"].new_empty(batch, heads, work.blocks * BLOCK)
            high = _dealt_rows(bins)
    # What is drawn here and by the passes after it, what the second one may begin with, and the
    # highest scores: one launch.
    early = _begins_with(query, key, structure) if "drop" in found else range(0)
    told = batch * heads if early else 0
    fresh = _undrawn(query, LAUNCHES + told + batch * heads)
    drawn, highest = fresh[: LAUNCHES + told], fresh[LAUNCHES + told :]
    counts = drawn, drawn[LAUNCHES:] if early else None, early.start, early.stop
    if "max_logit" in wanted:
        found["max_logit"] = highest.view(torch.float32).view(batch, heads)
    if count or "drop" in found:
        found["drawn"] = drawn
    tiles = _described(query, BLOCK), _described(key, BLOCK), _described(value, BLOCK)
    output = found["output"].view(batch * heads, queries, width)
    sent = _tiles(output, output.shape, output.stride(), (1, ROWS, width))
    written = (
        found["lse"], found.get("entropy"), found.get("peak"),
        found.get("max_logit"), found.get("distance"), found.get("bar"), found.get("drop"),
    )  # fmt: skip
    bits = high.bit_length() - 1
    asked: Any = {
        "D": width, "ENTROPY": "entropy" in wanted, "PEAK": "peak" in wanted,
        "HIGHEST": "max_logit" in wanted, "DISTANCE": "distance" in wanted, "BAR": count > 0,
        "DROP": "drop" in found,
    }  # fmt: skip
    apart = keys - queries if causal or "distance" in wanted else keys
    given: Any = asked | {
        "c": structure.scale * LOG2E, "STAGES": STAGES, "CAUSAL": causal,
        "EVEN": apart % BLOCK == 0,
    }  # fmt: skip
    _kernels().forward[(work.programs,)](
        *tiles, sent, *written, None, *counts, *work.whole, queries, keys, bits, **given,
        CUT=False, **EARLY,
    )  # fmt: skip
    if work.cut:
        kept = found["lse"].new_empty(work.programs, 2, BLOCK, _kept_of_a_row(width))
        _kernels().forward[(work.programs,)](
            *tiles, sent, *written, kept, None, None, 0, 0, *work, queries, keys, bits, **given,
            CUT=True, **EARLY,
        )  # fmt: skip
        _kernels().join[(work.cut, BLOCK // ROWS)](
            output, *written, kept, *work, queries, bits, **asked, num_warps=width // 8
        )
    return found


def _begins_with(query: Tensor, key: Tensor, structure: Structure) -> range:
    """Of all heads those with which the second pass begins, before the forward pass has ended.

    None of a causal call: its last blocks are short, and soon waited for.
    """
    work = _work(query, key, key.shape[2], TEAMS * ROWS, structure)
    if structure.kind == CAUSAL or work.items < 4 * work.programs:
        return range(0)
    half = work.items // 2  # as _from_the_middle in hopper/roles.py
    return range(half // work.blocks, (half + work.programs - 1) // work.blocks + 1)


class Dealt(NamedTuple):
    """Where queries lie that are dealt out to bins: steps along the outermost axis."""

    batch: int = 0
    head: int = 0
    inner: int = 0  # and along the innermost, where heads lie beside each other


class _Bins(NamedTuple):
    """How a map's bins lie in the tiles."""

    a_tile: int = 1  # bins of queries, or parts of them
    tiles: int = 1  # tiles a bin of queries
    unit: int = 16  # keys that are summed at once
    dealt: Dealt | None = None
    parts: int = 1  # a bin is taken for so many, which ``pool`` puts together


def _bins(query: Tensor, keys: int, grid: tuple[int, int] | None) -> _Bins | None:
    """None where bins and tiles do not fit; one bin of queries where there is no grid."""
    _, heads, queries, width = query.shape
    if grid is None:
        return _Bins(tiles=-(-queries // BLOCK))
    rows, columns = grid
    if queries % rows or keys % columns:
        return None
    high, wide = queries // rows, keys // columns
    unit = 16 if wide % 16 == 0 else 8
    if wide % unit or (unit == 8 and wide != 8):
        return None
    if rows * keys // unit > 2**29:  # places in a head's map are counted in 32 bits
        return None
    if high % BLOCK == 0:
        return _Bins(1, high // BLOCK, unit)
    if queries % BLOCK or high not in (8, 16, 32, 64):
        return None
    together = max(BLOCK // high, LANES)  # each lane has bins of its own
    groups = queries // (LANES * BLOCK // together)  # a head has
    step = query.stride()
    if step[1] == queries * step[2] and step[0] == heads * step[1]:
        dealt = Dealt(heads * groups, groups, 0)
    elif step[1] == width and step[0] == queries * step[2]:
        dealt = Dealt(groups, 0, width)
    else:
        return _Bins(BLOCK // high, 1, unit) if BLOCK // high < LANES else None
    return _Bins(together, 1, unit, dealt, together * high // BLOCK)


def _dealt_tiles(query: Tensor, bins: _Bins, steps: int, strip: int | None) -> Any:
    """The queries in the order in which a tile holds them: [groups, turns, lanes, pairs, width].

    Or one of its steps: these have some of its groups, or where it is one, some of the turns.
    """
    assert bins.dealt is not None
    batch, heads, queries, width = query.shape
    high = BLOCK // bins.a_tile
    row = query.stride(2)
    beside = bins.dealt.inner > 0
    groups = (batch if beside else batch * heads) * queries // (LANES * high)
    shape = (groups, high // PAIR, LANES, PAIR, heads * width if beside else width)
    strides = (LANES * high * row, PAIR * row, high * row, row, 1)
    together = bins.a_tile // LANES
    turns = high // PAIR if together >= steps else high // PAIR // steps
    block = (max(together // steps, 1), turns, LANES, PAIR, strip or width)
    return _tiles(query, shape, strides, block)


def _query_tiles(query: Tensor, bins: _Bins, steps: int = 1, strip: int | None = None) -> Any:
    """Tiles of queries, or steps of them, dealt out where bins want it."""
    if bins.dealt is None:
        return _described(query, BLOCK // steps, strip)
    return _dealt_tiles(query, bins, steps, strip)


def _dealt_rows(bins: _Bins) -> int:
    """How many of LANES bins that a tile deals out each has; pairs in turns are the plain order."""
    return PAIR if bins.dealt is None else BLOCK // bins.a_tile


def _drop(lse: Tensor, bins: _Bins, width: int) -> Tensor:
    """What a query's scores lose before they are weights, base 2, in the order of its tile."""
    drop = pad(lse * -LOG2E, (0, -lse.shape[2] % BLOCK), value=-torch.inf)
    if bins.dealt is not None:
        turns = _dealt_rows(bins) // PAIR
        drop = drop.reshape(-1, LANES, turns, PAIR).transpose(1, 2)
    if width == CARRIED:
        drop = drop.reshape(-1, 2, LANES, PAIR).transpose(1, 2)
    return drop.contiguous()


def drop_of(query: Tensor, key: Tensor, lse: Tensor, grid: tuple[int, int] | None) -> Tensor:
    """What ``forward`` leaves for ``columns`` and ``backward``, where it was not these kernels'."""
    bins = _bins(query, key.shape[2], grid)
    assert bins is not None
    return _drop(lse, bins, query.shape[3])


def receives(
    query: Tensor, key: Tensor, structure: Structure, grid: tuple[int, int] | None
) -> bool:
    """Whether ``columns`` takes a call; ``grid`` is that of a map, where one is wanted."""
    return _second_pass(query, key, structure, grid) is not None


def _second_pass(
    query: Tensor, key: Tensor, structure: Structure, grid: tuple[int, int] | None
) -> _Bins | None:
    """The bins with which ``columns`` takes a call; None where it does not."""
    if not _fits(structure, query, key):
        return None
    if not _busy(query, _work(query, key, key.shape[2], TEAMS * ROWS, structure)):
        return None  # launch.columns has smaller blocks, and more of them
    rows, cols = grid or (1, 1)
    if query.shape[0] * query.shape[1] * rows * cols >= 2**31:
        return None
    return _bins(query, key.shape[2], grid)


class _Receiving(NamedTuple):
    """What ``columns`` and ``backward`` need alike to tell what keys get."""

    bins: _Bins
    work: Work
    sizes: Sizes
    units: dict[str, Tensor]  # maps as kernels write them: of some keys each, to be pooled
    given: dict[str, Any]


def room(
    query: Tensor, key: Tensor, wanted: Collection[str], grid: tuple[int, int] | None
) -> dict[str, Tensor]:
    """Room for what ``columns`` and ``backward`` find."""
    batch, heads = query.shape[:2]
    shapes = {"received": (key.shape[2],), "map": grid or (), "map_peak": grid or ()}
    return {
        name: query.new_empty(batch, heads, *shape, dtype=torch.float32)
        for name, shape in shapes.items()
        if name in wanted
    }


def _receiving(
    query: Tensor,
    key: Tensor,
    structure: Structure,
    found: dict[str, Tensor],
    grid: tuple[int, int] | None,
    block: int,
) -> _Receiving:
    """For blocks of so many keys."""
    batch, heads, queries, width = query.shape
    keys = key.shape[2]
    bins = _bins(query, keys, grid)
    assert bins is not None
    rows, cols = grid or (1, 1)
    work = _work(query, key, keys, block, structure)
    tiles = -(-queries // BLOCK)
    kept_rows = rows * bins.parts
    count = work.blocks * block // bins.unit  # units of a row of the map
    done = keys // cols // bins.unit * bins.parts == 1  # then there is nothing to pool
    units = {name: cells for name, cells in found.items() if name != "received"}
    if not done or count > cols:
        units = {
            name: cells.new_empty(batch, heads, kept_rows, count) for name, cells in units.items()
        }
    sizes = Sizes(
        keys, keys - queries, tiles, bins.tiles, kept_rows,
        bins.tiles if "map" in found else 1, count,
    )  # fmt: skip
    given: Any = {
        "c": structure.scale * LOG2E, "D": width, "BINS": bins.a_tile, "UNIT": bins.unit,
        "LONG": bins.tiles > 1 or grid is None, "CAUSAL": structure.kind == CAUSAL,
        "RECEIVED": "received" in found, "MAP": "map" in found, "MAP_PEAK": "map_peak" in found,
        "DONE": done,
    }  # fmt: skip
    return _Receiving(bins, work, sizes, units, given)


def _pool(
    receiving: _Receiving, found: dict[str, Tensor], queries: int, grid: tuple[int, int] | None
) -> None:
    """Make a map's cells of its units."""
    bins, _, sizes, units, given = receiving
    rows, cols = grid or (1, 1)
    if given["DONE"]:
        for name, cells in units.items():
            if cells is not found[name]:
                found[name].copy_(cells[..., :cols])
    elif units:
        each = sizes.keys // cols // bins.unit  # units a cell
        wide = min(64, 1 << (each - 1).bit_length())
        some = POOLED // wide
        count = found["map"].numel()
        pool[(-(-count // some),)](
            units["map"], units.get("map_peak"), found["map"], found.get("map_peak"), count, rows,
            cols, units["map"].shape[3], each, queries // rows, sizes.offset, PARTS=bins.parts,
            UNIT=bins.unit, BC=some, BK=wide, EVEN=each == wide, CAUSAL=given["CAUSAL"],
            PEAK="map_peak" in units, num_warps=4,
        )  # fmt: skip


def columns(
    query: Tensor,
    key: Tensor,
    structure: Structure,
    found: dict[str, Tensor],
    grid: tuple[int, int] | None,
    drop: Tensor,
    drawn: Tensor | None = None,
) -> None:
    """What keys get over all queries, as ``launch.columns``, into the ``room`` for it.

    ``drop`` and ``drawn`` are what ``forward`` left.
    """
    queries, width = query.shape[2:]
    receiving = _receiving(query, key, structure, found, grid, TEAMS * ROWS)
    bins, work, sizes, units, given = receiving
    causal = given["CAUSAL"]
    if not causal:
        work = _sharing(work, sizes.tiles, sizes.together)
    read = (
        _query_tiles(query, bins, strip=STRIP), _described(key, ROWS, STRIP),
        _described_rows(drop) if width == CARRIED else drop, bins.dealt or Dealt(),
        found.get("received"),
    )  # fmt: skip
    written = units.get("map"), units.get("map_peak")
    given |= {"STAGES": TILE_STAGES[width], "EVEN": sizes.offset % ROWS == 0}
    diagonal = causal and sizes.offset == 0 and bins.a_tile >= 2 * LANES
    done = drawn[LAUNCHES:] if drawn is not None and len(drawn) > LAUNCHES else None
    drawn = _undrawn(query) if drawn is None else drawn[1:]
    _kernels().columns[(work.programs,)](
        *read, None, *written, drawn, done, *work.whole, *sizes, **given, DIAGONAL=diagonal,
        CUT=False, **ALL_TEAMS,
    )  # fmt: skip
    if work.cut:
        kept = drop.new_empty(work.programs, 2, TEAMS * ROWS)
        _kernels().columns[(work.programs,)](
            *read, kept, *written, None, None, *work, *sizes, **given, DIAGONAL=False, CUT=True,
            **ALL_TEAMS,
        )  # fmt: skip
        if "received" in found:
            _kernels().add[(work.cut,)](found["received"], kept, *work, *sizes, num_warps=4)
    _pool(receiving, found, queries, grid)


def differentiates(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    grid: tuple[int, int] | None,
) -> bool:
    """Whether ``backward`` takes a call; ``grid`` is that of a map, where one is wanted.

    It takes them where it is faster than cuDNN's with a second pass before it, by measurement.
    Beyond the last key there is no mask, save in a causal call.
    """
    return (
        _fits(structure, query, key, value)
        and (structure.kind == CAUSAL or key.shape[2] % BLOCK == 0)
        and query.shape[2] >= SHORTEST[query.shape[3]]
        and query.shape[1] == key.shape[1]
        and receives(query, key, structure, grid)
    )


def _as_queries(
    grad: Tensor, key: Tensor, structure: Structure, bins: _Bins, grid: tuple[int, int] | None
) -> tuple[Tensor, _Bins]:
    """The output's gradient so that it can be read as the queries are, and its bins."""
    if grad.stride(3) == 1 and _fits(structure, grad, key):
        if bins.dealt is None:
            return grad, bins
        its_own = _bins(grad, key.shape[2], grid)
        if its_own is not None and its_own.dealt is not None:
            return grad, its_own
    grad = grad.clone(memory_format=torch.contiguous_format)  # it may start anywhere
    its_own = bins if bins.dealt is None else _bins(grad, key.shape[2], grid)
    assert its_own is not None
    return grad, its_own


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    grad: Tensor,
    drop: Tensor,
    structure: Structure,
    found: dict[str, Tensor],
    grid: tuple[int, int] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a plain call, and on the way what keys get, as ``columns``."""
    batch, heads, queries, width = query.shape
    receiving = _receiving(query, key, structure, found, grid, BLOCK)
    bins, work, sizes, units, given = receiving
    if width != DRAWING:
        work = work._replace(singly=0)
    grad, grad_bins = _as_queries(grad, key, structure, bins, grid)
    bits = _dealt_rows(bins).bit_length() - 1
    sums = drop.new_empty(batch, heads, sizes.tiles * BLOCK, width)
    delta = torch.empty_like(drop)
    drawn = torch.empty(1, dtype=torch.int32, device=query.device)
    drops = drop if width == CARRIED else torch.empty_like(drop)
    halves = sizes.tiles * BLOCK // ROWS, batch * heads
    _kernels().prepare[halves](
        View.of(output), View.of(grad), drop, drops, delta, sums, drawn, heads, queries, bits,
        D=width, num_warps=4,
    )  # fmt: skip
    grads = torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)
    steps = width // 64  # a tile
    _kernels().backward[(work.programs,)](
        _query_tiles(query, bins, steps), _query_tiles(grad, grad_bins, steps),
        _described(key, BLOCK), _described(value, BLOCK),
        _described_rows(drops, BLOCK // steps), _described_rows(delta, BLOCK // steps),
        bins.dealt or Dealt(), grad_bins.dealt or Dealt(), sums, View.of(grads[1]),
        View.of(grads[2]), found.get("received"), units.get("map"), units.get("map_peak"), drawn,
        *work, *sizes, **given, scale=structure.scale, STAGES=STEP_STAGES[width],
        num_warps=4,
    )  # fmt: skip
    _kernels().gather[halves](
        sums, View.of(grads[0]), heads, queries, bits, structure.scale, D=width, num_warps=4
    )
    _pool(receiving, found, queries, grid)
    return grads


def collects(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    wanted: Collection[str],
    count: int,
) -> bool:
    """Whether ``forward`` can tell the bar of so many keys, and ``top`` find them with it."""
    if not 0 < count <= PLACES or structure.scale <= 0:
        return False
    if not attends(query, key, value, structure, wanted):
        return False
    return _busy(query, _work(query, key, query.shape[2], TEAMS * ROWS, structure))


def top(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    bar: Tensor,
    structure: Structure,
    count: int,
    found: dict[str, Tensor],
    left: Tensor,
    drawn: Tensor | None = None,
    followed: bool = False,
) -> None:
    """The top keys, but for rows that are ``left`` to rows.search.

    ``bar`` and ``drawn`` are what ``forward`` left, ``followed`` by another launch.
    """
    queries, width = query.shape[2:]
    ready = followed or drawn is None
    keys = key.shape[2]
    causal = structure.kind == CAUSAL
    work = _work(query, key, queries, TEAMS * ROWS, structure)
    drawn = _undrawn(query) if drawn is None else drawn[2:]
    _kernels().top[(work.programs,)](
        _described(query, ROWS, STRIP), _described(key, BLOCK, STRIP), bar, lse, left,
        *found.values(), drawn, *work, queries, keys, -(-keys // BLOCK), int(ready),
        structure.scale * LOG2E, D=width, STAGES=KEY_STAGES[width], CAUSAL=causal,
        EVEN=(keys - queries if causal else keys) % BLOCK == 0, COUNT=count,
        **ALL_TEAMS,
    )  # fmt: skip
