"""Load or train the tokenizer of a recipe."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from regard.checkpoints.folders import publish
from regard.data.encoding import token_ids
from regard.data.records import RECORDS, Pair, Record, Report
from regard.data.sources import records
from regard.errors import InputError
from regard.models.registry import trained
from regard.text.tokenizer import END_OF_TEXT, SizeError, Tokenizer, word_level
from regard.training.recipe import Recipe

SENTINELS = tuple(f"<extra_id_{n}>" for n in range(100))


def tokenizer(recipe: Recipe, folder: Path) -> Tokenizer:
    """The tokenizer of a recipe; if it is trained, it is stored in ``folder`` and reused.

    Training WordPiece or Unigram again could give other ids.
    """
    start = recipe.tokenizer.start or recipe.model.start
    if start is not None and not recipe.tokenizer.keep:
        loaded = Tokenizer.load(start)
        known = loaded.tokenizer.get_vocab()
        if missing := [token for token in recipe.tokenizer.special if token not in known]:
            raise InputError(
                f"The tokenizer of {start} has no token {missing[0]!r} (tokenizer.special): "
                "only a newly trained tokenizer can have further special tokens."
            )
        return loaded
    if not folder.exists():
        for left in folder.parent.glob(f".saving-{folder.name}.*"):  # left by a run that was killed
            shutil.rmtree(left)
        lines = _texts(records(recipe.data, recipe.data.train, RECORDS[recipe.task], Report()))
        if start is None:
            try:
                text = _trained(recipe, lines)
            except SizeError as error:
                raise InputError(f"tokenizer.{error}") from None
        else:
            whole = Tokenizer.load(start)
            text = whole.pruned(
                Counter(chain.from_iterable(token_ids(whole, lines))), recipe.tokenizer.keep
            )
        publish(folder, {"tokenizer.json": text.tokenizer.to_str().encode()}, {})
    return Tokenizer.load(folder)


def _texts(examples: Iterable[Record]) -> Iterator[str]:
    for record in examples:
        if isinstance(record, str):
            yield record
        elif isinstance(record, Pair):
            yield record.source
            yield from record.targets
        else:
            yield record.question
            yield record.context


def _trained(recipe: Recipe, lines: Iterator[str]) -> Tokenizer:
    kind, size, own = recipe.tokenizer.kind, recipe.tokenizer.size, recipe.tokenizer.special
    row = trained(recipe.model.kind, recipe.task)
    if kind not in row.tokenizers:
        raise InputError(
            f"tokenizer.kind = {kind!r} is not for {row.name}; choose "
            f"{' or '.join(row.tokenizers)}."
        )
    if kind == "wordpiece":
        return Tokenizer.train_wordpiece(lines, size=size)
    if kind == "words":
        return word_level(lines, size, own)
    sentinels = SENTINELS if "span corruption" in row.trains_for else ()
    if kind == "unigram":
        special = ("<pad>", "</s>", "<unk>", *own, *sentinels)
        return Tokenizer.train_unigram(lines, size=size, special=special, end=None)
    special = (END_OF_TEXT, *own)
    if Pair in [RECORDS[task] for task in row.trains_for]:
        ends = ("<pad>", "</s>") if sentinels else ("</s>", "<pad>")
        special = (*ends, *sentinels, *own)
    return Tokenizer.train_bpe(lines, size=size, special=special)
