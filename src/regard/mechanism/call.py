"""Call: the checked arguments of one attention call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from regard.errors import InputError
from regard.mechanism import biases, masks
from regard.mechanism.biases import Bias
from regard.mechanism.geometry import (
    MAX_FLOAT,
    MAX_START,
    Extent,
    can_read,
    check_device,
    check_tensor,
    check_values,
    has_values,
    is_whole,
    number,
)
from regard.mechanism.masks import Mask
from regard.mechanism.seeing import Pairs, See

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LAYOUTS = {2: "[length, dim]", 3: "[batch, length, dim]", 4: "[batch, heads, length, dim]"}

_STARTS = "query_start must be one whole number (the first query's position) or one per sequence"

# The reason with which backends refuse a call whose tensors are ``transformed``.
TRANSFORMED = (
    "torch.func, forward gradients and tensors without values need plain PyTorch operations, "
    "as in 'reference'."
)


@dataclass(slots=True)  # not frozen: a frozen instance takes three times as long to create
class Call:
    """One checked attention call, with all tensors as [batch, heads, length, dim]."""

    query: Tensor  # [batch, heads, queries, dim]
    key: Tensor  # [batch, key heads, keys, dim]
    value: Tensor  # [batch, key heads, keys, value dim]
    mask: Mask | None
    bias: Bias | None
    scale: float
    softcap: float | None
    dropout: float
    see: See | None  # the fields that a backend computes
    extent: Extent
    groups: int  # query heads that share one head of keys and values
    sinks: Tensor | None = None  # [heads]

    @property
    def wants_gradient(self) -> bool:
        """Whether a backward pass may follow."""
        others = self.bias.tensors if self.bias is not None else ()
        if self.sinks is not None:
            others = (*others, self.sinks)
        return torch.is_grad_enabled() and any(
            tensor.requires_grad for tensor in (self.query, self.key, self.value, *others)
        )

    @property
    def goes_forward(self) -> bool:
        """Whether forward-mode derivatives may be active, as in torch.func.jvp."""
        return forward_ad._current_level >= 0 and not torch.compiler.is_compiling()

    @property
    def transformed(self) -> bool:
        """Whether a tensor cannot be read as it is, so that only PyTorch's operators can run.

        That is so under torch.func (vmap, grad, jvp ...), in forward-mode AD, and if the tensors
        have no values: those on meta, and those of FakeTensorMode.
        """
        if torch.compiler.is_compiling():
            return False
        if self.goes_forward or _functorch.peek_interpreter_stack() is not None:
            return True
        return not has_values(self.query)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute because a size is 0."""
        return not (self.extent.heads and self.extent.queries and self.value.numel())


def check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Mask | Tensor | None,
    bias: Bias | Tensor | None,
    scale: float | None,
    softcap: float | None,
    dropout: float,
    see: See | None,
    query_start: int | Sequence[int] | Tensor | None = None,
    sinks: Tensor | None = None,
) -> Call:
    """Return the checked call; raise InputError if the arguments do not fit together."""
    check_tensor(query, "query")
    check_tensor(key, "key")
    check_tensor(value, "value")
    query_shape, key_shape, value_shape = given = query.shape, key.shape, value.shape
    rank = len(query_shape)  # read once: an attribute of a tensor costs as much as a check
    if rank not in _LAYOUTS or len(key_shape) != rank or len(value_shape) != rank:
        raise InputError(
            "query, key and value must share one layout of "
            f"{', '.join(_LAYOUTS.values())}, but are {_listed(*given)}."
        )
    dtype, device = query.dtype, query.device
    if dtype not in _DTYPES or not dtype == key.dtype == value.dtype:
        raise InputError(
            "query, key and value must share one floating-point dtype of 16 to 64 bits, but are "
            f"{query.dtype}, {key.dtype} and {value.dtype}. Convert them with .to(dtype)."
        )
    if not device == key.device == value.device:
        raise InputError(
            "query, key and value must be on one device, but are on "
            f"{query.device}, {key.device} and {value.device}. Move them with .to(device)."
        )
    if rank < 4:
        at = (slice(None), None) if rank == 3 else (None, None)  # one head
        query, key, value = query[at], key[at], value[at]
        query_shape, key_shape, value_shape = query.shape, key.shape, value.shape

    batch, heads, queries, dim = query_shape
    key_batch, key_heads, keys, key_dim = key_shape
    value_batch, value_heads, values, _ = value_shape
    if not (
        batch == key_batch == value_batch
        and 0 < dim == key_dim
        and key_heads == value_heads
        and keys == values
    ):
        raise InputError(
            "query and key must have the same batch and dim (at least 1), and key and value must "
            "have the same batch, heads and length. "
            f"The shapes are {_listed(*given)}."
        )
    if heads != key_heads and (not key_heads or heads % key_heads):
        raise InputError(
            f"{heads} query heads cannot be shared evenly among {key_heads} key heads. "
            "The number of query heads must be a multiple of the number of key heads."
        )

    extent = Extent(batch, heads, queries, keys, device)
    if query_start is not None:
        extent = extent._replace(query_start=_start(query_start, extent))
    if mask is not None:
        if isinstance(mask, Tensor):
            mask = masks.Dense(mask)
        if not isinstance(mask, Mask):
            raise InputError(
                f"mask must be a boolean tensor or a mask such as Causal(), but got {mask!r}. "
                "Convert an array with torch.as_tensor(mask)."
            )
        mask.check(extent)
    if bias is not None:
        if isinstance(bias, Tensor):
            bias = biases.Dense(bias)
        if not isinstance(bias, Bias):
            raise InputError(
                f"bias must be a tensor or a bias such as Alibi(slopes), but got {bias!r}. "
                "Convert an array with torch.as_tensor(bias)."
            )
        bias.check(extent)
    if scale is None:
        scale = dim**-0.5
    elif not -MAX_FLOAT <= (scale := number(scale, "scale")) <= MAX_FLOAT:
        raise InputError(f"scale must be a finite number of float32, but got {scale}.")
    if softcap is not None and not 0 < (softcap := number(softcap, "softcap")) <= MAX_FLOAT:
        raise InputError(f"softcap must be a finite number of float32 above 0, but got {softcap}.")
    if not 0 <= (dropout := number(dropout, "dropout")) < 1:
        raise InputError(f"dropout must be a probability from 0 to below 1, but got {dropout}.")
    if dropout and _functorch.RandomnessType.Error in vmap_randomness():
        raise InputError(
            "dropout draws random numbers, but torch.func.vmap was called with "
            "randomness='error', its default. Pass randomness='different' or 'same' to vmap, or "
            "dropout=0."
        )
    if sinks is not None:
        _check_sinks(sinks, extent)
    if see is not None:
        if not isinstance(see, See):
            raise InputError(f"see must be a See, such as See(entropy=True), but got {see!r}.")
        pairs = isinstance(see.pairs, Pairs) or isinstance(see.scores, Pairs)
        if pairs and not torch.compiler.is_compiling() and isinstance(query, FakeTensor):
            raise InputError(
                "See(pairs=...) and pairs in See(scores=...) are numbers that regard reads, but "
                "the query is a tensor of FakeTensorMode, where nothing can be read. "
                "Leave them out."
            )
        see.check(extent)
        if see.sink and sinks is None:
            raise InputError("See(sink=True) needs a call with sinks: pass attention(sinks=...).")
        see = see.of_backend
    groups = heads // (key_heads or 1)
    return Call(query, key, value, mask, bias, scale, softcap, dropout, see, extent, groups, sinks)


def vmap_randomness() -> set[Any]:
    """How each active ``torch.func.vmap`` draws random numbers, as its ``randomness`` says."""
    stack = () if torch.compiler.is_compiling() else _functorch.get_interpreter_stack() or ()
    return {
        _functorch.CVmapInterpreterPtr(level).randomness()
        for level in stack
        if level.key() == _functorch.TransformType.Vmap
    }


def _check_sinks(sinks: Tensor, extent: Extent) -> None:
    check_tensor(sinks, "sinks")
    if not sinks.is_floating_point() or sinks.dim() != 1:
        raise InputError(
            f"sinks must be a tensor [heads] of floating-point numbers, but got "
            f"{list(sinks.shape)} of {sinks.dtype}."
        )
    if len(sinks) != extent.heads:
        raise InputError(f"sinks has {len(sinks)} numbers, but the query has {extent.heads} heads.")
    check_device(sinks, extent, "tensor of sinks")


def _start(given: Any, extent: Extent) -> int | tuple[int, ...] | Tensor | None:
    """Check ``query_start``. A tensor on the CPU is read; one on another device is not."""
    numbers: Any = given
    if isinstance(given, Tensor):
        check_tensor(given, "query_start")
        if given.dim() > 1 or not is_whole(given.dtype):
            raise InputError(f"{_STARTS}, but got a {given.dtype} tensor of {list(given.shape)}.")
        check_values(given, extent, "query_start")
        numbers = given.reshape(-1)
        if can_read(given):
            numbers = numbers.tolist()
    else:
        numbers = tuple(given) if isinstance(given, Iterable) else (given,)
    if len(numbers) not in (1, extent.batch):
        raise InputError(
            f"query_start has {len(numbers)} entries for a batch of {extent.batch}. "
            "Give one position per sequence, or one for all."
        )
    if isinstance(numbers, Tensor):
        return numbers.to(extent.device, torch.long).clamp(-MAX_START, MAX_START)
    try:
        starts = tuple(n if isinstance(n, int) else index(n) for n in numbers)
    except TypeError:
        raise InputError(f"{_STARTS}, but got {given!r}.") from None
    if any(not -MAX_START <= start <= MAX_START for start in starts):
        raise InputError(f"query_start must be at most {MAX_START:,} from 0, but got {given!r}.")
    if len(set(starts)) > 1:
        return starts
    default = extent.keys - extent.queries
    return None if not starts or starts[0] == default else starts[0]


def _listed(query: Sequence[int], key: Sequence[int], value: Sequence[int]) -> str:
    return f"query {list(query)}, key {list(key)} and value {list(value)}"
