"""A trace of one attention call: for each step its formula, its meaning and its numbers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.errors import InputError

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """A matrix, or a matrix for each head, with labels for its rows and columns."""

    symbol: str
    values: Tensor  # [rows, columns] or [heads, rows, columns]
    rows: tuple[str, ...]
    columns: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The matrix as plain lists; minus infinity (a masked score) becomes None."""
        return {
            "symbol": self.symbol,
            "shape": list(self.values.shape),
            "rows": list(self.rows),
            "columns": list(self.columns),
            "values": _finite_or_none(self.values.tolist()),
        }


def _finite_or_none(value: Any) -> Any:
    if isinstance(value, list):
        return [_finite_or_none(item) for item in value]
    return value if math.isfinite(value) else None


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One step: its name, its formula, a sentence on its purpose, and its numbers."""

    name: str
    formula: str
    sentence: str
    numbers: tuple[Numbers, ...] = ()
    notes: tuple[str, ...] = ()  # the calculation of one element
    bars: Numbers | None = None  # [keys, heads]: the weights of the followed word, for a bar chart

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each matrix, by its symbol."""
        return {numbers.symbol: tuple(numbers.values.shape) for numbers in self.numbers}

    def to_dict(self) -> dict[str, Any]:
        """The step as plain lists, numbers and strings."""
        return {
            "name": self.name,
            "formula": self.formula,
            "sentence": self.sentence,
            "numbers": [numbers.to_dict() for numbers in self.numbers],
            "notes": list(self.notes),
        }


@dataclass(frozen=True, slots=True)
class Agreement:
    """The largest difference between the output of the steps and the output of the fast path."""

    backend: str
    difference: float
    tolerance: float
    fast_path: str = "regard.attention()"

    @property
    def holds(self) -> bool:
        return self.difference <= self.tolerance

    def __str__(self) -> str:
        relation = "within" if self.holds else "MORE THAN"
        return (
            f"{self.fast_path} computes all of this at once (here with {self.backend!r}). "
            f"Largest difference: {self.difference:.1e}, {relation} the tolerance of "
            f"{self.tolerance:.1e}."
        )


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Every step of one attention call, in order; ``print(trace)`` shows them all.

    ``trace["A"]`` is the matrix with symbol A. ``trace.output`` is the result, [queries, dim].

    >>> from regard import explain
    >>> trace = explain()  # the worked example
    >>> trace.word, list(trace["A"].shape), list(trace.output.shape)
    ('cat', [1, 6, 6], [6, 3])
    """

    tokens: tuple[str, ...]  # the labels of the queries
    focus: int  # the index of the followed query
    heads: int  # the number of heads of the layer
    shown: tuple[str, ...]  # the names of the heads whose numbers are shown
    dim: int  # the width of a query or key, d_k
    steps: tuple[Step, ...]
    output: Tensor
    agreement: Agreement
    subject: str = ""  # the model, layer and head; empty without a model

    @property
    def word(self) -> str:
        """The word that the examples follow."""
        return self.tokens[self.focus]

    @property
    def title(self) -> str:
        """One line with the model, the number of words and heads, and the width."""
        heads = "1 head" if self.heads == 1 else f"{self.heads} heads"
        kind = "token" if self.subject else "word"
        words = f"{len(self.tokens)} {kind}{'s' * (len(self.tokens) != 1)}"
        subject = f"{self.subject}: " if self.subject else ""
        return f"{subject}{words}, {heads}, queries and keys of {self.dim} numbers"

    def __getitem__(self, symbol: str) -> Tensor:
        matrices = {n.symbol: n.values for step in self.steps for n in step.numbers}
        if symbol not in matrices:
            raise InputError(f"This trace has no {symbol!r}. It has {', '.join(matrices)}.")
        return matrices[symbol]

    def to_dict(self) -> dict[str, Any]:
        """The whole trace as plain lists, numbers and strings, ready for JSON."""
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

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from regard.interpret.explaining import rendering

        yield from rendering.terminal(self, options.max_width)

    def __str__(self) -> str:
        from regard.interpret.explaining import rendering

        return rendering.text(self)

    def _repr_html_(self) -> str:
        from regard.interpret.explaining import rendering

        return rendering.html(self)

    def __repr__(self) -> str:
        sentence = " ".join(self.tokens)
        shown = sentence if len(sentence) <= 40 else sentence[:39] + "…"
        return f"<Trace of {shown!r}: {self.title}, {len(self.steps)} steps; print it to read it>"
