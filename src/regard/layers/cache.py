"""Caches of keys and values between decoding steps, and the memory of Transformer-XL.

Caches are for inference: they write in place and refuse tensors that require a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from regard.errors import InputError
from regard.mechanism.geometry import check_tensor


class KeyValueCache:
    """The keys and values of one layer so far, in preallocated memory.

    ``append`` writes new keys and values after the old ones and returns views of all of them. The
    views are valid until the next call. ``room`` is the number of positions to allocate at first; a
    full cache moves to at least twice the memory.

    >>> cache = KeyValueCache(room=8)
    >>> step = torch.ones(1, 2, 1, 4)  # [batch, heads, length, dim]
    >>> keys, values = cache.append(step, step)
    >>> keys, values = cache.append(step, step)
    >>> list(keys.shape), len(cache)
    ([1, 2, 2, 4], 2)
    """

    def __init__(self, room: int = 0) -> None:
        if room < 0:
            raise InputError(f"KeyValueCache(room=...) must be 0 or more, but got {room}.")
        self._room, self._length = room, 0
        self._keys: Tensor | None = None  # [batch, heads, room, dim]
        self._values: Tensor | None = None

    def __len__(self) -> int:
        """The number of positions."""
        return self._length

    @property
    def kept(self) -> tuple[Tensor, Tensor]:
        """All keys and values so far; raises InputError if the cache is empty."""
        if self._keys is None or self._values is None:
            raise InputError("This cache is empty.")
        return self._keys[:, :, : self._length], self._values[:, :, : self._length]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Append ``key`` and ``value``, [batch, heads, n, dim]; return views of all so far."""
        check_tensor(key, "key")
        check_tensor(value, "value")
        if key.dim() != 4 or key.shape[:-1] != value.shape[:-1]:
            raise InputError(
                "A cache needs key and value as [batch, heads, n, dim], with equal batch, heads "
                f"and n, but got {list(key.shape)} and {list(value.shape)}. "
                "For one head pass key[:, None] and value[:, None]."
            )
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
        """Replace sequence ``i`` by sequence ``index[i]``, as in beam search."""
        if self._keys is not None and self._values is not None:
            self._keys, self._values = (
                self._reordered(kept, index) for kept in (self._keys, self._values)
            )

    def place(self, index: Tensor, other: KeyValueCache, which: Tensor) -> None:
        """Replace the sequences at ``index`` by the sequences of ``other`` at ``which``.

        All sequences end at the same position. Positions before the start of a new sequence keep
        their old content, and the caller must mask them.
        """
        mine, theirs = self.kept, other.kept
        for kept, new in zip(mine, theirs, strict=True):
            start = len(self) - len(other)
            kept[:, :, start:].index_copy_(0, index, new.index_select(0, which))

    def shift(self, by: int) -> None:
        """Drop the first ``by`` positions; a negative ``by`` inserts zeros before them."""
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

    def _reordered(self, kept: Tensor, index: Tensor) -> Tensor:
        """Copy the sequences ``index`` of ``kept`` into new memory, filled positions only."""
        reordered = kept.new_empty(len(index), *kept.shape[1:])
        filled = slice(self._length)
        torch.index_select(kept[:, :, filled], 0, index, out=reordered[:, :, filled])
        return reordered

    def _reserve(self, kept: Tensor | None, new: Tensor, length: int) -> Tensor:
        """Return memory for at least ``length`` positions, with the content of ``kept`` first."""
        batch, heads, _, dim = new.shape
        if kept is None:
            self._room = max(self._room, length)
            return new.new_empty(batch, heads, self._room, dim)
        expected = (*kept.shape[:2], kept.shape[3])
        if (batch, heads, dim) != expected or (new.dtype, new.device) != (kept.dtype, kept.device):
            raise InputError(
                f"The cache holds batch, heads and dim {list(expected)} in {kept.dtype} on "
                f"{kept.device}, but got {[batch, heads, dim]} in {new.dtype} on "
                f"{new.device}. Use one cache per layer and per batch."
            )
        if length <= kept.shape[2]:
            return kept
        self._room = max(length, 2 * kept.shape[2])
        return self._shifted(kept[:, :, : self._length], 0)


class FixedCache(KeyValueCache):
    """A cache in fixed memory, for decoding steps that a CUDA graph replays.

    All layers share the tensor ``at`` [1], the position of the next key. Attention reads the whole
    memory, so a bias must mask the positions after ``at``.
    """

    def __init__(self, keys: Tensor, values: Tensor, at: Tensor) -> None:
        super().__init__(keys.shape[2])
        self.keys, self.values, self.at = keys, values, at  # [batch, heads, room, dim], [1]

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Write ``key`` and ``value``, [batch, heads, 1, dim]; return the whole memory."""
        self.keys.index_copy_(2, self.at, key)
        self.values.index_copy_(2, self.at, value)
        return self.keys, self.values


class CrossCache:
    """The projected keys and values of a cross-attention context, which every step reuses."""

    def __init__(self) -> None:
        self.kept: tuple[Tensor, Tensor] | None = None  # keys and values, [batch, heads, n, dim]

    def reorder(self, index: Tensor) -> None:
        """Replace the context of sequence ``i`` by that of sequence ``index[i]``."""
        if self.kept is not None:
            keys, values = self.kept
            self.kept = keys.index_select(0, index), values.index_select(0, index)


class Memory:
    """The last hidden states of a layer, for the next segment (https://arxiv.org/abs/1901.02860).

    The next segment attends to these states, but no gradient flows into them.

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
            raise InputError(f"Memory(length=...) must be 0 or more, but got {length}.")
        self.length = length
        self.kept: Tensor | None = None  # the hidden states, [batch, kept, dim]

    def __len__(self) -> int:
        """The number of positions."""
        return 0 if self.kept is None else self.kept.shape[1]

    def extend(self, hidden: Tensor) -> Tensor:
        """Return the memory followed by ``hidden`` [batch, n, dim]; keep the last ``length``."""
        whole = hidden if self.kept is None else torch.cat((self.kept, hidden), dim=1)
        first = max(whole.shape[1] - self.length, 0)
        self.kept = whole[:, first:].detach()
        return whole

    def place(self, index: Tensor, other: Memory, which: Tensor) -> None:
        """Replace the sequences at ``index`` by the sequences of ``other`` at ``which``.

        All sequences end at the same position.
        """
        if self.kept is None or other.kept is None:
            return
        width = max(len(self), len(other))
        mine, theirs = (
            torch.nn.functional.pad(kept, (0, 0, width - kept.shape[1], 0))
            for kept in (self.kept, other.kept.index_select(0, which))
        )
        self.kept = mine.index_copy(0, index, theirs)

    def reorder(self, index: Tensor) -> None:
        """Replace the memory of sequence ``i`` by that of sequence ``index[i]``."""
        if self.kept is not None:
            self.kept = self.kept.index_select(0, index)
