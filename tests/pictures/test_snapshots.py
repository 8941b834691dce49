"""Snapshots of whole screens at 80 and 120 columns, without colour.

After a change on purpose, write them anew and read the difference:
``PYTHONPATH=tests python tests/pictures/test_snapshots.py``.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from helpers.command import regard
from helpers.sine_models import TEXT, gpt2, t5, tokenizer, translator
from regard import explain, look
from regard.interpret.comparison import compare
from regard.models.model import Model

FOLDER = Path(__file__).parent / "snapshots"
WIDTHS = (80, 120)
LONG = " ".join([TEXT, "and the dog ran in the big house"] * 20)


def looked(
    model: Callable[[], Model] = gpt2,
    text: str = TEXT,
    *,
    without_first: bool = False,
    **options: object,
) -> Callable[[int], str]:
    """The screen of ``look(model(), text, ...)``."""

    def screen(width: int) -> str:
        record = look(model(), text, tokenizer=tokenizer(), **options)  # type: ignore[arg-type]
        picture = record.picture(without_first=True) if without_first else record.picture()
        return picture.text(width=width, color="none")

    return screen


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


LENGTH_512 = partial(gpt2, 512)
TARGET = "the dog was cold"
SCREENS: dict[str, Callable[[int], str]] = {
    "look-overview": looked(LENGTH_512),
    "look-overview-of-both-halves": looked(t5, target=TARGET),
    "look-head": looked(LENGTH_512, layer=1, head=2),
    "look-head-without-first": looked(layer=1, head=2, without_first=True),
    "look-head-long": looked(LENGTH_512, LONG, layer=1, head=2),
    "look-word": looked(LENGTH_512, layer=1, head=2, word="mat"),
    "look-alignment": looked(translator, target=TARGET, alignment=True),
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
