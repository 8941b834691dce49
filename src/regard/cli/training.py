"""Commands that make models and measure them: train, evaluate, convert."""

from __future__ import annotations

import shlex
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    pass

Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the recipe; repeatable."),
]


def train(
    recipe: Annotated[Path, typer.Argument(help="A TOML file; the source has some in recipes/.")],
    changes: Settings = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue from the newest undamaged checkpoint.")
    ] = False,
) -> None:
    """Train a model by a recipe. Ctrl-C saves a checkpoint and stops."""
    from regard.training.run import train as run

    result = run(recipe, resume=resume, overrides=changes or ())
    if result.rank:  # only the first of several processes prints
        raise typer.Exit(0 if result.finished else 130)
    if not result.finished:
        settings = [word for change in changes or () for word in ("--set", change)]
        again = shlex.join(["regard", "train", str(recipe), *settings, "--resume"])
        typer.echo(f"Stopped after step {result.step}. Continue with: {again}")
        raise typer.Exit(130)
    for name, score in result.scores.items():
        typer.echo(f"{name:<14} {score:.4g}")
    typer.echo(f"The model is in {result.folder / 'model'}.")


class Precision(StrEnum):
    """What weights can be stored as."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Packed(StrEnum):
    """How matrices can be packed."""

    int8 = "int8"
    int4 = "int4"


def convert(
    source: Annotated[str, typer.Argument(help="A shipped name, a folder or a hub name.")],
    target: Annotated[Path, typer.Argument(help="The folder to write.")],
    dtype: Annotated[
        Precision | None,
        typer.Option(help="What weights become; as they are if not given.", show_default=False),
    ] = None,
    packing: Annotated[
        Packed | None,
        typer.Option(help="Pack matrices, for regard alone to read.", show_default=False),
    ] = None,
    shard_size: Annotated[
        int, typer.Option(metavar="MB", min=1, help="The most of a file of weights.")
    ] = 5120,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a checkpoint that is there.")
    ] = False,
) -> None:
    """Write a checkpoint again: in another precision, packed, or in shards.

    Tokenizer and card come along. TARGET is there as a whole or, should anything go wrong, as it
    was before.
    """
    import torch

    from regard.checkpoints.hub import size_of
    from regard.models.conversion import convert as write

    made = write(
        source,
        target,
        dtype=None if dtype is None else getattr(torch, dtype.value),
        packing=None if packing is None else packing.value,
        shard_bytes=shard_size * 2**20,
        force=force,
    )
    typer.echo(f"{made}: {size_of(made) / 1e6:,.1f} MB")
