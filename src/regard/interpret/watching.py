"""watch(model, See(...)): what every attention layer does, while the model runs.

Each library's layers are watched by its adapter. A watcher records the calls of the thread or task
that entered the ``with``, and of no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from regard.errors import InputError
from regard.interpret.adapters.base import Adapter
from regard.interpret.adapters.huggingface import TransformersAdapter
from regard.interpret.adapters.ours import RegardAdapter
from regard.interpret.watched import Watched, Watcher, active_watchers
from regard.mechanism.seeing import See, Seen

ADAPTERS: tuple[Adapter, ...] = (RegardAdapter(), TransformersAdapter())


@contextmanager
def watch(
    model: nn.Module, see: See, each: Callable[[str, Seen], None] | None = None
) -> Iterator[Watched]:
    """Record what each attention layer of ``model`` does, call by call, while the model runs.

    ``model`` is a model of regard, any module that holds :class:`MultiHeadAttention`, or a model of
    transformers 4.57 or later whose attention goes through the attention registry (before
    transformers 5, BERT and T5 do not, and are refused). Its output stays the same within rounding,
    and afterwards it is unchanged. Run it under ``torch.no_grad()`` where no gradient of what was
    seen is needed. A position of a ``transformers`` model with nothing to attend to, such as
    padding on the left, yields zeros, as everywhere in regard.

    With ``each`` nothing is kept: after every call it is passed the name of the layer and what was
    seen, so that the layers of a long text need not be held together.

    >>> import torch
    >>> from regard import See, watch
    >>> from regard.layers.modules import MultiHeadAttention
    >>> model = torch.nn.ModuleDict({"first": MultiHeadAttention(8, heads=2)})
    >>> with watch(model, See(entropy=True)) as watched:
    ...     _ = model["first"](torch.zeros(1, 5, 8))
    >>> watched
    Watched: 1 layer, 1 call of entropy
      first  1 call  1 x 2 heads, 5 queries, 5 keys
    >>> [list(seen.entropy.shape) for seen in watched["first"]]
    [[1, 2, 5]]
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"watch takes a model, a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(see, See):
        raise InputError(f"watch takes See(...), as in See(entropy=True), not {see!r}.")
    watcher = Watcher(model, see, each)
    parts = [(adapter, modules) for adapter in ADAPTERS if (modules := adapter.modules(watcher))]
    if not parts:
        raise InputError(
            f"There is nothing to watch in {type(model).__name__}: it holds no MultiHeadAttention "
            "of regard and is no model of the transformers library."
        )
    for other in active_watchers.get():
        shared = [type(module).__name__ for module in watcher.names if module in other.names]
        if shared:
            raise InputError(
                f"{shared[0]} is being watched already. Give the outer watch(...) all fields, as "
                "in See(entropy=True, top=8)."
            )
    for adapter, modules in parts:
        for module in modules:
            if reason := adapter.why_not(module):
                raise InputError(reason)
    with ExitStack() as stack:
        for adapter, modules in parts:
            stack.enter_context(adapter.attach(watcher, modules))
        token = active_watchers.set((*active_watchers.get(), watcher))
        stack.callback(active_watchers.reset, token)
        yield watcher.watched
