"""README.md and docs: what is generated is up to date, links lead somewhere, examples run."""

import io
import os
import re
import runpy
import shlex
import subprocess
import sys
from contextlib import redirect_stdout
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

import regard
from helpers import command as commands
from helpers.command import ROOT

PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


@pytest.fixture(scope="module")
def tables() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/tables.py")))


@pytest.fixture(scope="module")
def generate() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/generate.py")))


@pytest.mark.slow
def test_generated_pages_are_up_to_date(generate):
    pages = generate.pages()
    assert set((ROOT / "docs/api").iterdir()) <= pages.keys(), "run `make docs`"
    for path, page in pages.items():
        assert path.read_text(encoding="utf-8") == page, f"{path.name}: run `make docs`"
        assert not re.search(" object at 0x|ForwardRef", page), path.name


@pytest.mark.slow
def test_every_public_name_is_on_a_page_with_an_example(generate):
    found = {entry.name for entries in generate.public().values() for entry in entries}
    assert set(regard.__all__) - found <= {"biases", "masks", "pictures", "__version__"}
    assert generate.without_example() == []


def tips(svg: str) -> tuple[list[str], list[float]]:
    """What the cells of a picture say: the text, and the weights, whose last digits may differ."""
    cells = [tip.partition(": ") for tip in re.findall(r"<title>(.*?)</title>", svg)[1:]]
    return [name for name, _, _ in cells], [float(value.split()[0]) for _, _, value in cells]


def test_pictures_are_up_to_date(generate):
    shown, drawn = (
        (ROOT / f"docs/images/{n}.svg").read_text("utf-8") for n in ("explain", "heads")
    )
    # The last digits of the difference to attention() are the machine's.
    difference = re.compile(r"\d\.\de-\d\d")
    made = difference.sub("", generate.worked_example())
    assert difference.sub("", shown) == made, "run `make docs`"
    words, numbers = tips(drawn)
    expected_words, expected_numbers = tips(generate.heads())
    assert words == expected_words, "run `make docs`"
    assert numbers == pytest.approx(expected_numbers, abs=1e-3), "run `make docs`"
    for svg in (shown, drawn):
        assert re.findall(r"https?:[^\s\"]*", svg) == ["http://www.w3.org/2000/svg"]


def test_tables_are_up_to_date(tables):
    for path in tables.pages():
        page = path.read_text(encoding="utf-8")
        assert page == tables.filled(page), f"{path.name}: run `make docs`"


def test_every_generated_table_is_on_a_page(tables):
    marked = [
        match[3] for path in tables.pages() for match in tables.MARKED.finditer(path.read_text())
    ]
    assert set(marked) == tables.BLOCKS.keys()
    markers = [len(re.findall("<!-- (?:table|figure):", path.read_text())) for path in PAGES]
    assert sum(markers) == len(marked)  # each is closed, and on a page that `make docs` fills


def test_a_table_is_from_the_newest_commit_that_measured_all_of_it(tables, tmp_path, monkeypatch):
    lines = [
        '{"commit": "a", "cell": 1, "time": 1}',
        '{"commit": "a", "cell": 2, "time": 2}',
        '{"commit": "b-dirty", "cell": 1, "time": 3}',
        '{"commit": "b", "cell": 2, "time": 4}',
        '{"commit": "c", "cell": 2, "time": 5}',
    ]
    (tmp_path / "case.jsonl").write_text("\n".join(lines), encoding="utf-8")
    monkeypatch.setitem(tables.results.__globals__, "RESULTS", tmp_path)
    rows = tables.results("case", lambda row: row["cell"], [2, 1])
    assert [row["time"] for row in rows] == [4, 3]
    with pytest.raises(ValueError, match="No commit in"):
        tables.results("case", lambda row: row["cell"], [1, 2, 3])


def anchors(page: str) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    before = [plain[:number].count(anchor) for number, anchor in enumerate(plain)]
    return {f"{a}-{count}" if count else a for a, count in zip(plain, before, strict=True)}


@pytest.mark.parametrize("path", PAGES, ids=[str(path.relative_to(ROOT)) for path in PAGES])
def test_links_lead_somewhere(path):
    page = path.read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", page, flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        target, _, anchor = link.partition("#")
        file = (path.parent / target).resolve() if target else path
        assert file.exists(), link
        if anchor:
            assert anchor in anchors(file.read_text(encoding="utf-8")), link


# --------------------------------------------------------------------------------- what pages say


class Block(NamedTuple):
    language: str
    code: str
    line: int
    printed: str | None


def blocks(page: str) -> list[Block]:
    """The blocks of code of a page, each with the output that is shown after it, if any is."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = list(re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    shown = [match[2] if match[1] == "text" else None for match in found[1:]]
    lines = [text[: match.start()].count("\n") + 1 for match in found]
    return [
        Block(match[1], match[2], line, output)
        for match, line, output in zip(found, lines, [*shown, None], strict=True)
    ]


README = blocks("README.md")
COMMANDS = [
    pytest.param(command, id=command)
    for block in README
    if block.language == "sh"
    for command in block.code.splitlines()
]


def test_the_readme_has_two_commands_to_start_with_and_five_examples():
    start, then = [block for block in README if block.language not in ("text", "python")]
    assert start.language == then.language == "sh"
    assert start.code.split("\n")[:2] == ["make demo", "make test"]
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(re.findall(r"^\*\*\d\. ", text, re.MULTILINE)) == 5


@pytest.mark.parametrize(
    "page",
    [
        "README.md",
        "docs/gpu.md",
        "docs/looking.md",
        "docs/meanings.md",
        "docs/results.md",
        "docs/transformers.md",
        "docs/watching.md",
    ],
)
def test_python_blocks_print_what_is_shown(page):
    shared: dict[str, object] = {}  # the blocks are read one after another
    examples = [block for block in blocks(page) if block.language == "python"]
    assert examples
    left_out = False
    for block in examples:
        if "to_xarray" in block.code and find_spec("xarray") is None:
            left_out = True
            continue
        output = io.StringIO()
        with redirect_stdout(output):
            exec(compile(block.code, f"{page}:{block.line}", "exec"), shared)
        if page != "docs/gpu.md":  # what it prints depends on the machine
            assert output.getvalue() == (block.printed or ""), f"{page}:{block.line}"
    if left_out:
        pytest.skip("NOT TESTED: the example with xarray, which is not installed")


@cache
def run(command: str) -> subprocess.CompletedProcess[str]:
    """A command of the README: ours within this process, and make's in one of its own."""
    name, *words = shlex.split(command)
    if name == "regard":
        return commands.regard(*words)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(
        [name, *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | commands.PLAIN | {"PATH": path, "PYTHONUTF8": "1"},
        check=False,
    )


def test_the_first_command_prints_what_is_shown():
    *_, block = (block for block in README if block.language == "sh")
    assert run(block.code.splitlines()[0]).stdout == block.printed


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
    assert README[0].printed in run("make demo").stdout
