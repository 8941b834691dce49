"""Models of many families, watched: the same numbers come out, and what is seen is what they did.

``benchmarks/every_model.py`` compares less, of every model type (docs/watched-models.md).
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from helpers.random_models import agree, of_five
from helpers.tiny_models import FIRST_WORD, VOCABULARY, build, make
from helpers.watched_runs import gradient_difference, gradients, returned_weights, run
from regard import See, watch
from regard.mechanism.seeing import Seen

pytestmark = of_five("has other configurations")

ALL = See(
    entropy=True, peak=True, distance=True, distance_variance=True, received=True, top=3, map=3,
    weights=True,
)  # fmt: skip
DECODERS = (
    "gpt2", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "gemma", "gemma2",
    "gemma3_text", "phi", "phi3", "olmo2", "cohere", "granite", "gpt_neox", "opt", "stablelm",
    "starcoder2", "deepseek_v3", "jamba", "bloom", "mpt", "gpt_neo", "gptj", "xglm",
    "gpt_oss",
)  # fmt: skip
OTHERS = (
    "bert", "roberta", "albert", "electra", "distilbert", "modernbert", "bart", "marian", "vit",
    "dinov2", "swin", "clip", "whisper", "wav2vec2", "deberta", "deberta-v2", "xlnet", "mpnet",
    "t5", "fsmt", "beit", "levit", "wavlm", "blip", "layoutlm",
    "funnel", "tapas", "luke", "vitdet",
)  # fmt: skip
IDS = torch.randint(FIRST_WORD, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(0))


def decoder(family: str, implementation: str | None = None) -> Any:
    model = make(family, AutoModelForCausalLM)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    return model


def statistics_of(weights: Tensor) -> dict[str, Tensor]:
    """Fields of ``Seen`` that follow from the weights of a call [batch, heads, queries, keys]."""
    queries, keys = weights.shape[-2:]
    positions = torch.arange(queries)[:, None] + keys - queries
    apart = (positions - torch.arange(keys)).abs()
    sink = (1 - weights.sum(-1)) * (weights.sum(-1) > 0)
    sink = torch.where(sink > 1e-4, sink, 0.0)
    return {
        "entropy": -torch.xlogy(weights, weights).sum(-1) - torch.xlogy(sink, sink),
        "peak": weights.amax(-1),
        "distance": (mean := (weights * apart).sum(-1)),
        "distance_variance": (weights * (apart - mean[..., None]) ** 2).sum(-1) + sink * mean**2,
        "received": weights.sum(-2),
        "top_weights": weights.topk(min(3, keys)).values,
    }


def same_weights(seen: Seen, weights: Tensor, real: Tensor | None = None) -> None:
    """Assert that the weights of the queries in ``real`` [batch, queries] were seen."""
    assert seen.weights is not None
    assert seen.weights.shape == weights.shape
    if real is not None:
        rows = real[:, None, :, None].expand_as(weights)
        torch.testing.assert_close(seen.weights[rows], weights[rows], rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(seen.weights, weights, rtol=1e-5, atol=1e-5)


def consistent(seen: Seen, distance: bool = True) -> None:
    """Assert that every field is that of the weights."""
    assert seen.weights is not None
    found = seen.to_dict()
    for name, expected in statistics_of(seen.weights.double()).items():
        if name.startswith("distance") and not distance:
            continue
        actual = found[name][..., : expected.shape[-1]].double()
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5, msg=name)


def masks(side: str) -> Tensor:
    mask = torch.ones_like(IDS)
    if side != "none":
        mask[1, slice(-3, None) if side == "right" else slice(0, 3)] = 0
    return mask


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_computes_the_same_and_shows_its_weights(family: str, side: str) -> None:
    model, mask = decoder(family), masks(side)
    inputs = {"input_ids": IDS, "attention_mask": mask}
    with watch(model, ALL) as watched, torch.no_grad():
        output = model(**inputs)
    agree(output.logits, run(model, inputs).logits)
    returned = returned_weights(model, inputs)
    assert len(watched.calls) == len(returned) > 0
    for (_, seen), weights in zip(watched.calls, returned, strict=True):
        same_weights(seen, weights, mask.bool())
        consistent(seen)


@pytest.mark.parametrize("family", OTHERS)
def test_other_models_compute_the_same_and_show_their_weights(family: str) -> None:
    model, inputs = build(family)
    plain = run(model, inputs)
    with watch(model, ALL) as watched:
        output = run(model, inputs)
    agree(output[0], plain[0])
    returned = returned_weights(model, inputs)
    for _, seen in watched.calls:
        consistent(seen, distance=False)
    for weights in [] if family == "wavlm" else returned:  # it returns means over its heads
        assert any(
            seen.weights.shape == weights.shape
            and torch.allclose(seen.weights, weights, rtol=1e-5, atol=1e-5)
            for _, seen in watched.calls
        )


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "bert", "bart", "vit"])
def test_gradients_are_the_same(family: str) -> None:
    model, inputs = build(family)
    plain = gradients(model, inputs)
    with watch(model, See(entropy=True, received=True)):
        found = gradients(model, inputs)
    assert gradient_difference(plain, found) <= 1e-5


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize(
    "family", ["gpt2", "llama", "mistral", "gemma2", "gemma3_text", "qwen3", "gpt_neox"]
)
def test_each_step_of_generation_shows_its_weights(family: str, cache: str) -> None:
    model, mask = decoder(family), masks("left")
    wanted = {
        "max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False, "attention_mask": mask,
        "disable_compile": True, "pad_token_id": 0,
    }  # fmt: skip
    if cache != "dynamic":
        wanted["cache_implementation"] = cache
    plain = model.generate(IDS, **wanted)
    see = See(entropy=True, peak=True, received=True, top=3, weights=True)
    with watch(model, see) as watched:
        tokens = model.generate(IDS, **wanted)
    assert tokens.tolist() == plain.tolist()

    own = decoder(family, "eager").generate(
        IDS, **wanted, output_attentions=True, return_dict_in_generate=True
    )
    returned = [weights for step in own.attentions for weights in step]
    assert len(watched.calls) == len(returned)
    for (_, seen), weights in zip(watched.calls, returned, strict=True):
        real = mask.bool() if weights.shape[2] == 9 else None
        shown, keys = seen.weights, min(seen.weights.shape[-1], weights.shape[-1])
        assert not shown[..., keys:].any()
        assert not weights[..., keys:].any()
        rows = slice(None) if real is None else real[:, None, :, None].expand_as(shown[..., :keys])
        torch.testing.assert_close(
            shown[..., :keys][rows], weights[..., :keys][rows], rtol=1e-5, atol=1e-5
        )


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text", "qwen3"])
def test_packed_texts_do_not_see_each_other(family: str) -> None:
    model = decoder(family)
    inputs = {
        "input_ids": IDS[:1],
        "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2, 3]]),
        "use_cache": False,
    }
    with watch(model, ALL) as watched, torch.no_grad():
        output = model(**inputs)
    agree(output.logits, run(model, inputs).logits)
    for (_, seen), weights in zip(watched.calls, returned_weights(model, inputs), strict=True):
        same_weights(seen, weights)
        consistent(seen)
        assert not seen.weights[0, :, 5:, :5].any()


@pytest.mark.parametrize("family", ["gpt2", "llama", "gemma3_text", "bert", "t5", "vit"])
def test_bfloat16(family: str) -> None:
    model, inputs = build(family)
    model = model.bfloat16()
    inputs = {n: t.bfloat16() if t.is_floating_point() else t for n, t in inputs.items()}
    plain = run(model, inputs)[0].float()
    with watch(model, ALL) as watched:
        output = run(model, inputs)[0].float()
    agree(output, plain, 3e-2)
    for _, seen in watched.calls:
        assert seen.entropy is not None
        assert seen.entropy.isfinite().all()
        consistent(seen, distance=False)


@pytest.mark.parametrize(("family", "keys"), [("codegen", 9), ("openai-gpt", 5)])
def test_a_row_that_sees_padding_alone_has_equal_weights_on_keys(family: str, keys: int) -> None:
    """CodeGen masks with the lowest number, GPT with it (padding) or -10,000 (later tokens)."""
    torch.manual_seed(0)
    model, inputs = build(family)
    mask = torch.ones_like(inputs["input_ids"])
    mask[0, :4] = 0
    inputs |= {"attention_mask": mask, "output_attentions": True}
    with watch(model.eval(), ALL) as watched, torch.no_grad():
        output = model(**inputs)
    for (_, seen), weights in zip(watched.calls, output.attentions, strict=True):
        torch.testing.assert_close(seen.weights, weights)
        consistent(seen, distance=False)
        equal = torch.full_like(seen.entropy[0, :, :4], math.log(keys))
        torch.testing.assert_close(seen.entropy[0, :, :4], equal)
