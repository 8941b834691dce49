"""The decoding state between steps: cached keys and values, or Transformer-XL's memories.

``DecodingState`` in ``batching.py`` documents the methods that both classes share.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from regard.errors import InputError
from regard.layers.cache import CrossCache, KeyValueCache, Memory
from regard.mechanism.masks import Padding


class State:
    """The caches of a decoder's layers, and the encoder's output that the decoder attends to.

    There is one row per sentence. The beams of a sentence form a tree: each step adds one node per
    beam. One cache holds the keys and values of all nodes, and a beam attends only to its own
    ancestors. When a beam continues another beam, it copies that beam's row of biases. Keys are
    never moved.

    All rows end at the same node. Rows with a shorter prompt or a later start are padded on the
    left by ``pads`` positions. A new sentence can therefore replace a finished sentence without
    changing other rows.
    """

    def __init__(
        self,
        depth: int,
        room: int = 0,
        *,
        pads: Tensor | None = None,
        context: Tensor | None = None,
        context_padding: Padding | None = None,
    ) -> None:
        self.own = [KeyValueCache(room) for _ in range(depth)]
        self.cross = [CrossCache() for _ in range(depth)]
        self.pads = pads  # [sentences]
        self.context = context  # [sentences, length, dim]
        self.context_padding = context_padding
        self.context_bias: Tensor | None = None  # [sentences, 1, 1, length], set by the first step
        self.beams = 1
        self.steppers: list[Callable[..., Tensor]] | None = None  # one for each block
        self._room = room
        self._trunk: int | None = None  # positions that all beams share; None before the first step
        # [sentences, beams, room]: 0 for ancestors of a beam, -inf for other nodes
        self._bias: Tensor | None = None
        self._unused = 0  # positions that are padding in every sentence

    @property
    def nodes(self) -> int:
        """The number of keys that each layer keeps for a sentence."""
        return len(self.own[0])

    def __len__(self) -> int:
        """The number of positions already read."""
        trunk = self.nodes if self._trunk is None else self._trunk
        return trunk + (self.nodes - trunk) // self.beams

    @property
    def longest(self) -> int:
        """The length of the longest unfinished sentence."""
        return len(self) - self._unused

    @property
    def _unborn(self) -> float:
        """The initial bias of future nodes: -inf if they belong to one of several beams."""
        return -math.inf if self.beams > 1 else 0.0

    def padding(self, keys: int) -> Padding | None:
        """Return the padding of the first ``keys`` positions."""
        return None if self.pads is None else Padding(keys - self.pads, side="left")

    def spread(self, beams: int) -> None:
        if self._trunk is not None:
            raise InputError("Call spread() before the first decoding step.")
        self.beams = beams

    def bias(self, like: Tensor) -> Tensor | None:
        """Return the bias of the next step's scores: 0, or -inf for hidden nodes.

        The shape is [sentences, 1, beams, nodes], in the dtype of ``like``. The result is None if
        no node is hidden.
        """
        if self._trunk is None:
            self._begin(like)
        if self._bias is None:
            return None
        start, stop = self.nodes, self.nodes + self.beams
        if stop > self._bias.shape[-1]:
            wider = torch.full_like(self._bias, self._unborn)
            self._bias = torch.cat((self._bias, wider), dim=-1)
        if self.beams > 1:  # a new node is visible to its own beam
            self._bias[:, :, start:stop].diagonal(dim1=1, dim2=2).zero_()
        return self._bias[:, None, :, :stop]

    def _begin(self, like: Tensor) -> None:
        """Create the biases that hide padding and other beams."""
        self._trunk = trunk = self.nodes
        if self.context_padding is not None and self.context is not None:
            self.context_bias = _beyond(self._lengths, self.context.shape[1], like)
        if self.beams > 1 or self.pads is not None:
            room = max(self._room, trunk + self.beams)
            self._bias = like.new_full((like.shape[0], self.beams, room), self._unborn)
            self._bias[:, :, :trunk] = 0
            if self.pads is not None:
                padding = torch.arange(trunk, device=like.device) < self.pads[:, None]
                self._bias[:, :, :trunk].masked_fill_(padding[:, None], -math.inf)

    def places(self, device: torch.device) -> Tensor:
        """Return the position of each node, including the nodes of the next step: [nodes]."""
        assert self._trunk is not None
        trunk = torch.arange(self._trunk, device=device)
        steps = torch.arange(self._trunk, len(self) + 1, device=device)
        return torch.cat((trunk, steps.repeat_interleave(self.beams)))

    def follow(self, origins: Tensor) -> None:
        if self._bias is not None:
            index = origins[..., None].expand(-1, -1, self._bias.shape[-1])
            self._bias = self._bias.gather(1, index)

    def keep(self, sentences: Tensor) -> None:
        for own, cross in zip(self.own, self.cross, strict=True):
            own.reorder(sentences)
            cross.reorder(sentences)
        for name in ("pads", "context", "context_bias", "_bias"):
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, held.index_select(0, sentences))
        if self.context_padding is not None:
            lengths = self._lengths.index_select(0, sentences)
            self.context_padding = Padding(lengths, self.context_padding.side)
        self._tidy()

    # ------------------------------------------------------------------------------ refilling

    def rest(self, sentences: Tensor) -> None:
        """The sentences count as empty, so that they never reach the model's last position."""
        if self.pads is not None:
            self.pads = self.pads.index_fill(0, sentences, len(self))
            self._unused = int(self.pads.min())

    def place(self, sentences: Tensor, others: State, which: Tensor) -> None:
        """The new rows end at the current node, and earlier nodes of these rows are hidden."""
        (mine, pads), (theirs, their_pads) = self._padded(), others._padded()
        if others.nodes > self.nodes:
            mine, pads = self._shift((self.nodes - others.nodes) // self.beams)
        for own, new in zip(self.own, others.own, strict=True):
            own.place(sentences, new, which)
        positions = len(others) - their_pads.index_select(0, which)
        self.pads = pads.index_copy(0, sentences, len(self) - positions)
        rows = mine.new_full((len(sentences), *mine.shape[1:]), self._unborn)
        rows[:, :, : self.nodes] = -math.inf
        seen = theirs.index_select(0, which)[:, :, : others.nodes]
        rows[:, :, self.nodes - others.nodes : self.nodes] = seen
        self._bias = mine.index_copy(0, sentences, rows)
        if self.context is not None:
            self._place_context(sentences, others, which)
        self._tidy()

    def _place_context(self, sentences: Tensor, others: State, which: Tensor) -> None:
        """Replace the context of ``sentences`` by the context in ``others`` at ``which``."""
        assert self.context is not None
        assert others.context is not None
        lengths = self._lengths.index_copy(0, sentences, others._lengths.index_select(0, which))
        width, needed = self.context.shape[1], int(lengths.max())
        if width < needed or 4 * needed <= 3 * width:  # grow, or shrink by a quarter or more
            width = needed
        self.context = _sized(self.context, 1, width).index_copy(
            0, sentences, _sized(others.context.index_select(0, which), 1, width)
        )
        for cross, new in zip(self.cross, others.cross, strict=True):
            assert cross.kept is not None
            assert new.kept is not None
            keys, values = (
                _sized(old, 2, width).index_copy_(
                    0, sentences, _sized(its.index_select(0, which), 2, width)
                )
                for old, its in zip(cross.kept, new.kept, strict=True)
            )
            cross.kept = keys, values
        self.context_padding = Padding(lengths)
        self.context_bias = _beyond(lengths, width, self.context)

    @property
    def _lengths(self) -> Tensor:
        """The length of each sentence's context: [sentences]."""
        assert self.context is not None
        if self.context_padding is None:
            sentences, width = self.context.shape[:2]
            return torch.full((sentences,), width, device=self.context.device)
        return torch.as_tensor(self.context_padding.lengths, device=self.context.device)

    def _padded(self) -> tuple[Tensor, Tensor]:
        """Return the bias and the padding, and create them if missing."""
        like = self.own[0].kept[0]
        if self.pads is None:
            self.pads = torch.zeros(len(like), dtype=torch.long, device=like.device)
        if self._trunk is None:
            self._begin(like)
        if self._bias is None:
            self._bias = like.new_zeros(len(like), self.beams, max(self._room, self.nodes))
        return self._bias, self.pads

    def _tidy(self) -> None:
        """Drop the leading nodes that all rows hide, if they are at least a quarter of all."""
        self._unused = 0 if self.pads is None else int(self.pads.min())
        if self._bias is None:
            return
        seen = self._bias[:, :, : self.nodes].amax(dim=(0, 1)) == 0
        unseen = int(seen.int().argmax())
        if 4 * unseen >= self.nodes:
            self._shift(unseen // self.beams)

    def _shift(self, steps: int) -> tuple[Tensor, Tensor]:
        """Drop the nodes of the first ``steps``. If negative, insert that many hidden steps."""
        (bias, pads), by = self._padded(), steps * self.beams
        for own in self.own:
            own.shift(by)
        self.pads = pads - steps
        self._unused -= steps
        more = bias.new_full((*bias.shape[:2], abs(by)), self._unborn if by > 0 else -math.inf)
        parts = (bias[:, :, by:], more) if by > 0 else (more, bias)
        self._bias = torch.cat(parts, dim=-1)
        return self._bias, self.pads


def _beyond(lengths: Tensor, width: int, like: Tensor) -> Tensor:
    """Return 0 for the first ``lengths`` positions of each row, then -inf: [rows, 1, 1, width]."""
    beyond = torch.arange(width, device=like.device) >= lengths[:, None]
    return like.new_zeros(beyond.shape).masked_fill(beyond, -math.inf)[:, None, None]


def _sized(tensor: Tensor, dim: int, width: int) -> Tensor:
    """Truncate ``tensor``, or pad it with zeros, to ``width`` along ``dim``."""
    more = width - tensor.shape[dim]
    if more <= 0:
        return tensor.narrow(dim, 0, width).contiguous()
    filler = tensor.new_zeros(*tensor.shape[:dim], more, *tensor.shape[dim + 1 :])
    return torch.cat((tensor, filler), dim=dim)


class Memories:
    """The memories of a Transformer-XL's layers, and the padding before the first segment."""

    def __init__(self, depth: int, length: int, pads: Tensor | None = None) -> None:
        self.layers = [Memory(length) for _ in range(depth)]
        self.read = 0  # the number of positions already read
        self.pads = pads  # [batch]
        self.beams = 1  # the number of rows per sentence

    def __len__(self) -> int:
        """The number of positions in memory."""
        return len(self.layers[0])

    def reorder(self, index: Tensor) -> None:
        """Let row ``i`` of the batch continue row ``index[i]``."""
        for memory in self.layers:
            memory.reorder(index)
        if self.pads is not None:
            self.pads = self.pads.index_select(0, index)

    def spread(self, beams: int) -> None:
        self.beams = beams
        kept = self.layers[0].kept
        if kept is not None:
            self.reorder(torch.arange(len(kept), device=kept.device).repeat_interleave(beams))

    def follow(self, origins: Tensor) -> None:
        first = torch.arange(len(origins), device=origins.device)[:, None] * self.beams
        self.reorder((first + origins).flatten())

    def keep(self, sentences: Tensor) -> None:
        self.reorder(self._rows(sentences))

    def rest(self, sentences: Tensor) -> None:
        """Do nothing: memories of finished sentences need no change."""

    def place(self, sentences: Tensor, others: Memories, which: Tensor) -> None:
        rows, theirs = self._rows(sentences), self._rows(which)
        for memory, new in zip(self.layers, others.layers, strict=True):
            memory.place(rows, new, theirs)
        kept = self.layers[0].kept
        if self.pads is None and kept is not None:
            self.pads = torch.zeros(len(kept), dtype=torch.long, device=kept.device)
        positions = torch.full_like(rows, others.read)
        if others.pads is not None:
            positions = positions - others.pads.index_select(0, theirs)
        if self.pads is not None:
            self.pads = self.pads.index_copy(0, rows, self.read - positions)

    def _rows(self, sentences: Tensor) -> Tensor:
        """Return the rows of all beams of these sentences."""
        beams = torch.arange(self.beams, device=sentences.device)
        return (sentences[:, None] * self.beams + beams).flatten()
