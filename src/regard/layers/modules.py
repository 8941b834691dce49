"""The layers of a Transformer: multi-head attention, feed-forward layers and blocks.

A block is constructed from its sublayers and a ``PreNorm`` or ``PostNorm`` for each.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import LayerNorm, RMSNorm
from torch.nn.functional import linear, scaled_dot_product_attention

from regard.errors import InputError
from regard.layers.cache import CrossCache, KeyValueCache
from regard.layers.hooks import HeadHooks
from regard.mechanism.biases import Bias
from regard.mechanism.functional import attention
from regard.mechanism.masks import Mask
from regard.mechanism.seeing import See, Seen

__all__ = ["LayerNorm", "RMSNorm"]  # classes of PyTorch that models import from here


class Linear(nn.Linear):
    """A linear layer that can also compute a range of its outputs."""

    def part(self, x: Tensor, start: int, stop: int) -> Tensor:
        """The outputs ``start`` to ``stop`` for ``x`` [..., inputs]."""
        return linear(
            x, self.weight[start:stop], None if self.bias is None else self.bias[start:stop]
        )


class Heads(NamedTuple):
    """All intermediate results of one call of an attention layer."""

    query: Tensor  # [batch, heads, queries, head dim]
    key: Tensor  # [batch, key heads, keys, head dim]
    value: Tensor  # [batch, key heads, keys, head dim]
    heads: Tensor  # [batch, heads, queries, head dim]: the output of each head
    output: Tensor  # [batch, queries, dim]: concatenated heads after the output projection
    seen: Seen | None


class MultiHeadAttention(nn.Module):
    """Attention with its projections (https://arxiv.org/abs/1706.03762).

    One matrix, ``qkv``, holds the projections to queries, keys and values, in this order. The layer
    computes cross-attention if it is called with a ``context``, otherwise self-attention. If
    ``key_heads`` is less than ``heads``, groups of heads share keys and values. ``head_hooks``
    observe and change the output of each head (see :class:`HeadHooks`).

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
            raise InputError(
                f"{heads} heads cannot share {key_heads} key heads evenly. Choose a divisor of "
                "heads."
            )
        self.head_dim = dim // heads if head_dim is None else head_dim
        self.scale, self.dropout = scale, dropout
        self.head_hooks = HeadHooks()
        width = self.heads + 2 * self.key_heads
        self.qkv = Linear(dim, width * self.head_dim, bias=bias)
        self.output = Linear(heads * self.head_dim, dim, bias=bias)

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
        """The output for ``x`` [batch, queries, dim], or (output, Seen) if ``see`` is given.

        ``cache`` is a ``KeyValueCache`` with the past keys and values, or a ``CrossCache`` with the
        keys and values of ``context``.
        """
        heads = self.forward_heads(x, context, mask=mask, bias=bias, cache=cache, see=see)
        return heads.output if heads.seen is None else (heads.output, heads.seen)

    def forward_heads(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        mask: Mask | Tensor | None = None,
        bias: Bias | Tensor | None = None,
        cache: KeyValueCache | CrossCache | None = None,
        see: See | None = None,
    ) -> Heads:
        """Like :meth:`forward`, but also return Q, K, V and the output of each head."""
        if context is None:
            query, key, value = self.project(x)
            if isinstance(cache, CrossCache):
                raise InputError(
                    "A CrossCache is for cross-attention: pass context=..., or use a KeyValueCache."
                )
            if cache is not None:
                key, value = cache.append(key, value)
        else:
            query, key, value = self._project_across(x, context, cache)

        return self.attend(query, key, value, mask=mask, bias=bias, see=see)

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: Mask | Tensor | None,
        bias: Bias | Tensor | None,
        see: See | None,
    ) -> Heads:
        """Attend with projected Q, K, V [batch, heads, n, head dim]; project the output."""
        requested = self.head_hooks.see() if see is None and self.head_hooks.active else see
        dropout = self.dropout if self.training else 0.0
        seen = None
        if requested is None:
            heads = attention(
                query, key, value, mask=mask, bias=bias, scale=self.scale, dropout=dropout
            )
        else:
            heads, seen = attention(
                query, key, value, mask=mask, bias=bias, scale=self.scale, dropout=dropout,
                see=requested,
            )  # fmt: skip
        if self.head_hooks.active:
            heads = self.head_hooks(heads, seen if see is None else None)
        output = self.output(heads.transpose(1, 2).flatten(2))
        return Heads(query, key, value, heads, output, None if see is None else seen)

    def stepper(self) -> Step:
        """Return a fast version of :meth:`forward` for decoding, which does not check arguments.

        It takes ``x`` [batch, queries, dim], a cache and a bias. The queries are the beams of one
        sentence. The bias broadcasts to [batch, heads, queries, keys] and is -inf where a query may
        not attend. The layer's parameters are looked up once, here, not in each step.
        """
        layer, qkv, output = self.qkv, direct(self.qkv), direct(self.output)
        heads, dim, scale = self.heads, self.head_dim, self.scale
        sizes, grouped = (heads, self.key_heads, self.key_heads), heads != self.key_heads
        hooks, before, after = self.head_hooks, self._forward_pre_hooks, self._forward_hooks

        def step(x: Tensor, cache: KeyValueCache | CrossCache, bias: Tensor | None) -> Tensor:
            if before or after or (hooks.active and hooks.see() is not None):
                return self._step_with_forward(x, cache, bias)
            batch, queries, _ = x.shape
            if isinstance(cache, CrossCache):
                assert cache.kept is not None
                key, value = cache.kept
                query = (
                    layer.part(x, 0, heads * dim).view(batch, queries, heads, dim).transpose(1, 2)
                )
            else:
                projected = qkv(x).view(batch, queries, -1, dim).transpose(1, 2)
                query, key, value = projected.split_with_sizes(sizes, 1)
                key, value = cache.append(key, value)
            mixed = scaled_dot_product_attention(
                query, key, value, bias, scale=scale, enable_gqa=grouped
            )
            if hooks.active:
                mixed = hooks(mixed)
            return output(mixed.transpose(1, 2).reshape(batch, queries, -1))

        return step

    def _step_with_forward(
        self, x: Tensor, cache: KeyValueCache | CrossCache, bias: Tensor | None
    ) -> Tensor:
        """A decoding step that calls the module itself: its hooks run, and Seen is computed."""
        mask = None if bias is None else bias > -math.inf
        bias = None if bias is None else bias.clamp(min=torch.finfo(bias.dtype).min)
        # A context selects cross-attention. Its content is not read: the cache holds the keys.
        context = x if isinstance(cache, CrossCache) else None
        result: Tensor = self(x, context, mask=mask, bias=bias, cache=cache)
        return result

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of ``x`` [batch, n, dim], each [batch, heads, n, head dim]."""
        return self.split_qkv(self.qkv(x))

    def split_qkv(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Split the output of ``qkv``, [batch, n, all heads], into queries, keys and values."""
        # Not three slices: the gradient of each slice would be as large as ``flat``.
        sizes = (self.heads, self.key_heads, self.key_heads)
        query, key, value = self._split(flat).split_with_sizes(sizes, dim=1)
        return query, key, value

    def _project_across(
        self, x: Tensor, context: Tensor, cache: KeyValueCache | CrossCache | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries of ``x``; keys and values of ``context``, from the cache if it has them."""
        if isinstance(cache, KeyValueCache):
            raise InputError("Cross-attention needs a CrossCache, but got a KeyValueCache.")
        cut = self.heads * self.head_dim
        query = self._split(self.qkv.part(x, 0, cut))
        if cache is not None and cache.kept is not None:
            return query, *cache.kept
        projected = self._split(self.qkv.part(context, cut, self.qkv.out_features))
        key, value = projected.chunk(2, dim=1)
        if cache is not None:
            # Every step reads them: make the rows of a head contiguous.
            key, value = key.contiguous(), value.contiguous()
            cache.kept = key, value
        return query, key, value

    def _split(self, flat: Tensor) -> Tensor:
        """[batch, n, heads * head dim] as [batch, heads, n, head dim]."""
        heads = flat.shape[-1] // self.head_dim  # view(-1) fails if a size is 0
        return flat.view(*flat.shape[:2], heads, self.head_dim).transpose(1, 2)


class FeedForward(nn.Module):
    """Two linear layers with an activation between them, applied to each position.

    ``activation`` is a module, such as ``nn.ReLU()`` (the default) or ``nn.GELU()``.

    >>> import torch
    >>> from torch import nn
    >>> list(FeedForward(8, 32, nn.GELU())(torch.zeros(1, 5, 8)).shape)
    [1, 5, 8]
    """

    widths: ClassVar[int] = 1  # the first layer has ``widths * inner`` outputs

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
        self.up = Linear(dim, self.widths * inner, bias=bias)
        self.activation = nn.ReLU() if activation is None else activation
        self.dropout = nn.Dropout(dropout)
        self.down = Linear(inner, dim, bias=bias)

    def activated(self, up: Tensor) -> Tensor:
        """The activation of the first layer's output."""
        result: Tensor = self.activation(up)
        return result

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., dim]."""
        y = self.activated(self.up(x))
        result: Tensor = self.down(self.dropout(y) if self.training else y)
        return result


class GatedFeedForward(FeedForward):
    """A feed-forward layer that multiplies hidden units by activated gates
    (https://arxiv.org/abs/2002.05202). One matrix, ``up``, holds the gates, then the hidden units.

    >>> import torch
    >>> from torch import nn
    >>> list(GatedFeedForward(8, 32, nn.SiLU())(torch.zeros(1, 5, 8)).shape)
    [1, 5, 8]
    """

    widths = 2

    def activated(self, up: Tensor) -> Tensor:
        gate, hidden = up.chunk(2, dim=-1)
        return super().activated(gate) * hidden


class LockedDropout(nn.Dropout):
    """Dropout with one mask for all positions of a sequence (https://arxiv.org/abs/1512.05287).

    >>> import torch
    >>> x = LockedDropout(0.5)(torch.ones(2, 3, 8))
    >>> bool((x == x[:, :1]).all())
    True
    """

    def forward(self, x: Tensor) -> Tensor:
        """``x`` [..., positions, dim]."""
        if not (self.training and self.p):
            return x
        mask = super().forward(torch.ones_like(x[..., :1, :], dtype=torch.float32))
        return (x * mask).to(x.dtype)


def lock_dropout(model: nn.Module) -> None:
    """Replace every nn.Dropout of a model by :class:`LockedDropout`; attention dropout stays."""
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.Dropout:
                setattr(module, name, LockedDropout(child.p))


Apply = Callable[[Tensor], Tensor]
Step = Callable[[Tensor, KeyValueCache | CrossCache, Tensor | None], Tensor]


def direct(module: nn.Module) -> Apply:
    """Return a module's eval-mode function without the overhead of ``nn.Module.__call__``."""
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
    """Computes ``x + dropout(layer(norm(x)))`` for a sublayer, as in GPT-2 and T5."""

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        y = layer(self.norm(x))
        return x + (self.dropout(y) if self.training else y)

    def sides(self) -> tuple[Apply, Apply]:
        """The functions applied to the sublayer's input and to the residual sum."""
        return direct(self.norm), _same


class PostNorm(nn.Module):
    """Computes ``norm(x + dropout(layer(x)))`` for a sublayer, as in BERT."""

    def __init__(self, norm: nn.Module, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm, self.dropout = norm, nn.Dropout(dropout)

    def forward(self, x: Tensor, layer: Callable[[Tensor], Tensor]) -> Tensor:
        y = layer(x)
        result: Tensor = self.norm(x + (self.dropout(y) if self.training else y))
        return result

    def sides(self) -> tuple[Apply, Apply]:
        """The functions applied to the sublayer's input and to the residual sum."""
        return _same, direct(self.norm)


class Block(nn.Module):
    """Self-attention, then cross-attention if ``cross`` is given, then feed-forward.

    A :class:`PreNorm` or :class:`PostNorm` adds the norm and the residual to each sublayer.

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
        feed_forward: FeedForward,
        around_feed_forward: PreNorm | PostNorm,
        *,
        cross: MultiHeadAttention | None = None,
        around_cross: PreNorm | PostNorm | None = None,
    ) -> None:
        super().__init__()
        if (cross is None) != (around_cross is None):
            raise InputError("Block: give cross and around_cross together, or neither.")
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
        """``x`` is [batch, n, dim]; ``cross`` attends to ``context`` [batch, m, dim]."""
        cross, around_cross = self.cross, self.around_cross
        if (cross is None) != (context is None):
            raise InputError(
                "This block has no cross-attention, but was given a context."
                if cross is None
                else "This block has cross-attention: pass the context to attend to."
            )
        x = self.around_attention(x, lambda h: self.attention(h, mask=mask, bias=bias, cache=cache))
        if cross is not None and around_cross is not None:
            x = around_cross(x, lambda h: cross(h, context, mask=context_mask, cache=cross_cache))
        result: Tensor = self.around_feed_forward(x, self.feed_forward)
        return result

    def stepper(
        self,
    ) -> Callable[[Tensor, KeyValueCache, Tensor | None, CrossCache, Tensor | None], Tensor]:
        """Return a fast :meth:`forward` for decoding; see :meth:`MultiHeadAttention.stepper`."""
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
