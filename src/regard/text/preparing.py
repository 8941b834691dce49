"""Preparation of texts before tokenization, the same in training and in use."""

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
# Numbers keep their points, words their hyphens and apostrophes. Other signs are separate.
_WORD = re.compile(r"\d+(?:[.,:]\d+)+|\w+(?:['-]\w+)*|\.\.\.|[^\w\s]")


def _normalise(text: str) -> str:
    return _SPACES.sub(" ", text.translate(_PLAIN)).strip()


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text))


PREPARATIONS: dict[str, Callable[[str], str]] = {
    "normalise": _normalise,  # one kind of quotes, dashes and spaces
    "lowercase": str.lower,
    "words": _words,  # words and signs separated by single spaces
}


def prepare(text: str, steps: Sequence[str]) -> str:
    """A text after some steps of preparation, in this order.

    >>> prepare("Wait… “Now”, 1,000 of them!", ["normalise", "lowercase", "words"])
    'wait ... " now " , 1,000 of them !'
    """
    for step in steps:
        text = PREPARATIONS[step](text)
    return text
