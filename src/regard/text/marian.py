"""Marian's tokenizers: two SentencePiece models, and the ids of their pieces beside them.

Texts are cut as they stand. Punctuation is not first made plain by Moses' rules (curly quotes to
straight ones, dashes to hyphens), as it was for the training of many of these models. transformers
has that too, where sacremoses is installed, but as ``MarianTokenizer.normalize``, which encoding
does not call. Who wants it does it before: ``sacremoses.MosesPunctNormalizer("en").normalize``.
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

    vocab.json has the ids of both, or of the source alone where there is a target_vocab.json. The
    target's is None where there is no target.spm: it is cut as the source is.
    """
    ids = folder / "vocab.json"
    source = _one(folder / "source.spm", ids)
    if not (folder / "target.spm").exists():
        return source, None
    own = folder / "target_vocab.json"
    return source, _one(folder / "target.spm", own if own.exists() else ids)


def _one(model: Path, vocabulary: Path) -> FastTokenizer:
    """One language's: how likely its pieces are, and the ids they have.

    Pieces of the other language alone are there to be read and written. They are so unlikely that
    a text is cut into them only where a character of it is in no other piece.
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
