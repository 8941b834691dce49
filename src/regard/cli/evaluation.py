"""regard evaluate: the scores of a model on a part of its recipe's data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import terminal
from regard.cli.training import Settings
from regard.errors import InputError

if TYPE_CHECKING:
    from regard.evaluation.measuring import Evaluated
    from regard.evaluation.reproduction import Again


def evaluate(
    model: Annotated[str, typer.Argument(help="A shipped name, a folder or a hub name.")],
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data", metavar="FILE", help="What to measure on; repeatable. Without, its card."
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="tsv, jsonl, parallel, questions, squad or text; by the file's name if not given.",
            show_default=False,
        ),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option("--targets", metavar="FILE", help="Of parallel text, the other side."),
    ] = None,
    columns: Annotated[
        tuple[int, int],
        typer.Option(metavar="A B", help="Of TSV, the columns of source and target."),
    ] = (1, 2),
    fields: Annotated[
        tuple[str, str],
        typer.Option(metavar="A B", help="Of JSONL, the fields of source and target."),
    ] = ("source", "target"),
    part: Annotated[
        tuple[int, int],
        typer.Option(metavar="A B", help="Of 1000 parts by MD5 of the source, from A to below B."),
    ] = (0, 1000),
    prefix: Annotated[
        str | None,
        typer.Option(
            help="What comes before each source; as the model's files say if not given.",
            show_default=False,
        ),
    ] = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="bleu, chrf, rouge-1, rouge-2, rouge-l; exact, f1; perplexity, bits_per_byte, "
            "loss. Repeatable; all that fit if not given.",
            show_default=False,
        ),
    ] = None,
    beam: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Beams of decoding, 1 is greedy; as the model's files say if not given.",
            show_default=False,
        ),
    ] = None,
    limit: Annotated[int, typer.Option(min=0, help="The most texts; 0 for all.")] = 0,
    changes: Settings = None,
    root: Annotated[Path, typer.Option(help="The folder that files are relative to.")] = Path(),
    device: terminal.Device = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure a model on data, or measure again all that its card says.

    Without --data, every figure of a shipped model's card is measured again; --root is the folder
    of the data they are about. The exit status is 1 where one differs by more than its tolerance.
    """
    if data is None:
        _card(model, root, device, as_json)
        return
    from regard.evaluation.measuring import evaluate as measure
    from regard.evaluation.measuring import own_settings, scored_row
    from regard.models.bundle import open_bundle

    one = open_bundle(model, device=terminal.device(device))
    own = own_settings(one)
    own_prefix = own.pop("prefix", "")
    if beam is not None:
        own["evaluation.num_beams"] = beam
    source: dict[str, Any] = {
        "format": form or _form(data[0], bool(targets), scored_row(one.model).name == "bert"),
        "files": data,
        "targets": targets or [],
        "columns": list(columns),
        "fields": list(fields),
        "part": list(part),
        "prefix": own_prefix if prefix is None else prefix,
    }
    said = [f"{name}={json.dumps(value)}" for name, value in own.items()]
    settings = [*said, f"evaluation.examples={limit}", *(changes or ())]
    with terminal.progress(Path(data[0]).name) as show:
        found = measure(
            one.model,
            one.tokenizer,
            [source],
            metric or (),
            root=root,
            settings=settings,
            progress=show,
        )
    _print_scores(model, found, as_json)


def _form(file: str, parallel: bool, asks: bool) -> str:
    """The format of a file by its name."""
    if parallel:
        return "parallel"
    name = Path(file.removesuffix(".gz").removesuffix(".xz"))
    if name.suffix == ".csv":
        raise InputError(f"CSV is not read: save {file} as TSV, with a tab between its columns.")
    forms = {".tsv": "tsv", ".txt": "text", ".json": "squad"}
    forms[".jsonl"] = "questions" if asks else "jsonl"
    if name.suffix not in forms:
        raise InputError(f"What {file} holds, its name does not say. Pass --format.")
    return forms[name.suffix]


def _print_scores(model: str, found: Evaluated, as_json: bool) -> None:
    if as_json:
        whole = {"model": model, "scores": found.scores, found.unit: found.count}
        print(json.dumps(whole | {"bad": len(found.report.bad)}))
        return
    table = terminal.table("score", "value", numbers=["value"])
    for name, value in found.scores.items():
        table.add_row(name, f"{value:.4g}" if abs(value) < 1e-2 else f"{value:.3f}")
    terminal.show(table)
    typer.echo(f"over {found.count:,} {found.unit}; {found.report}")


def _card(model: str, root: Path, device: str, as_json: bool) -> None:
    from regard.checkpoints.hub import find
    from regard.evaluation.reproduction import reproduce

    found: list[Again] = []
    with terminal.progress(model) as show:
        for again in reproduce(
            find(model), root=root, device=terminal.device(device), progress=show
        ):
            found.append(again)
    if as_json:
        for row in found:
            said = {"metric": row.score.metric, "data": row.score.data, "card": row.score.value}
            print(json.dumps(said | {"here": row.value, "agrees": row.agrees}))
    else:
        table = terminal.table(
            "score", "data", "card", "here", "tolerance", "", numbers=["card", "here", "tolerance"]
        )
        for row in found:
            files = ", ".join(name for source in row.score.data for name in source["files"])
            numbers = (row.score.value, row.value, row.score.tolerance)
            table.add_row(
                row.score.metric,
                files,
                *(f"{number:.3f}" for number in numbers),
                "agrees" if row.agrees else "differs",
            )
        terminal.show(table)
    if not all(row.agrees for row in found):
        raise typer.Exit(1)
