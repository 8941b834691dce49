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
    """Some files of text of one form."""

    format: str = key(
        "how the files are written; questions are one JSON object a line, with id, question, "
        "context and answers, a list of {text, start}",
        among=FORMATS,
    )
    files: tuple[str, ...] = key("the files, plain, .gz or .xz; of parallel text, the sources", ())
    targets: tuple[str, ...] = key("of parallel text, the files of the targets", ())
    columns: tuple[int, ...] = key("of TSV, the columns of source and target, from 1", (1, 2))
    fields: tuple[str, ...] = key(
        "of JSONL, the fields of source and target; of a dataset, its columns for these, for text, "
        "or for question, context and answers; where none are given, that is what they are called",
        (),
    )
    dataset: str = key(
        "of a Hugging Face dataset that is not in files: its folder, or its name on the hub", ""
    )
    subset: str = key("of a dataset on the hub, which of its subsets", "")
    split: str = key("of a dataset, which split", "train")
    part: tuple[int, ...] = key(
        "which of 1000 parts, by MD5 of the source: from the first up to below the second",
        (0, 1000),
    )
    reverse: bool = key("take the target as the source, and the source as the target", False)
    prefix: str = key("what comes before each source, as the tag of a language", "")


@dataclass(frozen=True, kw_only=True)
class Model:
    """What is trained."""

    kind: str = key(
        "the architecture", among=("transformer", "t5", "gpt2", "transformer-xl", "bert")
    )
    start: str | None = key("a checkpoint to start from, a folder or a name; else anew", None)
    config: dict[str, Any] = key("the sizes, as the fields of the architecture's config", dict)
    locked: bool = key(
        "whether dropout is drawn once for all positions of a sequence (variational dropout)", False
    )


@dataclass(frozen=True, kw_only=True)
class Tokenizer:
    """How text becomes ids."""

    start: str | None = key("a tokenizer to use, a folder or a name; else one is trained", None)
    kind: str = key("what to train", "bpe", among=TOKENIZERS)
    size: int = key("how large a vocabulary to train", 8000, least=16, most=2**20)
    special: tuple[str, ...] = key("tokens of their own, as the tags of languages", ())
    keep: int = key(
        "of a WordPiece vocabulary to start from, how many tokens stay: those that the training "
        "text has most; 0 for all",
        0,
        least=0,
    )
    dropout: float = key(
        "the share of merges that BPE leaves out at random while pairs are learned", 0.0, least=0
    )
    variants: int = key("into how many such ways each text is cut, one an epoch", 8, least=2)


@dataclass(frozen=True, kw_only=True)
class Data:
    """What it learns from."""

    root: str = key("where files that are not absolute lie; as a default, beside the recipe", ".")
    train: tuple[Source, ...] = key("what to learn from")
    valid: tuple[Source, ...] = key("what to evaluate on while learning", ())
    test: tuple[Source, ...] = key("what to evaluate on at the end", ())
    prepare: tuple[str, ...] = key(
        f"what happens to each text first, in order: {', '.join(PREPARATIONS)}", ()
    )
    length: int = key(
        "the most tokens of a sequence; longer pairs are reported as bad, other text is cut into "
        "pieces",
        256,
        least=2,
    )
    context: int = key(
        "of language models, how many tokens at the start of a piece are read only, and told by "
        "the piece before: pieces overlap by so many, and a Transformer-XL does without its memory",
        0,
        least=0,
    )
    forget: int = key(
        "of a model that remembers the pieces before, after how many it begins with an empty "
        "memory, so that it learns to; 0 for once an epoch",
        0,
        least=0,
    )
    unanswered: float = key(
        "how many questions are asked once more where their answer is not, as a share of all",
        0.0,
        least=0,
        most=1,
    )
    bad: float = key("the largest share of bad lines that is accepted", 0.001, least=0, most=1)
    cache: str = key("where tokenised text is kept", "~/.cache/regard/tokens")


@dataclass(frozen=True, kw_only=True)
class Batch:
    """How much at once."""

    tokens: int = key("the most tokens of a batch, padding counted", 4096, least=1)
    accumulate: int = key("how many batches make one step", 1, least=1)


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """How fast, and how long."""

    steps: int = key("how many steps", least=1)
    minutes: float = key(
        "the most minutes for steps and the evaluations between them; the rate then falls to its "
        "end in time, by as many steps as that is enough for; 0 for any",
        0.0,
        least=0,
    )
    rate: float = key("the highest learning rate", 1e-3, least=0)
    warmup: int = key("over how many steps the rate rises from 0", 0, least=0)
    shape: str = key("how the rate falls after that", "inverse-sqrt", among=SHAPES)
    floor: float = key("what cosine and linear fall to, as a share of rate", 0.0, least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """AdamW (https://arxiv.org/abs/1711.05101)."""

    betas: tuple[float, ...] = key("how slowly the two averages of gradients move", (0.9, 0.98))
    epsilon: float = key("what keeps the division finite", 1e-9, least=0)
    decay: float = key("how much weights shrink, matrices only", 0.0, least=0)
    clip: float = key("the largest norm of a gradient; 0 for any", 1.0, least=0)
    smoothing: float = key("label smoothing", 0.0, least=0, most=0.99)
    agreement: float = key(
        "R-Drop: each pair is read twice, with other dropout, and so strongly the two are to tell "
        "the same (https://arxiv.org/abs/2106.14448); 0 for reading once",
        0.0,
        least=0,
    )
    activation: float = key(
        "how strongly what the last layer gives is to be small (AR, "
        "https://arxiv.org/abs/1708.02182), as a part of the loss that is shown",
        0.0,
        least=0,
    )
    slowness: float = key(
        "how strongly that is to change little from one position to the next (TAR, the same)",
        0.0,
        least=0,
    )
    embedding_rate: float = key(
        "by what the rate of embedding tables is multiplied; learned positions are not among them",
        1.0,
        least=0,
    )
    relative: bool = key(
        "let each weight move in proportion to the size of its matrix at the start, as T5's do: "
        "its matrices start at very unequal sizes",
        False,
    )
    ema: float = key("the decay of a running mean of the weights; 0 for none", 0.0, least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How well, measured while it learns."""

    every: int = key("after how many steps; 0 for at the end only", 1000, least=0)
    metric: str = key("which score decides what is best", "loss", among=METRICS)
    examples: int = key("how many examples to decode while it learns; 0 for all", 0, least=0)
    beam: int = key("the beams of decoding; 1 is greedy", 1, least=1)
    length_penalty: float = key("by what power of the length a beam's score is divided", 1.0)
    no_repeat: int = key("no sequence of so many tokens is written twice; 0: all may", 0, least=0)
    least: int = key("how many tokens are written before one that ends a text", 0, least=0)
    temperature: float = key(
        "by what a language model's scores of tokens are divided before their softmax; above 1 for "
        "one that is too sure, as after learning by heart",
        1.0,
        least=0.01,
    )
    always: bool = key("answer every question, even where no answer seems more likely", False)
    tokenize: str = key(
        "how BLEU parts words: 13a, or none for text that is parted",
        "13a",
        among=("13a", "intl", "char", "zh", "none"),
    )
    patience: int = key(
        "stop after this many evaluations without a better one; 0 never", 0, least=0
    )


@dataclass(frozen=True, kw_only=True)
class Saving:
    """What is kept."""

    every: int = key("after how many steps a checkpoint is saved", 1000, least=1)
    last: int = key("how many of the last ones are kept, beside the best", 3, least=1)
    average: int = key(
        "what the finished model is: the mean of this many last checkpoints; 1 is the last one, "
        "0 the best one",
        1,
        least=0,
    )


@dataclass(frozen=True, kw_only=True)
class Watching:
    """What attention does while it learns."""

    every: int = key("after how many steps to look; 0 for never", 0, least=0)
    entropy: float = key("warn where a head's mean entropy falls below this, in nats", 0.01)
    logit: float = key("warn where a head's largest score rises above this", 500.0)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """All that a training run depends on."""

    task: str = key("what is learned", among=tuple(TASKS))
    output: str = key("the folder of the run: checkpoints, log and the finished model")
    seed: int = key("where all randomness starts", 0, least=0, most=2**63 - 1)
    device: str = key("cpu, cuda, cuda:1 ...; auto is cuda where there is one", "auto")
    precision: str = key("what is computed in; weights stay float32", "float32", among=PRECISIONS)
    model: Model = key("what is trained")
    tokenizer: Tokenizer = key("how text becomes ids", Tokenizer)
    data: Data = key("what it learns from")
    batch: Batch = key("how much at once", Batch)
    schedule: Schedule = key("how fast, and how long")
    optimizer: Optimizer = key("how weights change", Optimizer)
    evaluation: Evaluation = key("how well it does", Evaluation)
    saving: Saving = key("what is kept", Saving)
    watching: Watching = key("what attention does", Watching)
    compile: bool = key("whether torch.compile makes the model faster first", False)
    graphs: bool = key(
        "whether a GPU replays steps as CUDA graphs, which makes small models faster; for one "
        "process, and batches that come again in each epoch",
        False,
    )
    parallel: str = key(
        "what the processes of torchrun share: batches (ddp), weights too (fsdp), or each sequence",
        "ddp",
        among=PARALLEL,
    )
    tensorboard: bool = key("whether the log is written for TensorBoard as well", False)

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
