"""Adapt a model by low-rank updates of its matrices, and save these as an adapter."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from regard.checkpoints.adapters import write_adapter
from regard.checkpoints.files import CONFIG, GENERATION, json_bytes, replace_file
from regard.checkpoints.keymap import Transpose
from regard.checkpoints.recommended import full_name
from regard.checkpoints.tensors import open_checkpoint
from regard.errors import InputError
from regard.layers.lora import LowRankLinear
from regard.layers.modules import Linear
from regard.models.model import EncoderDecoder, LanguageModel, Model

# The matrices of a block to update.
TARGETS = {
    "all": ("qkv", "output", "up", "down"),
    "attention": ("qkv", "output"),
    "feed-forward": ("up", "down"),
}


def check_base(name: str) -> None:
    """Raise InputError if a model is itself an adapter, which cannot be the base of another."""
    if open_checkpoint(name).adapter is not None:
        raise InputError(
            f"{name} is an adapter, so it cannot get another one. Extend its run with --resume, or "
            f"merge it first: regard convert {name} MERGED."
        )


def adapt(
    model: Model, *, rank: int, alpha: float, dropout: float = 0.0, targets: str = "all"
) -> None:
    """Freeze a model, and give the matrices of its blocks trainable updates of low rank.

    >>> from regard import GPT2, GPT2Config
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=1, heads=2))
    >>> adapt(model, rank=2, alpha=4, targets="attention")
    >>> [name for name, weight in model.named_parameters() if weight.requires_grad][:2]
    ['stack.blocks.0.attention.qkv.lora_a', 'stack.blocks.0.attention.qkv.lora_b']
    """
    model.requires_grad_(False)
    reads = {step.ours: step.reads for step in model.keys(model.config).steps}
    for path, module in list(model.named_modules()):
        for name, layer in list(module.named_children()):
            if isinstance(layer, Linear) and name in TARGETS[targets]:
                pieces = len(reads[f"{path}.{name}.weight"])
                if rank > min(layer.in_features, layer.out_features // pieces):
                    raise InputError(
                        f"A rank of {rank} is no saving for {path}.{name}, whose matrix is "
                        f"{layer.out_features // pieces} × {layer.in_features}: choose a lower one."
                    )
                lower = LowRankLinear(layer, pieces=pieces, rank=rank, alpha=alpha, dropout=dropout)
                setattr(module, name, lower)


def save_adapter(model: Model, folder: str | os.PathLike[str], base: str) -> None:
    """Write the updates of an adapted model as peft does, and its config.json.

    ``base`` names the model that was adapted.
    """
    place = Path(folder)
    steps = {step.ours: step for step in model.keys(model.config).steps}
    pairs, settings, transposed = dict[str, Any](), dict[str, Any](), False
    for path, layer in adapted(model):
        step = steps[f"{path}.weight"]
        transposed |= isinstance(step, Transpose)
        rank = layer.lora_a.shape[1]
        settings |= {"r": rank, "lora_alpha": layer.scale * rank, "lora_dropout": layer.dropout.p}
        modules = [key.removesuffix(".weight") for key in step.reads]
        pairs |= dict(zip(modules, zip(layer.lora_a, layer.lora_b, strict=True), strict=True))
    kinds = {LanguageModel: "CAUSAL_LM", EncoderDecoder: "SEQ_2_SEQ_LM"}
    kind = next((name for base_class, name in kinds.items() if isinstance(model, base_class)), None)
    settings |= {"task_type": kind, "fan_in_fan_out": transposed}
    write_adapter(place, full_name(base), open_checkpoint(base).digest(), pairs, settings)
    replace_file(place / CONFIG, json_bytes(model.write_config()))
    if (tokens := model.generation()) is not None:
        replace_file(place / GENERATION, json_bytes(tokens))


def adapted(model: nn.Module) -> Iterator[tuple[str, LowRankLinear]]:
    """Yield the adapted layers of a model, with their names."""
    for name, module in model.named_modules():
        if isinstance(module, LowRankLinear):
            yield name, module
