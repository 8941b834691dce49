"""Decoding on this machine's CPU, against transformers, with the same weights in one run.

python benchmarks/decoding.py            all of it, some minutes; appended to results/decoding.jsonl
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from measure import Pair, append, seconds
from regard import GPT2, Beam, Transformer, generate, load

PAD, END = 31999, 0


def translation(batch: int, new: int = 32) -> Pair:
    """Transformer-base, beam 4, sentences of 15 to 35 tokens, sorted by length on both sides."""
    torch.manual_seed(0)
    reference = transformers.MarianMTModel(
        transformers.MarianConfig(
            vocab_size=32000,
            d_model=512,
            encoder_layers=6,
            decoder_layers=6,
            encoder_attention_heads=8,
            decoder_attention_heads=8,
            encoder_ffn_dim=2048,
            decoder_ffn_dim=2048,
            activation_function="relu",
            scale_embedding=True,
            pad_token_id=PAD,
            eos_token_id=END,
            decoder_start_token_id=PAD,
            forced_eos_token_id=None,
        )
    ).eval()
    ours = _same(reference)
    assert isinstance(ours, Transformer)
    rng = random.Random(0)
    rows = [[rng.randrange(1, 31000) for _ in range(rng.randint(15, 35))] for _ in range(batch)]
    rows.sort(key=len, reverse=True)
    longest = len(rows[0])
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    options = {"max_new_tokens": new, "num_beams": 4, "do_sample": False}
    return seconds(
        lambda: generate(ours, rows, Beam(4), length=new, stop=[END]),
        lambda: reference.generate(ids, attention_mask=(ids != PAD).long(), **options),
    )


def completion(new: int = 64) -> Pair:
    """GPT-2 124M, greedy, one prompt of 16 tokens."""
    torch.manual_seed(0)
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    ours = _same(reference)
    assert isinstance(ours, GPT2)
    prompt = list(range(100, 116))
    ids = torch.tensor([prompt])
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return seconds(
        lambda: generate(ours, [prompt], length=new),
        lambda: reference.generate(ids, attention_mask=torch.ones_like(ids), **options),
    )


def _same(reference: transformers.PreTrainedModel) -> torch.nn.Module:
    """Our model with their weights."""
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        return load(folder)


def rows() -> Iterator[dict[str, Any]]:
    for case, pair in (
        ("GPT-2 124M, greedy, batch 1", completion()),
        ("transformer-base, beam 4, batch 1", translation(1)),
        ("transformer-base, beam 4, batch 32", translation(32)),
    ):
        yield {
            "case": case,
            "ours_ms": pair.ours * 1e3,
            "transformers_ms": pair.peer * 1e3,
            "speed": pair.speed,
        }


def main() -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    table = Table("case", "ours, ms", "transformers, ms", "speed")
    found = []
    for row in rows():
        found.append(row)
        numbers = (row["ours_ms"], row["transformers_ms"])
        table.add_row(row["case"], *(f"{number:,.0f}" for number in numbers), f"{row['speed']:.2f}")
    Console().print(table)
    append("decoding", found)


if __name__ == "__main__":
    main()
