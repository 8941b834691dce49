"""The kernels as one function with a gradient: what is asked for decides which of them run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.errors import BackendError
from regard.kernels.passes import Owed, backward, forward
from regard.kernels.plan import KEPT, OVER_QUERIES, ROUGH, Request, Structure


def attend(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, request: Request
) -> tuple[dict[str, Tensor], Callable[[], None] | None]:
    """The output, lse and whatever else is asked for.

    And where some of OVER_QUERIES is only owed, what to call before it is read.
    """
    tensors = (query, key, value, structure.table, structure.second)
    wants = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    if not wants:
        return forward(query, key, value, structure, request), None
    given = _Attend.apply(  # type: ignore[no-untyped-call]
        query, key, value, structure.table, structure.second, structure, request
    )
    found = dict(zip(request.names, given, strict=True))
    owed = given[0].grad_fn.owed
    return found, partial(_settle, owed, found[next(iter(owed.room))]) if owed else None


def _settle(owed: Owed, one: Tensor) -> None:
    """Make what is owed now, of what the graph holds; ``one`` is of that."""
    if not owed.room:  # once it was read, it may have been changed, and be another node's
        return
    node: Any = one.grad_fn
    try:
        query, key, *_ = node.saved_tensors
    except RuntimeError as error:
        raise BackendError(
            f"{', '.join(owed.room)}: not known yet, and query or key was changed in place since, "
            "or the graph is gone. Read what was seen before that."
        ) from error
    owed.settle(query, key, node.structure)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        table: Tensor | None,
        second: Tensor | None,
        structure: Structure,
        request: Request,
    ) -> tuple[Tensor, ...]:
        found = forward(query, key, value, structure, request, owing=True)
        ctx.structure, ctx.names, ctx.owed = structure, request.names, None
        if (drop := found.pop("drop", None)) is not None:
            # Not the tensors themselves: what a node of the graph gives out, it must not hold.
            room = {name: found[name].detach() for name in OVER_QUERIES if name in found}
            ctx.owed = Owed(room, request.grid if "map" in found else None, drop)
        ctx.kept = [name for name in KEPT if name in found]
        ctx.save_for_backward(query, key, value, table, second, *(found[n] for n in ctx.kept))
        ctx.set_materialize_grads(False)
        return tuple(found[name] for name in ctx.names)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph: what comes out would be taken for constant
            raise BackendError(
                "The backend 'triton' has no gradients of gradients. "
                "Pass backend='tiled', which has them."
            )
        query, key, value, table, second, *kept = ctx.saved_tensors
        given = {name: g for name, g in zip(ctx.names, grads, strict=True) if g is not None}
        for name in ROUGH:
            if name in given:
                raise BackendError(
                    f"The backend 'triton' has no gradient through {name}. "
                    "Pass backend='tiled', which has them all."
                )
        structure = replace(ctx.structure, table=table, second=second)
        found = dict(zip(ctx.kept, kept, strict=True))
        train_bias = ctx.needs_input_grad[3]
        grads = backward(query, key, value, structure, found, given, train_bias, ctx.owed)
        return *grads, None, None
