"""What only BERT does: its pooler, sentence vectors, and heads that others need not have."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from helpers.model_folders import edit, minilm
from helpers.random_models import agree, padded, random_bert
from regard import Bert, BertConfig, CheckpointError, Padding, load

ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_the_pooler_is_that_of_transformers(tmp_path: Path, side: str) -> None:
    reference = random_bert()
    reference.save_pretrained(tmp_path)
    ours = load(tmp_path)
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


@pytest.mark.parametrize("theirs", [transformers.BertModel, transformers.BertForQuestionAnswering])
def test_what_has_no_output_for_words_need_not_tie_it(tmp_path: Path, theirs: type) -> None:
    random_bert(theirs).save_pretrained(tmp_path)
    edit(tmp_path, tie_word_embeddings=False)
    load(tmp_path)


@pytest.mark.parametrize(
    "changes", [{"tie_word_embeddings": False}, {"position_embedding_type": "relative_key"}]
)
def test_what_we_do_not_compute_is_refused(tmp_path: Path, changes: dict[str, object]) -> None:
    random_bert(transformers.BertForMaskedLM).save_pretrained(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(
        CheckpointError, match=f"{next(iter(changes))} = .*, but regard implements only"
    ):
        load(tmp_path)


@torch.no_grad()
def test_the_encoder_of_a_classifier_is_read(tmp_path: Path) -> None:
    reference = random_bert(transformers.BertForSequenceClassification)
    reference.save_pretrained(tmp_path)
    ids = torch.randint(40, (2, 9))
    agree(load(tmp_path, model=Bert)(ids), reference.bert(ids).last_hidden_state)


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
