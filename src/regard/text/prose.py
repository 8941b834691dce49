"""The sentences of running text, whose lines may be wrapped, with lists, headings and quotes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from regard.text.words import Span, sentences

MAX_WIDTH = 120  # characters of a line that was wrapped; a longer line is a paragraph
MIN_WIDTH = 40  # a paragraph is taken to be wrapped at this width or more
MIN_LINE = 25  # characters of a wrapped line whose next line begins in lower case
MAX_QUOTED = 4  # sentences of a quotation that are kept together
_MARKER = re.compile(r"(?:[-*+•·‣\u2013\u2014]|\d{1,3}[.)]|\([a-z\d]\)|#{1,6}|>|\|)\s")
_BLOCK = re.compile(r"[^\n]+(?:\n[^\S\n]*\S[^\n]*)*")  # lines without an empty line between them
_WHOLE = re.compile("[.!?…。\uff01\uff1f][\"'\u2019\u201d»)\\]」』\uff09]*$")
# An ideogram or kana counts as a word, because no spaces separate words there.
_WORD = re.compile("[\u3040-\u30ff\u3400-\u9fff]|[^\\W_]+(?:['\u2019.,-][^\\W_]+)*")
# English words that point to an earlier sentence where they begin one.
_POINTS_BACK = re.compile(
    r"\W*(He|She|It|They|This|These|Those|His|Her|Its|Their|However|But|Therefore|Then|So|"
    r"Moreover|Furthermore|Also|Both)\b"
)
# Words with which a letter begins or ends politely, maybe after a salutation on the same line.
_COURTESY = re.compile(
    r"\W*(?:(?:Dear|Hello|Hi)\b[^,!?\n]{0,60}[,!]\s*)?"
    r"(?:(?:many )?thank(?:s| you)\b(?! to\b)|(?:I|we) hope (?:this|that|you)\b)",
    re.IGNORECASE,
)


def prose_sentences(text: str) -> list[Span]:
    r"""The spans of the sentences of a text, without the markers of list items.

    Unlike in :func:`~regard.text.words.sentences`, a line break inside a wrapped paragraph does
    not end a sentence, and a quotation of a few sentences is kept together.

    >>> text = 'List:\n- one\n- two\n"I go. You stay." He left.'
    >>> [text[start:end] for start, end in prose_sentences(text)]
    ['List:', 'one', 'two', '"I go. You stay."', 'He left.']
    """
    flat = unwrapped(text)
    return list(_quotes_together(flat, [_unmarked(flat, span) for span in sentences(flat)]))


def unwrapped(text: str) -> str:
    r"""The text with a space for each line break that wraps a paragraph; the length is kept.

    A line was wrapped if the first word of the next line would make it longer than every line of
    its paragraph, or if it is not short and the next line goes on in lower case.

    >>> unwrapped("A line was wrapped if the next\nline goes on in lower case.\nYes.")
    'A line was wrapped if the next line goes on in lower case.\nYes.'
    """
    return _BLOCK.sub(lambda block: _joined(block[0]), text)


def count_words(text: str) -> int:
    """The number of words, without punctuation marks.

    >>> count_words("It's 3.50, isn't it?")
    4
    """
    return sum(1 for _ in _WORD.finditer(text))


def is_whole(sentence: str) -> bool:
    """Whether a sentence ends with a mark that ends sentences; headings and list items do not."""
    return _WHOLE.search(sentence) is not None


def points_back(sentence: str) -> str | None:
    """The English word at its start with which a sentence points to an earlier one, if any.

    >>> points_back("It is closed."), points_back("Italy is closed.")
    ('It', None)
    """
    match = _POINTS_BACK.match(sentence)
    return match and match[1]


def is_courtesy(sentence: str) -> bool:
    """Whether a sentence begins with words of thanks or good wishes, as letters do.

    >>> is_courtesy("Thank you for your order."), is_courtesy("Thanks to the rain, it grew.")
    (True, False)
    """
    return _COURTESY.match(sentence) is not None


def _joined(block: str) -> str:
    lines = block.split("\n")
    width = max(len(line.rstrip()) for line in lines)
    if len(lines) == 1 or width > MAX_WIDTH:
        return block
    width = max(width, MIN_WIDTH)
    result = lines[0]
    for before, line in pairwise(lines):
        word, length = line.split(maxsplit=1)[0], len(before.rstrip())
        wrapped = length + 1 + len(word) > width or (length >= MIN_LINE and word[0].islower())
        result += (" " if wrapped and not _MARKER.match(line.lstrip()) else "\n") + line
    return result


def _unmarked(text: str, span: Span) -> Span:
    marker = _MARKER.match(text[span.start : span.end])
    if marker is None:
        return span
    rest = text[span.start + marker.end() : span.end]
    return Span(span.end - len(rest.lstrip()), span.end)


def _quotes_together(text: str, spans: list[Span]) -> Iterator[Span]:
    at = 0
    while at < len(spans):
        last = at
        if _is_open(text[slice(*spans[at])]):
            for other in range(at + 1, min(at + MAX_QUOTED, len(spans))):
                between = text[spans[at].start : spans[other].end]
                if "\n" in between:
                    break
                if not _is_open(between):
                    last = other
                    break
        yield Span(spans[at].start, spans[last].end)
        at = last + 1


def _is_open(text: str) -> bool:
    """Whether a quotation begins in a text and does not end in it."""
    if text.count('"') % 2:
        return True
    return any(text.count(left) > text.count(right) for left, right in ("“”", "«»"))
