"""T5 (Raffel et al. 2020): an encoder-decoder for text-to-text tasks, versions 1.0 and 1.1.

https://arxiv.org/abs/1910.10683, and for 1.1 https://arxiv.org/abs/2002.05202
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.checkpoints.keymap import Drop, KeyMap, Rename, Step, Tie, renames
from regard.decoding.state import State
from regard.errors import CheckpointError, InputError
from regard.layers.modules import (
    Block,
    FeedForward,
    GatedFeedForward,
    MultiHeadAttention,
    PreNorm,
    RMSNorm,
)
from regard.mechanism.biases import RelativeBuckets
from regard.mechanism.masks import Mask, Padding
from regard.models import configs
from regard.models.configs import ACTIVATIONS, Config
from regard.models.model import EncoderDecoder, Stack, check_ids


@dataclass(frozen=True, kw_only=True)
class T5Config(Config):
    """The configuration of a T5. The defaults are t5-small.

    >>> T5Config.v1_1_small().gated
    True
    """

    vocabulary: int = configs.size(32128, "vocab_size")
    dim: int = configs.size(512, "d_model")
    head_dim: int = configs.size(64, "d_kv")
    inner: int = configs.size(2048, "d_ff")
    depth: int = configs.layers(6, "num_layers")
    # None: the same as depth
    decoder_depth: int | None = configs.layers(None, "num_decoder_layers")
    heads: int = configs.size(8, "num_heads")
    buckets: int = configs.whole(4096)(32, "relative_attention_num_buckets")
    max_distance: int = configs.size(128, "relative_attention_max_distance")
    activation: str = configs.activation("relu", "activation")
    gated: bool = configs.switch(False, "gated")
    tied: bool = configs.switch(True, "tied")  # whether the output shares the token embedding
    dropout: float = configs.rate(0.1, "dropout_rate")
    epsilon: float = configs.positive(1e-6, "layer_norm_epsilon")
    pad_token: int | None = configs.token(0, "pad_token_id")
    end_token: int | None = configs.token(1, "eos_token_id")
    start_token: int | None = configs.token(0, "decoder_start_token_id")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.buckets < 4 or self.buckets % 2 or self.max_distance <= self.buckets // 2:
            raise InputError(
                "T5Config(buckets=...) must be even, at least 4, and less than twice max_distance, "
                f"but got {self.buckets} with max_distance={self.max_distance}."
            )
        if self.gated and self.activation == "gelu":
            raise InputError(
                'T5Config(gated=True, activation="gelu") cannot be written to config.json, where '
                '"gated-gelu" means gelu_new. Use activation="gelu_new".'
            )

    @classmethod
    def small(cls) -> T5Config:
        """60 million parameters."""
        return cls()

    @classmethod
    def base(cls) -> T5Config:
        """220 million parameters."""
        return cls(dim=768, inner=3072, depth=12, heads=12)

    @classmethod
    def large(cls) -> T5Config:
        """770 million parameters."""
        return cls(dim=1024, inner=4096, depth=24, heads=16)

    @classmethod
    def v1_1_small(cls) -> T5Config:
        """77 million parameters."""
        return cls(inner=1024, depth=8, heads=6, activation="gelu_new", gated=True, tied=False)

    @classmethod
    def v1_1_base(cls) -> T5Config:
        """250 million parameters."""
        return cls(
            dim=768, inner=2048, depth=12, heads=12, activation="gelu_new", gated=True, tied=False
        )


class T5Half(nn.Module):
    """The encoder or the decoder. Its blocks share one table of relative-position biases."""

    def __init__(self, config: T5Config, depth: int, *, decoder: bool) -> None:
        super().__init__()
        self.config, self.decoder = config, decoder
        self.table = nn.Parameter(torch.empty(config.buckets, config.heads))
        self.stack = Stack([_block(config, cross=decoder) for _ in range(depth)])
        self.norm = RMSNorm(config.dim, eps=config.epsilon)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None,
        context: Tensor | None = None,
        context_mask: Mask | None = None,
        state: State | None = None,
    ) -> Tensor:
        """Apply the blocks to embedded tokens ``x`` [batch, n, dim]."""
        bias = RelativeBuckets(
            self.table, bidirectional=not self.decoder, max_distance=self.config.max_distance
        )
        x = self.stack(
            self.dropout(x),
            mask=mask,
            bias=bias,
            context=context,
            context_mask=context_mask,
            state=state,
        )
        result: Tensor = self.dropout(self.norm(x))
        return result

    def step(self, x: Tensor, state: State) -> Tensor:
        """Apply the blocks in one decoding step: ``x`` is [sentences, beams, dim]."""
        seen = state.bias(x)
        relative = RelativeBuckets(self.table, False, self.config.max_distance)
        buckets = relative.bucket(len(state) - state.places(x.device))
        bias = self.table[buckets].T[None, :, None]  # [1, heads, 1, nodes]
        result: Tensor = self.norm(self.stack.step(x, state, bias if seen is None else bias + seen))
        return result


def _block(config: T5Config, *, cross: bool) -> Block:
    def attention() -> MultiHeadAttention:
        return MultiHeadAttention(
            config.dim,
            config.heads,
            head_dim=config.head_dim,
            bias=False,
            scale=1.0,  # the initial query weights contain the usual scale
            dropout=config.dropout,
        )

    def around() -> PreNorm:
        return PreNorm(RMSNorm(config.dim, eps=config.epsilon), config.dropout)

    kind = GatedFeedForward if config.gated else FeedForward
    activation = ACTIVATIONS[config.activation]()
    return Block(
        attention(),
        around(),
        kind(config.dim, config.inner, activation, bias=False, dropout=config.dropout),
        around(),
        cross=attention() if cross else None,
        around_cross=around() if cross else None,
    )


class T5(EncoderDecoder):
    """T5 with its language-model head.

    >>> model = T5(T5Config(vocabulary=10, dim=8, head_dim=4, inner=16, depth=1, heads=2))
    >>> list(model(torch.tensor([[4, 5, 1]]), torch.tensor([[0, 6]])).shape)
    [1, 2, 10]
    """

    config: T5Config
    relative = True
    prefixed = True

    def __init__(self, config: T5Config) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.encoder = T5Half(config, config.depth, decoder=False)
        self.decoder = T5Half(config, config.decoder_depth or config.depth, decoder=True)
        if not config.tied:
            self.head = nn.Linear(config.dim, config.vocabulary, bias=False)
        self._initialise()

    def _initialise(self) -> None:
        """Initialise with normal deviations; that of the queries contains the scale of scores."""
        config = self.config
        nn.init.normal_(self.tokens.weight)
        if isinstance(self.head, nn.Linear):
            nn.init.normal_(self.head.weight, std=config.dim**-0.5)
        for half in (self.encoder, self.decoder):
            # These biases start as large as the scores, because nothing else encodes positions. A
            # small T5 then learns to copy text in 400 steps; tables that start at dim**-0.5 hardly
            # grow.
            nn.init.normal_(half.table)
        for module in self.modules():
            if isinstance(module, MultiHeadAttention):
                nn.init.normal_(module.qkv.weight, std=config.dim**-0.5)
                width = config.heads * config.head_dim
                nn.init.normal_(
                    module.qkv.weight[:width], std=(config.dim * config.head_dim) ** -0.5
                )
                nn.init.normal_(module.output.weight, std=width**-0.5)
            elif isinstance(module, FeedForward | GatedFeedForward):
                nn.init.normal_(module.up.weight, std=config.dim**-0.5)
                nn.init.normal_(module.down.weight, std=config.inner**-0.5)

    def encode(self, source: Tensor, *, padding: Padding | None = None) -> Tensor:
        """Return the hidden states of ``source`` [batch, n]: [batch, n, dim]."""
        check_ids(source, self.config.vocabulary)
        hidden: Tensor = self.encoder(self.tokens(source), mask=padding)
        return hidden

    def _embed_target(self, ids: Tensor, padding: Padding | None, past: int) -> Tensor:  # noqa: ARG002
        check_ids(ids, self.config.vocabulary)
        embedded: Tensor = self.tokens(ids)
        return embedded

    def _decode_step(self, ids: Tensor, state: State) -> Tensor:
        return self._scaled(self.decoder.step(self.tokens(ids), state))

    def _scaled(self, hidden: Tensor) -> Tensor:
        # A shared embedding has variance 1. Scaling gives the logits variance 1, too.
        return hidden * self.config.dim**-0.5 if self.config.tied else hidden

    def output_weights(self) -> tuple[Tensor, None]:
        output = self.head if isinstance(self.head, nn.Linear) else self.tokens
        return output.weight, None

    @property
    def start_token(self) -> int:
        return self.config.start_token or 0

    # --------------------------------------------------------------------------- checkpoints

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> Config:
        form = raw.get("feed_forward_proj", "relu")
        if not isinstance(form, str):
            raise CheckpointError(f"config.json says feed_forward_proj = {form!r}, not a name.")
        gated = form.startswith("gated-")
        # In the first checkpoints of 1.1, "gated-gelu" means the tanh approximation.
        activation = "gelu_new" if form == "gated-gelu" else form.removeprefix("gated-")
        # Newer files set tie_word_embeddings for every T5, so scale_decoder_outputs decides.
        tied = raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings", True))
        return super().read_config({**raw, "activation": activation, "gated": gated, "tied": tied})

    def write_config(self) -> dict[str, Any]:
        raw = super().write_config()
        activation, gated, tied = (raw.pop(name) for name in ("activation", "gated", "tied"))
        if gated:
            activation = "gated-gelu" if activation == "gelu_new" else f"gated-{activation}"
        raw |= {"feed_forward_proj": activation, "tie_word_embeddings": tied}
        return {**raw, "is_encoder_decoder": True}

    @staticmethod
    def keys(config: T5Config) -> KeyMap:
        stray = r"^decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight$"
        head = (
            Tie("lm_head.weight", "shared.weight")
            if config.tied
            else Rename("lm_head.weight", "head.weight", otherwise="shared.weight")
        )
        return KeyMap(
            [
                Drop(stray, "left over from the first conversions; no layer reads it"),
                Rename("shared.weight", "tokens.weight"),
                Tie("encoder.embed_tokens.weight", "shared.weight"),
                Tie("decoder.embed_tokens.weight", "shared.weight"),
                head,
                *_half_keys("encoder", config.depth, config.gated),
                *_half_keys("decoder", config.decoder_depth or config.depth, config.gated),
            ]
        )


def _half_keys(half: str, depth: int, gated: bool) -> Iterator[Step]:
    first = f"{half}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield Rename(first, f"{half}.table")
    yield Rename(f"{half}.final_layer_norm.weight", f"{half}.norm.weight")
    names = {}
    attentions = {"SelfAttention": "attention", "EncDecAttention": "cross"}
    last = 1 if half == "encoder" else 2  # the layer after attention
    for place, (old, new) in enumerate(list(attentions.items())[:last]):
        names[" ".join(f"{place}.{old}.{part}" for part in "qkv")] = f"{new}.qkv"
        names |= {f"{place}.{old}.o": f"{new}.output", f"{place}.layer_norm": f"around_{new}.norm"}
    dense = f"{last}.DenseReluDense"
    names[f"{dense}.wi_0 {dense}.wi_1" if gated else f"{dense}.wi"] = "feed_forward.up"
    names[f"{dense}.wo"] = "feed_forward.down"
    names[f"{last}.layer_norm"] = "around_feed_forward.norm"
    theirs, ours = f"{half}.block.{{}}.layer.", f"{half}.stack.blocks.{{}}."
    yield from renames(theirs, ours, names, ["weight"], layers=depth)
