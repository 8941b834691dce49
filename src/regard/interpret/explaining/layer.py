"""explain_model(): trace one attention layer of a loaded model as it runs over a text."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn

from regard.errors import InputError
from regard.interpret.explaining.others import explain_other, record
from regard.interpret.explaining.steps import (
    OutputProjection,
    TracedCall,
    features,
    head_names,
    trace_call,
)
from regard.interpret.explaining.trace import Numbers, Step, Trace
from regard.interpret.runs import LayerCall, TextRun, prepare_run
from regard.interpret.subjects.library import LibraryModel
from regard.interpret.subjects.ours import OwnModel
from regard.interpret.subjects.subject import Layer
from regard.layers.modules import MultiHeadAttention
from regard.mechanism.biases import Bias
from regard.mechanism.call import Call, check
from regard.mechanism.masks import Mask
from regard.models.bundle import Bundle
from regard.models.transformer_xl import RelativeAttention

MAX_TOKENS = 128  # the most tokens of a sentence, because a trace holds all their numbers


def explain_model(
    model: nn.Module | Bundle | LibraryModel | str | os.PathLike[str],
    text: str,
    *,
    tokenizer: Any = None,
    layer: str | int | None = None,
    head: int = 0,
    word: str | None = None,
    target: str | None = None,
    trust_remote_code: bool = False,
) -> Trace:
    """Trace every step of one head of a model while the model runs over ``text``.

    ``model``, ``tokenizer`` and ``trust_remote_code`` are as in :func:`regard.look`, and layers
    have the same names; the default is the first. ``target`` is the output of an encoder-decoder;
    without it, the model generates one. Examples in the trace follow ``word``, by default the last
    word.

    >>> trace = explain_model("books-gpt2", "The cat sat.", layer=1, head=2)
    >>> trace.subject, trace.agreement.holds
    ('GPT2, layer 1, head 2', True)
    """
    run = prepare_run(
        model, text, tokenizer=tokenizer, target=target, trust_remote_code=trust_remote_code
    )
    chosen = run.layers[0] if layer is None else run.layer(layer)
    run.check_head(chosen, head)
    queries, keys = run.tokens_of(chosen)
    _check_length(run, chosen, max(len(queries), len(keys)), written=target is None)
    words = [each for each in queries.words if not each.special] or list(queries.words)
    followed = words[-1] if word is None else queries.find(word)[0]
    if not isinstance(run.subject, OwnModel):
        return _of_other(run, chosen, head, followed.places[0])
    recorded = run.calls([chosen], run.chunks[0])[chosen.name]
    assert isinstance(chosen.module, MultiHeadAttention)
    output = chosen.module.output
    traced = TracedCall(
        _call(chosen, recorded),
        queries.labels,
        keys.labels,
        followed.places[0],
        head_names(chosen.heads, start=0),
        (head,),
        chosen.across,
    )
    return trace_call(
        traced,
        _lead(run, chosen, recorded, traced),
        OutputProjection(output.weight.t(), output.bias),
        subject=f"{run.subject.name}, layer {chosen.name}, head {head}",
        expected=recorded.output[0],
    )


def _of_other(run: TextRun, layer: Layer, head: int, focus: int) -> Trace:
    """The trace of a layer whose module is not regard's."""
    recorded = record(run, layer)
    queries, keys = run.tokens_of(layer)
    names = head_names(layer.heads, start=0)
    traced = TracedCall(
        recorded.call, queries.labels, keys.labels, focus, names, (head,), layer.across
    )
    return explain_other(run, layer, traced, recorded)


def _check_length(run: TextRun, layer: Layer, length: int, *, written: bool) -> None:
    windows = len(run.chunks) > 1
    if length <= MAX_TOKENS and not windows:
        return
    limit = min(MAX_TOKENS, run.chunks[0].stop) if windows else MAX_TOKENS
    advice = (
        f"the model wrote {length}. Give a shorter target."
        if written and layer.half == "decoder" and length > len(run.tokens)
        else f"the text has {length}. Give one sentence; regard.look() reads long texts."
    )
    raise InputError(f"explain_model() takes up to {limit} tokens for this model, but {advice}")


def _context(call: LayerCall) -> Any:
    """The second input of the layer: for cross-attention, the output of the encoder."""
    return call.arguments[1] if len(call.arguments) > 1 else call.keywords.get("context")


@torch.no_grad()
def _call(layer: Layer, recorded: LayerCall) -> Call:
    """The arguments of attention() that the layer computes from its recorded arguments."""
    module, args, kwargs = layer.module, recorded.arguments, recorded.keywords
    mask: Mask | None
    bias: Bias | None
    if isinstance(module, RelativeAttention):
        whole, queries, distances, mask = args
        query, key, value, bias = module.parts(whole, queries, distances)
    else:
        assert isinstance(module, MultiHeadAttention)
        mask, bias = kwargs.get("mask"), kwargs.get("bias")
        heads = module.forward_heads(args[0], _context(recorded), mask=mask, bias=bias)
        query, key, value = heads.query, heads.key, heads.value
    return check(query, key, value, mask, bias, module.scale, None, 0.0, None)


def _lead(run: TextRun, layer: Layer, recorded: LayerCall, traced: TracedCall) -> tuple[Step, ...]:
    """The steps before the scores: the layer's input, and its queries, keys and values."""
    queries, keys = run.tokens_of(layer)
    x = recorded.arguments[0][0]
    dim, width = x.shape[1], traced.call.query.shape[-1]
    [head] = traced.shown
    depth = f"{layer.number} layer{'s' * (layer.number != 1)}"
    meaning = f"Each row is the output of {depth} for a token."
    if layer.across:
        meaning = (
            "The decoder predicts this token. Each row is the decoder's state before it predicts a "
            "token, after the self-attention of this layer."
        )
    elif not layer.number:
        meaning = "Each row is the embedding of a token."
    inputs = [Numbers("X", x, queries.labels, features(dim))]
    if layer.across:
        encoded = _context(recorded)[0]
        inputs.append(Numbers("X_encoder", encoded, keys.labels, features(dim)))
    sources = (
        "queries of X, the decoder's states, and keys and values of X_encoder, the encoder's output"
        if layer.across
        else "queries, keys and values of X"
    )
    relative = isinstance(layer.module, RelativeAttention)
    key_source = "X_encoder" if layer.across else "X"
    assert isinstance(layer.module, MultiHeadAttention)
    plus = "" if layer.module.qkv.bias is None else " + b_{}"
    return (
        Step(
            f"What reaches layer {layer.name}",
            f"X = {dim} numbers per token",
            f"The text is split into tokens; {traced.word} is number {queries.ids[traced.focus]} "
            f"of the vocabulary. {meaning}",
            tuple(inputs),
        ),
        Step(
            "Queries, keys and values",
            "    ".join(
                f"{side} = {source} W_{side}{plus.format(side)}"
                for side, source in (("Q", "X"), ("K", key_source), ("V", key_source))
            ),
            f"Three learned matrices, {dim} × {len(traced.heads) * width} each, make {sources}. "
            f"They hold all {len(traced.heads)} heads side by side: head {head} has columns "
            f"{head * width + 1} to {(head + 1) * width}. Each token has a query and a "
            "key, which are compared, and a value, which it contributes."
            + (" A learned vector u is added to every query." if relative else ""),
            traced.vectors(),
            traced.example_vectors(),
        ),
    )
