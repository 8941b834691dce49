"""Config classes with checked fields, and their mapping to config.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from torch import nn

from regard.errors import CheckpointError, InputError
from regard.models.registry import Architecture

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_new": lambda: nn.GELU("tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}


def size(default: int | None, most: int = 2**24) -> Any:
    """A field for a whole number from 1 to ``most``. It accepts None if that is the default."""
    return _checked(
        default, f"a whole number from 1 to {most}", lambda v: type(v) is int and 1 <= v <= most
    )


def layers(default: int | None) -> Any:
    """A field for a number of layers."""
    return size(default, most=1024)


def rate(default: float | None) -> Any:
    """A field for a dropout probability. It accepts None if that is the default."""
    return _checked(default, "a number from 0 to below 1", lambda v: _number(v) and 0 <= v < 1)


def positive(default: float) -> Any:
    """A field for a number above 0."""
    return _checked(default, "a number above 0", lambda v: _number(v) and 0 < v < 1e6)


def switch(default: bool) -> Any:
    """A field for a boolean."""
    return _checked(default, "true or false", lambda v: type(v) is bool)


def token(default: int | None) -> Any:
    """A field for the id of a special token, or None."""
    return _checked(
        default, "a token's id", lambda v: type(v) is int and 0 <= v < 2**31, optional=True
    )


def activation(default: str) -> Any:
    """A field for the name of an activation function."""
    return _checked(
        default,
        f"one of {', '.join(ACTIVATIONS)}",
        lambda v: isinstance(v, str) and v in ACTIVATIONS,
    )


def _number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _checked(
    default: object, words: str, accepts: Callable[[Any], bool], optional: bool = False
) -> Any:
    if not optional and default is not None:
        return field(default=default, metadata={"words": words, "accepts": accepts})
    checks = {"words": f"None or {words}", "accepts": lambda v: v is None or accepts(v)}
    return field(default=default, metadata=checks)


@dataclass(frozen=True, kw_only=True)
class Config:
    """The base class of all model configs. It checks every field."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if "accepts" in entry.metadata and not entry.metadata["accepts"](value):
                raise InputError(
                    f"{type(self).__name__}({entry.name}=...) must be {entry.metadata['words']}, "
                    f"but got {value!r}."
                )


def check_heads(heads: int, dim: int) -> None:
    """Raise InputError if ``heads`` does not divide ``dim``."""
    if dim % heads:
        raise InputError(f"{heads} heads cannot share {dim} dimensions evenly.")


@dataclass(frozen=True)
class ConfigMap:
    """The mapping between the keys of config.json and the fields of a config.

    ``defaults`` are the values of missing keys whose default differs from the config's. ``fixed``
    are values that regard requires: it does not implement models with others.
    """

    config: type[Config]
    names: Mapping[str, str]  # keys to fields
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)

    def read(self, raw: Mapping[str, Any]) -> Config:
        """Return the config that ``raw``, the contents of config.json, describes."""
        for key, value in self.fixed.items():
            if raw.get(key, value) != value:
                raise CheckpointError(
                    f"config.json says {key} = {raw[key]!r}; regard's model has {value!r}."
                )
        given = {**self.defaults, **raw}
        try:
            return self.config(
                **{ours: given[key] for key, ours in self.names.items() if key in given}
            )
        except InputError as error:
            raise CheckpointError(f"config.json does not describe a model: {error}") from None

    def write(self, config: Config, row: Architecture) -> dict[str, Any]:
        """Return the contents of config.json."""
        return {
            **self.fixed,
            **{key: getattr(config, ours) for key, ours in self.names.items()},
            "model_type": row.model_type,
            "architectures": [row.hub_names[0]],
        }

    def tokens(self, config: Config) -> dict[str, Any]:
        """Return the special tokens of a config under their keys in generation_config.json."""
        return {
            key: getattr(config, ours)
            for key, ours in self.names.items()
            if key.endswith("_token_id")
        }
