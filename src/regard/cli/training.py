"""The commands train and convert, which write models."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.cli import options


def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file, such as those in recipes/.")],
    changes: options.Set = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest complete checkpoint.")
    ] = False,
) -> None:
    """Train a model from a recipe. Ctrl-C saves a checkpoint and stops."""
    from regard.training.run import train as run

    result = run(recipe, resume=resume, overrides=changes or ())
    if result.rank:  # only the process of rank 0 prints
        raise typer.Exit(0 if result.finished else 130)
    if not result.finished:
        settings = [word for change in changes or () for word in ("--set", change)]
        again = shlex.join(["regard", "train", str(recipe), *settings, "--resume"])
        typer.echo(f"Stopped after step {result.step}. Continue with: {again}")
        raise typer.Exit(130)
    for name, score in result.scores.items():
        typer.echo(f"{name:<14} {score:.4g}")
    typer.echo(f"The model is in {result.folder / 'model'}.")


def convert(
    source: options.ModelArgument,
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        typer.Option(help="The data type of the weights; unchanged by default."),
    ] = None,
    packing: Annotated[
        Literal["int8", "int4"] | None,
        typer.Option(help="Pack the matrices. Only regard can read the result."),
    ] = None,
    shard_size: Annotated[
        int, typer.Option(metavar="MB", min=1, help="The maximum size of a file of weights.")
    ] = 5120,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing checkpoint.")] = False,
) -> None:
    """Convert a checkpoint to another data type, a packed format or smaller shards.

    The tokenizer and the card are copied. If the conversion fails, TARGET is unchanged.
    """
    import torch

    from regard.checkpoints.hub import size_of
    from regard.models.conversion import convert as write

    kind = None if dtype is None else getattr(torch, dtype)
    size = shard_size * 2**20
    folder = write(source, target, dtype=kind, packing=packing, shard_bytes=size, force=force)
    typer.echo(f"{folder}: {size_of(folder) / 1e6:,.1f} MB")
