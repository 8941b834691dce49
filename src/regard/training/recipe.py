"""Recipes: all settings of a training run in one TOML file, checked when it is read."""

# ruff: noqa: RUF009 - key() declares a field
from __future__ import annotations

import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.data.encoding import TokenizerOptions
from regard.data.records import PAIR_TASKS, RECORDS
from regard.data.schema import check_scope, describe_keys, key, parse
from regard.data.sources import Data, check_data
from regard.errors import InputError
from regard.evaluation.settings import SCORED, Evaluation
from regard.models.adapting import TARGETS
from regard.models.registry import NAMES, TRAINABLE

SHAPES = ("inverse-sqrt", "cosine", "linear", "constant")
PRECISIONS = ("float32", "bfloat16", "float16")
PARALLEL = ("ddp", "fsdp", "context")


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model to train."""

    kind: str = key("the architecture", among=NAMES)
    start: str | None = key(
        "the folder or the name of a checkpoint to start from; without it, random weights", None
    )
    config: dict[str, Any] = key("the sizes: fields of the architecture's config", dict)
    variational_dropout: bool = key("use one dropout mask for all positions of a sequence", False)


@dataclass(frozen=True, kw_only=True)
class Lora:
    """Low-rank updates instead of all weights (LoRA, https://arxiv.org/abs/2106.09685)."""

    rank: int = key(
        "the rank of the updates; only these are trained and saved; 0 trains all weights",
        0,
        least=0,
    )
    alpha: float = key("updates are multiplied by alpha / rank", 16.0, least=0)
    dropout: float = key("dropout of the inputs of the updates", 0.0, least=0, most=0.99)
    targets: str = key("the matrices of each block to update", "all", among=tuple(TARGETS))


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
        "the decays of the running averages of the gradient and of its square", (0.9, 0.98)
    )
    epsilon: float = key("the number added to the denominator of an update", 1e-9, least=0)
    weight_decay: float = key("weight decay, for matrices only", 0.0, least=0)
    clip: float = key("the maximum norm of the gradient; 0 for no limit", 1.0, least=0)
    label_smoothing: float = key("label smoothing", 0.0, least=0, most=0.99, only=PAIR_TASKS)
    r_drop: float = key(
        "R-Drop: the weight of the divergence between two passes with different dropout "
        "(https://arxiv.org/abs/2106.14448); 0 for one pass",
        0.0,
        least=0,
        only=PAIR_TASKS,
    )
    activation_regularization: float = key(
        "the weight of the penalty on large outputs of the last layer (AR, "
        "https://arxiv.org/abs/1708.02182); the logged loss includes it",
        0.0,
        least=0,
        only=("transformer-xl",),
    )
    temporal_activation_regularization: float = key(
        "the weight of the penalty on changes of the last layer's outputs from one position to "
        "the next (TAR, in the same paper)",
        0.0,
        least=0,
        only=("transformer-xl",),
    )
    embedding_rate: float = key(
        "the learning rate of embedding tables, as a multiple of schedule.rate; learned positions "
        "keep schedule.rate",
        1.0,
        least=0,
    )
    scale_by_initial_rms: bool = key(
        "scale the rate of each parameter by its root mean square at initialisation; for T5, whose "
        "matrices start at very different scales",
        False,
    )
    ema: float = key("the decay of a running mean of the weights; 0 for none", 0.0, least=0, most=1)


@dataclass(frozen=True, kw_only=True)
class Saving:
    """When checkpoints are saved, and which are kept."""

    every: int = key("save a checkpoint every this many steps", 1000, least=1)
    minutes: float = key(
        "also save a checkpoint when this many minutes have passed without one, or later if saving "
        "would take more than a twentieth of the time; it is kept until the next; 0 for never",
        0.5,
        least=0,
    )
    keep_last: int = key("the number of latest checkpoints to keep, besides the best", 3, least=1)
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
    min_entropy: float = key("warn if the mean entropy of a head falls below this, in nats", 0.01)
    max_logit: float = key("warn if the largest score of a head rises above this", 500.0)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """The settings of a training run."""

    task: str = key("the task to train for", among=tuple(TRAINABLE))
    output: str = key("the folder of the run: checkpoints, log and the finished model")
    seed: int = key("the seed of all random numbers", 0, least=0, most=2**63 - 1)
    device: str = key("cpu, cuda, cuda:1 ...; auto is cuda if there is a GPU", "auto")
    precision: str = key(
        "the precision of computation (weights stay float32)", "float32", among=PRECISIONS
    )
    model: Model = key("the model to train")
    lora: Lora = key("low-rank updates", Lora)
    tokenizer: TokenizerOptions = key("the tokenizer", TokenizerOptions)
    data: Data = key("the data")
    batch: Batch = key("the batches", Batch)
    schedule: Schedule = key("the learning rate and the number of steps")
    optimizer: Optimizer = key("the optimizer", Optimizer)
    evaluation: Evaluation = key("the evaluation", Evaluation)
    saving: Saving = key("the checkpoints", Saving)
    watching: Watching = key("measuring attention while training", Watching)
    compile: bool = key("compile the model with torch.compile", False)
    cuda_graphs: bool = key(
        "replay steps as CUDA graphs, which is faster for small models; for one process, and "
        "batches that have the same shapes in each epoch",
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
        if self.model.kind not in TRAINABLE[self.task]:
            raise InputError(
                f"{self.task} is for {' or '.join(TRAINABLE[self.task])}, not for "
                f"{self.model.kind} (model.kind)."
            )
        check_scope(self, (self.task, self.model.kind))
        check_data(self.data, self.task)
        metrics = SCORED[RECORDS[self.task]]
        if self.evaluation.metric not in metrics:
            raise InputError(
                f"{self.task} has no metric {self.evaluation.metric} (evaluation.metric); use "
                f"{' or '.join(metrics)}."
            )
        if self.evaluation.patience and not self.data.valid:
            raise InputError(
                "evaluation.patience needs a score on validation data: give data.valid."
            )
        if self.parallel == "context" and self.model.variational_dropout:
            raise InputError(
                "model.variational_dropout is not for parallel = 'context': each process would "
                "use its own mask."
            )
        if self.lora.rank:
            self._check_lora()
        average = self.saving.average
        if average > self.saving.keep_last:
            raise InputError(
                f"saving.average = {average}, but only the last {self.saving.keep_last} "
                "checkpoints are kept (saving.keep_last)."
            )
        saves = self.schedule.steps // self.saving.every
        if average > max(saves, 1):
            raise InputError(
                f"saving.average = {average}, but {self.schedule.steps} steps make {saves} "
                "checkpoints. Lower saving.every or saving.average."
            )
        if average == 0 and not self.data.valid:
            raise InputError("saving.average = 0 takes the best checkpoint: give data.valid.")
        below = {"tokenizer.dropout": self.tokenizer.dropout, "optimizer.ema": self.optimizer.ema}
        for name, share in below.items():
            if share >= 1:
                raise InputError(f"{name} should be below 1, but got {share}.")
        if self.compile and self.model.kind == "t5":
            raise InputError(
                "compile = true is not for t5: torch.compile does not finish on its biases."
            )
        if self.cuda_graphs and self.precision == "float16":
            raise InputError("cuda_graphs = true is not for precision = 'float16'.")
        if self.cuda_graphs and self.compile and self.model.kind != "transformer-xl":
            raise InputError(
                f"cuda_graphs = true with compile = true is for transformer-xl, not for "
                f"{self.model.kind}. Set one of them to false."
            )
        if self.parallel == "context" and self.model.kind != "gpt2":
            raise InputError(
                f"parallel = 'context' is for gpt2, a decoder-only model, not for "
                f"{self.model.kind}. Use ddp or fsdp."
            )
        if self.data.context and self.parallel == "context":
            raise InputError("data.context is not for parallel = 'context': use ddp or fsdp.")

    def _check_lora(self) -> None:
        if self.model.start is None:
            raise InputError("lora.rank is for a trained model: give model.start.")
        for name, given in {
            "optimizer.ema": self.optimizer.ema,
            "optimizer.scale_by_initial_rms": self.optimizer.scale_by_initial_rms,
            "tokenizer.keep": self.tokenizer.keep,
            f"parallel = {self.parallel!r}": self.parallel != "ddp",
        }.items():
            if given:
                raise InputError(f"{name} is not for lora.rank above 0: leave one of them out.")


def read_recipe(
    file: str | os.PathLike[str], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Recipe:
    """Read a recipe from a TOML file; overrides such as ``["schedule.steps=100"]`` set keys.

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
    except RecursionError:
        raise InputError(f"{path} cannot be read: it is nested too deeply.") from None
    data = raw.get("data")
    if isinstance(data, dict):
        data.setdefault("root", str(path.parent))
    return parse_recipe(raw, overrides)


def parse_recipe(
    raw: Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> Recipe:
    """Check the nested dicts of a TOML file, and return them as a recipe.

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
    return parse(Recipe, raw, overrides)


def describe() -> Iterator[tuple[str, str, str]]:
    """Every key of a recipe: its name, its default (or "needed"), and its meaning."""
    yield from describe_keys(Recipe)
