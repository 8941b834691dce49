"""The passes over all scores for Hopper, where groups of warps have roles.

The same as in forward.py, columns.py, backward.py and, for the top keys, rows.py, for calls without
a bias that have no mask or are causal. Triton decides itself what each warp does, and not so well:
these are written in Gluon, its lower language (https://triton-lang.org/main/gluon). Nothing but a
Hopper runs them.
"""

from regard.kernels.hopper.backward import backward, gather, prepare
from regard.kernels.hopper.columns import add, columns
from regard.kernels.hopper.forward import forward, join
from regard.kernels.hopper.pipeline import undrawn
from regard.kernels.hopper.top import top

__all__ = ["add", "backward", "columns", "forward", "gather", "join", "prepare", "top", "undrawn"]
