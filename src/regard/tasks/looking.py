"""Looking at what a model of texts to texts attended to: a second pass over what it wrote."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.mechanism.seeing import See, Seen
from regard.models import T5, Transformer
from regard.models.model import pad
from regard.tasks.ready import Ready, Written
from regard.tasks.records import Attended
from regard.tasks.words import Span, pool, sharing, spans_of, words
from regard.watching import Watched, watch


@dataclass(frozen=True, slots=True)
class Looked:
    """One source, what was written for it, and the weights of every head across the two."""

    source: str
    tokens: list[Span]  # what each of its tokens stands for; those of a prefix are below 0
    written: Written
    spans: list[Span]  # of the tokens written
    weights: Tensor  # [layers * heads, written + 1, tokens of the source]: row i wrote token i

    def pooled(
        self, queries: Sequence[Span], keys: Sequence[Span], *, read: bool = False
    ) -> Tensor:
        """The weights between units of both texts: [layers * heads, queries, keys].

        A token attends to the source as it is written, and once more as it is ``read``, to write
        the next.
        """
        rows = self.weights[:, 1:] if read else self.weights[:, :-1]
        rows = rows[:, :, : len(self.tokens)]  # without the token that ends the source
        return pool(rows, self.spans, queries, self.tokens, keys)


def look(
    one: Ready, prefix: str, sources: Sequence[str], written: Sequence[Written], batch: int
) -> Iterator[Looked]:
    """Each source with what was written for it, read once more and looked at."""
    model = one.model
    assert isinstance(model, Transformer | T5)
    watched = nn.ModuleList(crossing(model))
    start = start_of(one)
    for first in range(0, len(sources), batch):
        some = written[first : first + batch]
        vocabulary, device = model.config.vocabulary, model.device
        source, padding = pad([w.source for w in some], 0, "right", vocabulary, device)
        target, _ = pad([[start, *w.ids] for w in some], 0, "right", vocabulary, device)
        with torch.inference_mode(), watch(watched, See(weights=True)) as seen:
            model(source, target, padding=padding)
        whole = torch.cat([_weights(call) for _, call in seen.calls], 1)  # [batch, all heads, q, k]
        for row, item in enumerate(some):
            text = sources[first + row]
            offsets = one.text.encode(prefix + text, special=False).offsets
            tokens = [Span(low - len(prefix), high - len(prefix)) for low, high in offsets]
            weights = whole[row, :, : len(item.ids) + 1, : len(item.source)].cpu()
            yield Looked(text, tokens, item, spans_of(item.ids, one.decode), weights)


def start_of(one: Ready) -> int:
    """The token that decoding starts from."""
    config = one.model.config
    return int(config.start if config.start is not None else config.pad or 0)


def _weights(seen: Seen) -> Tensor:
    assert seen.weights is not None
    return seen.weights.float()


def crossing(model: nn.Module) -> list[nn.Module]:
    """The layers that attend across, from what is written to the source."""
    return [part for name, part in model.named_modules() if name.endswith(".cross")]


def align(one: Ready, looked: Sequence[Looked], batch: int) -> Attended | None:
    """The words of a translation against those of its source, by the head that aligns them best.

    ``looked`` are the sentences of one text. To know where a target word came from, each source
    word is left out in turn: it is the one without which the target word is least likely. The best
    head is the one with most weight on those. Many heads attend to where a word comes from not as
    it is written but once it is read, to write the next (https://arxiv.org/abs/2004.14837), so each
    head is tried both ways.
    """
    pairs = [_Pair(item, words(item.written.text), words(item.source)) for item in looked]
    pairs = [pair for pair in pairs if pair.target and pair.source]
    if not pairs:
        return None
    origins = [_effect(one, pair, batch).argmax(1, keepdim=True) for pair in pairs]
    tables, scores = {}, {}
    for read in (False, True):
        tables[read] = [p.item.pooled(p.target, p.source, read=read) for p in pairs]
        there = [
            table.gather(2, origin.expand(len(table), -1, -1))[..., 0]  # [heads, target]
            for table, origin in zip(tables[read], origins, strict=True)
        ]
        scores[read] = torch.cat(there, 1).mean(1)
    read = bool(scores[True].max() > scores[False].max())
    best = int(scores[read].argmax())
    layer, head = divmod(best, len(scores[read]) // len(crossing(one.model)))
    when = "once each word is read" if read else "as each word is written"
    named = [tuple(word for pair in pairs for word in pair.words[side]) for side in (0, 1)]
    blocks: Tensor = torch.block_diag(*(table[best] for table in tables[read]))  # type: ignore[no-untyped-call]
    return Attended(
        named[0],
        named[1],
        tuple(map(tuple, blocks.tolist())),
        f"Head {head} of cross-attention layer {layer}, {when}",
        ("target", "source"),
    )


class _Pair(NamedTuple):
    """A sentence and its translation, and where their words stand."""

    item: Looked
    target: list[Span]
    source: list[Span]

    @property
    def words(self) -> tuple[list[str], list[str]]:
        return (
            [self.item.written.text[low:high] for low, high in self.target],
            [self.item.source[low:high] for low, high in self.source],
        )


def _effect(one: Ready, pair: _Pair, batch: int) -> Tensor:
    """How much less likely each target word is without each source word: [target, source]."""
    model, item = one.model, pair.item
    whole, ids = item.written.source, item.written.ids
    inside = sharing(item.tokens, pair.source) > 0  # [tokens, source]
    variants = [whole] + [
        [token for at, token in enumerate(whole) if at >= len(left) or not left[at]]
        for left in inside.t().tolist()
    ]
    vocabulary, device = model.config.vocabulary, model.device
    written = torch.tensor([ids], device=device)
    read = torch.tensor([[start_of(one), *ids[:-1]]], device=device)
    found = []
    for first in range(0, len(variants), batch):
        some = variants[first : first + batch]
        source, padding = pad(some, 0, "right", vocabulary, device)
        with torch.inference_mode():
            logits = model(source, read.expand(len(some), -1), padding=padding)
            chances = logits.float().log_softmax(-1)
        spread = written.expand(len(some), -1)[..., None]
        found.append(chances.gather(-1, spread)[..., 0].cpu())  # [variants, tokens written]
    of_words = torch.cat(found) @ (sharing(item.spans, pair.target) > 0).float()
    return (of_words[:1] - of_words[1:]).t()


def mean_rows(seen: Watched) -> Tensor:
    """The rows seen of a batch of one, as a mean over all layers and heads: [rows, keys]."""
    found = [call.rows[0].float().mean(0).cpu() for _, call in seen.calls if call.rows is not None]
    return torch.stack(found).mean(0)
