"""The interface between a model and the measures of ``look`` and ``explain``.

A subject reads a text into tokens, cuts it into chunks, and runs its model over them. Its attention
layers have names, heads and modules, which ``watch`` records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn

from regard.mechanism.seeing import See
from regard.text.words import Tokens, Word

Half = Literal["", "encoder", "decoder"]  # "" if the model has one stack


class Chunk(NamedTuple):
    """The tokens from ``start`` to ``stop - 1``, run together after ``memory`` tokens in memory."""

    start: int
    stop: int
    memory: int = 0

    @property
    def first(self) -> int:
        """The first token that this chunk can attend to."""
        return self.start - self.memory


@dataclass(frozen=True, eq=False)
class Layer:
    """One attention layer of a subject."""

    name: str  # "3", or in an encoder-decoder "encoder.3", "decoder.3" or "cross.3"
    half: Half
    number: int  # among the layers of its half and kind
    across: bool  # whether this is cross-attention
    heads: int
    module: nn.Module
    path: str = ""  # the name of the module in the model
    call: int = 0  # the number of the module's call in a run; layers may share a module


SeeOf = Callable[[Layer, Chunk], See | None]  # the fields to record; None to skip


class Subject(ABC):
    """A model with its tokenizer, as the measures see it."""

    name: str  # in titles and errors
    model: nn.Module
    layers: tuple[Layer, ...]
    writes: bool  # whether it is an encoder-decoder, whose decoder runs over a target
    longest: int | None = None  # the most tokens in one window; None if there is no limit

    cached_bytes = 0  # bytes that the memory keeps of each token
    divisible = False  # whether chunks may be cut anywhere without changing the result

    @abstractmethod
    def read(self, text: str) -> Tokens:
        """The tokens of a text. InputError if the model cannot read it."""

    @abstractmethod
    def chunks(self, tokens: Tokens) -> tuple[Tokens, tuple[Chunk, ...]]:
        """The chunks of a text, and its tokens: windows repeat the special tokens around a text."""

    def notes(self, chunks: Sequence[Chunk]) -> tuple[str, ...]:
        """Sentences for captions on how the text ran."""
        starts = [chunk.start for chunk in chunks if not chunk.memory]
        if len(starts) < 2:
            return ()
        return (
            f"The model has {starts[1]:,} positions: the text runs in {len(starts):,} independent "
            "windows.",
        )

    def memory(self) -> Any:
        """An empty memory, which :meth:`run` updates; None if the model has none."""
        return None

    @abstractmethod
    def run(self, ids: Sequence[int], target: Sequence[int] | None, memory: Any) -> None:
        """Run every attention layer over ``ids``, and discard the output.

        The decoder of an encoder-decoder runs over ``target``; without it, only the encoder runs.
        """

    # Encoder-decoders have these, too.

    def read_target(self, text: str) -> Tokens:
        """The tokens of a given output."""
        raise NotImplementedError

    def write(self, tokens: Tokens, most: int) -> Tokens:
        """The output of the model for a text, of up to ``most`` tokens, by greedy decoding."""
        raise NotImplementedError

    @property
    def start(self) -> tuple[int, str]:
        """The first token of the decoder's input: its id and its name."""
        raise NotImplementedError


class Translator(Subject):
    """A subject whose words can be aligned by its cross-attention."""

    @abstractmethod
    def cross_weights(self, source: Sequence[int], target: Sequence[int]) -> Tensor:
        """The cross-attention of a target to its source, [layers, heads, target + 1, source].

        Row i is the step that predicts token i of the target. Token i is the input of row i + 1.
        """

    @abstractmethod
    def log_probabilities(self, sources: Sequence[Sequence[int]], target: Sequence[int]) -> Tensor:
        """The log-probability of each token of a target after each source, [sources, tokens]."""


def windows(tokens: Tokens, size: int) -> tuple[Tokens, tuple[Chunk, ...]]:
    """Cut a text into independent windows of at most ``size`` tokens.

    The special tokens around a text, such as [CLS] and [SEP], are repeated in every window.
    """
    if len(tokens) <= size:
        return tokens, (Chunk(0, len(tokens)),)
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
