"""Positions against their formulas."""

from __future__ import annotations

import math

import pytest
import torch

from regard import InputError
from regard.layers.positions import Layout, LearnedPositions, Rotary, sinusoidal


def scalar(position: int, index: int, dim: int, layout: str, base: float) -> float:
    """One number of the paper's formula: PE(pos, 2i) is a sine, PE(pos, 2i + 1) a cosine."""
    if layout == "interleaved":
        pair, turn = divmod(index, 2)
    else:
        turn, pair = divmod(index, dim // 2)
    angle = position / base ** (2 * pair / dim)
    return math.cos(angle) if turn else math.sin(angle)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
@pytest.mark.parametrize("base", [10000.0, 500.0])
def test_sinusoidal(layout: Layout, base: float) -> None:
    dim, positions = 6, [0, 1, 17, 4096, 100_000]
    actual = sinusoidal(torch.tensor(positions), dim, layout=layout, base=base)
    expected = [[scalar(p, i, dim, layout, base) for i in range(dim)] for p in positions]
    torch.testing.assert_close(actual, torch.tensor(expected), rtol=0, atol=1e-6)


def test_sinusoidal_of_a_length_and_of_any_shape() -> None:
    positions = torch.tensor([[3, 1], [0, 2]])
    assert torch.equal(sinusoidal(positions, 4), sinusoidal(4, 4)[positions])


def test_learned_positions_are_looked_up() -> None:
    learned = LearnedPositions(5, 3)
    assert torch.equal(learned(torch.tensor([[4, 0]])), learned.weight[[4, 0]][None])


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotary_turns_each_pair_by_its_angle(layout: Layout) -> None:
    dim, position = 6, 5
    x = torch.randn(1, dim)
    actual = Rotary(dim, layout=layout)(x, torch.tensor([position]))[0].tolist()
    for pair in range(dim // 2):
        first, second = (2 * pair, 2 * pair + 1) if layout == "interleaved" else (pair, pair + 3)
        turn = complex(math.cos(a := position / 10000 ** (2 * pair / dim)), math.sin(a))
        expected = complex(x[0, first], x[0, second]) * turn
        assert complex(actual[first], actual[second]) == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("layout", ["interleaved", "half"])
def test_rotary_keeps_norms_and_scores_depend_on_distance_only(layout: Layout) -> None:
    rotary = Rotary(8, layout=layout)
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    at = torch.arange(50)
    queries, keys = rotary(q.expand(50, 8), at), rotary(k.expand(50, 8), at)
    torch.testing.assert_close(queries.norm(dim=-1), q.norm().expand(50), rtol=1e-6, atol=0)
    scores = queries @ keys.T
    for distance in range(-49, 50):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-5)


def test_rotary_goes_on_where_a_cache_left_off() -> None:
    rotary, x = Rotary(4), torch.randn(2, 3, 7, 4)
    later = rotary(x[:, :, 5:], torch.arange(5, 7))
    torch.testing.assert_close(later, rotary(x)[:, :, 5:])


def test_half_precision_is_turned_in_float32() -> None:
    rotary, x = Rotary(8), torch.randn(4000, 8).bfloat16()
    exact = rotary(x.double())
    assert rotary(x).dtype == torch.bfloat16
    assert (rotary(x).double() - exact).abs().max() <= 2**-8 * exact.abs().max()


def test_what_means_nothing_is_refused() -> None:
    with pytest.raises(InputError, match="must be even, but got 5"):
        sinusoidal(3, 5)
    with pytest.raises(InputError, match="must be even, but got 7"):
        Rotary(7)
    with pytest.raises(InputError, match=r'"interleaved" or "half", but got .wide'):
        sinusoidal(3, 4, layout="wide")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"dim=4.*vectors of 6"):
        Rotary(4)(torch.zeros(2, 6))
