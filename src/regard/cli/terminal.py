"""What commands share: a table, a bar that moves, a device by its name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from regard.errors import InputError

if TYPE_CHECKING:
    import torch

Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1 ...; auto is cuda where there is one.")
]


def device(name: str) -> torch.device:
    """The device of a name, once it is known to be there."""
    import torch

    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        found = torch.device(name)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError):  # the second of a PyTorch built without CUDA
        offered = "cpu, cuda or auto" if torch.cuda.is_available() else "cpu or auto"
        raise InputError(f"PyTorch has no device {name!r} here. Say {offered}.") from None
    return found


def table(*heads: str, numbers: Collection[str] = ()) -> Table:
    """A table without lines, whose columns of numbers end together."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for head in heads:
        made.add_column(head, justify="right" if head in numbers else "left", overflow="fold")
    return made


def show(what: Table) -> None:
    """Print a table; into a pipe or a file as wide as it needs, without spaces at the ends."""
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(what)
        return
    wide = Console(highlight=False, width=1000, no_color=True)
    with wide.capture() as captured:
        wide.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on standard error while there is a terminal to see it."""
    from rich.progress import (
        BarColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),  # moves while a single layer takes minutes
        TimeRemainingColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
