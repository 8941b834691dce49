"""Pairs whose target is a sentence of monolingual text and whose source is a translation of it.

    python recipes/back_translation.py MODEL mono.fr.txt back.fr-en.tsv --from fr --to en

Each line of the output is the translation, tab, the sentence. A pair is left out if a filter of
translation_data.py rejects it, such as different numbers, or if the translation is improbable.
--part 0 4 takes the first of each four lines.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from itertools import islice
from pathlib import Path

from translation_data import why_rejected, with_same_numbers

import regard

LINES = 4096  # translated together, in batches of similar length
MOST_TOKENS = 100  # of a translation
LEAST_SCORE = -0.9  # the mean log-probability of a token of a translation that is kept


def main() -> None:
    parser = argparse.ArgumentParser(description="Translate monolingual text back.")
    parser.add_argument("model", help="a folder or the name of a translation model")
    parser.add_argument("file", type=Path, help="one sentence a line")
    parser.add_argument("out", type=Path, help="the TSV to write")
    parser.add_argument("--from", dest="source", required=True, help="the language of the file")
    parser.add_argument("--to", required=True, help="the language to translate into")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), help="which lines, of how many"
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=512)
    arguments = parser.parse_args()
    which, parts = arguments.part
    counts: Counter[str] = Counter()
    precision = "float32" if arguments.device == "cpu" else "bfloat16"
    other = arguments.source if arguments.source != "en" else arguments.to
    with (
        arguments.file.open(encoding="utf-8") as file,
        arguments.out.open("w", encoding="utf-8") as out,
    ):
        lines = (line.rstrip("\n") for line in islice(file, which, None, parts))
        while some := list(islice(lines, LINES)):
            records = regard.translate(
                some, arguments.to, source=arguments.source, model=arguments.model,
                how={"num_beams": 1}, max_new_tokens=MOST_TOKENS, batch=arguments.batch,
                attended=False, device=arguments.device, precision=precision,
            )  # fmt: skip
            for sentence, record in zip(some, records, strict=True):
                pair = (record.text, sentence) if arguments.to == "en" else (sentence, record.text)
                reason = why_rejected(pair, other)
                if reason is None and with_same_numbers(pair) is None:
                    reason = "numbers differ"
                if reason is None and record.score < LEAST_SCORE:
                    reason = "improbable"
                counts[reason or "kept"] += 1
                if reason is None:
                    out.write(f"{record.text}\t{sentence}\n")
            sys.stderr.write(f"{arguments.out.name} {dict(counts)}\n")


if __name__ == "__main__":
    main()
