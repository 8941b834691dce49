"""Check that a model reproduces the scores of its card."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.checkpoints.cards import SCORES, Score, read_scores
from regard.errors import InputError
from regard.evaluation.measuring import evaluate
from regard.evaluation.scoring import Progress
from regard.models.loading import load
from regard.text.tokenizer import Tokenizer


class Again(NamedTuple):
    """A score of a model card, and the same score measured again.

    >>> Again(Score(metric="bleu", value=31.0, tolerance=0.1, data=[], settings={}), 31.05).agrees
    True
    """

    score: Score
    value: float

    @property
    def agrees(self) -> bool:
        return abs(self.value - self.score.value) <= self.score.tolerance


def reproduce(
    folder: Path,
    *,
    root: str | Path,
    device: torch.device | str | None = None,
    progress: Progress | None = None,
) -> Iterator[Again]:
    r"""Measure every score in the scores.json of a checkpoint again, on the files below ``root``.

    Scores with equal data and settings share one evaluation.

    >>> import tempfile
    >>> from regard import GPT2, GPT2Config, Tokenizer
    >>> text = Tokenizer.train_bpe(["one two three"], size=260)
    >>> model = GPT2(GPT2Config(vocabulary=len(text), length=8, dim=8, depth=1, heads=2)).eval()
    >>> figure = {"metric": "perplexity", "value": 50.0, "tolerance": 0.5, "settings": {}}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     model.save(folder)
    ...     text.save(folder)
    ...     _ = Path(folder, "a.txt").write_text("one two three\n" * 9)
    ...     figures = [figure | {"data": [{"format": "text", "files": ["a.txt"]}]}]
    ...     _ = Path(folder, "scores.json").write_text(json.dumps(figures))
    ...     [again] = reproduce(Path(folder), root=folder)
    >>> again.score.value, again.value > 200, again.agrees  # the model is untrained
    (50.0, True, False)
    """
    if not (folder / SCORES).is_file():
        raise InputError(f"{folder} has no {SCORES} with scores to reproduce. Give --data.")
    together: dict[str, list[Score]] = {}
    for score in read_scores(folder / SCORES):
        together.setdefault(json.dumps([score.data, score.settings]), []).append(score)
        for source in score.data:
            _check_files(Path(root).expanduser(), source)
    model = load(folder, device=device, dtype=torch.float32)
    tokenizer = Tokenizer.load(folder)
    for scores in together.values():
        data, settings = scores[0].data, scores[0].settings
        wanted = list(dict.fromkeys(score.metric for score in scores))
        measured = evaluate(
            model, tokenizer, data, wanted, root=root, settings=settings, progress=progress
        )
        for score in scores:
            yield Again(score, measured.scores[score.metric])


def _check_files(root: Path, source: Mapping[str, Any]) -> None:
    """Raise InputError for missing data before anything is measured."""
    for name in (*source.get("files", ()), *source.get("targets", ())):
        if not (root / name).is_file():
            raise InputError(
                f"The scores of the card need {name}, which is not below the folder {str(root)!r}. "
                "Give the folder of the data with --root; docs/data.md says where to download them."
            )
