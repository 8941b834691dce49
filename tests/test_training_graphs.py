"""Steps replayed as CUDA graphs: what tells two batches apart, and that they are the same steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from regard.errors import InputError
from regard.mechanism.masks import Padding
from regard.training import parse_recipe, train
from regard.training.graphs import _Given, form, tensors
from regard.training.objectives import PairBatch
from training_data import recipe_of, write_data


def batch(rows: int, padded: bool) -> _Given:
    ids = torch.zeros(rows, 4, dtype=torch.int64)
    padding = Padding(torch.full((rows,), 3)) if padded else None
    return _Given(PairBatch(ids, padding, ids, ids), torch.tensor(8.0))


def test_batches_of_one_form_share_a_graph_and_no_others() -> None:
    assert form(batch(3, padded=True)) == form(batch(3, padded=True))
    forms = {form(batch(rows, padded)) for rows in (2, 3) for padded in (False, True)}
    assert len(forms) == 4


def test_all_that_a_graph_reads_is_copied() -> None:
    assert [list(tensor.shape) for tensor in tensors(batch(3, padded=True))] == [
        [3, 4], [3], [3, 4], [3, 4], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("task", "kind", "keys"),
    [
        ("translation", "transformer", {"compile": True}),
        ("translation", "transformer", {"precision": "float16"}),
        ("language modelling", "transformer-xl", {}),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    tmp_path: Path, task: str, kind: str, keys: dict[str, object]
) -> None:
    with pytest.raises(InputError, match="graphs = true is not for"):
        parse_recipe(recipe_of(tmp_path, task, kind) | keys, {"graphs": True})


def test_a_cpu_has_nothing_to_replay(tmp_path: Path) -> None:
    write_data(tmp_path)
    assert train(parse_recipe(recipe_of(tmp_path), {"graphs": True, "schedule.steps": 3})).finished


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
@pytest.mark.parametrize(
    ("task", "kind"),
    [("translation", "transformer"), ("language modelling", "gpt2"), ("span corruption", "t5")],
)
def test_replayed_steps_are_the_steps_themselves(tmp_path: Path, task: str, kind: str) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path, task, kind) | {"device": "cuda"}
    raw["model"]["config"] |= {"dropout": 0.0}
    if kind == "gpt2":
        raw["model"]["config"] |= {"embedding_dropout": 0.0, "attention_dropout": 0.0}
    losses = []
    for graphs in (False, True):
        keys = {"graphs": graphs, "output": str(tmp_path / f"run{graphs}"), "schedule.steps": 60}
        losses.append(train(parse_recipe(raw, keys)).scores["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
