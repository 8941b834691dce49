"""A single thread runs all requests in order; requests with equal batch keys run together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, InvalidStateError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol, Self, cast

from regard.server.limits import MAX_BATCH, MAX_WAITING
from regard.server.pool import Models
from regard.tasks.writing import Check


class Request(Protocol):
    """What a worker runs: data, and the function that runs it."""

    @property
    def batch_key(self) -> Hashable | None:
        """Requests with equal keys may run together. A request whose key is None runs alone."""

    @classmethod
    def run_many(cls, requests: Sequence[Self], models: Models, check: Check) -> Sequence[Any]:
        """The result of each request. ``check`` raises if all clients have disconnected."""


class StreamedRequest(Request, Protocol):
    """A request whose result comes in pieces."""

    def pieces(self, models: Models, check: Check) -> Iterator[Any]: ...


class Busy(Exception):  # noqa: N818  # neither a bug nor a mistake of the client
    """Too many requests are waiting, or the server is closing."""


class ClientsLeft(Exception):  # noqa: N818
    """All clients of the running requests have disconnected."""


@dataclass(frozen=True, slots=True, eq=False)
class _Ticket:
    """A request that waits or runs. If its client disconnects, ``result`` is cancelled."""

    request: Request
    emit: Callable[[Any], object] | None = None  # called with each piece of a streamed request
    result: Future[Any] = field(default_factory=Future)

    def finish(self, result: Any) -> None:
        with suppress(InvalidStateError):  # the client has disconnected
            if isinstance(result, BaseException):
                self.result.set_exception(result)
            else:
                self.result.set_result(result)


class Worker:
    """Runs requests in its own thread, so that no two threads use a model at the same time."""

    def __init__(self, models: Models) -> None:
        self._models = models
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._lock = Lock()
        self._line: list[_Ticket] = []
        self._running: list[_Ticket] = []

    @property
    def waiting(self) -> int:
        """The number of requests that wait or run."""
        return len(self._running) + sum(not ticket.result.done() for ticket in self._line)

    @property
    def busy(self) -> bool:
        """Whether a request is running."""
        return bool(self._running)

    def close(self) -> None:
        """Accept no more requests, and answer all waiting and running ones with :class:`Busy`."""
        self._thread.shutdown(wait=False, cancel_futures=True)
        for ticket in (*self._line, *self._running):
            ticket.finish(Busy("The server is closing."))

    async def run(self, request: Request) -> Any:
        """The result of a request. Cancelling this call cancels the request."""
        return await asyncio.wrap_future(self._enter(_Ticket(request)).result)

    async def stream(self, request: StreamedRequest) -> AsyncIterator[Any]:
        """Yield each piece of a request's result as soon as it is computed."""
        loop, pieces, end = asyncio.get_running_loop(), asyncio.Queue[Any](), object()
        ticket = _Ticket(request, lambda piece: loop.call_soon_threadsafe(pieces.put_nowait, piece))
        result = asyncio.wrap_future(self._enter(ticket).result)
        result.add_done_callback(lambda _: pieces.put_nowait(end))
        try:
            while (piece := await pieces.get()) is not end:
                yield piece
            result.result()  # raises what the request raised
        finally:
            result.cancel()

    def _enter(self, ticket: _Ticket) -> _Ticket:
        with self._lock:
            if self.waiting >= MAX_WAITING:
                raise Busy(f"{self.waiting} requests are waiting already. Try again later.")
            self._line.append(ticket)
            try:
                self._thread.submit(self._run_next)
            except RuntimeError:
                self._line.remove(ticket)
                raise Busy("The server is closing.") from None
        return ticket

    def _run_next(self) -> None:
        """Run the first waiting request, with later requests that have the same batch key."""
        with self._lock:
            line = [ticket for ticket in self._line if not ticket.result.done()]
            key = line[0].request.batch_key if line else None
            batch = line[:1]
            if key is not None:
                batch = [ticket for ticket in line if ticket.request.batch_key == key][:MAX_BATCH]
            self._running = batch
            self._line = [ticket for ticket in line if ticket not in batch]
        results = self._results(batch)
        self._running = []
        for ticket, result in zip(batch, results, strict=True):
            ticket.finish(result)

    def _results(self, batch: Sequence[_Ticket]) -> Sequence[Any]:
        """The result of each request, or the exception that it raised."""

        def check() -> None:
            if all(ticket.result.done() for ticket in batch):
                raise ClientsLeft

        requests = [ticket.request for ticket in batch]
        try:
            if not batch:  # the request ran in an earlier batch, or its client has disconnected
                return []
            if (emit := batch[0].emit) is not None:
                for piece in cast("StreamedRequest", requests[0]).pieces(self._models, check):
                    emit(piece)
                return [None]
            return requests[0].run_many(requests, self._models, check)
        except Exception as error:  # noqa: BLE001  # the caller of run() gets it
            if len(batch) == 1 or isinstance(error, ClientsLeft):
                return [error] * len(batch)
            # A request failed. Run each request alone, so that the others get their results.
            return [result for ticket in batch for result in self._results([ticket])]
