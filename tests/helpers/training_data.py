"""Small data and recipes that several tests of training share."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

WORDS = ["red", "green", "blue", "cat", "dog", "bird", "runs", "sleeps", "sings", "now"]
NAMES = ["Ada", "Alan", "Grace", "Kurt"]


def sentences(count: int, seed: int = 0) -> list[str]:
    choose = random.Random(seed)
    return [" ".join(choose.choices(WORDS, k=choose.randint(2, 6))) for _ in range(count)]


def write_data(folder: Path) -> None:
    """Write pairs of a sentence and its words reversed, and questions about who did something."""
    for part, count, seed in (("train", 120, 0), ("valid", 16, 1)):
        lines = sentences(count, seed)
        rows = [f"{line}\t{' '.join(reversed(line.split()))}" for line in lines]
        (folder / f"{part}.tsv").write_text("\n".join(rows) + "\n", encoding="utf-8")
        prose = sentences(4 * count, seed)
        (folder / f"{part}.txt").write_text("\n".join(prose) + "\n", encoding="utf-8")
        asked = []
        for number, line in enumerate(lines):
            name = NAMES[number % len(NAMES)]
            context = f"{line} said {name} {line}"
            answers = [{"text": name, "start": context.index(name)}] if number % 5 else []
            row = {"id": str(number), "question": "who said", "context": context}
            asked.append(json.dumps({**row, "answers": answers}))
        (folder / f"{part}.jsonl").write_text("\n".join(asked) + "\n", encoding="utf-8")


SIZES: dict[str, dict[str, Any]] = {
    "transformer": {"dim": 16, "depth": 1, "decoder_depth": 1, "heads": 2, "decoder_heads": 2,
                    "inner": 32, "decoder_inner": 32},
    "t5": {"dim": 16, "head_dim": 8, "inner": 32, "depth": 1, "heads": 2},
    "gpt2": {"dim": 16, "depth": 1, "heads": 2},
    "transformer-xl": {"dim": 16, "embedding_dim": 16, "depth": 1, "heads": 2, "head_dim": 8,
                       "inner": 32, "memory": 16},
    "bert": {"dim": 16, "depth": 1, "heads": 2, "inner": 32},
}  # fmt: skip

TASKS = [
    ("translation", "transformer"),
    ("summarization", "t5"),
    ("question answering", "bert"),
    ("language modelling", "gpt2"),
    ("language modelling", "transformer-xl"),
    ("masked language modelling", "bert"),
    ("span corruption", "t5"),
]


def recipe_of(folder: Path, task: str = "translation", kind: str = "transformer") -> dict[str, Any]:
    """A recipe that trains on the files of :func:`write_data`."""
    ending, form = "txt", "text"
    if task in ("translation", "summarization"):
        ending, form = "tsv", "tsv"
    elif task == "question answering":
        ending, form = "jsonl", "questions"
    tokenizer = {"bert": "wordpiece", "t5": "unigram"}.get(kind, "bpe")
    return {
        "task": task,
        "output": str(folder / "run"),
        "device": "cpu",
        "seed": 5,
        "model": {"kind": kind, "config": dict(SIZES[kind])},
        "tokenizer": {"kind": tokenizer, "size": 300},
        "data": {
            "root": str(folder),
            "cache": str(folder / "cache"),
            "length": 64,
            "train": [{"format": form, "files": [f"train.{ending}"]}],
            "valid": [{"format": form, "files": [f"valid.{ending}"]}],
        },
        "batch": {"tokens": 256},
        "schedule": {"steps": 12, "rate": 0.01, "warmup": 2},
        "optimizer": {"label_smoothing": 0.1} if form == "tsv" else {},
        "evaluation": {"every": 6},
        "saving": {"every": 3, "minutes": 0, "keep_last": 2},  # the clock decides nothing
    }


def toml(value: Any) -> str:
    """A value in TOML syntax, with tables on one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key} = {toml(part)}" for key, part in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    return json.dumps(value)


def bytes_of(run: Path) -> dict[str, bytes]:
    """The content of every file of a finished run, except its log and the picture of the log."""
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in sorted(run.rglob("*"))
        if file.is_file() and file.name not in ("log.jsonl", "run.svg")
    }
