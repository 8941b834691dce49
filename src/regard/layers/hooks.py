"""HeadHooks: functions that observe or edit each head's output before the output projection."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from regard.errors import InputError
from regard.mechanism.seeing import See, Seen

Edit = Callable[[Tensor], Tensor]
Observer = Callable[[Tensor, Seen | None], None]
Request = Callable[[], See | None]


class HeadHooks:
    """Edits and observers that run between attention and its output projection.

    First every edit, in order of registration, gets the heads' outputs [batch, heads, queries,
    head dim] and returns their replacement. Then every observer gets the edited outputs and the
    attention's :class:`Seen`. In a decoding step the queries are the beams of a sentence.

    >>> import torch
    >>> from regard import MultiHeadAttention
    >>> layer, shapes = MultiHeadAttention(dim=8, heads=2), []
    >>> handle = layer.head_hooks.observe(lambda heads, seen: shapes.append(list(heads.shape)))
    >>> _ = layer(torch.zeros(1, 5, 8))
    >>> handle.remove()
    >>> shapes
    [[1, 2, 5, 4]]
    """

    def __init__(self) -> None:
        self._edits: OrderedDict[int, Edit] = OrderedDict()
        self._observations: OrderedDict[int, tuple[Observer, Request]] = OrderedDict()

    def edit(self, edit: Edit) -> RemovableHandle:
        """Change the heads' outputs: ``edit(heads)`` returns a tensor of the same shape."""
        handle = RemovableHandle(self._edits)
        self._edits[handle.id] = edit
        return handle

    def observe(self, observer: Observer, see: Request | See | None = None) -> RemovableHandle:
        """Call ``observer(heads, seen)`` at every call of the layer.

        ``see`` requests statistics for the observers: a :class:`See`, or a function that returns a
        See or None before each call. ``seen`` is None if nothing was requested, or if the layer was
        called with its own ``see=``.
        """
        ask = see if callable(see) else lambda: see
        handle = RemovableHandle(self._observations)
        self._observations[handle.id] = observer, ask
        return handle

    @property
    def active(self) -> bool:
        """Whether anything is registered; compiled code notices when this changes."""
        return len(self._edits) + len(self._observations) > 0

    def see(self) -> See | None:
        """The statistics that the observers request."""
        requests = [ask() for _, ask in self._observations.values()]
        given = {id(see): see for see in requests if see is not None}
        if len(given) > 1:
            raise InputError(
                f"Observers of one layer must share one See, but got {list(given.values())}."
            )
        return next(iter(given.values()), None)

    def __call__(self, heads: Tensor, seen: Seen | None = None) -> Tensor:
        """Pass the heads' outputs [batch, heads, queries, head dim] through edits and observers."""
        for edit in tuple(self._edits.values()):
            edited = edit(heads)
            if edited.shape != heads.shape:
                raise InputError(
                    f"An edit must keep the shape of the heads' outputs, {list(heads.shape)}, but "
                    f"returned {list(edited.shape)}."
                )
            heads = edited
        for observer, _ in tuple(self._observations.values()):
            observer(heads, seen)
        return heads
