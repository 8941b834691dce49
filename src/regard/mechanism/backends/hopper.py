"""The backend 'hopper': kernels for compute capability 9.0 (H100, H200), written in Gluon.

It takes calls without bias and softcap whose mask is None or ``Causal()``. The kernels of 'triton'
or cuDNN run the passes that its own kernels cannot; ``regard.kernels.plan`` decides which.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.kernels import passes
from regard.kernels.plan import why_not_hopper
from regard.kernels.sizes import PLAIN, TABLE
from regard.mechanism.backends import triton
from regard.mechanism.backends.lowering import mask_kind, plan_kernels, run_kernels
from regard.mechanism.call import Call
from regard.mechanism.seeing import Seen


def unavailable() -> str | None:
    reason = triton.unavailable()
    if reason is not None or torch.compiler.is_compiling():
        # The compiler cannot trace a look at the device: the compiled operator takes it.
        return reason
    return passes.device_facts(torch.device("cuda")).why_not_hopper


def why_not_triton() -> str | None:
    """Why the kernels cannot run with the version of Triton that is installed, or None."""
    from regard.kernels.compat import why_not_gluon

    return why_not_gluon()


def refuses(call: Call) -> str | None:
    reason = triton.refuses(call) or _why_not_call(call)
    if reason is not None or torch.compiler.is_compiling():
        # The compiled operator checks the device and the memory layout.
        return reason
    plan = plan_kernels(call, hopper=True)
    if any(choice.variant == "hopper" for choice in plan.choices.values()):
        return None
    return plan.forward.why_not("hopper") or f"{plan.forward.variant} runs it faster."


def _why_not_call(call: Call) -> str | None:
    """Why the kernels cannot run a call, regardless of its device."""
    if call.extent.query_start is not None:
        return "the kernels for Hopper need the last query at the position of the last key."
    if call.sinks is not None:
        return "the kernels for Hopper support no attention sinks."
    return why_not_hopper(
        mask_kind(call.mask, call.extent), PLAIN if call.bias is None else TABLE,
        call.softcap is not None, call.query.dtype, call.query.shape, call.key.shape,
    )  # fmt: skip


def run(call: Call) -> tuple[Tensor, Seen | None]:
    return run_kernels(call, hopper=True)
