"""Linear layers for inference on the CPU: prepacked weights, or int8 weights.

``prepack`` stores weights in the layout that oneDNN's matrix product needs, which saves converting
them in each call. ``quantize`` stores int8 weights, a quarter of the size of float32. Each output
and each row of the input has its own scale (https://arxiv.org/abs/2208.07339), so a row's result
does not depend on the rest of the batch.

Both change the model in place. Afterwards it can be neither trained nor saved.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.kernels.cpu import build
from regard.layers.linear import Prepacked, Quantized, SplitLinear
from regard.layers.modules import Block
from regard.models.model import Model

M = TypeVar("M", bound=nn.Module)


def prepack(model: M) -> M:
    """Store the weights of all linear layers in this processor's layout, without changing them.

    Weights are float32 or bfloat16, on a CPU that oneDNN supports. Beams and batches become faster,
    but float32 with one row at a time does not.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=16, depth=1, heads=2)).eval()
    >>> with torch.no_grad():
    ...     before = model(torch.tensor([[1, 2, 3]]))
    ...     after = prepack(model)(torch.tensor([[1, 2, 3]]))
    >>> torch.allclose(before, after, atol=1e-5)
    True
    """
    dtypes = {parameter.dtype for parameter in model.parameters()}
    for dtype in dtypes - {torch.float32, torch.bfloat16}:
        raise InputError(f"prepack takes weights in float32 or bfloat16, but got {dtype}.")
    if not torch._C._has_mkldnn:
        raise InputError("prepack needs oneDNN, which this build of PyTorch does not have.")
    if torch.bfloat16 in dtypes and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise InputError("This processor does not compute in bfloat16. Use float32 or int8.")
    return _replace(model, Prepacked)


def quantize(model: M) -> M:
    """Replace all linear layers by int8 layers; other layers stay unchanged.

    The int8 kernel is compiled on first use, which needs a C++ compiler and a few seconds.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=16, depth=1, heads=2)).eval()
    >>> with torch.no_grad():
    ...     before = model(torch.tensor([[1, 2, 3]]))
    ...     after = quantize(model)(torch.tensor([[1, 2, 3]]))
    >>> torch.allclose(before, after, atol=0.02)
    True
    """
    if isinstance(reason := build.library(), str):
        raise InputError(f"int8 layers need a kernel that cannot be built here: {reason}")
    return _replace(model, Quantized)


def _replace(model: M, make: Callable[[Tensor, Tensor | None], nn.Module]) -> M:
    """Replace every linear layer and the output layer by the module that ``make`` returns."""
    if model.training:
        raise InputError("A model in training mode cannot be changed. Call model.eval() first.")
    if any(tensor.device.type != "cpu" for tensor in model.parameters()):
        raise InputError("These layers are for the CPU. Move the model there with .to('cpu').")
    model.requires_grad_(False)
    across = {
        id(block.cross.qkv): block.cross.heads * block.cross.head_dim
        for block in model.modules()
        if isinstance(block, Block) and block.cross is not None
    }
    for module in list(model.modules()):
        if isinstance(module, Model) and module.generates and module.head is None:
            if (output := module.output_weights()) is not None:
                weight, bias = output
                module.head = make(weight, bias if bias is not None and bias.any() else None)
        for name, layer in list(module.named_children()):
            if not isinstance(layer, nn.Linear):
                continue
            if id(layer) in across:  # keys and values come from the encoder, queries do not
                cuts = [0, across[id(layer)], layer.out_features]
                pieces = [
                    make(layer.weight[a:b], None if layer.bias is None else layer.bias[a:b])
                    for a, b in pairwise(cuts)
                ]
                setattr(module, name, SplitLinear(pieces, cuts))
            else:
                setattr(module, name, make(layer.weight, layer.bias))
    if sys.platform == "linux":  # glibc would otherwise keep the memory of the old weights
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    return model
