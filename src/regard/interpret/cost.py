"""How long looking will take and how much memory, told before it starts.

Nothing here knows how fast a machine is: short parts of the text are read, and the time they take
tells what the whole will.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import median
from typing import Any

import torch

from regard.interpret.lens import Sight
from regard.interpret.runs import Chunk, Reading
from regard.layers.modules import FeedForward, GatedFeedForward, MultiHeadAttention
from regard.mechanism.biases import Bias
from regard.mechanism.functional import attention
from regard.mechanism.masks import Causal, Mask
from regard.mechanism.seeing import See
from regard.models.model import AttentionLayer

Ask = Callable[[AttentionLayer, Chunk], See | None]

LONG = 8192  # tokens; fewer are read before one could have said how long it takes
CHUNKS = 12  # of a text in chunks that are read to measure, at most
PART = 2048  # tokens of a text read at once that are, at most
ROWS = 1024  # queries that are tried against all of its keys, at most
TILE = 64  # queries whose scores are held at a time
KEPT = 2**26  # bytes that an allocator holds on to at most, of what was given back
NAMES = 900  # bytes that go at most into what a token and its word are called


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
            f"{_duration(self.seconds)} and {_size(self.memory)} of memory besides the model"
        )


def estimate(reading: Reading, sight: Sight) -> Plan | None:
    """What looking will need, or None where little is to be read."""
    chunks = reading.needed(sight.ask)
    tokens = sum(chunk.stop - chunk.start for chunk in chunks)
    if tokens < LONG:
        return None
    seconds = (_in_chunks if len(chunks) > 1 else _at_once)(reading, sight, chunks)
    longest = max(chunk.stop - chunk.first for chunk in chunks)
    return Plan(tokens, len(reading.layers), seconds, _memory(reading, longest))


def _in_chunks(reading: Reading, sight: Sight, chunks: list[Chunk]) -> float:
    """Each chunk takes as long as the next; the first is left out, which has also to warm up."""
    some = chunks[: 1 + min(CHUNKS, 2 + len(chunks) // 16)]
    ends = [time.perf_counter()]
    _read(reading.of(some), sight.ask, lambda: ends.append(time.perf_counter()))
    ends = ends[:: len(reading.layers)]
    # Not the mean: others may take the machine for a moment.
    return median(after - before for before, after in pairwise(ends[1:])) * len(chunks)


def _at_once(reading: Reading, sight: Sight, chunks: list[Chunk]) -> float:
    """A text read at once: every query meets every key.

    How long that takes is measured with some queries and as many keys as there will be: rows of
    scores that long are in no cache. The rest grows with the length.
    """
    [whole] = chunks
    tokens = whole.stop - whole.start
    seen = {layer.name for layer in reading.layers if sight.ask(layer, whole) is not None}

    def ask(layer: AttentionLayer, chunk: Chunk) -> See | None:
        """Of a part, too, which may not hold what is looked for."""
        return (sight.ask(layer, chunk) or See(lse=True)) if layer.name in seen else None

    each = _by_query(reading, ask, tokens) / tokens  # a query's time with one key
    large = max(min(PART, tokens // 8), 8)
    small = large // 4
    times = []
    for size in (small, large):
        part = reading.of([Chunk(0, size)])
        times.append(_timed(partial(_read, part, ask)) - each * size**2)
    growing = max(times[1] - times[0], 0.0) / (large - small)
    return max(times[1], 0.0) + growing * (tokens - large) + each * tokens**2


def _by_query(reading: Reading, ask: Ask, tokens: int) -> float:
    """Seconds that a query takes with all keys, in the layers that read the text, on average."""
    given = _arguments(reading)
    known: dict[tuple[object, ...], float] = {}
    total = 0.0
    for layer in reading.layers:
        if layer.half == "decoder":
            continue  # its queries are those of the target
        module = layer.module
        seen = ask(layer, Chunk(0, 2)) is not None
        kind = (seen, module.heads, module.key_heads, module.head_dim)
        if kind not in known:
            known[kind] = _one_query(layer, tokens, ask, *given[layer.name])
        total += known[kind]
    return total


def _one_query(
    layer: AttentionLayer, tokens: int, ask: Ask, mask: Mask | None, bias: Bias | None
) -> float:
    """The difference between many queries and few: without what a call takes by itself."""
    module, weight = layer.module, layer.module.qkv.weight
    rows = max(min(ROWS, tokens // 16), 4)
    # A causal query meets half of the keys, on average. The last query is the last key's.
    keys = (tokens + rows) // 2 if isinstance(mask, Causal) else tokens
    make = torch.Generator(weight.device).manual_seed(0)
    sizes = ((module.heads, rows), (module.key_heads, keys), (module.key_heads, keys))
    query, key, value = (
        weight.new_empty(1, heads, length, module.head_dim).normal_(generator=make)
        for heads, length in sizes
    )

    @torch.no_grad()
    def attend(count: int) -> None:
        some, see = query[:, :, :count], ask(layer, Chunk(0, count))
        if see is None:
            attention(some, key, value, mask=mask, bias=bias, scale=module.scale)
        else:
            attention(some, key, value, mask=mask, bias=bias, scale=module.scale, see=see)

    few = rows // 4
    longer, shorter = _timed(partial(attend, rows)), _timed(partial(attend, few))
    return max(longer - shorter, longer / 2) / (rows - few)


def _arguments(reading: Reading) -> dict[str, tuple[Mask | None, Bias | None]]:
    """The mask and the bias that each layer is given."""
    found: dict[str, tuple[Mask | None, Bias | None]] = {}

    def noting(layer: AttentionLayer) -> Callable[..., None]:
        def hook(_module: object, _args: object, given: dict[str, Any]) -> None:
            found[layer.name] = given.get("mask"), given.get("bias")

        return hook

    with ExitStack() as stack:
        for layer in reading.layers:
            hook = layer.module.register_forward_pre_hook(noting(layer), with_kwargs=True)
            stack.callback(hook.remove)
        reading.forward(Chunk(0, 2))
    return found


def _read(reading: Reading, ask: Ask, tick: Callable[[], None] | None = None) -> None:
    reading.run(ask, lambda *_: None, tick)


def _timed(run: Callable[[], None]) -> float:
    """The mean of two runs, after one to warm up: others may use the machine too."""
    run()
    start = time.perf_counter()
    for _ in range(2):
        run()
    return (time.perf_counter() - start) / 2


def _memory(reading: Reading, longest: int) -> int:
    """The widest that a token gets on its way through a layer, its scores, and its names.

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
    relative = reading.model.relative
    tiles = TILE * size * (2 + (2 + 2 * heads if relative else 0))
    held = longest * (widest * size + tiles)
    return held + min(held // 2, KEPT) + len(reading.tokens) * NAMES


def _duration(seconds: float) -> str:
    if seconds < 100:
        count = max(round(seconds), 1)
        return f"{count} second{'s' * (count > 1)}"
    return f"{math.ceil(seconds / 60)} minutes"


def _size(count: int) -> str:
    if count < 2**30:
        return f"{max(round(count / 2**20, -1), 10):.0f} MiB"
    return f"{count / 2**30:.1f} GiB"
