"""How good the sentences are that ``summarize`` chooses, beside the first sentences of each text.

``python benchmarks/summaries.py FOLDER`` prints a row for each kind of text: ROUGE-1, 2 and L. As
many first sentences are taken as ``summarize`` chooses. FOLDER is the data of docs/data.md.
"""

from __future__ import annotations

import json
import lzma
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from regard import summarize
from regard.data.readers import thousandth
from regard.evaluation.metrics import Rouge, rouge
from regard.text.prose import prose_sentences

HELD_OUT = (
    50  # of 1,000 parts of PeerRead, by the MD5 of the document, the model was not trained on
)
BATCH = 64  # documents that are summarized together

# Each kind of text, with its file and the names of its fields.
KINDS = {
    "Debian descriptions": ("debian-descriptions/test", "document", "summary"),
    "SciTLDR abstracts": ("scitldr/SciTLDR-A.test", "source", "target"),
    "PeerRead titles": ("natural-instructions/peerread_abstract_title", "document", "summary"),
    "reviews of food": ("natural-instructions/amazonfood_review_headline", "document", "summary"),
}
MOST = 900  # texts of a kind

Pair = tuple[str, list[str]]


def pairs(folder: Path, kind: str) -> Iterator[Pair]:
    """The texts of a kind that have at least two sentences, with their summaries."""
    name, source, target = KINDS[kind]
    with lzma.open(folder / "summarization" / f"{name}.jsonl.xz", "rt", encoding="utf-8") as file:
        for line in file:
            row: dict[str, Any] = json.loads(line)
            text, summaries = row[source], row[target]
            text = " ".join(text) if isinstance(text, list) else text
            if kind.startswith("PeerRead") and thousandth(text) >= HELD_OUT:
                continue
            if len(prose_sentences(text)) > 1:
                yield text, summaries if isinstance(summaries, list) else [summaries]


def measure(found: list[Pair]) -> tuple[Rouge, Rouge]:
    """The scores of the chosen sentences, and of as many first ones."""
    chosen, lead = [], []
    for low in range(0, len(found), BATCH):
        texts = [text for text, _ in found[low : low + BATCH]]
        for text, record in zip(texts, summarize(texts, attended=False), strict=True):
            count = sum(sentence.chosen for sentence in record.sentences)
            first = [text[slice(*span)] for span in prose_sentences(text)[:count]]
            chosen.append(record.text)
            lead.append(" ".join(first))
    references = [summaries for _, summaries in found]
    return rouge(chosen, references), rouge(lead, references)


def main(folder: str) -> None:
    torch.set_num_threads(1)
    for kind in KINDS:
        found = list(pairs(Path(folder), kind))[:MOST]
        cells = [" / ".join(f"{score:.1f}" for score in scores) for scores in measure(found)]
        print(f"| {kind}: {len(found)} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
