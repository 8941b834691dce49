"""Run a model over a text of any length, with names for its tokens, words and layers.

If the text has more tokens than the model has positions, it runs in independent windows. A
Transformer-XL runs segment by segment with its memory. Models with relative or sinusoidal positions
have no limit and run the whole text at once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

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

SEGMENT = 512  # tokens of a segment if the model's memory has length 0
MAX_SOURCE = 2048  # tokens; no target is generated for a longer source
MAX_TARGET = 256  # maximum number of tokens of a generated target


class Chunk(NamedTuple):
    """The tokens from ``start`` to ``stop - 1``, run together after ``memory`` tokens in memory."""

    start: int
    stop: int
    memory: int = 0

    @property
    def first(self) -> int:
        """The first token that this chunk can attend to."""
        return self.start - self.memory


SeeOf = Callable[[AttentionLayer, Chunk], See | None]  # the fields to record; None to skip


class LayerCall(NamedTuple):
    """The arguments and the output [1, queries, dim] of one call of an attention layer."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor


@dataclass(frozen=True, eq=False)
class TextRun:
    """A model and the text to run it on.

    ``target`` is the output of an encoder-decoder; without it, only the encoder runs.
    """

    model: Model
    tokenizer: Tokenizer
    tokens: Tokens
    chunks: tuple[Chunk, ...]
    layers: tuple[AttentionLayer, ...]
    target: Tokens | None = None

    def layer(self, name: str | int) -> AttentionLayer:
        """The layer of this name."""
        layers = {layer.name: layer for layer in self.layers}
        if str(name) in layers:
            return layers[str(name)]
        encoder_only = len(layers) < len(self.model.attention_layers())
        reason = " The decoder does not run without a target." if encoder_only else ""
        raise InputError(
            f"There is no layer {str(name)!r}. Layers are {', '.join(layers)}.{reason}"
        )

    def check_head(self, layer: AttentionLayer, head: int) -> None:
        """Raise InputError if the layer has no such head."""
        if not 0 <= head < layer.module.heads:
            raise InputError(
                f"There is no head {head}: layer {layer.name} has heads 0 to "
                f"{layer.module.heads - 1}."
            )

    def tokens_of(self, layer: AttentionLayer) -> tuple[Tokens, Tokens]:
        """The tokens of a layer's queries and of its keys.

        A query of cross-attention is labelled with the token that it predicts. A query of the
        decoder's self-attention is labelled with its input, the token before.
        """
        if self.target is None or layer.half != "decoder":
            return self.tokens, self.tokens
        if layer.across:
            return self.target, self.tokens
        return self._decoder_inputs, self._decoder_inputs

    @property
    def _decoder_inputs(self) -> Tokens:
        """The start token, and the target without its last token."""
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

    def ranges(self, layer: AttentionLayer, chunk: Chunk) -> tuple[range, range]:
        """The ranges of a layer's queries and keys in one chunk."""
        if layer.half == "decoder":
            queries, keys = self.tokens_of(layer)
            return range(len(queries)), range(chunk.stop if layer.across else len(keys))
        return range(chunk.start, chunk.stop), range(chunk.first, chunk.stop)

    def record(
        self,
        see: SeeOf,
        add: Callable[[AttentionLayer, Chunk, Seen], None],
        tick: Callable[[], None] | None = None,
    ) -> None:
        """Run the model chunk by chunk, and pass the fields that ``see`` requests to ``add``.

        ``tick`` is called after every layer. Chunks without requested fields are skipped, unless
        the model has a memory.
        """

        def adding(layer: AttentionLayer, chunk: Chunk) -> Callable[[str, Seen], None]:
            return lambda _, seen: add(layer, chunk, seen)

        memories = self.model.remember()
        for chunk in self.needed_chunks(see):
            with ExitStack() as stack:
                for layer in self.layers:
                    if (fields := see(layer, chunk)) is not None:
                        stack.enter_context(watch(layer.module, fields, adding(layer, chunk)))
                    if tick is not None:
                        hook = layer.module.register_forward_hook(lambda *_: tick())
                        stack.callback(hook.remove)
                self.forward(chunk, memories)

    @torch.no_grad()
    def forward(self, chunk: Chunk, memories: Memories | None = None) -> None:
        """Run the model over one chunk, and discard its output."""
        target = None if self.target is None else self.target.ids
        with evaluating(self.model), uncompiled():
            self.model.run_over(self.tokens.ids[chunk.start : chunk.stop], target, memories)

    def calls(self, layers: Iterable[AttentionLayer], chunk: Chunk) -> dict[str, LayerCall]:
        """The last call of each layer, by its name, while the model runs over one chunk."""
        calls: dict[str, LayerCall] = {}

        def record(name: str, _: object, *call: Any) -> None:
            calls[name] = LayerCall(*call)

        with ExitStack() as stack:
            for layer in layers:
                hook = partial(record, layer.name)
                handle = layer.module.register_forward_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            self.forward(chunk)
        return calls

    def needed_chunks(self, see: SeeOf) -> list[Chunk]:
        """The chunks to run: those with requested fields, or all if the model has a memory."""
        if self.model.remembers:
            return list(self.chunks)
        return [
            chunk
            for chunk in self.chunks
            if any(see(layer, chunk) is not None for layer in self.layers)
        ]


def prepare_run(
    model: Model | Bundle | str | os.PathLike[str],
    text: str,
    *,
    tokenizer: Tokenizer | None = None,
    target: str | None = None,
) -> TextRun:
    """Load the model if necessary, tokenize the text, and cut it into chunks.

    Without a ``target``, an encoder-decoder generates one for a text of up to MAX_SOURCE tokens.
    """
    if not isinstance(model, Model | Bundle | str | os.PathLike):
        raise InputError(
            f"{type(model).__name__} is not a model of regard. Save it and give its folder, or use "
            "regard.watch(...)."
        )
    if not isinstance(model, Model):
        bundle = model if isinstance(model, Bundle) else open_bundle(model)
        bundle.check_prefix(text)
        model, tokenizer = bundle.model, bundle.tokenizer if tokenizer is None else tokenizer
    if tokenizer is None:
        raise InputError(
            "A loaded model needs its tokenizer. Pass tokenizer=Tokenizer.load(...), too."
        )
    tokens = tokens_of(tokenizer, text)
    for side, vocabulary in (
        (tokenizer, model.config.vocabulary),
        (tokenizer.target, model.output_vocabulary),
    ):
        if len(side) > vocabulary:
            raise InputError(
                f"The tokenizer has {len(side)} tokens, but the model has {vocabulary}: they do "
                "not belong together. Give the tokenizer of this model."
            )
    tags = language_tags(tokenizer)
    if tags and not text.lstrip().startswith(tuple(tags)):
        shortened = text if len(text) <= 30 else f"{text[:30]}…"
        raise InputError(
            "This model translates into several languages: begin the text with "
            f"{' or '.join(tags)}, as in '{tags[0]} {shortened}'."
        )
    layers = model.attention_layers()
    if not isinstance(model, EncoderDecoder):
        if target is not None:
            raise InputError(f"{type(model).__name__} takes no target: it has no decoder.")
        tokens, chunks = _chunks(model, tokens)
        return TextRun(model, tokenizer, tokens, chunks, tuple(layers))
    if target is not None:
        written: Tokens | None = tokens_of(tokenizer.target, target)
    elif len(tokens) <= MAX_SOURCE:
        written = _generate_target(model, tokenizer, tokens)
    else:
        written, layers = None, [layer for layer in layers if layer.half == "encoder"]
    return TextRun(model, tokenizer, tokens, (Chunk(0, len(tokens)),), tuple(layers), written)


def _generate_target(model: EncoderDecoder, tokenizer: Tokenizer, tokens: Tokens) -> Tokens:
    """The output of the model for a text by greedy decoding, with the end token if it has one."""
    end = model.config.end_token
    stop = [] if end is None else [end]
    with evaluating(model):
        [[output]] = generate(model, [tokens.ids], max_new_tokens=MAX_TARGET, stop=stop)
    return tokens_of_ids(tokenizer.target, [*output.ids, *(stop if output.stopped else [])])


def _chunks(model: Model, tokens: Tokens) -> tuple[Tokens, tuple[Chunk, ...]]:
    """The tokens to run through a model that is not an encoder-decoder, and their chunks."""
    if model.remembers:
        size = model.config.memory or SEGMENT
        edges = [*range(0, len(tokens), size), len(tokens)]
        return tokens, tuple(
            Chunk(start, stop, min(model.config.memory, start)) for start, stop in pairwise(edges)
        )
    size = model.longest
    if size is None or len(tokens) <= size:
        return tokens, (Chunk(0, len(tokens)),)
    # Repeat the special tokens around a text, such as [CLS] and [SEP], in every window.
    around = set(tokens.added)
    before = [place for place in tokens.added if place < len(tokens) // 2]
    after = [place for place in tokens.added if place >= len(tokens) // 2]
    inner = [place for place in range(len(tokens)) if place not in around]
    step = size - len(around)
    parts = [
        [*before, *inner[start : start + step], *after] for start in range(0, len(inner), step)
    ]
    edges = list(accumulate(map(len, parts), initial=0))
    chunks = tuple(Chunk(start, stop) for start, stop in pairwise(edges))
    return _ordered(tokens, list(chain.from_iterable(parts))), chunks


def _ordered(tokens: Tokens, order: list[int]) -> Tokens:
    """The tokens at the places in ``order``; special tokens may be repeated."""
    word_of = {place: word for word in tokens.words for place in word.places}
    words: list[Word] = []
    for index, place in enumerate(order):
        word = word_of[place]
        if index > 0 and not word.special and word_of[order[index - 1]] is word:
            words[-1] = words[-1]._replace(places=(*words[-1].places, index))
        else:
            words.append(word._replace(places=(index,)))
    ids, labels = tokens.ids, tokens.labels
    return Tokens(tuple(ids[p] for p in order), tuple(labels[p] for p in order), tuple(words))
