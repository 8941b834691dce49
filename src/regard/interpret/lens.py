"""What the ways of looking share: questions to each layer, and what becomes of the answers."""

from __future__ import annotations

from typing import Any, Protocol

from regard.interpret.runs import Chunk
from regard.mechanism.seeing import See, Seen
from regard.models.model import AttentionLayer
from regard.pictures.figures import Picture


class Look(Protocol):
    """What was seen, ready to be drawn or written down."""

    def picture(self, *, without_first: bool = False) -> Picture:
        """It as a picture; ``without_first`` leaves out the first token, where that can be done."""

    def to_dict(self) -> dict[str, Any]:
        """It as plain lists, numbers and words, ready for JSON."""


class Sight(Protocol):
    """One way of looking, while the model runs over the text chunk by chunk."""

    def ask(self, layer: AttentionLayer, chunk: Chunk) -> See | None:
        """What to see of a layer in a chunk, if anything."""

    def take(self, layer: AttentionLayer, chunk: Chunk, seen: Seen) -> None:
        """What was seen of it."""

    def result(self) -> Look:
        """All of it together."""
