"""One thread for all models: whoever asks waits for those before, and two never share a model."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from typing import Any, TypeVar

T = TypeVar("T")

MOST_WAITING = 32  # requests; a longer line is not worth standing in


class Busy(Exception):  # noqa: N818  # no bug, and no mistake of whoever asks
    """There is no room in the line, or it is closed."""


class _Gone(Exception):  # noqa: N818
    """Nobody waits for this any more."""


class Going:
    """Whether somebody still waits for what is being done."""

    def __init__(self) -> None:
        self._over = Event()

    def end(self) -> None:
        self._over.set()

    def check(self) -> None:
        """Called now and then by what takes long: it ends here when nobody waits any more."""
        if self._over.is_set():
            raise _Gone


class Worker:
    """Does what is asked in a thread of its own, in order, while the event loop goes on."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="models")
        self._open: dict[Going, asyncio.Future[Any] | None] = {}  # in work or in line
        self._closed = False
        self._working = False

    @property
    def waiting(self) -> int:
        """How many are in work or in line."""
        return len(self._open)

    @property
    def busy(self) -> bool:
        """Whether something is in work."""
        return self._working

    def close(self) -> None:
        """Begin nothing more, end what can be ended, and let nobody wait for the rest."""
        self._closed = True
        for going, waiting in tuple(self._open.items()):
            going.end()
            if waiting is not None:
                waiting.get_loop().call_soon_threadsafe(waiting.cancel)
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def run(self, job: Callable[[Going], T]) -> T:
        """What a job returns. It is left out of the line, or told, when this is cancelled."""
        going = self._enter()

        def work() -> T:
            self._working = True
            try:
                going.check()
                return job(going)
            finally:
                self._working = False

        try:
            working = self._pool.submit(work)
        except RuntimeError:
            del self._open[going]
            raise Busy("The server is closing.") from None
        # What nobody waits for any more may still be in work.
        working.add_done_callback(lambda _: self._open.pop(going, None))
        waiting = asyncio.wrap_future(working)
        if going in self._open:
            self._open[going] = waiting
        try:
            return await waiting
        except (_Gone, asyncio.CancelledError):
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():
                raise Busy("The server is closing.") from None
            raise
        finally:
            going.end()

    async def each(self, job: Callable[[Going], Iterator[T]]) -> AsyncIterator[T]:
        """What a job yields, as it does."""
        loop, found = asyncio.get_running_loop(), asyncio.Queue[T]()

        def hand_over(going: Going) -> None:
            for item in job(going):
                loop.call_soon_threadsafe(found.put_nowait, item)
                going.check()

        working = asyncio.create_task(self.run(hand_over))
        try:
            while True:
                item = asyncio.create_task(found.get())
                await asyncio.wait({item, working}, return_when=asyncio.FIRST_COMPLETED)
                if item.done():
                    yield item.result()
                    continue
                item.cancel()
                while not found.empty():
                    yield found.get_nowait()
                working.result()  # raises what the job raised
                return
        finally:
            working.cancel()

    def _enter(self) -> Going:
        if self._closed:
            raise Busy("The server is closing.")
        if len(self._open) >= MOST_WAITING:
            raise Busy(f"{len(self._open)} requests are waiting already. Ask again in a while.")
        going = Going()
        self._open[going] = None
        return going
