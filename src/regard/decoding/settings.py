"""Decoding settings: from a model's files, for a task, with what a call asks for, to a strategy."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from regard.checkpoints.files import CONFIG, GENERATION, read_json
from regard.decoding.strategies import Beam, Greedy, How, Sample, at_least
from regard.errors import CheckpointError, InputError

# What older checkpoints say of decoding in config.json itself.
_OF_DECODING = (
    "bad_words_ids", "early_stopping", "length_penalty", "max_length", "max_new_tokens",
    "min_length", "min_new_tokens", "no_repeat_ngram_size", "num_beams", "repetition_penalty",
)  # fmt: skip
# Settings that would change what is written, and the values by which they do not.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "repetition_penalty": (1.0,),
    "encoder_no_repeat_ngram_size": (0,),
    "forced_bos_token_id": (),
    "suppress_tokens": ([],),
    "begin_suppress_tokens": ([],),
    "sequence_bias": ({},),
}
# What is followed of them where a text is written for another, and not where one goes on.
_OF_PAIRS: dict[str, tuple[object, ...]] = {
    "num_beams": (1,),
    "no_repeat_ngram_size": (0,),
    "min_length": (0,),
    "min_new_tokens": (0,),
}
Way = How | Mapping[str, float]  # whole, or what is other than in a model's own
_PARTS = {
    "num_beams", "length_penalty", "early_stopping", "no_repeat_ngram_size", "min_length",
    "min_new_tokens", "max_length", "max_new_tokens",
}  # fmt: skip


def tasks_of(config: Mapping[str, Any], name: str) -> dict[str, dict[str, Any]]:
    """What a model's config.json says about tasks: their prefixes, and how to decode."""
    found = config.get("task_specific_params") or {}
    if not isinstance(found, dict) or not all(isinstance(task, dict) for task in found.values()):
        raise CheckpointError(f"{name}: task_specific_params should hold objects.")
    return found


def settings_of(folder: Path) -> dict[str, Any]:
    """What a checkpoint says about decoding, whatever its task."""
    if (folder / GENERATION).exists():
        return read_json(folder / GENERATION)
    config = read_json(folder / CONFIG)
    return {name: config[name] for name in _OF_DECODING if name in config}


def beam_search(beam: int | None, length_penalty: float | None) -> dict[str, float]:
    """What is to be other than the model's own files say."""
    asked = {"num_beams": beam, "length_penalty": length_penalty}
    return {name: value for name, value in asked.items() if value is not None}


def sampling(
    temperature: float, top_k: int, top_p: float, seed: int, no_repeat: int
) -> Greedy | Sample:
    if temperature == 0:
        return Greedy(no_repeat)
    return Sample(temperature, top_k, top_p, seed, no_repeat)


class SettingWarning(UserWarning):
    """A model's files ask for a way to decode that regard does not have."""


def not_followed(
    settings: Mapping[str, Any], *, pairs: bool, silences: bool
) -> Iterator[tuple[str, object]]:
    """The settings that regard does not follow, for a model of pairs and one that bans tokens."""
    for name, neutral in (_NEUTRAL if pairs else _NEUTRAL | _OF_PAIRS).items():
        if settings.get(name) is not None and settings[name] not in neutral:
            yield name, settings[name]
    words = settings.get("bad_words_ids")
    single = isinstance(words, list) and all(isinstance(w, list) and len(w) == 1 for w in words)
    if words and not (single and silences):
        yield "bad_words_ids", words


def decoding(settings: Mapping[str, Any], how: Way | None, length: int | None) -> tuple[How, int]:
    """How to decode and how far: as asked for, else as the settings of a model say.

    Asked for may be a part of it, by the names that such settings have: {"num_beams": 8}.
    """
    settings = {name: value for name, value in settings.items() if value is not None}
    asked: Mapping[str, float] = {}
    if isinstance(how, Mapping):
        settings, asked, how = {**settings, **how}, how, None
        if unknown := asked.keys() - _PARTS:
            raise InputError(
                f"how={{...}} has no {min(map(str, unknown))!r}. It may have "
                f"{', '.join(sorted(_PARTS))}."
            )
        if length is None:
            length = asked.get("max_new_tokens", asked.get("max_length"))  # type: ignore[assignment]
        if "length_penalty" in asked and settings.get("num_beams", 4) == 1:
            raise InputError("A length penalty is for beams: ask for some of them, too.")
    try:
        if how is None:
            beams, repeat = settings.get("num_beams", 4), settings.get("no_repeat_ngram_size", 0)
            # Of the two ways to say how short it may be, one counts the token it starts from.
            new, all_in = (settings.get(name, 0) for name in ("min_new_tokens", "min_length"))
            at_least("min_new_tokens", new, 0)
            at_least("min_length", all_in, 0)
            least = max(new, all_in - 1)
            how = Greedy(repeat, least) if beams == 1 else Beam(
                beams,
                settings.get("length_penalty", 1.0),
                settings.get("early_stopping", False),
                no_repeat_ngram_size=repeat,
                min_new_tokens=least,
            )  # fmt: skip
    except (InputError, TypeError) as error:
        if asked:
            raise InputError(str(error)) from None
        raise CheckpointError(
            f"What the model's files say of decoding cannot be followed: {error}"
        ) from None
    if not isinstance(how, How):
        raise InputError(f"how is Greedy(), Sample(...), Beam(...) or a part, but got {how!r}.")
    if length is None:
        length = settings.get("max_new_tokens") or settings.get("max_length") or 256
        if type(length) is not int or length < 1:
            raise CheckpointError(f"A model's files give {length!r} as the most to be written.")
    return how, length
