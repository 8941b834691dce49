"""Read the files of a tokenizer. CheckpointError if a file is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as FastTokenizer

from regard.checkpoints.files import read_bytes, read_json
from regard.errors import CheckpointError

OPTIONS = "tokenizer_config.json"


def options_of(folder: Path) -> dict[str, Any]:
    """Return the contents of tokenizer_config.json; empty if the file is missing."""
    return read_json(folder / OPTIONS) if (folder / OPTIONS).exists() else {}


def add_tokens(tokenizer: FastTokenizer, folder: Path) -> FastTokenizer:
    """Add the tokens of added_tokens.json or tokenizer_config.json to a tokenizer."""
    tokens: dict[int, AddedToken] = {}
    older = folder / "added_tokens.json"
    listed = options_of(folder).get("added_tokens_decoder") or {}
    if older.exists() and not listed:
        for name, number in read_json(older).items():
            tokens[_number(number, name, older)] = AddedToken(name, normalized=True)
    for number, entry in listed.items() if isinstance(listed, dict) else ():
        known = {"content": entry} if isinstance(entry, str) else entry
        token = known.get("content") if isinstance(known, dict) else None
        if not isinstance(token, str):
            raise CheckpointError(
                f"{folder / OPTIONS}: an entry of added_tokens_decoder has no token: {entry!r}."
            )
        kinds = ("lstrip", "rstrip", "single_word", "special")
        flags = {name: known.get(name) is True for name in kinds}
        flags["normalized"] = known.get("normalized", not flags["special"]) is True
        tokens[_number(number, token, folder / OPTIONS)] = AddedToken(token, **flags)
    for number, added in sorted(tokens.items()):
        would_be = tokenizer.token_to_id(added.content)
        if would_be is None:
            would_be = tokenizer.get_vocab_size()
        if would_be != number:
            raise CheckpointError(
                f"{folder}: the added token {added.content!r} should have the id {number}, but "
                f"would have {would_be}."
            )
        if added.special:
            tokenizer.add_special_tokens([added])
        else:
            tokenizer.add_tokens([added])
    return tokenizer


def _number(given: object, token: str, file: Path) -> int:
    text = str(given)
    if not text.isdecimal() or len(text) > 9:
        raise CheckpointError(f"{file} gives the token {token!r} the id {given!r}.")
    return int(text)


def read_text(file: Path) -> str:
    """Read a small UTF-8 file."""
    try:
        return read_bytes(file).decode()
    except UnicodeDecodeError:
        raise CheckpointError(f"{file} is not UTF-8.") from None


@contextmanager
def errors_of(source: Path | str) -> Iterator[None]:
    """Turn errors of `tokenizers` into CheckpointError."""
    try:
        yield
    except BaseException as error:
        # The library raises plain Exception, and BaseException if its Rust code panics.
        known = type(error) is Exception or isinstance(error, ValueError | TypeError)
        if not known and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"{source} is no usable tokenizer: {error}") from None
