"""The same function inside a compiled graph: an operator, ``regard::attend``.

PyTorch can tell its shapes without running it, so that a graph goes through it whole; a Structure
goes in as its parts. The eager way has no dispatcher between: it takes less time on the host, and
knows which gradients are there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.kernels import passes
from regard.kernels.plan import KEPT, RELATIVE, ROUGH, Request, Structure

_STRUCTURE = (
    "Tensor? low, Tensor? high, Tensor? table, Tensor? second, int kind, int bias, SymInt reach, "
    "float scale, float? softcap, float shift, SymInt longest"
)
_INPUTS = f"Tensor query, Tensor key, Tensor value, {_STRUCTURE}"
_PARTS = 11  # of a structure
_INPUT_COUNT = 3 + _PARTS + 5


def attend(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, request: Request
) -> dict[str, Tensor]:
    """As ``operators.attend``; what has no gradient there is detached here."""
    found = torch.ops.regard.attend(
        query, key, value, *_flat(structure), " ".join(request.fields), *request.grid,
        request.top, " ".join(map(str, request.rows)),
    )  # fmt: skip
    named = dict(zip(request.names, found, strict=True))
    return {name: t.detach() if name in ROUGH else t for name, t in named.items()}


def _flat(structure: Structure) -> tuple[Any, ...]:
    s = structure
    return (
        s.low, s.high, s.table, s.second, s.kind, s.bias, s.reach, s.scale, s.softcap, s.shift,
        s.longest,
    )  # fmt: skip


def _whole(parts: Sequence[Any]) -> Structure:
    low, high, table, second, kind, bias, reach, scale, softcap, shift, longest = parts
    return Structure(kind, low, high, bias, table, reach, scale, softcap, second, shift, longest)


@torch.library.custom_op(
    "regard::attend",
    mutates_args=(),
    schema=f"({_INPUTS}, str fields, SymInt down, SymInt across, SymInt top, str rows) -> Tensor[]",
)
def _attend_operator(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> list[Tensor]:
    request = _request(*given[_PARTS:])
    found = passes.forward(query, key, value, _whole(given[:_PARTS]), request)
    return [found[name].contiguous() for name in request.names]


def _request(fields: str, down: int, across: int, top: int, rows: str) -> Request:
    return Request(tuple(fields.split()), (down, across), top, tuple(map(int, rows.split())))


@_attend_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> list[Tensor]:
    request = _request(*given[_PARTS:])
    some = query.shape[:3]
    shapes = {
        "output": (*some, value.shape[3]),
        "max_logit": some[:2],
        "received": (*some[:2], key.shape[2]),
        "map": (*some[:2], *request.grid),
        "map_peak": (*some[:2], *request.grid),
        "top_weights": (*some, request.top),
        "top_keys": (*some, request.top),
        "rows": (*some[:2], len(request.rows), key.shape[2]),
    }
    dtypes = {"output": query.dtype, "top_keys": torch.int64}
    return [
        query.new_empty(shapes.get(name, some), dtype=dtypes.get(name, torch.float32))
        for name in request.names
    ]


@torch.library.custom_op(
    "regard::attend_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor[] kept, str kept_names, Tensor[] grads, str grad_names, "
    "bool train_bias) -> Tensor[]",
)
def _backward_operator(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> list[Tensor]:
    kept, kept_names, grads, grad_names, train_bias = given[_PARTS:]
    found = passes.backward(
        query, key, value, _whole(given[:_PARTS]),
        dict(zip(kept_names.split(), kept, strict=True)),
        dict(zip(grad_names.split(), grads, strict=True)), train_bias,
    )  # fmt: skip
    held = _held(query, key, value, given)
    grads = (grad for grad in found if grad is not None)
    return [_laid_out(grad, tensor) for grad, tensor in zip(grads, held, strict=True)]


def _held(query: Tensor, key: Tensor, value: Tensor, given: Sequence[Any]) -> list[Tensor]:
    """The tensors that get a gradient, in order."""
    structure, train_bias = _whole(given[:_PARTS]), given[-1]
    held = [query, key, value]
    if train_bias and structure.table is not None:
        held.append(structure.table)
    if structure.bias == RELATIVE and structure.second is not None:
        held.append(structure.second)
    return held


def _laid_out(grad: Tensor, tensor: Tensor) -> Tensor:
    """A gradient in the layout that was promised: that of a new tensor like the one it is for."""
    promised = torch.empty_like(tensor, device="meta").stride()
    return grad if grad.stride() == promised else torch.empty_like(tensor).copy_(grad)


@_backward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in _held(query, key, value, given)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, *given = inputs
    structure, request = _whole(given[:_PARTS]), _request(*given[_PARTS:])
    found = dict(zip(request.names, output, strict=True))
    ctx.structure = replace(structure, low=None, high=None, table=None, second=None)
    ctx.names, ctx.kept = request.names, [name for name in KEPT if name in found]
    held = (structure.low, structure.high, structure.table, structure.second)
    ctx.save_for_backward(query, key, value, *held, *(found[name] for name in ctx.kept))


def _graph_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    query, key, value, low, high, table, second, *kept = ctx.saved_tensors
    structure = replace(ctx.structure, low=low, high=high, table=table, second=second)
    given = {
        name: grad
        for name, grad in zip(ctx.names, grads, strict=True)
        if grad is not None and name not in ROUGH and name != "top_keys"
    }
    train_bias = bool(ctx.needs_input_grad[5])
    found = torch.ops.regard.attend_backward(
        query, key, value, *_flat(structure), kept, " ".join(ctx.kept), list(given.values()),
        " ".join(given), train_bias,
    )  # fmt: skip
    query_grad, key_grad, value_grad, *others = found
    table_grad = others.pop(0) if train_bias else None
    second_grad = others.pop(0) if others else None
    # As the inputs stand: of a structure's parts only table and second have a gradient.
    rest = (None,) * (_INPUT_COUNT - 7)
    return query_grad, key_grad, value_grad, None, None, table_grad, second_grad, *rest


_attend_operator.register_autograd(_graph_backward, setup_context=_setup)
