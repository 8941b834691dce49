"""watch(model, See(...)): what every layer's attention did, while the model runs.

Our own layers are asked through forward hooks. A model of the ``transformers`` library is asked
through that library's registry of attention functions: inside the ``with``, its attention is
regard's. Who watches is known to the thread or task that entered the ``with``, and to no other.
"""

from __future__ import annotations

import html
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.layers import MultiHeadAttention
from regard.mechanism import attention
from regard.mechanism.masks import Causal
from regard.mechanism.seeing import See, Seen

NAME = "regard"  # of our attention in the registry of transformers


class Watched(Mapping[str, Seen | list[Seen]]):
    """What was seen, by the name of the layer: a ``Seen``, or a list where it was called again.

    Names are those of ``model.named_modules()``, in the order of their first calls.

    >>> from regard import GPT2, GPT2Config, See, watch
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=2, heads=2)).eval()
    >>> with watch(model, See(entropy=True)) as watched:
    ...     _ = model(torch.tensor([[1, 2, 3]]))
    >>> {name: list(seen.entropy.shape) for name, seen in watched.items()}
    {'stack.blocks.0.attention': [1, 2, 3], 'stack.blocks.1.attention': [1, 2, 3]}
    """

    def __init__(self) -> None:
        self._calls: list[tuple[str, Seen]] = []
        self._handed = 0  # calls that went to whoever wants each at once

    @property
    def calls(self) -> list[tuple[str, Seen]]:
        """Every call, in order: the name of the layer and what was seen."""
        return list(self._calls)

    def of(self, name: str) -> list[Seen]:
        """Every call of one layer, in order, as a list even where there was one."""
        found = [seen for called, seen in self._calls if called == name]
        if not found:
            known = ", ".join(self) or "none so far"
            raise KeyError(f"No call of a layer {name!r} was seen. Layers seen: {known}.")
        return found

    def __getitem__(self, name: str) -> Seen | list[Seen]:
        found = self.of(name)
        return found if len(found) > 1 else found[0]

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(name for name, _ in self._calls))

    def __len__(self) -> int:
        return len({name for name, _ in self._calls})

    @property
    def _counts(self) -> str:
        layers, calls = len(self), len(self._calls)
        return f"{layers} layer{'s' * (layers != 1)}, {calls} call{'s' * (calls != 1)}"

    def _summary(self) -> Iterator[tuple[str, str, str]]:
        """One line per layer: its name, how often it was called, the extent of the last call."""
        for name in self:
            found = self.of(name)
            batch, heads, queries, keys = found[-1].extent
            yield (
                name,
                "1 call" if len(found) == 1 else f"{len(found)} calls, the last:",
                f"{batch} x {heads} heads, {queries} queries, {keys} keys",
            )

    def __repr__(self) -> str:
        head = f"Watched: {self._counts}"
        lines = list(self._summary())
        if not lines and self._handed:
            return f"Watched: {self._handed} calls, each handed on when it was seen"
        if not lines:
            return f"{head} (the model has not run)"
        wide, middle = (max(len(line[column]) for line in lines) for column in (0, 1))
        fields = ", ".join(self._calls[0][1].to_dict())
        return "\n".join(
            [f"{head} of {fields}"]
            + [f"  {name:<{wide}}  {times:<{middle}}  {size}" for name, times, size in lines]
        )

    def _repr_html_(self) -> str:
        body = "".join(
            "<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in line) + "</tr>"
            for line in self._summary()
        )
        return (
            f"<table><caption>Watched: {self._counts}</caption>"
            "<thead><tr><th>layer</th><th>calls</th><th>extent</th></tr></thead>"
            f"<tbody>{body}</tbody></table>"
        )


class _Watcher:
    """One ``with watch(...)``: whom it watches, what it looks at, and what it found."""

    def __init__(
        self, model: nn.Module, see: See, each: Callable[[str, Seen], None] | None
    ) -> None:
        self.names = {
            module: name or type(module).__name__ for name, module in model.named_modules()
        }
        self.see = replace(see)  # known by its identity: a copy that nobody else can pass
        self.each = each
        self.watched = Watched()

    @property
    def active(self) -> bool:
        return self in _watchers.get()

    def record(self, module: nn.Module, seen: Seen) -> None:
        if self.each is None:
            self.watched._calls.append((self.names[module], seen))
        else:
            self.watched._handed += 1
            self.each(self.names[module], seen)


_watchers: ContextVar[tuple[_Watcher, ...]] = ContextVar("regard_watchers", default=())


@contextmanager
def watch(
    model: nn.Module, see: See, each: Callable[[str, Seen], None] | None = None
) -> Iterator[Watched]:
    """Collect what each attention layer of ``model`` does, call by call, while the model runs.

    ``model`` is one of ours, any module that holds :class:`MultiHeadAttention`, or a model of the
    ``transformers`` library, 4.57 or later, whose attention goes through that library's registry:
    before 5 that of BERT and T5 does not, which is told. Its output stays the same within rounding;
    afterwards it is as it was. Run it under ``torch.no_grad()`` where no
    gradient of what was seen is needed. A position of a ``transformers`` model with nothing to
    attend to, such as padding on the left, yields zeros, as everywhere in regard.

    With ``each`` nothing is kept: it is called with the name of a layer and what was seen, call
    after call, so that a long text's layers need not all be held at once.

    >>> import torch
    >>> from regard import See, watch
    >>> from regard.layers import MultiHeadAttention
    >>> model = torch.nn.ModuleDict({"first": MultiHeadAttention(8, heads=2)})
    >>> with watch(model, See(entropy=True)) as watched:
    ...     _ = model["first"](torch.zeros(1, 5, 8))
    >>> watched
    Watched: 1 layer, 1 call of entropy
      first  1 call  1 x 2 heads, 5 queries, 5 keys
    >>> list(watched["first"].entropy.shape)
    [1, 2, 5]
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"watch takes a model, a torch.nn.Module, not {type(model).__name__}.")
    if not isinstance(see, See):
        raise InputError(f"watch takes See(...), as in See(entropy=True), not {see!r}.")
    watcher = _Watcher(model, see, each)
    ours = [module for module in watcher.names if isinstance(module, MultiHeadAttention)]
    theirs = _from_transformers(watcher)
    if not ours and not theirs:
        raise InputError(
            f"There is nothing to watch in {type(model).__name__}: it holds no MultiHeadAttention "
            "of regard and is no model of the transformers library."
        )
    for other in _watchers.get():
        shared = [type(module).__name__ for module in watcher.names if module in other.names]
        if shared:
            raise InputError(
                f"{shared[0]} is being watched already. Ask the outer watch(...) for "
                "all you want to see, as in See(entropy=True, top=8)."
            )
    for part in theirs:
        _check_reachable(part)

    with ExitStack() as stack:
        if ours:
            stack.enter_context(uncompiled())
        for module in ours:
            stack.callback(module.register_forward_pre_hook(_ask(watcher), with_kwargs=True).remove)
            stack.callback(module.register_forward_hook(_take(watcher), with_kwargs=True).remove)
        for part in theirs:
            refusal = part.register_forward_pre_hook(_refuse_output_attentions, with_kwargs=True)
            stack.callback(refusal.remove)
            stack.enter_context(_rerouted(part))
        token = _watchers.set((*_watchers.get(), watcher))
        stack.callback(_watchers.reset, token)
        yield watcher.watched


@contextmanager
def uncompiled() -> Iterator[None]:
    """Within, modules run as they are written: once compiled, they do not see new hooks."""
    # Only where something may have been compiled: to load the compiler takes seconds.
    compiled = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if compiled else nullcontext():
        yield


# Our own layers --------------------------------------------------------------------------------


def _ask(watcher: _Watcher) -> Any:
    """A hook before a layer's forward: it is to see what the watcher asks for."""

    def hook(_: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        # A call that sees something for itself keeps its own answer.
        if watcher.active and kwargs.get("see") is None:
            return args, kwargs | {"see": watcher.see}
        return None

    return hook


def _take(watcher: _Watcher) -> Any:
    """A hook after a layer's forward: what was seen goes to the watcher, the output goes on."""

    def hook(module: nn.Module, _: Any, kwargs: dict[str, Any], result: Any) -> Any:
        if kwargs.get("see") is not watcher.see:
            return None
        output, seen = result
        watcher.record(module, seen)
        return output

    return hook


# Models of transformers ------------------------------------------------------------------------


def _from_transformers(watcher: _Watcher) -> list[Any]:
    """The outermost models of the transformers library in what is watched."""
    # Who has such a model has imported the library: there is no need to, to know that one has not.
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    models = [m for m in watcher.names if isinstance(m, library.PreTrainedModel)]
    inner = {part for model in models for part in model.modules() if part is not model}
    return [model for model in models if model not in inner]


def _check_reachable(model: Any) -> None:
    """Raise InputError where a model of transformers cannot be asked through its registry."""
    library = sys.modules["transformers.modeling_utils"]
    for part in model.modules():
        if isinstance(part, library.PreTrainedModel) and not part._can_set_attn_implementation():
            raise InputError(
                f"{type(part).__name__} cannot be watched: it computes attention in its own code, "
                "not through the attention registry of transformers. Where regard has this "
                "architecture, load it with regard.load(...) and watch that."
            )
    if model.training and torch.is_grad_enabled() and model.is_gradient_checkpointing:
        raise InputError(
            f"{type(model).__name__} computes its layers again on the way back (gradient "
            "checkpointing), where each call would be seen twice. Turn that off while watching."
        )
    _refuse_output_attentions(model, (), {"output_attentions": model.config.output_attentions})


def _refuse_output_attentions(model: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    """A hook before their forward: weights they would give themselves must not become None."""
    if kwargs.get("output_attentions"):
        raise InputError(
            f"{type(model).__name__} cannot give output_attentions while it is watched. Leave it "
            "out, or set it to False in the config, and ask for See(weights=True)."
        )


class _Routes:
    """Configurations whose attention is regard's for now; each comes back once nobody watches.

    Several threads may watch one model, and the last one to leave puts things back.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._held: dict[int, tuple[Any, str | None, int]] = {}  # config, what it was, how often

    def take(self, configs: list[Any]) -> None:
        with self._lock:
            for config in configs:
                before = config._attn_implementation_internal
                _, before, count = self._held.get(id(config), (config, before, 0))
                self._held[id(config)] = (config, before, count + 1)
                config._attn_implementation_internal = NAME

    def give_back(self, configs: list[Any]) -> None:
        with self._lock:
            for config in configs:
                _, before, count = self._held.pop(id(config))
                if count > 1:
                    self._held[id(config)] = (config, before, count - 1)
                else:
                    config._attn_implementation_internal = before


_routes = _Routes()


@contextmanager
def _rerouted(model: Any) -> Iterator[None]:
    """The model's attention is ours; its masks are those made for PyTorch's own attention."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    configs = _configs(model)
    _routes.take(configs)
    try:
        yield
    finally:
        _routes.give_back(configs)


def _configs(model: Any) -> list[Any]:
    """Every configuration that some part of the model may read, each once."""
    found: dict[int, Any] = {}
    waiting = [m.config for m in model.modules() if hasattr(m, "config")]
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in found or not hasattr(config, "sub_configs"):
            continue
        found[id(config)] = config
        waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(found.values())


# What a layer may hand over that changes its weights in ways attention() does not have.
_UNKNOWN = {
    "s_aux": "attention sinks",
    "head_mask": "a head mask",
    "block_indices": "sparse blocks",
    "indices": "sparse keys",
}


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    softcap: float | None = None,
    position_bias: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention as transformers calls it: output [batch, queries, heads, dim], and no weights."""
    for name, meaning in _UNKNOWN.items():
        if others.get(name) is not None:
            raise InputError(f"{type(module).__name__} uses {meaning}, which cannot be watched.")
    unscaled = getattr(module, "scale_attn_weights", True) is False
    by_layer = getattr(module, "scale_attn_by_inverse_layer_idx", False)
    if scaling is None and (unscaled or by_layer):  # transformers before 5, which leaves it out
        raise InputError(
            f"{type(module).__name__} scales its scores in a way that this version of transformers "
            "does not tell. Update transformers to 5, or load the model with regard.load."
        )
    queries, keys = query.shape[2], key.shape[2]
    mask, bias = _mask_and_bias(attention_mask, position_bias, keys)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    described: Causal | Tensor | None = mask
    if mask is None and causal and queries > 1:
        # No mask means causal from the first key on: keys beyond belong to an unfilled cache.
        key, value = key[:, :, :queries], value[:, :, :queries]
        bias = None if bias is None else bias[..., :queries]
        described = Causal()

    watcher = next((w for w in reversed(_watchers.get()) if module in w.names), None)
    if watcher is None:  # the model runs in another thread than the one that watches
        output = attention(
            query, key, value, mask=described, bias=bias, scale=scaling, softcap=softcap,
            dropout=dropout,
        )  # fmt: skip
    else:
        if watcher.see.distance and causal and mask is not None and keys > queries:
            _check_last(mask, module)
        output, seen = attention(
            query, key, value, mask=described, bias=bias, scale=scaling, softcap=softcap,
            dropout=dropout, see=watcher.see,
        )  # fmt: skip
        watcher.record(module, seen)
    return output.transpose(1, 2).contiguous(), None


def _mask_and_bias(
    mask: Tensor | None, bias: Tensor | None, keys: int
) -> tuple[Tensor | None, Tensor | None]:
    """A mask of transformers as what is allowed, and what is to be added to the scores."""
    if mask is None:
        return None, bias
    mask = mask[..., :keys]
    if not mask.is_floating_point():
        return mask, bias
    # Added to the scores, "never" is the lowest number there is, maybe with a bias added to it.
    allowed = mask > torch.finfo(mask.dtype).min / 2
    rest = mask.masked_fill(~allowed, 0)
    if rest.any():
        bias = rest if bias is None else bias + rest
    return allowed, bias


def _check_last(mask: Tensor, module: nn.Module) -> None:
    """Distances count from the last query at the last key; a cache not yet filled breaks that."""
    if not mask[..., -1, -1].any():
        raise InputError(
            f"{type(module).__name__} runs with a static cache, whose last keys are not yet "
            "filled, so the distance cannot be told. Use the default cache, or leave it out."
        )
