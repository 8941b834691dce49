"""Fingerprints of runs: the settings and data that the weights depend on.

A run resumes only from a checkpoint with the same fingerprint. A key that the checkpoint does not
have counts as its default, and an earlier name of a key as its current name.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, get_type_hints

from regard.data.schema import OLD_KEYS
from regard.data.sources import Source
from regard.training.recipe import Recipe

# Keys that may change when a run is resumed: the weights do not depend on them, except that
# ``parallel`` changes the order of additions.
FREE = (
    "output", "data.root", "data.cache", "data.test", "saving.keep_last", "saving.minutes",
    "watching", "parallel", "tensorboard",
)  # fmt: skip


def fingerprint(recipe: Recipe, tokens: Mapping[str, str]) -> dict[str, Any]:
    """The hashes of the data, and all recipe keys that the weights depend on, in dotted form."""
    return {**_flat(asdict(recipe), ""), "tokens": dict(tokens)}


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first key whose values differ between two fingerprints; None if all are equal.

    >>> now = {"schedule.rate": 0.1, "compile": False}
    >>> difference({"schedule.rate": 0.1}, now)  # from a version without "compile"
    >>> difference({"schedule.rate": 0.2}, now)
    'schedule.rate = 0.2, but now it is 0.1'
    """
    old, new = _whole(before), _whole(now)
    for name in {**new, **old}:
        if name not in old:
            return f"no {name}, but now it is {new[name]!r}"
        if name not in new:
            return f"{name} = {old[name]!r}, but now it is not given"
        if old[name] != new[name]:
            return f"{name} = {old[name]!r}, but now it is {new[name]!r}"
    return None


def _flat(table: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in table.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{name}.")
        elif not _free(prefix + name):
            flat[prefix + name] = json.loads(json.dumps(value))
    return flat


def _free(name: str) -> bool:
    return name in FREE or name.partition(".")[0] in FREE


def _whole(fingerprint: Mapping[str, Any]) -> dict[str, Any]:
    """A fingerprint with current names and all defaults, without the keys in FREE."""
    named = {OLD_KEYS.get(name, name): value for name, value in fingerprint.items()}
    whole = {name: value for name, value in named.items() if not _free(name)}
    for name in ("data.train", "data.valid"):
        if name in whole:
            whole[name] = [_defaults(Source, "") | source for source in whole[name]]
    return _defaults(Recipe, "") | whole


def _defaults(kind: type, prefix: str) -> dict[str, Any]:
    """The defaults of all keys that have one, under dotted names as in :func:`_flat`."""
    hints, defaults = get_type_hints(kind), dict[str, Any]()
    for entry in fields(kind):
        hint = hints[entry.name]
        if isinstance(hint, type) and is_dataclass(hint):
            defaults |= _defaults(hint, f"{prefix}{entry.name}.")
        elif entry.default is not MISSING:
            defaults |= _flat({entry.name: entry.default}, prefix)
    return defaults
