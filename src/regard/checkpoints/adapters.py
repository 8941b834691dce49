"""Adapters: low-rank updates of the matrices of a base checkpoint, in the files of peft.

``adapter_model.safetensors`` holds two matrices for each updated module of the Hugging Face model:
``base_model.model.MODULE.lora_A.weight`` [rank, inputs] and ``lora_B.weight`` [outputs, rank]. The
module's weight becomes ``W + alpha / rank * B @ A`` (https://arxiv.org/abs/2106.09685).
``adapter_config.json`` names the base. https://huggingface.co/docs/peft/developer_guides/checkpoint
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.checkpoints.bases import ADAPTER
from regard.checkpoints.files import json_bytes, replace_file
from regard.checkpoints.keymap import KeyMap, Step, Transpose
from regard.errors import CheckpointError

ADAPTER_WEIGHTS = "adapter_model.safetensors"
BASE_DIGEST = "base_digest"  # in the metadata of our adapters: Checkpoint.digest of the base
_PREFIX = "base_model.model."
# Settings of peft that change what the matrices mean. A value other than these is refused.
_PLAIN: dict[str, tuple[object, ...]] = {
    "peft_type": ("LORA",),
    "use_dora": (False, None),
    "alpha_pattern": ({}, None),
    "layer_replication": (None,),
    "lora_bias": (False, None),
    "target_parameters": ([], None),
    "trainable_token_indices": ([], {}, None),
    "alora_invocation_tokens": (None,),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", "eva"),  # others change the base
}


@dataclass(frozen=True, slots=True)
class Adapter:
    """The updates of an adapter, by the names of modules and tensors of the Hugging Face model."""

    folder: Path
    updates: dict[str, Tensor]  # scale * B @ A [outputs, inputs], by module
    whole: dict[str, Tensor] = field(default_factory=dict)  # replaced tensors, by name

    @classmethod
    def of(cls, folder: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Adapter:
        """Return the adapter of an adapter_config.json and its tensors."""
        place = folder / ADAPTER
        for name, values in _PLAIN.items():
            value = config.get(name, values[0])
            if not any(value == plain and type(value) is type(plain) for plain in values):
                raise CheckpointError(
                    f"{place} says {name} = {value!r}, which regard does not read. Merge the "
                    "adapter into its base with peft: merge_and_unload()."
                )
        alpha, rooted = config.get("lora_alpha"), bool(config.get("use_rslora"))
        if not isinstance(alpha, int | float):
            raise CheckpointError(f"{place}: lora_alpha = {alpha!r} is not a number.")
        updates, whole = {}, {}
        for key, tensor in tensors.items():
            name = key.removeprefix(_PREFIX)
            if name == key:
                raise CheckpointError(f"{folder / ADAPTER_WEIGHTS} holds {key}, not {_PREFIX}...")
            module, part, _ = name.rpartition(".lora_")
            if not part:
                whole[name] = tensor
            elif name == f"{module}.lora_A.weight":
                second = tensors.get(f"{_PREFIX}{module}.lora_B.weight")
                if second is None or tensor.dim() != 2 or second.dim() != 2 or (
                    second.shape[1] != len(tensor) or not len(tensor)
                ):  # fmt: skip
                    raise CheckpointError(
                        f"{folder / ADAPTER_WEIGHTS}: lora_A and lora_B of {module} do not fit."
                    )
                rank = len(tensor)
                scale = alpha / (math.sqrt(rank) if rooted else rank)
                updates[module] = scale * (second.float() @ tensor.float())
            elif (
                name != f"{module}.lora_B.weight"
                or f"{_PREFIX}{module}.lora_A.weight" not in tensors
            ):
                raise CheckpointError(
                    f"{folder / ADAPTER_WEIGHTS} holds {key}, which regard does not read."
                )
        return cls(folder, updates, whole)

    def fitted(self, keys: KeyMap) -> Adapter:
        """Return the adapter with the names of a key map. CheckpointError if it fits badly."""
        updates = {keys.spelled(f"{name}.weight"): part for name, part in self.updates.items()}
        whole = {keys.spelled(name): tensor for name, tensor in self.whole.items()}
        read = {key: step for step in keys.steps for key in step.reads}
        for name in [*updates, *whole]:
            if name not in read and not keys.drops(name):
                raise CheckpointError(
                    f"{self.folder} changes {name}, which this model does not hold as a tensor of "
                    "its own. It may be an adapter for another model."
                )
        return Adapter(self.folder, updates, whole)

    def add_to(self, state: Mapping[str, Tensor], steps: Iterable[Step]) -> None:
        """Add the updates of a fitted adapter to the tensors of a model, in place."""
        for step in steps:
            for number, key in enumerate(step.reads):
                if (update := self.updates.get(key)) is None:
                    continue
                weight = state[step.ours].chunk(len(step.reads))[number]
                if weight.shape != update.shape:
                    had = list(weight.t().shape if isinstance(step, Transpose) else weight.shape)
                    raise CheckpointError(
                        f"{self.folder} updates {key} as {list(update.shape)}, but its base has "
                        f"{had} there."
                    )
                weight.copy_(weight.float() + update.to(weight.device))


def module_suffix(module: str) -> str:
    """The name of a module in its block, by which peft finds it in every block.

    >>> module_suffix("bert.encoder.layer.11.attention.output.dense")
    'attention.output.dense'
    """
    return re.split(r"\.\d+\.", module)[-1]


def write_adapter(
    folder: Path,
    base: str,
    digest: str,
    pairs: Mapping[str, tuple[Tensor, Tensor]],
    settings: Mapping[str, Any],
) -> None:
    """Write the matrices A and B of modules as peft does. ``settings`` are keys of its config."""
    from safetensors.torch import save

    tensors = {
        f"{_PREFIX}{module}.lora_{letter}.weight": tensor.detach().cpu().contiguous()
        for module, pair in pairs.items()
        for letter, tensor in zip("AB", pair, strict=True)
    }
    config = {
        "peft_type": "LORA",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "bias": "none",
        "target_modules": sorted({module_suffix(module) for module in pairs}),
        **settings,
    }
    folder.mkdir(parents=True, exist_ok=True)
    data = save(tensors, {"format": "pt", BASE_DIGEST: digest})
    replace_file(folder / ADAPTER_WEIGHTS, data)
    replace_file(folder / ADAPTER, json_bytes(config))
