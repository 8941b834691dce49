"""A model opened once: with its tokenizer, its config, and how its files say to decode."""

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
MAX_OPEN = 8  # bundles that are kept: the shipped ones, and some


@dataclass(frozen=True, slots=True)
class Bundle:
    """A model with its tokenizer, config and generation settings."""

    name: str
    model: Model
    tokenizer: Tokenizer
    config: Mapping[str, Any]  # the contents of config.json
    generation: Mapping[str, Any]  # the contents of generation_config.json

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. Ids that the tokenizer does not have are left out."""
        return self.tokenizer.decode([token for token in ids if token < len(self.tokenizer.target)])

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """The tasks that config.json names: their prefixes, and how to decode for them."""
        return tasks_of(self.config, self.name)

    def settings(self, task: str | None) -> Settings:
        """The decoding settings of the model's files, for one of its tasks or for all."""
        return Settings.of_files({**self.generation, **self.tasks.get(task or "", {})})

    def prefix(self, task: str | None) -> str:
        """The prefix of every source of a task; "" if the model's files have none."""
        prefix = self.tasks.get(task or "", {}).get("prefix")
        return prefix if isinstance(prefix, str) else ""

    def check_prefix(self, text: str) -> None:
        """Raise InputError if its files name one task, and a text lacks that task's prefix."""
        prefix = self.prefix(next(iter(self.tasks))) if len(self.tasks) == 1 else ""
        if not text.startswith(prefix.strip()):
            raise InputError(
                f"{self.name} was trained on texts that begin with {prefix!r}: begin this one "
                "with it, too."
            )

    def prepared(self, text: str, task: str) -> str:
        """A text prepared like the training data, by the steps that the model's files list."""
        steps = self.tasks.get(task, {}).get("prepare", [])
        if not isinstance(steps, list) or not all(step in PREPARATIONS for step in steps):
            raise CheckpointError(f"{self.name}: texts cannot be prepared by {steps!r}.")
        return prepare(text, steps)

    @property
    def ends(self) -> list[int]:
        """The tokens that end what it writes."""
        given = self.generation.get("eos_token_id")
        given = self.model.config.end_token if given is None else given
        ends = given if isinstance(given, list) else [] if given is None else [given]
        if not all(type(token) is int for token in ends):
            raise CheckpointError(f"{self.name}: eos_token_id = {given!r} is no token.")
        return ends

    @property
    def window(self) -> int:
        """The number of tokens it reads at once."""
        window = self.model.longest or self.config.get("n_positions") or 512
        if type(window) is not int or window < 8:
            raise CheckpointError(f"{self.name}: n_positions = {window!r} is no length.")
        return window


def open_bundle(
    name: Name,
    task: str | None = None,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
) -> Bundle:
    """A model by its name or folder. With ``task``, raise InputError if it cannot do that task.

    It is cached, and loaded again only if its files change.

    >>> bundle = open_bundle("books-gpt2", "complete")
    >>> bundle.model is open_bundle("books-gpt2").model, bundle.window
    (True, 256)
    """
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise InputError(f"There is no precision {precision!r}. Give one of {known}.")
    folder = hub.find(name)
    try:
        stamps = tuple(
            (file.name, file.stat().st_mtime_ns, file.stat().st_size)
            for file in sorted(folder.iterdir())
        )
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read: {error.strerror or error}.") from None
    bundle = _loaded(folder.resolve(), stamps, str(device or "cpu"), precision)
    if task is not None and task not in bundle.model.row().serves:
        able = [row.class_name for row in registry.ARCHITECTURES if task in row.serves]
        raise InputError(
            f"{name} is a {type(bundle.model).__name__}, which cannot {task}: that takes a "
            f"{' or '.join(able)}."
        )
    return replace(bundle, name=str(name))


@lru_cache(maxsize=MAX_OPEN)
def _loaded(folder: Path, stamps: object, device: str, precision: Precision) -> Bundle:
    del stamps  # of the files: part of the key of the cache
    # Files have the precision that saves space. Which one is fast depends on the machine.
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
    """Evaluation mode inside the context; afterwards every module's own mode is restored."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True
