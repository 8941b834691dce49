"""What all measurements of a run share: what to see of each layer, and how results accumulate."""

from __future__ import annotations

from typing import Any, Protocol

from regard.interpret.runs import Chunk
from regard.mechanism.seeing import See, Seen
from regard.models.model import AttentionLayer
from regard.pictures.figures import Picture


class Look(Protocol):
    """The result of ``look``: a picture and plain data."""

    def picture(self, *, without_first: bool = False) -> Picture:
        """A picture; ``without_first`` leaves out the first token, where there is such a column."""

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, ready for JSON."""


class Measurement(Protocol):
    """One kind of look, taken while the model runs over the text chunk by chunk."""

    def see(self, layer: AttentionLayer, chunk: Chunk) -> See | None:
        """What to see of a layer in a chunk; None to skip it."""

    def add(self, layer: AttentionLayer, chunk: Chunk, seen: Seen) -> None:
        """Add what was seen of a layer in a chunk."""

    def result(self) -> Look:
        """The result of all chunks."""
