"""GPT-2 124M on a GPU compared with transformers, with the same random weights.

python benchmarks/gpt2_gpu.py            decoding, training and trainer; appended to results/
python benchmarks/gpt2_gpu.py decoding   one of the three
python benchmarks/gpt2_gpu.py --tiny     all with a small model, on any machine; nothing is saved

decoding: greedy, batch 1, ours with CUDA graphs, transformers with its defaults.
training: one step (forward, loss, backward, AdamW) of 1,024 tokens in bfloat16, with and without
torch.compile on both sides.
trainer: whole runs of `regard train` and of transformers' Trainer on the same tokens, with the
model's FLOPs as a share of the device's peak.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers

from measure import append, argument_parser
from regard import GPT2, generate, load
from regard.evaluation.speed import seconds
from regard.models.gpt2_graphs import Replayed
from regard.text.tokenizer import Tokenizer
from regard.training.run import train

TINY = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 300}


def pair(device: str, dtype: torch.dtype, tiny: bool) -> tuple[GPT2, Any]:
    """Our GPT-2 and that of transformers, with the same weights."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**(TINY if tiny else {}))
    config.resid_pdrop = config.embd_pdrop = config.attn_pdrop = 0.0
    reference = transformers.GPT2LMHeadModel(config)
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        ours = load(Path(folder), device=device, dtype=dtype)
    assert isinstance(ours, GPT2)
    return ours, reference.to(device=device, dtype=dtype).eval()


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def synchronized(function: Callable[[], object]) -> Callable[[], None]:
    """A function that calls ``function`` and waits for the device."""

    def run() -> None:
        function()
        synchronize()

    return run


def row(case: str, ours: float, theirs: float, **more: Any) -> dict[str, Any]:
    """A row of results: the tokens per second of both, and their ratio."""
    return {
        "case": f"GPT-2 124M, {case}",
        "ours_tokens_per_second": ours,
        "transformers_tokens_per_second": theirs,
        "speed": ours / theirs,
        **more,
    }


def decoding(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Greedy decoding of 128 tokens after a prompt of 16."""
    new = 16 if tiny else 128
    prompt = list(range(100, 116))
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = pair(device, dtype, tiny)
        fast = Replayed(ours)
        ids = torch.tensor([prompt], device=device)
        options = {
            "max_new_tokens": new,
            "min_new_tokens": new,
            "do_sample": False,
            "pad_token_id": 0,
            "attention_mask": torch.ones_like(ids),
        }
        mine = generate(fast, [prompt], max_new_tokens=new, batch=1)[0][0].ids
        wanted = theirs.generate(ids, **options)[0, len(prompt) :].tolist()
        graphs = synchronized(partial(generate, fast, [prompt], max_new_tokens=new, batch=1))
        budget = 0.1 if tiny else 4.0
        times = seconds(graphs, synchronized(partial(theirs.generate, ids, **options)), budget)
        plain = synchronized(partial(generate, ours, [prompt], max_new_tokens=new))
        yield row(
            "greedy, batch 1",
            new / times.ours,
            new / times.peer,
            dtype=str(dtype).removeprefix("torch."),
            graphs_gain=seconds(graphs, plain, budget / 4).speed,
            same_tokens=sum(a == b for a, b in zip(mine, wanted, strict=True)) / new,
        )


def training(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """One step with sequences of 1,024 tokens."""
    batch, length = (2, 32) if tiny else (16, 1024)
    for compiled in (False, True):
        ours, theirs = pair(device, torch.float32, tiny)
        ids = torch.randint(300, (batch, length + 1), device=device)
        steps = []
        for model, loss in ((ours, _our_loss), (theirs, _their_loss)):
            model.train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=device == "cuda")
            forward = torch.compile(model) if compiled else model
            steps.append(synchronized(_step(forward, loss, optimizer, ids, device)))
        times = seconds(*steps, budget=0.1 if tiny else 5.0)
        tokens = batch * length
        case = f"training, batch {batch} x {length}"
        yield row(case, tokens / times.ours, tokens / times.peer, compiled=compiled)


PEAK = 989e12  # FLOP/s in bfloat16, from NVIDIA's datasheet of the H200


def trainer(device: str, tiny: bool) -> Iterator[dict[str, Any]]:
    """Whole runs on random words, data loading included; speeds after the first third of steps."""
    batch, length, steps = (2, 32, 20) if tiny else (16, 1024, 150)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        rng = random.Random(0)
        words = ["".join(rng.choices("etaoinshr", k=rng.randint(2, 8))) for _ in range(3000)]
        lines = [" ".join(rng.choices(words, k=20)) for _ in range(steps * batch * length // 40)]
        (folder / "text.txt").write_text("\n".join(lines))
        ours, _ = pair(device, torch.float32, tiny)
        ours.save(folder / "start")
        Tokenizer.train_bpe(lines[:2000], size=300 if tiny else 4096).save(folder / "start")
        sizes = ours.config
        matrices = sum(p.numel() for p in ours.parameters()) - ours.places.weight.numel()
        # Operations per token, forward and backward: 6 for each weight, and 12 n d for the
        # attention of each layer, of which the causal mask leaves half.
        operations = 6 * matrices + 6 * sizes.depth * sizes.dim * length
        del ours
        for compiled in (False, True):
            mine = _our_run(folder, batch, length, steps, compiled)
            theirs = _their_run(folder, batch, length, steps, compiled, device)
            case, share = f"whole runs, batch {batch} x {length}", operations * mine / PEAK
            yield row(case, mine, theirs, compiled=compiled, utilisation=share)


def _our_run(folder: Path, batch: int, length: int, steps: int, compiled: bool) -> float:
    """Tokens a second of `regard train`: the median of its log after a third of the steps."""
    output = folder / f"ours-{compiled}"
    recipe = folder / "recipe.toml"
    recipe.write_text(f"""
task = "language modelling"
output = "{output}"
precision = "bfloat16"
compile = {str(compiled).lower()}
model = {{ kind = "gpt2", start = "{folder / "start"}" }}
batch = {{ tokens = {batch * length} }}
schedule = {{ steps = {steps}, rate = 1e-4 }}
saving = {{ every = {steps} }}

[data]
length = {length}
root = "{folder}"
train = [{{ format = "text", files = ["text.txt"] }}]
""")
    train(recipe)
    rows = [json.loads(line) for line in (output / "log.jsonl").read_text().splitlines()]
    late = [r for r in rows if "tokens_per_second" in r and r["step"] > steps / 3]
    speeds = sorted(row["tokens_per_second"] for row in late)
    return float(speeds[len(speeds) // 2])


def _their_run(
    folder: Path, batch: int, length: int, steps: int, compiled: bool, device: str
) -> float:
    """Tokens a second of transformers' Trainer, after a third of the steps."""
    tokenizer = Tokenizer.load(folder / "start")
    lines = (folder / "text.txt").read_text().splitlines()
    ids = [i for row in tokenizer.encode_all(lines) for i in row.ids][: steps * batch * length]
    rows = [ids[at : at + length] for at in range(0, len(ids) - length + 1, length)]
    data = [{"input_ids": row, "labels": row} for row in rows]
    marks: dict[int, float] = {}

    class Clock(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            if state.global_step in (steps // 3, steps):
                synchronize()
                marks[state.global_step] = time.perf_counter()

    model = transformers.GPT2LMHeadModel.from_pretrained(folder / "start")
    settings = transformers.TrainingArguments(
        output_dir=str(folder / "theirs"),
        per_device_train_batch_size=batch,
        max_steps=steps,
        learning_rate=1e-4,
        bf16=True,
        use_cpu=device == "cpu",
        optim="adamw_torch_fused" if device == "cuda" else "adamw_torch",
        torch_compile=compiled,
        dataloader_num_workers=0 if device == "cpu" else 2,
        logging_steps=50,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    collate = transformers.default_data_collator
    transformers.Trainer(
        model, settings, train_dataset=data, data_collator=collate, callbacks=[Clock()]
    ).train()
    return batch * length * (steps - steps // 3) / (marks[steps] - marks[steps // 3])


def _our_loss(forward: Any, ids: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = forward(ids[:, :-1], labels=ids[:, 1:])
    return loss / ids[:, 1:].numel()


def _their_loss(forward: Any, ids: torch.Tensor) -> torch.Tensor:
    ids = ids[:, :-1]  # the model shifts the labels
    loss: torch.Tensor = forward(ids, labels=ids, use_cache=False).loss
    return loss


def _step(
    forward: Any,
    loss: Callable[[Any, torch.Tensor], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    ids: torch.Tensor,
    device: str,
) -> Callable[[], None]:
    def step() -> None:
        with torch.autocast(device, dtype=torch.bfloat16):
            result = loss(forward, ids)
        result.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("parts", nargs="*", default=["decoding", "training", "trainer"])
    parser.add_argument("--tiny", action="store_true", help="a small model; nothing is saved")
    given = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for part in given.parts:
        parts = {"decoding": decoding, "training": training, "trainer": trainer}
        for row in parts[part](device, given.tiny):
            print(row, flush=True)
            if not given.tiny:
                append(f"{part}_gpu", [row])


if __name__ == "__main__":
    main()
