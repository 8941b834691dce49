"""How long looking will take and how much memory, told before it starts."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from regard.layers import FeedForward, GatedFeedForward, MultiHeadAttention
from regard.looking.sights import Sight
from regard.models import T5, TransformerXL
from regard.reading import Reading

LONG = 8192  # tokens; fewer are read before one could have said how long it takes
MEASURED = 16  # the part of a long text that is read to measure, at about a hundredth of the cost
TILE = 64  # queries whose scores are held at a time
NAMES = 600  # bytes that go into what a token and its word are called
CHUNKS = 12  # of a text in chunks that are read to measure


@dataclass(frozen=True)
class Plan:
    """What is about to be done: its size, and what it is expected to need."""

    tokens: int
    layers: int
    seconds: float
    memory: int  # bytes, besides the model itself

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens through {self.layers} attention layers: about "
            f"{_duration(self.seconds)} and {max(self.memory / 2**30, 0.1):.1f} GiB of memory "
            "besides the model"
        )


def estimate(reading: Reading, sight: Sight) -> Plan | None:
    """What looking will need, or None where the text is short.

    A first part of the text is read and timed, and nothing of it kept. In chunks each takes as
    long as the next. A text read at once takes time that grows with its length and time that
    grows with its square, told apart by reading a part and half of it.
    """
    tokens = len(reading.tokens)
    if tokens < LONG:
        return None
    if len(reading.chunks) > 1:
        chunks = reading.chunks
        some = chunks[: min(CHUNKS, len(chunks))]
        each = _timed(reading.beginning(some[-1].start + 1), sight) / len(some)
        seconds = each * len(chunks)
        longest = max(chunk.stop - chunk.first for chunk in chunks)
    else:
        count = tokens // MEASURED
        half, whole = (_timed(reading.beginning(count // part), sight) for part in (2, 1))
        # whole = a n + b n^2 and half = a n / 2 + b n^2 / 4
        square = max(2 * whole - 4 * half, 0.0) / count**2
        linear = max(whole / count - square * count, 0.0)
        seconds = linear * tokens + square * tokens**2
        longest = tokens
    return Plan(tokens, len(reading.layers), seconds, _memory(reading, longest))


def _timed(reading: Reading, sight: Sight) -> float:
    """The shorter of two runs: the first has also to warm up, and others use the machine too."""
    found = []
    for _ in range(2):
        start = time.perf_counter()
        reading.run(sight.ask, lambda *_: None)
        found.append(time.perf_counter() - start)
    return min(found)


def _memory(reading: Reading, longest: int) -> int:
    """The widest that a token gets on its way through a layer, the tiles of scores, and its names.

    All of it grows with the length of what is read at once, none of it with the square.
    """
    size = next(reading.model.parameters()).element_size()
    widest = heads = 0
    for module in reading.model.modules():
        if isinstance(module, MultiHeadAttention):
            # The input, normed and not; queries, keys and values; what becomes of the queries.
            width = module.heads * module.head_dim
            widest = max(widest, 3 * module.qkv.in_features + module.qkv.out_features + 4 * width)
            heads = max(heads, module.heads)
        elif isinstance(module, FeedForward | GatedFeedForward):
            widest = max(widest, 3 * module.up.in_features + 2 * module.up.out_features)
    # Scores and their powers; and where positions enter the scores, those of all heads.
    relative = isinstance(reading.model, T5 | TransformerXL)
    tiles = TILE * size * (2 + (2 + 2 * heads if relative else 0))
    return longest * (widest * size + tiles) + len(reading.tokens) * NAMES


def _duration(seconds: float) -> str:
    if seconds < 100:
        return f"{max(seconds, 1):.0f} seconds"
    return f"{math.ceil(seconds / 60)} minutes"
