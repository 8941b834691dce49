"""Watch models of the transformers library through its registry of attention functions."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.interpret.watched import Watcher, active_watchers
from regard.mechanism.functional import attention
from regard.mechanism.masks import Causal

NAME = "regard"  # the name of our function in the attention registry of transformers
# Arguments that change attention weights in ways that regard.attention() does not support.
UNSUPPORTED = {
    "s_aux": "attention sinks",
    "head_mask": "a head mask",
    "block_indices": "sparse blocks",
    "indices": "sparse keys",
}


_lock = Lock()
# For each watched configuration, by its id: the configuration, the attention implementation to
# restore, and the number of watchers. Several threads may watch a model; the last one restores it.
_watched_configs: dict[int, tuple[Any, str | None, int]] = {}


def attach(watcher: Watcher, stack: ExitStack) -> bool:
    """Watch the models of transformers 4.57 or later that use its attention registry.

    Their attention is computed by regard, with the masks that transformers makes for SDPA.
    """
    # A module of the library cannot exist before the library is imported.
    library = sys.modules.get("transformers.modeling_utils")
    models: list[Any] = [
        m for m in watcher.names if library is not None and isinstance(m, library.PreTrainedModel)
    ]
    if not models:
        return False
    inner = {part for model in models for part in model.modules() if part is not model}
    outermost = [model for model in models if model not in inner]
    for model in models:
        if not model._can_set_attn_implementation():
            raise InputError(
                f"{type(model).__name__} cannot be watched: it computes attention in its own "
                "code, not through the attention registry of transformers. Where regard has "
                "this architecture, load it with regard.load(...) and watch that."
            )
    for model in outermost:
        recomputes = any(getattr(part, "gradient_checkpointing", False) for part in model.modules())
        if recomputes and model.training and torch.is_grad_enabled():
            raise InputError(
                f"{type(model).__name__} recomputes its layers in the backward pass (gradient "
                "checkpointing) and would record each call twice. Turn that off while watching."
            )
        _refuse_weights(model, None, {"output_attentions": model.config.output_attentions})

    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    for model in outermost:
        hook = model.register_forward_pre_hook(_refuse_weights, with_kwargs=True)
        stack.callback(hook.remove)
    stack.enter_context(_routed(_configs(outermost)))
    return True


def _refuse_weights(model: nn.Module, _: Any, kwargs: dict[str, Any]) -> None:
    """A forward pre-hook that refuses output_attentions, whose weights would silently be None."""
    if kwargs.get("output_attentions"):
        raise InputError(
            f"{type(model).__name__} cannot return output_attentions while it is watched. Leave it "
            "out, or set it to False in the config, and use See(weights=True)."
        )


@contextmanager
def _routed(configs: list[Any]) -> Iterator[None]:
    """Select regard's attention in the configurations until the block ends."""
    with _lock:
        for config in configs:
            before = config._attn_implementation_internal
            _, before, count = _watched_configs.get(id(config), (config, before, 0))
            _watched_configs[id(config)] = (config, before, count + 1)
            config._attn_implementation_internal = NAME
    try:
        yield
    finally:
        with _lock:
            for config in configs:
                _, before, count = _watched_configs.pop(id(config))
                if count > 1:
                    _watched_configs[id(config)] = (config, before, count - 1)
                else:
                    config._attn_implementation_internal = before


def _configs(models: list[Any]) -> list[Any]:
    """The configurations of the models and of their submodules, without duplicates."""
    configs: dict[int, Any] = {}
    waiting: list[Any] = [
        part.config for model in models for part in model.modules() if hasattr(part, "config")
    ]
    while waiting:
        config = waiting.pop()
        if config is None or id(config) in configs or not hasattr(config, "sub_configs"):
            continue
        configs[id(config)] = config
        waiting += [getattr(config, name, None) for name in config.sub_configs]
    return list(configs.values())


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
    """The attention function for the registry of transformers.

    It returns the output [batch, queries, heads, dim], and None for the weights.
    """
    for name, meaning in UNSUPPORTED.items():
        if others.get(name) is not None:
            raise InputError(f"{type(module).__name__} uses {meaning}, which cannot be watched.")
    unscaled = getattr(module, "scale_attn_weights", True) is False
    by_layer = getattr(module, "scale_attn_by_inverse_layer_idx", False)
    if scaling is None and (unscaled or by_layer):  # transformers before 5 does not pass the scale
        raise InputError(
            f"{type(module).__name__} sets its scale, but this version of transformers does not "
            "pass it to attention. Update transformers to 5, or load the model with regard.load."
        )
    queries, keys = query.shape[2], key.shape[2]
    mask, bias = _mask_and_bias(attention_mask, position_bias, keys)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    described: Causal | Tensor | None = mask
    if mask is None and causal and queries > 1:
        # Without a mask, query i is aligned with key i. Later keys are unfilled cache entries.
        key, value = key[:, :, :queries], value[:, :, :queries]
        bias = None if bias is None else bias[..., :queries]
        described = Causal()

    watcher = next((w for w in reversed(active_watchers.get()) if module in w.names), None)
    if watcher is None:  # the model runs in another thread than the one that entered watch()
        output = attention(
            query, key, value, mask=described, bias=bias, scale=scaling, softcap=softcap,
            dropout=dropout,
        )  # fmt: skip
    else:
        if (
            watcher.see.distance
            and causal
            and keys > queries
            and mask is not None
            and not mask[..., -1, -1].any()
        ):
            raise InputError(
                f"{type(module).__name__} runs with a static cache, whose last keys are not yet "
                "filled, so distances are unknown. Use the default cache, or leave out distance."
            )
        output, seen = attention(
            query, key, value, mask=described, bias=bias, scale=scaling, softcap=softcap,
            dropout=dropout, see=watcher.see,
        )  # fmt: skip
        watcher.record(module, seen)
    return output.transpose(1, 2).contiguous(), None


def _mask_and_bias(
    mask: Tensor | None, bias: Tensor | None, keys: int
) -> tuple[Tensor | None, Tensor | None]:
    """A mask of transformers as a boolean mask of allowed pairs, and a bias on the scores."""
    if mask is None:
        return None, bias
    mask = mask[..., :keys]
    if not mask.is_floating_point():
        return mask, bias
    # An additive mask holds the lowest number of its dtype, perhaps plus a bias, where it forbids.
    allowed = mask > torch.finfo(mask.dtype).min / 2
    rest = mask.masked_fill(~allowed, 0)
    if rest.any():
        bias = rest if bias is None else bias + rest
    return allowed, bias
