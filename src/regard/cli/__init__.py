"""The command line: parses, calls, renders. Nothing here imports torch before a command runs."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, Any

import typer
from rich.console import Console

from regard import __version__
from regard.cli import evaluation, info, interpret, server, tasks, training
from regard.errors import InputError, RegardError

# What Typer raises where a command is used wrongly; it has no public name for all of it.
_Misuse: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="regard",
    help="Fast attention you can see.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """The command ``regard``. Mistakes in its use end with one line and status 2."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # a terminal without √
    warnings.showwarning = _warn
    try:
        status = app(prog_name="regard", standalone_mode=False)
        sys.stdout.flush()
    except _Misuse as error:
        said = error.format_message().rstrip(".")
        if said:  # it is empty where help was printed
            where = error.ctx.command_path if error.ctx else "regard"
            _complain(f"{said}{'' if said.endswith('?') else '.'} See {where} --help.")
        status = 2
    except RegardError as error:
        _complain(str(error))
        status = 2 if isinstance(error, InputError) else 1
    except BrokenPipeError:  # nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush
        status = 1
    except OSError as error:  # a folder that cannot be written to, a disk that is full
        where = f"{error.filename}: " if error.filename else ""
        _complain(f"{where}{error.strerror or error}.")
        status = 1
    except KeyboardInterrupt:
        status = 130
    raise SystemExit(status or 0)


def _complain(message: str) -> None:
    line = " ".join(f"regard: {message}".split())
    Console(stderr=True, soft_wrap=True).print(line, markup=False, highlight=False)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    # By way of sys.stderr: a progress bar stands there, and moves aside.
    print(" ".join(f"regard: warning: {message}".split()), file=sys.stderr)


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
    (tasks.translate, 'regard translate "The cat sat on the mat." --to fr'),
    (tasks.summarize, "regard summarize --file report.txt"),
    (tasks.answer, 'regard answer "Who wrote it?" --file book.txt'),
    (tasks.complete, 'regard complete "Once upon a time" --length 60 --seed 7'),
    (interpret.explain, 'regard explain "The cat sat on the mat." --heads 2 --word cat'),
    (interpret.look, 'regard look answer "The cat sat on the mat." --layer 2 --head 3'),
    (server.serve, "regard serve --port 8000 --model translate"),
    (training.train, "regard train recipes/tatoeba-en-fr.toml --set data.root=corpus"),
    (evaluation.evaluate, "regard evaluate translate --data test.tsv --prefix '>>fra<< '"),
    (training.convert, "regard convert openai-community/gpt2 gpt2-small --packing int8"),
    (info.models, "regard models translate"),
    (info.bench, "regard bench"),
    (info.doctor, "regard doctor"),
)
for _command, _example in _COMMANDS:
    # As paragraphs: where a docstring's lines end says nothing about a terminal's.
    _parts = (_command.__doc__ or "").split("\n\n")
    _help = "\n\n".join(" ".join(part.split()) for part in _parts)
    app.command(help=_help, epilog=f"Example: {_example}")(_command)
