"""See and Seen: requests, printing, files, deferred fields."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from helpers.generated_calls import FLAGS
from regard import Causal, InputError, See, Seen, attention
from regard.mechanism.backends import triton
from regard.mechanism.call import check
from regard.mechanism.geometry import Extent
from regard.mechanism.seeing import Deferred, Joining

EVERYTHING = See(**FLAGS, top=2, rows=[0, -1], map=(2, 3), map_peak=True)


@pytest.fixture
def seen() -> Seen:
    query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
    return attention(query, key, value, mask=Causal(), see=EVERYTHING)[1]


def test_repr_is_short_and_says_what_was_seen(seen: Seen) -> None:
    lines = repr(seen).splitlines()
    assert lines[0] == "Seen: 2 x 3 heads, 5 queries, 5 keys"
    names = [line.split()[0] for line in lines[1:]]
    assert {"lse", "entropy", "received", "map", "top_weights", "weights"} <= set(names)
    assert len(lines) <= 14
    assert max(map(len, lines)) <= 80
    entropy = next(line for line in lines if "entropy" in line)
    assert "2 x 3 x 5" in entropy
    assert "0 to" in entropy  # the first query sees itself only
    assert "mean" in entropy


def test_repr_where_nothing_is_finite() -> None:
    empty = torch.zeros(1, 1, 2, 1)
    mask = torch.zeros(2, 2, dtype=torch.bool)
    _, seen = attention(empty, empty, empty, mask=mask, see=See(lse=True))
    assert "nothing finite" in repr(seen)


def test_html_has_a_row_for_each_field(seen: Seen) -> None:
    page = seen._repr_html_()
    assert page.startswith("<table>")
    assert page.endswith("</table>")
    assert page.count("<tr>") == 1 + len(repr(seen).splitlines()) - 1
    for name in ("entropy", "received", "map_peak"):
        assert f"<td>{name}</td>" in page


@pytest.mark.parametrize("backend", ["reference", "tiled", "native"])
def test_the_variance_of_a_far_distance_keeps_its_digits(backend: str) -> None:
    queries, keys = 1100, 1000  # two keys with the same weight, three positions apart
    query, key = torch.ones(1, 1, queries, 2), torch.zeros(1, 1, keys, 2)
    key[:, :, [500, 503]] = 80
    see = See(distance=True, distance_variance=True)
    _, seen = attention(query, key, key, see=see, query_start=2**20, backend=backend)
    assert seen.distance[0, 0, :2].tolist() == [2**20 - 501.5, 2**20 - 500.5]
    assert seen.distance_variance.unique().tolist() == [2.25]


def test_the_gpu_kernels_refuse_the_variance_by_name() -> None:
    x, see = torch.zeros(1, 1, 4, 16), See(distance_variance=True)
    call = check(x, x, x, None, None, None, None, 0.0, see)
    assert "do not compute distance_variance" in str(triton.unsupported(call))
    assert triton.unsupported(replace(call, see=See(distance=True))) is None


def test_chosen_heads_are_saved_with_their_numbers(seen: Seen, tmp_path: Path) -> None:
    chosen = seen.select_heads([2, 0])
    assert torch.equal(chosen.top.keys, seen.top.keys[:, [2, 0]])
    chosen.save(tmp_path / "seen.safetensors")
    loaded = Seen.load(tmp_path / "seen.safetensors")
    assert (loaded.heads, loaded.extent) == ((2, 0), (2, 2, 5, 5))
    assert torch.equal(loaded.select_heads([0]).map, seen.map[:, :1])
    with pytest.raises(InputError, match="no head 1: the heads are 2, 0"):
        loaded.select_heads([1])
    with pytest.raises(InputError, match="no head 3: the heads are 0 to 2"):
        seen.select_heads([3])


def test_fields_not_asked_for_are_none() -> None:
    x = torch.randn(4, 3)
    _, seen = attention(x, x, x, see=See(entropy=True))
    assert seen.lse is None
    assert seen.top is None
    assert list(seen.to_dict()) == ["entropy"]


def test_to_dict_and_back(seen: Seen) -> None:
    again = Seen.from_dict(seen.to_dict(), seen.extent)
    assert again.extent == seen.extent
    assert again.to_dict().keys() == seen.to_dict().keys()
    for name, tensor in seen.to_dict().items():
        assert torch.equal(again.to_dict()[name], tensor)


def test_save_and_load(seen: Seen, tmp_path: Path) -> None:
    seen.save(tmp_path / "seen.safetensors")
    again = Seen.load(tmp_path / "seen.safetensors")
    assert repr(again) == repr(seen)
    for name, tensor in seen.to_dict().items():
        assert torch.equal(again.to_dict()[name], tensor)


def test_what_has_a_gradient_can_be_saved(tmp_path: Path) -> None:
    x = torch.randn(4, 3, requires_grad=True)
    _, seen = attention(x, x, x, see=See(received=True))
    assert seen.received.requires_grad
    seen.save(tmp_path / "seen.safetensors")
    loaded = Seen.load(tmp_path / "seen.safetensors").received
    assert torch.equal(loaded, seen.received)


def test_loading_something_else_says_so(tmp_path: Path) -> None:
    save_file({"lse": torch.zeros(1)}, tmp_path / "other.safetensors")
    with pytest.raises(InputError, match=r"other\.safetensors.*not written by Seen"):
        Seen.load(tmp_path / "other.safetensors")
    (tmp_path / "text.safetensors").write_text("not tensors at all")
    with pytest.raises(InputError, match=r"text\.safetensors.*safetensors"):
        Seen.load(tmp_path / "text.safetensors")
    with pytest.raises(InputError, match=r"no file.*missing"):
        Seen.load(tmp_path / "missing")


def test_all_weights_are_refused_above_a_size_and_rows_and_map_named() -> None:
    x = torch.zeros(1, 1, 2**14 + 1, 1).expand(1, 2, -1, -1)
    with pytest.raises(InputError, match=r"GiB.*rows=.*map="):
        attention(x, x, x, see=See(weights=True))


def test_see_that_asks_for_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"requests no field.*entropy=True"):
        See()


def test_see_that_means_nothing_is_refused() -> None:
    with pytest.raises(InputError, match=r"top.*-1"):
        See(top=-1)
    with pytest.raises(InputError, match=r"map.*\(0, 3\)"):
        See(map=(0, 3))
    with pytest.raises(InputError, match=r"map_peak.*map=\(rows, columns\)"):
        See(map_peak=True, entropy=True)
    x = torch.zeros(3, 2)
    for row in (3, -4):
        with pytest.raises(InputError, match=f"query {row}, but the call has 3 queries"):
            attention(x, x, x, see=See(rows=[row]))


def test_see_prints_what_it_asks_for() -> None:
    assert repr(See(entropy=True, top=8, map=64)) == "See(entropy, top=8, map=(64, 64))"
    assert repr(See(rows=[3, -1])) == "See(rows=(3, -1))"


@pytest.mark.parametrize("backend", ["reference", "tiled"])
@pytest.mark.parametrize("gradient", [False, True])
def test_autocast_changes_nothing_that_is_seen(backend: str, gradient: bool) -> None:
    """In bfloat16 a count stops at 256."""
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 400, 8, requires_grad=gradient).unbind()
    see = See(entropy=True, distance=True, received=True, map=1)
    _, plain = attention(q, k, v, mask=Causal(), see=see, backend=backend)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, seen = attention(q, k, v, mask=Causal(), see=see, backend=backend)
    assert output.dtype == torch.float32
    for name, field in seen.to_dict().items():
        assert torch.equal(field, plain.to_dict()[name]), name


@pytest.mark.parametrize(
    "fields",
    [
        {"map": 8.0}, {"map": (4.5, 4)}, {"map": (4, 4, 4)}, {"map": 0}, {"rows": [1.5]},
        {"rows": 3}, {"top": True}, {"top": 1.5}, {"pairs": [(1, 2), (3,)]}, {"pairs": 5},
    ],
)  # fmt: skip
def test_sizes_and_places_are_whole_numbers(fields: dict[str, object]) -> None:
    with pytest.raises(InputError, match=rf"See\({next(iter(fields))}=...\) must be .*, but got"):
        See(**fields)  # type: ignore[arg-type]


def test_a_grid_may_be_a_list_and_rows_may_come_twice() -> None:
    assert See(map=[2, 3]).map == (2, 3)  # type: ignore[arg-type]
    x = torch.randn(1, 1, 6, 4)
    _, seen = attention(x, x, x, see=See(rows=[4, 1, 4, -1], weights=True))
    assert torch.equal(seen.rows, seen.weights[:, :, [4, 1, 4, 5]])


def test_pairs_may_come_one_by_one() -> None:
    x = torch.randn(1, 1, 6, 4)
    _, seen = attention(x, x, x, see=See(pairs=zip([4, 1], [2, 0], strict=True), weights=True))
    assert torch.equal(seen.pairs[0, 0], seen.weights[0, 0, [4, 1], [2, 0]])


@pytest.mark.parametrize(
    ("fields", "count"),
    [({"map": 2**15}, 2**30), ({"top": 2**14}, 2**29), ({"rows": range(10_000)}, 327_680_000)],
)
def test_more_numbers_than_a_field_may_hold_are_refused(fields: dict[str, int], count: int) -> None:
    x = torch.zeros(1, 1, 2**15, 1)
    with pytest.raises(InputError, match=rf"would keep {count:,} numbers .*Ask for fewer"):
        attention(x, x, x, see=See(**fields))  # type: ignore[arg-type]


def test_sums_over_queries_are_added_as_they_come() -> None:
    """One sum per block of queries would take [queries, keys] memory again."""
    joining = Joining(See(received=True), Extent(1, 1, 6, 4, torch.device("cpu")))
    for _ in range(3):
        joining.add({"received": torch.ones(1, 1, 4)})
        assert len(joining.pieces["received"]) == 1
    assert joining.seen().received.tolist() == [[[3.0] * 4]]


def deferred() -> tuple[Deferred, list[str]]:
    """A Seen whose ``received`` is computed on first access, and a list of these accesses."""
    received, accesses = torch.full((1, 1, 3), torch.nan), []

    def compute() -> None:
        accesses.append("read")
        received.fill_(0.5)

    known = Seen(entropy=torch.ones(1, 1, 3), received=received, extent=(1, 1, 3, 3))
    return Deferred.of(known, compute), accesses


def test_a_deferred_field_is_computed_on_first_access() -> None:
    seen, accesses = deferred()
    assert seen.entropy is not None
    assert seen.extent == (1, 1, 3, 3)
    assert seen.peak is None
    assert not accesses
    assert seen.received.tolist() == [[[0.5] * 3]]
    assert accesses


def test_a_deferred_field_is_in_every_copy(tmp_path: Path) -> None:
    seen, _ = deferred()
    assert "received     1 x 1 x 3            0.5 to 0.5, mean 0.5" in repr(seen)
    for other in (copy.copy, pickle_and_back, replace):
        again = other(deferred()[0])
        assert again.received.tolist() == [[[0.5] * 3]]
        assert again.extent == (1, 1, 3, 3)
    deferred()[0].save(tmp_path / "seen.safetensors")
    assert Seen.load(tmp_path / "seen.safetensors").received.tolist() == [[[0.5] * 3]]


def pickle_and_back(seen: Seen) -> Seen:
    again: Seen = pickle.loads(pickle.dumps(seen))
    return again
