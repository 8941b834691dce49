"""Models of regard as subjects."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch

from regard.decoding.generation import generate
from regard.errors import InputError
from regard.interpret.adapters.ours import uncompiled
from regard.interpret.subjects.subject import Chunk, Layer, Subject, windows
from regard.models.bundle import Bundle, evaluating
from regard.models.model import EncoderDecoder, Model
from regard.text.languages import language_tags
from regard.text.tokenizer import Tokenizer
from regard.text.words import Tokens, tokens_of, tokens_of_ids

SEGMENT = 512  # tokens of a segment if the model's memory has length 0


class OwnModel(Subject):
    """A model of regard with its tokenizer.

    If the text has more tokens than the model has positions, it runs in independent windows. A
    Transformer-XL runs segment by segment with its memory. Models with relative or sinusoidal
    positions have no limit and run the whole text at once.
    """

    def __init__(self, model: Model, tokenizer: Tokenizer, bundle: Bundle | None = None) -> None:
        self.model: Model = model
        self.tokenizer = tokenizer
        self.name = type(model).__name__
        self.writes = isinstance(model, EncoderDecoder)
        self.layers = tuple(
            Layer(each.name, each.half, each.number, each.across, each.module.heads, each.module)
            for each in model.attention_layers()
        )
        self.longest = None if self.writes else model.longest
        self._bundle = bundle

    def read(self, text: str) -> Tokens:
        if self._bundle is not None:
            self._bundle.check_prefix(text)
        tokenizer, model = self.tokenizer, self.model
        tokens = tokens_of(tokenizer, text)
        for side, vocabulary in (
            (tokenizer, model.config.vocabulary),
            (tokenizer.target, model.output_vocabulary),
        ):
            if len(side) > vocabulary:
                raise InputError(
                    f"The tokenizer has {len(side)} tokens, but the model has {vocabulary}: they "
                    "do not belong together. Give the tokenizer of this model."
                )
        tags = language_tags(tokenizer)
        if tags and not text.lstrip().startswith(tuple(tags)):
            shortened = text if len(text) <= 30 else f"{text[:30]}…"
            raise InputError(
                "This model translates into several languages: begin the text with "
                f"{' or '.join(tags)}, as in '{tags[0]} {shortened}'."
            )
        return tokens

    def chunks(self, tokens: Tokens) -> tuple[Tokens, tuple[Chunk, ...]]:
        if self.model.remembers:
            kept = self.model.config.memory
            edges = [*range(0, len(tokens), kept or SEGMENT), len(tokens)]
            parts = pairwise(edges)
            return tokens, tuple(Chunk(start, stop, min(kept, start)) for start, stop in parts)
        return windows(tokens, self.longest or len(tokens))

    def notes(self, chunks: Sequence[Chunk]) -> tuple[str, ...]:
        if len(chunks) < 2 or not chunks[1].memory:
            return super().notes(chunks)
        return (
            f"Run in {len(chunks):,} segments of {chunks[0].stop:,} tokens, each with the "
            f"{chunks[1].memory:,} tokens before it in memory.",
        )

    def memory(self) -> Any:
        return self.model.remember()

    @torch.no_grad()
    def run(self, ids: Sequence[int], target: Sequence[int] | None, memory: Any) -> None:
        with evaluating(self.model), uncompiled():
            self.model.run_over(ids, target, memory)

    def read_target(self, text: str) -> Tokens:
        return tokens_of(self.tokenizer.target, text)

    def write(self, tokens: Tokens, most: int) -> Tokens:
        assert isinstance(self.model, EncoderDecoder)
        end = self.model.config.end_token
        stop = [] if end is None else [end]
        with evaluating(self.model):
            [[output]] = generate(self.model, [tokens.ids], max_new_tokens=most, stop=stop)
        ids = [*output.ids, *(stop if output.stopped else [])]
        return tokens_of_ids(self.tokenizer.target, ids)

    @property
    def start(self) -> tuple[int, str]:
        assert isinstance(self.model, EncoderDecoder)
        token = self.model.start_token
        return token, self.tokenizer.target.tokenizer.id_to_token(token) or str(token)
