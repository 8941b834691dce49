"""Linear layers for inference on the CPU: weights laid out for the processor, or as whole numbers.

``prepack`` changes where the numbers lie, so that a product need not sort them each time.
``quantize`` also makes them int8, a quarter of the memory to read: each output has a scale of its
own, and so has each input as it comes (https://arxiv.org/abs/2208.07339). What a layer
makes of a row depends on that row alone, whatever else is in the batch.

Both work on the model they are given, which can be neither trained nor saved from then on.
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
from regard.layers.linear import Parts, Prepacked, Quantized
from regard.layers.modules import Block
from regard.models.model import Model

M = TypeVar("M", bound=nn.Module)


def prepack(model: M) -> M:
    """Lay out the weights of all linear layers for this processor; the numbers stay the same.

    In float32 or bfloat16, on a CPU that oneDNN serves. It pays from a few rows on, as beams and
    batches have; float32 for one row at a time is better left alone.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=16, depth=1, heads=2)).eval()
    >>> with torch.no_grad():
    ...     before = model(torch.tensor([[1, 2, 3]]))
    ...     after = prepack(model)(torch.tensor([[1, 2, 3]]))
    >>> torch.allclose(before, after, atol=1e-5)
    True
    """
    for parameter in model.parameters():
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise InputError(
                f"prepack takes weights in float32 or bfloat16, but got {parameter.dtype}."
            )
    if not torch._C._has_mkldnn:
        raise InputError("This build of PyTorch has no oneDNN, which computes such layers.")
    half = any(parameter.dtype == torch.bfloat16 for parameter in model.parameters())
    if half and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        raise InputError("This processor does not compute in bfloat16. Take float32 or int8.")
    return _replace(model, Prepacked)


def quantize(model: M) -> M:
    """Make all linear layers int8; everything between them stays as it is.

    They are computed by a kernel that is built on this machine when first needed, which takes a C++
    compiler and some seconds.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=16, depth=1, heads=2)).eval()
    >>> with torch.no_grad():
    ...     before = model(torch.tensor([[1, 2, 3]]))
    ...     after = quantize(model)(torch.tensor([[1, 2, 3]]))
    >>> torch.allclose(before, after, atol=0.02)
    True
    """
    if isinstance(reason := build.library(), str):
        raise InputError(f"Layers of int8 need a kernel that cannot be had here: {reason}")
    return _replace(model, Quantized)


def _replace(model: M, make: Callable[[Tensor, Tensor | None], nn.Module]) -> M:
    """Put a layer of ``make`` in the place of every linear layer, and of the output."""
    if model.training:
        raise InputError("A model in training keeps its layers. Call model.eval() first.")
    if any(tensor.device.type != "cpu" for tensor in model.parameters()):
        raise InputError("Such layers are for the CPU. Move the model there with .to('cpu').")
    model.requires_grad_(False)
    across = {
        id(block.cross.qkv): block.cross.heads * block.cross.head_dim
        for block in model.modules()
        if isinstance(block, Block) and block.cross is not None
    }
    for module in list(model.modules()):
        if isinstance(module, Model) and (tied := module.tied()) is not None:
            module.head = make(*tied)
        for name, layer in list(module.named_children()):
            if not isinstance(layer, nn.Linear):
                continue
            if id(layer) in across:  # queries come from one side, keys and values from the other
                cuts = [0, across[id(layer)], layer.out_features]
                pieces = [
                    make(layer.weight[a:b], None if layer.bias is None else layer.bias[a:b])
                    for a, b in pairwise(cuts)
                ]
                setattr(module, name, Parts(pieces, cuts))
            else:
                setattr(module, name, make(layer.weight, layer.bias))
    if sys.platform == "linux":  # where glibc would keep what the old weights held
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)
    return model
