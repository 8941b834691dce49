"""The interface of adapters: each lets ``watch`` record the layers of one library."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from regard.interpret.watched import Watcher


class Adapter(Protocol):
    """Records the calls of one library's attention layers."""

    def modules(self, watcher: Watcher) -> Sequence[nn.Module]:
        """The modules of ``watcher.names`` that this adapter watches."""

    def why_not(self, module: nn.Module) -> str | None:
        """The reason why this module cannot be watched, or None."""

    def attach(
        self, watcher: Watcher, modules: Sequence[nn.Module]
    ) -> AbstractContextManager[None]:
        """A context manager that passes every call of ``modules`` to ``watcher.record``.

        On exit it restores the modules. It ignores calls of threads that did not enter ``watch``.
        """
