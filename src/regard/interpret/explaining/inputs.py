"""Explaining: one attention step by step, in numbers that can be followed by hand.

Here is what can be asked for; ``steps`` computes, ``models`` takes its numbers from a loaded model,
``record`` is what was followed, ``page`` its look, ``trace`` both together.
"""

from __future__ import annotations

import os
import unicodedata
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, overload

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret.explaining.record import Numbers, Step
from regard.interpret.explaining.steps import Generated, Heads, features, follow, meeting, vectors
from regard.interpret.explaining.trace import Trace
from regard.mechanism.call import Call, check
from regard.mechanism.masks import Mask

if TYPE_CHECKING:
    from regard.models.model import Model
    from regard.text.tokenizer import Tokenizer

__all__ = ["Trace", "explain", "words_of"]

WIDEST = 4096  # of a made-up embedding
MOST_SCORES = 2**20  # of more than this, nobody reads the numbers one by one


@overload
def explain(
    subject: str | None = ...,
    /,
    *,
    heads: int | None = ...,
    dim: int | None = ...,
    seed: int | None = ...,
    mask: Mask | Tensor | None = ...,
    word: str | None = ...,
) -> Trace: ...
@overload
def explain(
    subject: str | None,
    /,
    *,
    model: Model | str | os.PathLike[str] | None,
    tokenizer: Tokenizer | None = ...,
    layer: str | int | None = ...,
    head: int | None = ...,
    target: str | None = ...,
    heads: int | None = ...,
    dim: int | None = ...,
    seed: int | None = ...,
    mask: Mask | Tensor | None = ...,
    word: str | None = ...,
) -> Trace: ...
@overload
def explain(
    subject: Tensor,
    /,
    key: Tensor,
    value: Tensor,
    *,
    tokens: Sequence[str] | None = ...,
    key_tokens: Sequence[str] | None = ...,
    mask: Mask | Tensor | None = ...,
    word: str | None = ...,
) -> Trace: ...
@overload
def explain(
    subject: Tensor,
    /,
    *,
    weights: Sequence[Tensor],
    heads: int | None = ...,
    tokens: Sequence[str] | None = ...,
    mask: Mask | Tensor | None = ...,
    word: str | None = ...,
) -> Trace: ...
def explain(
    subject: str | Tensor | None = None,
    /,
    key: Tensor | None = None,
    value: Tensor | None = None,
    *,
    weights: Sequence[Tensor] | None = None,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    heads: int | None = None,
    dim: int | None = None,
    seed: int | None = None,
    mask: Mask | Tensor | None = None,
    word: str | None = None,
    model: Model | str | os.PathLike[str] | None = None,
    tokenizer: Tokenizer | None = None,
    layer: str | int | None = None,
    head: int | None = None,
    target: str | None = None,
) -> Trace:
    """Every step of one attention, with its numbers. There are five ways to ask:

    - ``explain()``: a worked example that can be checked by hand;
    - ``explain("a sentence", heads=2, dim=8, seed=0)``: random embeddings and matrices;
    - ``explain("a sentence", model=..., layer=0, head=0)``: the numbers of a model, by its name or
      folder, or loaded and with its ``tokenizer``; layers are called as :func:`regard.look` does,
      and ``target`` is what an encoder-decoder is to have written;
    - ``explain(query, key, value, tokens=...)``: as for :func:`regard.attention`, [length, dim] or
      [1, heads, length, dim]; ``key_tokens`` names the keys where they are other words;
    - ``explain(X, weights=(W_Q, W_K, W_V, W_O), heads=1, tokens=...)``: embeddings [length, dim]
      and the matrices they are multiplied with, of which W_O may be left out.

    ``word`` is the one to follow closely; ``mask`` is that of attention().

    >>> trace = explain()
    >>> round(trace["S"][0, 1, 0].item(), 4)  # head 0, the query of "cat", the key of "The"
    0.1
    >>> trace.agreement.holds
    True
    """
    matrices: dict[str, object] = {"key": key, "value": value, "weights": weights}
    names: dict[str, object] = {"tokens": tokens, "key_tokens": key_tokens}
    sizes: dict[str, object] = {"heads": heads, "dim": dim, "seed": seed}
    places = {"tokenizer": tokenizer, "layer": layer, "head": head, "target": target}
    if model is not None:
        from regard.interpret.explaining.layer import explain_model

        _refuse("A model", matrices | names | sizes | {"mask": mask})
        if not isinstance(subject, str):
            raise InputError("A model reads a sentence: give one, such as 'The cat sat.'")
        return explain_model(model, tokenizer, subject, layer, head, word, target)
    for name, given_place in places.items():
        if given_place is not None:
            raise InputError(f"{name} is that of a model: give the model, too.")
    if subject is None:
        _refuse("The worked example, which is what no sentence means,", matrices | names | sizes)
        return _project(*_example(), mask, "cat" if word is None else word)
    if isinstance(subject, str):
        _refuse("A sentence", matrices | names)
        heads, dim = 2 if heads is None else heads, 8 if dim is None else dim
        words = words_of(subject)
        embeddings, random = _random(words, heads, dim, 0 if seed is None else seed)
        return _project(embeddings, random, heads, words, mask, word)
    if weights is not None:
        given = {"key": key, "value": value, "key_tokens": key_tokens, "dim": dim, "seed": seed}
        _refuse("Embeddings with weights", given)
        return _project(subject, weights, 1 if heads is None else heads, tokens, mask, word)
    if key is None or value is None:
        raise InputError(
            "explain() takes a query together with its key and value, or embeddings together with "
            "weights=(W_Q, W_K, W_V, W_O); one tensor alone is neither."
        )
    _refuse("A query with its key and value", sizes)
    call = _checked(subject, key, value, mask)
    asking = _names(tokens, call.extent.queries, "tokens", first=max(call.extent.offset, 0))
    same = tokens is not None and key_tokens is None and call.extent.offset == 0
    found = asking if same else _names(key_tokens, call.extent.keys, "key_tokens")
    lead = Step(
        "Queries, keys and values",
        "Q, K, V are given",
        "Each word asks with its query, is found by its key, and hands over its value.",
        vectors(call, asking, found, heads_of := Heads.all(call.extent.heads)),
        meeting(call, asking, found, focus := _find(word, asking), heads_of),
    )
    return follow(call, (lead,), asking, found, focus, None, heads_of)


def words_of(sentence: str) -> tuple[str, ...]:
    """The words of a sentence, without the punctuation around them.

    >>> words_of("The cat (well-fed) didn't move.")
    ('The', 'cat', 'well-fed', "didn't", 'move')
    """
    words = []
    for part in sentence.split():
        kept = [i for i, char in enumerate(part) if unicodedata.category(char)[0] not in "PC"]
        if kept:
            words.append(part[kept[0] : kept[-1] + 1])
    if not words:
        raise InputError(
            f"There is no word in {sentence!r}. Give a sentence, such as 'The cat sat on the mat.'"
        )
    return tuple(words)


def _refuse(what: str, arguments: Mapping[str, object]) -> None:
    given = [name for name, argument in arguments.items() if argument is not None]
    if given:
        raise InputError(f"{what} takes no {' and no '.join(given)}: it brings its own.")


def _example() -> tuple[Tensor, Sequence[Tensor], int, tuple[str, ...]]:
    """Six words in three features, with numbers small enough to multiply in one's head."""
    embeddings = {
        "The": [1.0, 0.0, 0.0],
        "cat": [0.0, 1.0, 0.0],
        "sat": [0.0, 0.0, 1.0],
        "on": [1.0, -1.0, 0.0],
        "the": [1.0, 0.0, 0.0],
        "mat": [0.0, 1.0, 1.0],
    }
    queries = [[0.1, 0.3], [0.2, 0.1], [0.5, 0.2]]
    keys = [[0.3, 0.4], [1.0, 2.0], [4.0, 2.0]]
    values = [[0.5, 0.6], [0.9, 0.1], [0.2, 0.8]]
    output = [[1.0, 0.0, 0.5], [0.0, 1.0, 0.5]]
    weights = [torch.tensor(rows) for rows in (queries, keys, values, output)]
    return torch.tensor(list(embeddings.values())), weights, 1, tuple(embeddings)


def _random(
    words: tuple[str, ...], heads: int, dim: int, seed: int
) -> tuple[Tensor, Sequence[Tensor]]:
    """One embedding per distinct word, and four matrices; rounded, so that all digits are shown."""
    _check_heads(heads, dim, "dim")
    if dim > WIDEST:
        raise InputError(f"dim={dim} is more than anybody reads: {WIDEST} is the most.")
    if not -(2**63) <= seed < 2**64:
        raise InputError(f"A seed has 64 bits, but got {seed}.")
    generator = torch.Generator().manual_seed(seed)
    known = {word: place for place, word in enumerate(dict.fromkeys(map(str.lower, words)))}
    table = torch.randn(len(known), dim, generator=generator).round(decimals=1)
    matrices = torch.randn(4, dim, dim, generator=generator) * dim**-0.5
    return table[[known[word.lower()] for word in words]], matrices.round(decimals=1).unbind()


def _check_heads(heads: int, dim: int, what: str) -> None:
    if heads < 1 or dim < 1:
        raise InputError(f"heads and dim count from 1 on, but got heads={heads} and dim={dim}.")
    if dim % heads:
        fitting = ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
        raise InputError(
            f"{what}={dim} cannot be split evenly among {heads} heads. "
            f"Numbers of heads that fit: {fitting}."
        )


def _project(
    embeddings: Tensor,
    weights: Sequence[Tensor],
    heads: int,
    tokens: Sequence[str] | None,
    mask: Mask | Tensor | None,
    word: str | None,
) -> Trace:
    """From embeddings and matrices: the two steps that come before the scores."""
    if not 3 <= len(weights) <= 4:
        raise InputError(
            f"weights holds W_Q, W_K, W_V and, where there is one, W_O; but got {len(weights)}."
        )
    for name, matrix in zip(
        ("X", "W_Q", "W_K", "W_V", "W_O"), (embeddings, *weights), strict=False
    ):
        if matrix.dim() != 2 or matrix.dtype != embeddings.dtype:
            raise InputError(
                f"{name} must be a matrix with the dtype of X, {embeddings.dtype}, but is "
                f"{matrix.dtype} of shape {list(matrix.shape)}."
            )
    shapes = [tuple(matrix.shape) for matrix in weights]
    into = embeddings.shape[1]
    fits = all(rows == into for rows, _ in shapes[:3]) and shapes[0] == shapes[1]
    if not fits or (len(shapes) == 4 and shapes[3][0] != shapes[2][1]):
        raise InputError(
            f"With X {list(embeddings.shape)}, W_Q and W_K must be [{into}, heads * d_k], W_V "
            f"[{into}, heads * d_v] and W_O [heads * d_v, any]; but they are "
            f"{', '.join(str(list(shape)) for shape in shapes)}."
        )
    _check_heads(heads, shapes[0][1], "The width of W_Q, heads * d_k")
    _check_heads(heads, shapes[2][1], "The width of W_V, heads * d_v")

    query, key, value = (
        (embeddings @ matrix).reshape(1, len(embeddings), heads, -1).transpose(1, 2)
        for matrix in weights[:3]
    )
    call = _checked(query, key, value, mask)
    words = _names(tokens, call.extent.queries, "tokens")
    focus, named = _find(word, words), Heads.all(heads)
    across = features(into)
    width = shapes[0][1] // heads
    cut = (
        f" Their columns are cut into {heads} heads of {width}: head 1 has columns 1 to {width}."
        if heads > 1
        else ""
    )
    matrices = tuple(
        Numbers(name, matrix.detach(), across, features(matrix.shape[1]))
        for name, matrix in zip(("W_Q", "W_K", "W_V"), weights, strict=False)
    )
    lead = (
        Step(
            "Embeddings",
            "X = one row of numbers per word",
            "A word enters as a list of numbers; words with similar numbers mean similar things.",
            (Numbers("X", embeddings.detach(), words, across),),
        ),
        Step(
            "Queries, keys and values",
            "Q = X W_Q    K = X W_K    V = X W_V",
            "Each word asks with its query, is found by its key, and hands over its value. "
            f"The three matrices W are what a model learns.{cut}",
            matrices + vectors(call, words, words, named),
            meeting(call, words, words, focus, named),
        ),
    )
    output = Generated(weights[3]) if len(weights) == 4 else None
    return follow(call, lead, words, words, focus, output, named)


def _checked(query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None) -> Call:
    """The call, if its numbers are few enough to be read and all of them are numbers."""
    call = check(query, key, value, mask, None, None, None, 0.0, None)
    extent = call.extent
    if extent.batch != 1 or call.empty:
        raise InputError(
            f"explain() follows one sequence with at least one word, but got {extent.batch} of "
            f"{extent.queries} queries and {extent.keys} keys. Pick one: query[:1], key[:1], "
            "value[:1]."
        )
    if extent.heads * extent.queries * extent.keys > MOST_SCORES:
        raise InputError(
            f"explain() shows every score, and {extent.heads} heads of {extent.queries} queries "
            f"and {extent.keys} keys are too many to read. attention(..., see=See(top=8, map=64)) "
            "looks at long sequences."
        )
    if not all(bool(tensor.isfinite().all()) for tensor in (query, key, value)):
        raise InputError("explain() needs finite numbers, but query, key or value has NaN or Inf.")
    return call


def _names(names: Sequence[str] | None, count: int, what: str, first: int = 0) -> tuple[str, ...]:
    if names is None:
        return tuple(str(place + 1) for place in range(first, first + count))
    if isinstance(names, str) or len(names) != count:
        raise InputError(
            f"{what} must be a list of {count} words, one for each position, but got {names!r}."
        )
    return tuple(names)


def _find(word: str | None, words: tuple[str, ...]) -> int:
    """The place of a word, the first if it comes several times; without one, the last place."""
    if word is None:
        return len(words) - 1
    if word in words:
        return words.index(word)
    lower = [each.lower() for each in words]
    if word.lower() in lower:
        return lower.index(word.lower())
    near = get_close_matches(word.lower(), lower, n=1, cutoff=0.6)
    offer = f"Did you mean {words[lower.index(near[0])]!r}?" if near else "Pick one of its words."
    raise InputError(f"There is no word {word!r} in {' '.join(words)!r}. {offer}")
