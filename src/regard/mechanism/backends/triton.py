"""The backend 'triton': fused attention with statistics, on every GPU that Triton compiles for.

The forward pass computes the fields of single queries (lse, entropy, peak, distance). Sums over
queries (received, map) need every query's final lse: a second pass over the keys computes them.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from regard.mechanism.backends.lowering import key_ranges, run_kernels
from regard.mechanism.biases import Alibi, RelativeBuckets, RelativeContent
from regard.mechanism.call import TRANSFORMED, Call
from regard.mechanism.masks import Causal
from regard.mechanism.seeing import Seen

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_WIDTH = 256  # the widest head whose blocks fit the registers of a multiprocessor
MAX_HEADS = 2**16 - 1  # heads times sequences: the limit of a grid's second axis
MAX_RELATIVE_KEYS = 2**20  # with RelativeContent, whose distances are a grid's third axis
MAX_TOP = 64  # top keys; the kernel selects them among 128 candidates of a tile
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
    if call.see is None and call.bias is None and call.softcap is None and call.sinks is None:
        # No mask, or a causal mask that PyTorch aligns in the same way.
        if call.mask is None or (
            isinstance(call.mask, Causal)
            and call.extent.query_start is None
            and call.extent.queries in (1, call.extent.keys)
        ):
            return "PyTorch's own kernel is faster for a plain call."
    return unsupported(call)


def unsupported(call: Call) -> str | None:
    """Why the kernels cannot compute a call, regardless of its device."""
    if call.empty:
        return "there is nothing to compute: a size is 0."
    if call.query.dtype not in DTYPES:
        return f"the kernels do not support {call.query.dtype}."
    if call.dropout:
        return "the kernels have no dropout."
    if call.transformed:
        return TRANSFORMED
    if max(call.query.shape[-1], call.value.shape[-1]) > MAX_WIDTH:
        return f"a head is wider than {MAX_WIDTH}."
    if call.extent.batch * call.extent.heads > MAX_HEADS:
        return f"batch times heads is more than {MAX_HEADS}."
    if call.scale < 0:
        return "the kernels need a scale of 0 or more."
    if call.see is not None and call.see.distance_variance:
        return "the kernels do not compute distance_variance, which needs the mean of a row first."
    if not key_ranges(call.mask):
        return "the mask is not one range of keys for each query."
    if not isinstance(call.bias, Alibi | RelativeBuckets | RelativeContent | None):
        return f"the kernels have no {type(call.bias).__name__} bias."
    if isinstance(call.bias, RelativeContent):
        if any(tensor.dtype != call.query.dtype for tensor in call.bias.tensors):
            return f"the kernels need RelativeContent in the query's dtype, {call.query.dtype}."
        if call.bias.query.shape[-1] > MAX_WIDTH:
            return f"RelativeContent is wider than {MAX_WIDTH}."
        if call.extent.keys > MAX_RELATIVE_KEYS:
            return f"RelativeContent has more than {MAX_RELATIVE_KEYS:,} keys."
        if not isinstance(call.extent.offset, int):
            return "RelativeContent needs one query_start for all sequences in the kernels."
        if call.see is not None and call.see.top:
            return "the kernels do not find the top keys under RelativeContent."
    if call.see is not None:
        if call.see.top > MAX_TOP:
            return f"the kernels find at most {MAX_TOP} top keys."
        if call.see.pairs is not None:
            return "the kernels do not compute single pairs."
        if call.see.weights:
            return "the kernels compute rows and maps of weights, but not all weights."
    return None


def run(call: Call) -> tuple[Tensor, Seen | None]:
    return run_kernels(call, hopper=False)
