"""The Transformer gives the numbers of transformers' Marian, padded or not, whole or in steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.model_folders import edit
from helpers.random_models import agree, of_five, random_marian
from regard import CheckpointError, InputError, Transformer, TransformerConfig, load


@of_five("writes other keys")
@torch.no_grad()
def test_shared_but_not_tied_is_read_as_transformers_reads_and_wrote_it(tmp_path: Path) -> None:
    reference = random_marian(tie_word_embeddings=False)
    reference.save_pretrained(tmp_path)
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    expected = reference(source, decoder_input_ids=target).logits
    ours = load(tmp_path)
    agree(ours(source, target), expected)
    ours.save(tmp_path / "ours")
    again = transformers.MarianMTModel.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(again(source, decoder_input_ids=target).logits, expected)

    # Once, such files held one table for both halves.
    tensors = load_file(tmp_path / "model.safetensors")
    for half in ("encoder", "decoder"):
        del tensors[f"model.{half}.embed_tokens.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    for half in (reference.model.encoder, reference.model.decoder):
        half.embed_tokens.weight.copy_(reference.model.shared.weight)
    agree(load(tmp_path)(source, target), reference(source, decoder_input_ids=target).logits)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"decoder_vocab_size": -4}, "target_vocabulary"),
        ({"decoder_vocab_size": "many"}, "target_vocabulary"),
        ({"tie_word_embeddings": 3}, "tied"),
        ({"decoder_vocab_size": 41}, "embed_tokens.weight has shape"),
    ],
)
def test_a_config_that_is_not_of_these_tables_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    random_marian(share_encoder_decoder_embeddings=False).save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)
    with pytest.raises(InputError, match="target_vocabulary"):
        TransformerConfig(tied=False)


def test_tables_of_places_that_are_outgrown_stay_where_graphs_read_them() -> None:
    model = Transformer(TransformerConfig(vocabulary=40, dim=8, length=4, depth=1, decoder_depth=1))
    short = model._table(3, torch.device("cpu"))
    longer = model._table(5, torch.device("cpu"))
    assert (len(short), len(longer)) == (4, 8)
    assert torch.equal(longer[:4], short)
    assert any(table is short for table in model._sinusoids)
    assert model._table(8, torch.device("cpu")) is longer
