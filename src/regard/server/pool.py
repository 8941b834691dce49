"""The models of a server: installed models, cached models, and those named at its start."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from regard.checkpoints import cards, hub
from regard.errors import UnknownModelError
from regard.interpret.subjects.library import LibraryModel, open_model
from regard.models import catalog
from regard.models.bundle import Bundle
from regard.models.catalog import Known

# The requests that a model can answer, by its task. Every model also answers look and explain.
_REQUESTS = {
    "translation": ("translate",),
    "summarization": ("summarize",),
    "text to text": ("translate", "summarize"),
    "question answering": ("answer",),
    "language modelling": ("complete",),
}


class Models:
    """The models that requests may name. No other name is looked up or downloaded."""

    def __init__(self, given: Sequence[str] = (), device: str = "cpu") -> None:
        self.device = device
        self._given: dict[str, Known] = {}
        for name in given:
            open_model(name, device)
            if name not in (model.name for model in catalog.known()):
                self._given[name] = catalog.at(hub.find(name), name)

    def all(self) -> list[Known]:
        return [*self._given.values(), *catalog.known()]

    def name(self, name: str) -> str:
        """Return the name if the server has the model, else raise UnknownModelError."""
        if name in self._given or name in cards.names():
            return name  # no need to read the Hugging Face cache
        names = [model.name for model in self.all()]
        if name in names:
            return name
        near = get_close_matches(name, names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownModelError(
            f"This server has no model {name[:80]!r}.{hint} It has {', '.join(names)}; start it "
            "with regard serve --model to add one."
        )

    def loaded(self, name: str) -> Bundle | LibraryModel:
        """The model of this name, with its tokenizer, from the cache that the tasks use."""
        return open_model(self.name(name), self.device)

    def to_dict(self) -> dict[str, Any]:
        """Each model with its task, requests, size and licence."""
        return {"models": [_described(model) for model in self.all()]}


def _described(model: Known) -> dict[str, Any]:
    fields = asdict(model)
    del fields["folder"]  # a path of this machine, which clients need not see
    languages = cards.card(model.name).languages if model.origin == "shipped" else ""
    return {
        **fields,
        "languages": [name.strip() for name in languages.split(",") if name.strip()],
        "can": [*_REQUESTS.get(model.task, ()), "look", "explain"],
    }
