"""Write logged numbers in TensorBoard's file format, without the package tensorboard.

A file is a sequence of records. A record has a length and a protocol buffer of type Event, each
with a checksum:
https://github.com/tensorflow/tensorboard/blob/master/tensorboard/compat/proto/event.proto
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any


class Events:
    """A new event file in ``folder``.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Events(Path(folder)) as events:
    ...         events.add({"step": 3, "loss": 2.5, "scores": {"bleu": 41.0}})
    ...     [(file.name[:20], file.stat().st_size) for file in Path(folder).iterdir()]
    [('events.out.tfevents.', 102)]
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        now = f"{time.time_ns() // 10**9:010}.{socket.gethostname()}.{os.getpid()}"
        self.stream = (folder / f"events.out.tfevents.{now}").open("ab")
        self._write(_bytes(3, b"brain.Event:2"))  # the version of the format

    def add(self, row: Mapping[str, Any]) -> None:
        """Write all numbers of a log row, including those in nested tables, at its step."""
        values = [
            _bytes(1, _bytes(1, name.encode()) + _float(2, value)) for name, value in _numbers(row)
        ]
        if "step" in row and values:
            self._write(_number(2, row["step"]) + _bytes(5, b"".join(values)))

    def _write(self, event: bytes) -> None:
        event = _double(1, time.time()) + event
        length = struct.pack("<Q", len(event))
        self.stream.write(length + _checksum(length) + event + _checksum(event))
        self.stream.flush()

    def __enter__(self) -> Events:
        return self

    def __exit__(
        self, _: type[BaseException] | None, __: BaseException | None, ___: TracebackType | None
    ) -> None:
        self.stream.close()


def _numbers(row: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{name}/")
        elif isinstance(value, list):  # one number for each head
            yield from _numbers({str(n): part for n, part in enumerate(value)}, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool) and name != "step":
            yield prefix + name, float(value)


# ------------------------------------------------------------------------------ protocol buffers


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _bytes(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(value)) + value


def _float(field: int, value: float) -> bytes:
    return _varint(field << 3 | 5) + struct.pack("<f", value)


# ------------------------------------------------------------------------------------ checksums


@cache
def _table() -> list[int]:
    """CRC-32C's table for all bytes (https://www.rfc-editor.org/rfc/rfc3720#appendix-B.4)."""
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ (0x82F63B78 if value & 1 else 0)
        table.append(value)
    return table


def crc32c(data: bytes) -> int:
    """The CRC-32C checksum of bytes.

    >>> hex(crc32c(b"123456789"))
    '0xe3069283'
    """
    table, checksum = _table(), 0xFFFFFFFF
    for byte in data:
        checksum = table[(checksum ^ byte) & 255] ^ checksum >> 8
    return checksum ^ 0xFFFFFFFF


def _checksum(data: bytes) -> bytes:
    """The checksum rotated and shifted, as the record format requires."""
    plain = crc32c(data)
    return struct.pack("<I", ((plain >> 15 | plain << 17) + 0xA282EAD8) & 0xFFFFFFFF)
