"""Batches of the rows of a table; their order depends only on the seed and the epoch number.

A plan splits an epoch into batches of row numbers. Rows are gathered on the table's device.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from regard.errors import InputError


class Batch(NamedTuple):
    """A slice of an epoch's rows, and the longest length in each column."""

    start: int
    stop: int
    longest: tuple[int, ...]
    even: bool  # whether all rows are equally long in the first column
    first: bool = True  # whether a model's memory is emptied before this batch


class Epoch(NamedTuple):
    """The rows of an epoch in order, and the batches as slices of them."""

    rows: Tensor  # int64 [rows]
    batches: list[Batch]


class Plan(Protocol):
    """The order of the rows of each epoch."""

    def epoch(self, seed: int, number: int) -> Epoch:
        """The epoch with this number; equal arguments give equal epochs."""


def generator(*numbers: int, device: torch.device | str = "cpu") -> torch.Generator:
    """A random number generator seeded by a tuple of numbers, such as (seed, epoch)."""
    digest = hashlib.sha256(json.dumps(numbers).encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:7], "little"))


class ByLength:
    """Batches of rows of similar length, with at most ``tokens`` tokens, padding included.

    Rows are sorted by length and split into batches once. Each epoch shuffles the rows of equal
    length and the order of the batches.

    >>> plan = ByLength(torch.tensor([[3], [1], [3], [2]]), tokens=6)
    >>> [batch.longest for batch in plan.epoch(seed=0, number=0).batches]
    [(2,), (3,)]
    """

    def __init__(self, lengths: Tensor, tokens: int) -> None:
        # Rows of equal rank have equal lengths. The first column is the first sort key.
        _, self.rank = torch.unique(lengths, dim=0, return_inverse=True)
        rows = lengths[self.rank.argsort(stable=True)].tolist()
        longest_row = max((sum(row) for row in rows), default=0)
        if longest_row > tokens:
            raise InputError(
                f"The longest example has {longest_row} tokens, but a batch has room for {tokens}. "
                "Raise batch.tokens or lower data.length."
            )
        self.batches: list[Batch] = []
        start, longest = 0, [0] * lengths.shape[1]
        for at, row in enumerate(rows):
            grown = [max(pair) for pair in zip(longest, row, strict=True)]
            full = (at + 1 - start) * sum(grown) > tokens
            # A batch that is at least half full ends before a row that is longer in the first
            # column: rows of equal length there need no padding and no attention mask.
            grows = row[0] > longest[0] and 2 * (at - start) * sum(longest) >= tokens
            if at > start and (full or grows):
                self.batches.append(Batch(start, at, tuple(longest), rows[start][0] == longest[0]))
                start, grown = at, row
            longest = grown
        if rows:
            even = rows[start][0] == longest[0]
            self.batches.append(Batch(start, len(rows), tuple(longest), even))

    def epoch(self, seed: int, number: int) -> Epoch:
        random = generator(seed, number)
        order = torch.randperm(len(self.rank), generator=random)
        order = order[self.rank[order].argsort(stable=True)]
        shuffled = torch.randperm(len(self.batches), generator=random).tolist()
        return Epoch(order, [self.batches[index] for index in shuffled])


class Alternating:
    """Several plans, one per epoch in turn; row r of plan i is row r + i * ``rows``."""

    def __init__(self, plans: Sequence[Plan], rows: int) -> None:
        self.plans, self.rows = plans, rows

    def epoch(self, seed: int, number: int) -> Epoch:
        which = number % len(self.plans)
        rows, batches = self.plans[which].epoch(seed, number)
        return Epoch(rows + which * self.rows, batches)


class Windows:
    """Pieces of one long text, ``length`` tokens each.

    Each piece begins with the last ``context`` tokens of the previous piece in the text. If
    ``shuffled``, each epoch begins at a random token, orders the pieces at random, and leaves out
    the pieces that do not fill a batch; their tokens are in other epochs.
    """

    def __init__(
        self, total: int, length: int, rows: int, shuffled: bool = True, context: int = 0
    ) -> None:
        if total < length:
            raise InputError(
                f"The text has {total + 1} tokens, but one piece needs {length + 1}. Give more "
                "text, or lower data.length."
            )
        self.total, self.length, self.rows, self.shuffled = total, length, rows, shuffled
        self.stride = length - context

    def epoch(self, seed: int, number: int) -> Epoch:
        random = generator(seed, number)
        room = min(self.stride, self.total - self.length + 1)
        first = int(torch.randint(room, (), generator=random)) if self.shuffled else 0
        starts = torch.arange(first, self.total - self.length + 1, self.stride)
        if self.shuffled:
            starts = starts[torch.randperm(len(starts), generator=random)]
            # A batch of another size would need its own compiled kernels and CUDA graph.
            starts = starts[: len(starts) // self.rows * self.rows or len(starts)]
        return Epoch(starts, _even(len(starts), self.rows, self.length))


class Lanes:
    """One long text split into ``rows`` lanes; a model with memory reads each lane in order.

    The memory is emptied after every ``reset_every`` pieces, or after each epoch if that is 0. Each
    epoch shifts the pieces by a random number of tokens.
    """

    def __init__(self, total: int, length: int, rows: int, reset_every: int = 0) -> None:
        self.rows, self.length, self.reset_every = rows, length, reset_every
        self.lane = total // rows
        self.count = self.lane // length  # the number of pieces in a lane
        # Reserve tokens for the random shift, which may cost one piece. A lane of two pieces keeps
        # both: with a single piece, the memory is never used.
        if self.count > 2:
            self.count = (self.lane - length + 1) // length
        self.max_shift = self.lane - self.count * length
        if not self.count:
            raise InputError(
                f"The text has {total + 1} tokens, but {rows} rows of {length} need "
                f"{rows * length + 1}. Give more text, or lower batch.tokens or data.length."
            )

    def epoch(self, seed: int, number: int) -> Epoch:
        shift = torch.randint(self.max_shift + 1, (), generator=generator(seed, number))
        lanes = torch.arange(self.rows) * self.lane + shift
        starts = (torch.arange(self.count)[:, None] * self.length + lanes).flatten()
        batches = _even(len(starts), self.rows, self.length)
        every = self.reset_every or len(batches)
        return Epoch(
            starts, [batch._replace(first=at % every == 0) for at, batch in enumerate(batches)]
        )


def _even(count: int, rows: int, length: int) -> list[Batch]:
    return [Batch(at, min(at + rows, count), (length,), True) for at in range(0, count, rows)]


class Rows(NamedTuple):
    """The rows of the next batch, on the device."""

    rows: Tensor  # int64 [batch]
    longest: tuple[int, ...]
    even: bool  # whether all rows are equally long in the first column
    first: bool  # whether a model's memory is emptied before this batch


class Feed:
    """An endless sequence of batches over all epochs; set ``cursor`` to continue at a position.

    >>> feed = Feed(ByLength(torch.tensor([[2], [2], [2]]), tokens=4), 0, torch.device("cpu"))
    >>> [len(feed.next().rows) for _ in range(3)], feed.cursor
    ([1, 2, 1], {'epoch': 1, 'batch': 1})
    """

    def __init__(self, plan: Plan, seed: int, device: torch.device) -> None:
        self.plan, self.seed, self.device = plan, seed, device
        self.tokens = 0  # the number of tokens in all batches so far, padding included
        self._open(0, 0)

    @property
    def cursor(self) -> dict[str, int]:
        """The position of the next batch."""
        return {"epoch": self.number, "batch": self.at}

    @cursor.setter
    def cursor(self, position: Mapping[str, int]) -> None:
        self._open(position["epoch"], position["batch"])

    def _open(self, number: int, at: int) -> None:
        epoch = self.plan.epoch(self.seed, number)
        self.number, self.at, self.batches = number, at, epoch.batches
        self.rows = epoch.rows.to(self.device)

    def next(self) -> Rows:
        if self.at >= len(self.batches):
            self._open(self.number + 1, 0)
        batch = self.batches[self.at]
        self.at += 1
        self.tokens += (batch.stop - batch.start) * sum(batch.longest)
        rows = self.rows[batch.start : batch.stop]
        return Rows(rows, batch.longest, batch.even, batch.first)
