"""Watch regard's own attention layers through their head hooks."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial

import torch
from torch import Tensor

from regard.interpret.watched import Watcher, computed_again, computed_later
from regard.layers.modules import MultiHeadAttention
from regard.mechanism.seeing import See, Seen


def attach(watcher: Watcher, stack: ExitStack) -> bool:
    """Watch every :class:`MultiHeadAttention`. Calls that pass ``see`` are not recorded."""
    layers = [module for module in watcher.names if isinstance(module, MultiHeadAttention)]
    if layers:
        stack.enter_context(uncompiled())
    for layer in layers:
        hook = layer.head_hooks.observe(
            partial(_record, watcher, layer), partial(_fields, watcher, layer)
        )
        stack.callback(hook.remove)
    return bool(layers)


def _fields(watcher: Watcher, layer: MultiHeadAttention) -> See | None:
    if not watcher.active or computed_again() or not watcher.wants(layer):
        return None
    if computed_later():
        name = watcher.names[layer]
        watcher.missed(name, "runs in a gradient checkpoint with use_reentrant=False")
        return None
    return watcher.see


def _record(watcher: Watcher, layer: MultiHeadAttention, heads: Tensor, seen: Seen | None) -> None:
    if seen is not None and watcher.active and watcher.wants(layer, heads):
        watcher.record(layer, seen)


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run compiled modules without compilation, because compiled code ignores new hooks."""
    # Importing the compiler takes seconds. If it is not imported, no module is compiled.
    compiled = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield
