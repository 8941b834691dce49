"""The command that serves models and the web page: serve."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from regard.cli import tasks, terminal


def serve(
    host: Annotated[
        str, typer.Option(help="Where to listen; 0.0.0.0 is for all machines around.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes one that is free.", min=0, max=65535)] = 8000,
    model: Annotated[
        list[str] | None,
        typer.Option(help=f"Load this one at once; repeatable. {tasks.MODEL}", show_default=False),
    ] = None,
    device: terminal.Device = "cpu",
) -> None:
    r"""A web page and an HTTP API: translate, summarize, answer, complete, look and explain.

    Models are loaded when they are first asked for, and kept. Requests wait for each other. It is
    for this machine alone unless --host says otherwise. Needs pip install 'regard\[server]'.
    """
    from regard.server.serving import listen
    from regard.server.serving import serve as run

    with listen(host, port) as listening:
        place = str(terminal.device(device))
        run(listening, host, models=model or (), device=place, started=_say)


def _say(address: str) -> None:
    Console(soft_wrap=True, highlight=False).print(f"Open {address} (Ctrl-C ends it)")
