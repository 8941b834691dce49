"""Find the base of an adapter. This file needs no PyTorch."""

from __future__ import annotations

from pathlib import Path

from regard.checkpoints.files import CONFIG, read_json
from regard.checkpoints.hub import find
from regard.errors import CheckpointError

ADAPTER = "adapter_config.json"


def described(folder: Path) -> Path:
    """The folder with config.json and the tokenizer of a model: that of its base if it has none.

    The adapters that peft writes have none.
    """
    if (folder / CONFIG).exists() or not (folder / ADAPTER).exists():
        return folder
    return base_of(folder)


def base_of(folder: Path) -> Path:
    """The folder of the base of an adapter."""
    name = read_json(folder / ADAPTER).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"{folder / ADAPTER} has no base_model_name_or_path.")
    try:
        base = find(name)
    except CheckpointError as error:
        raise CheckpointError(f"{folder} is an adapter of {name}. {error}") from None
    if (base / ADAPTER).exists():
        raise CheckpointError(
            f"{folder} is an adapter of {name}, which is an adapter, too. Merge that one: regard "
            f"convert {name} MERGED. Then write MERGED as base_model_name_or_path into "
            f"{folder / ADAPTER}."
        )
    return base
