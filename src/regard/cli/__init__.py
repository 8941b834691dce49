"""The command line. It imports torch only when a command runs, so that --help is fast."""

from __future__ import annotations

import os
import sys
import warnings
from typing import Annotated, Any

import typer
from rich.console import Console

from regard import __version__
from regard.cli import downloads, evaluation, info, interpret, server, tasks, training
from regard.errors import InputError, RegardError

# The error that Typer raises for a wrong command line. It has no public name.
_UsageError: Any = typer.BadParameter.__base__

app = typer.Typer(
    name="regard",
    help="Fast attention you can see.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def main() -> None:
    """Run the command ``regard``. A usage error prints one line and exits with status 2."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]  # some terminals cannot print √
    warnings.showwarning = _warn
    try:
        status = app(prog_name="regard", standalone_mode=False)
        sys.stdout.flush()
    except _UsageError as error:
        message = error.format_message().rstrip(".")
        if message:  # the message is empty if help was printed
            command = error.ctx.command_path if error.ctx else "regard"
            _print_error(f"{message}{'' if message.endswith('?') else '.'} See {command} --help.")
        status = 2
    except RegardError as error:
        _print_error(str(error))
        status = 2 if isinstance(error, InputError) else 1
    except BrokenPipeError:  # the reader of our output has closed the pipe
        # Python flushes stdout at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 1
    except OSError as error:  # such as a full disk
        file = f"{error.filename}: " if error.filename else ""
        _print_error(f"{file}{error.strerror or error}.")
        status = 1
    except KeyboardInterrupt:
        status = 130
    raise SystemExit(status or 0)


def _print_error(message: str) -> None:
    line = " ".join(f"regard: {message}".split())
    Console(stderr=True, soft_wrap=True).print(line, markup=False, highlight=False)


def _warn(message: Warning | str, *_: object, **__: object) -> None:
    # Print to sys.stderr: a progress bar replaces it, and is redrawn below the warning.
    print(" ".join(f"regard: warning: {message}".split()), file=sys.stderr)


def _show_version(value: bool) -> None:
    if value:
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
    (tasks.translate, 'regard translate "The cat is sleeping on the sofa." --to fr'),
    (tasks.summarize, "regard summarize --file report.txt"),
    (tasks.answer, 'regard answer "Who wrote it?" --file book.txt'),
    (tasks.complete, 'regard complete "Once upon a time" --max-new-tokens 60 --seed 7'),
    (interpret.explain, 'regard explain "The cat sat on the mat." --heads 2 --word cat'),
    (interpret.look, 'regard look answer "The cat sat on the mat." --layer 2 --head 3'),
    (server.serve, "regard serve --port 8000 --model translate"),
    (training.train, "regard train recipes/tatoeba-en-fr.toml --set data.root=corpus"),
    (training.finetune, "regard finetune translate mails.tsv --to fr --output runs/mails"),
    (evaluation.evaluate, "regard evaluate translate --data test.tsv --prefix '>>fra<< '"),
    (training.convert, "regard convert openai-community/gpt2 gpt2-small --packing int8"),
    (info.models, "regard models translate"),
    (downloads.get, "regard get opus-mt-en-fr"),
    (info.bench, "regard bench"),
    (info.doctor, "regard doctor"),
)
for _command, _example in _COMMANDS:
    # Join the lines of each paragraph, because Typer wraps them to the terminal's width.
    _parts = (_command.__doc__ or "").split("\n\n")
    _help = "\n\n".join(" ".join(part.split()) for part in _parts)
    app.command(help=_help, epilog=f"Example: {_example}")(_command)
