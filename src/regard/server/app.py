"""The paths of the server: what is asked goes to the worker, and its record comes back as JSON."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Coroutine, Iterator
from importlib.resources import files
from typing import Any, TypeVar

from fastapi import FastAPI, Request
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
from regard.server.worker import Busy, Going, Worker

LOG = logging.getLogger("regard.server")
SHADES = 64  # of the ramp that the page draws with
LEFT = 499  # a status that nobody reads: who asked has gone
T = TypeVar("T")


def build(models: Models, worker: Worker, host: str = "127.0.0.1") -> FastAPI:
    """The server as an ASGI application, which lends ``models`` and has ``worker`` run them."""
    app = FastAPI(
        title="regard",
        version=__version__,
        description="Fast attention you can see.",
        docs_url=None,  # they would be fetched from elsewhere; /openapi.json is here
        redoc_url=None,
    )
    app.add_middleware(Gate, host=host)
    _answer_errors(app)
    _serve_page(app)

    @app.get("/health", summary="Whether it runs, and how many requests are in work or in line.")
    async def health() -> Response:
        found = {"status": "ok", "version": __version__, "waiting": worker.waiting}
        return _said(_json(found))

    @app.get("/models", summary="The models, what each can do, its size and its licence.")
    async def known() -> Response:
        return _said(_json(await asyncio.to_thread(models.to_dict)))

    async def answered(request: Request, asked: own.Asked) -> Response:
        def job(going: Going) -> bytes:
            return _json(asked.run(models, going))

        return _said(await _unless_left(request, worker.run(job)))

    @app.post("/translate", summary="Translate a text.")
    async def translate(asked: own.Translate, request: Request) -> Response:
        return await answered(request, asked)

    @app.post("/summarize", summary="Summarize a document.")
    async def summarize(asked: own.Summarize, request: Request) -> Response:
        return await answered(request, asked)

    @app.post("/answer", summary="Answer a question by words of a context.")
    async def answer(asked: own.Answer, request: Request) -> Response:
        return await answered(request, asked)

    @app.post("/complete", summary="Go on from a text, as it is written if asked for.")
    async def complete(asked: own.Complete, request: Request) -> Response:
        if not asked.stream:
            return await answered(request, asked)

        def job(going: Going) -> Iterator[bytes]:
            return (_json(piece) + b"\n" for piece in asked.pieces(models, going))

        lines = worker.each(job)
        # What is wrong with a request shows before the first piece, while a status can say so.
        first = await _unless_left(request, _first(lines))
        return StreamingResponse(_lines(first, lines), media_type="application/x-ndjson")

    @app.post("/look", summary="See what the heads of a model do to a text.")
    async def look(asked: own.Look, request: Request) -> Response:
        return await answered(request, asked)

    @app.post("/explain", summary="Follow one attention step by step, with its numbers.")
    async def explain(asked: own.Explain, request: Request) -> Response:
        return await answered(request, asked)

    return app


# --------------------------------------------------------------------------------------- answering


class _Left(Exception):  # noqa: N818
    """Who asked has gone."""


async def _unless_left(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What work gives, which is cancelled when the connection is closed before."""
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_leaving(request))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise _Left
    finally:
        leaving.cancel()
        working.cancel()


async def _leaving(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _first(lines: AsyncIterator[bytes]) -> bytes:
    return await anext(lines)


async def _lines(first: bytes, rest: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    yield first
    try:
        async for line in rest:
            yield line
    except RegardError as error:
        yield _json(_error(error)) + b"\n"
    except Busy as busy:
        yield _json(_told("Busy", str(busy))) + b"\n"


def _json(found: Any) -> bytes:
    return json.dumps(found, ensure_ascii=False, allow_nan=False).encode()


def _said(body: bytes, status: int = 200) -> Response:
    return Response(body, status, media_type="application/json")


# ------------------------------------------------------------------------------------------ errors


def _told(kind: str, message: str) -> dict[str, Any]:
    return {"error": {"kind": kind, "message": message}}


def _error(error: RegardError) -> dict[str, Any]:
    return _told(type(error).__name__, str(error))


def _answer_errors(app: FastAPI) -> None:
    """Every error is told in one form; what is a bug is logged, and not told."""

    @app.exception_handler(RegardError)
    async def refused(_: Request, error: RegardError) -> Response:
        status = 400 if isinstance(error, InputError) else 422
        return _said(_json(_error(error)), 404 if isinstance(error, UnknownModelError) else status)

    @app.exception_handler(RequestValidationError)
    async def misunderstood(request: Request, error: RequestValidationError) -> Response:
        message = _explained(request.url.path, error.errors()[0])
        return _said(_json(_told("InputError", message)), 400)

    @app.exception_handler(Busy)
    async def busy(_: Request, error: Busy) -> Response:
        return _said(_json(_told("Busy", str(error))), 503)

    @app.exception_handler(_Left)
    async def left(_: Request, __: _Left) -> Response:
        return Response(status_code=LEFT)

    @app.exception_handler(HTTPException)
    async def lost(request: Request, error: HTTPException) -> Response:
        where = f"{request.method} {request.url.path}"
        message = {
            400: "The body cannot be read. Give JSON in UTF-8.",
            404: f"There is no {where} here. See GET /openapi.json for what there is.",
            405: f"There is no {where} here. See GET /openapi.json for what there is.",
        }.get(error.status_code, error.detail)
        said = _said(_json(_told("InputError", message)), error.status_code)
        said.headers.update(error.headers or {})
        return said

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> Response:
        LOG.error("%s %r failed", request.method, request.url.path, exc_info=error)
        message = "This is a bug of the server. Its log says more."
        return _said(_json(_told("Bug", message)), 500)


def _explained(path: str, problem: dict[str, Any]) -> str:
    """What is wrong with a body, what was given, and what to do, in one line."""
    place = [str(part) for part in problem["loc"][1:]]
    name = place[0] if place else "The body"
    match problem["type"]:
        case "json_invalid":
            return f"The body is no JSON: {problem['ctx']['error']}."
        case "missing":
            return f"POST {path} needs {name if place else 'a body in JSON'}, which is missing."
        case "extra_forbidden":
            return f"POST {path} takes no {name!r}. See GET /openapi.json for what it takes."
        case "string_too_long":
            most = problem["ctx"]["max_length"]
            return (
                f"{name} has {len(problem['input']):,} characters, and POST {path} takes {most:,} "
                "at most. Give a part of it; Python and the command line take any length."
            )
    if isinstance(problem["input"], bytes):
        return "The body is not said to be JSON. Send Content-Type: application/json; curl --json."
    given = repr(problem["input"])
    short = given if len(given) <= 40 else f"{given[:39]}…"
    return f"{name} of POST {path} is wrong: {problem['msg'].lower()}, but got {short}."


# ---------------------------------------------------------------------------------------- the page


def _serve_page(app: FastAPI) -> None:
    """The page, from this package alone: nothing of it comes from elsewhere."""
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

    async def part(request: Request) -> Response:
        content, kind = parts[request.url.path]
        return Response(content, media_type=kind, headers={"Cache-Control": "no-cache"})

    for path in parts:
        app.add_api_route(path, part, methods=["GET", "HEAD"], include_in_schema=False)


def _colours() -> str:
    """The colours of our pictures as CSS.

    --paper, --ink ..., shades --s0 to --s63, from the least to the most, and --o0 to --o63, which
    is what is written on each.
    """

    def rules(dark: bool) -> str:
        named, shades = dict(roles(dark)), ramp(dark=dark, signed=False)
        for number in range(SHADES):
            level = number * (LEVELS - 1) // (SHADES - 1)
            named[f"s{number}"] = shades[level]
            named[f"o{number}"] = roles(dark)[written_on(level, signed=False)]
        return ":root{" + "".join(f"--{n}:{hexadecimal(rgb)};" for n, rgb in named.items()) + "}"

    return f"{rules(False)}\n@media (prefers-color-scheme:dark){{{rules(True)}}}\n"
