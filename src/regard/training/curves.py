"""Plot the log of a training run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from regard.pictures.charts import Line, draw
from regard.training.folder import read_log


def plot(log: Path) -> str:
    """Plot the loss, scores, learning rate and gradient norm of a run over its steps, as SVG.

    If a step was repeated after an interruption, its latest values are used.
    """
    return draw(f"Training: {log.parent.name}", panels(read_log(log)))


def panels(rows: Iterable[Mapping[str, Any]]) -> dict[str, dict[str, Line]]:
    """The lines of each panel, as values by step."""
    lines: dict[str, dict[str, Line]] = {"loss": {"training": {}, "held out": {}}}

    def note(panel: str, line: str, step: int, value: float | None) -> None:
        if value is not None and math.isfinite(value):
            lines.setdefault(panel, {}).setdefault(line, {})[step] = value

    for row in rows:
        for name, value in row.get("scores", {}).items():
            note(name, "held out", row["step"], value)
        if "gradient" in row:
            note("loss", "training", row["step"], row["loss"])
            note("learning rate", "", row["step"], row["rate"])
            note("norm of the gradient", "", row["step"], row["gradient"])
    kept = {name: {line: xy for line, xy in some.items() if xy} for name, some in lines.items()}
    last = ("learning rate", "norm of the gradient")
    order = [*(name for name in kept if name not in last), *last]
    return {name: kept[name] for name in order if kept.get(name)}
