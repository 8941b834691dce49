"""A tokenizer for translation: joint byte-pair encoding with a token for each byte.

    python recipes/translation_tokenizer.py OUT FILE.tsv ... [--size 12000]

Both columns of the files are its text. Every text can be encoded, and comes back unchanged: spaces
are part of the tokens, digits are tokens of their own, and characters that are not in the
vocabulary are written as the bytes of their UTF-8. OUT is for the recipes' tokenizer.start.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer

SPECIAL = ("</s>", "<pad>", ">>fra<<", ">>deu<<", ">>eng<<")
BYTES = tuple(f"<0x{byte:02X}>" for byte in range(256))
# A word with the space before it, a digit, a run of other marks with the space before it, space.
PIECES = r" ?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s"
RAREST = 200  # occurrences of a character that has a token; others are written as bytes
LINES = 500_000  # pairs that are read


def pairs_of(files: Iterable[Path], most: int) -> Iterator[str]:
    """Both sides of the first lines of all files together, as many of each."""
    files = list(files)
    for file in files:
        with file.open(encoding="utf-8", newline="\n") as lines:
            for _, line in zip(range(most // len(files)), lines, strict=False):
                yield from line.rstrip("\n").split("\t")[:2]


def train(lines: Iterable[str], size: int, rarest: int = RAREST) -> Tokenizer:
    """Train a byte-pair encoding of ``size`` tokens, special tokens and bytes among them."""
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    counts: dict[str, int] = {}

    def counted() -> Iterator[str]:
        for line in lines:
            for character in line:
                counts[character] = counts.get(character, 0) + 1
            yield line

    lines = list(counted())
    alphabet = sorted(character for character, count in counts.items() if count >= rarest)
    learner = Tokenizer(BPE())
    learner.pre_tokenizer = split
    learner.train_from_iterator(
        lines,
        BpeTrainer(
            vocab_size=size - len(SPECIAL) - len(BYTES),
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        ),
    )
    learned = json.loads(learner.to_str())["model"]
    pieces = sorted(learned["vocab"], key=learned["vocab"].__getitem__)
    ids = {token: index for index, token in enumerate((*SPECIAL, *BYTES, *pieces))}
    merges = [tuple(merge) for merge in learned["merges"]]
    tokenizer = Tokenizer(BPE(ids, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer of the translation recipes.")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("files", type=Path, nargs="+", help="TSV files of pairs")
    parser.add_argument("--size", type=int, default=12000, help="how many tokens")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    train(pairs_of(given.files, LINES), given.size).save(str(given.out / "tokenizer.json"))


if __name__ == "__main__":
    main()
