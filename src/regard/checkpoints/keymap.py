"""Key maps convert the tensors of a checkpoint to the parameters of a model, and back.

A map is a list of invertible steps. It first runs on tensors of the ``meta`` device, which checks
every name and shape before memory is allocated.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class Rename:
    """Rename a tensor. If the checkpoint does not hold it, ``otherwise`` is read instead."""

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
class Transpose(Rename):
    """Rename a matrix that the checkpoint stores transposed."""

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
    """Concatenate several tensors of one shape along the first dimension."""

    theirs: tuple[str, ...]
    ours: str

    @property
    def reads(self) -> tuple[str, ...]:
        return self.theirs

    def load(self, parts: list[Tensor]) -> Tensor:
        if len({part.shape for part in parts}) > 1 or not parts[0].dim():
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise CheckpointError(
                f"{', '.join(self.theirs)} must have one shape, but have {shapes}."
            )
        if parts[0].is_meta:  # cat() would load PyTorch's compiler here
            rows, *rest = parts[0].shape
            return parts[0].new_empty(len(parts) * rows, *rest)
        return torch.cat(parts)

    def save(self, tensor: Tensor) -> list[Tensor]:
        return [part.contiguous() for part in tensor.chunk(len(self.theirs))]


@dataclass(frozen=True, slots=True)
class Tie:
    """Ignore an optional second copy of a tensor. The two copies must be equal."""

    theirs: str
    same: str


@dataclass(frozen=True, slots=True)
class Drop:
    """Ignore keys that the model does not need."""

    pattern: str
    why: str


@dataclass(frozen=True, slots=True)
class Spelling:
    """Convert an older spelling of keys: replace ``pattern`` before any other rule applies."""

    pattern: str
    replacement: str


Step = Rename | Transpose | Fuse


def renames(
    theirs: str,
    ours: str,
    names: Mapping[str, str],
    kinds: Sequence[str] = ("weight", "bias"),
    *,
    layers: int = 1,
    step: type[Rename] = Rename,
) -> Iterator[Step]:
    """Yield steps for the weights and biases of several modules from one prefix to another.

    Names separated by spaces are fused. ``{}`` in a prefix is the number of each layer.

    >>> [step.ours for step in renames("h.{}.", "blocks.{}.", {"q k v": "qkv"}, layers=1)]
    ['blocks.0.qkv.weight', 'blocks.0.qkv.bias']
    """
    for index in range(layers):
        before, after = theirs.format(index), ours.format(index)
        for old, new in names.items():
            for kind in kinds:
                parts = tuple(f"{before}{part}.{kind}" for part in old.split())
                key = f"{after}{new}.{kind}"
                yield step(parts[0], key) if len(parts) == 1 else Fuse(parts, key)


@dataclass(frozen=True, slots=True)
class KeyMap:
    """The rules that convert between a checkpoint and a model.

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

    def spelled(self, key: str) -> str:
        """Return the current spelling of a key."""
        for rule in self.rules:
            if isinstance(rule, Spelling):
                key = re.sub(rule.pattern, rule.replacement, key)
        return key

    def drops(self, name: str) -> bool:
        """Return whether a key, in its current spelling, is ignored."""
        return any(isinstance(rule, Drop) and re.search(rule.pattern, name) for rule in self.rules)

    def names(self, keys: Iterable[str]) -> dict[str, str]:
        """Map the current spelling of each needed key to its spelling in the checkpoint.

        Dropped keys are left out. CheckpointError if a key is missing or unexpected.
        """
        spelled: dict[str, str] = {}
        for key in keys:
            name = self.spelled(key)
            if name in spelled:
                raise CheckpointError(
                    f"The checkpoint holds {name} twice: as {spelled[name]} and as {key}."
                )
            spelled[name] = key
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
            elif not self.drops(name):
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
        """Convert a checkpoint's tensors to the model's."""
        names = self.names(tensors)
        return self.apply(names, tensors.__getitem__)

    def apply(self, names: Mapping[str, str], read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the model's tensors, given :meth:`names` and a function that reads a key."""
        for rule in self.rules:
            if isinstance(rule, Tie) and rule.theirs in names:
                one, other = read(names[rule.theirs]), read(names[rule.same])
                same = one.shape == other.shape and (one.is_meta or torch.equal(one, other))
                if not same:
                    raise CheckpointError(
                        f"{rule.theirs} and {rule.same} must be equal, because this model ties "
                        "them, but they differ in the checkpoint."
                    )
        return {
            step.ours: step.load([read(names[key]) for key in step.reads]) for step in self.steps
        }

    def save(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Convert the model's tensors to a checkpoint's: the inverse of :meth:`load`."""
        tensors: dict[str, Tensor] = {}
        for step in self.steps:
            tensors.update(zip(step.reads, step.save(state[step.ours]), strict=True))
        return tensors
