"""The measures of ``look`` over the patches of an image."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret.heads import WordKeys, WordMeasurement
from regard.interpret.overview import Measure, Overview
from regard.interpret.runs import TextRun
from regard.interpret.subjects.images import ImageModel
from regard.interpret.subjects.subject import Chunk, Layer
from regard.mechanism.labelled import Array, Labelled, Labels
from regard.mechanism.seeing import See, Seen
from regard.pictures.figures import Picture, patch_grid


@dataclass(frozen=True, eq=False, repr=False)
class PatchOverview(Overview):
    """The measures of every head, each [layers, heads], averaged over the patches of an image.

    Distances are Euclidean, from centre to centre, over the weights on patches. ``first`` is NaN if
    the model has no [CLS] token.
    """

    measures: ClassVar[dict[str, Measure]] = {
        "entropy": Measure("Entropy", "nats", "how widely a head spreads its weights"),
        "distance": Measure(
            "Distance", "patches", "how far away, on average, the attended patches are"
        ),
        "first": Measure("[CLS]", "of the weight", "weight on the token [CLS]"),
        "self": Measure("Self", "of the weight", "weight on the patch itself"),
    }

    def _undefined(self) -> list[str]:
        return ["The model has no [CLS] token."] if self.strongest("first") is None else []


class PatchOverviewMeasurement:
    """The measures of every head, layer by layer."""

    def __init__(self, run: TextRun, subject: ImageModel) -> None:
        self.run, self._before = run, subject.before
        rows, columns = subject.grid
        places = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).float()
        self._distances = torch.cdist(places, places)  # [patches, patches]
        heads = max(layer.heads for layer in run.layers)
        sizes = (len(run.layers), heads)
        self._values = {
            name: torch.full(sizes, math.nan, dtype=torch.float64)
            for name in PatchOverview.measures
        }

    def see(self, layer: Layer, chunk: Chunk) -> See | None:  # noqa: ARG002
        return See(entropy=True, weights=True)

    def add(self, layer: Layer, chunk: Chunk, seen: Seen) -> None:  # noqa: ARG002
        assert seen.entropy is not None
        assert seen.weights is not None
        before = self._before
        weights = seen.weights[0, :, before:].float().cpu()  # [heads, patches, tokens]
        among = weights[:, :, before:]
        far = (among * self._distances).sum(-1) / among.sum(-1).clamp(min=1e-30)
        means = {
            "entropy": seen.entropy[0, :, before:].cpu().mean(-1),
            "distance": far.mean(-1),
            "self": among.diagonal(dim1=-2, dim2=-1).mean(-1),
        }
        if before:
            means["first"] = weights[:, :, 0].mean(-1)
        row = self.run.layers.index(layer)
        for name, values in means.items():
            self._values[name][row, : layer.heads] = values.double()

    def result(self) -> PatchOverview:
        run = self.run
        names = tuple(layer.name for layer in run.layers)
        return PatchOverview(run.subject.name, len(run.tokens), names, self._values, run.notes)


@dataclass(frozen=True, eq=False, repr=False)
class PatchWeights(WordKeys):
    """The weights of one patch, or of [CLS], on all patches; the picture is a grid of patches."""

    grid: tuple[int, int] = (0, 0)  # rows, columns

    @property
    def on_patches(self) -> Tensor:
        """The weights on patches, [rows, columns]."""
        rows, columns = self.grid
        return self.weights[len(self.weights) - rows * columns :].reshape(rows, columns)

    def _labelled(self) -> Labelled:
        facts = {"model": self.model, "patch": self.word, "heads": self.heads}
        labels = {name: Labels((name,), tuple(range(size)))
                  for name, size in zip(("row", "column"), self.grid, strict=True)}  # fmt: skip
        return Labelled({"weights": Array(("row", "column"), self.on_patches)}, labels, facts)

    def picture(self, *, without_first: bool = False) -> Picture:
        if without_first:
            raise InputError("The grid shows patches only; [CLS] is left out already.")
        before = len(self.weights) - self.on_patches.numel()
        shares = [f"{label} {self.weights[place]:.1%}"
                  for place, label in enumerate(self.keys[:before])]  # fmt: skip
        caption = f"Weight on other tokens: {', '.join(shares)}. " if shares else ""
        place = self.keys.index(self.word)
        return patch_grid(
            self.on_patches,
            patch=divmod(place - before, self.grid[1]) if place >= before else None,
            title=f"{self.model}: what {self.word} attends to, {self.heads}",
            caption=(caption + " ".join(self.notes)).strip(),
        )


class PatchMeasurement(WordMeasurement):
    """The weights of one patch, from one head or averaged over layers and heads."""

    def __init__(
        self,
        run: TextRun,
        subject: ImageModel,
        patch: str,
        layer: Layer | None = None,
        head: int | None = None,
    ) -> None:
        self._grid = subject.grid
        name = patch.replace(" ", "")
        if name not in run.tokens.labels:
            rows, columns = subject.grid
            others = "".join(f", or {label}" for label in run.tokens.labels[: subject.before])
            raise InputError(
                f"There is no patch {patch!r}. Name it by row and column, from 0,0 to "
                f"{rows - 1},{columns - 1}{others}."
            )
        super().__init__(run, name, layer, head)

    def result(self) -> PatchWeights:
        found = super().result()
        return PatchWeights(
            found.model, found.word, found.times, found.heads, found.weights, found.keys,
            found.notes, self._grid,
        )  # fmt: skip
