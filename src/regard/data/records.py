"""What a data file holds: pairs, questions or texts, and a report of bad lines."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from regard.errors import InputError


class Pair(NamedTuple):
    """A text and what it is to become; more than one target only where it is evaluated."""

    source: str
    targets: tuple[str, ...]


class Answer(NamedTuple):
    """A part of a context, and the place of its first character there."""

    text: str
    start: int


class Question(NamedTuple):
    """A question about a context; without answers, the context does not answer it."""

    name: str
    question: str
    context: str
    answers: tuple[Answer, ...]


Record = Pair | Question | str


class Bad(NamedTuple):
    """A line that could not be used."""

    file: str
    line: int
    why: str


@dataclass
class Report:
    """How much was read, and every line that could not be used."""

    read: int = 0
    bad: list[Bad] = field(default_factory=list)
    place: tuple[str, int] = ("", 0)  # file and line of the record that was read last

    def accept(self, file: Path | str, line: int) -> None:
        self.read, self.place = self.read + 1, (str(file), line)

    def refuse(self, file: Path | str, line: int, why: str) -> None:
        self.bad.append(Bad(str(file), line, why))

    def check(self, most: float, part: str = "train") -> None:
        """Raise InputError where more than the share ``most`` of all lines could not be used."""
        total = self.read + len(self.bad)
        if not self.read:
            raise InputError(f"There is no text in data.{part}. {self}")
        if len(self.bad) > most * total:
            raise InputError(
                f"{len(self.bad) / total:.2%} of the lines are bad; at most {most:.2%} are "
                f"accepted (data.bad). {self}"
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
