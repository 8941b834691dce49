"""Run the command ``regard`` in this process, in another process, or as a server."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest

from regard.cli import main

ROOT = Path(__file__).parents[2]
START = "from regard.cli import main; main()"
PLAIN = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
PATIENCE = 300.0  # seconds after which a test that hangs fails; no test measures time by it

Shown = subprocess.CompletedProcess[str]


def regard(*words: object, given: str | bytes = b"", **settings: str) -> Shown:
    """Run the command in this process, which has loaded PyTorch already.

    ``given`` is the standard input, and ``settings`` are environment variables.
    """
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8") for _ in range(2)]
    arguments = ["regard", *map(str, words)]
    number, path = tempfile.mkstemp()
    Path(path).unlink()
    # The descriptor stays open: a thread of the command may read it after the command has ended,
    # and must not read the input of the next command.
    with (
        open(number, "r+", encoding="utf-8", closefd=False) as standard_input,
        pytest.MonkeyPatch.context() as patch,
        redirect_stdout(streams[0]),
        redirect_stderr(streams[1]),
    ):
        standard_input.buffer.write(given.encode() if isinstance(given, str) else given)
        standard_input.seek(0)
        patch.setattr(sys, "stdin", standard_input)
        patch.setattr(sys, "argv", arguments)
        patch.setattr(warnings, "showwarning", warnings.showwarning)  # main() replaces it
        for name, value in (PLAIN | settings).items():
            patch.setenv(name, value)
        with pytest.raises(SystemExit) as end:
            main()
    texts = []
    for stream in streams:
        stream.seek(0)
        texts.append(stream.read())
    return subprocess.CompletedProcess(arguments, end.value.code or 0, *texts)


def printed(*words: object, **settings: Any) -> str:
    """What the command prints in this process. The command must succeed."""
    shown = regard(*words, **settings)
    assert shown.returncode == 0, shown.stderr
    return shown.stdout


def records(*words: object, **settings: Any) -> list[dict[str, Any]]:
    """The JSON objects that the command prints."""
    lines = printed(*words, "--json", **settings).split("\n")[:-1]
    return [json.loads(line) for line in lines]


def regard_process(*words: object, start: str = START, **settings: str) -> Shown:
    """Run the command in a new process, which has imported nothing yet."""
    with started(*words, start=start, **settings) as process:
        out, err = process.communicate(timeout=PATIENCE)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def started(*words: object, start: str = START, **settings: str) -> subprocess.Popen[str]:
    """Start the command in a new process, and do not wait for its end."""
    return subprocess.Popen(
        [sys.executable, "-c", start, *map(str, words)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | PLAIN | settings,
    )


def one_line(shown: Shown, message: str = "", status: int = 2) -> str:
    """The line on standard error of a command that failed and printed nothing else."""
    assert (shown.returncode, shown.stdout) == (status, ""), shown.stderr
    assert shown.stderr.startswith("regard: ")
    assert shown.stderr.count("\n") == 1, shown.stderr
    assert message in shown.stderr
    return shown.stderr


def until(so: Callable[[], object]) -> None:
    """Wait until ``so()`` is true."""
    end = time.monotonic() + PATIENCE
    while not so():
        assert time.monotonic() < end, f"not within {PATIENCE} seconds"
        time.sleep(0.02)


@contextmanager
def serving(*words: str) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server at a free port: its address and its process. It is killed after the block."""
    with started("serve", "--port", "0", *words) as process:
        try:
            line = process.stdout.readline()
            ready = r"Open (http://127\.0\.0\.1:\d+) \(Ctrl-C stops the server\)\n"
            address = re.fullmatch(ready, line)
            assert address, line + (process.stderr.read() if not line else "")
            yield address[1], process
        finally:
            process.kill()
