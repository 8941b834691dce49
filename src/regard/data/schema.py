"""From nested keys to checked dataclasses, with errors that name the key."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from difflib import get_close_matches
from math import isfinite
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.errors import InputError

T = TypeVar("T")


def key(
    doc: str,
    default: Any = MISSING,
    *,
    among: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
) -> Any:
    """One key of a recipe: what it means, its default, and what it may be."""
    metadata = {"doc": doc, "among": tuple(among), "least": least, "most": most}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def describe_keys(kind: type, prefix: str) -> Iterator[tuple[str, str, str]]:
    hints = get_type_hints(kind)
    for entry in fields(kind):
        inner = next((part for part in _parts(hints[entry.name]) if is_dataclass(part)), None)
        if isinstance(inner, type):
            many = get_origin(hints[entry.name]) is tuple
            yield from describe_keys(inner, f"{prefix}{entry.name}{'[]' if many else ''}.")
            continue
        doc = entry.metadata["doc"]
        if entry.metadata["among"]:
            doc += f": {', '.join(entry.metadata['among'])}"
        yield prefix + entry.name, _default(entry), doc


def _default(entry: Field[Any]) -> str:
    if entry.default is not MISSING:
        return repr(list(entry.default) if isinstance(entry.default, tuple) else entry.default)
    return "needed" if entry.default_factory is MISSING else repr(entry.default_factory())


def assignment(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InputError(f"A key is set as key=value, but got {text!r}.")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value  # a text without quotes


def deep_copy(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {name: deep_copy(value) for name, value in tree.items()}
    return [deep_copy(value) for value in tree] if isinstance(tree, list) else tree


def set_key(whole: dict[str, Any], name: str, value: Any) -> None:
    """Set ``data.train.0.files`` and the like; a table that is not there is made."""
    *path, last = name.split(".")
    table: Any = whole
    for part in path:
        if isinstance(table, list) and part.isdigit() and int(part) < len(table):
            table = table[int(part)]
        elif isinstance(table, dict):
            table = table.setdefault(part, {})
        else:
            raise InputError(f"{name} cannot be set: there is no {part} on the way.")
    if not isinstance(table, dict):
        raise InputError(f"{name} cannot be set: {'.'.join(path)} is not a table.")
    table[last] = value


def build(kind: type[T], raw: Any, path: str) -> T:
    """A dataclass from a table."""
    if not isinstance(raw, dict):
        raise InputError(f"{path.rstrip('.')} should be a table, but got {raw!r}.")
    hints = get_type_hints(kind)
    known: dict[str, Field[Any]] = {entry.name: entry for entry in fields(kind)}  # type: ignore[arg-type]
    for name in raw:
        if name not in known:
            raise InputError(unknown_key(f"key {path}{name}", name, known, path))
    values = {}
    for name, entry in known.items():
        if name in raw:
            values[name] = _value(raw[name], hints[name], path + name)
            _check_range(values[name], entry, path + name)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise InputError(f"The recipe lacks {path}{name}: {entry.metadata['doc']}.")
    return kind(**values)


def _value(raw: Any, hint: Any, path: str) -> Any:
    """A value of the type that a key has."""
    if is_dataclass(hint) and isinstance(hint, type):
        return build(hint, raw, f"{path}.")
    if get_origin(hint) is tuple:
        if not isinstance(raw, list | tuple):
            raise InputError(f"{path} should be a list, but got {raw!r}.")
        inner = get_args(hint)[0]
        return tuple(_value(item, inner, f"{path}.{n}") for n, item in enumerate(raw))
    if get_origin(hint) is dict and isinstance(raw, dict):
        return raw
    parts = _parts(hint)
    if type(raw) is float and not isfinite(raw):
        raise InputError(f"{path} should be a finite number, but got {raw!r}.")
    if type(raw) in parts:
        return raw
    if float in parts and type(raw) is int:
        return float(raw)
    words = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
    wanted = " or ".join(words[part] for part in parts if part in words) or "a table"
    raise InputError(f"{path} should be {wanted}, but got {raw!r}.")


def _parts(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (UnionType, Union, tuple) else (hint,)


def _check_range(value: Any, entry: Field[Any], path: str) -> None:
    rules = entry.metadata
    if rules["among"] and value not in rules["among"]:
        raise InputError(unknown_key(f"{path} = {value!r}", str(value), rules["among"]))
    for low, bound in ((True, rules["least"]), (False, rules["most"])):
        if bound is not None and (value < bound if low else value > bound):
            side = "at least" if low else "at most"
            raise InputError(f"{path} should be {side} {bound:g}, but got {value!r}.")


def unknown_key(
    what: str, name: str, known: Sequence[str] | Mapping[str, Any], path: str = ""
) -> str:
    near = get_close_matches(name, list(known), n=1, cutoff=0.5)
    if near:
        return f"There is no {what}. Did you mean {path}{near[0]}?"
    return f"There is no {what}. There are {', '.join(known)}."


def nearest(what: str, names: Mapping[str, Any], known: Sequence[str]) -> None:
    """Raise InputError for the first of some names that is not known, with the nearest that is."""
    for name in names:
        if name not in known:
            raise InputError(unknown_key(f"{what}{name}", name, known, what.rpartition(" ")[2]))
