"""Greedy decoding and sampling: one sequence for each prompt."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from regard.decoding.strategies import Generated, Greedy, Sample, Strategy
from regard.errors import InputError

MAX_SUMMED_SCORES = 2**18  # scores per part of the sum, so that they fit in a CPU's cache


class Line:
    """The decoding of one sequence."""

    origins: tuple[int, ...] = (0,)  # the only beam continues itself

    def __init__(self, begun: list[int], seed: int | None) -> None:
        self.past = begun  # the ids of the prompt and of all tokens so far
        self.draws = None if seed is None else torch.Generator().manual_seed(int(seed))
        self.ids: list[int] = []
        self.score = 0.0
        self.stopped = self.done = False

    @property
    def results(self) -> list[Generated]:
        return [Generated(self.ids, self.score, self.stopped)]


class Lines:
    """Chooses the next token of each line."""

    beams = 1

    def __init__(self, strategy: Greedy | Sample, length: int, stop: frozenset[int]) -> None:
        self.strategy, self.length, self.stop = strategy, length, stop

    def begin(self, begun: list[int]) -> Line:
        """Return a line that continues ``begun``."""
        return Line(begun, self.strategy.seed if isinstance(self.strategy, Sample) else None)

    def choose(self, logits: Tensor, lines: Sequence[Line]) -> Tensor:
        """Append one token to each line, and return the tokens, [rows, 1]."""
        scores = logits.float()
        total = totals(scores)[:, 0]
        taken, past = (len(line.ids) for line in lines), (line.past for line in lines)
        scores = allowed(scores, self.strategy, self.stop, taken, past)
        if isinstance(self.strategy, Sample):
            draws = torch.stack([torch.rand((), generator=line.draws) for line in lines])
            tokens = _sample(scores, self.strategy, draws.to(scores.device))[:, None]
            best = scores.gather(-1, tokens)
        else:
            best, tokens = scores.max(-1, keepdim=True)
        chances = best[:, 0] - total
        for line, token, chance in zip(lines, tokens[:, 0].tolist(), chances.tolist(), strict=True):
            if line.done:
                continue
            check_chance(chance)
            if chance == -math.inf:  # every token would repeat an n-gram
                line.done = True
                continue
            line.score += chance
            line.stopped = token in self.stop
            if not line.stopped:
                line.ids.append(token)
                line.past.append(token)
            line.done = line.stopped or len(line.ids) == self.length
        return tokens


def check_chance(chance: float) -> None:
    if math.isnan(chance):
        raise InputError(
            "The model's scores are NaN, so no token can be chosen. Its weights may be damaged, or "
            "too large for their precision."
        )


def totals(scores: Tensor) -> Tensor:
    """Return the log-sum-exp of each row, [rows, 1].

    A CPU takes a few rows at a time. Intermediate values then stay in its cache, and the memory
    needed is much smaller than all scores.
    """
    rows = (
        max(1, MAX_SUMMED_SCORES // scores.shape[-1])
        if scores.device.type == "cpu"
        else len(scores)
    )
    return torch.cat([part.logsumexp(-1, keepdim=True) for part in torch.split(scores, rows)])


def _sample(scores: Tensor, strategy: Sample, draws: Tensor) -> Tensor:
    """Sample one token for each row with the uniform random numbers ``draws`` [rows]."""
    # Subtract the largest score, so that a low temperature makes no score infinite.
    largest = scores.amax(-1, keepdim=True)
    cooled = (scores - largest.where(largest > -math.inf, 0)) / strategy.temperature
    values, tokens = cooled.sort(dim=-1, descending=True, stable=True)
    if strategy.top_k:
        values, tokens = values[:, : strategy.top_k], tokens[:, : strategy.top_k]
    shares = values.softmax(-1)
    before = shares.cumsum(-1) - shares  # the probability of all likelier tokens
    shares = shares.masked_fill(before >= strategy.top_p, 0)
    reached = shares.cumsum(-1)
    at = (reached < draws[:, None] * reached[:, -1:]).sum(-1)
    last = ((shares > 0).sum(-1) - 1).clamp(min=0)
    sampled: Tensor = tokens.gather(-1, torch.minimum(at, last)[:, None])[:, 0]
    return sampled


def allowed(
    scores: Tensor,
    strategy: Strategy,
    stop: Iterable[int],
    taken: Iterable[int],
    past: Iterable[Sequence[int]],
) -> Tensor:
    """Return scores that are -inf for tokens that would repeat an n-gram or stop too early.

    For each row, ``taken`` is the number of its new tokens, and ``past`` has all its ids.
    """
    size, banned = strategy.no_repeat_ngram_size, list[tuple[int, int]]()
    for row, count in enumerate(taken):
        if count < strategy.min_new_tokens:
            banned += [(row, token) for token in stop if 0 <= token < scores.shape[-1]]
    for row, ids in enumerate(past if size else ()):
        tail = ids[len(ids) - size + 1 :]
        starts = range(len(ids) - size + 1)
        banned += [(row, ids[at + size - 1]) for at in starts if ids[at : at + size - 1] == tail]
    if banned:
        rows, tokens = torch.tensor(banned).T
        scores = scores.clone()
        scores[rows, tokens] = -math.inf
    return scores
