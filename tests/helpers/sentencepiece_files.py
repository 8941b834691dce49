"""SentencePiece models and Marian's files, written field by field, and small."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path

PIECES = {
    "▁": -3.0, "▁the": -2.0, "▁cat": -4.0, "s": -3.5, "at": -3.6, "▁s": -3.8, "t": -4.2, "h": -5.0,
    "e": -4.1, "a": -4.5, "c": -5.5, "▁ca": -5.1, "m": -5.2, "▁m": -4.9, "o": -4.4, "n": -4.6,
    "on": -4.0, "▁on": -3.9, "the": -6.0, ".": -3.0, "ts": -5.8,
}  # fmt: skip
SPECIAL = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2)]

Piece = tuple[str, float, int]  # the text, its log-probability, and its kind


def field(number: int, value: int | bytes | float) -> bytes:
    """One field of a protocol-buffer message."""
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    if isinstance(value, int):
        return bytes([number << 3]) + varint(value)
    return bytes([number << 3 | 2]) + varint(len(value)) + value


def varint(value: int) -> bytes:
    found = b""
    while value > 127:
        found += bytes([value & 127 | 128])
        value >>= 7
    return found + bytes([value])


def model(pieces: Iterable[Piece], kind: int = 1, *, single: int = 1) -> bytes:
    """A SentencePiece model. With ``single`` = 1, repeated spaces count as one."""
    raw = b"".join(
        field(1, field(1, text.encode(errors="surrogatepass")) + field(2, score) + field(3, own))
        for text, score, own in pieces
    )
    return raw + field(2, field(3, kind)) + field(3, field(3, 1) + field(4, single))


def unigrams(pieces: Mapping[str, float] = PIECES) -> list[Piece]:
    """The pieces of a unigram model, after its special pieces."""
    return [*SPECIAL, *((piece, score, 1) for piece, score in pieces.items())]


TARGET = {
    "▁": -3.0, "▁le": -2.5, "▁chat": -5.0, "▁tapis": -4.0, "s": -3.5, "é": -5.0, "at": -2.0,
    "▁ch": -2.5, "c": -5.0, "h": -5.0, "a": -5.0, "t": -5.0, ".": -3.0,
}  # fmt: skip


def marian(folder: Path) -> dict[str, int]:
    """Marian's files for one vocabulary: source pieces, and ids for the target pieces, too."""
    tokens = ["</s>", "<unk>", *PIECES, "▁chat", "▁tapis", "é", ">>fra<<", ">>deu<<", "<pad>"]
    ids = {token: index for index, token in enumerate(tokens)}
    (folder / "source.spm").write_bytes(model(unigrams()))
    (folder / "vocab.json").write_text(json.dumps(ids))
    return ids


def marian_of_two(
    folder: Path, source: Mapping[str, float] = PIECES, target: Mapping[str, float] = TARGET
) -> tuple[dict[str, int], dict[str, int]]:
    """Marian's files with a vocabulary for each language."""
    both = []
    for side, vocabulary, own in (("source", "vocab", source), ("target", "target_vocab", target)):
        (folder / f"{side}.spm").write_bytes(model(unigrams(own)))
        ids = {token: index for index, token in enumerate(["</s>", "<unk>", *own, "<pad>"])}
        (folder / f"{vocabulary}.json").write_text(json.dumps(ids))
        both.append(ids)
    return both[0], both[1]
