"""Estimate the time and memory of a call of ``look`` before it starts.

The time is extrapolated from short parts of the text, run on the same machine.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from statistics import median

import torch

from regard.interpret.measurement import Measurement
from regard.interpret.runs import TextRun
from regard.interpret.subjects.subject import Chunk, Layer, SeeOf
from regard.layers.modules import FeedForward, GatedFeedForward, MultiHeadAttention
from regard.mechanism.biases import Bias
from regard.mechanism.functional import attention
from regard.mechanism.masks import Causal, Mask
from regard.mechanism.seeing import See
from regard.models.model import Model

MIN_TOKENS = 8192  # a run of fewer tokens takes less time than its estimate
MAX_TIMED_CHUNKS = 12  # chunks that the estimate runs
MAX_TIMED_TOKENS = 2048  # tokens that the estimate runs of a text in a single chunk
MAX_TIMED_QUERIES = 1024  # queries that the estimate runs with all keys
TILE = 64  # queries whose scores are in memory at a time
MAX_CACHED = 2**26  # bytes of freed memory that an allocator keeps
LABEL_BYTES = 900  # the most that the labels of a token and its word take


@dataclass(frozen=True)
class CostEstimate:
    """The size of a run, with its expected time and memory."""

    tokens: int
    layers: int
    seconds: float
    memory: int  # bytes, without the model

    def __str__(self) -> str:
        return (
            f"{self.tokens:,} tokens through {self.layers} attention layers: about "
            f"{_duration(self.seconds)} and {_size(self.memory)} of memory besides the model"
        )


def estimate(run: TextRun, measurement: Measurement) -> CostEstimate | None:
    """The cost of a measurement, or None if the run has fewer than MIN_TOKENS tokens."""
    chunks = run.needed_chunks(measurement.see)
    tokens = sum(chunk.stop - chunk.start for chunk in chunks)
    if tokens < MIN_TOKENS:
        return None
    seconds = (_chunked if len(chunks) > 1 else _whole)(run, measurement.see, chunks)
    longest = max(chunk.stop - chunk.first for chunk in chunks)
    return CostEstimate(tokens, len(run.layers), seconds, _memory(run, longest))


def _chunked(run: TextRun, see: SeeOf, chunks: list[Chunk]) -> float:
    """The seconds of equal chunks: the median of a few timed chunks, times their number.

    The first chunk warms up and is not timed.
    """
    some = chunks[: 1 + min(MAX_TIMED_CHUNKS, 2 + len(chunks) // 16)]
    ends = [time.perf_counter()]
    _forward(run, some, see, lambda: ends.append(time.perf_counter()))
    ends = ends[:: len(run.layers)]
    return median(after - before for before, after in pairwise(ends[1:])) * len(chunks)


def _whole(run: TextRun, see: SeeOf, chunks: list[Chunk]) -> float:
    """The seconds of a text that runs in one chunk.

    The time of attention is quadratic in the length. It is measured with a few queries and all
    keys, because the scores of so many keys do not fit the CPU cache. The time of the other layers
    is proportional to the length.
    """
    [whole] = chunks
    tokens = whole.stop - whole.start
    seen = {layer.name for layer in run.layers if see(layer, whole) is not None}

    def see_part(layer: Layer, chunk: Chunk) -> See | None:
        """The ``See`` of each measured layer, even if this part does not hold the chosen word."""
        return (see(layer, chunk) or See(lse=True)) if layer.name in seen else None

    each = _seconds_per_query(run, see_part, tokens) / tokens  # seconds of one query-key pair
    large = max(min(MAX_TIMED_TOKENS, tokens // 8), 8)
    small = large // 4
    short, long = (
        _timed(partial(_forward, run, [Chunk(0, size)], see_part)) - each * size**2
        for size in (small, large)
    )
    growing = max(long - short, 0.0) / (large - small)
    return max(long, 0.0) + growing * (tokens - large) + each * tokens**2


def _seconds_per_query(run: TextRun, see: SeeOf, tokens: int) -> float:
    """The seconds of a query with all keys, summed over the layers that read the text."""
    calls = run.calls(run.layers, Chunk(0, 2))
    timed: dict[tuple[object, ...], float] = {}
    total = 0.0
    for layer in run.layers:
        if layer.half == "decoder":
            continue  # the queries of a decoder layer are tokens of the target, not of the text
        module = layer.module
        assert isinstance(module, MultiHeadAttention)
        seen = see(layer, Chunk(0, 2)) is not None
        kind = (seen, module.heads, module.key_heads, module.head_dim)
        if kind not in timed:
            # The mask and the bias that the model passes to the layer.
            given = calls[layer.name].keywords
            timed[kind] = _one_query(
                layer, module, tokens, see, given.get("mask"), given.get("bias")
            )
        total += timed[kind]
    return total


def _one_query(
    layer: Layer,
    module: MultiHeadAttention,
    tokens: int,
    see: SeeOf,
    mask: Mask | None,
    bias: Bias | None,
) -> float:
    """The seconds of one query in one layer.

    The difference of two timings, of many and of few queries, excludes the overhead of a call.
    """
    weight = module.qkv.weight
    rows = max(min(MAX_TIMED_QUERIES, tokens // 16), 4)
    # Under a causal mask a query attends to half of the keys on average.
    keys = (tokens + rows) // 2 if isinstance(mask, Causal) else tokens
    make = torch.Generator(weight.device).manual_seed(0)
    sizes = ((module.heads, rows), (module.key_heads, keys), (module.key_heads, keys))
    query, key, value = (
        weight.new_empty(1, heads, length, module.head_dim).normal_(generator=make)
        for heads, length in sizes
    )

    @torch.no_grad()
    def attend(count: int) -> None:
        some, fields = query[:, :, :count], see(layer, Chunk(0, count))
        attention(some, key, value, mask=mask, bias=bias, scale=module.scale, see=fields)

    few = rows // 4
    longer, shorter = _timed(partial(attend, rows)), _timed(partial(attend, few))
    return max(longer - shorter, longer / 2) / (rows - few)


def _forward(
    run: TextRun, chunks: list[Chunk], see: SeeOf, tick: Callable[[], None] | None = None
) -> None:
    replace(run, chunks=tuple(chunks)).record(see, lambda *_: None, tick)


def _timed(run: Callable[[], None]) -> float:
    """The mean seconds of two runs, after a run to warm up."""
    run()
    start = time.perf_counter()
    for _ in range(2):
        run()
    return (time.perf_counter() - start) / 2


def _memory(run: TextRun, longest: int) -> int:
    """The bytes of a chunk's widest activations, of its scores, and of the labels of the text.

    ``longest`` is the number of tokens of the longest chunk. Memory is proportional to it, not to
    its square.
    """
    model = run.subject.model
    size = next(model.parameters()).element_size()
    widest = heads = 0
    for module in model.modules():
        if isinstance(module, MultiHeadAttention):
            # The input, before and after the norm; queries, keys and values; outputs of the heads.
            width = module.heads * module.head_dim
            widest = max(widest, 3 * module.qkv.in_features + module.qkv.out_features + 4 * width)
            heads = max(heads, module.heads)
        elif isinstance(module, FeedForward | GatedFeedForward):
            widest = max(widest, 3 * module.up.in_features + 2 * module.up.out_features)
    # Scores and their exponentials; with relative positions also the biases of all heads.
    relative = isinstance(model, Model) and model.relative
    tiles = TILE * size * (2 + (2 + 2 * heads if relative else 0))
    held = longest * (widest * size + tiles)
    return held + min(held // 2, MAX_CACHED) + len(run.tokens) * LABEL_BYTES


def _duration(seconds: float) -> str:
    if seconds < 100:
        count = max(round(seconds), 1)
        return f"{count} second{'s' * (count > 1)}"
    return f"{math.ceil(seconds / 60)} minutes"


def _size(count: int) -> str:
    if count < 2**30:
        return f"{max(round(count / 2**20, -1), 10):.0f} MiB"
    return f"{count / 2**30:.1f} GiB"
