"""PyTorch's scaled_dot_product_attention, with the cheapest exact form of each mask.

If a mask allows one range of keys for each query, the queries are cut into pieces. Queries with the
same range need only slices; queries whose range grows by one key each need the causal flag. Other
masks are applied to one block of rows at a time.

In PyTorch's kernels a masked NaN or infinity leaks, and there is no gradient if no query may attend
to any key. ``tiled.by_rows`` computes such calls. Values are checked on the CPU only; elsewhere the
keys that no query of a block may attend to are replaced by zeros.

On a GPU the kernels read 16 bytes at once and do not check every address: ``aligned`` copies
tensors of other layouts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from threading import Lock
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention

from regard.kernels.autograd import no_second_gradient
from regard.kernels.plan import aligned
from regard.mechanism.backends.tiled import all_finite, by_rows
from regard.mechanism.call import Call, vmap_randomness
from regard.mechanism.geometry import Extent, Tile, has_values
from regard.mechanism.masks import Causal, Mask, hulls, interval_on_host
from regard.mechanism.seeing import Seen

ROWS = 256  # queries that share one mask tensor
MIN_KEYS = 16  # with fewer keys PyTorch's CPU kernel returns 0 instead of NaN for a NaN query
MAX_BIAS_KEYS = 512  # with more keys a bias with a gradient takes more memory than the inputs


class Piece(NamedTuple):
    """A part of a call that one call of PyTorch's kernel computes."""

    batch: slice
    rows: range
    columns: range
    kind: Literal["full", "causal", "masked"]


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Context in which PyTorch's attention does not use cuDNN, for calls of many shapes.

    cuDNN needs about 0.3 s to plan each new shape (H200, torch 2.11), which would dominate the time
    of decoding, and of training on pairs. ``sdpa_kernel`` would take 0.1 ms a step.
    """
    enabled = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(enabled)


def refuses(call: Call) -> str | None:
    if call.see is not None:
        return "PyTorch's fused kernels do not show their weights."
    if call.sinks is not None:
        return "PyTorch's fused kernels have no attention sinks."
    if call.softcap is not None:
        return "PyTorch's fused kernels have no softcap."
    if call.empty:
        return "there is nothing to compute: a size is 0."
    if call.goes_forward:
        return "PyTorch's fused kernels have no forward gradient."
    if call.dropout and _functorch.RandomnessType.Different in vmap_randomness():
        return "PyTorch's fused kernels may refuse dropout under vmap(randomness='different')."
    bias = () if call.bias is None else call.bias.tensors
    if call.wants_gradient and any(tensor.requires_grad for tensor in bias):
        if call.extent.keys > MAX_BIAS_KEYS:
            return "PyTorch's fused kernels need n x n memory for the gradient of a bias."
        inputs = (call.query, call.key, call.value)
        if call.query.is_cuda and not any(tensor.requires_grad for tensor in inputs):
            return "PyTorch's fused kernels give a bias no gradient if no other input needs one."
    return None


def run(call: Call) -> tuple[Tensor, Seen | None]:
    extent, mask = call.extent, call.mask
    if extent.keys < MIN_KEYS and _query_broken(call):
        return by_rows(call)
    if call.bias is None:
        aligned = isinstance(mask, Causal) and extent.query_start is None
        if mask is None or (aligned and extent.queries == 1):
            return _fused(call, call.query, call.key, call.value), None
        if aligned and extent.queries == extent.keys:
            output = _fused(call, call.query, call.key, call.value, causal=True)
            return (output, None) if not _can_check(call) or _clean(output) else by_rows(call)
    pieces = _plan(call)
    if not any(piece.columns for piece in pieces):
        return by_rows(call)  # zeros with a gradient
    if any(len(piece.columns) < MIN_KEYS <= extent.keys for piece in pieces) and _query_broken(
        call
    ):
        return by_rows(call)
    if (
        any(piece.kind == "masked" for piece in pieces)
        and _can_check(call)
        and not all_finite(call)
    ):
        return by_rows(call)
    inputs = [(call.query, call.key, call.value)]  # one tuple of all sequences
    groups = [pieces]
    if pieces[0].batch != slice(None):
        ones = [1] * extent.batch
        inputs = list(zip(*(tensor.split_with_sizes(ones) for tensor in inputs[0]), strict=True))
        groups = [[] for _ in ones]
        for piece in pieces:
            groups[piece.batch.start].append(piece)
    sequences: list[Tensor] = []
    for own, (query, key, value) in zip(groups, inputs, strict=True):
        columns = [piece.columns for piece in own]
        queries = _parts(query, [piece.rows for piece in own])
        parts = zip(own, queries, _parts(key, columns), _parts(value, columns), strict=True)
        rows = [_piece(call, *part) for part in parts]
        causal = (row for piece, row in zip(own, rows, strict=True) if piece.kind == "causal")
        if _can_check(call) and not all(map(_clean, causal)):
            return by_rows(call)
        sequences.append(torch.cat(rows, dim=2) if len(rows) > 1 else rows[0])
    return (torch.cat(sequences) if len(sequences) > 1 else sequences[0]), None


def _parts(tensor: Tensor, ranges: Sequence[range]) -> Sequence[Tensor]:
    """The tensor at each range of its length.

    Ascending ranges become one split, whose gradient is one concatenation. The gradient of a slice
    would be as long as the whole tensor.
    """
    sizes, at = [], 0
    for part in ranges:
        if part and part.start < at:
            return [tensor[:, :, part.start : part.stop] for part in ranges]
        sizes += [part.start - at, len(part)] if part else [0, 0]
        at = part.stop if part else at
    return tensor.split_with_sizes([*sizes, tensor.shape[2] - at], dim=2)[1::2]


def _can_check(call: Call) -> bool:
    """Whether values can be read: not on a GPU (would synchronize), compiled or transformed."""
    if call.extent.device.type != "cpu" or torch.compiler.is_compiling():
        return False
    return not call.transformed


def _query_broken(call: Call) -> bool:
    """Whether a query is known to hold a NaN or infinity."""
    return _can_check(call) and not math.isfinite(call.query.sum(dtype=torch.float32).item())


def _clean(output: Tensor) -> bool:
    """Whether a causal call had finite keys and values: a NaN in one may leak to all queries.

    The last query attends to every key, so its output shows any NaN. A small output is summed
    completely, which is faster than slicing a row.
    """
    if output.numel() < 2**14:
        return math.isfinite(output.sum(dtype=torch.float32).item())
    # Sum over sequences and heads first: the rows are far apart in memory, so add whole vectors.
    rows = output.select(2, -1).sum((0, 1), dtype=torch.float32)
    return math.isfinite(rows.sum().item())


def _fused(
    call: Call,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
) -> Tensor:
    fit = _fit(call)
    query, key, value = fit(query), fit(key), fit(value)
    scale = call.scale
    if scale <= 0:
        # The causal kernel multiplies the mask's -inf by the scale: a scale of 0 would make it
        # NaN, and a negative scale would make it +inf.
        query, scale = query * (-1 if scale else 0), -scale or 1.0
    padded = query.is_cpu and (width := query.shape[-1]) != (wanted := value.shape[-1])
    if padded:
        # The CPU kernel needs keys and values of equal width; zero padding changes no result.
        missing = (0, abs(width - wanted))
        if width < wanted:
            query, key = pad(query, missing), pad(key, missing)
        else:
            value = pad(value, missing)
    output = scaled_dot_product_attention(
        query,
        key,
        value,
        mask,
        call.dropout,
        causal,
        scale=scale,
        enable_gqa=True if call.groups > 1 else False,  # noqa: SIM210 - it may be a SymBool
    )
    if not torch.compiler.is_compiling() and output.grad_fn is not None:
        output.grad_fn.register_hook(_name_second_gradient)
    if fit is aligned and output.requires_grad:
        output.register_hook(aligned)  # type: ignore[no-untyped-call]  # for the backward kernel
    return output[..., :wanted] if padded else output


def _name_second_gradient(grads: Sequence[Tensor | None], _: object) -> None:
    """Make a second backward pass that PyTorch does not implement name the backends that do."""
    for grad in grads:
        node = None if grad is None else grad.grad_fn
        if node is not None and node.name().endswith("NotImplemented"):
            node.register_prehook(_refuse_second_gradient)


def _refuse_second_gradient(_: object) -> None:
    raise no_second_gradient("sdpa")


def _fit(call: Call) -> Callable[[Tensor], Tensor]:
    """The function that copies a tensor if PyTorch's kernels cannot read its layout."""
    if call.extent.device.type != "cuda":
        return _plain
    if torch.compiler.is_compiling():  # addresses are unknown; strides are not
        return _even
    return _copy if call.transformed else aligned


def _plain(tensor: Tensor) -> Tensor:
    """Copy a tensor if its rows are strided or repeated: a row stride of 0 gives wrong sums."""
    _, _, row, last = tensor.stride()
    return tensor if last == 1 and row else tensor.contiguous()


def _even(tensor: Tensor) -> Tensor:
    """Like ``_plain``, but also copy if rows do not begin at multiples of 16 bytes, for a GPU."""
    _, _, row, last = tensor.stride()
    even = last == 1 and row and row * tensor.element_size() % 16 == 0
    return tensor if even else tensor.contiguous()


def _copy(tensor: Tensor) -> Tensor:
    return tensor.clone(memory_format=torch.contiguous_format)


def _piece(call: Call, piece: Piece, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    batch, rows, columns, kind = piece
    if not columns:
        return query.new_zeros(*query.shape[:3], value.shape[-1])
    if kind != "masked":
        return _fused(call, query, key, value, causal=kind == "causal")

    tile = Tile(call.extent, rows, columns)
    allowed = None if call.mask is None else call.mask.tile(tile)
    empty = None
    if allowed is not None:
        allowed = _of_rank_4(allowed)
        allowed = allowed[batch] if allowed.shape[0] > 1 else allowed
        if not _can_check(call):
            key, value = _without_unseen(key, allowed), _without_unseen(value, allowed)
        empty = ~allowed.any(-1, keepdim=True)  # [b, h, q, 1]
        allowed = allowed | empty
    if call.bias is None:
        output = _masked(call, query, key, value, allowed)
    else:
        dtype = torch.promote_types(query.dtype, torch.float32)
        bias = call.bias.tile(tile)
        if query.is_cuda:
            # The kernels need one dtype. A bias in another dtype than the query raises it to
            # float32, so that the bias is not rounded to half precision.
            dtype = query.dtype if bias.dtype == query.dtype else dtype
            query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        bias = bias.to(dtype)
        if allowed is not None:
            bias = bias.masked_fill(~allowed, -math.inf)
        bias = _of_rank_4(bias)
        if query.is_cuda:
            bias = _fit(call)(bias.expand(-1, -1, len(rows), len(columns)))
        output = _masked(call, query, key, value, bias).to(call.query.dtype)
    return output if empty is None else output.masked_fill(empty, 0)


def _of_rank_4(tensor: Tensor) -> Tensor:
    return tensor.reshape((1, 1, 1, 1)[: 4 - tensor.dim()] + tuple(tensor.shape))


def _without_unseen(tensor: Tensor, allowed: Tensor) -> Tensor:
    """Keys or values with zeros where no query may attend: 0 * NaN is NaN."""
    seen = allowed.any(-2, keepdim=True).any(1, keepdim=True)  # [b, 1, 1, k]
    return tensor.masked_fill(~seen.transpose(-1, -2), 0)


def _masked(call: Call, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
    if not query.is_cuda:
        return _fused(call, query, key, value, mask=mask)
    with _without_cudnn():
        return _fused(call, query, key, value, mask=mask)


_SWITCH = Lock()


@contextmanager
def _without_cudnn() -> Iterator[None]:
    """Switch cuDNN's attention off: PyTorch 2.11 gives it wrong masks.

    A float32 mask is read as half precision (pytorch#191612), a boolean one becomes -65504
    (pytorch#177868), and gradients may be NaN (pytorch#196678).
    """
    if torch.compiler.is_compiling():
        with sdpa_kernel([SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]):
            yield
        return
    with _SWITCH:
        enabled: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(enabled)


def _plan(call: Call) -> list[Piece]:
    """The pieces of a call, sequence by sequence, in the order of their rows."""
    mask, extent = call.mask, call.extent
    whole = Piece(slice(None), range(extent.queries), range(extent.keys), "masked")
    if torch.compiler.is_compiling() or not has_values(call.query):
        return [whole]
    static = extent.static and (mask is None or mask.static)
    if not (static or _can_check(call)):
        return [whole]
    if call.bias is not None or mask is None:
        return _rows_at_a_time(mask, extent)
    if static:
        return _static_plan(mask, extent)
    return _ranges(mask, extent) or _rows_at_a_time(mask, extent)


@lru_cache(maxsize=256)
def _static_plan(mask: Mask, extent: Extent) -> list[Piece]:
    return _ranges(mask, extent) or _rows_at_a_time(mask, extent)


def _rows_at_a_time(mask: Mask | None, extent: Extent) -> list[Piece]:
    return [
        Piece(slice(None), rows, columns, "masked")
        for rows, columns, _ in hulls(mask, extent, ROWS)
    ]


def _ranges(mask: Mask, extent: Extent) -> list[Piece] | None:
    """The pieces of a mask with one range of keys for each query; None if a mask is faster."""
    *ends, exact = interval_on_host(mask, extent)
    if not exact:
        return None
    low, high = (_table(end).clamp(0, extent.keys) for end in ends)
    low, high = low.masked_fill(low >= high, 0), high.masked_fill(low >= high, 0)
    sequences = max(len(low), len(high))
    by_query = low.shape[1] > 1 or high.shape[1] > 1
    if sequences > 1 and (not by_query or extent.queries <= ROWS):
        return None  # one small mask is faster than a call for each sequence
    low, high = (end.expand(sequences, extent.queries) for end in (low, high))
    pieces = []
    for index in range(sequences):
        batch = slice(None) if sequences == 1 else slice(index, index + 1)
        pieces += _runs(batch, low[index], high[index])
    few = len(pieces) <= sequences * (4 + extent.queries // 16)
    return pieces if few else None


def _table(end: int | Tensor) -> Tensor:
    """One end of an interval as [1 or batch, 1 or queries]."""
    return torch.full((1, 1), end, device="cpu") if isinstance(end, int) else end


def _runs(batch: slice, low: Tensor, high: Tensor) -> list[Piece]:
    """Cut one sequence into runs of queries whose ranges are equal or move by equal steps."""
    queries = len(low)
    steps = torch.stack((low.diff(), high.diff()), dim=1)  # [q - 1, 2]
    # The last index of each run of equal steps.
    lasts = (steps[1:] != steps[:-1]).any(1).nonzero()[:, 0].tolist()
    lows, highs, moves = low.tolist(), high.tolist(), steps.tolist()
    pieces: list[Piece] = []
    start = 0
    for last in [*lasts, queries - 2]:
        count = last + 1 - start  # the number of equal steps that start at this row
        if count < 1:
            continue
        step = moves[start]
        if step == [0, 0]:
            stop, kind = last + 2, "full"
        elif step == [0, 1] and highs[start] == lows[start] + 1:
            stop, kind = last + 2, "causal"
        elif count == 1:  # a jump to another range
            stop, kind = start + 1, "full"
        else:
            stop, kind = last + 2, "masked"
        pieces += _cut(batch, range(start, stop), lows, highs, kind)
        start = stop
    if start < queries:
        pieces += _cut(batch, range(start, queries), lows, highs, "full")
    return pieces


def _cut(batch: slice, rows: range, lows: list[int], highs: list[int], kind: str) -> list[Piece]:
    """Turn a run into one piece, or into blocks of rows if it needs a mask tensor."""
    size = ROWS if kind == "masked" else len(rows)
    pieces = []
    for start in range(rows.start, rows.stop, size):
        part = range(start, min(start + size, rows.stop))
        open_rows = [row for row in part if lows[row] < highs[row]]
        columns = range(lows[open_rows[0]], highs[open_rows[-1]]) if open_rows else range(0)
        pieces.append(Piece(batch, part, columns, kind))  # type: ignore[arg-type]
    return pieces
