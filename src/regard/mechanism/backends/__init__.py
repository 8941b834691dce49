"""The backends, fastest first, and the choice of a backend for a call.

``unavailable()`` returns why a backend cannot run on this machine, ``refuses(call)`` why it cannot
run this call; None means that it can. "auto" takes the first backend with neither reason. An error
in one backend never switches to another. ``hopper`` runs some passes on the kernels of ``triton``.
Two backends check the inputs and use ``tiled.by_rows`` (plain PyTorch on blocks of rows) if their
own kernel would give wrong results: ``sdpa`` if a NaN or infinity could leak through a mask or no
query may attend to any key, ``native`` if the inputs contain a NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from regard.errors import BackendError, InputError
from regard.kernels.plan import Choice
from regard.mechanism.backends import cpu as cpu_backend
from regard.mechanism.backends import hopper, reference, residues, sdpa, tiled
from regard.mechanism.backends import triton as triton_backend
from regard.mechanism.backends.lowering import plan_kernels
from regard.mechanism.call import Call
from regard.mechanism.seeing import See, Seen


@dataclass(frozen=True, slots=True)
class Backend:
    """An implementation of attention, and the conditions under which it can run.

    ``run`` returns the output and, if the call has ``see``, a Seen with its fields but ``sink`` and
    ``scores``, which ``complete`` adds. The output of a query without keys is 0, its lse -inf.
    """

    name: str
    unavailable: Callable[[], str | None]
    refuses: Callable[[Call], str | None]
    run: Callable[[Call], tuple[Tensor, Seen | None]]


def _no_reason(*_: object) -> str | None:
    return None


BACKENDS = (
    Backend("hopper", hopper.unavailable, hopper.refuses, hopper.run),
    Backend("triton", triton_backend.unavailable, triton_backend.refuses, triton_backend.run),
    Backend("sdpa", _no_reason, sdpa.refuses, sdpa.run),
    Backend("native", cpu_backend.unavailable, cpu_backend.refuses, cpu_backend.run),
    Backend("tiled", _no_reason, tiled.refuses, tiled.run),
    Backend("reference", _no_reason, _no_reason, reference.run),
)


def choose(call: Call, name: str = "auto") -> Backend:
    """Return the named backend, or for "auto" the first backend that can run the call."""
    for backend in BACKENDS:
        if name not in ("auto", backend.name):
            continue
        reason = backend.refuses(call) or backend.unavailable()  # refuses() is faster
        if reason is None:
            return backend
        if name != "auto":
            raise BackendError(f"The backend {name!r} cannot run this call: {reason}")
    names = ", ".join(repr(backend.name) for backend in BACKENDS)
    raise InputError(f"There is no backend {name!r}. Pass 'auto' or one of {names}.")


def runner(call: Call, name: str = "auto") -> Callable[[], tuple[Tensor, Seen | None]]:
    """Return a function that runs the call on the backend that ``choose`` returns.

    Unless the backend is "reference", ``residues.sort`` turns a dilated mask into ranges.
    """
    by_residue = None if name == "reference" else residues.sort(call)
    if by_residue is None:
        return partial(choose(call, name).run, call)
    run = choose(by_residue.call, name).run
    return lambda: by_residue.restore(*run(by_residue.call))


def complete(call: Call, see: See, seen: Seen | None) -> Seen:
    """Add the fields of ``see`` that no backend computes: ``sink``, ``scores``, lse with sinks."""
    if seen is None:
        sizes = (call.extent.batch, call.extent.heads, call.extent.queries, call.extent.keys)
        seen = Seen(extent=sizes)
    if call.sinks is not None and seen.lse is not None:
        sinks = call.sinks.to(seen.lse.dtype)[:, None]
        # Backends mark a query without keys by -inf; all of its weight is on the sink.
        lse = torch.where(seen.lse == -torch.inf, sinks, seen.lse)
        seen.lse = lse if see.lse else None
        if see.sink:
            seen.sink = (sinks - lse).exp()
    if see.scores is not None:
        seen.scores = reference.chosen_scores(call, see.scores)
    return seen


@dataclass(frozen=True)
class Why:
    """Why each backend refuses a call, or None. The first backend that accepts it is chosen.

    If the chosen backend has several passes, ``passes`` holds the kernel of each pass and why each
    faster kernel was not chosen.
    """

    answers: dict[str, str | None]
    passes: dict[str, Choice]

    @property
    def chosen(self) -> str:
        return next(name for name, reason in self.answers.items() if reason is None)

    def __repr__(self) -> str:
        width = max(map(len, self.answers))
        lines = []
        for name, reason in self.answers.items():
            mark = "->" if name == self.chosen else "  "
            lines.append(f"{mark} {name:<{width}}  {reason or 'can run it'}")
            if name == self.chosen:
                lines += [
                    f"   {'':<{width}}  {title}: {choice}" for title, choice in self.passes.items()
                ]
        return "\n".join(lines)


def why(call: Call) -> Why:
    """Collect each backend's reason against a call, and the passes of the chosen backend."""
    by_residue = residues.sort(call)
    call = call if by_residue is None else by_residue.call
    answers = {b.name: b.refuses(call) or b.unavailable() for b in BACKENDS}
    chosen = Why(answers, {}).chosen
    if chosen in ("hopper", "triton"):
        return Why(answers, plan_kernels(call, hopper=chosen == "hopper").choices)
    return Why(answers, {})
