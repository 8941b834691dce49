"""What the benchmarks share: fair ratios, and results that say where they come from."""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import regard
from regard.evaluation.speed import Pair, seconds

__all__ = ["Pair", "append", "described", "environment", "forget_peak", "held", "seconds"]

RESULTS = Path(__file__).parent / "results"


def described(doc: str | None) -> argparse.ArgumentParser:
    """A parser of arguments that says of a benchmark what its first line says."""
    return argparse.ArgumentParser(description=(doc or "").split("\n", maxsplit=1)[0])


def environment() -> dict[str, Any]:
    """The commit, the machine and the versions a result belongs to."""
    commit = "unknown"
    if shutil.which("git") is not None:
        git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
        done = subprocess.run(git, capture_output=True, text=True, check=False)
        commit = done.stdout.strip() or commit
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {
        "commit": commit,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
        "device": device,
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "regard": regard.__version__,
    }


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def held(what: str) -> float:
    """What Linux says of this process (VmRSS, or VmHWM for the most so far), in megabytes."""
    line = next(s for s in Path("/proc/self/status").read_text().splitlines() if what in s)
    return int(line.split()[1]) / 1024


def forget_peak() -> None:
    """From here on the most memory held is what is held now."""
    Path("/proc/self/clear_refs").write_text("5")


def append(name: str, rows: list[dict[str, Any]]) -> Path:
    """Add the rows of one run to a results file, each with its environment."""
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    where = environment()
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **where}) + "\n")
    return path
