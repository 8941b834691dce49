"""docs/api: every public name is on a page that is up to date, and has an example that runs."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import regard

ROOT = Path(__file__).parents[2]
API = ROOT / "docs" / "api"


@pytest.fixture(scope="module")
def generate() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/generate.py")))


def test_the_pages_are_up_to_date(generate):
    pages = generate.api_pages()
    assert {file.name for file in API.iterdir()} == pages.keys(), "run `make docs`"
    for name, page in pages.items():
        assert (API / name).read_text(encoding="utf-8") == page, f"{name}: run `make docs`"


def test_every_public_name_is_on_a_page(generate):
    found = {entry.name for entries in generate.public().values() for entry in entries}
    modules = {"biases", "masks", "pictures"}
    assert set(regard.__all__) - found <= modules | {"__version__"}


def test_every_public_name_has_an_example(generate):
    assert generate.without_example() == []


def test_signatures_are_python_and_links_lead_somewhere(generate):
    for name, page in generate.api_pages().items():
        assert " object at 0x" not in page, name
        assert "ForwardRef" not in page, name
        for target in re.findall(r"\]\(([^)#]+\.md)", page):
            assert (API / target).exists(), target
