"""Low-rank updates of linear layers (LoRA, https://arxiv.org/abs/2106.09685)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from regard.layers.modules import Linear


class LowRankLinear(Linear):
    """A frozen linear layer whose outputs, in ``pieces`` equal ranges, have updates of low rank.

    The pieces of an attention layer's ``qkv`` are queries, keys and values. With A and B of a
    piece, ``alpha / rank * B @ A`` is added to its rows of the weight. B starts as zeros, so the
    layer starts equal to ``layer``, whose weight and bias it shares. Dropout applies to the input
    of A.

    >>> layer = Linear(8, 12)
    >>> x = torch.ones(2, 8)
    >>> torch.equal(LowRankLinear(layer, pieces=3, rank=2, alpha=4)(x), layer(x))
    True
    """

    def __init__(
        self, layer: Linear, *, pieces: int, rank: int, alpha: float, dropout: float = 0.0
    ) -> None:
        super().__init__(layer.in_features, layer.out_features, False, device="meta")
        self.weight, self.bias = layer.weight, layer.bias
        for frozen in (self.weight, self.bias):
            if frozen is not None:
                frozen.requires_grad_(False)
        self.scale, self.dropout = alpha / rank, nn.Dropout(dropout)
        self.width = layer.out_features // pieces
        new = layer.weight.new_empty
        self.lora_a = nn.Parameter(new(pieces, rank, layer.in_features))
        self.lora_b = nn.Parameter(new(pieces, self.width, rank).zero_())
        for matrix in self.lora_a:
            nn.init.kaiming_uniform_(matrix, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., inputs]."""
        return super().forward(x) + self._update(x, self.lora_a, self.lora_b)

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The outputs ``start`` to ``stop`` for ``x`` [..., inputs], which are whole pieces."""
        pieces = slice(start // self.width, stop // self.width)
        return super().part(x, start, stop) + self._update(
            x, self.lora_a[pieces], self.lora_b[pieces]
        )

    def _update(self, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
        low = linear(self.dropout(x), a.flatten(0, 1))
        low = low.view(*x.shape[:-1], *a.shape[:2])  # [..., pieces, rank]
        return self.scale * torch.einsum("...pr,pwr->...pw", low, b).flatten(-2)
