"""Read, check and write checkpoints in Hugging Face's layout, without pickle.

Lengths, offsets, names and shapes are checked against the file before memory is allocated, and
nothing outside the checkpoint's folder is opened.
"""

from __future__ import annotations

import hashlib
import math
import os
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.checkpoints import packing
from regard.checkpoints.adapters import ADAPTER_WEIGHTS, BASE_DIGEST, Adapter
from regard.checkpoints.bases import ADAPTER, base_of, described
from regard.checkpoints.files import (
    CONFIG,
    GENERATION,
    MAX_JSON_BYTES,
    json_bytes,
    open_regular,
    parse_object,
    place_for,
    read_json,
    replace_file,
)
from regard.checkpoints.hub import find
from regard.errors import CheckpointError, InputError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PACKING = "packing"  # the key in config.json that marks packed weights
SHARD = 5 * 2**30  # the largest file of weights in bytes, as in Hugging Face's checkpoints

_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Entry:
    """The position of one tensor in a file."""

    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # in bytes from the start of the file
    length: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checked checkpoint: its config, and the position of each tensor.

    Tensors of a packed checkpoint are read as float32. Those of an adapter are the base's, to which
    the model adds the updates.
    """

    folder: Path
    config: dict[str, Any]
    entries: dict[str, Entry]
    scales: dict[str, Entry] = field(default_factory=dict)  # keyed like ``entries``
    adapter: Adapter | None = None

    def digest(self) -> str:
        """A hash of the names and shapes of all tensors and of the first 4 KB of each.

        It changes when a model is trained, and takes no time with large files.
        """
        digest = hashlib.sha256()
        for key, entry in sorted(self.entries.items()):
            digest.update(f"{key} {entry.dtype} {entry.shape}\n".encode())
            with open_regular(entry.file) as file:
                file.seek(entry.start)
                digest.update(file.read(min(entry.length, 4096)))
        return digest.hexdigest()

    def meta(self, key: str) -> Tensor:
        """Return a tensor without its values, on the meta device."""
        found = _meta(self.entries[key])
        if key in self.scales:
            shape = packing.shape(found, _meta(self.scales[key]))
            return torch.empty(shape, device="meta")
        return self._widened(found)

    def read(self, key: str) -> Tensor:
        """Read a tensor."""
        found = self._stored(key, self.entries[key])
        if key in self.scales:
            scale = self._stored(key + packing.SCALE, self.scales[key])
            try:
                return packing.unpack(found, scale)
            except CheckpointError as error:
                raise CheckpointError(f"{self.entries[key].file}, {key}: {error}") from None
        return self._widened(found)

    def _widened(self, tensor: Tensor) -> Tensor:
        packed = self.config.get(PACKING) is not None
        return tensor.float() if packed and tensor.is_floating_point() else tensor

    def _stored(self, key: str, entry: Entry) -> Tensor:
        if not entry.length:
            return torch.empty(entry.shape, dtype=entry.dtype)
        with open_regular(entry.file) as file:
            file.seek(entry.start)
            raw = bytearray(file.read(entry.length))
        if len(raw) != entry.length:
            raise CheckpointError(f"{entry.file} ends within {key}: it changed while being read.")
        return torch.frombuffer(raw, dtype=entry.dtype).view(entry.shape)


def _meta(entry: Entry) -> Tensor:
    return torch.empty(entry.shape, dtype=entry.dtype, device="meta")


def open_checkpoint(name: str | os.PathLike[str]) -> Checkpoint:
    """Find a checkpoint, and check its files without reading its weights.

    The weights of an adapter are those of its base.
    """
    folder = find(name)
    if (folder / ADAPTER).exists() and not any((folder / n).exists() for n in (WEIGHTS, INDEX)):
        return _adapted(folder)
    config = read_json(folder / CONFIG)
    if not (folder / WEIGHTS).exists():
        if (folder / INDEX).exists():
            return _paired(folder, config, _sharded(folder))
        pickled = sorted(file.name for file in folder.glob("*.bin"))
        if pickled:
            raise CheckpointError(
                f"{folder} holds its weights as {pickled[0]}, a pickle. Opening a pickle can run "
                "code, so regard does not open it. Convert it once, where you trust it, with "
                "transformers: AutoModel.from_pretrained(folder).save_pretrained(folder)."
            )
        whole = "" if Path(name).is_dir() else f" To download the whole model: regard get {name}"
        raise CheckpointError(f"{folder} holds neither {WEIGHTS} nor {INDEX}.{whole}")
    return _paired(folder, config, _header(folder / WEIGHTS))


def _adapted(folder: Path) -> Checkpoint:
    """Return the checkpoint of an adapter's base, with the adapter."""
    from safetensors import safe_open

    file = folder / ADAPTER_WEIGHTS
    if not file.exists():
        raise CheckpointError(f"{folder} holds {ADAPTER}, but not {ADAPTER_WEIGHTS}.")
    matrices = Checkpoint(folder, {}, _header(file))
    tensors = {key: matrices.read(key) for key in matrices.entries}
    adapter = Adapter.of(folder, read_json(folder / ADAPTER), tensors)
    base = open_checkpoint(base_of(folder))
    with safe_open(file, "pt") as opened:
        known = (opened.metadata() or {}).get(BASE_DIGEST)
    if known is not None and known != base.digest():
        warnings.warn(
            f"{folder} was trained with other weights than {base.folder} has now, so its results "
            "may be worse. Train it again, or give it the weights it was trained with.",
            OtherBaseWarning,
            stacklevel=2,
        )
    config = read_json(described(folder) / CONFIG)
    if PACKING in base.config:
        config[PACKING] = base.config[PACKING]
    return replace(base, folder=folder, config=config, adapter=adapter)


class OtherBaseWarning(UserWarning):
    """The base of an adapter has other weights than those that the adapter was trained with."""


def _paired(folder: Path, config: dict[str, Any], entries: dict[str, Entry]) -> Checkpoint:
    """Return a checkpoint whose packed tensors are paired with their scales."""
    if config.get(PACKING) is None:
        return Checkpoint(folder, config, entries)
    scales = {
        key.removesuffix(packing.SCALE): entries.pop(key)
        for key in list(entries)
        if key.endswith(packing.SCALE)
    }
    for key, scale in scales.items():
        if key not in entries:
            raise CheckpointError(f"{scale.file} holds scales of {key}, but not {key}.")
    # A small model may have no matrix large enough to pack. Its tensors are then all float16.
    kinds = {entry.dtype for entry in entries.values()}
    if not scales and not kinds <= {torch.float16, torch.int8, torch.uint8}:
        raise CheckpointError(f"{folder / CONFIG} says that weights are packed, but none are.")
    found = Checkpoint(folder, config, entries, scales)
    for key in scales:
        found.meta(key)  # raises if the two do not fit
    return found


def write(
    folder: str | os.PathLike[str],
    config: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    generation: Mapping[str, Any] | None = None,
    shard_bytes: float = SHARD,
) -> None:
    """Write a checkpoint, in shards of at most ``shard_bytes``, or one tensor if it is larger.

    Each file is written to a temporary name and then renamed, so that an interrupted save leaves no
    broken file.
    """
    from safetensors.torch import save

    folder = place_for(folder)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; a checkpoint needs a folder.")
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for key, tensor in tensors.items():
        size = tensor.numel() * tensor.element_size()
        if filled and filled + size > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][key] = tensor.detach().cpu().contiguous()
        filled += size
    count = len(shards)
    names = (
        [WEIGHTS]
        if count == 1
        else [f"model-{index:05}-of-{count:05}.safetensors" for index in range(1, count + 1)]
    )
    for name, shard in zip(names, shards, strict=True):
        replace_file(folder / name, save(shard, {"format": "pt"}))
    if count > 1:
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        places = {key: name for name, shard in zip(names, shards, strict=True) for key in shard}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        replace_file(folder / INDEX, json_bytes(index))
    # Files of an earlier save must not be read instead of these.
    (folder / (WEIGHTS if count > 1 else INDEX)).unlink(missing_ok=True)
    replace_file(folder / CONFIG, json_bytes(config))
    if generation is not None:
        replace_file(folder / GENERATION, json_bytes(generation))


def _header(file: Path) -> dict[str, Entry]:
    """Read the header of a safetensors file, and check its entries against the file size."""
    with open_regular(file) as opened:
        size = os.fstat(opened.fileno()).st_size
        first = opened.read(8)
        length = int.from_bytes(first, "little")
        if len(first) < 8 or length < 2 or length > min(size - 8, MAX_JSON_BYTES):
            raise CheckpointError(
                f"{file} is not a safetensors file: its header would take {length:,} of its "
                f"{size:,} bytes."
            )
        header = parse_object(opened.read(length), file)
    header.pop("__metadata__", None)
    data = 8 + length
    entries, spans = {}, []
    for key, value in header.items():
        entry = _entry(file, key, value, data, size)
        entries[key] = entry
        spans.append((entry.start, entry.start + entry.length, key))
    end = data
    for start, stop, key in sorted(spans):
        if start != end:
            kind = "overlaps another tensor" if start < end else "leaves a gap before it"
            raise CheckpointError(f"{file} is broken: {key} {kind}.")
        end = stop
    if end != size:
        raise CheckpointError(f"{file} is broken: {size - end:,} bytes follow its last tensor.")
    return entries


def _entry(file: Path, key: str, value: object, data: int, size: int) -> Entry:
    """Check one entry of a header."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{file} does not give dtype, shape and data_offsets of {key}.")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(
            f"{file} holds {key} as {dtype!r}, but regard reads only {', '.join(_DTYPES)}."
        )
    if not _whole(shape) or len(shape) > 8 or not _whole(offsets) or len(offsets) != 2:
        raise CheckpointError(f"{file}: {key} has an invalid shape {shape} or offsets {offsets}.")
    start, stop = data + offsets[0], data + offsets[1]
    length = math.prod(shape) * _DTYPES[dtype].itemsize
    if not start <= stop <= size or stop - start != length:
        raise CheckpointError(
            f"{file} is broken: {key}, {dtype} {shape}, needs {length:,} bytes, but its offsets "
            f"{offsets} are not that many within the file."
        )
    return Entry(file, _DTYPES[dtype], tuple(shape), start, length)


def _whole(value: object) -> bool:
    """Return whether a value is a list of integers from 0 to below 2**63."""
    return isinstance(value, list) and all(type(n) is int and 0 <= n < 2**63 for n in value)


def _sharded(folder: Path) -> dict[str, Entry]:
    """Read the headers of all shards, and check their entries against the index."""
    index = read_json(folder / INDEX)
    places = index.get("weight_map")
    if not isinstance(places, dict):
        raise CheckpointError(f"{folder / INDEX} has no weight_map.")
    for key, name in places.items():
        plain = isinstance(name, str) and name.isascii() and name.isprintable()
        if not plain or not name.endswith(".safetensors") or "/" in name or "\\" in name:
            raise CheckpointError(
                f"{folder / INDEX} puts {key} into {name!r}. A shard is a .safetensors file in the "
                "same folder."
            )
    entries: dict[str, Entry] = {}
    for name in sorted(set(places.values())):
        for key, entry in _header(folder / name).items():
            if places.get(key) != name:
                raise CheckpointError(
                    f"{folder / name} holds {key}, which the index does not list there."
                )
            entries[key] = entry
    missing = sorted(places.keys() - entries.keys())
    if missing:
        raise CheckpointError(f"{folder / places[missing[0]]} lacks {missing[0]}.")
    return entries
