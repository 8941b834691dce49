"""Text to ids and back: reading and training tokenizers. The work is done by `tokenizers`.

Besides tokenizer.json the older files are read: vocab.txt (BERT), vocab.json with merges.txt
(GPT-2), SentencePiece's .model (T5), and source.spm with vocab.json (Marian).
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers import models as algorithms
from tokenizers import processors as templates
from tokenizers import trainers as training

from regard.checkpoints import find, read_bytes, read_json
from regard.errors import CheckpointError, InputError

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A text as ids, and where each came from.

    >>> text = Text.train_bpe(["low lower lowest"] * 9, size=300)
    >>> text.encode("lowest low").offsets[-1]  # the last token is the last word
    (7, 10)
    """

    ids: list[int]
    tokens: list[str]
    kinds: list[int]  # 0 for the first text and 1 for the second
    texts: list[int | None]  # which of the texts each comes from; None where added
    offsets: list[tuple[int, int]]  # its characters there, from and to


class Text:
    """A tokenizer: text to ids and back.

    >>> text = Text.train_bpe(["low lower lowest"] * 9, size=300)
    >>> encoded = text.encode("lower")
    >>> text.decode(encoded.ids)
    'lower'
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer

    def __len__(self) -> int:
        """How many ids there are."""
        return int(self.tokenizer.get_vocab_size())

    def id(self, token: str) -> int:
        """The id of a token that must exist, as ``text.id("</s>")``."""
        found = self.tokenizer.token_to_id(token)
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
        found = self.tokenizer.encode(text, pair, add_special_tokens=special)
        return Encoded(found.ids, found.tokens, found.type_ids, found.sequence_ids, found.offsets)

    def encode_all(self, texts: Sequence[str], *, special: bool = True) -> list[Encoded]:
        """As :meth:`encode`, many at once."""
        for text in texts:
            _check_text(text)
        batch = self.tokenizer.encode_batch(list(texts), add_special_tokens=special)
        return [Encoded(e.ids, e.tokens, e.type_ids, e.sequence_ids, e.offsets) for e in batch]

    def decode(self, ids: Sequence[int], *, special: bool = False) -> str:
        """The text of ids; special tokens are left out unless asked for."""
        if not all(0 <= one < len(self) for one in ids):
            raise InputError(f"Ids are from 0 to {len(self) - 1}, but got {list(ids)}.")
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=not special))

    # ------------------------------------------------------------------------- reading, writing

    @classmethod
    def load(cls, name: str | os.PathLike[str]) -> Text:
        """The tokenizer of a checkpoint: a folder, or a model of the Hugging Face hub."""
        folder = find(name)
        if (folder / "tokenizer.json").exists():
            file = folder / "tokenizer.json"
            raw = _decoded(read_bytes(file), file)
            tokenizer = _built(lambda: Tokenizer.from_str(raw), file)
            tokenizer.no_padding()  # a batch is padded by whoever makes one
            tokenizer.no_truncation()
            return cls(tokenizer)
        if (folder / "vocab.txt").exists():
            return cls(_wordpiece(folder))
        for vocabulary, merges in (("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")):
            if (folder / merges).exists():
                return cls(_byte_pairs(folder / vocabulary, folder / merges))
        for model in ("spiece.model", "sentencepiece.model", "tokenizer.model"):
            if (folder / model).exists():
                return cls(_sentencepiece(folder / model))
        if (folder / "source.spm").exists():
            return cls(_marian(folder))
        raise CheckpointError(
            f"{folder} has no tokenizer: neither tokenizer.json, vocab.txt, vocab.json with "
            "merges.txt, spiece.model, nor source.spm."
        )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, for regard and others to read."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.tokenizer.save(str(Path(folder) / "tokenizer.json"))

    def pruned(self, counts: Mapping[int, int], keep: int) -> Text:
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
            needed = token in _BERT or len(token.removeprefix("##")) == 1
            return not needed, -counts.get(vocabulary[token], 0), vocabulary[token]

        kept = sorted(sorted(vocabulary, key=rank)[:keep], key=vocabulary.__getitem__)
        _check_size(keep, sum(not rank(token)[0] for token in vocabulary))
        small = {token: index for index, token in enumerate(kept)}
        tokenizer = Tokenizer(algorithms.WordPiece(small, unk_token="[UNK]"))
        tokenizer.normalizer = self.tokenizer.normalizer
        tokenizer.pre_tokenizer = self.tokenizer.pre_tokenizer
        tokenizer.add_special_tokens(list(_BERT))
        return type(self)(_as_bert(tokenizer))

    # ------------------------------------------------------------------------------- training

    @classmethod
    def train_bpe(
        cls, lines: Iterable[str], *, size: int, special: Sequence[str] = ("<|endoftext|>",)
    ) -> Text:
        """Byte-level byte-pair encoding, as GPT-2's: every text can be encoded."""
        tokenizer = _byte_level(algorithms.BPE())
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        _check_size(size, len(alphabet) + len(special))
        trainer = training.BpeTrainer(
            vocab_size=size,
            special_tokens=list(special),
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
        return cls(tokenizer)

    @classmethod
    def train_wordpiece(cls, lines: Iterable[str], *, size: int, lowercase: bool = True) -> Text:
        """WordPiece, as BERT's, with its special tokens."""
        _check_size(size, len(_BERT))
        tokenizer = Tokenizer(algorithms.WordPiece(unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        trainer = training.WordPieceTrainer(
            vocab_size=size, special_tokens=list(_BERT), show_progress=False
        )
        tokenizer.train_from_iterator(lines, trainer)
        return cls(_as_bert(tokenizer))

    @classmethod
    def train_unigram(
        cls,
        lines: Iterable[str],
        *,
        size: int,
        special: Sequence[str] = ("<pad>", "</s>", "<unk>"),
        unknown: str = "<unk>",
        end: str | None = "</s>",
    ) -> Text:
        """A unigram model, as SentencePiece trains for T5; ``end`` closes every text."""
        _check_size(size, len(special) + 1)
        for token in (unknown, *(() if end is None else (end,))):
            if token not in special:
                raise InputError(f"{token!r} must be one of the special tokens {list(special)}.")
        tokenizer = Tokenizer(algorithms.Unigram())
        tokenizer.normalizer = normalizers.Sequence([normalizers.NFKC(), *_single_spaces()])
        _as_sentencepiece(tokenizer, prefix=True)
        trainer = training.UnigramTrainer(
            vocab_size=size,
            special_tokens=list(special),
            unk_token=unknown,
            show_progress=False,
        )
        tokenizer.train_from_iterator(lines, trainer)
        if end is not None:
            _close_with(tokenizer, end)
        return cls(tokenizer)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise InputError(f"A text is a str, but got {type(text).__name__}.")
    if not text.isascii() and any("\ud800" <= char <= "\udfff" for char in text):
        raise InputError("The text holds a lone surrogate, which is no character.")


def _check_size(size: int, least: int) -> None:
    if not isinstance(size, int) or size < least:
        raise InputError(f"size must be a whole number from {least} on, but got {size!r}.")


def _decoded(raw: bytes, file: Path) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not UTF-8.") from None


def _built(make: Callable[[], T], file: Path) -> T:
    """What ``make`` builds from a file's contents, or an error of ours."""
    try:
        return make()
    except BaseException as error:
        # `tokenizers` raises bare Exceptions, and where its Rust panics, not even those.
        known = type(error) is Exception or isinstance(error, ValueError | TypeError)
        if not known and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{file} is no tokenizer that can be read: {error}") from None


# --------------------------------------------------------------------------------------- WordPiece

_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def _wordpiece(folder: Path) -> Tokenizer:
    """BERT's: vocab.txt has one token a line, and tokenizer_config.json may say "cased"."""
    file = folder / "vocab.txt"
    vocabulary: dict[str, int] = {}
    lines = _decoded(read_bytes(file), file).split("\n")
    for index, line in enumerate(lines[:-1] if not lines[-1] else lines):
        token = line.removesuffix("\r")
        if token in vocabulary:
            raise CheckpointError(f"{file} has the token {token!r} twice.")
        vocabulary[token] = index
    for token in _BERT:
        if token not in vocabulary:
            raise CheckpointError(f"{file} lacks the token {token}.")
    options = folder / "tokenizer_config.json"
    lowercase = read_json(options).get("do_lower_case", True) if options.exists() else True
    tokenizer = _built(lambda: Tokenizer(algorithms.WordPiece(vocabulary, unk_token="[UNK]")), file)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase is not False)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(list(_BERT))
    return _as_bert(tokenizer)


def _as_bert(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = templates.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


# -------------------------------------------------------------------------------------- byte pairs


def _byte_pairs(vocabulary: Path, merges: Path) -> Tokenizer:
    """GPT-2's: ids by token, and the pairs to merge in their order."""
    ids = read_json(vocabulary)
    if not all(type(n) is int and 0 <= n < len(ids) for n in ids.values()):
        raise CheckpointError(f"{vocabulary} should give each token an id below {len(ids)}.")
    pairs = []
    for line in _decoded(read_bytes(merges), merges).split("\n"):
        if line.startswith("#version") or not line.strip():
            continue
        parts = line.split(" ")
        if len(parts) != 2:
            raise CheckpointError(f"{merges} should have two tokens a line, but has {line!r}.")
        pairs.append((parts[0], parts[1]))
    tokenizer = _built(lambda: _byte_level(algorithms.BPE(ids, pairs)), vocabulary)
    end = "<|endoftext|>"
    if end in ids:
        tokenizer.add_special_tokens([AddedToken(end, normalized=False)])
    return tokenizer


def _byte_level(model: algorithms.BPE) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = templates.ByteLevel(trim_offsets=True)
    return tokenizer


# ----------------------------------------------------------------------------------- SentencePiece

_UNIGRAM, _PAIRS = 1, 2  # kinds of models
_NORMAL, _UNKNOWN, _CONTROL, _USER, _BYTE = 1, 2, 3, 4, 6  # kinds of pieces


class _Pieces(NamedTuple):
    """What a SentencePiece model holds."""

    pieces: list[tuple[str, float]]  # with the logarithm of how likely each is
    kinds: list[int]
    model: int  # its kind
    normalizer: normalizers.Normalizer
    prefix: bool  # whether a space comes before the first word

    def named(self, *kinds: int) -> list[str]:
        """The pieces of some kinds."""
        both = zip(self.pieces, self.kinds, strict=True)
        return [piece for (piece, _), kind in both if kind in kinds]


def _read_pieces(file: Path) -> _Pieces:
    """A SentencePiece model of unigrams or byte pairs."""
    pieces: list[tuple[str, float]] = []
    kinds: list[int] = []
    kind_of_model, charsmap, prefix, single = _UNIGRAM, b"", True, True
    for number, value in _fields(read_bytes(file), file):
        if number == 1:
            piece, score, kind = "", 0.0, 1
            for inner, part in _fields(_bytes(value, file), file):
                if inner == 1:
                    piece = _decoded(_bytes(part, file), file)
                elif inner == 2:
                    score = struct.unpack("<f", _bytes(part, file))[0]
                elif inner == 3:
                    kind = _whole(part, file)
            pieces.append((piece, score))
            kinds.append(kind)
        elif number == 2:
            for inner, part in _fields(_bytes(value, file), file):
                if inner == 3:
                    kind_of_model = _whole(part, file)
        elif number == 3:
            for inner, part in _fields(_bytes(value, file), file):
                if inner == 2:
                    charsmap = _bytes(part, file)
                elif inner == 3:
                    prefix = bool(part)
                elif inner == 4:
                    single = bool(part)
    if kind_of_model not in (_UNIGRAM, _PAIRS):
        raise CheckpointError(
            f"{file} is a SentencePiece model of words or characters. Those of unigrams and of "
            "byte pairs are read."
        )
    if kinds.count(_UNKNOWN) != 1:
        raise CheckpointError(f"{file} should have one piece for what is unknown.")
    steps = [_built(lambda: normalizers.Precompiled(charsmap), file)] if charsmap else []
    normalizer = normalizers.Sequence([*steps, *(_single_spaces() if single else [])])
    return _Pieces(pieces, kinds, kind_of_model, normalizer, prefix)


def _sentencepiece(file: Path) -> Tokenizer:
    """SentencePiece's model, with the 100 sentinels that T5 adds behind its pieces."""
    found = _read_pieces(file)
    tokenizer = _unigrams(found, file) if found.model == _UNIGRAM else _merged(found, file)
    special = found.named(_UNKNOWN, _CONTROL, _USER)
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if file.name == "spiece.model":
        sentinels = [AddedToken(f"<extra_id_{n}>", normalized=False) for n in range(99, -1, -1)]
        tokenizer.add_special_tokens(sentinels)
    if "</s>" in special:
        _close_with(tokenizer, "</s>")
    return tokenizer


def _unigrams(found: _Pieces, file: Path) -> Tokenizer:
    """The likeliest way to cut a text into pieces, and bytes for what is in none."""
    unknown, fall_back = found.kinds.index(_UNKNOWN), _BYTE in found.kinds
    tokenizer = _built(
        lambda: Tokenizer(
            algorithms.Unigram(found.pieces, unk_id=unknown, byte_fallback=fall_back)
        ),
        file,
    )
    tokenizer.normalizer = found.normalizer
    _as_sentencepiece(tokenizer, prefix=found.prefix)
    if fall_back:
        tokenizer.decoder = decoders.Sequence(
            [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=_scheme(found.prefix))]
        )
    return tokenizer


def _merged(found: _Pieces, file: Path) -> Tokenizer:
    """Neighbours merged into the piece with the highest score, again and again.

    Which pairs those are the model does not say: all that make a piece together.
    """
    ids = {piece: index for index, (piece, _) in enumerate(found.pieces)}
    if len(ids) < len(found.pieces):
        raise CheckpointError(f"{file} has a piece twice.")
    whole = set(found.named(_NORMAL, _USER))
    merges = [
        (-score, ids[piece[:cut]], ids[piece[cut:]], piece[:cut], piece[cut:])
        for piece, score in found.pieces
        if piece in whole
        for cut in range(1, len(piece))
        if piece[:cut] in whole and piece[cut:] in whole
    ]
    model = _built(
        lambda: algorithms.BPE(
            ids,
            [(left, right) for *_, left, right in sorted(merges)],
            unk_token=found.pieces[found.kinds.index(_UNKNOWN)][0],
            fuse_unk=True,
            byte_fallback=_BYTE in found.kinds,
        ),
        file,
    )
    tokenizer = Tokenizer(model)
    # Spaces are characters like others here: a piece may hold several words.
    marks = [normalizers.Prepend("▁")] if found.prefix else []
    tokenizer.normalizer = normalizers.Sequence(
        [found.normalizer, *marks, normalizers.Replace(" ", "▁")]
    )
    first = [decoders.Strip(" ", 1, 0)] if found.prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *first]
    )
    return tokenizer


def _marian(folder: Path) -> Tokenizer:
    """Marian's: ids by piece for both languages, and how likely those of the source are.

    Pieces of the target alone are there to be written. They are so unlikely that a source is cut
    into them only where a character of it is in no other piece.
    """
    file = folder / "vocab.json"
    ids = read_json(file)
    if sorted(ids.values(), key=str) != sorted(range(len(ids)), key=str):
        raise CheckpointError(f"{file} should give its tokens the ids from 0 to {len(ids) - 1}.")
    ends = ("</s>", "<unk>", "<pad>")
    for token in ends:
        if token not in ids:
            raise CheckpointError(f"{file} lacks the token {token}.")
    found = _read_pieces(folder / "source.spm")
    if found.model != _UNIGRAM:
        raise CheckpointError(f"{folder / 'source.spm'} should be a model of unigrams.")
    likely = dict(found.pieces)
    least = min(likely.values()) - 1000.0
    pieces = [(piece, likely.get(piece, least)) for piece in sorted(ids, key=ids.__getitem__)]
    tokenizer = _built(
        lambda: Tokenizer(algorithms.Unigram(pieces, unk_id=ids["<unk>"])), folder / "source.spm"
    )
    tokenizer.normalizer = found.normalizer
    _as_sentencepiece(tokenizer, prefix=found.prefix)
    tags = [token for token in ids if token.startswith(">>") and token.endswith("<<")]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in (*ends, *tags)])
    _close_with(tokenizer, "</s>")
    return tokenizer


def _single_spaces() -> list[normalizers.Normalizer]:
    """No space at either end, and one between words."""
    return [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]


def _as_sentencepiece(tokenizer: Tokenizer, *, prefix: bool) -> None:
    scheme = _scheme(prefix)
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)


def _scheme(prefix: bool) -> Literal["always", "never"]:
    return "always" if prefix else "never"


def _close_with(tokenizer: Tokenizer, end: str) -> None:
    tokenizer.post_processor = templates.TemplateProcessing(
        single=f"$A {end}",
        pair=f"$A {end} $B {end}",
        special_tokens=[(end, tokenizer.token_to_id(end))],
    )


def _fields(raw: bytes, file: Path) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a protocol-buffer message: their numbers, and whole numbers or bytes."""
    at = 0
    while at < len(raw):
        tag, at = _varint(raw, at, file)
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            value, at = _varint(raw, at, file)
            yield number, value
            continue
        if wire == 2:
            length, at = _varint(raw, at, file)
        elif wire in (1, 5):
            length = 8 if wire == 1 else 4
        else:
            raise CheckpointError(f"{file} is no SentencePiece model.")
        if length > len(raw) - at:
            raise CheckpointError(f"{file} is no SentencePiece model: it ends within a field.")
        yield number, raw[at : at + length]
        at += length


def _varint(raw: bytes, at: int, file: Path) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        if at >= len(raw):
            break
        byte = raw[at]
        value |= (byte & 127) << shift
        at += 1
        if byte < 128:
            return value, at
    raise CheckpointError(f"{file} is no SentencePiece model: a number in it does not end.")


def _bytes(value: int | bytes, file: Path) -> bytes:
    if isinstance(value, int):
        raise CheckpointError(f"{file} is no SentencePiece model: a field is of another kind.")
    return value


def _whole(value: int | bytes, file: Path) -> int:
    if isinstance(value, bytes):
        raise CheckpointError(f"{file} is no SentencePiece model: a field is of another kind.")
    return value
