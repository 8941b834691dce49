"""The passes for Hopper, in Gluon: groups of warps have roles, as in FlashAttention-3.

They compute the same as ``triton/forward.py``, ``columns.py``, ``backward.py`` and the top keys of
``rows.py``, for calls that have no bias, and no mask or a causal one. Triton assigns the work of
each warp itself, and is slower on Hopper. Gluon (https://triton-lang.org/main/gluon) is its lower
language, where the program does that. These kernels run on compute capability 9.0 alone.

``launch`` launches them. It is imported only where a plan takes them.
"""

from regard.kernels.hopper.backward import backward, gather, prepare
from regard.kernels.hopper.columns import add, columns
from regard.kernels.hopper.forward import forward, join
from regard.kernels.hopper.pipeline import reset_counters
from regard.kernels.hopper.top import top

__all__ = [
    "add", "backward", "columns", "forward", "gather", "join", "prepare", "reset_counters", "top",
]  # fmt: skip
