"""Base classes of all models: stacks of blocks, decoding, loading and saving."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from regard.checkpoints import tensors as files
from regard.checkpoints.keymap import KeyMap
from regard.checkpoints.packing import Packing, packed
from regard.decoding.state import Memories, State
from regard.errors import CheckpointError, InputError
from regard.layers.modules import Block, MultiHeadAttention
from regard.mechanism.biases import Bias
from regard.mechanism.geometry import can_read
from regard.mechanism.masks import Causal, Mask, Padding
from regard.models import configs, registry
from regard.models.configs import Config
from regard.text.tokenizer import END_OF_TEXT, Tokenizer

# ------------------------------------------------------------------------------------- sequences


def check_ids(ids: Tensor, vocabulary: int, what: str = "Ids") -> None:
    """Raise InputError unless ids are integers of shape [batch, n], from 0 to vocabulary - 1.

    Ids on a GPU are not read, because that would make the host wait.
    """
    if not isinstance(ids, Tensor):
        raise InputError(f"{what} must be a tensor [batch, n], but got {type(ids).__name__}.")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"{what} must be whole numbers [batch, n], but got {ids.dtype} {list(ids.shape)}. "
            "For a single sequence pass ids[None]."
        )
    if ids.numel() and can_read(ids):
        least, most = (int(end) for end in ids.aminmax())
        if least < 0 or most >= vocabulary:
            wrong = least if least < 0 else most
            raise InputError(
                f"{what} must be from 0 to {vocabulary - 1}, but got {wrong}. "
                "Encode text with the tokenizer of this model."
            )


def positions(padding: Padding | None, start: int, stop: int, device: torch.device) -> Tensor:
    """Return the positions of tokens ``start`` to ``stop`` of each sequence, [1 or batch, n].

    The first real token of a sequence has position 0. Padding tokens get arbitrary positions.
    """
    index = torch.arange(start, stop, device=device)[None]
    if padding is None or padding.side == "right":
        return index
    lengths = torch.as_tensor(padding.lengths, device=device)[:, None]
    return (index - (stop - lengths)).clamp(0, stop - 1)


def pad(
    sequences: Sequence[Sequence[int]],
    token: int,
    side: str,
    vocabulary: int,
    device: torch.device,
) -> tuple[Tensor, Padding | None]:
    """Return ids as one tensor [batch, longest], and the padding; None if all lengths are equal.

    >>> ids, padding = pad([[5, 6], [7]], 0, "left", 10, torch.device("cpu"))
    >>> ids.tolist(), padding
    ([[5, 6], [0, 7]], Padding(lengths=(2, 1), side='left'))
    """
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or not min(lengths):
        raise InputError("Every sequence needs at least one token.")
    for sequence in sequences:
        if not 0 <= min(sequence) <= max(sequence) < vocabulary:
            raise InputError(f"Ids must be from 0 to {vocabulary - 1}, but got {list(sequence)}.")
    longest = max(lengths)
    rows = []
    for sequence in sequences:
        filler = [token] * (longest - len(sequence))
        rows.append([*filler, *sequence] if side == "left" else [*sequence, *filler])
    ids = torch.tensor(rows, device=device)
    return ids, Padding(lengths, side) if min(lengths) < longest else None


class Recomputing(nn.Module):
    """A module that can recompute its layers in the backward pass, which saves memory."""

    recompute = False

    @property
    def recomputes(self) -> bool:
        return self.recompute and self.training and torch.is_grad_enabled()


class Stack(Recomputing):
    """Blocks in sequence."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(
        self,
        x: Tensor,
        *,
        mask: Mask | None = None,
        bias: Bias | None = None,
        context: Tensor | None = None,
        context_mask: Mask | None = None,
        state: State | None = None,
    ) -> Tensor:
        """Apply all blocks to ``x`` [batch, n, dim]."""
        if self.recomputes:
            given: dict[str, Any] = {"mask": mask, "bias": bias, "context_mask": context_mask}
            for block in self.blocks:
                x = checkpoint(block, x, context, **given, use_reentrant=False)
            return x
        if state is not None and state.beams > 1:
            raise InputError("A state with beams takes one token for each beam: call model.step.")
        for index, block in enumerate(self.blocks):
            x = block(
                x,
                context,
                mask=mask,
                bias=bias,
                cache=None if state is None else state.own[index],
                context_mask=context_mask,
                cross_cache=None if state is None else state.cross[index],
            )
        return x

    def step(self, x: Tensor, state: State, bias: Tensor | None) -> Tensor:
        """Apply all blocks in one decoding step: ``x`` is [sentences, beams, dim].

        ``bias`` is :meth:`State.bias` plus the model's own biases.
        """
        if state.steppers is None:
            state.steppers = [cast(Block, block).stepper() for block in self.blocks]
        for step, own, cross in zip(state.steppers, state.own, state.cross, strict=True):
            x = step(x, own, bias, cross, state.context_bias)
        return x


# ------------------------------------------------------------------------------------- the model


class _Uninitialised(TorchFunctionMode):
    """A context in which ``torch.nn.init`` does nothing.

    Initialising on the meta device would load PyTorch's compiler, which takes two seconds.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        given = dict(kwargs or {})
        if getattr(func, "__module__", None) == nn.init.__name__:
            return given.get("tensor", args[0] if args else None)
        return func(*args, **given)


class AttentionLayer(NamedTuple):
    """One attention layer of a model."""

    half: Literal["", "encoder", "decoder"]  # "" if the model has one stack
    number: int
    across: bool  # whether this is cross-attention
    module: MultiHeadAttention

    @property
    def name(self) -> str:
        """The name, such as "3", or in an encoder-decoder "encoder.3", "decoder.3" or "cross.3"."""
        if not self.half:
            return str(self.number)
        return f"{'cross' if self.across else self.half}.{self.number}"


def attention_in(
    half: Literal["", "encoder", "decoder"], module: nn.Module, across: bool = False
) -> list[AttentionLayer]:
    """Return the self-attention layers of ``module``; if ``across``, its cross-attention layers."""
    name = "cross" if across else "attention"
    parts = (getattr(block, name, None) for block in module.modules())
    layers = (part for part in parts if isinstance(part, MultiHeadAttention))
    return [AttentionLayer(half, index, across, part) for index, part in enumerate(layers)]


class Model(nn.Module):
    """The base class of all models. A config and a key map define how it is loaded and saved.

    A new architecture needs a row of the registry and a subclass of :class:`LanguageModel`,
    :class:`EncoderDecoder` or :class:`Model`. Class attributes such as ``remembers`` tell other
    code what else sets a model apart.

    >>> import tempfile
    >>> from regard import GPT2, GPT2Config, load
    >>> from regard.models.model import Model
    >>> model = GPT2(GPT2Config(vocabulary=20, length=16, dim=8, depth=1, heads=2))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(folder)
    ...     again = load(folder)
    >>> isinstance(again, Model), again.config == model.config
    (True, True)
    """

    fixed: ClassVar[Mapping[str, object]] = {}  # the values that config.json must have
    generates: ClassVar[bool] = False  # has start_decoding and step
    remembers: ClassVar[bool] = False  # keeps a memory of earlier segments
    relative: ClassVar[bool] = False  # attention scores depend on relative positions
    prefixed: ClassVar[bool] = False  # sources begin with a prefix that names the task

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.head: nn.Module | None = None  # the output layer; None if it shares the embedding

    @classmethod
    def row(cls) -> registry.Architecture:
        """Return the model's row in the registry."""
        return registry.row_of(cls)

    @staticmethod
    def keys(config: Any) -> KeyMap:
        """Return the map between checkpoint keys and the model's parameters."""
        raise NotImplementedError

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> Config:
        """Return the config that the contents of config.json describe."""
        return configs.read(cls.row().config_class(), raw, cls.fixed)

    @classmethod
    def sizes_for(cls, tokenizer: Tokenizer, length: int) -> dict[str, Any]:
        """Return the config fields that depend on the tokenizer or on the sequence ``length``.

        The vocabulary size is not among them, because the caller sets it for every model.
        """
        raise NotImplementedError

    def write_config(self) -> dict[str, Any]:
        """Return the contents of config.json."""
        row = self.row()
        names = {"model_type": row.model_type, "architectures": [row.hub_names[0]]}
        return {**self.fixed, **configs.written(self.config), **names}

    def generation(self) -> dict[str, Any] | None:
        """Return the contents of generation_config.json; None if the model does not generate."""
        said = configs.written(self.config).items()
        tokens = {key: token for key, token in said if key.endswith("_token_id")}
        return tokens if self.generates else None

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def longest(self) -> int | None:
        """The largest number of tokens that the model reads at once; None if unlimited."""
        length: int | None = getattr(self.config, "length", None)
        return length

    @property
    def output_vocabulary(self) -> int:
        """The number of tokens the model can write."""
        return int(self.config.vocabulary)

    def attention_layers(self) -> list[AttentionLayer]:
        """Return the attention layers, in order.

        >>> from regard import T5, T5Config
        >>> model = T5(T5Config(vocabulary=10, dim=8, head_dim=4, inner=16, depth=1, heads=2))
        >>> [layer.name for layer in model.attention_layers()]
        ['encoder.0', 'decoder.0', 'cross.0']
        """
        return attention_in("", self)

    def remember(self) -> Memories | None:
        """Return empty memories, which each call updates; None if the model has no memory."""
        return None

    def read(self, ids: Tensor, *, padding: Padding | None = None) -> Any:
        """Run the model over ``ids`` [batch, n]. Language models skip their output layer."""
        return self(ids, padding=padding)

    def run_over(
        self,
        ids: Sequence[int],
        target: Sequence[int] | None = None,  # noqa: ARG002
        memories: Memories | None = None,
    ) -> None:
        """Run every attention layer over one sequence of ids, so that hooks can observe the layers.

        The decoder of an encoder-decoder runs over ``target``; without it, only the encoder runs.
        With ``memories``, the ids follow the segments in memory.
        """
        given: dict[str, Any] = {} if memories is None else {"memories": memories}
        self.read(torch.tensor([ids], device=self.device), **given)

    # ------------------------------------------------------------------------------- the output

    def output_weights(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the output layer's weights [vocabulary, dim] and bias; None if there is none."""
        return None

    def logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states [..., dim]: [..., vocabulary]."""
        if self.head is not None:
            logits: Tensor = self.head(hidden)
            return logits
        output = self.output_weights()
        assert output is not None
        return linear(hidden, *output)

    def _loss(self, hidden: Tensor, labels: Tensor, smoothing: float) -> Tensor:
        """Return the summed loss of ``labels`` given hidden states."""
        output = self.output_weights()
        if output is None or (self.head is not None and not isinstance(self.head, nn.Linear)):
            logits = self.logits(hidden).float().flatten(0, -2)  # quantized or prepacked
            return cross_entropy(
                logits, labels.flatten(), reduction="sum", label_smoothing=smoothing
            )
        # A late import, because it loads PyTorch's compiler, which takes a second.
        from regard.layers.losses import linear_cross_entropy

        weight, bias = output
        loss: Tensor = linear_cross_entropy(hidden, weight, labels, bias=bias, smoothing=smoothing)
        return loss

    def ban(self, tokens: object) -> bool:  # noqa: ARG002
        """Exclude the tokens of bad_words_ids from generation; return False if the model cannot."""
        return False

    def recompute(self, on: bool = True) -> Self:
        """Recompute each block in the backward pass, which saves memory in training."""
        for module in self.modules():
            if isinstance(module, Recomputing):
                module.recompute = on
        return self

    # ------------------------------------------------------------------------------ checkpoints

    @classmethod
    def from_checkpoint(
        cls,
        source: files.Checkpoint,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Load a checkpoint. All names and shapes are checked before any weight is read."""
        config = cls.read_config(source.config)
        keys = cls.keys(config)
        names = keys.names(source.entries)
        with torch.device("meta"), _Uninitialised():
            model = cls(config)
        expected = model.state_dict()
        found = keys.apply(names, source.meta)
        for name, tensor in found.items():
            if name in expected and tensor.shape != expected[name].shape:
                theirs = next(step.reads for step in keys.steps if step.ours == name)
                raise CheckpointError(
                    f"{', '.join(theirs)} has shape {list(tensor.shape)} in the checkpoint, but "
                    f"the config asks for {list(expected[name].shape)}."
                )
            if not tensor.is_floating_point():
                raise CheckpointError(
                    f"{name} should hold floating-point numbers, not {tensor.dtype}."
                )
        if found.keys() != expected.keys():
            odd = sorted(found.keys() ^ expected.keys())
            raise CheckpointError(f"The key map and the model disagree about {', '.join(odd)}.")

        adapter = None if source.adapter is None else source.adapter.fitted(keys)
        replaced = {} if adapter is None else adapter.whole
        spelled = {key: name for name, key in names.items()}

        def read(key: str) -> Tensor:
            tensor = source.read(key)
            if (other := replaced.get(spelled[key])) is not None:
                if other.shape != tensor.shape:
                    raise CheckpointError(
                        f"{source.folder} replaces {key}, {list(tensor.shape)}, by a tensor of "
                        f"shape {list(other.shape)}."
                    )
                tensor = other
            return tensor.to(device=device, dtype=dtype)

        state = keys.apply(names, read)
        if adapter is not None:
            adapter.add_to(state, keys.steps)
        model.load_state_dict(state, assign=True)
        return model.eval()

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        packing: Packing | None = None,
        shard_bytes: float = files.SHARD,
    ) -> None:
        """Write config.json and the weights as safetensors, which transformers reads too.

        ``packing`` makes smaller files that only regard reads: "int8" or "int4" for all matrices,
        or a mapping from name patterns, as ``{"embed": "int8", "": "int4"}``. Each file holds at
        most ``shard_bytes`` of weights.
        """
        if not isinstance(shard_bytes, int | float) or not shard_bytes >= 1:
            raise InputError(
                f"save(shard_bytes=...) must be a number of bytes, not {shard_bytes!r}."
            )
        with torch.device("meta"), _Uninitialised():
            expected = type(self)(self.config).state_dict()
        held = self.state_dict()
        if held.keys() != expected.keys():
            raise InputError(
                "This model's linear layers were replaced for speed. Save it before prepack() or "
                "quantize()."
            )
        tensors = self.keys(self.config).save(held)
        config = self.write_config()
        config["dtype"] = str(next(self.parameters()).dtype).removeprefix("torch.")
        if packing is not None:
            tensors = packed(tensors, packing)
            config[files.PACKING] = packing if isinstance(packing, str) else dict(packing)
        files.write(folder, config, tensors, self.generation(), shard_bytes)


class LanguageModel(Model):
    """The base class of models that predict the next token from the earlier ones."""

    generates = True

    @classmethod
    def sizes_for(cls, tokenizer: Tokenizer, length: int) -> dict[str, Any]:  # noqa: ARG003
        return {"end_token": tokenizer.tokenizer.token_to_id(END_OF_TEXT)}

    def start_decoding(self, prompts: Sequence[Sequence[int]], room: int = 0) -> tuple[Tensor, Any]:
        """Return the prompts as ids padded on the left, and an empty state.

        ``room`` is the number of tokens to reserve space for.
        """
        ids, padding = pad(prompts, 0, "left", self.config.vocabulary, self.device)
        pads = None
        if padding is not None:
            pads = ids.shape[1] - torch.as_tensor(padding.lengths, device=ids.device)
        return ids, self._state(ids.shape[1] + room, pads)

    def _state(self, room: int, pads: Tensor | None) -> Any:
        """Return an empty state for ``room`` positions; ``pads`` [batch] counts padding ids."""
        return State(self.config.depth, room, pads=pads)


class EncoderDecoder(Model):
    """The base class of encoder-decoders, which read a source and write a target."""

    generates = True

    @classmethod
    def sizes_for(cls, tokenizer: Tokenizer, length: int) -> dict[str, Any]:  # noqa: ARG003
        pad, end = tokenizer.id("<pad>"), tokenizer.id("</s>")
        return {"pad_token": pad, "start_token": pad, "end_token": end}

    @property
    def start_token(self) -> int:
        """The first token of the decoder's input."""
        raise NotImplementedError

    def encode(self, source: Tensor, *, padding: Padding | None = None) -> Tensor:
        """Return the hidden states of ``source`` [batch, n]: [batch, n, dim]."""
        raise NotImplementedError

    def _embed_target(self, ids: Tensor, padding: Padding | None, past: int) -> Tensor:
        """Embed target ids [batch, m] that follow ``past`` earlier ids: [batch, m, dim]."""
        raise NotImplementedError

    def _decode_step(self, ids: Tensor, state: State) -> Tensor:
        """Run :meth:`_decode` for one token of each beam: [sentences, beams, dim]."""
        raise NotImplementedError

    def _scaled(self, hidden: Tensor) -> Tensor:
        """Scale the decoder's hidden states for the output layer."""
        return hidden

    def _decode(
        self,
        target: Tensor,
        padding: Padding | None,
        context: Tensor | None,
        context_padding: Padding | None,
        state: State | None = None,
    ) -> Tensor:
        """Return the output layer's input for ``target`` [batch, m]: [batch, m, dim]."""
        hidden = self.get_submodule("decoder")(
            self._embed_target(target, padding, 0 if state is None else len(state)),
            mask=Causal() if padding is None else Causal() & padding,
            context=context,
            context_mask=context_padding,
            state=state,
        )
        return self._scaled(hidden)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        *,
        padding: Padding | None = None,
        target_padding: Padding | None = None,
        labels: Tensor | None = None,
        smoothing: float = 0.0,
    ) -> Tensor:
        """Return the logits of the token after each of ``target``: [batch, m, vocabulary].

        ``source`` is [batch, n] with ``padding``; ``target`` is [batch, m] with ``target_padding``.
        ``labels`` [batch, m] are the next tokens. With them, the result is the summed loss,
        computed by :func:`regard.linear_cross_entropy`.
        """
        context = self.encode(source, padding=padding)
        hidden = self._decode(target, target_padding, context, padding)
        return self.logits(hidden) if labels is None else self._loss(hidden, labels, smoothing)

    def start_decoding(
        self, sources: Sequence[Sequence[int]], room: int = 0
    ) -> tuple[Tensor, State]:
        """Return the start tokens, and a state that holds the encoded sources.

        ``room`` is the number of tokens to reserve space for.
        """
        context, padding = self._encode_all(sources)
        depth = self.config.decoder_depth or self.config.depth
        state = State(depth, room + 1, context=context, context_padding=padding)
        return torch.full((len(sources), 1), self.start_token, device=self.device), state

    def _encode_all(self, sources: Sequence[Sequence[int]]) -> tuple[Tensor, Padding | None]:
        """Return the hidden states of sources, [batch, longest, dim], and their padding.

        The encoder reads eight sources at a time. Decoding sorts the sources by length, so eight
        neighbours need little padding.
        """
        parts = []
        for start in range(0, len(sources), 8):
            some, padding = pad(
                sources[start : start + 8], 0, "right", self.config.vocabulary, self.device
            )
            parts.append(self.encode(some, padding=padding))
        if len(parts) == 1:
            return parts[0], padding
        lengths = [len(source) for source in sources]
        longest = max(lengths)
        widened = [nn.functional.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts]
        return torch.cat(widened), Padding(lengths) if min(lengths) < longest else None

    def step(self, ids: Tensor, state: State) -> Tensor:
        """Return the logits after the last of ``ids`` [batch, n]: [batch, vocabulary].

        With beams, each row of ``ids`` is one id of one beam.
        """
        if ids.shape[1] > 1 or not len(state):
            padding = state.padding(len(state) + ids.shape[1])
            hidden = self._decode(ids, padding, state.context, state.context_padding, state)
            return self.logits(hidden[:, -1])
        return self.logits(self._decode_step(ids.view(-1, state.beams), state).flatten(0, 1))

    def run_over(
        self,
        ids: Sequence[int],
        target: Sequence[int] | None = None,
        memories: Memories | None = None,  # noqa: ARG002
    ) -> None:
        start, state = self.start_decoding([ids], room=len(target or ()))
        if target is not None:  # the last token is never an input
            written = torch.tensor([target[:-1]], dtype=start.dtype, device=start.device)
            self.step(torch.cat((start, written), dim=1), state)

    def attention_layers(self) -> list[AttentionLayer]:
        encoder, decoder = self.get_submodule("encoder"), self.get_submodule("decoder")
        return [
            *attention_in("encoder", encoder),
            *attention_in("decoder", decoder),
            *attention_in("decoder", decoder, across=True),
        ]
