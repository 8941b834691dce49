"""The reference against the definitions, written out as loops over Python numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from helpers.generated_calls import FLAGS
from regard import (
    Alibi,
    Causal,
    Padding,
    Prefix,
    RelativeBuckets,
    RelativeContent,
    See,
    Seen,
    Segments,
    Window,
    attention,
)
from regard.mechanism import biases, masks
from regard.mechanism.biases import Bias
from regard.mechanism.masks import Mask

Allowed = Callable[[int, int, int, int], bool]  # batch, head, position of the query, key
Added = Callable[[int, int, int, int], float]  # batch, head, position of the query, key

BATCH, HEADS, KEY_HEADS, DIM, WIDTH = 2, 4, 2, 3, 5
SIZES = [(1, 1), (4, 4), (2, 5), (5, 2), (7, 7)]  # queries, keys
TOP, GRID = 3, (2, 3)


@dataclass
class Looked:
    """Every number the loops find, by [batch][head]."""

    output: list[list[list[list[float]]]] = field(default_factory=list)
    weights: list[list[list[list[float]]]] = field(default_factory=list)
    scores: list[list[list[list[float]]]] = field(default_factory=list)


def loops(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    allowed: Allowed,
    added: Added,
    scale: float,
    softcap: float | None,
) -> Looked:
    q, k, v = query.tolist(), key.tolist(), value.tolist()
    queries, keys, width = query.shape[2], key.shape[2], value.shape[3]
    groups = query.shape[1] // key.shape[1]
    actual = Looked()
    for b in range(query.shape[0]):
        for kind in (actual.output, actual.weights, actual.scores):
            kind.append([])
        for h in range(query.shape[1]):
            g = h // groups
            outputs, rows, raw = [], [], []
            for i in range(queries):
                at = i + keys - queries  # the last query stands at the last key
                scores = []
                for j in range(keys):
                    s = scale * sum(x * y for x, y in zip(q[b][h][i], k[b][g][j], strict=True))
                    if softcap is not None:
                        s = softcap * math.tanh(s / softcap)
                    s += added(b, h, at, j)
                    scores.append(s if allowed(b, h, at, j) else -math.inf)
                powers = [math.exp(s) for s in scores]
                total = sum(powers)
                weights = [power / total if total else 0.0 for power in powers]
                rows.append(weights)
                raw.append(scores)
                outputs.append(
                    [sum(w * v[b][g][j][c] for j, w in enumerate(weights)) for c in range(width)]
                )
            actual.output[b].append(outputs)
            actual.weights[b].append(rows)
            actual.scores[b].append(raw)
    return actual


def fields(actual: Looked, rows: list[int]) -> dict[str, object]:
    """Every field of Seen, from the weights and scores, as its definition says."""
    result: dict[str, list[object]] = {}

    def each(name: str, of: Callable[[list[list[float]], list[list[float]]], object]) -> None:
        result[name] = [
            [of(w, s) for w, s in zip(ws, ss, strict=True)]
            for ws, ss in zip(actual.weights, actual.scores, strict=True)
        ]

    def lse(row: list[float]) -> float:
        total = sum(math.exp(s) for s in row)
        return math.log(total) if total else -math.inf

    queries, keys = len(actual.weights[0][0]), len(actual.weights[0][0][0])
    grid = min(GRID[0], queries), min(GRID[1], keys)

    def cells(weights: list[list[float]], scores: list[list[float]], peak: bool) -> object:
        table = []
        for r in range(grid[0]):
            mine = [i for i in range(queries) if i * grid[0] // queries == r]
            attends = sum(1 for i in mine if max(scores[i]) > -math.inf)
            line = []
            for c in range(grid[1]):
                bin_ = [j for j in range(keys) if j * grid[1] // keys == c]
                inside = [weights[i][j] for i in mine for j in bin_]
                line.append(max(inside) if peak else sum(inside) / max(attends, 1))
            table.append(line)
        return table

    offset = keys - queries
    each("lse", lambda _, ss: [lse(row) for row in ss])
    each("entropy", lambda ws, _: [-sum(w * math.log(w) for w in row if w) for row in ws])
    each("peak", lambda ws, _: [max(row) for row in ws])
    each("max_logit", lambda _, ss: max(max(row) for row in ss))
    each(
        "distance",
        lambda ws, _: [
            sum(w * abs(i + offset - j) for j, w in enumerate(row)) for i, row in enumerate(ws)
        ],
    )

    def variance(row: list[float], place: int) -> float:
        mean = sum(w * abs(place - j) for j, w in enumerate(row))
        return sum(w * (abs(place - j) - mean) ** 2 for j, w in enumerate(row))

    each(
        "distance_variance",
        lambda ws, _: [variance(row, i + offset) for i, row in enumerate(ws)],
    )
    each("received", lambda ws, _: [sum(row[j] for row in ws) for j in range(keys)])
    each("rows", lambda ws, _: [ws[i] for i in rows])
    each("map", lambda ws, ss: cells(ws, ss, peak=False))
    each("map_peak", lambda ws, ss: cells(ws, ss, peak=True))
    each("weights", lambda ws, _: ws)
    each("top_weights", lambda ws, _: [(sorted(row)[::-1] + [0.0] * TOP)[:TOP] for row in ws])

    def best(ws: list[list[float]], ss: list[list[float]]) -> object:
        lines = []
        for w, s in zip(ws, ss, strict=True):
            order = sorted(range(keys), key=lambda j: -w[j])
            lines.append(([j for j in order if s[j] > -math.inf] + [-1] * TOP)[:TOP])
        return lines

    each("top_keys", best)
    return dict(result)


def agree(
    queries: int,
    keys: int,
    mask: Mask | None = None,
    allowed: Allowed = lambda b, h, i, j: True,
    bias: Bias | None = None,
    added: Added = lambda b, h, i, j: 0.0,
    scale: float | None = None,
    softcap: float | None = None,
) -> None:
    """Compare the output and all that is seen."""
    generator = torch.Generator().manual_seed(queries * 10 + keys)
    query = torch.randn(BATCH, HEADS, queries, DIM, generator=generator, dtype=torch.float64)
    key = torch.randn(BATCH, KEY_HEADS, keys, DIM, generator=generator, dtype=torch.float64)
    value = torch.randn(BATCH, KEY_HEADS, keys, WIDTH, generator=generator, dtype=torch.float64)
    rows = [-1, 0, queries // 2]
    see = See(**FLAGS, top=TOP, rows=rows, map=GRID, map_peak=True)
    output, seen = attention(
        query, key, value, mask=mask, bias=bias, scale=scale, softcap=softcap, see=see,
        backend="reference",
    )  # fmt: skip
    factor = 1 / math.sqrt(DIM) if scale is None else scale
    actual = loops(query, key, value, allowed, added, factor, softcap)
    same(output, actual.output, "output")
    expected = fields(actual, rows)
    assert isinstance(seen, Seen)
    assert expected.keys() == seen.to_dict().keys()
    for name, tensor in seen.to_dict().items():
        same(tensor, expected[name], name)
    assert seen.extent == (BATCH, HEADS, queries, keys)


def same(tensor: torch.Tensor, numbers: object, what: str) -> None:
    expected = torch.tensor(numbers, dtype=tensor.dtype)
    torch.testing.assert_close(
        tensor, expected, rtol=1e-12, atol=1e-12, msg=lambda m: f"{what}: {m}"
    )


each_size = pytest.mark.parametrize(("queries", "keys"), SIZES)


@each_size
def test_plain(queries: int, keys: int) -> None:
    agree(queries, keys)


@each_size
@pytest.mark.parametrize("scale", [0.5, -1.0, 2.0])
@pytest.mark.parametrize("softcap", [None, 0.7])
def test_scale_and_softcap(queries: int, keys: int, scale: float, softcap: float | None) -> None:
    agree(queries, keys, scale=scale, softcap=softcap)


@each_size
def test_causal(queries: int, keys: int) -> None:
    agree(queries, keys, Causal(), lambda b, h, i, j: j <= i)


@each_size
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (1, 1), (0, 3)])
def test_window(queries: int, keys: int, left: int, right: int) -> None:
    agree(queries, keys, Window(left, right), lambda b, h, i, j: i - left <= j <= i + right)


@each_size
@pytest.mark.parametrize("tensor", [False, True])
def test_prefix(queries: int, keys: int, tensor: bool) -> None:
    length = [1, min(keys, 2)]
    mask = Prefix(torch.tensor(length) if tensor else length)
    agree(queries, keys, mask, lambda b, h, i, j: j < length[b] or j <= i)


@each_size
@pytest.mark.parametrize("tensor", [False, True])
def test_padding(queries: int, keys: int, tensor: bool) -> None:
    real = [keys, keys // 2]  # with one key the second sequence is all padding
    lengths = torch.tensor(real) if tensor else real
    agree(queries, keys, Padding(lengths), lambda b, h, i, j: j < real[b])
    agree(queries, keys, Padding(lengths, "left"), lambda b, h, i, j: j >= keys - real[b])


@each_size
def test_segments(queries: int, keys: int) -> None:
    packed = [keys] if keys == 1 else [1, keys - 1]

    def segment(position: int, sizes: list[int]) -> int:
        return sum(position >= sum(sizes[: n + 1]) for n in range(len(sizes)))

    def together(b: int, h: int, i: int, j: int) -> bool:
        return i >= 0 and segment(i, packed) == segment(j, packed)

    agree(queries, keys, Segments(packed), together)
    rows = [packed, packed[::-1]]
    agree(
        queries,
        keys,
        Segments(rows),
        lambda b, h, i, j: i >= 0 and segment(i, rows[b]) == segment(j, rows[b]),
    )
    if queries > 1 and keys > 1:  # two packed rows that look at each other
        asking = [queries - 1, 1]
        offset = keys - queries
        agree(
            queries,
            keys,
            Segments(asking, packed),
            lambda b, h, i, j: segment(i - offset, asking) == segment(j, packed),
        )


@each_size
@pytest.mark.parametrize("shape", ["bhqk", "11qk", "b11k", "1hq1", "qk", "k"])
def test_dense_mask(queries: int, keys: int, shape: str) -> None:
    sizes = {"b": BATCH, "h": HEADS, "q": queries, "k": keys, "1": 1}
    allowed = (
        torch.rand([sizes[s] for s in shape], generator=torch.Generator().manual_seed(1)) < 0.6
    )
    whole = allowed.expand(BATCH, HEADS, queries, keys).tolist()
    offset = keys - queries
    agree(queries, keys, masks.Dense(allowed), lambda b, h, i, j: whole[b][h][i - offset][j])


@each_size
def test_joined_masks(queries: int, keys: int) -> None:
    real = [keys, max(keys - 2, 1)]
    causal: Allowed = lambda b, h, i, j: j <= i  # noqa: E731
    padded: Allowed = lambda b, h, i, j: j < real[b]  # noqa: E731
    near: Allowed = lambda b, h, i, j: abs(i - j) <= 1  # noqa: E731
    agree(queries, keys, Causal() & Padding(real), lambda *at: causal(*at) and padded(*at))
    agree(queries, keys, Causal() | Window(1, 1), lambda *at: causal(*at) or near(*at))
    agree(queries, keys, ~Causal(), lambda *at: not causal(*at))
    agree(
        queries,
        keys,
        ~(Window(1, 1) & Causal()) & Padding(real),
        lambda *at: not (near(*at) and causal(*at)) and padded(*at),
    )


@each_size
def test_dense_bias(queries: int, keys: int) -> None:
    values = torch.randn(1, HEADS, queries, keys, dtype=torch.float64)
    numbers, offset = values[0].tolist(), keys - queries
    agree(
        queries, keys, Causal(), lambda b, h, i, j: j <= i,
        biases.Dense(values), lambda b, h, i, j: numbers[h][i - offset][j],
    )  # fmt: skip


@each_size
def test_alibi(queries: int, keys: int) -> None:
    slopes = [0.5, 0.25, -1.0, 0.0]
    bias = Alibi(torch.tensor(slopes, dtype=torch.float64))
    agree(queries, keys, bias=bias, added=lambda b, h, i, j: -slopes[h] * abs(i - j))


@each_size
@pytest.mark.parametrize("bidirectional", [False, True])
def test_relative_buckets(queries: int, keys: int, bidirectional: bool) -> None:
    """Within the distances that have a bucket of their own; test_biases has the others."""
    buckets = 32 if bidirectional else 16  # 8 distances each way, or 8 backwards
    table = torch.randn(buckets, HEADS, dtype=torch.float64)
    numbers = table.tolist()

    def added(b: int, h: int, i: int, j: int) -> float:
        if bidirectional:
            return float(numbers[abs(i - j) + (16 if j > i else 0)][h])
        return float(numbers[max(i - j, 0)][h])

    agree(queries, keys, bias=RelativeBuckets(table, bidirectional), added=added)


@each_size
@pytest.mark.parametrize("heads", [1, HEADS])
def test_relative_content(queries: int, keys: int, heads: int) -> None:
    generator = torch.Generator().manual_seed(3)
    first, distances, dim = -2, 6, 2
    u = torch.randn(BATCH, HEADS, queries, dim, generator=generator, dtype=torch.float64)
    r = torch.randn(heads, distances, dim, generator=generator, dtype=torch.float64)
    us, rs, offset = u.tolist(), r.tolist(), keys - queries

    def added(b: int, h: int, i: int, j: int) -> float:
        row = min(max(i - j - first, 0), distances - 1)
        relative = rs[h if heads > 1 else 0][row]
        return float(0.3 * sum(x * y for x, y in zip(us[b][h][i - offset], relative, strict=True)))

    agree(queries, keys, bias=RelativeContent(u, r, first, 0.3), added=added)
