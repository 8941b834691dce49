"""Seeing at full speed on the CPU, with a kernel of our own.

``attention.cpp`` does what ``tiled`` does, in one loop that stays in the cache. It is built on the
machine it runs on, by the compiler found there, when the first call comes that is worth it: a few
seconds, once; after that it lies in the user's cache folder. ``regard doctor`` builds it too.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from regard.kernels.cpu import build
from regard.kernels.plan import bins
from regard.mechanism.backends.tiled import by_rows
from regard.mechanism.biases import Alibi, Bias, RelativeBuckets
from regard.mechanism.call import TRANSFORMED, Call
from regard.mechanism.geometry import Extent
from regard.mechanism.masks import lower
from regard.mechanism.seeing import Pairs, See, Seen, finish, grid_of

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WORTH = 2**20  # scores from which a call is worth some seconds of a compiler, once
UNITS, MOST_CHUNKS, LEAST_ROWS = 256, 32, 64  # what threads share out: parts of heads
PAST = 32  # keys that the kernel's vectors may read past the last

_BY_QUERY = ("lse", "entropy", "peak", "distance")


def unavailable() -> str | None:
    found = build.library()
    return found if isinstance(found, str) else None


def refuses(call: Call) -> str | None:
    extent = call.extent
    if extent.device.type != "cpu":
        return f"the tensors are on {extent.device}, and the kernel is for the CPU."
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace a kernel in C++."
    if extent.batch * extent.heads * extent.queries * extent.keys < WORTH:
        return f"fewer than {WORTH:,} scores are not worth building a kernel for."
    return unsupported(call)


def unsupported(call: Call) -> str | None:
    """Why the kernel cannot compute a call, of whatever size."""
    if call.empty:
        return "there is nothing to compute: a size is 0."
    if call.query.dtype not in DTYPES:
        return f"the kernel has no {call.query.dtype}."
    if call.wants_gradient:
        return "the kernel has no gradients."
    if call.transformed:
        return TRANSFORMED
    if call.dropout:
        return "the kernel has no dropout."
    if call.mask is not None and not call.mask.interval(call.extent).exact:
        return f"the mask {call.mask!r} is not one range of keys for each query."
    if not isinstance(call.bias, Alibi | RelativeBuckets | None):
        return f"the kernel has no {type(call.bias).__name__} bias."
    return None


def run(call: Call) -> tuple[Tensor, Seen | None]:
    bias = None if call.bias is None else _by_distance(call.bias, call.extent)
    if bias is not None and not bias.isfinite().all():
        return by_rows(call)
    library = build.library()
    assert not isinstance(library, str), library
    dtype, extent = call.query.dtype, call.extent
    tiles = dtype == torch.bfloat16 and bool(library.has_tiles())
    query, key, value = (
        _dense(tensor if tiles else tensor.float()) for tensor in (call.query, call.key, call.value)
    )
    low, high = (end.expand(extent.batch, -1).contiguous() for end in lower(call.mask, extent)[:2])
    output = query.new_empty(*query.shape[:3], value.shape[-1])
    tensors = {"query": query, "key": key, "value": value, "low": low, "high": high}
    found = {} if call.see is None else _room(call.see, extent)
    chosen = {} if call.see is None else _chosen(call.see, extent)
    map_rows, map_columns = found["map"].shape[2:] if "map" in found else (0, 0)
    chunks = _chunks(extent, map_rows)
    if call.see is not None and call.see.received:
        found["received"] = _zeros(extent.batch, extent.heads, chunks, extent.keys)

    task = build.Task(
        batch=extent.batch, heads=extent.heads, key_heads=key.shape[1],
        queries=extent.queries, keys=extent.keys,
        width=query.shape[-1], value_width=value.shape[-1],
        threads=torch.get_num_threads(), chunks=chunks, map_rows=map_rows, map_columns=map_columns,
        kept_rows=found["kept"].shape[2] if "kept" in found else 0,
        pair_count=found["pairs"].shape[2] if "pairs" in found else 0,
        top=call.see.top if call.see is not None else 0,
        scale=call.scale, softcap=call.softcap or 0,
        bias_length=0 if bias is None else bias.shape[1],
        query_strides=query.stride()[:3], key_strides=key.stride()[:3],
        value_strides=value.stride()[:3],
    )  # fmt: skip
    sizes = (ctypes.c_int64 * 3)()
    library.sizes(ctypes.byref(task), tiles, sizes)
    names = ("packed_keys", "packed_values", "scratch")
    rooms = {n: query.new_empty(s, dtype=torch.uint8) for n, s in zip(names, sizes, strict=True)}
    if bias is not None:
        tensors["bias"] = bias
    for name, tensor in (tensors | chosen | found | rooms | {"output": output}).items():
        setattr(task, name, tensor.data_ptr())
    if not library.run(ctypes.byref(task), tiles):
        return by_rows(call)  # what is not finite must not reach those who may not attend to it
    return output.to(dtype), None if call.see is None else _seen(call.see, found, extent)


def _room(see: See, extent: Extent) -> dict[str, Tensor]:
    """Where the kernel writes what was asked for; what it does not touch holds what that means."""
    rows = (extent.batch, extent.heads, extent.queries)
    room = {name: _zeros(*rows) for name in see.asked if name in _BY_QUERY}
    if see.max_logit:
        room["highest"] = _zeros(*rows)
    if see.map is not None:
        room["lse"] = _zeros(*rows)  # tells which queries attend to anything
    for name in ("map", "map_peak"):
        if name in see.asked:
            room[name] = _zeros(*rows[:2], *grid_of(see, extent))
    if see.rows or see.weights:
        count = extent.queries if see.weights else len(see.rows)
        room["kept"] = _zeros(*rows[:2], count, extent.keys)
    if see.pairs is not None:
        room["pairs"] = _zeros(*rows[:2], len(see.pairs))
    if see.top:
        room["top_weights"] = _zeros(*rows, see.top)
        room["top_keys"] = torch.full((*rows, see.top), -1, device=extent.device)
    return room


def _chosen(see: See, extent: Extent) -> dict[str, Tensor]:
    """Which single weights are asked for: the place of each row that is kept, the pairs' keys."""
    found = {}
    if see.rows or see.weights:
        places = torch.arange(extent.queries, dtype=torch.int32, device=extent.device)
        if not see.weights:
            places.fill_(-1)
            asked = sorted(row % extent.queries for row in see.rows)
            for place, row in reversed(list(enumerate(asked))):  # of equals, the first is looked at
                places[row] = place
        found["places"] = places
    if isinstance(see.pairs, Pairs):
        every = torch.arange(extent.queries + 1, device=extent.device)
        firsts = torch.searchsorted(see.pairs.queries, every)
        found["pair_first"] = firsts.to(torch.int32)
        found["pair_keys"] = see.pairs.keys.to(torch.int32)
    return found


def _seen(see: See, found: dict[str, Tensor], extent: Extent) -> Seen:
    """What the kernel found, as it was asked for."""
    if see.received:
        found["received"] = found["received"].sum(2)  # over chunks
    if see.max_logit:
        found["max_logit"] = found.pop("highest").amax(-1)
    if see.map is not None:
        rows = found["map"].shape[2]
        attends = (found["lse"] > -torch.inf).float()
        row_of = bins(extent.queries, rows, attends.device)
        count = attends.new_zeros(*attends.shape[:2], rows)
        found["map_count"] = count.index_add_(2, row_of, attends)
        if not see.lse:
            del found["lse"]
    if "kept" in found:
        kept = found.pop("kept")
        if see.weights:
            found["weights"] = kept
        if see.rows:
            asked = sorted(row % extent.queries for row in see.rows)
            found["rows"] = kept[:, :, asked] if see.weights else kept
    return finish(see, found, extent)


def _chunks(extent: Extent, map_rows: int) -> int:
    """Into how many parts a head's rows are cut: enough for many cores, the same for any number."""
    wanted = -(-UNITS // (extent.batch * extent.heads))
    most = min(MOST_CHUNKS, max(1, extent.queries // LEAST_ROWS), map_rows or MOST_CHUNKS)
    return max(1, min(wanted, most))


def _by_distance(bias: Bias, extent: Extent) -> Tensor:
    """The bias of every distance, for each head: at ``j - i + queries - 1``, [heads, distances]."""
    distances = torch.arange(extent.keys - 1, -extent.queries, -1, device=extent.device)
    if isinstance(bias, Alibi):
        table = -bias.slopes.float()[:, None] * distances.abs()
    else:
        assert isinstance(bias, RelativeBuckets)
        table = bias.table.float()[bias.bucket(distances)].t()
    return torch.nn.functional.pad(table, (0, PAST)).contiguous()


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _zeros(*shape: int) -> Tensor:
    """Room for the kernel, whatever the defaults for new tensors are."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")
