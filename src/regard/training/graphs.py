"""Replay steps as CUDA graphs (https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).

A step of a small model has about a thousand short kernels, and Python launches them more slowly
than the GPU runs them. For each shape of a batch, the first step runs without a graph, the second
is recorded, and later steps replay the graph in one launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.evaluation.losses import map_tensors

Step = Callable[[Any, Tensor | float], Tensor]
MAX_GRAPHS = 1024  # each holds some megabytes


class _Given(NamedTuple):
    batch: Any
    total: Tensor
    state: Any


class _Recorded(NamedTuple):
    graph: torch.cuda.CUDAGraph
    given: list[Tensor]  # the tensors that the graph reads
    result: Tensor  # the tensor that the graph writes
    state: Any  # the state after the step, also written by the graph


class Replayed:
    """A function of a batch and its number of targets, recorded as a CUDA graph for each shape.

    ``get_state`` and ``set_state`` read and replace the state that the function carries from step
    to step, such as a memory. All other tensors that it uses must keep their addresses: weights,
    and gradients, which are therefore reset to 0 and never to None.
    """

    def __init__(
        self,
        function: Callable[[Any, Tensor | float], Tensor],
        device: torch.device,
        get_state: Callable[[], Any],
        set_state: Callable[[Any], None],
    ) -> None:
        self.function, self.device = function, device
        self.get_state, self.set_state = get_state, set_state
        self.seen: set[Any] = set()
        self.recorded: dict[Any, _Recorded] = {}
        self.pool: Any = None  # shared by all graphs: none reads the memory of another

    def __call__(self, batch: Any, total: Tensor | float) -> Tensor:
        if not isinstance(total, Tensor):
            # Fill on the device, because a copy from the host would block.
            total = torch.full((), float(total), device=self.device)
        given = _Given(batch, total, self.get_state())
        key = shape_key(given)
        recorded = self.recorded.get(key)
        if recorded is None:
            if key not in self.seen or len(self.recorded) == MAX_GRAPHS:
                self.seen.add(key)
                return self.function(batch, total)
            recorded = self.recorded[key] = self._record(given)
        for place, tensor in zip(recorded.given, tensors(given), strict=True):
            place.copy_(tensor)
        recorded.graph.replay()
        self.set_state(recorded.state)
        return recorded.result.clone()

    def _record(self, given: _Given) -> _Recorded:
        kept: _Given = map_tensors(given, Tensor.clone)
        graph = torch.cuda.CUDAGraph()
        self.set_state(kept.state)
        with torch.cuda.graph(graph, pool=self.pool):
            result = self.function(kept.batch, kept.total)
        self.pool = graph.pool()
        return _Recorded(graph, tensors(kept), result, self.get_state())


def tensors(tree: Any) -> list[Tensor]:
    """All tensors of a tree, in order."""
    result: list[Tensor] = []

    def collect(tensor: Tensor) -> Tensor:
        result.append(tensor)
        return tensor

    map_tensors(tree, collect)
    return result


def shape_key(given: _Given) -> Any:
    """A key that is equal for inputs of equal shapes, types and flags."""
    flags = tuple(part if isinstance(part, bool) else part is None for part in given.batch)
    return flags, tuple((tuple(tensor.shape), tensor.dtype) for tensor in tensors(given))
