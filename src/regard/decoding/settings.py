"""Decoding settings of a model's files and of calls, and their conversion to strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

from regard.checkpoints.bases import described
from regard.checkpoints.files import CONFIG, GENERATION, read_json
from regard.decoding.strategies import Beam, Greedy, Sample, Strategy, at_least
from regard.errors import CheckpointError, InputError

# Older names of max_new_tokens and min_new_tokens. They also count the start token.
_OLDER = ("max_length", "min_length")
# Settings read from a model's files. regard samples only if a call asks for it.
_SEARCH = (
    "num_beams", "length_penalty", "early_stopping", "no_repeat_ngram_size", "min_new_tokens",
    "max_new_tokens", *_OLDER,
)  # fmt: skip
# Older checkpoints have these settings in config.json.
_IN_CONFIG = (*_SEARCH, "bad_words_ids", "repetition_penalty")
# Settings that regard ignores, each with the values that have no effect.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({},),
}
# For language models regard also ignores search settings in files.
_NEUTRAL_OF_COMPLETION: dict[str, tuple[object, ...]] = _NEUTRAL | {
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Decoding settings with the names of generation_config.json. None means not set.

    >>> of_files = Settings(num_beams=6, length_penalty=0.6)
    >>> of_files.updated(Settings(num_beams=1)).strategy()
    Greedy(no_repeat_ngram_size=0, min_new_tokens=0)
    >>> Settings(do_sample=True, top_k=5).to_json()
    {'do_sample': True, 'top_k': 5}
    """

    do_sample: bool | None = None  # if not True: beam search, or greedy with one beam
    num_beams: int | None = None
    num_return_sequences: int | None = None
    length_penalty: float | None = None
    early_stopping: bool | Literal["never"] | None = None
    temperature: float | None = None  # for sampling; 0 is greedy
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = None
    max_new_tokens: int | None = None

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Settings:
        """Return the settings in ``values``. Unknown names and null values are ignored.

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
        """Return the search settings of a model's files. CheckpointError if a value is invalid."""
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
        """Return the settings in ``values``. InputError if a name is unknown."""
        if unknown := values.keys() - {*_NAMES, *_OLDER}:
            raise InputError(
                f"There is no decoding setting {min(map(str, unknown))!r}. Settings are "
                f"{', '.join((*_NAMES, *_OLDER))}."
            )
        return cls.from_json(values)

    def to_json(self) -> dict[str, Any]:
        """Return the settings that are not None, with their names in generation_config.json."""
        values = {name: getattr(self, name) for name in _NAMES}
        return {name: value for name, value in values.items() if value is not None}

    def updated(self, other: Settings) -> Settings:
        """Return these settings, overridden by those that ``other`` sets."""
        return Settings(**self.to_json() | other.to_json())

    def strategy(self) -> Strategy:
        """Return the strategy for these settings. The default is beam search with four beams."""
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
        """Return the strategy of a call, and the maximum number of new tokens, None if not set.

        If ``asked`` is a strategy, it replaces these settings. Otherwise it overrides single ones.
        """
        if isinstance(asked, Strategy):
            return asked, self.max_new_tokens if max_new_tokens is None else max_new_tokens
        if isinstance(asked, Mapping):
            asked = Settings.of_call(asked)
        if not isinstance(asked, Settings | None):
            raise InputError(
                f"how must be Greedy(), Sample(...), Beam(...) or Settings(...), but got {asked!r}."
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
    """Return the contents of generation_config.json, or the same keys of an older config.json."""
    folder = described(folder)
    if (folder / GENERATION).exists():
        return read_json(folder / GENERATION)
    config = read_json(folder / CONFIG)
    return {name: config[name] for name in _IN_CONFIG if name in config}


def tasks_of(config: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """Return the tasks in config.json, each with its prefix and decoding settings."""
    tasks = config.get("task_specific_params") or {}
    if not isinstance(tasks, dict) or not all(isinstance(task, dict) for task in tasks.values()):
        raise CheckpointError(f"{name}: task_specific_params should hold objects.")
    return tasks


class SettingWarning(UserWarning):
    """A model's files have a decoding setting that regard does not follow."""


def not_followed(
    settings: Mapping[str, Any], *, completes: bool, bans_tokens: bool
) -> Iterator[tuple[str, object]]:
    """Yield the settings that regard does not follow, with their values.

    ``completes`` means that the model is a language model, and ``bans_tokens`` that it can exclude
    single tokens.
    """
    for name, neutral in (_NEUTRAL_OF_COMPLETION if completes else _NEUTRAL).items():
        if settings.get(name) is not None and settings[name] not in neutral:
            yield name, settings[name]
    words = settings.get("bad_words_ids")
    single = isinstance(words, list) and all(isinstance(w, list) and len(w) == 1 for w in words)
    if words and not (single and bans_tokens):
        yield "bad_words_ids", words
