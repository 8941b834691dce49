"""GPT-2 (Radford et al. 2019): a decoder that predicts the next token.

https://cdn.openai.com/better-language-models/language_models_are_unsupervised_multitask_learners.pdf
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn

from regard.checkpoints.keymap import Drop, KeyMap, Spelling, Tie, Transpose, renames
from regard.decoding.state import State
from regard.errors import InputError
from regard.layers.modules import Block, FeedForward, LayerNorm, MultiHeadAttention, PreNorm
from regard.layers.positions import LearnedPositions
from regard.mechanism.masks import Causal, Padding
from regard.models import configs
from regard.models.configs import ACTIVATIONS, Config
from regard.models.model import LanguageModel, Stack, check_ids, positions
from regard.text.tokenizer import Tokenizer


@dataclass(frozen=True, kw_only=True)
class GPT2Config(Config):
    """The configuration of a GPT-2. The defaults are the smallest model.

    >>> GPT2Config.medium().dim
    1024
    """

    vocabulary: int = configs.size(50257, "vocab_size")
    length: int = configs.size(1024, "n_positions")
    dim: int = configs.size(768, "n_embd")
    depth: int = configs.layers(12, "n_layer")
    heads: int = configs.heads(12, "n_head")
    inner: int | None = configs.size(None, "n_inner")  # None: four times dim
    activation: str = configs.activation("gelu_new", "activation_function")
    dropout: float = configs.rate(0.1, "resid_pdrop")
    embedding_dropout: float = configs.rate(0.1, "embd_pdrop")
    attention_dropout: float = configs.rate(0.1, "attn_pdrop")
    epsilon: float = configs.positive(1e-5, "layer_norm_epsilon")
    # divide the scores of layer i = 1, 2 ... by i
    scale_by_layer: bool = configs.switch(False, "scale_attn_by_inverse_layer_idx")
    begin_token: int | None = configs.token(50256, "bos_token_id")
    end_token: int | None = configs.token(50256, "eos_token_id")
    pad_token: int | None = configs.token(None, "pad_token_id")

    @classmethod
    def small(cls) -> GPT2Config:
        """124 million parameters."""
        return cls()

    @classmethod
    def medium(cls) -> GPT2Config:
        """355 million parameters."""
        return cls(dim=1024, depth=24, heads=16)

    @classmethod
    def large(cls) -> GPT2Config:
        """774 million parameters."""
        return cls(dim=1280, depth=36, heads=20)

    @classmethod
    def xl(cls) -> GPT2Config:
        """1558 million parameters."""
        return cls(dim=1600, depth=48, heads=25)


class GPT2(LanguageModel):
    """GPT-2 with its language-model head, which shares the token embedding.

    >>> import torch
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=1, heads=2))
    >>> list(model(torch.tensor([[1, 2, 3]])).shape)
    [1, 3, 10]
    """

    config: GPT2Config

    def __init__(self, config: GPT2Config) -> None:
        super().__init__(config)
        self.tokens = nn.Embedding(config.vocabulary, config.dim)
        self.places = LearnedPositions(config.length, config.dim)
        self.dropout = nn.Dropout(config.embedding_dropout)
        self.stack = Stack([self._block(index) for index in range(config.depth)])
        self.norm = LayerNorm(config.dim, config.epsilon)
        self._initialise()

    def _block(self, index: int) -> Block:
        config = self.config
        head_dim = config.dim // config.heads
        scale = head_dim**-0.5 / (index + 1 if config.scale_by_layer else 1)
        return Block(
            MultiHeadAttention(
                config.dim, config.heads, scale=scale, dropout=config.attention_dropout
            ),
            PreNorm(LayerNorm(config.dim, config.epsilon), config.dropout),
            FeedForward(
                config.dim, config.inner or 4 * config.dim, ACTIVATIONS[config.activation]()
            ),
            PreNorm(LayerNorm(config.dim, config.epsilon), config.dropout),
        )

    def _initialise(self) -> None:
        """Initialise with normal deviations of 0.02 (positions 0.01) and biases of 0.

        The weights of layers that end at a residual sum are divided by the square root of the
        number of such layers (section 2.3).
        """
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif name.endswith(("output.weight", "down.weight")):
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.depth) ** 0.5)
            elif "norm" not in name:
                nn.init.normal_(parameter, std=0.01 if name == "places.weight" else 0.02)

    @classmethod
    def sizes_for(cls, tokenizer: Tokenizer, length: int) -> dict[str, Any]:
        sizes = super().sizes_for(tokenizer, length)
        return {**sizes, "length": length, "begin_token": sizes["end_token"]}

    def forward(
        self,
        ids: Tensor,
        *,
        padding: Padding | None = None,
        state: State | None = None,
        labels: Tensor | None = None,
        smoothing: float = 0.0,
    ) -> Tensor:
        """Return the logits of the token after each of ``ids`` [batch, n]: [batch, n, vocabulary].

        ``labels`` [batch, m] are the tokens that follow the last m ids. With them, the result is
        the summed loss, computed by :func:`regard.linear_cross_entropy`.
        """
        hidden = self.read(ids, padding=padding, state=state)
        if labels is None:
            return self.logits(hidden)
        last = hidden[:, hidden.shape[1] - labels.shape[1] :]
        return self._loss(last, labels, smoothing)

    def read(
        self, ids: Tensor, *, padding: Padding | None = None, state: State | None = None
    ) -> Tensor:
        """Return the hidden states of ``ids`` [batch, n]: [batch, n, dim].

        With a ``state``, the ids follow those already read, and the state gives the padding.
        """
        check_ids(ids, self.config.vocabulary)
        past = 0 if state is None else len(state)
        total = past + ids.shape[1]
        if total > self.config.length:
            raise InputError(
                f"This GPT-2 reads at most {self.config.length} tokens, but was given {total}."
            )
        if state is not None:
            if padding is not None:
                raise InputError(
                    "A state holds its own padding: pass State(pads=...), not padding=."
                )
            padding = state.padding(total)
        at = positions(padding, past, total, ids.device)
        x = self.dropout(self.tokens(ids) + self.places(at))
        mask = Causal() if padding is None else Causal() & padding
        x = self.stack(x, mask=mask, state=state)
        result: Tensor = self.norm(x)
        return result

    def step(self, ids: Tensor, state: State) -> Tensor:
        """Return the logits after the last of ``ids`` [batch, n]: [batch, vocabulary].

        With beams, each row of ``ids`` is one id of one beam.
        """
        if ids.shape[1] > 1 or not len(state):
            return self.logits(self.read(ids, state=state)[:, -1])
        past = len(state)
        if state.longest >= self.config.length:
            raise InputError(f"This GPT-2 reads at most {self.config.length} tokens.")
        x = self.tokens(ids.view(-1, state.beams))  # [sentences, beams, dim]
        if state.pads is None:
            x = x + self.places.weight[past]
        else:
            x = x + self.places(past - state.pads)[:, None]
        x = self.norm(self.stack.step(x, state, state.bias(x)))
        return self.logits(x.flatten(0, 1))

    def output_weights(self) -> tuple[Tensor, None]:
        return self.tokens.weight, None

    # --------------------------------------------------------------------------- checkpoints

    fixed: ClassVar = {
        "scale_attn_weights": True,
        "add_cross_attention": False,
        "tie_word_embeddings": True,
    }

    @staticmethod
    def keys(config: GPT2Config) -> KeyMap:
        products = {
            "attn.c_attn": "attention.qkv",
            "attn.c_proj": "attention.output",
            "mlp.c_fc": "feed_forward.up",
            "mlp.c_proj": "feed_forward.down",
        }
        norms = {"ln_1": "around_attention.norm", "ln_2": "around_feed_forward.norm"}
        blocks = partial(renames, "transformer.h.{}.", "stack.blocks.{}.", layers=config.depth)
        return KeyMap(
            [
                Spelling(r"^(?!transformer\.|lm_head\.)", "transformer."),
                Drop(r"\.attn\.(masked_)?bias$", "a stored causal mask"),
                *renames("transformer.", "", {"wte": "tokens", "wpe": "places"}, ["weight"]),
                *blocks(products, ["weight"], step=Transpose),
                *blocks(products, ["bias"]),
                *blocks(norms),
                *renames("transformer.", "", {"ln_f": "norm"}),
                Tie("lm_head.weight", "transformer.wte.weight"),
            ]
        )
