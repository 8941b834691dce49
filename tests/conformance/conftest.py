"""Suites and definitions of other libraries as tests of ours, with a table of counts at the end."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

COLUMNS = {
    "passed": ("passed",),
    "different": ("failed", "error"),
    "not expressible": ("skipped",),
}


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    counts = {
        column: Counter(
            Path(report.location[0]).stem.removeprefix("test_")
            for outcome in outcomes
            for report in terminalreporter.getreports(outcome)
        )
        for column, outcomes in COLUMNS.items()
    }
    terminalreporter.section("conformance")
    terminalreporter.line(f"{'':20}" + "".join(f"{column:>17}" for column in COLUMNS))
    for source in sorted(set().union(*counts.values())):
        numbers = "".join(f"{counts[column][source]:17}" for column in COLUMNS)
        terminalreporter.line(f"{source:20}{numbers}")
