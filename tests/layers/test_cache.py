"""Caches: all positions are kept, none is copied without need, beams are reordered."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard import InputError, KeyValueCache
from regard.layers.cache import CrossCache, Memory


def parts(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(length)
    return torch.randn(3, 2, length, 4), torch.randn(3, 2, length, 5)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.integers(0, 12))
def test_appending_in_pieces_is_keeping_the_whole(lengths: list[int], room: int) -> None:
    key, value = parts(sum(lengths))
    cache, start = KeyValueCache(room), 0
    for length in lengths:
        stop = start + length
        keys, values = cache.append(key[:, :, start:stop], value[:, :, start:stop])
        assert torch.equal(keys, key[:, :, :stop])
        assert torch.equal(values, value[:, :, :stop])
        assert len(cache) == stop
        start = stop


def test_the_past_is_not_copied_while_there_is_room() -> None:
    key, value = parts(1)
    cache = KeyValueCache(room=16)
    first, _ = cache.append(key, value)
    for _ in range(15):
        last, _ = cache.append(key, value)
    assert last.data_ptr() == first.data_ptr()


def test_without_room_the_memory_moves_only_when_it_doubles() -> None:
    key, value = parts(1)
    cache, places = KeyValueCache(), set()
    kept = []  # memory given back could be handed out again at the same address
    for _ in range(128):
        keys, values = cache.append(key, value)
        kept.append((keys, values))
        places.add(keys.data_ptr())
    assert len(places) == 8  # rooms of 1, 2, 4 ... 128


def test_reordering_again_and_again_keeps_up_with_plain_indexing() -> None:
    torch.manual_seed(0)
    cache = KeyValueCache()  # memory grows on the way
    expected = torch.empty(3, 2, 0, 4)
    for _ in range(20):
        step = torch.randn(3, 2, 1, 4)
        keys, values = cache.append(step, -step)
        expected = torch.cat((expected, step), dim=2)
        assert torch.equal(keys, expected)
        assert torch.equal(values, -expected)
        index = torch.randint(3, (3,))
        cache.reorder(index)
        expected = expected[index]


@pytest.mark.parametrize("index", [[1], [0, 0, 1, 1, 2, 2]])
def test_reorder_may_change_how_many_sequences_there_are(index: list[int]) -> None:
    key, value = parts(3)
    cache = KeyValueCache()
    cache.append(key, value)
    cache.reorder(torch.tensor(index))
    more = torch.ones(len(index), 2, 1, 4), torch.ones(len(index), 2, 1, 5)
    keys, values = cache.append(*more)
    assert torch.equal(keys, torch.cat((key[index], more[0]), dim=2))
    assert torch.equal(values, torch.cat((value[index], more[1]), dim=2))


def test_reordering_what_is_empty_changes_nothing() -> None:
    cache, cross, memory = KeyValueCache(), CrossCache(), Memory(4)
    for kept in (cache, cross, memory):
        kept.reorder(torch.tensor([0, 0]))
    assert len(cache) == len(memory) == 0
    assert cross.kept is None


def test_a_cross_cache_is_reordered() -> None:
    key, value = parts(3)
    cross = CrossCache()
    cross.kept = key, value
    cross.reorder(torch.tensor([1, 1]))
    assert torch.equal(cross.kept[0], key[[1, 1]])
    assert torch.equal(cross.kept[1], value[[1, 1]])


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6), st.integers(0, 9))
def test_memory_keeps_the_last_positions(lengths: list[int], room: int) -> None:
    torch.manual_seed(0)
    whole = torch.randn(2, sum(lengths), 3)
    memory, stop = Memory(room), 0
    for length in lengths:
        start, stop = stop, stop + length
        expected = whole[:, max(start - room, 0) : stop]
        assert torch.equal(memory.extend(whole[:, start:stop]), expected)
        assert len(memory) == min(room, stop)


def test_memory_stops_gradients_and_follows_the_beams() -> None:
    memory = Memory(2)
    first = torch.randn(2, 2, 3, requires_grad=True)
    memory.extend(first)
    memory.reorder(torch.tensor([1, 1]))
    second = torch.randn(2, 1, 3, requires_grad=True)
    whole = memory.extend(second)
    assert torch.equal(whole[:, :2], first[[1, 1]])
    whole.sum().backward()
    assert first.grad is None
    assert second.grad is not None


def test_gradients_are_refused() -> None:
    key = torch.zeros(1, 1, 1, 2, requires_grad=True)
    with pytest.raises(InputError, match=r"torch\.no_grad"):
        KeyValueCache().append(key, key)
    with torch.no_grad():
        keys, _ = KeyValueCache().append(key, key)
    assert list(keys.shape) == [1, 1, 1, 2]


@pytest.mark.parametrize(
    "other",
    [
        torch.zeros(2, 2, 1, 4),
        torch.zeros(3, 1, 1, 4),
        torch.zeros(3, 2, 1, 6),
        torch.zeros(3, 2, 1, 4, dtype=torch.float64),
    ],
)
def test_what_does_not_fit_is_refused(other: torch.Tensor) -> None:
    cache = KeyValueCache()
    cache.append(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4))
    with pytest.raises(InputError, match="one cache per layer"):
        cache.append(other, other)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ((3, 1, 4), (3, 1, 4)),
        ((1, 4), (1, 4)),
        ((3, 2, 1, 4), (3, 2, 1)),
        ((3, 2, 1, 4), (1, 2, 1, 4)),
        ((3, 2, 1, 4), (3, 1, 1, 4)),
        ((3, 2, 5, 4), (3, 2, 1, 4)),
    ],
)
@pytest.mark.parametrize("length", [0, 1])
def test_keys_and_values_of_other_shapes_are_refused(
    key: tuple[int, ...], value: tuple[int, ...], length: int
) -> None:
    cache = KeyValueCache()
    for _ in range(length):
        cache.append(torch.zeros(3, 2, 1, 4), torch.zeros(3, 2, 1, 4))
    with pytest.raises(InputError, match=r"\[batch, heads, n, dim\].*but got \["):
        cache.append(torch.zeros(key), torch.zeros(value))
    with pytest.raises(InputError, match=r"torch\.Tensor, but got ndarray"):
        cache.append(torch.zeros(key).numpy(), torch.zeros(value).numpy())  # type: ignore[arg-type]
    assert len(cache) == length


def test_negative_sizes_are_refused() -> None:
    with pytest.raises(InputError, match="room"):
        KeyValueCache(-1)
    with pytest.raises(InputError, match="length"):
        Memory(-1)


def test_others_take_places_and_end_where_all_end() -> None:
    key, value = parts(6)
    cache, other = KeyValueCache(room=8), KeyValueCache()
    cache.append(key[:, :, :5], value[:, :, :5])
    other.append(-key[:2, :, :3], -value[:2, :, :3])
    cache.place(torch.tensor([2, 0]), other, torch.tensor([0, 1]))
    keys, values = cache.append(key[:, :, 5:], value[:, :, 5:])
    for actual, whole in ((keys, key), (values, value)):
        assert torch.equal(actual[1], whole[1])
        assert torch.equal(actual[2, :, 2:5], -whole[0, :, :3])
        assert torch.equal(actual[0, :, 2:5], -whole[1, :, :3])
        assert torch.equal(actual[0, :, 5], whole[0, :, 5])


@given(st.integers(-5, 4))
def test_a_shift_forgets_or_makes_room(by: int) -> None:
    key, value = parts(6)
    cache = KeyValueCache()
    cache.append(key[:, :, :5], value[:, :, :5])
    cache.shift(by)
    assert len(cache) == 5 - by
    keys, values = cache.append(key[:, :, 5:], value[:, :, 5:])
    for actual, whole in ((keys, key), (values, value)):
        room = torch.zeros(3, 2, max(-by, 0), whole.shape[3])
        assert torch.equal(actual, torch.cat((room, whole[:, :, max(by, 0) :]), dim=2))
