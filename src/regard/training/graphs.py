"""Steps replayed as CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

A small model's step is a thousand short kernels, and Python is slower to launch them than the GPU
to run them. Batches are cut once, so each epoch has the shapes of the one before: a shape's first
step is computed as ever, its second is recorded, and all others are replayed in one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.training.parallel import on_each

Step = Callable[[Any, Tensor | float], Tensor]
MOST = 1024  # graphs; each holds some megabytes


class _Given(NamedTuple):
    batch: Any
    total: Tensor
    left: Any


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    given: list[Tensor]  # where it reads its input
    result: Tensor  # where it writes its result
    left: Any  # and what it leaves for the next step


class Replayed:
    """A function of a batch and of all targets of its step, to a tensor; one graph for each shape.

    It may read what the step before left, a memory say: ``left`` tells that, ``leave`` sets it.
    What else it reads and writes must stay where it is: weights, and gradients, which are set to
    0 and never to None.
    """

    def __init__(
        self,
        function: Callable[[Any, Tensor | float], Tensor],
        device: torch.device,
        left: Callable[[], Any],
        leave: Callable[[Any], None],
    ) -> None:
        self.function, self.device, self.left, self.leave = function, device, left, leave
        self.met: set[Any] = set()
        self.recorded: dict[Any, _Recorded] = {}
        self.pool: Any = None  # one for all: what a graph leaves there is not read by others

    def __call__(self, batch: Any, total: Tensor | float) -> Tensor:
        if not isinstance(total, Tensor):
            total = torch.full(
                (), float(total), device=self.device
            )  # a copy would wait for the device
        given = _Given(batch, total, self.left())
        key = form(given)
        found = self.recorded.get(key)
        if found is None:
            if key not in self.met or len(self.recorded) == MOST:
                self.met.add(key)
                return self.function(batch, total)
            found = self.recorded[key] = self._record(given)
        for place, tensor in zip(found.given, tensors(given), strict=True):
            place.copy_(tensor)
        found.graph.replay()
        self.leave(found.left)
        return found.result.clone()

    def _record(self, given: _Given) -> _Recorded:
        kept: _Given = on_each(given, Tensor.clone)
        graph = torch.cuda.CUDAGraph()
        self.leave(kept.left)
        with torch.cuda.graph(graph, pool=self.pool):
            result = self.function(kept.batch, kept.total)
        self.pool = graph.pool()
        return _Recorded(graph, tensors(kept), result, self.left())


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    found: list[Tensor] = []

    def note(tensor: Tensor) -> Tensor:
        found.append(tensor)
        return tensor

    on_each(tree, note)
    return found


def form(given: _Given) -> Any:
    """What two batches must have in common to be computed by the same kernels."""
    flags = tuple(part if isinstance(part, bool) else part is None for part in given.batch)
    return flags, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors(given))
