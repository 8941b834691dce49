"""The CPU kernel: its results, when it is chosen, and how it is built.

test_backends_agree.py generates small calls for it; the calls here are larger.
"""

from __future__ import annotations

import ctypes
import math
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

from regard import (
    Alibi,
    BackendError,
    Causal,
    Padding,
    Prefix,
    RelativeBuckets,
    See,
    Segments,
    Window,
    attention,
    why,
)
from regard.kernels.cpu import build
from regard.layers.linear import Quantized
from regard.mechanism import biases, masks
from regard.mechanism.backends import cpu as cpu_backend
from regard.mechanism.backends import reference, tiled
from regard.mechanism.biases import Bias
from regard.mechanism.call import TRANSFORMED, Call, check
from regard.mechanism.masks import Mask
from regard.mechanism.seeing import Seen

COMPILER = next((name for name in ("g++", "clang++", "c++") if shutil.which(name)), None)
BATCH, HEADS, KEY_HEADS, QUERIES, KEYS = 2, 4, 2, 251, 333

if COMPILER is None or sys.platform != "linux":
    pytest.skip(
        "The CPU kernel is NOT tested here: it needs Linux and a C++ compiler (g++ or clang++).",
        allow_module_level=True,
    )


def test_the_kernel_is_available_if_there_is_a_compiler() -> None:
    assert cpu_backend.unavailable() is None


EVERYTHING = See(
    lse=True, entropy=True, peak=True, max_logit=True, distance=True, received=True,
    top=5, rows=[3, -1, 3, 0], pairs=[(7, 2), (250, 332), (7, 2), (0, 90)],
    map=(19, 7), map_peak=True,
)  # fmt: skip


def no_bias() -> None:
    return None


def buckets() -> RelativeBuckets:
    return RelativeBuckets(random(16, HEADS, seed=9), max_distance=100)


Structure = tuple[Mask | None, Callable[[], Bias | None], float | None]
STRUCTURES: dict[str, Structure] = {
    "full": (None, no_bias, None),
    "causal": (Causal(), no_bias, None),
    "window": (Window(40, 9), no_bias, None),
    "narrow window": (Window(0, 0), no_bias, None),
    "open window": (Window(30, None), no_bias, None),
    "prefix": (Prefix([100, 3]) & Padding([KEYS - 5, 170]), no_bias, None),
    "one sequence empty": (Padding([KEYS, 0]), no_bias, None),
    "left padding": (Padding([100, KEYS], side="left") & Causal(), no_bias, None),
    "segments": (Segments([[130, 100, 103], [3, 260, 70]]), no_bias, None),
    "causal alibi": (Causal(), lambda: Alibi.standard(HEADS), None),
    "alibi, capped": (None, lambda: Alibi.standard(HEADS), 3.0),
    "buckets in a window": (Window(200, 110), buckets, 2.0),
    "capped": (Padding(KEYS - 7), no_bias, 3.0),
    "alibi from any start": (None, lambda: Alibi.standard(HEADS), None),
    "causal buckets from any start": (Causal(), buckets, None),
    "window from the first key": (Window(40, 9), no_bias, None),
}
# The position of the first query of each sequence, where the last query is not at the last key.
STARTS: dict[str, int | list[int]] = {
    "alibi from any start": [KEYS, -QUERIES // 2],
    "causal buckets from any start": [0, KEYS - 7],
    "window from the first key": 0,
}
structures = pytest.mark.parametrize("name", STRUCTURES)
every_dtype = pytest.mark.parametrize("dtype", cpu_backend.DTYPES, ids=lambda dtype: str(dtype)[6:])


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def make(
    name: str,
    see: See | None = EVERYTHING,
    dtype: torch.dtype = torch.float32,
    width: int = 40,
    value_width: int = 50,
) -> Call:
    mask, bias, softcap = STRUCTURES[name]
    query = random(BATCH, HEADS, QUERIES, width, seed=1, dtype=dtype) * 1.5
    key = random(BATCH, KEY_HEADS, KEYS, width, seed=2, dtype=dtype)
    value = random(BATCH, KEY_HEADS, KEYS, value_width, seed=3, dtype=dtype)
    return check(query, key, value, mask, bias(), None, softcap, 0.0, see, STARTS.get(name))


def exact_result(call: Call) -> tuple[Tensor, Seen]:
    """The output and the fields that the reference computes in float64."""
    inputs = {name: getattr(call, name).double() for name in ("query", "key", "value")}
    output, seen = reference.run(replace(call, **inputs))
    assert seen is not None
    return output, seen


def run(call: Call) -> tuple[Tensor, Seen]:
    assert cpu_backend.unsupported(call) is None
    output, seen = cpu_backend.run(call)
    assert seen is not None
    assert output.dtype == call.query.dtype
    return output, seen


def eager_error(call: Call, exact: Tensor) -> float:
    """The largest error of plain PyTorch in the dtype of the call."""
    key, value = (t.repeat_interleave(call.groups, 1) for t in (call.key, call.value))
    scores = call.query @ key.transpose(-1, -2) * call.scale
    if call.softcap is not None:
        scores = call.softcap * torch.tanh(scores / call.softcap)
    tile = reference.Tile(call.extent, range(QUERIES), range(KEYS))
    if call.bias is not None:
        scores = scores + call.bias.tile(tile).to(scores.dtype)
    if call.mask is not None:
        scores = scores.masked_fill(~call.mask.tile(tile), -math.inf)
    return max_error(scores.softmax(-1).nan_to_num(0) @ value, exact)


def max_error(found: Tensor, exact: Tensor) -> float:
    infinite = ~exact.isfinite()
    assert torch.equal(found[infinite].double(), exact[infinite].double())
    error = (found.double() - exact)[~infinite].abs()
    return float(error.max()) if error.numel() else 0.0


@every_dtype
@structures
def test_results_equal_the_definition(name: str, dtype: torch.dtype) -> None:
    call = make(name, dtype=dtype)
    (exact, wanted), (output, seen) = exact_result(call), run(call)
    floor = 4 * torch.finfo(torch.float32).eps * math.sqrt(KEYS)
    assert max_error(output, exact) <= 2 * eager_error(call, exact) + floor
    assert seen.extent == wanted.extent
    found, fields = seen.to_dict(), wanted.to_dict()
    assert found.keys() == fields.keys()
    for field, truth in fields.items():
        size = float(truth[truth.isfinite()].abs().max())
        if field != "top_keys":  # keys of equal weights may be in any order
            assert max_error(found[field], truth) <= 4 * floor * max(1, size), field


def test_all_weights_and_some_rows() -> None:
    call = make("causal", See(weights=True, rows=[5, -1]))
    seen, wanted = run(call)[1], exact_result(call)[1]
    for found, exact in ((seen.weights, wanted.weights), (seen.rows, wanted.rows)):
        assert max_error(found, exact) < 1e-6


@pytest.mark.parametrize("width", [1, 31, 32, 33, 64, 130])
@every_dtype
def test_every_width_of_a_head(width: int, dtype: torch.dtype) -> None:
    call = make("causal", See(lse=True), dtype, width, value_width=width + 3)
    (exact, wanted), (output, seen) = exact_result(call), run(call)
    assert max_error(seen.lse, wanted.lse) < 1e-4
    assert max_error(output, exact) <= 2 * eager_error(call, exact) + 1e-5


def test_long_rows_are_split_into_blocks_and_chunks() -> None:
    """With 5,000 keys a block has fewer rows, and bins of the map are not multiples of blocks."""
    q, k, v = (random(1, 1, length, 16, seed=4) for length in (700, 5000, 5000))
    call = check(q, k, v, Window(3000, 10), None, None, None, 0.0, replace(EVERYTHING, pairs=()))
    (exact, wanted), (output, seen) = exact_result(call), run(call)
    assert max_error(output, exact) < 1e-5
    for field in ("received", "map", "map_peak", "entropy", "lse"):
        assert max_error(seen.to_dict()[field], wanted.to_dict()[field]) < 1e-4, field


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["full", "causal", "segments"])
def test_results_are_equal_to_the_last_bit_on_any_number_of_threads(
    name: str, dtype: torch.dtype
) -> None:
    call = make(name, dtype=dtype)
    before = torch.get_num_threads()
    results = []
    try:
        for threads in (1, 2, 2, 5):
            torch.set_num_threads(threads)
            output, seen = run(call)
            results.append({"output": output, **seen.to_dict()})
    finally:
        torch.set_num_threads(before)
    for result in results[1:]:
        for field, tensor in result.items():
            assert torch.equal(tensor, results[0][field]), field


def test_the_default_dtype_changes_nothing() -> None:
    call = make("causal alibi")
    expected = run(call)[1].to_dict()
    torch.set_default_dtype(torch.float64)
    try:
        found = run(call)[1].to_dict()
    finally:
        torch.set_default_dtype(torch.float32)
    for field, tensor in expected.items():
        assert torch.equal(found[field], tensor), field


# ---- infinity and NaN ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_infinity_and_nan_reach_only_queries_that_attend_to_them(bad: float) -> None:
    call = make("causal", See(entropy=True, received=True))
    call.value[:, :, 300:] = bad
    call.key[:, :, 310] = bad
    output, seen = run(call)
    expected, wanted = tiled.run(call)
    assert torch.equal(output.isfinite(), expected.isfinite())
    assert output[:, :, : 300 - (KEYS - QUERIES)].isfinite().all()
    assert not output[:, :, -1].isfinite().any()
    assert torch.equal(seen.entropy.isfinite(), wanted.entropy.isfinite())


def test_a_masked_bias_may_be_nan() -> None:
    table = random(8, HEADS)
    table[4:] = math.nan  # biases of the buckets for keys after the query
    call = replace(make("causal"), bias=RelativeBuckets(table, max_distance=100))
    output, seen = run(call)
    assert output.isfinite().all()
    assert seen.received.isfinite().all()


def test_scores_hundreds_apart() -> None:
    """The scores are exact in float32. Exponentials below its range are 0."""
    see = See(entropy=True, peak=True, lse=True, max_logit=True)
    q, k, v = ((random(1, 2, 90, 16, seed=seed) * 10).round() for seed in (1, 2, 3))
    call = check(q, k, v, None, None, 1.0, None, 0.0, see)
    (exact, wanted), (output, seen) = exact_result(call), run(call)
    assert max_error(output, exact) < 1e-5
    for field, truth in wanted.to_dict().items():
        size = max(1, float(truth.abs().max()))
        assert max_error(seen.to_dict()[field], truth) <= 1e-6 * size, field


# ---- when it is chosen ---------------------------------------------------------------------------


def big(dtype: torch.dtype = torch.float32) -> Tensor:
    return random(1, 1, 1024, 8, dtype=dtype)


def test_auto_chooses_it_for_large_calls_that_see() -> None:
    x, see = big(), See(entropy=True)
    assert why(x, x, x, see=see).chosen == "native"
    assert why(x, x, x).chosen == "sdpa"
    assert why(x, x, x, softcap=2.0).chosen == "native"
    small = x[:, :, :100]
    assert why(small, small, small, see=see).chosen == "tiled"
    with pytest.raises(
        BackendError, match="'native' cannot run this call: the call has fewer than"
    ):
        attention(small, small, small, see=see, backend="native")
    _, seen = attention(x, x, x, mask=Causal(), see=see, backend="native")
    _, other = attention(x, x, x, mask=Causal(), see=see, backend="tiled")
    assert (seen.entropy - other.entropy).abs().max() < 1e-5


def test_it_gives_a_reason_for_each_call_it_refuses() -> None:
    x, see = big(), See(entropy=True)

    def reason(q: Tensor = x, **more: object) -> str:
        found = why(q, x.to(q.dtype), x.to(q.dtype), see=see, **more).answers["native"]  # type: ignore[arg-type]
        assert found is not None
        return found

    assert "not support torch.float64" in reason(x.double())
    assert "no gradients" in reason(x.clone().requires_grad_())
    slopes = Alibi(torch.ones(1, requires_grad=True))
    assert "no gradients" in reason(bias=slopes)
    assert "no dropout" in reason(dropout=0.1)
    assert "not one range of keys" in reason(mask=~Causal())
    assert "not one range of keys" in reason(mask=masks.Dense(torch.ones(1024, 1024).bool()))
    assert "no Dense bias" in reason(bias=biases.Dense(torch.zeros(1024, 1024)))
    step, keys = random(1, 32, 1, 64), random(1, 8, 2**15, 64)  # of a generation
    assert "so few queries" in str(why(step, keys, keys, see=see).answers["native"])
    nothing = random(1, 1, 0, 8)
    call = check(nothing, x, x, None, None, None, None, 0.0, see)
    assert "nothing to compute" in str(cpu_backend.unsupported(call))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # by forward_ad
def test_it_refuses_forward_mode_derivatives() -> None:
    x, see = big(), See(entropy=True)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, torch.ones_like(x))
        assert why(dual, x, x, see=see).answers["native"] == TRANSFORMED


# ---- how it is built -----------------------------------------------------------------------------


@pytest.fixture
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "regard"


def build_again() -> ctypes.CDLL | str:
    """Return what ``library`` returns in a new process, where nothing is loaded yet."""
    return build.library.__wrapped__()


def test_without_a_compiler(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build_again() == "there is no C++ compiler (g++, clang++ or $CXX) to build the kernel."


def test_a_compiler_that_fails(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "c++"
    broken.write_text("#!/bin/sh\necho 'fatal: no such machine' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    reason = build_again()
    assert isinstance(reason, str)
    assert "could not be built" in reason
    assert "fatal: no such machine" in reason
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    reason = build_again()
    assert isinstance(reason, str)
    assert "nowhere" in reason


def test_a_cache_folder_that_cannot_be_created(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    reason = build_again()
    assert isinstance(reason, str)
    assert "could not be built, cached or loaded" in reason


@pytest.mark.slow
def test_it_is_built_once_and_on_any_machine(
    cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library built for a machine without wide vectors and tiles computes the same."""
    log, wrapper = tmp_path / "log", tmp_path / "c++"
    wrapper.write_text(
        f'#!/bin/sh\ncase "$*" in *attention.cpp*) echo built >> {log};; esac\n'
        'for word; do shift; [ "$word" = -march=native ] || set -- "$@" "$word"; done\n'
        f'exec {COMPILER} "$@"\n'
    )
    wrapper.chmod(0o755)
    monkeypatch.setenv("CXX", str(wrapper))
    library = build_again()
    assert not isinstance(library, str), library
    assert not isinstance(build_again(), str)
    assert log.read_text() == "built\n"
    assert len(list(cache_folder.iterdir())) == 1
    assert library.has_tiles() == 0

    monkeypatch.setattr(build, "library", lambda: library)
    for dtype in (torch.float32, torch.bfloat16):
        for name in ("causal", "buckets in a window"):
            test_results_equal_the_definition(name, dtype)

    torch.manual_seed(0)
    weight, bias, x = torch.randn(70, 130), torch.randn(70), torch.randn(20, 130)
    plain = Quantized(weight, bias)(x)
    monkeypatch.undo()
    # Without fused multiply-add, inputs may round to a neighbouring int8: a step of at most 1/127.
    torch.testing.assert_close(plain, Quantized(weight, bias)(x), rtol=0, atol=0.1)
