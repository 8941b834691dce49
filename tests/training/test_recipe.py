"""Recipes refuse what they do not know; metrics agree with figures known from elsewhere."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from regard.data.schema import OLD_KEYS, rename_old_keys
from regard.errors import InputError
from regard.evaluation.metrics import answered, bleu, chrf, rouge
from regard.training.recipe import Recipe, describe, parse_recipe, read_recipe

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def least() -> dict[str, Any]:
    return {
        "task": "translation",
        "output": "run",
        "model": {"kind": "transformer"},
        "data": {"train": [{"format": "tsv", "files": ["a.tsv"]}]},
        "schedule": {"steps": 5},
    }


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_shipped_recipes_are_read(file: Path) -> None:
    recipe = read_recipe(file)
    assert recipe.data.root == str(file.parent)
    assert read_recipe(file, ["data.root=/else"]).data.root == "/else"


def test_there_are_recipes() -> None:
    assert len(RECIPES) >= 2


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("batch.token=5", "There is no key batch.token. Did you mean batch.tokens?"),
        ("bacth.tokens=5", "There is no key bacth. Did you mean batch?"),
        ("zzz=5", "There is no key zzz. There are task, output"),
        ("data.train.0.formt=x", "There is no key data.train.0.formt. Did you mean data.train.0.f"),
        ("data.train.0.format=tvs", "There is no data.train.0.format = 'tvs'. Did you mean tsv?"),
        ("task=translate", "There is no task = 'translate'. Did you mean translation?"),
        ("model.kind=gpt2", "translation is for transformer or t5, not for gpt2"),
        ("schedule.steps=0", "schedule.steps should be at least 1, but got 0."),
        ("schedule.steps=1.5", "schedule.steps should be a whole number, but got 1.5."),
        ("schedule.steps=true", "schedule.steps should be a whole number, but got True."),
        ("data.max_bad_share=2", "data.max_bad_share should be at most 1, but got 2.0."),
        ("model.start=3", "model.start should be a text, but got 3."),
        ("data.train=5", "data.train should be a list, but got 5."),
        ("batch=5", "batch should be a table, but got 5."),
        ("data.prepare=['lowercas']", "Did you mean lowercase?"),
        ("saving.average=9", "only the last 3 checkpoints are kept"),
        ("saving.average=3", "but 5 steps make 0 checkpoints"),
        ("data.train.0.format=text", "jsonl or dataset, not text"),
        ("data.train.0.columns=[0, 1]", "Columns are counted from 1"),
        ("data.train.0.part=[0]", "part of a data source need two"),
        ("saving.average=0", "give data.valid"),
        ("data.train.7.files=x", "there is no 7 in its path"),
        ("task.x=1", "task is not a table"),
        ("evaluation.length_penalty=1e30", "length_penalty should be at most 10, but got 1e+30."),
        (f"seed={'[' * 100_000}", "nested too deeply"),
        (f"{'a.' * 100_000}a=1", "nested too deeply"),
        ("task", "A key is set as key=value, but got 'task'."),
    ],
)
def test_what_a_recipe_cannot_mean_is_refused(assignment: str, message: str) -> None:
    with pytest.raises(InputError, match=re.escape(message)):
        parse_recipe(least(), [assignment])


def test_keys_are_set_from_the_command_line() -> None:
    recipe = parse_recipe(
        least(),
        ["schedule.rate=1", "data.train.0.files=['b', 'c']", "output=some where", "seed = 3"],
    )
    assert recipe.schedule.rate == 1.0
    assert isinstance(recipe.schedule.rate, float)
    assert recipe.data.train[0].files == ("b", "c")
    assert recipe.output == "some where"
    assert recipe.seed == 3
    assert parse_recipe(least(), {"optimizer.clip": 2.0}).optimizer.clip == 2


@pytest.mark.parametrize(("old", "new"), OLD_KEYS.items())
def test_keys_are_read_by_their_earlier_names(old: str, new: str) -> None:
    known = {name for name, _, _ in describe()}
    assert new in known or new.startswith("model.config.")
    assert old not in known
    assert old.rpartition(".")[0] == new.rpartition(".")[0]
    *path, last = old.split(".")

    def recipe(*names: str) -> dict[str, Any]:
        raw = table = least()
        for part in path:
            table = table.setdefault(part, {})
        table.update(dict.fromkeys(names, 0))
        return raw

    assert rename_old_keys(recipe(last)) == recipe(new.rpartition(".")[2])
    with pytest.raises(InputError, match=f"{re.escape(old)} is the earlier name of {new}"):
        parse_recipe(recipe(last, new.rpartition(".")[2]))


def test_keys_are_set_by_their_earlier_names() -> None:
    recipe = parse_recipe(least() | {"data": least()["data"] | {"bad": 0.5}}, ["evaluation.beam=3"])
    assert recipe.evaluation.num_beams == 3
    assert recipe.data.max_bad_share == 0.5
    assert parse_recipe(least(), {"optimizer": {"decay": 0.5}}).optimizer.weight_decay == 0.5


def test_what_is_needed_is_named_with_its_meaning() -> None:
    raw = least()
    del raw["schedule"]
    with pytest.raises(InputError, match="has no schedule, which is needed: the learning rate"):
        parse_recipe(raw)


def test_files_that_are_no_recipes(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="There is no recipe"):
        read_recipe(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("a = ")
    with pytest.raises(InputError, match=r"bad\.toml cannot be read as TOML"):
        read_recipe(tmp_path / "bad.toml")
    for deep in (f"a = {'[' * 100_000}", f"{'a.' * 2_000}a = 1", f"[{'a.' * 2_000}a]"):
        (tmp_path / "deep.toml").write_text(deep)
        with pytest.raises(InputError, match="nested too deeply"):
            read_recipe(tmp_path / "deep.toml")


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("optimizer.r_drop=5", "r_drop does nothing for language modelling with gpt2; it is"),
        (
            "optimizer.label_smoothing=0.1",
            "label_smoothing does nothing for language modelling with gpt2",
        ),
        (
            "data.memory_reset_every=4",
            "data.memory_reset_every does nothing for language modelling with gpt2; it is",
        ),
        ("optimizer.activation_regularization=1", "activation_regularization does nothing for"),
        ("data.context=256", "data.context = 256 leaves no tokens with a loss in pieces of 256"),
        ("data.unanswered=0.2", "it is for question answering. Leave it out."),
        ("evaluation.num_beams=4", "evaluation.num_beams does nothing"),
        ("evaluation.metric=bleu", "has no metric bleu (evaluation.metric); use loss."),
        ("evaluation.patience=2", "give data.valid"),
        ("evaluation.patience=-1", "should be at least 0, but got -1"),
        ("data.train.0.prefix=x", "prefix and reverse of a data source do nothing for language"),
        ("optimizer.ema=1.0", "optimizer.ema should be below 1, but got 1.0."),
        ("schedule.rate=nan", "schedule.rate should be a finite number, but got nan."),
        ("seed=99999999999999999999", "seed should be at most"),
    ],
)
def test_what_would_do_nothing_is_refused(assignment: str, message: str) -> None:
    raw = least() | {"task": "language modelling", "model": {"kind": "gpt2"}}
    with pytest.raises(InputError, match=re.escape(message)):
        parse_recipe(raw, ["data.train.0.format=text", assignment])


def test_a_context_is_for_language_models_without_memory_in_one_piece() -> None:
    context = ["data.train.0.format=text", "data.context=8"]
    with pytest.raises(InputError, match=r"data\.context does nothing for translation"):
        parse_recipe(least(), ["data.context=8"])
    raw = least() | {"task": "language modelling", "model": {"kind": "transformer-xl"}}
    with pytest.raises(InputError, match=r"data\.memory_reset_every needs a memory"):
        parse_recipe(raw, [*context, "data.memory_reset_every=2"])
    raw["model"] = {"kind": "gpt2"}
    with pytest.raises(InputError, match="not for parallel = 'context'"):
        parse_recipe(raw, [*context, "parallel=context"])


def test_locked_dropout_and_parts_of_a_sequence_exclude_each_other() -> None:
    raw = least() | {
        "task": "language modelling",
        "model": {"kind": "gpt2", "variational_dropout": True},
    }
    with pytest.raises(InputError, match="each process would use its own mask"):
        parse_recipe(raw, ["data.train.0.format=text", "parallel=context"])


def test_every_key_is_documented() -> None:
    rows = list(describe())
    names = [name for name, _, _ in rows]
    assert len(names) == len(set(names)) > 50
    assert "data.train[].format" in names
    assert all(doc.strip() and default for _, default, doc in rows)
    assert {name: default for name, default, _ in rows}["schedule.steps"] == "needed"


def test_a_recipe_can_be_made_in_python() -> None:
    assert isinstance(parse_recipe(least()), Recipe)


# ------------------------------------------------------------------------------------- metrics


def test_rouge_counts_by_hand() -> None:
    # 5 of 6 and 5 words; 3 of 5 and 4 pairs; "police the gunman" in order: 3.
    score = rouge(["police killed the gunman"], [["police kill the gunman"]])
    assert score.one == pytest.approx(75)
    assert score.two == pytest.approx(100 / 3)
    assert score.longest == pytest.approx(75)
    score = rouge(["the gunman kill police"], [["police kill the gunman"]])
    assert score.one == pytest.approx(100)
    assert score.longest == pytest.approx(50)
    assert rouge(["x"], [["y", "X!"]]) == (100, 0, 100)
    assert rouge([""], [["y"]]) == (0, 0, 0)


def test_answers_are_compared_as_squad_does() -> None:
    assert answered(["The cat."], [["cat"]]) == (100, 100)
    assert answered(["big cat"], [["a cat", "dog"]]).exact == 0
    assert answered(["big cat"], [["a cat", "dog"]]).f1 == pytest.approx(200 / 3)
    assert answered([""], [[]]) == (100, 100)
    assert answered(["cat"], [[]]) == (0, 0)
    assert answered([""], [["cat"]]) == (0, 0)
    assert answered(["cat cat"], [["cat"]]).f1 == pytest.approx(200 / 3)


@pytest.mark.parametrize(
    ("outputs", "references", "message"),
    [
        ([], [], "There are no outputs to score"),
        (["a"], [["a"], ["b"]], "got 1 outputs and 2 lists"),
        (["a", "b"], [["a"], []], "1 of 2 lists of references are empty"),
    ],
)
def test_outputs_need_references(
    outputs: list[str], references: list[list[str]], message: str
) -> None:
    for score in (rouge, bleu, answered):
        if score is answered and len(outputs) == len(references) > 0:
            continue  # a question without an answer has no references
        with pytest.raises(InputError, match=message):
            score(outputs, references)


words = st.lists(st.sampled_from(["a", "b", "c", "Dog", "."]), max_size=8).map(" ".join)


@given(words.filter(lambda text: re.search(r"\w", text) is not None))
def test_what_is_equal_is_perfect(text: str) -> None:
    assert rouge([text], [[text]]).one == pytest.approx(100)
    assert answered([text], [[text]]) == (100, 100)
    assert chrf([text], [[text]]) == pytest.approx(100)


@given(st.lists(st.tuples(words, words), min_size=1, max_size=4))
def test_scores_stay_within_their_range(pairs: list[tuple[str, str]]) -> None:
    outputs, targets = [one for one, _ in pairs], [[other] for _, other in pairs]
    for score in (*rouge(outputs, targets), *answered(outputs, targets), bleu(outputs, targets)):
        assert -1e-9 <= score <= 100 + 1e-9


def test_bleu_takes_the_nearest_of_several_references() -> None:
    output = ["the cat sat on the mat today"]
    assert bleu(output, [["a cat sat", "the cat sat on the mat today"]]) == pytest.approx(100)
    parted, glued = ["wait , and see what comes"], [["wait, and see what comes"]]
    assert bleu(parted, glued) == pytest.approx(100)
    assert bleu(parted, glued, tokenize="none") < 90
