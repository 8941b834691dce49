"""Decoding finds what transformers finds, token for token, and the same alone or in a batch."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

import test_models_gpt2
import test_models_t5
import test_models_transformer
from regard import InputError, load
from regard.decoding import Beam, Greedy, Output, Sample, generate, stream
from test_models_transformer_xl import IDS, tiny
from tiny import padded

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15], [7, 7], [30, 2, 8, 8, 1]]
LENGTH = 12
# Larger weights say more than one word, and the stop is one that some sequences come to.
MODELS = {
    "gpt2": (test_models_gpt2.theirs, 3, 28),
    "t5": (test_models_t5.theirs, 3, 36),
    "transformer": (test_models_transformer.theirs, 2, 29),
}
BEAMS = {
    "plain": (Beam(4), {}),
    "short": (Beam(3, length_penalty=0.2), {"length_penalty": 0.2}),
    "long": (Beam(3, length_penalty=2.0), {"length_penalty": 2.0}),
    "early": (Beam(4, early=True), {"early_stopping": True}),
    "never": (Beam(4, early="never"), {"early_stopping": "never"}),
    "three": (Beam(4, best=3), {"num_return_sequences": 3}),
    "no repeats": (Beam(4, no_repeat=2), {"no_repeat_ngram_size": 2}),
    "one": (Beam(1), {}),
}


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path: Path):
    """Our model, theirs, the stop token, and whether prompts come before what is generated."""
    make, factor, stop = MODELS[request.param]
    reference = make()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 2 and parameter.requires_grad:
                parameter.mul_(factor)
    reference.save_pretrained(tmp_path)
    return load(tmp_path), reference, stop, request.param == "gpt2"


def theirs(pair, options: dict[str, Any]) -> list[list[list[int]]]:
    """What transformers generates: per prompt, per sequence, without prompt, stop and padding."""
    causal = pair[3]
    if causal and "no_repeat_ngram_size" in options:  # there, padding counts as words
        return [found for prompt in PROMPTS for found in batch_of_theirs(pair, [prompt], options)]
    return batch_of_theirs(pair, PROMPTS, options)


def batch_of_theirs(
    pair, prompts: list[list[int]], options: dict[str, Any]
) -> list[list[list[int]]]:
    _, reference, stop, causal = pair
    ids, _, mask = padded(prompts, "left" if causal else "right", 0)
    out = reference.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=stop,
        **options,
    )
    out = out[:, ids.shape[1] if causal else 1 :].tolist()
    rows = [row[: row.index(stop)] if stop in row else row for row in out]
    each = options.get("num_return_sequences", 1)
    return [rows[start : start + each] for start in range(0, len(rows), each)]


def ids_of(found: list[list[Output]]) -> list[list[list[int]]]:
    return [[output.ids for output in outputs] for outputs in found]


def test_greedy_is_that_of_transformers(pair) -> None:
    model, _, stop, _ = pair
    found = generate(model, PROMPTS, length=LENGTH, stop=[stop])
    assert ids_of(found) == theirs(pair, {})
    assert len({len(ids) for [ids] in ids_of(found)}) > 1


def test_greedy_without_repeats_is_that_of_transformers(pair) -> None:
    model, _, stop, _ = pair
    found = generate(model, PROMPTS, Greedy(no_repeat=2), length=LENGTH, stop=[stop])
    assert ids_of(found) == theirs(pair, {"no_repeat_ngram_size": 2})


@pytest.mark.parametrize("name", BEAMS)
def test_beam_search_is_that_of_transformers(pair, name: str) -> None:
    model, _, stop, _ = pair
    how, options = BEAMS[name]
    found = generate(model, PROMPTS, how, length=LENGTH, stop=[stop])
    assert ids_of(found) == theirs(pair, {"num_beams": how.size, **options})


@pytest.mark.parametrize(
    "how", [Greedy(), Greedy(no_repeat=2), Sample(seed=3, top_k=20), Beam(3, best=2, no_repeat=3)]
)
def test_a_prompt_fares_the_same_alone_or_in_any_batch(pair, how) -> None:
    model, _, stop, _ = pair
    together = generate(model, PROMPTS, how, length=LENGTH, stop=[stop])
    for batch in (1, 2, 3):
        again = generate(model, PROMPTS, how, length=LENGTH, stop=[stop], batch=batch)
        assert ids_of(again) == ids_of(together)
    for prompt, expected in zip(PROMPTS, together, strict=True):
        [alone] = generate(model, [prompt], how, length=LENGTH, stop=[stop])
        assert ids_of([alone]) == ids_of([expected])
        for one, other in zip(alone, expected, strict=True):
            assert one.score == pytest.approx(other.score, rel=1e-4)
            assert one.stopped == other.stopped


def log_probabilities(model, prompt: list[int], ids: list[int]) -> list[float]:
    """The log-probability of each of ``ids``, one whole pass at a time."""
    found = []
    with torch.no_grad():
        for index, token in enumerate(ids):
            first, state = model.begin([prompt])
            before = torch.tensor([ids[:index]], dtype=torch.long)
            logits = model.step(torch.cat((first, before), dim=1), state)
            found.append(float(logits[0].log_softmax(-1)[token]))
    return found


@pytest.mark.parametrize("how", [Greedy(), Beam(3, length_penalty=0.7), Sample(seed=1)])
def test_scores_are_sums_of_log_probabilities(pair, how) -> None:
    model, _, stop, _ = pair
    for prompt, [output] in zip(
        PROMPTS, generate(model, PROMPTS, how, length=6, stop=[stop]), strict=True
    ):
        ids = [*output.ids, stop] if output.stopped else output.ids
        expected = sum(log_probabilities(model, prompt, ids))
        if isinstance(how, Beam):
            expected /= len(ids) ** how.length_penalty
        assert output.score == pytest.approx(expected, rel=1e-4)


def test_streaming_gives_the_same_tokens(pair) -> None:
    model, _, stop, _ = pair
    for how in (Greedy(), Greedy(no_repeat=2), Sample(seed=5)):
        [[whole]] = generate(model, PROMPTS[:1], how, length=LENGTH, stop=[stop])
        assert list(stream(model, PROMPTS[0], how, length=LENGTH, stop=[stop])) == whole.ids


def test_the_adaptive_model_decodes_too() -> None:
    model = tiny()
    prompts = [IDS[:5], IDS[5:7], IDS[3:4]]
    for how in (Greedy(), Beam(3, best=2), Sample(seed=2)):
        together = generate(model, prompts, how, length=9, stop=[4])
        for prompt, expected in zip(prompts, together, strict=True):
            assert ids_of(generate(model, [prompt], how, length=9, stop=[4])) == ids_of([expected])


class Dice:
    """A model that says the same at every step, whatever went before."""

    def __init__(self, chances: list[float]) -> None:
        self.logits = torch.tensor(chances).log()

    class Nothing:
        pads = None

        def spread(self, beams: int) -> None: ...

        def follow(self, origins: torch.Tensor) -> None: ...

        def keep(self, sentences: torch.Tensor) -> None: ...

    def begin(self, prompts, room: int = 0):
        return torch.zeros(len(prompts), 1, dtype=torch.long), self.Nothing()

    def step(self, ids: torch.Tensor, state: Nothing) -> torch.Tensor:
        return self.logits.expand(len(ids), -1)


def drawn(how: Sample, chances: list[float]) -> list[float]:
    """How often each token comes in many draws."""
    [[output]] = generate(Dice(chances), [[0]], how, length=2000)
    return [output.ids.count(token) / 2000 for token in range(len(chances))]


def test_samples_come_as_often_as_they_should() -> None:
    chances = [0.1, 0.4, 0.2, 0.3]
    assert drawn(Sample(), chances) == pytest.approx(chances, abs=0.05)
    assert drawn(Sample(top_k=2), chances) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.05)
    assert drawn(Sample(top_p=0.6), chances) == pytest.approx([0, 4 / 7, 0, 3 / 7], abs=0.05)
    assert drawn(Sample(top_p=0.05), chances) == [0, 1, 0, 0]
    warm = [chance**0.5 for chance in chances]
    expected = [chance / sum(warm) for chance in warm]
    assert drawn(Sample(temperature=2.0), chances) == pytest.approx(expected, abs=0.05)
    assert drawn(Sample(temperature=1e-3), chances) == [0, 1, 0, 0]


def test_beam_search_finds_the_best_of_all_sequences() -> None:
    """With as many beams as there are sequences nothing is pruned: exhaustive search agrees."""
    rng = random.Random(0)
    chances = [rng.random() for _ in range(4)]
    chances = [chance / sum(chances) for chance in chances]
    [outputs] = generate(
        Dice(chances),
        [[0]],
        Beam(64, best=5, length_penalty=0.0, early="never"),
        length=3,
        stop=[3],
    )
    scores: dict[tuple[int, ...], float] = {}

    def spread(ids: tuple[int, ...], score: float) -> None:
        logs = torch.tensor(chances).log().tolist()
        for token in range(4):
            if token == 3:
                scores[(*ids, 3)] = score + logs[token]
            elif len(ids) == 2:
                scores[(*ids, token)] = score + logs[token]
            else:
                spread((*ids, token), score + logs[token])

    spread((), 0.0)
    expected = sorted(scores.values(), reverse=True)[:5]
    assert [output.score for output in outputs] == pytest.approx(expected, rel=1e-5)


def test_no_prompts_give_no_outputs() -> None:
    assert generate(Dice([0.5, 0.5]), [], length=3) == []


def test_what_makes_no_sense_is_refused() -> None:
    for make in (
        lambda: Sample(temperature=0),
        lambda: Sample(top_p=0),
        lambda: Sample(top_k=-1),
        lambda: Beam(0),
        lambda: Beam(2, best=3),
        lambda: Beam(2, early="often"),
        lambda: Greedy(no_repeat=-1),
        lambda: generate(Dice([1.0]), [[0]], length=0),
        lambda: generate(Dice([1.0]), [[0]], length=1, batch=0),
    ):
        with pytest.raises(InputError):
            make()
