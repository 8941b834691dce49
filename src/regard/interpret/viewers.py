"""The input of BertViz and CircuitsVis, which draw every weight of a short text in a notebook."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from regard.errors import InputError

MAX_VIEWED = 2**22  # weights; with more, a notebook becomes slow or does not open

KINDS = ("encoder", "decoder", "cross")


def check_size(count: int, tokens: int) -> None:
    """Raise InputError if a viewer cannot show so many weights."""
    if count > MAX_VIEWED:
        raise InputError(
            f"The text is too long for BertViz and CircuitsVis: over {tokens:,} tokens these are "
            f"{count:,} weights, and the limit is {MAX_VIEWED:,}. Give a shorter text or fewer "
            "layers. The pictures of regard show texts of any length."
        )


def bertviz(weights: Sequence[Tensor], tokens: Sequence[str]) -> dict[str, Any]:
    """The weights of a text on itself: a tensor [1, heads, tokens, tokens] for each layer."""
    layers = _layers(weights)
    check_tokens(layers[0], tokens, tokens)
    return {"attention": layers, "tokens": list(tokens)}


def bertviz_of_pair(
    weights: Mapping[str, Sequence[Tensor]], source: Sequence[str], target: Sequence[str]
) -> dict[str, Any]:
    """The weights of two texts, by kind (KINDS); rows of "cross" are tokens of the target."""
    texts = {"encoder": (source, source), "decoder": (target, target), "cross": (target, source)}
    given = {}
    for kind in KINDS:
        if kind in weights:
            given[f"{kind}_attention"] = layers = _layers(weights[kind])
            check_tokens(layers[0], *texts[kind])
    return {**given, "encoder_tokens": list(source), "decoder_tokens": list(target)}


def circuitsvis(weights: Tensor, tokens: Sequence[str]) -> dict[str, Any]:
    """The weights of one layer on the text itself, [heads, tokens, tokens]."""
    check_size(weights.numel(), len(tokens))
    check_tokens(weights, tokens, tokens)
    return {"tokens": list(tokens), "attention": _plain(weights)}


def _layers(weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
    check_size(sum(layer.numel() for layer in weights), max(weights[0].shape[-2:]))
    shapes = list(dict.fromkeys(tuple(layer.shape) for layer in weights))
    if len(shapes) > 1:
        given = " and ".join(" x ".join(map(str, shape[1:])) for shape in shapes)
        raise InputError(
            "BertViz shows layers with the same numbers of heads, queries and keys, but these have "
            f"{given}. Choose layers, as in to_bertviz(tokens, layers='encoder.*')."
        )
    return tuple(map(_plain, weights))


def _plain(weights: Tensor) -> Tensor:
    return weights.detach().float().cpu()


def check_tokens(weights: Tensor, queries: Sequence[str], keys: Sequence[str]) -> None:
    """Raise InputError unless there is a token for each query and key of [..., queries, keys]."""
    for labels, count, what in zip(
        (queries, keys), weights.shape[-2:], ("queries", "keys"), strict=True
    ):
        if isinstance(labels, str) or len(labels) != count:
            given = "one string" if isinstance(labels, str) else f"{len(labels)} tokens"
            raise InputError(
                f"The weights have {count} {what}, but got {given}. Give one string for each "
                "token, special tokens included."
            )
