"""Load models of any architecture through the library transformers.

Only safetensors are read. The code in a checkpoint runs only on request (``trust_remote_code``).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from regard.checkpoints import hub
from regard.checkpoints.bases import ADAPTER, described
from regard.checkpoints.files import CONFIG, first_line, read_json
from regard.checkpoints.tensors import open_checkpoint
from regard.errors import CheckpointError, InputError
from regard.models.bundle import Bundle, bundle_in
from regard.models.loading import check_device
from regard.models.registry import implements

MAX_OPEN = 4  # cached models


@dataclass(frozen=True, eq=False)
class LibraryModel:
    """A model of transformers with the folder that it was loaded from."""

    name: str
    folder: Path
    model: nn.Module
    trusts_code: bool = False

    @cached_property
    def tokenizer(self) -> Any:
        """The tokenizer in the folder."""
        from transformers import AutoTokenizer

        with _errors(self.name, "has no tokenizer that transformers can load"):
            return AutoTokenizer.from_pretrained(self.folder, trust_remote_code=self.trusts_code)

    @cached_property
    def image_processor(self) -> Any:
        """The image processor in the folder."""
        # transformers.AutoImageProcessor refuses without torchvision, though the class itself falls
        # back to Pillow. No other public name loads the processor that a folder describes.
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        with _errors(self.name, "has no image processor that transformers can load"):
            return AutoImageProcessor.from_pretrained(  # type: ignore[no-untyped-call]
                self.folder, trust_remote_code=self.trusts_code
            )


def open_model(
    name: str | os.PathLike[str],
    device: torch.device | str | None = None,
    *,
    trust_remote_code: bool = False,
) -> Bundle | LibraryModel:
    """Open a model by its name or folder: of regard, or any other through transformers.

    Opened models are cached. A model is loaded again only if its files change.
    """
    folder = hub.find(name)
    if implements(read_json(described(folder) / CONFIG)):
        return bundle_in(folder, name, device)
    if (folder / ADAPTER).exists():
        raise InputError(
            f"{name} is an adapter for an architecture that regard does not implement. Merge it "
            "into its base with peft, merge_and_unload(), and save the result."
        )
    _check_library(name)
    check_device(device)
    loaded = _load(folder.resolve(), hub.stamps(folder), str(device or "cpu"), trust_remote_code)
    return LibraryModel(str(name), folder, loaded, trust_remote_code)


def _check_library(name: object) -> None:
    try:
        from transformers import __version__
    except ImportError:
        raise InputError(
            f"{name} has an architecture that regard does not implement. To look into it, install "
            "transformers: pip install 'regard[transformers]'."
        ) from None
    if int(__version__.partition(".")[0]) < 5:
        raise InputError(
            f"{name} has an architecture that regard does not implement. To look into it, update "
            f"transformers from {__version__} to 5: pip install 'regard[transformers]'."
        )


@lru_cache(maxsize=MAX_OPEN)
def _load(folder: Path, stamps: object, device: str, trust_remote_code: bool) -> nn.Module:
    del stamps  # only part of the cache key
    config = open_checkpoint(folder).config  # refuses pickles and damaged files
    kind, given = _class_of(config, folder, trust_remote_code)
    with _errors(folder, "cannot be loaded by transformers"), _quiet():
        model: nn.Module = kind.from_pretrained(folder, dtype="auto", use_safetensors=True, **given)
    return model.to(device).eval()


def _class_of(
    config: dict[str, Any], folder: Path, trust_remote_code: bool
) -> tuple[Any, dict[str, Any]]:
    """The class that loads a checkpoint, and its arguments."""
    import transformers

    names = config.get("architectures")
    names = [name for name in names if isinstance(name, str)] if isinstance(names, list) else []
    for name in names:
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            return kind, {"trust_remote_code": False, **_attention_of(kind)}
    remote = config.get("auto_map")
    if isinstance(remote, dict) and remote:
        if not trust_remote_code:
            raise InputError(
                f"{folder} needs Python code of its own, which is not run unless you ask for it. "
                "If you trust that code, pass trust_remote_code=True (--trust-remote-code)."
            )
        auto = next(
            (kind for kind, place in remote.items() if str(place).rpartition(".")[2] in names),
            "AutoModel",
        )
        return getattr(transformers, auto), {"trust_remote_code": True}
    if config.get("model_type") in transformers.CONFIG_MAPPING and not names:
        return transformers.AutoModel, {"trust_remote_code": False}
    raise InputError(
        f"{folder / CONFIG} names the architectures {names} and the model_type "
        f"{config.get('model_type')!r}. Neither regard nor transformers {transformers.__version__} "
        "implements them. A newer transformers may: pip install -U transformers."
    )


def _attention_of(kind: Any) -> dict[str, str]:
    """The argument that loads a class with regard's attention, whose masks are O(n), if it can."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    # Not promised: transformers asks the class the same when an implementation is set.
    possible = "regard" in ALL_ATTENTION_FUNCTIONS and kind._can_set_attn_implementation()
    return {"attn_implementation": "regard"} if possible else {}


@contextmanager
def _errors(name: object, what: str) -> Iterator[None]:
    """Raise the errors that transformers raises for files as CheckpointError."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        raise CheckpointError(f"{name} {what}: {first_line(error)}") from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Turn the progress bars of transformers off."""
    from transformers.utils import logging as library_logging

    logging: Any = library_logging  # its functions have no type hints

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
