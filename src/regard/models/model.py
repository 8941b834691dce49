"""What the models share: configs that are checked, stacks of blocks, and loading."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Literal, NamedTuple, Self, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from regard.checkpoints import tensors as files
from regard.checkpoints.keymap import KeyMap
from regard.checkpoints.packing import Packing, packed
from regard.decoding.state import State
from regard.errors import CheckpointError, InputError
from regard.layers.modules import Block, MultiHeadAttention
from regard.mechanism.biases import Bias
from regard.mechanism.masks import Mask, Padding

# ------------------------------------------------------------------------------------- configs


def size(default: int, most: int = 2**24) -> Any:
    """A config's field: a whole number from 1 to ``most``."""
    return _checked(
        default, f"a whole number from 1 to {most}", lambda v: type(v) is int and 1 <= v <= most
    )


def optional_size(most: int = 2**24) -> Any:
    """A config's field: as :func:`size`, or None."""
    return _checked(
        None,
        f"None or a whole number from 1 to {most}",
        lambda v: v is None or (type(v) is int and 1 <= v <= most),
    )


def layers(default: int) -> Any:
    """A config's field: how many layers."""
    return size(default, most=1024)


def rate(default: float) -> Any:
    """A config's field: a probability of dropping."""
    return _checked(default, "a number from 0 to below 1", lambda v: _number(v) and 0 <= v < 1)


def optional_rate() -> Any:
    """A config's field: as :func:`rate`, or None."""
    return _checked(
        None,
        "None or a number from 0 to below 1",
        lambda v: v is None or (_number(v) and 0 <= v < 1),
    )


def positive(default: float) -> Any:
    """A config's field: a number above 0."""
    return _checked(default, "a number above 0", lambda v: _number(v) and 0 < v < 1e6)


def switch(default: bool) -> Any:
    """A config's field: true or false."""
    return _checked(default, "true or false", lambda v: type(v) is bool)


def token(default: int | None) -> Any:
    """A config's field: the id of a special token, or None."""
    return _checked(
        default,
        "a token's id, or None",
        lambda v: v is None or (type(v) is int and 0 <= v < 2**31),
    )


def choice(default: str, among: Mapping[str, object]) -> Any:
    """A config's field: one of some names."""
    return _checked(
        default, f"one of {', '.join(among)}", lambda v: isinstance(v, str) and v in among
    )


def _number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(cast(float, value))


def _checked(default: object, words: str, accepts: Callable[[Any], bool]) -> Any:
    return field(default=default, metadata={"words": words, "accepts": accepts})


@dataclass(frozen=True, kw_only=True)
class Config:
    """The base of every model's config: each field is checked when it is set."""

    def __post_init__(self) -> None:
        for entry in fields(self):
            value = getattr(self, entry.name)
            if "accepts" in entry.metadata and not entry.metadata["accepts"](value):
                raise InputError(
                    f"{type(self).__name__}({entry.name}=...) must be {entry.metadata['words']}, "
                    f"but got {value!r}."
                )


def check_heads(heads: int, dim: int) -> None:
    """Raise InputError where heads cannot share dimensions evenly."""
    if dim % heads:
        raise InputError(f"{heads} heads cannot share {dim} dimensions evenly.")


@dataclass(frozen=True)
class ConfigMap:
    """How a config is spelled in config.json, both ways.

    ``defaults`` are for files that leave out a key whose default there is not ours. A file whose
    value differs from one in ``fixed`` describes a model that regard does not have.
    """

    model_type: str
    names: Mapping[str, str]  # theirs to ours
    defaults: Mapping[str, object] = field(default_factory=dict)
    fixed: Mapping[str, object] = field(default_factory=dict)

    def read(self, kind: type[Config], raw: Mapping[str, Any]) -> Config:
        for key, value in self.fixed.items():
            if raw.get(key, value) != value:
                raise CheckpointError(
                    f"config.json says {key} = {raw[key]!r}; regard's model has {value!r}."
                )
        spelled = {**self.defaults, **raw}
        found = {ours: spelled[theirs] for theirs, ours in self.names.items() if theirs in spelled}
        try:
            return kind(**found)
        except InputError as error:
            raise CheckpointError(f"config.json does not describe a model: {error}") from None

    def write(self, config: Config, architecture: str) -> dict[str, Any]:
        found = {theirs: getattr(config, ours) for theirs, ours in self.names.items()}
        return {
            **self.fixed,
            **found,
            "model_type": self.model_type,
            "architectures": [architecture],
        }


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "gelu_new": lambda: nn.GELU("tanh"),
    "gelu_pytorch_tanh": lambda: nn.GELU("tanh"),
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
}

# ------------------------------------------------------------------------------------- sequences


def check_ids(ids: Tensor) -> None:
    """Raise InputError where ids are not [batch, n] whole numbers."""
    if not isinstance(ids, Tensor):
        raise InputError(f"Ids are a tensor, [batch, n], but got {type(ids).__name__}.")
    if ids.dim() != 2 or ids.dtype not in (torch.int64, torch.int32):
        raise InputError(
            f"Ids are whole numbers, [batch, n], but got {ids.dtype} of shape {list(ids.shape)}. "
            "One text of them is ids[None]."
        )


def positions(padding: Padding | None, start: int, stop: int, device: torch.device) -> Tensor:
    """Where tokens ``start`` to ``stop`` of each sequence stand, [1 or batch, n].

    The first real token of a sequence stands at 0. What padding tokens get does not matter.
    """
    index = torch.arange(start, stop, device=device)[None]
    if padding is None or padding.side == "right":
        return index
    lengths = torch.as_tensor(padding.lengths, device=device)[:, None]
    return (index - (stop - lengths)).clamp(min=0)


def pad(
    sequences: Sequence[Sequence[int]],
    token: int,
    side: str,
    vocabulary: int,
    device: torch.device,
) -> tuple[Tensor, Padding | None]:
    """Sequences of ids as one tensor [batch, longest], and the padding where there is any.

    >>> ids, padding = pad([[5, 6], [7]], 0, "left", 10, torch.device("cpu"))
    >>> ids.tolist(), padding
    ([[5, 6], [0, 7]], Padding(lengths=(2, 1), side='left'))
    """
    lengths = [len(sequence) for sequence in sequences]
    if not lengths or not min(lengths):
        raise InputError("Every sequence needs at least one token.")
    for sequence in sequences:
        if not 0 <= min(sequence) <= max(sequence) < vocabulary:
            raise InputError(f"Ids are from 0 to {vocabulary - 1}, but got {list(sequence)}.")
    longest = max(lengths)
    rows = []
    for sequence in sequences:
        filler = [token] * (longest - len(sequence))
        rows.append([*filler, *sequence] if side == "left" else [*sequence, *filler])
    ids = torch.tensor(rows, device=device)
    return ids, Padding(lengths, side) if min(lengths) < longest else None


def encode_by_length(
    encode: Callable[..., Tensor],
    sources: Sequence[Sequence[int]],
    vocabulary: int,
    device: torch.device,
) -> tuple[Tensor, Padding | None]:
    """Hidden states of sources of ids, [batch, longest, dim], and the padding where there is any.

    Some at a time go through the encoder, so that those of like length are padded little.
    """
    parts = []
    for start in range(0, len(sources), 8):
        some, padding = pad(sources[start : start + 8], 0, "right", vocabulary, device)
        parts.append(encode(some, padding=padding))
    lengths = [len(source) for source in sources]
    if len(parts) == 1:
        return parts[0], padding
    longest = max(lengths)
    widened = [nn.functional.pad(part, (0, 0, 0, longest - part.shape[1])) for part in parts]
    return torch.cat(widened), Padding(lengths) if min(lengths) < longest else None


class Recomputing(nn.Module):
    """Layers that, where asked, save memory in training by being computed again on the way back."""

    recompute = False

    @property
    def recomputes(self) -> bool:
        return self.recompute and self.training and torch.is_grad_enabled()


class Stack(Recomputing):
    """Blocks one after another."""

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
        """``x`` [batch, n, dim] through all blocks."""
        if self.recomputes:
            for block in self.blocks:
                x = checkpoint(
                    block,
                    x,
                    context,
                    mask=mask,
                    bias=bias,
                    context_mask=context_mask,
                    use_reentrant=False,
                )
            return x
        if state is not None and state.beams > 1:
            raise InputError("This state has beams: go on with one token for each, by model.step.")
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
        """As :meth:`forward`, for one more step: ``x`` is [sentences, beams, dim].

        ``bias`` is what :meth:`State.bias` gave, maybe with more added to it.
        """
        if state.steppers is None:
            state.steppers = [cast(Block, block).stepper() for block in self.blocks]
        for step, own, cross in zip(state.steppers, state.own, state.cross, strict=True):
            x = step(x, own, bias, cross, state.context_bias)
        return x


# ------------------------------------------------------------------------------------- the model


class _Unfilled(TorchFunctionMode):
    """Within, nothing is filled with random numbers.

    Without numbers there is nothing to fill, and PyTorch would load its compiler to find out, which
    takes two seconds.
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

    half: Literal["", "encoder", "decoder"]  # "" where the model has one stack
    number: int
    across: bool  # whether the decoder attends to the encoder here
    module: MultiHeadAttention

    @property
    def name(self) -> str:
        """Such as "3", or of an encoder-decoder "encoder.3", "decoder.3" or "cross.3"."""
        if not self.half:
            return str(self.number)
        return f"{'cross' if self.across else self.half}.{self.number}"


def self_attention(
    half: Literal["", "encoder", "decoder"], module: nn.Module
) -> list[AttentionLayer]:
    """The self-attention layers inside ``module``, in order."""
    parts = (getattr(block, "attention", None) for block in module.modules())
    own = [part for part in parts if isinstance(part, MultiHeadAttention)]
    return [AttentionLayer(half, index, False, part) for index, part in enumerate(own)]


class Model(nn.Module):
    """The base of every model: a config, a key map, and with them load and save.

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

    spelling: ClassVar[ConfigMap]
    architecture: ClassVar[str]  # its name in config.json

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.head: nn.Module | None = None  # the output layer, where it is one of its own

    @staticmethod
    def keys(config: Any) -> KeyMap:
        """How its parameters are spelled in checkpoints."""
        raise NotImplementedError

    @classmethod
    def read_config(cls, raw: Mapping[str, Any]) -> Config:
        """Its config from what config.json says."""
        raise NotImplementedError

    def write_config(self) -> dict[str, Any]:
        """Its config as config.json says it."""
        return self.spelling.write(self.config, self.architecture)

    def tied(self) -> tuple[Tensor, Tensor | None] | None:
        """Weights and bias of the output, where it shares the weights of the token embedding."""
        return None

    def _loss(
        self,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        smoothing: float,
        bias: Tensor | None = None,
    ) -> Tensor:
        """The summed loss of ``labels`` at hidden states, given the weights of the output."""
        if self.head is not None and not isinstance(self.head, nn.Linear):  # quantized
            logits = self.head(hidden).float().flatten(0, -2)
            return cross_entropy(
                logits, labels.flatten(), reduction="sum", label_smoothing=smoothing
            )
        # Imported here: it brings PyTorch's compiler along, which takes a second to load.
        from regard.layers.losses import linear_cross_entropy

        loss: Tensor = linear_cross_entropy(hidden, weight, labels, bias=bias, smoothing=smoothing)
        return loss

    def generation(self) -> dict[str, Any] | None:
        """What generation_config.json says, where the model generates."""
        return None

    def attention_layers(self) -> list[AttentionLayer]:
        """The attention layers, in order.

        >>> from regard import T5, T5Config
        >>> model = T5(T5Config(vocabulary=10, dim=8, head_dim=4, inner=16, depth=1, heads=2))
        >>> [layer.name for layer in model.attention_layers()]
        ['encoder.0', 'decoder.0', 'cross.0']
        """
        return self_attention("", self)

    @property
    def output_vocabulary(self) -> int:
        """How many tokens the model can write."""
        return int(self.config.vocabulary)

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    def recompute(self, on: bool = True) -> Self:
        """Save memory in training by computing each block again on the way back."""
        for module in self.modules():
            if isinstance(module, Recomputing):
                module.recompute = on
        return self

    @classmethod
    def from_checkpoint(
        cls,
        source: files.Checkpoint,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Self:
        """The model, filled from a checkpoint; nothing is read before everything fits."""
        config = cls.read_config(source.config)
        keys = cls.keys(config)
        names = keys.names(source.entries)
        with torch.device("meta"), _Unfilled():
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
                    f"{name} should hold numbers with a point, not {tensor.dtype}."
                )
        if found.keys() != expected.keys():
            odd = sorted(found.keys() ^ expected.keys())
            raise CheckpointError(f"The key map and the model disagree about {', '.join(odd)}.")

        def read(key: str) -> Tensor:
            return source.read(key).to(device=device, dtype=dtype)

        model.load_state_dict(keys.apply(names, read), assign=True)
        return model.eval()

    def save(
        self,
        folder: str | os.PathLike[str],
        *,
        packing: Packing | None = None,
        shard_bytes: float = files.SHARD,
    ) -> None:
        """Write config.json and the weights as safetensors, for regard and others to read.

        ``packing`` makes the files small, for regard alone to read: "int8" or "int4" for all
        matrices, or by patterns of their names, as ``{"embed": "int8", "": "int4"}``. Weights over
        ``shard_bytes`` are cut into several files.
        """
        if not isinstance(shard_bytes, int | float) or not shard_bytes >= 1:
            raise InputError(f"save(shard_bytes=...) is a number of bytes, not {shard_bytes!r}.")
        with torch.device("meta"), _Unfilled():
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


class EncoderDecoder(Model):
    """A model that reads a source and writes a target."""

    @property
    def start_token(self) -> int:
        """The token before the first one the decoder writes."""
        raise NotImplementedError

    def attention_layers(self) -> list[AttentionLayer]:
        encoder, decoder = self.get_submodule("encoder"), self.get_submodule("decoder")
        crossing = (getattr(block, "cross", None) for block in decoder.modules())
        cross = [part for part in crossing if isinstance(part, MultiHeadAttention)]
        return [
            *self_attention("encoder", encoder),
            *self_attention("decoder", decoder),
            *(AttentionLayer("decoder", i, True, part) for i, part in enumerate(cross)),
        ]
