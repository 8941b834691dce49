"""The default model of each task, and how to open the model of a task."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch

from regard.checkpoints import cards
from regard.errors import UnknownModelError
from regard.models.bundle import Bundle, Name, Precision, open_bundle

_SQUAD = "google-bert/bert-large-uncased-whole-word-masking-finetuned-squad"


class _Default(NamedTuple):
    """A default model, and what to suggest if it is not shipped."""

    task: str
    example: str  # a model of the Hugging Face hub
    recipe: str  # a recipe that trains a model for the task


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
    """Open a model for a task. If a default model is not shipped, the error suggests another."""
    default = _DEFAULTS.get(str(name))
    if default is not None and name not in cards.names() and not Path(name).is_dir():
        raise UnknownModelError(
            f"No {default.task} model is shipped with this build of regard. Name one, such as "
            f"--model {default.example} of the Hugging Face hub (in Python, "
            f'model="{default.example}"), or train one with recipes/{default.recipe}.'
        )
    return open_bundle(name, task, device, precision)
