"""regard bench: the shipped models that write are timed."""

import torch

from regard.evaluation import speed


def test_every_shipped_model_that_writes_is_timed() -> None:
    rows = list(speed.decode(torch.device("cpu"), new=2))
    assert [row.name for row in rows] == ["books-gpt2", "books-xl", "summarize", "translate"]
    assert all(row.tokens_per_second > 0 for row in rows)
