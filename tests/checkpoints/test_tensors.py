"""Checkpoints: what is broken, unsafe or of another model is refused, by name and in time."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers import broken_files as broken
from helpers.model_folders import edit
from regard import GPT2, CheckpointError, GPT2Config, InputError, RegardError, load
from regard.checkpoints.files import CONFIG, read_json
from regard.checkpoints.keymap import Fuse, KeyMap, Rename, Spelling, Transpose
from regard.checkpoints.tensors import INDEX, WEIGHTS, write
from regard.models.conversion import convert


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    broken.good(tmp_path / "good", sharded=False)
    return tmp_path / "good"


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    broken.good(tmp_path / "shards", sharded=True)
    return tmp_path / "shards"


def edit_header(file: Path, change) -> None:
    header, data = broken.split(file.read_bytes())
    change(header)
    file.write_bytes(broken.joined(json.dumps(header), data))


def test_shards_hold_what_one_file_holds(folder: Path, shards: Path) -> None:
    one, other = load(folder).state_dict(), load(shards).state_dict()
    assert len(list(shards.glob("*.safetensors"))) > 2
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_saving_one_file_over_shards_leaves_no_stale_index(shards: Path) -> None:
    model = load(shards)
    model.save(shards)
    assert not (shards / INDEX).exists()
    assert isinstance(load(shards), GPT2)


def test_one_file_counts_where_a_stale_index_is_left(folder: Path, shards: Path) -> None:
    """As transformers leaves it, and reads it."""
    (folder / INDEX).write_text((shards / INDEX).read_text())
    assert isinstance(load(folder), GPT2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_precision_is_as_asked_and_kept(folder: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    model = load(folder, dtype=dtype, device="cpu")
    assert not model.training
    model.save(tmp_path / "again")
    again = load(tmp_path / "again")
    for name, parameter in again.named_parameters():
        assert torch.equal(parameter, model.state_dict()[name])
        assert parameter.dtype == dtype
        assert parameter.requires_grad


BIAS = "transformer.ln_f.bias"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop(BIAS), r"lacks transformer\.ln_f\.bias"),
        (lambda t: t.update({"h.2.ln_1.bias": torch.zeros(4)}), r"holds h\.2\.ln_1\.bias"),
        (lambda t: t.update({BIAS: t[BIAS].int()}), r"norm\.bias .*int32"),
    ],
)
def test_keys_and_dtypes_of_another_model_are_named(folder: Path, change, words: str) -> None:
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(CheckpointError, match=words):
        load(folder)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"n_embd": 10**15}, "whole number from 1"),
        ({"n_layer": 10**9}, "whole number from 1 to 1024"),
        ({"n_layer": 1000}, "lacks"),
        ({"n_positions": 9}, r"wpe\.weight has shape \[8, 4\].*asks for \[9, 4\]"),
        ({"vocab_size": 2**24}, "wte.weight has shape"),
        ({"n_head": 3}, "3 heads"),
        ({"n_head": 7}, "7 heads"),  # more heads than dimensions: none is left for a head
        ({"n_head": 0}, "heads"),
        ({"activation_function": "sine"}, "one of relu"),
        ({"resid_pdrop": float("nan")}, "from 0 to below 1"),
        ({"n_embd": True}, "whole number"),
        ({"add_cross_attention": True}, "add_cross_attention"),
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM"),
        ({"architectures": None, "model_type": "llama"}, "llama"),
    ],
)
def test_absurd_configs_are_refused(folder: Path, change: dict[str, Any], words: str) -> None:
    edit(folder, **change)
    with pytest.raises(RegardError, match=words):
        load(folder)


def test_without_architectures_the_model_type_counts(folder: Path) -> None:
    edit(folder, architectures=None)
    assert isinstance(load(folder), GPT2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda h: h[BIAS].update(dtype="F8"), "'F8'"),
        (lambda h: h[BIAS].update(shape=[-1]), r"shape \[-1\]"),
        (lambda h: h[BIAS].update(shape=[2**61, 4]), "needs"),
        (lambda h: h[BIAS].update(shape=[4.0]), "shape"),
        (lambda h: h[BIAS].update(data_offsets=[0, 16]), "overlaps|gap"),
        (lambda h: h[BIAS].update(data_offsets=[0, 2**40]), "within the file"),
        (lambda h: h[BIAS].pop("shape"), "does not give dtype, shape and data_offsets"),
        (lambda h: h.pop(BIAS), "gap|follow"),
    ],
)
def test_headers_that_lie_are_refused(folder: Path, change, words: str) -> None:
    edit_header(folder / WEIGHTS, change)
    with pytest.raises(CheckpointError, match=words):
        load(folder)


def test_a_key_that_comes_twice_is_refused(folder: Path) -> None:
    header, data = broken.split((folder / WEIGHTS).read_bytes())
    text = json.dumps(header)
    first = next(key for key in header if key != "__metadata__")
    text = text[:-1] + f", {json.dumps(first)}: {json.dumps(header[first])}}}"
    (folder / WEIGHTS).write_bytes(broken.joined(text, data))
    with pytest.raises(CheckpointError, match="twice"):
        load(folder)


def test_a_header_longer_than_the_file_takes_no_memory(folder: Path) -> None:
    raw = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes((2**62).to_bytes(8, "little") + raw[8:])
    with pytest.raises(CheckpointError, match="header"):
        load(folder)


@pytest.mark.parametrize("name", [n for n in broken.SHARDS if n != broken.SHARDS[18]])
def test_shards_outside_the_folder_are_refused(shards: Path, name: object) -> None:
    places = read_json(shards / INDEX)["weight_map"]
    edit(shards, INDEX, weight_map={**places, next(iter(places)): name})
    with pytest.raises(CheckpointError):
        load(shards)


def test_a_pipe_in_place_of_a_shard_keeps_nobody_waiting(shards: Path) -> None:
    shard = min(shards.glob("*.safetensors"))
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CheckpointError, match="not a regular file"):
        load(shards)


def test_a_shard_must_hold_what_the_index_says(shards: Path) -> None:
    places = read_json(shards / INDEX)["weight_map"]
    key, *_ = places
    other = next(name for name in places.values() if name != places[key])
    edit(shards, INDEX, weight_map={**places, key: other})
    with pytest.raises(CheckpointError, match="index does not list there"):
        load(shards)


def test_a_pickle_is_refused_with_what_to_do(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    (folder / "pytorch_model.bin").write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    with pytest.raises(CheckpointError, match="save_pretrained"):
        load(folder)


def test_arguments_of_another_kind_are_refused(folder: Path, tmp_path: Path) -> None:
    model = load(folder)
    for make, words in (
        (lambda: load(None), "given by its name or a path, not None"),
        (lambda: load(""), "not ''"),
        (lambda: load(folder, dtype="float16"), "floating-point dtype"),
        (lambda: load(folder, dtype=torch.int8), "floating-point dtype"),
        (lambda: load(folder, model="Bert"), "a class such as Bert"),
        (lambda: load(folder, device="bogus"), "no device 'bogus'"),
        (lambda: model.save(None), "to a folder, not to None"),
        (lambda: model.save(tmp_path / "a", packing=5), "but got 5"),
        (lambda: model.save(tmp_path / "a", packing={"(": "int8"}), "patterns of names"),
        (lambda: model.save(tmp_path / "a", shard_bytes=None), "a number of bytes, not None"),
        (lambda: convert(folder, ""), "not to ''"),
        (lambda: model(torch.tensor([1, 2])), r"\[batch, n\], but got .* \[2\]"),
        (lambda: model(torch.ones(1, 2)), "whole numbers"),
        (lambda: model(torch.ones(1, 2).bool()), "whole numbers"),
        (lambda: model([[1, 2]]), "a tensor"),
    ):
        with pytest.raises(InputError, match=words):
            make()


def test_what_is_not_there_is_said(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no folder"):
        load(tmp_path / "nothing")
    (folder / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match="neither"):
        load(folder)
    (folder / CONFIG).unlink()
    with pytest.raises(CheckpointError, match=r"no file .*config\.json"):
        load(folder)
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(InputError, match="is a file"):
        write(file, {}, {})


def offline(code: str, cache: Path) -> str:
    """What a fresh Python says that may not ask the hub."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    return done.stdout + done.stderr


@pytest.mark.processes
def test_a_model_that_is_not_here_is_an_error_that_says_how_to_get_it(tmp_path: Path) -> None:
    said = offline("import regard; regard.load('gpt2')", tmp_path)
    assert "UnknownModelError: There is no folder gpt2" in said
    assert "regard get gpt2" in said


@pytest.mark.processes
def test_the_local_cache_of_the_hub_is_read(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--someone--tiny"
    commit = "a" * 40
    broken.good(repository / "snapshots" / commit, sharded=False)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    said = offline("import regard; print(type(regard.load('someone/tiny')).__name__)", tmp_path)
    assert said.strip() == "GPT2"


def test_an_interrupted_save_leaves_the_old_file(folder: Path, monkeypatch) -> None:
    before = (folder / WEIGHTS).read_bytes()
    model = load(folder)

    def fails(descriptor: int) -> None:
        raise OSError("the disk is full")

    monkeypatch.setattr(os, "fsync", fails)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    with pytest.raises(OSError, match="disk is full"):
        model.save(folder)
    assert (folder / WEIGHTS).read_bytes() == before


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"new.a": torch.zeros(3)}, "twice"),
        ({"new.q": torch.zeros(1, 2)}, "one shape"),
        ({"new.b": torch.zeros(3)}, "a matrix"),
    ],
)
def test_key_maps_refuse_what_does_not_fit(change: dict[str, torch.Tensor], words: str) -> None:
    rules = [Rename("new.a", "a"), Transpose("new.b", "b"), Fuse(("new.q", "new.k"), "qk")]
    keys = KeyMap([Spelling(r"^old\.", "new."), *rules])
    theirs = {"old.a": torch.ones(3), "new.b": torch.ones(2, 3)}
    theirs |= {"new.q": torch.ones(2, 2), "new.k": torch.ones(2, 2)}
    assert keys.load(theirs).keys() == {"a", "b", "qk"}
    with pytest.raises(CheckpointError, match=words):
        keys.load(theirs | change)


_opened: list[str] = []
_watching = False


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watching and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        _opened.append(os.fsdecode(arguments[0]))


sys.addaudithook(_audit)


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True])
def test_a_thousand_broken_checkpoints_raise_our_errors_only(tmp_path: Path, sharded: bool) -> None:
    global _watching  # noqa: PLW0603
    source = tmp_path / "good"
    broken.good(source, sharded=sharded)
    load(source)  # whatever is imported on first use is imported now
    refused = 0
    for seed in range(500):
        target = tmp_path / f"broken-{seed}"
        name = broken.broken(source, target, random.Random(seed))
        _opened.clear()
        _watching = True
        try:
            load(target)
        except RegardError:
            refused += 1
        finally:
            _watching = False
        outside = [path for path in _opened if not path.startswith(str(target))]
        assert not outside, f"seed {seed} ({name}) opened {outside}"
    assert refused > 300


def test_a_run_is_no_model_but_has_one(tmp_path: Path) -> None:
    tiny = GPT2(GPT2Config(vocabulary=20, length=16, dim=8, depth=1, heads=2))
    tiny.save(tmp_path / "run" / "model")
    with pytest.raises(CheckpointError, match=r"is a training run; its model is in .*run/model\."):
        load(tmp_path / "run")
