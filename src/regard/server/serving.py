"""The HTTP server and its web page, as ``regard serve`` starts them.

``asking`` says what may be asked, ``worker`` runs it, one request after another, ``app`` puts both
behind HTTP, and ``page.*`` is the page. What comes back are the records of the tasks.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from types import FrameType

from regard.errors import InputError

PATIENCE = 2  # seconds that requests have to end once the server is told to


def listen(host: str, port: int) -> socket.socket:
    """A socket for :func:`serve`, or what is in its way; 0 is a port that is free.

    It is the first thing to do: what is missing shows before PyTorch is loaded.
    """
    for name in ("fastapi", "uvicorn"):
        try:
            import_module(name)
        except ImportError:
            raise InputError(
                f"The server needs {name}, which is not installed: pip install 'regard[server]'."
            ) from None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise InputError(f"There is no host {host!r} here. Say 127.0.0.1 or localhost.") from None
    family, _, _, _, address = found[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A port is free again once its server has ended, though connections may linger.
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise InputError(_refused(host, port, error)) from None
    return listening


def serve(
    listening: socket.socket,
    host: str,
    *,
    models: Sequence[str] = (),
    device: str = "cpu",
    started: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until a signal ends it. ``started`` is told the address, once it can be asked.

    ``models`` are loaded at once; they may be folders.
    """
    import uvicorn

    from regard.server.app import build
    from regard.server.pool import Models
    from regard.server.worker import Worker

    worker = Worker()
    app = build(Models(models, device), worker, host)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started(_address(host, listening.getsockname()[1]))

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            worker.close()
            super().handle_exit(sig, frame)

    # What goes wrong in the application is logged there; uvicorn would say it twice.
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=PATIENCE,
    )
    with suppress(KeyboardInterrupt):  # how such a program ends
        Server(config).run(sockets=[listening])
    if worker.busy:
        os._exit(0)  # nothing can interrupt PyTorch, and nothing is left to be written


def _refused(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} of {host} is in use. Take another one: --port {port + 1}."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Port {port} is not for everybody. Take one from 1024 on, such as --port 8000."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is no address of this machine. Say --host 127.0.0.1."
    return f"Nothing can be served at port {port} of {host}: {error.strerror or error}."


def _address(host: str, port: int) -> str:
    """How a browser on this machine gets there."""
    name = "localhost" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"
