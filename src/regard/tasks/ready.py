"""A model ready for use: with its tokenizer, and what its files say about decoding."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, wraps
from itertools import chain
from pathlib import Path
from time import perf_counter
from typing import (
    Any,
    Concatenate,
    Literal,
    NamedTuple,
    ParamSpec,
    Protocol,
    TypeVar,
    cast,
    get_args,
    overload,
)

import torch

from regard import checkpoints, shipped
from regard.decoding import Beam, Greedy, How, Output, generate
from regard.decoding.ways import at_least
from regard.errors import CheckpointError, InputError, UnknownModelError
from regard.models import T5, Model, Transformer, load
from regard.quantizing import arrange, quantize
from regard.text import Text
from regard.text.preparing import PREPARATIONS, prepare

Name = str | os.PathLike[str]
Precision = Literal["float32", "bfloat16", "int8"]


class _Default(NamedTuple):
    """A model that is used where none is named, and what can be where it is not shipped."""

    task: str
    example: str  # on the hub
    recipe: str


_SQUAD = "google-bert/bert-large-uncased-whole-word-masking-finetuned-squad"
_DEFAULTS = {
    "translate": _Default("translation", "Helsinki-NLP/opus-mt-en-fr", "translate.toml"),
    "summarize": _Default("summarization", "google-t5/t5-small", "summarize.toml"),
    "answer": _Default("question answering", _SQUAD, "answer.toml"),
    "books-gpt2": _Default("completion", "openai-community/gpt2", "books-gpt2.toml"),
}


@dataclass(frozen=True, slots=True)
class Ready:
    """A model with all that is needed to use it."""

    name: str
    model: Model
    text: Text
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
        return checkpoints.tasks_of(self.config, self.name)

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
        said = self.model.config.end if said is None else said
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
    _check_default(name)
    folder = checkpoints.find(name)
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


def _check_default(name: Name) -> None:
    """Say what to do where the default of a task is not there: nobody asked for it by its name."""
    usual = _DEFAULTS.get(str(name))
    if usual is None or name in shipped.names() or Path(name).is_dir():
        return
    raise UnknownModelError(
        f"No {usual.task} model comes with regard yet. Name one, such as --model {usual.example} "
        f'of the Hugging Face hub (in Python, model="{usual.example}"), or train one by '
        f"recipes/{usual.recipe}."
    )


@lru_cache(maxsize=8)  # those that come along, and some
def _loaded(folder: Path, stamps: object, device: str, precision: Precision) -> Ready:
    del stamps  # of the files: the key under which this is kept
    # What precision a file has saves space; in which one it is fast depends on the machine.
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    model = load(folder, device=device, dtype=dtype)
    defaults = checkpoints.settings_of(folder)
    _silence(model, defaults.get("bad_words_ids"))
    config = checkpoints.read_json(folder / checkpoints.CONFIG)
    asked = [defaults, *checkpoints.tasks_of(config, folder.name).values()]
    for name, value in chain.from_iterable(_not_followed(model, said) for said in asked):
        warnings.warn(
            f"{folder.name} asks for {name} = {value!r}, which regard does not follow.",
            SettingWarning,
            stacklevel=2,
        )
    if precision == "int8":
        quantize(model)
    elif precision == "bfloat16" and model.device.type == "cpu":
        arrange(model)
    return Ready(str(folder), model, Text.load(folder), config, defaults)


class SettingWarning(UserWarning):
    """A model's files ask for a way to decode that regard does not have."""


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


def _not_followed(model: Model, settings: Mapping[str, Any]) -> Iterator[tuple[str, object]]:
    pairs = isinstance(model, Transformer | T5)
    for name, neutral in (_NEUTRAL if pairs else _NEUTRAL | _OF_PAIRS).items():
        if settings.get(name) is not None and settings[name] not in neutral:
            yield name, settings[name]
    words = settings.get("bad_words_ids")
    single = isinstance(words, list) and all(isinstance(w, list) and len(w) == 1 for w in words)
    if words and not (single and isinstance(model, Transformer)):
        yield "bad_words_ids", words


def _silence(model: Model, tokens: object) -> None:
    """Let a Transformer never write some tokens: Marian's padding has a score, but no meaning."""
    if not isinstance(model, Transformer) or not isinstance(tokens, list):
        return
    for token in tokens:
        if isinstance(token, list) and len(token) == 1 and type(token[0]) is int:
            if 0 <= token[0] < model.output_bias.shape[1]:
                model.output_bias[0, token[0]] = -torch.inf


P = ParamSpec("P")
R = TypeVar("R")


class OneOrMany(Protocol[P, R]):
    """A task: of a text it gives a record, of several a list of records."""

    @overload
    def __call__(self, text: str, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(
        self, text: list[str] | tuple[str, ...], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...


def one_or_many(run: Callable[Concatenate[list[str], P], list[R]]) -> OneOrMany[P, R]:
    """What is written for several texts, for one too."""

    @wraps(run)
    def call(text: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        if isinstance(text, str):
            if not text.strip():
                raise InputError("The text is empty. Give some words.")
            return run([text], *args, **kwargs)[0]
        if not isinstance(text, list | tuple):
            raise InputError(f"Give a text or a list of texts, not {type(text).__name__}.")
        if wrong := [one for one in text if not isinstance(one, str)]:
            raise InputError(f"Give a list of texts; one of them is {wrong[0]!r}.")
        return run(list(text), *args, **kwargs)

    return cast("OneOrMany[P, R]", call)


# ------------------------------------------------------------------------------ text from text


@dataclass(frozen=True, slots=True)
class Written:
    """What a model wrote for one source."""

    source: list[int]
    ids: list[int]
    text: str
    chance: float  # the log-probability of all tokens
    tokens: int  # with the one that ends it
    seconds: float


Way = How | Mapping[str, float]  # whole, or what is other than in a model's own
_PARTS = {
    "num_beams", "length_penalty", "early_stopping", "no_repeat_ngram_size", "min_length",
    "min_new_tokens", "max_length", "max_new_tokens",
}  # fmt: skip


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
                no_repeat=repeat,
                least=least,
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


def encode(one: Ready, text: str) -> list[int]:
    """The ids of a source, with the token that ends it."""
    end = one.model.config.end
    return [*one.text.encode(text, special=False).ids, *(() if end is None else (end,))]


def write(one: Ready, sources: Sequence[str], how: How, length: int, batch: int) -> list[Written]:
    """What a model of texts to texts writes for each source."""
    model = one.model
    assert isinstance(model, Transformer | T5)
    began = perf_counter()
    prompts = [encode(one, source) for source in sources]
    outputs: list[list[Output]] = generate(
        model, prompts, how, length=length, stop=one.ends, batch=batch
    )
    share = (perf_counter() - began) / max(len(prompts), 1)
    found = []
    for prompt, (best, *_) in zip(prompts, outputs, strict=True):
        tokens = len(best.ids) + best.stopped
        chance = best.score * (tokens**how.length_penalty if isinstance(how, Beam) else 1)
        text = one.decode(best.ids)
        found.append(Written(prompt, best.ids, text, chance, tokens, share))
    return found
