"""The numbers of one attention layer of a loaded model, taken while it runs."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret.explaining.record import Numbers, Step
from regard.interpret.explaining.steps import Generated, Heads, features, follow, meeting, vectors
from regard.interpret.explaining.trace import Trace
from regard.interpret.runs import Reading, read
from regard.mechanism.biases import Bias
from regard.mechanism.call import Call, check
from regard.mechanism.masks import Mask
from regard.models.model import AttentionLayer, Model
from regard.models.transformer_xl import RelativeAttention
from regard.text.tokenizer import Tokenizer

MOST_TOKENS = 128  # of a sentence; more of them nobody reads one by one


def explain_model(
    model: Model | str | os.PathLike[str],
    tokenizer: Tokenizer | None,
    sentence: str,
    layer: str | int | None,
    head: int | None,
    word: str | None,
    target: str | None,
) -> Trace:
    """Every step of one head of one layer, on what really reached it."""
    reading = read(model, sentence, tokenizer=tokenizer, target=target)
    chosen = reading.layers[0] if layer is None else reading.layer(layer)
    number = reading.head(chosen, 0 if head is None else head)
    asking, asked = reading.sides(chosen)
    longest = max(len(asking), len(asked))
    if longest > MOST_TOKENS or len(reading.chunks) > 1:
        several = len(reading.chunks) > 1
        most = min(MOST_TOKENS, reading.chunks[0].stop) if several else MOST_TOKENS
        wrote = chosen.half == "decoder" and target is None and longest == len(asking)
        raise InputError(
            f"explain() follows up to {most} tokens of this model, but "
            + (
                f"it wrote {longest} by itself. Give the target it is to have written."
                if wrote
                else f"there are {longest}. Take one sentence; regard.look() reads long texts."
            )
        )
    words = [each for each in asking.words if not each.special] or list(asking.words)
    followed = words[-1] if word is None else asking.find(word)[0]
    focus = followed.places[0]
    arguments, fast = _captured(reading, chosen)
    call, entered = _call(chosen, *arguments)
    count = chosen.module.heads
    heads = Heads(tuple(f"head {place}" for place in range(count)), (number,))
    name = f"{type(reading.model).__name__}, layer {chosen.name}, head {number}"
    return follow(
        call,
        _lead(reading, chosen, call, entered, heads, focus),
        asking.labels,
        asked.labels,
        focus,
        Generated(chosen.module.output.weight.t(), chosen.module.output.bias),
        heads,
        subject=name,
        fast=fast,
        across=chosen.across,
    )


def _captured(reading: Reading, layer: AttentionLayer) -> tuple[tuple[Any, dict[str, Any]], Tensor]:
    """What a layer was called with while the model ran, and what it answered, [queries, dim]."""
    found: dict[str, Any] = {}

    def hook(_: object, args: Any, kwargs: dict[str, Any], output: Tensor) -> None:
        found["arguments"], found["output"] = (args, kwargs), output[0]

    handle = layer.module.register_forward_hook(hook, with_kwargs=True)
    try:
        reading.forward(reading.chunks[0])
    finally:
        handle.remove()
    return found["arguments"], found["output"]


@torch.no_grad()
def _call(
    layer: AttentionLayer, args: Any, kwargs: dict[str, Any]
) -> tuple[Call, tuple[Tensor, Tensor]]:
    """The layer's attention as a call, and what entered: of those who ask, of those asked."""
    module = layer.module
    mask: Mask | None
    bias: Bias | None
    if isinstance(module, RelativeAttention):
        whole, queries, distances, mask = args
        query, key, value, bias = module.parts(whole, queries, distances)
        x = context = whole
    else:
        x, context = args[0], args[1] if len(args) > 1 else kwargs.get("context")
        mask, bias = kwargs.get("mask"), kwargs.get("bias")
        found = module.forward_heads(x, context, mask=mask, bias=bias)
        query, key, value = found.query, found.key, found.value
        context = x if context is None else context
    return (
        check(query, key, value, mask, bias, module.scale, None, 0.0, None),
        (x[0], context[0]),
    )


def _lead(
    reading: Reading,
    layer: AttentionLayer,
    call: Call,
    entered: tuple[Tensor, Tensor],
    heads: Heads,
    focus: int,
) -> tuple[Step, ...]:
    """What comes before the scores: what reached the layer, and its queries, keys and values."""
    asking, asked = reading.sides(layer)
    x, context = entered
    into, width, head = x.shape[1], call.query.shape[-1], heads.shown[0]
    first, last = head * width + 1, (head + 1) * width
    number = asking.ids[focus]
    before = {0: "first embedded", 1: "embedded and went through 1 layer"}.get(
        layer.number, f"embedded and went through {layer.number} layers"
    )
    stands = f"Each was {before}; this is what then stands for it."
    if layer.across:
        stands = (
            "It is being written: each row is what the decoder has after the token before, and "
            "writes this one from, this layer's own attention included."
        )
    across = Numbers("X_encoder", context, asked.labels, features(into))
    rows = (Numbers("X", x, asking.labels, features(into)), *((across,) if layer.across else ()))
    matrices = f"{into} × {len(heads.names) * width}"
    asks = "X, what the decoder has so far," if layer.across else "X"
    from_ = " of X_encoder, what the encoder made of the source" if layer.across else ""
    relative = isinstance(layer.module, RelativeAttention)
    asked_of = "X_encoder" if layer.across else "X"
    plus = "" if layer.module.qkv.bias is None else " + b_{}"
    return (
        Step(
            f"What reaches layer {layer.name}",
            f"X = {into} numbers per token",
            f"The text is cut into tokens; {asking.labels[focus]} is number {number} of the "
            f"vocabulary. {stands}",
            rows,
        ),
        Step(
            "Queries, keys and values",
            "    ".join(
                f"{side} = {source} W_{side}{plus.format(side)}"
                for side, source in (("Q", "X"), ("K", asked_of), ("V", asked_of))
            ),
            f"Three learned matrices, {matrices} each, make queries of {asks} and keys and values"
            f"{from_ or ' of the same'}. They hold all {len(heads.names)} heads side by side: head "
            f"{head} has columns {first} to {last}. Each token asks with its query, is found by "
            "its key, and hands over its value."
            + (" To every query a learned vector u is added." if relative else ""),
            vectors(call, asking.labels, asked.labels, heads),
            meeting(call, asking.labels, asked.labels, focus, heads),
        ),
    )
