"""Training text for translation between English and French or German, filtered and balanced.

    python recipes/translation_data.py DATA OUT

DATA holds the folder mt/ (docs/data.md). OUT receives everyday.en-fr.tsv, everyday.en-de.tsv
(English, tab, translation), train.en-fr.tsv, train.en-de.tsv (all other kinds of text, in random
order), valid.en-fr.tsv, valid.en-de.tsv, and counts.json, which says how many pairs of each source
are kept and why the others are rejected. No sentence of any validation or test part is in the
training files. The recipes say how often an epoch has each file, use every file in both directions,
and put the tag of the target language before the source.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import lzma
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from random import Random

from copied_spans import Pair, from_template, span_alone, substituted

from regard.text.preparing import prepare as prepare_text

LANGUAGES = ("fr", "de")
TATOEBA = {
    "fr": "mt/tatoeba/eng-fra.2017-09-29.tsv.xz",
    "de": "mt/tatoeba/eng-deu.2018-04-07.tsv.xz",
}
HELD_OUT_PARTS = 40  # of 1000, by the MD5 of Tatoeba's English sentence
VALID = "mt/test/wmt-newstest2013/en-{language}.tsv.xz"


KINDS = {  # the files of each kind of text
    "everyday": ("mt/tatoeba/{tatoeba}", "mt/tatoeba-newer/en-{language}.tsv.xz"),
    "debates": ("mt/europarl-mpde/en-{language}.tsv.xz",),
    "manuals": (
        "mt/mdn/en-{language}.tsv.xz",
        "mt/php-doc/en-{language}.tsv.xz",
        "mt/godot-docs/en-{language}.tsv.xz",
        "mt/kubernetes-docs/en-{language}.tsv.xz",
        "mt/debian-handbook-en-{language}/train.tsv.xz",
        "mt/libreoffice-help-en-{language}/train.tsv.xz",
    ),
    "descriptions": ("mt/debian-descriptions-en-{language}/train.tsv.xz",),
    "interfaces": (
        "mt/libreoffice-ui/en-{language}.tsv.xz",
        "mt/mozilla-ui/en-{language}.tsv.xz",
        "mt/chromium-ui/en-{language}.tsv.xz",
        "mt/django/en-{language}.tsv.xz",
    ),
    "games": ("mt/cataclysm-dda/en-{language}.tsv.xz",),
}
MAX_TRANSLATIONS = 4  # the maximum number of translations of an English sentence
# Pairs to add, as shares of all pairs:
SUBSTITUTED = 0.08  # pairs repeated with another number, address or name
TEMPLATES = 0.04  # sentences from templates
SPANS_ALONE = 0.02  # lines of spans
CAPITALS = 0.015  # pairs repeated in capitals
JOINED = 0.02  # two or three everyday pairs on one line
WITHOUT_FULL_STOP = 0.02  # everyday pairs repeated without their full stops

# ------------------------------------------------------------------------------------ reading


def read_pairs(file: Path) -> Iterator[Pair]:
    """The English side and the other side of each line of a TSV that has both."""
    with lzma.open(file, "rt", encoding="utf-8", newline="\n") as lines:
        for line in lines:
            english, _, other = line.rstrip("\r\n").partition("\t")
            if other:
                yield english, other.split("\t")[0]


def held_out_part(english: str) -> bool:
    """Whether a sentence of Tatoeba is in its validation or test part."""
    digest = hashlib.md5(english.encode(), usedforsecurity=False).hexdigest()
    return int(digest, 16) % 1000 < HELD_OUT_PARTS


_MARKS = re.compile(r"[\W_]+")


def bare(text: str) -> str:
    """The letters and digits of a text in lower case, by which texts are compared."""
    return _MARKS.sub("", text.casefold()) or text


def held_out_sentences(data: Path) -> set[str]:
    """Both sides of all pairs in validation and test parts, through ``bare``."""
    sentences: set[str] = set()
    for file in sorted(data.glob("mt/**/*.tsv.xz")):
        if "test" in file.parts[:-1] or file.name in ("test.tsv.xz", "valid.tsv.xz"):
            sentences.update(bare(side) for pair in read_pairs(file) for side in pair)
    for name in TATOEBA.values():
        for pair in read_pairs(data / name):
            if held_out_part(pair[0]):
                sentences.update(map(bare, pair))
    return sentences


# ----------------------------------------------------------------------------------- cleaning

_SPACE = re.compile(r"\s+")
_ACCELERATOR = re.compile(r"(?<!\w)[_~](?=\w)|(?<=\w)~(?=\w)|\(~\w\)")


def clean(text: str, *, interface: bool = False) -> str:
    """The text as one line in NFC, with plain spaces and apostrophes, without HTML entities."""
    if "&" in text:
        text = html.unescape(html.unescape(text))
    text = prepare_text(text, ["characters"])
    if interface:
        text = _ACCELERATOR.sub("", text)
    return _SPACE.sub(" ", text).strip()


_NUMBER = re.compile(r"\d{1,3}(?:[ .,']\d{3})+(?:[.,]\d+)?(?!\d)|\d+(?:[.,:]\d+)*")


def _digits(number: str) -> str:
    return "".join(filter(str.isdigit, number))


def with_same_numbers(pair: Pair) -> Pair | None:
    """The pair with each number written as in English, or None if the numbers differ.

    A number up to 12 may be missing on one side, where it is often a word.
    """
    english, other = pair
    numbers, other_numbers = _NUMBER.findall(english), _NUMBER.findall(other)
    if numbers == other_numbers:
        return pair
    left, right = Counter(map(_digits, numbers)), Counter(map(_digits, other_numbers))
    if any(len(digits) > 2 or int(digits) > 12 for digits in (left - right) + (right - left)):
        return None
    forms = {_digits(number): number for number in numbers}
    return english, _NUMBER.sub(lambda match: forms.get(_digits(match[0]), match[0]), other)


# ---------------------------------------------------------------------------------- filtering

STOP_WORDS = {
    "en": "the of and to in is that it for was with are be this have not you on at by from they "
    "we he she or an which will would there their what if can all your has been were his her but",
    "fr": "le la les de des du et un une est que qui dans en pour pas sur avec ce cette il elle "
    "nous vous je ne au aux par sont plus son sa ses être été ou mais tout leur à ont si comme",
    "de": "der die das und ist nicht ein eine zu den mit sich von dem des im für auf es ich wir "
    "sie er auch an als aus wie bei nach werden wird haben hat einen einer kann dass daß sind",
}
_WORDS_OF = {language: frozenset(words.split()) for language, words in STOP_WORDS.items()}
_WORD = re.compile(r"[^\W\d_]+")
_MARKUP = re.compile(
    r"</?[A-Za-z][^<>]*>|%(?:\d+\$)?[sdifux]\b|\{\w*\}|\$\{?\w+\}?|(?:https?://|www\.)[^\s<>\"«»)]+"
    r"|[\w.+-]+@[\w-]+(?:\.[\w-]+)+"
)
_NOISE = re.compile(r"\{\{|\}\}|Ã.|â€|\ufffd|&\w+;|\\[nt]|[\x00-\x08\x0b-\x1f]|-{4,}|\.{5,}|_{3,}")
_FOREIGN = re.compile(r"[^\W\d_a-zA-ZÀ-ɏ]")
MAX_CHARACTERS = 480  # the maximum length of a side
MAX_RATIO = 2.0  # the maximum ratio of the lengths of both sides, with a margin of 12 characters


def language_of(text: str) -> str | None:
    """The language with the most stop words in a text, or None if that is not clear."""
    words = _WORD.findall(text.lower())
    if len(words) < 5:
        return None
    hits = {language: sum(map(stop.__contains__, words)) for language, stop in _WORDS_OF.items()}
    best, second = sorted(hits.values(), reverse=True)[:2]
    return max(hits, key=hits.__getitem__) if best > second + 1 else None


def why_rejected(pair: Pair, language: str) -> str | None:
    """Why a cleaned pair is rejected, or None if it is kept."""
    english, other = pair
    if not english or not other:
        return "an empty side"
    if max(len(english), len(other)) > MAX_CHARACTERS:
        return "too long"
    if max(len(english), len(other)) > MAX_RATIO * min(len(english), len(other)) + 12:
        return "lengths differ"
    if bare(english) == bare(other):
        return "not translated"
    letters = sum(map(str.isalpha, english)), sum(map(str.isalpha, other))
    if letters[0] < 0.5 * len(english) or letters[1] < 0.5 * len(other):
        return "few letters"
    if _NOISE.search(english) or _NOISE.search(other):
        return "noise"
    if len(_FOREIGN.findall(english)) + len(_FOREIGN.findall(other)) > 2:
        return "another script"
    if language_of(english) not in ("en", None) or language_of(other) not in (language, None):
        return "another language"
    if Counter(_MARKUP.findall(english)) != Counter(_MARKUP.findall(other)):
        return "markup differs"
    if (english.count("(") > 0) != (other.count("(") > 0):
        return "brackets differ"
    if min(len(english), len(other)) > 24 and (english[-1] in "?!") != (other[-1] in "?!"):
        return "ends differ"
    return None


def filtered(
    pairs: Iterable[Pair],
    language: str,
    held_out: set[str],
    counts: Counter[str],
    *,
    interface: bool,
) -> Iterator[Pair]:
    """The cleaned pairs that are kept; ``counts`` counts why the others are rejected."""
    for raw in pairs:
        counts["read"] += 1
        pair = clean(raw[0], interface=interface), clean(raw[1], interface=interface)
        reason = why_rejected(pair, language)
        if reason is None and not held_out.isdisjoint(map(bare, pair)):
            reason = "held out"
        same = None if reason else with_same_numbers(pair)
        if reason is None and same is None:
            reason = "numbers differ"
        if same is None:
            counts[reason or ""] += 1
        else:
            yield same


def collect(
    data: Path, language: str, held_out: set[str], counts: dict[str, Counter[str]]
) -> dict[str, list[Pair]]:
    """The pairs of each kind of text without repetitions; ``counts`` is filled by source."""
    unique: set[Pair] = set()
    kinds: dict[str, list[Pair]] = {}
    for kind, forms in KINDS.items():
        translations: Counter[str] = Counter()
        kept = kinds[kind] = []
        for form in forms:
            name = form.format(language=language, tatoeba=Path(TATOEBA[language]).name)
            if not (data / name).exists():
                continue
            count = counts[name] = Counter()
            for pair in filtered(
                read_pairs(data / name), language, held_out, count, interface=kind == "interfaces"
            ):
                key = bare(pair[0]), bare(pair[1])
                if key in unique or translations[key[0]] == MAX_TRANSLATIONS:
                    count["again"] += 1
                    continue
                unique.add(key)
                translations[key[0]] += 1
                count["kept"] += 1
                kept.append(pair)
    return kinds


# ------------------------------------------------------------------------------------ copying


def additional_pairs(
    kinds: dict[str, list[Pair]], language: str, random: Random
) -> dict[str, list[Pair]]:
    """Additional pairs that train copying and simple variations, by kind."""
    pairs = [pair for kind in kinds.values() for pair in kind]
    everyday = kinds["everyday"]
    lower = Counter(word for english, _ in pairs for word in english.split() if word.islower())
    common = frozenset(lower)
    added: dict[str, list[Pair]] = {
        "templates": [
            from_template(random, language) for _ in range(round(TEMPLATES * len(pairs)))
        ],
        "spans alone": [span_alone(random) for _ in range(round(SPANS_ALONE * len(pairs)))],
        "substituted": [],
        "capitals": [],
        "joined": [],
        "without a full stop": [],
    }
    order = random.sample(pairs, len(pairs))
    for pair in order:
        if len(added["substituted"]) >= SUBSTITUTED * len(pairs):
            break
        if (other := substituted(pair, random, common)) is not None:
            added["substituted"].append(other)
    short = [pair for pair in order if len(pair[0]) < 90]
    added["capitals"] = [
        (english.upper(), other.replace("ß", "ss").upper())
        for english, other in short[: round(CAPITALS * len(pairs))]
    ]
    for _ in range(round(JOINED * len(pairs)) if everyday else 0):
        chosen = random.choices(everyday, k=random.choice((2, 2, 3)))
        joined = " ".join(pair[0] for pair in chosen), " ".join(pair[1] for pair in chosen)
        added["joined"].append(joined)
    for english, other in random.sample(
        everyday, min(len(everyday), round(WITHOUT_FULL_STOP * len(pairs)))
    ):
        if english.endswith(".") and other.endswith("."):
            added["without a full stop"].append((english[:-1], other[:-1]))
    return added


# ------------------------------------------------------------------------------------ writing


def write_pairs(file: Path, pairs: Iterable[Pair]) -> int:
    """Write a TSV, and return the number of pairs."""
    lines = [f"{english}\t{other}\n" for english, other in pairs]
    file.write_text("".join(lines), encoding="utf-8", newline="\n")
    return len(lines)


def prepare(data: Path, out: Path, seed: int = 0) -> dict[str, object]:
    """Write the training and validation files of both languages, and return the counts."""
    out.mkdir(parents=True, exist_ok=True)
    held_out = held_out_sentences(data)
    report: dict[str, object] = {"held out": len(held_out)}
    for language in LANGUAGES:
        random = Random(f"{seed} {language}")
        counts: dict[str, Counter[str]] = {}
        kinds = collect(data, language, held_out, counts)
        added = additional_pairs(kinds, language, random)
        write_pairs(out / f"everyday.en-{language}.tsv", kinds["everyday"])
        others = [
            pair for name, pairs in (kinds | added).items() if name != "everyday" for pair in pairs
        ]
        random.shuffle(others)
        write_pairs(out / f"train.en-{language}.tsv", others)
        valid = (
            (clean(english), clean(other))
            for english, other in read_pairs(data / VALID.format(language=language))
        )
        report[language] = {
            "train": len(others),
            "valid": write_pairs(out / f"valid.en-{language}.tsv", valid),
            "sources": counts,
            "kinds": {name: len(pairs) for name, pairs in (kinds | added).items()},
        }
    (out / "counts.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def main() -> None:
    summary = "Prepare the training text of the translation recipes."
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("data", type=Path, help="the folder that holds mt/")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="the seed of all random choices")
    arguments = parser.parse_args()
    report = prepare(arguments.data, arguments.out, arguments.seed)
    sys.stdout.write(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
