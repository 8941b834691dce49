"""attn_implementation="regard" of transformers beside "sdpa": a forward pass and a decoding step.

python benchmarks/attention_implementation.py --rounds 9

A small Llama with random weights. The two take turns, so that other load slows both, and the
median of the rounds is kept. Appended to results/attention_implementation.jsonl.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import transformers

import regard  # noqa: F401 - makes the attention known to transformers
from measure import append, argument_parser

IMPLEMENTATIONS = ("sdpa", "regard")
NEW = 24  # tokens that are generated
# What runs, the batch, the length, the side of the padding of every other text, and the cache.
CASES = [
    ("forward", 1, 32, "", ""),
    ("forward", 1, 512, "", ""),
    ("forward", 4, 512, "left", ""),
    ("forward", 4, 512, "right", ""),
    ("training", 4, 256, "right", ""),
    ("decoding", 1, 64, "", "dynamic"),
    ("decoding", 1, 512, "", "dynamic"),
    ("decoding", 4, 256, "left", "dynamic"),
    ("decoding", 1, 256, "", "static"),
    ("decoding", 4, 256, "left", "static"),
]


def run(model: Any, kind: str, ids: torch.Tensor, mask: torch.Tensor, cache: str) -> float:
    """The seconds of a forward pass, of a step of training, or of a decoding step."""
    started = time.perf_counter()
    if kind == "training":
        model(ids, attention_mask=mask, labels=ids).loss.backward()
        model.zero_grad()
    elif kind == "forward":
        with torch.no_grad():
            model(ids, attention_mask=mask)
    else:
        model.generate(
            ids, attention_mask=mask, max_new_tokens=NEW, min_new_tokens=NEW, do_sample=False,
            cache_implementation=cache,
        )  # fmt: skip
    seconds = time.perf_counter() - started
    return seconds / NEW if kind == "decoding" else seconds


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=256, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, intermediate_size=512,
    )  # fmt: skip
    torch.manual_seed(0)
    models = {
        name: transformers.LlamaForCausalLM._from_config(config, attn_implementation=name).eval()
        for name in IMPLEMENTATIONS
    }
    rows = []
    for kind, batch, length, side, cache in CASES:
        ids = torch.randint(3, 1000, (batch, length))
        mask = torch.ones_like(ids)
        if side:
            mask[::2, : length // 4] = 0
            mask = mask if side == "left" else mask.flip(1)
        times: dict[str, list[float]] = {name: [] for name in models}
        for _ in range(rounds + 1):  # the first is a warm-up
            for name, model in models.items():
                times[name].append(run(model, kind, ids, mask, cache))
        medians = {f"{name}_ms": statistics.median(times[name][1:]) * 1e3 for name in models}
        row = {"case": kind, "batch": batch, "length": length, "padding": side, "cache": cache}
        row |= medians | {"ratio": medians["regard_ms"] / medians["sdpa_ms"]}
        print(", ".join(f"{v:.2f}" if isinstance(v, float) else str(v) for v in row.values()))
        rows.append(row)
    append("attention_implementation", rows)


if __name__ == "__main__":
    main()
