"""Training: recipes, data, the loop, metrics, and checkpoints that survive anything."""

from __future__ import annotations

from regard.training.evaluating import Again, Evaluated, evaluate, reproduce
from regard.training.recipe import Recipe, describe, parse_recipe, read_recipe
from regard.training.run import Result, train

__all__ = [
    "Again",
    "Evaluated",
    "Recipe",
    "Result",
    "describe",
    "evaluate",
    "parse_recipe",
    "read_recipe",
    "reproduce",
    "train",
]
