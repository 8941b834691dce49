"""What is learned: how text becomes batches, what their loss is, and how well a model does.

Each objective holds its table on the device and makes batches there: nothing is padded or masked on
the host.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, nll_loss

from regard.data.batches import ByLength, Feed, Lanes, Plan, Rows, Turns, Windows
from regard.data.records import Pair
from regard.data.tables import Ragged, Table
from regard.decoding.generation import generate
from regard.errors import InputError
from regard.evaluation import metrics
from regard.evaluation.settings import TOKENS, Evaluation
from regard.layers.losses import NOTHING
from regard.mechanism.masks import Padding
from regard.models.model import LanguageModel


class Prepared(NamedTuple):
    """A batch on the device, and how many targets it has."""

    batch: Any
    targets: Tensor | int


def moved(batch: Any, device: torch.device) -> Any:
    """A batch on the device; one that is there already as it is."""
    if isinstance(batch, Tensor):
        if device.type == "cuda" and batch.device.type == "cpu":
            batch = batch.pin_memory()  # from elsewhere the copy would be waited for
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Padding):
        return Padding(moved(torch.as_tensor(batch.lengths), device), batch.side)
    if isinstance(batch, tuple):
        return type(batch)(*(moved(part, device) for part in batch))
    return batch


class Objective(Protocol):
    """What is learned."""

    plan: Plan

    @property
    def device(self) -> torch.device:
        """Where its table lies, and rows are to be."""

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        """The batch that some rows of the plan are."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """The loss summed over the targets of a batch."""

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Scores on what is held out, ``loss`` among them; nothing where nothing is."""

    def state(self) -> dict[str, Any]:
        """What it remembers from batch to batch, as a tree to save."""

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what :meth:`state` gave."""


class Stateless:
    """Of objectives whose batches know nothing of each other."""

    def state(self) -> dict[str, Any]:
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        del state


def held_out(
    objective: Objective, model: nn.Module, plan: Plan, device: torch.device
) -> tuple[float, int]:
    """The summed loss and the number of targets over one epoch of a plan."""
    feed = Feed(plan, 0, device)
    random = torch.Generator(device).manual_seed(0)
    there = next(model.parameters()).device
    nats = torch.zeros((), dtype=torch.float64, device=there)
    count: Tensor | int = 0
    for _ in feed.batches:
        prepared = objective.prepare(feed.next(), random)
        nats += objective.loss(model, moved(prepared.batch, there))
        count = count + prepared.targets
    return float(nats), int(count)


# ----------------------------------------------------------------- translation, summarization


class PairBatch(NamedTuple):
    source: Tensor  # [batch, n]
    padding: Padding | None
    target: Tensor  # [batch, m]: what the decoder reads, the start token first
    labels: Tensor  # [batch, m]


@dataclass(frozen=True)
class Special:
    """The ids a model of sequences to sequences reads and writes beside those of text."""

    pad: int
    start: int
    end: int


class Pairs(Stateless):
    """A source text becomes a target text; ``table`` has both as ids, each with its end token.

    Where the table has all pairs in several variants, each epoch has another one of them.
    """

    def __init__(
        self,
        table: Table,
        special: Special,
        tokens: int,
        *,
        smoothing: float = 0.0,
        agreement: float = 0.0,
        examine: Examine | None = None,
    ) -> None:
        self.table, self.special, self.examine = table, special, examine
        self.smoothing, self.agreement = smoothing, agreement
        variants = table.facts.get("variants", 1)
        parts = table.lengths.cpu().view(variants, -1, 2)  # [variants, rows, columns]
        self.plan: Plan = Turns([ByLength(part, tokens) for part in parts], parts.shape[1])

    @property
    def device(self) -> torch.device:
        return self.table["source"].flat.device

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        del random
        source, target = self.table["source"], self.table["target"]
        labels = target.gather(rows.rows, rows.longest[1], NOTHING)
        read = labels.roll(1, dims=1)
        read[:, 0] = self.special.start
        # Behind a row's end the decoder reads whatever: nothing before looks there.
        read = read.where(read != NOTHING, self.special.pad)
        batch = PairBatch(
            source.gather(rows.rows, rows.longest[0], self.special.pad),
            None if rows.even else Padding(source.lengths_of(rows.rows)),
            read,
            labels,
        )
        return Prepared(batch, target.lengths_of(rows.rows).sum())

    def loss(self, model: nn.Module, batch: PairBatch) -> Tensor:
        if model.training and self.agreement:
            return self._agreeing(model, batch)
        smoothing = self.smoothing if model.training else 0.0
        loss: Tensor = model(
            batch.source,
            batch.target,
            padding=batch.padding,
            labels=batch.labels,
            smoothing=smoothing,
        )
        return loss

    def _agreeing(self, model: nn.Module, batch: PairBatch) -> Tensor:
        """The mean loss of two readings, and how far their distributions are apart.

        That is the mean of both divergences, halved as the losses are: with p and q the two,
        1/4 sum (p - q)(log p - log q) (https://arxiv.org/abs/2106.14448).
        """
        source, target, labels = (
            torch.cat((part, part)) for part in (batch.source, batch.target, batch.labels)
        )
        padding = batch.padding
        if padding is not None:
            lengths = torch.as_tensor(padding.lengths)
            padding = Padding(torch.cat((lengths, lengths)), padding.side)
        logits: Tensor = model(source, target, padding=padding)
        logs = logits.float().log_softmax(-1)
        loss = (1 - self.smoothing) * nll_loss(
            logs.flatten(0, 1), labels.flatten(), ignore_index=NOTHING, reduction="sum"
        )
        if self.smoothing:
            loss = loss - self.smoothing * logs.mean(-1).where(labels != NOTHING, 0.0).sum()
        one, two = logs.chunk(2)
        apart = ((one.exp() - two.exp()) * (one - two)).sum(-1).where(batch.labels != NOTHING, 0.0)
        return loss / 2 + self.agreement / 4 * apart.sum()

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        return {} if self.examine is None else self.examine(model, self.special)


class Examine:
    """Pairs held out: their loss, and what is decoded from their sources against their targets."""

    def __init__(
        self,
        pairs: Sequence[Pair],
        prompts: Sequence[Sequence[int]],
        table: Table,
        decode: Callable[[Sequence[int]], str],
        settings: Evaluation,
        length: int,
        tokens: int,
    ) -> None:
        self.pairs, self.prompts, self.table, self.decode = pairs, prompts, table, decode
        self.settings, self.length, self.tokens = settings, length, tokens
        self.outputs: list[str] = []  # of the last evaluation

    def __call__(self, model: Any, special: Special) -> dict[str, float]:
        held = Pairs(self.table, special, self.tokens)
        nats, count = held_out(held, model, held.plan, held.device)
        scores = {"loss": nats / count, "perplexity": metrics.perplexity(nats, count)}
        if self.settings.metric != "loss":
            scores |= self._decoded(model, special)
        return scores

    def _decoded(self, model: Any, special: Special) -> dict[str, float]:
        some = self.settings.examples or len(self.pairs)
        prompts = self.prompts[:some]
        found = generate(
            model,
            prompts,
            self.settings.decoding.strategy(),
            max_new_tokens=self.length,
            stop=[special.end],
            batch=max(512 // self.settings.beam, 1),
            tokens=TOKENS,
        )
        self.outputs = [self.decode(best.ids) for best, *_ in found]
        references = [pair.targets for pair in self.pairs[:some]]
        if self.settings.metric in ("bleu", "chrf"):
            return {
                "bleu": metrics.bleu(self.outputs, references, self.settings.tokenize),
                "chrf": metrics.chrf(self.outputs, references),
            }
        one, two, longest = metrics.rouge(self.outputs, references)
        return {"rouge-1": one, "rouge-2": two, "rouge-l": longest}


# --------------------------------------------------------------------------- language modelling


class TextBatch(NamedTuple):
    ids: Tensor  # [batch, n]
    labels: Tensor  # [batch, n], or fewer: those of the last ids
    first: bool  # whether nothing comes before


class Pieces(Stateless):
    """What is learned from pieces of one long text; ``held`` is another text, held out."""

    def __init__(self, text: Ragged, held: Table | None, length: int, tokens: int) -> None:
        self.text, self.held, self.length = text, held, length
        self.rows = max(tokens // length, 1)
        self.plan = self._plan(text, shuffled=True)
        if held is not None:
            try:  # now, and not after the first thousand steps
                self._plan(held["text"], shuffled=False)
            except InputError as error:
                raise InputError(f"What is held out is too short: {error}") from None

    def _plan(self, text: Ragged, shuffled: bool) -> Plan:
        return Windows(len(text.flat) - 1, self.length, self.rows, shuffled)

    @property
    def device(self) -> torch.device:
        return self.text.flat.device

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        raise NotImplementedError

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        if self.held is None:
            return {}
        training, self.text = self.text, self.held["text"]
        try:
            plan = self._plan(self.text, shuffled=False)
            nats, count = held_out(self, model, plan, self.text.flat.device)
        finally:
            self.text = training
        return self._scores(nats, count, self.held)

    def _scores(self, nats: float, count: int, held: Table) -> dict[str, float]:
        del held
        return {"loss": nats / count, "perplexity": metrics.perplexity(nats, count)}


class NextToken(Pieces):
    """Each token is told from those before it in its piece.

    The first ``context`` of a piece are only read: the piece before tells them, and those of the
    first piece are not told. What is held out is told at a ``temperature``. ``calm`` is what keeps
    a Transformer-XL's output calm while it learns: the ``activation`` and ``slowness`` it takes.
    """

    def __init__(
        self,
        text: Ragged,
        held: Table | None,
        length: int,
        tokens: int,
        *,
        context: int = 0,
        temperature: float = 1.0,
        calm: Mapping[str, float] | None = None,
    ) -> None:
        self.context, self.temperature, self.calm = context, temperature, calm or {}
        super().__init__(text, held, length, tokens)

    def _plan(self, text: Ragged, shuffled: bool) -> Plan:
        return Windows(len(text.flat) - 1, self.length, self.rows, shuffled, self.context)

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        del random
        piece = self.text.slices(rows.rows, rows.longest[0] + 1)
        labels = piece[:, 1 + self.context :]
        return Prepared(TextBatch(piece[:, :-1], labels, rows.first), labels.numel())

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        return self._loss(model, batch)

    def _loss(self, model: nn.Module, batch: TextBatch, **remembered: Any) -> Tensor:
        if model.training or self.temperature == 1:
            calm = self.calm if model.training else {}
            loss: Tensor = model(batch.ids, labels=batch.labels, **remembered, **calm)
            return loss
        assert isinstance(model, LanguageModel)
        hidden = model.read(batch.ids, **remembered)[:, self.context :]
        told = model.logits(hidden).float() / self.temperature
        return cross_entropy(told.flatten(0, 1), batch.labels.flatten(), reduction="sum")

    def _scores(self, nats: float, count: int, held: Table) -> dict[str, float]:
        # Of a text that whole pieces do not quite cover, the share that they do counts.
        size = held.facts["bytes"] * count / (len(held["text"].flat) - 1)
        bits = metrics.bits_per_byte(nats, size)
        return super()._scores(nats, count, held) | {"bits_per_byte": bits}


class NextTokenWithMemory(NextToken):
    """As :class:`NextToken`, of a model that remembers: pieces follow each other in lanes.

    After every ``forget`` pieces it begins with an empty memory, as it will when it is used.
    """

    def __init__(
        self,
        text: Ragged,
        held: Table | None,
        length: int,
        tokens: int,
        *,
        forget: int = 0,
        temperature: float = 1.0,
        calm: Mapping[str, float] | None = None,
    ) -> None:
        self.kept: list[Tensor] = []  # what each layer remembers of the piece before
        self.forget = forget
        super().__init__(text, held, length, tokens, temperature=temperature, calm=calm)

    def _plan(self, text: Ragged, shuffled: bool) -> Plan:
        total = len(text.flat) - 1
        rows = self.rows if shuffled else max(min(self.rows, total // self.length), 1)
        forget = self.forget if shuffled else 0
        return Lanes(total, self.length, rows, forget, shifted=shuffled)

    def loss(self, model: nn.Module, batch: TextBatch) -> Tensor:
        assert isinstance(model, LanguageModel)
        memories = model.remember()
        assert memories is not None
        if self.kept and not batch.first:
            for memory, kept in zip(memories.layers, self.kept, strict=True):
                memory.extend(kept.to(batch.ids.device))
        loss = self._loss(model, batch, memories=memories)
        self.kept = [memory.kept for memory in memories.layers if memory.kept is not None]
        return loss

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        before = self.state()
        scores = super().evaluate(model)  # its first piece forgets what was before
        self.load_state(before)
        return scores

    def state(self) -> dict[str, Any]:
        return {"kept": self.kept}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.kept = state["kept"]


# ------------------------------------------------------------ masked tokens, corrupted spans


class MaskedTokens(Pieces):
    """15% of the tokens of a piece are to be told from all others (section 3.1 of BERT's paper)."""

    share = 0.15

    def __init__(
        self,
        text: Ragged,
        held: Table | None,
        length: int,
        tokens: int,
        *,
        first: int,
        last: int,
        mask: int,
        vocabulary: int,
    ) -> None:
        self.first, self.last, self.mask, self.vocabulary = first, last, mask, vocabulary
        if length < 3:
            raise InputError(f"data.length = {length}, but [CLS] and [SEP] alone are 2 tokens.")
        super().__init__(text, held, length - 2, tokens * (length - 2) // length)

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        ids = self.text.slices(rows.rows, rows.longest[0])
        draw = torch.rand(ids.shape, device=ids.device, generator=random)
        how = torch.rand(ids.shape, device=ids.device, generator=random)
        other = torch.randint(self.vocabulary, ids.shape, device=ids.device, generator=random)
        count = max(round(self.share * ids.shape[1]), 1)
        chosen = draw <= draw.kthvalue(count, dim=1, keepdim=True).values
        # Eight in ten are masked, one is another token, one stays as it is.
        read = ids.where(~chosen | (how >= 0.8), self.mask)
        read = read.where(~chosen | (how < 0.8) | (how >= 0.9), other)
        ends = [ids.new_full((len(ids), 1), token) for token in (self.first, self.last)]
        nothing = ids.new_full((len(ids), 1), NOTHING)
        labels = ids.where(chosen, NOTHING)
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
    """Spans of a piece are cut out and are to be told in order (section 3.1.4 of T5's paper).

    Every row has as many spans and as many tokens in them as any other, so that nothing is padded.
    """

    share, mean = 0.15, 3

    def __init__(
        self,
        text: Ragged,
        held: Table | None,
        length: int,
        tokens: int,
        *,
        special: Special,
        sentinels: Sequence[int],
    ) -> None:
        self.special = special
        self.noise = max(round(self.share * length), 1)
        self.spans = max(round(self.noise / self.mean), 1)
        if self.spans > len(sentinels) or length <= self.noise:
            raise InputError(
                f"Pieces of {length} tokens have {self.spans} spans, but there are "
                f"{len(sentinels)} sentinel tokens (<extra_id_0> ...). Change data.length."
            )
        self.sentinels = torch.tensor(sentinels[: self.spans], device=text.flat.device)
        super().__init__(text, held, length, tokens)

    def prepare(self, rows: Rows, random: torch.Generator) -> Prepared:
        ids = self.text.slices(rows.rows, rows.longest[0])
        length, device = ids.shape[1], ids.device
        kept = _parts(len(ids), length - self.noise, self.spans, random, device)
        cut = _parts(len(ids), self.noise, self.spans, random, device)
        # A row is: kept, cut, kept, cut ... Each token's part is how many ended before it.
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
        """The kept tokens of each row, and a sentinel for each span cut out, in its place."""
        place = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        index = torch.arange(self.spans, device=ids.device).expand(len(ids), -1)
        # A sentinel stands where its span starts, before the first token of the span.
        span_start = (part[:, None] < 2 * index[..., None] + 1).sum(-1)
        tokens = torch.cat((self.sentinels.expand(len(ids), -1), ids), 1)
        order = torch.cat((2 * span_start - 1, 2 * place), 1)
        order = order.masked_fill(
            torch.cat((torch.zeros_like(index, dtype=torch.bool), ~keep), 1), 4 * ids.shape[1]
        )
        count = self.spans + (self.noise if noise else ids.shape[1] - self.noise)
        return tokens.gather(1, order.argsort(dim=1, stable=True)[:, :count])

    def loss(self, model: nn.Module, batch: PairBatch) -> Tensor:
        loss: Tensor = model(batch.source, batch.target, padding=batch.padding, labels=batch.labels)
        return loss


def _parts(
    rows: int, total: int, count: int, random: torch.Generator, device: torch.device
) -> Tensor:
    """``total`` as ``count`` parts of at least 1, drawn evenly among all ways: [rows, count]."""
    draw = torch.rand(rows, total - 1, device=device, generator=random)
    cuts = draw.argsort(1)[:, : count - 1].sort(1).values + 1
    edges = [cuts.new_zeros(rows, 1), cuts, cuts.new_full((rows, 1), total)]
    return torch.cat(edges, 1).diff(dim=1)
