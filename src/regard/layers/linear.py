"""Linear layers for inference: prepacked, quantized to int8, and split into pieces."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.kernels.cpu import build

PANEL, QUAD, DEPTH = 32, 4, 64  # the same layout of weights as in linear.cpp


class Prepacked(nn.Module):
    """A linear layer whose weights are in the blocked layout of oneDNN."""

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
    """An int8 linear layer with a scale for each output and for each row of the input."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        weight = weight.detach().float()
        self.outputs, self.inputs = weight.shape
        scale = weight.abs().amax(1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        whole = (weight / scale[:, None]).round().to(torch.int8)
        sums = whole.sum(1, dtype=torch.int32)
        whole = pad(whole, (0, -self.inputs % DEPTH, 0, -self.outputs % PANEL))
        depth = whole.shape[1]
        panels = whole.view(-1, PANEL, depth // QUAD, QUAD).transpose(1, 2).contiguous()
        bias = None if bias is None else bias.detach().float().contiguous()
        self.kept = (panels, sums, scale, bias)  # keep alive: ``weights`` points to these tensors
        self.weights = build.Weights(
            *(None if tensor is None else tensor.data_ptr() for tensor in self.kept),
            self.inputs, self.outputs, depth,
        )  # fmt: skip
        self.address = ctypes.addressof(self.weights)
        library = build.library()
        assert not isinstance(library, str), library
        self.linear, self.tiles = library.linear, library.has_tiles()

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., inputs]."""
        dtype, rows = x.dtype, x.numel() // self.inputs
        x = x.to(torch.float32).contiguous()
        y = torch.empty((*x.shape[:-1], self.outputs), dtype=torch.float32, device="cpu")
        threads = torch.get_num_threads()
        self.linear(self.address, x.data_ptr(), y.data_ptr(), rows, threads, self.tiles)
        return y if dtype is torch.float32 else y.to(dtype)


class SplitLinear(nn.Module):
    """A linear layer split by outputs: it computes all outputs or those of one piece."""

    def __init__(self, pieces: list[nn.Module], cuts: list[int]) -> None:
        super().__init__()
        self.pieces, self.cuts = nn.ModuleList(pieces), cuts
        self.out_features = cuts[-1]

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., inputs]."""
        return torch.cat([piece(x) for piece in self.pieces], dim=-1)

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The outputs ``start`` to ``stop``, which must be exactly the outputs of one piece."""
        piece = self.cuts.index(start)
        assert self.cuts[piece + 1] == stop
        result: Tensor = self.pieces[piece](x)
        return result
