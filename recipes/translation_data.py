"""Training text for translation between English and French or German, filtered and balanced.

    python recipes/translation_data.py DATA OUT

DATA holds the folder mt/ (docs/data.md). OUT receives train.en-fr.tsv, train.en-de.tsv (English,
tab, translation, in random order), valid.en-fr.tsv, valid.en-de.tsv, and counts.json, which says
how many pairs of each source were kept and why the others were left out. No sentence of any
validation or test part occurs in the training files. Every file is used in both directions by the
recipes, which put the tag of the target language before the source.
"""

from __future__ import annotations

import argparse
import hashlib
import html
import json
import lzma
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from copied_spans import Pair, from_template, span_alone, substituted

LANGUAGES = ("fr", "de")
TATOEBA = {
    "fr": "mt/tatoeba/eng-fra.2017-09-29.tsv.xz",
    "de": "mt/tatoeba/eng-deu.2018-04-07.tsv.xz",
}
HELD_OUT_PARTS = 40  # of 1000, by the MD5 of Tatoeba's English sentence
VALID = "mt/test/wmt-newstest2013/en-{language}.tsv.xz"


@dataclass(frozen=True)
class Kind:
    """A kind of text: its files, and how often each of its pairs stands in the training file."""

    files: tuple[str, ...]
    times: float


KINDS = {
    "everyday": Kind(("mt/tatoeba/{tatoeba}", "mt/tatoeba-newer/en-{language}.tsv.xz"), 2),
    "debates": Kind(("mt/europarl-mpde/en-{language}.tsv.xz",), 1),
    "manuals": Kind(
        (
            "mt/mdn/en-{language}.tsv.xz",
            "mt/php-doc/en-{language}.tsv.xz",
            "mt/godot-docs/en-{language}.tsv.xz",
            "mt/kubernetes-docs/en-{language}.tsv.xz",
            "mt/debian-handbook-en-{language}/train.tsv.xz",
            "mt/libreoffice-help-en-{language}/train.tsv.xz",
        ),
        1,
    ),
    "descriptions": Kind(("mt/debian-descriptions-en-{language}/train.tsv.xz",), 1),
    "interfaces": Kind(
        (
            "mt/libreoffice-ui/en-{language}.tsv.xz",
            "mt/mozilla-ui/en-{language}.tsv.xz",
            "mt/chromium-ui/en-{language}.tsv.xz",
            "mt/django/en-{language}.tsv.xz",
        ),
        1,
    ),
    "games": Kind(("mt/cataclysm-dda/en-{language}.tsv.xz",), 1),
}
TRANSLATIONS = 4  # kept of one English sentence
SUBSTITUTED = 0.08  # of all pairs, once more with another number, address or name
TEMPLATES = 0.04  # sentences from templates, as a share of all pairs
ALONE = 0.02  # lines that are a span alone
CAPITALS = 0.015  # pairs once more in capitals
JOINED = 0.02  # two or three everyday pairs as one line
UNSTOPPED = 0.02  # everyday pairs once more without their full stop

# ------------------------------------------------------------------------------------ reading


def read_pairs(file: Path) -> Iterator[Pair]:
    """The English side and the other side of each line of a TSV, where it has both."""
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
    """A text as it is compared: its letters and digits in lower case."""
    return _MARKS.sub("", text.casefold()) or text


def held_out_sentences(data: Path) -> set[str]:
    """Both sides of all validation and test parts, as ``bare`` makes them."""
    found: set[str] = set()
    for file in sorted(data.glob("mt/**/*.tsv.xz")):
        if "test" in file.parts[:-1] or file.name in ("test.tsv.xz", "valid.tsv.xz"):
            found.update(bare(side) for pair in read_pairs(file) for side in pair)
    for name in TATOEBA.values():
        for pair in read_pairs(data / name):
            if held_out_part(pair[0]):
                found.update(map(bare, pair))
    return found


# ----------------------------------------------------------------------------------- cleaning

_SPACE = re.compile(r"\s+")
_ACCELERATOR = re.compile(r"(?<!\w)[_~](?=\w)|(?<=\w)~(?=\w)|\(~\w\)")
_CHARACTERS = str.maketrans(
    dict.fromkeys("\u2019\u2018\u02bc", "'")
    | dict.fromkeys("\u22c5\u00a0\u202f\u2009", " ")
    | dict.fromkeys("\u00ad\u200b\u200e\u200f\ufeff")
)


def clean(text: str, *, interface: bool = False) -> str:
    """One line of NFC text with plain spaces and apostrophes, without HTML's entities."""
    if "&" in text:
        text = html.unescape(html.unescape(text))
    text = unicodedata.normalize("NFC", text).translate(_CHARACTERS)
    if interface:
        text = _ACCELERATOR.sub("", text)
    return _SPACE.sub(" ", text).strip()


_NUMBER = re.compile(r"\d{1,3}(?:[ .,']\d{3})+(?:[.,]\d+)?(?!\d)|\d+(?:[.,:]\d+)*")


def _digits(number: str) -> str:
    return "".join(filter(str.isdigit, number))


def with_same_numbers(pair: Pair) -> Pair | None:
    """The pair with each number written as in English, or None where the numbers differ.

    Numbers up to 12 may stand on one side alone: the other often spells them.
    """
    english, other = pair
    ours, theirs = _NUMBER.findall(english), _NUMBER.findall(other)
    if ours == theirs:
        return pair
    one, two = Counter(map(_digits, ours)), Counter(map(_digits, theirs))
    if any(len(digits) > 2 or int(digits) > 12 for digits in (one - two) + (two - one)):
        return None
    forms = {_digits(number): number for number in ours}
    return english, _NUMBER.sub(lambda found: forms.get(_digits(found[0]), found[0]), other)


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
LONGEST = 480  # characters of a side
RATIO = 2.0  # of the lengths of both sides, plus a dozen characters


def language_of(text: str) -> str | None:
    """The language whose frequent words a text has most of, or None where that is not clear."""
    words = _WORD.findall(text.lower())
    if len(words) < 5:
        return None
    hits = {language: sum(map(known.__contains__, words)) for language, known in _WORDS_OF.items()}
    best, second = sorted(hits.values(), reverse=True)[:2]
    return max(hits, key=hits.__getitem__) if best > second + 1 else None


def why_not(pair: Pair, language: str) -> str | None:
    """Why a cleaned pair is not trained on, or None where it is."""
    english, other = pair
    if not english or not other:
        return "an empty side"
    if max(len(english), len(other)) > LONGEST:
        return "too long"
    if max(len(english), len(other)) > RATIO * min(len(english), len(other)) + 12:
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
    """The pairs that are trained on; ``counts`` takes why the others are not."""
    for raw in pairs:
        counts["read"] += 1
        pair = clean(raw[0], interface=interface), clean(raw[1], interface=interface)
        reason = why_not(pair, language)
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
    """The pairs of each kind of text, each once; ``counts`` is filled by source."""
    met: set[Pair] = set()
    kinds: dict[str, list[Pair]] = {}
    for kind, source in KINDS.items():
        times: Counter[str] = Counter()
        kept = kinds[kind] = []
        for form in source.files:
            name = form.format(language=language, tatoeba=Path(TATOEBA[language]).name)
            if not (data / name).exists():
                continue
            count = counts[name] = Counter()
            for pair in filtered(
                read_pairs(data / name), language, held_out, count, interface=kind == "interfaces"
            ):
                key = bare(pair[0]), bare(pair[1])
                if key in met or times[key[0]] == TRANSLATIONS:
                    count["again"] += 1
                    continue
                met.add(key)
                times[key[0]] += 1
                count["kept"] += 1
                kept.append(pair)
    return kinds


# ------------------------------------------------------------------------------------ copying


def copies(kinds: dict[str, list[Pair]], language: str, random: Random) -> dict[str, list[Pair]]:
    """Pairs made to teach copying and plain variations, by what they teach."""
    pairs = [pair for kind in kinds.values() for pair in kind]
    everyday = kinds["everyday"]
    lower = Counter(word for english, _ in pairs for word in english.split() if word.islower())
    common = frozenset(lower)
    made: dict[str, list[Pair]] = {
        "templates": [
            from_template(random, language) for _ in range(round(TEMPLATES * len(pairs)))
        ],
        "spans alone": [span_alone(random) for _ in range(round(ALONE * len(pairs)))],
        "substituted": [],
        "capitals": [],
        "joined": [],
        "without a full stop": [],
    }
    order = random.sample(pairs, len(pairs))
    for pair in order:
        if len(made["substituted"]) >= SUBSTITUTED * len(pairs):
            break
        if (other := substituted(pair, random, common)) is not None:
            made["substituted"].append(other)
    short = [pair for pair in order if len(pair[0]) < 90]
    made["capitals"] = [
        (english.upper(), other.replace("ß", "ss").upper())
        for english, other in short[: round(CAPITALS * len(pairs))]
    ]
    for _ in range(round(JOINED * len(pairs)) if everyday else 0):
        some = random.choices(everyday, k=random.choice((2, 2, 3)))
        joined = " ".join(pair[0] for pair in some), " ".join(pair[1] for pair in some)
        made["joined"].append(joined)
    for english, other in random.sample(
        everyday, min(len(everyday), round(UNSTOPPED * len(pairs)))
    ):
        if english.endswith(".") and other.endswith("."):
            made["without a full stop"].append((english[:-1], other[:-1]))
    return made


def mixture(kinds: dict[str, list[Pair]], random: Random) -> Iterator[Pair]:
    """All pairs of each kind as often as it says, and a random share of them for the rest."""
    for name, pairs in kinds.items():
        times = KINDS[name].times if name in KINDS else 1
        for _ in range(int(times)):
            yield from pairs
        yield from random.sample(pairs, round((times - int(times)) * len(pairs)))


# ------------------------------------------------------------------------------------ writing


def write_pairs(file: Path, pairs: Iterable[Pair]) -> int:
    """Write a TSV, and return how many pairs it has."""
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
        made = copies(kinds, language, random)
        train = list(mixture(kinds | made, random))
        random.shuffle(train)
        write_pairs(out / f"train.en-{language}.tsv", train)
        valid = (
            (clean(one), clean(two))
            for one, two in read_pairs(data / VALID.format(language=language))
        )
        report[language] = {
            "train": len(train),
            "valid": write_pairs(out / f"valid.en-{language}.tsv", valid),
            "sources": counts,
            "kinds": {name: len(pairs) for name, pairs in (kinds | made).items()},
        }
    (out / "counts.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n")
    return report


def main() -> None:
    summary = "Prepare the training text of the translation recipes."
    parser = argparse.ArgumentParser(description=summary)
    parser.add_argument("data", type=Path, help="the folder that holds mt/")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="of all random choices")
    given = parser.parse_args()
    report = prepare(given.data, given.out, given.seed)
    sys.stdout.write(json.dumps(report, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
