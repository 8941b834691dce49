"""The backend 'native': attention and its statistics on the CPU, by a kernel in C++.

``attention.cpp`` computes what ``tiled`` does, in one loop whose data stays in the CPU cache. The
first large call, or ``regard doctor``, compiles the kernel, which takes a few seconds. The compiled
library is kept in the user's cache folder.

If the inputs contain a NaN or infinity, ``tiled.by_rows`` computes the call, so that none leaks
through a mask.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from regard.kernels.cpu import build
from regard.mechanism.backends.tiled import by_rows, has_few_rows
from regard.mechanism.biases import Alibi, Bias, RelativeBuckets
from regard.mechanism.call import TRANSFORMED, Call
from regard.mechanism.geometry import Extent
from regard.mechanism.masks import lower
from regard.mechanism.seeing import Pairs, See, Seen, count_rows, finish, zeros

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MIN_SCORES = 2**20  # the backend refuses calls with fewer scores
UNITS = 256  # the wanted number of work units for threads: chunks of heads
MAX_CHUNKS = 32  # the maximum number of chunks of a head
MIN_CHUNK_ROWS = 64
PADDED_KEYS = 32  # the kernel may read this far beyond the last key


def unavailable() -> str | None:
    library = build.library()
    return library if isinstance(library, str) else None


def refuses(call: Call) -> str | None:
    extent = call.extent
    if extent.device.type != "cpu":
        return f"the tensors are on {extent.device}, but the kernel needs them on the CPU."
    if torch.compiler.is_compiling():
        return "torch.compile cannot trace a kernel in C++."
    if extent.batch * extent.heads * extent.queries * extent.keys < MIN_SCORES:
        return f"the call has fewer than {MIN_SCORES:,} scores, too few for a compiled kernel."
    if has_few_rows(call):
        return "the call has so few queries that packing the keys would take most of the time."
    return unsupported(call)


def unsupported(call: Call) -> str | None:
    """Why the kernel cannot compute a call, regardless of its size."""
    if call.empty:
        return "there is nothing to compute: a size is 0."
    if call.query.dtype not in DTYPES:
        return f"the kernel does not support {call.query.dtype}."
    if call.wants_gradient:
        return "the kernel has no gradients."
    if call.transformed:
        return TRANSFORMED
    if call.dropout:
        return "the kernel has no dropout."
    if call.mask is not None and not call.mask.interval(call.extent).exact:
        return "the mask is not one range of keys for each query."
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
    starts = extent.positions()[:, 0].to(torch.int32).expand(extent.batch).contiguous()
    tensors = {
        "query": query, "key": key, "value": value, "low": low, "high": high, "starts": starts,
    }  # fmt: skip
    fields = {} if call.see is None else _empty_fields(call.see, extent)
    chosen = {} if call.see is None else _chosen(call.see, extent)
    map_rows, map_columns = fields["map"].shape[2:] if "map" in fields else (0, 0)
    chunks = _chunks(extent, map_rows)
    if call.see is not None and call.see.received:
        fields["received"] = _zeros(extent.batch, extent.heads, chunks, extent.keys)

    task = build.Task(
        batch=extent.batch, heads=extent.heads, key_heads=key.shape[1],
        queries=extent.queries, keys=extent.keys,
        width=query.shape[-1], value_width=value.shape[-1],
        threads=torch.get_num_threads(), chunks=chunks, map_rows=map_rows, map_columns=map_columns,
        kept_rows=fields["kept"].shape[2] if "kept" in fields else 0,
        pair_count=fields["pairs"].shape[2] if "pairs" in fields else 0,
        top=call.see.top if call.see is not None else 0,
        scale=call.scale, softcap=call.softcap or 0,
        bias_heads=0 if bias is None else bias.shape[0],
        bias_length=0 if bias is None else bias.shape[1],
        query_strides=query.stride()[:3], key_strides=key.stride()[:3],
        value_strides=value.stride()[:3],
    )  # fmt: skip
    sizes = (ctypes.c_int64 * 3)()
    library.attention_buffers(ctypes.byref(task), tiles, sizes)
    names = ("packed_keys", "packed_values", "scratch")
    scratch = {n: query.new_empty(s, dtype=torch.uint8) for n, s in zip(names, sizes, strict=True)}
    if bias is not None:
        tensors["bias"] = bias
    if call.sinks is not None:
        tensors["sinks"] = call.sinks.float().contiguous()
    for name, tensor in (tensors | chosen | fields | scratch | {"output": output}).items():
        setattr(task, name, tensor.data_ptr())
    if not library.attention(ctypes.byref(task), tiles):
        return by_rows(call)  # an input is not finite
    return output.to(dtype), None if call.see is None else _seen(call.see, fields, extent)


def _empty_fields(see: See, extent: Extent) -> dict[str, Tensor]:
    """Tensors for the kernel's results; ``kept`` holds requested rows or all weights."""
    fields = zeros(see, extent, torch.float32)
    each_row = _zeros(extent.batch, extent.heads, extent.queries)
    if see.max_logit:
        fields["highest"] = each_row.clone()
    if see.map is not None:
        fields["lse"] = each_row  # -inf where a query may attend to no key
    rows, weights = fields.pop("rows", None), fields.pop("weights", None)
    kept = rows if weights is None else weights
    return fields if kept is None else fields | {"kept": kept}


def _chosen(see: See, extent: Extent) -> dict[str, Tensor]:
    """The requested rows and pairs as index tensors for the kernel."""
    tensors = {}
    if see.rows or see.weights:
        places = torch.arange(extent.queries, dtype=torch.int32, device=extent.device)
        if not see.weights:
            places.fill_(-1)
            rows = sorted(row % extent.queries for row in see.rows)
            for place, row in reversed(
                list(enumerate(rows))
            ):  # a repeated row keeps its first place
                places[row] = place
        tensors["places"] = places
    if isinstance(see.pairs, Pairs):
        every = torch.arange(extent.queries + 1, device=extent.device)
        firsts = torch.searchsorted(see.pairs.queries, every)
        tensors["pair_first"] = firsts.to(torch.int32)
        tensors["pair_keys"] = see.pairs.keys.to(torch.int32)
    return tensors


def _seen(see: See, fields: dict[str, Tensor], extent: Extent) -> Seen:
    """Turn the fields of the kernel into the requested fields."""
    if see.received:
        fields["received"] = fields["received"].sum(2)  # over chunks
    if see.max_logit:
        fields["max_logit"] = fields.pop("highest").amax(-1)
    if see.map is not None:
        fields["map_count"] = count_rows(see, extent, (fields["lse"] > -torch.inf).float())
        if not see.lse:
            del fields["lse"]
    if "kept" in fields:
        kept = fields.pop("kept")
        if see.weights:
            fields["weights"] = kept
        if see.rows:
            rows = sorted(row % extent.queries for row in see.rows)
            fields["rows"] = kept[:, :, rows] if see.weights else kept
    return finish(see, fields, extent)


def _chunks(extent: Extent, map_rows: int) -> int:
    """The number of chunks of a head's rows, which does not depend on the number of cores."""
    wanted = -(-UNITS // (extent.batch * extent.heads))
    most = min(MAX_CHUNKS, max(1, extent.queries // MIN_CHUNK_ROWS), map_rows or MAX_CHUNKS)
    return max(1, min(wanted, most))


def _by_distance(bias: Bias, extent: Extent) -> Tensor:
    """The bias of every distance from query i to key j at index ``j - i + queries - 1``.

    Shape [heads, distances], or [batch * heads, distances] if the positions differ by sequence.
    """
    farthest = extent.offset + extent.queries - 1  # the position of the last query
    count = extent.queries + extent.keys - 1
    distances = (farthest - torch.arange(count, device=extent.device)).view(-1, 1, count)
    if isinstance(bias, Alibi):
        table = -bias.slopes.float()[:, None] * distances.abs()
    else:
        assert isinstance(bias, RelativeBuckets)
        table = bias.table.float()[bias.bucket(distances[:, 0])].transpose(1, 2)
    return torch.nn.functional.pad(table.flatten(0, 1), (0, PADDED_KEYS)).contiguous()


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _zeros(*shape: int) -> Tensor:
    """Zeros in float32 on the CPU, whatever the default dtype and device are."""
    return torch.zeros(shape, dtype=torch.float32, device="cpu")
