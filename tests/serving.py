"""A server as a user starts it: a process of its own, at a port that is free."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from test_cli import PLAIN, START


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
