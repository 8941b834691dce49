"""Dilated masks: the rule on every backend, sorted by residue where that makes ranges of keys."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Alibi, Causal, Dilated, InputError, Padding, See, Window, attention, why
from regard.mechanism import masks
from regard.mechanism.backends import cpu as cpu_backend
from regard.mechanism.backends import residues
from regard.mechanism.backends import triton as triton_backend
from regard.mechanism.call import Call, check
from regard.mechanism.masks import Mask
from regard.mechanism.seeing import Seen

# Queries, keys and the position of the first query; residues of queries and keys may be shifted.
SIZES = [(23, 23, None), (17, 30, None), (20, 9, None), (12, 31, 4), (16, 16, -5)]
MASKS = {
    "both sides": (Dilated(3), lambda p, j: (p - j) % 3 == 0),
    "causal": (Dilated(4) & Causal(), lambda p, j: ((p - j) % 4 == 0) & (j <= p)),
    "window": (
        Window(7, 5) & Dilated(2),
        lambda p, j: ((p - j) % 2 == 0) & (p - 7 <= j) & (j <= p + 5),
    ),
    "causal window": (
        Causal() & (Dilated(3) & Window(10)),
        lambda p, j: ((p - j) % 3 == 0) & (p - 10 <= j) & (j <= p),
    ),
    "open window": (Dilated(5) & Window(6, None), lambda p, j: ((p - j) % 5 == 0) & (p - 6 <= j)),
}  # fmt: skip
BY_ROW = {
    "lse": True, "entropy": True, "peak": True, "max_logit": True, "received": True,
    "rows": [3, -1, 4, 0, 3], "top": 3,
}  # fmt: skip
MORE: dict[str, Any] = {"pairs": [(7, 2), (1, 4), (7, 2), (6, 3)], "weights": True}


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def inputs(queries: int, keys: int) -> list[Tensor]:
    sizes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6))
    return [random(*size, seed=seed) for seed, size in enumerate(sizes)]


def written_out(rule: Any, queries: int, keys: int, start: int | None) -> masks.Dense:
    first = keys - queries if start is None else start
    return masks.Dense(rule(torch.arange(queries)[:, None] + first, torch.arange(keys)))


def assert_same(found: Seen, expected: Seen, **tolerance: float) -> None:
    fields, right = found.to_dict(), expected.to_dict()
    assert fields.keys() == right.keys()
    for name, tensor in right.items():
        close = torch.testing.assert_close
        close(fields[name].to(tensor.dtype), tensor, msg=lambda m, n=name: f"{n}: {m}", **tolerance)


@pytest.mark.parametrize(("queries", "keys", "start"), SIZES)
@pytest.mark.parametrize("name", MASKS)
def test_output_fields_and_gradients_are_those_of_the_rule(
    name: str, queries: int, keys: int, start: int | None
) -> None:
    mask, rule = MASKS[name]
    dense = written_out(rule, queries, keys, start)
    aligned = start is None and queries == keys
    see = See(**BY_ROW, **MORE, distance=aligned)

    def computed(mask: Mask, see: See | None, backend: str) -> tuple[list[Tensor], Seen | None]:
        tensors = [tensor.requires_grad_() for tensor in inputs(queries, keys)]
        given: Any = {"mask": mask, "see": see, "query_start": start, "backend": backend}
        result = attention(*tensors, **given)
        output, seen = result if see else (result, None)
        loss = (output * random(*output.shape, seed=9)).sum()
        if seen is not None:
            loss = loss + seen.entropy.sum() + (seen.received**2).sum()
        return [output.detach(), *torch.autograd.grad(loss, tensors)], seen

    for chosen, backends in ((see, ("reference", "tiled")), (None, ("sdpa", "auto"))):
        expected, right = computed(dense, chosen, "reference")
        for backend in backends:
            found, seen = computed(mask, chosen, backend)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-13)
            if seen is not None and right is not None:
                assert_same(seen, right, rtol=0, atol=1e-13)
    # A map has no order of residues: the mask is applied in tiles.
    given: Any = {"see": See(map=(5, 3), map_peak=True, distance=True), "query_start": start}
    tiled, right = (
        attention(*inputs(queries, keys), mask=m, **given, backend="tiled")[1]
        for m in (mask, dense)
    )
    assert_same(tiled, right)


def sorted_run(backend: Any, call: Call) -> tuple[Tensor, Seen | None]:
    """What ``attention`` does with a backend that would refuse this device or size."""
    by_residue = residues.sort(call)
    assert by_residue is not None
    assert backend.unsupported(by_residue.call) is None
    return by_residue.restore(*backend.run(by_residue.call))


@pytest.mark.kernels
@pytest.mark.parametrize(("queries", "keys", "start"), SIZES[:4])
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("kernel", ["native", "triton"])
def test_the_kernels_take_it_as_ranges(
    kernel: str, name: str, queries: int, keys: int, start: int | None
) -> None:
    backend: Any = cpu_backend if kernel == "native" else triton_backend
    if kernel == "native" and cpu_backend.unavailable():
        pytest.skip(f"The CPU kernel is NOT tested here: {cpu_backend.unavailable()}")
    if kernel == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("The interpreter is not used where there is a GPU.")
    mask, rule = MASKS[name]
    see = See(**BY_ROW, **(MORE if kernel == "native" else {}), distance=queries == keys)
    tensors = [tensor.float() for tensor in inputs(queries, keys)]
    call = check(*tensors, mask, None, None, None, 0.0, see, start)  # type: ignore[arg-type]
    output, seen = sorted_run(backend, call)
    exact = [tensor.double() for tensor in tensors]
    dense = written_out(rule, queries, keys, start)
    expected, right = attention(*exact, mask=dense, see=see, query_start=start, backend="reference")
    torch.testing.assert_close(output.double(), expected, rtol=1e-4, atol=1e-5)
    assert seen is not None
    assert_same(seen, right, rtol=1e-4, atol=1e-4)


def test_a_call_that_cannot_be_sorted_runs_in_tiles() -> None:
    query, key, value = inputs(12, 12)
    slopes = Alibi(torch.tensor([0.5, 0.1, 0.2, 0.3], dtype=torch.float64))
    lengths, mask = Padding([12, 7]), Dilated(3) & Causal()
    cases: list[dict[str, Any]] = [
        {"mask": mask, "bias": slopes},
        {"mask": mask, "query_start": [0, -2]},
        {"mask": mask & lengths},
        {"mask": ~Dilated(3) | Window(1)},
        {"mask": Dilated(2) & Dilated(3)},
        {"mask": Dilated(100)},
    ]
    for given in cases:
        expected = attention(query, key, value, **given, backend="reference")
        for backend in ("tiled", "sdpa") if "bias" not in given else ("tiled",):
            found = attention(query, key, value, **given, backend=backend)
            torch.testing.assert_close(found, expected)


def test_it_follows_transformations_and_inference_mode() -> None:
    query, key, value = inputs(12, 12)
    mask = Dilated(3) & Causal()

    def loss(query: Tensor) -> Tensor:
        return attention(query, key, value, mask=mask).square().sum()

    with torch.inference_mode():  # what this caches must serve gradients too
        loss(query)
    leaf = query.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(leaf), leaf)
    for _ in range(2):
        torch.testing.assert_close(torch.func.grad(loss)(query), expected)
    torch.testing.assert_close(torch.autograd.grad(loss(leaf), leaf)[0], expected)


def test_a_large_call_on_the_cpu_takes_the_kernel() -> None:
    if cpu_backend.unavailable():
        pytest.skip(f"The CPU kernel is NOT tested here: {cpu_backend.unavailable()}")
    x = torch.zeros(1, 1, 2048, 8)
    assert why(x, x, x, mask=Dilated(8) & Causal(), see=See(entropy=True)).chosen == "native"
    assert why(x, x, x, mask=~Dilated(8), see=See(entropy=True)).chosen == "tiled"


@pytest.mark.parametrize("step", [0, -1, 1.5])
def test_a_wrong_step_is_refused(step: Any) -> None:
    with pytest.raises(InputError, match="from 1 on"):
        Dilated(step)
