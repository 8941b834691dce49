"""On a GPU: no wrong number in any memory layout, with any mask or bias, on any default device.

All results are compared with the reference in float64. Memory between the numbers of a tensor is
NaN, so a kernel that reads past a row is found.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import (
    Alibi,
    Causal,
    Padding,
    Prefix,
    RelativeBuckets,
    See,
    Segments,
    Window,
    attention,
    biases,
    masks,
    why,
)

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BACKENDS = ("auto", "hopper", "triton", "sdpa", "tiled", "reference")
BATCH, HEADS, LENGTH, WIDTH = 2, 4, 256, 64

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    made = torch.randn(*shape, generator=generator, device="cpu", dtype=torch.float32)
    return made.to(dtype).to(DEVICE)


# ---- layouts -------------------------------------------------------------------------------------


def nan(like: Tensor, *shape: int) -> Tensor:
    return like.new_full(shape, math.nan)


def plain(x: Tensor) -> Tensor:
    return x.contiguous()


def heads_last(x: Tensor) -> Tensor:
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def every_second_row(x: Tensor) -> Tensor:
    batch, heads, length, width = x.shape
    room = nan(x, batch, heads, 2 * length, width)
    room[:, :, ::2] = x
    return room[:, :, ::2]


def later(x: Tensor, elements: int) -> Tensor:
    room = nan(x, x.numel() + elements)[elements:]
    return room.view(x.shape).copy_(x)


def three_elements_later(x: Tensor) -> Tensor:
    return later(x, 3)


def eight_bytes_later(x: Tensor) -> Tensor:
    return later(x, 8 // x.element_size())


def wider(x: Tensor, more: int) -> Tensor:
    room = nan(x, *x.shape[:3], x.shape[3] + more)
    room[..., : x.shape[3]] = x
    return room[..., : x.shape[3]]


def rows_wider_by_5(x: Tensor) -> Tensor:
    return wider(x, 5)


def rows_wider_by_8(x: Tensor) -> Tensor:
    return wider(x, 8)


def slice_of_qkv(x: Tensor) -> Tensor:
    batch, heads, length, width = x.shape
    room = nan(x, batch, length, 3, heads, width)
    room[:, :, 1] = x.transpose(1, 2)
    return room[:, :, 1].transpose(1, 2)


def expanded_batch(x: Tensor) -> Tensor:
    return x[:1].contiguous().expand(x.shape)


LAYOUTS: tuple[Callable[[Tensor], Tensor], ...] = (
    plain, heads_last, every_second_row, three_elements_later, eight_bytes_later, rows_wider_by_5,
    rows_wider_by_8, slice_of_qkv, expanded_batch,
)  # fmt: skip
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.__name__)


# ---- comparing with float64 ----------------------------------------------------------------------


def in_float64(arguments: dict[str, Any]) -> dict[str, Any]:
    """The same arguments, with a bias in float64."""
    bias = arguments.get("bias")
    if isinstance(bias, Tensor):
        bias = bias.double()
    elif isinstance(bias, Alibi):
        bias = Alibi(bias.slopes.double())
    elif isinstance(bias, RelativeBuckets):
        bias = RelativeBuckets(bias.table.double(), bias.bidirectional, bias.max_distance)
    return {**arguments, "bias": bias}


def exact(tensors: tuple[Tensor, ...], arguments: dict[str, Any]) -> Any:
    query, key, value = (tensor.double() for tensor in tensors)
    return attention(query, key, value, **in_float64(arguments), backend="reference")


def tolerance(dtype: torch.dtype, value: Tensor) -> float:
    if dtype == torch.float32:
        return 3e-5 * float(value.detach().abs().max())
    return 3 * torch.finfo(dtype).eps * float(value.detach().abs().max())


def accepted(tensors: tuple[Tensor, ...], arguments: dict[str, Any]) -> list[str]:
    """The backends that can run a call, with "auto" first."""
    answers = why(*tensors, **arguments).answers
    return ["auto", *(name for name in BACKENDS[1:] if answers[name] is None)]


def assert_close(actual: Tensor, expected: Tensor, most: float, what: str) -> None:
    actual = actual.double()
    assert torch.equal(actual.isnan(), expected.isnan()), f"{what}: NaN in other places"
    error = float((actual - expected).nan_to_num().abs().max())
    assert error <= most, f"{what}: off by {error:.3g}, more than {most:.3g}"


def check_output(tensors: tuple[Tensor, ...], arguments: dict[str, Any]) -> list[str]:
    """Compare all backends with float64; return those that ran."""
    expected = exact(tensors, arguments)
    names = accepted(tensors, arguments)
    for name in names:
        result = attention(*tensors, **arguments, backend=name)
        seeing = arguments.get("see") is not None
        output, want = (result[0], expected[0]) if seeing else (result, expected)
        most = tolerance(tensors[0].dtype, tensors[2].nan_to_num())
        assert_close(output, want, most, f"the output of {name}")
        if seeing:
            for field, values in expected[1].to_dict().items():
                if field in ("entropy", "received", "lse"):
                    largest = float(values[values.isfinite()].abs().max())
                    rough = 0.02 if tensors[0].dtype != torch.float32 else 1e-4
                    got = result[1].to_dict()[field].double()
                    infinite = ~values.isfinite()
                    assert torch.equal(got[infinite], values[infinite]), f"{field} of {name}"
                    assert_close(
                        got[~infinite], values[~infinite], rough * max(1.0, largest),
                        f"{field} of {name}",
                    )  # fmt: skip
    return names


def gradients(tensors: tuple[Tensor, ...], arguments: dict[str, Any], backend: str) -> list[Tensor]:
    """The gradients of the output; its own gradient begins 3 elements into a longer tensor."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    result = attention(*leaves, **arguments, backend=backend)  # type: ignore[call-overload]
    output = result if isinstance(result, Tensor) else result[0]
    weights = numbers(output.numel() + 3, seed=7).to(output.dtype)
    joined = torch.cat((output.new_zeros(3), output.flatten()))
    return list(torch.autograd.grad((joined * weights).sum(), leaves))


def check_gradients(tensors: tuple[Tensor, ...], arguments: dict[str, Any]) -> None:
    wide = tuple(tensor.double() for tensor in tensors)
    expected = gradients(wide, in_float64(arguments), "reference")
    largest = max(float(grad.abs().max()) for grad in expected)
    rough = 1e-4 if tensors[0].dtype == torch.float32 else 6 * torch.finfo(tensors[0].dtype).eps
    for backend in accepted(tensors, arguments):
        actual = gradients(tensors, arguments, backend)
        for which, (grad, want) in enumerate(zip(actual, expected, strict=True)):
            assert_close(grad, want, largest * rough, f"gradient {which} of {backend}")


def dense(seed: int = 3) -> Tensor:
    allowed = numbers(BATCH, 1, LENGTH, LENGTH, seed=seed) > 0
    return allowed | torch.eye(LENGTH, dtype=torch.bool, device=DEVICE)


CALLS: dict[str, Callable[[], dict[str, Any]]] = {
    "no mask": dict,
    "causal": lambda: {"mask": Causal()},
    "window": lambda: {"mask": Window(40, 3)},
    "dense": lambda: {"mask": dense()},
    "causal, bias": lambda: {"mask": Causal(), "bias": numbers(LENGTH, LENGTH, seed=5)},
    "seeing": lambda: {"see": See(entropy=True)},
    "causal, seeing": lambda: {"mask": Causal(), "see": See(received=True, lse=True)},
}


@every_dtype
@every_layout
@pytest.mark.parametrize("name", CALLS)
def test_no_layout_gives_a_wrong_number(
    layout: Callable[[Tensor], Tensor], dtype: torch.dtype, name: str
) -> None:
    arguments = CALLS[name]()
    tensors = tuple(
        layout(numbers(BATCH, HEADS, LENGTH, WIDTH, seed=seed, dtype=dtype)) for seed in range(3)
    )
    ran = check_output(tensors, arguments)
    assert {"auto", "tiled", "reference"} <= set(ran)


@every_dtype
@every_layout
@pytest.mark.parametrize("place", [0, 1, 2], ids=["query", "key", "value"])
def test_one_tensor_of_another_layout_and_shared_heads(
    layout: Callable[[Tensor], Tensor], dtype: torch.dtype, place: int
) -> None:
    heads = (HEADS, 2, 2)
    tensors = [
        numbers(BATCH, heads[seed], LENGTH, WIDTH, seed=seed, dtype=dtype) for seed in range(3)
    ]
    tensors[place] = layout(tensors[place])
    for arguments in ({}, {"mask": Causal()}, {"mask": dense()}):
        check_output(tuple(tensors), arguments)


@every_dtype
@every_layout
@pytest.mark.parametrize(
    "name", ["no mask", "causal", "window", "dense", "causal, bias", "causal, seeing"]
)
def test_no_layout_gives_a_wrong_gradient(
    layout: Callable[[Tensor], Tensor], dtype: torch.dtype, name: str
) -> None:
    """The gradient of the output comes as an unaligned view too, as from a concatenation."""
    tensors = tuple(
        layout(numbers(BATCH, HEADS, LENGTH, WIDTH, seed=seed, dtype=dtype)) for seed in range(3)
    )
    check_gradients(tensors, CALLS[name]())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_layout
@pytest.mark.parametrize("mask", [None, Causal()], ids=repr)
def test_calls_that_are_large_enough_for_the_kernels_for_hopper(
    layout: Callable[[Tensor], Tensor], dtype: torch.dtype, mask: Any
) -> None:
    tensors = tuple(
        layout(numbers(2, 16, 1024, WIDTH, seed=seed, dtype=dtype)) for seed in range(3)
    )
    for see in (See(entropy=True, received=True), See(received=True), See(lse=True)):
        arguments = {"mask": mask, "see": see}
        ran = check_output(tensors, arguments)
        hopper = torch.cuda.get_device_capability() == (9, 0) and layout is plain
        if hopper and mask is None and see.entropy:
            assert "hopper" in ran
        check_gradients(tensors, arguments)


@pytest.mark.parametrize("mask", [None, Causal()], ids=repr)
def test_gradients_of_other_layouts_in_turn(mask: Any) -> None:
    """PyTorch reuses cuDNN's graph whatever the strides of the output and its gradient."""
    tensors = tuple(
        heads_last(numbers(2, 16, 512, WIDTH, seed=seed, dtype=torch.bfloat16)) for seed in range(3)
    )
    leaves = [tensor.requires_grad_() for tensor in tensors]
    toward = numbers(2, 16, 512, WIDTH, seed=7, dtype=torch.bfloat16)
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    exactly = attention(*wide, mask=mask, backend="reference")
    expected = torch.autograd.grad(exactly, wide, toward.double())
    for see in (See(lse=True), See(entropy=True), See(entropy=True, received=True)):
        for layout in (plain, heads_last, every_second_row, slice_of_qkv):
            output, _ = attention(*leaves, mask=mask, see=see)
            for grad, want in zip(
                torch.autograd.grad(output, leaves, layout(toward)), expected, strict=True
            ):
                assert_close(grad, want, 0.05 * float(want.abs().max()), f"{see}, {layout}")


# ---- biases and masks ----------------------------------------------------------------------------

BIAS_SHAPES = ((64,), (64, 64), (1, 64), (64, 1), (1, 4, 64, 64), (2, 1, 1, 64), (2, 4, 64, 64))


@every_dtype
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("scale", [None, 0.0, -0.3])
@pytest.mark.parametrize("mask", [None, Causal(), ~Window(1)], ids=repr)
def test_biases_of_every_shape_and_dtype(
    dtype: torch.dtype, bias_dtype: torch.dtype, scale: float | None, mask: Any
) -> None:
    tensors = tuple(numbers(2, 4, 64, WIDTH, seed=seed, dtype=dtype) for seed in range(3))
    for shape in BIAS_SHAPES:
        bias = 2 * numbers(*shape, seed=5, dtype=bias_dtype)
        check_output(tensors, {"bias": bias, "scale": scale, "mask": mask})
    unaligned = later(numbers(64, 64, seed=5, dtype=bias_dtype), 3)
    check_output(tensors, {"bias": unaligned, "scale": scale, "mask": mask})


@every_dtype
@pytest.mark.parametrize("keys", [1, 5, 63, 64, 100, 192])
@pytest.mark.parametrize("alone", [False, True])
def test_the_gradient_of_a_bias(dtype: torch.dtype, keys: int, alone: bool) -> None:
    """PyTorch's kernels give no gradient to a bias if no other input needs one."""
    query = numbers(2, 4, 64, WIDTH, seed=0, dtype=dtype)
    key, value = (numbers(2, 4, keys, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2))
    toward = numbers(2, 4, 64, WIDTH, seed=7)
    found: list[Tensor] = []
    calls = [("reference", torch.float64), ("auto", dtype)]
    for backend, kind in calls if alone else [*calls, ("sdpa", dtype)]:
        bias = numbers(1, 4, 64, keys, seed=5, dtype=torch.float32).to(kind).requires_grad_()
        inputs = (tensor.to(kind).requires_grad_(not alone) for tensor in (query, key, value))
        output = attention(*inputs, bias=bias, backend=backend)  # type: ignore[call-overload]
        found += torch.autograd.grad((output * toward.to(kind)).sum(), bias)
    most = float(found[0].abs().max())
    most *= 1e-4 if dtype == torch.float32 else 8 * torch.finfo(dtype).eps
    # It is a difference of products of this size: with a single key it is all rounding.
    most += 2e-6 * float((toward @ value.detach().to(toward.dtype).mT).abs().max())
    for grad in found[1:]:
        assert_close(grad, found[0], most, "the gradient of a bias")


@every_dtype
@pytest.mark.parametrize("scale", [0.0, -0.3])
@pytest.mark.parametrize("mask", [None, Causal(), Padding([40, 64]), ~Window(1)], ids=repr)
def test_scales_of_0_and_less(dtype: torch.dtype, scale: float, mask: Any) -> None:
    tensors = tuple(numbers(2, 4, 64, WIDTH, seed=seed, dtype=dtype) for seed in range(3))
    check_output(tensors, {"scale": scale, "mask": mask})


def unseen_by_all() -> dict[str, Any]:
    """Masks of 48 queries and 64 keys, in which no query sees the keys 20 to 23."""
    allowed = torch.ones(48, 64, dtype=torch.bool, device=DEVICE)
    allowed[:, 20:24] = False
    return {
        "dense": masks.Dense(allowed),
        "dense, by head": masks.Dense(allowed.expand(2, 4, 48, 64).contiguous()),
        "dense and causal": masks.Dense(allowed) & Causal(),
        "not padding": ~Padding(24),
        "not prefix, dense": ~Padding(24) | (masks.Dense(allowed) & Padding(10)),
    }


@every_dtype
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("name", ["dense", "dense, by head", "dense and causal", "not padding",
                                  "not prefix, dense"])  # fmt: skip
@pytest.mark.parametrize("with_bias", [False, True])
def test_keys_that_no_query_may_see_leak_nothing(
    dtype: torch.dtype, poison: float, name: str, with_bias: bool
) -> None:
    mask = unseen_by_all()[name]
    query = numbers(2, 4, 48, WIDTH, seed=0, dtype=dtype)
    key, value = (numbers(2, 4, 64, WIDTH, seed=seed, dtype=dtype) for seed in (1, 2))
    arguments: dict[str, Any] = {"mask": mask}
    if with_bias:
        arguments["bias"] = numbers(48, 64, seed=5)
    expected = exact((query, key, value), arguments)
    key, value = key.clone(), value.clone()
    key[:, :, 20:24], value[:, :, 20:24, 0] = poison, poison
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    for backend in accepted((query, key, value), arguments):
        output = attention(*leaves, **arguments, backend=backend)  # type: ignore[call-overload]
        assert_close(
            output.detach(), expected, tolerance(dtype, value.nan_to_num(0, 0, 0)), backend
        )
        for grad in torch.autograd.grad(output.float().square().sum(), leaves):
            assert grad.isfinite().all(), f"a gradient of {backend}"


@every_dtype
def test_a_hidden_key_with_a_huge_score_stays_hidden(dtype: torch.dtype) -> None:
    """PyTorch's cuDNN kernel adds -65504 for a key that a boolean mask hides."""
    query = torch.full((1, 1, 32, WIDTH), 300.0, device=DEVICE, dtype=dtype)
    key = torch.zeros(1, 1, 64, WIDTH, device=DEVICE, dtype=dtype)
    key[:, :, ::2] = 300.0
    value = numbers(1, 1, 64, WIDTH, dtype=dtype)
    allowed = (torch.arange(64, device=DEVICE) % 2 == 1).expand(32, 64)
    assert {"auto", "sdpa", "tiled"} <= set(check_output((query, key, value), {"mask": allowed}))


@every_dtype
def test_a_query_without_keys_yields_zeros(dtype: torch.dtype) -> None:
    tensors = tuple(numbers(2, 4, 64, WIDTH, seed=seed, dtype=dtype) for seed in range(3))
    allowed = torch.ones(64, 64, dtype=torch.bool, device=DEVICE)
    allowed[10:20] = False
    for mask in (allowed, masks.Dense(allowed) & Causal(), Padding([64, 0]), ~Padding(64)):
        check_output(tensors, {"mask": mask})
        assert (attention(*tensors, mask=~Padding(64)) == 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("length", [64, 192, 704])
def test_masked_gradients_at_64_beyond_a_tile(dtype: torch.dtype, length: int) -> None:
    """cuDNN's backward pass gives NaN here where all scores are far below 0 (pytorch#196678)."""
    query, key, value = (
        (numbers(1, 1, length, WIDTH, seed=seed) * 0.1).to(dtype) for seed in range(3)
    )
    query = query + 4
    key = key - 4
    allowed = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril()
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = attention(*leaves, mask=allowed)
    for grad in torch.autograd.grad(output.float().sum(), leaves):
        assert grad.isfinite().all()


# ---- random calls --------------------------------------------------------------------------------


def random_call(seed: int) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    pick = random.Random(seed)
    batch, key_heads = pick.choice((1, 2, 3)), pick.choice((1, 2))
    heads = key_heads * pick.choice((1, 2, 3))
    queries, keys = (pick.choice((1, 2, 7, 16, 33, 64, 100, 128, 200, 257)) for _ in range(2))
    width = pick.choice((8, 16, 20, 33, 64, 80, 128))
    value_width = pick.choice((width, width, 24, 64))
    dtype = pick.choice(DTYPES)
    shapes = (
        (batch, heads, queries, width), (batch, key_heads, keys, width),
        (batch, key_heads, keys, value_width),
    )  # fmt: skip
    tensors = tuple(
        pick.choice(LAYOUTS)(numbers(*shape, seed=3 * seed + place, dtype=dtype))
        for place, shape in enumerate(shapes)
    )
    lengths = [pick.randint(0, keys) for _ in range(batch)]
    cut = pick.randint(1, keys)
    packed = [cut, keys - cut] if cut < keys else [keys]
    mask = pick.choice(
        (
            None,
            None,
            Causal(),
            Window(pick.randint(0, 40), pick.randint(0, 9)),
            Padding(lengths),
            Padding(lengths, side="left") & Causal(),
            Prefix(pick.randint(0, keys)),
            Segments(packed) if queries <= keys else Causal(),
            Padding(lengths) | (Causal() & Window(5)),
            ~Window(1),
            masks.Dense(numbers(queries, keys, seed=seed) > 0),
            masks.Dense(numbers(batch, heads, queries, keys, seed=seed) > 0) & Causal(),
            masks.Dense(numbers(batch, 1, 1, keys, seed=seed) > 0),
        )
    )
    bias = pick.choice(
        (
            None,
            None,
            None,
            numbers(keys, seed=seed),
            numbers(queries, keys, seed=seed, dtype=dtype),
            numbers(heads, 1, keys, seed=seed, dtype=dtype),
            numbers(batch, 1, queries, 1, seed=seed),
            Alibi.standard(heads, device=DEVICE),
            RelativeBuckets(numbers(16, heads, seed=seed), max_distance=50),
        )
    )
    arguments = {
        "mask": mask,
        "bias": bias,
        "scale": pick.choice((None, None, 0.0, 0.5, -0.2)),
        "softcap": pick.choice((None, None, None, 3.0, 1e6)),
        "see": pick.choice((None, None, See(entropy=True, received=True))),
    }
    return tensors, arguments


@pytest.mark.parametrize("part", range(20))
def test_random_calls(part: int) -> None:
    for seed in range(part * 20, part * 20 + 20):
        tensors, arguments = random_call(seed)
        try:
            check_output(tensors, arguments)
        except AssertionError as error:
            shapes = [(list(t.shape), t.stride(), t.storage_offset()) for t in tensors]
            raise AssertionError(
                f"call {seed}: {tensors[0].dtype}, {shapes}, {arguments}: {error}"
            ) from None


# ---- the default device --------------------------------------------------------------------------


@pytest.fixture
def default_cuda() -> Iterator[None]:
    torch.set_default_device(DEVICE)
    try:
        yield
    finally:
        torch.set_default_device(None)


MASKS: dict[str, Callable[[], Any]] = {
    "none": lambda: None,
    "causal": Causal,
    "window": lambda: Window(3),
    "prefix": lambda: Prefix([5, 20]),
    "padding": lambda: Padding([30, 40]),
    "padding, tensor": lambda: Padding(torch.tensor([30, 40])),
    "segments": lambda: Segments([10, 30]),
    "segments from ids": lambda: Segments.from_ids(torch.tensor([1] * 10 + [2] * 30)) & Causal(),
    "dense": lambda: masks.Dense(torch.ones(40, 40, dtype=torch.bool).tril()),
    "not": lambda: ~Window(1) | Padding(7),
}
SIGHTS: dict[str, Callable[[], See | None]] = {
    "nothing": lambda: None,
    "rows": lambda: See(rows=[0, 5, 5, -1]),
    "pairs": lambda: See(pairs=[(3, 2), (39, 0), (3, 2)]),
    "pairs, tensor": lambda: See(pairs=torch.tensor([[3, 2], [0, 0]])),
    "sums": lambda: See(received=True, map=(4, 5), map_peak=True),
    "by row": lambda: See(lse=True, entropy=True, peak=True, max_logit=True, distance=True),
    "top": lambda: See(top=3),
}


@pytest.mark.usefixtures("default_cuda")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("sight", SIGHTS)
@pytest.mark.parametrize("backend", ["auto", "triton", "tiled", "reference"])
def test_every_mask_and_field_with_cuda_as_the_default_device(
    mask: str, sight: str, backend: str
) -> None:
    query, key, value = torch.randn(3, 2, 2, 40, 16)
    given, see = MASKS[mask](), SIGHTS[sight]()
    arguments: dict[str, Any] = {"mask": given, "see": see}
    if backend not in accepted((query, key, value), arguments):
        return  # refused with a reason, which other tests check
    result = attention(query, key, value, **arguments, backend=backend)
    expected = exact((query, key, value), arguments)
    output, want = (result, expected) if see is None else (result[0], expected[0])
    assert_close(output, want, 1e-4, "the output")
    if see is not None:
        fields = result[1].to_dict()
        for name, values in expected[1].to_dict().items():
            if name != "top_keys":
                torch.testing.assert_close(
                    fields[name].double(), values.double(), rtol=1e-3, atol=1e-4
                )


# ---- compiled graphs -----------------------------------------------------------------------------


@every_dtype
def test_masks_and_biases_in_a_compiled_graph(dtype: torch.dtype) -> None:
    def call(query: Tensor, key: Tensor, value: Tensor, allowed: Tensor, bias: Tensor) -> Tensor:
        masked = attention(query, key, value, mask=allowed)
        biased = attention(query, key, value, bias=bias, mask=Causal())
        narrow = attention(query[..., :56], key[..., :56], value)
        return masked + biased + narrow

    tensors = [numbers(BATCH, HEADS, 128, WIDTH, seed=seed, dtype=dtype) for seed in range(3)]
    allowed = torch.ones(128, 128, dtype=torch.bool, device=DEVICE).tril()
    bias = numbers(128, seed=5)
    torch.compiler.reset()
    output = torch.compile(call, fullgraph=True, backend="aot_eager")(*tensors, allowed, bias)
    expected = call(*(t.double() for t in tensors), allowed, bias.double())
    assert_close(output, expected, 3 * tolerance(dtype, tensors[2]), "the sum of three calls")
    assert torch.backends.cuda.cudnn_sdp_enabled()


def test_a_dense_bias_holds_its_precision() -> None:
    """A float32 bias of half-precision queries is not rounded, nor read as half precision."""
    query, key, value = (
        numbers(1, 2, 64, WIDTH, seed=seed, dtype=torch.bfloat16) for seed in range(3)
    )
    bias = 1000 + numbers(64, 64, seed=5)  # bfloat16 would round it to multiples of 4
    check_output((query, key, value), {"bias": bias})
    check_output((query, key, value), {"bias": biases.Dense(bias), "mask": Causal()})
