"""A look at a long text: what was announced beside what it took.

python benchmarks/looking.py books-gpt2 BOOK.txt --tokens 100000

Appended to results/looking.jsonl.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

import memory
from measure import append, argument_parser
from regard import Tokenizer, load, look
from regard.interpret.cost import Plan


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
    look(model, text[:3000], tokenizer=tokenizer)  # what is loaded once does not count
    found: dict[str, Any] = {}

    def before(plan: Plan) -> None:
        print(plan, flush=True)
        found.update(plan=plan, started=time.perf_counter())

    memory.reset_peak()
    already = memory.resident()
    look(model, text, tokenizer=tokenizer, before=before)
    plan: Plan = found["plan"]
    row = {
        "model": given.model,
        "tokens": plan.tokens,
        "estimated_s": plan.seconds,
        "measured_s": time.perf_counter() - found["started"],
        "estimated_mb": plan.memory / 2**20,
        "measured_mb": memory.peak() - already,
    }
    print(", ".join(f"{name} {value:,.1f}" for name, value in list(row.items())[1:]))
    append("looking", [row])


if __name__ == "__main__":
    main()
