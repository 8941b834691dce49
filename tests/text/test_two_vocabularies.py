"""A checkpoint with a vocabulary of each language: target text is cut and named by the target's."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from helpers.sentencepiece_files import PIECES, TARGET, marian_of_two
from helpers.sine_models import waves
from helpers.training_data import recipe_of
from regard import (
    InputError,
    Tokenizer,
    Transformer,
    TransformerConfig,
    explain_model,
    look,
    translate,
)
from regard.data import encoding
from regard.interpret.runs import prepare_run
from regard.interpret.word_alignment import align
from regard.models.bundle import open_bundle
from regard.models.conversion import convert
from regard.training import building, tokenizing
from regard.training.recipe import parse_recipe
from regard.training.run import train

ENGLISH, FRENCH = "the cats sat on the mat.", "le chats tapis."


class Made(NamedTuple):
    folder: Path
    text: Tokenizer
    model: Transformer
    source: str
    target: str
    ids: list[int]  # of the target


@pytest.fixture(params=["more to read", "more to write"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> Made:
    """A tiny model either way round: English has 24 tokens and French 16."""
    folder = tmp_path / "model"
    folder.mkdir()
    sides = [(PIECES, ENGLISH), (TARGET, FRENCH)]
    if request.param == "more to write":
        sides.reverse()
    (source, read), (target, written) = sides
    ids, target_ids = marian_of_two(folder, source, target)
    start = target_ids["<pad>"]
    model = waves(
        Transformer(
            TransformerConfig(
                vocabulary=len(ids), target_vocabulary=len(target_ids), tied=False, dim=16,
                depth=1, decoder_depth=2, heads=2, decoder_heads=2, inner=16, decoder_inner=16,
                pad_token=start, start_token=start, end_token=0,
            )
        ),
        torch.float32,
    )  # fmt: skip
    model.save(folder)
    generation = json.loads((folder / "generation_config.json").read_text())
    generation |= {"bad_words_ids": [[start]], "max_length": 8, "num_beams": 1}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    text = Tokenizer.load(folder)
    return Made(folder, text, model, read, written, text.target.encode(written).ids)


def words_of(text: str) -> list[str]:
    return text.replace(".", " .").split()


def test_a_given_target_is_read_and_named_by_its_own_vocabulary(made: Made) -> None:
    run = prepare_run(made.folder, made.source, target=made.target)
    assert list(run.target.ids) == made.ids
    assert [w.label for w in run.target.words if not w.special] == words_of(made.target)
    inside = next(layer for layer in run.layers if layer.name == "decoder.0")
    queries, _ = run.tokens_of(inside)
    assert queries.labels[0] == "<pad>"  # what it starts from
    assert list(queries.ids[1:]) == made.ids[:-1]


def test_what_the_model_writes_itself_is_named_by_the_target(made: Made) -> None:
    written = prepare_run(made.folder, made.source).target
    token = made.text.target.tokenizer.id_to_token
    assert [made.text.target.id(token(one)) for one in written.ids] == list(written.ids)
    special = {label for label, one in zip(written.labels, written.ids, strict=True) if one == 0}
    assert special <= {"</s>"}
    assert {w.label for w in written.words if w.special} <= {"</s>", "<pad>", "<unk>", "▁"}


def test_alignment_has_the_words_of_both_languages(made: Made) -> None:
    found = look(made.folder, made.source, target=made.target, alignment=True)
    assert list(found.source) == words_of(made.source)
    assert list(found.target) == words_of(made.target)
    same = align(made.model, made.text, made.text.encode(made.source).ids, made.ids)
    assert same.source == found.source
    torch.testing.assert_close(same.weights, found.weights)


def test_explain_follows_a_word_of_the_target(made: Made) -> None:
    word = words_of(made.target)[0]
    shown = explain_model(made.folder, made.source, layer="cross.0", word=word, target=made.target)
    number = made.text.target.id(f"▁{word}")
    said = f"{word} is number {number} of the vocabulary. The decoder predicts this token. Each row"
    assert said in " ".join(str(shown).split())
    assert "<unk>" not in str(shown)


def test_a_tokenizer_that_writes_more_than_the_model_is_refused(made: Made) -> None:
    sizes = {"target_vocabulary": 10, "pad_token": 1, "start_token": 1}
    small = Transformer(replace(made.model.config, **sizes))
    with pytest.raises(InputError, match="do not belong together"):
        prepare_run(small, made.source, tokenizer=made.text)


def test_all_that_is_written_is_decoded_and_what_must_not_be_is_silent(made: Made) -> None:
    one = open_bundle(made.folder)
    assert isinstance(one.model, Transformer)
    assert one.decode(made.ids) == made.target
    assert one.decode([*made.ids, 900]) == made.target
    silent = torch.isinf(one.model.output_bias[0]).nonzero().flatten().tolist()
    assert silent == [made.text.target.id("<pad>")]
    record = translate(made.source, model=made.folder)
    assert record.attended is None or record.attended.keys == tuple(words_of(made.source))
    assert record.text == made.text.target.decode(one.tokenizer.target.encode(record.text).ids)


def test_converting_takes_both_vocabularies_along(made: Made, tmp_path: Path) -> None:
    again = Tokenizer.load(convert(made.folder, tmp_path / "again", dtype=torch.float16))
    assert again.target.encode(made.target).ids == made.ids
    made.text.save(tmp_path / "saved")
    made.model.save(tmp_path / "saved")
    again = Tokenizer.load(convert(tmp_path / "saved", tmp_path / "once more"))
    assert again.target.encode(made.target).ids == made.ids


def recipe_from(made: Made, folder: Path) -> dict:
    for part in ("train", "valid"):
        (folder / f"{part}.tsv").write_text(f"{made.source}\t{made.target}\n" * 8)
    raw = recipe_of(folder)
    raw["model"] = {"kind": "transformer", "start": str(made.folder)}
    raw["tokenizer"] = {}
    raw["schedule"]["steps"] = 2
    return raw


def test_training_cuts_each_side_by_its_own(made: Made, tmp_path: Path) -> None:
    recipe = parse_recipe(recipe_from(made, tmp_path))
    text = tokenizing.tokenizer(recipe, tmp_path / "none")
    table, _ = encoding.table(recipe.data, "train", recipe.task, text, recipe.tokenizer)
    source_ids = made.text.encode(made.source).ids
    for column, ids in (("source", source_ids), ("target", made.ids)):
        first = slice(*table[column].starts[:2].tolist())
        assert table[column].flat[first].tolist() == ids
    # The same source with another way to write is another table.
    other = Tokenizer(made.text.tokenizer, made.text.tokenizer)
    changed, _ = encoding.table(recipe.data, "train", recipe.task, other, recipe.tokenizer)
    assert not torch.equal(changed["target"].flat, table["target"].flat)


def test_a_trained_model_keeps_both_vocabularies(made: Made, tmp_path: Path) -> None:
    result = train(parse_recipe(recipe_from(made, tmp_path)))
    text = Tokenizer.load(result.folder / "model")
    assert text.target.encode(made.target).ids == made.ids


def test_a_new_model_has_one_vocabulary(made: Made, tmp_path: Path) -> None:
    raw = recipe_from(made, tmp_path)
    raw["model"] = recipe_of(tmp_path)["model"]
    raw["tokenizer"] = {"start": str(made.folder)}
    recipe = parse_recipe(raw)
    with pytest.raises(InputError, match="a vocabulary for each language"):
        building.model(recipe, tokenizing.tokenizer(recipe, tmp_path / "none"))
