"""Position encodings: sinusoidal, learned and rotary."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from regard.errors import InputError

Layout = Literal["interleaved", "half"]


def sinusoidal(
    positions: int | Tensor,
    dim: int,
    *,
    layout: Layout = "interleaved",
    base: float = 10000.0,
    device: torch.device | str | None = None,
) -> Tensor:
    """Sines and cosines of geometrically spaced frequencies (https://arxiv.org/abs/1706.03762).

    ``positions`` is a length, or a tensor of positions of any shape. The result has an additional
    last axis of size ``dim``. ``"interleaved"`` is the paper's sin, cos, sin, cos ...; ``"half"``
    puts all sines before all cosines, as Tensor2Tensor, Marian and Transformer-XL do.

    >>> [f"{number:.2f}" for number in sinusoidal(2, 4)[1]]
    ['0.84', '0.54', '0.01', '1.00']
    """
    _check("sinusoidal", dim, layout)
    if isinstance(positions, int):
        positions = torch.arange(positions, device=device)
    # Angles in float64: at position 100,000 a float32 angle is wrong in the third decimal.
    frequencies = base ** -(
        torch.arange(0, dim, 2, device=positions.device, dtype=torch.float64) / dim
    )
    angles = positions[..., None].double() * frequencies
    pair = (angles.sin().float(), angles.cos().float())
    if layout == "half":
        return torch.cat(pair, dim=-1)
    return torch.stack(pair, dim=-1).flatten(-2)


def _check(name: str, dim: int, layout: str) -> None:
    if dim < 2 or dim % 2:
        raise InputError(f"{name}(dim=...) must be even, but got {dim}.")
    if layout not in ("interleaved", "half"):
        raise InputError(f'layout must be "interleaved" or "half", but got {layout!r}.')


class LearnedPositions(nn.Module):
    """One learned vector per position, as in BERT and GPT-2."""

    def __init__(self, length: int, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(length, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Tensor) -> Tensor:
        """Look up the vectors of ``positions``, an integer tensor of any shape."""
        return nn.functional.embedding(positions, self.weight)


class Rotary(nn.Module):
    """Rotates pairs of dimensions of queries and keys by their position
    (https://arxiv.org/abs/2104.09864), so that scores depend on distances only.

    ``"half"`` pairs dimension i with i + dim/2, as most checkpoints do; ``"interleaved"`` pairs
    adjacent dimensions, as the paper does.
    """

    def __init__(self, dim: int, *, layout: Layout = "half", base: float = 10000.0) -> None:
        super().__init__()
        _check("Rotary", dim, layout)
        self.dim, self.layout, self.base = dim, layout, base

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Rotate ``x`` [..., length, dim] by ``positions`` [..., length], by default 0, 1, 2 ..."""
        if x.shape[-1] != self.dim:
            raise InputError(f"Rotary(dim={self.dim}) got vectors of {x.shape[-1]} dimensions.")
        if positions is None:
            positions = torch.arange(x.shape[-2], device=x.device)
        sin, cos = sinusoidal(positions, self.dim, layout="half", base=self.base).chunk(2, dim=-1)
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.layout == "half":
            first, second = wide.chunk(2, dim=-1)
            rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        else:
            first, second = wide[..., 0::2], wide[..., 1::2]
            rotated = torch.stack((first * cos - second * sin, second * cos + first * sin), dim=-1)
            rotated = rotated.flatten(-2)
        return rotated.to(x.dtype)
