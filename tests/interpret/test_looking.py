"""look() agrees with the dense weights, whole or in chunks, and long texts need O(n) memory."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from helpers.model_folders import minilm
from helpers.sine_models import TEXT, gpt2, hooked, t5, tokenizer, translator, waves, xl
from regard import InputError, See, Tokenizer, look, watch
from regard.interpret import cost
from regard.interpret import heads as heads_module
from regard.interpret.comparison import compare
from regard.interpret.cost import CostEstimate
from regard.interpret.heads import HeadMap, WordKeys
from regard.interpret.overview import Overview
from regard.interpret.runs import TextRun, prepare_run
from regard.models.model import Model

LONG = " ".join([TEXT, "and the dog ran in the big house"] * 6)
MODELS: dict[str, Callable[[], Model]] = {
    "gpt2": gpt2,
    "xl": xl,
    "t5": t5,
    "translator": translator,
}


def look_at(model: Model, text: str = TEXT, **asked: Any) -> Any:
    return look(model, text, tokenizer=tokenizer(), **asked)


def dense(run: TextRun) -> dict[str, Tensor]:
    """Every weight of every layer by its own names, [heads, queries, keys] of the whole text."""
    found: dict[str, Tensor] = {}

    def take(layer, chunk, seen) -> None:
        queries, keys = run.ranges(layer, chunk)
        sizes = [len(tokens) for tokens in run.tokens_of(layer)]
        zeros = torch.zeros(layer.heads, *sizes, dtype=torch.float64)
        whole = found.setdefault(layer.name, zeros)
        whole[:, queries.start : queries.stop, keys.start : keys.stop] = seen.weights[0]

    run.record(lambda *_: See(weights=True), take)
    return found


def by_hand(weights: Tensor, ids: tuple[int, ...], starts: set[int]) -> dict[str, list[float]]:
    """The measures of one self-attention layer, straight from their meaning.

    ``starts`` are the tokens before which there is nothing.
    """
    found: dict[str, list[float]] = {}
    for head in weights.tolist():
        sums: dict[str, list[float]] = {}
        for i, row in enumerate(head):
            start = max(s for s in starts if s <= i)
            add = lambda name, value: sums.setdefault(name, []).append(value)  # noqa: E731, B023
            add("entropy", -sum(w * math.log(w) for w in row if w > 0))
            add("distance", sum(w * abs(i - j) for j, w in enumerate(row)))
            if i == start:
                continue
            add("first", row[start])
            add("previous", row[i - 1])
            add("self", row[i])
            before = [j for j in range(start, i) if ids[j] == ids[i]]
            if before and before[-1] < i - 1:
                add("induction", row[before[-1] + 1])
        for name, values in sums.items():
            found.setdefault(name, []).append(sum(values) / len(values))
    return found


# The overview ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "text", "target"),
    [
        (gpt2, TEXT, {}),
        (t5, TEXT, {"target": "the mat was cold"}),
        (xl, "the cat sat", {}),
        (lambda: gpt2(length=16), LONG, {}),
    ],
    ids=["gpt2", "t5", "xl", "windows"],
)
def test_an_overview_is_what_the_dense_weights_say(
    make: Callable[[], Model], text: str, target: dict[str, str]
) -> None:
    model = make()
    run = prepare_run(model, text, tokenizer=tokenizer(), **target)
    found = look_at(model, text, **target)
    assert isinstance(found, Overview)
    starts = {chunk.start for chunk in run.chunks}
    assert (len(run.chunks) > 3) == any("independent windows" in note for note in found.notes)
    weights_of = dense(run)
    for row, layer in enumerate(run.layers):
        weights = weights_of[layer.name]
        values = {measure: table[row] for measure, table in found.values.items()}
        if layer.across:
            assert values["distance"].isnan().all()
            assert values["self"].isnan().all()
            entropy = torch.special.entr(weights).sum(-1).mean(-1)
            expected = {"entropy": entropy, "first": weights[:, :, 0].mean(-1)}
        else:
            expected = by_hand(weights, run.tokens_of(layer)[1].ids, starts)
        for measure, means in expected.items():
            torch.testing.assert_close(values[measure], torch.as_tensor(means, dtype=torch.float64))


def test_memory_reaches_back_over_segments() -> None:
    model = xl(memory=8)
    run = prepare_run(model, LONG, tokenizer=tokenizer())
    assert len(run.chunks) > 5
    assert run.chunks[2].memory == 8
    found = look_at(model, LONG)
    weights = dense(run)["1"]
    rows = range(1, len(run.tokens))
    previous = torch.stack([weights[:, i, i - 1] for i in rows], -1).mean(-1)
    torch.testing.assert_close(found.values["previous"][1], previous)
    across = run.chunks[3].start
    assert (weights[:, across, across - 1] > 0).all()  # the token before lies in the memory
    assert any("in memory" in note for note in found.notes)


def test_a_real_model_has_a_head_that_looks_at_the_previous_token() -> None:
    found = look(minilm(), "The cat sat on the mat because it was tired, and the dog slept.")
    assert isinstance(found, Overview)
    assert found.strongest("previous") == ("0", 2, pytest.approx(1, abs=0.01))


def test_where_no_token_comes_twice_there_is_no_induction() -> None:
    found = look_at(gpt2(), "the cat sat")
    assert isinstance(found, Overview)
    assert found.strongest("induction") is None
    text = " ".join(found.picture().text(width=80, color="none").split())
    assert "No token repeats after another" in text
    assert found.to_dict()["values"]["induction"][0][0] is None


def test_windows_of_bert_have_its_special_tokens_each() -> None:
    text = "the cat sat on the mat . " * 150
    run = prepare_run(minilm(), text)
    assert len(run.chunks) == 3
    for chunk in run.chunks:
        assert chunk.stop - chunk.start <= 512
        assert run.tokens.labels[chunk.start] == "[CLS]"
        assert run.tokens.labels[chunk.stop - 1] == "[SEP]"
    words = [word.label for word in run.tokens.words if not word.special]
    assert words == ["the", "cat", "sat", "on", "the", "mat", "."] * 150


# Maps ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["gpt2", "xl", "translator"])
def test_a_short_map_is_the_weights(name: str) -> None:
    model = MODELS[name]()
    extra = {"target": "the mat was cold"} if name == "translator" else {}
    layer = "cross.1" if name == "translator" else "1"
    found = look_at(model, layer=layer, head=1, **extra)
    assert isinstance(found, HeadMap)
    run = prepare_run(model, TEXT, tokenizer=tokenizer(), **extra)
    weights = dense(run)[layer][1]
    torch.testing.assert_close(found.weights.double(), weights, rtol=1e-5, atol=1e-6)
    assert not found.pooled
    assert found.queries == run.tokens_of(run.layer(layer))[0].labels


@pytest.mark.parametrize("name", ["gpt2", "t5", "xl", "windows"])
def test_a_long_map_is_pooled_and_its_parts_are_exact(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heads_module, "MAX_NAMED", 16)
    monkeypatch.setattr(heads_module, "MAX_CELLS", 7)
    model = (
        gpt2(length=16) if name == "windows" else gpt2(256) if name == "gpt2" else MODELS[name]()
    )
    layer = "encoder.1" if name == "t5" else "1"
    extra = {"target": "the mat"} if name == "t5" else {}
    run = prepare_run(model, LONG, tokenizer=tokenizer(), **extra)
    weights = dense(run)[layer][1]
    count = len(run.tokens)
    bins = torch.arange(count) * 7 // count
    pooled = torch.zeros(7, 7, dtype=torch.float64)
    pooled.index_put_((bins[:, None].expand(-1, count), bins.expand(count, -1)), weights, True)
    pooled /= bins.bincount()[:, None]
    found = look_at(model, LONG, layer=layer, head=1, **extra)
    assert found.pooled
    torch.testing.assert_close(found.weights.double(), pooled, rtol=1e-4, atol=1e-5)
    extra |= {"rows": range(20, 40), "columns": range(10, 30)}
    part = look_at(model, LONG, layer=layer, head=1, **extra)
    assert not part.pooled
    torch.testing.assert_close(part.weights.double(), weights[20:40, 10:30], rtol=1e-5, atol=1e-6)
    assert part.weights.count_nonzero() > 50


def test_the_first_token_is_left_out_on_request_and_noted() -> None:
    found = look_at(gpt2(), layer=0, head=0)
    text = found.picture(without_first=True).text(width=120, color="none")
    assert "The first key, 'the', is left out" in text
    part = look_at(gpt2(), layer=0, head=0, columns=range(2, 5))
    with pytest.raises(InputError, match="no first token to"):
        part.picture(without_first=True)


# Words -----------------------------------------------------------------------------------------


def test_a_words_keys_are_whole_words() -> None:
    model = gpt2()
    text = "the cathouse sat on the mat"  # more than one token a word
    run = prepare_run(model, text, tokenizer=tokenizer())
    word, _ = run.tokens.find("cathouse")
    assert len(word.places) > 1
    found = look_at(model, text, layer=1, head=2, word="sat")
    assert isinstance(found, WordKeys)
    assert found.keys == ("the", "cathouse", "sat", "on", "the", "mat")
    row = dense(run)["1"][2, run.tokens.find("sat")[0].places[0]]
    assert found.weights[1].item() == pytest.approx(row[list(word.places)].sum().item(), rel=1e-5)
    assert found.weights.sum().item() == pytest.approx(1, abs=1e-5)


def test_a_word_without_a_head_is_a_mean() -> None:
    model = gpt2()
    run = prepare_run(model, TEXT, tokenizer=tokenizer())
    found = look_at(model, word="Mat")  # case does not decide
    place = run.tokens.find("mat")[0].places[0]
    mean = torch.stack([weights[:, place].mean(0) for weights in dense(run).values()]).mean(0)
    assert found.weights[:3].tolist() == pytest.approx(mean[:3].tolist(), rel=1e-5)
    assert "mean of all heads of 2 layers" in found.picture().title
    twice = look_at(model, word="cat", layer=0)
    assert "the first of 2" in twice.picture().title


# Comparing -------------------------------------------------------------------------------------


def test_two_heads_two_texts_and_two_models_are_compared() -> None:
    model, other = gpt2(), waves(gpt2())
    with torch.no_grad():
        other.stack.blocks[1].attention.qkv.weight.mul_(2)
    one = look_at(model, layer=1, head=0)
    two = look_at(model, layer=1, head=1)
    drawing = compare(one, two, names=("1.0", "1.1")).picture().drawing
    assert [part.title for part in drawing.parts] == ["1.0", "1.1", "1.1 less 1.0"]
    expected = (two.weights - one.weights)[3, 2].item()
    assert drawing.parts[2].values[3][2] == pytest.approx(expected, abs=1e-6)
    first, second = (look_at(each) for each in (model, other))
    drawing = compare(first, second, names=("a", "b")).picture().drawing
    entropy = next(part for part in drawing.parts if part.title == "Entropy")
    assert entropy.values[0] == pytest.approx([0.0] * 4)
    assert any(abs(value) > 1e-3 for value in entropy.values[1])


def test_what_cannot_be_compared_says_why() -> None:
    model = gpt2()
    small = look_at(model, "the cat", layer=0, head=0)
    large = look_at(model, layer=0, head=0)
    with pytest.raises(InputError, match="2 x 2 tokens"):
        compare(small, large, names=("a", "b"))
    with pytest.raises(InputError, match="2 layers of 4 heads and b has 3 layers"):
        compare(
            look_at(model),
            look_at(gpt2(depth=3)),
            names=("a", "b"),
        )
    with pytest.raises(InputError, match="not alignments or a word's keys"):
        compare(large, look_at(model, word="cat"), names=("a", "b"))


# Long texts ------------------------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """How many numbers the largest tensor had that was made meanwhile."""

    numbers = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // 4)
        return result


@pytest.mark.parametrize("what", [{}, {"layer": "encoder.0", "head": 1}])
def test_a_long_text_read_at_once_needs_memory_by_its_length(what: dict[str, object]) -> None:
    count = 4096
    model = t5().float()
    run = prepare_run(model, "the " * count, tokenizer=tokenizer())
    assert len(run.chunks) == 1
    assert len(run.tokens) >= count
    assert run.target is None  # too long to write a target unasked
    with Largest() as largest:
        found = look_at(model, "the " * count, **what)
    assert largest.numbers < count**2 / 4
    assert found.notes[-1].startswith("Only the encoder ran")


def test_the_cost_is_estimated_before_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MIN_TOKENS", 32)
    estimates: list[CostEstimate] = []
    done: list[tuple[int, int]] = []

    def progress(now: int, total: int) -> None:
        done.append((now, total))

    def on_estimate(estimate: CostEstimate) -> None:
        assert not done
        estimates.append(estimate)

    for model in (t5(), xl(memory=8), gpt2(length=16)):
        estimates.clear()
        done.clear()
        look_at(model, LONG, on_estimate=on_estimate, progress=progress)
        [found] = estimates
        assert found.seconds > 0
        assert found.memory > len(LONG.split()) * 16 * 8  # its hidden states at the least
        assert "10 MiB of memory besides the model" in str(found)
        assert [now for now, _ in done] == sorted(now for now, _ in done)
        assert done[-1][0] == done[-1][1]


def test_the_estimate_is_of_the_chunks_that_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MIN_TOKENS", 8)
    estimates: list[CostEstimate] = []
    done: list[tuple[int, int]] = []
    asked = {"on_estimate": estimates.append, "progress": lambda now, of: done.append((now, of))}
    model = gpt2(length=16)
    look_at(model, LONG, **asked)
    look_at(model, LONG, word="mat", **asked)
    whole, window = estimates
    assert window.tokens == 16 < whole.tokens
    assert done[-1] == (2, 2)  # two layers of one window
    # A word that comes late, in a text that runs at once: the timed part lacks it.
    late = f"{LONG} cathouse"
    look_at(t5(), late, target="the", word="cathouse", **asked)
    assert estimates[-1].tokens == len(tokenizer().encode(late).ids)


@pytest.mark.parametrize(
    ("seconds", "memory", "expected"),
    [
        (0.2, 2**20, "about 1 second and 10 MiB"),
        (42.4, 300 * 2**20, "about 42 seconds and 300 MiB"),
        (400, 1.26 * 2**30, "about 7 minutes and 1.3 GiB"),
    ],
)
def test_an_estimate_reads_as_a_sentence(seconds: float, memory: float, expected: str) -> None:
    estimate = CostEstimate(100_000, 6, seconds, int(memory))
    assert (
        str(estimate)
        == f"100,000 tokens through 6 attention layers: {expected} of memory besides the model"
    )


def test_lines_do_not_stand_around_a_text() -> None:
    """A new line is a token of the text, once; only special tokens come in every window."""
    lines = "\n".join([TEXT] * 12)
    made = Tokenizer.train_bpe([lines], size=300, special=("<pad>", "</s>"))
    run = prepare_run(gpt2(length=16), lines, tokenizer=made)
    assert run.tokens.ids == tuple(made.encode(lines).ids)
    assert len(run.chunks) == -(-len(run.tokens) // 16)


def test_the_estimate_may_stop_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost, "MIN_TOKENS", 32)

    def refuse(_: CostEstimate) -> None:
        raise KeyboardInterrupt

    model = gpt2(length=16)
    with pytest.raises(KeyboardInterrupt):
        look_at(model, LONG, on_estimate=refuse)
    assert not hooked(model)


def test_short_texts_are_not_measured_first() -> None:
    def never(_: CostEstimate) -> None:
        raise AssertionError("an estimate of a short text")

    look_at(gpt2(), on_estimate=never)


# What means nothing ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"layer": 7, "head": 0}, "no layer '7'. Layers are 0, 1"),
        ({"layer": 0, "head": 4}, "no head 4: layer 0 has heads 0 to 3"),
        ({"layer": 0}, "heads 0 to 3: give the head"),
        ({"head": 1}, "give the layer"),
        ({"rows": range(2)}, "give layer and head"),
        ({"layer": 0, "head": 0, "rows": range(2, 99)}, "must lie within 0:11"),
        ({"layer": 0, "head": 0, "rows": range(0, 6, 2)}, "rows must be a range of tokens"),
        ({"layer": 0, "head": 0, "columns": (1, 3)}, "columns must be a range of tokens"),
        ({"layer": 0, "head": 0, "rows": range(2), "alignment": True}, "rows and columns"),
        ({"word": "catt"}, "Did you mean 'cat'"),
        ({"word": "cat", "alignment": True}, "leave out word"),
        ({"alignment": True}, "GPT2 has no cross-attention"),
        ({"target": "the mat"}, "GPT2 takes no target"),
    ],
)
def test_invalid_arguments_are_refused(asked: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        look_at(gpt2(), **asked)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: look(gpt2(), TEXT), "Pass tokenizer"),
        (lambda: look_at(gpt2(vocabulary=20)), "300 tokens, but the model has 20"),
        (lambda: look_at(gpt2(), ""), "The text '' has no tokens"),
        (lambda: look_at(torch.nn.Linear(2, 2)), "nothing to watch in Linear|Linear cannot be run"),
        (lambda: look_at(b"gpt2"), "a folder, or a PyTorch module with its tokenizer"),
        (lambda: look("translate", "The cat sat."), r"begin the text with >>deu<< or .*>>fra<<"),
        (lambda: look("summarize", "The cat."), "summarize was trained on texts that begin with"),
    ],
)
def test_a_model_needs_its_own_tokenizer_and_text(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()


def test_a_text_begins_as_those_did_that_a_model_learned_from() -> None:
    assert look("summarize", "summarize: The cat sat.", target="A cat.").values
    found = look("translate", ">>fra<< The cat sat.", target="Le chat.", alignment=True)
    words = found.to_dict()
    assert found.weights.argmax(-1)[0] == words["source"].index("The")


def test_a_model_is_left_as_it_was() -> None:
    model = gpt2().train()
    model.stack.blocks[0].eval()
    before = [module.training for module in model.modules()]
    look_at(model)
    assert [module.training for module in model.modules()] == before
    with watch(model, See(entropy=True)):  # nothing watches it any more
        pass
    assert not hooked(model)


def test_a_map_of_some_hundred_tokens_is_exact_and_has_their_names() -> None:
    found = look_at(gpt2(), " ".join([TEXT] * 7)[:300], layer=0, head=0)
    count = len(found.rows)
    assert heads_module.MAX_NAMED < count <= heads_module.MAX_CELLS
    assert list(found.weights.shape) == [count, count]
    assert not found.pooled
    assert len(found.to_dict()["queries"]) == count


def test_the_picture_of_a_word_says_how_the_text_was_read() -> None:
    found = look_at(gpt2(), " ".join([TEXT] * 30), word="cat")
    assert found.notes
    assert found.notes[0][:20] in " ".join(found.picture().text(color="none").split())


# Arrays, tables and print ------------------------------------------------------------------------


def test_results_print_as_a_short_table() -> None:
    overview = look_at(gpt2())
    lines = repr(overview).splitlines()
    assert lines[0] == "Overview: model GPT2, tokens 11"
    assert [line.split()[0] for line in lines[1:]] == list(overview.values)
    assert all("layer 2 x head 4" in line for line in lines[1:])
    one = look_at(gpt2(), layer=1, head=2)
    assert repr(one).startswith(
        "HeadMap: model GPT2, layer 1, head 2\n  weights  query 11 x key 11"
    )
    both = repr(compare(one, one, names=("old", "new")))
    assert both.splitlines()[:2] == ["Comparison: old and new", "old: model GPT2, layer 1, head 2"]
    assert repr(look_at(gpt2(), word="cat")).startswith(
        "WordKeys: model GPT2, word cat, heads mean"
    )
    aligned = repr(look_at(translator(), target="the dog ran", alignment=True))
    assert aligned.startswith("Alignment: layer")
    assert max(map(len, [*lines, *both.splitlines(), *aligned.splitlines()])) <= 80


def test_an_overview_as_a_table_names_layers_and_heads() -> None:
    overview = look_at(translator())
    table = overview.to_pandas()
    assert table.index.names == ["layer", "head"]
    assert list(table.index.unique("layer")) == list(overview.layers)
    assert list(table) == list(overview.values)
    row = overview.layers.index("cross.0")
    assert table.loc[("cross.0", 1), "entropy"] == overview.to_numpy()["entropy"][row, 1]


def test_a_map_as_a_table_has_positions_and_tokens() -> None:
    part = look_at(gpt2(), layer=1, head=2, rows=range(3, 5), columns=range(1, 4))
    table = part.to_pandas()
    assert table.index.tolist() == [(q, k) for q in (3, 4) for k in (1, 2, 3)]
    assert table.loc[(4, 2)].to_dict() == {
        "query_token": part.queries[1],
        "key_token": part.keys[1],
        "weights": part.weights[1, 1].item(),
    }


def test_a_pooled_map_as_a_table_says_which_tokens_a_cell_holds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(heads_module, "MAX_CELLS", 4)
    table = look_at(gpt2(), layer=1, head=2).to_pandas()  # 11 tokens
    assert table.index.names == ["query_bin", "key_bin"]
    assert table["first_query"].tolist() == [first for first in (0, 3, 6, 9) for _ in range(4)]
    assert table["first_key"].tolist() == [0, 3, 6, 9] * 4


def test_other_results_as_tables() -> None:
    word = look_at(gpt2(), word="cat")
    assert word.to_pandas()["key_word"].tolist() == list(word.keys)
    aligned = look_at(translator(), target="the dog ran", alignment=True)
    table = aligned.to_pandas("weights", "effect")
    assert table["target_word"].unique().tolist() == list(dict.fromkeys(aligned.target))
    assert table.loc[(2, 1), "weights"] == aligned.weights[2, 1].item()
    assert aligned.to_pandas("scores").index.names == ["layer", "head"]
    first, second = (look_at(gpt2(), text, layer=1, head=2) for text in ("the cat", "the dog"))
    both = compare(first, second, names=("one", "other"))
    assert both.to_numpy()["weights"].tolist() == [first.weights.tolist(), second.weights.tolist()]
    assert both.to_pandas()["key_token"].tolist() == ["the", "cat"] * 2 + ["the", "dog"] * 2
    same = compare(first, second, names=("one", "one"))
    assert same.to_pandas().index.unique("compared").tolist() == ["first", "second"]
