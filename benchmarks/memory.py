"""The memory of a process as Linux counts it, in MiB. Imports neither PyTorch nor regard."""

from __future__ import annotations

from pathlib import Path


def resident() -> float:
    """The memory of the process now."""
    return _status("VmRSS")


def peak(process: int | str = "self") -> float:
    """The most memory since the start of the process, or since ``reset_peak``; 0 if it ended."""
    return _status("VmHWM", process)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _status(field: str, process: int | str = "self") -> float:
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    line = next((line for line in lines if line.startswith(field)), f"{field}: 0 kB")
    return int(line.split()[1]) / 1024
