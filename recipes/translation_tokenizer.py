"""A tokenizer for translation: joint byte-pair encoding with a token for each byte.

    python recipes/translation_tokenizer.py OUT FILE.tsv ... [--size 12000]

It is trained on both columns of the files. Decoding restores every text unchanged: spaces are part
of the tokens, each digit is a token, and a character outside the vocabulary is encoded as its UTF-8
bytes. Recipes read OUT as tokenizer.start.
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
# A word with a leading space, a digit, a run of other marks with a leading space, or white space.
PIECES = r" ?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+|\s"
MIN_OCCURRENCES = 200  # a character that occurs less often has no token and is encoded as bytes
MAX_PAIRS = 500_000  # the maximum number of pairs to train on


def pairs_of(files: Iterable[Path], max_pairs: int) -> Iterator[str]:
    """Both sides of the first lines of all files, the same number from each."""
    files = list(files)
    for file in files:
        with file.open(encoding="utf-8", newline="\n") as lines:
            for _, line in zip(range(max_pairs // len(files)), lines, strict=False):
                yield from line.rstrip("\n").split("\t")[:2]


def train(lines: Iterable[str], size: int, min_occurrences: int = MIN_OCCURRENCES) -> Tokenizer:
    """Train a byte-pair encoding of ``size`` tokens, including special tokens and bytes."""
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    counts: dict[str, int] = {}

    def counted() -> Iterator[str]:
        for line in lines:
            for character in line:
                counts[character] = counts.get(character, 0) + 1
            yield line

    lines = list(counted())
    alphabet = sorted(character for character, count in counts.items() if count >= min_occurrences)
    trained = Tokenizer(BPE())
    trained.pre_tokenizer = split
    trained.train_from_iterator(
        lines,
        BpeTrainer(
            vocab_size=size - len(SPECIAL) - len(BYTES),
            initial_alphabet=alphabet,
            limit_alphabet=len(alphabet),
            show_progress=False,
        ),
    )
    model = json.loads(trained.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
    ids = {token: index for index, token in enumerate((*SPECIAL, *BYTES, *pieces))}
    merges = [tuple(merge) for merge in model["merges"]]
    tokenizer = Tokenizer(BPE(ids, merges, byte_fallback=True))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the tokenizer of the translation recipes.")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("files", type=Path, nargs="+", help="TSV files of pairs")
    parser.add_argument("--size", type=int, default=12000, help="the number of tokens")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    train(pairs_of(arguments.files, MAX_PAIRS), arguments.size).save(
        str(arguments.out / "tokenizer.json")
    )


if __name__ == "__main__":
    main()
