"""Watched modules that run in other ways: under transforms, traced, exported, wrapped, sharded."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, distributed, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call, functionalize, grad, hessian, jvp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from regard import MultiHeadAttention, See, watch
from regard.interpret.watched import Watched

SEE = See(weights=True, entropy=True, received=True, top=2, map=2)
X = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0))
XS = torch.stack((X, X.flip(1), -X))
CAUSAL = torch.ones(5, 5).tril().bool()

pytestmark = [
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors"),
    pytest.mark.filterwarnings("ignore:.*torch.jit"),  # deprecated
    pytest.mark.filterwarnings("ignore:There is a performance drop"),  # of vmap
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]


class Attention(nn.Module):
    """The attention of timm, fused and in steps."""

    def __init__(self, fused: bool, dropout: float = 0.0) -> None:
        super().__init__()
        self.num_heads = 2
        self.fused_attn = fused
        self.qkv = nn.Linear(8, 24)
        self.attn_drop = nn.Dropout(dropout)
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        batch, length, dim = x.shape
        qkv = self.qkv(x).reshape(batch, length, 3, self.num_heads, 4).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        else:
            attn = (q * 4**-0.5) @ k.transpose(-2, -1)
            if mask is not None:
                attn = attn.masked_fill(~mask, -torch.inf)
            attn = attn.softmax(dim=-1)
            attn = self.attn_drop(attn)
            x = attn @ v
        out: Tensor = self.proj(x.transpose(1, 2).reshape(batch, length, dim))
        return out


def attention(fused: bool, dropout: float = 0.0) -> Attention:
    torch.manual_seed(0)
    return Attention(fused, dropout)


def leaves(result: Any) -> list[Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def same(run: Callable[[], Any], model: nn.Module, see: See = SEE) -> Watched:
    """What is seen of a run whose results are those of a run that is not watched."""
    torch.manual_seed(1)
    plain = leaves(run())
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(could not be recorded|no attention)")
        with watch(model, see) as watched:
            found = leaves(run())
    assert not torch.overrides._get_current_function_mode_stack()
    for one, other in zip(found, plain, strict=True):
        assert (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)
        if not one.is_meta and type(one) is Tensor:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    for _, seen in watched.calls:
        for field in seen.to_dict().values():
            assert (field + 0).detach().numpy() is not None  # it can be used
    return watched


def with_gradients(model: nn.Module, run: Callable[[], Tensor]) -> Callable[[], Any]:
    def differentiated() -> list[Tensor]:
        model.zero_grad()
        output = run()
        output.square().sum().backward()
        return [output, *(p.grad for p in model.parameters() if p.grad is not None)]

    return differentiated


def fake(model: nn.Module, *masks: Tensor) -> Tensor:
    with FakeTensorMode() as mode:
        given = {name: mode.from_tensor(value) for name, value in model.named_parameters()}
        inputs = [mode.from_tensor(tensor) for tensor in (X, *masks)]
        result: Tensor = functional_call(model, given, tuple(inputs))
        return result


def squared(model: nn.Module) -> Callable[[Tensor], Tensor]:
    return lambda x: model(x).square().sum()


class PackedStep(nn.Module):
    """A decoding step of grouped queries, as transformers 5.23 passes it: groups are queries."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_groups = 6, 3

    def forward(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        packed = query.reshape(2, 2, 3, 4)
        if mask is not None and mask.shape[1] == 6:
            mask = mask.reshape(2, 2, 3, -1)
        return F.scaled_dot_product_attention(packed, key, value, attn_mask=mask).reshape(
            2, 6, 1, 4
        )


@pytest.mark.parametrize("masked", ["not", "all heads", "each head"])
def test_a_step_whose_groups_are_passed_as_queries_has_all_heads(masked: str) -> None:
    torch.manual_seed(2)
    query, (key, value) = torch.randn(2, 6, 1, 4), torch.randn(2, 2, 2, 7, 4)
    mask = None if masked == "not" else torch.rand(2, 1 if masked == "all heads" else 6, 1, 7) < 0.6
    if mask is not None:
        mask[..., 0] = True
    model = PackedStep()
    watched = same(lambda: model(query, key, value, mask), model)
    scores = query @ key.repeat_interleave(3, 1).mT / 2
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    [(_, seen)] = watched.calls
    torch.testing.assert_close(seen.weights, scores.softmax(-1))
    assert seen.entropy is not None
    assert seen.entropy.shape == (2, 6, 1)


Run = Callable[[nn.Module], Any]

UNSEEN: dict[str, tuple[str, Run]] = {
    "meta": ("have no values", lambda m: m.to("meta")(X.to("meta"))),
    "meta, mask": ("have no values", lambda m: m.to("meta")(X.to("meta"), CAUSAL.to("meta"))),
    "fake": ("have no values", fake),
    "fake, mask": ("have no values", lambda m: fake(m, CAUSAL)),
    "vmap": ("vmap", lambda m: vmap(m)(XS)),
    "vmap, mask": ("vmap", lambda m: vmap(m)(XS, CAUSAL.expand(3, 5, 5))),
    "vmap of grad": ("vmap", lambda m: vmap(grad(squared(m)))(XS)),
    "functionalize": ("functionalize", lambda m: functionalize(m)(X)),
    "trace": ("exported or traced", lambda m: torch.jit.trace(m, X, check_trace=False)(X)),
}


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("name", UNSEEN)
def test_what_cannot_be_kept_is_named(name: str, fused: bool) -> None:
    reason, run = UNSEEN[name]
    model = attention(fused)
    watched = same(lambda: run(model), model)
    assert not watched
    assert list(watched.unseen) == ["Attention"]
    assert reason in watched.unseen["Attention"]


SEEN: dict[str, Run] = {
    "grad": lambda m: grad(squared(m))(X),
    "grad of parameters": lambda m: grad(
        lambda given: functional_call(m, given, (X,)).square().sum()
    )(dict(m.named_parameters())),
    "float64": lambda m: m.double()(X.double()),
    "mask": lambda m: m(X, CAUSAL),
}
IN_STEPS: dict[str, Run] = {  # PyTorch has no such derivatives of its fused kernels
    "jvp": lambda m: jvp(m, (X,), (X,)),
    "grad of grad": lambda m: grad(lambda x: grad(squared(m))(x).sum())(X),
}


@pytest.mark.parametrize(
    ("name", "fused"),
    [*((n, f) for n in SEEN for f in (True, False)), *((n, False) for n in IN_STEPS)],
)
def test_other_ways_to_run_are_seen(name: str, fused: bool) -> None:
    model = attention(fused)
    run = (SEEN | IN_STEPS)[name]
    watched = same(lambda: run(model), model)
    assert not watched.unseen
    plain = attention(fused)
    with torch.no_grad(), watch(plain, SEE) as expected:
        plain(X, CAUSAL if name == "mask" else None)
    [[seen]], [[wanted]] = watched.values(), expected.values()
    torch.testing.assert_close(seen.weights.detach(), wanted.weights, check_dtype=False)


def test_inference_mode_and_forward_gradients() -> None:
    for fused in (True, False):
        model = attention(fused)

        def infer(model: Attention = model) -> Tensor:
            with torch.inference_mode():
                return model(X, CAUSAL).clone()

        assert len(same(infer, model).calls) == 1
    model = attention(False)

    def forward() -> Any:
        with forward_ad.dual_level():
            return tuple(forward_ad.unpack_dual(model(forward_ad.make_dual(X, X))))

    assert len(same(forward, model).calls) == 1


def test_a_hessian_and_batched_gradients() -> None:
    model = attention(False)
    watched = same(lambda: hessian(squared(model))(X[:1, :2]), model)
    assert "vmap" in watched.unseen["Attention"]
    for fused in (True, False):
        model = attention(fused)

        def batched(model: Attention = model) -> Any:
            x = X.clone().requires_grad_()
            output, ways = model(x), torch.randn(3, *X.shape)
            return torch.autograd.grad(output, x, ways, is_grads_batched=True)

        assert len(same(batched, model).calls) == 1


@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors_are_left_to_pytorch(layout: Any) -> None:
    class Own(nn.Module):
        def forward(self, x: Tensor) -> Any:
            x = x.unflatten(-1, (2, 4)).transpose(1, 2)
            return F.scaled_dot_product_attention(x, x, x).transpose(1, 2).unbind()

    given = torch.nested.nested_tensor([X[0, :3], X[1]], layout=layout)
    if layout == torch.jagged:
        own = Own()
        watched = same(lambda: own(given), own)
        assert watched.unseen == {"Own": "computes attention with nested tensors"}
        return
    layer: Any
    for layer in (
        nn.MultiheadAttention(8, 2, batch_first=True).eval(),
        nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval(),
    ):
        inputs = [given] * (3 if isinstance(layer, nn.MultiheadAttention) else 1)
        after = nn.Sequential()  # another attention runs afterwards, and is seen
        after.append(layer)
        after.append(attention(True))

        def run(layer: Any = layer, inputs: Any = inputs, after: Any = after) -> Any:
            with torch.no_grad():
                output = layer(*inputs)
                output = output[0] if isinstance(output, tuple) else output
                return [*output.unbind(), after[1](X)]

        watched = same(run, after)
        assert watched.unseen["0"] == "computes attention with nested tensors"
        assert list(watched) == ["1"]


class Scripted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-2, -1)).softmax(dim=-1) @ v


def test_torchscript_is_named() -> None:
    traced = torch.jit.trace(attention(True), X, check_trace=False)
    model = nn.ModuleDict({
        "traced": traced,
        "frozen": torch.jit.freeze(traced.eval()),
        "scripted": torch.jit.script(Scripted()),
        "linear": torch.jit.script(nn.Linear(8, 8)),
    })  # fmt: skip
    watched = same(lambda: [module(X) for module in model.values()], model)
    assert not watched
    assert list(watched.unseen) == ["traced", "frozen", "scripted"]
    assert "TorchScript" in watched.unseen["scripted"]


@pytest.mark.slow
def test_exported_programs() -> None:
    model = attention(True)
    watched = same(lambda: torch.export.export(model, (X,)).module()(X), model)
    assert watched.unseen == {"Attention": "was exported or traced, not run"}
    program = torch.export.export(model, (X,)).module()
    [[seen]] = same(lambda: program(X), program).values()
    [[expected]] = same(lambda: model(X), model).values()
    torch.testing.assert_close(seen.weights, expected.weights)


class Wrapper(nn.Module):
    """A module that wraps another one, and passes on what it does not have."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_model = base

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.base_model, name)

    def forward(self, *args: Any) -> Any:
        return self.base_model(*args)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("fused", [True, False])
def test_attention_as_in_timm_and_wrapped(fused: bool, dropout: float) -> None:
    model = nn.Sequential(attention(fused, dropout), attention(fused, dropout))
    assert list(same(with_gradients(model, lambda: model(X)), model)) == ["0", "1"]
    outer = Wrapper(model)
    run = with_gradients(outer, lambda: outer(X))
    assert list(same(run, outer)) == ["base_model.0", "base_model.1"]
    assert list(same(run, model)) == ["0", "1"]
    parallel = nn.DataParallel(model)
    run = with_gradients(parallel, lambda: parallel(X))
    assert list(same(run, parallel)) == ["module.0", "module.1"]


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.usefixtures("one_process")
@pytest.mark.parametrize("fused", [True, False])
def test_models_that_are_split_among_processes(fused: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = nn.Sequential(attention(fused), attention(fused))
    replicated = nn.parallel.DistributedDataParallel(model)
    run = with_gradients(replicated, lambda: replicated(X))
    assert list(same(run, replicated)) == ["module.0", "module.1"]
    sharded: Any = nn.Sequential(attention(fused), attention(fused))
    mesh = init_device_mesh("cpu", (1,))
    for module in (*sharded, sharded):
        fully_shard(module, mesh=mesh)

    def step() -> list[Tensor]:
        sharded.zero_grad()
        output = sharded(X)
        output.square().sum().backward()
        return [output, *(p.grad.full_tensor() for p in sharded.parameters())]

    assert list(same(step, sharded)) == ["0", "1"]


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("kind", ["fused", "steps", "regard", "own layer"])
def test_gradient_checkpoints(kind: str, reentrant: bool, inside: bool) -> None:
    """The backward pass may run while the model is watched, or afterwards."""
    torch.manual_seed(0)
    model: Any
    if kind == "regard":
        config = transformers.LlamaConfig(
            vocab_size=50, hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
            intermediate_size=8, attn_implementation="regard",
        )  # fmt: skip
        model = transformers.LlamaModel(config)
        layer = lambda x: model(inputs_embeds=x, use_cache=False).last_hidden_state  # noqa: E731
    else:
        model = (
            MultiHeadAttention(8, heads=2) if kind == "own layer" else Attention(kind == "fused")
        )
        layer = model
    plain = with_gradients(model, lambda: layer(X))()
    x = X.clone().requires_grad_()
    model.zero_grad()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*could not be recorded")
        with watch(model, SEE) as watched:
            output = checkpoint(layer, x, use_reentrant=reentrant)
            if inside:
                output.square().sum().backward()
    if not inside:
        output.square().sum().backward()
    found = [output, *(p.grad for p in model.parameters() if p.grad is not None)]
    for one, other in zip(found, plain, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    if kind == "own layer" and not reentrant:
        assert "gradient checkpoint" in watched.unseen["MultiHeadAttention"]
    else:
        assert len(watched.calls) == 1
        assert not watched.unseen


def test_what_the_user_reads() -> None:
    model = nn.Sequential(attention(True), attention(True))
    reason = "ran under torch.func.vmap or functionalize, whose tensors are gone afterwards"
    message = f"^0, 1 of Sequential ran, but could not be recorded: each {reason}.$"
    with pytest.warns(UserWarning, match=message), watch(model, SEE) as watched:
        vmap(model)(XS)
    assert repr(watched) == (
        "Watched: 0 layers, 0 calls (attention ran, but is not recorded)\n"
        f"  0  not recorded: it {reason}\n  1  not recorded: it {reason}"
    )
    assert f"not recorded: it {reason}" in watched._repr_html_()
    alone = attention(True)
    message = r"^Attention ran, but could not be recorded: it ran under torch\.func\.vmap"
    with pytest.warns(UserWarning, match=message), watch(alone, SEE):
        vmap(alone)(XS)
    linear = nn.Linear(8, 8)
    message = "Linear ran, but computed no attention"
    with pytest.warns(UserWarning, match=message), watch(linear, SEE) as watched:
        linear(X)
    assert repr(watched) == "Watched: 0 layers, 0 calls (it ran, but no attention was found)"
