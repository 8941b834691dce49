"""Pictures as terminal text: true colour, 256 colours, or plain characters."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import zip_longest
from typing import Literal, NamedTuple

from regard.errors import InputError
from regard.pictures.colours import (
    LEVELS,
    level,
    nearest_of_256,
    ramp,
    ramp_of_256,
    roles,
    written_on,
)
from regard.pictures.record import (
    Axis,
    Bars,
    Cells,
    Drawing,
    Panels,
    brief,
    number,
    shorten,
    width_of,
    wrap,
)

_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")
Colouring = Literal["truecolor", "256", "none"]
PLAIN = " .:-=+*#%@"  # characters for shades of numbers from 0 to the largest
BELOW = " 123456789"  # characters for shades of negative numbers
MIN_WIDTH = 40
MAX_LINES = 100  # lines of cells in one picture
MAX_NUMBERED_LINES = 64  # lines of all panels, if numbers are written inside the cells
GAP = 3  # columns between panels


class Pen(NamedTuple):
    """Colours text by escape codes. A paint is the part of such a code that selects a colour."""

    color: Colouring
    dark: bool

    def __call__(self, text: str, front: str | None, back: str | None = None) -> str:
        if self.color == "none" or not text:
            return text
        codes = [f"{on};{paint}" for on, paint in ((38, front), (48, back)) if paint is not None]
        return f"\x1b[{';'.join(codes)}m{text}\x1b[0m"

    def role(self, name: str) -> str:
        colour = roles(self.dark)[name]
        if self.color == "truecolor":
            return "2;{};{};{}".format(*colour)
        return f"5;{nearest_of_256(colour)}"

    def palette(self, signed: bool) -> list[str]:
        """The paints of all shades, from the smallest to the largest number."""
        if self.color == "truecolor":
            return ["2;{};{};{}".format(*rgb) for rgb in ramp(dark=self.dark, signed=signed)]
        return [f"5;{code}" for code in ramp_of_256(dark=self.dark, signed=signed)]

    def strong(self, text: str) -> str:
        return text if self.color == "none" else f"\x1b[1m{text}\x1b[0m"

    def muted(self, text: str) -> str:
        return text if self.color == "none" else f"\x1b[2m{text}\x1b[0m"

    @property
    def ellipsis(self) -> str:
        return ".." if self.color == "none" else "…"


def draw(drawing: Drawing, width: int, color: Colouring, dark: bool) -> str:
    """Draw the picture in lines of at most ``width`` columns."""
    if color not in ("truecolor", "256", "none"):
        raise InputError(f"color is 'truecolor', '256' or 'none', but got {color!r}.")
    if width < MIN_WIDTH:
        raise InputError(f"A picture needs at least {MIN_WIDTH} columns, but got {width}.")
    pen = Pen(color, dark)
    match drawing:
        case Cells():
            body = _cells(drawing, width, pen)
        case Panels():
            body = _panels(drawing, width, pen)
        case Bars():
            body = _bars(drawing, width, pen)
    title = [pen.strong(line) for line in wrap(drawing.title, width)]
    return "\n".join(line.rstrip() for line in [*title, *body]) + "\n"


# Cells -----------------------------------------------------------------------------------------


class _Layout(NamedTuple):
    """The layout of a table of cells."""

    shown: Cells  # the cells, merged into fewer if they need too much space
    note: str  # a sentence about merged cells
    label_width: int  # columns of text for the labels of rows
    side: int  # columns of text for a cell
    numbered: bool  # whether numbers are written inside the cells


def _layout(cells: Cells, width: int, pen: Pen, numbers: bool = True) -> _Layout:
    label_width = _label_width(cells.rows, width)
    room = width - label_width - 1
    shown, note = _fitted(cells, room, pen)
    count = len(shown.values[0])
    longest = max(len(text) for row in brief(shown.values) for text in row)
    if shown.marks:
        longest += 1  # space for the "*" of a marked cell
    named = max((width_of(label) for label in shown.columns.labels), default=0)
    side = min(room // count, max(min(named, 10), longest) + 2)
    numbered = numbers and side > longest and bool(shown.columns.labels and shown.rows.labels)
    return _Layout(shown, note, label_width, side if numbered else min(room // count, 2), numbered)


def _cells(cells: Cells, width: int, pen: Pen, *, numbers: bool = True) -> list[str]:
    grid = _grid(cells, _layout(cells, width, pen, numbers), width, pen)
    return [pen.muted(f"{cells.rows.name} down, {cells.columns.name} across"), *grid]


def _grid(cells: Cells, layout: _Layout, width: int, pen: Pen) -> list[str]:
    """Draw the cells with their labels, the legend and the caption."""
    scale, signed = cells.scale, cells.signed  # the scale of all numbers, even if cells are merged
    shown, note, label_width, side, numbered = layout
    count, inside = len(shown.values[0]), brief(shown.values)
    halved = side == 1 and pen.color != "none" and not shown.rows.labels

    lines = [" " * (label_width + 1) + line for line in _header(shown.columns, side, pen)]
    ticks = {int(place): text for place, text in shown.rows.ticks(8)} if shown.rows.span else {}
    palette = pen.palette(signed)

    def shade(value: float) -> int | None:
        return None if math.isnan(value) else level(value, *scale)

    for index in range(0, len(shown.values), 2 if halved else 1):
        if shown.rows.labels:
            label = shorten(shown.rows.labels[index], label_width, pen.ellipsis)
        else:
            label = ticks.get(index, ticks.get(index + 1, "") if halved else "")
        line = _right(label, label_width) + " "
        shades = [shade(value) for value in shown.values[index]]
        if halved:
            below = shown.values[index + 1] if index + 1 < len(shown.values) else [math.nan] * count
            line += _half_blocks(shades, [shade(v) for v in below], palette, pen)
        else:
            for column, step in enumerate(shades):
                text = inside[index][column] if numbered else ""
                if text and (index, column) in shown.marks:
                    text = "*" + text
                line += _cell(text, step, side, signed, palette, pen)
        lines.append(line)
    notes = _notes(cells.caption, note, width, pen)
    return [*lines, "", *_legend(cells, width, pen, numbered), *notes]


def _panels(panels: Panels, width: int, pen: Pen) -> list[str]:
    """Draw panels side by side, with numbers in the cells if all fit on a screen."""

    def room(across: int) -> int:
        return (width - GAP * (across - 1)) // across

    def layouts(across: int, numbers: bool) -> list[_Layout]:
        return [_layout(part, room(across), pen, numbers) for part in panels.parts]

    def fits(across: int) -> bool:
        lines = -(-len(panels.parts) // across) * (len(panels.parts[0].values) + 6)
        return lines <= MAX_NUMBERED_LINES and all(
            layout.numbered for layout in layouts(across, True)
        )

    most = min(len(panels.parts), 3)
    numbered = next((across for across in range(most, 0, -1) if fits(across)), 0)
    # Two columns of text make a nearly square cell; large maps have one column per cell.
    shaded = next((a for a in range(most, 1, -1) if all(x.side == 2 for x in layouts(a, False))), 1)
    across = numbered or shaded
    columns = room(across)
    lines = [pen.muted(panels.axes)] if panels.axes else []
    for first in range(0, len(panels.parts), across):
        grids = [
            [*map(pen.strong, wrap(part.title, columns)), *_grid(part, layout, columns, pen)]
            for part, layout in zip(panels.parts, layouts(across, bool(numbered)), strict=True)
        ][first : first + across]
        if lines:
            lines.append("")
        lines += _side_by_side(grids, columns)
    return [*lines, *([""] if panels.caption else []), *_notes(panels.caption, "", width, pen)]


def _side_by_side(blocks: Sequence[Sequence[str]], columns: int) -> list[str]:
    """Place blocks of lines side by side."""
    return [
        (" " * GAP).join(
            line + " " * (columns - width_of(_ESCAPES.sub("", line))) for line in lines
        )
        for lines in zip_longest(*blocks, fillvalue="")
    ]


def _label_width(axis: Axis, width: int) -> int:
    if axis.labels:
        return min(max(map(width_of, axis.labels)), max(width // 4, min(10, width // 2)))
    return len(f"{axis.start + axis.span:,}")


def _fitted(cells: Cells, room: int, pen: Pen) -> tuple[Cells, str]:
    """Merge cells until they fit ``room`` columns; return them and a note about the merge."""
    rows, columns = len(cells.values), len(cells.values[0])
    across, down = min(columns, room), min(rows, MAX_LINES)
    if not cells.rows.labels and not cells.columns.labels and 2 * columns > room:
        # A character is about twice as high as wide; a half block holds two cells.
        lines = min(max(round(across * rows / columns / 2), 1), MAX_LINES)
        down = min(rows, lines if pen.color == "none" else 2 * lines)
    if (down, across) == (rows, columns):
        return cells, ""
    merged = [[math.nan] * across for _ in range(down)]
    for r, row in enumerate(cells.values):
        for c, value in enumerate(row):
            line, place = merged[r * down // rows], c * across // columns
            if math.isnan(line[place]) or abs(value) > abs(line[place]):
                line[place] = value
    values = tuple(map(tuple, merged))
    size = f"{math.ceil(rows / down)} x {math.ceil(columns / across)}"
    note = f"Each cell shows the largest of up to {size} numbers."
    axes = _coarser(cells.rows, down), _coarser(cells.columns, across)
    return Cells(cells.title, values, *axes, cells.unit), note


def _coarser(axis: Axis, places: int) -> Axis:
    if places == axis.places:
        return axis
    return Axis(axis.name, places, start=axis.start, span=axis.span or axis.places)


def _header(axis: Axis, side: int, pen: Pen) -> list[str]:
    """The column labels: horizontal if they fit, else vertical, one letter per line."""
    if not axis.labels or side < 2:  # vertical labels need a gap between them
        axis = axis if axis.span else Axis(axis.name, axis.places, span=axis.places)
        line = ""
        for place, text in axis.ticks(max(axis.places * side // 12, 1)):
            at = int(place) * side
            if (at >= len(line) + 1 or not line) and at + len(text) <= axis.places * side:
                line = line.ljust(at) + text
        return [line]
    longest = max(map(width_of, axis.labels))
    if longest < side or side >= 6:
        words = [shorten(label, side - 1, pen.ellipsis) for label in axis.labels]
        return ["".join(_right(word, side - 1) + " " for word in words)]
    if all(label.isdigit() for label in axis.labels):
        step = -(-(longest + 1) // side)
        return [
            "".join(label.rjust(side * step - 1) + " " for label in axis.labels[step - 1 :: step])
        ]
    stacks = [_letters(shorten(label, 9, pen.ellipsis), side)[::-1] for label in axis.labels]
    lines = ["".join(_right(c, side) for c in line) for line in zip_longest(*stacks, fillvalue="")]
    return lines[::-1]


def _letters(text: str, side: int) -> list[str]:
    """The letters of a text with their combining marks; "?" for letters wider than ``side``."""
    letters: list[str] = []
    for character in text:
        if width_of(character) == 0 and letters:
            letters[-1] += character
        else:
            letters.append(character if width_of(character) <= side else "?")
    return letters


def _right(text: str, width: int) -> str:
    """The text at the right end of ``width`` columns."""
    return " " * (width - width_of(text)) + text


def _cell(
    text: str, shade: int | None, side: int, signed: bool, palette: Sequence[str], pen: Pen
) -> str:
    if shade is None:
        return " " * side
    if pen.color == "none":
        return text.rjust(side - 1) + " " if text else _plain(shade, signed) * side
    front = pen.role(written_on(shade, signed))
    return pen(text.rjust(side - 1) + " " if text else " " * side, front, palette[shade])


def _plain(shade: int, signed: bool) -> str:
    strength = 2 * shade - (LEVELS - 1) if signed else shade
    signs = PLAIN if strength >= 0 else BELOW
    return signs[min(abs(strength) * len(signs) // LEVELS, len(signs) - 1)]


def _half_blocks(
    above: Sequence[int | None], below: Sequence[int | None], palette: Sequence[str], pen: Pen
) -> str:
    line = ""
    for upper, lower in zip(above, below, strict=True):
        if upper is None:
            line += " " if lower is None else pen("▄", palette[lower])
        else:
            line += pen("▀", palette[upper], None if lower is None else palette[lower])
    return line


def _legend(cells: Cells, width: int, pen: Pen, numbered: bool) -> list[str]:
    left, right = (number(end) for end in cells.scale)
    room = width - len(left) - len(right) - 2
    if pen.color == "none":
        signs = f"{BELOW[:0:-1]}{PLAIN}" if cells.signed else PLAIN
        skip = -(-len(signs) // max(room - 2, 1))  # a narrow panel shows only some characters
        length = len(strip := f"[{signs[::skip]}]")
    else:
        palette = pen.palette(cells.signed)
        length = min(28, max(width // 4, 6), max(room, 2))
        strip = "".join(
            pen(" ", None, palette[i * (LEVELS - 1) // (length - 1)]) for i in range(length)
        )
    unit = cells.meaning(numbered)
    if length + 1 + width_of(unit) <= room:
        return [f"{left} {strip} {right} {pen.muted(unit)}"]
    return [f"{left} {strip} {right}", *map(pen.muted, wrap(unit, width))]


def _notes(caption: str, note: str, width: int, pen: Pen) -> list[str]:
    text = " ".join(part for part in (caption, note) if part)
    return [pen.muted(line) for line in wrap(text, width)]


# Bars ------------------------------------------------------------------------------------------


def _bars(bars: Bars, width: int, pen: Pen) -> list[str]:
    label_width = min(max(map(width_of, bars.labels)), width // 3)
    numbers = list(map(number, bars.values))
    length = min(width - label_width - 2 - max(map(len, numbers)), 60)
    most = max(bars.values)
    colour = pen.role("bar")
    lines = []
    for name, value, text in zip(bars.labels, bars.values, numbers, strict=True):
        label = shorten(name, label_width, pen.ellipsis)
        halves = round(2 * length * value / most) if most else 0
        if pen.color == "none":
            bar = "#" * round(halves / 2)
        else:
            bar = pen("━" * (halves // 2) + "╸" * (halves % 2), colour)
        lines.append(f"{_right(label, label_width)} {bar} {text}")
    scale = f"0 to {number(most)} {bars.unit}"
    return [*lines, "", *_notes(scale, "", width, pen), *_notes(bars.caption, "", width, pen)]
