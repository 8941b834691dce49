"""Strings that a translation keeps, and the language of a text."""

from __future__ import annotations

import pytest

from regard.text.copied import copied_spans, invented_numbers, missing, only_copied
from regard.text.languages import language_name, language_of


@pytest.mark.parametrize(
    ("text", "strings"),
    [
        ("In 2024, 30 people came at 14:30.", ["2024", "30", "14:30"]),
        ("Call 06 12 34 56 78 or (555) 123-4567 now", ["06 12 34 56 78", "(555) 123-4567"]),
        ("à 7 h 52, puis à 18h05", ["7 h 52", "18h05"]),
        ("He paid $1,234.56.", ["1,234.56"]),
        ("on 2026-03-12 or 12/03/2026", ["2026-03-12", "12/03/2026"]),
        ("Write to a.b+c@d.co.uk.", ["a.b+c@d.co.uk"]),
        ("See https://a.org/x?b=1#c. Then www.b.de", ["https://a.org/x?b=1#c", "www.b.de"]),
        ("Run `git status` and click <b>Save</b>", ["`git status`", "<b>", "</b>"]),
        ("{name} has %d of %1$s, ${HOME}", ["{name}", "%d", "%1$s", "${HOME}"]),
        (
            "Open /etc/hosts, C:\\a\\b.txt and notes.txt",
            ["/etc/hosts", "C:\\a\\b.txt", "notes.txt"],
        ),
        ("Pass --force to set_value in KL1234", ["--force", "set_value", "KL1234"]),
        ("@maria likes #python, not C#", ["@maria", "#python"]),
        ("Great 🎉👍🏽! ❤️", ["🎉👍🏽", "❤️"]),
        ("Mr. Tanaka (田中) says Привет, мир!", ["田中", "Привет, мир"]),
        ("from 221B Baker Street to 12 Mill Lane", ["221B Baker Street", "12 Mill Lane"]),
        ("au 12 rue Haute le lundi", ["12 rue Haute"]),
        ("3 bis, avenue des Champs-Élysées", ["3 bis, avenue des Champs-Élysées"]),
        ("5 place d'Italie, 12 rue de la Paix", ["5 place d'Italie", "12 rue de la Paix"]),
        ("Gartenweg 5 und Hauptstr. 12a", ["Gartenweg 5", "Hauptstr. 12a"]),
        ("in 5 Minuten zum Bahnhofsplatz", ["5"]),
        ("a street, 3 rues et une place", ["3"]),
        ("he/she and/or his well-known e-mail", []),
        ("L'été à Łódź", []),
    ],
)
def test_strings_to_copy(text: str, strings: list[str]) -> None:
    assert [text[start:end] for start, end in copied_spans(text)] == strings


def test_a_number_may_have_other_separators_and_no_other_digits() -> None:
    assert missing("1,250 men at 14:30", "1 250 hommes à 14 h 30") == []
    assert missing("1250 men", "1.250 Mann") == []
    assert missing("à 7 h 52", "at 7:52") == []
    assert missing("à 7 h 52", "at 7. 52") == ["7 h 52"]
    assert missing("(555) 123-4567", "(555) 123-4567") == []
    assert missing("12.50 euros", "1250 euros") == ["12.50"]
    assert missing("06 12 34", "06 12 3") == ["06 12 34"]
    assert missing("5 and 5", "5") == ["5"]
    assert missing("5 and 15", "15 et 15") == ["5"]
    assert missing("<b>a</b>", "<b>a<b>") == ["</b>"]
    assert invented_numbers("2 men", "23 hommes, 2 chiens") == ["23"]


def test_what_has_no_words_is_only_copied() -> None:
    assert only_copied("12:30 — https://a.org 🎉 Привет!")
    assert not only_copied("12 May")
    assert only_copied(" ")


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("The train that leaves at noon is not on time.", "en"),
        ("Où est la gare, et quand part le train ?", "fr"),
        ("Der Zug, der mittags fährt, ist nicht pünktlich.", "de"),
        ("El tren que sale por la mañana no llega muy tarde.", "es"),
        ("Paris 2024", None),
        ("Bonjour", None),
        ("", None),
    ],
)
def test_the_language_of_a_text(text: str, language: str | None) -> None:
    assert language_of(text) == language


def test_a_language_without_a_name_is_itself() -> None:
    assert [language_name(code) for code in ("fra", "en", "tlh")] == ["French", "English", "tlh"]
