"""Decoding finds what transformers finds, token for token, and the same alone or in a batch."""

from __future__ import annotations

import math
import random
from dataclasses import asdict
from itertools import chain, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch
import transformers

from helpers.random_models import (
    FIVE,
    agree,
    padded,
    random_gpt2,
    random_marian,
    random_t5,
    random_xl,
)
from regard import GPT2, GPT2Config, InputError, Tokenizer, load
from regard.decoding.generation import generate, stream_tokens
from regard.decoding.state import State
from regard.decoding.strategies import Beam, Generated, Greedy, Sample
from regard.models.model import Model

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15], [7, 7], [30, 2, 8, 8, 1]]
LENGTH = 12
# Larger weights say more than one word, and the stop is one that some sequences come to.
MODELS = {
    "gpt2": (random_gpt2, 3, 28),
    "t5": (random_t5, 3, 36),
    "transformer": (random_marian, 2, 29),
}
STRATEGIES = [
    Greedy(),
    Greedy(no_repeat_ngram_size=2),
    Greedy(min_new_tokens=6),
    Beam(4),
    Beam(3, length_penalty=0.2),
    Beam(3, length_penalty=2.0),
    Beam(4, early_stopping=True),
    Beam(4, early_stopping="never"),
    Beam(4, num_return_sequences=3),
    Beam(4, no_repeat_ngram_size=2),
    Beam(4, min_new_tokens=6),
    Beam(1),
]


class Pair(NamedTuple):
    ours: Model
    theirs: transformers.PreTrainedModel
    stop: int


def pair_of(name: str, folder: Path) -> Pair:
    """Our model and that of transformers, with the same weights."""
    make, factor, stop = MODELS[name]
    reference = make()
    with torch.no_grad():
        for parameter in reference.parameters():
            if parameter.dim() == 2 and parameter.requires_grad:
                parameter.mul_(factor)
    reference.save_pretrained(folder)
    return Pair(load(folder), reference, stop)


@pytest.fixture(params=MODELS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    return pair_of(request.param, tmp_path)


@pytest.fixture(params=[*MODELS, "transformer-xl"])
def decoder(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Model, int]:
    """Our model of each architecture, and its stop token."""
    if request.param == "transformer-xl":
        return random_xl(vocabulary=40), 29
    model, _, stop = pair_of(request.param, tmp_path)
    return model, stop


def theirs(
    pair: Pair, how: Greedy | Beam, prompts: list[list[int]] = PROMPTS
) -> list[list[list[int]]]:
    """What transformers generates: per prompt, per sequence, without prompt, stop and padding."""
    _, reference, stop = pair
    causal = not reference.config.is_encoder_decoder
    if causal and how.no_repeat_ngram_size and len(prompts) > 1:  # there, padding counts as words
        return [found for prompt in prompts for found in theirs(pair, how, [prompt])]
    ids, _, mask = padded(prompts, "left" if causal else "right", 0)
    out = reference.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=LENGTH,
        do_sample=False,
        eos_token_id=stop,
        pad_token_id=stop,
        **asdict(how),
    )
    out = out[:, ids.shape[1] if causal else 1 :].tolist()
    rows = [row[: row.index(stop)] if stop in row else row for row in out]
    each = len(rows) // len(prompts)
    return [rows[start : start + each] for start in range(0, len(rows), each)]


def ids_of(found: list[list[Generated]]) -> list[list[list[int]]]:
    return [[output.ids for output in outputs] for outputs in found]


@pytest.mark.parametrize("how", STRATEGIES)
def test_decoding_is_that_of_transformers(pair: Pair, how: Greedy | Beam) -> None:
    found = ids_of(generate(pair.ours, PROMPTS, how, max_new_tokens=LENGTH, stop=[pair.stop]))
    assert found == theirs(pair, how)
    lengths = {len(ids) for [ids, *_] in found}
    assert min(lengths) >= how.min_new_tokens
    if FIVE and how == Greedy():  # before, weights are drawn otherwise
        assert len(lengths) > 1


def many(count: int, vocabulary: int, longest: int = 9) -> list[list[int]]:
    """Prompts of all lengths."""
    rng = random.Random(1)
    return [
        [rng.randrange(1, vocabulary) for _ in range(rng.randint(1, longest))] for _ in range(count)
    ]


def alone(model, prompts: list[list[int]], how, **options: Any) -> list[list[Generated]]:
    """What becomes of each prompt by itself."""
    return [generate(model, [prompt], how, **options)[0] for prompt in prompts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "how",
    [
        Greedy(),
        Greedy(no_repeat_ngram_size=1),  # where no token comes twice, a stop does, sooner or later
        Sample(seed=4, temperature=3.0),
        Beam(3, num_return_sequences=2, no_repeat_ngram_size=1),
    ],
)
def test_a_prompt_fares_the_same_alone_or_in_any_batch(decoder, how) -> None:
    model, stop = decoder
    prompts = many(16, 38)
    options = {"max_new_tokens": LENGTH, "stop": [stop, 3, 17]}
    expected = alone(model, prompts, how, **options)
    assert how == Greedy() or len({len(ids) for [ids, *_] in ids_of(expected)}) > 1
    for sizes in ({}, {"batch": 3}, {"batch": 7}, {"tokens": 30}):
        found = generate(model, prompts, how, **options, **sizes)
        assert ids_of(found) == ids_of(expected)
        for one, other in zip(chain(*found), chain(*expected), strict=True):
            assert one.score == pytest.approx(other.score, rel=1e-4)
            assert one.stopped == other.stopped


def rows_of_steps(model) -> list[int]:
    """The number of rows of each step that a model will take."""
    rows, step = list[int](), model.step
    model.step = lambda ids, state: rows.append(len(ids)) or step(ids, state)
    return rows


def test_places_are_taken_as_soon_as_they_are_free(pair) -> None:
    model, _, stop = pair
    prompts = many(40, 38)
    rows, how = rows_of_steps(model), Greedy(no_repeat_ngram_size=1)
    found = generate(model, prompts, how, max_new_tokens=LENGTH, stop=[stop, 3, 17], batch=8)
    # Each prompt is in one step for each of its tokens, and most steps are full.
    work = sum(len(output.ids) + output.stopped for [output] in found)
    assert sum(rows) == work
    assert 8 * rows.count(8) > 0.8 * work


def test_a_budget_of_tokens_makes_batches_of_short_prompts_larger() -> None:
    dice = Dice([0.9, 0.1])
    rows = rows_of_steps(dice)
    generate(dice, [[1] * 10] * 4 + [[1]] * 40, max_new_tokens=3, batch=16, tokens=20)
    assert max(rows) == 16
    assert rows[0] == 2


def test_a_sequence_that_is_done_comes_to_no_last_position() -> None:
    """The longest prompt stops at once; the others go on as far as they could alone."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocabulary=20, length=24, dim=16, depth=2, heads=2, begin_token=None, end_token=None
    )
    model = GPT2(config).eval()
    with torch.no_grad():
        model.tokens.weight.mul_(40)
    longest = [(3 * n) % 20 for n in range(20)]
    [[[stop]]] = ids_of(generate(model, [longest], max_new_tokens=1))
    # All others go on to the end, so that the longest, which is done, is not worth removing.
    prompts = many(60, 20, longest=6)
    each = zip(prompts, ids_of(alone(model, prompts, None, max_new_tokens=16)), strict=True)
    going = [(prompt, ids) for prompt, [ids] in each if stop not in ids][:15]
    prompts = [longest, *(prompt for prompt, _ in going)]
    found = ids_of(generate(model, prompts, max_new_tokens=16, stop=[stop]))
    assert found == [[[]], *([ids] for _, ids in going)]


@torch.inference_mode()
@pytest.mark.parametrize("beams", [1, 3])
def test_a_longer_prompt_finds_a_place_too(pair, beams: int) -> None:
    """Some steps after others began, a prompt and a source longer than theirs take a place."""
    model = pair[0]

    def run(state, ids: torch.Tensor, steps: int) -> torch.Tensor:
        for step in range(steps):
            logits = model.step((ids + step).repeat_interleave(state.beams, 0), state)
        return logits.view(len(ids), state.beams, -1)

    def started(prompts: list[list[int]], beams: int = 1) -> State:
        ids, state = model.start_decoding(prompts)
        model.step(ids, state)
        state.spread(beams)
        return state

    longer = [list(range(20, 34)), [5, 6]]
    state = started([[1, 2], [3, 4], [8, 9]], beams)
    run(state, torch.tensor([[4], [5], [6]]), 2)
    others = started(longer, beams)
    state.place(torch.tensor([2]), others, torch.tensor([0]))
    state.place(torch.tensor([0]), others, torch.tensor([1]))
    found = run(state, torch.tensor([[12], [11], [10]]), 3)
    for row, prompt, token in ((2, longer[0], 10), (0, longer[1], 12)):
        expected = run(started([prompt]), torch.tensor([[token]]), 3)[0, 0]
        for beam in range(beams):
            agree(found[row, beam], expected)
    by_itself = started([[3, 4]])
    run(by_itself, torch.tensor([[5]]), 2)
    agree(found[1, 0], run(by_itself, torch.tensor([[11]]), 3)[0, 0])


@pytest.mark.slow
@pytest.mark.parametrize("how", [Greedy(), Beam(4)])
@pytest.mark.parametrize("name", ["translate", "books-gpt2"])
def test_shipped_models_fare_the_same_alone_or_in_a_batch(name: str, how) -> None:
    model, text = load(name), Tokenizer.load(name)
    lines = [
        "The cat sat on the mat.",
        "I have seen the old house at the end of the road, and nobody lives there any more.",
        "Yes.",
        "Where are you going so late at night?",
        "Come in!",
    ]
    tag, end = ">>fra<< " if name == "translate" else "", model.config.end_token
    prompts = [text.encode(tag + line).ids for line in lines]
    stop = [text.encode(".", special=False).ids[-1], *(() if end is None else (end,))]
    options = {"max_new_tokens": 24, "stop": stop}
    expected = ids_of(alone(model, prompts, how, **options))
    assert ids_of(generate(model, prompts, how, batch=3, **options)) == expected


def log_probabilities(model, prompt: list[int], ids: list[int]) -> list[float]:
    """The log-probability of each of ``ids``, one whole pass at a time."""
    found = []
    with torch.no_grad():
        for index, token in enumerate(ids):
            first, state = model.start_decoding([prompt])
            before = torch.tensor([ids[:index]], dtype=torch.long)
            logits = model.step(torch.cat((first, before), dim=1), state)
            found.append(float(logits[0].log_softmax(-1)[token]))
    return found


@pytest.mark.parametrize("how", [Greedy(), Beam(3, length_penalty=0.7), Sample(seed=1)])
def test_scores_are_sums_of_log_probabilities(pair, how) -> None:
    model, _, stop = pair
    found = generate(model, PROMPTS, how, max_new_tokens=6, stop=[stop])
    for prompt, [output] in zip(PROMPTS, found, strict=True):
        ids = [*output.ids, stop] if output.stopped else output.ids
        expected = sum(log_probabilities(model, prompt, ids))
        if isinstance(how, Beam):
            expected /= len(ids) ** how.length_penalty
        assert output.score == pytest.approx(expected, rel=1e-4)


def test_streaming_gives_the_same_tokens(pair) -> None:
    model, _, stop = pair
    options = {"max_new_tokens": LENGTH, "stop": [stop]}
    for how in (Greedy(), Greedy(no_repeat_ngram_size=2), Sample(seed=5)):
        [[whole]] = generate(model, PROMPTS[:1], how, **options)
        assert list(stream_tokens(model, PROMPTS[0], how, **options)) == whole.ids


class Dice:
    """A model that says the same at every step, whatever went before."""

    def __init__(self, chances: list[float]) -> None:
        self.logits = torch.tensor(chances).log()

    def start_decoding(self, prompts, room: int = 0):
        return torch.zeros(len(prompts), 1, dtype=torch.long), State(0)

    def step(self, ids: torch.Tensor, state: State) -> torch.Tensor:
        return self.logits.expand(len(ids), -1)


def drawn(how: Sample, chances: list[float]) -> list[float]:
    """How often each token comes in many draws."""
    [[output]] = generate(Dice(chances), [[0]], how, max_new_tokens=2000)
    return [output.ids.count(token) / 2000 for token in range(len(chances))]


@pytest.mark.slow
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
    assert drawn(Sample(temperature=1e-40), chances) == [0, 1, 0, 0]
    assert drawn(Sample(top_p=1e-300), chances) == [0, 1, 0, 0]


def test_top_p_keeps_the_fewest_tokens_that_reach_it() -> None:
    shares = drawn(Sample(top_p=0.5), [0.25] * 4)
    assert min(shares[:2]) > 0
    assert shares[2:] == [0, 0]


@pytest.mark.parametrize(
    "how",
    [
        Greedy(no_repeat_ngram_size=1),
        Sample(no_repeat_ngram_size=1),
        Beam(2, no_repeat_ngram_size=1),
    ],
)
def test_where_all_would_repeat_a_sequence_ends(how: Greedy | Sample | Beam) -> None:
    [[output]] = generate(Dice([0.4, 0.3, 0.3]), [[0]], how, max_new_tokens=9)
    assert sorted(output.ids) == [1, 2]  # it began with 0
    assert math.isfinite(output.score)
    if not isinstance(how, Beam):
        assert list(stream_tokens(Dice([0.4, 0.3, 0.3]), [0], how, max_new_tokens=9)) == output.ids


@pytest.mark.parametrize("how", [Greedy(), Sample(), Beam(2)])
def test_scores_that_are_no_numbers_are_told(how: Greedy | Sample) -> None:
    with pytest.raises(InputError, match="NaN"):
        generate(Dice([math.nan, 0.5]), [[0]], how, max_new_tokens=3)


def test_what_stops_may_be_a_tensor() -> None:
    [[output]] = generate(Dice([0.4, 0.6]), [[0]], max_new_tokens=3, stop=torch.tensor([1]))
    assert output.stopped


def test_beam_search_finds_the_best_of_all_sequences() -> None:
    """With as many beams as there are sequences nothing is pruned: exhaustive search agrees."""
    rng = random.Random(0)
    chances = [rng.random() for _ in range(4)]
    chances = [chance / sum(chances) for chance in chances]
    [outputs] = generate(
        Dice(chances),
        [[0]],
        Beam(64, num_return_sequences=5, length_penalty=0.0, early_stopping="never"),
        max_new_tokens=3,
        stop=[3],
    )
    logs = torch.tensor(chances).log().tolist()
    scores: dict[tuple[int, ...], float] = {}
    for ids in product(range(4), repeat=3):
        ended = ids[: ids.index(3) + 1] if 3 in ids else ids
        scores[ended] = sum(logs[token] for token in ended)
    expected = sorted(scores.values(), reverse=True)[:5]
    assert [output.score for output in outputs] == pytest.approx(expected, rel=1e-5)


def test_no_prompts_give_no_outputs() -> None:
    assert generate(Dice([0.5, 0.5]), [], max_new_tokens=3) == []


def test_numbers_may_be_numpy_s() -> None:
    how = Sample(temperature=numpy.float32(0.5), top_k=numpy.int64(2), seed=numpy.int64(3))
    plain = Sample(temperature=0.5, top_k=2, seed=3)
    model = Dice([0.4, 0.3, 0.3])
    assert generate(model, [[0]], how, max_new_tokens=9) == generate(
        model, [[0]], plain, max_new_tokens=9
    )
    Beam(length_penalty=numpy.float32(1))


def test_what_makes_no_sense_is_refused() -> None:
    wrong: dict[type, dict[str, tuple[object, ...]]] = {
        Greedy: {"no_repeat_ngram_size": (-1,)},
        Sample: {
            "temperature": (0, "1", 10**400), "top_p": (0, None), "top_k": (-1,),
            "seed": (1.5, 2**64),
        },
        Beam: {
            "num_beams": (0,), "num_return_sequences": (5, None), "early_stopping": ("often",),
            "length_penalty": (-math.inf, None, 1e30, -10.5),
        },
    }  # fmt: skip
    for strategy, fields in wrong.items():
        for name, values in fields.items():
            for value in values:
                with pytest.raises(InputError, match=rf"{strategy.__name__}\({name}=...\)"):
                    strategy(**{name: value})
    good = {"prompts": [[0]], "how": None, "max_new_tokens": 1}
    for name, values in {
        "prompts": (["hello"], [1, 2], [[0.5]], None),
        "how": ("greedy", {"beams": 2}),
        "max_new_tokens": (0, True),
        "batch": (0,),
        "stop": ("ab", 5),
    }.items():
        for value in values:
            with pytest.raises(InputError, match=name[1:]):
                generate(Dice([1.0]), **good | {name: value})


def test_decoding_does_not_use_cudnn_whose_plans_are_for_one_shape() -> None:
    model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=1, heads=2)).eval()
    used: list[bool] = []
    step = model.step

    def watched(ids: torch.Tensor, state: object) -> torch.Tensor:
        used.append(torch.backends.cuda.cudnn_sdp_enabled())
        return step(ids, state)

    model.step = watched  # type: ignore[method-assign]
    before = torch.backends.cuda.cudnn_sdp_enabled()
    generate(model, [[1, 2]], max_new_tokens=2)
    list(stream_tokens(model, [1, 2], max_new_tokens=2))
    assert used == [False] * len(used)
    assert len(used) >= 4
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
