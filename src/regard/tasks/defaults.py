"""The default model of each task."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from regard.checkpoints import cards
from regard.errors import UnknownModelError
from regard.models.bundle import Name

_SQUAD = "google-bert/bert-large-uncased-whole-word-masking-finetuned-squad"


class _Default(NamedTuple):
    """A model that is used where none is named, and what can be where it is not shipped."""

    task: str
    example: str  # on the hub
    recipe: str


_DEFAULTS = {
    "translate": _Default("translation", "Helsinki-NLP/opus-mt-en-fr", "translate.toml"),
    "summarize": _Default("summarization", "google-t5/t5-small", "summarize.toml"),
    "answer": _Default("question answering", _SQUAD, "answer.toml"),
    "books-gpt2": _Default("completion", "openai-community/gpt2", "books-gpt2.toml"),
}


def check_default(name: Name) -> None:
    """Say what to do where the default of a task is not there: nobody asked for it by its name."""
    usual = _DEFAULTS.get(str(name))
    if usual is None or name in cards.names() or Path(name).is_dir():
        return
    raise UnknownModelError(
        f"No {usual.task} model comes with regard yet. Name one, such as --model {usual.example} "
        f'of the Hugging Face hub (in Python, model="{usual.example}"), or train one by '
        f"recipes/{usual.recipe}."
    )
