"""What was followed: a record of steps, each with its formula, its meaning and its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.errors import InputError


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """A matrix, or one for each head, and the words its rows and columns stand for."""

    symbol: str
    values: Tensor  # [rows, columns] or [heads, rows, columns]
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain lists; minus infinity, a score that a mask removed, becomes None."""
        return {
            "symbol": self.symbol,
            "shape": list(self.values.shape),
            "rows": list(self.rows),
            "columns": list(self.columns),
            "values": _plain(self.values.tolist()),
        }


def _plain(value: Any) -> Any:
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step: its name, its formula, a plain sentence on what it is for, and its numbers."""

    name: str
    formula: str
    sentence: str
    numbers: tuple[Numbers, ...] = ()
    notes: tuple[str, ...] = ()  # one place of it worked out
    bars: Numbers | None = None  # [keys, heads]: the followed word's weights, to be drawn

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each matrix, by its symbol."""
        return {numbers.symbol: tuple(numbers.values.shape) for numbers in self.numbers}

    def to_dict(self) -> dict[str, Any]:
        """The step as plain lists, numbers and words."""
        return {
            "name": self.name,
            "formula": self.formula,
            "sentence": self.sentence,
            "numbers": [numbers.to_dict() for numbers in self.numbers],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Agreement:
    """The output of the steps against that of the fast path: attention(), or a model's own run."""

    backend: str
    difference: float  # the largest, over all numbers of the output
    tolerance: float
    whose: str = "regard.attention()"

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        relation = "within" if self.holds else "MORE THAN"
        return (
            f"{self.whose} computes all of this at once (here with {self.backend!r}). "
            f"Largest difference: {self.difference:.1e}, {relation} the tolerance of "
            f"{self.tolerance:.1e}."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Followed:
    """Every step of one attention, in order, apart from how it looks."""

    tokens: tuple[str, ...]  # one word per query
    focus: int  # the query that is followed closely
    heads: int  # of the layer
    shown: tuple[str, ...]  # what the heads are called whose numbers are shown
    dim: int  # of one query or key, d_k
    steps: tuple[Step, ...]
    output: Tensor
    agreement: Agreement
    subject: str = ""  # whose numbers they are, if a model's

    @property
    def word(self) -> str:
        """The word that is followed closely."""
        return self.tokens[self.focus]

    @property
    def title(self) -> str:
        """What is traced, in one line."""
        heads = "1 head" if self.heads == 1 else f"{self.heads} heads"
        kind = "token" if self.subject else "word"
        words = f"{len(self.tokens)} {kind}{'s' * (len(self.tokens) != 1)}"
        whose = f"{self.subject}: " if self.subject else ""
        return f"{whose}{words}, {heads}, queries and keys of {self.dim} numbers"

    def __getitem__(self, symbol: str) -> Tensor:
        found = {n.symbol: n.values for step in self.steps for n in step.numbers}
        if symbol not in found:
            raise InputError(f"This trace has no {symbol!r}. It has {', '.join(found)}.")
        return found[symbol]

    def to_dict(self) -> dict[str, Any]:
        """The whole trace as plain lists, numbers and words, ready for JSON."""
        agreement = self.agreement
        return {
            "tokens": list(self.tokens),
            "subject": self.subject,
            "word": self.word,
            "heads": self.heads,
            "shown": list(self.shown),
            "dim": self.dim,
            "steps": [step.to_dict() for step in self.steps],
            "output": self.output.tolist(),
            "agreement": {
                "backend": agreement.backend,
                "difference": agreement.difference,
                "tolerance": agreement.tolerance,
                "holds": agreement.holds,
            },
        }
