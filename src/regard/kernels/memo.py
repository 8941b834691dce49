"""A cache of small tensors that many calls use, safe for CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

MAX_RESULTS = 64  # the most cached results of one function

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class GraphSafeCache(Generic[Arguments, Result]):
    """A function with a cache of its last results, like ``lru_cache``, but safe for CUDA graphs.

    A graph reads the same memory at every replay, so a result that a graph has used is never
    freed. A result that is computed while a graph is captured holds no values until the first
    replay, so it is not cached. Nor is it while a mode of PyTorch, such as FakeTensorMode, may make
    tensors of another kind, which do not work outside of it; and tensors from outside do not work
    inside.

    >>> computed = []
    >>> square = GraphSafeCache(lambda number: computed.append(number) or number**2)
    >>> square(3), square(3), computed
    (9, 9, [3])
    """

    def __init__(self, function: Callable[Arguments, Result]) -> None:
        self.function = function
        self.results: dict[object, Result] = {}  # least recently used first
        self.read_by_graphs: list[Result] = []

    def __call__(self, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        # Not promised: no public function tells whether a mode is active.
        if torch._C._len_torch_dispatch_stack():
            return self.function(*args, **kwargs)
        key = (args, *kwargs.items())
        recording = is_recording()
        if key in self.results:
            result = self.results[key] = self.results.pop(key)
            if recording:
                self.read_by_graphs.append(result)
            return result
        result = self.function(*args, **kwargs)
        if not recording:
            self.results[key] = result
            if len(self.results) > MAX_RESULTS:
                del self.results[next(iter(self.results))]
        return result


def is_recording() -> bool:
    """Whether a CUDA graph is being captured on the current stream."""
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return ready and torch.cuda.is_current_stream_capturing()
