"""The kernels as one function with a gradient: what is asked for decides which of them run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import BackendError
from regard.mechanism.keeping import is_recording
from regard.mechanism.kernels.structure import CAUSAL, FULL, PLAIN, Structure
from regard.mechanism.seeing import OVER_QUERIES

BY_ROW = ("entropy", "peak", "max_logit", "distance")  # what the forward pass itself can tell
NAMED = (*BY_ROW, *OVER_QUERIES, "rows")  # as See names them
STREAMED = (*NAMED, "top_weights", "top_keys")
KEPT = ("output", "lse", "entropy", "distance")  # for the backward pass
# Which keys are highest does not change smoothly, so these have no gradient here.
ROUGH = ("peak", "max_logit", "map_peak", "top_weights", "rows")


class Request(NamedTuple):
    """What to stream beside the output and lse: some of STREAMED, and the numbers they need."""

    fields: tuple[str, ...] = ()
    grid: tuple[int, int] = (1, 1)
    top: int = 0
    rows: tuple[int, ...] = ()

    @property
    def names(self) -> list[str]:
        """What comes back, in order."""
        return ["output", "lse", *(name for name in STREAMED if name in self.fields)]


@dataclass
class Owed:
    """What keys get, where the backward pass will have it for next to nothing.

    Until then there is room for it and nothing in it; whoever looks before has it settled, which
    takes a pass of its own over queries and keys. Those are the graph's to keep: here is what else
    that takes.
    """

    room: dict[str, Tensor]  # empty once it is settled
    grid: tuple[int, int] | None
    drop: Tensor  # what the forward pass left for a second one

    def settle(self, query: Tensor, key: Tensor, structure: Structure) -> None:
        from regard.mechanism.kernels import specialised

        with torch.no_grad(), torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            specialised.columns(query, key, structure, self.room, self.grid, self.drop)
        self.settled()

    def settled(self) -> None:
        if not is_recording():  # else there is nothing in it until that is replayed
            self.room = {}


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


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    request: Request,
    owing: bool = False,
) -> dict[str, Tensor]:
    """The same without a gradient.

    If ``owing``, what the backward pass can tell may be room alone, and "drop" comes with it.
    """
    from regard.mechanism.kernels import launch, specialised

    fields = request.fields
    count = request.top
    if not specialised.collects(query, key, value, structure, fields, count):
        count = 0
    if not count and not any(n in fields for n in BY_ROW) and _plain(query, key, value, structure):
        found = _plain_forward(query, key, value, structure)
    else:
        found = launch.forward(query, key, value, structure, fields, count, request.grid)
    lse, bar, drop, drawn = found["lse"], *(found.pop(n, None) for n in ("bar", "drop", "drawn"))
    followed = False  # by another pass
    if "received" in fields or "map" in fields:
        grid = request.grid if "map" in fields else None
        if (
            owing
            and drop is not None
            and not is_recording()  # a replay would owe it again
            and not _kept_by_hooks()
            and _plain(query, key, value, structure)
            and specialised.differentiates(query, key, value, structure, grid)
        ):
            found |= specialised.room(query, key, fields, grid) | {"drop": drop}
        else:
            found |= launch.columns(query, key, lse, structure, fields, request.grid, drop, drawn)
            followed = True
    if request.top:
        found |= launch.top(query, key, lse, structure, request.top, bar, drawn, followed)
    if request.rows:
        found["rows"] = launch.rows(query, key, lse, structure, request.rows)
    return found


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    kept: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    train_bias: bool,
    owed: Owed | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The gradients of query, key and value, and where there are, of the table and second."""
    from regard.mechanism.kernels import launch, specialised

    if grads.keys() == {"output"} and _plain(query, key, value, structure):
        if owed is not None and owed.room:
            found = specialised.backward(
                query, key, value, kept["output"], grads["output"], owed.drop, structure,
                owed.room, owed.grid,
            )  # fmt: skip
            owed.settled()
            return *found, None, None
        return *_plain_backward(grads["output"], query, key, value, structure, kept), None, None
    if owed is not None and owed.room:  # queries and keys may be gone when this is done
        owed.settle(query, key, structure)
    return launch.backward(query, key, value, structure, kept, grads, train_bias)


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


def _kept_by_hooks() -> bool:
    """Whether what a graph saves goes elsewhere, as with checkpoints: dear to get back."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _plain(query: Tensor, key: Tensor, value: Tensor, structure: Structure) -> bool:
    """Whether cuDNN has such a call; on Hopper it is faster than our kernels."""
    square = query.shape[2] == key.shape[2]
    width = query.shape[3]
    return (
        query.is_cuda
        and torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
        and torch.cuda.get_device_capability(query.device) >= (9, 0)
        and query.dtype in (torch.float16, torch.bfloat16)
        and (structure.kind == FULL or (structure.kind == CAUSAL and square))
        and structure.bias == PLAIN
        and structure.softcap is None
        and query.shape[1] == key.shape[1]
        and not torch.are_deterministic_algorithms_enabled()  # cuDNN's gradients are not
        and all(0 not in tensor.stride() for tensor in (query, key, value))
        and width == value.shape[3]
        and width <= 128
        and width % 8 == 0
    )


def _plain_forward(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure
) -> dict[str, Tensor]:
    """The output and lse of a plain call by cuDNN."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, structure.kind == CAUSAL, False, scale=structure.scale
    )
    return {"output": output, "lse": lse.reshape(query.shape[:3])}


def _plain_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    kept: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a plain call by cuDNN, from the output and lse of our forward pass."""
    output, lse = kept["output"], kept["lse"][..., None]
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # of no dropout
    causal = structure.kind == CAUSAL
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        grad.contiguous(), query, key, value, output, lse, seed, seed, None, None, None,
        query.shape[2], key.shape[2], 0.0, causal, scale=structure.scale,
    )  # fmt: skip
