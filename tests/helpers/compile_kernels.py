"""Compile the Triton kernels for a GPU of compute capability 9.0, on a machine without one.

    python tests/helpers/compile_kernels.py [NAME ...]

The calls below have tensors in CPU memory. A launch compiles its kernel, up to and including ptxas,
but does not run it. Without names, all calls are compiled, which takes minutes.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # must be set before Triton is imported

import torch
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import ty_to_cpp
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from regard import Alibi, Causal, RelativeBuckets, RelativeContent, See, Window
from regard.kernels.triton import softmax
from regard.mechanism.backends import triton as triton_backend
from regard.mechanism.biases import Bias
from regard.mechanism.call import check
from regard.mechanism.masks import Mask

BATCH, HEADS, LENGTH, WIDTH = 2, 4, 1024, 64
ROWS = See(lse=True, entropy=True, peak=True, max_logit=True, distance=True, rows=[1], top=5)
SUMS = See(lse=True, entropy=True, distance=True, received=True, map=(8, 8))  # with gradients

made: list[str] = []  # the names of the kernels compiled for a call


class NoDevice:
    """The part of a driver that Triton needs to compile."""

    map_python_to_cpp_type = staticmethod(ty_to_cpp)

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0


def compile_instead(kernel: JITFunction[Any], grid: Any) -> Callable[..., None]:
    def launch(*given: Any, **options: Any) -> None:
        compiled = kernel.run(*given, grid=grid, warmup=True, **options)
        assert "ptx" in compiled.asm
        made.append(kernel.__name__)

    return launch


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.zeros(shape, dtype=dtype, requires_grad=True)


def content() -> Bias:
    return RelativeContent(
        leaf(BATCH, HEADS, LENGTH, WIDTH), leaf(HEADS, LENGTH, WIDTH), 1 - LENGTH
    )


CALLS: dict[str, tuple[Mask | None, Callable[[], Bias | None], float | None]] = {
    "full": (None, lambda: None, None),
    "causal": (Causal(), lambda: None, None),
    "window": (Window(100, 20), lambda: None, None),
    "alibi": (Causal(), lambda: Alibi(leaf(HEADS, dtype=torch.float32)), 3.0),
    "buckets": (
        Window(100, 20), lambda: RelativeBuckets(leaf(32, HEADS, dtype=torch.float32)), None,
    ),
    "content": (Causal(), content, None),
}  # fmt: skip


def attend(name: str) -> None:
    """Every pass of a call, forward and backward."""
    mask, bias, softcap = CALLS[name]
    for see in (ROWS, SUMS):
        if name == "content" and see is ROWS:  # no kernel has this bias with top keys or rows
            continue
        tensors = [leaf(BATCH, HEADS, LENGTH, WIDTH) for _ in range(3)]
        with torch.set_grad_enabled(see is SUMS):
            call = check(*tensors, mask, bias(), None, softcap, 0.0, see)
            output, seen = triton_backend.run(call)
        if seen is not None and see is SUMS:
            torch.autograd.backward([output, *seen.to_dict().values()], [
                torch.zeros_like(tensor) for tensor in (output, *seen.to_dict().values())
            ])  # fmt: skip


def cross_entropy() -> None:
    logits, labels = torch.zeros(64, 5000, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.long)
    softmax.cross_entropy(logits, 5000, labels, 0.1, gradient=True)


if __name__ == "__main__":
    driver.set_active(NoDevice())
    JITFunction.__getitem__ = compile_instead
    for name in sys.argv[1:] or [*CALLS, "cross entropy"]:
        made.clear()
        cross_entropy() if name == "cross entropy" else attend(name)
        assert made, f"{name}: no kernel was compiled"
        sys.stdout.write(f"{name}: compiled {', '.join(made)}\n")
        sys.stdout.flush()
