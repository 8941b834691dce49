"""Reading: a model over a text of any length, and what its tokens, words and layers are called.

A text longer than a model's positions is read in windows that know nothing of each other; a
Transformer-XL reads segment by segment and remembers; relative positions and sinusoids go on.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from typing import Literal, NamedTuple

import torch

from regard import checkpoints
from regard.decoding import generate
from regard.errors import InputError
from regard.layers import Block, MultiHeadAttention
from regard.mechanism.seeing import See, Seen
from regard.models import (
    GPT2,
    T5,
    Bert,
    BertAnswering,
    BertMaskedLM,
    Transformer,
    TransformerXL,
    load,
)
from regard.models.model import Model
from regard.models.state import Memories
from regard.models.transformer_xl import Layer as MemoryLayer
from regard.text import Text
from regard.watching import uncompiled, watch

SEGMENT = 512  # tokens of a model with memory that has none
LONGEST_SOURCE = 2048  # tokens; for more of them no target is made unasked
LONGEST_TARGET = 256
_JOINING = "-'\u2019"  # within a word
_UNFINISHED = "\ufffd"  # what a letter decodes to whose bytes are not all there


# Tokens and words -------------------------------------------------------------------------------


class Word(NamedTuple):
    """A whole word: its letters, and the places of its tokens."""

    label: str
    places: tuple[int, ...]
    special: bool = False  # no part of a word: a token such as </s>, or blank space


@dataclass(frozen=True)
class Tokens:
    """The ids of a text, what to call each, and the words they make up."""

    ids: tuple[int, ...]
    labels: tuple[str, ...]
    words: tuple[Word, ...]
    added: tuple[int, ...] = ()  # the places of special tokens, which are not of the text itself

    def __len__(self) -> int:
        return len(self.ids)

    def find(self, word: str) -> tuple[Word, int]:
        """The first word that reads so, and how many there are; case counts where it decides."""
        exact = [each for each in self.words if each.label == word]
        found = exact or [each for each in self.words if each.label.lower() == word.lower()]
        if not found:
            raise InputError(f"There is no word {word!r} in the text. {_nearest(word, self.words)}")
        return found[0], len(found)


def tokens_of(tokenizer: Text, text: str) -> Tokens:
    """A text with whatever special tokens its model expects.

    >>> tokenizer = Text.train_bpe(["the cat sat"] * 9, size=300)
    >>> [word.label for word in tokens_of(tokenizer, "the cat sat").words]
    ['the', 'cat', 'sat']
    """
    encoded = tokenizer.encode(text)
    if all(one is None for one in encoded.texts):
        raise InputError(f"There is nothing to read in {text!r}.")
    spans = [
        None if one is None else span
        for one, span in zip(encoded.texts, encoded.offsets, strict=True)
    ]
    found = _named(text, encoded.ids, encoded.tokens, spans)
    added = (place for place, one in enumerate(encoded.texts) if one is None)
    return replace(found, added=tuple(added))


def tokens_of_ids(tokenizer: Text, ids: Sequence[int]) -> Tokens:
    """What ids say to ``tokenizer``; words are found in the text it decodes them to."""
    before, spans = "", list[tuple[int, int] | None]()
    for count in range(1, len(ids) + 1):
        after = tokenizer.decode(ids[:count])
        # What the last letters are may show only later, so a span starts where texts differ.
        start = next((i for i, (a, b) in enumerate(zip(before, after, strict=False)) if a != b),
                     min(len(before), len(after)))  # fmt: skip
        if start == len(after) and after.endswith(_UNFINISHED):
            start -= 1  # one more byte of the same letter
        spans.append((start, len(after)) if len(after) > start else None)
        before = after
    names = [tokenizer.tokenizer.id_to_token(one) or str(one) for one in ids]
    return _named(before, ids, names, spans)


def _named(
    text: str, ids: Sequence[int], names: Sequence[str], spans: Sequence[tuple[int, int] | None]
) -> Tokens:
    starts = _words(text)
    labels, words, at = [], list[Word](), 0
    last = -1  # the word of the token before
    for place, (name, span) in enumerate(zip(names, spans, strict=True)):
        piece = "" if span is None else text[slice(*span)]
        labels.append(piece.strip() or name)
        if not piece.strip():
            words.append(Word(name, (place,), special=True))
            last = -1
            continue
        assert span is not None
        first = span[0] + len(piece) - len(piece.lstrip())
        while at < len(starts) and starts[at][1] <= first:
            at += 1
        inside = at < len(starts) and starts[at][0] <= first
        if inside and at == last:
            words[-1] = words[-1]._replace(places=(*words[-1].places, place))
        else:
            # A token may reach over several words, as over two ideograms.
            start, stop = starts[at] if inside else (first, first)
            label = text[start : max(stop, span[1])].strip()
            words.append(Word(label, (place,)))
            last = at if inside else -1
    return Tokens(tuple(ids), tuple(labels), tuple(words))


def _words(text: str) -> list[tuple[int, int]]:
    """Where words begin and end, as one reads them.

    Letters with the signs over them and with what joins them make a word, and so do signs. Of
    scripts that put no spaces between words, every letter does.
    """
    found: list[tuple[int, int]] = []
    before = ""  # the kind of the character before
    for place, character in enumerate(text):
        kind = _kind(character)
        joins = (
            character in _JOINING
            and before == "letter"
            and place + 1 < len(text)
            and _kind(text[place + 1]) == "letter"
        )
        if joins:
            kind = "letter"
        if kind and (kind != before or kind == "ideogram"):
            found.append((place, place + 1))
        elif kind:
            found[-1] = (found[-1][0], place + 1)
        before = kind
    return found


@cache
def _kind(character: str) -> str:
    """Whether a character belongs to a word, is one, is a sign, or is none of that ("")."""
    if character.isspace():
        return ""
    if "\u3040" <= character <= "\u30ff" or "\u3400" <= character <= "\u9fff":
        return "ideogram"
    lettering = unicodedata.category(character)[0] in "LMN" or character == "_"
    return "letter" if lettering else "sign"


def _nearest(word: str, words: Iterable[Word]) -> str:
    from difflib import get_close_matches

    known = dict.fromkeys(each.label for each in words)
    near = get_close_matches(word, known, n=1, cutoff=0.6)
    return f"Did you mean {near[0]!r}?" if near else "Pick one of its words."


# Layers -----------------------------------------------------------------------------------------


class Layer(NamedTuple):
    """One attention layer of a model."""

    half: Literal["", "encoder", "decoder"]  # of what it is a layer; "" where there is one half
    number: int
    across: bool  # whether it attends from the decoder to the encoder
    module: MultiHeadAttention

    @property
    def name(self) -> str:
        """As one asks for it: "3", or of an encoder-decoder "encoder.3", "decoder.3", "cross.3"."""
        if not self.half:
            return str(self.number)
        return f"{'cross' if self.across else self.half}.{self.number}"


def layers_of(model: Model) -> list[Layer]:
    """The attention layers of a model, in order.

    >>> from regard import T5, T5Config
    >>> model = T5(T5Config(vocabulary=10, dim=8, head_dim=4, inner=16, depth=1, heads=2))
    >>> [layer.name for layer in layers_of(model)]
    ['encoder.0', 'decoder.0', 'cross.0']
    """
    if not isinstance(model, Transformer | T5):
        return _own("", model)
    crossing = (block.cross for block in _blocks(model.decoder) if isinstance(block, Block))
    return [
        *_own("encoder", model.encoder),
        *_own("decoder", model.decoder),
        *(Layer("decoder", i, True, part) for i, part in enumerate(crossing) if part is not None),
    ]


def _own(half: Literal["", "encoder", "decoder"], module: torch.nn.Module) -> list[Layer]:
    return [
        Layer(half, index, False, block.attention) for index, block in enumerate(_blocks(module))
    ]


def _blocks(module: torch.nn.Module) -> list[Block | MemoryLayer]:
    return [part for part in module.modules() if isinstance(part, Block | MemoryLayer)]


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
    tokenizer: Text
    tokens: Tokens
    chunks: tuple[Chunk, ...]
    layers: tuple[Layer, ...]
    target: Tokens | None = None

    def layer(self, name: str | int) -> Layer:
        """A layer by its name."""
        for layer in self.layers:
            if layer.name == str(name):
                return layer
        names = ", ".join(layer.name for layer in self.layers)
        more = "" if self.target or len(self.layers) == len(layers_of(self.model)) else (
            " The decoder does not run without a target."
        )  # fmt: skip
        raise InputError(f"There is no layer {str(name)!r}. Layers are {names}.{more}")

    def head(self, layer: Layer, head: int) -> int:
        """A head by its number, if there is one."""
        if not 0 <= head < layer.module.heads:
            raise InputError(
                f"There is no head {head}: layer {layer.name} has heads 0 to "
                f"{layer.module.heads - 1}."
            )
        return head

    def sides(self, layer: Layer) -> tuple[Tokens, Tokens]:
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
        start = start_of(self.model)
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

    def part(self, layer: Layer, chunk: Chunk) -> tuple[range, range]:
        """The queries and keys of a layer, of all its tokens, that one chunk brings."""
        if layer.half == "decoder":
            asking, asked = self.sides(layer)
            return range(len(asking)), range(chunk.stop if layer.across else len(asked))
        return range(chunk.start, chunk.stop), range(chunk.first, chunk.stop)

    def run(
        self,
        ask: Callable[[Layer, Chunk], See | None],
        take: Callable[[Layer, Chunk, Seen], None],
        tick: Callable[[], None] | None = None,
    ) -> None:
        """Run the model chunk by chunk, looking where ``ask`` says and handing over to ``take``.

        ``tick`` is called after every layer. A chunk of which nothing is asked is left out where
        no later one depends on it.
        """
        memories = self.model.remember() if isinstance(self.model, TransformerXL) else None
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
        with evaluating(self.model), uncompiled():
            self._forward(chunk, memories)

    def _forward(self, chunk: Chunk, memories: Memories | None) -> None:
        ids = list(self.tokens.ids[chunk.start : chunk.stop])
        row = torch.tensor([ids], device=self.model.device)
        match self.model:
            case Transformer() | T5():
                start, state = self.model.begin([ids], room=len(self.target or ()))
                if self.target is not None:
                    written = row.new_tensor([self.target.ids[:-1]])
                    self.model.step(torch.cat((start, written.to(start.dtype)), dim=1), state)
            case TransformerXL():
                self.model.read(row, memories=memories)
            case GPT2():
                self.model.read(row)
            case Bert() | BertAnswering() | BertMaskedLM():
                self.model.encoder(row)

    def needed(self, ask: Callable[[Layer, Chunk], See | None]) -> list[Chunk]:
        """The chunks that are run for what is asked: a memory depends on all of them."""
        if isinstance(self.model, TransformerXL):
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
    take: Callable[[Layer, Chunk, Seen], None], layer: Layer, chunk: Chunk
) -> Callable[[str, Seen], None]:
    return lambda _, seen: take(layer, chunk, seen)


def _ticking(tick: Callable[[], None]) -> Callable[[object, object, object], None]:
    def hook(*_: object) -> None:
        tick()

    return hook


def writes(model: Model) -> int:
    """How many tokens a model may write; one that translates may read others, and more."""
    own = model.config.target_vocabulary if isinstance(model, Transformer) else None
    return own or int(model.config.vocabulary)


def start_of(model: Model) -> int:
    """The token an encoder-decoder begins to write from."""
    assert isinstance(model, Transformer | T5)
    if isinstance(model, T5) or model.config.start is not None:
        return model.config.start or 0
    return model.config.pad or 0


@contextmanager
def evaluating(model: torch.nn.Module) -> Iterator[None]:
    """Within, nothing is dropped; after that, every part is as it was before."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def read(
    model: Model | str | os.PathLike[str],
    text: str,
    *,
    tokenizer: Text | None = None,
    target: str | None = None,
) -> Reading:
    """A model, or its name or folder, made ready to run on a text.

    Where an encoder-decoder has no ``target`` it writes one itself, of a text that is not too long.
    """
    if not isinstance(model, Model | str | os.PathLike):
        raise InputError(
            f"{type(model).__name__} is no model of regard: give its name or its folder (save it "
            "there first), or look at it with regard.watch(...)."
        )
    if not isinstance(model, Model):
        check_prefix(model, text)
        tokenizer = Text.load(model) if tokenizer is None else tokenizer
        model = load(model, dtype=torch.float32)
    if tokenizer is None:
        raise InputError("A model by itself knows ids only. Pass tokenizer=Text.load(...), too.")
    tokens = tokens_of(tokenizer, text)
    for side, known in ((tokenizer, model.config.vocabulary), (tokenizer.target, writes(model))):
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
    layers = layers_of(model)
    if not isinstance(model, Transformer | T5):
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


def check_prefix(name: str | os.PathLike[str], text: str) -> None:
    """Raise where a model's files name one task, and a text does not begin as that task's do."""
    config = checkpoints.read_json(checkpoints.find(name) / checkpoints.CONFIG)
    prefixes = [task.get("prefix") for task in checkpoints.tasks_of(config, str(name)).values()]
    if len(prefixes) != 1 or not isinstance(prefixes[0], str):
        return
    if not text.startswith(prefixes[0].strip()):
        raise InputError(
            f"{name} learned from texts that begin with {prefixes[0]!r}: begin this one so, too."
        )


def language_tags(text: Text) -> list[str]:
    """The tokens that tell a model which language to write, such as >>fra<<."""
    return sorted(tag for tag in text.tokenizer.get_vocab() if re.fullmatch(r">>.+<<", tag))


def _write(model: Transformer | T5, tokenizer: Text, tokens: Tokens) -> Tokens:
    """What the model makes of a text by itself, greedily, with the end it puts to it."""
    end = model.config.end
    stop = [] if end is None else [end]
    with evaluating(model):
        [[output]] = generate(model, [tokens.ids], length=LONGEST_TARGET, stop=stop)
    return tokens_of_ids(tokenizer.target, [*output.ids, *(stop if output.stopped else [])])


def _chunks(model: Model, tokens: Tokens) -> tuple[Tokens, tuple[Chunk, ...]]:
    """How a model that only reads goes through a text, and the tokens it then reads."""
    if isinstance(model, TransformerXL):
        size = model.config.memory or SEGMENT
        edges = [*range(0, len(tokens), size), len(tokens)]
        return tokens, tuple(
            Chunk(start, stop, min(model.config.memory, start)) for start, stop in pairwise(edges)
        )
    size = model.config.length
    if len(tokens) <= size:
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
