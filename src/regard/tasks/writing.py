"""Write target texts for source texts with an encoder-decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from regard.decoding.generation import generate
from regard.decoding.strategies import Beam, Generated, Strategy
from regard.errors import InputError
from regard.models.bundle import Bundle
from regard.models.model import EncoderDecoder

MAX_NEW_TOKENS = 256  # where neither a call nor the model's files say

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


@dataclass(frozen=True, slots=True)
class Written:
    """What a model wrote for one source."""

    source: list[int]
    ids: list[int]
    text: str
    chance: float  # the log-probability of all tokens
    tokens: int  # with the one that ends it
    seconds: float


def encode(one: Bundle, text: str) -> list[int]:
    """The ids of a source, with the token that ends it."""
    end = one.model.config.end_token
    return [*one.tokenizer.encode(text, special=False).ids, *(() if end is None else (end,))]


def write(
    one: Bundle, sources: Sequence[str], how: Strategy, length: int | None, batch: int
) -> list[Written]:
    """What a model of texts to texts writes for each source, at most ``length`` tokens or 256."""
    model = one.model
    assert isinstance(model, EncoderDecoder)
    began = perf_counter()
    prompts = [encode(one, source) for source in sources]
    outputs: list[list[Generated]] = generate(
        model,
        prompts,
        how,
        max_new_tokens=MAX_NEW_TOKENS if length is None else length,
        stop=one.ends,
        batch=batch,
    )
    share = (perf_counter() - began) / max(len(prompts), 1)
    found = []
    for prompt, (best, *_) in zip(prompts, outputs, strict=True):
        tokens = len(best.ids) + best.stopped
        chance = best.score * (tokens**how.length_penalty if isinstance(how, Beam) else 1)
        text = one.decode(best.ids)
        found.append(Written(prompt, best.ids, text, chance, tokens, share))
    return found
