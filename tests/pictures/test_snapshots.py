"""Whole screens as last reviewed: 80 columns wide, some also 120, without colour.

After a change on purpose, write them again, and review the difference:
``PYTHONPATH=tests python tests/pictures/test_snapshots.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from helpers.command import regard
from helpers.sine_models import TEXT, gpt2, t5, tokenizer, translator
from regard import explain_model, look
from regard.interpret.comparison import compare

FOLDER = Path(__file__).parent / "snapshots"
LONG = " ".join([TEXT, "and the dog ran in the big house"] * 20)


def drawn(**asked: object) -> Callable[[int], str]:
    def screen(width: int) -> str:
        found = look(gpt2(512), TEXT, tokenizer=tokenizer(), **asked)  # type: ignore[arg-type]
        return found.picture().text(width=width, color="none")

    return screen


def without_first(width: int) -> str:
    found = look(gpt2(), TEXT, tokenizer=tokenizer(), layer=1, head=2)
    return found.picture(without_first=True).text(width=width, color="none")


def long_map(width: int) -> str:
    found = look(gpt2(512), LONG, tokenizer=tokenizer(), layer=1, head=2)
    return found.picture().text(width=width, color="none")


def overview_of_both_halves(width: int) -> str:
    found = look(t5(), TEXT, tokenizer=tokenizer(), target="the dog was cold")
    return found.picture().text(width=width, color="none")


def alignment(width: int) -> str:
    found = look(
        translator(), TEXT, tokenizer=tokenizer(), target="the dog was cold", alignment=True
    )
    return found.picture().text(width=width, color="none")


def two_heads(width: int) -> str:
    one, other = (look(gpt2(), TEXT, tokenizer=tokenizer(), layer=1, head=h) for h in (1, 2))
    both = compare(one, other, names=("1.1", "1.2"))
    return both.picture().text(width=width, color="none")


def explained(width: int) -> str:
    trace = explain_model(gpt2(), TEXT, tokenizer=tokenizer(), layer=1, head=2, word="mat")
    os.environ["COLUMNS"] = str(width)
    return f"{trace}\n"


def piped(*words: str) -> Callable[[int], str]:
    """What a command writes into a pipe."""

    def screen(width: int) -> str:
        shown = regard(*words, COLUMNS=str(width))
        assert shown.returncode == 0, shown.stderr
        return shown.stdout

    return screen


SCREENS: dict[str, Callable[[int], str]] = {
    "look-overview": drawn(),
    "look-overview-of-both-halves": overview_of_both_halves,
    "look-head": drawn(layer=1, head=2),
    "look-head-without-first": without_first,
    "look-head-long": long_map,
    "look-word": drawn(layer=1, head=2, word="mat"),
    "look-alignment": alignment,
    "look-compare": two_heads,
    "explain-model": explained,
    "explain-piped": piped("explain"),
    "explain-sentence-piped": piped("explain", "The cat sat on the mat.", "--heads", "2"),
}


FILES = [
    (name, width)
    for name in SCREENS
    for width in (80, 120)
    if width == 80 or name in ("look-overview", "look-head-long")
]


def unrounded(shown: str) -> str:
    """Without a difference due to rounding, which depends on the processor."""
    return re.sub(r"difference: \d\.\de-1\d", "difference: tiny", shown)


def of(name: str, width: int) -> Path:
    return FOLDER / f"{name}.{width}.txt"


@pytest.mark.parametrize(("name", "width"), FILES)
def test_the_screen_is_unchanged(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = SCREENS[name](width)
    assert max(map(len, shown.splitlines())) <= width
    assert "\x1b" not in shown
    kept = of(name, width).read_text(encoding="utf-8")
    assert unrounded(shown) == unrounded(kept), (
        f"{of(name, width).name} has changed. If that is on purpose, write all of them again with "
        "'PYTHONPATH=tests python tests/pictures/test_snapshots.py', and review the difference."
    )


def test_every_file_is_compared() -> None:
    assert set(FOLDER.iterdir()) == {of(*file) for file in FILES}


if __name__ == "__main__":
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for screen, columns in FILES:
        of(screen, columns).write_text(SCREENS[screen](columns), encoding="utf-8")
