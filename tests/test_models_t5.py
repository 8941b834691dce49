"""T5, both versions, gives the numbers of transformers, padded or not, whole or step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from regard import T5, CheckpointError, InputError, T5Config, load
from tiny import agree, disturb, padded, real, same_files

VARIANTS = {
    "1.0": {},
    "1.1": {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "gated silu": {"feed_forward_proj": "gated-silu"},
    "shallow decoder": {"num_decoder_layers": 1},
    "few buckets": {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 12},
    "odd halves": {"relative_attention_num_buckets": 6, "relative_attention_max_distance": 12},
}
ROWS = [[5, 6, 7, 8, 9, 10, 1], [12, 13, 1], [1]]
TARGETS = [[0, 20, 21, 22], [0, 23], [0, 24, 25]]


def theirs(**changes: object) -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=40,
            d_model=16,
            d_kv=6,
            d_ff=24,
            num_layers=2,
            num_heads=4,
            decoder_start_token_id=0,
            **changes,
        )
    )
    if changes.get("tie_word_embeddings") is False:
        model.lm_head.weight = nn.Parameter(torch.randn(40, 16))
    return disturb(model)


def save(model: transformers.T5ForConditionalGeneration, folder: Path) -> None:
    """As real checkpoints are: an untied head is in the file, and the config says so."""
    model.save_pretrained(folder)
    if model.lm_head.weight is not model.shared.weight:
        tensors = load_file(folder / "model.safetensors")
        tensors["lm_head.weight"] = model.lm_head.weight.detach()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})


@pytest.fixture(params=VARIANTS)
def pair(request: pytest.FixtureRequest, tmp_path: Path):
    reference = theirs(**VARIANTS[request.param])
    save(reference, tmp_path)
    ours = load(tmp_path)
    assert isinstance(ours, T5)
    return ours, reference, tmp_path


@torch.no_grad()
def test_logits_are_those_of_transformers(pair) -> None:
    ours, reference, _ = pair
    source, target = torch.randint(40, (3, 40)), torch.randint(40, (3, 9))
    agree(ours(source, target), reference(source, decoder_input_ids=target).logits)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(pair, side: str) -> None:
    ours, reference, _ = pair
    source, padding, mask = padded(ROWS, side, 0)
    target, target_padding, target_mask = padded(TARGETS, side, 0)
    expected = reference(
        source,
        attention_mask=mask,
        decoder_input_ids=target,
        decoder_attention_mask=target_mask,
    ).logits
    found = ours(source, target, padding=padding, target_padding=target_padding)
    for index, (row, out) in enumerate(zip(ROWS, TARGETS, strict=True)):
        alone = ours(torch.tensor([row]), torch.tensor([out]))[0]
        agree(real(found, index, len(out), side), real(expected, index, len(out), side))
        agree(real(found, index, len(out), side), alone)


@torch.no_grad()
def test_saved_by_us_is_what_transformers_saved(pair, tmp_path: Path) -> None:
    ours, reference, folder = pair
    ours.save(tmp_path / "ours")
    same_files(tmp_path / "ours", folder)
    again = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path / "ours").eval()
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    expected = reference(source, decoder_input_ids=target).logits
    assert torch.equal(again(source, decoder_input_ids=target).logits, expected)


@torch.no_grad()
def test_step_by_step_is_all_at_once(pair) -> None:
    ours, _, _ = pair
    ids, state = ours.start_decoding(ROWS, room=8)
    assert ids.tolist() == [[0]] * 3
    target = torch.cat((ids, torch.randint(40, (3, 6))), dim=1)
    steps = torch.stack([ours.step(part, state) for part in target.split(1, dim=1)], dim=1)
    for index, row in enumerate(ROWS):
        agree(steps[index], ours(torch.tensor([row]), target[index : index + 1])[0])


@torch.no_grad()
def test_a_head_that_is_missing_is_the_embedding(tmp_path: Path) -> None:
    """transformers 5 saves a tied, unscaled T5 without a head."""
    reference = theirs(tie_word_embeddings=False)
    reference.lm_head.weight = reference.shared.weight
    reference.save_pretrained(tmp_path)
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    expected = reference(source, decoder_input_ids=target).logits
    agree(load(tmp_path)(source, target), expected)


@torch.no_grad()
def test_the_stray_bias_is_dropped_and_a_second_copy_must_be_one(tmp_path: Path) -> None:
    reference = theirs()
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    stray = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[stray] = torch.randn(32, 4)
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    agree(load(tmp_path)(source, target), reference(source, decoder_input_ids=target).logits)
    tensors["encoder.embed_tokens.weight"][3, 3] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"encoder\.embed_tokens\.weight and shared"):
        load(tmp_path)


@pytest.mark.parametrize("config", [{}, {"gated": True, "activation": "gelu_new", "tied": False}])
def test_training_drops_and_reaches_every_parameter(config) -> None:
    torch.manual_seed(0)
    model = T5(
        T5Config(vocabulary=40, dim=16, head_dim=4, inner=24, depth=2, heads=4, **config)
    ).train()
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    assert not torch.equal(model(source, target), model(source, target))
    model(source, target).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_recomputing_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    config = T5Config(vocabulary=40, dim=16, head_dim=4, inner=24, depth=2, heads=4, dropout=0.0)
    model = T5(config).train()
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    model(source, target).logsumexp(-1).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.recompute()(source, target).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_configs_that_files_cannot_say_are_refused() -> None:
    for changes, words in (
        ({"gated": True, "activation": "gelu"}, "gelu_new"),
        ({"buckets": 5}, "an even number"),
        ({"buckets": 32, "max_distance": 16}, "below max_distance"),
    ):
        with pytest.raises(InputError, match=words):
            T5Config(**changes)


def test_initialisation_keeps_variances() -> None:
    torch.manual_seed(0)
    model = T5(T5Config(vocabulary=1000, dim=64, head_dim=16, inner=128, depth=1, heads=4))
    query, key, _ = model.encoder.stack.blocks[0].attention.qkv.weight.chunk(3)
    assert abs(query.std() - (64 * 16) ** -0.5) < 0.003
    assert abs(key.std() - 64**-0.5) < 0.01
    assert abs(model.tokens.weight.std() - 1) < 0.02
    assert abs(model.encoder.table.std() - 1) < 0.2  # 128 numbers: as large as scores are


def test_presets_have_the_sizes_of_the_paper() -> None:
    with torch.device("meta"):
        counts = [
            sum(p.numel() for p in T5(config).parameters())
            for config in (T5Config.small(), T5Config.base(), T5Config.v1_1_small())
        ]
    assert counts == [60_506_624, 222_903_552, 76_961_152]
