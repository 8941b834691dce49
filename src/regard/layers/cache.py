"""What attention keeps between steps: keys and values, and Transformer-XL's memory.

Caches are for inference: they write in place, so nothing that needs a gradient may enter them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import InputError


class KeyValueCache:
    """The keys and values of one layer so far, in memory taken ahead.

    Appending writes the new ones behind the old and returns views of all of them: the past is not
    copied. ``room`` is how many positions to take memory for; where it runs out, it doubles. The
    views are good until the next call.

    >>> cache = KeyValueCache(room=8)
    >>> step = torch.ones(1, 2, 1, 4)  # [batch, heads, length, dim]
    >>> keys, values = cache.append(step, step)
    >>> keys, values = cache.append(step, step)
    >>> list(keys.shape), len(cache)
    ([1, 2, 2, 4], 2)
    """

    def __init__(self, room: int = 0) -> None:
        if room < 0:
            raise InputError(f"Cache(room=...) counts positions from 0 on, but got {room}.")
        self._room, self._length = room, 0
        self._keys: Tensor | None = None  # [batch, heads, room, dim]
        self._values: Tensor | None = None

    def __len__(self) -> int:
        """How many positions are kept."""
        return self._length

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """All keys and values kept so far; there must be some."""
        if self._keys is None or self._values is None:
            raise InputError("This cache is empty.")
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keep ``key`` and ``value``, [batch, heads, n, dim]; returns views of all kept so far."""
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            raise InputError(
                "A cache writes in place and gives no gradients. Decode under torch.no_grad(), or "
                "pass the whole sequence at once without a cache."
            )
        start, new = self._length, key.shape[2]
        stop = start + new
        self._keys = keys = self._reserve(self._keys, key, stop)
        self._values = values = self._reserve(self._values, value, stop)
        keys.narrow(2, start, new).copy_(key)
        values.narrow(2, start, new).copy_(value)
        self._length = stop
        return keys.narrow(2, 0, stop), values.narrow(2, 0, stop)

    def reorder(self, index: Tensor) -> None:
        """Let sequence ``i`` go on from where sequence ``index[i]`` stands, as beams do."""
        if self._keys is None or self._values is None:
            return
        self._keys, self._values = (
            self._moved(self._keys, index),
            self._moved(self._values, index),
        )

    def place(self, index: Tensor, other: KeyValueCache, which: Tensor) -> None:
        """Give the places of the sequences ``index`` to those at ``which`` of ``other``.

        They end where all others do; what is before them is left as it is, and is not theirs.
        """
        mine, theirs = self.kept, other.kept
        for kept, new in zip(mine, theirs, strict=True):
            start = len(self) - len(other)
            kept[:, :, start:].index_copy_(0, index, new.index_select(0, which))

    def shift(self, by: int) -> None:
        """Forget the first ``by`` positions; below 0, put as many of zeros before them."""
        keys, values = self.kept
        self._length -= by
        self._keys, self._values = self._shifted(keys, by), self._shifted(values, by)

    def _shifted(self, kept: Tensor, by: int) -> Tensor:
        batch, heads, _, dim = kept.shape
        self._room = max(self._room, self._length)
        moved = kept.new_empty(batch, heads, self._room, dim)
        gap = max(-by, 0)
        moved[:, :, :gap] = 0
        moved[:, :, gap : self._length] = kept[:, :, max(by, 0) :]
        return moved

    def _moved(self, kept: Tensor, index: Tensor) -> Tensor:
        """What ``kept`` has at ``index``, in memory of its own; only what is filled is copied."""
        moved = kept.new_empty(len(index), *kept.shape[1:])
        filled = slice(self._length)
        torch.index_select(kept[:, :, filled], 0, index, out=moved[:, :, filled])
        return moved

    def _reserve(self, kept: Tensor | None, new: Tensor, length: int) -> Tensor:
        """Memory for ``length`` positions like those of ``new``, with what was kept before."""
        batch, heads, _, dim = new.shape
        if kept is None:
            self._room = max(self._room, length)
            return new.new_empty(batch, heads, self._room, dim)
        expected = (*kept.shape[:2], kept.shape[3])
        if (batch, heads, dim) != expected or (new.dtype, new.device) != (kept.dtype, kept.device):
            raise InputError(
                f"The cache holds batch, heads and dim {list(expected)} in {kept.dtype} on "
                f"{kept.device}, but was given {[batch, heads, dim]} in {new.dtype} on "
                f"{new.device}. Use one cache per layer and per batch."
            )
        if length <= kept.shape[2]:
            return kept
        self._room = max(length, 2 * kept.shape[2])
        wider = kept.new_empty(batch, heads, self._room, dim)
        wider[:, :, : self._length] = kept[:, :, : self._length]
        return wider


class FixedCache(KeyValueCache):
    """A cache whose memory never moves, and that is read whole, so that its steps can be replayed.

    Where the next key goes is a number in a tensor that all layers share; what lies behind it is to
    be hidden by a bias.
    """

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values, self.at = keys, values, at  # [batch, heads, room, dim], [1]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``key`` and ``value``, [batch, heads, 1, dim]; returns the whole memory."""
        self.keys.index_copy_(2, self.at, key)
        self.values.index_copy_(2, self.at, value)
        return self.keys, self.values


class CrossCache:
    """The keys and values of what a decoder attends across to: projected once, used every step."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None  # keys and values, [batch, heads, n, dim]

    def reorder(self, index: Tensor) -> None:
        """Let sequence ``i`` attend to what sequence ``index[i]`` attended to."""
        if self.kept is not None:
            keys, values = self.kept
            self.kept = keys.index_select(0, index), values.index_select(0, index)


class Memory:
    """The last hidden states a layer read, for the next segment (https://arxiv.org/abs/1901.02860).

    Gradients stop here: what is remembered is attended to, but not trained through.

    >>> memory = Memory(length=3)
    >>> list(memory.extend(torch.zeros(1, 2, 4)).shape)
    [1, 2, 4]
    >>> list(memory.extend(torch.zeros(1, 2, 4)).shape)
    [1, 4, 4]
    >>> len(memory)
    3
    """

    def __init__(self, length: int) -> None:
        if length < 0:
            raise InputError(f"Memory(length=...) counts positions from 0 on, but got {length}.")
        self.length = length
        self._kept: Tensor | None = None  # [batch, kept, dim]

    def __len__(self) -> int:
        """How many positions are remembered."""
        return 0 if self._kept is None else self._kept.shape[1]

    @property
    def kept(self) -> Tensor | None:
        """What is remembered, [batch, kept, dim]."""
        return self._kept

    def extend(self, hidden: Tensor) -> Tensor:
        """What is remembered, then ``hidden`` [batch, n, dim]; the last ``length`` are kept."""
        whole = hidden if self._kept is None else torch.cat((self._kept, hidden), dim=1)
        first = max(whole.shape[1] - self.length, 0)
        self._kept = whole[:, first:].detach()
        return whole

    def place(self, index: Tensor, other: Memory, which: Tensor) -> None:
        """Give the places of the sequences ``index`` to those at ``which`` of ``other``.

        All end together.
        """
        if self._kept is None or other._kept is None:
            return
        width = max(len(self), len(other))
        mine, theirs = (
            torch.nn.functional.pad(kept, (0, 0, width - kept.shape[1], 0))
            for kept in (self._kept, other._kept.index_select(0, which))
        )
        self._kept = mine.index_copy(0, index, theirs)

    def reorder(self, index: Tensor) -> None:
        """Let sequence ``i`` remember what sequence ``index[i]`` remembered."""
        if self._kept is not None:
            self._kept = self._kept.index_select(0, index)
