"""Records of data files (pairs, questions or texts), and the report of bad lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from regard.errors import InputError


class Pair(NamedTuple):
    """A source text and its targets. Several targets are the references of an evaluation."""

    source: str
    targets: tuple[str, ...]
    times: int = 1  # how often an epoch of training contains it


class Answer(NamedTuple):
    """An answer, which is a part of the context, and the index of its first character there."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context. Without answers, the context does not answer the question."""

    name: str
    question: str
    context: str
    answers: tuple[Answer, ...]


Record = Pair | Question | str
# The kind of record that each task reads.
RECORDS: dict[str, type] = {
    "translation": Pair,
    "summarization": Pair,
    "question answering": Question,
    "language modelling": str,
    "masked language modelling": str,
    "span corruption": str,
}
PAIR_TASKS, QUESTION_TASKS, TEXT_TASKS = (
    tuple(task for task, kind in RECORDS.items() if kind is wanted)
    for wanted in (Pair, Question, str)
)


class Bad(NamedTuple):
    """A line that cannot be used."""

    file: str
    line: int
    why: str


@dataclass
class Report:
    """The number of records read, and the bad lines."""

    read: int = 0
    bad: list[Bad] = field(default_factory=list)
    place: tuple[str, int] = ("", 0)  # file and line of the latest record

    def accept(self, file: Path | str, line: int) -> None:
        self.read, self.place = self.read + 1, (str(file), line)

    def refuse(self, file: Path | str, line: int, why: str) -> None:
        self.bad.append(Bad(str(file), line, why))

    def check(self, most: float, part: str = "train") -> None:
        """Raise InputError if more than the share ``most`` of all lines is bad."""
        total = self.read + len(self.bad)
        if not self.read:
            raise InputError(f"There is no text in data.{part}. {self}")
        if len(self.bad) > most * total:
            raise InputError(
                f"{len(self.bad) / total:.2%} of the lines are bad; at most {most:.2%} are "
                f"accepted (data.max_bad_share). {self}"
            )

    def __str__(self) -> str:
        shown = 5
        text = f"{self.read:,} read, {len(self.bad):,} bad"
        if self.bad:
            kinds = Counter(bad.why for bad in self.bad)
            text += ": " + ", ".join(f"{count:,} {why}" for why, count in kinds.most_common())
            text += "; " + ", ".join(f"{bad.file}:{bad.line}" for bad in self.bad[:shown])
            text += " ..." if len(self.bad) > shown else ""
        return text + "."
