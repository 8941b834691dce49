"""A new architecture is a class and a row of the registry: nothing else needs to know it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from helpers import model_folders as folders
from regard import GPT2, GPT2Config, InputError, Tokenizer, complete, load, look, translate
from regard.checkpoints import hub
from regard.evaluation.measuring import evaluate
from regard.models import bundle, catalog, registry
from regard.models.bundle import open_bundle


class Halved(GPT2):
    """A language model that regard does not have: a GPT-2 with halved embeddings."""

    def read(self, ids, **given):
        return super().read(ids, **given) / 2


ROW = registry.Architecture(
    "gpt2", f"{__name__}:Halved", "regard.models.gpt2:GPT2Config", ("HalvedLMHeadModel",),
    "halved", "language modelling", scored_as="language modelling", serves=("complete",),
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(registry, "ARCHITECTURES", [*registry.ARCHITECTURES, ROW])
    torch.manual_seed(0)
    tokenizer = Tokenizer.train_bpe(folders.LINES * 9, size=300)
    config = GPT2Config(vocabulary=len(tokenizer), length=64, dim=16, depth=2, heads=4)
    Halved(config).save(tmp_path)
    tokenizer.save(tmp_path)
    return tmp_path


def test_a_new_architecture_is_loaded_listed_and_used(folder: Path) -> None:
    model = load(folder)
    assert type(model) is Halved
    known = catalog.at(folder, "mine")
    assert (known.task, known.architecture) == ("language modelling", "HalvedLMHeadModel")
    assert complete("The cat", model=folder, max_new_tokens=3).tokens == 3
    with pytest.raises(InputError, match="is a Halved, which cannot translate: that takes"):
        translate("The cat", "fr", model=folder)


def test_a_new_architecture_is_looked_at_and_evaluated(folder: Path) -> None:
    seen = look(folder, folders.LINES[0]).values["entropy"]
    assert seen.shape == (2, 4)
    assert seen.isfinite().all()
    (folder / "lines.txt").write_text("\n".join(folders.LINES * 9))
    one = open_bundle(folder)
    data = [{"format": "text", "files": ["lines.txt"]}]
    assert evaluate(one.model, one.tokenizer, data, root=folder).scores["perplexity"] > 1


@pytest.mark.parametrize("use", [complete, look])
def test_a_model_is_found_and_opened_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, use
) -> None:
    bundle._loaded.cache_clear()
    opened: list[object] = []
    find, open_checkpoint = hub.find, bundle.open_checkpoint
    monkeypatch.setattr(
        bundle.hub, "find", lambda name, **asked: opened.append("find") or find(name, **asked)
    )
    monkeypatch.setattr(
        bundle, "open_checkpoint", lambda name: opened.append("open") or open_checkpoint(name)
    )
    use("The cat sat.", model=folder) if use is complete else use(folder, "The cat sat.")
    assert opened == ["find", "open"]
