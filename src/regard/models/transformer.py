"""The Transformer (Vaswani et al. 2017): an encoder and a decoder, for translation.

https://arxiv.org/abs/1706.03762. Checkpoints are read and written as Marian models.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.checkpoints.keymap import Drop, KeyMap, Rename, Step, Tie, renames
from regard.decoding.state import State
from regard.errors import CheckpointError, InputError
from regard.layers.modules import Block, FeedForward, LayerNorm, MultiHeadAttention, PostNorm
from regard.layers.positions import sinusoidal
from regard.mechanism.masks import Padding
from regard.models import configs
from regard.models.configs import ACTIVATIONS, Config
from regard.models.model import EncoderDecoder, Stack, check_ids, positions


@dataclass(frozen=True, kw_only=True)
class TransformerConfig(Config):
    """The configuration of a Transformer. The defaults are the paper's base model.

    >>> TransformerConfig.big().heads
    16
    """

    vocabulary: int = configs.size(37000, "vocab_size", missing=58101)
    # None: both share one embedding
    target_vocabulary: int | None = configs.size(None, "decoder_vocab_size")
    # whether the output shares the target embedding
    tied: bool = configs.switch(True, "tie_word_embeddings")
    dim: int = configs.size(512, "d_model", missing=1024)
    depth: int = configs.layers(6, "encoder_layers", missing=12)
    decoder_depth: int = configs.layers(6, "decoder_layers", missing=12)
    heads: int = configs.heads(8, "encoder_attention_heads", missing=16)
    decoder_heads: int = configs.heads(8, "decoder_attention_heads", missing=16)
    inner: int = configs.size(2048, "encoder_ffn_dim", missing=4096)
    decoder_inner: int = configs.size(2048, "decoder_ffn_dim", missing=4096)
    activation: str = configs.activation("relu", "activation_function", missing="gelu")
    dropout: float = configs.rate(0.1, "dropout")
    attention_dropout: float = configs.rate(0.0, "attention_dropout")
    activation_dropout: float = configs.rate(0.0, "activation_dropout")
    scale_embedding: bool = configs.switch(True, "scale_embedding", missing=False)
    # only written to checkpoints; sinusoids have no limit
    length: int = configs.size(1024, "max_position_embeddings")
    pad_token: int | None = configs.token(1, "pad_token_id", missing=58100)
    end_token: int | None = configs.token(0, "eos_token_id")
    start_token: int | None = configs.token(1, "decoder_start_token_id", missing=58100)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dim % 2:
            raise InputError(f"TransformerConfig(dim=...) must be even, but got {self.dim}.")
        if not self.tied and self.target_vocabulary is None:
            raise InputError("TransformerConfig(tied=False) needs a target_vocabulary.")

    @classmethod
    def base(cls) -> TransformerConfig:
        """65 million parameters."""
        return cls()

    @classmethod
    def big(cls) -> TransformerConfig:
        """213 million parameters."""
        return cls(
            dim=1024, heads=16, decoder_heads=16, inner=4096, decoder_inner=4096, dropout=0.3
        )


class Transformer(EncoderDecoder):
    """The Transformer. Source, target and output can share one embedding or have their own.

    >>> model = Transformer(TransformerConfig(vocabulary=10, dim=8, depth=1, decoder_depth=1))
    >>> list(model(torch.tensor([[4, 5, 0]]), torch.tensor([[1, 6]])).shape)
    [1, 2, 10]
    """

    config: TransformerConfig

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        written = config.target_vocabulary or config.vocabulary
        self.target_tokens, self.output = None, None
        if config.target_vocabulary is not None:
            self.target_tokens = nn.Embedding(written, config.dim)
        if not config.tied:
            self.output = nn.Parameter(torch.empty(written, config.dim))
        self.scale = math.sqrt(config.dim) if config.scale_embedding else 1.0
        self.dropout = nn.Dropout(config.dropout)
        self.encoder = Stack(
            [_block(config, config.heads, config.inner, cross=False) for _ in range(config.depth)]
        )
        self.decoder = Stack(
            [
                _block(config, config.decoder_heads, config.decoder_inner, cross=True)
                for _ in range(config.decoder_depth)
            ]
        )
        self.register_buffer("output_bias", torch.zeros(1, written))
        self.output_bias: Tensor
        self._sinusoids: list[Tensor] = []  # [positions, dim]; the last one is the longest
        self._initialise()

    def _initialise(self) -> None:
        """Initialise embeddings as normal with dim^-1/2, matrices as Glorot uniform, biases as 0.

        Output layers start smaller in deeper models. Otherwise the decoder ignores the encoder in
        much of the training (https://arxiv.org/abs/1908.11365).
        """
        depths = {"encoder": self.config.depth, "decoder": self.config.decoder_depth}
        for name, parameter in self.named_parameters():
            if name in ("tokens.weight", "target_tokens.weight", "output"):
                nn.init.normal_(parameter, std=self.config.dim**-0.5)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith("qkv.weight"):
                for part in parameter.chunk(3):
                    nn.init.xavier_uniform_(part)
            elif name.endswith(("output.weight", "down.weight")):
                depth = depths[name.split(".")[0]]
                nn.init.xavier_uniform_(parameter, gain=(2 * depth) ** -0.5)
            elif parameter.dim() == 2:
                nn.init.xavier_uniform_(parameter)

    def encode(self, source: Tensor, *, padding: Padding | None = None) -> Tensor:
        """Return the hidden states of ``source`` [batch, n]: [batch, n, dim]."""
        hidden: Tensor = self.encoder(self._embed(self.tokens, source, padding), mask=padding)
        return hidden

    def _embed_target(self, ids: Tensor, padding: Padding | None, past: int) -> Tensor:
        return self._embed(self.target_tokens or self.tokens, ids, padding, past)

    def _decode_step(self, ids: Tensor, state: State) -> Tensor:
        past, tokens = len(state), self.target_tokens or self.tokens
        table = self._table(past + 1, ids.device)
        at = table[past] if state.pads is None else table[past - state.pads][:, None]
        x = torch.add(at.to(tokens.weight.dtype), tokens(ids), alpha=self.scale)
        return self.decoder.step(x, state, state.bias(x))

    def _embed(
        self, tokens: nn.Embedding, ids: Tensor, padding: Padding | None, past: int = 0
    ) -> Tensor:
        check_ids(ids, tokens.weight.shape[0])
        stop = past + ids.shape[1]
        table = self._table(stop, ids.device)
        if padding is None or padding.side == "right":
            at = table[past:stop]
        else:
            at = table[positions(padding, past, stop, ids.device)]
        x = torch.add(at.to(tokens.weight.dtype), tokens(ids), alpha=self.scale)
        return self.dropout(x) if self.training else x

    def _table(self, length: int, device: torch.device) -> Tensor:
        """Return the sinusoids of at least ``length`` positions: [positions, dim]."""
        tables = self._sinusoids
        if not tables or len(tables[-1]) < length or tables[-1].device != device:
            # Allocate more than needed now. Keep the shorter tables, because recorded CUDA graphs
            # still read them.
            length = max(length, 2 * len(tables[-1]) if tables else min(self.config.length, 4096))
            tables.append(sinusoidal(length, self.config.dim, layout="half", device=device))
        return tables[-1]

    def output_weights(self) -> tuple[Tensor, Tensor]:
        weight = (self.target_tokens or self.tokens).weight if self.output is None else self.output
        return weight, self.output_bias[0]

    def ban(self, tokens: object) -> bool:
        # Marian's files ban the padding token.
        for token in tokens if isinstance(tokens, list) else ():
            if isinstance(token, list) and len(token) == 1 and type(token[0]) is int:
                if 0 <= token[0] < self.output_vocabulary:
                    self.output_bias[0, token[0]] = -torch.inf
        return True

    @property
    def start_token(self) -> int:
        config = self.config
        return config.start_token if config.start_token is not None else config.pad_token or 0

    @property
    def output_vocabulary(self) -> int:
        return self.config.target_vocabulary or self.config.vocabulary

    # --------------------------------------------------------------------------- checkpoints

    fixed: ClassVar = {
        "is_decoder": False,
        "is_encoder_decoder": True,
        "normalize_before": False,
        "normalize_embedding": False,
        "add_final_layer_norm": False,
        "static_position_embeddings": True,
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> Config:
        shared, tied = (
            raw.get(name, True)
            for name in ("share_encoder_decoder_embeddings", "tie_word_embeddings")
        )
        if type(shared) is not bool:
            raise CheckpointError(
                f"config.json says share_encoder_decoder_embeddings = {shared!r}, not a boolean."
            )
        own = raw.get("decoder_vocab_size") or raw.get("vocab_size", 58101)
        # If the output is not tied, newer files hold an embedding for each side although they say
        # "shared". Older files hold a single one, which is loaded for both sides.
        target = None if shared and tied else raw.get("vocab_size", 58101) if shared else own
        return super().read_config({**raw, "decoder_vocab_size": target})

    def write_config(self) -> dict[str, Any]:
        config = self.config
        return super().write_config() | {
            "share_encoder_decoder_embeddings": config.target_vocabulary is None,
            "decoder_vocab_size": config.target_vocabulary or config.vocabulary,
        }

    @staticmethod
    def keys(config: TransformerConfig) -> KeyMap:
        return KeyMap(
            [
                Drop(r"^model\.(en|de)coder\.embed_positions\.weight$", "stored sinusoids"),
                *_table_keys(config),
                Rename("final_logits_bias", "output_bias"),
                *_stack_keys("encoder", config.depth),
                *_stack_keys("decoder", config.decoder_depth),
            ]
        )


def _block(config: TransformerConfig, heads: int, inner: int, *, cross: bool) -> Block:
    def attention() -> MultiHeadAttention:
        return MultiHeadAttention(config.dim, heads, dropout=config.attention_dropout)

    def around() -> PostNorm:
        return PostNorm(LayerNorm(config.dim), config.dropout)

    activation = ACTIVATIONS[config.activation]()
    return Block(
        attention(),
        around(),
        FeedForward(config.dim, inner, activation, dropout=config.activation_dropout),
        around(),
        cross=attention() if cross else None,
        around_cross=around() if cross else None,
    )


def _table_keys(config: TransformerConfig) -> Iterator[Step | Tie]:
    shared, head = "model.shared.weight", "lm_head.weight"
    source, target = (f"model.{half}.embed_tokens.weight" for half in ("encoder", "decoder"))
    if config.target_vocabulary is None:
        yield Rename(shared, "tokens.weight")
        yield from (Tie(copy, shared) for copy in (source, target, head))
        return
    yield Rename(source, "tokens.weight", otherwise=shared)
    yield Rename(target, "target_tokens.weight", otherwise=shared)
    yield Tie(head, target) if config.tied else Rename(head, "output")


def _stack_keys(half: str, depth: int) -> Iterator[Step]:
    names = {
        "fc1": "feed_forward.up",
        "fc2": "feed_forward.down",
        "final_layer_norm": "around_feed_forward.norm",
    }
    attentions = {"self_attn": "attention"}
    if half == "decoder":
        attentions["encoder_attn"] = "cross"
    for old, new in attentions.items():
        names[" ".join(f"{old}.{part}_proj" for part in "qkv")] = f"{new}.qkv"
        names |= {f"{old}.out_proj": f"{new}.output", f"{old}_layer_norm": f"around_{new}.norm"}
    yield from renames(f"model.{half}.layers.{{}}.", f"{half}.blocks.{{}}.", names, layers=depth)
