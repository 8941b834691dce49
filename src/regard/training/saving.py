"""Training checkpoints: written completely or not at all, and verified when read.

A checkpoint is a folder, removed only after a newer checkpoint was saved and verified. Its files
are safetensors and JSON, never pickles.
"""

from __future__ import annotations

import json
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from regard.checkpoints.folders import (
    INDEX,
    DamageWarning,
    Disk,
    dump,
    proven,
    publish,
    read_facts,
    read_or_map,
    withdraw,
)
from regard.errors import CheckpointError, InputError
from regard.training.processes import Processes

STATE = "state.json"
_TENSORS = ".safetensors"
# The current names of weights in checkpoints of earlier versions.
OLD_WEIGHTS = {"encoder.kinds.weight": "encoder.token_types.weight"}
_NAME = re.compile(r"step-(\d{10})")
_TENSOR = "tensor of the file beside"  # in state.json, {this key: path} stands for a tensor
_PARTS = "tensor in parts"  # the same for a tensor split among processes


# --------------------------------------------------------------------------- trees of tensors


def _pack(state: Mapping[str, Any]) -> dict[str, bytes]:
    """Serialize a state: state.json, and a safetensors file for each section with tensors."""
    from safetensors.torch import save

    files, plain = {}, {}
    for section, tree in state.items():
        tensors: dict[str, Tensor] = {}
        plain[section] = _take_tensors(tree, section, tensors)
        if tensors:
            files[section + _TENSORS] = save(tensors)
    return {**files, STATE: dump(plain)}


def _take_tensors(tree: Any, path: str, into: dict[str, Tensor]) -> Any:
    if isinstance(tree, DTensor):
        return {_PARTS: path}
    if isinstance(tree, Tensor):
        into[path] = tree.detach().cpu().contiguous()
        return {_TENSOR: path}
    if isinstance(tree, Mapping):
        if not all(isinstance(key, str) for key in tree):
            raise InputError(f"The state to save has keys that are not strings, at {path}.")
        return {key: _take_tensors(value, f"{path}/{key}", into) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [_take_tensors(value, f"{path}/{n}", into) for n, value in enumerate(tree)]
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    raise InputError(f"The state to save has a {type(tree).__name__} at {path}.")


def _held_in_parts(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """The tensors split among processes, with their paths."""
    if isinstance(tree, DTensor):
        yield path, tree.detach()
    elif isinstance(tree, Mapping):
        for key, value in tree.items():
            yield from _held_in_parts(value, f"{path}/{key}" if path else key)


def _unpack(
    folder: Path, files: Mapping[str, bytes | memoryview], likes: Mapping[str, Tensor]
) -> dict[str, Any]:
    """Restore a state from its files; of each tensor in ``likes``, only this process's part."""
    from safetensors.torch import load

    tensors: dict[str, Tensor] = {}
    for name, data in files.items():
        if isinstance(data, bytes) and name.endswith(_TENSORS):
            tensors |= load(data)
    if likes or INDEX in files:
        from regard.training.shards import parts_of, read_parts

        for path in likes.keys() & tensors.keys():
            tensors[path] = parts_of(tensors[path], likes[path])
        if INDEX in files:
            tensors |= read_parts(folder, likes)
    result: dict[str, Any] = _put_tensors(json.loads(bytes(files[STATE])), tensors)
    return result


def _put_tensors(tree: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(tree, dict):
        if tree.keys() in ({_TENSOR}, {_PARTS}):
            return tensors[next(iter(tree.values()))]
        return {key: _put_tensors(value, tensors) for key, value in tree.items()}
    if isinstance(tree, list):
        return [_put_tensors(value, tensors) for value in tree]
    return tree


# ------------------------------------------------------------------------------- the checkpoints


@dataclass(frozen=True)
class Saved:
    """One checkpoint, read and verified."""

    folder: Path
    step: int
    score: float | None
    state: dict[str, Any]


class Keeper:
    """The checkpoints of one run: keeps the ``last`` latest ones and the best one.

    A higher ``score`` is better. A checkpoint saved at an interruption (``in_turn=False``) does not
    count among the last, so an interrupted run keeps the same checkpoints as an uninterrupted run.

    >>> import tempfile, torch
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     keeper = Keeper(folder, last=2)
    ...     for step in (10, 20, 30):
    ...         keeper.save(step, {"model": {"weight": torch.full((2,), step)}})
    ...     keeper.steps(), keeper.newest().state["model"]["weight"].tolist()
    ([20, 30], [30, 30])
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        last: int = 3,
        disk: Disk | None = None,
        processes: Processes | None = None,
    ) -> None:
        if last < 1:
            raise InputError(f"Keeper(last=...) should be at least 1, but got {last}.")
        self.folder, self.last = Path(folder), last
        self.disk, self.processes = disk or Disk(), processes or Processes()

    def steps(self) -> list[int]:
        """The steps of all checkpoints in the folder in ascending order; some may be damaged."""
        if not self.folder.is_dir():
            return []
        matches = (_NAME.fullmatch(entry.name) for entry in self.folder.iterdir())
        return sorted(int(match[1]) for match in matches if match)

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        score: float | None = None,
        in_turn: bool = True,
    ) -> None:
        """Save a tree of dicts, lists, numbers, strings and tensors; then remove old checkpoints.

        The first process saves all except DTensors; each process saves its parts of these. If the
        disk fails, raises CheckpointError and keeps earlier checkpoints.
        """
        if score is not None and not float("-inf") < score < float("inf"):
            raise InputError(f"A score must be finite, but got {score}.")
        files = _pack(state) if self.processes.is_first else {}
        parts = dict(_held_in_parts(state))
        more = partial(self._write_parts, parts) if parts else None
        facts = {"step": step, "score": score, "in_turn": in_turn}
        self.processes.on_first(
            lambda: self._save(step, files, facts, more), partial(self._follow, parts)
        )

    def _save(
        self,
        step: int,
        files: Mapping[str, bytes],
        facts: Mapping[str, Any],
        more: Callable[[Path], dict[str, dict[str, Any]]] | None,
    ) -> None:
        if step in self.steps():
            try:
                self._read_files(step)
            except CheckpointError:
                withdraw(self._at(step), self.disk)  # damaged: replace it
            else:
                raise InputError(f"{self.folder} already has a checkpoint of step {step}.")
        self._clear()
        publish(self._at(step), files, facts, self.disk, more)
        self._read_files(step)  # verify the disk before old checkpoints are removed
        self._drop(step)

    def _write_parts(self, parts: Mapping[str, Tensor], folder: Path) -> dict[str, dict[str, Any]]:
        from regard.training.shards import write_parts

        self.processes.call(folder)
        return write_parts(parts, folder, self.disk)

    def _follow(self, parts: Mapping[str, Tensor], folder: Path) -> None:
        from regard.training.shards import write_parts

        with suppress(OSError):  # the first process raises the error in all processes
            write_parts(parts, folder, self.disk)

    def newest(self, likes: Mapping[str, Tensor] | None = None) -> Saved | None:
        """Load the newest undamaged checkpoint; None if there is no checkpoint.

        Warns of each damaged checkpoint it skips; if all are damaged, raises CheckpointError.
        """
        reasons = []
        for step in reversed(self.steps()):
            try:
                saved = self.load(step, likes)
            except CheckpointError as error:
                reasons.append(str(error))
                continue
            for reason in reasons:
                warnings.warn(
                    f"A damaged checkpoint is skipped: {reason} Continuing from step {step}.",
                    DamageWarning,
                    stacklevel=2,
                )
            return saved
        if reasons:
            raise CheckpointError(
                f"All checkpoints in {self.folder} are damaged. {' '.join(reasons)} To start a new "
                "run, give another folder."
            )
        return None

    def load(self, step: int, likes: Mapping[str, Tensor] | None = None) -> Saved:
        """Load the checkpoint of a step.

        ``likes`` has DTensors by their path, such as ``model/norm.weight``. Of these tensors only
        this process's part is loaded; any number of processes may have saved them. All other
        tensors are loaded whole.
        """
        facts, files = self._read_files(step)
        likes = dict(likes or {})
        for old, new in OLD_WEIGHTS.items():
            for section in ("model", "ema"):
                if f"{section}/{new}" in likes:
                    likes[f"{section}/{old}"] = likes[f"{section}/{new}"]
        state = _unpack(self._at(step), files, likes)
        for section in state.keys() & {"model", "ema"}:
            state[section] = {OLD_WEIGHTS.get(n, n): part for n, part in state[section].items()}
        return Saved(self._at(step), step, facts["score"], state)

    def best(self) -> int | None:
        """The step with the highest score; among equal scores, the earliest step."""
        scored = [(f["score"], -step) for step, f in self._facts() if f["score"] is not None]
        return -max(scored)[1] if scored else None

    def in_turn(self) -> list[int]:
        """The steps of checkpoints saved with ``in_turn=True``, in ascending order."""
        return [step for step, facts in self._facts() if facts["in_turn"]]

    def average(self, count: int, section: str = "model") -> dict[str, Tensor]:
        """The mean of each tensor of a section over the last ``count`` checkpoints of ``in_turn``.

        Integer tensors are taken from the newest checkpoint.
        """
        steps = self.in_turn()[-count:]
        if len(steps) < count:
            raise InputError(
                f"{count} checkpoints should be averaged, but {self.folder} has {len(steps)}. Save "
                "checkpoints more often, or keep more of them."
            )
        newest = self.load(steps[-1]).state[section]
        sums = {name: tensor.double() for name, tensor in newest.items()}
        for step in steps[:-1]:
            for name, tensor in self.load(step).state[section].items():
                sums[name] += tensor
        return {
            name: (sums[name] / count).to(tensor.dtype) if tensor.is_floating_point() else tensor
            for name, tensor in newest.items()
        }

    def _facts(self) -> list[tuple[int, dict[str, Any]]]:
        """The facts of all checkpoints with an undamaged manifest."""
        facts = []
        for step in self.steps():
            with suppress(CheckpointError):  # newest() warns of damaged checkpoints
                facts.append((step, read_facts(self._at(step))))
        return facts

    def _read_files(self, step: int) -> tuple[dict[str, Any], dict[str, bytes | memoryview]]:
        folder = self._at(step)
        facts, files = proven(folder, read_or_map)
        if facts.get("step") != step:
            raise CheckpointError(f"{folder} was renamed: it holds step {facts.get('step')}.")
        return facts, files

    def tidy(self, step: int) -> None:
        """Remove the remains of an interrupted save, and old checkpoints except ``step``."""
        self._clear()
        self._drop(step)

    def _clear(self) -> None:
        """Remove the remains of an interrupted save or removal."""
        for pattern in (".saving-*", ".removing-*"):
            for left in sorted(self.folder.glob(pattern)):
                try:
                    self.disk.remove(left)
                except OSError as error:
                    raise CheckpointError(
                        f"{left} could not be removed: {error.strerror or error}."
                    ) from error

    def _drop(self, whole: int) -> None:
        """Remove all checkpoints except the last ones, the best, the newest and step ``whole``.

        Step ``whole`` was verified; other checkpoints may be damaged.
        """
        steps = self.steps()
        kept = {*self.in_turn()[-self.last :], steps[-1], self.best(), whole}
        for step in steps:
            if step not in kept:
                withdraw(self._at(step), self.disk)

    def _at(self, step: int) -> Path:
        return self.folder / f"step-{step:010}"
