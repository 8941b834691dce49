"""Load the model of a checkpoint."""

from __future__ import annotations

import os

import torch

from regard.checkpoints.tensors import open_checkpoint
from regard.errors import InputError
from regard.models.model import Model
from regard.models.registry import architecture_of


def load(
    name: str | os.PathLike[str],
    *,
    model: type[Model] | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> Model:
    """Load a model from a checkpoint in Hugging Face's layout, in eval mode.

    ``name`` names a shipped or downloaded model (``regard models``), or a folder. ``model``
    overrides the class that config.json names, as in ``load("bert-base-uncased", model=Bert)``.
    Without ``dtype`` the weights keep their stored precision; packed weights become float32.

    >>> import tempfile
    >>> from regard import Bert, BertConfig
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Bert(BertConfig(vocabulary=10, dim=8, depth=1, heads=2, inner=16)).save(folder)
    ...     type(load(folder)).__name__
    'Bert'
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(f"load(dtype=...) must be a floating-point dtype, not {dtype!r}.")
    if model is not None and not (isinstance(model, type) and issubclass(model, Model)):
        raise InputError(f"load(model=...) must be a class such as Bert, not {model!r}.")
    check_device(device)
    source = open_checkpoint(name)
    if model is None:
        model = architecture_of(source.config).model_class()
    return model.from_checkpoint(source, device, dtype)


def check_device(device: torch.device | str | None) -> None:
    """Raise InputError for a device that PyTorch does not have, or that cannot store values."""
    try:
        torch.zeros(1, device=device).item()  # an error on meta
    except (RuntimeError, TypeError, AssertionError):  # AssertionError: built without CUDA
        offered = "cpu or cuda" if torch.cuda.is_available() else "cpu"
        raise InputError(
            f"PyTorch has no device {str(device)!r} here to run a model on. Use {offered}."
        ) from None
