"""Text to ids and back: reading and training tokenizers. The work is done by `tokenizers`.

Besides tokenizer.json the older files are read: vocab.txt (BERT), vocab.json with merges.txt
(GPT-2), SentencePiece's .model (T5), and source.spm and target.spm with vocab.json (Marian).
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import index
from pathlib import Path

from tokenizers import Regex, normalizers, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models as algorithms
from tokenizers import trainers as training
from tokenizers.models import WordLevel

from regard.checkpoints.hub import find
from regard.errors import CheckpointError, InputError
from regard.text.files import OPTIONS, add_tokens, errors_of, read_text
from regard.text.marian import marian
from regard.text.sentencepiece import as_sentencepiece, close_with, sentencepiece
from regard.text.vocabularies import BERT, as_bert, byte_level, byte_pairs, wordpiece

_FILE, _TARGET = "tokenizer.json", "target_tokenizer.json"
MOST = 2**24  # tokens of a vocabulary; for many more there would be no memory

END_OF_TEXT = "<|endoftext|>"


class SizeError(InputError):
    """A vocabulary cannot have the size asked for."""


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as ids, and where each came from.

    >>> text = Tokenizer.train_bpe(["low lower lowest"] * 9, size=300)
    >>> text.encode("lowest low").offsets[-1]  # the last token is the last word
    (7, 10)
    """

    ids: list[int]
    tokens: list[str]
    token_types: list[int]  # 0 for the first text and 1 for the second
    texts: list[int | None]  # which of the texts each comes from; None where added
    offsets: list[tuple[int, int]]  # its characters there, from and to


class Tokenizer:
    """A tokenizer: text to ids and back.

    Where a model writes in other pieces than it reads, ``target`` is the tokenizer of what it
    writes, and decodes; otherwise this one is both.

    >>> text = Tokenizer.train_bpe(["low lower lowest"] * 9, size=300)
    >>> encoded = text.encode("lower")
    >>> text.decode(encoded.ids)
    'lower'
    """

    def __init__(self, tokenizer: FastTokenizer, target: FastTokenizer | None = None) -> None:
        self.tokenizer = tokenizer
        self._counted = (0, 0)  # tokens, and one more than their largest id
        self.target = self if target is None else Tokenizer(target)

    def __len__(self) -> int:
        """How many ids there are, those between that no token has among them."""
        count = self.tokenizer.get_vocab_size()
        if count != self._counted[0]:
            self._counted = count, 1 + max(self.tokenizer.get_vocab().values())
        return self._counted[1]

    def id(self, token: str) -> int:
        """The id of a token that must exist, as ``text.id("</s>")``."""
        found = self.tokenizer.token_to_id(token) if isinstance(token, str) else None
        if found is None:
            raise InputError(f"This tokenizer has no token {token!r}.")
        return int(found)

    def encode(self, text: str, pair: str | None = None, *, special: bool = True) -> Encoded:
        """The ids of a text, or of two as one; ``special`` adds what the model expects around them.

        ``offsets`` are characters: ``text[start:end]`` is what an id stands for.
        """
        _check_text(text)
        if pair is not None:
            _check_text(pair)
        with errors_of("This"):
            found = self.tokenizer.encode(text, pair, add_special_tokens=special)
        return Encoded(found.ids, found.tokens, found.type_ids, found.sequence_ids, found.offsets)

    def encode_all(self, texts: Sequence[str], *, special: bool = True) -> list[Encoded]:
        """As :meth:`encode`, many at once."""
        _check_lines(texts)
        texts = list(texts)
        for text in texts:
            _check_text(text)
        with errors_of("This"):
            batch = self.tokenizer.encode_batch(texts, add_special_tokens=special)
        return [Encoded(e.ids, e.tokens, e.type_ids, e.sequence_ids, e.offsets) for e in batch]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; special tokens are left out unless asked for."""
        if self.target is not self:
            return self.target.decode(ids, special=special)
        try:
            given = [index(one) for one in ids]
        except TypeError:
            raise InputError(f"Ids are whole numbers, but got {ids!r}.") from None
        if given and not 0 <= min(given) <= max(given) < len(self):
            raise InputError(f"Ids are from 0 to {len(self) - 1}, but got {given}.")
        return str(self.tokenizer.decode(given, skip_special_tokens=not special))

    # ------------------------------------------------------------------------- reading, writing

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Tokenizer:
        """The tokenizer of a checkpoint: a folder, or a model of the Hugging Face hub."""
        folder = find(name)
        if (folder / _FILE).exists():
            target = folder / _TARGET
            return cls(_read(folder / _FILE), _read(target) if target.exists() else None)
        if (folder / "vocab.txt").exists():
            return cls(add_tokens(wordpiece(folder), folder))
        for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
            if (folder / merges).exists():
                found = byte_pairs(folder / vocabulary, folder / merges)
                return cls(add_tokens(found, folder))
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
        """Write tokenizer.json, for regard and others to read.

        Where others could not guess how, tokenizer_config.json tells them (:meth:`describe`). A
        tokenizer of its own for the target goes into target_tokenizer.json, for regard alone.
        """
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.describe(Path(folder))
        self.tokenizer.save(str(Path(folder) / _FILE), pretty=False)
        if self.target is not self:
            self.target.tokenizer.save(str(Path(folder) / _TARGET), pretty=False)
        else:  # what an earlier save left behind must not be read with this one
            (Path(folder) / _TARGET).unlink(missing_ok=True)

    def describe(self, folder: Path) -> None:
        """Say in tokenizer_config.json that tokenizer.json is all there is.

        By the kind of a model transformers knows BERT's and GPT-2's, which have what it expects.
        Of T5 and Marian it expects SentencePiece's files, which a tokenizer of ours has not.
        """
        roles = {"eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
        known = {
            role: token
            for role, token in roles.items()
            if self.tokenizer.token_to_id(token) is not None
        }
        if "eos_token" in known and not (folder / OPTIONS).exists():
            told = {"tokenizer_class": "PreTrainedTokenizerFast", **known}
            (folder / OPTIONS).write_text(json.dumps(told, indent=2) + "\n")

    def pruned(self, counts: Mapping[int, int], keep: int) -> Tokenizer:
        """With the ``keep`` most counted tokens of a WordPiece vocabulary only, in their old order.

        Special tokens and single characters stay, so that every text can still be encoded.
        """
        model = self.tokenizer.model
        if not isinstance(model, algorithms.WordPiece):
            raise InputError(
                f"Only a WordPiece vocabulary can be pruned, not {type(model).__name__}'s."
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
        """Byte-level byte-pair encoding, as GPT-2's: every text can be encoded."""
        _check_lines(lines)
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
        """WordPiece, as BERT's, with its special tokens."""
        _check_lines(lines)
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
        """A unigram model, as SentencePiece trains for T5; ``end`` closes every text."""
        _check_lines(lines)
        _check_size(size, len(special) + 1)
        for token in (unknown, *(() if end is None else (end,))):
            if token not in special:
                raise InputError(f"{token!r} must be one of the special tokens {list(special)}.")
        tokenizer = FastTokenizer(algorithms.Unigram())
        spaces = normalizers.Replace(Regex(r"\s+"), " ")  # newlines and tabs are spaces there too
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.NFKC(), spaces, normalizers.Strip()]
        )
        as_sentencepiece(tokenizer, prefix=True)
        trainer = training.UnigramTrainer(
            vocab_size=size,
            special_tokens=list(special),
            unk_token=unknown,
            show_progress=False,
        )
        _train(tokenizer, lines, trainer)
        if end is not None:
            close_with(tokenizer, end)
        return cls(tokenizer)


def _train(tokenizer: FastTokenizer, lines: Iterable[str], trainer: training.Trainer) -> None:
    def texts() -> Iterator[str]:
        for line in lines:
            _check_text(line)
            yield line

    try:
        tokenizer.train_from_iterator(texts(), trainer)
    except Exception as error:
        if type(error) is not Exception:  # what reading the lines raised
            raise
        raise InputError(f"No tokenizer can be trained on this: {error}") from None


def _check_lines(lines: object) -> None:
    if isinstance(lines, str | bytes) or not isinstance(lines, Iterable):
        raise InputError(f"Give a list of texts, not {type(lines).__name__}.")


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InputError(f"A text is a str, but got {type(text).__name__}.")
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError("The text holds a lone surrogate, which is no character.")


def _check_size(size: int, least: int) -> None:
    if type(size) is not int or not least <= size <= MOST:
        raise SizeError(f"size must be a whole number from {least} to {MOST}, but got {size!r}.")


def _read(file: Path) -> FastTokenizer:
    raw = read_text(file)
    with errors_of(file):
        tokenizer = FastTokenizer.from_str(raw)
    tokenizer.no_padding()  # a batch is padded by whoever makes one
    tokenizer.no_truncation()
    return tokenizer


def word_level(lines: Iterator[str], size: int, own: Sequence[str]) -> Tokenizer:
    """What stands between spaces, and the ends of lines: words as the Penn Treebank has them."""
    special = (END_OF_TEXT, "\n", *own)
    counts = Counter(word for line in lines for word in line.split(" ") if word)
    for token in (*special, "<unk>"):
        counts.pop(token, None)
    words = [word for word, _ in counts.most_common(size - len(special) - 1)]
    ids = {token: index for index, token in enumerate((*special, "<unk>", *words))}
    found = FastTokenizer(WordLevel(ids, unk_token="<unk>"))
    found.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    found.add_special_tokens(list(special))
    return Tokenizer(found)
