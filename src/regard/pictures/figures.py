"""One picture, drawn as terminal text, PNG, SVG or a single HTML file, all from the same record."""

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

__all__ = [
    "Picture", "alignment", "compare", "head_grid", "page", "panels", "pooled_map", "top_keys",
    "weight_map",
]  # fmt: skip

MOST_IN_TABLE = 4096  # numbers that a page also writes out


@dataclass(frozen=True)
class Picture:
    """A picture: what it shows (``drawing``), and how to draw it.

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
        """For a terminal: ``width`` columns; ``color`` is "truecolor", "256" or "none"."""
        return terminal.draw(self.drawing, width, color, dark)

    def svg(self) -> str:
        """As SVG, for light and dark alike; text stays text, and cells say their number."""
        return vector.svg(vector.lay_out(self.drawing))

    def png(self, path: str | PathLike[str], *, dark: bool = False) -> None:
        """Write a PNG image, drawn by matplotlib with the letters that its fonts have."""
        _write(_place(path), vector.png(vector.lay_out(self.drawing), dark=dark))

    def html(self) -> str:
        """A page of its own that needs nothing else, with the numbers written out."""
        return page(self.title, [self])

    def save(self, path: str | PathLike[str]) -> None:
        """Write to a file of the kind its ending says: .png, .svg, .html or .txt."""
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
    """One head's weights [queries, keys], with the token of each row and column.

    ``without_first`` leaves out the first key, on which many heads rest what they do not need.

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
    weight on average. The rest is as it was.
    """
    values = table_of(weights, "weight_map")
    rows = labels_of(queries, len(values), "weight_map(queries=...)")
    columns = labels_of(keys, len(values[0]), "weight_map(keys=...)")
    said = ""
    if without_first:
        values, said = _without_first(values, f"The first key, {columns[0]!r}, is")
        columns = columns[1:]
    return Picture(
        Cells(
            printable(title),
            values,
            Axis("query", len(rows), rows),
            Axis("key", len(columns), columns),
            "weight",
            f"{said} {printable(caption)}".strip(),
        )
    )


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
    """A map of ``queries`` x ``keys`` positions pooled into few cells, as ``Seen.map`` holds it.

    ``first_query`` and ``first_key`` say where a part of a longer text starts. ``without_first``
    leaves out the first column of cells.

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
            f"pooled_map: {queries} queries and {keys} keys are fewer than the map's "
            f"{len(values)} x {len(values[0])} cells."
        )
    row_axis = Axis("query", len(values), start=first_query, span=queries)
    start, span, said = first_key, keys, ""
    if without_first:
        taken = math.ceil(keys / len(values[0]))
        what = f"The first column, keys {first_key:,} to {first_key + taken - 1:,}, is"
        values, said = _without_first(values, what)
        start, span = first_key + taken, keys - taken
    column_axis = Axis("key", len(values[0]), start=start, span=span)
    pooled_anything = queries > len(values) or span > len(values[0])
    unit = "of an average query's weight" if pooled_anything else "weight"
    said = f"{said} {printable(caption)}".strip()
    return Picture(Cells(printable(title), values, row_axis, column_axis, unit, said))


def head_grid(
    values: Table,
    unit: str,
    *,
    title: str,
    layers: Sequence[str] | None = None,
    caption: str = "",
) -> Picture:
    """One number for each head of each layer, [layers, heads]; nan where a layer has fewer heads.

    Numbers of both signs, such as the difference of two models, are drawn around 0.

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
    return Picture(
        Cells(
            printable(title),
            table,
            Axis("layer", len(rows), rows),
            Axis("head", len(heads), heads),
            printable(unit),
            printable(caption),
        )
    )


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
    """The keys one query attends to most, of its row of weights [keys], as bars.

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
    row = table_of([weights.tolist() if hasattr(weights, "tolist") else list(weights)], "top_keys")[
        0
    ]
    labels = labels_of(keys, len(row), "top_keys(keys=...)")
    if any(not value >= 0 for value in row):
        raise InputError("top_keys draws weights, which are 0 or more, but some are not.")
    # Of keys that may not be attended to there is nothing to draw.
    order = [i for i, weight in enumerate(row) if weight > 0 and (i or not without_first)]
    order = sorted(order, key=lambda i: -row[i])[:count]
    if not order:
        raise InputError(f"top_keys: nothing is left to draw of {len(row)} keys, count={count}.")
    said = f"{len(order)} of {len(row)} keys hold {sum(row[i] for i in order):.1%} of the weight."
    if without_first:
        said += f" The first key, {labels[0]!r}, is left out: it takes {row[0]:.1%}."
    return Picture(
        Bars(
            printable(title) or f"What {printable(word)!r} attends to",
            # A word that comes more than once is told apart by its position.
            tuple(
                f"{labels[i]} ({i})" if labels.count(labels[i]) > 1 else labels[i] for i in order
            ),
            tuple(row[i] for i in order),
            "weight",
            f"{said} {printable(caption)}".strip(),
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
    """Which source words each target word attended to, [target, source]; its best one is marked.

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
    return Picture(
        Cells(
            printable(title),
            values,
            Axis("target", len(rows), rows),
            Axis("source", len(columns), columns),
            "weight",
            printable(caption),
            best,
        )
    )


def panels(title: str, pictures: Sequence[Picture], *, caption: str = "") -> Picture:
    """Several maps or grids in one picture, each with its own colours and legend."""
    parts = tuple(picture.drawing for picture in pictures if isinstance(picture.drawing, Cells))
    if not parts or len(parts) < len(pictures):
        raise InputError("panels puts maps and grids side by side, and at least one of them.")
    return Picture(Panels(printable(title), parts, printable(caption)))


def compare(
    first: Picture, second: Picture, *, names: tuple[str, str], title: str = "", caption: str = ""
) -> Picture:
    """Two pictures of one kind, and by how much the second has more (blue) or less (orange).

    Two maps stand beside their difference, in the same colours; of two pictures with several
    panels the differences alone are drawn.
    """
    before, after = (printable(name) for name in names)
    title = printable(title) or f"{after} against {before}"
    said = printable(caption)
    more = f"{after} less {before}: above 0 where {after} has more."
    one, other = first.drawing, second.drawing
    if isinstance(one, Cells) and isinstance(other, Cells):
        limits = (
            min(one.scale[0], other.scale[0]),
            max(one.scale[1], other.scale[1]),
        )
        parts = (
            replace(one, title=before, limits=limits),
            replace(other, title=after, limits=limits),
            _difference(one, other, f"{after} less {before}"),
        )
        return Picture(Panels(title, parts, f"{more} {said}".strip()))
    if isinstance(one, Panels) and isinstance(other, Panels):
        mine, theirs = ({part.title: part for part in panel.parts} for panel in (one, other))
        shared = [name for name in mine if name in theirs]
        if not shared:
            raise InputError("compare: the two pictures have no panel in common.")
        alone = [name for name in (*mine, *theirs) if name not in shared]
        if alone:
            said = f"{said} Only one of the two has {', '.join(alone)}.".strip()
        differences = tuple(_difference(mine[name], theirs[name], name) for name in shared)
        return Picture(Panels(title, differences, f"{more} {said}".strip()))
    raise InputError("compare takes two maps, two grids, or two pictures with several panels.")


def _difference(one: Cells, other: Cells, title: str) -> Cells:
    sizes = [(len(cells.values), len(cells.values[0])) for cells in (one, other)]
    if bool(one.rows.labels) != bool(other.rows.labels):
        raise InputError("A difference needs two of one kind, but one has a row for each token.")
    if sizes[0] != sizes[1]:
        raise InputError(
            "A difference needs two of one size, but {} x {} and {} x {} do not match.".format(
                *sizes[0], *sizes[1]
            )
        )
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
    """One axis for two: where labels differ, both are written."""
    labels = tuple(
        before if before == after else f"{before}/{after}"
        for before, after in zip(one.labels, other.labels, strict=False)
    )
    return replace(one, labels=labels)


def page(title: str, pictures: Sequence[Picture]) -> str:
    """Several pictures in one HTML page that needs no other file and no network.

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
    """The numbers of a picture written out, to be opened under it; none of them for a large map."""
    if isinstance(drawing, Panels):
        return "".join(map(_table, drawing.parts))
    if isinstance(drawing, Bars):
        head: tuple[str, ...] = ("", drawing.unit)
        rows: Sequence[Sequence[float]] = [(value,) for value in drawing.values]
        names = drawing.labels
    elif drawing.rows.labels and len(drawing.values) * len(drawing.values[0]) <= MOST_IN_TABLE:
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
    """The table without its first column, and what to say about it."""
    if len(values[0]) < 2:
        raise InputError("There is one column only: leaving out the first leaves nothing to draw.")
    first = [row[0] for row in values if not math.isnan(row[0])]
    share = sum(first) / len(first) if first else 0.0
    said = f"{what} left out: it takes {share:.1%} of the weight on average. The rest is as it was."
    return tuple(row[1:] for row in values), said


def savable(path: str | PathLike[str]) -> Path:
    """A path that a picture can be written to; what is wrong with another is said."""
    path = _place(path)
    if path.suffix.lower() not in (".png", ".svg", ".html", ".txt"):
        raise InputError(
            f"A picture cannot be saved as {path.name!r}: the ending {path.suffix!r} is unknown. "
            "Use .png, .svg, .html or .txt."
        )
    return path


def _place(path: str | PathLike[str]) -> Path:
    path = Path(path)
    if path.is_dir():
        raise InputError(f"{str(path)!r} is a folder: give the name of a file.")
    if not path.parent.is_dir():
        raise InputError(f"There is no folder {str(path.parent)!r} to write {path.name} to.")
    return path


def _write(path: Path, content: bytes) -> None:
    """Write a whole file or none: beside it first, then in its place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with beside.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
