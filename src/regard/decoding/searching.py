"""Beam search, separately for each sentence."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from regard.decoding.choosing import check_chance, totals, without_repeats, without_stops
from regard.decoding.strategies import Beam, Generated

_NEVER = -1e9  # the score of a missing beam; finite, so that sums never become NaN

Path = tuple["Path", int] | None  # linked list: the path before the last token, and that token


class Searches:
    """Chooses the best candidates of each sentence."""

    def __init__(self, strategy: Beam, length: int, stop: frozenset[int]) -> None:
        self.strategy, self.length, self.stop = strategy, length, stop
        self.beams = strategy.num_beams

    def begin(self, begun: list[int]) -> Search:
        """Return a search that continues ``begun``."""
        return Search(self.strategy, self.length, self.stop, begun)

    def choose(self, logits: Tensor, searches: Sequence[Search]) -> Tensor:
        """Append one token to each beam, and return the tokens, [rows, 1].

        ``logits`` has a row for each beam of each search. In the first step, a search has one beam.
        """
        # Every beam can continue even if the best candidates are all stop tokens.
        most = max(2, 1 + len(self.stop)) * self.beams
        logits = logits.float()
        scores = torch.tensor([search.scores for search in searches], device=logits.device)
        total = totals(logits)
        if self.strategy.no_repeat_ngram_size:
            past = [beam for search in searches for beam in search.past()]
            logits = without_repeats(logits.clone(), past, self.strategy.no_repeat_ngram_size)
        short = [
            row
            for row, search in enumerate(s for s in searches for _ in s.paths)
            if search.taken < self.strategy.min_new_tokens
        ]
        logits = without_stops(logits, short, self.stop)
        values, tokens = top(logits, min(most, logits.shape[-1]))  # [rows, candidates]
        values = (values - total).view(*scores.shape, -1) + scores[..., None]
        values, at = values.flatten(1).topk(min(most, values[0].numel()))  # [sentences, candidates]
        origins = at // tokens.shape[-1]
        tokens = tokens.view(len(searches), -1).gather(1, at)
        for search, *candidates in zip(
            searches, values.tolist(), origins.tolist(), tokens.tolist(), strict=True
        ):
            check_chance(candidates[0][0])
            search.advance(list(zip(*candidates, strict=True)))
        chosen = [search.tokens for search in searches]
        return torch.tensor(chosen, device=logits.device).view(-1, 1)


class Search:
    """The search for one sentence: its running beams, and its best finished sequences."""

    def __init__(self, strategy: Beam, length: int, stop: frozenset[int], begun: list[int]) -> None:
        self.strategy, self.length, self.stop, self.begun = strategy, length, stop, begun
        self.taken = 0  # number of steps
        self.paths: list[Path] = [None]
        self.scores: list[float] = [0.0]  # of each beam
        self.origins: list[int] = [0]  # for each beam, the earlier beam that it continues
        self.tokens: list[int] = []  # for each beam, its last token
        self.finished: list[Generated] = []
        self.done = False

    @property
    def results(self) -> list[Generated]:
        return self.finished[: self.strategy.num_return_sequences]

    def past(self) -> list[list[int]]:
        """The ids of each beam so far."""
        return [self.begun + _ids(path) for path in self.paths]

    def advance(self, candidates: Sequence[tuple[float, int, int]]) -> None:
        """Continue with the best ``candidates``: tuples of score, origin and next token."""
        if self.done:
            return
        candidates = [candidate for candidate in candidates if candidate[0] > -math.inf]
        if not candidates:  # every token would repeat an n-gram
            self._end()
            return
        self.taken += 1
        strategy, size, taken = self.strategy, self.strategy.num_beams, self.taken
        full = taken == self.length
        going: list[tuple[float, int, int]] = []
        for rank, (value, origin, token) in enumerate(candidates):
            end = token in self.stop
            if (end or full) and rank < size:
                ids = _ids(self.paths[origin])
                score = value / taken**strategy.length_penalty
                self.finished.append(Generated(ids if end else [*ids, token], score, end))
            if not end and len(going) < size:
                going.append((value, origin, token))
        # Sorting is stable: earlier sequences stay before later ones with the same score.
        self.finished.sort(key=lambda output: -output.score)
        del self.finished[size:]
        going += [(2 * _NEVER, 0, 0)] * (size - len(going))
        self.paths = [(self.paths[origin], token) for _, origin, token in going]
        self.scores, self.origins, self.tokens = (list(part) for part in zip(*going, strict=True))
        best = self.scores[0]
        self.done = full or not _goes_on(self.finished, best, taken, self.length, strategy)

    def _end(self) -> None:
        """End the search and count the running beams as finished."""
        for path, score in zip(self.paths, self.scores, strict=True):
            if score > _NEVER:
                length = max(self.taken, 1) ** self.strategy.length_penalty
                self.finished.append(Generated(_ids(path), score / length, False))
        self.finished.sort(key=lambda output: -output.score)
        del self.finished[self.strategy.num_beams :]
        self.done = True


def _ids(path: Path) -> list[int]:
    ids = []
    while path is not None:
        path, token = path
        ids.append(token)
    return ids[::-1]


def top(scores: Tensor, count: int, width: int = 128) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest values of each row and their indices, fast on a CPU.

    Each row is divided into parts. The largest values are in the parts with the largest maxima.

    >>> top(torch.arange(1000.0)[None], 2)
    (tensor([[999., 998.]]), tensor([[999, 998]]))
    """
    rows, length = scores.shape
    parts = length // width
    if parts < 4 * count or scores.is_cuda:
        values, at = scores.topk(count)
        return values, at
    body = scores[:, : parts * width].view(rows, parts, width)
    chosen = body.amax(-1).topk(count, sorted=False).indices[..., None]  # [rows, count, 1]
    index = (chosen * width + torch.arange(width, device=scores.device)).flatten(1)
    rest = torch.arange(parts * width, length, device=scores.device).expand(rows, -1)
    index = torch.cat((index, rest), dim=1)
    values, at = scores.gather(1, index).topk(count)
    return values, index.gather(1, at)


def _goes_on(
    finished: Sequence[Generated], best: float, taken: int, length: int, strategy: Beam
) -> bool:
    """Return whether a running beam may still beat a finished sequence."""
    if len(finished) < strategy.num_beams:
        return True
    if strategy.early_stopping is True:
        return False
    longest = (
        length if strategy.early_stopping == "never" and strategy.length_penalty > 0 else taken
    )
    return bool(best / longest**strategy.length_penalty > finished[-1].score)
