"""What a user with a Llama folder does: look at it, watch it run, generate with regard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers

from helpers.command import regard as command
from helpers.random_models import disturb
from regard import See, Tokenizer, watch

TEXT = "The cat sat on the mat. The cat sat."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama with random weights and its tokenizer, as ``save_pretrained`` writes them."""
    source = Tokenizer.load("books-gpt2")
    source.save(tmp_path)
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=len(source), hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        )
    )  # fmt: skip
    disturb(model)
    model.save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_look_at_a_folder_then_watch_it_then_generate(folder: Path) -> None:
    shown = command("look", folder, TEXT, "--json")
    assert shown.returncode == 0, shown.stderr
    overview = json.loads(shown.stdout)
    assert overview["model"] == "LlamaForCausalLM"

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(TEXT, return_tensors="pt")
    with torch.no_grad(), watch(model, See(entropy=True)) as watched:
        model(**inputs)
    means = [seen.entropy[0].mean(-1).tolist() for [seen] in watched.values()]
    assert means == [pytest.approx(row, abs=1e-4) for row in overview["values"]["entropy"]]

    wanted = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(**inputs, **wanted)
    fast = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="regard")
    with watch(fast.eval(), See(entropy=True, received=True), join=True) as watched:
        tokens = fast.generate(**inputs, **wanted)
    assert tokens.tolist() == expected.tolist()
    length = expected.shape[1] - 1  # the last token is not read
    for [seen] in watched.values():
        torch.testing.assert_close(seen.received.sum(-1), torch.full((1, 4), float(length)))
