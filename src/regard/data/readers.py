"""Readers of data files; every bad line is reported with its file, line number and reason.

Files are UTF-8, plain or compressed with gzip or xz, which is detected from their first bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import lzma
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import zip_longest
from pathlib import Path
from typing import Any, BinaryIO, cast

from regard.data.records import Answer, Pair, Question, Report
from regard.errors import InputError

# --------------------------------------------------------------------------------------- lines


@contextmanager
def opened(file: Path) -> Iterator[BinaryIO]:
    """Open a file as a stream of bytes, decompressed."""
    try:
        with file.open("rb") as raw:
            start = raw.read(6)
            raw.seek(0)
            if start.startswith(b"\x1f\x8b"):
                with gzip.open(raw) as plain:
                    yield cast(BinaryIO, plain)
            elif start == b"\xfd7zXZ\x00":
                with lzma.open(raw) as plain:
                    yield cast(BinaryIO, plain)
            else:
                yield raw
    except FileNotFoundError:
        raise InputError(f"There is no file {file}.") from None
    except (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError) as error:
        raise InputError(f"{file} is damaged: {error}.") from None
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}.") from None


def _lines(file: Path) -> Iterator[tuple[int, str | None]]:
    """The lines of a file with their numbers from 1; None for a line that is not UTF-8."""
    with opened(file) as stream:
        for number, raw in enumerate(stream, 1):  # a binary stream splits lines at newlines only
            clean = raw.removeprefix(b"\xef\xbb\xbf") if number == 1 else raw
            try:
                yield number, clean.rstrip(b"\r\n").decode()
            except UnicodeDecodeError:
                yield number, None


_NOT_UTF8 = "not UTF-8"


def read_text(files: Sequence[Path], report: Report) -> Iterator[str]:
    """The lines of plain text files, without newlines; empty lines are included."""
    for file in files:
        for number, line in _lines(file):
            if line is None:
                report.refuse(file, number, _NOT_UTF8)
            else:
                report.accept(file, number)
                yield line


def read_parallel(
    sources: Sequence[Path], targets: Sequence[Path], report: Report
) -> Iterator[Pair]:
    """Pairs from parallel files: line i of a target file translates line i of its source file."""
    if len(sources) != len(targets):
        raise InputError(
            f"Parallel text needs as many target files as source files, but got {len(sources)} "
            f"source files and {len(targets)} target files."
        )
    for source, target in zip(sources, targets, strict=True):
        for first, second in zip_longest(_lines(source), _lines(target)):
            if first is None or second is None:
                (longer, number), shorter = (
                    ((target, second[0]), source) if first is None else ((source, first[0]), target)
                )
                raise InputError(
                    f"{longer} has a line {number}, but {shorter} has fewer lines: the files do "
                    "not belong together."
                )
            file = source if first[1] is None else target
            yield from _pair(first[1], (second[1],), file, first[0], report)


def read_tsv(files: Sequence[Path], columns: tuple[int, int], report: Report) -> Iterator[Pair]:
    """Pairs from tab-separated files; ``columns`` of source and target are counted from 1."""
    for file in files:
        for number, line in _lines(file):
            if line is None:
                report.refuse(file, number, _NOT_UTF8)
                continue
            cells = line.split("\t")
            if len(cells) < max(columns):
                report.refuse(file, number, f"fewer than {max(columns)} columns")
                continue
            source, target = (cells[column - 1] for column in columns)
            yield from _pair(source, (target,), file, number, report)


def read_jsonl(files: Sequence[Path], fields: tuple[str, str], report: Report) -> Iterator[Pair]:
    """Pairs from files with one JSON object per line; ``fields`` name its source and target."""
    for file, number, row in _objects(files, report):
        yield from pair(row.get(fields[0]), row.get(fields[1]), file, number, report)


def read_questions(files: Sequence[Path], report: Report) -> Iterator[Question]:
    """Questions from files with one JSON object per line: id, question, context and answers."""
    for file, number, row in _objects(files, report):
        yield from question(row, row.get("context"), "start", file, number, report)


def read_squad(files: Sequence[Path], report: Report) -> Iterator[Question]:
    """Questions from JSON files of SQuAD. A bad question is reported by its number in the file."""
    for file in files:
        with opened(file) as stream:
            try:
                articles = json.load(stream)["data"]
                paragraphs = [part for article in articles for part in article["paragraphs"]]
                rows = [(row, part["context"]) for part in paragraphs for row in part["qas"]]
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(f"{file} is not in the format of SQuAD: {error!r}.") from None
        for number, (row, context) in enumerate(rows, 1):
            yield from question(row, context, "answer_start", file, number, report)


def _has_surrogate(row: dict[str, Any], line: str) -> bool:
    """Whether a JSON object has a lone surrogate, which UTF-8 cannot encode."""
    if "\\ud" not in line.lower():  # a surrogate can only come from an escape such as \ud800
        return False
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return True
    return False


def _objects(files: Sequence[Path], report: Report) -> Iterator[tuple[Path, int, dict[str, Any]]]:
    for file in files:
        for number, line in _lines(file):
            try:
                row = None if line is None else json.loads(line)
            except (ValueError, RecursionError):
                row = None
            if line is None or not isinstance(row, dict):
                report.refuse(file, number, _NOT_UTF8 if line is None else "not a JSON object")
            elif _has_surrogate(row, line):
                report.refuse(file, number, "a lone surrogate (U+D800 to U+DFFF)")
            else:
                yield file, number, row


def pair(source: Any, target: Any, file: Path | str, number: int, report: Report) -> Iterator[Pair]:
    """A pair of a source (a text or a list of sentences) and its target or targets, if valid."""
    if isinstance(source, list) and all(isinstance(part, str) for part in source):
        source = " ".join(source)
    targets = target if isinstance(target, list) else [target]
    if not isinstance(source, str) or not all(isinstance(text, str) for text in targets):
        report.refuse(file, number, "a source or target that is not text")
        return
    yield from _pair(source, tuple(targets), file, number, report)


def _pair(
    source: str | None,
    targets: tuple[str | None, ...],
    file: Path | str,
    number: int,
    report: Report,
) -> Iterator[Pair]:
    texts = tuple(target for target in targets if target is not None)
    if source is None or len(texts) < len(targets):
        report.refuse(file, number, _NOT_UTF8)
    elif not source.strip() or not texts or not all(target.strip() for target in texts):
        report.refuse(file, number, "an empty source or target")
    else:
        report.accept(file, number)
        yield Pair(source, texts)


def question(
    row: Any, context: Any, start: str, file: Path | str, number: int, report: Report
) -> Iterator[Question]:
    """A question, if valid; ``start`` names the field with the position of an answer."""
    try:
        answers = tuple(Answer(answer["text"], answer[start]) for answer in row["answers"])
        name, query = row["id"], row["question"]
        texts = [name, query, context, *(answer.text for answer in answers)]
    except (KeyError, TypeError):
        report.refuse(file, number, f"no id, question or answers with text and {start}")
        return
    whole = all(type(answer.start) is int and answer.start >= 0 for answer in answers)
    if not whole or not all(isinstance(text, str) and text.strip() for text in texts):
        report.refuse(file, number, "an id, question, context or answer that is not text")
    elif any(not context.startswith(answer.text, answer.start) for answer in answers):
        report.refuse(file, number, f"an answer that is not at its {start} in the context")
    else:
        report.accept(file, number)
        yield Question(name, query, context, answers)


# --------------------------------------------------------------------------------------- parts


def thousandth(text: str) -> int:
    """The MD5 of a text modulo 1000, which splits data in the same way every time.

    >>> thousandth("Go.")
    419
    """
    digest = hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % 1000


def group_targets(pairs: Sequence[Pair], most: int = 4) -> list[Pair]:
    """Merge pairs of the same source into one pair with up to ``most`` different targets.

    >>> grouped = group_targets([Pair("a", ("b",)), Pair("c", ("d",)), Pair("a", ("e",))])
    >>> [pair.targets for pair in grouped]
    [('b', 'e'), ('d',)]
    """
    targets: dict[str, list[str]] = {}
    for pair in pairs:
        targets.setdefault(pair.source, []).extend(pair.targets)
    return [Pair(source, tuple(dict.fromkeys(texts))[:most]) for source, texts in targets.items()]
