"""Write what the program itself can say: command line, recipes, pictures. Run by `make docs`."""

from __future__ import annotations

import io
import os
import re
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import TerminalTheme

import regard
from regard.training import describe

DOCS = Path(__file__).parent
COMMANDS = ([], ["explain"], ["train"], ["doctor"])
PLAIN = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
INK, GREY, BLUE = (40, 44, 52), (110, 115, 125), (40, 90, 200)
RED, GREEN, YELLOW, PURPLE, CYAN = (
    (190, 50, 50), (30, 130, 76), (150, 110, 20), (140, 60, 160), (0, 110, 130),
)  # fmt: skip
PAPER = TerminalTheme((255, 255, 255), INK, [INK, RED, GREEN, YELLOW, BLUE, PURPLE, CYAN, GREY])


def help_page() -> str:
    """Every command's --help, as Markdown."""
    parts = ["# The command line\n\nWritten by `make docs`; a test fails when it drifts.\n"]
    for command in COMMANDS:
        shown = subprocess.run(
            [sys.executable, "-c", "from regard.cli import main; main()", *command, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | PLAIN,
        ).stdout
        text = "\n".join(line.rstrip() for line in shown.splitlines()).strip("\n")
        parts.append(f"\n## regard {' '.join(command)}".rstrip() + f"\n\n```text\n{text}\n```\n")
    return "".join(parts)


def recipe_page() -> str:
    """Every key of a recipe, as Markdown."""
    lines = [
        "# Recipes",
        "",
        "What `regard train` reads: a TOML file. `--set key=value` sets any of these keys, and an",
        "unknown one is refused with the nearest name. Written by `make docs`; a test fails when",
        "it drifts.",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    for name, default, meaning in describe():
        lines.append(f"| `{name}` | {default} | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def picture() -> str:
    """The worked example as an SVG without any outside asset."""
    console = Console(
        record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(regard.explain(), highlight=False)
    svg = console.export_svg(title="regard explain", theme=PAPER, unique_id="regard")
    svg = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code", "ui-monospace, Menlo, Consolas")


if __name__ == "__main__":
    (DOCS / "images").mkdir(exist_ok=True)
    (DOCS / "help.md").write_text(help_page(), encoding="utf-8")
    (DOCS / "recipes.md").write_text(recipe_page(), encoding="utf-8")
    (DOCS / "images" / "explain.svg").write_text(picture(), encoding="utf-8")
