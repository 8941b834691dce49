"""Transformer-XL gives the numbers of transformers 4, and remembers what its paper says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.model_folders import edit
from helpers.random_models import XL_IDS, XL_SIZES, agree, padded, random_xl, real
from regard import CheckpointError, InputError, Padding, TransformerXL, TransformerXLConfig, load
from regard.checkpoints.files import read_json
from regard.layers.modules import lock_dropout

IDS = torch.tensor([XL_IDS])


@torch.no_grad()
@pytest.mark.parametrize("lengths", [[5, 5, 4], [1, 9, 2, 2]])
@pytest.mark.parametrize("changes", [{"same_length": True, "furthest": 4}, {"memory": 14}])
def test_segments_are_the_whole_where_the_memory_suffices(lengths, changes) -> None:
    model = random_xl(**{"same_length": False, **changes})
    memories = model.remember()
    segments = [model(ids, memories=memories) for ids in IDS.split(lengths, dim=1)]
    agree(torch.cat(segments, dim=1), model(IDS))
    assert len(memories) == model.config.memory


@torch.no_grad()
def test_of_the_same_length_every_query_sees_as_many_keys() -> None:
    same, plain = (random_xl(depth=1, same_length=same) for same in (True, False))
    for end in range(1, len(XL_IDS) + 1):
        agree(same(IDS)[:, end - 1], plain(IDS[:, max(end - 6, 0) : end])[:, -1])


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side: str) -> None:
    model = random_xl()
    rows = [XL_IDS, XL_IDS[:5], XL_IDS[3:4]]
    ids, padding, _ = padded(rows, side, 9)
    found = model(ids, padding=padding)
    for index, row in enumerate(rows):
        agree(real(found, index, len(row), side), model(torch.tensor([row]))[0])


@torch.no_grad()
def test_prompts_of_unequal_length_go_on_as_each_alone() -> None:
    """Also once the memory has forgotten the padding, or some of it."""
    model = random_xl()
    rows = [XL_IDS[:5], XL_IDS[5:7]]
    ids, memories = model.start_decoding(rows)
    together = [model.step(ids, memories)]
    more = torch.randint(30, (8, 2, 1))
    together += [model.step(step, memories) for step in more]
    for index, row in enumerate(rows):
        alone = model.remember()
        expected = [model.step(torch.tensor([row]), alone)]
        expected += [model.step(step[index : index + 1], alone) for step in more]
        for found, one in zip(together, expected, strict=True):
            agree(found[index], one[0])


@torch.no_grad()
def test_beams_take_their_memories_along() -> None:
    model = random_xl()
    ids, memories = model.start_decoding([XL_IDS[:5], XL_IDS[5:10]])
    model.step(ids, memories)
    memories.reorder(torch.tensor([1, 1, 0]))
    found = model.step(torch.tensor([[4], [5], [6]]), memories)
    agree(found[0], model(torch.tensor([[*XL_IDS[5:10], 4]]))[0, -1])
    agree(found[2], model(torch.tensor([[*XL_IDS[:5], 6]]))[0, -1])


@torch.no_grad()
def test_copies_of_what_is_tied_are_read(tmp_path: Path) -> None:
    """As transformers 4 wrote them."""
    model = random_xl(furthest=4)
    model.save(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in list(tensors.items()):
        if "emb_layers" in name or ("emb_projs" in name and not name.endswith(".0")):
            copy = name.replace("transformer.word_emb.emb_", "crit.out_")
            tensors[copy] = tensor.clone()
    save_file(tensors, tmp_path / "model.safetensors")
    again = load(tmp_path)
    assert again.config == model.config
    assert torch.equal(again(IDS), model(IDS))


def test_one_band_has_no_empty_parameters_and_reads_those_of_earlier_versions(
    tmp_path: Path,
) -> None:
    model = TransformerXL(TransformerXLConfig(**XL_SIZES | {"cutoffs": ()}))
    assert all(parameter.numel() for parameter in model.parameters())
    model.save(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert not any("cluster" in name for name in weights)
    width = model.config.widths[0]
    empty = {"crit.cluster_weight": torch.empty(0, width), "crit.cluster_bias": torch.empty(0)}
    save_file(weights | empty, file, metadata={"format": "pt"})
    again = load(tmp_path)
    assert torch.equal(again.eval()(IDS), model.eval()(IDS))


def test_words_are_dropped_everywhere_or_nowhere() -> None:
    embedding = TransformerXL(TransformerXLConfig(**XL_SIZES, word_dropout=0.5)).embedding
    ids = torch.tensor([[9, *XL_IDS, *XL_IDS[::-1]]])
    torch.manual_seed(0)
    kept = embedding.train()(ids) / embedding.eval()(ids)
    agree(kept, kept[..., :1].round().expand_as(kept))  # all of a word or nothing
    assert set(kept[0, 1:, 0].round().tolist()) == {0.0, 2.0}
    agree(kept[:, 1:], kept[:, 1:].flip(1))  # and at every place
    assert kept[0, 0, 0] == 1  # alone, it would be zeros


def test_deep_and_with_words_dropped_it_has_gradients() -> None:
    model = TransformerXL(TransformerXLConfig(**XL_SIZES | {"depth": 16}, word_dropout=0.9)).train()
    model(torch.tensor([XL_IDS] * 20)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
def test_the_loss_is_of_the_last_tokens_and_of_an_output_that_is_not_calm() -> None:
    model, ids = random_xl(), torch.tensor([XL_IDS, XL_IDS[::-1]])
    labels = ids[:, 4:].clone()
    labels[0, 2] = -100  # does not count
    told = model(ids)[:, 4:]
    counted = labels >= 0
    expected = -told[counted].gather(-1, labels[counted][:, None]).sum()
    agree(model(ids, labels=labels), expected)
    hidden = model.read(ids)[:, 4:]
    size = 20 * 0.5 * hidden.square().mean()
    change = 20 * 2 * (hidden[:, 1:] - hidden[:, :-1]).square().mean()
    agree(model(ids, labels=labels, activation=0.5, slowness=2), expected + size + change)


@torch.no_grad()
def test_dropout_of_projections_is_drawn_for_queries_keys_values_and_distances() -> None:
    model = random_xl(dropout=0.0, projection_dropout=0.5).train()
    layer = model.layers[0].attention
    lock_dropout(model)
    x, distances = torch.randn(2, 5, 12), torch.randn(5, 12)
    dropped = layer.parts(x, 5, distances)
    plain = layer.eval().parts(x, 5, distances)
    for found, whole in zip(dropped[1:3], plain[1:3], strict=True):  # keys and values
        kept = found / whole
        assert set(kept.round().unique().tolist()) == {0.0, 2.0}
        agree(kept, kept[:, :, :1].expand_as(kept))  # at all positions the same
    bias = layer.content_bias[:, None]
    assert set(((dropped[0] - bias) / (plain[0] - bias)).round().unique().tolist()) == {0.0, 2.0}
    kept = dropped[3].relative / plain[3].relative
    assert set(kept.round().unique().tolist()) == {0.0, 2.0}


def test_dropout_has_a_rate_for_each_place(tmp_path: Path) -> None:
    model = TransformerXL(TransformerXLConfig(**XL_SIZES, dropout=0.2))
    assert (model.dropout.p, model.last_dropout.p) == (0.2, 0.2)
    config = TransformerXLConfig(
        **XL_SIZES, dropout=0.2, embedding_dropout=0.6, output_dropout=0.5, projection_dropout=0.3
    )
    model = TransformerXL(config)
    assert (model.dropout.p, model.last_dropout.p) == (0.6, 0.5)
    assert model.layers[0].around_attention.dropout.p == 0.2
    model.save(tmp_path)
    assert load(tmp_path).config == config


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cutoffs"):
        TransformerXLConfig(cutoffs=(5, 3))
    with pytest.raises(InputError, match="div_val"):
        TransformerXLConfig(embedding_dim=8)
    model = random_xl()
    with pytest.raises(InputError, match="Memories hold their own padding"):
        model(IDS, memories=model.remember(), padding=Padding(3))
    model.save(tmp_path)
    edit(tmp_path, tie_projs=[True, True, True])
    with pytest.raises(CheckpointError, match="tie_projs"):
        load(tmp_path)


PUBLISHED = Path(__file__).parent / "transformer_xl"
VOCABULARIES = ["bands", "whole", "one_table", "narrow_table"]


@pytest.mark.parametrize("memory", ["empty", "zeros"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_published_checkpoint_gives_its_numbers(vocabulary: str, memory: str) -> None:
    """Weights and numbers are of transformers 4.35.2, the last that had the model: see make.py."""
    model = load(PUBLISHED / vocabulary)
    expected = load_file(PUBLISHED / vocabulary / "expected.safetensors")
    memories = model.remember()
    if memory == "zeros":  # that library begins with a memory of zeros, and attends to them
        for layer in memories.layers:
            layer.extend(torch.zeros(2, model.config.memory, model.config.dim))
    with torch.no_grad():
        segments = [model(ids, memories=memories) for ids in expected["ids"].split(7, dim=1)]
    agree(torch.cat(segments, dim=1), expected[memory])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_published_checkpoint_is_saved_as_it_was(vocabulary: str, tmp_path: Path) -> None:
    model, folders = load(PUBLISHED / vocabulary), (PUBLISHED / vocabulary, tmp_path)
    model.save(tmp_path)
    said, written = (read_json(folder / "config.json") for folder in folders)
    shared = said.keys() & written.keys()
    assert {key: said[key] for key in shared} == {key: written[key] for key in shared}
    assert shared >= {"model_type", "architectures", "tie_projs", "clamp_len", "cutoffs"}
    assert load(tmp_path).config == model.config
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() - after.keys() == {"transformer.pos_emb.inv_freq"}  # a table of sinusoids
    for key, tensor in after.items():
        assert torch.equal(tensor, before[key]), key
