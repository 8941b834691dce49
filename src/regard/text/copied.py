"""Strings that a translation keeps: addresses, code, tags, numbers, emoji, text in other scripts.

Addresses are those of mail, the web and houses.

This module is the only place that says what such a string is.
"""

from __future__ import annotations

import re

from regard.text.words import Span

# Letters of scripts other than Latin, with their marks.
_OTHER_SCRIPT = "[\u0370-\u1cff\u2c00-\u2dff\u2e80-\ud7ff\uf900-\ufaff\U00020000-\U0003ffff]"
_EMOJI = "[\u2600-\u27bf\u2b50\u2b55\U0001f000-\U0001faff]"
_ENDINGS = (
    "txt|pdf|md|csv|json|html?|xml|py|sh|js|toml|ini|conf|log|gz|zip|jpg|png|exe|docx?|mp[34]"
)
_NAME = r"[A-Z\u00c0-\u00de][\w-]*"  # a word with a capital
# A house number with a street in English or French, and a street with a house number in German.
_HOUSE = rf"""
    \b\d{{1,4}}[A-Za-z]?\ (?:{_NAME}\ ){{1,3}}
        (?:Street|Road|Lane|Avenue|Drive|Square|Boulevard|Terrace|Crescent|Way|Close|Court)\b
    | \b\d{{1,4}}(?:\ (?:bis|ter))?,?\ (?:rue|avenue|boulevard|place|chemin|quai|allée|impasse)
        (?:(?:\ (?:d[eu]s?|l[ae]s?))*\ (?:[dl]['\u2019])?{_NAME})+
    | \b{_NAME}(?:straße|strasse|str\.|weg|gasse|platz|allee)\ \d{{1,4}}[a-z]?\b
"""
_COPIED = re.compile(
    rf"""
    `[^`\n]+`                                              # code
    | </?[A-Za-z][^<>\n]*>                                 # a tag
    | (?:(?:https?|ftp)://|www\.)[^\s<>«»"]*[\w/=]         # a web address
    | (?<![\w.+-])[\w.+-]+@\w[\w-]*(?:\.[\w-]+)+                       # a mail address
    | \$?\{{\w*\}} | %\(\w+\)[sd] | %\d*\$?[sd]\b          # a placeholder
    | \b[A-Za-z]:\\[\w.\\-]*\w                             # a path
    | (?<![\w/<.])(?:~|\.\.?)?/[\w.+-]*\w(?:/[\w.+-]*\w)*/?
    | (?<![\w.-])[\w-]+(?:\.[\w-]+)*\.(?:{_ENDINGS})\b
    | (?<!\S)--?[a-z][\w-]*(?:=\w+)?                       # an option
    | (?<![\w&])[@\#][^\W\d_][\w-]*                        # a name or a topic
    | \b\w+_\w+\b | \b[A-Za-z]+[-/]?\d[\w-]*               # an identifier
    | \b\d\d?\ ?h\ ?\d\d\b                                  # a time in French
    | {_HOUSE}
    | \+?\(?\d+(?:(?:[.,:/'\u2019-]|\)?[ \u00a0\u202f]\(?|\)-?)\d+)*   # a number, date or time
    | {_EMOJI}(?:[\u200d\ufe0f\u20e3]|{_EMOJI})*
    | {_OTHER_SCRIPT}+(?:[\s,.!?-]*{_OTHER_SCRIPT}+)*
    """,
    re.VERBOSE,
)
_SEPARATOR = r"(?:[.,:/'\s\u2019-]|\)\s|\s?h\s?)"  # between groups of digits
_DIGITS = re.compile(r"\d+")


def copied_spans(text: str) -> list[Span]:
    """Return the spans of the strings that a translation of ``text`` keeps.

    >>> text = "Pay 1,250 to bob@example.com, see `pay --help`."
    >>> [text[start:end] for start, end in copied_spans(text)]
    ['1,250', 'bob@example.com', '`pay --help`']
    """
    return [Span(*match.span()) for match in _COPIED.finditer(text)]


def other_letters(text: str) -> set[str]:
    """Return the letters of a text that are of scripts other than Latin.

    >>> sorted(other_letters("Łódź and 田中"))
    ['中', '田']
    """
    return set(re.findall(_OTHER_SCRIPT, text))


def only_copied(text: str) -> bool:
    """Return whether no letter of a text is outside its copied strings, so nothing is translated.

    >>> only_copied("2026-03-12, 🎉"), only_copied("12 March")
    (True, False)
    """
    return not re.search(r"[^\W\d_]", _COPIED.sub("", text))


def missing(source: str, translation: str) -> list[str]:
    """Return the copied strings of ``source`` that occur less often in ``translation``.

    A number may be written with other separators, as languages do.

    >>> missing("Pay 1,250 to bob@example.com", "Payez 1 250 à bob@exemple.com")
    ['bob@example.com']
    """
    lost = []
    for start, end in copied_spans(source):
        span = source[start:end]
        numeric = re.fullmatch(r"[+(]*\d(?:[\d\sh]|[^\w\s])*", span)
        pattern = _number(span) if numeric else re.escape(span)
        translation, found = re.subn(pattern, "\n", translation, count=1)
        if not found:
            lost.append(span)
    return lost


def _number(span: str) -> str:
    """A pattern for a number with other separators between its groups of digits."""
    first, *groups = _DIGITS.findall(span)
    thousands = r"[.,'\s\u2019]?"
    joined = re.sub(r"(?<=\d)(?=(?:\d{3})+$)", thousands.replace("\\", r"\\"), first)
    for group in groups:
        # A separator of thousands may be left out; others may not.
        joined += _SEPARATOR + ("?" if len(group) == 3 else "") + group
    return rf"(?<!\d){joined}(?!\d)"


def invented_numbers(source: str, translation: str) -> list[str]:
    """Return the groups of digits in ``translation`` that ``source`` does not have.

    >>> invented_numbers("12 March 2026", "1226"), invented_numbers("1,250 men", "1250 hommes")
    (['1226'], [])
    """
    known = {*_DIGITS.findall(source), *_DIGITS.findall(re.sub(r"(?<=\d)\D(?=\d)", "", source))}
    return [group for group in _DIGITS.findall(translation) if group not in known]
