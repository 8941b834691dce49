"""Save and load weights that are split among processes; the number of processes may change.

torch.distributed.checkpoint plans which process writes and reads which part. Files are safetensors
and JSON, instead of the pickles that it writes by default.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.futures import Future

from regard.checkpoints.folders import INDEX, Disk


def write_parts(
    tensors: Mapping[str, Tensor], folder: Path, disk: Disk
) -> dict[str, dict[str, Any]]:
    """Write one file per process with its parts. If one process fails, raise OSError in all.

    The first process returns the size and SHA-256 of each file.
    """
    writer = _Writer(folder, disk)
    try:
        save(dict(tensors), storage_writer=writer)
    except CheckpointException as failed:
        for error, _ in failed.failures.values():
            if isinstance(error, OSError):
                raise error from None
        raise
    return writer.listed


def read_parts(folder: Path, likes: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Read the tensors of a checkpoint; of each tensor in ``likes``, only this process's part."""
    tensors: dict[str, Tensor] = {}
    for path, entry in json.loads((folder / INDEX).read_bytes()).items():
        if path in likes:
            tensors[path] = torch.empty_like(likes[path], requires_grad=False)
        else:
            tensors[path] = torch.empty(entry["shape"], dtype=getattr(torch, entry["dtype"]))
    with warnings.catch_warnings():  # processes read independently
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        load(tensors, storage_reader=_Reader(folder), no_dist=True)
    return tensors


def parts_of(tensor: Tensor, like: Tensor) -> Tensor:
    """The part of a whole tensor for this process, split as ``like`` is."""
    assert isinstance(like, DTensor)
    # Without communication (src_data_rank=None), as every process has the whole tensor.
    whole = tensor.to(like.device)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)


def _name(index: MetadataIndex) -> str:
    """The name of a part in its file: the name of its tensor, and its offsets there."""
    assert index.offset is not None
    return f"{index.fqn}@{','.join(map(str, index.offset))}"


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


class _Writer(StorageWriter):
    def __init__(self, folder: Path, disk: Disk) -> None:
        self.folder, self.disk = folder, disk
        self.listed: dict[str, dict[str, Any]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        del checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *_: Any, **__: Any) -> None:
        del is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return [
            SavePlan(plan.items, f"shards-{rank:05}.safetensors", plan.planner_data, plan.usable)
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        from safetensors.torch import save as as_bytes

        tensors = {}
        for item in plan.items:
            tensor = planner.resolve_data(item)
            assert isinstance(tensor, Tensor)
            tensors[_name(item.index)] = tensor.detach().cpu().contiguous()
        data = as_bytes(tensors)
        self.disk.put(self.folder / plan.storage_data, data)
        entry = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        return _done(
            [WriteResult(item.index, 0, (plan.storage_data, entry)) for item in plan.items]
        )

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """In the first process, write the index: the file of each part of each tensor."""
        files = {}
        for result in (result for some in results for result in some):
            name, written = result.storage_data
            self.listed[name] = written
            files[_name(result.index)] = name
        index: dict[str, Any] = {}
        for path, entry in metadata.state_dict_metadata.items():
            assert isinstance(entry, TensorStorageMetadata)
            chunks = [
                [list(c.offsets), list(c.sizes), files[_name(MetadataIndex(path, c.offsets))]]
                for c in entry.chunks
            ]
            dtype = str(entry.properties.dtype).removeprefix("torch.")
            index[path] = {"dtype": dtype, "shape": list(entry.size), "parts": chunks}
        data = (json.dumps(index, indent=1, sort_keys=True) + "\n").encode()
        self.disk.put(self.folder / INDEX, data)
        self.listed[INDEX] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        del checkpoint_id
        return False


class _Reader(StorageReader):
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, str] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        del checkpoint_id

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        index = json.loads((self.folder / INDEX).read_bytes())
        tensors: dict[str, Any] = {}
        for path, entry in index.items():
            chunks = []
            for offsets, sizes, file in entry["parts"]:
                chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
                self.files[_name(MetadataIndex(path, offsets))] = file
            dtype = getattr(torch, entry["dtype"])
            shape = torch.Size(entry["shape"])
            tensors[path] = TensorStorageMetadata(TensorProperties(dtype=dtype), shape, chunks)
        return Metadata(tensors)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        del metadata, is_coordinator

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        from safetensors import safe_open

        by_file: dict[str, list[Any]] = {}
        for item in plan.items:
            by_file.setdefault(self.files[_name(item.storage_index)], []).append(item)
        for name, items in by_file.items():
            with safe_open(self.folder / name, framework="pt") as opened:
                for item in items:
                    ranges = zip(item.storage_offsets, item.lengths, strict=True)
                    piece = tuple(slice(start, start + size) for start, size in ranges)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(opened.get_slice(_name(item.storage_index))[piece])
                    planner.commit_tensor(item, target)
        return _done(None)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        del checkpoint_id
        return False
