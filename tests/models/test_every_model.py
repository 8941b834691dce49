"""Every model gives the numbers of transformers, padded or not, whole or step by step, and trains.

What only one architecture does is in the file of its name.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from helpers.random_models import (
    FIVE,
    XL_SIZES,
    agree,
    of_five,
    padded,
    random_bert,
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
    BertAnswering,
    BertConfig,
    BertMaskedLM,
    GPT2Config,
    InputError,
    T5Config,
    Transformer,
    TransformerConfig,
    TransformerXL,
    TransformerXLConfig,
    load,
)
from regard.decoding.state import State

WEIGHTS = "model.safetensors"
TABLES = {"share_encoder_decoder_embeddings": False}
ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]
TARGETS = [[20, 21, 22], [23], [24, 25]]  # after the token that a decoder begins with
TYPES = [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1], [1]]
THEIR_NAMES = {"target": "decoder_input_ids", "token_types": "token_type_ids"}


class Kind(NamedTuple):
    """An architecture of transformers, and ours."""

    random: Callable[..., nn.Module]
    ours: type
    more: str = ""  # what it reads besides ids: "target" or "token_types"
    filler: int = 0
    start: int = 0  # the first token of a target
    sides: tuple[str, ...] = ("left", "right")  # on which transformers knows padding


GPT = Kind(random_gpt2, GPT2)
T_5 = Kind(random_t5, T5, "target")
MARIAN = Kind(random_marian, Transformer, "target", filler=39, start=39, sides=("right",))
VARIANTS: dict[str, tuple[Kind, dict[str, Any]]] = {
    "bert": (Kind(random_bert, Bert, "token_types"), {}),
    "bert, masked": (
        Kind(random_bert, BertMaskedLM, "token_types"), {"kind": transformers.BertForMaskedLM}),
    "bert, answering": (
        Kind(random_bert, BertAnswering, "token_types"),
        {"kind": transformers.BertForQuestionAnswering}),
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


class Pair(NamedTuple):
    """A model of transformers, and ours from its files."""

    kind: Kind
    theirs: nn.Module
    ours: Any
    folder: Path

    def inputs(self, rows: int, length: int) -> dict[str, Tensor]:
        """Random ids, and what the model reads besides."""
        more = {
            "target": torch.randint(40, (rows, 5)), "token_types": torch.randint(2, (rows, length)),
        }  # fmt: skip
        ids = {"ids": torch.randint(40, (rows, length))}
        return ids | {name: more[name] for name in more if name == self.kind.more}

    def found(self, ids: Tensor, **given: Any) -> Tensor:
        output = self.ours(ids, **given)
        return output if isinstance(output, Tensor) else torch.stack(output, dim=-1)

    def expected(self, ids: Tensor, model: nn.Module | None = None, **given: Tensor) -> Tensor:
        named = {THEIR_NAMES.get(name, name): tensor for name, tensor in given.items()}
        output = (model or self.theirs)(input_ids=ids, **named)
        if "start_logits" in output:
            return torch.stack((output.start_logits, output.end_logits), dim=-1)
        return output["logits" if "logits" in output else "last_hidden_state"]


PARAMS = [
    pytest.param(name, marks=of_five("makes a decoder's table as large as the encoder's"))
    if "decoder_vocab_size" in changes
    else name
    for name, (_, changes) in VARIANTS.items()
]


@pytest.fixture(params=PARAMS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> Pair:
    kind, changes = VARIANTS[request.param]
    theirs = kind.random(**changes)
    theirs.save_pretrained(tmp_path)
    if kind is T_5 and theirs.lm_head.weight is not theirs.shared.weight:
        # As real checkpoints are: an untied head is in the file, and the config says so.
        tensors = load_file(tmp_path / WEIGHTS) | {"lm_head.weight": theirs.lm_head.weight.detach()}
        save_file(tensors, tmp_path / WEIGHTS, {"format": "pt"})
    if kind is GPT and not FIVE:  # there, other ways leave out how a layer scales its scores
        theirs.set_attn_implementation("eager")
    ours = load(tmp_path)
    assert isinstance(ours, kind.ours)
    return Pair(kind, theirs, ours, tmp_path)


@torch.no_grad()
def test_logits_are_those_of_transformers(pair: Pair) -> None:
    inputs = pair.inputs(3, 30)
    agree(pair.found(**inputs), pair.expected(**inputs))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(pair: Pair, side: str) -> None:
    kind = pair.kind
    ids, padding, mask = padded(ROWS, side, kind.filler)
    ours: dict[str, Any] = {"padding": padding}
    theirs, rows, more = {"attention_mask": mask}, ROWS, TYPES
    if kind.more == "target":
        rows = more = [[kind.start, *row] for row in TARGETS]
        _, ours["target_padding"], theirs["decoder_attention_mask"] = padded(rows, side, 0)
    else:
        theirs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    besides = {kind.more: padded(more, side, kind.filler)[0]} if kind.more else {}
    found, expected = pair.found(ids, **ours, **besides), pair.expected(ids, **theirs, **besides)
    for index, (row, length) in enumerate(zip(ROWS, map(len, rows), strict=True)):
        alone = {name: torch.tensor([more[index]]) for name in besides}
        agree(real(found, index, length, side), pair.found(torch.tensor([row]), **alone)[0])
        if side in kind.sides:
            agree(real(found, index, length, side), real(expected, index, length, side))


@torch.no_grad()
def test_saved_by_us_is_what_transformers_saved(pair: Pair, tmp_path: Path) -> None:
    pair.ours.save(tmp_path / "ours")
    same_files(tmp_path / "ours", pair.folder)
    again = type(pair.theirs).from_pretrained(tmp_path / "ours").eval()
    again.set_attn_implementation(pair.theirs.config._attn_implementation)
    inputs = pair.inputs(2, 9)
    assert torch.equal(pair.expected(**inputs, model=again), pair.expected(**inputs))


def old_bert(tensors: dict[str, Tensor]) -> None:
    for kind, letter in (("weight", "gamma"), ("bias", "beta")):
        for key in [key for key in tensors if key.endswith(f"LayerNorm.{kind}")]:
            tensors[key.removesuffix(kind) + letter] = tensors.pop(key)
    tensors["bert.embeddings.position_ids"] = torch.arange(32)[None]
    tensors["bert.pooler.dense.weight"] = tensors["cls.seq_relationship.weight"] = torch.ones(2, 16)
    tensors["cls.predictions.decoder.weight"] = tensors["bert.embeddings.word_embeddings.weight"]


def old_gpt2(tensors: dict[str, Tensor]) -> None:
    for key in list(tensors):
        tensors[key.removeprefix("transformer.")] = tensors.pop(key)
    for index in range(3):
        tensors[f"h.{index}.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
        tensors[f"h.{index}.attn.masked_bias"] = torch.tensor(-1e4)
    tensors["lm_head.weight"] = tensors["wte.weight"]


def old_t5(tensors: dict[str, Tensor]) -> None:
    stray = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[stray] = torch.randn(32, 4)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"]


def old_marian(tensors: dict[str, Tensor]) -> None:
    for half in ("encoder", "decoder"):
        tensors[f"model.{half}.embed_positions.weight"] = torch.randn(64, 16)
        tensors[f"model.{half}.embed_tokens.weight"] = tensors["model.shared.weight"]
    tensors["lm_head.weight"] = tensors["model.shared.weight"]


@torch.no_grad()
@pytest.mark.parametrize(
    ("pair", "change"),
    [("bert, masked", old_bert), ("gpt2", old_gpt2), ("t5 1.0", old_t5), ("marian", old_marian)],
    indirect=["pair"],
)
def test_old_spellings_stray_tensors_and_copies_are_known(
    pair: Pair, change: Callable[[dict[str, Tensor]], None]
) -> None:
    tensors = load_file(pair.folder / WEIGHTS)
    change(tensors)
    save_file({key: tensor.clone() for key, tensor in tensors.items()}, pair.folder / WEIGHTS)
    inputs = pair.inputs(2, 9)
    agree(pair._replace(ours=load(pair.folder)).found(**inputs), pair.expected(**inputs))


@torch.no_grad()
@pytest.mark.parametrize("pair", PARAMS[3:], indirect=True)  # all but BERT
def test_steps_from_prompts_of_unequal_length_are_those_of_each_alone(pair: Pair) -> None:
    ids, state = pair.ours.start_decoding(ROWS, room=8)
    more = torch.randint(40, (3, 6))
    if pair.kind.more:
        assert ids.tolist() == [[pair.kind.start]] * 3
    steps = [pair.ours.step(ids, state)]
    steps += [pair.ours.step(part, state) for part in more.split(1, dim=1)]
    for index, row in enumerate(ROWS):
        if pair.kind.more:
            alone = pair.ours(torch.tensor([row]), torch.cat((ids[index], more[index]))[None])[0]
        else:
            alone = pair.ours(torch.tensor([[*row, *more[index]]]))[0, len(row) - 1 :]
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


def trained(name: str, **changes: Any) -> tuple[Any, Tensor, dict[str, Tensor]]:
    """A model in training, ids, and what it reads besides."""
    torch.manual_seed(0)
    model_class, config_class, sizes = TRAINED[name]
    sizes = {"vocabulary": 40, "dim": 16, "depth": 2} | sizes | changes
    model = model_class(config_class(**sizes)).train()
    ids, more = torch.randint(30, (2, 9)), {}
    if model_class in (T5, Transformer):
        more["target"] = torch.randint(30, (2, 5))
    if model_class is BertMaskedLM:
        more["token_types"] = torch.arange(18).view(2, 9) % 2
    return model, ids, more


def output(model: Any, ids: Tensor, more: dict[str, Tensor]) -> Tensor:
    """Its output. Transformer-XL reads two segments, so that its memory is in use."""
    if isinstance(model, TransformerXL):
        memories = model.remember()
        model(ids, memories=memories)
        return model(ids.flip(1), memories=memories).square()
    return model(ids, **more).logsumexp(-1)


@pytest.mark.parametrize("name", TRAINED)
def test_training_drops_and_reaches_every_parameter(name: str) -> None:
    model, *given = trained(name)
    assert not torch.equal(output(model, *given), output(model, *given))
    output(model, *given).sum().backward()
    for parameter_name, parameter in model.named_parameters():
        assert parameter.grad is not None, parameter_name
        assert parameter.grad.abs().sum() > 0, parameter_name


@pytest.mark.parametrize("name", TRAINED)
def test_recomputing_gives_the_same_gradients(name: str) -> None:
    rates = ("dropout", "attention_dropout") if name in ("bert", "gpt2") else ("dropout",)
    model, *given = trained(name, **dict.fromkeys(rates, 0.0))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    gradients = []
    for recompute in (False, True):
        model.zero_grad()
        model.recompute(recompute)
        output(model, *given).sum().backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
    for parameter, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter], gradient)


@pytest.mark.parametrize("name", [name for name in TRAINED if name != "transformer-xl"])
def test_the_loss_is_that_of_the_logits(name: str) -> None:
    model, ids, more = trained(name)
    model.eval()
    if isinstance(model, Transformer):
        model.output_bias.normal_()
    expected = model(ids, **more)
    labels = torch.randint(3, 40, expected.shape[:2])
    labels[1, 4] = -100
    losses = (
        model(ids, **more, labels=labels),
        cross_entropy(expected.flatten(0, 1), labels.flatten(), reduction="sum"),
    )
    torch.testing.assert_close(*losses)
    parameters = dict(model.named_parameters())
    gradients = (
        torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True)
        for loss in losses
    )
    for parameter, ours, theirs in zip(parameters, *gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5, msg=parameter)


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("bert", {}, {"encoder.tokens.weight": 0.0176}),  # of 0.02, cut off at two deviations
        ("gpt2", {"depth": 8}, {
            "tokens.weight": 0.02, "stack.blocks.0.attention.qkv.weight": 0.02,
            "stack.blocks.0.attention.output.weight": 0.02 / 4,
            "stack.blocks.0.attention.qkv.bias": 0}),
        ("t5 1.0", {"head_dim": 16}, {
            "tokens.weight": 1, "encoder.table": 1,
            "encoder.stack.blocks.0.attention.qkv.weight:query": (64 * 16) ** -0.5,
            "encoder.stack.blocks.0.attention.qkv.weight:key": 64**-0.5}),
        ("transformer", {}, {
            "tokens.weight": 1 / 8,
            "encoder.blocks.0.attention.qkv.weight:query": (2 / 128) ** 0.5}),  # Glorot's
    ],
)  # fmt: skip
def test_initialisation_is_that_of_the_paper(
    name: str, changes: dict[str, int], expected: dict[str, float]
) -> None:
    model, *_ = trained(name, vocabulary=1000, dim=64, **changes)
    for place, deviation in expected.items():
        parameter, _, part = place.partition(":")
        values = model.get_parameter(parameter)
        if part:
            values = values.chunk(3)[["query", "key"].index(part)]
        assert values.std().item() == pytest.approx(deviation, rel=0.1), place
        if name == "bert":
            assert values.abs().max() <= 0.04


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


SMALL: dict[str, Any] = {"vocabulary": 30, "dim": 8, "depth": 1, "heads": 2}


@pytest.mark.parametrize("wrong", [-1, 30])
@pytest.mark.parametrize(
    "model",
    [
        Bert(BertConfig(**SMALL)),
        GPT2(GPT2Config(**SMALL)),
        TransformerXL(TransformerXLConfig(**XL_SIZES)),
        T5(T5Config(**SMALL)),
        Transformer(TransformerConfig(**SMALL)),
    ],
    ids=lambda model: type(model).__name__,
)
def test_ids_outside_of_the_vocabulary_are_refused(model: Any, wrong: int) -> None:
    good, bad = torch.tensor([[1, 2]]), torch.tensor([[1, wrong]])
    calls = [(bad,)]
    if isinstance(model, T5 | Transformer):
        calls = [(bad, good), (good, bad)]
    for ids in calls:
        with pytest.raises(InputError, match=rf"from 0 to 29, but got {wrong}\..*tokenizer"):
            model(*ids)


def test_token_types_outside_of_their_range_are_refused() -> None:
    ids = torch.tensor([[1, 2]])
    with pytest.raises(InputError, match="Token types must be from 0 to 1, but got 5"):
        Bert(BertConfig(**SMALL))(ids, token_types=ids + 3)
