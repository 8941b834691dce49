"""The commands train, finetune and convert, which write models."""

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


def finetune(
    model: options.ModelArgument,
    data: Annotated[
        Path,
        typer.Argument(
            help="Pairs as .tsv or .jsonl, questions as .jsonl, or text as .txt, by the model."
        ),
    ],
    to: Annotated[
        str | None,
        typer.Option(help="The language of the targets, such as fr.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            help="The folder of the run; by default the names of model and data.",
            show_default=False,
        ),
    ] = None,
    epochs: Annotated[
        float, typer.Option(help="How often each line is learned from.", min=0.01)
    ] = 3.0,
    minutes: Annotated[
        float,
        typer.Option(help="The maximum time; the schedule is shortened to it. 0: no limit.", min=0),
    ] = 30.0,
    fields: options.Fields = ("source", "target"),
    prefix: options.Prefix = None,
    lora: Annotated[
        bool,
        typer.Option(
            "--lora",
            help="Train low-rank updates only, and save them as an adapter that peft reads, too.",
        ),
    ] = False,
    changes: options.Set = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Continue the run; a finished run gets --epochs more."),
    ] = False,
    device: options.Device = "auto",
) -> None:
    """Train a model further on your own data, and show its scores before and after.

    A tenth of the data is held back for the scores. The settings are written to a recipe in the
    folder of the run. A checkpoint is saved every half minute, and at Ctrl-C.
    """
    import shlex
    import sys

    from regard.cli import terminal
    from regard.training.finetuning import RECIPE
    from regard.training.finetuning import finetune as run

    terminal.device(device)
    folder = output or Path(f"{Path(model).name}-{data.name.partition('.')[0]}")
    tuned = run(
        model, data, folder, to=to, prefix=prefix, fields=fields, epochs=epochs, minutes=minutes,
        lora=lora, device=device, resume=resume, overrides=changes or (),
    )  # fmt: skip
    result = tuned.result
    if not result.finished:
        words = [word for word in sys.argv[1:] if word != "--resume"]
        again = shlex.join(["regard", *words, "--resume"])
        typer.echo(f"Stopped after step {result.step}. Continue with: {again}")
        raise typer.Exit(130)
    table = terminal.table("score", "before", "after", numbers=["before", "after"])
    for name, after in result.scores.items():
        table.add_row(name, f"{tuned.before[name]:.4g}", f"{after:.4g}")
    terminal.show(table)
    lower_is_better = tuned.metric == "loss"
    gain = result.scores[tuned.metric] - tuned.before[tuned.metric]
    if gain == 0 or (gain > 0) == lower_is_better:
        typer.echo(
            f"On the held-back data the model did not get better ({tuned.metric}). More data help, "
            f"or another schedule.rate in {folder / RECIPE}."
        )
    typer.echo(f"The model is in {folder / 'model'}, its settings in {folder / RECIPE}.")


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

    An adapter is merged into its base. The tokenizer and the card are copied. If the conversion
    fails, TARGET is unchanged.
    """
    import torch

    from regard.checkpoints.hub import size_of
    from regard.models.conversion import convert as write

    kind = None if dtype is None else getattr(torch, dtype)
    size = shard_size * 2**20
    folder = write(source, target, dtype=kind, packing=packing, shard_bytes=size, force=force)
    typer.echo(f"{folder}: {size_of(folder) / 1e6:,.1f} MB")
