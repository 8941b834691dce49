"""What a watched run becomes: tables, arrays, pictures, and the input of other viewers."""

from __future__ import annotations

import math
from typing import Any

import numpy
import pytest
import torch

from helpers.sine_models import TEXT, gpt2, tokenizer, translator
from regard import InputError, See, Seen, look, watch
from regard.interpret import viewers
from regard.interpret.heads import HeadMap
from regard.interpret.watched import Watched
from regard.pictures.record import Cells, Panels

IDS = torch.tensor([[3, 4, 5, 6, 7], [8, 9, 3, 4, 5]])
TOKENS = list("abcde")
FIRST, SECOND = "stack.blocks.0.attention", "stack.blocks.1.attention"


def run(see: See, ids: Any = IDS[:1], calls: int = 1) -> Watched:
    model = gpt2()
    with torch.no_grad(), watch(model, see) as watched:
        for _ in range(calls):
            model(ids)
    return watched


def translated(target: int) -> Watched:
    model = translator()
    with torch.no_grad(), watch(model, See(weights=True)) as watched:
        model(IDS[:1], IDS[1:, :target])
    return watched


# Arrays and tables -----------------------------------------------------------------------------


def test_a_table_has_the_rows_of_every_layer_and_call() -> None:
    watched = run(See(entropy=True, received=True), IDS, calls=2)
    table = watched.to_pandas("entropy")
    assert table.index.names == ["layer", "call", "batch", "head", "query"]
    assert len(table) == 2 * 2 * 2 * 4 * 5
    entropy = watched[SECOND][1].entropy
    assert entropy is not None
    assert table.loc[(SECOND, 1, 1, 3, 4), "entropy"] == entropy[1, 3, 4].item()
    with pytest.raises(InputError, match="different dimensions"):
        watched.to_pandas()


def test_arrays_are_stacked_and_filled_up_with_nan() -> None:
    model = gpt2()
    with torch.no_grad(), watch(model, See(entropy=True, top=1)) as watched:
        model(IDS)
        model(IDS[:1, :3])
    arrays = watched.to_numpy()
    assert arrays["entropy"].shape == (2, 2, 2, 4, 5)  # layer, call, batch, head, query
    numpy.testing.assert_array_equal(arrays["entropy"][1, 0], watched[SECOND][0].entropy)
    assert numpy.isnan(arrays["entropy"][:, 1, 1]).all()
    assert numpy.isnan(arrays["entropy"][:, 1, 0, :, 3:]).all()
    assert not numpy.isnan(arrays["entropy"][:, 1, 0, :, :3]).any()
    assert (arrays["top_keys"][:, 1, 1] == -1).all()


def test_a_dataset_has_layers_by_name() -> None:
    pytest.importorskip("xarray", reason="NOT TESTED: xarray is not installed")
    watched = run(See(entropy=True, received=True))
    dataset = watched.to_xarray()
    assert dataset["entropy"].dims == ("layer", "call", "batch", "head", "query")
    one = dataset["entropy"].sel(layer=SECOND, call=0)
    numpy.testing.assert_array_equal(one, watched[SECOND][0].entropy)


# Pictures --------------------------------------------------------------------------------------


def test_an_overview_has_a_panel_for_each_field_and_a_number_for_each_head() -> None:
    fields = See(entropy=True, peak=True, distance=True, received=True, max_logit=True, lse=True)
    watched = run(fields, IDS, calls=2)
    drawing = watched.picture().drawing
    assert isinstance(drawing, Panels)
    panels = {part.title: part for part in drawing.parts}
    assert list(panels) == ["Entropy", "Largest weight", "Distance", "First key", "Largest score"]
    assert panels["Entropy"].rows.labels == ("0", "1")
    seen = watched[SECOND][0]
    assert seen.entropy is not None
    assert seen.received is not None
    assert seen.max_logit is not None
    for title, expected in {
        "Entropy": seen.entropy.mean((0, 2)),
        "First key": seen.received[..., 0].mean(0) / 5,
        "Largest score": seen.max_logit.amax(0),
    }.items():
        assert panels[title].values[1] == pytest.approx(expected.tolist())
    assert "2 layers, 4 calls" in drawing.title


def test_layers_with_fewer_heads_have_empty_cells() -> None:
    model = translator()  # 2 heads in the encoder, 4 in the decoder
    with torch.no_grad(), watch(model, See(entropy=True)) as watched:
        model(IDS[:1], IDS[1:])
    drawing = watched.picture().drawing
    assert isinstance(drawing, Panels)
    [cells] = drawing.parts
    assert [math.isnan(value) for value in cells.values[0]] == [False, False, True, True]
    assert cells.rows.labels[0] == "encoder.blocks.0.attention"


def test_chosen_heads_keep_their_numbers() -> None:
    model = gpt2()
    with torch.no_grad(), watch(model, See(entropy=True, weights=True), heads=[1]) as watched:
        model(IDS[:1])
    assert set(watched.to_pandas("entropy").index.get_level_values("head")) == {1}
    assert watched.to_xarray().coords["head"].values.tolist() == [1]
    drawing = watched.picture().drawing
    assert isinstance(drawing, Panels)
    [cells] = drawing.parts
    assert [[math.isnan(value) for value in row[:2]] for row in cells.values] == [[True, False]] * 2
    cells = watched.picture(layer=0, head=1).drawing
    assert isinstance(cells, Cells)
    weights = watched[FIRST][0].weights
    assert weights is not None
    assert cells.values == tuple(map(tuple, weights[0, 0].float().tolist()))
    with pytest.raises(InputError, match="has heads 1, but got head 0"):
        watched.picture(layer=0, head=0)


def test_a_map_of_one_head_names_its_tokens() -> None:
    watched = run(See(weights=True), IDS)
    picture = watched.picture(layer=1, head=2, batch=1, tokens=TOKENS)
    assert picture == watched.picture(layer=SECOND, head=2, batch=1, call=0, tokens=TOKENS)
    cells = picture.drawing
    assert isinstance(cells, Cells)
    weights = watched[SECOND][0].weights
    assert weights is not None
    assert cells.values == tuple(map(tuple, weights[1, 2].float().tolist()))
    assert cells.columns.labels == tuple(TOKENS)
    crossing = translated(3).picture(layer=2, head=0, tokens=TOKENS, query_tokens=list("xyz"))
    assert isinstance(crossing.drawing, Cells)
    assert crossing.drawing.rows.labels == tuple("xyz")


def test_without_tokens_or_weights_a_map_shows_positions() -> None:
    for see in (See(weights=True), See(map=2)):
        cells = run(see).picture(layer=0, head=0).drawing
        assert isinstance(cells, Cells)
        assert cells.rows.labels == ()
        assert cells.rows.span == 5


@pytest.mark.parametrize(
    ("see", "asked", "message"),
    [
        (See(lse=True), {}, "needs one of entropy, peak"),
        (See(lse=True), {"layer": 0, "head": 0}, r"needs See\(weights=True\) or See\(map=...\)"),
        (See(entropy=True), {"layer": 0}, "give layer and head, or neither"),
        (See(entropy=True), {"head": 0}, "give layer and head, or neither"),
        (See(weights=True), {"layer": 2, "head": 0}, "no layer 2: 2 layers"),
        (See(weights=True), {"layer": "x", "head": 0}, r"no layer 'x'. Recorded layers: stack\."),
        (See(weights=True), {"layer": 0, "head": 4}, "heads 0 to 3, but got head 4"),
        (See(weights=True), {"layer": 0, "head": 0, "tokens": ["a"]}, "5 queries, but got 1 tok"),
        (See(weights=True), {"layer": 0, "head": 0, "tokens": "abcde"}, "but got one string"),
        (See(map=2), {"layer": 0, "head": 0, "tokens": TOKENS}, "holds several tokens"),
    ],
)
def test_a_picture_that_cannot_be_drawn(see: See, asked: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        run(see).picture(**asked)


def test_several_calls_or_texts_need_a_choice() -> None:
    watched = run(See(weights=True), IDS, calls=2)
    with pytest.raises(
        InputError, match="has 2 calls: choose one with call=, a number from 0 to 1"
    ):
        watched.picture(layer=0, head=0, batch=0)
    with pytest.raises(InputError, match="has 2 texts: choose one with batch="):
        watched.picture(layer=0, head=0, call=1)
    with pytest.raises(InputError, match="choose one with call="):
        watched.picture(layer=0, head=0, call=2, batch=0)
    with pytest.raises(InputError, match="No call was recorded"):
        Watched().picture()


# Other viewers ---------------------------------------------------------------------------------


def test_bertviz_gets_every_layer_of_one_text() -> None:
    """Its views take a tuple of [1, heads, tokens, tokens] and a string for each token."""
    watched = run(See(weights=True), IDS)
    given = watched.to_bertviz(TOKENS, batch=1)
    assert given["tokens"] == TOKENS
    assert [list(layer.shape) for layer in given["attention"]] == [[1, 4, 5, 5]] * 2
    weights = watched[SECOND][0].weights
    assert weights is not None
    torch.testing.assert_close(given["attention"][1], weights[1:].float())
    [layer] = watched.to_bertviz(TOKENS, layers="stack.blocks.1.*", batch=1)["attention"]
    assert torch.equal(layer, given["attention"][1])


@pytest.mark.parametrize("target", [3, 5])
def test_bertviz_gets_the_kinds_of_an_encoder_decoder(target: int) -> None:
    watched = translated(target)
    written = TOKENS[:target]
    given = watched.to_bertviz(TOKENS, written)
    assert given["encoder_tokens"] == TOKENS
    assert given["decoder_tokens"] == written
    for kind, name in {
        "encoder": "encoder.blocks.0.attention",
        "decoder": "decoder.blocks.0.attention",
        "cross": "decoder.blocks.0.cross",
    }.items():
        weights = watched[name][0].weights
        assert weights is not None
        assert torch.equal(given[f"{kind}_attention"][0], weights.float())
    assert len(given["encoder_attention"]) == 1
    assert len(given["decoder_attention"]) == len(given["cross_attention"]) == 2
    crossing = watched.to_bertviz(TOKENS, written, layers="decoder.*")
    assert "encoder_attention" not in crossing


def test_circuitsvis_gets_the_heads_of_one_layer() -> None:
    """Its view takes [heads, destination tokens, source tokens]."""
    watched = run(See(weights=True))
    given = watched.to_circuitsvis(TOKENS, layer=1)
    weights = watched[SECOND][0].weights
    assert weights is not None
    assert given["tokens"] == TOKENS
    assert torch.equal(given["attention"], weights[0].float())


def test_bfloat16_becomes_float32_for_viewers() -> None:
    watched = Watched()
    seen = Seen(weights=torch.ones(1, 1, 1, 1, dtype=torch.bfloat16), extent=(1, 1, 1, 1))
    watched._calls.append(("layer", seen))
    assert watched.to_circuitsvis(["a"], 0)["attention"].dtype == torch.float32
    assert watched.to_bertviz(["a"])["attention"][0].dtype == torch.float32


def test_what_viewers_cannot_show(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"watch\(model, See\(weights=True\)\)"):
        run(See(entropy=True)).to_bertviz(TOKENS)
    watched = run(See(weights=True))
    with pytest.raises(InputError, match="5 queries, but got 4 tokens"):
        watched.to_bertviz(TOKENS[:4])
    with pytest.raises(InputError, match=r"No layer matches 'encoder\.\*'"):
        watched.to_bertviz(TOKENS, layers="encoder.*")
    with pytest.raises(InputError, match=r"2 x 5 x 5 and 4 x 3 x 3.*layers='encoder\.\*'"):
        translated(3).to_bertviz(TOKENS)
    with pytest.raises(InputError, match="5 queries and 5 keys, but got 4 tokens of the source"):
        translated(3).to_bertviz(TOKENS[:4], TOKENS[:3])
    with pytest.raises(InputError, match="Both texts have 5 tokens, and no chosen layer is causal"):
        translated(5).to_bertviz(TOKENS, TOKENS, layers="*.cross")
    with pytest.raises(InputError, match="has 2 calls"):
        run(See(weights=True), calls=2).to_bertviz(TOKENS)
    monkeypatch.setattr(viewers, "MAX_VIEWED", 199)
    with pytest.raises(InputError, match=r"too long.* over 5 tokens these are 200 weights"):
        watched.to_bertviz(TOKENS)
    assert watched.to_circuitsvis(TOKENS, 0)["attention"].numel() == 100
    monkeypatch.setattr(viewers, "MAX_VIEWED", 99)
    with pytest.raises(InputError, match="too long"):
        watched.to_circuitsvis(TOKENS, 0)


def test_a_map_of_look_goes_to_viewers(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = look(gpt2(), TEXT, tokenizer=tokenizer(), layer=1, head=2)
    assert isinstance(shown, HeadMap)
    given = shown.to_bertviz()
    assert given["tokens"] == list(shown.queries)
    assert torch.equal(given["attention"][0], shown.weights[None, None])
    assert torch.equal(shown.to_circuitsvis()["attention"], shown.weights[None])
    part = look(gpt2(), TEXT, tokenizer=tokenizer(), layer=1, head=2, rows=range(2, 4))
    assert isinstance(part, HeadMap)
    given = part.to_bertviz()
    assert given["decoder_tokens"] == list(part.queries)
    assert given["encoder_tokens"] == list(part.keys)
    assert list(given["cross_attention"][0].shape) == [1, 1, 2, len(part.keys)]
    with pytest.raises(InputError, match=r"other tokens. to_bertviz\(\) takes both"):
        part.to_circuitsvis()
    monkeypatch.setattr("regard.interpret.heads.MAX_CELLS", 4)
    pooled = look(gpt2(), TEXT, tokenizer=tokenizer(), layer=1, head=2)
    assert isinstance(pooled, HeadMap)
    with pytest.raises(InputError, match="11 x 11 tokens, in a pooled map"):
        pooled.to_bertviz()
    with pytest.raises(InputError, match="too long"):
        pooled.to_circuitsvis()
