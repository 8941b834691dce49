"""Watch chosen layers of a subject, and nothing else of its model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

from torch import nn

from regard.errors import InputError
from regard.interpret.subjects.subject import Layer
from regard.interpret.watching import watch
from regard.mechanism.seeing import See, Seen


@contextmanager
def recording(
    layers: Sequence[Layer], see: See, each: Callable[[Layer, Seen], None]
) -> Iterator[None]:
    """Pass the fields of each layer to ``each`` while the model runs once.

    InputError if a layer did not run, or could not be recorded.
    """
    # Several layers may share a module; their calls tell them apart.
    by_call: dict[tuple[str, int], Layer] = {}
    modules = nn.ModuleDict()
    for layer in layers:
        name = (layer.path or layer.name).replace(".", "/")  # ends like the module's own name
        modules[name] = layer.module
        by_call[name, layer.call] = layer
    calls: Counter[str] = Counter()

    def add(name: str, seen: Seen) -> None:
        name = name.partition(".")[0]  # the call may be that of a module inside
        layer = by_call.get((name, calls[name]))
        calls[name] += 1
        if layer is not None:
            each(layer, seen)

    with ExitStack() as stack:
        for module in set(modules.values()):
            # PyTorch fuses an nn.TransformerEncoderLayer only if no module inside it has a hook.
            stack.callback(module.register_forward_hook(lambda *_: None).remove)
        stack.enter_context(watch(modules, see, add))
        yield
    for (name, call), layer in by_call.items():
        if calls[name] <= call:
            raise InputError(
                f"Layer {layer.name} did not run as it did over the first tokens, or computed "
                "attention in another way, so it was not recorded. Use regard.watch(...)."
            )
