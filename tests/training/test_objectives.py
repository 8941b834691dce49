"""What batches hold: no token lost in spans, masks where they should fall, answers in place."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from regard.data.batches import Feed, Plan
from regard.data.encoding import window_columns
from regard.data.records import Answer, Question
from regard.data.tables import Ragged, Table
from regard.errors import InputError
from regard.evaluation.losses import (
    PairBatch,
    SpecialTokens,
    answer_logits,
    move,
    summed_loss,
)
from regard.evaluation.scoring import AnswerScorer
from regard.layers.losses import IGNORED
from regard.mechanism.masks import Padding
from regard.models.bert import BertAnswering, BertConfig
from regard.models.gpt2 import GPT2, GPT2Config
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.transformer_xl import TransformerXL, TransformerXLConfig
from regard.text.tokenizer import Tokenizer
from regard.training.objectives import (
    Answers,
    MaskedTokens,
    NextToken,
    NextTokenWithMemory,
    Pairs,
    Spans,
    TextBatch,
)

CPU = torch.device("cpu")


def stream(count: int, low: int = 10, high: int = 50) -> Ragged:
    ids = torch.randint(low, high, (count,), generator=torch.Generator().manual_seed(0))
    return Ragged(ids.int(), torch.tensor([0, count]))


def batches(objective: Any, plan: Plan, count: int) -> list[Any]:
    feed, random = Feed(plan, 0, CPU), torch.Generator().manual_seed(0)
    return [objective.prepare(feed.next(), random) for _ in range(count)]


def test_pairs_are_shifted_padded_and_counted() -> None:
    table = Table(
        {
            "source": Ragged.of([[5, 6, 0], [7, 0], [8, 9, 0]]),
            "target": Ragged.of([[4, 0], [3, 4, 5, 0], [6, 0]]),
        },
        {},
    )
    objective = Pairs(table, SpecialTokens(pad=1, start=2, end=0), 1000)
    [prepared] = batches(objective, objective.plan, 1)
    batch, rows = prepared.batch, Feed(objective.plan, 0, CPU).next().rows.tolist()
    assert prepared.targets == 8
    for at, row in enumerate(rows):
        source = [[5, 6, 0], [7, 0], [8, 9, 0]][row]
        target = [[4, 0], [3, 4, 5, 0], [6, 0]][row]
        assert batch.source[at].tolist() == source + [1] * (3 - len(source))
        assert int(batch.padding.lengths[at]) == len(source)
        assert batch.labels[at].tolist() == target + [IGNORED] * (4 - len(target))
        assert batch.target[at, : len(target)].tolist() == [2, *target[:-1]]
        assert int(batch.target.min()) >= 0


def test_two_readings_of_a_pair_are_to_agree() -> None:
    source, target = [[5, 6, 0], [7, 0]], [[4, 0], [3, 5, 0]]
    table = Table({"source": Ragged.of(source), "target": Ragged.of(target)}, {})
    plain, agreeing = (
        Pairs(table, SpecialTokens(pad=1, start=2, end=0), 1000, smoothing=0.1, r_drop=weight)
        for weight in (0.0, 5.0)
    )
    [(batch, _)] = batches(plain, plain.plan, 1)

    def transformer(dropout: float) -> Transformer:
        torch.manual_seed(0)
        sizes = {"dim": 16, "depth": 1, "decoder_depth": 1, "heads": 2, "decoder_heads": 2}
        inner = {"inner": 32, "decoder_inner": 32}
        config = TransformerConfig(
            vocabulary=10,
            pad_token=1,
            start_token=2,
            end_token=0,
            dropout=dropout,
            **sizes,
            **inner,
        )
        return Transformer(config).train()

    model = transformer(0.0)
    # Without dropout both readings are one, and nothing is apart.
    assert agreeing.loss(model, batch).item() == pytest.approx(plain.loss(model, batch).item())

    model = transformer(0.3)
    torch.manual_seed(1)
    found = agreeing.loss(model, batch)
    torch.manual_seed(1)
    twice = Padding(torch.as_tensor(batch.padding.lengths).repeat(2))
    logits = model(batch.source.repeat(2, 1), batch.target.repeat(2, 1), padding=twice).double()
    labels = batch.labels.repeat(2, 1)
    told = cross_entropy(logits.transpose(1, 2), labels, reduction="sum", label_smoothing=0.1)
    one, two = logits.log_softmax(-1).chunk(2)
    there = batch.labels != IGNORED
    apart = kl_div(one[there], two[there], reduction="sum", log_target=True)
    apart += kl_div(two[there], one[there], reduction="sum", log_target=True)
    assert apart > 0.01
    # As the paper has it: both losses and 5 times the mean divergence; halved, for one pair.
    assert found.item() == pytest.approx((told + 5 * apart / 2).item() / 2, rel=1e-5)
    assert agreeing.loss(model.eval(), batch).item() == plain.loss(model, batch).item()


def test_spans_and_what_is_left_make_up_the_text_again() -> None:
    text = stream(4000)
    sentinels = list(range(99, 59, -1))
    objective = Spans(
        text, 64, 512, special=SpecialTokens(pad=0, start=0, end=1), sentinels=sentinels
    )
    rows = Feed(objective.plan, 0, CPU).next().rows
    for prepared in batches(objective, objective.plan, 1):
        batch = prepared.batch
        assert batch.padding is None
        assert prepared.targets == batch.labels.numel()
        assert torch.equal(batch.target[:, 1:], batch.labels[:, :-1])
        assert (batch.target[:, 0] == 0).all()
        lengths = set()
        for source, labels, start in zip(batch.source, batch.labels, rows.tolist(), strict=True):
            assert source[-1] == labels[-1] == 1
            spans: dict[int, list[int]] = {}
            for token in labels[:-1].tolist():
                if token in sentinels:
                    current = spans.setdefault(token, [])
                else:
                    current.append(token)
            assert list(spans) == sentinels[: objective.spans]
            whole: list[int] = []
            for token in source[:-1].tolist():
                whole += spans[token] if token in sentinels else [token]
            assert whole == text.flat[start : start + 64].tolist()
            assert sum(map(len, spans.values())) == objective.noise == 10
            lengths |= {len(span) for span in spans.values()}
        assert len(lengths) > 3  # of spans: they vary
    with pytest.raises(InputError, match="100 spans, but the tokenizer has 40 sentinel"):
        Spans(text, 2000, 2000, special=SpecialTokens(0, 0, 1), sentinels=sentinels)


def test_masked_tokens_are_a_share_and_fall_eight_one_one() -> None:
    text = stream(50_000)
    objective = MaskedTokens(text, 102, 20_000, first=2, last=3, mask=4, vocabulary=50)
    kinds = torch.zeros(3)
    for batch, targets in batches(objective, objective.plan, 2):
        assert (batch.ids[:, 0] == 2).all()
        assert (batch.ids[:, -1] == 3).all()
        chosen = batch.labels != IGNORED
        assert targets == chosen.sum()
        assert (chosen.sum(1) == 15).all()
        assert not chosen[:, [0, -1]].any()
        read, label = batch.ids[chosen], batch.labels[chosen]
        same, masked = (read == label).sum(), (read == 4).sum()
        kinds += torch.tensor([masked, len(read) - masked - same, same])
    shares = (kinds / kinds.sum()).tolist()
    # One in 50 of the others is the token itself, or the mask.
    assert shares == pytest.approx([0.8, 0.1, 0.1], abs=0.02)


def test_masked_rows_fit_their_batch() -> None:
    special = {"first": 2, "last": 3, "mask": 4, "vocabulary": 50}
    objective = MaskedTokens(stream(5000), 10, 4096, **special)
    [prepared] = batches(objective, objective.plan, 1)
    assert prepared.batch.ids.shape == (409, 10)
    with pytest.raises(InputError, match=r"data\.length = 2, but"):
        MaskedTokens(stream(5000), 2, 4096, **special)


def test_the_next_token_is_the_next_token() -> None:
    objective = NextToken(stream(1000), 16, 64)
    for batch, targets in batches(objective, objective.plan, 3):
        assert torch.equal(batch.ids[:, 1:], batch.labels[:, :-1])
        assert targets == batch.labels.numel()


def xl(memory: int) -> TransformerXL:
    torch.manual_seed(0)
    return TransformerXL(
        TransformerXLConfig(
            vocabulary=50, cutoffs=(), dim=16, embedding_dim=16, depth=2, heads=2, head_dim=8,
            inner=32, memory=memory, dropout=0.0,
        )
    ).eval()  # fmt: skip


def gpt2() -> GPT2:
    torch.manual_seed(0)
    return GPT2(
        GPT2Config(
            vocabulary=50,
            length=16,
            dim=16,
            depth=2,
            heads=2,
            dropout=0.0,
            attention_dropout=0.0,
            embedding_dropout=0.0,
        )
    ).eval()


@pytest.mark.parametrize("kind", ["gpt2", "xl"])
def test_the_context_of_a_piece_has_no_loss(kind: str) -> None:
    model = xl(memory=8) if kind == "xl" else gpt2()
    text = stream(41)
    pieces = NextToken(text, 8, 16, context=5)
    with torch.no_grad():
        nats, count = summed_loss(model, pieces.plan, CPU, pieces.prepare, pieces.loss)
        ids = text.flat.long()
        expected, starts = 0.0, pieces.plan.epoch(0, 0).rows.tolist()
        for start in starts:
            piece = ids[None, start : start + 9]
            logs = model(piece[:, :-1]).log_softmax(-1)[0, 5:]
            expected -= float(logs.gather(-1, piece[0, 6:, None]).sum())
    assert count == 3 * len(starts) > 20
    assert nats == pytest.approx(expected, rel=1e-5)


def test_large_and_changing_outputs_are_penalized() -> None:
    model, text = xl(memory=8), stream(41)
    penalties = {"activation": 0.5, "slowness": 2.0}
    plain, penalized = (
        NextToken(text, 8, 16, context=5, penalties=given) for given in ({}, penalties)
    )
    [(batch, count)] = batches(plain, plain.plan, 1)
    hidden = model.read(batch.ids)[:, 5:]
    size, change = hidden.square().mean(), hidden.diff(dim=1).square().mean()
    assert count == 2 * 3
    expected = plain.loss(model, batch) + count * (0.5 * size + 2 * change)
    torch.testing.assert_close(penalized.loss(model, batch), expected)


def test_memories_are_saved_and_taken_up_again() -> None:
    model, text = xl(memory=12), stream(200)
    whole, again = (NextTokenWithMemory(text, 8, 16) for _ in range(2))
    prepared = [part.batch for part in batches(whole, whole.plan, 5)]
    with torch.no_grad():
        for batch in prepared[:3]:
            whole.loss(model, batch)
        for _ in range(2):  # a state that was taken up and not yet used is still there
            again.load_state(whole.state())
            again.load_state(again.state())
        for batch in prepared[3:]:
            assert torch.equal(whole.loss(model, batch), again.loss(model, batch))


# ------------------------------------------------------------------------------------- answers

CONTEXT = "the cat sat on the mat and the dog sat on the log while the bird sang a song"


def text() -> Tokenizer:
    return Tokenizer.train_wordpiece([CONTEXT, "who sat where"] * 9, size=60)


def questions() -> list[Question]:
    asked = [
        Question(word, "who sat where", CONTEXT, (Answer(word, CONTEXT.index(word)),))
        for word in ("cat", "mat and the dog", "log", "song")
    ]
    return [*asked, Question("none", "who sat where", CONTEXT, ())]


@pytest.mark.parametrize("length", [16, 24, 64])
def test_answers_are_where_the_windows_say(length: int) -> None:
    words, asked = text(), questions()
    columns = window_columns(asked, words, length)
    flat, starts = columns["ids"].flat.tolist(), columns["ids"].starts.tolist()
    facts = columns["facts"].gather(torch.arange(len(starts) - 1), 5, 0).tolist()
    found: dict[int, set[str]] = {number: set() for number in range(len(asked))}
    seen: dict[int, set[int]] = {number: set() for number in range(len(asked))}
    for row, (number, split, offset, start, end) in enumerate(facts):
        ids = flat[starts[row] : starts[row + 1]]
        assert len(ids) <= length
        assert ids[0] == words.id("[CLS]")
        assert ids[split - 1] == ids[-1] == words.id("[SEP]")
        seen[number] |= set(range(offset, offset + len(ids) - split - 1))
        if start:
            found[number].add(words.decode(ids[start : end + 1]))
    whole = len(words.encode(CONTEXT, special=False).ids)
    assert all(covered == set(range(whole)) for covered in seen.values())
    for number, question in enumerate(asked):
        assert found[number] == {answer.text for answer in question.answers}


class Knows(torch.nn.Module):
    """A model that answers by heart: the logits say where the table says."""

    def __init__(self, answers: dict[tuple[int, ...], tuple[int, int]]) -> None:
        super().__init__()
        self.answers = answers
        self.weight = torch.nn.Parameter(torch.zeros(()))

    def forward(
        self, ids: torch.Tensor, *, token_types: torch.Tensor, padding: Padding | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        start, end = torch.zeros(ids.shape), torch.zeros(ids.shape)
        lengths = [ids.shape[1]] * len(ids) if padding is None else list(padding.lengths)
        for row, length in enumerate(lengths):
            first, last = self.answers[tuple(ids[row, : int(length)].tolist())]
            start[row, first] = end[row, last] = 9.0
        return start, end


@pytest.mark.parametrize("length", [20, 64])
def test_a_model_that_knows_every_answer_is_right_every_time(length: int) -> None:
    words, asked = text(), questions()[:-1]
    # Contexts of unequal length, so that batches are padded; each with its own words first.
    asked = [
        question._replace(
            context=f"{question.name} " * n + question.context, answers=(Answer(question.name, 0),)
        )
        for n, question in enumerate(asked, 1)
    ]
    asked.append(questions()[-1])
    table = Table(window_columns(asked, words, length), {})
    ids, facts = table["ids"], table["facts"].gather(torch.arange(len(table)), 5, 0).tolist()
    starts, flat = ids.starts.tolist(), ids.flat.tolist()
    answers = {
        tuple(flat[starts[row] : starts[row + 1]]): (start, end)
        for row, (_, _, _, start, end) in enumerate(facts)
    }
    scorer = AnswerScorer(asked, table, words, 200)
    model, calls = Knows(answers), []
    model.register_forward_hook(lambda *_: calls.append(1))
    scores = scorer(model)
    plan = Answers(table, 200, words.id("[PAD]")).plan
    assert len(calls) == len(Feed(plan, 0, CPU).batches)  # once each
    assert scorer.outputs == [*(question.name for question in asked[:-1]), ""]
    assert scores["exact"] == scores["f1"] == 100
    assert scores["loss"] < 0.01
    always = AnswerScorer(asked, table, words, 200, always_answer=True)
    always(Knows(answers))
    assert always.outputs[:-1] == scorer.outputs[:-1]
    assert always.outputs[-1]  # some words, where none would be right
    strict = AnswerScorer(asked, table, words, 200, threshold=math.inf)
    assert strict(Knows(answers))["f1"] == pytest.approx(100 / len(asked))
    assert not any(strict.outputs)


def test_answers_are_never_outside_the_context() -> None:
    words, asked = text(), questions()
    table = Table(window_columns(asked, words, 24), {})
    objective = Answers(table, 100, words.id("[PAD]"))
    model = BertAnswering(BertConfig(vocabulary=len(words), dim=8, depth=1, heads=2, inner=16))
    for batch, targets in batches(objective, objective.plan, 3):
        assert targets == 2 * len(batch.ids)
        start, end = answer_logits(model.eval(), batch)
        for row in range(len(batch.ids)):
            inside = batch.token_types[row].bool() & (
                batch.ids[row] > 4
            )  # above the special tokens
            inside[0] = True
            assert torch.equal(batch.possible[row], inside)
            assert (start[row, ~inside] < -1e30).all()
            assert (end[row, ~inside] < -1e30).all()
        assert torch.isfinite(objective.loss(model, batch))


def test_batches_move_as_wholes() -> None:
    ids, padding = torch.ones(2, 3), Padding(torch.tensor([1, 2]))
    there = move(PairBatch(ids, padding, ids, ids), torch.device("meta"))
    assert there.source.device.type == "meta"
    assert there.padding.lengths.device.type == "meta"
    assert move(TextBatch(ids, ids, first=True), CPU).first is True
