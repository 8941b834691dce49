"""Start the HTTP server.

``api`` defines the requests and ``limits`` their limits. ``worker`` runs them, and ``app`` serves
them over HTTP. ``middleware`` refuses requests of other sites and oversized requests. ``pool`` has
the models, and ``web`` the page.
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
from regard.server.limits import SHUTDOWN_SECONDS


def listen(host: str, port: int) -> socket.socket:
    """A listening socket for :func:`serve`. Port 0 selects a free port.

    A missing package or a port in use is reported here, before PyTorch is loaded.
    """
    for name in ("fastapi", "uvicorn"):
        try:
            import_module(name)
        except ImportError:
            raise InputError(
                f"The server needs {name}, which is not installed: pip install 'regard[server]'."
            ) from None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        raise InputError(
            f"This machine has no host {host!r}. Use --host 127.0.0.1 or --host localhost."
        ) from None
    family, _, _, _, address = addresses[0]
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        # Without SO_REUSEADDR, a new server cannot use the port for some time after one has ended.
        if os.name == "posix":
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(128)
    except OSError as error:
        listening.close()
        raise InputError(_why_not_listening(host, port, error)) from None
    return listening


def serve(
    listening: socket.socket,
    host: str,
    *,
    models: Sequence[str] = (),
    device: str = "cpu",
    started: Callable[[str], None] = lambda _: None,
) -> None:
    """Serve until a signal stops the server.

    ``models`` are names or folders, and are loaded first. ``started`` is called with the URL when
    the server accepts requests.
    """
    import uvicorn

    from regard.server.app import build
    from regard.server.pool import Models
    from regard.server.worker import Worker

    served = Models(models, device)
    worker = Worker(served)
    app = build(served, worker, host)

    class Server(uvicorn.Server):
        async def startup(self, sockets: list[socket.socket] | None = None) -> None:
            await super().startup(sockets)
            started(_address(host, listening.getsockname()[1]))

        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            worker.close()
            super().handle_exit(sig, frame)

    # The application logs its errors; uvicorn would log them again.
    config = uvicorn.Config(
        app,
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_SECONDS,
    )
    with suppress(KeyboardInterrupt):  # Ctrl-C is how a server is stopped
        Server(config).run(sockets=[listening])
    if worker.busy:
        os._exit(0)  # PyTorch cannot be interrupted; no file is open for writing


def _why_not_listening(host: str, port: int, error: OSError) -> str:
    if error.errno == errno.EADDRINUSE:
        return f"Port {port} of {host} is in use. Use another one: --port {port + 1}."
    if error.errno in (errno.EACCES, errno.EPERM):
        return f"Port {port} needs administrator rights. Use one above 1023, such as --port 8000."
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{host} is not an address of this machine. Use --host 127.0.0.1."
    return f"Port {port} of {host} cannot be used: {error.strerror or error}."


def _address(host: str, port: int) -> str:
    """The URL for a browser on this machine."""
    name = "localhost" if host in ("", "0.0.0.0", "::") else f"[{host}]" if ":" in host else host
    return f"http://{name}:{port}"
