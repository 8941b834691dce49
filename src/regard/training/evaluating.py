"""How well a model does: on one's own data, and whether the figures of its card come again.

What is read and how it is decoded is said in the keys of a recipe, so that a figure is measured
here as it was while the model learned; only weights are always float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from regard.decoding import Beam, Sample, generate
from regard.errors import InputError
from regard.models import GPT2, T5, BertAnswering, Model, Transformer, TransformerXL, load
from regard.models.state import Memories
from regard.shipped import SCORES, Score, read_scores
from regard.tasks.ready import Ready, decoding
from regard.text import Text
from regard.training import building, metrics, reading
from regard.training.answering import Exam, windows
from regard.training.data import Ragged, Table
from regard.training.objectives import TOKENS, how_to_decode
from regard.training.reading import Pair, Question, Record, Report
from regard.training.recipe import WRITTEN, Recipe, nearest, parse_recipe

Settings = Mapping[str, Any] | Sequence[str]  # keys of a recipe: {"evaluation.beam": 4}
Progress = Callable[[int, int], None]  # how much is done, and of how much


class Kind(NamedTuple):
    """What can be asked of an architecture."""

    model: type[Model]
    task: str
    name: str  # as recipes have it
    metrics: tuple[str, ...]


_TOLD = ("perplexity", "bits_per_byte", "loss")
KINDS = (
    Kind(Transformer, "translation", "transformer", WRITTEN),
    Kind(T5, "summarization", "t5", WRITTEN),
    Kind(BertAnswering, "question answering", "bert", ("exact", "f1")),
    Kind(GPT2, "language modelling", "gpt2", _TOLD),
    Kind(TransformerXL, "language modelling", "transformer-xl", _TOLD),
)


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


def kind_of(model: Model) -> Kind:
    """What can be asked of a model."""
    for kind in KINDS:
        if isinstance(model, kind.model):
            return kind
    names = ", ".join(kind.model.__name__ for kind in KINDS)
    raise InputError(f"A {type(model).__name__} has no scores of its own; those that do: {names}.")


def evaluate(
    model: Model,
    text: Text,
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
    >>> from regard import GPT2, GPT2Config, Text
    >>> text = Text.train_bpe(["one two three"], size=260)
    >>> model = GPT2(GPT2Config(vocabulary=len(text), length=8, dim=8, depth=1, heads=2)).eval()
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("one two three\n" * 9)
    ...     found = evaluate(model, text, [{"format": "text", "files": ["a.txt"]}], root=folder)
    >>> list(found.scores), found.unit
    (['perplexity', 'bits_per_byte', 'loss'], 'tokens')
    """
    kind = kind_of(model)
    nearest("score ", dict.fromkeys(wanted), kind.metrics)
    names = tuple(wanted) or kind.metrics
    for name in names:
        metrics.check(name)
    recipe = _recipe(kind, model, data, root, settings)
    report = Report()
    records = list(building.records(recipe, recipe.data.test, report))
    if not records:
        raise InputError(f"There is nothing to evaluate on. {report}")
    report.check(recipe.data.bad)
    show = progress or _quiet
    with torch.inference_mode():
        if kind.metrics is WRITTEN:
            scores, count, unit = _written(recipe, model, text, records, names, show)
        elif kind.model is BertAnswering:
            scores, count, unit = _answered(recipe, model, text, records, show)
        else:
            scores, count, unit = _told(recipe, model, text, records, show)
    return Evaluated({name: scores[name] for name in names}, count, unit, report)


def _quiet(done: int, total: int) -> None:
    del done, total


def _recipe(
    kind: Kind,
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
        "task": kind.task,
        "output": "",
        "model": {"kind": kind.name},
        "data": {
            "root": str(root),
            "length": lengths.get(kind.name, 256),
            "train": sources,
            "test": sources,
        },
        "batch": {"tokens": 2048},  # a vocabulary of 50,000 takes 400 MB then
        "schedule": {"steps": 1},
    }
    return parse_recipe(raw, settings)


def own_settings(one: Ready) -> dict[str, Any]:
    """What a model's own files say of its use: a prefix, and keys of a recipe.

    So that it is measured as it is used, where nothing else is asked for.
    """
    kind, tasks = kind_of(one.model), one.tasks
    task = kind.task if kind.task in tasks else next(iter(tasks)) if len(tasks) == 1 else None
    said, found = one.settings(task), dict[str, Any]()
    if isinstance(said.get("prefix"), str):
        found["prefix"] = said["prefix"]
    if said.get("prepare"):
        found["data.prepare"] = said["prepare"]
    if kind.metrics is WRITTEN:
        how, _ = decoding(said, None, None)
        assert not isinstance(how, Sample)
        found["evaluation.beam"] = how.size if isinstance(how, Beam) else 1
        found["evaluation.no_repeat"] = how.no_repeat
        found["evaluation.least"] = how.least
        if isinstance(how, Beam):
            found["evaluation.length_penalty"] = how.length_penalty
    return found


# ----------------------------------------------------------------------------- text that is written


def _written(
    recipe: Recipe,
    model: Any,
    text: Text,
    records: Sequence[Record],
    names: Sequence[str],
    show: Progress,
) -> tuple[dict[str, float], int, str]:
    pairs = reading.together(cast("Sequence[Pair]", records))
    settings = recipe.evaluation
    pairs = pairs[: settings.examples or len(pairs)]
    end = model.config.end
    prompts = [[*ids, end] for ids in building.token_ids(text, [pair.source for pair in pairs])]
    outputs = [""] * len(pairs)
    # By length, and from the longest on: a guess of the time left is then too long, not too short.
    order = sorted(range(len(pairs)), key=lambda row: -len(prompts[row]))
    size = max(256 // settings.beam, 1)
    for start in range(0, len(order), size):
        rows = order[start : start + size]
        found = generate(
            model,
            [prompts[row] for row in rows],
            how_to_decode(settings),
            length=recipe.data.length,
            stop=[end],
            batch=size,
            tokens=TOKENS,
        )
        for row, (best, *_) in zip(rows, found, strict=True):
            outputs[row] = text.decode(best.ids)
        show(start + len(rows), len(order))
    references = [pair.targets for pair in pairs]
    scores: dict[str, float] = {}
    if "bleu" in names:
        scores["bleu"] = metrics.bleu(outputs, references, settings.tokenize)
    if "chrf" in names:
        scores["chrf"] = metrics.chrf(outputs, references)
    if any(name.startswith("rouge") for name in names):
        rouge = metrics.rouge(outputs, references)
        scores |= zip(("rouge-1", "rouge-2", "rouge-l"), rouge, strict=True)
    return scores, len(pairs), "texts"


# ------------------------------------------------------------------------------------------ answers


def _answered(
    recipe: Recipe, model: Model, text: Text, records: Sequence[Record], show: Progress
) -> tuple[dict[str, float], int, str]:
    questions = cast("list[Question]", list(records))
    questions = questions[: recipe.evaluation.examples or len(questions)]
    # Some at a time, of like length, so that there is something to show on the way.
    questions.sort(key=lambda question: -len(question.context))
    outputs: list[str] = []
    for start in range(0, len(questions), 128):
        some = questions[start : start + 128]
        table = Table(windows(some, text, recipe.data.length), {})
        exam = Exam(some, table, text, recipe.batch.tokens, recipe.evaluation.always)
        exam(model)
        outputs += exam.outputs
        show(len(outputs), len(questions))
    references = [[answer.text for answer in question.answers] for question in questions]
    found = metrics.answered(outputs, references)
    return found._asdict(), len(questions), "questions"


# --------------------------------------------------------------------------------- language models


def _told(
    recipe: Recipe, model: Any, text: Text, records: Sequence[Record], show: Progress
) -> tuple[dict[str, float], int, str]:
    lines = [f"{line}\n" for line in cast("Sequence[str]", records)]
    whole = sum(len(line.encode()) for line in lines)
    flat = Ragged.of(building.token_ids(text, lines)).flat
    total = len(flat) - 1  # the first token is told from nothing
    if total < 1:
        raise InputError("The text has a single token: there is nothing to tell from it.")
    length, context = recipe.data.length, recipe.data.context
    rows = max(recipe.batch.tokens // length, 1)
    with _remembering(model, recipe.model.config) as remember:
        if remember is None or context:
            pieces, given = _windows(total, length, rows, context), {}
        else:
            pieces, given = _lanes(total, length, rows), {"memories": remember()}
        nats, count = 0.0, 0
        for starts, size, last in pieces:
            piece = flat[starts[:, None] + torch.arange(size + 1)].long().to(model.device)
            read, labels = piece[:, :-1], piece[:, -last:].flatten()
            hidden = model.read(read, **given)[:, -last:]
            told = model.logits(hidden).float().flatten(0, 1) / recipe.evaluation.temperature
            nats += float(cross_entropy(told, labels, reduction="sum"))
            count += len(starts) * last
            show(count, total)
    # A few tokens may be left that fill no row; then the share of the text that was read counts.
    scores = {
        "loss": nats / count,
        "perplexity": metrics.perplexity(nats, count),
        "bits_per_byte": metrics.bits_per_byte(nats, whole * count / total),
    }
    return scores, count, "tokens"


@contextmanager
def _remembering(
    model: Model, config: Mapping[str, Any]
) -> Iterator[Callable[[], Memories] | None]:
    """What a model remembers with, if it does; within, its memory is as long as ``config`` says."""
    nearest("key model.config.", config, ["memory"] if isinstance(model, TransformerXL) else [])
    if not isinstance(model, TransformerXL):
        yield None
        return
    before = model.config
    model.config = replace(before, **config)
    try:
        yield model.remember
    finally:
        model.config = before


Piece = tuple[Tensor, int, int]  # where some pieces start, how long they are, how much is told


def _windows(total: int, length: int, rows: int, context: int) -> Iterator[Piece]:
    """Some pieces at a time: each begins with ``context`` tokens that were told before."""
    if context:
        first = min(context, total)
        yield torch.tensor([0]), first, first
    new = length - context
    whole = torch.arange(0, max(total - length + 1, 0), new)
    for at in range(0, len(whole), rows):
        yield whole[at : at + rows], length, new
    left = max(total - context, 0) % new
    if left:
        yield torch.tensor([total - context - left]), context + left, left


def _lanes(total: int, length: int, rows: int) -> Iterator[Piece]:
    """As :func:`_windows`, of readers side by side that each go on where they stopped."""
    rows = max(min(rows, total // length), 1)
    lane = total // rows
    for at in range(0, lane, length):
        size = min(length, lane - at)
        yield torch.arange(rows) * lane + at, size, size


# -------------------------------------------------------------------------------- figures of cards


class Again(NamedTuple):
    """A figure of a card, and the same measured here.

    >>> Again(Score(metric="bleu", value=31.0, tolerance=0.1, data=[], settings={}), 31.05).agrees
    True
    """

    score: Score
    value: float

    @property
    def agrees(self) -> bool:
        return abs(self.value - self.score.value) <= self.score.tolerance


def reproduce(
    folder: Path,
    *,
    root: str | Path,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Iterator[Again]:
    r"""Every figure in the scores.json of a checkpoint, measured again on the files below ``root``.

    Figures of the same data and settings come from one measurement.

    >>> import tempfile
    >>> from regard import GPT2, GPT2Config, Text
    >>> text = Text.train_bpe(["one two three"], size=260)
    >>> model = GPT2(GPT2Config(vocabulary=len(text), length=8, dim=8, depth=1, heads=2)).eval()
    >>> figure = {"metric": "perplexity", "value": 50.0, "tolerance": 0.5, "settings": {}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(folder)
    ...     text.save(folder)
    ...     _ = Path(folder, "a.txt").write_text("one two three\n" * 9)
    ...     figures = [figure | {"data": [{"format": "text", "files": ["a.txt"]}]}]
    ...     _ = Path(folder, "scores.json").write_text(json.dumps(figures))
    ...     [again] = reproduce(Path(folder), root=folder)
    >>> again.score.value, again.value > 200, again.agrees  # it has learned nothing
    (50.0, True, False)
    """
    if not (folder / SCORES).is_file():
        raise InputError(f"{folder} has no figures to measure again ({SCORES}). Give --data.")
    together: dict[str, list[Score]] = {}
    for score in read_scores(folder / SCORES):
        together.setdefault(json.dumps([score.data, score.settings]), []).append(score)
        for source in score.data:
            _check_files(Path(root).expanduser(), source)
    model = load(folder, device=device, dtype=torch.float32)
    text = Text.load(folder)
    for scores in together.values():
        data, settings = scores[0].data, scores[0].settings
        wanted = list(dict.fromkeys(score.metric for score in scores))
        found = evaluate(model, text, data, wanted, root=root, settings=settings, progress=progress)
        for score in scores:
            yield Again(score, found.scores[score.metric])


def _check_files(root: Path, source: Mapping[str, Any]) -> None:
    """Before hours go by: that all data are there."""
    for name in (*source.get("files", ()), *source.get("targets", ())):
        if not (root / name).is_file():
            raise InputError(
                f"The card was measured on {name}, which is not below the folder {str(root)!r}. "
                "Say where it is with --root; docs/data.md says where it comes from."
            )
