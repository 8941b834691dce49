"""Cached models, each with its tokenizer, config and generation settings."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from regard.checkpoints import hub
from regard.checkpoints.bases import ADAPTER, base_of
from regard.checkpoints.tensors import open_checkpoint
from regard.decoding.settings import Settings, SettingWarning, generation_of, not_followed, tasks_of
from regard.errors import CheckpointError, InputError
from regard.models import registry
from regard.models.loading import check_device
from regard.models.model import EncoderDecoder, Model
from regard.models.quantization import prepack, quantize
from regard.text.preparing import PREPARATIONS, prepare
from regard.text.tokenizer import Tokenizer

Name = str | os.PathLike[str]
Precision = Literal["float32", "bfloat16", "int8"]
MAX_OPEN = 8  # cached bundles: enough for the shipped models and a few more


@dataclass(frozen=True, slots=True)
class Bundle:
    """A model with its tokenizer, config and generation settings."""

    name: str
    model: Model
    tokenizer: Tokenizer
    config: Mapping[str, Any]  # the contents of config.json
    generation: Mapping[str, Any]  # the contents of generation_config.json

    def decode(self, ids: Sequence[int]) -> str:
        """Decode ids to text. Ids that the tokenizer does not have are left out."""
        return self.tokenizer.decode([token for token in ids if token < len(self.tokenizer.target)])

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """The tasks that config.json names, each with its prefix and decoding settings."""
        return tasks_of(self.config, self.name)

    def settings(self, task: str | None) -> Settings:
        """Return the decoding settings in the model's files; ``task`` adds those of one task."""
        return Settings.of_files({**self.generation, **self.tasks.get(task or "", {})})

    def prefix(self, task: str | None) -> str:
        """Return the prefix that sources of a task need; "" if the model's files have none."""
        prefix = self.tasks.get(task or "", {}).get("prefix")
        return prefix if isinstance(prefix, str) else ""

    def check_prefix(self, text: str) -> None:
        """Raise InputError if the model has one task and ``text`` begins without its prefix."""
        prefix = self.prefix(next(iter(self.tasks))) if len(self.tasks) == 1 else ""
        if not text.startswith(prefix.strip()):
            raise InputError(
                f"{self.name} was trained on texts that begin with {prefix!r}. Put it before "
                "this text."
            )

    def prepared(self, text: str, task: str) -> str:
        """Prepare a text like the training data, with the steps in the model's files."""
        steps = self.tasks.get(task, {}).get("prepare", [])
        if not isinstance(steps, list) or not all(step in PREPARATIONS for step in steps):
            raise CheckpointError(f"{self.name}: texts cannot be prepared by {steps!r}.")
        return prepare(text, steps)

    @property
    def ends(self) -> list[int]:
        """The ids of the tokens that end generation."""
        given = self.generation.get("eos_token_id")
        given = self.model.config.end_token if given is None else given
        ends = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(token) is int for token in ends):
            raise CheckpointError(
                f"{self.name}: eos_token_id = {given!r} is not a token id or a list of ids."
            )
        return ends

    @property
    def window(self) -> int:
        """The number of tokens that the model reads at once."""
        window = self.model.longest or self.config.get("n_positions") or 512
        if type(window) is not int or window < 8:
            raise CheckpointError(
                f"{self.name}: n_positions = {window!r} is not a whole number of at least 8."
            )
        return window


def open_bundle(
    name: Name,
    task: str | None = None,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
) -> Bundle:
    """Open a model by its name or folder. Raise InputError if it cannot do ``task``.

    Bundles are cached. A model is loaded again only if its files change.

    >>> bundle = open_bundle("books-gpt2", "complete")
    >>> bundle.model is open_bundle("books-gpt2").model, bundle.window
    (True, 256)
    """
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise InputError(f"There is no precision {precision!r}. Give one of {known}.")
    bundle = bundle_in(hub.find(name), name, device, precision)
    if task is not None and task not in bundle.model.row().serves:
        able = [row.class_name for row in registry.ARCHITECTURES if task in row.serves]
        raise InputError(
            f"{name} is a {type(bundle.model).__name__}, which cannot {task}: that takes a "
            f"{' or '.join(able)}."
        )
    return bundle


def bundle_in(
    folder: Path,
    name: Name,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
) -> Bundle:
    """Open the model in a folder, which was found by its name."""
    stamps = [hub.stamps(folder)]
    if (folder / ADAPTER).exists():
        stamps.append(hub.stamps(base_of(folder)))
    bundle = _loaded(folder.resolve(), tuple(stamps), str(device or "cpu"), precision)
    return replace(bundle, name=str(name))


@lru_cache(maxsize=MAX_OPEN)
def _loaded(folder: Path, stamps: object, device: str, precision: Precision) -> Bundle:
    del stamps  # only part of the cache key
    # The stored precision saves space; it may not be the fastest on this machine.
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    check_device(device)
    source = open_checkpoint(folder)
    config, generation = source.config, generation_of(folder)
    model = registry.architecture_of(config).model_class().from_checkpoint(source, device, dtype)
    bans_tokens = model.ban(generation.get("bad_words_ids"))
    for settings in (generation, *tasks_of(config, folder.name).values()):
        ignored = not_followed(
            settings, completes=not isinstance(model, EncoderDecoder), bans_tokens=bans_tokens
        )
        for setting, value in ignored:
            warnings.warn(
                f"{folder.name} sets {setting} = {value!r}, which regard does not follow.",
                SettingWarning,
                stacklevel=2,
            )
    if precision == "int8":
        quantize(model)
    elif precision == "bfloat16" and model.device.type == "cpu":
        prepack(model)
    return Bundle(str(folder), model, Tokenizer.load(folder), config, generation)


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Set evaluation mode in a ``with`` block, then restore the mode of every module."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
