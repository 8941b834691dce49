"""T5, both versions, gives the numbers of transformers, padded or not, whole or step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.random_models import agree, random_t5
from regard import T5, CheckpointError, InputError, T5Config, load


@torch.no_grad()
def test_a_head_that_is_missing_is_the_embedding(tmp_path: Path) -> None:
    """transformers 5 saves a tied, unscaled T5 without a head."""
    reference = random_t5(tie_word_embeddings=False)
    reference.lm_head.weight = reference.shared.weight
    reference.save_pretrained(tmp_path)
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    expected = reference(source, decoder_input_ids=target).logits
    agree(load(tmp_path)(source, target), expected)


@torch.no_grad()
def test_the_stray_bias_is_dropped_and_a_second_copy_must_be_one(tmp_path: Path) -> None:
    reference = random_t5()
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


def test_configs_that_files_cannot_say_are_refused() -> None:
    for changes, words in (
        ({"gated": True, "activation": "gelu"}, "gelu_new"),
        ({"buckets": 5}, "must be even"),
        ({"buckets": 32, "max_distance": 16}, "less than twice max_distance"),
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
