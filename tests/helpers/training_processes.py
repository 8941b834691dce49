"""Start, wait for, stop and kill training processes."""

from __future__ import annotations

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from helpers.training_data import bytes_of, recipe_of, toml, write_data


class TrainingProcesses:
    """Runs training in one process, or in several processes as torchrun starts them."""

    def __init__(self, errors: IO[bytes]) -> None:
        self.errors = errors
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "training_process.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            bufsize=0,  # read nothing ahead: ended() tests whether the exit statuses can be read
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )

    def start(self, do: str, world: int, **more: Any) -> list[int]:
        """Start ``world`` processes, or one without torchrun's variables if 0; return their ids."""
        self.process.stdin.write(json.dumps({"do": do, "world": world, **more}).encode() + b"\n")
        ids: list[int] = json.loads(self._line())
        return ids

    def wait(self) -> list[int]:
        """Wait, and return the statuses: 0 finished, 3 interrupted, 2 refused, negative killed."""
        statuses: list[int] = json.loads(self._line())
        return statuses

    def ended(self) -> bool:
        """Whether all processes have ended, so that ``wait`` returns immediately."""
        return bool(select.select([self.process.stdout], [], [], 0)[0])

    def _line(self) -> bytes:
        return self.process.stdout.readline()

    def stderr(self) -> str:
        """The last 3,000 characters that the processes have written to standard error."""
        self.errors.seek(0)
        return self.errors.read().decode()[-3000:]

    def train(self, raw: dict[str, Any], world: int = 0, resume: bool = False) -> Path:
        self.start("train", world, recipe=raw, resume=resume)
        assert self.wait() == [0] * max(world, 1), self.stderr()
        return Path(raw["output"])


def wait_for_a_step(log: Path, ended: Callable[[], bool], mark: bytes = b'"loss"') -> None:
    """Wait until the log has a new line with ``mark``, or training has ended."""
    before = log.stat().st_size if log.exists() else 0
    while not (log.exists() and mark in log.read_bytes()[before:]) and not ended():
        time.sleep(0.001)


def wait_for_changes(run: Path, changes: int, ended: Callable[[], bool]) -> None:
    """Wait until ``changes`` changes of the run's files were seen, or training has ended."""
    last: set[str] = set()
    while changes and not ended():
        names = {str(Path(place) / name) for place, *_, files in os.walk(run) for name in files}
        log = run / "log.jsonl"
        names.add(str(log.stat().st_size if log.exists() else 0))
        changes -= names != last
        last = names
        time.sleep(0.001)


def recipe_to_kill(folder: Path, steps: int) -> dict[str, Any]:
    """A recipe with dropout, so that a resumed run must have the same random numbers."""
    write_data(folder)
    raw = recipe_of(folder)
    raw["model"]["config"]["dropout"] = 0.1
    raw["schedule"]["steps"] = steps
    raw["evaluation"] = {"every": 10}
    return raw


def killed_and_restarted(
    raw: dict[str, Any], undisturbed: Path, kills: int, seed: int
) -> dict[str, Any]:
    """Train in two processes, kill one of them ``kills`` times, and return what happened.

    ``undisturbed`` is the folder of a run of the same recipe in two processes.
    """
    choose = random.Random(seed)
    killed = undisturbed.with_name("killed")
    with launched(raw, killed, restarts=kills) as launcher:

        def ended() -> bool:
            return launcher.poll() is not None

        for _ in range(kills):
            wait_for_a_step(killed / "log.jsonl", ended, b'"gradient"')
            wait_for_changes(killed, choose.randrange(6), ended)
            assert not ended(), _output(killed)
            os.kill(choose.choice(_children(launcher.pid)), signal.SIGKILL)
        assert launcher.wait() == 0, _output(killed)
    expected, found = bytes_of(undisturbed), bytes_of(killed)
    rows = [json.loads(line) for line in (killed / "log.jsonl").read_text().splitlines()]
    return {
        "kills": kills,
        "restarts": sum("processes" in row for row in rows) - 1,
        "resumed": sum("resumed" in row for row in rows),
        "steps": rows[-1]["step"],
        "different": [n for n in expected | found if expected.get(n) != found.get(n)],
    }


def launched(raw: dict[str, Any], output: Path, restarts: int) -> subprocess.Popen[bytes]:
    """Start ``regard train`` under torchrun, like a user."""
    recipe = output.with_suffix(".toml")
    whole = raw | {"output": str(output)}
    recipe.write_text("\n".join(f"{key} = {toml(value)}" for key, value in whole.items()))
    with output.with_suffix(".txt").open("wb") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
             "--max-restarts", str(restarts), "--monitor-interval", "0.1",
             "-m", "regard", "train", str(recipe)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"},
            stdout=said,
            stderr=said,
        )  # fmt: skip


def _output(output: Path) -> str:
    return output.with_suffix(".txt").read_text(errors="replace")[-4000:]


def _children(parent: int) -> list[int]:
    """The ids of a process's children; the children of torchrun are the training processes."""
    tasks = Path(f"/proc/{parent}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]
