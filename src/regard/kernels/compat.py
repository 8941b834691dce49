"""The undocumented parts of Triton that the kernels use, in one place.

A new release of Triton may change any of it. Gluon, the language of the kernels for Hopper, is
experimental: those kernels run only with the version that they were tested with.

Test: ``pytest tests -k "compile_for_a_hopper"``.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import triton
from torch import Tensor

# In device code: wait until the previous kernel launch has ended.
from triton.language.extra.cuda import gdc_wait

__all__ = [
    "FUSED", "GLUON_VERSION", "OVERLAPPING", "gdc_wait", "tensor_descriptor", "why_not_gluon",
]  # fmt: skip

GLUON_VERSION = "3.6"
# Launch options: round a product and a sum once, together. Triton 3.10 changes the default.
FUSED: Any = {"enable_fp_fusion": True}
# Launch options: programs may start before the previous kernel launch has ended.
OVERLAPPING: Any = {"launch_pdl": True}


def why_not_gluon() -> str | None:
    """Return why the kernels for Hopper cannot run with the installed Triton, or None."""
    if triton.__version__.startswith(f"{GLUON_VERSION}."):
        return None
    return (
        f"Triton {triton.__version__} is installed, but the kernels need Triton {GLUON_VERSION}, "
        "because their language, Gluon, changes with each release."
    )


def tensor_descriptor(tensor: Tensor, shape: Any, strides: Any, block: tuple[int, ...]) -> Any:
    """Return a descriptor with which the copy engine copies tiles of shape ``block``."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = _shared_layout(len(block), tensor.element_size())
    return TensorDescriptor(tensor, list(shape), list(strides), list(block), layout)


@cache
def _shared_layout(rank: int, size: int) -> Any:
    """The layout in shared memory: swizzled for matrix products, except for float32."""
    from triton.experimental.gluon.language import NVMMASharedLayout

    swizzled = 128 if size == 2 else 0
    return NVMMASharedLayout(swizzle_byte_width=swizzled, element_bitwidth=size * 8, rank=rank)
