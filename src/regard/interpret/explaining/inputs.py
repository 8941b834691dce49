"""explain() and its variants: trace attention over a sentence, tensors, or projections.

``steps`` computes the steps, ``layer`` gets the numbers from a model, ``trace`` holds the steps,
and ``rendering`` prints them.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret.explaining.steps import (
    OutputProjection,
    TracedCall,
    features,
    head_names,
    trace_call,
)
from regard.interpret.explaining.trace import Numbers, Step, Trace
from regard.mechanism.call import Call, check
from regard.mechanism.masks import Mask

MAX_DIM = 4096  # width of random embeddings
MAX_SCORES = 2**20  # heads * queries * keys
SENTENCE_OPTIONS = ("heads", "dim", "seed", "mask")
MODEL_OPTIONS = ("layer", "head", "target", "trust_remote_code")


def explain(
    sentence: str | None = None,
    *,
    heads: int | None = None,
    dim: int | None = None,
    seed: int | None = None,
    mask: Mask | Tensor | None = None,
    word: str | None = None,
) -> Trace:
    """Trace every step of attention over a sentence with random embeddings and matrices.

    ``heads`` (2 by default) is the number of heads, ``dim`` (8) the width of the embeddings, and
    ``seed`` (0) the seed of the random numbers. Without a sentence, trace a worked example that is
    small enough to check by hand. Examples in the trace follow ``word``, by default the last word.
    ``mask`` is the same as in :func:`regard.attention`.

    >>> trace = explain()
    >>> round(trace["S"][0, 1, 0].item(), 4)  # head 0, the query of "cat", the key of "The"
    0.1
    >>> trace.agreement.holds
    True
    """
    if sentence is None:
        sizes = {"heads": heads, "dim": dim, "seed": seed}
        if given := [name for name, size in sizes.items() if size is not None]:
            raise InputError(
                f"The worked example takes no {' and no '.join(given)}. Give a sentence."
            )
        return _worked_example(mask, "cat" if word is None else word)
    words = words_of(sentence)
    heads, dim = 2 if heads is None else heads, 8 if dim is None else dim
    embeddings, weights = _random(words, heads, dim, 0 if seed is None else seed)
    return explain_projections(embeddings, weights, heads=heads, tokens=words, mask=mask, word=word)


def explain_tensors(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    tokens: Sequence[str] | None = None,
    key_tokens: Sequence[str] | None = None,
    mask: Mask | Tensor | None = None,
    word: str | None = None,
) -> Trace:
    """Trace every step from queries, keys and values, [length, dim] or [1, heads, length, dim].

    ``tokens`` labels the queries. ``key_tokens`` labels the keys; it is needed only if they are
    other words. Examples in the trace follow ``word``. ``mask`` is the same as in
    :func:`regard.attention`.

    >>> trace = explain_tensors(*torch.ones(3, 2, 4), tokens=["cat", "sat"])
    >>> trace["A"].tolist()  # [heads, queries, keys]
    [[[0.5, 0.5], [0.5, 0.5]]]
    """
    call = _checked(query, key, value, mask)
    extent = call.extent
    queries = _labels(tokens, extent.queries, "tokens", first=max(extent.keys - extent.queries, 0))
    same = tokens is not None and key_tokens is None and extent.keys == extent.queries
    keys = queries if same else _labels(key_tokens, extent.keys, "key_tokens")
    traced = _with_all_heads(call, queries, keys, word)
    lead = Step(
        "Queries, keys and values",
        "Q, K, V are given",
        "Each word has a query and a key, which are compared, and a value, which it contributes.",
        traced.vectors(),
        traced.example_vectors(),
    )
    return trace_call(traced, (lead,), None)


def explain_projections(
    embeddings: Tensor,
    weights: Sequence[Tensor],
    *,
    heads: int = 1,
    tokens: Sequence[str] | None = None,
    mask: Mask | Tensor | None = None,
    word: str | None = None,
) -> Trace:
    """Trace every step from embeddings [length, dim] and the matrices that project them.

    ``weights`` are W_Q and W_K [dim, heads * d_k], W_V [dim, heads * d_v] and, optionally, W_O
    [heads * d_v, any]. ``tokens`` labels the embeddings. Examples in the trace follow ``word``.
    ``mask`` is the same as in :func:`regard.attention`.

    >>> trace = explain_projections(torch.eye(2), [torch.eye(2)] * 3, tokens=["cat", "sat"])
    >>> trace["S"].tolist()  # [heads, queries, keys]
    [[[1.0, 0.0], [0.0, 1.0]]]
    """
    _check_projections(embeddings, weights, heads)
    query, key, value = (
        (embeddings @ matrix).reshape(1, len(embeddings), heads, -1).transpose(1, 2)
        for matrix in weights[:3]
    )
    call = _checked(query, key, value, mask)
    words = _labels(tokens, call.extent.queries, "tokens")
    traced = _with_all_heads(call, words, words, word)
    across, width = features(embeddings.shape[1]), query.shape[-1]
    cut = (
        f" Their columns are split into {heads} heads of {width}: head 1 has columns 1 to {width}."
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
            "Each word has a query and a key, which are compared, and a value, which it "
            f"contributes. The three matrices W are what a model learns.{cut}",
            matrices + traced.vectors(),
            traced.example_vectors(),
        ),
    )
    output = OutputProjection(weights[3]) if len(weights) == 4 else None
    return trace_call(traced, lead, output)


def explain_options(*, model: bool, **options: Any) -> dict[str, Any]:
    """The options that are not None, for :func:`explain` or, with ``model``, explain_model.

    Raise InputError for options of the other function.

    >>> explain_options(model=False, heads=2, dim=None, layer=None)
    {'heads': 2}
    """
    given = {name: value for name, value in options.items() if value is not None}
    wrong = [name for name in given if name in (SENTENCE_OPTIONS if model else MODEL_OPTIONS)]
    if wrong and model:
        raise InputError(
            f"With a model, explain() takes no {' and no '.join(wrong)}: the model sets them. "
            "Leave them out."
        )
    if wrong:
        raise InputError(f"{' and '.join(wrong)} apply to a model: give the model, too.")
    return given


def words_of(sentence: str) -> tuple[str, ...]:
    """Split a sentence into words, without the punctuation around each word.

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


def _worked_example(mask: Mask | Tensor | None, word: str) -> Trace:
    """Six words with three features each, in numbers small enough for mental arithmetic."""
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
    rows = torch.tensor(list(embeddings.values()))
    return explain_projections(rows, weights, tokens=tuple(embeddings), mask=mask, word=word)


def _random(
    words: tuple[str, ...], heads: int, dim: int, seed: int
) -> tuple[Tensor, Sequence[Tensor]]:
    """An embedding for each word, and four matrices, all rounded to one decimal.

    Words that differ only in case have the same embedding.
    """
    _check_heads(heads, dim, "dim")
    if dim > MAX_DIM:
        raise InputError(f"explain() takes a dim of {MAX_DIM} at most, but got dim={dim}.")
    if not -(2**63) <= seed < 2**64:
        raise InputError(f"seed must fit in 64 bits, but got {seed}.")
    generator = torch.Generator().manual_seed(seed)
    rows = {word: row for row, word in enumerate(dict.fromkeys(map(str.lower, words)))}
    table = torch.randn(len(rows), dim, generator=generator).round(decimals=1)
    matrices = torch.randn(4, dim, dim, generator=generator) * dim**-0.5
    return table[[rows[word.lower()] for word in words]], matrices.round(decimals=1).unbind()


def _check_heads(heads: int, dim: int, what: str) -> None:
    if heads < 1 or dim < 1:
        raise InputError(f"heads and dim must be at least 1, but got heads={heads} and dim={dim}.")
    if dim % heads:
        fitting = ", ".join(str(n) for n in range(1, dim + 1) if dim % n == 0)
        raise InputError(
            f"{what}={dim} cannot be split evenly among {heads} heads. "
            f"Numbers of heads that fit: {fitting}."
        )


def _check_projections(embeddings: Tensor, weights: Sequence[Tensor], heads: int) -> None:
    if not 3 <= len(weights) <= 4:
        raise InputError(
            f"weights are W_Q, W_K, W_V and, optionally, W_O; but got {len(weights)} matrices."
        )
    named = zip(("X", "W_Q", "W_K", "W_V", "W_O"), (embeddings, *weights), strict=False)
    for name, matrix in named:
        if matrix.dim() != 2 or matrix.dtype != embeddings.dtype:
            raise InputError(
                f"{name} must be a matrix with the dtype of X, {embeddings.dtype}, but is "
                f"{matrix.dtype} of shape {list(matrix.shape)}."
            )
    shapes = [tuple(matrix.shape) for matrix in weights]
    dim = embeddings.shape[1]
    fits = all(rows == dim for rows, _ in shapes[:3]) and shapes[0] == shapes[1]
    if not fits or (len(shapes) == 4 and shapes[3][0] != shapes[2][1]):
        raise InputError(
            f"With X {list(embeddings.shape)}, W_Q and W_K must be [{dim}, heads * d_k], W_V "
            f"[{dim}, heads * d_v] and W_O [heads * d_v, any]; but they are "
            f"{', '.join(str(list(shape)) for shape in shapes)}."
        )
    _check_heads(heads, shapes[0][1], "The width of W_Q, heads * d_k")
    _check_heads(heads, shapes[2][1], "The width of W_V, heads * d_v")


def _checked(query: Tensor, key: Tensor, value: Tensor, mask: Mask | Tensor | None) -> Call:
    """The checked call. Raise InputError if it is too large to print or has NaN or Inf."""
    call = check(query, key, value, mask, None, None, None, 0.0, None)
    extent = call.extent
    if extent.batch != 1 or call.empty:
        raise InputError(
            f"A trace shows one sequence with at least one word, but got a batch of {extent.batch} "
            f"with {extent.queries} queries and {extent.keys} keys. Pick one: query[:1], key[:1], "
            "value[:1]."
        )
    if extent.heads * extent.queries * extent.keys > MAX_SCORES:
        raise InputError(
            f"A trace shows every score, and {extent.heads} heads of {extent.queries} queries "
            f"and {extent.keys} keys are too many to read. attention(..., see=See(top=8, map=64)) "
            "summarizes long sequences."
        )
    if not all(bool(tensor.isfinite().all()) for tensor in (query, key, value)):
        raise InputError("A trace needs finite numbers, but query, key or value has NaN or Inf.")
    return call


def _with_all_heads(
    call: Call, queries: tuple[str, ...], keys: tuple[str, ...], word: str | None
) -> TracedCall:
    heads = call.extent.heads
    focus = _index_of(word, queries)
    return TracedCall(call, queries, keys, focus, head_names(heads), tuple(range(heads)))


def _labels(words: Sequence[str] | None, count: int, what: str, first: int = 0) -> tuple[str, ...]:
    if words is None:
        return tuple(str(place + 1) for place in range(first, first + count))
    if isinstance(words, str) or len(words) != count:
        raise InputError(
            f"{what} must be a list of {count} words, one for each position, but got {words!r}."
        )
    return tuple(words)


def _index_of(word: str | None, words: tuple[str, ...]) -> int:
    """The index of the first occurrence of ``word``; without ``word``, the index of the last."""
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
