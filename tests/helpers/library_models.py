"""Tiny random models of transformers of many architectures, as objects and as folders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from helpers.sine_models import tokenizer

POSITIONS = 64
SIZES = {
    "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 24, "max_position_embeddings": POSITIONS, "pad_token_id": 0,
}  # fmt: skip
GROUPED = {**SIZES, "num_key_value_heads": 2}
HALVES = {
    "vocab_size": 300, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "max_position_embeddings": POSITIONS, "pad_token_id": 0,
    "eos_token_id": 1, "decoder_start_token_id": 1, "forced_eos_token_id": None,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip

# For each name the class, the class of its config, and the config's sizes.
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", GROUPED),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", {**GROUPED, "head_dim": 4}),
    "mistral": ("MistralForCausalLM", "MistralConfig", {**GROUPED, "sliding_window": 4}),
    "gemma3": (
        "Gemma3ForCausalLM", "Gemma3TextConfig",
        {**GROUPED, "head_dim": 8, "sliding_window": 4,
         "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "pythia": ("GPTNeoXForCausalLM", "GPTNeoXConfig", SIZES),
    "roberta": ("RobertaForMaskedLM", "RobertaConfig", {**SIZES, "pad_token_id": 1}),
    "albert": ("AlbertForMaskedLM", "AlbertConfig", {**SIZES, "embedding_size": 8}),
    "t5": (
        "T5ForConditionalGeneration", "T5Config",
        {"vocab_size": 300, "d_model": 16, "d_kv": 6, "d_ff": 24, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0},
    ),
    "bart": ("BartForConditionalGeneration", "BartConfig", HALVES),
    "vit": ("ViTForImageClassification", "ViTConfig", VISION),
    "siglip": ("SiglipVisionModel", "SiglipVisionConfig", VISION),
}  # fmt: skip
CAUSAL = ("llama", "qwen3", "mistral", "gemma3", "pythia")


def library_model(name: str, **changes: Any) -> Any:
    """A model in eval mode, every parameter disturbed."""
    kind, config, sizes = MODELS[name]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**sizes, **changes})
    model = getattr(transformers, kind)(made).eval()
    with torch.no_grad():  # parameters only: a folder does not hold buffers
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.2)
    return model


def library_tokenizer() -> Any:
    """The tokenizer of :mod:`helpers.sine_models`, as one of transformers."""
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer().tokenizer, eos_token="</s>", pad_token="<pad>"
    )


def library_folder(folder: Path, name: str) -> Path:
    """A folder with a model and its tokenizer or image processor."""
    library_model(name).save_pretrained(folder)
    if name in ("vit", "siglip"):
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(folder)
    else:
        library_tokenizer().save_pretrained(folder)
    return folder


def eager(model: Any, run: Callable[[Any], Any]) -> Any:
    """The output of ``run`` with the attention weights that transformers computes itself."""
    parts = [part for part in model.modules() if isinstance(part, transformers.PreTrainedModel)]
    before = [part.config._attn_implementation for part in parts]
    for part in parts:  # T5 does not pass it on to its halves
        part.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            return run(model)
    finally:
        for part, implementation in zip(parts, before, strict=True):
            part.set_attn_implementation(implementation)
