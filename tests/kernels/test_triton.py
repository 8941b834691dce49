"""The Triton kernels against the reference: at real sizes on a GPU, at small sizes elsewhere.

Without a GPU every kernel runs in Triton's interpreter, which conftest.py enables. Its bfloat16 is
wrong, so float16 takes its place there. It is slow, so sizes there are just larger than a tile.
``make test`` runs a core of the cases, with the gradients of each kind of mask, each bias and each
field; ``make test-kernels`` runs more, the sweep.
"""

from __future__ import annotations

import importlib.util
import math
import os
import subprocess
import sys
import weakref
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils._python_dispatch import TorchDispatchMode

from helpers import kernel_cases
from helpers.kernel_cases import CUDA, cases
from regard import Causal, Padding, Prefix, See, Segments, Window, attention
from regard.errors import BackendError, InputError
from regard.mechanism import masks
from regard.mechanism.backends import lowering, reference
from regard.mechanism.backends import triton as triton_backend
from regard.mechanism.biases import Alibi, Bias, RelativeBuckets, RelativeContent
from regard.mechanism.call import Call, check
from regard.mechanism.geometry import Tile
from regard.mechanism.masks import Mask
from regard.mechanism.seeing import Seen

if importlib.util.find_spec("triton") is None:
    pytest.skip("Triton, which needs Linux, is not installed.", allow_module_level=True)

pytestmark = pytest.mark.kernels

DEVICE = "cuda" if CUDA else "cpu"
BATCH, HEADS, KEY_HEADS = 2, 4 if CUDA else 2, 2 if CUDA else 1
QUERIES, KEYS = (1000, 1100) if CUDA else (36, 44)
LOW = (torch.bfloat16, torch.float16) if CUDA else (torch.float16,)
DTYPES = (*LOW, torch.float32)

if CUDA:  # cuBLAS needs this, before its first product, for deterministic PyTorch
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

EVERYTHING = See(
    lse=True, entropy=True, peak=True, max_logit=True, distance=True, received=True,
    rows=[3, -1, 4, 0], map=(8, 5), map_peak=True,
)  # fmt: skip
SMOOTH = ("lse", "entropy", "distance", "received", "rows", "map")  # those with a gradient


def run(call: Call) -> tuple[Tensor, Seen | None]:
    """Run the kernels. In the interpreter ``refuses`` is not asked: it would require a GPU."""
    assert triton_backend.unsupported(call) is None
    if CUDA and call.see is not None:
        assert triton_backend.refuses(call) is None
    return triton_backend.run(call)


def parts(*lengths: float) -> list[int]:
    """Return the lengths of sequences with these shares of the keys, and of the rest."""
    sizes = [max(1, int(KEYS * share)) for share in lengths]
    return [*sizes, KEYS - sum(sizes)]


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def buckets(queries: int, dtype: torch.dtype, bidirectional: bool = True) -> Bias:
    return RelativeBuckets(random(16, HEADS, seed=9), bidirectional, 100 if CUDA else 20)


def causal_buckets(queries: int, dtype: torch.dtype) -> Bias:
    return buckets(queries, dtype, bidirectional=False)


def alibi(queries: int, dtype: torch.dtype) -> Bias:
    return Alibi.standard(HEADS, device=DEVICE)


def content(queries: int, dtype: torch.dtype) -> Bias:
    """A bias with embeddings for some distances; larger distances take the nearest embedding."""
    second = random(BATCH, HEADS, queries, 24, seed=7, dtype=dtype)
    return RelativeContent(second, random(1, KEYS // 2, 24, seed=8, dtype=dtype), -KEYS // 5)


def causal_content(queries: int, dtype: torch.dtype) -> Bias:
    second = random(BATCH, HEADS, queries, 32, seed=7, dtype=dtype)
    return RelativeContent(second, random(HEADS, KEYS, 32, seed=8, dtype=dtype), scale=0.1)


def no_bias(queries: int, dtype: torch.dtype) -> None:
    return None


Structure = tuple[Mask | None, Callable[[int, torch.dtype], Bias | None], float | None]

STRUCTURES: dict[str, Structure] = {
    "full": (None, no_bias, None),
    "causal": (Causal(), no_bias, None),
    "window": (Window(KEYS // 4, KEYS // 9), no_bias, None),
    "prefix": (Prefix([KEYS // 3, 3]) & Padding([KEYS - 5, KEYS // 2]), no_bias, None),
    "padding, one sequence empty": (Padding([KEYS, 0]), no_bias, None),
    "left padding": (Padding([KEYS // 3, KEYS], side="left") & Causal(), no_bias, None),
    "segments": (Segments([parts(0.4, 0.3), parts(0.01, 0.8)]), no_bias, None),
    "causal segments": (Segments(parts(0.4, 0.3)) & Causal(), no_bias, None),
    "alibi": (None, alibi, None),
    "causal alibi, softcap": (Causal(), alibi, 3.0),
    "buckets": (None, buckets, None),
    "causal buckets": (Causal(), causal_buckets, None),
    "buckets in segments": (Segments(parts(0.5)), buckets, None),
    "buckets in a window": (Window(KEYS // 2, KEYS // 3), buckets, 2.0),
    "softcap": (Padding(KEYS - 7), no_bias, 3.0),
    "content": (None, content, None),
    "causal content": (Causal(), causal_content, None),
    "content in a window": (Window(KEYS // 3, KEYS // 4), content, 2.0),
    "alibi from any start": (None, alibi, None),
    "causal buckets from any start": (Causal(), buckets, None),
    "causal content from the first key": (Causal(), causal_content, None),
}
# The position of the first query of each sequence, where the last query is not at the last key.
STARTS: dict[str, int | list[int]] = {
    "alibi from any start": [QUERIES // 2, -QUERIES // 2],
    "causal buckets from any start": [0, KEYS - 7],
    "causal content from the first key": 0,
}


def make(
    name: str,
    see: See | None,
    *,
    dtype: torch.dtype = torch.float32,
    queries: int = QUERIES,
    keys: int = KEYS,
    width: int = 32,
    value_width: int = 48,
) -> Call:
    mask, bias, softcap = STRUCTURES[name]
    query = random(BATCH, HEADS, queries, width, seed=1, dtype=dtype) * 1.5
    key = random(BATCH, KEY_HEADS, keys, width, seed=2, dtype=dtype)
    value = random(BATCH, KEY_HEADS, keys, value_width, seed=3, dtype=dtype)
    return check(
        query, key, value, mask, bias(queries, dtype), None, softcap, 0.0, see, STARTS.get(name)
    )


def double(call: Call) -> Call:
    bias = call.bias
    if isinstance(bias, RelativeContent):
        bias = replace(bias, query=bias.query.double(), relative=bias.relative.double())
    return replace(
        call, query=call.query.double(), key=call.key.double(), value=call.value.double(), bias=bias
    )


def eager(call: Call) -> Tensor:
    """Attention in plain PyTorch, with every step in the dtype of the call."""
    dtype, extent = call.query.dtype, call.extent
    tile = Tile(extent, range(extent.queries), range(extent.keys))
    key = call.key.repeat_interleave(call.groups, dim=1)
    scores = call.query @ key.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    if call.bias is not None:
        scores = scores + call.bias.tile(tile).to(dtype)
    if call.mask is not None:
        scores = scores.masked_fill(~call.mask.tile(tile), -math.inf)
    if call.sinks is not None:
        sinks = call.sinks.to(dtype)[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : extent.keys].nan_to_num(0)
    return weights @ call.value.repeat_interleave(call.groups, dim=1)


def assert_seen(seen: Seen | None, expected: Seen | None) -> None:
    got, want = seen.to_dict(), expected.to_dict()
    assert got.keys() == want.keys()
    largest = {name: tensor[tensor.isfinite()].abs().amax().item() for name, tensor in want.items()}
    # A weight is the power of a score minus lse, and its error is that of their rounding.
    rounding = 2e-6 + torch.finfo(torch.float32).eps / 2 * largest.get("lse", 0.0)
    for name, tensor in want.items():
        most = rounding * (1 + largest[name])
        torch.testing.assert_close(
            got[name].double(), tensor, rtol=0, atol=most, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_output(call: Call, output: Tensor, expected: Tensor) -> None:
    """Check that the error is at most twice that of plain PyTorch in the same precision."""
    error = (output - expected).abs().max()
    assert error <= 2 * (eager(call) - expected).abs().max() + 1e-6


def assert_exact(call: Call) -> None:
    """Check the output and the fields against the reference in float64."""
    output, seen = run(call)
    expected, expected_seen = reference.run(double(call))
    assert_output(call, output, expected)
    assert_seen(seen, expected_seen)


def assert_top(call: Call, count: int) -> None:
    """Weights are the largest of the row, and they are those of the returned keys."""
    weights = reference.run(replace(double(call), see=See(weights=True)))[1]
    top = run(call)[1]
    missing = (0, max(count - KEYS, 0))
    largest = pad(weights.weights, missing).topk(count).values
    torch.testing.assert_close(top.top.weights.double(), largest, rtol=0, atol=2e-6)
    keys = top.top.keys
    there = weights.weights.gather(-1, keys.clamp(min=0)).masked_fill(keys < 0, 0)
    torch.testing.assert_close(there, largest, rtol=0, atol=2e-6)
    ordered = keys.sort(-1).values
    assert ((ordered[..., 1:] != ordered[..., :-1]) | (ordered[..., 1:] < 0)).all()
    attends = (weights.weights > 0).sum(-1, keepdim=True).clamp(max=count)
    assert ((keys >= 0).sum(-1, keepdim=True) == attends).all()


@pytest.mark.parametrize(
    ("name", "dtype"),
    cases(
        list(product(STRUCTURES, DTYPES)),
        [
            ("window", torch.float16),
            ("causal segments", torch.float16),
            ("buckets", torch.float16),
            ("causal content", torch.float16),
            ("alibi from any start", torch.float16),
        ],
        [(name, DTYPES[at % len(DTYPES)]) for at, name in enumerate(STRUCTURES)],
    ),
)
def test_output_and_every_field(name: str, dtype: torch.dtype) -> None:
    call = make(name, EVERYTHING, dtype=dtype)
    assert_exact(call)


def test_more_queries_than_a_block_has() -> None:
    size = 2 * QUERIES if CUDA else 70
    call = make("window", replace(EVERYTHING, map=None, map_peak=False), queries=size, keys=size)
    assert_exact(call)


@pytest.mark.parametrize(
    ("width", "dtype"),
    cases(
        list(product((32, 64, 80, 96, 128, 256), DTYPES)),
        [(80, torch.float16)],
        [(32, torch.float32), (96, torch.float16), (128, torch.float32), (256, torch.float16)],
    ),
)
def test_every_width(width: int, dtype: torch.dtype) -> None:
    see = See(lse=True, entropy=True, received=True)
    call = make("causal", see, dtype=dtype, width=width, value_width=width)
    assert_exact(call)


@pytest.mark.parametrize(
    ("name", "grid"),
    cases(
        list(
            product(
                ("full", "causal", "causal alibi, softcap", "window", "causal content"),
                ((1, 1), (3, 7), (16, 2), (200, 300), (300, 3), (64, 64)),
            )
        ),
        [("full", (16, 2)), ("causal", (3, 7)), ("causal alibi, softcap", (200, 300))],
        [("window", (1, 1)), ("causal content", (64, 64)), ("full", (300, 3))],
    ),
)
def test_maps_of_any_grid(name: str, grid: tuple[int, int]) -> None:
    """Bins are wider or narrower than a tile, and may or may not divide the lengths evenly."""
    for queries, keys in ((QUERIES, KEYS), (KEYS, KEYS)) if CUDA else ((35, 41), (64, 64)):
        see = See(received=True, map=grid, map_peak=True)
        call = make(name, see, queries=queries, keys=keys)
        assert_seen(run(call)[1], reference.run(double(call))[1])


def test_a_query_that_a_bias_leaves_nothing_gives_nothing() -> None:
    """With a bias of -inf at distance 0, the first query of a causal call attends to no key."""
    table = random(16, HEADS, seed=9).index_fill(0, torch.tensor([0], device=DEVICE), -torch.inf)
    tensors = [random(BATCH, HEADS, QUERIES, 32, seed=seed) for seed in range(3)]
    call = check(
        *tensors, Causal(), RelativeBuckets(table, False, 20), None, None, 0.0, See(received=True)
    )
    _, seen = run(call)
    _, exact = reference.run(double(call))
    torch.testing.assert_close(seen.received.double(), exact.received, rtol=1e-4, atol=1e-5)


def test_queries_before_the_first_key_and_a_single_query() -> None:
    for queries, keys in ((50, 34), (1, 34), (34, 1)):
        see = See(lse=True, entropy=True, map=4, received=True)
        call = make("causal", see, queries=queries, keys=keys)
        output, seen = run(call)
        expected, expected_seen = reference.run(double(call))
        torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
        assert_seen(seen, expected_seen)


@pytest.mark.parametrize(
    ("name", "count"),
    cases(
        list(
            product(
                (
                    "full",
                    "causal",
                    "window",
                    "causal segments",
                    "padding, one sequence empty",
                    "buckets",
                    "causal alibi, softcap",
                ),
                (1, 5, 64),
            )
        ),
        [("padding, one sequence empty", 5), ("buckets", 1)],
        [("causal alibi, softcap", 64), ("full", 1), ("causal segments", 5), ("window", 64)],
    ),
)
def test_the_top_keys(name: str, count: int) -> None:
    assert_top(make(name, See(top=count)), count)


@pytest.mark.parametrize(
    ("name", "dtype"),
    cases(
        list(product(("causal", "buckets", "causal alibi, softcap"), LOW)),
        [("causal", torch.float16)],
        [("buckets", torch.float16)],
    ),
)
def test_the_top_keys_in_low_precision(name: str, dtype: torch.dtype) -> None:
    for width in (64, 128) if CUDA else (64,):
        call = make(name, See(top=8), dtype=dtype, width=width)
        weights = reference.run(replace(double(call), see=See(weights=True)))[1]
        top = run(call)[1]
        largest = weights.weights.topk(8).values
        torch.testing.assert_close(top.top.weights.double(), largest, rtol=0, atol=2e-5)


def test_of_equal_weights_the_first_keys_are_the_top() -> None:
    """More weights are equal than the buffers for candidates can hold."""
    call = make("full", See(top=3), queries=20)
    _, seen = run(replace(call, query=torch.zeros_like(call.query)))
    assert (seen.top.keys == torch.arange(3, device=DEVICE)).all()
    torch.testing.assert_close(seen.top.weights, torch.full_like(seen.top.weights, 1 / KEYS))


@pytest.mark.parametrize("every", [3, 11])
def test_rows_that_are_searched_leave_their_neighbours_alone(every: int) -> None:
    """For some queries all keys but two are equal: only their candidates do not fit the buffers.

    Many such rows are searched together, a few of them one by one.
    """
    call = make("full", See(top=3), queries=20)
    key = call.key.clone()
    key[..., 0] = 0
    key[:, :, 7, 0], key[:, :, KEYS - 2, 0] = 1, 2
    query = call.query.clone()
    query[:, :, ::every] = 0
    query[:, :, ::every, 0] = 1
    found = run(replace(call, key=key))[1]
    searched = run(replace(call, query=query, key=key))[1]
    others = torch.arange(20, device=DEVICE) % every > 0
    highest = torch.tensor([KEYS - 2, 7, 0], device=DEVICE)
    assert (searched.top.keys[:, :, ::every] == highest).all()
    rest = torch.tensor([2.0, 1.0, 0.0], device=DEVICE) * query.shape[-1] ** -0.5
    weights = rest.exp() / (rest.exp().sum() + KEYS - 3)
    torch.testing.assert_close(
        searched.top.weights[:, :, ::every],
        weights.expand_as(searched.top.weights[:, :, ::every]),
        rtol=0,
        atol=2e-5,
    )
    assert torch.equal(searched.top.keys[:, :, others], found.top.keys[:, :, others])
    assert torch.equal(searched.top.weights[:, :, others], found.top.weights[:, :, others])


def test_top_keys_of_some_heads_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels.triton import launch

    call = make("causal", See(top=3))
    whole = run(call)[1]
    batch, heads, queries, _ = call.query.shape
    each = queries * launch.LANES * 8 * 8  # bytes of a head's candidates
    assert batch * heads > 3
    monkeypatch.setattr(launch, "SCRATCH", 3 * each)
    parts = run(call)[1]
    assert torch.equal(parts.top.keys, whole.top.keys)
    assert torch.equal(parts.top.weights, whole.top.weights)


@pytest.mark.parametrize(
    ("name", "sequence"),
    cases(
        list(product(("full", "causal", "window"), (True, False))),
        [("window", False)],
        [("full", False), ("window", True)],
    ),
)
def test_transformer_xl_some_queries_at_a_time(
    name: str, sequence: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The size of the parts, a sequence or a block of queries, changes no result."""
    from regard.kernels.triton import relative

    queries, keys = (1000, 1100) if CUDA else (70, 76)
    monkeypatch.setattr(relative, "BLOCK", 64)  # a multiple of the blocks of float32 calls
    whole, made = relative.room, []

    def counted(*given: Any) -> Tensor:
        """Check that there is one buffer for the term, and in a backward pass one for gradients."""
        made.append(weakref.ref(found := whole(*given)))
        assert sum(one() is not None for one in made) <= 2
        return found

    monkeypatch.setattr(relative, "room", counted)
    call = make(name, replace(EVERYTHING, map=(3, 5)), queries=queries, keys=keys)
    heads = call.query.shape[1]
    second = random(BATCH, heads, queries, 24, seed=7)
    call = replace(call, bias=RelativeContent(second, random(heads, 60, 24, seed=8), -20))
    one = 4 * heads * queries * -(-keys // 64) * 64  # bytes of the term for one sequence
    room, parts = (2 * one - 1, BATCH) if sequence else (1, BATCH * -(-queries // 64))
    monkeypatch.setattr(relative, "SCRATCH", room)
    assert len(relative.parts(call.query, keys, 0)) == parts
    assert_gradients(call, SMOOTH)


@pytest.mark.parametrize(
    ("name", "queries", "dtype"),
    cases(
        list(
            product(
                ("full", "causal", "window", "causal alibi, softcap"),
                (1, 5),
                (torch.float32, LOW[0]),
            )
        ),
        [("causal alibi, softcap", 1, torch.float32)],
        [("window", 5, torch.float16), ("full", 1, torch.float16)],
    ),
)
def test_few_queries_share_the_work_on_many_keys(
    name: str, queries: int, dtype: torch.dtype
) -> None:
    keys = 70_000 if CUDA else 1030
    see = replace(EVERYTHING, rows=[-1], map=(2, 3))
    call = make(name, see, dtype=dtype, queries=queries, keys=keys)
    assert_exact(call)


def gradients(
    call: Call,
    attend: Callable[[Call], tuple[Tensor, Seen | None]],
    dtype: torch.dtype,
    fields: tuple[str, ...],
) -> tuple[list[Tensor], Tensor, Seen | None]:
    """Return the gradients of a sum over the output and these fields, for each tensor of the call.

    Also return the output and what was seen.
    """
    query, key, value = (
        t.detach().to(dtype).requires_grad_() for t in (call.query, call.key, call.value)
    )
    leaves, bias = [query, key, value], call.bias
    if isinstance(bias, Alibi):
        bias = replace(bias, slopes=bias.slopes.detach().to(dtype).requires_grad_())
    elif isinstance(bias, RelativeBuckets):
        bias = replace(bias, table=bias.table.detach().to(dtype).requires_grad_())
    elif isinstance(bias, RelativeContent):
        second, relative = (t.detach().to(dtype).requires_grad_() for t in bias.tensors)
        bias = replace(bias, query=second, relative=relative)
    if bias is not None:
        leaves += bias.tensors
    sinks = call.sinks
    if sinks is not None:
        sinks = sinks.detach().to(dtype).requires_grad_()
        leaves.append(sinks)
    output, seen = attend(replace(call, query=query, key=key, value=value, bias=bias, sinks=sinks))
    total = (output * random(*output.shape, seed=5, dtype=dtype)).sum()
    for name in fields:
        tensor = seen.to_dict()[name]
        tensor = torch.where(tensor.isfinite(), tensor, 0)
        total = total + (tensor * random(*tensor.shape, seed=6, dtype=tensor.dtype)).sum()
    return list(torch.autograd.grad(total, leaves)), output, seen


Computed = tuple[list[Tensor], Tensor, Seen | None]  # what ``gradients`` returns


def assert_gradients(call: Call, fields: tuple[str, ...], computed: Computed | None = None) -> None:
    """Check gradients, output and what was seen against the reference in float64."""
    got, output, seen = computed or gradients(call, run, torch.float32, fields)
    want, expected, expected_seen = gradients(call, reference.run, torch.float64, fields)
    torch.testing.assert_close(output.double(), expected, rtol=0, atol=1e-5)
    assert_seen(seen, expected_seen)
    for one, other in zip(got, want, strict=True):
        scale = other.abs().amax().item()
        torch.testing.assert_close(one.double(), other, rtol=0, atol=2e-5 * scale)


@pytest.mark.parametrize(
    "name",
    cases(
        list(STRUCTURES),
        [
            "prefix",
            "segments",
            "causal alibi, softcap",
            "buckets in a window",
            "causal content",
            "causal buckets from any start",
        ],
    ),
)
def test_gradients_through_every_field(name: str) -> None:
    assert_gradients(make(name, EVERYTHING), SMOOTH)


@pytest.mark.parametrize("field", cases(SMOOTH, ("received",)))
def test_gradients_through_one_field(field: str) -> None:
    assert_gradients(make("causal", replace(EVERYTHING, peak=False)), (field,))


def with_sinks(call: Call) -> Call:
    return replace(call, sinks=random(HEADS, seed=4) * 2)


@pytest.mark.parametrize(
    "name",
    cases(
        list(STRUCTURES),
        ["causal segments"],
        ["padding, one sequence empty", "causal alibi, softcap", "buckets", "causal content"],
    ),
)
def test_sinks(name: str) -> None:
    """Sinks change the output, every field and the top keys, and have a gradient."""
    call = with_sinks(make(name, EVERYTHING))
    assert_gradients(call, SMOOTH)
    if "content" not in name:
        assert_top(replace(call, see=See(top=3)), 3)


def assert_low_precision_gradients(call: Call) -> None:
    """Check that errors are at most three times those of plain PyTorch in the same precision."""
    dtype = call.query.dtype
    got, *_ = gradients(call, run, dtype, ())
    want, *_ = gradients(call, reference.run, torch.float64, ())
    plain, *_ = gradients(call, lambda call: (eager(call), None), dtype, ())
    for one, other, rough in zip(got, want, plain, strict=True):
        error = (one - other).abs().max()
        assert error <= 3 * (rough - other).abs().max() + 1e-3 * other.abs().max()


@pytest.mark.parametrize(
    ("name", "width", "dtype"),
    cases(
        list(
            product(
                ("full", "causal", "window", "buckets", "causal alibi, softcap", "content"),
                (64, 128, 256),
                LOW,
            )
        ),
        [("buckets", 64, torch.float16), ("content", 64, torch.float16)],
        [
            ("full", 64, torch.float16),
            ("causal", 128, torch.float16),
            ("window", 64, torch.float16),
            ("causal alibi, softcap", 64, torch.float16),
        ],
    ),
)
def test_gradients_in_low_precision(name: str, width: int, dtype: torch.dtype) -> None:
    call = make(
        name, See(entropy=True), dtype=dtype, queries=QUERIES, keys=QUERIES, width=width,
        value_width=width,
    )  # fmt: skip
    assert_low_precision_gradients(call)


@pytest.mark.parametrize(
    ("mask", "dtype"),
    [(mask, dtype) for mask in (None, Causal()) for dtype in LOW if CUDA or mask is None],
)
def test_gradients_of_plain_calls_that_are_seen(mask: Mask | None, dtype: torch.dtype) -> None:
    """With equal heads and widths, cuDNN computes them on a GPU, from the lse of our kernel."""
    query, key, value = (random(2, 2, QUERIES, 64, seed=s, dtype=dtype) for s in range(3))
    see = replace(EVERYTHING, rows=(), map=None, map_peak=False)
    call = check(query, key, value, mask, None, None, None, 0.0, see)
    assert_low_precision_gradients(call)
    assert_low_precision_gradients(replace(call, sinks=random(2, seed=4)))


@pytest.mark.parametrize(
    "name",
    cases(
        ["full", "causal", "window", "buckets", "causal content", "causal buckets from any start"],
        ["window"],
        ["causal content", "causal buckets from any start"],
    ),
)
def test_compiles_to_one_graph(name: str) -> None:
    """The output, fields and gradients are the same as without the compiler."""
    torch._dynamo.reset()  # each case needs a new graph
    see = replace(EVERYTHING, rows=[2], map=(2, 2), top=0 if "content" in name else 3)
    call = make(name, see, queries=20, keys=24)
    if name in ("window", "causal content"):
        call = with_sinks(call)
    compiled = torch.compile(triton_backend.run, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        output, seen = compiled(call)
        expected, expected_seen = run(call)
    assert torch.equal(output, expected)
    for field, tensor in expected_seen.to_dict().items():
        assert torch.equal(seen.to_dict()[field], tensor), field
    got, *_ = gradients(call, compiled, torch.float32, SMOOTH)
    want, *_ = gradients(call, run, torch.float32, SMOOTH)
    for one, other in zip(got, want, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-6 * other.abs().amax().item())


@pytest.mark.sweep
@pytest.mark.processes
@pytest.mark.parametrize("name", ["window", "content", "cross entropy"])
def test_they_compile_for_a_gpu_where_there_is_none(name: str) -> None:
    script = Path(kernel_cases.__file__).with_name("compile_kernels.py")
    made = subprocess.run(
        [sys.executable, "-W", "error", script, name], check=True, capture_output=True, text=True
    )
    assert made.stdout.startswith(f"{name}: compiled ")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["buckets", "causal content"])
def test_a_bias_takes_no_memory_of_all_pairs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard.kernels.triton import relative

    monkeypatch.setattr(relative, "SCRATCH", 2**24)  # the most bytes for Transformer-XL's term
    size = 8192
    call = make(name, See(entropy=True), dtype=torch.bfloat16, queries=size, keys=size)
    leaves = [call.query, call.key, call.value, *(call.bias.tensors if call.bias else ())]
    for tensor in leaves:
        tensor.requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    output, _ = run(call)
    torch.autograd.grad(output, leaves, torch.ones_like(output))
    # An eighth of the bytes of a bfloat16 for every query, key and head.
    assert torch.cuda.max_memory_allocated() - before < 2 * size * size


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["full", "window", "causal content"])
def test_is_captured_in_a_cuda_graph(name: str) -> None:
    see = replace(EVERYTHING, rows=[2], top=0 if "content" in name else 3)
    call = make(name, see, dtype=torch.bfloat16)
    expected, expected_seen = run(call)
    run(call)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output, seen = run(call)
    output.zero_()
    graph.replay()
    assert torch.equal(output, expected)
    for field, tensor in expected_seen.to_dict().items():
        assert torch.equal(seen.to_dict()[field], tensor), field


class Largest(TorchDispatchMode):
    """Record the bytes of the largest tensor that any operator returns."""

    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        made = func(*args, **(kwargs or {}))
        self.size = max(self.size, made.nbytes if isinstance(made, Tensor) else 0)
        return made


def test_windows_say_how_many_keys_a_query_sees_at_most() -> None:
    assert Window(3, 5).max_keys == 9
    assert (Causal() & Window(3)).max_keys == 4
    assert (Window(8, 8) & Window(3)).max_keys == 4
    assert Causal().max_keys == 0
    assert Window(2**63).max_keys < 2**63  # the largest integer that an operator accepts


def test_the_gradient_of_a_table_takes_no_more_than_the_output() -> None:
    call = make("buckets", None)
    leaves = [tensor.requires_grad_() for tensor in call.bias.tensors]
    output, _ = run(call)
    ones = torch.ones_like(output)
    with Largest() as largest:
        torch.autograd.grad(output, leaves, ones)
    assert 0 < largest.size <= output.nbytes


def test_a_field_without_a_gradient_says_so() -> None:
    call = make("causal", See(peak=True), queries=20, keys=20)
    with pytest.raises(BackendError, match="no gradient through peak"):
        gradients(call, run, torch.float32, ("peak",))


def test_a_second_gradient_is_refused() -> None:
    call = make("causal", See(lse=True), queries=20, keys=20)
    query = call.query.requires_grad_()
    output, _ = run(replace(call, query=query))
    with pytest.raises(BackendError, match=r"no gradients of gradients.*'reference'.*'tiled'"):
        torch.autograd.grad(output.sum(), query, create_graph=True)


def test_what_is_kept_in_inference_mode_serves_gradients() -> None:
    lowering._kept_buckets.results.clear()
    call = make("causal buckets", See(map=2), queries=20, keys=20)
    with torch.inference_mode():
        run(call)
    assert_gradients(call, ("map",))


def amid_nan(shape: tuple[int, int, int, int], layout: str) -> Tensor:
    """Random numbers as a view into a larger tensor that is NaN everywhere else."""
    batch, heads, length, width = shape
    if layout == "transposed":  # as after projections: [batch, length, heads, width]
        return amid_nan((batch, length, heads, width), "sliced").transpose(1, 2)
    step = 2 if layout == "strided" else 1
    around = torch.full([step * size + 2 for size in shape], math.nan, device=DEVICE)
    inner = around[tuple(slice(1, 1 + step * size, step) for size in shape)]
    inner.copy_(random(*shape))
    return inner[:1].expand(batch, -1, -1, -1) if layout == "expanded" else inner


@pytest.mark.parametrize(
    "layout", cases(["sliced", "transposed", "strided", "expanded"], ["transposed"])
)
def test_reads_nothing_outside_its_inputs(layout: str) -> None:
    """Inputs are views into NaN, and whatever the kernels leave unwritten is NaN."""
    query, key, value = (
        amid_nan((2, heads, length, 24), layout) for heads, length in ((2, 35), (1, 39), (1, 39))
    )
    call = check(query, key, value, Window(9, 4), None, None, None, 0.0, EVERYTHING)
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    try:
        computed = gradients(call, run, torch.float32, SMOOTH)
    finally:
        torch.use_deterministic_algorithms(before)
    assert_gradients(call, SMOOTH, computed)


@pytest.mark.filterwarnings("ignore:invalid value encountered")  # behind the mask
@pytest.mark.parametrize("name", cases(["full", "content"], ["full"]))
def test_nan_behind_padding_does_not_leak(name: str) -> None:
    only = replace(EVERYTHING, rows=())
    call = make(name, only, keys=77)
    call = replace(call, mask=Padding([40, 33]))
    leaves = [t.requires_grad_() for t in (call.query, *(call.bias.tensors if call.bias else ()))]

    def once() -> tuple[Tensor, ...]:
        output, seen = run(call)
        found = [t.detach() for t in seen.to_dict().values()]
        return output, *found, *torch.autograd.grad(output.sum(), leaves)

    clean = once()
    call.key[0, :, 40:], call.value[0, :, 40:] = math.nan, math.inf
    call.key[1, :, 33:], call.value[1, :, 33:] = math.nan, math.nan
    for tensor, expected in zip(once(), clean, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "width"),
    cases(
        [
            ("causal", 64),
            ("full", 128),
            ("causal alibi, softcap", 64),
            ("buckets", 64),
            ("causal content", 64),
        ],
        [("buckets", 64)],
        [("causal content", 64)],
    ),
)
def test_repeats_are_equal_to_the_bit(name: str, width: int) -> None:
    size = 2048 if CUDA else KEYS
    dtype = torch.bfloat16 if CUDA else torch.float32
    see = replace(EVERYTHING, rows=())
    call = make(name, see, dtype=dtype, queries=size, keys=size, width=width, value_width=width)
    leaves = [t.requires_grad_() for t in (call.query, call.key, call.value)]
    leaves += [t.requires_grad_() for t in (call.bias.tensors if call.bias else ())]
    upstream = random(BATCH, HEADS, size, width, dtype=dtype), random(BATCH, HEADS, size)

    def everything() -> list[Tensor]:
        output, seen = run(call)
        found = torch.autograd.grad((output, seen.entropy), leaves, upstream)
        return [output.detach(), *seen.to_dict().values(), *found]

    first = everything()
    for _ in range(250 if CUDA else 1):
        assert all(map(torch.equal, everything(), first))


def test_what_the_kernels_leave_to_others() -> None:
    """Every refusal has a reason, and a named backend raises it."""
    x = random(1, 2, 8, 16)
    mask = torch.ones(8, 8, dtype=torch.bool, device=DEVICE)
    second = RelativeContent(random(1, 2, 8, 16), random(1, 8, 16))
    rough = RelativeContent(second.query.half(), second.relative)
    pair = x.expand(2, -1, -1, -1)
    seconds = replace(second, query=pair)

    def reason(**given: object) -> str:
        all_given = {
            "query": x, "key": x, "value": x, "mask": None, "bias": None, "scale": None,
            "softcap": None, "dropout": 0.0, "see": See(entropy=True),
        } | given  # fmt: skip
        return triton_backend.unsupported(check(**all_given)) or "none"  # type: ignore[arg-type]

    assert reason() == "none"
    assert "one range of keys" in reason(mask=masks.Dense(mask))
    assert "one range of keys" in reason(mask=~Causal())
    assert "bias" in reason(bias=random(8, 8))
    assert "float32" in reason(bias=rough)
    assert "RelativeContent" in reason(bias=second, see=See(top=2))
    two = dict.fromkeys(("query", "key", "value"), pair) | {"bias": seconds}
    assert "one query_start" in reason(**two, query_start=[0, 1])
    assert "dropout" in reason(dropout=0.5)
    assert "scale" in reason(scale=-1.0)
    assert "at most 64" in reason(see=See(top=65))
    assert "pairs" in reason(see=See(pairs=[(0, 0)]))
    assert "rows and map" in reason(see=See(weights=True))
    assert "float64" in reason(query=x.double(), key=x.double(), value=x.double())
    many = x[:1, :1, :1].expand(2**16, -1, -1, -1)
    assert "65535" in reason(query=many, key=many, value=many)
    long = x[:, :, :1].expand(-1, -1, 2**20 + 1, -1)
    assert "1,048,576" in reason(key=long, value=long, bias=second)
    wide = random(1, 1, 2, 300)
    assert "wider than 256" in reason(query=wide, key=wide, value=wide)
    with pytest.raises((BackendError, InputError), match="triton"):
        attention(x.double(), x.double(), x.double(), backend="triton")
