"""Compare a model that is watched with itself: outputs, gradients, weights and what was seen."""

from __future__ import annotations

import copy
import inspect
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard import InputError, See, watch
from regard.interpret.adapters.windows import computes_windows
from regard.interpret.watched import Watched

TOLERANCE = 1e-5  # of the largest number of the plain run
ATTENTION = re.compile("attention|attn", re.IGNORECASE)
OTHER_PARTS = re.compile("norm|dropout|output|mask|embedding|linear|conv|identity", re.IGNORECASE)


# Outputs -----------------------------------------------------------------------------------------


def tensors(found: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Every tensor of floating-point numbers in an output of transformers, with its name."""
    if isinstance(found, Tensor):
        if found.is_floating_point():
            yield name, found
    elif isinstance(found, Mapping):
        for key, value in found.items():
            yield from tensors(value, f"{name}.{key}" if name else str(key))
    elif isinstance(found, tuple | list):
        for number, value in enumerate(found):
            yield from tensors(value, f"{name}[{number}]")
    elif type(found).__name__.endswith("Cache"):
        yield from tensors([vars(layer) for layer in getattr(found, "layers", [])], name)


def difference(one: Any, other: Any) -> float:
    """The largest difference between two outputs, as a share of the largest number of ``one``."""
    left, right = dict(tensors(one)), dict(tensors(other))
    if left.keys() != right.keys():
        raise AssertionError(f"outputs {sorted(left)} became {sorted(right)}")
    worst = 0.0
    for name, a in left.items():
        b = right[name]
        if a.shape != b.shape:
            raise AssertionError(f"{name} {list(a.shape)} became {list(b.shape)}")
        a, b = a.detach().double(), b.detach().double()
        finite = a.isfinite()
        if not torch.equal(finite, b.isfinite()):
            raise AssertionError(f"{name} is finite elsewhere")
        a, b = a[finite], b[finite]
        if a.numel():
            worst = max(worst, float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)))
    return worst


def run(model: nn.Module, inputs: Mapping[str, Any], **more: Any) -> Any:
    """The output, with the same random numbers each time."""
    torch.manual_seed(3)
    with torch.no_grad():
        return model(**inputs, **more)


def rounding(model: nn.Module, inputs: Mapping[str, Any], plain: Any) -> float:
    """The difference between ``plain``, computed in float32, and the same in float64."""
    exact = copy.deepcopy(model).double()
    precise = {n: t.double() if t.is_floating_point() else t for n, t in inputs.items()}
    return difference(run(exact, precise), plain)


def weighted_sum(output: Any) -> Tensor:
    """A fixed weighted sum of the outputs that have gradients."""
    generator = torch.Generator().manual_seed(4)
    total = torch.zeros(())
    for _, tensor in tensors(output):
        if tensor.requires_grad:
            finite = tensor[tensor.isfinite()]
            total = total + (finite * torch.randn(finite.shape, generator=generator)).sum()
    return total


def gradients(model: nn.Module, inputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """The gradients of a fixed weighted sum of the outputs, by parameter."""
    torch.manual_seed(3)
    model.zero_grad(set_to_none=True)
    weighted_sum(model(**inputs)).backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    return found


def gradient_difference(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """The largest difference between gradients, as a share of the largest gradient of ``one``."""
    if one.keys() != other.keys():
        raise AssertionError(f"gradients of {sorted(one.keys() ^ other.keys())[:3]} come or go")
    pairs = [(g, other[name]) for name, g in one.items() if g.numel()]
    scale = max((float(a.abs().max()) for a, _ in pairs), default=0.0)
    worst = max((float((a - b).abs().max()) for a, b in pairs), default=0.0)
    return worst / max(scale, 1e-30)


# Modules -----------------------------------------------------------------------------------------


def says_attention(name: str, module: nn.Module) -> bool:
    kind, own = type(module).__name__, name.rpartition(".")[2]
    if isinstance(module, nn.MultiheadAttention):
        return True
    if kind.lower().endswith(("attention", "attn")):
        return True
    if OTHER_PARTS.search(kind) or type(module).__module__.startswith("torch.nn."):
        return False
    return bool(ATTENTION.search(kind) or re.search(rf"({ATTENTION.pattern})$", own))


@contextmanager
def modules_that_run(model: nn.Module) -> Iterator[list[str]]:
    """The names of modules that say attention, have no such part that ran, and ran."""
    ran: set[str] = set()
    said = {name: m for name, m in model.named_modules() if name and says_attention(name, m)}
    hooks = [
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
        for name, module in said.items()
    ]
    found: list[str] = []
    try:
        yield found
    finally:
        for hook in hooks:
            hook.remove()
        found += [n for n in said if n in ran and not any(r.startswith(n + ".") for r in ran)]


def not_seen(ran: list[str], watched: Watched) -> list[str]:
    """Modules that ran of which neither they, nor a part, nor what they are part of was seen."""
    seen = list(watched)

    def related(one: str, other: str) -> bool:
        return one == other or one.startswith(other + ".") or other.startswith(one + ".")

    return [name for name in ran if not any(related(name, layer) for layer in seen)]


def calls_not_seen(made: Counter[str], watched: Watched) -> list[str]:
    """Modules of which fewer calls were recorded than they made ``operations``, without a word."""
    recorded = Counter(name for name, _ in watched.calls)
    return [
        f"{name} {recorded[name]} of {count}"
        for name, count in made.items()
        if recorded[name] < count and name not in watched.unseen
    ]


@contextmanager
def operations(model: nn.Module) -> Iterator[Counter[str]]:
    """Count the operations that may be attention, by the innermost module that says attention."""
    running: list[str] = []
    counts: Counter[str] = Counter()

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            name = getattr(func, "__name__", "")
            if running and (name in _FUSED or (name == "softmax" and _over_keys(args, kwargs))):
                # Longformer's second softmax, with three axes, has rows of its first.
                counts[running[-1]] += not (
                    computes_windows(said[running[-1]]) and args[0].dim() == 3
                )
            return func(*args, **(kwargs or {}))

    said = {n: m for n, m in model.named_modules() if n and says_attention(n, m)}
    hooks = []
    for name, module in said.items():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: running.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: running.pop() and None))
    try:
        with Mode():
            yield counts
    finally:
        for hook in hooks:
            hook.remove()


_FUSED = ("scaled_dot_product_attention", "multi_head_attention_forward")


def _over_keys(args: Any, kwargs: Any) -> bool:
    scores = args[0] if args else kwargs["input"]
    dim = args[1] if len(args) > 1 else (kwargs or {}).get("dim")
    return scores.dim() >= 3 and isinstance(dim, int) and dim % scores.dim() == scores.dim() - 1


# Weights -----------------------------------------------------------------------------------------


def returned_weights(model: Any, inputs: Mapping[str, Any]) -> list[Tensor]:
    """What the model returns as its attention weights, in its own code ("eager")."""
    return _weights_in(_eager(model, inputs))


def _eager(model: Any, inputs: Mapping[str, Any]) -> Any:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return run(model, inputs, output_attentions=True)
    finally:
        model.set_attn_implementation(before)


def _weights_in(output: Any) -> list[Tensor]:
    found = (t for name, t in tensors(output) if "attentions" in name and t.dim() == 4)
    # Some models return scores or hidden states under this name.
    return [t for t in found if (t >= 0).all() and (t.sum(-1) <= 1 + 1e-4).all()]


def weights_found(returned: list[Tensor], watched: Watched, tolerance: float = TOLERANCE) -> int:
    """How many of the returned weights were seen, within ``tolerance``."""
    seen = [s.weights for _, s in watched.calls if s.weights is not None]
    count = 0
    for weights in returned:
        for candidate in seen:
            if candidate.shape != weights.shape:
                continue
            if weights.shape[1] > 1 and (weights == weights[:, :1]).all():  # means over the heads
                candidate = candidate.mean(1, keepdim=True).expand_as(weights)
            rows = weights.isfinite().all(-1) & (candidate.sum(-1) > 0)
            if rows.any() and (candidate - weights)[rows].abs().max() <= tolerance:
                count += 1
                break
    return count


# The whole comparison ----------------------------------------------------------------------------


def state(model: nn.Module) -> list[Any]:
    """What watching could leave behind: settings and hooks."""
    configs = [m.config for m in model.modules() if hasattr(getattr(m, "config", None), "to_dict")]
    return [
        [(c.to_dict(), c._attn_implementation) for c in configs],
        [(len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()],
    ]


def compare(model: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Any]:
    """Run the model plainly and watched; a row with what was seen, and ``status`` in one word.

    ``status`` is "same", "different", "refused" (the reason is an InputError of regard), "error"
    (any other exception, raised only while watching) or "random" (plain runs differ).
    """
    row: dict[str, Any] = {"status": "same"}
    see = See(entropy=True)
    with modules_that_run(model) as ran, operations(model) as made:
        plain = run(model, inputs)
    if difference(plain, run(model, inputs)) > TOLERANCE:
        return row | {"status": "random", "reason": "two plain runs differ"}
    before = state(model)
    row["ran"] = len(ran)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with watch(model, see) as watched:
                output = run(model, inputs)
    except InputError as error:
        return row | {"status": "refused", "reason": str(error)}
    except Exception as error:  # noqa: BLE001  whatever it is, it is a row of the table
        return row | {"status": "error", "reason": f"{type(error).__name__}: {error}"[:400]}
    row |= {"layers": len(watched), "calls": len(watched.calls)}
    missed = not_seen(ran, watched)
    named = list(getattr(watched, "unseen", ()))
    warned = " ".join(str(w.message) for w in caught)
    row["unseen"] = missed
    silent = [name for name in missed if name not in named and name not in warned]
    if silent:
        row["silent"] = silent
    row["operations"] = sum(made.values())
    if hidden := calls_not_seen(made, watched):
        row["silent calls"] = hidden
    try:
        row["difference"] = difference(plain, output)
        if state(model) != before:
            raise AssertionError("watching left something behind")
        for name, seen in watched.calls:
            if seen.entropy is None or not (seen.entropy >= -1e-4).all():
                raise AssertionError(f"{name}: the entropy is below 0 or not a number")
    except AssertionError as error:
        return row | {"status": "different", "reason": str(error)}
    if row["difference"] > TOLERANCE:
        # This model makes rounding larger. Watching may not add more than float32 itself does.
        row["rounding"] = rounding(model, inputs, plain)
        if row["difference"] > 2 * row["rounding"]:
            return row | {"status": "different", "reason": "output"}
    row |= _padded(model, inputs, see)
    if row["status"] != "same":
        return row
    row |= _gradients(model, inputs, see)
    return row if row["status"] != "same" else row | _weights(model, inputs, missed)


def _padded(model: nn.Module, inputs: Mapping[str, Tensor], see: See) -> dict[str, Any]:
    """The same with three positions of the second row masked, on either side."""
    ids = inputs.get("input_ids")
    if ids is None or "attention_mask" not in inspect.signature(model.forward).parameters:
        return {}
    row: dict[str, Any] = {}
    for side, places in (("right", slice(-3, None)), ("left", slice(0, 3))):
        mask = torch.ones_like(ids)
        mask[1, places] = 0
        more = {**inputs, "attention_mask": mask}
        try:
            plain = run(model, more)
        except Exception as error:  # noqa: BLE001  this model takes no such mask
            row[f"{side}_reason"] = f"{type(error).__name__}: {error}"[:200]
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with watch(model, see):
                    output = run(model, more)
            gap = difference(plain, output)
        except Exception as error:  # noqa: BLE001
            reason = f"padding {side}: {type(error).__name__}: {error}"[:400]
            return row | {"status": "different", "reason": reason}
        row[side] = gap
        if gap > TOLERANCE and gap > 2 * rounding(model, more, plain):
            return row | {"status": "different", "reason": f"padding {side}"}
    return row


def _gradients(model: nn.Module, inputs: Mapping[str, Tensor], see: See) -> dict[str, Any]:
    try:
        plain = gradients(model, inputs)
    except Exception as error:  # noqa: BLE001  this model has no gradients without watching
        return {"gradient": None, "gradient_reason": f"{type(error).__name__}: {error}"[:200]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with watch(model, see):
                found = gradients(model, inputs)
        gap = gradient_difference(plain, found)
    except Exception as error:  # noqa: BLE001
        return {"status": "different", "reason": f"gradient: {type(error).__name__}: {error}"[:300]}
    if gap > 10 * TOLERANCE:
        return {"status": "different", "reason": "gradient", "gradient": gap}
    return {"gradient": gap}


def _weights(model: nn.Module, inputs: Mapping[str, Tensor], missed: list[str]) -> dict[str, Any]:
    ids = inputs.get("input_ids")
    choices = [inputs]
    if ids is not None and "attention_mask" in inspect.signature(model.forward).parameters:
        choices.append({**inputs, "attention_mask": torch.ones_like(ids)})
    for chosen in choices:  # without a mask, some models compute something else in eager attention
        try:
            output = _eager(model, chosen)
        except Exception as error:  # noqa: BLE001  this model does not return its weights
            row: dict[str, Any] = {"returned_reason": f"{type(error).__name__}: {error}"[:200]}
            continue
        plain, found = dict(tensors(run(model, chosen))), dict(tensors(output))
        try:
            gap = difference(plain, {name: found[name] for name in plain if name in found})
        except AssertionError as error:
            row = {"returned_reason": f"eager attention has another output: {error}"[:200]}
            continue
        if gap > TOLERANCE:
            row = {"returned_reason": f"eager attention has another output, by {gap:.0e}"}
            continue
        return _compared_weights(model, chosen, missed, _weights_in(output))
    return row


def _compared_weights(
    model: nn.Module, inputs: Mapping[str, Tensor], missed: list[str], returned: list[Tensor]
) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with watch(model, See(weights=True)) as watched:
            run(model, inputs)
    sizes = {seen.extent[2:] for _, seen in watched.calls}
    if not missed and any(weights.shape[2:] not in sizes for weights in returned):
        return {"returned_reason": "it returns a part of its weights"}
    found = weights_found(returned, watched)
    row: dict[str, Any] = {"returned": len(returned), "equal": found}
    if found < len(returned) and not missed:
        row |= {"status": "different", "reason": "weights"}
    return row
