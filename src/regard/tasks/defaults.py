"""The default model of each task, and how to open the model of a task."""

from __future__ import annotations

from pathlib import Path

import torch

from regard.checkpoints import cards
from regard.errors import UnknownModelError
from regard.models.bundle import Bundle, Name, Precision, open_bundle

# The task of each default model, a recommended model instead, and its recipe.
_DEFAULTS = {
    "translate": ("translation", "opus-mt-en-fr", "translate-student"),
    "summarize": ("summarization", "t5-small", "summarize"),
    "answer": ("question answering", "bert-base-cased-squad2", "answer"),
    "books-gpt2": ("completion", "gpt2", "books-gpt2"),
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
        purpose, example, recipe = default
        raise UnknownModelError(
            f"No {purpose} model is shipped with this build of regard. Download one, such as "
            f"regard get {example}, and pass --model {example} (in Python, "
            f'model="{example}"), or train one with recipes/{recipe}.toml.'
        )
    return open_bundle(name, task, device, precision)
