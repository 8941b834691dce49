"""Random calls of ``jax.nn.dot_product_attention`` in our terms, with their gradients.

A query that may attend to nothing has zeros here. There it has the mean of all values, or zeros
past its ``query_seq_lengths``. JAX computes the softmax in float32 whatever the dtype.
"""

from __future__ import annotations

import random
from typing import Any

import jax
import numpy
import pytest
import torch
from torch import Tensor

from regard import Causal, Padding, See, Segments, Window, attention
from regard.mechanism import masks
from regard.mechanism.seeing import Seen

jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)  # of the compiler, which takes most time


def dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    bias: Tensor | None = None,
    mask: Tensor | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Tensor | None = None,
    key_value_seq_lengths: Tensor | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    backend: str,
) -> tuple[Tensor, Seen]:
    """``jax.nn.dot_product_attention``, with tensors [batch, length, heads, dim]."""
    size = local_window_size
    allowed: masks.Mask = Window(*(size if isinstance(size, tuple) else (size, size)))
    if is_causal:
        allowed = allowed & Causal()
    if key_value_seq_lengths is not None:
        allowed = allowed & Padding(key_value_seq_lengths)
    if query_seq_lengths is not None:  # queries past the length are a segment without keys
        queries, keys = query.shape[1], key.shape[1]
        lengths = [[length, queries - length] for length in query_seq_lengths.tolist()]
        allowed = allowed & Segments(lengths, [[keys, 0]] * len(lengths))
    if mask is not None:
        allowed = allowed & masks.Dense(mask)
    query, key, value = (x.swapaxes(1, 2) for x in (query, key, value))
    given: dict[str, Any] = {"mask": allowed, "bias": bias, "scale": scale, "query_start": 0}
    output, seen = attention(query, key, value, **given, see=See(lse=True), backend=backend)
    return output.swapaxes(1, 2), seen


def random_call(seed: int) -> tuple[list[numpy.ndarray], dict[str, Any]]:
    draw, numbers = random.Random(seed), numpy.random.default_rng(seed)
    batch, dtype = 2, draw.choice((numpy.float32, numpy.float64))
    queries, keys, heads, key_heads = draw.choice(((5, 5, 4, 4), (4, 9, 4, 2), (9, 4, 4, 1)))
    lengths = ((queries, heads), (keys, key_heads), (keys, key_heads))
    tensors = [numbers.normal(size=(batch, *size, 8)).astype(dtype) for size in lengths]
    scores = (*draw.choice(((1, 1), (batch, heads))), queries, keys)
    options = {
        "bias": numbers.normal(size=scores).astype(dtype),
        "mask": numbers.random(scores) < 0.7,
        "scale": draw.uniform(0.1, 1),
        "is_causal": True,
        "query_seq_lengths": numbers.integers(0, queries + 1, batch, dtype=numpy.int32),
        "key_value_seq_lengths": numbers.integers(0, keys + 1, batch, dtype=numpy.int32),
        "local_window_size": draw.choice((0, 1, 3, (2, 0), (0, 2), (3, 1))),
    }
    chosen = draw.sample(sorted(options), draw.randint(0, len(options)))
    return tensors, {name: options[name] for name in chosen}


@pytest.mark.parametrize("seed", range(40))
def test_random_call(seed: int) -> None:
    arrays, options = random_call(seed)
    upstream = numpy.random.default_rng(seed).normal(size=arrays[0].shape)

    def attend(*tensors: Any) -> Any:
        return jax.nn.dot_product_attention(*tensors, **options, return_residual=True)

    (expected, lse), gradients_of = jax.vjp(attend, *arrays)
    ours = {name: as_torch(value) for name, value in options.items()}
    for backend in ("auto", "tiled", "reference"):
        tensors = [torch.tensor(array).requires_grad_() for array in arrays]
        output, seen = dot_product_attention(*tensors, **ours, backend=backend)
        attends = (seen.lse > -torch.inf).swapaxes(1, 2)  # [batch, queries, heads]
        assert (output[~attends] == 0).all()
        compare(output[attends], torch.tensor(expected)[attends])
        compare(seen.lse.swapaxes(1, 2)[attends].to(output.dtype), torch.tensor(lse)[attends])

        onto = torch.tensor(upstream.astype(arrays[0].dtype)) * attends[..., None]
        found = torch.autograd.grad(output, tensors, onto)
        for one, other in zip(found, gradients_of((onto.numpy(), lse * 0)), strict=True):
            compare(one, torch.tensor(other))


def as_torch(value: Any) -> Any:
    return torch.tensor(value) if isinstance(value, numpy.ndarray) else value


def compare(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)


def test_a_query_without_keys_has_the_mean_of_all_values_there() -> None:
    arrays, _ = random_call(0)
    lengths = numpy.zeros(2, numpy.int32)
    theirs = jax.nn.dot_product_attention(*arrays, key_value_seq_lengths=lengths)
    groups = arrays[0].shape[2] // arrays[2].shape[2]
    means = arrays[2].mean(1, keepdims=True).repeat(groups, axis=2)
    assert numpy.allclose(theirs, means, atol=1e-6)
    ours, _ = dot_product_attention(
        *map(torch.tensor, arrays), key_value_seq_lengths=torch.tensor(lengths), backend="auto"
    )
    assert (ours == 0).all()
