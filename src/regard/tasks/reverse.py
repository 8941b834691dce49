"""How much of a source its translation says: how probable the model finds the source given it.

A model that translates in both directions reads the translation and predicts each token of the
source. A word of the source that the translation lost or changed is improbable then, however fluent
the translation is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.models.bundle import Bundle
from regard.models.model import EncoderDecoder, pad
from regard.tasks.writing import Check, encode, no_check
from regard.text.copied import copied_spans
from regard.text.languages import is_frequent
from regard.text.words import Span, words

UNSURE = 5.0  # minus the log-probability of a source word; above it, the translation may lack it
MOST_WORDS = 3  # that are named


@dataclass(frozen=True, slots=True)
class Reversal:
    """A translation, its source, and the tags of the languages that the source may be in."""

    source: str
    translation: str
    languages: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Surprise:
    """How improbable a source is given its translation."""

    language: str  # of the source: the one in which it is the most probable
    total: float  # by how much the words are less probable than UNSURE, in nats
    unsure: tuple[str, ...]  # the words that the translation may lack, in their order


def tag_prefix(language: str) -> str:
    """The prefix of a source that is translated into a language, such as ">>fra<< "."""
    return f">>{language}<< "


def surprises(
    bundle: Bundle, reversals: Sequence[Reversal], batch: int, check: Check | None = None
) -> list[Surprise]:
    """The surprise of each source, in the language in which it is the most probable."""
    read = bundle.tokenizer.target.encode_all([each.source for each in reversals], special=False)
    owners = [(at, tag) for at, each in enumerate(reversals) for tag in each.languages]
    prompts = [encode(bundle, tag_prefix(tag) + reversals[at].translation) for at, tag in owners]
    targets = [read[at].ids for at, _ in owners]
    found = _log_probabilities(bundle, prompts, targets, batch, check or no_check)
    best: dict[int, tuple[str, Tensor]] = {}
    for (at, tag), likely in zip(owners, found, strict=True):
        if at not in best or likely.sum() > best[at][1].sum():
            best[at] = tag, likely
    return [
        _surprise(each.source, encoded.offsets, *best[at])
        for at, (each, encoded) in enumerate(zip(reversals, read, strict=True))
    ]


def _surprise(
    source: str, offsets: Sequence[tuple[int, int]], language: str, likely: Tensor
) -> Surprise:
    values = list(zip(offsets, (-likely).tolist(), strict=False))  # the model's window may end them
    copied = copied_spans(source)
    total, found = 0.0, list[tuple[float, Span]]()
    for span in words(source):
        word = source[span.start : span.end]
        if not word[0].isalpha() or any(_overlap(span, each) for each in copied):
            continue
        beyond = sum(value for token, value in values if _overlap(token, span)) - UNSURE
        total += max(beyond, 0.0)
        if beyond > 0 and not is_frequent(word):
            found.append((beyond, span))
    worst = sorted(span for _, span in sorted(found, reverse=True)[:MOST_WORDS])
    return Surprise(language, total, tuple(dict.fromkeys(source[low:high] for low, high in worst)))


def _overlap(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


@torch.no_grad()
def _log_probabilities(
    bundle: Bundle,
    prompts: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    batch: int,
    check: Check,
) -> list[Tensor]:
    """The log-probability of each token of a target after its prompt, up to the model's window."""
    model, window = bundle.model, bundle.window
    assert isinstance(model, EncoderDecoder)
    order = sorted(range(len(prompts)), key=lambda at: len(prompts[at]) + len(targets[at]))
    found: list[Tensor] = [torch.zeros(0)] * len(prompts)
    for first in range(0, len(order), batch):
        check()
        some = order[first : first + batch]
        read = [prompts[at][:window] for at in some]
        written = [[model.start_token, *targets[at]][:window] for at in some]
        source, padding = pad(read, 0, "right", model.config.vocabulary, model.device)
        target, _ = pad(written, 0, "right", model.output_vocabulary, model.device)
        logits = model(source, target[:, :-1], padding=padding).float()
        likely = logits.log_softmax(-1).gather(-1, target[:, 1:, None])[..., 0].cpu()
        for at, row, ids in zip(some, likely, written, strict=True):
            found[at] = row[: len(ids) - 1]
    return found
