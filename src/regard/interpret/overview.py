"""Six measures of every head of every layer."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret.measurement import Look
from regard.interpret.runs import TextRun
from regard.interpret.subjects.subject import Chunk, Layer
from regard.mechanism.labelled import Array, Labelled, Labels
from regard.mechanism.seeing import See, Seen
from regard.pictures.figures import Picture, head_grid, panels


class Measure(NamedTuple):
    title: str
    unit: str
    meaning: str


MEASURES = {
    "entropy": Measure("Entropy", "nats", "how widely a head spreads its weights"),
    "distance": Measure("Distance", "tokens", "how far away, on average, the attended tokens are"),
    "first": Measure("First token", "of the weight", "weight on the first token of the text"),
    "previous": Measure("Previous token", "of the weight", "weight on the token just before"),
    "self": Measure("Self", "of the weight", "weight on the token itself"),
    "induction": Measure(
        "Induction",
        "of the weight",
        "weight on the token after the previous occurrence of the same token",
    ),
}


@dataclass(frozen=True, eq=False, repr=False)
class Overview(Look):
    """The measures of every head, each [layers, heads], averaged over the queries.

    A value is NaN if the layer has no such head or the measure is undefined: cross-attention has no
    distance, and a text without repeated tokens has no induction. In self-attention, the query of
    the first token counts only in entropy and distance, because under a causal mask it can attend
    only to itself.
    """

    kind = "overview"
    measures: ClassVar[dict[str, Measure]] = MEASURES

    model: str
    tokens: int
    layers: tuple[str, ...]
    values: dict[str, Tensor]
    notes: tuple[str, ...] = ()

    def strongest(self, measure: str) -> tuple[str, int, float] | None:
        """The head with the largest value of a measure: its layer, its number and the value."""
        values = self.values[measure].nan_to_num(nan=-math.inf)
        if values.max() == -math.inf:
            return None
        layer, head = divmod(int(values.argmax()), values.shape[1])
        return self.layers[layer], head, float(values[layer, head])

    def _labelled(self) -> Labelled:
        arrays = {name: Array(("layer", "head"), values) for name, values in self.values.items()}
        facts = {"model": self.model, "tokens": self.tokens}
        return Labelled(arrays, {"layer": Labels(("layer",), self.layers)}, facts)

    def picture(self, *, without_first: bool = False) -> Picture:
        if without_first:
            raise InputError(
                "An overview has a measure for the first token's share. To leave the first token "
                "out of one head's map, give layer and head."
            )
        grids, notes = [], []
        for name, measure in self.measures.items():
            if (strongest := self.strongest(name)) is None:
                continue
            layer, head, value = strongest
            notes.append(f"{measure.title}: {measure.meaning}.")
            grids.append(
                head_grid(
                    self.values[name],
                    measure.unit,
                    title=measure.title,
                    layers=self.layers,
                    caption=f"Most: layer {layer}, head {head} ({value:.3g}).",
                )
            )
        notes += self._undefined()
        layers = f"{len(self.layers)} layer{'s' * (len(self.layers) != 1)}"
        return panels(
            f"{self.model}: what {layers} of heads do, over {self.tokens:,} tokens",
            grids,
            caption=" ".join([*notes, *self.notes]),
        )

    def _undefined(self) -> list[str]:
        """Sentences on the measures that are undefined."""
        notes = []
        if self.strongest("induction") is None:
            notes.append("No token repeats after another token, so induction is undefined.")
        if any(layer.startswith("cross") for layer in self.layers):
            notes.append("Distance, previous token and self are undefined in cross-attention.")
        return notes


class OverviewMeasurement:
    """The sum and the count of each measure in each layer, over all chunks."""

    def __init__(self, run: TextRun) -> None:
        self.run = run
        self._last: dict[tuple[str, Chunk], tuple[list[Tensor], See]] = {}  # the latest requests
        self._across = See(entropy=True, received=True)
        self._sums: dict[tuple[str, str], Tensor | float] = defaultdict(float)
        self._counts = Counter[tuple[str, str]]()

    def see(self, layer: Layer, chunk: Chunk) -> See | None:
        if layer.across:
            return self._across
        return self._request(layer, chunk)[1]

    def _request(self, layer: Layer, chunk: Chunk) -> tuple[list[Tensor], See]:
        """The groups of :func:`_pairs` in a chunk and the request, one for all layers of a half."""
        key = (layer.half, chunk)
        if key not in self._last:
            queries, keys = self.run.ranges(layer, chunk)
            ids = self.run.tokens_of(layer)[1].ids[keys.start : keys.stop]
            groups = _pairs(ids, len(queries))
            see = See(entropy=True, distance=True, received=True, pairs=torch.cat(groups))
            self._last = {key: (groups, see)} | {
                other: kept for other, kept in self._last.items() if other[1] == chunk
            }
        return self._last[key]

    def add(self, layer: Layer, chunk: Chunk, seen: Seen) -> None:
        queries, keys = self.run.ranges(layer, chunk)
        assert seen.entropy is not None
        assert seen.received is not None
        first, count = seen.received[0, :, 0], len(queries)
        totals = {"entropy": (seen.entropy[0].sum(-1), count)}
        if seen.distance is not None:
            totals["distance"] = (seen.distance[0].sum(-1), count)
        if seen.pairs is not None:
            sizes = [len(group) for group in self._request(layer, chunk)[0]]
            first_itself, *parts = torch.split(seen.pairs[0], sizes, dim=-1)
            first, count = first - first_itself.sum(-1), count - sizes[0]
            for name, part in zip(("self", "previous", "induction"), parts, strict=True):
                totals[name] = (part.sum(-1), part.shape[-1])
        if keys.start not in self.run.beginnings:  # the first key in memory has tokens before it
            first = torch.zeros_like(first)
        totals["first"] = (first, count)
        for name, (total, count) in totals.items():
            self._sums[layer.name, name] += total.double().cpu()
            self._counts[layer.name, name] += count

    def result(self) -> Overview:
        run = self.run
        heads = max(layer.heads for layer in run.layers)
        values = {}
        for name in MEASURES:
            table = torch.full((len(run.layers), heads), math.nan, dtype=torch.float64)
            for row, layer in enumerate(run.layers):
                if count := self._counts[layer.name, name]:
                    means = self._sums[layer.name, name] / count
                    table[row, : layer.heads] = means
            values[name] = table
        return Overview(
            run.subject.name,
            len(run.tokens),
            tuple(layer.name for layer in run.layers),
            values,
            run.notes,
        )


def _pairs(ids: Sequence[int], queries: int) -> list[Tensor]:
    """Pairs (query, key) in four groups: first token with itself, self, previous and induction.

    ``ids`` are the token ids of the keys. The last ``queries`` tokens are the queries, too; the
    tokens before them are in memory.
    """
    memory = len(ids) - queries
    places = torch.arange(max(memory, 1), len(ids))  # the tokens of the queries, except the first
    first = torch.zeros((0 if memory else 1), 2, dtype=torch.long)
    own = torch.stack((places - memory, places), -1)
    previous = torch.stack((places - memory, places - 1), -1)
    repeats, last = [], dict[int, int]()
    for place, token in enumerate(ids):
        before = last.get(token)
        if before is not None and before < place - 1 and place >= memory:
            repeats.append((place - memory, before + 1))
        last[token] = place
    induction = torch.tensor(repeats, dtype=torch.long).reshape(-1, 2)
    return [first, own, previous, induction]
