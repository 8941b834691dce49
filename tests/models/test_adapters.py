"""LoRA: our updates in transformers' models, peft's files in ours, and files that do not fit."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from helpers.model_folders import edit
from helpers.random_models import agree, random_bert, random_gpt2, random_marian, random_t5
from regard import InputError, load, look, translate
from regard.checkpoints.tensors import OtherBaseWarning
from regard.errors import CheckpointError
from regard.models.adapting import adapt, adapted, save_adapter
from regard.models.conversion import convert
from regard.models.model import Model

IDS = torch.tensor([[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]])
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."


def answering() -> transformers.PreTrainedModel:
    return random_bert(transformers.BertForQuestionAnswering)


def gated_t5() -> transformers.PreTrainedModel:
    return random_t5(feed_forward_proj="gated-gelu", tie_word_embeddings=False)


FAMILIES: dict[str, tuple[Callable[[], Any], list[str], str | None]] = {
    "t5": (random_t5, ["q", "v"], "SEQ_2_SEQ_LM"),
    "gated t5": (gated_t5, ["wi_1", "wo"], "SEQ_2_SEQ_LM"),
    "gpt2": (random_gpt2, ["c_attn"], "CAUSAL_LM"),
    "marian": (random_marian, ["k_proj", "fc1"], "SEQ_2_SEQ_LM"),
    "bert": (answering, ["query", "value"], None),
}
EVERY = pytest.mark.parametrize("family", FAMILIES)


def theirs_of(family: str, folder: Path) -> nn.Module:
    model = FAMILIES[family][0]()
    model.save_pretrained(folder)
    return model.eval()


def ours_adapted(base: Path, folder: Path, **settings: Any) -> Model:
    """Our model of a base with random updates, which are saved as an adapter."""
    model = load(base)
    adapt(model, **{"rank": 2, "alpha": 6.0, **settings})
    with torch.no_grad():
        for _, layer in adapted(model):
            layer.lora_b.normal_()
    save_adapter(model, folder, str(base))
    return model


def outputs(model: nn.Module) -> Tensor:
    two = isinstance(model, transformers.PreTrainedModel) or hasattr(model, "peft_config")
    config = model.config
    with torch.no_grad():
        if getattr(config, "is_encoder_decoder", False) or hasattr(config, "decoder_depth"):
            if two:
                return model(input_ids=IDS, decoder_input_ids=IDS).logits
            return model(IDS, IDS)
        found = model(input_ids=IDS) if two else model(IDS)
    if isinstance(found, Tensor):
        return found
    start, end = found if isinstance(found, tuple) else (found.start_logits, found.end_logits) if (
        hasattr(found, "start_logits")
    ) else (found.logits, found.logits[..., :0])  # fmt: skip
    return torch.stack((start, end), -1) if start.shape == end.shape else start


def merged_by_definition(model: nn.Module, folder: Path) -> set[str]:
    """Add an adapter to a model of transformers as peft documents it; the modules changed."""
    tensors, config = load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())
    modules = dict(model.named_modules())
    changed = set()
    for key in tensors:
        assert key.startswith(PREFIX)
        if not key.endswith(".lora_A.weight"):
            continue
        name = key.removeprefix(PREFIX).removesuffix(".lora_A.weight")
        update = tensors[key.replace("lora_A", "lora_B")] @ tensors[key]
        update = update.T if config["fan_in_fan_out"] else update
        modules[name].weight.data += config["lora_alpha"] / config["r"] * update
        changed.add(name)
    assert len(tensors) == 2 * len(changed)
    return changed


def as_peft_writes(folder: Path, base: Path, model: nn.Module, targets: list[str]) -> None:
    """An adapter for some modules, without config.json and tokenizer, as peft writes it."""
    torch.manual_seed(3)
    tensors = {}
    for name, module in model.named_modules():
        if name.rpartition(".")[2] in targets:
            outputs, inputs = module.weight.shape
            if type(module).__name__ == "Conv1D":
                outputs, inputs = inputs, outputs
            tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(3, inputs)
            tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, 3) / 4
    folder.mkdir()
    save_file(tensors, folder / WEIGHTS, {"format": "pt"})
    conv = "c_attn" in targets
    edit(folder, CONFIG, peft_type="LORA", base_model_name_or_path=str(base), r=3, lora_alpha=5,
         fan_in_fan_out=conv, target_modules=targets, use_dora=False, init_lora_weights=True,
         bias="none", modules_to_save=None, rank_pattern={}, alpha_pattern={})  # fmt: skip


@EVERY
def test_transformers_gives_our_numbers_with_our_adapter(family: str, tmp_path: Path) -> None:
    theirs = theirs_of(family, tmp_path / "base")
    ours = ours_adapted(tmp_path / "base", tmp_path / "adapter")
    before = outputs(theirs)
    changed = merged_by_definition(theirs, tmp_path / "adapter")
    after = outputs(theirs)
    assert not torch.allclose(before, after, rtol=0.01)
    agree(outputs(ours), after)
    agree(outputs(load(tmp_path / "adapter")), after)
    # peft finds the modules by the ends of their names
    said = json.loads((tmp_path / "adapter" / CONFIG).read_text())
    ends = [f".{name}" for name in said["target_modules"]]
    found = {n for n, _ in theirs.named_modules() if any(f".{n}".endswith(end) for end in ends)}
    assert found == changed
    assert said["task_type"] == FAMILIES[family][2]
    assert (said["r"], said["lora_alpha"]) == (2, 6.0)


@EVERY
def test_our_models_read_an_adapter_for_some_of_their_matrices(family: str, tmp_path: Path) -> None:
    theirs = theirs_of(family, tmp_path / "base")
    as_peft_writes(tmp_path / "adapter", tmp_path / "base", theirs, FAMILIES[family][1])
    assert merged_by_definition(theirs, tmp_path / "adapter")
    agree(outputs(load(tmp_path / "adapter")), outputs(theirs))
    edit(tmp_path / "adapter", CONFIG, use_rslora=True, lora_alpha=5 / 3**0.5)
    agree(outputs(load(tmp_path / "adapter")), outputs(theirs))


def test_an_adapter_may_replace_whole_tensors(tmp_path: Path) -> None:
    theirs = theirs_of("bert", tmp_path / "base")
    adapter = tmp_path / "adapter"
    as_peft_writes(adapter, tmp_path / "base", theirs, ["query"])
    tensors = load_file(adapter / WEIGHTS)
    tensors[f"{PREFIX}qa_outputs.weight"] = torch.randn(2, 16)
    tensors[f"{PREFIX}qa_outputs.bias"] = torch.randn(2)
    save_file(tensors, adapter / WEIGHTS, {"format": "pt"})
    model = load(adapter)
    assert torch.equal(model.ends.weight, tensors[f"{PREFIX}qa_outputs.weight"])
    assert torch.equal(model.ends.bias, tensors[f"{PREFIX}qa_outputs.bias"])
    tensors[f"{PREFIX}qa_outputs.bias"] = torch.randn(3)
    save_file(tensors, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=r"replaces qa_outputs\.bias, \[2\], by .* \[3\]"):
        load(adapter)


def test_a_merged_adapter_is_a_plain_checkpoint(tmp_path: Path) -> None:
    theirs = theirs_of("gpt2", tmp_path / "base")
    as_peft_writes(tmp_path / "adapter", tmp_path / "base", theirs, ["c_attn"])
    merged_by_definition(theirs, tmp_path / "adapter")
    (tmp_path / "base" / "README.md").write_text("The card of the base.")
    folder = convert(tmp_path / "adapter", tmp_path / "merged")
    assert not (folder / CONFIG).exists()
    assert not (folder / "README.md").exists()
    again = transformers.GPT2LMHeadModel.from_pretrained(folder)
    agree(outputs(again), outputs(theirs))


def test_a_packed_base_is_adapted_and_used_in_int8(made: Path, tmp_path: Path) -> None:
    base = convert(made / "translate", tmp_path / "base", packing="int8")
    ours = ours_adapted(base, tmp_path / "adapter", targets="attention")
    merged = load(tmp_path / "adapter", dtype=torch.float32)
    agree(outputs(merged), outputs(ours.float()))
    (tmp_path / "adapter" / "config.json").unlink()  # then it is the base's, like the tokenizer
    text = "The cat sat on the mat."
    found = {
        precision: translate(
            text, to="fr", model=tmp_path / "adapter", precision=precision, max_new_tokens=8
        ).text
        for precision in ("float32", "int8")
    }
    plain = translate(text, to="fr", model=base, max_new_tokens=8).text
    assert found["float32"] != plain
    assert found["int8"] != plain


def test_only_the_chosen_matrices_have_updates(made: Path) -> None:
    for targets, count, names in (
        ("attention", 2 * 2 + 2 * 4, {"qkv", "output"}),
        ("feed-forward", 2 * 2 + 2 * 2, {"up", "down"}),
        ("all", 8 + 12, {"qkv", "output", "up", "down"}),
    ):
        model = load(made / "translate")
        adapt(model, rank=2, alpha=4, targets=targets)
        found = [name for name, _ in adapted(model)]
        assert (len(found), {name.rpartition(".")[2] for name in found}) == (count, names)
        trained = {name for name, weight in model.named_parameters() if weight.requires_grad}
        assert trained == {f"{name}.lora_{letter}" for name in found for letter in "ab"}
    with pytest.raises(InputError, match=r"A rank of 33 is no saving for .*32 × 32"):
        adapt(load(made / "translate"), rank=33, alpha=4)


def test_other_weights_of_the_base_are_told(tmp_path: Path) -> None:
    theirs = theirs_of("t5", tmp_path / "base")
    ours_adapted(tmp_path / "base", tmp_path / "adapter")
    load(tmp_path / "adapter")
    with torch.no_grad():
        theirs.encoder.block[0].layer[0].SelfAttention.q.weight.mul_(1.5)
    theirs.save_pretrained(tmp_path / "base")
    with pytest.warns(OtherBaseWarning, match="was trained with other weights than .*base has now"):
        load(tmp_path / "adapter")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "says peft_type = 'LOHA', which regard does not read. Merge"),
        ({"use_dora": True}, "says use_dora = True"),
        ({"alpha_pattern": {"q": 3}}, "says alpha_pattern ="),
        ({"init_lora_weights": "pissa"}, "says init_lora_weights = 'pissa'"),
        ({"lora_alpha": None}, "lora_alpha = None is not a number"),
        ({"base_model_name_or_path": None}, "has no base_model_name_or_path"),
        ({"base_model_name_or_path": "./gone"}, r"is an adapter of ./gone\. There is no folder"),
    ],
)
def test_settings_that_regard_does_not_follow_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    theirs = theirs_of("t5", tmp_path / "base")
    as_peft_writes(tmp_path / "adapter", tmp_path / "base", theirs, ["q"])
    edit(tmp_path / "adapter", CONFIG, **changes)
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "adapter")


Q = "encoder.block.0.layer.0.SelfAttention.q"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        (f"{PREFIX}{Q}.lora_B.weight", (24, 2), "lora_A and lora_B of encoder.* do not fit"),
        (f"{PREFIX}{Q}.lora_B.weight", (23, 3), r"updates .*q\.weight as \[23, 16\], .* \[24, 16"),
        (f"{PREFIX}{Q}.lora_magnitude_vector", (24,), "lora_magnitude_vector, which regard does"),
        (f"{PREFIX}shared.lora_embedding_A", (3, 40), "lora_embedding_A, which regard does not"),
        (f"{PREFIX}other.lora_B.weight", (24, 3), r"other\.lora_B\.weight, which regard does not"),
        (f"{Q}.lora_A.weight", (3, 16), r"not base_model\.model\.\.\."),
        (f"{PREFIX}other.weight", (3, 3), r"changes other\.weight, which this model does not hold"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    tmp_path: Path, name: str, shape: tuple[int, ...], message: str
) -> None:
    theirs = theirs_of("t5", tmp_path / "base")
    adapter = tmp_path / "adapter"
    as_peft_writes(adapter, tmp_path / "base", theirs, ["q"])
    save_file({**load_file(adapter / WEIGHTS), name: torch.zeros(shape)}, adapter / WEIGHTS)
    with pytest.raises(CheckpointError, match=message):
        load(adapter)


def test_an_adapter_for_a_model_of_transformers_is_to_be_merged(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    edit(tmp_path / "base", architectures=["LlamaForCausalLM"], model_type="llama")
    (tmp_path / "adapter").mkdir()
    edit(tmp_path / "adapter", CONFIG, base_model_name_or_path=str(tmp_path / "base"))
    with pytest.raises(InputError, match="is an adapter for an architecture that regard does not"):
        look(tmp_path / "adapter", "The cat.")


def test_an_adapter_of_an_adapter_is_refused(tmp_path: Path) -> None:
    theirs = theirs_of("gpt2", tmp_path / "base")
    as_peft_writes(tmp_path / "one", tmp_path / "base", theirs, ["c_attn"])
    as_peft_writes(tmp_path / "two", tmp_path / "one", theirs, ["c_attn"])
    with pytest.raises(CheckpointError, match=r"which is an adapter, too\. Merge that one: regard"):
        load(tmp_path / "two")
    (tmp_path / "one" / WEIGHTS).unlink()
    with pytest.raises(CheckpointError, match=r"holds adapter_config\.json, but not adapter_model"):
        load(tmp_path / "one")


# ------------------------------------------------------------------------------------------- peft

with_peft = pytest.mark.skipif(
    find_spec("peft") is None,
    reason="NOT TESTED against peft, which is not installed: make test-peft",
)


@with_peft
@pytest.mark.filterwarnings("default")
@EVERY
def test_peft_reads_our_adapter(family: str, tmp_path: Path) -> None:
    from peft import PeftModel

    theirs = theirs_of(family, tmp_path / "base")
    ours_adapted(tmp_path / "base", tmp_path / "adapter")
    with_adapter = PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    agree(outputs(with_adapter), outputs(load(tmp_path / "adapter")))


@with_peft
@pytest.mark.filterwarnings("default")
@EVERY
def test_we_read_an_adapter_of_peft(family: str, tmp_path: Path) -> None:
    from peft import LoraConfig, get_peft_model

    make, targets, task = FAMILIES[family]
    theirs_of(family, tmp_path / "base")
    theirs = type(make()).from_pretrained(tmp_path / "base")
    settings = LoraConfig(
        r=3, lora_alpha=5, target_modules=targets, init_lora_weights=False, task_type=task,
        fan_in_fan_out=family == "gpt2",
    )  # fmt: skip
    with_adapter = get_peft_model(theirs, settings).eval()
    with_adapter.save_pretrained(tmp_path / "adapter")
    assert not (tmp_path / "adapter" / "config.json").exists()
    agree(outputs(load(tmp_path / "adapter")), outputs(with_adapter))
