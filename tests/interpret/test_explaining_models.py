"""explain_model(): the numbers are those of the model's own run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from helpers.model_folders import minilm
from helpers.sine_models import TEXT, gpt2, hooked, t5, tokenizer, translator, xl
from regard import Causal, InputError, See, explain_model, watch
from regard.interpret.explaining.inputs import explain_options
from regard.interpret.runs import prepare_run

CASES: list[tuple[Any, str, dict[str, Any]]] = [
    (gpt2, "1", {}),
    (lambda: xl(memory=64), "0", {}),
    (t5, "encoder.1", {"target": "the mat"}),
    (t5, "decoder.1", {"target": "the mat was"}),
    (t5, "cross.0", {"target": "the mat was"}),
    (translator, "cross.1", {"target": "the mat was"}),
]


@pytest.mark.parametrize(("make", "layer", "extra"), CASES)
def test_every_number_is_the_models_own(make: Any, layer: str, extra: dict[str, Any]) -> None:
    model = make()
    trace = explain_model(model, TEXT, tokenizer=tokenizer(), layer=layer, head=1, **extra)
    assert trace.agreement.holds
    assert trace.agreement.difference < 1e-12  # float64
    assert str(trace.agreement).startswith("The model itself computes all of this at once")
    run = prepare_run(model, TEXT, tokenizer=tokenizer(), **extra)
    module = run.layer(layer).module
    with watch(module, See(weights=True)) as watched:
        run.forward(run.chunks[0])
    weights = watched.calls[0][1].weights
    torch.testing.assert_close(trace["A"][0], weights[0, 1])
    torch.testing.assert_close(trace["A"].sum(-1), torch.ones(1, len(trace.tokens)).double())
    assert trace["Z"].shape == (1, len(trace.tokens), module.head_dim)
    assert trace["C"].shape == (len(trace.tokens), module.heads * module.head_dim)
    first = module.head_dim  # head 1 fills the second part of what is joined
    torch.testing.assert_close(trace["C"][:, first : 2 * first], trace["Z"][0])
    assert trace.shown == ("head 1",)
    json.dumps(trace.to_dict())


def test_a_real_model_in_its_own_precision() -> None:
    trace = explain_model(minilm(), "The cat sat on the mat.", layer=0, head=2, word="sat")
    assert trace.agreement.holds
    assert trace["A"][0, 3, 2].item() == pytest.approx(1, abs=0.01)  # "sat" looks at "cat"
    text = " ".join(str(trace).split())
    for answer in (
        "Bert, layer 0, head 2: 9 tokens, 12 heads, queries and keys of 32 numbers",
        "sat is number 2938 of the vocabulary",
        "Three learned matrices, 384 × 384 each",
        "head 2 has columns 65 to 96",
        "Q = X W_Q + b_Q",
        "S_scaled = S / √d_k = S / √32 = S / 5.657",
        "without scaling",
        "none: S_masked = S_scaled",
        "over all keys they sum to 1",
        "C = concat(Z_0, …, Z_11) Y = C W_O + b_O",
        "Each head fills 32 of the 384 columns",
        "within the tolerance",
    ):
        assert answer in text, answer


@pytest.mark.slow
def test_masks_positions_and_scales_are_explained() -> None:
    def text(model: Any, layer: str, **extra: Any) -> str:
        shown = explain_model(model, TEXT, tokenizer=tokenizer(), layer=layer, **extra)
        return " ".join(str(shown).split())

    causal = text(gpt2(), "0")
    assert "S_masked = S_scaled where Causal() allows, else -∞" in causal
    assert "55 of 121 scores are removed in every head" in causal
    relative = text(t5(), "encoder.0", target="the mat")
    assert "S_scaled = S × 1" in relative
    assert "the learned matrices of this model keep scores small without it" in relative
    assert "a learned number for each bucket of distances" in relative
    assert "none: S_masked = S_scaled + B" in relative
    content = text(xl(memory=64), "1")
    assert "how well the query matches the embedding of its distance" in content
    assert "A learned vector u is added" in content
    across = text(t5(), "cross.0", target="the mat")
    assert "K = X_encoder W_K" in across
    assert "may look at the whole source" in across


def test_the_word_to_follow_is_the_last_by_default() -> None:
    assert explain_model(gpt2(), TEXT, tokenizer=tokenizer()).word == "cold"
    assert explain_model(gpt2(), TEXT, tokenizer=tokenizer(), word="mat").word == "mat"
    assert explain_model(minilm(), "The cat.").word == "."


@pytest.mark.parametrize(
    ("length", "text", "options", "message"),
    [
        (64, TEXT, {"layer": 5}, "no layer '5'"),
        (64, TEXT, {"head": 9}, "no head 9"),
        (64, TEXT, {"word": "catt"}, "Did you mean 'cat'"),
        (16, TEXT * 4, {}, "up to 16 tokens for this model"),
        (512, TEXT * 20, {}, "up to 128 tokens for this model"),
    ],
)
def test_what_a_model_does_not_have_is_refused(
    length: int, text: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        explain_model(gpt2(length), text, tokenizer=tokenizer(), **options)


def test_options_of_the_other_kind_are_refused() -> None:
    assert explain_options(model=True, head=0, word=None, heads=None) == {"head": 0}
    with pytest.raises(InputError, match=r"With a model, explain\(\) takes no heads and no mask"):
        explain_options(model=True, heads=2, mask=Causal(), layer=1)
    with pytest.raises(InputError, match="layer and target apply to a model: give the model, too"):
        explain_options(model=False, layer=0, target="the mat", heads=2)


def test_nothing_is_left_on_the_model() -> None:
    model = gpt2()
    explain_model(model, TEXT, tokenizer=tokenizer())
    assert not hooked(model)
