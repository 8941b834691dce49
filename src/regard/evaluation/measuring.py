"""How well a model does: on one's own data, and whether the figures of its card come again.

What is read and how it is decoded is said in the keys of a recipe, so that a figure is measured
here as it was while the model learned; only weights are always float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from regard.data import sources
from regard.data.records import Report
from regard.data.schema import nearest
from regard.decoding.strategies import Beam, Sample
from regard.errors import InputError
from regard.evaluation import metrics
from regard.evaluation.scoring import Progress, score_answers, score_pairs, score_text
from regard.evaluation.settings import WRITTEN
from regard.models.bundle import Bundle
from regard.models.model import Model
from regard.models.registry import ARCHITECTURES, Architecture
from regard.text.tokenizer import Tokenizer
from regard.training.recipe import Recipe, parse_recipe

Settings = Mapping[str, Any] | Sequence[str]  # keys of a recipe: {"evaluation.beam": 4}


# The scores of a model, by the task as which it is scored.
SCORES_OF_TASK: dict[str, tuple[str, ...]] = {
    "translation": WRITTEN,
    "summarization": WRITTEN,
    "question answering": ("exact", "f1"),
    "language modelling": ("perplexity", "bits_per_byte", "loss"),
}


def scored_row(model: Model) -> Architecture:
    """The row of a model that has scores."""
    row = model.row()
    if not row.scored_as:
        names = ", ".join(row.class_name for row in ARCHITECTURES if row.scored_as)
        raise InputError(f"A {type(model).__name__} has no scores; those that do: {names}.")
    return row


@dataclass(frozen=True)
class Evaluated:
    """Scores, and what they are over.

    >>> found = Evaluated({"perplexity": 31.5}, 2048, "tokens", Report(read=9))
    >>> f"{found.scores['perplexity']} over {found.count} {found.unit}"
    '31.5 over 2048 tokens'
    """

    scores: dict[str, float]
    count: int
    unit: str  # of what there are so many: "texts", "questions" or "tokens"
    report: Report  # lines that were read, and those that could not be used


def evaluate(
    model: Model,
    text: Tokenizer,
    data: Sequence[Mapping[str, Any]],
    wanted: Sequence[str] = (),
    *,
    root: str | Path = ".",
    settings: Settings = (),
    progress: Progress | None = None,
) -> Evaluated:
    r"""The scores of a model on some data sources, as a recipe has them, with files below ``root``.

    ``wanted`` are names of scores; without any, all that the model can have. ``settings`` are keys
    of a recipe: ``data.length``, ``data.context``, ``data.prepare``, ``batch.tokens``, those of
    ``evaluation``, and for a Transformer-XL ``model.config.memory``.

    >>> import tempfile
    >>> from regard import GPT2, GPT2Config, Tokenizer
    >>> text = Tokenizer.train_bpe(["one two three"], size=260)
    >>> model = GPT2(GPT2Config(vocabulary=len(text), length=8, dim=8, depth=1, heads=2)).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("one two three\n" * 9)
    ...     found = evaluate(model, text, [{"format": "text", "files": ["a.txt"]}], root=folder)
    >>> list(found.scores), found.unit
    (['perplexity', 'bits_per_byte', 'loss'], 'tokens')
    """
    row = scored_row(model)
    known = SCORES_OF_TASK[row.scored_as]
    nearest("score ", dict.fromkeys(wanted), known)
    names = tuple(wanted) or known
    for name in names:
        metrics.check(name)
    recipe = _recipe(row, model, data, root, settings)
    report = Report()
    records = list(sources.records(recipe, recipe.data.test, report))
    if not records:
        raise InputError(f"There is nothing to evaluate on. {report}")
    report.check(recipe.data.bad)
    show = progress or _quiet
    with torch.inference_mode():
        if known is WRITTEN:
            scores, count, unit = score_pairs(recipe, model, text, records, names, show)
        elif row.scored_as == "question answering":
            scores, count, unit = score_answers(recipe, model, text, records, show)
        else:
            scores, count, unit = score_text(recipe, model, text, records, show)
    return Evaluated({name: scores[name] for name in names}, count, unit, report)


def _quiet(done: int, total: int) -> None:
    del done, total


def _recipe(
    row: Architecture,
    model: Model,
    data: Sequence[Mapping[str, Any]],
    root: str | Path,
    settings: Settings,
) -> Recipe:
    """A recipe that nothing is learned by; it checks every key and says what is meant."""
    longest = getattr(model.config, "length", 0)
    lengths = {"bert": min(longest, 384), "gpt2": longest, "transformer-xl": 128}
    sources = [dict(source) for source in data]
    raw = {
        "task": row.scored_as,
        "output": "",
        "model": {"kind": row.name},
        "data": {
            "root": str(root),
            "length": lengths.get(row.name, 256),
            "train": sources,
            "test": sources,
        },
        "batch": {"tokens": 2048},  # a vocabulary of 50,000 takes 400 MB then
        "schedule": {"steps": 1},
    }
    return parse_recipe(raw, settings)


def own_settings(one: Bundle) -> dict[str, Any]:
    """What a model's own files say of its use: a prefix, and keys of a recipe.

    So that it is measured as it is used, where nothing else is asked for.
    """
    row, tasks = scored_row(one.model), one.tasks
    task = (
        row.scored_as if row.scored_as in tasks else next(iter(tasks)) if len(tasks) == 1 else None
    )
    found = dict[str, Any]()
    if one.prefix(task):
        found["prefix"] = one.prefix(task)
    if prepare := one.tasks.get(task or "", {}).get("prepare"):
        found["data.prepare"] = prepare
    if SCORES_OF_TASK[row.scored_as] is WRITTEN:
        how = one.settings(task).strategy()
        assert not isinstance(how, Sample)
        found["evaluation.beam"] = how.num_beams if isinstance(how, Beam) else 1
        found["evaluation.no_repeat"] = how.no_repeat_ngram_size
        found["evaluation.least"] = how.min_new_tokens
        if isinstance(how, Beam):
            found["evaluation.length_penalty"] = how.length_penalty
    return found
