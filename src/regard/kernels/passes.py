"""The passes of one call: forward, columns, top keys and rows, in this order; and backward.

``plan_call`` makes the plan; ``forward`` and ``backward`` follow it. Called by ``autograd`` and
``compiled``. Tensors are [batch, heads, length, dim], and their last axis is contiguous.

Test: ``pytest tests -k "hopper and deferred"``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from regard.kernels.memo import is_recording
from regard.kernels.plan import (
    Device,
    Intermediates,
    Layout,
    Plan,
    Problem,
    Structure,
    Wanted,
    plan_for,
)
from regard.kernels.sizes import CAUSAL

# The gradients of query, key, value, and the structure's table, relative_query and sinks.
Gradients = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]


@dataclass
class DeferredColumns:
    """The fields in OVER_QUERIES, allocated in the forward pass and filled in a later pass.

    The backward pass for Hopper fills them at almost no extra cost. If a caller reads them first,
    ``compute`` runs a separate pass, with the query and key that the autograd graph saved.
    """

    plan: Plan
    fields: dict[str, Tensor]  # empty once they are computed
    neg_lse: Tensor

    def compute(self, query: Tensor, key: Tensor, structure: Structure) -> None:
        from regard.kernels.hopper import launch as hopper

        with torch.no_grad(), torch.cuda.device_of(query):  # type: ignore[no-untyped-call]
            hopper.columns(query, key, structure, self.plan, self.fields, self.neg_lse)
        self.mark_computed()

    def mark_computed(self) -> None:
        if not is_recording():  # a captured kernel has not run yet
            self.fields = {}


@cache
def device_facts(device: torch.device) -> Device:
    """Return the properties of a device that plans depend on."""
    if device.type != "cuda":
        return Device((0, 0), 0, "the tensors are not on a CUDA device.")
    properties = torch.cuda.get_device_properties(device)
    capability = properties.major, properties.minor
    if capability == (9, 0):
        from regard.kernels.compat import why_not_gluon

        reason = why_not_gluon()
    else:
        reason = "the GPU has compute capability {}.{}, but the kernels need 9.0.".format(
            *capability
        )
    return Device(capability, properties.multi_processor_count, reason)


def _cudnn(device: Device) -> bool:
    """Whether cuDNN's attention is enabled, and the GPU has compute capability 9.0 or newer."""
    enabled: bool = torch.backends.cuda.cudnn_sdp_enabled()  # type: ignore[no-untyped-call]
    return device.capability >= (9, 0) and enabled


def plan_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    wanted: Wanted,
    hopper: bool,
    deferrable: bool = False,
) -> Plan:
    """Return the plan of a call; equal problems share a plan.

    ``hopper``: whether the kernels for Hopper may run. ``deferrable``: whether PyTorch's autograd
    may run a backward pass, which can then compute the sums over queries.
    """
    device = device_facts(query.device)
    problem = Problem(
        Layout.of(query), Layout.of(key), Layout.of(value), query.dtype, device, structure.kind,
        structure.bias, structure.softcap is not None, structure.scale, wanted, hopper,
        _cudnn(device), torch.are_deterministic_algorithms_enabled(),
        # A replay of a CUDA graph would never compute deferred fields.
        deferrable and not is_recording() and not _saved_by_hooks(),
    )  # fmt: skip
    return plan_for(problem)


def forward(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure, plan: Plan
) -> tuple[dict[str, Tensor], DeferredColumns | None]:
    """Return the output, lse and wanted fields by name, and which of them are computed later."""
    from regard.kernels.triton import launch

    wanted, left = plan.problem.wanted, Intermediates()
    match plan.forward.variant:
        case "cudnn":
            results = _cudnn_forward(query, key, value, structure)
        case "hopper":
            from regard.kernels.hopper import launch as hopper

            results, left = hopper.forward(query, key, value, structure, plan)
        case _:
            results = launch.forward(query, key, value, structure, wanted.fields)
    if structure.sinks is not None:
        results |= _with_sinks(results, structure.sinks)
    lse = results["lse"]
    deferred = None
    if plan.deferred:
        from regard.kernels.hopper import launch as hopper

        assert left.neg_lse is not None
        fields = hopper.new_columns(query, key, plan)
        results |= fields
        # Detached, because the autograd node holds them: its own results would form a cycle.
        detached = {name: tensor.detach() for name, tensor in fields.items()}
        deferred = DeferredColumns(plan, detached, left.neg_lse)
    elif plan.columns is not None:
        results |= columns(query, key, lse, structure, plan, left)
    if plan.top is not None:
        results |= top(query, key, lse, structure, plan, left)
    if wanted.rows:
        results["rows"] = launch.rows(query, key, lse, structure, wanted.rows)
    return results, deferred


def columns(
    query: Tensor, key: Tensor, lse: Tensor, structure: Structure, plan: Plan, left: Intermediates
) -> dict[str, Tensor]:
    """Return the wanted sums over queries: "received", "map" and "map_peak"."""
    wanted = plan.problem.wanted
    if plan.columns is None or plan.columns.variant != "hopper":
        from regard.kernels.triton import launch

        return launch.columns(query, key, lse, structure, wanted.fields, wanted.grid)
    from regard.kernels.hopper import launch as hopper

    assert plan.bins is not None
    neg_lse = left.neg_lse
    if neg_lse is None:  # the forward pass did not run on the kernels for Hopper
        neg_lse = hopper.order_neg_lse(lse, plan.bins, query.shape[3])
    fields = hopper.new_columns(query, key, plan)
    hopper.columns(query, key, structure, plan, fields, neg_lse, left.work_counters)
    return fields


def top(
    query: Tensor, key: Tensor, lse: Tensor, structure: Structure, plan: Plan, left: Intermediates
) -> dict[str, Tensor]:
    """Return the largest weights of each query and their keys: "top_weights" and "top_keys"."""
    from regard.kernels.triton import launch

    count = plan.problem.wanted.top
    if plan.top is None or plan.top.variant != "hopper":
        return launch.top(query, key, lse, structure, count)
    from regard.kernels.hopper import launch as hopper

    results, unfinished = launch.new_top(query, count)
    hopper.top(query, key, lse, structure, plan, left, results, unfinished)
    launch.search_top(query, key, lse, structure, count, results, unfinished, overlap=True)
    return results


def backward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    plan: Plan,
    kept: Mapping[str, Tensor],
    grads: Mapping[str, Tensor],
    train_bias: bool,
    deferred: DeferredColumns | None = None,
) -> Gradients:
    """Return the gradients; None for a tensor that the structure does not have.

    ``kept`` are the saved results of the forward pass, ``grads`` the gradients of results, by name.
    """
    from regard.kernels.triton import launch

    pending = deferred is not None and bool(deferred.fields)
    # Deterministic algorithms may have been enabled since the plan was made.
    if grads.keys() == {"output"} and not torch.are_deterministic_algorithms_enabled():
        if pending and plan.backward.variant == "hopper":
            from regard.kernels.hopper import launch as hopper

            assert deferred is not None
            gradients = hopper.backward(
                query, key, value, kept["output"], grads["output"], structure, plan,
                deferred.fields, deferred.neg_lse,
            )  # fmt: skip
            deferred.mark_computed()
            return *gradients, None, None, None
        if plan.backward.variant != "triton":  # cuDNN can run every call that Hopper's kernels can
            gradients = _cudnn_backward(grads["output"], query, key, value, structure, kept)
            sinks_grad = None
            if structure.sinks is not None:
                delta = (kept["output"].float() * grads["output"].float()).sum(-1)
                sinks_grad = _sinks_gradient(structure.sinks, kept["lse"], delta, None)
            return *gradients, None, None, sinks_grad
    if deferred is not None and pending:  # queries and keys may be freed after the backward pass
        deferred.compute(query, key, structure)
    results = launch.backward(query, key, value, structure, kept, grads, train_bias)
    sinks_grad = None
    if structure.sinks is not None:
        delta = results[5]
        sinks_grad = _sinks_gradient(structure.sinks, kept["lse"], delta, grads.get("entropy"))
    return *results[:5], sinks_grad


def _with_sinks(results: Mapping[str, Tensor], sinks: Tensor) -> dict[str, Tensor]:
    """Return the results of the forward pass with a sink in each row's softmax.

    The keys of a row get the share s = sigmoid(lse - sink) of the weight, the sink the rest. A row
    without keys keeps an lse of -inf, by which later passes recognize it.
    """
    lse = results["lse"]
    margin = lse - sinks[:, None]
    share = margin.sigmoid()
    scaled = {
        name: (results[name] * share).to(results[name].dtype)
        for name in ("peak", "distance")
        if name in results
    }
    output = results["output"]
    scaled["output"] = (output * share[..., None]).to(output.dtype)
    scaled["lse"] = torch.where(lse == -torch.inf, lse, lse - logsigmoid(margin))
    if "entropy" in results:  # the keys' entropy times their share, plus that of both shares
        both = torch.special.entr(share) + torch.special.entr((-margin).sigmoid())
        scaled["entropy"] = results["entropy"] * share + both
    return scaled


def _sinks_gradient(
    sinks: Tensor, lse: Tensor, delta: Tensor, entropy_grad: Tensor | None
) -> Tensor:
    """Return the gradient of the sinks, [heads]; ``triton.deltas`` describes ``delta``."""
    log_weight = sinks[:, None] - lse
    change = -delta if entropy_grad is None else -delta - entropy_grad * log_weight
    # In a row without keys the sink has weight 1, whatever its score.
    return (log_weight.exp() * change).masked_fill(lse == -torch.inf, 0).sum((0, 2))


def _saved_by_hooks() -> bool:
    """Whether hooks replace saved tensors, as in checkpointing; reading them is then costly."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def _cudnn_forward(
    query: Tensor, key: Tensor, value: Tensor, structure: Structure
) -> dict[str, Tensor]:
    """Return the output and lse that cuDNN computes."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
        query, key, value, None, True, 0.0, structure.kind == CAUSAL, False, scale=structure.scale
    )
    return {"output": output, "lse": lse.reshape(query.shape[:3])}


def _cudnn_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    structure: Structure,
    kept: Mapping[str, Tensor],
) -> tuple[Tensor, Tensor, Tensor]:
    """Return cuDNN's gradients; any kernels may have computed the output and lse."""
    output, lse = _laid_out_like(query, kept["output"]), kept["lse"][..., None]
    seed = torch.zeros((), dtype=torch.int64, device=query.device)  # unused without dropout
    causal = structure.kind == CAUSAL
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(  # type: ignore[no-any-return]
        _laid_out_like(query, grad), query, key, value, output, lse, seed, seed, None, None, None,
        query.shape[2], key.shape[2], 0.0, causal, scale=structure.scale,
    )  # fmt: skip


def _laid_out_like(query: Tensor, tensor: Tensor) -> Tensor:
    """Return a tensor of the query's shape in the memory layout of cuDNN's output.

    PyTorch (2.11) reuses cuDNN's graph for calls whose query, key and value have equal strides,
    whatever the strides of the output and its gradient, and so reads these in a wrong order.
    """
    like = torch.empty_like(query)  # as PyTorch allocates the output
    if tensor.stride() == like.stride() and tensor.data_ptr() % 16 == 0:
        return tensor
    return like.copy_(tensor)
