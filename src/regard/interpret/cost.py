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
from statistics import linear_regression, median

import torch
from torch import nn

from regard.interpret.measurement import Measurement
from regard.interpret.runs import TextRun
from regard.interpret.subjects.ours import OwnModel
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
TIMED_PIECE = 256  # tokens of a chunk that the estimate runs with a cache
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
    own = isinstance(run.subject, OwnModel)
    if len(chunks) == 1:
        seconds = _whole(run, measurement.see, chunks[0], known=own)
    elif own or not any(chunk.memory for chunk in chunks):
        seconds = _chunked(run, measurement.see, chunks)
    else:
        seconds = _cached(run, measurement.see, chunks)
    if own:
        memory = _memory(run, max(chunk.stop - chunk.first for chunk in chunks))
    else:
        memory = _memory_of_any(run, measurement.see, chunks)
    return CostEstimate(tokens, len(run.layers), seconds, memory)


def _chunked(run: TextRun, see: SeeOf, chunks: list[Chunk]) -> float:
    """The seconds of equal chunks: the median of a few timed chunks, times their number.

    The first chunk warms up and is not timed.
    """
    some = chunks[: 1 + min(MAX_TIMED_CHUNKS, 2 + len(chunks) // 16)]
    ends = [time.perf_counter()]
    _forward(run, some, see, lambda: ends.append(time.perf_counter()))
    ends = ends[:: len(run.layers)]
    return median(after - before for before, after in pairwise(ends[1:])) * len(chunks)


def _cached(run: TextRun, see: SeeOf, chunks: list[Chunk]) -> float:
    """The seconds of chunks that attend to a cache, whose time grows with the number of keys.

    A line is fitted to the times of a few short chunks. A run before them warms up.
    """
    size = min(TIMED_PIECE, len(run.tokens) // 4)
    some = [Chunk(start, start + size, start) for start in range(0, 4 * size, size)]
    seen = _seen_part(run, see, chunks[-1])
    ends: list[float] = []

    def tick() -> None:
        ends.append(time.perf_counter())

    for _ in range(2):
        ends = [time.perf_counter()]
        _forward(run, some, lambda layer, _: seen(layer, some[0]), tick)
    times = [after - before for before, after in pairwise(ends[:: len(run.layers)])]
    keys = [size * (piece + 0.5) for piece in range(len(times))]  # of a mean query
    growth, flat = linear_regression(keys, times)
    if growth < 0 or flat < 0:  # so short that the times are noise
        growth, flat = 0.0, median(times)
    return sum(
        (flat + growth * (chunk.start + chunk.stop - 2 * chunk.first) / 2)
        * (chunk.stop - chunk.start) / size
        for chunk in chunks
    )  # fmt: skip


def _seen_part(run: TextRun, see: SeeOf, whole: Chunk) -> SeeOf:
    """The ``See`` of each measured layer, even if a part does not hold the chosen word."""
    seen = {layer.name for layer in run.layers if see(layer, whole) is not None}

    def see_part(layer: Layer, chunk: Chunk) -> See | None:
        return (see(layer, chunk) or See(entropy=True)) if layer.name in seen else None

    return see_part


def _whole(run: TextRun, see: SeeOf, whole: Chunk, *, known: bool) -> float:
    """The seconds of a text that runs in one chunk.

    The time of attention is quadratic in the length. If the layers are ``known``, it is measured
    with a few queries and all keys, because the scores of so many keys do not fit the CPU cache.
    The time of the other layers is proportional to the length.
    """
    tokens = whole.stop - whole.start
    see_part = _seen_part(run, see, whole)
    # The seconds of one query-key pair.
    each = _seconds_per_query(run, see_part, tokens) / tokens if known else 0.0
    large = max(min(MAX_TIMED_TOKENS, tokens // 8), 8)
    small = large // 4
    short, long = (
        _timed(partial(_forward, run, [Chunk(0, size)], see_part)) - each * size**2
        for size in (small, large)
    )
    if not known:  # both parts of the time are fitted to the two runs
        each = max(long / large - short / small, 0.0) / (large - small)
        return max(long / large - each * large, 0.0) * tokens + each * tokens**2
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


def _memory_of_any(run: TextRun, see: SeeOf, chunks: list[Chunk]) -> int:
    """The bytes of a chunk's widest activations, scores and weights, of the cache and of labels."""
    model = run.subject.model
    size = next(model.parameters()).element_size()
    output = getattr(model, "get_output_embeddings", lambda: None)()  # it does not run
    linear = (
        each for each in model.modules() if isinstance(each, nn.Linear) and each is not output
    )
    widest = max((each.in_features + 2 * each.out_features for each in linear), default=0)
    longest = max(chunk.stop - chunk.start for chunk in chunks)
    kept = max(chunk.stop - chunk.first for chunk in chunks) * run.subject.cached_bytes
    heads = max(layer.heads for layer in run.layers)
    held = longest * size * (3 * widest + TILE * heads)
    last = chunks[-1]
    pairs = (last.stop - last.start) * (last.stop - last.first)
    asked = ((layer, see(layer, last)) for layer in run.layers)
    held += max((4 * layer.heads * pairs for layer, fields in asked if fields and fields.weights),
                default=0)  # fmt: skip
    return held + kept + min(held // 2, MAX_CACHED) + len(run.tokens) * LABEL_BYTES


def _duration(seconds: float) -> str:
    if seconds < 100:
        count = max(round(seconds), 1)
        return f"{count} second{'s' * (count > 1)}"
    return f"{math.ceil(seconds / 60)} minutes"


def _size(count: int) -> str:
    if count < 2**30:
        return f"{max(round(count / 2**20, -1), 10):.0f} MiB"
    return f"{count / 2**30:.1f} GiB"
