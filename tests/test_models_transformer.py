"""The Transformer gives the numbers of transformers' Marian, padded or not, whole or in steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from regard import CheckpointError, InputError, Transformer, TransformerConfig, load
from regard.models.quantization import prepack, quantize
from tiny import agree, disturb, of_five, padded, real, same_files

VARIANTS = {
    "plain": {},
    "scaled, swish": {"scale_embedding": True, "activation_function": "swish"},
    "uneven": {"decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 20},
    "two vocabularies": {"share_encoder_decoder_embeddings": False, "decoder_vocab_size": 47},
    "an output of its own": {
        "share_encoder_decoder_embeddings": False,
        "decoder_vocab_size": 47,
        "tie_word_embeddings": False,
    },
    "two tables of one size": {"share_encoder_decoder_embeddings": False},
}
ROWS = [[5, 6, 7, 8, 9, 10, 0], [12, 13, 0], [0]]
TARGETS = [[39, 20, 21, 22], [39, 23], [39, 24, 25]]


def theirs(**changes: object) -> transformers.MarianMTModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40,
        "d_model": 16,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 64,
        "pad_token_id": 39,
        "eos_token_id": 0,
        "decoder_start_token_id": 39,
        "forced_eos_token_id": None,
    }
    model = transformers.MarianMTModel(transformers.MarianConfig(**{**sizes, **changes}))
    tables = [half.embed_positions.weight for half in (model.model.encoder, model.model.decoder)]
    kept = [table.detach().clone() for table in tables]
    disturb(model)
    with torch.no_grad():
        for table, values in zip(tables, kept, strict=True):
            table.copy_(values)  # sinusoids are no parameters
    return model


TWO = of_five("makes a decoder's table as large as the encoder's")


@pytest.fixture(
    params=[
        pytest.param(name, marks=TWO) if "decoder_vocab_size" in changes else name
        for name, changes in VARIANTS.items()
    ]
)
def pair(request: pytest.FixtureRequest, tmp_path: Path):
    reference = theirs(**VARIANTS[request.param])
    reference.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert isinstance(ours, Transformer)
    return ours, reference, tmp_path


@torch.no_grad()
def test_logits_are_those_of_transformers(pair) -> None:
    ours, reference, _ = pair
    source, target = torch.randint(40, (3, 12)), torch.randint(40, (3, 9))
    agree(ours(source, target), reference(source, decoder_input_ids=target).logits)


@torch.no_grad()
def test_padding_on_the_right_is_that_of_transformers(pair) -> None:
    ours, reference, _ = pair
    source, padding, mask = padded(ROWS, "right", 39)
    target, target_padding, target_mask = padded(TARGETS, "right", 39)
    expected = reference(
        source,
        attention_mask=mask,
        decoder_input_ids=target,
        decoder_attention_mask=target_mask,
    ).logits
    found = ours(source, target, padding=padding, target_padding=target_padding)
    for index, out in enumerate(TARGETS):
        agree(found[index, : len(out)], expected[index, : len(out)])


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(pair, side: str) -> None:
    ours, _, _ = pair
    source, padding, _ = padded(ROWS, side, 39)
    target, target_padding, _ = padded(TARGETS, side, 39)
    found = ours(source, target, padding=padding, target_padding=target_padding)
    for index, (row, out) in enumerate(zip(ROWS, TARGETS, strict=True)):
        alone = ours(torch.tensor([row]), torch.tensor([out]))[0]
        agree(real(found, index, len(out), side), alone)


@torch.no_grad()
def test_saved_by_us_is_what_transformers_saved(pair, tmp_path: Path) -> None:
    ours, reference, folder = pair
    ours.save(tmp_path / "ours")
    same_files(tmp_path / "ours", folder)
    again = transformers.MarianMTModel.from_pretrained(tmp_path / "ours").eval()
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    expected = reference(source, decoder_input_ids=target).logits
    assert torch.equal(again(source, decoder_input_ids=target).logits, expected)


@torch.no_grad()
def test_step_by_step_is_all_at_once(pair) -> None:
    ours, _, _ = pair
    ids, state = ours.start_decoding(ROWS, room=8)
    assert ids.tolist() == [[39]] * 3
    target = torch.cat((ids, torch.randint(40, (3, 6))), dim=1)
    steps = torch.stack([ours.step(part, state) for part in target.split(1, dim=1)], dim=1)
    for index, row in enumerate(ROWS):
        agree(steps[index], ours(torch.tensor([row]), target[index : index + 1])[0])


@torch.no_grad()
def test_positions_go_on_as_far_as_needed() -> None:
    config = TransformerConfig(vocabulary=40, dim=16, depth=1, decoder_depth=1, inner=24)
    grown, fresh = Transformer(config).eval(), Transformer(config).eval()
    fresh.load_state_dict(grown.state_dict())
    ids = torch.randint(40, (1, 600))
    short = grown.encode(ids[:, :20])
    assert torch.equal(grown.encode(ids), fresh.encode(ids))  # the table grew; or was made at once
    assert torch.equal(grown.encode(ids[:, :20]), short)


@torch.no_grad()
def test_tables_and_copies_of_old_checkpoints_are_known(tmp_path: Path) -> None:
    reference = theirs()
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    shared = tensors["model.shared.weight"]
    tensors |= {
        "model.encoder.embed_positions.weight": torch.randn(64, 16),
        "model.decoder.embed_positions.weight": torch.randn(64, 16),
        "model.encoder.embed_tokens.weight": shared.clone(),
        "model.decoder.embed_tokens.weight": shared.clone(),
        "lm_head.weight": shared.clone(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    agree(load(tmp_path)(source, target), reference(source, decoder_input_ids=target).logits)


@of_five("writes other keys")
@torch.no_grad()
def test_shared_but_not_tied_is_read_as_transformers_reads_and_wrote_it(tmp_path: Path) -> None:
    reference = theirs(tie_word_embeddings=False)
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
    theirs(share_encoder_decoder_embeddings=False).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(raw | changes))
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)
    with pytest.raises(InputError, match="target_vocabulary"):
        TransformerConfig(tied=False)


@TWO
@torch.no_grad()
@pytest.mark.parametrize("make", [prepack, quantize])
def test_an_output_of_its_own_can_be_made_fast(tmp_path: Path, make) -> None:
    theirs(**VARIANTS["an output of its own"]).save_pretrained(tmp_path)
    ours, fast = load(tmp_path), make(load(tmp_path))
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    agree(fast(source, target), ours(source, target), 1e-5 if make is prepack else 0.05)


def test_training_drops_and_reaches_every_parameter() -> None:
    torch.manual_seed(0)
    config = TransformerConfig(
        vocabulary=40, target_vocabulary=45, tied=False, dim=16, depth=2, decoder_depth=2, inner=24
    )
    model = Transformer(config).train()
    source, target = torch.randint(40, (2, 9)), torch.randint(40, (2, 5))
    assert not torch.equal(model(source, target), model(source, target))
    model(source, target).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_initialisation_is_glorots() -> None:
    torch.manual_seed(0)
    model = Transformer(TransformerConfig(vocabulary=1000, dim=64, depth=1, decoder_depth=1))
    query = model.encoder.blocks[0].attention.qkv.weight[:64]
    bound = (6 / 128) ** 0.5
    assert bound * 0.95 < query.abs().max() <= bound
    assert abs(model.tokens.weight.std() - 1 / 8) < 0.005


def test_presets_have_the_sizes_of_the_paper() -> None:
    with torch.device("meta"):
        base = sum(p.numel() for p in Transformer(TransformerConfig.base()).parameters())
        big = sum(p.numel() for p in Transformer(TransformerConfig.big()).parameters())
    # The paper gives 65 and 213 million, of which the embedding of 37,000 is the part that varies.
    assert (round(base / 1e6), round(big / 1e6)) == (63, 214)


def test_tables_of_places_that_are_outgrown_stay_where_graphs_read_them() -> None:
    model = Transformer(TransformerConfig(vocabulary=40, dim=8, length=4, depth=1, decoder_depth=1))
    short = model._table(3, torch.device("cpu"))
    longer = model._table(5, torch.device("cpu"))
    assert (len(short), len(longer)) == (4, 8)
    assert torch.equal(longer[:4], short)
    assert any(table is short for table in model._sinusoids)
    assert model._table(8, torch.device("cpu")) is longer
