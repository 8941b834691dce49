"""GPT-2 on a GPU, one sequence at a time, as CUDA graphs.

A decoding step of a small model runs hundreds of kernels. Launching them takes longer than running
them, so a CUDA graph launches all at once. A graph reads fixed addresses: the caches therefore
never move, and the position is a tensor on the device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from regard.decoding.state import State
from regard.errors import InputError
from regard.layers.cache import CrossCache, FixedCache
from regard.models.gpt2 import GPT2

MIN_KEYS = 128  # the number of keys in the smallest graph; each next graph has twice as many


class Run:
    """The decoding state of one sequence: its position."""

    pads: Tensor | None = None

    def __init__(self) -> None:
        self.length = 0

    def spread(self, beams: int) -> None:
        raise InputError(
            f"Replayed does not search with beams, but got {beams}: use Greedy() or Sample()."
        )

    def follow(self, origins: Tensor) -> None:
        raise InputError(f"Replayed has no beams to follow {origins.tolist()}.")

    def keep(self, sentences: Tensor) -> None:
        """Do nothing: the only sentence stays."""

    def rest(self, sentences: Tensor) -> None:
        """Do nothing: the only sentence is done."""

    def place(self, sentences: Tensor, others: Run, which: Tensor) -> None:  # noqa: ARG002
        raise InputError("Replayed decodes one sequence at a time: start a new one.")


class Replayed:
    """A GPT-2 for :func:`regard.generate` with ``batch=1``, with Greedy or Sample.

    It holds the cache of one sequence. On a CPU it takes the same steps without graphs.

    >>> from regard import GPT2Config, generate
    >>> model = GPT2(GPT2Config(vocabulary=10, dim=8, depth=1, heads=2)).eval()
    >>> fast = generate(Replayed(model), [[1, 2, 3]], max_new_tokens=5, batch=1)
    >>> fast[0][0].ids == generate(model, [[1, 2, 3]], max_new_tokens=5)[0][0].ids
    True
    """

    def __init__(self, model: GPT2) -> None:
        self.model = model
        config, weight = model.config, model.tokens.weight
        shape = (1, config.heads, config.length, config.dim // config.heads)
        with torch.inference_mode():
            self.memory = [
                (weight.new_zeros(shape), weight.new_zeros(shape)) for _ in range(config.depth)
            ]
            self.ids = torch.zeros(1, 1, dtype=torch.long, device=weight.device)
            self.at = torch.zeros(1, dtype=torch.long, device=weight.device)
            # A graph reads fixed addresses: all tensors it reads live as long as this object.
            self.index = torch.arange(config.length, device=weight.device)
        self.replays: dict[int, Callable[[], Tensor]] = {}

    def start_decoding(self, prompts: Sequence[Sequence[int]], room: int = 0) -> tuple[Tensor, Run]:
        """Return the ids of the one prompt and an empty state."""
        if len(prompts) != 1:
            raise InputError(
                f"Replayed decodes one sequence at a time, but got {len(prompts)}: pass batch=1."
            )
        if any(layer.module.head_hooks.active for layer in self.model.attention_layers()):
            raise InputError(
                "Replayed repeats recorded steps, which do not call head hooks. Remove the "
                "hooks, or decode with the model itself."
            )
        ids, _ = self.model.start_decoding(prompts, room)
        return ids, Run()

    def step(self, ids: Tensor, run: Run) -> Tensor:
        """Return the logits after the last of ``ids`` [1, n]: [1, vocabulary]."""
        past = run.length
        run.length += ids.shape[1]
        if not past:
            return self._read(ids)
        most = self.model.config.length
        if run.length > most:
            raise InputError(f"This GPT-2 reads at most {most} tokens.")
        self.ids.copy_(ids)
        self.at.fill_(past)
        size = MIN_KEYS
        while size < run.length:
            size *= 2
        size = min(size, most)
        if size not in self.replays:
            self.replays[size] = self._replay(size)
        return self.replays[size]()

    def _read(self, prompt: Tensor) -> Tensor:
        """Return the logits after a prompt [1, n], and copy its keys and values into the cache."""
        state = State(self.model.config.depth, prompt.shape[1])
        logits = self.model.step(prompt, state)
        for memory, cache in zip(self.memory, state.own, strict=True):
            for fixed, kept in zip(memory, cache.kept, strict=True):
                fixed[:, :, : len(cache)] = kept
        return logits

    def _replay(self, size: int) -> Callable[[], Tensor]:
        """Return a function that runs one step over ``size`` keys, as a graph on a GPU."""
        model = self.model
        state = State(model.config.depth)
        state.own = [
            FixedCache(keys[:, :, :size], values[:, :, :size], self.at)
            for keys, values in self.memory
        ]
        state.cross = [CrossCache() for _ in state.own]
        index = self.index[:size]

        def step() -> Tensor:
            x = model.tokens(self.ids) + model.places(self.at)
            hidden = torch.where(index <= self.at, 0.0, -math.inf).to(x.dtype)
            x = model.norm(model.stack.step(x, state, hidden[None, None, None]))
            return model.logits(x[:, 0])

        if not self.at.is_cuda:
            return step
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # warm up first: capture does not allow setup work
            step()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
