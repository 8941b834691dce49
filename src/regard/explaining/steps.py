"""The steps of attention, one after another as a textbook would compute them.

Their result is held against :func:`regard.attention`, which computes the same at once.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.explaining.trace import Agreement, Numbers, Step, Trace
from regard.mechanism import attention, why
from regard.mechanism.call import Call
from regard.mechanism.geometry import Tile

# What rounding may do to an output of size 1: the steps and attention() add in different orders.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


def features(count: int) -> tuple[str, ...]:
    """The names of the numbers of a vector: 1, 2, 3 ..."""
    return tuple(str(place + 1) for place in range(count))


def vectors(call: Call, asking: tuple[str, ...], found: tuple[str, ...]) -> tuple[Numbers, ...]:
    """The queries, keys and values of a call, with the words that ask and those that are found."""
    sides = (("Q", call.query, asking), ("K", call.key, found), ("V", call.value, found))
    return tuple(
        Numbers(symbol, tensor[0].detach(), words, features(tensor.shape[-1]))
        for symbol, tensor, words in sides
    )


def _pair(focus: int, asking: tuple[str, ...], found: tuple[str, ...]) -> int:
    """The key that the followed word is shown to meet: the first that is another word."""
    others = (place for place, word in enumerate(found) if word != asking[focus])
    return next(others, 0)


def meeting(
    call: Call, asking: tuple[str, ...], found: tuple[str, ...], focus: int
) -> tuple[str, ...]:
    """What the followed word and one other bring to their score."""
    other, head = _pair(focus, asking, found), ", head 1" if call.extent.heads > 1 else ""
    sides = (
        ("Q", asking[focus], call.query[0, 0, focus]),
        ("K", found[other], call.key[0, 0, other]),
        ("V", found[other], call.value[0, 0, other]),
    )
    return tuple(f"{side} of {word}{head} = {vector(numbers)}" for side, word, numbers in sides)


def number(value: float, decimals: int = 3) -> str:
    """A number as short as it can be said: at most three decimals, no trailing zeros."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    text = f"{value:.{decimals}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def vector(values: Tensor) -> str:
    """A short vector in brackets; of a long one, its first numbers."""
    shown = [number(value) for value in values[:4].tolist()] + ["…"] * (len(values) > 4)
    return f"[{', '.join(shown)}]"


def follow(
    call: Call,
    lead: tuple[Step, ...],
    asking: tuple[str, ...],
    found: tuple[str, ...],
    focus: int,
    output: Tensor | None,
) -> Trace:
    """The steps from the dot products on, and what attention() says to the same call."""
    extent, other = call.extent, _pair(focus, asking, found)
    wide = torch.promote_types(call.query.dtype, torch.float32)
    query = call.query[0].detach().to(wide)  # [heads, queries, d_k]
    key, value = (  # one head for each of the query's
        tensor[0].detach().to(wide).repeat_interleave(call.groups, 0)
        for tensor in (call.key, call.value)
    )
    root = math.sqrt(query.shape[-1])
    scores = query @ key.transpose(-1, -2)  # [heads, queries, keys]
    scaled = scores / root
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if call.mask is not None:
        everything = Tile(extent, range(extent.queries), range(extent.keys))
        allowed = call.mask.tile(everything).expand(1, *scores.shape)[0]
    masked = scaled.masked_fill(~allowed, -math.inf)
    weights, unscaled = _softmax(scaled, allowed), _softmax(scores, allowed)
    mixed = weights @ value  # [heads, queries, d_v]

    def grid(symbol: str, values: Tensor) -> Numbers:
        return Numbers(symbol, values, asking, found)

    word, first = asking[focus], ", head 1" if extent.heads > 1 else ""
    heads = tuple(f"head {head + 1}" for head in range(extent.heads))
    bars = Numbers(f"{word} looks at", weights[:, focus].t(), found, heads)
    both = torch.stack((unscaled[:, focus], weights[:, focus]), dim=1)  # [heads, 2, keys]
    steps = [
        *lead,
        Step(
            "Dot products",
            "S = Q Kᵀ",
            "Every query meets every key: multiply their numbers in pairs and add up. "
            "The better they match, the higher the score.",
            (grid("S", scores),),
            (f"{word} · {found[other]}{first} = {_dot(query[0, focus], key[0, other])}",),
        ),
        Step(
            "Scaling",
            f"S_scaled = S / √d_k = S / √{query.shape[-1]} = S / {number(root)}",
            "Vectors of more numbers give larger scores. Dividing by the root of how many there "
            "are keeps the softmax from putting everything on one word, where it stops learning.",
            (
                grid("S_scaled", scaled),
                Numbers(f"weights of {word}", both, ("without scaling", "with scaling"), found),
            ),
        ),
        _mask_step(call, grid("S_masked", masked), allowed),
        Step(
            "Softmax",
            "A = exp(S_masked) / sum of exp(S_masked) along the row",
            "Each row of scores becomes shares of one word's attention: none below 0, and along "
            "the row, over all keys, they sum to 1.",
            (grid("A", weights),),
            _share(f"{word} → {found[other]}{first}", masked[0, focus], other),
            bars if extent.heads == 1 else None,
        ),
        Step(
            "Weighted sum",
            "Z = A V",
            "Each word takes from every value as much as its share says. This is how a word comes "
            "to know its context.",
            (Numbers("Z", mixed, asking, features(value.shape[-1])),),
            _mixture(f"Z of {word}{first}", found, weights[0, focus], value[0], mixed[0, focus]),
        ),
    ]
    if extent.heads > 1:
        steps.append(
            Step(
                "Heads side by side",
                "A_1, A_2" if extent.heads == 2 else f"A_1 … A_{extent.heads}",
                "Every head has its own matrices, so the same word looks at different words.",
                (Numbers(f"weights of {word} by head", weights[:, focus], heads, found),),
                bars=bars,
            )
        )
    result = mixed.transpose(0, 1).flatten(1)  # [queries, heads * d_v]
    if extent.heads > 1 or output is not None:
        joined = result
        result = joined if output is None else joined @ output.detach().to(wide)
        steps.append(_output_step(joined, output, result, asking, extent.heads))

    result = result.to(call.query.dtype)
    fast = attention(call.query, call.key, call.value, mask=call.mask).detach()
    fast = fast[0].transpose(0, 1).flatten(1)
    if output is not None:
        fast = fast @ output.detach()
    backend = why(call.query, call.key, call.value, mask=call.mask).chosen
    difference = (result - fast).abs().max().item()
    tolerance = TOLERANCES[result.dtype] * max(1.0, result.abs().max().item())
    return Trace(
        asking,
        focus,
        extent.heads,
        query.shape[-1],
        tuple(steps),
        result,
        Agreement(backend, difference, tolerance),
    )


def _softmax(scores: Tensor, allowed: Tensor) -> Tensor:
    """Over the keys; a query that may look at nothing has weights 0."""
    lost = ~allowed.any(-1, keepdim=True)
    weights = scores.masked_fill(~allowed & ~lost, -math.inf).softmax(-1)
    return weights.masked_fill(lost, 0)


def _dot(query: Tensor, key: Tensor) -> str:
    pairs = list(zip(query.tolist(), key.tolist(), strict=True))
    terms = [f"{number(a)} × {number(b)}" for a, b in pairs[:4]] + ["…"] * (len(pairs) > 4)
    return f"{' + '.join(terms)} = {number((query @ key).item())}"


def _mask_step(call: Call, numbers: Numbers, allowed: Tensor) -> Step:
    if call.mask is None:
        return Step(
            "Mask",
            "none: S_masked = S_scaled",
            "Every word may look at every word, later ones included. With a causal mask it would "
            "see only itself and what came before.",
        )
    removed, total = int((~allowed).sum()), allowed.numel()
    each = f"{removed} of {total} scores are removed"
    if bool((allowed == allowed[:1]).all()):
        each = f"{removed // len(allowed)} of {total // len(allowed)} scores are removed"
        each += " in every head" if len(allowed) > 1 else ""
    shown = repr(call.mask)
    return Step(
        "Mask",
        f"S_masked = S_scaled where {shown if len(shown) <= 40 else 'the mask'} allows, else -∞",
        f"A mask says who may look at whom: {each}. The exponential of -∞ is 0, so a removed pair "
        "gets no share at all.",
        (numbers,),
    )


def _share(pair: str, scores: Tensor, other: int) -> tuple[str, ...]:
    """One weight, worked out."""
    if scores[other] == -math.inf:
        return (f"{pair} = 0: the mask removed it",)
    score, powers = scores[other].item(), scores.exp()
    total, power = powers.sum().item(), powers[other].item()
    return (
        f"{pair} = exp({score:.3f}) / sum of the row = "
        f"{power:.3f} / {total:.3f} = {power / total:.3f}",
    )


def _mixture(
    name: str, found: tuple[str, ...], weights: Tensor, value: Tensor, mixed: Tensor
) -> tuple[str, ...]:
    """One output as the sum of its parts, the largest first."""
    if not bool(weights.any()):
        return (f"{name} = {vector(mixed)}: it may look at nothing",)
    most = [k for k in weights.argsort(descending=True).tolist() if weights[k] > 0]
    terms = [f"{weights[k].item():.3f} × {vector(value[k])}" for k in most[:8]]
    width = max(map(len, terms))
    lines = [f"{term:<{width}}   {found[k]}" for term, k in zip(terms, most, strict=False)]
    lines += ["…"] * (len(most) > 8)
    indent = "\n" + " " * (len(name) + 1)
    return (f"{name} = {f'{indent}+ '.join(lines)}{indent}= {vector(mixed)}",)


def _output_step(
    joined: Tensor, output: Tensor | None, result: Tensor, words: tuple[str, ...], heads: int
) -> Step:
    many = heads > 1
    names = ", ".join(f"Z_{head}" for head in ((1, 2) if heads == 2 else (1, "…", heads)))
    left = f"concat({names})" if many else "Z"
    joined_numbers = Numbers("C", joined, words, features(joined.shape[1]))
    if output is None:
        return Step(
            "Concatenation",
            f"C = {left}",
            "What the heads found is laid side by side, one row per word.",
            (joined_numbers,),
        )
    matrix = Numbers("W_O", output.detach(), features(output.shape[0]), features(output.shape[1]))
    final = Numbers("Y", result, words, features(result.shape[1]))
    return Step(
        "Concatenation and output projection" if many else "Output projection",
        f"C = {left}    Y = C W_O" if many else "Y = Z W_O",
        "What the heads found is laid side by side, and one more learned matrix mixes it."
        if many
        else "With one head there is nothing to lay side by side; one more learned matrix turns "
        "the result into a new embedding of each word.",
        (matrix, joined_numbers, final) if many else (matrix, final),
    )
