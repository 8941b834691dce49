"""Make ``attn_implementation="regard"`` known to transformers, whichever is imported first.

``import regard`` loads neither transformers nor PyTorch. Where transformers is not imported yet, a
finder on ``sys.meta_path`` waits for its module of models. It finds that module as Python does, and
registers regard's attention as soon as the module has run.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

MODELS = "transformers.modeling_utils"  # the module that holds the registry of attention functions


def register_when_imported() -> None:
    """Register regard's attention now if transformers' models are imported, else when they are."""
    if MODELS in sys.modules:
        _register()
    else:
        sys.meta_path.insert(0, _Waiting())


def _register() -> None:
    version: str = sys.modules["transformers"].__version__
    if int(version.partition(".")[0]) < 5:
        return  # it passes other arguments to masks and attention
    try:
        # Late, because it imports PyTorch and transformers, which are imported by now.
        from regard.interpret.adapters.attention_implementation import register
    except ImportError as error:
        warnings.warn(
            f'attn_implementation="regard" is not available with transformers {version}: {error}. '
            "Models can be watched as before.",
            stacklevel=2,
        )
        return
    register()


class _Waiting(MetaPathFinder):
    """Registers regard's attention once the module ``MODELS`` has run."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> ModuleSpec | None:
        if fullname != MODELS:
            return None
        sys.meta_path.remove(self)  # so that the other finders are asked
        try:
            spec = find_spec(fullname)
        finally:
            sys.meta_path.insert(0, self)
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_register(module: ModuleType) -> None:
            run(module)
            sys.meta_path.remove(self)
            _register()

        # The loader was made for this import alone.
        spec.loader.exec_module = run_and_register  # type: ignore[method-assign]
        return spec
