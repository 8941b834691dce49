"""Small tensors that many calls share, made once.

Test: ``pytest tests/kernels/test_memo.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

MAX_RESULTS = 64

Given = ParamSpec("Given")
Made = TypeVar("Made")


class Kept(Generic[Given, Made]):
    """A function whose last results are kept, as by ``lru_cache``, but safe for CUDA graphs.

    A graph reads the same memory at each replay, so a result that a graph has read is never freed.
    A result made while a graph is recorded holds no numbers before a replay, so it is not kept.

    >>> made = []
    >>> square = Kept(lambda number: made.append(number) or number**2)
    >>> square(3), square(3), made
    (9, 9, [3])
    """

    def __init__(self, function: Callable[Given, Made]) -> None:
        self.function = function
        self.results: dict[object, Made] = {}  # the least recently used first
        self.read_by_graphs: list[Made] = []

    def __call__(self, *given: Given.args, **named: Given.kwargs) -> Made:
        key = (given, *named.items())
        recording = is_recording()
        if key in self.results:
            result = self.results[key] = self.results.pop(key)
            if recording:
                self.read_by_graphs.append(result)
            return result
        result = self.function(*given, **named)
        if not recording:
            self.results[key] = result
            if len(self.results) > MAX_RESULTS:
                del self.results[next(iter(self.results))]
        return result


def is_recording() -> bool:
    """Whether a CUDA graph is being recorded."""
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return ready and torch.cuda.is_current_stream_capturing()
