"""What reading a tokenizer's file may come to: its contents, or an error of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from regard.checkpoints import read_bytes
from regard.errors import CheckpointError


def read_text(file: Path) -> str:
    """A small file of UTF-8, whole."""
    try:
        return read_bytes(file).decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not UTF-8.") from None


@contextmanager
def errors_of(source: Path | str) -> Iterator[None]:
    """Within, what `tokenizers` does not like of a file is an error of ours."""
    try:
        yield
    except BaseException as error:
        # It raises bare Exceptions, and where its Rust panics, not even those.
        known = type(error) is Exception or isinstance(error, ValueError | TypeError)
        if not known and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{source} is no tokenizer that can be used: {error}") from None
