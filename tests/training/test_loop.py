"""Killed at any moment and resumed, a run ends with the same bytes as one left alone."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from helpers.training_data import TASKS, bytes_of, recipe_of, toml, write_data
from helpers.training_processes import TrainingProcesses, wait_for_a_step, wait_for_changes
from regard.checkpoints.folders import DamageWarning
from regard.data import encoding
from regard.data.batches import Batch, Epoch, Feed
from regard.data.schema import OLD_KEYS
from regard.data.tables import Ragged, Table
from regard.decoding.strategies import Beam
from regard.errors import InputError
from regard.evaluation.losses import SpecialTokens
from regard.models.bundle import open_bundle
from regard.models.conversion import convert
from regard.models.gpt2 import GPT2, GPT2Config
from regard.models.transformer import Transformer, TransformerConfig
from regard.models.transformer_xl import TransformerXL, TransformerXLConfig
from regard.text.tokenizer import Tokenizer
from regard.training import tokenizing
from regard.training.attention_log import AttentionWarning
from regard.training.loop import Pace, Progress, Trainer
from regard.training.objectives import Pairs
from regard.training.optimizer import adamw, rate_at
from regard.training.processes import Processes
from regard.training.recipe import Recipe, Schedule, parse_recipe
from regard.training.run import Result, train
from regard.training.saving import OLD_WEIGHTS, Keeper
from regard.training.seeds import seed_all


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny models: threads would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_data(tmp_path)
    return tmp_path


def run(raw: dict[str, Any], resume: bool = False, **settings: Any) -> Result:
    names = {name.replace("__", "."): value for name, value in settings.items()}
    return train(parse_recipe(raw, names), resume=resume)


def log_of(result: Result) -> list[dict[str, Any]]:
    lines = (result.folder / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


# ----------------------------------------------------------------------------- what is learned


@pytest.mark.parametrize(("task", "kind"), TASKS)
def test_every_task_is_learned_evaluated_and_loaded_again(
    folder: Path, task: str, kind: str
) -> None:
    raw = recipe_of(folder, task, kind)
    result = run(raw, schedule__steps=40, evaluation__every=20, saving__every=20)
    losses = [row["loss"] for row in log_of(result) if "loss" in row]
    assert losses[-1] < 0.93 * losses[0]
    assert result.finished
    assert result.step == 40
    scores = json.loads((result.folder / "scores.json").read_text(encoding="utf-8"))
    assert scores == result.scores
    expected = {"question answering": "f1", "language modelling": "bits_per_byte"}
    assert expected.get(task, "perplexity") in scores
    model = regard.load(result.folder / "model")
    text = Tokenizer.load(result.folder / "model")
    assert len(text) == model.config.vocabulary
    saved = Keeper(result.folder / "checkpoints").load(40).state["model"]
    assert all(torch.equal(saved[name], tensor) for name, tensor in model.state_dict().items())


def test_an_average_of_none_is_the_best_checkpoint(folder: Path) -> None:
    raw = recipe_of(folder, "summarization", "t5")
    result = run(raw, schedule__steps=6, evaluation__every=3, saving__average=0)
    keeper = Keeper(result.folder / "checkpoints")
    best = keeper.load(keeper.best()).state["model"]
    model = regard.load(result.folder / "model")
    assert all(torch.equal(best[name], tensor) for name, tensor in model.state_dict().items())


def test_a_trained_model_is_used_as_it_was_evaluated(folder: Path) -> None:
    raw = recipe_of(folder, "summarization", "t5")
    for part in ("train", "valid"):
        raw["data"][part] = [{**source, "prefix": "shorten: "} for source in raw["data"][part]]
    way = {
        "metric": "rouge-1",
        "num_beams": 3,
        "length_penalty": 0.5,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 3,
    }
    raw["evaluation"] |= way
    result = run(raw, schedule__steps=2, saving__every=2)
    used = convert(result.folder / "model", folder / "converted")
    one = open_bundle(used, "summarize")
    assert one.prefix("summarization") == "shorten: "
    assert one.settings("summarization").strategy() == Beam(
        3, 0.5, no_repeat_ngram_size=2, min_new_tokens=3
    )


@pytest.mark.parametrize("kind", ["transformer", "t5"])
def test_texts_are_prepared_in_use_as_they_were_in_training(folder: Path, kind: str) -> None:
    raw = recipe_of(folder, "translation", kind)
    raw["data"]["prepare"] = ["normalise", "lowercase", "words"]
    result = run(raw, schedule__steps=2, saving__every=2)
    model = result.folder / "model"
    one, two = regard.translate(["The  Cat\u00a0sat.", "the cat sat ."], model=model)
    assert one.attended.keys == two.attended.keys
    assert one.text == two.text
    found = open_bundle(model, "translate")
    assert found.prepared("A  B.", "translation") == "a b ."
    assert found.prepared("A  B.", "summarization") == "A  B."


def test_a_tokenizer_that_does_not_fit_is_refused(folder: Path) -> None:
    raw = recipe_of(folder)
    with pytest.raises(InputError, match="is not for transformer; choose bpe or unigram"):
        run(raw, tokenizer__kind="wordpiece")
    with pytest.raises(
        InputError, match=r"^tokenizer\.size must be a whole number from \d+ to \d+"
    ):
        run(raw, tokenizer__size=20)


@pytest.mark.slow
def test_a_translation_that_is_easy_is_learned_to_the_end(folder: Path) -> None:
    raw = recipe_of(folder)
    rows = [f"{word}\t{word.upper()}" for word in ("red", "green", "blue", "cat", "dog", "bird")]
    for part in ("train", "valid"):
        (folder / f"{part}.tsv").write_text("\n".join(rows * 4), encoding="utf-8")
    raw["evaluation"] |= {"metric": "chrf", "every": 0}
    raw["model"]["config"]["dropout"] = 0.0
    result = run(raw, schedule__steps=120, schedule__rate=0.02, saving__every=120)
    assert result.scores["chrf"] == pytest.approx(100)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_lower_precision_learns_and_keeps_its_weights_in_full(folder: Path, precision: str) -> None:
    result = run(recipe_of(folder), precision=precision, schedule__steps=20)
    losses = [row["loss"] for row in log_of(result) if "loss" in row]
    assert losses[-1] < losses[0]
    model = regard.load(result.folder / "model")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


# -------------------------------------------------------------------------------- accumulation


class Fixed:
    """A plan of batches as they are given."""

    def __init__(self, batches: list[list[int]], lengths: torch.Tensor) -> None:
        self.batches, self.lengths = batches, lengths

    def epoch(self, seed: int, number: int) -> Epoch:
        found, start = [], 0
        for rows in self.batches:
            longest = tuple(self.lengths[rows].amax(0).tolist())
            even = len(set(self.lengths[rows, 0].tolist())) == 1
            found.append(Batch(start, start + len(rows), longest, even))
            start += len(rows)
        return Epoch(torch.tensor([row for rows in self.batches for row in rows]), found)


def stepped(folder: Path, batches: list[list[int]], **settings: Any) -> Trainer:
    """A trainer after one step over all batches."""
    random_ids = random.Random(0)
    lengths = [(3, 9), (3, 2), (5, 1), (2, 7), (8, 8)]
    sides = [
        Ragged.of([[random_ids.randint(3, 19) for _ in range(pair[side])] for pair in lengths])
        for side in (0, 1)
    ]
    table = Table({"source": sides[0], "target": sides[1]}, {})
    seed_all(0)
    model = Transformer(
        TransformerConfig(
            vocabulary=20, dim=16, depth=1, decoder_depth=1, heads=2, decoder_heads=2, inner=32,
            decoder_inner=32, dropout=0.0, pad_token=1, start_token=1, end_token=0,
        )
    )  # fmt: skip
    names = {name.replace("__", "."): value for name, value in settings.items()}
    recipe = parse_recipe(recipe_of(folder), {"batch.accumulate": len(batches), **names})
    objective = Pairs(table, SpecialTokens(pad=1, start=1, end=0), 1000, smoothing=0.1)
    feed = Feed(Fixed(batches, table.lengths), 0, torch.device("cpu"))
    keeper = Keeper(folder / "checkpoints")
    trainer = Trainer(model.train(), objective, None, feed, keeper, recipe, lambda row: None, {})
    trainer.step()
    return trainer


def test_accumulated_batches_of_unequal_lengths_are_one_big_batch(folder: Path) -> None:
    whole = stepped(folder, [[0, 1, 2, 3, 4]], optimizer__clip=0.0)
    parts = stepped(folder, [[0], [1, 2], [3, 4]], optimizer__clip=0.0)
    # Averaging the means of the three would be off by a lot: they have 9, 3 and 15 targets.
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, atol=2e-7, rtol=1e-5)


def test_gradients_are_clipped_and_matrices_alone_decay(folder: Path) -> None:
    trainer = stepped(folder, [[0, 1, 2, 3, 4]], optimizer__clip=0.01, optimizer__weight_decay=0.5)
    gradients = [p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]
    assert float(torch.cat(gradients).norm()) == pytest.approx(0.01, rel=1e-3)
    decays = {
        parameter.dim() > 1: group["weight_decay"]
        for group in trainer.optimizer.param_groups
        for parameter in group["params"]
    }
    assert decays == {True: 0.5, False: 0.0}


def test_embeddings_may_move_at_a_rate_of_their_own(folder: Path) -> None:
    names = {"optimizer.embedding_rate": 2.0}
    recipe = parse_recipe(recipe_of(folder, "language modelling", "transformer-xl"), names)
    sizes = {"vocabulary": 20, "cutoffs": (8,), **recipe.model.config}
    for model, table in (
        (TransformerXL(TransformerXLConfig(**sizes)), "embedding.tables."),
        (GPT2(GPT2Config(vocabulary=20, dim=16, depth=1, heads=2)), "tokens.weight"),
    ):
        optimizer = adamw(model, recipe, torch.device("cpu"))
        sizes = {p: group["size"] for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in model.named_parameters():
            assert sizes[parameter] == (2.0 if name.startswith(table) else 1.0), name


def test_rates_rise_and_fall_as_they_should() -> None:
    cosine = Schedule(steps=110, rate=2.0, warmup=10, shape="cosine", floor=0.1)
    assert [rate_at(step, cosine) for step in (1, 5, 10)] == [0.2, 1.0, 2.0]
    assert rate_at(60, cosine) == pytest.approx(1.1)
    assert rate_at(110, cosine) == pytest.approx(0.2)
    linear = replace(cosine, shape="linear", floor=0.0)
    assert rate_at(60, linear) == pytest.approx(1.0)
    assert rate_at(99, replace(cosine, shape="constant")) == 2.0
    assert rate_at(4, Schedule(steps=9, rate=1.0)) == 0.5
    for shape, after in (
        ("constant", 2.0),
        ("linear", 1.98),
        ("inverse-sqrt", 2 * (10 / 11) ** 0.5),
    ):
        rates = [rate_at(step, replace(linear, shape=shape)) for step in (9, 10, 11)]
        assert rates == pytest.approx([1.8, 2.0, after]), shape


def test_a_step_is_taken_at_its_own_rate(folder: Path) -> None:
    trainer = stepped(folder, [[0, 1, 2]], schedule__rate=1.0, schedule__warmup=2)
    rates = []
    for _ in range(3):
        rates.append(trainer.optimizer.param_groups[0]["lr"])
        trainer.step()
    assert rates == pytest.approx([0.5, 1.0, (2 / 3) ** 0.5])


@pytest.mark.parametrize(("ema", "decay"), [(0.9, 1 / 11), (0.05, 0.05)])
def test_the_running_mean_soon_forgets_the_initial_weights(
    folder: Path, ema: float, decay: float
) -> None:
    trainer = stepped(folder, [[0, 1, 2]], optimizer__ema=ema)
    before = {name: mean.clone() for name, mean in trainer.ema.items()}
    trainer.step()
    for name, now in trainer.model.state_dict().items():
        expected = decay * before[name] + (1 - decay) * now
        torch.testing.assert_close(trainer.ema[name], expected)


def test_the_running_mean_is_what_is_evaluated_and_kept(folder: Path) -> None:
    result = run(recipe_of(folder), optimizer__ema=0.9)
    state = Keeper(result.folder / "checkpoints").load(12).state
    model = regard.load(result.folder / "model").state_dict()
    assert all(torch.equal(model[name], tensor) for name, tensor in state["ema"].items())
    assert not torch.equal(state["ema"]["tokens.weight"], state["model"]["tokens.weight"])


def test_checkpoints_are_averaged_into_the_finished_model(folder: Path) -> None:
    result = run(recipe_of(folder), saving__average=2)
    keeper = Keeper(result.folder / "checkpoints")
    states = [keeper.load(step).state["model"]["tokens.weight"] for step in (9, 12)]
    mean = ((states[0].double() + states[1].double()) / 2).float()
    assert torch.equal(regard.load(result.folder / "model").state_dict()["tokens.weight"], mean)


def test_training_stops_when_nothing_gets_better(folder: Path) -> None:
    raw = recipe_of(folder)
    result = run(raw, schedule__rate=0.0, evaluation__every=2, evaluation__patience=3)
    assert result.finished
    assert result.step == 8
    assert run(raw, resume=True, schedule__rate=0.0, evaluation__every=2,
               evaluation__patience=3).step == 8  # fmt: skip


def test_heads_that_go_wrong_are_told_of(folder: Path) -> None:
    raw = recipe_of(folder)
    with pytest.warns(AttentionWarning) as caught:
        result = run(raw, watching__every=4, watching__min_entropy=50.0, watching__max_logit=-50.0)
    texts = {str(warning.message) for warning in caught}
    assert len(texts) == len(caught) == 12  # two heads of three layers, each twice, each once
    assert any("Head 1 of decoder.blocks.0.cross has collapsed" in text for text in texts)
    assert any("Head 0 of encoder.blocks.0.attention has large scores" in text for text in texts)
    seen = [row["attention"] for row in log_of(result) if "attention" in row]
    assert len(seen) == 3
    assert len(seen[0]["encoder.blocks.0.attention"]["entropy"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize(("task", "kind"), [TASKS[0], TASKS[4]])
def test_watching_changes_nothing(folder: Path, task: str, kind: str) -> None:
    raw = recipe_of(folder, task, kind)
    one = run(raw)
    other = run(raw, watching__every=1, output=str(folder / "watched"))
    assert bytes_of(one.folder) == bytes_of(other.folder)


def test_a_loss_that_is_no_number_stops_before_it_is_saved(folder: Path) -> None:
    raw = recipe_of(folder)
    with pytest.raises(InputError, match=r"the loss is (nan|inf).*a lower schedule.rate"):
        run(raw, schedule__rate=1e30, optimizer__clip=0.0, saving__every=12, evaluation__every=12)
    assert Keeper(folder / "run" / "checkpoints").steps() == []


def test_a_gradient_that_is_no_number_stops_before_it_is_saved(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loss, steps = Pairs.loss, iter(range(100))

    def broken(self: Pairs, model: Any, batch: Any) -> Tensor:
        found = loss(self, model, batch)
        if next(steps) == 2:  # a finite loss, with an infinite slope
            found = found + (model.tokens.weight.sum() * 0).sqrt()
        return found

    monkeypatch.setattr(Pairs, "loss", broken)
    with pytest.raises(InputError, match=r"By step 3 the loss is [\d.]+ and .* norm (nan|inf)"):
        run(recipe_of(folder))
    assert Keeper(folder / "run" / "checkpoints").steps() == []


def test_validation_data_are_checked_before_the_first_step(folder: Path) -> None:
    raw = recipe_of(folder, "span corruption", "t5")
    (folder / "valid.txt").write_text("too short", encoding="utf-8")
    with pytest.raises(InputError, match=r"data.valid is too short: .*lower data\.length"):
        run(raw, evaluation__every=0)
    assert "step" not in log_of(Result(folder / "run", 0, False, {}, 0))[-1]


def test_a_metric_that_is_not_installed_is_missed_before_the_first_step(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    raw = recipe_of(folder)
    with pytest.raises(InputError, match=r"pip install 'regard\[training\]'"):
        run(raw, evaluation__metric="bleu")
    assert not (folder / "run").exists()


def test_a_cached_table_is_not_let_through_by_an_earlier_run(folder: Path) -> None:
    with (folder / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("no tab here\n" * 40)
    raw = recipe_of(folder)
    run(raw, data__bad=1.0)
    with pytest.raises(InputError, match=r"25\.00% of the lines are bad"):
        run(raw, output=str(folder / "second"))


@pytest.mark.slow
def test_bad_lines_are_in_the_log_with_their_places(folder: Path) -> None:
    with (folder / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("no tab here\n")
    raw = recipe_of(folder)
    with pytest.raises(InputError, match=r"train\.tsv:121"):
        run(raw)
    for name in ("first", "second"):  # the second finds its tokens in the cache
        result = run(raw, data__bad=0.1, output=str(folder / name))
        row = next(row for row in log_of(result) if row.get("data") == "train")
        assert row["bad"] == [[str(folder / "train.tsv"), 121, "fewer than 2 columns"]]


def test_merges_are_dropped_otherwise_each_epoch_and_say_the_same(folder: Path) -> None:
    raw = recipe_of(folder)
    raw["tokenizer"] |= {"dropout": 0.5, "variants": 3}
    recipe = parse_recipe(raw)
    text = tokenizing.tokenizer(recipe, folder / "tokenizer")
    table, digest = encoding.table(recipe.data, "train", recipe.task, text, recipe.tokenizer)
    assert len(table) == 3 * 120
    assert encoding.table(recipe.data, "train", recipe.task, text, recipe.tokenizer)[1] == digest
    source = table["source"]
    flat, starts = source.flat.tolist(), source.starts.tolist()
    rows = [flat[starts[n] : starts[n + 1]] for n in range(360)]
    lines = (folder / "train.tsv").read_text(encoding="utf-8").splitlines()
    for row in range(120):
        cuts = [rows[row], rows[row + 120], rows[row + 240]]
        assert {text.decode(cut) for cut in cuts} == {lines[row].split("\t")[0]}
    assert sum(rows[row] != rows[row + 120] for row in range(120)) > 90
    assert sum(rows[row + 120] != rows[row + 240] for row in range(120)) > 90
    plan = Pairs(table, SpecialTokens(pad=1, start=1, end=0), 256).plan
    for number in range(4):
        part = number % 3
        assert sorted(plan.epoch(0, number).rows.tolist()) == list(
            range(120 * part, 120 * part + 120)
        )
    assert len(encoding.table(recipe.data, "valid", recipe.task, text, recipe.tokenizer)[0]) == 16
    raw["tokenizer"]["kind"] = "unigram"
    unigram = tokenizing.tokenizer(parse_recipe(raw), folder / "unigram")
    bpe = parse_recipe(raw)
    with pytest.raises(InputError, match=r"needs BPE, but this tokenizer is a Unigram"):
        encoding.table(bpe.data, "train", bpe.task, unigram, bpe.tokenizer)


@pytest.mark.slow
def test_starting_from_a_model(folder: Path) -> None:
    first = run(recipe_of(folder, "masked language modelling", "bert"))
    raw = recipe_of(folder, "question answering", "bert")
    raw["model"] = {"kind": "bert", "start": str(first.folder / "model")}
    result = run(raw, output=str(folder / "answers"), schedule__rate=0.0, schedule__steps=1)
    before = regard.load(first.folder / "model").state_dict()
    after = regard.load(result.folder / "model").state_dict()
    name = "encoder.tokens.weight"
    assert torch.equal(before[name], after[name])
    raw["model"]["config"] = {"dim": 8}
    with pytest.raises(InputError, match="leave one of them out"):
        run(raw, output=str(folder / "other"))


def test_a_run_whose_data_are_missing_leaves_no_folder_behind(folder: Path) -> None:
    recipe = parse_recipe(recipe_of(folder), {"data.train.0.files": ["nowhere.tsv"]})
    with pytest.raises(InputError, match=r"nowhere\.tsv"):
        train(recipe)
    assert not (folder / "run").exists()


def test_unknown_sizes_are_refused_with_the_nearest(folder: Path) -> None:
    raw = recipe_of(folder)
    raw["model"]["config"]["dropuot"] = 0.1
    with pytest.raises(
        InputError, match=r"model.config.dropuot. Did you mean model.config.dropout"
    ):
        run(raw)


# ------------------------------------------------------------------- interrupted and resumed

KILLS = int(os.environ.get("REGARD_KILLS", "15"))  # more for a long run


def long_recipe(folder: Path, kind: str) -> dict[str, Any]:
    """Dropout of units and merges, a running mean, accumulation and averaging: all with state."""
    task = {"transformer-xl": "language modelling", "bert": "masked language modelling"}
    raw = recipe_of(folder, task.get(kind, "translation"), kind)
    if kind == "transformer":
        raw["tokenizer"] |= {"dropout": 0.3, "variants": 3}
    raw["optimizer"] |= {"ema": 0.9, "decay": 0.01}
    raw["batch"] |= {"accumulate": 2}
    raw["schedule"]["steps"] = 30
    raw["saving"] = {"every": 2, "minutes": 0, "keep_last": 3, "average": 3}
    raw["evaluation"] = {"every": 5}
    return raw


@pytest.mark.slow
def test_a_transformer_xl_with_a_context_and_all_its_dropout_resumes_to_the_byte(
    folder: Path,
) -> None:
    raw = recipe_of(folder, "language modelling", "transformer-xl")
    raw["model"] |= {"variational_dropout": True}
    raw["model"]["config"] |= {"div_val": 1, "projection_dropout": 0.2, "word_dropout": 0.2}
    raw["data"] |= {"length": 32, "context": 20}
    raw["optimizer"] |= {"activation": 0.2, "slowness": 0.1, "embedding_rate": 2.0, "ema": 0.9}
    raw["evaluation"] |= {"temperature": 1.1}
    whole = run(raw)
    losses = [row["loss"] for row in log_of(whole) if "loss" in row]
    assert losses[-1] < losses[0]
    expected = bytes_of(folder / "run")
    shutil.rmtree(folder / "run" / "checkpoints" / "step-0000000012")
    shutil.rmtree(folder / "run" / "model")
    run(raw, resume=True)
    assert bytes_of(folder / "run") == expected


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["transformer", "transformer-xl", "bert"])
def test_killed_at_any_moment_the_end_is_the_same_to_the_byte(
    folder: Path, processes: TrainingProcesses, kind: str
) -> None:
    kills, choose, rounds, resumed = -(-KILLS // 3), random.Random(kind), 0, 0
    raw = long_recipe(folder, kind)
    if kind == "bert":  # WordPiece is trained otherwise in each process: that is not tested here
        lines = (folder / "train.txt").read_text(encoding="utf-8").splitlines()
        Tokenizer.train_wordpiece(lines, size=300).save(folder / "tokenizer")
        raw["tokenizer"] = {"start": str(folder / "tokenizer")}
    expected = bytes_of(processes.train(raw))
    assert len(expected) > 20
    killed = 0
    while killed < kills or not resumed:  # on a busy machine most kills come before a checkpoint
        rounds += 1
        assert rounds < 10 * kills, "no run continued from a checkpoint"
        output = folder / f"run-{rounds}"
        raw["output"] = str(output)
        while True:
            [child] = processes.start("train", 0, recipe=raw, resume=True)
            if killed < kills + rounds - 1:
                if killed % 4:  # most while it trains, some while it starts
                    wait_for_a_step(output / "log.jsonl", processes.ended)
                wait_for_changes(output, choose.randrange(12), processes.ended)
                os.kill(child, signal.SIGKILL)
            [status] = processes.wait()
            killed += status == -signal.SIGKILL
            if status == 0:
                break
            assert status == -signal.SIGKILL, processes.stderr()
        found = bytes_of(folder / f"run-{rounds}")
        assert found.keys() == expected.keys()
        for name, data in found.items():
            assert data == expected[name], f"{name} differs after {killed} kills"
        resumed += (folder / f"run-{rounds}" / "log.jsonl").read_text().count('"resumed"')


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_asked_to_stop_it_saves_leaves_and_goes_on(
    folder: Path, processes: TrainingProcesses, number: signal.Signals
) -> None:
    raw = long_recipe(folder, "transformer")
    raw["saving"] = {"every": 60, "minutes": 0, "keep_last": 1}
    raw["evaluation"] = {"every": 0}
    raw["schedule"]["steps"] = 60
    raw["watching"] = {"every": 1}  # the log tells of every step then
    expected = bytes_of(processes.train(raw))
    raw["output"] = str(folder / "stopped")
    [child] = processes.start("train", 0, recipe=raw, resume=False)
    log = folder / "stopped" / "log.jsonl"
    wait_for_a_step(log, processes.ended, b'"step"')
    os.kill(child, number)
    assert processes.wait() == [3]
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    assert rows[-1]["interrupted"] == number.name
    step = rows[-1]["step"]
    assert 0 < step < 60
    assert Keeper(folder / "stopped" / "checkpoints").steps() == [step]
    assert bytes_of(processes.train(raw, resume=True)) == expected


def test_a_damaged_checkpoint_is_passed_over_loudly_and_the_end_is_the_same(folder: Path) -> None:
    raw = recipe_of(folder)
    whole = bytes_of(run(raw).folder)
    checkpoints = folder / "run" / "checkpoints"
    shutil.rmtree(folder / "run" / "model")
    weights = checkpoints / "step-0000000012" / "optimizer.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"?")
    with pytest.warns(DamageWarning, match="step-0000000012.*Continuing from step 9"):
        result = run(raw, resume=True)
    resumed = [row for row in log_of(result) if "resumed" in row]
    assert [(row["step"], row["resumed"]) for row in resumed] == [(9, "step-0000000009")]
    assert bytes_of(result.folder) == whole


def test_a_run_goes_on_only_as_it_began(folder: Path) -> None:
    raw = recipe_of(folder)
    run(raw)
    with pytest.raises(InputError, match="holds the checkpoints of an earlier run"):
        run(raw)
    with pytest.raises(InputError, match=r"schedule.rate = 0.01, but now it is 0.02"):
        run(raw, resume=True, schedule__rate=0.02)
    with (folder / "train.tsv").open("a", encoding="utf-8") as file:
        file.write("a\tb\n")
    with pytest.raises(InputError, match="was made with tokens"):
        run(raw, resume=True)


def older(folder: Path, forget: Callable[[dict[str, Any]], None]) -> None:
    """The checkpoints of a run as an earlier version would have written them."""
    keeper = Keeper(folder / "checkpoints", last=9)
    for step in keeper.steps():
        saved = keeper.load(step)
        forget(saved.state)
        shutil.rmtree(saved.folder)
        keeper.save(step, saved.state, score=saved.score)


def test_a_key_newer_than_a_checkpoint_counts_as_its_default(folder: Path) -> None:
    raw = recipe_of(folder)
    whole = run(raw, output=str(folder / "whole")).folder
    run(raw, schedule__steps=6)

    def forget(state: dict[str, Any]) -> None:
        fingerprint = state["fingerprint"]
        fingerprint["schedule.steps"] = 12
        del fingerprint["cuda_graphs"], fingerprint["optimizer.scale_by_initial_rms"]
        for source in fingerprint["data.train"]:
            del source["reverse"], source["dataset"]
        fingerprint["watching.min_entropy"] = 3.0  # it may change by now, which once it might not
        for group in state["optimizer"]["groups"]:
            del group["size"]

    older(folder / "run", forget)
    resumed = run(raw, resume=True).folder
    assert '"resumed": "step-0000000006"' in (resumed / "log.jsonl").read_text()
    assert bytes_of(resumed / "model") == bytes_of(whole / "model")
    for settings, words in (
        (
            {"optimizer__scale_by_initial_rms": True},
            "optimizer.scale_by_initial_rms = False, but now it is True",
        ),
        ({"data__train__0__reverse": True}, "data.train = .* but now it is"),
        ({"model__config__dropout": 0.3}, "no model.config.dropout, but now it is 0.3"),
    ):
        with pytest.raises(InputError, match=words):
            run(raw, resume=True, **settings)
    del raw["model"]["config"]["inner"]
    with pytest.raises(InputError, match=r"model.config.inner = 32, but now it is not given"):
        run(raw, resume=True)


# A recipe by the earlier names of its keys, for each of the three kinds of data.
OLD_RECIPES: dict[tuple[str, str], dict[str, dict[str, Any]]] = {
    ("translation", "transformer"): {
        "optimizer": {"smoothing": 0.1, "agreement": 1.0, "decay": 0.1},
        "evaluation": {"every": 6, "metric": "chrf", "beam": 2, "no_repeat": 3, "least": 1},
    },
    ("question answering", "bert"): {"evaluation": {"every": 6, "always": True}},
    ("language modelling", "transformer-xl"): {
        "data": {"forget": 2, "length": 16},
        "optimizer": {"activation": 0.5, "slowness": 0.5},
        "model": {"locked": True},
    },
}


@pytest.mark.parametrize(("task", "kind"), OLD_RECIPES)
def test_a_run_begun_with_earlier_names_resumes(folder: Path, task: str, kind: str) -> None:
    raw = recipe_of(folder, task, kind) | {"graphs": False, "optimizer": {}}
    raw["saving"] = {"every": 6, "minutes": 0, "last": 2}
    raw["watching"] = {"every": 5, "entropy": 0.0, "logit": 500.0}
    raw["data"] |= {"bad": 0.01}
    if kind == "transformer-xl":
        raw["model"]["config"] |= {"shrink": 2}
    for section, keys in OLD_RECIPES[task, kind].items():
        raw[section] |= keys
    begun = run(raw).folder
    expected = bytes_of(begun / "model")
    shutil.rmtree(begun / "model")
    shutil.rmtree(begun / "checkpoints" / "step-0000000012")
    names = {new: old for old, new in OLD_KEYS.items()}
    weights = {new: old for old, new in OLD_WEIGHTS.items()}

    def rename(state: dict[str, Any]) -> None:
        state["fingerprint"] = {names.get(n, n): v for n, v in state["fingerprint"].items()}
        assert state["fingerprint"]["graphs"] is False
        state["model"] = {weights.get(n, n): tensor for n, tensor in state["model"].items()}

    older(begun, rename)
    recipe = begun / "recipe.toml"
    recipe.write_text("\n".join(f"{key} = {toml(value)}" for key, value in raw.items()))
    resumed = train(recipe, resume=True).folder
    assert '"resumed": "step-0000000006"' in (resumed / "log.jsonl").read_text()
    assert bytes_of(resumed / "model") == expected


def test_a_recipe_object_takes_no_overrides(folder: Path) -> None:
    recipe = parse_recipe(recipe_of(folder))
    assert isinstance(recipe, Recipe)
    with pytest.raises(InputError, match="Overrides apply only to recipe files"):
        train(recipe, overrides=["seed=1"])
    with pytest.raises(InputError, match="There is no device"):
        train(replace(recipe, device="tpux"))
    with pytest.raises(InputError, match="no device 'meta'"):
        train(replace(recipe, device="meta"))


# --------------------------------------------------------------------------------- limited time


class Clock:
    """Time that passes only when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_steps_are_planned_by_the_pace_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, progress = Clock(), Progress()
    monkeypatch.setattr("regard.training.loop.time", clock)
    pace = Pace(Schedule(steps=10_000, minutes=2.0), progress, Processes())
    for step, seconds in ((50, 20.0), (100, 30.0)):  # the first 50 are slow
        progress.step, clock.now = step, 100.0 + seconds
        pace.plan()
    assert progress.steps == 100 + 90 * 5  # 90 s are left, at 5 steps a second
    progress.step, clock.now = 200, 100.0 + 40.0  # and then at 10
    pace.plan()
    assert progress.steps == 200 + 80 * 10  # as the later half of all steps went
    clock.now, progress.step = 100.0 + 119.0, 500
    assert pace.due
    pace.plan()
    assert 500 <= progress.steps <= 505
    clock.now = 100.0 + 130.0
    pace.plan()
    assert progress.steps == 500  # it is over
    again = Pace(Schedule(steps=10_000, minutes=2.0), progress, Processes())
    assert clock.now - again.begun == 130.0  # a resumed run has spent what it spent before


def test_a_resumed_run_forgets_its_slow_first_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, progress = Clock(), Progress(step=20_000, seconds=60.0)
    monkeypatch.setattr("regard.training.loop.time", clock)
    pace = Pace(Schedule(steps=10**6, minutes=11.0), progress, Processes())
    for seconds in (100.0, *(10.0,) * 7):  # of 50 steps each
        progress.step, clock.now = progress.step + 50, clock.now + seconds
        pace.plan()
    assert progress.seconds == 230.0
    assert progress.steps == 20_400 + 430 * 5


def time_steps(monkeypatch: pytest.MonkeyPatch, seconds: Callable[[int], float]) -> None:
    """Let each step take so long, by its number, and nothing else any time."""
    clock, step = Clock(), Trainer.step

    def timed(self: Trainer) -> Any:
        clock.now += seconds(self.progress.step)
        return step(self)

    monkeypatch.setattr("regard.training.loop.time", clock)
    monkeypatch.setattr(Trainer, "step", timed)


@pytest.mark.slow
def test_a_slow_second_step_does_not_end_a_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_steps(monkeypatch, lambda step: 12.0 if step < 2 else 0.01)  # kernels compile in two
    raw = recipe_of(folder)
    raw["schedule"] |= {"steps": 300, "minutes": 2.0}
    raw["evaluation"]["every"] = 0
    assert run(raw, saving__every=1000).step == 300


@pytest.mark.slow
def test_a_run_ends_in_time_with_its_rate_at_the_end(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    time_steps(monkeypatch, lambda step: 0.02)
    raw = recipe_of(folder)
    raw["schedule"] |= {"shape": "linear", "steps": 1_000_000, "minutes": 4 / 60}
    raw["evaluation"]["every"] = 0
    result = run(raw, saving__every=100)
    assert result.finished
    assert result.step == pytest.approx(200, abs=5)  # 4 seconds
    rows = [row for row in log_of(result) if "rate" in row]
    assert rows[-1]["step"] == result.step
    assert rows[-1]["rate"] < 0.05 * raw["schedule"]["rate"]
    assert [row["seconds"] for row in rows] == sorted(row["seconds"] for row in rows)
    assert regard.load(result.folder / "model").config.dim == 16
    resumed = run(raw, resume=True, saving__every=100)
    assert resumed.step == result.step  # there is no time left


def test_a_run_killed_between_checkpoints_goes_on_from_one_saved_by_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = recipe_of(folder) | {"saving": {"every": 1000, "minutes": 0}, "evaluation": {"every": 0}}
    raw["schedule"]["steps"] = 15
    raw["output"] = str(folder / "alone")
    expected = bytes_of(run(raw).folder)
    raw["output"] = str(folder / "run")
    deaths, steps = [8], []

    def seconds(step: int) -> float:
        steps.append(step)
        if step in deaths:
            deaths.remove(step)
            raise KeyboardInterrupt
        return 7.0

    time_steps(monkeypatch, seconds)
    with pytest.raises(KeyboardInterrupt):
        run(raw, saving__minutes=0.5)
    keeper = Keeper(folder / "run" / "checkpoints")
    assert keeper.steps() == [6]  # 30 s have passed in the fifth step
    assert keeper.in_turn() == []
    result = run(raw, resume=True, saving__minutes=0.7)
    assert steps == [*range(9), *range(6, 15)]
    assert [row["step"] for row in log_of(result) if "gradient" in row] == [6, 13, 15]
    assert bytes_of(result.folder) == expected


@pytest.mark.slow
def test_while_it_learns_some_examples_are_decoded_and_all_in_the_end(folder: Path) -> None:
    raw = recipe_of(folder)
    raw["data"]["test"] = raw["data"]["valid"]
    raw["evaluation"] = {"every": 6, "metric": "bleu", "examples": 2}
    some, every = [], []
    for examples, scores in ((2, some), (0, every)):
        raw["evaluation"]["examples"] = examples
        output = str(folder / f"run{examples}")
        result = run(raw | {"output": output}, schedule__steps=60, evaluation__every=30)
        scores += [row["scores"] for row in log_of(result) if "scores" in row]
        scores.append(result.scores)
    assert some[-1] == every[-1]
    assert some[:-1] != every[:-1]
    assert [row["loss"] for row in some] == [row["loss"] for row in every]
