"""Batches and their summed losses, shared by training and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from regard.data.batches import Feed, Plan, Rows
from regard.data.tables import Table
from regard.errors import InputError
from regard.layers.losses import IGNORED
from regard.mechanism.masks import Padding


class Prepared(NamedTuple):
    """A batch on the table's device, and the number of its target tokens."""

    batch: Any
    targets: Tensor | int


def map_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """A tree with ``change(tensor)`` in place of each of its tensors."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, Padding):
        return Padding(change(torch.as_tensor(tree.lengths)), tree.side)
    if isinstance(tree, Mapping):
        return {name: map_tensors(part, change) for name, part in tree.items()}
    if isinstance(tree, list):
        return [map_tensors(part, change) for part in tree]
    if isinstance(tree, tuple):
        return type(tree)(*(map_tensors(part, change) for part in tree))
    return tree


def move(batch: Any, device: torch.device) -> Any:
    """Move a batch to the device without waiting; tensors already on the device are not copied."""

    def to_device(tensor: Tensor) -> Tensor:
        if device.type == "cuda" and tensor.device.type == "cpu":
            tensor = tensor.pin_memory()  # copying from unpinned memory would block
        return tensor.to(device, non_blocking=True)

    return map_tensors(batch, to_device)


def summed_loss(
    model: nn.Module,
    plan: Plan,
    device: torch.device,
    prepare: Callable[[Rows, torch.Generator], Prepared],
    loss: Callable[[nn.Module, Any], Tensor],
) -> tuple[float, int]:
    """The summed loss and the number of targets over one epoch of a plan."""
    feed, random = Feed(plan, 0, device), torch.Generator(device).manual_seed(0)
    model_device = next(model.parameters()).device
    nats = torch.zeros((), dtype=torch.float64, device=model_device)
    count: Tensor | int = 0
    for _ in feed.batches:
        prepared = prepare(feed.next(), random)
        nats += loss(model, move(prepared.batch, model_device))
        count = count + prepared.targets
    return float(nats), int(count)


# ------------------------------------------------------------------- translation, summarization


class SpecialTokens(NamedTuple):
    """The special ids of a sequence-to-sequence model."""

    pad: int
    start: int
    end: int


def special_tokens(model: Any) -> SpecialTokens:
    """The special ids of a sequence-to-sequence model, from its config."""
    config = model.config
    tokens = config.pad_token, config.start_token, config.end_token
    if None in tokens:
        raise InputError(
            "A sequence-to-sequence model needs pad_token, start_token and end_token in "
            "model.config."
        )
    return SpecialTokens(*tokens)


class PairBatch(NamedTuple):
    source: Tensor  # [batch, n]
    padding: Padding | None
    target: Tensor  # [batch, m]: the decoder's input, the start token first
    labels: Tensor  # [batch, m]


def pair_batch(table: Table, rows: Rows, special: SpecialTokens) -> Prepared:
    """The padded sources and targets of some rows, and the targets shifted right as input."""
    source, target = table["source"], table["target"]
    labels = target.gather(rows.rows, rows.longest[1], IGNORED)
    shifted = labels.roll(1, dims=1)
    shifted[:, 0] = special.start
    # Padding after a row's end has no effect: positions with a label come before it, and the mask
    # is causal.
    shifted = shifted.where(shifted != IGNORED, special.pad)
    batch = PairBatch(
        source.gather(rows.rows, rows.longest[0], special.pad),
        None if rows.even else Padding(source.lengths_of(rows.rows)),
        shifted,
        labels,
    )
    return Prepared(batch, target.lengths_of(rows.rows).sum())


def pair_loss(model: nn.Module, batch: PairBatch, smoothing: float = 0.0) -> Tensor:
    """The summed cross-entropy of the targets."""
    loss: Tensor = model(**batch._asdict(), smoothing=smoothing)
    return loss


# ---------------------------------------------------------------------------- question answering


class AnswerBatch(NamedTuple):
    ids: Tensor  # [batch, n]
    token_types: Tensor  # [batch, n]: 1 for the context and the separator after it
    possible: Tensor  # [batch, n]: whether an answer may start or end here (context or [CLS])
    padding: Padding | None
    start: Tensor  # [batch]
    end: Tensor  # [batch]


def answer_batch(table: Table, rows: Rows, pad: int) -> Prepared:
    """Padded windows of questions and contexts, with the positions of each answer's ends."""
    ids, longest = table["ids"], rows.longest[0]
    _, split, _, start, end = table["facts"].gather(rows.rows, 5, 0).unbind(1)
    places = torch.arange(longest, device=rows.rows.device)
    lengths = ids.lengths_of(rows.rows)
    in_context = (places >= split[:, None]) & (places < lengths[:, None])
    possible = in_context & (places < lengths[:, None] - 1) | (places == 0)
    padding = None if rows.even else Padding(lengths)
    padded = ids.gather(rows.rows, longest, pad)
    batch = AnswerBatch(padded, in_context.long(), possible, padding, start, end)
    return Prepared(batch, 2 * len(rows.rows))


def answer_logits(model: nn.Module, batch: AnswerBatch) -> tuple[Tensor, Tensor]:
    """The start and end logits [batch, n] of the answer, masked where no answer is possible."""
    logits = model(batch.ids, token_types=batch.token_types, padding=batch.padding)
    low = torch.finfo(torch.float32).min / 2  # finite even when a start and an end logit are added
    start, end = (part.float().masked_fill(~batch.possible, low) for part in logits)
    return start, end


def answer_loss(logits: tuple[Tensor, Tensor], batch: AnswerBatch) -> Tensor:
    """The summed cross-entropy of the first and the last token of each answer."""
    start, end = logits
    return cross_entropy(start, batch.start, reduction="sum") + cross_entropy(
        end, batch.end, reduction="sum"
    )
