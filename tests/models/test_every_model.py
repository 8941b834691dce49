"""Every model gives the numbers of transformers, padded or not, whole or step by step, and trains.

What only one architecture does is in the file of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers.random_models import (
    FIVE,
    XL_SIZES,
    agree,
    of_five,
    padded,
    random_gpt2,
    random_marian,
    random_t5,
    real,
    same_files,
)
from regard import (
    GPT2,
    T5,
    Bert,
    BertConfig,
    BertMaskedLM,
    GPT2Config,
    T5Config,
    Transformer,
    TransformerConfig,
    TransformerXL,
    TransformerXLConfig,
    load,
)
from regard.decoding.state import State

TABLES = {"share_encoder_decoder_embeddings": False}
ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]
TARGETS = [[20, 21, 22], [23], [24, 25]]  # after the token that a decoder begins with


class Kind(NamedTuple):
    """An architecture of transformers, ours, and the ids that the one it has been given means."""

    random: Callable[..., nn.Module]
    ours: type
    filler: int = 0
    start: int | None = None  # of a decoder with an encoder
    sides: tuple[str, ...] = ("left", "right")  # on which transformers knows padding


GPT = Kind(random_gpt2, GPT2)
T_5 = Kind(random_t5, T5, start=0)
MARIAN = Kind(random_marian, Transformer, filler=39, start=39, sides=("right",))
VARIANTS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "gpt2": (GPT, {}),
    "gpt2, inner": (GPT, {"n_inner": 20}),
    "gpt2, by layer": (GPT, {"scale_attn_by_inverse_layer_idx": True}),
    "gpt2, relu": (GPT, {"activation_function": "relu"}),
    "t5 1.0": (T_5, {}),
    "t5 1.1": (T_5, {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False}),
    "t5, gated silu": (T_5, {"feed_forward_proj": "gated-silu"}),
    "t5, shallow decoder": (T_5, {"num_decoder_layers": 1}),
    "t5, few buckets": (
        T_5, {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12}),
    "t5, odd halves": (
        T_5, {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 12}),
    "marian": (MARIAN, {}),
    "marian, scaled, swish": (MARIAN, {"scale_embedding": True, "activation_function": "swish"}),
    "marian, uneven": (
        MARIAN, {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 20}),
    "marian, two vocabularies": (MARIAN, TABLES | {"decoder_vocab_size": 47}),
    "marian, an output of its own": (
        MARIAN, TABLES | {"decoder_vocab_size": 47, "tie_word_embeddings": False}),
    "marian, two tables of one size": (MARIAN, TABLES),
}  # fmt: skip


@dataclass
class Pair:
    """A model of transformers, and ours from its files."""

    kind: Kind
    theirs: nn.Module
    ours: Any
    folder: Path

    def inputs(self, rows: int, length: int) -> tuple[Tensor, ...]:
        """Random ids, and where there is a decoder besides an encoder those of its target."""
        ids = torch.randint(40, (rows, length))
        return (ids,) if self.kind.start is None else (ids, torch.randint(40, (rows, 5)))

    def expected(self, *inputs: Tensor, model: nn.Module | None = None) -> Tensor:
        names = ("input_ids", "decoder_input_ids")
        return (model or self.theirs)(**dict(zip(names, inputs, strict=False))).logits


@pytest.fixture(
    params=[
        pytest.param(name, marks=of_five("makes a decoder's table as large as the encoder's"))
        if "decoder_vocab_size" in changes
        else name
        for name, (_, changes) in VARIANTS.items()
    ]
)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    kind, changes = VARIANTS[request.param]
    theirs = kind.random(**changes)
    theirs.save_pretrained(tmp_path)
    if kind is T_5 and theirs.lm_head.weight is not theirs.shared.weight:
        # As real checkpoints are: an untied head is in the file, and the config says so.
        tensors = load_file(tmp_path / "model.safetensors")
        tensors["lm_head.weight"] = theirs.lm_head.weight.detach()
        save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    if kind is GPT and not FIVE:  # there, other ways leave out how a layer scales its scores
        theirs.set_attn_implementation("eager")
    ours = load(tmp_path)
    assert isinstance(ours, kind.ours)
    return Pair(kind, theirs, ours, tmp_path)


@torch.no_grad()
def test_logits_are_those_of_transformers(pair: Pair) -> None:
    inputs = pair.inputs(3, 30)
    agree(pair.ours(*inputs), pair.expected(*inputs))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(pair: Pair, side: str) -> None:
    kind = pair.kind
    ids, padding, mask = padded(ROWS, side, kind.filler)
    targets = [[kind.start or 0, *row] for row in TARGETS]
    rows: list[list[int]] = ROWS
    if kind.start is None:
        found = pair.ours(ids, padding=padding)
        given = {"input_ids": ids, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
    else:
        rows = targets
        target, target_padding, target_mask = padded(targets, side, kind.filler)
        found = pair.ours(ids, target, padding=padding, target_padding=target_padding)
        given = {"input_ids": ids, "decoder_input_ids": target}
        given["decoder_attention_mask"] = target_mask
    expected = pair.theirs(attention_mask=mask, **given).logits
    for index, (row, out) in enumerate(zip(ROWS, targets, strict=True)):
        length = len(rows[index])
        alone = (torch.tensor([row]), torch.tensor([out]))[: 1 if kind.start is None else 2]
        agree(real(found, index, length, side), pair.ours(*alone)[0])
        if side in kind.sides:
            agree(real(found, index, length, side), real(expected, index, length, side))


@torch.no_grad()
def test_saved_by_us_is_what_transformers_saved(pair: Pair, tmp_path: Path) -> None:
    pair.ours.save(tmp_path / "ours")
    same_files(tmp_path / "ours", pair.folder)
    again = type(pair.theirs).from_pretrained(tmp_path / "ours").eval()
    again.set_attn_implementation(pair.theirs.config._attn_implementation)
    inputs = pair.inputs(2, 9)
    assert torch.equal(pair.expected(*inputs, model=again), pair.expected(*inputs))


@torch.no_grad()
def test_steps_from_prompts_of_unequal_length_are_those_of_each_alone(pair: Pair) -> None:
    ids, state = pair.ours.start_decoding(ROWS, room=8)
    more = torch.randint(40, (3, 6))
    if pair.kind.start is not None:
        assert ids.tolist() == [[pair.kind.start]] * 3
    steps = [pair.ours.step(ids, state)]
    steps += [pair.ours.step(part, state) for part in more.split(1, dim=1)]
    for index, row in enumerate(ROWS):
        if pair.kind.start is None:
            alone = pair.ours(torch.tensor([[*row, *more[index]]]))[0, len(row) - 1 :]
        else:
            target = torch.cat((ids[index], more[index]))
            alone = pair.ours(torch.tensor([row]), target[None])[0]
        agree(torch.stack([step[index] for step in steps]), alone)


@torch.no_grad()
@pytest.mark.parametrize("pair", ["gpt2", "gpt2, by layer"], indirect=True)
def test_pieces_of_any_length_are_all_at_once(pair: Pair) -> None:
    ids, state = torch.randint(40, (2, 9)), State(pair.ours.config.depth)
    pieces = [pair.ours(part, state=state) for part in ids.split([4, 1, 1, 3], dim=1)]
    agree(torch.cat(pieces, dim=1), pair.ours(ids))


# -------------------------------------------------------------------------------- training

MARIAN_SIZES = {"target_vocabulary": 45, "tied": False, "decoder_depth": 2, "inner": 24}
T5_SIZES = {"head_dim": 4, "inner": 24, "heads": 4}
TRAINED: dict[str, tuple[type, type, dict[str, Any]]] = {
    "bert": (BertMaskedLM, BertConfig, {"heads": 4, "inner": 24}),
    "gpt2": (GPT2, GPT2Config, {"length": 32, "heads": 4}),
    "t5 1.0": (T5, T5Config, T5_SIZES),
    "t5 1.1": (
        T5, T5Config, T5_SIZES | {"gated": True, "activation": "gelu_new", "tied": False}),
    "transformer": (Transformer, TransformerConfig, MARIAN_SIZES),
    "transformer-xl": (TransformerXL, TransformerXLConfig, XL_SIZES),
}  # fmt: skip


def trained(name: str, **changes: Any) -> tuple[Any, Callable[[], Tensor]]:
    """A model in training, and what is asked of it: its output for some ids, differentiable.

    Transformer-XL reads them in two segments, so that its memory is in use.
    """
    torch.manual_seed(0)
    model_class, config_class, sizes = TRAINED[name]
    sizes = {"vocabulary": 40, "dim": 16, "depth": 2} | sizes | changes
    model = model_class(config_class(**sizes)).train()
    source, target = torch.randint(30, (2, 9)), torch.randint(30, (2, 5))

    def output() -> Tensor:
        if model_class is TransformerXL:
            memories = model.remember()
            model(source, memories=memories)
            return model(target, memories=memories).square()
        if model_class is BertMaskedLM:
            return model(source, token_types=torch.arange(18).view(2, 9) % 2).logsumexp(-1)
        given = (source,) if model_class is GPT2 else (source, target)
        return model(*given).logsumexp(-1)

    return model, output


@pytest.mark.parametrize("name", TRAINED)
def test_training_drops_and_reaches_every_parameter(name: str) -> None:
    model, output = trained(name)
    assert not torch.equal(output(), output())
    output().sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", TRAINED)
def test_recomputing_gives_the_same_gradients(name: str) -> None:
    rates = ("dropout", "attention_dropout") if name in ("bert", "gpt2") else ("dropout",)
    model, output = trained(name, **dict.fromkeys(rates, 0.0))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        model.recompute(recompute)
        output().sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for parameter, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter], gradient)


@pytest.mark.parametrize(
    ("model", "config", "parameters"),
    [
        (Bert, BertConfig.base, 109_482_240),
        (Bert, BertConfig.large, 335_141_888),
        (GPT2, GPT2Config.small, 124_439_808),
        (GPT2, GPT2Config.medium, 354_823_168),
        (T5, T5Config.small, 60_506_624),
        (T5, T5Config.base, 222_903_552),
        (T5, T5Config.v1_1_small, 76_961_152),
        # The paper gives 65 and 213 million, of which the embedding of 37,000 varies.
        (Transformer, TransformerConfig.base, 63_000_000),
        (Transformer, TransformerConfig.big, 214_000_000),
        (TransformerXL, TransformerXLConfig.wt103, 285_000_000),
    ],
)
def test_presets_have_the_sizes_of_the_papers(
    model: type, config: Callable[[], Any], parameters: int
) -> None:
    with torch.device("meta"):
        count = sum(p.numel() for p in model(config()).parameters())
    assert count == parameters or round(count, -6) == parameters
