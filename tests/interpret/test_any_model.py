"""look() and explain_model() on models of transformers, plain modules and images."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from helpers.library_models import (
    CAUSAL,
    eager,
    library_folder,
    library_model,
    library_tokenizer,
)
from helpers.random_models import of_five
from helpers.sine_models import TEXT, tokenizer
from regard import (
    Causal,
    CheckpointError,
    InputError,
    MultiHeadAttention,
    See,
    attention,
    explain_model,
    look,
)
from regard.interpret import cost, heads, runs
from regard.interpret.cost import CostEstimate
from regard.interpret.explaining.steps import TracedCall, trace_call
from regard.interpret.heads import HeadMap, WordKeys
from regard.interpret.overview import Overview
from regard.interpret.patches import PatchOverview, PatchWeights
from regard.interpret.runs import prepare_run
from regard.interpret.subjects import others
from regard.interpret.word_alignment import Alignment
from regard.mechanism.call import check

pytestmark = of_five("is too old to load other architectures")
IDS = tokenizer().encode(TEXT).ids
TARGET = "the mat was cold"


def look_at(model: nn.Module, text: str = TEXT, **asked: Any) -> Any:
    return look(model, text, tokenizer=library_tokenizer(), **asked)


def own_weights(model: Any, ids: list[int] = IDS) -> list[Tensor]:
    """The weights of each layer as transformers computes them, [heads, queries, keys]."""
    tokens = torch.tensor([ids])
    output = eager(model, lambda m: m.base_model(input_ids=tokens, output_attentions=True))
    return [weights[0].double() for weights in output.attentions]


def expected_overview(weights: list[Tensor]) -> dict[str, Tensor]:
    """The measures of self-attention layers, [layers, heads], from dense weights."""
    table = torch.stack(weights)  # [layers, heads, n, n]
    n = table.shape[-1]
    far = (torch.arange(n)[:, None] - torch.arange(n)).abs()
    diagonal = table.diagonal(dim1=-2, dim2=-1)
    return {
        "entropy": torch.special.entr(table).sum(-1).mean(-1),
        "distance": (table * far).sum(-1).mean(-1),
        "first": table[:, :, 1:, 0].mean(-1),
        "previous": table.diagonal(-1, -2, -1).mean(-1),
        "self": diagonal[:, :, 1:].mean(-1),
    }


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        found.double(), expected.double(), rtol=1e-4, atol=1e-5, equal_nan=True
    )


# Texts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CAUSAL, "roberta", "albert"])
def test_an_overview_is_what_the_models_own_weights_say(name: str) -> None:
    model = library_model(name)
    found = look_at(model)
    assert isinstance(found, Overview)
    assert (found.model, found.layers) == (type(model).__name__, ("0", "1"))
    assert found.tokens == len(IDS)
    for measure, values in expected_overview(own_weights(model)).items():
        close(found.values[measure], values)
    assert found.strongest("induction") is not None
    assert found.picture().title.startswith(f"{type(model).__name__}: what 2 layers")


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_encoder_decoders_have_three_kinds_of_layers(name: str) -> None:
    model = library_model(name)
    run = prepare_run(model, TEXT, tokenizer=library_tokenizer(), target=TARGET)
    start, _ = run.subject.start
    target = tokenizer().encode(TARGET).ids
    output = eager(
        model,
        lambda m: m(
            input_ids=torch.tensor([IDS]),
            decoder_input_ids=torch.tensor([[start, *target[:-1]]]),
            output_attentions=True,
        ),
    )
    own = {
        "encoder": output.encoder_attentions,
        "decoder": output.decoder_attentions,
        "cross": output.cross_attentions,
    }
    found = look_at(model, target=TARGET)
    assert found.layers == tuple(f"{kind}.{layer}" for kind in own for layer in (0, 1))
    for row, layer in enumerate(found.layers):
        kind, _, number = layer.partition(".")
        weights = own[kind][int(number)][0].double()
        close(found.values["entropy"][row], torch.special.entr(weights).sum(-1).mean(-1))
        one = look_at(model, target=TARGET, layer=layer, head=3)
        close(one.weights, weights[3])
    assert one.queries == run.tokens_of(run.layer("cross.1"))[0].labels


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_writes_the_target_itself(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = library_model(name)
    monkeypatch.setattr(runs, "MAX_TARGET", 256 if name == "bart" else 12)
    run = prepare_run(model, TEXT, tokenizer=library_tokenizer())
    assert run.target is not None
    most = 12 if name == "t5" else 64  # the positions of BART's decoder
    written = model.generate(torch.tensor([IDS]), max_new_tokens=most, do_sample=False)[0, 1:]
    assert run.target.ids == tuple(written.tolist())


@pytest.mark.parametrize("name", CAUSAL)
def test_a_decoder_reads_a_long_text_in_pieces_with_its_cache(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = library_model(name)
    whole = {asked: look_at(model, TEXT * 2, **dict(asked)) for asked in ASKED}
    monkeypatch.setattr(others, "PIECE", 5)
    run = prepare_run(model, TEXT * 2, tokenizer=library_tokenizer())
    assert len(run.chunks) > 3
    assert run.chunks[-1].memory == run.chunks[-1].start
    assert not run.notes  # the result is that of the whole text
    for asked, expected in whole.items():
        found = look_at(model, TEXT * 2, **dict(asked))
        values = expected.values if isinstance(expected, Overview) else {"": expected.weights}
        for measure, numbers in values.items():
            own = found.values[measure] if isinstance(found, Overview) else found.weights
            close(own, numbers)


ASKED = ((), (("layer", 1), ("head", 2)), (("word", "mat"),))


@pytest.mark.parametrize("most", [1, 4 * 44 * 10, 2**25])
def test_a_long_map_is_pooled_over_the_pieces(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = library_model("mistral"), TEXT * 4
    monkeypatch.setattr(heads, "MAX_CELLS", 5)
    whole = look_at(model, text, layer=1, head=2)
    assert whole.pooled
    monkeypatch.setattr(others, "PIECE", 13)
    monkeypatch.setattr(heads, "MAX_WEIGHTS", most)
    run = prepare_run(model, text, tokenizer=library_tokenizer())
    measurement = heads.MapMeasurement(run, run.layer(1), 2)
    kinds = {tuple(measurement.see(run.layer(1), c).requested) for c in measurement.run.chunks}
    assert kinds == {("received",) if most == 1 else ("weights",)}
    assert (len(measurement.run.chunks) > len(run.chunks)) == (most < 2**25)
    found = look_at(model, text, layer=1, head=2)
    close(found.weights.sum(-1), torch.ones(5))
    weights = own_weights(model, list(run.tokens.ids))[1][2]
    bins = torch.arange(44) * 5 // 44
    pooled = torch.zeros(5, 5, dtype=torch.float64)
    pooled.index_put_((bins[:, None].expand(-1, 44), bins.expand(44, -1)), weights, True)
    close(found.weights, pooled / bins.bincount()[:, None])


def test_windows_begin_anew_where_positions_end(monkeypatch: pytest.MonkeyPatch) -> None:
    model = library_model("roberta")
    run = prepare_run(model, TEXT * 20, tokenizer=library_tokenizer())
    assert run.subject.longest == 62  # positions begin after that of padding
    assert [chunk.memory for chunk in run.chunks] == [0] * len(run.chunks)
    found = look_at(model, TEXT * 20)
    assert "independent windows" in found.notes[0]
    monkeypatch.setattr(others, "PIECE", 25)
    llama = prepare_run(library_model("llama"), TEXT * 20, tokenizer=library_tokenizer())
    assert [chunk.memory for chunk in llama.chunks[:4]] == [0, 25, 50, 0]
    assert "64 positions" in llama.notes[0]
    pieces = look_at(library_model("llama"), TEXT * 20)
    monkeypatch.setattr(others, "PIECE", 64)
    for measure, values in look_at(library_model("llama"), TEXT * 20).values.items():
        close(pieces.values[measure], values)


def test_a_long_source_runs_through_the_encoder_alone() -> None:
    model = library_model("bart")
    found = look_at(model, TEXT * 10)
    assert found.layers == ("encoder.0", "encoder.1")
    assert "64 positions" in found.notes[0]
    assert "Only the encoder ran" in found.notes[1]
    with pytest.raises(InputError, match="reads a source of up to 64 tokens"):
        look_at(model, TEXT * 10, target=TARGET)


def test_attention_that_cannot_be_shown_is_named() -> None:
    config = transformers.LongT5Config(
        vocab_size=300, d_model=16, d_kv=4, d_ff=24, num_layers=1, num_heads=4,
        decoder_start_token_id=0,
    )  # fmt: skip
    model = transformers.LongT5ForConditionalGeneration(config).eval()
    with pytest.warns(UserWarning, match="could not be recorded"):
        found = look_at(model, target=TARGET)
    assert found.layers == ("decoder.0", "cross.0")
    assert "Not recorded, because watch cannot see them: encoder.block.0" in found.notes[0]


def test_layers_are_named_by_their_modules_too() -> None:
    model = library_model("llama")
    found = look_at(model, layer="model.layers.1.self_attn", head=1)
    assert isinstance(found, HeadMap)
    assert found.layer == "1"
    close(found.weights, own_weights(model)[1][1])


def test_layers_that_share_a_module_are_told_apart() -> None:
    model = library_model("albert")
    for layer, weights in enumerate(own_weights(model)):
        close(look_at(model, layer=layer, head=2).weights, weights[2])


def test_a_words_keys_are_whole_words() -> None:
    model = library_model("pythia")
    found = look_at(model, "the cathouse sat on the mat", layer=1, head=2, word="sat")
    assert isinstance(found, WordKeys)
    assert found.keys == ("the", "cathouse", "sat", "on", "the", "mat")
    assert found.weights.sum().item() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_words_are_aligned_by_cross_attention(name: str) -> None:
    model = library_model(name)
    found = look_at(model, "the cat sat", target="the mat was", alignment=True)
    assert isinstance(found, Alignment)
    assert found.source == ("the", "cat", "sat")
    assert found.target == ("the", "mat", "was")
    assert list(found.scores.shape) == [2, 4]
    ids, target = (tokenizer().encode(each).ids for each in ("the cat sat", "the mat was"))
    run = prepare_run(model, "the cat sat", tokenizer=library_tokenizer(), target="the mat was")
    read = torch.tensor([[run.subject.start[0], *target[:-1]]])

    def likely(source: list[int]) -> Tensor:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([source]), decoder_input_ids=read).logits[0]
        chosen = torch.tensor(target)[:, None]
        each = logits.double().log_softmax(-1).gather(-1, chosen)[:, 0]
        return torch.stack([each[list(word.places)].sum() for word in run.target.words])

    place = run.tokens.words[1].places
    without = [token for at, token in enumerate(ids) if at not in place]
    close(found.effect[:, 1], likely(ids) - likely(without))


def test_tokens_without_offsets_are_words() -> None:
    model = library_model("roberta", vocab_size=400)
    slow = transformers.ByT5Tokenizer()
    assert not slow.is_fast
    found = look(model, "the cat", tokenizer=slow, word="c")
    assert found.keys[:3] == ("t", "h", "e")
    assert found.keys[-1] == "</s>"


def test_our_tokenizer_serves_as_well() -> None:
    model = library_model("llama")
    ours = look(model, TEXT, tokenizer=tokenizer())
    for measure, values in look_at(model).values.items():
        torch.testing.assert_close(ours.values[measure], values, equal_nan=True)


def test_a_model_is_left_as_it_was() -> None:
    model = library_model("gemma3").train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    implementation = model.config._attn_implementation
    look_at(model)
    assert [module.training for module in model.modules()] == before
    assert model.config._attn_implementation == implementation
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


# Explaining ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*CAUSAL, "roberta", "albert"])
def test_a_trace_has_the_models_own_numbers(name: str) -> None:
    model = library_model(name)
    trace = explain_model(
        model, TEXT, tokenizer=library_tokenizer(), layer=1, head=3, word="because"
    )
    assert trace.agreement.holds
    assert trace.agreement.fast_path == "The model itself"
    assert (trace.subject, trace.word) == (f"{type(model).__name__}, layer 1, head 3", "because")
    close(trace["A"][0], own_weights(model)[1][3])
    if name == "roberta":
        close(trace["X W_Q"], trace["Q"][0])  # nothing lies between
    text = " ".join(str(trace).split())
    grouped = name in ("llama", "qwen3", "mistral", "gemma3")
    assert ("2 heads of queries share each head of keys and values" in text) == grouped
    assert ("Q and K differ from the projections" in text) == grouped
    assert ("no linear layers named q_proj" in text) == (name == "pythia")
    json.dumps(trace.to_dict())


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_cross_attention_is_explained(name: str) -> None:
    model = library_model(name)
    asked = {"tokenizer": library_tokenizer(), "target": TARGET}
    trace = explain_model(model, TEXT, layer="cross.1", head=2, **asked)
    assert trace.agreement.holds
    assert trace["X_encoder"].shape == (len(IDS), 16)
    close(trace["A"][0], look(model, TEXT, layer="cross.1", head=2, **asked).weights)
    assert "X_encoder W_K" in str(trace)


def test_a_soft_cap_and_a_sink_are_steps() -> None:
    make = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 5, 4, generator=make) * 3
    sinks = torch.tensor([0.5, -1.0])
    call = check(query, key, value, Causal(), None, None, 2.0, 0.0, None, None, sinks)
    words = tuple("abcde")
    traced = TracedCall(call, words, words, 4, ("head 0", "head 1"), (1,))
    trace = trace_call(traced, (), None)
    assert trace.agreement.holds
    assert trace["S_capped"].abs().max() <= 2
    _, seen = attention(
        query, key, value, mask=Causal(), softcap=2.0, sinks=sinks, see=See(weights=True)
    )
    close(trace["A"][0], seen.weights[0, 1])
    text = " ".join(str(trace).split())
    assert "S_capped = 2 tanh(S_scaled / 2)" in text
    assert "the weight of the learned sink, -1.000" in text
    assert "S_masked = S_capped where Causal() allows" in text


def test_a_text_that_is_too_long_to_print_is_refused() -> None:
    with pytest.raises(InputError, match="takes up to 64 tokens for this model"):
        explain_model(library_model("llama"), TEXT * 20, tokenizer=library_tokenizer())


# Folders ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("library")
    for name in ("llama", "bart", "vit"):
        library_folder(place / name, name)
    return place


@pytest.mark.parametrize("name", ["llama", "bart"])
def test_a_folder_is_looked_into(root: Path, name: str) -> None:
    extra = {"target": TARGET} if name == "bart" else {}
    found = look(root / name, TEXT, **extra)
    for measure, values in look_at(library_model(name), **extra).values.items():
        close(found.values[measure], values)
    first, second = (prepare_run(root / name, TEXT, **extra).subject.model for _ in range(2))
    assert first is second
    assert first.config._attn_implementation == "regard"


def edited(root: Path, place: Path, **changes: Any) -> Path:
    place.mkdir()
    for file in (root / "llama").iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    config = json.loads((place / "config.json").read_text())
    (place / "config.json").write_text(json.dumps({**config, **changes}))
    return place


def test_code_of_a_model_runs_only_on_request(root: Path, tmp_path: Path) -> None:
    code = {"AutoConfig": "configuration_mine.Mine", "AutoModelForCausalLM": "modeling_mine.Mine"}
    folder = edited(root, tmp_path / "mine", architectures=["Mine"], auto_map=code)
    (folder / "modeling_mine.py").write_text("raise SystemExit('this ran')\n")
    (folder / "configuration_mine.py").write_text("raise SystemExit('this ran')\n")
    with pytest.raises(InputError, match=r"code of its own.*trust_remote_code=True"):
        look(folder, TEXT)


def test_code_that_is_trusted_runs(root: Path, tmp_path: Path) -> None:
    code = {"AutoModelForCausalLM": "modeling_mine.Mine"}
    folder = edited(root, tmp_path / "mine", architectures=["Mine"], auto_map=code)
    (folder / "modeling_mine.py").write_text(
        "from transformers import LlamaForCausalLM\n\nclass Mine(LlamaForCausalLM):\n    pass\n"
    )
    found = look(folder, TEXT, trust_remote_code=True)
    assert found.model == "Mine"
    close(found.values["entropy"], look_at(library_model("llama")).values["entropy"])


def test_what_cannot_be_loaded_says_why(root: Path, tmp_path: Path) -> None:
    unknown = edited(root, tmp_path / "unknown", architectures=["Nobody"], model_type="nobody")
    with pytest.raises(InputError, match=r"\['Nobody'\].*Neither regard nor transformers"):
        look(unknown, TEXT)
    bare = edited(root, tmp_path / "bare")
    for file in bare.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer that transformers can load"):
        look(bare, TEXT)
    pickled = edited(root, tmp_path / "pickled")
    (pickled / "model.safetensors").rename(pickled / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="a pickle"):
        look(pickled, TEXT)


def test_without_transformers_the_error_says_what_to_install(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r"pip install 'regard\[transformers\]'"):
        look(root / "llama", TEXT)


# Plain modules ---------------------------------------------------------------------------------


class Plain(nn.Module):
    """Two layers of attention over embedded ids, in no library's shape."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(300, 8)
        self.attentions = nn.ModuleList(MultiHeadAttention(8, heads=2) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.attentions:
            x = x + layer(x)
        return x


def test_a_plain_module_runs_on_token_ids() -> None:
    model = Plain().eval()
    found = look_at(model)
    assert (found.model, found.layers) == ("Plain", ("0", "1"))
    one = look_at(model, layer="attentions.1", head=1)
    assert one.layer == "1"
    close(one.weights.sum(-1), torch.ones(len(IDS)))


class Encoder(nn.Module):
    """PyTorch's own encoder, whose layers are fused unless something watches them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(300, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.encoder(self.embedding(ids))


def test_an_encoder_of_pytorch_is_looked_into_and_explained() -> None:
    model = Encoder().eval()
    one = look_at(model, layer="encoder.layers.1.self_attn", head=2)
    assert one.layer == "1"
    close(one.weights.sum(-1), torch.ones(len(IDS)))
    trace = explain_model(model, TEXT, tokenizer=library_tokenizer(), layer=1, head=2)
    assert trace.agreement.holds
    close(trace["A"][0], one.weights)


def test_a_module_that_reads_no_ids_is_refused() -> None:
    with pytest.raises(InputError, match="MultiHeadAttention cannot be run on token ids"):
        look_at(MultiHeadAttention(8, heads=2))


# Images ----------------------------------------------------------------------------------------


def pixels() -> Tensor:
    return torch.randn(3, 32, 32, generator=torch.Generator().manual_seed(0))


def own_patch_weights(model: Any) -> list[Tensor]:
    image = pixels()[None]
    output = eager(model, lambda m: m(pixel_values=image, output_attentions=True))
    return [weights[0].double() for weights in output.attentions]


@pytest.mark.parametrize("name", ["vit", "siglip"])
def test_patches_are_the_tokens_of_an_image(name: str) -> None:
    model = library_model(name)
    weights = own_patch_weights(model)
    before = weights[0].shape[-1] - 16
    found = look(model, image=pixels())
    assert isinstance(found, PatchOverview)
    places = torch.cartesian_prod(torch.arange(4.0), torch.arange(4.0)).double()
    far = (places[:, None] - places).norm(dim=-1)
    for row, each in enumerate(weights):
        own = each[:, before:]
        among = own[:, :, before:]
        distance = ((among * far).sum(-1) / among.sum(-1)).mean(-1)
        close(found.values["distance"][row], distance)
        close(found.values["entropy"][row], torch.special.entr(own).sum(-1).mean(-1))
        close(found.values["self"][row], among.diagonal(dim1=1, dim2=2).mean(-1))
        if before:
            close(found.values["first"][row], own[:, :, 0].mean(-1))
    assert (found.strongest("first") is None) == (before == 0)
    patch = look(model, image=pixels(), layer=1, head=2, word="1,2")
    assert isinstance(patch, PatchWeights)
    close(patch.on_patches, weights[1][2, before + 6, before:].view(4, 4))
    drawing = patch.picture().drawing
    assert (len(drawing.values), len(drawing.values[0])) == (4, 4)
    assert drawing.marks == {(1, 2)}
    one = look(model, image=pixels(), layer=0, head=3)
    close(one.weights, weights[0][3])
    assert one.queries[before : before + 5] == ("0,0", "0,1", "0,2", "0,3", "1,0")


def test_the_class_token_has_a_grid_too(root: Path) -> None:
    model = library_model("vit")
    found = look(model, image=pixels(), word="[CLS]")
    mean = torch.stack(own_patch_weights(model)).mean((0, 1))[0]
    close(found.weights, mean)
    text = found.picture().text(width=80, color="none")
    assert f"Weight on other tokens: [CLS] {mean[0]:.1%}." in text
    assert json.loads(json.dumps(found.to_dict()))["grid"] == [4, 4]


def test_a_folder_reads_a_file(root: Path, tmp_path: Path) -> None:
    from PIL import Image

    picture = Image.effect_noise((40, 40), 60).convert("RGB")
    picture.save(tmp_path / "noise.png")
    from_file = look(root / "vit", image=tmp_path / "noise.png", word="[CLS]")
    from_object = look(root / "vit", image=picture, word="[CLS]")
    assert torch.equal(from_file.weights, from_object.weights)
    found = look(library_model("vit"), image=pixels(), word="[CLS]")
    assert not torch.equal(from_file.weights, found.weights)


def swin() -> nn.Module:
    config = transformers.SwinConfig(
        image_size=32, patch_size=4, embed_dim=8, depths=[1, 1], num_heads=[2, 2], window_size=4
    )
    return transformers.SwinModel(config).eval()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: look(library_model("vit")), "takes a text or an image: give one"),
        (lambda: look(library_model("vit"), "a", image=pixels()), "a text or an image: give one"),
        (lambda: look_at(library_model("vit")), "ViTForImageClassification cannot be run on token"),
        (lambda: look(library_model("roberta"), image=pixels()), "cannot be run on an image"),
        (lambda: look(swin(), image=pixels()), "SwinModel attends among .* 8 x 8 patches"),
        (lambda: look("answer", image=pixels()), "answer is a .*, which reads no images"),
        (lambda: look(Plain(), image=pixels()), "vision models of transformers.* not for Plain"),
        (
            lambda: look(library_model("vit"), image=pixels(), word="4,0"),
            r"no patch '4,0'. Name it by row and column, from 0,0 to 3,3, or \[CLS\]",
        ),
        (lambda: look(library_model("vit"), image="cat.png"), "loaded model takes pixel values"),
        (lambda: look(library_model("vit"), image=pixels()[0]), r"numbers \[channels, height, wi"),
        (lambda: look(library_model("vit"), image=pixels(), target="a"), "has no target"),
        (lambda: look(library_model("vit"), image=pixels()[:, :16]), "cannot be run on an image"),
        (
            lambda: look(library_model("vit"), image=pixels(), alignment=True),
            "no cross-attention to align",
        ),
    ],
)
def test_what_an_image_does_not_allow_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


# What means nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: look(library_model("llama"), TEXT), "loaded LlamaForCausalLM needs its tokenizer"),
        (lambda: look(library_model("llama"), TEXT, tokenizer=5), "tokenizer= takes a Tokenizer"),
        (lambda: look_at(library_model("llama"), ""), "The text '' has no tokens"),
        (lambda: look_at(library_model("llama", vocab_size=20)), "has 20 tokens: they do not"),
        (lambda: look_at(library_model("llama"), target="a"), "LlamaForCausalLM takes no target"),
        (lambda: look_at(library_model("llama"), layer=5), "no layer '5'. Layers are 0, 1"),
        (lambda: look_at(library_model("llama"), layer=0, head=4), "no head 4: layer 0 has heads"),
        (lambda: look_at(library_model("llama"), alignment=True), "LlamaForCausalLM has no cross"),
        (lambda: look_at(library_model("llama"), trust_remote_code=True), "not to a loaded model"),
    ],
)
def test_invalid_arguments_are_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


@pytest.fixture
def early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MIN_TOKENS", 32)
    monkeypatch.setattr(others, "PIECE", 16)


@pytest.mark.parametrize("name", ["llama", "roberta", "t5"])
def test_the_cost_is_estimated_before_it_starts(name: str, early: None) -> None:
    estimates: list[CostEstimate] = []
    done: list[tuple[int, int]] = []
    look_at(
        library_model(name),
        TEXT * 12,
        **({"target": "the"} if name == "t5" else {}),
        on_estimate=estimates.append,
        progress=lambda now, total: done.append((now, total)),
    )
    [found] = estimates
    assert found.seconds > 0
    assert found.memory > 0
    assert [now for now, _ in done] == sorted(now for now, _ in done)
    assert done[-1][0] == done[-1][1]
