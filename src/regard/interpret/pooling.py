"""Pool attention weights between tokens into weights between words or sentences."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.text.words import Span, Word


def join(weights: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Weights between tokens [..., q, k] as weights between units, such as words or sentences.

    ``queries`` and ``keys`` are tables [tokens, units] with the share of each token in each unit.
    Weights are averaged over the tokens of a query unit and summed over the tokens of a key unit.
    """
    rows = (queries > 0).to(weights)
    rows = rows / rows.sum(0).clamp(min=1)
    return rows.t() @ weights @ keys.to(weights)


def membership(count: int, words: Sequence[Word]) -> Tensor:
    """A table [count, words], 1 where the token belongs to the word, else 0."""
    table = torch.zeros(count, len(words))
    for column, word in enumerate(words):
        table[list(word.places), column] = 1
    return table


def overlaps(tokens: Sequence[tuple[int, int]], units: Sequence[Span]) -> Tensor:
    """The number of characters that each token has in each word or sentence, [tokens, units]."""
    if not tokens or not units:
        return torch.zeros(len(tokens), len(units))
    token, unit = torch.tensor(tokens), torch.tensor(units)  # [n, 2]
    ends = torch.minimum(token[:, None, 1], unit[None, :, 1])
    starts = torch.maximum(token[:, None, 0], unit[None, :, 0])
    return (ends - starts).clamp(min=0).float()


def shares(tokens: Sequence[tuple[int, int]], units: Sequence[Span]) -> Tensor:
    """The share of each token in each unit, in proportion to its characters there."""
    table = overlaps(tokens, units)
    return table / table.sum(1, keepdim=True).clamp(min=1)


def pool(
    weights: Tensor,
    queries: Sequence[tuple[int, int]],
    query_units: Sequence[Span],
    keys: Sequence[tuple[int, int]],
    key_units: Sequence[Span],
) -> Tensor:
    """Join weights [..., tokens, tokens] between the units that lie at the given characters.

    >>> weights = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    >>> tokens, word = [(0, 2), (2, 4)], [Span(0, 4)]
    >>> pool(weights, tokens, word, [(0, 1), (1, 2), (3, 4)], [Span(0, 2), Span(3, 4)])
    tensor([[0.5250, 0.4750]])
    """
    rows, columns = overlaps(queries, query_units), shares(keys, key_units)
    return join(weights.float().cpu(), rows, columns)
