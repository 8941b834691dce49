"""Transformer-XL agrees with its paper's formulas, written out word by word and pair by pair.

transformers no longer has this model, so the reference is here: loops over queries, keys and
words, in float64, with nothing shared with the library but the weights.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from helpers.random_models import XL_IDS, XL_SIZES, agree, random_xl, same_files
from regard import (
    CheckpointError,
    InputError,
    Padding,
    See,
    TransformerXL,
    TransformerXLConfig,
    load,
)
from regard.interpret.watching import watch
from regard.layers.modules import lock_dropout

VARIANTS = {
    "plain": {"same_length": False},
    "same length": {"same_length": True},
    "clamped": {"same_length": False, "furthest": 3},
    "both": {"same_length": True, "furthest": 4},
}


class Direct:
    """The formulas of section 3 for one sequence at a time."""

    def __init__(self, model: TransformerXL) -> None:
        self.config = model.config
        self.weights = {name: t.double() for name, t in model.state_dict().items()}
        self.memory: list[list[Tensor]] = [[] for _ in range(self.config.depth)]

    def embed(self, word: int) -> Tensor:
        ends = (0, *self.config.cutoffs, self.config.vocabulary)
        band = next(i for i in range(len(ends) - 1) if ends[i] <= word < ends[i + 1])
        row = self.weights[f"embedding.tables.{band}"][word - ends[band]]
        projection = self.weights[f"embedding.projections.{band}"]
        return projection @ row * math.sqrt(self.config.dim)

    def sinusoid(self, distance: int) -> Tensor:
        if self.config.furthest is not None:
            distance = min(distance, self.config.furthest)
        half = self.config.dim // 2
        angles = [distance / 10000 ** (2 * i / self.config.dim) for i in range(half)]
        return torch.tensor(
            [math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64
        )

    def norm(self, x: Tensor, name: str) -> Tensor:
        centred = x - x.mean()
        scaled = centred / (centred.square().mean() + self.config.epsilon).sqrt()
        return scaled * self.weights[f"{name}.weight"] + self.weights[f"{name}.bias"]

    def layer(self, index: int, past: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
        config, weights = self.config, self.weights
        prefix = f"layers.{index}"
        whole = past + xs
        width = config.heads * config.head_dim
        w_q, w_k, w_v = weights[f"{prefix}.attention.qkv.weight"].split(width)
        w_r = weights[f"{prefix}.attention.relative.weight"]
        outputs = []
        for offset, x in enumerate(xs):
            i = len(past) + offset
            heads = []
            for head in range(config.heads):
                part = slice(head * config.head_dim, (head + 1) * config.head_dim)
                u = weights[f"{prefix}.attention.content_bias"][head]
                v = weights[f"{prefix}.attention.distance_bias"][head]
                query = w_q[part] @ x
                scores, values = [], []
                for j in range(i + 1):
                    if config.same_length and i - j >= config.memory:
                        continue
                    key = w_k[part] @ whole[j]
                    relative = w_r[part] @ self.sinusoid(i - j)
                    score = (query + u) @ key + (query + v) @ relative
                    scores.append(score / math.sqrt(config.head_dim))
                    values.append(w_v[part] @ whole[j])
                shares = torch.stack(scores).softmax(0)
                heads.append(sum(s * value for s, value in zip(shares, values, strict=True)))
            attended = weights[f"{prefix}.attention.output.weight"] @ torch.cat(heads)
            middle = self.norm(x + attended, f"{prefix}.around_attention.norm")
            up = weights[f"{prefix}.feed_forward.up.weight"] @ middle
            up = (up + weights[f"{prefix}.feed_forward.up.bias"]).clamp(min=0)
            down = weights[f"{prefix}.feed_forward.down.weight"] @ up
            down = down + weights[f"{prefix}.feed_forward.down.bias"]
            outputs.append(self.norm(middle + down, f"{prefix}.around_feed_forward.norm"))
        return outputs

    def softmax(self, hidden: Tensor) -> Tensor:
        """The log-probability of every word, one word at a time."""
        weights, cutoffs = self.weights, self.config.cutoffs
        first = hidden @ weights["softmax.projection"]
        scores = [
            weights["embedding.tables.0"][word] @ first + weights["softmax.biases.0"][word]
            for word in range(cutoffs[0])
        ]
        scores += [
            weights["softmax.band_weight"][band] @ first + weights["softmax.band_bias"][band]
            for band in range(len(cutoffs))
        ]
        head = torch.stack(scores).log_softmax(0)
        found = [head[word] for word in range(cutoffs[0])]
        for band in range(1, len(cutoffs) + 1):
            narrow = hidden @ weights[f"embedding.projections.{band}"]
            table, bias = weights[f"embedding.tables.{band}"], weights[f"softmax.biases.{band}"]
            inside = torch.stack([row @ narrow + b for row, b in zip(table, bias, strict=True)])
            found += [head[cutoffs[0] + band - 1] + p for p in inside.log_softmax(0)]
        return torch.stack(found)

    def segment(self, ids: list[int]) -> Tensor:
        xs = [self.embed(word) for word in ids]
        for index in range(self.config.depth):
            past = self.memory[index]
            self.memory[index] = (past + xs)[-self.config.memory :]
            xs = self.layer(index, past, xs)
        return torch.stack([self.softmax(x) for x in xs])


@torch.no_grad()
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("lengths", [[14], [5, 5, 4], [1, 9, 2, 2]])
def test_segments_agree_with_the_formulas(variant: str, lengths: list[int]) -> None:
    model = random_xl(**VARIANTS[variant])
    direct, memories = Direct(model), model.remember()
    start = 0
    for length in lengths:
        ids = XL_IDS[start : start + length]
        found = model(torch.tensor([ids]), memories=memories)[0]
        agree(found.double(), direct.segment(ids))
        start += length
    assert len(memories) == 6


@torch.no_grad()
def test_probabilities_sum_to_one() -> None:
    found = random_xl()(torch.tensor([XL_IDS]))
    torch.testing.assert_close(found.exp().sum(-1), torch.ones(1, 14))


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(side: str) -> None:
    model = random_xl()
    rows = [XL_IDS, XL_IDS[:5], XL_IDS[3:4]]
    lengths = [len(row) for row in rows]
    filled = [
        [9] * (14 - len(row)) + row if side == "left" else row + [9] * (14 - len(row))
        for row in rows
    ]
    found = model(torch.tensor(filled), padding=Padding(lengths, side))
    for index, row in enumerate(rows):
        part = found[index, -len(row) :] if side == "left" else found[index, : len(row)]
        agree(part, model(torch.tensor([row]))[0])


@torch.no_grad()
def test_prompts_of_unequal_length_go_on_as_each_alone() -> None:
    """Also once the memory has forgotten the padding, or some of it."""
    model = random_xl()
    rows = [XL_IDS[:5], XL_IDS[5:7]]
    ids, memories = model.start_decoding(rows)
    together = [model.step(ids, memories)]
    more = torch.randint(30, (8, 2, 1))
    together += [model.step(step, memories) for step in more]
    for index, row in enumerate(rows):
        alone = model.remember()
        expected = [model.step(torch.tensor([row]), alone)]
        expected += [model.step(step[index : index + 1], alone) for step in more]
        for found, one in zip(together, expected, strict=True):
            agree(found[index], one[0])


@torch.no_grad()
def test_beams_take_their_memories_along() -> None:
    model = random_xl()
    ids, memories = model.start_decoding([XL_IDS[:5], XL_IDS[5:10]])
    model.step(ids, memories)
    memories.reorder(torch.tensor([1, 1, 0]))
    found = model.step(torch.tensor([[4], [5], [6]]), memories)
    agree(found[0], model(torch.tensor([[*XL_IDS[5:10], 4]]))[0, -1])
    agree(found[2], model(torch.tensor([[*XL_IDS[:5], 6]]))[0, -1])


def spelled(model: TransformerXL, folder: Path) -> None:
    """The checkpoint as transformers 4 wrote it: copies of what is tied, and the frequencies."""
    model.save(folder)
    tensors = load_file(folder / "model.safetensors")
    for band in range(3):
        table = tensors[f"transformer.word_emb.emb_layers.{band}.weight"]
        tensors[f"crit.out_layers.{band}.weight"] = table.clone()
        if band:
            projection = tensors[f"transformer.word_emb.emb_projs.{band}"]
            tensors[f"crit.out_projs.{band}"] = projection.clone()
    tensors["transformer.pos_emb.inv_freq"] = torch.ones(6)
    save_file(tensors, folder / "model.safetensors")


@torch.no_grad()
def test_checkpoints_go_round(tmp_path: Path) -> None:
    model = random_xl(furthest=4)
    spelled(model, tmp_path / "old")
    again = load(tmp_path / "old")
    assert isinstance(again, TransformerXL)
    assert again.config == model.config
    assert torch.equal(again(torch.tensor([XL_IDS])), model(torch.tensor([XL_IDS])))
    model.save(tmp_path / "one")
    again.save(tmp_path / "two")
    same_files(tmp_path / "one", tmp_path / "two")


def test_the_names_are_those_of_the_published_checkpoint(tmp_path: Path) -> None:
    random_xl().save(tmp_path)
    names = set(load_file(tmp_path / "model.safetensors"))
    layer = "transformer.layers.1"
    assert {
        "transformer.word_emb.emb_layers.2.weight",
        "transformer.word_emb.emb_projs.0",
        f"{layer}.dec_attn.qkv_net.weight",
        f"{layer}.dec_attn.r_net.weight",
        f"{layer}.dec_attn.r_r_bias",
        f"{layer}.dec_attn.r_w_bias",
        f"{layer}.pos_ff.CoreNet.3.bias",
        "crit.cluster_weight",
        "crit.out_projs.0",
        "crit.out_layers.1.bias",
    } <= names
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["model_type"] == "transfo-xl"
    assert config["tie_projs"] == [False, True, True]


def test_one_band_has_no_empty_parameters_and_reads_those_of_earlier_versions(
    tmp_path: Path,
) -> None:
    model = TransformerXL(TransformerXLConfig(**XL_SIZES | {"cutoffs": ()}))
    assert all(parameter.numel() for parameter in model.parameters())
    model.save(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = load_file(file)
    assert not any("cluster" in name for name in weights)
    width = model.config.widths[0]
    empty = {"crit.cluster_weight": torch.empty(0, width), "crit.cluster_bias": torch.empty(0)}
    save_file(weights | empty, file, metadata={"format": "pt"})
    again = load(tmp_path)
    ids = torch.tensor([XL_IDS])
    assert torch.equal(again.eval()(ids), model.eval()(ids))


def test_words_are_dropped_everywhere_or_nowhere() -> None:
    embedding = TransformerXL(TransformerXLConfig(**XL_SIZES, word_dropout=0.5)).embedding
    ids = torch.tensor([[9, *XL_IDS, *XL_IDS[::-1]]])
    torch.manual_seed(0)
    kept = embedding.train()(ids) / embedding.eval()(ids)
    agree(kept, kept[..., :1].round().expand_as(kept))  # all of a word or nothing
    assert set(kept[0, 1:, 0].round().tolist()) == {0.0, 2.0}
    agree(kept[:, 1:], kept[:, 1:].flip(1))  # and at every place
    assert kept[0, 0, 0] == 1  # alone, it would be zeros


def test_deep_and_with_words_dropped_it_has_gradients() -> None:
    sizes = XL_SIZES | {"depth": 16}
    model = TransformerXL(TransformerXLConfig(**sizes, word_dropout=0.9)).train()
    model(torch.tensor([XL_IDS] * 20)).sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


@torch.no_grad()
def test_the_loss_is_of_the_last_tokens_and_of_an_output_that_is_not_calm() -> None:
    model, ids = random_xl(), torch.tensor([XL_IDS, XL_IDS[::-1]])
    labels = ids[:, 4:].clone()
    labels[0, 2] = -100  # does not count
    told = model(ids)[:, 4:]
    counted = labels >= 0
    expected = -told[counted].gather(-1, labels[counted][:, None]).sum()
    agree(model(ids, labels=labels), expected)
    hidden = model.read(ids)[:, 4:]
    size = 20 * 0.5 * hidden.square().mean()
    change = 20 * 2 * (hidden[:, 1:] - hidden[:, :-1]).square().mean()
    agree(model(ids, labels=labels, activation=0.5, slowness=2), expected + size + change)


@torch.no_grad()
def test_dropout_of_projections_is_drawn_for_queries_keys_values_and_distances() -> None:
    model = random_xl(dropout=0.0, projection_dropout=0.5).train()
    layer = model.layers[0].attention
    lock_dropout(model)
    x, distances = torch.randn(2, 5, 12), torch.randn(5, 12)
    dropped = layer.parts(x, 5, distances)
    plain = layer.eval().parts(x, 5, distances)
    for found, whole in zip(dropped[1:3], plain[1:3], strict=True):  # keys and values
        kept = found / whole
        assert set(kept.round().unique().tolist()) == {0.0, 2.0}
        agree(kept, kept[:, :, :1].expand_as(kept))  # at all positions the same
    bias = layer.content_bias[:, None]
    assert set(((dropped[0] - bias) / (plain[0] - bias)).round().unique().tolist()) == {0.0, 2.0}
    kept = dropped[3].relative / plain[3].relative
    assert set(kept.round().unique().tolist()) == {0.0, 2.0}


def test_dropout_has_a_rate_for_each_place(tmp_path: Path) -> None:
    model = TransformerXL(TransformerXLConfig(**XL_SIZES, dropout=0.2))
    assert (model.dropout.p, model.last_dropout.p) == (0.2, 0.2)
    config = TransformerXLConfig(
        **XL_SIZES, dropout=0.2, embedding_dropout=0.6, output_dropout=0.5, projection_dropout=0.3
    )
    model = TransformerXL(config)
    assert (model.dropout.p, model.last_dropout.p) == (0.6, 0.5)
    assert model.layers[0].around_attention.dropout.p == 0.2
    model.save(tmp_path)
    assert load(tmp_path).config == config


@torch.no_grad()
def test_it_can_be_watched() -> None:
    model = random_xl()
    expected = model(torch.tensor([XL_IDS]))
    with watch(model, See(weights=True)) as watched:
        agree(model(torch.tensor([XL_IDS])), expected)
    weights = watched.calls[0][1].weights
    assert weights.shape == (1, 3, 14, 14)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 3, 14))


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cutoffs"):
        TransformerXLConfig(cutoffs=(5, 3))
    with pytest.raises(InputError, match="div_val"):
        TransformerXLConfig(embedding_dim=8)
    model = random_xl()
    with pytest.raises(InputError, match="Memories hold their own padding"):
        model(torch.tensor([XL_IDS]), memories=model.remember(), padding=Padding(3))
    model.save(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["tie_projs"] = [True, True, True]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="tie_projs"):
        load(tmp_path)


PUBLISHED = Path(__file__).parent / "transformer_xl"
VOCABULARIES = ["bands", "whole", "one_table", "narrow_table"]


@pytest.mark.parametrize("memory", ["empty", "zeros"])
@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_published_checkpoint_gives_its_numbers(vocabulary: str, memory: str) -> None:
    """Weights and numbers are of transformers 4.35.2, the last that had the model: see make.py."""
    model = load(PUBLISHED / vocabulary)
    expected = load_file(PUBLISHED / vocabulary / "expected.safetensors")
    memories = model.remember()
    if memory == "zeros":  # that library begins with a memory of zeros, and attends to them
        for layer in memories.layers:
            layer.extend(torch.zeros(2, model.config.memory, model.config.dim))
    with torch.no_grad():
        segments = [model(ids, memories=memories) for ids in expected["ids"].split(7, dim=1)]
    agree(torch.cat(segments, dim=1), expected[memory])


@pytest.mark.parametrize("vocabulary", VOCABULARIES)
def test_a_published_checkpoint_is_saved_as_it_was(vocabulary: str, tmp_path: Path) -> None:
    load(PUBLISHED / vocabulary).save(tmp_path)
    folders = (PUBLISHED / vocabulary, tmp_path)
    before, after = (load_file(folder / "model.safetensors") for folder in folders)
    assert before.keys() - after.keys() == {"transformer.pos_emb.inv_freq"}  # a table of sinusoids
    for key, tensor in after.items():
        assert torch.equal(tensor, before[key]), key
