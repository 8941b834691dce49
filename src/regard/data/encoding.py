"""From records to tables of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from tokenizers.models import BPE

from regard.data.records import Bad, Pair, Question, Report
from regard.data.schema import key
from regard.data.sources import RECORDS, Source, data_paths, records, source_dataset
from regard.data.tables import Ragged, Table, cached, content
from regard.errors import InputError
from regard.text.tokenizer import Tokenizer
from regard.text.windows import windows

if TYPE_CHECKING:
    from regard.training.recipe import Recipe

TOKENIZERS = ("bpe", "wordpiece", "unigram", "words")


def window_columns(
    questions: Iterable[Question], text: Tokenizer, length: int
) -> dict[str, Ragged]:
    """All windows of all questions as columns; long contexts have several that overlap.

    The facts of a window: which question, where the context starts, which token of the context
    comes first, and the answer's first and last token; both are 0, at [CLS], where it has none.
    """
    ids: list[list[int]] = []
    facts: list[list[int]] = []
    first, last = text.id("[CLS]"), text.id("[SEP]")
    for number, question in enumerate(questions):
        # A question that leaves no room for the context is cut.
        asked = text.encode(question.question, special=False).ids[: length // 2]
        context = text.encode(question.context, special=False)
        span = _span(question, context.offsets)
        for window in windows(asked, context.ids, length, first=first, last=last):
            start = end = 0
            stop = window.offset + len(window.ids) - window.split - 1
            if span is not None and window.offset <= span[0] and span[1] < stop:
                start, end = (window.split + at - window.offset for at in span)
            ids.append(window.ids)
            facts.append([number, window.split, window.offset, start, end])
    return {"ids": Ragged.of(ids), "facts": Ragged.of(facts)}


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


def token_ids(text: Tokenizer, lines: Iterable[str]) -> Iterator[list[int]]:
    """The ids of many lines, some thousand at once, nothing added."""
    waiting = iter(lines)
    while some := list(islice(waiting, 8192)):
        for encoding in text.tokenizer.encode_batch_fast(some, add_special_tokens=False):
            yield encoding.ids


def table(recipe: Recipe, part: str, text: Tokenizer) -> tuple[Table, str]:
    """The token ids of a part of the data, from the cache or made anew, and their SHA-256."""
    sources: tuple[Source, ...] = getattr(recipe.data, part)
    key = {
        "form": 2,
        "task": recipe.task,
        "prepare": recipe.data.prepare,
        "length": recipe.data.length,
        "dropout": [recipe.tokenizer.dropout, _variants(recipe, part)],
        "unanswered": _unanswered(recipe, part),
        "sources": [
            asdict(source)
            | {"files": content(data_paths(recipe, source.files))}
            | {"targets": content(data_paths(recipe, source.targets))}
            | {"dataset": source_dataset(recipe, source)._fingerprint if source.dataset else ""}
            for source in sources
        ],
        "tokenizer": _digest(text),
        **({} if text.target is text else {"target tokenizer": _digest(text.target)}),
    }
    folder = Path(recipe.data.cache).expanduser()
    found = cached(folder, key, lambda: _table(recipe, part, text))
    # A table from the cache may have been made where more was accepted.
    Report(found.facts["read"], [Bad(*bad) for bad in found.facts["bad"]]).check(
        recipe.data.bad, part
    )
    # By content: what was dropped at random would be dropped otherwise if it were made again.
    digest = hashlib.sha256()
    for column in found.columns.values():
        digest.update(column.flat.numpy().tobytes())
        digest.update(column.starts.numpy().tobytes())
    return found, digest.hexdigest()


def _digest(text: Tokenizer) -> str:
    return hashlib.sha256(text.tokenizer.to_str().encode()).hexdigest()


def _variants(recipe: Recipe, part: str) -> int:
    """How many times over a part has all its pairs, each time cut into tokens otherwise."""
    return recipe.tokenizer.variants if part == "train" and recipe.tokenizer.dropout else 1


def _unanswered(recipe: Recipe, part: str) -> float:
    return recipe.data.unanswered if part == "train" else 0.0


def _table(recipe: Recipe, part: str, text: Tokenizer) -> Table:
    """Read and tokenised; what could not be used is among the facts."""
    report = Report()
    found = records(recipe, getattr(recipe.data, part), report)
    kind, facts = RECORDS[recipe.task], {}
    if kind is Pair:
        facts["variants"] = _variants(recipe, part)
        pairs = cast(Iterator[Pair], found)
        columns = _pair_columns(pairs, recipe, text, report, facts["variants"])
    elif kind is Question:
        questions = elsewhere(cast(Iterator[Question], found), _unanswered(recipe, part))
        columns = window_columns(questions, text, recipe.data.length)
    else:
        columns, facts["bytes"] = _text_columns(cast(Iterator[str], found), text)
    report.check(recipe.data.bad, part)
    said: dict[str, Any] = {
        "report": str(report),
        "read": report.read,
        "bad": [list(bad) for bad in report.bad],
    }
    return Table(columns, said | facts)


def _pair_columns(
    found: Iterator[Pair], recipe: Recipe, text: Tokenizer, report: Report, variants: int
) -> dict[str, Ragged]:
    """Both sides of all pairs; then of all pairs again, cut otherwise at random, and so on."""
    most = recipe.data.length - 1
    kept: list[tuple[str, str]] = []
    plain: list[tuple[list[int], list[int]]] = []
    # A pair with several targets is as many examples.
    rows = ((pair.source, target, report.place) for pair in found for target in pair.targets)
    while some := list(islice(rows, 8192)):
        cut = _cut(text, [(source, target) for source, target, _ in some])
        for (source, target, where), ids in zip(some, cut, strict=True):
            if max(map(len, ids)) > most:
                too_long = f"longer than {recipe.data.length} tokens (data.length)"
                report.bad.append(Bad(*where, too_long))
            else:
                kept.append((source, target))
                plain.append(ids)
    report.read = len(kept)
    whole = list(plain)
    for _ in range(1, variants):
        with _dropping(text, recipe.tokenizer.dropout):
            # What is too long when it is cut finer stays as it was.
            whole += [
                finer if max(map(len, finer)) <= most else ids
                for finer, ids in zip(_cut(text, kept), plain, strict=True)
            ]
    ends = {"source": text.id("</s>"), "target": text.target.id("</s>")}
    return {
        name: Ragged.of([*ids[side], end] for ids in whole)
        for side, (name, end) in enumerate(ends.items())
    }


def _cut(
    text: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> Iterator[tuple[list[int], list[int]]]:
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    return zip(token_ids(text, sources), token_ids(text.target, targets), strict=True)


@contextmanager
def _dropping(text: Tokenizer, share: float) -> Iterator[None]:
    """Within, BPE leaves out merges at random (https://arxiv.org/abs/1910.13267)."""
    algorithms = [one.tokenizer.model for one in (text, text.target)]
    for algorithm in algorithms:
        if not isinstance(algorithm, BPE):
            raise InputError(
                f"tokenizer.dropout is for BPE; this tokenizer is a {type(algorithm).__name__}."
            )
    try:
        for algorithm in algorithms:
            algorithm.dropout = share
        yield
    finally:
        for algorithm in algorithms:
            algorithm.dropout = None


def _text_columns(found: Iterator[str], text: Tokenizer) -> tuple[dict[str, Ragged], int]:
    """One long sequence, each line with its newline, and how many bytes it was."""
    size = 0

    def lines() -> Iterator[str]:
        nonlocal size
        for line in found:
            size += len(line.encode()) + 1
            yield line + "\n"

    whole = Ragged.of(token_ids(text, lines()))
    one = Ragged(whole.flat, torch.tensor([0, len(whole.flat)]))
    return {"text": one}, size


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """The tokenizer of a run."""

    start: str | None = key(
        "a tokenizer to use, a folder or a name; without it, one is trained", None
    )
    kind: str = key("the kind of tokenizer to train", "bpe", among=TOKENIZERS)
    size: int = key("the size of the vocabulary to train", 8000, least=16, most=2**20)
    special: tuple[str, ...] = key("special tokens, such as language tags", ())
    keep: int = key(
        "the number of tokens to keep of a WordPiece vocabulary, the most frequent ones in "
        "the training text; 0 for all",
        0,
        least=0,
    )
    dropout: float = key(
        "BPE-dropout: the share of merges that are skipped at random in training", 0.0, least=0
    )
    variants: int = key(
        "the number of different BPE-dropout tokenizations of each text, used in turn, one "
        "an epoch",
        8,
        least=2,
    )
