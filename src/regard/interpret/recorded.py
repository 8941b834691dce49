"""What the recorded calls of a model become: labelled arrays, pictures, and input of viewers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret import viewers
from regard.mechanism.labelled import Parts
from regard.mechanism.seeing import Seen
from regard.pictures.figures import Picture, head_grid, panels, pooled_map, weight_map

MAX_NAMED = 64  # rows or columns of a map whose picture labels every token

# The panels of an overview: a field of Seen, the title and the unit.
PANELS = (
    ("entropy", "Entropy", "nats"),
    ("peak", "Largest weight", "of the weight"),
    ("distance", "Distance", "tokens"),
    ("distance_variance", "Variance of the distance", "tokens squared"),
    ("sink", "Sink", "of the weight"),
    ("received", "First key", "of the weight"),
    ("max_logit", "Largest score", "before the softmax"),
)

Calls = Sequence[tuple[str, Seen]]  # the name of a layer, and what one call recorded


class Recorded(NamedTuple):
    """One text in one call of a layer."""

    layer: str
    seen: Seen
    batch: int  # the place of the text in the batch


def labelled(calls: Calls) -> Parts:
    """The calls along the dimensions layer and call."""
    counts = Counter[str]()
    parts = {}
    for layer, seen in calls:
        parts[layer, counts[layer]] = seen._labelled()
        counts[layer] += 1
    return Parts(("layer", "call"), parts)


def choose(
    calls: Calls, layer: str | int, call: int | None = None, batch: int | None = None
) -> Recorded:
    """One text in one call; InputError if there are several and the arguments choose none."""
    names = _names(calls)
    if isinstance(layer, int):
        if not 0 <= layer < len(names):
            raise InputError(f"There is no layer {layer}: {len(names)} layers were recorded.")
        layer = names[layer]
    if layer not in names:
        raise InputError(f"There is no layer {layer!r}. Recorded layers: {', '.join(names)}.")
    seens = [seen for name, seen in calls if name == layer]
    seen = seens[_chosen(call, len(seens), "call", f"Layer {layer} has {len(seens)} calls")]
    texts = seen.extent[0]
    return Recorded(layer, seen, _chosen(batch, texts, "batch", f"The batch has {texts} texts"))


def _chosen(number: int | None, count: int, name: str, given: str) -> int:
    if number is None and count == 1:
        return 0
    if number is None or not 0 <= number < count:
        raise InputError(f"{given}: choose one with {name}=, a number from 0 to {count - 1}.")
    return number


def _names(calls: Calls) -> list[str]:
    """The names of the layers, in the order of their first calls."""
    if not calls:
        raise InputError(
            "No call was recorded. Run the model inside `with watch(model, See(...)) as watched:`, "
            "without a callback."
        )
    return list(dict.fromkeys(name for name, _ in calls))


# Pictures --------------------------------------------------------------------------------------


def overview(calls: Calls) -> Picture:
    """A panel for each recorded field of PANELS, with one number for each head of each layer."""
    layers = _names(calls)
    heads = max(max(_head_numbers(seen), default=-1) + 1 for _, seen in calls)
    grids = []
    for field, title, unit in PANELS:
        table = torch.full((len(layers), heads), math.nan, dtype=torch.float64)
        for row, layer in enumerate(layers):
            of_calls = [_by_head(seen, field) for name, seen in calls if name == layer]
            if known := [values for values in of_calls if values is not None]:
                joined = torch.cat(known, -1)
                means = joined.amax(-1) if field == "max_logit" else joined.mean(-1)
                numbers = next(_head_numbers(seen) for name, seen in calls if name == layer)
                table[row, list(numbers)] = means.where(means.isfinite(), math.nan)
        if table.isfinite().any():
            grids.append(head_grid(table, unit, title=title, layers=short_names(layers)))
    if not grids:
        fields = ", ".join(field for field, *_ in PANELS)
        raise InputError(
            f"An overview of the heads needs one of {fields}, and none was recorded. Record one, "
            "as in See(entropy=True); or give layer and head, for a map of See(weights=True) or "
            "See(map=...)."
        )
    plural = [
        f"{n} {what}{'s' * (n != 1)}" for n, what in ((len(layers), "layer"), (len(calls), "call"))
    ]
    caption = "Means over the queries of all texts and calls, padding included."
    if any(grid.title == "Largest score" for grid in grids):
        caption += " The largest score is a maximum."
    return panels(f"Watched: {', '.join(plural)}", grids, caption=caption)


def _head_numbers(seen: Seen) -> Sequence[int]:
    return range(seen.extent[1]) if seen.heads is None else seen.heads


def _by_head(seen: Seen, field: str) -> Tensor | None:
    """The numbers of a field that are averaged for each head: [heads, numbers]."""
    values: Tensor | None = getattr(seen, field)
    if values is None:
        return None
    values = values.detach().double().cpu()
    if field == "max_logit":
        return values.t()
    if field == "received":  # the share of the first key, once for each query
        queries = seen.extent[2]
        values = (values[..., :1] / max(queries, 1)).expand(-1, -1, queries)
    return values.transpose(0, 1).flatten(1)


def head_map(
    one: Recorded,
    head: int,
    tokens: Sequence[str] | None,
    query_tokens: Sequence[str] | None,
) -> Picture:
    """The weights of one head, or its pooled map if the weights were not recorded."""
    layer, seen, batch = one
    _, _, queries, keys = seen.extent
    numbers = _head_numbers(seen)
    if head not in numbers:
        there = f"0 to {numbers[-1]}" if seen.heads is None else ", ".join(map(str, numbers))
        raise InputError(f"Layer {layer} has heads {there}, but got head {head}.")
    field = seen.map if seen.weights is None else seen.weights
    if field is None:
        raise InputError(
            "A map of a head needs See(weights=True) or See(map=...), and neither was recorded."
        )
    weights = field[batch, numbers.index(head)].detach().float().cpu()
    title = f"Layer {layer}, head {head}"
    if tokens is not None:
        if weights.shape != (queries, keys):
            raise InputError(
                "A cell of a pooled map holds several tokens: leave out tokens, or record "
                "See(weights=True)."
            )
        rows = tokens if query_tokens is None else query_tokens
        viewers.check_tokens(weights, rows, tokens)
        if max(queries, keys) <= MAX_NAMED:
            return weight_map(weights, rows, tokens, title=title)
    return pooled_map(weights, queries, keys, title=title)


def short_names(layers: Sequence[str]) -> list[str]:
    """The names without the parts, between points, with which all of them begin or end.

    >>> short_names(["stack.blocks.0.attention", "stack.blocks.1.attention"])
    ['0', '1']
    """
    parts = [name.split(".") for name in layers]
    least = min(map(len, parts)) - 1
    start = next((i for i in range(least) if len({name[i] for name in parts}) > 1), least)
    least -= start
    stop = next((i for i in range(least) if len({name[-1 - i] for name in parts}) > 1), least)
    return [".".join(name[start : len(name) - stop]) for name in parts]


# Other viewers ---------------------------------------------------------------------------------


def bertviz(
    calls: Calls,
    tokens: Sequence[str],
    target_tokens: Sequence[str] | None,
    layers: str,
    batch: int | None,
) -> dict[str, Any]:
    """The keyword arguments of BertViz's views; ``layers`` is a pattern of names."""
    recorded = _names(calls)
    names = [name for name in recorded if fnmatchcase(name, layers)]
    if not names:
        raise InputError(f"No layer matches {layers!r}. Recorded layers: {', '.join(recorded)}.")
    weights = [_weights(choose(calls, name, None, batch))[None] for name in names]
    if target_tokens is None:
        return viewers.bertviz(weights, tokens)
    kinds = _kinds(weights, len(tokens), len(target_tokens))
    by_kind = {
        kind: [layer for layer, its in zip(weights, kinds, strict=True) if its == kind]
        for kind in dict.fromkeys(kinds)
    }
    return viewers.bertviz_of_pair(by_kind, tokens, target_tokens)


def circuitsvis(
    calls: Calls, tokens: Sequence[str], layer: str | int, call: int | None, batch: int | None
) -> dict[str, Any]:
    """The keyword arguments of CircuitsVis's attention views."""
    return viewers.circuitsvis(_weights(choose(calls, layer, call, batch)), tokens)


def _weights(one: Recorded) -> Tensor:
    if one.seen.weights is None:
        raise InputError(
            "BertViz and CircuitsVis show all weights, which were not recorded. Use "
            "watch(model, See(weights=True))."
        )
    return one.seen.weights[one.batch]


def _kinds(weights: Sequence[Tensor], source: int, target: int) -> list[str]:
    """Whether each layer, in the order of the calls, is of the encoder, the decoder or across.

    Sizes tell, unless both texts have the same number of tokens. Then the decoder's layers are
    those that never attend to a later token, and the encoder's layers ran before them.
    """
    if source != target:
        kinds = {
            (source, source): "encoder",
            (target, target): "decoder",
            (target, source): "cross",
        }
        sizes = [(layer.shape[-2], layer.shape[-1]) for layer in weights]
        for queries, keys in sizes:
            if (queries, keys) not in kinds:
                raise InputError(
                    f"A layer has {queries} queries and {keys} keys, but got {source} tokens of "
                    f"the source and {target} tokens of the target. Give one string for each "
                    "token, special tokens included."
                )
        return [kinds[size] for size in sizes]
    causal = [source > 1 and not layer.triu(1).any() for layer in weights]
    if not any(causal):
        raise InputError(
            f"Both texts have {source} tokens, and no chosen layer is causal, so encoder, decoder "
            "and cross-attention cannot be told apart. Choose the layers of the decoder, too; or "
            "give BertViz the weights yourself, as in cross_attention=[watched[name][0].weights]."
        )
    first = causal.index(True)
    return [
        "decoder" if each else "encoder" if place < first else "cross"
        for place, each in enumerate(causal)
    ]
