"""regard: fast attention you can see.

The public names, each loaded on first use, so that ``import regard`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard import pictures
    from regard.decoding import Beam, Greedy, Output, Sample, generate, stream
    from regard.errors import (
        BackendError,
        CheckpointError,
        InputError,
        RegardError,
        UnknownModelError,
    )
    from regard.explaining import Trace, explain
    from regard.layers import Block, FeedForward, MultiHeadAttention, RMSNorm
    from regard.looking import look
    from regard.losses import linear_cross_entropy
    from regard.mechanism import attention, biases, masks, why
    from regard.mechanism.biases import Alibi, RelativeBuckets, RelativeContent
    from regard.mechanism.cache import Cache
    from regard.mechanism.masks import Causal, Padding, Prefix, Segments, Window
    from regard.mechanism.seeing import See, Seen, Top
    from regard.models import (
        GPT2,
        T5,
        Bert,
        BertAnswering,
        BertConfig,
        BertMaskedLM,
        GPT2Config,
        T5Config,
        Transformer,
        TransformerConfig,
        TransformerXL,
        TransformerXLConfig,
        load,
    )
    from regard.quantizing import arrange, quantize
    from regard.tasks import (
        Answer,
        Attended,
        Completion,
        Summary,
        Translation,
        answer,
        complete,
        completing,
        summarize,
        translate,
    )
    from regard.text import Encoded, Text
    from regard.watching import Watched, watch

__version__ = "0.1.0"

_HOMES = {
    "regard.decoding": ("Beam", "Greedy", "Output", "Sample", "generate", "stream"),
    "regard.errors": (
        "BackendError",
        "CheckpointError",
        "InputError",
        "RegardError",
        "UnknownModelError",
    ),
    "regard.explaining": ("Trace", "explain"),
    "regard.layers": ("Block", "FeedForward", "MultiHeadAttention", "RMSNorm"),
    "regard.looking": ("look",),
    "regard.losses": ("linear_cross_entropy",),
    "regard.mechanism": ("attention", "biases", "masks", "why"),
    "regard.mechanism.biases": ("Alibi", "RelativeBuckets", "RelativeContent"),
    "regard.mechanism.cache": ("Cache",),
    "regard.mechanism.masks": ("Causal", "Padding", "Prefix", "Segments", "Window"),
    "regard.mechanism.seeing": ("See", "Seen", "Top"),
    "regard.models": (
        "GPT2",
        "T5",
        "Bert",
        "BertAnswering",
        "BertConfig",
        "BertMaskedLM",
        "GPT2Config",
        "T5Config",
        "Transformer",
        "TransformerConfig",
        "TransformerXL",
        "TransformerXLConfig",
        "load",
    ),
    "regard.quantizing": ("arrange", "quantize"),
    "regard.tasks": (
        "Answer",
        "Attended",
        "Completion",
        "Summary",
        "Translation",
        "answer",
        "complete",
        "completing",
        "summarize",
        "translate",
    ),
    "regard.text": ("Encoded", "Text"),
    "regard.watching": ("Watched", "watch"),
}
_MODULES = ("pictures",)  # public as a whole
_HOME = {name: home for home, names in _HOMES.items() for name in names}

# Spelled out, because type checkers and editors read it without running anything.
__all__ = [
    "GPT2",
    "T5",
    "Alibi",
    "Answer",
    "Attended",
    "BackendError",
    "Beam",
    "Bert",
    "BertAnswering",
    "BertConfig",
    "BertMaskedLM",
    "Block",
    "Cache",
    "Causal",
    "CheckpointError",
    "Completion",
    "Encoded",
    "FeedForward",
    "GPT2Config",
    "Greedy",
    "InputError",
    "MultiHeadAttention",
    "Output",
    "Padding",
    "Prefix",
    "RMSNorm",
    "RegardError",
    "RelativeBuckets",
    "RelativeContent",
    "Sample",
    "See",
    "Seen",
    "Segments",
    "Summary",
    "T5Config",
    "Text",
    "Top",
    "Trace",
    "Transformer",
    "TransformerConfig",
    "TransformerXL",
    "TransformerXLConfig",
    "Translation",
    "UnknownModelError",
    "Watched",
    "Window",
    "__version__",
    "answer",
    "arrange",
    "attention",
    "biases",
    "complete",
    "completing",
    "explain",
    "generate",
    "linear_cross_entropy",
    "load",
    "look",
    "masks",
    "pictures",
    "quantize",
    "stream",
    "summarize",
    "translate",
    "watch",
    "why",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return import_module(f"regard.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
