"""A server as a user starts it, in a process of its own and at a free port; and patience."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from test_cli import PLAIN, START


def until(so: Callable[[], object], seconds: float = 30) -> None:
    """Wait for something to be so."""
    end = time.monotonic() + seconds
    while not so():
        assert time.monotonic() < end, f"not within {seconds} seconds"
        time.sleep(0.02)


@contextmanager
def serving(*words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """Its address, and its process, which ends with the block."""
    with subprocess.Popen(
        [sys.executable, "-c", START, "serve", "--port", "0", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=PLAIN,
    ) as process:
        try:
            line = process.stdout.readline()
            found = re.fullmatch(r"Open (http://127\.0\.0\.1:\d+) \(Ctrl-C ends it\)\n", line)
            assert found, line + (process.stderr.read() if not line else "")
            yield found[1], process
        finally:
            process.kill()
