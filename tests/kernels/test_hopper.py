"""The kernels for Hopper against the reference: on a Hopper GPU, or elsewhere in gluon_on_cpu.py.

The shapes cover more blocks than programs, every kind of bins, and last tiles that are not full.
"""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from itertools import product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from helpers import gluon_on_cpu
from helpers.kernel_cases import CUDA, cases, pairwise
from regard import Causal, See, Seen, Window, attention, why
from regard.errors import BackendError
from regard.mechanism.backends import BACKENDS
from regard.mechanism.biases import Alibi
from regard.mechanism.call import check as arguments
from regard.mechanism.seeing import Deferred

triton = pytest.importorskip("triton", reason="Triton, which needs Linux, is not installed.")

from regard.kernels import autograd, compat, passes, plan, sizes  # noqa: E402
from regard.kernels.hopper import launch as hopper_launch  # noqa: E402
from regard.kernels.passes import DeferredColumns  # noqa: E402
from regard.mechanism.backends import hopper as hopper_backend  # noqa: E402
from regard.mechanism.backends import triton as triton_backend  # noqa: E402

DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = (torch.bfloat16, torch.float16) if CUDA else (torch.float16,)
ROWS = ("lse", "entropy", "peak", "max_logit", "distance")
# PyTorch warns at the first product of a thread in a backward pass.
pytestmark = [pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS"), pytest.mark.kernels]


@pytest.fixture(autouse=True)
def _hopper(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    if not CUDA:
        kernels = gluon_on_cpu.load("regard.kernels.hopper")
        monkeypatch.setattr(hopper_launch, "_kernels", lambda: kernels)
    elif passes.device_facts(DEVICE).why_not_hopper is not None:
        pytest.skip("These kernels need a Hopper GPU and one version of Triton.")
    monkeypatch.setattr(plan, "MIN_QUERIES_BACKWARD", dict.fromkeys((64, 128), 256))
    if "repeats" not in request.node.name:  # few programs, so that each computes several blocks
        set_processors(monkeypatch, 3)
        monkeypatch.setattr(plan, "MIN_STEPS_SAVED", 0)  # programs share the last items
    plan.plan_for.cache_clear()
    yield
    plan.plan_for.cache_clear()


def set_processors(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """Make plans for a Hopper GPU with ``count`` processors."""
    facts = plan.Device((9, 0), count, None)
    monkeypatch.setattr(passes, "device_facts", lambda device: facts)
    if not CUDA:
        monkeypatch.setattr(passes, "_cudnn", lambda device: False)


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def headed(batch: int, heads: int, length: int, width: int, seed: int) -> Tensor:
    return random(batch, heads, length, width, seed=seed)


def beside(batch: int, heads: int, length: int, width: int, seed: int) -> Tensor:
    """Random numbers laid out as in most models: the heads of a position are neighbours."""
    return random(batch, length, heads, width, seed=seed).transpose(1, 2)


def among_others(batch: int, heads: int, length: int, width: int, seed: int) -> Tensor:
    """Random numbers laid out as in some models: a head's query, key and value are neighbours."""
    return random(batch, length, heads, 3 * width, seed=seed)[..., :width].transpose(1, 2)


def inputs(
    lengths: tuple[int, int], width: int, heads: tuple[int, int] = (2, 1), layout=headed, batch=2
) -> list[Tensor]:  # type: ignore[no-untyped-def]
    queries, keys = lengths
    shapes = ((heads[0], queries), (heads[1], keys), (heads[1], keys))
    return [layout(batch, *shape, width, seed) for seed, shape in enumerate(shapes)]


def definition(tensors: list[Tensor], causal: bool, see: See, scale: float | None = None):  # type: ignore[no-untyped-def]
    mask = Causal() if causal else None
    return attention(*tensors, mask=mask, scale=scale, see=see, backend="reference")


def structure(causal: bool, width: int, scale: float | None = None) -> plan.Structure:
    kind = plan.CAUSAL if causal else plan.FULL
    scale = width**-0.5 if scale is None else scale
    return plan.Structure(kind, None, None, plan.PLAIN, None, 0, scale, None)


def planned(
    query: Tensor,
    key: Tensor,
    form: plan.Structure,
    fields: Collection[str] = (),
    grid: tuple[int, int] | None = None,
    top: int = 0,
    value: Tensor | None = None,
    deferrable: bool = False,
) -> plan.Plan:
    wanted = plan.Wanted(tuple(fields), grid or (1, 1), top)
    return passes.plan_call(
        query, key, key if value is None else value, form, wanted, True, deferrable
    )


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    form: plan.Structure,
    fields: Collection[str] = (),
    top: int = 0,
    grid: tuple[int, int] | None = None,
) -> tuple[dict[str, Tensor], plan.Intermediates]:
    """Run the forward pass for Hopper; return its results, and the tensors for later passes."""
    problem = planned(query, key, form, fields, grid, top, value).problem
    made = plan.plan_for(problem._replace(cudnn=False))
    assert made.forward.variant == "hopper"
    return hopper_launch.forward(query, key, value, form, made)


def columns_of(
    query: Tensor,
    key: Tensor,
    lse: Tensor,
    form: plan.Structure,
    fields: Collection[str],
    grid: tuple[int, int] | None = None,
    left: plan.Intermediates | None = None,
) -> dict[str, Tensor]:
    """Run the columns pass for Hopper."""
    made = planned(query, key, form, fields, grid)
    assert made.columns is not None
    assert made.columns.variant == "hopper"
    return passes.columns(query, key, lse, form, made, left or plan.Intermediates())


def close(name: str, found: Tensor, exact: Tensor, plain: Tensor) -> None:
    """Check that the error is at most twice PyTorch's in the same dtype, plus float32 rounding."""
    error, allowed = (found.double() - exact).abs().max(), (plain.double() - exact).abs().max()
    least = 4e-6 * exact.abs().max()
    assert error <= 2 * allowed + least, f"{name}: error {error:.2e}, PyTorch's {allowed:.2e}"


def check(
    tensors: list[Tensor],
    causal: bool,
    see: See,
    found: dict[str, Tensor],
    scale: float | None = None,
) -> None:
    exact_output, exact = definition([t.double() for t in tensors], causal, see, scale)
    plain_output, plain = definition(tensors, causal, see, scale)
    for name, value in found.items():
        if name == "output":
            close(name, value, exact_output, plain_output)
        else:
            close(name, value, getattr(exact, name), getattr(plain, name))


RISES = ((0.0, 0.0), (2.0, 0.0), (9.0, 0.0), (0.0, 9.0), (3.0, 300.0))
SCALES = (0.0, 1e-30, 1 / 64, 1.0, 3.0)
LENGTHS = [(256, 256), (384, 384), (257, 300), (256, 320), (256, 512), (520, 520)]


@pytest.fixture
def memory_of_nan() -> Iterator[None]:
    """Fill new memory with NaN, so that a test fails if a kernel leaves a result unwritten."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    ("lengths", "width", "causal", "dtype"),
    cases(
        list(product(LENGTHS, (64, 128), (False, True), DTYPES)),
        [
            ((256, 256), 64, False, torch.float16),
            ((384, 384), 64, True, torch.float16),
            ((257, 300), 128, True, torch.float16),
            ((257, 300), 64, False, torch.float16),
            ((256, 512), 128, False, torch.float16),
        ],
        pairwise(LENGTHS, (64, 128), (False, True), DTYPES),
    ),
)
def test_forward_is_the_definition(lengths, width, causal, dtype) -> None:
    tensors = [t.to(dtype) for t in inputs(lengths, width)]
    wanted = set(ROWS)
    if not causal and lengths[1] % 128:
        wanted -= {"distance"}
    found, _ = forward(*tensors, structure(causal, width), wanted)
    see = See(**dict.fromkeys(ROWS, True))
    check(tensors, causal, see, found)


def test_forward_reads_heads_that_lie_beside_each_other_and_many_blocks() -> None:
    tensors = [t.to(DTYPES[0]) for t in inputs((512, 512), 64, (4, 2), beside)]
    for causal in (False, True):
        found, _ = forward(*tensors, structure(causal, 64), set(ROWS))
        check(tensors, causal, See(**dict.fromkeys(ROWS, True)), found)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    ("lengths", "grid", "causal", "programs"),
    cases(
        SHARED := [
            ((640, 640), (5, 5), False, 3),
            ((640, 640), (5, 5), True, 5),
            ((300, 900), None, False, 5),
            ((300, 900), None, True, 3),
            ((1024, 1280), (4, 5), False, 3),
            ((1024, 1280), (4, 5), True, 7),
            ((1024, 1024), (64, 64), True, 5),  # zeros where no query attends
            ((1024, 1024), (4, 64), True, 5),
            ((1024, 1024), (16, 16), True, 5),  # bins in two parts
        ],
        [SHARED[1], SHARED[2]],
    ),
)
def test_programs_share_the_last_items(lengths, grid, causal, programs, monkeypatch) -> None:
    """A share may lie in one block, or in two with whole blocks between them.

    Blocks of a causal call are not shared: its last blocks are single items.
    """
    set_processors(monkeypatch, programs)
    tensors = [t.to(DTYPES[0]) for t in inputs(lengths, 64)]
    form = structure(causal, 64)
    rows = set(ROWS) - ({"distance"} if lengths[1] % 128 else set())
    columns = {"received", "map", "map_peak"} if grid else {"received"}
    see = See(**dict.fromkeys(ROWS, True), received=True, map=grid, map_peak=grid is not None)
    sharing, dealt = plan.share_steps, []
    for more in (0,) if causal else (0, 1, 2):

        def shared(*given, more: int = more) -> plan.Work:  # type: ignore[no-untyped-def]
            work = sharing(*given)
            dealt.append(work._replace(share=work.share + more))
            return dealt[-1]

        monkeypatch.setattr(hopper_launch, "share_steps", shared)
        found, left = forward(*tensors, form, rows | columns, 8, grid)
        left = plan.Intermediates(left.neg_lse)
        found |= columns_of(*tensors[:2], found["lse"], form, columns, grid, left)
        check(tensors, causal, see, found)
    assert any(work.split_items for work in dealt) != causal


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("programs", [2, 5])
@pytest.mark.parametrize(("causal", "blocks"), [(False, 3), (True, 1), (True, 4), (True, 5)])
def test_every_block_is_dealt_out_once(causal, blocks, programs, by_keys) -> None:
    """With a causal mask, the short blocks are at the end."""
    roles = gluon_on_cpu.load("regard.kernels.hopper").modules["pipeline"]
    heads = 6
    a_head = -(-blocks // 2) if causal else blocks
    single_items = programs if causal and blocks % 2 == 0 else 0
    work = plan.Work(heads * a_head, blocks, heads, 1, programs, single_items)
    dealt = []
    for number in range(work.items + work.single_items):
        item = roles.item_at(gluon_on_cpu.Block(number), work, causal, by_keys, False)
        for half in range(int(item[2])):
            flat, block = roles.block_of(item, half, work)
            dealt.append((int(flat), int(block)))
    assert sorted(dealt) == [(flat, block) for flat in range(heads) for block in range(blocks)]
    middle = not causal and work.items >= 4 * programs
    assert dealt[0][0] == ((heads // 2 if middle else heads - 1) if by_keys else 0)
    if single_items:
        last = dealt[-2 * single_items :]
        lengths = [blocks - block if by_keys else block + 1 for _, block in last]
        assert min(lengths[:single_items]) > max(lengths[single_items:])


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize("width", cases([64, 128], [64]))
def test_the_columns_pass_begins_with_heads_that_are_done(width) -> None:
    programs = passes.device_facts(DEVICE).processors
    heads = 8 * programs
    tensors = [t.to(DTYPES[0]) for t in inputs((256, 256), width, (heads, heads), batch=1)]
    form, columns = structure(False, width), {"received", "map", "map_peak"}
    early = planned(*tensors[:2], form, columns, (16, 16)).early_heads
    assert len(early) == programs
    results, left = forward(*tensors, form, set(ROWS) | columns, 0, (16, 16))
    lse, counters = results["lse"], left.work_counters
    assert counters is not None
    done = (counters[plan.COUNTERS :] - counters[1]).tolist()
    assert done == [2 if head in early else 0 for head in range(heads)]
    alone = plan.Intermediates(left.neg_lse)
    expected = columns_of(*tensors[:2], lse, form, columns, (16, 16), alone)
    for count in (2, 1):  # all blocks of each head are done, or all but one
        counters[plan.COUNTERS + early.start :][: len(early)] = counters[1] + count
        again = replace(left, work_counters=counters.clone())
        found = columns_of(*tensors[:2], lse, form, columns, (16, 16), again)
        for name in columns:
            assert torch.equal(found[name], expected[name]), name


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize("width", cases([64, 128], [64]))
def test_as_many_programs_share_a_block_as_can(width, monkeypatch) -> None:
    set_processors(monkeypatch, 7)
    tensors = [t.to(DTYPES[0]) for t in inputs((256, 2560), width, (8, 4), batch=1)]
    work = plan.work_for(planned(*tensors[:2], structure(False, width)).problem, 256, 128)
    work = plan.share_steps(work, 2560 // 128)
    assert (work.split_items, work.share) == (2, 6)  # the last block begins inside a share
    found, left = forward(*tensors, structure(False, width), set(ROWS), 8)
    monkeypatch.setattr(plan, "MIN_STEPS_SAVED", 10**9)
    plan.plan_for.cache_clear()
    _, uncut = forward(*tensors, structure(False, width), set(ROWS), 8)
    # Both thresholds are rounded, relative to different scores near the row's highest.
    apart = (left.top_threshold - uncut.top_threshold).abs()
    assert (apart <= 0.02 * (found["lse"].max() / width**-0.5 - uncut.top_threshold)).all()
    check(tensors, False, See(**dict.fromkeys(ROWS, True)), found)


@pytest.mark.parametrize(
    ("scale", "causal", "width"),
    cases(
        list(product(SCALES, (False, True), (64, 128))),
        [(0.0, False, 64), (1e-30, True, 128), (1 / 64, False, 128), (3.0, True, 64)],
        pairwise(SCALES, (False, True), (64, 128)),
    ),
)
def test_forward_masks_at_any_scale(scale: float, causal: bool, width: int) -> None:
    tensors = [t.to(DTYPES[0]) for t in inputs((256, 300), width)]
    wanted = set(ROWS) if causal else set(ROWS) - {"distance"}
    found, _ = forward(*tensors, structure(causal, width, scale), wanted)
    check(tensors, causal, See(**dict.fromkeys(ROWS, True)), found, scale)


@pytest.mark.sweep
def test_forward_is_exact_where_one_weight_is_nearly_all() -> None:
    """The kernel rounds this weight for the output, and corrects the sum of weights accordingly."""
    query, key, value = (t.bfloat16() for t in inputs((1024, 1024), 128, (8, 2)))
    tensors = [query * 1.5, key, value.sign() * 1.9]  # rounding errors are largest just below 2
    found, _ = forward(*tensors, structure(False, 128, 1.0), {"peak"})
    check(tensors, False, See(lse=True, peak=True), found, 1.0)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    ("steps", "causal"),
    cases(
        list(product(RISES, (False, True))),
        [((2.0, 0.0), False), ((9.0, 0.0), True), ((3.0, 300.0), False)],
    ),
)
def test_forward_follows_scores_that_rise(steps: tuple[float, float], causal: bool) -> None:
    """Scores rise from tile to tile, in the kernel's order, by less than SLACK or by more.

    The scores of some queries rise, and those of others fall.
    """
    query, key, value = inputs((512, 512), 128)
    query[..., 0] = torch.linspace(-1, 1, 512, device=DEVICE)
    key[..., 0] = 0
    for tile, step in enumerate((0.0, steps[0], sum(steps), 2 * sum(steps))):
        at = 3 - tile if causal else tile
        key[:, :, 128 * at : 128 * (at + 1), 0] = step * 128**0.5
    tensors = [t.to(DTYPES[0]) for t in (query, key, value)]
    found, _ = forward(*tensors, structure(causal, 128), set(ROWS))
    check(tensors, causal, See(**dict.fromkeys(ROWS, True)), found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_counters_are_the_same_whatever_the_default_dtype(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        counters = hopper_launch._new_counters(torch.empty(0, device=DEVICE), 3)
    finally:
        torch.set_default_dtype(torch.float32)
    assert counters.tolist() == [sizes.UNSET_COUNTER] * 3
    assert counters.dtype == torch.int32


def test_forward_gives_what_is_asked_for_and_no_more() -> None:
    tensors = [t.to(DTYPES[0]) for t in inputs((256, 256), 64)]
    found, _ = forward(*tensors, structure(True, 64), {"peak"})
    assert set(found) == {"output", "lse", "peak"}


# Lengths and grids. The comments name the bins in tiles of 128 queries, and the columns in units of
# 16 keys or 8.
GRIDS = [
    ((256, 256), (2, 16)),  # one tile per bin
    ((512, 512), (2, 4)),  # two tiles per bin
    ((512, 512), (2, 32)),  # two tiles per bin, columns of one unit
    ((256, 384), (4, 24)),  # two bins per tile, each in two parts
    ((256, 256), (8, 8)),  # four bins per tile, with interleaved queries
    ((256, 512), (16, 32)),
    ((512, 512), (64, 64)),  # sixteen bins per tile, columns of 8 keys
    ((384, 384), (24, 24)),  # eight bins per tile, half a block past the last key
    ((256, 320), (2, 5)),  # more keys than queries, columns of several units
    ((256, 512), (4, 8)),
    ((512, 640), (2, 5)),
    ((256, 2048), (2, 1)),  # a column that is pooled in several steps
]


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    ("grid", "width", "causal", "layout"),
    cases(
        list(product(GRIDS, (64, 128), (False, True), (headed, beside))),
        [
            (grid, (64, 128)[at % 2], at % 3 > 0, (headed, beside)[at // 2 % 2])
            for at, grid in enumerate(GRIDS)
        ],
        pairwise(GRIDS, (64, 128), (False, True), (headed, beside)),
    ),
)
def test_columns_are_the_definition(grid, width, causal, layout) -> None:
    lengths, cells = grid
    query, key, value = (t.to(DTYPES[0]) for t in inputs(lengths, width, layout=layout))
    see = See(lse=True, received=True, map=cells, map_peak=True)
    _, exact = definition([query.double(), key.double(), value.double()], causal, see)
    wanted = {"received", "map", "map_peak"}
    found = columns_of(query, key, exact.lse.float(), structure(causal, width), wanted, cells)
    check([query, key, value], causal, see, found)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    ("lengths", "grid", "width"),
    cases(
        LEFT := [
            (*grid, width)
            for grid in (*GRIDS[:1], *GRIDS[4:7], ((257, 300), None), ((384, 384), None))
            for width in (64, 128)
        ],
        LEFT[::3],
    ),
)
def test_forward_leaves_what_columns_would_make(lengths, grid, width) -> None:
    tensors = [t.to(DTYPES[0]) for t in inputs(lengths, width)]
    fields = {"received"} if grid is None else {"map"}
    found, left = forward(*tensors, structure(True, width), fields, 0, grid)
    bins = plan.place_bins(plan.Layout.of(tensors[0]), lengths[1], grid)
    expected = hopper_launch.order_neg_lse(found["lse"], bins, width)
    torch.testing.assert_close(left.neg_lse.flatten(), expected.flatten(), rtol=1e-6, atol=1e-6)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    ("lengths", "width", "causal"),
    cases(
        list(product([*LENGTHS, (1000, 1300)], (64, 128), (False, True))),
        [((256, 256), 128, False), ((257, 300), 64, True), ((256, 320), 64, False)],
        pairwise([*LENGTHS, (1000, 1300)], (64, 128), (False, True)),
    ),
)
def test_what_keys_receive_needs_no_bins(lengths, width, causal) -> None:
    query, key, value = (t.to(DTYPES[0]) for t in inputs(lengths, width))
    _, exact = definition([query.double(), key.double(), value.double()], causal, See(lse=True))
    found = columns_of(query, key, exact.lse.float(), structure(causal, width), {"received"})
    check([query, key, value], causal, See(received=True), found)


def differentiated(
    tensors: list[Tensor], grad: Tensor, causal: bool, grid: tuple[int, int] | None
) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Return the gradients and the sums over queries, both from the backward pass."""
    form = structure(causal, tensors[0].shape[3])
    wanted = {"received"} if grid is None else {"received", "map", "map_peak"}
    made = planned(*tensors[:2], form, wanted, grid, 0, tensors[2])
    assert plan.why_not_backward(made.problem) is None
    results, left = forward(*tensors, form, wanted, 0, grid)
    found = hopper_launch.new_columns(*tensors[:2], made)
    grads = hopper_launch.backward(
        *tensors, results["output"], grad, form, made, found, left.neg_lse
    )  # fmt: skip
    return grads, found


class Rounded(torch.autograd.Function):
    """Round numbers and their gradients to another precision."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype) -> Tensor:  # type: ignore[no-untyped-def]
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[no-untyped-def]
        return grad.to(ctx.dtype).to(grad.dtype), None


def close_gradients(
    tensors: list[Tensor], grad: Tensor, causal: bool, found: tuple[Tensor, ...]
) -> None:
    """Check that errors are at most three times those of plain PyTorch in the same precision.

    Plain PyTorch rounds after every step. Here float32 is rounded, which is faster on a CPU.
    """
    queries, keys = (t.shape[2] for t in tensors[:2])
    hidden = ~torch.ones(queries, keys, dtype=torch.bool, device=DEVICE).tril(keys - queries)

    def plain(dtype: torch.dtype, step: torch.dtype) -> tuple[Tensor, ...]:
        leaves = [t.detach().to(dtype).requires_grad_() for t in tensors]
        query, key, value = (Rounded.apply(t, step) for t in leaves)
        scores = Rounded.apply(query @ key.transpose(2, 3), step)
        scores = Rounded.apply(scores * query.shape[3] ** -0.5, step)
        if causal:
            scores = scores.masked_fill(hidden, -torch.inf)
        output = Rounded.apply(Rounded.apply(scores.softmax(-1), step) @ value, step)
        return torch.autograd.grad(output, leaves, grad.to(dtype))

    exact, rough = plain(torch.float64, torch.float64), plain(torch.float32, grad.dtype)
    for name, got, true, low in zip(("query", "key", "value"), found, exact, rough, strict=True):
        error, allowed = (got - true).abs().max(), (low - true).abs().max()
        assert error <= 3 * allowed, f"{name}: error {error:.2e}, PyTorch's {allowed:.2e}"


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    ("lengths", "grid", "causal", "layout", "width", "dtype"),
    cases(
        BACKWARD := [
            *((*grid, True, beside, *rest) for grid, *rest in product(GRIDS, (64, 128), DTYPES)),
            *(
                (*grid, False, headed, *rest)
                for grid, *rest in product(GRIDS[::3], (64, 128), DTYPES)
            ),
            *product(LENGTHS[1:2], (None,), (False, True), (headed,), (64, 128), DTYPES),
            *product(LENGTHS[2:4], (None,), (True,), (headed,), (64, 128), DTYPES),
            *product(LENGTHS[:1], ((4, 32),), (False, True), (among_others,), (64, 128), DTYPES),
        ],
        [case for at, case in enumerate(BACKWARD) if at % 5 == 0],
        [case for at, case in enumerate(BACKWARD) if at % 2 == at // 2 % 2 or at % 5 == 0],
    ),
)
def test_backward_is_the_definition(lengths, grid, causal, layout, width, dtype) -> None:
    tensors = [t.to(dtype) for t in inputs(lengths, width, (2, 2), layout)]
    grad = headed(2, 2, lengths[0], width, 7).to(dtype)  # laid out unlike the queries
    grads, found = differentiated(tensors, grad, causal, grid)
    see = See(received=True) if grid is None else See(received=True, map=grid, map_peak=True)
    check(tensors, causal, see, found)
    close_gradients(tensors, grad, causal, grads)


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    ("layout", "grid"),
    cases(
        [(headed, None), (headed, (4, 32)), (headed, (8, 8)), (among_others, (4, 32))],
        [(headed, (8, 8)), (among_others, (4, 32))],
    ),
)
def test_backward_takes_gradients_that_lie_anyhow(layout, grid) -> None:
    """The copy engine cannot copy most layouts, as of gradients of a sum or of part of a tensor."""
    tensors = [t.to(DTYPES[0]) for t in inputs((256, 256), 64, (2, 2), layout)]
    grad = headed(2, 2, 256, 64, 7).to(DTYPES[0])
    expected, _ = differentiated(tensors, grad, True, grid)
    whole = torch.stack((grad, grad), -1)
    shifted = torch.cat((grad.new_zeros(3), grad.flatten()))[3:].view(grad.shape)
    for same in (whole[..., 1], shifted, grad.transpose(1, 2).contiguous().transpose(1, 2)):
        found, _ = differentiated(tensors, same, True, grid)
        for got, true in zip(found[1:], expected[1:], strict=True):
            assert torch.equal(got, true)
    one = torch.ones((), dtype=DTYPES[0], device=DEVICE).expand(2, 2, 256, 64)
    found, _ = differentiated(tensors, one, True, grid)
    close_gradients(tensors, one, True, found)


def test_backward_leaves_keys_that_need_a_mask_to_others() -> None:
    tensors = [t.to(DTYPES[0]) for t in inputs((300, 300), 64, (2, 2))]
    query, key, value = tensors
    problems = [planned(query, key, structure(c, 64), value=value).problem for c in (True, False)]
    assert plan.why_not_backward(problems[0]) is None
    assert "a multiple of 128 keys" in (plan.why_not_backward(problems[1]) or "")


@pytest.fixture
def taken_for_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan as if cuDNN were available, also where it is not."""
    if not CUDA:
        monkeypatch.setattr(passes, "_cudnn", lambda device: True)


NAMES = ("received", "map", "map_peak")


def deferring(
    causal: bool,
) -> tuple[list[Tensor], dict[str, Tensor], Callable[[], None], DeferredColumns]:
    leaves = [t.to(DTYPES[0]).requires_grad_() for t in inputs((256, 256), 64, (2, 2))]
    wanted = plan.Wanted(("entropy", *NAMES), (8, 8))
    # Clones can be changed in place; leaves that require gradients cannot.
    clones = [t.clone() for t in leaves]
    found, compute = autograd.attend(*clones, structure(causal, 64), wanted, hopper=True)
    assert compute is not None
    deferred: DeferredColumns = found["map"].grad_fn.deferred  # type: ignore[union-attr]
    assert set(deferred.fields) == set(NAMES)
    return leaves, found, compute, deferred


@pytest.mark.usefixtures("taken_for_plain")
@pytest.mark.parametrize("causal", [False, True])
def test_columns_are_deferred_until_they_are_read_or_the_backward_pass_runs(causal) -> None:
    leaves, looked_at_first, compute, deferred = deferring(causal)
    compute()
    assert not deferred.fields
    see = See(received=True, map=8, map_peak=True)
    check(leaves, causal, see, {name: looked_at_first[name].detach() for name in NAMES})

    leaves, found, compute, deferred = deferring(causal)
    grad = torch.ones_like(found["output"])
    got = torch.autograd.grad(found["output"], leaves, grad)
    assert not deferred.fields
    compute()  # returns at once, although the graph has been freed
    for name in NAMES:
        torch.testing.assert_close(found[name], looked_at_first[name], rtol=1e-5, atol=1e-6)
    close_gradients(leaves, grad, causal, got)


@pytest.mark.usefixtures("taken_for_plain")
def test_deferred_columns_have_a_gradient_as_other_fields() -> None:
    see = See(received=True, map=8, map_peak=True, entropy=True)
    leaves, found, compute, deferred = deferring(True)
    compute()
    loss = found["received"].square().sum() + found["entropy"].sum() + found["map"].square().sum()
    got = torch.autograd.grad(loss, leaves[:2])

    def true(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [t.detach().to(dtype).requires_grad_() for t in leaves]
        _, seen = definition(given, True, see)
        loss = seen.received.square().sum() + seen.entropy.sum() + seen.map.square().sum()
        return torch.autograd.grad(loss, given[:2])

    for one, exact, plain in zip(got, true(torch.float64), true(DTYPES[0]), strict=True):
        assert (one - exact).abs().max() <= 3 * (plain - exact).abs().max()

    leaves, found, compute, deferred = deferring(True)
    torch.autograd.grad(found["entropy"].sum(), leaves[:2])  # computed by the Triton kernels
    assert not deferred.fields
    check(leaves, True, see, {"received": found["received"].detach()})


@pytest.mark.usefixtures("taken_for_plain")
def test_deferred_columns_cannot_be_computed_from_changed_queries() -> None:
    leaves = [t.to(DTYPES[0]).requires_grad_() for t in inputs((256, 256), 64, (2, 2))]
    query, key, value = (t.clone() for t in leaves)
    wanted = plan.Wanted(("entropy", "received"))
    _, compute = autograd.attend(query, key, value, structure(True, 64), wanted, hopper=True)
    query.mul_(2)
    with pytest.raises(BackendError, match="received: cannot be computed, because query or key"):
        compute()


@pytest.mark.usefixtures("taken_for_plain")
def test_nothing_is_deferred_where_hooks_save_tensors() -> None:
    """With checkpointing, each read of a saved tensor would recompute its region."""
    leaves = [t.to(DTYPES[0]).requires_grad_() for t in inputs((256, 256), 64, (2, 2))]
    wanted = plan.Wanted(("entropy", *NAMES), (8, 8))
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        found, compute = autograd.attend(*leaves, structure(True, 64), wanted, hopper=True)
    assert compute is None
    see = See(received=True, map=8, map_peak=True)
    check(leaves, True, see, {name: found[name].detach() for name in NAMES})


@pytest.mark.usefixtures("taken_for_plain")
def test_deferred_columns_hold_no_graph() -> None:
    """An autograd node that held its own results would never be freed."""
    _, found, _, deferred = deferring(True)
    held = (*deferred.fields.values(), deferred.neg_lse)
    assert all(tensor.grad_fn is None for tensor in held)
    gone = weakref.ref(deferred)
    del deferred, found, _
    assert gone() is None


@pytest.mark.usefixtures("taken_for_plain")
def test_a_call_with_gradients_defers_fields_of_seen() -> None:
    leaves = [t.to(DTYPES[0]).requires_grad_() for t in inputs((256, 256), 64, (2, 2))]
    see = See(entropy=True, received=True, map=8)
    call = arguments(*leaves, Causal(), None, None, None, 0.0, see)
    output, seen = hopper_backend.run(call)
    assert isinstance(seen, Deferred)
    deferred = output.grad_fn.deferred  # type: ignore[union-attr]
    check(leaves, True, see, {"entropy": seen.entropy.detach()})
    assert deferred.fields
    check(leaves, True, see, {"received": seen.received.detach(), "map": seen.map.detach()})
    assert not deferred.fields
    seen.received.div_(2)  # ``received`` now has another autograd node
    assert seen.map is not None
    with torch.no_grad():
        assert type(hopper_backend.run(call)[1]) is Seen
    # The backend 'triton' uses only its own kernels.
    assert not isinstance(triton_backend.run(call)[1], Deferred)


def highest(
    tensors: list[Tensor],
    causal: bool,
    count: int,
    forwarded: tuple[dict[str, Tensor], plan.Intermediates] | None = None,
) -> dict[str, Tensor]:
    """Find the top keys from the thresholds of the forward pass."""
    query, key, value = tensors
    form = structure(causal, query.shape[3])
    results, left = forwarded or forward(query, key, value, form, (), count)
    left = plan.Intermediates(top_threshold=left.top_threshold)
    made = planned(query, key, form, (), None, count, value)
    assert made.top is not None
    assert made.top.variant == "hopper"
    return passes.top(query, key, results["lse"], form, made, left)


def without_search(
    tensors: list[Tensor],
    forwarded: tuple[dict[str, Tensor], plan.Intermediates],
    form: plan.Structure,
) -> tuple[dict[str, Tensor], Tensor]:
    """Run the pass for 8 top keys, not the search; return what it writes over sevens, and marks."""
    query, key, value = tensors
    shape = query.shape[:3]
    weights = torch.full((*shape, 8), 7.0, device=DEVICE)
    found = {"top_weights": weights, "top_keys": weights.to(torch.int64)}
    left = torch.full(shape, 7, device=DEVICE, dtype=torch.int8)
    made = planned(query, key, form, (), None, 8, value)
    threshold = plan.Intermediates(top_threshold=forwarded[1].top_threshold)
    hopper_launch.top(query, key, forwarded[0]["lse"], form, made, threshold, found, left)
    return found, left


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize(
    ("lengths", "width", "causal", "count"),
    cases(
        [
            *product(LENGTHS, (64, 128), (False, True), (8,)),
            *product(LENGTHS[2:3], (64,), (True,), (1, 5)),
        ],
        [
            ((256, 256), 64, False, 8),
            ((257, 300), 64, True, 5),
            ((257, 300), 128, False, 8),
            ((384, 384), 128, True, 8),
        ],
        [
            *pairwise(LENGTHS, (64, 128), (False, True), (8,)),
            *product(LENGTHS[2:3], (64,), (True,), (1, 5)),
        ],
    ),
)
def test_top_keys_are_the_definition(lengths, width, causal, count) -> None:
    tensors = [t.to(DTYPES[0]) for t in inputs(lengths, width)]
    found = highest(tensors, causal, count)
    _, exact = definition([t.double() for t in tensors], causal, See(top=count, weights=True))
    close("top_weights", found["top_weights"], exact.top.weights, exact.top.weights)
    # Keys with nearly equal weights may be in any order.
    chosen = found["top_keys"]
    assert torch.equal(chosen < 0, exact.top.keys < 0)
    weights = exact.weights.gather(-1, chosen.clamp(min=0)).masked_fill(chosen < 0, 0.0)
    assert (weights - exact.top.weights).abs().max() < 1e-6
    assert all(len(set(row)) == len(row) for row in chosen[chosen[..., -1] >= 0].tolist())


@pytest.mark.usefixtures("memory_of_nan")
@pytest.mark.parametrize("causal", cases([False, True], [True]))
def test_top_keys_that_do_not_fit_are_searched_for(
    causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The keys are equal, so more scores reach the threshold than fit."""
    set_processors(monkeypatch, 2)
    query, key, value = (t.to(DTYPES[0]) for t in inputs((256, 512), 64, batch=1))
    key[:, :, 64:] = key[:, :, :1]
    tensors = [query, key, value]
    found = highest(tensors, causal, 8)
    _, exact = definition([t.double() for t in tensors], causal, See(weights=True))
    best = (exact.weights * 1e9).round().sort(dim=-1, descending=True, stable=True).indices[..., :8]
    assert torch.equal(found["top_keys"], best)  # of equal scores, the earlier keys
    weights = exact.weights.gather(-1, best)
    close("top_weights", found["top_weights"], weights, weights)


@pytest.mark.parametrize("near", [-3.0, 0.0, 2.0])
def test_the_eighth_highest_is_nearly_found(near: float) -> None:
    order = gluon_on_cpu.load("regard.kernels.hopper").modules["sorting"]
    numbers = torch.randint(-40, 40, (64, 4, 8)).float() - 1000  # some are equal
    numbers = torch.where(torch.rand_like(numbers) < 0.3, numbers, numbers + torch.rand(64, 4, 8))
    eighth = numbers.flatten(1).sort(dim=1, descending=True).values[:, 7, None]
    reference = numbers.amax((1, 2)) + near
    found = order.eighth_highest(*map(gluon_on_cpu.Block, (numbers, reference))).data
    assert found.shape == (64, 4)
    assert (found <= eighth).all()
    assert (eighth - found <= 1e-4 + 0.016 * (eighth - reference[:, None]).abs()).all()


@pytest.mark.parametrize("real", [16, 9, 8, 3, 0])
def test_the_eight_highest_are_found_unless_some_are_too_near(real: int) -> None:
    order = gluon_on_cpu.load("regard.kernels.hopper").modules["sorting"]
    numbers = torch.randn(64, 16)
    numbers[:, real:] = -3.0e38  # the value of empty entries
    numbers = numbers[torch.arange(64)[:, None], torch.rand(64, 16).argsort(1)]
    highest, places = numbers.sort(dim=1, descending=True)
    # In every second row, two numbers that are neighbours in descending order are equal.
    equal = torch.arange(64) % 2 == 0
    lower = torch.arange(64) // 2 % 9
    numbers[equal, places[equal, lower[equal]]] = highest[equal, lower[equal] + 1]
    found, near = order.eight_highest(gluon_on_cpu.Block(numbers.view(64, 2, 8)))
    # Only the eight highest must be in order, so the ninth and tenth may be equal.
    assert torch.equal(near.data.any(1), equal & (lower < 8) & (lower + 1 < real))
    sure = ~near.data.any(1)
    kept = numbers.gather(1, found.data.view(64, 8).long())
    best = numbers.sort(dim=1, descending=True).values[:, :8]
    assert torch.equal(kept[sure], best[sure])
    assert all(len(set(row.tolist())) == 8 for row in found.data.view(64, 8))


@pytest.mark.parametrize(
    ("alike", "dense"),
    cases(
        list(product((range(10), range(7, 9), range(0)), (False, True))),
        [(range(10), True), (range(7, 9), False)],
    ),
)
def test_top_keys_are_in_order_however_close(alike: range, dense: bool) -> None:
    """Scores differ by one part in a million. If dense, they are neighbours, four to a thread."""
    keys, queries, width = 512, 256, 64
    chance = torch.Generator().manual_seed(0)
    key = torch.zeros(keys, width)
    places = torch.randperm(16 if dense else keys, generator=chance)[:10]
    coarse = torch.tensor([16 if at in alike else 24 - at for at in range(10)])
    key[places, 0] = coarse + 8.0 * (coarse > 16) - 8.0 * (coarse < 16)
    key[places, 1] = torch.randperm(10, generator=chance) / 8.0
    query = torch.zeros(queries, width)
    query[:, 0], query[:, 1] = 1.0, 2.0**-14
    tensors = [t.expand(2, 2, -1, -1).to(DEVICE, DTYPES[0]).contiguous() for t in (query, key, key)]
    found = highest(tensors, False, 8)
    scores = (query[0].double() @ key.double().T)[places]
    best = places[scores.argsort(descending=True)][:8].to(DEVICE)
    assert torch.equal(found["top_keys"], best.expand_as(found["top_keys"]))


@pytest.mark.parametrize("row", cases([100, 255], [255]))
def test_infinite_scores_stay_in_their_row(row: int, monkeypatch: pytest.MonkeyPatch) -> None:
    set_processors(monkeypatch, 2)
    query, key, value = (t.to(DTYPES[0]) for t in inputs((256, 1024), 64, batch=1))
    plain = highest([query, key, value], False, 8)
    query = query.clone()
    query[0, 0, row, 0] = torch.inf
    found = highest([query, key, value], False, 8)
    others = torch.ones(query.shape[:3], dtype=torch.bool, device=DEVICE)
    others[0, 0, row] = False
    for name, tensor in found.items():
        assert torch.equal(tensor[others], plain[name][others]), name

    # The row that shares its slots need not be searched again either.
    form = structure(False, 64)
    forwarded = forward(query, key, value, form, (), 8)
    _, left = without_search([query, key, value], forwarded, form)
    assert torch.equal(left == 0, others)


# Numbers of candidates in each lane of a row, up to and above what fits a thread or a list.
CROWDS = [
    (2, 2, 2, 2), (9, 2, 2, 2), (2, 10, 2, 2), (4, 4, 4, 4), (4, 5, 4, 4), (11, 11, 0, 0),
    (0, 12, 0, 11), (12, 0, 0, 0), (17, 0, 0, 4), (0, 18, 0, 4), (10, 10, 10, 10), (20, 20, 0, 0),
    (12, 8, 4, 0), (7, 7, 7, 7), (7, 7, 8, 7),
]  # fmt: skip


def crowded(crowd: tuple[int, ...], keys: int, seed: int) -> Tensor:
    """Scores with ``crowd[i]`` candidates in lane i, each in a different cell of 32 keys."""
    chance = torch.Generator().manual_seed(seed)
    scores = -1 - torch.randint(0, 4096, (keys,), generator=chance) / 1024
    high = 1 + torch.randperm(128, generator=chance)[: sum(crowd)].sort().values / 128
    lowest, others = high[0], high[1:][torch.randperm(sum(crowd) - 1, generator=chance)].tolist()
    lanes = [lane for lane, many in enumerate(crowd) if many]
    for lane in lanes:
        # Eight sets have a candidate. The threshold is the lowest one, alone in its set.
        sets = [0, 1, 8, 9, 16, 17, 24, 25][: 8 // len(lanes)]
        cells = torch.randperm(keys // 32, generator=chance)[: crowd[lane]].tolist()
        if lane == lanes[0]:
            scores[32 * cells.pop() + 2 * lane + sets.pop()] = lowest
        for at, cell in enumerate(cells):
            scores[32 * cell + 2 * lane + sets[at % len(sets)]] = others.pop()
    return scores


@pytest.mark.sweep
def test_room_for_top_keys_ends_where_it_should(monkeypatch: pytest.MonkeyPatch) -> None:
    set_processors(monkeypatch, 2)
    choose = gluon_on_cpu.load("regard.kernels.hopper").modules["top"]
    keys, queries, width = 1024, 256, 128
    # A query scores one column of the keys. In the first 128 rows, this is the column of the query
    # eight rows below, which shares its slots; in later rows it is another column.
    row = torch.arange(queries)
    whose = torch.where(row < 128, row // 16 * 8 + row % 8, row % width)
    column = [crowded(CROWDS[at % len(CROWDS)], keys, at) for at in range(width)]
    key = torch.stack(column, -1).expand(1, 2, -1, -1).to(DEVICE, DTYPES[0]).contiguous()
    query = 8.0 * torch.nn.functional.one_hot(whose, width)
    query = query.expand(1, 2, -1, -1).to(DEVICE, DTYPES[0]).contiguous()
    tensors = [query, key, torch.randn_like(key)]
    form = structure(False, width)
    forwarded = forward(*tensors, form, (), 8)
    threshold = forwarded[1].top_threshold
    picked = highest(tensors, False, 8, forwarded)
    scores = (query.double() @ key.double().mT)[0, 0]
    best = scores.sort(dim=-1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(picked["top_keys"], best.expand_as(picked["top_keys"]))

    # Without the search, exactly the rows that are marked for it are incomplete.
    some, left = without_search(tensors, forwarded, form)
    rows = 2 * queries  # of both heads, whose thresholds may differ in their last bits
    reach = scores.expand(2, -1, -1) >= threshold.view(2, queries, 1)
    lanes = reach.view(rows, keys // 8, 4, 2).sum((1, 3))
    both = lanes.view(rows // 16, 2, 8, 4)
    many, more = both.sum(1, keepdim=True), both.amax(1, keepdim=True)
    assert {choose.SLOTS, choose.SLOTS + 1} <= set(many.flatten().tolist())
    most = choose.SLOTS - choose.SPARE - 1  # candidates of one row in a thread
    assert {choose.USUALLY, choose.USUALLY + 1, most, most + 1} <= set(more.flatten().tolist())
    lengths = {choose.LISTED, choose.LISTED + 1, choose.MOST, choose.MOST + 1}
    assert lengths <= set(lanes.sum(1).tolist())
    lost = ((many > choose.SLOTS) | (more > most)).any(3)  # for two rows that share slots
    expected = lost.expand(-1, 2, -1).reshape(rows) | (lanes.sum(1) > choose.MOST)
    expected = expected.view_as(left)
    assert torch.equal(left, expected.to(torch.int8))
    for name, tensor in some.items():
        assert torch.equal(tensor[~expected], picked[name][~expected]), name


@pytest.mark.skipif(CUDA, reason="On a GPU, shared memory begins where the kernels expect it.")
@pytest.mark.parametrize("causal", [False, True])
def test_all_rows_are_searched_where_shared_memory_begins_otherwise(causal, monkeypatch) -> None:
    kernels, elsewhere = hopper_launch._kernels().modules["top"], gluon_on_cpu.Block(False)
    monkeypatch.setattr(kernels, "room_begins_at", lambda *_given: elsewhere)
    query, key, value = (t.to(DTYPES[0]) for t in inputs((700, 700), 64))
    form = structure(causal, 64)
    forwarded = forward(query, key, value, form, (), 8)
    found, left = without_search([query, key, value], forwarded, form)
    assert left.eq(1).all()
    assert all(tensor.eq(7).all() for tensor in found.values())


@pytest.mark.skipif(CUDA, reason="On a GPU, shared memory begins where the kernels expect it.")
def test_the_second_pass_fails_where_shared_memory_begins_otherwise(monkeypatch) -> None:
    kernels, elsewhere = hopper_launch._kernels().modules["columns"], gluon_on_cpu.Block(False)
    monkeypatch.setattr(kernels, "room_begins_at", lambda *_given: elsewhere)
    query, key, _ = (t.to(DTYPES[0]) for t in inputs((700, 700), 64))
    lse = torch.zeros(query.shape[:3])
    with pytest.raises(AssertionError):  # it stores to address 0
        columns_of(query, key, lse, structure(False, 64), {"received"})


def test_equal_scores_are_put_in_the_order_of_their_keys() -> None:
    """Few scores are equal, so the kernel orders them itself. Other rows have longer lists."""
    keys, queries, width = 512, 256, 64
    chance = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 64, (keys, 2), generator=chance) / 64 - 4
    high = torch.randperm(keys, generator=chance)[:11]
    scores[high, 0] = torch.tensor([8.0, 7, 7, 7, 6, 5, 5, 4, 3, 3, 3])
    # Eight sets have two high scores each: keys that are 32 apart share one.
    high = torch.cat([torch.arange(8) + 32 * at for at in (9, 2)])
    scores[high, 1] = torch.tensor([2.0, 4, 6, 8, 10, 12, 14, 16, 1, 3, 5, 7, 9, 11, 13, 15])
    key = torch.zeros(2, 2, keys, width)
    key[..., :2] = scores
    query = torch.zeros(2, 2, queries, width)
    whose = (torch.arange(queries) % 3 > 0).long()
    query[:, :, torch.arange(queries), whose] = 1.0
    tensors = [t.to(DEVICE, DTYPES[0]) for t in (query, key, key)]
    best = scores.sort(dim=0, descending=True, stable=True).indices[:8, whose].T.to(DEVICE)
    form = structure(False, width)
    forwarded = forward(*tensors, form, (), 8)
    assert (scores[:, 1] >= forwarded[1].top_threshold[0, 0, 1].cpu()).sum() == 15
    found, left = without_search(tensors, forwarded, form)
    assert not left.any()
    assert torch.equal(found["top_keys"], best.expand_as(found["top_keys"]))


def test_what_runs_here_does_not_take_the_place_of_the_kernels() -> None:
    """On a GPU, some tests load the kernels into the emulator and others run them on the GPU."""
    from regard import kernels

    before = sys.modules.get("regard.kernels.hopper")
    assert gluon_on_cpu.load("regard.kernels.hopper") is not before
    assert sys.modules.get("regard.kernels.hopper") is before
    assert getattr(kernels, "hopper", None) is before


def test_both_sides_agree_on_sizes() -> None:
    kernels = gluon_on_cpu.load("regard.kernels.hopper").modules
    for width in (64, 128):
        assert kernels["forward"]._partial_size(width) == hopper_launch.numbers_kept_of_a_row(width)
        assert kernels["backward"]._uses_counter(width) == (width == hopper_launch.COUNTED_BACKWARD)
        by_copy = kernels["pipeline"].neg_lse_by_copy(width)
        assert by_copy == (width == hopper_launch.NEG_LSE_BY_COPY)


def why_not(
    tensors: Sequence[Tensor],
    form: plan.Structure,
    fields: Collection[str] = (),
    top: int = 0,
    grid: tuple[int, int] | None = None,
) -> dict[str, str | None]:
    """Return the reasons against the kernels for Hopper, by pass."""
    query, key, value = tensors
    problem = planned(query, key, form, fields, grid, top, value).problem
    return {
        "forward": plan.why_not_forward(problem),
        "columns": plan.why_not_columns(problem),
        "top": plan.why_not_top(problem),
    }


def test_calls_that_do_not_fit_are_left_to_others() -> None:
    plain = structure(False, 64)
    query, key, value = given = [t.to(torch.float16) for t in inputs((256, 256), 64)]
    assert why_not(given, plain) == {"forward": None, "columns": None, "top": None}
    for reason, tensors in (
        ("more queries than keys", (query, key[:, :, :200], value[:, :, :200])),
        ("fewer than 256 queries", (query[:, :, :200], key, value)),
        ("bfloat16 or float16", (query.float(), key.float(), value.float())),
        ("one head width", (query, key, value[..., :32])),
        ("one head width", (query[..., 4:], key[..., 4:], value[..., 4:])),
        ("2 blocks do not keep 3 processors busy", [t[:1, :1] for t in given]),
        ("stride", (query, key.expand(2, 4, -1, -1), value)),
    ):
        assert reason in (why_not(tensors, plain)["forward"] or "")
    one = [t[:1, :1] for t in given]
    assert "busy" in (why_not(one, plain)["columns"] or "")
    assert "busy" in (why_not(one, plain, top=8)["top"] or "")
    repeated = (query, key[:1].expand(2, -1, -1, -1), value)
    assert "stride" in (why_not(repeated, plain)["columns"] or "")
    odd = [t.to(torch.float16) for t in inputs((256, 300), 64)]
    assert "distance" in (why_not(odd, plain, {"distance"})["forward"] or "")
    assert why_not(odd, plain, {"entropy"})["forward"] is None
    assert why_not(given, plain, {"entropy"}, 8)["top"] is None
    assert "at most 8" in (why_not(given, plain, top=9)["top"] or "")
    assert "scale" in (why_not(given, structure(False, 64, 0.0), top=8)["top"] or "")
    for grid in ((3, 4), (2, 3), (64, 64), (2, 64)):
        assert "bin" in (why_not(given, plain, {"map"}, 0, grid)["columns"] or "")
    turned = query.transpose(0, 1).contiguous().transpose(0, 1), key, value
    assert "interleaved" in (why_not(turned, plain, {"map"}, 0, (8, 8))["columns"] or "")
    assert why_not(turned, plain, {"map"}, 0, (2, 16))["columns"] is None
    assert why_not(turned, plain, {"map"}, 0, (4, 16))["columns"] is None


def test_a_plan_says_which_kernels_run_each_pass_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = (t.to(torch.float16) for t in inputs((256, 256), 64))
    form, fields = structure(True, 64), ("entropy", "received", "top_weights", "top_keys")
    made = planned(query, key, form, fields, None, 8, value)
    assert {name: choice.variant for name, choice in made.choices.items()} == dict.fromkeys(
        ("forward", "columns", "top"), "hopper"
    )
    assert set(made.buffers) == {"neg_lse", "top_threshold", "work_counters"}
    assert made.buffers["neg_lse"].readers == ("columns", "backward")
    assert made is planned(query, key, form, fields, None, 8, value)  # equal calls share one plan

    wanted = plan.Wanted(fields, (1, 1), 8)
    by_name = passes.plan_call(query, key, value, form, wanted, hopper=False)
    assert {choice.variant for choice in by_name.choices.values()} == {"triton"}
    assert "'triton'" in (by_name.forward.why_not("hopper") or "")
    assert not by_name.buffers

    wide = planned(query, key, form, (*fields, "map"), (3, 3), 9, value)
    assert wide.forward.variant == "hopper"
    for choice in (wide.columns, wide.top):
        assert choice is not None
        assert choice.variant == "triton"
    assert "bins of the map" in (wide.columns.why_not("hopper") or "")

    monkeypatch.setattr(triton_backend, "refuses", triton_backend.unsupported)  # not on a GPU here
    monkeypatch.setattr(triton_backend, "unavailable", lambda: None)
    answer = why(query, key, value, mask=Causal(), see=See(entropy=True, top=9))
    assert answer.chosen == "hopper"
    assert "top: triton; not hopper: the kernels for Hopper find at most 8 top keys." in repr(
        answer
    )


@pytest.mark.parametrize("version", ["3.5.1", "3.7.0"])
def test_hopper_says_which_triton_it_needs(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend must not be unavailable without a reason that names the version it needs."""
    monkeypatch.undo()
    monkeypatch.setattr(compat.triton, "__version__", version)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    passes.device_facts.cache_clear()
    try:
        hopper = next(backend for backend in BACKENDS if backend.name == "hopper")
        reason = hopper.unavailable()
        assert reason is not None
        assert version in reason
        assert "3.6" in reason
        properties.minor = 1
        passes.device_facts.cache_clear()
        assert "compute capability 9.1" in (hopper.unavailable() or "")
        properties.minor = 0
        monkeypatch.setattr(compat.triton, "__version__", "3.6.0")
        passes.device_facts.cache_clear()
        assert hopper.unavailable() is None
    finally:
        passes.device_facts.cache_clear()


def test_hopper_refuses_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_backend, "refuses", triton_backend.unsupported)  # not on a GPU here
    tensors = [t.to(torch.float16) for t in inputs((256, 256), 64)]

    def reason(mask=None, bias=None, softcap=None, see=None, tensors=tensors) -> str:  # type: ignore[no-untyped-def]
        see = see or See(entropy=True)
        call = arguments(*tensors, mask, bias, None, softcap, 0.0, see)
        return hopper_backend.refuses(call) or "none"

    assert reason() == reason(Causal()) == "none"
    assert "no mask but Causal()" in reason(Causal() & Window(8))
    assert "no bias" in reason(bias=Alibi(torch.ones(2)))
    assert "no softcap" in reason(softcap=30.0)
    assert "bfloat16 or float16" in reason(tensors=[t.float() for t in tensors])
    assert "fewer than 256 queries" in reason(tensors=[t[:, :, :100] for t in tensors])
    assert "one head width" in reason(tensors=[t[..., :32] for t in tensors])
    assert "processors busy" in reason(tensors=[t[:1, :1] for t in tensors])
    # One pass for Hopper is enough: here the forward pass runs on the Triton kernels.
    narrow = [*tensors[:2], tensors[2][..., :32]]
    assert reason(see=See(received=True), tensors=narrow) == "none"


COMPILED = """
import sys

from triton import compile
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource
from regard.kernels import hopper
from regard.kernels.plan import Interleave, View


def tiles(*block):
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=len(block))
    return f"tensordesc<bf16{list(block)},{layout!r}>"


flat = gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)
neg_lse = f"tensordesc<fp32[1, 128],{flat!r}>"
together = hopper.top, hopper.columns  # kernels in which one role runs all teams


built = set()


def build(kernel, given, **constants):
    if sys.argv[1] == "one" and kernel in built:
        return
    built.add(kernel)
    names = [name for name in kernel.arg_names if name not in constants]
    kinds = dict(out=View("*bf16", "i64", "i64", "i32"))
    kinds |= dict(interleave=Interleave("i32", "i32", "i32"))
    kinds |= dict(c="fp32") | {n: "*fp32" for n in names if n[0].isupper()}
    kinds |= dict(Out="*bf16", Counter="*i32", Done="*i32") | given
    signature = {name: kinds.get(name, "i32") for name in names}
    signature |= dict.fromkeys(constants, "constexpr")
    source = GluonASTSource(kernel, signature, constexprs=constants, attrs={})
    warps = {hopper.join: constants.get("D", 0) // 8, **dict.fromkeys(together, 16)}.get(kernel, 4)
    made = compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    assert ("wgmma" in made.asm["ptx"]) == ("STAGES" in constants)
    assert made.metadata.shared <= 232448, made.metadata.shared
    if kernel in together:  # barriers lie where the PTX expects them, and no team waits for another
        first, line = 90112, 1024  # the barriers begin after 88 lines
        if kernel is hopper.columns:
            width, stages = constants["D"], constants["STAGES"]
            first, line = (512 + 128 * stages) * 2 * width, 128  # they follow both rings
            first += 512 * stages * (width == 64)  # and the neg_lse of queries
        for at in range(first, first + 4 * line, line):
            assert f"@global_smem, i32 {at})" in made.asm["llir"], at
        roles = made.asm["ptx"].split("barrier.sync", 1)[1]
        assert roles.count("bar.sync") == (kernel is hopper.top)  # at its end


whole = tiles(1, 1, 128, 128)
seen = dict.fromkeys(("ENTROPY", "PEAK", "HIGHEST", "DISTANCE", "THRESHOLD", "NEG_LSE"), True)
described = dict(q_desc=whole, k_desc=whole, v_desc=whole, out_desc=tiles(1, 64, 128))
build(hopper.forward, described, D=128, STAGES=2, CAUSAL=True, EVEN=False, SPLIT=False, Done=None,
      Partials=None, **seen)
build(hopper.forward, described, D=128, STAGES=2, CAUSAL=False, EVEN=True, SPLIT=True, Done=None,
      Counter=None, **seen)
build(hopper.join, {}, D=128, **seen)
build(hopper.columns,
      dict(q_desc=tiles(4, 4, 4, 2, 64), k_desc=tiles(1, 1, 64, 64), neg_lse="*fp32"), D=128,
      STAGES=3, BINS=16, UNIT=8, LONG=False, CAUSAL=True, EVEN=True, DIAGONAL=True, RECEIVED=True,
      MAP=True, MAP_PEAK=True, DONE=True, SPLIT=False, Done=None)
build(hopper.columns,
      dict(q_desc=tiles(1, 1, 128, 64), k_desc=tiles(1, 1, 64, 64), neg_lse=neg_lse), D=64,
      STAGES=8, BINS=1, UNIT=16, LONG=True, CAUSAL=False, EVEN=True, DIAGONAL=False,
      RECEIVED=True, MAP=True, MAP_PEAK=True, DONE=False, SPLIT=True, Done=None, Counter=None)
build(hopper.columns,
      dict(q_desc=tiles(1, 1, 128, 64), k_desc=tiles(1, 1, 64, 64), neg_lse="*fp32"), D=128,
      STAGES=3, BINS=1, UNIT=16, LONG=False, CAUSAL=True, EVEN=True, DIAGONAL=False, RECEIVED=True,
      MAP=True, MAP_PEAK=True, DONE=True, SPLIT=False, Done=None)
build(hopper.columns,
      dict(q_desc=tiles(2, 8, 4, 2, 64), k_desc=tiles(1, 1, 64, 64), neg_lse=neg_lse), D=64,
      STAGES=8,
      BINS=8, UNIT=16, LONG=False, CAUSAL=True, EVEN=True, DIAGONAL=True, RECEIVED=True,
      MAP=True, MAP_PEAK=True, DONE=True, SPLIT=False, Done=None)
for width, kind in ((64, neg_lse), (128, "*fp32")):  # these begin before the forward pass has ended
    build(hopper.columns,
          dict(q_desc=tiles(1, 1, 128, 64), k_desc=tiles(1, 1, 64, 64), neg_lse=kind), D=width,
          STAGES=2, BINS=1, UNIT=16, LONG=False, CAUSAL=False, EVEN=True, DIAGONAL=False,
          RECEIVED=True, MAP=True, MAP_PEAK=True, DONE=True, SPLIT=False)
build(hopper.columns,
      dict(q_desc=tiles(1, 1, 128, 64), k_desc=tiles(1, 1, 64, 64), neg_lse=neg_lse), D=64,
      STAGES=8,
      BINS=1, UNIT=16, LONG=True, CAUSAL=True, EVEN=False, DIAGONAL=False, RECEIVED=True, MAP=True,
      MAP_PEAK=True, DONE=False, SPLIT=False, Done=None)
build(hopper.add, {})
build(hopper.reset_counters, dict(Counters="*i32"), WARPS=4)
narrow = tiles(1, 1, 128, 64)
described = dict(q_desc=narrow, k_desc=narrow, v_desc=narrow, out_desc=tiles(1, 64, 64))
build(hopper.forward, described, D=64, STAGES=2, CAUSAL=False, EVEN=True, SPLIT=False,
      Partials=None, **seen)
build(hopper.forward, described, D=64, STAGES=2, CAUSAL=True, EVEN=True, SPLIT=False, Done=None,
      Partials=None, **seen)
build(hopper.forward, described, D=64, STAGES=2, CAUSAL=False, EVEN=True, SPLIT=True, Done=None,
      Counter=None, **seen)
build(hopper.join, {}, D=64, **seen)
top = dict(q_desc=tiles(1, 1, 64, 64), k_desc=narrow, Unfinished="*i8", Keys="*i64")
build(hopper.top, top, D=128, STAGES=2, CAUSAL=True, EVEN=False, COUNT=3)
build(hopper.top, top, D=64, STAGES=4, CAUSAL=False, EVEN=True, COUNT=8)
view = View("*bf16", "i64", "i64", "i32")
dealt = tiles(1, 16, 4, 2, 64)
described = dict(q_desc=dealt, grad_desc=dealt, k_desc=narrow, v_desc=narrow, neg_lse_desc=neg_lse,
                 delta_desc=neg_lse, grad_interleave=Interleave("i32", "i32", "i32"), key_grad=view,
                 value_grad=view, scale="fp32")
build(hopper.backward, described, D=64, STAGES=2, BINS=4, UNIT=16, LONG=False, CAUSAL=True,
      RECEIVED=True, MAP=True, MAP_PEAK=True, DONE=False)
wide = tiles(1, 1, 64, 128)
short = neg_lse.replace("128", "64")
described |= dict(q_desc=wide, grad_desc=wide, k_desc=whole, v_desc=whole, neg_lse_desc=short,
                  delta_desc=short)
build(hopper.backward, described, D=128, STAGES=3, BINS=1, UNIT=16, LONG=True, CAUSAL=False,
      RECEIVED=True, MAP=True, MAP_PEAK=True, DONE=False)
build(hopper.prepare, dict(grad=view), D=128)
build(hopper.gather, dict(query_grad=view, scale="fp32"), D=128)
"""


@pytest.mark.skipif(compat.why_not_gluon() is not None, reason="Triton has another Gluon.")
@pytest.mark.processes
@pytest.mark.parametrize("variants", cases(["one", "all"], ["one"]))
def test_they_compile_for_a_hopper_where_there_is_none(variants: str) -> None:
    """Compile with ptxas too, which checks what the emulator does not, such as layouts."""
    surroundings = os.environ | {"TRITON_INTERPRET": "0"}
    subprocess.run([sys.executable, "-c", COMPILED, variants], check=True, env=surroundings)


ALL = See(
    lse=True, entropy=True, peak=True, max_logit=True, distance=True, received=True, map=8,
    map_peak=True, top=4,
)  # fmt: skip


def looked_at(*tensors: Tensor, causal: bool, backend: str = "hopper") -> dict[str, Tensor]:
    mask = Causal() if causal else None
    output, seen = attention(*tensors, mask=mask, see=ALL, backend=backend)
    return {"output": output} | seen.to_dict()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_calls_are_captured_and_compiled_and_have_gradients(causal: bool) -> None:
    tensors = [t.bfloat16() for t in inputs((512, 512), 64, (4, 2))]
    form = structure(causal, 64)
    made = planned(*tensors[:2], form, (*ROWS, "received", "map"), (8, 8), 4, tensors[2])
    assert {choice.variant for choice in made.choices.values()} == {"hopper"}
    expected = looked_at(*tensors, causal=causal)

    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = looked_at(*tensors, causal=causal)
    captured["output"].zero_()
    graph.replay()
    compiled = torch.compile(looked_at, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        from_graph = compiled(*tensors, causal=causal)
    for name, tensor in expected.items():
        assert torch.equal(captured[name], tensor), name
        assert torch.equal(from_graph[name], tensor), name

    def gradients(dtype: torch.dtype, backend: str) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in tensors]
        found = looked_at(*leaves, causal=causal, backend=backend)
        smooth = ("output", "lse", "entropy", "distance", "received", "map")
        up = [random(*found[name].shape, seed=at) for at, name in enumerate(smooth)]
        loss = sum((found[n].double() * u.double()).sum() for n, u in zip(smooth, up, strict=True))
        return list(torch.autograd.grad(loss, leaves))

    exact = gradients(torch.float64, "reference")
    plain = gradients(torch.bfloat16, "reference")
    for got, true, low in zip(gradients(torch.bfloat16, "hopper"), exact, plain, strict=True):
        assert (got - true).abs().max() <= 3 * (low - true).abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
def test_no_row_of_many_has_other_top_keys(width, causal) -> None:
    """The test has enough rows to show an error in one row of a hundred thousand."""
    tensors = [t.to(DTYPES[0]) for t in inputs((512, 512), width, (16, 16), batch=64)]
    _, seen = attention(*tensors, mask=Causal() if causal else None, see=See(top=8))
    scores = tensors[0].float() @ tensors[1].float().mT * width**-0.5
    if causal:
        scores.masked_fill_(torch.ones(512, 512, device=DEVICE).triu(1) > 0, -torch.inf)
    weights = scores.softmax(-1)
    torch.testing.assert_close(seen.top.weights, weights.topk(8).values, rtol=1e-4, atol=1e-6)
    recomputed = weights.gather(-1, seen.top.keys.clamp(min=0)).masked_fill(seen.top.keys < 0, 0.0)
    torch.testing.assert_close(seen.top.weights, recomputed, rtol=1e-4, atol=1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize(("causal", "width"), [*product((False, True), (64, 128))])
@pytest.mark.parametrize("lengths", [(512, 512), (1000, 1300), (2048, 2048), (8192, 8192)])
def test_repeats_are_equal_to_the_bit(lengths, width, causal) -> None:
    shape = {"heads": (16, 4), "batch": max(2, 16384 // lengths[0])}
    query, key, value = (t.to(torch.bfloat16) for t in inputs(lengths, width, **shape))
    form = structure(causal, width)
    rows = set(ROWS) - ({"distance"} if lengths[1] % 128 else set())
    even = lengths[0] % 512 == 0
    wanted = {"received", "map", "map_peak"} if even else {"received"}

    def once() -> dict[str, Tensor]:
        forwarded = forward(query, key, value, form, rows | wanted, 8, (64, 64) if even else None)
        found, left = forwarded
        alone = plan.Intermediates(left.neg_lse)
        grid = (64, 64) if even else None
        found |= columns_of(query, key, found["lse"], form, wanted, grid, alone)
        return found | highest([query, key, value], causal, 8, forwarded)

    first = once()
    for _ in range(250):
        for name, value_again in once().items():
            assert torch.equal(first[name], value_again), name


@pytest.mark.gpu
@pytest.mark.parametrize(("causal", "width"), [*product((False, True), (64, 128))])
@pytest.mark.parametrize("length", [512, 2048])
def test_repeats_of_the_backward_pass_are_equal_but_for_queries(length, width, causal) -> None:
    """Programs add to gradients of queries in any order; no two add to the same other sum."""
    shape = {"heads": (16, 16), "batch": 16384 // length}
    tensors = [t.to(torch.bfloat16) for t in inputs((length, length), width, **shape)]
    grad = headed(shape["batch"], 16, length, width, 7).to(torch.bfloat16)
    (query, *others), found = differentiated(tensors, grad, causal, (64, 64))
    for _ in range(250):
        (query_again, *others_again), found_again = differentiated(tensors, grad, causal, (64, 64))
        torch.testing.assert_close(query_again, query, rtol=0.02, atol=1e-3)
        assert all(map(torch.equal, others_again, others))
        assert all(torch.equal(found_again[name], found[name]) for name in found)
