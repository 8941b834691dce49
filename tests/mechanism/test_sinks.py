"""Attention sinks against a softmax with one more column; and the scores before the softmax."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from regard import Causal, InputError, Padding, See, attention, why

SEE = See(
    lse=True, entropy=True, peak=True, received=True, sink=True, weights=True, distance=True,
    distance_variance=True,
)  # fmt: skip


def inputs(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Query, key, value and sinks: two sequences, three heads, four positions."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, 4, 5)] * 3 + [(3,)]
    return [torch.randn(shape, generator=generator, dtype=dtype) for shape in shapes]


def test_a_sink_is_one_more_column_without_a_value() -> None:
    query, key, value, sinks = inputs()
    mask = Causal() & Padding([4, 0])  # the second sequence has no keys
    output, seen = attention(query, key, value, mask=mask, sinks=sinks, see=SEE)
    allowed = torch.ones(4, 4, dtype=torch.bool).tril() & torch.tensor([1, 0]).bool()[:, None, None]
    scores = (query @ key.mT / math.sqrt(5)).masked_fill(~allowed[:, None], -math.inf)
    scores = torch.cat((scores, sinks[:, None, None].expand(2, 3, 4, 1)), dim=-1)
    weights = scores.softmax(-1)
    torch.testing.assert_close(output, weights[..., :-1] @ value)
    torch.testing.assert_close(seen.weights, weights[..., :-1])
    torch.testing.assert_close(seen.sink, weights[..., -1])
    torch.testing.assert_close(seen.lse, scores.logsumexp(-1))
    torch.testing.assert_close(seen.entropy, torch.special.entr(weights).sum(-1))
    torch.testing.assert_close(seen.peak, weights[..., :-1].amax(-1))
    torch.testing.assert_close(seen.received, weights[..., :-1].sum(-2))
    apart = (torch.arange(4)[:, None] - torch.arange(4)).abs()
    apart = torch.cat((apart, torch.zeros(4, 1)), dim=-1)  # the sink is at distance 0
    mean = (weights * apart).sum(-1)
    variance = (weights * apart**2).sum(-1) - mean**2
    torch.testing.assert_close(seen.distance, mean.masked_fill(~allowed.any(-1)[:, None], 0))
    torch.testing.assert_close(
        seen.distance_variance, variance.masked_fill(~allowed.any(-1)[:, None], 0)
    )


@pytest.mark.parametrize("sink", [-200.0, 200.0])
def test_sinks_far_from_the_scores(sink: float) -> None:
    query, key, value, _ = inputs(torch.float32)
    sinks = torch.full((3,), sink)
    output, seen = attention(query, key, value, sinks=sinks, see=SEE, backend="tiled")
    plain = attention(query, key, value)
    torch.testing.assert_close(output, plain if sink < 0 else torch.zeros_like(plain))
    torch.testing.assert_close(seen.sink, torch.full_like(seen.sink, float(sink > 0)))
    assert all(tensor.isfinite().all() for tensor in seen.to_dict().values())


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_gradients(backend: str) -> None:
    mask = Causal() & Padding([4, 0])

    def number(*tensors: Tensor) -> Tensor:
        query, key, value, sinks = tensors
        see = See(lse=True, entropy=True, received=True, sink=True, scores=[2, 0])
        output, seen = attention(
            query, key, value, mask=mask, sinks=sinks, see=see, backend=backend
        )
        fields = (torch.where(f.isfinite(), f, 0) for f in seen.to_dict().values())
        return output.square().sum() + sum(f.square().sum() for f in fields)

    tensors = [tensor.requires_grad_() for tensor in inputs()]
    assert gradcheck(number, tensors, fast_mode=True)
    assert gradgradcheck(number, tensors, fast_mode=True)


def test_each_backend_without_sinks_says_so() -> None:
    query, key, value, sinks = inputs(torch.float32)
    answers = why(query, key, value, sinks=sinks).answers
    assert "no attention sinks" in str(answers["sdpa"])
    assert answers["tiled"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sinks": torch.zeros(2)}, r"sinks has 2 numbers, but the query has 3 heads"),
        ({"sinks": torch.zeros(3, 1)}, r"sinks must be a tensor .heads. .*, but got \[3, 1\]"),
        ({"sinks": torch.zeros(3, dtype=torch.long)}, r"got \[3\] of torch.int64"),
        ({"sinks": [0.0, 1.0, 2.0]}, "sinks must be a torch.Tensor, but got list"),
        ({"sinks": torch.zeros(3, device="meta")}, "sinks is on meta, but the query is on cpu"),
        ({"see": See(sink=True)}, r"pass attention\(sinks=...\)"),
        ({"see": See(scores=[4])}, r"See\(scores=...\) names query 4, but the call has 4 queries"),
        ({"see": See(scores=[(0, 9)])}, r"See\(scores=...\) names key 9, but the call has 4 keys"),
    ],
)
def test_what_does_not_fit_is_refused(arguments: dict[str, Any], message: str) -> None:
    query, key, value, _ = inputs(torch.float32)
    with pytest.raises(InputError, match=message):
        attention(query, key, value, **arguments)


@pytest.mark.parametrize("scores", ["ab", 3, [1.5], [(1, 2, 3)], torch.zeros(2, 2)])
def test_scores_of_nothing_that_can_be_chosen(scores: Any) -> None:
    with pytest.raises(InputError, match=r"See\(scores=...\) must be"):
        See(scores=scores)


def test_scores_are_exact_where_a_weight_underflows() -> None:
    query, key, value = torch.ones(1, 1), torch.tensor([[0.0], [-200.0]]), torch.ones(2, 1)
    _, seen = attention(query, key, value, see=See(scores=[0], rows=[0], lse=True))
    assert seen.rows[0, 0, 0].tolist() == [1.0, 0.0]
    assert seen.scores[0, 0, 0].tolist() == [0.0, -200.0]


def test_scores_of_rows_and_of_pairs_in_the_order_of_the_request() -> None:
    query, key, value, _ = inputs()
    bias = torch.randn(4, 4, dtype=torch.float64)
    scores = (query @ key.mT / math.sqrt(5)).div(2).tanh().mul(2) + bias
    scores = scores.masked_fill(~torch.ones(4, 4, dtype=torch.bool).tril(), -math.inf)
    given = {"mask": Causal(), "bias": bias, "softcap": 2.0}
    _, rows = attention(query, key, value, **given, see=See(scores=[3, -3, 3]))
    torch.testing.assert_close(rows.scores, scores[:, :, [3, 1, 3]])
    _, pairs = attention(query, key, value, **given, see=See(scores=[(3, 0), (0, 1), (2, 2)]))
    torch.testing.assert_close(pairs.scores, scores[:, :, [3, 0, 2], [0, 1, 2]])
    assert See(scores=torch.tensor([3, 1])).scores == (3, 1)


def test_scores_alone_leave_the_choice_of_backend_as_it_is() -> None:
    query, key, value, _ = inputs(torch.float32)
    assert why(query, key, value, see=See(scores=[0])).chosen == "sdpa"
