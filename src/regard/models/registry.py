"""The table of the architectures that regard implements.

A row names its classes and loads them on first use, so this file needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.errors import CheckpointError, InputError

if TYPE_CHECKING:
    from regard.models.configs import Config
    from regard.models.model import Model


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: its names, its classes and its tasks.

    >>> [row.name for row in ARCHITECTURES if "translation" in row.trains_for]
    ['transformer', 't5']
    """

    name: str  # in recipes; BERT's variants share a name
    model: str  # "module:Class"
    config: str  # "module:Class"
    hub_names: tuple[str, ...]  # "architectures" in config.json; saving writes the first
    model_type: str  # in config.json; used if "architectures" is missing
    task: str  # the task shown in listings
    serves: tuple[str, ...] = ()  # functions of regard.tasks that accept the model
    scored_as: str = ""  # the task whose metrics evaluate the model; "" if none do
    trains_for: tuple[str, ...] = ()  # tasks that recipes can train it for
    tokenizers: tuple[str, ...] = ()  # kinds of tokenizer with the special tokens it needs

    @property
    def class_name(self) -> str:
        return self.model.rpartition(":")[2]

    def model_class(self) -> type[Model]:
        """Import the model class, which loads PyTorch."""
        model: type[Model] = _load(self.model)
        return model

    def config_class(self) -> type[Config]:
        """Import the config class."""
        config: type[Config] = _load(self.config)
        return config


ARCHITECTURES = [
    Architecture(
        "transformer", "regard.models.transformer:Transformer",
        "regard.models.transformer:TransformerConfig", ("MarianMTModel",), "marian",
        "translation", scored_as="translation", trains_for=("translation", "summarization"),
        serves=("translate", "summarize"), tokenizers=("bpe", "unigram"),
    ),
    Architecture(
        "t5", "regard.models.t5:T5", "regard.models.t5:T5Config",
        ("T5ForConditionalGeneration", "T5WithLMHeadModel"), "t5",
        "text to text", scored_as="summarization",
        trains_for=("translation", "summarization", "span corruption"),
        serves=("translate", "summarize"), tokenizers=("bpe", "unigram"),
    ),
    Architecture(
        "bert", "regard.models.bert:Bert", "regard.models.bert:BertConfig", ("BertModel",),
        "bert", "embedding",
    ),
    Architecture(
        "bert", "regard.models.bert:BertAnswering", "regard.models.bert:BertConfig",
        ("BertForQuestionAnswering",), "bert",
        "question answering", scored_as="question answering",
        trains_for=("question answering",), serves=("answer",), tokenizers=("wordpiece",),
    ),
    Architecture(
        "bert", "regard.models.bert:BertMaskedLM", "regard.models.bert:BertConfig",
        ("BertForMaskedLM", "BertForPreTraining"), "bert",
        "masked language modelling", trains_for=("masked language modelling",),
        tokenizers=("wordpiece",),
    ),
    Architecture(
        "gpt2", "regard.models.gpt2:GPT2", "regard.models.gpt2:GPT2Config",
        ("GPT2LMHeadModel",), "gpt2",
        "language modelling", scored_as="language modelling",
        trains_for=("language modelling",), serves=("complete",), tokenizers=("bpe", "words"),
    ),
    Architecture(
        "transformer-xl", "regard.models.transformer_xl:TransformerXL",
        "regard.models.transformer_xl:TransformerXLConfig", ("TransfoXLLMHeadModel",),
        "transfo-xl",
        "language modelling", scored_as="language modelling",
        trains_for=("language modelling",), serves=("complete",), tokenizers=("bpe", "words"),
    ),
]  # fmt: skip
NAMES = tuple(dict.fromkeys(row.name for row in ARCHITECTURES))  # as in recipes
# For each task of recipes, the architectures that can be trained for it.
TRAINABLE = {
    task: tuple(row.name for row in ARCHITECTURES if task in row.trains_for)
    for task in dict.fromkeys(task for row in ARCHITECTURES for task in row.trains_for)
}


def trained(name: str, task: str) -> Architecture:
    """Return the row of the architecture ``name`` that recipes train for ``task``."""
    return next(row for row in ARCHITECTURES if row.name == name and task in row.trains_for)


def row_of(model: type[Model]) -> Architecture:
    """Return the row of a model class or of its nearest base class."""
    for kind in model.__mro__:
        for row in ARCHITECTURES:
            if row.model == f"{kind.__module__}:{kind.__name__}":
                return row
    raise InputError(f"{model.__name__} has no row in regard.models.registry.")


def row_named(hub_name: object) -> Architecture | None:
    """Return the row of a name in config.json's "architectures"; None if there is no such row."""
    return next((row for row in ARCHITECTURES if hub_name in row.hub_names), None)


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """Return the row that fits the contents of a config.json."""
    if (row := _fitting(config)) is not None:
        return row
    names, model_type = config.get("architectures"), config.get("model_type")
    known = ", ".join(name for row in ARCHITECTURES for name in row.hub_names)
    raise CheckpointError(
        f"config.json names the architectures {names!r} and the model_type {model_type!r}, which "
        f"regard does not implement. It implements {known}. To load the checkpoint as one of "
        "them, pass model=."
    )


def implements(config: Mapping[str, Any]) -> bool:
    """Return whether regard implements the architecture of a config.json."""
    return _fitting(config) is not None


def _fitting(config: Mapping[str, Any]) -> Architecture | None:
    names, model_type = config.get("architectures"), config.get("model_type")
    if isinstance(names, list):
        for name in names:
            if (row := row_named(name)) is not None:
                return row
    if not names:
        for row in ARCHITECTURES:
            if row.model_type == model_type:
                return row
    return None


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)
