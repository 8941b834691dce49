"""The commands models, doctor and bench, which report on this installation."""

from __future__ import annotations

import json
import platform
import re
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from regard import __version__
from regard.cli import options, terminal

if TYPE_CHECKING:
    from regard.models.catalog import Known

# Each package, and what it is needed for if it is optional.
PACKAGES = {
    **dict.fromkeys(("torch", "safetensors", "tokenizers", "rich", "typer"), ""),
    "matplotlib": "pictures as PNG",
    "sacrebleu": "BLEU and chrF",
    "datasets": "Hugging Face datasets in recipes",
    "pandas": "results as tables",
    "xarray": "results as datasets",
    "fastapi": "regard serve",
    "uvicorn": "regard serve",
    "transformers": "watch(), look() and explain() on its models",
    "huggingface_hub": "regard get, models in its cache",
    "triton": "the GPU kernels",
}

# The oldest version that regard supports, and the newest that its tests have run with.
TESTED = {
    "torch": ("2.11", "2.15"),
    "triton": ("3.6", "3.9"),
    "transformers": ("4.57", "5.23"),
}

# ------------------------------------------------------------------------------------------ models


def models(
    name: Annotated[
        str | None, typer.Argument(help="Show the card of this model.", show_default=False)
    ] = None,
    as_json: options.Json = False,
) -> None:
    """List the models that are here, and recommended models that "regard get" downloads.

    Here are the shipped models, those that "regard get" has downloaded, and those in the Hugging
    Face cache. Wherever a command needs a model, give one of these names or a folder.
    """
    from regard.models import catalog

    if name is not None:
        _show_card(catalog.one(name), as_json)
        return
    listed, others = catalog.known(), catalog.recommended()
    if as_json:
        for model in listed:
            print(json.dumps(asdict(model), default=str))
        for other in others:
            facts = {"origin": "recommended", "task": catalog.task_of(other.architecture)}
            print(json.dumps(asdict(other) | facts))
        return
    table = terminal.table(
        "name", "task", "architecture", "parameters", "size", "licence",
        numbers=["parameters", "size"],
    )  # fmt: skip
    for model in listed:
        parameters = "" if model.parameters is None else f"{model.parameters / 1e6:,.1f} M"
        size = f"{model.size / 1e6:,.1f} MB"
        table.add_row(model.name, model.task, model.architecture, parameters, size, model.licence)
    if listed:
        terminal.show(table)
        typer.echo()
    for origin, place in catalog.places().items():
        count = sum(model.origin == origin for model in listed)
        typer.echo(f"{count} {origin}: {place}")
    if others:
        typer.echo("\nRecommended, and not here yet. To download one: regard get NAME\n")
        table = terminal.table("name", "tasks", "parameters", "size", "licence",
                               numbers=["parameters", "size"])  # fmt: skip
        for other in others:
            parameters = f"{other.parameters / 1e6:,.0f} M"
            size = f"{other.size / 1e6:,.0f} MB"
            table.add_row(other.short, other.tasks, parameters, size, other.licence)
        terminal.show(table)


def _show_card(model: Known, as_json: bool) -> None:
    from regard.checkpoints import cards
    from regard.checkpoints.downloads import read_lock

    file = model.folder / cards.CARD
    facts, text = cards.front_matter(file.read_text("utf-8", "replace") if file.is_file() else "")
    if as_json:
        print(json.dumps(asdict(model) | {"card": facts, "text": text}, default=str))
        return
    table = terminal.facts()
    for key, value in (facts or {"name": model.name, "task": model.task}).items():
        table.add_row(key, value)
    if model.origin == "downloaded":
        table.add_row("revision", read_lock(model.folder).revision)
    table.add_row("size", f"{model.size / 1e6:,.1f} MB")
    table.add_row("folder", str(model.folder))
    terminal.show(table)
    console = Console()
    if console.is_terminal:
        from rich.markdown import Markdown

        console.print(Markdown(text))
    else:
        print(f"\n{text.strip()}")


# ------------------------------------------------------------------------------------------ doctor


def doctor() -> None:
    """Show versions, devices, and which backends can run on this machine."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    from regard.mechanism.backends import BACKENDS

    table = terminal.facts()
    table.add_row("regard", __version__)
    table.add_row("python", f"{platform.python_version()} on {platform.system()}")
    for name, use in PACKAGES.items():
        try:
            installed = version(name)
            note = remark(name, installed)
        except PackageNotFoundError:
            installed, note = "not installed", ""
        table.add_row(name, installed + (f" ({use})" if use else "") + note)
    table.add_row(
        "cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        table.add_row(f"cuda:{index}", f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        table.add_row("mps", "available")
    for backend in BACKENDS:
        reason = backend.unavailable()
        table.add_row(f"backend {backend.name}", reason or "can run")
    terminal.show(table)


def remark(package: str, installed: str) -> str:
    """Notes on an installed version: whether regard supports it, and which backend is off."""
    if package not in TESTED:
        return ""
    numbers = _numbers(installed)
    oldest, newest = TESTED[package]
    remarks = []
    if numbers < _numbers(oldest):
        remarks.append(f"not supported: regard needs {oldest} or newer")
    elif numbers > _numbers(newest):
        remarks.append(f"newer than {newest}, the newest that regard was tested with")
    if package == "transformers" and numbers < (5, 0):
        remarks.append('look(), explain() and attn_implementation="regard" need 5 or newer')
    if package == "transformers" and numbers >= (5, 19):
        remarks.append('its generate_batch() refuses attn_implementation="regard"')
    if package == "triton":
        from regard.mechanism.backends import hopper

        if (reason := hopper.why_not_triton()) is not None:
            remarks.append(f"the backend 'hopper' is off: {reason}")
    return "".join(f"; {text}" for text in remarks)


def _numbers(version: str) -> tuple[int, int]:
    """The first two numbers of a version."""
    major, minor = re.findall(r"\d+", version)[:2]
    return int(major), int(minor)


# ------------------------------------------------------------------------------------------- bench


def bench(device: options.Device = "auto", as_json: options.Json = False) -> None:
    """Measure the speed on this machine, in about twenty seconds.

    regard and its peer run alternately, and the table shows medians. A ratio above 1 means that
    regard takes longer. "attention, seen" also records the entropy, the peak, the weight that each
    key receives and a 64 x 64 map; "all weights kept" computes these fields from the n x n weights.
    """
    from regard.evaluation import speed

    place = terminal.device(device)
    with terminal.progress(f"on {place}"):
        timed, decoded = list(speed.attend(place)), list(speed.decode(place))
    if as_json:
        for row in timed:
            print(json.dumps({"what": row.what, "peer": row.peer} | asdict(row.times)))
        for model in decoded:
            print(json.dumps(asdict(model)))
        return
    numbers = ("regard, ms", "peer, ms", "regard / peer")
    table = terminal.table("", *numbers[:1], "compared to", *numbers[1:], numbers=numbers)
    for row in timed:
        ours, peer = (f"{seconds * 1e3:,.2f}" for seconds in (row.times.ours, row.times.peer))
        table.add_row(row.what, ours, row.peer, peer, f"{row.times.cost:.2f}")
    terminal.show(table)
    for model in decoded:
        typer.echo(
            f"{model.name} generates {model.tokens_per_second:,.0f} tokens a second for one text"
        )
