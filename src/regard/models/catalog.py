"""The models that are here: shipped, downloaded and cached ones; and recommended ones.

Nothing here loads PyTorch: it reads small files and the headers of large ones.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from regard.checkpoints import cards
from regard.checkpoints.downloads import Lock, downloaded, place
from regard.checkpoints.hub import cache_folder, cached_models, size_of
from regard.checkpoints.recommended import RECOMMENDED, Recommended, full_name
from regard.errors import InputError
from regard.models.registry import row_named

_MAX_HEADER = 32 * 2**20


@dataclass(frozen=True, slots=True)
class Known:
    """A model that is here."""

    name: str
    origin: str  # "shipped", "downloaded", "cached" or "folder"
    folder: Path
    task: str  # "" if regard does not implement the architecture
    architecture: str
    parameters: int | None  # None if the safetensors files do not give it
    size: int  # bytes of all files in the folder
    licence: str  # "" if the card does not name it


def known() -> list[Known]:
    """Return the shipped and the downloaded models, and cached ones that regard implements.

    >>> all(model.origin in ("shipped", "downloaded", "cached") for model in known())
    True
    """
    shipped = [_shipped(name) for name in cards.names()]
    downloads = [_downloaded(folder, lock) for folder, lock in downloaded()]
    names = {model.name for model in downloads}
    return shipped + downloads + [model for model in _cached() if model.name not in names]


def one(name: str) -> Known:
    """Return the model named ``name``, of those that are here."""
    models = known()
    for model in models:
        if model.name in (name, full_name(name)):
            return model
    if any(name in (model.name, model.short) for model in RECOMMENDED):
        raise InputError(f"{name} is not here yet. To download it: regard get {name}")
    names = [model.name for model in models]
    near = get_close_matches(name, names, 1)
    hint = f" Did you mean {near[0]}?" if near else ""
    there = ", ".join(names) or "none"
    raise InputError(f"There is no model {name!r} here.{hint} There are: {there}.")


def recommended() -> list[Recommended]:
    """Return the recommended models that are not here."""
    here = {model.name for model in known()}
    return [model for model in RECOMMENDED if model.name not in here]


def task_of(architecture: str) -> str:
    """Return the task of an architecture; "" if regard does not implement it.

    >>> task_of("MarianMTModel"), task_of("LlamaForCausalLM")
    ('translation', '')
    """
    row = row_named(architecture)
    return "" if row is None else row.task


def at(folder: Path, name: str) -> Known:
    """Return the model in a folder, of an architecture of regard or of transformers."""
    return _described(folder, name, "folder") or _facts(folder, name, "folder", "")


def places() -> dict[str, Path]:
    """Return the folders of shipped, downloaded and, with huggingface_hub, cached models."""
    there = {"shipped": cards.SHIPPED, "downloaded": place()}
    hub = cache_folder()
    return there if hub is None else there | {"cached": hub}


def _shipped(name: str) -> Known:
    folder, card = cards.folder(name), cards.card(name)
    size = size_of(folder)
    facts = (card.task, card.architecture, card.parameters, size, card.licence)
    return Known(name, "shipped", folder, *facts)


def _downloaded(folder: Path, lock: Lock) -> Known:
    model = at(folder, lock.name)
    return replace(model, origin="downloaded", licence=lock.licence)


def _cached() -> Iterator[Known]:
    for name, snapshot in cached_models():
        try:
            model = _described(snapshot, name, "cached")
        except OSError:
            continue  # a file was removed or cannot be read
        if model is not None:
            yield model


def _described(folder: Path, name: str, origin: str) -> Known | None:
    """Read a model's description from its files; None if regard cannot load it."""
    names = _json(folder / "config.json").get("architectures")
    hub_name = names[0] if isinstance(names, list) and names else None
    row = row_named(hub_name)
    return None if row is None else _facts(folder, name, origin, row.task)


def _facts(folder: Path, name: str, origin: str, task: str) -> Known:
    names = _json(folder / "config.json").get("architectures")
    architecture = str(names[0]) if isinstance(names, list) and names else ""
    card = folder / cards.CARD
    text = card.read_text(encoding="utf-8", errors="replace") if card.is_file() else ""
    licence = cards.front_matter(text)[0].get("license", "")
    facts = (task, architecture, _parameters(folder), size_of(folder), licence)
    return Known(name, origin, folder, *facts)


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return {}  # for example after an interrupted download
    return value if isinstance(value, dict) else {}


def _parameters(folder: Path) -> int | None:
    """Count the parameters in the headers of a folder's safetensors files."""
    total = 0
    for file in folder.glob("*.safetensors"):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(8), "little")
            raw = opened.read(length) if length <= _MAX_HEADER else b""
        try:
            header = json.loads(raw)
            shapes = [entry["shape"] for key, entry in header.items() if key != "__metadata__"]
            total += sum(math.prod(shape) for shape in shapes)
        except (ValueError, TypeError, KeyError, AttributeError):
            return None
    return total or None
