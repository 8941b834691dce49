"""BERT (Devlin et al. 2019): an encoder that reads in both directions.

https://arxiv.org/abs/1810.04805
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from regard.checkpoints.keymap import Drop, KeyMap, Rename, Spelling, Step, Tie, renames
from regard.errors import InputError
from regard.layers.modules import Block, FeedForward, LayerNorm, MultiHeadAttention, PostNorm
from regard.layers.positions import LearnedPositions
from regard.mechanism.masks import Padding
from regard.models import configs
from regard.models.configs import ACTIVATIONS, Config
from regard.models.model import Model, Stack, check_ids, positions
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class BertConfig(Config):
    """The configuration of a BERT. The defaults are bert-base-uncased.

    >>> BertConfig.large().depth
    24
    """

    vocabulary: int = configs.size(30522, "vocab_size")
    length: int = configs.size(512, "max_position_embeddings")
    token_types: int = configs.size(2, "type_vocab_size")  # one type for each of two sentences
    dim: int = configs.size(768, "hidden_size")
    depth: int = configs.layers(12, "num_hidden_layers")
    heads: int = configs.heads(12, "num_attention_heads")
    inner: int = configs.size(3072, "intermediate_size")
    activation: str = configs.activation("gelu", "hidden_act")
    dropout: float = configs.rate(0.1, "hidden_dropout_prob")
    attention_dropout: float = configs.rate(0.1, "attention_probs_dropout_prob")
    epsilon: float = configs.positive(1e-12, "layer_norm_eps")
    pad_token: int | None = configs.token(0, "pad_token_id")

    @classmethod
    def base(cls) -> BertConfig:
        """110 million parameters."""
        return cls()

    @classmethod
    def large(cls) -> BertConfig:
        """340 million parameters."""
        return cls(dim=1024, depth=24, heads=16, inner=4096)


class BertEncoder(nn.Module):
    """The embeddings and blocks that all BERTs share."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.places = LearnedPositions(config.length, config.dim)
        self.token_types = nn.Embedding(config.token_types, config.dim)
        self.norm = LayerNorm(config.dim, config.epsilon)
        self.dropout = nn.Dropout(config.dropout)
        self.stack = Stack([_block(config) for _ in range(config.depth)])

    def forward(
        self, ids: Tensor, *, token_types: Tensor | None = None, padding: Padding | None = None
    ) -> Tensor:
        """Return the hidden states of ``ids`` [batch, n]; ``token_types`` are 0 or 1."""
        check_ids(ids, self.config.vocabulary)
        length = ids.shape[1]
        if length > self.config.length:
            raise InputError(
                f"This BERT reads at most {self.config.length} tokens, but was given {length}."
            )
        if token_types is None:
            token_types = torch.zeros_like(ids)
        else:
            check_ids(token_types, self.config.token_types, "Token types")
        at = positions(padding, 0, length, ids.device)
        x = self.norm(self.tokens(ids) + self.places(at) + self.token_types(token_types))
        result: Tensor = self.stack(self.dropout(x), mask=padding)
        return result


def _block(config: BertConfig) -> Block:
    return Block(
        MultiHeadAttention(config.dim, config.heads, dropout=config.attention_dropout),
        PostNorm(LayerNorm(config.dim, config.epsilon), config.dropout),
        FeedForward(config.dim, config.inner, ACTIVATIONS[config.activation]()),
        PostNorm(LayerNorm(config.dim, config.epsilon), config.dropout),
    )


def _initialise(model: nn.Module) -> None:
    """Initialise like the released code: normal, deviation 0.02, truncated at 0.04; biases 0."""
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
        elif "norm" not in name:
            nn.init.trunc_normal_(parameter, std=0.02, a=-0.04, b=0.04)


class _Bert(Model):
    """The base class of all BERT models: the encoder, and the keys of config.json."""

    config: BertConfig

    fixed: ClassVar = {
        "is_decoder": False,
        "add_cross_attention": False,
        "position_embedding_type": "absolute",
    }

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.encoder = BertEncoder(config)

    @classmethod
    def sizes_for(cls, tokenizer: Tokenizer, length: int) -> dict[str, Any]:
        return {"length": length, "pad_token": tokenizer.id("[PAD]")}


class Bert(_Bert):
    """BERT as an encoder, for hidden states and sentence vectors.

    >>> model = Bert(BertConfig(vocabulary=10, dim=8, depth=1, heads=2, inner=16))
    >>> list(model(torch.tensor([[1, 2, 3]])).shape)
    [1, 3, 8]
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.pooler = nn.Linear(config.dim, config.dim)
        _initialise(self)

    def forward(
        self, ids: Tensor, *, token_types: Tensor | None = None, padding: Padding | None = None
    ) -> Tensor:
        """Return the hidden states of ``ids`` [batch, n]: [batch, n, dim]."""
        hidden: Tensor = self.encoder(ids, token_types=token_types, padding=padding)
        return hidden

    def pool(self, hidden: Tensor, padding: Padding | None = None) -> Tensor:
        """Apply the pooler to the first token: [batch, dim], for next-sentence prediction."""
        first = hidden[:, 0]
        if padding is not None and padding.side == "left":
            lengths = torch.as_tensor(padding.lengths, device=hidden.device)
            starts = (hidden.shape[1] - lengths.clamp(min=1)).expand(len(hidden))
            first = hidden[torch.arange(len(hidden), device=hidden.device), starts]
        pooled: Tensor = self.pooler(first)
        return pooled.tanh()

    def vectors(
        self, ids: Tensor, *, token_types: Tensor | None = None, padding: Padding | None = None
    ) -> Tensor:
        """Return a unit vector for each sentence, the mean over its tokens: [batch, dim].

        A sentence without tokens gets zeros.
        """
        hidden = self(ids, token_types=token_types, padding=padding)
        if padding is None:
            return normalize(hidden.mean(1), dim=-1)
        index = torch.arange(ids.shape[1], device=ids.device)
        if padding.side == "left":
            index = index.flip(0)
        lengths = torch.as_tensor(padding.lengths, device=ids.device)[:, None]
        real = (index < lengths).to(hidden.dtype)[..., None]  # [batch, n, 1]
        return normalize((hidden * real).sum(1) / lengths.clamp(min=1), dim=-1)

    @staticmethod
    def keys(config: BertConfig) -> KeyMap:
        return KeyMap(
            [
                Spelling(r"^bert\.", ""),
                Drop(r"^(cls|qa_outputs|classifier)\.", "a head that the encoder does not have"),
                *_encoder_keys(config, ""),
                *renames("", "", {"pooler.dense": "pooler"}),
            ]
        )


class BertMaskedLM(_Bert):
    """BERT that predicts masked tokens. The output layer shares the token embedding.

    >>> model = BertMaskedLM(BertConfig(vocabulary=10, dim=8, depth=1, heads=2, inner=16))
    >>> list(model(torch.tensor([[1, 2, 3]])).shape)
    [1, 3, 10]
    """

    fixed: ClassVar = {**_Bert.fixed, "tie_word_embeddings": True}

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.transform = nn.Linear(config.dim, config.dim)
        self.activation = ACTIVATIONS[config.activation]()
        self.norm = LayerNorm(config.dim, config.epsilon)
        self.bias = nn.Parameter(torch.zeros(config.vocabulary))
        _initialise(self)

    def forward(
        self,
        ids: Tensor,
        *,
        token_types: Tensor | None = None,
        padding: Padding | None = None,
        labels: Tensor | None = None,
    ) -> Tensor:
        """Return the logits of the original token at each position: [batch, n, vocabulary].

        ``labels`` [batch, n] are the original tokens, or -100 to ignore a position. With them, the
        result is the summed loss, computed by :func:`regard.linear_cross_entropy`.
        """
        hidden = self.encoder(ids, token_types=token_types, padding=padding)
        hidden = self.norm(self.activation(self.transform(hidden)))
        return self.logits(hidden) if labels is None else self._loss(hidden, labels, 0.0)

    def output_weights(self) -> tuple[Tensor, Tensor]:
        return self.encoder.tokens.weight, self.bias

    @staticmethod
    def keys(config: BertConfig) -> KeyMap:
        predictions, transform = "cls.predictions", {"dense": "transform", "LayerNorm": "norm"}
        return KeyMap(
            [
                Drop(r"^cls\.seq_relationship\.", "for next-sentence prediction"),
                *_encoder_keys(config, "bert."),
                *renames(f"{predictions}.transform.", "", transform),
                Rename(f"{predictions}.bias", "bias"),
                Tie(f"{predictions}.decoder.weight", "bert.embeddings.word_embeddings.weight"),
                Tie(f"{predictions}.decoder.bias", f"{predictions}.bias"),
            ]
        )


class BertAnswering(_Bert):
    """BERT for extractive question answering: it predicts where an answer starts and ends.

    >>> model = BertAnswering(BertConfig(vocabulary=10, dim=8, depth=1, heads=2, inner=16))
    >>> start, end = model(torch.tensor([[1, 2, 3]]))
    >>> list(start.shape)
    [1, 3]
    """

    def __init__(self, config: BertConfig) -> None:
        super().__init__(config)
        self.ends = nn.Linear(config.dim, 2)
        _initialise(self)

    def forward(
        self, ids: Tensor, *, token_types: Tensor | None = None, padding: Padding | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the logits of the answer's first token and of its last token, [batch, n] each."""
        hidden = self.encoder(ids, token_types=token_types, padding=padding)
        start, end = self.ends(hidden).unbind(-1)
        return start, end

    @staticmethod
    def keys(config: BertConfig) -> KeyMap:
        return KeyMap([*_encoder_keys(config, "bert."), *renames("", "", {"qa_outputs": "ends"})])


# ----------------------------------------------------------------------------------- checkpoints


def _encoder_keys(config: BertConfig, prefix: str) -> Iterator[Step | Drop | Spelling]:
    yield Spelling(r"LayerNorm\.gamma$", "LayerNorm.weight")
    yield Spelling(r"LayerNorm\.beta$", "LayerNorm.bias")
    yield Drop(r"embeddings\.position_ids$", "0, 1, 2 ...")
    yield Drop(r"^bert\.pooler\.", "for next-sentence prediction")
    tables = {
        "word_embeddings": "tokens",
        "position_embeddings": "places",
        "token_type_embeddings": "token_types",
    }
    yield from renames(f"{prefix}embeddings.", "encoder.", tables, ["weight"])
    yield from renames(f"{prefix}embeddings.", "encoder.", {"LayerNorm": "norm"})
    names = {
        "attention.self.query attention.self.key attention.self.value": "attention.qkv",
        "attention.output.dense": "attention.output",
        "attention.output.LayerNorm": "around_attention.norm",
        "intermediate.dense": "feed_forward.up",
        "output.dense": "feed_forward.down",
        "output.LayerNorm": "around_feed_forward.norm",
    }
    theirs, ours = f"{prefix}encoder.layer.{{}}.", "encoder.stack.blocks.{}."
    yield from renames(theirs, ours, names, layers=config.depth)
