"""Runs trainings in processes of their own, made quickly: PyTorch is imported once, then forked.

For each line on its input, ``{"recipe": ..., "resume": ...}``, it forks a process that trains,
prints its id, and when the process has ended, its exit status.
"""

from __future__ import annotations

import json
import os
import sys

import torch

from regard.training import parse_recipe, train


def main() -> None:
    ended = None
    for line in sys.stdin:
        if ended is not None:  # only now may its id be given to another process
            os.waitpid(ended, 0)
        asked = json.loads(line)
        child = os.fork()
        if not child:
            torch.set_num_threads(1)
            result = train(parse_recipe(asked["recipe"]), resume=asked["resume"])
            os._exit(0 if result.finished else 3)
        print(child, flush=True)  # noqa: T201
        found = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert found is not None
        exited = found.si_code == os.CLD_EXITED
        print(found.si_status if exited else -found.si_status, flush=True)  # noqa: T201
        ended = child


if __name__ == "__main__":
    main()
