"""Run a subject over a text of any length, with names for its tokens, words and layers."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.errors import InputError
from regard.interpret.subjects.images import ImageModel
from regard.interpret.subjects.library import LibraryModel
from regard.interpret.subjects.opening import image_subject_of, subject_of
from regard.interpret.subjects.recording import recording
from regard.interpret.subjects.subject import Chunk, Layer, SeeOf, Subject
from regard.mechanism.seeing import See, Seen
from regard.models.bundle import Bundle
from regard.text.words import Tokens, Word

MAX_SOURCE = 2048  # tokens; no target is generated for a longer source
MAX_TARGET = 256  # maximum number of tokens of a generated target


class LayerCall(NamedTuple):
    """The arguments and the output [1, queries, dim] of one call of an attention layer."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    output: Tensor


@dataclass(frozen=True, eq=False)
class TextRun:
    """A subject and the text to run it on.

    ``target`` is the output of an encoder-decoder; without it, only the encoder runs.
    """

    subject: Subject
    tokens: Tokens
    chunks: tuple[Chunk, ...]
    layers: tuple[Layer, ...]
    target: Tokens | None = None

    def layer(self, name: str | int) -> Layer:
        """The layer of this name."""
        layers = {layer.name: layer for layer in self.layers}
        if str(name) in layers:
            return layers[str(name)]
        for layer in self.layers:
            if layer.path == name:
                return layer
        encoder_only = len(layers) < len(self.subject.layers)
        reason = " The decoder does not run without a target." if encoder_only else ""
        raise InputError(
            f"There is no layer {str(name)!r}. Layers are {', '.join(layers)}.{reason}"
        )

    def check_head(self, layer: Layer, head: int) -> None:
        """Raise InputError if the layer has no such head."""
        if not 0 <= head < layer.heads:
            raise InputError(
                f"There is no head {head}: layer {layer.name} has heads 0 to {layer.heads - 1}."
            )

    def tokens_of(self, layer: Layer) -> tuple[Tokens, Tokens]:
        """The tokens of a layer's queries and of its keys.

        A query of cross-attention is labelled with the token that it predicts. A query of the
        decoder's self-attention is labelled with its input, the token before.
        """
        if self.target is None or layer.half != "decoder":
            return self.tokens, self.tokens
        if layer.across:
            return self.target, self.tokens
        return self._decoder_inputs, self._decoder_inputs

    @cached_property
    def _decoder_inputs(self) -> Tokens:
        """The start token, and the target without its last token."""
        assert self.target is not None
        start, name = self.subject.start
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

    def ranges(self, layer: Layer, chunk: Chunk) -> tuple[range, range]:
        """The ranges of a layer's queries and keys in one chunk."""
        if layer.half == "decoder":
            queries, keys = self.tokens_of(layer)
            return range(len(queries)), range(chunk.stop if layer.across else len(keys))
        return range(chunk.start, chunk.stop), range(chunk.first, chunk.stop)

    @cached_property
    def beginnings(self) -> frozenset[int]:
        """The tokens that have no token before them: the first token of each window."""
        return frozenset(chunk.start for chunk in self.chunks if not chunk.memory)

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences for captions: how the text ran, and whether the encoder alone ran."""
        notes = self.subject.notes(self.chunks)
        if self.target is None and self.subject.writes:
            notes += ("Only the encoder ran: the text is long, and no target was given.",)
        return notes

    def cut_at(self, edges: Iterable[int]) -> TextRun:
        """The same run, with chunks also cut before the given tokens, if the subject allows it."""
        chunks, edges = [], sorted(edges)
        for chunk in self.chunks:
            inner = [edge for edge in edges if chunk.start < edge < chunk.stop]
            for start, stop in pairwise([chunk.start, *inner, chunk.stop]):
                chunks.append(Chunk(start, stop, start - chunk.first))
        return replace(self, chunks=tuple(chunks))

    def record(
        self,
        see: SeeOf,
        add: Callable[[Layer, Chunk, Seen], None],
        tick: Callable[[], None] | None = None,
    ) -> None:
        """Run the model chunk by chunk, and pass the fields that ``see`` requests to ``add``.

        ``tick`` is called after every layer. Chunks that nothing depends on are skipped.
        """
        memory = None
        for chunk in self.needed_chunks(see):
            if not chunk.memory:
                memory = self.subject.memory()
            asked = {layer: see(layer, chunk) for layer in self.layers}
            with ExitStack() as stack:
                for fields in _distinct(asked.values()):
                    layers = [layer for layer in asked if asked[layer] is fields]
                    stack.enter_context(recording(layers, fields, partial(_add_in, chunk, add)))
                if tick is not None:
                    ticking = partial(_call, tick)
                    for module in {layer.module for layer in self.layers}:
                        stack.callback(module.register_forward_hook(ticking).remove)
                self.forward(chunk, memory)

    def forward(self, chunk: Chunk, memory: Any = None) -> None:
        """Run the model over one chunk, and discard its output."""
        target = None if self.target is None else self.target.ids
        self.subject.run(self.tokens.ids[chunk.start : chunk.stop], target, memory)

    def calls(self, layers: Iterable[Layer], chunk: Chunk) -> dict[str, LayerCall]:
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
        """The chunks with requested fields, and those that they have in memory."""
        needed: list[Chunk] = []
        is_in_memory = False  # of a needed chunk
        for chunk in reversed(self.chunks):
            if is_in_memory or any(see(layer, chunk) is not None for layer in self.layers):
                needed.append(chunk)
                is_in_memory = chunk.memory > 0
        return needed[::-1]


def _distinct(asked: Iterable[See | None]) -> list[See]:
    """The requests without repetitions. A measure returns one object for layers that share it."""
    return list({id(fields): fields for fields in asked if fields is not None}.values())


def _add_in(
    chunk: Chunk, add: Callable[[Layer, Chunk, Seen], None], layer: Layer, seen: Seen
) -> None:
    add(layer, chunk, seen)


def _call(tick: Callable[[], None], *_: object) -> None:
    tick()


def prepare_image_run(
    model: nn.Module | Bundle | LibraryModel | str | os.PathLike[str],
    image: object,
    *,
    trust_remote_code: bool = False,
) -> tuple[TextRun, ImageModel]:
    """Load the model if necessary, and prepare a run over the patches of an image."""
    subject = image_subject_of(model, image, trust_remote_code=trust_remote_code)
    tokens, chunks = subject.chunks(subject.tokens())
    return TextRun(subject, tokens, chunks, subject.layers), subject


def prepare_run(
    model: nn.Module | Bundle | LibraryModel | str | os.PathLike[str],
    text: str,
    *,
    tokenizer: Any = None,
    target: str | None = None,
    trust_remote_code: bool = False,
) -> TextRun:
    """Load the model if necessary, tokenize the text, and cut it into chunks.

    Without a ``target``, an encoder-decoder generates one for a text of up to MAX_SOURCE tokens.
    """
    subject = subject_of(model, tokenizer, trust_remote_code=trust_remote_code)
    tokens = subject.read(text)
    layers = subject.layers
    if not subject.writes:
        if target is not None:
            raise InputError(f"{subject.name} takes no target: it has no decoder.")
        written = None
    elif target is not None:
        if subject.longest is not None and len(tokens) > subject.longest:
            raise InputError(
                f"{subject.name} reads a source of up to {subject.longest:,} tokens, but the text "
                f"has {len(tokens):,}. Give a shorter text, or leave out the target to look into "
                "the encoder."
            )
        written = subject.read_target(target)
    elif len(tokens) <= min(MAX_SOURCE, subject.longest or MAX_SOURCE):
        written = subject.write(tokens, MAX_TARGET)
    else:
        written, layers = None, tuple(layer for layer in layers if layer.half == "encoder")
    tokens, chunks = subject.chunks(tokens)
    return TextRun(subject, tokens, chunks, layers, written)
