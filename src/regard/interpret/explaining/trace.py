"""A Trace: what was followed, together with its look."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from regard.interpret.explaining.record import Followed

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderableType


class Trace(Followed):
    """Every step of one attention, in order. Print it to read it.

    ``trace["A"]`` is a matrix by its symbol and ``trace.output`` the result, [queries, dim].

    >>> from regard import explain
    >>> trace = explain()  # the worked example
    >>> trace.word, list(trace["A"].shape), list(trace.output.shape)
    ('cat', [1, 6, 6], [6, 3])
    """

    __slots__ = ()

    def __rich_console__(
        self, console: Console, options: ConsoleOptions
    ) -> Iterator[RenderableType]:
        from regard.interpret.explaining import rendering

        yield from rendering.terminal(self, options.max_width)

    def __str__(self) -> str:
        from regard.interpret.explaining import rendering

        return rendering.text(self)

    def _repr_html_(self) -> str:
        from regard.interpret.explaining import rendering

        return rendering.html(self)

    def __repr__(self) -> str:
        sentence = " ".join(self.tokens)
        shown = sentence if len(sentence) <= 40 else sentence[:39] + "…"
        return f"<Trace of {shown!r}: {self.title}, {len(self.steps)} steps; print it to read it>"
