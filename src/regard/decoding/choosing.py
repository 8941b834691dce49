"""One sequence for each prompt: the likeliest token, or one that is drawn."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from regard.decoding.strategies import Generated, Greedy, Sample
from regard.errors import InputError

AT_ONCE = 2**18  # scores


class Line:
    """One sequence, as far as it got."""

    origins: tuple[int, ...] = (0,)  # it goes on from itself

    def __init__(self, begun: list[int], seed: int | None) -> None:
        self.past = begun  # with what it began with
        self.draws = None if seed is None else torch.Generator().manual_seed(int(seed))
        self.ids: list[int] = []
        self.score = 0.0
        self.stopped = self.done = False

    @property
    def found(self) -> list[Generated]:
        return [Generated(self.ids, self.score, self.stopped)]


class Lines:
    """Picks the next token of each line."""

    beams = 1

    def __init__(self, how: Greedy | Sample, length: int, stop: frozenset[int]) -> None:
        self.how, self.length, self.stop = how, length, stop

    def begin(self, begun: list[int]) -> Line:
        """A line that goes on from ``begun``."""
        return Line(begun, self.how.seed if isinstance(self.how, Sample) else None)

    def choose(self, logits: Tensor, lines: Sequence[Line]) -> Tensor:
        """Let each line go on by one token; those come back, [rows, 1]."""
        scores = logits.float()
        total = totals(scores)[:, 0]
        if self.how.no_repeat_ngram_size:
            past = [line.past for line in lines]
            scores = without_repeats(scores.clone(), past, self.how.no_repeat_ngram_size)
        short = [row for row, line in enumerate(lines) if len(line.ids) < self.how.min_new_tokens]
        scores = without_stops(scores, short, self.stop)
        if isinstance(self.how, Sample):
            draws = torch.stack([torch.rand((), generator=line.draws) for line in lines])
            tokens = _draw(scores, self.how, draws.to(scores.device))[:, None]
            best = scores.gather(-1, tokens)
        else:
            best, tokens = scores.max(-1, keepdim=True)
        chances = best[:, 0] - total
        for line, token, chance in zip(lines, tokens[:, 0].tolist(), chances.tolist(), strict=True):
            if line.done:
                continue
            check_chance(chance)
            if chance == -math.inf:  # whatever may follow would repeat something
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
            "The model's scores are not numbers (NaN), so no token can be chosen. Its weights may "
            "be damaged, or too large for their precision."
        )


def totals(scores: Tensor) -> Tensor:
    """The log-sum-exp of each row, [rows, 1].

    On a CPU some rows at a time: what is computed on the way stays in the cache, and no step asks
    the system for memory as large as all scores, only to give it back.
    """
    rows = max(1, AT_ONCE // scores.shape[-1]) if scores.device.type == "cpu" else len(scores)
    return torch.cat([part.logsumexp(-1, keepdim=True) for part in torch.split(scores, rows)])


def _draw(scores: Tensor, how: Sample, draws: Tensor) -> Tensor:
    """One token for each row, where its number in ``draws`` falls among the probabilities."""
    # Off the largest, so that no temperature makes it infinite.
    largest = scores.amax(-1, keepdim=True)
    cooled = (scores - largest.where(largest > -math.inf, 0)) / how.temperature
    values, tokens = cooled.sort(dim=-1, descending=True, stable=True)
    if how.top_k:
        values, tokens = values[:, : how.top_k], tokens[:, : how.top_k]
    shares = values.softmax(-1)
    before = shares.cumsum(-1) - shares  # what likelier tokens have already
    shares = shares.masked_fill(before >= how.top_p, 0)
    reached = shares.cumsum(-1)
    at = (reached < draws[:, None] * reached[:, -1:]).sum(-1)
    last = ((shares > 0).sum(-1) - 1).clamp(min=0)
    drawn: Tensor = tokens.gather(-1, torch.minimum(at, last)[:, None])[:, 0]
    return drawn


def without_repeats(scores: Tensor, past: Sequence[Sequence[int]], size: int) -> Tensor:
    """``scores`` with -inf for each token that would complete an n-gram its row has already."""
    for row, ids in enumerate(past):
        tail = tuple(ids[len(ids) - size + 1 :])
        taken = [
            ids[start + size - 1]
            for start in range(len(ids) - size + 1)
            if tuple(ids[start : start + size - 1]) == tail
        ]
        if taken:
            scores[row, taken] = -math.inf
    return scores


def without_stops(scores: Tensor, rows: Sequence[int], stop: Iterable[int]) -> Tensor:
    """``scores`` with -inf for tokens that stop, in rows that are too short to."""
    stops = [token for token in stop if 0 <= token < scores.shape[-1]]
    if not rows or not stops:
        return scores
    scores = scores.clone()
    scores[torch.tensor(rows)[:, None], torch.tensor(stops)] = -math.inf
    return scores
