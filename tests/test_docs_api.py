"""docs/api: every public name is on a page that is up to date, and has an example that runs."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

import regard

ROOT = Path(__file__).parent.parent
API = ROOT / "docs" / "api"

# Public names that still have no example of their own; no other may join them.
WITHOUT_EXAMPLE = {
    *(f"regard.decoding.{name}" for name in ("Beam", "Greedy", "Output", "Sample")),
    "regard.models.Model",
    *(f"regard.shipped.{name}" for name in ("Card", "Score", "card", "folder", "scores")),
    *(
        f"regard.tasks.{name}"
        for name in (
            "answer", "complete", "completing", "summarize", "translate",
            "Answer", "Completion", "Summary", "Translation",
        )
    ),
    *(f"regard.training.{name}" for name in ("Again", "Evaluated", "Result")),
    "regard.training.read_recipe",
    "regard.training.train",
}  # fmt: skip


@pytest.fixture(scope="module")
def generate() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(ROOT / "docs/generate.py")))


def test_the_pages_are_up_to_date(generate):
    pages = generate.api_pages()
    assert {file.name for file in API.iterdir()} == pages.keys(), "run `make docs`"
    for name, page in pages.items():
        assert (API / name).read_text(encoding="utf-8") == page, f"{name}: run `make docs`"


def test_every_public_name_is_on_a_page(generate):
    found = {name for things in generate.public().values() for name, _ in things}
    modules = {"biases", "masks", "pictures"}
    assert set(regard.__all__) - found <= modules | {"__version__"}


def test_every_public_name_has_an_example(generate):
    assert set(generate.without_example()) <= WITHOUT_EXAMPLE


def test_signatures_are_python_and_links_lead_somewhere(generate):
    for name, page in generate.api_pages().items():
        assert " object at 0x" not in page, name
        assert "ForwardRef" not in page, name
        for target in re.findall(r"\]\(([^)#]+\.md)", page):
            assert (API / target).exists(), target
