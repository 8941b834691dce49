"""What all tests share."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import settings

# transformer_xl is made by other versions of everything. A path on the command line is not ignored.
collect_ignore = ["helpers", "models/transformer_xl", "conformance"]

if "PYTEST_XDIST_WORKER" in os.environ:
    torch.set_num_threads(1)  # workers share the cores; threads on top of them only wait

settings.register_profile("untimed", deadline=None)  # a busy machine is no failure
settings.load_profile("untimed")

if not torch.cuda.is_available():
    # Without a GPU our kernels run in Triton's interpreter, and Triton asks once: when imported.
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        from triton.runtime import interpreter

        _patch = interpreter._patch_lang_tensor

        def _with_index(tensor: Any, scope: Any) -> None:
            """As Triton has it, but for NumPy 2.4 too: an array of one number is no index there."""
            _patch(tensor, scope)
            scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

        interpreter._patch_lang_tensor = _with_index


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what needs a GPU where there is none; pytest's summary then says so."""
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="NOT TESTED: this needs a GPU"))


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a small model for each task, which no test may change."""
    from helpers.model_folders import for_every_task

    return for_every_task(tmp_path_factory.mktemp("models"))
