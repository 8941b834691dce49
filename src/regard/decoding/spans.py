"""Find the best answer spans from start and end scores."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LONGEST_ANSWER = 30  # tokens


class Spans(NamedTuple):
    """The best span of each window."""

    better: Tensor  # [batch]: the logits of the span minus the logits of no answer
    share: Tensor  # [batch]: the probability of the span, among all spans and no answer
    first: Tensor  # [batch]: the position of the first token
    last: Tensor  # [batch]: the position of the last token


def best_spans(start: Tensor, end: Tensor, possible: Tensor, sentence: Tensor) -> Spans:
    """Return the best span of each window, given the start and end logits [batch, n].

    ``possible`` marks the tokens that may be in an answer, and ``sentence`` has the number of each
    token's sentence: an answer ends in the sentence in which it starts. The first token, [CLS],
    stands for no answer.

    >>> start, end = torch.tensor([[0.0, 5.0, 0.0, 9.0]]), torch.tensor([[0.0, 0.0, 4.0, 6.0]])
    >>> possible, sentence = torch.tensor([[True, True, True, False]]), torch.tensor([[0, 1, 1, 1]])
    >>> best = best_spans(start, end, possible, sentence)
    >>> best.better.item(), best.first.item(), best.last.item()
    (9.0, 1, 2)
    """
    start, end = start.float(), end.float()
    length = start.shape[1]
    place = torch.arange(length, device=start.device)
    far = place[None] - place[:, None]
    allowed = (far >= 0) & (far < LONGEST_ANSWER) & (place > 0)[:, None]
    allowed = allowed & possible[:, :, None] & possible[:, None]  # [batch, first, last]
    allowed &= sentence[:, :, None] == sentence[:, None]
    whole = (start[:, :, None] + end[:, None]).masked_fill(~allowed, -torch.inf).flatten(1)
    score, at = whole.max(1)
    none = start[:, 0] + end[:, 0]
    total = torch.logaddexp(whole.logsumexp(1), none)
    return Spans(score - none, (score - total).exp(), at // length, at % length)
