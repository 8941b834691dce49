"""Language names, and the tags that select a model's target language."""

from __future__ import annotations

import re
from collections import Counter

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
# The most frequent words of the languages that are told apart.
_FREQUENT = {
    "de": "der die das und ist nicht ein eine einen dem den des zu von im auf für sich es auch "
    "wird sind ich wir sie er dass hat mit bei nach oder aber wie wenn noch kann haben ihr "
    "mein nie kein keine nur alles",
    "en": "the of and to in is that it was for on are with as this have from not be at by you he "
    "she they we his her which will would i my your there what can has but or do does did "
    "don't never all any now",
    "es": "el la los las de que y en un una por con es para se del al lo como más pero sus muy",
    "fr": "le la les des et est une un du en que qui dans pour pas sur au aux avec ce il elle sont "
    "nous vous je ne se plus par mais cette ces mon ma mes leur où très de ont été j'ai c'est d'un "
    "jamais rien tout",
    "it": "il lo la gli di che e un una per non con del della è sono nel alla anche come più ma",
    "nl": "de het een en van is dat niet met op voor zijn aan maar ook er ik hij ze naar wordt",
    "pt": "o os de que e um uma não para com da em na mais mas é são ao dos das se",
}
_SHARED = Counter(word for words in _FREQUENT.values() for word in set(words.split()))
# A word of one language says more than a word of three.
_WEIGHTS = {
    language: {word: 1 / _SHARED[word] for word in words.split()}
    for language, words in _FREQUENT.items()
}
_LETTERS = {"de": "äöüß", "fr": "çèêëîœùû", "es": "ñ¿¡", "pt": "ãõ"}
TOLD_APART = tuple(_FREQUENT)  # languages that language_of can find, all in Latin letters
MIN_EVIDENCE = 2.0  # the weight of a language's words, below which it is not told
MIN_RATIO = 2.5  # how much heavier the words of a language must be than those of any other
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


def language_name(language: str) -> str:
    """The English name of a language.

    >>> language_name("fra"), language_name("de")
    ('French', 'German')
    """
    code = _NAMES.get(language.casefold(), language)
    names = [name for name, known in _NAMES.items() if known == code and len(name) > 3]
    return names[0].title() if names else language


def has_capital_nouns(language: str) -> bool:
    """Return whether a language writes all nouns with a capital, so that it does not tell names.

    >>> has_capital_nouns("deu"), has_capital_nouns("fr")
    (True, False)
    """
    return same_language(language, "de")


def is_frequent(word: str) -> bool:
    """Return whether a word is among the most frequent ones of a language.

    >>> is_frequent("NOT"), is_frequent("WHO")
    (True, False)
    """
    return word.lower() in _SHARED


def language_of(text: str) -> str | None:
    """The code of a text's language, or None if its words do not show it.

    Only some European languages are known, by their most frequent words.

    >>> language_of("Le chat est sur la table."), language_of("Paris 2024")
    ('fr', None)
    """
    words = re.findall(r"[^\W\d_]+(?:['\u2019][^\W\d_]+)?", text.lower())
    scores = {
        language: sum(weights.get(word, 0.0) for word in words)
        + sum(any(letter in word for letter in _LETTERS.get(language, "")) for word in words) / 2
        for language, weights in _WEIGHTS.items()
    }
    first, second, *_ = sorted(scores, key=lambda language: -scores[language])
    clear = scores[first] >= max(MIN_EVIDENCE, MIN_RATIO * scores[second])
    return first if clear else None
