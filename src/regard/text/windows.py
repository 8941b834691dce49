"""Split a text that is too long for a model into overlapping windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from regard.errors import InputError


class Window(NamedTuple):
    """The ids of [CLS] question [SEP] part of the context [SEP]."""

    ids: list[int]
    split: int  # the index in ids where the context starts
    offset: int  # the index of this part's first token in the whole context


def in_window(
    numbers: Sequence[int], split: int, offset: int, length: int, width: int
) -> list[int]:
    """The numbers of a window's tokens, given those of the tokens of the whole context.

    The window has ``length`` tokens, and is padded to ``width``. Tokens outside the context have 0.

    >>> in_window([5, 6, 7, 8], split=2, offset=1, length=6, width=8)
    [0, 0, 6, 7, 8, 0, 0, 0]
    """
    part = numbers[offset : offset + length - split - 1]
    return [0] * split + list(part) + [0] * (width - split - len(part))


def windows(
    question: Sequence[int], context: Sequence[int], length: int, *, first: int, last: int
) -> Iterator[Window]:
    """Yield windows of ``length`` tokens with the question and parts of the context.

    Parts overlap by half: an answer that one window cuts off is whole in the next, unless it is
    longer than the overlap. ``first`` is the id of [CLS], and ``last`` is the id of [SEP].

    >>> [w.ids[w.split:-1] for w in windows([7], [1, 2, 3, 4, 5, 6], 8, first=0, last=9)]
    [[1, 2, 3, 4], [3, 4, 5, 6]]
    """
    split = len(question) + 2
    room = length - split - 1
    if room < 2:
        raise InputError(
            f"The question is too long: its {len(question)} tokens leave no room for a context in "
            f"a window of {length} tokens. Shorten the question."
        )
    half = room // 2
    for offset in range(0, max(len(context) - room, 0) + half, half):
        part = context[offset : offset + room]
        yield Window([first, *question, last, *part, last], split, offset)
