"""Rare words of a dictionary as training pairs, alone and in short sentences.

    python recipes/dictionary_pairs.py DATA TEXT

DATA holds mono/wiktionary/ (docs/data.md), and TEXT the files train.en-{fr,de}.tsv,
everyday.en-{fr,de}.tsv and mono.{fr,de}.txt of the other scripts; it receives words.en-fr.tsv and
words.en-de.tsv. A headword is taken if it occurs at most MOST times in the training text, and gets
the translation of most senses.
"""

from __future__ import annotations

import argparse
import gzip
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import log
from pathlib import Path
from random import Random

Pair = tuple[str, str]

MOST = 150  # occurrences of a headword in English training text; others are known well
WORD = re.compile(r"[^\W\d_]+(?:['\u2019-][^\W\d_]+)*")
ENTRY = re.compile(r"(?P<head>[^{:(]+?) \{(?P<kind>n|v|adj|adv)\}.*? :: (?P<translations>.+)")
TRANSLATION = re.compile(r"(?P<word>[^\[\]{}(),;:/0-9]+?)(?: \{(?P<gender>[mfn])\})?")
VOWELS = frozenset("aeiouhâàéèêëîïôœùûyAEIOUHÉÊ")


@dataclass(frozen=True)
class Noun:
    """A noun of the other language with its gender: m, f or n."""

    word: str
    gender: str


def _french(article: str, noun: Noun) -> str:
    if article == "the" and noun.word[0] in VOWELS:
        return f"l'{noun.word}"
    return f"{'le' if noun.gender == 'm' else 'la'} {noun.word}"


def _german(article: str, noun: Noun) -> str:
    forms = {"the": "der die das", "the (object)": "den die das"}[article].split()
    return f"{forms['mfn'.index(noun.gender)]} {noun.word}"


def noun_pairs(head: str, noun: Noun, language: str) -> list[Pair]:
    """Short sentences with a noun.

    >>> noun_pairs("fox", Noun("Fuchs", "m"), "de")[:2]
    [('the fox', 'der Fuchs'), ('I saw the fox.', 'Ich habe den Fuchs gesehen.')]
    """
    if language == "fr":
        the = _french("the", noun)
        return [
            (f"the {head}", the),
            (f"I saw the {head}.", f"J'ai vu {the}."),
            (f"Where is the {head}?", f"Où est {the} ?"),
            (f"The {head} is here.", f"{the[0].upper()}{the[1:]} est ici."),
            (f"This is the {head} that we want.", f"C'est {the} que nous voulons."),
            (f"with the {head}", f"avec {the}"),
        ]
    the, whom = _german("the", noun), _german("the (object)", noun)
    with_ = {"m": "dem", "f": "der", "n": "dem"}[noun.gender]
    relative = {"m": "den", "f": "die", "n": "das"}[noun.gender]
    return [
        (f"the {head}", the),
        (f"I saw the {head}.", f"Ich habe {whom} gesehen."),
        (f"Where is the {head}?", f"Wo ist {the}?"),
        (f"The {head} is here.", f"{the[0].upper()}{the[1:]} ist hier."),
        (f"This is the {head} that we want.", f"Das ist {the}, {relative} wir wollen."),
        (f"with the {head}", f"mit {with_} {noun.word}"),
    ]


def entries(lines: Iterable[str]) -> Iterator[tuple[str, str, list[tuple[str, str]]]]:
    """Headword, part of speech, and translations with genders of each line of the dictionary.

    >>> line = "fox {n} (Vulpes) :: [male] Fuchs {m}, Füchsin {f}"
    >>> list(entries([line]))
    [('fox', 'n', [('Fuchs', 'm'), ('Füchsin', 'f')])]
    """
    for line in lines:
        match = ENTRY.fullmatch(line.strip())
        if match is None or "SEE:" in line or len(match["head"].split()) > 2:
            continue
        listed = re.sub(r"\[[^\]]*\]|\([^)]*\)", "", match["translations"])
        found = [TRANSLATION.fullmatch(part.strip()) for part in listed.split(",")]
        words = [(each["word"].strip(), each["gender"] or "") for each in found if each]
        if words and WORD.match(match["head"]):
            yield match["head"], match["kind"], words


def counted(lines: Iterable[str]) -> Counter[str]:
    """How often each word occurs, in lower case."""
    counts: Counter[str] = Counter()
    for line in lines:
        counts.update(word.lower() for word in WORD.findall(line))
    return counts


def frequency(text: str, counts: Counter[str]) -> int:
    """The count of the rarest word of a text."""
    return min((counts[word.lower()] for word in WORD.findall(text)), default=0)


def pairs(
    dictionary: Iterable[str],
    english: Counter[str],
    other: Counter[str],
    language: str,
    random: Random,
) -> Iterator[Pair]:
    """The training pairs of all rare headwords."""
    senses: dict[tuple[str, str], Counter[tuple[str, str]]] = defaultdict(Counter)
    for head, kind, words in entries(dictionary):
        for place, word in enumerate(words):
            if frequency(word[0], other) > 0 and len(word[0].split()) <= 2:
                senses[head, kind][word] += place == 0
    for (head, kind), found in senses.items():
        count = frequency(head, english)
        if not 0 < count <= MOST:
            continue

        def likeness(word: tuple[str, str], found=found, count=count) -> tuple[int, float]:
            """In how many senses a word comes first, and how similar its frequency is."""
            return found[word], -abs(log(frequency(word[0], other) / count))

        word, gender = max(found, key=likeness)
        if word.lower() == head.lower():
            continue
        if kind == "v":
            yield f"to {head}", word
        elif kind in ("adj", "adv"):
            yield head, word
            if kind == "adj":
                it_is = "C'est" if language == "fr" else "Es ist"
                yield f"It is {head}.", f"{it_is} {word}."
        else:
            yield head, word
            possible = "mf" if language == "fr" else "mfn"
            if gender and gender in possible and head.islower():
                yield from random.sample(noun_pairs(head, Noun(word, gender), language), 3)


def read_dsl(text: str) -> Iterator[str]:
    """The lines of a dictionary in ABBYY's DSL, in the form of the other dictionary."""
    head = ""
    for line in text.splitlines():
        if match := re.match(r"\t\[b\]\[c \w+\](.+?)\[/c\]\[/b\] \[p\]<(\w+)>\[/p\]", line):
            head = f"{match[1]} {{{match[2]}}}"
        elif head and (match := re.match(r"\t\[m\d\](.+)\[/m\]$", line)):
            body = re.sub(r" ?\[p\]<(\w)>\[/p\]", r" {\1}", match[1])
            body = re.sub(r"\\\[.*?\\?\]|\[/?[a-z!*'][^\]]*\]", "", body)
            yield f"{head} :: {body}"


def dictionary_lines(data: Path, language: str) -> Iterator[str]:
    """The lines of the dictionary into a language; the French one is complete only in DSL."""
    if language == "fr":
        packed = data / "mono/wiktionary/en-fr-enwiktionary.dsl.dz"
        return read_dsl(gzip.decompress(packed.read_bytes()).decode("utf-16"))
    return _file_lines(data / "mono/wiktionary/en-de-enwiktionary.txt")


def _file_lines(file: Path) -> Iterator[str]:
    with file.open(encoding="utf-8", newline="\n") as lines:
        yield from lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Training pairs of rare words.")
    parser.add_argument("data", type=Path, help="the folder that holds mono/")
    parser.add_argument(
        "text", type=Path, help="the folder of the training text, and of the result"
    )
    parser.add_argument("--seed", type=int, default=0, help="the seed of all random choices")
    arguments = parser.parse_args()
    for language in ("fr", "de"):
        files = [arguments.text / f"{kind}.en-{language}.tsv" for kind in ("train", "everyday")]
        sides = (line.partition("\t") for file in files for line in _file_lines(file))
        english: Counter[str] = Counter()
        other: Counter[str] = counted(_file_lines(arguments.text / f"mono.{language}.txt"))
        for left, _, right in sides:
            english.update(word.lower() for word in WORD.findall(left))
            other.update(word.lower() for word in WORD.findall(right))
        found = sorted(
            set(
                pairs(
                    dictionary_lines(arguments.data, language),
                    english,
                    other,
                    language,
                    Random(f"{arguments.seed} {language}"),
                )
            )
        )
        Random(f"{arguments.seed} {language}").shuffle(found)
        lines = [f"{left}\t{right}\n" for left, right in found]
        (arguments.text / f"words.en-{language}.tsv").write_text(
            "".join(lines), encoding="utf-8", newline="\n"
        )


if __name__ == "__main__":
    main()
