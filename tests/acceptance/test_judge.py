"""The judge of the acceptance set fails a result that breaks a rule, for each rule."""

from __future__ import annotations

import pytest

from acceptance.judge import (
    HERE,
    TASKS,
    Count,
    judge_answer,
    judge_summary,
    judge_translation,
    rows,
)
from regard.errors import InputError
from regard.tasks.records import Record

BUS = {
    "text": "The bus 12 leaves at 1,250 m, write to bob@example.com.",
    "copy": ["12", ["1,250", "1 250"], "bob@example.com"],
    "fr": "bus|autobus part|quitt",
}


@pytest.mark.parametrize(
    ("output", "broken"),
    [
        ("Le bus 12 part à 1\u202f250 m, écrivez à bob@example.com.", []),
        ("L'autobus 12 quitte à 1,250 m : bob@example.com.", []),
        ("Le bus 12 part à 1250 m, écrivez à bob@example.com.", ["lost '1,250'"]),
        ("Le bus 12 part à 1 250 m, écrivez à bb@ample.com.", ["lost 'bob@example.com'"]),
        ("Le bus 112 part à 1 250 m : bob@example.com.", ["lost '12'", "invented 112"]),
        ("Le train 12 part à 1 250 m : bob@example.com.", ["without bus|autobus"]),
        ("Le bus 12 part à 1 250 m : bob@example.com. 2026", ["invented 2026"]),
        (
            "Le bus 12 part à 1 250 m : bob@example.com. Il est là, il est là, il est là.",
            ["repeats 'il est là'"],
        ),
        ("Le bus 12 part part part à 1 250 m : bob@example.com.", ["repeats 'part part part'"]),
        ("Der Bus 12 part ab und ist bei 1 250 m : bob@example.com.", ["in the language de"]),
        ("Le bus 12 part à\n1 250 m : bob@example.com.", ["other tabs or line breaks"]),
        ("Le bus 12 part à 1 250 m : bob@example.com. " + "abc" * 60, ["too long"]),
    ],
)
def test_a_translation_fails_by_the_rule_that_it_breaks(output, broken):
    assert judge_translation(BUS, "fr", output) == broken


def test_capitals_and_words_inside_words():
    row = {"text": "TEA IS HOT.", "de": "*heiß TEE", "capitals": True}
    assert judge_translation(row, "de", "TEE IST SIEDENDHEISS.") == ["without *heiß"]
    assert judge_translation(row, "de", "Tee ist siedendheiß.") == ["not in capitals"]
    assert judge_translation(row, "de", "STEED IST heiß.".upper()) == [
        "without *heiß",
        "without TEE",
    ]


def test_equal_strings_must_be_copied_as_often():
    row = {"text": "7 and 7", "copy": ["7", "7"]}
    assert judge_translation(row, "fr", "7 et 7") == []
    assert judge_translation(row, "fr", "7 et") == ["lost '7'"]


DOCUMENT = {
    "text": "The bridge in Arden closes on Tuesday, because 2 pillars have cracks. Cars must use "
    "the motorway. The city expects that the work lasts until autumn.",
    "en": "bridge clos|shut",
}


@pytest.mark.parametrize(
    ("output", "broken"),
    [
        ("The bridge in Arden closes on Tuesday.", []),
        ("Bridge closed Tuesday", ["only 3 words"]),
        (
            "Tuesday Engineers for a new bridge.",
            ["without clos|shut", "invented the name Engineers"],
        ),
        ("The bridge in Arden closes for 3 days.", ["invented 3"]),
        (
            "Bridge simulation package for closed cars in Arden.",
            ["invented simulation package"],
        ),
        ("The bridge in Arden is closed now, people say.", []),
        ("The bridge in London is to close.", ["invented the name London"]),
        (DOCUMENT["text"], ["too long"]),
        ("a bridge closed, a bridge closed, a bridge closed", ["repeats 'a bridge closed'"]),
    ],
)
def test_a_summary_fails_by_the_rule_that_it_breaks(output, broken):
    assert judge_summary(DOCUMENT, output) == broken


KNOWN = {"question": "Who?", "context": "Ada wrote it. Bob read it.", "answers": ["Ada"]}


@pytest.mark.parametrize(
    ("row", "output", "broken"),
    [
        (KNOWN, "Ada", []),
        (KNOWN, "", ["no answer"]),
        (KNOWN, "Bob", ["not Ada"]),
        (KNOWN, "Ada wrote it. Bob", ["not Ada"]),
        (KNOWN, "ada", ["not in the context"]),
        (KNOWN | {"answers": []}, "", []),
        (KNOWN | {"answers": []}, "Bob", ["answered 'Bob', but there is no answer"]),
    ],
)
def test_an_answer_fails_by_the_rule_that_it_breaks(row, output, broken):
    assert judge_answer(row, output) == broken


def test_what_is_counted():
    count = Count()
    for text, broken, confidence in (
        ("12", ["without bus"], 0.2),
        ("12, 1,250, bob@example.com", [], 0.9),
        ("12, 1,250, bob@example.com", [], 0.1),
    ):
        record = Record(
            text=text, score=0.0, tokens=1, seconds=0.0, model="m", confidence=confidence,
            reasons=(),
        )  # fmt: skip
        count.add(BUS, record, broken)
    count.refuse(BUS, InputError("The text is in Latin."))
    assert count.cells() == ("2 of 4", "7 of 12", "1 of 1", "1 of 2")
    assert len(count.failures) == 2


@pytest.mark.parametrize("task", TASKS)
def test_each_task_has_sixty_inputs_with_rules_that_an_empty_output_breaks(task):
    name, _, judge = TASKS[task]
    inputs = list(rows(HERE, name))
    assert len(inputs) == 60
    known = {"text", "copy", "fr", "de", "en", "capitals", "numbers"}
    known |= {"question", "context", "answers"}

    for row in inputs:
        assert row.keys() <= known
        assert bool(judge(row, "")) == (row.get("answers") != []), row
        for answer in row.get("answers", []):
            assert answer.casefold() in row["context"].casefold()
