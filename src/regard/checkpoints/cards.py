"""Shipped models and their cards.

The folder of a model holds config.json, tokenizer.json, the weights, README.md and scores.json.

``README.md`` is the card: lines ``key: value`` between two lines ``---``, then Markdown::

    ---
    name: translate
    task: translation
    architecture: Transformer
    languages: en, fr, de
    licence: CC-BY-2.0-FR
    parameters: 13000000
    data: Tatoeba (CC BY 2.0 FR), ...
    trained_on: H200, 42 minutes, seed 1
    recipe: recipes/translate-student.toml
    commit: 6cc3e7d
    ---
    # translate ...

``scores.json`` is a list of scores, each with the data and settings to measure it again::

    {"metric": "bleu", "value": 54.32, "tolerance": 0.05,
     "data": [{"format": "tsv", "files": ["tatoeba/eng-fra.tsv.xz"], "part": [0, 20],
               "prefix": ">>fra<< "}],
     "settings": {"evaluation.num_beams": 4, "evaluation.length_penalty": 1.0}}

``data`` lists data sources, as ``[[data.test]]`` in a recipe. Their files are relative to FOLDER in
``regard evaluate NAME --root FOLDER``. ``settings`` holds other keys of a recipe: ``data.length``,
``data.prepare``, keys of ``evaluation``, ``batch.tokens``, and for a Transformer-XL
``model.config.memory``. A score is reproduced if it is within ``tolerance`` of ``value``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from regard.errors import CheckpointError, InputError

SHIPPED = Path(__file__).parent.parent / "shipped"  # the folder of shipped models
CARD, SCORES = "README.md", "scores.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Card:
    """The card of a shipped model.

    >>> card("books-gpt2").licence
    'Apache-2.0'
    """

    name: str
    task: str
    architecture: str
    languages: str
    licence: str
    parameters: int
    data: str
    trained_on: str  # device, minutes, seed
    recipe: str
    commit: str
    text: str  # the Markdown after the keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Score:
    """A score on a card, with the data and settings to measure it again.

    >>> {score.metric for score in scores("answer")} >= {"exact", "f1"}
    True
    """

    metric: str
    value: float
    tolerance: float
    data: list[dict[str, Any]]  # data sources, as in a recipe
    settings: dict[str, Any]  # other keys of a recipe


def names() -> list[str]:
    """Return the names of all shipped models.

    >>> isinstance(names(), list)
    True
    """
    return sorted(config.parent.name for config in SHIPPED.glob("*/config.json"))


def folder(name: str) -> Path:
    """Return the folder of a shipped model.

    >>> (folder("translate") / "config.json").exists()
    True
    """
    known = names()
    if name not in known:
        near = get_close_matches(name, known, 1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"There is no shipped model {name!r}.{hint} There are: {', '.join(known) or 'none'}."
        )
    return SHIPPED / name


def card(name: str) -> Card:
    """Return the card of a shipped model.

    >>> card("translate").languages
    'en, fr, de'
    """
    return read_card(folder(name) / CARD)


def scores(name: str) -> list[Score]:
    """Return the scores of a shipped model.

    >>> scores("books-gpt2")[0].metric
    'bits_per_byte'
    """
    return read_scores(folder(name) / SCORES)


def front_matter(text: str) -> tuple[dict[str, str], str]:
    r"""Return the keys and values at the start of a card, and the text after them.

    A line is ``key: value``. After a line ``key:``, lines ``- value`` are a list; its items are
    joined with commas.

    >>> front_matter("---\nlicence: MIT\nlanguages:\n- en\n- fr\n---\nHello.\n")
    ({'licence': 'MIT', 'languages': 'en, fr'}, 'Hello.\n')
    """
    lines = text.splitlines(keepends=True)
    marks = [number for number, line in enumerate(lines) if line.rstrip() == "---"][:2]
    if len(marks) < 2 or marks[0] != 0:
        return {}, text
    facts: dict[str, str] = {}
    key = ""
    for line in lines[1 : marks[1]]:
        item = line.strip()
        if item.startswith("- ") and key:
            facts[key] = ", ".join(filter(None, (facts[key], _bare(item[2:]))))
        elif line[:1].strip() and ":" in item:
            key, _, value = (part.strip() for part in item.partition(":"))
            facts[key] = _bare(value)
        else:
            key = ""  # nested keys are not read
    return facts, "".join(lines[marks[1] + 1 :])


def _bare(value: str) -> str:
    value = value.strip()
    quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if quoted else value


def read_card(file: Path) -> Card:
    """Read a card, which must have every key of :class:`Card`."""
    facts, text = front_matter(_text(file))
    wanted = {entry.name for entry in fields(Card)} - {"text"}
    if odd := sorted(wanted ^ facts.keys()):
        raise CheckpointError(
            f"{file} should have the keys {sorted(wanted)}; missing or unknown: {odd}."
        )
    if not facts["parameters"].isdecimal():
        raise CheckpointError(
            f"{file}: parameters must be a whole number, but is {facts['parameters']!r}."
        )
    count = int(facts.pop("parameters"))
    return Card(**facts, parameters=count, text=text.strip() + "\n")


def read_scores(file: Path) -> list[Score]:
    """Read the scores in a scores.json."""
    text = _text(file)
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{file} is not readable JSON: {error}.") from None
    if not isinstance(rows, list):
        raise CheckpointError(f"{file} should hold a list of scores.")
    return [_score(row, file) for row in rows]


_KINDS: dict[str, tuple[type, ...]] = {
    "metric": (str,),
    "value": (int, float),
    "tolerance": (int, float),
    "data": (list,),
    "settings": (dict,),
}


def _score(row: object, file: Path) -> Score:
    if not isinstance(row, dict) or row.keys() != _KINDS.keys():
        raise CheckpointError(
            f"{file}: a score must have the keys {list(_KINDS)}, but got {row!r}."
        )
    for key, kinds in _KINDS.items():
        if type(row[key]) not in kinds:
            raise CheckpointError(
                f"{file}: {key} must be a {kinds[-1].__name__}, but is {row[key]!r}."
            )
    if not all(isinstance(source, dict) for source in row["data"]):
        raise CheckpointError(f"{file}: data must be a list of data sources, not {row['data']!r}.")
    return Score(**row)


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise CheckpointError(f"There is no file {file}.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file} cannot be read: {error}.") from None
