"""Masks of PyTorch and transformers: what is recognised equals the tensor, ranges or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

from helpers.generated_calls import mask_leaves, packing
from regard import (
    Causal,
    InputError,
    Padding,
    Segments,
    Window,
    attention,
    mask_from_multihead,
    mask_from_torch,
    mask_from_transformers,
)
from regard.mechanism import masks
from regard.mechanism.geometry import Extent, Tile
from regard.mechanism.masks import Mask

CPU = torch.device("cpu")
generated = settings(max_examples=150, derandomize=True, database=None)
extents = st.builds(
    Extent, st.sampled_from((1, 2, 3)), st.sampled_from((1, 2)),
    st.sampled_from((1, 2, 5, 9)), st.sampled_from((1, 3, 5, 9)), st.just(CPU), st.none(),
)  # fmt: skip


def whole(mask: Mask, extent: Extent) -> Tensor:
    mask.check(extent)
    tile = Tile(extent, range(extent.queries), range(extent.keys))
    return mask.tile(tile).expand(extent.batch, extent.heads, extent.queries, extent.keys)


def hidden(allowed: Tensor, number: float, dtype: torch.dtype) -> Tensor:
    """The additive form of a mask."""
    number = max(number, torch.finfo(dtype).min) if number > -float("inf") else number
    return torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, number)


numbers = st.sampled_from((-1e4, -1e9, -3.5e38, -float("inf")))
dtypes = st.sampled_from((torch.float32, torch.float16, torch.bfloat16, torch.float64))


@pytest.mark.slow
@generated
@given(data=st.data(), extent=extents)
def test_any_mask_is_recognised_as_what_it_is(data: st.DataObject, extent: Extent) -> None:
    mask = data.draw(mask_leaves(extent, data.draw(st.integers(0, 99))))
    if data.draw(st.booleans()):
        mask = mask & data.draw(mask_leaves(extent, 0))
    allowed = whole(mask, extent)
    given: list[Tensor] = [allowed, hidden(allowed, data.draw(numbers), data.draw(dtypes))]
    for tensor in given:
        assert torch.equal(whole(mask_from_transformers(tensor), extent), allowed)
    rows = ~allowed.reshape(-1, extent.queries, extent.keys)
    assert torch.equal(whole(mask_from_multihead(rows, num_heads=extent.heads), extent), allowed)


@st.composite
def ranges(draw: st.DrawFn, extent: Extent) -> Mask:
    """Masks as models make them: a window, padding on one side, and packed sequences."""
    side = st.none() | st.integers(0, 4)
    count = st.integers(0, extent.keys)
    mask: Mask = Window(draw(side), draw(side))
    if draw(st.booleans()):
        lengths = [draw(count) for _ in range(extent.batch)]
        mask = mask & Padding(lengths, draw(st.sampled_from(("left", "right"))))
    if extent.queries == extent.keys and draw(st.booleans()):
        return mask & Segments([draw(packing(extent.keys)) for _ in range(extent.batch)])
    if draw(st.booleans()):
        first = draw(st.integers(-3, extent.keys))
        within = draw(st.sampled_from((Causal(), Window(2), Window(0, 2))))
        shifted = Segments([extent.queries], [extent.keys], query_starts=first, within=within)
        mask = shifted & Padding([draw(count) for _ in range(extent.batch)])
    return mask


@generated
@given(data=st.data(), extent=extents)
def test_ranges_are_recognised_as_ranges(data: st.DataObject, extent: Extent) -> None:
    allowed = whole(data.draw(ranges(extent)), extent)
    found = mask_from_transformers(allowed)
    assert found.is_ranges, found
    assert found.static
    assert torch.equal(whole(found, extent), allowed)


@pytest.mark.parametrize(
    ("mask", "same"),
    [
        (Causal(), Causal()),
        (Window(None, None), Window(None, None)),
        (Causal() & Window(2), Window(2)),
        (Window(1, 2), Window(1, 2)),
        (Segments([2, 4]), Segments([2, 4])),
        (Segments([2, 4]) & Causal(), Segments([2, 4]) & Causal()),
    ],
    ids=repr,
)
def test_the_simplest_mask_is_chosen(mask: Mask, same: Mask) -> None:
    allowed = whole(mask, Extent(2, 2, 6, 6, CPU))
    assert mask_from_transformers(allowed) == same


def test_one_row_stands_for_all_queries() -> None:
    real = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    for tensor in (real, real.long(), real.float()):
        mask = mask_from_transformers(tensor)
        assert repr(mask) == "Padding(lengths=(3, 5), side='right')"
    gaps = torch.tensor([[1, 0, 1, 1]])
    assert isinstance(mask_from_transformers(gaps), masks.Dense)
    x = torch.randn(1, 2, 4, 8)
    output = attention(x, x, x, mask=mask_from_transformers(gaps))
    assert torch.equal(output, attention(x, x, x, mask=gaps.bool()))


@pytest.mark.parametrize("queries", [2, 5, 7])
@pytest.mark.parametrize("make", [causal_upper_left, causal_lower_right])
@pytest.mark.filterwarnings("ignore:Lower right causal bias will produce NaNs")
def test_a_causal_bias_of_pytorch(make: Any, queries: int) -> None:
    bias = make(queries, 5)
    mask = mask_from_torch(bias)
    assert mask.is_ranges
    assert torch.equal(whole(mask, Extent(1, 1, queries, 5, CPU))[0, 0], bias._materialize())


def test_the_masks_of_multihead_attention() -> None:
    """Against the module itself, whose projections are the identity."""
    module = torch.nn.MultiheadAttention(8, 2, bias=False, batch_first=True).eval()
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(8).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(8))
    x = torch.randn(3, 5, 8)
    padding = torch.arange(5) >= torch.tensor([5, 3, 4])[:, None]
    later = torch.ones(5, 5, dtype=torch.bool).triu(1)
    each = torch.stack([later, later.flip(0).flip(1) & ~torch.eye(5, dtype=torch.bool)] * 3)
    heads = x.unflatten(-1, (2, 4)).transpose(1, 2)
    for attn_mask, key_padding in ((later, padding), (None, padding), (later, None), (each, None)):
        mask = mask_from_multihead(attn_mask, key_padding, num_heads=2)
        assert mask.is_ranges == (attn_mask is not each)
        expected, _ = module(x, x, x, attn_mask=attn_mask, key_padding_mask=key_padding)
        output = attention(heads, heads, heads, mask=mask).transpose(1, 2).flatten(2)
        torch.testing.assert_close(output, expected)
    assert mask_from_multihead() == Window(None, None)


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda: mask_from_transformers(torch.ones(2, 3, 4)), r"\[2, 3, 4\]"),
        (lambda: mask_from_transformers(torch.tensor([[1, 2, 2]])), "Segments.from_ids"),
        (lambda: mask_from_transformers(torch.ones(1, 1, 3, 3)), "other numbers.*bias=tensor"),
        (lambda: mask_from_multihead(torch.full((3, 3), -2.0)), "attn_mask.*bias=tensor"),
        (lambda: mask_from_multihead(torch.zeros(3, 4, 4), num_heads=2), "num_heads"),
        (lambda: mask_from_multihead(None, torch.zeros(1, 1, 4)), "key_padding_mask"),
        (lambda: mask_from_torch(torch.zeros(2, 2)), "CausalBias"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_mask_is_refused(convert: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        convert()
