"""The passes as a custom operator, ``regard::attend``, for compiled graphs.

PyTorch derives the shapes of the results without running the operator, so the operator causes no
graph break. A custom operator takes no objects: Structure and Wanted are passed field by field.
``autograd`` does the same for eager calls, with less overhead on the host.

Test: ``pytest tests -k "compiles_to_one_graph"``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from regard.kernels import passes
from regard.kernels.plan import KEPT, ROUGH, Structure, Wanted
from regard.kernels.sizes import RELATIVE

_STRUCTURE = (
    "Tensor? low, Tensor? high, Tensor? table, Tensor? relative_query, int kind, int bias, "
    "SymInt reach, float scale, float? softcap, float relative_scale, SymInt max_keys, "
    "Tensor? starts, Tensor? sinks"
)
_INPUTS = f"Tensor query, Tensor key, Tensor value, {_STRUCTURE}"
_PARTS = 13  # number of fields of a Structure
_INPUT_COUNT = 3 + _PARTS + 6
_TENSORS = ("low", "high", "table", "relative_query", "starts", "sinks")


def attend(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, wanted: Wanted, hopper: bool
) -> dict[str, Tensor]:
    """Return the output, lse and wanted fields by name; fields without a gradient are detached."""
    results = torch.ops.regard.attend(
        query, key, value, *_flat(structure), " ".join(wanted.fields), *wanted.grid, wanted.top,
        " ".join(map(str, wanted.rows)), hopper,
    )  # fmt: skip
    named = dict(zip(wanted.names, results, strict=True))
    return {name: t.detach() if name in ROUGH else t for name, t in named.items()}


def _flat(structure: Structure) -> tuple[Any, ...]:
    s = structure
    return (
        s.low, s.high, s.table, s.relative_query, s.kind, s.bias, s.reach, s.scale, s.softcap,
        s.relative_scale, s.max_keys, s.starts, s.sinks,
    )  # fmt: skip


def _structure(parts: Sequence[Any]) -> Structure:
    low, high, table, relative_query, kind, bias, reach, scale, softcap, *rest = parts
    return Structure(kind, low, high, bias, table, reach, scale, softcap, relative_query, *rest)


@torch.library.custom_op(
    "regard::attend",
    mutates_args=(),
    schema=f"({_INPUTS}, str fields, SymInt down, SymInt across, SymInt top, str rows, bool hopper)"
    " -> Tensor[]",
)
def _attend_operator(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> list[Tensor]:
    structure, wanted = _structure(given[:_PARTS]), _wanted(*given[_PARTS:-1])
    plan = passes.plan_call(query, key, value, structure, wanted, hopper=given[-1])
    results, _ = passes.forward(query, key, value, structure, plan)
    return [results[name].contiguous() for name in wanted.names]


def _wanted(fields: str, down: int, across: int, top: int, rows: str) -> Wanted:
    return Wanted(tuple(fields.split()), (down, across), top, tuple(map(int, rows.split())))


@_attend_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> list[Tensor]:
    wanted = _wanted(*given[_PARTS:-1])
    by_query = query.shape[:3]
    shapes = {
        "output": (*by_query, value.shape[3]),
        "max_logit": by_query[:2],
        "received": (*by_query[:2], key.shape[2]),
        "map": (*by_query[:2], *wanted.grid),
        "map_peak": (*by_query[:2], *wanted.grid),
        "top_weights": (*by_query, wanted.top),
        "top_keys": (*by_query, wanted.top),
        "rows": (*by_query[:2], len(wanted.rows), key.shape[2]),
    }
    dtypes = {"output": query.dtype, "top_keys": torch.int64}
    return [
        query.new_empty(shapes.get(name, by_query), dtype=dtypes.get(name, torch.float32))
        for name in wanted.names
    ]


@torch.library.custom_op(
    "regard::attend_backward",
    mutates_args=(),
    schema=f"({_INPUTS}, Tensor[] kept, str kept_names, Tensor[] grads, str grad_names, "
    "bool train_bias) -> Tensor[]",
)
def _backward_operator(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> list[Tensor]:
    kept, kept_names, grads, grad_names, train_bias = given[_PARTS:]
    structure = _structure(given[:_PARTS])
    plan = passes.plan_call(query, key, value, structure, Wanted(), hopper=False)
    gradients = passes.backward(
        query, key, value, structure, plan, dict(zip(kept_names.split(), kept, strict=True)),
        dict(zip(grad_names.split(), grads, strict=True)), train_bias,
    )  # fmt: skip
    tensors = _differentiated(query, key, value, given)
    computed = (gradient for gradient in gradients if gradient is not None)
    return [_in_layout_of(t, gradient) for t, gradient in zip(tensors, computed, strict=True)]


def _differentiated(
    query: Tensor, key: Tensor, value: Tensor, given: Sequence[Any]
) -> list[Tensor]:
    """Return the tensors that get a gradient, in the order of the inputs."""
    structure, train_bias = _structure(given[:_PARTS]), given[-1]
    tensors = [query, key, value]
    if train_bias and structure.table is not None:
        tensors.append(structure.table)
    if structure.bias == RELATIVE and structure.relative_query is not None:
        tensors.append(structure.relative_query)
    if structure.sinks is not None:
        tensors.append(structure.sinks)
    return tensors


def _in_layout_of(tensor: Tensor, gradient: Tensor) -> Tensor:
    """Return the gradient in the layout of ``empty_like``, as the fake operator declares."""
    announced = torch.empty_like(tensor, device="meta").stride()
    if gradient.stride() == announced:
        return gradient
    return torch.empty_like(tensor).copy_(gradient)


@_backward_operator.register_fake
def _(query: Tensor, key: Tensor, value: Tensor, *given: Any) -> list[Tensor]:
    return [torch.empty_like(tensor) for tensor in _differentiated(query, key, value, given)]


def _setup(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    query, key, value, *given = inputs
    structure, wanted = _structure(given[:_PARTS]), _wanted(*given[_PARTS:-1])
    results = dict(zip(wanted.names, output, strict=True))
    no_tensors: dict[str, Any] = dict.fromkeys(_TENSORS)
    ctx.structure = replace(structure, **no_tensors)
    ctx.names, ctx.kept = wanted.names, [name for name in KEPT if name in results]
    parts = (getattr(structure, name) for name in _TENSORS)
    ctx.save_for_backward(query, key, value, *parts, *(results[name] for name in ctx.kept))


def _graph_backward(ctx: Any, grads: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    (query, key, value), saved = ctx.saved_tensors[:3], ctx.saved_tensors[3:]
    tensors, kept = dict(zip(_TENSORS, saved, strict=False)), saved[len(_TENSORS) :]
    structure: Structure = replace(ctx.structure, **tensors)
    upstream = {
        name: grad
        for name, grad in zip(ctx.names, grads, strict=True)
        if grad is not None and name not in ROUGH and name != "top_keys"
    }
    train_bias = bool(ctx.needs_input_grad[5])
    query_grad, key_grad, value_grad, *others = torch.ops.regard.attend_backward(
        query, key, value, *_flat(structure), kept, " ".join(ctx.kept), list(upstream.values()),
        " ".join(upstream), train_bias,
    )  # fmt: skip
    table_grad = others.pop(0) if train_bias else None
    sinks_grad = others.pop() if structure.sinks is not None else None
    second_grad = others.pop(0) if others else None
    # In the order of _STRUCTURE. Only table, relative_query and sinks have a gradient.
    parts = (None, None, table_grad, second_grad, *(None,) * (_PARTS - 5), sinks_grad)
    return query_grad, key_grad, value_grad, *parts, *(None,) * (_INPUT_COUNT - 3 - _PARTS)


_attend_operator.register_autograd(_graph_backward, setup_context=_setup)
