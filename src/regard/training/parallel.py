"""Train one model with several processes.

Every process builds the same batches from the seed, and computes the loss of its share. The loss is
divided by the number of targets in all shares, and gradients are summed. So a step is the same for
any number of processes, except for the order of additions.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

from regard.data.batches import Lanes
from regard.decoding.state import State
from regard.errors import InputError
from regard.evaluation.losses import map_tensors
from regard.layers.cache import KeyValueCache
from regard.models.gpt2 import GPT2
from regard.training.objectives import Objective
from regard.training.processes import Processes

# --------------------------------------------------------------------------------------- shares


def cut(tree: Any, index: Any) -> Any:
    """A tree with each tensor replaced by ``tensor[index]``, such as some rows of a batch."""
    return map_tensors(tree, lambda tensor: tensor[index].contiguous())


def interleave(trees: list[Any]) -> Any:
    """Merge the trees of all processes; tree ``rank`` gives the rows ``rank::len(trees)``."""
    first = trees[0]
    if isinstance(first, Tensor):
        whole = first.new_empty(sum(map(len, trees)), *first.shape[1:])
        for rank, part in enumerate(trees):
            whole[rank :: len(trees)] = part
        return whole
    if isinstance(first, Mapping):
        return {name: interleave([tree[name] for tree in trees]) for name in first}
    if isinstance(first, list):
        return [interleave(list(parts)) for parts in zip(*trees, strict=True)]
    return first


# -------------------------------------------------------------------------------------- engines


class Engine:
    """The steps of training that differ with several processes; this class is for one process."""

    def __init__(self, model: nn.Module, objective: Objective, processes: Processes) -> None:
        self.model, self.objective, self.processes = model, objective, processes

    def share(self, batch: Any, rows: int) -> tuple[Any, bool]:
        """The part of a batch for this process, and whether its loss is used.

        If there are fewer rows than processes, the remaining processes compute the first row too,
        because all must take part in communication. Their loss is not used.
        """
        rank, count = self.processes.rank, self.processes.count
        if count == 1:
            return batch, True
        used = rank < rows
        return cut(batch, slice(rank, None, count) if used else slice(0, 1)), used

    def loss(self, batch: Any) -> Tensor:
        """The summed loss of a share."""
        return self.objective.loss(self.model, batch)

    def joining(self, last: bool) -> AbstractContextManager[None]:
        """Context of a backward pass; the ``last`` one of a step sums gradients over processes."""
        del last
        return nullcontext()

    @property
    def whole(self) -> nn.Module:
        """A model for the first process to use alone; :meth:`gathered` updates its weights."""
        return self.model

    @contextmanager
    def gathered(self, weights: Mapping[str, Tensor] | None) -> Iterator[nn.Module]:
        """Context in which :attr:`whole` has the model's current weights, or the given ones."""
        if weights is None:
            yield self.model
            return
        own = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        self.model.load_state_dict(weights)
        try:
            yield self.model
        finally:
            self.model.load_state_dict(own)


class _Loss(nn.Module):
    """A model and its objective as one module, for DDP to wrap."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Any) -> Tensor:
        return self.objective.loss(self.model, batch)


def _sum(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """DDP's communication hook: sum gradients over processes, instead of averaging them."""
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed


class Replicas(Engine):
    """DDP: each process has the whole model; gradients are summed during the backward pass."""

    def __init__(self, model: nn.Module, objective: Objective, processes: Processes) -> None:
        super().__init__(model, objective, processes)
        self.together = DistributedDataParallel(self._alone(), gradient_as_bucket_view=True)
        # A lambda has no annotations: DDP refuses a hook whose annotations are strings.
        self.together.register_comm_hook(None, lambda _, bucket: _sum(bucket.buffer()))

    def _alone(self) -> nn.Module:
        return _Loss(self.model, self.objective)

    def loss(self, batch: Any) -> Tensor:
        result: Tensor = self.together(batch)
        return result

    def joining(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.together.no_sync()


class Shards(Engine):
    """FSDP2: each process stores a part of every weight, and gathers the weights block by block.

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    def __init__(self, model: nn.Module, objective: Objective, processes: Processes) -> None:
        self._whole = copy.deepcopy(model).cpu() if processes.is_first else model
        device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (processes.count,))
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for part in self._parts(model):
            part.set_gradient_divide_factor(1.0)  # a sum, not a mean
            # Without this, gradients would also be multiplied by 1.0.
            part.set_force_sum_reduction_for_comms(True)
        super().__init__(model, objective, processes)

    def _parts(self, model: nn.Module) -> Iterator[FSDPModule]:
        return (module for module in model.modules() if isinstance(module, FSDPModule))

    @contextmanager
    def joining(self, last: bool) -> Iterator[None]:
        assert isinstance(self.model, FSDPModule)
        self.model.set_is_last_backward(last)
        self.model.set_requires_gradient_sync(last)
        yield

    @property
    def whole(self) -> nn.Module:
        return self._whole

    @contextmanager
    def gathered(self, weights: Mapping[str, Tensor] | None) -> Iterator[nn.Module]:
        device = next(self.model.parameters()).device
        state = {}
        for name, tensor in (weights or self.model.state_dict()).items():
            whole = self._gather(tensor) if isinstance(tensor, DTensor) else tensor
            if whole is not None:
                state[name] = whole.cpu()
        if self.processes.is_first:
            self._whole.load_state_dict(state)
            self._whole.to(device)
        yield self._whole
        if self.processes.is_first:
            self._whole.cpu()

    def _gather(self, shards: DTensor) -> Tensor | None:
        """The whole weight in the first process; None in the others.

        ``full_tensor()`` can crash: gloo stores the name of its latest operation in a string that
        two threads share. A name of at most 15 characters ("gather") is stored inside the string.
        The longer name in ``full_tensor()`` is allocated, and both threads may free it
        (docs/log.md).
        """
        assert shards.placements == (Shard(0),)
        own = shards.to_local()
        even = own.new_zeros(-(-len(shards) // self.processes.count), *own.shape[1:])
        even[: len(own)] = own
        parts = (
            [torch.empty_like(even) for _ in range(self.processes.count)]
            if self.processes.is_first
            else None
        )
        dist.gather(even, parts)
        return torch.cat(parts)[: len(shards)] if parts else None


# ----------------------------------------------------------------------------- long sequences


class _Gather(torch.autograd.Function):
    """Join the parts of a sequence from all processes: [..., n, dim] to [..., count * n, dim].

    The backward pass sums the gradient of each part over all processes.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, processes: Processes) -> Tensor:
        ctx.processes = processes
        parts = [torch.empty_like(part) for _ in range(processes.count)]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].contiguous()
        dist.all_reduce(whole)
        return whole.chunk(ctx.processes.count, dim=-2)[ctx.processes.rank], None


class _SharedCache(KeyValueCache):
    """Keys and values of the earlier parts of a sequence, gathered from other processes.

    Layers use it like a key-value cache. But the other processes compute the earlier keys and
    values in the same step, and gradients flow back to them.
    """

    def __init__(self, processes: Processes, length: int) -> None:
        super().__init__()
        self.processes, self.length = processes, length  # the length of one part

    def __len__(self) -> int:
        return self.processes.rank * self.length

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        both: Tensor = _Gather.apply(torch.stack((key, value)), self.processes)  # type: ignore[no-untyped-call]
        keys, values = both[..., : (self.processes.rank + 1) * self.length, :]
        return keys, values


class _Part(nn.Module):
    """A decoder that reads one part of a sequence, and attends to the parts before it."""

    def __init__(self, model: GPT2, processes: Processes) -> None:
        super().__init__()
        self.model, self.processes = model, processes

    def forward(self, ids: Tensor, *, labels: Tensor) -> Tensor:
        state = State(self.model.config.depth)
        state.own = [_SharedCache(self.processes, ids.shape[1]) for _ in state.own]
        loss: Tensor = self.model(ids, state=state, labels=labels)
        return loss


class Context(Replicas):
    """Each process reads a part of every sequence, and gathers the keys and values before it.

    With more processes, each one stores fewer activations, except for keys and values. Processes
    with later parts attend to more keys.
    """

    def _alone(self) -> nn.Module:
        assert isinstance(self.model, GPT2)
        return _Loss(_Part(self.model, self.processes), self.objective)

    def share(self, batch: Any, rows: int) -> tuple[Any, bool]:
        del rows
        rank, count = self.processes.rank, self.processes.count
        length = batch.ids.shape[1]
        if length % count:
            raise InputError(
                f"Sequences of {length} tokens (data.length) cannot be split evenly among {count} "
                "processes."
            )
        size = length // count
        return cut(batch, (slice(None), slice(rank * size, (rank + 1) * size))), True


ENGINES: dict[str, type[Engine]] = {"ddp": Replicas, "fsdp": Shards, "context": Context}


def engine(model: nn.Module, objective: Objective, processes: Processes, parallel: str) -> Engine:
    """The engine of a run; with several processes, the one that ``parallel`` names."""
    if isinstance(objective.plan, Lanes) and objective.plan.rows < processes.count:
        raise InputError(
            f"A batch has {objective.plan.rows} rows, too few for {processes.count} processes. "
            "Raise batch.tokens or lower data.length."
        )
    kind = ENGINES[parallel] if processes.count > 1 else Engine
    return kind(model, objective, processes)
