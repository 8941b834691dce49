"""Convert a checkpoint to another precision, packing or shard size."""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import torch

from regard.checkpoints.bases import described
from regard.checkpoints.files import CONFIG, GENERATION, note, place_for, read_json
from regard.checkpoints.hub import find
from regard.checkpoints.packing import Packing
from regard.checkpoints.tensors import SHARD
from regard.decoding.settings import generation_of
from regard.errors import InputError
from regard.models.loading import load
from regard.text.tokenizer import Tokenizer

# Files that are copied with the weights: tokenizers in all formats, cards and settings.
_BESIDE = (
    GENERATION, "README.md", "scores.json", "tokenizer.json", "target_tokenizer.json",
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.txt",
    "vocab.json", "target_vocab.json", "merges.txt", "encoder.json", "vocab.bpe", "spiece.model",
    "sentencepiece.model", "tokenizer.model", "source.spm", "target.spm",
)  # fmt: skip
_CARD = ("README.md", "scores.json")
_OF_TASKS = ("task_specific_params", "n_positions")  # keys of config.json in no config class


def convert(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    packing: Packing | None = None,
    shard_bytes: float = SHARD,
    force: bool = False,
) -> Path:
    """Write a converted copy of the checkpoint ``source`` to the folder ``target``.

    Weights are stored as ``dtype`` or packed. An adapter is merged into its base. Tokenizer,
    card and generation settings are copied. A failure leaves no incomplete ``target``. An existing
    folder is replaced only with ``force``, and only if it holds a checkpoint.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from regard import GPT2, GPT2Config, load
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     one, other = Path(folder, "one"), Path(folder, "other")
    ...     GPT2(GPT2Config(vocabulary=10, dim=8, depth=1, heads=2)).save(one)
    ...     load(convert(one, other, dtype=torch.float16)).tokens.weight.dtype
    torch.float16
    """
    if dtype is not None and packing is not None:
        raise InputError("packing= already says how weights are stored: leave out dtype=.")
    folder, goal = find(source), place_for(target)
    _check_goal(goal, force)
    model = load(folder, dtype=dtype if packing is None else torch.float32)
    goal.parent.mkdir(parents=True, exist_ok=True)
    # The temporary folder is on the same file system, so that the final rename is atomic.
    with tempfile.TemporaryDirectory(dir=goal.parent, prefix=f".{goal.name}.") as temporary:
        made, old = Path(temporary, "made"), Path(temporary, "old")
        model.save(made, packing=packing, shard_bytes=shard_bytes)
        beside = described(folder)
        for name in _BESIDE:
            own = beside == folder or name not in _CARD  # the card of a base is not the adapter's
            if own and (beside / name).is_file():
                shutil.copyfile(beside / name, made / name)
        if (made / "tokenizer.json").exists():
            Tokenizer.load(made).describe(made)
        if (made / GENERATION).exists() and not (beside / GENERATION).exists():
            note(made / GENERATION, generation_of(beside))
        said = read_json(beside / CONFIG)
        note(made / CONFIG, {key: said[key] for key in _OF_TASKS if key in said})
        try:
            if goal.exists():
                goal.rename(old)
            made.rename(goal)
        finally:
            if old.exists() and not goal.exists():
                old.rename(goal)  # restore it after a failure
    return goal


def _check_goal(goal: Path, force: bool) -> None:
    if not os.path.lexists(goal):
        return
    if not goal.is_dir() or (any(goal.iterdir()) and not (goal / CONFIG).is_file()):
        raise InputError(f"{goal} exists and holds no checkpoint. Choose another folder.")
    if any(goal.iterdir()) and not force:
        raise InputError(f"{goal} exists. Pass --force to replace it.")
