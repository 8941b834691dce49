"""The weights of one head as a map, and the words that one word attends to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret import viewers
from regard.interpret.measurement import Look
from regard.interpret.pooling import membership
from regard.interpret.recorded import MAX_NAMED
from regard.interpret.runs import TextRun
from regard.interpret.subjects.subject import Chunk, Layer
from regard.mechanism.labelled import Array, Labelled, Labels, bins_from
from regard.mechanism.seeing import See, Seen
from regard.pictures.figures import Picture, pooled_map, top_keys, weight_map

MAX_CELLS = 256  # rows or columns of a whole map; larger maps are pooled
MAX_EXACT = 2**18  # weights of a map that is not pooled
MAX_WEIGHTS = 2**25  # weights of one chunk of a layer, if the chunks of the run can be cut


@dataclass(frozen=True, eq=False, repr=False)
class HeadMap(Look):
    """The weights of one head, [query tokens, key tokens], exact or pooled into fewer cells.

    In a pooled map a row is a range of queries, a column a range of keys. A cell is the sum of the
    weights on the keys of its column, averaged over the queries of its row.
    """

    kind = "map"

    model: str
    layer: str
    head: int
    weights: Tensor  # [rows, columns], or [cells, cells] where pooled
    rows: range
    columns: range
    queries: tuple[str, ...]  # the tokens of the rows
    keys: tuple[str, ...]
    pooled: bool
    notes: tuple[str, ...] = ()

    def picture(self, *, without_first: bool = False) -> Picture:
        if without_first and self.columns.start:
            raise InputError(
                f"The columns start at token {self.columns.start}, so there is no first token to "
                "leave out."
            )
        title = f"{self.model}: layer {self.layer}, head {self.head}"
        note = " ".join(self.notes)
        if not self.pooled and max(len(self.rows), len(self.columns)) <= MAX_NAMED:
            return weight_map(
                self.weights,
                self.queries,
                self.keys,
                title=title,
                without_first=without_first,
                caption=note,
            )
        return pooled_map(
            self.weights,
            len(self.rows),
            len(self.columns),
            title=title,
            first_query=self.rows.start,
            first_key=self.columns.start,
            without_first=without_first,
            caption=note,
        )

    def _labelled(self) -> Labelled:
        facts = {"model": self.model, "layer": self.layer, "head": self.head}
        if self.pooled:
            dims, places = ("query_bin", "key_bin"), (self.rows, self.columns)
            bins = bins_from(dims, self.weights.shape, places)
            return Labelled({"weights": Array(dims, self.weights)}, bins, facts)
        labels = {
            "query": Labels(("query",), tuple(self.rows)),
            "key": Labels(("key",), tuple(self.columns)),
            "query_token": Labels(("query",), self.queries),
            "key_token": Labels(("key",), self.keys),
        }
        return Labelled({"weights": Array(("query", "key"), self.weights)}, labels, facts)

    def to_bertviz(self) -> dict[str, Any]:
        """The arguments of BertViz's ``head_view`` and ``model_view``, for this head alone."""
        weights = self._for_viewers()[None, None]
        if self._of_one_text:
            return viewers.bertviz([weights], self.queries)
        return viewers.bertviz_of_pair({"cross": [weights]}, self.keys, self.queries)

    def to_circuitsvis(self) -> dict[str, Any]:
        """The arguments of CircuitsVis's ``attention_patterns``, for this head alone."""
        if not self._of_one_text:
            raise InputError(
                "CircuitsVis shows the weights of tokens on the same tokens, but the rows and the "
                "columns of this map are other tokens. to_bertviz() takes both."
            )
        return viewers.circuitsvis(self._for_viewers()[None], self.queries)

    @property
    def _of_one_text(self) -> bool:
        return (self.rows, self.queries) == (self.columns, self.keys)

    def _for_viewers(self) -> Tensor:
        if self.pooled:
            raise InputError(
                f"The text is too long for BertViz and CircuitsVis: {len(self.rows):,} x "
                f"{len(self.columns):,} tokens, in a pooled map. Look at a part of it, as in "
                "look(..., rows=range(0, 64), columns=range(0, 64))."
            )
        return self.weights

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        return {n: v for n, v in values.items() if not (self.pooled and n in ("queries", "keys"))}


class MapMeasurement:
    """One head's map. If a long text runs in one chunk, the kernel pools the map.

    Otherwise a cell may span two chunks, so the weights of each chunk are recorded and pooled here.
    If these are too many, chunks are cut where a row of cells begins, and what their keys receive
    is the sum that the row needs.
    """

    def __init__(
        self,
        run: TextRun,
        layer: Layer,
        head: int,
        rows: range | None = None,
        columns: range | None = None,
    ) -> None:
        self.run, self.layer, self.head = run, layer, head
        run.check_head(layer, head)
        queries, keys = run.tokens_of(layer)
        self.rows = _within(rows, len(queries), "rows")
        self.columns = _within(columns, len(keys), "columns")
        zoomed = rows is not None or columns is not None
        self.pooled = not zoomed and max(len(self.rows), len(self.columns)) > MAX_CELLS
        if not self.pooled and len(self.rows) * len(self.columns) > MAX_EXACT:
            raise InputError(
                f"A map of {len(self.rows):,} rows and {len(self.columns):,} columns is too large. "
                f"Give fewer rows or columns, for {MAX_EXACT:,} weights at most."
            )
        sizes = (len(self.rows), len(self.columns))
        self._cells = torch.zeros([min(MAX_CELLS, n) if self.pooled else n for n in sizes])
        self._by_row = False  # whether each chunk lies in one row of cells
        if self.pooled and len(run.chunks) > 1 and run.subject.divisible:
            self._cut()

    def _cut(self) -> None:
        """Cut the chunks of the run, if they would record more than MAX_WEIGHTS weights."""
        chunks, count, height = self.run.chunks, len(self.rows), len(self._cells)
        fitting = MAX_WEIGHTS // (self.layer.heads * max(each.stop - each.first for each in chunks))
        if fitting >= max(each.stop - each.start for each in chunks):
            return
        self._by_row = fitting < count / height
        starts = (-(-row * count // height) for row in range(height))
        self.run = self.run.cut_at(starts if self._by_row else range(0, count, fitting))

    def see(self, layer: Layer, chunk: Chunk) -> See | None:
        if layer is not self.layer:
            return None
        if self.pooled:
            if len(self.run.chunks) == 1:
                return See(map=MAX_CELLS)
            return See(received=True) if self._by_row else See(weights=True)
        pairs = self._pairs(chunk)
        return See(pairs=pairs) if len(pairs) else None

    def _pairs(self, chunk: Chunk) -> Tensor:
        """The (query, key) pairs of the map in a chunk, counted from its first query and key."""
        queries, keys = self.run.ranges(self.layer, chunk)
        rows, columns = (
            torch.tensor([at - part.start for at in part if at in wanted], dtype=torch.long)
            for part, wanted in ((queries, self.rows), (keys, self.columns))
        )
        return torch.cartesian_prod(rows, columns)

    def add(self, layer: Layer, chunk: Chunk, seen: Seen) -> None:
        queries, keys = self.run.ranges(layer, chunk)
        if seen.map is not None:
            self._cells = seen.map[0, self.head].float().cpu()
        elif seen.received is not None:
            height, width = self._cells.shape
            received = seen.received[0, self.head].float().cpu()
            column_of = torch.arange(keys.start, keys.stop) * width // len(self.columns)
            row = queries.start * height // len(self.rows)
            self._cells[row].index_add_(0, column_of, received)
        elif seen.weights is not None:
            height, width = self._cells.shape
            row_of, column_of = (
                torch.arange(part.start, part.stop) * count // len(whole)
                for part, count, whole in (
                    (queries, height, self.rows),
                    (keys, width, self.columns),
                )
            )
            weights = seen.weights[0, self.head].float().cpu()
            pooled = torch.zeros(height, len(keys)).index_add_(0, row_of, weights)
            self._cells.index_add_(1, column_of, pooled)
        else:
            assert seen.pairs is not None
            moved = (queries.start - self.rows.start, keys.start - self.columns.start)
            rows, columns = (self._pairs(chunk) + torch.tensor(moved)).unbind(-1)
            self._cells[rows, columns] = seen.pairs[0, self.head].float().cpu()

    def result(self) -> HeadMap:
        run, cells = self.run, self._cells
        if self.pooled and len(run.chunks) > 1:
            row_of = torch.arange(len(self.rows)) * len(cells) // len(self.rows)
            cells = cells / row_of.bincount(minlength=len(cells))[:, None]
        queries, keys = run.tokens_of(self.layer)
        return HeadMap(
            run.subject.name,
            self.layer.name,
            self.head,
            cells,
            self.rows,
            self.columns,
            queries.labels[self.rows.start : self.rows.stop],
            keys.labels[self.columns.start : self.columns.stop],
            self.pooled,
            run.notes,
        )


def _within(wanted: range | None, count: int, what: str) -> range:
    if wanted is None:
        return range(count)
    if not isinstance(wanted, range) or wanted.step != 1:
        raise InputError(
            f"{what} must be a range of tokens with step 1, such as range(3, 9), but got "
            f"{wanted!r}."
        )
    if not 0 <= wanted.start < wanted.stop <= count:
        raise InputError(
            f"{what} {wanted.start}:{wanted.stop} must lie within 0:{count}, the number of tokens."
        )
    return wanted


@dataclass(frozen=True, eq=False, repr=False)
class WordKeys(Look):
    """The weights of one word on all words, from one head or as a mean over several heads."""

    kind = "word"

    model: str
    word: str
    times: int  # occurrences in the text; the weights are of the first one
    heads: str  # a description of the heads
    weights: Tensor  # [keys]
    keys: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def _labelled(self) -> Labelled:
        facts = {"model": self.model, "word": self.word, "heads": self.heads}
        labels = {"key_word": Labels(("key",), self.keys)}
        return Labelled({"weights": Array(("key",), self.weights)}, labels, facts)

    def picture(self, *, without_first: bool = False) -> Picture:
        which = f", the first of {self.times}," if self.times > 1 else ""
        return top_keys(
            self.weights,
            self.keys,
            word=self.word,
            count=12,
            title=f"{self.model}: what {self.word!r}{which} attends to, {self.heads}",
            without_first=without_first,
            caption=" ".join(self.notes),
        )


class WordMeasurement:
    """The weights of one word's tokens, from one head or averaged over layers and heads."""

    def __init__(
        self,
        run: TextRun,
        word: str,
        layer: Layer | None = None,
        head: int | None = None,
    ) -> None:
        self.run = run
        self.head = head
        self.layers = [each for each in run.layers if each.half in ("", "encoder")]
        if layer is None:
            self._heads = f"mean of all heads of {len(self.layers)} layers"
        elif head is None:
            self.layers = [layer]
            self._heads = f"mean of the {layer.heads} heads of layer {layer.name}"
        else:
            run.check_head(layer, head)
            self.layers = [layer]
            self._heads = f"layer {layer.name}, head {head}"
        queries, self.keys = run.tokens_of(self.layers[0])
        self.word, self.times = queries.find(word)
        self._rows = torch.zeros(len(self.word.places), len(self.keys))

    def see(self, layer: Layer, chunk: Chunk) -> See | None:
        queries, _ = self.run.ranges(layer, chunk)
        rows = [place - queries.start for place in self.word.places if place in queries]
        return See(rows=rows) if layer in self.layers and rows else None

    def add(self, layer: Layer, chunk: Chunk, seen: Seen) -> None:
        assert seen.rows is not None
        queries, keys = self.run.ranges(layer, chunk)
        rows = seen.rows[0].float().cpu()  # [heads, r, k]
        rows = rows.mean(0) if self.head is None else rows[self.head]
        here = [index for index, place in enumerate(self.word.places) if place in queries]
        self._rows[here, keys.start : keys.stop] += rows / len(self.layers)

    def result(self) -> WordKeys:
        words = self.keys.words
        of_words = self._rows.mean(0) @ membership(len(self.keys), words)
        return WordKeys(
            self.run.subject.name,
            self.word.label,
            self.times,
            self._heads,
            of_words,
            tuple(word.label for word in words),
            self.run.notes,
        )
