"""The interface of adapters: each lets ``watch`` record the layers of one library."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import nn

from regard.interpret.watched import Watcher


class Adapter(Protocol):
    """How the attention of one library's modules is watched."""

    def modules(self, watcher: Watcher) -> Sequence[nn.Module]:
        """The modules of ``watcher.names`` that this adapter watches."""

    def why_not(self, module: nn.Module) -> str | None:
        """The reason why one of its modules cannot be watched, or None."""

    def attach(
        self, watcher: Watcher, modules: Sequence[nn.Module]
    ) -> AbstractContextManager[None]:
        """A context within which the calls of ``modules`` go to ``watcher.record``.

        Outside of it the modules are unchanged. Calls of threads where the watcher is not active
        are not recorded.
        """
