"""Models of the hub, downloaded from a server that speaks its API."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import transformers

from helpers import hub_server
from helpers import model_folders as folders
from helpers.command import (
    PATIENCE,
    START,
    one_line,
    printed,
    records,
    regard,
    regard_process,
    started,
    until,
)
from helpers.hub_server import Hub
from helpers.library_models import library_folder, library_model
from helpers.random_models import random_marian
from helpers.sentencepiece_files import marian
from regard import (
    CheckpointError,
    InputError,
    UnknownModelError,
    get,
    load,
    translate,
)
from regard.checkpoints import downloading, downloads, hub
from regard.checkpoints.recommended import RECOMMENDED
from regard.models.registry import row_named

pytest.importorskip(
    "huggingface_hub", minversion="1", reason="NOT TESTED: huggingface_hub is older than 1"
)

NAME = "Helsinki-NLP/opus-mt-en-fr"
CARD = b"---\nlicense: apache-2.0\n---\n# opus\n"


@pytest.fixture(scope="module")
def opus(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of a small Marian model, as the hub has those of opus-mt."""
    folder = tmp_path_factory.mktemp("opus")
    ids = marian(folder)
    (folder / "target.spm").write_bytes((folder / "source.spm").read_bytes())
    (folder / "tokenizer_config.json").write_text('{"source_lang": "en", "target_lang": "fr"}')
    random_marian(
        vocab_size=len(ids), pad_token_id=ids["<pad>"], decoder_start_token_id=ids["<pad>"]
    ).save_pretrained(folder)
    return {file.name: file.read_bytes() for file in folder.iterdir()} | {"README.md": CARD}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A server in the place of the hub, and an empty folder for what is downloaded."""
    with hub_server.running() as running:
        template = f"{running.address}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", running.address)
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(downloading, "_PAUSE", 0.0)
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        for name in ("HF_ASSETS_CACHE", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        yield running


@pytest.fixture
def here(server: Hub, opus: dict[str, bytes]) -> Path:
    """A downloaded model."""
    server.model(NAME).commit(opus)
    folder = get(NAME)
    server.asked.clear()
    return folder


def test_a_download_is_pinned_and_translates(server: Hub, opus: dict[str, bytes]) -> None:
    commit = server.model(NAME).commit(opus)
    shown = printed("get", "opus-mt-en-fr", "--yes")
    folder = Path(shown.splitlines()[-1])
    for words in (NAME, commit, "translation", "apache-2.0", "MB in"):
        assert words in shown
    lock = json.loads((folder / "regard.lock.json").read_text())
    assert (lock["name"], lock["revision"], lock["licence"]) == (NAME, commit, "apache-2.0")
    assert {name: pin["sha256"] for name, pin in lock["files"].items()} == {
        name: hub_server.sha256(data) for name, data in opus.items()
    }
    assert {file.name: file.read_bytes() for file in folder.iterdir() if file.name in opus} == opus
    for name in ("opus-mt-en-fr", NAME, folder):
        assert translate("the cat sat", "fr", model=name, max_new_tokens=5).tokens > 0
    assert printed(
        "translate", "the cat", "--to", "fr", "--model", "opus-mt-en-fr", "--max-new-tokens", 5
    )


def test_files_of_other_formats_and_folders_are_left_out(
    server: Hub, opus: dict[str, bytes]
) -> None:
    more = {"pytorch_model.bin": b"x", "tf_model.h5": b"x", "model.fp16.safetensors": b"x"}
    twice = {"consolidated.safetensors": b"x", ".gitattributes": b"x", "run.sh": b"x"}
    server.model(NAME).commit(opus | more | twice | {"code.py": b"raise SystemExit\n"})
    assert "code.py: runs only with --trust-remote-code" in printed("get", NAME, "--yes")
    names = {file.name for file in downloads.folder_of(NAME).iterdir()}
    assert names == {*opus, "code.py", "regard.lock.json"}
    assert {name for name, _ in server.files_asked()} == {*opus, "code.py"}


def test_nothing_is_downloaded_without_consent(server: Hub, opus: dict[str, bytes]) -> None:
    server.model(NAME).commit(opus)
    server.model(NAME).licence = "cc-by-nc-4.0"
    shown = regard("get", NAME)
    assert shown.returncode == 2
    assert "cc-by-nc-4.0 (no commercial use)" in shown.stdout
    assert "pass --yes" in shown.stderr
    assert not server.files_asked()
    server.model(NAME).licence = None
    assert f"not named: read {server.address}/{NAME}" in regard("get", NAME).stdout


def test_a_broken_connection_is_continued(server: Hub, opus: dict[str, bytes]) -> None:
    server.model(NAME).commit(opus)
    size = len(opus["model.safetensors"])
    server.cut["model.safetensors"] = [1000, 0, 2000]
    server.busy = [503, 429]
    folder = get(NAME)
    assert (folder / "model.safetensors").read_bytes() == opus["model.safetensors"]
    asked = [wanted for name, wanted in server.files_asked() if name == "model.safetensors"]
    assert asked == ["", "bytes=1000-", "bytes=1000-", "bytes=3000-"]
    assert size > 3000


def test_a_server_that_never_answers_is_given_up(server: Hub, opus: dict[str, bytes]) -> None:
    server.model(NAME).commit(opus)
    server.busy = [503] * 99
    with pytest.raises(CheckpointError, match=r"could not be downloaded from .*503.*continues"):
        get(NAME)
    server.busy.clear()
    server.wrong["model.safetensors"] = b""
    with pytest.raises(CheckpointError, match=r"no more than 0 bytes of model\.safetensors"):
        get(NAME)


def test_after_ctrl_c_nothing_is_half_there_and_the_next_download_continues(
    server: Hub, opus: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.model(NAME).commit(opus)
    append = downloading._append

    def interrupted(response: Any, file: Path, *rest: Any) -> None:
        if file.name == "model.safetensors":
            file.write_bytes(opus[file.name][:5000])  # as a killed process may leave it
            raise KeyboardInterrupt
        append(response, file, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(downloading, "_append", interrupted)
        shown = regard("get", NAME, "--yes")
    assert shown.returncode == 130
    assert "are kept, and the same command continues" in shown.stderr
    with pytest.raises(UnknownModelError, match=f"regard get {NAME}"):
        load(NAME)
    server.asked.clear()
    assert "of an interrupted download" in printed("get", NAME, "--yes")
    asked = dict(server.files_asked())
    assert asked["model.safetensors"] == "bytes=5000-"
    assert "README.md" not in asked
    assert "config.json" not in asked
    load(NAME)
    left = downloads.place() / ".partial"
    assert not [file for file in left.iterdir() if file.is_dir()]


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="NOT TESTED: Windows has no such signal")
def test_ctrl_c_at_the_keyboard_and_the_environment(
    server: Hub, opus: dict[str, bytes], tmp_path: Path
) -> None:
    server.model(NAME).commit(opus)
    server.model(NAME).token = "hf_secret"
    server.hold["model.safetensors"] = 5000
    environment = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_secret"}
    with started("get", "opus-mt-en-fr", "-y", **environment) as process:
        assert server.holding.wait(PATIENCE)
        part = downloads.place() / ".partial"
        until(lambda: [f for f in part.glob("*/model.safetensors") if f.stat().st_size == 5000])
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE)
    assert process.returncode == 130
    assert "are kept, and the same command continues" in err
    assert "Traceback" not in err
    assert not downloads.folder_of(NAME).exists()
    server.hold.clear()
    server.released.set()
    server.asked.clear()
    shown = regard_process("get", "opus-mt-en-fr", "-y", **environment)
    assert shown.stdout.endswith(f"{downloads.folder_of(NAME)}\n")
    assert ("model.safetensors", "bytes=5000-") in server.files_asked()
    assert hub.find(NAME) == downloads.folder_of(NAME)
    shown = regard_process("get", "gpt2", HF_HUB_OFFLINE="1", **environment)
    assert "offline" in one_line(shown, status=1)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="NOT TESTED: Windows has no such terminals")
@pytest.mark.parametrize(("typed", "status"), [("n", 1), ("y", 0), ("\x04", 1), ("\x03", 130)])
def test_the_question_at_a_terminal(
    server: Hub, opus: dict[str, bytes], tmp_path: Path, typed: str, status: int
) -> None:
    import pty

    server.model(NAME).commit(opus)
    environment = {"HF_ENDPOINT": server.address, "HF_HOME": str(tmp_path), "COLUMNS": "80"}
    child, terminal = pty.fork()
    if child == 0:
        os.environ.update(environment)
        os.execv(sys.executable, [sys.executable, "-c", START, "get", "opus-mt-en-fr"])
    shown = b""
    while b"Download it? [y/N] " not in shown:
        shown += os.read(terminal, 4096)
    assert b"apache-2.0" in shown
    assert not server.files_asked()
    os.write(terminal, typed.encode() + (b"\n" if typed.isalpha() else b""))
    try:
        while more := os.read(terminal, 4096):
            shown += more
    except OSError:
        pass  # the other end is closed
    _, ended = os.waitpid(child, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(ended) == status, shown
    assert b"Traceback" not in shown
    assert downloads.folder_of(NAME).exists() == (status == 0)


def test_a_damaged_start_is_removed(server: Hub, opus: dict[str, bytes]) -> None:
    commit = server.model(NAME).commit(opus)
    parts = downloading._parts(NAME, commit)
    parts.mkdir(parents=True)
    (parts / "model.safetensors").write_bytes(b"x" * 100)  # a damaged start
    with pytest.raises(CheckpointError, match=r"model.safetensors .* removed"):
        get(NAME)
    assert (get(NAME) / "model.safetensors").read_bytes() == opus["model.safetensors"]


@pytest.mark.parametrize("file", ["model.safetensors", "config.json"])
def test_wrong_bytes_are_refused(server: Hub, opus: dict[str, bytes], file: str) -> None:
    server.model(NAME).commit(opus)
    server.wrong[file] = opus[file][:-1] + b"?"
    with pytest.raises(CheckpointError, match=rf"{file} of {NAME} is not what it should be"):
        get(NAME)
    with pytest.raises(UnknownModelError):
        hub.find(NAME)
    server.wrong.clear()
    assert hub.find(NAME) if get(NAME) else False


def test_a_pinned_model_stays_when_the_hub_has_another(
    server: Hub, here: Path, opus: dict[str, bytes]
) -> None:
    old = downloads.read_lock(here).revision
    new = server.model(NAME).commit(opus | {"README.md": CARD + b"More.\n"})
    assert "are as they were downloaded" in printed("get", NAME)
    assert not server.asked
    assert downloads.read_lock(get(NAME)).revision == old
    get(NAME, "main")
    assert downloads.read_lock(here).revision == new
    assert (here / "README.md").read_bytes().endswith(b"More.\n")
    assert [name for name, _ in server.files_asked()] == ["README.md"]  # the others are copied
    get(NAME, old)
    assert (here / "README.md").read_bytes() == CARD


def test_what_the_hub_serves_under_a_pinned_commit_may_not_change(
    server: Hub, here: Path, opus: dict[str, bytes]
) -> None:
    commit = downloads.read_lock(here).revision
    server.model(NAME).commits[commit]["README.md"] = b"Other.\n"
    (here / "README.md").unlink()
    with pytest.raises(CheckpointError, match=r"README.md .* not what it should be"):
        get(NAME)


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone"])
def test_a_damaged_file_is_found_and_downloaded_again(
    server: Hub, here: Path, opus: dict[str, bytes], damage: str
) -> None:
    file = here / "model.safetensors"
    right = file.read_bytes()
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(right[:-1] + (b"" if damage == "shorter" else b"?"))
    with pytest.raises(CheckpointError, match=rf"not the file that was .* regard get {NAME}"):
        load(NAME)
    get(NAME)
    assert [name for name, _ in server.files_asked()] == ["model.safetensors"]
    assert file.read_bytes() == right
    load(NAME)


def test_a_damage_that_keeps_size_and_time_is_found_by_get(server: Hub, here: Path) -> None:
    file = here / "config.json"
    status = file.stat()
    file.write_bytes(file.read_bytes().replace(b"24", b"25"))
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    hub.find(NAME)
    get(NAME)
    assert [name for name, _ in server.files_asked()] == ["config.json"]


def test_a_copied_folder_of_downloads_is_as_good(
    server: Hub, here: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(
        here, tmp_path / "other" / "regard" / "models" / here.name, copy_function=shutil.copyfile
    )
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path / "other"))
    assert hub.find("opus-mt-en-fr").is_relative_to(tmp_path / "other")


def test_a_gated_model_asks_for_a_token(
    server: Hub, opus: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.model(NAME).commit(opus)
    server.model(NAME).token = "hf_secret"
    assert f"accept its terms at {server.address}/{NAME}" in regard("get", NAME).stdout
    with pytest.raises(CheckpointError, match="is gated: its terms must be accepted"):
        get(NAME)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    load(get(NAME))


def test_unknown_models_and_revisions(server: Hub, opus: dict[str, bytes]) -> None:
    with pytest.raises(UnknownModelError, match="There is no model somebody/nothing on the hub"):
        get("somebody/nothing")
    server.model(NAME).commit(opus)
    with pytest.raises(InputError, match="has no revision 'v9' on the hub"):
        get(NAME, "v9")
    one_line(regard("get", "./folder"), "cannot be a name on the hub")
    one_line(regard("get", "a--b/c"), "There is no model a--b/c")
    one_line(regard("get", "translate"), "translate is shipped with regard")


def test_offline(server: Hub, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert get(NAME) == here
    one_line(regard("get", "gpt2"), "gpt2 cannot be downloaded offline", status=1)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"could not be downloaded from http://127.0.0.1:9"):
        get("gpt2")


def test_a_full_disk_is_told_before_the_download(
    server: Hub, opus: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    server.model(NAME).commit(opus)
    usage = namedtuple("usage", "total used free")(10, 0, 10)
    monkeypatch.setattr(shutil, "disk_usage", lambda place: usage)
    with pytest.raises(CheckpointError, match=r"needs .* MB, but .* has 0.0 MB free"):
        get(NAME)
    assert not server.files_asked()


def test_a_pickle_is_refused_by_name(server: Hub, opus: dict[str, bytes]) -> None:
    pickled = {**opus, "pytorch_model.bin": b"x", "rust_model.ot": b"x"}
    del pickled["model.safetensors"]
    server.model(NAME).commit(pickled)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin and rust_model.ot only"):
        get(NAME)
    server.model(NAME).offer(opus, "somebody")  # nobody knows who that is
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin and rust_model.ot only"):
        get(NAME)
    commit = server.model(NAME).offer(pickled | opus, "SFconvertbot")
    assert f"{commit} (refs/pr/2)" in printed("get", NAME, "--yes")
    load(NAME)


def test_without_the_library_of_the_hub_the_error_says_how_to_install_it(
    server: Hub, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for broken in ("absent", "old"):
        with monkeypatch.context() as patch:
            if broken == "old":
                patch.setattr("huggingface_hub.__version__", "0.36.0")
            else:
                patch.setitem(sys.modules, "huggingface_hub", None)
            one_line(regard("get", "gpt2"), "pip install 'regard[hub]'")
            assert get(NAME) == here == hub.find(NAME)  # what is here needs no library


def test_a_lock_file_of_the_hub_or_a_damaged_one(server: Hub, opus: dict[str, bytes]) -> None:
    server.model(NAME).commit(opus | {"regard.lock.json": b"{}"})
    folder = get(NAME)
    assert get(NAME) == folder == hub.find(NAME)
    (folder / "regard.lock.json").write_text('{"name": "x"')
    with pytest.raises(CheckpointError, match=r"regard\.lock\.json is damaged\. Remove its folder"):
        get(NAME)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "make", "commands"),
    [
        ("MarianMTModel", folders.translator, [("translate", "Hello.", "--to", "fr")]),
        (
            "T5ForConditionalGeneration",
            folders.summarizer,
            [("summarize", "The cat sat on the mat."), ("translate", "The cat.", "--to", "fr")],
        ),
        (
            "BertForQuestionAnswering",
            folders.answerer,
            [("answer", "Who sat?", "--context", "The cat sat.", "--threshold=-inf")],
        ),
        ("GPT2LMHeadModel", folders.writer, [("complete", "The cat", "--max-new-tokens", "3")]),
    ],
)
def test_every_recommended_architecture_runs_in_its_tasks(
    server: Hub, tmp_path: Path, architecture: str, make: Any, commands: Any
) -> None:
    folder = make(tmp_path / "made")
    tasks = {
        "summarization": {"prefix": "summarize: ", "max_length": 20},
        "translation_en_to_fr": {"prefix": "translate English to French: ", "max_length": 20},
    }
    if architecture.startswith("T5"):
        folders.edit(folder, task_specific_params=tasks)
    config = transformers.AutoConfig.from_pretrained(folder)
    getattr(transformers, architecture)(config).save_pretrained(folder)  # as the hub has them
    for model in RECOMMENDED:
        if model.architecture == architecture:
            server.model(model.name).commit_folder(folder)
            get(model.short)
            for command, *words in commands:
                [row] = records(command, *words, "--model", model.short)
                assert row["model"] == model.short
    assert {command for command, *_ in commands} <= set(row_named(architecture).serves)


@pytest.mark.slow
def test_another_architecture_is_looked_into_and_its_code_runs_only_on_request(
    server: Hub, tmp_path: Path
) -> None:
    folder = library_folder(tmp_path / "llama", "llama")
    library_model("llama").save_pretrained(folder, max_shard_size="4KB")
    (folder / "model.safetensors").unlink()
    folders.edit(
        folder, architectures=["Mine"], auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"}
    )
    (folder / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\n\nclass Mine(LlamaForCausalLM):\n    pass\n"
    )
    server.model("some.body/small-2.5").commit_folder(folder)
    shown = printed("get", "some.body/small-2.5", "--yes")
    assert "task          none of regard's; look and watch through transformers" in shown
    assert "modeling_mine.py: runs only with --trust-remote-code" in shown
    assert len(list(Path(shown.splitlines()[-1]).glob("model-0*.safetensors"))) > 2
    words = ("look", "small-2.5", "The cat sat.")
    one_line(regard(*words), "code of its own")
    assert "Mine" in printed(*words, "--trust-remote-code")
    [row] = [row for row in records("models") if row["origin"] == "downloaded"]
    assert (row["name"], row["task"]) == ("some.body/small-2.5", "")


def test_what_is_no_model_is_refused(server: Hub, opus: dict[str, bytes]) -> None:
    server.model(NAME).commit({"README.md": CARD})
    with pytest.raises(CheckpointError, match=r"has no model.safetensors at main"):
        get(NAME)
    server.model(NAME).commit({"model.safetensors": opus["model.safetensors"]})
    with pytest.raises(CheckpointError, match=r"has no config.json at main"):
        get(NAME)


def test_a_renamed_model_and_short_names(server: Hub, opus: dict[str, bytes]) -> None:
    server.model("somebody/new").commit(opus)
    server.renamed["old"] = "somebody/new"
    folder = get("old")
    assert folder == get("new") == get("somebody/new") == hub.find("new")
    server.model("another/new").commit(opus)
    get("another/new")
    with pytest.raises(InputError, match="new may be another/new or somebody/new"):
        load("new")


def test_two_downloads_at_once_do_not_write_the_same_files(
    server: Hub, opus: dict[str, bytes]
) -> None:
    commit = server.model(NAME).commit(opus)
    parts = downloading._parts(NAME, commit)
    parts.mkdir(parents=True)
    with downloading._alone(parts), pytest.raises(CheckpointError, match="Another process"):
        get(NAME)


def test_the_library_of_the_hub_downloads_the_same_files(
    server: Hub, opus: dict[str, bytes], tmp_path: Path
) -> None:
    """The server is right about the hub's API, as far as the hub's own library can tell."""
    from huggingface_hub import snapshot_download

    server.model(NAME).commit(opus)
    folder = Path(snapshot_download(NAME))
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == opus
    assert hub.find(NAME) == folder  # in the Hugging Face cache
    assert hub.find("opus-mt-en-fr") == folder


# ---------------------------------------------------------------------------------------- listings


def test_models_lists_what_is_downloaded_and_what_is_recommended(server: Hub, here: Path) -> None:
    shown = printed("models")
    assert next(line for line in shown.splitlines() if line.startswith(NAME)).endswith("apache-2.0")
    assert f"1 downloaded: {downloads.place()}" in shown
    listed = shown.partition("Recommended, and not here yet")[2]
    assert "opus-mt-en-de" in listed
    assert "opus-mt-en-fr" not in listed
    rows = records("models")
    assert [row["origin"] for row in rows if row["name"] == NAME] == ["downloaded"]
    assert {row["name"] for row in rows if row["origin"] == "recommended"} == {
        model.name for model in RECOMMENDED
    } - {NAME}
    assert f"revision  {downloads.read_lock(here).revision}" in printed("models", "opus-mt-en-fr")
    one_line(regard("models", "gpt2"), "gpt2 is not here yet. To download it: regard get gpt2")


def test_the_error_of_a_command_says_how_to_get_a_model(server: Hub) -> None:
    shown = regard("translate", "--model", "opus-mt-en-fr", "Hello.")
    assert one_line(shown, "regard get opus-mt-en-fr")
    assert not server.asked  # no command but get goes online


def test_recommended_models_have_architectures_and_tasks_of_regard() -> None:
    for model in RECOMMENDED:
        row = row_named(model.architecture)
        assert row is not None
        assert row.serves, model.name
        assert model.size < 4.5 * model.parameters  # float32, with a tokenizer
    names = [model.short for model in RECOMMENDED]
    assert len(names) == len(set(names))


@pytest.mark.processes
@pytest.mark.parametrize("variable", ["HF_HOME", "HF_ASSETS_CACHE", "XDG_CACHE_HOME"])
def test_downloads_lie_where_the_hubs_library_wants_them(tmp_path: Path, variable: str) -> None:
    code = (
        "from huggingface_hub import cached_assets_path as theirs; "
        "from regard.checkpoints.downloads import place; "
        "print(place() == theirs('regard', 'models', 'x').parent, place())"
    )
    others = {"HF_HOME": "", "HF_ASSETS_CACHE": "", "XDG_CACHE_HOME": ""}
    given = {key: value for key, value in os.environ.items() if key not in others}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**given, variable: str(tmp_path)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith(f"True {tmp_path}")
