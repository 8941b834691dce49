"""Encode records into tables of token ids."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers.models import BPE

from regard.data.records import PAIR_TASKS, RECORDS, Bad, Pair, Question, Report
from regard.data.schema import key
from regard.data.sources import Data, Source, data_paths, records, source_dataset
from regard.data.tables import Ragged, Table, cached, content
from regard.errors import InputError
from regard.text.tokenizer import Tokenizer
from regard.text.windows import windows

TOKENIZERS = ("bpe", "wordpiece", "unigram", "words")


@dataclass(frozen=True, kw_only=True)
class TokenizerOptions:
    """The tokenizer of a run."""

    start: str | None = key(
        "the folder or the name of a tokenizer to use; without it, a tokenizer is trained", None
    )
    kind: str = key("the kind of tokenizer to train", "bpe", among=TOKENIZERS)
    size: int = key("the size of the vocabulary to train", 8000, least=16, most=2**20)
    special: tuple[str, ...] = key("special tokens, such as language tags", ())
    keep: int = key(
        "the number of tokens to keep of a WordPiece vocabulary: the most frequent ones in "
        "the training text; 0 keeps all",
        0,
        least=0,
    )
    dropout: float = key(
        "BPE-dropout: the share of merges that are skipped at random in training",
        0.0,
        least=0,
        only=PAIR_TASKS,
    )
    variants: int = key(
        "the number of tokenizations of each text with BPE-dropout; each epoch uses the next one",
        8,
        least=2,
    )


# --------------------------------------------------------------------------------------- tables


def table(
    data: Data, part: str, task: str, tokenizer: Tokenizer, options: TokenizerOptions
) -> tuple[Table, str]:
    """The table of token ids of a part of the data, cached on disk, and its SHA-256."""
    sources: tuple[Source, ...] = getattr(data, part)
    # BPE-dropout and unanswerable questions are for training data only.
    training = part == "train"
    variants = options.variants if training and options.dropout else 1
    unanswered = data.unanswered if training else 0.0
    key = {
        "form": 2,
        "task": task,
        "prepare": data.prepare,
        "length": data.length,
        "dropout": [options.dropout, variants],
        "unanswered": unanswered,
        "sources": [
            asdict(source)
            | {"files": content(data_paths(data, source.files))}
            | {"targets": content(data_paths(data, source.targets))}
            | {"dataset": source_dataset(data, source)._fingerprint if source.dataset else ""}
            for source in sources
        ],
        "tokenizer": _digest(tokenizer),
        **(
            {} if tokenizer.target is tokenizer else {"target tokenizer": _digest(tokenizer.target)}
        ),
    }

    def build() -> Table:
        report = Report()
        examples, facts = records(data, sources, RECORDS[task], report), dict[str, Any]()
        if RECORDS[task] is Pair:
            facts["variants"] = variants
            pairs = cast(Iterator[Pair], examples)
            columns = pair_columns(pairs, data.length, tokenizer, report, variants, options.dropout)
        elif RECORDS[task] is Question:
            questions = repeat_unanswered(cast(Iterator[Question], examples), unanswered)
            columns = window_columns(questions, tokenizer, data.length)
        else:
            columns, facts["bytes"] = text_columns(cast(Iterator[str], examples), tokenizer)
        report.check(data.max_bad_share, part)
        bad = [list(line) for line in report.bad]
        return Table(columns, {"report": str(report), "read": report.read, "bad": bad} | facts)

    result = cached(Path(data.cache).expanduser(), key, build)
    # A cached table may have been built with a higher max_bad_share.
    Report(result.facts["read"], [Bad(*bad) for bad in result.facts["bad"]]).check(
        data.max_bad_share, part
    )
    # Hash the content, not the key: with BPE-dropout, a rebuilt table has other tokens.
    digest = hashlib.sha256()
    for column in result.columns.values():
        digest.update(column.flat.numpy().tobytes())
        digest.update(column.starts.numpy().tobytes())
    return result, digest.hexdigest()


def _digest(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.tokenizer.to_str().encode()).hexdigest()


def token_ids(tokenizer: Tokenizer, lines: Iterable[str]) -> Iterator[list[int]]:
    """The token ids of each line, without special tokens. Lines are encoded in batches."""
    waiting = iter(lines)
    while some := list(islice(waiting, 8192)):
        for encoding in tokenizer.tokenizer.encode_batch_fast(some, add_special_tokens=False):
            yield encoding.ids


# ---------------------------------------------------------------------------------- pairs, text


def pair_columns(
    pairs: Iterator[Pair],
    length: int,
    tokenizer: Tokenizer,
    report: Report,
    variants: int = 1,
    dropout: float = 0.0,
) -> dict[str, Ragged]:
    """The columns "source" and "target" of all pairs; a pair has a row for each of its targets.

    A pair that an epoch has several ``times`` has as many rows. Pairs longer than ``length`` tokens
    are left out and reported. The first of ``variants`` is all rows without BPE-dropout; each
    further variant repeats all rows with BPE-dropout.
    """
    kept: list[tuple[str, str]] = []
    plain: list[tuple[list[int], list[int]]] = []
    rows = ((pair, target, report.place) for pair in pairs for target in pair.targets)
    read = 0
    while some := list(islice(rows, 8192)):
        encoded = _encode_pairs(tokenizer, [(pair.source, target) for pair, target, _ in some])
        for (pair, target, place), ids in zip(some, encoded, strict=True):
            if max(map(len, ids)) >= length:
                too_long = f"longer than {length} tokens (data.length)"
                report.bad.append(Bad(*place, too_long))
            else:
                read += 1
                kept += [(pair.source, target)] * pair.times
                plain += [ids] * pair.times
    report.read = read
    whole = list(plain)
    for _ in range(1, variants):
        with _bpe_dropout(tokenizer, dropout):
            # If a variant is too long, use the tokens without dropout.
            whole += [
                varied if max(map(len, varied)) < length else ids
                for varied, ids in zip(_encode_pairs(tokenizer, kept), plain, strict=True)
            ]
    ends = {"source": tokenizer.id("</s>"), "target": tokenizer.target.id("</s>")}
    return {
        name: Ragged.of([*ids[side], end] for ids in whole)
        for side, (name, end) in enumerate(ends.items())
    }


def _encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> Iterator[tuple[list[int], list[int]]]:
    sources, targets = ([pair[side] for pair in pairs] for side in (0, 1))
    return zip(token_ids(tokenizer, sources), token_ids(tokenizer.target, targets), strict=True)


@contextmanager
def _bpe_dropout(tokenizer: Tokenizer, share: float) -> Iterator[None]:
    """Context in which BPE skips merges at random (https://arxiv.org/abs/1910.13267)."""
    algorithms = [side.tokenizer.model for side in (tokenizer, tokenizer.target)]
    for algorithm in algorithms:
        if not isinstance(algorithm, BPE):
            raise InputError(
                f"tokenizer.dropout needs BPE, but this tokenizer is a {type(algorithm).__name__}. "
                "Set it to 0."
            )
    try:
        for algorithm in algorithms:
            algorithm.dropout = share
        yield
    finally:
        for algorithm in algorithms:
            algorithm.dropout = None


def text_columns(lines: Iterable[str], tokenizer: Tokenizer) -> tuple[dict[str, Ragged], int]:
    """All lines as one sequence of tokens, each line with a newline; and the number of bytes."""
    size = 0

    def with_newlines() -> Iterator[str]:
        nonlocal size
        for line in lines:
            size += len(line.encode()) + 1
            yield line + "\n"

    flat = Ragged.of(token_ids(tokenizer, with_newlines())).flat
    return {"text": Ragged(flat, torch.tensor([0, len(flat)]))}, size


# ------------------------------------------------------------------------------------ questions


def window_columns(
    questions: Iterable[Question], tokenizer: Tokenizer, length: int
) -> dict[str, Ragged]:
    """The windows of all questions as columns; a long context has several overlapping windows.

    The column "facts" has five numbers for each window: the number of its question, the position
    where its context starts, the index in the whole context of the first context token, and the
    positions of the answer's first and last token. If the window does not contain a whole answer,
    the last two are 0, the position of [CLS].
    """
    ids: list[list[int]] = []
    facts: list[list[int]] = []
    first, last = tokenizer.id("[CLS]"), tokenizer.id("[SEP]")
    for number, question in enumerate(questions):
        # Truncate long questions to leave space for the context.
        question_ids = tokenizer.encode(question.question, special=False).ids[: length // 2]
        context = tokenizer.encode(question.context, special=False)
        span = _answer_span(question, context.offsets)
        for window in windows(question_ids, context.ids, length, first=first, last=last):
            start = end = 0
            stop = window.offset + len(window.ids) - window.split - 1
            if span is not None and window.offset <= span[0] and span[1] < stop:
                start, end = (window.split + at - window.offset for at in span)
            ids.append(window.ids)
            facts.append([number, window.split, window.offset, start, end])
    return {"ids": Ragged.of(ids), "facts": Ragged.of(facts)}


def _answer_span(question: Question, offsets: Sequence[tuple[int, int]]) -> tuple[int, int] | None:
    """The indices of the first and the last token of the first answer, in the context."""
    if not question.answers:
        return None
    answer = question.answers[0]
    stop = answer.start + len(answer.text)
    inside = [n for n, (low, high) in enumerate(offsets) if low < stop and high > answer.start]
    return (inside[0], inside[-1]) if inside else None


def repeat_unanswered(questions: Iterable[Question], share: float) -> Iterator[Question]:
    """All questions; a share of them is repeated with a context that does not contain the answer.

    The repeated question has the previous context, which is often from the same article.
    """
    current: str | None = None
    previous: str | None = None
    due = 0.0
    for question in questions:
        yield question
        if question.context != current:
            current, previous = question.context, current
        due += share
        answers = [answer.text for answer in question.answers]
        if due >= 1 and previous is not None and not any(text in previous for text in answers):
            due -= 1
            yield question._replace(context=previous, answers=())
