"""Commands that show what attention does: explain, look."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer
from rich.console import Console

from regard.cli import tasks, terminal
from regard.errors import InputError

if TYPE_CHECKING:
    from regard.interpret.cost import CostEstimate
    from regard.interpret.measurement import Look
    from regard.pictures.figures import Picture
    from regard.pictures.terminal import Colouring

PATIENCE = 120.0  # seconds; for longer than this one is asked first


def explain(
    sentence: Annotated[
        str | None,
        typer.Argument(help="Your own; without one, a worked example.", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Follow a model's own numbers: shipped, a folder, or of the hub."),
    ] = None,
    layer: Annotated[
        str | None, typer.Option(help="Of the model: 0, encoder.0, cross.0; 0 if not given.")
    ] = None,
    head: Annotated[int | None, typer.Option(help="Of the layer; 0 if not given.")] = None,
    target: Annotated[
        str | None, typer.Option(help="What an encoder-decoder is to have written.")
    ] = None,
    heads: Annotated[int | None, typer.Option(help="Heads of a sentence; 2 if not given.")] = None,
    dim: Annotated[int | None, typer.Option(help="Numbers per word; 8 if not given.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random numbers; 0 if not given.")] = None,
    word: Annotated[
        str | None, typer.Option(help="The word to follow closely.", show_default=False)
    ] = None,
    causal: Annotated[
        bool, typer.Option("--causal", help="Let no word look at later ones.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print all numbers as JSON.")] = False,
) -> None:
    """One attention step by step, with all its numbers.

    Without a model the numbers are small and made up, with one they are its own.
    """
    from regard.interpret.explaining import inputs
    from regard.mechanism.masks import Causal

    options = inputs.explain_options(
        model=model is not None, heads=heads, dim=dim, seed=seed,
        mask=Causal() if causal else None, layer=layer, head=head, target=target, word=word,
    )  # fmt: skip
    if model is None:
        shown = inputs.explain(sentence, **options)
    else:
        from regard.interpret.explaining.layer import explain_model

        shown = explain_model(model, sentence or "", **options)
    console = Console(highlight=False)
    if as_json:
        print(json.dumps(shown.to_dict(), ensure_ascii=False), flush=True)
    elif console.is_terminal:
        console.print(shown)
    else:
        print(shown, flush=True)  # plain, and without the spaces that fill a terminal's lines


def look(
    model: Annotated[str, typer.Argument(help=tasks.MODEL)],
    text: Annotated[
        str | None,
        typer.Argument(help="What it is to read; else --file or standard input."),
    ] = None,
    file: tasks.File = None,
    layer: Annotated[
        str | None, typer.Option(help="A layer: 0, 1 ...; or encoder.0, decoder.0, cross.0.")
    ] = None,
    head: Annotated[int | None, typer.Option(help="A head of the layer, from 0 on.")] = None,
    word: Annotated[
        str | None, typer.Option(help="Show what this word attends to.", show_default=False)
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Exact rows of the head's map, from token A to before B."),
    ] = None,
    columns: Annotated[
        str | None, typer.Option(metavar="C:D", help="The same for its columns.")
    ] = None,
    align: Annotated[
        bool,
        typer.Option("--align", help="Show which words a translation came from, by the best head."),
    ] = False,
    target: Annotated[
        str | None,
        typer.Option(help="What an encoder-decoder is to have written; else it writes itself."),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="WHAT=OTHER",
            help="Show the difference: model=NAME, text=TEXT, or head=LAYER.HEAD.",
        ),
    ] = None,
    without_first: Annotated[
        bool,
        typer.Option(
            "--without-first", help="Leave out the first token, on which many heads rest."
        ),
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Save the picture: .png, .svg, .html or .txt."),
    ] = None,
    dark: Annotated[
        bool | None,
        typer.Option(
            "--dark/--light",
            help="For a page or terminal of that kind; SVG and HTML suit both.",
            show_default=False,
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the numbers as JSON.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Start a long run without asking.")] = False,
    device: terminal.Device = "cpu",
) -> None:
    """What each layer and head of a model does to a text.

    By itself an overview of all heads; with a layer and a head, that head's weights as a map. A
    text may be as long as a book: it is read in memory that grows with its length, not the square.
    """
    from regard.interpret.comparison import compare as compare_looks
    from regard.interpret.looking import look as run
    from regard.models.bundle import open_bundle
    from regard.pictures.figures import savable

    asked = _Asked(layer, head, word, _range(rows, "--rows"), _range(columns, "--columns"))
    what, other = ("", "") if compare is None else _other(compare)
    if what and (word is not None or align):
        raise InputError("--compare is for overviews and maps: leave out --word and --align.")
    if what == "head":
        if layer is None or head is None:
            raise InputError(
                f"--compare {compare} is with another head: give --layer and --head, too."
            )
        asked.at(other)
    if without_first and as_json and to is None:
        raise InputError("--without-first is of pictures; --json has all numbers.")
    if to is not None:
        savable(to)
    document = tasks._document(text, file)
    place = terminal.device(device)

    def one(name: str, document: str, asked: _Asked) -> Look:
        bundle = open_bundle(name, device=place)
        with ExitStack() as stack:
            bars: list[Callable[[int, int], None]] = []

            def progress(done: int, total: int) -> None:
                if not bars:  # only now: a bar that moves would write over the question before
                    bars.append(stack.enter_context(terminal.progress("Looking")))
                bars[0](done, total)

            return run(
                bundle, document, target=target, layer=asked.layer,
                head=asked.head, word=asked.word, rows=asked.rows, columns=asked.columns,
                alignment=align, on_estimate=lambda cost: _announce(cost, yes), progress=progress,
            )  # fmt: skip

    found = one(model, document, asked)
    if what:
        second = {
            "model": lambda: one(other, document, asked),
            "text": lambda: one(model, other, asked),
            "head": lambda: one(model, document, asked.at(other)),
        }[what]()
        names = {
            "model": (model, other),
            "text": (_short(document), _short(other)),
            "head": (f"head {layer}.{head}", f"head {other}"),
        }[what]
        found = compare_looks(found, second, names=names)
    if as_json:
        print(json.dumps(found.to_dict(), ensure_ascii=False), flush=True)
    if to is not None:
        picture = found.picture(without_first=without_first)
        if to.suffix.lower() == ".png":
            picture.png(to, dark=bool(dark))
        else:
            picture.save(to)
    elif not as_json:
        _draw(found.picture(without_first=without_first), dark is not False)


class _Asked(NamedTuple):
    """Which part of the model to look at."""

    layer: str | None
    head: int | None
    word: str | None
    rows: range | None
    columns: range | None

    def at(self, other: str) -> _Asked:
        """The same in another head, named as LAYER.HEAD."""
        layer, _, head = other.rpartition(".")
        if not layer or not head.isdigit():
            raise InputError(f"--compare head=LAYER.HEAD is as head=3.7, but got {other!r}.")
        return self._replace(layer=layer, head=int(head))


def _range(text: str | None, option: str) -> range | None:
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    if not colon or not start.isdigit() or not stop.isdigit():
        raise InputError(f"{option} is a range of tokens such as 100:150, but got {text!r}.")
    return range(int(start), int(stop))


def _other(text: str) -> tuple[str, str]:
    what, sign, other = text.partition("=")
    if not sign or not other or what not in ("model", "text", "head"):
        raise InputError(
            f"--compare is model=NAME, text=TEXT or head=LAYER.HEAD, but got {text!r}."
        )
    return what, other


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 24 else line[:23] + "…"


def _announce(cost: CostEstimate, yes: bool) -> None:
    """Say what a long run will take, and where it takes very long, ask."""
    print(f"{cost}.", file=sys.stderr, flush=True)
    asks = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty() and not yes
    if cost.seconds > PATIENCE and asks:
        try:
            goes_on = typer.confirm("Go on?", default=True, err=True)
        except typer.Abort:
            goes_on = False
        if not goes_on:
            raise typer.Exit(130)


def _draw(picture: Picture, dark: bool) -> None:
    console = Console()
    systems: dict[str | None, Colouring] = {"truecolor": "truecolor", "256": "256"}
    color = "none" if console.no_color else systems.get(console.color_system, "none")
    width = console.width if console.is_terminal else shutil.get_terminal_size().columns
    print(picture.text(width=max(width, 40), color=color, dark=dark), end="", flush=True)
