"""Models of transformers and plain PyTorch modules as subjects.

No architecture is known here. A few tokens run under ``watch``, and the shapes of the attention
calls tell the layers, their heads, and whether they are self- or cross-attention.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from regard.errors import InputError, RegardError
from regard.interpret.subjects.readers import Reader
from regard.interpret.subjects.recording import recording
from regard.interpret.subjects.subject import (
    Chunk,
    Half,
    Layer,
    Subject,
    Translator,
    windows,
)
from regard.interpret.watching import watch
from regard.mechanism.seeing import See, Seen
from regard.models.bundle import evaluating
from regard.text.words import Tokens

VARIANTS = 32  # sources in a batch, when words are aligned
PIECE = 1024  # tokens of a chunk that follows the keys and values in a model's cache
# Tokens of the runs that find the layers. Three numbers, so that shapes tell the sides apart.
SOURCE, TARGET, MORE = 7, 5, 3


class Call(NamedTuple):
    """One call of attention: the module's name, how often it was called before, and the sizes."""

    path: str
    number: int
    batch: int
    heads: int
    queries: int
    keys: int

    def __str__(self) -> str:
        return f"{self.path} ({self.batch} x {self.queries} queries, {self.keys} keys)"


class Calls(list[Call]):
    """The calls of attention in one run, in order, and the modules that could not be recorded."""

    unseen: tuple[str, ...] = ()


def attention_calls(model: nn.Module, run: Callable[[], object]) -> Calls:
    """Every call of attention while the model runs."""
    calls = Calls()
    before: Counter[str] = Counter()

    def add(path: str, seen: Seen) -> None:
        calls.append(Call(path, before[path], *seen.extent[:2], *seen.extent[2:]))
        before[path] += 1

    with watch(model, See(entropy=True), add) as watched:
        run()
    calls.unseen = tuple(watched.unseen)
    return calls


class Sizes(NamedTuple):
    """The numbers of queries and keys of one kind of layer."""

    half: Half
    across: bool
    queries: int
    keys: int

    @property
    def prefix(self) -> str:
        return f"{'cross' if self.across else self.half}." if self.half else ""


def layers_among(
    model: nn.Module, calls: Sequence[Call], kinds: Sequence[Sizes]
) -> tuple[tuple[Layer, ...], list[Call]]:
    """The calls of the given kinds as layers, kind by kind, and the calls of no kind."""
    layers, rest = [], list(calls)
    for kind in kinds:
        sizes = (1, kind.queries, kind.keys)
        fitting = [call for call in calls if (call.batch, call.queries, call.keys) == sizes]
        for number, call in enumerate(fitting):
            layers.append(
                Layer(
                    f"{kind.prefix}{number}",
                    kind.half,
                    number,
                    kind.across,
                    call.heads,
                    model.get_submodule(call.path),
                    call.path,
                    call.number,
                )
            )
            rest.remove(call)
    return tuple(layers), rest


class FoundLayers(Subject):
    """A subject whose layers are found by running a few tokens."""

    _left_out: tuple[Call, ...] = ()
    _unseen: tuple[str, ...] = ()

    def _find(self, calls: Calls, kinds: Sequence[Sizes]) -> None:
        """Set the layers. InputError if no call has a query and a key for each token."""
        self.layers, rest = layers_among(self.model, calls, kinds)
        self._left_out, self._unseen = tuple(rest), calls.unseen
        if not self.layers:
            seen = ", ".join(map(str, calls)) or "none"
            unseen = f" Not recorded: {_some(calls.unseen)}." if calls.unseen else ""
            raise InputError(
                f"{self.name} has no attention layer with a query and a key for each token, so "
                f"there is nothing to look at. Calls of attention, over {SOURCE} tokens: {seen}."
                f"{unseen} regard.watch(...) shows calls as they are."
            )

    def notes(self, chunks: Sequence[Chunk]) -> tuple[str, ...]:
        notes = super().notes(chunks)
        if self._left_out:
            paths = _some(tuple(dict.fromkeys(call.path for call in self._left_out)))
            notes += (f"Left out, because queries or keys are not the text's tokens: {paths}.",)
        if self._unseen:
            notes += (f"Not recorded, because watch cannot see them: {_some(self._unseen)}.",)
        return notes


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" * (len(names) > 3))


class PlainModule(FoundLayers):
    """A PyTorch module that is called with token ids [1, n], with a tokenizer.

    It runs the whole text at once.
    """

    writes = False

    def __init__(self, model: nn.Module, reader: Reader) -> None:
        self.model, self.name, self._reader = model, type(model).__name__, reader
        probe = list(range(2, 2 + SOURCE))
        with refusing(self.name, "token ids [1, n]"):
            calls = attention_calls(model, lambda: self.run(probe, None, None))
        self._find(calls, [Sizes("", False, SOURCE, SOURCE)])

    def read(self, text: str) -> Tokens:
        return self._reader.read(text)

    def chunks(self, tokens: Tokens) -> tuple[Tokens, tuple[Chunk, ...]]:
        return tokens, (Chunk(0, len(tokens)),)

    @torch.no_grad()
    def run(
        self,
        ids: Sequence[int],
        target: Sequence[int] | None,  # noqa: ARG002
        memory: Any,  # noqa: ARG002
    ) -> None:
        with evaluating(self.model):
            self.model(_batch(ids, self.model))


class TransformersModel(FoundLayers):
    """A model of transformers with a tokenizer.

    A text that is longer than the model's positions runs in independent windows. A decoder reads a
    window piece by piece with its own cache, so memory grows with the length, not with its square.
    """

    def __init__(self, model: Any, reader: Reader) -> None:
        self.model, self.name, self._reader = model, type(model).__name__, reader
        self._whole = model
        self._body = model.base_model  # without the output layer, whose logits nobody reads
        self.writes = bool(model.config.is_encoder_decoder)
        self.longest = positions_of(model)
        self._cache: Callable[[], Any] | None = None  # makes a cache; None to run without
        probe = list(range(2, 2 + SOURCE))
        with refusing(self.name, "token ids"):
            if self.writes:
                written = probe[:TARGET]
                calls = attention_calls(model, lambda: self.run(probe, written, None))
            else:
                calls = attention_calls(model, lambda: self.run(probe, None, None))
        kinds = [Sizes("", False, SOURCE, SOURCE)]
        if self.writes:
            kinds = [
                Sizes("encoder", False, SOURCE, SOURCE),
                Sizes("decoder", False, TARGET, TARGET),
                Sizes("decoder", True, TARGET, SOURCE),
            ]
        self._find(calls, kinds)
        if not self.writes:
            self._cache = self._find_cache(probe)
            self.divisible = self._cache is not None

    def _find_cache(self, probe: list[int]) -> Callable[[], Any] | None:
        """A function that makes a cache with which the layers see all earlier keys, or None."""
        from transformers import Cache, DynamicCache

        with torch.no_grad(), evaluating(self.model):
            try:
                output = self._body(input_ids=_batch(probe, self.model), use_cache=True)
            except TypeError:  # the model takes no use_cache
                return None
        own = getattr(output, "past_key_values", None)
        if not isinstance(own, Cache):
            return None
        # The model's own cache drops the keys outside of a sliding window, so that keys would have
        # other numbers than tokens. A cache that keeps them gives the same result.
        makes = DynamicCache if any(own.is_sliding) else lambda: None
        memory = _Memory(makes())
        self._cache = makes

        def twice() -> None:
            self.run(probe, None, memory)
            self.run(probe[:MORE], None, memory)

        later = attention_calls(self.model, twice)[-len(self.layers) :]
        sizes = {(call.queries, call.keys) for call in later}
        if sizes != {(MORE, SOURCE + MORE)}:
            return None
        sides = (getattr(part, side, None) for part in own.layers for side in ("keys", "values"))
        tensors = [each for each in sides if isinstance(each, Tensor)]
        self.cached_bytes = sum(each.numel() * each.element_size() for each in tensors) // SOURCE
        return makes

    def read(self, text: str) -> Tokens:
        tokens = self._reader.read(text)
        embedding = self._whole.get_input_embeddings()
        if isinstance(embedding, nn.Embedding) and max(tokens.ids) >= embedding.num_embeddings:
            raise InputError(
                f"The tokenizer gives the id {max(tokens.ids)}, but {self.name} has "
                f"{embedding.num_embeddings} tokens: they do not belong together. Give the "
                "tokenizer of this model."
            )
        return tokens

    def chunks(self, tokens: Tokens) -> tuple[Tokens, tuple[Chunk, ...]]:
        tokens, whole = windows(tokens, self.longest or len(tokens))
        if self._cache is None:
            return tokens, whole
        pieces = (
            Chunk(start, min(start + PIECE, window.stop), start - window.start)
            for window in whole
            for start in range(window.start, window.stop, PIECE)
        )
        return tokens, tuple(pieces)

    def memory(self) -> Any:
        return None if self._cache is None else _Memory(self._cache())

    @torch.no_grad()
    def run(self, ids: Sequence[int], target: Sequence[int] | None, memory: Any) -> None:
        source = _batch(ids, self.model)
        with evaluating(self.model):
            if target is not None:
                read = _batch([self.start[0], *target[:-1]], self.model)
                self._body(input_ids=source, decoder_input_ids=read, use_cache=False)
            elif self.writes:
                self._whole.get_encoder()(input_ids=source)
            elif memory is None:
                self._body(input_ids=source)
            else:
                given = {"past_key_values": memory.cache, "use_cache": True}
                memory.cache = self._body(input_ids=source, **given).past_key_values

    def read_target(self, text: str) -> Tokens:
        tokens = self._reader.read(text)
        if self.longest is not None and len(tokens) > self.longest:
            raise InputError(
                f"{self.name} writes up to {self.longest:,} tokens, but the target has "
                f"{len(tokens):,}. Give a shorter one."
            )
        return tokens

    def write(self, tokens: Tokens, most: int) -> Tokens:
        if not self._whole.can_generate():
            raise InputError(
                f"{self.name} has a decoder, but no output layer to write with. Give the text that "
                "the decoder reads: target=."
            )
        most = min(most, self.longest or most)
        with torch.no_grad(), evaluating(self.model):
            written = self._whole.generate(
                _batch(tokens.ids, self.model), max_new_tokens=most, num_beams=1, do_sample=False
            )
        return self._reader.named(written[0, 1:].tolist())

    @property
    def start(self) -> tuple[int, str]:
        settings = getattr(self.model, "generation_config", None)
        for given in (settings, self._whole.config):
            for name in ("decoder_start_token_id", "bos_token_id"):
                token = getattr(given, name, None)
                if isinstance(token, int):
                    return token, self._reader.token(token)
        raise InputError(
            f"{self.name} names no decoder_start_token_id, so its decoder cannot start. Set "
            "model.config.decoder_start_token_id."
        )


class TransformersTranslator(TransformersModel, Translator):
    """An encoder-decoder of transformers with a tokenizer."""

    @torch.no_grad()
    def cross_weights(self, source: Sequence[int], target: Sequence[int]) -> Tensor:
        found: dict[str, Tensor] = {}

        def add(layer: Layer, seen: Seen) -> None:
            assert seen.weights is not None
            found[layer.name] = seen.weights[0].float().cpu()

        layers = [layer for layer in self.layers if layer.across]
        with recording(layers, See(weights=True), add):
            self.run(source, [*target, target[-1]], None)  # the last token is never an input
        return torch.stack([found[layer.name] for layer in layers])

    @torch.no_grad()
    def log_probabilities(self, sources: Sequence[Sequence[int]], target: Sequence[int]) -> Tensor:
        if not self._whole.can_generate():
            raise InputError(
                f"{self.name} has no output layer, and words are aligned by the probabilities that "
                "it gives. Load the model with its output layer."
            )
        written = _batch(target, self.model)
        read = _batch([self.start[0], *target[:-1]], self.model)
        parts = []
        with evaluating(self.model):
            for first in range(0, len(sources), VARIANTS):
                some = sources[first : first + VARIANTS]
                rows = [torch.tensor(list(ids), device=read.device) for ids in some]
                ids = pad_sequence(rows, batch_first=True)
                real = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
                logits = self._whole(
                    input_ids=ids,
                    attention_mask=real,
                    decoder_input_ids=read.expand(len(some), -1),
                    use_cache=False,
                ).logits
                likely = logits.float().log_softmax(-1)
                spread = written.expand(len(some), -1)[..., None]
                parts.append(likely.gather(-1, spread)[..., 0].cpu())
        return torch.cat(parts)


class _Memory:
    """The cache of a model, which its runs replace."""

    def __init__(self, cache: Any) -> None:
        self.cache = cache


def positions_of(model: Any) -> int | None:
    """The number of tokens that a model reads at once; None if its config names no limit."""
    config = model.config.get_text_config()
    count = getattr(config, "max_position_embeddings", None)
    if not isinstance(count, int) or count <= 0:
        return None
    for name, module in model.named_modules():
        table = isinstance(module, nn.Embedding) and name.endswith("position_embeddings")
        if table and module.padding_idx is not None and module.num_embeddings == count:
            return int(count - module.padding_idx - 1)  # positions begin after that of padding
    return int(count)


def _batch(ids: Sequence[int], model: nn.Module) -> Tensor:
    first = next(model.parameters(), None)
    return torch.tensor([list(ids)], device=None if first is None else first.device)


@contextmanager
def refusing(name: str, what: str) -> Iterator[None]:
    """Raise the errors of a model that cannot run on ``what`` as InputError."""
    try:
        yield
    except RegardError:
        raise
    except (TypeError, ValueError, RuntimeError, AttributeError, LookupError) as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"{name} cannot be run on {what} alone: {line.rstrip('.')}. Run it as you do inside "
            "regard.watch(...)."
        ) from error
