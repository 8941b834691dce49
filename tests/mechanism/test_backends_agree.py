"""Every backend agrees with the reference in float64: outputs, all fields of Seen, gradients.

The rule for a tolerance: float64 must agree up to its rounding. In a lower precision the error may
be twice that of plain PyTorch in that precision (three times for gradients), plus a floor for the
cases in which plain PyTorch is right by luck. The floor is one rounding of the result to its dtype
(``eps`` times its size), and the rounding of the computation, which is float32 or better: a score
is off by about ``eps * reach``, where ``reach`` bounds the sum of the absolute terms it is made of,
softmax passes that on to the weights as a relative error of that size, and a sum of n terms adds
about ``sqrt(n)`` roundings more.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers.generated_calls import DTYPES, Case, cases, sights
from regard import (
    BackendError,
    Causal,
    Padding,
    Prefix,
    See,
    Seen,
    Segments,
    Window,
    attention,
    why,
)
from regard.mechanism.backends import complete
from regard.mechanism.backends import cpu as cpu_backend
from regard.mechanism.call import check
from regard.mechanism.geometry import Tile
from regard.mechanism.masks import Mask

BACKENDS = ("sdpa", "tiled", "auto")
OUTPUTS, SEEN, GRADIENTS, SEEN_GRADIENTS = 600, 300, 250, 100  # examples, for each dtype

every_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=[] if dtype == torch.float32 else [pytest.mark.slow])
        for dtype in DTYPES
    ],
    ids=lambda dtype: str(dtype)[6:],
)


def test_at_least_5000_calls_are_generated() -> None:
    assert len(DTYPES) * (OUTPUTS + SEEN + GRADIENTS + SEEN_GRADIENTS) >= 5000


def examples(count: int) -> settings:
    """Slow imports and big draws are no failures; the same calls are generated on every run."""
    checks = (HealthCheck.too_slow, HealthCheck.data_too_large)
    return settings(
        max_examples=count,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        suppress_health_check=checks,
    )


# ---- tolerances ----------------------------------------------------------------------------------


def reach(case: Case) -> float:
    """A bound on the sum of absolute terms a score is made of."""
    exact = case.double()
    scale = case.query.shape[-1] ** -0.5 if case.scale is None else abs(case.scale)
    query, key = (t.abs().reshape(-1, t.shape[-1]) for t in (exact.query, exact.key))
    bound = scale * _most(query.amax(0) * key.amax(0), sum_=True) if len(query) and len(key) else 0
    if case.bias is not None:
        bound += _most(_bias(exact))
    if case.sinks is not None:
        bound += _most(exact.sinks)
    return 1.0 + bound


def _most(tensor: Tensor, sum_: bool = False) -> float:
    if not tensor.numel():
        return 0.0
    return float(tensor.abs().sum() if sum_ else tensor.abs().max())


def _bias(case: Case) -> Tensor:
    extent = case.extent
    return case.bias.tile(Tile(extent, range(extent.queries), range(extent.keys)))


def eager(case: Case) -> Tensor:
    """Plain PyTorch in the dtype of the call, as its formula."""
    query, key, value = case.query, case.key, case.value
    while query.dim() < 4:
        at = 0 if query.dim() == 2 else 1
        query, key, value = (t.unsqueeze(at) for t in (query, key, value))
    if groups := query.shape[1] // key.shape[1]:
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scale = query.shape[-1] ** -0.5 if case.scale is None else case.scale
    scores = query @ key.transpose(-1, -2) * scale
    if case.softcap is not None:
        scores = case.softcap * torch.tanh(scores / case.softcap)
    if case.bias is not None:
        scores = scores + _bias(case).to(scores.dtype)
    allowed = case.allowed()
    lost = ~allowed.any(-1, keepdim=True)
    scores = scores.masked_fill(~(allowed | lost), -math.inf)
    if case.sinks is not None:
        sinks = case.sinks[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(-1)[..., : allowed.shape[-1]].masked_fill(lost, 0)
    return (weights @ value).reshape(*case.query.shape[:-1], value.shape[-1])


def close(actual: Tensor, exact: Tensor, tolerance: float, what: str) -> None:
    assert actual.shape == exact.shape, f"{what}: {list(actual.shape)}, not {list(exact.shape)}"
    actual = actual.detach().double()
    infinite = ~exact.isfinite()
    assert torch.equal(actual[infinite], exact[infinite]), f"{what}: not infinite where it must be"
    error = (actual - exact)[~infinite].abs()
    assert not error.isnan().any(), f"{what}: NaN"
    worst = float(error.max()) if error.numel() else 0.0
    assert worst <= tolerance, f"{what}: off by {worst:.3g}, more than {tolerance:.3g}"


def rounding(case: Case) -> float:
    """The relative error of a sum of weights in the precision of the computation."""
    eps = torch.finfo(torch.promote_types(case.query.dtype, torch.float32)).eps
    terms = max(case.extent.queries, case.extent.keys, 1)
    # Roundings of a sum cancel, but those of equal weights all have the same sign.
    return eps * reach(case) * (terms if case.scale == 0 else math.sqrt(terms))


def output_tolerance(case: Case, exact: Tensor) -> float:
    size, dtype = _most(case.value.double()), case.query.dtype
    floor = 4 * rounding(case) * size
    if dtype == torch.float64:
        return floor
    return 2 * _most(eager(case).double() - exact) + 2 * torch.finfo(dtype).eps * size + floor


# ---- outputs -------------------------------------------------------------------------------------


def run(case: Case, backend: str, see: See | None = None) -> tuple[Tensor, Any] | None:
    """The call on a backend, or None where that refuses it, as why() says."""
    arguments = case.arguments | {"see": see}
    if backend != "auto":
        reason = why(case.query, case.key, case.value, **arguments).answers[backend]  # type: ignore[arg-type]
        if reason is not None:
            with pytest.raises(BackendError) as caught:
                attention(case.query, case.key, case.value, **arguments, backend=backend)  # type: ignore[call-overload]
            assert reason in str(caught.value)
            return None
    result = attention(case.query, case.key, case.value, **arguments, backend=backend)  # type: ignore[call-overload]
    return result if see is not None else (result, None)


@every_dtype
@examples(OUTPUTS)
@given(data=st.data())
def test_outputs(dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype))
    actual = run(case.double(), "reference")
    exact = actual[0]
    tolerance = output_tolerance(case, exact)
    for backend in (*BACKENDS, "reference"):
        result = run(case, backend)
        if result is not None:
            assert result[0].dtype == dtype
            close(result[0], exact, tolerance, f"the output of {backend}")


# ---- seeing --------------------------------------------------------------------------------------


@pytest.mark.slow
@every_dtype
@examples(SEEN)
@given(data=st.data())
def test_seen(dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype))
    see = data.draw(sights(case))
    exact, expected = run(case.double(), "reference", see)  # type: ignore[misc]
    dense = run(case.double(), "reference", See(weights=True))[1].weights  # type: ignore[index]
    eps = 4 * rounding(case)
    tolerance = output_tolerance(case, exact)
    for backend in ("tiled", "auto", "native", "reference"):
        actual = kernel(case, see) if backend == "native" else run(case, backend, see)
        if actual is None:
            assert backend == "native", f"{backend} refuses nothing"
            continue
        output, seen = actual
        close(output, exact, tolerance, f"the output of {backend}")
        assert seen.to_dict().keys() == expected.to_dict().keys()
        assert seen.extent == expected.extent
        for name, field in expected.to_dict().items():
            if not name.startswith("top"):
                # Weights are at most 1; what adds up or multiplies them errs by as much more.
                close(
                    seen.to_dict()[name], field, eps * max(1, _finite(field)), f"{name}, {backend}"
                )
        if see.top:
            check_top(case, seen, dense, eps, backend)


def kernel(case: Case, see: See) -> tuple[Tensor, Any] | None:
    """The CPU kernel, on calls that are too small to be worth building it for.

    None where it cannot run the call; test_native.py fails where it should be there and is not.
    """
    call = check(case.query, case.key, case.value, **case.arguments, dropout=0.0, see=see)  # type: ignore[arg-type]
    if cpu_backend.unsupported(call) or cpu_backend.unavailable():
        return None
    output, seen = cpu_backend.run(call)
    return output.reshape(*case.query.shape[:-1], output.shape[-1]), complete(call, see, seen)


def _finite(tensor: Tensor) -> float:
    return _most(tensor[tensor.isfinite()])


def check_top(case: Case, seen: Seen, weights: Tensor, tolerance: float, backend: str) -> None:
    """The largest weights, on keys that have them; -1 only where no key is left to attend to."""
    assert seen.top is not None
    actual, keys = seen.top
    wide = torch.nn.functional.pad(weights, (0, max(0, actual.shape[-1] - weights.shape[-1])))
    largest = wide.sort(-1, descending=True).values[..., : actual.shape[-1]]
    close(actual, largest, tolerance, f"the top weights of {backend}")
    open_keys = case.allowed().sum(-1).clamp(max=actual.shape[-1])
    assert torch.equal((keys >= 0).sum(-1), open_keys), f"{backend}: keys are missing"
    places = torch.arange(actual.shape[-1])
    assert torch.equal(keys >= 0, places < open_keys[..., None]), f"{backend}: -1 comes last"
    on_keys = wide.gather(-1, keys.clamp(min=0)).masked_fill(keys < 0, 0)
    close(actual, on_keys, tolerance, f"the weights on the top keys of {backend}")
    chosen = keys.masked_fill(keys < 0, -1) - places.expand_as(keys) * (keys < 0)
    in_order = chosen.sort(-1).values
    assert (in_order.diff(dim=-1) != 0).all(), f"{backend}: a key stands twice among the top"


# ---- gradients -----------------------------------------------------------------------------------


def gradients(case: Case, loss: Tensor) -> list[Tensor]:
    """The gradient of every input, zeros where none arrives."""
    if not loss.requires_grad:
        return [torch.zeros_like(tensor) for tensor in case.inputs]
    actual = torch.autograd.grad(loss, case.inputs, allow_unused=True)
    pairs = zip(actual, case.inputs, strict=True)
    return [torch.zeros_like(tensor) if grad is None else grad for grad, tensor in pairs]


def projected(output: Tensor) -> Tensor:
    """A number that depends on all of the output, each entry with a weight of its own."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randint(-8, 9, output.shape, generator=generator) / 8  # exact in every dtype
    return (output * weights.to(output.dtype)).double().sum()


def held_fixed(case: Case) -> Case:
    """The same leaves, but no gradient for the bias: what PyTorch's kernels can do."""
    for tensor in case.inputs[3:]:
        tensor.requires_grad_(False)
    return case


def gradient_floors(case: Case, exact: list[Tensor]) -> list[float]:
    """The terms that add up in a gradient, which all gradients share, may be larger than it is.

    A kernel in half precision rounds those terms as well, not only their sum.
    """
    size = max([0.0, *map(_most, exact)])
    terms = max(1.0, size) * max(1.0, _most(case.value.double()), _most(case.key.double()))
    floor = 8 * rounding(case) * terms + 4 * torch.finfo(case.query.dtype).eps * size
    return [floor] * len(exact)


@pytest.mark.slow
@every_dtype
@examples(GRADIENTS)
@given(data=st.data())
def test_gradients(dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype))
    exact_case = case.double().leaves()
    exact = gradients(exact_case, projected(run(exact_case, "reference")[0]))  # type: ignore[index]
    floors = gradient_floors(case, exact)
    tolerances = floors
    if dtype != torch.float64:
        plain_case = case.leaves()
        plain = gradients(plain_case, projected(eager(plain_case)))
        errors = [_most(p.double() - e) for p, e in zip(plain, exact, strict=True)]
        tolerances = [3 * error + floor for error, floor in zip(errors, floors, strict=True)]
    for backend in (*BACKENDS, "reference"):
        leaves = case.leaves()
        result = run(leaves if backend != "sdpa" else held_fixed(leaves), backend)
        if result is None:
            continue
        inputs = leaves.inputs[:3] if backend == "sdpa" else leaves.inputs
        actual = torch.autograd.grad(projected(result[0]), inputs, allow_unused=True)
        for index, grad in enumerate(actual):
            grad = torch.zeros_like(leaves.inputs[index]) if grad is None else grad
            close(grad, exact[index], tolerances[index], f"gradient {index} of {backend}")


DIFFERENTIABLE = ("lse", "entropy", "received", "rows", "map", "distance", "sink", "scores")


def seen_loss(output: Tensor, seen: Seen) -> Tensor:
    fields = seen.to_dict()
    total = projected(output)
    for name in DIFFERENTIABLE:
        if name in fields:
            # Distances in units of the length: half precision has no room for more.
            field = fields[name] / (seen.extent[3] if name == "distance" else 1)
            total = total + projected(torch.where(field.isfinite(), field, 0))
    return total


@pytest.mark.slow
@every_dtype
@examples(SEEN_GRADIENTS)
@given(data=st.data())
def test_gradients_of_what_is_seen(dtype: torch.dtype, data: st.DataObject) -> None:
    case = data.draw(cases(dtype))
    queries = case.extent.queries
    rows = [0, queries // 2, -1] if queries else []
    see = See(
        lse=True, entropy=True, received=True, rows=rows, map=(2, 3), distance=True,
        sink=case.sinks is not None, scores=rows,
    )  # fmt: skip
    exact_case = case.double().leaves()
    exact = gradients(exact_case, seen_loss(*run(exact_case, "reference", see)))  # type: ignore[misc]
    floors = gradient_floors(case, exact)
    for backend in ("tiled", "reference"):
        leaves = case.leaves()
        output, seen = run(leaves, backend, see)  # type: ignore[misc]
        for index, grad in enumerate(gradients(leaves, seen_loss(output, seen))):
            close(grad, exact[index], floors[index], f"gradient {index} of {backend}")


LENGTHS = [300, 280]
MORE_ROWS_THAN_SHARE_A_MASK = (
    (Causal() & Window(left=32) & Padding(LENGTHS), 300),
    (Prefix([10, 150]), 300),
    (Causal() & Padding([350, 280]), 350),
    (Segments([[32] * 9 + [12], [300]]), 300),
    (Segments([32] * 9 + [12]) & Causal(), 300),
)


@pytest.mark.parametrize(("mask", "keys"), MORE_ROWS_THAN_SHARE_A_MASK, ids=repr)
def test_pieces_of_each_sequence_have_its_own_mask_and_gradients(mask: Mask, keys: int) -> None:
    torch.manual_seed(0)
    tensors = [
        torch.randn(2, 2, length, 8, dtype=torch.float64, requires_grad=True)
        for length in (300, keys, keys)
    ]
    actual, expected = (attention(*tensors, mask=mask, backend=b) for b in ("sdpa", "reference"))
    torch.testing.assert_close(actual, expected)
    toward = torch.randn_like(actual)
    for ours, theirs in zip(
        torch.autograd.grad(actual, tensors, toward),
        torch.autograd.grad(expected, tensors, toward),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_large_values_do_not_overflow_where_scores_are_small() -> None:
    x = torch.full((1, 1, 10, 4), 5.0)
    value = torch.randn(1, 1, 10, 4) * 1e30
    output, _ = attention(x, x, value, see=See(lse=True), backend="tiled")
    torch.testing.assert_close(output, attention(x, x, value, backend="reference"))


@pytest.mark.parametrize("length", [10, 40])
def test_a_query_that_is_no_number_yields_none(length: int) -> None:
    x = torch.randn(1, 1, length, 8)
    query = x.clone()
    query[0, 0, 4] = math.nan
    output = attention(query, x, x)
    assert output[0, 0, 4].isnan().all()
    assert output.isnan().sum() == 8
