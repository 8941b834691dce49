"""Tiny random models of any model type of transformers, with inputs, built by general rules.

A configuration of transformers is a dataclass, so its sizes can be replaced by name. ``build``
tries small sizes, then fewer layers alone, and several inputs, until a model runs.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

MOST_PARAMETERS = 40_000_000
VOCABULARY = 128
FIRST_WORD = 64  # ids below may have a meaning of their own
WIDTH, HEADS, HEAD_WIDTH, LENGTH = 32, 4, 8, 9

# The size for each field whose name matches; the first match counts. None leaves the default.
SIZES: tuple[tuple[str, int | None], ...] = (
    (r"max_source_positions", 32),
    (r"num_queries", 8),
    (r"type_vocab|^max_|window|kernel|chunk|stride|buckets|positions|bins", None),
    (r"_every|period|offset", None),
    (r"^(vocab_size|.*_vocab_size|vocab_size_.*|n_words|visual_vocab.*)$", VOCABULARY),
    (r"key_value_heads|kv_heads|num_query_groups|multi_query_group_num", 2),
    (r"head_dim|^d_kv$|^d_head$|kv_channels|attention_head_size|dim_head|head_width", HEAD_WIDTH),
    (r"heads$|^n_head$|head_count|n_heads", HEADS),
    (r"lora_rank|_rank$", 16),
    (r"experts_per_tok|^moe_k$|top_?k_experts|moe_topk|^num_experts_per_token$", 2),
    (r"n_group$|topk_group|shared_experts", 1),
    (r"experts$|num_experts|expert_num", 4),
    (r"moe.*(intermediate|ffn)|expert.*(intermediate|ffn)", 16),
    (r"intermediate|ffn|^d_ff$|^dff$|d_inner|mlp_(dim|hidden)", 64),
    (r"feed_?forward|linear_units|ff_dim", 64),
    (r"layers$|^n_layer$|^depth$|num_blocks$|^num_hidden_groups$", 2),
    (r"image_size|^resolution$|img_size", 64),
    (r"patch_size", 16),
    (
        r"hidden_size|hidden_dim|embed_dim|embedding_dim|d_model|n_embd|projection_dim|^dim$"
        r"|emb_dim|embedding_size|embed_size|hidden_channels|proj_dim|_units$|^width$|_width$"
        r"|embed_dims|projection_size|_embd|conv_dim|d_embed|output_dim|input_dim|feature_size"
        r"|_channels$|proj_size|out_dim|in_dim|embedding_width|d_latents|rnn_.*dim",
        WIDTH,
    ),
)  # fmt: skip
SPECIAL = re.compile(r"(token_id|token_index|_token_idx|_id|_index)$")
NOT_SPECIAL = re.compile(r"ignore_index|merge_index|lang_id")

# Model types whose sizes depend on each other in ways that the rules do not know.
_SECTIONS = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
_HALF_SECTIONS = _SECTIONS | {"mrope_section": [1, 1, 0], "partial_rotary_factor": 0.5}
_BY_HAND: tuple[tuple[str, dict[str, Any]], ...] = (
    # the sections of rotary positions fill half of a head
    ("qwen2_vl_text qwen2_5_vl_text cosmos3_edge_text", {"rope_parameters": _SECTIONS}),
    ("glm4v_text glm_image_text glm_ocr_text glmga_text", {"rope_parameters": _SECTIONS}),
    ("paddleocr_vl_text", {"rope_parameters": _SECTIONS}),
    ("glm4v_moe_text", {"rope_parameters": _HALF_SECTIONS}),
    # sizes without a default
    ("hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text ministral", {"head_dim": 8}),
    ("nemotron", {"head_dim": 8, "num_key_value_heads": 2}),
    ("autoformer informer time_series_transformer", {"prediction_length": 6}),
    ("deepseek_v2", {"num_experts_per_tok": 2}),
    ("dots1", {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}),
    ("esm", {"vocab_size": VOCABULARY, "mask_token_id": 3, "pad_token_id": 0}),
    ("xmod", {"default_language": "en_XX"}),
    # the channels that the decoder takes are those of the encoder
    ("rt_detr rt_detr_v2 d_fine deimv2", {"decoder_in_channels": [32, 32, 32]}),
    ("blip-2 instructblip", {"image_token_index": 3}),
    ("moonshine", {"encoder_num_key_value_heads": 4, "decoder_num_key_value_heads": 4}),
    ("nemotron_h", {"n_groups": 1}),
    ("falcon_h1", {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16}),
    # little sound
    ("vits", {"upsample_initial_channel": 32, "speaking_rate": 1000.0}),
    # layers of every kind, in few layers
    ("bamba", {"attn_layer_indices": [1]}),
    ("gemma3n_text", {"num_kv_shared_layers": 0}),
    ("gpt_neo", {"attention_types": [[["global", "local"], 1]]}),
    ("granitemoehybrid", {"layer_types": ["linear_attention", "full_attention"]}),
    ("jamba", {"attn_layer_period": 2, "attn_layer_offset": 1}),
    ("lfm2_moe", {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1}),
    ("recurrent_gemma", {"num_hidden_layers": 3}),
    ("zamba2", {"layers_block_type": ["mamba", "hybrid"]}),
)
# In place of a backbone of timm, which is another package.
BACKBONE = {
    "model_type": "resnet", "embedding_size": 16, "hidden_sizes": [16, 32, 64, 128],
    "depths": [1, 1, 1, 1], "layer_type": "basic",
}  # fmt: skip
OWN_SIZES = {name: sizes for names, sizes in _BY_HAND for name in names.split()}


def model_types() -> list[str]:
    """Every model type that has a model of its own."""
    return sorted(modeling_auto.MODEL_MAPPING_NAMES)


def model_class(model_type: str) -> type[nn.Module]:
    found: Any = modeling_auto.MODEL_MAPPING[CONFIG_MAPPING[model_type]]
    return found[0] if isinstance(found, tuple | list) else found


# Configurations ----------------------------------------------------------------------------------


def _size(name: str, default: int) -> int | None:
    for pattern, size in SIZES:
        if re.search(pattern, name):
            return size if size is None else min(size, default)
    return None


def _smaller(name: str, default: Any, shape: bool) -> Any:
    """A small value for a field, or None if the default stays."""
    if isinstance(default, bool) or default is None:
        return None
    if isinstance(default, int):
        size = _size(name, default)
        if size in (WIDTH, HEADS, HEAD_WIDTH, 16, 64) and not shape and size != VOCABULARY:
            return None if not re.search("image_size|patch_size", name) else size
        return size
    if isinstance(default, tuple | list) and default and all(type(d) is int for d in default):
        if re.search(r"depths|num_blocks|layers$|block_sizes", name):
            return type(default)(min(d, 2) for d in default)
        if re.search(r"image_size|img_size", name):
            return type(default)(64 for _ in default)
    return None


def _fields(config: PreTrainedConfig) -> Iterator[tuple[str, Any]]:
    for field in dataclasses.fields(config):
        if not field.name.startswith("_"):
            # Some settings differ between layers, and cannot be read as attributes.
            yield field.name, vars(config).get(field.name)


def _kinds(config: PreTrainedConfig) -> list[str] | None:
    """Every kind of layer once, and at least two layers."""
    kinds = dict(_fields(config)).get("layer_types")
    if not kinds:
        return None
    once = list(dict.fromkeys(kinds))
    return once if len(once) > 1 else once * 2


def tiny_settings(
    config: PreTrainedConfig, shape: bool = True, ids: Iterator[int] | None = None
) -> dict[str, Any]:
    """Settings that make ``config`` small. Without ``shape``, only depth and vocabulary change."""
    ids = iter(range(3, FIRST_WORD)) if ids is None else ids
    settings: dict[str, Any] = {}
    words = "vocab_size" in dict(_fields(config)) or bool(config.sub_configs)
    for name, default in _fields(config):
        if name in config.sub_configs:
            if getattr(default, "model_type", "") == "timm_backbone":
                settings[name] = BACKBONE | {"out_indices": _stages(default)}
                settings |= {"use_timm_backbone": False, "backbone": None}
            elif isinstance(default, PreTrainedConfig):
                inner = _chosen(default) | tiny_settings(default, shape, ids)
                if hasattr(default, "model_type"):
                    inner["model_type"] = default.model_type
                settings[name] = inner
        elif name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if default is not None and words:
                settings[name] = {"p": 0, "b": 1, "e": 2}[name[0]]
        elif SPECIAL.search(name) and not NOT_SPECIAL.search(name) and isinstance(default, int):
            if default >= FIRST_WORD:
                settings[name] = next(ids)
        elif (small := _smaller(name, default, shape)) is not None:
            settings[name] = small
    kinds = _kinds(config)
    if kinds is not None:
        settings["layer_types"] = kinds
        count = "num_hidden_layers"
        settings[config.attribute_map.get(count, count)] = len(kinds)
    settings |= _related(config, settings)
    for window in ("sliding_window", "attention_chunk_size"):
        if isinstance(getattr(config, window, None), int) and window in dict(_fields(config)):
            settings[window] = 4
    return settings | OWN_SIZES.get(config.model_type, {})


def _stages(backbone: PreTrainedConfig) -> list[int]:
    indices = getattr(backbone, "out_indices", None) or [-1]
    return [index % 5 for index in indices]


def _chosen(config: PreTrainedConfig) -> dict[str, Any]:
    """The settings of a part that the whole does not leave at their defaults."""
    usual = dict(_fields(type(config)()))
    chosen = {n: v for n, v in _fields(config) if v is not None and v != usual[n]}
    indices = getattr(config, "out_indices", None)
    if indices and getattr(config, "depths", None) and max(indices) <= len(config.depths):
        chosen["out_indices"] = list(indices)
    return {n: v for n, v in chosen.items() if n not in config.sub_configs and n != "layer_types"}


def _related(config: PreTrainedConfig, settings: dict[str, Any]) -> dict[str, Any]:
    """Sizes that follow from other sizes."""
    fields, more = dict(_fields(config)), {}
    heads = "num_key_value_heads"
    if heads in settings and fields.get("num_attention_heads") == fields[heads]:
        more[heads] = settings.get("num_attention_heads", fields[heads])
    width = fields.get("embed_dim")
    if "embed_dim" in settings and isinstance(fields.get("num_heads"), tuple | list):
        more["embed_dim"] = 8 * fields["num_heads"][0] if isinstance(width, int) else width
    if "rotary_dim" in fields and "n_head" in settings:
        more["rotary_dim"] = 4
    if isinstance(fields.get("window_size"), int):
        more["window_size"] = min(2, fields["window_size"])
    return more


# Models ------------------------------------------------------------------------------------------


def disturbed(model: nn.Module) -> nn.Module:
    """The model with every parameter changed, so that no bias is 0 and no norm is 1."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.is_floating_point():
                inputs = max(parameter.shape[1:].numel(), 1)
                noise = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * min(0.2, 1 / math.sqrt(inputs)))
    return model.eval()


def make(model_type: str, kind: Any = None, **changes: Any) -> Any:
    """A tiny random model with sizes by the rules; ``kind`` is a class such as an auto class."""
    return _make(model_type, True, kind, **changes)


def _make(model_type: str, shape: bool, auto: Any = None, **changes: Any) -> Any:
    config_class = CONFIG_MAPPING[model_type]
    config = config_class(**tiny_settings(config_class(), shape) | changes)
    kind: Any = model_class(model_type) if auto is None else auto.from_config
    with torch.device("meta"):
        parameters = sum(p.numel() for p in kind(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters are too many")
    torch.manual_seed(0)
    return disturbed(kind(config).float())


def build(model_type: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A tiny model and inputs with which it runs."""
    reasons = []
    for shape in (True, False):
        try:
            model = _make(model_type, shape)
        except Exception as error:  # noqa: BLE001  any reason not to be built is reported
            reasons.append(f"{'tiny' if shape else 'full width'}: {_line(error)}")
            continue
        for inputs in possible_inputs(model):
            try:
                with torch.no_grad():
                    model(**inputs)
            except Exception as error:  # noqa: BLE001
                reasons.append(f"{'tiny' if shape else 'full width'}, run: {_line(error)}")
                continue
            return model, inputs
    raise ValueError("; ".join(dict.fromkeys(reasons)))


def _line(error: Exception) -> str:
    text = re.sub(r" from '/[^']*'", "", " ".join(str(error).split()))  # files of this machine
    return f"{type(error).__name__}: {text[:200]}"


# Inputs ------------------------------------------------------------------------------------------


def possible_inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    """Inputs for ``model``, the most complete first."""
    yield from _inputs(model)


def _first(config: Any, *names: str) -> Any:
    """The first setting of these names in the configuration or its parts."""
    parts = [config, *(getattr(config, name, None) for name in config.sub_configs)]
    for part in parts:
        for name in names:
            value = getattr(part, name, None)
            if value is not None:
                return value
    return None


def _pixels(config: Any, batch: int, video: bool = False) -> Tensor:
    size = _first(config, "image_size", "img_size") or 64
    height, width = size if isinstance(size, tuple | list) else (size, size)
    channels = _first(config, "num_channels", "in_channels", "in_chans")
    channels = channels if isinstance(channels, int) else 3
    frames = (_first(config, "num_frames") or 4,) if video else ()
    return _noise(batch, *frames, channels, height, width)


def _noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _words(config: Any, batch: int, length: int) -> Tensor:
    try:
        text = config.get_text_config()
    except ValueError:
        text = config
    vocabulary = _first(text, "vocab_size") or _first(config, "vocab_size") or VOCABULARY
    low = min(FIRST_WORD, vocabulary // 2)
    generator = torch.Generator().manual_seed(2)
    return torch.randint(low, vocabulary, (batch, length), generator=generator)


def _inputs(model: Any) -> Iterator[dict[str, Tensor]]:
    config = model.config
    signature = inspect.signature(model.forward).parameters
    takes = {n for n, p in signature.items() if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    required = {n for n in takes if signature[n].default is inspect.Parameter.empty}
    main, times = model.main_input_name, getattr(config, "num_time_features", 0)
    makers: dict[str, Callable[[], Tensor]] = {
        "input_ids": lambda: _words(config, 2, LENGTH),
        "pixel_values": lambda: _pixels(config, 2),
        "inputs": lambda: _noise(2, LENGTH, config.d_model),
        "visual_feats": lambda: _noise(2, 5, config.visual_feat_dim),
        "visual_pos": lambda: _noise(2, 5, 4),
        "spatial_shapes": lambda: torch.tensor([[4, 4]] * 2),
        "pixel_attention_mask": lambda: torch.ones(2, 16),
        "actions": lambda: _noise(2, LENGTH, config.act_dim),
        "states": lambda: _noise(2, LENGTH, config.state_dim),
        "rewards": lambda: _noise(2, LENGTH, 1),
        "returns_to_go": lambda: _noise(2, LENGTH, 1),
        "timesteps": lambda: torch.arange(LENGTH).expand(2, LENGTH),
        "pixel_values_videos": lambda: _pixels(config, 2, video=True),
        "input_values": lambda: _noise(2, 4000),
        "input_features": lambda: _features(config, model),
        "decoder_input_ids": lambda: _words(config, 2, 5),
        "bbox": lambda: torch.tensor([10, 20, 30, 40]).expand(2, LENGTH, 4).contiguous(),
        "query_embeds": lambda: _noise(2, LENGTH, config.hidden_size),
        "qformer_input_ids": lambda: torch.full((2, LENGTH), 5),
        "past_values": lambda: _noise(2, *_series(config)),
        "past_observed_mask": lambda: torch.ones(2, *_series(config)),
        "past_time_features": lambda: _noise(2, _series(config)[0], times),
        "future_time_features": lambda: _noise(2, config.prediction_length, times),
        "future_values": lambda: _noise(2, config.prediction_length),
        "hidden_states": lambda: _noise(1 * 4 * 8, _patch_width(config)),
        "grid_thw": lambda: torch.tensor([[1, 4, 8]]),
        "merge_sizes": lambda: torch.tensor([2]),
        "input_features_mask": lambda: torch.ones(_features(config, model).shape[::2]),
    }  # fmt: skip
    wanted = {main, *required} & makers.keys()
    wanted |= {"bbox", "visual_feats", "visual_pos"} & takes
    if "spatial_shapes" in takes:  # images of any shape come as rows of patches
        wanted |= {"pixel_values", "pixel_attention_mask", "spatial_shapes"} & takes
        makers["pixel_values"] = lambda: _noise(2, 16, 3 * 16 * 16)
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in takes:
        wanted.add("decoder_input_ids")
    if "past_values" in wanted:
        wanted |= {"future_values", "future_time_features"} & takes
    if "states" in takes:  # a decision transformer
        wanted |= makers.keys() & takes
    missing = required - makers.keys()
    if missing:
        raise NotImplementedError(f"no rule makes {', '.join(sorted(missing))}")
    inputs = {name: makers[name]() for name in sorted(wanted)}
    image = _first(config, "image_token_id", "image_token_index")
    if "input_ids" in inputs and "pixel_values" in takes and isinstance(image, int):
        with_image = _with_image(model, inputs, image)
        if with_image is not None:
            yield with_image
    if "input_ids" in inputs and "pixel_values" in takes and "pixel_values" not in inputs:
        yield inputs | {"pixel_values": makers["pixel_values"]()}
    if "input_ids" in takes and "input_ids" not in inputs:
        more = {"input_ids", "qformer_input_ids"} & takes
        yield inputs | {name: makers[name]() for name in more}
    if "input_values" in inputs:
        yield inputs
        yield inputs | {"input_values": _noise(2, 1, 4000)}
        length, bins = (_first(config, n) for n in ("max_length", "num_mel_bins"))
        if length and bins:
            yield inputs | {"input_values": _noise(2, length, bins)}
        return
    if "input_features" in inputs:
        yield inputs
        yield inputs | {"input_features": inputs["input_features"].transpose(1, 2).contiguous()}
        return
    yield inputs
    if "pixel_values" in inputs:
        yield inputs | {"pixel_values": _pixels(config, 2, video=True)}


def _with_image(model: Any, inputs: dict[str, Tensor], image: int) -> dict[str, Tensor] | None:
    """The inputs with one image a row, which takes as many places as it has features."""
    if not hasattr(model, "get_image_features"):
        return None
    config, ids = model.config, inputs["input_ids"]
    more: dict[str, Tensor] = {}
    if "image_grid_thw" in inspect.signature(model.forward).parameters:
        vision = config.vision_config
        more["pixel_values"] = _noise(2 * 32, _patch_width(vision))
        more["image_grid_thw"] = torch.tensor([[1, 4, 8]] * 2)
        count = 32 // _first(vision, "spatial_merge_size", "merge_size") ** 2
    else:
        more["pixel_values"] = _pixels(config, 2)
        try:
            with torch.no_grad():
                found = model.get_image_features(pixel_values=more["pixel_values"])
        except Exception:  # noqa: BLE001  the model runs on text alone
            return None
        features = getattr(found, "pooler_output", found)
        rows = features if isinstance(features, tuple | list) else [features]
        count = sum(row.shape[:-1].numel() for row in rows) // 2
    places = torch.full((2, count), image)
    ids = torch.cat([ids[:, :2], places, ids[:, 2:]], 1)
    if "mm_token_type_ids" in inspect.signature(model.forward).parameters:
        more["mm_token_type_ids"] = (ids == image).int()
    return inputs | more | {"input_ids": ids}


def _patch_width(config: Any) -> int:
    channels = _first(config, "in_channels", "in_chans", "num_channels") or 3
    return int(channels * (_first(config, "temporal_patch_size") or 1) * config.patch_size**2)


def _series(config: Any) -> tuple[int, ...]:
    length = getattr(config, "context_length", 32)
    lags = max(getattr(config, "lags_sequence", None) or [0])
    channels = _first(config, "num_input_channels")
    return (length + lags, channels) if channels else (length + lags,)


def _features(config: Any, model: Any) -> Tensor:
    bins = _first(config, "num_mel_bins", "input_feat_per_channel", "n_mel_bins")
    bins = bins or _first(config, "feature_projection_input_dim", "input_dim", "input_size") or 80
    frames = 2 * (_first(config, "max_source_positions") or 32)
    return _noise(2, bins, frames)
