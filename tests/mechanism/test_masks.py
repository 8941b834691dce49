"""Masks: their algebra, that ranges, hulls and tiles agree, and that a mask fails closed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.generated_calls import any_mask, mask_leaves
from regard import Causal, Dilated, InputError, Padding, Prefix, Segments, Window, attention
from regard.mechanism import masks
from regard.mechanism.geometry import Extent, Interval, Tile
from regard.mechanism.masks import Mask, hulls

CPU = torch.device("cpu")
generated = settings(max_examples=200, derandomize=True, database=None)
sizes = st.sampled_from((1, 2, 3, 5, 17))
batches = st.sampled_from((1, 2, 3))
alike = st.none() | st.sampled_from((0, -3, 2, 40))
extents = st.builds(Extent, batches, st.just(2), sizes, sizes, st.just(CPU), alike) | st.builds(
    Extent, st.just(3), st.just(2), sizes, sizes, st.just(CPU), st.just((-4, 0, 9))
)


def whole(mask: Mask, extent: Extent) -> Tensor:
    """The mask as one tensor of [batch, heads, queries, keys]."""
    tile = Tile(extent, range(extent.queries), range(extent.keys))
    return mask.tile(tile).expand(extent.batch, extent.heads, extent.queries, extent.keys)


@pytest.mark.slow
@generated
@given(data=st.data(), extent=extents)
def test_algebra(data: st.DataObject, extent: Extent) -> None:
    a, b = data.draw(any_mask(extent, 1)), data.draw(any_mask(extent, 1))

    def equal(left: Mask, right: Mask) -> bool:
        return torch.equal(whole(left, extent), whole(right, extent))

    assert equal(~(a & b), ~a | ~b)
    assert equal(~(a | b), ~a & ~b)
    assert equal(a & a, a)
    assert equal(a | a, a)
    assert equal(~~a, a)
    assert equal(a & b, b & a)
    assert equal(a | b, b | a)
    assert equal(a & (a | b), a)
    assert not whole(a & ~a, extent).any()
    assert whole(a | ~a, extent).all()


@pytest.mark.slow
@generated
@given(data=st.data(), extent=extents)
def test_a_tile_is_a_part_of_the_whole(data: st.DataObject, extent: Extent) -> None:
    mask = data.draw(any_mask(extent))
    top, left = data.draw(st.integers(0, extent.queries)), data.draw(st.integers(0, extent.keys))
    rows = range(top, data.draw(st.integers(top, extent.queries)))
    columns = range(left, data.draw(st.integers(left, extent.keys)))
    part = mask.tile(Tile(extent, rows, columns))
    expected = whole(mask, extent)[:, :, top : rows.stop, left : columns.stop]
    assert torch.equal(part.expand_as(expected), expected)


@generated
@given(data=st.data(), extent=extents)
def test_ranges_tell_what_tiles_tell(data: st.DataObject, extent: Extent) -> None:
    mask = data.draw(any_mask(extent))
    interval = mask.interval(extent)
    tile = Tile(extent, range(extent.queries), range(extent.keys))
    allowed = whole(mask, extent)
    within = interval.tile(tile).expand_as(allowed)
    if interval.exact:
        assert torch.equal(within, allowed)
    else:
        assert not (allowed & ~within).any()
    for end in (interval.low, interval.high):
        if isinstance(end, Tensor):
            assert (end.diff(dim=-1) >= 0).all(), "an end moves backwards"


@pytest.mark.slow
@generated
@given(data=st.data(), extent=extents)
def test_joining_with_and_keeps_ranges_exact(data: st.DataObject, extent: Extent) -> None:
    exact = mask_leaves(extent, 0).filter(lambda mask: mask.is_ranges)
    joined = data.draw(exact) & data.draw(exact) & data.draw(exact)
    assert joined.interval(extent).exact


@pytest.mark.slow
@generated
@given(data=st.data(), extent=extents, step=st.sampled_from((1, 2, 4, 64)))
def test_hulls_cover_what_is_allowed(data: st.DataObject, extent: Extent, step: int) -> None:
    mask = data.draw(any_mask(extent))
    allowed = whole(mask, extent)
    covered = []
    for hull in hulls(mask, extent, step):
        rows = allowed[:, :, hull.rows.start : hull.rows.stop]
        columns = torch.zeros(extent.keys, dtype=torch.bool)
        columns[hull.columns.start : hull.columns.stop] = True
        assert not rows[..., ~columns].any(), "something is allowed outside of a hull"
        assert rows[..., hull.inner.start : hull.inner.stop].all() or not hull.inner
        fringes = [key for fringe in hull.fringes for key in fringe]
        assert sorted([*fringes, *hull.inner]) == list(hull.columns)
        covered += list(hull.rows)
    assert covered == list(range(extent.queries))


def test_without_a_mask_everything_matters() -> None:
    (hull,) = hulls(None, Extent(1, 1, 3, 4, CPU), 8)
    assert (hull.rows, hull.columns, hull.inner) == (range(3), range(4), range(4))


@pytest.mark.parametrize(
    "mask",
    [
        Causal(),
        Window(2, 1),
        Window(None, 3),
        Causal() & Window(3),
        Dilated(3) & Causal(),
        ~Causal() | Window(0),
        Causal() & (Window(2) | ~Segments([2, 3])),
        Segments([[2, 3], [4, 1]]),
        Segments([2, 3], [1, 4]),
        Segments([2, 3], key_starts=[0, 4], query_starts=0, within=Window(None, 1)),
    ],
    ids=repr,
)
def test_repr_can_be_read_back(mask: Mask) -> None:
    names = {"Causal": Causal, "Window": Window, "Segments": Segments, "Dilated": Dilated}
    assert eval(repr(mask), names) == mask


def test_repr_of_lengths_shows_them() -> None:
    assert repr(Padding([3, 1])) == "Padding(lengths=(3, 1), side='right')"
    assert repr(Prefix(2)) == "Prefix(length=(2,))"


def test_a_window_may_be_open_on_a_side() -> None:
    extent = Extent(1, 1, 4, 6, CPU)
    for left, right, same in (
        (None, 0, Window(6, 0)),
        (None, 2, Window(6, 2)),
        (1, None, Window(1, 6)),
        (None, None, Window(6, 6)),
    ):
        assert torch.equal(whole(Window(left, right), extent), whole(same, extent))
        assert Window(left, right).max_keys == 0
    assert torch.equal(whole(Window(None), extent), whole(Causal(), extent))
    assert (Window(None, 2) & Window(3)).max_keys == 4


def test_segments_from_ids() -> None:
    ids = torch.tensor([[4, 4, 7, 7, 7], [1, 2, 2, 2, 2]])
    assert Segments.from_ids(ids) == Segments([[2, 3], [1, 4]])
    extent = Extent(2, 1, 5, 5, CPU)
    same = ids[:, None, :, None] == ids[:, None, None, :]
    assert torch.equal(whole(Segments.from_ids(ids), extent), same)
    with pytest.raises(InputError, match="two places"):
        Segments.from_ids(torch.tensor([1, 2, 1]))


def test_masks_of_numbers_are_static_and_those_of_tensors_are_not() -> None:
    assert (Causal() & Padding([1, 2]) | ~Window(1)).static
    assert not Padding(torch.tensor([1, 2])).static
    assert not (Causal() & masks.Dense(torch.ones(2, 2, dtype=torch.bool))).static


def test_segments_may_be_tensors() -> None:
    assert Segments(torch.tensor([2, 3])) == Segments([2, 3])
    assert Segments(torch.tensor([[2, 3], [4, 1]])) == Segments([[2, 3], [4, 1]])
    with pytest.raises(InputError, match="whole numbers of positions"):
        Segments(torch.tensor([2.5, 3.0]))


@pytest.mark.parametrize("number", [torch.tensor, numpy.int64, numpy.array])
def test_segments_take_numbers_of_torch_and_numpy(number: Any) -> None:
    mask = Segments([number(2), number(3)], query_starts=number(1), within=Causal())
    assert mask == Segments([2, 3], query_starts=1, within=Causal())
    with pytest.raises(InputError, match="query_starts"):
        Segments([2], query_starts=torch.tensor(1.5))


def test_numbers_may_be_numpy_s() -> None:
    lengths = numpy.array([3, 2])
    assert repr(Padding(lengths)) == "Padding(lengths=(3, 2), side='right')"
    assert Window(numpy.int64(3)) == Window(3)


def test_a_tensor_is_wrapped_on_either_side() -> None:
    tensor = torch.ones(3, 3, dtype=torch.bool)
    for join in (lambda: tensor & Causal(), lambda: Causal() & tensor, lambda: tensor | Causal()):
        with pytest.raises(InputError, match=r"Wrap a boolean tensor as masks\.Dense"):
            join()


@dataclass(frozen=True, eq=False)
class Allowed(Mask):
    """A mask written by a user: it holds a tensor, and says nothing else about itself."""

    allowed: Tensor  # [keys]

    def tile(self, tile: Tile) -> Tensor:
        return self.allowed[None, None, None, tile.columns.start : tile.columns.stop]


class OnlyInexact(Mask):
    def interval(self, extent: Extent) -> Interval:
        return Interval(0, extent.keys, False)


class Tagged(Causal):  # not a dataclass of its own: its fields are not all it has
    def __init__(self, keys: Tensor) -> None:
        object.__setattr__(self, "keys", keys)


@dataclass(eq=False)
class Changing(Mask):
    size: int

    def tile(self, tile: Tile) -> Tensor:
        return tile.key_positions()[None] < self.size


def test_a_mask_without_tile_cannot_be_made() -> None:
    with pytest.raises(TypeError, match="tile"):
        OnlyInexact()  # type: ignore[abstract]


def test_a_mask_that_defines_tile_alone_is_obeyed() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    allowed = torch.tensor([True, False, True, True, False, True])
    mask = Allowed(allowed)
    expected = attention(x, x, x, mask=masks.Dense(allowed[None]), backend="reference")
    for backend in ("auto", "sdpa", "tiled", "reference"):
        output = attention(x, x, x, mask=mask, backend=backend)
        torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "reference"])
def test_a_mask_follows_its_tensor_changed_in_place(backend: str) -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    mask = Allowed(torch.tensor([True, True, True, False, False, False]))
    before = attention(x, x, x, mask=mask, backend=backend)
    mask.allowed.logical_not_()
    after = attention(x, x, x, mask=mask, backend=backend)
    assert not torch.allclose(before, after)
    torch.testing.assert_close(
        after, attention(x, x, x, mask=masks.Dense(mask.allowed[None]), backend="reference")
    )


def test_only_frozen_fields_of_numbers_make_a_mask_static() -> None:
    ones = torch.ones(2, dtype=torch.bool)
    assert not (Causal() & Allowed(ones)).static
    assert not Tagged(ones).static
    assert not Changing(2).static
