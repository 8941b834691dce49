"""Completion: what comes after a text, as it is written."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.decoding.generation import generate, stream_tokens
from regard.decoding.settings import Asked, Settings
from regard.decoding.strategies import Beam, Strategy
from regard.errors import InputError
from regard.interpret.pooling import pool
from regard.interpret.watching import watch
from regard.mechanism.seeing import See
from regard.models.bundle import Bundle, Name, Precision, open_bundle
from regard.models.model import LanguageModel
from regard.tasks.attended import mean_rows
from regard.tasks.defaults import check_default
from regard.tasks.records import Completion, WordAttention
from regard.tasks.writing import one_or_many
from regard.text.words import Span, spans_of, words

TASK = "language modelling"  # as a recipe names it
USUAL = Settings(do_sample=True, temperature=0.8, top_p=0.95)
MOST_LOOKED_AT = 2**26  # weights that are held to be looked at; 256 MiB


@one_or_many
def complete(
    texts: list[str],
    *,
    model: Name = "books-gpt2",
    how: Asked | None = None,
    length: int | None = None,
    batch: int = 32,
    look: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
) -> list[Completion]:
    """What comes after a text, or after each of several: at most ``length`` tokens.

    By default that is 100, or as many as the model has room for.
    ``model`` is a GPT-2 or a Transformer-XL: the name of a shipped one, a folder, or a model of the
    hub. ``how`` is a sample by default, the same one each time for the same seed. ``look`` sees
    which words before it each new word attended to, over all heads, which takes one more pass; of
    very long texts it is left out.

    >>> found = complete("Once upon a time", how=Greedy(), length=6)
    >>> found.tokens, str(found).startswith("Once upon a time")
    (6, True)
    """
    check_default(model)
    one = open_bundle(model, "complete", device, precision)
    way, length = USUAL.resolve(how, length)
    if not all(text.strip() for text in texts):
        raise InputError("A text to complete is empty. Give some words.")
    began = perf_counter()
    texts = [one.prepared(text, TASK) for text in texts]
    prompts = [_prompt(one, text) for text in texts]
    length = _length(one, prompts, length)
    writer: Any = one.model
    outputs = generate(writer, prompts, way, max_new_tokens=length, stop=one.ends, batch=batch)
    seconds = (perf_counter() - began) / max(len(texts), 1)
    records = []
    for text, prompt, (best, *_) in zip(texts, prompts, outputs, strict=True):
        power = way.length_penalty if isinstance(way, Beam) else 0.0
        chance = best.score * (len(best.ids) + best.stopped) ** power
        new = _New(text, prompt, best.ids, chance, best.stopped, seconds)
        records.append(_record(one, new, look))
    return records


def stream_completion(
    text: str,
    *,
    model: Name = "books-gpt2",
    how: Asked | None = None,
    length: int | None = None,
    look: bool = False,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
) -> Generator[str, None, Completion]:
    """As :func:`complete` of one text, piece by piece as it is written.

    What the generator returns at its end is the record.

    >>> pieces = stream_completion("Once upon a time", how=Greedy(), length=6)
    >>> "".join(pieces) == complete("Once upon a time", how=Greedy(), length=6).text
    True
    """
    if not isinstance(text, str):
        raise InputError(f"Give one text to go on from, not {type(text).__name__}.")
    if not text.strip():
        raise InputError("The text is empty. Give some words.")
    check_default(model)
    one = open_bundle(model, "complete", device, precision)
    text = one.prepared(text, TASK)
    prompt = _prompt(one, text)
    way, length = USUAL.resolve(how, length)
    return _pieces(one, text, prompt, way, _length(one, [prompt], length), look)


def _pieces(
    one: Bundle, text: str, prompt: list[int], how: Strategy, length: int, look: bool
) -> Generator[str, None, Completion]:
    began = perf_counter()
    heard = _Heard(one.model)
    stop, ids, chance = one.ends, list[int](), 0.0
    said = ""
    for token in stream_tokens(heard, prompt, how, max_new_tokens=length, stop=stop):
        ids.append(token)
        chance += heard.chance(token)
        whole = _after(one, prompt, ids)
        if not whole.endswith("\ufffd"):  # some characters take several tokens
            yield whole[len(said) :]
            said = whole
    stopped = len(ids) < length
    if stopped:
        chance += max(heard.chance(token) for token in stop)
    whole = _after(one, prompt, ids)
    if whole != said:
        yield whole[len(said) :]
    new = _New(text, prompt, ids, chance, stopped, perf_counter() - began)
    return _record(one, new, look)


class _Heard:
    """A model to decode whose last logits are kept."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.logits = torch.empty(0)

    def start_decoding(self, prompts: Sequence[Sequence[int]], room: int = 0) -> Any:
        return self.model.start_decoding(prompts, room)

    def step(self, ids: Tensor, state: Any) -> Tensor:
        self.logits = self.model.step(ids, state)
        return self.logits

    def chance(self, token: int) -> float:
        return float(self.logits[0].float().log_softmax(-1)[token])


def _prompt(one: Bundle, text: str) -> list[int]:
    ids = one.tokenizer.encode(text, special=False).ids
    if not ids:
        raise InputError(f"The text {text[:40]!r} has no token that {one.name} knows.")
    return ids


def _length(one: Bundle, prompts: Sequence[Sequence[int]], asked: int | None) -> int:
    """How many tokens to write: as asked for, if there is room."""
    usual = 100 if asked is None else asked
    if one.model.longest is None:
        return usual
    longest = max(map(len, prompts), default=0)
    room = one.window - longest
    if room < (1 if asked is None else asked):
        raise InputError(
            f"The text is too long: {longest} tokens and {usual if asked else 1} to come are more "
            f"than the {one.window} that {one.name} reads. Give its last part"
            f"{', or a smaller length' if asked else ''}."
        )
    return min(usual, room)


def _after(one: Bundle, prompt: Sequence[int], ids: Sequence[int]) -> str:
    """The text of new tokens; the one before them tells whether they begin with a space."""
    before = prompt[-1:]
    return one.decode([*before, *ids])[len(one.decode(before)) :]


class _New(NamedTuple):
    """What was written after a prompt."""

    text: str
    prompt: list[int]
    ids: list[int]
    chance: float
    stopped: bool
    seconds: float


def _record(one: Bundle, new: _New, look: bool) -> Completion:
    tokens = len(new.ids) + new.stopped
    return Completion(
        text=_after(one, new.prompt, new.ids),
        score=new.chance / max(tokens, 1),
        tokens=tokens,
        seconds=new.seconds,
        model=one.name,
        attended=_attended(one, new) if look else None,
        prompt=new.text,
        stopped=new.stopped,
    )


def _attended(one: Bundle, new: _New) -> WordAttention | None:
    """The words before that each new word attended to as it was written, over all heads.

    The first token is left out: heads rest on it the weight that they do not need.
    """
    model, prompt, ids = one.model, new.prompt, new.ids
    assert isinstance(model, LanguageModel)
    depth, heads = model.config.depth, model.config.heads
    total, before = len(prompt) + len(ids), len(new.text)
    whole = new.text + _after(one, prompt, ids)
    units = words(whole)
    queries = [unit for unit in units if unit.end > before]
    if not queries or len(ids) * total * heads * depth > MOST_LOOKED_AT:
        return None
    read = torch.tensor([[*prompt, *ids[:-1]]], device=model.device)
    rows = range(len(prompt) - 1, total - 1)  # each wrote the token after it
    with torch.inference_mode(), watch(model, See(rows=rows)) as seen:
        model.read(read)
    table = mean_rows(seen)
    table[:, 0] = 0
    spans = spans_of(ids, lambda some: _after(one, prompt, some))
    written = [Span(before + low, before + high) for low, high in spans]
    keys = [*one.tokenizer.encode(new.text, special=False).offsets, *written[:-1]]
    pooled = pool(table, written, queries, keys, units)
    where = f"The mean over {depth} layers of {heads} heads, without the first token"
    return WordAttention.of((whole, queries), (whole, units), pooled, where, ("new", "before"))
