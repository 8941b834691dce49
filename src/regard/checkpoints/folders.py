"""Write folders atomically, and verify them when they are read.

A save writes a temporary folder and a manifest with the SHA-256 of each file. It syncs all files,
renames the folder, and syncs its parent.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from regard.errors import CheckpointError, InputError

MANIFEST = "manifest.json"
INDEX = "shards.json"  # the index of tensor parts that several processes wrote


class DamageWarning(UserWarning):
    """A checkpoint is damaged; an older checkpoint is used instead."""


class Disk:
    """The file operations of a save. Tests replace them to simulate failures."""

    def make_folder(self, folder: Path) -> None:
        folder.mkdir()

    def create(self, file: Path) -> int:
        return os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)

    def write(self, handle: int, data: memoryview) -> int:
        return os.write(handle, data)

    def sync(self, handle: int) -> None:
        os.fsync(handle)

    def close(self, handle: int) -> None:
        os.close(handle)

    def sync_folder(self, folder: Path) -> None:
        if os.name == "nt":
            return  # Windows cannot sync a folder, and its renames are durable
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def rename(self, old: Path, new: Path) -> None:
        old.rename(new)

    def remove(self, folder: Path) -> None:
        shutil.rmtree(folder)

    def put(self, file: Path, data: bytes) -> None:
        """Write a new file and sync it."""
        handle = self.create(file)
        try:
            rest = memoryview(data)
            while rest:
                count = self.write(handle, rest)
                if count < 1:
                    raise OSError(f"no byte of the remaining {len(rest):,} was written to {file}")
                rest = rest[count:]
            self.sync(handle)
        finally:
            self.close(handle)


# -------------------------------------------------------------------- folders with a manifest


def publish(
    folder: Path,
    files: Mapping[str, bytes],
    facts: Mapping[str, Any],
    disk: Disk | None = None,
    more: Callable[[Path], dict[str, dict[str, Any]]] | None = None,
) -> None:
    """Write ``folder`` and all its files atomically, with ``facts`` in its manifest.

    ``more`` writes further files into the folder it gets, and returns their manifest entries. If
    the disk fails, CheckpointError is raised, and earlier folders stay unchanged.
    """
    disk = disk or Disk()
    if folder.exists():
        raise InputError(f"{folder} exists already.")
    # Several processes may publish the same folder. Each writes its own temporary folder, and the
    # first rename wins.
    temporary = folder.with_name(f".saving-{folder.name}.{os.getpid()}")
    try:
        _make_parents(disk, folder)
        if temporary.exists():
            disk.remove(temporary)
        disk.make_folder(temporary)
        listed = {} if more is None else more(temporary)
        for name, data in files.items():
            disk.put(temporary / name, data)
            listed[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        disk.put(temporary / MANIFEST, _manifest({**facts, "files": listed}))
        disk.sync_folder(temporary)
        disk.rename(temporary, folder)
        disk.sync_folder(folder.parent)
    except OSError as error:
        # Free the space, but report the first error.
        with suppress(OSError):
            if temporary.exists():
                disk.remove(temporary)
        raise CheckpointError(
            f"{folder} could not be saved: {error.strerror or error}. Earlier checkpoints are "
            "unchanged. Free some space, or give another folder, and resume."
        ) from error


def withdraw(folder: Path, disk: Disk | None = None) -> None:
    """Remove a folder atomically: rename it, then delete it."""
    disk = disk or Disk()
    aside = folder.with_name(f".removing-{folder.name}")
    try:
        if aside.exists():
            disk.remove(aside)
        disk.rename(folder, aside)
        disk.remove(aside)
    except OSError as error:
        raise CheckpointError(
            f"{folder} could not be removed: {error.strerror or error}."
        ) from error


def _make_parents(disk: Disk, folder: Path) -> None:
    """Create the missing parents of a folder, each synced before the next."""
    if not folder.parent.exists():
        _make_parents(disk, folder.parent)
        disk.make_folder(folder.parent)
        disk.sync_folder(folder.parent.parent)


def read_published(folder: Path) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Read and verify a folder that :func:`publish` wrote. Return its facts and its files.

    CheckpointError if a file was changed, removed or added.
    """
    return proven(folder, _read)


def map_published(folder: Path) -> tuple[dict[str, Any], dict[str, memoryview]]:
    """Do the same as :func:`read_published`, but map the files into memory."""
    return proven(folder, _map)


_Data = TypeVar("_Data", bytes, memoryview, bytes | memoryview)


def proven(folder: Path, get: Callable[[Path], _Data]) -> tuple[dict[str, Any], dict[str, _Data]]:
    facts = read_facts(folder)
    listed = facts.pop("files")
    found = {file.name for file in folder.iterdir()} - {MANIFEST}
    if found != listed.keys():
        odd = ", ".join(sorted(found ^ listed.keys()))
        raise CheckpointError(f"{folder} and its manifest disagree about {odd}.")
    files = {}
    for name, entry in listed.items():
        data = get(folder / name)
        if len(data) != entry["bytes"]:
            raise CheckpointError(
                f"{folder / name} has {len(data):,} bytes, not {entry['bytes']:,}."
            )
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise CheckpointError(f"{folder / name} differs from what was written: wrong SHA-256.")
        files[name] = data
    return facts, files


def read_facts(folder: Path) -> dict[str, Any]:
    """Read and verify a manifest."""
    raw = _read(folder / MANIFEST)
    try:
        body = json.loads(raw)["body"]
        whole = _manifest(body) == raw
    except (ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        raise CheckpointError(f"{folder / MANIFEST} differs from what was written.")
    result: dict[str, Any] = body
    return result


def _manifest(body: Mapping[str, Any]) -> bytes:
    text = json.dumps(body, sort_keys=True, allow_nan=False)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return dump({"body": body, "sha256": digest})


def dump(value: object) -> bytes:
    return (json.dumps(value, indent=1, sort_keys=True, allow_nan=False) + "\n").encode()


def _read(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from None


def _map(file: Path) -> memoryview:
    try:
        with file.open("rb") as opened:
            if not os.fstat(opened.fileno()).st_size:
                return memoryview(b"")  # an empty file cannot be mapped
            return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY))
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror or error}.") from None


def read_or_map(file: Path) -> bytes | memoryview:
    """Return the contents of a file. Shards are mapped, since no process needs all of them."""
    return _map(file) if file.name.startswith("shards-") else _read(file)
