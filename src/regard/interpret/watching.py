"""watch(model, See(...)): record what every attention layer computes while the model runs.

Each library has an adapter that watches its layers. A watcher records only the calls of the thread
or asyncio task that entered its ``with`` block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from regard.errors import InputError
from regard.interpret.adapters import operations, ours
from regard.interpret.watched import Watched, Watcher, active_watchers
from regard.mechanism.seeing import Pairs, See, Seen, check_heads


@contextmanager
def watch(
    model: nn.Module,
    see: See,
    each: Callable[[str, Seen], None] | None = None,
    *,
    layers: Sequence[str] | None = None,
    heads: Sequence[int] | None = None,
    join: bool = False,
) -> Iterator[Watched]:
    """Record the fields of ``see`` for each call of each attention layer of ``model``.

    ``model`` is any PyTorch module: of regard, of transformers, of another library or your own. It
    is left unchanged, and so is its output, except for rounding where the module calls
    ``torch.nn.functional.scaled_dot_product_attention`` (then memory grows with the number of
    tokens, not with its square). A module that computes its weights itself is seen through its
    softmax. Modules that are named after attention, ran and could not be recorded are named in a
    warning and in ``watched.unseen``. Calls of other threads and asyncio tasks are not recorded.
    Run the model under ``torch.no_grad()`` unless you need gradients of the recorded fields.

    With ``each``, nothing is stored: after every call, ``each`` is called with the layer's name and
    its ``Seen``. This saves memory for long texts. ``layers`` selects layers by name or pattern,
    such as ``["model.layers.3.*"]``, and ``heads`` the heads of each that are kept, such as
    ``[0, 3]``; ``seen.heads`` has their numbers. With ``join``, the calls of a layer become one, so
    that the memory of a generation grows with its length: fields of queries follow one another, and
    ``received`` is the sum.

    >>> import torch
    >>> from regard import See, watch
    >>> model = torch.nn.ModuleDict({"first": torch.nn.MultiheadAttention(8, 2)})
    >>> x = torch.zeros(5, 1, 8)
    >>> with watch(model, See(entropy=True)) as watched:
    ...     _ = model["first"](x, x, x)
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
    parts = [
        name for name in see.requested if name in ("rows", "pairs", "scores", "map", "weights")
    ]
    if join and (parts or each is not None):
        what = f"See({parts[0]}=...) is of a single call" if parts else "each= takes single calls"
        raise InputError(f"{what}, so it cannot be combined with join=True.")
    chosen = None if heads is None else check_heads(heads)
    watcher = Watcher(model, see, each, _checked(layers, model), join, chosen)
    for other in active_watchers.get():
        shared = [type(module).__name__ for module in watcher.names if module in other.names]
        if shared:
            raise InputError(
                f"{shared[0]} is being watched already. Give all fields to the outer watch(...), "
                "as in See(entropy=True, top=8)."
            )
    with ExitStack() as stack:
        for adapter in (ours, operations):
            adapter.attach(watcher, stack)
        stack.enter_context(_no_generation(model, see))
        token = active_watchers.set((*active_watchers.get(), watcher))
        stack.callback(active_watchers.reset, token)
        yield watcher.watched
    watcher.finish()


def _checked(layers: Sequence[str] | None, model: nn.Module) -> Sequence[str] | None:
    if layers is None:
        return None
    given = layers if isinstance(layers, Sequence) and not isinstance(layers, str) else ()
    if not given or not all(isinstance(layer, str) for layer in given):
        raise InputError(f"layers is a list of names, such as ['encoder.*'], not {layers!r}.")
    names = [name for name, _ in model.named_modules()]
    for pattern in layers:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise InputError(
                f"No module of {type(model).__name__} is named {pattern!r}. model.named_modules() "
                "lists all names; * stands for any part of a name."
            )
    return layers


@contextmanager
def _no_generation(model: nn.Module, see: See) -> Iterator[None]:
    """Refuse ``model.generate`` if ``see`` names queries that its later steps do not have."""
    queries = {*see.rows, *_queries(see.pairs), *_queries(see.scores)} - {0, -1}
    if not queries or not callable(getattr(model, "generate", None)):
        yield
        return

    def generate(*_: Any, **__: Any) -> None:
        raise InputError(
            f"See names query {min(queries)}, but each step of a generation has a single query. "
            "Name query -1, or watch one call of the model over the whole text."
        )

    vars(model)["generate"] = generate
    try:
        yield
    finally:
        del vars(model)["generate"]


def _queries(chosen: Any) -> list[int]:
    if isinstance(chosen, Pairs):
        return [int(query) for query in chosen.queries]
    return list(chosen or ())
