"""Broken checkpoints by the thousand: only our own errors come out, and memory stays bounded.

python benchmarks/malformed.py 200000        appended to results/malformed.jsonl
"""

from __future__ import annotations

import random
import resource
import shutil
import sys
import tempfile
from pathlib import Path

import torch

from measure import append
from regard import RegardError, load

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
import broken

MOST_GROWTH = 200 * 2**20  # bytes over what loading good ones took


def main(count: int) -> None:
    torch.set_num_threads(1)
    refused = 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        sources = [folder / "one", folder / "shards"]
        for source, sharded in zip(sources, (False, True), strict=True):
            broken.good(source, sharded=sharded)
            load(source)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        target = folder / "broken"
        for seed in range(count):
            broken.broken(sources[seed % 2], target, random.Random(seed))
            try:
                load(target)
            except RegardError:
                refused += 1
            shutil.rmtree(target)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before
    assert grown < MOST_GROWTH, f"memory grew by {grown:,} bytes"
    row = {"checkpoints": count, "refused": refused, "memory_grown_mb": grown / 2**20}
    print(row)
    append("malformed", [row])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 2000)
