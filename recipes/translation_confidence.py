"""Fit the confidence of a model that translates to judgements of its translations.

    python recipes/translation_confidence.py translate recipes/judged-translations.jsonl
    python recipes/translation_confidence.py fit recipes/judged-translations.jsonl

``translate`` translates each source of the file again. A verdict stays if the translation is as it
was; the others are printed with their numbers, to be judged by reading: is anything lost, is a word
wrong? Slips of grammar are acceptable. ``--failed 3 17`` stores which of them fail, ``--open 5``
which remain without a verdict; all others pass.

``fit`` prints how well the confidence finds failures, and the numbers for config.json.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from regard.models.bundle import Bundle, open_bundle
from regard.tasks.reverse import Reversal, surprises, tag_prefix
from regard.tasks.translation import TASK
from regard.tasks.writing import write

BATCH = 32
MAX_NEW_TOKENS = 256
ROUNDS = 20  # random halves of which one is fitted and the other is measured
DOUBTED = (0.1, 0.05)  # shares of the acceptable translations
PENALTY = 0.02  # of the squares of the coefficients


@dataclass
class Judged:
    """A translation with its signs, and whether a reader finds it acceptable."""

    origin: str
    source_language: str  # a tag such as eng
    target_language: str
    source: str
    translation: str = ""
    score: float = 0.0
    surprise: float = 0.0
    acceptable: bool | None = None


def read(file: Path) -> list[Judged]:
    """The rows of a file."""
    lines = file.read_text(encoding="utf-8").splitlines()
    return [Judged(**json.loads(line)) for line in lines]


def store(file: Path, rows: Sequence[Judged]) -> None:
    """Write the rows to a file."""
    lines = [json.dumps(asdict(row), ensure_ascii=False) + "\n" for row in rows]
    file.write_text("".join(lines), encoding="utf-8")


def translate_again(bundle: Bundle, rows: Sequence[Judged]) -> None:
    """Translate all sources, and forget the verdicts of translations that have changed."""
    how, _ = bundle.settings(None).resolve(None, None)
    sources = [bundle.prepared(row.source, TASK) for row in rows]
    tagged = [
        tag_prefix(row.target_language) + source for row, source in zip(rows, sources, strict=True)
    ]
    found = write(bundle, tagged, how, MAX_NEW_TOKENS, BATCH)
    reversals = [
        Reversal(source, written.text, (row.source_language,))
        for row, source, written in zip(rows, sources, found, strict=True)
    ]
    for row, written, back in zip(rows, found, surprises(bundle, reversals, BATCH), strict=True):
        if row.translation != written.text:
            row.translation, row.acceptable = written.text, None
        row.score = round(written.log_probability / max(written.tokens, 1), 4)
        row.surprise = round(back.total, 3)


# ------------------------------------------------------------------------------------- the fit


def signs(rows: Sequence[Judged], names: Sequence[str]) -> Tensor:
    """The signs of each translation, [rows, 1 + names]; the first is 1."""
    columns = {
        "scale": [row.score for row in rows],
        "surprise": [math.sqrt(row.surprise) for row in rows],
    }
    table = [[1.0] * len(rows), *(columns[name] for name in names)]
    return torch.tensor(table, dtype=torch.float64).t()


def logistic(table: Tensor, acceptable: Tensor) -> Tensor:
    """The coefficients of a logistic function, by Newton's method."""
    weights = torch.zeros(table.shape[1], dtype=table.dtype)
    for _ in range(50):
        likely = torch.sigmoid(table @ weights)
        curvature = (table.t() * (likely * (1 - likely))) @ table
        curvature += PENALTY * torch.eye(len(weights), dtype=table.dtype)
        slope = table.t() @ (acceptable - likely) - PENALTY * weights
        weights = weights + torch.linalg.solve(curvature, slope).clamp(-3, 3)
    return weights


def area_under_curve(likely: Tensor, acceptable: Tensor) -> float:
    """The probability that an acceptable translation is more likely than a failure."""
    good, bad = likely[acceptable > 0], likely[acceptable == 0]
    above = (good[:, None] > bad).double() + 0.5 * (good[:, None] == bad).double()
    return float(above.mean())


def found_where(likely: Tensor, acceptable: Tensor, doubted: float) -> float:
    """The share of failures below the threshold that doubts a share of the acceptable ones."""
    threshold = torch.quantile(likely[acceptable > 0], doubted)
    return float((likely[acceptable == 0] < threshold).double().mean())


def report(rows: Sequence[Judged], names: Sequence[str]) -> dict[str, float]:
    """Print how well these signs find failures, and return the coefficients."""
    table = signs(rows, names)
    acceptable = torch.tensor([float(bool(row.acceptable)) for row in rows], dtype=table.dtype)
    generator = torch.Generator().manual_seed(0)
    likely = torch.zeros_like(acceptable)
    for _ in range(ROUNDS):
        order = torch.randperm(len(rows), generator=generator)
        halves = order[: len(rows) // 2], order[len(rows) // 2 :]
        for fitted, measured in (halves, halves[::-1]):
            weights = logistic(table[fitted], acceptable[fitted])
            likely[measured] += torch.sigmoid(table[measured] @ weights) / ROUNDS
    parts = [f"area under the curve {area_under_curve(likely, acceptable):.2f}"]
    parts += [
        f"{found_where(likely, acceptable, share):.0%} of failures where {share:.0%} are doubted"
        for share in DOUBTED
    ]
    low = likely < 0.5
    parts.append(
        f"below 0.5: {int((low & (acceptable == 0)).sum())} of {int((acceptable == 0).sum())} "
        f"failures, {int((low & (acceptable > 0)).sum())} of {int(acceptable.sum())} others"
    )
    print(f"{' and '.join(names)}: {'; '.join(parts)}")
    weights = logistic(table, acceptable)
    return {name: round(float(w), 2) for name, w in zip(("bias", *names), weights, strict=True)}


def fit(rows: Sequence[Judged]) -> dict[str, object]:
    """The numbers for config.json, from the rows with a verdict."""
    judged = [row for row in rows if row.acceptable is not None]
    print(f"{len(judged)} judged, {sum(bool(row.acceptable) for row in judged)} acceptable")
    return {**report(judged, ("scale",)), "reversed": report(judged, ("scale", "surprise"))}


# --------------------------------------------------------------------------------- command line


def main(words: Sequence[str]) -> None:
    """Translate again, or fit."""
    parser = argparse.ArgumentParser(description="Fit the confidence of translations.")
    parser.add_argument("step", choices=("translate", "fit"))
    parser.add_argument("file", type=Path, help="of judged translations, JSONL")
    parser.add_argument("--model", default="translate")
    parser.add_argument("--failed", type=int, nargs="*", help="numbers of the rows that fail")
    parser.add_argument("--open", type=int, nargs="*", default=[], help="rows without a verdict")
    given = parser.parse_args(words)
    rows = read(given.file)
    if given.step == "fit":
        print(json.dumps({"confidence": fit(rows)}, indent=1))
        return
    translate_again(open_bundle(given.model), rows)
    unread = [number for number, row in enumerate(rows, 1) if row.acceptable is None]
    if given.failed is None:
        for number in unread:
            print(f"{number}: {rows[number - 1].source} => {rows[number - 1].translation}")
    else:
        for number in unread:
            verdict = number not in given.failed
            rows[number - 1].acceptable = None if number in given.open else verdict
    store(given.file, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
