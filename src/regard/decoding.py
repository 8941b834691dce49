"""Decoding: from what a model says comes next to whole sequences. It knows ids only.

What becomes of a prompt depends on the prompt alone, not on the batch it is in. Sequences that are
done leave the batch; the beams of a sentence share what it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar

import torch
from torch import Tensor

from regard.errors import InputError


class Kept(Protocol):
    """What a model keeps between steps."""

    pads: Tensor | None  # [batch]: how many of the first ids of each row are padding

    def spread(self, beams: int) -> None:
        """From here on each sentence has so many beams, that all stand where it stands."""

    def follow(self, origins: Tensor) -> None:
        """Let beam ``i`` of each sentence go on from its beam ``origins[:, i]``."""

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences only, in this order."""


S = TypeVar("S", bound=Kept)


class Decoder(Protocol[S]):
    """What a model must do to be decoded."""

    def begin(self, prompts: Sequence[Sequence[int]], room: int = 0) -> tuple[Tensor, S]:
        """The first ids to step over, [batch, n], and the state before them."""

    def step(self, ids: Tensor, state: S) -> Tensor:
        """The logits after the last of ``ids`` [batch, n]: [batch, vocabulary].

        With beams there is a row for each, those of a sentence side by side.
        """


@dataclass(frozen=True, slots=True)
class Greedy:
    """Always the likeliest token."""

    no_repeat: int = 0  # no n-gram of this size comes twice; 0 allows all

    def __post_init__(self) -> None:
        _at_least("Greedy(no_repeat=...)", self.no_repeat, 0)


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens drawn by their probability, among the ``top_k`` likeliest and within ``top_p`` of it.

    A prompt and a seed give one result, alone or in any batch.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 allows all
    top_p: float = 1.0
    seed: int = 0
    no_repeat: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise InputError(
                f"Sample(temperature=...) must be above 0, but got {self.temperature}. "
                "Greedy() is what a temperature of 0 means."
            )
        if not 0 < self.top_p <= 1:
            raise InputError(f"Sample(top_p=...) must be above 0, up to 1, but got {self.top_p}.")
        _at_least("Sample(top_k=...)", self.top_k, 0)
        _at_least("Sample(no_repeat=...)", self.no_repeat, 0)


@dataclass(frozen=True, slots=True)
class Beam:
    """The ``best`` of what ``size`` sequences, kept side by side, find.

    A finished sequence scores its log-probability over ``length ** length_penalty``. Search ends
    when no running beam looks able to beat the worst one kept (``early=False``), when ``size`` are
    finished (``True``), or when none can, were it to grow to the full length (``"never"``).
    """

    size: int = 4
    length_penalty: float = 1.0
    early: bool | Literal["never"] = False
    best: int = 1
    no_repeat: int = 0

    def __post_init__(self) -> None:
        _at_least("Beam(size=...)", self.size, 1)
        _at_least("Beam(no_repeat=...)", self.no_repeat, 0)
        if not 1 <= self.best <= self.size:
            raise InputError(f"Beam(best=...) must be from 1 to {self.size}, but got {self.best}.")
        if self.early not in (True, False, "never"):
            raise InputError(f'Beam(early=...) is True, False or "never", but got {self.early!r}.')


How = Greedy | Sample | Beam


@dataclass(frozen=True, slots=True)
class Output:
    """One sequence found: its ids without prompt and stop token, and how it scored."""

    ids: list[int]
    score: float  # the sum of log-probabilities; with Beam, over length ** length_penalty
    stopped: bool  # whether a stop token ended it, rather than the length


def generate(
    model: Decoder[S],
    prompts: Sequence[Sequence[int]],
    how: How | None = None,
    *,
    length: int,
    stop: Sequence[int] = (),
    batch: int = 32,
) -> list[list[Output]]:
    """At most ``length`` new tokens for each prompt: one output each, or the ``best`` of its beams.

    ``how`` is greedy by default. Prompts are what the model's ``begin`` takes: a text to go on
    from, or a source to translate. Those of like length share a batch; results keep their order.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=1, heads=2)).eval()
    >>> [[first], [second]] = generate(model, [[1, 2, 3], [4]], Beam(size=2), length=5)
    >>> len(first.ids), len(second.ids)
    (5, 5)
    """
    how = Greedy() if how is None else how
    _at_least("generate(length=...)", length, 1)
    _at_least("generate(batch=...)", batch, 1)
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    found: list[list[Output]] = [[] for _ in prompts]
    for start in range(0, len(order), batch):
        rows = order[start : start + batch]
        some = [prompts[row] for row in rows]
        with torch.inference_mode():
            if isinstance(how, Beam):
                results = _beam(model, some, how, length, stop)
            else:
                results = [[one] for one in _one_by_one(model, some, how, length, stop)]
        for row, result in zip(rows, results, strict=True):
            found[row] = result
    return found


def stream(
    model: Decoder[S],
    prompt: Sequence[int],
    how: Greedy | Sample | None = None,
    *,
    length: int,
    stop: Sequence[int] = (),
) -> Iterator[int]:
    """The tokens of :func:`generate` for one prompt, each as soon as it is known.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=1, heads=2)).eval()
    >>> list(stream(model, [1, 2], length=4)) == generate(model, [[1, 2]], length=4)[0][0].ids
    True
    """
    how = Greedy() if how is None else how
    _at_least("stream(length=...)", length, 1)
    with torch.inference_mode():
        ids, state = model.begin([prompt], room=length)
        chooser = _Chooser(how, _begun(ids, state))
    for _ in range(length):
        with torch.inference_mode():
            tokens, _ = chooser.choose(model.step(ids, state), [0])
        token = int(tokens[0])
        if token in stop:
            return
        yield token
        with torch.inference_mode():
            ids = tokens[:, None]


def _one_by_one(
    model: Decoder[S],
    prompts: Sequence[Sequence[int]],
    how: Greedy | Sample,
    length: int,
    stop: Sequence[int],
) -> list[Output]:
    """Each prompt with one sequence of its own."""
    ids, state = model.begin(prompts, room=length)
    chooser = _Chooser(how, _begun(ids, state))
    live = list(range(len(prompts)))  # the prompt each row of the batch belongs to
    found: list[list[int]] = [[] for _ in prompts]
    scores = [0.0] * len(prompts)
    stopped = [False] * len(prompts)
    for step in range(length):
        tokens, chances = chooser.choose(model.step(ids, state), live)
        for prompt, token, chance in zip(live, tokens.tolist(), chances.tolist(), strict=True):
            if not stopped[prompt]:
                scores[prompt] += chance
                stopped[prompt] = token in stop
                if not stopped[prompt]:
                    found[prompt].append(token)
        staying = [row for row, prompt in enumerate(live) if not stopped[prompt]]
        if not staying or step + 1 == length:
            break
        if _worth_leaving(len(staying), len(live)):
            index = torch.tensor(staying, device=tokens.device)
            state.keep(index)
            tokens = tokens[index]
            live = [live[row] for row in staying]
        ids = tokens[:, None]
    return [Output(*parts) for parts in zip(found, scores, stopped, strict=True)]


def _worth_leaving(staying: int, rows: int) -> bool:
    """Whether so many are done that what is kept of the others is worth moving together."""
    return 8 * (rows - staying) >= rows


def _begun(first: Tensor, state: Kept) -> list[list[int]]:
    """The first ids of each row, without padding."""
    pads = [0] * len(first) if state.pads is None else state.pads.tolist()
    return [row[skip:] for row, skip in zip(first.tolist(), pads, strict=True)]


class _Chooser:
    """Picks the next token of each row, and keeps what it must know of those before."""

    def __init__(self, how: Greedy | Sample, begun: list[list[int]]) -> None:
        self.how, self.past = how, begun
        self.draws: list[torch.Generator] = []
        if isinstance(how, Sample):
            self.draws = [torch.Generator().manual_seed(how.seed) for _ in begun]

    def choose(self, logits: Tensor, live: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The tokens of rows that belong to the prompts ``live``, and their log-probabilities."""
        scores = logits.float()
        total = scores.logsumexp(-1)
        if self.how.no_repeat:
            past = [self.past[prompt] for prompt in live]
            scores = _without_repeats(scores.clone(), past, self.how.no_repeat)
        if isinstance(self.how, Sample):
            draws = torch.stack([torch.rand((), generator=self.draws[p]) for p in live])
            tokens = _draw(scores, self.how, draws.to(scores.device))
        else:
            tokens = scores.argmax(-1)
        if self.how.no_repeat:
            for prompt, token in zip(live, tokens.tolist(), strict=True):
                self.past[prompt].append(token)
        return tokens, scores.gather(-1, tokens[:, None])[:, 0] - total


def _draw(scores: Tensor, how: Sample, draws: Tensor) -> Tensor:
    """One token for each row, where its number in ``draws`` falls among the probabilities."""
    values, tokens = (scores / how.temperature).sort(dim=-1, descending=True, stable=True)
    if how.top_k:
        values, tokens = values[:, : how.top_k], tokens[:, : how.top_k]
    shares = values.softmax(-1)
    before = shares.cumsum(-1) - shares  # what likelier tokens have already
    shares = shares.masked_fill(before >= how.top_p, 0)
    reached = shares.cumsum(-1)
    at = (reached < draws[:, None] * reached[:, -1:]).sum(-1)
    last = (shares > 0).sum(-1) - 1
    drawn: Tensor = tokens.gather(-1, torch.minimum(at, last)[:, None])[:, 0]
    return drawn


def _without_repeats(scores: Tensor, past: Sequence[Sequence[int]], size: int) -> Tensor:
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


_NEVER = -1e9  # the score of a beam that is not there; finite, so that sums stay numbers

Path = tuple["Path", int] | None  # what a beam came by: all but its last token, and that


def _beam(
    model: Decoder[S],
    prompts: Sequence[Sequence[int]],
    how: Beam,
    length: int,
    stop: Sequence[int],
) -> list[list[Output]]:
    """Beam search; every sentence goes its own way, and leaves the batch when it is done."""
    ids, state = model.begin(prompts, room=length * how.size)
    searches = [_Search(how, length, stop, begun) for begun in _begun(ids, state)]
    live = list(searches)
    # Enough candidates for every beam to go on, should all the best ones stop.
    most = max(2, 1 + len(stop)) * how.size
    scores = torch.zeros(len(live), 1, device=ids.device)  # at first all beams are one
    for taken in range(1, length + 1):
        logits = model.step(ids, state).float()
        total = logits.logsumexp(-1, keepdim=True)
        if how.no_repeat:
            past = [beam for search in live for beam in search.past()]
            logits = _without_repeats(logits.clone(), past, how.no_repeat)
        values, tokens = top(logits, min(most, logits.shape[-1]))  # [rows, candidates of each]
        values = (values - total).view(*scores.shape, -1) + scores[..., None]
        values, at = values.flatten(1).topk(min(most, values[0].numel()))  # [sentences, candidates]
        origins = at // tokens.shape[-1]
        tokens = tokens.view(len(live), -1).gather(1, at)
        for search, *candidates in zip(
            live, values.tolist(), origins.tolist(), tokens.tolist(), strict=True
        ):
            search.advance(taken, list(zip(*candidates, strict=True)))
        staying = [row for row, search in enumerate(live) if not search.done]
        if not staying:
            break
        if taken == 1:
            state.spread(how.size)
        if _worth_leaving(len(staying), len(live)):
            state.keep(torch.tensor(staying, device=ids.device))
            live = [live[row] for row in staying]
        if taken > 1:
            state.follow(torch.tensor([search.origins for search in live], device=ids.device))
        scores = torch.tensor([search.scores for search in live], device=ids.device)
        ids = torch.tensor([search.tokens for search in live], device=ids.device).view(-1, 1)
    return [search.finished[: how.best] for search in searches]


class _Search:
    """The search for one sentence: its running beams, and the best it has finished."""

    def __init__(self, how: Beam, length: int, stop: Sequence[int], begun: list[int]) -> None:
        self.how, self.length, self.stop, self.begun = how, length, frozenset(stop), begun
        self.paths: list[Path] = [None]
        self.scores: list[float] = []  # of each beam
        self.origins: list[int] = []  # the beam before that each goes on from
        self.tokens: list[int] = []  # with which
        self.finished: list[Output] = []
        self.done = False

    def past(self) -> list[list[int]]:
        """What each beam has so far."""
        return [self.begun + _ids(path) for path in self.paths]

    def advance(self, taken: int, candidates: Sequence[tuple[float, int, int]]) -> None:
        """Go on with the best of ``candidates``: scores, beams they come from and next tokens."""
        if self.done:
            return
        how, size, full = self.how, self.how.size, taken == self.length
        going: list[tuple[float, int, int]] = []
        for rank, (value, origin, token) in enumerate(candidates):
            end = token in self.stop
            if (end or full) and rank < size:
                ids = _ids(self.paths[origin])
                score = value / taken**how.length_penalty
                self.finished.append(Output(ids if end else [*ids, token], score, end))
            if not end and len(going) < size:
                going.append((value, origin, token))
        # Sorting keeps the order of equals: what was found first stays first.
        self.finished.sort(key=lambda output: -output.score)
        del self.finished[size:]
        going += [(2 * _NEVER, 0, 0)] * (size - len(going))
        self.paths = [(self.paths[origin], token) for _, origin, token in going]
        self.scores, self.origins, self.tokens = (list(part) for part in zip(*going, strict=True))
        best = self.scores[0]
        self.done = full or not _goes_on(self.finished, best, taken, self.length, how)


def _ids(path: Path) -> list[int]:
    found = []
    while path is not None:
        path, token = path
        found.append(token)
    return found[::-1]


def top(scores: Tensor, count: int, width: int = 128) -> tuple[Tensor, Tensor]:
    """The ``count`` largest of each row and where they are, as ``topk`` but faster on a CPU.

    Rows are cut into parts. The largest of all lie in the parts whose own largest are largest.

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


def _goes_on(finished: Sequence[Output], best: float, taken: int, length: int, how: Beam) -> bool:
    """Whether a sentence may still find better than it has."""
    if len(finished) < how.size:
        return True
    if how.early is True:
        return False
    longest = length if how.early == "never" and how.length_penalty > 0 else taken
    return bool(best / longest**how.length_penalty > finished[-1].score)


def _at_least(what: str, value: int, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise InputError(f"{what} must be a whole number from {least} on, but got {value!r}.")
