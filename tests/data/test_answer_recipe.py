"""The training questions of the recipe for answers: what is left out, and what has no answer."""

from __future__ import annotations

import json
import lzma
import sys
from pathlib import Path
from random import Random
from typing import Any

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

import answer_data  # noqa: E402
from answer_data import Asked, Entities, Question, with_answer_removed, with_opposite  # noqa: E402

from regard.data.readers import read_questions  # noqa: E402
from regard.data.records import Report  # noqa: E402

CONTEXT = (
    "The bridge at Brunn was opened in 1912 by Clara Weiss. It has three arches and is 80 metres "
    "long. The oldest arch was built by Otto Lang from local stone."
)


def question(text: str, answer: str, context: str = CONTEXT, title: str = "Brunn") -> Question:
    return Question("q", text, context, ((answer, context.index(answer)),), "wiki", title)


def test_the_answer_is_taken_out_with_its_sentence() -> None:
    left = with_answer_removed(question("Who opened the bridge?", "Clara Weiss"))
    assert left is not None
    assert "Clara" not in left
    assert "three arches" in left
    assert with_answer_removed(question("What?", "sat", "The cat sat.")) is None


def test_an_entity_becomes_another_one_of_its_kind() -> None:
    asked = question("What did Clara Weiss open in 1912?", "The bridge at Brunn")
    entities = Entities([asked])
    made = [entities.changed(asked, Random(seed)) for seed in range(20)]
    assert any(made)
    for changed in filter(None, made):
        assert changed != asked.question
        assert ("Clara Weiss" in changed) != ("1912" in changed)
        if "1912" in changed:
            assert "Otto Lang" in changed


def test_a_renamed_question_keeps_its_answer() -> None:
    other = question("Where?", "Tromso", "In the evening we saw Tromso again.")
    asked = question("How long is the bridge at Brunn that Clara Weiss opened?", "80 metres")
    renamed = [Entities([asked, other]).renamed(asked, Random(seed)) for seed in range(30)]
    made = [each for each in renamed if each is not None]
    assert made
    for each in made:
        (text, start), *_ = each.answers
        assert each.context[start : start + len(text)] == text == "80 metres"
        assert each.question != asked.question


def test_words_are_turned_into_their_opposites() -> None:
    changed = {
        with_opposite(question("Who built the oldest arch?", "Otto Lang"), Random(seed))
        for seed in range(20)
    }
    assert "Who built the youngest arch?" in changed
    assert with_opposite(question("Why not?", "local stone"), Random(0)) is None
    assert with_opposite(question("Where is it?", "Brunn"), Random(0)) in (
        "Where isn't it?",
        "Where is not it?",
        "Where is never it?",
    )


def test_something_else_is_asked_for() -> None:
    asked = question("How many arches does the bridge have?", "three")
    asks = Asked([asked, question("How many towers does the town have?", "two", "It has two.")])
    found = {asks.changed(asked, Random(seed)) for seed in range(20)}
    assert found - {None} == {"How many towers does the bridge have?"}


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """One article in each file, with a context that SQuAD's development set shares."""
    shared = "This very long sentence is in the development set. "
    towns = ["Brunn", "Obertal", "Lauf", "Egg", "Horn", "Stein", "Wald", "Linz"]

    def rows(name: str) -> list[dict[str, Any]]:
        found = []
        for number, town in enumerate(towns):
            told = CONTEXT.replace("Brunn", town).replace(".", f" ({town}, {name}).")
            context = f"{told} {town} has {number + 30} houses in {name}."
            if town == "Linz":
                context = shared.upper() + context
            for asked, text in (
                (f"Who opened the bridge at {town} in 1912?", "Clara Weiss"),
                (f"How many arches does the bridge at {town} have?", "three"),
                ("Who built the oldest arch?", "Otto Lang"),
            ):
                answers = [{"text": text, "start": context.index(text)}]
                key = f"{town} {len(found)}"
                row = {"id": key, "question": asked, "context": context, "answers": answers}
                found.append(row | {"title": town})
        return found

    root = tmp_path / "data"
    for name in (*answer_data.TRAIN, answer_data.SQUAD, *answer_data.VALID):
        file = root / f"qa/{name}.jsonl.xz"
        file.parent.mkdir(parents=True, exist_ok=True)
        found = rows(name)
        if name == answer_data.SQUAD:
            for row in found[:6]:
                row["title"] = answer_data.HELD_BACK_ARTICLES[0]
        with lzma.open(file, "wt") as out:
            out.writelines(json.dumps(row) + "\n" for row in found)
    file = root / "qa" / answer_data.TEST
    file.parent.mkdir(parents=True)
    squad = {"data": [{"paragraphs": [{"context": shared + "Another one.", "qas": []}]}]}
    file.write_bytes(lzma.compress(json.dumps(squad).encode()))
    return root


def test_nothing_of_the_development_set_is_trained_on(data: Path, tmp_path: Path) -> None:
    counts = answer_data.prepare(data, tmp_path / "out")
    parts = {
        name: list(read_questions([tmp_path / f"out/{name}.jsonl.xz"], Report()))
        for name in ("train", "squad", "valid", "held-back")
    }
    assert counts["files"] == {name: len(rows) for name, rows in parts.items()}
    assert all(count["shared"] == 3 for name, count in counts.items() if "/" in name)
    contexts = {name: {row.context for row in rows} for name, rows in parts.items()}
    assert not any("DEVELOPMENT SET" in text for texts in contexts.values() for text in texts)
    assert contexts["squad"].isdisjoint(contexts["valid"])
    assert all(row.answers for row in (*parts["valid"], *parts["squad"]))
    assert not any(row.answers for row in parts["held-back"])
    unanswered = [row for row in parts["train"] if not row.answers]
    assert len(unanswered) == sum(counts["kinds"].values())
    assert all(counts["kinds"][kind] for kind in ("removed", "entity", "words"))
    again = answer_data.prepare(data, tmp_path / "again")
    assert again == counts
    for name in parts:
        files = [tmp_path / place / f"{name}.jsonl.xz" for place in ("out", "again")]
        assert files[0].read_bytes() == files[1].read_bytes()
