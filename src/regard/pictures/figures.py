"""Functions that return a :class:`Picture`, which can be text, PNG, SVG or an HTML page."""

from __future__ import annotations

import html
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import InputError
from regard.pictures import terminal, vector
from regard.pictures.record import (
    Axis,
    Bars,
    Cells,
    Drawing,
    Panels,
    labels_of,
    printable,
    table_of,
)
from regard.pictures.terminal import Colouring

if TYPE_CHECKING:
    from torch import Tensor

    Table = Tensor | Sequence[Sequence[float]]

MAX_TABLE_NUMBERS = 4096  # larger pictures have no table of numbers on a page


@dataclass(frozen=True)
class Picture:
    """A ``drawing`` that can be shown or saved as text, SVG, PNG or HTML.

    >>> picture = weight_map([[1.0, 0.0], [0.25, 0.75]], ["the", "cat"], ["the", "cat"])
    >>> print(picture.text(width=40, color="none"))
    Weights
    query down, key across
          the   cat
    the  1.00     .
    cat   .25   .75
    <BLANKLINE>
    0 [ .:-=+*#%@] 1 weight (a point is 0)
    <BLANKLINE>
    """

    drawing: Drawing

    @property
    def title(self) -> str:
        return self.drawing.title

    def text(self, *, width: int = 80, color: Colouring = "truecolor", dark: bool = True) -> str:
        """Draw for a terminal of ``width`` columns; ``color`` is "truecolor", "256" or "none"."""
        return terminal.draw(self.drawing, width, color, dark)

    def svg(self) -> str:
        """SVG for light and dark pages; tooltips show the numbers of cells."""
        return vector.svg(vector.lay_out(self.drawing))

    def png(self, path: str | PathLike[str], *, dark: bool = False) -> None:
        """Write a PNG image, drawn by matplotlib with its fonts."""
        _write(_checked(path), vector.png(vector.lay_out(self.drawing), dark=dark))

    def html(self) -> str:
        """A self-contained HTML page with a table of the numbers."""
        return page(self.title, [self])

    def save(self, path: str | PathLike[str]) -> None:
        """Write a .png, .svg, .html or .txt file, by the ending of ``path``."""
        path = savable(path)
        match path.suffix.lower():
            case ".png":
                self.png(path)
            case ".svg":
                _write(path, self.svg().encode())
            case ".html":
                _write(path, self.html().encode())
            case _:
                _write(path, self.text(width=120, color="none").encode())

    def _repr_html_(self) -> str:
        return self.svg()


def weight_map(
    weights: Table,
    queries: Sequence[str],
    keys: Sequence[str],
    *,
    title: str = "Weights",
    without_first: bool = False,
    caption: str = "",
) -> Picture:
    """The weights [queries, keys] of one head, with the token of each row and column.

    ``without_first`` leaves out the first key, which takes most of the weight in many heads.

    >>> picture = weight_map([[0.9, 0.1], [0.8, 0.2]], ["a", "b"], ["a", "b"], without_first=True)
    >>> print(picture.text(width=60, color="none").strip())
    Weights
    query down, key across
         b
    a  .10
    b  .20
    <BLANKLINE>
    0.1 [ .:-=+*#%@] 0.2 weight
    The first key, 'a', is left out: it takes 85.0% of the
    weight on average. The other weights are unchanged.
    """
    values = table_of(weights, "weight_map")
    rows = labels_of(queries, len(values), "weight_map(queries=...)")
    columns = labels_of(keys, len(values[0]), "weight_map(keys=...)")
    note = ""
    if without_first:
        values, note = _without_first(values, f"The first key, {columns[0]!r}, is")
        columns = columns[1:]
    caption = f"{note} {printable(caption)}".strip()
    return _labelled(title, values, ("query", rows), ("key", columns), "weight", caption)


def _labelled(
    title: str,
    values: tuple[tuple[float, ...], ...],
    rows: tuple[str, tuple[str, ...]],
    columns: tuple[str, tuple[str, ...]],
    unit: str,
    caption: str,
    marks: frozenset[tuple[int, int]] = frozenset(),
) -> Picture:
    """A picture of cells; ``rows`` and ``columns`` are (name, labels)."""
    down, across = (Axis(name, len(labels), labels) for name, labels in (rows, columns))
    title, unit, caption = (printable(text) for text in (title, unit, caption))
    return Picture(Cells(title, values, down, across, unit, caption, marks))


def pooled_map(
    pooled: Table,
    queries: int,
    keys: int,
    *,
    title: str = "Weights of a long text",
    first_query: int = 0,
    first_key: int = 0,
    without_first: bool = False,
    caption: str = "",
) -> Picture:
    """A pooled map of ``queries`` x ``keys`` weights, such as ``Seen.map``.

    ``first_query`` and ``first_key`` are the first positions if the map shows part of a text.
    ``without_first`` leaves out the first column of cells.

    >>> import torch
    >>> from regard import See, attention
    >>> x = torch.zeros(1024, 4)  # all scores are equal
    >>> _, seen = attention(x, x, x, see=See(map=2))
    >>> picture = pooled_map(seen.map[0, 0], 1024, 1024)
    >>> print(picture.text(width=60, color="none").strip())
    Weights of a long text
    query down, key across
          0
      400 ++++
    1,000 ++++
    <BLANKLINE>
    0.5 [ .:-=+*#%@] 0.5 of an average query's weight
    """
    values = table_of(pooled, "pooled_map")
    if queries < len(values) or keys < len(values[0]):
        raise InputError(
            f"pooled_map needs at least one query and key per cell, but got {queries} queries and "
            f"{keys} keys for {len(values)} x {len(values[0])} cells."
        )
    row_axis = Axis("query", len(values), start=first_query, span=queries)
    start, span, note = first_key, keys, ""
    if without_first:
        taken = math.ceil(keys / len(values[0]))
        what = f"The first column, keys {first_key:,} to {first_key + taken - 1:,}, is"
        values, note = _without_first(values, what)
        start, span = first_key + taken, keys - taken
    column_axis = Axis("key", len(values[0]), start=start, span=span)
    pooled_anything = queries > len(values) or span > len(values[0])
    unit = "of an average query's weight" if pooled_anything else "weight"
    caption = f"{note} {printable(caption)}".strip()
    return Picture(Cells(printable(title), values, row_axis, column_axis, unit, caption))


def head_grid(
    values: Table,
    unit: str,
    *,
    title: str,
    layers: Sequence[str] | None = None,
    caption: str = "",
) -> Picture:
    """One number for each head of each layer, [layers, heads]; nan where a layer has fewer heads.

    Negative numbers have other colours than positive numbers.

    >>> picture = head_grid([[0.1, 0.7], [0.4, 0.2]], "nats", title="Entropy")
    >>> print(picture.text(width=60, color="none").strip())
    Entropy
    layer down, head across
         0    1
    0  .10  .70
    1  .40  .20
    <BLANKLINE>
    0.1 [ .:-=+*#%@] 0.7 nats
    """
    table = table_of(values, "head_grid")
    names = [str(index) for index in range(len(table))] if layers is None else layers
    rows = labels_of(names, len(table), "head_grid(layers=...)")
    heads = tuple(str(index) for index in range(len(table[0])))
    return _labelled(title, table, ("layer", rows), ("head", heads), unit, caption)


def patch_grid(
    weights: Table,
    *,
    patch: tuple[int, int] | None = None,
    title: str = "Weights on patches",
    caption: str = "",
) -> Picture:
    """The weights of one query on the patches of an image, [rows, columns].

    ``patch`` is the row and the column of the query, which is marked; None if it is no patch.

    >>> picture = patch_grid([[0.1, 0.2], [0.3, 0.4]], patch=(1, 0))
    >>> print(picture.text(width=60, color="none").strip())
    Weights on patches
    row down, column across
          0     1
    0   .10   .20
    1  *.30   .40
    <BLANKLINE>
    0.1 [ .:-=+*#%@] 0.4 weight
    """
    values = table_of(weights, "patch_grid")
    sides = (len(values), len(values[0]))
    if patch is not None and not all(0 <= at < side for at, side in zip(patch, sides, strict=True)):
        raise InputError(f"patch_grid has {sides[0]} x {sides[1]} patches, but got patch={patch}.")
    rows, columns = (tuple(map(str, range(side))) for side in sides)
    marks = frozenset() if patch is None else frozenset({patch})
    return _labelled(title, values, ("row", rows), ("column", columns), "weight", caption, marks)


def top_keys(
    weights: Sequence[float] | Tensor,
    keys: Sequence[str],
    *,
    word: str,
    count: int = 8,
    title: str = "",
    without_first: bool = False,
    caption: str = "",
) -> Picture:
    """The keys that one query attends to most, from its weights [keys], as bars.

    ``without_first`` leaves out the first key.

    >>> picture = top_keys([0.1, 0.6, 0.3], ["the", "cat", "sat"], word="sat", count=2)
    >>> print(picture.text(width=60, color="none").strip())
    What 'sat' attends to
    cat #################################################### 0.6
    sat ########################## 0.3
    <BLANKLINE>
    0 to 0.6 weight
    2 of 3 keys hold 90.0% of the weight.
    """
    plain = weights.tolist() if hasattr(weights, "tolist") else list(weights)
    (row,) = table_of([plain], "top_keys")
    labels = labels_of(keys, len(row), "top_keys(keys=...)")
    if any(not value >= 0 for value in row):
        raise InputError("top_keys draws weights of 0 or more, but some are negative or nan.")
    order = [i for i, weight in enumerate(row) if weight > 0 and (i or not without_first)]
    order = sorted(order, key=lambda i: -row[i])[:count]
    if not order:
        raise InputError(f"top_keys found no key to draw among {len(row)} keys with count={count}.")
    note = f"{len(order)} of {len(row)} keys hold {sum(row[i] for i in order):.1%} of the weight."
    if without_first:
        note += f" The first key, {labels[0]!r}, is left out: it takes {row[0]:.1%}."
    return Picture(
        Bars(
            printable(title) or f"What {printable(word)!r} attends to",
            # Repeated words are followed by their position.
            tuple(
                f"{labels[i]} ({i})" if labels.count(labels[i]) > 1 else labels[i] for i in order
            ),
            tuple(row[i] for i in order),
            "weight",
            f"{note} {printable(caption)}".strip(),
        )
    )


def alignment(
    weights: Table,
    source: Sequence[str],
    target: Sequence[str],
    *,
    title: str = "Alignment",
    caption: str = "",
) -> Picture:
    """The weights of target words on source words, [target, source].

    The largest weight of each row is marked.

    >>> picture = alignment([[0.9, 0.1], [0.3, 0.7]], ["the", "cat"], ["le", "chat"])
    >>> print(picture.text(width=60, color="none").strip())
    Alignment
    target down, source across
           the   cat
      le  *.90   .10
    chat   .30  *.70
    <BLANKLINE>
    0.1 [ .:-=+*#%@] 0.9 weight
    """
    values = table_of(weights, "alignment")
    rows = labels_of(target, len(values), "alignment(target=...)")
    columns = labels_of(source, len(values[0]), "alignment(source=...)")
    best = frozenset(
        (index, row.index(most))
        for index, row in enumerate(values)
        if (most := max((v for v in row if not math.isnan(v)), default=0.0)) > 0
    )
    return _labelled(title, values, ("target", rows), ("source", columns), "weight", caption, best)


def panels(title: str, pictures: Sequence[Picture], *, caption: str = "") -> Picture:
    """Several maps or grids in one picture, each with its own scale and legend."""
    parts = tuple(picture.drawing for picture in pictures if isinstance(picture.drawing, Cells))
    if not parts or len(parts) < len(pictures):
        raise InputError("panels needs at least one picture, and takes only maps and grids.")
    return Picture(Panels(printable(title), parts, printable(caption)))


def compare(
    first: Picture, second: Picture, *, names: tuple[str, str], title: str = "", caption: str = ""
) -> Picture:
    """The difference of two pictures of one kind: blue if the second is larger, else orange.

    Two maps or grids are drawn on one scale, beside their difference. For two pictures with several
    panels only the differences are drawn.
    """
    before, after = (printable(name) for name in names)
    title = printable(title) or f"{after} against {before}"
    caption = printable(caption)
    more = f"{after} less {before}: above 0 where {after} has more."
    one, other = first.drawing, second.drawing
    if isinstance(one, Cells) and isinstance(other, Cells):
        limits = min(one.scale[0], other.scale[0]), max(one.scale[1], other.scale[1])
        parts = (
            replace(one, title=before, limits=limits),
            replace(other, title=after, limits=limits),
            _difference(one, other, f"{after} less {before}"),
        )
        return Picture(Panels(title, parts, f"{more} {caption}".strip()))
    if isinstance(one, Panels) and isinstance(other, Panels):
        mine, theirs = ({part.title: part for part in panel.parts} for panel in (one, other))
        shared = [name for name in mine if name in theirs]
        if not shared:
            raise InputError("compare: the two pictures have no panel in common.")
        alone = [name for name in (*mine, *theirs) if name not in shared]
        if alone:
            caption = f"{caption} Only one of the two has {', '.join(alone)}.".strip()
        differences = tuple(_difference(mine[name], theirs[name], name) for name in shared)
        return Picture(Panels(title, differences, f"{more} {caption}".strip()))
    raise InputError("compare takes two maps, two grids, or two pictures with several panels.")


def _difference(one: Cells, other: Cells, title: str) -> Cells:
    sizes = [(len(cells.values), len(cells.values[0])) for cells in (one, other)]
    if bool(one.rows.labels) != bool(other.rows.labels):
        raise InputError("A difference needs two pictures of one kind, but only one is pooled.")
    if sizes[0] != sizes[1]:
        given = " and ".join(f"{rows} x {columns}" for rows, columns in sizes)
        raise InputError(f"A difference needs two pictures of one size, but got {given}.")
    values = tuple(
        tuple(after - before for before, after in zip(*rows, strict=True))
        for rows in zip(one.values, other.values, strict=True)
    )
    return replace(
        one,
        title=title,
        values=values,
        rows=_both(one.rows, other.rows),
        columns=_both(one.columns, other.columns),
        caption="",
        marks=frozenset(),
        around_zero=True,
    )


def _both(one: Axis, other: Axis) -> Axis:
    """Merge two axes. Where their labels differ, the merged axis shows both labels."""
    labels = tuple(
        before if before == after else f"{before}/{after}"
        for before, after in zip(one.labels, other.labels, strict=False)
    )
    return replace(one, labels=labels)


def page(title: str, pictures: Sequence[Picture]) -> str:
    """A self-contained HTML page of several pictures.

    >>> picture = head_grid([[0.1, 0.7], [0.4, 0.2]], "nats", title="Entropy")
    >>> page("Two heads", [picture, picture]).count("<figure>")
    2
    """
    figures = "".join(
        f"<figure>{picture.svg()}{_table(picture.drawing)}</figure>" for picture in pictures
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'; img-src data:\">"
        f"<title>{html.escape(printable(title))}</title><style>{_PAGE_STYLE}</style></head>"
        f"<body><main>{figures}</main></body></html>\n"
    )


_PAGE_STYLE = (
    "body{margin:0;font:14px/1.5 system-ui,sans-serif;background:#fff;color:#1a1c26}"
    "main{display:flex;flex-wrap:wrap;gap:24px;padding:24px}"
    "figure{margin:0;max-width:100%}svg{max-width:100%;height:auto;display:block}"
    "details{margin:4px 20px}summary{cursor:pointer;color:#5e6373}"
    ".numbers{overflow:auto;max-height:60vh;max-width:100%}"
    "table{border-collapse:collapse;font:12px ui-monospace,monospace}"
    "th,td{padding:2px 8px;text-align:right;white-space:pre;border-bottom:1px solid #d6d9e2}"
    "@media (prefers-color-scheme:dark){body{background:#16171d;color:#e9eaf0}"
    "summary{color:#a0a3b0}th,td{border-color:#3e414e}}"
)


def _table(drawing: Drawing) -> str:
    """The numbers of a picture as a collapsible table; "" for a large map."""
    if isinstance(drawing, Panels):
        return "".join(map(_table, drawing.parts))
    if isinstance(drawing, Bars):
        head: tuple[str, ...] = ("", drawing.unit)
        rows: Sequence[Sequence[float]] = [(value,) for value in drawing.values]
        names = drawing.labels
    elif drawing.rows.labels and len(drawing.values) * len(drawing.values[0]) <= MAX_TABLE_NUMBERS:
        head, rows = ("", *drawing.columns.labels), drawing.values
        names = drawing.rows.labels
    else:
        return ""
    top = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(
        f"<tr><th>{html.escape(name)}</th>" + "".join(f"<td>{v:.6g}</td>" for v in row) + "</tr>"
        for name, row in zip(names, rows, strict=True)
    )
    return (
        f"<details><summary>The numbers: {html.escape(drawing.title)}</summary>"
        '<div class="numbers"><table><thead><tr>'
        f"{top}</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _without_first(
    values: tuple[tuple[float, ...], ...], what: str
) -> tuple[tuple[tuple[float, ...], ...], str]:
    """The table without its first column, and a note about it."""
    if len(values[0]) < 2:
        raise InputError("There is only one column, so nothing is left to draw without the first.")
    first = [row[0] for row in values if not math.isnan(row[0])]
    share = sum(first) / len(first) if first else 0.0
    note = f"{what} left out: it takes {share:.1%} of the weight on average."
    return tuple(row[1:] for row in values), f"{note} The other weights are unchanged."


def savable(path: str | PathLike[str]) -> Path:
    """Return the path; raise InputError if no picture can be saved there."""
    path = _checked(path)
    if path.suffix.lower() not in (".png", ".svg", ".html", ".txt"):
        raise InputError(
            f"A picture cannot be saved as {path.name!r}: the ending {path.suffix!r} is unknown. "
            "Use .png, .svg, .html or .txt."
        )
    return path


def _checked(path: str | PathLike[str]) -> Path:
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder: give the name of a file.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {str(path.parent)!r} to write {path.name} to.")
    return path


def _write(path: Path, content: bytes) -> None:
    """Write atomically: a temporary file replaces the target."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with temporary.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
