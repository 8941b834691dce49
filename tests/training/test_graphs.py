"""Steps replayed as CUDA graphs: what tells two batches apart, and that they are the same steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from helpers.training_data import recipe_of, write_data
from regard.errors import InputError
from regard.mechanism.masks import Padding
from regard.training import loop
from regard.training.graphs import _Given, shape_key, tensors
from regard.training.objectives import PairBatch
from regard.training.recipe import parse_recipe
from regard.training.run import train


def batch(rows: int, padded: bool) -> _Given:
    ids = torch.zeros(rows, 4, dtype=torch.int64)
    padding = Padding(torch.full((rows,), 3)) if padded else None
    return _Given(PairBatch(ids, padding, ids, ids), torch.tensor(8.0), {})


def test_batches_of_one_form_share_a_graph_and_no_others() -> None:
    assert shape_key(batch(3, padded=True)) == shape_key(batch(3, padded=True))
    forms = {shape_key(batch(rows, padded)) for rows in (2, 3) for padded in (False, True)}
    assert len(forms) == 4


def test_all_that_a_graph_reads_is_copied() -> None:
    assert [list(tensor.shape) for tensor in tensors(batch(3, padded=True))] == [
        [3, 4], [3], [3, 4], [3, 4], [],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"compile": True}, "with compile = true is for transformer-xl, not for transformer"),
        ({"precision": "float16"}, "cuda_graphs = true is not for precision = 'float16'"),
    ],
)
def test_what_cannot_be_replayed_is_refused(
    tmp_path: Path, keys: dict[str, object], said: str
) -> None:
    with pytest.raises(InputError, match=said):
        parse_recipe(
            recipe_of(tmp_path, "translation", "transformer") | keys, {"cuda_graphs": True}
        )


def test_a_cpu_has_nothing_to_replay(tmp_path: Path) -> None:
    write_data(tmp_path)
    assert train(
        parse_recipe(recipe_of(tmp_path), {"cuda_graphs": True, "schedule.steps": 3})
    ).finished


class Graph(TorchDispatchMode):
    """What a CUDA graph is, on a CPU: operations with the places they read from and write to."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Any] = []
        self.inside: set[int] = set()  # memory that is the graph's own
        self.outside: dict[int, tuple[Tensor, Tensor]] = {}  # what it writes to, and its content

    def __torch_dispatch__(self, do: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [part for part in tree_leaves((args, kwargs)) if isinstance(part, Tensor)]
        if do._schema.is_mutable:
            for tensor in given:
                if place(tensor) not in self.inside:
                    self.outside.setdefault(tensor.data_ptr(), (tensor, tensor.clone()))
        written = do(*args, **(kwargs or {}))
        new = {place(part) for part in tree_leaves(written) if isinstance(part, Tensor)}
        self.inside |= new - {place(tensor) for tensor in given}
        self.calls.append((do, args, kwargs or {}, written))
        return written

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        with torch._C._AutoDispatchBelowAutograd():
            for tensor, before in self.outside.values():  # to record is not to run
                tensor.copy_(before)

    def replay(self) -> None:
        with torch._C._AutoDispatchBelowAutograd():  # as they were recorded
            for do, args, kwargs, written in self.calls:
                pairs = zip(tree_leaves(written), tree_leaves(do(*args, **kwargs)), strict=True)
                for there, tensor in pairs:
                    if isinstance(there, Tensor) and there.data_ptr() != tensor.data_ptr():
                        there.copy_(tensor)

    def pool(self) -> None:
        """All memory is one."""


def place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


@contextmanager
def recording(graph: Graph, pool: None) -> Iterator[None]:
    del pool
    with graph:
        yield


@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "kind", "settings"),
    [
        ("translation", "transformer", {}),
        ("language modelling", "gpt2", {}),
        ("language modelling", "transformer-xl", {}),
        ("language modelling", "transformer-xl", {"batch.accumulate": 2}),
        ("span corruption", "t5", {}),
    ],
)
def test_what_a_step_leaves_is_there_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, task: str, kind: str, settings: dict[str, int]
) -> None:
    """Whole trainings, with evaluations between, where memories are remembered and forgotten."""
    write_data(tmp_path)
    raw = recipe_of(tmp_path, task, kind)
    raw["model"]["config"] |= {"dropout": 0.0}
    if kind == "gpt2":
        raw["model"]["config"] |= {"embedding_dropout": 0.0, "attention_dropout": 0.0}
    losses, graphs = [], []

    class Counted(loop.Replayed):
        def _record(self, given: _Given) -> Any:
            graphs.append(shape_key(given))
            return super()._record(given)

    for replayed in (False, True):
        if replayed:
            monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
            monkeypatch.setattr(torch.cuda, "graph", recording)
            monkeypatch.setattr(loop, "Replayed", Counted)
            monkeypatch.setattr(loop, "replays", lambda recipe, device: recipe.cuda_graphs)
            # A unigram tokenizer is another one each time it is trained.
            raw["tokenizer"] = {"start": str(tmp_path / "runFalse" / "model")}
        keys = {"cuda_graphs": replayed, "output": str(tmp_path / f"run{replayed}")}
        result = train(parse_recipe(raw, keys | {"schedule.steps": 60, **settings}))
        losses.append(result.scores["loss"])
    assert graphs
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ("translation", "transformer"),
        ("language modelling", "gpt2"),
        ("language modelling", "transformer-xl"),
        ("span corruption", "t5"),
    ],
)
def test_replayed_steps_are_the_steps_themselves(tmp_path: Path, task: str, kind: str) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path, task, kind) | {"device": "cuda"}
    raw["model"]["config"] |= {"dropout": 0.0}
    if kind == "gpt2":
        raw["model"]["config"] |= {"embedding_dropout": 0.0, "attention_dropout": 0.0}
    losses = []
    for graphs in (False, True):
        keys = {
            "cuda_graphs": graphs,
            "output": str(tmp_path / f"run{graphs}"),
            "schedule.steps": 60,
        }
        losses.append(train(parse_recipe(raw, keys)).scores["loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
