"""The subject of anything that ``look`` and ``explain`` take."""

from __future__ import annotations

import os
import sys
from typing import Any

from torch import nn

from regard.errors import InputError
from regard.interpret.subjects.images import ImageModel, pixels_of
from regard.interpret.subjects.library import LibraryModel, open_model
from regard.interpret.subjects.others import PlainModule, TransformersModel, TransformersTranslator
from regard.interpret.subjects.ours import OwnModel
from regard.interpret.subjects.readers import reader_of
from regard.interpret.subjects.subject import Subject
from regard.models.bundle import Bundle
from regard.models.model import Model
from regard.text.tokenizer import Tokenizer


def subject_of(
    model: nn.Module | Bundle | LibraryModel | str | os.PathLike[str],
    tokenizer: Any = None,
    *,
    trust_remote_code: bool = False,
) -> Subject:
    """The subject of a name, a folder, an opened model, or a model object with its tokenizer."""
    if isinstance(model, str | os.PathLike):
        model = open_model(model, trust_remote_code=trust_remote_code)
    elif trust_remote_code:
        raise InputError("trust_remote_code applies to a folder or a name, not to a loaded model.")
    if isinstance(model, Bundle):
        own = model.tokenizer if tokenizer is None else tokenizer
        return OwnModel(model.model, _own_tokenizer(own), model)
    if isinstance(model, Model):
        return OwnModel(model, _own_tokenizer(tokenizer))
    if isinstance(model, LibraryModel):
        tokenizer = model.tokenizer if tokenizer is None else tokenizer
        model = model.model
    if not isinstance(model, nn.Module):
        raise InputError(
            "A model is a name, a folder, or a PyTorch module with its tokenizer, not "
            f"{type(model).__name__}."
        )
    reader = reader_of(tokenizer, type(model).__name__)
    if not of_transformers(model):
        return PlainModule(model, reader)
    config: Any = model.config
    kind = TransformersTranslator if config.is_encoder_decoder else TransformersModel
    return kind(model, reader)


def image_subject_of(
    model: nn.Module | Bundle | LibraryModel | str | os.PathLike[str],
    image: object,
    *,
    trust_remote_code: bool = False,
) -> ImageModel:
    """The subject of a vision model, with its image."""
    if isinstance(model, str | os.PathLike):
        model = open_model(model, trust_remote_code=trust_remote_code)
    if isinstance(model, Bundle):
        raise InputError(f"{model.name} is a {type(model.model).__name__}, which reads no images.")
    loaded = model.model if isinstance(model, LibraryModel) else model
    if not isinstance(loaded, nn.Module) or not of_transformers(loaded):
        raise InputError(
            "Images are for vision models of transformers, by name, folder or object, not for "
            f"{type(loaded).__name__}."
        )
    return ImageModel(loaded, pixels_of(image, model))


def of_transformers(model: nn.Module) -> bool:
    """Whether a module is a model of transformers."""
    # A module of the library cannot exist before the library is imported.
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(model, library.PreTrainedModel)


def _own_tokenizer(tokenizer: Any) -> Tokenizer:
    if tokenizer is None:
        raise InputError(
            "A loaded model needs its tokenizer. Pass tokenizer=Tokenizer.load(...), too."
        )
    if not isinstance(tokenizer, Tokenizer):
        raise InputError(
            "A model of regard takes a Tokenizer of regard, as Tokenizer.load(...), not "
            f"{type(tokenizer).__name__}."
        )
    return tokenizer
