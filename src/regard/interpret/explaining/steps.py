"""Compute attention step by step, as in a textbook.

The result is compared with :func:`regard.attention`, which computes all steps at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import InputError
from regard.interpret.explaining.trace import Agreement, Numbers, Step, Trace
from regard.mechanism.biases import Alibi, Bias, RelativeBuckets, RelativeContent
from regard.mechanism.call import Call
from regard.mechanism.functional import attention, why
from regard.mechanism.geometry import Tile

# Rounding errors of an output of magnitude 1: the steps and attention() add in different orders.
TOLERANCES = {
    torch.float64: 1e-12,
    torch.float32: 1e-5,
    torch.float16: 5e-3,
    torch.bfloat16: 4e-2,
}


def features(count: int) -> tuple[str, ...]:
    """Labels for the elements of a vector: 1, 2, 3 ..."""
    return tuple(str(place + 1) for place in range(count))


def head_names(count: int, start: int = 1) -> tuple[str, ...]:
    """The names of all heads of a layer, counted from ``start``."""
    return tuple(f"head {head}" for head in range(start, start + count))


class OutputProjection(NamedTuple):
    """The matrix [heads * d_v, dim] and the bias applied to the concatenated heads."""

    matrix: Tensor
    bias: Tensor | None = None

    def __call__(self, joined: Tensor) -> Tensor:
        mixed = joined @ self.matrix.detach().to(joined.dtype)
        return mixed if self.bias is None else mixed + self.bias.detach().to(joined.dtype)


@dataclass(frozen=True, eq=False)
class TracedCall:
    """A call of attention with labels for its words and heads, and the word to follow."""

    call: Call
    queries: tuple[str, ...]  # the labels of the queries
    keys: tuple[str, ...]
    focus: int  # the index of the query to follow
    heads: tuple[str, ...]  # the names of all heads
    shown: tuple[int, ...]  # the heads whose numbers are shown
    across: bool = False  # whether this is cross-attention

    @property
    def word(self) -> str:
        return self.queries[self.focus]

    @property
    def other(self) -> int:
        """The key for worked examples: the first that is not the followed word."""
        return next((place for place, key in enumerate(self.keys) if key != self.word), 0)

    @property
    def in_head(self) -> str:
        """A suffix with the name of the first shown head; empty if the layer has one head."""
        return f", {self.heads[self.shown[0]]}" if len(self.heads) > 1 else ""

    def grid(self, symbol: str, values: Tensor) -> Numbers:
        """The shown heads of ``values`` [heads, queries, keys]."""
        return Numbers(symbol, values[list(self.shown)], self.queries, self.keys)

    def vectors(self) -> tuple[Numbers, ...]:
        """The queries, keys and values of the shown heads; shared keys and values appear once."""
        sides = (
            ("Q", self.call.query, self.queries),
            ("K", self.call.key, self.keys),
            ("V", self.call.value, self.keys),
        )
        result = []
        for symbol, tensor, words in sides:
            shared_by = len(self.heads) // tensor.shape[1]
            values = tensor[0, sorted({head // shared_by for head in self.shown})]
            result.append(Numbers(symbol, values.detach(), words, features(tensor.shape[-1])))
        return tuple(result)

    def example_vectors(self) -> tuple[str, ...]:
        """The query of the followed word, and the key and value of the other word."""
        head, other = self.shown[0], self.other
        shared = head // self.call.groups
        sides = (
            ("Q", self.word, self.call.query[0, head, self.focus]),
            ("K", self.keys[other], self.call.key[0, shared, other]),
            ("V", self.keys[other], self.call.value[0, shared, other]),
        )
        return tuple(
            f"{side} of {word}{self.in_head} = {_vector(numbers)}" for side, word, numbers in sides
        )


class _Stages(NamedTuple):
    """Every intermediate tensor; those from scores to weights are [heads, queries, keys]."""

    query: Tensor  # [heads, queries, d_k]
    key: Tensor  # [heads, keys, d_k]
    value: Tensor  # [heads, keys, d_v]
    scores: Tensor
    scaled: Tensor
    capped: Tensor
    bias: Tensor
    allowed: Tensor
    masked: Tensor
    weights: Tensor
    mixed: Tensor  # [heads, queries, d_v]


def _stages(call: Call) -> _Stages:
    wide = torch.promote_types(call.query.dtype, torch.float32)
    query = call.query[0].detach().to(wide)
    key, value = (  # repeat shared keys and values for each query head
        tensor[0].detach().to(wide).repeat_interleave(call.groups, 0)
        for tensor in (call.key, call.value)
    )
    scores = query @ key.transpose(-1, -2)
    if not scores.isfinite().all():
        raise InputError(
            f"Some dot products of queries and keys are larger than {wide} holds. Give smaller "
            "numbers, or give them as float64: q.double()."
        )
    scaled = scores * call.scale
    capped = _capped(scaled, call)
    extent = call.extent
    everything = Tile(extent, range(extent.queries), range(extent.keys))
    bias, allowed = torch.zeros_like(scaled), torch.ones_like(scores, dtype=torch.bool)
    if call.bias is not None:
        bias = call.bias.tile(everything).detach().to(wide).expand(1, *scores.shape)[0]
    if call.mask is not None:
        allowed = call.mask.tile(everything).expand(1, *scores.shape)[0]
    masked = (capped + bias).masked_fill(~allowed, -math.inf)
    weights = _softmax(masked, call.sinks)
    return _Stages(
        query, key, value, scores, scaled, capped, bias, allowed, masked, weights, weights @ value
    )


def heads_of(call: Call) -> Tensor:
    """The outputs of all heads side by side, [queries, heads * d_v]."""
    return _stages(call).mixed.transpose(0, 1).flatten(1)


def trace_call(
    traced: TracedCall,
    lead: tuple[Step, ...],
    output: OutputProjection | None,
    *,
    subject: str = "",
    expected: Tensor | None = None,
) -> Trace:
    """The trace of a call. ``lead`` has the steps up to the queries, keys and values.

    The output is compared with ``expected`` [queries, dim], the output of a model, or with the
    output of attention().
    """
    call, names = traced.call, tuple(traced.heads[head] for head in traced.shown)
    stages = _stages(call)
    steps = [*lead, *_score_steps(traced, stages), *_weight_steps(traced, stages)]
    joined = stages.mixed.transpose(0, 1).flatten(1)  # [queries, heads * d_v]
    result = joined if output is None else output(joined)
    if len(traced.heads) > 1 or output is not None:
        steps.append(_output_step(traced, joined, output, result))

    result = result.to(call.query.dtype)
    given = {
        "mask": call.mask, "bias": call.bias, "scale": call.scale, "softcap": call.softcap,
        "sinks": call.sinks,
    }  # fmt: skip
    if expected is None:
        fast = attention(call.query, call.key, call.value, **given).detach()  # type: ignore[call-overload]
        fast = fast[0].transpose(0, 1).flatten(1)
        expected = fast if output is None else output(fast)
    backend = why(call.query, call.key, call.value, **given).chosen  # type: ignore[arg-type]
    agreement = Agreement(
        backend,
        (result - expected).abs().max().item(),
        TOLERANCES[result.dtype] * max(1.0, result.abs().max().item()),
        "The model itself" if subject else "regard.attention()",
    )
    return Trace(
        traced.queries,
        traced.focus,
        len(traced.heads),
        names,
        call.query.shape[-1],
        tuple(steps),
        result,
        agreement,
        subject,
    )


def _score_steps(traced: TracedCall, stages: _Stages) -> Iterator[Step]:
    """The steps from the dot products to the mask."""
    call, shown, focus, other = traced.call, list(traced.shown), traced.focus, traced.other
    product = _dot(stages.query[shown[0], focus], stages.key[shown[0], other])
    yield Step(
        "Dot products",
        "S = Q Kᵀ",
        "Each score is the dot product of a query and a key: multiply their numbers in pairs and "
        "add up. The better they match, the higher the score.",
        (traced.grid("S", stages.scores),),
        (f"{traced.word} · {traced.keys[other]}{traced.in_head} = {product}",),
    )

    def compared(scale: float) -> Numbers:
        """The followed word's weights: a row with ``scale`` and a row with the call's scale."""
        scores, bias, allowed = (
            each[shown, focus, None] for each in (stages.scores, stages.bias, stages.allowed)
        )
        sinks = None if call.sinks is None else call.sinks[shown]
        rows = [
            _softmax((_capped(scores * each, call) + bias).masked_fill(~allowed, -math.inf), sinks)
            for each in (scale, call.scale)
        ]
        labels = ("without scaling", "with scaling")
        return Numbers(f"weights of {traced.word}", torch.cat(rows, 1), labels, traced.keys)

    width = stages.query.shape[-1]
    yield _scaling_step(call.scale, width, traced.grid("S_scaled", stages.scaled), compared)
    if call.softcap is not None:
        cap = _number(call.softcap)
        yield Step(
            "Soft cap",
            f"S_capped = {cap} tanh(S_scaled / {cap})",
            f"This model keeps every score between -{cap} and {cap}.",
            (traced.grid("S_capped", stages.capped),),
        )
    if call.bias is not None:
        yield _bias_step(call, traced.grid("B", stages.bias))
    yield _mask_step(traced, stages)


def _weight_steps(traced: TracedCall, stages: _Stages) -> Iterator[Step]:
    """The steps from the softmax to the comparison of the heads."""
    shown, focus, other = list(traced.shown), traced.focus, traced.other
    head, word, key = shown[0], traced.word, traced.keys[other]
    bars = Numbers(
        f"{word} looks at",
        stages.weights[shown, focus].t(),
        traced.keys,
        tuple(traced.heads[place] for place in shown),
    )
    sinks = traced.call.sinks
    sink = None if sinks is None else sinks[head].item()
    yield Step(
        "Softmax",
        "A = exp(S_masked) / sum of exp(S_masked) along the row"
        if sink is None
        else "A = exp(S_masked) / (exp(sink) + sum of exp(S_masked) along the row)",
        "Each row of scores becomes the weights of one word: none is below 0, and over all keys "
        + (
            "they sum to 1."
            if sink is None
            else f"they sum to less than 1. The rest is the weight of the learned sink, {sink:.3f}."
        ),
        (traced.grid("A", stages.weights),),
        _weight_note(f"{word} → {key}{traced.in_head}", stages.masked[head, focus], other, sink),
        bars if len(shown) == 1 else None,
    )
    yield Step(
        "Weighted sum",
        "Z = A V",
        "A word's output is the sum of all values, each times the word's weight for it. "
        "This brings context into the word.",
        (Numbers("Z", stages.mixed[shown], traced.queries, features(stages.value.shape[-1])),),
        _sum_note(
            f"Z of {word}{traced.in_head}",
            traced.keys,
            stages.weights[head, focus],
            stages.value[head],
            stages.mixed[head, focus],
        ),
    )
    if (count := len(traced.heads)) > 1:
        first, last = (traced.heads[at].removeprefix("head ") for at in (0, -1))
        table = Numbers(
            f"weights of {word} by head", stages.weights[:, focus], traced.heads, traced.keys
        )
        yield Step(
            "Heads side by side",
            f"A_{first}{',' if count == 2 else ' …'} A_{last}",
            "Every head has its own matrices, so the same word looks at different words.",
            (table,),
            bars=bars if len(shown) > 1 else None,
        )


def _scaling_step(
    scale: float, width: int, scaled: Numbers, compared: Callable[[float], Numbers]
) -> Step:
    root = math.sqrt(width)
    if math.isclose(scale * root, 1, rel_tol=1e-6):
        return Step(
            "Scaling",
            f"S_scaled = S / √d_k = S / √{width} = S / {_number(root)}",
            "Longer vectors give larger scores. Dividing by the square root of their length keeps "
            "the softmax from putting all weight on one word, where gradients vanish.",
            (scaled, compared(1.0)),
        )
    both = replace(compared(1 / root), rows=(f"divided by √{width}", "with the scale used here"))
    reason = (
        "the learned matrices of this model keep scores small without it"
        if scale == 1
        else "this model sets another scale"
    )
    return Step(
        "Scaling",
        f"S_scaled = S × {_number(scale)}",
        f"Most models divide by √d_k = {_number(root)}, because longer vectors give larger "
        f"scores; {reason}.",
        (scaled, both),
    )


def _bias_step(call: Call, numbers: Numbers) -> Step:
    meanings: dict[type[Bias | None], str] = {
        Alibi: "a penalty that grows with the distance to the key",
        RelativeBuckets: "a learned number for each bucket of distances between query and key",
        RelativeContent: "how well the query matches the embedding of its distance to the key",
    }
    return Step(
        "Positions",
        f"{_scores_of(call)} + B",
        "A bias brings the order of words into the scores: "
        f"{meanings.get(type(call.bias), 'numbers that the model adds')}.",
        (numbers,),
    )


def _capped(scaled: Tensor, call: Call) -> Tensor:
    return scaled if call.softcap is None else call.softcap * torch.tanh(scaled / call.softcap)


def _softmax(masked: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Softmax over the keys of scores, -inf where masked; a query without keys has weights 0.

    ``sinks`` [heads] are scores that take a part of the weight of scores [heads, queries, keys].
    """
    if sinks is not None:
        column = sinks.detach().to(masked)[:, None, None].expand(*masked.shape[:2], 1)
        return torch.cat((masked, column), -1).softmax(-1)[..., :-1]
    return masked.softmax(-1).masked_fill(masked.isneginf().all(-1, keepdim=True), 0)


def _number(value: float, decimals: int = 3) -> str:
    """A number with at most three decimals and no trailing zeros."""
    if value and not 1e-3 <= abs(value) < 1e5:
        return f"{value:.1e}"
    text = f"{value:.{decimals}f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


def _vector(values: Tensor) -> str:
    """A vector in brackets, cut after four numbers."""
    shown = [_number(value) for value in values[:4].tolist()] + ["…"] * (len(values) > 4)
    return f"[{', '.join(shown)}]"


def _dot(query: Tensor, key: Tensor) -> str:
    pairs = list(zip(query.tolist(), key.tolist(), strict=True))
    terms = [f"{_number(a)} × {_number(b)}" for a, b in pairs[:4]] + ["…"] * (len(pairs) > 4)
    return f"{' + '.join(terms)} = {_number((query @ key).item())}"


def _scores_of(call: Call) -> str:
    """The symbol of the scores before bias and mask."""
    return "S_scaled" if call.softcap is None else "S_capped"


def _mask_step(traced: TracedCall, stages: _Stages) -> Step:
    call, allowed = traced.call, stages.allowed
    scores = f"{_scores_of(call)}{' + B' if call.bias is not None else ''}"
    if call.mask is None:
        return Step(
            "Mask",
            f"none: S_masked = {scores}",
            "Every token of the target may look at the whole source."
            if traced.across
            else "Every word may look at every word, later ones included. With a causal mask it "
            "would see only itself and the words before it.",
        )
    removed, total = int((~allowed).sum()), allowed.numel()
    count = f"{removed} of {total} scores are removed"
    if bool((allowed == allowed[:1]).all()):
        count = f"{removed // len(allowed)} of {total // len(allowed)} scores are removed"
        count += " in every head" if len(allowed) > 1 else ""
    mask = repr(call.mask)
    return Step(
        "Mask",
        f"S_masked = {scores} where {mask if len(mask) <= 40 else 'the mask'} allows, else -∞",
        f"The mask says which keys each query may attend to: {count}. The exponential of -∞ is 0, "
        "so a removed score becomes a weight of 0.",
        (traced.grid("S_masked", stages.masked),),
    )


def _weight_note(pair: str, scores: Tensor, other: int, sink: float | None) -> tuple[str, ...]:
    """The calculation of one weight."""
    if scores[other] == -math.inf:
        return (f"{pair} = 0: the mask removed this score",)
    scores, less = scores.double(), ""
    if sink is not None:
        scores = torch.cat((scores, scores.new_tensor([sink])))
    highest = scores.max().item()
    if abs(highest) > 80:  # where the exponential leaves the range of float32
        scores, less = scores - highest, f", after subtracting the highest score, {highest:.3f},"
    score, powers = scores[other].item(), scores.exp()
    total, power = powers.sum().item(), powers[other].item()
    return (
        f"{pair} = exp({score:.3f}) / sum of the row{less}{' and the sink' * (sink is not None)} = "
        f"{_number(power)} / {_number(total)} = {power / total:.3f}",
    )


def _sum_note(
    name: str, keys: tuple[str, ...], weights: Tensor, value: Tensor, mixed: Tensor
) -> tuple[str, ...]:
    """The calculation of one output as a sum of values, with the largest weight first."""
    if not bool(weights.any()):
        return (f"{name} = {_vector(mixed)}: the mask removed every key",)
    most = [k for k in weights.argsort(descending=True).tolist() if weights[k] > 0]
    terms = [f"{weights[k].item():.3f} × {_vector(value[k])}" for k in most[:8]]
    width = max(map(len, terms))
    lines = [f"{term:<{width}}   {keys[k]}" for term, k in zip(terms, most, strict=False)]
    lines += ["…"] * (len(most) > 8)
    indent = "\n" + " " * (len(name) + 1)
    return (f"{name} = {f'{indent}+ '.join(lines)}{indent}= {_vector(mixed)}",)


def _output_step(
    traced: TracedCall, joined: Tensor, output: OutputProjection | None, result: Tensor
) -> Step:
    count, width = len(traced.heads), joined.shape[1]
    first, last = (traced.heads[at].removeprefix("head ") for at in (0, -1))
    left = f"concat(Z_{first}{', ' if count == 2 else ', …, '}Z_{last})" if count > 1 else "Z"
    split = (
        f" Each head fills {width // count} of the {width} columns."
        if len(traced.shown) < count
        else ""
    )
    concatenated = Numbers("C", joined, traced.queries, features(width))
    if output is None:
        return Step(
            "Concatenation",
            f"C = {left}",
            f"The outputs of the heads are laid side by side, one row per word.{split}",
            (concatenated,),
        )
    product = f"W_O{'' if output.bias is None else ' + b_O'}"
    rows, columns = output.matrix.shape
    matrix = Numbers("W_O", output.matrix.detach(), features(rows), features(columns))
    final = Numbers("Y", result, traced.queries, features(columns))
    if count == 1:
        return Step(
            "Output projection",
            f"Y = Z {product}",
            "With one head there is nothing to concatenate. One more learned matrix turns the "
            "result into a new embedding of each word.",
            (matrix, final),
        )
    return Step(
        "Concatenation and output projection",
        f"C = {left}    Y = C {product}",
        "The outputs of the heads are laid side by side, and one more learned matrix mixes them."
        f"{split}",
        (matrix, concatenated, final),
    )
