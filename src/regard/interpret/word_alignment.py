"""Which source word each target word came from, by the head of cross-attention that knows best.

No head is told to align, and most do not. To find the one that does, each source word is left out
in turn: where that makes a target word less likely, the target word depends on it. The head that
aligns best puts the most weight on the words that matter so. Many heads attend to where a word
comes from not as it is written but once it is read, to write the next
(https://arxiv.org/abs/2004.14837), so each head is tried both ways.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.interpret.watching import watch
from regard.mechanism.seeing import See
from regard.models.model import EncoderDecoder, pad
from regard.pictures.figures import Picture, alignment
from regard.text.tokenizer import Tokenizer
from regard.text.words import Tokens, Word, tokens_of_ids

MOST_WORDS = 256  # of a source; longer ones are split into sentences first
BATCH = 32


@dataclass(frozen=True, eq=False)
class Alignment:
    """The weights of one head of cross-attention, from whole words to whole words.

    A row holds what the head attended to while the model wrote a target word, or once it had read
    it: its weights on a source word's tokens added up, averaged over the target word's own. What
    went to special tokens is left out, so a row may add up to less than 1.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Tensor  # [target, source]
    effect: Tensor  # [target, source]: the log-probability a target word loses without the source's
    layer: int  # of the decoder
    head: int
    read: bool  # whether rows are those of words once read, rather than as they are written
    scores: Tensor  # [layers, heads]: the mean weight on the source word that matters most

    @property
    def score(self) -> float:
        """How well this head aligns, from 0 to 1."""
        return float(self.scores[self.layer, self.head])

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each target word with the source word that has most of its weight."""
        best = self.weights.argmax(-1).tolist()
        return [(word, self.source[index]) for word, index in zip(self.target, best, strict=True)]

    def picture(self, *, without_first: bool = False) -> Picture:
        """Target words down, source words across."""
        if without_first:
            raise InputError("An alignment shows words only: what special tokens take is left out.")
        most = float(self.scores.max())
        best, better = f", the best of {self.scores.numel()}", ""
        if self.score < most:
            layer, head = divmod(int(self.scores.argmax()), self.scores.shape[1])
            best, better = "", f" Head {head} of layer {layer} does better, with {most:.0%}."
        caption = (
            f"Head {self.head} of cross-attention layer {self.layer}{best}: {when(self.read)}, on "
            f"average {self.score:.0%} of its weight is on the source word without which the "
            f"target word is least likely.{better}"
        )
        return alignment(self.weights, self.source, self.target, caption=caption)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, numbers and words, ready for JSON."""
        return {
            "kind": "alignment",
            "source": list(self.source),
            "target": list(self.target),
            "weights": self.weights.tolist(),
            "effect": self.effect.tolist(),
            "layer": self.layer,
            "head": self.head,
            "read": self.read,
            "score": self.score,
            "scores": self.scores.tolist(),
            "pairs": [list(pair) for pair in self.pairs],
        }

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()


def align(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    source: Sequence[int],
    target: Sequence[int],
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Alignment:
    """How ``target``, the ids a model wrote, goes with ``source``, the ids it read.

    Without ``layer`` and ``head`` it is the head that aligns best. Both may hold special tokens;
    ``target`` comes without the token that starts it.
    """
    if not isinstance(model, EncoderDecoder):
        raise InputError(f"{type(model).__name__} has no cross-attention to align words by.")
    if (layer is None) != (head is None):
        raise InputError("align() takes layer and head together, or neither.")
    reader = Tokenizer(
        tokenizer.tokenizer
    )  # by itself, for where there are two the other one decodes
    read, written = tokens_of_ids(reader, source), tokens_of_ids(tokenizer.target, target)
    sources, targets = _real(read, "source"), _real(written, "target")
    if len(sources) > MOST_WORDS:
        raise InputError(
            f"align() takes a source of up to {MOST_WORDS} words, but it has {len(sources)}. "
            "Split it into sentences."
        )
    pair = Pair(source, target, _members(read, sources), _members(written, targets))
    weights = list(cross_weights(model, [source], [target]))
    chosen = None if layer is None or head is None else (layer, head)
    found = best_head(model, [pair], weights, chosen=chosen)
    return Alignment(
        tuple(word.label for word in sources),
        tuple(word.label for word in targets),
        found.weights[0],
        found.effects[0],
        found.layer,
        found.head,
        found.read,
        found.scores,
    )


def when(read: bool) -> str:
    """In which of the two ways a head aligns, in words."""
    return "once each word is read" if read else "as each word is written"


def _real(tokens: Tokens, side: str) -> list[Word]:
    words = [word for word in tokens.words if not word.special]
    if not words:
        raise InputError(f"There is no word in the {side} to align.")
    return words


def _members(tokens: Tokens, words: Sequence[Word]) -> Tensor:
    """1 where a token is of a word: [tokens, words]."""
    found = torch.zeros(len(tokens), len(words))
    for column, word in enumerate(words):
        found[list(word.places), column] = 1
    return found


# The best head ----------------------------------------------------------------------------------


class Pair(NamedTuple):
    """A text and what a model wrote for it: their ids, and which words those make up.

    A token that lies in several words has a share in each; one that lies in none, zeros.
    """

    source: Sequence[int]
    target: Sequence[int]  # without the token that starts it
    sources: Tensor  # [source tokens, source words]
    targets: Tensor  # [target tokens, target words]


class Best(NamedTuple):
    """A head of cross-attention, and what it shows of each pair."""

    layer: int
    head: int
    read: bool  # whether it aligns words once they are read, rather than as they are written
    weights: list[Tensor]  # [target words, source words]
    effects: list[Tensor]  # [target words, source words]
    scores: Tensor  # [layers, heads]


def best_head(
    model: EncoderDecoder,
    pairs: Sequence[Pair],
    weights: Sequence[Tensor],
    *,
    chosen: tuple[int, int] | None = None,
    batch: int = BATCH,
) -> Best:
    """The head that aligns the words of all pairs best, or ``chosen``, in the better of two ways.

    ``weights`` are those that :func:`cross_weights` gives for the pairs.
    """
    effects = [_effect(model, pair, batch) for pair in pairs]
    depends = torch.cat([effect.amax(-1) > 0 for effect in effects])
    if not bool(depends.any()):
        depends = torch.ones_like(depends)
    ways, scores = [], []
    for rows in (slice(None, -1), slice(1, None)):  # as words are written, and once they are read
        joined = [
            _joined(each[:, :, rows], pair) for each, pair in zip(weights, pairs, strict=True)
        ]
        there = [
            each.gather(-1, effect.argmax(-1, keepdim=True).expand(*each.shape[:3], 1))[..., 0]
            for each, effect in zip(joined, effects, strict=True)
        ]
        ways.append(joined)
        scores.append(torch.cat(there, -1)[..., depends].mean(-1))
    table = torch.stack(scores)  # [ways, layers, heads]
    layers, heads = table.shape[1:]
    layer, head = chosen or divmod(int(table.amax(0).argmax()), heads)
    if not (0 <= layer < layers and 0 <= head < heads):
        raise InputError(
            f"There is no head {head} in layer {layer} of {layers} layers of {heads} heads."
        )
    way = int(table[:, layer, head].argmax())
    shown = [joined[layer, head] for joined in ways[way]]
    return Best(layer, head, bool(way), shown, effects, table.amax(0))


def cross_weights(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    batch: int = BATCH,
) -> Iterator[Tensor]:
    """What each target attends to in its source: [layers, heads, target + 1, source].

    Row i is attended as token i of the target is written; row i + 1 once it is read.
    """
    crossing = nn.ModuleList(layer.module for layer in model.attention_layers() if layer.across)
    start, device = model.start_token, model.device
    for first in range(0, len(sources), batch):
        read, written = sources[first : first + batch], targets[first : first + batch]
        source, padding = pad(read, 0, "right", model.config.vocabulary, device)
        target, _ = pad(
            [[start, *ids] for ids in written], 0, "right", model.output_vocabulary, device
        )
        with torch.no_grad(), watch(crossing, See(weights=True)) as seen:
            model(source, target, padding=padding)
        found = [call.weights for _, call in seen.calls if call.weights is not None]
        whole = torch.stack(found, 1).float().cpu()  # [batch, layers, heads, q, k]
        for weights, one, other in zip(whole, read, written, strict=True):
            yield weights[:, :, : len(other) + 1, : len(one)]


def _joined(weights: Tensor, pair: Pair) -> Tensor:
    """Weights of tokens as weights of words: keys added up by their shares, queries averaged."""
    rows = (pair.targets > 0).float()
    rows = rows / rows.sum(0).clamp(min=1)
    return rows.t() @ weights @ pair.sources


@torch.no_grad()
def _effect(model: EncoderDecoder, pair: Pair, batch: int) -> Tensor:
    """How much less likely each target word is without each source word: [target, source]."""
    targets, sources = pair.targets > 0, pair.sources > 0
    if sources.shape[1] == 1:
        return torch.ones(targets.shape[1], 1)
    variants = [list(pair.source)] + [
        [one for one, left_out in zip(pair.source, column, strict=True) if not left_out]
        for column in sources.t().tolist()
    ]
    vocabulary, device = model.config.vocabulary, model.device
    written = torch.tensor([list(pair.target)], device=device)
    read = torch.tensor([[model.start_token, *pair.target[:-1]]], device=device)
    parts = []
    for first in range(0, len(variants), batch):
        some = variants[first : first + batch]
        ids, padding = pad(some, 0, "right", vocabulary, device)
        logits = model(ids, read.expand(len(some), -1), padding=padding).float()
        spread = written.expand(len(some), -1)[..., None]
        parts.append(logits.log_softmax(-1).gather(-1, spread)[..., 0].cpu())
    likely = torch.cat(parts) @ targets.float()  # [variants, target words]
    return (likely[:1] - likely[1:]).t()
