"""Pool attention weights between tokens into weights between words or sentences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.text.words import Span, Word


def join_words(weights: Tensor, queries: Sequence[Word], keys: Sequence[Word]) -> Tensor:
    """Weights between tokens [..., q, k] as weights between words.

    The weights of a key word's tokens are summed, those of a query word's tokens averaged.
    """
    rows = torch.stack([weights[..., word.places, :].mean(-2) for word in queries], -2)
    return torch.stack([rows[..., word.places].sum(-1) for word in keys], -1)


def overlaps(tokens: Sequence[tuple[int, int]], units: Sequence[Span]) -> Tensor:
    """The characters that each token shares with each word or sentence, [tokens, units]."""
    if not tokens or not units:
        return torch.zeros(len(tokens), len(units))
    token, unit = torch.tensor(tokens), torch.tensor(units)  # [n, 2]
    ends = torch.minimum(token[:, None, 1], unit[None, :, 1])
    starts = torch.maximum(token[:, None, 0], unit[None, :, 0])
    return (ends - starts).clamp(min=0).float()


def pool(
    weights: Tensor,
    queries: Sequence[tuple[int, int]],
    query_units: Sequence[Span],
    keys: Sequence[tuple[int, int]],
    key_units: Sequence[Span],
) -> Tensor:
    """Pool weights [..., tokens, tokens] to [..., query units, key units].

    A unit is a word or a sentence. Weights are averaged over the tokens of a query unit and summed
    over the tokens of a key unit. A key token in two units is divided by its characters in each.

    >>> weights = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    >>> tokens, word = [(0, 2), (2, 4)], [Span(0, 4)]
    >>> pool(weights, tokens, word, [(0, 1), (1, 2), (3, 4)], [Span(0, 2), Span(3, 4)])
    tensor([[0.5250, 0.4750]])
    """
    rows, columns = overlaps(queries, query_units), overlaps(keys, key_units)
    rows = (rows > 0).float()
    rows = rows / rows.sum(0).clamp(min=1)
    columns = columns / columns.sum(1, keepdim=True).clamp(min=1)
    return rows.t() @ weights.float().cpu() @ columns
