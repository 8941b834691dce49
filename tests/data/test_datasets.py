"""Hugging Face datasets as a source: each task's columns, splits, and what is wrong with them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from helpers.training_data import recipe_of, sentences, write_data
from regard.data import encoding, sources
from regard.data.records import RECORDS, Answer, Pair, Question, Record, Report
from regard.errors import InputError
from regard.training import tokenizing
from regard.training.recipe import parse_recipe
from regard.training.run import train


@pytest.fixture(autouse=True)
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library keeps its copies in the test's folder, and asks nobody."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    datasets.disable_progress_bars()


def found(folder: Path, task: str, kind: str, **source: Any) -> tuple[list[Record], Report]:
    raw = recipe_of(folder, task, kind)
    raw["data"]["train"] = [{"format": "dataset", **source}]
    recipe, report = parse_recipe(raw), Report()
    return list(
        sources.records(recipe.data, recipe.data.train, RECORDS[recipe.task], report)
    ), report


def translations() -> datasets.Dataset:
    rows = [{"en": "a cat", "fr": "un chat"}, {"en": "a dog", "fr": None}, {"en": "a", "fr": "un"}]
    return datasets.Dataset.from_list([{"translation": row} for row in rows])


SIDES = ["translation.en", "translation.fr"]
PAIRS = [Pair("a cat", ("un chat",)), Pair("a", ("un",))]


def test_pairs_from_a_saved_folder_and_bad_rows_are_reported(tmp_path: Path) -> None:
    translations().save_to_disk(tmp_path / "one")
    pairs, report = found(tmp_path, "translation", "transformer", dataset="one", fields=SIDES)
    assert pairs == PAIRS
    assert report.bad == [("one", 2, "a source or target that is not text")]
    assert report.read == 2


def test_a_split_of_a_saved_folder(tmp_path: Path) -> None:
    both = datasets.DatasetDict({"train": translations(), "validation": translations().select([2])})
    both.save_to_disk(tmp_path / "two")
    source: dict[str, Any] = {"dataset": "two", "fields": SIDES}
    assert found(tmp_path, "translation", "transformer", **source)[0] == PAIRS
    pairs, _ = found(tmp_path, "translation", "transformer", **source, split="validation")
    assert pairs == PAIRS[1:]
    with pytest.raises(InputError, match="no split 'test'; it has train, validation"):
        found(tmp_path, "translation", "transformer", **source, split="test")


@pytest.mark.parametrize("form", ["parquet", "json", "csv"])
def test_files_that_the_library_reads(tmp_path: Path, form: str) -> None:
    table = datasets.Dataset.from_dict({"source": ["one", "two"], "target": ["un", "deux"]})
    getattr(table, f"to_{form}")(tmp_path / f"a.{form}")
    pairs, _ = found(tmp_path, "translation", "transformer", files=[f"a.{form}"])
    assert pairs == [Pair("one", ("un",)), Pair("two", ("deux",))]


def test_several_targets_are_one_pair(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"source": [["One.", "Two."]], "target": [["a", "b"]]})
    table.save_to_disk(tmp_path / "many")
    pairs, _ = found(tmp_path, "summarization", "t5", dataset="many")
    assert pairs == [Pair("One. Two.", ("a", "b"))]


def test_questions_as_squad_has_them(tmp_path: Path) -> None:
    answers = [{"text": ["cat"], "answer_start": [4]}, {"text": [], "answer_start": []}]
    table = datasets.Dataset.from_dict(
        {
            "question": ["who?", "why?"],
            "context": ["the cat sat", "the cat sat"],
            "answers": answers,
        }
    )
    table.save_to_disk(tmp_path / "squad")
    questions, report = found(tmp_path, "question answering", "bert", dataset="squad")
    assert questions == [
        Question("1", "who?", "the cat sat", (Answer("cat", 4),)),
        Question("2", "why?", "the cat sat", ()),
    ]
    assert not report.bad


def test_lines_of_text(tmp_path: Path) -> None:
    table = datasets.Dataset.from_dict({"body": ["one\ntwo", None, "three"], "label": [0, 1, 2]})
    table.save_to_disk(tmp_path / "text")
    lines, report = found(tmp_path, "language modelling", "gpt2", dataset="text", fields=["body"])
    assert lines == ["one", "two", "three"]
    assert report.bad == [("text", 2, "no text in body")]


@pytest.mark.slow
def test_a_model_is_trained_from_datasets_and_other_data_have_another_cache(tmp_path: Path) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path)
    texts = sentences(60)
    for count in (60, 40):
        folder = tmp_path / f"of{count}"
        datasets.Dataset.from_dict(
            {"source": texts[:count], "target": [text.upper() for text in texts[:count]]}
        ).save_to_disk(folder)
        raw["data"]["train"] = [{"format": "dataset", "dataset": str(folder)}]
        raw["output"] = str(tmp_path / f"run{count}")
        recipe = parse_recipe(raw, {"schedule.steps": 3})
        assert train(recipe).finished
        text = tokenizing.tokenizer(recipe, tmp_path / f"run{count}" / "tokenizer")
        assert (
            len(encoding.table(recipe.data, "train", recipe.task, text, recipe.tokenizer)[0])
            == count
        )


@pytest.mark.parametrize(
    ("source", "wrong"),
    [
        ({"dataset": "one", "fields": ["en", "fr"]}, "no column 'en'. Set fields to some"),
        (
            {"dataset": "one", "fields": ["translation"]},
            "fields of one need 2 .* got .'translation'",
        ),
        ({"dataset": "one", "split": "train[:1]"}, "no split 'train.:1.'; it has train"),
        ({"dataset": "nobody/nothing"}, "not a folder below .* and the hub cannot be reached"),
        ({"files": ["bad.parquet"]}, "bad.parquet cannot be read"),
        ({"files": ["none.parquet"]}, "none.parquet cannot be read"),
        ({"files": ["a.parquet", "b.csv"]}, "one format, .* got .*a.parquet, .*b.csv"),
        ({}, "either files or a dataset"),
        ({"files": ["a.csv"], "dataset": "one"}, "either files or a dataset"),
    ],
)
def test_what_is_wrong_is_said(tmp_path: Path, source: dict[str, Any], wrong: str) -> None:
    translations().save_to_disk(tmp_path / "one")
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    with pytest.raises(InputError, match=wrong):
        found(tmp_path, "translation", "transformer", **source)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(InputError, match=r"pip install 'regard\[datasets\]'"):
        found(tmp_path, "translation", "transformer", dataset="one")


@pytest.mark.processes
def test_training_does_not_import_it() -> None:
    code = "import sys, regard.training; assert 'datasets' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
