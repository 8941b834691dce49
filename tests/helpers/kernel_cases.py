"""The cases of a kernel test: all on a GPU, or a core and a sweep if kernels are interpreted."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()


def cases(
    everything: Sequence[Any], core: Sequence[Any], sweep: Sequence[Any] | None = None
) -> list[Any]:
    """The parameters of a test: all on a GPU, else ``core``, and the rest with the mark sweep."""
    if CUDA:
        return list(everything)
    sweep = everything if sweep is None else sweep
    assert set(core) | set(sweep) <= set(everything)
    more = [case if isinstance(case, tuple) else (case,) for case in sweep if case not in core]
    return [*core, *(pytest.param(*case, marks=pytest.mark.sweep) for case in more)]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Enough combinations that any two values of any two axes occur together in one of them."""
    places = list(combinations(range(len(axes)), 2))
    rows = list(product(*(range(len(axis)) for axis in axes)))
    covers = {row: {(a, b, row[a], row[b]) for a, b in places} for row in rows}
    missing = set().union(*covers.values())
    chosen = []
    while missing:
        best = max(rows, key=lambda row: len(covers[row] & missing))
        missing -= covers[best]
        chosen.append(tuple(axis[at] for axis, at in zip(axes, best, strict=True)))
    return chosen
