"""The processes that torchrun starts for one run, and their communication."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from regard.errors import InputError, RegardError

T = TypeVar("T")

# The maximum time that processes wait for each other, such as while the first one evaluates.
TIMEOUT = timedelta(hours=2)


class Processes:
    """The processes of a run; if there is only one, no method communicates or waits."""

    def __init__(self, rank: int = 0, count: int = 1) -> None:
        self.rank, self.count = rank, count
        self._pending: tuple[Tensor, Any] | None = None  # flags and handle of the last any_of()

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """The values of all processes in order of rank, returned in every process."""
        values: list[Any] = [value] * self.count
        if self.count > 1:
            dist.all_gather_object(values, value)
        return values

    def on_first(self, work: Callable[[], T], follow: Callable[[Any], None] | None = None) -> T:
        """Run ``work`` in the first process; all processes return its result or raise its error.

        When ``work`` calls :meth:`call`, the other processes run ``follow``.
        """
        if self.count == 1:
            return work()
        if self.is_first:
            try:
                result = work()
            except RegardError as error:
                self._broadcast("raise", error)
                raise
            self._broadcast("return", result)
            return result
        while True:
            kind, value = self._broadcast()
            if kind == "raise":
                raise value
            if kind == "return":
                return cast(T, value)
            assert follow is not None
            follow(value)

    def call(self, value: Any) -> None:
        """Inside ``work`` of :meth:`on_first`, let the other processes run ``follow(value)``."""
        if self.count > 1:
            self._broadcast("call", value)

    def _broadcast(self, kind: str = "", value: Any = None) -> tuple[str, Any]:
        message = [(kind, value)]
        dist.broadcast_object_list(message, src=0)
        return message[0]

    def first_then_others(self, work: Callable[[], T]) -> T:
        """Run ``work`` in the first process, then in the others, which use the files it cached."""
        results: list[T] = []
        self.on_first(lambda: results.append(work()))
        return results[0] if self.is_first else work()

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a tensor over all processes, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def any_of(self, *flags: bool) -> tuple[bool, ...]:
        """For each flag, whether any process set it in the previous call.

        So a process never waits for the others to reach this call. One process alone gets its own
        flags of this call.
        """
        if self.count == 1:
            return flags
        before = self._pending
        numbers = torch.tensor(flags, dtype=torch.int)
        self._pending = numbers, dist.all_reduce(numbers, dist.ReduceOp.MAX, async_op=True)
        if before is None:
            return (False,) * len(flags)
        before[1].wait()
        return tuple(map(bool, before[0].tolist()))

    def finish(self) -> None:
        """Wait until the communication of the latest :meth:`any_of` has finished."""
        if self._pending is not None:
            self._pending[1].wait()


@contextmanager
def joined(device: torch.device) -> Iterator[Processes]:
    """Context that connects the processes that torchrun started for this run."""
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Processes()
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, count = next(rendezvous("env://", timeout=TIMEOUT))
    own = PrefixStore(_shared_name(store, rank, count), store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=count, timeout=TIMEOUT)
    processes = Processes(rank, count)
    yield processes
    # Skipped after an error: waiting for a process that died would never end.
    processes.finish()
    dist.destroy_process_group()


def _shared_name(store: Any, rank: int, count: int) -> str:
    """A prefix for the keys in the store, which only the processes of this start share.

    After a restart, the store still has the addresses of dead processes: a process that reads them
    would wait forever, and counts of restarts differ between machines
    (https://github.com/pytorch/pytorch/issues/135712). So each process registers a fresh name, and
    the first process answers with its own name until all have confirmed it.
    """
    own = uuid4().hex
    if rank:
        store.set(f"ask/{rank}", own)
        name: str = store.get(f"answer/{own}").decode()
        store.set(f"{name}/{rank}", "heard")
        return name
    missing, until = set(range(1, count)), time.monotonic() + TIMEOUT.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"{own}/{other}"]):
                missing.remove(other)
            elif store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", own)
        if time.monotonic() > until:
            raise TimeoutError(f"Of {count} processes, ranks {sorted(missing)} did not start.")
        time.sleep(0.01)
    return own


def local_device(device: torch.device) -> torch.device:
    """The device of this process; several processes of a machine each use their own GPU."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type != "cuda" or count == 1:
        return device
    if str(device) != "cuda":
        raise InputError(f"device = {str(device)!r}, but each process needs its own GPU: use cuda.")
    if count > torch.cuda.device_count():
        raise InputError(
            f"{count} processes, but {torch.cuda.device_count()} GPUs: lower --nproc-per-node."
        )
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    return own
