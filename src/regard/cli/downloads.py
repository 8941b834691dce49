"""The command get, for models of the Hugging Face hub."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from regard.cli import terminal
from regard.errors import InputError

if TYPE_CHECKING:
    from regard.checkpoints.downloading import Plan


def get(
    name: Annotated[
        str,
        typer.Argument(help='A recommended model of "regard models", or a name on the hub.'),
    ],
    revision: Annotated[
        str | None,
        typer.Option(
            help="A commit, a branch or a tag; by default main, or the commit that is here.",
            show_default=False,
        ),
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Download a model of the Hugging Face hub, after telling its size and licence.

    The model is pinned: a lock file beside it records its commit and the SHA-256 of each file, and
    every later use checks them. It changes only if you give another --revision. For a model that is
    here, the hashes are checked, and what is damaged is downloaded again.

    An interrupted download is continued by the same command. Weights in pickles are refused.
    """
    from regard.checkpoints import downloading

    with terminal.progress("Asking the hub"):
        plan = downloading.plan(name, revision)
    if plan.here:
        typer.echo(f"{plan.name} is here, and its files are as they were downloaded.")
        typer.echo(f"{plan.revision}\n{plan.folder}")
        return
    _tell(plan)
    if not yes:
        if not sys.stdin.isatty():
            raise InputError("Nothing is downloaded without consent: pass --yes.")
        print("Download it? [y/N] ", end="", flush=True)
        if sys.stdin.readline().strip().lower() not in ("y", "yes"):
            raise typer.Exit(1)
    try:
        with terminal.progress("Downloading") as show:
            folder = downloading.download(plan, show)
    except KeyboardInterrupt:
        terminal.remark(
            f"Stopped: {plan.kept / 1e6:,.1f} of {plan.size / 1e6:,.1f} MB are kept, and the same "
            "command continues."
        )
        raise
    typer.echo(folder)


def _tell(plan: Plan) -> None:
    """Print what a download would bring."""
    from huggingface_hub.constants import ENDPOINT

    from regard.models.catalog import task_of

    task = task_of(plan.architecture) or "none of regard's; look and watch through transformers"
    licence = plan.licence or f"not named: read {ENDPOINT}/{plan.name}"
    if "-nc" in plan.licence:
        licence += " (no commercial use)"
    table = terminal.facts()
    table.add_row("name", plan.name)
    table.add_row("revision", f"{plan.revision} ({plan.reference})")
    table.add_row("architecture", plan.architecture or "not named")
    table.add_row("task", task)
    table.add_row("licence", licence)
    table.add_row("size", f"{plan.size / 1e6:,.1f} MB in {len(plan.files)} files")
    if plan.kept:
        table.add_row("here already", f"{plan.kept / 1e6:,.1f} MB of an interrupted download")
    if plan.gated:
        table.add_row("gated", f"accept its terms at {ENDPOINT}/{plan.name}, and log in")
    if plan.code:
        table.add_row("code", f"{', '.join(plan.code)}: runs only with --trust-remote-code")
    table.add_row("folder", str(plan.folder))
    terminal.show(table)
