"""Building the CPU kernel: once, by the compiler found here, into the user's cache folder."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path

_SOURCES = [
    Path(__file__).with_name(name) for name in ("attention.cpp", "linear.cpp", "products.h")
]
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-fPIC", "-shared", "-fopenmp", "-Wno-psabi")


class Task(ctypes.Structure):
    """``Call`` in attention.cpp, field by field."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in (
            "batch", "heads", "key_heads", "queries", "keys", "width", "value_width",
            "threads", "chunks", "map_rows", "map_columns", "kept_rows", "pair_count", "top",
        )],
        *[(name, ctypes.c_float) for name in ("scale", "softcap")],
        *[(name, ctypes.c_void_p) for name in ("query", "key", "value")],
        *[(name, ctypes.c_int64 * 3) for name in ("query_strides", "key_strides", "value_strides")],
        *[(name, ctypes.c_void_p) for name in ("low", "high", "bias")],
        ("bias_length", ctypes.c_int64),
        *[(name, ctypes.c_void_p) for name in (
            "output", "lse", "entropy", "peak", "highest", "distance", "received", "map",
            "map_peak", "places", "kept", "pair_first", "pair_keys", "pairs",
            "top_weights", "top_keys", "packed_keys", "packed_values", "scratch",
        )],
    ]  # fmt: skip


class Weights(ctypes.Structure):
    """``Weights`` in linear.cpp, field by field."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("weight", "sums", "scale", "bias")],
        *[(name, ctypes.c_int64) for name in ("inputs", "outputs", "depth")],
    ]


@cache
def library() -> ctypes.CDLL | str:
    """The kernel, built where it is not yet; or the reason why there is none."""
    if sys.platform != "linux":
        return f"the kernel is built on Linux, and this is {sys.platform}."
    named = shlex.split(os.environ.get("CXX", ""))
    present = [name for name in ("g++", "clang++", "c++") if shutil.which(name)]
    if not named and not present:
        return "there is no C++ compiler (g++, clang++, or what CXX names) to build the kernel."
    command = [*(named or present[:1]), *_FLAGS]
    try:
        # What the compiler takes this machine for: a folder may be shared by different ones.
        machine = _compile([*command, "-dM", "-E", "-x", "c++", os.devnull])
        known = "\n".join((*(source.read_text() for source in _SOURCES), *command, machine))
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
        built = folder / f"native-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
        if not built.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as workshop:
                fresh = Path(workshop) / built.name
                _compile([*command, "-o", str(fresh), *map(str, _SOURCES[:2])])
                fresh.replace(built)  # whole, or not at all
        loaded = ctypes.CDLL(str(built))
    except subprocess.SubprocessError as error:
        said = getattr(error, "stderr", None) or ""
        return f"the kernel could not be built: {error} {said.strip()[-500:]}".strip()
    except OSError as error:
        return f"the kernel could not be built, kept or loaded: {error}"
    task, sizes = ctypes.POINTER(Task), ctypes.POINTER(ctypes.c_int64)
    loaded.sizes.argtypes, loaded.sizes.restype = (task, ctypes.c_int, sizes), None
    loaded.run.argtypes = (task, ctypes.c_int)
    pointers, counts = [ctypes.c_void_p] * 3, [ctypes.c_int64] * 2
    loaded.linear.argtypes, loaded.linear.restype = (*pointers, *counts, ctypes.c_int), None
    return loaded


def _compile(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return done.stdout
