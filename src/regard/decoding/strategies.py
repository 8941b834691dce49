"""How the next tokens are chosen, and what is found."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from regard.errors import InputError


@dataclass(frozen=True, slots=True)
class Greedy:
    """Always the likeliest token.

    >>> from regard import GPT2, GPT2Config, Greedy, generate
    >>> model = GPT2(GPT2Config(vocabulary=20, length=16, dim=8, depth=1, heads=2)).eval()
    >>> [[found]] = generate(model, [[3, 1, 4]], Greedy(), length=5)
    >>> len(found.ids)
    5
    """

    no_repeat: int = 0  # no n-gram of this size comes twice; 0 allows all
    least: int = 0  # tokens before one that stops

    def __post_init__(self) -> None:
        at_least("Greedy(no_repeat=...)", self.no_repeat, 0)
        at_least("Greedy(least=...)", self.least, 0)


@dataclass(frozen=True, slots=True)
class Sample:
    """Tokens drawn by their probability, among the ``top_k`` likeliest and within ``top_p`` of it.

    A prompt and a seed give one result, alone or in any batch, up to how sums of that batch are
    rounded: in float32 hardly ever seen, in bfloat16 often.

    >>> from regard import GPT2, GPT2Config, Sample, generate
    >>> model = GPT2(GPT2Config(vocabulary=20, length=16, dim=8, depth=1, heads=2)).eval()
    >>> how = Sample(temperature=0.8, top_p=0.9, seed=7)
    >>> [[alone]] = generate(model, [[3, 1, 4]], how, length=5)
    >>> _, [beside] = generate(model, [[2], [3, 1, 4]], how, length=5)
    >>> alone.ids == beside.ids
    True
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 allows all
    top_p: float = 1.0
    seed: int = 0
    no_repeat: int = 0
    least: int = 0

    def __post_init__(self) -> None:
        if not (is_number(self.temperature) and 0 < self.temperature < math.inf):
            raise InputError(
                "Sample(temperature=...) must be a finite number above 0, but got "
                f"{self.temperature!r}. Greedy() is what a temperature of 0 means."
            )
        if not (is_number(self.top_p) and 0 < self.top_p <= 1):
            raise InputError(f"Sample(top_p=...) must be above 0, up to 1, but got {self.top_p!r}.")
        if not is_whole(self.seed) or not -(2**63) <= self.seed < 2**64:
            raise InputError(
                f"Sample(seed=...) is a whole number of 64 bits, but got {self.seed!r}."
            )
        at_least("Sample(top_k=...)", self.top_k, 0)
        at_least("Sample(no_repeat=...)", self.no_repeat, 0)
        at_least("Sample(least=...)", self.least, 0)


@dataclass(frozen=True, slots=True)
class Beam:
    """The ``best`` of what ``size`` sequences, kept side by side, find.

    A finished sequence scores its log-probability over ``length ** length_penalty``. Search ends
    when no running beam looks able to beat the worst one kept (``early=False``), when ``size`` are
    finished (``True``), or when none can, were it to grow to the full length (``"never"``).

    >>> from regard import GPT2, GPT2Config, Beam, generate
    >>> model = GPT2(GPT2Config(vocabulary=20, length=16, dim=8, depth=1, heads=2)).eval()
    >>> [[first, second]] = generate(model, [[3, 1, 4]], Beam(size=4, best=2), length=5)
    >>> first.score >= second.score
    True
    """

    size: int = 4
    length_penalty: float = 1.0
    early: bool | Literal["never"] = False
    best: int = 1
    no_repeat: int = 0
    least: int = 0

    def __post_init__(self) -> None:
        at_least("Beam(size=...)", self.size, 1)
        at_least("Beam(no_repeat=...)", self.no_repeat, 0)
        at_least("Beam(least=...)", self.least, 0)
        if not is_number(self.length_penalty):
            raise InputError(
                "Beam(length_penalty=...) must be a finite number, but got "
                f"{self.length_penalty!r}."
            )
        at_least("Beam(best=...)", self.best, 1)
        if self.best > self.size:
            raise InputError(f"Beam(best=...) must be from 1 to {self.size}, but got {self.best}.")
        if self.early not in (True, False, "never"):
            raise InputError(f'Beam(early=...) is True, False or "never", but got {self.early!r}.')


How = Greedy | Sample | Beam


@dataclass(frozen=True, slots=True)
class Output:
    """One sequence found: its ids without prompt and stop token, and how it scored.

    >>> from regard import GPT2, GPT2Config, Greedy, generate
    >>> model = GPT2(GPT2Config(vocabulary=20, length=16, dim=8, depth=1, heads=2)).eval()
    >>> [[found]] = generate(model, [[3, 1, 4]], Greedy(), length=5)
    >>> found.score < 0, found.stopped  # nothing was named that would stop it
    (True, False)
    """

    ids: list[int]
    score: float  # the sum of log-probabilities; with Beam, over length ** length_penalty
    stopped: bool  # whether a stop token ended it, rather than the length


def is_number(value: Any) -> bool:
    """Whether it is a finite number, NumPy's among them."""
    try:
        return isinstance(value, Real) and math.isfinite(float(value))
    except OverflowError:
        return False


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def at_least(what: str, value: Any, least: int) -> None:
    if not is_whole(value) or value < least:
        raise InputError(f"{what} must be a whole number from {least} on, but got {value!r}.")
