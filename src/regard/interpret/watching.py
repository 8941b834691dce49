"""watch(model, See(...)): what every layer's attention did, while the model runs.

Our own layers are asked through forward hooks. A model of the ``transformers`` library is asked
through that library's registry of attention functions: inside the ``with``, its attention is
regard's. Who watches is known to the thread or task that entered the ``with``, and to no other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from regard.errors import InputError
from regard.interpret.adapters.huggingface import (
    check_reachable,
    refuse_output_attentions,
    rerouted,
    transformers_models,
)
from regard.interpret.adapters.ours import ask_hook, take_hook, uncompiled
from regard.interpret.watched import Watched, Watcher, active_watchers
from regard.layers.modules import MultiHeadAttention
from regard.mechanism.seeing import See, Seen


@contextmanager
def watch(
    model: nn.Module, see: See, each: Callable[[str, Seen], None] | None = None
) -> Iterator[Watched]:
    """Collect what each attention layer of ``model`` does, call by call, while the model runs.

    ``model`` is one of ours, any module that holds :class:`MultiHeadAttention`, or a model of the
    ``transformers`` library, 4.57 or later, whose attention goes through that library's registry:
    before 5 that of BERT and T5 does not, which is told. Its output stays the same within rounding;
    afterwards it is as it was. Run it under ``torch.no_grad()`` where no
    gradient of what was seen is needed. A position of a ``transformers`` model with nothing to
    attend to, such as padding on the left, yields zeros, as everywhere in regard.

    With ``each`` nothing is kept: it is called with the name of a layer and what was seen, call
    after call, so that a long text's layers need not all be held at once.

    >>> import torch
    >>> from regard import See, watch
    >>> from regard.layers.modules.modules import MultiHeadAttention
    >>> model = torch.nn.ModuleDict({"first": MultiHeadAttention(8, heads=2)})
    >>> with watch(model, See(entropy=True)) as watched:
    ...     _ = model["first"](torch.zeros(1, 5, 8))
    >>> watched
    Watched: 1 layer, 1 call of entropy
      first  1 call  1 x 2 heads, 5 queries, 5 keys
    >>> list(watched["first"].entropy.shape)
    [1, 2, 5]
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"watch takes a model, a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(see, See):
        raise InputError(f"watch takes See(...), as in See(entropy=True), not {see!r}.")
    watcher = Watcher(model, see, each)
    ours = [module for module in watcher.names if isinstance(module, MultiHeadAttention)]
    theirs = transformers_models(watcher)
    if not ours and not theirs:
        raise InputError(
            f"There is nothing to watch in {type(model).__name__}: it holds no MultiHeadAttention "
            "of regard and is no model of the transformers library."
        )
    for other in active_watchers.get():
        shared = [type(module).__name__ for module in watcher.names if module in other.names]
        if shared:
            raise InputError(
                f"{shared[0]} is being watched already. Ask the outer watch(...) for "
                "all you want to see, as in See(entropy=True, top=8)."
            )
    for part in theirs:
        check_reachable(part)

    with ExitStack() as stack:
        if ours:
            stack.enter_context(uncompiled())
        for module in ours:
            stack.callback(
                module.register_forward_pre_hook(ask_hook(watcher), with_kwargs=True).remove
            )
            stack.callback(
                module.register_forward_hook(take_hook(watcher), with_kwargs=True).remove
            )
        for part in theirs:
            refusal = part.register_forward_pre_hook(refuse_output_attentions, with_kwargs=True)
            stack.callback(refusal.remove)
            stack.enter_context(rerouted(part))
        token = active_watchers.set((*active_watchers.get(), watcher))
        stack.callback(active_watchers.reset, token)
        yield watcher.watched


# Our own layers --------------------------------------------------------------------------------


# Models of transformers ------------------------------------------------------------------------
