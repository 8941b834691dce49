"""The training loop, with exact gradient accumulation and bit-exact resuming.

A step never waits for the GPU: losses are copied to the host only when they are logged.
"""

from __future__ import annotations

import math
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from regard.data.batches import Feed, generator
from regard.errors import CheckpointError, InputError
from regard.evaluation.losses import map_tensors, move
from regard.training.attention_log import watched_model
from regard.training.fingerprints import difference
from regard.training.graphs import Replayed, Step
from regard.training.objectives import Objective
from regard.training.optimizer import adamw, rate_at
from regard.training.parallel import cut, engine, interleave
from regard.training.processes import Processes
from regard.training.recipe import Recipe, Schedule
from regard.training.saving import Keeper
from regard.training.seeds import random_state, set_random_state

# ------------------------------------------------------------------------------- interruptions


class Interrupted:
    """True after SIGTERM or Ctrl-C; after either, a further Ctrl-C raises KeyboardInterrupt."""

    def __init__(self) -> None:
        self.by: str | None = None
        self.told: Callable[[], None] = lambda: None  # called at the first signal

    def __bool__(self) -> bool:
        return self.by is not None

    def _note(self, number: int, _: FrameType | None) -> None:
        if self.by is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.by = signal.Signals(number).name
        self.told()


@contextmanager
def interruptible() -> Iterator[Interrupted]:
    """Context that records SIGTERM and Ctrl-C instead of stopping, if in the main thread."""
    interrupted = Interrupted()
    if threading.current_thread() is not threading.main_thread():
        yield interrupted
        return
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = [signal.signal(number, interrupted._note) for number in numbers]
    try:
        yield interrupted
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


# ---------------------------------------------------------------------------------- the trainer


@dataclass
class Progress:
    """The progress of a run."""

    step: int = 0
    best: float | None = None
    since_best: int = 0  # the number of evaluations since the best score
    scores: dict[str, float] = field(default_factory=dict)  # the scores of the latest evaluation
    # With schedule.minutes: the seconds of training so far, and the estimated total of steps.
    seconds: float = 0.0
    steps: int | None = None


class Pace:
    """Estimates regularly how many steps fit into ``schedule.minutes``.

    With the estimate, the learning rate reaches its final value in time. It uses the later half of
    the steps, because the first steps are slow: they compile kernels and record CUDA graphs. All
    processes use the clock of the first process.
    """

    def __init__(self, schedule: Schedule, progress: Progress, processes: Processes) -> None:
        self.limit = 60 * schedule.minutes
        self.max_steps, self.progress, self.processes = schedule.steps, progress, processes
        self.begun = time.perf_counter() - progress.seconds
        self.planned = progress.seconds  # the time of the latest estimate
        self.first = progress.step  # after resuming, the first steps are slow again
        self.marks: deque[tuple[int, float]] = deque()  # (step, seconds at its end)

    @property
    def due(self) -> bool:
        """Whether 2% of the time has passed since the latest estimate; False in many processes."""
        if not self.limit or self.processes.count > 1:
            return False
        return time.perf_counter() - self.begun > self.planned + self.limit / 50

    def note(self) -> None:
        """Store the time spent so far."""
        if self.limit:
            self.progress.seconds = self.processes.on_first(
                lambda: time.perf_counter() - self.begun
            )

    def plan(self) -> None:
        """Estimate the total number of steps."""
        if not self.limit:
            return
        self.note()
        step, now = self.progress.step, self.progress.seconds
        self.planned = now
        while len(self.marks) > 1 and 2 * (self.marks[1][0] - self.first) <= step - self.first:
            self.marks.popleft()
        if self.marks and step > self.marks[0][0]:
            then, when = self.marks[0]
            pace = (now - when) / (step - then)
            left = max(int((self.limit - now) / pace), 0)
            self.progress.steps = min(step + left, self.max_steps)
        self.marks.append((step, now))


SAVING_SHARE = 0.05  # of the time of a run, for the checkpoints of ``saving.minutes``


class SaveTimer:
    """Asks for a checkpoint when ``saving.minutes`` have passed without one.

    If a save takes long, the timer waits longer, so that saving takes at most ``SAVING_SHARE`` of
    the time.
    """

    def __init__(self, minutes: float) -> None:
        self.limit = 60 * minutes
        self.restart()

    def restart(self, saving: float = 0.0) -> None:
        """Start to wait; ``saving`` is the number of seconds that the latest save took."""
        self.begun = time.perf_counter()
        self.wait = max(self.limit, saving / SAVING_SHARE)

    def due(self) -> bool:
        """Whether it is time for a checkpoint; if so, the timer restarts."""
        due = bool(self.limit) and time.perf_counter() - self.begun >= self.wait
        if due:
            self.restart()
        return due


Log = Callable[[dict[str, Any]], None]


class Display(Protocol):
    """Shows the progress of a run to its user."""

    def doing(self, what: str) -> None:
        """Show what the run does besides steps, until the next report."""

    def stopping(self) -> None:
        """Show that the run stops when it has finished what it does."""

    def step(self, step: int, steps: int) -> None:
        """Show that one of ``steps`` steps was taken."""

    def report(self, row: dict[str, Any], steps: int, scores: Mapping[str, float]) -> None:
        """Show a row of the log with a loss, and the scores of the latest evaluation."""


# Keys that may change when a finished run is resumed with more steps.
_EXTENDED = ("schedule.steps", "schedule.minutes")


def replays(recipe: Recipe, device: torch.device) -> bool:
    """Whether the run replays its steps as CUDA graphs."""
    return recipe.cuda_graphs and device.type == "cuda"


class Trainer:
    """Trains a model on an objective, and holds the whole state of the run."""

    def __init__(
        self,
        model: nn.Module,
        objective: Objective,
        scorer: Callable[[Any], dict[str, float]] | None,
        feed: Feed,
        keeper: Keeper,
        recipe: Recipe,
        log: Log,
        fingerprint: Mapping[str, Any],
    ) -> None:
        self.processes = keeper.processes
        self.engine = engine(model, objective, self.processes, recipe.parallel)
        self.model, self.objective, self.scorer = model, objective, scorer
        self.feed, self.keeper = feed, keeper
        self.recipe, self.log, self.fingerprint = recipe, log, fingerprint
        self.device = next(model.parameters()).device
        self.parameters = list(model.parameters())  # collected once: model.parameters() is slow
        # The names of tensors that do not change, which are those of the model the run started from
        self.frozen = {name for name, p in model.named_parameters() if not p.requires_grad}
        self.optimizer = adamw(model, recipe, self.device)
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=recipe.precision == "float16", init_scale=2.0**12
        )
        self.ema = (
            {name: tensor.clone() for name, tensor in model.state_dict().items()}
            if recipe.optimizer.ema
            else None
        )
        # The running mean averages parameters and copies buffers. The tensors of the mean and of
        # the model are never replaced, because checkpoints are loaded into them in place.
        named, now = dict(model.named_parameters(remove_duplicate=False)), model.state_dict()
        pairs = {name: (mean, now[name]) for name, mean in (self.ema or {}).items()}
        self.moving = [pair for name, pair in pairs.items() if name in named]
        self.copied = [pair for name, pair in pairs.items() if name not in named]
        self.progress = Progress()
        self.warned: set[str] = set()
        self.learn: Step = self._learn
        self.graphs = replays(recipe, self.device)
        if self.graphs:
            if self.processes.count > 1:
                raise InputError("cuda_graphs = true is for one process: set cuda_graphs = false.")
            self.learn = Replayed(self._learn, self.device, objective.state, objective.load_state)

    # ------------------------------------------------------------------------------- one step

    def step(self) -> tuple[Tensor, Tensor]:
        """Take one step; return tensors with its gradient norm and this process's part of its loss.

        The parts of all processes add up to the mean loss of the step.
        """
        recipe, number = self.recipe, self.progress.step + 1
        random = generator(recipe.seed, 1, number, device=self.feed.device)
        shares, targets = [], []
        for _ in range(recipe.batch.accumulate):
            rows = self.feed.next()
            batch, count = self.objective.prepare(rows, random)
            share, used = self.engine.share(batch, len(rows.rows))
            shares.append((move(share, self.device), used))
            targets.append(count)
        # Divide by the targets of the whole step: batches may have different numbers of targets.
        total = move(sum(targets), self.device)
        rate = rate_at(number, self.schedule)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["size"]
        self.optimizer.zero_grad(set_to_none=not self.graphs)
        mean = torch.zeros((), device=self.device)
        for done, (share, used) in enumerate(shares, 1):
            with self.engine.joining(last=done == len(shares)):
                mean += self.learn(share, total if used else math.inf)
        self.scaler.unscale_(self.optimizer)
        gradients = [p.grad for p in self.parameters if p.grad is not None]
        norm = get_total_norm(gradients)
        if recipe.optimizer.clip:
            clip_grads_with_norm_(self.parameters, recipe.optimizer.clip, norm)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self._move_ema(recipe.optimizer.ema)
        self.progress.step = number
        if recipe.watching.every and number % recipe.watching.every == 0:
            self.look(shares[0][0])
        return mean, norm

    def _learn(self, share: Any, total: Tensor | float) -> Tensor:
        """Add the gradient of a share's loss divided by ``total``; return that loss."""
        with self.autocast():
            loss = self.engine.loss(share) / total
        torch.autograd.backward(self.scaler.scale(loss))
        return loss.detach()

    def autocast(self) -> torch.autocast:
        kinds = {"bfloat16": torch.bfloat16, "float16": torch.float16}
        kind = kinds.get(self.recipe.precision)
        return torch.autocast(self.device.type, dtype=kind, enabled=kind is not None)

    def _move_ema(self, decay: float) -> None:
        # The decay is lower in the first steps: otherwise initial weights would dominate the mean.
        decay = min(decay, self.progress.step / (self.progress.step + 10))
        means, now = zip(*self.moving, strict=True)
        torch._foreach_lerp_(means, now, 1 - decay)
        for kept, number in self.copied:
            kept.copy_(number)

    def look(self, batch: Any) -> None:
        """Measure and log attention on a batch; warn of heads with low entropy or large scores."""
        before = self.objective.state()
        watched = watched_model(self.model, self.recipe.watching, self.warned)
        with torch.compiler.set_stance("force_eager"), watched as measured, self.autocast():
            self.engine.loss(batch)
        self.objective.load_state(before)
        self.log({"step": self.progress.step, "attention": measured})

    # -------------------------------------------------------------------------------- all steps

    def run(self, interrupted: Interrupted, display: Display) -> bool:
        """Take the remaining steps; return whether the run is finished."""
        recipe = self.recipe
        self.model.train()
        interrupted.told = display.stopping
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        since, seen = time.perf_counter(), self.feed.tokens
        pace = Pace(recipe.schedule, self.progress, self.processes)
        if recipe.evaluation.before and not self.progress.step:
            display.doing("evaluating")
            self.log({"step": 0, "scores": self._scores()})
            since = time.perf_counter()
        timer = SaveTimer(recipe.saving.minutes)
        while not self.finished:
            timed = self.processes.is_first and timer.due()
            stop, timed = self.processes.any_of(bool(interrupted), timed)
            if stop:
                pace.note()
                self._interrupt(interrupted)
                return False
            mean, norm = self.step()
            display.step(self.progress.step, self.schedule.steps)
            losses.append(mean)
            norms.append(norm)
            # Estimate at the planned end too: slow first steps may have made the estimate too low.
            if self._due(50) or pace.due or self.progress.step >= self.schedule.steps:
                pace.plan()
            last = self.progress.step >= self.schedule.steps
            evaluating = self._due(recipe.evaluation.every) or last
            saving = evaluating or timed or self._due(recipe.saving.every)
            row = None
            if len(losses) == 50 or saving:
                row = self._fetch(losses, norms)
                now = time.perf_counter()
                row["tokens_per_second"] = round((self.feed.tokens - seen) / (now - since))
                self.log(row)
                losses, norms = [], []
                since, seen = now, self.feed.tokens
            if evaluating:
                display.doing("evaluating")
                self.evaluate()
            if row is not None:
                display.report(row, self.schedule.steps, self.progress.scores)
            if saving:
                pace.note()
                begun = time.perf_counter()
                self.save()
                timer.restart(time.perf_counter() - begun)
                since = time.perf_counter()  # the training speed excludes evaluating and saving
        return True

    @property
    def schedule(self) -> Schedule:
        """The recipe's schedule; with ``minutes``, its ``steps`` are the estimated number."""
        schedule, steps = self.recipe.schedule, self.progress.steps
        return schedule if steps is None else replace(schedule, steps=steps)

    @property
    def finished(self) -> bool:
        """Whether all steps are done, or the score has not improved for ``evaluation.patience``."""
        patience = self.recipe.evaluation.patience
        stalled = bool(patience) and self.progress.since_best >= patience
        return stalled or self.progress.step >= self.schedule.steps

    def _due(self, every: int) -> bool:
        return bool(every) and self.progress.step % every == 0

    def _fetch(self, losses: Sequence[Tensor], norms: Sequence[Tensor]) -> dict[str, Any]:
        mean = float(self.processes.sum(torch.stack(list(losses))).mean())
        norm = float(torch.stack(list(norms)).mean())
        overflows = self.recipe.precision == "float16"  # GradScaler skips steps that overflow
        if not math.isfinite(mean) or not (math.isfinite(norm) or overflows):
            raise InputError(
                f"By step {self.progress.step} the loss is {mean} and the gradient's norm {norm}. "
                "Start again with a lower schedule.rate, more schedule.warmup or a smaller "
                "optimizer.clip."
            )
        return {
            "step": self.progress.step,
            "epoch": self.feed.number,
            "loss": mean,
            "gradient": norm if math.isfinite(norm) else None,  # None if float16 overflowed
            "rate": rate_at(self.progress.step, self.schedule),
        }

    def _interrupt(self, interrupted: Interrupted) -> None:
        step = self.progress.step
        if step and not self.processes.on_first(lambda: step in self.keeper.steps()):
            self.save()
        # Another process may have received the signal.
        by = next(filter(None, self.processes.gather(interrupted.by)))
        self.log({"step": step, "interrupted": by})

    # --------------------------------------------------------------------------- evaluation

    def evaluate(self) -> None:
        """Score the model on the validation data, and record whether the score improved."""
        progress = self.progress
        progress.scores = self._scores()
        self.log({"step": progress.step, "scores": progress.scores})
        score = self.score()
        if score is not None:
            better = progress.best is None or score > progress.best
            progress.best = score if better else progress.best
            progress.since_best = 0 if better else progress.since_best + 1

    def _scores(self) -> dict[str, float]:
        with self.engine.gathered(self.ema) as model:
            scores: dict[str, float] = self.processes.on_first(lambda: self._measure(model))
        return scores

    def _measure(self, model: nn.Module) -> dict[str, float]:
        # Without compilation, because shapes change with every decoded token.
        eager = torch.compiler.set_stance("force_eager")
        with eager, torch.no_grad(), self.autocast():
            model.eval()
            scores = {} if self.scorer is None else self.scorer(model)
            model.train()
        invalid = [f"{name} is {v}" for name, v in scores.items() if not math.isfinite(v)]
        if invalid:
            raise InputError(f"At step {self.progress.step}, {' and '.join(invalid)}.")
        return scores

    def score(self) -> float | None:
        """``evaluation.metric`` of the latest evaluation; a loss is negated: higher is better."""
        metric = self.recipe.evaluation.metric
        value = self.progress.scores.get(metric)
        return None if value is None else (-value if metric == "loss" else value)

    # ------------------------------------------------------------------------------- saving

    def save(self) -> None:
        """Save a checkpoint."""
        every, step = self.recipe.saving.every, self.progress.step
        measured = self._due(self.recipe.evaluation.every) or step >= self.schedule.steps
        score = self.score() if measured else None
        self.keeper.save(step, self.state(), score=score, in_turn=step % every == 0)

    def state(self) -> dict[str, Any]:
        """The state of all processes that the rest of the run depends on."""
        optimizer = self.optimizer.state_dict()
        random, *others = self.processes.gather(random_state(self.device))
        # On the CPU: gathered CUDA tensors would be on the GPU of the process that sent them.
        kept = map_tensors(self.objective.state(), Tensor.cpu)
        objective = interleave(self.processes.gather(kept))
        weights = self.model.state_dict()
        return {
            "model": {name: w for name, w in weights.items() if name not in self.frozen},
            "optimizer": {
                "state": {str(index): value for index, value in optimizer["state"].items()},
                "groups": optimizer["param_groups"],
            },
            "scaler": self.scaler.state_dict(),
            "random": random,
            "others": {str(rank): state for rank, state in enumerate(others, 1)},
            "objective": objective,
            "cursor": self.feed.cursor,
            "progress": vars(self.progress),
            "fingerprint": dict(self.fingerprint),
            **({} if self.ema is None else {"ema": self.ema}),
        }

    def load(self, model: nn.Module, weights: Mapping[str, Tensor]) -> None:
        """Load the weights of a checkpoint, which lacks those that do not change."""
        own = model.state_dict()
        model.load_state_dict({**{name: own[name] for name in self.frozen}, **weights})

    def resume(self) -> bool:
        """Restore the newest undamaged checkpoint; return whether there was one."""
        saved = self.keeper.newest(self._held_in_parts())
        steps = self.processes.gather(None if saved is None else saved.step)
        if len(set(steps)) > 1:
            raise CheckpointError(
                f"The processes read different newest checkpoints in {self.keeper.folder}: steps "
                f"{steps}. All processes need the same folder."
            )
        if saved is None:
            return False
        state = saved.state
        progress = Progress(**state["progress"])
        before = dict(state["fingerprint"])
        extended = self._extended(progress, before)
        if extended:
            before |= {name: self.fingerprint[name] for name in _EXTENDED}
        if (other := difference(before, self.fingerprint)) is not None:
            raise InputError(
                f"{saved.folder} was made with {other}. Resume a run with the recipe that it began "
                "with; only a finished run may get more schedule.steps. To start another run from "
                "its weights, set model.start and another output."
            )
        self.load(self.model, state["model"])
        # If an older checkpoint lacks a field of a parameter group, keep the initial value.
        initial = self.optimizer.state_dict()["param_groups"]
        groups = [
            own | saved for own, saved in zip(initial, state["optimizer"]["groups"], strict=True)
        ]
        self.optimizer.load_state_dict(
            {
                "state": {
                    int(index): value for index, value in state["optimizer"]["state"].items()
                },
                "param_groups": groups,
            }
        )
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        for name, mean in (self.ema or {}).items():
            mean.copy_(state["ema"][name])
        rows = slice(self.processes.rank, None, self.processes.count)
        self.objective.load_state(cut(state["objective"], rows))
        self.feed.cursor = state["cursor"]
        self.progress = progress
        if extended:  # schedule.minutes and evaluation.patience count from here
            progress.seconds, progress.steps, progress.since_best = 0.0, None, 0
        if self.processes.is_first:
            set_random_state(state["random"], self.device)
        elif (own := state["others"].get(str(self.processes.rank))) is not None:
            set_random_state(own, self.device)
        # tidy() removes older checkpoints: wait until all processes have read theirs.
        self.processes.gather(None)
        self.processes.on_first(lambda: self.keeper.tidy(saved.step))
        self.log({"step": saved.step, "resumed": saved.folder.name})
        return True

    def _extended(self, progress: Progress, before: Mapping[str, Any]) -> bool:
        """Whether a run that took all its steps is resumed with more steps or minutes."""
        planned = progress.steps or before.get("schedule.steps", math.inf)
        changed = any(before.get(name) != self.fingerprint[name] for name in _EXTENDED)
        more = changed and self.recipe.schedule.steps > progress.step
        return more and progress.step >= planned

    def _held_in_parts(self) -> dict[str, Tensor]:
        """The tensors split among processes, by their path in a checkpoint."""
        places: dict[str, Tensor] = {}
        for name, tensor in self.model.state_dict().items():
            places |= {f"model/{name}": tensor, f"ema/{name}": tensor}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for index, parameter in enumerate(parameters):
            for name in ("exp_avg", "exp_avg_sq"):
                places[f"optimizer/state/{index}/{name}"] = parameter
        return {place: like for place, like in places.items() if isinstance(like, DTensor)}
