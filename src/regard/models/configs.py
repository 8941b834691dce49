"""Config classes whose fields are checked and know their keys in config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from regard.errors import CheckpointError, InputError

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_new": lambda: nn.GELU("tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}


@dataclass(frozen=True)
class Kind:
    """A kind of config field: what its values may be."""

    words: str
    accepts: Callable[[Any], bool]
    optional: bool = False
    divides: str = ""  # the name of a field that must be a multiple of the value

    def __call__(self, default: object, key: str, missing: object = None) -> Any:
        """Return a field that is ``key`` in config.json. None is valid if it is the default.

        If config.json has no such key, the value is ``missing``, or the default without it.
        """
        optional = self.optional or default is None
        words = f"None or {self.words}" if optional else self.words
        metadata = {"kind": self, "optional": optional, "words": words}
        return field(default=default, metadata=metadata | {"key": key, "missing": missing})


def whole(most: int, divides: str = "") -> Kind:
    """Whole numbers from 1 to ``most``."""
    words = f"a whole number from 1 to {most}"
    return Kind(words, lambda v: type(v) is int and 1 <= v <= most, divides=divides)


def _number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


size, layers = whole(2**24), whole(1024)
heads = whole(2**24, divides="dim")  # heads that share the dimensions of the model
rate = Kind("a number from 0 to below 1", lambda v: _number(v) and 0 <= v < 1)
positive = Kind("a number above 0", lambda v: _number(v) and 0 < v < 1e6)
switch = Kind("true or false", lambda v: type(v) is bool)
token = Kind("a token's id", lambda v: type(v) is int and 0 <= v < 2**31, optional=True)
activation = Kind(
    f"one of {', '.join(ACTIVATIONS)}", lambda v: isinstance(v, str) and v in ACTIVATIONS
)
anything = Kind("", lambda _: True)  # checked by the config's own __post_init__


@dataclass(frozen=True, kw_only=True)
class Config:
    """The base class of all model configs. It checks every field."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value, rules = getattr(self, entry.name), entry.metadata
            if not (rules["kind"].accepts(value) or (value is None and rules["optional"])):
                raise InputError(
                    f"{type(self).__name__}({entry.name}=...) must be {rules['words']}, "
                    f"but got {value!r}."
                )
        for entry in fields(self):
            value, multiple = getattr(self, entry.name), entry.metadata["kind"].divides
            if multiple and getattr(self, multiple) % value:
                raise InputError(
                    f"{value} heads cannot share {getattr(self, multiple)} dimensions evenly."
                )


def read(config: type[Config], raw: Mapping[str, Any], fixed: Mapping[str, object]) -> Config:
    """Return the config that ``raw``, the contents of config.json, describes.

    ``fixed`` maps keys to the only values that regard implements.
    """
    for key, value in fixed.items():
        if raw.get(key, value) != value:
            raise CheckpointError(
                f"config.json says {key} = {raw[key]!r}, but regard implements only {value!r}."
            )
    given = {}
    for entry in fields(config):
        key, missing = entry.metadata["key"], entry.metadata["missing"]
        if key in raw or missing is not None:
            given[entry.name] = raw.get(key, missing)
    try:
        return config(**given)
    except InputError as error:
        raise CheckpointError(f"config.json does not describe a model: {error}") from None


def written(config: Config) -> dict[str, Any]:
    """Return the fields of a config under their keys in config.json."""
    return {entry.metadata["key"]: getattr(config, entry.name) for entry in fields(config)}
