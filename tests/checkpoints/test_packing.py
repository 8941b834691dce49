"""Packed weights: small files, numbers that stay close, and damage that is noticed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from helpers.model_folders import edit
from regard import GPT2, CheckpointError, GPT2Config, InputError, load
from regard.checkpoints.packing import pack, packed, unpack
from regard.checkpoints.tensors import WEIGHTS


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("size", [1e-8, 1e-6, 1e-4, 0.02, 1.0, 1000.0])
def test_no_number_moves_far_and_packing_twice_changes_nothing(kind: str, size: float) -> None:
    matrix = torch.randn(40, 96, generator=torch.Generator().manual_seed(0)) * size
    matrix[3] = 0
    matrix[4, 5] = 30 * size  # one number that towers over its row
    numbers, scale = pack(matrix, kind)
    back = unpack(numbers, scale)
    step = scale.float().repeat_interleave(96 // scale.shape[1], 1)
    assert ((back - matrix).abs() <= step / 2 + 8e-6).all()
    assert not back[3].any()
    again = pack(back, kind)
    assert torch.equal(again[0], numbers)
    assert torch.equal(again[1], scale)


def test_sizes_are_as_promised() -> None:
    matrix = torch.randn(64, 128)
    numbers, scale = pack(matrix, "int8")
    assert (numbers.nbytes, scale.nbytes) == (64 * 128, 64 * 2)
    numbers, scale = pack(matrix, "int4")
    assert (numbers.nbytes, scale.nbytes) == (64 * 64, 64 * 4 * 2)


@pytest.mark.parametrize(
    ("matrix", "kind", "words"),
    [
        (torch.ones(32), "int8", "Only matrices"),
        (torch.ones(2, 32).int(), "int8", "Only matrices"),
        (torch.ones(2, 33), "int4", "parts of 32"),
        (torch.full((2, 32), torch.nan), "int8", "not finite"),
        (torch.full((2, 32), 1e9), "int4", "not finite"),
        (torch.ones(2, 32), "int2", '"int8" or "int4"'),
    ],
)
def test_what_cannot_be_packed_is_refused(matrix, kind, words) -> None:
    with pytest.raises(InputError, match=words):
        pack(matrix, kind)


def model() -> GPT2:
    torch.manual_seed(0)
    return GPT2(GPT2Config(vocabulary=50, length=40, dim=32, depth=2, heads=2)).eval()


@pytest.mark.parametrize("packing", ["int8", "int4", {"wte": "int8", "attn": "int4"}])
def test_a_packed_model_loads_as_float32_and_says_nearly_the_same(
    tmp_path: Path, packing: str
) -> None:
    one = model()
    one.save(tmp_path / "plain")
    one.save(tmp_path / "packed", packing=packing)
    sizes = [(tmp_path / name / WEIGHTS).stat().st_size for name in ("plain", "packed")]
    assert sizes[1] < sizes[0] / 2
    assert json.loads((tmp_path / "packed/config.json").read_text())["packing"] == packing
    other = load(tmp_path / "packed")
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    for (name, a), b in zip(one.named_parameters(), other.parameters(), strict=True):
        coarse = a.dim() == 2 and packing != "int8"
        assert (a - b).abs().max() <= a.abs().max() * (0.08 if coarse else 0.005), name
    assert load(tmp_path / "packed", dtype=torch.bfloat16).tokens.weight.dtype == torch.bfloat16
    # What was packed packs to the same bytes.
    other.save(tmp_path / "again", packing=packing)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (
        tmp_path / "packed" / WEIGHTS
    ).read_bytes()


def test_patterns_choose_what_is_packed_and_how() -> None:
    tensors = {
        "embed.weight": torch.randn(64, 64),
        "layer.weight": torch.randn(64, 64),
        "odd.weight": torch.randn(64, 40),
        "norm": torch.randn(64),
        "table": torch.randn(32, 8),
    }
    found = packed(tensors, {"embed": "int8", "layer|odd": "int4"})
    kinds = {name: tensor.dtype for name, tensor in found.items() if not name.endswith(".scale")}
    assert kinds == {
        "embed.weight": torch.int8,
        "layer.weight": torch.uint8,
        "odd.weight": torch.int8,
        "norm": torch.float16,
        "table": torch.float16,
    }
    with pytest.raises(InputError, match="float16"):
        packed({"norm": torch.full((3,), 1e9)}, "int8")
    with pytest.raises(InputError, match='"int8" or "int4"'):
        packed({}, {"": "int3"})


KEY = "transformer.wte.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t[KEY + ".scale"].fill_(torch.nan), r"wte\.weight: .*scale is negative or not"),
        (lambda t: t[KEY + ".scale"].fill_(-1), r"wte\.weight: .*scale is negative"),
        (lambda t: t[KEY].fill_(-128), r"wte\.weight: .*below the allowed range"),
        (lambda t: t.update({KEY + ".scale": torch.ones(50, 2).half()}), "have scales of shape"),
        (lambda t: t.update({KEY + ".scale": torch.ones(50, 1)}), "float16 scales"),
        (lambda t: t.update({KEY: torch.ones(50, 32)}), "int8 or uint8"),
        (lambda t: t.update({KEY: torch.ones(50, 31, dtype=torch.uint8)}), "have scales of shape"),
        (lambda t: t.pop(KEY), "scales of transformer.wte.weight, but not"),
        (lambda t: t.pop(KEY + ".scale"), "should hold floating-point numbers, not torch.int8"),
    ],
)
def test_damage_is_refused(tmp_path: Path, damage, words: str) -> None:
    model().save(tmp_path, packing="int8")
    tensors = load_file(tmp_path / WEIGHTS)
    damage(tensors)
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(CheckpointError, match=words):
        load(tmp_path)


def test_config_and_weights_must_agree_on_packing(tmp_path: Path) -> None:
    model().save(tmp_path)
    edit(tmp_path, packing="int8")
    with pytest.raises(CheckpointError, match="packed, but none are"):
        load(tmp_path)


@pytest.mark.parametrize("packing", ["int8", "int4", {"no such name": "int8"}])
def test_a_model_without_a_matrix_to_pack_loads_again(tmp_path: Path, packing) -> None:
    torch.manual_seed(0)
    one = GPT2(GPT2Config(vocabulary=300, length=16, dim=8, depth=1, heads=2)).eval()
    one.save(tmp_path / "small", packing=packing)
    stored = load_file(tmp_path / "small" / WEIGHTS)
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    other = load(tmp_path / "small")
    for (name, a), b in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a.half().float(), b[1]), name
    other.save(tmp_path / "again", packing=packing)
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (
        tmp_path / "small" / WEIGHTS
    ).read_bytes()
