"""Sentences in English, French and German, to be translated back for training.

    python recipes/monolingual_text.py DATA OUT

DATA holds the folders mono/, qa/, lm/ and mt/ (docs/data.md). OUT receives mono.en.txt, mono.fr.txt
and mono.de.txt, with one sentence a line, in random order. No sentence of a validation or test part
of mt/ is among them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random

from translation_data import bare, clean, held_out_sentences, language_of

from regard.text.words import sentences


@dataclass(frozen=True)
class Text:
    """Files of one kind of text, and the maximum number of sentences to take from them."""

    files: str
    most: int


TEXTS = {
    "en": (
        Text("mono/common-voice/en/*.txt", 100_000),
        Text("qa/squadshifts_*/train.jsonl.xz", 100_000),
        Text("qa/squad1-train-part/train.jsonl.xz", 100_000),
        Text("qa/qed-train/train.jsonl.xz", 100_000),
        Text("lm/books/train-*.txt.xz", 60_000),
    ),
    "fr": (
        Text("mono/common-voice/fr/*.txt", 150_000),
        Text("mono/eltec/fra/*.xml", 150_000),
    ),
    "de": (
        Text("mono/common-voice/de/*.txt", 150_000),
        Text("mono/eltec/deu/*.xml", 150_000),
    ),
}
LENGTHS = range(16, 260)  # characters of a sentence
# Names of places and streets, and text in other languages.
LEFT_OUT = re.compile(r"addresses|places|cities|brezhoneg|LICENSE|singleword|ForeignPhrases")


def paragraphs(file: Path) -> Iterator[str]:
    """The paragraphs of a file: plain text, a novel in TEI, or questions with their contexts."""
    opened = lzma.open if file.suffix == ".xz" else open
    with opened(file, "rt", encoding="utf-8") as lines:
        if file.suffix == ".xml":
            text = lines.read().partition("<text")[2]
            for found in re.findall(r"<p[^>]*>(.*?)</p>", text, re.DOTALL):
                yield re.sub(r"<[^>]*>", "", found)
        elif ".jsonl" in file.name:
            yield from dict.fromkeys(json.loads(line)["context"] for line in lines)
        elif "books" in file.parts:
            yield from re.split(r"\n\s*\n", lines.read())
        else:
            yield from lines


def joined_marks(text: str) -> str:
    r"""Text in which marks are words of their own, as ordinary text.

    >>> joined_marks("The bird ( Aquila ) , it 's said , eats `` fish '' .")
    'The bird (Aquila), it\'s said, eats "fish".'
    """
    text = re.sub(r"``\s*|\s*''", '"', text)
    text = re.sub(r"\s+(?=[,.;:!?)\]%])|(?<=[(\[])\s+|\s+(?=n't\b|'(?:s|re|ve|ll|d|m)\b)", "", text)
    return re.sub(r"\s+\u2013\s+(?=\d)", "\u2013", text)


def ordinary(sentence: str, language: str) -> bool:
    """Whether a sentence is whole, of a usual length, and in the language."""
    return (
        len(sentence) in LENGTHS
        and sentence[0].isupper()
        and sentence[-1] in ".!?"
        and sum(map(str.isalpha, sentence)) > 0.7 * len(sentence)
        and not re.search(r"[|{}<>_=*\\\[\]#@^~]|\.{4}|\b[A-Z]{4,}\b", sentence)
        and language_of(sentence) in (language, None)
    )


def collected(data: Path, language: str, held_out: set[str], random: Random) -> list[str]:
    """The sentences of a language, without repetitions, in random order."""
    seen = set(held_out)
    chosen: list[str] = []
    for text in TEXTS[language]:
        files = sorted(file for file in data.glob(text.files) if not LEFT_OUT.search(file.name))
        random.shuffle(files)
        found: list[str] = []
        for sentence in _sentences(files):
            if len(found) == 3 * text.most:
                break
            key = bare(sentence)
            if key not in seen and ordinary(sentence, language):
                seen.add(key)
                found.append(sentence)
        sys.stderr.write(f"{language} {text.files}: {len(found)} sentences\n")
        chosen += random.sample(found, min(len(found), text.most))
    random.shuffle(chosen)
    return chosen


def _sentences(files: Iterable[Path]) -> Iterator[str]:
    for file in files:
        for paragraph in paragraphs(file):
            text = clean(paragraph)
            if " ," in text and " ." in text:
                text = joined_marks(text)
            yield from (text[low:high] for low, high in sentences(text))


def main() -> None:
    parser = argparse.ArgumentParser(description="Collect sentences for back-translation.")
    parser.add_argument("data", type=Path, help="the folder that holds mono/, qa/, lm/ and mt/")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0, help="the seed of all random choices")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    held_out = held_out_sentences(arguments.data)
    for language in TEXTS:
        random = Random(f"{arguments.seed} {language}")
        lines = [f"{line}\n" for line in collected(arguments.data, language, held_out, random)]
        file = arguments.out / f"mono.{language}.txt"
        file.write_text("".join(lines), encoding="utf-8", newline="\n")


if __name__ == "__main__":
    main()
