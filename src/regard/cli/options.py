"""Options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from regard.decoding.strategies import MAX_LENGTH_PENALTY

MODEL = 'A model that "regard models" lists, or a folder.'
ANY_MODEL = f"{MODEL} Any architecture of transformers."

TrustRemoteCode = Annotated[
    bool,
    typer.Option(
        "--trust-remote-code", help="Run the Python code that comes with the model, if any."
    ),
]

Texts = Annotated[
    list[str] | None, typer.Argument(help="The text. Without it, standard input is read.")
]
Model = Annotated[str, typer.Option(help=MODEL)]
ModelArgument = Annotated[str, typer.Argument(help=MODEL)]
AnyModelArgument = Annotated[str, typer.Argument(help=ANY_MODEL)]
Files = Annotated[
    list[Path] | None,
    typer.Option("--file", metavar="FILE", help="Read this file. Repeatable.", show_default=False),
]
File = Annotated[  # a list, so that a second --file can be refused; typer would ignore the first
    list[Path] | None,
    typer.Option("--file", metavar="FILE", help="Read this file.", show_default=False),
]
Batch = Annotated[int, typer.Option(help="The number of inputs in one forward pass.", min=1)]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, one object per line.")]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, ...; auto is cuda if there is a GPU, else cpu.")
]
Precision = Annotated[
    Literal["float32", "bfloat16", "int8"],
    typer.Option(help="The precision of the weights. On most CPUs int8 is the fastest."),
]
Attended = Annotated[bool, typer.Option("--attended", help="Draw the attention weights.")]

# Decoding. The default of each option is the model's own setting.
NumBeams = Annotated[int | None, typer.Option(help="The number of beams; 1 is greedy.", min=1)]
LengthPenalty = Annotated[
    float | None,
    typer.Option(
        help="Above 0 favours longer texts.", min=-MAX_LENGTH_PENALTY, max=MAX_LENGTH_PENALTY
    ),
]
EarlyStopping = Annotated[
    bool | None, typer.Option("--early-stopping", help="Stop when enough beams are finished.")
]
NoRepeat = Annotated[
    int | None, typer.Option(help="Generate no n-gram of this size twice; 0 is no limit.", min=0)
]
MinNewTokens = Annotated[
    int | None, typer.Option(help="The minimum number of tokens to generate.", min=0)
]
MaxNewTokens = Annotated[
    int | None, typer.Option(help="The maximum number of tokens to generate.", min=1)
]

# One head of a model.
Layer = Annotated[
    str | None, typer.Option(help="A layer: 0, 1, ..., or encoder.0, decoder.0, cross.0, ...")
]
Head = Annotated[int | None, typer.Option(help="A head of the layer, from 0.")]
Target = Annotated[
    str | None,
    typer.Option(help="The text that an encoder-decoder writes. Without it, the model writes one."),
]

# Data.
Fields = Annotated[
    tuple[str, str],
    typer.Option(metavar="A B", help="The fields of source and target in JSONL."),
]
Prefix = Annotated[
    str | None,
    typer.Option(
        help="The text before each source; by default from the model's files.", show_default=False
    ),
]
Set = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the recipe. Repeatable."),
]
