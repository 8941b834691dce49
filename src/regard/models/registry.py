"""The architectures that regard implements: one row each.

A row names its classes and loads them on first use, so this file needs no PyTorch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from regard.errors import CheckpointError

if TYPE_CHECKING:
    from regard.models.model import Config, Model


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: its names, its classes, what it is for, and what trains it.

    >>> [row.name for row in ARCHITECTURES if "translation" in row.trains_for]
    ['transformer', 't5']
    """

    name: str  # in recipes; the heads of one architecture share it
    model: str  # "module:Class", below regard.models
    config: str
    hub_names: tuple[str, ...]  # "architectures" in config.json
    task: str  # what a checkpoint of it is for
    model_type: str = ""  # in config.json, read where it names no architecture
    scored_as: str = ""  # the task whose scores it has; "" where it has none
    trains_for: tuple[str, ...] = ()  # the tasks of recipes
    tokenizers: tuple[str, ...] = ()  # kinds of tokenizer that have the tokens it needs

    def model_class(self) -> type[Model]:
        """Its class; importing it loads PyTorch."""
        model: type[Model] = _load(self.model)
        return model

    def config_class(self) -> type[Config]:
        """The class of its config."""
        config: type[Config] = _load(self.config)
        return config


_PAIRS = ("translation", "summarization")

ARCHITECTURES = (
    Architecture(
        "transformer", "transformer:Transformer", "transformer:TransformerConfig",
        ("MarianMTModel",), "translation", model_type="marian", scored_as="translation",
        trains_for=_PAIRS, tokenizers=("bpe", "unigram"),
    ),
    Architecture(
        "t5", "t5:T5", "t5:T5Config",
        ("T5ForConditionalGeneration", "T5WithLMHeadModel"), "text to text", model_type="t5",
        scored_as="summarization", trains_for=(*_PAIRS, "span corruption"),
        tokenizers=("bpe", "unigram"),
    ),
    Architecture(
        "bert", "bert:BertAnswering", "bert:BertConfig",
        ("BertForQuestionAnswering",), "question answering", scored_as="question answering",
        trains_for=("question answering",), tokenizers=("wordpiece",),
    ),
    Architecture(
        "bert", "bert:BertMaskedLM", "bert:BertConfig",
        ("BertForMaskedLM", "BertForPreTraining"), "masked language modelling",
        trains_for=("masked language modelling",), tokenizers=("wordpiece",),
    ),
    Architecture(
        "bert", "bert:Bert", "bert:BertConfig", ("BertModel",), "embedding", model_type="bert",
    ),
    Architecture(
        "gpt2", "gpt2:GPT2", "gpt2:GPT2Config",
        ("GPT2LMHeadModel",), "language modelling", model_type="gpt2",
        scored_as="language modelling", trains_for=("language modelling",),
        tokenizers=("bpe", "words"),
    ),
    Architecture(
        "transformer-xl", "transformer_xl:TransformerXL", "transformer_xl:TransformerXLConfig",
        ("TransfoXLLMHeadModel",), "language modelling", model_type="transfo-xl",
        scored_as="language modelling", trains_for=("language modelling",),
        tokenizers=("bpe", "words"),
    ),
)  # fmt: skip
HUB_NAMES = {name: row for row in ARCHITECTURES for name in row.hub_names}
NAMES = tuple(dict.fromkeys(row.name for row in ARCHITECTURES))  # as recipes have them
# By task, the architectures that recipes train for it.
TRAINABLE = {
    task: tuple(row.name for row in ARCHITECTURES if task in row.trains_for)
    for task in dict.fromkeys(task for row in ARCHITECTURES for task in row.trains_for)
}


def trained(name: str, task: str) -> Architecture:
    """The row of the architecture ``name`` that recipes train for ``task``."""
    return next(row for row in ARCHITECTURES if row.name == name and task in row.trains_for)


def architecture_of(config: Mapping[str, Any]) -> Architecture:
    """The row of a checkpoint, from its config.json."""
    names, model_type = config.get("architectures"), config.get("model_type")
    if isinstance(names, list):
        for name in names:
            if isinstance(name, str) and name in HUB_NAMES:
                return HUB_NAMES[name]
    if not names and isinstance(model_type, str):
        for row in ARCHITECTURES:
            if row.model_type and row.model_type == model_type:
                return row
    raise CheckpointError(
        f"config.json names the architectures {names!r} and the model_type {model_type!r}. regard "
        f"has {', '.join(HUB_NAMES)}. To read it as one of them, pass model=."
    )


def _load(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(import_module(f"regard.models.{module}"), name)
