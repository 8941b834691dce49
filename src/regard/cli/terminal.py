"""Terminal output of the commands (tables, pictures, remarks, progress), and their devices."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    import torch

    from regard.pictures.figures import Picture
    from regard.pictures.terminal import Colouring


def device(name: str) -> torch.device:
    """The torch device of this name. Raise InputError if this machine does not have it."""
    import torch

    from regard.models.loading import check_device

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    check_device(name)
    return torch.device(name)


def table(*heads: str, numbers: Collection[str] = ()) -> Table:
    """A table without lines. The columns named in ``numbers`` are aligned to the right."""
    result = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        result.add_column(head, justify="right" if head in numbers else "left", overflow="fold")
    return result


def facts() -> Table:
    """A table of names and values, without a header."""
    result = table("", "")
    result.show_header = False
    return result


def show(what: Table) -> None:
    """Print a table. In a pipe or a file, lines are not wrapped and have no trailing spaces."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(what)
        return
    wide = Console(highlight=False, width=1000, no_color=True)
    with wide.capture() as captured:
        wide.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def remark(text: str) -> None:
    """Print a remark on standard error."""
    Console(stderr=True).print(text, style="dim", markup=False, highlight=False, soft_wrap=True)


def draw(picture: Picture, *, dark: bool = True) -> None:
    """Print a picture in the terminal's colours. In a pipe, ``COLUMNS`` sets its width."""
    console = Console()
    systems: dict[str | None, Colouring] = {"truecolor": "truecolor", "256": "256"}
    color = "none" if console.no_color else systems.get(console.color_system, "none")
    width = console.width if console.is_terminal else shutil.get_terminal_size().columns
    print(picture.text(width=max(width, 40), color=color, dark=dark), end="", flush=True)


@contextmanager
def progress(what: str, *, hidden: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a progress bar on standard error if that is a terminal."""
    from rich import progress as bars

    console = Console(stderr=True)
    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.TimeElapsedColumn(),  # it moves even while one layer takes minutes
        bars.TimeRemainingColumn(),
    )
    # Results go to standard output as they are: a redirected one would be printed with the bar.
    with bars.Progress(
        *columns, console=console, transient=True, redirect_stdout=False,
        disable=hidden or not console.is_terminal,
    ) as bar:  # fmt: skip
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
