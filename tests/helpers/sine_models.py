"""Small models whose numbers are the same on every machine, and a tokenizer for all of them."""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar

import torch

from regard import (
    GPT2,
    T5,
    GPT2Config,
    MultiHeadAttention,
    T5Config,
    Tokenizer,
    Transformer,
    TransformerConfig,
    TransformerXL,
    TransformerXLConfig,
)
from regard.models.model import Model

M = TypeVar("M", bound=Model)
LINES = ["the cat sat on the mat", "the dog ran in the big house because it was cold, very cold."]
TEXT = "the cat sat on the mat because the cat was cold"


@cache
def tokenizer() -> Tokenizer:
    """Byte pairs with an end that closes nothing by itself."""
    return Tokenizer.train_bpe(LINES * 9, size=300, special=("<pad>", "</s>"))


def waves(model: M, dtype: torch.dtype = torch.float64) -> M:
    """The model with sines as weights, which do not depend on a generator or on the machine."""
    model = model.to(dtype).eval()
    with torch.no_grad():
        for place, parameter in enumerate(model.parameters()):
            steps = torch.arange(parameter.numel(), dtype=torch.float64)
            size = 0.6 if parameter.dim() > 1 else 0.3
            values = size * torch.sin(steps * (1.7 + 0.13 * place) + place)
            parameter.copy_(values.view_as(parameter) + (parameter.dim() == 1))
    return model


def hooked(model: Model) -> bool:
    """Whether a module of the model still has a hook."""
    return any(
        m._forward_hooks or m._forward_pre_hooks
        or (isinstance(m, MultiHeadAttention) and m.head_hooks.active)
        for m in model.modules()
    )  # fmt: skip


def gpt2(length: int = 64, **changes: Any) -> GPT2:
    sizes = {"vocabulary": 300, "dim": 16, "depth": 2, "heads": 4} | changes
    return waves(GPT2(GPT2Config(length=length, begin_token=0, end_token=1, **sizes)))


def xl(memory: int = 8) -> TransformerXL:
    config = TransformerXLConfig(
        vocabulary=300, cutoffs=(100,), div_val=2, dim=16, embedding_dim=16, depth=2, heads=2,
        head_dim=8, inner=32, memory=memory, end_token=1,
    )  # fmt: skip
    return waves(TransformerXL(config))


def t5() -> T5:
    sizes = {"vocabulary": 300, "dim": 16, "head_dim": 8, "inner": 32, "depth": 2, "heads": 2}
    config = T5Config(**sizes, pad_token=0, end_token=1, start_token=0)
    return waves(T5(config))


def translator() -> Transformer:
    config = TransformerConfig(
        vocabulary=300, dim=16, depth=1, decoder_depth=2, heads=2, decoder_heads=4, inner=32,
        decoder_inner=32, pad_token=0, end_token=1, start_token=0,
    )  # fmt: skip
    return waves(Transformer(config))
