"""Question answering: the best span of a context of any length, read in windows that overlap."""

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
from regard.models.bundle import Bundle, Name, Precision, open_bundle
from regard.models.model import pad
from regard.tasks.attended import mean_rows
from regard.tasks.defaults import check_default
from regard.tasks.records import Answer, WordAttention
from regard.tasks.writing import one_or_many
from regard.text.tokenizer import Encoded
from regard.text.windows import Window, windows
from regard.text.words import words

WINDOW = 384  # tokens, as most models of question answering have been trained

# ------------------------------------------------------------------------------ windows and spans


# ------------------------------------------------------------------------------------- answering


@one_or_many
def answer(
    questions: list[str],
    context: str | Sequence[str],
    *,
    model: Name = "answer",
    threshold: float = 0.0,
    window: int | None = None,
    batch: int = 16,
    look: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
) -> list[Answer]:
    """The words of a context that answer a question, or that none do.

    Several questions have one context, or one each. ``model`` is a BERT for question answering: the
    name of a shipped one, a folder, or a model of the hub. A context of any length is read in
    windows of ``window`` tokens. An answer must be better than none by more than ``threshold``;
    with ``-math.inf`` there always is one. ``look`` sees which words of the context each word of
    the question attended to, over all heads, which takes one more pass.

    >>> found = answer("Who sat on the mat?", "The cat sat on the mat.")
    >>> found.text, (found.start, found.end)
    ('The cat', (0, 7))
    >>> print(answer("Who wrote it?", "The cat sat on the mat."))
    No answer.
    """
    check_default(model)
    one = open_bundle(model, "answer", device, precision)
    at_least("answer(batch=...)", batch, 1)
    if not (is_number(threshold) or threshold in (-math.inf, math.inf)):
        raise InputError(f"answer(threshold=...) is a number, not {threshold!r}.")
    contexts = [context] * len(questions) if isinstance(context, str) else _listed(context)
    if len(contexts) != len(questions):
        raise InputError(
            f"Questions have one context or one each: {len(questions)} of them, but "
            f"{len(contexts)} contexts."
        )
    return _answers(one, questions, contexts, threshold, window, batch, look)


def _listed(contexts: Any) -> list[str]:
    found = list(contexts) if isinstance(contexts, Iterable) else [contexts]
    if wrong := [one for one in found if not isinstance(one, str)]:
        raise InputError(f"The context is a text, or a list of texts, but got {wrong[0]!r}.")
    return found


class _Found(NamedTuple):
    """The best span of a question so far."""

    better: float
    share: float
    window: Window
    first: int  # token of the window
    last: int


def _answers(
    one: Bundle,
    questions: Sequence[str],
    contexts: Sequence[str],
    threshold: float,
    window: int | None,
    batch: int,
    look: bool,
) -> list[Answer]:
    began = perf_counter()
    for name, texts in (("question", questions), ("context", contexts)):
        if any(not text.strip() for text in texts):
            raise InputError(f"The {name} is empty. Give some words.")
    length = min(one.window, WINDOW) if window is None else window
    if not 8 <= length <= one.window:
        raise InputError(f"{one.name} reads windows of 8 to {one.window} tokens, not {window}.")
    read: dict[str, Encoded] = {}
    for text in (*questions, *contexts):
        if text not in read:
            read[text] = one.tokenizer.encode(text, special=False)
            if not read[text].ids:
                raise InputError(f"The text {text[:40]!r} has no token that {one.name} knows.")
    ends = {"first": one.tokenizer.id("[CLS]"), "last": one.tokenizer.id("[SEP]")}
    rows = [
        (number, part)
        for number, (question, context) in enumerate(zip(questions, contexts, strict=True))
        for part in windows(read[question].ids, read[context].ids, length, **ends)
    ]
    best: dict[int, _Found] = {}
    rows.sort(key=lambda row: -len(row[1].ids))
    for low in range(0, len(rows), batch):
        some = rows[low : low + batch]
        found = _read(one, [part for _, part in some])
        for (number, part), *values in zip(some, *(v.tolist() for v in found), strict=True):
            better, share, first, last = values
            if number not in best or better > best[number].better:
                best[number] = _Found(better, share, part, first, last)
    seconds = (perf_counter() - began) / max(len(questions), 1)
    records = []
    for number, (question, context) in enumerate(zip(questions, contexts, strict=True)):
        mine = [part for row, part in rows if row == number]
        span = best[number]
        offsets = read[context].offsets
        move = span.window.offset - span.window.split
        answered = span.better > threshold
        start, end = offsets[span.first + move][0], offsets[span.last + move][1]
        records.append(
            Answer(
                text=context[start:end] if answered else "",
                score=span.better,
                tokens=sum(len(part.ids) for part in mine),
                seconds=seconds,
                model=one.name,
                attended=_attended(one, question, context, read, span.window) if look else None,
                question=question,
                start=start if answered else None,
                end=end if answered else None,
                probability=span.share,
                windows=len(mine),
            )
        )
    return records


class _Batch(NamedTuple):
    """Windows as the model takes them, [batch, n]."""

    ids: Tensor
    token_types: Tensor  # 1 for the context and what closes it
    possible: Tensor  # whether an answer may be here: in the context, or at [CLS]
    padding: Padding | None


def _batch(one: Bundle, parts: Sequence[Window]) -> _Batch:
    rows, device = [part.ids for part in parts], one.model.device
    ids, padding = pad(rows, 0, "right", one.model.config.vocabulary, device)
    lengths = torch.tensor([[len(row)] for row in rows], device=device)
    splits = torch.tensor([[part.split] for part in parts], device=device)
    place = torch.arange(ids.shape[1], device=device)[None]
    token_types = (place >= splits) & (place < lengths)
    possible = token_types & (place < lengths - 1) | (place == 0)
    return _Batch(ids, token_types.long(), possible, padding)


def _read(one: Bundle, parts: Sequence[Window]) -> Spans:
    batch = _batch(one, parts)
    with torch.inference_mode():
        start, end = one.model(batch.ids, token_types=batch.token_types, padding=batch.padding)
        return best_spans(start, end, batch.possible)


def _attended(
    one: Bundle, question: str, context: str, read: dict[str, Encoded], part: Window
) -> WordAttention | None:
    """What the words of the question attend to in the window that has the answer."""
    asked = read[question].offsets
    here = read[context].offsets[part.offset :][: len(part.ids) - part.split - 1]
    low, high = here[0][0], here[-1][1]
    queries = words(question)
    keys = [word for word in words(context) if low <= word.start and word.end <= high]
    if not queries or not keys:
        return None
    batch = _batch(one, [part])
    rows = range(1, 1 + len(asked))
    with torch.inference_mode(), watch(one.model, See(rows=rows)) as seen:
        one.model(batch.ids, token_types=batch.token_types)
    pooled = pool(mean_rows(seen)[:, part.split : -1], asked, queries, here, keys)
    config = one.model.config
    where = f"The mean over {config.depth} layers of {config.heads} heads"
    return WordAttention.of(
        (question, queries), (context, keys), pooled, where, ("question", "context")
    )
