"""Training objectives: they build batches from a table, and compute their loss.

Batches are padded and masked on the table's device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import nll_loss

from regard.data.batches import Alternating, ByLength, Lanes, Plan, Rows, Windows
from regard.data.tables import Ragged, Table
from regard.errors import InputError
from regard.evaluation.losses import (
    AnswerBatch,
    PairBatch,
    Prepared,
    SpecialTokens,
    answer_batch,
    answer_logits,
    answer_loss,
    map_tensors,
    pair_batch,
    pair_loss,
)
from regard.layers.losses import IGNORED
from regard.models.model import LanguageModel


class Objective(Protocol):
    """A training objective."""

    plan: Plan

    @property
    def device(self) -> torch.device:
        """The device of the table, and of the rows given to :meth:`prepare`."""

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        """The batch of some rows of the plan."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss summed over the targets of a batch."""

    def state(self) -> dict[str, Any]:
        """The state that is carried from batch to batch, as a tree to save."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore a state that :meth:`state` returned."""


class Stateless:
    """Base class of objectives that carry no state from batch to batch."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        del state


# ------------------------------------------------------- translation, summarization, answers


class Pairs(Stateless):
    """Predict the targets of a table from its sources; both have end tokens.

    If the table has several variants of all pairs, each epoch uses the next variant.
    """

    def __init__(
        self,
        table: Table,
        special: SpecialTokens,
        tokens: int,
        *,
        smoothing: float = 0.0,
        r_drop: float = 0.0,
    ) -> None:
        self.table, self.special = table, special
        self.smoothing, self.r_drop = smoothing, r_drop
        variants = table.facts.get("variants", 1)
        parts = table.lengths.cpu().view(variants, -1, 2)  # [variants, rows, columns]
        self.plan: Plan = Alternating([ByLength(part, tokens) for part in parts], parts.shape[1])

    @property
    def device(self) -> torch.device:
        return self.table["source"].flat.device

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        del random
        return pair_batch(self.table, rows, self.special)

    def loss(self, model: nn.Module, batch: PairBatch) -> Tensor:
        if model.training and self.r_drop:
            return self._r_drop_loss(model, batch)
        return pair_loss(model, batch, self.smoothing if model.training else 0.0)

    def _r_drop_loss(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """The mean loss of two passes with different dropout, plus their weighted divergence.

        With p and q the distributions of both passes, the divergence is
        1/4 sum (p - q)(log p - log q): half of the mean of both KL divergences, since the loss is a
        mean over two passes (https://arxiv.org/abs/2106.14448).
        """
        twice: PairBatch = map_tensors(batch, lambda tensor: torch.cat((tensor, tensor)))
        logits: Tensor = model(twice.source, twice.target, padding=twice.padding)
        logs = logits.float().log_softmax(-1)
        loss = (1 - self.smoothing) * nll_loss(
            logs.flatten(0, 1), twice.labels.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        if self.smoothing:
            loss = loss - self.smoothing * logs.mean(-1).where(twice.labels != IGNORED, 0.0).sum()
        p, q = logs.chunk(2)
        divergence = ((p.exp() - q.exp()) * (p - q)).sum(-1).where(batch.labels != IGNORED, 0.0)
        return loss / 2 + self.r_drop / 4 * divergence.sum()


class Answers(Stateless):
    """Predict the first and last token of an answer; [CLS] in a window without an answer."""

    def __init__(self, table: Table, tokens: int, pad: int) -> None:
        self.table, self.pad = table, pad
        self.plan: Plan = ByLength(table["ids"].lengths.cpu()[:, None], tokens)

    @property
    def device(self) -> torch.device:
        return self.table["ids"].flat.device

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        del random
        return answer_batch(self.table, rows, self.pad)

    def loss(self, model: nn.Module, batch: AnswerBatch) -> Tensor:
        return answer_loss(answer_logits(model, batch), batch)


# --------------------------------------------------------------------------- language modelling


class TextBatch(NamedTuple):
    ids: Tensor  # [batch, n]
    labels: Tensor  # [batch, m]: the labels of the last m <= n ids
    first: bool  # whether a model's memory is emptied before this batch


class Pieces(Stateless):
    """Base class of objectives on pieces of one long text."""

    plan: Plan

    def __init__(self, text: Ragged, length: int, tokens: int) -> None:
        self.text, self.length = text, length
        self.total = len(text.flat) - 1
        self.rows = max(tokens // length, 1)

    @property
    def device(self) -> torch.device:
        return self.text.flat.device


class NextToken(Pieces):
    """Next-token prediction in pieces of a text.

    The first ``context`` tokens of a piece have no loss, as the previous piece has predicted them.
    ``penalties`` are the weights of ``activation`` and ``slowness`` in a Transformer-XL's loss.
    """

    def __init__(
        self,
        text: Ragged,
        length: int,
        tokens: int,
        *,
        context: int = 0,
        penalties: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(text, length, tokens)
        self.context, self.penalties = context, penalties or {}
        self.plan = Windows(self.total, length, self.rows, context=context)

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        del random
        piece = self.text.slices(rows.rows, rows.longest[0] + 1)
        labels = piece[:, 1 + self.context :]
        return Prepared(TextBatch(piece[:, :-1], labels, rows.first), labels.numel())

    def loss(self, model: nn.Module, batch: TextBatch, **remembered: Any) -> Tensor:
        loss: Tensor = model(batch.ids, labels=batch.labels, **remembered, **self.penalties)
        return loss


class NextTokenWithMemory(NextToken):
    """Next-token prediction with a memory of the previous pieces of each lane.

    The memory is emptied after every ``reset_every`` pieces, or after each epoch if that is 0.
    """

    def __init__(
        self,
        text: Ragged,
        length: int,
        tokens: int,
        *,
        reset_every: int = 0,
        penalties: Mapping[str, float] | None = None,
    ) -> None:
        Pieces.__init__(self, text, length, tokens)
        self.context, self.penalties = 0, penalties or {}
        self.plan = Lanes(self.total, length, self.rows, reset_every)
        self.kept: list[Tensor] = []  # each layer's memory of the previous pieces

    def loss(self, model: nn.Module, batch: TextBatch, **remembered: Any) -> Tensor:
        assert isinstance(model, LanguageModel)
        memories = model.remember()
        assert memories is not None
        if self.kept and not batch.first:
            for memory, kept in zip(memories.layers, self.kept, strict=True):
                memory.extend(kept.to(batch.ids.device))
        loss = super().loss(model, batch, memories=memories, **remembered)
        self.kept = [memory.kept for memory in memories.layers if memory.kept is not None]
        return loss

    def state(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kept = state["kept"]


# ------------------------------------------------------------ masked tokens, corrupted spans


class MaskedTokens(Pieces):
    """Predict 15% of the tokens of a piece from the others (section 3.1 of BERT's paper).

    In training, pieces are ``shuffled``; in evaluation, they are read in order from the start.
    """

    share = 0.15

    def __init__(
        self,
        text: Ragged,
        length: int,
        tokens: int,
        *,
        shuffled: bool = True,
        first: int,
        last: int,
        mask: int,
        vocabulary: int,
    ) -> None:
        self.first, self.last, self.mask, self.vocabulary = first, last, mask, vocabulary
        if length < 3:
            raise InputError(
                f"data.length = {length}, but [CLS] and [SEP] alone are 2 tokens. Raise it."
            )
        super().__init__(text, length - 2, tokens * (length - 2) // length)
        self.plan = Windows(self.total, self.length, self.rows, shuffled)

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        ids = self.text.slices(rows.rows, rows.longest[0])
        draw = torch.rand(ids.shape, device=ids.device, generator=random)
        kind = torch.rand(ids.shape, device=ids.device, generator=random)
        other = torch.randint(self.vocabulary, ids.shape, device=ids.device, generator=random)
        count = max(round(self.share * ids.shape[1]), 1)
        chosen = draw <= draw.kthvalue(count, dim=1, keepdim=True).values
        # Of the chosen tokens 80% become [MASK], 10% become random tokens, and 10% are unchanged.
        read = ids.where(~chosen | (kind >= 0.8), self.mask)
        read = read.where(~chosen | (kind < 0.8) | (kind >= 0.9), other)
        ends = [ids.new_full((len(ids), 1), token) for token in (self.first, self.last)]
        nothing = ids.new_full((len(ids), 1), IGNORED)
        labels = ids.where(chosen, IGNORED)
        batch = TextBatch(
            torch.cat((ends[0], read, ends[1]), 1),
            torch.cat((nothing, labels, nothing), 1),
            first=True,
        )
        return Prepared(batch, chosen.sum())

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        loss: Tensor = model(batch.ids, labels=batch.labels)
        return loss


class Spans(Pieces):
    """Predict the spans that were cut out of a piece (section 3.1.4 of T5's paper).

    All rows have equal numbers of spans and of cut tokens, so batches need no padding.
    """

    share, mean = 0.15, 3

    def __init__(
        self,
        text: Ragged,
        length: int,
        tokens: int,
        *,
        shuffled: bool = True,
        special: SpecialTokens,
        sentinels: Sequence[int],
    ) -> None:
        self.special = special
        self.noise = max(round(self.share * length), 1)
        self.spans = max(round(self.noise / self.mean), 1)
        if self.spans > len(sentinels) or length <= self.noise:
            raise InputError(
                f"Pieces of {length} tokens have {self.spans} spans, but the tokenizer has "
                f"{len(sentinels)} sentinel tokens (<extra_id_0> ...). Change data.length."
            )
        self.sentinels = torch.tensor(sentinels[: self.spans], device=text.flat.device)
        super().__init__(text, length, tokens)
        self.plan = Windows(self.total, length, self.rows, shuffled)

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        ids = self.text.slices(rows.rows, rows.longest[0])
        length, device = ids.shape[1], ids.device
        kept = _parts(len(ids), length - self.noise, self.spans, random, device)
        cut = _parts(len(ids), self.noise, self.spans, random, device)
        # Parts alternate: kept, cut, kept, cut ... ``part`` is the index of each token's part.
        ends = torch.stack((kept, cut), dim=2).flatten(1).cumsum(1)
        part = (torch.arange(length, device=device)[None, :, None] >= ends[:, None]).sum(-1)
        noisy = part % 2 == 1
        source = self._with_sentinels(ids, ~noisy, part)
        target = self._with_sentinels(ids, noisy, part, noise=True)
        end = ids.new_full((len(ids), 1), self.special.end)
        source, labels = torch.cat((source, end), 1), torch.cat((target, end), 1)
        read = labels.roll(1, dims=1)
        read[:, 0] = self.special.start
        return Prepared(PairBatch(source, None, read, labels), labels.numel())

    def _with_sentinels(
        self, ids: Tensor, keep: Tensor, part: Tensor, noise: bool = False
    ) -> Tensor:
        """The tokens of each row where ``keep``, with a sentinel in place of each removed span."""
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        index = torch.arange(self.spans, device=ids.device).expand(len(ids), -1)
        # A sentinel comes before the first token of its span.
        span_start = (part[:, None] < 2 * index[..., None] + 1).sum(-1)
        tokens = torch.cat((self.sentinels.expand(len(ids), -1), ids), 1)
        order = torch.cat((2 * span_start - 1, 2 * place), 1)
        order = order.masked_fill(
            torch.cat((torch.zeros_like(index, dtype=torch.bool), ~keep), 1), 4 * ids.shape[1]
        )
        count = self.spans + (self.noise if noise else ids.shape[1] - self.noise)
        return tokens.gather(1, order.argsort(dim=1, stable=True)[:, :count])

    def loss(self, model: nn.Module, batch: PairBatch) -> Tensor:
        return pair_loss(model, batch)


def _parts(
    rows: int, total: int, count: int, random: torch.Generator, device: torch.device
) -> Tensor:
    """Random ``count`` positive integers that add up to ``total``, uniformly: [rows, count]."""
    draw = torch.rand(rows, total - 1, device=device, generator=random)
    cuts = draw.argsort(1)[:, : count - 1].sort(1).values + 1
    edges = [cuts.new_zeros(rows, 1), cuts, cuts.new_full((rows, 1), total)]
    return torch.cat(edges, 1).diff(dim=1)
