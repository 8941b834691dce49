"""The steps of attention, one after another as a textbook would compute them.

Their result is held against :func:`regard.attention`, which computes the same at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret.explaining.record import Agreement, Numbers, Step
from regard.interpret.explaining.trace import Trace
from regard.mechanism.biases import Alibi, Bias, RelativeBuckets, RelativeContent
from regard.mechanism.call import Call
from regard.mechanism.functional import attention, why
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


class Heads(NamedTuple):
    """The heads of a layer: what they are called, and whose numbers are shown."""

    names: tuple[str, ...]
    shown: tuple[int, ...]

    @classmethod
    def all(cls, count: int) -> Heads:
        return cls(tuple(f"head {head + 1}" for head in range(count)), tuple(range(count)))

    @property
    def first(self) -> str:
        """The first of those shown, to follow a number; nothing where there is one head only."""
        return f", {self.names[self.shown[0]]}" if len(self.names) > 1 else ""


class Generated(NamedTuple):
    """What comes after the heads are joined: a matrix [heads * d_v, dim], and what is added."""

    matrix: Tensor
    bias: Tensor | None = None

    def __call__(self, joined: Tensor) -> Tensor:
        mixed = joined @ self.matrix.detach().to(joined.dtype)
        return mixed if self.bias is None else mixed + self.bias.detach().to(joined.dtype)


def vectors(
    call: Call, asking: tuple[str, ...], found: tuple[str, ...], heads: Heads
) -> tuple[Numbers, ...]:
    """The queries, keys and values of a call, with the words that ask and those that are found."""
    sides = (("Q", call.query, asking), ("K", call.key, found), ("V", call.value, found))
    result = []
    for symbol, tensor, words in sides:
        # Where heads share keys and values, those are shown once.
        own = tensor.shape[1] == len(heads.names)
        values = tensor[0, list(heads.shown)] if own else tensor[0]
        result.append(Numbers(symbol, values.detach(), words, features(tensor.shape[-1])))
    return tuple(result)


def _pair(focus: int, asking: tuple[str, ...], found: tuple[str, ...]) -> int:
    """The key that the followed word is shown to meet: the first that is another word."""
    others = (place for place, word in enumerate(found) if word != asking[focus])
    return next(others, 0)


def meeting(
    call: Call, asking: tuple[str, ...], found: tuple[str, ...], focus: int, heads: Heads
) -> tuple[str, ...]:
    """What the followed word and one other bring to their score."""
    other, head = _pair(focus, asking, found), heads.shown[0]
    shared = head // call.groups
    sides = (
        ("Q", asking[focus], call.query[0, head, focus]),
        ("K", found[other], call.key[0, shared, other]),
        ("V", found[other], call.value[0, shared, other]),
    )
    return tuple(
        f"{side} of {word}{heads.first} = {vector(numbers)}" for side, word, numbers in sides
    )


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
    output: Generated | None,
    heads: Heads,
    *,
    subject: str = "",
    fast: Tensor | None = None,
    across: bool = False,
) -> Trace:
    """The steps from the dot products on, held against the same at once.

    That is ``fast`` [queries, dim], what a model itself made of it, or else attention()'s answer.
    ``across`` says that queries and keys are of two texts.
    """
    extent, other = call.extent, _pair(focus, asking, found)
    wide = torch.promote_types(call.query.dtype, torch.float32)
    query = call.query[0].detach().to(wide)  # [heads, queries, d_k]
    key, value = (  # one head for each of the query's
        tensor[0].detach().to(wide).repeat_interleave(call.groups, 0)
        for tensor in (call.key, call.value)
    )
    scores = query @ key.transpose(-1, -2)  # [heads, queries, keys]
    if not scores.isfinite().all():
        raise InputError(
            f"Some products of queries and keys are larger than {wide} holds. Explain smaller "
            "numbers, or the same as float64: q.double()."
        )
    scaled = scores * call.scale
    everything = Tile(extent, range(extent.queries), range(extent.keys))
    added = torch.zeros_like(scaled)
    if call.bias is not None:
        added = call.bias.tile(everything).detach().to(wide).expand(1, *scores.shape)[0]
    allowed = torch.ones_like(scores, dtype=torch.bool)
    if call.mask is not None:
        allowed = call.mask.tile(everything).expand(1, *scores.shape)[0]
    biased = scaled + added
    masked = biased.masked_fill(~allowed, -math.inf)
    weights = _softmax(biased, allowed)
    mixed = weights @ value  # [heads, queries, d_v]

    shown, head = list(heads.shown), heads.shown[0]

    def grid(symbol: str, values: Tensor) -> Numbers:
        return Numbers(symbol, values[shown], asking, found)

    word, first = asking[focus], heads.first
    names = tuple(heads.names[place] for place in shown)
    bars = Numbers(f"{word} looks at", weights[shown, focus].t(), found, names)
    steps = [
        *lead,
        Step(
            "Dot products",
            "S = Q Kᵀ",
            "Every query meets every key: multiply their numbers in pairs and add up. "
            "The better they match, the higher the score.",
            (grid("S", scores),),
            (f"{word} · {found[other]}{first} = {_dot(query[head, focus], key[head, other])}",),
        ),
        _scaling_step(
            call.scale,
            query.shape[-1],
            grid("S_scaled", scaled),
            # What the other way of scaling would have made of the same scores.
            lambda scale: Numbers(
                f"weights of {word}",
                torch.stack(
                    [
                        _softmax(scores[shown, focus] * each + added[shown, focus], open_to)
                        for each in (scale, call.scale)
                        for open_to in [allowed[shown, focus]]
                    ],
                    dim=1,
                ),
                ("without scaling", "with scaling"),
                found,
            ),
        ),
    ]
    if call.bias is not None:
        steps.append(_bias_step(call.bias, grid("B", added)))
    steps += [
        _mask_step(call, grid("S_masked", masked), allowed, across),
        Step(
            "Softmax",
            "A = exp(S_masked) / sum of exp(S_masked) along the row",
            "Each row of scores becomes shares of one word's attention: none below 0, and along "
            "the row, over all keys, they sum to 1.",
            (grid("A", weights),),
            _share(f"{word} → {found[other]}{first}", masked[head, focus], other),
            bars if len(shown) == 1 else None,
        ),
        Step(
            "Weighted sum",
            "Z = A V",
            "Each word takes from every value as much as its share says. This is how a word comes "
            "to know its context.",
            (Numbers("Z", mixed[shown], asking, features(value.shape[-1])),),
            _mixture(
                f"Z of {word}{first}", found, weights[head, focus], value[head], mixed[head, focus]
            ),
        ),
    ]
    if extent.heads > 1:
        last = heads.names[-1].removeprefix("head ")
        between = "," if extent.heads == 2 else " …"
        steps.append(
            Step(
                "Heads side by side",
                f"A_{heads.names[0].removeprefix('head ')}{between} A_{last}",
                "Every head has its own matrices, so the same word looks at different words.",
                (Numbers(f"weights of {word} by head", weights[:, focus], heads.names, found),),
                bars=bars if len(shown) > 1 else None,
            )
        )
    result = mixed.transpose(0, 1).flatten(1)  # [queries, heads * d_v]
    if extent.heads > 1 or output is not None:
        joined = result
        result = joined if output is None else output(joined)
        steps.append(_output_step(joined, output, result, asking, heads))

    result = result.to(call.query.dtype)
    given = {"mask": call.mask, "bias": call.bias, "scale": call.scale}
    if fast is None:
        fast = attention(call.query, call.key, call.value, **given).detach()  # type: ignore[call-overload]
        fast = fast[0].transpose(0, 1).flatten(1)
        fast = fast if output is None else output(fast)
    backend = why(call.query, call.key, call.value, **given).chosen  # type: ignore[arg-type]
    difference = (result - fast).abs().max().item()
    tolerance = TOLERANCES[result.dtype] * max(1.0, result.abs().max().item())
    return Trace(
        asking,
        focus,
        extent.heads,
        names,
        query.shape[-1],
        tuple(steps),
        result,
        Agreement(
            backend,
            difference,
            tolerance,
            "The model itself" if subject else "regard.attention()",
        ),
        subject,
    )


def _scaling_step(
    scale: float, width: int, scaled: Numbers, against: Callable[[float], Numbers]
) -> Step:
    """``against(other)`` has the weights under another scale, above those under this one."""
    root = math.sqrt(width)
    if math.isclose(scale * root, 1, rel_tol=1e-6):
        return Step(
            "Scaling",
            f"S_scaled = S / √d_k = S / √{width} = S / {number(root)}",
            "Vectors of more numbers give larger scores. Dividing by the root of how many there "
            "are keeps the softmax from putting everything on one word, where it stops learning.",
            (scaled, against(1.0)),
        )
    both = replace(against(1 / root), rows=(f"divided by √{width}", "as it is here"))
    why_not = (
        "this one has learned matrices that keep scores small by themselves"
        if scale == 1
        else "this one scales in its own way"
    )
    return Step(
        "Scaling",
        f"S_scaled = S × {number(scale)}",
        f"Most models divide by √d_k = {number(root)}, for vectors of more numbers give larger "
        f"scores; {why_not}.",
        (scaled, both),
    )


def _bias_step(bias: Bias, numbers: Numbers) -> Step:
    kinds: dict[type[Bias], str] = {
        Alibi: "less the farther away a key is",
        RelativeBuckets: "a learned number for each distance between query and key",
        RelativeContent: "how well the query matches the distance between it and the key",
    }
    meaning = kinds.get(type(bias), "what the model adds to the scores")
    return Step(
        "Positions",
        "S_scaled + B",
        f"The order of words enters here, added to the scores: {meaning}.",
        (numbers,),
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


def _mask_step(call: Call, numbers: Numbers, allowed: Tensor, across: bool) -> Step:
    if call.mask is None:
        return Step(
            "Mask",
            f"none: S_masked = S_scaled{' + B' if call.bias is not None else ''}",
            "Every token of the target may look at the whole source: it is known from the start."
            if across
            else "Every word may look at every word, later ones included. With a causal mask it "
            "would see only itself and what came before.",
        )
    removed, total = int((~allowed).sum()), allowed.numel()
    each = f"{removed} of {total} scores are removed"
    if bool((allowed == allowed[:1]).all()):
        each = f"{removed // len(allowed)} of {total // len(allowed)} scores are removed"
        each += " in every head" if len(allowed) > 1 else ""
    shown = repr(call.mask)
    return Step(
        "Mask",
        f"S_masked = S_scaled{' + B' if call.bias is not None else ''} where "
        f"{shown if len(shown) <= 40 else 'the mask'} allows, else -∞",
        f"A mask says who may look at whom: {each}. The exponential of -∞ is 0, so a removed pair "
        "gets no share at all.",
        (numbers,),
    )


def _share(pair: str, scores: Tensor, other: int) -> tuple[str, ...]:
    """One weight, worked out."""
    if scores[other] == -math.inf:
        return (f"{pair} = 0: the mask removed it",)
    scores, less = scores.double(), ""
    highest = scores.max().item()
    if abs(highest) > 80:  # where float32 has no exponential, or none above 0
        scores, less = scores - highest, f", all less {highest:.3f}, the highest,"
    score, powers = scores[other].item(), scores.exp()
    total, power = powers.sum().item(), powers[other].item()
    return (
        f"{pair} = exp({score:.3f}) / sum of the row{less} = "
        f"{number(power)} / {number(total)} = {power / total:.3f}",
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
    joined: Tensor, output: Generated | None, result: Tensor, words: tuple[str, ...], heads: Heads
) -> Step:
    many = len(heads.names) > 1
    numbers = [name.removeprefix("head ") for name in heads.names]
    between = ", " if len(numbers) == 2 else ", …, "
    left = f"concat(Z_{numbers[0]}{between}Z_{numbers[-1]})" if many else "Z"
    joined_numbers = Numbers("C", joined, words, features(joined.shape[1]))
    width = joined.shape[1] // len(heads.names)
    split = (
        f" Each head filled {width} of the {joined.shape[1]} columns."
        if many and len(heads.shown) < len(heads.names)
        else ""
    )
    if output is None:
        return Step(
            "Concatenation",
            f"C = {left}",
            "What the heads found is laid side by side, one row per word." + split,
            (joined_numbers,),
        )
    plus = "" if output.bias is None else " + b_O"
    matrix = Numbers(
        "W_O",
        output.matrix.detach(),
        features(output.matrix.shape[0]),
        features(output.matrix.shape[1]),
    )
    final = Numbers("Y", result, words, features(result.shape[1]))
    return Step(
        "Concatenation and output projection" if many else "Output projection",
        f"C = {left}    Y = C W_O{plus}" if many else f"Y = Z W_O{plus}",
        f"What the heads found is laid side by side, and one more learned matrix mixes it.{split}"
        if many
        else "With one head there is nothing to lay side by side; one more learned matrix turns "
        "the result into a new embedding of each word.",
        (matrix, joined_numbers, final) if many else (matrix, final),
    )
