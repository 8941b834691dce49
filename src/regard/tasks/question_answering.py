"""Question answering: find the best span of a context, read in overlapping windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.decoding.spans import Spans, best_spans
from regard.decoding.strategies import at_least, is_number
from regard.errors import InputError
from regard.interpret.pooling import pool
from regard.interpret.watching import watch
from regard.mechanism.masks import Padding
from regard.mechanism.seeing import See
from regard.models.bundle import Bundle, Name, Precision
from regard.models.model import pad
from regard.tasks.attended import mean_rows
from regard.tasks.confidence import (
    chance,
    chance_of_no_answer,
    doubts_about_answer,
    own_threshold,
    trust,
)
from regard.tasks.defaults import open_model
from regard.tasks.records import Answer, WordAttention
from regard.tasks.writing import Check, no_check, one_or_many
from regard.text.tokenizer import Encoded
from regard.text.windows import Window, in_window, windows
from regard.text.words import sentence_numbers, with_whole_words, words

TASK = "question answering"  # the task's name in a recipe
WINDOW = 384  # tokens; most question answering models were trained with this length


@one_or_many
def answer(
    questions: list[str],
    context: str | Sequence[str],
    *,
    model: Name = "answer",
    threshold: float | None = None,
    window: int | None = None,
    batch: int = 16,
    attended: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
    check: Check | None = None,
) -> list[Answer]:
    """Answer a question with a part of a context, or report that the context has no answer.

    Several questions share one context, or each has its own. ``model`` is a BERT for question
    answering. A context of any length is read in windows of ``window`` tokens. An answer is part of
    one sentence, and must score more than ``threshold`` (no answer scores 0). By default, that is
    the model's own threshold, or 0. With ``-math.inf`` there is always an answer.
    ``attended`` returns the attention weights of the question's words on the context's words.
    :mod:`regard.tasks` describes the other options.

    >>> record = answer("Who sat on the mat?", "The cat sat on the mat.")
    >>> record.text, (record.start, record.end)
    ('The cat', (0, 7))
    >>> print(answer("Who wrote it?", "The cat sat on the mat."))
    No answer.
    """
    bundle = open_model(model, "answer", device, precision)
    check = check or no_check
    at_least("answer(batch=...)", batch, 1)
    if threshold is None:
        threshold = own_threshold(bundle, TASK)
    elif not (is_number(threshold) or threshold in (-math.inf, math.inf)):
        raise InputError(f"answer(threshold=...) is a number, not {threshold!r}.")
    contexts = [context] * len(questions) if isinstance(context, str) else _as_texts(context)
    if len(contexts) != len(questions):
        raise InputError(
            f"Give one context, or one for each question: got {len(questions)} questions and "
            f"{len(contexts)} contexts."
        )
    began = perf_counter()
    for name, texts in (("question", questions), ("context", contexts)):
        if any(not text.strip() for text in texts):
            raise InputError(f"The {name} is empty. Give some words.")
    length = min(bundle.window, WINDOW) if window is None else window
    if not 8 <= length <= bundle.window:
        raise InputError(
            f"{bundle.name} reads windows of 8 to {bundle.window} tokens, not {window}."
        )
    encoded = {text: _encode(bundle, text) for text in dict.fromkeys((*questions, *contexts))}
    numbers = {
        text: sentence_numbers(text, encoded[text].offsets) for text in dict.fromkeys(contexts)
    }
    ends = {"first": bundle.tokenizer.id("[CLS]"), "last": bundle.tokenizer.id("[SEP]")}
    rows = [
        (number, part)
        for number, (question, text) in enumerate(zip(questions, contexts, strict=True))
        for part in windows(encoded[question].ids, encoded[text].ids, length, **ends)
    ]
    best: dict[int, _BestSpan] = {}
    rows.sort(key=lambda row: -len(row[1].ids))
    for low in range(0, len(rows), batch):
        check()
        some = rows[low : low + batch]
        sentences = [numbers[contexts[number]] for number, _ in some]
        spans = _read(bundle, [part for _, part in some], sentences)
        for (number, part), *values in zip(some, *(v.tolist() for v in spans), strict=True):
            score, probability, first, last = values
            if number not in best or score > best[number].score:
                best[number] = _BestSpan(score, probability, part, first, last)
    seconds = (perf_counter() - began) / max(len(questions), 1)
    records = []
    for number, (question, text) in enumerate(zip(questions, contexts, strict=True)):
        check()
        parts = [part for row, part in rows if row == number]
        span = best[number]
        offsets = encoded[text].offsets
        move = span.window.offset - span.window.split
        answered = span.score > threshold
        right = chance(bundle, TASK, span.score, span.probability)
        start, end = with_whole_words(
            text, offsets[span.first + move][0], offsets[span.last + move][1]
        )
        trusted = (
            trust(right, doubts_about_answer(question, text, start))
            if answered
            else trust(chance_of_no_answer(bundle, TASK, span.score, 1 - right))
        )
        records.append(
            Answer(
                text=text[start:end] if answered else "",
                score=span.score,
                tokens=sum(len(part.ids) for part in parts),
                seconds=seconds,
                model=bundle.name,
                confidence=trusted.confidence,
                reasons=trusted.reasons,
                attended=(
                    _attended(bundle, question, text, encoded, span.window) if attended else None
                ),
                question=question,
                start=start if answered else None,
                end=end if answered else None,
                probability=span.probability,
                windows=len(parts),
            )
        )
    return records


def _as_texts(contexts: Any) -> list[str]:
    texts = list(contexts) if isinstance(contexts, Iterable) else [contexts]
    if wrong := [item for item in texts if not isinstance(item, str)]:
        raise InputError(f"The context is a text, or a list of texts, but got {wrong[0]!r}.")
    return texts


def _encode(bundle: Bundle, text: str) -> Encoded:
    encoded = bundle.tokenizer.encode(text, special=False)
    if not encoded.ids:
        raise InputError(f"The text {text[:40]!r} has no token that {bundle.name} knows.")
    return encoded


class _BestSpan(NamedTuple):
    """The best span of a question so far."""

    score: float
    probability: float
    window: Window
    first: int  # the index of its first token in the window
    last: int


class _Batch(NamedTuple):
    """Windows as inputs of the model, [batch, n]."""

    ids: Tensor
    token_types: Tensor  # 1 for the context and the token that ends it
    possible: Tensor  # where an answer may start or end: in the context; [CLS] means no answer
    padding: Padding | None


def _batch(bundle: Bundle, parts: Sequence[Window]) -> _Batch:
    rows, device = [part.ids for part in parts], bundle.model.device
    ids, padding = pad(rows, 0, "right", bundle.model.config.vocabulary, device)
    lengths = torch.tensor([[len(row)] for row in rows], device=device)
    splits = torch.tensor([[part.split] for part in parts], device=device)
    place = torch.arange(ids.shape[1], device=device)[None]
    token_types = (place >= splits) & (place < lengths)
    possible = token_types & (place < lengths - 1) | (place == 0)
    return _Batch(ids, token_types.long(), possible, padding)


def _read(bundle: Bundle, parts: Sequence[Window], sentences: Sequence[list[int]]) -> Spans:
    """The best spans of windows, given the sentence of each token of their contexts."""
    batch = _batch(bundle, parts)
    width = batch.ids.shape[1]
    sentence = torch.tensor([
        in_window(numbers, part.split, part.offset, len(part.ids), width)
        for part, numbers in zip(parts, sentences, strict=True)
    ])  # fmt: skip
    with torch.inference_mode():
        start, end = bundle.model(batch.ids, token_types=batch.token_types, padding=batch.padding)
        return best_spans(start, end, batch.possible, sentence.to(start.device))


def _attended(
    bundle: Bundle, question: str, context: str, encoded: dict[str, Encoded], part: Window
) -> WordAttention | None:
    """The weights of the question's words on the words of the window that has the answer."""
    asking = encoded[question].offsets
    here = encoded[context].offsets[part.offset :][: len(part.ids) - part.split - 1]
    low, high = here[0][0], here[-1][1]
    queries = words(question)
    keys = [word for word in words(context) if low <= word.start and word.end <= high]
    if not queries or not keys:
        return None
    batch = _batch(bundle, [part])
    rows = range(1, 1 + len(asking))
    with torch.inference_mode(), watch(bundle.model, See(rows=rows)) as seen:
        bundle.model(batch.ids, token_types=batch.token_types)
    pooled = pool(mean_rows(seen)[:, part.split : -1], asking, queries, here, keys)
    config = bundle.model.config
    where = f"The mean over {config.depth} layers of {config.heads} heads"
    return WordAttention.of(
        (question, queries), (context, keys), pooled, where, ("question", "context")
    )
