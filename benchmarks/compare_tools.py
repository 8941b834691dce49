"""The longest text whose attention regard and other tools show in 4 GiB of memory.

python benchmarks/compare_tools.py --environments ENVIRONMENTS --install    once
python benchmarks/compare_tools.py --environments ENVIRONMENTS
python benchmarks/compare_tools.py --environments ENVIRONMENTS regard bertviz-head

The model is a GPT-2 with random weights: 6 layers of 8 heads of width 64, float32, a vocabulary of
1,000 words, and as many positions as the text has tokens. Each tool loads it from the same folder
and shows a text, in a process of its own, as the documentation of the tool recommends. The text
is doubled until the process needs more memory or processor time than the limits, which other load
on the machine hardly changes. At the shortest text, all tools must find the same entropy of one
query of one head. Appended to results/compare_tools.jsonl.

The tools need different versions of their dependencies, so each has a virtual environment in
ENVIRONMENTS, which --install makes. regard and transformers run in the current environment.
"""

from __future__ import annotations

import importlib.metadata
import json
import math
import os
import random
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import memory  # this file must not import PyTorch or regard: other environments run it

LAYERS, HEADS, WIDTH, WORDS = 6, 8, 64, 1000
LAYER, HEAD = 2, 3  # the head whose entropy is compared
LENGTHS = [2**power for power in range(8, 18)]
TOLERANCE = 1e-3  # relative difference of entropies

# A tool loads the model from a folder and returns a function that shows a text. That writes files
# into a folder, if the tool writes any, and returns a function for the entropy of a query.
Entropy = Callable[[int], float]
Show = Callable[[str, Path], Entropy]

# ------------------------------------------------------------------------------------- the tools


def regard_pages(folder: Path) -> Show:
    import torch
    import transformers

    from regard import See, watch

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="regard")
    see = See(entropy=True, received=True, top=8, map=256)

    def show(text: str, out: Path) -> Entropy:
        with torch.no_grad(), watch(model, see) as watched:
            model(**_inputs(folder, text))
        watched.picture().save(out / "heads.html")
        for layer in range(LAYERS):
            for head in range(HEADS):
                picture = watched.picture(layer=layer, head=head)
                picture.save(out / f"layer-{layer}-head-{head}.html")
        [seen] = list(watched.values())[LAYER]
        return lambda query: seen.entropy[0, HEAD, query].item()

    return show


def transformers_eager(folder: Path) -> Show:
    run = _eager(folder)

    def show(text: str, _: Path) -> Entropy:
        attentions = run(_inputs(folder, text))
        return lambda query: _entropy(attentions[LAYER][0, HEAD, query])

    return show


def bertviz_head(folder: Path) -> Show:
    from bertviz import head_view

    return _bertviz(folder, head_view)


def bertviz_model(folder: Path) -> Show:
    from bertviz import model_view

    return _bertviz(folder, model_view)


def _bertviz(folder: Path, view: Callable[..., Any]) -> Show:
    run = _eager(folder)

    def show(text: str, out: Path) -> Entropy:
        inputs = _inputs(folder, text)
        tokens = _tokenizer(folder).convert_ids_to_tokens(inputs["input_ids"][0])
        attentions = run(inputs)
        page = view(attentions, tokens, html_action="return")
        (out / "view.html").write_text(page.data, encoding="utf-8")
        return lambda query: _entropy(attentions[LAYER][0, HEAD, query])

    return show


def transformer_lens_patterns(folder: Path) -> Show:
    return _transformer_lens(folder, names_filter=lambda name: name.endswith("hook_pattern"))


def transformer_lens_all(folder: Path) -> Show:
    return _transformer_lens(folder)


def _transformer_lens(folder: Path, **options: Any) -> Show:
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(str(folder), device="cpu")

    def show(text: str, _: Path) -> Entropy:
        with torch.no_grad():
            _, cache = bridge.run_with_cache(_inputs(folder, text)["input_ids"], **options)
        return lambda query: _entropy(cache["pattern", LAYER][0, HEAD, query])

    return show


def inseq_numbers(folder: Path) -> Show:
    attribute = _inseq(folder)

    def show(text: str, _: Path) -> Entropy:
        return _inseq_entropy(attribute(text))

    return show


def inseq_page(folder: Path) -> Show:
    attribute = _inseq(folder)

    def show(text: str, out: Path) -> Entropy:
        attributed = attribute(text)
        page = attributed.show(display=False, return_html=True)
        (out / "attributions.html").write_text(page, encoding="utf-8")
        return _inseq_entropy(attributed)

    return show


def _inseq(folder: Path) -> Callable[[str], Any]:
    import inseq

    model = inseq.load_model(str(folder), "attention")

    def attribute(text: str) -> Any:
        # The first word is the prompt: all others are attributed to the words before them.
        return model.attribute(text.partition(" ")[0], text, show_progress=False)

    return attribute


def _inseq_entropy(attributed: Any) -> Entropy:
    weights = attributed.sequence_attributions[0].target_attributions

    def entropy(query: int) -> float:
        # [keys, attributed words, layers, heads]; the word after the query is attributed. Keys
        # that the query does not see are NaN.
        return _entropy(weights[: query + 1, query, LAYER, HEAD])

    return entropy


def captum_activation(folder: Path) -> Show:
    import transformers
    from captum.attr import LayerActivation

    model = transformers.AutoModel.from_pretrained(folder, attn_implementation="eager")
    layers = [block.attn for block in model.h]
    activation = LayerActivation(lambda ids: model(ids).last_hidden_state, layers)

    def show(text: str, _: Path) -> Entropy:
        outputs = activation.attribute(_inputs(folder, text)["input_ids"])
        return lambda query: _entropy(outputs[LAYER][1][0, HEAD, query])

    return show


def attnread_heads(folder: Path) -> Show:
    import transformers
    from attnread import extract_attention

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    model.eval().requires_grad_(False)

    def show(text: str, _: Path) -> Entropy:
        patterns = extract_attention(model, _inputs(folder, text))
        return lambda query: _entropy(patterns["text", LAYER, HEAD][0, query])

    return show


@dataclass(frozen=True)
class Tool:
    package: str  # as importlib.metadata has it
    load: Callable[[Path], Show]


TOOLS = {
    "regard": Tool("regard", regard_pages),
    "transformers": Tool("transformers", transformers_eager),
    "captum": Tool("captum", captum_activation),
    "transformer-lens": Tool("transformer-lens", transformer_lens_patterns),
    "transformer-lens-all": Tool("transformer-lens", transformer_lens_all),
    "inseq": Tool("inseq", inseq_numbers),
    "inseq-page": Tool("inseq", inseq_page),
    "attnread": Tool("attnread", attnread_heads),
    "bertviz-head": Tool("bertviz", bertviz_head),
    "bertviz-model": Tool("bertviz", bertviz_model),
}


def _tokenizer(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def _inputs(folder: Path, text: str) -> dict[str, Any]:
    return dict(_tokenizer(folder)(text, return_tensors="pt"))


def _eager(folder: Path) -> Callable[[dict[str, Any]], Any]:
    """A model that returns its attention weights, as BertViz's documentation loads it."""
    import torch
    import transformers

    model = transformers.AutoModel.from_pretrained(
        folder, attn_implementation="eager", output_attentions=True
    )

    def run(inputs: dict[str, Any]) -> Any:
        with torch.no_grad():
            return model(**inputs).attentions

    return run


def _entropy(weights: Any) -> float:
    import torch

    return float(torch.special.entr(weights.double()).sum())


# ------------------------------------------------------------------------------------- a process


def work(name: str, folder: Path, length: int, out: Path) -> None:
    """Show a text with a tool, and print what it took as the last line."""
    tool = TOOLS[name]
    show = tool.load(folder)
    text = " ".join(f"w{number}" for number in random.Random(0).choices(range(WORDS), k=length))
    started, used = time.perf_counter(), time.process_time()
    entropy = show(text, out)
    seconds, used = time.perf_counter() - started, time.process_time() - used
    peak = memory.peak()
    packages = dict.fromkeys((tool.package, "transformers", "torch"))
    result = {
        "seconds": seconds,
        "processor_s": used,
        "peak_mib": peak,
        "written_mb": sum(file.stat().st_size for file in out.iterdir()) / 1e6,
        "entropy": entropy(length // 2),
        "versions": {package: importlib.metadata.version(package) for package in packages},
    }
    print(json.dumps(result), flush=True)


def attempt(python: Path, name: str, folder: Path, length: int, limits: Limits) -> dict[str, Any]:
    """What ``work`` printed, or ``stopped``: the limit or the last line of an error."""
    with tempfile.TemporaryDirectory() as out, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [python, __file__, "--work", name, folder, str(length), out],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            # With one thread, no thread uses processor time to wait for another.
            env={**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        )
        started = time.perf_counter()
        stopped = ""
        while process.poll() is None and not stopped:
            if memory.peak(process.pid) > limits.mebibytes:
                stopped = "memory"
            elif _processor_seconds(process.pid) > limits.seconds:
                stopped = "time"
            elif time.perf_counter() - started > 10 * limits.seconds:
                stopped = "waiting"
            time.sleep(0.02)
        if stopped:
            process.kill()
        printed, _ = process.communicate()
        if stopped:
            return {"stopped": stopped}
        errors.seek(0)
        if process.returncode:
            return {
                "stopped": (errors.read().strip().splitlines() or [str(process.returncode)])[-1]
            }
    result: dict[str, Any] = json.loads(printed.splitlines()[-1])
    return result if result["peak_mib"] <= limits.mebibytes else {"stopped": "memory"}


def _processor_seconds(process: int) -> float:
    """The processor time of a process since its start, of all its threads."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -------------------------------------------------------------------------------------- the run


@dataclass(frozen=True)
class Limits:
    mebibytes: int
    seconds: float


def make_model(folder: Path, length: int) -> None:
    """Save a model with random weights, and a tokenizer of words."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocabulary = {f"w{number}": number for number in range(WORDS)} | {"<end>": WORDS}
    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=len(vocabulary), n_positions=length, n_embd=HEADS * WIDTH, n_layer=LAYERS,
        n_head=HEADS, initializer_range=0.1, bos_token_id=WORDS, eos_token_id=WORDS,
    )  # fmt: skip
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="<end>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "<end>")
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, model_input_names=["input_ids", "attention_mask"], **special
    )
    tokenizer.save_pretrained(folder)


def compare(
    name: str, python: Path, folders: Path, lengths: list[int], limits: Limits
) -> dict[str, Any]:
    """The row of a tool: all texts that it showed, the longest one first, and why it stopped."""
    runs: list[dict[str, Any]] = []
    stopped = "" if python.exists() else "not installed"
    for length in lengths:
        folder = folders / str(length)
        if not stopped and not folder.exists():
            make_model(folder, length)
        run = {"stopped": stopped} if stopped else attempt(python, name, folder, length, limits)
        if stopped := run.get("stopped", ""):
            print(f"{name}: stopped at {length:,} tokens: {stopped}", flush=True)
            break
        runs.insert(0, {"tokens": length, **run})
        print(
            f"{name}: {length:,} tokens, {run['processor_s']:.1f} s of processor time in "
            f"{run['seconds']:.1f} s, {run['peak_mib']:,.0f} MiB, {run['written_mb']:.1f} MB",
            flush=True,
        )
    return {
        "tool": name,
        "package": TOOLS[name].package,
        "limit_mib": limits.mebibytes,
        "limit_s": limits.seconds,
        "stopped": stopped,
        "stopped_at": length if stopped else 0,
        "versions": runs[0]["versions"] if runs else {},
        "runs": [{key: run[key] for key in run if key != "versions"} for run in runs],
    }


def differences(rows: list[dict[str, Any]]) -> list[str]:
    """The tools whose entropy at the shortest text is not that of the first row."""
    entropies = {
        row["tool"]: run["entropy"]
        for row in rows
        for run in row["runs"]
        if run["tokens"] == min(LENGTHS)
    }
    expected = next(iter(entropies.values()), 0.0)
    return [
        f"{name} finds an entropy of {found:.4f}, {next(iter(entropies))} of {expected:.4f}"
        for name, found in entropies.items()
        if not math.isclose(found, expected, rel_tol=TOLERANCE)
    ]


# -------------------------------------------------------------------------------- installations


def pip_calls(torch: str, transformers: str) -> dict[str, list[list[str]]]:
    """The arguments of each ``pip install`` that makes the environment of a package."""
    pinned = [f"torch=={torch}", f"transformers=={transformers}"]
    return {
        "bertviz": [[*pinned, "bertviz==1.4.1"]],
        "captum": [[*pinned, "captum==0.9.0"]],
        "inseq": [[*pinned, "inseq==0.7.1"]],
        "transformer-lens": [[*pinned, "transformer_lens==4.3.0"]],
        # AttnRead asks for PyTorch 2.14. To compare memory, all tools run with the same PyTorch.
        "attnread": [
            [pinned[0], "transformers==5.19.0", "nnsight==0.7.0"],
            ["--no-deps", "attnread==0.1.2"],
        ],
    }


def install(environments: Path) -> None:
    """Make the environments that are missing."""
    versions = (importlib.metadata.version(name) for name in ("torch", "transformers"))
    for package, calls in pip_calls(*(version.partition("+")[0] for version in versions)).items():
        if (environments / package).exists():
            continue
        venv.create(environments / package, with_pip=True)
        for call in calls:
            command = [environments / package / "bin/python", "-m", "pip", "install", "--quiet"]
            if subprocess.run([*command, *call], check=False).returncode:
                print(f"{package} COULD NOT BE INSTALLED", file=sys.stderr)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        name, folder, length, out = sys.argv[2:]
        return work(name, Path(folder), int(length), Path(out))

    import torch

    from measure import append, argument_parser

    torch.set_num_threads(1)  # for the environment in the results
    parser = argument_parser(__doc__)
    parser.add_argument("tools", nargs="*", help=", ".join(TOOLS))
    parser.add_argument("--environments", type=Path, required=True)
    parser.add_argument("--install", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--mebibytes", type=int, default=4096)
    parser.add_argument("--seconds", type=float, default=300)
    given = parser.parse_args()
    if given.install:
        return install(given.environments)
    rows = []
    with tempfile.TemporaryDirectory() as folders:
        for name in given.tools or TOOLS:
            package = TOOLS[name].package
            own = given.environments.absolute() / package / "bin/python"
            python = Path(sys.executable) if package in ("regard", "transformers") else own
            limits = Limits(given.mebibytes, given.seconds)
            rows.append(compare(name, python, Path(folders), given.lengths, limits))
            append("compare_tools", rows[-1:])
    sys.exit("\n".join(differences(rows)) or None)


if __name__ == "__main__":
    main()
