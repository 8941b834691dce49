"""The default model of each task, and opening a task's model."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from regard.checkpoints import cards
from regard.errors import UnknownModelError
from regard.models.bundle import Bundle, Name, Precision, open_bundle

_SQUAD = "google-bert/bert-large-uncased-whole-word-masking-finetuned-squad"


class _Default(NamedTuple):
    """A default model, and what to use where it is not shipped."""

    task: str
    example: str  # on the hub
    recipe: str


_DEFAULTS = {
    "translate": _Default("translation", "Helsinki-NLP/opus-mt-en-fr", "translate.toml"),
    "summarize": _Default("summarization", "google-t5/t5-small", "summarize.toml"),
    "answer": _Default("question answering", _SQUAD, "answer.toml"),
    "books-gpt2": _Default("completion", "openai-community/gpt2", "books-gpt2.toml"),
}


def open_model(
    name: Name,
    task: str,
    device: torch.device | str | None,
    precision: Precision,
) -> Bundle:
    """A model that serves a task. If a default is missing, the error says what to do."""
    default = _DEFAULTS.get(str(name))
    if default is not None and name not in cards.names() and not Path(name).is_dir():
        raise UnknownModelError(
            f"No {default.task} model is shipped with this build of regard. Name one, such as "
            f"--model {default.example} of the Hugging Face hub (in Python, "
            f'model="{default.example}"), or train one with recipes/{default.recipe}.'
        )
    return open_bundle(name, task, device, precision)
