"""``attn_implementation="regard"``: attention of transformers 5, computed by regard.

transformers has a registry of attention functions and one of functions that make masks. Both know
"regard" once this module is registered (:mod:`regard.interpret.adapters.transformers_import`).
Masks are described as ranges of keys where transformers describes them by its own functions, and
no [queries, keys] tensor is made. Inside ``watch`` each call is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache, reduce
from itertools import pairwise
from operator import and_
from types import CodeType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import masking_utils
from transformers.utils.import_utils import is_tracing

from regard.errors import InputError
from regard.interpret.watched import (
    active_watchers,
    computed_again,
    computed_later,
    computing,
)
from regard.mechanism.functional import attention
from regard.mechanism.geometry import Extent, Tile, autocasts
from regard.mechanism.masks import Causal, Dense, Mask, Padding, Prefix, RangeMask, Segments, Window
from regard.mechanism.seeing import See

NAME = "regard"

MaskFunction = Callable[..., Any]  # whether a query may attend to a key, from their indices


def register() -> None:
    """Add regard to the registries of transformers 5."""
    transformers.AttentionInterface.register(NAME, attend)
    # Continuous batching sets this name. Its masks come with the calls.
    transformers.AttentionInterface.register(f"paged|{NAME}", attend_paged)
    transformers.AttentionMaskInterface.register(NAME, describe)


# Masks -----------------------------------------------------------------------------------------

# What models and torch.compile ask of a mask without reading it.
_ASKED = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "layout",
    "is_cpu",
    "is_cuda",
    "is_meta",
    "is_leaf",
    "is_sparse",
    "is_nested",
    "is_quantized",
    "is_mkldnn",
    "requires_grad",
    "grad",
)
_SIZES = frozenset(
    [
        *(getattr(Tensor, name).__get__ for name in _ASKED),
        Tensor.dim, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.stride,
        Tensor.storage_offset, Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex,
        Tensor.is_conj, Tensor.is_neg, Tensor.is_inference, Tensor.get_device,
    ]
)  # fmt: skip


class DescribedMask(Tensor):
    """A mask [batch, 1, queries, keys] of transformers that is stored as a description.

    It stands for a boolean tensor, or for numbers that are added to scores. Models ask for its
    sizes and pass it on. The tensor is made if a model does anything else with it, such as slicing
    it.
    """

    mask: Mask
    query_start: int | Tensor | None
    tensor: Tensor | None

    @staticmethod
    def of(
        mask: Mask,
        query_start: int | Tensor | None,
        sizes: tuple[int, int, int],
        device: Any,
        dtype: torch.dtype = torch.bool,
    ) -> DescribedMask:
        batch, queries, keys = sizes
        # One element for all; not expanded, because torch.compile does not take views of that kind.
        shape, strides = (batch, 1, queries, keys), (0, 0, 0, 0)
        element = torch.empty_strided(shape, strides, dtype=dtype, device=device)
        described = element.as_subclass(DescribedMask)
        described.mask, described.query_start, described.tensor = mask, query_start, None
        return described

    def dense(self) -> Tensor:
        """The mask as a tensor. It is made once, and models may write to it."""
        if self.tensor is None:
            batch, _, queries, keys = sizes = self.shape
            start = self.query_start
            if isinstance(start, Tensor):
                start = start.reshape(-1)
            extent = Extent(batch, 1, queries, keys, self.device, start)
            tile = self.mask.tile(Tile(extent, range(queries), range(keys)))
            tile = tile.reshape((1,) * (4 - tile.dim()) + tuple(tile.shape))
            tensor = tile.expand(sizes).clone(memory_format=torch.contiguous_format)
            if self.dtype != torch.bool:
                hidden = torch.finfo(self.dtype).min
                tensor = torch.zeros(sizes, dtype=self.dtype, device=self.device).masked_fill(
                    ~tensor, hidden
                )
            self.tensor = tensor
        return self.tensor

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _SIZES:
            args = _as_tensor(args)
            kwargs = {name: _as_tensor(arg) for name, arg in kwargs.items()}
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


def _as_tensor(given: Any) -> Any:
    if isinstance(given, DescribedMask):
        return given.dense()
    return type(given)(map(_as_tensor, given)) if type(given) in (list, tuple) else given


def describe(
    *,
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    allow_is_causal_skip: bool = True,
    allow_is_bidirectional_skip: bool = False,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    config: Any = None,
    **others: Any,
) -> Tensor | None:
    """The mask of a forward pass, from the arguments that transformers passes to mask functions.

    None stands for no mask, or for a causal one, where transformers allows it: it then passes
    ``is_causal`` to attention.
    """
    own_code, additive = _traits(type(config))
    if own_code is not None:
        raise InputError(
            f'{own_code} computes attention in its own code, so attn_implementation="{NAME}" '
            'cannot replace it. Load the model with attn_implementation="eager".'
        )
    if additive:
        allow_is_causal_skip = False
    kind = dtype if additive else torch.bool

    def as_tensor() -> Tensor | None:
        make: Any = masking_utils.eager_mask if additive else masking_utils.sdpa_mask
        mask: Tensor | None = make(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset,
            kv_offset=kv_offset, mask_function=mask_function, attention_mask=attention_mask,
            allow_is_causal_skip=allow_is_causal_skip,
            allow_is_bidirectional_skip=allow_is_bidirectional_skip, dtype=dtype, device=device,
            **others,
        )  # fmt: skip
        return mask

    start = q_offset - kv_offset  # the position of the first query, where key 0 is at position 0
    sizes = batch_size, q_length, kv_length
    tracing: bool = is_tracing(attention_mask)  # values cannot be read, and neither can closures
    if tracing and mask_function is masking_utils.causal_mask_function:
        if attention_mask is None and not isinstance(q_offset, Tensor):
            return DescribedMask.of(Causal(), start, sizes, device, kind)
    # The masks of a static cache may be inputs of compiled code: torch.compile does not take a
    # DescribedMask there whose sizes change.
    static = isinstance(q_offset, Tensor) or (q_length == 1 and not allow_is_causal_skip)
    if tracing or static:
        return as_tensor()
    start = int(start)
    visible = _visible_keys(attention_mask, kv_offset, kv_length)
    extent = Extent(batch_size, 1, q_length, kv_length, torch.device(device), start)
    parts = _parts(mask_function, extent, kv_offset)
    causal = any(
        isinstance(mask, Causal) or getattr(mask, "right", None) == 0 for mask in parts or ()
    )
    if parts is None or (causal and kv_length > start + q_length):
        return as_tensor()
    if start >= kv_length - 1:
        parts = [part for part in parts if not isinstance(part, Causal)]  # every key is earlier
    parts += _paddings(visible, extent, causal=Causal() in parts)
    skip = allow_is_bidirectional_skip or (allow_is_causal_skip and q_length == 1)
    if (not parts and skip) or (parts == [Causal()] and allow_is_causal_skip and start == 0):
        return None
    mask = reduce(and_, parts or [Window(None, None)])
    return DescribedMask.of(mask, start, sizes, device, kind)


_known_traits: dict[type, tuple[str | None, bool]] = {}


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _traits(config: type) -> tuple[str | None, bool]:
    """For a class of configurations: a model that computes attention in its own code, or None.

    And whether its models expect masks to be numbers that are added, because they do not support
    sdpa. Where such a model passes no mask, nothing is masked.
    """
    if config not in _known_traits:
        found: Any = transformers.MODEL_MAPPING.get(config, ())
        models = found if isinstance(found, tuple) else (found,)
        # Not promised: transformers asks the first when set_attn_implementation(...) is called,
        # and the second for attn_implementation="sdpa".
        refused = [model for model in models if not model._can_set_attn_implementation()]
        additive = any(not model._supports_sdpa for model in models)
        _known_traits[config] = (refused[0].__name__ if refused else None, additive)
    return _known_traits[config]


@cache
def _makers() -> dict[CodeType, str]:
    """The functions inside transformers' makers of masks, and the maker of each.

    transformers does not promise these names, nor those of the variables that :func:`_parts` reads.
    A mask that is not recognised by them is a tensor, and a test fails.
    """
    given = {
        "and_masks": (), "or_masks": (), "sliding_window_overlay": (1,),
        "sliding_window_bidirectional_overlay": (1,), "chunked_overlay": (1, None),
        "packed_sequence_mask_function": (None,), "blockwise_overlay": (None,),
    }  # fmt: skip
    makers = {name: getattr(masking_utils, name, None) for name in given}
    return {make(*given[name]).__code__: name for name, make in makers.items() if make is not None}


def _parts(function: MaskFunction, extent: Extent, kv_offset: int) -> list[Mask] | None:
    """Masks that together equal a mask function of transformers; None if it is not recognised.

    Masks that allow everything are left out.
    """
    if function is masking_utils.causal_mask_function:
        return [Causal()]
    if function is masking_utils.bidirectional_mask_function:
        return []
    code = getattr(function, "__code__", None)
    maker = _makers().get(code)  # type: ignore[arg-type]
    if code is None or maker is None:
        return None
    held = _held(function)
    first = extent.offset  # of the queries; the first key is at 0
    assert isinstance(first, int)
    last = first + extent.queries - 1
    match maker:
        case "and_masks":
            found = [_parts(inner, extent, kv_offset) for inner in held["mask_functions"]]
            masks = [mask for part in found for mask in part or ()]
            if None in found:
                return None
            windows = [mask for mask in masks if isinstance(mask, Window)]
            if Causal() in masks and any(mask.right is None for mask in windows):
                masks.remove(Causal())
                masks = [Window(m.left) if isinstance(m, Window) else m for m in masks]
            return masks
        case "or_masks":
            return _prefix(held["mask_functions"], extent, kv_offset)
        case "sliding_window_overlay":
            left = held["sliding_window"] - 1
            return [Window(left, None)] if left < last else []
        case "sliding_window_bidirectional_overlay":
            size = held["sliding_window"]
            return [Window(size, size)] if size < max(last, extent.keys - 1 - first) else []
        case "chunked_overlay":
            size = held["chunk_size"]
            starts = [(start - kv_offset) % size for start in held["left_padding"].tolist()]
            return _segments([_chunks(start, size, extent.keys) for start in starts])
        case "packed_sequence_mask_function":
            if (first, extent.queries) != (0, extent.keys):
                return None
            ids = held["packed_sequence_mask"]
            return _segments([_runs(row) for row in ids.cpu()])
    return None


def _held(function: Any) -> dict[str, Any]:
    """The variables that a function inside another one reads from it."""
    cells = (cell.cell_contents for cell in function.__closure__ or ())
    return dict(zip(function.__code__.co_freevars, cells, strict=True))


def _segments(rows: list[tuple[int, ...]]) -> list[Mask]:
    if all(len(row) == 1 for row in rows):
        return []
    return [Segments(rows[:1] if len(set(rows)) == 1 else rows)]


def _chunks(start: int, size: int, keys: int) -> tuple[int, ...]:
    """The lengths of chunks of ``size`` keys, one of which starts at ``start`` < ``size``."""
    borders = [0, *range(start or size, keys, size), keys]
    return tuple(stop - at for at, stop in pairwise(borders))


def _runs(ids: Tensor) -> tuple[int, ...]:
    return tuple(torch.unique_consecutive(ids, return_counts=True)[1].tolist())


def _prefix(functions: Iterable[MaskFunction], extent: Extent, kv_offset: int) -> list[Mask] | None:
    """A causal mask whose first block sees itself in both directions, as of images before text."""
    causal, *blocks = functions
    code = getattr(blocks[0], "__code__", None) if len(blocks) == 1 else None
    if causal is not masking_utils.causal_mask_function or kv_offset:
        return None
    if code is None or _makers().get(code) != "blockwise_overlay":
        return None
    ids = _held(blocks[0])["block_sequence_ids"]
    inside = ids[:, : extent.keys] >= 0
    length = inside.sum(1)
    at = torch.arange(inside.shape[1], device=inside.device)
    first_only = (inside == (at < length[:, None])) & (
        ~inside | (ids[:, : extent.keys] == ids[:, :1])
    )
    if inside.shape[1] != extent.keys or not first_only.all():
        return None
    return [Prefix(length.tolist())]


def _visible_keys(attention_mask: Tensor | None, kv_offset: int, keys: int) -> Tensor | None:
    """The keys that are no padding, [batch, keys]; None if all are visible."""
    if attention_mask is None:
        return None
    missing = max(kv_offset + keys - attention_mask.shape[1], 0)  # of a static cache
    return pad(attention_mask[:, kv_offset : kv_offset + keys].bool(), (0, missing))


def _paddings(visible: Tensor | None, extent: Extent, causal: bool) -> list[Mask]:
    """Masks that hide the padding, except what a causal mask hides anyway."""
    if visible is None:
        return []
    keys = extent.keys
    bits = visible.to(torch.uint8)
    found = torch.stack((bits.argmax(1), keys - bits.flip(1).argmax(1), bits.sum(1)))
    starts, stops, counts = found.tolist()
    for row, count in enumerate(counts):
        if not count:
            starts[row], stops[row] = 0, 0
        elif stops[row] - starts[row] != count:
            return [Dense(visible[:, None, None])]
    masks: list[Mask] = []
    assert isinstance(extent.offset, int)
    needed = min(extent.offset + extent.queries, keys) if causal else keys
    if any(stop < needed for stop in stops):
        masks.append(Padding(stops))
    if any(starts):
        masks.append(Padding([keys - start for start in starts], "left"))
    return masks


# Attention -------------------------------------------------------------------------------------


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    position_bias: Tensor | None = None,
    indices: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function for the registry of transformers.

    It returns the output [batch, queries, heads, dim], and the weights if ``output_attentions``
    is passed. ``s_aux`` are sinks [heads], and ``indices`` [batch, queries, n] the keys that each
    query may attend to.
    """
    if others.get("block_indices") is not None:
        raise InputError(
            f"{_name(module)} passes block_indices (sparse blocks), which regard does not "
            'support. Load the model with attn_implementation="sdpa".'
        )
    queries, keys = query.shape[2], key.shape[2]
    mask: Mask | Tensor | None = None
    start: int | Tensor | None = None
    bias = position_bias
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(attention_mask, DescribedMask) and (
        attention_mask.tensor is not None or attention_mask.shape[-1] != keys
    ):
        attention_mask = attention_mask[..., :keys]  # a model may have written to the tensor
    if attention_mask is None:
        masked = is_causal or not _traits(type(getattr(module, "config", None)))[1]
        if causal and masked and queries > 1:
            # Query i is aligned with key i. Later keys are unfilled entries of a static cache.
            key, value = key[:, :, :queries], value[:, :, :queries]
            bias = None if bias is None else bias[..., :queries]
            mask, start = Causal(), 0
    elif isinstance(attention_mask, DescribedMask):
        mask, start = attention_mask.mask, attention_mask.query_start
    elif attention_mask.dtype == torch.bool:
        mask = attention_mask
    elif attention_mask.is_floating_point():  # numbers added to the scores
        bias = attention_mask if bias is None else bias + attention_mask
    else:
        raise InputError(
            f"{_name(module)} passes an attention_mask of {attention_mask.dtype}. It is boolean, "
            "or holds numbers that are added to the scores."
        )
    if indices is not None:
        chosen = indices.new_zeros((*indices.shape[:2], keys), dtype=torch.bool)
        sparse = Dense(chosen.scatter(-1, indices.long(), True)[:, None])
        mask = (
            sparse if mask is None else sparse & (Dense(mask) if isinstance(mask, Tensor) else mask)
        )
    given: dict[str, Any] = {
        "mask": mask, "bias": bias, "query_start": start, "scale": scaling, "softcap": softcap,
        "dropout": dropout, "sinks": s_aux,
    }  # fmt: skip
    kind = query.device.type
    if autocasts(query):  # as PyTorch's own attention does
        dtype = torch.get_autocast_dtype(kind)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    watcher = None
    if not torch.compiler.is_compiling():  # while a model is watched, it runs uncompiled
        active = reversed(active_watchers.get())
        watcher = next((w for w in active if module in w.names), None)
    if watcher is not None and (computed_again() or not watcher.wants(module, query)):
        watcher = None
    wants_weights = bool(others.get("output_attentions"))
    weights = None
    if watcher is not None and computed_later():
        # The second run has no watcher, and must save the same tensors.
        with computing(), torch.no_grad():
            watcher.record(module, attention(query, key, value, **given, see=watcher.see)[1])
        watcher = None
    if watcher is None and not wants_weights:
        with computing():
            output = attention(query, key, value, **given)
    else:
        see = See(weights=True) if watcher is None else watcher.see
        if see.uses_positions and isinstance(mask, Tensor) and causal:
            # In a static cache the keys after the last query are unfilled.
            last = mask[..., -1, :].reshape(-1, keys).any(0).nonzero()
            given["query_start"] = int(last.max()) + 1 - queries if len(last) else None
        with computing():
            output, seen = attention(query, key, value, **given, see=see)
            shown = seen
            if wants_weights and seen.weights is None:
                shown = attention(query, key, value, **given, see=See(weights=True))[1]
        if watcher is not None:
            watcher.record(module, seen)
        if wants_weights:
            assert shown.weights is not None
            weights = shown.weights.to(query.dtype)
    return output.transpose(1, 2).contiguous(), weights


def _name(module: nn.Module) -> str:
    layer = getattr(module, "layer_idx", None)
    return type(module).__name__ + ("" if layer is None else f" of layer {layer}")


# Continuous batching ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Rows(RangeMask):
    """The range of keys of each query, [1, queries] each."""

    low: Tensor
    high: Tensor

    def ends(self, extent: Extent) -> tuple[Tensor, Tensor]:  # noqa: ARG002
        return self.low, self.high


def attend_paged(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the ranges follow from the lengths
    cache: Any = None,
    cu_seq_lens_q: Tensor | None = None,
    cu_seq_lens_k: Tensor | dict[str, Tensor] | None = None,
    read_index: Any = None,
    write_index: Any = None,
    block_table: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor | None]:
    """The attention function for continuous batching (``generate_batch``).

    The new tokens of all requests are one row of queries. ``cache.update`` returns the keys of all
    requests, one after another; the last query of a request is at its last key.
    """
    if cache is None or cu_seq_lens_q is None or cu_seq_lens_k is None or block_table is not None:
        raise InputError(
            f'attn_implementation="paged|{NAME}" is for generate_batch(), which passes a paged '
            f'cache. Use "{NAME}" for other calls.'
        )
    key, value = cache.update(
        key_states=key, value_states=value, layer_idx=module.layer_idx, read_index=read_index,
        write_index=write_index,
    )  # fmt: skip
    key, value = key.transpose(0, 1)[None], value.transpose(0, 1)[None]
    window = cache.sliding_windows[module.layer_idx]  # 1 stands for none
    if isinstance(cu_seq_lens_k, dict):
        cu_seq_lens_k = cu_seq_lens_k["full_attention" if window == 1 else "sliding_attention"]
    ranges = _request_ranges(cu_seq_lens_q, cu_seq_lens_k, query.shape[2], window)
    mask = DescribedMask.of(ranges, None, (1, query.shape[2], key.shape[2]), query.device)
    return attend(module, query, key, value, mask, **others)


def _request_ranges(query_ends: Tensor, key_ends: Tensor, queries: int, window: int) -> _Rows:
    """Causal attention within each request; queries after all requests have no keys."""
    at = torch.arange(queries, device=query_ends.device, dtype=query_ends.dtype)
    request = torch.searchsorted(query_ends, at, right=True).clamp(max=len(query_ends) - 1)
    high = key_ends[request] - (query_ends[request] - 1 - at)
    low = key_ends[request - 1]
    if window != 1:
        low = torch.maximum(low, high - window)
    used = at < query_ends[-1]
    low, high = (torch.where(used, end, key_ends[-1])[None].long() for end in (low, high))
    return _Rows(low, high)
