"""Transformer-XL (Dai et al. 2019): a language model that remembers the segments before.

https://arxiv.org/abs/1901.02860. The vocabulary is cut by frequency: rarer words have narrower
embeddings (https://arxiv.org/abs/1809.10853) and share an adaptive softmax
(https://arxiv.org/abs/1609.04309).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, nll_loss
from torch.utils.checkpoint import checkpoint

from regard.checkpoints.keymap import Drop, KeyMap, Rename, Step, Tie
from regard.decoding.state import Memories
from regard.errors import CheckpointError, InputError
from regard.layers.cache import Memory
from regard.layers.modules import FeedForward, LayerNorm, MultiHeadAttention, PostNorm
from regard.layers.positions import sinusoidal
from regard.mechanism.biases import RelativeContent
from regard.mechanism.functional import attention
from regard.mechanism.masks import Causal, Mask, Padding, Window
from regard.mechanism.seeing import See, Seen
from regard.models.model import (
    Config,
    ConfigMap,
    Model,
    Recomputing,
    check_ids,
    layers,
    optional_rate,
    optional_size,
    pad,
    positive,
    rate,
    size,
    switch,
    token,
)


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(Config):
    """The sizes of a Transformer-XL; those of transfo-xl-wt103 by default.

    ``cutoffs`` are where the vocabulary is cut, most frequent words first; words behind the i-th
    cut have embeddings ``div_val ** i`` times narrower. With ``div_val`` 1, for an uncut
    vocabulary, embeddings are as wide as the model and are not projected.

    >>> TransformerXLConfig().widths
    (1024, 256, 64, 16)
    """

    vocabulary: int = size(267735)
    cutoffs: tuple[int, ...] = (20000, 40000, 200000)
    div_val: int = size(4, most=64)
    dim: int = size(1024)
    embedding_dim: int = size(1024)
    depth: int = layers(18)
    heads: int = size(16)
    head_dim: int = size(64)
    inner: int = size(4096)
    memory: int = size(1600)  # how many positions each layer remembers
    furthest: int | None = optional_size()  # distances beyond it count as it
    same_length: bool = switch(True)  # every query attends to ``memory`` positions, no more
    dropout: float = rate(0.1)
    attention_dropout: float = rate(0.0)
    projection_dropout: float = rate(0.0)  # of queries, keys, values, and distances as keys
    embedding_dropout: float | None = optional_rate()  # what layers are given; None: as dropout
    output_dropout: float | None = optional_rate()  # what the softmax is given; None: as dropout
    word_dropout: float = rate(0.0)  # words of the vocabulary that a batch does without
    epsilon: float = positive(1e-5)
    end_token: int | None = token(0)

    def __post_init__(self) -> None:
        super().__post_init__()
        cuts = self.cutoffs
        whole = isinstance(cuts, tuple) and all(type(cut) is int for cut in cuts)
        if not whole or not all(self.bands):
            raise InputError(
                "TransformerXLConfig(cutoffs=...) must be rising whole numbers from 1 to below the "
                f"vocabulary of {self.vocabulary}, but got {self.cutoffs!r}."
            )
        if self.div_val == 1 and (cuts or self.embedding_dim != self.dim):
            raise InputError(
                "TransformerXLConfig(div_val=1) needs cutoffs=() and embedding_dim == dim, but got "
                f"cutoffs={cuts} and {self.embedding_dim} for {self.dim}."
            )
        if not self.widths[-1]:
            raise InputError(
                f"An embedding of {self.embedding_dim} cannot be divided {len(self.cutoffs)} times "
                f"by div_val={self.div_val}."
            )

    @classmethod
    def wt103(cls) -> TransformerXLConfig:
        """285 million parameters, for WikiText-103 by words."""
        return cls(furthest=1000)

    @property
    def bands(self) -> tuple[range, ...]:
        """The bands of the vocabulary, most frequent words first."""
        ends = (0, *self.cutoffs, self.vocabulary)
        return tuple(range(low, high) for low, high in pairwise(ends))

    @property
    def widths(self) -> tuple[int, ...]:
        """The width of the embeddings of each band."""
        return tuple(self.embedding_dim // self.div_val**i for i in range(len(self.cutoffs) + 1))

    @property
    def projected(self) -> bool:
        """Whether there are matrices between embeddings and the model's width."""
        return self.div_val > 1


class AdaptiveEmbedding(nn.Module):
    """An embedding for each band of the vocabulary, each projected to the model's width."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        sizes = list(zip(config.bands, config.widths, strict=True))
        self.tables = nn.ParameterList(torch.empty(len(band), width) for band, width in sizes)
        self.projections = nn.ParameterList(
            torch.empty(config.dim, width) for _, width in sizes if config.projected
        )

    def forward(self, ids: Tensor) -> Tensor:
        """``ids`` of any shape [...] as [..., dim], scaled by the square root of dim."""
        scaled: Tensor = self._rows(ids) * self.config.dim**0.5
        if self.training and self.config.word_dropout:
            # A word is there everywhere or nowhere (https://arxiv.org/abs/1512.05287), but for a
            # first one: with nothing before it that would be zeros, and the gradient of many
            # norms of zeros is no number.
            words = scaled.new_ones(self.config.vocabulary)
            kept = dropout(words, self.config.word_dropout)[ids]
            kept[..., 0] = 1
            scaled = scaled * kept[..., None]
        return scaled

    def _rows(self, ids: Tensor) -> Tensor:
        if not self.config.projected:
            row: Tensor = self.tables[0][ids]
            return row
        first, *others = zip(self.config.bands, self.tables, self.projections, strict=True)

        def within(band: range, table: Tensor, projection: Tensor) -> Tensor:
            # Ids of other bands get any row: to pick those inside would wait for the device.
            return linear(table[(ids - band.start).clamp(0, len(band) - 1)], projection)

        result = within(*first)
        for band, table, projection in others:
            inside = (ids >= band.start) & (ids < band.stop)
            result = result.where(~inside[..., None], within(band, table, projection))
        return result


class AdaptiveSoftmax(nn.Module):
    """Log-probabilities of all words: the first band's and the bands' own, then within each band.

    It shares the embedding's tables, and its projections but for the first.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        bands = len(config.cutoffs)
        self.projection = None
        if config.projected:
            self.projection = nn.Parameter(torch.empty(config.dim, config.widths[0]))
        self.biases = nn.ParameterList(torch.zeros(len(band)) for band in config.bands)
        self.band_weight, self.band_bias = None, None
        if bands:
            self.band_weight = nn.Parameter(torch.empty(bands, config.widths[0]))
            self.band_bias = nn.Parameter(torch.zeros(bands))

    def forward(self, hidden: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """``hidden`` [..., dim] as log-probabilities [..., vocabulary]."""
        weight, bias = embedding.tables[0], self.biases[0]
        if self.band_weight is not None and self.band_bias is not None:
            weight = torch.cat((weight, self.band_weight))
            bias = torch.cat((bias, self.band_bias))
        narrow = hidden if self.projection is None else hidden @ self.projection
        head = linear(narrow, weight, bias).log_softmax(-1)
        first = len(self.config.bands[0])
        parts = [head[..., :first]]
        for index in range(1, len(self.config.bands)):
            narrow = hidden @ embedding.projections[index]
            within = linear(narrow, embedding.tables[index], self.biases[index]).log_softmax(-1)
            parts.append(head[..., first + index - 1, None] + within)
        return torch.cat(parts, dim=-1)


class RelativeAttention(MultiHeadAttention):
    """Attention by content and by distance (section 3.3).

    The score of query i and key j is ``(q_i + u) . k_j + (q_i + v) . r_(i-j)``, scaled: u and v are
    learned for each head, and r projects the sinusoid of the distance.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(
            config.dim,
            config.heads,
            head_dim=config.head_dim,
            bias=False,
            dropout=config.attention_dropout,
        )
        self.relative = nn.Linear(config.dim, config.heads * config.head_dim, bias=False)
        self.content_bias = nn.Parameter(torch.empty(config.heads, config.head_dim))  # u
        self.distance_bias = nn.Parameter(torch.empty(config.heads, config.head_dim))  # v
        self.projection_dropout = nn.Dropout(config.projection_dropout)

    def forward(  # type: ignore[override]
        self,
        whole: Tensor,
        queries: int,
        distances: Tensor,
        mask: Mask,
        *,
        see: See | None = None,
    ) -> Tensor | tuple[Tensor, Seen]:
        """The last ``queries`` of ``whole`` [batch, n, dim] attend to all of it.

        ``distances`` [d, dim] are sinusoids of the distances 0, 1 ... d - 1. With ``see``, and
        what was seen.
        """
        query, key, value, bias = self.parts(whole, queries, distances)
        dropout = self.dropout if self.training else 0.0
        if see is None:
            return self.merge(attention(query, key, value, mask=mask, bias=bias, dropout=dropout))
        heads, seen = attention(query, key, value, mask=mask, bias=bias, dropout=dropout, see=see)
        return self.merge(heads), seen

    def parts(
        self, whole: Tensor, queries: int, distances: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, RelativeContent]:
        """Queries with u added, keys, values, and what the queries with v add to their scores."""
        query, key, value = self._parted(self.projection_dropout(self.qkv(whole)))
        query = query[:, :, whole.shape[1] - queries :]
        relative = self.projection_dropout(self.relative(distances))
        relative = relative.view(-1, self.heads, self.head_dim).transpose(0, 1)
        # Under autocast the parameters stay wider than what they are added to.
        content = query + self.content_bias[:, None].to(query.dtype)
        bias = RelativeContent(query + self.distance_bias[:, None].to(query.dtype), relative)
        return content, key, value, bias


class Layer(nn.Module):
    """Relative attention over the memory and the segment, then feed-forward."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.attention = RelativeAttention(config)
        self.around_attention = PostNorm(LayerNorm(config.dim, config.epsilon), config.dropout)
        self.feed_forward = FeedForward(config.dim, config.inner, dropout=config.dropout)
        self.around_feed_forward = PostNorm(LayerNorm(config.dim, config.epsilon), config.dropout)

    def forward(self, x: Tensor, whole: Tensor, distances: Tensor, mask: Mask) -> Tensor:
        x = self.around_attention(x, lambda h: self.attention(whole, h.shape[1], distances, mask))
        result: Tensor = self.around_feed_forward(x, self.feed_forward)
        return result


class Layers(Recomputing, nn.ModuleList):
    """The layers, one after another."""

    def forward(
        self, x: Tensor, distances: Tensor, mask: Mask, memories: Sequence[Memory] | None
    ) -> Tensor:
        """``x`` [batch, n, dim] through all layers, each with its memory before it."""
        for index, layer in enumerate(self):
            whole = x if memories is None else memories[index].extend(x)
            if self.recomputes:
                x = checkpoint(layer, x, whole, distances, mask, use_reentrant=False)
            else:
                x = layer(x, whole, distances, mask)
        return x


class TransformerXL(Model):
    """Transformer-XL with its adaptive softmax.

    >>> config = TransformerXLConfig(
    ...     vocabulary=12, cutoffs=(4, 8), div_val=2, dim=8, embedding_dim=8, depth=2, heads=2,
    ...     head_dim=4, inner=16, memory=6,
    ... )
    >>> model = TransformerXL(config)
    >>> memories = model.remember()
    >>> first = model(torch.tensor([[1, 2, 3]]), memories=memories)
    >>> second = model(torch.tensor([[4, 5, 6]]), memories=memories)  # knows the first segment
    >>> list(second.shape), len(memories)
    ([1, 3, 12], 6)
    """

    config: TransformerXLConfig

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__(config)
        self.embedding = AdaptiveEmbedding(config)
        first, last = config.embedding_dropout, config.output_dropout
        self.dropout = nn.Dropout(config.dropout if first is None else first)
        self.last_dropout = nn.Dropout(config.dropout if last is None else last)
        self.layers = Layers(Layer(config) for _ in range(config.depth))
        self.softmax = AdaptiveSoftmax(config)
        self._initialise()

    def _initialise(self) -> None:
        """Normal with 0.02 (projections 0.01), biases 0, norms near 1, as in the released code."""
        for name, parameter in self.named_parameters():
            if "norm.weight" in name:
                nn.init.normal_(parameter, mean=1.0, std=0.02)
            elif name.endswith((".bias", "band_bias")) or ".biases." in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.01 if "projection" in name else 0.02)

    def compile(self, *args: Any, **options: Any) -> None:
        """As of any module, but layer by layer.

        Layers are alike, so the compiler has one to do; over all of them and their memories at
        once it does not come to an end.
        """
        for layer in self.layers:
            layer.compile(*args, **options)

    def remember(self) -> Memories:
        """Empty memories, to be passed with every segment."""
        return Memories(self.config.depth, self.config.memory)

    def forward(
        self,
        ids: Tensor,
        *,
        memories: Memories | None = None,
        padding: Padding | None = None,
        labels: Tensor | None = None,
        activation: float = 0.0,
        slowness: float = 0.0,
    ) -> Tensor:
        """The log-probabilities of the token after each of ``ids`` [batch, n].

        The result is [batch, n, vocabulary]. With ``memories`` the ids come after all that went
        through them before, and their own padding counts.

        With ``labels`` [batch, m], the tokens that do come after each of the last m, it is their
        summed loss instead. Then what the last layer gives there is to be small, and to change
        little from one position to the next, as strongly as ``activation`` and ``slowness`` say:
        the mean squares of it, before dropout, and of its changes are added once for each label
        (after section 4.6 of https://arxiv.org/abs/1708.02182).
        """
        hidden = self.read(ids, memories=memories, padding=padding)
        if labels is None:
            return self.logits(hidden)
        last = hidden[:, hidden.shape[1] - labels.shape[1] :]
        told = self.logits(last).float().flatten(0, 1)
        loss = nll_loss(told, labels.flatten(), reduction="sum")
        if activation:
            loss = loss + activation * labels.numel() * last.float().square().mean()
        if slowness and last.shape[1] > 1:
            change = last.float().diff(dim=1)
            loss = loss + slowness * labels.numel() * change.square().mean()
        return loss

    def logits(self, hidden: Tensor) -> Tensor:
        """The log-probabilities of the token after each of ``hidden`` [..., dim]."""
        log_probabilities: Tensor = self.softmax(self.last_dropout(hidden), self.embedding)
        return log_probabilities

    def read(
        self, ids: Tensor, *, memories: Memories | None = None, padding: Padding | None = None
    ) -> Tensor:
        """The hidden state at each of ``ids`` [batch, n]: [batch, n, dim]."""
        check_ids(ids)
        config = self.config
        queries = ids.shape[1]
        keys = queries + (0 if memories is None else len(memories))
        mask: Mask = Causal()
        if config.same_length:
            mask = mask & Window(config.memory - 1)
        if memories is not None:
            if padding is not None:
                raise InputError("With memories, padding belongs to them: Memories(pads=...).")
            memories.read += queries
            if memories.pads is not None:
                real = (memories.read - memories.pads).clamp(max=keys)
                padding = Padding(real, side="left")
        if padding is not None:
            mask = mask & padding

        x = self.dropout(self.embedding(ids))
        # Distances beyond the last row take the last row: that is what "furthest" means.
        rows = keys if config.furthest is None else min(keys, config.furthest + 1)
        distances = sinusoidal(rows, config.dim, layout="half", device=ids.device)
        distances = self.dropout(distances.to(x.dtype))
        result: Tensor = self.layers(
            x, distances, mask, None if memories is None else memories.layers
        )
        return result

    def start_decoding(
        self,
        prompts: Sequence[Sequence[int]],
        room: int = 0,  # noqa: ARG002
    ) -> tuple[Tensor, Memories]:
        """What decoding starts from: the prompts, padded on the left, and empty memories.

        Memories have the length of the config: ``room`` changes nothing.
        """
        ids, padding = pad(prompts, 0, "left", self.config.vocabulary, self.device)
        memories = self.remember()
        if padding is not None:
            memories.pads = ids.shape[1] - torch.as_tensor(padding.lengths, device=ids.device)
        return ids, memories

    def step(self, ids: Tensor, state: Memories) -> Tensor:
        """The log-probabilities after the last of ``ids`` [batch, n]: [batch, vocabulary]."""
        return self.logits(self.read(ids, memories=state)[:, -1])

    # --------------------------------------------------------------------------- checkpoints

    architecture = "TransfoXLLMHeadModel"
    spelling = ConfigMap(
        "transfo-xl",
        {
            "vocab_size": "vocabulary",
            "cutoffs": "cutoffs",
            "div_val": "div_val",
            "d_model": "dim",
            "d_embed": "embedding_dim",
            "n_layer": "depth",
            "n_head": "heads",
            "d_head": "head_dim",
            "d_inner": "inner",
            "mem_len": "memory",
            "clamp_len": "furthest",
            "same_length": "same_length",
            "dropout": "dropout",
            "dropatt": "attention_dropout",
            "projection_dropout": "projection_dropout",
            "embedding_dropout": "embedding_dropout",
            "output_dropout": "output_dropout",
            "word_dropout": "word_dropout",
            "layer_norm_epsilon": "epsilon",
            "eos_token_id": "end_token",
        },
        defaults={"clamp_len": 1000},
        fixed={
            "pre_lnorm": False,
            "untie_r": True,
            "attn_type": 0,
            "adaptive": True,
            "tie_weight": True,
            "proj_share_all_but_first": True,
        },
    )

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> Config:
        found = dict(raw)
        cutoffs = raw.get("cutoffs", [20000, 40000, 200000])
        if not isinstance(cutoffs, list) or len(cutoffs) > 16:
            raise CheckpointError(f"config.json says cutoffs = {cutoffs!r}, not a list of numbers.")
        found["cutoffs"] = tuple(cutoffs)
        if isinstance(raw.get("clamp_len"), int) and raw["clamp_len"] <= 0:
            found["clamp_len"] = None  # unlimited
        config = cls.spelling.read(TransformerXLConfig, found)
        assert isinstance(config, TransformerXLConfig)
        ties = raw.get("tie_projs", [False] + [True] * len(config.cutoffs))
        if config.projected and ties != [False] + [True] * len(config.cutoffs):
            raise CheckpointError(
                "config.json ties projections in a way regard's Transformer-XL does not: it has "
                "its own for the first band of the vocabulary and shares the others."
            )
        return config

    def write_config(self) -> dict[str, Any]:
        raw = super().write_config()
        raw["cutoffs"] = list(self.config.cutoffs)
        raw["clamp_len"] = self.config.furthest or -1
        raw["tie_projs"] = [False] + [True] * len(self.config.cutoffs)
        return raw

    def generation(self) -> dict[str, Any]:
        return {"eos_token_id": self.config.end_token}

    @staticmethod
    def keys(config: TransformerXLConfig) -> KeyMap:
        return KeyMap(
            [
                Drop(r"^transformer\.pos_emb\.inv_freq$", "the frequencies of the sinusoids"),
                *_embedding_keys(config),
                *(step for index in range(config.depth) for step in _layer_keys(index)),
                *_band_keys(len(config.cutoffs)),
                *([Rename("crit.out_projs.0", "softmax.projection")] * config.projected),
            ]
        )


def _embedding_keys(config: TransformerXLConfig) -> Iterator[Step | Tie]:
    for band in range(len(config.bands)):
        table = f"transformer.word_emb.emb_layers.{band}.weight"
        projection = f"transformer.word_emb.emb_projs.{band}"
        yield Rename(table, f"embedding.tables.{band}")
        if config.projected:
            yield Rename(projection, f"embedding.projections.{band}")
        yield Rename(f"crit.out_layers.{band}.bias", f"softmax.biases.{band}")
        yield Tie(f"crit.out_layers.{band}.weight", table)
        if band:
            yield Tie(f"crit.out_projs.{band}", projection)


def _band_keys(count: int) -> Iterator[Step | Drop]:
    if count:
        yield Rename("crit.cluster_weight", "softmax.band_weight")
        yield Rename("crit.cluster_bias", "softmax.band_bias")
    else:
        yield Drop(r"^crit\.cluster_(weight|bias)$", "empty where there is one band")


def _layer_keys(index: int) -> Iterator[Step]:
    theirs, ours = f"transformer.layers.{index}", f"layers.{index}"
    for old, new in (
        ("dec_attn.qkv_net.weight", "attention.qkv.weight"),
        ("dec_attn.o_net.weight", "attention.output.weight"),
        ("dec_attn.r_net.weight", "attention.relative.weight"),
        ("dec_attn.r_w_bias", "attention.content_bias"),
        ("dec_attn.r_r_bias", "attention.distance_bias"),
        ("dec_attn.layer_norm.weight", "around_attention.norm.weight"),
        ("dec_attn.layer_norm.bias", "around_attention.norm.bias"),
        ("pos_ff.CoreNet.0.weight", "feed_forward.up.weight"),
        ("pos_ff.CoreNet.0.bias", "feed_forward.up.bias"),
        ("pos_ff.CoreNet.3.weight", "feed_forward.down.weight"),
        ("pos_ff.CoreNet.3.bias", "feed_forward.down.bias"),
        ("pos_ff.layer_norm.weight", "around_feed_forward.norm.weight"),
        ("pos_ff.layer_norm.bias", "around_feed_forward.norm.bias"),
    ):
        yield Rename(f"{theirs}.{old}", f"{ours}.{new}")
