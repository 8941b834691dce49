"""Biases against their papers' formulas, one number at a time."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from regard import Alibi, RelativeBuckets, RelativeContent, attention
from regard.mechanism.geometry import Extent, Tile

CPU = torch.device("cpu")


def bucket(distance: int, buckets: int, most: int, bidirectional: bool) -> int:
    """T5's bucket in exact arithmetic: floor(log_a(b)) is the last m with a^m <= b."""
    base = 0
    if bidirectional:
        buckets //= 2
        base = buckets if distance < 0 else 0
        distance = abs(distance)
    else:
        distance = max(distance, 0)
    exact = buckets // 2
    if distance < exact:
        return base + distance
    wide = buckets - exact
    # floor(log(d / exact) / log(most / exact) * wide) is the last m with
    # (most / exact)^m <= (d / exact)^wide.
    m = 0
    while m < wide and Fraction(most, exact) ** (m + 1) <= Fraction(distance, exact) ** wide:
        m += 1
    return base + min(exact + m, buckets - 1)


@pytest.mark.parametrize("bidirectional", [False, True])
@pytest.mark.parametrize(
    ("buckets", "most"), [(32, 128), (32, 100), (8, 20), (64, 256), (6, 20), (34, 128)]
)
def test_relative_buckets(buckets: int, most: int, bidirectional: bool) -> None:
    bias = RelativeBuckets(torch.zeros(buckets, 1), bidirectional, most)
    distances = range(-300, 301)
    actual = bias.bucket(torch.tensor(distances)).tolist()
    assert actual == [bucket(d, buckets, most, bidirectional) for d in distances]


def test_relative_buckets_of_a_tile_look_up_the_table() -> None:
    table = torch.arange(32.0 * 3).view(32, 3)
    bias = RelativeBuckets(table, max_distance=20)
    extent = Extent(1, 3, 40, 50, CPU)
    tile = Tile(extent, range(7, 12), range(20, 50))
    actual = bias.tile(tile)
    for row, i in enumerate(tile.rows):
        for column, j in enumerate(tile.columns):
            expected = table[bucket(i + 10 - j, 32, 20, True)]
            assert torch.equal(actual[0, :, row, column], expected)


@pytest.mark.parametrize("heads", [1, 2, 4, 8, 16])
def test_alibi_slopes_of_a_power_of_two(heads: int) -> None:
    """A geometric sequence that starts at, and whose ratio is, 2^(-8/heads)."""
    slopes = Alibi.standard(heads).slopes.tolist()
    assert slopes == pytest.approx([2 ** (-8 / heads * (h + 1)) for h in range(heads)])


def test_alibi_slopes_of_other_numbers_of_heads() -> None:
    """Those of the next lower power of two, then every other one of the next higher."""
    for heads in (3, 6, 12):
        whole = 2 ** (heads.bit_length() - 1)
        slopes = Alibi.standard(heads).slopes
        assert torch.equal(slopes[:whole], Alibi.standard(whole).slopes)
        assert torch.equal(slopes[whole:], Alibi.standard(2 * whole).slopes[::2][: heads - whole])


def test_alibi_in_half_precision_keeps_long_distances_apart() -> None:
    """bfloat16 has 8 bits: 1000 and 1001 are the same number in it, but not as distances."""
    bias = Alibi(torch.tensor([0.5], dtype=torch.bfloat16))
    extent = Extent(1, 1, 1, 2000, CPU)
    row = bias.tile(Tile(extent, range(1), range(2000))).flatten()
    assert torch.equal(row, -0.5 * (1999 - torch.arange(2000.0)))


def test_relative_content_takes_the_nearest_row_beyond_its_ends() -> None:
    query = torch.ones(1, 1, 3, 1)
    relative = torch.tensor([10.0, 20.0, 30.0]).view(1, 3, 1)  # distances -1, 0 and 1
    bias = RelativeContent(query, relative, first=-1, scale=1.0)
    actual = bias.tile(Tile(Extent(1, 1, 3, 3, CPU), range(3), range(3)))[0, 0]
    assert actual.tolist() == [[20, 10, 10], [30, 20, 10], [30, 30, 20]]


@pytest.mark.parametrize("rows", [range(2), range(3, 7), range(9, 9)])
@pytest.mark.parametrize("columns", [range(5), range(6, 9), range(4, 4)])
def test_a_tile_is_a_part_of_the_whole(rows: range, columns: range) -> None:
    extent = Extent(2, 2, 9, 9, CPU)
    whole = Tile(extent, range(9), range(9))
    for bias in (
        Alibi.standard(2),
        RelativeBuckets(torch.randn(8, 2), True, 20),
        RelativeBuckets(torch.randn(8, 2), False, 20),
        RelativeContent(torch.randn(2, 2, 9, 3), torch.randn(2, 7, 3), -2),
    ):
        part = bias.tile(Tile(extent, rows, columns))
        expected = bias.tile(whole).expand(2, 2, 9, 9)
        expected = expected[:, :, rows.start : rows.stop, columns.start : columns.stop]
        torch.testing.assert_close(part.expand_as(expected), expected)


def test_a_bias_that_is_no_number_stays_with_its_query() -> None:
    query, key, value = (torch.randn(1, 2, n, 8).bfloat16() for n in (17, 33, 33))
    bias = torch.zeros(17, 33)
    bias[3, 5], bias[4] = math.nan, -math.inf
    for backend in ("reference", "tiled"):
        lost = attention(query, key, value, bias=bias, backend=backend).isnan().any(-1)
        assert lost.nonzero()[:, 2].unique().tolist() == [3]


def test_relative_content_may_be_more_precise_than_its_embeddings() -> None:
    query, relative = torch.randn(1, 1, 3, 4).double(), torch.randn(1, 3, 4)
    tile = Tile(Extent(1, 1, 3, 3, CPU), range(3), range(3))
    mixed = RelativeContent(query, relative).tile(tile)
    torch.testing.assert_close(mixed, RelativeContent(query, relative.double()).tile(tile))
