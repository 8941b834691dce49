"""The layers a Transformer is built from: attention with its projections, feed-forward, and blocks.

Layers take built parts. A block is told how its sublayers are wrapped by being given the wrapping:
``PreNorm`` or ``PostNorm``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple, overload

import torch
from torch import Tensor, nn
from torch.nn import LayerNorm, RMSNorm
from torch.nn.functional import linear, scaled_dot_product_attention

from regard.errors import InputError
from regard.layers.cache import CrossCache, KeyValueCache
from regard.mechanism.biases import Bias
from regard.mechanism.functional import attention
from regard.mechanism.masks import Mask
from regard.mechanism.seeing import See, Seen

__all__ = [
    "Block",
    "FeedForward",
    "GatedFeedForward",
    "Heads",
    "LayerNorm",
    "Linear",
    "MultiHeadAttention",
    "PostNorm",
    "PreNorm",
    "RMSNorm",
]


class Linear(nn.Linear):
    """A linear layer, some outputs of which can be had alone."""

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The outputs ``start`` to ``stop`` for ``x`` [..., inputs]."""
        return linear(
            x, self.weight[start:stop], None if self.bias is None else self.bias[start:stop]
        )


class Heads(NamedTuple):
    """What went on inside one attention layer."""

    query: Tensor  # [batch, heads, queries, head dim]
    key: Tensor  # [batch, key heads, keys, head dim]
    value: Tensor  # [batch, key heads, keys, head dim]
    heads: Tensor  # [batch, heads, queries, head dim]: each head's own output
    output: Tensor  # [batch, queries, dim]: heads side by side, through the output projection
    seen: Seen | None


class MultiHeadAttention(nn.Module):
    """Attention with its projections (https://arxiv.org/abs/1706.03762).

    One matrix, ``qkv``, holds the projections to queries, keys and values, in this order. Without
    a ``context`` the layer attends to its own input; with one, across to the context. ``key_heads``
    below ``heads`` shares keys and values among groups of heads.

    >>> import torch
    >>> layer = MultiHeadAttention(dim=8, heads=2)
    >>> list(layer(torch.zeros(1, 5, 8)).shape)
    [1, 5, 8]
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        key_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        scale: float | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        if heads < 1 or (head_dim is None and dim % heads):
            raise InputError(
                f"{heads} heads cannot share {dim} dimensions evenly. Choose a divisor of dim, or "
                "give head_dim."
            )
        self.heads = heads
        self.key_heads = heads if key_heads is None else key_heads
        if self.key_heads < 1 or heads % self.key_heads:
            raise InputError(f"{heads} heads cannot be grouped evenly on {key_heads} key heads.")
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.scale, self.dropout = scale, dropout
        width = self.heads + 2 * self.key_heads
        self.qkv = Linear(dim, width * self.head_dim, bias=bias)
        self.output = Linear(heads * self.head_dim, dim, bias=bias)

    @overload
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = ...,
        *,
        mask: Mask | Tensor | None = ...,
        bias: Bias | Tensor | None = ...,
        cache: KeyValueCache | CrossCache | None = ...,
        see: None = ...,
    ) -> Tensor: ...
    @overload
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = ...,
        *,
        mask: Mask | Tensor | None = ...,
        bias: Bias | Tensor | None = ...,
        cache: KeyValueCache | CrossCache | None = ...,
        see: See,
    ) -> tuple[Tensor, Seen]: ...
    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        cache: KeyValueCache | CrossCache | None = None,
        see: See | None = None,
    ) -> Tensor | tuple[Tensor, Seen]:
        """``x`` [batch, queries, dim], after each position attended; with ``see``, and what it did.

        A ``Cache`` puts the past before ``x``; a ``CrossCache`` keeps the projected ``context``.
        """
        found = self.read(x, context, mask=mask, bias=bias, cache=cache, see=see)
        return found.output if found.seen is None else (found.output, found.seen)

    def read(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        cache: KeyValueCache | CrossCache | None = None,
        see: See | None = None,
    ) -> Heads:
        """As :meth:`forward`, with everything on the way: Q, K, V and the output of each head."""
        if context is None:
            query, key, value = self.project(x)
            if isinstance(cache, CrossCache):
                raise InputError("A CrossCache keeps a projected context: give one, or a Cache.")
            if cache is not None:
                key, value = cache.append(key, value)
        else:
            query, key, value = self._project_across(x, context, cache)

        dropout = self.dropout if self.training else 0.0
        seen = None
        if see is None:
            heads = attention(
                query, key, value, mask=mask, bias=bias, scale=self.scale, dropout=dropout
            )
        else:
            heads, seen = attention(
                query, key, value, mask=mask, bias=bias, scale=self.scale, dropout=dropout, see=see
            )
        return Heads(query, key, value, heads, self.merge(heads), seen)

    def stepper(self) -> Step:
        """As :meth:`forward`, for steps of decoding, where everything was checked before.

        What it returns takes ``x`` [batch, queries, dim], of which several queries are the beams
        of one sentence, a cache, and a bias that broadcasts to [batch, heads, queries, keys], with
        -inf where a query may not attend. What steps need is looked up once, here.
        """
        layer, qkv, output = self.qkv, direct(self.qkv), direct(self.output)
        heads, dim, scale = self.heads, self.head_dim, self.scale
        sizes, grouped = (heads, self.key_heads, self.key_heads), heads != self.key_heads
        watchers = self._forward_pre_hooks

        def step(x: Tensor, cache: KeyValueCache | CrossCache, bias: Tensor | None) -> Tensor:
            if watchers:
                return self._watched(x, cache, bias)
            batch, queries, _ = x.shape
            if isinstance(cache, CrossCache):
                assert cache.kept is not None
                key, value = cache.kept
                query = (
                    layer.part(x, 0, heads * dim).view(batch, queries, heads, dim).transpose(1, 2)
                )
            else:
                fused = qkv(x).view(batch, queries, -1, dim).transpose(1, 2)
                query, key, value = fused.split_with_sizes(sizes, 1)
                key, value = cache.append(key, value)
            mixed = scaled_dot_product_attention(
                query, key, value, bias, scale=scale, enable_gqa=grouped
            )
            return output(mixed.transpose(1, 2).reshape(batch, queries, -1))

        return step

    def _watched(self, x: Tensor, cache: KeyValueCache | CrossCache, bias: Tensor | None) -> Tensor:
        """A step by way of :meth:`forward`, for somebody who watches."""
        mask = None if bias is None else bias > -math.inf
        bias = None if bias is None else bias.clamp(min=torch.finfo(bias.dtype).min)
        context = x if isinstance(cache, CrossCache) else None  # the cache has what it gave
        result: Tensor = self(x, context, mask=mask, bias=bias, cache=cache)
        return result

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``x`` [batch, n, dim], each [batch, heads, n, head dim]."""
        return self._parted(self.qkv(x))

    def _parted(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What ``qkv`` gives, [batch, n, all heads], as queries, keys and values."""
        # Not three slices: the gradient of each would be as large as all three, mostly zeros.
        sizes = (self.heads, self.key_heads, self.key_heads)
        query, key, value = self._split(flat).split_with_sizes(sizes, dim=1)
        return query, key, value

    def merge(self, heads: Tensor) -> Tensor:
        """Heads' outputs [batch, heads, n, head dim] side by side, projected: [batch, n, dim]."""
        merged: Tensor = self.output(heads.transpose(1, 2).flatten(2))
        return merged

    def _project_across(
        self, x: Tensor, context: Tensor, cache: KeyValueCache | CrossCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of ``x``; keys and values of ``context``, or those kept of it."""
        if isinstance(cache, KeyValueCache):
            raise InputError("Across to a context goes a CrossCache; a Cache keeps one's own past.")
        cut = self.heads * self.head_dim
        query = self._split(self.qkv.part(x, 0, cut))
        if cache is not None and cache.kept is not None:
            return query, *cache.kept
        fused = self._split(self.qkv.part(context, cut, self.qkv.out_features))
        key, value = fused.chunk(2, dim=1)
        if cache is not None:
            # Read at every step: rows of one head lie side by side from here on.
            key, value = key.contiguous(), value.contiguous()
            cache.kept = key, value
        return query, key, value

    def _split(self, flat: Tensor) -> Tensor:
        """[batch, n, heads * head dim] as [batch, heads, n, head dim]."""
        heads = flat.shape[-1] // self.head_dim  # not -1: nothing has no shape to guess
        return flat.view(*flat.shape[:2], heads, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """Out to ``inner`` dimensions and back, each position by itself.

    ``activation`` is a built part, as ``nn.ReLU()`` (the default) or ``nn.GELU()``.

    >>> import torch
    >>> from torch import nn
    >>> list(FeedForward(8, 32, nn.GELU())(torch.zeros(1, 5, 8)).shape)
    [1, 5, 8]
    """

    def __init__(
        self,
        dim: int,
        inner: int,
        activation: nn.Module | None = None,
        *,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.up = Linear(dim, inner, bias=bias)
        self.activation = nn.ReLU() if activation is None else activation
        self.dropout = nn.Dropout(dropout)
        self.down = Linear(inner, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., dim]."""
        y = self.activation(self.up(x))
        result: Tensor = self.down(self.dropout(y) if self.training else y)
        return result


class GatedFeedForward(nn.Module):
    """As :class:`FeedForward`, where one half of the way out is gated by the other, activated
    (https://arxiv.org/abs/2002.05202). One matrix, ``up``, holds the gate and then the gated.

    >>> import torch
    >>> from torch import nn
    >>> list(GatedFeedForward(8, 32, nn.SiLU())(torch.zeros(1, 5, 8)).shape)
    [1, 5, 8]
    """

    def __init__(
        self,
        dim: int,
        inner: int,
        activation: nn.Module,
        *,
        bias: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.up = Linear(dim, 2 * inner, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.down = Linear(inner, dim, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., dim]."""
        gate, gated = self.up(x).chunk(2, dim=-1)
        y = self.activation(gate) * gated
        result: Tensor = self.down(self.dropout(y) if self.training else y)
        return result


class LockedDropout(nn.Dropout):
    """Dropout drawn once for all positions of a sequence (https://arxiv.org/abs/1512.05287).

    >>> import torch
    >>> x = LockedDropout(0.5)(torch.ones(2, 3, 8))
    >>> bool((x == x[:, :1]).all())
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., positions, dim]."""
        if not (self.training and self.p):
            return x
        drawn = super().forward(torch.ones_like(x[..., :1, :], dtype=torch.float32))
        return (x * drawn).to(x.dtype)


def lock_dropout(model: nn.Module) -> None:
    """Make every dropout of a model one that is drawn once for all positions.

    What attention drops of its weights stays as it is.
    """
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, LockedDropout(child.p))


Apply = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, KeyValueCache | CrossCache, Tensor | None], Tensor]


def direct(module: nn.Module) -> Apply:
    """What a module in eval mode does, without what PyTorch looks up and asks at every call."""
    if module._forward_hooks or module._forward_pre_hooks:
        return module
    if type(module) in (Linear, nn.Linear):
        weight, bias = module.weight, module.bias
        return lambda x: linear(x, weight, bias)  # type: ignore[arg-type]
    if type(module) is LayerNorm:
        shape, gain, shift, epsilon = (
            list(module.normalized_shape), module.weight, module.bias, module.eps,
        )  # fmt: skip
        return lambda x: torch.layer_norm(x, shape, gain, shift, epsilon)
    if type(module) is FeedForward:
        up, activation, down = direct(module.up), direct(module.activation), direct(module.down)
        return lambda x: down(activation(up(x)))
    return module.forward


def _same(x: Tensor) -> Tensor:
    return x


class PreNorm(nn.Module):
    """Around a sublayer: ``x + dropout(layer(norm(x)))``, as in GPT-2 and T5."""

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        y = layer(self.norm(x))
        return x + (self.dropout(y) if self.training else y)

    def sides(self) -> tuple[Apply, Apply]:
        """What is done before the layer, and after the sum."""
        return direct(self.norm), _same


class PostNorm(nn.Module):
    """Around a sublayer: ``norm(x + dropout(layer(x)))``, as in the first Transformer and BERT."""

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        y = layer(x)
        result: Tensor = self.norm(x + (self.dropout(y) if self.training else y))
        return result

    def sides(self) -> tuple[Apply, Apply]:
        """What is done before the layer, and after the sum."""
        return _same, direct(self.norm)


class Block(nn.Module):
    """Attention, then maybe attention across to a context, then feed-forward.

    Each comes with what is around it: a :class:`PreNorm` or :class:`PostNorm`.

    >>> import torch
    >>> block = Block(
    ...     MultiHeadAttention(8, heads=2), PreNorm(LayerNorm(8)),
    ...     FeedForward(8, 32), PreNorm(LayerNorm(8)),
    ... )
    >>> list(block(torch.zeros(1, 5, 8)).shape)
    [1, 5, 8]
    """

    def __init__(
        self,
        attention: MultiHeadAttention,
        around_attention: PreNorm | PostNorm,
        feed_forward: FeedForward | GatedFeedForward,
        around_feed_forward: PreNorm | PostNorm,
        *,
        cross: MultiHeadAttention | None = None,
        around_cross: PreNorm | PostNorm | None = None,
    ) -> None:
        super().__init__()
        if (cross is None) != (around_cross is None):
            raise InputError("Block: cross and around_cross are given together, or neither.")
        self.attention, self.around_attention = attention, around_attention
        self.cross, self.around_cross = cross, around_cross
        self.feed_forward, self.around_feed_forward = feed_forward, around_feed_forward

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        cache: KeyValueCache | None = None,
        context_mask: Mask | None = None,
        cross_cache: CrossCache | None = None,
    ) -> Tensor:
        """``x`` [batch, n, dim], where ``cross`` attends to ``context`` [batch, m, dim]."""
        cross, around_cross = self.cross, self.around_cross
        if (cross is None) != (context is None):
            given = "was given a context" if cross is None else "needs a context to attend to"
            raise InputError(
                f"This block {'has no' if cross is None else 'has'} cross: it {given}."
            )
        x = self.around_attention(x, lambda h: self.attention(h, mask=mask, bias=bias, cache=cache))
        if cross is not None and around_cross is not None:
            x = around_cross(x, lambda h: cross(h, context, mask=context_mask, cache=cross_cache))
        result: Tensor = self.around_feed_forward(x, self.feed_forward)
        return result

    def stepper(
        self,
    ) -> Callable[[Tensor, KeyValueCache, Tensor | None, CrossCache, Tensor | None], Tensor]:
        """As :meth:`forward`, for steps of decoding (see MultiHeadAttention.stepper)."""
        before, after = self.around_attention.sides()
        before_feed, after_feed = self.around_feed_forward.sides()
        attend, feed = self.attention.stepper(), direct(self.feed_forward)
        across: Step | None = None
        if self.cross is not None and self.around_cross is not None:
            before_across, after_across = self.around_cross.sides()
            across = self.cross.stepper()

        def step(
            x: Tensor,
            cache: KeyValueCache,
            bias: Tensor | None,
            cross_cache: CrossCache,
            context_bias: Tensor | None,
        ) -> Tensor:
            x = after(x + attend(before(x), cache, bias))
            if across is not None:
                x = after_across(x + across(before_across(x), cross_cache, context_bias))
            return after_feed(x + feed(before_feed(x)))

        return step
