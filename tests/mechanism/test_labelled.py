"""Results as NumPy arrays, pandas tables and xarray datasets."""

from __future__ import annotations

import math
import sys
from dataclasses import fields

import numpy
import pandas
import pytest
import torch

from helpers.generated_calls import FLAGS
from regard import Causal, InputError, See, Seen, attention
from regard.mechanism.labelled import Array, Labelled, Labels, Parts

EVERYTHING = See(
    **FLAGS, sink=True, top=2, rows=[0, -1], pairs=[(1, 0)], scores=[2], map=(2, 3), map_peak=True
)


@pytest.fixture
def seen() -> Seen:
    query, key, value = torch.randn(3, 2, 3, 5, 4, generator=torch.Generator().manual_seed(0))
    return attention(query, key, value, mask=Causal(), sinks=torch.zeros(3), see=EVERYTHING)[1]


def test_every_field_of_seen_has_a_name_for_each_dimension(seen: Seen) -> None:
    assert [f.name for f in fields(Seen) if getattr(seen, f.name) is None] == ["heads"]
    sizes = {"batch": 2, "head": 3, "query": 5, "key": 5, "rank": 2, "row": 2, "score_row": 1}
    sizes |= {"pair": 1, "query_bin": 2, "key_bin": 3}
    arrays = seen._labelled().arrays
    assert arrays.keys() == seen.to_dict().keys()
    for name, (dims, values) in arrays.items():
        assert [sizes[dim] for dim in dims] == list(values.shape), name


def test_scores_of_pairs_have_another_dimension_than_scores_of_rows() -> None:
    x = torch.zeros(1, 1, 3, 2)
    _, seen = attention(x, x, x, see=See(scores=[(1, 0), (2, 2)]))
    assert seen.to_pandas().index.names == ["batch", "head", "score_pair"]


def test_numpy_arrays_are_the_tensors(seen: Seen) -> None:
    arrays = seen.to_numpy()
    for name, tensor in seen.to_dict().items():
        numpy.testing.assert_array_equal(arrays[name], tensor.numpy())


def test_bfloat16_becomes_float32_and_gradients_are_left_behind() -> None:
    values = torch.tensor([0.5, 0.25], dtype=torch.bfloat16, requires_grad=True)
    result = Labelled({"peak": Array(("query",), values)})
    assert result.to_numpy()["peak"].dtype == numpy.float32
    assert result.to_pandas([])["peak"].tolist() == [0.5, 0.25]
    assert Parts(("layer",), {("a",): result}).to_numpy()["peak"].tolist() == [[0.5, 0.25]]


def test_a_table_has_a_level_for_each_dimension_and_a_column_for_each_field(seen: Seen) -> None:
    table = seen.to_pandas("entropy", "peak")
    assert table.index.names == ["batch", "head", "query"]
    assert list(table) == ["entropy", "peak"]
    assert table.loc[(1, 2, 4), "entropy"] == seen.entropy[1, 2, 4].item()
    means = table["peak"].groupby("head").mean()
    numpy.testing.assert_allclose(means, seen.peak.mean((0, 2)), rtol=1e-6)
    assert seen.to_pandas("max_logit").loc[(1, 2), "max_logit"] == seen.max_logit[1, 2].item()


def test_a_table_of_a_map_says_where_each_bin_starts(seen: Seen) -> None:
    table = seen.to_pandas("map").xs((0, 0), level=("batch", "head"))
    assert table["first_query"].tolist() == [0, 0, 0, 3, 3, 3]  # 5 queries in 2 bins
    assert table["first_key"].tolist() == [0, 2, 4, 0, 2, 4]


def test_a_table_has_fields_of_one_kind(seen: Seen) -> None:
    with pytest.raises(InputError, match=r"received by batch, head, key.*to_pandas\('entropy'\)"):
        seen.to_pandas("entropy", "received")
    with pytest.raises(InputError, match="got the field 'entorpy'"):
        seen.to_pandas("entorpy")
    with pytest.raises(InputError, match="no field was recorded"):
        Seen().to_pandas()


@pytest.mark.parametrize("package", ["pandas", "xarray"])
def test_without_the_package_the_error_names_it(
    seen: Seen, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=f"not installed: pip install {package}"):
        getattr(seen, f"to_{package}")()


def part(values: list[float], label: str = "a", **facts: str) -> Labelled:
    tokens = Labels(("key",), tuple(f"{label}{place}" for place in range(len(values))))
    arrays = {
        "weight": Array(("key",), torch.tensor(values, dtype=torch.float32)),
        "count": Array(("key",), torch.arange(len(values))),
    }
    return Labelled(arrays, {"token": tokens}, facts)


def test_parts_of_different_sizes_are_filled_up_in_arrays_and_not_in_tables() -> None:
    parts = Parts(("layer", "call"), {("x", 0): part([1, 2]), ("y", 0): part([3])})
    arrays = parts.to_numpy()
    numpy.testing.assert_array_equal(arrays["weight"], [[[1, 2]], [[3, math.nan]]])
    assert arrays["count"].tolist() == [[[0, 1]], [[0, -1]]]
    table = parts.to_pandas([])
    assert table.index.names == ["layer", "call", "key"]
    assert table["weight"].to_dict() == {("x", 0, 0): 1, ("x", 0, 1): 2, ("y", 0, 0): 3}
    assert table["token"].tolist() == ["a0", "a1", "a0"]


def test_a_part_that_is_missing_is_nan() -> None:
    parts = Parts(
        ("layer", "call"), {("x", 0): part([1]), ("x", 1): part([2]), ("y", 0): part([3])}
    )
    numpy.testing.assert_array_equal(parts.to_numpy()["weight"], [[[1], [2]], [[3], [math.nan]]])


def test_labels_are_shared_where_they_are_equal_and_stacked_where_they_differ() -> None:
    equal = Parts(("layer",), {("x",): part([1], m="1", n="2"), ("y",): part([2], m="1", n="3")})
    assert equal.stacked().labels["token"] == Labels(("key",), ("a0",))
    assert equal.stacked().facts == {"m": "1"}
    differ = Parts(("layer",), {("x",): part([1, 2]), ("y",): part([2], "b")})
    assert differ.stacked().labels["token"] == Labels(("layer", "key"), (("a0", "a1"), ("b0", "")))
    moved = [
        Labelled({"w": Array(("key",), torch.zeros(2))}, {"key": Labels(("key",), at)})
        for at in ((0, 1), (1, 2))
    ]
    parts = Parts(("layer",), {("x",): moved[0], ("y",): moved[1]})
    with pytest.raises(InputError, match=r"different places \(key\)"):
        parts.to_numpy()
    assert parts.to_pandas([]).index.tolist() == [("x", 0), ("x", 1), ("y", 1), ("y", 2)]


def test_arrays_that_would_be_too_large_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.mechanism.labelled.MAX_NUMBERS", 3)
    parts = Parts(("layer",), {("x",): part([1, 2]), ("y",): part([3])})
    with pytest.raises(InputError, match="stacked to 4 numbers, more than 3"):
        parts.to_numpy()
    assert len(parts.to_pandas([])) == 3


def test_parts_with_other_fields_share_a_table_if_their_dimensions_agree() -> None:
    alone = Labelled({"peak": Array(("key",), torch.tensor([5.0]))})
    both = Parts(("layer",), {("x",): part([1, 2]), ("y",): alone}).to_pandas([])
    assert both["peak"].fillna(0).tolist() == [0, 0, 5]
    assert both["weight"].fillna(0).tolist() == [1, 2, 0]
    other = Labelled({"peak": Array(("query",), torch.tensor([5.0]))})
    with pytest.raises(InputError, match=r"as in to_pandas\('weight'\)"):
        Parts(("layer",), {("x",): part([1, 2]), ("y",): other}).to_pandas([])


def test_no_parts() -> None:
    assert Parts(("layer",), {}).to_numpy() == {}
    with pytest.raises(InputError, match="no call was recorded"):
        Parts(("layer",), {}).to_pandas([])


def test_a_dataset_has_named_dimensions_and_labels(seen: Seen) -> None:
    pytest.importorskip("xarray", reason="NOT TESTED: xarray is not installed")
    dataset = seen.to_xarray()
    assert dict(dataset.sizes) == {
        "batch": 2, "head": 3, "query": 5, "key": 5, "rank": 2, "row": 2, "score_row": 1,
        "pair": 1, "query_bin": 2, "key_bin": 3,
    }  # fmt: skip
    assert dataset["entropy"].dims == ("batch", "head", "query")
    assert dataset["first_query"].values.tolist() == [0, 3]
    numpy.testing.assert_array_equal(dataset["weights"].isel(head=1), seen.weights[:, 1])
    parts = Parts(("layer",), {("x",): part([1, 2], m="1"), ("y",): part([2], "b", m="1")})
    stacked = parts.to_xarray()
    assert stacked.attrs == {"m": "1"}
    assert stacked["token"].dims == ("layer", "key")
    assert stacked["weight"].sel(layer="x").values.tolist() == [1, 2]
    assert isinstance(stacked["weight"].to_dataframe(), pandas.DataFrame)
