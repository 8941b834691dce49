"""Key maps: how the tensors of a checkpoint become the parameters of a model, and back.

A map is data: a list of steps, each of which knows its inverse. Applying a map only moves and
joins tensors, so it runs on tensors of the ``meta`` device first, where every name and shape is
checked before any memory is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Rename:
    """One tensor, under another name. Where it is missing, ``otherwise`` is read in its place."""

    theirs: str
    ours: str
    otherwise: str | None = None

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.theirs,)

    def load(self, parts: list[Tensor]) -> Tensor:
        return parts[0]

    def save(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]


@dataclass(frozen=True, slots=True)
class Transpose:
    """A matrix kept the other way round."""

    theirs: str
    ours: str

    @property
    def reads(self) -> tuple[str, ...]:
        return (self.theirs,)

    def load(self, parts: list[Tensor]) -> Tensor:
        if parts[0].dim() != 2:
            raise CheckpointError(
                f"{self.theirs} should be a matrix, but has shape {list(parts[0].shape)}."
            )
        return parts[0].t().contiguous()

    def save(self, tensor: Tensor) -> list[Tensor]:
        return [tensor.t().contiguous()]


@dataclass(frozen=True, slots=True)
class Fuse:
    """Several tensors of one shape, one below the other."""

    theirs: tuple[str, ...]
    ours: str

    @property
    def reads(self) -> tuple[str, ...]:
        return self.theirs

    def load(self, parts: list[Tensor]) -> Tensor:
        if len({part.shape for part in parts}) > 1 or not parts[0].dim():
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise CheckpointError(f"{', '.join(self.theirs)} should share one shape: {shapes}.")
        if parts[0].is_meta:  # only the shape is asked for; cat() would load PyTorch's compiler
            rows, *rest = parts[0].shape
            return parts[0].new_empty(len(parts) * rows, *rest)
        return torch.cat(parts)

    def save(self, tensor: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in tensor.chunk(len(self.theirs))]


@dataclass(frozen=True, slots=True)
class Tie:
    """A second copy of a tensor that the model has once: it may be there, and must be the same."""

    theirs: str
    same: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Keys that match are known to carry nothing the model needs."""

    pattern: str
    why: str


@dataclass(frozen=True, slots=True)
class Spelling:
    """An older way to spell keys: what ``pattern`` finds is replaced, before anything else."""

    pattern: str
    replacement: str


Step = Rename | Transpose | Fuse


@dataclass(frozen=True, slots=True)
class KeyMap:
    """The whole way between a checkpoint and a model.

    >>> keys = KeyMap([Fuse(("q", "k"), "qk"), Drop("^old", "unused since 2019")])
    >>> theirs = {"q": torch.zeros(1, 2), "k": torch.ones(1, 2), "old_table": torch.ones(9)}
    >>> ours = keys.load(theirs)
    >>> ours["qk"].tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    >>> sorted(keys.save(ours))
    ['k', 'q']
    """

    rules: Iterable[Step | Tie | Drop | Spelling]

    @property
    def steps(self) -> list[Step]:
        return [rule for rule in self.rules if isinstance(rule, Step)]

    def names(self, keys: Iterable[str]) -> dict[str, str]:
        """The keys of a checkpoint by their current spelling, all of them needed and none missing.

        Keys to be dropped, and second copies of tied ones, are left out.
        """
        spelled: dict[str, str] = {}
        for key in keys:
            name = key
            for rule in self.rules:
                if isinstance(rule, Spelling):
                    name = re.sub(rule.pattern, rule.replacement, name)
            if name in spelled:
                raise CheckpointError(
                    f"The checkpoint holds {name} twice: as {spelled[name]} and as {key}."
                )
            spelled[name] = key
        drops = [re.compile(rule.pattern) for rule in self.rules if isinstance(rule, Drop)]
        tied = {rule.theirs for rule in self.rules if isinstance(rule, Tie)}
        needed = {key for step in self.steps for key in step.reads}
        optional = {
            step.theirs: step.otherwise
            for step in self.steps
            if isinstance(step, Rename) and step.otherwise
        }
        kept = {}
        for name, key in spelled.items():
            if name in needed or name in tied or name in optional.values():
                kept[name] = key
            elif not any(pattern.search(name) for pattern in drops):
                raise CheckpointError(
                    f"The checkpoint holds {key}, which this model has no place for. Its config "
                    "may describe another model."
                )
        for name in sorted(needed - kept.keys()):
            if name not in optional:
                raise CheckpointError(f"The checkpoint lacks {name}, which this model needs.")
            other = optional[name]
            if other not in kept:
                raise CheckpointError(f"The checkpoint lacks both {name} and {other}.")
            kept[name] = kept[other]
        return kept

    def load(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's tensors, from those of a checkpoint."""
        names = self.names(tensors)
        return self.apply(names, tensors.__getitem__)

    def apply(self, names: Mapping[str, str], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """The model's tensors; ``names`` come from :meth:`names`, ``read`` gives one by its key."""
        for rule in self.rules:
            if isinstance(rule, Tie) and rule.theirs in names:
                one, other = read(names[rule.theirs]), read(names[rule.same])
                same = one.shape == other.shape and (one.is_meta or torch.equal(one, other))
                if not same:
                    raise CheckpointError(
                        f"{rule.theirs} and {rule.same} should be one tensor, but differ in this "
                        "checkpoint: it is of a model that does not tie them."
                    )
        return {
            step.ours: step.load([read(names[key]) for key in step.reads]) for step in self.steps
        }

    def save(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint's tensors, from those of the model: the inverse of :meth:`load`."""
        found: dict[str, Tensor] = {}
        for step in self.steps:
            found.update(zip(step.reads, step.save(state[step.ours]), strict=True))
        return found
