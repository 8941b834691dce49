"""Generate token sequences with a model.

A prompt's result does not depend on its batch, except for rounding. New prompts replace finished
sequences in the batch. The beams of a sentence share its cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from operator import index
from typing import Any

import torch

from regard.decoding.batching import Decoder, S, begun_of, run
from regard.decoding.choosing import Lines
from regard.decoding.searching import Searches
from regard.decoding.strategies import Beam, Generated, Greedy, Strategy, at_least
from regard.errors import InputError
from regard.mechanism.backends.sdpa import without_cudnn


def generate(
    model: Decoder[S],
    prompts: Sequence[Sequence[int]],
    how: Strategy | None = None,
    *,
    max_new_tokens: int,
    stop: Sequence[int] = (),
    batch: int = 32,
    tokens: int | None = None,
) -> list[list[Generated]]:
    """Generate at most ``max_new_tokens`` ids for each prompt. Return a list of sequences for each.

    ``how`` is greedy by default. Prompts are the ids that the model's ``start_decoding`` takes: a
    text to complete, or a source to translate. At most ``batch`` prompts of similar length run
    together, with at most ``tokens`` prompt ids, padding included. Results keep the order of the
    prompts.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=1, heads=2)).eval()
    >>> [[first], [second]] = generate(model, [[1, 2, 3], [4]], Beam(num_beams=2), max_new_tokens=5)
    >>> len(first.ids), len(second.ids)
    (5, 5)
    """
    how = _strategy(how)
    at_least("generate(max_new_tokens=...)", max_new_tokens, 1)
    at_least("generate(batch=...)", batch, 1)
    if tokens is not None:
        at_least("generate(tokens=...)", tokens, 1)
    if not isinstance(prompts, Iterable):
        raise InputError(f"generate() needs a list of prompts, but got {prompts!r}.")
    begun, ends = [_prompt(prompt) for prompt in prompts], _stop(stop)

    def capacity(longest: int) -> int:
        return batch if tokens is None else max(min(batch, tokens // max(longest, 1)), 1)

    with torch.inference_mode(), without_cudnn():
        if isinstance(how, Beam):
            searches = Searches(how, max_new_tokens, ends)
            return run(model, begun, searches, max_new_tokens * how.num_beams, capacity)
        return run(model, begun, Lines(how, max_new_tokens, ends), max_new_tokens, capacity)


def stream_tokens(
    model: Decoder[S],
    prompt: Sequence[int],
    how: Strategy | None = None,
    *,
    max_new_tokens: int,
    stop: Sequence[int] = (),
) -> Iterator[int]:
    """Yield the tokens that :func:`generate` returns for one prompt, each as soon as it is chosen.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=1, heads=2)).eval()
    >>> [[whole]] = generate(model, [[1, 2]], max_new_tokens=4)
    >>> list(stream_tokens(model, [1, 2], max_new_tokens=4)) == whole.ids
    True
    """
    at_least("stream_tokens(max_new_tokens=...)", max_new_tokens, 1)
    chosen = _strategy(how)
    if isinstance(chosen, Beam):
        raise InputError(
            "Beam search cannot stream tokens: call generate(), or use another strategy."
        )
    lines = Lines(chosen, max_new_tokens, _stop(stop))
    with torch.inference_mode(), without_cudnn():
        ids, state = model.start_decoding([_prompt(prompt)], room=max_new_tokens)
        [line] = [lines.begin(begun) for begun in begun_of(ids, state)]
    returned = 0
    while not line.done:
        with torch.inference_mode(), without_cudnn():
            ids = lines.choose(model.step(ids, state), [line])
        if len(line.ids) > returned:
            yield line.ids[returned]
            returned += 1


def _strategy(how: Strategy | None) -> Strategy:
    if how is None:
        return Greedy()
    if not isinstance(how, Strategy):
        raise InputError(f"how must be Greedy(), Sample(...) or Beam(...), but got {how!r}.")
    return how


def _ids(given: Any, what: str, advice: str = "") -> list[int]:
    try:
        return [index(token) for token in given]
    except TypeError:
        raise InputError(f"{what} of token ids, but got {given!r}.{advice}") from None


def _prompt(prompt: Any) -> list[int]:
    advice = " Tokenizer.encode(...).ids makes such a list from a text."
    return _ids(prompt, "Prompts must be lists", advice)


def _stop(stop: Any) -> frozenset[int]:
    return frozenset(_ids(stop, "stop=... must be a list"))
