"""Layers arranged for the processor give the same numbers; int8 ones nearly, row by row."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from helpers.model_folders import minilm
from helpers.random_models import agree, of_five, random_gpt2, random_marian, random_t5, random_xl
from regard import InputError, TransformerXL, load
from regard.kernels.cpu import build
from regard.layers.linear import Quantized
from regard.models.bert import Bert
from regard.models.quantization import prepack, quantize

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15], [7, 7], [30, 2, 8, 8, 1]]
TWO = {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 47}
OWN = pytest.param("own output", marks=of_five("makes a decoder's table as large as the encoder's"))
MODELS = {
    "gpt2": random_gpt2,
    "t5": random_t5,
    "transformer": random_marian,
    "own output": lambda: random_marian(tie_word_embeddings=False, **TWO),
}


@pytest.fixture(params=["gpt2", "t5", "transformer", OWN])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    MODELS[request.param]().save_pretrained(tmp_path)
    return tmp_path


def scores(model) -> torch.Tensor:
    """What a model says first, and after one more token."""
    with torch.inference_mode():
        ids, state = model.start_decoding(PROMPTS, room=4)
        first = model.step(ids, state)
        return torch.stack((first, model.step(torch.full((len(PROMPTS), 1), 9), state)))


def test_arranged_layers_give_the_same_numbers(folder: Path) -> None:
    agree(scores(prepack(load(folder))), scores(load(folder)))


def test_int8_models_say_nearly_the_same(folder: Path) -> None:
    agree(scores(quantize(load(folder))), scores(load(folder)), tolerance=0.1)


def test_the_adaptive_model_can_be_both() -> None:
    ids = torch.tensor([[1, 2, 3, 29, 17, 8]])
    with torch.no_grad():
        expected = random_xl()(ids)
        for change, tolerance in ((prepack, 1e-5), (quantize, 0.1)):
            model = random_xl().eval()
            assert isinstance(model, TransformerXL)
            agree(change(model)(ids), expected, tolerance)


def test_a_trained_model_keeps_its_meaning_in_int8() -> None:
    """Sentence vectors of a real BERT point where they pointed."""
    ids = torch.tensor([[101, 1996, 4937, 2938, 2006, 1996, 13523, 1012, 102]])
    plain, small = (load(minilm(), model=Bert) for _ in range(2))
    quantize(small)
    with torch.no_grad():
        a, b = plain(ids).mean(1), small(ids).mean(1)
    assert torch.cosine_similarity(a, b).item() > 0.995


@pytest.mark.parametrize(("inputs", "outputs"), [(512, 512), (48, 1000), (512, 33), (1, 1)])
@pytest.mark.parametrize("bias", [True, False])
def test_int8_is_off_by_half_a_step_of_each_scale_at_most(
    inputs: int, outputs: int, bias: bool
) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(inputs, outputs, bias=bias)
    layer = Quantized(plain.weight, plain.bias)
    for rows in (1, 3, 4, 40):
        x = torch.randn(rows, inputs) * torch.logspace(-3, 3, rows)[:, None]
        with torch.no_grad():
            error = (layer(x) - plain(x)).abs()
        weight = plain.weight.detach()
        step_x, step_w = x.abs().amax(1) / 254, weight.abs().amax(1) / 254
        bound = step_x[:, None] * weight.abs().sum(1) + x.abs().sum(1)[:, None] * step_w
        bound = bound + inputs * step_x[:, None] * step_w
        assert (error <= bound * 1.001 + 1e-6).all()


def test_a_row_in_int8_does_not_depend_on_the_others() -> None:
    torch.manual_seed(0)
    for width in (64, 512):
        layer = Quantized(torch.randn(600, width), torch.randn(600))
        x = torch.randn(40, width) * torch.logspace(-4, 4, 40)[:, None]
        whole = layer(x)
        for rows in (slice(0, 1), slice(3, 7), slice(5, 25)):
            assert torch.equal(layer(x[rows]), whole[rows])
        assert torch.equal(layer(x.view(4, 10, width)), whole.view(4, 10, -1))


@pytest.mark.parametrize("place", [4, 18])  # in a whole vector, and after the last
def test_rows_of_zeros_give_the_bias_and_nan_stays_nan(place: int) -> None:
    layer = Quantized(torch.randn(20, 30), torch.arange(20.0))
    x = torch.randn(3, 30)
    x[0] = 0
    x[1, place] = torch.nan
    y = layer(x)
    assert y[0].tolist() == list(range(20))
    assert y[1].isnan().all()
    assert y[2].isfinite().all()


def test_tiny_rows_count_as_zeros_and_huge_ones_do_not_overflow() -> None:
    layer = Quantized(torch.randn(20, 30), torch.arange(20.0))
    assert layer(torch.full((1, 30), 1e-40))[0].tolist() == list(range(20))
    assert layer(torch.full((1, 30), 1e30)).isfinite().all()


def test_without_a_compiler_it_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random_gpt2().save_pretrained(tmp_path)
    monkeypatch.setattr(build, "library", lambda: "there is no C++ compiler.")
    with pytest.raises(InputError, match=r"cannot be built here: there is no C\+\+ compiler"):
        quantize(load(tmp_path))


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    random_gpt2().save_pretrained(tmp_path)
    with pytest.raises(InputError, match="eval"):
        quantize(load(tmp_path).train())
    with pytest.raises(InputError, match="float32 or bfloat16"):
        prepack(load(tmp_path, dtype=torch.float64))
    with pytest.raises(InputError, match="Save it before"):
        quantize(load(tmp_path)).save(tmp_path / "again")
