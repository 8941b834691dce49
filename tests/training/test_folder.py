"""The folder of a run: what is in the way of a run there, and what another run left there."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.training_data import bytes_of, recipe_of, write_data
from helpers.training_processes import TrainingProcesses, wait_for_a_step
from regard.errors import InputError
from regard.training.folder import LOCK, LOG, held, logged, read_log
from regard.training.processes import Processes
from regard.training.recipe import parse_recipe
from regard.training.run import train


def test_a_second_run_in_a_folder_is_refused_by_the_name_of_the_first(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with held(folder, Processes()):
        named = rf"Process {os.getpid()} on .* trains in {folder}"
        with pytest.raises(InputError, match=named), held(folder, Processes()):
            pass
        assert (folder / LOCK).exists()
    assert not folder.exists()


def test_a_lock_file_without_a_process_locks_nothing(tmp_path: Path) -> None:
    (tmp_path / LOCK).write_text("Process 1 on a machine that lost its power")
    (tmp_path / LOG).touch()
    with held(tmp_path, Processes()):
        assert f"Process {os.getpid()} on" in (tmp_path / LOCK).read_text()
    assert [file.name for file in tmp_path.iterdir()] == [LOG]


def test_a_lock_on_a_file_that_was_removed_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files: list[Any] = []

    def flock(stream: Any, how: int) -> None:
        files.append(stream)
        if len(files) == 1:  # the run before ends between opening and locking
            (tmp_path / LOCK).unlink()

    monkeypatch.setattr(fcntl, "flock", flock)
    with held(tmp_path, Processes()):
        assert [file.closed for file in files] == [True, False]
        assert (tmp_path / LOCK).exists()


def test_a_disk_without_locks_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(stream: Any, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.warns(UserWarning, match="cannot be locked"), held(tmp_path, Processes()):
        pass


@pytest.mark.processes
def test_of_two_runs_at_once_one_is_refused_and_a_killed_one_blocks_none(
    tmp_path: Path, processes: TrainingProcesses
) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path)
    expected = bytes_of(processes.train(raw | {"output": str(tmp_path / "alone")}))
    [child] = processes.start("train", 0, recipe=raw, resume=False)
    wait_for_a_step(tmp_path / "run" / LOG, processes.ended)
    os.kill(child, signal.SIGSTOP)
    for resume in (False, True):
        with pytest.raises(InputError, match=f"Process {child} on"):
            train(parse_recipe(raw), resume=resume)
    os.kill(child, signal.SIGKILL)
    assert processes.wait() == [-signal.SIGKILL]
    assert (tmp_path / "run" / LOCK).exists()
    assert bytes_of(processes.train(raw, resume=True)) == expected


def in_the_way(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("")


@pytest.mark.parametrize(
    ("block", "named"),
    [
        (lambda run: in_the_way(run.parent), "outer"),
        (in_the_way, "run"),
        (lambda run: (run / LOCK).mkdir(parents=True), LOCK),
        (lambda run: (run / LOG).mkdir(parents=True), LOG),
    ],
)
def test_a_folder_that_cannot_be_written_is_refused(
    tmp_path: Path, block: Callable[[Path], None], named: str
) -> None:
    write_data(tmp_path)
    run = tmp_path / "outer" / "run"
    block(run)
    with pytest.raises(InputError, match=rf"A run cannot write .*{named}.*choose another output"):
        train(parse_recipe(recipe_of(tmp_path) | {"output": str(run)}))


@pytest.mark.parametrize("cut", [b'{"step": 3, "lo', b"\0\0\0", b'{"step": 3}'])
def test_a_last_line_that_is_cut_off_is_removed(tmp_path: Path, cut: bytes) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path)
    raw["schedule"]["steps"] = 3
    log = train(parse_recipe(raw)).folder / LOG
    before = log.read_bytes()
    log.write_bytes(before + cut)
    train(parse_recipe(raw), resume=True)
    assert log.read_bytes().startswith(before)
    assert [row.get("resumed") for row in read_log(log)].count("step-0000000003") == 1


@pytest.mark.parametrize("line", [b"{oh", b"\xff", b"[1]", b"[" * 100_000, b""])
def test_a_damaged_log_is_refused_by_its_line(tmp_path: Path, line: bytes) -> None:
    log = tmp_path / LOG
    log.write_bytes(json.dumps({"step": 1}).encode() + b"\n" + line + b"\n")
    message = r"log\.jsonl:2 is not a JSON object"
    with pytest.raises(InputError, match=message), logged(tmp_path, tensorboard=False):
        pass
    assert log.exists()
