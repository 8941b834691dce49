"""Gradients, to second order, against finite differences; and the compiled call."""

from __future__ import annotations

import shutil
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from regard import (
    Alibi,
    BackendError,
    Causal,
    Padding,
    RelativeBuckets,
    RelativeContent,
    See,
    Segments,
    Window,
    attention,
)
from regard.mechanism import biases, masks
from regard.mechanism.biases import Bias
from regard.mechanism.masks import Mask

QUERIES, KEYS, DIM, WIDTH = 3, 4, 2, 3

MASKS: dict[str, Mask | None] = {
    "none": None,
    "causal": Causal(),
    "window": Window(1, 1),
    "padding": Padding([3, 0]),  # the second sequence has nothing to attend to
    "segments": Segments([1, 3]) & Causal(),
    "dense": masks.Dense(
        torch.tensor([[1, 0, 1, 1], [0, 0, 0, 0], [1, 1, 0, 1]], dtype=torch.bool)
    ),
    "joined": ~Window(0, 0) & (Causal() | Padding([2, 1])),
}

# What makes a bias of the tensors that follow query, key and value, and those tensors' shapes.
BIASES: dict[str, tuple[Callable[..., Bias], list[tuple[int, ...]]]] = {
    "dense": (biases.Dense, [(2, 1, QUERIES, KEYS)]),
    "alibi": (Alibi, [(2,)]),
    "buckets": (lambda table: RelativeBuckets(table, True, 20), [(8, 2)]),
    "content": (
        lambda query, relative: RelativeContent(query, relative, -1),
        [(2, 2, QUERIES, DIM), (2, 4, DIM)],
    ),
}

FIELDS: dict[str, See] = {
    "lse": See(lse=True),
    "entropy": See(entropy=True),
    "received": See(received=True),
    "rows": See(rows=[2, 0]),
    "map": See(map=(2, 2)),
    "distance": See(distance=True),
    "distance_variance": See(distance_variance=True),
    "weights": See(weights=True),
}

on_both = pytest.mark.parametrize("backend", ["reference", "tiled"])


def inputs(*more: tuple[int, ...]) -> list[Tensor]:
    """Query, key, value with one key head for two query heads, and what a bias needs."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 2, QUERIES, DIM), (2, 1, KEYS, DIM), (2, 1, KEYS, WIDTH), *more]
    return [
        torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()
        for shape in shapes
    ]


def check(function: Callable[..., Tensor], tensors: list[Tensor]) -> None:
    """First and second derivatives against differences, along random directions for speed."""
    assert gradcheck(function, tensors, fast_mode=True)
    assert gradgradcheck(function, tensors, fast_mode=True)


@on_both
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("softcap", [None, 0.8])
def test_output(backend: str, mask: str, softcap: float | None) -> None:
    def output(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, mask=MASKS[mask], softcap=softcap, backend=backend)

    check(output, inputs())


@on_both
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("mask", ["none", "causal", "joined"])
def test_bias(backend: str, bias: str, mask: str) -> None:
    make, shapes = BIASES[bias]

    def output(q: Tensor, k: Tensor, v: Tensor, *held: Tensor) -> Tensor:
        return attention(q, k, v, mask=MASKS[mask], bias=make(*held), backend=backend)

    check(output, inputs(*shapes))


@on_both
@pytest.mark.parametrize("field", FIELDS)
@pytest.mark.parametrize("mask", ["none", "causal", "joined"])
def test_seen(backend: str, field: str, mask: str) -> None:
    make, shapes = BIASES["alibi"]

    def seen(q: Tensor, k: Tensor, v: Tensor, slopes: Tensor) -> Tensor:
        _, actual = attention(
            q, k, v, mask=MASKS[mask], bias=make(slopes), see=FIELDS[field], backend=backend
        )
        value = actual.to_dict()[field]
        return torch.where(value.isfinite(), value, 0)  # lse of nothing is -inf

    # What is seen does not depend on the values, but a graph through them must not break it.
    check(seen, inputs(*shapes))


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "auto"])
@pytest.mark.parametrize("causal", [False, True])
def test_a_query_with_nothing_to_attend_to_has_zero_gradients(backend: str, causal: bool) -> None:
    query, key, value = inputs()
    allowed = torch.tensor([True, False, True])[:, None].expand(QUERIES, KEYS)
    mask = masks.Dense(allowed) & Causal() if causal else masks.Dense(allowed)
    output = attention(query, key, value, mask=mask, backend=backend)
    assert (output[:, :, 1] == 0).all()
    for_query, for_key, for_value = torch.autograd.grad(output.exp().sum(), (query, key, value))
    assert (for_query[:, :, 1] == 0).all()
    assert (for_query[:, :, 0] != 0).any()
    assert all(grad.isfinite().all() for grad in (for_key, for_value))


@pytest.mark.parametrize("backend", ["reference", "tiled", "sdpa", "auto"])
def test_where_nobody_may_attend_all_gradients_are_zero(backend: str) -> None:
    tensors = inputs()
    output = attention(*tensors, mask=Padding(0), backend=backend)
    assert (output == 0).all()
    for grad in torch.autograd.grad(output.sum(), tensors):
        assert (grad == 0).all()


# Inductor needs a C++ compiler; without one the graph is captured and run all the same.
# Its own use of what PyTorch is about to drop is no failure of ours.
of_pytorch = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
COMPILER = "inductor" if shutil.which("g++") or shutil.which("clang++") else "aot_eager"


@pytest.mark.slow
@of_pytorch
@pytest.mark.parametrize(
    ("mask", "key_heads", "backend"),
    [
        (Causal() & Window(4), 1, COMPILER),
        (None, 2, "aot_eager"),
        (Causal(), 1, "aot_eager"),
        (Padding([37, 20]), 2, "aot_eager"),
        (Segments([7, 30]), 1, "aot_eager"),
    ],
    ids=repr,
)
def test_compiles_to_one_graph(mask: Mask | None, key_heads: int, backend: str) -> None:
    query = torch.randn(2, 2, 37, 8)
    key, value = torch.randn(2, 2, key_heads, 37, 8)
    torch.compiler.reset()  # there is a limit to how many graphs one function has
    compiled = torch.compile(attention, fullgraph=True, backend=backend)
    expected = attention(query, key, value, mask=mask)
    torch.testing.assert_close(compiled(query, key, value, mask=mask), expected)


@pytest.mark.slow
@of_pytorch
def test_compiled_gradients_are_the_same() -> None:
    tensors = [torch.randn(1, 2, 19, 8, requires_grad=True) for _ in range(3)]
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend=COMPILER)
    expected = torch.autograd.grad(attention(*tensors, mask=Causal()).square().sum(), tensors)
    actual = torch.autograd.grad(compiled(*tensors, mask=Causal()).square().sum(), tensors)
    torch.testing.assert_close(actual, expected)


@pytest.mark.slow
@of_pytorch
def test_what_is_seen_may_be_part_of_what_is_compiled() -> None:
    x = torch.randn(1, 2, 70, 8)  # more than a block
    expected = attention(x, x, x, see=See(entropy=True))[1].entropy

    def entropy(x: Tensor) -> Tensor:
        actual = attention(x, x, x, see=See(entropy=True))[1].entropy
        assert actual is not None
        return actual * 2

    actual = torch.compile(entropy, backend=COMPILER)(x)
    torch.testing.assert_close(actual, 2 * expected)


# ---- torch.func ----------------------------------------------------------------------------------


def causal(x: Tensor) -> Tensor:
    return attention(x, x, x, mask=Causal()).square().sum()


def windowed(x: Tensor) -> Tensor:
    return attention(x, x, x, mask=Causal() & Window(1)).square().sum()


def entropy(x: Tensor) -> Tensor:
    actual = attention(x, x, x, mask=Causal(), see=See(entropy=True))[1].entropy
    return actual.sum()


not_yet_batched = pytest.mark.filterwarnings("ignore:There is a performance drop")


@of_pytorch
@not_yet_batched
@pytest.mark.parametrize("function", [causal, windowed, entropy])
def test_functions_of_attention_can_be_transformed(function: Callable[[Tensor], Tensor]) -> None:
    x, along = torch.randn(2, 3, 2, 5, 4, dtype=torch.float64)  # 3 samples of [heads, length, dim]

    def one(x: Tensor) -> Tensor:
        return function(x[None])

    leaf = x[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(one(leaf), leaf)
    torch.testing.assert_close(torch.func.grad(one)(x[0]), gradient)
    tangent = torch.func.jvp(one, (x[0],), (along[0],))[1]
    torch.testing.assert_close(tangent, (gradient * along[0]).sum())
    torch.testing.assert_close(torch.func.vmap(one)(x), torch.stack([one(part) for part in x]))
    each = torch.func.vmap(torch.func.grad(one))(x)
    torch.testing.assert_close(each[0], gradient)
    # And forward over backward, as for products with a Hessian.
    _, second = torch.func.jvp(torch.func.grad(one), (x[0],), (along[0],))
    ahead, behind = (torch.func.grad(one)(x[0] + step * along[0]) for step in (1e-5, -1e-5))
    torch.testing.assert_close(second, (ahead - behind) / 2e-5, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("mask", [None, Causal(), Padding([4])])
def test_second_gradients_name_a_backend_that_has_them(mask: Mask | None) -> None:
    def second(backend: str) -> Tensor:
        x = torch.ones(1, 2, 6, 4, requires_grad=True)
        output = attention(x, x, x, mask=mask, backend=backend)
        (first,) = torch.autograd.grad(output.sin().sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), x)[0]

    for backend in ("auto", "sdpa"):
        with pytest.raises(BackendError, match=r"no gradients of gradients.*backend='reference'"):
            second(backend)
    torch.testing.assert_close(second("tiled"), second("reference"))


@pytest.mark.parametrize("randomness", [None, "error", "different", "same"])
def test_batched_gradients_with_dropout(randomness: str | None) -> None:
    def compare(backend: str) -> None:
        def one(upstream: Tensor, batched: bool = False) -> Tensor:
            return torch.autograd.grad(
                output, value, upstream, retain_graph=True, is_grads_batched=batched
            )[0]

        x, value = torch.ones(1, 2, 6, 4), torch.ones(1, 2, 6, 4, requires_grad=True)
        output = attention(x, x, value, dropout=0.5, backend=backend)
        upstream = torch.randn(3, *output.shape)
        expected = torch.stack([one(row) for row in upstream])
        if randomness is None:
            actual = one(upstream, batched=True)
        else:
            actual = torch.func.vmap(one, randomness=randomness)(upstream)
        torch.testing.assert_close(actual, expected)

    compare("reference")
    if randomness == "same":
        compare("tiled")
    else:
        with pytest.raises(BackendError, match=r"batched gradients.*backend='reference'"):
            compare("tiled")


@pytest.mark.slow
def test_a_scale_may_change_between_compiled_calls() -> None:
    compiled = torch.compile(
        lambda x, scale: attention(x, x, x, scale=scale, backend="reference"),
        fullgraph=True,
        backend="aot_eager",
    )
    x = torch.randn(1, 2, 6, 4)
    for scale in (0.5, 0.7):
        torch.testing.assert_close(compiled(x, scale), attention(x, x, x, scale=scale))
