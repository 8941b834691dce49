"""Evaluation: figures that training had come again, by hand and from the command line."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from helpers.training_data import recipe_of, sentences, write_data
from regard import GPT2, Bert, BertConfig, GPT2Config, InputError, Tokenizer, load
from regard.checkpoints.cards import SCORES
from regard.evaluation import speed
from regard.evaluation.measuring import SCORES_OF_TASK, evaluate, own_settings, scored_row
from regard.evaluation.reproduction import reproduce
from regard.evaluation.scoring import LANE_PIECES, LANES
from regard.models.bundle import open_bundle
from regard.models.registry import TRAINABLE
from regard.models.transformer_xl import TransformerXL, TransformerXLConfig
from regard.training.recipe import parse_recipe
from regard.training.run import train

LINES = sentences(40, seed=3)


def text_file(folder: Path) -> dict[str, object]:
    (folder / "text.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    return {"format": "text", "files": ["text.txt"]}


def measured(model, text: Tokenizer, folder: Path, settings=()):
    """The scores of a model on :data:`LINES`."""
    return evaluate(model, text, [text_file(folder)], root=folder, settings=settings)


SOURCES = {
    "tsv": {"format": "tsv", "files": ["valid.tsv"]},
    "questions": {"format": "questions", "files": ["valid.jsonl"]},
    "text": {"format": "text", "files": ["valid.txt"]},
}
PIECES = {"data.length": 10, "data.context": 4}
# What is trained: task, architecture, data, and the keys on which its scores depend.
RUNS = {
    "translation": ("translation", "transformer", "tsv", {"evaluation.num_beams": 2}, "bleu"),
    "summarization": ("summarization", "t5", "tsv", {"evaluation.num_beams": 2}, "rouge-1"),
    "answers": ("question answering", "bert", "questions", {"batch.tokens": 200}, "f1"),
    "text": ("language modelling", "gpt2", "text", {"data.length": 10}, "loss"),
    "context": ("language modelling", "gpt2", "text", PIECES, "loss"),
    "temperature": ("language modelling", "gpt2", "text", {"evaluation.temperature": 1.5}, "loss"),
    "memory": ("language modelling", "transformer-xl", "text", {"data.length": 4}, "loss"),
    "no memory": ("language modelling", "transformer-xl", "text", PIECES, "loss"),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Train a model of :data:`RUNS`: the data, it, its tokenizer, its last and final scores."""
    folder = tmp_path_factory.mktemp("evaluating")
    write_data(folder)
    runs = {}

    def run(name):
        if name not in runs:
            task, kind, _, keys, metric = RUNS[name]
            raw = recipe_of(folder, task, kind) | {"output": str(folder / name)}
            if kind == "transformer-xl":
                raw["model"]["config"]["same_length"] = False
            keys = {"evaluation.metric": metric, "evaluation.every": 2, **keys}
            result = train(parse_recipe(raw, {"schedule.steps": 4, "saving.every": 2, **keys}))
            rows = map(json.loads, (result.folder / "log.jsonl").read_text().splitlines())
            logged = [row["scores"] for row in rows if "scores" in row]
            made = result.folder / "model"
            runs[name] = (load(made), Tokenizer.load(made), logged[-1], result.scores)
        return folder, *runs[name]

    return run


@pytest.mark.parametrize("name", RUNS)
def test_the_log_the_end_of_a_run_and_evaluate_give_the_same_scores(trained, name):
    root, model, tokenizer, logged, final = trained(name)
    _, _, source, keys, _ = RUNS[name]
    shown = []
    measured = evaluate(
        model,
        tokenizer,
        [SOURCES[source]],
        list(final),
        root=root,
        settings={"data.length": 64, "batch.tokens": 256} | keys,
        progress=lambda done, total: shown.append((done, total)),
    )
    assert logged == final == measured.scores  # to the bit
    assert shown[-1][0] == shown[-1][1] == measured.count
    assert math.isfinite(sum(final.values()))


@pytest.mark.parametrize("name", ["text", "context", "memory", "no memory"])
def test_the_scores_of_a_text_do_not_depend_on_the_batch(trained, name):
    root, model, tokenizer, logged, _ = trained(name)
    _, _, source, keys, _ = RUNS[name]
    lines = (root / "valid.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    tokens = sum(len(tokenizer.encode(line, special=False).ids) for line in lines)
    for size in (1, 64, 5000):
        settings = {"batch.tokens": size} | keys
        measured = evaluate(model, tokenizer, [SOURCES[source]], root=root, settings=settings)
        assert measured.count == tokens - 1  # each once, all but the first
        assert measured.scores["perplexity"] == pytest.approx(logged["perplexity"], rel=1e-6)


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
    found = measured(model, text, tmp_path, settings)
    assert found.scores["loss"] == pytest.approx(loss, rel=1e-5)
    assert model.config.memory == 8  # as it was
    short = measured(model, text, tmp_path, settings | {"model.config.memory": 8})
    assert abs(short.scores["loss"] - loss) > 1e-4


@torch.no_grad()
@pytest.mark.parametrize(
    ("kind", "length", "context"),
    [
        ("gpt2", None, 0),  # one piece
        ("gpt2", 16, 0),
        ("gpt2", 16, 12),
        ("gpt2", 500, 400),
        pytest.param("xl", 16, 15, marks=pytest.mark.slow),
        pytest.param("xl", 500, 400, marks=pytest.mark.slow),
    ],
)
def test_with_a_context_each_token_is_told_once_from_so_many(text, tmp_path, kind, length, context):
    ids = whole(text)[0]
    model = gpt2(text) if kind == "gpt2" else xl(text, memory=8)
    settings = {"data.context": context, "batch.tokens": 64, "evaluation.temperature": 1.5}
    settings |= {"data.length": length} if length else {}
    found = measured(model, text, tmp_path, settings)
    total, new = len(ids) - 1, (length or model.longest) - context
    nats = 0.0
    for at in range(total):  # which piece tells it: the first that has it behind its context
        start = 0 if at < context else (at - context) // new * new
        told = model(ids[None, start : at + 1])[0, -1] / 1.5
        nats += float(cross_entropy(told, ids[at + 1], reduction="sum"))
    size = (tmp_path / "text.txt").stat().st_size
    assert found.count == total
    expected = (math.exp(nats / total), nats / math.log(2) / size, nats / total)
    assert tuple(found.scores.values()) == pytest.approx(expected, rel=1e-5)


def test_pieces_are_as_long_as_a_model_reads_whatever_its_name(text, tmp_path, monkeypatch):
    model = gpt2(text, length=16)
    expected = measured(model, text, tmp_path, {"data.length": 16}).scores
    row = replace(model.row(), name="a new name")
    monkeypatch.setattr(GPT2, "row", lambda self: row)
    assert measured(model, text, tmp_path).scores == expected


@torch.no_grad()
def test_lanes_predict_each_token_once_and_remember_their_own_past(text, tmp_path):
    model, ids, length = xl(text, memory=8), whole(text)[0], 2
    found = measured(model, text, tmp_path, {"data.length": length})
    total = len(ids) - 1
    lanes = total // (LANE_PIECES * length)
    assert 2 < lanes < LANES
    assert total % lanes  # a few tokens fill no lane
    lane, nats = total // lanes, 0.0
    for start in range(0, lanes * lane, lane):
        memories = model.remember()
        for at in range(start, start + lane, length):
            piece = ids[None, at : min(at + length, start + lane) + 1]
            logs = model(piece[:, :-1], memories=memories)[0]
            nats -= float(logs.gather(-1, piece[0, 1:, None]).sum())
    left = total - lanes * lane
    size = max(left, length)
    logs = model(ids[None, total - size : total])[0, -left:]
    nats -= float(logs.gather(-1, ids[total - left + 1 :, None]).sum())
    assert found.count == total
    assert found.scores["loss"] == pytest.approx(nats / total, rel=1e-5)


def test_a_limit_and_a_part(trained):
    root, model, tokenizer, *_ = trained("translation")

    def count(settings=(), **keys):
        data, wanted = [SOURCES["tsv"] | keys], ["chrf", "loss"]
        return evaluate(model, tokenizer, data, wanted, root=root, settings=settings).count

    assert count(["evaluation.examples=3"]) == 3
    assert count(part=[0, 500]) + count(part=[500, 1000]) == 16


def test_cards_are_read_by_the_earlier_names_of_their_keys(trained):
    root, model, tokenizer, logged, _ = trained("translation")
    settings = {"evaluation.beam": 2, "evaluation.no_repeat": 0, "data.bad": 0.5, "data.length": 64}
    measured = evaluate(model, tokenizer, [SOURCES["tsv"]], ["chrf"], root=root, settings=settings)
    assert measured.scores["chrf"] == logged["chrf"]


@pytest.mark.parametrize(
    ("wanted", "settings", "source", "message"),
    [
        (["perplexit"], {}, {}, "Did you mean perplexity"),
        (["bleu"], {}, {}, "There is no score bleu"),
        ([], {"evaluation.num_beam": 4}, {}, "Did you mean evaluation.num_beams?"),
        ([], {"model.config.memory": 4}, {}, "There is no key model.config.memory"),
        ([], {}, {"files": ["nowhere.txt"]}, "There is no file"),
        ([], {}, {"format": "squad"}, "language modelling reads text"),
        ([], {}, {"files": ["empty.txt"]}, "The data have no records to evaluate on"),
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
    raw = {"output": "", "data": {"train": []}, "schedule": {"steps": 1}}
    for task, names in TRAINABLE.items():
        for name in names:
            parse_recipe(raw | {"task": task, "model": {"kind": name}})


# -------------------------------------------------------------------------------- figures of cards


def card(folder: Path, root: Path, text: Tokenizer, moved: float = 0.0) -> None:
    """A checkpoint whose scores.json holds what it does, moved by something."""
    model = gpt2(text, length=32)
    model.save(folder)
    text.save(folder)
    given = {"tolerance": 0.01, "data": [text_file(root)], "settings": {"data.length": 32}}
    scores = measured(model, text, root).scores.items()
    figures = [given | {"metric": name, "value": value + moved} for name, value in scores]
    (folder / SCORES).write_text(json.dumps(figures), encoding="utf-8")


@pytest.mark.parametrize(("moved", "agrees"), [(0.0, True), (0.02, False)])
def test_a_card_is_reproduced_or_found_out(text, tmp_path, moved, agrees):
    card(tmp_path / "model", tmp_path, text, moved)
    found = list(reproduce(tmp_path / "model", root=tmp_path))
    assert [again.score.metric for again in found] == ["perplexity", "bits_per_byte", "loss"]
    assert {again.agrees for again in found} == {agrees}


@pytest.mark.parametrize("packing", [None, "int8"])
def test_half_precision_and_packed_weights_are_measured_in_full(text, tmp_path, packing):
    folder = tmp_path / "small"
    model = gpt2(text, length=32, dim=32)
    (model if packing else model.half()).save(folder, packing=packing)
    text.save(folder)
    full = measured(load(folder, dtype=torch.float32), text, tmp_path)
    figure = {"metric": "loss", "value": full.scores["loss"], "tolerance": 1e-6}
    figure |= {"data": [text_file(tmp_path)], "settings": {}}
    (folder / SCORES).write_text(json.dumps([figure]), encoding="utf-8")
    [again] = reproduce(folder, root=tmp_path)
    assert again.agrees


def test_data_that_are_missing_are_said_before_anything_is_loaded(text, tmp_path):
    card(tmp_path / "model", tmp_path, text)
    (tmp_path / "model" / "model.safetensors").unlink()
    (tmp_path / "text.txt").unlink()
    with pytest.raises(InputError, match=r"need text\.txt, which is not below the folder '"):
        list(reproduce(tmp_path / "model", root=tmp_path))


def test_a_model_without_figures_is_measured_on_data_only(text, tmp_path):
    gpt2(text).save(tmp_path)
    with pytest.raises(InputError, match=r"no scores\.json with scores to reproduce\. Give --dat"):
        list(reproduce(tmp_path, root=tmp_path))


def test_a_model_is_measured_as_it_is_used() -> None:
    assert own_settings(open_bundle("summarize")) == {
        "prefix": "summarize: ",
        "evaluation.num_beams": 8,
        "evaluation.no_repeat_ngram_size": 2,
        "evaluation.min_new_tokens": 0,
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


def test_every_shipped_model_that_writes_is_timed() -> None:
    rows = list(speed.decode(torch.device("cpu"), new=2))
    assert [row.name for row in rows] == ["books-gpt2", "books-xl", "summarize", "translate"]
    assert all(row.tokens_per_second > 0 for row in rows)
