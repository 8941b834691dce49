"""The mechanism on this machine's CPU, against PyTorch, in one run.

python benchmarks/cpu.py            all of it, a few minutes; appended to results/cpu.jsonl
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from measure import Pair, append, described, forget_peak, held, seconds
from regard import Causal, Segments, attention, why
from regard.evaluation.speed import SEEN, eager

TOKENS, HEADS, DIM = 8192, 8, 64


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
    for dtype in (torch.float32, torch.bfloat16):
        for length in (16, 64, 256, 1024, 2048, 4096, 8192):
            for mask in (None, Causal()):
                q, k, v = tensors(TOKENS // length, length, dtype)
                causal = mask is not None
                pair = seconds(
                    lambda q=q, k=k, v=v, mask=mask: attention(q, k, v, mask=mask),
                    lambda q=q, k=k, v=v, causal=causal: sdpa(q, k, v, is_causal=causal),
                    budget=4,  # a few per cent are told apart only by many rounds
                )
                case = f"{_name(dtype)} n={length} {'causal' if causal else 'full'}"
                yield row("plain, speed / SDPA", case, pair, ">= 0.97", pair.speed)


def overhead() -> Iterator[dict[str, Any]]:
    q, k, v = tensors(1, 16)
    for mask in (None, Causal()):
        causal = mask is not None
        pair = seconds(
            lambda mask=mask: [attention(q, k, v, mask=mask) for _ in range(100)],
            lambda causal=causal: [sdpa(q, k, v, is_causal=causal) for _ in range(100)],
        )
        case = f"n=16, batch 1, {'causal' if causal else 'full'}"
        added = (pair.ours - pair.peer) * 1e6 / 100
        yield row("added to a call, microseconds", case, pair, "<= 25", added)


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
    for case, mask, dense in (
        ("full", Segments(lengths), keep[:, None, None, :]),
        ("causal", Segments(lengths) & Causal(), allowed),
    ):
        pair = seconds(
            lambda mask=mask: attention(q, k, v, mask=mask),
            lambda dense=dense: sdpa(*padded, attn_mask=dense),
        )
        yield row("packed, speed / SDPA padded", case, pair, "> 1", pair.speed)


def seeing() -> Iterator[dict[str, Any]]:
    for dtype in (torch.float32, torch.bfloat16):
        for length in (2048, 4096, 8192):
            for mask in (None, Causal()):
                q, k, v = tensors(1, length, dtype)
                causal = mask is not None
                pair = seconds(
                    lambda q=q, k=k, v=v, mask=mask: attention(q, k, v, mask=mask, see=SEEN),
                    lambda q=q, k=k, v=v, causal=causal: sdpa(q, k, v, is_causal=causal),
                    budget=4,
                )
                backend = why(q, k, v, mask=mask, see=SEEN).chosen
                case = f"{_name(dtype)} n={length} {'causal' if causal else 'full'}, {backend}"
                yield row("seeing, cost / SDPA", case, pair, "<= 2.0", pair.cost)
                if length <= 4096:
                    pair = seconds(
                        lambda q=q, k=k, v=v, mask=mask: attention(q, k, v, mask=mask, see=SEEN),
                        lambda q=q, k=k, v=v, causal=causal: eager(q, k, v, causal),
                    )
                    yield row("seeing, speed / eager weights", case, pair, "> 1", pair.speed)


def memory() -> Iterator[dict[str, Any]]:
    for mask in (None, Causal()):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            megabytes = pool.apply(_peak, (mask,))
        case = f"n=32768, 8 heads, {'full' if mask is None else 'causal'}"
        yield row("memory while seeing, MB", case, Pair(0, 0), "<= 300", megabytes)


def _peak(mask: Causal | None) -> float:
    """Megabytes above inputs and outputs, in a process of its own."""
    q, k, v = tensors(1, 32768)
    attention(q[:, :, :256], k[:, :, :256], v[:, :, :256], mask=mask, see=SEEN)
    forget_peak()
    before = held("VmRSS")
    output, seen = attention(q, k, v, mask=mask, see=SEEN)
    returned = sum(t.nbytes for t in (output, *seen.to_dict().values()))
    return held("VmHWM") - before - returned / 2**20


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def main() -> None:
    torch.set_grad_enabled(False)
    rows: list[dict[str, Any]] = []
    console = Console()
    for part in (plain, overhead, packed, seeing, memory):
        with console.status(f"{part.__name__} ..."):
            rows += part()
    table = Table("part", "case", "ours ms", "peer ms", "value", "wanted", box=None)
    for found in rows:
        times = [f"{found[key]:.3f}" for key in ("ours_ms", "peer_ms")]
        table.add_row(
            found["part"], found["case"], *times, f"{found['value']:.2f}", found["wanted"]
        )
    console.print(table)
    console.print(f"appended to {append('cpu', rows)}")


if __name__ == "__main__":
    described(__doc__).parse_args()
    main()
