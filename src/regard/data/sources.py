"""The data section of a recipe, and the records of its files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.data import readers
from regard.data.datasets import open_dataset, read_dataset
from regard.data.records import (
    PAIR_TASKS,
    QUESTION_TASKS,
    RECORDS,
    TEXT_TASKS,
    Pair,
    Question,
    Record,
    Report,
)
from regard.data.schema import key, unknown_key
from regard.errors import InputError
from regard.text.preparing import PREPARATIONS, prepare

# The file formats for each kind of record.
FORMATS: dict[type, tuple[str, ...]] = {
    Pair: ("parallel", "tsv", "jsonl", "dataset"),
    Question: ("questions", "squad", "dataset"),
    str: ("text", "tsv", "jsonl", "dataset"),
}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Data files of one format."""

    format: str = key(
        "the format of the files (questions: one JSON object a line with id, question, context "
        "and answers, a list of {text, start})",
        among=tuple(dict.fromkeys(name for names in FORMATS.values() for name in names)),
    )
    files: tuple[str, ...] = key(
        "the files: plain, .gz or .xz; for parallel text, the files of the sources", ()
    )
    targets: tuple[str, ...] = key("for parallel text, the files of the targets", ())
    columns: tuple[int, ...] = key(
        "for TSV, the columns of source and target, counted from 1", (1, 2)
    )
    fields: tuple[str, ...] = key(
        "for JSONL, the names of the fields of source and target; for a dataset, of the columns "
        "of source and target, of text, or of question, context and answers; by default, the "
        "fields and columns have exactly these names",
        (),
    )
    dataset: str = key("for a Hugging Face dataset, its folder or its name on the hub", "")
    subset: str = key("for a dataset on the hub, the subset", "")
    split: str = key("for a dataset, the split", "train")
    part: tuple[int, ...] = key(
        "the part of the data to use: records whose source has an MD5 modulo 1000 from the "
        "first number up to, but not including, the second",
        (0, 1000),
    )
    reverse: bool = key("swap source and target", False)
    prefix: str = key("text to put before each source, such as a language tag", "")
    times: int = key(
        "for pairs, how often an epoch contains each of them, to balance kinds of text",
        1,
        least=1,
    )


@dataclass(frozen=True, kw_only=True)
class Data:
    """The data of a run."""

    root: str = key(
        "the folder of files with relative paths; the default is the recipe's folder", "."
    )
    train: tuple[Source, ...] = key("the training data")
    valid: tuple[Source, ...] = key("the validation data", ())
    test: tuple[Source, ...] = key("the test data, evaluated at the end", ())
    prepare: tuple[str, ...] = key(
        f"preparations of each text, in order: {', '.join(PREPARATIONS)}",
        (),
        only=(*PAIR_TASKS, *TEXT_TASKS),
    )
    length: int = key(
        "the maximum number of tokens of a sequence; longer pairs count as bad, other text "
        "is cut into pieces",
        256,
        least=2,
    )
    context: int = key(
        "for language models, the number of context tokens at the start of a piece, which "
        "have no loss; pieces overlap by this number, and a Transformer-XL does not use its "
        "memory",
        0,
        least=0,
        only=("language modelling",),
    )
    memory_reset_every: int = key(
        "for a Transformer-XL, empty the memory after this many pieces, so that the model learns "
        "to start a text; 0 empties it once an epoch",
        0,
        least=0,
        only=("transformer-xl",),
    )
    unanswered: float = key(
        "the share of questions to repeat with a context that does not contain the answer",
        0.0,
        least=0,
        most=1,
        only=QUESTION_TASKS,
    )
    max_bad_share: float = key("the maximum share of bad lines", 0.001, least=0, most=1)
    cache: str = key("the folder for tokenized text", "~/.cache/regard/tokens")


def check_data(data: Data, task: str) -> None:
    """Raise InputError for data settings that contradict each other or do not fit the task."""
    kind = RECORDS[task]
    for source in (*data.train, *data.valid, *data.test):
        if source.format not in FORMATS[kind]:
            raise InputError(f"{task} reads {' or '.join(FORMATS[kind])}, not {source.format}.")
        counts = {"columns": len(source.columns), "part": len(source.part)}
        if source.format == "jsonl" and source.fields:
            counts["fields"] = len(source.fields)
        for name, count in counts.items():
            if count != 2:
                raise InputError(f"{name} of a data source need two entries, but got {count}.")
        if (source.format == "dataset" and not source.files) != bool(source.dataset):
            raise InputError(
                "A data source with format = 'dataset' needs either files or a dataset. With any "
                "other format, give files and no dataset."
            )
        if min(source.columns) < 1:
            raise InputError(f"Columns are counted from 1, but got {list(source.columns)}.")
        if kind is str and (source.prefix or source.reverse):
            raise InputError(f"prefix and reverse of a data source do nothing for {task}.")
        if kind is not Pair and source.times > 1:
            raise InputError(f"times of a data source repeats pairs, so it is not for {task}.")
    if data.context >= data.length:
        raise InputError(
            f"data.context = {data.context} leaves no tokens with a loss in pieces of "
            f"{data.length} tokens (data.length)."
        )
    if data.context and data.memory_reset_every:
        raise InputError(
            "data.memory_reset_every needs a memory, and with data.context there is none: leave "
            "one of them out."
        )
    for step in data.prepare:
        if step not in PREPARATIONS:
            raise InputError(unknown_key(f"data.prepare: {step!r}", step, PREPARATIONS))


def records(data: Data, sources: Sequence[Source], kind: type, report: Report) -> Iterator[Record]:
    """The prepared records of data sources; records outside a source's ``part`` are left out."""
    for source in sources:
        for record in _read(data, source, kind, report):
            if isinstance(record, Question):
                text = record.context
            else:
                text = record if isinstance(record, str) else record.source
            low, high = source.part
            if (low, high) != (0, 1000) and not low <= readers.thousandth(text) < high:
                continue
            record = _prepared(record, data.prepare)
            if not isinstance(record, Pair):
                yield record
            elif kind is str:
                yield record.source
            elif source.reverse:
                for target in record.targets:
                    yield Pair(source.prefix + target, (record.source,), source.times)
            else:
                yield Pair(source.prefix + record.source, record.targets, source.times)


def _read(data: Data, source: Source, kind: type, report: Report) -> Iterator[Record]:
    files = data_paths(data, source.files)
    if source.format == "parallel":
        return readers.read_parallel(files, data_paths(data, source.targets), report)
    if source.format == "tsv":
        return readers.read_tsv(files, (source.columns[0], source.columns[1]), report)
    if source.format == "jsonl":
        names = source.fields or ("source", "target")
        return readers.read_jsonl(files, (names[0], names[1]), report)
    if source.format == "dataset":
        name = source.dataset or ", ".join(source.files)
        return read_dataset(source_dataset(data, source), name, kind, source.fields, report)
    if source.format == "questions":
        return readers.read_questions(files, report)
    if source.format == "squad":
        return readers.read_squad(files, report)
    return readers.read_text(files, report)


def source_dataset(data: Data, source: Source) -> Any:
    """The Hugging Face dataset of a source."""
    root, files = Path(data.root).expanduser(), data_paths(data, source.files)
    return open_dataset(source.dataset, files, root, source.subset, source.split)


def data_paths(data: Data, names: Iterable[str]) -> list[Path]:
    """The paths of files, relative to ``data.root``."""
    root = Path(data.root).expanduser()
    return [root / Path(name).expanduser() for name in names]


def _prepared(record: Record, steps: Sequence[str]) -> Record:
    if not steps or isinstance(record, Question):
        return record  # preparing a context would shift the positions of its answers
    if isinstance(record, str):
        return prepare(record, steps)
    targets = tuple(prepare(target, steps) for target in record.targets)
    return Pair(prepare(record.source, steps), targets)
