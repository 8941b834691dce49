"""Decoding of many prompts in batches: a prompt that is done leaves its place to another."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from regard.decoding.strategies import Generated


class DecodingState(Protocol):
    """What a model keeps between steps."""

    pads: Tensor | None  # [batch]: the number of padding ids each row begins with

    def spread(self, beams: int) -> None:
        """Give each sentence this many beams, each a copy of its current state."""

    def follow(self, origins: Tensor) -> None:
        """Let beam ``i`` of each sentence continue its beam ``origins[:, i]``."""

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences only, in this order."""

    def rest(self, sentences: Tensor) -> None:
        """Mark these sentences as done: their values are unused until others take their places."""

    def place(self, sentences: Tensor, others: Self, which: Tensor) -> None:
        """Replace these sentences by those at ``which`` of ``others``.

        ``others`` have the same number of beams, and have read their prompts.
        """


S = TypeVar("S", bound=DecodingState)


class Decoder(Protocol[S]):
    """What decoding needs of a model."""

    def start_decoding(self, prompts: Sequence[Sequence[int]], room: int = 0) -> tuple[Tensor, S]:
        """The first ids to step over, [batch, n], and the state before them."""

    def step(self, ids: Tensor, state: S) -> Tensor:
        """The logits after the last of ``ids`` [batch, n]: [batch, vocabulary].

        With beams there is a row for each beam; those of a sentence are neighbours.
        """


class Task(Protocol):
    """The decoding of one prompt."""

    done: bool

    @property
    def origins(self) -> Sequence[int]:
        """For each beam after a step, the index of the earlier beam it continues."""

    @property
    def results(self) -> list[Generated]: ...


T = TypeVar("T", bound=Task)


class Chooser(Protocol[T]):
    """Chooses the next tokens of tasks."""

    beams: int

    def begin(self, begun: list[int]) -> T:
        """A task whose sequences begin with ``begun``."""

    def choose(self, logits: Tensor, tasks: Sequence[T]) -> Tensor:
        """Append one token to each beam, and return the ids of the next step, [rows, 1]."""


def run(
    model: Decoder[S],
    prompts: Sequence[Sequence[int]],
    chooser: Chooser[T],
    room: int,
    capacity: Callable[[int], int],
) -> list[list[Generated]]:
    """The sequences of each prompt. Long prompts come first, so that lengths in a batch are alike.

    ``room`` is the number of nodes a sentence may need, and ``capacity`` the batch size for prompts
    of a length.
    """
    waiting = deque(sorted(range(len(prompts)), key=lambda index: -len(prompts[index])))
    tasks: dict[int, T] = {}

    def enter() -> tuple[list[T], Tensor, S]:
        """Start the next prompts. Return their tasks after one step, their next ids and state."""
        count = min(capacity(len(prompts[waiting[0]])), len(waiting))
        some = [waiting.popleft() for _ in range(count)]
        ids, state = model.start_decoding([prompts[index] for index in some], room)
        new = [chooser.begin(begun) for begun in begun_of(ids, state)]
        tasks.update(zip(some, new, strict=True))
        ids = chooser.choose(model.step(ids, state), new)
        if chooser.beams > 1:
            state.spread(chooser.beams)
        return new, ids.view(count, -1), state

    while waiting:
        live, ids, state = enter()
        new, first, others = live, ids, state
        ready: list[int] = []  # the new tasks that wait for a place
        resting: list[int] = []  # the live tasks whose state rests
        while True:
            done = [row for row, task in enumerate(live) if task.done]
            if len(done) == len(live) and not ready:
                break
            if done and 8 * len(done) >= len(live):  # enough to pay for the copies
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
            if chooser.beams > 1:
                state.follow(torch.tensor([task.origins for task in live], device=ids.device))
            ids = chooser.choose(model.step(ids.view(-1, 1), state), live).view(len(live), -1)
    return [tasks[index].results for index in range(len(prompts))]


def begun_of(first: Tensor, state: DecodingState) -> list[list[int]]:
    """The first ids of each row, without padding."""
    pads = [0] * len(first) if state.pads is None else state.pads.tolist()
    return [row[skip:] for row, skip in zip(first.tolist(), pads, strict=True)]
