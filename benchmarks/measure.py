"""What the benchmarks share: fair ratios, and results that say where they come from."""

from __future__ import annotations

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

import regard

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, Any]:
    """The commit, the machine and the versions a result belongs to."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    done = subprocess.run(git, capture_output=True, text=True, check=False)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return {
        "commit": done.stdout.strip() or "unknown",
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
    """Add the rows of one run to a results file, each with its environment."""
    path = RESULTS / f"{name}.jsonl"
    path.parent.mkdir(exist_ok=True)
    where = environment()
    with path.open("a") as file:
        for row in rows:
            file.write(json.dumps({**row, **where}) + "\n")
    return path


def seconds(ours: Callable[[], object], peer: Callable[[], object], budget: float = 1.0) -> Pair:
    """Time two functions in turns, so that what disturbs one disturbs the other."""
    for function in (ours, peer):
        function()
        function()
    times: tuple[list[float], list[float]] = ([], [])
    started = time.perf_counter()
    while time.perf_counter() - started < budget or len(times[0]) < 5:
        for function, taken in zip((ours, peer), times, strict=True):
            before = time.perf_counter()
            function()
            taken.append(time.perf_counter() - before)
    return Pair(statistics.median(times[0]), statistics.median(times[1]))


class Pair:
    """Median seconds of ours and of the peer."""

    def __init__(self, ours: float, peer: float) -> None:
        self.ours, self.peer = ours, peer

    @property
    def speed(self) -> float:
        """How many times as fast as the peer: above 1 is a win."""
        return self.peer / self.ours

    @property
    def cost(self) -> float:
        """How many times the peer's time."""
        return self.ours / self.peer
