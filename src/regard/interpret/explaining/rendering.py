"""Render a Trace for a terminal, as plain text and as HTML."""

from __future__ import annotations

import html as markup
import io
import math
import shutil
from collections.abc import Iterator, Sequence
from itertools import accumulate, islice, pairwise
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from torch import Tensor

    from regard.interpret.explaining.trace import Numbers, Step, Trace

INDENT = 3
GAP = 2  # between two columns of a table
MAX_ROWS = 16  # rows of a table; ⋮ replaces rows in the middle of a longer table
MAX_HEADS = 4
MAX_WEIGHTS = 16  # elements of a matrix W; larger matrices are not printed
LABEL_WIDTH = 16  # longer words are truncated
EIGHTHS = " ▏▎▍▌▋▊▉█"


def text(trace: Trace) -> str:
    """The trace as plain text, as wide as the terminal."""
    width = min(max(shutil.get_terminal_size().columns, 60), 120)
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    with console.capture() as capture:
        console.print(Group(*terminal(trace, width)))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def terminal(trace: Trace, width: int) -> Iterator[RenderableType]:
    """The parts of the trace, from top to bottom, for a terminal of ``width`` columns."""
    yield Text(f"How attention reads “{' '.join(trace.tokens)}”", style="bold")
    yield Text(f"{trace.title}. Followed closely: {trace.word}", style="dim")
    for place, step in enumerate(trace.steps, 1):
        yield Text()
        yield Text.assemble((f"{place}  {step.name}", "bold"))
        shapes = _shapes(step, trace)
        between = "    " if INDENT + len(step.formula) + 4 + len(shapes) <= width else "\n"
        formula = Text.assemble((step.formula, "cyan"), (between + shapes if shapes else "", "dim"))
        yield Padding(formula, (0, 0, 0, INDENT))
        # Prose is easier to read in short lines.
        yield Padding(Text(step.sentence), (0, max(0, width - 80), 0, INDENT))
        for piece in _pieces(step, trace, width - INDENT):
            yield Text()
            yield Padding(piece, (0, 0, 0, INDENT))
    yield Text()
    good = trace.agreement.holds
    yield Text("✓  Check" if good else "✗  Check", "bold green" if good else "bold red")
    yield Padding(Text(str(trace.agreement)), (0, max(0, width - 80), 0, INDENT))


def _shapes(step: Step, trace: Trace) -> str:
    """The shapes of a step's matrices, to print after its formula."""
    shapes = {
        symbol: shape[len(trace.shown) == 1 and len(shape) == 3 :]
        for symbol, shape in step.shapes.items()
        if " " not in symbol
    }
    return ", ".join(f"{symbol} {' × '.join(map(str, shape))}" for symbol, shape in shapes.items())


def _pieces(step: Step, trace: Trace, width: int) -> Iterator[RenderableType]:
    small: list[tuple[Table, int]] = []  # tables to print side by side, with their widths
    for numbers in step.numbers:
        if _too_large(numbers):
            continue
        named = islice(_by_head(numbers, trace), MAX_HEADS)
        small += [_table(name, numbers, matrix, trace, width) for name, matrix in named]
        if numbers.symbol in ("W_V", "W_O"):
            yield _beside(small, width)
            small = []
    charted = step.bars is not None and len(trace.shown) > 1  # the bars show the same numbers
    if small and not charted:
        yield _beside(small, width)
    if step.notes:
        yield Text("\n".join(step.notes), style="italic")
    if step.bars is not None:
        yield _bars(step.bars, width)
    per_head = any(numbers.values.dim() == 3 for numbers in step.numbers) or charted
    if per_head and len(trace.shown) > MAX_HEADS:
        yield Text(f"(heads {MAX_HEADS + 1} to {trace.heads} are not shown)", style="dim")


def _by_head(numbers: Numbers, trace: Trace) -> Iterator[tuple[str, Tensor]]:
    """The name and values of a matrix, or of the matrix of each head."""
    if numbers.values.dim() == 2:
        yield numbers.symbol, numbers.values
        return
    for head, matrix in zip(trace.shown, numbers.values, strict=False):
        yield f"{numbers.symbol}, {head}" if trace.heads > 1 else numbers.symbol, matrix


def _too_large(numbers: Numbers) -> bool:
    return numbers.symbol.startswith("W_") and numbers.values.numel() > MAX_WEIGHTS


def _table(
    name: str, numbers: Numbers, matrix: Tensor, trace: Trace, width: int
) -> tuple[Table, int]:
    sums = numbers.symbol == "A"
    of_queries = numbers.rows == trace.tokens and numbers.symbol not in ("K", "V")
    rows = _shown_rows(len(numbers.rows), trace.focus if of_queries else 0)
    label = max(
        cell_len(name), *(cell_len(_truncated(numbers.rows[r])) + 2 for r in rows if r >= 0)
    )
    decimals = _decimals(matrix)
    for fewer in (decimals, min(decimals, 2)):  # drop decimals before columns
        cells = [[_number(value, fewer) for value in row] for row in matrix.tolist()]
        widths = [
            max(cell_len(_truncated(head)), *(len(cells[r][c]) for r in rows if r >= 0))
            for c, head in enumerate(numbers.columns)
        ]
        columns = _shown_columns(widths, width - label - sums * (GAP + 5))
        if -1 not in columns:
            break

    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column(Text(name, style="cyan"), min_width=label, no_wrap=True)
    for c in columns:
        head = "…" if c < 0 else _truncated(numbers.columns[c])
        narrow = 1 if c < 0 else widths[c]
        table.add_column(Text(head), justify="right", no_wrap=True, min_width=narrow)
    if sums:
        table.add_column("sum", justify="right", no_wrap=True)
    for r in rows:
        if r < 0:
            table.add_row("  ⋮")
            continue
        followed = of_queries and r == trace.focus
        line = [Text(("▸ " if followed else "  ") + _truncated(numbers.rows[r]))]
        for c in columns:
            value = 0.0 if c < 0 else matrix[r, c].item()
            style = _shade(value) if sums and c >= 0 else "dim" if value == -math.inf else ""
            line.append(Text("…" if c < 0 else cells[r][c], style=style))
        if sums:
            line.append(Text(f"{matrix[r].sum().item():.3f}", style="dim"))
        table.add_row(*line, style="bold" if followed else "")
    shown = sum(1 if c < 0 else widths[c] for c in columns) + len(columns) * GAP
    return table, label + shown + sums * (GAP + 5)


def _beside(tables: Sequence[tuple[Table, int]], width: int) -> RenderableType:
    """Tables side by side, wrapped to new lines at ``width``."""
    lines: list[list[Table]] = [[]]
    used = 0
    for table, size in tables:
        if lines[-1] and used + 2 * GAP + size > width:
            lines.append([])
            used = 0
        used += size + (2 * GAP if lines[-1] else 0)
        lines[-1].append(table)
    pieces: list[RenderableType] = []
    for line in lines:
        grid = Table.grid(padding=(0, 2 * GAP, 0, 0))
        for _ in line:
            grid.add_column(no_wrap=True)
        grid.add_row(*line)
        pieces += [Text(), grid] if pieces else [grid]
    return Group(*pieces)


def _bars(numbers: Numbers, width: int) -> Table:
    """A bar chart of one word's weights, with a line for each key and a column for each head."""
    values = numbers.values[:, :MAX_HEADS]  # [keys, heads]
    heads = values.shape[1]
    rows = _shown_rows(len(numbers.rows), int(values[:, 0].argmax()))
    label = max(cell_len(numbers.symbol), *(cell_len(_truncated(word)) for word in numbers.rows))
    size = max(4, min(32, (width - label) // heads - 6 - 2 * GAP))
    most = max(values.max().item(), 1e-9)
    table = Table(box=None, pad_edge=False, padding=(0, GAP, 0, 0), header_style="dim")
    table.add_column(Text(numbers.symbol, style="cyan"), min_width=label, no_wrap=True)
    for head in range(heads):
        table.add_column("", justify="right", no_wrap=True)
        name = numbers.columns[head] if heads > 1 else ""
        table.add_column(name, no_wrap=True, min_width=size)
    for r in rows:
        if r < 0:
            table.add_row("⋮")
            continue
        line = [Text(_truncated(numbers.rows[r]))]
        for weight in values[r].tolist():
            line += [Text(f"{weight:.3f}"), Text(_bar(weight / most, size), style="blue")]
        table.add_row(*line)
    return table


def _bar(share: float, size: int) -> str:
    eighths = round(share * size * 8)
    return "█" * (eighths // 8) + EIGHTHS[eighths % 8].strip()


def _shown_rows(count: int, focus: int) -> list[int]:
    """The rows to show: the first, three around the followed word, the last two; -1 is a gap."""
    if count <= MAX_ROWS:
        return list(range(count))
    chosen = {*range(MAX_ROWS - 6), focus - 1, focus, focus + 1, count - 2, count - 1}
    return _with_gaps(sorted(place for place in chosen if 0 <= place < count))


def _with_gaps(places: list[int]) -> list[int]:
    result = places[:1]
    for before, after in pairwise(places):
        result += [after] if after == before + 1 else [-1, after]
    return result


def _shown_columns(widths: list[int], room: int) -> list[int]:
    """The columns to show: all if they fit, else the first ones and the last; -1 is a gap."""
    if sum(widths) + GAP * len(widths) <= room:
        return list(range(len(widths)))
    room -= 1 + GAP + widths[-1] + GAP
    ends = accumulate(width + GAP for width in widths[:-1])
    chosen = [place for place, end in enumerate(ends) if end <= room]
    return _with_gaps([*chosen, len(widths) - 1])


def _truncated(word: str) -> str:
    if cell_len(word) <= LABEL_WIDTH:
        return word
    return set_cell_size(word, LABEL_WIDTH - 1).rstrip() + "…"


def _decimals(matrix: Tensor) -> int:
    """The decimals needed to print all numbers exactly, up to 3; -1 for scientific notation."""
    finite = matrix[matrix.isfinite()].double().abs()
    most = finite.max().item() if finite.numel() else 0.0
    if most and not 1e-3 <= most < 1e5:
        return -1
    for decimals in (1, 2):
        if bool(((finite - finite.round(decimals=decimals)).abs() < 1e-6 * max(most, 1)).all()):
            return decimals
    return 3


def _number(value: float, decimals: int) -> str:
    if value == -math.inf:
        return "-∞"
    shown = f"{value:.1e}" if decimals < 0 else f"{value:.{decimals}f}"
    return shown.lstrip("-") if not float(shown) else shown  # no minus before a zero


def _shade(weight: float) -> str:
    """The style of a weight: a background from white (0) to blue (1), with readable text."""
    if weight == 0:
        return "dim"
    light = [round(255 + (deep - 255) * min(1.0, weight) ** 0.7) for deep in (20, 60, 160)]
    front = "#ffffff" if weight > 0.45 else "#000000"
    return f"{front} on rgb({light[0]},{light[1]},{light[2]})"


def html(trace: Trace) -> str:
    """The trace for a notebook, with all numbers. It has no scripts and no external files."""
    quote = markup.escape
    parts = [
        f"<h3>“{quote(' '.join(trace.tokens))}”</h3>",
        f"<p>{quote(trace.title)}. Followed closely: <b>{quote(trace.word)}</b></p>",
    ]
    for place, step in enumerate(trace.steps, 1):
        parts.append(f"<h4>{place}. {quote(step.name)}</h4>")
        parts.append(f"<p><code>{quote(step.formula)}</code><br>{quote(step.sentence)}</p>")
        for numbers in step.numbers:
            if not _too_large(numbers):
                parts += [
                    _html_table(name, numbers, matrix, trace.word)
                    for name, matrix in _by_head(numbers, trace)
                ]
        parts += [f"<p><i>{quote(note)}</i></p>" for note in step.notes]
    mark = "✓" if trace.agreement.holds else "✗"
    parts.append(f"<p>{mark} {quote(str(trace.agreement))}</p>")
    return f'<div class="regard-trace"><style>{_STYLE}</style>{"".join(parts)}</div>'


_STYLE = (
    ".regard-trace{font:14px/1.5 system-ui,sans-serif}"
    ".regard-trace .numbers{overflow-x:auto;margin:0 0 12px}"
    ".regard-trace table{border-collapse:collapse;font:12px ui-monospace,monospace}"
    ".regard-trace th,.regard-trace td{padding:1px 6px;text-align:right;white-space:pre}"
    ".regard-trace thead th{font-weight:normal;opacity:.7}"
)


def _html_table(name: str, numbers: Numbers, matrix: Tensor, word: str) -> str:
    decimals = _decimals(matrix)
    head = "".join(f"<th>{markup.escape(column)}</th>" for column in numbers.columns)
    lines = []
    for row, values in zip(numbers.rows, matrix.tolist(), strict=True):
        cells = []
        for value in values:
            style = ""
            if numbers.symbol == "A" and value:
                ink = ";color:#fff" if value > 0.45 else ""
                style = f' style="background:rgb(20 60 160/{value:.3f}){ink}"'
            cells.append(f"<td{style}>{_number(value, decimals)}</td>")
        label = f"<b>{markup.escape(row)}</b>" if row == word else markup.escape(row)
        lines.append(f"<tr><th>{label}</th>{''.join(cells)}</tr>")
    return (
        f'<div class="numbers"><table><thead><tr><th>{markup.escape(name)}</th>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )
