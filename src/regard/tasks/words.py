"""Words and sentences of a text, and weights between tokens as weights between them."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Span(NamedTuple):
    """Some characters of a text: ``text[start:end]``."""

    start: int
    end: int


_CLOSING, _OPENING = "\"'\u2019\u201d»)\\]", "\"'\u2018\u201c«(\\[¿¡"
# What French elides; a run of letters and digits, which a sign may join; or any other sign.
_WORD = re.compile(
    "\\b(?i:[cdjlmnst]|qu|lorsqu|puisqu)['\u2019](?=\\w)|\\w+(?:['\u2019.-]\\w+)*|[^\\w\\s]"
)
# A run of ends is tried from its first sign alone: from each, a long one would take for ever.
_END = re.compile(rf"(?<![.!?…])[.!?…]+[{_CLOSING}]*\s+(?=[{_OPENING}]*[^\W_a-zß-öø-ÿ])|\n\s*")
# What a full stop follows without ending anything: short titles, and single letters.
_SHORT = re.compile(
    rf"(?:^|[\s{_OPENING}])(?:\w|Mrs?|Ms|Dr|St|Prof|Mme|Mlle|Sgt|Capt|Gen|Nr|vs|e\.g|i\.e|z\.B)\.$"
)
LONGEST = 16  # characters, more than any of these has


def words(text: str) -> list[Span]:
    """Where the words of a text stand; each punctuation mark is one of its own.

    >>> text = "It's 3.50, n'est-ce pas?"
    >>> [text[start:end] for start, end in words(text)]
    ["It's", '3.50', ',', "n'", 'est-ce', 'pas', '?']
    """
    return [Span(*found.span()) for found in _WORD.finditer(text)]


def sentences(text: str) -> list[Span]:
    r"""Where the sentences of a text stand, without the space between them. A new line ends one.

    >>> text = "Mr. Bean left. Where to?\nNobody knew."
    >>> [text[start:end] for start, end in sentences(text)]
    ['Mr. Bean left.', 'Where to?', 'Nobody knew.']
    """
    found: list[Span] = []
    start = len(text) - len(text.lstrip())
    for end in _END.finditer(text):
        sign = end.group().rstrip()
        stop = end.start() + len(sign)
        # A title is short; all that is before it would be read again for each.
        near = text[max(start, stop - LONGEST) : stop]
        if "\n" not in end.group() and _SHORT.search(near):
            continue
        if before := text[start:stop].rstrip():
            found.append(Span(start, start + len(before)))
            start = end.end()
    rest = text[start:].rstrip()
    return [*found, Span(start, start + len(rest))] if rest else found


def spans_of(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[Span]:
    """Which characters of the text that ``ids`` decode to each of them wrote."""
    lengths = [len(decode(ids[:count])) for count in range(len(ids) + 1)]
    return [Span(lengths[at], max(lengths[at], lengths[at + 1])) for at in range(len(ids))]


def sharing(tokens: Sequence[tuple[int, int]], units: Sequence[Span]) -> Tensor:
    """How many characters each token has in each unit (words, sentences): [tokens, units]."""
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
    """Weights [..., tokens, tokens] as weights of units: [..., query units, key units].

    What a unit attends to is the mean over its tokens; what it receives, the sum. A token that
    lies in two units counts for each by its characters there.

    >>> weights = torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]])
    >>> tokens, word = [(0, 2), (2, 4)], [Span(0, 4)]
    >>> pool(weights, tokens, word, [(0, 1), (1, 2), (3, 4)], [Span(0, 2), Span(3, 4)])
    tensor([[0.5250, 0.4750]])
    """
    rows, columns = sharing(queries, query_units), sharing(keys, key_units)
    rows = (rows > 0).float()
    rows = rows / rows.sum(0).clamp(min=1)
    columns = columns / columns.sum(1, keepdim=True).clamp(min=1)
    return rows.t() @ weights.float().cpu() @ columns
