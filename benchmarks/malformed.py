"""Load thousands of broken checkpoints: the only error is RegardError, and memory is bounded.

Loading opens no file outside the folder of the checkpoint.

python benchmarks/malformed.py 200000        appended to results/malformed.jsonl
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from measure import append, argument_parser
from regard import RegardError, Tokenizer, load

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers import broken_files as broken

MAX_GROWTH = 200 * 2**20  # bytes of memory above loading intact checkpoints

_opened: list[str] = []
_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        _opened.append(os.fsdecode(arguments[0]))


def refused(read: Callable[[Path], object], target: Path, damage: str) -> bool:
    """Whether reading raises RegardError; any other error, or a file elsewhere, ends the run."""
    global _watching  # noqa: PLW0603
    _opened.clear()
    _watching = True
    try:
        read(target)
    except RegardError:
        return True
    except BaseException as error:
        raise AssertionError(f"{damage} raised {error!r}") from error
    finally:
        _watching = False
        outside = [path for path in _opened if not path.startswith(str(target))]
        assert not outside, f"{damage} opened {outside}"
    return False


def _tokenize(folder: Path) -> None:
    Tokenizer.load(folder).encode("the cat sat on a mat.")


def main(count: int) -> None:
    torch.set_num_threads(1)
    sys.addaudithook(_audit)
    counts = {"model": 0, "tokenizer": 0}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [folder / "one", folder / "shards"]
        for source, sharded in zip(sources, (False, True), strict=True):
            broken.good(source, sharded=sharded)
            load(source)
        texts = broken.tokenizers(folder / "tokenizers")
        for text in texts:
            _tokenize(text)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        target = folder / "broken"
        for seed in range(count):  # two models, then a tokenizer
            rng = random.Random(seed)
            if seed % 3 < 2:
                damage = broken.broken(sources[seed % 3], target, rng)
                counts["model"] += refused(load, target, f"seed {seed} ({damage})")
            else:
                damage = broken.broken_tokenizer(texts, target, rng)
                counts["tokenizer"] += refused(_tokenize, target, f"seed {seed} ({damage})")
            shutil.rmtree(target)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown < MAX_GROWTH, f"memory grew by {grown:,} bytes"
    row = {
        "checkpoints": count,
        "refused": sum(counts.values()),
        "refused_models": counts["model"],
        "refused_tokenizers": counts["tokenizer"],
        "memory_grown_mb": grown / 2**20,
    }
    print(row)
    append("malformed", [row])


if __name__ == "__main__":
    options = argument_parser(__doc__)
    options.add_argument("count", type=int, nargs="?", default=2000, help="number of checkpoints")
    main(options.parse_args().count)
