"""Compile the kernels for the CPU on first use, and keep the library in the user's cache folder."""

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
    """The struct ``Task`` of attention.cpp: the same fields in the same order."""

    _fields_ = [
        *[(name, ctypes.c_int64) for name in (
            "batch", "heads", "key_heads", "queries", "keys", "width", "value_width",
            "threads", "chunks", "map_rows", "map_columns", "kept_rows", "pair_count", "top",
        )],
        *[(name, ctypes.c_float) for name in ("scale", "softcap")],
        *[(name, ctypes.c_void_p) for name in ("sinks", "query", "key", "value")],
        *[(name, ctypes.c_int64 * 3) for name in ("query_strides", "key_strides", "value_strides")],
        *[(name, ctypes.c_void_p) for name in ("low", "high", "starts", "bias")],
        *[(name, ctypes.c_int64) for name in ("bias_heads", "bias_length")],
        *[(name, ctypes.c_void_p) for name in (
            "output", "lse", "entropy", "peak", "highest", "distance", "distance_variance",
            "received", "map", "map_peak", "places", "kept", "pair_first", "pair_keys", "pairs",
            "top_weights", "top_keys", "packed_keys", "packed_values", "scratch",
        )],
    ]  # fmt: skip


class Weights(ctypes.Structure):
    """The struct ``Weights`` of linear.cpp: the same fields in the same order."""

    _fields_ = [
        *[(name, ctypes.c_void_p) for name in ("weight", "sums", "scale", "bias")],
        *[(name, ctypes.c_int64) for name in ("inputs", "outputs", "depth")],
    ]


@cache
def library() -> ctypes.CDLL | str:
    """The compiled kernels, or the reason why they cannot be compiled or loaded."""
    if sys.platform != "linux":
        return f"the kernel needs Linux, but this machine runs {sys.platform}."
    compiler = (
        shlex.split(os.environ.get("CXX", ""))
        or [name for name in ("g++", "clang++", "c++") if shutil.which(name)][:1]
    )
    if not compiler:
        return "there is no C++ compiler (g++, clang++ or $CXX) to build the kernel."
    command = [*compiler, *_FLAGS]
    try:
        # The name depends on -march=native: machines with other CPUs may share the folder.
        macros = _run([*command, "-dM", "-E", "-x", "c++", os.devnull])
        inputs = "\n".join((*(source.read_text() for source in _SOURCES), *command, macros))
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "regard"
        built = folder / f"native-{hashlib.sha256(inputs.encode()).hexdigest()[:16]}.so"
        if not built.exists():
            folder.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=folder) as temporary:
                output = Path(temporary) / built.name
                _run([*command, "-o", str(output), *map(str, _SOURCES[:2])])
                output.replace(built)  # atomic: another process never loads a partial file
        loaded = ctypes.CDLL(str(built))
    except subprocess.SubprocessError as error:
        message = getattr(error, "stderr", None) or ""
        return f"the kernel could not be built: {error} {message.strip()[-500:]}".strip()
    except OSError as error:
        return f"the kernel could not be built, cached or loaded: {error}"
    task, sizes = ctypes.POINTER(Task), ctypes.POINTER(ctypes.c_int64)
    loaded.attention_buffers.argtypes = (task, ctypes.c_int, sizes)
    loaded.attention_buffers.restype = None
    loaded.attention.argtypes = (task, ctypes.c_int)
    pointers, counts = [ctypes.c_void_p] * 3, [ctypes.c_int64] * 2
    loaded.linear.argtypes, loaded.linear.restype = (*pointers, *counts, ctypes.c_int), None
    return loaded


def _run(command: list[str]) -> str:
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    return run.stdout
