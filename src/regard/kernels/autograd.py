"""The passes as one function with a gradient, for eager calls.

Called by ``lowering.run_kernels``. Inside a compiled graph ``compiled`` takes its place.

Test: ``pytest tests -k "kernels and gradients_through_one_field"``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.errors import BackendError
from regard.kernels import passes
from regard.kernels.passes import DeferredColumns
from regard.kernels.plan import KEPT, ROUGH, Structure, Wanted


def attend(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, wanted: Wanted, hopper: bool
) -> tuple[dict[str, Tensor], Callable[[], None] | None]:
    """Return the output, lse and wanted fields by name.

    If the fields in OVER_QUERIES are deferred, their tensors hold no values yet. The second result
    is then a function that computes them: call it before you read them. ``hopper``: whether the
    kernels for Hopper may run.
    """
    tensors = (query, key, value, structure.table, structure.relative_query, structure.sinks)
    differentiable = torch.is_grad_enabled() and any(
        t is not None and t.requires_grad for t in tensors
    )
    if not differentiable:
        plan = passes.plan_call(query, key, value, structure, wanted, hopper)
        return passes.forward(query, key, value, structure, plan)[0], None
    outputs = _Attend.apply(  # type: ignore[no-untyped-call]
        *tensors, structure, wanted, hopper
    )
    results = dict(zip(wanted.names, outputs, strict=True))
    deferred = outputs[0].grad_fn.deferred
    if deferred is None:
        return results, None
    return results, partial(_compute, deferred, results[next(iter(deferred.fields))])


def _compute(deferred: DeferredColumns, field: Tensor) -> None:
    """Compute the deferred fields from the tensors that the graph of ``field`` saved."""
    if not deferred.fields:  # already computed; ``field`` may have another node by now
        return
    node: Any = field.grad_fn
    try:
        query, key, *_ = node.saved_tensors
    except RuntimeError as error:
        raise BackendError(
            f"{', '.join(deferred.fields)}: cannot be computed, because query or key was changed "
            "in place or the autograd graph was freed. Read these fields before that."
        ) from error
    deferred.compute(query, key, node.structure)


def no_second_gradient(backend: str) -> BackendError:
    """Return the error of a backend whose gradients cannot be differentiated."""
    return BackendError(
        f"The backend {backend!r} has no gradients of gradients. "
        "Pass backend='reference' or, for less memory, backend='tiled': both have them."
    )


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        relative_query: Tensor | None,
        sinks: Tensor | None,
        structure: Structure,
        wanted: Wanted,
        hopper: bool,
    ) -> tuple[Tensor, ...]:
        plan = passes.plan_call(query, key, value, structure, wanted, hopper, deferrable=True)
        results, ctx.deferred = passes.forward(query, key, value, structure, plan)
        ctx.structure, ctx.names, ctx.plan = structure, wanted.names, plan
        ctx.kept = [name for name in KEPT if name in results]
        ctx.save_for_backward(
            query, key, value, table, relative_query, sinks, *(results[n] for n in ctx.kept)
        )
        ctx.set_materialize_grads(False)
        return tuple(results[name] for name in ctx.names)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        backend = "hopper" if ctx.plan.problem.hopper else "triton"
        if torch.is_grad_enabled():  # with create_graph=True, which would treat these as constants
            raise no_second_gradient(backend)
        query, key, value, table, relative_query, sinks, *saved = ctx.saved_tensors
        upstream = {name: g for name, g in zip(ctx.names, grads, strict=True) if g is not None}
        for name in ROUGH:
            if name in upstream:
                raise BackendError(
                    f"The backend {backend!r} has no gradient through {name}. "
                    "Pass backend='tiled', which has the gradient of every field."
                )
        gradients = passes.backward(
            query, key, value,
            replace(ctx.structure, table=table, relative_query=relative_query, sinks=sinks),
            ctx.plan,
            dict(zip(ctx.kept, saved, strict=True)), upstream, ctx.needs_input_grad[3],
            ctx.deferred,
        )  # fmt: skip
        return *gradients, None, None, None
