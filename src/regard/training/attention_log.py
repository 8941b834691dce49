"""Measure the entropy and the largest score of each attention head during training."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from regard.interpret.watching import watch
from regard.mechanism.seeing import See
from regard.training.recipe import Watching


class AttentionWarning(UserWarning):
    """Warns that the entropy of a head is too low, or its scores too large."""


@contextmanager
def watched_model(
    model: nn.Module, settings: Watching, warned: set[str]
) -> Iterator[dict[str, dict[str, list[float]]]]:
    """Context that measures attention, and yields a dict that is filled when the context ends.

    The dict has the mean entropy and the largest score of each head of each layer. Warns of a head
    whose entropy is too low or whose scores are too large, if ``warned`` does not name it yet.
    """
    measured: dict[str, dict[str, list[float]]] = {}
    was_training = model.training
    model.eval()  # dropout would advance the random state of the training
    try:
        with torch.no_grad(), watch(model, See(entropy=True, max_logit=True)) as watched:
            yield measured
    finally:
        model.train(was_training)
    for layer in watched:
        seen = watched[layer][-1]
        assert seen.entropy is not None
        assert seen.max_logit is not None
        entropy = seen.entropy.float().mean((0, 2)).tolist()
        logit = seen.max_logit.float().amax(0).tolist()
        measured[layer] = {"entropy": entropy, "max_logit": logit}
        for head, (low, high) in enumerate(zip(entropy, logit, strict=True)):
            for kind, bad, text in (
                ("entropy", low < settings.min_entropy, f"has collapsed: its entropy is {low:.4f}"),
                (
                    "logit",
                    not high < settings.max_logit,
                    f"has large scores: the largest is {high:.4g}",
                ),
            ):
                name = f"{kind} {layer} {head}"
                if bad and name not in warned:
                    warned.add(name)
                    warnings.warn(f"Head {head} of {layer} {text}.", AttentionWarning, stacklevel=3)
