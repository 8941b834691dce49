"""Run the training of a recipe, and save the finished model."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

from regard.checkpoints.bases import described
from regard.checkpoints.files import CONFIG, GENERATION, note, read_json
from regard.checkpoints.hub import find
from regard.checkpoints.tensors import open_checkpoint
from regard.data import encoding
from regard.data.batches import Feed, generator
from regard.data.records import RECORDS, Pair
from regard.data.tables import Table, place
from regard.decoding.settings import generation_of, tasks_of
from regard.errors import InputError
from regard.evaluation import metrics
from regard.evaluation.settings import WRITTEN
from regard.mechanism.backends.sdpa import without_cudnn
from regard.models.adapting import save_adapter
from regard.models.loading import check_device
from regard.models.model import Model
from regard.text.tokenizer import Tokenizer
from regard.training import building, tokenizing
from regard.training.curves import plot
from regard.training.fingerprints import fingerprint
from regard.training.folder import LOG, held, logged, no_log
from regard.training.loop import Trainer, interruptible
from regard.training.processes import Processes, joined, local_device
from regard.training.recipe import Recipe, read_recipe
from regard.training.saving import Keeper
from regard.training.seeds import seed_all


@dataclass(frozen=True)
class Result:
    """The outcome of a run."""

    folder: Path  # the folder of the run; its folder "model" has the finished model
    step: int
    finished: bool  # False if the run was interrupted; it can be resumed
    # The scores of the finished model on data.test, or else on data.valid; after an interruption,
    # those of the latest evaluation.
    scores: dict[str, float]
    rank: int = 0  # the rank of this process in the run


def train(
    recipe: Recipe | str | os.PathLike[str],
    *,
    resume: bool = False,
    overrides: Sequence[str] | Mapping[str, Any] = (),
) -> Result:
    """Train a model by a recipe; for a file, overrides such as ``["schedule.steps=100"]`` set keys.

    After Ctrl-C or SIGTERM, saves a checkpoint and returns. ``resume=True`` continues from the
    newest undamaged checkpoint, or starts if there is no checkpoint. The final weights of a resumed
    run equal those of an uninterrupted run to the bit.

    >>> import tempfile
    >>> from regard.training.recipe import parse_recipe
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.txt").write_text("one two three four. " * 50)
    ...     recipe = parse_recipe({
    ...         "task": "language modelling", "output": f"{folder}/run", "device": "cpu",
    ...         "model": {"kind": "gpt2", "config": {"dim": 8, "depth": 1, "heads": 2}},
    ...         "tokenizer": {"size": 260}, "schedule": {"steps": 2}, "batch": {"tokens": 64},
    ...         "data": {
    ...             "root": folder, "length": 16, "train": [{"format": "text", "files": ["a.txt"]}],
    ...         },
    ...     })
    ...     result = train(recipe)
    >>> result.step, result.finished
    (2, True)
    """
    if isinstance(recipe, Recipe):
        if overrides:
            raise InputError(
                "Overrides apply only to recipe files. Set the fields of the Recipe instead."
            )
    else:
        recipe = read_recipe(recipe, overrides)
    device = local_device(_device(recipe.device))
    check_device(device)
    folder = Path(recipe.output).expanduser()
    with joined(device) as processes, held(folder, processes):
        # If a process dies, torchrun restarts all, but only its machine counts the restart.
        again = processes.gather(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0")
        return _train(recipe, folder, device, processes, resume or any(again))


def _train(
    recipe: Recipe, folder: Path, device: torch.device, processes: Processes, resume: bool
) -> Result:
    keeper = Keeper(folder / "checkpoints", recipe.saving.keep_last, processes=processes)
    if processes.on_first(keeper.steps) and not resume:
        raise InputError(
            f"{folder} holds the checkpoints of an earlier run. Resume it, or choose another "
            "output."
        )
    if resume and processes.is_first and not keeper.steps():
        _say(f"There is nothing to resume in {folder}: the run starts from the beginning.")
    metrics.check(recipe.evaluation.metric)  # fail now, not at the first evaluation
    with logged(folder, recipe.tensorboard) if processes.is_first else nullcontext(no_log) as log:
        if processes.count > 1:
            log({"processes": processes.count, "parallel": recipe.parallel})
        seed_all(recipe.seed)
        text = processes.first_then_others(
            lambda: tokenizing.tokenizer(recipe, folder / "tokenizer")
        )
        model = building.model(recipe, text).to(device)  # created on the CPU: equal on any device
        if recipe.compile:
            # Batches of text have one or two shapes, and other batches have many. By default, the
            # compiler decides by the shapes so far, so that a resumed run could differ.
            model.compile(dynamic=RECORDS[recipe.task] is not str)
        parts, names = processes.first_then_others(lambda: _tables(recipe, text, log))
        for name, table in parts.items():
            if table.facts["bad"] and processes.is_first:
                _say(f"data.{name}: {table.facts['report']}")
        on_device = {name: place(table, device) for name, table in parts.items()}
        objective = building.objective(recipe, text, model, on_device["train"])
        scorer = None
        if "valid" in parts:
            scorer = building.scorer(
                recipe, "valid", text, model, on_device["valid"], recipe.evaluation.examples
            )
        feed = Feed(objective.plan, recipe.seed, objective.device)
        facts = fingerprint(recipe, names)
        if recipe.lora.rank and recipe.model.start is not None:
            facts["weights of model.start"] = open_checkpoint(recipe.model.start).digest()
        trainer = Trainer(model, objective, scorer, feed, keeper, recipe, log, facts)
        if recipe.lora.rank and processes.is_first:
            _say(_savings(model))
        if not processes.is_first:
            # Dropout masks differ between processes.
            seed_all(int(generator(recipe.seed, 2, processes.rank).initial_seed()))
        if resume:
            trainer.resume()
        # Batches of text have only one or two shapes.
        shapes = nullcontext() if RECORDS[recipe.task] is str else without_cudnn()
        with interruptible() as interrupted, _shown(trainer) as display, shapes:
            finished = trainer.run(interrupted, display)
        scores = trainer.progress.scores
        if finished:
            scores = processes.on_first(lambda: _finish(recipe, trainer, text, folder)) or scores
            log({"step": trainer.progress.step, "finished": scores})
    if processes.is_first:
        (folder / "run.svg").write_text(plot(folder / LOG), encoding="utf-8")
    return Result(folder, trainer.progress.step, finished, scores, processes.rank)


def _savings(model: Model) -> str:
    """How much smaller low-rank updates are than the weights of the model, in words."""
    trained = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    whole = sum(weight.numel() for weight in model.parameters() if not weight.requires_grad)
    # AdamW keeps two numbers of 4 bytes for each trained one, and there is its gradient.
    return (
        f"LoRA trains {trained:,} parameters, {trained / whole:.1%} of the model's {whole:,}. "
        f"Gradients and optimizer take {12 * trained / 1e6:,.1f} MB instead of "
        f"{12 * whole / 1e6:,.1f}."
    )


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"There is no device {name!r}; use cpu, cuda or auto.") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device = {name!r}, but PyTorch finds no GPU here.")
    return device


def _tables(
    recipe: Recipe, text: Tokenizer, log: Callable[[dict[str, Any]], None]
) -> tuple[dict[str, Table], dict[str, str]]:
    parts: dict[str, Table] = {}
    names: dict[str, str] = {}
    for part in ("train", "valid"):
        if getattr(recipe.data, part):
            parts[part], names[part] = encoding.table(
                recipe.data, part, recipe.task, text, recipe.tokenizer
            )
            log({"data": part, **parts[part].facts})
    return parts, names


def _finish(recipe: Recipe, trainer: Trainer, text: Tokenizer, folder: Path) -> dict[str, float]:
    """Write the finished model; return its scores."""
    keeper, model = trainer.keeper, trainer.engine.whole.to(trainer.device)
    assert isinstance(model, Model)
    section = "model" if trainer.ema is None else "ema"
    # If evaluation.patience ended the run, there may be fewer checkpoints.
    average = min(recipe.saving.average, max(len(keeper.in_turn()), 1))
    if average > 1:
        weights = keeper.average(average, section)
    else:
        best = keeper.best() if average == 0 else None
        step = trainer.progress.step if best is None else best
        weights = keeper.load(step).state[section]
    trainer.load(model, weights)
    model.eval()
    if recipe.lora.rank:
        assert recipe.model.start is not None
        save_adapter(model, folder / "model", recipe.model.start)
    else:
        model.save(folder / "model")
    text.save(folder / "model")
    _note_use(recipe, folder / "model")
    eager = torch.compiler.set_stance("force_eager")
    with eager, torch.no_grad(), trainer.autocast():
        scorer = trainer.scorer
        if recipe.data.test:
            table, _ = encoding.table(recipe.data, "test", recipe.task, text, recipe.tokenizer)
            table = place(table, trainer.device)
            scorer = building.scorer(recipe, "test", text, model, table)
        scores = {} if scorer is None else scorer(model)
    (folder / "scores.json").write_text(json.dumps(scores, indent=1) + "\n", encoding="utf-8")
    return scores


def _note_use(recipe: Recipe, folder: Path) -> None:
    """Store the prefix, preparations and decoding settings of the evaluation with the model.

    What the files of ``model.start`` say of its use is kept, such as its directions of translation.
    """
    evaluation = recipe.evaluation
    tasks, used = dict[str, Any](), dict[str, Any]()
    if recipe.model.start is not None:
        start = find(recipe.model.start)
        config = read_json(described(start) / CONFIG)
        tasks = tasks_of(config, start.name)
        used = dict(tasks.get(recipe.task, {}))
        note(folder / CONFIG, {name: config[name] for name in ("n_positions",) if name in config})
        if (folder / GENERATION).exists():
            note(folder / GENERATION, generation_of(start))
    if evaluation.metric in WRITTEN:
        note(folder / GENERATION, evaluation.decoding.to_json())
    prefixes = {source.prefix for source in recipe.data.test or recipe.data.valid}
    # For a Transformer that translates, the prefix is a language tag, set in each call.
    tagged = recipe.task == "translation" and recipe.model.kind == "transformer"
    if len(prefixes) == 1 and RECORDS[recipe.task] is Pair and not tagged:
        used["prefix"] = prefixes.pop()
    if recipe.task == "translation" and recipe.model.start is None:
        used["max_source_tokens"] = recipe.data.length
    if recipe.data.prepare:
        used["prepare"] = list(recipe.data.prepare)
    if used:
        tasks[recipe.task] = used
    if tasks:
        note(folder / CONFIG, {"task_specific_params": tasks})


# --------------------------------------------------------------------------------------- display


def _say(what: str) -> None:
    Console(file=sys.stderr).print(what, highlight=False, soft_wrap=True, markup=False)


class _Bar:
    """A progress bar in a terminal; elsewhere a line for each report.

    The bar has a fixed width and comes first. Of the text after it, a narrow terminal cuts the end.
    """

    def __init__(self, trainer: Trainer, console: Console) -> None:
        self.console, self.quiet = console, not trainer.processes.is_first
        self.device, self.text = trainer.device, ""
        self.bar = Progress(
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1)),
            console=console,
            expand=True,
            disable=not console.is_terminal or self.quiet,
        )
        steps, step = trainer.schedule.steps, trainer.progress.step
        self.task = self.bar.add_task("", total=steps, completed=step)

    def doing(self, what: str) -> None:
        self.bar.update(self.task, description=f"{what}  {self.text}")

    def stopping(self) -> None:
        self.text = "stopping; a checkpoint is saved"
        self.bar.update(self.task, description=self.text)

    def step(self, step: int, steps: int) -> None:
        self.bar.update(self.task, completed=step, total=steps, description=self.text)

    def report(self, row: dict[str, Any], steps: int, scores: Mapping[str, float]) -> None:
        words = f"loss {row['loss']:.4f}  {row['tokens_per_second']:,} tokens/s"
        if self.device.type == "cuda":
            words += f"  {torch.cuda.max_memory_allocated(self.device) / 2**30:.1f} GiB"
        self.text = words + "".join(f"  valid {k} {v:.4g}" for k, v in scores.items())
        self.step(row["step"], steps)
        if not self.console.is_terminal and not self.quiet:
            line = f"step {row['step']}/{steps}  {self.text}"
            self.console.print(line, highlight=False, soft_wrap=True)


@contextmanager
def _shown(trainer: Trainer) -> Iterator[_Bar]:
    display = _Bar(trainer, Console(file=sys.stderr))
    with display.bar:
        yield display
