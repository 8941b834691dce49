"""The ASGI application: it passes requests to the worker and returns the results as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI
from fastapi import Request as Connection
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response, StreamingResponse
from starlette.exceptions import HTTPException

from regard import __version__
from regard.errors import InputError, RegardError, UnknownModelError
from regard.interpret.overview import MEASURES
from regard.pictures.colours import LEVELS, hexadecimal, ramp, roles, written_on
from regard.server.api import own
from regard.server.middleware import Gate
from regard.server.pool import Models
from regard.server.worker import Busy, Worker

LOG = logging.getLogger("regard.server")
SHADES = 64  # shades in the colour ramp of the page
CLIENT_LEFT = 499  # the status of a request whose client has disconnected; no client sees it
T = TypeVar("T")


def build(models: Models, worker: Worker, host: str = "127.0.0.1") -> FastAPI:
    """The server as an ASGI application: it lists ``models``, and ``worker`` runs the requests."""
    app = FastAPI(
        title="regard",
        version=__version__,
        description="Fast attention you can see.",
        docs_url=None,  # FastAPI's documentation pages load files from other sites
        redoc_url=None,
    )
    app.add_middleware(Gate, host=host)
    _add_error_handlers(app)
    _add_page(app)

    @app.get("/health", summary="The status, and the number of requests that run or wait.")
    async def health() -> Response:
        return _json({"status": "ok", "version": __version__, "waiting": worker.waiting})

    @app.get("/models", summary="Each model with its tasks, size and licence.")
    async def list_models() -> Response:
        return _json(await asyncio.to_thread(models.to_dict))

    for kind in own.REQUESTS:
        app.post(kind.path, summary=kind.summary)(_endpoint(kind, worker))
    return app


# --------------------------------------------------------------------------------------- responses


def _endpoint(
    kind: type[own.Request], worker: Worker
) -> Callable[[own.Request, Connection], Awaitable[Response]]:
    """The route handler for one kind of request."""

    async def respond(request: own.Request, connection: Connection) -> Response:
        if not (isinstance(request, own.Complete) and request.stream):
            return _json(await _while_connected(connection, worker.run(request)))
        pieces = worker.stream(request)
        # Wait for the first piece: an error before it can still set the status.
        first = await _while_connected(connection, anext(pieces))
        return StreamingResponse(_lines(first, pieces), media_type="application/x-ndjson")

    respond.__annotations__["request"] = kind  # FastAPI reads the type of the body here
    return respond


class _ClientLeft(Exception):  # noqa: N818
    """The client closed its connection."""


async def _while_connected(connection: Connection, work: Awaitable[T]) -> T:
    """The result of ``work``, which is cancelled if the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.create_task(_disconnected(connection))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise _ClientLeft
    finally:
        leaving.cancel()
        working.cancel()


async def _disconnected(connection: Connection) -> None:
    while (await connection.receive())["type"] != "http.disconnect":
        pass


async def _lines(first: Any, rest: AsyncIterator[Any]) -> AsyncIterator[bytes]:
    yield _line(first)
    try:
        async for piece in rest:
            yield _line(piece)
    except (RegardError, Busy) as error:
        yield _line(_error_body(type(error).__name__, str(error)))


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n"


def _json(value: Any, status: int = 200) -> Response:
    return Response(_line(value).rstrip(), status, media_type="application/json")


# ------------------------------------------------------------------------------------------ errors


def _error_body(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}


def _add_error_handlers(app: FastAPI) -> None:
    """Return all errors in the same JSON form. The details of a bug go only to the log."""

    def refuse(status: int, message: str, kind: str = "InputError") -> Response:
        return _json(_error_body(kind, message), status)

    @app.exception_handler(RegardError)
    async def on_refusal(_: Connection, error: RegardError) -> Response:
        status = 400 if isinstance(error, InputError) else 422
        status = 404 if isinstance(error, UnknownModelError) else status
        return refuse(status, str(error), type(error).__name__)

    @app.exception_handler(RequestValidationError)
    async def on_invalid_body(connection: Connection, error: RequestValidationError) -> Response:
        return refuse(400, _validation_message(connection.url.path, error.errors()[0]))

    @app.exception_handler(Busy)
    async def on_busy(_: Connection, error: Busy) -> Response:
        return refuse(503, str(error), "Busy")

    @app.exception_handler(_ClientLeft)
    async def on_client_left(_: Connection, __: _ClientLeft) -> Response:
        return Response(status_code=CLIENT_LEFT)

    @app.exception_handler(HTTPException)
    async def on_http_error(connection: Connection, error: HTTPException) -> Response:
        place = f"{connection.method} {connection.url.path}"
        unknown = f"There is no {place}. GET /openapi.json lists all paths."
        unread = "The body cannot be read. Send JSON in UTF-8."
        messages = {400: unread, 404: unknown, 405: unknown}
        response = refuse(error.status_code, messages.get(error.status_code, error.detail))
        response.headers.update(error.headers or {})
        return response

    @app.exception_handler(Exception)
    async def on_bug(connection: Connection, error: Exception) -> Response:
        LOG.error("%s %r failed", connection.method, connection.url.path, exc_info=error)
        return refuse(500, "This is a bug in the server. Its log has the details.", "Bug")


def _validation_message(path: str, problem: dict[str, Any]) -> str:
    """One line on an invalid body: what is wrong, what was given, and what to do."""
    fields = [str(part) for part in problem["loc"][1:]]
    name = fields[0] if fields else "The body"
    match problem["type"]:
        case "json_invalid":
            return f"The body is not valid JSON: {problem['ctx']['error']}."
        case "missing":
            needed = name if fields else "a body in JSON"
            return f"POST {path} needs {needed}, which is missing."
        case "extra_forbidden":
            return f"POST {path} has no field {name!r}. GET /openapi.json lists its fields."
        case "value_error":
            return f"{name} {problem['ctx']['error']}"
        case "string_too_long":
            most = problem["ctx"]["max_length"]
            return (
                f"{name} has {len(problem['input']):,} characters; POST {path} takes at most "
                f"{most:,}. Send a part of it. Python and the command line have no limit."
            )
    if isinstance(problem["input"], bytes):
        return "The body is not marked as JSON. Send Content-Type: application/json (curl --json)."
    given = json.dumps(problem["input"], ensure_ascii=False)
    given = given.encode(errors="backslashreplace").decode()  # UTF-8 has no lone surrogates
    short = given if len(given) <= 40 else f"{given[:39]}…"
    return f"{name} of POST {path} is wrong: {problem['msg'].lower()}, but got {short}."


# ---------------------------------------------------------------------------------------- the page


def _add_page(app: FastAPI) -> None:
    """Serve the page. All its files are in this package; it loads no files of other sites."""
    here = files("regard.server") / "web"
    known = {"version": __version__, "measures": {n: m._asdict() for n, m in MEASURES.items()}}
    facts = json.dumps(known).replace("<", "\\u003c")
    page = here.joinpath("page.html").read_text(encoding="utf-8").replace("{{known}}", facts)
    parts = {
        "/": (page.encode(), "text/html"),
        "/page.js": (here.joinpath("page.js").read_bytes(), "text/javascript"),
        "/page.css": (here.joinpath("page.css").read_bytes(), "text/css"),
        "/colours.css": (_colours().encode(), "text/css"),
    }

    async def part(request: Connection) -> Response:
        content, kind = parts[request.url.path]
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    for path in parts:
        app.add_api_route(path, part, methods=["GET", "HEAD"], include_in_schema=False)


def _colours() -> str:
    """The colours of pictures as CSS variables.

    The variables are --paper, --ink, ..., the shades --s0 (weight 0) to --s63 (the largest weight),
    and --o0 to --o63, the colour of text on each shade.
    """

    def rules(dark: bool) -> str:
        named, shades = dict(roles(dark)), ramp(dark=dark, signed=False)
        for number in range(SHADES):
            level = number * (LEVELS - 1) // (SHADES - 1)
            named[f"s{number}"] = shades[level]
            named[f"o{number}"] = roles(dark)[written_on(level, signed=False)]
        return ":root{" + "".join(f"--{n}:{hexadecimal(rgb)};" for n, rgb in named.items()) + "}"

    return f"{rules(False)}\n@media (prefers-color-scheme:dark){{{rules(True)}}}\n"
