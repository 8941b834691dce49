"""Watch regard's own attention layers through forward hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from regard.interpret.watched import Watcher
from regard.layers.modules import MultiHeadAttention


class RegardAdapter:
    """Every :class:`MultiHeadAttention`, by the ``see`` argument of its calls."""

    def modules(self, watcher: Watcher) -> list[nn.Module]:
        return [module for module in watcher.names if isinstance(module, MultiHeadAttention)]

    def why_not(self, module: nn.Module) -> None:
        del module  # every one of them can be watched

    @contextmanager
    def attach(self, watcher: Watcher, modules: Sequence[nn.Module]) -> Iterator[None]:
        def add_see(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
            # A call with a ``see`` of its own keeps its own result.
            if watcher.active and kwargs.get("see") is None:
                return args, kwargs | {"see": watcher.see}
            return None

        def take_seen(module: nn.Module, _: Any, kwargs: dict[str, Any], result: Any) -> Any:
            if kwargs.get("see") is not watcher.see:
                return None
            output, seen = result
            watcher.record(module, seen)
            return output

        with ExitStack() as stack:
            stack.enter_context(uncompiled())
            for module in modules:
                before = module.register_forward_pre_hook(add_see, with_kwargs=True)
                stack.callback(before.remove)
                stack.callback(module.register_forward_hook(take_seen, with_kwargs=True).remove)
            yield


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within, compiled modules run as plain Python: compiled code ignores new hooks."""
    # Loading the compiler takes seconds: where it is not loaded, nothing has been compiled.
    compiled = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield
