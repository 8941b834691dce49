"""Decoding on the CPU compared with transformers and CTranslate2, with the same weights.

python benchmarks/decoding.py                    every case; appended to results/decoding.jsonl
python benchmarks/decoding.py gpt2 --rounds 3    some cases, fewer rounds

Each contestant runs in its own process with OMP_NUM_THREADS threads, two by default. They take
turns, so that other load slows all of them alike, and each reports its time and its peak memory
while decoding. The weights are random, so every output has the same fixed length. Sources are
sorted by length. Needs the extra "bench".
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memory  # this file must not import PyTorch: it would count as memory of each contestant

THREADS = int(os.environ.get("OMP_NUM_THREADS", "2"))
VOCABULARY, PAD, END = 32000, 31999, 0
TARGETS = {  # our precision ("best" is the fastest), the peer, and the least ratio of their speeds
    "base-1": [("float32", "ctranslate2 float32", 0.95), ("best", "ctranslate2 int8", 0.8)],
    "base-32": [("float32", "ctranslate2 float32", 0.95), ("best", "ctranslate2 int8", 1.0)],
    "gpt2": [(ours, "transformers float32", 1.5) for ours in ("float32", "best")],
}
CONTESTANTS = [
    *(f"regard {precision}" for precision in ("float32", "bfloat16", "int8")),
    "transformers float32",
    *(f"ctranslate2 {precision}" for precision in ("float32", "int8")),
]


@dataclass(frozen=True)
class Case:
    name: str
    batch: int
    new: int  # tokens to generate
    rounds: int


CASES = {
    "base-1": Case("transformer-base, beam 4, batch 1", 1, 32, 15),
    "base-32": Case("transformer-base, beam 4, batch 32", 32, 32, 5),
    "gpt2": Case("GPT-2 124M, greedy, batch 1", 1, 64, 7),
}

Decode = Callable[[], list[list[int]]]

# ------------------------------------------------------------------------------- the weights


def make(folder: Path, case: str) -> None:
    """Write a checkpoint with random weights, and its conversions for CTranslate2."""
    import ctranslate2
    import torch
    import transformers
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers.models import WordLevel

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    if case == "gpt2":
        reference = transformers.GPT2LMHeadModel(transformers.GPT2Config())
        tokens = {f"w{index}": index for index in range(50256)} | {"<|endoftext|>": 50256}
        special = dict.fromkeys(("bos_token", "eos_token", "unk_token"), "<|endoftext|>")
    else:
        reference = transformers.MarianMTModel(
            transformers.MarianConfig(
                vocab_size=VOCABULARY,
                d_model=512,
                encoder_layers=6,
                decoder_layers=6,
                encoder_attention_heads=8,
                decoder_attention_heads=8,
                encoder_ffn_dim=2048,
                decoder_ffn_dim=2048,
                activation_function="relu",
                scale_embedding=True,
                pad_token_id=PAD,
                eos_token_id=END,
                decoder_start_token_id=PAD,
                forced_eos_token_id=None,
            )
        )
        tokens = {"</s>": END, "<unk>": 1, "<pad>": PAD}
        tokens |= {f"w{index}": index for index in range(2, PAD)}
        special = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    reference.save_pretrained(folder / "model")
    vocabulary = FastTokenizer(WordLevel(tokens, unk_token=special["unk_token"]))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=vocabulary, **special)
    tokenizer.save_pretrained(folder / "model")
    for precision in ("float32", "int8"):
        converter = ctranslate2.converters.TransformersConverter(str(folder / "model"))
        converter.convert(str(folder / precision), quantization=precision)


def prompts(case: str) -> list[list[int]]:
    """Random sources of 15 to 35 tokens, the longest first; for GPT-2 one prompt of 16 tokens."""
    if case == "gpt2":
        return [list(range(100, 116))]
    rng = random.Random(0)
    rows = [[rng.randrange(2, PAD) for _ in range(rng.randint(15, 35))] for _ in range(32)]
    return sorted(rows, key=len, reverse=True)[: CASES[case].batch]


# ----------------------------------------------------------------------------- the contestants


def regard(folder: Path, case: str, precision: str) -> Decode:
    import torch

    from regard import Beam, Greedy, generate, load
    from regard.models.quantization import prepack, quantize

    torch.set_num_threads(THREADS)
    dtype = torch.bfloat16 if precision == "bfloat16" else None
    model = load(folder / "model", dtype=dtype)
    if precision == "int8":
        model = quantize(model)
    elif (case, precision) != ("gpt2", "float32"):  # prepacking slows down one row in float32
        model = prepack(model)
    method = Greedy() if case == "gpt2" else Beam(4)
    rows, new = prompts(case), CASES[case].new
    return lambda: [row.ids for [row] in generate(model, rows, method, max_new_tokens=new)]  # type: ignore


def transformers(folder: Path, case: str, _: str) -> Decode:
    import torch
    import transformers

    torch.set_num_threads(THREADS)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    kind = transformers.GPT2LMHeadModel if case == "gpt2" else transformers.MarianMTModel
    model = kind.from_pretrained(folder / "model").eval()
    rows, new = prompts(case), CASES[case].new
    longest = len(rows[0])
    ids = torch.tensor([row + [PAD] * (longest - len(row)) for row in rows])
    options: dict[str, Any] = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False}
    options |= {"pad_token_id": 0, "eos_token_id": None} if case == "gpt2" else {"num_beams": 4}
    skip = longest if case == "gpt2" else 1
    options["attention_mask"] = (ids != PAD).long()

    def decode() -> list[list[int]]:
        outputs: list[list[int]] = model.generate(ids, **options)[:, skip:].tolist()
        return outputs

    return decode


def ctranslate2(folder: Path, case: str, precision: str) -> Decode:
    import ctranslate2

    options = {"compute_type": precision, "intra_threads": THREADS, "inter_threads": 1}
    new = CASES[case].new
    rows = [[f"w{token}" for token in row] for row in prompts(case)]
    if case == "gpt2":
        generator = ctranslate2.Generator(str(folder / precision), **options)
        lengths = {"max_length": new, "min_length": new, "include_prompt_in_result": False}
        return lambda: [row.sequences_ids[0] for row in generator.generate_batch(rows, **lengths)]
    translator = ctranslate2.Translator(str(folder / precision), **options)
    lengths = {"max_decoding_length": new, "min_decoding_length": new, "beam_size": 4}
    return lambda: [
        [int(token[1:]) for token in row.hypotheses[0]]
        for row in translator.translate_batch(rows, **lengths)
    ]


def work(folder: Path, case: str, contestant: str) -> None:
    """Run a contestant: for each line of input, decode and print the time, memory and output."""
    name, precision = contestant.split()
    decode = {"regard": regard, "transformers": transformers, "ctranslate2": ctranslate2}[name](
        folder, case, precision
    )
    decode()
    print("ready", flush=True)
    memory.reset_peak()
    for _ in sys.stdin:
        started = time.perf_counter()
        outputs = decode()
        duration = time.perf_counter() - started
        print(json.dumps([duration, memory.peak(), outputs]), flush=True)


# ----------------------------------------------------------------------------------- the run


def run(case: str, rounds: int) -> list[dict[str, Any]]:
    """Time, memory and tokens of every contestant."""
    times: dict[str, list[float]] = {name: [] for name in CONTESTANTS}
    last: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, __file__]
        subprocess.run([*command, "--make", name, case], check=True, capture_output=True)
        processes = {}
        for contestant in CONTESTANTS:
            processes[contestant] = process = subprocess.Popen(
                [*command, "--work", name, case, "--as", contestant],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(THREADS)},
            )
            assert _line(process) == "ready\n"
        for _ in range(rounds):
            for contestant, process in processes.items():
                assert process.stdin is not None
                process.stdin.write("go\n")
                process.stdin.flush()
                last[contestant] = json.loads(_line(process))
                times[contestant].append(last[contestant][0])
        for process in processes.values():
            process.communicate()
    expected = last["transformers float32"][2]
    case_name, count = CASES[case].name, CASES[case].batch * CASES[case].new
    return [
        {
            "case": case_name,
            "contestant": contestant,
            "ms": statistics.median(times[contestant]) * 1e3,
            "least_ms": min(times[contestant]) * 1e3,
            "tokens_per_second": count / statistics.median(times[contestant]),
            "peak_mb": last[contestant][1],
            "same_tokens": _same(last[contestant][2], expected),
        }
        for contestant in CONTESTANTS
    ]


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, f"{process.args} ended early"
    return line


def _same(outputs: list[list[int]], expected: list[list[int]]) -> float:
    """The share of tokens that equal those of transformers."""
    pairs = [
        (a, b) for x, y in zip(outputs, expected, strict=True) for a, b in zip(x, y, strict=True)
    ]
    return sum(a == b for a, b in pairs) / len(pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("cases", nargs="*", default=list(CASES))
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--as", dest="contestant", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make:
        return make(Path(given.make[0]), given.make[1])
    if given.work:
        return work(Path(given.work[0]), given.work[1], given.contestant)

    import torch
    from rich.console import Console
    from rich.table import Table

    from measure import append

    torch.set_num_threads(THREADS)  # for the environment in the results
    for case in given.cases:
        rows = run(case, given.rounds or CASES[case].rounds)
        speed = {row["contestant"]: row["tokens_per_second"] for row in rows}
        table = Table(
            "contestant", "ms", "tokens/s", "peak MB", "same tokens", title=rows[0]["case"]
        )
        for row in rows:
            numbers = (row["ms"], row["tokens_per_second"], row["peak_mb"])
            cells = (f"{number:,.0f}" for number in numbers)
            table.add_row(row["contestant"], *cells, f"{row['same_tokens']:.0%}")
        Console().print(table)
        for ours, peer, target in TARGETS[case]:
            names = [name for name in speed if name.startswith("regard")]
            best = max(names, key=speed.__getitem__) if ours == "best" else f"regard {ours}"
            ratio = speed[best] / speed[peer]
            print(f"{best}: {ratio:.2f} times as fast as {peer}, should be {target} or more")
            rows.append(
                {"case": rows[0]["case"], "ours": best, "peer": peer, "speed": ratio,
                 "target": target}
            )  # fmt: skip
        append("decoding", rows)
    return None


if __name__ == "__main__":
    main()
