"""Two looks of one kind, and their difference."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.errors import InputError
from regard.interpret.heads import HeadMap
from regard.interpret.overview import Overview
from regard.pictures.figures import Picture
from regard.pictures.figures import compare as compare_pictures


@dataclass(frozen=True, eq=False)
class Comparison:
    """Two overviews, or two heads' maps, and how the second differs from the first."""

    first: Overview | HeadMap
    second: Overview | HeadMap
    names: tuple[str, str]

    def picture(self, *, without_first: bool = False) -> Picture:
        one, other = (look.picture(without_first=without_first) for look in self._both)
        caption = " ".join(dict.fromkeys(note for look in self._both for note in look.notes))
        return compare_pictures(one, other, names=self.names, caption=caption)

    @property
    def _both(self) -> tuple[Overview | HeadMap, Overview | HeadMap]:
        return self.first, self.second

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "comparison",
            "names": list(self.names),
            "first": self.first.to_dict(),
            "second": self.second.to_dict(),
        }

    def _repr_html_(self) -> str:
        return self.picture()._repr_html_()


def compare(first: object, second: object, *, names: tuple[str, str]) -> Comparison:
    """Two looks side by side: of two models, two heads or two texts.

    Overviews must have the same layers and heads, maps the same number of tokens.
    """
    if isinstance(first, Overview) and isinstance(second, Overview):
        shapes = [
            f"{len(one.layers)} layers of {one.values['entropy'].shape[1]} heads"
            for one in (first, second)
        ]
        if shapes[0] != shapes[1]:
            raise InputError(
                f"{names[0]} has {shapes[0]} and {names[1]} {shapes[1]}: they cannot be compared "
                "head by head. Compare two heads: give layer and head."
            )
        return Comparison(first, second, names)
    if isinstance(first, HeadMap) and isinstance(second, HeadMap):
        sizes = [f"{len(one.rows):,} x {len(one.columns):,} tokens" for one in (first, second)]
        if sizes[0] != sizes[1]:
            raise InputError(
                f"{names[0]} has {sizes[0]} and {names[1]} {sizes[1]}: maps are compared cell by "
                "cell. Ask for as many rows and columns of each."
            )
        return Comparison(first, second, names)
    raise InputError(
        "Two overviews can be compared, or two maps of heads; not alignments, and no word's keys."
    )
