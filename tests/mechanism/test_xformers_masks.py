"""The masks of xformers.ops.fmha.attn_bias, all but the paged ones, in our terms.

Each is written out here as its documentation describes it: a function of a query and a key, or of a
query and a key of one block. xformers itself is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import Causal, InputError, Segments, Window, attention, mask_from_xformers
from regard.mechanism import masks
from regard.mechanism.backends import cpu as cpu_backend
from regard.mechanism.call import check
from regard.mechanism.geometry import Extent, Tile
from regard.mechanism.masks import Mask

Rule = Callable[[int, int, int, int], bool]  # query, key, number of queries, number of keys

QUERIES, KEYS = [3, 0, 4, 2, 5], [4, 3, 0, 5, 3]  # the lengths of blocks
PADDING = 6
PADDED = [PADDING * block for block in range(5)]
GAPPY = [1, 6, 9, 11, 20]
SIZE, LEFT, RIGHT = 3, 2, 1


def every(q: int, k: int, queries: int, keys: int) -> bool:
    return True


def causal(q: int, k: int, queries: int, keys: int) -> bool:
    return k <= q  # as far from the initial key as the query from the initial query


def causal_from_bottom_right(q: int, k: int, queries: int, keys: int) -> bool:
    return keys - 1 - k >= queries - 1 - q  # no nearer to the final key


def causal_local(q: int, k: int, queries: int, keys: int) -> bool:
    return q - SIZE < k <= q


def causal_local_from_bottom_right(q: int, k: int, queries: int, keys: int) -> bool:
    further = (keys - 1 - k) - (queries - 1 - q)
    return 0 <= further < SIZE


def local_from_bottom_right(q: int, k: int, queries: int, keys: int) -> bool:
    return q - LEFT <= k + queries - keys <= q + RIGHT


def dense(
    rule: Rule, queries: Sequence[int], starts: Sequence[int], keys: Sequence[int], total: int
) -> Tensor:
    """The rule in each block of queries and keys; the keys of a block begin at its start."""
    mask = torch.zeros(sum(queries), total, dtype=torch.bool)
    row = 0
    for own_queries, start, own_keys in zip(queries, starts, keys, strict=True):
        for q in range(own_queries):
            for k in range(own_keys):
                mask[row + q, start + k] = rule(q, k, own_queries, own_keys)
        row += own_queries
    return mask


def whole(rule: Rule) -> Tensor:
    return dense(rule, [9], [0], [12], 12)


def blocks(rule: Rule) -> Tensor:
    return dense(rule, QUERIES, [0, 4, 7, 7, 12], KEYS, 15)


def padded(rule: Rule) -> Tensor:
    return dense(rule, QUERIES, PADDED, KEYS, 5 * PADDING)


def gappy(rule: Rule) -> Tensor:
    return dense(rule, QUERIES, GAPPY, KEYS, 25)


def packed(**given: Any) -> Segments:
    return Segments(QUERIES, KEYS, **given)


FIRST: dict[str, Any] = {"query_start": 0}
CASES: dict[str, tuple[Mask, Tensor, dict[str, Any]]] = {
    "LowerTriangularMask": (Causal(), whole(causal), FIRST),
    "LowerTriangularMaskWithTensorBias": (
        Causal(), whole(causal), FIRST | {"bias": torch.linspace(-1, 1, 108).view(9, 12).double()}
    ),
    "LowerTriangularFromBottomRightMask": (Causal(), whole(causal_from_bottom_right), {}),
    "LowerTriangularFromBottomRightLocalAttentionMask": (
        Window(SIZE - 1), whole(causal_local_from_bottom_right), {}
    ),
    "LocalAttentionFromBottomRightMask": (Window(LEFT, RIGHT), whole(local_from_bottom_right), {}),
    "BlockDiagonalMask": (packed(), blocks(every), {}),
    "BlockDiagonalCausalMask": (packed(query_starts=0, within=Causal()), blocks(causal), {}),
    "BlockDiagonalCausalFromBottomRightMask": (
        packed(within=Causal()), blocks(causal_from_bottom_right), {}
    ),
    "BlockDiagonalCausalLocalAttentionMask": (
        packed(query_starts=0, within=Window(SIZE - 1)), blocks(causal_local), {}
    ),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (
        packed(within=Window(SIZE - 1)), blocks(causal_local_from_bottom_right), {}
    ),
    "BlockDiagonalPaddedKeysMask": (packed(key_starts=PADDED), padded(every), {}),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (
        packed(key_starts=PADDED, within=Causal()), padded(causal_from_bottom_right), {}
    ),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (
        packed(key_starts=PADDED, within=Window(LEFT, RIGHT)), padded(local_from_bottom_right), {}
    ),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (
        packed(key_starts=PADDED, within=Window(SIZE - 1)),
        padded(causal_local_from_bottom_right),
        {},
    ),
    "BlockDiagonalGappyKeysMask": (packed(key_starts=GAPPY), gappy(every), {}),
    "BlockDiagonalCausalWithOffsetGappyKeysMask": (
        packed(key_starts=GAPPY, within=Causal()), gappy(causal_from_bottom_right), {}
    ),
    "BlockDiagonalLocalAttentionFromBottomRightGappyKeysMask": (
        packed(key_starts=GAPPY, within=Window(LEFT, RIGHT)), gappy(local_from_bottom_right), {}
    ),
}  # fmt: skip


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def computed(mask: Mask, allowed: Tensor, **given: Any) -> list[Tensor]:
    """The output and the gradients of query, key and value."""
    queries, keys = allowed.shape
    sizes = ((2, 4, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6))
    tensors = [random(*size, seed=seed).requires_grad_() for seed, size in enumerate(sizes)]
    output = attention(*tensors, mask=mask, **given)
    return [output, *torch.autograd.grad(output, tensors, random(*output.shape, seed=9))]


@pytest.mark.parametrize("name", CASES)
def test_output_and_gradients_are_those_of_the_mask_written_out(name: str) -> None:
    mask, allowed, given = CASES[name]
    written_out = {key: value for key, value in given.items() if key != "query_start"}
    expected = computed(masks.Dense(allowed), allowed, **written_out, backend="reference")
    for backend in ("reference", "tiled", "sdpa", "auto"):
        if backend != "sdpa" or "bias" not in given:
            found = computed(mask, allowed, **given, backend=backend)
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other)
    empty = ~allowed.any(-1)
    assert (expected[0][:, :, empty] == 0).all()


@pytest.mark.parametrize("name", CASES)
def test_the_cpu_kernel_has_them(name: str) -> None:
    mask, allowed, given = CASES[name]
    x = random(2, 4, allowed.shape[0], 8, seed=1).float()
    key = random(2, 2, allowed.shape[1], 8, seed=2).float()
    start = given.get("query_start")
    call = check(x, key, key, mask, given.get("bias"), None, None, 0.0, None, start)
    if "bias" in given:
        assert "no Dense bias" in (cpu_backend.unsupported(call) or "")
    elif cpu_backend.unavailable() is None:
        assert cpu_backend.unsupported(call) is None
        expected = attention(x, key, key, mask=allowed, backend="reference")
        torch.testing.assert_close(cpu_backend.run(call)[0], expected)


def starts(lengths: Sequence[int]) -> list[int]:
    return [*accumulate(lengths, initial=0)]


def attn_bias(name: str) -> Any:
    """An object with the name and the fields of a class of xformers."""
    fields: dict[str, Any] = {}
    if name.startswith("BlockDiagonal"):
        keys = SimpleNamespace(seqstart_py=starts(KEYS))
        if "Padded" in name or "Gappy" in name:
            first = [*PADDED, 5 * PADDING] if "Padded" in name else [*GAPPY, 25]
            keys = SimpleNamespace(seqstart_py=first, seqlen_py=KEYS)
        fields = {"q_seqinfo": SimpleNamespace(seqstart_py=starts(QUERIES)), "k_seqinfo": keys}
    if "CausalLocal" in name or "RightLocal" in name:
        fields["_window_size"] = SIZE
    elif "Local" in name:
        fields |= {"window_left": LEFT, "window_right": RIGHT}
    return type(name, (SimpleNamespace,), {})(**fields)


@pytest.mark.parametrize("name", [name for name in CASES if "TensorBias" not in name])
def test_a_bias_of_xformers_becomes_its_mask(name: str) -> None:
    _, allowed, _ = CASES[name]
    mask = mask_from_xformers(attn_bias(name), *allowed.shape)
    assert mask.is_ranges
    extent = Extent(1, 1, *allowed.shape, torch.device("cpu"))
    mask.check(extent)
    tile = Tile(extent, range(extent.queries), range(extent.keys))
    assert torch.equal(mask.tile(tile).expand(1, 1, *allowed.shape)[0, 0], allowed)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("LowerTriangularMask", "Call mask_from_xformers"),
        ("LowerTriangularMaskWithTensorBias", "no counterpart"),
        ("PagedBlockDiagonalPaddedKeysMask", "no counterpart"),
    ],
)
def test_a_bias_of_xformers_without_counterpart_is_refused(name: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        mask_from_xformers(type(name, (), {})())


def test_rows_of_a_batch_may_be_packed_differently() -> None:
    mask = Segments(
        [[2, 3], [5, 0]], [[3, 1], [0, 6]], key_starts=[[0, 5], [0, 0]],
        query_starts=[[1, -1], [0, 0]], within=Window(1, None),
    )  # fmt: skip
    first = dense(lambda q, k, _, __: k >= q, [2], [0], [3], 6)
    rest = dense(lambda q, k, _, __: k >= q - 2, [3], [5], [1], 6)
    allowed = torch.stack([torch.cat([first, rest]), torch.zeros(5, 6, dtype=torch.bool)])[:, None]
    query, key = random(2, 2, 5, 4, seed=1), random(2, 2, 6, 4, seed=2)
    expected = attention(query, key, key, mask=allowed, backend="reference")
    for backend in ("reference", "tiled", "sdpa"):
        output = attention(query, key, key, mask=mask, backend=backend)
        torch.testing.assert_close(output, expected)


def test_one_packing_of_queries_and_keys_may_have_empty_segments_and_a_window() -> None:
    x = random(1, 1, 5, 4, seed=1)
    same = Segments([0, 3, 0, 2]), Segments([0, 3, 0, 2], within=Window(1, 1))
    expected = Segments([3, 2]), Segments([3, 2]) & Window(1, 1)
    for query in (x, x[:, :, 2:], torch.cat([x, x], dim=2)):
        for mask, other in zip(same, expected, strict=True):
            found, right = (attention(query, x, x, mask=m, backend="tiled") for m in (mask, other))
            torch.testing.assert_close(found, right)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Segments([1, 2], key_starts=[0]), "lengths and key_starts have different numbers"),
        (lambda: Segments([1, 2], key_starts=[3, 0]), "must ascend"),
        (lambda: Segments([1, 2], [4, 2], key_starts=[0, 3]), "ascend without overlap"),
        (
            lambda: Segments([1, -2]),
            r"lengths=\.\.\.\) must be whole numbers of positions from 0 on",
        ),
        (lambda: Segments([1, 2], query_starts=[0, 0.5]), "query_starts"),  # type: ignore[list-item]
        (lambda: Segments([1], within=Causal() & Window(1)), "within"),  # type: ignore[arg-type]
        (lambda: packed(key_starts=GAPPY).check(check_extent(22)), "only 22 keys"),
    ],
)
def test_a_wrong_packing_is_refused(wrong: Callable[[], object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        wrong()


def check_extent(keys: int) -> Any:
    x = torch.zeros(14, 2)
    return check(x, x.new_zeros(keys, 2), x.new_zeros(keys, 2), *(None,) * 4, 0.0, None).extent
