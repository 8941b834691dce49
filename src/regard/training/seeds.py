"""Seed, save and restore all random number generators."""

from __future__ import annotations

import random
import sys
from collections.abc import Mapping
from typing import Any

import torch


def seed_all(seed: int) -> None:
    """Seed the random number generators of Python, PyTorch and, if imported, NumPy."""
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed % 2**32)


def random_state(device: torch.device) -> dict[str, Any]:
    """The state of all random number generators, as a tree to save."""
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(numbers), gauss],
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(device)] if device.type == "cuda" else [],
    }
    if "numpy" in sys.modules:
        name, keys, *rest = sys.modules["numpy"].random.get_state()
        state["numpy"] = [name, [int(value) for value in keys], *rest]
    return state


def set_random_state(state: Mapping[str, Any], device: torch.device) -> None:
    """Restore a state that :func:`random_state` returned."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(numbers), gauss))
    torch.set_rng_state(state["torch"])
    if device.type == "cuda" and state["cuda"]:
        torch.cuda.set_rng_state(state["cuda"][0], device)
    if "numpy" in state:
        import numpy

        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))
