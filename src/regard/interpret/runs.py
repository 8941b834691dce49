"""Reading: a model over a text of any length, and what its tokens, words and layers are called.

A text longer than a model's positions is read in windows that know nothing of each other; a
Transformer-XL reads segment by segment and remembers; relative positions and sinusoids go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from regard.decoding.generation import generate
from regard.decoding.state import Memories
from regard.errors import InputError
from regard.interpret.adapters.ours import uncompiled
from regard.interpret.watching import watch
from regard.mechanism.seeing import See, Seen
from regard.models.bundle import Bundle, evaluating, open_bundle
from regard.models.model import AttentionLayer, EncoderDecoder, Model
from regard.text.languages import language_tags
from regard.text.tokenizer import Tokenizer
from regard.text.words import Tokens, Word, tokens_of, tokens_of_ids

SEGMENT = 512  # tokens of a model with memory that has none
LONGEST_SOURCE = 2048  # tokens; for more of them no target is made unasked
LONGEST_TARGET = 256


# A model over a text ----------------------------------------------------------------------------


class Chunk(NamedTuple):
    """What goes through the model at once: tokens ``start`` to ``stop``, after some remembered."""

    start: int
    stop: int
    memory: int = 0

    @property
    def first(self) -> int:
        """The first token that may be attended to."""
        return self.start - self.memory


@dataclass(frozen=True, eq=False)
class Reading:
    """A model and a text to run it on.

    ``target`` is what an encoder-decoder is made to write; without one only its encoder runs.
    """

    model: Model
    tokenizer: Tokenizer
    tokens: Tokens
    chunks: tuple[Chunk, ...]
    layers: tuple[AttentionLayer, ...]
    target: Tokens | None = None

    def layer(self, name: str | int) -> AttentionLayer:
        """A layer by its name."""
        for layer in self.layers:
            if layer.name == str(name):
                return layer
        names = ", ".join(layer.name for layer in self.layers)
        more = "" if self.target or len(self.layers) == len(self.model.attention_layers()) else (
            " The decoder does not run without a target."
        )  # fmt: skip
        raise InputError(f"There is no layer {str(name)!r}. Layers are {names}.{more}")

    def head(self, layer: AttentionLayer, head: int) -> int:
        """A head by its number, if there is one."""
        if not 0 <= head < layer.module.heads:
            raise InputError(
                f"There is no head {head}: layer {layer.name} has heads 0 to "
                f"{layer.module.heads - 1}."
            )
        return head

    def sides(self, layer: AttentionLayer) -> tuple[Tokens, Tokens]:
        """Who asks and who is asked, in one layer.

        Across, the one who asks is the token being written. In the decoder itself it is the token
        last read, which is the one before.
        """
        if self.target is None or layer.half != "decoder":
            return self.tokens, self.tokens
        if layer.across:
            return self.target, self.tokens
        return self._inputs, self._inputs

    @property
    def _inputs(self) -> Tokens:
        """The target as the decoder reads it: one token later."""
        assert self.target is not None
        assert isinstance(self.model, EncoderDecoder)
        start = self.model.start_token
        name = self.tokenizer.target.tokenizer.id_to_token(start) or str(start)
        last = len(self.target) - 1
        moved = (
            word._replace(places=tuple(place + 1 for place in word.places if place < last))
            for word in self.target.words
        )
        return Tokens(
            (start, *self.target.ids[:-1]),
            (name, *self.target.labels[:-1]),
            (Word(name, (0,), special=True), *(word for word in moved if word.places)),
        )

    def part(self, layer: AttentionLayer, chunk: Chunk) -> tuple[range, range]:
        """The queries and keys of a layer, of all its tokens, that one chunk brings."""
        if layer.half == "decoder":
            asking, asked = self.sides(layer)
            return range(len(asking)), range(chunk.stop if layer.across else len(asked))
        return range(chunk.start, chunk.stop), range(chunk.first, chunk.stop)

    def run(
        self,
        ask: Callable[[AttentionLayer, Chunk], See | None],
        take: Callable[[AttentionLayer, Chunk, Seen], None],
        tick: Callable[[], None] | None = None,
    ) -> None:
        """Run the model chunk by chunk, looking where ``ask`` says and handing over to ``take``.

        ``tick`` is called after every layer. A chunk of which nothing is asked is left out where
        no later one depends on it.
        """
        memories = self.model.remember()
        for chunk in self.needed(ask):
            asked = [(layer, see) for layer in self.layers if (see := ask(layer, chunk))]
            with ExitStack() as stack:
                for layer, see in asked:
                    stack.enter_context(watch(layer.module, see, _handing(take, layer, chunk)))
                if tick is not None:
                    for layer in self.layers:
                        hook = layer.module.register_forward_hook(_ticking(tick))
                        stack.callback(hook.remove)
                self.forward(chunk, memories)

    @torch.no_grad()
    def forward(self, chunk: Chunk, memories: Memories | None = None) -> None:
        """Run the model over one chunk, for the sake of whoever watches."""
        target = None if self.target is None else self.target.ids
        with evaluating(self.model), uncompiled():
            self.model.run_over(self.tokens.ids[chunk.start : chunk.stop], target, memories)

    def needed(self, ask: Callable[[AttentionLayer, Chunk], See | None]) -> list[Chunk]:
        """The chunks that are run for what is asked: a memory depends on all of them."""
        if self.model.remembers:
            return list(self.chunks)
        return [
            chunk
            for chunk in self.chunks
            if any(ask(layer, chunk) is not None for layer in self.layers)
        ]

    def of(self, chunks: Iterable[Chunk]) -> Reading:
        """The same of other chunks."""
        return replace(self, chunks=tuple(chunks))


def _handing(
    take: Callable[[AttentionLayer, Chunk, Seen], None], layer: AttentionLayer, chunk: Chunk
) -> Callable[[str, Seen], None]:
    return lambda _, seen: take(layer, chunk, seen)


def _ticking(tick: Callable[[], None]) -> Callable[[object, object, object], None]:
    def hook(*_: object) -> None:
        tick()

    return hook


def read(
    model: Model | Bundle | str | os.PathLike[str],
    text: str,
    *,
    tokenizer: Tokenizer | None = None,
    target: str | None = None,
) -> Reading:
    """A model, an opened bundle, or its name or folder, prepared to run on a text.

    Where an encoder-decoder has no ``target`` it writes one itself, of a text that is not too long.
    """
    if not isinstance(model, Model | Bundle | str | os.PathLike):
        raise InputError(
            f"{type(model).__name__} is no model of regard: give its name or its folder (save it "
            "there first), or look at it with regard.watch(...)."
        )
    if not isinstance(model, Model):
        bundle = model if isinstance(model, Bundle) else open_bundle(model)
        bundle.check_prefix(text)
        model, tokenizer = bundle.model, bundle.tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        raise InputError(
            "A model by itself knows ids only. Pass tokenizer=Tokenizer.load(...), too."
        )
    tokens = tokens_of(tokenizer, text)
    for side, known in (
        (tokenizer, model.config.vocabulary),
        (tokenizer.target, model.output_vocabulary),
    ):
        if len(side) > known:
            raise InputError(
                f"The tokenizer has {len(side)} tokens and the model {known}: they do not belong "
                "together."
            )
    tags = language_tags(tokenizer)
    if tags and not text.lstrip().startswith(tuple(tags)):
        shortened = text if len(text) <= 30 else f"{text[:30]}…"
        raise InputError(
            f"This model is told which language to write: begin the text with {' or '.join(tags)}, "
            f"as in '{tags[0]} {shortened}'."
        )
    layers = model.attention_layers()
    if not isinstance(model, EncoderDecoder):
        if target is not None:
            raise InputError(f"{type(model).__name__} takes no target: it has no decoder.")
        tokens, chunks = _chunks(model, tokens)
        return Reading(model, tokenizer, tokens, chunks, tuple(layers))
    if target is not None:
        written: Tokens | None = tokens_of(tokenizer.target, target)
    elif len(tokens) <= LONGEST_SOURCE:
        written = _write(model, tokenizer, tokens)
    else:
        written, layers = None, [layer for layer in layers if layer.half == "encoder"]
    return Reading(model, tokenizer, tokens, (Chunk(0, len(tokens)),), tuple(layers), written)


def _write(model: EncoderDecoder, tokenizer: Tokenizer, tokens: Tokens) -> Tokens:
    """What the model makes of a text by itself, greedily, with the end it puts to it."""
    end = model.config.end_token
    stop = [] if end is None else [end]
    with evaluating(model):
        [[output]] = generate(model, [tokens.ids], max_new_tokens=LONGEST_TARGET, stop=stop)
    return tokens_of_ids(tokenizer.target, [*output.ids, *(stop if output.stopped else [])])


def _chunks(model: Model, tokens: Tokens) -> tuple[Tokens, tuple[Chunk, ...]]:
    """How a model that only reads goes through a text, and the tokens it then reads."""
    if model.remembers:
        size = model.config.memory or SEGMENT
        edges = [*range(0, len(tokens), size), len(tokens)]
        return tokens, tuple(
            Chunk(start, stop, min(model.config.memory, start)) for start, stop in pairwise(edges)
        )
    size = model.longest
    if size is None or len(tokens) <= size:
        return tokens, (Chunk(0, len(tokens)),)
    # Every window has the special tokens that stand around a text.
    around = set(tokens.added)
    before = [place for place in tokens.added if place < len(tokens) // 2]
    after = [place for place in tokens.added if place >= len(tokens) // 2]
    inner = [place for place in range(len(tokens)) if place not in around]
    step = size - len(around)
    parts = [
        [*before, *inner[start : start + step], *after] for start in range(0, len(inner), step)
    ]
    edges = [0]
    for part in parts:
        edges.append(edges[-1] + len(part))
    order = [place for part in parts for place in part]
    chunks = tuple(Chunk(start, stop) for start, stop in pairwise(edges))
    return _ordered(tokens, order), chunks


def _ordered(tokens: Tokens, order: list[int]) -> Tokens:
    """The tokens in another order, in which a special one may come several times."""
    word_of = {place: word for word in tokens.words for place in word.places}
    words: list[Word] = []
    for index, place in enumerate(order):
        word = word_of[place]
        joined = index > 0 and not word.special and word_of[order[index - 1]] is word
        if joined:
            words[-1] = words[-1]._replace(places=(*words[-1].places, index))
        else:
            words.append(word._replace(places=(index,)))
    ids, labels = tokens.ids, tokens.labels
    return Tokens(tuple(ids[p] for p in order), tuple(labels[p] for p in order), tuple(words))
