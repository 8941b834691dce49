"""Align each target word with a source word, by the cross-attention head that aligns best.

No head is trained to align words, and most heads do not. To find the best head, each source word is
left out in turn. The effect of a source word on a target word is the log-probability that the
target word loses without it. The best head has the largest mean weight on the source word with the
largest effect.

Many heads attend to the source of a word one decoding step later, when the word is the decoder's
input (https://arxiv.org/abs/2004.14837). So each head is scored in both steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.interpret.measurement import Look
from regard.interpret.pooling import join, membership
from regard.interpret.watching import watch
from regard.mechanism.labelled import Array, Labelled, Labels
from regard.mechanism.seeing import See
from regard.models.model import EncoderDecoder, pad
from regard.pictures.figures import Picture, alignment
from regard.text.tokenizer import Tokenizer
from regard.text.words import Tokens, Word, tokens_of_ids

MAX_WORDS = 256  # words of the source
BATCH = 32


@dataclass(frozen=True, eq=False, repr=False)
class Alignment(Look):
    """The weights of one cross-attention head, from target words to source words.

    The weights are those of the decoding step that predicts the target word or, if ``read``, of the
    next step, whose input is the target word. They are summed over the source word's tokens and
    averaged over the target word's tokens. Special tokens are left out, so a row may sum to less
    than 1.
    """

    kind = "alignment"

    source: tuple[str, ...]
    target: tuple[str, ...]
    weights: Tensor  # [target, source]
    effect: Tensor  # [target, source]: log-probability lost without a source word
    layer: int  # of the decoder
    head: int
    read: bool  # True: the step whose input is the word; False: the step that predicts it
    scores: Tensor  # [layers, heads]: the mean weight on the source word with the largest effect

    @property
    def score(self) -> float:
        """The alignment score of this head, from 0 to 1."""
        return float(self.scores[self.layer, self.head])

    @property
    def pairs(self) -> list[tuple[str, str]]:
        """Each target word with the source word on which it has the largest weight."""
        best = self.weights.argmax(-1).tolist()
        return [(word, self.source[index]) for word, index in zip(self.target, best, strict=True)]

    def _labelled(self) -> Labelled:
        words = ("target", "source")
        arrays = {
            "weights": Array(words, self.weights),
            "effect": Array(words, self.effect),
            "scores": Array(("layer", "head"), self.scores),
        }
        labels = {
            "target_word": Labels(("target",), self.target),
            "source_word": Labels(("source",), self.source),
        }
        return Labelled(arrays, labels, {"layer": self.layer, "head": self.head})

    def picture(self, *, without_first: bool = False) -> Picture:
        """Target words down, source words across."""
        if without_first:
            raise InputError("An alignment shows words only; special tokens are left out already.")
        most = float(self.scores.max())
        best, better = f", the best of {self.scores.numel()}", ""
        if self.score < most:
            layer, head = divmod(int(self.scores.argmax()), self.scores.shape[1])
            best, better = "", f" Head {head} of layer {layer} does better, with {most:.0%}."
        caption = (
            f"Head {self.head} of cross-attention layer {self.layer}{best}: "
            f"{step_name(self.read)}, on average {self.score:.0%} of its weight is on the source "
            f"word without which the target word is least likely.{better}"
        )
        return alignment(self.weights, self.source, self.target, caption=caption)

    def to_dict(self) -> dict[str, Any]:
        return {
            **super().to_dict(),
            "score": self.score,
            "pairs": [list(pair) for pair in self.pairs],
        }


def align(
    model: EncoderDecoder,
    tokenizer: Tokenizer,
    source: Sequence[int],
    target: Sequence[int],
    *,
    layer: int | None = None,
    head: int | None = None,
) -> Alignment:
    """Align ``target``, the ids that a model generated, with ``source``, its input ids.

    Without ``layer`` and ``head``, use the head that aligns best. Both texts may hold special
    tokens, but ``target`` must not hold the start token.
    """
    if not isinstance(model, EncoderDecoder):
        raise InputError(f"{type(model).__name__} has no cross-attention to align words by.")
    if (layer is None) != (head is None):
        raise InputError("align() takes layer and head together, or neither.")
    reader = Tokenizer(tokenizer.tokenizer)  # the source side of a tokenizer with two vocabularies
    [weights] = cross_weights(model, [source], [target])
    return align_tokens(
        tokens_of_ids(reader, source),
        tokens_of_ids(tokenizer.target, target),
        weights,
        partial(log_probabilities, model),
        chosen=None if layer is None or head is None else (layer, head),
    )


def align_tokens(
    read: Tokens,
    written: Tokens,
    weights: Tensor,
    log_probabilities: LogProbabilities,
    *,
    chosen: tuple[int, int] | None = None,
) -> Alignment:
    """Align the words of a written text with those of its source.

    ``weights`` are cross-attention weights [layers, heads, target + 1, source], as
    :func:`cross_weights` returns them. ``chosen`` is a layer and a head; without it, use the head
    that aligns best.
    """
    sources, targets = _words(read, "source"), _words(written, "target")
    if len(sources) > MAX_WORDS:
        raise InputError(
            f"align() takes a source of up to {MAX_WORDS} words, but it has {len(sources)}. "
            "Split it into sentences."
        )
    pair = TextPair(
        read.ids, written.ids, membership(len(read), sources), membership(len(written), targets)
    )
    best = best_head(log_probabilities, [pair], [weights], chosen=chosen)
    source_words, target_words = (
        tuple(word.label for word in words) for words in (sources, targets)
    )
    return Alignment(
        source_words, target_words, best.weights[0], best.effects[0], best.layer, best.head,
        best.read, best.scores,
    )  # fmt: skip


def step_name(read: bool) -> str:
    """A phrase for captions: the decoding step whose weights give the alignment."""
    return "once each word is read" if read else "as each word is written"


def _words(tokens: Tokens, side: str) -> list[Word]:
    words = [word for word in tokens.words if not word.special]
    if not words:
        raise InputError(f"There is no word in the {side} to align.")
    return words


class TextPair(NamedTuple):
    """The ids of a source and of a target, and the share of each token that lies in each word.

    A token that belongs to no word has a row of zeros.
    """

    source: Sequence[int]
    target: Sequence[int]  # without the start token
    sources: Tensor  # [source tokens, source words]
    targets: Tensor  # [target tokens, target words]


# The log-probability of each token of a target after each of several sources, [sources, tokens].
LogProbabilities = Callable[[Sequence[Sequence[int]], Sequence[int]], Tensor]


class BestHead(NamedTuple):
    """A cross-attention head, with its weights and the effects for each pair of texts."""

    layer: int
    head: int
    read: bool  # True: the step whose input is the word; False: the step that predicts it
    weights: list[Tensor]  # [target words, source words]
    effects: list[Tensor]  # [target words, source words]
    scores: Tensor  # [layers, heads]


def best_head(
    log_probabilities: LogProbabilities,
    pairs: Sequence[TextPair],
    weights: Sequence[Tensor],
    *,
    chosen: tuple[int, int] | None = None,
) -> BestHead:
    """The head that aligns the words of all texts best, or ``chosen``, in the better of two steps.

    ``weights`` are the outputs of :func:`cross_weights` for ``pairs``.
    """
    effects = [_effect(log_probabilities, pair) for pair in pairs]
    depends = torch.cat([effect.amax(-1) > 0 for effect in effects])
    if not bool(depends.any()):
        depends = torch.ones_like(depends)
    by_step, scores = [], []
    for rows in (slice(None, -1), slice(1, None)):  # the steps that predict each token, or read it
        joined = [
            join(each[:, :, rows], pair.targets, pair.sources)
            for each, pair in zip(weights, pairs, strict=True)
        ]
        at_largest_effect = [
            each.gather(-1, effect.argmax(-1, keepdim=True).expand(*each.shape[:3], 1))[..., 0]
            for each, effect in zip(joined, effects, strict=True)
        ]
        by_step.append(joined)
        scores.append(torch.cat(at_largest_effect, -1)[..., depends].mean(-1))
    table = torch.stack(scores)  # [2 steps, layers, heads]
    layers, heads = table.shape[1:]
    layer, head = chosen or divmod(int(table.amax(0).argmax()), heads)
    if not (0 <= layer < layers and 0 <= head < heads):
        raise InputError(
            f"There is no head {head} in layer {layer} of {layers} layers of {heads} heads."
        )
    read = int(table[:, layer, head].argmax())
    best = [joined[layer, head] for joined in by_step[read]]
    return BestHead(layer, head, bool(read), best, effects, table.amax(0))


def cross_weights(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    targets: Sequence[Sequence[int]],
    batch: int = BATCH,
) -> Iterator[Tensor]:
    """The cross-attention of each target to its source: [layers, heads, target + 1, source].

    Row i is the step that predicts token i of the target. Token i is the input of row i + 1.
    """
    crossing = nn.ModuleList(layer.module for layer in model.attention_layers() if layer.across)
    start, device = model.start_token, model.device
    for first in range(0, len(sources), batch):
        read, written = sources[first : first + batch], targets[first : first + batch]
        source, padding = pad(read, 0, "right", model.config.vocabulary, device)
        target, _ = pad(
            [[start, *ids] for ids in written], 0, "right", model.output_vocabulary, device
        )
        with torch.no_grad(), watch(crossing, See(weights=True)) as watched:
            model(source, target, padding=padding)
        layers = [seen.weights for _, seen in watched.calls if seen.weights is not None]
        stacked = torch.stack(layers, 1).float().cpu()  # [batch, layers, heads, q, k]
        for weights, ids, target_ids in zip(stacked, read, written, strict=True):
            yield weights[:, :, : len(target_ids) + 1, : len(ids)]


@torch.no_grad()
def log_probabilities(
    model: EncoderDecoder,
    sources: Sequence[Sequence[int]],
    target: Sequence[int],
    *,
    batch: int = BATCH,
) -> Tensor:
    """The log-probability of each token of ``target`` after each source, [sources, tokens]."""
    written = torch.tensor([list(target)], device=model.device)
    read = torch.tensor([[model.start_token, *target[:-1]]], device=model.device)
    parts = []
    for first in range(0, len(sources), batch):
        some = sources[first : first + batch]
        ids, padding = pad(some, 0, "right", model.config.vocabulary, model.device)
        logits = model(ids, read.expand(len(some), -1), padding=padding).float()
        spread = written.expand(len(some), -1)[..., None]
        parts.append(logits.log_softmax(-1).gather(-1, spread)[..., 0].cpu())
    return torch.cat(parts)


def _effect(log_probabilities: LogProbabilities, pair: TextPair) -> Tensor:
    """The log-probability each target word loses without each source word, [target, source]."""
    targets, sources = pair.targets > 0, pair.sources > 0
    if sources.shape[1] == 1:
        return torch.ones(targets.shape[1], 1)
    variants = [list(pair.source)] + [
        [token for token, left_out in zip(pair.source, column, strict=True) if not left_out]
        for column in sources.t().tolist()
    ]
    likely = log_probabilities(variants, pair.target) @ targets.float()  # [variants, target words]
    return (likely[:1] - likely[1:]).t()
