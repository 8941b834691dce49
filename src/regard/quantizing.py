"""Linear layers for inference on the CPU: weights laid out for the processor, or as whole numbers.

``arrange`` changes where the numbers lie, so that a product need not sort them each time.
``quantize`` also makes them int8, a quarter of the memory to read: each output has a scale of its
own, and so has each input as it comes (https://arxiv.org/abs/2208.07339). What becomes of a row
depends on that row alone, so a sentence fares the same alone or in a batch.

Both work on the model they are given, which can be neither trained nor saved from then on.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.errors import InputError
from regard.layers import Block
from regard.models.model import Model

M = TypeVar("M", bound=nn.Module)


class Arranged(nn.Module):
    """A linear layer whose weights lie in the blocks in which oneDNN reads them."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self.bias = bias

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., inputs]."""
        result: Tensor = torch.ops.mkldnn._linear_pointwise(
            x, self.weight, self.bias, "none", [], ""
        )
        return result


class Quantized(nn.Module):
    """A linear layer of int8, with a scale for each output and for each row of its input."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        whole = (weight / scale[:, None]).round().to(torch.int8)
        self.weight = torch.ops.onednn.qlinear_prepack(whole, None)
        self.scale, self.zeros = scale, torch.zeros(len(scale), dtype=torch.int32)
        self.bias = None if bias is None else bias.detach().float()
        self.most = torch.tensor(127.0)
        # For few rows and small weights oneDNN has no fast kernel: they get company.
        self.least = 16 if min(weight.shape) < 512 else 1

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., inputs]."""
        wide = x.float().view(-1, x.shape[-1])
        rows = len(wide)
        # A row of zeros is divided by 0 and becomes anything, which at the end is divided by inf.
        scale = self.most / wide.abs().amax(-1, keepdim=True)
        whole = (wide * scale).round_().to(torch.int8)
        if rows < self.least:
            whole = pad(whole, (0, 0, 0, self.least - rows))
        y = torch.ops.onednn.qlinear_pointwise(
            whole, 1.0, 0, self.weight, self.scale, self.zeros, None,
            1.0, 0, torch.float32, "none", [], "",
        )[:rows]  # fmt: skip
        y = y.div_(scale) if self.bias is None else torch.addcdiv(self.bias, y, scale)
        return y.view(*x.shape[:-1], -1).to(x.dtype)


class Parts(nn.Module):
    """A linear layer in pieces: all its outputs, or those of one piece."""

    def __init__(self, pieces: list[nn.Module], cuts: list[int]) -> None:
        super().__init__()
        self.pieces, self.cuts = nn.ModuleList(pieces), cuts
        self.out_features = cuts[-1]

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., inputs]."""
        return torch.cat([piece(x) for piece in self.pieces], dim=-1)

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The outputs ``start`` to ``stop``, which must be one piece."""
        piece = self.cuts.index(start)
        assert self.cuts[piece + 1] == stop
        result: Tensor = self.pieces[piece](x)
        return result


def arrange(model: M) -> M:
    """Lay out the weights of all linear layers for this processor; the numbers stay the same.

    In float32 or bfloat16, on a CPU that oneDNN serves. It pays from a few rows on, as beams and
    batches have; float32 for one row at a time is better left alone.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=16, depth=1, heads=2)).eval()
    >>> with torch.no_grad():
    ...     before = model(torch.tensor([[1, 2, 3]]))
    ...     after = arrange(model)(torch.tensor([[1, 2, 3]]))
    >>> torch.allclose(before, after, atol=1e-5)
    True
    """
    for parameter in model.parameters():
        if parameter.dtype not in (torch.float32, torch.bfloat16):
            raise InputError(
                f"arrange takes weights in float32 or bfloat16, but got {parameter.dtype}."
            )
    return _replace(model, Arranged)


def quantize(model: M) -> M:
    """Make all linear layers int8; everything between them stays as it is.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=16, depth=1, heads=2)).eval()
    >>> with torch.no_grad():
    ...     before = model(torch.tensor([[1, 2, 3]]))
    ...     after = quantize(model)(torch.tensor([[1, 2, 3]]))
    >>> torch.allclose(before, after, atol=0.02)
    True
    """
    return _replace(model, Quantized)


def _replace(model: M, make: Callable[[Tensor, Tensor | None], nn.Module]) -> M:
    """Put a layer of ``make`` in the place of every linear layer, and of the output."""
    if not torch._C._has_mkldnn:
        raise InputError("This build of PyTorch has no oneDNN, which computes such layers.")
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
    return model
