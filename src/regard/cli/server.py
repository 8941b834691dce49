"""The command serve, which serves models over HTTP and as a web page."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from regard.cli import options, terminal


def serve(
    host: Annotated[
        str, typer.Option(help="The address to listen on; 0.0.0.0 lets other machines connect.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(help="The port; 0 selects a free port.", min=0, max=65535)
    ] = 8000,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help=f"Load this model first. Repeatable. {options.ANY_MODEL}", show_default=False
        ),
    ] = None,
    device: options.Device = "cpu",
) -> None:
    r"""Serve a web page and an HTTP API: translate, summarize, answer, complete, look, explain.

    Only this machine can use it, unless --host is set. Models are loaded on first use. Needs
    pip install 'regard\[server]'.
    """
    from regard.server.serving import listen
    from regard.server.serving import serve as run

    with listen(host, port) as listening:
        place = str(terminal.device(device))
        run(listening, host, models=model or (), device=place, started=_print_address)


def _print_address(address: str) -> None:
    Console(soft_wrap=True, highlight=False).print(f"Open {address} (Ctrl-C stops the server)")
