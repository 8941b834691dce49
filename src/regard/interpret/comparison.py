"""The difference of two results of ``look``."""

from __future__ import annotations

from dataclasses import dataclass

from regard.errors import InputError
from regard.interpret.heads import HeadMap
from regard.interpret.measurement import Look
from regard.interpret.overview import Overview
from regard.mechanism.labelled import Parts
from regard.pictures.figures import Picture
from regard.pictures.figures import compare as compare_pictures


@dataclass(frozen=True, eq=False, repr=False)
class Comparison(Look):
    """Two overviews or two maps of heads; the picture shows how the second differs."""

    kind = "comparison"

    first: Overview | HeadMap
    second: Overview | HeadMap
    names: tuple[str, str]

    def _labelled(self) -> Parts:
        first, second = self.names if len(set(self.names)) > 1 else ("first", "second")
        parts = {(first,): self.first._labelled(), (second,): self.second._labelled()}
        return Parts(("compared",), parts)

    def picture(self, *, without_first: bool = False) -> Picture:
        both = (self.first, self.second)
        first, second = (look.picture(without_first=without_first) for look in both)
        caption = " ".join(dict.fromkeys(note for look in both for note in look.notes))
        return compare_pictures(first, second, names=self.names, caption=caption)


def compare(first: object, second: object, *, names: tuple[str, str]) -> Comparison:
    """Compare the results of two models, two heads or two texts.

    Overviews must have the same layers and heads, maps the same number of tokens.
    """
    if isinstance(first, Overview) and isinstance(second, Overview):
        sizes = [
            f"{len(each.layers)} layers of {each.values['entropy'].shape[1]} heads"
            for each in (first, second)
        ]
        advice = "they cannot be compared head by head. Compare two heads: give layer and head."
    elif isinstance(first, HeadMap) and isinstance(second, HeadMap):
        sizes = [f"{len(each.rows):,} x {len(each.columns):,} tokens" for each in (first, second)]
        advice = "maps are compared cell by cell. Give the same number of rows and columns."
    else:
        raise InputError(
            "Only two overviews or two maps of heads can be compared, not alignments or a word's "
            "keys."
        )
    if sizes[0] != sizes[1]:
        raise InputError(f"{names[0]} has {sizes[0]} and {names[1]} has {sizes[1]}: {advice}")
    return Comparison(first, second, names)
