"""Downloaded models: folders whose files are pinned by a lock file.

The lock file beside the files of a model holds its name, its commit on the hub, and the size and
the SHA-256 of each file::

    {"name": "Helsinki-NLP/opus-mt-en-fr", "revision": "<40 hex digits>", "licence": "apache-2.0",
     "files": {"config.json": {"bytes": 1416, "modified": 1790000000000000000, "sha256": "..."}}}

A file is hashed again if its size or its time of modification differs from the lock file.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from regard.checkpoints.files import json_bytes, open_regular, read_json, replace_file
from regard.checkpoints.recommended import full_name
from regard.errors import CheckpointError, InputError

LOCK = "regard.lock.json"
_BLOCK = 2**20


@dataclass(frozen=True, slots=True)
class Pin:
    """What a lock file says of a file."""

    bytes: int
    modified: int  # nanoseconds
    sha256: str


@dataclass(frozen=True, slots=True)
class Lock:
    """The contents of a lock file."""

    name: str
    revision: str
    licence: str  # "" if the hub does not name it
    files: Mapping[str, Pin]

    def write(self, folder: Path) -> None:
        replace_file(folder / LOCK, json_bytes(asdict(self)))


def place() -> Path:
    """Return the folder of downloaded models, in huggingface_hub's folder for other libraries."""
    variable = os.environ.get
    home = variable("HF_HOME") or f"{variable('XDG_CACHE_HOME') or '~/.cache'}/huggingface"
    assets = variable("HF_ASSETS_CACHE") or f"{home}/assets"
    return Path(os.path.expandvars(assets)).expanduser() / "regard" / "models"


def folder_of(name: str) -> Path:
    """Return the folder of a model of the hub, which exists if it is downloaded."""
    return place() / name.replace("/", "--")


def downloaded() -> Iterator[tuple[Path, Lock]]:
    """Yield the folder and the lock of each downloaded model."""
    for file in sorted(place().glob(f"*/{LOCK}")):
        yield file.parent, read_lock(file.parent)


def lock_named(name: str) -> Lock | None:
    """Return the lock of a downloaded model, or None.

    ``name`` may leave out the organisation, if one model alone has that name.
    """
    folder = folder_of(full_name(name))
    if (folder / LOCK).is_file():
        return read_lock(folder)
    named = [
        lock for _, lock in downloaded() if "/" not in name and lock.name.rpartition("/")[2] == name
    ]
    if len(named) > 1:
        known = " or ".join(lock.name for lock in named)
        raise InputError(f"{name} may be {known}: give the whole name.")
    return named[0] if named else None


def find_downloaded(name: str) -> Path | None:
    """Return the folder of a downloaded model, or None; its files are as they were downloaded."""
    lock = lock_named(name)
    if lock is None:
        return None
    folder = folder_of(lock.name)
    if odd := changed(folder, lock):
        raise CheckpointError(
            f"{folder / odd[0]} is not the file that was downloaded, which {LOCK} beside it "
            f"records. To download it again: regard get {lock.name}"
        )
    return folder


def read_lock(folder: Path) -> Lock:
    """Read the lock file of a downloaded model."""
    try:
        found = read_json(folder / LOCK)
        files = {str(name): Pin(**entry) for name, entry in found.pop("files").items()}
        lock = Lock(**found, files=files)
    except (CheckpointError, TypeError, KeyError, AttributeError):
        raise CheckpointError(
            f"{folder / LOCK} is damaged. Remove its folder, and download the model again."
        ) from None
    return lock


def changed(folder: Path, lock: Lock, *, thorough: bool = False) -> list[str]:
    """Return the files that are missing or differ; ``thorough`` hashes all of them."""
    return [name for name, pin in lock.files.items() if not _holds(folder / name, pin, thorough)]


def _holds(file: Path, pin: Pin, thorough: bool) -> bool:
    try:
        found = file.stat()
    except OSError:
        return False
    if found.st_size != pin.bytes:
        return False
    if found.st_mtime_ns == pin.modified and not thorough:
        return True
    return hashes(file)[0] == pin.sha256


def hashes(file: Path) -> tuple[str, str]:
    """Return the SHA-256 of a file, and the SHA-1 by which Git names it."""
    ours = hashlib.sha256()
    git = hashlib.sha1(f"blob {file.stat().st_size}\0".encode(), usedforsecurity=False)
    with open_regular(file) as opened:
        while block := opened.read(_BLOCK):
            ours.update(block)
            git.update(block)
    return ours.hexdigest(), git.hexdigest()
