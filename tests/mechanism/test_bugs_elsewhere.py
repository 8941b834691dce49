"""Bugs of attention in other libraries, each with the right behaviour, on every backend."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard import Causal, MultiHeadAttention, Padding, See, Window, attention
from regard.errors import BackendError, InputError

everywhere = pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "reference"])


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def leaves(*shape: int) -> list[Tensor]:
    return [(randn(*shape) + n / 8).requires_grad_() for n in range(3)]


@everywhere
def test_pytorch_41508_fully_masked_row(backend: str) -> None:
    """pytorch#41508: "nn.MultiheadAttention causes gradients to become NaN under some use cases".

    Padding and a limited context together left a row with nothing to attend to: 0/0 in its softmax
    made all gradients NaN.
    """
    tensors = leaves(2, 1, 4, 1)
    mask = Window(1) & Padding([4, 2])  # the last query of the second sequence sees padding only
    output = attention(*tensors, mask=mask, backend=backend)
    assert (output[1, :, 3] == 0).all()
    assert output.isfinite().all()
    output[0].sum().backward()  # type: ignore[no-untyped-call]
    for tensor in tensors:
        assert tensor.grad.isfinite().all()
    assert (tensors[0].grad[1] == 0).all()  # type: ignore[index]


@everywhere
@pytest.mark.parametrize("low", [torch.finfo(torch.float32).min, -1e9, -1e30])
def test_pytorch_109517_finite_huge_negative_mask(backend: str, low: float) -> None:
    """pytorch#109517: "SDPA Memory Efficient Attention is producing NaNs for certain mask
    patterns".

    Adding the most negative finite number, in place of -inf, overflowed to NaN.
    """
    query, key, value = leaves(1, 2, 41, 8)
    added = torch.zeros(1, 1, 41, 41)
    added[..., :12] = low
    output = attention(query, key, value, bias=added, backend=backend)
    hidden = attention(query, key, value, mask=added == 0, backend="reference")
    torch.testing.assert_close(output, hidden, rtol=1e-5, atol=1e-6)
    for grad in torch.autograd.grad(output.square().sum(), (query, key, value)):
        assert grad.isfinite().all()


@everywhere
def test_pytorch_109517_a_row_of_huge_negative_numbers_is_still_a_row(backend: str) -> None:
    """As above; also #110213: a row that is finfo.min throughout is a constant, not a mask."""
    query, key, value = torch.zeros(1, 1, 3, 4), randn(1, 1, 5, 4), randn(1, 1, 5, 4)
    added = torch.full((3, 5), torch.finfo(torch.float32).min)
    output = attention(query, key, value, bias=added, backend=backend)
    torch.testing.assert_close(output, value.mean(2, keepdim=True).expand_as(output))


@everywhere
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("seeing", [False, True])
def test_pytorch_101967_nan_behind_a_mask(
    backend: str, poison: float, where: str, seeing: bool
) -> None:
    """pytorch#101967: "scaled_dot_product_attention produces NaN when input has NaN in masked-out
    positions": 0 * NaN is NaN, so one bad number behind the mask spoilt every output.
    """
    clean = leaves(2, 2, 9, 4)
    if backend == "sdpa" and seeing:
        with pytest.raises(BackendError, match="do not show their weights"):
            attention(*clean, see=See(entropy=True), backend=backend)
        return
    for mask, hidden in (
        (Padding([6, 9]), (0, slice(6, None))),
        (Causal() & Padding([6, 6]), (slice(None), slice(6, None))),
        (~Window(0, 0) & Padding(8), (slice(None), slice(8, None))),
    ):
        dirty = [tensor.detach().clone() for tensor in clean]
        batch, keys = hidden
        dirty[1 if where == "key" else 2][batch, :, keys, 0] = poison
        dirty = [tensor.requires_grad_() for tensor in dirty]
        see = See(entropy=True, received=True) if seeing else None
        actual: Any = attention(*dirty, mask=mask, see=see, backend=backend)
        expected: Any = attention(*clean, mask=mask, see=see, backend="reference")
        if see is not None:
            for name, field in expected[1].to_dict().items():
                torch.testing.assert_close(actual[1].to_dict()[name], field)
            actual, expected = actual[0], expected[0]
        torch.testing.assert_close(actual, expected)
        grads = torch.autograd.grad(actual.square().sum(), dirty)
        torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), clean))


@everywhere
def test_pytorch_101967_nan_in_the_future_of_a_causal_mask(backend: str) -> None:
    """As above, with the causal flag: a NaN at position 5 is nothing to positions 0 to 4."""
    query, key, value = (t.detach() for t in leaves(1, 2, 9, 4))
    expected = attention(query, key, value, mask=Causal(), backend="reference")
    key, value = key.clone(), value.clone()
    key[:, :, 5], value[:, :, 5] = math.nan, math.nan
    output = attention(query, key, value, mask=Causal(), backend=backend)
    torch.testing.assert_close(output[:, :, :5], expected[:, :, :5])
    assert output[:, :, 5:].isnan().all()  # a query that attends to NaN gets NaN


@everywhere
@pytest.mark.parametrize(("queries", "keys"), [(2, 5), (5, 2), (1, 7), (300, 310)])
def test_pytorch_108108_causal_alignment(backend: str, queries: int, keys: int) -> None:
    """pytorch#108108: "Change default behavior of scaled_dot_product_attention's causal masking
    alignment": its flag aligns the first query with the first key, wrong for every cache.
    """
    query, key, value = randn(1, 2, queries, 4), randn(1, 2, keys, 4), randn(1, 2, keys, 4)
    lower_right = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    output = attention(query, key, value, mask=Causal(), backend=backend)
    expected = attention(query, key, value, mask=lower_right, backend="reference")
    torch.testing.assert_close(output, expected)
    assert (output[:, :, : max(queries - keys, 0)] == 0).all()  # before the first key: nothing


@everywhere
def test_pytorch_170400_mask_polarity(backend: str) -> None:
    """pytorch#170400: True keeps in scaled_dot_product_attention and hides in MultiheadAttention,
    so masks moved from one to the other silently attended to the padding.
    """
    query, key, value = randn(1, 1, 1, 4), randn(1, 1, 3, 4), randn(1, 1, 3, 4)
    only_second = torch.tensor([False, True, False])
    output = attention(query, key, value, mask=only_second, backend=backend)
    torch.testing.assert_close(output, value[:, :, 1:2])
    layer = MultiHeadAttention(8, 2).eval()
    x = randn(1, 3, 8)
    changed = x.clone()
    changed[:, [0, 2]] += 1
    first = layer(x[:, 1:2], x, mask=only_second)
    torch.testing.assert_close(first, layer(x[:, 1:2], changed, mask=only_second))
    with pytest.raises(InputError, match="True where a query may attend"):
        attention(query, key, value, mask=only_second.float(), backend=backend)


@everywhere
def test_pytorch_118972_is_causal_with_padding(backend: str) -> None:
    """pytorch#118972: is_causal with padding; in #100709 the two together end in "Explicit
    attn_mask should not be set when is_causal=True".
    """
    tensors = leaves(3, 2, 9, 4)
    real = torch.tensor([9, 4, 1])
    output = attention(*tensors, mask=Causal() & Padding(real), backend=backend)
    both = torch.ones(9, 9).tril().bool() & (torch.arange(9) < real[:, None, None, None])
    expected = attention(*tensors, mask=both, backend="reference")
    torch.testing.assert_close(output, expected)
    grads = torch.autograd.grad(output.square().sum(), tensors)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), tensors))


@everywhere
def test_pytorch_97111_fast_path_truncating(backend: str) -> None:
    """pytorch#97111: "TransformerEncoder truncates output when some token positions are masked by
    src_key_padding_mask across batch": positions that were padding everywhere were cut off.
    """
    query, key, value = (randn(4, 2, 6, 8) + n for n in range(3))
    with torch.no_grad():
        output = attention(query, key, value, mask=Padding([1, 2, 3, 3]), backend=backend)
    assert output.shape == (4, 2, 6, 8)
    real = torch.tensor([1, 2, 3, 3])[:, None, None, None]
    expected = attention(query, key, value, mask=torch.arange(6) < real, backend="reference")
    torch.testing.assert_close(output, expected)


@everywhere
@pytest.mark.parametrize("keys", [33, 65, 66])
@pytest.mark.parametrize("along", ["keys", "heads"])
def test_pytorch_191937_stride_0_keys(backend: str, keys: int, along: str) -> None:
    """pytorch#191937: "SDPA EFFICIENT_ATTENTION returns wrong output for broadcasted (stride-0) k/v
    when kv length % 32 == 1 (bf16 + attn_mask ...)": off by 19.5 where rounding gives 0.09.
    """
    query = randn(1, 4, 7, 64, dtype=torch.bfloat16)
    shape = (1, 4, 1, 64) if along == "keys" else (1, 1, keys, 64)
    key, value = (randn(*shape, dtype=torch.bfloat16).expand(1, 4, keys, 64) for _ in range(2))
    assert 0 in key.stride()
    mask = torch.rand(1, 1, 7, keys, generator=torch.Generator().manual_seed(1)) < 0.7
    output = attention(query, key, value, mask=mask, backend=backend)
    exact = attention(query.double(), key.double(), value.double(), mask=mask, backend="reference")
    assert (output.double() - exact).abs().max() < 0.04  # three roundings of a bf16 near 3


@everywhere
@pytest.mark.parametrize("mask", [None, Causal()], ids=repr)
def test_pytorch_181528_grouped_heads_in_float32(backend: str, mask: Causal | None) -> None:
    """pytorch#181528: "sdp: warn when enable_gqa=True silently falls back to MATH": in
    float32 grouped heads went to the slow, n x n path without a word.
    Here they run with that path forbidden.
    """
    query, key, value = randn(2, 6, 40, 8), randn(2, 2, 40, 8), randn(2, 2, 40, 8)
    repeated = [tensor.repeat_interleave(3, dim=1) for tensor in (key, value)]
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = attention(query, key, value, mask=mask, backend=backend)
    expected = attention(query, *repeated, mask=mask, backend="reference")
    torch.testing.assert_close(output, expected)


@everywhere
def test_pytorch_124464_dropout_in_eval(backend: str) -> None:
    """pytorch#124464: "SDPA does not switch off dropout during evaluation"."""
    query, key, value = (randn(1, 2, 16, 8) for _ in range(3))
    once, twice = (attention(query, key, value, dropout=0.0, backend=backend) for _ in range(2))
    assert torch.equal(once, twice)
    torch.manual_seed(0)
    dropped = attention(query, key, value, dropout=0.5, backend=backend)
    assert not torch.allclose(dropped, once)


def test_pytorch_124464_dropout_in_eval_of_a_layer() -> None:
    """As above: a layer in eval mode must not drop, and one in training must."""
    layer, x = MultiHeadAttention(16, 2, dropout=0.5), randn(2, 5, 16)
    assert not torch.equal(layer(x), layer(x))
    layer.eval()
    assert torch.equal(layer(x), layer(x))


@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(
    ("batch", "heads", "queries", "keys"),
    [(0, 2, 3, 3), (2, 0, 3, 3), (2, 2, 0, 3), (2, 2, 3, 0), (0, 0, 0, 0)],
)
def test_pytorch_141218_empty_tensors(
    backend: str, batch: int, heads: int, queries: int, keys: int, grad: bool
) -> None:
    """pytorch#141218: "Floating point exception (core dumped) in scaled_dot_product_attention":
    empty inputs divided by zero and took the whole process down.
    """
    shapes = [(batch, heads, queries, 4), (batch, heads, keys, 4), (batch, heads, keys, 6)]
    tensors = [torch.zeros(shape, dtype=torch.half, requires_grad=grad) for shape in shapes]
    see = See(entropy=True, received=True, max_logit=True, top=2, map=2)
    output, seen = attention(*tensors, mask=Causal(), see=see, backend=backend)
    assert output.shape == (batch, heads, queries, 6)
    assert (output == 0).all()
    assert seen.received.shape == (batch, heads, keys)
    if grad:
        output.sum().backward()  # type: ignore[no-untyped-call]
        assert not any(tensor.grad.any() for tensor in tensors if tensor.grad is not None)


@everywhere
@pytest.mark.parametrize("size", [1e3, 1e4])
@pytest.mark.parametrize("mask", [None, Causal()], ids=repr)
def test_pytorch_119320_huge_activations(backend: str, size: float, mask: Causal | None) -> None:
    """pytorch#119320: "Nan in gradients of scaled_dot_product_attention operation with
    mem_efficient backend"; in #125674, the same, activations of 1000 are enough.
    """
    for fill in (torch.ones(1, 2, 50, 16), randn(1, 2, 50, 16)):
        tensors = [(fill * size).requires_grad_() for _ in range(3)]
        output = attention(*tensors, mask=mask, backend=backend)
        assert output.isfinite().all()
        for grad in torch.autograd.grad(output.mean(), tensors):
            assert grad.isfinite().all()


@everywhere
def test_pytorch_133671_backward_on_the_cpu(backend: str) -> None:
    """pytorch#133671: "Scaled_dot_product_attention CPU flash_attention backend backward result is
    not the same as math backend": it took the incoming gradient in the layout of its own output.
    """
    tensors = leaves(2, 2, 49, 32)
    output = attention(*tensors, backend=backend)
    expected = attention(*tensors, backend="reference")
    incoming = randn(2, 2, 49, 32)
    by_heads = incoming.transpose(1, 2).contiguous().transpose(1, 2)  # same numbers, other strides
    exact = torch.autograd.grad(expected, tensors, incoming)
    for gradient in (incoming, by_heads):
        actual = torch.autograd.grad(output, tensors, gradient, retain_graph=True)
        torch.testing.assert_close(actual, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["tiled", "reference"])
def test_pytorch_116350_double_backward(backend: str) -> None:
    """pytorch#116350: "derivative for aten::_scaled_dot_product_flash_attention_backward is not
    implemented": a gradient penalty, as in the report, needs the gradient of a gradient.
    """
    query, key, value = leaves(2, 2, 9, 4)
    penalties = []
    for name in (backend, "reference"):
        output = attention(query, key, value, mask=Causal(), backend=name)
        (grad,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        penalties.append(torch.autograd.grad(grad.square().sum(), (query, key, value)))
    torch.testing.assert_close(*penalties)


@pytest.mark.parametrize("backend", ["auto", "sdpa"])
def test_pytorch_116350_double_backward_is_never_silently_wrong(backend: str) -> None:
    """As above: PyTorch's fused kernels have no second derivative, and say so; 'tiled' has."""
    query, key, value = leaves(2, 2, 9, 4)
    output = attention(query, key, value, mask=Causal(), backend=backend)
    (grad,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
    with pytest.raises(RuntimeError, match="no gradients of gradients"):
        grad.square().sum().backward()  # type: ignore[no-untyped-call]


@everywhere
@pytest.mark.parametrize("scale", [0.0, -0.5])
def test_causal_with_a_scale_that_is_not_above_zero(backend: str, scale: float) -> None:
    """PyTorch 2.13 on the CPU: with is_causal=True the masked -inf is scaled too, so that a scale
    of 0 makes it NaN and a negative one +inf. Found by test_backends_agree.
    """
    tensors = leaves(1, 2, 9, 4)
    output = attention(*tensors, mask=Causal(), scale=scale, backend=backend)
    expected = attention(
        *tensors, mask=torch.ones(9, 9).tril().bool(), scale=scale, backend="reference"
    )
    torch.testing.assert_close(output, expected)


@everywhere
def test_half_precision_sums_do_not_overflow(backend: str) -> None:
    """40,000 equal keys whose values are 2: a sum before the division would pass 65,504."""
    query = torch.zeros(1, 1, 2, 8, dtype=torch.half)
    key = torch.zeros(1, 1, 40_000, 8, dtype=torch.half)
    value = torch.full((1, 1, 40_000, 8), 2.0, dtype=torch.half)
    output = attention(query, key, value, backend=backend)
    torch.testing.assert_close(output, torch.full_like(output, 2.0), rtol=2e-3, atol=0)


@pytest.mark.parametrize("backend", ["auto", "tiled", "reference"])
def test_a_key_whose_weight_rounds_to_0_is_not_taken_for_a_masked_one(backend: str) -> None:
    """Scores of 0, -100, -200 ...: only the first weight is above 0, yet all keys are attended."""
    query, key, value = torch.ones(1, 1), torch.arange(5.0)[:, None] * -100, torch.ones(5, 1)
    allowed = torch.tensor([True, True, True, False, False])
    see = See(top=4, entropy=True)
    _, seen = attention(query, key, value, mask=allowed, scale=1.0, see=see, backend=backend)
    assert seen.top.keys.flatten().tolist() == [0, 1, 2, -1]
    assert seen.top.weights.flatten().tolist() == [1.0, pytest.approx(0, abs=1e-40), 0.0, 0.0]
