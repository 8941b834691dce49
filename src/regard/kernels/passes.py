"""The passes of one call, in order: forward, statistics of columns, top keys, backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.kernels.memo import is_recording
from regard.kernels.plan import BY_ROW, CAUSAL, FULL, PLAIN, Request, Structure


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
        from regard.kernels.hopper import launch as hopper_launch

        with torch.no_grad(), torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            hopper_launch.columns(query, key, structure, self.room, self.grid, self.drop)
        self.settled()

    def settled(self) -> None:
        if not is_recording():  # else there is nothing in it until that is replayed
            self.room = {}


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
    from regard.kernels.hopper import launch as hopper_launch
    from regard.kernels.triton import launch

    fields = request.fields
    count = request.top
    if not hopper_launch.collects(query, key, value, structure, fields, count):
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
            and hopper_launch.differentiates(query, key, value, structure, grid)
        ):
            found |= hopper_launch.room(query, key, fields, grid) | {"drop": drop}
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
    from regard.kernels.hopper import launch as hopper_launch
    from regard.kernels.triton import launch

    if grads.keys() == {"output"} and _plain(query, key, value, structure):
        if owed is not None and owed.room:
            found = hopper_launch.backward(
                query, key, value, kept["output"], grads["output"], owed.drop, structure,
                owed.room, owed.grid,
            )  # fmt: skip
            owed.settled()
            return *found, None, None
        return *_plain_backward(grads["output"], query, key, value, structure, kept), None, None
    if owed is not None and owed.room:  # queries and keys may be gone when this is done
        owed.settle(query, key, structure)
    return launch.backward(query, key, value, structure, kept, grads, train_bias)


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
