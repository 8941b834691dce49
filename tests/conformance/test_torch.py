"""PyTorch's own samples of its attention functions, and random calls, with their gradients.

Each sample runs in float64 and float32. ``multi_head_attention_forward`` has NaN for a query that
may attend to nothing.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard import Causal, See, attention, mask_from_multihead

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def sdpa(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
    enable_gqa=False, *, backend,
) -> tuple[Tensor]:  # fmt: skip
    """``scaled_dot_product_attention`` without dropout."""
    if query.dim() < key.dim():
        query = query.expand(*key.shape[:-2], *query.shape[-2:])
    given: dict[str, Any] = {"mask": Causal(), "query_start": 0} if is_causal else {}
    if attn_mask is not None:
        given["mask" if attn_mask.dtype == torch.bool else "bias"] = attn_mask
    return (attention(query, key, value, **given, scale=scale, backend=backend),)


def multihead(
    query, key, value, _, heads, weight, bias, bias_k, bias_v, zero, dropout_p, *out, backend,
    attn_mask=None, key_padding_mask=None, use_separate_proj_weight=False, training=False, **own,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """``multi_head_attention_forward`` without dropout; the batch has an axis."""
    query, key, value = (x if x.dim() == 3 else x[:, None] for x in (query, key, value))
    weights = map(own.get, own) if use_separate_proj_weight else weight.chunk(3)
    q, k, v = map(F.linear, (query, key, value), weights, bias.chunk(3))
    masks = [
        None if m is None else F.pad(m, (0, bias_k is not None))
        for m in (attn_mask, key_padding_mask)
    ]
    if bias_k is not None:  # a key that no mask hides
        k, v = torch.cat([k, bias_k.expand_as(k[:1])]), torch.cat([v, bias_v.expand_as(v[:1])])
    q, k, v = (x.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3) for x in (q, k, v))
    added = None
    if attn_mask is not None and attn_mask.is_floating_point():
        added = masks[0].unflatten(0, (-1, heads)) if attn_mask.dim() == 3 else masks[0]
        masks[0] = None
    output, seen = attention(
        q, k, v, mask=mask_from_multihead(*masks, heads), bias=added, backend=backend,
        sinks=q.new_zeros(heads) if zero else None, see=See(weights=True, sink=zero),
    )  # fmt: skip
    parts = [seen.weights, seen.sink[..., None]] if zero else [seen.weights]
    return F.linear(output.permute(2, 0, 1, 3).flatten(2), *out), torch.cat(parts, -1).mean(1)


FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "scaled_dot_product_attention": (F.scaled_dot_product_attention, sdpa),
    "multi_head_attention_forward": (F.multi_head_attention_forward, multihead),
}


def samples(name: str) -> list[Arguments]:
    operator = next(op for op in op_db if op.name == f"nn.functional.{name}")
    torch.manual_seed(0)
    found = operator.sample_inputs("cpu", torch.float64)
    return [((sample.input, *sample.args), sample.kwargs) for sample in found]


def random_sdpa(seed: int) -> Arguments:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    queries, keys = draw.choice(((5, 9), (9, 5), (7, 7), (1, 6)))
    heads, key_heads = draw.choice(((4, 4), (4, 2), (4, 1)))
    query = tensor(2, heads, queries, 8)
    options: dict[str, Any] = {"enable_gqa": heads != key_heads}
    scores = tensor(draw.choice((1, 2)), draw.choice((1, heads)), queries, keys)
    masked = {"is_causal": True}, {"attn_mask": scores}, {"attn_mask": scores > 0.5}, {}
    options |= draw.choice(masked) | draw.choice(({"scale": 0.3}, {}))
    return (query, tensor(2, key_heads, keys, 8), tensor(2, key_heads, keys, 6)), options


def random_multihead(seed: int) -> Arguments:
    torch.manual_seed(seed)
    draw = random.Random(seed)
    batch, heads, dim = 2, 3, 6
    queries, keys = draw.choice(((5, 9), (9, 5), (7, 7)))
    extra = (tensor(1, 1, dim), tensor(1, 1, dim)) if draw.random() < 0.5 else (None, None)
    rows = draw.choice(((queries, keys), (batch * heads, queries, keys)))
    options = {
        "attn_mask": draw.choice((tensor(*rows), tensor(*rows) > 0.8, None)),
        "key_padding_mask": draw.choice((tensor(batch, keys) > 0.8, None)),
    }
    if all(mask is not None for mask in options.values()):  # both have one dtype
        options["attn_mask"] = options["attn_mask"] > 0.8
    return (
        tensor(queries, batch, dim), tensor(keys, batch, dim), tensor(keys, batch, dim), dim, heads,
        tensor(3 * dim, dim), tensor(3 * dim), *extra, draw.random() < 0.5, 0.0,
        tensor(dim, dim), tensor(dim),
    ), options  # fmt: skip


def tensor(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


CASES = {
    **{f"{name}-{i}": call for name in FUNCTIONS for i, call in enumerate(samples(name))},
    **{f"scaled_dot_product_attention-random-{i}": random_sdpa(i) for i in range(60)},
    **{f"multi_head_attention_forward-random-{i}": random_multihead(i) for i in range(60)},
}


def dropout(name: str) -> float:
    arguments, options = CASES[name]
    return options.get("dropout_p", 0) if name.startswith("scaled") else arguments[10]


assert sum(dropout(name) > 0 for name in CASES) == 108  # of PyTorch 2.13


@pytest.mark.parametrize("name", CASES)
def test_call(name: str) -> None:
    if dropout(name):
        pytest.skip("not expressible: dropout draws other random numbers")
    theirs, ours = FUNCTIONS[name.split("-", maxsplit=1)[0]]
    for dtype in (torch.float64, torch.float32):
        arguments = [as_leaf(x, dtype) for x in CASES[name][0]]
        options = {option: as_leaf(x, dtype) for option, x in CASES[name][1].items()}
        leaves = [x for x in (*arguments, *options.values()) if getattr(x, "requires_grad", False)]
        expected = theirs(*arguments, **options)
        expected = expected if isinstance(expected, tuple) else (expected,)
        attends = expected[-1].isfinite().all(-1, keepdim=True)
        batch_first = len(expected) == 1 or expected[0].dim() == 2
        rows = attends if batch_first else attends.transpose(0, 1)
        onto = torch.randn_like(expected[0])
        for backend in ("auto", "tiled", "reference"):
            found = ours(*arguments, **options, backend=backend)
            found = [x.view_as(other) for x, other in zip(found, expected, strict=True)]
            compare(found[0] * rows, expected[0].nan_to_num() * rows)
            compare(found[-1] * attends, expected[-1].nan_to_num())
            if attends.all():
                gradients = (
                    torch.autograd.grad(
                        outputs[0], leaves, onto, retain_graph=True, materialize_grads=True
                    )
                    for outputs in (found, expected)
                )
                for one, other in zip(*gradients, strict=True):
                    compare(one, other)


def as_leaf(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, Tensor) and x.is_floating_point():
        return x.detach().to(dtype).requires_grad_()
    return x


def compare(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to the rounding of sums whose terms are as large as the largest number."""
    bound = 200 * torch.finfo(theirs.dtype).eps * max(1, theirs.abs().max().item())
    torch.testing.assert_close(ours, theirs, rtol=0, atol=bound)
