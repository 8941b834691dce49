"""Read BERT's tokenizer (vocab.txt) and GPT-2's (vocab.json with merges.txt)."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, normalizers, pre_tokenizers
from tokenizers import models as algorithms
from tokenizers import processors as templates

from regard.checkpoints.files import read_json
from regard.errors import CheckpointError
from regard.text.files import errors_of, options_of, read_text

BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def wordpiece(folder: Path) -> FastTokenizer:
    """Read BERT's tokenizer from vocab.txt, with one token a line, and tokenizer_config.json."""
    file = folder / "vocab.txt"
    vocabulary: dict[str, int] = {}
    lines = read_text(file).split("\n")
    for index, line in enumerate(lines[:-1] if not lines[-1] else lines):
        token = line.removesuffix("\r")
        if token in vocabulary:
            raise CheckpointError(f"{file} has the token {token!r} twice.")
        vocabulary[token] = index
    for token in BERT:
        if token not in vocabulary:
            raise CheckpointError(f"{file} does not contain the token {token}.")
    options = options_of(folder)
    accents = options.get("strip_accents")
    with errors_of(file):
        tokenizer = FastTokenizer(algorithms.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=options.get("tokenize_chinese_chars") is not False,
        strip_accents=accents if isinstance(accents, bool) else None,
        lowercase=options.get("do_lower_case") is not False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(BERT))
    return as_bert(tokenizer)


def as_bert(tokenizer: FastTokenizer) -> FastTokenizer:
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = templates.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


def byte_pairs(vocabulary: Path, merges: Path) -> FastTokenizer:
    """Read GPT-2's tokenizer from a file of token ids and a file of merges in order."""
    ids = read_json(vocabulary)
    if not all(type(n) is int and 0 <= n < len(ids) for n in ids.values()):
        raise CheckpointError(f"{vocabulary} should give each token an id below {len(ids)}.")
    pairs = []
    for line in read_text(merges).split("\n"):
        if line.startswith("#version") or not line.strip():
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            raise CheckpointError(
                f"{merges} should have two tokens in each line, but has the line {line!r}."
            )
        pairs.append((parts[0], parts[1]))
    with errors_of(vocabulary):
        prefix = options_of(vocabulary.parent).get("add_prefix_space") is True
        tokenizer = byte_level(algorithms.BPE(ids, pairs), prefix=prefix)
    end = "<|endoftext|>"
    if end in ids:
        tokenizer.add_special_tokens([end])
    return tokenizer


def byte_level(model: algorithms.BPE, *, prefix: bool = False) -> FastTokenizer:
    """Return a byte-level BPE tokenizer; ``prefix`` adds a space before the first word."""
    tokenizer = FastTokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = templates.ByteLevel(add_prefix_space=prefix, trim_offsets=True)
    return tokenizer
