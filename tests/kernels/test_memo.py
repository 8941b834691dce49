"""What is kept from call to call, and what CUDA graphs need of it."""

from __future__ import annotations

import pytest
import torch

from regard.kernels import memo
from regard.kernels.memo import Kept


def test_results_are_kept_up_to_a_number_the_last_used_longest() -> None:
    made: list[int] = []
    kept = Kept(lambda number: made.append(number) or [number])
    first = kept(0)
    for number in range(1, memo.MOST):
        kept(number)
    assert kept(0) is first
    kept(-1)  # one more than there is room for: 1 is what was not used for longest
    assert kept(0) is first
    kept(1)
    assert made == [*range(memo.MOST), -1, 1]


def test_what_a_graph_reads_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    def record() -> None:
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)

    kept = Kept(lambda number: [number])
    record()
    assert kept(1) is not kept(1)  # made while recording: it holds nothing yet for others
    monkeypatch.undo()
    found = kept(2)
    record()
    assert kept(2) is found
    monkeypatch.undo()
    for number in range(memo.MOST + 1):
        kept(10 + number)
    assert kept(2) is not found  # others have taken its room
    assert kept.read_by_graphs == [found]
