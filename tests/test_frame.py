"""The frame: imports run down only, nothing heavy is imported early, and public names resolve."""

import ast
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import regard

SOURCE = Path(regard.__file__).parent
MODULES = sorted(SOURCE.rglob("*.py"))

# What each room may import, from the ground up. Every room may import errors and itself.
GROUND = {"checkpoints", "kernels", "mechanism", "layers", "text"}
MODELS = GROUND | {"decoding", "models"}
ROOMS = {
    "errors": set(),
    "kernels": set(),
    "mechanism": {"kernels"},
    "checkpoints": set(),
    "pictures": set(),
    "text": {"checkpoints"},
    "layers": {"mechanism", "kernels"},
    "data": {"text", "checkpoints"},
    "decoding": {"layers", "mechanism", "checkpoints"},
    "models": GROUND | {"decoding"},
    "interpret": MODELS | {"pictures"},
    "evaluation": MODELS | {"data"},
    "tasks": MODELS | {"interpret", "pictures"},
    "training": MODELS | {"data", "evaluation", "interpret", "pictures"},
    "server": MODELS | {"interpret", "pictures", "tasks"},
    "cli": MODELS | {"evaluation", "interpret", "pictures", "server", "tasks", "training"},
    "__main__": {"cli"},
}


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


NAMES = {name_of(path) for path in MODULES}


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports_of(path: Path, *, types: bool = False) -> set[str]:
    """The modules of regard that a file imports when it runs, inside functions too.

    With ``types`` also those that it imports for type annotations only.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test) and not types:
            node.body = []  # never runs
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are written in full, from regard down"
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {name for name in found if name in NAMES}


def test_each_room_imports_what_its_row_allows():
    wrong = []
    for path in MODULES:
        here = name_of(path)
        if here == "regard":
            continue  # the table of public names, loaded on first use
        room = part_of(here)
        assert room in ROOMS, f"{here} is in no room: give it a row in ROOMS"
        for target in imports_of(path, types=True) - {"regard"}:
            if part_of(target) in ROOMS[room] | {room, "errors"}:
                continue
            if target.count(".") > 1 or (SOURCE / part_of(target)).with_suffix(".py").exists():
                wrong.append(f"{here} imports {target}: {room} may not import {part_of(target)}")
    assert not wrong, "\n".join(wrong)


def test_the_rooms_have_an_order():
    TopologicalSorter(ROOMS).prepare()  # raises CycleError, which names the cycle


def test_no_module_is_named_like_a_public_function():
    public = {name for name in regard.__all__ if callable(getattr(regard, name))}
    names = {name_of(path).rpartition(".")[2] for path in MODULES}
    assert not names & public


def test_no_module_imports_itself_around_a_corner():
    graph = {}
    for path in MODULES:
        here = name_of(path)
        # `from package import module` runs the package's __init__ first; that is no dependency.
        around = {here.rpartition(".")[0]}
        graph[here] = imports_of(path) - around - {here}
    TopologicalSorter(graph).prepare()  # raises CycleError, which names the cycle


@pytest.mark.processes
def test_the_walk_sees_imports_inside_functions(tmp_path):
    file = tmp_path / "module.py"
    file.write_text(
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from regard.cli import main\n"
        "def late():\n    from regard.mechanism import masks\n"
    )
    assert imports_of(file) == {"regard.mechanism", "regard.mechanism.masks"}
    assert imports_of(file, types=True) > {"regard.cli", "regard.mechanism.masks"}


def modules_after(code: str) -> set[str]:
    """The modules that are loaded once some code has run in a fresh Python, and their packages."""
    code += "\nimport sys; print('LOADED', *sys.modules)"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=os.environ
    )
    loaded = shown.stdout.rpartition("LOADED")[2].split()
    return {module.partition(".")[0] for module in loaded} | set(loaded)


HEAVY = {"torch", "transformers", "tokenizers", "fastapi", "matplotlib", "triton", "numpy", "rich"}


@pytest.mark.processes
def test_using_a_model_does_without_the_compiler():
    assert "torch._dynamo" not in modules_after("import regard.tasks")  # it takes a second


@pytest.mark.processes
def test_import_regard_is_light():
    assert not modules_after("import regard") & HEAVY


@pytest.mark.processes
@pytest.mark.parametrize("words", [["--help"], ["explain", "--help"], ["--version"]])
def test_help_imports_no_torch(words):
    code = (
        "import sys\nfrom regard.cli import main\n"
        f"sys.argv = ['regard', *{words!r}]\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code, end.code"
    )
    assert not modules_after(code) & (HEAVY - {"rich"})


@pytest.mark.processes
def test_attention_needs_torch_alone():
    heavy = modules_after("from regard import attention, explain") & HEAVY
    assert heavy <= {"torch", "numpy"}  # numpy comes with torch


@pytest.mark.parametrize("name", regard.__all__)
def test_public_names_resolve(name):
    assert getattr(regard, name) is not None
    assert name in dir(regard)


def test_the_three_lists_of_public_names_agree():
    tree = ast.parse((SOURCE / "__init__.py").read_text(encoding="utf-8"))
    typed = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "regard"
        for alias in node.names
    }
    homes = {name for names in regard._HOMES.values() for name in names} | set(regard._MODULES)
    assert typed == homes
    assert set(regard.__all__) == homes | {"__version__"}


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        regard.nothing  # noqa: B018
