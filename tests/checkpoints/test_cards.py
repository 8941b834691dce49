"""Cards and what they promise: of models that are shipped, and of how they are read."""

import json
from pathlib import Path

import pytest

from regard.checkpoints import cards
from regard.errors import CheckpointError, InputError
from regard.evaluation.measuring import SCORES_OF_TASK

CARD = """---
name: small
task: language modelling
architecture: GPT-2
languages: en
licence: CC0-1.0
parameters: 1234
data: one book (public domain)
trained_on: CPU, 1 minute, seed 0
recipe: recipes/small.toml
commit: abc1234
---
# small

A model.
"""
FIGURE = {
    "metric": "perplexity",
    "value": 8.5,
    "tolerance": 0.1,
    "data": [{"format": "text", "files": ["a.txt"]}],
    "settings": {"data.length": 8},
}


def written(folder: Path, text: str, name: str = cards.CARD) -> Path:
    file = folder / name
    file.write_text(text, encoding="utf-8")
    return file


def test_a_card_is_read(tmp_path):
    card = cards.read_card(written(tmp_path, CARD))
    assert (card.name, card.licence, card.parameters) == ("small", "CC0-1.0", 1234)
    assert card.trained_on == "CPU, 1 minute, seed 0"
    assert card.text == "# small\n\nA model.\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("licence: CC0-1.0\n", "", "licence"),
        ("commit:", "committed:", "commit"),
        ("1234", "many", "'many'"),
        ("---\nname", "name", "should have the keys"),
    ],
)
def test_a_card_that_lacks_something_is_refused(tmp_path, old, new, message):
    with pytest.raises(CheckpointError, match=message):
        cards.read_card(written(tmp_path, CARD.replace(old, new, 1)))


def test_front_matter_of_other_cards_is_read_as_far_as_it_is_simple():
    facts, text = cards.front_matter(
        "---\nlicense: apache-2.0\nlanguage:\n- en\n- 'fr'\nmodel-index:\n- name: x\n  results:\n"
        "  - task: y\ntags: []\n---\nHello."
    )
    assert facts["license"] == "apache-2.0"
    assert facts["language"] == "en, fr"
    assert text == "Hello."


@pytest.mark.parametrize("text", ["", "Hello.\n---\na: b\n---\n", "---\na: b\n"])
def test_without_front_matter_all_is_text(text):
    assert cards.front_matter(text) == ({}, text)


def test_scores_are_read(tmp_path):
    [score] = cards.read_scores(written(tmp_path, json.dumps([FIGURE]), cards.SCORES))
    assert score.value == 8.5
    assert score.data[0]["files"] == ["a.txt"]


@pytest.mark.parametrize(
    "rows",
    [
        FIGURE,
        ["x"],
        [{**FIGURE, "more": 1}],
        [{key: FIGURE[key] for key in FIGURE if key != "value"}],
        [{**FIGURE, "value": "8.5"}],
        [{**FIGURE, "value": True}],
        [{**FIGURE, "data": ["a.txt"]}],
        [{**FIGURE, "settings": []}],
    ],
)
def test_scores_of_another_form_are_refused(tmp_path, rows):
    with pytest.raises(CheckpointError):
        cards.read_scores(written(tmp_path, json.dumps(rows), cards.SCORES))


def test_an_unknown_name_is_an_error_that_names_those_known():
    with pytest.raises(InputError, match="There is no shipped model 'nothing'"):
        cards.folder("nothing")


def test_what_is_shipped_is_whole():
    """Each has its card, named as its folder is, and scores that this architecture can have."""
    metrics = {name for names in SCORES_OF_TASK.values() for name in names}
    for name in cards.names():
        card = cards.card(name)
        assert card.name == name
        scores = cards.scores(name)
        assert scores, f"{name} has no scores"
        assert {score.metric for score in scores} <= metrics
        for file in ("tokenizer.json", "model.safetensors"):
            assert (cards.folder(name) / file).is_file(), f"{name} has no {file}"
