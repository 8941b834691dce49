"""Tasks: they say what the models say, of texts of any length, one or many."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from dataclasses import replace
from itertools import pairwise, permutations
from pathlib import Path
from random import Random
from typing import Any, cast

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch.nn.functional import cross_entropy

from helpers import model_folders as folders
from helpers.model_folders import edit
from regard import (
    GPT2,
    Beam,
    CheckpointError,
    Greedy,
    InputError,
    RegardError,
    Sample,
    Summary,
    Tokenizer,
    Transformer,
    TransformerConfig,
    WordAttention,
    answer,
    complete,
    generate,
    load,
    summarize,
    translate,
)
from regard.checkpoints import cards
from regard.decoding.settings import Settings, SettingWarning
from regard.decoding.spans import LONGEST_ANSWER, best_spans
from regard.evaluation.measuring import own_settings
from regard.interpret.pooling import overlaps, pool
from regard.interpret.word_alignment import log_probabilities
from regard.models.bundle import open_bundle
from regard.models.conversion import convert
from regard.models.model import pad
from regard.tasks import completion, translation
from regard.tasks.attended import read_weights
from regard.tasks.completion import stream_completion
from regard.tasks.confidence import (
    doubts_about_extract,
    doubts_about_repeats,
    doubts_about_summary,
    doubts_about_translation,
    trust,
)
from regard.tasks.reverse import UNSURE, Reversal, surprises
from regard.tasks.segments import continued, lost_names, parts, protected
from regard.tasks.writing import write
from regard.text.windows import windows
from regard.text.words import Span, sentence_numbers, sentences, words

# ------------------------------------------------------------------------------------ words


def test_sentences_and_what_is_between_them_are_the_text() -> None:
    text = "  Dr. Who left. “Why?” she asked.\n\nNobody knew… Then 3 men came!  End"
    found = sentences(text)
    assert [text[a:b] for a, b in found] == [
        "Dr. Who left.", "“Why?” she asked.", "Nobody knew…", "Then 3 men came!", "End",
    ]  # fmt: skip
    gaps = [text[one.end : other.start] for one, other in pairwise(found)]
    assert all(not gap.strip() for gap in gaps)
    assert sentences(" \n ") == words("  ") == []
    text = "J. R. Smith of the U.S. Army wrote it in C. It runs. See Fig. 3 of No. 7! 好。是的。"
    assert [text[a:b] for a, b in sentences(text)] == [
        "J. R. Smith of the U.S. Army wrote it in C.", "It runs.", "See Fig. 3 of No. 7!",
        "好。", "是的。",
    ]  # fmt: skip


def test_pooling_keeps_weight_and_shares_tokens_between_words() -> None:
    tokens, units = [(0, 3), (3, 5), (5, 9)], [Span(0, 4), Span(4, 5), Span(6, 9)]
    assert overlaps(tokens, units).tolist() == [[3, 0, 0], [1, 1, 0], [0, 0, 3]]
    weights = torch.rand(4, 3, 3).softmax(-1)
    pooled = pool(weights, tokens, units, tokens, units)
    assert torch.allclose(pooled.sum(-1), torch.ones(4, 3))
    first = weights[:, :2].mean(1)
    expected = torch.stack((first[:, 0] + first[:, 1] / 2, first[:, 1] / 2, first[:, 2]), 1)
    assert torch.allclose(pooled[:, 0], expected)


# -------------------------------------------------------------------------------- translate


def test_translate_says_what_the_model_says(made: Path) -> None:
    folder = made / "translate"
    model, text = load(folder), Tokenizer.load(folder)
    source = [*text.encode(">>fra<< The cat sat on the mat.").ids, 0]
    [[expected]] = generate(model, [source], Beam(3), max_new_tokens=9, stop=[0])
    found = translate("The cat sat on the mat.", "fr", model=folder, how=Beam(3), max_new_tokens=9)
    assert found.text == text.decode(expected.ids)
    assert found.tokens == len(expected.ids) + expected.stopped
    assert found.to == "fra"
    # The score of a beam is divided by its length; so is this, by whatever the length penalty.
    assert found.score == pytest.approx(expected.score)
    target = torch.tensor([[1, *expected.ids]])
    with torch.inference_mode():
        chances = model(torch.tensor([source]), target).log_softmax(-1)[0]
    written = [*expected.ids, 0][: found.tokens]
    total = sum(float(chances[at, token]) for at, token in enumerate(written))
    assert found.score == pytest.approx(total / found.tokens, abs=1e-5)


def test_many_texts_are_those_alone_in_their_order(made: Path) -> None:
    texts = ["The dog.", "", "Who sat on the mat? It was the cat,\nof course.", "A cat."]
    many = translate(texts, "german", model=made / "translate", max_new_tokens=6, batch=2)
    assert [record.source for record in many] == texts
    assert many[1].text == ""
    assert repr(many[1].seconds) == "0.0"  # as all others, a float
    assert many[1].attended is None
    for text, record in zip(texts, many, strict=True):
        if text:
            alone = translate(text, "deu", model=made / "translate", max_new_tokens=6)
            assert alone.text == record.text
            assert alone.attended.keys == record.attended.keys
            assert alone.attended.where == record.attended.where
    long = many[2]
    assert long.text.count("\n") == 1
    assert long.attended.keys == (
        "Who", "sat", "on", "the", "mat", "?", "It", "was", "the", "cat", ",", "of", "course", ".",
    )  # fmt: skip
    assert all(sum(row) <= 1 + 1e-5 for row in long.attended.weights)
    assert json.loads(json.dumps(long.to_dict()))["attended"]["keys"][1] == "sat"


@pytest.mark.parametrize("language", ["fr", "fra", "French", "fre", ">>fra<<", "fr-FR", "fr_CA"])
def test_a_language_has_many_names(made: Path, language: str) -> None:
    found = translate(
        "The cat.", language, model=made / "translate", max_new_tokens=3, attended=False
    )
    assert found.to == "fra"


def test_white_space_stays_as_it_is() -> None:
    text = "  She left.\tHe slept.\n\n\tYes. 🎉 \n12:30\n"
    found = translate(text, "fr").text
    assert re.sub(r"[A-Z][^.]*\.", "...", found) == "  ...\t...\n\n\t... 🎉 \n12:30\n"


@pytest.mark.parametrize(
    ("text", "to", "expected"),
    [
        ("I LIKE TEA.", "fr", "J'AIME LE THÉ."),
        ("DER BAHNHOF IST HEUTE GESCHLOSSEN.", "en", "THE STATION IS CLOSED TODAY."),
        (
            "PLEASE WRITE TO bob@example.com NOW!",
            "de",
            "BITTE SCHREIBEN SIE JETZT AN bob@example.com!",
        ),
    ],
)
def test_capitals_stay_capitals(text: str, to: str, expected: str) -> None:
    found = translate(text, to)
    assert found.text == expected
    assert all(word == word.upper() or "@" in word for word in found.attended.queries)


@pytest.mark.parametrize(
    ("text", "to", "capitals"),
    [
        ("This is VERY important.", "fr", ["TRÈS"]),
        ("Das ist SEHR wichtig.", "en", ["VERY"]),
        ("Ich werde diesen Tag NIE vergessen.", "en", ["NEVER"]),
        ("The WHO works in the USA.", "fr", ["OMS"]),
        ("NASA is in the USA.", "fr", ["NASA"]),
    ],
)
def test_a_word_in_capitals_stays_in_capitals(text: str, to: str, capitals: list[str]) -> None:
    assert re.findall(r"\b[A-ZÈ]{2,}\b", translate(text, to, attended=False).text) == capitals


def test_a_string_that_the_model_would_change_is_put_back() -> None:
    """It writes example for the French exemple; with placeholders it cannot."""
    text, string = "Écrivez à marie@exemple.fr.", "marie@exemple.fr"
    found = translate(text, "en")
    assert found.text.endswith(f" {string}.")
    assert string in found.attended.queries
    assert string in found.attended.keys


def test_a_text_without_words_is_copied_and_not_read() -> None:
    found = translate(["Привет!", "12:30 — https://a.org"], "fr")
    assert [record.text for record in found] == ["Привет!", "12:30 — https://a.org"]
    assert [record.tokens for record in found] == [0, 0]
    assert found[0].attended is None


def test_reasons_against_a_translation() -> None:
    def doubts(source: str, text: str) -> list[str]:
        return list(doubts_about_translation(source, text, "fra"))

    assert doubts("The cat is on the sofa.", "Le chat est sur le canapé.") == []
    assert doubts("Pay 12 euros.", "Payez 21 euros.") == [
        "'12' is missing",
        "the number 21 is not in the source",
    ]
    assert doubts("A good day.", "Un bon день.") == ["it has letters of another script"]
    assert doubts("We are at the sea.", "Das ist nicht für die See.") == [
        "it seems to be in German"
    ]
    assert doubts("The old grey fox.", "The old grey fox.") == ["it is the source"]
    assert doubts("It is on the sofa.", "Il est sur le sur le sofa.") == ["it repeats 'sur le'"]
    assert doubts("Yes yes yes!", "Oui oui oui !") == []
    assert doubts("It is a long way from here to there.", "Loin.") == [
        "it has 1 words, the source 9"
    ]


def test_low_confidence_comes_with_its_reasons() -> None:
    sure, copied = translate(["Where is the station?", "Привет!"], "fr")
    assert sure.confidence > 0.8
    assert (sure.reasons, sure.doubtful, sure.doubt) == ((), False, "")
    assert copied.doubtful
    assert copied.reasons == ("a text in another script was copied, not translated",)
    assert copied.doubt.startswith("low confidence 0.40: a text in another script")
    both = translate("Where is the station? Привет!", "fr")  # as far as its weakest sentence
    assert (both.confidence, both.reasons) == (copied.confidence, copied.reasons)
    assert both.to_dict()["doubtful"]
    odd = translate("Grzmot pchły zawsze wściekle skrobie.", "fr")
    assert odd.confidence < sure.confidence


def test_a_calibration_turns_scores_into_probabilities(made: Path, tmp_path: Path) -> None:
    folder = folders.translator(tmp_path / "translate")
    plain = translate("The cat.", "fr", model=folder, max_new_tokens=3)
    assert plain.confidence <= math.exp(plain.score)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))

    def calibrated(**values: object) -> float:
        config["task_specific_params"] = {"translation": {"confidence": values}}
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        return translate("The cat.", "fr", model=folder, max_new_tokens=3).confidence

    assert calibrated(bias=2, scale=0) > calibrated(bias=-2, scale=0)
    with pytest.raises(CheckpointError, match="does not have the numbers bias and scale"):
        calibrated(bias=2)
    back = {"bias": 1, "scale": 0}  # this model does not translate back
    assert calibrated(bias=2, scale=0, reversed={**back, "surprise": -1}) == calibrated(
        bias=2, scale=0
    )
    with pytest.raises(CheckpointError, match="the numbers bias, scale and surprise"):
        calibrated(bias=2, scale=0, reversed=back)


def test_a_source_word_that_its_translation_lacks_is_named() -> None:
    bundle = open_bundle("translate")
    english, german, french = "eng", "deu", "fra"

    def surprised(source: str, text: str, *languages: str) -> tuple[float, tuple[str, ...]]:
        [found] = surprises(bundle, [Reversal(source, text, languages)], 2)
        assert found.language in languages
        return found.total, found.unsure

    garden = ("The dog sleeps in the garden.", "Le chien dort dans le jardin.")
    assert surprised(*garden, english) == (0.0, ())
    total, unsure = surprised(garden[0], "Le chien dort dans le château.", english)
    assert unsure == ("garden",)
    assert total > 2
    # It is the log-probability of the word's tokens, beyond the threshold.
    model, text = bundle.model, bundle.tokenizer
    prompt = text.encode(">>eng<< Le chien dort dans le château.", special=False).ids
    source = text.encode(garden[0], special=False)
    [likely] = log_probabilities(model, [[*prompt, model.config.end_token]], source.ids)
    within = [
        float(value)
        for (_, high), value in zip(source.offsets, likely, strict=True)
        if garden[0].index("garden") < high < len(garden[0])
    ]
    assert total == pytest.approx(-sum(within) - UNSURE, abs=1e-3)
    # What is copied is left out; the language is that in which the source is most probable.
    assert surprised("Use XK-12 here.", "Utilisez-le ici.", english)[1] == ()
    hund = ("Der Hund schläft im Garten.", "The dog is sleeping in the castle.")
    both = surprised(*hund, french, german)
    assert both[1] == ("Garten",)
    assert both[0] == pytest.approx(surprised(*hund, german)[0], abs=1e-3)
    assert surprises(bundle, [], 2) == []
    many = [Reversal(*garden, (english,)), Reversal(*hund, (french, german))]
    assert [(found.language, found.unsure) for found in surprises(bundle, many, 1)] == [
        ("eng", ()),
        ("deu", ("Garten",)),
    ]
    endless = Reversal("cat " * 3000, "chat " * 3000, (english,))  # beyond the model's positions
    assert surprises(bundle, [endless], 2)[0].total >= 0


def test_a_name_that_leaves_no_trace_is_lost() -> None:
    source = "Yesterday Anna told Fatulayeva, Rome and the Xanthi : Come, Tom ."
    assert lost_names(source, "Hier, anna a dit Rom.", source.replace(",", "").split()) == [
        "Fatulayeva", "Xanthi", "Tom",
    ]  # fmt: skip
    assert lost_names(source, "Hier.", ["Tom"]) == ["Tom"]
    assert lost_names("The Democratic party", "Le parti démocratique", ["Democratic"]) == []
    assert protected("Write to Tom at tom@a.org.", ["Tom", "org"]).held == (
        ("XX1", "Tom"),
        ("XX2", "tom@a.org"),
    )


def test_a_lost_name_is_translated_again_with_a_placeholder(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the model loses names, as it does here in the first of two translations."""
    read: list[str] = []

    def losing(bundle, sources, *args):
        read.extend(sources)
        found = write(bundle, sources, *args)
        return [replace(each, text=each.text.replace("Zuzana", "la")) for each in found]

    monkeypatch.setattr(translation, "write", losing)
    found = translate("Yesterday I saw Zuzana in the garden.", "fr")
    assert read == [
        ">>fra<< Yesterday I saw Zuzana in the garden.",
        ">>fra<< Yesterday I saw XX1 in the garden.",
    ]
    assert "Zuzana" in found.text
    assert "Zuzana" in found.attended.keys
    assert not any("Zuzana" in reason for reason in found.reasons)
    read.clear()
    assert "Zuzana" not in translate("Gestern sah ich Zuzana im Garten.", "en").text
    assert len(read) == 1  # German nouns have capitals, too


def test_a_low_probability_names_words_of_the_source() -> None:
    assert trust(0.3, (), ["mat", "fox"]).reasons == ("not sure of 'mat', 'fox'",)
    assert trust(0.3).reasons == ("low probability",)
    assert trust(0.6, (), ["mat"]).reasons == ()
    mixed = ["Where is the station?", "Grzmot pchły zawsze wściekle skrobie."]
    sure, unsure = translate(mixed, "fr", attended=False)
    assert not sure.doubtful
    assert unsure.reasons[0].startswith("not sure of '")
    assert translate(" ".join(mixed), "fr", attended=False).reasons == unsure.reasons


def test_every_task_says_how_far_it_can_be_trusted() -> None:
    story = "The cat sat on the mat while the dog slept in the garden."
    known, unknown = answer(["Where did the dog sleep?", "Who wrote the bill?"], story)
    assert known.confidence > 0.7
    assert not unknown.answered
    assert unknown.confidence > 0.5
    written = complete("Once upon a time", how=Greedy(), max_new_tokens=40, attended=False)
    assert 0 <= written.confidence <= 1
    assert list(doubts_about_repeats("he said and he said no")) == []
    assert list(doubts_about_repeats("and he said, he said no")) == ["it repeats 'he said'"]
    summary = list(doubts_about_summary("A bridge closes on 3 May.", "The Tuesday bridge of 4 May"))
    assert summary == [
        "the number 4 is not in the document",
        "the name 'Tuesday' is not in the document",
    ]


def test_a_direction_that_was_not_trained_is_refused_by_name() -> None:
    french = "Le chat dort sur le canapé."
    told = "Text 2 is in French, and translate was not trained from French to German. It translates"
    with pytest.raises(InputError, match=told):
        translate(["The cat is on the sofa.", french], "de")
    with pytest.raises(InputError, match=r"^translate was not trained from German to French"):
        translate("Hallo", "fr", source="de")
    with pytest.raises(InputError, match=r"The text is in English, and .* English to English"):
        translate("The cat is on the sofa.", "en")
    assert translate(french, "de", source="en").text  # the caller knows better


def test_a_long_sentence_is_cut_where_a_clause_ends() -> None:
    def cut(text: str, most: int) -> list[str]:
        found = parts(text, Span(2, len(text)), lambda part: len(part.split()) <= most)
        assert all(not text[one.end : other.start].strip() for one, other in pairwise(found))
        assert (found[0].start, found[-1].end) == (2, len(text))
        return [text[low:high] for low, high in found]

    text = "- We wrote to them, and they, our friends, came; nobody was late - they said - or lost."
    assert cut(text, 20) == [text[2:]]
    assert cut(text, 10) == [
        "We wrote to them, and they, our friends, came;",
        "nobody was late - they said - or lost.",
    ]
    assert cut(text, 5)[:2] == ["We wrote to them,", "and they, our friends, came;"]
    assert cut(". one two three four five six", 2) == ["one two", "three", "four", "five six"]
    assert cut(". 555 12 34 12 99 02 call now", 7) == ["555 12 34 12 99 02", "call now"]
    word = "x" * 5000
    assert [len(part) for part in cut(f". {word} is a word", 0)] == [5000, 2, 1, 4]


def test_a_part_of_a_sentence_begins_and_ends_like_one() -> None:
    assert continued("because it rains,", "Weil es regnet.") == "Weil es regnet,"  # may be a name
    assert continued("that it rains", "Dass es regnet.") == "dass es regnet"
    assert continued("That it rains...", "Dass es regnet...") == "Dass es regnet..."
    assert continued("the end.", "Das Ende.") == "das Ende."
    assert continued("", "") == ""


def test_sentences_of_any_length_are_translated(made: Path, tmp_path: Path) -> None:
    """The translation is that of the parts, and says that the sentence was cut."""
    folder = folders.translator(tmp_path / "translate")
    folders.edit(folder, task_specific_params={"translation": {"max_source_tokens": 24}})
    options = {"model": folder, "max_new_tokens": 4}
    whole = translate("The cat sat on the mat; " * 40, "fr", **options)
    part = translate("The cat sat on the mat;", "fr", **options)
    assert part.text in whole.text
    assert whole.tokens >= 20 * part.tokens
    assert any(each.startswith("a long sentence was cut into ") for each in whole.reasons)
    assert whole.attended is not None
    word = "zq" * 2500
    copied = translate(word, "fr", **options)
    assert (copied.text, copied.tokens) == (word, 0)
    assert copied.reasons == ("a word of 5000 characters was copied, not translated",)
    assert copied.doubtful
    assert word in translate(f"The cat {word} sat.", "fr", **options).text
    assert translate("a " * 200, "fr", model=made / "translate", max_new_tokens=2).tokens > 2
    folders.edit(folder, task_specific_params={"translation": {"max_source_tokens": "24"}})
    with pytest.raises(CheckpointError, match="max_source_tokens = '24' is not a whole number"):
        translate("a", "fr", model=folder)


def test_directions_in_a_config_are_pairs(made: Path, tmp_path: Path) -> None:
    folder = folders.translator(tmp_path / "translate")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["task_specific_params"] = {"translation": {"directions": ["en-fr"]}}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"directions = \['en-fr'\] is not a list of pairs"):
        translate("a", "fr", model=folder)


def test_precisions_say_nearly_the_same() -> None:
    """Of a shipped model, since random weights are near no decision."""
    text = "Where is the train station?"
    plain, whole = (
        translate(text, "fr", attended=False, precision=precision)
        for precision in ("float32", "int8")
    )
    assert plain.text == whole.text
    assert plain.score == pytest.approx(whole.score, abs=0.02)
    assert plain.score != whole.score
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():  # an older processor
        with pytest.raises(InputError, match=r"does not compute in bfloat16\. Use float32 or int8"):
            translate(text, "fr", attended=False, precision="bfloat16")
    else:
        half = translate(text, "fr", attended=False, precision="bfloat16")
        assert plain.text == half.text
        assert plain.score == pytest.approx(half.score, abs=0.02)
        assert len({plain.score, half.score, whole.score}) == 3
    with pytest.raises(InputError, match=r"no precision 'int9'\. Give one of float32, bfloat16"):
        translate(text, "fr", precision="int9")


def test_a_single_target_language_needs_no_name(made: Path) -> None:
    assert translate("The cat.", model=made / "untagged", max_new_tokens=3).to is None


def test_t5_is_told_in_words(made: Path, tmp_path: Path) -> None:
    folder = folders.summarizer(tmp_path / "t5")
    with pytest.raises(InputError, match="does not translate: task_specific_params"):
        translate("The cat.", "fr", model=folder)
    tasks = {
        "translation_en_to_fr": {"prefix": "the cat: ", "num_beams": 1, "max_length": 5},
        "translation_en_to_de": {"prefix": "the dog: "},
        "summarization": {"prefix": "sat: "},
    }
    folders.edit(folder, task_specific_params=tasks)
    model, text = load(folder), Tokenizer.load(folder)
    prompt = text.encode("the cat: Who sat?").ids  # this tokenizer puts the end itself
    [[expected]] = generate(model, [prompt], Greedy(), max_new_tokens=5, stop=[1])
    found = translate("Who sat?", "french", model=folder)
    assert found.text == text.decode(expected.ids)
    assert found.attended.keys == ("Who", "sat", "?")  # and not the prefix
    with pytest.raises(InputError, match="offers fr, de"):
        translate("Who sat?", "es", model=folder)
    with pytest.raises(InputError, match="from 'russian'"):
        translate("Who sat?", "fr", source="russian", model=folder)


@pytest.fixture
def padder(tmp_path: Path) -> Path:
    """A translator that writes padding, which Marian gives a score but no meaning."""
    folder = folders.translator(tmp_path / "marian")
    model = load(folder)
    with torch.no_grad():
        model.output_bias[0, 1] = 50.0
    model.save(folder)
    return folder


def test_tokens_that_a_model_must_not_write_are_not_written(padder: Path) -> None:
    assert translate("The cat.", "fr", model=padder, max_new_tokens=4).text == ""
    folders.edit(padder, "generation_config.json", bad_words_ids=[[1]])
    assert translate("The cat.", "fr", model=padder, max_new_tokens=4).text != ""


def test_older_checkpoints_say_how_to_decode_in_their_config(padder: Path, tmp_path: Path) -> None:
    (padder / "generation_config.json").unlink()
    folders.edit(padder, bad_words_ids=[[1]], num_beams=2, min_length=4)
    found = translate("The cat.", "fr", model=padder, max_new_tokens=5)
    assert found.tokens >= 4
    other = convert(padder, tmp_path / "other")
    assert json.loads((other / "generation_config.json").read_text())["bad_words_ids"] == [[1]]
    assert translate("The cat.", "fr", model=other, max_new_tokens=5).text == found.text


def test_a_model_may_have_several_tokens_that_end_a_text(made: Path, tmp_path: Path) -> None:
    folder = convert(made / "gpt2", tmp_path / "gpt2")
    how = Greedy()
    written = Tokenizer.load(folder).encode(
        complete("The cat", model=folder, how=how, max_new_tokens=8).text
    )
    end = json.loads((folder / "config.json").read_text())["eos_token_id"]
    folders.edit(folder, "generation_config.json", eos_token_id=[end, written.ids[3]])
    found = complete("The cat", model=folder, how=how, max_new_tokens=8)
    assert found.stopped
    assert found.tokens <= 4


def test_what_a_model_asks_for_in_vain_is_told(tmp_path: Path) -> None:
    folder = folders.summarizer(tmp_path / "t5")
    folders.edit(folder, "generation_config.json", repetition_penalty=1.3, bad_words_ids=[[5]])
    with pytest.warns(SettingWarning) as told:
        summarize(folders.LINES[0], model=folder, max_new_tokens=3)
    assert [str(one.message).split(" = ")[0] for one in told] == [
        "t5 sets repetition_penalty",
        "t5 sets bad_words_ids",
    ]


def small_language(random: Random) -> tuple[str, str, list[int]]:
    """A sentence, its translation, and where each word of that comes from: nouns come first."""
    source, target, origins = [], [], []
    for _ in range(random.choice((1, 2))):
        quality, thing, deed = (kind + random.choice("abcd") for kind in "qtd")
        origins += [len(source) + at for at in (0, 2, 1, 3)]
        source += ["the", quality, thing, deed]
        target += ["le", thing.upper(), quality.upper(), deed.upper()]
    return " ".join([*source, "."]), " ".join([*target, "."]), [*origins, len(source)]


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Transformer that has learned a small language, in a few seconds."""
    folder, random = tmp_path_factory.mktemp("learned"), Random(0)
    kinds = [kind + letter for kind in "qtd" for letter in "abcd"]
    vocabulary = ["</s>", "<pad>", "the", "le", ".", *kinds, *(word.upper() for word in kinds)]
    tokenizer = FastTokenizer(
        WordLevel({word: index for index, word in enumerate(vocabulary)}, unk_token="<pad>")
    )
    tokenizer.pre_tokenizer = WhitespaceSplit()
    text = Tokenizer(tokenizer)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # more of them only wait for each other: everything here is small
    torch.manual_seed(0)
    config = TransformerConfig(
        vocabulary=len(text), dim=48, depth=1, decoder_depth=2, heads=4, decoder_heads=4, inner=96,
        decoder_inner=96, dropout=0.0, length=64, end_token=0, pad_token=1, start_token=1,
    )  # fmt: skip
    model = Transformer(config)
    optimizer = torch.optim.Adam(model.parameters(), 2e-3, betas=(0.9, 0.98))
    for _ in range(250):
        pairs = [small_language(random)[:2] for _ in range(24)]
        sides = [[[*text.encode(p[side]).ids, 0] for p in pairs] for side in (0, 1)]
        source, padding = pad(sides[0], 1, "right", len(text), model.device)
        target, _ = pad([[1, *row] for row in sides[1]], 1, "right", len(text), model.device)
        logits = model(source, target[:, :-1], padding=padding)
        loss = cross_entropy(logits.flatten(0, 1), target[:, 1:].flatten(), ignore_index=1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.set_num_threads(threads)
    assert loss < 0.05
    model.save(folder)
    text.save(folder)
    return folder


@pytest.mark.slow
def test_a_learned_language_is_translated_and_aligned(learned: Path) -> None:
    random = Random(1)
    sources, expected, origins = zip(*(small_language(random) for _ in range(16)), strict=True)
    found = translate(list(sources), model=learned, how=Beam(2), max_new_tokens=20)
    assert [record.text for record in found] == list(expected)
    assert all(record.score > -0.1 for record in found)
    right, total, of_heads = 0, 0, torch.zeros(2, 8)
    one = open_bundle(learned)
    looked = read_weights(one, "", sources, write(one, sources, Beam(2), 20, 8), 8)
    for record, item, places in zip(found, looked, origins, strict=True):
        assert record.attended.queries == tuple(record.text.split())
        assert record.attended.keys == tuple(record.source.split())
        rows = zip(record.attended.weights, places, strict=True)
        right += sum(row.index(max(row)) == place for row, place in rows)
        total += len(places)
        for read in (False, True):
            table = item.pooled(words(record.text), words(record.source), read=read)
            of_heads[int(read)] += (table.argmax(-1) == torch.tensor(places)).sum(-1).flatten()
    # No head is told to align; the one chosen for each sentence is nearly as good as the best is
    # over all of them, which takes the answers to know.
    assert right > 0.9 * of_heads.max()
    assert right > 1.5 * of_heads.mean()
    assert right / total > 0.6


# -------------------------------------------------------------------------------- summarize

BRIDGE = (
    "The old bridge over the river Arden will close on Tuesday for repairs. Engineers found cracks "
    "in two of its pillars last month. Cars must use the motorway bridge, which is eight "
    "kilometres away. The city expects the work to last until October."
)


def chosen_of(record: Summary, document: str) -> list[str]:
    return [document[each.start : each.end] for each in record.sentences if each.chosen]


def test_a_summary_has_the_best_sentences_of_the_document() -> None:
    found = summarize(BRIDGE)
    assert found.text == "The old bridge over the river Arden will close on Tuesday for repairs."
    assert (found.method, found.parts, len(found.sentences)) == ("extracted", (), 4)
    assert chosen_of(found, BRIDGE) == [found.text]
    best = max(found.sentences, key=lambda sentence: sentence.score)
    assert best.chosen
    assert best.score == found.score
    # Each sentence attends to the one that is chosen; at most all of its weight.
    assert found.attended.sides == ("document", "summary")
    assert [len(row) for row in found.attended.weights] == [1] * 4
    assert all(0 < row[0] < 1 for row in found.attended.weights)
    assert found.attended.queries[0] == found.attended.keys[0] == found.text


def test_the_number_of_sentences_or_words_can_be_given() -> None:
    ranked = sorted(summarize(BRIDGE).sentences, key=lambda sentence: -sentence.score)
    for count in (1, 2, 3, 9):
        found = summarize(BRIDGE, sentences=count, attended=False)
        expected = sorted((each.start, each.end) for each in ranked[:count])
        assert [(s.start, s.end) for s in found.sentences if s.chosen] == expected
        assert found.text == " ".join(chosen_of(found, BRIDGE))  # in the order of the text
        assert found.attended is None
    for most in (1, 12, 25, 30, 99):
        found = summarize(BRIDGE, words=most)
        assert len(found.text.split()) <= max(most, 13)  # there is always one sentence
    assert found.text == BRIDGE


@pytest.mark.parametrize(
    ("document", "summary"),
    [
        ("The cat.", "The cat."),
        ("  One sentence of two lines\nwith a line break in lower case is kept as one.  \n",
         "One sentence of two lines with a line break in lower case is kept as one."),
        ("Dear Ms. Lang,\n\nyour blue lamp has arrived in the shop.\n\nKind regards\nLichthaus",
         "your blue lamp has arrived in the shop."),
        ("# The cat of the old house\n\nYes.\nDr. Smith fed the cat at 8 a.m. on Monday.\n- No.",
         "Dr. Smith fed the cat at 8 a.m. on Monday."),
        ("- milk\n- bread\n", "milk\nbread"),
        ("...", "..."),
    ],
)  # fmt: skip
def test_headings_lists_and_fragments_are_no_summary(document: str, summary: str) -> None:
    assert summarize(document, sentences=1).text == summary


def test_a_short_document_is_introduced_by_its_first_sentence_of_news() -> None:
    first = "Heavy snow stopped almost all trains in the north on Wednesday."
    news = f"{first} Thousands of travellers spent the night in stations. Buses replace trains."
    assert summarize(news, sentences=1).text == first
    letter = f"Dear Ms. Lang,\n\nthank you for your order. {news}\n\nKind regards\nLichthaus"
    assert summarize(letter, sentences=1).text == first
    assert summarize(f"Dear Ms. Lang, thank you for your order. {news}", sentences=1).text == first
    assert summarize("Thank you for your order.").text == "Thank you for your order."


def test_a_sentence_is_not_chosen_twice() -> None:
    again = BRIDGE.replace("will close", "closes")
    found = summarize(f"{BRIDGE}\n\n{again}", sentences=8)
    assert len(chosen_of(found, "")) == 4


@pytest.mark.slow
def test_a_document_of_any_length_is_read_in_parts() -> None:
    kinds = ("fish", "bread", "wool", "salt", "glass", "tea", "rope", "ink", "soap", "wine")
    filler = [f"The shop sells {a} or {b} on {c} days." for a, b, c in permutations(kinds, 3)]
    document = " ".join([*filler[:60], BRIDGE, *filler[60:120]])
    found = summarize(document, sentences=2)
    assert len(found.sentences) == len(found.attended.weights) == 124
    assert found.tokens > 3 * 400
    assert any(said in BRIDGE for said in chosen_of(found, document))
    # So many sentences do not fit the model, so they are not read together.
    many = summarize(document, sentences=100, attended=False)
    assert len(chosen_of(many, document)) > 2
    assert many.sentences[60].chosen


def test_what_points_back_to_a_sentence_left_out_lowers_the_confidence() -> None:
    after = "It never rains there. It was built of stone in the old town. He liked it."
    parts = ["It was built of stone.", "The cat sat."]
    alone = list(doubts_about_extract("A.", parts))
    assert alone == ["'It' may point to a sentence that is left out"]
    assert "script" in next(doubts_about_extract("桥关闭。", []))
    assert summarize("milk\nbread").reasons == ("it does not end like a sentence",)
    assert summarize(after, sentences=3).reasons == ()
    assert summarize("It was late. Nobody came to the house by the sea.").reasons == ()


def test_options_that_do_not_go_together_are_refused(made: Path) -> None:
    for options, message in (
        ({"sentences": 2, "words": 9}, "Give sentences or words, not both"),
        ({"one_line": True, "model": "mine"}, "Give one_line or model, not both"),
        ({"one_line": True, "words": 9}, "words is for a summary of sentences .* with one_line a"),
        ({"model": "mine", "sentences": 1}, "sentences is for .* with model a model writes"),
        ({"join": True}, "join is for a summary that a model writes. Ask for one_line"),
        ({"how": {"num_beams": 2}}, "how is for a summary that a model writes"),
        ({"how": Settings(num_beams=2)}, "num_beams is for a summary that a model writes"),
        ({"max_new_tokens": 5}, "max_new_tokens is for a summary that a model writes"),
        ({"sentences": 0}, r"summarize\(sentences=...\) must be a whole number from 1 on"),
        ({"words": 2.5}, r"summarize\(words=...\) must be a whole number from 1 on"),
        ({"batch": 0}, r"summarize\(batch=...\) must be a whole number from 1 on"),
    ):
        with pytest.raises(InputError, match=message):
            summarize(BRIDGE, **options)


def test_one_line_is_what_the_model_of_that_name_writes() -> None:
    one, same = summarize(BRIDGE, one_line=True), summarize(BRIDGE, model="summarize")
    assert (one.method, one.sentences) == ("whole", ())
    assert (one.text, one.parts) == (same.text, same.parts)


def test_a_short_document_is_summarized_as_a_whole(made: Path) -> None:
    folder = made / "summarize"
    model, text = load(folder), Tokenizer.load(folder)
    document = folders.LINES[2]
    [[expected]] = generate(model, [text.encode(document).ids], Beam(4), max_new_tokens=8, stop=[1])
    found = summarize(document, model=folder, max_new_tokens=8)
    assert (found.text, found.method) == (text.decode(expected.ids), "whole")
    assert [(part.start, part.end) for part in found.parts] == [(0, len(document))]
    assert found.attended.keys == ("Who sat on the mat?", "It was the cat, of course.")


def test_a_long_document_is_summarized_in_parts(made: Path) -> None:
    folder = made / "summarize"
    text = Tokenizer.load(folder)
    joined = summarize(folders.STORY, model=folder, max_new_tokens=6, join=True)
    assert joined.method == "joined"
    assert len(joined.parts) > 3
    assert joined.text == "\n".join(part.text for part in joined.parts)
    spans = [(part.start, part.end) for part in joined.parts]
    assert (spans[0][0], spans[-1][1]) == (0, len(folders.STORY))
    for (_, end), (start, _) in pairwise(spans):
        assert start <= end + 1  # nothing between two parts is left out
    for start, end in spans:
        assert len(text.encode(folders.STORY[start:end]).ids) <= 48
    # Each of its sentences attended to its own part only.
    for part, row in zip(joined.parts, joined.attended.weights, strict=False):
        at = [folders.STORY.find(key) >= 0 for key in joined.attended.keys]
        assert all(at)
        inside = [part.start <= span.start < part.end for span in sentences(folders.STORY)]
        assert all(weight == 0 for weight, within in zip(row, inside, strict=True) if not within)
        assert 0 < sum(row) <= 1 + 1e-5
    again = summarize(folders.STORY, model=folder, max_new_tokens=6)
    assert again.method == "resummarized"
    assert again.parts == joined.parts
    # The second round sees the same lines as a call of its own, so both cut them in the same parts.
    assert again.text == summarize(joined.text, model=folder, max_new_tokens=6).text
    assert len(again.attended.keys) == len(sentences(folders.STORY))


def test_a_sentence_longer_than_the_window_is_cut(made: Path) -> None:
    document = "the cat of the dog " * 40
    found = summarize(document, model=made / "summarize", max_new_tokens=4, join=True)
    assert len(found.parts) > 2
    assert found.parts[-1].end == len(document.rstrip())


# ----------------------------------------------------------------------------------- answer


def test_windows_hold_every_token_and_overlap_by_half() -> None:
    context = list(range(100, 157))
    found = list(windows([7, 8], context, 20, first=1, last=2))
    assert all(len(window.ids) <= 20 for window in found)
    for window in found:
        assert window.ids[: window.split] == [1, 7, 8, 2]
        assert window.ids[-1] == 2
        piece = window.ids[window.split : -1]
        assert piece == context[window.offset : window.offset + len(piece)]
    steps = {b.offset - a.offset for a, b in pairwise(found)}
    assert steps == {7}
    assert found[-1].ids[-2] == 156
    assert len(list(windows([7], context[:3], 20, first=1, last=2))) == 1
    with pytest.raises(InputError, match="leave no room"):
        list(windows([7] * 16, context, 20, first=1, last=2))


def test_the_best_span_is_the_best_of_all() -> None:
    generator = torch.Generator().manual_seed(1)
    start, end = (torch.randn(6, 50, generator=generator) * 3 for _ in range(2))
    possible = torch.rand(6, 50, generator=generator) < 0.7
    possible[:, 0] = True
    sentence = (torch.rand(6, 50, generator=generator) < 0.1).cumsum(1)
    best = best_spans(start, end, possible, sentence)
    for row in range(6):
        scores = {
            (i, j): float(start[row, i] + end[row, j])
            for i in range(1, 50)
            for j in range(i, min(i + LONGEST_ANSWER, 50))
            if possible[row, i] and possible[row, j] and sentence[row, i] == sentence[row, j]
        }
        none = float(start[row, 0] + end[row, 0])
        top = max(scores, key=scores.get)
        assert (int(best.first[row]), int(best.last[row])) == top
        assert float(best.better[row]) == pytest.approx(scores[top] - none, abs=1e-4)
        total = sum(map(math.exp, scores.values())) + math.exp(none)
        assert float(best.share[row]) == pytest.approx(math.exp(scores[top]) / total, rel=1e-4)


def test_the_answer_is_the_best_span_of_the_whole_document(made: Path) -> None:
    folder = made / "answer"
    model, text = load(folder), Tokenizer.load(folder)
    question = "Who sat on the mat?"
    found = answer(question, folders.STORY, model=folder, threshold=-math.inf)
    asked, context = (text.encode(t, special=False) for t in (question, folders.STORY))
    best = (-math.inf, 0, 0)
    count = 0
    ends_of_sentences = [high for _, high in sentences(folders.STORY)]
    sentence = [sum(high <= low for high in ends_of_sentences) for low, _ in context.offsets]
    first, last = text.id("[CLS]"), text.id("[SEP]")
    for window in windows(asked.ids, context.ids, 64, first=first, last=last):
        count += 1
        ids = torch.tensor([window.ids])
        kinds = (torch.arange(ids.shape[1]) >= window.split)[None].long()
        with torch.inference_mode():
            starts, ends = model(ids, token_types=kinds)
        for i in range(window.split, len(window.ids) - 1):
            for j in range(i, min(i + LONGEST_ANSWER, len(window.ids) - 1)):
                score = float(starts[0, i] + ends[0, j] - starts[0, 0] - ends[0, 0])
                move = window.offset - window.split
                if sentence[i + move] == sentence[j + move]:
                    best = max(best, (score, i + move, j + move))
    assert count > 3
    assert found.windows == count
    assert found.score == pytest.approx(best[0], abs=1e-4)
    start, end = context.offsets[best[1]][0], context.offsets[best[2]][1]
    assert (found.start, found.end) == (start, end)
    assert found.text == folders.STORY[start:end]
    assert 0 < found.probability <= 1
    assert found.attended.queries == ("Who", "sat", "on", "the", "mat", "?")
    assert 0 < sum(found.attended.weights[0]) < 1


def test_there_may_be_no_answer(made: Path) -> None:
    found = answer("Who?", folders.STORY, model=made / "answer", threshold=1e6)
    assert (found.text, found.start, found.end, found.answered) == ("", None, None, False)
    assert str(found) == "No answer."
    assert found.to_dict()["answered"] is False


def test_an_answer_stays_in_a_sentence(made: Path) -> None:
    for question in folders.LINES[:6]:
        found = answer(question, folders.STORY, model=made / "answer", threshold=-math.inf)
        low, high = next(s for s in sentences(folders.STORY) if s.end > found.start)
        assert low <= found.start < found.end <= high


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("A cat. The dog sat.", [0, 0, 0, 1, 1, 1, 1]),
        ("The third\nof May. Why?", [0, 0, 0, 0, 0, 1, 1]),
        ("A title\nThe text", [0, 0, 1, 1]),
        ("one\n\ntwo", [0, 1]),
        ("  lower case. Why", [0, 0, 0, 1]),
    ],
)
def test_each_word_is_in_a_sentence(text: str, expected: list[int]) -> None:
    assert sentence_numbers(text, words(text)) == expected


def test_the_threshold_of_a_model_decides(made: Path, tmp_path: Path) -> None:
    source, folder = made / "answer", tmp_path / "answer"
    alone = answer("Who?", folders.STORY, model=source, threshold=-math.inf)
    for threshold, answered in ((alone.score - 0.01, True), (alone.score, False)):
        shutil.copytree(source, folder, dirs_exist_ok=True)
        params = {"question answering": {"threshold": threshold}}
        edit(folder, task_specific_params=params)
        assert answer("Who?", folders.STORY, model=folder).answered == answered
        assert answer("Who?", folders.STORY, model=folder, threshold=-math.inf).answered
        assert own_settings(open_bundle(folder)) == {"evaluation.threshold": threshold}
    numbers = {"bias": 0.0, "scale": 0.0, "unanswered": {"bias": math.log(9), "scale": 0.0}}
    params = {"question answering": {"threshold": 1e6, "confidence": numbers}}
    edit(folder, task_specific_params=params)
    assert answer("Who?", folders.STORY, model=folder).confidence == pytest.approx(0.9)
    anyway = answer("Who?", folders.STORY, model=folder, threshold=-math.inf)
    assert anyway.confidence == pytest.approx(0.5)
    edit(folder, task_specific_params={"question answering": {"threshold": "high"}})
    with pytest.raises(CheckpointError, match="threshold = 'high' is not a number"):
        answer("Who?", folders.STORY, model=folder)


def test_several_questions_have_one_context_or_one_each(made: Path) -> None:
    questions, contexts = ["Who?", "Where was it?"], [folders.STORY, folders.LINES[3]]
    options = {"model": made / "answer", "threshold": -math.inf}
    each = answer(questions, contexts, **options)
    for question, context, record in zip(questions, contexts, each, strict=True):
        alone = answer(question, context, **options)
        assert (alone.text, alone.start) == (record.text, record.start)
    shared = answer(questions, folders.STORY, **options)
    assert shared[0].start == each[0].start
    with pytest.raises(InputError, match="one for each question: got 2 questions and 1 contexts"):
        answer(questions, contexts[:1], **options)


# --------------------------------------------------------------------------------- complete


@pytest.mark.parametrize("name", ["gpt2", "xl"])
@pytest.mark.parametrize("how", [Greedy(), Sample(temperature=1.5, seed=3)])
def test_complete_says_what_the_model_says_and_streams_it(made: Path, name: str, how) -> None:
    folder = made / name
    model, text = load(folder), Tokenizer.load(folder)
    prompt = text.encode("The cat sat").ids
    [[expected]] = generate(model, [prompt], how, max_new_tokens=12, stop=[0])
    found = complete("The cat sat", model=folder, how=how, max_new_tokens=12)
    assert str(found) == text.decode([*prompt, *expected.ids])
    assert found.score == pytest.approx(expected.score / found.tokens)
    assert found.stopped == expected.stopped
    pieces = stream_completion(
        "The cat sat", model=folder, how=how, max_new_tokens=12, attended=True
    )
    said = ""
    try:
        while True:
            said += next(pieces)
    except StopIteration as end:
        record = end.value
    assert said == record.text == found.text
    assert record.score == pytest.approx(found.score, abs=1e-4)
    assert (record.tokens, record.attended) == (found.tokens, found.attended)


def test_what_new_words_attend_to_comes_before_them(made: Path) -> None:
    found = complete("The cat sat on the mat", model=made / "gpt2", how=Greedy(), max_new_tokens=8)
    seen = found.attended
    assert seen.keys[:6] == ("The", "cat", "sat", "on", "the", "mat")
    first = len(seen.keys) - len(seen.queries)
    for at, row in enumerate(seen.weights):
        assert 0 < sum(row) <= 1 + 1e-5
        assert not any(row[first + at + 1 :])  # nothing that came later


def test_ids_that_no_token_has_say_nothing(tmp_path: Path) -> None:
    folder = folders.writer(tmp_path / "gpt2")
    model = load(folder)
    wide = GPT2(replace(model.config, vocabulary=len(model.tokens.weight) + 30)).eval()  # as T5's
    wide.save(folder)
    text, how = Tokenizer.load(folder), Sample(temperature=50.0, seed=2)
    [[drawn]] = generate(wide, [text.encode("The cat").ids], how, max_new_tokens=50, stop=[0])
    known = [token for token in drawn.ids if token < len(text)]
    assert len(known) < len(drawn.ids)
    found = complete("The cat", model=folder, how=how, max_new_tokens=50)
    assert found.text == text.decode(known)
    assert found.attended.keys[0] == "The"


class _Lettered:
    """A tokenizer whose ids are letters."""

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("text", "whole"),
    [
        ("It rained all day. He saw Mr. Bean go", "It rained all day."),
        ('She left. "I will not go." Then he', 'She left. "I will not go."'),
        ('She left the house. "I will not go."', 'She left the house. "I will not go."'),
        ("He left. Then she saw that nobody was", "He left. Then she saw that nobody was"),
        ('He asked me twice if I go?\n"No," I', "He asked me twice if I go?"),
        ("He paid 3.50 for the book of Mr. B", "He paid 3.50 for the book of Mr. B"),
    ],
)
def test_a_completion_ends_with_a_whole_sentence_if_one_ends_late(text: str, whole: str) -> None:
    bundle, prompt = cast("Any", _Lettered()), completion._Prompt("a", [ord("a")])
    ids = list(map(ord, text))
    limit = round(len(whole) / 0.6) if len(whole) < len(text) else len(text)
    assert text[: completion._whole_length(bundle, prompt, ids, limit)] == whole
    if len(whole) < len(text):  # a sentence that ends earlier does not count
        assert completion._whole_length(bundle, prompt, ids, limit + 2) == len(text)


def test_the_default_completion_ends_with_a_whole_sentence_streamed_or_not() -> None:
    how = Settings(seed=4)
    found = complete("The old man looked at the letter", how=how, attended=False)
    assert re.search(r"[.!?][\"']?$", found.text)
    assert 60 <= found.tokens < 100
    pieces = stream_completion("The old man looked at the letter", how=how)
    said, record = [], None
    while record is None:
        try:
            said.append(next(pieces))
        except StopIteration as end:
            record = end.value
    assert "".join(said) == record.text == found.text
    assert record.score == pytest.approx(found.score)
    whole = complete("The old man looked at the letter", how=how, max_new_tokens=100).text
    assert whole.startswith(found.text)
    assert len(whole) > len(found.text)


def test_many_completions_keep_their_order(made: Path) -> None:
    texts = ["The cat", "Who sat on the mat? It was", "Nobody"]
    many = complete(texts, model=made / "gpt2", how=Greedy(), max_new_tokens=5, attended=False)
    assert [record.prompt for record in many] == texts
    alone = complete(texts[1], model=made / "gpt2", how=Greedy(), max_new_tokens=5, attended=False)
    assert many[1].text == alone.text


# ---------------------------------------------------------------------------------- records


def test_records_draw_themselves_and_escape_what_they_say(made: Path) -> None:
    found = complete("<b>The cat</b> sat", model=made / "gpt2", how=Greedy(), max_new_tokens=5)
    shown = found._repr_html_()
    assert "<svg" in shown
    assert "&lt;b&gt;The cat" in shown
    assert "<b>The" not in shown
    assert "new words down, earlier words across" in found.attended.picture().text(color="none")
    assert found.picture().drawing == found.attended.picture("What was attended to").drawing
    assert len(repr(found)) < 400  # words and weights are left out
    with pytest.raises(AttributeError):
        found.text = "something else"


def test_a_record_without_weights_has_no_picture(made: Path) -> None:
    record = complete("The cat", model=made / "gpt2", max_new_tokens=2, attended=False)
    with pytest.raises(InputError, match="This Completion has no attention weights"):
        record.picture()


def test_attention_between_words_prints_and_becomes_a_table() -> None:
    queries = tuple(f"word{number}\n" for number in range(25))
    weights = tuple((0.25, 0.5, 0.25 + number / 100) for number in range(25))
    between = WordAttention(queries, ("the", "cat", "the"), weights, "layer 0", ("new", "earlier"))
    assert repr(between) == "WordAttention of 25 x 3, new x earlier, layer 0"
    lines = str(between).splitlines()
    assert lines[1] == r"  word0\n   0.50 cat"
    assert lines[-1] == "  ... and 5 more"
    assert len(lines) == 22
    table = between.to_pandas()
    assert table.index.names == ["query", "key"]
    row = table.loc[(24, 2)]
    assert row["query_text"] == "word24\n"
    assert row["key_text"] == "the"
    assert row["weights"] == pytest.approx(0.49)


def test_a_model_is_loaded_once_and_again_when_its_files_change(tmp_path: Path) -> None:
    folder = folders.writer(tmp_path / "gpt2")
    one = open_bundle(folder)
    assert open_bundle(str(folder)).model is one.model
    folders.edit(folder, n_positions=64)
    file = folder / "config.json"
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 10**9))  # later, however coarse its clock
    assert open_bundle(folder).model is not one.model


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (lambda m: translate("  ", "fr", model=m / "translate"), "text is empty"),
        (lambda m: translate(3, "fr", model=m / "translate"), "not int"),
        (lambda m: translate("a", "fr", model=m / "gpt2"), "is a GPT2, which cannot translate"),
        (lambda m: translate("a", "fr", model=m / "translate", max_new_tokens=0), "from 1 on"),
        (lambda m: summarize("", model=m / "summarize"), "empty"),
        (lambda m: summarize(["a", " "], model=m / "summarize"), "empty"),
        (lambda m: summarize("a", model=m / "answer"), "cannot summarize"),
        (lambda m: answer("", "a", model=m / "answer"), "empty"),
        (lambda m: answer("a", " ", model=m / "answer"), "context is empty"),
        (lambda m: answer("a", "\u200b", model=m / "answer"), "no token that .*answer knows"),
        (lambda m: answer("who " * 60, "a", model=m / "answer"), "question is too long"),
        (lambda m: answer("a", "a", model=m / "answer", window=65), "8 to 64 tokens, not 65"),
        (lambda m: answer("a", "a", model=m / "gpt2"), "takes a BertAnswering"),
        (lambda m: answer("a", "a", model=m / "answer", batch=0), "from 1 on, but got 0"),
        (lambda m: answer("a", "a", model=m / "answer", threshold=math.nan), "a number, not nan"),
        (lambda m: answer("a", None, model=m / "answer"), "context is a text.*got None"),
        (lambda m: answer("a", [5], model=m / "answer"), "context is a text.*got 5"),
        (lambda m: translate(["a", 5], "fr", model=m / "translate"), "one of them is 5"),
        (lambda m: stream_completion(None, model=m / "gpt2"), "one text .* not NoneType"),
        (lambda m: translate("a", "fr", model=m / "translate", how="greedy"), "how must be Greedy"),
        (lambda m: translate("a", 5, model=m / "translate"), "not translate into 5"),
        (lambda m: translate("a", "ru", model=m / "translate"), r"'ru'.*offers deu, fra"),
        (lambda m: translate("a", model=m / "translate"), r"into deu, fra\. Choose one"),
        (lambda m: translate("a", "fr", source="en", model=m / "translate"), "leave out 'en'"),
        (lambda m: translate("a", "fr", model=m / "untagged"), "one language only"),
        (
            lambda m: complete("a", model=m / "gpt2", max_new_tokens=5000),
            r"5000 new .* smaller max_new",
        ),
        (lambda m: complete("a", model=m / "gpt2", device="bogus"), "no device 'bogus'"),
        (lambda m: complete("a", model=m / "gpt2", device="meta"), "no device 'meta'"),
        (
            lambda m: translate("a", "fr", model=m / "translate", how={"length_penalty": 1e30}),
            "from -10 to 10, but got 1e",
        ),
        (lambda m: complete("", model=m / "gpt2"), "empty"),
        (lambda m: complete(["a", ""], model=m / "gpt2"), "empty"),
        (lambda m: complete("the " * 50, model=m / "gpt2", max_new_tokens=20), "too long.*64 that"),
        (lambda m: stream_completion(" ", model=m / "gpt2"), "empty"),
        (lambda m: next(stream_completion("a", model=m / "gpt2", how=Beam(2))), "cannot stream"),
        (lambda m: complete("a", model=m / "nowhere"), "There is no folder"),
    ],
)
def test_what_makes_no_sense_is_refused(made: Path, task, words: str) -> None:
    with pytest.raises(InputError, match=words):
        task(made)


def test_settings_that_cannot_be_followed_are_the_checkpoints_fault(tmp_path: Path) -> None:
    folder = folders.translator(tmp_path / "translate")
    folders.edit(folder, "generation_config.json", num_beams="many")
    with pytest.raises(
        CheckpointError, match=r"settings in the model's files cannot be followed: .*many"
    ):
        translate("The cat.", "fr", model=folder)


# ------------------------------------------------------------------------------------- names


@pytest.fixture
def shelf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A shelf of shipped models with one on it, and no hub to ask."""
    folder = folders.translator(tmp_path / "shelf" / "translate-tiny")
    (folder / "README.md").write_text(folders.CARD)
    monkeypatch.setattr(cards, "SHIPPED", tmp_path / "shelf")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return folder


def test_a_shipped_model_is_found_by_its_name(
    shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    other = folders.writer(tmp_path / "translate-tiny")
    assert type(load("translate-tiny")).__name__ == "Transformer"
    assert type(load("./translate-tiny")).__name__ == "GPT2"
    assert type(load(other)).__name__ == "GPT2"
    assert Tokenizer.load("translate-tiny").id(">>fra<<") > 0
    assert (
        translate("The cat.", "fr", model="translate-tiny", max_new_tokens=3).model
        == "translate-tiny"
    )


@pytest.mark.parametrize("name", ["translat-tiny", "./translate-tini", "nobody/translate-tny"])
def test_an_unknown_name_is_answered_with_the_nearest(shelf: Path, name: str) -> None:
    with pytest.raises(InputError, match=r"Did you mean translate-tiny\?") as caught:
        load(name)
    assert isinstance(caught.value, CheckpointError)
    with pytest.raises(RegardError, match="Shipped models are translate-tiny"):
        load("/xyz/abc")


def test_a_part_of_how_a_model_decodes_is_changed_alone(made: Path) -> None:
    def resolve(files: dict, asked: dict | Settings | None, length: int | None = 9):
        return Settings.of_files(files).resolve(asked, length)

    own = {"num_beams": 8, "length_penalty": 0.6, "no_repeat_ngram_size": 2}
    for asked, expected in (
        ({"num_beams": 4}, Beam(4, 0.6, no_repeat_ngram_size=2)),
        (Settings(num_beams=4), Beam(4, 0.6, no_repeat_ngram_size=2)),
        ({"length_penalty": 2.0}, Beam(8, 2.0, no_repeat_ngram_size=2)),
        ({"num_beams": 1}, Greedy(2)),
        ({}, Beam(8, 0.6, no_repeat_ngram_size=2)),
        ({"min_length": 5}, Beam(8, 0.6, no_repeat_ngram_size=2, min_new_tokens=4)),
    ):
        assert resolve(own, asked) == (expected, 9)
    with pytest.raises(InputError, match=r"no decoding setting 'beams'\. Settings are do_sample"):
        resolve(own, {"beams": 5})
    with pytest.raises(InputError, match="Beams do not sample"):
        resolve(own, {"do_sample": True})
    assert resolve({**own, "max_new_tokens": 7}, {"max_length": 20}, None)[1] == 20
    with pytest.raises(CheckpointError, match=r"min_length must be a whole number .* '5'"):
        resolve({**own, "min_length": "5"}, None)
    with pytest.raises(InputError, match="A length penalty is for beam search"):
        resolve({"num_beams": 1}, {"length_penalty": 2.0})
    found = summarize(
        folders.LINES[0], model=made / "summarize", how={"num_beams": 2}, max_new_tokens=3
    )
    assert found.tokens


def test_a_text_goes_on_as_far_as_there_is_room(made: Path) -> None:
    short = complete("The cat", model=made / "gpt2", how=Greedy())
    assert 0 < short.tokens <= 100


class Stop(Exception):  # noqa: N818
    """What a check raises."""


@pytest.mark.parametrize(
    ("task", "calls"),
    [
        (lambda m, c: translate("The cat.", "fr", model=m / "translate", check=c), 3),
        (lambda m, c: summarize(folders.STORY, model=m / "summarize", check=c), 12),
        (lambda m, c: answer("Who?", folders.STORY, model=m / "answer", batch=1, check=c), 3),
        (lambda m, c: complete("The cat", model=m / "gpt2", check=c), 5),
        (lambda m, c: list(stream_completion("The cat", model=m / "xl", check=c)), 5),
    ],
    ids=["translate", "summarize", "answer", "complete", "stream_completion"],
)
def test_a_check_ends_every_task(made: Path, task, calls: int) -> None:
    count = 0

    def check() -> None:
        nonlocal count
        count += 1
        if count == calls:
            raise Stop

    with pytest.raises(Stop):
        task(made, check)
    assert count == calls


def test_several_documents_are_summarized_as_each_alone(made: Path) -> None:
    documents = [folders.STORY, folders.LINES[2], folders.STORY[::-1][:90]]
    options = {"model": made / "summarize", "max_new_tokens": 6}
    for join in (True, False):
        together = summarize(documents, join=join, **options)
        for document, record in zip(documents, together, strict=True):
            alone = summarize(document, join=join, **options)
            assert (record.text, record.method, record.parts) == (
                alone.text, alone.method, alone.parts,
            )  # fmt: skip
            assert record.tokens == alone.tokens
            assert record.attended.keys == alone.attended.keys


def test_typographic_apostrophes_are_read_as_the_model_learned_them() -> None:
    typed, typographic = translate(
        ["Let's just say he's wrong.", "Let\u2019s just say he\u2019s wrong."], "fr"
    )
    assert typed.text == typographic.text
    assert typographic.confidence == typed.confidence
