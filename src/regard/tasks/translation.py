"""Translation, by sentences, with the words of each sentence aligned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise, zip_longest

import torch

from regard.decoding.settings import Asked
from regard.errors import InputError
from regard.models.bundle import Bundle, Name, Precision, open_bundle
from regard.tasks.attended import align
from regard.tasks.attended import look as look_at
from regard.tasks.defaults import check_default
from regard.tasks.records import Translation
from regard.tasks.writing import encode, one_or_many, write
from regard.text.languages import language_tags, same_language
from regard.text.words import sentences

TASK = "translation"  # as a recipe names it


@one_or_many
def translate(
    texts: list[str],
    to: str | None = None,
    *,
    source: str | None = None,
    model: Name = "translate",
    how: Asked | None = None,
    length: int | None = None,
    batch: int = 32,
    look: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
) -> list[Translation]:
    """A text, or each of several, in another language.

    ``to`` is the language ("fr", "fra" or "french"), for a model that has more than one; so is
    ``source``, for one that must be told. ``model`` is a Transformer (Marian, opus-mt) or a T5: the
    name of a shipped one, a folder, or a model of the hub. ``how`` and ``length`` say how to
    decode, and how many tokens a sentence may become; by default the model's own files do.
    ``look`` aligns words, which takes one more pass. Texts are cut into sentences: models of
    translation have seen little else. An empty one among several stays empty.

    >>> found = translate("The cat sat on the mat.", "fr")
    >>> found.text.split()[:2], found.attended.keys[:2]
    (['Le', 'chat'], ('The', 'cat'))
    """
    check_default(model)
    one = open_bundle(model, "translate", device, precision)
    prefix, named, task = _prefix(one, to, source)
    way, most = one.settings(task).resolve(how, length)
    cut = [sentences(text) for text in texts]
    parts = [
        one.prepared(text[a:b], TASK)
        for text, spans in zip(texts, cut, strict=True)
        for a, b in spans
    ]
    numbers = [number for number, spans in enumerate(cut, 1) for _ in spans]
    for number, part in zip(numbers, parts, strict=True):
        _check_length(one, prefix, part, f"Text {number}: " if len(texts) > 1 else "")
    written = write(one, [prefix + part for part in parts], way, most, batch)
    looked = list(look_at(one, prefix, parts, written, batch)) if look else []
    records = []
    ends = accumulate((len(spans) for spans in cut), initial=0)
    for text, spans, (low, high) in zip(texts, cut, pairwise(ends), strict=True):
        mine = written[low:high]
        gaps = [text[before.end : after.start] for before, after in pairwise(spans)]
        joined = "".join(
            chain.from_iterable(zip_longest((w.text for w in mine), gaps, fillvalue=""))
        )
        tokens = sum(w.tokens for w in mine)
        records.append(
            Translation(
                text=joined,
                score=sum(w.chance for w in mine) / max(tokens, 1),
                tokens=tokens,
                seconds=sum((w.seconds for w in mine), 0.0),
                model=one.name,
                attended=align(one, looked[low:high], batch) if look else None,
                source=text,
                to=named,
            )
        )
    return records


def _check_length(one: Bundle, prefix: str, text: str, which: str) -> None:
    count = len(encode(one, prefix + text))
    if count > one.window:
        raise InputError(
            f"{which}A sentence of {count} tokens is too long: {one.name} reads {one.window} at "
            f"most. It begins {text[:40]!r}; break it into shorter ones."
        )


# ----------------------------------------------------------------------------------- languages


def _prefix(one: Bundle, to: str | None, source: str | None) -> tuple[str, str | None, str | None]:
    """What comes before a source, the language as the model names it, and the name of the task.

    A Transformer has a tag for each language, such as >>fra<<; a T5 says it in words.
    """
    if one.model.prefixed:
        return _in_words(one, to, source)
    if source is not None:
        raise InputError(
            f"{one.name} is never told which language it reads: leave out {source!r}, the language "
            "to translate from."
        )
    tags = [tag[2:-2] for tag in language_tags(one.tokenizer)]
    if not tags:
        if to is not None:
            raise InputError(
                f"{one.name} translates into one language only, and has no tag for {to!r}: leave "
                "out the language."
            )
        return "", None, None
    tag = _chosen(one, to, tags)
    return f">>{tag}<< ", tag, None


def _in_words(
    one: Bundle, to: str | None, source: str | None
) -> tuple[str, str | None, str | None]:
    pairs = {
        (found[1], found[2]): key
        for key in one.tasks
        if (found := re.fullmatch(r"translation_(\w+?)_to_(\w+)", key))
    }
    if source is not None:
        pairs = {pair: key for pair, key in pairs.items() if same_language(pair[0], source)}
    if not pairs and TASK in one.tasks and to is None and source is None:
        return one.prefix(TASK), None, TASK  # trained by a recipe, for two languages
    if not pairs:
        if TASK in one.tasks:
            raise InputError(
                f"{one.name} translates from one language into one other: leave out both."
            )
        origin = "" if source is None else f" from {source!r}"
        raise InputError(
            f"{one.name} does not say that it translates{origin}: its config.json would name such "
            "tasks in task_specific_params."
        )
    language = _chosen(one, to, list(dict.fromkeys(target for _, target in pairs)))
    key = next(key for (_, target), key in pairs.items() if target == language)
    return one.prefix(key), language, key


def _chosen(one: Bundle, to: str | None, offered: Sequence[str]) -> str:
    """The language asked for, as the model names it."""
    listed = ", ".join(offered)
    if to is None:
        if len(offered) == 1:
            return offered[0]
        raise InputError(
            f"{one.name} translates into {listed}. Say which: --to {offered[0]}, or in Python "
            f"to={offered[0]!r}."
        )
    for name in offered:
        if same_language(name, to):
            return name
    raise InputError(f"{one.name} does not translate into {to!r}. It offers {listed}.")
