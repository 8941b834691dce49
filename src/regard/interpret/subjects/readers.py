"""Read texts into tokens with the tokenizer of any library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from regard.errors import InputError
from regard.text.tokenizer import Tokenizer
from regard.text.words import (
    Tokens,
    Word,
    tokens_of,
    tokens_of_decoded,
    tokens_of_ids,
    tokens_of_spans,
)


class Reader(Protocol):
    """A tokenizer, as a subject uses it."""

    def read(self, text: str) -> Tokens:
        """The tokens of a text, with the special tokens that the tokenizer adds."""

    def named(self, ids: Sequence[int]) -> Tokens:
        """The tokens of ids, with the words of the decoded text."""

    def token(self, number: int) -> str:
        """The token of an id, as it stands in the vocabulary."""


class OwnReader:
    """A tokenizer of regard."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def read(self, text: str) -> Tokens:
        return tokens_of(self._tokenizer, text)

    def named(self, ids: Sequence[int]) -> Tokens:
        return tokens_of_ids(self._tokenizer.target, ids)

    def token(self, number: int) -> str:
        return self._tokenizer.target.tokenizer.id_to_token(number) or str(number)


class TransformersReader:
    """A tokenizer of transformers. Without offsets, each of its tokens is a word."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def read(self, text: str) -> Tokens:
        fast = self._tokenizer.is_fast
        # verbose=False: a text may be longer than the model's window.
        encoded = self._tokenizer(text, return_offsets_mapping=fast, verbose=False)
        ids = list(encoded["input_ids"])
        names = self._names(ids)
        if not fast:
            special = set(self._tokenizer.all_special_ids)
            tokens = self._each_a_word(ids, names, special)
        else:
            texts = encoded.sequence_ids()
            spans = [
                None if source is None else tuple(span)
                for source, span in zip(texts, encoded["offset_mapping"], strict=True)
            ]
            tokens = tokens_of_spans(text, ids, names, spans)
        if len(tokens.added) == len(tokens):
            raise InputError(f"The text {text!r} has no tokens. Give a text with words.")
        return tokens

    def _each_a_word(self, ids: list[int], names: list[str], special: set[int]) -> Tokens:
        labels = [self._tokenizer.decode([token]).strip() or name
                  for token, name in zip(ids, names, strict=True)]  # fmt: skip
        words = [
            Word(label, (place,), special=token in special)
            for place, (token, label) in enumerate(zip(ids, labels, strict=True))
        ]
        added = tuple(place for place, token in enumerate(ids) if token in special)
        return Tokens(tuple(ids), tuple(labels), tuple(words), added)

    def named(self, ids: Sequence[int]) -> Tokens:
        def decode(some: Sequence[int]) -> str:
            return str(self._tokenizer.decode(list(some), skip_special_tokens=True))

        return tokens_of_decoded(ids, self._names(ids), decode)

    def token(self, number: int) -> str:
        return self._names([number])[0]

    def _names(self, ids: Sequence[int]) -> list[str]:
        names = self._tokenizer.convert_ids_to_tokens(list(ids))
        return [str(number) if name is None else str(name)
                for number, name in zip(ids, names, strict=True)]  # fmt: skip


def reader_of(tokenizer: object, model: str) -> Reader:
    """The reader of a tokenizer of regard or transformers, for the model of this name."""
    if isinstance(tokenizer, Tokenizer):
        return OwnReader(tokenizer)
    if tokenizer is None:
        raise InputError(
            f"A loaded {model} needs its tokenizer. Pass tokenizer=, a Tokenizer of regard or a "
            "tokenizer of transformers, too."
        )
    if not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise InputError(
            f"tokenizer= takes a Tokenizer of regard or a tokenizer of transformers, not "
            f"{type(tokenizer).__name__}."
        )
    return TransformersReader(tokenizer)
