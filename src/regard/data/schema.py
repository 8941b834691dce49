"""Parse nested tables into checked dataclasses, with errors that name the key."""

from __future__ import annotations

import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, field, fields, is_dataclass
from difflib import get_close_matches
from math import isfinite
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.errors import InputError

T = TypeVar("T")

# The current names of keys of earlier versions: old recipes, cards and checkpoints stay readable.
# A key never moves to another table.
OLD_KEYS = {
    "data.bad": "data.max_bad_share",
    "data.forget": "data.memory_reset_every",
    "evaluation.always": "evaluation.always_answer",
    "evaluation.beam": "evaluation.num_beams",
    "evaluation.least": "evaluation.min_new_tokens",
    "evaluation.no_repeat": "evaluation.no_repeat_ngram_size",
    "graphs": "cuda_graphs",
    "model.config.begin": "model.config.begin_token",
    "model.config.end": "model.config.end_token",
    "model.config.kinds": "model.config.token_types",
    "model.config.pad": "model.config.pad_token",
    "model.config.shrink": "model.config.div_val",
    "model.config.start": "model.config.start_token",
    "model.locked": "model.variational_dropout",
    "optimizer.activation": "optimizer.activation_regularization",
    "optimizer.agreement": "optimizer.r_drop",
    "optimizer.decay": "optimizer.weight_decay",
    "optimizer.relative": "optimizer.scale_by_initial_rms",
    "optimizer.slowness": "optimizer.temporal_activation_regularization",
    "optimizer.smoothing": "optimizer.label_smoothing",
    "saving.last": "saving.keep_last",
    "watching.entropy": "watching.min_entropy",
    "watching.logit": "watching.max_logit",
}


def key(
    doc: str,
    default: Any = MISSING,
    *,
    among: Sequence[str] = (),
    least: float | None = None,
    most: float | None = None,
    only: Sequence[str] = (),
) -> Any:
    """A dataclass field with its description, default, allowed values, and its tasks or models."""
    metadata = {"doc": doc, "among": among, "least": least, "most": most, "only": only}
    if isinstance(default, type):
        return field(default_factory=default, metadata=metadata)
    return field(default=default, metadata=metadata)


def describe_keys(kind: type, prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """Every key of a dataclass and its tables: name, default (or "needed") and meaning."""
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


def parse(
    kind: type[T], raw: Mapping[str, Any], overrides: Sequence[str] | Mapping[str, Any] = ()
) -> T:
    """Check nested tables and return a dataclass; ``overrides`` such as ``["seed=3"]`` set keys."""
    try:
        whole = rename_old_keys(raw)
        if not isinstance(overrides, Mapping):
            overrides = dict(map(assignment, overrides))
        for name, value in overrides.items():
            set_key(whole, OLD_KEYS.get(name, name), value)
        return build(kind, rename_old_keys(whole), "")
    except RecursionError:
        raise InputError("The keys or values of the recipe are nested too deeply.") from None


def assignment(text: str) -> tuple[str, Any]:
    """The key and the value of a setting such as ``seed=3``."""
    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InputError(f"A key is set as key=value, but got {text!r}.")
    try:
        return name.strip(), tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        return name.strip(), value  # a text without quotes


def rename_old_keys(tree: Any, path: str = "") -> Any:
    """A copy of nested tables, with keys of earlier versions under their current names."""
    if isinstance(tree, list):
        return [rename_old_keys(part, f"{path}[].") for part in tree]
    if not isinstance(tree, Mapping):
        return tree
    copied: dict[str, Any] = {}
    for old, value in tree.items():
        name = str(OLD_KEYS.get(f"{path}{old}", old)).rpartition(".")[2]
        if name != old and name in tree:
            raise InputError(f"{path}{old} is the earlier name of {path}{name}: give one of them.")
        copied[name] = rename_old_keys(value, f"{path}{name}.")
    return copied


def set_key(whole: dict[str, Any], name: str, value: Any) -> None:
    """Set a key such as ``data.train.0.files``; missing tables are added."""
    *path, last = name.split(".")
    table: Any = whole
    for part in path:
        if isinstance(table, list) and part.isdigit() and int(part) < len(table):
            table = table[int(part)]
        elif isinstance(table, dict):
            table = table.setdefault(part, {})
        else:
            raise InputError(f"{name} cannot be set: there is no {part} in its path.")
    if not isinstance(table, dict):
        raise InputError(f"{name} cannot be set: {'.'.join(path)} is not a table.")
    table[last] = value


def build(kind: type[T], raw: Any, path: str) -> T:
    """Build a dataclass from a table; errors name the table by its ``path``."""
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
            raise InputError(
                f"The recipe has no {path}{name}, which is needed: {entry.metadata['doc']}."
            )
    return kind(**values)


def _value(raw: Any, hint: Any, path: str) -> Any:
    """The value, checked against the key's type; an integer is converted if a float is needed."""
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
    """Raise InputError for the first unknown name, and suggest the nearest known name."""
    for name in names:
        if name not in known:
            raise InputError(unknown_key(f"{what}{name}", name, known, what.rpartition(" ")[2]))


def check_scope(section: Any, names: Collection[str], path: str = "") -> None:
    """Raise InputError if a key is set that has no effect for the task and the architecture.

    ``names`` are the names of the task and of the architecture.
    """
    for entry in fields(section):
        value, only = getattr(section, entry.name), entry.metadata["only"]
        if is_dataclass(value):
            check_scope(value, names, f"{path}{entry.name}.")
        elif only and value != entry.default and not {*names} & {*only}:
            raise InputError(
                f"{path}{entry.name} does nothing for {' with '.join(names)}; it is for "
                f"{' or '.join(only)}. Leave it out."
            )
