"""regard: fast attention you can see.

The public names, each loaded on first use, so that ``import regard`` loads nothing heavy.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # type checkers and editors read this list, and a test compares it with _HOMES
    from regard import pictures as pictures
    from regard.checkpoints.downloading import get as get
    from regard.decoding.generation import generate as generate
    from regard.decoding.generation import stream_tokens as stream_tokens
    from regard.decoding.settings import Settings as Settings
    from regard.decoding.strategies import Beam as Beam
    from regard.decoding.strategies import Generated as Generated
    from regard.decoding.strategies import Greedy as Greedy
    from regard.decoding.strategies import Sample as Sample
    from regard.errors import BackendError as BackendError
    from regard.errors import CheckpointError as CheckpointError
    from regard.errors import InputError as InputError
    from regard.errors import RegardError as RegardError
    from regard.errors import UnknownModelError as UnknownModelError
    from regard.interpret.explaining.inputs import explain as explain
    from regard.interpret.explaining.inputs import explain_projections as explain_projections
    from regard.interpret.explaining.inputs import explain_tensors as explain_tensors
    from regard.interpret.explaining.layer import explain_model as explain_model
    from regard.interpret.explaining.trace import Trace as Trace
    from regard.interpret.looking import look as look
    from regard.interpret.watched import Watched as Watched
    from regard.interpret.watching import watch as watch
    from regard.layers.cache import KeyValueCache as KeyValueCache
    from regard.layers.losses import linear_cross_entropy as linear_cross_entropy
    from regard.layers.modules import Block as Block
    from regard.layers.modules import FeedForward as FeedForward
    from regard.layers.modules import MultiHeadAttention as MultiHeadAttention
    from regard.layers.modules import RMSNorm as RMSNorm
    from regard.mechanism import biases as biases
    from regard.mechanism import masks as masks
    from regard.mechanism.biases import Alibi as Alibi
    from regard.mechanism.biases import RelativeBuckets as RelativeBuckets
    from regard.mechanism.biases import RelativeContent as RelativeContent
    from regard.mechanism.functional import attention as attention
    from regard.mechanism.functional import why as why
    from regard.mechanism.mask_adapters import mask_from_multihead as mask_from_multihead
    from regard.mechanism.mask_adapters import mask_from_torch as mask_from_torch
    from regard.mechanism.mask_adapters import mask_from_transformers as mask_from_transformers
    from regard.mechanism.mask_adapters import mask_from_xformers as mask_from_xformers
    from regard.mechanism.masks import Causal as Causal
    from regard.mechanism.masks import Dilated as Dilated
    from regard.mechanism.masks import Padding as Padding
    from regard.mechanism.masks import Prefix as Prefix
    from regard.mechanism.masks import Segments as Segments
    from regard.mechanism.masks import Window as Window
    from regard.mechanism.seeing import See as See
    from regard.mechanism.seeing import Seen as Seen
    from regard.mechanism.seeing import Top as Top
    from regard.models.bert import Bert as Bert
    from regard.models.bert import BertAnswering as BertAnswering
    from regard.models.bert import BertConfig as BertConfig
    from regard.models.bert import BertMaskedLM as BertMaskedLM
    from regard.models.gpt2 import GPT2 as GPT2
    from regard.models.gpt2 import GPT2Config as GPT2Config
    from regard.models.loading import load as load
    from regard.models.quantization import prepack as prepack
    from regard.models.quantization import quantize as quantize
    from regard.models.t5 import T5 as T5
    from regard.models.t5 import T5Config as T5Config
    from regard.models.transformer import Transformer as Transformer
    from regard.models.transformer import TransformerConfig as TransformerConfig
    from regard.models.transformer_xl import TransformerXL as TransformerXL
    from regard.models.transformer_xl import TransformerXLConfig as TransformerXLConfig
    from regard.tasks.completion import complete as complete
    from regard.tasks.completion import stream_completion as stream_completion
    from regard.tasks.question_answering import answer as answer
    from regard.tasks.records import Answer as Answer
    from regard.tasks.records import Completion as Completion
    from regard.tasks.records import Summary as Summary
    from regard.tasks.records import Translation as Translation
    from regard.tasks.records import WordAttention as WordAttention
    from regard.tasks.summarization import summarize as summarize
    from regard.tasks.translation import translate as translate
    from regard.text.tokenizer import Encoded as Encoded
    from regard.text.tokenizer import Tokenizer as Tokenizer

__version__ = "0.1.0"

_HOMES = {
    "regard.checkpoints.downloading": ("get",),
    "regard.decoding.generation": ("generate", "stream_tokens"),
    "regard.decoding.settings": ("Settings",),
    "regard.decoding.strategies": ("Beam", "Greedy", "Generated", "Sample"),
    "regard.errors": (
        "BackendError",
        "CheckpointError",
        "InputError",
        "RegardError",
        "UnknownModelError",
    ),
    "regard.interpret.explaining.inputs": ("explain", "explain_projections", "explain_tensors"),
    "regard.interpret.explaining.layer": ("explain_model",),
    "regard.interpret.explaining.trace": ("Trace",),
    "regard.interpret.looking": ("look",),
    "regard.interpret.watched": ("Watched",),
    "regard.interpret.watching": ("watch",),
    "regard.layers.cache": ("KeyValueCache",),
    "regard.layers.losses": ("linear_cross_entropy",),
    "regard.layers.modules": ("Block", "FeedForward", "MultiHeadAttention", "RMSNorm"),
    "regard.mechanism.biases": ("Alibi", "RelativeBuckets", "RelativeContent"),
    "regard.mechanism.functional": ("attention", "why"),
    "regard.mechanism.mask_adapters": (
        "mask_from_multihead",
        "mask_from_torch",
        "mask_from_transformers",
        "mask_from_xformers",
    ),
    "regard.mechanism.masks": ("Causal", "Dilated", "Padding", "Prefix", "Segments", "Window"),
    "regard.mechanism.seeing": ("See", "Seen", "Top"),
    "regard.models.bert": ("Bert", "BertAnswering", "BertConfig", "BertMaskedLM"),
    "regard.models.gpt2": ("GPT2", "GPT2Config"),
    "regard.models.loading": ("load",),
    "regard.models.quantization": ("prepack", "quantize"),
    "regard.models.t5": ("T5", "T5Config"),
    "regard.models.transformer": ("Transformer", "TransformerConfig"),
    "regard.models.transformer_xl": ("TransformerXL", "TransformerXLConfig"),
    "regard.tasks.completion": ("complete", "stream_completion"),
    "regard.tasks.question_answering": ("answer",),
    "regard.tasks.records": ("Answer", "WordAttention", "Completion", "Summary", "Translation"),
    "regard.tasks.summarization": ("summarize",),
    "regard.tasks.translation": ("translate",),
    "regard.text.tokenizer": ("Encoded", "Tokenizer"),
}
_MODULES = {
    "biases": "regard.mechanism.biases",
    "masks": "regard.mechanism.masks",
    "pictures": "regard.pictures",
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted([*_HOME, *_MODULES])]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOME:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__


# attn_implementation="regard" of transformers
import_module("regard.interpret.adapters.transformers_import").register_when_imported()
