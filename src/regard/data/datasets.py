"""Records from Hugging Face datasets on disk or on the hub (https://huggingface.co/docs/datasets).

No other module imports the library ``datasets``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from regard.data.readers import pair, question
from regard.data.records import Pair, Question, Record, Report
from regard.errors import InputError

# The default column names for each kind of record.
COLUMNS: dict[type, tuple[str, ...]] = {
    Pair: ("source", "target"),
    Question: ("question", "context", "answers"),
    str: ("text",),
}
_BUILDERS = {".parquet": "parquet", ".json": "json", ".jsonl": "json", ".csv": "csv"}


def _library() -> Any:
    try:
        import datasets
    except ImportError:
        raise InputError(
            "format = 'dataset' needs Hugging Face's library: pip install 'regard[datasets]', or "
            "write the data as JSONL."
        ) from None
    return datasets


def open_dataset(name: str, files: Sequence[Path], root: Path, subset: str, split: str) -> Any:
    """One split of a dataset from a folder below ``root``, from files, or from the hub."""
    library = _library()
    folder = root / Path(name).expanduser()
    what = name or ", ".join(map(str, files))
    try:
        if files:
            kinds = {_BUILDERS.get(file.suffix) for file in files}
            kind = kinds.pop()
            if kinds or kind is None:
                raise InputError(
                    f"The files of a dataset must have one format, with a name that ends in one "
                    f"of {list(_BUILDERS)}, but got {what}."
                )
            return library.load_dataset(kind, data_files=[str(file) for file in files], split=split)
        if (folder / "dataset_dict.json").exists() or (folder / "state.json").exists():
            return _chosen(library.load_from_disk(str(folder)), folder, split)
        place = str(folder) if folder.is_dir() else name
        return library.load_dataset(place, subset or None, split=split)
    except ConnectionError as error:
        raise InputError(
            f"The dataset {what} is not a folder below {root}, and the hub cannot be reached: "
            f"{error}."
        ) from None
    except (OSError, ValueError, library.exceptions.DatasetsError) as error:
        raise InputError(f"The dataset {what} cannot be read: {error}") from None


def _chosen(saved: Any, folder: Path, split: str) -> Any:
    """A split of a saved dataset; a single dataset without a split name counts as "train"."""
    if not isinstance(saved, dict):
        saved = {str(saved.split or "train"): saved}
    if split not in saved:
        raise InputError(f"{folder} has no split {split!r}; it has {', '.join(saved)}.")
    return saved[split]


def read_dataset(
    dataset: Any, name: str, kind: type, columns: Sequence[str], report: Report
) -> Iterator[Record]:
    """The rows of a dataset as records of a kind.

    ``columns`` are the names of the columns of source and target, of question, context and answers
    (in SQuAD's form), or of a text. ``translation.fr`` is the field "fr" of "translation".
    """
    wanted = tuple(columns) or COLUMNS[kind]
    if len(wanted) != len(COLUMNS[kind]):
        names = COLUMNS[kind]
        raise InputError(
            f"fields of {name} need {len(names)} names such as {list(names)}, but got "
            f"{list(wanted)}."
        )
    tops = dict.fromkeys(column.partition(".")[0] for column in wanted)
    for top in tops:
        if top not in dataset.column_names:
            have = ", ".join(dataset.column_names)
            raise InputError(
                f"{name} has no column {top!r}. Set fields to some of its columns: {have}."
            )
    for number, row in enumerate(dataset.select_columns(list(tops)), 1):
        values = [_inside(row, column) for column in wanted]
        if kind is Pair:
            yield from pair(values[0], values[1], name, number, report)
        elif kind is Question:
            text, context, answers = values
            whole = {"id": str(number), "question": text, "answers": _listed(answers)}
            yield from question(whole, context, "answer_start", name, number, report)
        elif isinstance(values[0], str):
            for line in values[0].split("\n"):
                report.accept(name, number)
                yield line
        else:
            report.refuse(name, number, f"no text in {wanted[0]}")


def _inside(row: Mapping[str, Any], column: str) -> Any:
    value: Any = row
    for part in column.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


def _listed(answers: Any) -> Any:
    """Answers as a list of dicts, converted if given as a dict of lists."""
    if isinstance(answers, Mapping) and {"text", "answer_start"} <= answers.keys():
        texts, starts = answers["text"], answers["answer_start"]
        if len(texts) == len(starts):
            both = zip(texts, starts, strict=True)
            return [{"text": text, "answer_start": start} for text, start in both]
    return answers
