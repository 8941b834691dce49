"""Generate a text for each source text with an encoder-decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from time import perf_counter
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast, overload

from torch import Tensor

from regard.decoding.generation import generate
from regard.decoding.strategies import Beam, Generated, Strategy
from regard.errors import InputError
from regard.models.bundle import Bundle
from regard.models.model import EncoderDecoder

P = ParamSpec("P")
R = TypeVar("R")
MAX_NEW_TOKENS = 256  # the default if neither the call nor the model's files set a maximum
Check = Callable[[], object]  # called in every loop of a task; it may raise to end the task


class OneOrMany(Protocol[P, R]):
    """A task that returns a record for a text, or a list of records for a list of texts."""

    @overload
    def __call__(self, text: str, /, *args: P.args, **kwargs: P.kwargs) -> R: ...
    @overload
    def __call__(
        self, text: list[str] | tuple[str, ...], /, *args: P.args, **kwargs: P.kwargs
    ) -> list[R]: ...


def one_or_many(run: Callable[Concatenate[list[str], P], list[R]]) -> OneOrMany[P, R]:
    """Let a function of a list of texts take a single text, too."""

    @wraps(run)
    def call(text: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        if isinstance(text, str):
            if not text.strip():
                raise InputError("The text is empty. Give some words.")
            return run([text], *args, **kwargs)[0]
        if not isinstance(text, list | tuple):
            raise InputError(f"Give a text or a list of texts, not {type(text).__name__}.")
        if wrong := [item for item in text if not isinstance(item, str)]:
            raise InputError(f"Give a list of texts; one of them is {wrong[0]!r}.")
        return run(list(text), *args, **kwargs)

    return cast("OneOrMany[P, R]", call)


def no_check() -> None:
    """The default check, which never ends the task."""


class CheckedDecoder:
    """A model for decoding that calls ``check`` before each step."""

    def __init__(self, model: Any, check: Check | None) -> None:
        self.model, self.check = model, check or no_check

    def start_decoding(self, prompts: Sequence[Sequence[int]], room: int = 0) -> Any:
        return self.model.start_decoding(prompts, room)

    def step(self, ids: Tensor, state: Any) -> Tensor:
        self.check()
        logits: Tensor = self.model.step(ids, state)
        return logits


@dataclass(frozen=True, slots=True)
class Written:
    """The output of a model for one source text."""

    source: list[int]
    ids: list[int]
    text: str
    log_probability: float  # the sum over all tokens
    tokens: int  # including the end token
    seconds: float


def encode(bundle: Bundle, text: str) -> list[int]:
    """The ids of a source text, with the end token."""
    end = bundle.model.config.end_token
    return [*bundle.tokenizer.encode(text, special=False).ids, *(() if end is None else (end,))]


def write(
    bundle: Bundle,
    sources: Sequence[str],
    how: Strategy,
    max_new_tokens: int | None,
    batch: int,
    check: Check | None = None,
) -> list[Written]:
    """Generate the output of an encoder-decoder for each source text."""
    assert isinstance(bundle.model, EncoderDecoder)
    began = perf_counter()
    limit = MAX_NEW_TOKENS if max_new_tokens is None else max_new_tokens
    prompts = [encode(bundle, source) for source in sources]
    outputs: list[list[Generated]] = generate(
        CheckedDecoder(bundle.model, check), prompts, how, max_new_tokens=limit,
        stop=bundle.ends, batch=batch,
    )  # fmt: skip
    seconds = (perf_counter() - began) / max(len(prompts), 1)
    written = []
    for prompt, (best, *_) in zip(prompts, outputs, strict=True):
        total = log_probability(best, how)
        tokens = len(best.ids) + best.stopped
        written.append(Written(prompt, best.ids, bundle.decode(best.ids), total, tokens, seconds))
    return written


def log_probability(output: Generated, how: Strategy) -> float:
    """The log-probability of all tokens of an output, without a beam's length penalty."""
    tokens = len(output.ids) + output.stopped
    return output.score * (tokens**how.length_penalty if isinstance(how, Beam) else 1.0)
