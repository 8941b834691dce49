"""What the tasks give back: small frozen records, which print, become JSON, and draw themselves."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from regard.pictures.figures import Picture, alignment
from regard.pictures.record import Cells
from regard.text.words import Span


@dataclass(frozen=True, slots=True)
class WordAttention:
    """Which words or sentences were attended to: ``weights[i][j]`` is what query i gave to key j.

    What is missing in a row to make 1 went to what is no word, such as the token that ends a text.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...] = field(repr=False)  # [queries, keys]
    where: str  # which layer and head these are of, or over which they are a mean
    sides: tuple[str, str] = ("query", "key")  # what the two are, as target and source

    @classmethod
    def of(
        cls,
        queries: tuple[str, Sequence[Span]],
        keys: tuple[str, Sequence[Span]],
        table: Tensor,
        where: str,
        sides: tuple[str, str],
    ) -> WordAttention:
        """From two texts, each with spans in it, and the weights between those."""
        named = [tuple(text[low:high] for low, high in spans) for text, spans in (queries, keys)]
        return cls(named[0], named[1], tuple(map(tuple, table.tolist())), where, sides)

    def top(self, count: int = 3) -> list[tuple[str, list[tuple[str, float]]]]:
        """Each query with the keys it attended to most.

        >>> WordAttention(("chat",), ("the", "cat"), ((0.1, 0.8),), "layer 0").top(1)
        [('chat', [('cat', 0.8)])]
        """
        found = []
        for query, row in zip(self.queries, self.weights, strict=True):
            best = sorted(range(len(row)), key=lambda at: -row[at])[:count]
            found.append((query, [(self.keys[at], row[at]) for at in best]))
        return found

    def picture(self, title: str = "What was attended to") -> Picture:
        """The weights as a picture, the best key of each query marked."""
        rest = 1 - sum(map(sum, self.weights)) / len(self.weights)
        caption = f"{self.where}. {max(rest, 0.0):.0%} of the weight is on what is no word."
        drawn = alignment(self.weights, self.keys, self.queries, title=title, caption=caption)
        cells = drawn.drawing
        assert isinstance(cells, Cells)
        rows, columns = (
            replace(axis, name=name)
            for axis, name in zip((cells.rows, cells.columns), self.sides, strict=True)
        )
        return Picture(replace(cells, rows=rows, columns=columns))

    def to_dict(self) -> dict[str, Any]:
        rows = [[round(weight, 4) for weight in row] for row in self.weights]
        return {
            "queries": list(self.queries),
            "keys": list(self.keys),
            "weights": rows,
            "where": self.where,
            "sides": list(self.sides),
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """What every task tells: the text, how sure the model was, and what it took."""

    text: str
    score: float  # the mean log-probability of its tokens: 0 is certain
    tokens: int  # how many were written
    seconds: float  # texts that share a batch share its time
    model: str
    attended: WordAttention | None = None  # where it was looked at

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values, for JSON; what was not looked at is left out."""
        found: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, WordAttention):
                value = value.to_dict()
            elif isinstance(value, float):
                value = round(value, 6)
            if value is not None or entry.name != "attended":
                found[entry.name] = value
        return found

    def _facts(self) -> Sequence[str]:
        return (f"score {self.score:.3f}", f"{self.tokens} tokens", f"{self.seconds:.2f} s")

    def _repr_html_(self) -> str:
        facts = " · ".join((*self._facts(), self.model))
        drawn = "" if self.attended is None else self.attended.picture().svg()
        return (
            f'<p style="white-space:pre-wrap">{html.escape(str(self))}</p>'
            f"<p><small>{html.escape(facts)}</small></p>{drawn}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation(Record):
    """A translation; ``attended`` has the words of the source that each of its words came from.

    >>> print(Translation(
    ...     text="Le chat", score=-0.1, tokens=3, seconds=0.2, model="translate", source="The cat",
    ...     to="fra",
    ... ))
    Le chat
    """

    source: str
    to: str | None  # the language, as the model names it; None where it has one only


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a document that fits the model, and its summary."""

    start: int  # its characters in the document
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Record):
    """A summary; ``attended`` has the sentences of the document that each of its own came from.

    ``how`` is "whole" for a document that fits the model, "joined" where the summaries of its parts
    follow each other, and "again" where they were summarised once more.

    >>> Summary(
    ...     text="A cat sat.", score=-0.5, tokens=5, seconds=0.4, model="mine", how="whole",
    ...     parts=(Part(start=0, end=80, text="A cat sat."),),
    ... ).to_dict()["parts"]
    [{'start': 0, 'end': 80, 'text': 'A cat sat.'}]
    """

    how: str
    parts: tuple[Part, ...]

    def to_dict(self) -> dict[str, Any]:
        parts = [{"start": p.start, "end": p.end, "text": p.text} for p in self.parts]
        return {**Record.to_dict(self), "parts": parts}

    def _facts(self) -> Sequence[str]:
        return (*Record._facts(self), f"{self.how}, {len(self.parts)} parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Record):
    """An answer and where it stands: ``context[start:end]``. Without one, ``text`` is empty.

    ``score`` is how much better the answer is than none, a difference of logits; ``probability`` is
    its share among all the answers and none of its part of the context. ``attended`` has the words
    of the context that each word of the question attended to. ``tokens`` were read, not written.

    >>> found = Answer(
    ...     text="", score=-2.0, tokens=12, seconds=0.1, model="answer", question="Who wrote it?",
    ...     start=None, end=None, probability=0.1, windows=1,
    ... )
    >>> found.answered, str(found)
    (False, 'No answer.')
    """

    question: str
    start: int | None
    end: int | None
    probability: float
    windows: int  # parts of the context that were read

    @property
    def answered(self) -> bool:
        """Whether there is an answer."""
        return self.start is not None

    @property
    def span(self) -> Span | None:
        return None if self.start is None or self.end is None else Span(self.start, self.end)

    def __str__(self) -> str:
        return self.text if self.answered else "No answer."

    def to_dict(self) -> dict[str, Any]:
        return {**Record.to_dict(self), "answered": self.answered}

    def _facts(self) -> Sequence[str]:
        where = f"characters {self.start} to {self.end}" if self.answered else "nowhere"
        return (where, f"probability {self.probability:.2f}", *Record._facts(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Record):
    """What comes after a prompt; ``attended`` has the words before that each of its words used.

    >>> print(Completion(
    ...     text=" there was", score=-1.5, tokens=2, seconds=0.1, model="books-gpt2",
    ...     prompt="Once upon a time", stopped=False,
    ... ))
    Once upon a time there was
    """

    prompt: str
    stopped: bool  # whether it came to an end, rather than to the length asked for

    def __str__(self) -> str:
        return self.prompt + self.text
