"""The command evaluate: measure the scores of a model on data."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli import options, terminal
from regard.errors import InputError

if TYPE_CHECKING:
    from regard.evaluation.measuring import Evaluated


def evaluate(
    model: options.ModelArgument,
    data: Annotated[
        list[str] | None,
        typer.Option(
            "--data",
            metavar="FILE",
            help="A file to measure on. Repeatable. Without it, the model's card is checked.",
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            help="tsv, jsonl, parallel, questions, squad or text; by default from the file's name.",
            show_default=False,
        ),
    ] = None,
    targets: Annotated[
        list[str] | None,
        typer.Option("--targets", metavar="FILE", help="The target side of parallel text."),
    ] = None,
    columns: Annotated[
        tuple[int, int],
        typer.Option(metavar="A B", help="The columns of source and target in TSV."),
    ] = (1, 2),
    fields: options.Fields = ("source", "target"),
    part: Annotated[
        tuple[int, int],
        typer.Option(
            metavar="A B", help="Use parts A to B-1 of 1000, chosen by the MD5 of the source."
        ),
    ] = (0, 1000),
    prefix: options.Prefix = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="bleu, chrf, rouge-1, rouge-2, rouge-l, exact, f1, perplexity, bits_per_byte or "
            "loss. Repeatable. By default all that apply.",
            show_default=False,
        ),
    ] = None,
    num_beams: options.NumBeams = None,
    limit: Annotated[int, typer.Option(min=0, help="The maximum number of texts; 0 is all.")] = 0,
    changes: options.Set = None,
    root: Annotated[Path, typer.Option(help="The folder of the files.")] = Path(),
    device: options.Device = "auto",
    as_json: options.Json = False,
) -> None:
    """Measure a model on data, or check the figures of its card.

    Without --data, every figure of the model's card is measured again, on the data in --root. The
    exit status is 1 if any figure differs by more than its tolerance.
    """
    if data is None:
        _card(model, root, device, as_json)
        return
    from regard.evaluation.measuring import evaluate as measure
    from regard.evaluation.measuring import own_settings, scored_row
    from regard.models.bundle import open_bundle

    bundle = open_bundle(model, device=terminal.device(device))
    own = own_settings(bundle)
    own_prefix = own.pop("prefix", "")
    if num_beams is not None:
        own["evaluation.num_beams"] = num_beams
    source: dict[str, Any] = {
        "format": form or _form(data[0], bool(targets), scored_row(bundle.model).name == "bert"),
        "files": data,
        "targets": targets or [],
        "columns": list(columns),
        "fields": list(fields),
        "part": list(part),
        "prefix": own_prefix if prefix is None else prefix,
    }
    defaults = [f"{name}={json.dumps(value)}" for name, value in own.items()]
    settings = [*defaults, f"evaluation.examples={limit}", *(changes or ())]
    with terminal.progress(Path(data[0]).name) as show:
        evaluated = measure(
            bundle.model, bundle.tokenizer, [source], metric or (), root=root, settings=settings,
            progress=show,
        )  # fmt: skip
    _print_scores(model, evaluated, as_json)


def _form(file: str, parallel: bool, asks: bool) -> str:
    """The format of a file, from the end of its name."""
    if parallel:
        return "parallel"
    name = Path(file.removesuffix(".gz").removesuffix(".xz"))
    if name.suffix == ".csv":
        raise InputError(f"CSV cannot be read: save {file} as TSV, with a tab between its columns.")
    forms = {".tsv": "tsv", ".txt": "text", ".json": "squad"}
    forms[".jsonl"] = "questions" if asks else "jsonl"
    if name.suffix not in forms:
        raise InputError(f"The name of {file} does not show its format. Pass --format.")
    return forms[name.suffix]


def _print_scores(model: str, evaluated: Evaluated, as_json: bool) -> None:
    if as_json:
        whole = {"model": model, "scores": evaluated.scores, evaluated.unit: evaluated.count}
        print(json.dumps(whole | {"bad": len(evaluated.report.bad)}))
        return
    table = terminal.table("score", "value", numbers=["value"])
    for name, value in evaluated.scores.items():
        table.add_row(name, f"{value:.4g}" if abs(value) < 1e-2 else f"{value:.3f}")
    terminal.show(table)
    typer.echo(f"over {evaluated.count:,} {evaluated.unit}; {evaluated.report}")


def _card(model: str, root: Path, device: str, as_json: bool) -> None:
    from regard.checkpoints.hub import find
    from regard.evaluation.reproduction import reproduce

    place = terminal.device(device)
    with terminal.progress(model) as show:
        rows = list(reproduce(find(model), root=root, device=place, progress=show))
    if as_json:
        for row in rows:
            claim = {"metric": row.score.metric, "data": row.score.data, "card": row.score.value}
            print(json.dumps(claim | {"here": row.value, "agrees": row.agrees}))
    else:
        table = terminal.table(
            "score", "data", "card", "here", "tolerance", "", numbers=["card", "here", "tolerance"]
        )
        for row in rows:
            score = row.score
            files = ", ".join(name for source in score.data for name in source["files"])
            numbers = [f"{number:.3f}" for number in (score.value, row.value, score.tolerance)]
            table.add_row(score.metric, files, *numbers, "agrees" if row.agrees else "differs")
        terminal.show(table)
    if not all(row.agrees for row in rows):
        raise typer.Exit(1)
