"""The models that a server lends: those at hand, and those it was given when it was started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from typing import Any

from regard.checkpoints import cards, hub
from regard.errors import UnknownModelError
from regard.models import catalog
from regard.models.bundle import Bundle, open_bundle
from regard.models.catalog import Known

# What a model can be asked for, by the task that it is for; each can be looked at and explained.
_CAN = {
    "translation": ("translate",),
    "summarization": ("summarize",),
    "text to text": ("translate", "summarize"),
    "question answering": ("answer",),
    "language modelling": ("complete",),
}


class Models:
    """Names of models, no others of which are looked up: a request cannot have one downloaded."""

    def __init__(self, given: Sequence[str] = (), device: str = "cpu") -> None:
        self.device = device
        self._given: dict[str, Known] = {}
        for name in given:
            open_bundle(name, device=device)
            if name not in (model.name for model in catalog.known()):
                self._given[name] = catalog.at(hub.find(name), name)

    def all(self) -> list[Known]:
        return [*self._given.values(), *catalog.known()]

    def name(self, asked: str) -> str:
        """The name itself, where there is such a model."""
        if asked in self._given or asked in cards.names():
            return asked  # without a look at all that is cached
        names = [model.name for model in self.all()]
        if asked in names:
            return asked
        near = get_close_matches(asked, names, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise UnknownModelError(
            f"This server has no model {asked[:80]!r}.{hint} It has {', '.join(names)}; regard "
            "serve --model gives it others."
        )

    def loaded(self, asked: str) -> Bundle:
        """A model with its tokenizer; it is the same one that the tasks use."""
        return open_bundle(self.name(asked), device=self.device)

    def to_dict(self) -> dict[str, Any]:
        """What each is, what it can do, how large it is, and its licence."""
        return {"models": [_described(model) for model in self.all()]}


def _described(model: Known) -> dict[str, Any]:
    found = asdict(model)
    del found["folder"]  # where things lie is nobody's business
    languages = cards.card(model.name).languages if model.origin == "shipped" else ""
    return {
        **found,
        "languages": [one.strip() for one in languages.split(",") if one.strip()],
        "can": [*_CAN.get(model.task, ()), "look", "explain"],
    }
