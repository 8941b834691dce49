"""AdamW, and the learning rate of each step."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from regard.errors import InputError
from regard.models.transformer_xl import AdaptiveEmbedding
from regard.training.recipe import Recipe, Schedule


def rate_at(step: int, schedule: Schedule) -> float:
    """The learning rate of a step, counted from 1.

    >>> schedule = Schedule(steps=100, rate=1.0, warmup=10, shape="inverse-sqrt")
    >>> rate_at(5, schedule), rate_at(10, schedule), rate_at(40, schedule)
    (0.5, 1.0, 0.5)
    """
    warmup, rate = schedule.warmup, schedule.rate
    if step < warmup:
        return rate * step / warmup
    if schedule.shape == "constant":
        return rate
    if schedule.shape == "inverse-sqrt":
        return rate * math.sqrt(max(warmup, 1) / max(step, 1))
    done = min((step - warmup) / max(schedule.steps - warmup, 1), 1.0)
    left = (1 + math.cos(math.pi * done)) / 2 if schedule.shape == "cosine" else 1 - done
    return rate * (schedule.floor + (1 - schedule.floor) * left)


def _size(parameter: Tensor) -> float:
    """A parameter's root mean square, at least 0.001; in two digits, so that groups are few."""
    rms = float(parameter.detach().double().square().mean().sqrt())
    return max(float(f"{rms:.1e}"), 1e-3)


def adamw(model: nn.Module, recipe: Recipe, device: torch.device) -> torch.optim.AdamW:
    """AdamW, without weight decay for vectors such as biases and norms."""
    settings = recipe.optimizer
    if len(settings.betas) != 2 or not all(0 <= beta < 1 for beta in settings.betas):
        raise InputError(
            f"optimizer.betas should be two numbers >= 0 and < 1, but got {settings.betas}."
        )
    tables: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            tables.add(module.weight)
        elif isinstance(module, AdaptiveEmbedding):
            tables.update(module.tables)
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for parameter in filter(lambda p: p.requires_grad, model.parameters()):
        decay = settings.weight_decay if parameter.dim() > 1 else 0.0
        size = _size(parameter) if settings.scale_by_initial_rms else 1.0
        size *= settings.embedding_rate if parameter in tables else 1.0
        groups.setdefault((decay, size), []).append(parameter)
    return torch.optim.AdamW(
        [
            {"params": parameters, "weight_decay": decay, "size": size}
            for (decay, size), parameters in groups.items()
        ],
        lr=recipe.schedule.rate,
        betas=(settings.betas[0], settings.betas[1]),
        eps=settings.epsilon,
        fused=device.type == "cuda",
    )
