"""Trace an attention layer of a model that is not regard's: from what enters attention.

Queries, keys and values are recorded where ``watch`` computes the layer's attention. The linear
layers of the module show where they come from and where the heads go, as far as they have the
usual names and sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.interpret.explaining.steps import (
    TOLERANCES,
    OutputProjection,
    TracedCall,
    features,
    heads_of,
    trace_call,
)
from regard.interpret.explaining.trace import Numbers, Step, Trace
from regard.interpret.runs import TextRun
from regard.interpret.subjects.recording import recording
from regard.interpret.subjects.subject import Layer
from regard.mechanism.call import Call
from regard.mechanism.functional import observer
from regard.mechanism.seeing import See

# The names of the linear layers that make queries, keys and values.
PROJECTIONS = {
    "Q": ("q_proj", "query", "q", "q_lin"),
    "K": ("k_proj", "key", "k", "k_lin"),
    "V": ("v_proj", "value", "v", "v_lin"),
}


class Passed(NamedTuple):
    """The input and the output of a linear layer in the model's own run, [1, tokens, features]."""

    linear: nn.Linear
    given: Tensor
    output: Tensor

    def heads(self, width: int) -> Tensor:
        """The output of each head, [heads, tokens, width]."""
        rows = self.output[0]
        return rows.reshape(len(rows), -1, width).transpose(0, 1)


@dataclass(frozen=True, eq=False)
class RecordedLayer:
    """One call of attention, and what the linear layers of its module did in an unwatched run."""

    call: Call
    linears: dict[str, Passed]  # by their names in the module, in the order of their calls
    result: Tensor | None  # of the module itself, if it is a tensor or begins a tuple

    def projection(self, symbol: str) -> tuple[str, Passed] | None:
        """The linear layer that makes all heads of Q, K or V, with its name.

        It may make fewer heads of keys and values than there are queries, which share them.
        """
        _, _, tokens, width = self.side(symbol).shape
        heads = self.call.extent.heads
        for name, passed in self.linears.items():
            made, rest = divmod(passed.output.shape[-1], width)
            fits = passed.output.shape[1] == tokens and not rest and made and not heads % made
            if name.rpartition(".")[2] in PROJECTIONS[symbol] and fits:
                return name, passed
        return None

    def side(self, symbol: str) -> Tensor:
        """Q, K or V as it enters attention, [1, heads, tokens, width]."""
        return {"Q": self.call.query, "K": self.call.key, "V": self.call.value}[symbol]

    @property
    def shared_by(self) -> int:
        """The number of heads of queries that share a head of keys and values."""
        found = self.projection("K")
        if found is None:
            return self.call.groups
        return self.call.extent.heads // len(found[1].heads(self.call.key.shape[-1]))

    def output(self, joined: Tensor) -> Passed | None:
        """The linear layer whose input in the model's own run is ``joined``, or None."""
        for passed in reversed(self.linears.values()):
            given = passed.given[0]
            if given.shape == joined.shape and _near(given, joined):
                return passed
        return None


def _near(one: Tensor, other: Tensor) -> bool:
    scale = max(1.0, other.abs().max().item())
    return bool((one - other).abs().max() <= TOLERANCES[one.dtype] * scale)


def record(run: TextRun, layer: Layer) -> RecordedLayer:
    """Run the model twice over the first chunk: plainly, and with the layer watched."""
    module = layer.module
    linears: dict[str, Passed] = {}
    result: Tensor | None = None
    number = -1

    def entered(*_: object) -> None:
        nonlocal number
        number += 1

    def keep(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(linear: nn.Module, given: Any, output: Any) -> None:
            if number == layer.call and isinstance(linear, nn.Linear):
                linears[name] = Passed(linear, given[0], output)

        return hook

    def left(_: nn.Module, __: Any, output: Any) -> None:
        nonlocal result
        first = output[0] if isinstance(output, tuple) and output else output
        if number == layer.call and isinstance(first, Tensor):
            result = first

    chunk = run.chunks[0]
    with ExitStack() as stack:
        stack.callback(module.register_forward_pre_hook(entered).remove)
        stack.callback(module.register_forward_hook(left).remove)
        for name, part in module.named_modules():
            if isinstance(part, nn.Linear):
                stack.callback(part.register_forward_hook(keep(name)).remove)
        run.forward(chunk)
    calls: list[Call] = []
    with _observing(calls.append), recording([layer], See(entropy=True), lambda *_: None):
        run.forward(chunk)
    if layer.call >= len(calls):
        raise InputError(
            f"{run.subject.name} computes the weights of layer {layer.name} in its own code, so "
            "its queries and keys cannot be shown. regard.look(...) shows its weights. Where "
            'transformers can load the model with attn_implementation="regard", explain that.'
        )
    return RecordedLayer(calls[layer.call], linears, result)


@contextmanager
def _observing(observe: Callable[[Call], None]) -> Iterator[None]:
    token = observer.set(observe)
    try:
        yield
    finally:
        observer.reset(token)


@torch.no_grad()
def explain_other(run: TextRun, layer: Layer, traced: TracedCall, recorded: RecordedLayer) -> Trace:
    """The trace of a recorded layer, from its input to its output as far as both are found."""
    [head] = traced.shown
    subject = f"{run.subject.name}, layer {layer.name}, head {head}"
    joined = heads_of(traced.call).to(traced.call.query.dtype)
    lead = (*_projection_steps(traced, recorded), _entering_step(traced, recorded))
    last, result = recorded.output(joined), recorded.result
    if last is not None:
        output = OutputProjection(last.linear.weight.t(), last.linear.bias)
        return trace_call(traced, lead, output, subject=subject, expected=last.output[0])
    own = layer.module.out_proj if isinstance(layer.module, nn.MultiheadAttention) else None
    if own is not None and result is not None:  # PyTorch calls its weights, not the layer
        result = result[0] if layer.module.batch_first else result[:, 0]
        output = OutputProjection(own.weight.t(), own.bias)
        return trace_call(traced, lead, output, subject=subject, expected=result)
    if result is not None and result.shape[1:] == joined.shape and _near(result[0], joined):
        return trace_call(traced, lead, None, subject=subject, expected=result[0])
    # What the module does with its heads is not known, so attention() alone confirms the numbers.
    return replace(trace_call(traced, lead, None), subject=subject)


def _projection_steps(traced: TracedCall, recorded: RecordedLayer) -> Iterator[Step]:
    """The inputs of the linear layers, and their products for the shown head."""
    found = {symbol: recorded.projection(symbol) for symbol in PROJECTIONS}
    known = {symbol: pair[1] for symbol, pair in found.items() if pair is not None}
    if not known:
        return
    sides = {"Q": traced.queries, "K": traced.keys, "V": traced.keys}
    inputs: dict[str, Tensor] = {}
    sources: dict[str, str] = {}
    for symbol, passed in known.items():
        name = "X" if symbol == "Q" or not traced.across else "X_encoder"
        inputs.setdefault(name, passed.given[0])
        sources[symbol] = name
    yield Step(
        "What reaches the layer",
        f"X = {inputs[next(iter(inputs))].shape[1]} numbers per token",
        f"The text is split into tokens. Each row of X is what the layers before make of a token; "
        f"{traced.word} is followed.",
        tuple(
            Numbers(
                name, x, traced.keys if name == "X_encoder" else traced.queries,
                features(x.shape[1]),
            )
            for name, x in inputs.items()
        ),
    )  # fmt: skip
    [head] = traced.shown
    numbers = []
    for symbol, passed in known.items():
        width = recorded.side(symbol).shape[-1]
        made = passed.heads(width)
        own = made[head * len(made) // traced.call.extent.heads]
        label = f"{sources[symbol]} W_{symbol}"
        numbers.append(Numbers(label, own, sides[symbol], features(width)))
    lacking = [symbol for symbol, pair in found.items() if pair is None]
    names = ", ".join(pair[0] for pair in found.values() if pair is not None)
    missing = f" It has no layer of its own that makes {' or '.join(lacking)}." if lacking else ""
    yield Step(
        "Linear projections",
        "    ".join(
            f"{sources[symbol]} W_{symbol}" + f" + b_{symbol}" * (passed.linear.bias is not None)
            for symbol, passed in known.items()
        ),
        f"The linear layers {names} multiply each row by learned matrices. The numbers are those "
        f"of head {head}.{missing}",
        tuple(numbers),
    )


def _entering_step(traced: TracedCall, recorded: RecordedLayer) -> Step:
    """The queries, keys and values as they enter attention."""
    changed, unknown = [], []
    for symbol in PROJECTIONS:
        found, entering = recorded.projection(symbol), recorded.side(symbol)[0]
        if found is None:
            unknown.append(symbol)
            continue
        made = found[1].heads(entering.shape[-1])
        most = max(len(made), len(entering))
        one, other = (each.repeat_interleave(most // len(each), 0) for each in (made, entering))
        if not _near(one, other):
            changed.append(symbol)
    reasons = ""
    if changed:
        reasons += (
            f" {' and '.join(changed)} differ from the projections: the model normalizes or scales "
            "them, or rotates them by their positions, before they enter attention."
        )
    if len(unknown) == len(PROJECTIONS):
        reasons += (
            " The layer has no linear layers named q_proj, k_proj and v_proj, so the trace begins "
            "where they enter attention."
        )
    shared = recorded.shared_by
    if shared > 1:
        reasons += f" {shared} heads of queries share each head of keys and values."
    return Step(
        "Queries, keys and values",
        "Q, K, V as they enter attention",
        "Each token has a query and a key, which are compared, and a value, which it contributes."
        f"{reasons}",
        traced.vectors(),
        traced.example_vectors(),
    )
