"""Two processes under torchrun, one of which is killed again and again while they train."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from training_data import recipe_of, toml, write_data


def recipe_to_kill(folder: Path, steps: int) -> dict[str, Any]:
    """With dropout, so that random numbers must be the same again too."""
    write_data(folder)
    raw = recipe_of(folder)
    raw["model"]["config"]["dropout"] = 0.1
    raw["schedule"]["steps"] = steps
    raw["evaluation"] = {"every": 10}
    return raw


def killed_and_restarted(
    raw: dict[str, Any], undisturbed: Path, kills: int, seed: int
) -> dict[str, Any]:
    """Train in two processes with ``kill -9`` of one of them now and then; what came of it.

    ``undisturbed`` is the folder of a run of the same recipe in two processes.
    """
    choose = random.Random(seed)
    killed = undisturbed.with_name("killed")
    with launched(raw, killed, restarts=kills) as launcher:
        for _ in range(kills):
            _wait_for_a_step(killed / "log.jsonl", launcher)
            time.sleep(choose.uniform(0, 0.3))
            os.kill(choose.choice(_children(launcher.pid)), signal.SIGKILL)
        assert launcher.wait() == 0, _said(killed)
    expected, found = _bytes_of(undisturbed), _bytes_of(killed)
    rows = [json.loads(line) for line in (killed / "log.jsonl").read_text().splitlines()]
    return {
        "kills": kills,
        "restarts": sum("processes" in row for row in rows) - 1,
        "resumed": sum("resumed" in row for row in rows),
        "steps": rows[-1]["step"],
        "different": [n for n in expected | found if expected.get(n) != found.get(n)],
    }


def launched(raw: dict[str, Any], output: Path, restarts: int) -> subprocess.Popen[bytes]:
    """``regard train`` under torchrun, as a user types it."""
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


def _said(output: Path) -> str:
    return output.with_suffix(".txt").read_text(errors="replace")[-4000:]


def _wait_for_a_step(log: Path, launcher: subprocess.Popen[bytes]) -> None:
    """Until the log tells of a step that was taken after this was called."""
    before = log.stat().st_size if log.exists() else 0
    while not (log.exists() and b'"gradient"' in log.read_bytes()[before:]):
        assert launcher.poll() is None, _said(log.parent)
        time.sleep(0.01)


def _children(parent: int) -> list[int]:
    """The processes that a process has started: of torchrun, those that train."""
    tasks = Path(f"/proc/{parent}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _bytes_of(run: Path) -> dict[str, bytes]:
    """Everything a finished run leaves, but for its log and the picture of it."""
    return {
        str(file.relative_to(run)): file.read_bytes()
        for file in sorted(run.rglob("*"))
        if file.is_file() and file.name not in ("log.jsonl", "run.svg")
    }
