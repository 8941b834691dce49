"""``attn_implementation="regard"`` computes what transformers' own implementations compute."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from transformers import masking_utils

from helpers.random_models import FIVE, disturb
from helpers.tiny_models import build
from regard import Causal, InputError, Padding, See, Segments, Window
from regard.interpret.adapters import attention_implementation, transformers_import
from regard.interpret.adapters.attention_implementation import DescribedMask, attend, describe
from regard.interpret.watched import Watched, Watcher, active_watchers
from regard.mechanism.masks import Dense, Mask, Prefix

pytestmark = pytest.mark.skipif(not FIVE, reason="transformers before 5 passes other arguments")

IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "intermediate_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None,
}  # fmt: skip
SHARED = SMALL | {"num_key_value_heads": 2, "head_dim": 8}
HYBRID = SHARED | {
    "sliding_window": 4, "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "LlamaForCausalLM": ("LlamaConfig", SHARED),
    "Qwen3ForCausalLM": ("Qwen3Config", SHARED),
    "MistralForCausalLM": ("MistralConfig", SHARED | {"sliding_window": 4}),
    "Gemma2ForCausalLM": ("Gemma2Config", HYBRID | {"attn_logit_softcapping": 2.0}),
    "Gemma3ForCausalLM": ("Gemma3TextConfig", HYBRID),
    "GptOssForCausalLM": (
        "GptOssConfig", HYBRID | {"num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "Llama4ForCausalLM": (
        "Llama4TextConfig",
        SHARED | {"attention_chunk_size": 4, "num_local_experts": 2, "intermediate_size_mlp": 48,
                  "layer_types": ["chunked_attention", "full_attention"]},
    ),
    "GPTNeoXForCausalLM": ("GPTNeoXConfig", SMALL),
    "GPT2LMHeadModel": (
        "GPT2Config",
        {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32,
         "bos_token_id": 1, "eos_token_id": None, "pad_token_id": 0},
    ),
    "BertModel": ("BertConfig", SMALL),
    "ModernBertModel": (
        "ModernBertConfig", SMALL | {"local_attention": 4, "global_attn_every_n_layers": 2},
    ),
    "T5ForConditionalGeneration": (
        "T5Config",
        {"vocab_size": 50, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4,
         "decoder_start_token_id": 0, "eos_token_id": None},
    ),
    "BartForConditionalGeneration": (
        "BartConfig",
        {"vocab_size": 50, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2,
         "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48,
         "decoder_ffn_dim": 48, "max_position_embeddings": 32, "pad_token_id": 0,
         "eos_token_id": None, "forced_eos_token_id": None, "decoder_start_token_id": 1},
    ),
}  # fmt: skip
DECODERS = [name for name in CONFIGS if name.endswith(("CausalLM", "HeadModel"))]


def made(name: str) -> Any:
    """A tiny random model with eager attention."""
    torch.manual_seed(0)
    config, sizes = CONFIGS[name]
    model = getattr(transformers, name)._from_config(
        getattr(transformers, config)(**sizes), attn_implementation="eager"
    )
    return disturb(model)


def padding(side: str) -> Tensor:
    mask = torch.ones_like(IDS)
    hidden = {"left": slice(0, 3), "right": slice(6, None), "inside": slice(3, 5), "": slice(0)}
    mask[1, hidden[side]] = 0
    return mask


def inputs_of(model: Any, **inputs: Any) -> dict[str, Any]:
    if model.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = IDS.flip(0)[:, :5]
    return {"input_ids": IDS, **inputs}


def outputs(model: Any, implementation: str, real: Tensor, inputs: Any) -> list[Tensor]:
    """The output at ``real`` positions, and the gradients of all parameters."""
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation == implementation
    output = model(**inputs)[0]
    if output.shape[1] == real.shape[1]:
        output = output[real]
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    gradients = torch.autograd.grad(output.sin().sum(), learned, allow_unused=True)
    return [output.detach(), *(gradient for gradient in gradients if gradient is not None)]


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_and_gradients_are_those_of_eager_attention(name: str) -> None:
    model = made(name)
    for side in ("", "left", "right", "inside"):
        mask = padding(side)
        inputs = inputs_of(model, attention_mask=mask if side else None)
        expected, actual = (
            outputs(model, implementation, mask.bool(), inputs)
            for implementation in ("eager", "regard")
        )
        for one, other in zip(actual, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)


def test_whisper() -> None:
    torch.manual_seed(0)
    config = transformers.WhisperConfig(
        vocab_size=50, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=10, max_target_positions=16, pad_token_id=0, eos_token_id=2,
        decoder_start_token_id=1,
    )  # fmt: skip
    model: Any = disturb(transformers.WhisperForConditionalGeneration(config))
    inputs = {"input_features": torch.randn(2, 8, 20), "decoder_input_ids": IDS[:, :6]}
    expected, actual = (
        outputs(model, implementation, torch.ones(2, 6, dtype=torch.bool), inputs)
        for implementation in ("sdpa", "regard")
    )
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bigbird_pegasus", "deepseek_v4", "git", "nllb-moe", "informer"])
def test_models_that_do_not_support_sdpa_get_masks_to_add(kind: str) -> None:
    """Some of them concatenate masks, have layers of their own, or mean no mask by None."""
    model, inputs = build(kind)
    found = []
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)  # type: ignore[operator]
        torch.manual_seed(0)
        with torch.no_grad():
            found.append(model(**inputs)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM", "BertModel"])
def test_padded_queries_too_are_those_of_sdpa(name: str) -> None:
    model = made(name)
    everything = torch.ones_like(IDS, dtype=torch.bool)
    inputs = inputs_of(model, attention_mask=padding("left"))
    expected, actual = (
        outputs(model, implementation, everything, inputs) for implementation in ("sdpa", "regard")
    )
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "dynamic") for name in DECODERS),
        # transformers 5.17 fails to make Llama4's masks for a static cache.
        *((name, "static") for name in DECODERS if name != "Llama4ForCausalLM"),
    ],
)
def test_generation(name: str, kind: str) -> None:
    model = made(name)
    for side in ("", "left"):
        found = []
        for implementation in ("eager", "regard"):
            model.set_attn_implementation(implementation)
            found.append(
                model.generate(
                    IDS, attention_mask=padding(side), max_new_tokens=7, do_sample=False,
                    cache_implementation=kind, output_logits=True, return_dict_in_generate=True,
                )
            )  # fmt: skip
        expected, actual = found
        assert actual.sequences.tolist() == expected.sequences.tolist()
        for one, other in zip(actual.logits, expected.logits, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def test_beams_of_an_encoder_and_a_decoder() -> None:
    model = made("BartForConditionalGeneration")
    found = []
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)
        found.append(
            model.generate(IDS, attention_mask=padding("right"), num_beams=3, max_new_tokens=6)
        )
    assert found[0].tolist() == found[1].tolist()


def test_several_tokens_after_a_cache() -> None:
    model = made("Gemma3ForCausalLM")
    found = []
    for implementation in ("eager", "regard"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            cache = model(IDS[:, :5], use_cache=True).past_key_values
            found.append(model(IDS[:, 5:], past_key_values=cache).logits)
    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_packed_sequences_do_not_see_each_other(name: str) -> None:
    model = made(name)
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 0, 1, 2, 3]])
    inputs = {"input_ids": IDS, "position_ids": positions, "use_cache": False}
    everything = torch.ones_like(IDS, dtype=torch.bool)
    expected, actual = (
        outputs(model, implementation, everything, inputs) for implementation in ("eager", "regard")
    )
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=2e-4)
    with torch.no_grad():
        alone = model(IDS[:1, 3:], use_cache=False).logits
    torch.testing.assert_close(actual[0].reshape(2, 9, -1)[:1, 3:], alone, rtol=1e-4, atol=1e-4)


def test_half_precision_and_autocast() -> None:
    model = made("LlamaForCausalLM")
    with torch.no_grad():
        expected = model(IDS).logits
        model.set_attn_implementation("regard")
        with torch.autocast("cpu", torch.bfloat16):
            torch.testing.assert_close(model(IDS).logits.float(), expected, rtol=0.1, atol=0.1)
        actual = model.to(torch.bfloat16)(IDS).logits
    assert actual.dtype == torch.bfloat16
    torch.testing.assert_close(actual.float(), expected, rtol=0.1, atol=0.1)


def test_training_with_dropout_and_gradient_checkpointing() -> None:
    model = made("GPT2LMHeadModel")
    model.set_attn_implementation("regard")
    inputs = {"input_ids": IDS, "attention_mask": padding("right"), "labels": IDS}
    gradients = []
    for recomputes in (False, True):
        model.train()
        if recomputes:
            # transformers 5.23 has renamed the method.
            old = model.gradient_checkpointing_enable
            getattr(model, "activation_checkpointing_enable", old)()
        torch.manual_seed(0)
        model.zero_grad()
        model(**inputs).loss.backward()
        gradients.append(model.transformer.h[0].attn.c_attn.weight.grad)
    torch.testing.assert_close(*gradients)
    assert gradients[0].any()


# Compilation -----------------------------------------------------------------------------------


class Graphs:
    """A backend of torch.compile that counts the graphs and runs them as they are."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Any:
        self.count += 1
        return graph.forward


def compiled_forward(model: Any) -> Graphs:
    torch.compiler.reset()
    graphs = Graphs()
    model.forward = torch.compile(model.forward, fullgraph=True, backend=graphs)
    return graphs


@pytest.mark.slow
def test_a_compiled_model_is_one_graph() -> None:
    model, other = made("Gemma3ForCausalLM"), made("Gemma3ForCausalLM")
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 4, 0, 1, 2, 3]])
    model.set_attn_implementation("regard")
    graphs = compiled_forward(model)
    everything = torch.ones_like(IDS)
    for number, more in enumerate(
        ({"use_cache": False}, {"attention_mask": padding("left"), "use_cache": False},
         {"position_ids": positions, "use_cache": False})
    ):  # fmt: skip
        real = more.get("attention_mask", everything).bool()
        found = []
        for run in (model, other):
            run.zero_grad()
            found.append(run(IDS, **more).logits[real])
            found[-1].sin().sum().backward()
            found.append(run.model.layers[0].self_attn.q_proj.weight.grad)
        for one, expected in zip(found[:2], found[2:], strict=True):
            torch.testing.assert_close(one, expected, rtol=1e-3, atol=2e-4)
        assert graphs.count == number + 1


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM"])
def test_steps_of_a_static_cache_compile_once(name: str) -> None:
    model = made(name)
    model.set_attn_implementation("regard")
    options: dict[str, Any] = {"max_new_tokens": 9, "do_sample": False}
    options["cache_implementation"] = "static"
    sides = [padding("left"), padding("left").flip(0)]
    expected = [model.generate(IDS, attention_mask=mask, **options).tolist() for mask in sides]
    graphs = compiled_forward(model)
    assert model.generate(IDS, attention_mask=sides[0], **options).tolist() == expected[0]
    assert graphs.count <= 4  # two for the prompt and a step, again for another shape
    before = graphs.count
    assert model.generate(IDS, attention_mask=sides[1], **options).tolist() == expected[1]
    assert graphs.count <= before + 1  # a prompt with other padding


# Continuous batching ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["LlamaForCausalLM", "MistralForCausalLM", "GptOssForCausalLM"])
def test_continuous_batching(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.generation import ContinuousBatchingConfig
    from transformers.generation.continuous_batching import cache

    # transformers reads the free memory of a CPU through psutil, which is not installed.
    free = torch.device("cpu"), 2**33, 2**20, 2**20
    monkeypatch.setattr(cache, "get_device_and_memory_breakdown", lambda: free)
    model = made(name)
    model.set_attn_implementation("regard")
    prompts = [IDS[0].tolist(), [7, 8], IDS[1, :5].tolist()]
    settings = transformers.GenerationConfig(
        max_new_tokens=6, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    try:
        found = model.generate_batch(
            prompts, generation_config=settings, progress_bar=False,
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=16, block_size=8, max_batch_tokens=32
            ),
        )  # fmt: skip
    except ValueError as error:
        if "not supported for continuous batching" not in str(error):
            raise
        pytest.skip(f"NOT TESTED: transformers {transformers.__version__} refuses it: {error}")
    assert model.config._attn_implementation == "regard"
    for prompt, answer in zip(prompts, found.values(), strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )
        assert answer.generated_tokens == expected[0, len(prompt) :].tolist()


# Masks -----------------------------------------------------------------------------------------


def described(**arguments: Any) -> Any:
    sizes = {"batch_size": 2, "q_length": 9, "kv_length": 9}
    return describe(**sizes | arguments)


FIRST = torch.tensor([0, 3])
HOLES = padding("inside").bool()
SEQUENCES = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 0, 0, 0, 0, 1, 1, 1, 1]])
IMAGE = torch.tensor([[0, 0, 0, -1, -1, -1, -1, -1, -1], [0, 0, 0, 0, -1, -1, -1, -1, -1]])
m = masking_utils
MASKS: list[tuple[dict[str, Any], Mask]] = [
    ({"attention_mask": padding("right").bool()}, Causal() & Padding([9, 6])),
    ({"attention_mask": padding("left").bool()}, Causal() & Padding([9, 6], "left")),
    (
        {"mask_function": m.sliding_window_causal_mask_function(4)}, Window(3)
    ),
    (
        {"mask_function": m.sliding_window_causal_mask_function(4),
         "attention_mask": padding("left").bool()},
        Window(3) & Padding([9, 6], "left"),
    ),
    ({"q_length": 3, "q_offset": 6}, Causal()),
    (
        {"q_length": 2, "q_offset": 20, "kv_offset": 15, "kv_length": 7,
         "mask_function": m.sliding_window_causal_mask_function(4)},
        Window(3),
    ),
    (
        {"mask_function": m.chunked_causal_mask_function(4, FIRST)},
        Segments([[4, 4, 1], [3, 4, 2]]) & Causal(),
    ),
    (
        {"mask_function": m.and_masks(
            m.causal_mask_function, m.packed_sequence_mask_function(SEQUENCES))},
        Causal() & Segments([[3, 6], [5, 4]]),
    ),
    (
        {"mask_function": m.bidirectional_mask_function, "attention_mask": padding("right").bool()},
        Padding([9, 6]),
    ),
    (
        {"mask_function": m.sliding_window_bidirectional_mask_function(2)}, Window(2, 2)
    ),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "mask"), MASKS)
def test_masks_of_transformers_are_described(arguments: dict[str, Any], mask: Mask) -> None:
    found = described(**arguments, allow_is_causal_skip=False)
    assert isinstance(found, DescribedMask)
    assert repr(found.mask) == repr(mask)
    sizes = {"batch_size": 2, "q_length": 9, "kv_length": 9} | arguments
    expected = m.sdpa_mask(**sizes, allow_is_causal_skip=False)
    assert found.shape == expected.shape
    assert torch.equal(found.dense(), expected)


@pytest.mark.parametrize(
    ("arguments", "kind"),
    [
        ({"attention_mask": HOLES}, Dense),  # one row of keys for each sequence
        ({"mask_function": m.or_masks(m.causal_mask_function, m.blockwise_overlay(IMAGE))}, Prefix),
    ],
)
def test_other_masks_are_equal(arguments: dict[str, Any], kind: type) -> None:
    found = described(**arguments, allow_is_causal_skip=False)
    masks = [found.mask, getattr(found.mask, "right", None)]
    assert any(isinstance(mask, kind) for mask in masks)
    expected = m.sdpa_mask(2, 9, 9, allow_is_causal_skip=False, **arguments)
    assert torch.equal(found.dense(), expected)


def test_an_unknown_mask_is_a_tensor() -> None:
    def odd(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query + key) % 2 == 0

    found = described(
        mask_function=m.and_masks(odd, m.causal_mask_function), allow_is_causal_skip=False
    )
    assert type(found) is Tensor
    assert found[0, 0, 3].tolist() == [False, True, False, True, *[False] * 5]
    blocks = IMAGE.flip(1)
    found = described(
        mask_function=m.or_masks(m.causal_mask_function, m.blockwise_overlay(blocks)),
        allow_is_causal_skip=False,
    )
    assert type(found) is Tensor


@pytest.mark.parametrize(
    "arguments",
    [
        {"q_length": 3, "q_offset": torch.tensor(6), "kv_length": 20},
        {"q_length": 3, "q_offset": 6, "kv_length": 20},
        {"q_length": 1, "q_offset": 6, "kv_length": 20, "allow_is_causal_skip": False},
    ],
)
def test_the_masks_of_static_caches_are_tensors(arguments: dict[str, Any]) -> None:
    mask = padding("left").bool()
    found = described(attention_mask=mask, **arguments)
    assert type(found) is Tensor
    assert torch.equal(found, m.sdpa_mask(2, attention_mask=mask, **arguments))


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"attention_mask": padding("").bool()},
        {"q_length": 1, "q_offset": 8},
        {"kv_length": 20, "q_offset": torch.tensor(0)},
        {"mask_function": m.bidirectional_mask_function, "allow_is_causal_skip": False,
         "allow_is_bidirectional_skip": True},
    ],
)  # fmt: skip
def test_no_mask_is_needed_where_sdpa_needs_none(arguments: dict[str, Any]) -> None:
    assert described(**arguments) is None
    assert m.sdpa_mask(**{"batch_size": 2, "q_length": 9, "kv_length": 9} | arguments) is None


def test_a_described_mask_is_a_tensor_to_models() -> None:
    found = described(attention_mask=padding("left").bool())
    dense = found.dense()
    assert (found.dim(), found.dtype, found.shape) == (4, torch.bool, (2, 1, 9, 9))
    for use in (
        lambda mask: mask[..., :4],
        lambda mask: mask[:, :, torch.tensor([0, 2])],
        lambda mask: mask & mask.transpose(-1, -2),
        lambda mask: torch.cat([mask, mask], -1),
        lambda mask: torch.where(mask, 0.0, -1.0),
        lambda mask: mask.to(torch.float32),
    ):
        assert type(use(found)) is Tensor
        assert torch.equal(use(found), use(dense))


def test_a_mask_to_add_holds_what_eager_attention_adds() -> None:
    arguments = {"attention_mask": padding("left").bool(), "dtype": torch.bfloat16}
    found = described(**arguments, config=transformers.GptOssConfig())
    assert (found.dtype, found.tensor) == (torch.bfloat16, None)
    assert torch.equal(found + 0, m.eager_mask(2, 9, 9, **arguments))


def test_what_a_model_writes_to_a_mask_counts() -> None:
    found = described(attention_mask=padding("left").bool())
    query = torch.randn(2, 1, 9, 4)
    before = attend(nn.Module(), query, query, query, found)[0]
    found[:, :, -1, :8] = False
    after = attend(nn.Module(), query, query, query, found)[0]
    torch.testing.assert_close(after[:, :-1], before[:, :-1])
    torch.testing.assert_close(after[:, -1], query[:, :, -1])


# Calls -----------------------------------------------------------------------------------------


def test_arguments_that_models_pass() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * 0.5
    bias = torch.randn(1, 4, 6, 6)
    added = torch.zeros(2, 1, 6, 6).masked_fill(torch.ones(6, 6).triu(1).bool(), -1e30)
    chosen = torch.tensor([[[0, 2, 5]] * 6] * 2)
    module = nn.Module()

    def check(expected: Tensor, mask: Tensor | None = None, **more: Any) -> None:
        more = {"is_causal": False, "scaling": 0.5} | more
        output, weights = attend(module, query, key, value, mask, **more)
        torch.testing.assert_close(output, (expected @ value).transpose(1, 2))
        assert weights is None

    check(scores.softmax(-1))
    check((scores + added).softmax(-1), is_causal=None)  # of a module without is_causal, as sdpa
    check((2 * (scores / 2).tanh()).softmax(-1), softcap=2.0)
    check((scores + bias).softmax(-1), position_bias=bias)
    check((scores + added).softmax(-1), added)
    check((scores + added + bias).softmax(-1), added, position_bias=bias)
    sinks = torch.randn(4)
    full = torch.cat([scores, sinks[:, None, None].expand(2, 4, 6, 1)], -1).softmax(-1)
    check(full[..., :-1], s_aux=sinks)
    hidden = torch.ones(6, 6, dtype=torch.bool).index_fill(1, torch.tensor([0, 2, 5]), False)
    check(scores.masked_fill(hidden, -torch.inf).softmax(-1), indices=chosen)
    hidden |= torch.ones(6, 6, dtype=torch.bool).triu(1)
    check(scores.masked_fill(hidden, -torch.inf).softmax(-1), indices=chosen, is_causal=True)


def test_fewer_or_more_keys_than_queries_without_a_mask() -> None:
    for keys in (4, 9):  # as sdpa: query i is aligned with key i
        query, key, value = torch.randn(2, 2, 6, 8), *torch.randn(2, 2, 2, keys, 8).unbind()
        actual, _ = attend(nn.Module(), query, key, value, None)
        expected = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        torch.testing.assert_close(actual, expected.transpose(1, 2))


def test_weights_are_returned_where_a_model_is_asked_for_them() -> None:
    model = made("GptOssForCausalLM")
    expected = model(IDS, attention_mask=padding("left"), output_attentions=True)
    model.set_attn_implementation("regard")
    actual = model(IDS, attention_mask=padding("left"), output_attentions=True)
    assert len(actual.attentions) == 2
    real = padding("left").bool()
    for one, other in zip(actual.attentions, expected.attentions, strict=True):
        rows = [weights.transpose(1, 2)[real] for weights in (one, other)]
        torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(actual.logits[real], expected.logits[real], rtol=1e-4, atol=1e-4)


def test_what_regard_cannot_compute_is_refused() -> None:
    query = torch.randn(1, 2, 3, 4)
    layer = nn.Module()
    layer.layer_idx = 4  # type: ignore[assignment]
    with pytest.raises(InputError, match=r"Module of layer 4 passes block_indices"):
        attend(layer, query, query, query, None, block_indices=torch.zeros(1))
    with pytest.raises(
        InputError, match=r"Module of layer 4 passes an attention_mask of torch.int"
    ):
        attend(layer, query, query, query, torch.ones(1, 1, 3, 3, dtype=torch.int64))
    with pytest.raises(InputError, match="generate_batch"):
        attention_implementation.attend_paged(layer, query, query, query, None)


def test_a_model_with_attention_of_its_own_is_refused() -> None:
    config = transformers.BloomConfig(vocab_size=50, hidden_size=32, n_layer=1, n_head=4)
    model = transformers.BloomModel._from_config(config, attn_implementation="regard").eval()
    with pytest.raises(InputError, match=r'BloomModel computes attention .*"eager"'):
        model(IDS)


# Watching --------------------------------------------------------------------------------------


def watched(model: Any, see: See, run: Any) -> Watched:
    watcher = Watcher(model, see, None)
    token = active_watchers.set((watcher,))
    try:
        with torch.no_grad():
            run()
    finally:
        active_watchers.reset(token)
    return watcher.watched


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "Gemma3ForCausalLM", "GptOssForCausalLM"])
def test_calls_are_recorded_while_the_model_is_watched(name: str) -> None:
    model = made(name)
    mask = padding("left")
    expected = model(IDS, attention_mask=mask, output_attentions=True)
    model.set_attn_implementation("regard")
    outputs: list[Any] = []
    seen = watched(
        model, See(weights=True, entropy=True),
        lambda: outputs.append(model(IDS, attention_mask=mask)),
    )  # fmt: skip
    assert list(seen) == ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    real = mask.bool()
    for [one], other in zip(seen.values(), expected.attentions, strict=True):
        assert one.weights is not None
        rows = [weights.transpose(1, 2)[real] for weights in (one.weights, other)]
        torch.testing.assert_close(*rows, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(outputs[0].logits[real], expected.logits[real], rtol=1e-4, atol=1e-4)


def test_distances_count_from_the_filled_keys_of_a_static_cache() -> None:
    model = made("LlamaForCausalLM")
    model.set_attn_implementation("regard")
    seen = {}
    for kind in ("dynamic", "static"):
        options = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": kind}
        seen[kind] = watched(
            model, See(distance=True),
            lambda: model.generate(IDS, attention_mask=padding("left"), **options),  # noqa: B023
        )  # fmt: skip
    for name, calls in seen["dynamic"].items():
        for one, other in zip(calls, seen["static"][name], strict=True):
            torch.testing.assert_close(one.distance, other.distance, rtol=1e-4, atol=1e-4)


# Import order ----------------------------------------------------------------------------------

ORDERS = {
    "regard first": "import regard\nassert 'torch' not in sys.modules\nimport transformers",
    "transformers first": "import transformers.modeling_utils\nimport regard",
}


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_both_import_orders(order: str) -> None:
    code = (
        f"import sys\n{ORDERS[order]}\n"
        "from transformers import LlamaConfig, LlamaForCausalLM\n"
        "sizes = dict(hidden_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=9,\n"
        "             intermediate_size=8)\n"
        "config = LlamaConfig(**sizes)\n"
        "model = LlamaForCausalLM._from_config(config, attn_implementation='regard')\n"
        "import torch\n"
        "model(torch.tensor([[1, 2, 3]]))\n"
        "waiting = [finder for finder in sys.meta_path if 'regard' in repr(finder)]\n"
        "print(model.config._attn_implementation, waiting)"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    assert shown.stdout.split() == ["regard", "[]"]


def test_a_transformers_without_the_needed_functions_can_be_imported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    module = "regard.interpret.adapters.attention_implementation"
    monkeypatch.setitem(sys.modules, module, None)  # importing it raises ImportError
    with pytest.warns(UserWarning, match="is not available with transformers"):
        transformers_import.register_when_imported()
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "4.57.6")
    transformers_import.register_when_imported()  # says nothing: the documentation names 5
