"""Split a text into words and sentences, and find the tokens of each word."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cache
from typing import NamedTuple

from regard.errors import InputError
from regard.text.tokenizer import Tokenizer

_RUN = re.compile("l+(?:jl+)*|i|[sj]+")  # the kinds of a word's characters (see _kind)
_UNFINISHED = "\ufffd"  # the decoding of an incomplete character
_CLOSING, _OPENING = "\"'\u2019\u201d»)\\]", "\"'\u2018\u201c«(\\[¿¡"
# A French elision, or letters and digits with joining characters, or a punctuation mark.
_WORD = re.compile(
    "\\b(?i:[cdjlmnst]|qu|lorsqu|puisqu)['\u2019](?=\\w)|\\w+(?:['\u2019.-]\\w+)*|[^\\w\\s]"
)
# A match starts only at the first of several marks; otherwise long runs take quadratic time.
_END = re.compile(
    rf"(?<![.!?…])[.!?…]+[{_CLOSING}]*\s+(?=[{_OPENING}]*[^\W_a-zß-öø-ÿ])|\n\s*"
    "|(?<![。\uff01\uff1f])[。\uff01\uff1f]+[」』\uff09”]*(?!$)"
)
# Abbreviations whose full stop does not end a sentence, such as titles and single letters.
_SHORT = re.compile(
    rf"(?:^|[\s{_OPENING}])(?:(?:\w\.)*\w|Mrs?|Ms|Dr|St|Prof|Mme|Mlle|Sgt|Capt|Gen|Nr|vs)\.$"
)
# A letter before one of these words is no initial: "written in C. It is fast."
_LETTER = re.compile(r"(?<![\w.])\w\.$")
_AFTER_LETTER = re.compile(
    r"(?:It|The|This|These|They|He|She|We|You|There|In|If|For|As|And|But|Its|An)\b"
)
# Abbreviations before a number.
_BEFORE_NUMBER = re.compile(
    rf"(?:^|[\s{_OPENING}])(?:Nos?|Figs?|Vol|Ch|pp|Art|Sec|Eq|Abb|Bd|Tel|"
    r"Jan|Feb|Mar|Apr|Aug|Sept?|Oct|Nov|Dec)\.$"
)
MAX_ABBREVIATION = 16  # characters
# A number, a file name or an address with full stops inside.
_DOTTED = re.compile(r"\w+(?:\.[a-z0-9]{1,5})+(?![\w'\u2019])", re.ASCII)
MAX_DOTTED = 64  # characters


class Word(NamedTuple):
    """A word: its text, and the positions of its tokens."""

    label: str
    places: tuple[int, ...]
    special: bool = False  # whether it is a token such as </s>, or a space


@dataclass(frozen=True)
class Tokens:
    """The ids of a text, a label for each, and the words they form."""

    ids: tuple[int, ...]
    labels: tuple[str, ...]
    words: tuple[Word, ...]
    added: tuple[int, ...] = ()  # the positions of special tokens added to the text

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, word: str) -> tuple[Word, int]:
        """Return the first match of ``word``, and the number of matches.

        Case is ignored if no word matches exactly.
        """
        exact = [each for each in self.words if each.label == word]
        matches = exact or [each for each in self.words if each.label.lower() == word.lower()]
        if not matches:
            known = dict.fromkeys(each.label for each in self.words)
            near = get_close_matches(word, known, n=1)
            advice = f"Did you mean {near[0]!r}?" if near else "Pick one of its words."
            raise InputError(f"There is no word {word!r} in the text. {advice}")
        return matches[0], len(matches)


def tokens_of(tokenizer: Tokenizer, text: str) -> Tokens:
    """Return the tokens of a text, including the tokenizer's special tokens.

    >>> tokenizer = Tokenizer.train_bpe(["the cat sat"] * 9, size=300)
    >>> [word.label for word in tokens_of(tokenizer, "the cat sat").words]
    ['the', 'cat', 'sat']
    """
    encoded = tokenizer.encode(text)
    if all(source is None for source in encoded.texts):
        raise InputError(f"The text {text!r} has no tokens. Give a text with words.")
    spans = [
        None if source is None else span
        for source, span in zip(encoded.texts, encoded.offsets, strict=True)
    ]
    return tokens_of_spans(text, encoded.ids, encoded.tokens, spans)


def tokens_of_ids(tokenizer: Tokenizer, ids: Sequence[int]) -> Tokens:
    """Return the tokens of ids, with the words of the decoded text."""
    names = [tokenizer.tokenizer.id_to_token(token) or str(token) for token in ids]
    return tokens_of_decoded(ids, names, tokenizer.decode)


def tokens_of_decoded(
    ids: Sequence[int], names: Sequence[str], decode: Callable[[Sequence[int]], str]
) -> Tokens:
    """Return the tokens of ids, with the words of the text that ``decode`` makes of them.

    ``names`` are the tokens as they stand in the vocabulary.
    """
    before, spans = "", list[tuple[int, int] | None]()
    for count in range(1, len(ids) + 1):
        after = decode(ids[:count])
        # An id may change the last letters of the text before it. So its span starts where the
        # texts before and after it differ.
        start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                     min(len(before), len(after)))  # fmt: skip
        if start == len(after) and after.endswith(_UNFINISHED):
            start -= 1  # the id adds a byte to an incomplete character
        spans.append((start, len(after)) if len(after) > start else None)
        before = after
    return replace(tokens_of_spans(before, ids, names, spans), added=())


def tokens_of_spans(
    text: str, ids: Sequence[int], names: Sequence[str], spans: Sequence[tuple[int, int] | None]
) -> Tokens:
    """Return the tokens of a text from the characters that each id stands for.

    The span of a special token is None. ``names`` are the tokens as they stand in the vocabulary.
    """
    starts = _words(text)
    labels, words, at = [], list[Word](), 0
    last = -1  # the index of the previous token's word
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
            # A token may span several words, for example two ideograms.
            start, stop = starts[at] if inside else (first, first)
            label = text[start : max(stop, span[1])].strip()
            words.append(Word(label, (place,)))
            last = at if inside else -1
    added = tuple(place for place, span in enumerate(spans) if span is None)
    return Tokens(tuple(ids), tuple(labels), tuple(words), added)


def _words(text: str) -> list[tuple[int, int]]:
    """Return the start and end of each word.

    Letters with diacritics and joining characters form a word, and so does a run of punctuation. In
    scripts without spaces every character is a word.
    """
    return [match.span() for match in _RUN.finditer("".join(map(_kind, text)))]


@cache
def _kind(character: str) -> str:
    """Return the kind of a character: a letter, ideogram, joining character, sign or space."""
    if character.isspace():
        return " "
    if "\u3040" <= character <= "\u30ff" or "\u3400" <= character <= "\u9fff":
        return "i"
    if character in "-'\u2019":
        return "j"
    return "l" if unicodedata.category(character)[0] in "LMN" or character == "_" else "s"


class Span(NamedTuple):
    """A range of characters in a text: ``text[start:end]``."""

    start: int
    end: int


def plain_letters(word: str) -> str:
    """The word in lower case and without accents, for comparison.

    >>> plain_letters("Éric")
    'eric'
    """
    letters = unicodedata.normalize("NFD", word.casefold())
    return "".join(each for each in letters if not unicodedata.combining(each))


def words(text: str) -> list[Span]:
    """Return the spans of the words of a text. A punctuation mark counts as a word.

    >>> text = "It's 3.50, n'est-ce pas?"
    >>> [text[start:end] for start, end in words(text)]
    ["It's", '3.50', ',', "n'", 'est-ce', 'pas', '?']
    """
    return [Span(*match.span()) for match in _WORD.finditer(text)]


def sentences(text: str) -> list[Span]:
    r"""Return the spans of the sentences of a text, without outer spaces.

    A newline ends a sentence.

    >>> text = "Mr. Bean left. Where to?\nNobody knew."
    >>> [text[start:end] for start, end in sentences(text)]
    ['Mr. Bean left.', 'Where to?', 'Nobody knew.']
    """
    found: list[Span] = []
    start = len(text) - len(text.lstrip())
    for end in _END.finditer(text):
        sign = end.group().rstrip()
        stop = end.start() + len(sign)
        # The last few characters are enough to find an abbreviation.
        near = text[max(start, stop - MAX_ABBREVIATION) : stop]
        if "\n" not in end.group() and _is_abbreviation(near, text, end.end()):
            continue
        if before := text[start:stop].rstrip():
            found.append(Span(start, start + len(before)))
            start = end.end()
    rest = text[start:].rstrip()
    return [*found, Span(start, start + len(rest))] if rest else found


def _is_abbreviation(near: str, text: str, following: int) -> bool:
    """Whether the full stop at the end of ``near`` belongs to an abbreviation."""
    if _LETTER.search(near) and _AFTER_LETTER.match(text, following):
        return False
    numbered = text[following].isdigit() and _BEFORE_NUMBER.search(near)
    return bool(numbered or _SHORT.search(near))


def sentence_numbers(text: str, spans: Iterable[tuple[int, int]]) -> list[int]:
    r"""Return the number of the sentence in which each span of characters starts.

    A line that begins with a small letter continues the sentence of the line before it.

    >>> sentence_numbers("It has three\nhearts. Why?", [(0, 2), (13, 19), (21, 24)])
    [0, 0, 1]
    """
    starts, before = list[int](), 0
    for low, high in sentences(text):
        if not (text[low].islower() and starts and text.count("\n", before, low) == 1):
            starts.append(low)
        before = high
    return [max(bisect_right(starts, low) - 1, 0) for low, _ in spans]


def with_whole_words(text: str, start: int, end: int) -> Span:
    """Return a span extended over numbers and file names with a full stop that it cuts.

    >>> text = "Version 2.5 reads settings.ini. It is free."
    >>> [text[slice(*with_whole_words(text, *span))] for span in ((8, 9), (18, 26), (35, 37))]
    ['2.5', 'settings.ini', 'is']
    """
    for at in (start, end):
        for match in _DOTTED.finditer(text, max(at - MAX_DOTTED, 0), at + MAX_DOTTED):
            if match.start() < at < match.end():
                start, end = min(start, match.start()), max(end, match.end())
    return Span(start, end)


def spans_of(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Span]:
    """Return the span of each id in the text that ``ids`` decode to."""
    lengths = [len(decode(ids[:count])) for count in range(len(ids) + 1)]
    return [Span(lengths[at], max(lengths[at], lengths[at + 1])) for at in range(len(ids))]
