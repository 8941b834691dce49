"""Write what the program itself can say: commands, recipes, the API. Run by `make docs`."""

from __future__ import annotations

import ast
import inspect
import io
import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any, ForwardRef

from rich.console import Console
from rich.terminal_theme import TerminalTheme

import regard
from regard.cli import app
from regard.training import describe

DOCS = Path(__file__).parent
PLAIN = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb", "PYTHONUTF8": "1"}
INK, GREY, BLUE = (40, 44, 52), (110, 115, 125), (40, 90, 200)
RED, GREEN, YELLOW, PURPLE, CYAN = (
    (190, 50, 50), (30, 130, 76), (150, 110, 20), (140, 60, 160), (0, 110, 130),
)  # fmt: skip
PAPER = TerminalTheme((255, 255, 255), INK, [INK, RED, GREEN, YELLOW, BLUE, PURPLE, CYAN, GREY])


def help_page() -> str:
    """Every command's --help, as Markdown."""
    parts = ["# The command line\n\nWritten by `make docs`; a test fails when it drifts.\n"]
    names = [command.callback.__name__ for command in app.registered_commands]
    for command in ([], *([name] for name in names)):
        shown = subprocess.run(
            [sys.executable, "-c", "from regard.cli import main; main()", *command, "--help"],
            capture_output=True,
            text=True,
            check=True,
            env=os.environ | PLAIN,
        ).stdout
        text = "\n".join(line.rstrip() for line in shown.splitlines()).strip("\n")
        parts.append(f"\n## regard {' '.join(command)}".rstrip() + f"\n\n```text\n{text}\n```\n")
    return "".join(parts)


def recipe_page() -> str:
    """Every key of a recipe, as Markdown."""
    lines = [
        "# Recipes",
        "",
        "What `regard train` reads: a TOML file. `--set key=value` sets any of these keys, and an",
        "unknown one is refused with the nearest name. Written by `make docs`; a test fails when",
        "it drifts.",
        "",
        "| key | default | meaning |",
        "|---|---|---|",
    ]
    for name, default, meaning in describe():
        lines.append(f"| `{name}` | {default} | {meaning.replace('|', chr(92) + '|')} |")
    return "\n".join(lines) + "\n"


def worked_example() -> str:
    """The worked example as an SVG without any outside asset."""
    console = Console(
        record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(regard.explain(), highlight=False)
    svg = console.export_svg(title="regard explain", theme=PAPER, unique_id="regard")
    svg = re.sub(r"@font-face \{.*?\}\s*|<!--.*?-->\s*", "", svg, flags=re.DOTALL)
    return svg.replace("Fira Code", "ui-monospace, Menlo, Consolas")


def heads() -> str:
    """All heads of a shipped model, and the weights of its induction head, as an SVG."""
    text = "The cat sat on the mat. The cat sat on the mat."
    overview = regard.look("books-gpt2", text)
    one = regard.look("books-gpt2", text, layer=3, head=1)
    return regard.pictures.panels(
        f"books-gpt2 reads “{text}”",
        [
            regard.pictures.head_grid(
                overview.values["induction"].tolist(), "weight", title="Induction, every head"
            ),
            regard.pictures.weight_map(
                one.weights, one.queries, one.keys, title="Layer 3, head 1: all weights"
            ),
        ],
        caption="Induction is the weight on the token that followed the same token before. "
        "Head 1 of layer 3 does it: the second “the” attends to the first “mat”.",
    ).svg()


# ----------------------------------------------------------------------------------------- the API

# What is public beside the names of `regard` itself, by the module that has it.
BESIDE = {
    "regard.mechanism.masks": ("Dense",),
    "regard.mechanism.biases": ("Dense",),
    "regard.models": ("Model",),
    "regard.pictures": (
        "Picture", "weight_map", "pooled_map", "head_grid", "top_keys", "alignment", "page",
    ),
    "regard.training": (
        "train", "Result", "read_recipe", "parse_recipe", "evaluate", "Evaluated", "reproduce",
        "Again",
    ),
    "regard.converting": ("convert",),
    "regard.shipped": ("names", "folder", "card", "scores", "Card", "Score"),
}  # fmt: skip


def public() -> dict[str, list[tuple[str, Any]]]:
    """Every public name and what it is, by module, in the order in which they are defined."""
    homes = {home: list(names) for home, names in regard._HOMES.items()}
    for home, names in BESIDE.items():
        homes.setdefault(home, []).extend(names)
    found: dict[str, list[tuple[str, Any]]] = {}
    for home, names in sorted(homes.items()):
        things = [(name, getattr(import_module(home), name)) for name in names]
        things = [(name, thing) for name, thing in things if not isinstance(thing, ModuleType)]
        found[home] = sorted(things, key=lambda pair: _place(pair[1]))
    return found


def without_example() -> list[str]:
    """The public names that no example shows: neither their docstring nor one of their methods."""
    found = []
    for home, things in public().items():
        for name, thing in things:
            parts = [thing, *vars(thing).values()] if inspect.isclass(thing) else [thing]
            docs = [getattr(part, "__doc__", None) or "" for part in parts]
            if not any(">>>" in doc for doc in docs):
                found.append(f"{home}.{name}")
    return found


def _place(thing: Any) -> tuple[str, int]:
    if not _ours(thing):  # wherever the other library is installed, it comes last
        return "~", 0
    # By module, not by path: a context manager's function has contextlib's, wherever Python lies.
    return thing.__module__, inspect.getsourcelines(thing)[1]


def _ours(thing: Any) -> bool:
    return str(getattr(thing, "__module__", "regard")).partition(".")[0] == "regard"


def api_pages() -> dict[str, str]:
    """The pages of docs/api, by file name."""
    index = [
        "# The API, page by page",
        "",
        "Every public name with its signature, its shapes and an example that a test runs. Names",
        "of `regard` itself are imported from there; others from the module that the page names.",
        "Written by `make docs`; a test fails when it drifts.",
        "",
    ]
    pages = {}
    for home, things in public().items():
        file = home.removeprefix("regard.").replace(".", "-") + ".md"
        lines = [f"# {home}", "", _markdown(inspect.getdoc(import_module(home)) or ""), ""]
        for name, thing in things:
            lines += _entry(name, thing, "regard" if name in regard.__all__ else home)
        pages[file] = "\n".join(lines).rstrip() + "\n"
        anchors = [name.lower() for name, _ in things]
        for number, anchor in enumerate(anchors):
            if same := anchors[:number].count(anchor):
                anchors[number] += f"-{same}"  # as Markdown's readers name them
        pairs = zip(things, anchors, strict=True)
        links = ", ".join(f"[`{name}`]({file}#{anchor})" for (name, _), anchor in pairs)
        index.append(f"- [{home}]({file}): {links}")
    pages["README.md"] = "\n".join(index) + "\n"
    return pages


def _entry(name: str, thing: Any, home: str) -> Iterator[str]:
    if not _ours(thing):
        yield from (f"## {name}", "", f"PyTorch's own: `{thing.__module__}.{name}`.", "")
        return
    yield from (f"## {name}", "", "```python", _signature(f"{home}.{name}", thing), "```", "")
    yield from (_markdown(inspect.getdoc(thing) or ""), "")
    if not inspect.isclass(thing):
        return
    if rows := list(_fields(thing)):
        yield from ("| field | meaning |", "|---|---|", *rows, "")
    for member, method in vars(thing).items():
        inner = method.__func__ if isinstance(method, classmethod | staticmethod) else method
        if isinstance(method, property):
            inner = method.fget
        doc = inner.__doc__ if inspect.isfunction(inner) else None
        if member.startswith("_") or not doc:
            continue
        shown = member if isinstance(method, property) else _signature(member, inner)
        yield from (f"### {name}.{member}", "", "```python", shown, "```", "")
        yield from (_markdown(inspect.cleandoc(doc)), "")


def _signature(name: str, thing: Callable[..., Any]) -> str:
    """As it is called, on one line or, where that is too long, on one for each argument."""
    try:
        signature = inspect.signature(thing)
    except ValueError:  # of an exception
        return name
    parts: list[str] = []
    named = False
    for part in signature.parameters.values():
        if part.name in ("self", "cls"):
            continue
        if part.kind is part.KEYWORD_ONLY and not named:
            named = True
            parts.append("*")
        stars = {part.VAR_POSITIONAL: "*", part.VAR_KEYWORD: "**"}.get(part.kind, "")
        typed = "" if part.annotation is part.empty else f": {_type(part.annotation)}"
        default = "" if part.default is part.empty else f" = {part.default!r}"
        parts.append(stars + part.name + typed + default)
    returns = signature.return_annotation
    silent = returns is signature.empty or inspect.isclass(thing)
    tail = "" if silent else f" -> {_type(returns)}"
    whole = f"{name}({', '.join(parts)}){tail}"
    if len(whole) <= 88:
        return whole
    return "\n".join([f"{name}(", *(f"    {part}," for part in parts), f"){tail}"])


def _type(annotation: Any) -> str:
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)


def _fields(kind: type) -> Iterator[str]:
    """The fields of a class that a comment stands behind, with the comment."""
    source = textwrap.dedent(inspect.getsource(kind))
    lines = source.splitlines()
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if isinstance(node, ast.AnnAssign):
            line = lines[(node.end_lineno or 1) - 1]
            behind = line.encode()[node.end_col_offset :].decode().partition("# ")[2]
            if behind:
                behind = behind.replace("|", chr(92) + "|")
                yield f"| `{ast.unparse(node.target)}` | {behind} |"


def _markdown(doc: str) -> str:
    """A docstring as Markdown: examples and what is indented after a colon become blocks."""
    doc = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", doc).replace("``", "`")
    lines: list[str] = []
    for block in re.split(r"\n{2,}", doc):
        if block.startswith(">>>"):
            lines += ["```python", block, "```", ""]
        elif block.startswith("    "):
            lines += ["```text", textwrap.dedent(block), "```", ""]
        else:
            lines += [re.sub(r"::$", ":", block), ""]
    return "\n".join(lines).rstrip()


if __name__ == "__main__":
    import tables  # lies beside this file

    (DOCS / "images").mkdir(exist_ok=True)
    (DOCS / "help.md").write_text(help_page(), encoding="utf-8")
    (DOCS / "recipes.md").write_text(recipe_page(), encoding="utf-8")
    (DOCS / "api").mkdir(exist_ok=True)
    for left in (DOCS / "api").glob("*.md"):
        left.unlink()
    for name, page in api_pages().items():
        (DOCS / "api" / name).write_text(page, encoding="utf-8")
    (DOCS / "images" / "explain.svg").write_text(worked_example(), encoding="utf-8")
    (DOCS / "images" / "heads.svg").write_text(heads(), encoding="utf-8")
    tables.write()
