"""Question answering: where in a context an answer starts and ends, or that it has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.data.batches import ByLength, Feed, Plan, Rows
from regard.data.records import Question
from regard.data.tables import Table
from regard.decoding.spans import best_spans
from regard.evaluation import metrics
from regard.mechanism.masks import Padding
from regard.text.tokenizer import Tokenizer
from regard.training.objectives import Prepared, Stateless, moved


class AnswerBatch(NamedTuple):
    ids: Tensor  # [batch, n]
    token_types: Tensor  # [batch, n]: 1 for the context and what closes it
    possible: Tensor  # [batch, n]: whether an answer can be here: in the context, or at [CLS]
    padding: Padding | None
    start: Tensor  # [batch]
    end: Tensor  # [batch]


class Answers(Stateless):
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
        token_types = (places >= split[:, None]) & (places < lengths[:, None])
        possible = token_types & (places < lengths[:, None] - 1) | (places == 0)
        padding = None if rows.even else Padding(lengths)
        read = ids.gather(rows.rows, longest, self.pad)
        batch = AnswerBatch(read, token_types.long(), possible, padding, start, end)
        return Prepared(batch, 2 * len(rows.rows))

    def loss(self, model: nn.Module, batch: AnswerBatch) -> Tensor:
        return self.loss_of(self.scores(model, batch), batch)

    def loss_of(self, scores: tuple[Tensor, Tensor], batch: AnswerBatch) -> Tensor:
        """The loss that :meth:`scores` come to."""
        start, end = scores
        return cross_entropy(start, batch.start, reduction="sum") + cross_entropy(
            end, batch.end, reduction="sum"
        )

    def scores(self, model: nn.Module, batch: AnswerBatch) -> tuple[Tensor, Tensor]:
        """The logits of each token to be the answer's first and last, where it can be."""
        start, end = model(batch.ids, token_types=batch.token_types, padding=batch.padding)
        low = torch.finfo(torch.float32).min / 2  # two of them still have a sum
        return (
            start.float().masked_fill(~batch.possible, low),
            end.float().masked_fill(~batch.possible, low),
        )

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {} if self.exam is None else self.exam(model)


class Exam:
    """Questions held out: the loss on their windows, and the answers found in them."""

    def __init__(
        self,
        questions: Sequence[Question],
        table: Table,
        text: Tokenizer,
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
            scores = held.scores(model, batch)
            nats += held.loss_of(scores, batch)
            facts = self.table["facts"].gather(rows.rows, 5, 0)
            spans = best_spans(*scores, batch.possible)
            for (number, split, offset, *_), better, first, last in zip(
                facts.tolist(),
                spans.better.tolist(),
                spans.first.tolist(),
                spans.last.tolist(),
                strict=True,
            ):
                found = better, first - split + offset, last - split + offset
                best[number] = max(best.get(number, found), found)
        self.outputs = [self._text(number, *best[number]) for number in range(len(self.questions))]
        references = [[answer.text for answer in q.answers] for q in self.questions]
        exact, f1 = metrics.answered(self.outputs, references)
        return {"loss": float(nats) / (2 * len(self.table)), "exact": exact, "f1": f1}

    def _text(self, number: int, better: float, first: int, last: int) -> str:
        if better <= 0 and not self.always:
            return ""
        context = self.questions[number].context
        offsets = self.text.encode(context, special=False).offsets
        return context[offsets[first][0] : offsets[last][1]]
