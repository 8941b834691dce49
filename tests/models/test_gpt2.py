"""GPT-2 gives the numbers of transformers, padded or not, whole or step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers.random_models import agree, random_gpt2
from regard import GPT2, GPT2Config, InputError, load
from regard.decoding.generation import generate
from regard.decoding.strategies import Beam, Greedy, Sample
from regard.models.gpt2_graphs import Replayed


@pytest.mark.slow
def test_compiled_it_gives_the_same() -> None:
    model = GPT2(GPT2Config(vocabulary=40, length=32, dim=16, depth=2, heads=4)).eval()
    ids = torch.randint(40, (2, 9))
    with torch.no_grad():
        expected = model(ids)
        agree(torch.compile(model, backend="aot_eager", fullgraph=True)(ids), expected)


def test_too_much_is_refused() -> None:
    model = GPT2(GPT2Config(vocabulary=40, length=8, dim=16, depth=1, heads=4))
    with pytest.raises(InputError, match="at most 8 tokens"):
        model(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(InputError, match="0 to 39"):
        model.start_decoding([[40]])
    with pytest.raises(InputError, match="dropout"):
        GPT2Config(dropout=1.0)


def test_replayed_steps_give_the_same_tokens(tmp_path: Path) -> None:
    random_gpt2().save_pretrained(tmp_path)
    # On a GPU the steps are graphs; without one they are at least the same steps.
    model = load(tmp_path, device="cuda" if torch.cuda.is_available() else "cpu")
    fast = Replayed(model)
    for prompt in ([5, 6, 7], [9], [1, 2, 3, 4, 5, 6, 7, 8]):  # one after another in one memory
        for how in (Greedy(), Sample(seed=2)):
            length = model.config.length - len(prompt)
            [[expected]] = generate(model, [prompt], how, max_new_tokens=length)
            [[found]] = generate(fast, [prompt], how, max_new_tokens=length, batch=1)
            assert found.ids == expected.ids
            assert found.score == pytest.approx(expected.score, rel=1e-4)


def test_replayed_refuses_what_it_has_no_memory_for(tmp_path: Path) -> None:
    random_gpt2().save_pretrained(tmp_path)
    fast = Replayed(load(tmp_path))
    with pytest.raises(InputError, match="batch=1"):
        generate(fast, [[1], [2]], max_new_tokens=2)
    with pytest.raises(InputError, match="beams"):
        generate(fast, [[1]], Beam(2), max_new_tokens=2)
    with pytest.raises(InputError, match="at most"):
        generate(fast, [[1]], max_new_tokens=10**4)


def test_recorded_steps_refuse_hooks_that_they_would_not_call() -> None:
    model = GPT2(GPT2Config(vocabulary=10, length=8, dim=8, depth=1, heads=2)).eval()
    fast, [layer] = Replayed(model), model.attention_layers()
    handle = layer.module.head_hooks.edit(torch.zeros_like)
    with pytest.raises(InputError, match="do not call head hooks"):
        generate(fast, [[1, 2]], max_new_tokens=2)
    handle.remove()
    assert len(generate(fast, [[1, 2]], max_new_tokens=2)[0][0].ids) == 2
