"""GPT-2 124M on a GPU beside transformers, with the same random weights.

python benchmarks/decoding_gpu.py            decoding and training; appended to results/
python benchmarks/decoding_gpu.py decoding   one of the two
python benchmarks/decoding_gpu.py --tiny     a small form of both, on any machine; nothing is kept

Decoding is greedy, batch 1; our steps are CUDA graphs, transformers is as it comes. Training is
one step (forward, backward, AdamW) in bfloat16 at 1024 tokens, both compiled and both not.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import cross_entropy

from measure import append, seconds
from regard import GPT2, generate, load
from regard.models.replaying import Replayed

TINY = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300}


def pair(device: str, dtype: torch.dtype, tiny: bool) -> tuple[GPT2, Any]:
    """Our GPT-2 and theirs, with the same weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**(TINY if tiny else {}))
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    reference = transformers.GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        ours = load(Path(folder), device=device, dtype=dtype)
    assert isinstance(ours, GPT2)
    return ours, reference.to(device=device, dtype=dtype).eval()


def wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def waited(function: Callable[[], object]) -> Callable[[], object]:
    """The function, done when the device is."""

    def run() -> object:
        result = function()
        wait()
        return result

    return run


def decoding(device: str, tiny: bool) -> list[dict[str, Any]]:
    """Greedy, one prompt of 16 tokens and 128 new ones."""
    new = 16 if tiny else 128
    prompt = list(range(100, 116))
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = pair(device, dtype, tiny)
        fast = Replayed(ours)
        ids = torch.tensor([prompt], device=device)
        options = {
            "max_new_tokens": new,
            "min_new_tokens": new,
            "do_sample": False,
            "pad_token_id": 0,
            "attention_mask": torch.ones_like(ids),
        }
        mine = generate(fast, [prompt], length=new, batch=1)[0][0].ids
        wanted = theirs.generate(ids, **options)[0, len(prompt) :].tolist()
        times = seconds(
            waited(lambda: generate(fast, [prompt], length=new, batch=1)),  # noqa: B023
            waited(lambda: theirs.generate(ids, **options)),  # noqa: B023
            budget=0.1 if tiny else 4.0,
        )
        plain = seconds(
            waited(lambda: generate(fast, [prompt], length=new, batch=1)),  # noqa: B023
            waited(lambda: generate(ours, [prompt], length=new)),  # noqa: B023
            budget=0.1 if tiny else 1.0,
        )
        found.append(
            {
                "case": "GPT-2 124M, greedy, batch 1",
                "dtype": str(dtype).removeprefix("torch."),
                "ours_tokens_per_second": new / times.ours,
                "transformers_tokens_per_second": new / times.peer,
                "speed": times.speed,
                "graphs_gain": plain.speed,
                "same_tokens": sum(a == b for a, b in zip(mine, wanted, strict=True)) / new,
            }
        )
    return found


def training(device: str, tiny: bool) -> list[dict[str, Any]]:
    """One step of 1024 tokens a sequence."""
    batch, length = (2, 32) if tiny else (16, 1024)
    found = []
    for compiled in (False, True):
        ours, theirs = pair(device, torch.float32, tiny)
        ids = torch.randint(300, (batch, length + 1), device=device)
        steps = []
        for model, logits in ((ours, _plain), (theirs, _theirs)):
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
            forward = torch.compile(model) if compiled else model
            steps.append(waited(_step(forward, logits, optimizer, ids, device)))
        times = seconds(*steps, budget=0.1 if tiny else 5.0)
        tokens = batch * length
        found.append(
            {
                "case": f"GPT-2 124M, training, batch {batch} x {length}",
                "compiled": compiled,
                "ours_tokens_per_second": tokens / times.ours,
                "transformers_tokens_per_second": tokens / times.peer,
                "speed": times.speed,
            }
        )
    return found


def _plain(forward: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = forward(ids)
    return logits


def _theirs(forward: Any, ids: torch.Tensor) -> torch.Tensor:
    logits: torch.Tensor = forward(ids, use_cache=False).logits
    return logits


def _step(
    forward: Any,
    logits: Callable[[Any, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    device: str,
) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            scores = logits(forward, ids[:, :-1])
            loss = cross_entropy(scores.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("parts", nargs="*", default=["decoding", "training"])
    parser.add_argument("--tiny", action="store_true", help="a small form, nothing is kept")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for part in given.parts:
        rows = {"decoding": decoding, "training": training}[part](device, given.tiny)
        for row in rows:
            print(row)
        if not given.tiny:
            append(f"{part}_gpu", rows)


if __name__ == "__main__":
    main()
