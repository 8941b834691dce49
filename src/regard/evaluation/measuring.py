"""Evaluate a model on given data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch

from regard.data import sources
from regard.data.encoding import pair_columns, text_columns, window_columns
from regard.data.readers import group_targets
from regard.data.records import RECORDS, Pair, Question, Record, Report
from regard.data.schema import nearest, parse
from regard.data.tables import Table
from regard.decoding.strategies import Sample
from regard.errors import InputError
from regard.evaluation import metrics
from regard.evaluation.scoring import AnswerScorer, PairScorer, Progress, Scorer, TextScorer
from regard.evaluation.settings import DECODING, WRITTEN, Measurement
from regard.models.bundle import Bundle
from regard.models.model import Model
from regard.models.registry import ARCHITECTURES, Architecture
from regard.text.tokenizer import Tokenizer

Settings = Mapping[str, Any] | Sequence[str]  # keys of a recipe: {"evaluation.num_beams": 4}

# The default scores for each task.
SCORES_OF_TASK: dict[str, tuple[str, ...]] = {
    "translation": WRITTEN,
    "summarization": WRITTEN,
    "question answering": ("exact", "f1"),
    "language modelling": ("perplexity", "bits_per_byte", "loss"),
}
# Scores that are measured only on request.
_ON_REQUEST: dict[str, tuple[str, ...]] = {
    "translation": ("loss", "perplexity"),
    "summarization": ("loss", "perplexity"),
    "question answering": ("loss",),
}


def scored_row(model: Model) -> Architecture:
    """The registry row of a model; InputError if models of its architecture have no scores."""
    row = model.row()
    if not row.scored_as:
        names = ", ".join(row.class_name for row in ARCHITECTURES if row.scored_as)
        raise InputError(f"A {type(model).__name__} has no scores; models with scores: {names}.")
    return row


@dataclass(frozen=True)
class Evaluated:
    """Scores, and the data they were measured on.

    >>> measured = Evaluated({"perplexity": 31.5}, 2048, "tokens", Report(read=9))
    >>> f"{measured.scores['perplexity']} over {measured.count} {measured.unit}"
    '31.5 over 2048 tokens'
    """

    scores: dict[str, float]
    count: int
    unit: str  # of the count: "texts", "questions" or "tokens"
    report: Report  # the number of lines read, and the bad lines


def evaluate(
    model: Model,
    tokenizer: Tokenizer,
    data: Sequence[Mapping[str, Any]],
    wanted: Sequence[str] = (),
    *,
    root: str | Path = ".",
    settings: Settings = (),
    progress: Progress | None = None,
) -> Evaluated:
    r"""The scores of a model on data sources.

    ``data`` are sources as in a recipe, with files below ``root``. ``wanted`` are names of scores,
    by default those of :data:`SCORES_OF_TASK`. Only on request, translation and summarization have
    ``loss`` and ``perplexity``, and question answering has ``loss``. ``settings`` are recipe keys:
    ``data.length``, ``data.context``, ``data.prepare``, ``batch.tokens``, any key of
    ``evaluation``, and for a Transformer-XL ``model.config.memory``.

    >>> import tempfile
    >>> from regard import GPT2, GPT2Config, Tokenizer
    >>> tokenizer = Tokenizer.train_bpe(["one two three"], size=260)
    >>> config = GPT2Config(vocabulary=len(tokenizer), length=8, dim=8, depth=1, heads=2)
    >>> model = GPT2(config).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("one two three\n" * 9)
    ...     data = [{"format": "text", "files": ["a.txt"]}]
    ...     measured = evaluate(model, tokenizer, data, root=folder)
    >>> list(measured.scores), measured.unit
    (['perplexity', 'bits_per_byte', 'loss'], 'tokens')
    """
    row = scored_row(model)
    by_default = SCORES_OF_TASK[row.scored_as]
    nearest("score ", dict.fromkeys(wanted), (*by_default, *_ON_REQUEST.get(row.scored_as, ())))
    names = tuple(wanted) or by_default
    for name in names:
        metrics.check(name)
    report, kind = Report(), RECORDS[row.scored_as]
    longest = model.longest or 384
    lengths = {Pair: 256, Question: min(longest, 384), str: 128 if model.remembers else longest}
    test = [dict(source) for source in data]
    raw = {
        "task": row.scored_as,
        "model": {"kind": row.name},
        "data": {"root": str(root), "length": lengths[kind], "train": [], "test": test},
    }
    settled = parse(Measurement, raw, settings)
    records = list(sources.records(settled.data, settled.data.test, kind, report))
    if not records:
        raise InputError(f"The data have no records to evaluate on. {report}")
    report.check(settled.data.max_bad_share, "test")
    scorer = _scorer(settled, tokenizer, records, names)
    with torch.inference_mode(), _memory_length(model, settled.model.config):
        scores = scorer(model) if progress is None else scorer(model, progress)
    return Evaluated({name: scores[name] for name in names}, scorer.count, scorer.unit, report)


def _scorer(
    settled: Measurement, tokenizer: Tokenizer, records: Sequence[Record], names: Sequence[str]
) -> Scorer:
    data, evaluation, tokens = settled.data, settled.evaluation, settled.batch.tokens
    limit, kind = evaluation.examples or None, RECORDS[settled.task]
    if kind is Pair:
        whole = cast("Sequence[Pair]", records)
        pairs, table = group_targets(whole)[:limit], None
        if not set(names) <= set(WRITTEN):
            kept = {pair.source for pair in pairs}
            report = Report()
            rows = (pair for pair in whole if pair.source in kept)
            table = Table(pair_columns(rows, data.length, tokenizer, report), {})
            report.check(1.0, "test")  # raises if all pairs are too long
        return PairScorer(pairs, tokenizer, evaluation, names, data.length, table, tokens)
    if kind is Question:
        questions = cast("Sequence[Question]", records)[:limit]
        table = Table(window_columns(questions, tokenizer, data.length), {})
        return AnswerScorer(
            questions, table, tokenizer, tokens, evaluation.always_answer, evaluation.threshold
        )
    columns, size = text_columns(cast("Sequence[str]", records), tokenizer)
    flat, temperature = columns["text"].flat, evaluation.temperature
    return TextScorer(flat, size, data.length, data.context, tokens, temperature)


@contextmanager
def _memory_length(model: Model, config: Mapping[str, Any]) -> Iterator[None]:
    """Context in which a model with memory uses the memory length in ``config``, if any."""
    nearest("key model.config.", config, ["memory"] if model.remembers else [])
    before = model.config
    if model.remembers:
        model.config = replace(model.config, **config)
    try:
        yield
    finally:
        model.config = before


def own_settings(bundle: Bundle) -> dict[str, Any]:
    """The prefix and the recipe keys that are stored with a model as its defaults.

    With these settings, an evaluation runs the model as the model's tasks do.
    """
    row, tasks = scored_row(bundle.model), bundle.tasks
    only = next(iter(tasks)) if len(tasks) == 1 else None
    task = row.scored_as if row.scored_as in tasks else only
    result = dict[str, Any]()
    if prefix := bundle.prefix(task):
        result["prefix"] = prefix
    if prepare := tasks.get(task or "", {}).get("prepare"):
        result["data.prepare"] = prepare
    if SCORES_OF_TASK[row.scored_as] is WRITTEN:
        strategy = bundle.settings(task).strategy()
        assert not isinstance(strategy, Sample)
        decoding = {"num_beams": 1} | asdict(strategy)
        result |= {f"evaluation.{name}": decoding[name] for name in DECODING if name in decoding}
    if threshold := tasks.get(task or "", {}).get("threshold"):
        result["evaluation.threshold"] = threshold
    return result
