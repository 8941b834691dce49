"""Beam search, separately for each sentence."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from regard.decoding.choosing import allowed, check_chance, totals
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
        # With so many candidates every beam can continue, even if all stop tokens score higher.
        most = max(2, 1 + len(self.stop)) * self.beams
        logits = logits.float()
        scores = torch.tensor([search.scores for search in searches], device=logits.device)
        total = totals(logits)
        taken = (search.taken for search in searches for _ in search.paths)
        past = (search.begun + _ids(path) for search in searches for path in search.paths)
        logits = allowed(logits, self.strategy, self.stop, taken, past)
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
        self.scores: list[float] = [0.0]  # for each beam, its log-probability
        self.origins: list[int] = [0]  # for each beam, the earlier beam that it continues
        self.tokens: list[int] = []  # for each beam, its last token
        self.finished: list[Generated] = []
        self.done = False

    @property
    def results(self) -> list[Generated]:
        return self.finished[: self.strategy.num_return_sequences]

    def advance(self, candidates: Sequence[tuple[float, int, int]]) -> None:
        """Continue with the best ``candidates``: tuples of score, origin and next token."""
        if self.done:
            return
        candidates = [candidate for candidate in candidates if candidate[0] > -math.inf]
        if not candidates:  # every token would repeat an n-gram
            length = max(self.taken, 1) ** self.strategy.length_penalty
            beams = zip(self.paths, self.scores, strict=True)
            running = [(_ids(path), score / length) for path, score in beams if score > _NEVER]
            self._finish(Generated(ids, score, False) for ids, score in running)
            self.done = True
            return
        self.taken += 1
        strategy, size, taken = self.strategy, self.strategy.num_beams, self.taken
        full = taken == self.length
        going: list[tuple[float, int, int]] = []
        ended: list[Generated] = []
        for rank, (value, origin, token) in enumerate(candidates):
            end = token in self.stop
            if (end or full) and rank < size:
                ids = _ids(self.paths[origin])
                score = value / taken**strategy.length_penalty
                ended.append(Generated(ids if end else [*ids, token], score, end))
            if not end and len(going) < size:
                going.append((value, origin, token))
        self._finish(ended)
        going += [(2 * _NEVER, 0, 0)] * (size - len(going))
        self.paths = [(self.paths[origin], token) for _, origin, token in going]
        self.scores, self.origins, self.tokens = (list(part) for part in zip(*going, strict=True))
        self.done = full or (len(self.finished) == size and self._settled())

    def _finish(self, outputs: Iterable[Generated]) -> None:
        # Sorting is stable: earlier sequences stay before later ones with the same score.
        ranked = sorted([*self.finished, *outputs], key=lambda output: -output.score)
        self.finished = ranked[: self.strategy.num_beams]

    def _settled(self) -> bool:
        """Return whether no running beam can beat a finished sequence."""
        strategy = self.strategy
        at_any_length = strategy.early_stopping == "never" and strategy.length_penalty > 0
        length = self.length if at_any_length else self.taken
        best = self.scores[0] / length**strategy.length_penalty
        return strategy.early_stopping is True or best <= self.finished[-1].score


def _ids(path: Path) -> list[int]:
    ids = []
    while path is not None:
        path, token = path
        ids.append(token)
    return ids[::-1]


def top(scores: Tensor, count: int, width: int = 128) -> tuple[Tensor, Tensor]:
    """Return the ``count`` largest values of each row and their indices, fast on a CPU.

    Each row is divided into parts. The largest values are in the parts with the largest maxima.

    >>> top(torch.arange(2000.0)[None], 2)
    (tensor([[1999., 1998.]]), tensor([[1999, 1998]]))
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
