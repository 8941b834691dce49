"""Translation quality of the shipped translator in each precision, on the same sentences.

python benchmarks/precisions.py TATOEBA.tsv.xz --part 0 20 --limit 500

Lines are source and target; a source on several lines has several references. --part FIRST LAST
selects sources whose MD5 modulo 1,000 is in this range. Appended to results/precisions.jsonl.
"""

from __future__ import annotations

import lzma
import time
from hashlib import md5
from itertools import zip_longest
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table
from sacrebleu.metrics import BLEU, CHRF

from measure import append, argument_parser
from regard import translate
from regard.models.bundle import Precision


def read(path: Path, first: int, last: int, limit: int) -> dict[str, list[str]]:
    """The references of each source."""
    references: dict[str, list[str]] = {}
    with lzma.open(path, "rt", encoding="utf-8") as lines:
        for line in lines:
            source, target, *_ = line.rstrip("\n").split("\t")
            if first <= int(md5(source.encode()).hexdigest(), 16) % 1000 < last:
                references.setdefault(source, []).append(target)
    return dict(list(references.items())[:limit])


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 20))
    parser.add_argument("--limit", type=int, default=500)
    parser.add_argument("--to", default="fr")
    given = parser.parse_args()
    first, last = given.part
    pairs = read(given.file, first, last, given.limit)
    references = list(map(list, zip_longest(*pairs.values())))  # None where a source has fewer
    rows = []
    for precision in get_args(Precision):
        translate("Good morning.", given.to, precision=precision, attended=False)
        started = time.perf_counter()
        found = translate(list(pairs), given.to, precision=precision, attended=False)
        seconds = time.perf_counter() - started
        texts = [translation.text for translation in found]
        rows.append(
            {
                "precision": precision,
                "sentences": len(texts),
                "bleu": BLEU().corpus_score(texts, references).score,
                "chrf": CHRF().corpus_score(texts, references).score,
                "seconds": seconds,
                "texts": texts,
            }
        )
    plain = rows[0]["texts"]
    table = Table("precision", "BLEU", "chrF", "same sentences", "seconds")
    for row in rows:
        row["same"] = sum(a == b for a, b in zip(row.pop("texts"), plain, strict=True)) / len(plain)
        numbers = (f"{row[name]:.1f}" for name in ("bleu", "chrf"))
        table.add_row(row["precision"], *numbers, f"{row['same']:.0%}", f"{row['seconds']:.1f}")
    Console().print(table)
    append("precisions", rows)


if __name__ == "__main__":
    main()
