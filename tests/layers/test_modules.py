"""Layers agree with PyTorch's own, with themselves step by step, and with their definitions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from helpers import sine_models
from regard import (
    Beam,
    Block,
    Causal,
    FeedForward,
    Greedy,
    InputError,
    KeyValueCache,
    MultiHeadAttention,
    Padding,
    See,
    Seen,
    generate,
)
from regard.interpret.watching import watch
from regard.layers.cache import CrossCache
from regard.layers.hooks import HeadHooks
from regard.layers.modules import LayerNorm, PostNorm, PreNorm, lock_dropout


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def twin(dim: int = 12, heads: int = 3) -> tuple[MultiHeadAttention, nn.MultiheadAttention]:
    """Our layer and PyTorch's, with the same weights."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(dim, heads, batch_first=True)
    nn.init.normal_(theirs.in_proj_bias)
    nn.init.normal_(theirs.out_proj.bias)
    ours = MultiHeadAttention(dim, heads)
    ours.load_state_dict(
        {
            "qkv.weight": theirs.in_proj_weight,
            "qkv.bias": theirs.in_proj_bias,
            "output.weight": theirs.out_proj.weight,
            "output.bias": theirs.out_proj.bias,
        }
    )
    return ours, theirs


def test_grouped_heads_share_keys_and_values() -> None:
    torch.manual_seed(0)
    grouped = MultiHeadAttention(8, heads=4, key_heads=2)
    plain = MultiHeadAttention(8, heads=4)
    query, key, value = grouped.qkv.weight.unflatten(0, (-1, 2)).split((4, 2, 2))
    bias_q, bias_k, bias_v = grouped.qkv.bias.unflatten(0, (-1, 2)).split((4, 2, 2))
    twice = [part.repeat_interleave(2, 0) for part in (key, value, bias_k, bias_v)]
    plain.load_state_dict(
        {
            "qkv.weight": torch.cat((query, *twice[:2])).flatten(0, 1),
            "qkv.bias": torch.cat((bias_q, *twice[2:])).flatten(),
            "output.weight": grouped.output.weight,
            "output.bias": grouped.output.bias,
        }
    )
    x, context = torch.randn(2, 5, 8), torch.randn(2, 3, 8)
    close(grouped(x), plain(x))
    close(grouped(x, context), plain(x, context))


def test_forward_heads_gives_every_intermediate_result() -> None:
    ours, theirs = twin()
    x = torch.randn(2, 7, 12)
    actual = ours.forward_heads(x, see=See(weights=True))
    expected, weights = theirs(x, x, x, average_attn_weights=False)
    close(actual.seen.weights, weights)
    close(actual.heads, weights @ actual.value)
    scores = actual.query @ actual.key.transpose(-1, -2) / 2.0
    close(scores.softmax(-1), weights)
    close(
        actual.heads.transpose(1, 2).flatten(2) @ ours.output.weight.T + ours.output.bias, expected
    )
    close(actual.output, expected)


def test_locked_dropout_is_one_for_all_positions() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Dropout(0.5), nn.Sequential(nn.Dropout(0.25), nn.ReLU()))
    lock_dropout(model)
    x = torch.randn(4, 6, 1000).abs()
    y = model(x)
    dropped = y == 0
    close(y[~dropped], x[~dropped] / 0.375)
    assert (dropped == dropped[:, :1]).all()  # for all positions
    assert not (dropped == dropped[:1]).all()  # but not for all sequences
    assert dropped.float().mean().item() == pytest.approx(1 - 0.375, abs=0.02)
    assert torch.equal(model.eval()(x), x)
    low = model.train()(x.bfloat16())
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.max(), (x / 0.375).bfloat16()[low > 0].max())
    nothing = nn.Sequential(nn.Dropout(0.0))
    lock_dropout(nothing)
    assert nothing(x) is x


def test_a_cross_cache_projects_once() -> None:
    ours, _ = twin()
    x, context = torch.randn(2, 4, 12), torch.randn(2, 7, 12)
    cache = CrossCache()
    close(ours(x, context, cache=cache), ours(x, context))
    # What is kept counts from now on, not what is passed.
    close(ours(x, torch.zeros_like(context), cache=cache), ours(x, context))


def test_steps_can_be_watched() -> None:
    ours, _ = twin()
    past, x = torch.randn(1, 4, 12), torch.randn(1, 1, 12)
    bias = torch.tensor([0.0, -torch.inf, 0.5, 0.0, 0.0])[None, None, None]
    with torch.no_grad():
        plain, watched_cache = KeyValueCache(), KeyValueCache()
        for cache in (plain, watched_cache):
            ours(past, mask=Causal(), cache=cache)
        expected = ours.stepper()(x, plain, bias)
        with watch(ours, See(weights=True)) as watched:
            close(ours.stepper()(x, watched_cache, bias), expected)
    [(_, seen)] = watched.calls
    assert seen.weights[0, :, 0, 1].tolist() == [0, 0, 0]


def zero_head_1(heads: Tensor) -> Tensor:
    return heads.index_fill(1, torch.tensor(1), 0)


def without_head_1(layer: MultiHeadAttention) -> Tensor:
    """An output projection that ignores the head."""
    columns = torch.arange(layer.head_dim, 2 * layer.head_dim)
    return layer.output.weight.data.index_fill(1, columns, 0)


MODELS = [sine_models.gpt2(), sine_models.translator(), sine_models.t5()]


@pytest.mark.parametrize("model", MODELS, ids=type)
@pytest.mark.parametrize("see", [None, See(entropy=True)])
def test_an_observer_runs_for_the_prompt_and_for_every_step(model: Any, see: See | None) -> None:
    layer, calls, seen = model.attention_layers()[-1].module, [], []

    def observe(heads: Tensor, seen_now: Seen | None) -> None:
        calls.append(heads.shape[2])
        seen.append(seen_now)

    def run() -> Tensor:
        ids, state = model.start_decoding([[3, 4, 5]], room=7)
        logits = [model.step(ids, state)]
        for token in range(6):
            logits.append(model.step(torch.tensor([[token + 7]]), state))
        return torch.stack(logits)

    with torch.no_grad():
        expected = run()
        handle = layer.head_hooks.observe(observe, see)
        torch.testing.assert_close(run(), expected)
        assert len(calls) == 7
        assert all((was is None) == (see is None) for was in seen)
        handle.remove()
        run()
    assert len(calls) == 7


def test_a_forward_hook_runs_for_every_step() -> None:
    model, calls = sine_models.gpt2(), []
    layer = model.attention_layers()[0].module
    handle = layer.register_forward_hook(lambda *_: calls.append(1))
    generate(model, [[3, 4, 5]], max_new_tokens=7)
    handle.remove()
    assert len(calls) == 7  # the prompt gives the first token


@pytest.mark.parametrize("how", [Greedy(), Beam(3)], ids=["greedy", "beam"])
@pytest.mark.parametrize("model", MODELS[:2], ids=type)
def test_an_edit_changes_generation_as_the_projection_would(model: Any, how: Any) -> None:
    """Head 1 set to 0 is head 1 not read by the output projection: in forward and in steps."""
    layer = model.attention_layers()[-1].module
    plain = generate(model, [[3, 4, 5], [6, 7]], how, max_new_tokens=6)
    handle = layer.head_hooks.edit(zero_head_1)
    edited = generate(model, [[3, 4, 5], [6, 7]], how, max_new_tokens=6)
    handle.remove()
    weight = layer.output.weight.data
    layer.output.weight.data = without_head_1(layer)
    expected = generate(model, [[3, 4, 5], [6, 7]], how, max_new_tokens=6)
    layer.output.weight.data = weight
    for outputs, references, before in zip(edited, expected, plain, strict=True):
        for output, want in zip(outputs, references, strict=True):
            assert output.ids == want.ids
            assert output.score == pytest.approx(want.score, rel=1e-9)
        assert outputs[0].score != pytest.approx(before[0].score, rel=1e-6)


def test_edits_reach_forward_grouped_heads_and_the_relative_attention_of_transformer_xl() -> None:
    torch.manual_seed(0)
    grouped, x = MultiHeadAttention(8, heads=4, key_heads=2), torch.randn(2, 5, 8)
    model, ids = sine_models.xl(), torch.tensor([[3, 4, 5, 6]])
    runs = [(grouped, lambda: grouped(x)), (model.attention_layers()[0].module, lambda: model(ids))]
    for layer, run in runs:
        seen: list[Tensor] = []
        with torch.no_grad():
            layer.head_hooks.edit(zero_head_1)
            layer.head_hooks.observe(lambda heads, _, seen=seen: seen.append(heads))
            edited = run()
            layer.head_hooks = HeadHooks()
            layer.output.weight.copy_(without_head_1(layer))
            torch.testing.assert_close(edited, run())
        assert not seen[0][:, 1].any(), "an observer gets the heads as edited"
        assert seen[0][:, 0].any()


def test_hooks_refuse_what_does_not_fit() -> None:
    layer, x = MultiHeadAttention(8, 2), torch.zeros(1, 3, 8)
    handle = layer.head_hooks.edit(lambda heads: heads[:, :1])
    with pytest.raises(InputError, match="must keep the shape"):
        layer(x)
    handle.remove()
    layer.head_hooks.observe(lambda *_: None, See(entropy=True))
    layer.head_hooks.observe(lambda *_: None, See(peak=True))
    with pytest.raises(InputError, match="must share one See"):
        layer(x)


def test_a_call_that_asks_for_itself_shows_observers_the_heads_alone() -> None:
    layer, got = MultiHeadAttention(8, 2), []
    layer.head_hooks.observe(lambda _, seen: got.append(seen), See(entropy=True))
    _, seen = layer(torch.zeros(1, 3, 8), see=See(peak=True))
    assert got == [None]
    assert seen.peak is not None
    assert seen.entropy is None


@pytest.mark.parametrize("around", [PreNorm, PostNorm])
@pytest.mark.parametrize(("activation", "name"), [(nn.ReLU(), "relu"), (nn.GELU(), "gelu")])
def test_an_encoder_block_is_that_of_pytorch(around, activation: nn.Module, name: str) -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerEncoderLayer(
        12, 3, 24, activation=name, batch_first=True, norm_first=around is PreNorm
    ).eval()
    ours = encoder_block(around, activation)
    ours.load_state_dict(renamed(theirs))
    x = torch.randn(2, 7, 12)
    close(ours(x), theirs(x))


def test_a_decoder_block_is_that_of_pytorch() -> None:
    torch.manual_seed(0)
    theirs = nn.TransformerDecoderLayer(12, 3, 24, batch_first=True).eval()
    ours = Block(
        MultiHeadAttention(12, 3),
        PostNorm(LayerNorm(12)),
        FeedForward(12, 24),
        PostNorm(LayerNorm(12)),
        cross=MultiHeadAttention(12, 3),
        around_cross=PostNorm(LayerNorm(12)),
    )
    ours.load_state_dict(renamed(theirs))
    x, context = torch.randn(2, 5, 12), torch.randn(2, 7, 12)
    hidden = torch.ones(5, 5, dtype=torch.bool).triu(1)
    padded = torch.tensor([[False] * 5 + [True] * 2, [False] * 7])
    expected = theirs(x, context, tgt_mask=hidden, memory_key_padding_mask=padded)
    close(ours(x, context, mask=Causal(), context_mask=Padding([5, 7])), expected)


def encoder_block(around: type[PreNorm] | type[PostNorm], activation: nn.Module) -> Block:
    return Block(
        MultiHeadAttention(12, 3),
        around(LayerNorm(12)),
        FeedForward(12, 24, activation),
        around(LayerNorm(12)),
    )


def renamed(theirs: nn.Module) -> dict[str, Tensor]:
    """The weights of one of PyTorch's layers, by the names of our block."""
    decoder = isinstance(theirs, nn.TransformerDecoderLayer)
    names = {
        "self_attn.in_proj_": "attention.qkv.",
        "self_attn.out_proj": "attention.output",
        "multihead_attn.in_proj_": "cross.qkv.",
        "multihead_attn.out_proj": "cross.output",
        "linear1": "feed_forward.up",
        "linear2": "feed_forward.down",
        "norm1": "around_attention.norm",
        "norm2": "around_cross.norm" if decoder else "around_feed_forward.norm",
        "norm3": "around_feed_forward.norm",
    }
    state = {}
    for name, tensor in theirs.state_dict().items():
        old = next(old for old in names if name.startswith(old))
        state[name.replace(old, names[old])] = torch.randn_like(tensor)
        tensor.copy_(state[name.replace(old, names[old])])
    return state


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="divisor"):
        MultiHeadAttention(10, 3)
    with pytest.raises(InputError, match="cannot share 2 key heads"):
        MultiHeadAttention(12, 3, key_heads=2)
    layer, x = MultiHeadAttention(8, 2), torch.zeros(1, 3, 8)
    with pytest.raises(InputError, match="CrossCache"):
        layer(x, x, cache=KeyValueCache())
    with pytest.raises(InputError, match="CrossCache"):
        layer(x, cache=CrossCache())
    block = encoder_block(PreNorm, nn.ReLU())
    with pytest.raises(InputError, match="has no cross-attention"):
        block(torch.zeros(1, 3, 12), torch.zeros(1, 3, 12))
    with pytest.raises(InputError, match="together"):
        Block(layer, PreNorm(LayerNorm(8)), FeedForward(8, 8), PreNorm(LayerNorm(8)), cross=layer)


@pytest.mark.slow
def test_a_compiled_layer_notices_an_edit() -> None:
    layer, x = MultiHeadAttention(8, 2), torch.randn(1, 3, 8)
    torch.compiler.reset()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    plain = compiled(x)
    handle = layer.head_hooks.edit(torch.zeros_like)
    torch.testing.assert_close(compiled(x), layer.output.bias.expand(1, 3, 8))
    handle.remove()
    torch.testing.assert_close(compiled(x), plain)
