"""Start training processes quickly, as forks of this process, which has imported PyTorch.

For each line of its input, ``{"do": name, "world": n, ...}``, this program forks ``n`` processes
with torchrun's variables, or one process without them if ``n`` is 0. It prints the ids of the
processes and, when all have ended, their exit statuses.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any, cast

import torch
import torch._dynamo  # FSDP would import it in every process
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.checkpoints.folders import Disk
from regard.errors import CheckpointError, RegardError
from regard.training.objectives import Objective
from regard.training.parallel import Shards
from regard.training.processes import joined
from regard.training.recipe import parse_recipe
from regard.training.run import train
from regard.training.saving import Keeper
from regard.training.shards import distribute_tensor


def trained(asked: dict[str, Any]) -> int:
    result = train(parse_recipe(asked["recipe"]), resume=asked["resume"])
    return 0 if result.finished else 3


class Collectives(TorchDispatchMode):
    """Record the names of all collective operations inside the ``with`` block."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # the operations on its shards are recorded then
        if func.namespace in ("c10d", "_c10d_functional"):
            self.names.add(func.__name__)
        return func(*args, **(kwargs or {}))


def trained_and_told(asked: dict[str, Any]) -> int:
    """Train, and write the names of all collectives to a file for each process."""
    with Collectives() as collectives:
        status = trained(asked)
    told = Path(asked["folder"]) / f"told-{os.environ['RANK']}.json"
    told.write_text(json.dumps(sorted(collectives.names)), encoding="utf-8")
    return status


def gathered_whole(asked: dict[str, Any]) -> int:
    """Shard weights whose rows cannot be split evenly, and gather them again."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 1))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with joined(torch.device("cpu")) as processes:
        engine = Shards(model, cast(Objective, None), processes)
        weights = {name: part * 2 for name, part in model.state_dict().items()}
        for factor, given in ((1, None), (2, weights)):
            with engine.gathered(given) as whole:
                if processes.is_first:
                    for name, tensor in whole.state_dict().items():
                        assert torch.equal(tensor, factor * expected[name]), name
    return 0


class Full(Disk):
    """A disk that has no space for the file called ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name

    def create(self, file: Path) -> int:
        if file.name == self.name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().create(file)


def saved_on_a_full_disk(asked: dict[str, Any]) -> int:
    """Save steps 1, 2 and 3. In step 2 the disk has no space for one file."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    with joined(torch.device("cpu")) as processes:
        mesh = init_device_mesh("cpu", (processes.count,))
        whole = torch.arange(10.0).reshape(5, 2)  # an odd number of rows; below also a single row
        parts = [distribute_tensor(tensor, mesh, [Shard(0)]) for tensor in (whole, whole[:1])]
        state = {"model": {"odd": parts[0], "few": parts[1], "plain": whole}}
        for step in (1, 2, 3):
            disk = Full(asked["full"]) if step == 2 else Disk()
            try:
                Keeper(asked["folder"], disk=disk, processes=processes).save(step, state)
            except CheckpointError:
                if step != 2:
                    raise
            else:
                assert step != 2, "step 2 was saved although the disk was full"
        likes = {"model/odd": parts[0], "model/few": parts[1]}
        found = Keeper(asked["folder"]).load(3, likes).state["model"]
        for name, tensor in state["model"].items():
            assert type(found[name]) is type(tensor)
            assert torch.equal(found[name], tensor)
    return 0


DO = {
    "train": trained,
    "train and tell": trained_and_told,
    "gather": gathered_whole,
    "full disk": saved_on_a_full_disk,
}


def done(asked: dict[str, Any]) -> int:
    status = 1
    try:
        status = DO[asked["do"]](asked)
    except RegardError as error:
        print(error, file=sys.stderr, flush=True)  # noqa: T201
        status = 2
    finally:  # after any error, a forked process must not return to the loop of its parent
        if status == 1:
            traceback.print_exc()
        os._exit(status)


def environment(rank: int, world: int) -> dict[str, str]:
    """The variables that torchrun sets, without the port."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
    }


def status_of(child: int) -> int:
    """Wait for a child, and return its exit status, which is negative if a signal ended it.

    The child is not reaped, so that no other process gets its id.
    """
    ended = os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def main() -> None:
    children: list[int] = []
    for line in sys.stdin:
        for child in children:  # reap the children of the previous line; their ids become free
            os.waitpid(child, 0)
        asked = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        children = []
        for rank in range(max(asked["world"], 1)):
            child = os.fork()
            if not child:
                if asked["world"]:
                    os.environ |= environment(rank, asked["world"]) | {"MASTER_PORT": str(port)}
                torch.set_num_threads(1)
                os._exit(done(asked))
            children.append(child)
        print(json.dumps(children), flush=True)  # noqa: T201
        print(json.dumps([status_of(child) for child in children]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
