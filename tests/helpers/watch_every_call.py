"""A pytest plugin that runs every call of a transformers model inside ``watch()``.

``pytest -p helpers.watch_every_call`` with REGARD_CALLS, the path of a file. It appends a line of
JSON for each test: its outcome, and what its calls did. With REGARD_WATCH=0 it only writes the
outcomes. ``benchmarks/transformers_tests.py`` compares the two.

The model's own output is what a test gets where regard refuses a call or fails; both are counted.
A call in evaluation mode is also run unwatched, on copies of its arguments, and compared: the
output, and the gradients of all parameters where the output has gradients.
"""

from __future__ import annotations

import copy
import json
import os
import threading
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from helpers.watched_runs import (
    TOLERANCE,
    calls_not_seen,
    difference,
    gradient_difference,
    modules_that_run,
    not_seen,
    operations,
    weighted_sum,
)
from regard import InputError, See, watch
from regard.interpret.watched import Watched

CALLS = Path(os.environ["REGARD_CALLS"])
WATCH = os.environ.get("REGARD_WATCH", "1") != "0"
DIFFERENT = {torch.bfloat16: 5e-2, torch.float16: 2e-2}  # where not TOLERANCE
_inside = threading.local()
_plain_call = PreTrainedModel.__call__


class Record:
    """What the calls of one test did."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.unseen: Counter[str] = Counter()
        self.largest: dict[str, float] = {}  # differences, by the dtype of the model

    def add(self, kind: str, reason: str) -> None:
        self.counts[kind] += 1
        self.reasons[f"{kind}: {reason[:300]}"] += 1

    def missed(self, model: PreTrainedModel, name: str, *, named: bool) -> None:
        kind = f"{type(model).__name__} {type(model.get_submodule(name)).__name__}"
        self.unseen[kind if named else f"{kind}, not named"] += 1
        self.counts["unseen"] += 1
        self.counts["unseen, not named"] += not named

    def compared(self, kind: str, what: str, gap: float, dtype: torch.dtype) -> None:
        name = f"{what}, {dtype}".replace("torch.", "")
        self.largest[name] = max(gap, self.largest.get(name, 0.0))
        allowed = DIFFERENT.get(dtype, TOLERANCE) * (10 if what == "gradients" else 1)
        if gap > allowed:
            self.add("different", f"{kind}: {name}, by {gap:.1e}")


record = Record()


def _watchable(model: PreTrainedModel) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if torch._guards.detect_fake_mode() is not None:
        return False
    return all(p.device.type == "cpu" for p in model.parameters())


def _call(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    if getattr(_inside, "model", False) or not _watchable(model):
        return _plain_call(model, *args, **kwargs)
    _inside.model = True
    try:
        return _watched(model, args, kwargs)
    finally:
        _inside.model = False


def _watched(model: PreTrainedModel, args: Any, kwargs: Any) -> Any:
    record.counts["calls"] += 1
    copies = None
    if not model.training:
        try:
            copies = copy.deepcopy((args, kwargs))
        except (RuntimeError, TypeError):  # not a leaf, or nothing that can be copied
            copies = None
    random = torch.get_rng_state()
    kind = type(model).__name__
    try:
        with modules_that_run(model) as ran, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*regard|.*not seen|.*unseen")
            with watch(model, See(entropy=True)) as watched:
                output = _plain_call(model, *args, **kwargs)
    except InputError as error:
        record.add("refused", f"{kind}: {error}")
        torch.set_rng_state(random)
        args, kwargs = (args, kwargs) if copies is None else copies
        return _plain_call(model, *args, **kwargs)
    except Exception as error:  # noqa: BLE001  raised again, or counted
        torch.set_rng_state(random)
        again, keywords = (args, kwargs) if copies is None else copies
        try:
            output = _plain_call(model, *again, **keywords)
        except type(error):
            raise error from None  # the model raises without regard, too
        record.add("error", f"{kind}: {type(error).__name__}: {error}")
        return output
    record.counts["layers"] += len(watched.calls)
    for name in not_seen(ran, watched):
        record.missed(model, name, named=name in watched.unseen)
    if copies is not None:
        _compare(model, copies, random, output, watched)
    return output


def _compare(
    model: PreTrainedModel, copies: Any, random: torch.Tensor, output: Any, watched: Watched
) -> None:
    kind = type(model).__name__
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    after = torch.get_rng_state()
    torch.set_rng_state(random)
    try:
        with operations(model) as made:
            plain = _plain_call(model, *copies[0], **copies[1])
        expected = _gradients(model, plain)
    except Exception as error:  # noqa: BLE001  copies of these arguments cannot be run again
        record.counts["not compared"] += 1
        record.reasons[f"not compared: {type(error).__name__}: {error}"[:200]] += 1
        return
    finally:
        torch.set_rng_state(after)
    record.counts["compared"] += 1
    for missed in calls_not_seen(made, watched):
        record.missed(model, missed.partition(" ")[0], named=False)
    try:
        record.compared(kind, "output", difference(plain, output), dtype)
        found = _gradients(model, output)
        if expected or found:
            record.counts["gradients compared"] += 1
            gap = gradient_difference(expected, found)
            record.compared(kind, "gradients", gap, dtype)
    except AssertionError as error:
        record.add("different", f"{kind}: {error}")
    except Exception as error:  # noqa: BLE001  whatever it is, it is counted
        record.add("error", f"{kind}: gradients: {type(error).__name__}: {error}")


def _gradients(model: PreTrainedModel, output: Any) -> dict[str, torch.Tensor]:
    """The gradients of all parameters; the test can still compute its own."""
    total = weighted_sum(output)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not total.requires_grad or not parameters:
        return {}
    found = torch.autograd.grad(total, parameters.values(), retain_graph=True, allow_unused=True)
    return {n: g for n, g in zip(parameters, found, strict=True) if g is not None}


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    global record  # noqa: PLW0603
    record = Record()


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    outcome = yield
    report = outcome.get_result()
    if report.when != "call" and report.passed:
        return
    row = {"test": item.nodeid, "outcome": report.outcome}
    if report.failed:
        row["reason"] = str(call.excinfo.value)[:300] if call.excinfo else ""
    row |= {"seconds": round(report.duration, 1)}
    row |= {"counts": record.counts, "reasons": record.reasons, "unseen": record.unseen}
    row |= {"largest": record.largest}
    with CALLS.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


if WATCH:
    PreTrainedModel.__call__ = _call
