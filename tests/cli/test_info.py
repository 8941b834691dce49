"""The commands that tell what is here, and those that make checkpoints and measure them."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from helpers.command import START, one_line, printed, records, regard, regard_process
from helpers.training_data import sentences
from regard import GPT2, GPT2Config, InputError, Tokenizer, load
from regard.checkpoints.cards import SCORES
from regard.cli.info import remark
from regard.mechanism.backends import BACKENDS
from regard.models.conversion import convert


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a model, ``model``, and a text, ``text.txt``."""
    folder = tmp_path_factory.mktemp("place")
    lines = sentences(20)
    (folder / "text.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    text = Tokenizer.train_bpe(lines, size=280)
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocabulary=len(text), length=32, dim=32, depth=1, heads=2))
    model.save(folder / "model")
    text.save(folder / "model")
    (folder / "model" / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return folder


# ------------------------------------------------------------------------------------------ models


@pytest.fixture
def cache(place, tmp_path, monkeypatch):
    """The hub's cache as its own package lays it out, with a model, and one that is not ours."""
    snapshots = []
    for name in ("models--somebody--small-gpt2", "models--somebody--else"):
        snapshots.append(tmp_path / name / "snapshots" / "0123abc")
        snapshots[-1].mkdir(parents=True)
        (tmp_path / name / "refs").mkdir()
        (tmp_path / name / "refs" / "main").write_text("0123abc")
    shutil.copytree(place / "model", snapshots[0], dirs_exist_ok=True)
    (snapshots[1] / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return tmp_path


def test_models_lists_what_the_cache_holds(place, cache):
    shown = printed("models")
    row = next(line for line in shown.splitlines() if line.startswith("somebody/small-gpt2"))
    assert "language modelling" in row
    assert "GPT2LMHeadModel" in row
    assert row.endswith("mit")
    assert f"1 cached: {cache}" in shown
    assert "else" not in shown
    assert all(line == line.rstrip() for line in shown.splitlines())


def test_models_as_json_say_what_is_true(place, cache):
    [row] = [row for row in records("models") if row["origin"] == "cached"]
    model = load(place / "model")
    weights = load_file(place / "model" / "model.safetensors")
    assert row["parameters"] == sum(tensor.numel() for tensor in weights.values())
    assert row["parameters"] >= sum(parameter.numel() for parameter in model.parameters())
    files = (place / "model").iterdir()
    assert row["size"] == sum(file.stat().st_size for file in files)


def test_models_shows_a_card(cache):
    shown = printed("models", "somebody/small-gpt2")
    assert "license  mit" in shown
    assert "# A model" in shown


def test_models_does_not_know_every_name(cache):
    one_line(regard("models", "nothing"), "There is no model 'nothing' here")
    near = regard("models", "answr")
    one_line(near, "There is no model 'answr' here. Did you mean answer? There are: ")


@pytest.mark.parametrize("damage", ["config.json", "model.safetensors"])
def test_models_of_a_download_cut_short(cache, damage):
    file = cache / "models--somebody--small-gpt2" / "snapshots" / "0123abc" / damage
    file.write_bytes(file.read_bytes()[:20])
    printed("models")


@pytest.mark.processes
def test_models_needs_no_torch():
    start = f"import sys, atexit; atexit.register(lambda: print('torch' in sys.modules)); {START}"
    shown = regard_process("models", start=start)
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.endswith("\nFalse\n")


# ---------------------------------------------------------------------------------------- evaluate


def test_evaluate_prints_a_table(place):
    shown = printed("evaluate", place / "model", "--data", "text.txt", "--root", place)
    names = [line.split()[0] for line in shown.splitlines()]
    assert names == ["score", "perplexity", "bits_per_byte", "loss", "over"]


LOSS = ("--data", "text.txt", "--metric", "loss")


def test_evaluate_prints_json(place):
    [found] = records("evaluate", place / "model", "--root", place, *LOSS)
    assert list(found["scores"]) == ["loss"]
    assert 5 < found["scores"]["loss"] < 7  # of 280 tokens it knows none
    assert found["tokens"] > 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["text.unknown"], "Pass --format"),
        (["pairs.csv"], "CSV cannot be read: save pairs.csv as TSV"),
        (["nowhere.txt"], "There is no file"),
        (["text.txt", "--metric", "bleu"], "There is no score bleu"),
        (["text.txt", "--device", "nothing"], "has no device 'nothing'"),
        (["text.txt", "--set", "data.length=64"], "This GPT-2 reads at most 32 tokens"),
        (["text.txt", "--set", "evaluation.num_beam=2"], "Did you mean evaluation.num_beams?"),
    ],
)
def test_evaluate_says_what_is_wrong(place, words, message):
    shown = regard("evaluate", place / "model", "--root", place, "--data", *words)
    one_line(shown, message)


@pytest.mark.parametrize(("moved", "status", "word"), [(0.0, 0, "agrees"), (0.1, 1, "differs")])
def test_evaluate_measures_a_card_again(place, tmp_path, moved, status, word):
    [measured] = records("evaluate", place / "model", "--root", place, *LOSS)
    folder = convert(place / "model", tmp_path / "model")
    figure = {
        "metric": "loss",
        "value": measured["scores"]["loss"] + moved,
        "tolerance": 0.001,
        "data": [{"format": "text", "files": ["text.txt"]}],
        "settings": {},
    }
    (folder / SCORES).write_text(json.dumps([figure]))
    shown = regard("evaluate", folder, "--root", place)
    assert shown.returncode == status, shown.stderr
    assert shown.stdout.splitlines()[1].endswith(word)
    rows = regard("evaluate", folder, "--root", place, "--json")
    assert json.loads(rows.stdout)["agrees"] is (status == 0)


# ----------------------------------------------------------------------------------------- convert


def test_convert_writes_what_loads_and_brings_all_along(place, tmp_path):
    words = ("convert", place / "model", tmp_path / "new", "--dtype", "float16")
    assert str(tmp_path / "new") in printed(*words)
    made, given = load(tmp_path / "new"), load(place / "model")
    assert next(made.parameters()).dtype == torch.float16
    for name, tensor in given.state_dict().items():
        assert torch.equal(made.state_dict()[name], tensor.half()), name
    for name in ("tokenizer.json", "README.md", "generation_config.json"):
        assert (tmp_path / "new" / name).read_bytes() == (place / "model" / name).read_bytes()
    assert sorted(tmp_path.iterdir()) == [tmp_path / "new"]  # nothing is left beside it


def test_convert_packs(place, tmp_path):
    folder = convert(place / "model", tmp_path / "new", packing="int8")
    small, large = ((f / "model.safetensors").stat().st_size for f in (folder, place / "model"))
    assert small < 0.4 * large
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():
        one, other = load(folder)(ids), load(place / "model")(ids)
    assert (one - other).abs().max() < 0.05 * other.abs().max()


def test_convert_cuts_into_shards(place, tmp_path):
    folder = convert(place / "model", tmp_path / "new", shard_bytes=20_000)
    assert len(list(folder.glob("model-*.safetensors"))) > 1
    for name, tensor in load(place / "model").state_dict().items():
        assert torch.equal(load(folder).state_dict()[name], tensor)


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_convert_never_overwrites_unless_told(place, tmp_path):
    target = tmp_path / "new"
    convert(place / "model", target)
    before = contents(target)
    words = ("convert", place / "model", target, "--dtype", "float16")
    one_line(regard(*words), "Pass --force")
    assert contents(target) == before
    assert printed(*words, "--force")
    assert next(load(target).parameters()).dtype == torch.float16


def test_convert_in_place(place, tmp_path):
    folder = convert(place / "model", tmp_path / "model")
    convert(folder, folder, dtype=torch.bfloat16, force=True)
    assert next(load(folder).parameters()).dtype == torch.bfloat16


def test_convert_does_not_replace_what_is_no_checkpoint(place, tmp_path):
    (tmp_path / "letters").mkdir()
    (tmp_path / "letters" / "letter.txt").write_text("Dear")
    (tmp_path / "file").touch()
    for target in (tmp_path / "letters", tmp_path / "file"):
        with pytest.raises(InputError, match="holds no checkpoint"):
            convert(place / "model", target, force=True)
    assert (tmp_path / "letters" / "letter.txt").read_text() == "Dear"


def test_a_conversion_that_fails_leaves_what_was_there(place, tmp_path, monkeypatch):
    target = convert(place / "model", tmp_path / "new")
    before = contents(target)
    rename = Path.rename

    def failing(path: Path, goal: Path) -> Path:
        if path.name == "made":
            raise OSError(28, "No space left on device")
        return rename(path, goal)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="No space left"):
        convert(place / "model", target, dtype=torch.float16, force=True)
    assert contents(target) == before
    assert sorted(tmp_path.iterdir()) == [target]


def test_convert_says_what_is_wrong(place, tmp_path):
    one_line(regard("convert", "./nowhere", tmp_path / "new"), "There is no folder ./nowhere")
    both = ("--dtype", "float16", "--packing", "int8")
    one_line(regard("convert", place / "model", tmp_path / "new", *both), "leave out dtype")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------------- doctor, completion


def test_doctor_names_versions_and_every_backend_and_what_packages_are_for():
    lines = printed("doctor").splitlines()
    for name in ("regard", "python", "torch", "cpu", *(f"backend {b.name}" for b in BACKENDS)):
        assert any(line.startswith(name) for line in lines), name
    for package in ("matplotlib", "sacrebleu", "transformers", "huggingface_hub", "triton"):
        assert any(line.startswith(package) and "(" in line for line in lines), package


@pytest.mark.parametrize(
    ("package", "version", "message"),
    [
        ("torch", "2.15.0+cu130", ""),
        ("torch", "2.10.1", "; not supported: regard needs 2.11 or newer"),
        ("torch", "3.0.0a1", "; newer than 2.15, the newest that regard was tested with"),
        ("transformers", "5.18.0", ""),
        (
            "transformers",
            "5.23.0",
            '; its generate_batch() refuses attn_implementation="regard"',
        ),
        (
            "transformers",
            "4.57.6",
            '; look(), explain() and attn_implementation="regard" need 5 or newer',
        ),
        ("rich", "1.0", ""),
    ],
)
def test_doctor_remarks_on_versions(package: str, version: str, message: str):
    assert remark(package, version) == message


def test_doctor_says_what_another_triton_switches_off(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("triton", reason="NOT TESTED: Triton is not installed")
    monkeypatch.setattr("triton.__version__", "3.9.0")
    assert "the backend 'hopper' is off: Triton 3.9.0 is installed" in remark("triton", "3.9.0")


@pytest.mark.processes
def test_bash_completes_commands_and_options():
    for words, index, wanted in (
        ("regard ev", 1, "evaluate"),
        ("regard convert --dt", 2, "--dtype"),
        ("regard convert --dtype f", 3, "float16"),
    ):
        shown = regard_process(
            _REGARD_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=str(index)
        )
        assert wanted in shown.stdout.split(), shown


def test_every_command_has_an_example_in_its_help():
    from regard.cli import app

    for command in app.registered_commands:
        assert command.epilog.startswith("Example: regard "), command.callback
        assert command.callback.__doc__
