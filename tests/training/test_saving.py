"""Checkpoints: every operation fails once, the power goes at any moment, bits rot; none is lost."""

from __future__ import annotations

import errno
import os
import random
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.checkpoints.folders import DamageWarning, Disk, publish, read_published
from regard.errors import CheckpointError, InputError
from regard.training.saving import Keeper


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model": {
            "weight": torch.randn(3, 4, generator=generator),
            "count": torch.tensor(step),
            "half": torch.randn(5, generator=generator).bfloat16(),
        },
        "optimizer": {"state": {"0": {"step": torch.tensor(float(step))}}, "groups": [{"lr": 0.1}]},
        "cursor": {"epoch": step // 10, "batch": step, "best": None, "name": "ü"},
    }


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and one == other


def test_a_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path / "deep" / "run")
    assert keeper.newest() is None
    keeper.save(7, state_of(7), score=0.1 + 0.2)
    saved = keeper.newest()
    assert (saved.step, saved.score) == (7, 0.1 + 0.2)
    assert equal(saved.state, state_of(7))


def test_keeps_the_last_the_best_and_what_was_saved_out_of_turn_while_it_is_newest(
    tmp_path: Path,
) -> None:
    keeper = Keeper(tmp_path, last=2)
    for step, score in ((10, 0.5), (20, 0.9), (30, 0.9), (40, 0.1)):
        keeper.save(step, state_of(step), score=score)
    assert keeper.steps() == [20, 30, 40]
    assert keeper.best() == 20
    keeper.save(45, state_of(45), in_turn=False)
    assert keeper.steps() == [20, 30, 40, 45]
    keeper.save(50, state_of(50), score=0.95)
    assert keeper.steps() == [40, 50]
    assert keeper.in_turn() == [40, 50]


def test_what_a_cut_off_save_left_is_tidied_but_never_the_last_whole_one(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        Keeper(tmp_path, last=3).save(step, state_of(step))
    (tmp_path / ".saving-step-0000000040.1").mkdir()
    (tmp_path / ".removing-step-0000000005").mkdir()
    (tmp_path / "step-0000000030" / "model.safetensors").unlink()
    keeper = Keeper(tmp_path, last=1)
    with pytest.warns(DamageWarning):
        saved = keeper.newest()
    keeper.tidy(saved.step)
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "step-0000000020",
        "step-0000000030",
    ]


def test_averages_the_last_checkpoints_saved_in_turn(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path, last=3)
    for step in (10, 20, 30):
        keeper.save(step, state_of(step))
    keeper.save(31, state_of(31), in_turn=False)
    mean = keeper.average(3)
    expected = sum(state_of(step)["model"]["weight"].double() for step in (10, 20, 30)) / 3
    assert torch.equal(mean["weight"], expected.float())
    assert mean["half"].dtype == torch.bfloat16
    assert int(mean["count"]) == 30
    with pytest.raises(InputError, match="4 checkpoints should be averaged"):
        keeper.average(4)


def test_what_cannot_be_saved_is_refused_by_its_place(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    with pytest.raises(InputError, match=r"a set at random/python/1"):
        keeper.save(1, {"random": {"python": [0, {1}]}})
    with pytest.raises(InputError, match="keys that are not strings, at optimizer"):
        keeper.save(1, {"optimizer": {0: 1}})
    keeper.save(1, state_of(1))
    with pytest.raises(InputError, match=r"already has a checkpoint of step"):
        keeper.save(1, state_of(1))
    with pytest.raises(InputError, match="finite"):
        keeper.save(2, state_of(2), score=float("nan"))
    assert keeper.steps() == [1]


# ------------------------------------------------------------------- every operation fails once


class Failing(Disk):
    """A disk on which the n-th operation fails, in one of the ways disks do."""

    def __init__(self, fails: int, way: str) -> None:
        self.fails, self.way, self.count, self.failed = fails, way, 0, ""

    def _turn(self, name: str) -> bool:
        self.count += 1
        if self.count == self.fails:
            self.failed = name
        return self.count == self.fails

    def _raise(self) -> None:
        code = errno.EIO if self.way == "EIO" else errno.ENOSPC
        raise OSError(code, os.strerror(code))

    def make_folder(self, folder: Path) -> None:
        if self._turn("make_folder"):
            self._raise()
        super().make_folder(folder)

    def create(self, file: Path) -> int:
        if self._turn("create"):
            self._raise()
        return super().create(file)

    def write(self, handle: int, data: memoryview) -> int:
        if self._turn("write"):
            if self.way == "short":  # a part fits; whoever does not look at the count is lost
                self.fails, self.way = self.count + 1, "ENOSPC"
                return super().write(handle, data[: len(data) // 2])
            if self.way == "lie":
                super().write(handle, data[: len(data) // 2])
                return len(data)
            self._raise()
        return super().write(handle, data)

    def sync(self, handle: int) -> None:
        if self._turn("sync"):
            self._raise()
        super().sync(handle)

    def sync_folder(self, folder: Path) -> None:
        if self._turn("sync_folder"):
            self._raise()
        super().sync_folder(folder)

    def rename(self, old: Path, new: Path) -> None:
        if self._turn("rename"):
            self._raise()
        super().rename(old, new)

    def remove(self, folder: Path) -> None:
        if self._turn("remove"):
            shutil.rmtree(next(file for file in folder.iterdir()), ignore_errors=True)
            self._raise()
        super().remove(folder)


@pytest.mark.parametrize(
    "way",
    ["ENOSPC", *(pytest.param(way, marks=pytest.mark.slow) for way in ("EIO", "short", "lie"))],
)
def test_whatever_fails_once_the_last_good_checkpoint_is_there(tmp_path: Path, way: str) -> None:
    failed = set()
    for fails in range(1, 1000):
        folder = tmp_path / str(fails)
        for step in (10, 20):
            Keeper(folder, last=2).save(step, state_of(step))
        disk = Failing(fails, way)
        try:
            Keeper(folder, last=2, disk=disk).save(30, state_of(30))
        except CheckpointError:
            raised = True
        else:
            raised = False
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DamageWarning)
            saved = Keeper(folder).newest()
        assert saved.step >= 20
        assert equal(saved.state, state_of(saved.step))
        if not disk.failed:
            assert not raised
            break
        failed.add(disk.failed)
        assert raised, f"operation {fails}, {disk.failed}, failed in silence"
        # The run goes on once the disk does.
        keeper = Keeper(folder, last=2)
        if 30 not in keeper.steps() or saved.step != 30:
            keeper.save(30, state_of(30))
        keeper.save(40, state_of(40))
        assert keeper.in_turn() == [30, 40]
        assert equal(keeper.newest().state, state_of(40))  # type: ignore[union-attr]
    assert failed == {
        "make_folder", "create", "write", "sync", "sync_folder", "rename", "remove"
    }  # fmt: skip


def test_the_first_save_of_all_can_fail_at_any_moment_too(tmp_path: Path) -> None:
    for fails in range(1, 1000):
        folder = tmp_path / str(fails) / "run"
        disk = Failing(fails, "ENOSPC")
        try:
            Keeper(folder, disk=disk).save(1, state_of(1))
        except CheckpointError as error:
            assert "could not be saved" in str(error)  # noqa: PT017
        saved = Keeper(folder).newest()
        assert saved is None or equal(saved.state, state_of(1))
        if not disk.failed:
            assert saved is not None
            return


# ------------------------------------------------------------- the power goes at every moment


class Recording(Disk):
    """A disk that remembers what was done, for :func:`crashes` to play back in part."""

    def __init__(self) -> None:
        self.done: list[tuple[Any, ...]] = []
        self.files: dict[int, Path] = {}

    def make_folder(self, folder: Path) -> None:
        super().make_folder(folder)
        self.done.append(("make_folder", folder))

    def create(self, file: Path) -> int:
        handle = super().create(file)
        self.files[handle] = file
        self.done.append(("create", file))
        return handle

    def write(self, handle: int, data: memoryview) -> int:
        count = super().write(handle, data)
        self.done.append(("write", self.files[handle], bytes(data[:count])))
        return count

    def sync(self, handle: int) -> None:
        self.done.append(("sync", self.files[handle]))

    def sync_folder(self, folder: Path) -> None:
        self.done.append(("sync_folder", folder))

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.done.append(("rename", old, new))

    def remove(self, folder: Path) -> None:
        super().remove(folder)
        self.done.append(("remove", folder))


class Node:
    """A file or folder as the disk may hold it: what is safe, and what is only in memory."""

    def __init__(self, folder: bool) -> None:
        self.folder = folder
        self.now: Any = {} if folder else b""
        self.safe: Any = {} if folder else b""

    def write_to(self, path: Path, choose: random.Random) -> None:
        if not self.folder:
            cut = choose.randint(len(self.safe), len(self.now))  # files only grow here
            path.write_bytes(choose.choice([self.safe, self.now, self.now[:cut]]))
            return
        path.mkdir()
        # Each entry made or taken away since the last sync may or may not have reached the disk.
        for name in self.now.keys() | self.safe.keys():
            old, new = self.safe.get(name), self.now.get(name)
            kept = old if old is new else choose.choice([old, new])
            if kept is not None:
                kept.write_to(path / name, choose)


def crashes(done: list[tuple[Any, ...]], root: Path) -> Iterator[Node]:
    """The disk after each operation."""
    top = Node(folder=True)

    def at(path: Path) -> Node:
        node = top
        for part in path.relative_to(root).parts:
            node = node.now[part]
        return node

    for kind, path, *more in done:
        holder = at(path.parent) if path != root else top
        if kind == "make_folder":
            holder.now[path.name] = Node(folder=True)
        elif kind == "create":
            holder.now[path.name] = Node(folder=False)
        elif kind == "write":
            at(path).now += more[0]
        elif kind in ("sync", "sync_folder"):
            node = at(path)
            node.safe = dict(node.now) if node.folder else node.now
        elif kind == "rename":
            at(more[0].parent).now[more[0].name] = holder.now.pop(path.name)
        elif kind == "remove":
            holder.now.pop(path.name)
        yield top


@pytest.mark.slow
def test_the_power_may_go_at_any_moment_and_what_was_not_synced_with_it(tmp_path: Path) -> None:
    root = tmp_path / "disk"
    root.mkdir()
    disk = Recording()
    keeper, ended = Keeper(root / "run", last=1, disk=disk), []
    for step in (10, 20, 30):
        keeper.save(step, state_of(step))
        ended.append(len(disk.done))
    choose = random.Random(0)
    fallen_back = 0
    for moment, top in enumerate(crashes(disk.done, root), 1):
        promised = max(
            [step for step, end in zip((10, 20, 30), ended, strict=True) if end <= moment],
            default=0,
        )
        for attempt in range(4):
            crashed = tmp_path / f"{moment}-{attempt}"
            top.write_to(crashed, choose)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DamageWarning)
                saved = Keeper(crashed / "run").newest()
            step = 0 if saved is None else saved.step
            assert step >= promised, f"after {disk.done[moment - 1][0]}: {step} < {promised}"
            if saved is not None:
                assert equal(saved.state, state_of(step))
                fallen_back += step == promised and moment not in ended
            shutil.rmtree(crashed)
    assert fallen_back > 20


# --------------------------------------------------------------------------------- rot


def damage(folder: Path, other: Path, choose: random.Random) -> str:
    """Do something to one checkpoint that disks and people do."""
    file = choose.choice(sorted(folder.iterdir()))
    data = bytearray(file.read_bytes())
    kind = choose.choice(["flip", "cut", "grow", "zero", "delete", "swap", "add", "exchange"])
    if kind == "flip":
        data[choose.randrange(len(data))] ^= 1 << choose.randrange(8)
        file.write_bytes(data)
    elif kind == "cut":
        file.write_bytes(data[: choose.randrange(len(data))])
    elif kind == "grow":
        file.write_bytes(data + bytes(choose.randint(1, 9)))
    elif kind == "zero":
        start = choose.randrange(len(data))
        stop = choose.randint(start + 1, len(data))
        zeros = bytes(stop - start)
        file.write_bytes(data[:start] + (zeros if zeros != data[start:stop] else b"") + data[stop:])
    elif kind == "delete":
        file.unlink()
    elif kind == "swap":  # the same file of another checkpoint
        shutil.copy(other / file.name, file)
    elif kind == "add":
        (folder / "more.safetensors").write_bytes(data)
    elif kind == "exchange":  # the whole of another checkpoint under this name
        shutil.rmtree(folder)
        shutil.copytree(other, folder)
    return f"{kind} of {file.name}"


@pytest.mark.slow
def test_a_thousand_damaged_checkpoints_and_none_is_loaded(tmp_path: Path) -> None:
    pristine = tmp_path / "pristine"
    keeper = Keeper(pristine, last=2)
    for step in (10, 20):
        keeper.save(step, state_of(step))
    choose = random.Random(0)
    broken, whole = tmp_path / "run" / "step-0000000020", pristine / "step-0000000010"
    shutil.copytree(pristine, tmp_path / "run")
    for _ in range(1000):
        shutil.rmtree(broken)
        shutil.copytree(pristine / "step-0000000020", broken)
        what = damage(broken, whole, choose)
        with pytest.warns(DamageWarning, match="step-0000000020.*Continuing from step 10"):
            saved = Keeper(tmp_path / "run").newest()
        assert saved is not None, what
        assert saved.step == 10, what
        assert equal(saved.state, state_of(10)), what


def test_all_damaged_is_an_error_that_names_each(tmp_path: Path) -> None:
    keeper = Keeper(tmp_path)
    for step in (1, 2):
        keeper.save(step, state_of(step))
        (tmp_path / f"step-{step:010}" / "model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"(?s)step-0000000002.*step-0000000001.*To start"):
        keeper.newest()


def test_a_published_folder_is_not_overwritten(tmp_path: Path) -> None:
    publish(tmp_path / "a", {"x": b"1"}, {"why": "a test"})
    assert read_published(tmp_path / "a") == ({"why": "a test"}, {"x": b"1"})
    with pytest.raises(InputError, match="exists already"):
        publish(tmp_path / "a", {"x": b"2"}, {})
