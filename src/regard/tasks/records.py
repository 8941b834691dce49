"""The results of tasks: frozen records that print, convert to JSON and draw themselves."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from torch import Tensor

from regard.pictures.figures import Picture, alignment
from regard.pictures.record import Cells
from regard.text.words import Span


@dataclass(frozen=True, slots=True)
class WordAttention:
    """Attention weights between words or sentences: ``weights[i][j]`` is that of query i on key j.

    A row can sum to less than 1. The rest is on tokens of no word, such as the end of a text.
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...] = field(repr=False)  # [queries, keys]
    where: str  # the layer and head, or what the mean is over
    sides: tuple[str, str] = (
        "query",
        "key",
    )  # what queries and keys are, such as target and source

    @classmethod
    def of(
        cls,
        queries: tuple[str, Sequence[Span]],
        keys: tuple[str, Sequence[Span]],
        table: Tensor,
        where: str,
        sides: tuple[str, str],
    ) -> WordAttention:
        """Make it from two texts with the spans of their units, and the weights between units."""
        named = [tuple(text[low:high] for low, high in spans) for text, spans in (queries, keys)]
        return cls(named[0], named[1], tuple(map(tuple, table.tolist())), where, sides)

    def top(self, count: int = 3) -> list[tuple[str, list[tuple[str, float]]]]:
        """Each query with the ``count`` keys that it attended to most.

        >>> WordAttention(("chat",), ("the", "cat"), ((0.1, 0.8),), "layer 0").top(1)
        [('chat', [('cat', 0.8)])]
        """
        rows = []
        for query, row in zip(self.queries, self.weights, strict=True):
            best = sorted(range(len(row)), key=lambda at: -row[at])[:count]
            rows.append((query, [(self.keys[at], row[at]) for at in best]))
        return rows

    def picture(self, title: str = "What was attended to") -> Picture:
        """The weights as a picture. The best key of each query is marked."""
        rest = 1 - sum(map(sum, self.weights)) / len(self.weights)
        caption = f"{self.where}. {max(rest, 0.0):.0%} of the weight is on tokens of no word."
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
    """The result of a task: the text, the confidence of the model, and the cost."""

    text: str
    score: float  # the mean log-probability of a token; 0 is certain
    tokens: int  # generated
    seconds: float  # texts of one batch share its time
    model: str
    attended: WordAttention | None = None  # if requested

    def __str__(self) -> str:
        return self.text

    def to_dict(self) -> dict[str, Any]:
        """The record as plain values for JSON. ``attended`` is left out if it is None."""
        values: dict[str, Any] = {}
        for entry in fields(self):
            value = getattr(self, entry.name)
            if isinstance(value, WordAttention):
                value = value.to_dict()
            elif isinstance(value, float):
                value = round(value, 6)
            if value is not None or entry.name != "attended":
                values[entry.name] = value
        return values

    def _facts(self) -> Sequence[str]:
        return (f"score {self.score:.3f}", f"{self.tokens} tokens", f"{self.seconds:.2f} s")

    def _repr_html_(self) -> str:
        facts = " · ".join((*self._facts(), self.model))
        svg = "" if self.attended is None else self.attended.picture().svg()
        return (
            f'<p style="white-space:pre-wrap">{html.escape(str(self))}</p>'
            f"<p><small>{html.escape(facts)}</small></p>{svg}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation(Record):
    """A translation. ``attended`` is the alignment of its words with those of the source.

    >>> print(Translation(
    ...     text="Le chat", score=-0.1, tokens=3, seconds=0.2, model="translate", source="The cat",
    ...     to="fra",
    ... ))
    Le chat
    """

    source: str
    to: str | None  # the language as the model names it; None if it has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a document that fits the model, and its summary."""

    start: int  # in characters of the document
    end: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Record):
    """A summary. ``attended`` has the weights of its sentences on those of the document.

    ``method`` is "whole" for a document that fits the model, "joined" if it is the summaries of all
    parts, and "resummarized" if it is a summary of those.

    >>> Summary(
    ...     text="A cat sat.", score=-0.5, tokens=5, seconds=0.4, model="mine", method="whole",
    ...     parts=(Part(start=0, end=80, text="A cat sat."),),
    ... ).to_dict()["parts"]
    [{'start': 0, 'end': 80, 'text': 'A cat sat.'}]
    """

    method: str
    parts: tuple[Part, ...]

    def to_dict(self) -> dict[str, Any]:
        return {**Record.to_dict(self), "parts": [asdict(part) for part in self.parts]}

    def _facts(self) -> Sequence[str]:
        return (*Record._facts(self), f"{self.method}, {len(self.parts)} parts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Record):
    """An answer, which is ``context[start:end]``. If there is none, ``text`` is empty.

    ``score`` is a difference of logits: that of the answer less that of no answer. ``probability``
    compares the answer with all others of its window, and with none. ``attended`` has the weights
    of the question's words on those of the context. ``tokens`` are those read.

    >>> record = Answer(
    ...     text="", score=-2.0, tokens=12, seconds=0.1, model="answer", question="Who wrote it?",
    ...     start=None, end=None, probability=0.1, windows=1,
    ... )
    >>> record.answered, str(record)
    (False, 'No answer.')
    """

    question: str
    start: int | None
    end: int | None
    probability: float
    windows: int  # in which the context was read

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
        where = f"characters {self.start} to {self.end}" if self.answered else "no answer"
        return (where, f"probability {self.probability:.2f}", *Record._facts(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion(Record):
    """The text after a prompt. ``attended`` has the weights of its words on earlier words.

    >>> print(Completion(
    ...     text=" there was", score=-1.5, tokens=2, seconds=0.1, model="books-gpt2",
    ...     prompt="Once upon a time", stopped=False,
    ... ))
    Once upon a time there was
    """

    prompt: str
    stopped: bool  # by an end token, not by the maximum number of tokens

    def __str__(self) -> str:
        return self.prompt + self.text
