"""Small tensors that many calls need alike, made once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, ParamSpec, TypeVar

import torch

MOST = 64

Given = ParamSpec("Given")
Made = TypeVar("Made")


class Kept(Generic[Given, Made]):
    """A function whose last results are kept, as by ``lru_cache``, but safe for CUDA graphs.

    A graph reads what it once read for as long as it is replayed, so what is given to one stays.
    And what is made while one is recorded holds nothing until it is replayed: that is not kept.

    >>> made = []
    >>> square = Kept(lambda number: made.append(number) or number**2)
    >>> square(3), square(3), made
    (9, 9, [3])
    """

    def __init__(self, function: Callable[Given, Made]) -> None:
        self.function = function
        self.found: dict[object, Made] = {}  # the least used first
        self.read_by_graphs: list[Made] = []

    def __call__(self, *given: Given.args, **named: Given.kwargs) -> Made:
        key = (given, *named.items())
        recording = is_recording()
        if key in self.found:
            found = self.found[key] = self.found.pop(key)
            if recording:
                self.read_by_graphs.append(found)
            return found
        found = self.function(*given, **named)
        if not recording:
            self.found[key] = found
            if len(self.found) > MOST:
                del self.found[next(iter(self.found))]
        return found


def is_recording() -> bool:
    """Whether what runs now goes into a CUDA graph."""
    ready: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return ready and torch.cuda.is_current_stream_capturing()
