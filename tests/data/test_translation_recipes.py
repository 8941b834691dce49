"""The training text of the translation recipes: what is left out, and what is made to be copied."""

from __future__ import annotations

import hashlib
import json
import lzma
import sys
from collections import Counter
from pathlib import Path
from random import Random

import pytest

RECIPES = Path(__file__).parents[2] / "recipes"
sys.path.insert(0, str(RECIPES))

import back_translation  # noqa: E402
import copied_spans  # noqa: E402
import dictionary_pairs  # noqa: E402
import monolingual_text  # noqa: E402
import translation_confidence  # noqa: E402
import translation_data  # noqa: E402
import translation_tokenizer  # noqa: E402

from regard import Tokenizer  # noqa: E402
from regard.models.bundle import open_bundle  # noqa: E402


def write(file: Path, pairs: list[tuple[str, str]]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(lzma.compress("".join("\t".join(pair) + "\n" for pair in pairs).encode()))


def tatoeba_sentence(held_out: bool) -> str:
    """A made-up sentence that Tatoeba's split puts into a test part, or does not."""
    for number in range(1000):
        sentence = f"The cat number {number} sleeps."
        part = int(hashlib.md5(sentence.encode()).hexdigest(), 16) % 1000
        if (part < 40) == held_out:
            return sentence
    raise AssertionError


@pytest.fixture
def data(tmp_path: Path) -> Path:
    root = tmp_path / "data"
    hidden, shown = tatoeba_sentence(True), tatoeba_sentence(False)
    number = "".join(filter(str.isdigit, shown))
    for language, file in translation_data.TATOEBA.items():
        write(root / file, [(hidden, "Le chat."), (shown, f"Le chat numéro {number} dort.")])
        write(
            root / f"mt/europarl-mpde/en-{language}.tsv.xz",
            [
                ("This one is in a test set", "Une phrase de la série de test."),
                ("Another one, of which the other side is there!", "Une phrase CONNUE, enfin!"),
                (hidden.upper(), "Le chat dort quelque part."),
                ("We agreed on 10,000 euros here.", "Nous avons convenu de 10 000 euros ici."),
                ("We agreed on 25 July as the date.", "Nous avons convenu du 26 juillet ici."),
            ],
        )
        write(
            root / f"mt/test/flores101-devtest/en-{language}.tsv.xz",
            [
                ("This one is in a test set.", "Ceci."),
                ("Something else.", "Une phrase connue, enfin!"),
            ],
        )
        write(root / translation_data.VALID.format(language=language), [("Held  out.", "Gardé.")])
    return root


def test_nothing_held_out_is_trained_on(data: Path, tmp_path: Path) -> None:
    report = translation_data.prepare(data, tmp_path / "out")
    other, everyday = (
        (tmp_path / f"out/{kind}.en-fr.tsv").read_text(encoding="utf-8").splitlines()
        for kind in ("train", "everyday")
    )
    lines = other + everyday
    shown = tatoeba_sentence(False)
    agreed = "We agreed on 10,000 euros here.\tNous avons convenu de 10,000 euros ici."
    assert other.count(agreed) == 1
    assert agreed not in everyday
    assert shown in {line.split("\t")[0] for line in everyday}
    known = {line.split("\t")[0] for line in lines}
    bare = {translation_data.bare(sentence) for sentence in known}
    for sentence in ("This one is in a test set.", tatoeba_sentence(True), "Held out."):
        assert translation_data.bare(sentence) not in bare
    assert not any("CONNUE" in line for line in lines)
    counts = json.loads((tmp_path / "out/counts.json").read_text(encoding="utf-8"))
    assert counts == json.loads(json.dumps(report))
    debates = counts["fr"]["sources"]["mt/europarl-mpde/en-fr.tsv.xz"]
    assert debates == {"read": 5, "held out": 3, "numbers differ": 1, "kept": 1}
    assert (tmp_path / "out/valid.en-fr.tsv").read_text(encoding="utf-8") == "Held out.\tGardé.\n"


def test_the_same_seed_gives_the_same_pairs() -> None:
    pairs = [(f"Sentence {word}.", f"Phrase {word}.") for word in "abcdefghijklmnopqrstuvwxyz" * 9]
    kinds = {"everyday": pairs, "debates": pairs}
    one, two, three = (
        translation_data.additional_pairs(kinds, "fr", Random(seed)) for seed in (0, 0, 1)
    )
    assert one == two
    assert one != three
    assert {len(made) > 0 for name, made in one.items() if name != "substituted"} == {True}


@pytest.mark.parametrize(
    ("english", "french", "reason"),
    [
        ("The house is red.", "La maison est rouge.", None),
        ("The house is red.", "", "an empty side"),
        ("The house is red.", "La maison est rouge. " * 30, "too long"),
        ("Yes.", "Oui, je suis tout à fait de votre avis.", "lengths differ"),
        ("LibreOffice 7.4", "LibreOffice 7.4", "not translated"),
        ("a = b + 1 # 2 3 4", "a = c + 1 # 2 3 4", "few letters"),
        ("See {{macro}} for it.", "Voir {{macro}} pour cela.", "noise"),
        ("He is called Иван there.", "Il s'appelle Иван là-bas.", "another script"),
        (
            "It is not what we said to you.",
            "This is what they would have said to you.",
            "another language",
        ),
        ("Click <b>here</b> now.", "Cliquez ici maintenant.", "markup differs"),
        ("Open %s now, please.", "Ouvrez %d maintenant.", "markup differs"),
        ("Open it (now), please.", "Ouvrez-le, s'il vous plaît.", "brackets differ"),
        ("Is the house over there red?", "La maison de là-bas est rouge.", "ends differ"),
    ],
)
def test_why_a_pair_is_left_out(english: str, french: str, reason: str | None) -> None:
    assert translation_data.why_rejected((english, french), "fr") == reason


def test_text_is_cleaned() -> None:
    clean = translation_data.clean
    assert clean(" It\u2019s\u00a0a&nbsp;\ttest:  &lt;b&gt; e\u0301 ") == "It's a test: <b> é"
    assert clean("~Save snake_case", interface=True) == "Save snake_case"


@pytest.mark.parametrize(
    ("english", "french", "kept"),
    [
        ("He paid 1,234.50 in 2024.", "Il a payé 1 234,50 en 2024.", "1,234.50 en 2024"),
        ("At 3 we left.", "À trois heures, nous sommes partis.", "À trois heures"),
        ("In 1999 we left.", "Nous sommes partis.", None),
        ("We left.", "Nous sommes partis à 17 heures.", None),
    ],
)
def test_numbers_must_agree(english: str, french: str, kept: str | None) -> None:
    pair = translation_data.with_same_numbers((english, french))
    if kept is None:
        assert pair is None
    else:
        assert pair is not None
        assert pair[0] == english
        assert kept in pair[1]


def test_spans_are_copied_to_both_sides() -> None:
    random = Random(0)
    for template in copied_spans.TEMPLATES:
        assert len(template) == 3, template
        slots = [sorted(copied_spans._SLOT.findall(side)) for side in template]
        assert slots[0] == slots[1] == slots[2], template
    for language in ("fr", "de"):
        for _ in range(500):
            english, other = copied_spans.from_template(random, language)
            for mail in copied_spans._ADDRESS.findall(english):
                assert mail in other
    english, other = copied_spans.span_alone(random)
    assert english == other


def test_a_shared_span_is_replaced_on_both_sides() -> None:
    random, common = Random(0), frozenset({"it"})
    pair = ("It has 4821 pages.", "Cela a 4821 pages.")
    english, other = copied_spans.substituted(pair, random, common) or pair
    number = english.removeprefix("It has ").removesuffix(" pages.")
    assert other == f"Cela a {number} pages."
    assert number.isdigit()
    assert number != "4821"
    pair = ("We met Boston there.", "Nous y avons vu Boston.")
    english, other = copied_spans.substituted(pair, random, common) or pair
    name = english.removeprefix("We met ").removesuffix(" there.")
    assert other == f"Nous y avons vu {name}."
    assert name != "Boston"
    assert copied_spans.substituted(("It is so.", "C'est ainsi."), random, common) is None


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("tokenizer")
    lines = ["The cat sat on the mat.", "Le chat s'est assis sur le tapis."] * 300
    translation_tokenizer.train(lines, 400, min_occurrences=10).save(str(folder / "tokenizer.json"))
    return Tokenizer.load(folder)


@pytest.mark.parametrize(
    "line",
    [
        "The cat sat on the mat.",
        "  two  spaces\tand\na line\r\n",
        "Привет 日本語 مرحبا 👋🏽 e\u0301 \u200d \x00 ▁ <0x0A>",
        "I LIKE 1,234.56 TEA at bob@example.com",
        "",
    ],
)
def test_every_text_comes_back(text: Tokenizer, line: str) -> None:
    assert text.decode(text.encode(line).ids) == line


def test_digits_and_bytes_are_tokens_and_tags_are_single(text: Tokenizer) -> None:
    assert len(text) <= 400
    assert all(text.tokenizer.token_to_id(byte) is not None for byte in translation_tokenizer.BYTES)
    assert text.encode("1234").tokens == [f"<0x{ord(digit):02X}>" for digit in "1234"]
    assert text.encode(">>fra<< cat").tokens == [">>fra<<", " cat"]
    assert text.decode(text.encode(">>fra<< cat").ids) == " cat"
    assert text.encode("The cat sat").tokens == ["The", " cat", " sat"]


# ---------------------------------------------------------------------------------- confidence


def judged(score: float, surprise: float, acceptable: bool | None) -> translation_confidence.Judged:
    return translation_confidence.Judged(
        "test", "eng", "fra", "A", "B", score, surprise, acceptable
    )


def test_a_fit_finds_the_sign_that_tells_failures(capsys: pytest.CaptureFixture[str]) -> None:
    random = Random(0)
    rows = [judged(-random.random(), 0.0, True) for _ in range(60)]
    rows += [judged(-random.random(), 9.0 + random.random(), False) for _ in range(20)]
    rows += [judged(-99.0, 99.0, None)] * 5  # without a verdict
    found = translation_confidence.fit(rows)
    first, alone, both = capsys.readouterr().out.splitlines()
    assert first == "80 judged, 60 acceptable"
    assert "below 0.5: 0 of 20 failures, 0 of 60 others" in alone
    assert "area under the curve 1.00; 100% of failures where 10% are doubted" in both
    assert "below 0.5: 20 of 20 failures, 0 of 60 others" in both
    assert found["reversed"]["surprise"] < -1


def test_the_calibration_that_is_shipped_is_the_fit() -> None:
    rows = translation_confidence.read(RECIPES / "judged-translations.jsonl")
    assert (
        translation_confidence.fit(rows)
        == (open_bundle("translate").tasks["translation"]["confidence"])
    )


def test_a_verdict_goes_when_the_translation_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [
        translation_confidence.Judged("test", "eng", "fra", "Where is the station?"),
        translation_confidence.Judged(
            "test", "eng", "deu", "The dog sleeps.", "Die Katze.", -1, 0, True
        ),
    ]
    file = tmp_path / "judged.jsonl"
    translation_confidence.store(file, rows)
    translation_confidence.main(["translate", str(file)])
    told = capsys.readouterr().out.splitlines()
    assert told[0].startswith("1: Where is the station? => O")
    assert told[1].startswith("2: The dog sleeps. => Der Hund")
    translation_confidence.main(["translate", str(file), "--failed", "2"])
    translation_confidence.main(["translate", str(file)])
    assert capsys.readouterr().out == ""
    first, second = translation_confidence.read(file)
    assert (first.acceptable, second.acceptable) == (True, False)
    assert first.score < 0 <= first.surprise


# --------------------------------------------------------------------- monolingual text, words


def test_sentences_come_from_every_kind_of_file(tmp_path: Path) -> None:
    data, known, foreign = tmp_path, "This sentence is in a test set.", "C'est une phrase de trop."
    tokenized = f"The bird ( Aquila ) , people 's guess is , often eats fish . {foreign}"
    texts = {
        "mono/common-voice/en/talk.txt": f"{known}\nWe walked to the old harbour.\nShort.\nno\n",
        "mono/common-voice/en/cities.txt": "The city of London is very large.\n",
        "lm/books/train-00.txt.xz": "It was a cold\nand windy night. Oh.\n\nNobody saw him go.",
        "qa/qed-train/train.jsonl.xz": json.dumps({"context": tokenized}),
    }
    for name, text in texts.items():
        file = data / name
        file.parent.mkdir(parents=True, exist_ok=True)
        packed = lzma.compress(text.encode()) if file.suffix == ".xz" else text.encode()
        file.write_bytes(packed)
    held_out = {translation_data.bare(known)}
    found = monolingual_text.collected(data, "en", held_out, Random(0))
    assert sorted(found) == [
        "It was a cold and windy night.",
        "Nobody saw him go.",
        "The bird (Aquila), people's guess is, often eats fish.",
        "We walked to the old harbour.",
    ]


def test_paragraphs_of_a_novel_in_tei_are_read(tmp_path: Path) -> None:
    file = tmp_path / "novel.xml"
    file.write_text("<TEI><p>Header.</p><text><p>Ein <hi>alter</hi>\nMann.</p></text></TEI>")
    assert list(monolingual_text.paragraphs(file)) == ["Ein alter\nMann."]


DICTIONARY = [
    "fox {n} (cunning person) :: Schlaukopf {m}",
    "fox {n} (Vulpes) :: [male] Fuchs {m}, Füchsin {f}",
    "fox {n} (a kind of terrier) SEE: fox terrier ::",
    "fox {n} (fur) :: Fuchs {m}",
    "the {article} :: der",
    "house {n} (building) :: Haus {n}",
    "to {prep} :: zu",
    "gloomy {adj} (dark) :: düster",
    "bark {v} (of a dog) :: bellen",
]


def test_rare_words_get_the_translation_of_most_senses() -> None:
    english = Counter({"fox": 20, "house": 151, "gloomy": 3, "bark": 5})
    german = Counter({"fuchs": 30, "schlaukopf": 20, "haus": 900, "düster": 4, "bellen": 9})
    found = list(dictionary_pairs.pairs(DICTIONARY, english, german, "de", Random(0)))
    assert [pair for pair in found if len(pair[0].split()) == 1] == [
        ("fox", "Fuchs"), ("gloomy", "düster"),
    ]  # fmt: skip
    assert ("It is gloomy.", "Es ist düster.") in found
    assert ("to bark", "bellen") in found
    assert len([pair for pair in found if "the fox" in pair[0].lower()]) == 3
    assert not any("house" in english or "Füchsin" in other for english, other in found)


@pytest.mark.parametrize(
    ("word", "gender", "language", "with_it"),
    [
        ("Katze", "f", "de", "mit der Katze"),
        ("Haus", "n", "de", "mit dem Haus"),
        ("renard", "m", "fr", "avec le renard"),
        ("abeille", "f", "fr", "avec l'abeille"),
    ],
)
def test_nouns_have_their_articles(word: str, gender: str, language: str, with_it: str) -> None:
    noun = dictionary_pairs.Noun(word, gender)
    assert ("with the thing", with_it) in dictionary_pairs.noun_pairs("thing", noun, language)


def test_the_french_dictionary_is_read_from_its_other_format() -> None:
    text = (
        "fox\nrenard\n\t[b][c darkblue]fox[/c][/b] [p]<n>[/p] [c gray]/x/[/c] (Vulpes)\n"
        "\t[m1]renard [p]<m>[/p], goupil [p]<m>[/p] \\[archaic\\][/m]\n"
    )
    entry = ("fox", "n", [("renard", "m"), ("goupil", "m")])
    assert list(dictionary_pairs.entries(dictionary_pairs.read_dsl(text))) == [entry]


def test_sentences_are_translated_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, out = tmp_path / "mono.fr.txt", tmp_path / "back.tsv"
    file.write_text("Je ne sais pas.\nEncore une phrase.\nJ'ai acheté trois livres.\n")
    asked = [str(file), str(out), "--from", "fr", "--to", "en", "--part", "0", "2"]
    monkeypatch.setattr(sys, "argv", ["back_translation.py", "translate", *asked])
    back_translation.main()
    pairs = [line.split("\t") for line in out.read_text().splitlines()]
    assert [target for _, target in pairs] == ["Je ne sais pas.", "J'ai acheté trois livres."]
    assert "books" in pairs[1][0]
