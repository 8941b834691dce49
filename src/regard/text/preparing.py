"""Prepare texts before tokenization, in the same way for training and inference."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

_PLAIN = str.maketrans(
    dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"')
    | dict.fromkeys("\u2018\u2019\u201a`", "'")
    | dict.fromkeys("\u2013\u2014", "-")
    | dict.fromkeys("\u00a0\u202f", " ")
    | {"\u2026": "..."}
)
_SPACES = re.compile(r"\s+")
# Numbers keep points, commas and colons. Words keep hyphens and apostrophes.
_WORD = re.compile(r"\d+(?:[.,:]\d+)+|\w+(?:['-]\w+)*|\.\.\.|[^\w\s]")


def _normalise(text: str) -> str:
    return _SPACES.sub(" ", text.translate(_PLAIN)).strip()


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text))


PREPARATIONS: dict[str, Callable[[str], str]] = {
    "normalise": _normalise,  # straight quotes, hyphens, single spaces
    "lowercase": str.lower,
    "words": _words,  # puts spaces between words and punctuation
}


def prepare(text: str, steps: Sequence[str]) -> str:
    """Apply preparation steps to a text, in this order.

    >>> prepare("Wait… “Now”, 1,000 of them!", ["normalise", "lowercase", "words"])
    'wait ... " now " , 1,000 of them !'
    """
    for step in steps:
        text = PREPARATIONS[step](text)
    return text
