"""Read SentencePiece models (.model, .spm), which are protocol-buffer messages."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tokenizers import AddedToken, Regex, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models as algorithms
from tokenizers import processors as templates

from regard.checkpoints.files import read_bytes
from regard.errors import CheckpointError
from regard.text.files import OPTIONS, errors_of, options_of

UNIGRAM, _PAIRS = 1, 2  # kinds of models
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6  # kinds of pieces


class Pieces(NamedTuple):
    """The contents of a SentencePiece model."""

    pieces: list[tuple[str, float]]  # each piece with its log-probability
    kinds: list[int]  # the kind of each piece
    model: int  # the kind of the model
    normalizer: normalizers.Normalizer
    prefix: bool  # whether a space is added before the first word

    def named(self, *kinds: int) -> list[str]:
        """Return the pieces of these kinds."""
        both = zip(self.pieces, self.kinds, strict=True)
        return [piece for (piece, _), kind in both if kind in kinds]


def read_pieces(file: Path) -> Pieces:
    """Read a SentencePiece model of unigrams or byte pairs."""
    pieces: list[tuple[str, float]] = []
    kinds: list[int] = []
    trainer: dict[int, Any] = {}
    rules: dict[int, Any] = {}  # the fields of the normalizer
    for number, value in _fields(read_bytes(file), file, {1: bytes, 2: bytes, 3: bytes}):
        if number == 1:
            piece = dict(_fields(value, file, {1: str, 2: float, 3: int}))
            pieces.append((piece.get(1, ""), piece.get(2, 0.0)))
            kinds.append(piece.get(3, _NORMAL))
        elif number == 2:
            trainer |= _fields(value, file, {3: int})
        else:
            rules |= _fields(value, file, {2: bytes, 3: int, 4: int})
    kind_of_model = trainer.get(3, UNIGRAM)
    if kind_of_model not in (UNIGRAM, _PAIRS):
        raise CheckpointError(
            f"{file} is a SentencePiece model of words or characters. regard reads only models of "
            "unigrams and of byte pairs."
        )
    if kinds.count(_UNKNOWN) != 1:
        raise CheckpointError(
            f"{file} should have one piece for unknown characters, but has {kinds.count(_UNKNOWN)}."
        )
    with errors_of(file):
        steps: list[Any] = [normalizers.Precompiled(rules[2])] if rules.get(2) else []
    if rules.get(4, True):  # remove outer spaces, and all but one of several spaces
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    prefix = bool(rules.get(3, True))
    return Pieces(pieces, kinds, kind_of_model, normalizers.Sequence(steps), prefix)


def sentencepiece(file: Path) -> FastTokenizer:
    """Return the tokenizer of a SentencePiece model. T5's sentinels follow the pieces."""
    found = read_pieces(file)
    tokenizer = _unigrams(found, file) if found.model == UNIGRAM else _merged(found, file)
    special = found.named(_UNKNOWN, _CONTROL)
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in found.named(_USER)])
    if file.name == "spiece.model":
        count = options_of(file.parent).get("extra_ids", 100)
        if type(count) is not int or not 0 <= count <= 10_000:
            raise CheckpointError(f"{file.parent / OPTIONS} says extra_ids = {count!r}.")
        tokenizer.add_special_tokens([f"<extra_id_{n}>" for n in range(count - 1, -1, -1)])
    if "</s>" in special:
        close_with(tokenizer, "</s>")
    return tokenizer


def _unigrams(found: Pieces, file: Path) -> FastTokenizer:
    """Return a unigram tokenizer. If the model has byte pieces, they encode unknown characters."""
    unknown, fall_back = found.kinds.index(_UNKNOWN), _BYTE in found.kinds
    with errors_of(file):
        model = algorithms.Unigram(found.pieces, unk_id=unknown, byte_fallback=fall_back)
    tokenizer = FastTokenizer(model)
    tokenizer.normalizer = found.normalizer
    as_sentencepiece(tokenizer, prefix=found.prefix)
    if fall_back:
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=_scheme(found.prefix))]
        )
    return tokenizer


def _merged(found: Pieces, file: Path) -> FastTokenizer:
    """Return a byte-pair tokenizer, which merges neighbours into the piece with the highest score.

    The model lists no merges. They are all pairs of pieces that together form a piece.
    """
    ids = {piece: index for index, (piece, _) in enumerate(found.pieces)}
    if len(ids) < len(found.pieces):
        raise CheckpointError(f"{file} contains a piece twice.")
    whole = set(found.named(_NORMAL, _USER))
    merges = [
        (-score, ids[piece[:cut]], ids[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in found.pieces
        if piece in whole
        for cut in range(1, len(piece))
        if piece[:cut] in whole and piece[cut:] in whole
    ]
    with errors_of(file):
        model = algorithms.BPE(
            ids,
            [(left, right) for *_, left, right in sorted(merges)],
            unk_token=found.pieces[found.kinds.index(_UNKNOWN)][0],
            fuse_unk=True,
            byte_fallback=_BYTE in found.kinds,
        )
    tokenizer = FastTokenizer(model)
    # Spaces are ordinary characters here: a piece may hold several words.
    marks = [normalizers.Prepend("▁")] if found.prefix else []
    tokenizer.normalizer = normalizers.Sequence(
        [found.normalizer, *marks, normalizers.Replace(" ", "▁")]
    )
    first = [decoders.Strip(" ", 1, 0)] if found.prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *first]
    )
    return tokenizer


def as_sentencepiece(tokenizer: FastTokenizer, *, prefix: bool) -> None:
    scheme = _scheme(prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)


def _scheme(prefix: bool) -> Literal["always", "never"]:
    return "always" if prefix else "never"


def close_with(tokenizer: FastTokenizer, end: str) -> None:
    tokenizer.post_processor = templates.TemplateProcessing(
        single=f"$A {end}",
        pair=f"$A {end} $B {end}",
        special_tokens=[(end, tokenizer.token_to_id(end))],
    )


def _fields(raw: bytes, file: Path, kinds: Mapping[int, type]) -> Iterator[tuple[int, Any]]:
    """Yield the number and value of each field of a protocol-buffer message listed in ``kinds``."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at, file)
        number, wire = tag >> 3, tag & 7
        value: int | bytes
        if wire == 0:
            value, at = _varint(raw, at, file)
        elif wire in (1, 2, 5):
            length, at = _varint(raw, at, file) if wire == 2 else (8 if wire == 1 else 4, at)
            if length > len(raw) - at:
                raise CheckpointError(f"{file} is no SentencePiece model: it ends within a field.")
            value, at = raw[at : at + length], at + length
        else:
            raise CheckpointError(f"{file} is no SentencePiece model.")
        if kind := kinds.get(number):
            yield number, _value(value, kind, file)


def _varint(raw: bytes, at: int, file: Path) -> tuple[int, int]:
    value = 0
    for shift, byte in enumerate(raw[at : at + 10]):
        value |= (byte & 127) << 7 * shift
        if byte < 128:
            return value, at + shift + 1
    raise CheckpointError(f"{file} is no SentencePiece model: a number in it does not end.")


def _value(value: int | bytes, kind: type, file: Path) -> Any:
    if isinstance(value, int) or kind is int:
        if not isinstance(value, kind):
            raise CheckpointError(f"{file} is no SentencePiece model: a field has the wrong type.")
        return value
    if kind is float:
        if len(value) != 4:
            size = len(value)
            raise CheckpointError(f"{file} is no SentencePiece model: a score has {size} bytes.")
        return struct.unpack("<f", value)[0]
    try:
        return value.decode() if kind is str else value
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} holds a piece that is not UTF-8.") from None
