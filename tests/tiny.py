"""Tiny models of transformers with every number disturbed, and how ours are held against them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from regard import Padding

transformers.logging.disable_progress_bar()
FIVE = int(transformers.__version__.partition(".")[0]) >= 5


def of_five(why: str) -> pytest.MarkDecorator:
    """For what transformers does right, or lets be seen, from 5 on; 4.57 is supported too."""
    return pytest.mark.skipif(not FIVE, reason=f"transformers before 5 {why}")


def disturb(model: torch.nn.Module) -> torch.nn.Module:
    """Every parameter and buffer moved, so that no bias is 0 and no norm 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model.eval()


def agree(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Equal within a share of the largest number expected."""
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"{error:.2e} of the scale, more than {tolerance:.0e}"


def same_files(one: Path, other: Path) -> None:
    """Two checkpoints that hold the same tensors, to the byte."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


def padded(rows: list[list[int]], side: str, filler: int) -> tuple[Tensor, Padding, Tensor]:
    """Ids [batch, longest], our padding, and the attention mask of transformers."""
    longest = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        more = longest - len(row)
        ids.append([filler] * more + row if side == "left" else row + [filler] * more)
        real, not_real = [1] * len(row), [0] * more
        mask.append(not_real + real if side == "left" else real + not_real)
    padding = Padding([len(row) for row in rows], side=side)
    return torch.tensor(ids), padding, torch.tensor(mask)


def real(hidden: Tensor, row: int, length: int, side: str) -> Tensor:
    """What belongs to the real tokens of one row: [length, ...]."""
    return hidden[row, :length] if side == "right" else hidden[row, hidden.shape[1] - length :]
