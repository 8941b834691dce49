"""Looking: what each layer and head of a model does to one's own text.

``overview`` measures every head, ``heads`` draws one of them or one word's keys, ``alignment`` puts
a translation's words together, ``comparing`` holds two looks against each other. They say what to
see of each layer; ``reading`` runs the model; ``plan`` tells beforehand what it will take.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from regard.errors import InputError
from regard.interpret.comparison import Comparison, compare
from regard.interpret.cost import Plan, estimate
from regard.interpret.heads import HeadMap, MapSight, WordKeys, WordSight
from regard.interpret.lens import Look, Sight
from regard.interpret.overview import Overview, OverviewSight
from regard.interpret.runs import Reading, read
from regard.interpret.word_alignment import Alignment, align
from regard.models.bundle import Bundle
from regard.models.model import AttentionLayer, EncoderDecoder, Model
from regard.text.tokenizer import Tokenizer

__all__ = [
    "Alignment",
    "Comparison",
    "HeadMap",
    "Look",
    "Overview",
    "Plan",
    "WordKeys",
    "align",
    "compare",
    "look",
]


def look(
    model: Model | Bundle | str | os.PathLike[str],
    text: str,
    *,
    tokenizer: Tokenizer | None = None,
    target: str | None = None,
    layer: str | int | None = None,
    head: int | None = None,
    word: str | None = None,
    rows: range | None = None,
    columns: range | None = None,
    alignment: bool = False,
    before: Callable[[Plan], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Overview | HeadMap | WordKeys | Alignment:
    """What the heads of a model do to a text; ``.picture()`` draws it, ``.to_dict()`` says it.

    ``model`` is a name, a folder, or a loaded model together with its ``tokenizer``. Layers and
    heads count from 0; those of an encoder-decoder are called "encoder.0", "decoder.0", "cross.0".

    - by itself: an overview of all heads;
    - ``layer`` and ``head``: that head's weights as a map, pooled where the text is long; ``rows``
      and ``columns`` are exact parts of it;
    - ``word``: the words it attends to most, in one head, or on average in a layer or in all;
    - ``alignment``: which source words the words of a translation came from.

    ``target`` is what an encoder-decoder is to have written; by itself it writes one. ``before`` is
    told what a long text will take, before it starts, and may raise; ``progress`` is told how many
    layers are done, of how many.

    >>> import torch
    >>> from regard import GPT2, GPT2Config, Tokenizer
    >>> tokenizer = Tokenizer.train_bpe(["the cat sat on the mat"] * 9, size=300)
    >>> model = GPT2(GPT2Config(vocabulary=300, dim=8, depth=2, heads=2, length=32))
    >>> found = look(model, "the cat sat on the mat", tokenizer=tokenizer)
    >>> list(found.values["entropy"].shape)  # layers, heads
    [2, 2]
    """
    if (rows is not None or columns is not None) and (layer is None or head is None):
        raise InputError("rows and columns are those of one head's map: give layer and head, too.")
    if head is not None and layer is None:
        raise InputError(f"Every layer has a head {head}: give the layer, too.")
    if alignment and word is not None:
        raise InputError("An alignment shows every word: leave out the word, or the alignment.")
    if alignment and (rows is not None or columns is not None):
        raise InputError("An alignment shows every word: leave out rows and columns.")
    reading = read(model, text, tokenizer=tokenizer, target=target)
    chosen = None if layer is None else reading.layer(layer)
    if alignment:
        return _aligned(reading, chosen, head)
    sight: Sight
    if word is not None:
        if rows is not None or columns is not None:
            raise InputError("A word is a row by itself: leave out rows and columns.")
        sight = WordSight(reading, word, chosen, head)
    elif chosen is None:
        sight = OverviewSight(reading)
    elif head is None:
        raise InputError(
            f"Layer {chosen.name} has heads 0 to {chosen.module.heads - 1}: give the head, too."
        )
    else:
        sight = MapSight(reading, chosen, head, rows, columns)

    if before is not None and (plan := estimate(reading, sight)) is not None:
        before(plan)
    done, total = 0, len(reading.needed(sight.ask)) * len(reading.layers)

    def tick() -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(min(done, total), total)

    if progress is not None:
        progress(0, total)
    reading.run(sight.ask, sight.take, tick)
    return sight.result()


def _aligned(reading: Reading, layer: AttentionLayer | None, head: int | None) -> Alignment:
    if not isinstance(reading.model, EncoderDecoder):
        raise InputError(
            f"{type(reading.model).__name__} has no cross-attention to align words by."
        )
    if reading.target is None:
        raise InputError(
            f"A text of {len(reading.tokens):,} tokens is too long to be translated at once. Split "
            "it into sentences."
        )
    if layer is not None and not layer.across:
        raise InputError(f"Words are aligned across: layer {layer.name} is not; take a cross.N.")
    number = None if layer is None else layer.number
    return align(
        reading.model,
        reading.tokenizer,
        reading.tokens.ids,
        reading.target.ids,
        layer=number,
        head=head,
    )
