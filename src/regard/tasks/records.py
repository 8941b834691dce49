"""The results of tasks: frozen records that print, convert to JSON and draw themselves."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.errors import InputError
from regard.mechanism.labelled import Array, Convertible, Labelled, Labels
from regard.pictures.figures import Picture, alignment
from regard.pictures.record import Cells, printable, shorten, width_of
from regard.tasks.confidence import THRESHOLD
from regard.text.words import Span

MAX_PRINTED = 20  # queries that print() shows


@dataclass(frozen=True, slots=True, repr=False)
class WordAttention(Convertible):
    """Attention weights between words or sentences: query i gives key j ``weights[i][j]``.

    A row can sum to less than 1. The rest is on other tokens, such as the end token.

    >>> print(WordAttention(("chat", "noir"), ("black", "cat"), ((0.1, 0.8), (0.7, 0)), "layer 0"))
    WordAttention of 2 x 2, query x key, layer 0
      chat  0.80 cat
      noir  0.70 black
    """

    queries: tuple[str, ...]
    keys: tuple[str, ...]
    weights: tuple[tuple[float, ...], ...]  # [queries, keys]
    where: str  # the layer and head of the weights, or the heads that they are averaged over
    sides: tuple[str, str] = ("query", "key")  # names of the axes, such as target and source

    @classmethod
    def of(
        cls,
        queries: tuple[str, Sequence[Span]],
        keys: tuple[str, Sequence[Span]],
        table: Tensor,
        where: str,
        sides: tuple[str, str],
    ) -> WordAttention:
        """Build the record from two texts, the spans of words or sentences, and the weights."""
        named = [tuple(text[low:high] for low, high in spans) for text, spans in (queries, keys)]
        return cls(named[0], named[1], tuple(map(tuple, table.tolist())), where, sides)

    def top(self, count: int = 3) -> list[tuple[str, list[tuple[str, float]]]]:
        """Each query with the ``count`` keys of its largest weights.

        >>> WordAttention(("chat",), ("the", "cat"), ((0.1, 0.8),), "layer 0").top(1)
        [('chat', [('cat', 0.8)])]
        """
        rows = []
        for query, row in zip(self.queries, self.weights, strict=True):
            best = sorted(range(len(row)), key=lambda at: -row[at])[:count]
            rows.append((query, [(self.keys[at], row[at]) for at in best]))
        return rows

    def _labelled(self) -> Labelled:
        weights = Array(("query", "key"), torch.tensor(self.weights))
        labels = {
            "query_text": Labels(("query",), self.queries),
            "key_text": Labels(("key",), self.keys),
        }
        return Labelled({"weights": weights}, labels, {"where": self.where})

    def __repr__(self) -> str:
        sizes = f"{len(self.queries):,} x {len(self.keys):,}"
        return f"WordAttention of {sizes}, {' x '.join(self.sides)}, {self.where}"

    def __str__(self) -> str:
        shown = [shorten(printable(query), 32) for query in self.queries[:MAX_PRINTED]]
        width = max(map(width_of, shown), default=0)
        lines = [repr(self)]
        for query, row in zip(shown, self.weights, strict=False):
            weight, at = max((weight, -at) for at, weight in enumerate(row))
            key = shorten(printable(self.keys[-at]), 32)
            lines.append(f"  {query}{' ' * (width - width_of(query))}  {weight:.2f} {key}")
        if len(self.queries) > len(shown):
            lines.append(f"  ... and {len(self.queries) - len(shown):,} more")
        return "\n".join(lines)

    def picture(self, title: str = "What was attended to") -> Picture:
        """A picture of the weights, with the largest weight of each query marked."""
        rest = 1 - sum(map(sum, self.weights)) / len(self.weights)
        caption = f"{self.where}. {max(rest, 0.0):.0%} of the weight is on other tokens."
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
    """The result of a task: the text, the model's confidence in it, and the cost."""

    text: str
    score: float  # the mean log-probability of a token; 0 is certain
    tokens: int  # the number of generated tokens
    seconds: float  # the time of a batch is divided equally among its texts
    model: str
    confidence: float  # from 0 to 1: the probability that the text is acceptable
    reasons: tuple[str, ...]  # against it, in words
    attended: WordAttention | None = None  # if requested

    title: ClassVar[str]  # of the picture

    @property
    def doubtful(self) -> bool:
        """Whether the confidence is low."""
        return self.confidence < THRESHOLD

    @property
    def doubt(self) -> str:
        """The confidence and the reasons of a doubtful result as one line; "" of another one."""
        if not self.doubtful:
            return ""
        return f"low confidence {self.confidence:.2f}: {'; '.join(self.reasons)}"

    def picture(self) -> Picture:
        """A picture of ``attended``."""
        if self.attended is None:
            raise InputError(
                f"This {type(self).__name__} has no attention weights to draw. Pass attended=True "
                "to the task. A text without words has none."
            )
        return self.attended.picture(self.title)

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
            elif isinstance(value, tuple):
                value = list(value)
            if value is not None or entry.name != "attended":
                values[entry.name] = value
        return {**values, "doubtful": self.doubtful}

    def _facts(self) -> Sequence[str]:
        doubt = (self.doubt,) if self.doubtful else (f"confidence {self.confidence:.2f}",)
        cost = (f"{self.tokens} tokens", f"{self.seconds:.2f} s")
        return (*doubt, f"score {self.score:.3f}", *cost)

    def _repr_html_(self) -> str:
        facts = " · ".join((*self._facts(), self.model))
        svg = "" if self.attended is None else self.picture().svg()
        return (
            f'<p style="white-space:pre-wrap">{html.escape(str(self))}</p>'
            f"<p><small>{html.escape(facts)}</small></p>{svg}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Translation(Record):
    """A translation. ``attended`` aligns its words with the words of the source.

    >>> print(Translation(
    ...     text="Le chat", score=-0.1, tokens=3, seconds=0.2, model="translate", source="The cat",
    ...     to="fra", confidence=0.9, reasons=(),
    ... ))
    Le chat
    """

    title = "Alignment"

    source: str
    to: str | None  # the model's name of the target language; None if it has only one


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A part of a document that fits the model, and its summary."""

    start: int  # in characters of the document
    end: int
    text: str  # the summary of the part


@dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """A sentence of a document, and whether it is in the summary."""

    start: int  # in characters of the document
    end: int
    score: float  # 1 is an average sentence far from the start of the document
    chosen: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary(Record):
    """A summary, by this ``method``:

    - "extracted": it consists of sentences of the document. ``sentences`` has all of them, with
      their scores; ``score`` is the mean of the chosen ones. ``attended`` has the weights that the
      document's sentences give to the chosen ones. ``tokens`` counts the tokens of the document.
    - "whole", "joined" or "resummarized": a model wrote it. The document fits the model, or the
      summaries of its ``parts`` are joined, or they are summarized again. ``attended`` has the
      weights of the summary's sentences on the document's sentences.

    >>> Summary(
    ...     text="A cat sat.", score=-0.5, tokens=5, seconds=0.4, model="mine", method="whole",
    ...     confidence=0.8, reasons=(), parts=(Part(start=0, end=80, text="A cat sat."),),
    ... ).to_dict()["parts"]
    [{'start': 0, 'end': 80, 'text': 'A cat sat.'}]
    """

    title = "Where it comes from"

    method: str
    parts: tuple[Part, ...] = ()
    sentences: tuple[Sentence, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        sentences = [
            {**asdict(sentence), "score": round(sentence.score, 4)} for sentence in self.sentences
        ]
        parts = [asdict(part) for part in self.parts]
        return {**Record.to_dict(self), "parts": parts, "sentences": sentences}

    @property
    def remark(self) -> str:
        """How the summary was made, in a few words; "" if a model read the document at once."""
        if self.method == "extracted":
            chosen = sum(sentence.chosen for sentence in self.sentences)
            count = len(self.sentences)
            return f"{chosen} of {count} {'sentence' if count == 1 else 'sentences'}"
        return "" if self.method == "whole" else f"{len(self.parts)} parts, {self.method}"

    def _facts(self) -> Sequence[str]:
        return (*Record._facts(self), self.remark) if self.remark else Record._facts(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer(Record):
    """An answer, which is ``context[start:end]``. If there is no answer, ``text`` is empty.

    ``score`` is the logit of the answer minus the logit of no answer. ``probability`` is a softmax
    over all answers of the same window and no answer. ``attended`` has the weights of the
    question's words on the context's words. ``tokens`` counts the input tokens.

    >>> record = Answer(
    ...     text="", score=-2.0, tokens=12, seconds=0.1, model="answer", question="Who wrote it?",
    ...     start=None, end=None, probability=0.1, windows=1, confidence=0.9, reasons=(),
    ... )
    >>> record.answered, str(record)
    (False, 'No answer.')
    """

    title = "What the question attended to"

    question: str
    start: int | None
    end: int | None
    probability: float
    windows: int  # the number of windows of the context

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
    """The text generated after a prompt. ``attended`` has its words' weights on earlier words.

    >>> print(Completion(
    ...     text=" there was", score=-1.5, tokens=2, seconds=0.1, model="books-gpt2",
    ...     prompt="Once upon a time", stopped=False, confidence=0.7, reasons=(),
    ... ))
    Once upon a time there was
    """

    title = "What was attended to"

    prompt: str
    stopped: bool  # True: ended by an end token; False: by the maximum number of tokens

    def __str__(self) -> str:
        return self.prompt + self.text
