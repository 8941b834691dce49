"""A watched model computes the same, shows its weights, and is unchanged afterwards."""

from __future__ import annotations

import copy
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from helpers.random_models import of_five
from helpers.sine_models import gpt2, hooked, translator, xl
from regard import (
    GPT2,
    InputError,
    MultiHeadAttention,
    Padding,
    See,
    watch,
)
from regard.interpret.adapters import windows
from regard.interpret.watched import Watched

ALL = See(lse=True, entropy=True, distance=True, received=True, top=2, weights=True)
IDS = torch.randint(3, 50, (2, 9), generator=torch.Generator().manual_seed(0))
SMALL = {
    "vocab_size": 50,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def sharpened(model: nn.Module) -> Any:
    """The model with weights so large that its attention is not uniform."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(12)
    return model.eval()


def hugging_face(name: str, implementation: str = "sdpa", **changes: Any) -> Any:
    torch.manual_seed(0)
    sizes = SMALL | changes
    if name == "GPT2LMHeadModel":
        sizes |= {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32}
        for unused in ("hidden_size", "num_hidden_layers", "num_attention_heads"):
            del sizes[unused]
    family = next(name.removesuffix(end) for end in KINDS if name.endswith(end))
    config = getattr(transformers, f"{family}Config")(**sizes)
    config._attn_implementation = implementation
    return sharpened(getattr(transformers, name)(config))


KINDS = ("LMHeadModel", "ForCausalLM", "MTModel", "ForConditionalGeneration", "Model")
CAUSAL = ("GPT2LMHeadModel", "LlamaForCausalLM", "Gemma2ForCausalLM", "MistralForCausalLM")
CHANGES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_key_value_heads": 2},
    "MistralForCausalLM": {"num_key_value_heads": 1, "sliding_window": 4},
    "Gemma2ForCausalLM": {
        "num_key_value_heads": 2, "head_dim": 8, "sliding_window": 4,
        "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 8,
    },
}  # fmt: skip


def padding(side: str) -> Tensor:
    mask = torch.ones_like(IDS)
    if side == "right":
        mask[1, 6:] = 0
    elif side == "left":
        mask[1, :3] = 0
    return mask


def frozen(model: Any) -> list[Any]:
    """All that watching could leave behind: settings, hooks and parameters."""
    return [
        [(m.config.to_dict(), m.config._attn_implementation) for m in model.modules()
         if hasattr(getattr(m, "config", None), "to_dict")],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
        hooked(model),
        [parameter.clone().tolist() for parameter in model.parameters()],
    ]  # fmt: skip


def watched_as_plain(
    model: Any, see: See = ALL, real: Tensor | None = None, **inputs: Any
) -> Watched:
    """What is seen of a run whose output, at ``real`` positions, is that of a plain run."""
    before = frozen(model)
    with torch.no_grad():
        plain = model(IDS, **inputs)
        with watch(model, see) as watched:
            output = model(IDS, **inputs)
    if not isinstance(plain, Tensor):
        plain, output = plain[0], output[0]
    if real is not None:
        plain, output = plain[real], output[real]
    torch.testing.assert_close(output, plain, rtol=1e-4, atol=1e-4)
    assert frozen(model) == before
    return watched


# Our own models --------------------------------------------------------------------------------


def our_gpt2() -> GPT2:
    return gpt2(32).float()


def test_our_model_computes_the_same_and_shows_every_layer() -> None:
    watched = watched_as_plain(our_gpt2(), padding=Padding([9, 6]))
    assert list(watched) == ["stack.blocks.0.attention", "stack.blocks.1.attention"]
    for [seen] in watched.values():
        assert seen.weights.shape == (2, 4, 9, 9)
        torch.testing.assert_close(seen.weights.sum(-1), torch.ones(2, 4, 9))
        assert not seen.weights.triu(1).any()
        assert not seen.weights[1, :, :, 6:].any()


def test_calls_come_in_order_and_a_layer_has_a_list_of_them() -> None:
    model = our_gpt2()
    ids, state = model.start_decoding([IDS[0, :4].tolist()], room=4)
    with torch.no_grad(), watch(model, See(entropy=True)) as watched:
        for _ in range(3):
            ids = model.step(ids, state).argmax(-1, keepdim=True)
    first, second = list(watched)
    assert [name for name, _ in watched.calls] == [first, second] * 3
    extents = [seen.extent for seen in watched[first]]
    assert extents == [(1, 4, 4, 4), (1, 4, 1, 5), (1, 4, 1, 6)]


def test_encoder_decoder_and_cross_attention_have_their_own_names() -> None:
    model = translator()
    with watch(model, See(weights=True)) as watched:
        model(IDS, IDS[:, :5])
    assert [(name, seen.extent[2:]) for name, seen in watched.calls] == [
        ("encoder.blocks.0.attention", (9, 9)),
        ("decoder.blocks.0.attention", (5, 5)),
        ("decoder.blocks.0.cross", (5, 9)),
        ("decoder.blocks.1.attention", (5, 5)),
        ("decoder.blocks.1.cross", (5, 9)),
    ]


def test_memory_of_the_segments_before_is_seen_too() -> None:
    model = xl(memory=6)

    def run() -> Tensor:
        memories = model.remember()
        return torch.cat([model(part, memories=memories) for part in IDS[:, :8].split(4, 1)], 1)

    plain = run()
    with watch(model, See(weights=True)) as watched:
        output = run()
    torch.testing.assert_close(output, plain)
    assert [seen.extent for seen in watched["layers.1.attention"]] == [
        (2, 2, 4, 4),
        (2, 2, 4, 8),
    ]


def test_a_layer_by_itself_and_a_call_that_sees_for_itself() -> None:
    layer = MultiHeadAttention(8, heads=2)
    x = torch.randn(1, 5, 8)
    see = See(entropy=True)
    with watch(layer, see) as watched:
        layer(x)
        _, own = layer(x, see=See(peak=True))
        _, same = layer(x, see=see)
    assert same.entropy is not None
    assert list(watched) == ["MultiHeadAttention"]
    assert len(watched.calls) == 1
    assert own.peak is not None
    assert own.entropy is None


def test_gradients_flow_to_and_through_what_was_seen() -> None:
    model = our_gpt2()
    with watch(model, See(entropy=True)) as watched:
        model(IDS)
    entropy = watched["stack.blocks.1.attention"][0].entropy
    entropy.sum().backward()
    gradient = model.stack.blocks[0].attention.qkv.weight.grad
    assert gradient.abs().sum() > 0


def test_with_a_callback_nothing_is_kept() -> None:
    model = our_gpt2()
    passed: list[tuple[str, tuple[int, ...]]] = []
    with torch.no_grad():
        with watch(model, See(entropy=True)) as kept:
            model(IDS)
        with watch(
            model, See(entropy=True), lambda name, seen: passed.append((name, seen.extent))
        ) as watched:
            model(IDS)
    assert passed == [(name, seen.extent) for name, seen in kept.calls]
    assert len(watched) == 0
    assert repr(watched) == "Watched: 2 calls, each passed to the callback"


@pytest.mark.parametrize("theirs", [False, True])
def test_another_thread_is_not_watched(theirs: bool) -> None:
    model = hugging_face("GPT2LMHeadModel") if theirs else our_gpt2()
    plain = model(IDS)
    outputs: list[Any] = []
    named = (
        pytest.warns(UserWarning, match="not watched where it ran in") if theirs else nullcontext()
    )
    with named, watch(model, See(entropy=True)) as watched:
        thread = threading.Thread(target=lambda: outputs.append(model(IDS)))
        thread.start()
        thread.join()
    output, plain = (outputs[0].logits, plain.logits) if theirs else (outputs[0], plain)
    torch.testing.assert_close(output, plain, rtol=0, atol=0)
    assert repr(watched) == "Watched: 0 layers, 0 calls (the model has not run)"


def test_two_threads_may_watch_our_model_with_one_see() -> None:
    model, see = our_gpt2(), See(entropy=True)
    found: list[Watched] = []

    def other() -> None:
        with torch.no_grad(), watch(model, see) as watched:
            model(IDS)
        found.append(watched)

    with torch.no_grad(), watch(model, see) as watched:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        model(IDS[:1])
    assert [seen.extent[0] for _, seen in watched.calls] == [1, 1]
    assert [seen.extent[0] for _, seen in found[0].calls] == [2, 2]


@pytest.mark.parametrize("theirs", [False, True])
def test_an_exception_leaves_the_model_unchanged(theirs: bool) -> None:
    model = hugging_face("GPT2LMHeadModel") if theirs else our_gpt2()
    before = frozen(model)
    with pytest.raises(RuntimeError, match="stop"), watch(model, See(entropy=True)):
        raise RuntimeError("stop")
    assert frozen(model) == before
    with watch(model, See(entropy=True)) as watched:
        model(IDS)
    assert len(watched) == 2


@pytest.mark.processes
def test_transformers_is_not_imported_without_need() -> None:
    code = (
        "import sys, torch, regard\n"
        "layer = regard.MultiHeadAttention(8, heads=2)\n"
        "with regard.watch(layer, regard.See(entropy=True)) as watched:\n"
        "    layer(torch.ones(1, 3, 8))\n"
        "assert len(watched) == 1 and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# Models of transformers ------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["none", "right", "left"])
@pytest.mark.parametrize(
    ("name", "implementation"),
    [
        (name, implementation)
        for name in CAUSAL
        for implementation in ("sdpa", "eager")
        if (name, implementation) != ("Gemma2ForCausalLM", "sdpa")  # sdpa has no softcap
    ]
    + [("BertModel", each) for each in ("sdpa", "eager")],
)
def test_their_model_computes_the_same_and_shows_its_weights(
    name: str, implementation: str, side: str
) -> None:
    model = hugging_face(name, implementation, **CHANGES.get(name, {}))
    mask = padding(side)
    real = mask.bool()  # the weights of padding positions do not matter
    watched = watched_as_plain(model, real=real, attention_mask=mask)

    reference = hugging_face(name, "eager", **CHANGES.get(name, {}))
    with torch.no_grad():
        expected = reference(IDS, attention_mask=mask, output_attentions=True).attentions
    assert len(watched) == len(expected) == 2
    for (_, seen), weights in zip(watched.calls, expected, strict=True):
        rows = real[:, None, :, None].expand_as(weights)
        torch.testing.assert_close(seen.weights[rows], weights[rows], rtol=1e-4, atol=1e-5)
    sharp = watched.calls[0][1].weights
    assert sharp[0, :, -1].max() > 0.3  # what was compared is not uniform


def test_positions_without_keys_yield_zeros_as_in_sdpa() -> None:
    model = hugging_face("LlamaForCausalLM", "sdpa", num_key_value_heads=2)
    watched = watched_as_plain(model, attention_mask=padding("left"))
    assert not watched.calls[0][1].weights[1, :, :3].any()


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "MarianMTModel"])
def test_encoder_decoders_with_position_bias_and_cross_attention(name: str) -> None:
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"vocab_size": 50, "d_model": 32, "decoder_start_token_id": 0}
    if name.startswith("T5"):
        config = transformers.T5Config(
            **sizes, d_kv=8, d_ff=48, num_layers=2, num_heads=4, pad_token_id=0, eos_token_id=2
        )
    else:
        config = transformers.MarianConfig(
            **sizes, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=0,
            eos_token_id=2, bos_token_id=1, max_position_embeddings=32,
        )  # fmt: skip
    model = sharpened(getattr(transformers, name)(config))
    watched = watched_as_plain(model, attention_mask=padding("right"), decoder_input_ids=IDS[:, :5])
    assert len(watched) == 6
    crossing = [seen for _, seen in watched.calls if seen.extent[2:] == (5, 9)]
    assert len(crossing) == 2
    for seen in crossing:
        assert not seen.weights[1, :, :, 6:].any()
        torch.testing.assert_close(seen.weights.sum(-1), torch.ones(2, 4, 5))


def test_generation_shows_every_step() -> None:
    model = hugging_face("LlamaForCausalLM", num_key_value_heads=2)
    wanted = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    mask = padding("left")
    plain = model.generate(IDS, attention_mask=mask, **wanted)
    with watch(model, See(entropy=True, distance=True)) as watched:
        tokens = model.generate(IDS, attention_mask=mask, **wanted)
    assert tokens.tolist() == plain.tolist()
    steps = watched["model.layers.1.self_attn"]
    assert [seen.extent for seen in steps] == [
        (2, 4, 9, 9), (2, 4, 1, 10), (2, 4, 1, 11), (2, 4, 1, 12)
    ]  # fmt: skip


def test_an_additive_mask_with_numbers_in_it_is_a_mask_and_a_bias() -> None:
    model = hugging_face("LlamaForCausalLM", "eager", num_key_value_heads=2)
    torch.manual_seed(1)
    lowest = torch.finfo(torch.float32).min
    mask = torch.randn(2, 1, 9, 9).masked_fill(torch.ones(9, 9).triu(1).bool(), lowest)
    watched = watched_as_plain(model, attention_mask=mask)
    assert not watched.calls[0][1].weights.triu(1).any()


@of_five("hands over the whole cache, with a mask")
def test_a_static_cache_is_read_as_far_as_it_is_filled() -> None:
    model = hugging_face("LlamaForCausalLM", num_key_value_heads=2)
    wanted = {"max_new_tokens": 3, "do_sample": False, "cache_implementation": "static"}
    plain = model.generate(IDS, disable_compile=True, **wanted)
    with watch(model, See(entropy=True)) as watched:
        tokens = model.generate(IDS, disable_compile=True, **wanted)
    assert tokens.tolist() == plain.tolist()
    assert watched.calls[0][1].extent == (2, 4, 9, 9)
    with watch(model, See(distance=True)) as static:
        model.generate(IDS, disable_compile=True, **wanted)
    with watch(model, See(distance=True)) as dynamic:
        model.generate(IDS, max_new_tokens=3, do_sample=False)
    for (_, seen), (_, expected) in zip(static.calls, dynamic.calls, strict=True):
        torch.testing.assert_close(seen.distance, expected.distance)


def test_a_model_inside_another_module_is_watched() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = hugging_face("GPT2LMHeadModel")
            self.layer = MultiHeadAttention(50, heads=2)

        def forward(self, ids: Tensor) -> Tensor:
            result: Tensor = self.layer(self.inner(ids).logits)
            return result

    own = Own()
    with torch.no_grad(), watch(own, See(entropy=True)) as watched:
        own(IDS)
    assert list(watched) == [
        "inner.transformer.h.0.attn", "inner.transformer.h.1.attn", "layer"
    ]  # fmt: skip


def test_two_threads_may_watch_one_model() -> None:
    model = hugging_face("GPT2LMHeadModel")
    inside, leave = threading.Event(), threading.Event()
    found: list[Watched] = []

    def other() -> None:
        with torch.no_grad(), watch(model, See(peak=True)) as watched:
            inside.set()
            leave.wait(30)
            model(IDS)  # after the first thread has left
        found.append(watched)

    thread = threading.Thread(target=other)
    with torch.no_grad(), watch(model, See(entropy=True)) as watched:
        thread.start()
        assert inside.wait(30)
        model(IDS)
    leave.set()
    thread.join()
    assert len(watched.calls) == 2
    assert len(found[0].calls) == 2
    assert watched.calls[0][1].peak is None
    assert found[0].calls[0][1].entropy is None


# Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "see", "message"),
    [
        (lambda: "gpt2", See(entropy=True), "not str"),
        (lambda: MultiHeadAttention(8, heads=2), True, "takes See"),
    ],
)
def test_what_cannot_be_watched_is_refused(make: Callable[[], Any], see: Any, message: str) -> None:
    model = make()
    before = frozen(model) if isinstance(model, nn.Module) else None
    with pytest.raises(InputError, match=message), watch(model, see):
        pass
    assert before is None or frozen(model) == before


def test_watching_twice_is_refused() -> None:
    model = our_gpt2()
    with watch(model, See(entropy=True)) as watched:
        refusal = pytest.raises(InputError, match="watched already")
        with refusal, watch(model.stack, See(peak=True)):
            pass
        model(IDS)
    assert len(watched) == 2


# The record ------------------------------------------------------------------------------------


def test_the_record_reads_well() -> None:
    model = our_gpt2()
    with torch.no_grad(), watch(model, See(entropy=True, top=3)) as watched:
        model(IDS)
        model(IDS[:1, :4])
    assert repr(watched) == (
        "Watched: 2 layers, 4 calls of entropy, top_weights, top_keys\n"
        "  stack.blocks.0.attention  2 calls, the last:  1 x 4 heads, 4 queries, 4 keys\n"
        "  stack.blocks.1.attention  2 calls, the last:  1 x 4 heads, 4 queries, 4 keys"
    )
    page = watched._repr_html_()
    assert page.count("<tr>") == 3
    assert "2 layers, 4 calls" in page
    assert "stack.blocks.9" not in watched
    with pytest.raises(KeyError, match=r"stack\.blocks\.0\.attention"):
        watched["stack.blocks.9"]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["wrapped", "in place"])
def test_what_was_compiled_before_is_seen(how: str) -> None:
    model, ids = our_gpt2().eval(), torch.tensor([[1, 2, 3]])
    runs: Any = model
    if how == "wrapped":
        runs = torch.compile(model, backend="eager")
    else:
        model.compile(backend="eager")
    with torch.no_grad():
        runs(ids)
        with watch(runs, See(entropy=True)) as watched:
            runs(ids)
    assert len(watched) == 2


WEIGHTS = See(weights=True)

# Operations ------------------------------------------------------------------------------------


def compared(model: nn.Module, run: Callable[[], Tensor], see: See = WEIGHTS) -> Watched:
    """What is seen of a run whose output and gradients are those of a plain run."""

    def differentiated() -> list[Tensor]:
        torch.manual_seed(1)
        output = run()
        model.zero_grad()
        output.square().sum().backward()
        return [output, *(p.grad for p in model.parameters() if p.grad is not None)]

    plain = differentiated()
    with watch(model, see) as watched:
        found = differentiated()
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    return watched


def sizes(kind: str) -> dict[str, Any]:
    return {
        "bloom": {"hidden_size": 32, "n_head": 4, "n_layer": 2},
        "mpt": {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": 32},
        "gpt_oss": {
            "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 2,
            "num_experts_per_tok": 1,
        },
    }.get(kind, {})  # fmt: skip


@pytest.mark.parametrize("kind", ["bloom", "mpt", "gpt_oss", "falcon", "deberta-v2", "bert"])
def test_a_model_with_attention_code_of_its_own_shows_its_weights(kind: str) -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **SMALL | sizes(kind))
    config._attn_implementation = "eager"
    model = sharpened(transformers.AutoModel.from_config(config))
    mask = padding("left")
    see = See(weights=True, entropy=True, received=True, top=2)
    watched = compared(model, lambda: model(IDS, attention_mask=mask).last_hidden_state, see)
    assert not watched.unseen
    with torch.no_grad(), watch(model, See(weights=True)) as again:
        output = model(IDS, attention_mask=mask, output_attentions=True)
    assert len(watched.calls) == len(again.calls) == len(output.attentions) == 2
    for (_, seen), weights in zip(watched.calls, output.attentions, strict=True):
        torch.testing.assert_close(seen.weights.detach(), weights, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(seen.received.detach(), weights.sum(-2), rtol=1e-4, atol=1e-5)


def test_sinks_take_a_part_of_the_weight() -> None:
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model("gpt_oss", **SMALL | sizes("gpt_oss"))
    config._attn_implementation = "eager"
    model = sharpened(transformers.AutoModel.from_config(config))
    with torch.no_grad(), watch(model, See(weights=True, sink=True, entropy=True)) as watched:
        model(IDS)
    for _, seen in watched.calls:
        total = seen.weights.sum(-1) + seen.sink
        torch.testing.assert_close(total, torch.ones_like(total))
        both = torch.cat((seen.weights, seen.sink[..., None]), -1)
        torch.testing.assert_close(seen.entropy, torch.special.entr(both).sum(-1))
    named = pytest.warns(UserWarning, match="subtracts the largest score")
    with torch.no_grad(), named, watch(model, See(lse=True)):
        model(IDS)


@pytest.mark.parametrize("changes", [{}, {"add_bias_kv": True}, {"kdim": 6, "vdim": 10}])
@pytest.mark.parametrize("need_weights", [True, False])
def test_multihead_attention_of_pytorch(changes: dict[str, Any], need_weights: bool) -> None:
    torch.manual_seed(0)
    layer = nn.MultiheadAttention(8, 2, batch_first=True, **changes).eval()
    x = torch.randn(2, 5, 8)
    key = torch.randn(2, 5, changes.get("kdim", 8))
    value = torch.randn(2, 5, changes.get("vdim", 8))
    away = torch.arange(5) >= torch.tensor([[5], [3]])
    causal = nn.Transformer.generate_square_subsequent_mask(5).isinf()

    def run(**kwargs: Any) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = layer(
            x, key, value, key_padding_mask=away, attn_mask=causal, **kwargs
        )
        return result

    watched = compared(layer, lambda: run(need_weights=need_weights)[0])
    expected = run(average_attn_weights=False)[1]
    torch.testing.assert_close(watched.calls[0][1].weights, expected)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_fused_encoder_of_pytorch_keeps_its_output() -> None:
    """Its padded positions are 0, unlike those of the same layers without fusion."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 2).eval()
    x, away = torch.randn(2, 5, 8), torch.arange(5) >= torch.tensor([[5], [3]])
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=away)
        with watch(model, See(weights=True)) as watched:
            output = model(x, src_key_padding_mask=away)
    assert not plain[1, 3:].any()
    torch.testing.assert_close(output, plain, rtol=0, atol=0)
    assert list(watched) == ["layers.0.self_attn", "layers.1.self_attn"]


class Plain(nn.Module):
    """A module that calls PyTorch's attention, and one that computes it in steps."""

    def __init__(self, steps: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn = nn.Linear(8, 24)
        self.steps = steps
        self.dropout = dropout

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = self.attn(x).unflatten(-1, (2, 12)).transpose(1, 2).chunk(3, -1)
        if self.steps:
            weights = (query @ key.mT / 2).softmax(-1)
            return nn.functional.dropout(weights, self.dropout, self.training) @ value
        return nn.functional.scaled_dot_product_attention(
            query, key, value, mask, self.dropout if self.training else 0.0
        )


class SelfAttention(Plain):
    pass


def test_any_module_that_calls_attention_is_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(Plain(), SelfAttention(steps=True))
    x = torch.randn(2, 5, 8)
    watched = compared(model[0], lambda: model[0](x))
    assert list(watched) == ["Plain"]
    watched = compared(model[1], lambda: model[1](x))
    assert list(watched) == ["SelfAttention"]
    torch.testing.assert_close(watched.calls[0][1].weights.sum(-1), torch.ones(2, 2, 5))


def test_masks_of_numbers_in_sdpa() -> None:
    torch.manual_seed(0)
    model = Plain()
    x, lowest = torch.randn(2, 5, 8), torch.finfo(torch.float32).min
    mask = torch.randn(2, 1, 5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), lowest)
    mask[1, :, :2] = lowest  # such a row has equal weights on all keys
    watched = compared(model, lambda: model(x, mask))
    torch.testing.assert_close(watched.calls[0][1].weights[1, :, 0], torch.full((2, 5), 0.2))


@pytest.mark.parametrize("steps", [False, True])
def test_dropout_draws_the_same_numbers(steps: bool) -> None:
    torch.manual_seed(0)
    model = SelfAttention(steps, dropout=0.5).train()
    x = torch.randn(2, 5, 8)
    watched = compared(model, lambda: model(x))
    torch.testing.assert_close(watched.calls[0][1].weights.sum(-1), torch.ones(2, 2, 5))


class LinearAttention(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.exp() @ (x.mT.exp() @ x)


def test_attention_without_weights_is_named() -> None:
    model = nn.ModuleDict({"one": LinearAttention(), "two": SelfAttention()})
    x = torch.randn(2, 5, 8)
    named = pytest.warns(UserWarning, match="one of ModuleDict ran, but could not be recorded")
    with named, watch(model, See(entropy=True)) as watched:
        model["two"](model["one"](x))
    assert list(watched) == ["two"]
    assert list(watched.unseen) == ["one"]
    assert "one  not recorded" in repr(watched)
    linear = nn.Linear(2, 2)
    named = pytest.warns(UserWarning, match="Linear ran, but computed no attention")
    with named, watch(linear, See(entropy=True)):
        linear(torch.ones(1, 2))


def test_a_copy_of_the_model_is_named() -> None:
    model = Plain()
    with pytest.warns(UserWarning, match="a copy of it ran"), watch(model, See(entropy=True)):
        copy.deepcopy(model)(torch.randn(2, 5, 8))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_layer_that_is_computed_again_is_recorded_once(
    implementation: str, reentrant: bool
) -> None:
    model = hugging_face("LlamaForCausalLM", implementation, num_key_value_heads=2).train()
    model.enable_input_require_grads()
    # transformers 5.23 has renamed the method.
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
    enable({"use_reentrant": reentrant})

    def run() -> Tensor:
        logits: Tensor = model(IDS, use_cache=False).logits / 30
        return logits

    watched = compared(model, run)
    assert len(watched.calls) == 2
    assert not watched.unseen


def test_autocast_decides_the_precision() -> None:
    model = SelfAttention()
    x = torch.randn(2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        plain = model(x)
        with watch(model, See(entropy=True)) as watched:
            output = model(x)
    assert output.dtype == plain.dtype == torch.bfloat16
    torch.testing.assert_close(output, plain, rtol=2e-2, atol=2e-2)
    assert watched.calls[0][1].entropy.dtype == torch.float32


def test_layers_are_chosen_by_name() -> None:
    model = hugging_face("LlamaForCausalLM", num_key_value_heads=2)
    with torch.no_grad(), watch(model, See(entropy=True), layers=["*.1.self_attn"]) as watched:
        model(IDS)
    assert list(watched) == ["model.layers.1.self_attn"]
    assert not watched.unseen
    ours = our_gpt2()
    with torch.no_grad(), watch(ours, See(entropy=True), layers=["*.1.attention"]) as watched:
        ours(IDS)
    assert list(watched) == ["stack.blocks.1.attention"]
    refused: list[tuple[Any, str]] = [(["no.such"], "No module")]
    for layers, message in [*refused, *((given, "list of names") for given in ("x", 1, [1], []))]:
        with pytest.raises(InputError, match=message), watch(model, See(peak=True), layers=layers):
            pass


@pytest.mark.parametrize("kind", ["sdpa", "eager", "regard", "ours"])
def test_chosen_heads_have_the_fields_of_all_heads(kind: str) -> None:
    if kind == "ours":
        model, heads = our_gpt2(), [1, 0]
    else:
        model = hugging_face("LlamaForCausalLM", kind, num_key_value_heads=2)
        heads = [3, 1]
    for join, see in ((False, ALL), (True, See(entropy=True, received=True, max_logit=True))):
        with torch.no_grad(), watch(model, see, join=join) as all_heads:
            model(IDS), model(IDS)
        with torch.no_grad(), watch(model, see, heads=heads, join=join) as watched:
            model(IDS), model(IDS)
        assert len(watched.calls) == len(all_heads.calls)
        for (name, seen), (other, whole) in zip(watched.calls, all_heads.calls, strict=True):
            assert (name, seen.heads) == (other, tuple(heads))
            assert seen.extent[1] == len(heads)
            for field, tensor in whole.to_dict().items():
                assert torch.equal(seen.to_dict()[field], tensor[:, heads]), field
    assert f"2 heads ({heads[0]}, {heads[1]})" in repr(watched)
    wrong = pytest.raises(InputError, match=r"names head 9, but .* has heads 0 to")
    with torch.no_grad(), wrong, watch(model, See(peak=True), heads=[0, 9]):
        model(IDS)


@pytest.mark.parametrize("heads", [[], [-1], [0.5], "01", [1, 1]])
def test_heads_are_numbers(heads: Any) -> None:
    with pytest.raises(InputError, match="heads"), watch(our_gpt2(), See(peak=True), heads=heads):
        pass


def test_queries_that_later_steps_do_not_have_are_refused_before_the_first_token() -> None:
    model = hugging_face("LlamaForCausalLM", num_key_value_heads=2)
    for see in (See(rows=[5]), See(pairs=[(3, 0)])):
        with pytest.raises(InputError, match="each step of a generation"), watch(model, see):
            model.generate(IDS, max_new_tokens=2)
    with watch(model, See(rows=[-1])) as watched:
        model.generate(IDS, max_new_tokens=2, min_new_tokens=2)
    assert "generate" not in vars(model)
    assert [seen.rows.shape[-1] for seen in watched["model.layers.0.self_attn"]] == [9, 10]


def test_an_interrupt_ends_the_observation() -> None:
    class Interrupted(SelfAttention):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            raise KeyboardInterrupt

    model = Interrupted()
    with pytest.raises(KeyboardInterrupt), watch(model, See(entropy=True)):
        model(torch.randn(2, 5, 8))
    assert not torch.overrides._get_current_function_mode_stack()


def test_the_calls_of_a_generation_join() -> None:
    model = hugging_face("LlamaForCausalLM", num_key_value_heads=2)
    see = See(entropy=True, received=True, top=2, max_logit=True)
    wanted = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    with watch(model, see, join=True) as watched:
        tokens = model.generate(IDS, **wanted)
    with torch.no_grad(), watch(model, see) as whole:
        model(tokens[:, :-1])
    for name, [expected] in whole.items():
        [seen] = watched[name]
        assert seen.extent == expected.extent == (2, 4, 12, 12)
        for field, tensor in expected.to_dict().items():
            torch.testing.assert_close(seen.to_dict()[field], tensor, rtol=1e-4, atol=1e-5)
    for given in ({"see": See(map=4)}, {"see": see, "each": print}):
        with pytest.raises(InputError, match="join=True"), watch(model, join=True, **given):
            pass


class BlockAttention(nn.Module):
    """Scores of each block with itself, whose weights are cut before they multiply the values."""

    def forward(self, x: Tensor) -> Tensor:
        blocks = x.unflatten(1, (2, 3))[:, None]  # [batch, heads, blocks, n, dim]
        weights = (blocks @ blocks.mT).softmax(-1)
        return (weights[..., :2] @ blocks[..., :2, :]).flatten(1, 3)


def test_attention_in_blocks_is_named_beside_other_attention() -> None:
    model = nn.ModuleDict({"blocks": BlockAttention(), "all": SelfAttention()})
    x = torch.randn(2, 6, 8)
    with pytest.warns(UserWarning, match="5 axes"), watch(model, See(entropy=True)) as watched:
        model["all"](model["blocks"](x))
    assert list(watched) == ["all"]
    assert list(watched.unseen) == ["blocks"]


@pytest.mark.parametrize("in_parts", [True, False], ids=["in parts", "unused"])
def test_weights_that_are_used_in_parts_are_named_beside_other_attention(in_parts: bool) -> None:
    """As in Longformer: the local weights are extended and moved, the global ones multiply."""

    class TwoAttentions(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            weights = (x @ x.mT).softmax(-1)
            if in_parts:
                x = nn.functional.pad(weights, (0, 1))[..., :-1] @ x
            return (x @ x.mT).softmax(-1) @ x

    model = TwoAttentions()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with watch(model, See(entropy=True)) as watched:
            model(torch.randn(2, 5, 8))
    assert len(watched["TwoAttentions"]) == 1
    assert list(watched.unseen) == ["TwoAttentions"] * in_parts
    assert len(caught) == in_parts


def _in_windows(model: nn.Module, inputs: dict[str, Tensor]) -> list[Tensor]:
    """The weights of each encoder layer, from the attentions that transformers documents."""
    output = model(**inputs, output_attentions=True)
    attentions = getattr(output, "encoder_attentions", None) or output.attentions
    of_global = getattr(output, "encoder_global_attentions", None) or getattr(
        output, "global_attentions", None
    )
    marked = inputs.get("global_attention_mask", torch.zeros_like(inputs["input_ids"]))
    window, layers = 2, []
    for layer, slots in enumerate(attentions):
        batch, heads, length, _ = slots.shape
        weights = torch.zeros(batch, heads, length, length)
        leading = slots.shape[-1] - 2 * window - 1
        for each in range(batch):
            found = marked[each].nonzero()[:, 0].tolist()
            for query in range(length):
                for place, key in enumerate(found):
                    weights[each, :, query, key] += slots[each, :, query, place]
                for key in range(max(0, query - window), min(length, query + window + 1)):
                    place = leading + key - query + window
                    weights[each, :, query, key] += slots[each, :, query, place]
            for place, query in enumerate(found):
                weights[each, :, query] = of_global[layer][each, :, :, place]
        layers.append(weights)
    return layers


@pytest.mark.parametrize("global_tokens", [[], [(0, 0), (0, 5), (1, 3)]], ids=["local", "global"])
@pytest.mark.parametrize("kind", ["Longformer", "LED"])
def test_windows_and_global_tokens_of_longformer(
    kind: str, global_tokens: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {
        "Longformer": {
            "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
            "intermediate_size": 16, "max_position_embeddings": 32,
        },
        "LED": {
            "d_model": 8, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 2,
            "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16,
        },
    }[kind]  # fmt: skip
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(vocab_size=30, attention_window=4, **sizes)
    model = getattr(transformers, f"{kind}Model")(config).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    ids = torch.randint(3, 30, (2, 12))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, -3:] = 0
    if global_tokens:
        inputs["global_attention_mask"] = torch.zeros_like(ids)
        for place in global_tokens:
            inputs["global_attention_mask"][place] = 1
    monkeypatch.setattr(windows, "SCORES", 100)  # so that there are several blocks of queries
    with torch.no_grad():
        expected = _in_windows(model, inputs)
        plain = model(**inputs)
        see = See(weights=True, entropy=True, received=True, distance=True, top=3, lse=True)
        layers = {"Longformer": "*.self", "LED": "*.longformer_self_attn"}[kind]
        with watch(model, see, layers=[layers]) as watched:
            output = model(**inputs)
    assert torch.equal(output[0], plain[0])
    assert not watched.unseen
    assert len(watched.calls) == 2
    for (_, seen), weights in zip(watched.calls, expected, strict=True):
        assert seen.extent == (2, 2, 12, 12)
        torch.testing.assert_close(seen.weights, weights)
        torch.testing.assert_close(seen.received, weights.sum(-2))
        torch.testing.assert_close(seen.entropy, -torch.xlogy(weights, weights).sum(-1))
        places = torch.arange(12)
        apart = (places - places[:, None]).abs()
        torch.testing.assert_close(seen.distance, (weights * apart).sum(-1))
        torch.testing.assert_close(seen.top.weights, weights.topk(3).values)
    with pytest.warns(UserWarning, match=r"See\(scores\)"), watch(model, See(scores=[0])):
        model(**inputs)


def _longformer() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LongformerConfig(
        vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
        intermediate_size=16, max_position_embeddings=32, attention_window=4,
    )  # fmt: skip
    return transformers.LongformerModel(config).eval()


def test_windows_of_longformer_have_gradients() -> None:
    model = _longformer()
    with watch(model, See(entropy=True)) as watched:
        model(torch.randint(3, 30, (1, 8)))
    [(_, seen)] = watched.calls
    seen.entropy.sum().backward()
    assert model.encoder.layer[0].attention.self.query.weight.grad.abs().max() > 0


def test_longformer_that_fails_between_its_softmaxes_raises_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = _longformer()
    attention = model.encoder.layer[0].attention.self

    def fails(**_: Any) -> None:
        torch.randn(2, 3, 4).softmax(-1)
        raise ValueError("no global attention")

    monkeypatch.setattr(attention, "_compute_global_attn_output_from_hidden", fails)
    ids = torch.randint(3, 30, (1, 8))
    with (
        pytest.raises(ValueError, match="no global attention"),
        watch(model, See(entropy=True)) as watched,
    ):
        model(ids, global_attention_mask=(ids == ids[0, 0]).long())
    assert not watched.calls
