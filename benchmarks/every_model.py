"""Watch a tiny model of every model type of transformers, and compare it with a run unwatched.

python benchmarks/every_model.py                        results/every_model.jsonl
python benchmarks/every_model.py bert swin              only these, printed and not kept
python benchmarks/every_model.py --output rows.jsonl    another file

Two processes share the types. One that crashes or takes too long is replaced. A run that was
interrupted continues where it stopped, as long as the commit is the same.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from measure import RESULTS, argument_parser, environment

LIMIT = 120  # seconds for one model type
PROCESSES = 2
ROOT = Path(__file__).parent.parent


def work() -> None:
    """Read model types from standard input; write a line of JSON for each."""
    import warnings

    import torch
    import transformers

    sys.path.insert(0, str(ROOT / "tests"))
    from helpers.tiny_models import build
    from helpers.watched_runs import compare

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what models print is no answer
    for line in sys.stdin:
        model_type = line.strip()
        try:
            model, inputs = build(model_type)
        except Exception as error:  # noqa: BLE001  the reason is a row of the table
            row = {"status": "not built", "reason": str(error)}
        else:
            row = {"inputs": {name: list(tensor.shape) for name, tensor in inputs.items()}}
            row |= compare(model, inputs)
        answers.write(json.dumps({"model_type": model_type, **row}) + "\n")
        answers.flush()


class Worker:
    """A process that compares one model type after another."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def compare(self, model_type: str) -> dict[str, Any]:
        if self.process is None:
            offline = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--work"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL, text=True, env=os.environ | offline,
            )  # fmt: skip
        process = self.process
        assert process.stdin is not None
        assert process.stdout is not None
        started = time.monotonic()
        process.stdin.write(model_type + "\n")
        process.stdin.flush()
        timer = threading.Timer(LIMIT, process.kill)
        timer.start()
        line = process.stdout.readline()
        timer.cancel()
        seconds = round(time.monotonic() - started, 1)
        if line:
            return json.loads(line) | {"seconds": seconds}
        self.stop()
        code = process.returncode
        ended = f"took more than {LIMIT} s" if seconds >= LIMIT else f"process ended with {code}"
        return {
            "model_type": model_type,
            "status": "not ended",
            "reason": ended,
            "seconds": seconds,
        }

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


def sweep(model_types: list[str], output: Path | None) -> None:
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()
    for model_type in model_types:
        waiting.put(model_type)
    lock, suffix = threading.Lock(), environment() | {"transformers": version("transformers")}

    def share() -> None:
        worker = Worker()
        while True:
            try:
                model_type = waiting.get_nowait()
            except queue.Empty:
                break
            row = worker.compare(model_type)
            with lock:
                print(f"{row['model_type']:40} {row['status']:10} {row.get('reason', '')[:150]}")
                sys.stdout.flush()
                if output is None:
                    print(json.dumps(row))
                else:
                    with output.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row | suffix) + "\n")
        worker.stop()

    threads = [threading.Thread(target=share) for _ in range(PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _measured(path: Path, commit: str) -> set[str]:
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines()) if path.exists() else []
    commit = commit.removesuffix("-dirty")
    return {r["model_type"] for r in rows if r["commit"].removesuffix("-dirty") == commit}


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("model_types", nargs="*")
    parser.add_argument("--work", action="store_true", help="what the processes run")
    parser.add_argument("--output", type=Path, default=RESULTS / "every_model.jsonl")
    options = parser.parse_args()
    if options.work:
        work()
    elif options.model_types:
        sweep(options.model_types, output=None)
    else:
        sys.path.insert(0, str(ROOT / "tests"))
        from helpers.tiny_models import model_types

        done = _measured(options.output, environment()["commit"])
        sweep([each for each in model_types() if each not in done], options.output)


if __name__ == "__main__":
    main()
