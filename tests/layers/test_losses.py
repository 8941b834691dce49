"""The loss without all logits: its numbers and its gradients are those of the definition."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear

from regard import (
    BackendError,
    InputError,
)
from regard.kernels.triton import softmax
from regard.layers import losses
from regard.layers.losses import linear_cross_entropy

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
LOW = (torch.float16, torch.bfloat16)


@pytest.fixture(params=["torch", "triton"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways of computing a chunk, whatever the device."""
    if request.param == "triton":
        monkeypatch.setattr(losses, "_loss", softmax.cross_entropy)
    elif CUDA:
        monkeypatch.setattr(losses, "find_spec", lambda _: None)
    return str(request.param)


def made(vocabulary: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocabulary)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).to(DEVICE).requires_grad_()
        for shape in ((2, 9, 16), (vocabulary, 16), (vocabulary,))
    )
    labels = torch.randint(vocabulary, (2, 9), generator=generator).to(DEVICE)
    labels[0, 3] = labels[1, 8] = -100
    return hidden, weight, bias, labels


def defined(
    given: tuple[Tensor, ...], labels: Tensor, smoothing: float, dtype: torch.dtype
) -> list[Tensor]:
    """The loss and its gradients by the definition, computed in ``dtype``."""
    given = tuple(tensor.detach().to(dtype).requires_grad_() for tensor in given)
    logits = linear(*given).flatten(0, 1)
    exact = torch.promote_types(dtype, torch.float32)
    loss = cross_entropy(
        logits.to(exact), labels.flatten(), reduction="sum", label_smoothing=smoothing
    )
    return [loss.detach(), *torch.autograd.grad(loss, given)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("vocabulary", [7, 5000])  # within one block of the kernel, and two
@pytest.mark.parametrize("dtype", [torch.float32, *LOW])
def test_loss_and_gradients_are_those_of_the_definition(
    way: str, dtype: torch.dtype, vocabulary: int, smoothing: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "TILE", 5)  # 18 rows are four chunks
    monkeypatch.setattr(losses, "CHUNK_BYTES", 4 * vocabulary)
    hidden, weight, bias, labels = made(vocabulary, dtype)
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, smoothing=smoothing)
    actual = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))]
    exact, plain = (
        defined((hidden, weight, bias), labels, smoothing, kind) for kind in (torch.float64, dtype)
    )
    for index, (ours, truth, theirs) in enumerate(zip(actual, exact, plain, strict=True)):
        floor = 4 * torch.finfo(dtype).eps * truth.abs().max().item()
        allowed = max((3 if index else 2) * (theirs - truth).abs().max().item(), floor)
        assert (ours.double() - truth).abs().max().item() <= allowed


def test_rows_go_in_equal_shares_of_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses, "TILE", 8)
    assert losses._chunk_rows(0, 10, 1000) == 8
    assert losses._chunk_rows(100, 10, 1000) == 104  # all at once
    assert losses._chunk_rows(101, 10, 1000) == 56  # two
    assert losses._chunk_rows(16, 10**6, 1000) == 8  # a row larger than a chunk goes alone


def test_without_gradients_none_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    within = losses._loss
    monkeypatch.setattr(
        losses, "_loss", lambda *given: computed.append(given[-1]) or within(*given)
    )
    hidden, weight, bias, labels = made(50, torch.float32)
    parameters = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
    with torch.no_grad():
        quiet = linear_cross_entropy(hidden, parameters[0], labels, bias=parameters[1])
    loud = linear_cross_entropy(hidden, parameters[0], labels, bias=parameters[1])
    assert computed == [False, True]
    assert quiet == loud


def test_in_float64_it_is_exact() -> None:
    hidden, weight, bias, labels = made(50, torch.float64)
    loss = linear_cross_entropy(hidden, weight, labels, bias=bias, smoothing=0.1)
    actual = [loss.detach(), *torch.autograd.grad(loss, (hidden, weight, bias))]
    exact = defined((hidden, weight, bias), labels, 0.1, torch.float64)
    for ours, truth in zip(actual, exact, strict=True):
        torch.testing.assert_close(ours, truth)


def test_the_gradient_scales_with_what_comes_after(way: str) -> None:
    hidden, weight, _, labels = made(30, torch.float32)
    once = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels), (hidden, weight))
    half = torch.autograd.grad(linear_cross_entropy(hidden, weight, labels) / 2, (hidden, weight))
    for whole, part in zip(once, half, strict=True):
        torch.testing.assert_close(whole / 2, part)


def test_smoothing_that_is_no_share_and_a_second_gradient_are_refused() -> None:
    hidden, weight, _, labels = made(30, torch.float32)
    with pytest.raises(InputError, match="at least 0 and below 1"):
        linear_cross_entropy(hidden, weight, labels, smoothing=2.0)
    loss = linear_cross_entropy(hidden, weight, labels)
    with pytest.raises(BackendError, match="no second derivatives"):
        torch.autograd.grad(loss, hidden, create_graph=True)


def test_what_does_not_count_has_no_gradient(way: str) -> None:
    hidden, weight, _, labels = made(30, torch.float32)
    loss = linear_cross_entropy(hidden, weight, labels)
    (gradient,) = torch.autograd.grad(loss, hidden)
    assert not gradient[labels == -100].any()
    assert gradient[labels != -100].any(-1).all()
    nothing = linear_cross_entropy(hidden, weight, torch.full_like(labels, -100))
    assert nothing == 0


def test_under_autocast_it_computes_in_low_precision_and_gives_full_gradients() -> None:
    hidden, weight, _, labels = made(30, torch.float32)
    with torch.autocast(DEVICE, torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels)
    into_hidden, into_weight = torch.autograd.grad(loss, (hidden, weight))
    assert (loss.dtype, into_hidden.dtype, into_weight.dtype) == (torch.float32,) * 3
    exact = linear_cross_entropy(hidden, weight, labels)
    assert loss != exact
    torch.testing.assert_close(loss, exact, rtol=1e-2, atol=0)
