"""The cache of results: its size, and that CUDA graphs can use it."""

from __future__ import annotations

import pytest
import torch

from regard.kernels import memo
from regard.kernels.memo import GraphSafeCache


def test_the_least_recently_used_result_is_dropped() -> None:
    computed: list[int] = []
    cached = GraphSafeCache(lambda number: computed.append(number) or [number])
    first = cached(0)
    for number in range(1, memo.MAX_RESULTS):
        cached(number)
    assert cached(0) is first
    cached(-1)  # one more than fits, so 1, the least recently used, is dropped
    assert cached(0) is first
    cached(1)
    assert computed == [*range(memo.MAX_RESULTS), -1, 1]


def test_a_result_that_a_graph_reads_is_never_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    def record() -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    cached = GraphSafeCache(lambda number: [number])
    record()
    assert cached(1) is not cached(1)  # computed while recording: it holds no values yet
    monkeypatch.undo()
    result = cached(2)
    record()
    assert cached(2) is result
    monkeypatch.undo()
    for number in range(memo.MAX_RESULTS + 1):
        cached(10 + number)
    assert cached(2) is not result  # dropped from the cache
    assert cached.read_by_graphs == [result]
