"""The one definition of each score of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.data import readers
from regard.data.encoding import token_ids, window_columns
from regard.data.records import Pair, Question, Record
from regard.data.schema import nearest
from regard.data.tables import Ragged, Table
from regard.decoding.generation import generate
from regard.decoding.state import Memories
from regard.errors import InputError
from regard.evaluation import metrics
from regard.evaluation.settings import TOKENS
from regard.models.model import Model
from regard.text.tokenizer import Tokenizer
from regard.training.answers import Exam
from regard.training.recipe import Recipe

Progress = Callable[[int, int], None]  # how much is done, and of how much
Piece = tuple[Tensor, int, int]  # where some pieces start, how long they are, how much is told


def score_pairs(
    recipe: Recipe,
    model: Any,
    text: Tokenizer,
    records: Sequence[Record],
    names: Sequence[str],
    show: Progress,
) -> tuple[dict[str, float], int, str]:
    pairs = readers.together(cast("Sequence[Pair]", records))
    settings = recipe.evaluation
    pairs = pairs[: settings.examples or len(pairs)]
    end = model.config.end_token
    prompts = [[*ids, end] for ids in token_ids(text, [pair.source for pair in pairs])]
    outputs = [""] * len(pairs)
    # By length, and from the longest on: a guess of the time left is then too long, not too short.
    order = sorted(range(len(pairs)), key=lambda row: -len(prompts[row]))
    size = max(256 // settings.beam, 1)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        found = generate(
            model,
            [prompts[row] for row in rows],
            settings.decoding.strategy(),
            max_new_tokens=recipe.data.length,
            stop=[end],
            batch=size,
            tokens=TOKENS,
        )
        for row, (best, *_) in zip(rows, found, strict=True):
            outputs[row] = text.decode(best.ids)
        show(start + len(rows), len(order))
    references = [pair.targets for pair in pairs]
    scores: dict[str, float] = {}
    if "bleu" in names:
        scores["bleu"] = metrics.bleu(outputs, references, settings.tokenize)
    if "chrf" in names:
        scores["chrf"] = metrics.chrf(outputs, references)
    if any(name.startswith("rouge") for name in names):
        rouge = metrics.rouge(outputs, references)
        scores |= zip(("rouge-1", "rouge-2", "rouge-l"), rouge, strict=True)
    return scores, len(pairs), "texts"


def score_answers(
    recipe: Recipe, model: Model, text: Tokenizer, records: Sequence[Record], show: Progress
) -> tuple[dict[str, float], int, str]:
    questions = cast("list[Question]", list(records))
    questions = questions[: recipe.evaluation.examples or len(questions)]
    # Some at a time, of like length, so that there is something to show on the way.
    questions.sort(key=lambda question: -len(question.context))
    outputs: list[str] = []
    for start in range(0, len(questions), 128):
        some = questions[start : start + 128]
        table = Table(window_columns(some, text, recipe.data.length), {})
        exam = Exam(some, table, text, recipe.batch.tokens, recipe.evaluation.always)
        exam(model)
        outputs += exam.outputs
        show(len(outputs), len(questions))
    references = [[answer.text for answer in question.answers] for question in questions]
    found = metrics.answered(outputs, references)
    return found._asdict(), len(questions), "questions"


def score_text(
    recipe: Recipe, model: Any, text: Tokenizer, records: Sequence[Record], show: Progress
) -> tuple[dict[str, float], int, str]:
    lines = [f"{line}\n" for line in cast("Sequence[str]", records)]
    whole = sum(len(line.encode()) for line in lines)
    flat = Ragged.of(token_ids(text, lines)).flat
    total = len(flat) - 1  # the first token is told from nothing
    if total < 1:
        raise InputError("The text has a single token: there is nothing to tell from it.")
    length, context = recipe.data.length, recipe.data.context
    rows = max(recipe.batch.tokens // length, 1)
    with _remembering(model, recipe.model.config) as remember:
        if remember is None or context:
            pieces, given = _windows(total, length, rows, context), {}
        else:
            pieces, given = _lanes(total, length, rows), {"memories": remember()}
        nats, count = 0.0, 0
        for starts, size, last in pieces:
            piece = flat[starts[:, None] + torch.arange(size + 1)].long().to(model.device)
            read, labels = piece[:, :-1], piece[:, -last:].flatten()
            hidden = model.read(read, **given)[:, -last:]
            told = model.logits(hidden).float().flatten(0, 1) / recipe.evaluation.temperature
            nats += float(cross_entropy(told, labels, reduction="sum"))
            count += len(starts) * last
            show(count, total)
    # A few tokens may be left that fill no row; then the share of the text that was read counts.
    scores = {
        "loss": nats / count,
        "perplexity": metrics.perplexity(nats, count),
        "bits_per_byte": metrics.bits_per_byte(nats, whole * count / total),
    }
    return scores, count, "tokens"


@contextmanager
def _remembering(
    model: Model, config: Mapping[str, Any]
) -> Iterator[Callable[[], Memories | None] | None]:
    """What a model remembers with, if it does; within, its memory is as long as ``config`` says."""
    nearest("key model.config.", config, ["memory"] if model.remembers else [])
    if not model.remembers:
        yield None
        return
    before = model.config
    model.config = replace(before, **config)
    try:
        yield model.remember
    finally:
        model.config = before


def _windows(total: int, length: int, rows: int, context: int) -> Iterator[Piece]:
    """Some pieces at a time: each begins with ``context`` tokens that were told before."""
    if context:
        first = min(context, total)
        yield torch.tensor([0]), first, first
    new = length - context
    whole = torch.arange(0, max(total - length + 1, 0), new)
    for at in range(0, len(whole), rows):
        yield whole[at : at + rows], length, new
    left = max(total - context, 0) % new
    if left:
        yield torch.tensor([total - context - left]), context + left, left


def _lanes(total: int, length: int, rows: int) -> Iterator[Piece]:
    """As :func:`_windows`, of readers side by side that each go on where they stopped."""
    rows = max(min(rows, total // length), 1)
    lane = total // rows
    for at in range(0, lane, length):
        size = min(length, lane - at)
        yield torch.arange(rows) * lane + at, size, size
