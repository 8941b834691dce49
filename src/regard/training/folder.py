"""The folder of a run, which one run at a time writes, and its log, with one JSON object a line."""

from __future__ import annotations

import errno
import json
import os
import platform
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, TextIO

from regard.errors import InputError
from regard.training.processes import Processes
from regard.training.tensorboard import Events

LOG, LOCK = "log.jsonl", "run.lock"
# The errors of network file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextmanager
def held(folder: Path, processes: Processes) -> Iterator[None]:
    """Context in which no other run writes ``folder``; an empty folder is removed at the end.

    The first process holds a lock, which the operating system releases when the process ends.
    """
    with ExitStack() as stack:
        processes.on_first(lambda: stack.enter_context(_held(folder)))
        yield


@contextmanager
def _held(folder: Path) -> Iterator[None]:
    with _refused(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stream = _locked(folder / LOCK)
    with stream:
        try:
            stream.truncate(0)
            stream.write(f"Process {os.getpid()} on {platform.node()}")
            stream.flush()
            yield
        finally:
            (folder / LOCK).unlink(missing_ok=True)
            with suppress(OSError):  # not empty
                folder.rmdir()


def _locked(file: Path) -> TextIO:
    while True:
        stream = file.open("a+", encoding="utf-8")
        try:
            _lock(stream)
        except BlockingIOError:
            with stream:
                stream.seek(0)
                other = stream.read() or "Another process"
            raise InputError(
                f"{other} trains in {file.parent}. Wait for its end, stop it, or choose another "
                "output."
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(file.stat(), os.fstat(stream.fileno())):
                return stream
        stream.close()  # the run that had the lock has removed the file


def _lock(stream: TextIO) -> None:
    if os.name == "nt":
        return  # Windows has no flock
    import fcntl

    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        warnings.warn(
            f"{stream.name} cannot be locked: start no second run in its folder.", stacklevel=2
        )


@contextmanager
def logged(folder: Path, tensorboard: bool) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Context with a function that logs one JSON object per line, with the seconds so far.

    Removes a last line that was not written completely. If nothing was logged, the end of the
    context removes the file.
    """
    begun = time.perf_counter()
    file = folder / LOG
    with ExitStack() as opened:
        with _refused(folder):
            stream = file.open("a+b")
        opened.callback(_remove_empty, file)  # after the file is closed
        opened.enter_context(stream)
        stream.seek(0)
        stream.truncate(stream.read().rfind(b"\n") + 1)
        read_log(file)
        events = opened.enter_context(Events(folder / "tensorboard")) if tensorboard else None

        def log(row: dict[str, Any]) -> None:
            row = {**row, "seconds": round(time.perf_counter() - begun, 2)}
            stream.write(json.dumps(row).encode() + b"\n")
            stream.flush()
            if events is not None:
                events.add(row)

        yield log


def _remove_empty(file: Path) -> None:
    if not file.stat().st_size:
        file.unlink()


def no_log(row: dict[str, Any]) -> None:
    """The log function of all processes except the first."""


def read_log(file: Path) -> list[dict[str, Any]]:
    """The rows of a log. InputError if a line is not a JSON object."""
    rows = []
    for number, line in enumerate(file.read_bytes().splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict):
            raise InputError(f"{file}:{number} is not a JSON object. Remove the line or the file.")
        rows.append(row)
    return rows


@contextmanager
def _refused(folder: Path) -> Iterator[None]:
    """Raise InputError if the folder of a run cannot be written."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"A run cannot write {error.filename or folder}: {error.strerror or error}. Change its "
            "permissions, or choose another output."
        ) from None
