"""What one ``with watch(...)`` records: every call of every attention layer."""

from __future__ import annotations

import html
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from regard.errors import InputError
from regard.interpret import recorded
from regard.mechanism.geometry import has_values, transforms_keep_tensors
from regard.mechanism.labelled import Convertible, Parts
from regard.mechanism.seeing import See, Seen
from regard.pictures.figures import Picture


class Watched(Convertible, Mapping[str, list[Seen]]):
    """A mapping from the name of each layer to a list with one ``Seen`` for each call.

    Names come from ``model.named_modules()``, in the order of the layers' first calls. Arrays and
    tables have the dimensions layer and call; where calls have different sizes, the rest of an
    array is NaN, while a table has no rows there.

    >>> import torch
    >>> from regard import GPT2, GPT2Config, See, watch
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=2, heads=2)).eval()
    >>> with watch(model, See(entropy=True)) as watched:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> {name: list(seen.entropy.shape) for name, [seen] in watched.items()}
    {'stack.blocks.0.attention': [1, 2, 3], 'stack.blocks.1.attention': [1, 2, 3]}
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, Seen]] = []
        self._passed_on = 0  # calls passed to the ``each`` callback
        self._started = False  # whether a module of a library ran
        # Modules that ran and seem to compute attention, but are not recorded; with the reason.
        self.unseen: dict[str, str] = {}

    def _add(self, name: str, seen: Seen, join: bool) -> None:
        for index, (layer, before) in enumerate(self._calls if join else ()):
            if layer == name and before.extent[:2] == seen.extent[:2]:
                self._calls[index] = name, _joined(before, seen)
                return
        self._calls.append((name, seen))

    @property
    def calls(self) -> list[tuple[str, Seen]]:
        """Every call in order: the layer's name and its ``Seen``."""
        return list(self._calls)

    def __getitem__(self, name: str) -> list[Seen]:
        calls = [seen for layer, seen in self._calls if layer == name]
        if not calls:
            layers = ", ".join(self) or "none so far"
            raise KeyError(f"No call of a layer {name!r} was recorded. Recorded layers: {layers}.")
        return calls

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _ in self._calls))

    def __len__(self) -> int:
        return len({name for name, _ in self._calls})

    def picture(
        self,
        *,
        layer: str | int | None = None,
        head: int | None = None,
        call: int | None = None,
        batch: int | None = None,
        tokens: Sequence[str] | None = None,
        query_tokens: Sequence[str] | None = None,
    ) -> Picture:
        """An overview of all heads or, with ``layer`` and ``head``, a map of one head.

        The overview has a panel for each of these fields that was recorded: entropy, peak,
        distance, distance_variance and sink, as means over all queries; received, as the mean
        weight on the first key; and max_logit, as its maximum.

        The map shows the weights or, where they were not recorded, the pooled map. ``layer`` is a
        name or the number of a recorded layer. ``call`` and ``batch`` choose the call and the text
        if there are several. Up to 64 ``tokens`` label the keys, and the queries unless
        ``query_tokens`` are given.
        """
        if layer is None and head is None:
            return recorded.overview(self._calls)
        if layer is None or head is None:
            raise InputError("A map shows one head: give layer and head, or neither.")
        one = recorded.choose(self._calls, layer, call, batch)
        return recorded.head_map(one, head, tokens, query_tokens)

    def to_bertviz(
        self,
        tokens: Sequence[str],
        target_tokens: Sequence[str] | None = None,
        *,
        layers: str = "*",
        batch: int | None = None,
    ) -> dict[str, Any]:
        """The arguments of BertViz's ``head_view`` and ``model_view``, for a short text.

        Needs ``See(weights=True)`` and one call of each layer. ``target_tokens`` are those of the
        decoder of an encoder-decoder. ``layers`` is a pattern of names, such as ``"encoder.*"``.
        ``batch`` is the place of the text if several ran together::

            bertviz.head_view(**watched.to_bertviz(tokens))
        """
        return recorded.bertviz(self._calls, tokens, target_tokens, layers, batch)

    def to_circuitsvis(
        self,
        tokens: Sequence[str],
        layer: str | int,
        *,
        call: int | None = None,
        batch: int | None = None,
    ) -> dict[str, Any]:
        """The arguments of CircuitsVis's ``attention_patterns``, for one layer and a short text.

        Needs ``See(weights=True)``::

            circuitsvis.attention.attention_patterns(**watched.to_circuitsvis(tokens, layer=0))
        """
        return recorded.circuitsvis(self._calls, tokens, layer, call, batch)

    def _labelled(self) -> Parts:
        return recorded.labelled(self._calls)

    @property
    def _counts(self) -> str:
        layers, calls = len(self), len(self._calls)
        return f"{layers} layer{'s' * (layers != 1)}, {calls} call{'s' * (calls != 1)}"

    def _summary(self) -> Iterator[tuple[str, str, str]]:
        """For each layer its name, the number of its calls, and the sizes of the last call."""
        for name, calls in self.items():
            yield (
                name,
                "1 call" if len(calls) == 1 else f"{len(calls)} calls, the last:",
                calls[-1].sizes,
            )

    def __repr__(self) -> str:
        lines = list(self._summary())
        unseen = [f"  {name}  not recorded: it {reason}" for name, reason in self.unseen.items()]
        if not lines and self._passed_on:
            return f"Watched: {self._passed_on} calls, each passed to the callback"
        if not lines:
            ran = "it ran, but no attention was found" if self._started else "the model has not run"
            ran = "attention ran, but is not recorded" if unseen else ran
            return "\n".join([f"Watched: {self._counts} ({ran})", *unseen])
        name_width, calls_width = (max(len(line[column]) for line in lines) for column in (0, 1))
        fields = ", ".join(self._calls[0][1].to_dict())
        return "\n".join(
            [f"Watched: {self._counts} of {fields}"]
            + [f"  {name:<{name_width}}  {n:<{calls_width}}  {extent}" for name, n, extent in lines]
            + unseen
        )

    def _repr_html_(self) -> str:
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
            for line in (
                *self._summary(),
                *((name, "", f"not recorded: it {reason}") for name, reason in self.unseen.items()),
            )
        )
        return (
            f"<table><caption>Watched: {self._counts}</caption>"
            "<thead><tr><th>layer</th><th>calls</th><th>extent</th></tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )


def _joined(before: Seen, after: Seen) -> Seen:
    """Two calls of a layer as one with the queries of both."""
    keys = max(before.extent[3], after.extent[3])
    values: dict[str, Tensor] = {}
    others = after.to_dict()
    for name, tensor in before.to_dict().items():
        other = others[name]
        if name == "received":
            tensor, other = (pad(part, (0, keys - part.shape[-1])) for part in (tensor, other))
            values[name] = tensor + other
        elif name == "max_logit":
            values[name] = torch.maximum(tensor, other)
        else:
            values[name] = torch.cat((tensor, other), dim=2)
    batch, heads, queries, _ = before.extent
    return Seen.from_dict(values, (batch, heads, queries + after.extent[2], keys), before.heads)


class Watcher:
    """One ``with watch(...)``: the watched modules, the fields to record, and the record."""

    def __init__(
        self,
        model: nn.Module,
        see: See,
        each: Callable[[str, Seen], None] | None,
        layers: Sequence[str] | None = None,
        join: bool = False,
        heads: tuple[int, ...] | None = None,
    ) -> None:
        self.model = model
        self.names = {
            module: name or type(module).__name__ for name, module in model.named_modules()
        }
        self.see = see
        self.each = each
        self.watched = Watched()
        self._layers = layers
        self._join = join
        self._heads = heads
        self._ran: dict[str, str] = {}
        self._done: set[str] = set()  # the layers that were recorded, or were not chosen
        self._elsewhere = ""

    @property
    def active(self) -> bool:
        """Whether the current thread or task is inside this watcher's ``with`` block."""
        return self in active_watchers.get()

    def started(self) -> None:
        """Note that a module of a library runs."""
        self.watched._started = True

    def wants(self, module: nn.Module, *tensors: Tensor) -> bool:
        """Whether a call of a layer, which computes with these tensors, is to be recorded.

        A call whose tensors cannot be kept is noted in ``unseen``.
        """
        name = self.names[module]
        if self._layers is not None and not any(fnmatchcase(name, each) for each in self._layers):
            self._done.add(name)
            return False
        reason = _why_not_kept(tensors)
        if reason is not None:
            self.missed(name, reason)
        return reason is None

    def record(self, module: nn.Module, seen: Seen) -> None:
        name = self.names[module]
        self._done.add(name)
        if self._heads is not None:
            count = seen.extent[1]
            if max(self._heads) >= count:
                raise InputError(
                    f"heads names head {max(self._heads)}, but {name} has heads 0 to {count - 1}."
                )
            seen = seen.select_heads(self._heads)
        if self.each is None:
            self.watched._add(name, seen, self._join)
        else:
            self.watched._passed_on += 1
            self.each(name, seen)

    def ran(self, name: str, reason: str) -> None:
        """Note that a module ran which seems to compute attention, recorded or not."""
        self._ran.setdefault(name, reason)

    def missed(self, name: str, reason: str) -> None:
        """Note a call that cannot be recorded."""
        self.watched.unseen.setdefault(name, reason)

    def ran_elsewhere(self, where: str) -> None:
        """Note that the model ran where it is not watched."""
        self._elsewhere = where

    def finish(self) -> None:
        """Warn about what ran and was not recorded."""
        watched = self.watched
        for name, reason in self._ran.items():
            if not any(done == name or done.startswith(f"{name}.") for done in self._done):
                self.missed(name, reason)
        model = type(self.model).__name__
        if self._elsewhere:
            warnings.warn(
                f"{model} was not watched where {self._elsewhere}: only calls of the model itself, "
                "in the thread or task that entered watch(), are recorded.",
                stacklevel=4,
            )
        elif watched._started and not self._done and not watched.unseen:
            warnings.warn(
                f"{model} ran, but computed no attention that watch knows: it called no "
                "scaled_dot_product_attention, and no softmax in a module that is named after "
                "attention.",
                stacklevel=4,
            )
        if watched.unseen:
            warnings.warn(_unseen_warning(watched.unseen, model), stacklevel=4)


def _unseen_warning(unseen: Mapping[str, str], model: str) -> str:
    name, *others = unseen
    reason = f"it {unseen[name]}."
    if not others:
        whole = name if name == model else f"{name} of {model}"
        return f"{whole} ran, but could not be recorded: {reason}"
    if set(unseen.values()) == {unseen[name]}:
        reason = f"each {unseen[name]}."
    else:
        reason = f"{name} {unseen[name]}. watched.unseen has the reason for each."
    shown = [name, *others][:3]
    more = f" and {len(unseen) - 3} more" if len(unseen) > 3 else ""
    return f"{', '.join(shown)}{more} of {model} ran, but could not be recorded: {reason}"


def _why_not_kept(tensors: Sequence[Tensor]) -> str | None:
    """Why the fields of a call with these tensors cannot be kept, or None."""
    if tensors and (torch.compiler.is_compiling() or torch._C._is_tracing()):
        return "was exported or traced, not run"
    for tensor in tensors:
        if tensor.is_nested:
            return "computes attention with nested tensors"
        if tensor.layout is not torch.strided:
            return f"computes attention with tensors of the layout {tensor.layout}"
        if not has_values(tensor):
            return (
                "computes attention with tensors that have no values, on meta or of FakeTensorMode"
            )
    if tensors and not transforms_keep_tensors():
        return "ran under torch.func.vmap or functionalize, whose tensors are gone afterwards"
    return None


def computed_again() -> bool:
    """Whether a gradient checkpoint computes layers again, in a backward pass of this thread.

    PyTorch's own FSDP asks in this way, too.
    """
    return torch._C._current_graph_task_id() != -1


def computed_later() -> bool:
    """Whether a gradient checkpoint will compute what runs now again, and compares both runs.

    What the first run saves for the backward pass, the second one must save, too. So fields must be
    computed without gradients, and operations must not be replaced by others.
    """
    # Not promised: no public function tells whether torch.autograd.graph.saved_tensors_hooks, with
    # which such a checkpoint works, are active.
    return torch.is_grad_enabled() and bool(
        torch._C._autograd._top_saved_tensors_default_hooks(False)
    )


active_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("regard_watchers", default=())
# Whether regard itself computes now: no watcher records the operations of that.
unwatched: ContextVar[bool] = ContextVar("regard_unwatched", default=False)


@contextmanager
def computing() -> Iterator[None]:
    """Let regard compute something that no watcher records. Compiled graphs are never watched."""
    if torch.compiler.is_compiling() or not active_watchers.get():
        yield
        return
    token = unwatched.set(True)
    try:
        yield
    finally:
        unwatched.reset(token)
