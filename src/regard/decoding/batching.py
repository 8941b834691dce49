"""Many prompts through a model, some at a time: when some are done, others take their places."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from regard.decoding.strategies import Generated


class Kept(Protocol):
    """What a model keeps between steps."""

    pads: Tensor | None  # [batch]: how many of the first ids of each row are padding

    def spread(self, beams: int) -> None:
        """From here on each sentence has so many beams, that all stand where it stands."""

    def follow(self, origins: Tensor) -> None:
        """Let beam ``i`` of each sentence go on from its beam ``origins[:, i]``."""

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences only, in this order."""

    def rest(self, sentences: Tensor) -> None:
        """These sentences are done, and go on with no matter what until others take over."""

    def place(self, sentences: Tensor, others: Self, which: Tensor) -> None:
        """Give the places of these sentences to those at ``which`` of ``others``.

        They have as many beams, and read their prompts.
        """


S = TypeVar("S", bound=Kept)


class Decoder(Protocol[S]):
    """What a model must do to be decoded."""

    def start_decoding(self, prompts: Sequence[Sequence[int]], room: int = 0) -> tuple[Tensor, S]:
        """The first ids to step over, [batch, n], and the state before them."""

    def step(self, ids: Tensor, state: S) -> Tensor:
        """The logits after the last of ``ids`` [batch, n]: [batch, vocabulary].

        With beams there is a row for each, those of a sentence side by side.
        """


class Task(Protocol):
    """What is to be found for one prompt."""

    done: bool

    @property
    def origins(self) -> Sequence[int]:
        """The beam that each of its beams goes on from."""

    @property
    def found(self) -> list[Generated]: ...


T = TypeVar("T", bound=Task)


class Way(Protocol[T]):
    """How tasks go on."""

    beams: int

    def begin(self, begun: list[int]) -> T:
        """A task whose sequences begin with ``begun``."""

    def choose(self, logits: Tensor, tasks: Sequence[T]) -> Tensor:
        """Let tasks go on by one token a beam; the ids for the next step come back, [rows, 1]."""


def run(
    model: Decoder[S],
    prompts: Sequence[Sequence[int]],
    way: Way[T],
    room: int,
    capacity: Callable[[int], int],
) -> list[list[Generated]]:
    """What is found for each prompt. The longest go first, so that like lengths go together.

    ``room`` is how many nodes a sentence may come to need, and ``capacity`` says how many prompts
    of a length go together.
    """
    waiting = deque(sorted(range(len(prompts)), key=lambda index: -len(prompts[index])))
    tasks: dict[int, T] = {}

    def enter() -> tuple[list[T], Tensor, S]:
        """The next prompts: their tasks, each a token further, the next ids, and their state."""
        count = min(capacity(len(prompts[waiting[0]])), len(waiting))
        some = [waiting.popleft() for _ in range(count)]
        ids, state = model.start_decoding([prompts[index] for index in some], room)
        new = [way.begin(begun) for begun in begun_of(ids, state)]
        tasks.update(zip(some, new, strict=True))
        ids = way.choose(model.step(ids, state), new)
        if way.beams > 1:
            state.spread(way.beams)
        return new, ids.view(count, -1), state

    while waiting:
        live, ids, state = enter()
        new, first, others = live, ids, state
        ready: list[int] = []  # which of the new ones wait for a place
        resting: list[int] = []  # which of the live ones are known to be done
        while True:
            done = [row for row, task in enumerate(live) if task.done]
            if len(done) == len(live) and not ready:
                break
            if done and 8 * len(done) >= len(live):  # enough to be worth it
                if not ready and waiting and capacity(len(prompts[waiting[0]])) < 2 * len(live):
                    new, first, others = enter()
                    ready = [row for row, task in enumerate(new) if not task.done]
                resting = []
                if ready:
                    pairs = list(zip(done, ready, strict=False))
                    for row, entering in pairs:
                        live[row] = new[entering]
                    rows, which = torch.tensor(pairs, device=ids.device).T
                    state.place(rows, others, which)
                    ids = ids.index_copy(0, rows, first.index_select(0, which))
                    ready = ready[len(pairs) :]
                    continue
                staying = [row for row, task in enumerate(live) if not task.done]
                index = torch.tensor(staying, device=ids.device)
                state.keep(index)
                ids = ids.index_select(0, index)
                live = [live[row] for row in staying]
            elif len(done) > len(resting):
                state.rest(torch.tensor(done, device=ids.device))
                resting = done
            if way.beams > 1:
                state.follow(torch.tensor([task.origins for task in live], device=ids.device))
            ids = way.choose(model.step(ids.view(-1, 1), state), live).view(len(live), -1)
    return [tasks[index].found for index in range(len(prompts))]


def begun_of(first: Tensor, state: Kept) -> list[list[int]]:
    """The first ids of each row, without padding."""
    pads = [0] * len(first) if state.pads is None else state.pads.tolist()
    return [row[skip:] for row, skip in zip(first.tolist(), pads, strict=True)]
