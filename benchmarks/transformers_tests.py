"""Run transformers' own model tests, unchanged, with every call of a model inside ``watch()``.

python benchmarks/transformers_tests.py SOURCE                    results/transformers_tests.jsonl
python benchmarks/transformers_tests.py SOURCE t5 gpt2                 only these families
python benchmarks/transformers_tests.py SOURCE t5 --output rows.jsonl  another file
python benchmarks/transformers_tests.py SOURCE --few                   the tests named in FEW alone

SOURCE is a checkout of transformers at the tag of the installed version. Tests that fail are run
again unwatched: a test that then passes is different.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure import RESULTS, argument_parser, environment

ROOT = Path(__file__).parent.parent
LIMIT = 1800  # seconds for one run of pytest, unless --limit says otherwise
FAMILIES = (
    "llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "bert", "roberta", "distilbert",
    "albert", "electra", "deberta_v2", "bart", "mbart", "pegasus", "marian", "t5", "gpt2",
    "mixtral", "phi3", "falcon", "mpt", "bloom", "gpt_neox", "gpt_oss", "opt", "vit", "siglip",
    "clip", "whisper", "longformer", "detr", "sam", "olmo2",
)  # fmt: skip
# Neither processes of its own, nor graphs and devices that no watcher can enter, nor downloads.
# Saving in many precisions (bc_torch_dtype) calls no model; sdpa_kernels repeats a test with other
# kernels of PyTorch's for GPUs, and fp16 repeats one that bf16 covers on a CPU.
LEFT_OUT = (
    "fsdp", "compil", "export", "tensor_parallel", "tp_", "flash", "flex", "Integration", "fx",
    "offload", "pipeline", "parallel", "disk", "hub", "training_overfit", "jit", "multi_gpu",
    "deepspeed", "bc_torch_dtype", "sdpa_kernels", "fp16",
)  # fmt: skip
# What shows most of watching in the least time: one process runs these of all families.
FEW = (
    "attention_outputs", "batching_equivalence", "retain_grad", "use_reentrant_false",
    "greedy_generate", "static_cache", "left_padding", "determinism", "cross_attention",
)  # fmt: skip

Rows = dict[str, dict[str, Any]]


def run(tests: list[str], options: argparse.Namespace, *, watch: bool) -> tuple[Rows, bool]:
    """Run tests or files of them; what the plugin wrote, by test, and whether all ended."""
    chosen = " and ".join(f"not {name}" for name in LEFT_OUT)
    if options.few:
        chosen = f"({' or '.join(FEW)}) and {chosen}"
    with tempfile.TemporaryDirectory() as folder:
        calls = Path(folder) / "calls.jsonl"
        calls.touch()
        paths = os.pathsep.join([str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")])
        settings = {
            "PYTHONPATH": paths, "REGARD_CALLS": str(calls), "REGARD_WATCH": str(int(watch)),
            "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [
            sys.executable, "-m", "pytest", "-q",
            "-n", str(options.processes if options.processes > 1 else 0),
            "-p", "helpers.watch_every_call", "-p", "no:cacheprovider", "-p", "no:warnings",
            "-k", chosen, *tests,
        ]  # fmt: skip
        ended = True
        try:
            subprocess.run(
                command, cwd=options.source, env=os.environ | settings, timeout=options.limit,
                check=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            ended = False
        rows: Rows = {}
        for row in map(json.loads, calls.read_text(encoding="utf-8").splitlines()):
            before = rows.get(row["test"])  # a subtest, whose counts the later rows include
            if before is not None and before["outcome"] == "failed":
                row |= {"outcome": "failed", "reason": before["reason"]}
            rows[row["test"]] = row
        return rows, ended


def compare(families: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """What the tests of each family found."""
    files = {family: f"tests/models/{family}/test_modeling_{family}.py" for family in families}
    watched, ended = run(list(files.values()), options, watch=True)
    failed = [test for test, row in watched.items() if row["outcome"] == "failed"]
    plain = run(failed, options, watch=False)[0] if failed else {}
    rows = []
    for family, file in files.items():
        mine = {test: row for test, row in watched.items() if test.startswith(f"{file}::")}
        if not mine:
            continue  # the time ended before
        different = [test for test in mine if plain.get(test, {}).get("outcome") == "passed"]
        rows.append(
            {"family": family, "ended": ended, "few": options.few, **found(mine, different)}
        )
    return rows


def found(watched: Rows, different: list[str]) -> dict[str, Any]:
    """The sums over the tests of one family."""
    failed = [test for test, row in watched.items() if row["outcome"] == "failed"]
    outcomes = Counter(row["outcome"] for row in watched.values())
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    unseen: Counter[str] = Counter()
    largest: dict[str, float] = {}
    for row in watched.values():
        largest |= {what: max(gap, largest.get(what, 0.0)) for what, gap in row["largest"].items()}
        counts.update(row["counts"])
        reasons.update(row["reasons"])
        unseen.update(row["unseen"])
    return {
        "tests": outcomes["passed"] + outcomes["failed"],
        "passed": outcomes["passed"],
        "skipped": outcomes["skipped"],
        "different tests": {_name(test): watched[test]["reason"] for test in different},
        "failed unwatched, too": {
            _name(test): watched[test]["reason"] for test in failed if test not in different
        },
        "tests with": {
            kind: sum(row["counts"].get(kind, 0) > 0 for row in watched.values())
            for kind in ("refused", "unseen", "unseen, not named")
        },
        "largest differences": largest,
        "counts": dict(counts),
        "reasons": dict(reasons),
        "unseen": dict(unseen),
    }


def _commit(source: Path) -> str:
    git = ["git", "-C", str(source), "log", "-1", "--format=%h of %cs"]
    return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()


def _name(test: str) -> str:
    return test.rpartition("::")[2]


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("source", type=Path)
    parser.add_argument("families", nargs="*", default=FAMILIES)
    parser.add_argument("--output", type=Path, default=RESULTS / "transformers_tests.jsonl")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--few", action="store_true")
    parser.add_argument("--limit", type=int, default=LIMIT)
    options = parser.parse_args()
    suffix = environment() | {
        "transformers": version("transformers"),
        "source": _commit(options.source),
    }
    together = [options.families] if options.few else [[family] for family in options.families]
    for families in together:
        for row in compare(families, options):
            print(json.dumps(row, indent=1), flush=True)
            with options.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row | suffix) + "\n")


if __name__ == "__main__":
    main()
