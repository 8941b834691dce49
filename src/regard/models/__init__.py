"""The models, one architecture a file, and :func:`load`."""

from __future__ import annotations

import os

import torch

from regard.checkpoints import open_checkpoint
from regard.errors import CheckpointError, InputError
from regard.models.bert import Bert, BertAnswering, BertConfig, BertMaskedLM
from regard.models.gpt2 import GPT2, GPT2Config
from regard.models.model import Model
from regard.models.t5 import T5, T5Config
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.transformer_xl import TransformerXL, TransformerXLConfig

__all__ = [
    "GPT2",
    "T5",
    "Bert",
    "BertAnswering",
    "BertConfig",
    "BertMaskedLM",
    "GPT2Config",
    "Model",
    "T5Config",
    "Transformer",
    "TransformerConfig",
    "TransformerXL",
    "TransformerXLConfig",
    "load",
]

# By what config.json calls the architecture, and where it does not, by its model_type.
ARCHITECTURES: dict[str, type[Model]] = {
    "BertModel": Bert,
    "BertForMaskedLM": BertMaskedLM,
    "BertForPreTraining": BertMaskedLM,
    "BertForQuestionAnswering": BertAnswering,
    "GPT2LMHeadModel": GPT2,
    "MarianMTModel": Transformer,
    "T5ForConditionalGeneration": T5,
    "T5WithLMHeadModel": T5,
    "TransfoXLLMHeadModel": TransformerXL,
}
MODEL_TYPES: dict[str, type[Model]] = {
    "bert": Bert,
    "gpt2": GPT2,
    "marian": Transformer,
    "t5": T5,
    "transfo-xl": TransformerXL,
}


def load(
    name: str | os.PathLike[str],
    *,
    model: type[Model] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """The model of a checkpoint in Hugging Face's layout, ready to use (in eval mode).

    ``name`` is that of a shipped model, a folder, or a model of the Hugging Face hub. Which model
    it is, the checkpoint says; ``model`` reads it as another, as in
    ``load("bert-base-uncased", model=Bert)``. Without ``dtype`` the weights keep the precision they
    are stored in; packed ones become float32.

    >>> import tempfile
    >>> from regard.models import BertConfig
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Bert(BertConfig(vocabulary=10, dim=8, depth=1, heads=2, inner=16)).save(folder)
    ...     type(load(folder)).__name__
    'Bert'
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"load(dtype=...) is a floating-point dtype of torch, not {dtype!r}.")
    if model is not None and not (isinstance(model, type) and issubclass(model, Model)):
        raise InputError(f"load(model=...) is a class such as Bert, not {model!r}.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, TypeError, AssertionError):  # the last of a PyTorch without CUDA
        raise InputError(f"PyTorch has no device {device!r} here.") from None
    source = open_checkpoint(name)
    if model is None:
        model = _model_of(source.config)
    return model.from_checkpoint(source, device, dtype)


def _model_of(config: dict[str, object]) -> type[Model]:
    names = config.get("architectures")
    if isinstance(names, list):
        for name in names:
            if isinstance(name, str) and name in ARCHITECTURES:
                return ARCHITECTURES[name]
    kind = config.get("model_type")
    if not names and isinstance(kind, str) and kind in MODEL_TYPES:
        return MODEL_TYPES[kind]
    raise CheckpointError(
        f"config.json names the architectures {names!r} and the model_type {kind!r}. regard has "
        f"{', '.join(ARCHITECTURES)}. To read it as one of them, pass model=."
    )
