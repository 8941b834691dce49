"""The one rule for what a word is, and which tokens make it up."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

from regard.errors import InputError
from regard.text.tokenizer import Tokenizer

_JOINING = "-'\u2019"  # within a word
_UNFINISHED = "\ufffd"  # what a letter decodes to whose bytes are not all there
_CLOSING, _OPENING = "\"'\u2019\u201d»)\\]", "\"'\u2018\u201c«(\\[¿¡"
# What French elides; a run of letters and digits, which a sign may join; or any other sign.
_WORD = re.compile(
    "\\b(?i:[cdjlmnst]|qu|lorsqu|puisqu)['\u2019](?=\\w)|\\w+(?:['\u2019.-]\\w+)*|[^\\w\\s]"
)
# A run of ends is tried from its first sign alone: from each, a long one would take for ever.
_END = re.compile(rf"(?<![.!?…])[.!?…]+[{_CLOSING}]*\s+(?=[{_OPENING}]*[^\W_a-zß-öø-ÿ])|\n\s*")
# What a full stop follows without ending anything: short titles, and single letters.
_SHORT = re.compile(
    rf"(?:^|[\s{_OPENING}])(?:\w|Mrs?|Ms|Dr|St|Prof|Mme|Mlle|Sgt|Capt|Gen|Nr|vs|e\.g|i\.e|z\.B)\.$"
)
LONGEST = 16  # characters, more than any of these has


class Word(NamedTuple):
    """A whole word: its letters, and the places of its tokens."""

    label: str
    places: tuple[int, ...]
    special: bool = False  # no part of a word: a token such as </s>, or blank space


@dataclass(frozen=True)
class Tokens:
    """The ids of a text, what to call each, and the words they make up."""

    ids: tuple[int, ...]
    labels: tuple[str, ...]
    words: tuple[Word, ...]
    added: tuple[int, ...] = ()  # the places of special tokens, which are not of the text itself

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, word: str) -> tuple[Word, int]:
        """The first word that reads so, and how many there are; case counts where it decides."""
        exact = [each for each in self.words if each.label == word]
        found = exact or [each for each in self.words if each.label.lower() == word.lower()]
        if not found:
            raise InputError(f"There is no word {word!r} in the text. {_nearest(word, self.words)}")
        return found[0], len(found)


def tokens_of(tokenizer: Tokenizer, text: str) -> Tokens:
    """A text with whatever special tokens its model expects.

    >>> tokenizer = Tokenizer.train_bpe(["the cat sat"] * 9, size=300)
    >>> [word.label for word in tokens_of(tokenizer, "the cat sat").words]
    ['the', 'cat', 'sat']
    """
    encoded = tokenizer.encode(text)
    if all(one is None for one in encoded.texts):
        raise InputError(f"There is nothing to read in {text!r}.")
    spans = [
        None if one is None else span
        for one, span in zip(encoded.texts, encoded.offsets, strict=True)
    ]
    found = _named(text, encoded.ids, encoded.tokens, spans)
    added = (place for place, one in enumerate(encoded.texts) if one is None)
    return replace(found, added=tuple(added))


def tokens_of_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> Tokens:
    """What ids say to ``tokenizer``; words are found in the text it decodes them to."""
    before, spans = "", list[tuple[int, int] | None]()
    for count in range(1, len(ids) + 1):
        after = tokenizer.decode(ids[:count])
        # What the last letters are may show only later, so a span starts where texts differ.
        start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                     min(len(before), len(after)))  # fmt: skip
        if start == len(after) and after.endswith(_UNFINISHED):
            start -= 1  # one more byte of the same letter
        spans.append((start, len(after)) if len(after) > start else None)
        before = after
    names = [tokenizer.tokenizer.id_to_token(one) or str(one) for one in ids]
    return _named(before, ids, names, spans)


def _named(
    text: str, ids: Sequence[int], names: Sequence[str], spans: Sequence[tuple[int, int] | None]
) -> Tokens:
    starts = _words(text)
    labels, words, at = [], list[Word](), 0
    last = -1  # the word of the token before
    for place, (name, span) in enumerate(zip(names, spans, strict=True)):
        piece = "" if span is None else text[slice(*span)]
        labels.append(piece.strip() or name)
        if not piece.strip():
            words.append(Word(name, (place,), special=True))
            last = -1
            continue
        assert span is not None
        first = span[0] + len(piece) - len(piece.lstrip())
        while at < len(starts) and starts[at][1] <= first:
            at += 1
        inside = at < len(starts) and starts[at][0] <= first
        if inside and at == last:
            words[-1] = words[-1]._replace(places=(*words[-1].places, place))
        else:
            # A token may reach over several words, as over two ideograms.
            start, stop = starts[at] if inside else (first, first)
            label = text[start : max(stop, span[1])].strip()
            words.append(Word(label, (place,)))
            last = at if inside else -1
    return Tokens(tuple(ids), tuple(labels), tuple(words))


def _words(text: str) -> list[tuple[int, int]]:
    """Where words begin and end, as one reads them.

    Letters with the signs over them and with what joins them make a word, and so do signs. Of
    scripts that put no spaces between words, every letter does.
    """
    found: list[tuple[int, int]] = []
    before = ""  # the kind of the character before
    for place, character in enumerate(text):
        kind = _kind(character)
        joins = (
            character in _JOINING
            and before == "letter"
            and place + 1 < len(text)
            and _kind(text[place + 1]) == "letter"
        )
        if joins:
            kind = "letter"
        if kind and (kind != before or kind == "ideogram"):
            found.append((place, place + 1))
        elif kind:
            found[-1] = (found[-1][0], place + 1)
        before = kind
    return found


@cache
def _kind(character: str) -> str:
    """Whether a character belongs to a word, is one, is a sign, or is none of that ("")."""
    if character.isspace():
        return ""
    if "\u3040" <= character <= "\u30ff" or "\u3400" <= character <= "\u9fff":
        return "ideogram"
    lettering = unicodedata.category(character)[0] in "LMN" or character == "_"
    return "letter" if lettering else "sign"


def _nearest(word: str, words: Iterable[Word]) -> str:
    from difflib import get_close_matches

    known = dict.fromkeys(each.label for each in words)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else "Pick one of its words."


class Span(NamedTuple):
    """Some characters of a text: ``text[start:end]``."""

    start: int
    end: int


def words(text: str) -> list[Span]:
    """Where the words of a text stand; each punctuation mark is one of its own.

    >>> text = "It's 3.50, n'est-ce pas?"
    >>> [text[start:end] for start, end in words(text)]
    ["It's", '3.50', ',', "n'", 'est-ce', 'pas', '?']
    """
    return [Span(*found.span()) for found in _WORD.finditer(text)]


def sentences(text: str) -> list[Span]:
    r"""Where the sentences of a text stand, without the space between them. A new line ends one.

    >>> text = "Mr. Bean left. Where to?\nNobody knew."
    >>> [text[start:end] for start, end in sentences(text)]
    ['Mr. Bean left.', 'Where to?', 'Nobody knew.']
    """
    found: list[Span] = []
    start = len(text) - len(text.lstrip())
    for end in _END.finditer(text):
        sign = end.group().rstrip()
        stop = end.start() + len(sign)
        # A title is short; all that is before it would be read again for each.
        near = text[max(start, stop - LONGEST) : stop]
        if "\n" not in end.group() and _SHORT.search(near):
            continue
        if before := text[start:stop].rstrip():
            found.append(Span(start, start + len(before)))
            start = end.end()
    rest = text[start:].rstrip()
    return [*found, Span(start, start + len(rest))] if rest else found


def spans_of(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Span]:
    """Which characters of the text that ``ids`` decode to each of them wrote."""
    lengths = [len(decode(ids[:count])) for count in range(len(ids) + 1)]
    return [Span(lengths[at], max(lengths[at], lengths[at + 1])) for at in range(len(ids))]
