"""Decoding settings: from a model's files and what a call asks for, to a strategy and to JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from regard.checkpoints.files import CONFIG, GENERATION, read_json
from regard.decoding.strategies import Beam, Greedy, Sample, Strategy, at_least
from regard.errors import CheckpointError, InputError

# Names that stand for two of our settings: they count the token that decoding starts from.
_OLDER = ("max_length", "min_length")
# What a model's files may set. regard samples only where a call asks for it.
_SEARCH = (
    "num_beams", "length_penalty", "early_stopping", "no_repeat_ngram_size", "min_new_tokens",
    "max_new_tokens", *_OLDER,
)  # fmt: skip
# Older checkpoints have these in config.json itself.
_IN_CONFIG = (*_SEARCH, "bad_words_ids", "repetition_penalty")
# Settings that regard does not follow, and the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({},),
}
# For a language model also those of search: its files do not select a strategy.
_NEUTRAL_OF_COMPLETION: dict[str, tuple[object, ...]] = _NEUTRAL | {
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How to decode, in the names of generation_config.json. None means that it is not set.

    >>> of_files = Settings(num_beams=6, length_penalty=0.6)
    >>> of_files.updated(Settings(num_beams=1)).strategy()
    Greedy(no_repeat_ngram_size=0, min_new_tokens=0)
    >>> Settings(do_sample=True, top_k=5).to_json()
    {'do_sample': True, 'top_k': 5}
    """

    do_sample: bool | None = None  # otherwise beam search, or greedy with one beam
    num_beams: int | None = None
    num_return_sequences: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: float | None = None  # of samples; 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    max_new_tokens: int | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """The settings among ``values``; others are left out, and so is null.

        >>> Settings.from_json({"max_length": 20, "min_length": 3, "prefix": "sum: "}).to_json()
        {'min_new_tokens': 2, 'max_new_tokens': 20}
        """
        given = {name: value for name, value in values.items() if value is not None}
        new, total = (given.get(name, 0) for name in ("min_new_tokens", "min_length"))
        at_least("min_new_tokens", new, 0)
        at_least("min_length", total, 0)
        if new or total:
            given["min_new_tokens"] = max(new, total - 1)
        most = given.get("max_new_tokens") or given.get("max_length")
        if most is not None:
            at_least("max_new_tokens", most, 1)
            given["max_new_tokens"] = most
        return cls(**{name: given[name] for name in _NAMES if name in given})

    @classmethod
    def of_files(cls, values: Mapping[str, Any]) -> Settings:
        """The settings of search that a model's files have; CheckpointError where one is wrong."""
        try:
            settings = cls.from_json({name: values.get(name) for name in _SEARCH})
            settings.strategy()
        except InputError as error:
            raise CheckpointError(
                f"The decoding settings in the model's files cannot be followed: {error}"
            ) from None
        return settings

    @classmethod
    def of_call(cls, values: Mapping[str, Any]) -> Settings:
        """As :meth:`from_json`, but an unknown name raises InputError."""
        if unknown := values.keys() - {*_NAMES, *_OLDER}:
            raise InputError(
                f"There is no decoding setting {min(map(str, unknown))!r}. Settings are "
                f"{', '.join((*_NAMES, *_OLDER))}."
            )
        return cls.from_json(values)

    def to_json(self) -> dict[str, Any]:
        """The settings that are not None, by their names in generation_config.json."""
        values = {name: getattr(self, name) for name in _NAMES}
        return {name: value for name, value in values.items() if value is not None}

    def updated(self, other: Settings) -> Settings:
        """These settings, with those of ``other`` where it sets any."""
        return Settings(**self.to_json() | other.to_json())

    def strategy(self) -> Strategy:
        """The strategy that follows these settings: by default beam search with four beams."""
        if self.do_sample and self.num_beams not in (None, 1):
            raise InputError("Beams do not sample: set do_sample to False, or num_beams to 1.")
        kind: type[Strategy] = Beam
        if self.do_sample:
            kind = Greedy if self.temperature == 0 else Sample
        elif self.num_beams == 1:
            kind = Greedy
        given, names = self.to_json(), [field.name for field in fields(kind)]
        return kind(**{name: given[name] for name in names if name in given})

    def resolve(
        self, asked: Asked | None, max_new_tokens: int | None
    ) -> tuple[Strategy, int | None]:
        """The strategy of a call, and its maximum number of new tokens, None if nothing sets it.

        ``asked`` overrides these settings: all of them if it is a strategy, else those it sets.
        """
        if isinstance(asked, Strategy):
            return asked, self.max_new_tokens if max_new_tokens is None else max_new_tokens
        if isinstance(asked, Mapping):
            asked = Settings.of_call(asked)
        if not isinstance(asked, Settings | None):
            raise InputError(
                f"how is Greedy(), Sample(...), Beam(...) or Settings(...), but got {asked!r}."
            )
        chosen = self if asked is None else self.updated(asked)
        if asked is not None and asked.length_penalty is not None and chosen.num_beams == 1:
            raise InputError("A length penalty is for beam search: set num_beams above 1, too.")
        if max_new_tokens is None:
            max_new_tokens = chosen.max_new_tokens
        return chosen.strategy(), max_new_tokens


_NAMES = tuple(field.name for field in fields(Settings))
Asked = Settings | Strategy | Mapping[str, Any]  # what a call may pass


def generation_of(folder: Path) -> dict[str, Any]:
    """The contents of generation_config.json, or the same keys of an older config.json."""
    if (folder / GENERATION).exists():
        return read_json(folder / GENERATION)
    config = read_json(folder / CONFIG)
    return {name: config[name] for name in _IN_CONFIG if name in config}


def tasks_of(config: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """The tasks that a model's config.json names: their prefixes, and how to decode for them."""
    tasks = config.get("task_specific_params") or {}
    if not isinstance(tasks, dict) or not all(isinstance(task, dict) for task in tasks.values()):
        raise CheckpointError(f"{name}: task_specific_params should hold objects.")
    return tasks


class SettingWarning(UserWarning):
    """A model's files have a decoding setting that regard does not follow."""


def not_followed(
    settings: Mapping[str, Any], *, completes: bool, bans_tokens: bool
) -> Iterator[tuple[str, object]]:
    """The settings that are not followed, with their values.

    ``completes``: the model continues texts; ``bans_tokens``: it can exclude single tokens.
    """
    for name, neutral in (_NEUTRAL_OF_COMPLETION if completes else _NEUTRAL).items():
        if settings.get(name) is not None and settings[name] not in neutral:
            yield name, settings[name]
    words = settings.get("bad_words_ids")
    single = isinstance(words, list) and all(isinstance(w, list) and len(w) == 1 for w in words)
    if words and not (single and bans_tokens):
        yield "bad_words_ids", words
