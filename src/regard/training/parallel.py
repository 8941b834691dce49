"""Several processes that train one model.

Every process makes the whole batch of a step, which the seed alone decides, and takes its share of
it; the loss is divided by the targets of all shares, and gradients are summed. So any number of
processes takes the same step, but for the order in which numbers are added.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
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
from regard.layers.cache import KeyValueCache
from regard.mechanism.masks import Padding
from regard.models.gpt2 import GPT2
from regard.training.objectives import Objective
from regard.training.processes import Crew

# --------------------------------------------------------------------------------------- shares


def on_each(tree: Any, do: Callable[[Tensor], Tensor]) -> Any:
    """A tree with ``do(tensor)`` for each of its tensors."""
    if isinstance(tree, Tensor):
        return do(tree)
    if isinstance(tree, Padding):
        return Padding(do(torch.as_tensor(tree.lengths)), tree.side)
    if isinstance(tree, Mapping):
        return {name: on_each(part, do) for name, part in tree.items()}
    if isinstance(tree, list):
        return [on_each(part, do) for part in tree]
    if isinstance(tree, tuple):
        return type(tree)(*(on_each(part, do) for part in tree))
    return tree


def cut(tree: Any, index: Any) -> Any:
    """A tree with ``tensor[index]`` for each of its tensors: some rows of a batch."""
    return on_each(tree, lambda tensor: tensor[index].contiguous())


def interleave(trees: list[Any]) -> Any:
    """The tree whose rows ``rank::world`` are those of tree ``rank``."""
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
    """How a model takes a step: here, on its own."""

    def __init__(self, model: nn.Module, objective: Objective, crew: Crew) -> None:
        self.model, self.objective, self.crew = model, objective, crew

    def share(self, batch: Any, rows: int) -> tuple[Any, bool]:
        """What of a batch is for this process, and whether it counts.

        A batch may have fewer rows than there are processes. Those left over compute a row that
        another one has, for all must take part, and its loss is not counted.
        """
        rank, world = self.crew.rank, self.crew.world
        if world == 1:
            return batch, True
        counts = rank < rows
        return cut(batch, slice(rank, None, world) if counts else slice(0, 1)), counts

    def loss(self, batch: Any) -> Tensor:
        """The summed loss of a share."""
        return self.objective.loss(self.model, batch)

    def joining(self, last: bool) -> AbstractContextManager[None]:
        """Within, a backward pass; after the ``last`` of a step, gradients are those of all."""
        del last
        return nullcontext()

    @property
    def whole(self) -> nn.Module:
        """A model that the first process can use alone, whatever its weights are."""
        return self.model

    @contextmanager
    def gathered(self, weights: Mapping[str, Tensor] | None) -> Iterator[nn.Module]:
        """Within, :attr:`whole` has the weights of the model, or those given."""
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
    """A model with its objective, as one module for DDP to wrap: the model stays what it is."""

    def __init__(self, model: nn.Module, objective: Objective) -> None:
        super().__init__()
        self.model, self.objective = model, objective

    def forward(self, batch: Any) -> Tensor:
        return self.objective.loss(self.model, batch)


def _sum(gradients: Tensor) -> torch.futures.Future[Tensor]:
    """What DDP does with gradients: the sum, where by itself it would take the mean."""
    work = dist.all_reduce(gradients, async_op=True)
    assert work is not None
    summed: torch.futures.Future[Tensor] = work.get_future().then(lambda done: done.value()[0])
    return summed


class Replicas(Engine):
    """DDP: each process has the whole model, and gradients are summed while they are computed."""

    def __init__(self, model: nn.Module, objective: Objective, crew: Crew) -> None:
        super().__init__(model, objective, crew)
        self.together = DistributedDataParallel(self._alone(), gradient_as_bucket_view=True)
        # DDP reads the annotations of a hook, and does not take them as text.
        self.together.register_comm_hook(None, lambda _, bucket: _sum(bucket.buffer()))

    def _alone(self) -> nn.Module:
        return _Loss(self.model, self.objective)

    def loss(self, batch: Any) -> Tensor:
        result: Tensor = self.together(batch)
        return result

    def joining(self, last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last else self.together.no_sync()


class Shards(Engine):
    """FSDP2: each process holds a part of every weight, and gathers a block's when it is its turn.

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
    """

    def __init__(self, model: nn.Module, objective: Objective, crew: Crew) -> None:
        self._whole = copy.deepcopy(model).cpu() if crew.first else model
        device = next(model.parameters()).device
        mesh = init_device_mesh(device.type, (crew.world,))
        for module in list(model.modules()):
            if isinstance(module, nn.ModuleList):
                for block in module:
                    fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        for part in self._parts(model):
            part.set_gradient_divide_factor(1.0)  # a sum, not a mean
            part.set_force_sum_reduction_for_comms(True)  # or 1.0 is multiplied with, on the way
        super().__init__(model, objective, crew)

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
        found = {}
        for name, tensor in (weights or self.model.state_dict()).items():
            whole = self._gather(tensor) if isinstance(tensor, DTensor) else tensor
            if whole is not None:
                found[name] = whole.cpu()
        if self.crew.first:
            self._whole.load_state_dict(found)
            self._whole.to(device)
        yield self._whole
        if self.crew.first:
            self._whole.cpu()

    def _gather(self, shards: DTensor) -> Tensor | None:
        """All rows of a weight, for the first process; the others only give theirs.

        Not by ``full_tensor()``: gloo notes the name of what it has done last in a string that its
        two threads share. A name of up to 15 letters, as that of a gather, fits into the string; a
        longer one, as that of the coalesced all-gather behind ``full_tensor()``, is memory that
        both may free, and now and then a process dies of it (docs/log.md).
        """
        assert shards.placements == (Shard(0),)
        own = shards.to_local()
        even = own.new_zeros(-(-len(shards) // self.crew.world), *own.shape[1:])
        even[: len(own)] = own
        parts = (
            [torch.empty_like(even) for _ in range(self.crew.world)] if self.crew.first else None
        )
        dist.gather(even, parts)
        return torch.cat(parts)[: len(shards)] if parts else None


# ----------------------------------------------------------------------------- long sequences


class _Gather(torch.autograd.Function):
    """All processes' parts of a sequence, one after another: [..., n, dim] to [..., world n, dim].

    Backwards, what all of them ask of this part is summed.
    """

    @staticmethod
    def forward(ctx: Any, part: Tensor, crew: Crew) -> Tensor:
        ctx.crew = crew
        parts = [torch.empty_like(part) for _ in range(crew.world)]
        dist.all_gather(parts, part)
        return torch.cat(parts, dim=-2)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        whole = grads[0].contiguous()
        dist.all_reduce(whole)
        return whole.chunk(ctx.crew.world, dim=-2)[ctx.crew.rank], None


class _SharedCache(KeyValueCache):
    """Keys and values of a sequence whose earlier parts other processes have.

    To the layer it is a cache: the past stands before what is given. Here it was not kept, but is
    being computed elsewhere, and gradients flow back to it.
    """

    def __init__(self, crew: Crew, length: int) -> None:
        super().__init__()
        self.crew, self.length = crew, length  # of one part

    def __len__(self) -> int:
        return self.crew.rank * self.length

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        both: Tensor = _Gather.apply(torch.stack((key, value)), self.crew)  # type: ignore[no-untyped-call]
        keys, values = both[..., : (self.crew.rank + 1) * self.length, :]
        return keys, values


class _Part(nn.Module):
    """A decoder that reads one part of a sequence, after those that other processes read."""

    def __init__(self, model: GPT2, crew: Crew) -> None:
        super().__init__()
        self.model, self.crew = model, crew

    def forward(self, ids: Tensor, *, labels: Tensor) -> Tensor:
        state = State(self.model.config.depth)
        state.own = [_SharedCache(self.crew, ids.shape[1]) for _ in state.own]
        loss: Tensor = self.model(ids, state=state, labels=labels)
        return loss


class Context(Replicas):
    """Each process reads a part of every sequence, and gathers the keys and values before it.

    What a process holds of a sequence shrinks with the number of processes, all but keys and
    values; a later part has more to attend to than an earlier one.
    """

    def _alone(self) -> nn.Module:
        assert isinstance(self.model, GPT2)
        return _Loss(_Part(self.model, self.crew), self.objective)

    def share(self, batch: Any, rows: int) -> tuple[Any, bool]:
        del rows
        rank, world = self.crew.rank, self.crew.world
        length = batch.ids.shape[1]
        if length % world:
            raise InputError(
                f"Sequences of {length} tokens (data.length) cannot be shared evenly by {world} "
                "processes."
            )
        size = length // world
        return cut(batch, (slice(None), slice(rank * size, (rank + 1) * size))), True


ENGINES: dict[str, type[Engine]] = {"ddp": Replicas, "fsdp": Shards, "context": Context}


def engine(model: nn.Module, objective: Objective, crew: Crew, how: str) -> Engine:
    """How a model takes its steps, alone or together."""
    if isinstance(objective.plan, Lanes) and objective.plan.rows < crew.world:
        raise InputError(
            f"{objective.plan.rows} rows are read side by side, but there are {crew.world} "
            "processes. Raise batch.tokens or lower data.length."
        )
    kind = ENGINES[how] if crew.world > 1 else Engine
    return kind(model, objective, crew)
