"""Translation sentence by sentence, with the words of each sentence aligned.

A sentence whose translation lacks a string that has to be copied is translated again with
placeholders (``segments.py``). A model that also translates back says how much of the source the
translation carries (``reverse.py``). A name that is lost is translated again with a placeholder,
too.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from regard.decoding.settings import Asked
from regard.errors import CheckpointError, InputError
from regard.models.bundle import Bundle, Name, Precision
from regard.tasks.attended import CrossWeights, align, read_weights
from regard.tasks.confidence import (
    Trust,
    calibration,
    chance,
    doubts_about_copy,
    doubts_about_translation,
    trust,
    weakest,
)
from regard.tasks.defaults import open_model
from regard.tasks.records import Translation
from regard.tasks.reverse import Reversal, Surprise, surprises, tag_prefix
from regard.tasks.segments import Segment, continued, lost_names, parts, pieces, plain, protected
from regard.tasks.writing import Check, Written, encode, one_or_many, write
from regard.text.copied import missing, only_copied
from regard.text.languages import (
    has_capital_nouns,
    is_frequent,
    language_name,
    language_of,
    language_tags,
    same_language,
)
from regard.text.words import Span, words

TASK = "translation"  # the task's name in a recipe
SHORT_WORD = 3  # letters; such a word in capitals is an acronym unless it is very frequent


@one_or_many
def translate(
    texts: list[str],
    to: str | None = None,
    *,
    source: str | None = None,
    model: Name = "translate",
    how: Asked | None = None,
    max_new_tokens: int | None = None,
    batch: int = 32,
    attended: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
    check: Check | None = None,
) -> list[Translation]:
    """Translate a text, or each text of a list, sentence by sentence.

    ``to`` is the target language ("fr", "fra" or "french"), for a model with several target
    languages. ``source`` is the source language, for a T5 with several; otherwise it is told from
    the text, and a direction that the model was not trained on is an error. ``model`` is a
    Transformer (Marian, opus-mt) or a T5. White space stays as it is, and numbers, addresses, code,
    tags, emoji and other scripts are copied. An empty text in a list stays empty. ``attended``
    aligns the words. :mod:`regard.tasks` describes the other options.

    >>> record = translate("The cat sat on the mat.", "fr")
    >>> record.text.split()[:2], record.attended.keys[:2]
    (['Le', 'chat'], ('The', 'cat'))
    """
    bundle = open_model(model, "translate", device, precision)
    prefix, language, task = _prefix(bundle, to, source)
    how, max_new_tokens = bundle.settings(task).resolve(how, max_new_tokens)
    for number, text in enumerate(texts, 1):
        _check_source(bundle, language, source, text, f"Text {number}" if len(texts) > 1 else "")
    ordinary = partial(_ordinary, bundle)
    limit = _longest_source(bundle)

    def segment(text: str) -> Segment:
        return plain(bundle.prepared(text, TASK), ordinary)

    def fits(part: Segment) -> bool:
        return len(encode(bundle, prefix + part.read)) <= limit

    cut, translated = list[list[Span]](), list[list[_Piece]]()
    for text in texts:
        back = _languages_back(bundle, text, source, language)
        divided = [parts(text, span, lambda part: fits(segment(part))) for span in pieces(text)]
        cut.append([span for spans in divided for span in spans])
        translated.append(
            [
                _Piece(segment(text[low:high]), parts=len(spans), back=back)
                for spans in divided
                for low, high in spans
            ]
        )
    # A piece without words is copied, so the model does not read it, nor a word that is too long.
    read = [
        each
        for own in translated
        for each in own
        if not only_copied(each.segment.text) and fits(each.segment)
    ]

    def written_for(segments: Sequence[Segment]) -> list[Written]:
        return write(bundle, [prefix + s.read for s in segments], how, max_new_tokens, batch, check)

    for each, written in zip(read, written_for([each.segment for each in read]), strict=True):
        each.written = written

    def tried(shielded: Sequence[tuple[_Piece, Segment]]) -> list[tuple[_Piece, _Piece]]:
        """Each piece with its translation by placeholders, if that has all of them."""
        short = [(each, segment) for each, segment in shielded if fits(segment)]
        found = zip(short, written_for([segment for _, segment in short]), strict=True)
        return [
            (each, replace(each, segment=segment, written=written))
            for (each, segment), written in found
            if segment.all_held(written.text)
        ]

    lost = [(each, protected(each.segment.text)) for each in read if each.lost]
    for each, other in tried(lost):
        each.segment, each.written = other.segment, other.written
    _reverse(bundle, read, batch, check)
    unnamed = [
        (each, protected(each.segment.text, names)) for each in read if (names := each.lost_names)
    ]
    named = tried(unnamed)
    _reverse(bundle, [other for _, other in named], batch, check)
    for each, other in named:
        if _trust(bundle, other, language).confidence > _trust(bundle, each, language).confidence:
            each.segment, each.written, each.surprise = other.segment, other.written, other.surprise
    seen = [each for each in read if attended or each.segment.stressed]
    sources = [each.segment.read for each in seen]
    outputs = [each.written for each in seen if each.written is not None]
    weights = read_weights(bundle, prefix, sources, outputs, batch, check)
    for each, found in zip(seen, weights, strict=True):
        each.weights = found
    records = []
    for text, spans, own in zip(texts, cut, translated, strict=True):
        if check is not None:
            check()
        outputs = [each.written for each in own if each.written is not None]
        tokens = sum(written.tokens for written in outputs)
        trusted = weakest([_trust(bundle, each, language) for each in own])
        aligned = [each for each in own if attended and each.weights is not None]
        records.append(
            Translation(
                text=_joined(text, spans, [each.text for each in own]),
                score=sum(written.log_probability for written in outputs) / max(tokens, 1),
                tokens=tokens,
                seconds=sum((written.seconds for written in outputs), 0.0),
                model=bundle.name,
                confidence=trusted.confidence,
                reasons=trusted.reasons,
                attended=align(
                    bundle,
                    [each.weights for each in aligned if each.weights is not None],
                    batch,
                    [each.segment.restored for each in aligned],
                ),
                source=text,
                to=language,
            )
        )
    return records


@dataclass(slots=True)
class _Piece:
    """A piece of a text and its translation; ``written`` is None if the piece is copied."""

    segment: Segment
    parts: int = 1  # of the sentence, which is cut if the model cannot read all of it at once
    back: tuple[str, ...] = ()  # the languages that the model translates back into
    written: Written | None = None
    weights: CrossWeights | None = None
    surprise: Surprise | None = None  # None if the model does not translate back

    @property
    def text(self) -> str:
        """The translation."""
        if self.written is None:
            return self.segment.text
        text = self.written.text
        for low, high in self._stressed():
            text = text[:low] + text[low:high].upper() + text[high:]
        if self.parts > 1:
            text = continued(self.segment.read, text)
        return self.segment.restored(text)

    @property
    def lost(self) -> bool:
        """Whether the translation lacks a string that has to be copied."""
        held = self.written is None or self.segment.all_held(self.written.text)
        return not held or bool(missing(self.segment.text, self.text))

    @property
    def lost_names(self) -> list[str]:
        """The names that the translation lost, where names are told by their capitals."""
        if self.written is None or self.surprise is None or self.segment.stressed:
            return []
        if has_capital_nouns(self.surprise.language):
            return []
        return lost_names(self.segment.read, self.written.text, self.surprise.unsure)

    def _stressed(self) -> list[Span]:
        """The word of the translation that attended most to each word in capitals."""
        if self.weights is None or not self.segment.stressed:
            return []
        targets = words(self.weights.written.text)
        if not targets:
            return []
        table = self.weights.pooled(targets, self.segment.stressed).mean((0, 1))
        return [targets[at] for at in table.argmax(0).tolist()]


def _trust(bundle: Bundle, piece: _Piece, language: str | None) -> Trust:
    """The trust in the translation of a piece, or in its copy."""
    source, written = piece.segment.text, piece.written
    if written is None:
        return trust(1.0, doubts_about_copy(source))
    score = written.log_probability / max(written.tokens, 1)
    doubts = list(doubts_about_translation(source, piece.text, language))
    if piece.parts > 1:
        doubts.append(f"a long sentence was cut into {piece.parts} parts")
    back = piece.surprise
    likely = chance(bundle, TASK, score, math.exp(score), None if back is None else back.total)
    unsure = () if back is None else back.unsure
    return trust(likely, doubts, [piece.segment.restored(word) for word in unsure])


def _languages_back(
    bundle: Bundle, text: str, source: str | None, language: str | None
) -> tuple[str, ...]:
    """The languages that a text may be in, if the model and its calibration know the way back."""
    if language is None or "reversed" not in calibration(bundle, TASK):
        return ()
    directions = _directions(bundle)
    back = [one for one, to in directions if to == language and (language, one) in directions]
    told = source or language_of(text)
    return tuple(one for one in back if told is not None and same_language(one, told)) or (*back,)


def _reverse(bundle: Bundle, translated: Sequence[_Piece], batch: int, check: Check | None) -> None:
    """Set the surprise of each translated piece whose model translates back."""
    pairs = [
        (each, Reversal(each.segment.read, each.written.text, each.back))
        for each in translated
        if each.written is not None and each.back
    ]
    found = surprises(bundle, [reversal for _, reversal in pairs], batch, check)
    for (each, _), surprise in zip(pairs, found, strict=True):
        each.surprise = surprise


def _ordinary(bundle: Bundle, word: str) -> bool:
    """Whether a word in capitals is no acronym: only in lower case it is a single token."""
    upper, lower = (
        len(bundle.tokenizer.encode(f" {form}", special=False).ids) for form in (word, word.lower())
    )
    return lower == 1 < upper and (len(word) > SHORT_WORD or is_frequent(word))


def _joined(text: str, spans: Sequence[Span], translations: Sequence[str]) -> str:
    """A text with the translations of its pieces."""
    result, before = "", 0
    for (low, high), translation in zip(spans, translations, strict=True):
        result += text[before:low] + translation
        before = high
    return result + text[before:]


def _longest_source(bundle: Bundle) -> int:
    """The largest number of tokens of a source: those that the model was trained on, if known."""
    longest = bundle.tasks.get(TASK, {}).get("max_source_tokens", bundle.window)
    if type(longest) is not int or longest < 8:
        raise CheckpointError(
            f"{bundle.name}: max_source_tokens = {longest!r} is not a whole number of at least 8."
        )
    return min(longest, bundle.window)


# ----------------------------------------------------------------------------------- languages


def _prefix(
    bundle: Bundle, to: str | None, source: str | None
) -> tuple[str, str | None, str | None]:
    """The prefix of each source, the model's name of the target language, and the task's name.

    The prefix of a Transformer is a language tag such as >>fra<<, the prefix of a T5 a sentence.
    """
    if bundle.model.prefixed:
        return _sentence_prefix(bundle, to, source)
    if source is not None and not _directions(bundle):
        raise InputError(
            f"{bundle.name} does not take a source language: leave out {source!r}, the language to "
            "translate from."
        )
    tags = [tag[2:-2] for tag in language_tags(bundle.tokenizer)]
    if not tags:
        if to is not None:
            raise InputError(
                f"{bundle.name} translates into one language only, and has no tag for {to!r}: "
                "leave out the language."
            )
        return "", None, None
    tag = _chosen(bundle, to, tags)
    return tag_prefix(tag), tag, None


def _directions(bundle: Bundle) -> list[tuple[str, str]]:
    """The pairs of languages that a Transformer was trained on; empty if its files do not say."""
    directions = bundle.tasks.get(TASK, {}).get("directions", [])
    try:
        return [(str(one), str(other)) for one, other in directions]
    except (TypeError, ValueError):
        raise CheckpointError(
            f"{bundle.name}: directions = {directions!r} is not a list of pairs of languages."
        ) from None


def _check_source(
    bundle: Bundle, language: str | None, source: str | None, text: str, label: str
) -> None:
    """Raise InputError if the model was not trained to translate a text into ``language``."""
    directions = _directions(bundle)
    found = source or language_of(text)
    if not directions or language is None or found is None:
        return
    if any(same_language(one, found) and other == language for one, other in directions):
        return
    names = [(language_name(one), language_name(other)) for one, other in directions]
    known = ", ".join(f"{one} to {other}" for one, other in names)
    told = f"{label or 'The text'} is in {language_name(found)}, and " if source is None else ""
    wrong = [one for one, other in directions if other == language]
    advice = (
        f" If the text is in {language_name(wrong[0])}, say so: --from {wrong[0]}, or "
        f"source={wrong[0]!r} in Python and in a request."
        if source is None
        else ""
    )
    raise InputError(
        f"{told}{bundle.name} was not trained from {language_name(found)} to "
        f"{language_name(language)}. It translates {known}.{advice}"
    )


def _sentence_prefix(
    bundle: Bundle, to: str | None, source: str | None
) -> tuple[str, str | None, str | None]:
    pairs = {
        (match[1], match[2]): key
        for key in bundle.tasks
        if (match := re.fullmatch(r"translation_(\w+?)_to_(\w+)", key))
    }
    if source is not None:
        pairs = {pair: key for pair, key in pairs.items() if same_language(pair[0], source)}
    if pairs:
        language = _chosen(bundle, to, list(dict.fromkeys(target for _, target in pairs)))
        key = next(key for (_, target), key in pairs.items() if target == language)
        return bundle.prefix(key), language, key
    if TASK not in bundle.tasks:
        origin = "" if source is None else f" from {source!r}"
        raise InputError(
            f"{bundle.name} does not translate{origin}: task_specific_params in its config.json "
            "names no such task."
        )
    if to is not None or source is not None:
        raise InputError(
            f"{bundle.name} translates from one language into one other: leave out both languages."
        )
    return bundle.prefix(TASK), None, TASK


def _chosen(bundle: Bundle, to: str | None, offered: Sequence[str]) -> str:
    """The model's name of the target language."""
    listed = ", ".join(offered)
    if to is None:
        if len(offered) == 1:
            return offered[0]
        raise InputError(
            f"{bundle.name} translates into {listed}. Choose one: --to {offered[0]}, or in Python "
            f"to={offered[0]!r}."
        )
    for name in offered:
        if same_language(name, to):
            return name
    raise InputError(f"{bundle.name} does not translate into {to!r}. It offers {listed}.")
