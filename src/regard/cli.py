"""The command line: parses, calls, renders. Nothing here imports torch before a command runs."""

from __future__ import annotations

import platform
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from regard import __version__
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


@app.command(epilog='Example: regard explain "The cat sat on the mat." --heads 2 --word cat')
def explain(
    sentence: Annotated[
        str | None,
        typer.Argument(help="Your own; without one, a worked example.", show_default=False),
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of a sentence; 2 if not given.")] = None,
    dim: Annotated[int | None, typer.Option(help="Numbers per word; 8 if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers; 0 if not given.")] = None,
    word: Annotated[
        str | None, typer.Option(help="The word to follow closely.", show_default=False)
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Let no word look at later ones.")
    ] = False,
) -> None:
    """One attention step by step, with all its numbers."""
    from regard.explaining import explain as trace
    from regard.mechanism.masks import Causal

    mask = Causal() if causal else None
    shown = trace(sentence, heads=heads, dim=dim, seed=seed, mask=mask, word=word)
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(shown)
    else:
        print(shown, flush=True)  # plain, and without the spaces that fill a terminal's lines


@app.command(epilog="Example: regard train recipes/tatoeba-en-fr.toml --set data.root=corpus")
def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file; recipes/ has some.")],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the recipe; repeatable."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest whole checkpoint.")
    ] = False,
) -> None:
    """Train a model by a recipe. Ctrl-C saves a checkpoint and leaves."""
    from regard.training import train as run

    result = run(recipe, resume=resume, overrides=changes or ())
    if not result.finished:
        typer.echo(f"Stopped after step {result.step}. Go on with: regard train {recipe} --resume")
        raise typer.Exit(130)
    for name, score in result.scores.items():
        typer.echo(f"{name:<14} {score:.4g}")
    typer.echo(f"The model is in {result.folder / 'model'}.")


@app.command(epilog="Example: regard doctor")
def doctor() -> None:
    """What regard finds on this machine: versions, devices, and which backends can run."""
    import torch

    from regard.mechanism.backends import BACKENDS

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("regard", __version__)
    table.add_row("python", f"{platform.python_version()} on {platform.system()}")
    for name in ("torch", "safetensors", "rich", "typer"):
        table.add_row(name, version(name))
    table.add_row(
        "cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        table.add_row(f"cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        table.add_row("mps", "available")
    for backend in BACKENDS:
        reason = backend.unavailable()
        table.add_row(f"backend {backend.name}", reason or "can run")
    Console(highlight=False).print(table)
