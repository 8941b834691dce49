"""Write measured figures into README.md and docs/*.md, from benchmarks/results. Run by `make docs`.

A page marks the place of a table, or of a figure inside a sentence, with a pair of comments:

    <!-- table: cpu -->          <!-- figure: slowdown -->24<!-- /figure -->
    <!-- /table -->

What stands between them is generated, from the newest commit that measured every row of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MARKED = re.compile(r"(<!-- (table|figure): ([\w-]+) -->)(.*?)(<!-- /\2 -->)", re.DOTALL)
CELLS = tuple(
    (width, length, kind)
    for width in (64, 128)
    for length in (512, 2048, 8192, 65536)
    for kind in ("full", "causal")
)

Row = dict[str, Any]


# ----------------------------------------------------------------------------------- the results


def results(name: str, key: Callable[[Row], object], wanted: Iterable[object]) -> list[Row]:
    """The rows of the newest commit that measured every ``wanted`` key, in the order of these."""
    wanted = list(wanted)
    by_commit: dict[str, dict[object, Row]] = {}
    for text in (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines():
        row = json.loads(text)
        commit = row["commit"].removesuffix("-dirty")
        rows = by_commit.pop(commit, {})  # a commit that measured again is the newest
        by_commit[commit] = rows | {key(row): row}
    for rows in reversed(by_commit.values()):
        if rows.keys() >= set(wanted):
            return [rows[name] for name in wanted]
    raise ValueError(f"No commit in benchmarks/results/{name}.jsonl measured all of {wanted}.")


def _gpu(what: str, cells: Iterable[str]) -> list[Row]:
    return results("gpu", lambda row: (row["what"], row["cell"]), [(what, cell) for cell in cells])


def _grid(what: str) -> dict[tuple[int, int, str], Row]:
    rows = _gpu(what, (f"d {width} n {length} {kind}" for width, length, kind in CELLS))
    return dict(zip(CELLS, rows, strict=True))


def _cpu(part: str, cases: Iterable[str]) -> list[Row]:
    return results("cpu", lambda row: (row["part"], row["case"]), [(part, case) for case in cases])


def _seeing_on_cpu(part: str, dtypes: Sequence[str], lengths: Sequence[int]) -> list[Row]:
    cells = [(d, n, kind) for d in dtypes for n in lengths for kind in ("full", "causal")]
    return _cpu(part, [f"{dtype} n={length} {kind}, native" for dtype, length, kind in cells])


# ---------------------------------------------------------------------------------- the wording


def _table(head: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    rows = [head, ["---"] * len(head), *lines]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _between(rows: Iterable[Row], name: str, digits: int) -> str:
    values = [row[name] for row in rows]
    low, high = (f"{end:.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def _source(rows: Sequence[Row], script: str) -> str:
    """A line that says what measured the rows, where and when."""
    last = rows[-1]
    device = re.sub(r"\(R\)| Processor", "", last["device"])
    where = f"{device}, {last['threads']} threads" if "Xeon" in device else device
    versions = f"torch {last['torch']}" + (f", Triton {last['triton']}" if "triton" in last else "")
    run = f"`benchmarks/{script}`, commit {last['commit'].removesuffix('-dirty')}"
    return f"\n\n{run}, {last['date'][:10]}: {where}, {versions}."


# ----------------------------------------------------------------------------------- the tables


def cpu() -> str:
    """Seeing, packed sequences and decoding on the CPU, each beside another library."""
    kinds, dtypes = ("full", "causal"), ("float32", "bfloat16")
    lines: list[tuple[str, str, str]] = []
    for dtype in dtypes:
        rows = _seeing_on_cpu("seeing, speed / eager weights", [dtype], [4096])
        seen = f"entropy, peak, what keys receive and a pooled map; 4,096 tokens, {dtype}"
        speed = f"{_between(rows, 'value', 1)} times as fast"
        lines.append((seen, "all weights in plain PyTorch", speed))
    costs = _seeing_on_cpu("seeing, cost / SDPA", dtypes, [2048, 4096, 8192])
    memory = _cpu("memory while seeing, MB", [f"n=32768, 8 heads, {kind}" for kind in kinds])
    packed, decoding = _cpu("packed, speed / SDPA padded", kinds), _decoding()
    lines += [
        (
            "the same, 2,048 to 8,192 tokens, both precisions",
            "PyTorch's attention alone, which shows nothing",
            f"{_between(costs, 'value', 2)} times as long",
        ),
        (
            "memory for the same; 32,768 tokens, 8 heads",
            f"all weights in float32: {8 * 32768**2 * 4 / 1e9:.0f} GB",
            f"{_between(memory, 'value', 0)} MB",
        ),
        (
            "packed sequences of 16 to 512 tokens",
            "the same sequences padded, in PyTorch",
            f"{_between(packed, 'value', 1)} times as fast",
        ),
    ]
    for row in decoding:
        peer = row["peer"].replace("ctranslate2", "CTranslate2")
        case = f"{row['case']}, {row['ours'].removeprefix('regard ')}"
        lines.append((case, peer, f"{row['speed']:.1f} times as fast"))
    table = _table(("on the CPU", "compared with", "regard"), lines)
    return table + _source(packed, "cpu.py") + _source(decoding, "decoding.py")


def _decoding() -> list[Row]:
    pairs = [
        (case, precision, peer)
        for case in ("transformer-base, beam 4, batch 1", "transformer-base, beam 4, batch 32")
        for precision, peer in (("float32", "ctranslate2 float32"), ("int8", "ctranslate2 int8"))
    ]
    gpt2 = "GPT-2 124M, greedy, batch 1"
    pairs += [(gpt2, precision, "transformers float32") for precision in ("float32", "int8")]
    return results(
        "decoding",
        lambda row: (row["case"], row.get("ours", "").removeprefix("regard "), row.get("peer")),
        pairs,
    )


def eager() -> str:
    """How many times as fast the statistics are as all weights, on the CPU."""
    rows = _seeing_on_cpu("seeing, speed / eager weights", ["float32", "bfloat16"], [4096])
    return _between(rows, "value", 0)


def gpu() -> str:
    """The cost of seeing on a GPU, in five lines."""
    long = [row for (_, length, _), row in _grid("seeing").items() if length >= 2048]
    [memory] = _gpu("memory", ["n 131072 heads 16 d 128"])
    forward, step = "PyTorch's fastest forward pass", "a training step that sees nothing"
    lines = [
        (what, peer, f"{_between(long, name, 2)} times as long")
        for what, peer, name in (
            ("a plain call", forward, "plain"),
            ("entropy, peak, log-sum-exp, largest score", forward, "rows"),
            ("all fields except the top keys, with a 64 × 64 map", forward, "everything"),
            ("all of these and the top 8 keys of each query", forward, "top"),
            ("a training step that sees all fields except the top keys", step, "training"),
        )
    ]
    lines.append(
        (
            "memory for all fields except the top keys; 131,072 causal tokens, 16 heads",
            f"all weights in bfloat16: {16 * 131072**2 * 2 / 2**30:.0f} GiB",
            f"{memory['gib']:.2f} GiB, in {memory['seconds']:.2f} s",
        )
    )
    head = ("on an H200, bfloat16, 2,048 tokens and more", "compared with", "regard")
    return _table(head, lines) + _source(long, "gpu.py")


def gpu_seeing() -> str:
    """Every cell of the benchmark of seeing."""
    names = ("plain", "backward", "rows", "everything", "top", "training")
    grid = _grid("seeing")
    head = ("head width", "tokens", "mask", "plain", "backward", "row statistics")
    table = _table(
        (*head, "all but top", "all, `top=8`", "training step"),
        (
            (f"{width}", f"{length:,}", kind, *(f"{row[name]:.2f}" for name in names))
            for (width, length, kind), row in grid.items()
        ),
    )
    return table + _source(list(grid.values()), "gpu.py seeing")


def gpu_fields() -> str:
    """Which pass a field comes from, and what it adds to PyTorch's forward pass."""
    grid = _grid("passes")
    rows = [row for (_, length, _), row in grid.items() if length >= 2048]
    names = ("rows", "everything", "second", "backward", "top")
    adds = {name: _between(rows, name, 2) for name in names}
    while_training = f"{adds['backward']} of cuDNN's backward pass, which it replaces"
    lines = [
        ("`lse`, `entropy`, `peak`, `max_logit`", "the forward pass", adds["rows"]),
        ("`distance` as well", "the same pass", adds["everything"]),
        (
            "`received`, `map`, `map_peak`",
            "a second pass over the keys",
            f"{adds['second']} more",
        ),
        ("the same while training", "the backward pass", while_training),
        ("`top`, up to 8 keys", "one more pass over QKᵀ", f"{adds['top']} more"),
        ("`rows`", "a kernel for these rows alone", "grows with the rows"),
    ]
    head = ("field", "computed in", "time, as a share of PyTorch's fastest forward pass")
    return _table(head, lines) + _source(list(grid.values()), "gpu.py passes")


def gpu_structures() -> str:
    """Masks and biases inside the kernels."""
    names = {
        "Window(1024)": "`Causal() & Window(1024)`",
        "Segments of 1024": "`Causal() & Segments`, 1,024 tokens each",
        "Alibi": "`Causal()`, `Alibi`",
        "T5 buckets, table gradient": "`Causal()`, `RelativeBuckets`, table gradient too",
    }
    rows = _gpu("structure", names)
    relative = _gpu("relative", ["n 4096 d 64"])
    lines = [(names[row["cell"]], "compiled FlexAttention", row) for row in rows] + [
        ("`Causal()`, `RelativeContent`, 4,096 tokens", "a bias of n × n numbers", relative[0])
    ]
    table = _table(
        ("mask and bias", "forward", "backward", "compared with", "times as fast"),
        (
            (
                name,
                f"{row['forward_ms']:.2f} ms",
                f"{row['backward_ms']:.2f} ms",
                peer,
                f"{row['faster']:.3g} and {row['faster_backward']:.3g}",
            )
            for name, peer, row in lines
        ),
    )
    return table + _source(rows, "gpu.py structure relative")


def gpu_few_queries() -> str:
    """One query over many keys."""
    cells = [(131072, 32), (131072, 8), (8192, 32)]
    rows = _gpu("decoding", (f"keys {keys} heads {heads}" for keys, heads in cells))
    table = _table(
        ("one query, head width 128", "plain", "row statistics", "`top=8`", "keys and values read"),
        (
            (
                f"{keys:,} keys, {heads} heads",
                *(f"{row[name]:.3f} ms" for name in ("plain_ms", "seeing_ms", "top_ms")),
                f"{row['tb_per_s']:.1f} TB/s",
            )
            for (keys, heads), row in zip(cells, rows, strict=True)
        ),
    )
    return table + _source(rows, "gpu.py decoding")


def gpu_models() -> str:
    """GPT-2 on a GPU, trained and decoded."""
    step = results("training_gpu", lambda row: row["compiled"], [False, True])
    # The compiled Trainer may have compiled inside the measured steps, so it is no peer.
    run = results("trainer_gpu", lambda row: row["compiled"], [False])
    decoding = results("decoding_gpu", lambda row: row["dtype"], ["bfloat16", "float32"])
    names = (
        "training steps of 16 × 1,024 tokens, bfloat16, not compiled",
        "the same, compiled",
        "a whole training run beside Trainer, bfloat16, not compiled",
        "greedy decoding with CUDA graphs, batch 1, bfloat16",
        "the same, float32",
    )
    table = _table(
        ("GPT-2 124M on an H200", "regard, tokens/s", "transformers, tokens/s", "times as fast"),
        (
            (
                name,
                f"{row['ours_tokens_per_second']:,.0f}",
                f"{row['transformers_tokens_per_second']:,.0f}",
                f"{row['speed']:.3g}",
            )
            for name, row in zip(names, [*step, *run, *decoding], strict=True)
        ),
    )
    return table + "".join(
        _source(rows, f"gpt2_gpu.py {part}")
        for part, rows in (("training", step), ("trainer", run), ("decoding", decoding))
    )


def _watched() -> list[Row]:
    path = RESULTS / "every_model.jsonl"
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    types = sorted({row["model_type"] for row in rows})
    return results("every_model", lambda row: row["model_type"], types)


def watched_counts() -> str:
    """How many model types were watched, and how each compared."""
    rows = _watched()
    same = [row for row in rows if row["status"] == "same"]
    seeing = [row for row in same if row["layers"]]
    checked = [row for row in seeing if row.get("returned")]
    lines = [
        ("attention was seen, output and gradients are the same", seeing),
        ("of these, also compared with the weights that the model returns", checked),
        ("of these, with modules that are called attention but were not seen, each named", [
            row for row in seeing if row.get("unseen")
        ]),
        ("no attention was seen, the output is the same", [r for r in same if not r["layers"]]),
        ("different, or an error while watching", [
            row for row in rows if row["status"] in ("different", "error", "not ended")
        ]),
        ("refused, with a reason", [row for row in rows if row["status"] == "refused"]),
        ("not compared, because two plain runs differ", [
            row for row in rows if row["status"] == "random"
        ]),
        ("not built: no general rule makes this model tiny, or it needs another package", [
            row for row in rows if row["status"] == "not built"
        ]),
    ]  # fmt: skip
    table = _table(
        ("model types of transformers", "number"),
        ((what, f"{len(found)}") for what, found in lines),
    )
    last = rows[-1]
    source = f"commit {last['commit'].removesuffix('-dirty')}, {last['date'][:10]}"
    versions = f"transformers {last['transformers']}, torch {last['torch']}"
    return f"{table}\n\n`make test-every-model`, {source}: {versions}."


def watched_models() -> str:
    """Every model type that could be built, with what was seen of it."""
    lines = (
        (
            row["model_type"],
            f"{row.get('layers', 0)}",
            f"{row['equal']} of {row['returned']}" if row.get("returned") else "",
            f"{row['difference']:.0e}" if "difference" in row else "",
            f"{row['gradient']:.0e}" if row.get("gradient") is not None else "",
            "; ".join(_remarks(row)),
        )
        for row in _watched()
        if row["status"] != "not built"
    )
    head = ("model type", "layers", "weights equal", "output", "gradient", "not seen")
    return _table(head, lines)


def _remarks(row: Row) -> list[str]:
    """What was not seen, and what went wrong."""
    wrong = f"**{row['status']}**: {row['reason']}" if row["status"] != "same" else ""
    names = [*row.get("unseen", ()), *row.get("silent calls", ())]
    layers = dict.fromkeys(re.sub(r"\.\d+\b", ".*", name) for name in names)
    return [text.replace("|", "/") for text in (wrong, *layers) if text]


def watched_unbuilt() -> str:
    """The model types that could not be built."""
    rows = [row for row in _watched() if row["status"] == "not built"]
    lines = ((row["model_type"], row["reason"].replace("|", "/")[:120]) for row in rows)
    return _table(("model type", "why it was not built"), lines)


def _watched_tests() -> list[Row]:
    """The newest row of every family."""
    text = (RESULTS / "transformers_tests.jsonl").read_text(encoding="utf-8")
    newest = {row["family"]: row for row in map(json.loads, text.splitlines())}
    return [newest[family] for family in sorted(newest)]


def watched_tests() -> str:
    """What transformers' own tests found while every call of a model was watched, by family."""
    rows = _watched_tests()
    numbers = [_test_numbers(row) for row in rows]
    lines = [
        (
            row["family"] if row["ended"] and not row.get("few") else f"{row['family']} (a part)",
            *(f"{number:,}" for number in counted),
            _largest([row]),
        )
        for row, counted in zip(rows, numbers, strict=True)
    ]
    sums = [f"{sum(column):,}" for column in zip(*numbers, strict=True)]
    head = (
        "family", "tests", "fail only watched", "fail always", "calls", "compared",
        "also gradients", "different", "errors", "tests refused",
        "tests with a module not recorded", "of these, not named", "largest difference",
    )  # fmt: skip
    table = _table(head, [*lines, ("all", *sums, _largest(rows))])
    commits = sorted({row["commit"].removesuffix("-dirty") for row in rows})
    last = max(rows, key=lambda row: row["date"])
    versions = f"transformers {last['transformers']}, torch {last['torch']}"
    where = f"commit{'s' * (len(commits) > 1)} {', '.join(commits)}, {last['date'][:10]}"
    tests = f"tests of transformers' commit {last['source']}"
    return f"{table}\n\n`make test-transformers`, {where}: {tests}, {versions}."


def _test_numbers(row: Row) -> list[int]:
    counts = row["counts"]
    return [
        row["tests"],
        len(row["different tests"]),
        len(row["failed unwatched, too"]),
        *(
            counts.get(name, 0)
            for name in ("calls", "compared", "gradients compared", "different", "error")
        ),
        *(row["tests with"][kind] for kind in ("refused", "unseen", "unseen, not named")),
    ]


def _largest(rows: Sequence[Row]) -> str:
    found = [row["largest differences"].get("output, float32", 0.0) for row in rows]
    return f"{max(found):.0e}"


def watched_tests_reasons() -> str:
    """What was refused, not recorded or different there, and in how many calls."""
    calls: dict[str, int] = {}
    for row in _watched_tests():
        reasons = {k: n for k, n in row["reasons"].items() if not k.startswith("not compared")}
        unseen = {f"not recorded: {what}": n for what, n in row["unseen"].items()}
        for reason, number in (reasons | unseen).items():
            calls[reason] = calls.get(reason, 0) + number
    if not calls:
        return "Nothing was refused, different, or not recorded."
    lines = ((reason.replace("|", "/"), f"{number:,}") for reason, number in sorted(calls.items()))
    return _table(("reason", "calls"), lines)


# The names in benchmarks/compare_tools.py, and what the tools are called and do.
TOOLS = {
    "regard": ("regard", "`watch`, then a page of all heads and a map of each of the 48 heads"),
    "transformers": ("transformers", '`"eager"` with `output_attentions=True`'),
    "captum": ("captum", "`LayerActivation` of the attention modules"),
    "transformer-lens": ("TransformerLens", "`run_with_cache`, attention patterns only"),
    "inseq": ("inseq", '`attribute` by `"attention"`'),
    "bertviz-head": ("BertViz", "the page of `head_view`"),
}


def tools() -> str:
    """The longest text that each tool shows, and the limit that stopped it at a longer one."""
    rows = results("compare_tools", lambda row: row["tool"], TOOLS)
    lines = []
    for row in rows:
        name, what = TOOLS[row["tool"]]
        longest = row["runs"][0]
        written = longest["written_mb"]
        lines.append(
            (
                f"{name} {row['versions'][row['package']]}",
                what,
                f"{longest['tokens']:,}",
                f"{longest['peak_mib'] / 1024:.1f} GiB",
                f"{longest['processor_s']:,.0f} s",
                f"{written:.3g} MB" if written else "nothing",
                f"{row['stopped']}, at {row['stopped_at']:,}"
                if row["stopped"]
                else "not tried longer",
            )
        )
    head = ("tool", "what it does", "longest text, tokens", "memory", "processor time", "writes")
    table = _table((*head, "what stopped it"), lines)
    return table + _source(rows, "compare_tools.py")


_FIGURES = (
    cpu,
    eager,
    gpu,
    gpu_seeing,
    gpu_fields,
    gpu_structures,
    gpu_few_queries,
    gpu_models,
    watched_counts,
    watched_models,
    watched_unbuilt,
    watched_tests,
    watched_tests_reasons,
    tools,
)
BLOCKS = {make.__name__.replace("_", "-"): make for make in _FIGURES}


# ------------------------------------------------------------------------------------ the pages


def pages() -> list[Path]:
    """The pages that may hold tables."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def filled(page: str) -> str:
    """The text of a page with every table and figure written anew."""

    def written(match: re.Match[str]) -> str:
        start, kind, name, _, end = match.groups()
        text = BLOCKS[name]()
        return f"{start}\n{text}\n{end}" if kind == "table" else f"{start}{text}{end}"

    return MARKED.sub(written, page)


def write() -> None:
    """Write every page that holds tables."""
    for path in pages():
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    write()
