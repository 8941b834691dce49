"""Commands that make models: train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    if result.rank:  # the first of several processes speaks for all
        raise typer.Exit(0 if result.finished else 130)
    if not result.finished:
        typer.echo(f"Stopped after step {result.step}. Go on with: regard train {recipe} --resume")
        raise typer.Exit(130)
    for name, score in result.scores.items():
        typer.echo(f"{name:<14} {score:.4g}")
    typer.echo(f"The model is in {result.folder / 'model'}.")
