"""Read small checkpoint files with size limits, and replace them atomically."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from regard.errors import CheckpointError, InputError

CONFIG = "config.json"
GENERATION = "generation_config.json"
MAX_JSON_BYTES = 32 * 2**20  # the largest real index file is below 10 MB


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object."""
    return parse_object(read_bytes(file), file)


def read_bytes(file: Path) -> bytes:
    """Read a small file. CheckpointError if it is too large for a config or vocabulary."""
    with open_regular(file) as opened:
        raw = opened.read(MAX_JSON_BYTES + 1)
    if len(raw) > MAX_JSON_BYTES:
        raise CheckpointError(
            f"{file} is over {MAX_JSON_BYTES // 2**20} MB: too large for such a file."
        )
    return raw


def place_for(folder: str | os.PathLike[str]) -> Path:
    """Return the folder to write a checkpoint to. InputError if ``folder`` is not a path."""
    if not isinstance(folder, str | os.PathLike) or not str(folder):
        raise InputError(f"A checkpoint is written to a folder, not to {folder!r}.")
    return Path(folder)


def note(file: Path, more: Mapping[str, Any]) -> None:
    """Add keys to a JSON file."""
    replace_file(file, json_bytes({**read_json(file), **more}))


def replace_file(file: Path, data: bytes) -> None:
    beside = file.with_name(file.name + ".part")
    with beside.open("wb") as opened:
        opened.write(data)
        opened.flush()
        os.fsync(opened.fileno())
    beside.replace(file)


def json_bytes(value: Mapping[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, sort_keys=True) + "\n").encode()


@contextmanager
def open_regular(file: Path) -> Iterator[BinaryIO]:
    """Open a file. CheckpointError if it is not regular: a pipe or device might block for ever."""
    try:
        if not stat.S_ISREG(file.stat().st_mode):
            raise CheckpointError(f"{file} is not a regular file.")
        with file.open("rb") as opened:
            yield opened
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {file}.") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from None


def parse_object(raw: bytes, source: Path | str) -> dict[str, Any]:
    """Parse a JSON object. CheckpointError if a key occurs twice."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) != len(pairs):
            seen: set[str] = set()
            twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
            raise CheckpointError(f"{source} has the key {twice!r} twice.")
        return members

    try:
        value = json.loads(raw, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{source} is not readable JSON: {first_line(error)}") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{source} should hold a JSON object, not {type(value).__name__}.")
    return value


def first_line(error: BaseException) -> str:
    """Return the first line of another library's error message, as one sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0].rstrip(".:") + "."
