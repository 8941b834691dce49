"""A model ready for use: with its tokenizer, and what its files say about decoding."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import (
    Any,
    Literal,
    get_args,
)

import torch

from regard.checkpoints import files, hub
from regard.decoding import settings
from regard.decoding.settings import SettingWarning, not_followed
from regard.errors import CheckpointError, InputError
from regard.models.loading import load
from regard.models.model import Model
from regard.models.quantization import prepack, quantize
from regard.models.t5 import T5
from regard.models.transformer import Transformer
from regard.text.preparing import PREPARATIONS, prepare
from regard.text.tokenizer import Tokenizer

Name = str | os.PathLike[str]
Precision = Literal["float32", "bfloat16", "int8"]


@dataclass(frozen=True, slots=True)
class Ready:
    """A model with all that is needed to use it."""

    name: str
    model: Model
    text: Tokenizer
    config: Mapping[str, Any]  # config.json as it stands
    defaults: Mapping[str, Any]  # generation_config.json

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. A model may have more of them than its tokenizer: those say nothing."""
        return self.text.decode([one for one in ids if one < len(self.text.target)])

    def settings(self, task: str | None) -> dict[str, Any]:
        """What its files say about decoding, for a task that they name."""
        return {**self.defaults, **(self.tasks.get(task, {}) if task else {})}

    @property
    def tasks(self) -> dict[str, dict[str, Any]]:
        """What config.json says about tasks: their prefixes, and how to decode."""
        return settings.tasks_of(self.config, self.name)

    def prepared(self, text: str, task: str) -> str:
        """A text as those were that it learned a task from, where its recipe says how."""
        steps = self.tasks.get(task, {}).get("prepare", [])
        if not isinstance(steps, list) or not all(step in PREPARATIONS for step in steps):
            raise CheckpointError(f"{self.name}: texts cannot be prepared by {steps!r}.")
        return prepare(text, steps)

    @property
    def ends(self) -> list[int]:
        """The tokens that end what it writes."""
        said = self.defaults.get("eos_token_id")
        said = self.model.config.end_token if said is None else said
        found = said if isinstance(said, list) else [] if said is None else [said]
        if not all(type(token) is int for token in found):
            raise CheckpointError(f"{self.name}: eos_token_id = {said!r} is no token.")
        return found

    @property
    def window(self) -> int:
        """How many tokens it reads at once."""
        found = getattr(self.model.config, "length", None) or self.config.get("n_positions") or 512
        if type(found) is not int or found < 8:
            raise CheckpointError(f"{self.name}: n_positions = {found!r} is no length.")
        return found


def ready(
    name: Name,
    kinds: tuple[type[Model], ...],
    task: str,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
) -> Ready:
    """A model by its name or folder, loaded once as long as its files stay the same."""
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
    found = _loaded(folder.resolve(), stamps, str(device or "cpu"), precision)
    if not isinstance(found.model, kinds):
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(
            f"{name} is a {type(found.model).__name__}, which cannot {task}: that takes a {wanted}."
        )
    return Ready(str(name), found.model, found.text, found.config, found.defaults)


@lru_cache(maxsize=8)  # those that come along, and some
def _loaded(folder: Path, stamps: object, device: str, precision: Precision) -> Ready:
    del stamps  # of the files: the key under which this is kept
    # What precision a file has saves space; in which one it is fast depends on the machine.
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = load(folder, device=device, dtype=dtype)
    defaults = settings.settings_of(folder)
    _silence(model, defaults.get("bad_words_ids"))
    config = files.read_json(folder / files.CONFIG)
    asked = [defaults, *settings.tasks_of(config, folder.name).values()]
    pairs, silences = isinstance(model, Transformer | T5), isinstance(model, Transformer)
    for name, value in chain.from_iterable(
        not_followed(said, pairs=pairs, silences=silences) for said in asked
    ):
        warnings.warn(
            f"{folder.name} asks for {name} = {value!r}, which regard does not follow.",
            SettingWarning,
            stacklevel=2,
        )
    if precision == "int8":
        quantize(model)
    elif precision == "bfloat16" and model.device.type == "cpu":
        prepack(model)
    return Ready(str(folder), model, Tokenizer.load(folder), config, defaults)


def _silence(model: Model, tokens: object) -> None:
    """Let a Transformer never write some tokens: Marian's padding has a score, but no meaning."""
    if not isinstance(model, Transformer) or not isinstance(tokens, list):
        return
    for token in tokens:
        if isinstance(token, list) and len(token) == 1 and type(token[0]) is int:
            if 0 <= token[0] < model.output_bias.shape[1]:
                model.output_bias[0, token[0]] = -torch.inf


# ------------------------------------------------------------------------------ text from text


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within, nothing is dropped; after that, every part is as it was before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def check_prefix(name: str | os.PathLike[str], text: str) -> None:
    """Raise where a model's files name one task, and a text does not begin as that task's do."""
    config = files.read_json(hub.find(name) / files.CONFIG)
    prefixes = [task.get("prefix") for task in settings.tasks_of(config, str(name)).values()]
    if len(prefixes) != 1 or not isinstance(prefixes[0], str):
        return
    if not text.startswith(prefixes[0].strip()):
        raise InputError(
            f"{name} learned from texts that begin with {prefixes[0]!r}: begin this one so, too."
        )
