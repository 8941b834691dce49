"""Summarize documents of any length: choose some of their sentences, or let a model write.

A model that writes reads a long document in parts, and then the summaries of its parts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import islice

import torch
from torch import Tensor

from regard.decoding.settings import Asked, Settings
from regard.decoding.strategies import at_least
from regard.errors import InputError
from regard.models.bundle import Bundle, Name, Precision
from regard.tasks.attended import CrossWeights, read_weights
from regard.tasks.confidence import chance, doubts_about_summary, trust
from regard.tasks.defaults import open_model
from regard.tasks.extraction import extract
from regard.tasks.records import Part, Summary, WordAttention
from regard.tasks.writing import Check, Written, one_or_many, write
from regard.text.words import Span
from regard.text.words import sentences as sentences_of

TASK = "summarization"  # the task's name in T5's config.json
DEFAULT = "summarize"  # the model whose encoder chooses sentences, and that writes one line
CHOOSING = ("sentences", "words")  # the options of a summary of sentences of the document
WRITING = ("one_line", "model")  # those that let a model write
OVERLAP = 8  # adjacent parts share at most 1/8 of the model's input length


@one_or_many
def summarize(
    texts: list[str],
    *,
    sentences: int | None = None,
    words: int | None = None,
    one_line: bool = False,
    model: Name | None = None,
    join: bool = False,
    how: Asked | None = None,
    max_new_tokens: int | None = None,
    batch: int = 8,
    attended: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
    check: Check | None = None,
) -> list[Summary]:
    """Summarize a document, or each document of a list.

    The summary consists of sentences of the document, in its order: those that the other sentences
    attend to most in the encoder of the model ``summarize``, with the first one of a short text. A
    third of the sentences are chosen, at most three; or as many as ``sentences``, or as fit into a
    number of ``words``.

    With ``one_line``, the model ``summarize`` writes a line, as for descriptions of software, which
    it was trained on. With ``model``, a T5 or a Transformer writes as it was trained to. A document
    longer than the model's input is cut between sentences into parts that overlap, and the
    summaries of the parts are summarized again. With ``join`` they are joined instead, one per
    line. ``how``, ``max_new_tokens`` and ``join`` are for models that write.

    ``attended`` returns attention weights between the sentences of both texts.
    :mod:`regard.tasks` describes the other options.

    >>> text = "This is a small web server. It serves static files. It needs little memory."
    >>> record = summarize(text)
    >>> record.text, [sentence.chosen for sentence in record.sentences]
    ('This is a small web server.', [True, False, False])
    >>> summarize(text, one_line=True).text
    'small web server'
    """
    given: dict[str, object] = {
        "sentences": sentences, "words": words, "one_line": one_line, "model": model,
        "join": join, "max_new_tokens": max_new_tokens,
        **(how.to_json() if isinstance(how, Settings) else {"how": how}),
    }  # fmt: skip
    check_options(given)
    for name, number in (("sentences", sentences), ("words", words)):
        if number is not None:
            at_least(f"summarize({name}=...)", number, 1)
    at_least("summarize(batch=...)", batch, 1)
    bundle = open_model(model or DEFAULT, "summarize", device, precision)
    if not all(text.strip() for text in texts):
        raise InputError("A document is empty. Give some words.")
    if not one_line and model is None:
        return extract(
            bundle, TASK, texts, sentences=sentences, words=words, batch=batch, attended=attended,
            check=check,
        )  # fmt: skip
    how, max_new_tokens = bundle.settings(TASK).resolve(how, max_new_tokens)
    prefix = bundle.prefix(TASK)
    # Each document is a list of rounds; each round summarizes the summary of the round before.
    documents = [[_round(bundle, prefix, bundle.prepared(text, TASK))] for text in texts]
    active = documents
    while active:
        # The parts of all documents go through the model together.
        rounds = [document[-1] for document in active]
        sources = [source for each in rounds for source in each.sources]
        prefixed = [prefix + source for source in sources]
        written = write(bundle, prefixed, how, max_new_tokens, batch, check)
        queue = iter(written)
        for each in rounds:
            each.written = list(islice(queue, len(each.parts)))
        if attended:
            weights = read_weights(bundle, prefix, sources, written, batch, check)
            for each in rounds:
                each.table = _table(each, islice(weights, len(each.parts)))
        active = [document for document in active if not join and document[-1].can_be_shortened]
        for document in active:
            document.append(_round(bundle, prefix, document[-1].summary))
    return [_record(bundle, rounds) for rounds in documents]


def check_options(options: Mapping[str, object], shown: Callable[[str], str] = str) -> None:
    """Raise InputError if these options of ``summarize`` do not go together.

    An option that is None or False was not given. ``shown`` says how a user spells an option.
    """
    names = [name for name, value in options.items() if value is not None and value is not False]
    choosing, writing = ([name for name in some if name in names] for some in (CHOOSING, WRITING))
    if len(both := choosing) == 2 or len(both := writing) == 2:
        raise InputError(f"Give {shown(both[0])} or {shown(both[1])}, not both.")
    if choosing and writing:
        raise InputError(
            f"{shown(choosing[0])} is for a summary of sentences of the document, but with "
            f"{shown(writing[0])} a model writes the summary. Leave one of them out."
        )
    others = [name for name in names if name not in (*CHOOSING, *WRITING)]
    if others and not writing:
        raise InputError(
            f"{shown(others[0])} is for a summary that a model writes. Ask for "
            f"{shown('one_line')}, or name a {shown('model')}; by default a summary consists of "
            "sentences of the document."
        )


@dataclass(slots=True)
class _Round:
    """A text in parts that fit the model, and the summary of each part."""

    text: str
    units: list[Span]  # the sentences of the text
    parts: list[Span]
    sources: list[str]  # the text of each part
    written: list[Written] = field(default_factory=list)
    table: Tensor | None = None  # [sentences of the summaries, sentences of the text]

    @property
    def summary(self) -> str:
        """The summaries of the parts, one per line."""
        return "\n".join(item.text for item in self.written)

    @property
    def can_be_shortened(self) -> bool:
        """Whether there are several summaries, and they are shorter than the text."""
        return len(self.parts) > 1 and len(self.summary) < len(self.text)


def _record(bundle: Bundle, rounds: Sequence[_Round]) -> Summary:
    first, last = rounds[0], rounds[-1]
    written = [item for each in rounds for item in each.written]
    tokens = sum(item.tokens for item in last.written)
    split = "joined" if len(last.parts) > 1 else "resummarized"
    score = sum(item.log_probability for item in last.written) / max(tokens, 1)
    likely = chance(bundle, TASK, score, math.exp(score))
    trusted = trust(likely, doubts_about_summary(first.text, last.summary))
    return Summary(
        text=last.summary,
        score=score,
        tokens=sum(item.tokens for item in written),
        seconds=sum(item.seconds for item in written),
        model=bundle.name,
        confidence=trusted.confidence,
        reasons=trusted.reasons,
        attended=_attended(rounds),
        method="whole" if len(first.parts) == 1 else split,
        parts=tuple(
            Part(start=span.start, end=span.end, text=item.text)
            for span, item in zip(first.parts, first.written, strict=True)
        ),
    )


def _attended(rounds: Sequence[_Round]) -> WordAttention | None:
    """The weights of the last summary on the document: the product of all rounds' tables."""
    tables = [each.table for each in reversed(rounds) if each.table is not None]
    if not tables or not len(tables[0]):
        return None
    table, summary = reduce(torch.matmul, tables), rounds[-1].summary
    where = "The mean over all layers and heads of cross-attention"
    document = (rounds[0].text, rounds[0].units)
    return WordAttention.of(
        (summary, sentences_of(summary)), document, table, where, ("summary", "document")
    )


def _round(bundle: Bundle, prefix: str, text: str) -> _Round:
    units = sentences_of(text)
    parts = _parts(bundle, prefix, text, units)
    return _Round(text, units, parts, [text[low:high].replace("\n", " ") for low, high in parts])


def _parts(bundle: Bundle, prefix: str, text: str, units: Sequence[Span]) -> list[Span]:
    """Cut a text into parts of whole sentences that fit the model and overlap.

    A sentence longer than the model's input is cut between tokens.
    """
    encode = bundle.tokenizer.encode
    room = bundle.window - len(encode(prefix, special=False).ids) - 1
    if room < 1:
        raise InputError(
            f"The prefix {prefix[:40]!r} leaves no room for a text: {bundle.name} reads at most "
            f"{bundle.window} tokens."
        )
    pieces: list[tuple[Span, int]] = []  # sentences or parts of them, with their tokens counted
    for unit in units:
        offsets = encode(text[unit.start : unit.end], special=False).offsets
        for low in range(0, len(offsets), room):
            some = offsets[low : low + room]
            span = Span(unit.start + some[0][0], unit.start + some[-1][1])
            pieces.append((span, len(some)))
    if not pieces:
        raise InputError(f"The document {text[:40]!r} has no token that {bundle.name} knows.")
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
        following, shared = last + 1, 0
        while following - 1 > first and shared + pieces[following - 1][1] <= room // OVERLAP:
            following -= 1
            shared += pieces[following][1]
        first = following


def _table(each: _Round, weights: Iterator[CrossWeights]) -> Tensor:
    """The weights of a round, [sentences of the summaries, sentences of the text]."""
    rows = []
    for part, item in zip(each.parts, weights, strict=True):
        moved = [Span(start - part.start, end - part.start) for start, end in each.units]
        rows.append(item.pooled(sentences_of(item.written.text), moved).mean((0, 1)))
    return torch.cat(rows)
