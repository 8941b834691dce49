"""The interfaces of measurements and of their results."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Protocol

from torch import Tensor

from regard.interpret.runs import TextRun
from regard.interpret.subjects.subject import Chunk, Layer
from regard.mechanism.labelled import Convertible
from regard.mechanism.seeing import See, Seen
from regard.pictures.figures import Picture


@dataclass(frozen=True, eq=False, repr=False)
class Look(Convertible):
    """The base of every result of ``look``: a picture, plain data, and arrays with labels."""

    kind: ClassVar[str]

    def picture(self, *, without_first: bool = False) -> Picture:
        """A picture; ``without_first`` leaves out the column of the first token."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and strings, ready for JSON; NaN becomes None."""
        values = {field.name: _plain(getattr(self, field.name)) for field in fields(self)}
        return {"kind": self.kind, **values}

    def __repr__(self) -> str:
        return f"{type(self).__name__}: {self._labelled().summary()}"

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()


def _plain(value: Any) -> Any:
    match value:
        case Look():
            return value.to_dict()
        case Tensor():
            return _plain(value.tolist())
        case range():
            return [value.start, value.stop]
        case list() | tuple():
            return [_plain(item) for item in value]
        case dict():
            return {name: _plain(item) for name, item in value.items()}
        case float() if math.isnan(value):
            return None
    return value


class Measurement(Protocol):
    """Computes one kind of result of ``look`` while the model runs over the chunks of a text."""

    run: TextRun  # perhaps with other chunks than the run that it was made for

    def see(self, layer: Layer, chunk: Chunk) -> See | None:
        """The fields to record of a layer in a chunk; None to skip it."""

    def add(self, layer: Layer, chunk: Chunk, seen: Seen) -> None:
        """Add the fields recorded of a layer in a chunk."""

    def result(self) -> Look:
        """The result over all chunks."""
