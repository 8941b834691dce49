"""Fine-tune a model on a file: the recipe for it, the run, and the scores before and after."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, cast

import torch

from regard.checkpoints import cards
from regard.checkpoints.files import replace_file
from regard.data.encoding import token_ids, window_columns
from regard.data.readers import thousandth
from regard.data.records import PAIR_TASKS, RECORDS, Pair, Question, Record, Report
from regard.data.schema import assignment, set_key
from regard.data.sources import FORMATS, Data, Source, records
from regard.errors import InputError
from regard.evaluation.measuring import own_settings, scored_row
from regard.models.adapting import check_base
from regard.models.bundle import Bundle, open_bundle
from regard.text.languages import language_tags, same_language
from regard.training.folder import LOG, read_log
from regard.training.recipe import read_recipe
from regard.training.run import Result, train
from regard.training.saving import Keeper

RECIPE = "recipe.toml"
HELD_BACK, MAX_HELD_BACK = 0.1, 200  # the share of the records to score on, and at most how many
MAX_HELD_LINES = 2000  # the same for the lines of a text
MIN_RECORDS = 20
MAX_LENGTH = 256  # the maximum of data.length for pairs, in tokens
# The highest learning rates. A T5's is a multiple of the size of each matrix.
_RATES = {"transformer": 2e-4, "t5": 1e-3, "bert": 5e-5, "gpt2": 3e-4, "transformer-xl": 3e-4}
_LORA_RANK = 8
_LORA_RATES = {"bert": 1e-3} | dict.fromkeys(("transformer", "t5", "gpt2", "transformer-xl"), 3e-3)
_BATCH = {"cpu": 2048, "cuda": 8192}  # the maximum number of tokens in a batch
_STEPS = 50  # the number of steps in an epoch of small data, by smaller batches
_METRICS = {"translation": "bleu", "summarization": "rouge-1", "question answering": "f1"}
_ENDINGS = {".tsv": "tsv", ".txt": "text", ".jsonl": "jsonl", ".json": "squad"}


@dataclass(frozen=True)
class Tuned:
    """The outcome of a fine-tuning."""

    result: Result
    metric: str  # the score that decides whether the model is better
    before: dict[str, float]  # the scores on the held-back records before the first step


def finetune(
    model: str,
    file: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    to: str | None = None,
    prefix: str | None = None,
    fields: tuple[str, str] = ("source", "target"),
    epochs: float = 3.0,
    minutes: float = 30.0,
    lora: bool = False,
    device: str = "auto",
    resume: bool = False,
    overrides: Sequence[str] = (),
) -> Tuned:
    """Train a model further on the pairs, questions or text of a file.

    Writes a recipe into the folder ``output`` and trains by it. A tenth of the records is held
    back, and scored before and after. ``to`` is the target language of a model with several.
    ``fields`` are the fields of source and target in JSONL. With ``lora``, only low-rank updates
    of the weights are trained and saved, as an adapter. ``resume`` continues the run in
    ``output``; a finished run gets ``epochs`` more.
    """
    folder, path = Path(output), Path(file)
    lora = lora or any(change.startswith("lora.") for change in overrides)
    recipe = folder / RECIPE
    if not resume and Keeper(folder / "checkpoints").steps():
        raise InputError(
            f"{folder} holds an earlier run. Continue or extend it with --resume, or choose "
            "another --output."
        )
    if resume and not recipe.exists():
        raise InputError(f"There is no run in {folder} to resume: leave out --resume.")
    raw = _plan(
        open_bundle(model), path, folder, to=to, prefix=prefix, fields=fields, epochs=epochs,
        minutes=minutes, lora=lora, device=device,
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    if RECORDS[raw["task"]] is str:
        _split_lines(path, folder, raw["data"])
    if resume:
        raw = _resumed(recipe, raw)
    for name, value in map(assignment, overrides):
        set_key(raw, name, value)
    replace_file(recipe, _toml(raw).encode())
    result = train(read_recipe(recipe), resume=resume)
    scored = [row["scores"] for row in read_log(folder / LOG) if row.get("step") == 0]
    return Tuned(result, raw["evaluation"]["metric"], next(filter(None, scored), {}))


# ---------------------------------------------------------------------------------- the recipe


def _plan(
    bundle: Bundle,
    file: Path,
    folder: Path,
    *,
    to: str | None,
    prefix: str | None,
    fields: tuple[str, str],
    epochs: float,
    minutes: float,
    lora: bool,
    device: str,
) -> dict[str, Any]:
    """The recipe of a fine-tuning, as nested tables."""
    if lora:
        check_base(bundle.name)
    row = scored_row(bundle.model)
    task, kind = row.scored_as, RECORDS[row.scored_as]
    own = own_settings(bundle)
    own_prefix = own.pop("prefix", "")
    if task == "translation":
        own_prefix = _tag(bundle, to)
    elif to is not None:
        raise InputError(
            f"--to is for models with a tag for each language, not for {bundle.name}. If it needs "
            "a text before each source, give that with --prefix."
        )
    source: dict[str, Any] = {"format": _form(file, kind, bundle), "files": [file.name]}
    if source["format"] == "jsonl":
        source["fields"] = list(fields)
    found, report = _records(file, source, kind)
    if len(found) < MIN_RECORDS:
        names = f" Its fields are named by --fields, now {' '.join(fields)}." * (
            source["format"] == "jsonl"
        )
        raise InputError(
            f"{file} has too few {_NAMES[kind]} for a fine-tune, which needs {MIN_RECORDS}: "
            f"{report}{names}"
        )
    if kind is Pair:
        source["prefix"] = own_prefix if prefix is None else prefix
    elif prefix is not None:
        raise InputError(f"--prefix is for texts with a target, not for {task}.")
    train_on, held_back = dict(source), dict(source)
    if kind is not str:
        first = _first_held_back(found)
        train_on["part"], held_back["part"] = [0, first], [first, 1000]
    length, tokens = _sizes(bundle, found, source.get("prefix", ""))
    place = "cuda" if device == "auto" and torch.cuda.is_available() else device
    place = "cpu" if place == "auto" else place
    largest = _BATCH["cpu" if place == "cpu" else "cuda"]
    batch = max(min(largest, tokens // _STEPS), 2 * length)
    steps = max(ceil(epochs * tokens / batch), 1)
    raw: dict[str, Any] = {
        "task": task,
        "output": str(folder.absolute()),
        "device": place,
        "precision": "float32" if place == "cpu" else "bfloat16",
        "model": {"kind": row.name, "start": _start(bundle.name)},
        "data": {
            "root": str(file.absolute().parent),
            "length": length,
            "max_bad_share": 0.05,  # pairs longer than length count as bad
            "train": [train_on],
            "valid": [held_back],
        },
        "batch": {"tokens": batch},
        "schedule": {
            "steps": steps,
            "minutes": minutes,
            "rate": (_LORA_RATES if lora else _RATES)[row.name],
            "warmup": steps // 10,
            "shape": "linear",
        },
        "optimizer": {"clip": 1.0},
        "evaluation": {"every": 0, "before": True, "metric": _METRICS.get(task, "loss")},
        "saving": {"every": steps, "keep_last": 1},
    }
    if task in PAIR_TASKS:
        raw["optimizer"]["label_smoothing"] = 0.1
    if lora:
        raw["lora"] = {"rank": _LORA_RANK}
    elif row.name == "t5":
        raw["optimizer"]["scale_by_initial_rms"] = True
    for name, value in own.items():
        set_key(raw, name, value)
    return raw


_NAMES = {Pair: "pairs", Question: "questions", str: "lines"}


def _start(name: str) -> str:
    """The name of a model that a recipe in another folder finds, too."""
    is_folder = name not in cards.names() and Path(name).is_dir()
    return str(Path(name).absolute()) if is_folder else name


def _tag(bundle: Bundle, to: str | None) -> str:
    """The prefix of the sources: the tag of the target language."""
    tags = language_tags(bundle.tokenizer)
    offered = ", ".join(tag[2:-2] for tag in tags)
    if to is None:
        if len(tags) > 1:
            raise InputError(
                f"{bundle.name} translates into {offered}. Say which language the targets are in: "
                f"--to {tags[0][2:-2]}."
            )
        return f"{tags[0]} " if tags else ""
    for tag in tags:
        if same_language(tag, to):
            return f"{tag} "
    raise InputError(
        f"{bundle.name} has no tag for the language {to!r}. "
        + (f"It translates into {offered}." if tags else "Leave out --to.")
    )


def _form(file: Path, kind: type, bundle: Bundle) -> str:
    """The format of a file, from the end of its name."""
    name = file.name.removesuffix(".gz").removesuffix(".xz")
    form = _ENDINGS.get(Path(name).suffix)
    if form == "jsonl" and kind is Question:
        form = "questions"
    if form is None or form not in FORMATS[kind]:
        ends = (
            ["txt"] if kind is str else ["jsonl", "json"] if kind is Question else ["tsv", "jsonl"]
        )
        raise InputError(
            f"{file} cannot be read: {bundle.name} is trained on {_NAMES[kind]}, in a file whose "
            f"name ends in .{' or .'.join(ends)}."
        )
    return form


def _records(file: Path, source: Mapping[str, Any], kind: type) -> tuple[list[Record], Report]:
    report = Report()
    fields = tuple(source.get("fields", ()))
    one = Source(format=source["format"], files=(file.name,), fields=fields)
    data = Data(root=str(file.parent), train=(one,))
    return list(records(data, data.train, kind, report)), report


def _first_held_back(found: Sequence[Record]) -> int:
    """The first part of 1000 that is held back, so that the rest is for training."""
    parts = sorted(thousandth(r.context if isinstance(r, Question) else r.source) for r in found)  # type: ignore[union-attr]
    count = min(ceil(HELD_BACK * len(parts)), MAX_HELD_BACK)
    first = parts[-count]
    if first == parts[0]:
        raise InputError(
            f"All {len(parts)} records have one and the same source, so none can be held back to "
            "score the model on. Give more of them."
        )
    return first


def _split_lines(file: Path, folder: Path, data: dict[str, Any]) -> None:
    """Write the lines of a text as two files in a folder, and name these in ``data``."""
    [source] = data["train"]
    found, _ = _records(file, source, str)
    lines = cast("list[str]", found)
    cut = len(lines) - min(ceil(HELD_BACK * len(lines)), MAX_HELD_LINES)
    data["root"] = str(folder.absolute())
    for part, some in (("train", lines[:cut]), ("valid", lines[cut:])):
        data[part] = [{"format": "text", "files": [f"{part}.txt"]}]
        replace_file(folder / f"{part}.txt", "".join(f"{line}\n" for line in some).encode())


def _sizes(bundle: Bundle, found: Sequence[Record], prefix: str) -> tuple[int, int]:
    """``data.length`` for the records, and the number of their tokens."""
    tokenizer, longest = bundle.tokenizer, bundle.model.longest or 512
    first = found[0]
    if isinstance(first, Question):
        length = min(longest, 384)
        table = window_columns(cast("list[Question]", found), tokenizer, length)
        return length, len(table["ids"].flat)
    if isinstance(first, str):
        lines = (f"{line}\n" for line in cast("list[str]", found))
        length = 128 if bundle.model.remembers else min(longest, 256)
        return length, sum(map(len, token_ids(tokenizer, lines)))
    pairs = [(prefix + p.source, text) for p in cast("list[Pair]", found) for text in p.targets]
    sides: list[Iterator[list[int]]] = [
        token_ids(text, [pair[side] for pair in pairs])
        for side, text in enumerate((tokenizer, tokenizer.target))
    ]
    counts = [(len(source) + 1, len(target) + 1) for source, target in zip(*sides, strict=True)]
    length = min(max(map(max, counts)), longest, MAX_LENGTH)
    return length, sum(map(sum, counts))


# ---------------------------------------------------------------------- the run before, and TOML


def _resumed(recipe: Path, planned: dict[str, Any]) -> dict[str, Any]:
    """The recipe of an earlier run; if the run is finished, with the planned steps added."""
    raw = tomllib.loads(recipe.read_text(encoding="utf-8"))
    for what, path in (
        ("model", ("model", "start")),
        ("folder of data", ("data", "root")),
        ("file", ("data", "train", 0, "files")),
        ("prefix of sources", ("data", "train", 0, "prefix")),
        ("part for training", ("data", "train", 0, "part")),
    ):
        one, other = (_at(tree, path) for tree in (raw, planned))
        if one != other:
            raise InputError(
                f"{recipe.parent} holds a run with another {what}: {one}, not {other}. Choose "
                "another --output."
            )
    if ("lora" in raw) != ("lora" in planned):
        began, now = ("with", "add") if "lora" in raw else ("without", "leave out")
        raise InputError(f"{recipe.parent} holds a run {began} --lora: {now} it, too.")
    log = recipe.parent / LOG
    rows = read_log(log) if log.exists() else []
    if rows and "finished" in rows[-1]:
        raw["schedule"]["steps"] = rows[-1]["step"] + planned["schedule"]["steps"]
        raw["schedule"]["minutes"] = planned["schedule"]["minutes"]
    return raw


def _at(tree: Any, path: Sequence[str | int]) -> Any:
    """The value at a path in nested tables and lists; None if the last table does not have it."""
    *outer, last = path
    for part in outer:
        tree = tree[part]
    return tree.get(last)


def _toml(raw: Mapping[str, Any], path: str = "") -> str:
    """Nested tables as TOML."""
    plain = {name: v for name, v in raw.items() if not _tables(v)}
    text = "".join(f"{name} = {json.dumps(v, ensure_ascii=False)}\n" for name, v in plain.items())
    for name, value in raw.items():
        for table in value if isinstance(value, list) and _tables(value) else ():
            text += f"\n[[{path}{name}]]\n{_toml(table, f'{path}{name}.')}"
        if isinstance(value, Mapping):
            text += f"\n[{path}{name}]\n{_toml(value, f'{path}{name}.')}"
    return text


def _tables(value: Any) -> bool:
    return isinstance(value, Mapping) or (
        isinstance(value, list) and bool(value) and isinstance(value[0], Mapping)
    )
