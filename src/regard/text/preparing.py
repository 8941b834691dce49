"""Prepare texts before tokenization, in the same way for training and inference."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Sequence

_PLAIN = str.maketrans(
    dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"')
    | dict.fromkeys("\u2018\u2019\u201a`", "'")
    | dict.fromkeys("\u2013\u2014", "-")
    | dict.fromkeys("\u00a0\u202f", " ")
    | {"\u2026": "..."}
)
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2018\u2019\u02bc", "'")
    | dict.fromkeys("\u22c5\u00a0\u202f\u2009", " ")
    | dict.fromkeys("\u00ad\u200b\u200e\u200f\ufeff")
)
_SPACES = re.compile(r"\s+")
# Numbers keep points, commas and colons. Words keep hyphens and apostrophes.
_WORD = re.compile(r"\d+(?:[.,:]\d+)+|\w+(?:['-]\w+)*|\.\.\.|[^\w\s]")


def _normalise(text: str) -> str:
    return _SPACES.sub(" ", text.translate(_PLAIN)).strip()


def _characters(text: str) -> str:
    return unicodedata.normalize("NFC", text).translate(_CHARACTERS)


def _words(text: str) -> str:
    return " ".join(_WORD.findall(text))


PREPARATIONS: dict[str, Callable[[str], str]] = {
    "characters": _characters,  # straight apostrophes, plain spaces, composed letters
    "normalise": _normalise,  # straight quotes, hyphens, single spaces
    "lowercase": str.lower,
    "words": _words,  # puts spaces between words and punctuation
}


def prepare(text: str, steps: Sequence[str]) -> str:
    r"""Apply preparation steps to a text, in this order.

    >>> prepare("Wait… “Now”, 1,000 of them!", ["normalise", "lowercase", "words"])
    'wait ... " now " , 1,000 of them !'
    >>> prepare("It\u2019s Zoe\u0308, s\u00adir", ["characters"]) == "It's Zo\u00eb, sir"
    True
    """
    for step in steps:
        text = PREPARATIONS[step](text)
    return text
