"""Translation sentence by sentence, with the words of each sentence aligned."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import accumulate, chain, pairwise, zip_longest

import torch

from regard.decoding.settings import Asked
from regard.errors import InputError
from regard.models.bundle import Bundle, Name, Precision
from regard.tasks.attended import align, read_weights
from regard.tasks.defaults import open_model
from regard.tasks.records import Translation
from regard.tasks.writing import Check, encode, one_or_many, write
from regard.text.languages import language_tags, same_language
from regard.text.words import sentences

TASK = "translation"  # the task's name in a recipe


@one_or_many
def translate(
    texts: list[str],
    to: str | None = None,
    *,
    source: str | None = None,
    model: Name = "translate",
    how: Asked | None = None,
    max_new_tokens: int | None = None,
    batch: int = 32,
    attended: bool = True,
    device: torch.device | str | None = None,
    precision: Precision = "float32",
    check: Check | None = None,
) -> list[Translation]:
    """Translate a text, or each text of a list, sentence by sentence.

    ``to`` is the target language ("fr", "fra" or "french"), for a model with several target
    languages. ``source`` is the source language, for a T5 with several. ``model`` is a Transformer
    (Marian, opus-mt) or a T5. An empty text in a list stays empty. ``attended`` aligns the words.
    :mod:`regard.tasks` describes the other options.

    >>> record = translate("The cat sat on the mat.", "fr")
    >>> record.text.split()[:2], record.attended.keys[:2]
    (['Le', 'chat'], ('The', 'cat'))
    """
    bundle = open_model(model, "translate", device, precision)
    prefix, language, task = _prefix(bundle, to, source)
    how, max_new_tokens = bundle.settings(task).resolve(how, max_new_tokens)
    cut = [sentences(text) for text in texts]
    parts = []
    for number, (text, spans) in enumerate(zip(texts, cut, strict=True), 1):
        for low, high in spans:
            part = bundle.prepared(text[low:high], TASK)
            _check_length(bundle, prefix, part, f"Text {number}: " if len(texts) > 1 else "")
            parts.append(part)
    written = write(bundle, [prefix + part for part in parts], how, max_new_tokens, batch, check)
    weights = list(read_weights(bundle, prefix, parts, written, batch, check)) if attended else None
    records = []
    ends = accumulate((len(spans) for spans in cut), initial=0)
    for text, spans, (low, high) in zip(texts, cut, pairwise(ends), strict=True):
        if check is not None:
            check()
        own = written[low:high]
        gaps = [text[before.end : after.start] for before, after in pairwise(spans)]
        joined = chain.from_iterable(zip_longest((w.text for w in own), gaps, fillvalue=""))
        tokens = sum(w.tokens for w in own)
        records.append(
            Translation(
                text="".join(joined),
                score=sum(w.log_probability for w in own) / max(tokens, 1),
                tokens=tokens,
                seconds=sum((w.seconds for w in own), 0.0),
                model=bundle.name,
                attended=None if weights is None else align(bundle, weights[low:high], batch),
                source=text,
                to=language,
            )
        )
    return records


def _check_length(bundle: Bundle, prefix: str, text: str, label: str) -> None:
    count = len(encode(bundle, prefix + text))
    if count > bundle.window:
        raise InputError(
            f"{label}A sentence of {count} tokens is too long: {bundle.name} reads at most "
            f"{bundle.window}. The sentence begins with {text[:40]!r}; split it into shorter ones."
        )


# ----------------------------------------------------------------------------------- languages


def _prefix(
    bundle: Bundle, to: str | None, source: str | None
) -> tuple[str, str | None, str | None]:
    """The prefix of each source, the model's name of the target language, and the task's name.

    The prefix of a Transformer is a language tag such as >>fra<<, the prefix of a T5 a sentence.
    """
    if bundle.model.prefixed:
        return _sentence_prefix(bundle, to, source)
    if source is not None:
        raise InputError(
            f"{bundle.name} does not take a source language: leave out {source!r}, the language to "
            "translate from."
        )
    tags = [tag[2:-2] for tag in language_tags(bundle.tokenizer)]
    if not tags:
        if to is not None:
            raise InputError(
                f"{bundle.name} translates into one language only, and has no tag for {to!r}: "
                "leave out the language."
            )
        return "", None, None
    tag = _chosen(bundle, to, tags)
    return f">>{tag}<< ", tag, None


def _sentence_prefix(
    bundle: Bundle, to: str | None, source: str | None
) -> tuple[str, str | None, str | None]:
    pairs = {
        (match[1], match[2]): key
        for key in bundle.tasks
        if (match := re.fullmatch(r"translation_(\w+?)_to_(\w+)", key))
    }
    if source is not None:
        pairs = {pair: key for pair, key in pairs.items() if same_language(pair[0], source)}
    if pairs:
        language = _chosen(bundle, to, list(dict.fromkeys(target for _, target in pairs)))
        key = next(key for (_, target), key in pairs.items() if target == language)
        return bundle.prefix(key), language, key
    if TASK not in bundle.tasks:
        origin = "" if source is None else f" from {source!r}"
        raise InputError(
            f"{bundle.name} does not translate{origin}: task_specific_params in its config.json "
            "names no such task."
        )
    if to is not None or source is not None:
        raise InputError(
            f"{bundle.name} translates from one language into one other: leave out both languages."
        )
    return bundle.prefix(TASK), None, TASK


def _chosen(bundle: Bundle, to: str | None, offered: Sequence[str]) -> str:
    """The model's name of the target language."""
    listed = ", ".join(offered)
    if to is None:
        if len(offered) == 1:
            return offered[0]
        raise InputError(
            f"{bundle.name} translates into {listed}. Choose one: --to {offered[0]}, or in Python "
            f"to={offered[0]!r}."
        )
    for name in offered:
        if same_language(name, to):
            return name
    raise InputError(f"{bundle.name} does not translate into {to!r}. It offers {listed}.")
