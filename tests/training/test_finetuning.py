"""Fine-tuning: the recipe for a file, the scores before and after, and what a run keeps."""

from __future__ import annotations

import io
import json
import shutil
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from helpers.command import PATIENCE, one_line, regard, started
from helpers.model_folders import LINES, edit
from regard import Tokenizer, load
from regard.data import encoding
from regard.errors import InputError
from regard.models.bundle import open_bundle
from regard.training import building, loop
from regard.training.finetuning import Tuned, finetune
from regard.training.folder import read_log
from regard.training.loop import SaveTimer
from regard.training.recipe import read_recipe
from regard.training.run import _Bar, train

PAIRS = [f"{LINES[n % 5]} {n}\t{LINES[(n + 1) % 5]} {n}" for n in range(40)]


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    file = tmp_path / "pairs.tsv"
    file.write_text("\n".join(PAIRS), encoding="utf-8")
    return file


def tuned(model: Path, file: Path, changes: tuple[str, ...] = (), **settings: Any) -> Tuned:
    folder = file.parent
    own = [f"data.cache={folder / 'cache'}", "schedule.rate=0.01", *changes]
    if file.suffix == ".tsv":
        own.append("evaluation.num_beams=1")
    settings = {"epochs": 0.2, "device": "cpu", "overrides": own, **settings}
    return finetune(str(model), file, folder / "run", **settings)


def test_a_translator_learns_from_pairs_and_keeps_what_its_files_say(
    made: Path, pairs: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(made / "translate", start)
    directions = [["eng", "fra"], ["eng", "deu"]]
    edit(start, task_specific_params={"translation": {"directions": directions}})
    edit(start, "generation_config.json", max_new_tokens=33)
    outcome = tuned(start, pairs, to="fr")
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    train_on, held_back = recipe.data.train[0], recipe.data.valid[0]
    assert train_on.prefix == held_back.prefix == ">>fra<< "
    assert (train_on.part[0], train_on.part[1], held_back.part[1]) == (0, held_back.part[0], 1000)
    assert outcome.result.finished
    assert outcome.result.step == recipe.schedule.steps
    assert outcome.metric == "bleu"
    assert outcome.before.keys() == outcome.result.scores.keys() >= {"bleu", "chrf", "loss"}
    assert outcome.result.scores["loss"] < outcome.before["loss"]
    bundle = open_bundle(tmp_path / "run" / "model", "translate")
    assert bundle.tasks["translation"]["directions"] == directions
    assert bundle.generation["max_new_tokens"] == 33
    read = [row["read"] for row in read_log(tmp_path / "run" / "log.jsonl") if "data" in row]
    assert sum(read) == len(PAIRS)
    assert read[1] == 4  # a tenth is held back


@pytest.mark.parametrize("name", ["summarize", "answer", "gpt2", "xl"])
def test_every_kind_of_model_has_its_kind_of_data(made: Path, tmp_path: Path, name: str) -> None:
    settings = dict[str, Any]()
    if name == "summarize":
        file = tmp_path / "a.jsonl"
        settings["fields"] = ("document", "summary")
        rows = [
            json.dumps(dict(zip(settings["fields"], p.split("\t"), strict=True))) for p in PAIRS
        ]
    elif name == "answer":
        file = tmp_path / "a.jsonl"
        rows = [
            json.dumps(
                {"id": str(n), "question": "who sat", "context": f"{n} the cat sat.",
                 "answers": [{"text": "cat", "start": len(f"{n} the ")}]}
            )
            for n in range(40)
        ]  # fmt: skip
    else:
        file, rows = tmp_path / "a.txt", LINES * 8
    file.write_text("\n".join(rows), encoding="utf-8")
    outcome = tuned(made / name, file, **settings)
    assert outcome.result.finished
    assert outcome.before.keys() == outcome.result.scores.keys()
    assert outcome.metric in outcome.before
    if file.suffix == ".txt":  # the end of a text is held back
        parts = [(tmp_path / "run" / f"{part}.txt").read_text() for part in ("train", "valid")]
        assert "".join(parts) == "\n".join(rows) + "\n"
        assert parts[1].count("\n") == 4


@pytest.mark.parametrize("name", ["translate", "gpt2"])
def test_lora_trains_and_saves_only_its_updates(
    made: Path, pairs: Path, tmp_path: Path, name: str
) -> None:
    settings: dict[str, Any] = {"lora": True}
    if name == "translate":
        settings["to"] = "fr"
    else:
        pairs = pairs.with_suffix(".txt")
        pairs.write_text("\n".join(LINES * 8), encoding="utf-8")
    outcome = tuned(made / name, pairs, **settings)
    folder = tmp_path / "run" / "model"
    assert not (folder / "model.safetensors").exists()
    said = json.loads((folder / "adapter_config.json").read_text())
    assert (said["r"], said["lora_alpha"]) == (8, 16)
    assert said["base_model_name_or_path"] == str(made / name)
    # A checkpoint holds no weight of the base.
    [newest] = sorted((tmp_path / "run" / "checkpoints").glob("step-*"))
    saved = load_file(newest / "model.safetensors")
    assert all(key.endswith((".lora_a", ".lora_b", "/output_bias")) for key in saved)
    # The adapter on its base is the model that was scored.
    recipe = read_recipe(tmp_path / "run" / "recipe.toml")
    text = Tokenizer.load(folder)
    table, _ = encoding.table(recipe.data, "valid", recipe.task, text, recipe.tokenizer)
    model = load(folder, dtype=torch.float32)
    with torch.no_grad():
        again = building.scorer(recipe, "valid", text, model, table)(model)
    assert again["loss"] == pytest.approx(outcome.result.scores["loss"], rel=1e-5)
    assert again["loss"] < outcome.before["loss"]
    # The run is extended from its checkpoint.
    longer = tuned(made / name, pairs, resume=True, epochs=0.4, minutes=0, **settings)
    assert longer.result.step > outcome.result.step
    assert longer.before == outcome.before
    settings["lora"] = False
    with pytest.raises(InputError, match="holds a run with --lora: add it, too"):
        tuned(made / name, pairs, resume=True, **settings)
    with pytest.raises(InputError, match=r"is an adapter, .*merge it first: regard convert"):
        tuned(folder, pairs, ("lora.rank=2",), resume=True, **settings)


def test_a_run_with_lora_needs_the_weights_that_it_began_with(
    made: Path, pairs: Path, tmp_path: Path
) -> None:
    start = tmp_path / "start"
    shutil.copytree(made / "translate", start)
    tuned(start, pairs, to="fr", lora=True)
    weights = load_file(start / "model.safetensors")
    save_file({key: tensor * 1.1 for key, tensor in weights.items()}, start / "model.safetensors")
    with pytest.raises(InputError, match=r"was made with weights of model\.start = "):
        tuned(start, pairs, to="fr", lora=True, resume=True, epochs=0.4)


def test_a_finished_run_is_extended_and_an_unfinished_one_is_not(
    made: Path, pairs: Path, tmp_path: Path
) -> None:
    first = tuned(made / "translate", pairs, to="fr")
    model = tmp_path / "run" / "model" / "model.safetensors"
    before = model.read_bytes()
    again = train(tmp_path / "run" / "recipe.toml", resume=True)
    assert again.step == first.result.step
    assert model.read_bytes() == before  # nothing was to be done
    longer = tuned(made / "translate", pairs, to="fr", epochs=0.4, minutes=0, resume=True)
    assert longer.result.step == first.result.step + 12
    assert longer.before == first.before
    assert model.read_bytes() != before
    with pytest.raises(InputError, match="run with another prefix of sources: >>fra<< , not >>deu"):
        tuned(made / "translate", pairs, to="de", resume=True)
    with pytest.raises(InputError, match="holds a run with another file: "):
        tuned(made / "translate", pairs.rename(tmp_path / "new.tsv"), to="fr", resume=True)
    recipe = tmp_path / "run" / "recipe.toml"
    (tmp_path / "new.tsv").rename(pairs)
    interrupt_after_two_steps(recipe, ["schedule.steps=90"])
    with pytest.raises(InputError, match=r"schedule\.steps = 90, .*only a finished run may get"):
        train(recipe, resume=True, overrides=["schedule.steps=91"])


def interrupt_after_two_steps(recipe: Path, changes: list[str]) -> None:
    step, taken = loop.Trainer.step, []

    def interrupting(self: loop.Trainer) -> Any:
        taken.append(self.progress.step)
        if len(taken) == 2:
            signal.raise_signal(signal.SIGINT)
        return step(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "step", interrupting)
        assert not train(recipe, resume=True, overrides=changes).finished


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["pairs.tsv"],
            "translates into deu, fra. Say which language the targets are in: --to deu",
        ),
        (["pairs.tsv", "--to", "es"], "has no tag for the language 'es'. It translates into"),
        (["no.tsv", "--to", "fr"], "There is no file"),
        (["pairs.csv", "--to", "fr"], "in a file whose name ends in .tsv or .jsonl."),
        (
            ["few.tsv", "--to", "fr"],
            "too few pairs for a fine-tune, which needs 20: 3 read, 0 bad.",
        ),
        (["same.tsv", "--to", "fr"], "All 30 records have one and the same source"),
        (["other.jsonl", "--to", "fr"], "Its fields are named by --fields, now source target."),
        (["pairs.tsv", "--to", "fr", "--resume"], "There is no run in"),
    ],
)
def test_mistakes_are_told_in_words_of_the_command_line(
    made: Path, pairs: Path, words: list[str], message: str
) -> None:
    folder = pairs.parent
    for name, rows in (
        ("few.tsv", PAIRS[:3]),
        ("same.tsv", ["one\tun"] * 30),
        ("pairs.csv", PAIRS),
    ):
        (folder / name).write_text("\n".join(rows), encoding="utf-8")
    row = json.dumps({"en": "one", "fr": "un"})
    (folder / "other.jsonl").write_text(f"{row}\n" * 30, encoding="utf-8")
    file, *options = words
    options += ["--output", str(folder / "run"), "--device", "cpu"]
    one_line(regard("finetune", made / "translate", folder / file, *options), message)
    assert not (folder / "run").exists()


def test_the_command_shows_scores_before_and_after(made: Path, pairs: Path) -> None:
    folder = pairs.parent
    words = [
        "finetune", made / "translate", pairs, "--to", "fr", "--output", folder / "run",
        "--epochs", "0.1", "--device", "cpu", "--set", f"data.cache={folder / 'cache'}",
        "--set", "evaluation.num_beams=1", "--set", "schedule.rate=0",
    ]  # fmt: skip
    shown = regard(*words)
    assert shown.returncode == 0, shown.stderr
    lines = shown.stdout.splitlines()
    assert lines[0].split() == ["score", "before", "after"]
    assert {line.split()[0] for line in lines[1:6]} >= {"loss", "bleu", "chrf"}
    for line in lines[1:5]:  # without a learning rate, nothing changes
        _, before, after = line.split()
        assert before == after
    assert "did not get better (bleu)" in shown.stdout
    assert f"The model is in {folder / 'run' / 'model'}" in shown.stdout
    one_line(regard(*words), "holds an earlier run. Continue or extend it with --resume")


@pytest.mark.processes
def test_ctrl_c_keeps_what_is_done_and_says_how_to_continue(made: Path, pairs: Path) -> None:
    folder = pairs.parent
    words = [
        "finetune", made / "translate", pairs, "--to", "fr", "--output", folder / "run",
        "--device", "cpu", "--set", f"data.cache={folder / 'cache'}",
        "--set", "evaluation.num_beams=1",
    ]  # fmt: skip
    process = started(*words, "--epochs", "100000", "--minutes", "0")
    for line in process.stderr:
        if line.startswith("step 50/"):
            process.send_signal(signal.SIGINT)
            break
    out, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "Continue with: regard finetune" in out
    assert out.endswith("--resume\n")
    [saved] = (folder / "run" / "checkpoints").glob("step-*")
    assert int(saved.name.removeprefix("step-")) >= 50


# ------------------------------------------------------------------------------ bar and checkpoints


@pytest.mark.parametrize("width", [40, 80, 200])
def test_the_progress_line_keeps_its_bar_and_its_width(width: int) -> None:
    trainer = SimpleNamespace(
        processes=SimpleNamespace(is_first=True), device=torch.device("cpu"),
        schedule=SimpleNamespace(steps=100), progress=SimpleNamespace(step=3),
    )  # fmt: skip
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    bar = _Bar(trainer, console)  # type: ignore[arg-type]
    scores = {"bleu": 31.234, "chrf": 58.1234, "loss": 1.23456, "perplexity": 3.4567}
    report = {"step": 50, "loss": 1.5, "tokens_per_second": 12345}
    for show, done in (
        (lambda: bar.step(60, 100), "60/100"),
        (lambda: bar.report(report, 100, scores), "50/100"),
        (lambda: bar.doing("evaluating"), "50/100"),
        (lambda: bar.step(51, 120), "51/120"),
        (bar.stopping, "stopping" if width > 40 else "51/120"),
        (lambda: bar.step(52, 120), "stopping" if width > 40 else "52/120"),  # it stays
    ):
        show()
        with console.capture() as shown:
            console.print(bar.bar.get_renderable())
        [line] = shown.get().splitlines()
        assert "━━━" in line
        assert done in line
        assert len(line) <= width


def test_ctrl_c_is_answered_at_once() -> None:
    told = []
    with loop.interruptible() as interrupted:
        interrupted.told = lambda: told.append(interrupted.by)
        signal.raise_signal(signal.SIGINT)
        assert told == ["SIGINT"]
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_saving_by_time_takes_at_most_a_twentieth_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=0.0, perf_counter=lambda: clock.now)
    monkeypatch.setattr(loop, "time", clock)
    timer = SaveTimer(0.5)
    clock.now = 29.9
    assert not timer.due()
    clock.now = 30.0
    assert timer.due()
    timer.restart(saving=1.0)  # a second to save is less than a twentieth of 30
    clock.now = 60.0
    assert timer.due()
    timer.restart(saving=6.0)
    clock.now = 179.0
    assert not timer.due()
    clock.now = 180.0
    assert timer.due()
