"""Summaries of documents of any length: of the whole, or of its parts and then of those."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.decoding.settings import Asked
from regard.decoding.strategies import Strategy
from regard.errors import InputError
from regard.models.bundle import Bundle, Name, Precision, open_bundle
from regard.tasks.attended import look as look_at
from regard.tasks.defaults import check_default
from regard.tasks.records import Part, Summary, WordAttention
from regard.tasks.writing import Written, one_or_many, write
from regard.text.words import Span, sentences

TASK = "summarization"  # as T5's config.json names it


@one_or_many
def summarize(
    texts: list[str],
    *,
    model: Name = "summarize",
    join: bool = False,
    how: Asked | None = None,
    length: int | None = None,
    batch: int = 8,
    look: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
) -> list[Summary]:
    """A summary of a document, or of each of several.

    ``model`` is a T5 or a Transformer: the name of a shipped one, a folder, or a model of the hub.
    A document that is longer than the model reads at once is cut between sentences into parts that
    overlap, and the summaries of the parts are summarised again; with ``join`` they follow each
    other, a line each. ``how`` and ``length`` say how to decode, and how many tokens at most; by
    default the model's own files do. ``look`` sees which sentences each of the summary attended to,
    over all heads, which takes one more pass.

    >>> found = summarize("A small web server written in C. It serves static files and scripts.")
    >>> found.text, found.how
    ('small web server written in C', 'whole')
    """
    check_default(model)
    one = open_bundle(model, "summarize", device, precision)
    way, most = one.settings(TASK).resolve(how, length)
    going = _Going(one, one.prefix(TASK), way, most, batch, look)
    return [_summary(going, one.prepared(text, TASK), join) for text in texts]


class _Going(NamedTuple):
    """How all documents of a call are summarised."""

    one: Bundle
    prefix: str
    how: Strategy
    length: int | None
    batch: int
    look: bool


class _Round(NamedTuple):
    """One pass over a text: its parts, their summaries, and what was attended to."""

    parts: list[Span]
    written: list[Written]
    text: str  # the summaries, a line each
    table: Tensor | None  # [sentences of the summaries, sentences of the text]


def _summary(going: _Going, text: str, join: bool) -> Summary:
    if not text.strip():
        raise InputError("A document is empty. Give some words.")
    rounds = [_pass(going, text)]
    while len(rounds[-1].parts) > 1 and not join:
        last = rounds[-1]
        before = text if len(rounds) == 1 else rounds[-2].text
        if len(last.text) >= len(before):
            break  # the summaries are no shorter than what they are of: more rounds change nothing
        rounds.append(_pass(going, last.text))
    first, last = rounds[0], rounds[-1]
    how = "whole" if len(first.parts) == 1 else "joined" if len(last.parts) > 1 else "again"
    tokens = sum(w.tokens for w in last.written)
    return Summary(
        text=last.text,
        score=sum(w.chance for w in last.written) / max(tokens, 1),
        tokens=sum(w.tokens for each in rounds for w in each.written),
        seconds=sum(w.seconds for each in rounds for w in each.written),
        model=going.one.name,
        attended=_attended(text, rounds),
        how=how,
        parts=tuple(
            Part(start=span.start, end=span.end, text=w.text)
            for span, w in zip(first.parts, first.written, strict=True)
        ),
    )


def _pass(going: _Going, text: str) -> _Round:
    one, units = going.one, sentences(text)
    parts = _parts(going, text, units)
    sources = [text[start:end].replace("\n", " ") for start, end in parts]
    written = write(
        one, [going.prefix + source for source in sources], going.how, going.length, going.batch
    )
    table = _table(going, sources, parts, units, written) if going.look else None
    return _Round(parts, written, "\n".join(w.text for w in written), table)


def _parts(going: _Going, text: str, units: Sequence[Span]) -> list[Span]:
    """The text in parts of whole sentences that fit the model, each some of the one before.

    A sentence that is too long by itself is cut between tokens.
    """
    encode = going.one.tokenizer.encode
    room = going.one.window - len(encode(going.prefix, special=False).ids) - 1
    if room < 1:
        raise InputError(
            f"The prefix {going.prefix[:40]!r} leaves no room for a text: {going.one.name} reads "
            f"{going.one.window} tokens at most."
        )
    pieces: list[tuple[Span, int]] = []  # with how many tokens each has
    for unit in units:
        offsets = encode(text[unit.start : unit.end], special=False).offsets
        for low in range(0, len(offsets), room):
            some = offsets[low : low + room]
            span = Span(unit.start + some[0][0], unit.start + some[-1][1])
            pieces.append((span, len(some)))
    if not pieces:
        raise InputError(f"The document {text[:40]!r} has no token that {going.one.name} knows.")
    parts: list[Span] = []
    first = 0
    while True:
        last, filled = first, pieces[first][1]
        while last + 1 < len(pieces) and filled + pieces[last + 1][1] <= room:
            last += 1
            filled += pieces[last][1]
        parts.append(Span(pieces[first][0].start, pieces[last][0].end))
        if last + 1 == len(pieces):
            return parts
        # The next one begins with the end of this: an eighth, where sentences are as short.
        following, shared = last + 1, 0
        while following - 1 > first and shared + pieces[following - 1][1] <= room // 8:
            following -= 1
            shared += pieces[following][1]
        first = following


def _table(
    going: _Going,
    sources: Sequence[str],
    parts: Sequence[Span],
    units: Sequence[Span],
    written: Sequence[Written],
) -> Tensor:
    """What the sentences of all summaries attended to, [sentences of summaries, sentences]."""
    rows = []
    looked = look_at(going.one, going.prefix, sources, written, going.batch)
    for part, item in zip(parts, looked, strict=True):
        moved = [Span(start - part.start, end - part.start) for start, end in units]
        rows.append(item.pooled(sentences(item.written.text), moved).mean((0, 1)))
    return torch.cat(rows)


def _attended(text: str, rounds: Sequence[_Round]) -> WordAttention | None:
    """Through all rounds: what a summary of summaries attended to is what those did."""
    table = rounds[-1].table
    if table is None or not len(table):
        return None
    for earlier in reversed(rounds[:-1]):
        assert earlier.table is not None
        table = table @ earlier.table
    final = rounds[-1].text
    where = "The mean over all layers and heads that attend across"
    ours, theirs = (final, sentences(final)), (text, sentences(text))
    return WordAttention.of(ours, theirs, table, where, ("summary", "document"))
