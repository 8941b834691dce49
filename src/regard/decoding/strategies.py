"""Decoding strategies, and the sequences that they generate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

from regard.errors import InputError

MAX_LENGTH_PENALTY = 10.0  # also of a negative one: length ** 1000 overflows a float


@dataclass(frozen=True, slots=True)
class Greedy:
    """Greedy decoding: always choose the token with the highest score.

    >>> from regard import GPT2, GPT2Config, Greedy, generate
    >>> model = GPT2(GPT2Config(vocabulary=20, length=16, dim=8, depth=1, heads=2)).eval()
    >>> [[generated]] = generate(model, [[3, 1, 4]], Greedy(), max_new_tokens=5)
    >>> len(generated.ids)
    5
    """

    no_repeat_ngram_size: int = 0  # no n-gram of this size occurs twice; 0 allows all
    min_new_tokens: int = 0  # the fewest tokens before a stop token

    def __post_init__(self) -> None:
        _check_counts(self, no_repeat_ngram_size=0, min_new_tokens=0)


@dataclass(frozen=True, slots=True)
class Sample:
    """Sampling from the ``top_k`` likeliest tokens, cut where their probabilities reach ``top_p``.

    The same prompt and seed give the same result, alone or in a batch. Only rounding depends on the
    batch: it changes results rarely in float32 and often in bfloat16.

    >>> from regard import GPT2, GPT2Config, Sample, generate
    >>> model = GPT2(GPT2Config(vocabulary=20, length=16, dim=8, depth=1, heads=2)).eval()
    >>> how = Sample(temperature=0.8, top_p=0.9, seed=7)
    >>> [[alone]] = generate(model, [[3, 1, 4]], how, max_new_tokens=5)
    >>> _, [beside] = generate(model, [[2], [3, 1, 4]], how, max_new_tokens=5)
    >>> alone.ids == beside.ids
    True
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 allows all
    top_p: float = 1.0
    seed: int = 0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        warm = is_number(self.temperature) and 0 < self.temperature < math.inf
        advice = " For a temperature of 0 use Greedy()."
        _check(self, "temperature", warm, "must be a finite number above 0", advice)
        share = is_number(self.top_p) and 0 < self.top_p <= 1
        _check(self, "top_p", share, "must be above 0 and at most 1")
        seed = is_whole(self.seed) and -(2**63) <= self.seed < 2**64
        _check(self, "seed", seed, "must be a whole number of 64 bits")
        _check_counts(self, top_k=0, no_repeat_ngram_size=0, min_new_tokens=0)


@dataclass(frozen=True, slots=True)
class Beam:
    """Beam search: return the best ``num_return_sequences`` of ``num_beams`` sequences.

    The score of a sequence is its log-probability divided by ``length ** length_penalty``. With
    ``early_stopping=True`` the search ends when ``num_beams`` sequences are finished. With
    ``False`` it ends when no running beam, scored at its current length, beats the worst finished
    sequence. With ``"never"`` it ends when no beam can beat that sequence at any length.

    >>> from regard import GPT2, GPT2Config, Beam, generate
    >>> model = GPT2(GPT2Config(vocabulary=20, length=16, dim=8, depth=1, heads=2)).eval()
    >>> how = Beam(num_beams=4, num_return_sequences=2)
    >>> [[first, second]] = generate(model, [[3, 1, 4]], how, max_new_tokens=5)
    >>> first.score >= second.score
    True
    """

    num_beams: int = 4
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        _check_counts(self, num_beams=1, num_return_sequences=1)
        _check_counts(self, no_repeat_ngram_size=0, min_new_tokens=0)
        returned = self.num_return_sequences <= self.num_beams
        _check(self, "num_return_sequences", returned, f"must be from 1 to {self.num_beams}")
        known = self.early_stopping in (True, False, "never")
        most, given = MAX_LENGTH_PENALTY, self.length_penalty
        bounded = is_number(given) and -most <= given <= most
        _check(self, "length_penalty", bounded, f"must be a number from {-most:g} to {most:g}")
        _check(self, "early_stopping", known, 'must be True, False or "never"')


Strategy = Greedy | Sample | Beam


@dataclass(frozen=True, slots=True)
class Generated:
    """One generated sequence: its ids without prompt and stop token, and its score.

    >>> from regard import GPT2, GPT2Config, Greedy, generate
    >>> model = GPT2(GPT2Config(vocabulary=20, length=16, dim=8, depth=1, heads=2)).eval()
    >>> [[generated]] = generate(model, [[3, 1, 4]], Greedy(), max_new_tokens=5)
    >>> generated.score < 0, generated.stopped  # no stop token was given
    (True, False)
    """

    ids: list[int]
    score: float  # the sum of log-probabilities; with Beam, divided by length ** length_penalty
    stopped: bool  # True if a stop token ended it, False if the maximum length did


def is_number(value: Any) -> bool:
    """Return whether ``value`` is a finite number of Python or NumPy."""
    try:
        return isinstance(value, Real) and math.isfinite(float(value))
    except OverflowError:
        return False


def is_whole(value: Any) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)


def at_least(what: str, value: Any, least: int) -> None:
    if not is_whole(value) or value < least:
        raise InputError(f"{what} must be a whole number from {least} on, but got {value!r}.")


def _check(strategy: Strategy, name: str, good: bool, needed: str, advice: str = "") -> None:
    if not good:
        what, given = f"{type(strategy).__name__}({name}=...)", getattr(strategy, name)
        raise InputError(f"{what} {needed}, but got {given!r}.{advice}")


def _check_counts(strategy: Strategy, **least: int) -> None:
    for name, fewest in least.items():
        at_least(f"{type(strategy).__name__}({name}=...)", getattr(strategy, name), fewest)
