"""Speed and memory on a GPU: one run, one table; every line is also appended as JSON.

    python benchmarks/gpu.py                  all of it, some minutes
    python benchmarks/gpu.py seeing host     some of it

Times are medians, in milliseconds. Ratios compare with the best of PyTorch's own kernels in the
same run (cuDNN, flash): 1.00 is as fast, larger is slower, save where a column says "faster".
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from regard import Causal, See, Segments, Window, attention
from regard.mechanism.biases import Alibi, Bias, RelativeBuckets
from regard.mechanism.masks import Mask

RESULTS = Path(__file__).parent / "results" / "gpu.jsonl"
TOKENS = 32768
SHAPES = ((64, 32), (128, 16))  # width of a head, heads
LENGTHS = (512, 2048, 8192, 65536)
ROW_FIELDS = See(lse=True, entropy=True, peak=True, max_logit=True)
Rule = Callable[..., Tensor]  # as FlexAttention takes it
EVERYTHING = See(
    lse=True, entropy=True, peak=True, max_logit=True, distance=True, received=True, map=64,
    map_peak=True,
)  # fmt: skip


def median(step: Callable[[], object], budget: int = 60) -> float:
    """Milliseconds of device time, after warming up."""
    return float(triton.testing.do_bench(step, warmup=20, rep=budget, return_mode="median"))


def tensors(length: int, width: int, heads: int, count: int = 3) -> list[Tensor]:
    batch = max(TOKENS // length, 1)
    shape = (batch, heads, length, width)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


class Report:
    """Lines for the reader, and the same lines as JSON for the record."""

    def __init__(self) -> None:
        commit = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        ).stdout.strip()
        self.run = {
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
            "commit": commit or "unknown",
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "triton": triton.__version__,
        }
        RESULTS.parent.mkdir(exist_ok=True)
        print("  ".join(f"{name} {value}" for name, value in self.run.items()))

    def line(self, what: str, cell: str, **numbers: float) -> None:
        shown = "  ".join(f"{name} {value:.3g}" for name, value in numbers.items())
        print(f"{what:<9} {cell:<28} {shown}", flush=True)
        with RESULTS.open("a") as file:
            file.write(json.dumps(self.run | {"what": what, "cell": cell} | numbers) + "\n")


def best_plain(query: Tensor, key: Tensor, value: Tensor, causal: bool) -> tuple[float, float]:
    """The fastest of PyTorch's kernels, forward and backward, chosen apart."""
    grad = torch.randn_like(query)
    leaves = [t.detach().requires_grad_() for t in (query, key, value)]
    forward, backward = [], []
    for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            with torch.no_grad():
                forward.append(
                    median(
                        lambda: scaled_dot_product_attention(query, key, value, is_causal=causal)
                    )
                )
            output = scaled_dot_product_attention(*leaves, is_causal=causal)
            backward.append(
                median(lambda o=output: torch.autograd.grad(o, leaves, grad, retain_graph=True))
            )
    return min(forward), min(backward)


def cells() -> list[tuple[str, int, int, int, bool]]:
    return [
        (f"d {width} n {length} {'causal' if causal else 'full'}", length, width, heads, causal)
        for width, heads in SHAPES
        for length in LENGTHS
        for causal in (False, True)
    ]


def plain_and_seeing(report: Report) -> None:
    """Plain calls through attention(), and what seeing adds to them."""
    for cell, length, width, heads, causal in cells():
        query, key, value = tensors(length, width, heads)
        mask = Causal() if causal else None
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        grad = torch.randn_like(query)
        forward, backward = best_plain(query, key, value, causal)

        def seeing(see: See, query=query, key=key, value=value, mask=mask) -> Callable[[], object]:
            return lambda: attention(query, key, value, mask=mask, see=see)

        def training(leaves=leaves, mask=mask, grad=grad) -> object:
            output, _ = attention(*leaves, mask=mask, see=EVERYTHING)
            return torch.autograd.grad(output, leaves, grad)

        with torch.no_grad():
            ours = median(lambda q=query, k=key, v=value, m=mask: attention(q, k, v, mask=m))
            rows, everything = median(seeing(ROW_FIELDS)), median(seeing(EVERYTHING))
        output = attention(*leaves, mask=mask)
        ours_backward = median(
            lambda o=output, x=leaves, g=grad: torch.autograd.grad(o, x, g, retain_graph=True)
        )
        step = median(training)
        operations = 4 * query.shape[0] * heads * length**2 * width / (2 if causal else 1)
        report.line(
            "seeing", cell, forward_ms=forward, tflops=operations / forward / 1e9,
            plain=ours / forward, backward=ours_backward / backward, rows=rows / forward,
            everything=everything / forward, training=step / (forward + backward),
        )  # fmt: skip


def structured(report: Report) -> None:
    """Masks and biases inside the kernel, against compiled FlexAttention."""
    length, width, heads = 8192, 64, 32
    query, key, value = tensors(length, width, heads)
    grad = torch.randn_like(query)
    slopes = Alibi.standard(heads, device="cuda").slopes
    table = torch.randn(32, heads, device="cuda", requires_grad=True)
    buckets = RelativeBuckets(table, False, 128)
    by_distance = torch.arange(length, device="cuda")
    bucket_of = buckets.bucket(by_distance)
    segment = torch.arange(length, device="cuda") // 1024

    def causal(_b, _h, q, k):  # type: ignore[no-untyped-def]
        return q >= k

    def window(_b, _h, q, k):  # type: ignore[no-untyped-def]
        return (q >= k) & (q - k <= 1024)

    def packed(_b, _h, q, k):  # type: ignore[no-untyped-def]
        return (q >= k) & (segment[q] == segment[k])

    def with_slopes(score, _b, h, q, k):  # type: ignore[no-untyped-def]
        return score - slopes[h] * (q - k)

    def with_buckets(score, _b, h, q, k):  # type: ignore[no-untyped-def]
        return score + table[bucket_of[(q - k).abs()], h]

    cases: list[tuple[str, Mask, Bias | None, Rule, Rule | None]] = [
        ("Window(1024)", Causal() & Window(1024), None, window, None),
        ("Segments of 1024", Causal() & Segments([1024] * 8), None, packed, None),
        ("Alibi", Causal(), Alibi(slopes), causal, with_slopes),
        ("T5 buckets, table gradient", Causal(), buckets, causal, with_buckets),
    ]
    flex = torch.compile(flex_attention, dynamic=False)
    for cell, mask, bias, rule, change in cases:
        # FlexAttention's own choice of blocks does not fit a table that wants a gradient.
        options = {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2} if bias is buckets else None
        block = create_block_mask(rule, None, None, length, length, device="cuda")
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        wanted = [*leaves, table] if bias is buckets else leaves
        times = []
        for call in (
            lambda q, k, v, b=block, c=change, o=options: flex(
                q, k, v, score_mod=c, block_mask=b, kernel_options=o
            ),
            lambda q, k, v, m=mask, b=bias: attention(q, k, v, mask=m, bias=b, backend="triton"),
        ):
            with torch.no_grad():
                forward = median(lambda f=call: f(query, key, value))
            output = call(*leaves)
            backward = median(
                lambda o=output, w=wanted: torch.autograd.grad(o, w, grad, retain_graph=True)
            )
            times.append((forward, backward))
        (flex_forward, flex_backward), (forward, backward) = times
        report.line(
            "structure", cell, forward_ms=forward, backward_ms=backward,
            faster=flex_forward / forward, faster_backward=flex_backward / backward,
        )  # fmt: skip


def memory(report: Report) -> None:
    """What seeing takes above inputs and outputs, at lengths where dense weights cannot exist."""
    for length, heads, width in ((131072, 16, 128), (1_000_000, 1, 128)):
        query, key, value = tensors(length, width, heads)
        attention(query, key, value, mask=Causal(), see=EVERYTHING)  # compiles
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start = time.perf_counter()
        output, _ = attention(query, key, value, mask=Causal(), see=EVERYTHING)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        above = torch.cuda.max_memory_allocated() - before - output.numel() * output.element_size()
        report.line(
            "memory", f"n {length} heads {heads} d {width}", seconds=seconds, gib=above / 2**30
        )
        del output, query, key, value


def host(report: Report) -> None:
    """What attention() adds on the host before a plain kernel is launched, in microseconds."""
    query, key, value = tensors(128, 64, 2)
    query, key, value = query[:1], key[:1], value[:1]

    def microseconds(call: Callable[[], object]) -> float:
        for _ in range(200):
            call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(2000):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 2000 * 1e6

    with torch.no_grad():
        direct = microseconds(lambda: scaled_dot_product_attention(query, key, value))
        ours = microseconds(lambda: attention(query, key, value))
        seen = microseconds(lambda: attention(query, key, value, see=ROW_FIELDS))
    report.line(
        "host", "n 128", direct_us=direct, ours_us=ours, added_us=ours - direct, see_us=seen
    )


PARTS = {"host": host, "memory": memory, "seeing": plain_and_seeing, "structure": structured}


def main(names: list[str]) -> None:
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py measures a CUDA device, and there is none here.")
    unknown = set(names) - set(PARTS)
    if unknown:
        sys.exit(f"There is no part {', '.join(unknown)}. Name some of {', '.join(PARTS)}.")
    torch.manual_seed(0)
    report = Report()
    for name, part in PARTS.items():
        if not names or name in names:
            part(report)


if __name__ == "__main__":
    main(sys.argv[1:])
