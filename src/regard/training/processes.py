"""The processes that torchrun started for one run, and how they come to know the same."""

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

# While the first process evaluates, the others wait; one that died ends the wait at once.
PATIENCE = timedelta(hours=2)


class Crew:
    """The processes of a run. One alone is a crew of one, and never waits."""

    def __init__(self, rank: int = 0, world: int = 1) -> None:
        self.rank, self.world = rank, world
        self._asked: tuple[Tensor, Any] | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def gather(self, value: T) -> list[T]:
        """What each process has, in their order, known to all of them."""
        found: list[Any] = [value] * self.world
        if self.world > 1:
            dist.all_gather_object(found, value)
        return found

    def lead(self, do: Callable[[], T], follow: Callable[[Any], None] | None = None) -> T:
        """What the first process does alone; all get what it returns, or raise what it raises.

        Where it needs the others on the way, it uses :meth:`call`, and they ``follow``.
        """
        if self.world == 1:
            return do()
        if self.first:
            try:
                result = do()
            except RegardError as error:
                self._tell("raise", error)
                raise
            self._tell("return", result)
            return result
        while True:
            kind, value = self._tell()
            if kind == "raise":
                raise value
            if kind == "return":
                return cast(T, value)
            assert follow is not None
            follow(value)

    def call(self, value: Any) -> None:
        """Let the others follow, with this value."""
        if self.world > 1:
            self._tell("call", value)

    def _tell(self, kind: str = "", value: Any = None) -> tuple[str, Any]:
        message = [(kind, value)]
        dist.broadcast_object_list(message, src=0)
        return message[0]

    def each(self, do: Callable[[], T]) -> T:
        """What every process does, the first one before the others: they find what it has made."""
        found: list[T] = []
        self.lead(lambda: found.append(do()))
        return found[0] if self.first else do()

    def total(self, tensor: Tensor) -> Tensor:
        """The sum over all processes."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def agree(self, asked: bool) -> bool:
        """Whether any process asked; told one call later, so that no step waits for the answer."""
        if self.world == 1:
            return asked
        before = self._asked
        flag = torch.tensor(int(asked))
        self._asked = flag, dist.all_reduce(flag, dist.ReduceOp.MAX, async_op=True)
        if before is None:
            return False
        before[1].wait()
        return bool(before[0])

    def leave(self) -> None:
        """Wait for the question that nobody has looked at the answer of."""
        if self._asked is not None:
            self._asked[1].wait()


@contextmanager
def joined(device: torch.device) -> Iterator[Crew]:
    """Within, the crew that torchrun started this process for."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Crew()
        return
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    store, rank, world = next(rendezvous("env://", timeout=PATIENCE))
    own = PrefixStore(_name_of_this_start(store, rank, world), store)
    dist.init_process_group(backend, store=own, rank=rank, world_size=world, timeout=PATIENCE)
    crew = Crew(rank, world)
    yield crew
    # Not where an error ends the run: the others may be dead, and nobody would answer.
    crew.leave()
    dist.destroy_process_group()


def _name_of_this_start(store: Any, rank: int, world: int) -> str:
    """A name that none but the processes of this start know.

    The store outlives them, and addresses of the dead lie there until the living write their own:
    whoever reads too early waits for a dead process, and counts of restarts differ from machine to
    machine (https://github.com/pytorch/pytorch/issues/135712). So each process asks under a name
    nobody had before, and the first answers until all have heard it.
    """
    own = uuid4().hex
    if rank:
        store.set(f"ask/{rank}", own)
        name: str = store.get(f"answer/{own}").decode()
        store.set(f"{name}/{rank}", "heard")
        return name
    missing, until = set(range(1, world)), time.monotonic() + PATIENCE.total_seconds()
    while missing:
        for other in sorted(missing):
            if store.check([f"{own}/{other}"]):
                missing.remove(other)
            elif store.check([f"ask/{other}"]):
                store.set(f"answer/{store.get(f'ask/{other}').decode()}", own)
        if time.monotonic() > until:
            raise TimeoutError(f"Of {world} processes, {sorted(missing)} did not start.")
        time.sleep(0.01)
    return own


def local_device(device: torch.device) -> torch.device:
    """The GPU of this process, where a machine has several processes."""
    count = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if device.type != "cuda" or count == 1:
        return device
    if str(device) != "cuda":
        raise InputError(f"device = {str(device)!r}, but each process needs its own: say cuda.")
    if count > torch.cuda.device_count():
        raise InputError(
            f"{count} processes, but {torch.cuda.device_count()} GPUs: lower --nproc-per-node."
        )
    own = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(own)
    return own
