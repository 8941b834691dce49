"""Looking at what a model of texts to texts attended to: a second pass over what it wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from regard.interpret.pooling import overlaps, pool
from regard.interpret.watched import Watched
from regard.interpret.word_alignment import TextPair, best_head, cross_weights, step_name
from regard.models.bundle import Bundle
from regard.models.model import EncoderDecoder
from regard.tasks.records import WordAttention
from regard.tasks.writing import Written
from regard.text.words import Span, spans_of, words


@dataclass(frozen=True, slots=True)
class Looked:
    """One source, what was written for it, and the weights of every head across the two."""

    source: str
    tokens: list[Span]  # what each of its tokens stands for; those of a prefix are below 0
    written: Written
    spans: list[Span]  # of the tokens written
    weights: Tensor  # [layers, heads, written + 1, tokens of the source]: row i wrote token i

    def pooled(
        self, queries: Sequence[Span], keys: Sequence[Span], *, read: bool = False
    ) -> Tensor:
        """The weights between units of both texts: [layers, heads, queries, keys].

        A token attends to the source as it is written, and once more as it is ``read``, to write
        the next.
        """
        rows = self.weights[:, :, 1:] if read else self.weights[:, :, :-1]
        rows = rows[..., : len(self.tokens)]  # without the token that ends the source
        return pool(rows, self.spans, queries, self.tokens, keys)


def look(
    one: Bundle, prefix: str, sources: Sequence[str], written: Sequence[Written], batch: int
) -> Iterator[Looked]:
    """Each source with what was written for it, read once more and looked at."""
    model = one.model
    assert isinstance(model, EncoderDecoder)
    all_weights = cross_weights(model, [w.source for w in written], [w.ids for w in written], batch)
    for text, item, weights in zip(sources, written, all_weights, strict=True):
        offsets = one.tokenizer.encode(prefix + text, special=False).offsets
        tokens = [Span(low - len(prefix), high - len(prefix)) for low, high in offsets]
        yield Looked(text, tokens, item, spans_of(item.ids, one.decode), weights)


def align(one: Bundle, looked: Sequence[Looked], batch: int) -> WordAttention | None:
    """The words of a translation against those of its source, by the head that aligns them best.

    ``looked`` are the sentences of one text.
    """
    model = one.model
    assert isinstance(model, EncoderDecoder)
    named = [(each, words(each.written.text), words(each.source)) for each in looked]
    named = [each for each in named if each[1] and each[2]]
    if not named:
        return None
    pairs = [_pair(*each) for each in named]
    best = best_head(model, pairs, [each.weights for each, _, _ in named], batch=batch)
    blocks: Tensor = torch.block_diag(*best.weights)  # type: ignore[no-untyped-call]
    return WordAttention(
        tuple(each.written.text[low:high] for each, target, _ in named for low, high in target),
        tuple(each.source[low:high] for each, _, source in named for low, high in source),
        tuple(map(tuple, blocks.tolist())),
        f"Head {best.head} of cross-attention layer {best.layer}, {step_name(best.read)}",
        ("target", "source"),
    )


def _pair(item: Looked, target: Sequence[Span], source: Sequence[Span]) -> TextPair:
    ids = item.written
    shares = overlaps(item.tokens, source)
    shares = shares / shares.sum(1, keepdim=True).clamp(min=1)
    shares = pad(shares, (0, 0, 0, len(ids.source) - len(shares)))  # the token that ends the source
    return TextPair(ids.source, ids.ids, shares, overlaps(item.spans, target))


def mean_rows(seen: Watched) -> Tensor:
    """The rows seen of a batch of one, as a mean over all layers and heads: [rows, keys]."""
    found = [call.rows[0].float().mean(0).cpu() for _, call in seen.calls if call.rows is not None]
    return torch.stack(found).mean(0)
