"""Run transformers' own model tests, unchanged, with every call of a model inside ``watch()``.

python benchmarks/transformers_tests.py SOURCE         appended to results/transformers_tests.jsonl
python benchmarks/transformers_tests.py SOURCE t5 gpt2      only these, printed and not kept

SOURCE is a checkout of transformers at the tag of the installed version. Tests that fail are run
again unwatched: a test that then passes is different, one that fails again is a foreign error.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure import append, argument_parser

ROOT = Path(__file__).parent.parent
LIMIT = 1800  # seconds for the tests of one family
FAMILIES = (
    "albert", "bart", "bert", "bloom", "clip", "deberta_v2", "deepseek_v3", "distilbert", "falcon",
    "gemma2", "gemma3", "gpt2", "gpt_neox", "gpt_oss", "jamba", "llama", "llava", "longformer",
    "mistral", "modernbert", "mpt", "olmo2", "phi3", "qwen2_vl", "qwen3", "roberta", "sam", "swin",
    "t5", "vit", "whisper",
)  # fmt: skip
# Neither processes of its own, nor graphs and devices that no watcher can enter, nor downloads.
LEFT_OUT = (
    "fsdp", "compil", "export", "tensor_parallel", "tp_", "flash", "flex", "Integration", "fx",
    "offload", "pipeline", "parallel", "disk", "hub", "training_overfit", "jit", "multi_gpu",
    "deepspeed",
)  # fmt: skip

Rows = dict[str, dict[str, Any]]


def run(source: Path, tests: list[str], watch: bool) -> Rows:
    """Run tests or files of them; what the plugin wrote, by test."""
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "calls.jsonl"
        calls.touch()
        paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        settings = {
            "PYTHONPATH": paths, "REGARD_CALLS": str(calls), "REGARD_WATCH": str(int(watch)),
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "helpers.watch_every_call",
            "-p", "no:cacheprovider", "-p", "no:warnings", "-k",
            " and ".join(f"not {name}" for name in LEFT_OUT),
            *tests,
        ]  # fmt: skip
        try:
            subprocess.run(
                command, cwd=source, env=os.environ | settings, timeout=LIMIT, check=False,
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            print(f"{tests[0]} took more than {LIMIT} s", file=sys.stderr)
        rows: Rows = {}
        for row in map(json.loads, calls.read_text(encoding="utf-8").splitlines()):
            before = rows.get(row["test"])  # a subtest, whose counts the later rows include
            if before is not None and before["outcome"] == "failed":
                row |= {"outcome": "failed", "reason": before["reason"]}
            rows[row["test"]] = row
        return rows


def compare(source: Path, family: str) -> dict[str, Any]:
    """What the tests of one family found."""
    watched = run(source, [f"tests/models/{family}/test_modeling_{family}.py"], watch=True)
    failed = [test for test, row in watched.items() if row["outcome"] == "failed"]
    plain = run(source, failed, watch=False) if failed else {}
    different = [test for test, row in plain.items() if row["outcome"] == "passed"]
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    unseen: Counter[str] = Counter()
    for row in watched.values():
        counts.update(row["counts"])
        reasons.update(row["reasons"])
        unseen.update(row["unseen"])
    return {
        "family": family,
        "passed": sum(row["outcome"] == "passed" for row in watched.values()),
        "skipped": sum(row["outcome"] == "skipped" for row in watched.values()),
        "foreign errors": len(failed) - len(different),
        "different tests": {
            test.rpartition("::")[2]: watched[test]["reason"] for test in different
        },
        "counts": dict(counts),
        "reasons": dict(reasons),
        "unseen": dict(unseen),
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("families", nargs="*")
    options = parser.parse_args()
    for family in options.families or FAMILIES:
        row = compare(options.source, family)
        print(json.dumps(row, indent=1), flush=True)
        if not options.families:
            append("transformers_tests", [row | {"transformers": version("transformers")}])


if __name__ == "__main__":
    main()
