"""Question answering: where in a context an answer starts and ends, or that it has none."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.mechanism.masks import Padding
from regard.text import Text
from regard.training import metrics
from regard.training.data import ByLength, Feed, Plan, Ragged, Rows, Table
from regard.training.objectives import Prepared, moved
from regard.training.reading import Question

LONGEST_ANSWER = 30  # tokens


class Window(NamedTuple):
    """[CLS] question [SEP] some of the context [SEP]."""

    ids: list[int]
    split: int  # where the context starts
    offset: int  # which token of the context comes first
    start: int  # of the answer; 0, at [CLS], where this window has none
    end: int  # its last token


def windows(questions: Iterable[Question], text: Text, length: int) -> dict[str, Ragged]:
    """All windows of all questions as columns; long contexts have several that overlap."""
    ids: list[list[int]] = []
    facts: list[list[int]] = []
    for number, question in enumerate(questions):
        for window in _windows(question, text, length):
            ids.append(window.ids)
            facts.append([number, window.split, window.offset, window.start, window.end])
    return {"ids": Ragged.of(ids), "facts": Ragged.of(facts)}


def _windows(question: Question, text: Text, length: int) -> Iterator[Window]:
    first, last = text.id("[CLS]"), text.id("[SEP]")
    # A question that leaves no room for the context is cut.
    asked = text.encode(question.question, special=False).ids[: length // 2]
    context = text.encode(question.context, special=False)
    room = length - len(asked) - 3
    split = len(asked) + 2
    span = _span(question, context.offsets)
    for offset in range(0, max(len(context.ids) - room, 0) + room // 2, max(room // 2, 1)):
        piece = context.ids[offset : offset + room]
        start = end = 0
        if span is not None and offset <= span[0] and span[1] < offset + len(piece):
            start, end = (split + at - offset for at in span)
        yield Window([first, *asked, last, *piece, last], split, offset, start, end)
        if offset + room >= len(context.ids):
            return


def _span(question: Question, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The first and the last token of the first answer."""
    if not question.answers:
        return None
    answer = question.answers[0]
    stop = answer.start + len(answer.text)
    inside = [n for n, (low, high) in enumerate(offsets) if low < stop and high > answer.start]
    return (inside[0], inside[-1]) if inside else None


def elsewhere(questions: Iterable[Question], share: float) -> Iterator[Question]:
    """All questions, and a share of them once more, of a context that says nothing about it.

    That is the one that was read before, mostly of the same article or kind.
    """
    here: str | None = None
    before: str | None = None
    due = 0.0
    for question in questions:
        yield question
        if question.context != here:
            here, before = question.context, here
        due += share
        answers = [answer.text for answer in question.answers]
        if due >= 1 and before is not None and not any(answer in before for answer in answers):
            due -= 1
            yield question._replace(context=before, answers=())


class AnswerBatch(NamedTuple):
    ids: Tensor  # [batch, n]
    kinds: Tensor  # [batch, n]: 1 for the context and what closes it
    possible: Tensor  # [batch, n]: whether an answer can be here: in the context, or at [CLS]
    padding: Padding | None
    start: Tensor  # [batch]
    end: Tensor  # [batch]


class Answers:
    """The first and last token of an answer are told, or [CLS] where the window has none."""

    def __init__(self, table: Table, tokens: int, pad: int, exam: Exam | None) -> None:
        self.table, self.pad, self.exam = table, pad, exam
        self.plan: Plan = ByLength(table["ids"].lengths.cpu()[:, None], tokens)

    @property
    def device(self) -> torch.device:
        return self.table["ids"].flat.device

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        del random
        ids, longest = self.table["ids"], rows.longest[0]
        _, split, _, start, end = self.table["facts"].gather(rows.rows, 5, 0).unbind(1)
        places = torch.arange(longest, device=rows.rows.device)
        lengths = ids.lengths_of(rows.rows)
        kinds = (places >= split[:, None]) & (places < lengths[:, None])
        possible = kinds & (places < lengths[:, None] - 1) | (places == 0)
        padding = None if rows.even else Padding(lengths)
        read = ids.gather(rows.rows, longest, self.pad)
        batch = AnswerBatch(read, kinds.long(), possible, padding, start, end)
        return Prepared(batch, 2 * len(rows.rows))

    def loss(self, model: nn.Module, batch: AnswerBatch) -> Tensor:
        start, end = self.scores(model, batch)
        return cross_entropy(start, batch.start, reduction="sum") + cross_entropy(
            end, batch.end, reduction="sum"
        )

    def scores(self, model: nn.Module, batch: AnswerBatch) -> tuple[Tensor, Tensor]:
        """The logits of each token to be the answer's first and last, where it can be."""
        start, end = model(batch.ids, kinds=batch.kinds, padding=batch.padding)
        low = torch.finfo(torch.float32).min / 2  # two of them still have a sum
        return (
            start.float().masked_fill(~batch.possible, low),
            end.float().masked_fill(~batch.possible, low),
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {} if self.exam is None else self.exam(model)

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        del state


class Exam:
    """Questions held out: the loss on their windows, and the answers found in them."""

    def __init__(
        self,
        questions: Sequence[Question],
        table: Table,
        text: Text,
        tokens: int,
        always: bool = False,
    ) -> None:
        self.questions, self.table, self.text, self.tokens = questions, table, text, tokens
        self.always = always  # whether every question is answered
        self.outputs: list[str] = []  # of the last evaluation

    def __call__(self, model: nn.Module) -> dict[str, float]:
        held = Answers(self.table, self.tokens, self.text.id("[PAD]"), None)
        feed, random = Feed(held.plan, 0, held.device), torch.Generator(held.device)
        there = next(model.parameters()).device
        nats = torch.zeros((), dtype=torch.float64, device=there)
        # For each question: how much better its best span is than none, and its tokens.
        best: dict[int, tuple[float, int, int]] = {}
        for _ in feed.batches:
            rows = feed.next()
            batch = moved(held.prepare(rows, random).batch, there)
            nats += held.loss(model, batch)
            facts = self.table["facts"].gather(rows.rows, 5, 0)
            for number, found in self._spans(*held.scores(model, batch), facts):
                best[number] = max(best.get(number, found), found)
        self.outputs = [self._text(number, *best[number]) for number in range(len(self.questions))]
        references = [[answer.text for answer in q.answers] for q in self.questions]
        exact, f1 = metrics.answered(self.outputs, references)
        return {"loss": float(nats) / (2 * len(self.table)), "exact": exact, "f1": f1}

    def _spans(
        self, start: Tensor, end: Tensor, facts: Tensor
    ) -> Iterator[tuple[int, tuple[float, int, int]]]:
        """The best span of each window, by how much it is better than none."""
        length = start.shape[1]
        whole = start[:, :, None] + end[:, None]  # [batch, first, last]
        place = torch.arange(length, device=start.device)
        far = place[None] - place[:, None]
        allowed = (far >= 0) & (far < LONGEST_ANSWER) & (place > 0)[:, None]
        scores, at = whole.masked_fill(~allowed, -torch.inf).flatten(1).max(1)
        better = (scores - whole[:, 0, 0]).tolist()
        for (number, split, offset, *_), value, index in zip(
            facts.tolist(), better, at.tolist(), strict=True
        ):
            first, last = divmod(index, length)
            yield number, (value, first - split + offset, last - split + offset)

    def _text(self, number: int, better: float, first: int, last: int) -> str:
        if better <= 0 and not self.always:
            return ""
        context = self.questions[number].context
        offsets = self.text.encode(context, special=False).offsets
        return context[offsets[first][0] : offsets[last][1]]
