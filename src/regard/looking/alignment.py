"""Which source word each target word came from, by the head of cross-attention that knows best.

No head is told to align, and most do not. To find the one that does, each source word is left out
in turn: where that makes a target word less likely, the target word depends on it. The head that
aligns best puts the most weight on the words that matter so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.mechanism.seeing import See, Seen
from regard.models import T5, Transformer
from regard.models.model import pad
from regard.pictures import Picture, alignment
from regard.reading import Chunk, Layer, Reading, Tokens, Word, layers_of, tokens_of_ids
from regard.text import Text

MOST_WORDS = 256  # of a source; longer ones are split into sentences first
BATCH = 32


@dataclass(frozen=True, eq=False)
class Alignment:
    """The weights of one head of cross-attention, from whole words to whole words.

    A row holds what the head attended to while the model wrote a target word: its weights on a
    source word's tokens added up, averaged over the target word's own. What went to special tokens
    is left out, so a row may add up to less than 1.
    """

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Tensor  # [target, source]
    effect: Tensor  # [target, source]: the log-probability a target word loses without the source's
    layer: int  # of the decoder
    head: int
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
        caption = (
            f"Head {self.head} of cross-attention layer {self.layer}, the best of "
            f"{self.scores.numel()}: on average {self.score:.0%} of its weight is on the source "
            "word without which the target word is least likely."
        )
        if self.score < float(self.scores.max()):
            best = divmod(int(self.scores.argmax()), self.scores.shape[1])
            caption = (
                f"Head {self.head} of cross-attention layer {self.layer}: on average "
                f"{self.score:.0%} of its weight is on the source word without which the target "
                f"word is least likely. Head {best[1]} of layer {best[0]} does better, with "
                f"{float(self.scores.max()):.0%}."
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
            "score": self.score,
            "scores": self.scores.tolist(),
            "pairs": [list(pair) for pair in self.pairs],
        }

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()


def align(
    model: Transformer | T5,
    tokenizer: Text,
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
    if not isinstance(model, Transformer | T5):
        raise InputError(f"{type(model).__name__} has no cross-attention to align words by.")
    if (layer is None) != (head is None):
        raise InputError("align() takes layer and head together, or neither.")
    read, written = tokens_of_ids(tokenizer, source), tokens_of_ids(tokenizer, target)
    sources, targets = _real(read, "source"), _real(written, "target")
    if len(sources) > MOST_WORDS:
        raise InputError(
            f"align() takes a source of up to {MOST_WORDS} words, but it has {len(sources)}. "
            "Split it into sentences."
        )
    found = _cross_weights(model, tokenizer, read, written)  # [layers, heads, target, source]
    joined = join_words(found, targets, sources)
    effect = _effect(model, source, target, targets, sources)
    depends = effect.amax(-1) > 0
    if not bool(depends.any()):
        depends = torch.ones_like(depends)
    matters = effect.argmax(-1)[None, None, :, None].expand(*joined.shape[:3], 1)
    scores = joined.gather(-1, matters)[..., 0][..., depends].mean(-1)  # [layers, heads]
    if layer is None or head is None:
        layer, head = divmod(int(scores.argmax()), scores.shape[1])
    elif not (0 <= layer < scores.shape[0] and 0 <= head < scores.shape[1]):
        raise InputError(
            f"There is no head {head} in layer {layer} of {scores.shape[0]} layers of "
            f"{scores.shape[1]} heads."
        )
    return Alignment(
        tuple(word.label for word in sources),
        tuple(word.label for word in targets),
        joined[layer, head],
        effect,
        layer,
        head,
        scores,
    )


def join_words(weights: Tensor, queries: Sequence[Word], keys: Sequence[Word]) -> Tensor:
    """Weights [..., q, k] of tokens as weights of words: keys added up, queries averaged."""
    rows = torch.stack([weights[..., word.places, :].mean(-2) for word in queries], -2)
    return torch.stack([rows[..., word.places].sum(-1) for word in keys], -1)


def _real(tokens: Tokens, side: str) -> list[Word]:
    words = [word for word in tokens.words if not word.special]
    if not words:
        raise InputError(f"There is no word in the {side} to align.")
    return words


def _cross_weights(
    model: Transformer | T5, tokenizer: Text, source: Tokens, target: Tokens
) -> Tensor:
    found: list[Tensor] = []

    def ask(layer: Layer, _: Chunk) -> See | None:
        return See(weights=True) if layer.across else None

    def take(_layer: Layer, _chunk: Chunk, seen: Seen) -> None:
        assert seen.weights is not None
        found.append(seen.weights[0].float().cpu())

    reading = Reading(
        model, tokenizer, source, (Chunk(0, len(source)),), tuple(layers_of(model)), target
    )
    reading.run(ask, take)
    return torch.stack(found)


@torch.no_grad()
def _effect(
    model: Transformer | T5,
    source: Sequence[int],
    target: Sequence[int],
    targets: Sequence[Word],
    sources: Sequence[Word],
) -> Tensor:
    """How much less likely each target word is without each source word: [target, source]."""
    if len(sources) == 1:
        return torch.ones(len(targets), 1)
    variants = [list(source)] + [
        [one for place, one in enumerate(source) if place not in word.places] for word in sources
    ]
    start, _ = model.begin([variants[0]])
    wanted = torch.tensor([list(target)], device=model.device)
    inputs = torch.cat((start, wanted[:, :-1].to(start.dtype)), dim=1)
    parts = []
    for first in range(0, len(variants), BATCH):
        ids, padding = pad(
            variants[first : first + BATCH], 0, "right", model.config.vocabulary, model.device
        )
        logits = model(ids, inputs.expand(len(ids), -1), padding=padding).float()
        spread = wanted.expand(len(ids), -1)[..., None]
        parts.append(logits.log_softmax(-1).gather(-1, spread)[..., 0].cpu())
    likely = torch.cat(parts)  # [variants, target tokens]
    by_word = torch.stack([likely[:, word.places].sum(-1) for word in targets])
    return by_word[:, :1] - by_word[:, 1:]
