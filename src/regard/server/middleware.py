"""Middleware that refuses unknown host names, pages of other sites, and oversized bodies."""

from __future__ import annotations

import ipaddress
import json
import socket
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from regard.server.limits import MAX_BODY_BYTES

TOO_LARGE = f"The body has more than {MAX_BODY_BYTES:,} bytes. Send less at a time."
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; "
    "connect-src 'self'; img-src data: blob:; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'none'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


class Gate:
    """ASGI middleware that checks each request before the application gets it.

    Another site can point its own host name at this machine, so that a browser lets its pages read
    the responses of this server (DNS rebinding). So the Host header must be an IP address,
    localhost, or the name of this machine or of the server.
    """

    def __init__(self, app: ASGIApp, host: str) -> None:
        self.app = app
        self._names = {"localhost", socket.gethostname().lower(), host.lower()}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        received = 0

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(HEADERS)
            await send(message)

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > MAX_BODY_BYTES:
                raise HTTPException(413, TOO_LARGE)
            return message

        app = self.app
        if refused := self._refused(Headers(scope=scope)):
            status, message = refused
            error = {"error": {"kind": "InputError", "message": message}}
            app = Response(json.dumps(error), status, media_type="application/json")
        await app(scope, receive_limited, send_with_headers)

    def _refused(self, headers: Headers) -> tuple[int, str] | None:
        """The status and the reason if the headers of a request are refused, else None."""
        host = headers.get("host", "")
        if not self._is_our_name(host):
            return 403, (
                f"This server does not answer to the name {host[:80]!r}. Use localhost, or an "
                "address such as 127.0.0.1."
            )
        origin = headers.get("origin")
        if origin is not None and origin.partition("://")[2] != host:
            return 403, f"Pages of {origin[:80]} may not use this server."
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > MAX_BODY_BYTES:
            return 413, TOO_LARGE
        return None

    def _is_our_name(self, host: str) -> bool:
        if any(sign in host for sign in "@/?#"):
            return False
        try:
            name = urlsplit(f"//{host}").hostname or ""
            return name in self._names or bool(ipaddress.ip_address(name))
        except ValueError:
            return False
