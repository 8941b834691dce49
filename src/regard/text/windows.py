"""Overlapping windows over a text that is too long for a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from regard.errors import InputError


class Window(NamedTuple):
    """[CLS] question [SEP] part of the context [SEP]."""

    ids: list[int]
    split: int  # the place where the context starts
    offset: int  # of its first token in the whole context


def windows(
    question: Sequence[int], context: Sequence[int], length: int, *, first: int, last: int
) -> Iterator[Window]:
    """A question with its whole context, in windows of ``length`` tokens.

    Each begins in the middle of the one before: an answer at the end of one is inside the next.
    ``first`` is the id of [CLS], ``last`` of [SEP].

    >>> [w.ids[w.split:-1] for w in windows([7], [1, 2, 3, 4, 5, 6], 8, first=0, last=9)]
    [[1, 2, 3, 4], [3, 4, 5, 6]]
    """
    split = len(question) + 2
    room = length - split - 1
    if room < 2:
        raise InputError(
            f"The question is too long: its {len(question)} tokens leave no room for a context in "
            f"a window of {length}."
        )
    offset = 0
    while True:
        piece = context[offset : offset + room]
        yield Window([first, *question, last, *piece, last], split, offset)
        if offset + room >= len(context):
            return
        offset += room // 2
