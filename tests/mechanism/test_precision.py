"""No backend errs by more than rounding, and a query that is not a number yields none."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from regard import Causal, Padding, See, Segments, Window, attention
from regard.mechanism.backends import cpu as cpu_backend
from regard.mechanism.call import check
from regard.mechanism.masks import Mask

CPU_BACKENDS = ("sdpa", "native", "tiled", "reference")


def run(
    backend: str,
    tensors: tuple[Tensor, ...],
    mask: Mask | None = None,
    softcap: float | None = None,
) -> Tensor:
    """The output; the kernel in C++ runs calls of every size here."""
    query, key, value = tensors
    if backend != "native":
        return attention(query, key, value, mask=mask, softcap=softcap, backend=backend)
    if reason := cpu_backend.unavailable():
        pytest.skip(reason)
    return cpu_backend.run(check(query, key, value, mask, None, None, softcap, 0.0, None))[0]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(sum(shape))
    return tuple(torch.randn(*shape, generator=generator).to(dtype) for _ in range(3))


def exact(
    tensors: tuple[Tensor, ...], mask: Mask | None = None, softcap: float | None = None
) -> Tensor:
    return run("reference", tuple(tensor.double() for tensor in tensors), mask, softcap)


@pytest.mark.parametrize("backend", ["native", "tiled", "reference"])
@pytest.mark.parametrize("softcap", [0.5, 50.0, 1e3, 1e6, 1e9])
def test_a_softcap_far_above_the_scores_changes_nothing(backend: str, softcap: float) -> None:
    tensors = random(1, 8, 300, 64)
    output = run(backend, tensors, softcap=softcap)
    assert (output - exact(tensors, softcap=softcap)).abs().max() < 2e-6


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("mask", [None, Causal(), Window(3)], ids=repr)
def test_half_precision_errs_by_less_than_one_unit_in_the_last_place(
    backend: str, dtype: torch.dtype, mask: Mask | None
) -> None:
    query, key, value = random(1, 4, 64, 64, dtype=dtype)
    tensors = query, key, value.abs() + 1  # no sum is small by cancellation
    expected = exact(tensors, mask)
    unit = torch.finfo(dtype).eps * 2 ** expected.log2().floor()
    assert ((run(backend, tensors, mask).double() - expected).abs() / unit).max() < 1


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_one_visible_key_returns_its_value(backend: str, dtype: torch.dtype) -> None:
    tensors = random(2, 2, 33, 16, dtype=dtype)
    rounding = 3e-7 if dtype == torch.float32 else 0
    output = run(backend, tensors, Window(0))
    torch.testing.assert_close(output, tensors[2], rtol=rounding, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_seeing_changes_the_output_by_no_more_than_rounding(dtype: torch.dtype) -> None:
    for mask in (None, Causal(), ~Window(1)):
        query, key, value = random(1, 2, 64, 32, dtype=dtype)
        plain = attention(query, key, value, mask=mask)
        seeing, _ = attention(query, key, value, mask=mask, see=See(entropy=True))
        assert (plain - seeing).abs().max() <= 2 * torch.finfo(dtype).eps * value.abs().max()


FEW_KEYS = [
    Padding(9),
    Padding([9, 3]),
    Causal() & Padding(9),
    Padding([3, 9]) | (Padding([9, 4]) & Causal()),
    Segments([3, 3, 30, 4]),
    Segments([36, 4]) & Causal(),
    Window(3),
    ~Window(0),
]


@pytest.mark.parametrize("backend", ["sdpa", "tiled"])
@pytest.mark.parametrize("mask", FEW_KEYS, ids=repr)
def test_a_query_that_is_no_number_yields_none_however_few_keys_it_has(
    backend: str, mask: Mask
) -> None:
    query, key, value = random(2, 2, 40, 8)
    for row in (0, 2, 5, 38):
        broken = query.clone()
        broken[0, :, row] = math.nan
        output = attention(broken, key, value, mask=mask, backend=backend)
        expected = attention(broken, key, value, mask=mask, backend="reference")
        torch.testing.assert_close(output, expected, equal_nan=True)
