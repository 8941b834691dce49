"""The worked example and the other traces: every formula, and every number against attention()."""

import json
import math

import pytest
import torch
from rich.cells import cell_len

import regard
from regard import (
    Causal,
    InputError,
    Padding,
    Window,
    explain,
    explain_projections,
    explain_tensors,
)
from regard.interpret.explaining.inputs import words_of
from regard.mechanism import masks

SENTENCE = "The cat sat on the mat."


def test_the_worked_example_has_the_numbers_it_is_known_for():
    trace = explain()
    assert trace.tokens == ("The", "cat", "sat", "on", "the", "mat")
    assert trace.word == "cat"
    the, cat = 0, 1
    torch.testing.assert_close(trace["Q"][0, cat], torch.tensor([0.2, 0.1]))
    torch.testing.assert_close(trace["K"][0, the], torch.tensor([0.3, 0.4]))
    torch.testing.assert_close(trace["V"][0, the], torch.tensor([0.5, 0.6]))
    assert trace["S"][0, cat, the].item() == pytest.approx(0.1)  # 0.2 * 0.3 + 0.1 * 0.4
    assert trace["S_scaled"][0, cat, the].item() == pytest.approx(0.1 / math.sqrt(2))


def test_the_worked_example_by_hand():
    """Plain Python from the queries, keys and values on: no torch, no regard."""
    trace = explain()
    query = trace["Q"][0, 1].tolist()
    keys, values = trace["K"][0].tolist(), trace["V"][0].tolist()
    scores = [sum(a * b for a, b in zip(query, key, strict=True)) / math.sqrt(2) for key in keys]
    total = sum(math.exp(score) for score in scores)
    weights = [math.exp(score) / total for score in scores]
    mixed = [sum(w * v[i] for w, v in zip(weights, values, strict=True)) for i in range(2)]
    assert trace["A"][0, 1].tolist() == pytest.approx(weights, rel=1e-5)
    assert trace["Z"][0, 1].tolist() == pytest.approx(mixed, rel=1e-5)


TRACES = {
    "worked example": explain,
    "causal": lambda: explain(mask=Causal()),
    "sentence": lambda: explain(SENTENCE, heads=2, dim=8, seed=0),
    "four heads, causal": lambda: explain(SENTENCE, heads=4, dim=8, seed=3, mask=Causal()),
    "window": lambda: explain(SENTENCE, mask=Window(1, 1), word="on"),
    "padding": lambda: explain(SENTENCE, mask=Padding(4)),
    "one word": lambda: explain("Hello", heads=1, dim=1),
    "no output matrix": lambda: explain_projections(
        torch.randn(5, 6),
        [torch.randn(6, 4), torch.randn(6, 4), torch.randn(6, 8)],
        heads=2,
    ),
    "grouped heads, cross": lambda: explain_tensors(
        torch.randn(1, 4, 3, 2), torch.randn(1, 2, 5, 2), torch.randn(1, 2, 5, 3)
    ),
    "float64": lambda: explain_tensors(*torch.randn(3, 4, 5, dtype=torch.float64)),
    "bfloat16": lambda: explain_tensors(*torch.randn(3, 4, 5).bfloat16()),
    "nothing to look at": lambda: explain_tensors(*torch.randn(3, 4, 5), mask=torch.eye(4) > 2),
}


@pytest.mark.parametrize("make", TRACES.values(), ids=TRACES)
def test_every_step_follows_from_the_one_before(make):
    torch.manual_seed(0)
    trace = make()
    assert trace.agreement.holds  # its output is that of attention()
    assert trace.agreement.difference <= trace.agreement.tolerance <= 0.5
    assert f"{trace.agreement.tolerance:.1e}" in str(trace)
    steps = {step.name: step for step in trace.steps}
    wide = torch.float64 if trace["S"].dtype == torch.float64 else torch.float32
    groups = trace["S"].shape[0] // trace["K"].shape[0]
    query = trace["Q"].to(wide)
    key, value = (trace[name].to(wide).repeat_interleave(groups, 0) for name in "KV")
    if "Embeddings" in steps:
        for name in "QKV":
            joined = trace["X"] @ trace[f"W_{name}"]  # [n, heads * d]
            split = torch.cat(tuple(trace[name]), dim=-1)
            torch.testing.assert_close(split, joined)
    torch.testing.assert_close(trace["S"], query @ key.transpose(-1, -2))
    torch.testing.assert_close(trace["S_scaled"], trace["S"] / math.sqrt(trace.dim))
    masked = trace["S_masked"] if "S_masked" in steps["Mask"].shapes else trace["S_scaled"]
    kept = masked > -math.inf
    torch.testing.assert_close(masked[kept], trace["S_scaled"][kept])
    powers = masked.exp()
    sums = powers.sum(-1, keepdim=True)
    torch.testing.assert_close(trace["A"], torch.where(sums > 0, powers / sums, 0.0))
    torch.testing.assert_close(trace["A"].sum(-1), (sums > 0)[..., 0].to(wide))
    torch.testing.assert_close(trace["Z"], trace["A"] @ value)
    side_by_side = torch.cat(tuple(trace["Z"]), dim=-1)
    if "Concatenation" in steps or "Concatenation and output projection" in steps:
        torch.testing.assert_close(trace["C"], side_by_side)
    if "W_O" in steps[trace.steps[-1].name].shapes:
        torch.testing.assert_close(trace["Y"], side_by_side @ trace["W_O"])
        torch.testing.assert_close(trace.output, trace["Y"])
    else:
        torch.testing.assert_close(trace.output.to(wide), side_by_side, rtol=1e-2, atol=1e-2)


def test_a_difference_beyond_the_tolerance_is_shown():
    shown = str(regard.interpret.explaining.trace.Agreement("sdpa", difference=1.0, tolerance=1e-5))
    assert "MORE THAN the tolerance" in shown


def test_heads_are_those_of_attention_on_the_same_projections():
    trace = explain(SENTENCE, heads=2, dim=8, mask=Causal())
    query, key, value = (trace[name][None] for name in "QKV")
    output = regard.attention(query, key, value, mask=Causal())
    torch.testing.assert_close(trace["Z"][None], output)


@pytest.mark.parametrize(
    ("sentence", "allowed", "count"),
    [
        (None, torch.ones(1, 6, 6).tril().bool(), "15 of 36"),
        (SENTENCE, torch.tensor([False, True])[:, None, None].expand(2, 6, 6), "36 of 72"),
    ],
    ids=["in every head alike", "differs by head"],
)
def test_the_mask_step_says_what_it_removed(sentence, allowed, count):
    steps = explain(sentence, mask=masks.Dense(allowed)).steps
    step = next(step for step in steps if step.name == "Mask")
    assert f"{count} scores are removed" in step.sentence
    assert (step.numbers[0].values > -math.inf).equal(allowed)


def test_scaling_is_shown_with_and_without():
    trace = explain()
    without, scaled = trace["weights of cat"][0]
    torch.testing.assert_close(scaled, trace["A"][0, 1])
    torch.testing.assert_close(without, trace["S"][0, 1].softmax(-1))


def test_a_seed_gives_the_same_numbers_again_and_another_seed_others():
    first, again, other = (explain(SENTENCE, seed=seed)["X"] for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)


def test_the_same_word_has_the_same_embedding():
    embeddings = explain(SENTENCE)["X"]
    assert embeddings[0].equal(embeddings[4])  # The, the
    assert not embeddings[0].equal(embeddings[1])


def test_steps_are_records_with_shapes():
    trace = explain(SENTENCE, heads=2, dim=8)
    assert [step.name for step in trace.steps] == [
        "Embeddings",
        "Queries, keys and values",
        "Dot products",
        "Scaling",
        "Mask",
        "Softmax",
        "Weighted sum",
        "Heads side by side",
        "Concatenation and output projection",
    ]
    assert trace.steps[2].shapes == {"S": (2, 6, 6)}
    assert all(step.formula and step.sentence for step in trace.steps)


def test_to_dict_is_json_and_holds_every_number():
    trace = explain(mask=Causal())
    record = json.loads(json.dumps(trace.to_dict(), allow_nan=False))
    softmax = next(step for step in record["steps"] if step["name"] == "Softmax")
    assert softmax["numbers"][0]["values"][0][1] == pytest.approx(trace["A"][0, 1].tolist())
    masked = next(step for step in record["steps"] if step["name"] == "Mask")
    assert masked["numbers"][0]["values"][0][0][1] is None
    assert record["agreement"]["holds"] is True


def test_words_that_look_like_markup_are_shown_as_they_are():
    trace = explain("<b>bold</b> a[red]b[/red]c more", word="more")
    assert str(trace).count("a[red]b[/red]c") > 5
    html = trace._repr_html_()
    assert "<b>bold" not in html.replace("<b>more</b>", "")
    assert "&lt;b&gt;bold" in html


def test_html_has_every_step_and_no_outside_asset():
    trace = explain(SENTENCE, heads=2)
    html = trace._repr_html_()
    assert all(f". {step.name}</h4>" in html for step in trace.steps)
    assert html.count("<table>") == html.count("</table>") > len(trace.steps)
    assert "http" not in html
    assert "<script" not in html


@pytest.mark.slow
def test_long_sentences_are_cut_not_broken(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    trace = explain(" ".join(f"word{i}" for i in range(100)), heads=8, dim=64, word="word50")
    lines = str(trace).splitlines()
    assert max(map(len, lines)) <= 80
    assert any(line.strip().startswith("▸ word50") for line in lines)
    assert any("heads 5 to 8 are not shown" in line for line in lines)


def test_wide_letters_keep_the_width(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    trace = explain("自己 注意 机制 让 每个 词 都 看到 句子 里 的 其他 词", heads=2)
    assert max(cell_len(line) for line in str(trace).splitlines()) <= 80


def test_repr_is_one_line():
    shown = repr(explain("one " * 100))
    assert "\n" not in shown
    assert len(shown) < 160


def test_large_and_small_numbers_stay_readable():
    big, small = torch.full((2, 2), 1e8), torch.full((2, 2), 1e-8)
    assert "1.0e+08" in str(explain_tensors(big, big, big))
    assert "1.0e-08" in str(explain_tensors(small, small, small))


def test_words_of_a_sentence():
    assert words_of("¿Qué? — «नमस्ते» don't, well-known…") == ("Qué", "नमस्ते", "don't", "well-known")


def test_gradients_are_left_alone():
    x = torch.randn(4, 3, requires_grad=True)
    trace = explain_tensors(x, x, x)
    assert not trace.output.requires_grad
    assert not trace["Q"].requires_grad


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: explain("  "), "There is no word in"),
        (lambda: explain("a b", heads=3), "dim=8 cannot be split evenly among 3 heads"),
        (lambda: explain("a b", dim=-1), "got heads=2 and dim=-1"),
        (lambda: explain("a bee", word="bees"), "Did you mean 'bee'?"),
        (lambda: explain(heads=2), "takes no heads"),
        (lambda: explain("I saw", seed=2**64), "64 bits"),
        (lambda: explain_tensors(*torch.ones(3, 2, 2), tokens=["a"]), "a list of 2 words"),
        (lambda: explain_tensors(*torch.ones(3, 2, 2), tokens="ab"), "a list of 2 words"),
        (lambda: explain_tensors(*torch.ones(3, 2, 4, 2)), "shows one sequence"),
        (lambda: explain_tensors(*torch.ones(3, 0, 2)), "at least one word"),
        (lambda: explain_tensors(*torch.full((3, 2, 2), math.nan)), "needs finite numbers"),
        (
            lambda: explain_tensors(*torch.full((3, 2, 2), 1e30)),
            r"larger than torch.float32 holds.*double",
        ),
        (lambda: explain("a b", dim=10**5), "a dim of 4096 at most, but got dim=100000"),
        (lambda: explain_tensors(*torch.ones(3, 2000, 2)), "too many to read"),
        (lambda: explain_projections(torch.ones(2, 2), [torch.ones(2, 2)]), "but got 1"),
        (lambda: explain_projections(torch.ones(2, 2), [torch.ones(3, 2)] * 3), r"\[3, 2\]"),
        (lambda: explain_projections(torch.ones(2, 2), [torch.ones(2, 2).half()] * 3), "float16"),
        (lambda: explain_projections(torch.ones(2, 3), [torch.ones(3, 3)] * 4, heads=2), "evenly"),
        (lambda: explain()["nothing"], "This trace has no 'nothing'"),
    ],
)
def test_invalid_arguments_are_refused_with_a_reason(ask, message):
    with pytest.raises(InputError, match=message):
        ask()


@pytest.mark.parametrize("size", [40, -40])
def test_scores_beyond_the_exponential_are_worked_out(size):
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 4, 8).abs()
    lines = str(explain_tensors(q * size, k * 40, v))
    assert "the highest" in lines
    assert "nan" not in lines
    assert "inf" not in lines.replace("-inf", "")
