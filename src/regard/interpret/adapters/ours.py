"""Watch regard's own attention layers through their head hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from regard.interpret.watched import Watcher
from regard.layers.modules import MultiHeadAttention
from regard.mechanism.seeing import Seen


class RegardAdapter:
    """Watches every :class:`MultiHeadAttention`. Calls that pass ``see`` are not recorded."""

    def modules(self, watcher: Watcher) -> list[nn.Module]:
        return [module for module in watcher.names if isinstance(module, MultiHeadAttention)]

    def why_not(self, module: nn.Module) -> None:
        del module  # any MultiHeadAttention can be watched

    @contextmanager
    def attach(self, watcher: Watcher, modules: Sequence[nn.Module]) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(uncompiled())
            for module in modules:
                stack.callback(_observe(module, watcher).remove)
            yield


def _observe(module: nn.Module, watcher: Watcher) -> RemovableHandle:
    assert isinstance(module, MultiHeadAttention)

    def record(_: Tensor, seen: Seen | None) -> None:
        if seen is not None and watcher.active:
            watcher.record(module, seen)

    return module.head_hooks.observe(record, lambda: watcher.see if watcher.active else None)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules without compilation, because compiled code ignores new hooks."""
    # Importing the compiler takes seconds. If it is not imported, no module is compiled.
    compiled = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield
