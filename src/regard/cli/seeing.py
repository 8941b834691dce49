"""Commands that show what attention does: explain."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console


def explain(
    sentence: Annotated[
        str | None,
        typer.Argument(help="Your own; without one, a worked example.", show_default=False),
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
) -> None:
    """One attention step by step, with all its numbers."""
    from regard.explaining import explain as trace
    from regard.mechanism.masks import Causal

    mask = Causal() if causal else None
    shown = trace(sentence, heads=heads, dim=dim, seed=seed, mask=mask, word=word)
    console = Console(highlight=False)
    if console.is_terminal:
        console.print(shown)
    else:
        print(shown, flush=True)  # plain, and without the spaces that fill a terminal's lines
