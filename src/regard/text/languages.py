"""Language names, and the tags that select a model's target language."""

from __future__ import annotations

import re

from regard.text.tokenizer import Tokenizer

# The ISO 639-1 code of each language, then its other codes and names.
_LANGUAGES = """
ar ara arabic|bg bul bulgarian|ca cat catalan|cs ces cze czech|cy cym wel welsh|da dan danish
de deu ger german deutsch|el ell gre greek|en eng english|eo epo esperanto|es spa spanish español
et est estonian|eu eus baq basque|fa fas per persian|fi fin finnish|fr fra fre french français
ga gle irish|gl glg galician|he heb hebrew|hi hin hindi|hr hrv croatian|hu hun hungarian
id ind indonesian|is isl ice icelandic|it ita italian italiano|ja jpn japanese|ka kat geo georgian
ko kor korean|la lat latin|lt lit lithuanian|lv lav latvian|mk mkd mac macedonian|ms msa may malay
mt mlt maltese|nb nob bokmål|nl nld dut dutch|no nor norwegian|pl pol polish|pt por portuguese
ro ron rum romanian|ru rus russian|sk slk slo slovak|sl slv slovenian|sq sqi alb albanian
sr srp serbian|sv swe swedish|sw swa swahili|th tha thai|tr tur turkish|uk ukr ukrainian|ur urd urdu
vi vie vietnamese|zh zho chi cmn chinese
"""
_NAMES = {
    name: language.split()[0]
    for language in re.split(r"[|\n]", _LANGUAGES.strip())
    for name in language.split()
}


def language_tags(text: Tokenizer) -> list[str]:
    """Return the tokens that select the target language, such as >>fra<<."""
    return sorted(tag for tag in text.tokenizer.get_vocab() if re.fullmatch(r">>.+<<", tag))


def same_language(one: str, other: str) -> bool:
    """Return whether two names mean the same language, as "fra" and "French" do."""
    names = [str(name).casefold().strip("<> ").replace("-", "_") for name in (one, other)]
    if names[0] == names[1]:
        return True
    first, second = (_NAMES.get(name) or _NAMES.get(name.split("_")[0], name) for name in names)
    return first == second
