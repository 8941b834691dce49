"""What all tests share."""

from __future__ import annotations

import os

import torch

collect_ignore = ["fixtures"]  # what made them needs other versions of everything

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores; threads on top of them only wait

if not torch.cuda.is_available():
    # Without a GPU our kernels run in Triton's interpreter, and Triton asks once: when imported.
    os.environ["TRITON_INTERPRET"] = "1"
