"""regard look and regard explain --model: what they print, save and refuse, in one line each."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.command import one_line, printed, records, regard
from helpers.library_models import library_folder
from helpers.random_models import of_five
from helpers.sine_models import TEXT, gpt2, tokenizer, translator
from regard.cli import interpret
from regard.interpret.cost import CostEstimate


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    other = gpt2(depth=2)
    with torch.no_grad():
        other.stack.blocks[0].attention.qkv.weight.mul_(0.5)
    for name, model in (("gpt2", gpt2()), ("other", other), ("translator", translator())):
        model.float().save(root / name)
        tokenizer().save(root / name)
    return root


def test_an_overview_into_a_pipe(folder: Path) -> None:
    shown = regard("look", folder / "gpt2", TEXT)
    assert shown.stderr == ""
    assert shown.returncode == 0
    assert shown.stdout.startswith("GPT2: what 2 layers of heads do, over 11 tokens\n")
    assert max(map(len, shown.stdout.splitlines())) <= 80
    assert "\x1b" not in shown.stdout


def test_a_file_and_standard_input_are_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    asked = ("look", folder / "gpt2", "--layer", "1", "--head", "2")
    [found] = records(*asked, "--file", tmp_path / "text.txt")
    assert records(*asked, given=TEXT) == [found]
    assert (found["kind"], found["layer"], found["head"]) == ("map", "1", 2)
    assert len(found["weights"]) == 11


@pytest.mark.parametrize(
    ("ending", "start"),
    [
        pytest.param("png", b"\x89PNG", marks=pytest.mark.slow),
        ("svg", b"<svg"),
        ("html", b"<!doctype html>"),
    ],
)
def test_pictures_are_saved(folder: Path, tmp_path: Path, ending: str, start: bytes) -> None:
    path = tmp_path / f"heads.{ending}"
    shown = regard("look", folder / "gpt2", TEXT, "--to", str(path), "--dark")
    assert (shown.returncode, shown.stdout, shown.stderr) == (0, "", "")
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--word", "mat"], "what 'mat' attends to"),
        (["--layer", "1", "--head", "2", "--rows", "2:5", "--columns", "0:5"], "sat"),
        (["--layer", "1", "--head", "2", "--without-first"], "is left out: it takes"),
        (["--layer", "1", "--head", "2", "--compare", "head=0.1"], "head 0.1 less head 1.2"),
        (["--compare", "text=the dog ran in the house"], "the dog ran in the house less"),
    ],
)
def test_what_can_be_looked_at(folder: Path, words: list[str], wanted: str) -> None:
    assert wanted in " ".join(printed("look", folder / "gpt2", TEXT, *words).split())


def test_two_models_are_compared(folder: Path) -> None:
    shown = regard("look", "gpt2", TEXT, "--compare", "model=other").stderr  # no such model here
    assert shown.count("\n") == 1
    one, other = str(folder / "gpt2"), str(folder / "other")
    [found] = records("look", one, TEXT, "--compare", f"model={other}")
    assert found["names"] == [one, other]
    assert found["first"]["values"]["entropy"] != found["second"]["values"]["entropy"]


def test_words_are_aligned(folder: Path) -> None:
    shown = printed("look", folder / "translator", TEXT, "--align", "--target", "the dog")
    assert "cross-attention layer" in shown
    assert "target down, source across" in shown


def test_explain_follows_a_model(folder: Path) -> None:
    words = ("explain", TEXT, "--model", folder / "gpt2", "--layer", "1", "--head", "2")
    shown = printed(*words, "--word", "mat")
    assert "GPT2, layer 1, head 2: 11 tokens, 4 heads" in shown
    assert "within the tolerance" in shown
    assert records(*words)[0]["agreement"]["holds"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--layer", "9", "--head", "0"], "There is no layer '9'. Layers are 0, 1."),
        (["--layer", "0", "--head", "9"], "There is no head 9"),
        (["--layer", "0", "--head", "0", "--rows", "5:99"], "must lie within 0:11"),
        (["--align"], "GPT2 has no cross-attention"),
        (["--word", "matt"], "Did you mean 'mat'?"),
        (["--without-first"], "give layer and head"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(folder: Path, words: list[str], message: str) -> None:
    one_line(regard("look", folder / "gpt2", TEXT, *words), message)


def test_texts_that_are_none_are_refused_in_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00\x01")
    for words in (["--file", tmp_path / "binary"], ["--file", tmp_path / "missing"], [""], []):
        one_line(regard("look", folder / "gpt2", *words))


def test_a_long_run_is_announced_and_where_very_long_asked_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr("sys.stdin", type("Terminal", (), {"isatty": lambda _: True})())
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    monkeypatch.setattr("typer.confirm", lambda question, **_: asked.append(question))
    interpret._announce(CostEstimate(100_000, 6, 40, 2**30), yes=False)
    assert "100,000 tokens through 6 attention layers" in capsys.readouterr().err
    assert not asked
    long = CostEstimate(100_000, 6, 400, 2**30)
    interpret._announce(long, yes=True)
    assert not asked
    with pytest.raises(interpret.typer.Exit):
        interpret._announce(long, yes=False)
    assert asked == ["Continue?"]
    assert "about 7 minutes and 1.0 GiB" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--to", "x.pdf"], "the ending '.pdf' is unknown"),
        (["--to", "nowhere/x.svg"], "There is no folder 'nowhere'"),
        (["--compare", "foo"], "--compare is model=NAME, text=TEXT or head=LAYER.HEAD"),
        (["--compare", "text=a", "--word", "cat"], "leave out --word"),
        (["--compare", "head=0.1"], "compares two heads: add --layer and --head"),
        (["--layer", "0", "--compare", "head=0.1"], "add --layer and --head"),
        (["--layer", "0", "--head", "0", "--rows", "3"], "--rows is a range of tokens"),
        (["--layer", "0", "--head", "0", "--compare", "head=7"], "needs a value such as 3.7"),
        (["--layer", "0", "--head", "0", "--compare", "head=x"], "needs a value such as 3.7"),
        (["--json", "--without-first"], "--without-first is for pictures"),
    ],
)
def test_what_can_be_known_at_once_is_said_at_once(words: list[str], said: str) -> None:
    """Before there is a model: this one does not exist."""
    one_line(regard("look", "no-such-model", TEXT, *words), said)


# Other architectures ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("others")
    for name in ("llama", "vit"):
        library_folder(root / name, name)
    return root


@of_five("is too old to load other architectures")
def test_a_folder_of_another_architecture_is_looked_into(others: Path) -> None:
    shown = regard("look", others / "llama", TEXT)
    assert shown.stderr == ""
    assert shown.stdout.startswith("LlamaForCausalLM: what 2 layers of heads do, over 11 tokens\n")
    [found] = records("look", others / "llama", TEXT, "--layer", "1", "--head", "2")
    assert len(found["weights"]) == 11


@of_five("is too old to load other architectures")
def test_an_image_is_looked_into(others: Path, tmp_path: Path) -> None:
    from PIL import Image

    Image.effect_noise((32, 32), 60).convert("RGB").save(tmp_path / "noise.png")
    asked = ("look", others / "vit", "--image", tmp_path / "noise.png")
    shown = regard(*asked)
    assert shown.stdout.startswith("ViTForImageClassification: what 2 layers")
    [found] = records(*asked, "--word", "1,2", "--layer", "0", "--head", "1")
    assert (found["kind"], found["word"], found["grid"]) == ("word", "1,2", [4, 4])
    one_line(regard(*asked, "some words"), "Give a text or --image")
