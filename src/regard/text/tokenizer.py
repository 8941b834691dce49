"""Convert text to ids and back; read and train tokenizers with the library `tokenizers`.

Tokenizers are read from tokenizer.json, vocab.txt (BERT), vocab.json with merges.txt (GPT-2),
SentencePiece's .model (T5), or source.spm and target.spm with vocab.json (Marian).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from operator import index
from pathlib import Path
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models as algorithms
from tokenizers import trainers as training

from regard.checkpoints.bases import described
from regard.checkpoints.hub import find
from regard.errors import CheckpointError, InputError
from regard.text.files import OPTIONS, add_tokens, errors_of, read_text
from regard.text.marian import marian
from regard.text.sentencepiece import as_sentencepiece, close_with, sentencepiece
from regard.text.vocabularies import BERT, as_bert, byte_level, byte_pairs, wordpiece

_FILE, _TARGET = "tokenizer.json", "target_tokenizer.json"
MAX_VOCABULARY = 2**24
MAX_ADDED = 1000  # special tokens that a template may add to a text
MAX_PLACES = 16  # of a text or a pair in a template

END_OF_TEXT = "<|endoftext|>"


class SizeError(InputError):
    """The requested vocabulary size is not possible."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """The ids of a text, and the characters that each id stands for.

    >>> text = Tokenizer.train_bpe(["low lower lowest"] * 9, size=300)
    >>> text.encode("lowest low").offsets[-1]  # the last token is the last word
    (7, 10)
    """

    ids: list[int]
    tokens: list[str]
    token_types: list[int]  # 0 for the first text and 1 for the second
    texts: list[int | None]  # 0 or 1, the text of each id; None for special tokens
    offsets: list[tuple[int, int]]  # the start and end of each id in its text


class Tokenizer:
    """A tokenizer: it converts text to ids and back.

    ``target`` is the tokenizer of the model's output, which decodes ids. It differs from this
    tokenizer only if source and target have different vocabularies.

    >>> text = Tokenizer.train_bpe(["low lower lowest"] * 9, size=300)
    >>> encoded = text.encode("lower")
    >>> text.decode(encoded.ids)
    'lower'
    """

    def __init__(self, tokenizer: FastTokenizer, target: FastTokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self._counted = (0, 0)  # the number of tokens, and the largest id plus one
        self.target = self if target is None else Tokenizer(target)

    def __len__(self) -> int:
        """The largest id plus one."""
        count = self.tokenizer.get_vocab_size()
        if count != self._counted[0]:
            self._counted = count, 1 + max(self.tokenizer.get_vocab().values())
        return self._counted[1]

    def id(self, token: str) -> int:
        """Return the id of a token such as ``"</s>"``. InputError if there is no such token."""
        number = self.tokenizer.token_to_id(token) if isinstance(token, str) else None
        if number is None:
            raise InputError(f"This tokenizer has no token {token!r}.")
        return int(number)

    def encode(self, text: str, pair: str | None = None, *, special: bool = True) -> Encoded:
        """Encode a text or a pair of texts; ``special`` adds the model's special tokens.

        ``offsets`` count characters: an id stands for ``text[start:end]``.
        """
        _check_text(text)
        if pair is not None:
            _check_text(pair)
        with errors_of("This"):
            e = self.tokenizer.encode(text, pair, add_special_tokens=special)
        return Encoded(e.ids, e.tokens, e.type_ids, e.sequence_ids, e.offsets)

    def encode_all(self, texts: Sequence[str], *, special: bool = True) -> list[Encoded]:
        """Encode many texts, each as :meth:`encode` does."""
        _check_lines(texts)
        texts = list(texts)
        for text in texts:
            _check_text(text)
        with errors_of("This"):
            batch = self.tokenizer.encode_batch(texts, add_special_tokens=special)
        return [Encoded(e.ids, e.tokens, e.type_ids, e.sequence_ids, e.offsets) for e in batch]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """Decode ids to text. Special tokens are left out unless ``special`` is true."""
        if self.target is not self:
            return self.target.decode(ids, special=special)
        try:
            given = [index(token) for token in ids]
        except TypeError:
            raise InputError(f"Ids must be whole numbers, but got {ids!r}.") from None
        if given and not 0 <= min(given) <= max(given) < len(self):
            raise InputError(f"Ids must be from 0 to {len(self) - 1}, but got {given}.")
        return str(self.tokenizer.decode(given, skip_special_tokens=not special))

    # ------------------------------------------------------------------------- reading, writing

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Tokenizer:
        """Load the tokenizer of a shipped or downloaded model, or of a folder."""
        folder = described(find(name))
        if (folder / _FILE).exists():
            target = folder / _TARGET
            return cls(_read(folder / _FILE), _read(target) if target.exists() else None)
        if (folder / "vocab.txt").exists():
            return cls(add_tokens(wordpiece(folder), folder))
        for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
            if (folder / merges).exists():
                tokenizer = byte_pairs(folder / vocabulary, folder / merges)
                return cls(add_tokens(tokenizer, folder))
        for model in ("spiece.model", "sentencepiece.model", "tokenizer.model"):
            if (folder / model).exists():
                return cls(add_tokens(sentencepiece(folder / model), folder))
        if (folder / "source.spm").exists():
            return cls(*marian(folder))
        raise CheckpointError(
            f"{folder} has no tokenizer: neither tokenizer.json, vocab.txt, vocab.json with "
            "merges.txt, spiece.model, nor source.spm."
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, and tokenizer_config.json if needed (:meth:`describe`).

        If the target has another tokenizer, it is written to target_tokenizer.json, which only
        regard reads.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.describe(Path(folder))
        self.tokenizer.save(str(Path(folder) / _FILE), pretty=False)
        if self.target is not self:
            self.target.tokenizer.save(str(Path(folder) / _TARGET), pretty=False)
        else:  # remove the file of an earlier save
            (Path(folder) / _TARGET).unlink(missing_ok=True)

    def describe(self, folder: Path) -> None:
        """Write tokenizer_config.json if transformers needs it to read tokenizer.json.

        Without this file, transformers would look for the SentencePiece files of a T5 or Marian.
        """
        roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
        vocabulary = self.tokenizer.get_vocab()
        known = {role: token for role, token in roles.items() if token in vocabulary}
        if "eos_token" in known and not (folder / OPTIONS).exists():
            options = {"tokenizer_class": "PreTrainedTokenizerFast", **known}
            (folder / OPTIONS).write_text(json.dumps(options, indent=2) + "\n")

    def pruned(self, counts: Mapping[int, int], keep: int) -> Tokenizer:
        """Return a tokenizer with the ``keep`` most frequent WordPiece tokens, in their old order.

        Special tokens and single characters are kept, so that every text can still be encoded.
        """
        model = self.tokenizer.model
        if not isinstance(model, algorithms.WordPiece):
            raise InputError(
                f"Only WordPiece can be pruned, but this tokenizer is a {type(model).__name__}."
            )
        vocabulary = self.tokenizer.get_vocab()

        def rank(token: str) -> tuple[bool, int, int]:
            needed = token in BERT or len(token.removeprefix("##")) == 1
            return not needed, -counts.get(vocabulary[token], 0), vocabulary[token]

        kept = sorted(sorted(vocabulary, key=rank)[:keep], key=vocabulary.__getitem__)
        _check_size(keep, sum(not rank(token)[0] for token in vocabulary))
        small = {token: index for index, token in enumerate(kept)}
        tokenizer = FastTokenizer(algorithms.WordPiece(small, unk_token="[UNK]"))
        tokenizer.normalizer = self.tokenizer.normalizer
        tokenizer.pre_tokenizer = self.tokenizer.pre_tokenizer
        tokenizer.add_special_tokens(list(BERT))
        return type(self)(as_bert(tokenizer))

    # ------------------------------------------------------------------------------- training

    @classmethod
    def train_bpe(
        cls, lines: Iterable[str], *, size: int, special: Sequence[str] = ("<|endoftext|>",)
    ) -> Tokenizer:
        """Train byte-level byte-pair encoding, as in GPT-2. It can encode every text."""
        tokenizer = byte_level(algorithms.BPE())
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        _check_size(size, len(alphabet) + len(special))
        trainer = training.BpeTrainer(
            vocab_size=size,
            special_tokens=list(special),
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        )
        _train(tokenizer, lines, trainer)
        return cls(tokenizer)

    @classmethod
    def train_wordpiece(
        cls, lines: Iterable[str], *, size: int, lowercase: bool = True
    ) -> Tokenizer:
        """Train WordPiece with BERT's special tokens."""
        _check_size(size, len(BERT))
        tokenizer = FastTokenizer(algorithms.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = training.WordPieceTrainer(
            vocab_size=size, special_tokens=list(BERT), show_progress=False
        )
        _train(tokenizer, lines, trainer)
        return cls(as_bert(tokenizer))

    @classmethod
    def train_unigram(
        cls,
        lines: Iterable[str],
        *,
        size: int,
        special: Sequence[str] = ("<pad>", "</s>", "<unk>"),
        unknown: str = "<unk>",
        end: str | None = "</s>",
    ) -> Tokenizer:
        """Train a unigram model, as in T5; ``end`` is appended to every text."""
        _check_size(size, len(special) + 1)
        for token in (unknown, *(() if end is None else (end,))):
            if token not in special:
                raise InputError(f"{token!r} must be one of the special tokens {list(special)}.")
        tokenizer = FastTokenizer(algorithms.Unigram())
        # Newlines and tabs are spaces for SentencePiece.
        steps = [normalizers.NFKC(), normalizers.Replace(Regex(r"\s+"), " "), normalizers.Strip()]
        tokenizer.normalizer = normalizers.Sequence(steps)
        as_sentencepiece(tokenizer, prefix=True)
        trainer = training.UnigramTrainer(
            vocab_size=size, special_tokens=list(special), unk_token=unknown, show_progress=False
        )
        _train(tokenizer, lines, trainer)
        if end is not None:
            close_with(tokenizer, end)
        return cls(tokenizer)


def _train(tokenizer: FastTokenizer, lines: Iterable[str], trainer: training.Trainer) -> None:
    _check_lines(lines)

    def texts() -> Iterator[str]:
        for line in lines:
            _check_text(line)
            yield line

    try:
        tokenizer.train_from_iterator(texts(), trainer)
    except Exception as error:
        if type(error) is not Exception:  # the error comes from the lines, not from the library
            raise
        raise InputError(f"No tokenizer can be trained on this: {error}") from None


def _check_lines(lines: object) -> None:
    if isinstance(lines, str | bytes) or not isinstance(lines, Iterable):
        raise InputError(f"Give a list of texts, not {type(lines).__name__}.")


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InputError(f"A text is a str, but got {type(text).__name__}.")
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError(
            "The text contains a lone surrogate (U+D800 to U+DFFF), which UTF-8 cannot encode. "
            "Remove it."
        )


def _check_size(size: int, least: int) -> None:
    if type(size) is not int or not least <= size <= MAX_VOCABULARY:
        raise SizeError(
            f"size must be a whole number from {least} to {MAX_VOCABULARY}, but got {size!r}."
        )


def _read(file: Path) -> FastTokenizer:
    raw = read_text(file)
    with errors_of(file):
        tokenizer = FastTokenizer.from_str(raw)
        added = max(tokenizer.num_special_tokens_to_add(pair) for pair in (False, True))
    if added > MAX_ADDED:
        raise CheckpointError(
            f"{file} adds {added:,} special tokens to each text, more than {MAX_ADDED:,}."
        )
    if tokenizer.post_processor is not None:
        places = _places(json.loads(tokenizer.post_processor.__getstate__()))
        if places > MAX_PLACES:
            raise CheckpointError(f"{file} repeats each text {places:,} times.")
    tokenizer.no_padding()  # callers pad batches
    tokenizer.no_truncation()
    return tokenizer


def _places(processor: Mapping[str, Any]) -> int:
    """How often the templates of a post-processor have a text, both texts of a pair counted."""
    if processor["type"] == "Sequence":
        return prod(map(_places, processor["processors"]))
    templates = (processor.get(kind, ()) for kind in ("single", "pair"))
    return max(1, *(sum("Sequence" in piece for piece in pieces) for pieces in templates))


def word_level(lines: Iterator[str], size: int, own: Sequence[str]) -> Tokenizer:
    """Build a tokenizer of whole words. A line end is a token too, as in the Penn Treebank."""
    special = (END_OF_TEXT, "\n", *own)
    counts = Counter(word for line in lines for word in line.split(" ") if word)
    for token in (*special, "<unk>"):
        counts.pop(token, None)
    words = [word for word, _ in counts.most_common(size - len(special) - 1)]
    ids = {token: index for index, token in enumerate((*special, "<unk>", *words))}
    tokenizer = FastTokenizer(algorithms.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    tokenizer.add_special_tokens(list(special))
    return Tokenizer(tokenizer)
