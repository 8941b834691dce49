"""README.md and docs: figures come from benchmarks/results, links lead somewhere, examples run."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def names_of(paths: list[Path]) -> list[str]:
    return [str(path.relative_to(ROOT)) for path in paths]


@pytest.fixture(scope="module")
def tables() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/tables.py")))


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


@pytest.mark.parametrize("path", PAGES, ids=names_of(PAGES))
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


def test_the_examples_of_the_gpu_guide_run():
    shared: dict[str, object] = {}
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    examples = re.findall(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert examples
    for example in examples:
        exec(compile(example, "docs/gpu.md", "exec"), shared)
