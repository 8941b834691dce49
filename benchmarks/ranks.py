"""Training with two processes, one of them killed repeatedly: the files stay equal to the byte.

python benchmarks/ranks.py 20        appended to results/ranks.jsonl
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path

from measure import append, argument_parser

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
from helpers.training_processes import killed_and_restarted, launched, recipe_to_kill


def main(kills: int) -> None:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        raw = recipe_to_kill(folder, steps=20 * kills)
        with launched(raw, folder / "run", restarts=0) as launcher:
            assert launcher.wait() == 0
        row = killed_and_restarted(raw, folder / "run", kills, seed=0)
    row["seconds"] = round(time.perf_counter() - began)
    print(row)
    append("ranks", [row])
    assert not row["different"]


if __name__ == "__main__":
    options = argument_parser(__doc__)
    options.add_argument("count", type=int, nargs="?", default=20, help="number of kills")
    main(options.parse_args().count)
