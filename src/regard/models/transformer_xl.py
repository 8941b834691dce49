"""Transformer-XL (Dai et al. 2019): a language model with a memory of earlier segments.

https://arxiv.org/abs/1901.02860. Rarer words have narrower embeddings
(https://arxiv.org/abs/1809.10853). The output is an adaptive softmax
(https://arxiv.org/abs/1609.04309).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout, linear, nll_loss
from torch.utils.checkpoint import checkpoint

from regard.checkpoints.keymap import Drop, KeyMap, Rename, Step, Tie, renames
from regard.decoding.state import Memories
from regard.errors import CheckpointError, InputError
from regard.layers.cache import Memory
from regard.layers.modules import FeedForward, LayerNorm, MultiHeadAttention, PostNorm
from regard.layers.positions import sinusoidal
from regard.mechanism.biases import RelativeContent
from regard.mechanism.masks import Causal, Mask, Padding, Window
from regard.mechanism.seeing import See, Seen
from regard.models import configs
from regard.models.configs import Config
from regard.models.model import LanguageModel, Recomputing, check_ids
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class TransformerXLConfig(Config):
    """The configuration of a Transformer-XL. The defaults are transfo-xl-wt103.

    ``cutoffs`` divide the vocabulary into bands, most frequent words first. Each band has its own
    table, and the embeddings of band i are ``div_val ** i`` times narrower. With ``div_val=1`` all
    bands share one table, which is projected only if ``embedding_dim`` differs from ``dim``.

    >>> TransformerXLConfig().widths
    (1024, 256, 64, 16)
    """

    vocabulary: int = configs.size(267735, "vocab_size")
    cutoffs: tuple[int, ...] = configs.anything((20000, 40000, 200000), "cutoffs")
    div_val: int = configs.whole(64)(4, "div_val")
    dim: int = configs.size(1024, "d_model")
    embedding_dim: int = configs.size(1024, "d_embed")
    depth: int = configs.layers(18, "n_layer")
    heads: int = configs.size(16, "n_head")
    head_dim: int = configs.size(64, "d_head")
    inner: int = configs.size(4096, "d_inner")
    memory: int = configs.size(1600, "mem_len")  # positions that each layer remembers
    # the largest distance; larger ones are clamped to it
    furthest: int | None = configs.size(None, "clamp_len", missing=1000)
    # no query attends to more than ``memory`` keys
    same_length: bool = configs.switch(True, "same_length")
    dropout: float = configs.rate(0.1, "dropout")
    attention_dropout: float = configs.rate(0.0, "dropatt")
    # dropout of projected queries, keys, values and distances
    projection_dropout: float = configs.rate(0.0, "projection_dropout")
    # dropout before the layers; None: the same as ``dropout``
    embedding_dropout: float | None = configs.rate(None, "embedding_dropout")
    # dropout before the softmax; None: the same as ``dropout``
    output_dropout: float | None = configs.rate(None, "output_dropout")
    # the probability to drop all occurrences of a word in a batch
    word_dropout: float = configs.rate(0.0, "word_dropout")
    epsilon: float = configs.positive(1e-5, "layer_norm_epsilon")
    end_token: int | None = configs.token(0, "eos_token_id")

    def __post_init__(self) -> None:
        super().__post_init__()
        cuts = self.cutoffs
        whole = isinstance(cuts, tuple) and all(type(cut) is int for cut in cuts)
        if not whole or not all(self.bands):
            raise InputError(
                "TransformerXLConfig(cutoffs=...) must be rising whole numbers from 1 to below the "
                f"vocabulary of {self.vocabulary}, but got {self.cutoffs!r}."
            )
        if not self.widths[-1]:
            raise InputError(
                f"An embedding of {self.embedding_dim} cannot be divided {len(self.cutoffs)} times "
                f"by div_val={self.div_val}."
            )

    @classmethod
    def wt103(cls) -> TransformerXLConfig:
        """285 million parameters, for WikiText-103 at word level."""
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
    def tables(self) -> tuple[range, ...]:
        """The ids that each embedding table holds."""
        return self.bands if self.div_val > 1 else (range(self.vocabulary),)

    @property
    def projected(self) -> bool:
        """Whether matrices project embeddings to the model's width."""
        return self.div_val > 1 or self.embedding_dim != self.dim


class AdaptiveEmbedding(nn.Module):
    """Embeddings of the bands of the vocabulary, projected to the model's width."""

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        sizes = list(zip(config.tables, config.widths, strict=False))
        self.tables = nn.ParameterList(torch.empty(len(rows), width) for rows, width in sizes)
        self.projections = nn.ParameterList(
            torch.empty(config.dim, width) for _, width in sizes if config.projected
        )

    def forward(self, ids: Tensor) -> Tensor:
        """Embed ``ids`` [...], scaled by the square root of dim: [..., dim]."""
        scaled: Tensor = self._rows(ids) * self.config.dim**0.5
        if self.training and self.config.word_dropout:
            # A word is dropped everywhere or nowhere (https://arxiv.org/abs/1512.05287). The first
            # word of a sequence is kept: attending to zeros only would give NaN gradients.
            words = scaled.new_ones(self.config.vocabulary)
            kept = dropout(words, self.config.word_dropout)[ids]
            kept[..., 0] = 1
            scaled = scaled * kept[..., None]
        return scaled

    def band(self, index: int) -> tuple[Tensor, Tensor | None]:
        """Return the embeddings [words, width] of one band, and its projection if there is one.

        Bands that share a table share its projection.
        """
        which = min(index, len(self.tables) - 1)
        band, first = self.config.bands[index], self.config.tables[which].start
        rows = self.tables[which][band.start - first : band.stop - first]
        return rows, self.projections[which] if self.config.projected else None

    def _rows(self, ids: Tensor) -> Tensor:
        if not self.config.projected:
            row: Tensor = self.tables[0][ids]
            return row
        first, *others = zip(self.config.tables, self.tables, self.projections, strict=True)

        def within(band: range, table: Tensor, projection: Tensor) -> Tensor:
            # Ids of other bands get an arbitrary row: selecting ids would wait for the device.
            return linear(table[(ids - band.start).clamp(0, len(band) - 1)], projection)

        result = within(*first)
        for band, table, projection in others:
            inside = (ids >= band.start) & (ids < band.stop)
            result = result.where(~inside[..., None], within(band, table, projection))
        return result


class AdaptiveSoftmax(nn.Module):
    """An adaptive softmax over the bands of the vocabulary.

    The head predicts a word of the first band, or another band. That band's own softmax predicts
    the word. The layer shares the embedding's tables, and all its projections except the first.
    """

    def __init__(self, config: TransformerXLConfig) -> None:
        super().__init__()
        self.config = config
        bands = len(config.cutoffs)
        self.projection = None
        if config.projected:
            self.projection = nn.Parameter(torch.empty(config.dim, config.widths[0]))
        self.biases = nn.ParameterList(torch.zeros(len(rows)) for rows in config.tables)
        self.band_weight, self.band_bias = None, None
        if bands:
            self.band_weight = nn.Parameter(torch.empty(bands, config.widths[0]))
            self.band_bias = nn.Parameter(torch.zeros(bands))

    def forward(self, hidden: Tensor, embedding: AdaptiveEmbedding) -> Tensor:
        """Return the log-probabilities given ``hidden`` [..., dim]: [..., vocabulary]."""
        bands = self.config.bands
        biases = self.biases
        if len(biases) < len(bands):
            biases = biases[0].split([len(band) for band in bands])
        weight, bias = embedding.band(0)[0], biases[0]
        if self.band_weight is not None and self.band_bias is not None:
            weight = torch.cat((weight, self.band_weight))
            bias = torch.cat((bias, self.band_bias))
        narrow = hidden if self.projection is None else hidden @ self.projection
        head = linear(narrow, weight, bias).log_softmax(-1)
        first = len(bands[0])
        parts = [head[..., :first]]
        for index in range(1, len(bands)):
            rows, projection = embedding.band(index)
            narrow = hidden if projection is None else hidden @ projection
            within = linear(narrow, rows, biases[index]).log_softmax(-1)
            parts.append(head[..., first + index - 1, None] + within)
        return torch.cat(parts, dim=-1)


class RelativeAttention(MultiHeadAttention):
    """Attention with scores from content and distance (section 3.3).

    The score of query i and key j is ``(q_i + u) . k_j + (q_i + v) . r_(i-j)``, times the scale.
    Each head learns u and v, and r is the projected sinusoid of the distance.
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
        """Let the last ``queries`` positions of ``whole`` [batch, n, dim] attend to all positions.

        ``distances`` [d, dim] are the sinusoids of distances 0, 1 ... d - 1. With ``see``, return
        (output, Seen).
        """
        query, key, value, bias = self.parts(whole, queries, distances)
        heads = self.attend(query, key, value, mask=mask, bias=bias, see=see)
        return heads.output if heads.seen is None else (heads.output, heads.seen)

    def parts(
        self, whole: Tensor, queries: int, distances: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, RelativeContent]:
        """Return the queries plus u, the keys, the values, and the bias by distance."""
        query, key, value = self.split_qkv(self.projection_dropout(self.qkv(whole)))
        query = query[:, :, whole.shape[1] - queries :]
        relative = self.projection_dropout(self.relative(distances))
        relative = relative.view(-1, self.heads, self.head_dim).transpose(0, 1)
        # Autocast keeps the parameters in float32, so cast them to the queries' dtype.
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
    """The layers in sequence."""

    def forward(
        self, x: Tensor, distances: Tensor, mask: Mask, memories: Sequence[Memory] | None
    ) -> Tensor:
        """Apply all layers to ``x`` [batch, n, dim]; each layer also reads its memory."""
        for index, layer in enumerate(self):
            whole = x if memories is None else memories[index].extend(x)
            if self.recomputes:
                x = checkpoint(layer, x, whole, distances, mask, use_reentrant=False)
            else:
                x = layer(x, whole, distances, mask)
        return x


class TransformerXL(LanguageModel):
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
    remembers = True
    relative = True

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
        """Initialise like the released code: deviation 0.02 (projections 0.01), biases 0."""
        for name, parameter in self.named_parameters():
            if "norm.weight" in name:
                nn.init.normal_(parameter, mean=1.0, std=0.02)
            elif name.endswith((".bias", "band_bias")) or ".biases." in name:
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=0.01 if "projection" in name else 0.02)

    @classmethod
    def sizes_for(cls, tokenizer: Tokenizer, length: int) -> dict[str, Any]:
        return {**super().sizes_for(tokenizer, length), "cutoffs": ()}

    def compile(self, *args: Any, **options: Any) -> None:
        """Compile layer by layer.

        All layers share one compiled function. The compiler does not finish if it gets all layers
        with their memories at once.
        """
        for layer in self.layers:
            layer.compile(*args, **options)

    def remember(self) -> Memories:
        """Return empty memories. Pass the same object with every segment; each call updates it."""
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
        """Return the log-probabilities of the next tokens: [batch, n, vocabulary].

        With ``memories``, ``ids`` [batch, n] follow the segments already read, and the memories
        give the padding.

        ``labels`` [batch, m] are the tokens that follow the last m ids. With them, the result is
        the summed loss. ``activation`` and ``slowness`` weight two penalties on the last layer's
        output before dropout: the mean square of the output, and the mean square of its change
        between neighbouring positions. Each is multiplied by the number of labels (section 4.6 of
        https://arxiv.org/abs/1708.02182).
        """
        hidden = self.read(ids, memories=memories, padding=padding)
        if labels is None:
            return self.logits(hidden)
        last = hidden[:, hidden.shape[1] - labels.shape[1] :]
        predicted = self.logits(last).float().flatten(0, 1)
        loss = nll_loss(predicted, labels.flatten(), reduction="sum")
        if activation:
            loss = loss + activation * labels.numel() * last.float().square().mean()
        if slowness and last.shape[1] > 1:
            change = last.float().diff(dim=1)
            loss = loss + slowness * labels.numel() * change.square().mean()
        return loss

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities of the next tokens given ``hidden`` [..., dim]."""
        log_probabilities: Tensor = self.softmax(self.last_dropout(hidden), self.embedding)
        return log_probabilities

    def read(
        self, ids: Tensor, *, memories: Memories | None = None, padding: Padding | None = None
    ) -> Tensor:
        """Return the hidden states of ``ids`` [batch, n]: [batch, n, dim]."""
        check_ids(ids, self.config.vocabulary)
        config = self.config
        queries = ids.shape[1]
        keys = queries + (0 if memories is None else len(memories))
        mask: Mask = Causal()
        if config.same_length:
            mask = mask & Window(config.memory - 1)
        if memories is not None:
            if padding is not None:
                raise InputError(
                    "Memories hold their own padding: pass Memories(pads=...), not padding=."
                )
            memories.read += queries
            if memories.pads is not None:
                real = (memories.read - memories.pads).clamp(max=keys)
                padding = Padding(real, side="left")
        if padding is not None:
            mask = mask & padding

        x = self.dropout(self.embedding(ids))
        # Larger distances use the last row.
        rows = keys if config.furthest is None else min(keys, config.furthest + 1)
        distances = sinusoidal(rows, config.dim, layout="half", device=ids.device)
        distances = self.dropout(distances.to(x.dtype))
        result: Tensor = self.layers(
            x, distances, mask, None if memories is None else memories.layers
        )
        return result

    def _state(self, room: int, pads: Tensor | None) -> Memories:  # noqa: ARG002 - the config sets the length
        return Memories(self.config.depth, self.config.memory, pads)

    def step(self, ids: Tensor, state: Memories) -> Tensor:
        """Return log-probabilities after the last of ``ids`` [batch, n]: [batch, vocabulary]."""
        return self.logits(self.read(ids, memories=state)[:, -1])

    # --------------------------------------------------------------------------- checkpoints

    fixed: ClassVar = {
        "pre_lnorm": False,
        "untie_r": True,
        "attn_type": 0,
        "adaptive": True,
        "tie_weight": True,
        "proj_share_all_but_first": True,
    }

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> Config:
        found = dict(raw)
        cutoffs = raw.get("cutoffs", [20000, 40000, 200000])
        if not isinstance(cutoffs, list) or len(cutoffs) > 16:
            raise CheckpointError(
                f"config.json says cutoffs = {cutoffs!r}, not a list of at most 16 numbers."
            )
        found["cutoffs"] = tuple(cutoffs)
        if isinstance(raw.get("clamp_len"), int) and raw["clamp_len"] <= 0:
            found["clamp_len"] = None  # unlimited
        config = super().read_config(found)
        assert isinstance(config, TransformerXLConfig)
        ties = raw.get("tie_projs", [False] + [True] * len(config.cutoffs))
        if config.projected and ties != [False] + [True] * len(config.cutoffs):
            raise CheckpointError(
                f"config.json says tie_projs = {ties!r}, but regard implements only false for the "
                "first band and true for the others."
            )
        return config

    def write_config(self) -> dict[str, Any]:
        raw = super().write_config()
        raw["cutoffs"] = list(self.config.cutoffs)
        raw["clamp_len"] = self.config.furthest or -1
        raw["tie_projs"] = [False] + [True] * len(self.config.cutoffs)
        return raw

    @staticmethod
    def keys(config: TransformerXLConfig) -> KeyMap:
        bands = {f"crit.cluster_{kind}": f"softmax.band_{kind}" for kind in ("weight", "bias")}
        return KeyMap(
            [
                Drop(r"^transformer\.pos_emb\.inv_freq$", "the frequencies of the sinusoids"),
                *_embedding_keys(config),
                *_layer_keys(config.depth),
                *(Rename(theirs, ours) for theirs, ours in bands.items() if config.cutoffs),
                Drop(r"^crit\.cluster_(weight|bias)$", "empty if there is one band"),
                *([Rename("crit.out_projs.0", "softmax.projection")] * config.projected),
            ]
        )


def _embedding_keys(config: TransformerXLConfig) -> Iterator[Step | Tie]:
    for index in range(len(config.tables)):
        table = f"transformer.word_emb.emb_layers.{index}.weight"
        yield Rename(table, f"embedding.tables.{index}")
        yield Rename(f"crit.out_layers.{index}.bias", f"softmax.biases.{index}")
        yield Tie(f"crit.out_layers.{index}.weight", table)
        if config.projected:
            projection = f"transformer.word_emb.emb_projs.{index}"
            yield Rename(projection, f"embedding.projections.{index}")
    for band in range(1, len(config.bands) if config.projected else 1):
        index = min(band, len(config.tables) - 1)
        yield Tie(f"crit.out_projs.{band}", f"transformer.word_emb.emb_projs.{index}")


def _layer_keys(depth: int) -> Iterator[Step]:
    theirs, ours = "transformer.layers.{}.", "layers.{}."
    products = {
        "dec_attn.qkv_net": "attention.qkv",
        "dec_attn.o_net": "attention.output",
        "dec_attn.r_net": "attention.relative",
    }
    yield from renames(theirs, ours, products, ["weight"], layers=depth)
    layers = {
        "dec_attn.layer_norm": "around_attention.norm",
        "pos_ff.CoreNet.0": "feed_forward.up",
        "pos_ff.CoreNet.3": "feed_forward.down",
        "pos_ff.layer_norm": "around_feed_forward.norm",
    }
    yield from renames(theirs, ours, layers, layers=depth)
    for index in range(depth):
        for old, new in (("r_w_bias", "content_bias"), ("r_r_bias", "distance_bias")):
            key = f"{ours.format(index)}attention.{new}"
            yield Rename(f"{theirs.format(index)}dec_attn.{old}", key)
