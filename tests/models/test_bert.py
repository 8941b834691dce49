"""BERT gives the numbers of transformers: encoder, masked words, answers, sentence vectors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from helpers.model_folders import edit, minilm
from helpers.random_models import agree, disturb, padded, real, same_files
from regard import Bert, BertAnswering, BertConfig, BertMaskedLM, CheckpointError, Padding, load

HEADS = {
    "encoder": (transformers.BertModel, Bert),
    "masked": (transformers.BertForMaskedLM, BertMaskedLM),
    "answering": (transformers.BertForQuestionAnswering, BertAnswering),
}
ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]
KINDS = [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1], [1]]


def config() -> transformers.BertConfig:
    return transformers.BertConfig(
        vocab_size=40,
        hidden_size=16,
        num_hidden_layers=3,
        num_attention_heads=4,
        intermediate_size=24,
        max_position_embeddings=32,
    )


def answer(found) -> torch.Tensor:
    """What a model said, as one tensor [batch, n, numbers]."""
    if isinstance(found, tuple) and not hasattr(found, "last_hidden_state"):
        return torch.stack(found, dim=-1)
    if hasattr(found, "start_logits"):
        return torch.stack((found.start_logits, found.end_logits), dim=-1)
    if hasattr(found, "logits"):
        return found.logits
    return found.last_hidden_state if hasattr(found, "last_hidden_state") else found


@pytest.fixture(params=HEADS)
def pair(request: pytest.FixtureRequest, tmp_path: Path):
    torch.manual_seed(0)
    kind, expected = HEADS[request.param]
    reference = disturb(kind(config()))
    reference.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert type(ours) is expected
    return ours, reference, tmp_path


@torch.no_grad()
def test_every_head_is_that_of_transformers(pair) -> None:
    ours, reference, _ = pair
    ids, kinds = torch.randint(40, (3, 9)), torch.randint(2, (3, 9))
    agree(answer(ours(ids, token_types=kinds)), answer(reference(ids, token_type_ids=kinds)))
    agree(answer(ours(ids)), answer(reference(ids)))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(pair, side: str) -> None:
    ours, reference, _ = pair
    ids, padding, mask = padded(ROWS, side, 0)
    kinds, _, _ = padded(KINDS, side, 0)
    at = (mask.cumsum(1) - 1).clamp(min=0)
    expected = answer(reference(ids, attention_mask=mask, token_type_ids=kinds, position_ids=at))
    found = answer(ours(ids, token_types=kinds, padding=padding))
    for index, (row, kind) in enumerate(zip(ROWS, KINDS, strict=True)):
        alone = answer(ours(torch.tensor([row]), token_types=torch.tensor([kind])))[0]
        agree(real(found, index, len(row), side), real(expected, index, len(row), side))
        agree(real(found, index, len(row), side), alone)


@torch.no_grad()
def test_saved_by_us_is_what_transformers_saved(pair, tmp_path: Path) -> None:
    ours, reference, folder = pair
    ours.save(tmp_path / "ours")
    same_files(tmp_path / "ours", folder)
    again = type(reference).from_pretrained(tmp_path / "ours").eval()
    ids = torch.randint(40, (2, 9))
    assert torch.equal(answer(again(ids)), answer(reference(ids)))


@torch.no_grad()
def test_old_spellings_are_known(tmp_path: Path) -> None:
    reference = disturb(transformers.BertForPreTraining(config()))
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {
        key.replace("LayerNorm.weight", "LayerNorm.gamma").replace(
            "LayerNorm.bias", "LayerNorm.beta"
        ): tensor
        for key, tensor in tensors.items()
    }
    old["bert.embeddings.position_ids"] = torch.arange(32)[None]
    old["cls.predictions.decoder.weight"] = old["bert.embeddings.word_embeddings.weight"].clone()
    save_file(old, tmp_path / "model.safetensors")
    ids = torch.randint(40, (2, 9))
    model = load(tmp_path)
    assert isinstance(model, BertMaskedLM)
    agree(model(ids), reference(ids).prediction_logits)
    encoder = load(tmp_path, model=Bert)
    agree(encoder(ids), reference.bert(ids).last_hidden_state)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_pooler_is_that_of_transformers(tmp_path: Path, side: str) -> None:
    reference = disturb(transformers.BertModel(config()))
    reference.save_pretrained(tmp_path)
    ours = load(tmp_path)
    assert isinstance(ours, Bert)
    ids, padding, _ = padded(ROWS, side, 0)
    found = ours.pool(ours(ids, padding=padding), padding)
    for index, row in enumerate(ROWS):
        agree(found[index], reference(torch.tensor([row])).pooler_output[0])


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_sentence_with_no_tokens_is_0_and_harms_no_other(side: str) -> None:
    model = Bert(BertConfig(vocabulary=10, dim=8, depth=1, heads=2, inner=16)).eval()
    ids, padding = torch.tensor([[1, 2, 3], [0, 0, 0]]), Padding([3, 0], side)
    assert not model.vectors(ids, padding=padding)[1].any()
    agree(model.vectors(ids, padding=padding)[0], model.vectors(ids[:1])[0])
    agree(model.pool(model(ids, padding=padding), padding)[0], model.pool(model(ids[:1]))[0])


@torch.no_grad()
@pytest.mark.parametrize("name", ["encoder", "answering"])
def test_what_has_no_output_for_words_need_not_tie_it(tmp_path: Path, name: str) -> None:
    theirs, _ = HEADS[name]
    theirs(config()).save_pretrained(tmp_path)
    edit(tmp_path, tie_word_embeddings=False)
    load(tmp_path)
    transformers.BertForMaskedLM(config()).save_pretrained(tmp_path)
    edit(tmp_path, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="tie_word_embeddings"):
        load(tmp_path)


@torch.no_grad()
def test_the_encoder_of_a_classifier_is_read(tmp_path: Path) -> None:
    reference = disturb(transformers.BertForSequenceClassification(config()))
    reference.save_pretrained(tmp_path)
    ids = torch.randint(40, (2, 9))
    agree(load(tmp_path, model=Bert)(ids), reference.bert(ids).last_hidden_state)


def test_positions_of_another_kind_are_refused(tmp_path: Path) -> None:
    reference = transformers.BertModel(config())
    reference.config.position_embedding_type = "relative_key"
    reference.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match="relative_key"):
        load(tmp_path)


def test_initialisation_is_cut_off_at_two_deviations() -> None:
    torch.manual_seed(0)
    model = Bert(BertConfig(vocabulary=1000, dim=64, depth=1, heads=4, inner=128))
    weights = model.encoder.tokens.weight
    assert weights.abs().max() <= 0.04
    assert 0.015 < weights.std() < 0.02


@torch.no_grad()
def test_real_sentence_vectors_are_those_of_transformers() -> None:
    folder = minilm()
    ours = load(folder)
    assert isinstance(ours, Bert)
    reference = transformers.BertModel.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    sentences = [
        "The cat sat on the mat.",
        "A cat was sitting on a rug.",
        "Interest rates rose by a quarter of a point on Thursday, the central bank said.",
    ]
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    mask = batch["attention_mask"]
    hidden = reference(**batch).last_hidden_state
    mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    expected = torch.nn.functional.normalize(mean, dim=-1)
    found = ours.vectors(batch["input_ids"], padding=Padding(mask.sum(1)))
    agree(found, expected)
    near, far = found[0] @ found[1], found[0] @ found[2]
    assert near > 0.5 > far
    for index, sentence in enumerate(sentences):
        agree(ours.vectors(torch.tensor([tokenizer(sentence)["input_ids"]]))[0], expected[index])
