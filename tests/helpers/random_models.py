"""Tiny random models of transformers and of regard, and comparisons between them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn

from regard import Padding, TransformerXL, TransformerXLConfig

transformers.logging.disable_progress_bar()
FIVE = int(transformers.__version__.partition(".")[0]) >= 5


def of_five(why: str) -> pytest.MarkDecorator:
    """A mark for tests of what only transformers 5 does right or shows; regard supports 4.57."""
    return pytest.mark.skipif(not FIVE, reason=f"transformers before 5 {why}")


def disturb(model: torch.nn.Module) -> torch.nn.Module:
    """Change every parameter and buffer, so that no bias is 0 and no norm is 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in {id(t): t for t in [*model.parameters(), *model.buffers()]}.values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.2)
    return model.eval()


def random_gpt2(**changes: object) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=32, n_embd=16, n_layer=3, n_head=4, **changes
    )
    config.bos_token_id = config.eos_token_id = 39
    return disturb(transformers.GPT2LMHeadModel(config))


def random_bert(kind: type = transformers.BertModel) -> transformers.BertPreTrainedModel:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=40, hidden_size=16, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=24, max_position_embeddings=32,
    )  # fmt: skip
    return disturb(kind(config))


def random_t5(**changes: object) -> transformers.T5ForConditionalGeneration:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=40, d_model=16, d_kv=6, d_ff=24, num_layers=2, num_heads=4,
        decoder_start_token_id=0, **changes,
    )  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config)
    if changes.get("tie_word_embeddings") is False:
        model.lm_head.weight = nn.Parameter(torch.randn(40, 16))
    return disturb(model)


def random_marian(**changes: object) -> transformers.MarianMTModel:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 40, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
        "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24, "max_position_embeddings": 64, "pad_token_id": 39,
        "eos_token_id": 0, "decoder_start_token_id": 39, "forced_eos_token_id": None,
    }  # fmt: skip
    model = transformers.MarianMTModel(transformers.MarianConfig(**{**sizes, **changes}))
    tables = [half.embed_positions.weight for half in (model.model.encoder, model.model.decoder)]
    kept = [table.detach().clone() for table in tables]
    disturb(model)
    with torch.no_grad():
        for table, values in zip(tables, kept, strict=True):
            table.copy_(values)  # sinusoids are not parameters
    return model


XL_SIZES = {
    "vocabulary": 30, "cutoffs": (6, 14), "div_val": 2, "dim": 12, "embedding_dim": 8, "depth": 2,
    "heads": 3, "head_dim": 5, "inner": 20, "memory": 6,
}  # fmt: skip
XL_IDS = [3, 7, 20, 0, 13, 14, 29, 5, 6, 2, 11, 25, 1, 8]


def random_xl(**changes: object) -> TransformerXL:
    torch.manual_seed(0)
    model = TransformerXL(TransformerXLConfig(**{**XL_SIZES, **changes}))
    return disturb(model)


def agree(actual: Tensor, expected: Tensor, tolerance: float = 1e-5) -> None:
    """Assert that the error is at most ``tolerance`` times the largest expected number."""
    assert actual.shape == expected.shape
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= tolerance, f"{error:.2e} of the scale, more than {tolerance:.0e}"


def same_files(one: Path, other: Path) -> None:
    """Assert that two checkpoints have the same tensors, equal to the byte."""
    a, b = load_file(one / "model.safetensors"), load_file(other / "model.safetensors")
    assert a.keys() == b.keys()
    for key in a:
        assert a[key].dtype == b[key].dtype, key
        assert torch.equal(a[key], b[key]), key


def padded(rows: list[list[int]], side: str, filler: int) -> tuple[Tensor, Padding, Tensor]:
    """Ids [batch, longest], our padding, and the attention mask of transformers."""
    longest = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        more = longest - len(row)
        ids.append([filler] * more + row if side == "left" else row + [filler] * more)
        real, not_real = [1] * len(row), [0] * more
        mask.append(not_real + real if side == "left" else real + not_real)
    padding = Padding([len(row) for row in rows], side=side)
    return torch.tensor(ids), padding, torch.tensor(mask)


def real(hidden: Tensor, row: int, length: int, side: str) -> Tensor:
    """The part of one row that belongs to tokens other than padding, [length, ...]."""
    return hidden[row, :length] if side == "right" else hidden[row, hidden.shape[1] - length :]
