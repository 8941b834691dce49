"""Attention weights between a source and its generated text, from another forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.interpret.pooling import overlaps, pool, shares
from regard.interpret.watched import Watched
from regard.interpret.word_alignment import (
    TextPair,
    best_head,
    cross_weights,
    log_probabilities,
    step_name,
)
from regard.models.bundle import Bundle
from regard.models.model import EncoderDecoder
from regard.tasks.records import WordAttention
from regard.tasks.writing import Check, Written, no_check
from regard.text.words import Span, spans_of, words


@dataclass(frozen=True, slots=True)
class CrossWeights:
    """A source, the text generated from it, and the cross-attention weights of every head."""

    source: str
    tokens: list[Span]  # the characters of each source token; negative for tokens of the prefix
    written: Written
    spans: list[Span]  # the characters of each generated token
    weights: Tensor  # [layers, heads, generated + 1, source tokens]; row i predicts token i

    def pooled(
        self, queries: Sequence[Span], keys: Sequence[Span], *, read: bool = False
    ) -> Tensor:
        """The weights between spans of both texts, [layers, heads, queries, keys].

        The weights of a token are those of the step that predicts the token or, with ``read``, of
        the next step, whose input is the token.
        """
        rows = self.weights[:, :, 1:] if read else self.weights[:, :, :-1]
        rows = rows[..., : len(self.tokens)]  # without the end token of the source
        return pool(rows, self.spans, queries, self.tokens, keys)


def read_weights(
    bundle: Bundle,
    prefix: str,
    sources: Sequence[str],
    written: Sequence[Written],
    batch: int,
    check: Check | None = None,
) -> Iterator[CrossWeights]:
    """The cross-attention weights of each source and its generated text, from a forward pass."""
    model, check = bundle.model, check or no_check
    assert isinstance(model, EncoderDecoder)
    all_weights = cross_weights(model, [w.source for w in written], [w.ids for w in written], batch)
    for text, item, weights in zip(sources, written, all_weights, strict=True):
        check()
        offsets = bundle.tokenizer.encode(prefix + text, special=False).offsets
        tokens = [Span(low - len(prefix), high - len(prefix)) for low, high in offsets]
        yield CrossWeights(text, tokens, item, spans_of(item.ids, bundle.decode), weights)


def align(
    bundle: Bundle,
    sentences: Sequence[CrossWeights],
    batch: int,
    shown: Sequence[Callable[[str], str]],
) -> WordAttention | None:
    """Align the words of one text's sentences, by the head that aligns them best.

    ``shown`` has, for each sentence, how its words are shown.
    """
    model = bundle.model
    assert isinstance(model, EncoderDecoder)
    found = [
        (item, words(item.written.text), words(item.source), show)
        for item, show in zip(sentences, shown, strict=True)
    ]
    units = [unit for unit in found if unit[1] and unit[2]]
    if not units:
        return None
    pairs = [_pair(*unit[:3]) for unit in units]
    likely = partial(log_probabilities, model, batch=batch)
    best = best_head(likely, pairs, [item.weights for item, *_ in units])
    blocks: Tensor = torch.block_diag(*best.weights)  # type: ignore[no-untyped-call]
    return WordAttention(
        tuple(show(item.written.text[low:high]) for item, to, _, show in units for low, high in to),
        tuple(show(item.source[low:high]) for item, _, of, show in units for low, high in of),
        tuple(map(tuple, blocks.tolist())),
        f"Head {best.head} of cross-attention layer {best.layer}, {step_name(best.read)}",
        ("target", "source"),
    )


def _pair(item: CrossWeights, target: Sequence[Span], source: Sequence[Span]) -> TextPair:
    ids = item.written
    sources = shares(item.tokens, source)
    sources = pad(sources, (0, 0, 0, len(ids.source) - len(sources)))  # the source's end token
    return TextPair(ids.source, ids.ids, sources, overlaps(item.spans, target))


def mean_rows(seen: Watched) -> Tensor:
    """The recorded rows of a batch of one, averaged over all layers and heads: [rows, keys]."""
    rows = [call.rows[0].float().mean(0).cpu() for _, call in seen.calls if call.rows is not None]
    return torch.stack(rows).mean(0)
