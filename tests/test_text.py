"""Text: ids and offsets are those of transformers, or of the definition, and files go round."""

from __future__ import annotations

import itertools
import json
import random
import struct
from pathlib import Path

import pytest
import transformers

from regard import CheckpointError, InputError, RegardError
from regard.text import Text
from test_models_bert import minilm

LINES = [
    "The cat sat on the mat.",
    "  Two  spaces,\ttabs and trailing ones  ",
    "Ünïcödé: naïve café, ﬁne ligatures, ½ and ™.",
    "中文字符 mixed with English, русский, العربية, 日本語.",
    "Emoji 👩‍👩‍👧 and \u200b zero width, \u00a0 no-break.",
    "It's they're we'll I'd 1234567890 3.14 $100 #tag @you",
    "supercalifragilisticexpialidocious " * 4,
    "!!! ??? ... --- ((())) [CLS] [MASK] <|endoftext|> </s>",
    "",
]


def corpus() -> list[str]:
    """Words of all kinds, made by rule, so that nothing need be downloaded."""
    rng = random.Random(0)
    parts = ["un", "re", "see", "look", "like", "ing", "er", "ed", "ly", "ness", "cat", "mat"]
    words = ["".join(rng.choices(parts, k=rng.randint(1, 4))) for _ in range(300)]
    return [" ".join(rng.choices(words, k=9)).capitalize() + "." for _ in range(400)]


def test_a_real_tokenizer_is_that_of_transformers() -> None:
    text = Text.load(minilm())
    theirs = transformers.AutoTokenizer.from_pretrained(minilm())
    for line in [*LINES, *corpus()]:
        expected = theirs(line, return_offsets_mapping=True)
        found = text.encode(line)
        assert found.ids == expected["input_ids"]
        assert found.offsets == expected["offset_mapping"]
        assert text.decode(found.ids) == theirs.decode(found.ids, skip_special_tokens=True)


def test_a_real_vocab_txt_is_its_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes((minilm() / "vocab.txt").read_bytes())
    old, new = Text.load(tmp_path), Text.load(minilm())
    assert len(old) == len(new) == 30522
    for line in [*LINES, *corpus()]:
        assert old.encode(line) == new.encode(line)
    assert old.encode("a question", "a text") == new.encode("a question", "a text")


def test_case_is_kept_where_the_config_says_so(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nCat\ncat\n")
    assert Text.load(tmp_path).encode("Cat").tokens == ["[CLS]", "cat", "[SEP]"]
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert Text.load(tmp_path).encode("Cat").tokens == ["[CLS]", "Cat", "[SEP]"]


def test_pairs_say_where_each_token_comes_from() -> None:
    text = Text.load(minilm())
    question, passage = "Who sat?", "The cat sat on the mat."
    found = text.encode(question, passage)
    assert found.kinds == [0] * found.ids.index(text.id("[SEP]"), 0) + [0] + [1] * (
        len(found.ids) - found.ids.index(text.id("[SEP]")) - 1
    )
    at = found.tokens.index("cat")
    start, end = found.offsets[at]
    assert found.texts[at] == 1
    assert passage[start:end] == "cat"
    assert found.texts[0] is None


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_byte_pairs_are_those_of_transformers(tmp_path: Path, names: tuple[str, str]) -> None:
    trained = Text.train_bpe(corpus(), size=400)
    model = json.loads(trained.tokenizer.to_str())["model"]
    merges = "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in model["merges"])
    for folder, (vocabulary, pairs) in (("ours", names), ("theirs", ("vocab.json", "merges.txt"))):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / vocabulary).write_text(json.dumps(model["vocab"]))
        (tmp_path / folder / pairs).write_text(merges)
    text = Text.load(tmp_path / "ours")
    theirs = transformers.GPT2Tokenizer.from_pretrained(tmp_path / "theirs")
    for line in [*LINES, *corpus()]:
        ids = text.encode(line).ids
        assert ids == theirs(line)["input_ids"]
        assert ids == trained.encode(line).ids
        assert text.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_byte_pairs_lose_nothing() -> None:
    text = Text.train_bpe(corpus(), size=400)
    for line in LINES[:-2]:
        assert text.decode(text.encode(line).ids) == line


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


PIECES = {
    "▁": -3.0, "▁the": -2.0, "▁cat": -4.0, "s": -3.5, "at": -3.6, "▁s": -3.8, "t": -4.2, "h": -5.0,
    "e": -4.1, "a": -4.5, "c": -5.5, "▁ca": -5.1, "m": -5.2, "▁m": -4.9, "o": -4.4, "n": -4.6,
    "on": -4.0, "▁on": -3.9, "the": -6.0, ".": -3.0, "ts": -5.8,
}  # fmt: skip


def spiece(kind: int = 1) -> bytes:
    special = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2)]
    pieces = [*special, *((piece, score, 1) for piece, score in PIECES.items())]
    raw = b"".join(
        field(1, field(1, piece.encode()) + field(2, score) + field(3, kind_of_piece))
        for piece, score, kind_of_piece in pieces
    )
    return raw + field(2, field(3, kind)) + field(3, field(3, 1) + field(4, 1))


def best(text: str) -> float:
    """The score of the best way to cut a text into pieces: all ways are tried."""
    if not text:
        return 0.0
    cuts = [
        PIECES[text[:n]] + best(text[n:]) for n in range(1, len(text) + 1) if text[:n] in PIECES
    ]
    return max(cuts, default=-1e9)


def test_sentencepiece_cuts_as_the_best_of_all_ways(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(spiece())
    text = Text.load(tmp_path)
    assert len(text) == 3 + len(PIECES) + 100
    assert text.id("<extra_id_0>") == len(text) - 1
    words = ["the", "cats", "sat", "on", "a", "mat.", "than"]
    for line in itertools.permutations(words, 3):
        found = text.encode(" ".join(line))
        assert found.tokens[-1] == "</s>"
        pieces = found.tokens[:-1]
        whole = "▁" + "▁".join(line)
        assert "".join(pieces) == whole
        assert sum(PIECES[piece] for piece in pieces) == pytest.approx(best(whole))
        assert text.decode(found.ids) == " ".join(line)
    assert text.encode("  the   cat ").ids == text.encode("the cat").ids
    assert text.encode("the xyz").ids.count(text.id("<unk>")) == 1


def marian(folder: Path) -> dict[str, int]:
    """Marian's files: the pieces of the source, and ids that the target's pieces have too."""
    tokens = ["</s>", "<unk>", *PIECES, "▁chat", "▁tapis", "é", ">>fra<<", ">>deu<<", "<pad>"]
    ids = {token: index for index, token in enumerate(tokens)}
    (folder / "source.spm").write_bytes(spiece())
    (folder / "vocab.json").write_text(json.dumps(ids))
    return ids


def test_marian_reads_pieces_of_the_source_and_writes_those_of_the_target(tmp_path: Path) -> None:
    ids = marian(tmp_path)
    text = Text.load(tmp_path)
    assert len(text) == len(ids)
    found = text.encode(">>fra<< the cat chats.")
    # "▁chat" is a piece too, but not of the source.
    expected = [">>fra<<", "▁the", "▁cat", "▁", "c", "h", "at", "s", ".", "</s>"]
    assert found.tokens == expected
    assert found.ids == [ids[token] for token in expected]
    assert text.decode([ids["▁chat"], ids["s"], ids["▁tapis"], ids["."], 0]) == "chats tapis."
    text.save(tmp_path / "again")
    again = Text.load(tmp_path / "again")
    assert again.encode("the cats on é").ids == text.encode("the cats on é").ids


@pytest.mark.parametrize("ids", [{"</s>": 0, "<unk>": 2}, {"</s>": 0, "<unk>": "1"}, {"</s>": 0}])
def test_marian_ids_that_are_not_in_order_are_refused(tmp_path: Path, ids) -> None:
    marian(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    with pytest.raises(CheckpointError, match=r"vocab\.json"):
        Text.load(tmp_path)


def test_sentencepiece_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(spiece(kind=3))
    with pytest.raises(CheckpointError, match="words or characters"):
        Text.load(tmp_path)


MERGED = ["th", "▁the", "he", "▁t", "at", "▁c", "cat", "▁cat", "in", "ing", "▁s", "ed", "▁th"]
SINGLE = list("▁thecaindgsmo.")


def pairs_model() -> bytes:
    """A SentencePiece model of byte pairs: scores fall with the order, and there are all bytes."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(piece, -float(rank), 1) for rank, piece in enumerate([*MERGED, *SINGLE])]
    raw = b"".join(
        field(1, field(1, piece.encode()) + field(2, score) + field(3, kind))
        for piece, score, kind in pieces
    )
    return raw + field(2, field(3, 2)) + field(3, field(3, 1) + field(4, 0))


def merge(line: str) -> list[str]:
    """The definition: merge the leftmost pair that makes the best piece, until none makes one."""
    parts = list("▁" + line.replace(" ", "▁"))
    while True:
        made = [
            (MERGED.index(a + b), at)
            for at, (a, b) in enumerate(itertools.pairwise(parts))
            if a + b in MERGED
        ]
        if not made:
            break
        _, at = min(made)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    return [
        token
        for part in parts
        for token in (
            [part]
            if part in MERGED or part in SINGLE
            else [f"<0x{byte:02X}>" for byte in part.encode()]
        )
    ]


def test_sentencepiece_of_byte_pairs_merges_as_defined(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(pairs_model())
    text = Text.load(tmp_path)
    assert len(text) == 3 + 256 + len(MERGED) + len(SINGLE)
    words = ["the", "cats", "sat", "thing", "heated", "dinged", "Ünï", "日本", "👩", "ma.t"]
    for line in (" ".join(some) for some in itertools.permutations(words, 2)):
        for spaced in (line, f"  {line.replace(' ', '   ')} "):
            found = text.encode(spaced)
            assert found.tokens == [*merge(spaced), "</s>"]
            assert text.decode(found.ids) == spaced


@pytest.mark.parametrize("train", [Text.train_bpe, Text.train_wordpiece, Text.train_unigram])
def test_trained_tokenizers_have_their_size_and_go_round(tmp_path: Path, train) -> None:
    text = train(corpus(), size=300)
    assert 200 < len(text) <= 300
    line = "Seeing likeness unlooked."
    found = text.encode(line)
    assert text.decode(found.ids).lower().replace(" ", "") == line.lower().replace(" ", "")
    start, end = found.offsets[found.texts.index(0)]
    assert start == 0
    assert "seeing".startswith(line[start:end].lower())
    text.save(tmp_path)
    again = Text.load(tmp_path)
    assert [e.ids for e in again.encode_all(corpus())] == [e.ids for e in text.encode_all(corpus())]
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    assert theirs(line)["input_ids"] == found.ids


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    text = Text.train_bpe(corpus(), size=300)
    with pytest.raises(InputError, match="no token"):
        text.id("nowhere")
    with pytest.raises(InputError, match="Ids are from 0"):
        text.decode([10**6])
    with pytest.raises(InputError, match="surrogate"):
        text.encode("\ud800")
    with pytest.raises(InputError, match="str"):
        text.encode(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="from 257"):
        Text.train_bpe(corpus(), size=10)
    with pytest.raises(InputError, match="special tokens"):
        Text.train_unigram(corpus(), size=100, end="<end>")
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Text.load(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\na\n")
    with pytest.raises(CheckpointError, match="twice"):
        Text.load(tmp_path)


def files(folder: Path) -> dict[str, bytes]:
    """One good file of each kind, small."""
    Text.train_wordpiece(corpus(), size=60).save(folder / "w")
    Text.train_unigram(corpus(), size=60).save(folder / "u")
    return {
        "w": (folder / "w" / "tokenizer.json").read_bytes(),
        "u": (folder / "u" / "tokenizer.json").read_bytes(),
        "s": spiece(),
    }


def mutated(raw: bytes, rng: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed))
        kind = rng.randrange(4)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            del changed[at : at + rng.randrange(1, 30)]
        elif kind == 2:
            changed[at:at] = rng.choice(
                [b"[", b"{", b"null", b"-1", b"9" * 30, b'"', b"\xff", b","]
            )
        else:
            del changed[at:]
        if not changed:
            return b""
    return bytes(changed)


def test_broken_tokenizers_raise_our_errors_only(tmp_path: Path) -> None:
    good = files(tmp_path)
    refused = 0
    for seed in range(600):
        rng = random.Random(seed)
        kind = rng.choice("wus")
        folder = tmp_path / f"{seed}"
        folder.mkdir()
        name = "spiece.model" if kind == "s" else "tokenizer.json"
        (folder / name).write_bytes(mutated(good[kind], rng))
        try:
            Text.load(folder)
        except RegardError:
            refused += 1
    assert refused > 300
