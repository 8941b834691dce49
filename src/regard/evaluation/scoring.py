"""Scorers, which compute all scores: in training, in `regard evaluate` and for model cards.

A scorer holds evaluation data: ``count`` texts, questions or tokens. Called with a model in
evaluation mode, it returns the scores by name. Batches and their order depend only on the data and
the settings, so every caller gets the same scores.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.data.batches import ByLength, Feed
from regard.data.encoding import token_ids
from regard.data.records import Pair, Question
from regard.data.tables import Table
from regard.decoding.generation import generate
from regard.decoding.spans import best_spans
from regard.errors import InputError
from regard.evaluation import losses, metrics
from regard.evaluation.settings import WRITTEN, Evaluation
from regard.text.tokenizer import Tokenizer
from regard.text.windows import in_window
from regard.text.words import sentence_numbers, with_whole_words

Progress = Callable[[int, int], None]  # called with the number done and the total

DECODED_TOKENS = 2**15  # the maximum number of source tokens decoded at once, padding included
DECODED_BEAMS = 256  # the maximum number of beams decoded at once
LANES = 16  # the maximum number of parallel lanes of a text, for models with memory
LANE_PIECES = 16  # the minimum number of pieces in a lane


def _quiet(done: int, total: int) -> None:
    del done, total


def loss_scores(nats: float, count: int) -> dict[str, float]:
    """Mean loss and perplexity from a summed loss."""
    return {"loss": nats / count, "perplexity": metrics.perplexity(nats, count)}


# ----------------------------------------------------------------- translation, summarization


@dataclass
class PairScorer:
    """Scores of a sequence-to-sequence model.

    If ``names`` has BLEU, chrF or ROUGE, the sources of ``pairs`` are decoded and compared with
    their targets. Loss and perplexity are computed if there is a ``table`` of sources and targets.
    """

    pairs: Sequence[Pair]
    tokenizer: Tokenizer
    settings: Evaluation
    names: Sequence[str]
    length: int
    table: Table | None = None
    tokens: int = 2048
    outputs: list[str] = field(default_factory=list)  # the outputs of the latest call

    unit = "texts"

    @property
    def count(self) -> int:
        return len(self.pairs)

    def __call__(self, model: Any, progress: Progress = _quiet) -> dict[str, float]:
        scores = {} if self.table is None else loss_scores(*self._loss(model, self.table))
        written = [name for name in self.names if name in WRITTEN]
        if not written:
            return scores
        self.outputs = self._decode(model, progress)
        references = [pair.targets for pair in self.pairs]
        if "bleu" in written:
            scores["bleu"] = metrics.bleu(self.outputs, references, self.settings.tokenize)
        if "chrf" in written:
            scores["chrf"] = metrics.chrf(self.outputs, references)
        if any(name.startswith("rouge") for name in written):
            rouge = metrics.rouge(self.outputs, references)
            scores |= zip(("rouge-1", "rouge-2", "rouge-l"), rouge, strict=True)
        return scores

    def _loss(self, model: Any, table: Table) -> tuple[float, int]:
        special = losses.special_tokens(model)
        return losses.summed_loss(
            model,
            _by_length(table.lengths, self.tokens),
            table["source"].flat.device,
            lambda rows, _: losses.pair_batch(table, rows, special),
            losses.pair_loss,
        )

    def _decode(self, model: Any, progress: Progress) -> list[str]:
        end = model.config.end_token
        sources = list(token_ids(self.tokenizer, [pair.source for pair in self.pairs]))
        outputs = [""] * len(sources)
        # Longest first, so that the estimated remaining time is too high rather than too low.
        order = sorted(range(len(outputs)), key=lambda row: -len(sources[row]))
        size = max(DECODED_BEAMS // self.settings.num_beams, 1)
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            generated = generate(
                model,
                [[*sources[row], end] for row in rows],
                self.settings.decoding.strategy(),
                max_new_tokens=self.length,
                stop=[end],
                batch=size,
                tokens=DECODED_TOKENS,
            )
            for row, (best, *_) in zip(rows, generated, strict=True):
                outputs[row] = self.tokenizer.decode(best.ids)
            progress(start + len(rows), len(order))
        return outputs


def _by_length(lengths: Tensor, tokens: int) -> ByLength:
    lengths = lengths.cpu()
    return ByLength(lengths, max(tokens, int(lengths.sum(1).max())))


# -------------------------------------------------------------------------- question answering


class _Context(NamedTuple):
    """The tokens of a context."""

    offsets: Sequence[tuple[int, int]]  # in characters
    sentences: list[int]  # the number of each token's sentence


@dataclass
class AnswerScorer:
    """The loss on all windows of questions, and the scores of the best answer to each question.

    ``table`` has the windows, which :func:`regard.data.encoding.window_columns` makes.
    """

    questions: Sequence[Question]
    table: Table
    tokenizer: Tokenizer
    tokens: int = 2048
    always_answer: bool = False
    threshold: float = 0.0  # an answer must score more than this; no answer scores 0
    outputs: list[str] = field(default_factory=list)  # the outputs of the latest call
    _contexts: dict[str, _Context] = field(default_factory=dict)

    unit = "questions"

    @property
    def count(self) -> int:
        return len(self.questions)

    def __call__(self, model: Any, progress: Progress = _quiet) -> dict[str, float]:
        table, device = self.table, next(model.parameters()).device
        plan = _by_length(table["ids"].lengths[:, None], self.tokens)
        feed, pad = Feed(plan, 0, table["ids"].flat.device), self.tokenizer.id("[PAD]")
        nats, done = torch.zeros((), dtype=torch.float64, device=device), 0
        # For each question: the margin of the best span over no answer, and the span's first and
        # last token.
        best: dict[int, tuple[float, int, int]] = {}
        for _ in feed.batches:
            rows = feed.next()
            batch = losses.move(losses.answer_batch(table, rows, pad).batch, device)
            logits = losses.answer_logits(model, batch)
            nats += losses.answer_loss(logits, batch)
            facts = table["facts"].gather(rows.rows, 5, 0).tolist()
            lengths = table["ids"].lengths_of(rows.rows).tolist()
            width = batch.ids.shape[1]
            sentence = torch.tensor([
                in_window(self._context(number).sentences, split, offset, length, width)
                for (number, split, offset, *_), length in zip(facts, lengths, strict=True)
            ])  # fmt: skip
            spans = best_spans(*logits, batch.possible, sentence.to(device))
            columns = (part.tolist() for part in (spans.better, spans.first, spans.last))
            for (number, split, offset, *_), margin, first, last in zip(
                facts, *columns, strict=True
            ):
                span = margin, first - split + offset, last - split + offset
                best[number] = max(best.get(number, span), span)
            done += len(rows.rows)
            progress(done, len(table))
        self.outputs = [self._answer(number, *best[number]) for number in range(self.count)]
        references = [[answer.text for answer in q.answers] for q in self.questions]
        exact, f1 = metrics.answered(self.outputs, references)
        return {"loss": float(nats) / (2 * len(table)), "exact": exact, "f1": f1}

    def _context(self, number: int) -> _Context:
        text = self.questions[number].context
        if text not in self._contexts:
            offsets = self.tokenizer.encode(text, special=False).offsets
            self._contexts[text] = _Context(offsets, sentence_numbers(text, offsets))
        return self._contexts[text]

    def _answer(self, number: int, margin: float, first: int, last: int) -> str:
        if margin <= self.threshold and not self.always_answer:
            return ""
        offsets = self._context(number).offsets
        context = self.questions[number].context
        start, end = with_whole_words(context, offsets[first][0], offsets[last][1])
        return context[start:end]


# --------------------------------------------------------------------------- language modelling


class _Piece(NamedTuple):
    starts: Tensor  # int64 [rows]
    length: int
    scored: int  # the number of tokens at the end of each row that are predicted
    first: bool = True  # whether the memory is emptied before this piece


@dataclass
class TextScorer:
    """Loss, perplexity and bits per byte of a language model on one text.

    Every token except the first of the text is predicted exactly once.

    - Without memory, the text is cut into pieces of ``length`` tokens. With a ``context``, each
      piece begins with that many tokens of the previous piece, which are not predicted again.
    - A model with memory reads the text in up to 16 parallel lanes, unless there is a ``context``.
      Each lane has at least 16 pieces if possible, so that few tokens are predicted with an empty
      memory. The number of lanes depends on the text and ``length``, not on ``tokens``. The few
      tokens that remain are predicted in a last piece.

    ``tokens`` only limits memory use: the number of logits and of rows computed at once.
    """

    ids: Tensor  # int32 [tokens]
    size: int  # the size of the text in bytes
    length: int
    context: int = 0
    tokens: int = 2048
    temperature: float = 1.0

    unit = "tokens"

    def __post_init__(self) -> None:
        if self.count < 1:
            raise InputError("The text needs at least 2 tokens: the first one is not predicted.")

    @property
    def count(self) -> int:
        return len(self.ids) - 1

    def __call__(self, model: Any, progress: Progress = _quiet) -> dict[str, float]:
        memory = model.remembers and not self.context
        given: dict[str, Any] = {}
        nats = torch.zeros((), dtype=torch.float64, device=model.device)
        done = 0
        for piece in self._lanes() if memory else self._windows():
            places = piece.starts[:, None] + torch.arange(piece.length + 1)
            ids = losses.move(self.ids[places.to(self.ids.device)].long(), model.device)
            if memory and piece.first:
                given = {"memories": model.remember()}
            hidden = model.read(ids[:, :-1], **given)[:, -piece.scored :].flatten(0, 1)
            labels = ids[:, -piece.scored :].flatten()
            for some, targets in zip(
                hidden.split(self.tokens), labels.split(self.tokens), strict=True
            ):
                logits = model.logits(some).float() / self.temperature
                nats += cross_entropy(logits, targets, reduction="sum")
            done += len(labels)
            progress(done, self.count)
        total = float(nats)
        bits = metrics.bits_per_byte(total, self.size)
        return loss_scores(total, self.count) | {"bits_per_byte": bits}

    def _windows(self) -> Iterator[_Piece]:
        total, length, context = self.count, self.length, self.context
        rows, new = max(self.tokens // length, 1), length - context
        if context:
            first = min(context, total)
            yield _Piece(torch.tensor([0]), first, first)
        starts = torch.arange(0, max(total - length + 1, 0), new)
        for at in range(0, len(starts), rows):
            yield _Piece(starts[at : at + rows], length, new)
        if left := max(total - context, 0) % new:
            yield _Piece(torch.tensor([total - context - left]), context + left, left)

    def _lanes(self) -> Iterator[_Piece]:
        total, length = self.count, self.length
        lanes = max(min(LANES, total // (LANE_PIECES * length)), 1)
        lane = total // lanes
        for at in range(0, lane, length):
            size = min(length, lane - at)
            yield _Piece(torch.arange(lanes) * lane + at, size, size, first=not at)
        if left := total - lanes * lane:
            size = max(min(length, total), left)
            yield _Piece(torch.tensor([total - size]), size, left)


Scorer = PairScorer | AnswerScorer | TextScorer
