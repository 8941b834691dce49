"""Commands that tell what is here: doctor."""

from __future__ import annotations

import platform
from importlib.metadata import version

from rich.console import Console
from rich.table import Table

from regard import __version__


def doctor() -> None:
    """What regard finds on this machine: versions, devices, and which backends can run."""
    import torch

    from regard.mechanism.backends import BACKENDS

    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("regard", __version__)
    table.add_row("python", f"{platform.python_version()} on {platform.system()}")
    for name in ("torch", "safetensors", "rich", "typer"):
        table.add_row(name, version(name))
    table.add_row(
        "cpu", f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        table.add_row(f"cuda:{index}", f"{found.name}, {found.total_memory / 2**30:.0f} GiB")
    if torch.backends.mps.is_available():
        table.add_row("mps", "available")
    for backend in BACKENDS:
        reason = backend.unavailable()
        table.add_row(f"backend {backend.name}", reason or "can run")
    Console(highlight=False).print(table)
