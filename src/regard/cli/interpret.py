"""The commands explain and look, which show how attention works in a model."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer
from rich.console import Console

from regard.cli import options, terminal, texts
from regard.errors import InputError

if TYPE_CHECKING:
    import torch

    from regard.interpret.cost import CostEstimate
    from regard.interpret.measurement import Look

MAX_UNCONFIRMED_SECONDS = 120.0  # a longer run needs confirmation on a terminal


def explain(
    sentence: Annotated[
        str | None,
        typer.Argument(help="A sentence. Without it, a worked example.", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help=f"Use the weights of a model. {options.ANY_MODEL}")
    ] = None,
    layer: options.Layer = None,
    head: options.Head = None,
    target: options.Target = None,
    heads: Annotated[
        int | None, typer.Option(help="The number of heads without a model; 2 by default.")
    ] = None,
    dim: Annotated[
        int | None, typer.Option(help="The width of an embedding; 8 by default.")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="The seed of the random weights; 0 by default.")
    ] = None,
    word: Annotated[
        str | None, typer.Option(help="The word to follow.", show_default=False)
    ] = None,
    causal: Annotated[bool, typer.Option("--causal", help="Use a causal mask.")] = False,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
) -> None:
    """Show one attention call step by step, with all its numbers.

    Without a model, the weights are random and small.
    """
    from regard.interpret.explaining import inputs
    from regard.mechanism.masks import Causal

    chosen = inputs.explain_options(
        model=model is not None, heads=heads, dim=dim, seed=seed,
        mask=Causal() if causal else None, layer=layer, head=head, target=target, word=word,
        trust_remote_code=trust_remote_code or None,
    )  # fmt: skip
    if model is None:
        shown = inputs.explain(sentence, **chosen)
    else:
        from regard.interpret.explaining.layer import explain_model

        shown = explain_model(model, sentence or "", **chosen)
    console = Console(highlight=False)
    if as_json:
        print(json.dumps(shown.to_dict(), ensure_ascii=False), flush=True)
    elif console.is_terminal:
        console.print(shown)
    else:
        print(shown, flush=True)  # console.print would pad every line with spaces


def look(
    model: options.AnyModelArgument,
    text: Annotated[
        str | None,
        typer.Argument(help="The text. Without it or --file, standard input is read."),
    ] = None,
    file: options.File = None,
    image: Annotated[
        Path | None,
        typer.Option(help="An image for a vision model, instead of a text.", show_default=False),
    ] = None,
    layer: options.Layer = None,
    head: options.Head = None,
    word: Annotated[
        str | None,
        typer.Option(
            help="Show what this word attends to; of an image a patch, ROW,COLUMN, or [CLS].",
            show_default=False,
        ),
    ] = None,
    rows: Annotated[
        str | None,
        typer.Option(metavar="A:B", help="Show rows of tokens A to B-1 of a map, exactly."),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(metavar="C:D", help="Show columns of tokens C to D-1, exactly."),
    ] = None,
    align: Annotated[
        bool,
        typer.Option("--align", help="Align the words of a translation by the best head."),
    ] = False,
    target: options.Target = None,
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
            "--without-first",
            help="Leave out the first token, which gets the unused weight of heads.",
        ),
    ] = False,
    to: Annotated[
        Path | None,
        typer.Option("--to", help="Save the picture as .png, .svg, .html or .txt."),
    ] = None,
    dark: Annotated[
        bool | None,
        typer.Option(
            "--dark/--light",
            help="The background of the page or terminal. SVG and HTML adapt to the browser.",
            show_default=False,
        ),
    ] = None,
    trust_remote_code: options.TrustRemoteCode = False,
    as_json: options.Json = False,
    yes: Annotated[bool, typer.Option("--yes", help="Start a long run without asking.")] = False,
    device: options.Device = "cpu",
) -> None:
    r"""Show what the heads of a model attend to in a text.

    Without --layer and --head, show an overview of all heads. With them, show a map of that head's
    weights. Memory grows with the length of the text, not with its square, so the text can be as
    long as a book. Architectures that regard does not implement are loaded through transformers:
    pip install 'regard\[transformers]'.
    """
    from regard.interpret.comparison import compare as compare_looks
    from regard.pictures.figures import savable

    ranges = _range(rows, "--rows"), _range(columns, "--columns")
    changes = {} if compare is None else _changes(compare)
    if changes and (word is not None or align):
        raise InputError("--compare is for overviews and maps: leave out --word and --align.")
    if "head" in changes and (layer is None or head is None):
        raise InputError(f"--compare {compare} compares two heads: add --layer and --head.")
    if without_first and as_json and to is None:
        raise InputError(
            "--without-first is for pictures, but --json prints numbers: leave one out."
        )
    if to is not None:
        savable(to)
    if image is not None and (text is not None or file or "text" in changes):
        raise InputError(f"Give a text or --image {image}, not both.")
    document = None if image is not None else texts.document(text, file)
    view = _View(
        model, document, image, target, layer, head, word, *ranges, align, trust_remote_code
    )
    place = terminal.device(device)
    shown = view.look(place, yes)
    if changes:
        other = view._replace(**changes)
        names = view.name(changes), other.name(changes)
        shown = compare_looks(shown, other.look(place, yes), names=names)
    if as_json:
        print(json.dumps(shown.to_dict(), ensure_ascii=False), flush=True)
    if to is not None:
        picture = shown.picture(without_first=without_first)
        if to.suffix.lower() == ".png":
            picture.png(to, dark=bool(dark))
        else:
            picture.save(to)
    elif not as_json:
        terminal.draw(shown.picture(without_first=without_first), dark=dark is not False)


class _View(NamedTuple):
    """The arguments of a call of look()."""

    model: str
    text: str | None
    image: Path | None
    target: str | None
    layer: str | None
    head: int | None
    word: str | None
    rows: range | None
    columns: range | None
    align: bool
    trust_remote_code: bool

    def look(self, device: torch.device, yes: bool) -> Look:
        from regard.interpret.looking import look as run
        from regard.interpret.subjects.library import open_model

        opened = open_model(self.model, device, trust_remote_code=self.trust_remote_code)
        with ExitStack() as stack:
            bars: list[Callable[[int, int], None]] = []

            def progress(done: int, total: int) -> None:
                if not bars:  # not earlier: a moving bar would overwrite the question of _announce
                    bars.append(stack.enter_context(terminal.progress("Looking")))
                bars[0](done, total)

            return run(
                opened, self.text, image=self.image, target=self.target, layer=self.layer,
                head=self.head, word=self.word, rows=self.rows, columns=self.columns,
                alignment=self.align, on_estimate=lambda cost: _announce(cost, yes),
                progress=progress,
            )  # fmt: skip

    def name(self, changes: dict[str, Any]) -> str:
        """The name of this view in a comparison: its model, its text or its head."""
        if "model" in changes:
            return self.model
        if "text" in changes:
            line = " ".join((self.text or "").split())
            return line if len(line) <= 24 else line[:23] + "…"
        return f"head {self.layer}.{self.head}"


def _changes(compare: str) -> dict[str, Any]:
    """The fields of a view that --compare changes."""
    what, sign, other = compare.partition("=")
    if not sign or not other or what not in ("model", "text", "head"):
        raise InputError(
            f"--compare is model=NAME, text=TEXT or head=LAYER.HEAD, but got {compare!r}."
        )
    if what != "head":
        return {what: other}
    layer, _, head = other.rpartition(".")
    if not layer or not head.isdigit():
        raise InputError(f"--compare head=LAYER.HEAD needs a value such as 3.7, not {other!r}.")
    return {"layer": layer, "head": int(head)}


def _range(text: str | None, option: str) -> range | None:
    if text is None:
        return None
    start, colon, stop = text.partition(":")
    if not colon or not start.isdigit() or not stop.isdigit():
        raise InputError(f"{option} is a range of tokens such as 100:150, but got {text!r}.")
    return range(int(start), int(stop))


def _announce(cost: CostEstimate, yes: bool) -> None:
    """Print the cost of a long run, and ask before a very long run."""
    print(f"{cost}.", file=sys.stderr, flush=True)
    asks = sys.stdin is not None and sys.stdin.isatty() and sys.stderr.isatty() and not yes
    if cost.seconds > MAX_UNCONFIRMED_SECONDS and asks:
        try:
            confirmed = typer.confirm("Continue?", default=True, err=True)
        except typer.Abort:
            confirmed = False
        if not confirmed:
            raise typer.Exit(130)
