"""Text: ids and offsets are those of transformers, or of the definition, and files go round."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel

from helpers import broken_files as broken
from helpers.model_folders import minilm
from helpers.sentencepiece_files import (
    PIECES,
    TARGET,
    Piece,
    field,
    marian,
    marian_of_two,
    model,
    unigrams,
)
from regard import CheckpointError, InputError, RegardError
from regard.text.tokenizer import Tokenizer

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


def test_a_real_tokenizer_is_that_of_transformers(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_bytes((minilm() / "vocab.txt").read_bytes())
    text, old = Tokenizer.load(minilm()), Tokenizer.load(tmp_path)
    assert len(text) == len(old) == 30522
    theirs = transformers.AutoTokenizer.from_pretrained(minilm())
    for line in [*LINES, *corpus()]:
        expected = theirs(line, return_offsets_mapping=True)
        found = text.encode(line)
        assert found.ids == expected["input_ids"]
        assert found.offsets == expected["offset_mapping"]
        assert found == old.encode(line)
        assert text.decode(found.ids) == theirs.decode(found.ids, skip_special_tokens=True)
    assert old.encode("a question", "a text") == text.encode("a question", "a text")


def test_pairs_say_where_each_token_comes_from() -> None:
    text = Tokenizer.load(minilm())
    question, passage = "Who sat?", "The cat sat on the mat."
    found = text.encode(question, passage)
    first = found.tokens.index("[SEP]") + 1
    assert found.token_types == [0] * first + [1] * (len(found.ids) - first)
    at = found.tokens.index("cat")
    start, end = found.offsets[at]
    assert found.texts[at] == 1
    assert passage[start:end] == "cat"
    assert found.texts[0] is None


def write_byte_pairs(
    text: Tokenizer, folder: Path, vocabulary: str = "vocab.json", merges: str = "merges.txt"
) -> Path:
    """The files of a trained tokenizer as GPT-2 has them."""
    model = json.loads(text.tokenizer.to_str())["model"]
    folder.mkdir(exist_ok=True)
    (folder / vocabulary).write_text(json.dumps(model["vocab"]))
    lines = "".join(f"{a} {b}\n" for a, b in model["merges"])
    (folder / merges).write_text("#version: 0.2\n" + lines)
    return folder


@pytest.mark.parametrize("names", [("vocab.json", "merges.txt"), ("encoder.json", "vocab.bpe")])
def test_byte_pairs_are_those_of_transformers(tmp_path: Path, names: tuple[str, str]) -> None:
    trained = Tokenizer.train_bpe(corpus(), size=400)
    text = Tokenizer.load(write_byte_pairs(trained, tmp_path / "ours", *names))
    folder = write_byte_pairs(trained, tmp_path / "theirs")
    theirs = transformers.GPT2Tokenizer.from_pretrained(folder)
    for line in [*LINES, *corpus()]:
        ids = text.encode(line).ids
        assert ids == theirs(line)["input_ids"]
        assert ids == trained.encode(line).ids
        assert text.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        assert text.decode(ids, special=True) == line


WORDS = "[PAD] [UNK] [CLS] [SEP] [MASK] cafe café uber über naive 中 文 中文 the ##s"


@pytest.mark.parametrize(
    ("kind", "options", "added"),
    [
        ("bert", {"strip_accents": False}, {}),
        ("bert", {"do_lower_case": False, "strip_accents": True}, {}),
        ("bert", {"tokenize_chinese_chars": False}, {}),
        (
            "bert",
            {"added_tokens_decoder": {"15": {"content": "<user>", "special": True}}},
            {"Bar": 15},  # counts where nothing newer is
        ),
        ("bert", {}, {"Bar": 15}),
        ("gpt2", {"add_prefix_space": True}, {}),
        ("gpt2", {}, {"<pad>": 400, "<user>": 401}),
        ("gpt2", {"added_tokens_decoder": {"400": {"content": "<pad>", "special": True}}}, {}),
    ],
)
def test_options_are_followed(
    tmp_path: Path, kind: str, options: dict[str, object], added: dict[str, int]
) -> None:
    if kind == "bert":
        reader = transformers.BertTokenizerFast
        (tmp_path / "vocab.txt").write_text(WORDS.replace(" ", "\n") + "\n")
    else:
        reader = transformers.GPT2TokenizerFast
        write_byte_pairs(Tokenizer.train_bpe(corpus(), size=400), tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(options))
    (tmp_path / "added_tokens.json").write_text(json.dumps(added))
    text = Tokenizer.load(tmp_path)
    theirs = reader.from_pretrained(tmp_path)
    for line in ("Über café 中文", "naïve cafes", "the<user>the bar Bar<pad>", "a<|endoftext|>b"):
        assert text.encode(line).ids == theirs(line)["input_ids"]
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "added_tokens.json").write_text('{"<far>": 9000}')
    with pytest.raises(CheckpointError, match="'<far>' should have the id 9000, but would have "):
        Tokenizer.load(tmp_path)


def cut(text: str, pieces: dict[str, float]) -> list[str]:
    """The best way to cut a text: all ways are tried."""
    ends = [n for n in range(1, len(text) + 1) if text[:n] in pieces]
    ways = [[text[:n], *cut(text[n:], pieces)] for n in ends]
    whole = [way for way in ways if "".join(way) == text]
    return max(whole, key=lambda way: sum(pieces[piece] for piece in way), default=[])


def test_sentencepiece_cuts_as_the_best_of_all_ways(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(model(unigrams()))
    text = Tokenizer.load(tmp_path)
    assert len(text) == 3 + len(PIECES) + 100
    assert text.id("<extra_id_0>") == len(text) - 1
    words = ["the", "cats", "sat", "on", "a", "mat.", "than"]
    for line in itertools.permutations(words, 3):
        found = text.encode(" ".join(line))
        assert found.tokens[-1] == "</s>"
        pieces = found.tokens[:-1]
        whole = "▁" + "▁".join(line)
        assert "".join(pieces) == whole
        score = sum(PIECES[piece] for piece in pieces)
        assert score == pytest.approx(sum(PIECES[piece] for piece in cut(whole, PIECES)))
        assert text.decode(found.ids) == " ".join(line)
    assert text.encode("  the   cat ").ids == text.encode("the cat").ids
    assert text.encode("the xyz").ids.count(text.id("<unk>")) == 1


def test_sentencepiece_has_as_many_sentinels_as_its_config_says(tmp_path: Path) -> None:
    (tmp_path / "spiece.model").write_bytes(model([*unigrams(), ("\n", 0.0, 4)]))
    usual = Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"extra_ids": 0}')
    text = Tokenizer.load(tmp_path)
    assert len(usual) - 100 == len(text) == len(unigrams()) + 1
    # What a user defined is part of the text.
    assert text.decode(text.encode("the\ncat").ids).split("\n") == ["the", " cat"]


def test_marian_reads_pieces_of_the_source_and_writes_those_of_the_target(tmp_path: Path) -> None:
    ids = marian(tmp_path)
    text = Tokenizer.load(tmp_path)
    assert len(text) == len(ids)
    found = text.encode(">>fra<< the cat chats.")
    # "▁chat" is a piece too, but not of the source.
    expected = [">>fra<<", "▁the", "▁cat", "▁", "c", "h", "at", "s", ".", "</s>"]
    assert found.tokens == expected
    assert found.ids == [ids[token] for token in expected]
    assert text.decode([ids["▁chat"], ids["s"], ids["▁tapis"], ids["."], 0]) == "chats tapis."
    text.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert again.encode("the cats on é").ids == text.encode("the cats on é").ids


@pytest.mark.parametrize("separate", [True, False])
def test_marian_cuts_each_language_by_its_own_model(tmp_path: Path, separate: bool) -> None:
    ids, target_ids = marian_of_two(tmp_path)
    if not separate:  # one file has the ids of both
        both = dict.fromkeys([*ids, *target_ids])
        ids = target_ids = {token: index for index, token in enumerate(both)}
        (tmp_path / "vocab.json").write_text(json.dumps(ids))
        (tmp_path / "target_vocab.json").unlink()
    text = Tokenizer.load(tmp_path)
    source = [*cut("▁the▁cats", PIECES), "</s>"]
    target = [*cut("▁le▁chats", TARGET), "</s>"]
    assert target == ["▁le", "▁ch", "at", "s", "</s>"]  # likelier than "▁chat", "s"
    assert text.encode("the cats").tokens == source
    assert text.encode("the cats").ids == [ids[token] for token in source]
    found = text.target.encode("le chats")
    assert found.tokens == target
    assert found.ids == [target_ids[token] for token in target]
    assert text.decode(found.ids) == "le chats"
    assert (len(text), len(text.target)) == (len(ids), len(target_ids))

    text.save(tmp_path / "again")
    again = Tokenizer.load(tmp_path / "again")
    assert again.encode("the cats").ids == text.encode("the cats").ids
    assert again.decode(found.ids) == "le chats"
    Tokenizer.train_bpe(corpus(), size=300).save(tmp_path / "again")
    assert len(Tokenizer.load(tmp_path / "again").target) == 300


@pytest.mark.parametrize("ids", [{"</s>": 0, "<unk>": 2}, {"</s>": 0, "<unk>": "1"}, {"</s>": 0}])
def test_marian_ids_that_are_not_in_order_are_refused(tmp_path: Path, ids) -> None:
    marian(tmp_path)
    (tmp_path / "vocab.json").write_text(json.dumps(ids))
    with pytest.raises(CheckpointError, match=r"vocab\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (model(unigrams(), kind=3), "words or characters"),
        (field(1, field(1, b"a") + field(2, b"abc")), "a score has 3 bytes"),
        (field(1, 5), "a field has the wrong type"),
        (field(2, field(3, b"1")), "a field has the wrong type"),
        (field(1, field(1, b"\xff")), "not UTF-8"),
        (field(1, b"abc")[:-1], "it ends within a field"),
        (b"\xff", "a number in it does not end"),
    ],
)
def test_broken_sentencepiece_is_refused(tmp_path: Path, raw: bytes, message: str) -> None:
    (tmp_path / "spiece.model").write_bytes(raw)
    with pytest.raises(CheckpointError, match=message):
        Tokenizer.load(tmp_path)


def test_a_template_that_names_no_token_is_our_error_when_it_is_used(tmp_path: Path) -> None:
    Tokenizer.train_unigram(corpus(), size=100).save(tmp_path)
    raw = json.loads((tmp_path / "tokenizer.json").read_text())
    raw["post_processor"]["special_tokens"] = {}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="no usable tokenizer"):
        Tokenizer.load(tmp_path).encode("seeing")


MERGED = ["th", "▁the", "he", "▁t", "at", "▁c", "cat", "▁cat", "in", "ing", "▁s", "ed", "▁th"]
SINGLE = list("▁thecaindgsmo.")


def pairs_model() -> bytes:
    """A SentencePiece model of byte pairs: scores fall with the order, and there are all bytes."""
    pieces: list[Piece] = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [(piece, -float(rank), 1) for rank, piece in enumerate([*MERGED, *SINGLE])]
    return model(pieces, 2, single=0)


def merge(line: str) -> Iterator[str]:
    """The definition: merge the leftmost pair that makes the best piece, until none makes one."""
    parts = list("▁" + line.replace(" ", "▁"))
    while made := [
        (MERGED.index(a + b), at)
        for at, (a, b) in enumerate(itertools.pairwise(parts))
        if a + b in MERGED
    ]:
        _, at = min(made)
        parts[at : at + 2] = [parts[at] + parts[at + 1]]
    for part in parts:
        known = part in MERGED or part in SINGLE
        yield from [part] if known else (f"<0x{byte:02X}>" for byte in part.encode())


def test_sentencepiece_of_byte_pairs_merges_as_defined(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(pairs_model())
    text = Tokenizer.load(tmp_path)
    assert len(text) == 3 + 256 + len(MERGED) + len(SINGLE)
    words = ["the", "cats", "sat", "thing", "heated", "dinged", "Ünï", "日本", "👩", "ma.t"]
    for line in (" ".join(some) for some in itertools.permutations(words, 2)):
        for spaced in (line, f"  {line.replace(' ', '   ')} "):
            found = text.encode(spaced)
            assert found.tokens == [*merge(spaced), "</s>"]
            assert text.decode(found.ids) == spaced


@pytest.mark.parametrize(
    ("kind", "train", "end", "pad"),
    [
        ("bert", Tokenizer.train_wordpiece, None, "[PAD]"),
        ("gpt2", Tokenizer.train_bpe, "<|endoftext|>", None),
        ("marian", Tokenizer.train_unigram, "</s>", "<pad>"),
        ("t5", Tokenizer.train_unigram, "</s>", "<pad>"),
    ],
)
def test_trained_tokenizers_have_their_size_and_go_round(
    tmp_path: Path, kind: str, train, end: str | None, pad: str | None
) -> None:
    text = train(corpus(), size=300)
    assert 200 < len(text) <= 300
    line = "Seeing likeness unlooked."
    found = text.encode(line)
    assert text.decode(found.ids).lower().replace(" ", "") == line.lower().replace(" ", "")
    start, stop = found.offsets[found.texts.index(0)]
    assert start == 0
    assert "seeing".startswith(line[start:stop].lower())
    text.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert [e.ids for e in again.encode_all(corpus())] == [e.ids for e in text.encode_all(corpus())]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for line in ("Seeing likeness unlooked.", "ﬁne ① text"):
        assert theirs(line)["input_ids"] == text.encode(line).ids
    assert (theirs.eos_token, theirs.pad_token) == (end, pad)
    if kind == "bert":
        assert set(theirs("a", "b")["token_type_ids"]) == {0, 1}


def test_ids_may_have_gaps() -> None:
    text = Tokenizer(FastTokenizer(WordLevel({"a": 0, "<unk>": 1, "b": 5}, unk_token="<unk>")))
    assert len(text) == 6
    assert text.decode(text.encode("b").ids) == "b"


def test_to_a_unigram_model_newlines_are_spaces() -> None:
    text = Tokenizer.train_unigram([f"{line}\n{line}" for line in corpus()], size=100)
    assert text.encode("Seeing\n\tthings. ").ids == text.encode("Seeing things.").ids
    assert not any("\n" in token for token in text.tokenizer.get_vocab())


def test_what_makes_no_sense_is_refused(tmp_path: Path) -> None:
    text = Tokenizer.train_bpe(corpus(), size=300)
    for message, make in (
        ("no token", lambda: text.id("nowhere")),
        ("Ids must be from 0", lambda: text.decode([10**6])),
        ("Ids must be whole numbers", lambda: text.decode(["a"])),
        ("Ids must be whole numbers", lambda: text.decode([1.5])),
        ("Ids must be whole numbers", lambda: text.decode(5)),
        ("surrogate .U.D800 to U.DFFF", lambda: text.encode("\ud800")),
        ("str", lambda: text.encode(3)),
        ("Give a list of texts", lambda: text.encode_all("abc")),
        ("Give a list of texts", lambda: text.encode_all(5)),
        ("Give a list of texts", lambda: Tokenizer.train_wordpiece("abc", size=300)),
        ("Give a list of texts", lambda: Tokenizer.train_wordpiece(5, size=300)),
        ("from 257", lambda: Tokenizer.train_bpe(corpus(), size=10)),
        ("to 16777216", lambda: Tokenizer.train_bpe(corpus(), size=10**12)),
        ("trained on this", lambda: Tokenizer.train_unigram(["abc def"] * 9, size=4)),
        ("special tokens", lambda: Tokenizer.train_unigram(corpus(), size=100, end="<end>")),
    ):
        with pytest.raises(InputError, match=message):
            make()
    with pytest.raises(CheckpointError, match="no tokenizer"):
        Tokenizer.load(tmp_path)
    (tmp_path / "vocab.txt").write_text("a\na\n")
    with pytest.raises(CheckpointError, match="twice"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("kind", ["single", "pair"])
def test_a_template_of_too_many_tokens_is_refused(tmp_path: Path, kind: str) -> None:
    raw = json.loads(Tokenizer.train_wordpiece(corpus(), size=100).tokenizer.to_str())
    template = raw["post_processor"]
    template[kind] += [{"SpecialToken": {"id": "[SEP]", "type_id": 0}}] * 10_000
    template["special_tokens"]["[SEP]"] |= {"ids": [3] * 10_000, "tokens": ["[SEP]"] * 10_000}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match=r"adds 100,0\d\d,001 special tokens to each text"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("templates", [1, 4])
def test_a_template_that_repeats_the_text_too_often_is_refused(
    tmp_path: Path, templates: int
) -> None:
    raw = json.loads(Tokenizer.train_wordpiece(corpus(), size=100).tokenizer.to_str())
    template = raw["post_processor"]
    template["single"] = [{"Sequence": {"id": "A", "type_id": 0}}] * round(
        10_000 ** (1 / templates)
    )
    raw["post_processor"] = {"type": "Sequence", "processors": [template] * templates}
    (tmp_path / "tokenizer.json").write_text(json.dumps(raw))
    with pytest.raises(CheckpointError, match="repeats each text 10,000 times"):
        Tokenizer.load(tmp_path)


def test_broken_tokenizers_raise_our_errors_only(tmp_path: Path) -> None:
    good = broken.tokenizers(tmp_path / "good")
    refused = 0
    for seed in range(600):
        name = broken.broken_tokenizer(good, tmp_path / f"{seed}", random.Random(seed))
        try:
            Tokenizer.load(tmp_path / f"{seed}").encode("the cat sat on a mat.")
        except RegardError:
            refused += 1
        except BaseException as error:
            raise AssertionError(f"seed {seed} ({name}) let out {error!r}") from error
    assert refused > 300
