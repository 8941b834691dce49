"""Models of the hub, downloaded from a server that speaks its API."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers import hub_server
from helpers.command import one_line, printed, records, regard
from helpers.hub_server import Hub
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


def test_a_server_without_ranges_sends_the_whole_file(server: Hub, opus: dict[str, bytes]) -> None:
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
