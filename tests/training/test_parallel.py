"""However many processes train, and however often one dies, they train the same model."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers.training_data import recipe_of, write_data
from helpers.training_processes import (
    TrainingProcesses,
    killed_and_restarted,
    recipe_to_kill,
    wait_for_a_step,
)
from regard.checkpoints.folders import DamageWarning
from regard.errors import InputError
from regard.evaluation.losses import AnswerBatch, PairBatch
from regard.mechanism.masks import Padding
from regard.training.parallel import cut, interleave
from regard.training.recipe import parse_recipe
from regard.training.saving import Keeper

# Sums of float32 in another order; over 12 steps they were found to differ by 1e-6 at most.
SAME = {"rel": 0, "abs": 1e-5}


def recipe(folder: Path, task: str = "translation", kind: str = "transformer") -> dict[str, Any]:
    """Without dropout, which each process draws for itself."""
    write_data(folder)
    raw = recipe_of(folder, task, kind)
    names = {"gpt2": ("dropout", "attention_dropout", "embedding_dropout")}
    for name in names.get(kind, ("dropout",)):
        raw["model"]["config"][name] = 0.0
    raw["optimizer"] |= {"ema": 0.9}
    raw["saving"] = {"every": 3, "minutes": 0, "keep_last": 4}
    return raw


def numbers(run: Path, what: str = "loss") -> dict[int, float]:
    """The loss of each report of a run, by step."""
    rows = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    return {row["step"]: row[what] for row in rows if what in row}


def scores(run: Path) -> dict[str, float]:
    found: dict[str, float] = json.loads((run / "scores.json").read_text(encoding="utf-8"))
    return found


def bytes_of(run: Path) -> dict[str, bytes]:
    """The checkpoints and the finished model."""
    files = [*(run / "checkpoints").rglob("*"), *(run / "model").rglob("*")]
    return {str(f.relative_to(run)): f.read_bytes() for f in sorted(files) if f.is_file()}


def rewound(run: Path, name: str) -> Path:
    """A copy of a finished run, as it stood after step 6."""
    copy = run.with_name(name)
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "model")
    for step in (9, 12):
        shutil.rmtree(copy / "checkpoints" / f"step-{step:010}")
    return copy


# -------------------------------------------------------------------------------- equal curves


@pytest.mark.processes
@pytest.mark.parametrize(
    ("kind", "parallel", "worlds"),
    [
        ("transformer", "ddp", (2, 4)),
        ("transformer-xl", "ddp", (2,)),  # what it remembers is shared out too
        ("gpt2", "context", (2, 4)),
        ("gpt2", "fsdp", (2,)),
        ("transformer-xl", "fsdp", (2,)),
    ],
)
def test_any_number_of_processes_take_the_same_steps(
    tmp_path: Path, processes: TrainingProcesses, kind: str, parallel: str, worlds: tuple[int, ...]
) -> None:
    task = "translation" if kind == "transformer" else "language modelling"
    raw = recipe(tmp_path, task, kind) | {"parallel": parallel}
    raw["batch"]["accumulate"] = 2
    raw["schedule"]["steps"] = 6
    alone = processes.train(raw, 1)
    for world in worlds:
        raw["output"] = str(tmp_path / f"{world}")
        together = processes.train(raw, world)
        for what in ("loss", "gradient"):
            assert numbers(together, what) == pytest.approx(numbers(alone, what), **SAME)
        expected = scores(alone)
        assert scores(together) == pytest.approx(expected, rel=1e-5)
        first = json.loads((together / "log.jsonl").read_text().splitlines()[0])
        assert (first["processes"], first["parallel"]) == (world, parallel)


@pytest.mark.processes
def test_several_processes_end_in_time_however_often_they_save(
    tmp_path: Path, processes: TrainingProcesses
) -> None:
    raw = recipe(tmp_path)
    raw["schedule"] |= {"steps": 100_000, "minutes": 0.02}
    raw["evaluation"]["every"] = 0
    run = processes.train(raw | {"saving": {"every": 20, "minutes": 0, "keep_last": 2}}, 2)
    assert max(numbers(run)) < 10_000


@pytest.mark.processes
def test_several_processes_save_by_time_at_the_same_step(
    tmp_path: Path, processes: TrainingProcesses
) -> None:
    raw = recipe(tmp_path)
    raw["schedule"]["steps"] = 6
    raw["evaluation"]["every"] = 0
    run = processes.train(raw | {"saving": {"every": 100, "minutes": 1e-12}}, 2)
    # Step 1 tells the others. After a save the timer waits for as long as the save demands.
    assert {2, 6} <= numbers(run, "gradient").keys() <= {2, 3, 4, 5, 6}
    assert Keeper(run / "checkpoints").steps() == [6]


@pytest.mark.processes
@pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize("kind", ["gpt2", pytest.param("transformer-xl", marks=pytest.mark.sweep)])
def test_compiled_it_takes_the_same_steps(
    tmp_path: Path, processes: TrainingProcesses, kind: str
) -> None:
    raw = recipe(tmp_path, "language modelling", kind)
    raw["schedule"]["steps"] = 3
    plain = processes.train(raw, 1)
    raw |= {"output": str(tmp_path / "compiled"), "compile": True}
    assert numbers(processes.train(raw, 1)) == pytest.approx(numbers(plain), **SAME)


@pytest.mark.processes
def test_the_steps_are_not_those_of_other_data(
    tmp_path: Path, processes: TrainingProcesses
) -> None:
    """What the test above would find if a process took the wrong rows, or a mean for a sum."""
    raw = recipe(tmp_path)
    alone = processes.train(raw, 1)
    raw |= {"output": str(tmp_path / "other"), "seed": raw["seed"] + 1}
    other = processes.train(raw, 1)
    difference = abs(numbers(alone)[12] - numbers(other)[12])
    assert difference > 1000 * SAME["abs"]


def test_shares_of_a_batch_make_the_batch() -> None:
    ids, lengths = torch.arange(15).reshape(5, 3), torch.tensor([3, 1, 2, 3, 1])
    batch = PairBatch(ids, Padding(lengths), ids + 1, ids + 2)
    shares = [cut(batch, slice(rank, None, 2)) for rank in range(2)]
    assert [len(share.source) for share in shares] == [3, 2]
    assert shares[1].padding.lengths.tolist() == [1, 3]
    trees = [{"kept": [share.source, share.labels], "read": 7} for share in shares]
    whole = interleave(trees)
    assert torch.equal(whole["kept"][0], ids)
    assert torch.equal(whole["kept"][1], ids + 2)
    assert whole["read"] == 7
    flags = AnswerBatch(ids, ids, ids > 2, None, lengths, lengths)
    assert cut(flags, slice(1, None, 2)).start.tolist() == [1, 3]


@pytest.mark.processes
def test_what_cannot_be_shared_is_refused(tmp_path: Path, processes: TrainingProcesses) -> None:
    raw = recipe(tmp_path, "language modelling", "gpt2") | {"parallel": "context"}
    raw["data"]["length"] = 63
    processes.start("train", 2, recipe=raw, resume=False)
    assert processes.wait() == [2, 2]
    assert (
        "Sequences of 63 tokens (data.length) cannot be split evenly among 2" in processes.stderr()
    )
    raw = recipe(tmp_path, "language modelling", "transformer-xl")
    raw["batch"]["tokens"] = 64
    raw["output"] = str(tmp_path / "xl")
    processes.start("train", 2, recipe=raw, resume=False)
    assert processes.wait() == [2, 2]
    assert "A batch has 1 rows, too few for 2 processes" in processes.stderr()
    with pytest.raises(InputError, match=r"parallel = 'context' is for gpt2"):
        parse_recipe(recipe(tmp_path) | {"parallel": "context"})
    with pytest.raises(InputError, match=r"compile = true is not for t5"):
        parse_recipe(recipe(tmp_path, "span corruption", "t5") | {"compile": True})


@pytest.mark.processes
@pytest.mark.parametrize("world", [2, 4])
def test_uneven_shards_are_gathered_whole(processes: TrainingProcesses, world: int) -> None:
    processes.start("gather", world)
    assert processes.wait() == [0] * world, processes.stderr()


@pytest.mark.processes
def test_shards_do_nothing_together_that_gloo_may_die_of(
    tmp_path: Path, processes: TrainingProcesses
) -> None:
    """An all-gather by DTensor has a name too long for the string that gloo's threads share."""
    raw = recipe(tmp_path) | {"parallel": "fsdp"}
    processes.start("train and tell", 2, recipe=raw, resume=False, folder=str(tmp_path))
    assert processes.wait() == [0, 0], processes.stderr()
    for rank in range(2):
        names = json.loads((tmp_path / f"told-{rank}.json").read_text(encoding="utf-8"))
        assert {"_allgather_base_.default", "gather_.default", "all_reduce.default"} <= set(names)
        assert not [name for name in names if "coalesced" in name or "into_tensor" in name]


# --------------------------------------------------------------------------------- checkpoints


@pytest.mark.processes
def test_shards_go_on_in_any_number_of_processes(
    tmp_path: Path, processes: TrainingProcesses
) -> None:
    raw = recipe(tmp_path) | {"parallel": "fsdp"}
    run = processes.train(raw, 2)
    names = {file.name for file in (run / "checkpoints" / "step-0000000012").iterdir()}
    assert {"shards-00000.safetensors", "shards-00001.safetensors", "shards.json"} <= names
    for world, how in ((2, "fsdp"), (1, "ddp"), (4, "fsdp")):
        copy = rewound(run, f"{world}-{how}")
        processes.train(raw | {"output": str(copy), "parallel": how}, world, resume=True)
        assert '"resumed": "step-0000000006"' in (copy / "log.jsonl").read_text()
        if (world, how) == (2, "fsdp"):
            assert bytes_of(copy) == bytes_of(run)
        assert numbers(copy) == pytest.approx(numbers(run), **SAME)
        assert scores(copy) == pytest.approx(scores(run), rel=1e-5)


@pytest.mark.processes
def test_replicas_go_on_as_shards_and_to_the_byte_as_they_were(
    tmp_path: Path, processes: TrainingProcesses
) -> None:
    raw = recipe(tmp_path)
    raw["model"]["config"]["dropout"] = 0.1
    run = processes.train(raw, 2)
    copy = rewound(run, "copy")
    processes.train(raw | {"output": str(copy)}, 2, resume=True)
    assert bytes_of(copy) == bytes_of(run)
    sharded = rewound(run, "sharded")
    processes.train(raw | {"output": str(sharded), "parallel": "fsdp"}, 2, resume=True)
    assert numbers(sharded) == pytest.approx(numbers(run), **SAME)


@pytest.mark.processes
@pytest.mark.parametrize("full", ["shards-00001.safetensors", "shards.json", "model.safetensors"])
def test_a_disk_full_for_one_process_loses_nothing_and_is_known_to_all(
    tmp_path: Path, processes: TrainingProcesses, full: str
) -> None:
    processes.start("full disk", 2, folder=str(tmp_path), full=full)
    assert processes.wait() == [0, 0], processes.stderr()
    keeper = Keeper(tmp_path)
    assert keeper.steps() == [1, 3]
    assert sorted(tmp_path.iterdir()) == [tmp_path / f"step-{step:010}" for step in (1, 3)]
    found = keeper.load(3).state["model"]
    assert torch.equal(found["odd"], torch.arange(10.0).reshape(5, 2))
    assert torch.equal(found["few"], torch.arange(2.0)[None])
    shard = tmp_path / "step-0000000003" / "shards-00001.safetensors"
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    with pytest.warns(DamageWarning, match=r"shards-00001.safetensors differs.*from step 1"):
        saved = keeper.newest()
    assert saved.step == 1


# ------------------------------------------------------------------------------- interruptions


@pytest.mark.processes
def test_one_process_asked_to_stop_all_save_and_leave(
    tmp_path: Path, processes: TrainingProcesses
) -> None:
    raw = recipe(tmp_path) | {"parallel": "fsdp"}
    raw["model"]["config"]["dropout"] = 0.1
    raw["saving"] = {"every": 40, "minutes": 0, "keep_last": 1}
    raw["evaluation"] = {"every": 0}
    raw["schedule"]["steps"] = 40
    expected = bytes_of(processes.train(raw, 2))
    raw["output"] = str(tmp_path / "stopped")
    raw["watching"] = {"every": 1}  # the log tells of every step then
    children = processes.start("train", 2, recipe=raw, resume=False)
    log = tmp_path / "stopped" / "log.jsonl"
    wait_for_a_step(log, processes.ended, b'"step"')
    os.kill(children[1], signal.SIGTERM)
    assert processes.wait() == [3, 3], processes.stderr()
    last = json.loads(log.read_text(encoding="utf-8").splitlines()[-1])
    assert last["interrupted"] == "SIGTERM"
    assert 0 < last["step"] < 40
    processes.train(raw, 2, resume=True)
    assert bytes_of(tmp_path / "stopped") == expected


@pytest.mark.processes
def test_a_process_that_is_killed_starts_again_and_the_end_is_the_same(
    tmp_path: Path, processes: TrainingProcesses
) -> None:
    raw = recipe_to_kill(tmp_path, steps=40)
    undisturbed = processes.train(raw, 2)
    found = killed_and_restarted(raw, undisturbed, kills=1, seed=0)
    assert found == {"kills": 1, "restarts": 1, "resumed": 1, "steps": 40, "different": []}
