"""From a recipe to what it names: sides, tags, vocabularies, questions that have no answer."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from helpers.training_data import recipe_of, sentences, write_data
from regard.data import encoding, sources
from regard.data.encoding import repeat_unanswered
from regard.data.readers import thousandth
from regard.data.records import RECORDS, Answer, Pair, Question, Report
from regard.errors import InputError
from regard.models.bert import Bert, BertConfig
from regard.text.tokenizer import Tokenizer
from regard.training import building, tokenizing
from regard.training.recipe import parse_recipe
from regard.training.run import train


def found(folder: Path, **source: object) -> list[object]:
    write_data(folder)
    raw = recipe_of(folder)
    raw["data"]["train"][0] |= source
    recipe = parse_recipe(raw)
    return list(sources.records(recipe.data, recipe.data.train, RECORDS[recipe.task], Report()))


def test_pairs_are_turned_round_after_they_are_parted(tmp_path: Path) -> None:
    plain = found(tmp_path, part=[0, 500])
    turned = found(tmp_path, part=[0, 500], reverse=True, prefix=">>eng<< ")
    assert 0 < len(plain) < 120
    assert turned == [Pair(f">>eng<< {pair.targets[0]}", (pair.source,)) for pair in plain]
    assert all(thousandth(pair.source) < 500 for pair in plain)


def test_text_can_be_the_sources_of_pairs(tmp_path: Path) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path, "span corruption", "t5")
    raw["data"]["train"] = [{"format": "tsv", "files": ["train.tsv"]}]
    recipe = parse_recipe(raw)
    assert list(
        sources.records(recipe.data, recipe.data.train, RECORDS[recipe.task], Report())
    ) == sentences(120)


def test_tags_are_tokens_of_their_own(tmp_path: Path) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path)
    raw["tokenizer"]["special"] = [">>fra<<"]
    raw["data"]["train"][0]["prefix"] = ">>fra<< "
    recipe = parse_recipe(raw)
    text = tokenizing.tokenizer(recipe, tmp_path / "tokenizer")
    table, _ = encoding.table(recipe.data, "train", recipe.task, text, recipe.tokenizer)
    starts = table["source"].starts[:-1]
    assert (table["source"].flat[starts] == text.id(">>fra<<")).all()
    assert not (table["target"].flat == text.id(">>fra<<")).any()


def test_pairs_are_repeated_as_often_as_their_source_says(tmp_path: Path) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path)
    [source] = raw["data"]["train"]
    raw["data"]["train"] = [
        source | {"part": [0, 500]},
        source | {"part": [500, 1000], "times": 3},
    ]
    raw["tokenizer"] |= {"dropout": 0.1, "variants": 2}
    recipe = parse_recipe(raw)
    text = tokenizing.tokenizer(recipe, tmp_path / "tokenizer")
    table, _ = encoding.table(recipe.data, "train", recipe.task, text, recipe.tokenizer)
    assert table.facts["read"] == 120
    rows = table["source"].flat.split(table["source"].lengths.tolist())
    plain = Counter(text.decode(row.tolist()) for row in rows[: len(rows) // 2])
    expected = Counter[str]()
    for line in sentences(120):
        expected[line] += 1 if thousandth(line) < 500 else 3
    assert plain == expected
    assert len(rows) == 2 * sum(expected.values())


def test_only_pairs_are_repeated(tmp_path: Path) -> None:
    raw = recipe_of(tmp_path, "span corruption", "t5")
    raw["data"]["train"] = [{"format": "text", "files": ["a.txt"], "times": 2}]
    with pytest.raises(InputError, match="times"):
        parse_recipe(raw)


@pytest.fixture
def bert(tmp_path: Path) -> Path:
    """A checkpoint with more words in its vocabulary than the training text has."""
    other = [f"{one}{two}" for one in ("over", "under", "out") for two in ("look", "go", "come")]
    text = Tokenizer.train_wordpiece([*sentences(120), *other * 9], size=200)
    model = Bert(BertConfig(vocabulary=len(text), dim=8, depth=1, heads=2, inner=16, length=64))
    folder = tmp_path / "bert"
    model.save(folder)
    text.save(folder)
    return folder


def test_a_pruned_bert_knows_what_the_whole_one_knew(tmp_path: Path, bert: Path) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path, "question answering", "bert")
    raw["model"] = {"kind": "bert", "start": str(bert)}
    raw["tokenizer"] = {"keep": 74}
    recipe = parse_recipe(raw)
    whole, text = Tokenizer.load(bert), tokenizing.tokenizer(recipe, tmp_path / "tokenizer")
    assert len(text) == 74 < len(whole)
    assert whole.tokenizer.token_to_id("overlook") is not None
    assert text.tokenizer.token_to_id("overlook") is None
    assert text.decode(text.encode("overlook").ids) == "overlook"  # in pieces
    sentence = "the red bird sings now"
    before, after = whole.encode(sentence), text.encode(sentence)
    assert before.tokens == after.tokens
    model = building.model(recipe, text)
    first, second = building.load(bert).eval(), model.eval().encoder
    assert torch.equal(first.encoder(torch.tensor([before.ids])), second(torch.tensor([after.ids])))


def test_what_cannot_be_pruned_is_refused(bert: Path) -> None:
    with pytest.raises(InputError, match="whole number from"):
        Tokenizer.load(bert).pruned({}, 9)
    with pytest.raises(InputError, match="WordPiece"):
        Tokenizer.train_bpe(["a b"], size=300).pruned({}, 200)


def test_questions_are_asked_where_their_answer_is_not() -> None:
    asked = [
        Question(str(n), "who", f"context {n // 2} of {'Ada' if n < 8 else 'Alan'}", (answer,))
        for n, answer in enumerate([Answer("Ada", 13)] * 8 + [Answer("Alan", 13)] * 8)
    ]
    given = list(repeat_unanswered(asked, 0.5))
    added = [question for question in given if not question.answers]
    assert [question for question in given if question.answers] == asked
    assert added
    for question in added:
        own = asked[int(question.name)]
        assert question.context != own.context
        assert own.answers[0].text not in question.context
    assert list(repeat_unanswered(asked, 0.0)) == asked


def test_words_are_what_spaces_part_and_lines_have_an_end(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text(" a <unk> N b \n a a c \n", encoding="utf-8")
    raw = recipe_of(tmp_path, "language modelling", "gpt2")
    raw["tokenizer"] = {"kind": "words", "size": 64}
    recipe = parse_recipe(raw)
    text = tokenizing.tokenizer(recipe, tmp_path / "tokenizer")
    assert set(text.tokenizer.get_vocab()) == {"<|endoftext|>", "<unk>", "\n", "a", "b", "c", "N"}
    table, _ = encoding.table(recipe.data, "train", recipe.task, text, recipe.tokenizer)
    tokens = [text.tokenizer.id_to_token(int(one)) for one in table["text"].flat]
    assert tokens == ["a", "<unk>", "N", "b", "\n", "a", "a", "c", "\n"]
    assert text.encode("a d", special=False).ids == [text.id("a"), text.id("<unk>")]


@pytest.mark.parametrize(
    ("task", "kind", "other"),
    [
        ("language modelling", "gpt2", "transformer-xl"),
        ("language modelling", "transformer-xl", "gpt2"),
        ("translation", "transformer", "t5"),
    ],
)
def test_another_architecture_is_nothing_to_start_from(
    tmp_path: Path, task: str, kind: str, other: str
) -> None:
    write_data(tmp_path)
    theirs = parse_recipe(recipe_of(tmp_path, task, other), {"schedule.steps": 1})
    train(theirs)
    raw = recipe_of(tmp_path, task, kind)
    raw["model"] = {"kind": kind, "start": str(Path(theirs.output) / "model")}
    raw["output"] = str(tmp_path / "second")
    with pytest.raises(InputError, match=f"which {task} with {kind} cannot start from"):
        train(parse_recipe(raw))


def test_a_model_must_know_its_tokens(tmp_path: Path) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path, "language modelling", "gpt2")
    with pytest.raises(InputError, match=r"but the model has only 100\. Set tokenizer\.start"):
        train(parse_recipe(raw, {"model.config.vocabulary": 100}))
    with pytest.raises(InputError, match="rising whole numbers"):
        train(
            parse_recipe(
                recipe_of(tmp_path, "language modelling", "transformer-xl"),
                {"model.config.cutoffs": 5},
            )
        )


def test_tags_that_a_tokenizer_does_not_have_are_not_ignored(tmp_path: Path) -> None:
    write_data(tmp_path)
    first = parse_recipe(recipe_of(tmp_path), {"schedule.steps": 1})
    train(first)
    raw = recipe_of(tmp_path)
    raw["tokenizer"] = {"start": str(Path(first.output) / "model"), "special": [">>fra<<"]}
    raw["output"] = str(tmp_path / "second")
    with pytest.raises(InputError, match=r"has no token '>>fra<<' \(tokenizer\.special\)"):
        train(parse_recipe(raw))


def test_a_text_is_set_with_its_spaces(tmp_path: Path) -> None:
    raw = recipe_of(tmp_path, "summarization", "t5")
    assert parse_recipe(raw, ["data.train.0.prefix=say: "]).data.train[0].prefix == "say: "


def test_how_bleu_parts_words_is_checked_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"evaluation\.tokenize .*13a"):
        parse_recipe(recipe_of(tmp_path), {"evaluation.tokenize": "foo"})


def test_texts_longer_than_a_model_reads_are_refused_by_their_key(tmp_path: Path) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path, "language modelling", "gpt2")
    with pytest.raises(InputError, match=r"reads at most 8 tokens, but data\.length is"):
        train(parse_recipe(raw, {"model.config.length": 8}))
