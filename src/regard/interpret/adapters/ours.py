"""Watch regard's own attention layers through forward hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from regard.interpret.watched import Watcher


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within, modules run as they are written: once compiled, they do not see new hooks."""
    # Only where something may have been compiled: to load the compiler takes seconds.
    compiled = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


def ask_hook(watcher: Watcher) -> Any:
    """A hook before a layer's forward: it is to see what the watcher asks for."""

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # A call that sees something for itself keeps its own answer.
        if watcher.active and kwargs.get("see") is None:
            return args, kwargs | {"see": watcher.see}
        return None

    return hook


def take_hook(watcher: Watcher) -> Any:
    """A hook after a layer's forward: what was seen goes to the watcher, the output goes on."""

    def hook(module: nn.Module, _: Any, kwargs: dict[str, Any], result: Any) -> Any:
        if kwargs.get("see") is not watcher.see:
            return None
        output, seen = result
        watcher.record(module, seen)
        return output

    return hook
