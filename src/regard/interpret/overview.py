"""What every head of every layer does, in six numbers a head."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret.runs import Chunk, Reading
from regard.mechanism.seeing import See, Seen
from regard.models.model import AttentionLayer
from regard.pictures.figures import Picture, head_grid, panels


class Measure(NamedTuple):
    title: str
    unit: str
    meaning: str


MEASURES = {
    "entropy": Measure("Entropy", "nats", "how widely a head looks"),
    "distance": Measure("Distance", "tokens", "how far away, on average, it looks"),
    "first": Measure("First token", "of the weight", "what it rests on the very first token"),
    "previous": Measure("Previous token", "of the weight", "on the token just before"),
    "self": Measure("Self", "of the weight", "on the token itself"),
    "induction": Measure(
        "Induction",
        "of the weight",
        "where a token has come before, on what followed it the last time",
    ),
}


@dataclass(frozen=True, eq=False)
class Overview:
    """The measures of every head, each [layers, heads] and a mean over the tokens that ask.

    NaN where a layer has fewer heads, or where a measure means nothing: distances across to
    another text, induction where no token comes twice. The first token's own weights count towards
    entropy and distance only, for it may have no choice.
    """

    model: str
    tokens: int
    layers: tuple[str, ...]
    values: dict[str, Tensor]
    notes: tuple[str, ...] = ()

    def strongest(self, measure: str) -> tuple[str, int, float] | None:
        """The head that has most of a measure: its layer, its number and the value."""
        values = self.values[measure].nan_to_num(nan=-math.inf)
        if values.max() == -math.inf:
            return None
        layer, head = divmod(int(values.argmax()), values.shape[1])
        return self.layers[layer], head, float(values[layer, head])

    def picture(self, *, without_first: bool = False) -> Picture:
        if without_first:
            raise InputError(
                "An overview shows the first token's share as a number of its own. Leave it out of "
                "one head's map: give layer and head."
            )
        drawn, meant = [], []
        for name, measure in MEASURES.items():
            found = self.strongest(name)
            if found is None:
                continue
            layer, head, value = found
            meant.append(f"{measure.title}: {measure.meaning}.")
            drawn.append(
                head_grid(
                    self.values[name],
                    measure.unit,
                    title=measure.title,
                    layers=self.layers,
                    caption=f"Most: layer {layer}, head {head} ({value:.3g}).",
                )
            )
        if self.strongest("induction") is None:
            meant.append("No token comes again after another: there is no induction to measure.")
        if any(layer.startswith("cross") for layer in self.layers):
            meant.append("Across two texts there is no distance, and no previous token or self.")
        layers = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        return panels(
            f"{self.model}: what {layers} of heads do, over {self.tokens:,} tokens",
            drawn,
            caption=" ".join([*meant, *self.notes]),
        )

    def to_dict(self) -> dict[str, Any]:
        def plain(rows: list[list[float]]) -> list[list[float | None]]:
            return [[None if math.isnan(value) else value for value in row] for row in rows]

        return {
            "kind": "overview",
            "model": self.model,
            "tokens": self.tokens,
            "layers": list(self.layers),
            "values": {name: plain(values.tolist()) for name, values in self.values.items()},
            "notes": list(self.notes),
        }

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()


class OverviewSight:
    """Adds up, layer by layer and chunk by chunk, what the measures are means of."""

    def __init__(self, reading: Reading) -> None:
        self.reading = reading
        self._asked: dict[tuple[str, bool, Chunk], tuple[See, list[int]]] = {}
        self._sums: dict[str, dict[str, Tensor]] = {layer.name: {} for layer in reading.layers}
        self._counts: dict[str, dict[str, int]] = {layer.name: {} for layer in reading.layers}

    def ask(self, layer: AttentionLayer, chunk: Chunk) -> See | None:
        return self._question(layer, chunk)[0]

    def _question(self, layer: AttentionLayer, chunk: Chunk) -> tuple[See, list[int]]:
        """What to see, and of how many pairs each of self, previous and induction is a mean."""
        if layer.across:
            return See(entropy=True, received=True), [0, 0, 0, 0]
        kind = (layer.half, layer.across, chunk)
        if kind not in self._asked:
            queries, keys = self.reading.part(layer, chunk)
            ids = self.reading.sides(layer)[1].ids[keys.start : keys.stop]
            groups = _pairs(ids, len(queries))
            see = See(entropy=True, distance=True, received=True, pairs=torch.cat(groups))
            self._asked = {kind: (see, [len(group) for group in groups])}
        return self._asked[kind]

    def take(self, layer: AttentionLayer, chunk: Chunk, seen: Seen) -> None:
        _, sizes = self._question(layer, chunk)
        queries, keys = self.reading.part(layer, chunk)
        assert seen.entropy is not None
        assert seen.received is not None
        found = {"entropy": (seen.entropy[0].sum(-1), len(queries))}
        if seen.distance is not None:
            found["distance"] = (seen.distance[0].sum(-1), len(queries))
        # Of a memory's keys the first is only the oldest: the text's first token has gone.
        first = seen.received[0, :, 0] if not keys.start or not chunk.memory else None
        asking = len(queries)
        if seen.pairs is not None:
            parts = torch.split(seen.pairs[0], sizes, dim=-1)
            if sizes[0] and first is not None:
                first, asking = first - parts[0][:, 0], asking - 1
            for name, part in zip(("self", "previous", "induction"), parts[1:], strict=True):
                found[name] = (part.sum(-1), part.shape[-1])
        zero = torch.zeros_like(seen.received[0, :, 0])
        found["first"] = (zero if first is None else first, asking)
        for name, (total, count) in found.items():
            sums, counts = self._sums[layer.name], self._counts[layer.name]
            sums[name] = sums.get(name, 0) + total.double().cpu()
            counts[name] = counts.get(name, 0) + count

    def result(self) -> Overview:
        reading = self.reading
        heads = max(layer.module.heads for layer in reading.layers)
        values = {}
        for name in MEASURES:
            table = torch.full((len(reading.layers), heads), math.nan, dtype=torch.float64)
            for row, layer in enumerate(reading.layers):
                if count := self._counts[layer.name].get(name, 0):
                    means = self._sums[layer.name][name] / count
                    table[row, : len(means)] = means
            values[name] = table
        return Overview(
            type(reading.model).__name__,
            len(reading.tokens),
            tuple(layer.name for layer in reading.layers),
            values,
            notes_on(reading),
        )


def notes_on(reading: Reading) -> tuple[str, ...]:
    """What a reader must know of how the text was read."""
    chunks = reading.chunks
    notes = []
    if len(chunks) > 1 and chunks[1].memory:
        notes.append(
            f"Read in {len(chunks):,} segments of {chunks[0].stop:,} tokens, each with the "
            f"{chunks[1].memory:,} before it in memory."
        )
    elif len(chunks) > 1:
        notes.append(
            f"The model has {chunks[0].stop:,} positions: the text is read in {len(chunks):,} "
            "windows, which know nothing of each other."
        )
    if reading.target is None and any(layer.half for layer in reading.layers):
        notes.append("Only the encoder ran: the text is long, and there is no target to write.")
    return tuple(notes)


def _pairs(ids: Sequence[int], queries: int) -> list[Tensor]:
    """The pairs (query, key) of the first token, of self, of previous and of induction.

    The last of ``ids`` are the queries. The first token is a pair by itself, where it asks.
    """
    memory = len(ids) - queries
    places = torch.arange(max(memory, 1), len(ids))  # of keys: the first has nothing before it
    first = torch.zeros((0 if memory else 1), 2, dtype=torch.long)
    own = torch.stack((places - memory, places), -1)
    previous = torch.stack((places - memory, places - 1), -1)
    found, last = [], dict[int, int]()
    for place, token in enumerate(ids):
        before = last.get(token)
        if before is not None and before < place - 1 and place >= memory:
            found.append((place - memory, before + 1))
        last[token] = place
    induction = torch.tensor(found, dtype=torch.long).reshape(-1, 2)
    return [first, own, previous, induction]
