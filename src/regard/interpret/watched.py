"""The record of one watch: the calls of each layer and what was seen."""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import replace

from torch import nn

from regard.mechanism.seeing import See, Seen


class Watched(Mapping[str, Seen | list[Seen]]):
    """What was seen, by the name of the layer: a ``Seen``, or a list where it was called again.

    Names are those of ``model.named_modules()``, in the order of their first calls.

    >>> from regard import GPT2, GPT2Config, See, watch
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=2, heads=2)).eval()
    >>> with watch(model, See(entropy=True)) as watched:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> {name: list(seen.entropy.shape) for name, seen in watched.items()}
    {'stack.blocks.0.attention': [1, 2, 3], 'stack.blocks.1.attention': [1, 2, 3]}
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, Seen]] = []
        self._handed = 0  # calls that went to whoever wants each at once

    @property
    def calls(self) -> list[tuple[str, Seen]]:
        """Every call, in order: the name of the layer and what was seen."""
        return list(self._calls)

    def of(self, name: str) -> list[Seen]:
        """Every call of one layer, in order, as a list even where there was one."""
        found = [seen for called, seen in self._calls if called == name]
        if not found:
            known = ", ".join(self) or "none so far"
            raise KeyError(f"No call of a layer {name!r} was seen. Layers seen: {known}.")
        return found

    def __getitem__(self, name: str) -> Seen | list[Seen]:
        found = self.of(name)
        return found if len(found) > 1 else found[0]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _ in self._calls))

    def __len__(self) -> int:
        return len({name for name, _ in self._calls})

    @property
    def _counts(self) -> str:
        layers, calls = len(self), len(self._calls)
        return f"{layers} layer{'s' * (layers != 1)}, {calls} call{'s' * (calls != 1)}"

    def _summary(self) -> Iterator[tuple[str, str, str]]:
        """One line per layer: its name, how often it was called, the extent of the last call."""
        for name in self:
            found = self.of(name)
            batch, heads, queries, keys = found[-1].extent
            yield (
                name,
                "1 call" if len(found) == 1 else f"{len(found)} calls, the last:",
                f"{batch} x {heads} heads, {queries} queries, {keys} keys",
            )

    def __repr__(self) -> str:
        head = f"Watched: {self._counts}"
        lines = list(self._summary())
        if not lines and self._handed:
            return f"Watched: {self._handed} calls, each handed on when it was seen"
        if not lines:
            return f"{head} (the model has not run)"
        wide, middle = (max(len(line[column]) for line in lines) for column in (0, 1))
        fields = ", ".join(self._calls[0][1].to_dict())
        return "\n".join(
            [f"{head} of {fields}"]
            + [f"  {name:<{wide}}  {times:<{middle}}  {size}" for name, times, size in lines]
        )

    def _repr_html_(self) -> str:
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
            for line in self._summary()
        )
        return (
            f"<table><caption>Watched: {self._counts}</caption>"
            "<thead><tr><th>layer</th><th>calls</th><th>extent</th></tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )


class Watcher:
    """One ``with watch(...)``: whom it watches, what it looks at, and what it found."""

    def __init__(
        self, model: nn.Module, see: See, each: Callable[[str, Seen], None] | None
    ) -> None:
        self.names = {
            module: name or type(module).__name__ for name, module in model.named_modules()
        }
        self.see = replace(see)  # known by its identity: a copy that nobody else can pass
        self.each = each
        self.watched = Watched()

    @property
    def active(self) -> bool:
        return self in active_watchers.get()

    def record(self, module: nn.Module, seen: Seen) -> None:
        if self.each is None:
            self.watched._calls.append((self.names[module], seen))
        else:
            self.watched._handed += 1
            self.each(self.names[module], seen)


active_watchers: ContextVar[tuple[Watcher, ...]] = ContextVar("regard_watchers", default=())
