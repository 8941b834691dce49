"""Watch models of the transformers library through its registry of attention functions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.interpret.watched import Watcher, active_watchers
from regard.mechanism.functional import attention
from regard.mechanism.masks import Causal

NAME = "regard"  # of our attention in the registry of transformers
# What a layer may hand over that changes its weights in ways attention() does not have.
_UNKNOWN = {
    "s_aux": "attention sinks",
    "head_mask": "a head mask",
    "block_indices": "sparse blocks",
    "indices": "sparse keys",
}


def transformers_models(watcher: Watcher) -> list[Any]:
    """The outermost models of the transformers library in what is watched."""
    # Who has such a model has imported the library: there is no need to, to know that one has not.
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return []
    models = [m for m in watcher.names if isinstance(m, library.PreTrainedModel)]
    inner = {part for model in models for part in model.modules() if part is not model}
    return [model for model in models if model not in inner]


def check_reachable(model: Any) -> None:
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
    refuse_output_attentions(model, (), {"output_attentions": model.config.output_attentions})


def refuse_output_attentions(model: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
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
def rerouted(model: Any) -> Iterator[None]:
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

    watcher = next((w for w in reversed(active_watchers.get()) if module in w.names), None)
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
