"""Tables of token ids: columns of sequences of any length, cached on disk."""

from __future__ import annotations

import hashlib
import json
import warnings
from array import array
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints.folders import DamageWarning, map_published, publish, withdraw
from regard.errors import CheckpointError, InputError


@dataclass(frozen=True)
class Ragged:
    """Sequences of integers, stored one after another in a flat array.

    >>> ragged = Ragged.of([[5, 6, 7], [8]])
    >>> ragged.gather(torch.tensor([1, 0]), longest=3, pad=0).tolist()
    [[8, 0, 0], [5, 6, 7]]
    """

    flat: Tensor  # int32 [total]
    starts: Tensor  # int64 [rows + 1]: the start of each sequence, and the end of the last

    @classmethod
    def of(cls, sequences: Iterable[Sequence[int]]) -> Ragged:
        flat, starts = array("i"), array("q", [0])
        for sequence in sequences:
            flat.extend(sequence)
            starts.append(len(flat))
        whole = torch.frombuffer(flat, dtype=torch.int32) if flat else torch.empty(0).int()
        return cls(whole, torch.frombuffer(starts, dtype=torch.int64))

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> Tensor:
        return self.starts.diff()

    def lengths_of(self, rows: Tensor) -> Tensor:
        """``lengths[rows]``, without computing the lengths of other rows."""
        return self.starts[rows + 1] - self.starts[rows]

    def to(self, device: torch.device) -> Ragged:
        return Ragged(self.flat.to(device), self.starts.to(device))

    def gather(self, rows: Tensor, longest: int, pad: int) -> Tensor:
        """Some rows as [batch, longest], padded with ``pad``; does not synchronize with the GPU."""
        at = torch.arange(longest, device=rows.device)
        start, stop = self.starts[rows, None], self.starts[rows + 1, None]
        ids = self.flat[(start + at).clamp_(max=len(self.flat) - 1)].long()
        return ids.where(start + at < stop, pad)

    def slices(self, starts: Tensor, length: int) -> Tensor:
        """Slices [batch, length] of the flat array; a slice may span several sequences."""
        at = torch.arange(length, device=starts.device)
        return self.flat[starts[:, None] + at].long()


@dataclass(frozen=True)
class Table:
    """Columns of sequences with equal numbers of rows, and facts such as the bad lines."""

    columns: dict[str, Ragged]
    facts: dict[str, Any]

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, column: str) -> Ragged:
        return self.columns[column]

    @property
    def lengths(self) -> Tensor:
        """The length of each sequence: [rows, columns]."""
        return torch.stack([column.lengths for column in self.columns.values()], dim=1)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return sum(
            part.numel() * part.element_size()
            for column in self.columns.values()
            for part in (column.flat, column.starts)
        )

    def to(self, device: torch.device) -> Table:
        return Table({name: c.to(device) for name, c in self.columns.items()}, self.facts)


def place(table: Table, device: torch.device) -> Table:
    """Move the table to the device, unless it needs over a quarter of a GPU's free memory."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if table.size > free // 4:
            return table
    return table.to(device)


def content(files: Iterable[Path]) -> list[str]:
    """The SHA-256 of each file."""
    digests = []
    for file in files:
        try:
            with file.open("rb") as opened:
                digests.append(hashlib.file_digest(opened, "sha256").hexdigest())
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror or error}.") from None
    return digests


def cached(folder: Path, key: Mapping[str, Any], build: Callable[[], Table]) -> Table:
    """The table that ``build`` returns, stored in ``folder`` and mapped into memory.

    ``key`` holds everything that the table depends on, such as the SHA-256 of each file. A damaged
    table is built again, with a warning.
    """
    name = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()[:32]
    at = folder / name
    if at.exists():
        try:
            return _mapped(at)
        except CheckpointError as error:
            warnings.warn(f"A table of tokens is built again: {error}", DamageWarning, stacklevel=2)
            withdraw(at)
    table = build()
    files = {}
    for column, ragged in table.columns.items():
        files[f"{column}.flat"] = ragged.flat.numpy().tobytes()
        files[f"{column}.starts"] = ragged.starts.numpy().tobytes()
    try:
        publish(at, files, {"facts": table.facts, "columns": list(table.columns)})
    except (CheckpointError, InputError):
        if not at.exists():  # if it exists, another process has stored the same table
            raise
    return _mapped(at)


def _mapped(folder: Path) -> Table:
    facts, files = map_published(folder)

    def tensor(name: str, dtype: torch.dtype) -> Tensor:
        data = files[name]
        return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)

    columns = {
        name: Ragged(tensor(f"{name}.flat", torch.int32), tensor(f"{name}.starts", torch.int64))
        for name in facts["columns"]
    }
    return Table(columns, facts["facts"])
