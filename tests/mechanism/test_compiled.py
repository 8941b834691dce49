"""Calls that torch.compile captures as one graph, with masks and fields made inside of it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, Dilated, Padding, Prefix, See, Segments, Window, attention, masks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # of PyTorch itself
]

CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "dilated": lambda: {"mask": Dilated(3) & Causal()},
    "not": lambda: {"mask": masks.Not(Padding(9))},
    "or": lambda: {"mask": Padding([9, 12]) | Window(2)},
    "padding": lambda: {"mask": Padding([9, 12])},
    "prefix": lambda: {"mask": Prefix([3, 4]) & Padding([9, 12])},
    "softcap": lambda: {"softcap": 20.0},
    "causal, softcap": lambda: {"mask": Causal(), "softcap": 20.0},
    "seeing": lambda: {
        "mask": Causal(),
        "see": See(entropy=True, received=True, top=2, map=4),
    },
}


def values(result: Any) -> list[Tensor]:
    if isinstance(result, Tensor):
        return [result]
    output, seen = result
    return [output, *seen.to_dict().values()]


@pytest.mark.parametrize(
    ("name", "dynamic", "gradient"),
    [
        ("dilated", False, True),
        ("dilated", True, False),
        ("not", False, False),
        ("or", True, False),
        ("padding", True, False),
        ("prefix", True, False),
        ("softcap", False, False),
        ("causal, softcap", True, False),
        ("causal, softcap", False, True),
        ("seeing", False, False),
    ],
)
def test_one_graph_for_masks_that_are_made_inside_of_it(
    name: str, dynamic: bool, gradient: bool
) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        return values(attention(query, key, value, **CALLS[name]()))

    torch.compiler.reset()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for length in (40, 57) if dynamic else (40,):
        tensors = [tensor.requires_grad_(gradient) for tensor in torch.randn(3, 2, 2, length, 8)]
        actual, expected = compiled(*tensors), call(*tensors)
        torch.testing.assert_close(actual, expected)
        if gradient:
            grads = [torch.autograd.grad(found[0].sum(), tensors) for found in (actual, expected)]
            torch.testing.assert_close(*grads)


def test_a_mask_tensor_of_fixed_sizes_fits_queries_of_dynamic_length() -> None:
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    for length in (9, 12):
        query = torch.randn(2, 2, length, 8)
        mask = torch.ones(2, 1, length, length, dtype=torch.bool).tril()
        torch._dynamo.mark_static(mask)
        expected = attention(query, query, query, mask=mask)
        torch.testing.assert_close(compiled(query, query, query, mask=mask), expected)


def test_a_key_that_no_query_sees_leaks_nothing() -> None:
    """In a graph no value is checked, so keys that are hidden from all queries become zeros."""
    query, key, value = torch.randn(3, 2, 2, 40, 8).unbind()
    expected = attention(query, key, value, mask=~Padding(24))
    key[:, :, 20], value[:, :, 20] = math.nan, math.inf
    torch.compiler.reset()
    compiled = torch.compile(attention, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(query, key, value, mask=~Padding(24)), expected)


@pytest.mark.parametrize("name", ["segments", "rows", "rows of a dilated mask"])
def test_one_graph_for_a_fixed_length(name: str) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        if name == "segments":
            mask = Segments([[10, 30], [20, 20]]) & Causal()
            return values(attention(query, key, value, mask=mask))
        mask = Dilated(3) if "dilated" in name else None
        return values(attention(query, key, value, mask=mask, see=See(rows=[5, -1])))

    torch.compiler.reset()
    tensors = torch.randn(3, 2, 2, 40, 8).unbind()
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*tensors), call(*tensors))
