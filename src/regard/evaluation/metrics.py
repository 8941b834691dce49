"""Metrics, defined as in published results.

The optional package sacreBLEU computes BLEU and chrF; the others are computed here.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from regard.errors import InputError


def bleu(
    outputs: Sequence[str], references: Sequence[Sequence[str]], tokenize: str = "13a"
) -> float:
    """Corpus BLEU from 0 to 100 (https://aclanthology.org/W18-6319).

    Outputs may have different numbers of references. ``tokenize="none"`` splits words at spaces.

    >>> round(bleu(["the cat sat on the mat"], [["the cat sat on a mat", "a cat sat"]]), 2)
    53.73
    """
    return _corpus_score(_sacrebleu().BLEU(tokenize=tokenize, force=True), outputs, references)


def chrf(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> float:
    """Corpus chrF2 from 0 to 100 (https://aclanthology.org/W15-3049).

    >>> round(chrf(["the cat"], [["the cats"]]), 2)
    77.57
    """
    return _corpus_score(_sacrebleu().CHRF(), outputs, references)


def check(metric: str) -> None:
    """Raise InputError if the package for a metric is not installed."""
    if metric in ("bleu", "chrf"):
        _sacrebleu()


def _sacrebleu() -> Any:
    try:
        from sacrebleu import metrics
    except ImportError:
        raise InputError(
            "BLEU and chrF need sacreBLEU: pip install 'regard[training]', or choose another "
            "metric."
        ) from None
    return metrics


def _corpus_score(
    metric: Any, outputs: Sequence[str], references: Sequence[Sequence[str]]
) -> float:
    _check(outputs, references)
    # sacreBLEU takes one list for the first reference of every output, one for the second ...
    columns = [list(column) for column in zip_longest(*references)]
    score: float = metric.corpus_score(list(outputs), columns).score
    return score


def _check_counts(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    if not outputs:
        raise InputError("There are no outputs to score. Give at least one.")
    if len(outputs) != len(references):
        raise InputError(
            f"Each output needs its own list of references, but got {len(outputs)} outputs and "
            f"{len(references)} lists."
        )


def _check(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> None:
    _check_counts(outputs, references)
    if empty := sum(not some for some in references):
        raise InputError(
            f"Each output needs at least one reference, but {empty} of {len(references)} lists of "
            "references are empty. Leave out these outputs."
        )


# --------------------------------------------------------------------------------------- ROUGE


class Rouge(NamedTuple):
    """ROUGE F-measures from 0 to 100 (https://aclanthology.org/W04-1013)."""

    one: float  # ROUGE-1: common words
    two: float  # ROUGE-2: common pairs of adjacent words
    longest: float  # ROUGE-L: the longest common subsequence of words


def rouge(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Rouge:
    """ROUGE without stemming, averaged over outputs; each output gets its best reference's score.

    >>> rouge(["the cat sat"], [["a cat sat", "dogs"]])
    Rouge(one=66.66666666666666, two=50.0, longest=66.66666666666666)
    """
    _check(outputs, references)
    sums = [0.0, 0.0, 0.0]
    for output, some in zip(outputs, references, strict=True):
        words = _words(output)
        targets = [_words(reference) for reference in some]
        for n in (1, 2):
            sums[n - 1] += max(_overlap(_grams(words, n), _grams(target, n)) for target in targets)
        sums[2] += max(
            _f_measure(_in_common(words, target), len(words), len(target)) for target in targets
        )
    return Rouge(*(100 * total / len(outputs) for total in sums))


def _words(text: str) -> list[str]:
    return re.findall(r"[a-z0-9]+", text.lower())


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))


def _overlap(first: Counter[tuple[str, ...]], second: Counter[tuple[str, ...]]) -> float:
    return _f_measure((first & second).total(), first.total(), second.total())


def _f_measure(common: int, first: int, second: int) -> float:
    return 2 * common / (first + second) if common else 0.0


def _in_common(first: Sequence[str], second: Sequence[str]) -> int:
    """The length of the longest common subsequence of two lists of words."""
    row = [0] * (len(second) + 1)
    for word in first:
        diagonal = 0
        for at, beside in enumerate(second, 1):
            above = row[at]
            row[at] = diagonal + 1 if word == beside else max(above, row[at - 1])
            diagonal = above
    return row[-1]


# ------------------------------------------------------------------------------------- answers


class Answered(NamedTuple):
    """SQuAD's exact match and F1 from 0 to 100 (https://arxiv.org/abs/1606.05250)."""

    exact: float
    f1: float


def answered(outputs: Sequence[str], references: Sequence[Sequence[str]]) -> Answered:
    """Exact match and F1 of answers; if a question has no reference, an empty answer is right.

    Articles, punctuation and case are ignored.

    >>> answered(["the Eiffel Tower", "Paris"], [["Eiffel tower"], []])
    Answered(exact=50.0, f1=50.0)
    """
    _check_counts(outputs, references)
    exact = f1 = 0.0
    for output, some in zip(outputs, references, strict=True):
        words = _answer(output)
        targets = [target for reference in some if (target := _answer(reference))] or [[]]
        exact += max(words == target for target in targets)
        f1 += max(_shared(words, target) for target in targets)
    return Answered(100 * exact / len(outputs), 100 * f1 / len(outputs))


def _answer(text: str) -> list[str]:
    plain = "".join(mark for mark in text.lower() if mark not in string.punctuation)
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _shared(words: list[str], target: list[str]) -> float:
    if not words or not target:
        return float(words == target)
    return _f_measure((Counter(words) & Counter(target)).total(), len(words), len(target))


# -------------------------------------------------------------------------------------- losses


def perplexity(nats: float, tokens: int) -> float:
    """Perplexity from the summed loss in nats.

    >>> round(perplexity(10 * math.log(8), 10), 6)
    8.0
    """
    return math.exp(min(nats / tokens, 700.0))  # exp(710) would overflow


def bits_per_byte(nats: float, size: float) -> float:
    """The summed loss of a text of ``size`` bytes in bits per byte, comparable across tokenizers.

    >>> bits_per_byte(16 * math.log(2), 8)
    2.0
    """
    return nats / math.log(2) / size
