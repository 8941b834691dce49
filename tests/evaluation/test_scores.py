"""Evaluation: figures that training had come again, by hand and from the command line."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from helpers.training_data import recipe_of, sentences, write_data
from regard import GPT2, Bert, BertConfig, GPT2Config, InputError, Tokenizer, load
from regard.checkpoints.cards import SCORES
from regard.evaluation.measuring import SCORES_OF_TASK, evaluate, own_settings, scored_row
from regard.evaluation.reproduction import reproduce
from regard.models.bundle import open_bundle
from regard.models.registry import TRAINABLE
from regard.models.transformer_xl import TransformerXL, TransformerXLConfig
from regard.training.recipe import parse_recipe
from regard.training.run import train

LINES = sentences(40, seed=3)


def text_file(folder: Path) -> dict[str, object]:
    (folder / "text.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return {"format": "text", "files": ["text.txt"]}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Models after a few steps, by task: their folder, and the scores that training had last."""
    folder = tmp_path_factory.mktemp("evaluating")
    write_data(folder)
    found = {}
    for task, kind, metric in (
        ("translation", "transformer", "bleu"),
        ("summarization", "t5", "rouge-1"),
        ("question answering", "bert", "f1"),
    ):
        recipe = recipe_of(folder, task, kind)
        recipe["output"] = str(folder / kind)
        recipe["evaluation"] |= {"metric": metric} | ({"beam": 2} if kind != "bert" else {})
        result = train(parse_recipe(recipe))
        found[kind] = (result.folder / "model", result.scores)
    return folder, found


@pytest.mark.parametrize(
    ("kind", "source", "names"),
    [
        ("transformer", {"format": "tsv", "files": ["valid.tsv"]}, ["bleu", "chrf"]),
        ("t5", {"format": "tsv", "files": ["valid.tsv"]}, ["rouge-1", "rouge-2", "rouge-l"]),
        ("bert", {"format": "questions", "files": ["valid.jsonl"]}, ["exact", "f1"]),
    ],
)
def test_what_training_measured_is_measured_again(trained, kind, source, names):
    root, found = trained
    folder, scores = found[kind]
    settings = {"data.length": 64} | ({"evaluation.beam": 2} if kind != "bert" else {})
    shown = []
    again = evaluate(
        load(folder),
        Tokenizer.load(folder),
        [source],
        names,
        root=root,
        settings=settings,
        progress=lambda done, total: shown.append((done, total)),
    )
    assert again.scores == pytest.approx({name: scores[name] for name in names})
    assert again.count == 16
    assert shown[-1] == (16, 16)


def stirred(model: torch.nn.Module) -> torch.nn.Module:
    """With weights so large that what comes before a token matters."""
    draw = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4, generator=draw)
    return model.eval()


def gpt2(text: Tokenizer, length: int = 512, dim: int = 16) -> torch.nn.Module:
    return stirred(GPT2(GPT2Config(vocabulary=len(text), length=length, dim=dim, depth=2, heads=2)))


@pytest.fixture(scope="module")
def text() -> Tokenizer:
    return Tokenizer.train_bpe(LINES, size=280)


def whole(text: Tokenizer) -> torch.Tensor:
    return torch.tensor([text.encode("".join(f"{line}\n" for line in LINES)).ids])


@pytest.mark.parametrize("longer", [0, 40])
def test_a_text_in_one_window_has_the_loss_of_one_call(text, tmp_path, longer):
    ids = whole(text)
    model = gpt2(text, length=ids.shape[1] + longer)
    found = evaluate(model, text, [text_file(tmp_path)], root=tmp_path)
    with torch.no_grad():
        nats = float(cross_entropy(model(ids[:, :-1])[0], ids[0, 1:], reduction="sum"))
    size = (tmp_path / "text.txt").stat().st_size
    count = ids.shape[1] - 1
    assert found.count == count
    assert found.scores["loss"] == pytest.approx(nats / count, rel=1e-5)
    assert found.scores["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-5)
    assert found.scores["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)


@pytest.mark.parametrize("tokens", [16, 100])
def test_every_token_but_the_first_is_told_once(text, tmp_path, tokens):
    ids = whole(text)
    model = gpt2(text)
    settings = {"data.length": 16, "batch.tokens": tokens}
    found = evaluate(model, text, [text_file(tmp_path)], root=tmp_path, settings=settings)
    nats = 0.0
    for start in range(0, ids.shape[1] - 1, 16):
        piece = ids[:, start : start + 17]
        with torch.no_grad():
            nats += float(cross_entropy(model(piece[:, :-1])[0], piece[0, 1:], reduction="sum"))
    assert found.count == ids.shape[1] - 1
    assert found.scores["loss"] == pytest.approx(nats / found.count, rel=1e-5)


def xl(text: Tokenizer, memory: int) -> torch.nn.Module:
    config = TransformerXLConfig(
        vocabulary=len(text), cutoffs=(), dim=16, embedding_dim=16, depth=2, heads=2, head_dim=8,
        inner=32, memory=memory, same_length=False,
    )  # fmt: skip
    return stirred(TransformerXL(config))


def test_a_memory_that_holds_all_is_as_one_call_and_a_shorter_one_is_not(text, tmp_path):
    ids = whole(text)
    model = xl(text, memory=8)
    with torch.no_grad():
        told = model(ids[:, :-1])[0]
    loss = float(cross_entropy(told, ids[0, 1:]))
    settings = {"data.length": 16, "batch.tokens": 16, "model.config.memory": ids.shape[1]}
    source = text_file(tmp_path)
    found = evaluate(model, text, [source], root=tmp_path, settings=settings)
    assert found.scores["loss"] == pytest.approx(loss, rel=1e-5)
    assert model.config.memory == 8  # as it was
    short = evaluate(
        model, text, [source], root=tmp_path, settings=settings | {"model.config.memory": 8}
    )
    assert abs(short.scores["loss"] - loss) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize("kind", ["gpt2", "xl"])
@pytest.mark.parametrize(("length", "context"), [(16, 12), (16, 15), (500, 400)])
def test_with_a_context_each_token_is_told_once_from_so_many(text, tmp_path, kind, length, context):
    ids = whole(text)[0]
    model = gpt2(text, length=500) if kind == "gpt2" else xl(text, memory=8)
    settings = {"data.length": length, "data.context": context, "batch.tokens": 64}
    settings["evaluation.temperature"] = 1.5
    found = evaluate(model, text, [text_file(tmp_path)], root=tmp_path, settings=settings)
    total, new = len(ids) - 1, length - context
    nats = 0.0
    for at in range(total):  # which piece tells it: the first that has it behind its context
        start = 0 if at < context else (at - context) // new * new
        told = model(ids[None, start : at + 1])[0, -1] / 1.5
        nats += float(cross_entropy(told, ids[at + 1], reduction="sum"))
    assert found.count == total
    assert found.scores["loss"] == pytest.approx(nats / total, rel=1e-5)


def test_lanes_tell_each_token_once(text, tmp_path):
    model = xl(text, memory=8)
    settings = {"data.length": 16, "batch.tokens": 64}
    found = evaluate(model, text, [text_file(tmp_path)], root=tmp_path, settings=settings)
    total = whole(text).shape[1] - 1
    assert total - 4 < found.count <= total


def test_a_limit_and_a_part(trained):
    root, found = trained
    folder, _ = found["transformer"]
    model, tokenizer = load(folder), Tokenizer.load(folder)
    source = {"format": "tsv", "files": ["valid.tsv"]}
    some = evaluate(
        model, tokenizer, [source], ["chrf"], root=root, settings=["evaluation.examples=3"]
    )
    assert some.count == 3
    part = evaluate(model, tokenizer, [source | {"part": [0, 500]}], ["chrf"], root=root)
    rest = evaluate(model, tokenizer, [source | {"part": [500, 1000]}], ["chrf"], root=root)
    assert part.count + rest.count == 16


@pytest.mark.parametrize(
    ("wanted", "settings", "source", "message"),
    [
        (["perplexit"], {}, {}, "Did you mean perplexity"),
        (["bleu"], {}, {}, "There is no score bleu"),
        ([], {"evaluation.bean": 4}, {}, "Did you mean evaluation.beam?"),
        ([], {"model.config.memory": 4}, {}, "There is no key model.config.memory"),
        ([], {}, {"files": ["nowhere.txt"]}, "There is no file"),
        ([], {}, {"format": "squad"}, "language modelling reads text"),
        ([], {}, {"files": ["empty.txt"]}, "There is nothing to evaluate on"),
    ],
)
def test_mistakes_are_said(text, tmp_path, wanted, settings, source, message):
    (tmp_path / "empty.txt").touch()
    data = [text_file(tmp_path) | source]
    with pytest.raises(InputError, match=message.replace("?", r"\?")):
        evaluate(gpt2(text), text, data, wanted, root=tmp_path, settings=settings)


def test_a_model_without_scores_of_its_own_is_refused():
    model = Bert(BertConfig(vocabulary=10, dim=8, depth=1, heads=2, inner=16))
    with pytest.raises(InputError, match="A Bert has no scores"):
        scored_row(model)


def test_each_architecture_has_a_task_that_recipes_know():
    assert SCORES_OF_TASK.keys() <= TRAINABLE.keys()
    for task, names in TRAINABLE.items():
        for name in names:
            parse_recipe(
                {
                    "task": task,
                    "output": "",
                    "model": {"kind": name},
                    "data": {"train": []},
                    "schedule": {"steps": 1},
                }
            )


# -------------------------------------------------------------------------------- figures of cards


def card(folder: Path, root: Path, text: Tokenizer, moved: float = 0.0) -> list[dict[str, object]]:
    """A checkpoint whose scores.json holds what it does, moved by something."""
    model = gpt2(text, length=32)
    model.save(folder)
    text.save(folder)
    source = text_file(root)
    scores = evaluate(model, text, [source], root=root).scores
    figures = [
        {"metric": name, "value": scores[name] + moved, "tolerance": 0.01, "data": [source],
         "settings": {"data.length": 32}}
        for name in ("perplexity", "bits_per_byte")
    ]  # fmt: skip
    (folder / SCORES).write_text(json.dumps(figures), encoding="utf-8")
    return figures


def test_a_card_is_reproduced(text, tmp_path):
    card(tmp_path / "model", tmp_path, text)
    found = list(reproduce(tmp_path / "model", root=tmp_path))
    assert [again.score.metric for again in found] == ["perplexity", "bits_per_byte"]
    assert all(again.agrees for again in found)


def test_a_card_that_says_more_than_is_true_is_found_out(text, tmp_path):
    card(tmp_path / "model", tmp_path, text, moved=0.02)
    assert not any(again.agrees for again in reproduce(tmp_path / "model", root=tmp_path))


@pytest.mark.parametrize("packing", [None, "int8"])
def test_half_precision_and_packed_weights_are_measured_in_full(text, tmp_path, packing):
    folder = tmp_path / "small"
    model = gpt2(text, length=32, dim=32)
    (model if packing else model.half()).save(folder, packing=packing)
    text.save(folder)
    source = text_file(tmp_path)
    full = evaluate(load(folder, dtype=torch.float32), text, [source], root=tmp_path)
    figure = {"metric": "loss", "value": full.scores["loss"], "tolerance": 1e-6, "data": [source],
              "settings": {}}  # fmt: skip
    (folder / SCORES).write_text(json.dumps([figure]), encoding="utf-8")
    [again] = reproduce(folder, root=tmp_path)
    assert again.agrees


def test_data_that_are_missing_are_said_before_anything_is_loaded(text, tmp_path):
    card(tmp_path / "model", tmp_path, text)
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "text.txt").unlink()
    with pytest.raises(InputError, match=r"measured on text\.txt, which is not below the folder '"):
        list(reproduce(tmp_path / "model", root=tmp_path))


def test_a_model_without_figures_is_measured_on_data_only(text, tmp_path):
    gpt2(text).save(tmp_path)
    with pytest.raises(
        InputError, match=r"no figures to measure again \(scores.json\). Give --dat"
    ):
        list(reproduce(tmp_path, root=tmp_path))


def test_a_model_is_measured_as_it_is_used() -> None:
    assert own_settings(open_bundle("summarize")) == {
        "prefix": "summarize: ",
        "evaluation.beam": 8,
        "evaluation.no_repeat": 2,
        "evaluation.least": 0,
        "evaluation.length_penalty": 0.6,
    }
    assert own_settings(open_bundle("books-gpt2")) == {}


def test_it_is_measured_on_texts_prepared_as_it_learned_them(tmp_path: Path) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path, "language modelling", "gpt2")
    raw["data"]["prepare"] = ["lowercase"]
    train(parse_recipe(raw, {"schedule.steps": 1}))
    found = own_settings(open_bundle(tmp_path / "run" / "model"))
    assert found == {"data.prepare": ["lowercase"]}


def test_a_score_that_is_not_installed_is_missed_before_all_is_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    one = open_bundle("translate")
    data = [{"format": "tsv", "files": ["nowhere.tsv"]}]  # told before it is looked for
    with pytest.raises(InputError, match=r"regard\[training\]"):
        evaluate(one.model, one.tokenizer, data, root=tmp_path)
