"""Masks of other libraries as masks of regard, as ranges of keys where they are ranges.

The masks are for calls without ``query_start``: the last query is at the position of the last key.
Tensors are recognised by their values: a mask on a GPU is copied to the host in part, which waits
for it, and inside ``torch.compile`` values cannot be read. Convert a mask once, not in each layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import reduce
from itertools import pairwise, product
from operator import and_
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.mechanism.geometry import Extent
from regard.mechanism.masks import Causal, Dense, Mask, Padding, Segments, Window

if TYPE_CHECKING:
    from torch.nn.attention.bias import CausalBias

HIDDEN = -9e3  # lower numbers hide a key: -inf, the least number of a dtype, -1e4 in bfloat16

_FROM_FIRST = ("BlockDiagonalCausalMask", "BlockDiagonalCausalLocalAttentionMask")
_BLOCKS = (
    *_FROM_FIRST,
    "BlockDiagonalMask",
    "BlockDiagonalCausalFromBottomRightMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask",
    "BlockDiagonalPaddedKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask",
    "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask",
    "BlockDiagonalGappyKeysMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask",
)


def mask_from_torch(bias: CausalBias) -> Mask:
    """The mask of ``causal_upper_left`` or ``causal_lower_right``, for calls of their sizes.

    ``scaled_dot_product_attention(q, k, v, attn_mask=bias)`` is
    ``attention(q, k, v, mask=mask_from_torch(bias))``.

    >>> from torch.nn.attention.bias import causal_lower_right, causal_upper_left
    >>> mask_from_torch(causal_lower_right(3, 5))
    Causal()
    >>> mask_from_torch(causal_upper_left(3, 5))
    Segments(lengths=((3,),), keys=((5,),), query_starts=0, within=Causal())
    """
    from torch.nn.attention.bias import CausalBias, CausalVariant  # late: loads torch._dynamo

    if not isinstance(bias, CausalBias):
        raise InputError(
            f"mask_from_torch takes a CausalBias of torch.nn.attention.bias, but got "
            f"{type(bias).__name__}. Pass a boolean tensor as mask=tensor."
        )
    lower_right = bias.variant == CausalVariant.LOWER_RIGHT
    return Causal() if lower_right else _causal_from_first(bias.seq_len_q, bias.seq_len_kv)


def _causal_from_first(queries: int, keys: int) -> Mask:
    """Causal, where the first query is at the position of the first key."""
    if queries == keys:
        return Causal()
    return Segments([queries], [keys], query_starts=0, within=Causal())


def mask_from_xformers(bias: Any, queries: int = 0, keys: int = 0) -> Mask:
    """The mask of an ``attn_bias`` of ``xformers.ops.fmha``, recognised by the name of its class.

    ``memory_efficient_attention(q, k, v, attn_bias=bias)``, whose tensors are [batch, length,
    heads, dim], is ``attention(q, k, v, mask=mask_from_xformers(bias))`` with the axes of length
    and heads swapped. ``LowerTriangularMask`` needs the numbers of queries and keys. Paged masks
    have no counterpart.

    >>> class LowerTriangularMask:  # as xformers.ops.LowerTriangularMask
    ...     pass
    >>> mask_from_xformers(LowerTriangularMask(), queries=5, keys=5)
    Causal()
    """
    name = type(bias).__name__
    if name == "LowerTriangularMask":
        if not (queries and keys):
            raise InputError(
                "LowerTriangularMask aligns the first query with the first key, which depends on "
                "their numbers. Call mask_from_xformers(bias, queries, keys)."
            )
        return _causal_from_first(queries, keys)
    if name in (
        "LowerTriangularFromBottomRightMask",
        "LowerTriangularFromBottomRightLocalAttentionMask",
        "LocalAttentionFromBottomRightMask",
    ):
        return _within(bias) or Causal()
    if name not in _BLOCKS:
        raise InputError(
            f"mask_from_xformers has no counterpart of {name}. Pass its tensor as bias=tensor, or "
            "masks.Dense(bias.materialize((queries, keys)) == 0)."
        )
    info = bias.k_seqinfo
    gaps = hasattr(info, "seqlen_py")  # there may be unused keys after a block
    return Segments(
        _lengths(bias.q_seqinfo.seqstart_py),
        list(info.seqlen_py) if gaps else _lengths(info.seqstart_py),
        key_starts=list(info.seqstart_py)[: len(info.seqlen_py)] if gaps else None,
        query_starts=0 if name in _FROM_FIRST else None,
        within=_within(bias),
    )


def _within(bias: Any) -> Causal | Window | None:
    if hasattr(bias, "window_left"):
        return Window(bias.window_left, bias.window_right)
    if hasattr(bias, "_window_size"):
        return Window(bias._window_size - 1)
    return Causal() if "Causal" in type(bias).__name__ else None


def _lengths(starts: list[int]) -> list[int]:
    return [stop - start for start, stop in pairwise(starts)]


def mask_from_transformers(attention_mask: Tensor) -> Mask:
    """The mask of an ``attention_mask`` of Hugging Face's transformers.

    [batch, keys] of 1 and 0 marks real tokens; combine it with ``& Causal()`` in a decoder.
    [batch, 1 or heads, queries, keys] is boolean, True where a query may attend, or numbers that
    are added to the scores: 0, or below -9,000 where a key is hidden. The output of a query without
    keys is 0; in transformers it may be the mean of all values.

    >>> mask_from_transformers(torch.tensor([[1, 1, 1], [0, 1, 1]])) & Causal()
    Padding(lengths=(3, 2), side='left') & Causal()
    >>> additive = torch.full((1, 1, 3, 3), torch.finfo(torch.float32).min).triu(1)
    >>> mask_from_transformers(additive)
    Causal()
    """
    if attention_mask.dim() == 4:
        return _recognized(_visible(attention_mask, "attention_mask"))
    if attention_mask.dim() != 2:
        raise InputError(
            "attention_mask is [batch, keys] or [batch, heads, queries, keys], but got "
            f"{list(attention_mask.shape)}."
        )
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise InputError(
            "attention_mask [batch, keys] holds 1 for real tokens and 0 for padding, but has other "
            "numbers. For the ids of packed sequences use Segments.from_ids."
        )
    return _recognized(attention_mask.bool()[:, None, None])


def mask_from_multihead(
    attn_mask: Tensor | None = None, key_padding_mask: Tensor | None = None, num_heads: int = 1
) -> Mask:
    """The mask of ``attn_mask`` and ``key_padding_mask`` of ``torch.nn.MultiheadAttention``.

    In both, True means *hidden*. Numbers are added to the scores: 0, or below -9,000 where a key is
    hidden. ``attn_mask`` is [queries, keys] or [batch * num_heads, queries, keys], and
    ``key_padding_mask`` is [batch, keys] or [keys].

    >>> later = torch.ones(3, 3, dtype=torch.bool).triu(1)
    >>> mask_from_multihead(later, torch.tensor([[False, False, True]]))
    Causal() & Padding(lengths=(2,), side='right')
    """
    parts = []
    if attn_mask is not None:
        if attn_mask.dim() not in (2, 3) or (attn_mask.dim() == 3 and len(attn_mask) % num_heads):
            raise InputError(
                f"attn_mask is [queries, keys] or [batch * {num_heads} heads, queries, keys], but "
                f"got {list(attn_mask.shape)}. Give num_heads of the module."
            )
        shape = (-1, 1 if attn_mask.dim() == 2 else num_heads, *attn_mask.shape[-2:])
        parts.append(_recognized(_visible(attn_mask, "attn_mask", False).reshape(shape)))
    if key_padding_mask is not None:
        if key_padding_mask.dim() not in (1, 2):
            raise InputError(
                f"key_padding_mask is [batch, keys], but got {list(key_padding_mask.shape)}."
            )
        shown = _visible(key_padding_mask, "key_padding_mask", False)
        parts.append(_recognized(shown.reshape(-1, 1, 1, shown.shape[-1])))
    return _all_of(parts)


def _visible(mask: Tensor, name: str, true_is_visible: bool = True) -> Tensor:
    """A boolean mask, True where a query may attend, of a boolean or an additive one."""
    if mask.dtype == torch.bool:
        return mask if true_is_visible else ~mask
    hidden = mask < HIDDEN
    if not ((mask == 0) | hidden).all():
        raise InputError(
            f"{name} is boolean, or holds 0 and numbers below {HIDDEN:,.0f} that hide a key, but "
            "has other numbers. Pass numbers to add to the scores as bias=tensor."
        )
    return ~hidden


def _all_of(parts: list[Mask]) -> Mask:
    return reduce(and_, parts) if parts else Window(None, None)


def _recognized(allowed: Tensor) -> Mask:
    """The ranges that equal a mask [batch, heads, queries, keys], or the mask as Dense.

    One row of queries is understood as one for all queries.
    """
    dense, (_, heads, queries, keys) = Dense(allowed), allowed.shape
    if not allowed.numel() or (heads > 1 and not (allowed == allowed[:, :1]).all()):
        return dense
    allowed = allowed[:, 0]
    if (allowed == allowed[:1]).all():
        allowed = allowed[:1]
    bits = allowed.to(torch.uint8)
    low, count = bits.argmax(-1), bits.sum(-1)
    high = keys - bits.flip(-1).argmax(-1)
    low, high, count = torch.stack((low, high, count)).cpu()  # [batch, queries] each
    empty = count == 0
    if not (empty | (high - low == count)).all():
        return dense
    low, high = low.masked_fill(empty, keys), high.masked_fill(empty, 0)
    extent = Extent(len(low), 1, queries, keys, low.device)
    for mask in _candidates(low, high, extent):
        interval = mask.interval(extent)
        least = torch.as_tensor(interval.low).clamp(0, keys)
        most = torch.as_tensor(interval.high).clamp(0, keys)
        same = torch.where(empty, most <= least, (least == low) & (most == high))
        if same.all():
            return mask
    return dense


def _candidates(low: Tensor, high: Tensor, extent: Extent) -> Iterator[Mask]:
    """Masks of ranges, simple ones first, that are as narrow as the ranges allow.

    If ``window & padding & segments`` equals the ranges, then it does so for the narrowest of each.
    """
    queries, keys = extent.queries, extent.keys
    stop = high.amax(1)
    start = torch.minimum(low.amin(1), stop)
    paddings: list[list[Mask]] = [[]]
    if (stop < keys).any():
        paddings.append([Padding(stop.tolist())])
    if (start > 0).any():
        left_padding = Padding((keys - start).tolist(), "left")
        paddings += [[*padding, left_padding] for padding in paddings]

    windows: list[list[Mask]] = [[]]
    segments: list[list[Mask]] = [[]]
    seen = low < high
    if queries > 1 and seen.any():
        at = extent.positions()
        left, right = (int(side[seen].max()) for side in (at - low, high - 1 - at))
        sides = ((None, right), (left, None), (left, right))
        windows += [[_window(before, after, extent)] for before, after in sides]
        if queries == keys:
            segments.append([_segments(low, high, start, stop)])
    for parts in product(segments, windows, paddings):
        yield _all_of([mask for part in parts for mask in part])


def _window(left: int | None, right: int | None, extent: Extent) -> Mask:
    """Window(left, right), whose ends may be negative."""
    start = 0
    if right is not None and right < 0:
        left, right, start = None if left is None else left + right, 0, right
    elif left is not None and left < 0:
        left, right, start = 0, None if right is None else right + left, -left
    within = Causal() if (left, right) == (None, 0) else Window(left, right)
    if not start:
        return within
    first = extent.keys - extent.queries + start
    return Segments([extent.queries], [extent.keys], query_starts=first, within=within)


def _segments(low: Tensor, high: Tensor, start: Tensor, stop: Tensor) -> Segments:
    """The shortest segments that no range crosses; unused positions at an end form one segment."""
    used = (low < high).to(torch.uint8)
    start = torch.minimum(start, used.argmax(1))
    stop = torch.maximum(stop, low.shape[1] - used.flip(1).argmax(1))
    places = torch.arange(1, low.shape[1])
    before = high.cummax(1).values[:, :-1] <= places
    after = low.flip(1).cummin(1).values.flip(1)[:, 1:] >= places
    inside = (places >= start[:, None]) & (places <= stop[:, None])
    rows = []
    for cuts in before & after & inside:
        rows.append(_lengths([0, *places[cuts].tolist(), low.shape[1]]))
    return Segments(rows)
