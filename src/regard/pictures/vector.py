"""Lay out pictures as shapes on a page, and write these as SVG or PNG (by matplotlib)."""

from __future__ import annotations

import base64
import html
import io
import math
import re
import struct
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal, NamedTuple

from regard.errors import InputError
from regard.pictures.colours import LEVELS, hexadecimal, level, ramp, roles, written_on
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

MARGIN = 20.0
PLOT = 640.0  # the longest side of all cells together
MAX_CELL = 40.0  # the longest side of a cell
MAX_PANELS_WIDTH = 1500.0  # the width of all panels of a row together
FONT = 12.0
ADVANCE = 0.602  # the width of a letter of the monospaced font, relative to its size
MAX_LABEL = 16  # letters
MAX_SHAPES = 4096  # more cells are drawn as one image
SANS = "system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"

MONOSPACED = "DejaVu Sans Mono"  # matplotlib includes this font and the first fallback
FALLBACKS = (
    "DejaVu Sans", "Noto Sans CJK SC", "Noto Sans CJK JP", "WenQuanYi Zen Hei", "PingFang SC",
    "Hiragino Sans", "Microsoft YaHei", "Arial Unicode MS",
)  # fmt: skip


class Shade(NamedTuple):
    """The colour of a number: an index into a colour ramp."""

    level: int
    signed: bool  # whether negative numbers have their own colours


Paint = str | Shade  # a role such as "ink", or the shade of a number
Anchor = Literal["start", "middle", "end"]


@dataclass(frozen=True)
class Box:
    x: float
    y: float
    width: float
    height: float
    paint: Paint
    tip: str = ""  # tooltip
    outlined: bool = False


@dataclass(frozen=True)
class Words:
    x: float
    y: float  # the baseline
    text: str
    paint: str = "ink"
    size: float = FONT
    anchor: Anchor = "start"
    angle: float = 0.0
    mono: bool = False
    bold: bool = False


@dataclass(frozen=True)
class Image:
    x: float
    y: float
    width: float
    height: float
    shades: Sequence[Sequence[int | None]]
    signed: bool


@dataclass
class Scene:
    """Shapes on a page; later shapes cover earlier ones."""

    title: str
    description: str
    width: float = 0.0
    height: float = 0.0
    shapes: list[Box | Words | Image] = field(default_factory=list)


def lay_out(drawing: Drawing) -> Scene:
    """Lay out the shapes of a picture."""
    match drawing:
        case Cells():
            return _lay_out_cells(drawing)
        case Panels():
            return _lay_out_panels(drawing)
        case Bars():
            return _lay_out_bars(drawing)


# Laying out ------------------------------------------------------------------------------------


def _lay_out_cells(
    cells: Cells, plot: float = PLOT, largest: float = MAX_CELL, least: float = 380.0
) -> Scene:
    rows, columns = len(cells.values), len(cells.values[0])
    # Cells are square, unless that makes one side shorter than 18.
    wide, high = (min(plot / count, largest) for count in (columns, rows))
    wide, high = min(wide, max(high, 18.0)), min(high, max(wide, 18.0))
    scene = Scene(cells.title, cells.caption)
    rows_shown = _shown(cells.rows, math.ceil((FONT + 2) / high))
    columns_shown = _shown(cells.columns, math.ceil((FONT + 6) / wide))  # room for a slanted label
    across, upward = (
        max((width_of(text) for _, text in shown), default=0) * FONT * ADVANCE
        for shown in (rows_shown, columns_shown)
    )
    flat = not cells.columns.labels or upward <= wide - 4
    above = FONT if flat else upward * 0.71 + FONT * 0.6

    head = _heading(scene, cells.title, wide * columns + across + 28)
    left, top = MARGIN + 22 + across + 6, head + FONT + 10 + above + 8
    right, bottom = left + wide * columns, top + high * rows
    name = partial(Words, paint="muted", anchor="middle")
    scene.shapes.append(name((left + right) / 2, head + FONT, cells.columns.name))
    scene.shapes.append(name(MARGIN + FONT * 0.6, (top + bottom) / 2, cells.rows.name, angle=-90))
    for place, text in rows_shown:
        y = top + place * high + FONT * 0.36
        scene.shapes.append(Words(left - 6, y, text, anchor="end", mono=True))
    for place, text in columns_shown:
        x = left + place * wide
        if flat:
            scene.shapes.append(Words(x, top - 7, text, anchor="middle", mono=True))
        else:
            scene.shapes.append(Words(x + FONT * 0.3, top - 6, text, angle=-45, mono=True))
    if not flat and columns_shown:  # slanted labels extend to the right
        place, text = max(columns_shown, key=lambda n: n[0] * wide + width_of(n[1]) * FONT * 0.43)
        right = max(right, left + place * wide + width_of(text) * FONT * ADVANCE * 0.71 + 8)

    numbered = _fill(scene, cells, left, top, wide, high)
    scene.width = max(right + MARGIN, least)
    y = _legend(scene, cells, left, bottom + 18, numbered)
    scene.height = _caption(scene, cells.caption, y) + MARGIN
    return scene


def _lay_out_panels(panels: Panels) -> Scene:
    """Lay out panels in rows of up to three."""
    scenes = [
        _lay_out_cells(part, plot=MAX_PANELS_WIDTH / 3 - 140, largest=32.0, least=260.0)
        for part in panels.parts
    ]
    across = next(
        (count for count in (3, 2) if max(s.width for s in scenes) * count <= MAX_PANELS_WIDTH), 1
    )
    across = min(across, len(scenes))
    widths = [max(scene.width for scene in scenes[start::across]) for start in range(across)]
    scene = Scene(panels.title, panels.caption)
    y = _heading(scene, panels.title, sum(widths))
    for first in range(0, len(scenes), across):
        row = scenes[first : first + across]
        x = 0.0
        for part, width in zip(row, widths, strict=False):
            scene.shapes += [
                replace(shape, x=shape.x + x, y=shape.y + y - MARGIN / 2) for shape in part.shapes
            ]
            x += width
        y += max(part.height for part in row) - MARGIN / 2
    scene.width = max(sum(widths), 380.0)
    scene.height = _caption(scene, panels.caption, y) + MARGIN
    return scene


def _shown(axis: Axis, skip: int) -> list[tuple[float, str]]:
    """Every ``skip``-th label with the place of its centre, or ticks if there are no labels."""
    if not axis.labels:
        return axis.ticks(8)
    return [
        (index + 0.5, shorten(label, MAX_LABEL))
        for index, label in enumerate(axis.labels)
        if index % skip == 0
    ]


def _fill(scene: Scene, cells: Cells, left: float, top: float, wide: float, high: float) -> bool:
    """Draw the cells; return whether their numbers fit inside."""
    low, most = cells.scale
    shades = [[None if math.isnan(v) else level(v, low, most) for v in row] for row in cells.values]
    columns = len(shades[0])
    if len(shades) * columns > MAX_SHAPES:
        scene.shapes.append(
            Image(left, top, wide * columns, high * len(shades), shades, cells.signed)
        )
        return False
    inside = brief(cells.values)
    longest = max(len(text) for row in inside for text in row)
    roomy = wide >= longest * 10.5 * ADVANCE + 4 and high >= 18
    gap = 1.0 if min(wide, high) >= 8 else 0.0
    boxes, words = [], []
    for r, row in enumerate(shades):
        for c, shade in enumerate(row):
            if shade is None:
                continue
            tip = f"{_name(cells.rows, r)}, {_name(cells.columns, c)}: "
            tip += f"{cells.values[r][c]:.6g} {cells.unit}"
            x, y = left + c * wide, top + r * high
            marked = (r, c) in cells.marks
            paint = Shade(shade, cells.signed)
            boxes.append(Box(x, y, wide - gap, high - gap, paint, tip, marked))
            if roomy:
                ink = written_on(shade, cells.signed) if cells.values[r][c] else "muted"
                at = (x + (wide - gap) / 2, y + high / 2 + 3.5)
                words.append(Words(*at, inside[r][c], ink, 10.5, "middle", mono=True, bold=marked))
    boxes.sort(key=lambda box: box.outlined)  # draw outlined boxes last
    scene.shapes += [*boxes, *words]
    return roomy


def _name(axis: Axis, index: int) -> str:
    if axis.labels:
        return f"{axis.name} {axis.labels[index]}"
    width = axis.span / axis.places
    first, last = (axis.start + math.ceil(i * width) for i in (index, index + 1))
    return f"{axis.name} {first:,}" + (f"\u2013{last - 1:,}" if last - 1 > first else "")


def _lay_out_bars(bars: Bars) -> Scene:
    scene = Scene(bars.title, bars.caption)
    names = [shorten(label, 2 * MAX_LABEL) for label in bars.labels]
    across = max(map(width_of, names)) * FONT * ADVANCE
    top = _heading(scene, bars.title, across + 420) + 8
    left, length, high = MARGIN + across + 10, 320.0, 24.0
    most = max(bars.values)
    for index, (name, value) in enumerate(zip(names, bars.values, strict=True)):
        y = top + index * high
        width = length * value / most if most else 0.0
        tip = f"{bars.labels[index]}: {value:.6g} {bars.unit}"
        scene.shapes += [
            Words(left - 10, y + 15.5, name, anchor="end", mono=True),
            Box(left, y + 3, max(width, 1.0), high - 7, "bar", tip),
            Words(left + max(width, 1.0) + 7, y + 15.5, number(value), "muted", mono=True),
        ]
    bottom = top + high * len(names)
    scene.shapes.append(Box(left - 1, top, 1, bottom - top, "line"))
    scene.width = left + length + 80 + MARGIN
    scale = f"0 to {number(most)} {bars.unit}"
    scene.shapes.append(Words(left, bottom + 18, scale, "muted", 11))
    scene.height = _caption(scene, bars.caption, bottom + 26) + MARGIN
    return scene


def _heading(scene: Scene, title: str, width: float) -> float:
    """Add the title; return the y coordinate of its end."""
    y = MARGIN
    for line in wrap(title, max(int(max(width, 340) / 8.6), 20)):
        y += 20
        scene.shapes.append(Words(MARGIN, y - 4, line, size=15, bold=True))
    return y + 6


def _legend(scene: Scene, cells: Cells, left: float, y: float, numbered: bool) -> float:
    """Add the colour scale with the numbers at its ends; return the y coordinate of its end."""
    low, most = cells.scale
    x, steps, length = left, 64, 168.0
    scene.shapes.append(Words(x, y + 10, number(low), "ink", 11, mono=True))
    x += width_of(number(low)) * 11 * ADVANCE + 8
    for index in range(steps):
        shade = round(index * (LEVELS - 1) / (steps - 1))
        # Boxes overlap to avoid visible gaps.
        extent = length / steps + (1 if index < steps - 1 else 0)
        paint = Shade(shade, cells.signed)
        scene.shapes.append(Box(x + index * length / steps, y, extent, 11, paint))
    x += length + 8
    scene.shapes.append(Words(x, y + 10, number(most), "ink", 11, mono=True))
    x += width_of(number(most)) * 11 * ADVANCE + 10
    unit = cells.meaning(numbered)
    scene.shapes.append(Words(x, y + 10, unit, "muted", 11))
    scene.width = max(scene.width, x + width_of(unit) * 6.4 + MARGIN)
    return y + 18


def _caption(scene: Scene, caption: str, y: float) -> float:
    for line in wrap(caption, max(int((scene.width - 2 * MARGIN) / 6.1), 20)):
        y += 16
        scene.shapes.append(Words(MARGIN, y, line, "muted", FONT))
    return y


# SVG -------------------------------------------------------------------------------------------


def svg(scene: Scene) -> str:
    """Write the scene as SVG with colours for light and dark pages."""
    size = f'width="{scene.width:.0f}" height="{scene.height:.0f}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} '
        f'viewBox="0 0 {scene.width:.0f} {scene.height:.0f}" role="img" class="regard">'
        f"<title>{html.escape(scene.title)}</title><desc>{html.escape(scene.description)}</desc>"
        f"<style>{_style(scene)}</style>"
        f'<rect class="paper" {size}/>' + "".join(map(_svg_shape, scene.shapes)) + "</svg>"
    )


def _style(scene: Scene) -> str:
    return (
        f".regard text{{font-family:{SANS}}}.regard .mono{{font-family:{MONO};white-space:pre}}"
        ".regard .bold{font-weight:600}.regard .outlined{stroke-width:2}"
        ".regard image{image-rendering:pixelated}"
        + _colours(scene, dark=False)
        + "@media (prefers-color-scheme:dark){"
        + _colours(scene, dark=True)
        + "}"
    )


def _colours(scene: Scene, *, dark: bool) -> str:
    """The CSS rules for light or for dark pages."""
    boxes = (shape.paint for shape in scene.shapes if isinstance(shape, Box))
    shades = sorted({paint for paint in boxes if isinstance(paint, Shade)})
    paints: list[Paint] = [*roles(dark), *shades]
    rules = [f".regard .{_class(paint)}{{fill:{_colour(paint, dark)}}}" for paint in paints]
    rules.append(f".regard .outlined{{stroke:{_colour('ink', dark)}}}")
    rules.append(f".regard .{'day' if dark else 'night'}{{display:none}}")
    rules.append(f".regard .{'night' if dark else 'day'}{{display:inline}}")
    return "".join(rules)


def _colour(paint: Paint, dark: bool) -> str:
    if isinstance(paint, str):
        return hexadecimal(roles(dark)[paint])
    return hexadecimal(ramp(dark=dark, signed=paint.signed)[paint.level])


def _class(paint: Paint) -> str:
    """The CSS class of a paint; all pictures of one page share the classes."""
    return paint if isinstance(paint, str) else f"{'d' if paint.signed else 's'}{paint.level}"


def _svg_shape(shape: Box | Words | Image) -> str:
    at = _attributes(x=shape.x, y=shape.y)
    if isinstance(shape, Box | Image):
        at += " " + _attributes(width=shape.width, height=shape.height)
    if isinstance(shape, Image):
        return "".join(
            f'<image class="{name}" {at} preserveAspectRatio="none" '
            f'href="data:image/png;base64,{base64.b64encode(image).decode()}"/>'
            for name, dark in (("day", False), ("night", True))
            for image in [_png_of(shape.shades, ramp(dark=dark, signed=shape.signed))]
        )
    if isinstance(shape, Box):
        kind = _class(shape.paint) + (" outlined" if shape.outlined else "")
        if not shape.tip:
            return f'<rect class="{kind}" {at}/>'
        return f'<rect class="{kind}" {at}><title>{html.escape(shape.tip)}</title></rect>'
    kind = shape.paint + (" mono" if shape.mono else "") + (" bold" if shape.bold else "")
    turned = (
        f' transform="rotate({shape.angle:g} {shape.x:.2f} {shape.y:.2f})"' if shape.angle else ""
    )
    return (
        f'<text class="{kind}" {at} font-size="{shape.size:g}" text-anchor="{shape.anchor}"'
        f"{turned}>{html.escape(shape.text)}</text>"
    )


def _attributes(**numbers: float) -> str:
    return " ".join(f'{name}="{value:.2f}"' for name, value in numbers.items())


def _png_of(shades: Sequence[Sequence[int | None]], palette: Sequence[tuple[int, ...]]) -> bytes:
    """Encode shades as a PNG image with one pixel per shade; None is transparent."""
    clear = LEVELS - 1  # the transparent colour if some cells are empty; no shade uses it then
    holes = any(shade is None for row in shades for shade in row)
    lines = b"".join(
        b"\0" + bytes(clear if s is None else min(s, clear - 1) if holes else s for s in row)
        for row in shades
    )

    def chunk(name: bytes, data: bytes) -> bytes:
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))

    header = struct.pack(">IIBBBBB", len(shades[0]), len(shades), 8, 3, 0, 0, 0)
    colours = b"".join(bytes(colour) for colour in palette)
    opacity = chunk(b"tRNS", b"\xff" * clear + b"\0") if holes else b""
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"PLTE", colours)
        + opacity
        + chunk(b"IDAT", zlib.compress(lines, 9))
        + chunk(b"IEND", b"")
    )


MISSING = "Glyph .* missing from font"  # a warning of matplotlib


class FontWarning(UserWarning):
    """Some letters of a picture are in no installed font."""


# PNG -------------------------------------------------------------------------------------------


def png(scene: Scene, *, dark: bool) -> bytes:
    """Draw the scene as a PNG image with twice the resolution of the SVG."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.collections import PatchCollection
        from matplotlib.figure import Figure
        from matplotlib.font_manager import get_font_names
        from matplotlib.patches import Rectangle
    except ImportError:
        raise InputError(
            "A PNG needs matplotlib, which is not installed: pip install 'regard[pictures]'. "
            "SVG, HTML and text do not need it."
        ) from None
    known = set(get_font_names())
    fonts = {
        mono: [name for name in ((MONOSPACED,) if mono else ()) + FALLBACKS if name in known]
        for mono in (False, True)
    }
    unit = 96  # pixels of the scene to an inch
    figure = Figure(
        (scene.width / unit, scene.height / unit), 2 * unit, facecolor=_colour("paper", dark)
    )
    axes = figure.add_axes((0, 0, 1, 1), xlim=(0, scene.width), ylim=(scene.height, 0))
    axes.set_axis_off()
    boxes = [shape for shape in scene.shapes if isinstance(shape, Box)]
    axes.add_collection(
        PatchCollection(
            [Rectangle((box.x, box.y), box.width, box.height) for box in boxes],
            facecolors=[_colour(box.paint, dark) for box in boxes],
            edgecolors=[_colour("ink", dark) if box.outlined else "none" for box in boxes],
            linewidths=[1.5 if box.outlined else 0 for box in boxes],
        )
    )
    for shape in scene.shapes:
        if isinstance(shape, Words):
            axes.text(
                shape.x, shape.y, shape.text, color=_colour(shape.paint, dark),
                fontsize=shape.size * 72 / unit, rotation=-shape.angle, rotation_mode="anchor",
                ha={"start": "left", "middle": "center", "end": "right"}[shape.anchor],
                va="baseline", family=fonts[shape.mono],
                weight="bold" if shape.bold else "normal", parse_math=False,
            )  # fmt: skip
        elif isinstance(shape, Image):
            clear, palette = (0, 0, 0, 0), ramp(dark=dark, signed=shape.signed)
            pixels = [
                [clear if s is None else (*palette[s], 255) for s in row] for row in shape.shades
            ]
            right, bottom = shape.x + shape.width, shape.y + shape.height
            axes.imshow(
                pixels, extent=(shape.x, right, bottom, shape.y), aspect="auto",
                interpolation="nearest",
            )  # fmt: skip
            axes.set(xlim=(0, scene.width), ylim=(scene.height, 0))
    written = io.BytesIO()
    FigureCanvasAgg(figure)  # not pyplot, which keeps figures and is not thread-safe
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", MISSING, UserWarning)
        figure.savefig(written, format="png", metadata={"Software": None})
    missing = [w for w in caught if re.match(MISSING, str(w.message))]  # one per letter and font
    for warning in caught:
        if warning not in missing:
            warnings.warn_explicit(
                warning.message, warning.category, warning.filename, warning.lineno
            )
    if missing:
        warnings.warn(
            "Some letters are in no installed font and are drawn as boxes. An .svg or .html uses "
            "the fonts of the viewer.",
            FontWarning,
            stacklevel=2,
        )
    return written.getvalue()
