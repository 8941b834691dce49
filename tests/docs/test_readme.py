"""What the README says is run: every block of Python and every command, and what they print."""

import io
import os
import re
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from helpers.command import PLAIN, ROOT, regard

README = (ROOT / "README.md").read_text(encoding="utf-8")


class Block(NamedTuple):
    language: str
    code: str
    line: int


BLOCKS = [
    Block(found[1], found[2], README[: found.start()].count("\n") + 1)
    for found in re.finditer(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
]
COMMANDS = [
    pytest.param(command, id=command)
    for block in BLOCKS
    if block.language == "sh"
    for command in block.code.splitlines()
]


def printed(index: int) -> str | None:
    """The output that the README shows right after a block, if it shows any."""
    after = BLOCKS[index + 1] if index + 1 < len(BLOCKS) else None
    return after.code if after and after.language == "text" else None


def test_the_readme_has_two_commands_to_start_with_and_five_examples():
    assert [block.language for block in BLOCKS if block.language not in ("text", "python")] == [
        "sh",
        "sh",
    ]
    assert BLOCKS[0].code.split("\n")[:2] == ["make demo", "make test"]
    assert len(re.findall(r"^\*\*\d\. ", README, re.MULTILINE)) == 5


def test_python_blocks_print_what_is_shown():
    shared: dict[str, object] = {}  # the blocks are read one after another
    for index, block in enumerate(BLOCKS):
        if block.language != "python":
            continue
        output = io.StringIO()
        with redirect_stdout(output):
            exec(compile(block.code, f"README.md:{block.line}", "exec"), shared)
        assert output.getvalue() == (printed(index) or ""), f"README.md:{block.line}"


@cache
def run(command: str) -> subprocess.CompletedProcess[str]:
    """A command of the README: ours within this process, and make's in one of its own."""
    name, *words = shlex.split(command)
    if name == "regard":
        return regard(*words)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [name, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | PLAIN | {"PATH": path, "PYTHONUTF8": "1"},
        check=False,
    )


def test_the_first_command_prints_what_is_shown():
    index = max(i for i, block in enumerate(BLOCKS) if block.language == "sh")
    assert run(BLOCKS[index].code.splitlines()[0]).stdout == printed(index)


@pytest.mark.processes
@pytest.mark.parametrize("command", COMMANDS)
def test_commands_run(command):
    if command == "make test":
        # It is what runs this test; here make only says what it would do.
        shown = run("make --dry-run test")
        assert "pytest" in shown.stdout
    else:
        shown = run(command)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout


@pytest.mark.processes
def test_the_demo_prints_what_is_shown():
    assert printed(0) in run("make demo").stdout
