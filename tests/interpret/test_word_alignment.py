"""Words are put together from tokens, and the head named is the one that weighs what matters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from helpers.sine_models import TEXT, gpt2, t5, tokenizer, translator
from regard import InputError, See, Tokenizer, watch
from regard.interpret.looking import look
from regard.interpret.pooling import join, membership
from regard.interpret.word_alignment import align
from regard.text.words import Word, tokens_of, tokens_of_ids

SOURCE = tokenizer().encode("the cathouse sat, on the mat").ids
TARGET = [*tokenizer().encode("it was the dog").ids, 1]


# Words -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("the cat's mat, very-cold!", ["the", "cat's", "mat", ",", "very-cold", "!"]),
        ("  two  spaces\n(here)", ["two", "spaces", "(", "here", ")"]),
        ("日本 語", ["日", "本", "語"]),
        ("é̂tude", ["é̂tude"]),
    ],
)
@pytest.mark.parametrize("kind", ["bytes", "unigram", "wordpiece"])
def test_tokens_make_up_the_words_of_a_text(text: str, words: list[str], kind: str) -> None:
    lines = [text] * 9
    made = {
        "bytes": lambda: Tokenizer.train_bpe(lines, size=270),
        "unigram": lambda: Tokenizer.train_unigram(lines, size=60),
        "wordpiece": lambda: Tokenizer.train_wordpiece(lines, size=60, lowercase=False),
    }[kind]()
    found = tokens_of(made, text)
    real = [word for word in found.words if not word.special]
    labels = [word.label for word in real]
    if kind == "bytes" and text.startswith("日"):
        assert labels == ["日本", "語"]  # of which the first is one token
    elif kind != "wordpiece" or text != "é̂tude":  # BERT's signs over letters are gone
        assert labels == words
    places = [place for word in found.words for place in word.places]
    assert places == list(range(len(found)))


def test_words_are_found_in_what_was_written_too() -> None:
    ids = tokenizer().encode("the cathouse sat, very cold.").ids
    written = tokens_of_ids(tokenizer(), [*ids, 1])
    assert [word.label for word in written.words] == [
        "the", "cathouse", "sat", ",", "very", "cold", ".", "</s>",
    ]  # fmt: skip
    assert written.words[-1].special
    plain = tokens_of(tokenizer(), "the cathouse sat, very cold.")
    assert written.words[:-1] == plain.words


def test_letters_cut_in_the_middle_belong_to_their_word() -> None:
    text = "the né\u2019e 日x"
    ids = Tokenizer.train_bpe(["the"], size=260).encode(text).ids
    assert len(ids) > len(text)
    written = tokens_of_ids(Tokenizer.train_bpe(["the"], size=260), ids)
    real = [word.label for word in written.words if not word.special]
    assert real == ["the", "né\u2019e", "日", "x"]


def test_keys_are_added_up_and_queries_averaged() -> None:
    weights = torch.tensor([[0.1, 0.2, 0.7], [0.3, 0.3, 0.4]])
    queries, keys = [Word("a", (0, 1))], [Word("b", (0,)), Word("c", (1, 2))]
    joined = join(weights, membership(2, queries), membership(3, keys))
    torch.testing.assert_close(joined, torch.tensor([[0.2, 0.8]]))


# Alignment -------------------------------------------------------------------------------------


def likelihoods(model, source: list[int], target: list[int]) -> Tensor:
    inputs = torch.tensor([[0, *target[:-1]]])
    with torch.no_grad():
        logits = model(torch.tensor([source]), inputs)[0].log_softmax(-1)
    return logits[torch.arange(len(target)), torch.tensor(target)]


@pytest.mark.parametrize("make", [translator, t5])
def test_the_head_named_weighs_the_words_that_matter_most(make) -> None:
    model = make()
    found = align(model, tokenizer(), SOURCE, TARGET)
    assert found.source == ("the", "cathouse", "sat", ",", "on", "the", "mat")
    assert found.target == ("it", "was", "the", "dog")

    # What each source word matters to each target word, by leaving it out.
    words = [w for w in tokens_of_ids(tokenizer(), SOURCE).words if not w.special]
    targets = [w for w in tokens_of_ids(tokenizer(), TARGET).words if not w.special]
    whole = likelihoods(model, SOURCE, TARGET)
    effect = torch.zeros(len(targets), len(words), dtype=torch.float64)
    for s, word in enumerate(words):
        rest = [one for place, one in enumerate(SOURCE) if place not in word.places]
        lost = whole - likelihoods(model, rest, TARGET)
        effect[:, s] = torch.stack([lost[list(t.places)].sum() for t in targets])
    torch.testing.assert_close(found.effect.double(), effect, rtol=1e-4, atol=1e-5)

    # The heads' weights by words, as those are written and once they are read, and how much of
    # them lies where it matters.
    with torch.no_grad(), watch(model, See(weights=True)) as watched:
        model(torch.tensor([SOURCE]), torch.tensor([[0, *TARGET]]))
    crossing = [seen.weights[0] for name, seen in watched.calls if name.endswith("cross")]
    weights = torch.stack(crossing)
    counts = [t for t in range(len(targets)) if effect[t].max() > 0]
    by_step, scores = [], []
    for rows in (weights[:, :, :-1], weights[:, :, 1:]):
        summed = torch.stack([rows[..., word.places].sum(-1) for word in words], -1)
        joined = torch.stack([summed[..., word.places, :].mean(-2) for word in targets], -2)
        at_largest = [joined[..., t, int(effect[t].argmax())] for t in counts]
        by_step.append(joined)
        scores.append(torch.stack(at_largest, -1).mean(-1))
    table = torch.stack(scores)
    torch.testing.assert_close(found.scores.double(), table.amax(0), rtol=1e-4, atol=1e-5)
    way, layer, head = (int(one) for one in torch.unravel_index(table.argmax(), table.shape))
    assert (found.read, found.layer, found.head) == (bool(way), layer, head)
    best = by_step[way][layer, head]
    torch.testing.assert_close(found.weights.double(), best, rtol=1e-4, atol=1e-5)
    assert found.pairs[0] == ("it", found.source[int(best[0].argmax())])


def test_a_head_asked_for_is_shown_and_the_better_one_named() -> None:
    best = align(translator(), tokenizer(), SOURCE, TARGET)
    worst = divmod(int(best.scores.argmin()), best.scores.shape[1])
    other = align(translator(), tokenizer(), SOURCE, TARGET, layer=worst[0], head=worst[1])
    assert (other.layer, other.head) == worst
    said = " ".join(other.picture().text(width=100, color="none").split())
    assert f"Head {best.head} of layer {best.layer} does better" in said
    said = " ".join(best.picture().text(width=100, color="none").split())
    assert f"Head {best.head} of cross-attention layer {best.layer}, the best of 8" in said
    assert ("once each word is read" if best.read else "as each word is written") in said


def test_a_model_aligns_what_it_writes_itself() -> None:
    found = look(translator(), TEXT, tokenizer=tokenizer(), alignment=True)
    assert found.source == tuple(TEXT.split())
    assert found.weights.shape == (len(found.target), len(found.source))
    asked = look(
        translator(), TEXT, tokenizer=tokenizer(), alignment=True, target="the dog",
        layer="cross.1", head=2,
    )  # fmt: skip
    assert asked.target == ("the", "dog")
    assert (asked.layer, asked.head) == (1, 2)
    assert asked.to_dict()["scores"][1][2] == pytest.approx(asked.score)


def test_one_source_word_needs_no_leaving_out() -> None:
    found = align(translator(), tokenizer(), tokenizer().encode("cold").ids, TARGET)
    assert found.weights.shape == (4, 1)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: align(gpt2(), tokenizer(), SOURCE, TARGET), "no cross-attention"),
        (lambda: align(t5(), tokenizer(), SOURCE, [1]), "no word in the target"),
        (lambda: align(t5(), tokenizer(), SOURCE, TARGET, layer=1), "together"),
        (lambda: align(t5(), tokenizer(), SOURCE, TARGET, layer=9, head=0), "no head 0 in layer 9"),
        (lambda: align(t5(), tokenizer(), SOURCE * 60, TARGET), "Split it into sentences"),
        (
            lambda: look(
                t5(), TEXT, tokenizer=tokenizer(), target="a", alignment=True, layer="encoder.0",
                head=0,
            ),
            "by cross-attention, not by layer encoder.0",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_aligned_says_why(call, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()
