"""Snapshots of whole screens, 80 columns wide, some also 120, without colour.

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

from helpers.command import printed
from helpers.sine_models import TEXT, gpt2, t5, tokenizer, translator
from regard import explain_model, look
from regard.interpret.comparison import compare
from regard.models.model import Model

FOLDER = Path(__file__).parent / "snapshots"
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
    trace = explain_model(gpt2(), TEXT, tokenizer=tokenizer(), layer=1, head=2, word="mat")
    os.environ["COLUMNS"] = str(width)
    return f"{trace}\n"


def piped(*words: str) -> Callable[[int], str]:
    """What a command writes into a pipe."""
    return lambda width: printed(*words, COLUMNS=str(width))


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
