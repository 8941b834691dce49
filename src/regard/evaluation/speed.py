"""Speed measurements: times relative to a baseline, and the rows of ``regard bench``."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.checkpoints import cards
from regard.decoding.generation import generate
from regard.mechanism.functional import attention
from regard.mechanism.masks import Causal
from regard.mechanism.seeing import See
from regard.models.loading import load

SEEN = See(entropy=True, peak=True, max_logit=True, received=True, map=64)


@dataclass(frozen=True, slots=True)
class Pair:
    """Median seconds of our function and of the baseline, ``peer``."""

    ours: float
    peer: float

    @property
    def speed(self) -> float:
        """The speed relative to the baseline; above 1, ours is faster."""
        return self.peer / self.ours

    @property
    def cost(self) -> float:
        """The time relative to the baseline; below 1, ours is faster."""
        return self.ours / self.peer


def seconds(ours: Callable[[], object], peer: Callable[[], object], budget: float = 1.0) -> Pair:
    """Time two functions alternately, so that other load on the machine affects both alike.

    The order changes in every round, because the first function affects the caches of the second.

    >>> pair = seconds(lambda: sum(range(10000)), lambda: sum(range(100)), budget=0.01)
    >>> min(pair.ours, pair.peer) > 0
    True
    """
    for function in (ours, peer):
        function()
        function()
    times: tuple[list[float], list[float]] = ([], [])
    turns = [(ours, times[0]), (peer, times[1])]
    started = time.perf_counter()
    while time.perf_counter() - started < budget or len(times[0]) < 5:
        for function, taken in turns:
            before = time.perf_counter()
            function()
            taken.append(time.perf_counter() - before)
        turns.reverse()
    return Pair(statistics.median(times[0]), statistics.median(times[1]))


def eager(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, ...]:
    """Attention that stores all weights, and computes the statistics of :data:`SEEN` from them."""
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
    if causal:
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    weights = scores.softmax(-1)
    entropy = torch.special.entr(weights).sum(-1)
    pooled = weights.unflatten(-1, (64, -1)).sum(-1).unflatten(-2, (64, -1)).mean(-2)
    return weights @ v, entropy, weights.amax(-1), scores.amax((-1, -2)), weights.sum(-2), pooled


@dataclass(frozen=True, slots=True)
class Timed:
    """A row of the table: what was timed, its baseline, and the times."""

    what: str
    peer: str
    times: Pair


def attend(device: torch.device, budget: float = 1.5) -> Iterator[Timed]:
    """Time attention against PyTorch's, and the cost of ``see`` against two baselines."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    for length in (512, 2048):
        shape = (2048 // length, 8, length, 64)
        q, k, v = (torch.randn(shape, device=device, dtype=dtype) for _ in range(3))
        plain = partial(attention, q, k, v, mask=Causal())
        seen = partial(attention, q, k, v, mask=Causal(), see=SEEN)
        theirs = partial(scaled_dot_product_attention, q, k, v, is_causal=True)
        kept = partial(eager, q, k, v, causal=True)
        for what, peer, ours, baseline in (
            ("attention", "PyTorch's SDPA", plain, theirs),
            ("attention, seen", "the same, unseen", seen, plain),
            ("attention, seen", "all weights kept", seen, kept),
        ):
            with torch.inference_mode():
                times = seconds(_finished(ours, device), _finished(baseline, device), budget)
            yield Timed(f"{what}, n = {length}", peer, times)


def _finished(work: Callable[[], object], device: torch.device) -> Callable[[], None]:
    """A function that runs ``work`` and waits until the GPU has finished."""

    def run() -> None:
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    return run


@dataclass(frozen=True, slots=True)
class Decoded:
    """The decoding speed of a model."""

    name: str
    tokens_per_second: float


def decode(device: torch.device, new: int = 64) -> Iterator[Decoded]:
    """The tokens per second of greedy decoding with batch size 1, for each shipped decoder."""
    for name in cards.names():
        model: Any = load(cards.folder(name), device=device, dtype=torch.float32)
        if not hasattr(model, "start_decoding"):
            continue  # it does not generate
        prompt = [list(range(8, 24))]
        generate(model, prompt, max_new_tokens=new)
        started = time.perf_counter()
        generate(model, prompt, max_new_tokens=new)
        yield Decoded(name, new / (time.perf_counter() - started))
