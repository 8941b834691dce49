"""The data section of a recipe: which files are read, and the records in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from regard.data import readers
from regard.data.datasets import open_dataset, read_dataset
from regard.data.records import Pair, Question, Record, Report
from regard.data.schema import key
from regard.text.preparing import PREPARATIONS, prepare

if TYPE_CHECKING:
    from regard.training.recipe import Recipe

RECORDS: dict[str, type] = {
    "translation": Pair,
    "summarization": Pair,
    "question answering": Question,
    "language modelling": str,
    "masked language modelling": str,
    "span corruption": str,
}
FORMATS = ("parallel", "tsv", "jsonl", "questions", "squad", "text", "dataset")


def records(recipe: Recipe, sources: Sequence[Source], report: Report) -> Iterator[Record]:
    """The records of some sources, prepared; those of other parts are left out."""
    for source in sources:
        for record in _read(recipe, source, report):
            by = {Pair: 0, Question: 2}.get(type(record))
            text = record if isinstance(record, str) else cast(str, record[by or 0])
            low, high = source.part
            if (low, high) != (0, 1000) and not low <= readers.thousandth(text) < high:
                continue
            record = _prepared(record, recipe.data.prepare)
            if isinstance(record, Pair):
                yield from _sided(record, source, RECORDS[recipe.task])
            else:
                yield record


def _sided(pair: Pair, source: Source, kind: type) -> Iterator[Record]:
    """A pair as the task takes it: turned round, with what comes before it, or its source alone."""
    if kind is str:
        yield pair.source
    elif source.reverse:
        for target in pair.targets:
            yield Pair(source.prefix + target, (pair.source,))
    else:
        yield Pair(source.prefix + pair.source, pair.targets)


def _read(recipe: Recipe, source: Source, report: Report) -> Iterator[Record]:
    files = data_paths(recipe, source.files)
    columns, names = source.columns, source.fields
    if source.format == "parallel":
        return readers.read_parallel(files, data_paths(recipe, source.targets), report)
    if source.format == "tsv":
        return readers.read_tsv(files, (columns[0], columns[1]), report)
    if source.format == "jsonl":
        one, other = names or ("source", "target")
        return readers.read_jsonl(files, (one, other), report)
    if source.format == "dataset":
        name = source.dataset or ", ".join(source.files)
        return read_dataset(
            source_dataset(recipe, source), name, RECORDS[recipe.task], source.fields, report
        )
    if source.format == "questions":
        return readers.read_questions(files, report)
    if source.format == "squad":
        return readers.read_squad(files, report)
    return readers.read_text(files, report)


def source_dataset(recipe: Recipe, source: Source) -> Any:
    root, files = Path(recipe.data.root).expanduser(), data_paths(recipe, source.files)
    return open_dataset(source.dataset, files, root, source.subset, source.split)


def data_paths(recipe: Recipe, names: Iterable[str]) -> list[Path]:
    root = Path(recipe.data.root).expanduser()
    return [root / Path(name).expanduser() for name in names]


def _prepared(record: Record, steps: Sequence[str]) -> Record:
    if not steps or isinstance(record, Question):
        return record  # the places of answers would no longer be right
    if isinstance(record, str):
        return prepare(record, steps)
    targets = tuple(prepare(target, steps) for target in record.targets)
    return Pair(prepare(record.source, steps), targets)


@dataclass(frozen=True, kw_only=True)
class Source:
    """Files of text of one format."""

    format: str = key(
        "the format of the files (questions: one JSON object a line with id, question, context "
        "and answers, a list of {text, start})",
        among=FORMATS,
    )
    files: tuple[str, ...] = key("the files, plain, .gz or .xz; for parallel text, the sources", ())
    targets: tuple[str, ...] = key("for parallel text, the files of the targets", ())
    columns: tuple[int, ...] = key(
        "for TSV, the columns of source and target, counted from 1", (1, 2)
    )
    fields: tuple[str, ...] = key(
        "for JSONL, the fields of source and target; for a dataset, the columns of source "
        "and target, of text, or of question, context and answers; the default is these names",
        (),
    )
    dataset: str = key("for a Hugging Face dataset, its folder or its name on the hub", "")
    subset: str = key("for a dataset on the hub, the subset", "")
    split: str = key("for a dataset, the split", "train")
    part: tuple[int, ...] = key(
        "the share of the data to use, in thousandths by the MD5 of the source: from the "
        "first number up to, but not including, the second",
        (0, 1000),
    )
    reverse: bool = key("swap source and target", False)
    prefix: str = key("text to put before each source, such as a language tag", "")


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
        f"preparations of each text, in order: {', '.join(PREPARATIONS)}", ()
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
    )
    forget: int = key(
        "for a Transformer-XL, empty the memory after this many pieces, so that it learns to "
        "start a text; 0 for once an epoch",
        0,
        least=0,
    )
    unanswered: float = key(
        "the share of questions to repeat with a context that does not hold the answer",
        0.0,
        least=0,
        most=1,
    )
    bad: float = key("the maximum share of bad lines", 0.001, least=0, most=1)
    cache: str = key("the folder for tokenized text", "~/.cache/regard/tokens")
