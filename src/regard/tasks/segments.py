"""The pieces of a text as a translation model reads them, and how its output becomes text again.

A sentence in capitals is read in lower case. Where the model lost a string that has to be copied,
the sentence is read again with a placeholder instead of each such string.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass

from regard.text.copied import copied_spans
from regard.text.languages import is_frequent
from regard.text.words import Span, plain_letters, sentences, words

_PLACEHOLDER = "XX{}"  # models copy it; capitals do not change it
_PLACEHOLDERS = re.compile(r"XX\d+")
_CAPITALS = re.compile(r"\b[A-ZÀ-ÖØ-Þ]{3,}\b")
# Where a long sentence may be cut, best first: between clauses, before a conjunction or a relative
# pronoun, after another comma, between words.
_CONJUNCTION = (
    "(?:and|or|but|because|which|while|so|et|ou|mais|car|donc|qui|que|und|oder|aber|denn|dass|weil"
    "|der|die|das)"
)
_CUTS = (
    r"(?<=[;:\u2013\u2014])\s+|(?<=\s-)\s+",
    rf"(?<=,)\s+(?={_CONJUNCTION}\b)",
    r"(?<=[,)])\s+",
    r"\s+",
)
SAME_BEGINNING = 3  # letters
LONG_WORD = 6  # letters; a shorter word in capitals that stands alone is taken for an acronym


@dataclass(frozen=True, slots=True)
class Segment:
    """A sentence, what the model reads instead of it, and what placeholders in that stand for."""

    text: str
    read: str
    capitals: bool = False
    held: tuple[tuple[str, str], ...] = ()  # each placeholder with its string
    stressed: tuple[Span, ...] = ()  # words of ``read`` that are in capitals in ``text``

    def restored(self, written: str) -> str:
        """The output of the model, or one of its words, with capitals and held strings.

        >>> segment = protected("Write to bob@example.com.")
        >>> segment.read, segment.restored("Écrivez à XX1.")
        ('Write to XX1.', 'Écrivez à bob@example.com.')
        """
        if self.capitals:
            written = written.upper()
        strings = dict(self.held)
        return _PLACEHOLDERS.sub(lambda match: strings.get(match[0], match[0]), written)

    def all_held(self, written: str) -> bool:
        """Whether the model wrote each placeholder once."""
        found = _PLACEHOLDERS.findall(written)
        return all(found.count(placeholder) == 1 for placeholder, _ in self.held)


def pieces(text: str) -> list[Span]:
    r"""The spans of the sentences of a text, which tabs end, too.

    >>> text = "Name\tFirst name\nMr. Bean. Who?"
    >>> [text[start:end] for start, end in pieces(text)]
    ['Name', 'First name', 'Mr. Bean.', 'Who?']
    """
    return [
        Span(low + cell.start(), low + cell.end())
        for low, high in sentences(text)
        for cell in re.finditer(r"[^\t\s][^\t]*(?<!\s)", text[low:high])
    ]


def parts(text: str, span: Span, fits: Callable[[str], bool]) -> list[Span]:
    """The spans of the parts of a sentence that a model can read, cut where a clause ends.

    ``fits`` says whether a part is short enough. Only a part of one word may be longer.

    >>> text = "I came, he saw and they left; nobody won."
    >>> spans = parts(text, Span(0, len(text)), lambda part: len(part) < 20)
    >>> [text[start:end] for start, end in spans]
    ['I came,', 'he saw and', 'they left;', 'nobody won.']
    """
    low, high = span
    sentence = text[low:high]
    if fits(sentence):
        return [span]
    copied = copied_spans(sentence)

    def allowed(cut: Span) -> bool:
        return not any(start < cut.end and cut.start < end for start, end in copied)

    for edge in (len(sentence) // 4, 0):  # in the middle half of the sentence, or in all of it
        for pattern in _CUTS:
            matches = re.compile(pattern).finditer(sentence, edge, len(sentence) - edge)
            found = [Span(*match.span()) for match in matches]
            found.sort(key=lambda cut: abs(sum(cut) - len(sentence)))
            if cut := next(filter(allowed, found), None):
                before, after = Span(low, low + cut.start), Span(low + cut.end, high)
                return [*parts(text, before, fits), *parts(text, after, fits)]
    return [span]


def continued(source: str, written: str) -> str:
    """The translation of a part of a sentence, without the capital and full stop of a sentence.

    Only a frequent word loses its capital, since others may be names or German nouns.

    >>> continued("which was late, because", "Das war spät, weil.")
    'das war spät, weil'
    """
    first = re.match(r"\w+", written)
    if first and source[:1].islower() and is_frequent(first[0]):
        written = written[0].lower() + written[1:]
    if written.endswith(".") and not written.endswith("..") and not source.endswith("."):
        written = written[:-1] + (source[-1] if source[-1] in ",;:" else "")
    return written


def plain(text: str, ordinary: Callable[[str], bool]) -> Segment:
    """A sentence with single spaces, without capitals if it or an ordinary word is in capitals.

    ``ordinary`` says of a word in capitals that it is no acronym.

    >>> ordinary = {"VERY", "LIKE"}.__contains__
    >>> plain("NASA is VERY big.", ordinary).read, plain("I LIKE NASA.", ordinary).read
    ('NASA is very big.', 'I like nasa.')
    """
    if not _in_capitals(text):
        read = " ".join(text.split())
        copied = copied_spans(read)
        stressed = [
            Span(*match.span())
            for match in _CAPITALS.finditer(read)
            if ordinary(match[0]) and not any(low <= match.start() < high for low, high in copied)
        ]
        for low, high in stressed:
            read = read[:low] + read[low:high].lower() + read[high:]
        return Segment(text, read, stressed=tuple(stressed))
    shielded = protected(text)
    read = re.sub(r"\bi\b", "I", shielded.read.lower())
    read = re.sub(r"xx(?=\d)", "XX", read)
    first = re.search(r"[^\W\d_]", read)
    assert first is not None  # the words in capitals have letters
    read = read[: first.start()] + first[0].upper() + read[first.end() :]
    return Segment(text, read, True, shielded.held)


def lost_names(source: str, written: str, unsure: Collection[str]) -> list[str]:
    """The words of ``unsure`` that are names, by their capitals, and left no trace in ``written``.

    The first word of a sentence may have a capital anyway. Names that are spelled otherwise in
    the other language begin alike.

    >>> lost_names("Hi Tom, Rome is big.", "Hallo, Rom ist groß.", ["Hi", "Tom", "Rome", "big"])
    ['Tom']
    """
    beginnings = {_beginning(written[low:high]) for low, high in words(written)}
    return [
        source[low:high]
        for low, high in words(source)
        if source[low].isupper()
        and source[low:high] in unsure
        and re.search(r"[\w,;]\s$", source[:low])
        and _beginning(source[low:high]) not in beginnings
    ]


def _beginning(word: str) -> str:
    return plain_letters(word)[:SAME_BEGINNING]


def protected(text: str, names: Collection[str] = ()) -> Segment:
    """A sentence with a placeholder instead of each name and string that has to be copied."""
    spans = copied_spans(text)
    spans += [
        span
        for span in words(text)
        if text[span.start : span.end] in names
        and not any(low < span.end and span.start < high for low, high in spans)
    ]
    spans.sort()
    first = 1
    while any(_PLACEHOLDER.format(first + at) in text for at in range(len(spans))):
        first += len(spans)
    read, held, before = "", list[tuple[str, str]](), 0
    for number, (low, high) in enumerate(spans, first):
        placeholder = _PLACEHOLDER.format(number)
        read += text[before:low] + placeholder
        held.append((placeholder, text[low:high]))
        before = high
    return Segment(text, " ".join((read + text[before:]).split()), False, tuple(held))


def _in_capitals(text: str) -> bool:
    """Whether all words outside copied strings are in capitals, and they are no acronym."""
    for low, high in reversed(copied_spans(text)):
        text = text[:low] + " " + text[high:]
    found = re.findall(r"[^\W\d_]+", text)
    long = [word for word in found if len(word) > 1]
    if not long or any(word != word.upper() or word == word.lower() for word in long):
        return False
    return len(long) > 1 or len(found) > 1 or len(long[0]) >= LONG_WORD
