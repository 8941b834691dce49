"""Find the folder of a shipped, local, downloaded or cached model. Nothing here goes online."""

from __future__ import annotations

import os
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from regard.checkpoints import cards
from regard.checkpoints.downloads import downloaded, find_downloaded
from regard.checkpoints.files import CONFIG
from regard.checkpoints.recommended import RECOMMENDED, full_name
from regard.errors import CheckpointError, UnknownModelError


def find(name: str | os.PathLike[str]) -> Path:
    """Return the folder of a model: a shipped model, a folder, or a model of the Hugging Face hub.

    A shipped model is found before a folder of the same name: pass ``./name`` for the folder. A
    model of the hub is one that ``regard get`` has downloaded, or that the Hugging Face cache has.
    """
    if not isinstance(name, str | os.PathLike) or not str(name):
        raise UnknownModelError(f"A model is given by its name or a path, not {name!r}.")
    if isinstance(name, str) and name in cards.names():
        return cards.folder(name)
    folder = Path(name)
    if folder.is_dir():
        inner = folder / "model"
        if not (folder / CONFIG).exists() and (inner / CONFIG).is_file():
            raise UnknownModelError(f"{folder} is a training run; its model is in {inner}.")
        return folder
    text = str(name)
    plausible = text.count("/") <= 1 and not text.startswith((".", "/", "~"))
    if not plausible or not all(part.strip(".") for part in text.split("/")):
        raise UnknownModelError(f"There is no folder {text}.{_near(text)}")
    found = find_downloaded(text) or _find_cached(text)
    if found is None:
        raise UnknownModelError(
            f"There is no folder {text}, and no model of that name is here. To download it from "
            f"the Hugging Face hub: regard get {text} (in Python: regard.get({text!r}))."
            f"{_near(text)}"
        )
    return found


def _find_cached(name: str) -> Path | None:
    """Return the snapshot of a model in the Hugging Face cache, on its main branch."""
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        return None
    for known in dict.fromkeys((full_name(name), name)):  # "gpt2" once was a name of the hub
        try:
            config = try_to_load_from_cache(known, CONFIG)
        except HFValidationError:
            return None
        if isinstance(config, str):
            return Path(config).parent
    return None


def _near(name: str) -> str:
    """Return a hint with similar names, for an error about an unknown name."""
    known = [
        *cards.names(),
        *(lock.name for _, lock in downloaded()),
        *(model.short for model in RECOMMENDED),
        *(name for name, _ in cached_models()),
    ]
    if full_name(name) != name:
        return ""  # the name of a recommended model
    near = get_close_matches(name, known, 3) or get_close_matches(Path(name).name, known, 3)
    if near:
        return f" Did you mean {' or '.join(near)}?"
    here = ", ".join(cards.names())
    return f" Shipped models are {here}." if here else ""


def cache_folder() -> Path | None:
    """Return the Hugging Face cache; None if huggingface_hub is not installed."""
    try:
        from huggingface_hub.constants import HF_HUB_CACHE
    except ImportError:
        return None
    return Path(HF_HUB_CACHE)


def cached_models() -> Iterator[tuple[str, Path]]:
    """Yield the name and the snapshot folder of each cached model."""
    place = cache_folder()
    for folder in sorted(place.glob("models--*")) if place else ():
        try:
            snapshot = _current_snapshot(folder)
        except OSError:
            continue  # the folder cannot be read
        if snapshot is not None:
            yield folder.name.removeprefix("models--").replace("--", "/"), snapshot


def _current_snapshot(folder: Path) -> Path | None:
    """Return the snapshot of the main branch, which loads without a request to the hub."""
    main = folder / "refs" / "main"
    if not main.is_file():
        return None
    named = folder / "snapshots" / main.read_text(encoding="utf-8").strip()
    return named if named.is_dir() else None


def stamps(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return the name, the time and the size of each file, which change if the model changes."""
    try:
        return tuple(
            (file.name, file.stat().st_mtime_ns, file.stat().st_size)
            for file in sorted(folder.iterdir())
        )
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.") from None


def size_of(folder: Path) -> int:
    """Return the total size of a folder's files, in bytes."""
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
