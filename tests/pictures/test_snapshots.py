"""Whole screens, as they were when somebody last read them: 80 and 120 columns, without colour.

Where one changes on purpose, write them anew, read the difference, and keep it:
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
from regard import explain, look
from regard.interpret.comparison import compare

FOLDER = Path(__file__).parent / "snapshots"
WIDTHS = (80, 120)
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
    trace = explain(TEXT, model=gpt2(), tokenizer=tokenizer(), layer=1, head=2, word="mat")
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


def unrounded(shown: str) -> str:
    """Without how far two ways to compute the same differ: that is the processor's."""
    return re.sub(r"difference: \d\.\de-1\d", "difference: tiny", shown)


def of(name: str, width: int) -> Path:
    return FOLDER / f"{name}.{width}.txt"


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", SCREENS)
def test_the_screen_is_as_it_was(name: str, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    shown = SCREENS[name](width)
    assert max(map(len, shown.splitlines())) <= width
    assert "\x1b" not in shown
    kept = of(name, width).read_text(encoding="utf-8")
    assert unrounded(shown) == unrounded(kept), (
        f"{of(name, width).name} has changed. If that is meant, write all of them anew with "
        "'PYTHONPATH=tests python tests/pictures/test_snapshots.py', and read the difference."
    )


def test_no_screen_is_kept_that_is_not_compared() -> None:
    assert {path.name for path in FOLDER.iterdir()} == {
        of(name, width).name for name in SCREENS for width in WIDTHS
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for old in FOLDER.iterdir():
        old.unlink()
    for screen_name, make in SCREENS.items():
        for columns in WIDTHS:
            of(screen_name, columns).write_text(make(columns), encoding="utf-8")
