"""Read the texts of a command from its arguments, from files, or from standard input."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, Queue
from threading import Thread

from regard.cli import terminal
from regard.errors import InputError

MAX_LINES = 256  # lines in a batch
WORDS = "some words"


def document(text: str | None, files: Sequence[Path] | None, wanted: str = WORDS) -> str:
    """One whole text: the argument, the file, or all of standard input."""
    if files and len(files) > 1:
        names = ", ".join(map(str, files))
        raise InputError(f"Give one file, not several: {names}.")
    return documents(None if text is None else [text], files, wanted)[0]


def documents(
    texts: Sequence[str] | None, files: Sequence[Path] | None, wanted: str = WORDS
) -> list[str]:
    """Whole texts: the arguments, the files, or all of standard input."""
    if texts:
        _check_arguments(texts, files)
        return list(texts)
    if files:
        return [_file(file) for file in files]
    whole = _decoded(b"".join(_blocks()), "standard input")
    return [_not_empty(whole, "There is no text: standard input", wanted)]


def lines(
    texts: Sequence[str] | None,
    files: Sequence[Path] | None,
    *,
    most: int = MAX_LINES,
    show: Callable[[int, int], None] | None = None,
) -> Iterator[list[str]]:
    """Batches of texts: the arguments, the lines of files, or the lines of standard input.

    A batch has at most ``most`` lines. For files, ``show`` is called with the number of lines whose
    batches are done, and the number of all lines.
    """
    if texts:
        _check_arguments(texts, files)
        if not any(text.strip() for text in texts):
            raise InputError("The text is empty. Give some words.")
        yield list(texts)
        return
    if not files:
        yield from _arriving_lines(most)
        return
    # Split at \n only, as in standard input: str.splitlines() also splits at other characters.
    found = [
        [line.removesuffix("\r") for line in _file(file).removesuffix("\n").split("\n")]
        for file in files
    ]
    done, total = 0, sum(map(len, found))
    for own in found:
        for start in range(0, len(own), most):
            batch = own[start : start + most]
            yield batch
            done += len(batch)
            if show is not None:
                show(done, total)


def _not_empty(text: str, name: str, wanted: str = WORDS) -> str:
    if not text.strip():
        raise InputError(f"{name} is empty. Give {wanted}.")
    return text


def _arriving_lines(most: int) -> Iterator[list[str]]:
    """Batches of the lines of standard input that have arrived so far.

    A thread reads ahead. A typed line is yielded immediately, the lines of a file in large batches.
    """
    queue: Queue[bytes | OSError | None] = Queue(maxsize=4 * MAX_LINES)
    Thread(target=_enqueue_lines, args=(_blocks(), queue), daemon=True).start()
    batch: list[str] = []
    has_words = False
    while True:
        try:
            line = queue.get(block=not (has_words and batch))
        except Empty:
            yield batch
            batch = []
            continue
        if line is None:
            break
        if isinstance(line, OSError):
            raise InputError(f"Standard input cannot be read: {line.strerror or line}.")
        batch.append(_decoded(line, "standard input").removesuffix("\r"))
        has_words = has_words or bool(batch[-1].strip())
        if has_words and len(batch) >= most:
            yield batch
            batch = []
    if not has_words:
        raise InputError("There is no text: standard input is empty. Give some words.")
    if batch:
        yield batch


def _enqueue_lines(blocks: Iterator[bytes], queue: Queue[bytes | OSError | None]) -> None:
    """Put lines into a queue, and None after the last line."""
    rest = b""
    try:
        for block in blocks:
            *complete, rest = (rest + block).split(b"\n")
            for line in complete:
                queue.put(line)
    except OSError as error:
        queue.put(error)
    if rest:
        queue.put(rest)
    queue.put(None)


def _blocks() -> Iterator[bytes]:
    """Blocks of standard input, as they arrive.

    They are read without Python's buffer: a thread that waits in sys.stdin keeps Python from
    exiting.
    """
    if sys.stdin is None:
        raise InputError("There is no text, and no standard input to read it from.")
    if sys.stdin.isatty():
        terminal.remark("Type the text, then press Ctrl-D.")
    number = sys.stdin.fileno()
    return iter(lambda: os.read(number, 2**16), b"")


def _check_arguments(texts: Sequence[str], files: Sequence[Path] | None) -> None:
    """Refuse texts together with --file, and texts that are names of files."""
    if files:
        raise InputError(f"Give a text or --file {files[0]}, not both.")
    for text in texts:
        # Path.is_file() raises if a text is too long for a name.
        if Path(text).suffix and os.path.isfile(text):  # noqa: PTH113
            raise InputError(f"{text} is a file. To read it, pass --file {text}.")


def _file(file: Path) -> str:
    try:
        return _not_empty(_decoded(file.read_bytes(), str(file)), str(file))
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}.") from None


def _decoded(raw: bytes, name: str) -> str:
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        at = f"byte {error.start} is 0x{raw[error.start]:02x}"
        raise InputError(f"{name} is not a text in UTF-8: {at}. Save it as UTF-8 first.") from None
    if "\0" in text:
        raise InputError(f"{name} is not a text: it has zero bytes.")
    return text
