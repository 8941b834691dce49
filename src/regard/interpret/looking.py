"""look(): show what each layer and head of a model attends to in a text.

``overview`` measures every head, ``heads`` shows one head or the keys of one word,
``word_alignment`` aligns a translation with its source, and ``comparison`` shows the difference of
two results. ``runs`` runs the model, and ``cost`` estimates the time and memory of a run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from itertools import count
from typing import Any

from torch import nn

from regard.errors import InputError
from regard.interpret.cost import CostEstimate, estimate
from regard.interpret.heads import HeadMap, MapMeasurement, WordKeys, WordMeasurement
from regard.interpret.measurement import Measurement
from regard.interpret.overview import Overview, OverviewMeasurement
from regard.interpret.patches import PatchMeasurement, PatchOverviewMeasurement
from regard.interpret.runs import TextRun, prepare_image_run, prepare_run
from regard.interpret.subjects.library import LibraryModel
from regard.interpret.subjects.ours import OwnModel
from regard.interpret.subjects.subject import Layer, Translator
from regard.interpret.word_alignment import Alignment, align, align_tokens
from regard.models.bundle import Bundle
from regard.models.model import EncoderDecoder


def look(
    model: nn.Module | Bundle | LibraryModel | str | os.PathLike[str],
    text: str | None = None,
    *,
    image: object = None,
    tokenizer: Any = None,
    target: str | None = None,
    layer: str | int | None = None,
    head: int | None = None,
    word: str | None = None,
    rows: range | None = None,
    columns: range | None = None,
    alignment: bool = False,
    trust_remote_code: bool = False,
    on_estimate: Callable[[CostEstimate], None] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Overview | HeadMap | WordKeys | Alignment:
    """Show what the heads of a model attend to in a text, as ``.picture()`` or ``.to_dict()``.

    ``model`` is a name, a folder, or a loaded model together with its ``tokenizer``: a model of
    regard, of transformers, or any PyTorch module that is called with token ids [1, n]. A folder or
    a name of an architecture that regard does not implement is loaded through transformers, without
    running code from the folder unless ``trust_remote_code``. Layers and heads count from 0; layers
    of an encoder-decoder are named "encoder.0", "decoder.0", "cross.0". The name of a layer's
    module in the model, such as "model.layers.0.self_attn", names it, too.
    The arguments select the result:

    - no head and no word: an overview of all heads;
    - ``layer`` and ``head``: a map of that head's weights, pooled if the text is long; ``rows``
      and ``columns`` select a part of the map to show exactly;
    - ``word``: the weights of that word on all words, in one head, or as a mean over the heads of
      one layer or of all layers;
    - ``alignment``: the source word of each word of a translation.

    A vision model takes an ``image`` instead of a text: a file, an image of Pillow, or pixel values
    [channels, height, width]. Its patches are the tokens. ``word`` then names a patch by row and
    column, as "3,4", or "[CLS]", and the picture is a grid of patches.

    ``target`` is the output of an encoder-decoder. Without it, the model generates one, or only the
    encoder runs if the text is long. Before a long run, ``on_estimate`` is called with the cost,
    and may raise to cancel the run. ``progress`` is called with the number of layers done and their
    total.

    >>> import torch
    >>> from regard import GPT2, GPT2Config, Tokenizer
    >>> tokenizer = Tokenizer.train_bpe(["the cat sat on the mat"] * 9, size=300)
    >>> model = GPT2(GPT2Config(vocabulary=300, dim=8, depth=2, heads=2, length=32))
    >>> overview = look(model, "the cat sat on the mat", tokenizer=tokenizer)
    >>> list(overview.values["entropy"].shape)  # layers, heads
    [2, 2]
    """
    part = rows is not None or columns is not None
    if alignment and (word is not None or part):
        raise InputError("An alignment shows every word: leave out word, rows and columns.")
    if word is not None and part:
        raise InputError("rows and columns select a part of a map, not of a word's keys.")
    if part and (layer is None or head is None):
        raise InputError("rows and columns select a part of one head's map: give layer and head.")
    if head is not None and layer is None:
        raise InputError(f"head {head} is a head of one layer: give the layer, too.")
    if (text is None) == (image is None):
        raise InputError("look() takes a text or an image: give one of them.")
    vision = None
    if text is not None:
        run = prepare_run(
            model, text, tokenizer=tokenizer, target=target, trust_remote_code=trust_remote_code
        )
    else:
        for name, given in (("tokenizer", tokenizer), ("target", target)):
            if given is not None:
                raise InputError(f"An image has no {name}: leave it out.")
        run, vision = prepare_image_run(model, image, trust_remote_code=trust_remote_code)
    chosen = None if layer is None else run.layer(layer)
    if alignment:
        return _align(run, chosen, head)
    measurement: Measurement
    if word is not None and vision is not None:
        measurement = PatchMeasurement(run, vision, word, chosen, head)
    elif word is not None:
        measurement = WordMeasurement(run, word, chosen, head)
    elif chosen is None and vision is not None:
        measurement = PatchOverviewMeasurement(run, vision)
    elif chosen is None:
        measurement = OverviewMeasurement(run)
    elif head is None:
        raise InputError(
            f"Layer {chosen.name} has heads 0 to {chosen.heads - 1}: give the head, too."
        )
    else:
        measurement = MapMeasurement(run, chosen, head, rows, columns)

    run = measurement.run
    if on_estimate is not None and (cost := estimate(run, measurement)) is not None:
        on_estimate(cost)
    total = len(run.needed_chunks(measurement.see)) * len(run.layers)
    done = count()

    def tick() -> None:
        if progress is not None:
            progress(min(next(done), total), total)

    tick()
    run.record(measurement.see, measurement.add, tick)
    return measurement.result()


def _align(run: TextRun, layer: Layer | None, head: int | None) -> Alignment:
    subject = run.subject
    if not subject.writes:
        raise InputError(f"{subject.name} has no cross-attention to align words by.")
    if run.target is None:
        raise InputError(
            f"A text of {len(run.tokens):,} tokens is too long to be translated at once. Split it "
            "into sentences."
        )
    if layer is not None and not layer.across:
        raise InputError(f"Words are aligned by cross-attention, not by layer {layer.name}.")
    if (layer is None) != (head is None):
        raise InputError("An alignment takes layer and head together, or neither.")
    chosen = None if layer is None or head is None else (layer.number, head)
    if isinstance(subject, Translator):
        weights = subject.cross_weights(run.tokens.ids, run.target.ids)
        likely = subject.log_probabilities
        return align_tokens(run.tokens, run.target, weights, likely, chosen=chosen)
    assert isinstance(subject, OwnModel)
    assert isinstance(subject.model, EncoderDecoder)
    number = None if layer is None else layer.number
    source, target = run.tokens.ids, run.target.ids
    return align(subject.model, subject.tokenizer, source, target, layer=number, head=head)
