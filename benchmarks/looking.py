"""A look at a long text: its estimated and its measured cost.

python benchmarks/looking.py books-gpt2 BOOK.txt --tokens 100000

Appended to results/looking.jsonl.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch

import memory
from measure import append, argument_parser
from regard import Tokenizer, load, look
from regard.interpret.cost import CostEstimate


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model")
    parser.add_argument("file", type=Path)
    parser.add_argument("--tokens", type=int, default=100_000)
    given = parser.parse_args()
    model, tokenizer = load(given.model, dtype=torch.float32), Tokenizer.load(given.model)
    text = given.file.read_text(encoding="utf-8")
    spans = tokenizer.encode(text, special=False).offsets[: given.tokens]
    text = text[: spans[-1][1]]
    look(model, text[:3000], tokenizer=tokenizer)  # to warm up
    estimates: list[tuple[CostEstimate, float]] = []

    def on_estimate(cost: CostEstimate) -> None:
        print(cost, flush=True)
        estimates.append((cost, time.perf_counter()))

    memory.reset_peak()
    already = memory.resident()
    look(model, text, tokenizer=tokenizer, on_estimate=on_estimate)
    [(cost, started)] = estimates
    row = {
        "model": given.model,
        "tokens": cost.tokens,
        "estimated_s": cost.seconds,
        "measured_s": time.perf_counter() - started,
        "estimated_mb": cost.memory / 2**20,
        "measured_mb": memory.peak() - already,
    }
    print(", ".join(f"{name} {value:,.1f}" for name, value in list(row.items())[1:]))
    append("looking", [row])


if __name__ == "__main__":
    main()
