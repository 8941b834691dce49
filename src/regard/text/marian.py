"""Marian's tokenizers: two SentencePiece models, and the ids of their pieces beside them.

Punctuation is not normalised by Moses' rules (curly quotes to straight ones, dashes to hyphens),
though many of these models were trained on such text. Encoding by transformers does not do it
either. ``sacremoses.MosesPunctNormalizer("en").normalize`` does it beforehand.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models as algorithms

from regard.checkpoints.files import read_json
from regard.errors import CheckpointError
from regard.text.files import errors_of
from regard.text.sentencepiece import UNIGRAM, as_sentencepiece, close_with, read_pieces

_NEEDED = ("</s>", "<unk>", "<pad>")


def marian(folder: Path) -> tuple[FastTokenizer, FastTokenizer | None]:
    """The tokenizers of the source and of the target.

    vocab.json has the ids of both, or of the source alone if there is a target_vocab.json. Without
    target.spm the second one is None: the source's serves both.
    """
    ids = folder / "vocab.json"
    source = _one(folder / "source.spm", ids)
    if not (folder / "target.spm").exists():
        return source, None
    own = folder / "target_vocab.json"
    return source, _one(folder / "target.spm", own if own.exists() else ids)


def _one(model: Path, vocabulary: Path) -> FastTokenizer:
    """The tokenizer of one language, from its model and the ids of its pieces.

    Pieces that only the other language has are so unlikely here that they occur only for characters
    that are in no other piece.
    """
    ids = read_json(vocabulary)
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str):
        raise CheckpointError(
            f"{vocabulary} should give its tokens the ids from 0 to {len(ids) - 1}."
        )
    for token in _NEEDED:
        if token not in ids:
            raise CheckpointError(f"{vocabulary} lacks the token {token}.")
    found = read_pieces(model)
    if found.model != UNIGRAM:
        raise CheckpointError(f"{model} should be a model of unigrams.")
    likely = dict(found.pieces)
    least = min(likely.values()) - 1000.0
    pieces = [(piece, likely.get(piece, least)) for piece in sorted(ids, key=ids.__getitem__)]
    with errors_of(model):
        tokenizer = FastTokenizer(algorithms.Unigram(pieces, unk_id=ids["<unk>"]))
    tokenizer.normalizer = found.normalizer
    as_sentencepiece(tokenizer, prefix=found.prefix)
    tags = [token for token in ids if token.startswith(">>") and token.endswith("<<")]
    special = [AddedToken(token, normalized=False) for token in (*_NEEDED, *tags)]
    tokenizer.add_special_tokens(special)
    close_with(tokenizer, "</s>")
    return tokenizer
