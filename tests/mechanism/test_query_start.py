"""Where the queries stand: the position of the first query, for the call or for each sequence."""

from __future__ import annotations

from typing import Any

import numpy
import pytest
import torch
from torch import Tensor

from regard import Causal, InputError, Padding, See, Segments, Window, attention, why
from regard.mechanism.backends import hopper
from regard.mechanism.biases import Alibi, RelativeBuckets, RelativeContent
from regard.mechanism.call import MAX_START, check
from regard.mechanism.masks import Mask

BACKENDS = ("reference", "tiled", "sdpa", "auto")


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


QUERY, KEY = random(2, 2, 6, 8, seed=1), random(2, 2, 9, 8, seed=2)


def allowed(mask: Mask, **given: Any) -> Tensor:
    """Whether each query attends to each key, as the reference does."""
    _, seen = attention(QUERY, KEY, KEY, mask=mask, see=See(weights=True), **given)
    return seen.weights[:, 0] > 0


@pytest.mark.parametrize("start", [0, 3, 2, -2, 8, 20])
def test_a_causal_mask_starts_there(start: int) -> None:
    rows, columns = torch.arange(6)[:, None], torch.arange(9)
    expected = columns <= rows + start
    for backend in ("tiled", "reference"):
        found = allowed(Causal(), query_start=start, backend=backend)
        assert torch.equal(found, expected.expand(2, -1, -1))


def test_zero_is_the_alignment_of_pytorch() -> None:
    from torch.nn.functional import scaled_dot_product_attention

    expected = scaled_dot_product_attention(QUERY, KEY, KEY, is_causal=True)
    for backend in BACKENDS:
        output = attention(QUERY, KEY, KEY, mask=Causal(), query_start=0, backend=backend)
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("starts", [[1, 4], (1, 4), torch.tensor([1, 4]), numpy.array([1, 4])])
@pytest.mark.parametrize("mask", [Causal(), Window(2, 1), Segments([4, 5]), Causal() & Padding(7)])
def test_each_sequence_has_its_own_start(starts: Any, mask: Mask) -> None:
    tensors = QUERY.clone().requires_grad_(), KEY.clone().requires_grad_()
    bias = Alibi(torch.tensor([0.5, 0.1], dtype=torch.float64))
    for backend in BACKENDS:
        given: Any = {"mask": mask, "bias": bias, "backend": backend}
        output = attention(tensors[0], tensors[1], tensors[1], **given, query_start=starts)
        alone = [
            attention(QUERY[b : b + 1], KEY[b : b + 1], KEY[b : b + 1], **given, query_start=start)
            for b, start in enumerate((1, 4))
        ]
        torch.testing.assert_close(output, torch.cat(alone))
        (gradient,) = torch.autograd.grad(output.sum(), tensors[0])
        assert gradient.isfinite().all()


def test_biases_by_distance_follow_it() -> None:
    """Queries 3 to 5 of nine, and the same three queries of a call that has all nine."""
    whole = random(1, 2, 9, 8, seed=3)
    table, relative = random(8, 2, seed=4), random(2, 12, 8, seed=5)
    biases = {
        "alibi": (Alibi(torch.tensor([0.5, 0.1], dtype=torch.float64)),) * 2,
        "buckets": (RelativeBuckets(table, max_distance=7),) * 2,
        "content": (
            RelativeContent(whole, relative, -4),
            RelativeContent(whole[:, :, 3:6], relative, -4),
        ),
    }
    see = See(distance=True)
    for name, (bias, some) in biases.items():
        for backend in ("reference", "tiled"):
            expected, seen = attention(whole, whole, whole, bias=bias, see=see, backend=backend)
            part, part_seen = attention(
                whole[:, :, 3:6], whole, whole, bias=some, see=see, query_start=3, backend=backend
            )
            torch.testing.assert_close(part, expected[:, :, 3:6], msg=name)
            torch.testing.assert_close(part_seen.distance, seen.distance[:, :, 3:6], msg=name)
    content = RelativeContent(random(2, 2, 6, 8, seed=6), relative, -4)
    for start in ((3, 1), torch.tensor([3, 1])):
        both = attention(QUERY, KEY, KEY, bias=content, query_start=start)
        for b, own in enumerate((3, 1)):
            alone = RelativeContent(content.query[b : b + 1], relative, -4)
            one = [tensor[b : b + 1] for tensor in (QUERY, KEY, KEY)]
            torch.testing.assert_close(
                both[b : b + 1], attention(*one, bias=alone, query_start=own)
            )


def test_a_start_that_changes_nothing_is_no_start() -> None:
    call = check(QUERY, KEY, KEY, None, None, None, None, 0.0, None, [3, 3])
    assert call.extent.query_start is None


def test_a_tensor_of_starts_may_change_between_calls() -> None:
    starts = torch.tensor([0, 0])
    before = attention(QUERY, KEY, KEY, mask=Causal(), query_start=starts)
    starts += 3
    after = attention(QUERY, KEY, KEY, mask=Causal(), query_start=starts)
    torch.testing.assert_close(after, attention(QUERY, KEY, KEY, mask=Causal()))
    assert not torch.allclose(before, after)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_starts_are_compiled_into_one_graph(backend: str) -> None:
    def run(starts: Any) -> Tensor:
        given: Any = {"mask": Causal() & Window(4), "query_start": starts, "backend": backend}
        return attention(QUERY, KEY, KEY, **given)

    torch._dynamo.reset()
    compiled = torch.compile(run, backend="eager", fullgraph=True)
    for starts in (torch.tensor([0, 2]), torch.tensor([5, -1]), [3, 1], 2):
        torch.testing.assert_close(compiled(starts), run(starts))


def test_positions_keep_the_default_dtype_out() -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        output = attention(QUERY, KEY, KEY, mask=Causal(), query_start=[0, 2], backend="tiled")
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(
        output, attention(QUERY, KEY, KEY, mask=Causal(), query_start=[0, 2], backend="reference")
    )


@pytest.mark.parametrize(
    ("start", "message"),
    [
        (1.5, r"one per sequence, but got 1\.5"),
        ([0, "a"], "whole number"),
        ([0, 1, 2], "3 entries for a batch of 2"),
        (torch.tensor([0.0, 1.0]), "float32"),
        (torch.zeros(2, 1, dtype=torch.long), r"\[2, 1\]"),
        (MAX_START + 1, "1,073,741,824"),
    ],
)
def test_a_wrong_start_is_refused(start: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        attention(QUERY, KEY, KEY, query_start=start)


def test_hopper_says_that_it_has_no_starts() -> None:
    call = check(QUERY, KEY, KEY, None, None, None, None, 0.0, See(lse=True), 0)
    assert "last query" in (hopper._why_not_call(call) or "")
    assert why(QUERY, KEY, KEY, mask=Causal(), query_start=0).chosen == "sdpa"
