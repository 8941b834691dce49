"""A decoding step of a Llama with random weights, plain and watched.

python benchmarks/watching.py --rounds 40

The two take turns, a few steps each, and the least processor time of the rounds is kept: other load
on the machine changes it the least. Appended to results/watching.jsonl.
"""

from __future__ import annotations

import copy
import time
from contextlib import nullcontext
from typing import Any

import torch
import transformers

from measure import append, argument_parser
from regard import See, watch

LAYERS, HEADS, WIDTH = 6, 8, 64
STEPS = 6  # of a turn
SEE = See(entropy=True, received=True)
CASES = [(how, keys) for how in ("sdpa", "eager", "regard") for keys in (64, 1024)]


def model_of(how: str) -> Any:
    config = transformers.LlamaConfig(
        vocab_size=1000, hidden_size=HEADS * WIDTH, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, intermediate_size=4 * HEADS * WIDTH,
    )  # fmt: skip
    config._attn_implementation = how
    return transformers.LlamaForCausalLM(config).eval()


@torch.no_grad()
def measure(how: str, keys: int, rounds: int) -> dict[str, Any]:
    torch.manual_seed(0)
    model, ids = model_of(how), torch.randint(3, 1000, (1, keys))
    prompt = model(ids, use_cache=True).past_key_values
    turns: dict[str, list[float]] = {"plain": [], "watched": []}
    for _ in range(rounds):
        cache = copy.deepcopy(prompt)
        for name, seconds in turns.items():
            with watch(model, SEE) if name == "watched" else nullcontext():
                started = time.process_time()
                for _ in range(STEPS):
                    model(ids[:, :1], past_key_values=cache, use_cache=True)
                seconds.append(time.process_time() - started)
    plain, watched = (min(seconds) * 1000 / STEPS / LAYERS for seconds in turns.values())
    row = {"case": "decoding step", "attention": how, "layers": LAYERS, "heads": HEADS}
    return row | {"width": WIDTH, "keys": keys, "plain_ms": plain, "more_ms": watched - plain}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    for how, keys in CASES:
        row = measure(how, keys, rounds)
        print(
            f"{how:<6} {keys:>5} keys: {row['plain_ms']:.2f} ms a layer, "
            f"watched {row['more_ms']:.2f} more",
            flush=True,
        )
        append("watching", [row])


if __name__ == "__main__":
    main()
