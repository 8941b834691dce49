"""regard: fast attention you can see.

The public names, each loaded on first use, so that ``import regard`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regard.errors import BackendError, InputError, RegardError
    from regard.mechanism import attention, biases, masks, why
    from regard.mechanism.biases import Alibi, RelativeBuckets, RelativeContent
    from regard.mechanism.masks import Causal, Padding, Prefix, Segments, Window
    from regard.mechanism.seeing import See, Seen, Top

__version__ = "0.1.0"

_HOMES = {
    "regard.errors": ("BackendError", "InputError", "RegardError"),
    "regard.mechanism": ("attention", "biases", "masks", "why"),
    "regard.mechanism.biases": ("Alibi", "RelativeBuckets", "RelativeContent"),
    "regard.mechanism.masks": ("Causal", "Padding", "Prefix", "Segments", "Window"),
    "regard.mechanism.seeing": ("See", "Seen", "Top"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *sorted(_HOME)]  # noqa: PLE0604


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'regard' has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
