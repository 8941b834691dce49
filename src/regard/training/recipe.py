"""Recipes: all that a training run depends on, in one TOML file; every key is checked."""

# ruff: noqa: RUF009 - key() declares a field
from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from difflib import get_close_matches
from math import isfinite
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.errors import InputError
from regard.text.preparing import PREPARATIONS
from regard.training.reading import Pair, Question

TASKS = {
    "translation": ("transformer", "t5"),
    "summarization": ("transformer", "t5"),
    "question answering": ("bert",),
    "language modelling": ("gpt2", "transformer-xl"),
    "masked language modelling": ("bert",),
    "span corruption": ("t5",),
}
RECORDS: dict[str, type] = {
    "translation": Pair,
    "summarization": Pair,
    "question answering": Question,
    "language modelling": str,
    "masked language modelling": str,
    "span corruption": str,
}
FORMATS = ("parallel", "tsv", "jsonl", "questions", "squad", "text", "dataset")
SHAPES = ("inverse-sqrt", "cosine", "linear", "constant")
PRECISIONS = ("float32", "bfloat16", "float16")
WRITTEN = ("bleu", "chrf", "rouge-1", "rouge-2", "rouge-l")  # scores of text that a model writes
METRICS = ("loss", *WRITTEN, "exact", "f1")
SCORED: dict[type, tuple[str, ...]] = {
    Pair: ("loss", *WRITTEN),
    Question: ("loss", "exact", "f1"),
    str: ("loss",),
}
_PAIRS = tuple(task for task, kind in RECORDS.items() if kind is Pair)
# Keys that do something for some tasks, or some models, alone.
ONLY: dict[str, tuple[str, ...]] = {
    "tokenizer.dropout": _PAIRS,
    "data.prepare": tuple(task for task, kind in RECORDS.items() if kind is not Question),
    "data.unanswered": ("question answering",),
    "data.context": ("language modelling",),
    "data.forget": ("transformer-xl",),
    "optimizer.smoothing": _PAIRS,
    "optimizer.agreement": _PAIRS,
    "optimizer.activation": ("transformer-xl",),
    "optimizer.slowness": ("transformer-xl",),
    "evaluation.beam": _PAIRS,
    "evaluation.length_penalty": _PAIRS,
    "evaluation.no_repeat": _PAIRS,
    "evaluation.least": _PAIRS,
    "evaluation.tokenize": _PAIRS,
    "evaluation.temperature": ("language modelling",),
    "evaluation.always": ("question answering",),
}
TOKENIZERS = ("bpe", "wordpiece", "unigram", "words")
PARALLEL = ("ddp", "fsdp", "context")


def key(
    doc: str,
    default: Any = MISSING,
    *,
    among: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """One key of a recipe: what it means, its default, and what it may be."""
    metadata = {"doc": doc, "among": tuple(among), "least": least, "most": most}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


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
class Model:
    """The model to train."""

    kind: str = key(
        "the architecture", among=("transformer", "t5", "gpt2", "transformer-xl", "bert")
    )
    start: str | None = key(
        "a checkpoint to start from, a folder or a name; without it, random weights", None
    )
    config: dict[str, Any] = key("the sizes: fields of the architecture's config", dict)
    locked: bool = key(
        "variational dropout: one dropout mask for all positions of a sequence", False
    )


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """The tokenizer of a run."""

    start: str | None = key(
        "a tokenizer to use, a folder or a name; without it, one is trained", None
    )
    kind: str = key("the kind of tokenizer to train", "bpe", among=TOKENIZERS)
    size: int = key("the size of the vocabulary to train", 8000, least=16, most=2**20)
    special: tuple[str, ...] = key("special tokens, such as language tags", ())
    keep: int = key(
        "the number of tokens to keep of a WordPiece vocabulary, the most frequent ones in "
        "the training text; 0 for all",
        0,
        least=0,
    )
    dropout: float = key(
        "BPE-dropout: the share of merges that are skipped at random in training", 0.0, least=0
    )
    variants: int = key(
        "the number of different BPE-dropout tokenizations of each text, used in turn, one "
        "an epoch",
        8,
        least=2,
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


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The size of a batch and of a step."""

    tokens: int = key("the maximum number of tokens of a batch, padding included", 4096, least=1)
    accumulate: int = key("the number of batches in one step", 1, least=1)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """The learning rate and the number of steps."""

    steps: int = key("the number of steps", least=1)
    minutes: float = key(
        "the maximum time in minutes, for steps and the evaluations between them; the "
        "schedule is shortened to the steps that fit; 0 for no limit",
        0.0,
        least=0,
    )
    rate: float = key("the highest learning rate", 1e-3, least=0)
    warmup: int = key("the number of steps over which the rate rises from 0", 0, least=0)
    shape: str = key("how the rate falls after the warmup", "inverse-sqrt", among=SHAPES)
    floor: float = key(
        "the final rate of cosine and linear, as a share of rate", 0.0, least=0, most=1
    )


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101)."""

    betas: tuple[float, ...] = key(
        "the decay of the two running averages of gradients", (0.9, 0.98)
    )
    epsilon: float = key("added to the denominator", 1e-9, least=0)
    decay: float = key("weight decay, for matrices only", 0.0, least=0)
    clip: float = key("the maximum norm of the gradient; 0 for no limit", 1.0, least=0)
    smoothing: float = key("label smoothing", 0.0, least=0, most=0.99)
    agreement: float = key(
        "R-Drop: the weight of the divergence between two passes with different dropout "
        "(https://arxiv.org/abs/2106.14448); 0 for one pass",
        0.0,
        least=0,
    )
    activation: float = key(
        "the weight of the penalty on large outputs of the last layer (AR, "
        "https://arxiv.org/abs/1708.02182); the logged loss includes it",
        0.0,
        least=0,
    )
    slowness: float = key(
        "the weight of the penalty on changes of these outputs from one position to the next "
        "(TAR, the same)",
        0.0,
        least=0,
    )
    embedding_rate: float = key(
        "the learning rate of embedding tables, as a multiple of the rate; learned positions "
        "are not included",
        1.0,
        least=0,
    )
    relative: bool = key(
        "scale the rate of each matrix by its size at initialisation, for T5, whose matrices "
        "start at very different sizes",
        False,
    )
    ema: float = key("the decay of a running mean of the weights; 0 for none", 0.0, least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and how a run is evaluated."""

    every: int = key("evaluate every this many steps; 0 for only at the end", 1000, least=0)
    metric: str = key("the score that decides which checkpoint is best", "loss", among=METRICS)
    examples: int = key("the number of examples to decode during training; 0 for all", 0, least=0)
    beam: int = key("the number of beams; 1 is greedy", 1, least=1)
    length_penalty: float = key("a beam's score is divided by its length to this power", 1.0)
    no_repeat: int = key(
        "no sequence of this many tokens is generated twice; 0 for no limit", 0, least=0
    )
    least: int = key("the minimum number of tokens before an end token", 0, least=0)
    temperature: float = key(
        "the temperature of a language model's softmax; above 1 for a model that is "
        "overconfident, for example after overfitting",
        1.0,
        least=0.01,
    )
    always: bool = key("answer every question, even if no answer is more likely", False)
    tokenize: str = key(
        "the tokenization of BLEU (none: for tokenized text)",
        "13a",
        among=("13a", "intl", "char", "zh", "none"),
    )
    patience: int = key(
        "stop after this many evaluations without a better score; 0 for never", 0, least=0
    )


@dataclass(frozen=True, kw_only=True)
class Saving:
    """Which checkpoints are kept."""

    every: int = key("save a checkpoint every this many steps", 1000, least=1)
    last: int = key("the number of latest checkpoints to keep, besides the best", 3, least=1)
    average: int = key(
        "the finished model is the mean of this many latest checkpoints; 1 for the last one, "
        "0 for the best one",
        1,
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class Watching:
    """Measuring attention while a model trains."""

    every: int = key("measure attention every this many steps; 0 for never", 0, least=0)
    entropy: float = key("warn if the mean entropy of a head falls below this, in nats", 0.01)
    logit: float = key("warn if the largest score of a head rises above this", 500.0)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that a training run depends on."""

    task: str = key("the task to train for", among=tuple(TASKS))
    output: str = key("the folder of the run: checkpoints, log and the finished model")
    seed: int = key("the seed of all random numbers", 0, least=0, most=2**63 - 1)
    device: str = key("cpu, cuda, cuda:1 ...; auto is cuda if there is one", "auto")
    precision: str = key(
        "the precision of computation (weights stay float32)", "float32", among=PRECISIONS
    )
    model: Model = key("the model to train")
    tokenizer: Tokenizer = key("the tokenizer", Tokenizer)
    data: Data = key("the data")
    batch: Batch = key("the batches", Batch)
    schedule: Schedule = key("the learning rate and the number of steps")
    optimizer: Optimizer = key("the optimizer", Optimizer)
    evaluation: Evaluation = key("the evaluation", Evaluation)
    saving: Saving = key("the checkpoints", Saving)
    watching: Watching = key("measuring attention while training", Watching)
    compile: bool = key("compile the model with torch.compile", False)
    graphs: bool = key(
        "replay steps as CUDA graphs, which is faster for small models; for one process, and "
        "batches that are the same in each epoch",
        False,
    )
    parallel: str = key(
        "what the processes of torchrun split (ddp: batches; fsdp: weights too; context: each "
        "sequence)",
        "ddp",
        among=PARALLEL,
    )
    tensorboard: bool = key("also write the log for TensorBoard", False)

    def __post_init__(self) -> None:
        if self.model.kind not in TASKS[self.task]:
            raise InputError(
                f"{self.task} is learned by {' or '.join(TASKS[self.task])}, not by "
                f"{self.model.kind} (model.kind)."
            )
        for name, where in ONLY.items():
            table, _, entry = name.partition(".")
            part = getattr(self, table)
            default = next(field.default for field in fields(part) if field.name == entry)
            if getattr(part, entry) != default and not {self.task, self.model.kind} & {*where}:
                raise InputError(
                    f"{name} does nothing for {self.task} with {self.model.kind}; it is for "
                    f"{' or '.join(where)}. Leave it out."
                )
        metrics = SCORED[RECORDS[self.task]]
        if self.evaluation.metric not in metrics:
            raise InputError(
                f"{self.task} is not measured by {self.evaluation.metric} (evaluation.metric), but "
                f"by {' or '.join(metrics)}."
            )
        if self.evaluation.patience and not self.data.valid:
            raise InputError("evaluation.patience goes by what is held out: give data.valid.")
        if self.parallel == "context" and self.model.locked:
            raise InputError(
                "model.locked is not for parallel = 'context': each process would draw its own."
            )
        average = self.saving.average
        if average > self.saving.last:
            raise InputError(
                f"saving.average = {average}, but only the last {self.saving.last} checkpoints "
                "are kept (saving.last)."
            )
        saves = self.schedule.steps // self.saving.every
        if average > max(saves, 1):
            raise InputError(
                f"saving.average = {average}, but {self.schedule.steps} steps make {saves} "
                "checkpoints. Lower saving.every or saving.average."
            )
        if average == 0 and not self.data.valid:
            raise InputError("saving.average = 0 takes the best checkpoint: give data.valid.")
        forms = {
            Pair: ("parallel", "tsv", "jsonl", "dataset"),
            Question: ("questions", "squad", "dataset"),
            str: ("text", "tsv", "jsonl", "dataset"),
        }
        for source in (*self.data.train, *self.data.valid, *self.data.test):
            fit = forms[RECORDS[self.task]]
            if source.format not in fit:
                raise InputError(f"{self.task} reads {' or '.join(fit)}, not {source.format}.")
            counts = {"columns": len(source.columns), "part": len(source.part)}
            if source.format == "jsonl" and source.fields:
                counts["fields"] = len(source.fields)
            for name, count in counts.items():
                if count != 2:
                    raise InputError(f"{name} of a data source are two, but got {count}.")
            if (source.format == "dataset" and not source.files) != bool(source.dataset):
                raise InputError(
                    "format = 'dataset' has either files or a dataset; other formats have files."
                )
            if min(source.columns) < 1:
                raise InputError(f"Columns count from 1, but got {list(source.columns)}.")
            if RECORDS[self.task] is str and (source.prefix or source.reverse):
                raise InputError(f"prefix and reverse of a data source do nothing for {self.task}.")
        below = {"tokenizer.dropout": self.tokenizer.dropout, "optimizer.ema": self.optimizer.ema}
        for name, share in below.items():
            if share >= 1:
                raise InputError(f"{name} is below 1, but got {share}.")
        if self.compile and self.model.kind == "t5":
            raise InputError(
                "compile = true is not for t5: torch.compile does not come to an end with its "
                "biases."
            )
        if self.graphs and self.precision == "float16":
            raise InputError("graphs = true is not for precision = 'float16'.")
        if self.graphs and self.compile and self.model.kind != "transformer-xl":
            raise InputError(
                f"graphs = true with compile = true is for transformer-xl, not for "
                f"{self.model.kind}. Set one of them to false."
            )
        if self.parallel == "context" and self.model.kind != "gpt2":
            raise InputError(
                f"parallel = 'context' is for gpt2, which reads from left to right alone, not for "
                f"{self.model.kind}. Use ddp or fsdp."
            )
        if self.data.context >= self.data.length:
            raise InputError(
                f"data.context = {self.data.context} leaves nothing to tell of pieces of "
                f"{self.data.length} tokens (data.length)."
            )
        if self.data.context and self.data.forget:
            raise InputError(
                "data.forget is for a memory, which data.context does without: leave one of them "
                "out."
            )
        if self.data.context and self.parallel == "context":
            raise InputError("data.context is not for parallel = 'context': use ddp or fsdp.")
        for step in self.data.prepare:
            if step not in PREPARATIONS:
                raise InputError(_unknown(f"data.prepare: {step!r}", step, PREPARATIONS))


def read_recipe(
    file: str | os.PathLike[str], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Recipe:
    """A recipe from a TOML file, with some keys set otherwise: ``["schedule.steps=100"]``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "recipe.toml")
    ...     _ = file.write_text('''task = "translation"
    ... output = "run"
    ... model = {kind = "transformer"}
    ... data = {train = [{format = "tsv", files = ["a.tsv"]}]}
    ... schedule = {steps = 5}''')
    ...     recipe = read_recipe(file, ["schedule.steps=7"])
    >>> recipe.task, recipe.schedule.steps
    ('translation', 7)
    """
    path = Path(file)
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"There is no recipe {path}.") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise InputError(f"{path} cannot be read as TOML: {error}.") from None
    data = raw.get("data")
    if isinstance(data, dict):
        data.setdefault("root", str(path.parent))
    return parse_recipe(raw, overrides)


def parse_recipe(
    raw: Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Recipe:
    """A recipe from what TOML holds: tables as dicts.

    >>> raw = {
    ...     "task": "translation", "output": "run", "model": {"kind": "transformer"},
    ...     "data": {"train": [{"format": "tsv", "files": ["a.tsv"]}]}, "schedule": {"steps": 5},
    ... }
    >>> parse_recipe(raw, ["schedule.steps=7"]).schedule.steps
    7
    >>> parse_recipe(raw, ["schedule.step=7"])
    Traceback (most recent call last):
    regard.errors.InputError: There is no key schedule.step. Did you mean schedule.steps?
    """
    whole = _copy(raw)
    if not isinstance(overrides, Mapping):
        overrides = dict(_assignment(text) for text in overrides)
    for name, value in overrides.items():
        _set(whole, name, value)
    return _build(Recipe, whole, "")


def describe() -> Iterator[tuple[str, str, str]]:
    """Every key of a recipe: its name, its default (or "needed"), and what it means."""
    yield from _describe(Recipe, "")


def _describe(kind: type, prefix: str) -> Iterator[tuple[str, str, str]]:
    hints = get_type_hints(kind)
    for entry in fields(kind):
        inner = next((part for part in _parts(hints[entry.name]) if is_dataclass(part)), None)
        if isinstance(inner, type):
            many = get_origin(hints[entry.name]) is tuple
            yield from _describe(inner, f"{prefix}{entry.name}{'[]' if many else ''}.")
            continue
        doc = entry.metadata["doc"]
        if entry.metadata["among"]:
            doc += f": {', '.join(entry.metadata['among'])}"
        yield prefix + entry.name, _default(entry), doc


def _default(entry: Field[Any]) -> str:
    if entry.default is not MISSING:
        return repr(list(entry.default) if isinstance(entry.default, tuple) else entry.default)
    return "needed" if entry.default_factory is MISSING else repr(entry.default_factory())


# ------------------------------------------------------------------------------------ overrides


def _assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InputError(f"A key is set as key=value, but got {text!r}.")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value  # a text without quotes


def _copy(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: _copy(value) for name, value in tree.items()}
    return [_copy(value) for value in tree] if isinstance(tree, list) else tree


def _set(whole: dict[str, Any], name: str, value: Any) -> None:
    """Set ``data.train.0.files`` and the like; a table that is not there is made."""
    *path, last = name.split(".")
    table: Any = whole
    for part in path:
        if isinstance(table, list) and part.isdigit() and int(part) < len(table):
            table = table[int(part)]
        elif isinstance(table, dict):
            table = table.setdefault(part, {})
        else:
            raise InputError(f"{name} cannot be set: there is no {part} on the way.")
    if not isinstance(table, dict):
        raise InputError(f"{name} cannot be set: {'.'.join(path)} is not a table.")
    table[last] = value


# ------------------------------------------------------------------------------------- checking

T = TypeVar("T")


def _build(kind: type[T], raw: Any, path: str) -> T:
    """A dataclass from a table."""
    if not isinstance(raw, dict):
        raise InputError(f"{path.rstrip('.')} should be a table, but got {raw!r}.")
    hints = get_type_hints(kind)
    known: dict[str, Field[Any]] = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    for name in raw:
        if name not in known:
            raise InputError(_unknown(f"key {path}{name}", name, known, path))
    values = {}
    for name, entry in known.items():
        if name in raw:
            values[name] = _value(raw[name], hints[name], path + name)
            _check_range(values[name], entry, path + name)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise InputError(f"The recipe lacks {path}{name}: {entry.metadata['doc']}.")
    return kind(**values)


def _value(raw: Any, hint: Any, path: str) -> Any:
    """A value of the type that a key has."""
    if is_dataclass(hint) and isinstance(hint, type):
        return _build(hint, raw, f"{path}.")
    if get_origin(hint) is tuple:
        if not isinstance(raw, list | tuple):
            raise InputError(f"{path} should be a list, but got {raw!r}.")
        inner = get_args(hint)[0]
        return tuple(_value(item, inner, f"{path}.{n}") for n, item in enumerate(raw))
    if get_origin(hint) is dict and isinstance(raw, dict):
        return raw
    parts = _parts(hint)
    if type(raw) is float and not isfinite(raw):
        raise InputError(f"{path} should be a finite number, but got {raw!r}.")
    if type(raw) in parts:
        return raw
    if float in parts and type(raw) is int:
        return float(raw)
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    wanted = " or ".join(words[part] for part in parts if part in words) or "a table"
    raise InputError(f"{path} should be {wanted}, but got {raw!r}.")


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (UnionType, Union, tuple) else (hint,)


def _check_range(value: Any, entry: Field[Any], path: str) -> None:
    rules = entry.metadata
    if rules["among"] and value not in rules["among"]:
        raise InputError(_unknown(f"{path} = {value!r}", str(value), rules["among"]))
    for low, bound in ((True, rules["least"]), (False, rules["most"])):
        if bound is not None and (value < bound if low else value > bound):
            side = "at least" if low else "at most"
            raise InputError(f"{path} should be {side} {bound:g}, but got {value!r}.")


def _unknown(what: str, name: str, known: Sequence[str] | Mapping[str, Any], path: str = "") -> str:
    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    if near:
        return f"There is no {what}. Did you mean {path}{near[0]}?"
    return f"There is no {what}. There are {', '.join(known)}."


def nearest(what: str, names: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise InputError for the first of some names that is not known, with the nearest that is."""
    for name in names:
        if name not in known:
            raise InputError(_unknown(f"{what}{name}", name, known, what.rpartition(" ")[2]))
