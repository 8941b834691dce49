"""Watch what any PyTorch module computes its attention with.

While a watched module runs, a torch function mode sees each PyTorch function it calls:

- ``scaled_dot_product_attention`` is computed by :func:`regard.attention`, which agrees with it up
  to rounding, and gathers the fields on the way. With dropout, PyTorch computes the output.
- ``softmax`` over the keys, inside a module that is named after attention: the module computes its
  weights itself. If they then multiply the values, the fields are computed from these weights.
- ``multi_head_attention_forward`` of :class:`torch.nn.MultiheadAttention`: the fields are computed
  from its projections.

Except for the first, the output is the module's own. So it is of the first, too, if a gradient
checkpoint will compare this run with another one. That other run, in the backward pass, is not
recorded.
"""

from __future__ import annotations

import inspect
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.overrides import TorchFunctionMode

from regard.errors import InputError
from regard.interpret.adapters.ours import uncompiled
from regard.interpret.adapters.windows import Softmax, Windows, computes_windows
from regard.interpret.watched import (
    Watcher,
    active_watchers,
    computed_again,
    computed_later,
    computing,
    unwatched,
)
from regard.layers.modules import MultiHeadAttention
from regard.mechanism.functional import attention
from regard.mechanism.geometry import Extent, Tile, autocasts
from regard.mechanism.mask_adapters import mask_from_transformers
from regard.mechanism.masks import Causal, Dense, Mask
from regard.mechanism.seeing import Joining, Pairs, See, Seen, observe

# The second is what an exported program calls.
FUSED = frozenset({
    F.scaled_dot_product_attention, torch.ops.aten.scaled_dot_product_attention.default,
})  # fmt: skip
FUSED_ON_NESTED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
SCRIPTED = re.compile(r"aten::(scaled_dot_product_attention|_?softmax)\(")
SOFTMAXES = frozenset({torch.softmax, Tensor.softmax, F.softmax, torch.special.softmax})
PRODUCTS = frozenset({
    torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.bmm, Tensor.bmm,
    torch.baddbmm, Tensor.baddbmm, torch.einsum,
})  # fmt: skip
_OBSERVED = SOFTMAXES | FUSED | {F.multi_head_attention_forward}
CHANGES = frozenset({
    Tensor.mul, Tensor.__mul__, torch.mul, Tensor.masked_fill, torch.masked_fill,
    Tensor.masked_fill_, torch.where, torch.nan_to_num, Tensor.nan_to_num,
})  # fmt: skip
NAMED = re.compile(r"(attn|attention)\d*$", re.IGNORECASE)  # the end of a module's name
BESIDE = re.compile(r"norm|dropout|output|mask|embed", re.IGNORECASE)  # in a class: no attention
# The modules of PyTorch that run in every block, without those that call other modules.
PLAIN = frozenset(
    f"torch.nn.modules.{name}"
    for name in ("activation", "dropout", "linear", "normalization", "sparse", "conv")
)
HEADS = ("num_heads", "num_attention_heads", "n_heads", "n_head", "heads")
OWN_CODE = "computes attention in a way that watch does not know"


def attach(watcher: Watcher, stack: ExitStack) -> bool:
    """Watch every module that does not consist of regard's own attention layers alone."""
    own: set[nn.Module] = {m for m in watcher.names if isinstance(m, MultiHeadAttention)}
    inside = {part for layer in own for part in layer.modules()}
    named = {
        module: _says_attention(name, module)
        for module, name in watcher.names.items()
        if module not in inside
    }
    if own and not any(named.values()):
        return False
    observer = _Observer(watcher, named | dict.fromkeys(own, False), own)
    handles = [
        register_module_forward_pre_hook(observer.enter),
        register_module_forward_hook(observer.leave, always_call=True),
        *(
            module.register_forward_hook(observer.replace_padded, with_kwargs=True)
            for module in named
            if isinstance(module, nn.TransformerEncoder)
        ),
        *(
            module.register_forward_pre_hook(observer.enter_windows, with_kwargs=True)
            for module in named
            if computes_windows(module)
        ),
    ]
    for handle in handles:
        stack.callback(handle.remove)
    stack.callback(observer._stop)  # what an interrupt left running
    stack.enter_context(uncompiled())
    return True


def _says_attention(name: str, module: nn.Module) -> bool:
    """Whether a module is named after attention, by its class or by its attribute."""
    if isinstance(module, nn.MultiheadAttention):
        return True
    if type(module).__module__.startswith(("torch.nn.", "regard.")):
        return False
    kind = type(module).__name__.lower()
    if "attention" in kind or "attn" in kind:
        return True
    return bool(NAMED.search(name) and not BESIDE.search(kind) and any(module.children()))


@dataclass(eq=False, slots=True)
class _Frame:
    """A watched module that is running."""

    module: nn.Module
    name: str
    says_attention: bool
    own: bool = False  # whether it is a layer of regard, which another adapter watches
    holds_attention: bool = False  # whether a module inside it is named after attention and ran
    reason: str = ""  # why a call could not be recorded
    # Each tensor that holds weights, by its id, until they multiply values.
    weights: dict[int, tuple[Tensor, Softmax]] = field(default_factory=dict)
    windows: Windows | None = None  # what its softmax is over, if not over keys


class _Running(threading.local):
    """What runs in one thread: modules, the outermost first."""

    def __init__(self) -> None:
        self.frames: list[_Frame] = []
        self.attention: list[_Frame] = []  # those that are named after attention
        self.mode: ExitStack | None = None
        self.masks: dict[Any, tuple[Tensor, dict[str, Any]]] = {}  # masks of the outermost module


class _Mode(TorchFunctionMode):
    """Shows an observer the functions of one thread. Most pass by, at the least cost."""

    def __init__(self, observer: _Observer) -> None:
        super().__init__()
        self.call = observer.call
        self.attention = observer.running.attention  # of this thread

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func in _OBSERVED or (self.attention and self.attention[-1].weights):
            return self.call(func, args, kwargs or {})
        return func(*args, **kwargs) if kwargs else func(*args)


class _Observer:
    """Follows the modules of one watcher while they run, and records their attention."""

    def __init__(self, watcher: Watcher, named: dict[nn.Module, bool], own: set[nn.Module]) -> None:
        self.watcher = watcher
        self.named = named
        self.own = own
        # Modules that compute no attention and hold none, as PyTorch defines them.
        self.plain = {
            module
            for module, says_attention in named.items()
            if module is not watcher.model
            and not says_attention
            and type(module).__module__ in PLAIN
            and not any(module.children())
        }
        self.running = _Running()

    # -------------------------------------------------------------------- modules that run

    def enter(self, module: nn.Module, args: Any) -> None:
        if module in self.plain or unwatched.get():
            return
        says_attention = self.named.get(module)
        if says_attention is None:
            if type(module) is type(self.watcher.model) and self.watcher.active:
                self.watcher.ran_elsewhere("a copy of it ran")
            return
        if not self.watcher.active:
            if not any(module in other.names for other in active_watchers.get()):
                self.watcher.ran_elsewhere(f"it ran in {threading.current_thread().name}")
            return
        self.watcher.started()
        running = self.running
        name = self.watcher.names[module]
        running.frames.append(_Frame(module, name, says_attention, own=module in self.own))
        if says_attention:
            running.attention.append(running.frames[-1])
        if isinstance(module, FUSED_ON_NESTED) and any(each.is_nested for each in _tensors(args)):
            # These modules compute nested tensors only if no function mode is active.
            self.watcher.wants(module, *_tensors(args))
            if running.mode is not None:
                running.mode.close()
                running.mode = None
        elif running.mode is None:
            self._start_mode()

    def enter_windows(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        frames = self.running.frames
        if frames and frames[-1].module is module:
            frames[-1].windows = Windows.of(module, args, kwargs)

    def leave(self, module: nn.Module, *_: Any) -> None:
        if module in self.plain:
            return
        frames = self.running.frames
        if not frames or unwatched.get():
            return
        if frames[-1].module is not module and all(frame.module is not module for frame in frames):
            return
        while True:
            frame = frames.pop()
            self._finish(frame, frames[-1] if frames else None)
            if frame.module is module:
                break
        if not frames:
            self._stop()
        elif self.running.mode is None:
            self._start_mode()

    def _start_mode(self) -> None:
        self.running.mode = ExitStack()
        self.running.mode.enter_context(_Mode(self))

    def _finish(self, frame: _Frame, parent: _Frame | None) -> None:
        if frame.says_attention:
            self.running.attention.pop()
        if frame.windows is not None and frame.windows.complete:
            softmaxes = {id(each): each for _, each in frame.weights.values()}
            frame.weights.clear()
            for local in softmaxes.values():  # one, if it is to be recorded
                see = partial(_from_windows, frame.windows, local)
                self._record(frame, see, (local.scores,))
        if frame.reason:
            self.watcher.missed(frame.name, frame.reason)
        elif isinstance(frame.module, torch.jit.ScriptModule):
            if frame.says_attention or SCRIPTED.search(str(frame.module.inlined_graph)):
                self.watcher.missed(frame.name, "runs as TorchScript, whose operations are hidden")
        elif any(softmax.in_parts for _, softmax in frame.weights.values()):
            self.watcher.missed(frame.name, OWN_CODE)
        elif frame.weights or (frame.says_attention and not frame.holds_attention):
            self.watcher.ran(frame.name, OWN_CODE)
        if parent is not None:
            parent.holds_attention |= frame.says_attention or frame.holds_attention or frame.own

    def _stop(self) -> None:
        running = self.running
        if running.mode is not None:
            running.mode.close()
        running.mode = None
        running.frames.clear()
        running.attention.clear()
        running.masks.clear()

    def replace_padded(self, module: nn.Module, args: Any, kwargs: Any, _: Any) -> Any:
        """The output of a fused ``nn.TransformerEncoder``, whose padded positions are 0.

        PyTorch fuses it only where nothing watches, so the module runs again.
        """
        if module.training or unwatched.get() or not self.watcher.active:
            return None
        if len(args) < 3 and kwargs.get("src_key_padding_mask") is None:
            return None
        with self._paused():
            return module(*args, **kwargs)

    @contextmanager
    def _paused(self) -> Iterator[None]:
        """Let modules run as if nothing watched them."""
        running = self.running
        stopped = running.mode
        if stopped is not None:
            stopped.close()
        try:
            with computing():
                yield
        finally:
            if stopped is not None:
                stopped.enter_context(_Mode(self))

    # ------------------------------------------------------------------- functions they call

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a PyTorch function for the watched module, and record it if it is attention."""
        frames, attention_frames = self.running.frames, self.running.attention
        if not frames or frames[-1].own or not self.watcher.active:
            return func(*args, **kwargs)
        if unwatched.get() or computed_again():
            return func(*args, **kwargs)
        frame = attention_frames[-1] if attention_frames else None
        if func in FUSED:
            return self._fused(frame or frames[-1], func, args, kwargs)
        if func is F.multi_head_attention_forward:
            self._multihead(frame or frames[-1], args, kwargs)
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if frame is not None:
            if func in SOFTMAXES:
                if self.watcher.wants(frame.module, result):
                    _start(frame, result, args, kwargs)
            elif frame.weights:
                self._follow(frame, func, args, result)
        return result

    def _record(self, frame: _Frame, see: Callable[[See], Seen], tensors: Iterable[Tensor]) -> None:
        """Record the fields, unless another layer was chosen or regard cannot compute them."""
        if not self.watcher.wants(frame.module, *tensors):
            return
        try:
            with computing(), torch.no_grad() if computed_later() else nullcontext():
                seen = see(self.watcher.see)
        except _UnknownError as error:
            frame.reason = str(error)
            return
        self.watcher.record(frame.module, seen)

    def _fused(
        self, frame: _Frame, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        given = dict(zip(_FUSED, args, strict=False)) | kwargs
        output: Any = None
        replaces = not given.get("dropout_p") and not computed_later()

        def see(fields: See) -> Seen:
            nonlocal output
            call = self._described(frame, fields.uses_positions, **given)
            computed, seen = call.run(fields)
            if computed is not None and replaces:
                output = computed.reshape(*given["query"].shape[:-1], computed.shape[-1])
            return seen

        self._record(frame, see, _tensors(given.values()))
        return func(*args, **kwargs) if output is None else output

    def _multihead(self, frame: _Frame, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = _MULTIHEAD.bind(*args, **kwargs)
        given.apply_defaults()
        self._record(
            frame,
            lambda fields: _projected(given.arguments).run(fields)[1],
            _tensors(given.arguments.values()),
        )

    def _follow(self, frame: _Frame, func: Any, args: tuple[Any, ...], result: Any) -> None:
        """Follow weights through the functions that are applied to them, to their product."""
        for operand in _tensors(args):
            at = frame.weights.get(id(operand))
            if at is None:
                continue
            softmax = at[1]
            if func in PRODUCTS:
                for key in [k for k, (_, each) in frame.weights.items() if each is softmax]:
                    del frame.weights[key]
                if frame.windows is not None:
                    frame.windows.of_global_queries.append(softmax)
                    return
                heads = _heads(frame.module)
                see = partial(
                    _from_weights, scores=softmax.scores, weights=softmax.weights, heads=heads
                )
                self._record(frame, see, (softmax.scores,))
            elif isinstance(result, Tensor) and result.is_floating_point():
                dropped = softmax.weights.shape[-1] - result.shape[-1] if result.dim() else 0
                # If the last column is cut off, it is a sink.
                cut = func is Tensor.__getitem__ and dropped == 1
                whole = cut or result.numel() == operand.numel()
                if cut or (func in CHANGES and result.shape == softmax.weights.shape):
                    softmax = softmax._replace(weights=result)
                elif not whole:
                    softmax = softmax._replace(in_parts=True)
                for key, (tensor, each) in list(frame.weights.items()):
                    if each is at[1]:
                        frame.weights[key] = tensor, softmax
                if not whole:
                    continue  # it may take other weights, too
                frame.weights[id(result)] = result, softmax
            return

    def _described(self, frame: _Frame, distance: bool, **given: Any) -> _Call:
        """The arguments of ``scaled_dot_product_attention`` as arguments of ``attention``."""
        query, key, value = (_in_autocast(given[name]) for name in ("query", "key", "value"))
        heads = _heads(frame.module) if query.dim() == 3 else 1
        query, key, value = (_four_axes(tensor, heads) for tensor in (query, key, value))
        if not given.get("enable_gqa") and query.shape[1] != key.shape[1] != 1:
            raise _UnknownError("passes keys with another number of heads than queries")
        batch = max(map(len, (query, key, value)))
        if not len(query) == len(key) == len(value):
            query, key, value = (t.expand(batch, *t.shape[1:]) for t in (query, key, value))
        mask = given.get("attn_mask")
        if _packed(frame.module, query, key) and not given.get("is_causal"):
            query = query.reshape(batch, -1, 1, query.shape[-1])
            if mask is not None and mask.shape[-2] > 1:
                mask = mask.reshape(*mask.shape[:-3], -1, 1, mask.shape[-1])
        call = _Call(query, key, value, scale=given.get("scale"))
        if mask is None:
            return call._replace(mask=Causal(), start=0) if given.get("is_causal") else call
        if mask.dim() > 4 or (mask.dim() == 3 and given["query"].dim() == 3):
            raise _UnknownError(f"passes a mask with {mask.dim()} axes")
        # The layers of a model share their mask: it is described once.
        version = 0 if mask.is_inference() else mask._version
        shapes = mask.shape, query.shape[2], key.shape[2], torch.is_grad_enabled()
        place = mask.data_ptr(), mask.dtype, mask.stride(), version, shapes, distance
        if place not in self.running.masks:
            axes = mask.reshape((1,) * (4 - mask.dim()) + tuple(mask.shape))
            visible, added = (None, axes) if axes.is_floating_point() else (axes, None)
            self.running.masks[place] = mask, _limits(visible, added, *shapes[1:3], distance)
        return call._replace(**self.running.masks[place][1])


def _query_start(visible: Tensor) -> list[int] | None:
    """The position of each sequence's first query, if the last keys are not yet filled.

    A static cache has more keys than queries; the last key that the last query sees is its own.
    """
    queries, keys = visible.shape[-2:]
    last = visible[..., -1, :].any(1) if queries else visible.new_zeros(1, keys)
    if keys <= queries or last[:, -1].all():
        return None
    own = keys - 1 - last.flip(-1).to(torch.uint8).argmax(-1)
    return [int(place) - queries + 1 for place in own]


_FUSED = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
_MULTIHEAD = inspect.signature(F.multi_head_attention_forward)


class _UnknownError(InputError):
    """A call whose fields cannot be computed; the message continues the name of its module."""


class _Call(NamedTuple):
    """The arguments of :func:`regard.attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Mask | None = None
    bias: Tensor | None = None
    scale: float | None = None
    start: int | list[int] | None = None
    dense: bool = False  # whether all scores are computed, because some are as low as can be

    def run(self, see: See) -> tuple[Tensor | None, Seen]:
        """The output, if it was computed, and the fields."""
        (batch, heads, queries), keys = self.query.shape[:3], self.key.shape[2]
        see.check(Extent(batch, heads, queries, keys, self.query.device))
        if self.dense:
            key = self.key.repeat_interleave(heads // self.key.shape[1], 1)
            scale = self.query.shape[-1] ** -0.5 if self.scale is None else self.scale
            scores = (self.query * scale) @ key.mT + (0 if self.bias is None else self.bias)
            return None, _from_weights(see, scores, scores.softmax(-1), 1)
        try:
            return attention(
                self.query, self.key, self.value, mask=self.mask, bias=self.bias,
                scale=self.scale, query_start=self.start, see=see,
            )  # fmt: skip
        except InputError as error:
            raise _UnknownError(f"calls attention with something regard cannot: {error}") from None


def _limits(
    visible: Tensor | None, added: Tensor | None, queries: int, keys: int, distance: bool
) -> dict[str, Any]:
    """The mask of visible pairs and the numbers that are added to the scores, as parts of a call.

    Numbers hide a pair by -inf or by their dtype's lowest number. In a row where all have the
    lowest number, the weights are equal, which ``lse`` cannot express: that call is dense.
    """
    bias = None
    if added is not None:
        hidden = added < torch.finfo(added.dtype).min / 2
        if (hidden & added.isfinite()).all(-1).any():
            if visible is not None:
                added = added.masked_fill(~visible, -torch.inf)
            return {"bias": added, "dense": True}
        rest = added.masked_fill(hidden, 0)
        bias = rest if rest.any() else None
        visible = ~hidden if visible is None else visible & ~hidden
    if visible is None:
        return {}
    visible = visible.expand(*visible.shape[:2], queries, keys)
    start = _query_start(visible) if distance else None
    mask = mask_from_transformers(visible) if start is None else Dense(visible)
    return {"mask": mask, "bias": bias, "start": start}


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from _tensors(arg)


def _heads(module: nn.Module) -> int:
    """The number of heads that a module names, or 1."""
    for owner in (module, getattr(module, "config", None)):
        for name in HEADS:
            count = getattr(owner, name, None)
            if isinstance(count, int):
                return count
    return 1


def _packed(module: nn.Module, query: Tensor, key: Tensor) -> bool:
    """Whether the heads of a group are passed as queries of the head of its keys.

    transformers 5.23 does so where one token is decoded and keys have fewer heads.
    """
    groups = getattr(module, "num_key_value_groups", 1)
    heads = query.shape[1]
    return (
        query.shape[2] == groups > 1 and heads == key.shape[1] and heads * groups == _heads(module)
    )


def _four_axes(tensor: Tensor, heads: int) -> Tensor:
    """[batch, heads, n, m] of a tensor [..., n, m] whose axis before the last two has heads."""
    if tensor.dim() == 4:
        return tensor
    if tensor.dim() == 3:
        heads = 1 if len(tensor) % heads else heads
        return tensor.reshape(-1, heads, *tensor.shape[1:])
    if tensor.dim() == 2:
        return tensor[None, None]
    return tensor.flatten(0, -4)


def _in_autocast(tensor: Tensor) -> Tensor:
    kind = tensor.device.type
    if autocasts(tensor) and tensor.dtype != torch.float64:
        return tensor.to(torch.get_autocast_dtype(kind))
    return tensor


def _start(frame: _Frame, result: Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Note the result of a softmax, if it may hold attention weights."""
    scores = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if not isinstance(dim, int) or scores.dim() < 3 or dim % scores.dim() != scores.dim() - 1:
        return
    if scores.dim() > 4:
        frame.reason = f"computes scores with {scores.dim()} axes"
    else:
        frame.weights[id(result)] = result, Softmax(scores, result)


def _from_weights(see: See, scores: Tensor, weights: Tensor, heads: int) -> Seen:
    """The fields of ``see`` from the scores and the weights that a module computed itself."""
    lowest = torch.finfo(scores.dtype).min
    scores, weights = (_precise(_four_axes(tensor, heads)) for tensor in (scores, weights))
    if weights.shape[:-1] != scores.shape[:-1]:
        raise _UnknownError("reshapes its weights before it uses them")
    keys = weights.shape[-1]
    sink = scores[..., keys:]
    if sink.numel() and (see.lse or see.max_logit or see.scores is not None):
        if not scores.amax(-1).any():
            raise _UnknownError(
                "subtracts the largest score, so lse, max_logit and scores are unknown"
            )
    raw, visible = _masked(scores[..., :keys], weights, lowest)
    lse = torch.cat((raw, sink), -1).logsumexp(-1)
    start = _query_start(visible) if see.uses_positions else None
    batch, count, queries, _ = weights.shape
    extent = Extent(batch, count, queries, keys, weights.device, tuple(start) if start else None)
    see.check(extent)
    joining = Joining(see, extent)
    tile = Tile(extent, range(extent.queries), range(keys))
    joining.add(observe(see, tile, raw, weights, lse, sink[..., 0] if sink.numel() else None))
    seen = joining.seen()
    if see.sink:
        seen.sink = (sink[..., 0] - lse).exp() if sink.numel() else torch.zeros_like(lse)
    if isinstance(see.scores, Pairs):
        seen.scores = raw[..., see.scores.queries, see.scores.keys][..., see.scores.places]
    elif see.scores is not None:
        seen.scores = raw[:, :, list(see.scores)]
    return seen


def _precise(tensor: Tensor) -> Tensor:
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _masked(scores: Tensor, weights: Tensor, lowest: float) -> tuple[Tensor, Tensor]:
    """The scores with -inf where the module masks them by about ``lowest``, and where not."""
    hidden = (scores < lowest / 2) | ((scores < -9000) & (weights == 0))
    # A query without keys has equal weights, and its scores are too low to have digits left.
    unmasked = scores.amax(-1, keepdim=True) < -9000
    raw = torch.where(unmasked, weights.detach().log(), scores.masked_fill(hidden, -torch.inf))
    return raw, ~hidden | unmasked


def _from_windows(windows: Windows, local: Softmax, see: See) -> Seen:
    """The fields of ``see`` from the softmax of a module over windows of keys."""
    if see.scores is not None:
        raise _UnknownError("computes scores of windows of keys, which See(scores) does not have")
    lowest = torch.finfo(local.scores.dtype).min
    local = Softmax(_precise(local.scores), _precise(local.weights))
    batch, queries, heads, _ = local.weights.shape
    extent = Extent(batch, heads, queries, queries, local.weights.device)
    see.check(extent)
    joining = Joining(see, extent)
    for tile, scores, weights in windows.tiles(local):
        raw, _ = _masked(scores, weights, lowest)
        joining.add(observe(see, tile, raw, weights, raw.logsumexp(-1), None))
    seen = joining.seen()
    if see.sink:
        seen.sink = local.weights.new_zeros(extent[:3])
    return seen


def _projected(given: dict[str, Any]) -> _Call:
    """The queries, keys and values of ``multi_head_attention_forward``, and its masks."""
    if given["static_k"] is not None or given["static_v"] is not None:
        raise _UnknownError("passes static keys or values")
    inputs = [given[name] for name in ("query", "key", "value")]
    inputs = [t[:, None] if t.dim() == 2 else t for t in inputs]  # [n, batch, dim]
    if given["use_separate_proj_weight"]:
        weights = [given[f"{name}_proj_weight"] for name in "qkv"]
    else:
        weights = list(given["in_proj_weight"].chunk(3))
    biases = [None] * 3 if given["in_proj_bias"] is None else given["in_proj_bias"].chunk(3)
    projected = map(F.linear, inputs, weights, biases)
    query, key, value = (_in_autocast(tensor) for tensor in projected)
    batch, heads = query.shape[1], given["num_heads"]
    if given["bias_k"] is not None:
        key = torch.cat((key, given["bias_k"].expand(1, batch, -1)))
        value = torch.cat((value, given["bias_v"].expand(1, batch, -1)))
    if given["add_zero_attn"]:
        key, value = (F.pad(tensor, (0, 0, 0, 0, 0, 1)) for tensor in (key, value))
    query, key, value = (
        t.reshape(len(t), batch, heads, -1).permute(1, 2, 0, 3) for t in (query, key, value)
    )
    visible: Tensor | None = None
    added: Tensor | None = None
    mask, padding = given["attn_mask"], given["key_padding_mask"]
    if mask is not None:
        mask = mask[None, None] if mask.dim() == 2 else mask.reshape(-1, heads, *mask.shape[1:])
    if padding is not None:
        padding = padding.reshape(batch, 1, 1, -1)
    for each in (mask, padding):
        if each is None:
            continue
        each = F.pad(each, (0, key.shape[2] - each.shape[-1]))  # keys that were added are visible
        if each.is_floating_point():
            added = each if added is None else added + each
        else:
            visible = ~each if visible is None else visible & ~each
    limits = _limits(visible, added, query.shape[2], key.shape[2], False)
    return _Call(query, key, value, **limits)
