"""Shared by the benchmarks: the command line, the environment of a run, and files of results."""

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

RESULTS = Path(__file__).parent / "results"


def argument_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose description is the first line of a benchmark's docstring."""
    return argparse.ArgumentParser(description=(doc or "").split("\n", maxsplit=1)[0])


def environment() -> dict[str, Any]:
    """The commit, the date, the machine and the versions that produce a result."""
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


def append(name: str, rows: list[dict[str, Any]]) -> Path:
    """Append rows to results/NAME.jsonl, each with the environment, and return the file's path."""
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    suffix = environment()
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **suffix}) + "\n")
    return path
