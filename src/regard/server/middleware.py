"""What no request gets past: names that are not ours, pages of others, bodies too large."""

from __future__ import annotations

import ipaddress
import json
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MOST_BYTES = 2**20  # of a body
TOO_LARGE = f"The body has more than {MOST_BYTES:,} bytes. Send less at a time."
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Gate:
    """Stands before an application.

    A page elsewhere can have a name of its own lead to this machine, and so make a browser hand
    over what is served here. So one asks by an address, as localhost, or by this machine's name.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self._names = {"localhost", socket.gethostname().lower(), host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        taken = 0

        async def answer(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        async def take() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > MOST_BYTES:
                raise HTTPException(413, TOO_LARGE)
            return message

        if refused := self._refused(Headers(scope=scope)):
            await _refuse(answer, *refused)
            return
        await self.app(scope, take, answer)

    def _refused(self, headers: Headers) -> tuple[int, str] | None:
        """A status and the reason, where a request is turned away by its head."""
        host = headers.get("host", "")
        if not self._ours(host):
            return 403, (
                f"This server is not called {host[:80]!r}. Ask it by an address, such as "
                "127.0.0.1, or as localhost."
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, f"Pages of {origin[:80]} may not ask this server."
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > MOST_BYTES:
            return 413, TOO_LARGE
        return None

    def _ours(self, host: str) -> bool:
        if any(sign in host for sign in "@/?#"):
            return False
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        if name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


async def _refuse(send: Send, status: int, message: str) -> None:
    body = json.dumps({"error": {"kind": "InputError", "message": message}}).encode()
    kind = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": status, "headers": kind})
    await send({"type": "http.response.body", "body": body})
