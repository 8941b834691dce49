"""What attention does while a model learns, and a warning where it goes wrong."""

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
    """A head has collapsed onto single keys, or its scores blow up."""


@contextmanager
def watched_model(
    model: nn.Module, settings: Watching, warned: set[str]
) -> Iterator[dict[str, dict[str, list[float]]]]:
    """Within, attention is watched; after, each head's mean entropy and largest score are there.

    Warns once of each head whose entropy is too low or whose scores are too large.
    """
    found: dict[str, dict[str, list[float]]] = {}
    was_training = model.training
    model.eval()  # no dropout: it would draw from the random numbers of training
    try:
        with torch.no_grad(), watch(model, See(entropy=True, max_logit=True)) as watched:
            yield found
    finally:
        model.train(was_training)
    for layer in watched:
        seen = watched[layer][-1]
        assert seen.entropy is not None
        assert seen.max_logit is not None
        entropy = seen.entropy.float().mean((0, 2)).tolist()
        logit = seen.max_logit.float().amax(0).tolist()
        found[layer] = {"entropy": entropy, "max_logit": logit}
        for head, (low, high) in enumerate(zip(entropy, logit, strict=True)):
            for kind, bad, text in (
                ("entropy", low < settings.entropy, f"has collapsed: its entropy is {low:.4f}"),
                ("logit", not high < settings.logit, f"blows up: its largest score is {high:.4g}"),
            ):
                name = f"{kind} {layer} {head}"
                if bad and name not in warned:
                    warned.add(name)
                    warnings.warn(f"Head {head} of {layer} {text}.", AttentionWarning, stacklevel=3)
