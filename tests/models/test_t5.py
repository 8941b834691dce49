"""T5, both versions, gives the numbers of transformers, padded or not, whole or step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.random_models import agree, random_t5
from regard import CheckpointError, InputError, T5Config, load


@torch.no_grad()
def test_a_head_that_is_missing_is_the_embedding(tmp_path: Path) -> None:
    """transformers 5 saves a tied, unscaled T5 without a head."""
    reference = random_t5(tie_word_embeddings=False)
    reference.lm_head.weight = reference.shared.weight
    reference.save_pretrained(tmp_path)
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    expected = reference(source, decoder_input_ids=target).logits
    agree(load(tmp_path)(source, target), expected)


def test_a_second_copy_must_be_one(tmp_path: Path) -> None:
    random_t5().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["encoder.embed_tokens.weight"] = tensors["shared.weight"] + 1
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
