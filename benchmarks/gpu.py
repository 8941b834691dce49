"""Speed and memory of attention on a GPU. Every line is also appended to results/gpu.jsonl.

    python benchmarks/gpu.py                 all parts, some minutes
    python benchmarks/gpu.py seeing host     some parts

Times are medians, in milliseconds. Ratios compare with the fastest of PyTorch's kernels in the same
run (cuDNN, flash): 1.00 is equally fast, and more is slower, except in columns named "faster".
"""

from __future__ import annotations

import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from measure import append, argument_parser, environment
from regard import Causal, See, Segments, Window, attention
from regard.kernels import passes as kernel_passes
from regard.kernels.hopper import launch as hopper
from regard.kernels.plan import Intermediates, Structure, Wanted
from regard.kernels.sizes import CAUSAL, FULL, PLAIN
from regard.mechanism.biases import Alibi, Bias, RelativeBuckets, RelativeContent
from regard.mechanism.masks import Mask

TOKENS = 32768
PEERS = (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION)
SHAPES = ((64, 32), (128, 16))  # width of a head, heads
LENGTHS = (512, 2048, 8192, 65536)
ROW_FIELDS = See(lse=True, entropy=True, peak=True, max_logit=True)
Rule = Callable[..., Tensor]  # a mask_mod or score_mod of FlexAttention
Call = Callable[..., Any]
EVERYTHING = See(
    lse=True, entropy=True, peak=True, max_logit=True, distance=True, received=True, map=64,
    map_peak=True,
)  # fmt: skip


def medians(*steps: Callable[[], object], budget: float = 300.0) -> list[float]:
    """The median milliseconds of device time of each step.

    The steps take turns, because the clock of the device falls as it heats up. Their order is
    random in each round, because the first step runs on an idle device. The cache is overwritten
    before each step. The device sleeps while the host launches a round, so that it does not wait
    for the host within the round. All rounds together take about ``budget`` milliseconds.
    """
    once = launch_time = 0.0
    for _ in range(2):  # the first time compiles
        start = time.perf_counter()
        for step in steps:
            step()
        launch_time = time.perf_counter() - start
        torch.cuda.synchronize()
        once = (time.perf_counter() - start) * 1e3
    cache = torch.empty(2**28, dtype=torch.int8, device="cuda")
    rounds = min(max(int(budget / once), 5 if once < 1000 else 1), 100)
    rng = random.Random(0)
    turns: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = [[] for _ in steps]
    for _ in range(rounds):
        torch.cuda._sleep(int(launch_time * 3e9))  # cycles, fewer than 2e9 a second
        for index in rng.sample(range(len(steps)), len(steps)):
            turns[index].append(_timed(steps[index], cache))
    torch.cuda.synchronize()
    return [statistics.median(begin.elapsed_time(end) for begin, end in times) for times in turns]


def _timed(step: Callable[[], object], cache: Tensor) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    cache.zero_()
    begin.record()
    step()
    end.record()
    return begin, end


def tensors(length: int, width: int, heads: int, count: int = 3) -> list[Tensor]:
    batch = max(TOKENS // length, 1)
    shape = (batch, heads, length, width)
    return [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(count)]


def backward_of(output: Tensor, leaves: list[Tensor], grad: Tensor) -> Callable[[], object]:
    """A function that runs the backward pass alone."""
    return lambda: torch.autograd.grad(output, leaves, grad, retain_graph=True)


Row = dict[str, Any]


def line(what: str, cell: str, **numbers: float) -> Row:
    """Print a line of results, and return it as a row."""
    shown = "  ".join(f"{name} {value:.3g}" for name, value in numbers.items())
    print(f"{what:<9} {cell:<28} {shown}", flush=True)
    return {"what": what, "cell": cell, "triton": triton.__version__, **numbers}


def fused(backend: SDPBackend, causal: bool) -> Call:
    """Attention by one of PyTorch's kernels."""

    def call(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, key, value, is_causal=causal)

    return call


def cells() -> list[tuple[str, int, int, int, bool]]:
    return [
        (f"d {width} n {length} {'causal' if causal else 'full'}", length, width, heads, causal)
        for width, heads in SHAPES
        for length in LENGTHS
        for causal in (False, True)
    ]


def plain_and_seeing(only: str = "") -> Iterator[Row]:
    """Plain calls of attention(), and calls that see."""
    for cell, length, width, heads, causal in cells():
        if only not in cell:
            continue
        given = tensors(length, width, heads)
        leaves = [t.detach().requires_grad_() for t in given]
        grad = torch.randn_like(given[0])
        plain: Call = partial(attention, mask=Causal() if causal else None)
        peers: list[Call] = [fused(backend, causal) for backend in PEERS]
        wanted = [ROW_FIELDS, EVERYTHING, replace(EVERYTHING, top=8)]
        calls: list[Call] = [*peers, plain, *(partial(plain, see=see) for see in wanted)]
        with torch.no_grad():
            *theirs, ours, rows, everything, top = medians(*(partial(c, *given) for c in calls))
        forward = min(theirs)

        def training(leaves=leaves, plain=plain, grad=grad) -> object:  # type: ignore[no-untyped-def]
            output, seen = plain(*leaves, see=EVERYTHING)
            grads = torch.autograd.grad(output, leaves, grad)
            return grads, seen.to_dict()  # computes the fields that the backward pass deferred

        *theirs, ours_backward, step = medians(
            *(backward_of(call(*leaves), leaves, grad) for call in (*peers, plain)), training
        )
        backward = min(theirs)
        operations = 4 * given[0].shape[0] * heads * length**2 * width / (2 if causal else 1)
        yield line(
            "seeing", cell, forward_ms=forward, tflops=operations / forward / 1e9,
            plain=ours / forward, backward=ours_backward / backward, rows=rows / forward,
            everything=everything / forward, top=top / forward,
            training=step / (forward + backward),
        )  # fmt: skip


def passes(only: str = "") -> Iterator[Row]:
    """Time each pass of the Hopper kernels in a call that sees its weights.

    The forward pass runs with statistics of rows (rows), with what all fields need (everything),
    and with the threshold of the top keys in addition (bar). The columns pass (second) computes its
    map, too, and the top pass (top) the top keys. The backward pass is compared with cuDNN's: while
    it computes the columns (backward), and without them (bare).
    """
    rows, columns = ("entropy", "peak", "max_logit"), ("received", "map", "map_peak")
    for cell, length, width, heads, causal in cells():
        if only not in cell:
            continue
        query, key, _ = given = tensors(length, width, heads)
        grad = torch.randn_like(query)
        kind = CAUSAL if causal else FULL
        form = Structure(kind, None, None, PLAIN, None, 0, width**-0.5, None)

        def planned(fields, top=0, given=given, form=form):  # type: ignore[no-untyped-def]
            wanted = Wanted(tuple(fields), (64, 64), top)
            return kernel_passes.plan_call(*given, form, wanted, hopper=True)

        wanted = (*rows, *columns, "distance")
        plan = planned(wanted, 8)
        with torch.no_grad():
            found, left = hopper.forward(*given, form, plan)
            lse = found["lse"]
            columns_left = Intermediates(left.neg_lse)
            top_left = Intermediates(top_threshold=left.top_threshold)

            def differentiate(fields, found=found, left=left, given=given, grad=grad, form=form):  # type: ignore[no-untyped-def]
                room = hopper.new_columns(*given[:2], planned(fields)) if fields else {}
                return hopper.backward(
                    *given, found["output"], grad, form, planned(columns), room, left.neg_lse
                )

            *theirs, some, everything, with_threshold, second, top = medians(
                *(partial(fused(backend, causal), *given) for backend in PEERS),
                partial(hopper.forward, *given, form, planned(rows)),
                partial(hopper.forward, *given, form, planned(wanted)),
                partial(hopper.forward, *given, form, plan),
                partial(kernel_passes.columns, query, key, lse, form, plan, columns_left),
                partial(kernel_passes.top, query, key, lse, form, plan, top_left),
            )  # fmt: skip
            cudnn, seeing, bare = medians(
                partial(kernel_passes.backward, *given, form, plan, found, {"output": grad}, False),
                partial(differentiate, columns), partial(differentiate, ()),
            )  # fmt: skip
        forward = min(theirs)
        yield line(
            "passes", cell, forward_ms=forward, rows=some / forward,
            everything=everything / forward, bar=with_threshold / forward, second=second / forward,
            top=top / forward, backward_ms=cudnn, backward=seeing / cudnn, bare=bare / cudnn,
        )  # fmt: skip


def structured(only: str = "") -> Iterator[Row]:
    """Masks and biases inside the kernel, compared with compiled FlexAttention."""
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
        if only not in cell:
            continue
        # The default blocks of FlexAttention do not fit a table with a gradient.
        options: Any = {"BLOCK_M": 64, "BLOCK_N": 64, "num_stages": 2} if bias is buckets else None
        block = create_block_mask(rule, None, None, length, length, device="cuda")
        leaves = [t.detach().requires_grad_() for t in (query, key, value)]
        wanted = [*leaves, table] if bias is buckets else leaves
        theirs = partial(flex, score_mod=change, block_mask=block, kernel_options=options)
        ours = partial(attention, mask=mask, bias=bias, backend="triton")
        with torch.no_grad():
            flex_forward, forward = medians(
                *(partial(c, query, key, value) for c in (theirs, ours))
            )
        flex_backward, backward = medians(
            *(backward_of(call(*leaves), wanted, grad) for call in (theirs, ours))
        )
        yield line(
            "structure", cell, forward_ms=forward, backward_ms=backward,
            faster=flex_forward / forward, faster_backward=flex_backward / backward,
        )  # fmt: skip


def transformer_xl() -> Iterator[Row]:
    """Transformer-XL's position term inside the kernel, compared with its dense n x n bias."""
    batch, heads, length, width = 4, 16, 4096, 64
    shape = (batch, heads, length, width)
    query, key, value, second, grad = (
        torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(5)
    )
    relative = torch.randn(heads, length, width, device="cuda", dtype=torch.bfloat16)
    leaves = [t.requires_grad_() for t in (query, key, value, second, relative)]
    future = torch.ones(length, length, dtype=torch.bool, device="cuda").triu(1)

    def dense() -> Tensor:
        product = second @ relative.flip(1).transpose(-1, -2) * width**-0.5
        padded = torch.nn.functional.pad(product, (1, 0)).view(batch, heads, length + 1, length)
        bias = padded[:, :, 1:].masked_fill(future, -torch.inf)
        return scaled_dot_product_attention(query, key, value, attn_mask=bias)

    def ours() -> Tensor:
        bias = RelativeContent(second, relative)
        return attention(query, key, value, mask=Causal(), bias=bias, backend="triton")

    with torch.no_grad():
        dense_forward, forward = medians(dense, ours)
    dense_backward, backward = medians(
        *(backward_of(call(), leaves, grad) for call in (dense, ours))
    )
    yield line(
        "relative", f"n {length} d {width}", forward_ms=forward, backward_ms=backward,
        faster=dense_forward / forward, faster_backward=dense_backward / backward,
    )  # fmt: skip


def short() -> Iterator[Row]:
    """Training on many short sequences with the biases of T5 and Transformer-XL, and without."""
    rows, heads, width = 256, 8, 64
    for cell, queries, keys in (("T5", 256, 256), ("T5", 128, 128), ("Transformer-XL", 256, 512)):
        query, second, grad = (
            torch.randn(rows, heads, queries, width, device="cuda", dtype=torch.bfloat16)
            for _ in range(3)
        )
        key, value = (
            torch.randn(rows, heads, keys, width, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        bias: Bias
        if cell == "T5":
            bias = RelativeBuckets(torch.randn(32, heads, device="cuda"))
        else:
            far = torch.randn(heads, keys, width, device="cuda", dtype=torch.bfloat16)
            bias = RelativeContent(second, far)
        mask = None if cell == "T5" else Causal()
        leaves = [t.requires_grad_() for t in (query, key, value, *bias.tensors)]
        calls = [partial(attention, query, key, value, mask=mask, bias=b) for b in (None, bias)]
        with torch.no_grad():
            plain, forward = medians(*calls)
        plain_backward, backward = medians(
            backward_of(calls[0](), leaves[:3], grad), backward_of(calls[1](), leaves, grad)
        )
        yield line(
            "short", f"{cell} {queries} x {keys}", forward_ms=forward, backward_ms=backward,
            forward=forward / plain, backward=backward / plain_backward,
            million_tokens_per_s=rows * queries / (forward + backward) / 1e3,
        )  # fmt: skip


def decoding() -> Iterator[Row]:
    """One query and many keys, plain and while seeing."""
    for heads, length in ((32, 131072), (8, 131072), (32, 8192)):
        query = torch.randn(1, heads, 1, 128, device="cuda", dtype=torch.bfloat16)
        key, value = (
            torch.randn(1, heads, length, 128, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        call = partial(attention, query, key, value)
        plain, seen, top = medians(
            call, partial(call, see=ROW_FIELDS), partial(call, see=See(top=8))
        )
        speed = 4 * key.numel() / seen / 1e9
        yield line(
            "decoding", f"keys {length} heads {heads}", plain_ms=plain, seeing_ms=seen, top_ms=top,
            tb_per_s=speed,
        )  # fmt: skip


def memory() -> Iterator[Row]:
    """Memory of seeing above inputs and outputs, at lengths where all weights do not fit."""
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
        yield line(
            "memory", f"n {length} heads {heads} d {width}", seconds=seconds, gib=above / 2**30
        )
        del output, query, key, value


def host() -> Iterator[Row]:
    """Microseconds that attention() adds on the host before it launches a plain kernel."""
    query, key, value = tensors(128, 64, 2)
    query, key, value = query[:1], key[:1], value[:1]

    def microseconds(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        for _ in range(200):
            call()
        torch.cuda.synchronize()
        return (time.perf_counter() - start) / 200 * 1e6

    calls = (
        lambda: scaled_dot_product_attention(query, key, value),
        lambda: attention(query, key, value),
        lambda: attention(query, key, value, see=ROW_FIELDS),
    )
    with torch.no_grad():  # in turns, because the clock of the host varies; the first warms up
        _, *rounds = ([microseconds(call) for call in calls] for _ in range(31))
    direct, ours, seen = map(statistics.median, zip(*rounds, strict=True))
    yield line("host", "n 128", direct_us=direct, ours_us=ours, added_us=ours - direct, see_us=seen)


PARTS = {
    "host": host,
    "memory": memory,
    "short": short,
    "relative": transformer_xl,
    "decoding": decoding,
    "seeing": plain_and_seeing,
    "passes": passes,
    "structure": structured,
}
BY_CELLS = (plain_and_seeing, passes, structured)


def main() -> None:
    options = argument_parser(__doc__)
    options.add_argument(
        "parts", nargs="*", help=f"some of {', '.join(PARTS)}; all if none is named"
    )
    options.add_argument(
        "--cell",
        default="",
        metavar="TEXT",
        help="only cells of seeing, passes and structure whose names contain TEXT",
    )
    given = options.parse_args()
    names = given.parts
    if unknown := set(names) - set(PARTS):
        options.error(f"There is no part {', '.join(unknown)}. Name some of {', '.join(PARTS)}.")
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA device.")
    torch.manual_seed(0)
    print("  ".join(f"{name} {value}" for name, value in environment().items()))
    for name, part in PARTS.items():
        if not names or name in names:
            rows = part(given.cell) if part in BY_CELLS else part()
            for row in rows:  # each at once, so that an error later loses none
                append("gpu", [row])


if __name__ == "__main__":
    main()
