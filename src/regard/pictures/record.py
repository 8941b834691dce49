"""The content of a picture: cells or bars, their labels, their scale."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count

from regard.errors import InputError

MANY = 500  # the scale of a map with as many positive numbers may end below the largest


@dataclass(frozen=True)
class Axis:
    """One axis of a picture: its name, and a label per place or a range of positions."""

    name: str
    places: int
    labels: tuple[str, ...] = ()  # one per place; empty if each place is a range of positions
    start: int = 0  # the first position
    span: int = 0  # the number of positions if there are no labels

    def ticks(self, most: int) -> list[tuple[float, str]]:
        """At most ``most`` round positions as (place, text)."""
        steps = (digit * 10**zeros for zeros in count() for digit in (1, 2, 5))
        step = next(step for step in steps if self.span <= step * most)
        first = -(-self.start // step) * step
        scale = self.places / self.span
        end = self.start + self.span
        return [((p - self.start) * scale, f"{p:,}") for p in range(first, end, step)]


@dataclass(frozen=True)
class Cells:
    """A table of numbers that is drawn as shades. NaN is an empty cell."""

    title: str
    values: tuple[tuple[float, ...], ...]
    rows: Axis
    columns: Axis
    unit: str
    caption: str = ""
    marks: frozenset[tuple[int, int]] = frozenset()  # cells to emphasize
    limits: tuple[float, float] | None = None  # a scale shared with other cells
    around_zero: bool = False  # True for a difference: both signs have colours

    @cached_property
    def extremes(self) -> tuple[float, float]:
        """The smallest and the largest number."""
        finite = [value for row in self.values for value in row if math.isfinite(value)]
        return min(finite, default=0.0), max(finite, default=0.0)

    @property
    def signed(self) -> bool:
        return self.around_zero or self.extremes[0] < 0

    @cached_property
    def scale(self) -> tuple[float, float]:
        """The numbers at both ends of the colours; symmetric around 0 for signed numbers.

        In a large map a few cells may be far larger than all others: the first queries of a text
        have few keys. The scale then ends below these cells, and the legend says so.
        """
        if self.limits is not None:
            return self.limits
        low, high = self.extremes
        if self.signed:
            reach = max(-low, high) or 1.0
            return -reach, reach
        if low < high / 20:
            low = 0.0  # a scale from 0 is easier to read
        above = sorted(value for row in self.values for value in row if value > low)
        if len(above) >= MANY:
            usual = above[int(len(above) * 0.99)]
            return low, usual if usual - low < (high - low) / 2 else high
        return low, high

    def meaning(self, numbered: bool) -> str:
        """The text of the legend: the unit, and the largest number if it exceeds the scale."""
        high = self.extremes[1]
        parts = [f"or more, up to {number(high)}"] if self.scale[1] < high else []
        point = numbered and any(value == 0 for row in self.values for value in row)
        return " ".join([*parts, self.unit]) + (" (a point is 0)" if point else "")


@dataclass(frozen=True)
class Bars:
    """Numbers with labels that are drawn as bars from 0."""

    title: str
    labels: tuple[str, ...]
    values: tuple[float, ...]
    unit: str
    caption: str = ""


@dataclass(frozen=True)
class Panels:
    """Several tables of numbers in one picture, each with its own scale."""

    title: str
    parts: tuple[Cells, ...]
    caption: str = ""

    @property
    def axes(self) -> str:
        """The names of the axes if they are the same for all parts, else ""."""
        names = {(part.rows.name, part.columns.name) for part in self.parts}
        return "{} down, {} across".format(*names.pop()) if len(names) == 1 else ""


Drawing = Cells | Bars | Panels


def printable(text: str) -> str:
    """Escape control characters for terminals and XML."""
    return "".join(map(_printable, text))


def _printable(character: str) -> str:
    turning = "\u202a" <= character <= "\u202e" or "\u2066" <= character <= "\u2069"
    if turning or unicodedata.category(character) in ("Cc", "Cs", "Cn", "Zl", "Zp"):
        return character.encode("unicode_escape").decode()
    return character


def width_of(text: str) -> int:
    """The width of a text in terminal columns."""
    return sum(
        0 if unicodedata.category(c) in ("Mn", "Me", "Cf")
        else 2 if unicodedata.east_asian_width(c) in "WF"
        else 1
        for c in text
    )  # fmt: skip


def shorten(text: str, most: int, ellipsis: str = "…") -> str:
    """Cut a text to at most ``most`` columns with an ellipsis."""
    if width_of(text) <= most:
        return text
    kept, room = "", most - width_of(ellipsis)
    for character in text:
        room -= width_of(character)
        if room < 0:
            break
        kept += character
    return kept + ellipsis


def wrap(text: str, most: int) -> list[str]:
    """Break a text into lines of at most ``most`` columns, at spaces where possible."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        joined = f"{line} {word}" if line else word
        if width_of(joined) <= most:
            line = joined
            continue
        if line:
            lines.append(line)
        line = word
        while width_of(line) > most:
            part = shorten(line, most, "")
            lines.append(part)
            line = line[len(part) :]
    return [*lines, line] if line else lines


def number(value: float) -> str:
    """Format a number with three significant digits, or as a whole number from 1,000."""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e6 else f"{value + 0.0:.3g}"


def brief(values: Sequence[Sequence[float]]) -> list[list[str]]:
    """Format the numbers of cells with equal decimals; 0 becomes a point."""
    most = max((abs(v) for row in values for v in row if math.isfinite(v)), default=0.0)
    # A minus sign takes the space of one decimal.
    below = any(v < 0 for row in values for v in row)
    decimals = 2 if most < (1 if below else 2) else 1 if most < 100 else 0

    def write(value: float) -> str:
        if not math.isfinite(value):
            return ""
        if value == 0:
            return "."
        if most >= 10_000:
            return f"{value:.0e}".replace("e+0", "e")
        text = f"{value:.{decimals}f}"
        if not float(text):
            text = text.lstrip("-")
        return text.replace("0.", ".", 1) if most <= 1 and abs(value) < 1 else text

    return [[write(value) for value in row] for row in values]


def table_of(values: object, what: str) -> tuple[tuple[float, ...], ...]:
    """The rows of a tensor or of nested lists. Raise InputError if they are no table."""
    plain = values.tolist() if hasattr(values, "tolist") else values
    shape = f"of shape {list(values.shape)}" if hasattr(values, "shape") else ""
    if not isinstance(plain, list | tuple) or not plain:
        raise InputError(f"{what} needs rows of numbers, but got {shape or repr(values)}.")
    wrong = ""
    if not all(isinstance(row, list | tuple) and row for row in plain):
        wrong = f", but got {shape or 'rows that are not lists of numbers'}"
    elif len({len(row) for row in plain}) > 1 or any(isinstance(v, list) for v in plain[0]):
        lengths = ", ".join(str(len(row)) for row in plain)
        wrong = f", with rows of one length, but got {shape or f'rows of {lengths}'}"
    if wrong:
        raise InputError(
            f"{what} needs a table, [rows, columns]{wrong}. Pick one batch row and one head, as in "
            "seen.weights[0, 3]."
        )
    table = tuple(tuple(float(value) for value in row) for row in plain)
    if not any(math.isfinite(value) for row in table for value in row):
        raise InputError(f"{what} needs at least one finite number to draw.")
    if any(math.isinf(value) for row in table for value in row):
        raise InputError(f"{what} cannot draw infinite numbers. Pass nan for empty cells.")
    return table


def labels_of(labels: Sequence[str], count: int, what: str) -> tuple[str, ...]:
    """The labels as printable text. Raise InputError unless there is one label per place."""
    if isinstance(labels, str) or len(labels) != count:
        given = repr(labels) if isinstance(labels, str) else f"{len(labels)} labels"
        raise InputError(f"{what} needs {count} labels, but got {given}.")
    return tuple(printable(str(label)) for label in labels)
