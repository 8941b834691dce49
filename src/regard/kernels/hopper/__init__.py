"""Attention kernels for Hopper in Gluon, with warp specialization as in FlashAttention-3.

They compute the same results as the Triton kernels in ``triton/forward.py``, ``columns.py``,
``backward.py`` and the top keys of ``rows.py``. They take calls without bias and softcap, unmasked
or causal.
In Triton the compiler assigns work to warps, which is slower on Hopper. In Gluon
(https://triton-lang.org/main/gluon), its lower-level language, the kernel assigns it. These kernels
run only on compute capability 9.0.

``launch`` launches the kernels. It is imported only when a plan selects them.
"""

from regard.kernels.hopper.backward import backward, gather, prepare
from regard.kernels.hopper.columns import add, columns
from regard.kernels.hopper.forward import forward, join
from regard.kernels.hopper.pipeline import reset_counters
from regard.kernels.hopper.top import top

__all__ = [
    "add", "backward", "columns", "forward", "gather", "join", "prepare", "reset_counters", "top",
]  # fmt: skip
