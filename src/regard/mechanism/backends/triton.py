"""Seeing at full speed on the GPU, with our own kernels.

A mask that is a range of keys for each query, and a bias that depends on the distance alone, go
into the kernel as they are: two numbers a query, some numbers a head. What depends on one query's
row of weights (lse, entropy, peak, distance) comes out of the forward pass itself; what sums over
queries (received, map) needs the final lse, and takes a second pass over the keys, or comes out of
the backward pass.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch
from torch import Tensor

from regard.kernels import autograd
from regard.kernels.plan import (
    NAMED,
    RELATIVE,
    Request,
    Structure,
)
from regard.mechanism.backends.lowering import (
    dense_tensors,
    key_ranges,
    lower_structure,
    row_blocks,
)
from regard.mechanism.biases import Alibi, RelativeBuckets, RelativeContent
from regard.mechanism.call import TRANSFORMED, Call
from regard.mechanism.masks import Causal
from regard.mechanism.seeing import Deferred, Seen, finish, grid_of

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256  # of a head; beyond it a block no longer fits the registers of a multiprocessor
HEADS = 2**16 - 1  # of all sequences together: the most programs of a grid's second axis
FARTHEST = 2**20  # keys under RelativeContent: its distances are a grid's third axis
MOST = 64  # top keys; a tile has 128 places to find them by
_TRITON = find_spec("triton") is not None


def unavailable() -> str | None:
    if not _TRITON:
        return "Triton is not installed. It comes with PyTorch for CUDA."
    if not torch.cuda.is_available():
        return "there is no CUDA device."
    return None


def refuses(call: Call) -> str | None:
    if not call.query.is_cuda:
        return "the tensors are not on a CUDA device, which Triton compiles for."
    if call.see is None and call.bias is None and call.softcap is None:
        # Causal at one corner, or not at all.
        if call.mask is None or (
            isinstance(call.mask, Causal) and call.extent.queries in (1, call.extent.keys)
        ):
            return "PyTorch's own kernel is faster for a plain call."
    return unsupported(call)


def unsupported(call: Call) -> str | None:
    """Why the kernels cannot compute a call, wherever they run."""
    if call.empty:
        return "there is nothing to compute: a size is 0."
    if call.query.dtype not in DTYPES:
        return f"the kernels have no {call.query.dtype}."
    if call.dropout:
        return "the kernels have no dropout."
    if call.transformed:
        return TRANSFORMED
    if max(call.query.shape[-1], call.value.shape[-1]) > WIDEST:
        return f"a head is wider than {WIDEST}."
    if call.extent.batch * call.extent.heads > HEADS:
        return f"there are more than {HEADS} sequences times heads."
    if call.scale < 0:
        return "the kernels need a scale that is not below 0."
    if not key_ranges(call.mask):
        return f"the mask {call.mask!r} is not one range of keys for each query."
    if not isinstance(call.bias, Alibi | RelativeBuckets | RelativeContent | None):
        return f"the kernels have no {type(call.bias).__name__} bias."
    if isinstance(call.bias, RelativeContent):
        if any(tensor.dtype != call.query.dtype for tensor in call.bias.tensors):
            return f"the kernels need RelativeContent in the query's own {call.query.dtype}."
        if call.bias.query.shape[-1] > WIDEST:
            return f"RelativeContent is wider than {WIDEST}."
        if call.extent.keys > FARTHEST:
            return f"RelativeContent has more than {FARTHEST:,} keys."
        if call.see is not None and call.see.top:
            return "the kernels do not find the top keys under RelativeContent."
    if call.see is not None:
        if call.see.top > MOST:
            return f"the kernels find at most {MOST} top keys."
        if call.see.pairs is not None:
            return "the kernels do not look at single pairs."
        if call.see.weights:
            return "all weights at once are not streamed: rows and map are."
    return None


def run(call: Call) -> tuple[Tensor, Seen | None]:
    see, extent = call.see, call.extent
    structure = lower_structure(call)
    query, key, value = (
        dense_tensors(call.query),
        dense_tensors(call.key),
        dense_tensors(call.value),
    )
    if see is None:
        return _attend(query, key, value, structure, Request())[0]["output"], None
    wanted = [name for name in NAMED if getattr(see, name)]
    # Single rows have a gradient as plain PyTorch only.
    plain_rows = bool(see.rows) and (call.wants_gradient or structure.bias == RELATIVE)
    if plain_rows:
        wanted.remove("rows")
    if see.top:
        wanted += ["top_weights", "top_keys"]
    grid = (1, 1) if see.map is None else grid_of(see, extent)
    rows = () if plain_rows else tuple(see.rows)
    request = Request(tuple(wanted), grid, see.top, rows)
    found, settle = _attend(query, key, value, structure, request)
    output = found.pop("output")
    if not see.lse:
        del found["lse"]
    in_order = found.pop("rows", None)  # as they were asked for, so nothing is left to finish
    seen = finish(see, found, extent)
    if settle is not None:
        seen = Deferred.of(seen, settle)
    seen.rows = row_blocks(call, see) if plain_rows else in_order
    return output, seen


def _attend(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, request: Request
) -> tuple[dict[str, Tensor], Callable[[], None] | None]:
    if torch.compiler.is_compiling():
        from regard.kernels import compiled  # registers an operator, which takes a while

        return compiled.attend(query, key, value, structure, request), None
    return autograd.attend(query, key, value, structure, request)
