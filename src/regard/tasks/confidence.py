"""How far a result can be trusted: a probability that it is acceptable, and reasons against it.

The probability is a logistic function of the model's score and, for a translation, of how
improbable the source is given the translation. Its numbers are in the model's config.json, fitted
on held-out text; the cards say on which, and how well they tell good from bad.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from regard.errors import CheckpointError
from regard.models.bundle import Bundle
from regard.text.copied import invented_numbers, missing, only_copied, other_letters
from regard.text.languages import TOLD_APART, language_name, language_of, same_language
from regard.text.prose import is_whole, points_back
from regard.text.words import plain_letters, sentences

THRESHOLD = 0.5  # a result of a lower confidence is shown as doubtful
FLAGGED = 0.4  # the factor of the confidence if there is a reason against a result
SAME_BEGINNING = 5  # letters that tell a name of a question in a context
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")
_LETTERS = re.compile(r"[^\W_]+")
# Three equal words in a row, or two equal runs of two or three words.
_REPEATED = re.compile(r"\b(\w+)\b(?:\W+\1\b){2,}|\b(\w+\b(?:\W+\w+\b){1,2})\W+\2\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Trust:
    """The confidence in a result, from 0 to 1, and the reasons against it."""

    confidence: float
    reasons: tuple[str, ...] = ()


def chance(
    bundle: Bundle, task: str, score: float, otherwise: float, surprise: float | None = None
) -> float:
    """The probability that a result is acceptable; ``otherwise`` without a calibration.

    ``surprise`` is how improbable the source of a translation is given the translation, if the
    model has a calibration for that.
    """
    numbers = calibration(bundle, task)
    if not numbers:
        return otherwise
    if surprise is not None:
        numbers = numbers["reversed"]
    logit = numbers["bias"] + numbers["scale"] * score
    if surprise is not None:
        logit += numbers["surprise"] * math.sqrt(surprise)
    return _logistic(logit)


def chance_of_no_answer(bundle: Bundle, task: str, score: float, otherwise: float) -> float:
    """The probability that a question has no answer; ``otherwise`` without a calibration."""
    numbers = calibration(bundle, task).get("unanswered")
    return otherwise if numbers is None else _logistic(numbers["bias"] + numbers["scale"] * score)


def _logistic(logit: float) -> float:
    return 1 / (1 + math.exp(-max(min(logit, 30.0), -30.0)))


def calibration(bundle: Bundle, task: str) -> Mapping[str, Any]:
    """The numbers in a model's config.json that turn a score into a probability, if it has any.

    ``reversed`` in them has those for the score and the surprise of a source, and ``unanswered``
    those for the probability that a question has no answer.
    """
    given: Any = bundle.tasks.get(task, {}).get("confidence")
    if given is None:
        return {}
    _check_numbers(bundle, given, "bias", "scale")
    if "reversed" in given:
        _check_numbers(bundle, given["reversed"], "bias", "scale", "surprise")
    if "unanswered" in given:
        _check_numbers(bundle, given["unanswered"], "bias", "scale")
    return cast("Mapping[str, Any]", given)


def _check_numbers(bundle: Bundle, given: object, *names: str) -> None:
    """Raise CheckpointError if a calibration lacks one of its numbers."""
    numeric = isinstance(given, Mapping) and all(
        isinstance(given.get(name), int | float) for name in names
    )
    if numeric:
        return
    raise CheckpointError(
        f"{bundle.name}: confidence = {given!r} does not have the numbers "
        f"{', '.join(names[:-1])} and {names[-1]}."
    )


def own_threshold(bundle: Bundle, task: str) -> float:
    """The score that an answer of a model must exceed, as its config.json says; 0 by default."""
    threshold = bundle.tasks.get(task, {}).get("threshold", 0.0)
    if not isinstance(threshold, int | float) or not math.isfinite(threshold):
        raise CheckpointError(f"{bundle.name}: threshold = {threshold!r} is not a number.")
    return float(threshold)


def trust(chance: float, doubts: Iterable[str] = (), unsure: Sequence[str] = ()) -> Trust:
    """The trust in a result of this probability, with other reasons against it.

    ``unsure`` are the words of a source that its translation may lack: the reason for a low
    probability.

    >>> trust(0.9, ["'12' is missing"])
    Trust(confidence=0.36000000000000004, reasons=("'12' is missing",))
    """
    found = tuple(doubts)
    confidence = chance * (FLAGGED if found else 1.0)
    if chance >= THRESHOLD:
        return Trust(confidence, found)
    low = f"not sure of {', '.join(map(repr, unsure))}" if unsure else "low probability"
    return Trust(confidence, (low, *found))


def weakest(found: Sequence[Trust]) -> Trust:
    """The trust in a text: the confidence of its weakest part, and the reasons of all parts."""
    reasons = dict.fromkeys(reason for each in found for reason in each.reasons)
    return Trust(min((each.confidence for each in found), default=1.0), tuple(reasons))


# ------------------------------------------------------------------------------------- reasons


def doubts_about_copy(text: str) -> Iterator[str]:
    """Reasons against a text that was copied instead of translated."""
    if other_letters(text):
        yield "a text in another script was copied, not translated"
    elif not only_copied(text):
        yield f"a word of {len(text)} characters was copied, not translated"


def doubts_about_translation(source: str, text: str, language: str | None) -> Iterator[str]:
    """Reasons against a translation into ``language``, if that is known."""
    for string in missing(source, text):
        yield f"{string!r} is missing"
    for number in dict.fromkeys(invented_numbers(source, text)):
        yield f"the number {number} is not in the source"
    told = [code for code in TOLD_APART if language is not None and same_language(code, language)]
    if told:
        if other_letters(text) - other_letters(source):
            yield "it has letters of another script"
        found = language_of(text)
        if found not in (None, *told):
            yield f"it seems to be in {language_name(found or '')}"
    before, after = _WORD.findall(source.lower()), _WORD.findall(text.lower())
    if len(before) > 2 and before == after:
        yield "it is the source"
    if len(after) * 3 < len(before) or len(after) > 3 * len(before) + 5:
        yield f"it has {len(after)} words, the source {len(before)}"
    yield from doubts_about_repeats(text, source)


def doubts_about_repeats(text: str, source: str = "") -> Iterator[str]:
    """Reasons against a text that repeats words, unless its source does."""
    match = _REPEATED.search(text)
    if match and not _REPEATED.search(source):
        yield f"it repeats {match[1] or match[2]!r}"


def doubts_about_answer(question: str, context: str, start: int) -> Iterator[str]:
    """Reasons against an answer at ``start``: names of the question that are not near it.

    Near are its sentence and the one before. A name is a number, or a word with one capital, and is
    found by its first letters.

    >>> text = "It lies by the sea. Ann is the mayor. Amsterdam is far away."
    >>> list(doubts_about_answer("Who is the mayor of Amsterdam?", text, text.index("Ann")))
    ["the question's 'Amsterdam' is not near the answer"]
    """
    spans = sentences(context)
    at = max((row for row, span in enumerate(spans) if span.start <= start), default=0)
    near = context[spans[max(at - 1, 0)].start : spans[at].end]
    known = {_beginning(word) for word in _LETTERS.findall(near)}
    for name in dict.fromkeys(_LETTERS.findall(question)[1:]):
        named = name.isdigit() or (name[0].isupper() and not name.isupper())
        if named and _beginning(name) not in known:
            yield f"the question's {name!r} is not near the answer"


def _beginning(word: str) -> str:
    return plain_letters(word)[:SAME_BEGINNING]


def doubts_about_extract(text: str, after_gap: Iterable[str]) -> Iterator[str]:
    """Reasons against sentences of a document as its summary.

    ``after_gap`` are those whose sentence before is left out.
    """
    if not is_whole(text):
        yield "it does not end like a sentence"
    letters, other = [each for each in text if each.isalpha()], other_letters(text)
    if sum(each in other for each in letters) * 2 > len(letters):
        yield "it is in a script that the model does not know"
    for sentence in after_gap:
        if word := points_back(sentence):
            yield f"{word!r} may point to a sentence that is left out"


def doubts_about_summary(document: str, text: str) -> Iterator[str]:
    """Reasons against a summary: numbers and names that its document does not have, repeats."""
    for number in dict.fromkeys(invented_numbers(document, text)):
        yield f"the number {number} is not in the document"
    known = {word.lower() for word in _WORD.findall(document)}
    for word in dict.fromkeys(_WORD.findall(text)[1:]):
        if word[0].isupper() and word.lower() not in known:
            yield f"the name {word!r} is not in the document"
    yield from doubts_about_repeats(text, document)
