"""The command line: parses, calls, renders. Nothing here imports torch before a command runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from regard import __version__
from regard.cli import knowing, making, seeing
from regard.errors import InputError, RegardError

app = typer.Typer(
    name="regard",
    help="Fast attention you can see.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The command ``regard``. Mistakes in its use end with one line and status 2."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without √
    try:
        app(prog_name="regard")
    except RegardError as error:
        Console(stderr=True, soft_wrap=True).print(
            f"regard: {error}", markup=False, highlight=False
        )
        raise SystemExit(2 if isinstance(error, InputError) else 1) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"regard {__version__}")
        raise typer.Exit


@app.callback()
def _regard(
    _version: Annotated[
        bool,
        typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version."),
    ] = False,
) -> None:
    pass


_COMMANDS = (
    (seeing.explain, 'regard explain "The cat sat on the mat." --heads 2 --word cat'),
    (making.train, "regard train recipes/tatoeba-en-fr.toml --set data.root=corpus"),
    (knowing.doctor, "regard doctor"),
)
for _command, _example in _COMMANDS:
    app.command(epilog=f"Example: {_example}")(_command)
