"""Marian's tokenizers: two SentencePiece models, and a JSON file with the ids of their pieces.

Many Marian models were trained on text with Moses' punctuation rules: straight quotes, hyphens for
dashes. Like transformers, regard does not apply these rules. To apply them, call
``sacremoses.MosesPunctNormalizer("en").normalize`` on the text first.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models as algorithms

from regard.checkpoints.files import read_json
from regard.errors import CheckpointError
from regard.text.files import errors_of
from regard.text.sentencepiece import UNIGRAM, as_sentencepiece, close_with, read_pieces

_NEEDED = ("</s>", "<unk>", "<pad>")


def marian(folder: Path) -> tuple[FastTokenizer, FastTokenizer | None]:
    """Return the tokenizers of source and target. Without target.spm, the target's is None.

    vocab.json holds the ids of both, or only of the source if target_vocab.json exists.
    """
    ids = folder / "vocab.json"
    source = _one(folder / "source.spm", ids)
    if not (folder / "target.spm").exists():
        return source, None
    own = folder / "target_vocab.json"
    return source, _one(folder / "target.spm", own if own.exists() else ids)


def _one(model: Path, vocabulary: Path) -> FastTokenizer:
    """Return the tokenizer of one language, from its model and the ids of its pieces.

    Pieces that the model does not contain belong to the other language. They get a very low
    probability, so that they are used only for characters that no other piece contains.
    """
    ids = read_json(vocabulary)
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str):
        raise CheckpointError(
            f"{vocabulary} should give its tokens the ids from 0 to {len(ids) - 1}."
        )
    for token in _NEEDED:
        if token not in ids:
            raise CheckpointError(f"{vocabulary} does not contain the token {token}.")
    read = read_pieces(model)
    if read.model != UNIGRAM:
        raise CheckpointError(f"{model} should be a unigram model.")
    likely = dict(read.pieces)
    least = min(likely.values()) - 1000.0
    pieces = [(piece, likely.get(piece, least)) for piece in sorted(ids, key=ids.__getitem__)]
    with errors_of(model):
        tokenizer = FastTokenizer(algorithms.Unigram(pieces, unk_id=ids["<unk>"]))
    tokenizer.normalizer = read.normalizer
    as_sentencepiece(tokenizer, prefix=read.prefix)
    tags = [token for token in ids if token.startswith(">>") and token.endswith("<<")]
    tokenizer.add_special_tokens([*_NEEDED, *tags])
    close_with(tokenizer, "</s>")
    return tokenizer
