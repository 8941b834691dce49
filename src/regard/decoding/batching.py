"""Decode many prompts in batches. When a prompt is done, another takes its row."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor

from regard.decoding.strategies import Generated


class DecodingState(Protocol):
    """The state of a model between decoding steps."""

    pads: Tensor | None  # [batch]: the number of padding ids each row begins with

    def spread(self, beams: int) -> None:
        """Give each sentence this many beams, each a copy of its current state."""

    def follow(self, origins: Tensor) -> None:
        """Let beam ``i`` of each sentence continue that sentence's beam ``origins[:, i]``."""

    def keep(self, sentences: Tensor) -> None:
        """Keep these sentences only, in this order."""

    def rest(self, sentences: Tensor) -> None:
        """Mark these sentences as done. Their rows are unused until new sentences replace them."""

    def place(self, sentences: Tensor, others: Self, which: Tensor) -> None:
        """Replace ``sentences`` by the sentences of the state ``others`` at ``which``.

        ``others`` has the same number of beams, and has read its prompts.
        """


S = TypeVar("S", bound=DecodingState)


class Decoder(Protocol[S]):
    """The methods of a model that decoding needs."""

    def start_decoding(self, prompts: Sequence[Sequence[int]], room: int = 0) -> tuple[Tensor, S]:
        """Return the ids of the first step, [batch, n], and an empty state."""

    def step(self, ids: Tensor, state: S) -> Tensor:
        """Return the logits after the last of ``ids`` [batch, n]: [batch, vocabulary].

        With beams, each beam has a row. The beams of a sentence are in neighbouring rows.
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
        """Return a task whose sequences begin with ``begun``."""

    def choose(self, logits: Tensor, tasks: Sequence[T]) -> Tensor:
        """Append one token to each beam, and return the ids of the next step, [rows, 1]."""


def run(
    model: Decoder[S],
    prompts: Sequence[Sequence[int]],
    chooser: Chooser[T],
    room: int,
    capacity: Callable[[int], int],
) -> list[list[Generated]]:
    """Decode all prompts. Long prompts come first, so that a batch has similar lengths.

    ``room`` is the number of tokens to reserve for each prompt: the maximum number of new tokens
    times the number of beams. ``capacity`` maps the length of a prompt to a batch size.
    """
    waiting = deque(sorted(range(len(prompts)), key=lambda index: -len(prompts[index])))
    tasks: dict[int, T] = {}

    def enter() -> tuple[list[T], Tensor, S]:
        """Start the next prompts. Return their tasks after one step, the next ids and the state."""
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
        ready: list[int] = []  # rows of new tasks that wait to replace finished ones
        resting: list[int] = []  # rows of finished tasks that are marked as done
        while True:
            done = [row for row, task in enumerate(live) if task.done]
            if len(done) == len(live) and not ready:
                break
            if done and 8 * len(done) >= len(live):  # copies cost less than the unused rows
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
    """Return the first ids of each row without padding."""
    pads = [0] * len(first) if state.pads is None else state.pads.tolist()
    return [row[skip:] for row, skip in zip(first.tolist(), pads, strict=True)]
