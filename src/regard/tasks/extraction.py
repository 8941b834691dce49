"""Choose the sentences of a document that say most: those that the other sentences attend to.

The score of a sentence is the attention weight that the other sentences give to it in the last
layer of an encoder. It is divided by the square root of the sentence's length. The first sentences
count more, and those that point back count less; the first sentence of a short document is always
chosen. docs/log.md says what else was tried.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from itertools import chain
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from regard.interpret.pooling import join
from regard.interpret.watching import watch
from regard.mechanism.seeing import See
from regard.models.bundle import Bundle
from regard.models.model import AttentionLayer, EncoderDecoder, pad
from regard.tasks.confidence import doubts_about_extract, trust
from regard.tasks.records import Sentence, Summary, WordAttention
from regard.tasks.writing import Check, no_check
from regard.text.prose import count_words, is_courtesy, is_whole, points_back, prose_sentences
from regard.text.words import Span

SHARE = 1 / 3  # by default, this share of the sentences is chosen
MOST = 3  # the largest number of sentences that are chosen by default
SHORT = 4  # the most sentences of a document whose first sentence is always chosen
MIN_WORDS = 5  # a shorter sentence is not chosen, if there are others
FIRST = 6.0  # how much more the first sentence counts; the second half as much, and so on
POINTING = 0.7  # how much a sentence counts that points to an earlier one
KEPT = 1 / 3  # the share of each part's sentences that is read again, if there are several parts
MOST_KEPT = 2 / 3  # nothing is read again if a larger share would be kept, as many are wanted
CHANCE = 0.9  # the probability that a summary is acceptable; it does not depend on the scores
TOO_EQUAL = 0.7  # the share of common words at which a sentence repeats another


def extract(
    bundle: Bundle,
    task: str,
    texts: Sequence[str],
    *,
    sentences: int | None,
    words: int | None,
    batch: int,
    attended: bool,
    check: Check | None,
) -> list[Summary]:
    """Summarize each document with some of its sentences."""
    began, check = perf_counter(), check or no_check
    prefix = bundle.tokenizer.encode(bundle.prefix(task), special=False).ids
    room = bundle.window - len(prefix) - 1
    documents = [_Document(bundle, text, sentences) for text in texts]
    active = [document for document in documents if len(document.units) > 1]
    while active:
        # The parts of all documents go through the model together.
        parts = [(document, part) for document in active for part in document.parts(room)]
        for low in range(0, len(parts), batch):
            check()
            some = parts[low : low + batch]
            rows = [[document.ids[at] for at in part] for document, part in some]
            tables = _weights(bundle, prefix, rows)
            for (document, part), table in zip(some, tables, strict=True):
                document.note(part, table)
        active = [document for document in active if document.shorten()]
    seconds = (perf_counter() - began) / max(len(documents), 1)
    where = _where(bundle)
    return [
        _record(bundle, document, words, seconds, where if attended else None)
        for document in documents
    ]


class _Document:
    """A document's sentences, and their scores where they were read last."""

    def __init__(self, bundle: Bundle, text: str, wanted: int | None) -> None:
        self.text = text
        self.units = prose_sentences(text)
        encode, window = bundle.tokenizer.encode, bundle.window
        # The end of a sentence that is longer than the model's input is not read.
        self.ids = [
            encode(" ".join(text[low:high].split()), special=False).ids[: window // 2]
            for low, high in self.units
        ]
        self.tokens = sum(map(len, self.ids))
        self.able = self._able()
        self.rank = {at: rank for rank, at in enumerate(self.able)}
        self.wanted = wanted or max(1, min(MOST, round(SHARE * len(self.able))))
        self.active = list(range(len(self.units)))  # the sentences to read in this round
        self.received = [1.0] * len(self.units)
        self.read: list[tuple[list[int], Tensor]] = []  # the parts of this round

    def _able(self) -> list[int]:
        """The sentences that can be chosen: whole ones, or else lines of a few words, or all."""
        said = [self.text[low:high] for low, high in self.units]
        long = [at for at, each in enumerate(said) if count_words(each) >= MIN_WORDS]
        whole = [at for at in long if is_whole(said[at])]
        news = [at for at in whole if not is_courtesy(said[at])]
        return news or whole or long or list(range(len(said)))

    def parts(self, room: int) -> Iterator[list[int]]:
        """The sentences of this round, in parts that fit the model."""
        self.read, part, filled = [], list[int](), 0
        for at in self.active:
            if part and filled + len(self.ids[at]) > room:
                yield part
                part, filled = [], 0
            part.append(at)
            filled += len(self.ids[at])
        yield part

    def note(self, part: list[int], table: Tensor) -> None:
        """Score the sentences of a part from the weights between them, [sentences, sentences]."""
        self.read.append((part, table))
        lengths = torch.tensor([float(max(len(self.ids[at]), 1)) for at in part])
        received = lengths @ table.clone().fill_diagonal_(0) / lengths.sqrt()
        relative = received / received.mean().clamp(min=1e-9)
        for at, weight in zip(part, relative.tolist(), strict=True):
            self.received[at] = weight if len(part) > 1 else 1.0

    def shorten(self) -> bool:
        """Keep the best sentences of each part, if there are several parts and enough sentences."""
        if len(self.read) < 2:
            return False
        share = max(KEPT, self.wanted / len(self.able))
        kept: list[int] = []
        for part, _ in self.read:
            ranked = self.ranked(part)
            kept += sorted(ranked[: math.ceil(share * len(ranked))])
        if len(kept) > MOST_KEPT * len(self.active):
            return False
        self.active = kept
        return True

    def ranked(self, units: Sequence[int]) -> list[int]:
        """Those of some sentences that can be chosen, the best first.

        The first sentence of a short document introduces what the others say, so it comes first.
        """
        short = len(self.able) <= SHORT
        return sorted(
            (at for at in units if at in self.rank),
            key=lambda at: (not short or self.rank[at] > 0, -self.score(at), at),
        )

    def score(self, at: int) -> float:
        """The score of a sentence; that of an average sentence far from the start is 1."""
        if at not in self.rank:
            return self.received[at]
        early = 1 + FIRST / (1 + self.rank[at])
        back = POINTING if self.rank[at] and points_back(self.said(at)) else 1.0
        return self.received[at] * early * back

    def chosen(self, words: int | None) -> list[int]:
        """The best sentences, in the order of the text: ``wanted`` of them, or up to ``words``.

        A sentence that repeats another one is left out. There are at least :data:`MIN_WORDS` words,
        if the document has as many.
        """
        found: list[int] = []
        filled = 0
        for at in self.ranked(self.active):
            said = self.said(at)
            count = count_words(said)
            if words is None:
                if len(found) >= self.wanted and filled >= MIN_WORDS:
                    break
            elif found and filled + count > words:
                continue
            if not any(_repeats(said, self.said(other)) for other in found):
                found.append(at)
                filled += count
        return sorted(found)

    def said(self, at: int) -> str:
        """A sentence on one line."""
        return " ".join(self.text[slice(*self.units[at])].split())

    def table(self, chosen: Sequence[int]) -> Tensor:
        """The weights of all sentences on the chosen ones; 0 where they were not read together."""
        result = torch.zeros(len(self.units), len(chosen))
        for part, table in self.read:
            place = {at: row for row, at in enumerate(part)}
            for column, at in enumerate(chosen):
                if at in place:
                    result[part, column] = table[:, place[at]]
        return result


def _record(
    bundle: Bundle, document: _Document, words: int | None, seconds: float, where: str | None
) -> Summary:
    chosen = document.chosen(words)
    text, spans = _joined([document.said(at) for at in chosen])
    after_gap = [document.said(at) for at in chosen if document.rank[at] and at - 1 not in chosen]
    trusted = trust(CHANCE, doubts_about_extract(text, after_gap))
    return Summary(
        text=text,
        score=sum(map(document.score, chosen)) / len(chosen),
        tokens=document.tokens,
        seconds=seconds,
        model=bundle.name,
        confidence=trusted.confidence,
        reasons=trusted.reasons,
        attended=None
        if where is None or not document.read
        else WordAttention.of(
            (document.text, document.units),
            (text, spans),
            document.table(chosen),
            where,
            ("document", "summary"),
        ),
        method="extracted",
        sentences=tuple(
            Sentence(start=low, end=high, score=document.score(at), chosen=at in chosen)
            for at, (low, high) in enumerate(document.units)
        ),
    )


def _joined(sentences: Sequence[str]) -> tuple[str, list[Span]]:
    """Sentences as one text, and their places; a line break follows what does not end itself."""
    text, spans = "", list[Span]()
    for sentence in sentences:
        if text:
            text += " " if is_whole(text) else "\n"
        spans.append(Span(len(text), len(text) + len(sentence)))
        text += sentence
    return text, spans


def _repeats(sentence: str, other: str) -> bool:
    """Whether two sentences have most of their words in common."""
    one, two = (set(re.findall(r"\w+", each.casefold())) for each in (sentence, other))
    return len(one & two) > TOO_EQUAL * max(len(one | two), 1)


def _where(bundle: Bundle) -> str:
    layer = _last_layer(bundle)
    return f"The mean over the {layer.module.heads} heads of encoder layer {layer.number}"


def _last_layer(bundle: Bundle) -> AttentionLayer:
    layers = bundle.model.attention_layers()
    return [layer for layer in layers if layer.half == "encoder"][-1]


def _weights(
    bundle: Bundle, prefix: Sequence[int], rows: Sequence[Sequence[Sequence[int]]]
) -> Iterator[Tensor]:
    """The weights between the sentences of each row, [sentences, sentences], as the encoder reads.

    Each sentence is given by its ids.
    """
    model = bundle.model
    assert isinstance(model, EncoderDecoder)
    end = [] if model.config.end_token is None else [model.config.end_token]
    sources = [[*prefix, *chain.from_iterable(row), *end] for row in rows]
    ids, padding = pad(sources, 0, "right", model.config.vocabulary, model.device)
    last = nn.ModuleList([_last_layer(bundle).module])
    with torch.inference_mode(), watch(last, See(weights=True)) as watched:
        model.encode(ids, padding=padding)
    [(_, seen)] = watched.calls
    assert seen.weights is not None
    for row, weights in zip(rows, seen.weights.float().mean(1).cpu(), strict=True):
        owner = [at for at, unit in enumerate(row) for _ in unit]
        units = one_hot(torch.tensor(owner), len(row)).float()
        inside = slice(len(prefix), len(prefix) + len(owner))
        yield join(weights[inside, inside], units, units)
