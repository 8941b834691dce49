"""GPT-2 gives the numbers of transformers, padded or not, whole or step by step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from regard import GPT2, GPT2Config, InputError, load
from regard.decoding.generation import generate
from regard.decoding.state import State
from regard.decoding.strategies import Beam, Greedy, Sample
from regard.models.gpt2_graphs import Replayed
from tiny import FIVE, agree, disturb, padded, real, same_files

VARIANTS = {
    "plain": {},
    "inner": {"n_inner": 20},
    "by layer": {"scale_attn_by_inverse_layer_idx": True},
    "relu": {"activation_function": "relu"},
}
ROWS = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14], [15]]


def theirs(**changes: object) -> transformers.GPT2LMHeadModel:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=40, n_positions=32, n_embd=16, n_layer=3, n_head=4, **changes
    )
    config.bos_token_id = config.eos_token_id = 39
    return disturb(transformers.GPT2LMHeadModel(config))


@pytest.fixture(params=VARIANTS)
def pair(
    request: pytest.FixtureRequest, tmp_path: Path
) -> tuple[GPT2, transformers.GPT2LMHeadModel, Path]:
    reference = theirs(**VARIANTS[request.param])
    reference.save_pretrained(tmp_path)
    if not FIVE:  # there, other ways leave out how a layer scales its scores
        reference.set_attn_implementation("eager")
    ours = load(tmp_path)
    assert isinstance(ours, GPT2)
    return ours, reference, tmp_path


@torch.no_grad()
def test_logits_are_those_of_transformers(pair) -> None:
    ours, reference, _ = pair
    ids = torch.randint(40, (3, 9))
    agree(ours(ids), reference(ids).logits)


@torch.no_grad()
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(pair, side: str) -> None:
    ours, reference, _ = pair
    ids, padding, mask = padded(ROWS, side, 0)
    at = (mask.cumsum(1) - 1).clamp(min=0)
    expected = reference(ids, attention_mask=mask, position_ids=at).logits
    found = ours(ids, padding=padding)
    for index, row in enumerate(ROWS):
        agree(real(found, index, len(row), side), real(expected, index, len(row), side))
        agree(real(found, index, len(row), side), ours(torch.tensor([row]))[0])


@torch.no_grad()
def test_saved_by_us_is_what_transformers_saved(pair, tmp_path: Path) -> None:
    ours, reference, folder = pair
    ours.save(tmp_path / "ours")
    same_files(tmp_path / "ours", folder)
    again = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "ours").eval()
    again.set_attn_implementation(reference.config._attn_implementation)
    ids = torch.randint(40, (2, 9))
    assert torch.equal(again(ids).logits, reference(ids).logits)


@torch.no_grad()
def test_step_by_step_is_all_at_once(pair) -> None:
    ours, _, _ = pair
    ids = torch.randint(40, (2, 9))
    state = State(ours.config.depth)
    whole = ours(ids)
    pieces = [ours(part, state=state) for part in ids.split([4, 1, 1, 3], dim=1)]
    agree(torch.cat(pieces, dim=1), whole)


@torch.no_grad()
def test_prompts_of_unequal_length_go_on_as_each_alone(pair) -> None:
    ours, _, _ = pair
    ids, state = ours.start_decoding(ROWS, room=4)
    together = ours.step(ids, state)
    more = torch.tensor([[1], [2], [3]])
    later = ours.step(more, state)
    for index, row in enumerate(ROWS):
        agree(together[index], ours(torch.tensor([row]))[0, -1])
        agree(later[index], ours(torch.tensor([[*row, index + 1]]))[0, -1])


@torch.no_grad()
def test_old_spellings_are_known(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    reference = theirs()
    reference.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    old = {key.removeprefix("transformer."): tensor for key, tensor in tensors.items()}
    for index in range(3):
        old[f"h.{index}.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
        old[f"h.{index}.attn.masked_bias"] = torch.tensor(-1e4)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, tmp_path / "model.safetensors")
    ids = torch.randint(40, (2, 9))
    agree(load(tmp_path)(ids), reference(ids).logits)


def test_training_drops_and_reaches_every_parameter() -> None:
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocabulary=40, length=32, dim=16, depth=2, heads=4)).train()
    ids = torch.randint(40, (2, 9))
    assert not torch.equal(model(ids), model(ids))
    model(ids).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_recomputing_gives_the_same_gradients() -> None:
    torch.manual_seed(0)
    config = GPT2Config(
        vocabulary=40, length=32, dim=16, depth=2, heads=4, dropout=0.0, attention_dropout=0.0
    )
    model = GPT2(config).train()
    model.dropout.p = 0.0
    ids = torch.randint(40, (2, 9))
    model(ids).logsumexp(-1).sum().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model.recompute()(ids).logsumexp(-1).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])


def test_compiled_it_gives_the_same() -> None:
    model = GPT2(GPT2Config(vocabulary=40, length=32, dim=16, depth=2, heads=4)).eval()
    ids = torch.randint(40, (2, 9))
    with torch.no_grad():
        expected = model(ids)
        agree(torch.compile(model, backend="aot_eager", fullgraph=True)(ids), expected)


def test_initialisation_is_that_of_the_paper() -> None:
    torch.manual_seed(0)
    model = GPT2(GPT2Config(vocabulary=1000, dim=64, depth=8, heads=4))
    block = model.stack.blocks[0]
    assert abs(model.tokens.weight.std() - 0.02) < 0.001
    assert abs(block.attention.qkv.weight.std() - 0.02) < 0.001
    assert abs(block.attention.output.weight.std() - 0.02 / 4) < 0.0005
    assert block.attention.qkv.bias.abs().max() == 0


def test_presets_have_the_sizes_of_the_paper() -> None:
    with torch.device("meta"):
        counts = [
            sum(p.numel() for p in GPT2(config).parameters())
            for config in (GPT2Config.small(), GPT2Config.medium())
        ]
    assert counts == [124_439_808, 354_823_168]


def test_too_much_is_refused() -> None:
    model = GPT2(GPT2Config(vocabulary=40, length=8, dim=16, depth=1, heads=4))
    with pytest.raises(InputError, match="at most 8 tokens"):
        model(torch.zeros(1, 9, dtype=torch.long))
    with pytest.raises(InputError, match="0 to 39"):
        model.start_decoding([[40]])
    with pytest.raises(InputError, match="dropout"):
        GPT2Config(dropout=1.0)


def test_replayed_steps_give_the_same_tokens(tmp_path: Path) -> None:
    theirs().save_pretrained(tmp_path)
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
    theirs().save_pretrained(tmp_path)
    fast = Replayed(load(tmp_path))
    with pytest.raises(InputError, match="batch=1"):
        generate(fast, [[1], [2]], max_new_tokens=2)
    with pytest.raises(InputError, match="beams"):
        generate(fast, [[1]], Beam(2), max_new_tokens=2)
    with pytest.raises(InputError, match="at most"):
        generate(fast, [[1]], max_new_tokens=10**4)
