"""The acceptance set: inputs as users have them, and the rules that a result must meet.

Each line of a file is an input with its rules:

- ``copy``: strings that must be in a translation; a list is a choice of spellings.
- ``fr``, ``de``, ``en``: words that must be in the result, as groups separated by spaces. Of a
  group such as ``bus|autobus`` one is enough. A word stands for all words that begin with it, and
  with ``*`` before it for all that contain it; ``_`` is a space.
- ``capitals``: the translation must be in capitals, too.
- ``numbers``: numbers that a translation may have although its source does not.
- ``answers``: the accepted answers, without articles; none if the context has no answer.

``python tests/acceptance/judge.py [FOLDER]`` judges the shipped models, with the files of this
folder or of another one.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from regard import answer, summarize, translate
from regard.errors import InputError
from regard.tasks.records import Record
from regard.text.languages import language_of

HERE = Path(__file__).parent
MIN_SUMMARY_WORDS = 5
MAX_STRANGE = 0.2  # of the words of a summary: those that begin like no word of the document
STEM = 4  # letters of a word that must agree
MAX_SUMMARY = 0.6  # of the characters of a document
REPEATED = 3  # times that the same three words must not occur, unless the source repeats them
MAX_GROWTH = 2.5  # the length of a translation, as a multiple of the length of its source
SPARE = 20  # characters that a translation may be longer than that

Row = dict[str, Any]


# --------------------------------------------------------------------------------------- rules


def lost_strings(row: Row, output: str) -> list[str]:
    """The strings to copy that the output does not have, each by its first spelling."""
    lost = []
    output = re.sub("[\u00a0\u202f]", " ", output)
    for choice in row.get("copy", []):
        spellings = [choice] if isinstance(choice, str) else choice
        found = next((match for s in spellings if (match := _found(s, output))), None)
        if found is None:
            lost.append(spellings[0])
        else:  # another copy of an equal string must be found elsewhere
            output = f"{output[: found.start()]}\n{output[found.end() :]}"
    return lost


def _found(string: str, text: str) -> re.Match[str] | None:
    before = r"(?<![\d])" if string[0].isdigit() else ""
    after = r"(?!\d)" if string[-1].isdigit() else ""
    return re.search(before + re.escape(string) + after, text)


def missing_words(groups: str, output: str) -> list[str]:
    """The groups of words of which the output has none."""
    return [group for group in groups.split() if not any(_has(w, output) for w in group.split("|"))]


def _has(word: str, text: str) -> bool:
    start = "" if word.startswith("*") else r"(?<!\w)"
    pattern = start + re.escape(word.removeprefix("*").replace("_", " "))
    return re.search(pattern, text, re.IGNORECASE) is not None


def invented_numbers(row: Row, source: str, output: str) -> list[str]:
    """The numbers of the output that are not in its source; thousands may be written anyhow."""
    known = {*_numbers(source), *row.get("numbers", [])}
    return [number for number in _numbers(output) if number not in known]


def _numbers(text: str) -> list[str]:
    joined = re.sub("(?<=\\d)[ .,'\u00a0\u202f](?=\\d{3}(?!\\d))", "", text)
    return re.findall(r"\d+", joined)


def repeats(source: str, output: str) -> list[str]:
    """The sequences of three words that the output repeats, and words three times in a row."""
    counts = [Counter(zip(w, w[1:], w[2:], strict=False)) for w in map(_words, (source, output))]
    return [
        " ".join(three)
        for three, count in counts[1].items()
        if count >= REPEATED > counts[0][three] or (len(set(three)) == 1 and not counts[0][three])
    ]


def _words(text: str) -> list[str]:
    return re.findall(r"[\w']+", text.casefold())


def judge_translation(row: Row, to: str, output: str) -> list[str]:
    """The rules that a translation breaks; empty if it passes."""
    source, broken = row["text"], []
    if row.get("capitals") and output != output.upper():
        broken.append("not in capitals")
    broken += [f"lost {string!r}" for string in lost_strings(row, output)]
    broken += [f"without {group}" for group in missing_words(row.get(to, ""), output)]
    broken += [f"invented {number}" for number in invented_numbers(row, source, output)]
    broken += [f"repeats {three!r}" for three in repeats(source, output)]
    if language_of(output) not in (None, to):
        broken.append(f"in the language {language_of(output)}")
    if re.findall(r"[\t\n]", output) != re.findall(r"[\t\n]", source):
        broken.append("other tabs or line breaks")
    if len(output) > MAX_GROWTH * len(source) + SPARE:
        broken.append("too long")
    return broken


def judge_summary(row: Row, output: str) -> list[str]:
    """The rules that a summary breaks; empty if it passes."""
    source, broken = row["text"], []
    words = len(_words(output))
    if words < MIN_SUMMARY_WORDS:
        broken.append(f"only {words} words")
    if len(output) > MAX_SUMMARY * len(source):
        broken.append("too long")
    broken += [f"without {group}" for group in missing_words(row["en"], output)]
    broken += [f"invented {number}" for number in invented_numbers(row, source, output)]
    broken += [f"invented the name {name}" for name in invented_names(source, output)]
    if len(strange := strange_words(source, output)) > MAX_STRANGE * words:
        broken.append(f"invented {' '.join(strange)}")
    broken += [f"repeats {three!r}" for three in repeats(source, output)]
    return broken


def strange_words(source: str, output: str) -> list[str]:
    """The longer words of the output that begin like no word of the source."""
    known = {word[:STEM] for word in _words(source)}
    return [word for word in _words(output) if len(word) >= STEM and word[:STEM] not in known]


def invented_names(source: str, output: str) -> list[str]:
    """The words in the middle of a sentence of the output that only there have a capital letter."""
    known = set(_words(source))
    inner = re.findall(r"(?<=[\w,;:] )([A-Z][\w']+)", output)
    return [name for name in inner if name.casefold() not in known]


def judge_answer(row: Row, output: str) -> list[str]:
    """The rules that an answer breaks; empty if it passes. An empty output is no answer."""
    if not row["answers"]:
        return [f"answered {output!r}, but there is no answer"] if output else []
    if not output:
        return ["no answer"]
    if output not in row["context"]:
        return ["not in the context"]
    accepted = [_plain(each) for each in row["answers"]]
    return [] if _plain(output) in accepted else [f"not {' or '.join(row['answers'])}"]


def _plain(text: str) -> str:
    text = re.sub(r"^(a|an|the)\s|^\W+|\W+$", "", text.strip().casefold())
    return " ".join(text.split())


# ------------------------------------------------------------------------------------- the run


@dataclass
class Count:
    """What the judge found for the inputs of a task."""

    inputs: int = 0
    passed: int = 0
    copied: int = 0  # strings to copy
    survived: int = 0
    # For results that pass and for those that fail: whether each has a low confidence.
    flagged: dict[bool, list[bool]] = field(default_factory=lambda: {True: [], False: []})
    failures: list[str] = field(default_factory=list)

    def add(self, row: Row, record: Record, broken: Sequence[str]) -> None:
        """Count a result, and the rules that it breaks."""
        self._count(row, record.text, broken, f" [confidence {record.confidence:.2f}]")
        self.flagged[not broken].append(record.doubtful)

    def refuse(self, row: Row, error: InputError) -> None:
        """Count an input that the task refuses; it has no confidence."""
        self._count(row, "", [f"refused: {error}"], "")

    def _count(self, row: Row, output: str, broken: Sequence[str], sure: str) -> None:
        passed = not broken
        self.inputs += 1
        self.passed += passed
        self.copied += len(row.get("copy", []))
        self.survived += len(row.get("copy", [])) - len(lost_strings(row, output))
        if broken:
            told = row.get("question", row.get("text"))
            self.failures.append(f"{told!r} -> {output!r}{sure}: {', '.join(broken)}")

    def cells(self) -> tuple[str, ...]:
        return (
            f"{self.passed} of {self.inputs}",
            _share(self.survived, self.copied),
            _share(sum(self.flagged[False]), len(self.flagged[False])),
            _share(sum(self.flagged[True]), len(self.flagged[True])),
        )


def _share(part: int, whole: int) -> str:
    return f"{part} of {whole}" if whole else "-"


Judge = Callable[[Row, str], list[str]]
Run = Callable[[Row], Record]


def _into(to: str) -> tuple[Run, Judge]:
    return (
        lambda row: translate(row["text"], to, attended=False),
        lambda row, output: judge_translation(row, to, output),
    )


# Each task with its file, and how it is run and judged.
TASKS: dict[str, tuple[str, Run, Judge]] = {
    "English to French": ("from-english", *_into("fr")),
    "English to German": ("from-english", *_into("de")),
    "into English": ("into-english", *_into("en")),
    "summaries": ("summaries", lambda row: summarize(row["text"], attended=False), judge_summary),
    "answers": (
        "answers",
        lambda row: answer(row["question"], row["context"], attended=False),
        judge_answer,
    ),
}


def rows(folder: Path, name: str) -> Iterator[Row]:
    """The inputs of a file."""
    for line in (folder / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        yield json.loads(line)


def count(folder: Path, task: str) -> Count:
    """Run a task on its inputs, one by one as a user does, and judge the results."""
    name, run, judge = TASKS[task]
    result = Count()
    for row in rows(folder, name):
        try:
            record = run(row)
        except InputError as error:
            result.refuse(row, error)
        else:
            result.add(row, record, judge(row, record.text))
    return result


def main(words: Sequence[str]) -> None:
    """Judge the shipped models, and print a table."""
    parser = argparse.ArgumentParser(description="Judge the shipped models by rules.")
    parser.add_argument("folder", nargs="?", type=Path, default=HERE, help="of the JSONL files")
    parser.add_argument("--failures", action="store_true", help="print what failed, and why")
    parser.add_argument("--task", choices=TASKS, action="append", help="run only this task")
    given = parser.parse_args(words)
    lines = [("", "passed", "copied strings", "failures flagged", "passes flagged")]
    for task in given.task or TASKS:
        found = count(given.folder, task)
        lines.append((task, *found.cells()))
        if given.failures:
            print(f"{task}:", *found.failures, sep="\n  ", flush=True)
    for line in lines:
        print("  ".join(cell.ljust(17) for cell in line).rstrip())


if __name__ == "__main__":
    main(sys.argv[1:])
