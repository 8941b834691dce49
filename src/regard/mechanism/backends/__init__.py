"""The backends, fastest first, and how one is chosen for a call.

``unavailable()`` is the reason why a backend cannot run on this machine, ``refuses(call)`` why it
cannot run this call; None where it can. "auto" takes the first backend with neither reason. No
backend catches an error of another. ``hopper`` runs single passes on the kernels of ``triton``.
Two others check the numbers of a call while they run it, and compute it by ``tiled.by_rows``, plain
PyTorch on blocks of rows, where their kernel would be wrong: ``sdpa`` where a NaN or infinity could
leak through a mask, and where no query may attend to any key; ``native`` where the inputs hold a
NaN or infinity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from regard.errors import BackendError, InputError
from regard.kernels.plan import Choice
from regard.mechanism.backends import cpu as cpu_backend
from regard.mechanism.backends import hopper, reference, sdpa, tiled
from regard.mechanism.backends import triton as triton_backend
from regard.mechanism.backends.lowering import plan_kernels
from regard.mechanism.call import Call
from regard.mechanism.seeing import Seen


@dataclass(frozen=True, slots=True)
class Backend:
    """A way to compute attention, and when it can."""

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
    """The backend for a call: the named one, or the first that can run it."""
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


@dataclass(frozen=True)
class Why:
    """Each backend's reason against a call, or None. The first backend without one is chosen.

    ``passes`` are the kernels of each pass, if the chosen backend has several, and the reason
    against each faster variant.
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
    """Ask each backend about a call, and the chosen one about its passes."""
    answers = {b.name: b.refuses(call) or b.unavailable() for b in BACKENDS}
    chosen = Why(answers, {}).chosen
    if chosen in ("hopper", "triton"):
        return Why(answers, plan_kernels(call, hopper=chosen == "hopper").choices)
    return Why(answers, {})
