"""Attention on the CPU compared with PyTorch, in one run.

python benchmarks/cpu.py            all parts, a few minutes; appended to results/cpu.jsonl
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

import memory
from measure import append, argument_parser
from regard import Causal, Segments, attention, why
from regard.evaluation.speed import SEEN, Pair, eager, seconds

TOKENS, HEADS, DIM = 8192, 8, 64
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MASKS = {"full": None, "causal": Causal()}


def tensors(batch: int, length: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(batch, HEADS, length, DIM, dtype=dtype) for _ in range(3)]


def row(part: str, case: str, pair: Pair, wanted: str, value: float) -> dict[str, Any]:
    return {
        "part": part,
        "case": case,
        "ours_ms": pair.ours * 1e3,
        "peer_ms": pair.peer * 1e3,
        "value": value,
        "wanted": wanted,
    }


def plain() -> Iterator[dict[str, Any]]:
    for name, dtype in DTYPES.items():
        for length in (16, 64, 256, 1024, 2048, 4096, 8192):
            for kind, mask in MASKS.items():
                inputs = tensors(TOKENS // length, length, dtype)
                pair = seconds(
                    partial(attention, *inputs, mask=mask),
                    partial(sdpa, *inputs, is_causal=kind == "causal"),
                    budget=4,  # many rounds, to measure differences of a few percent
                )
                case = f"{name} n={length} {kind}"
                yield row("plain, speed / SDPA", case, pair, ">= 0.97", pair.speed)


def overhead() -> Iterator[dict[str, Any]]:
    inputs = tensors(1, 16)
    for kind, mask in MASKS.items():
        ours = partial(attention, *inputs, mask=mask)
        peer = partial(sdpa, *inputs, is_causal=kind == "causal")
        pair = seconds(partial(_repeat, ours), partial(_repeat, peer))
        added = (pair.ours - pair.peer) * 1e6 / 100
        case = f"n=16, batch 1, {kind}"
        yield row("added to a call, microseconds", case, pair, "<= 25", added)


def _repeat(call: partial[Any]) -> None:
    for _ in range(100):
        call()


def packed() -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    lengths: list[int] = []
    while sum(lengths) < TOKENS:
        lengths.append(min(int(torch.randint(16, 512, ())), TOKENS - sum(lengths)))
    q, k, v = tensors(1, TOKENS)
    padded = tensors(len(lengths), max(lengths))
    keep = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    triangle = torch.ones(max(lengths), max(lengths), dtype=torch.bool).tril()
    allowed = keep[:, None, None, :] & triangle
    for kind, mask, dense in (
        ("full", Segments(lengths), keep[:, None, None, :]),
        ("causal", Segments(lengths) & Causal(), allowed),
    ):
        pair = seconds(
            partial(attention, q, k, v, mask=mask), partial(sdpa, *padded, attn_mask=dense)
        )
        yield row("packed, speed / SDPA padded", kind, pair, "> 1", pair.speed)


def seeing() -> Iterator[dict[str, Any]]:
    for name, dtype in DTYPES.items():
        for length in (2048, 4096, 8192):
            for kind, mask in MASKS.items():
                inputs = tensors(1, length, dtype)
                causal = kind == "causal"
                ours = partial(attention, *inputs, mask=mask, see=SEEN)
                pair = seconds(ours, partial(sdpa, *inputs, is_causal=causal), budget=4)
                backend = why(*inputs, mask=mask, see=SEEN).chosen
                case = f"{name} n={length} {kind}, {backend}"
                yield row("seeing, cost / SDPA", case, pair, "<= 2.0", pair.cost)
                if length <= 4096:
                    pair = seconds(ours, partial(eager, *inputs, causal))
                    yield row("seeing, speed / eager weights", case, pair, "> 1", pair.speed)


def memory_while_seeing() -> Iterator[dict[str, Any]]:
    for kind, mask in MASKS.items():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            megabytes = pool.apply(_memory_above_inputs, (mask,))
        case = f"n=32768, 8 heads, {kind}"
        yield row("memory while seeing, MB", case, Pair(0, 0), "<= 300", megabytes)


def _memory_above_inputs(mask: Causal | None) -> float:
    """The peak memory above inputs and outputs, in MiB. Call this in a process of its own."""
    q, k, v = tensors(1, 32768)
    attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], mask=mask, see=SEEN)
    memory.reset_peak()
    before = memory.resident()
    output, seen = attention(q, k, v, mask=mask, see=SEEN)
    returned = sum(t.nbytes for t in (output, *seen.to_dict().values()))
    return memory.peak() - before - returned / 2**20


def main() -> None:
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    console = Console()
    for part in (plain, overhead, packed, seeing, memory_while_seeing):
        with console.status(f"{part.__name__} ..."):
            rows += part()
    table = Table("part", "case", "ours ms", "peer ms", "value", "wanted", box=None)
    for result in rows:
        times = [f"{result[key]:.3f}" for key in ("ours_ms", "peer_ms")]
        table.add_row(
            result["part"], result["case"], *times, f"{result['value']:.2f}", result["wanted"]
        )
    console.print(table)
    console.print(f"appended to {append('cpu', rows)}")


if __name__ == "__main__":
    argument_parser(__doc__).parse_args()
    main()
