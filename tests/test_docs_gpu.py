"""docs/gpu.md: its table is what benchmarks/gpu.py measured last."""

import json
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
COLUMNS = ("plain", "backward", "rows", "everything", "top", "training")


def test_the_table_is_the_newest_run():
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    lines = (ROOT / "benchmarks/results/gpu.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row["what"] == "seeing"]
    newest = [row for row in rows if row["commit"] == rows[-1]["commit"]]
    shown = re.findall(r"^\| (\d+) \| (\d+) \| (full|causal) \| (.+) \|$", page, re.MULTILINE)
    table = {f"d {d} n {n} {kind}": numbers.split(" | ") for d, n, kind, numbers in shown}
    assert table.keys() == {row["cell"] for row in newest}
    assert len(table) == 16
    for row in newest:
        for name, text in zip(COLUMNS, table[row["cell"]], strict=True):
            digits = len(text.partition(".")[2])
            assert text == f"{row[name]:.{digits}f}", (row["cell"], name)
    assert f"at commit {rows[-1]['commit']}, with which the table above was measured" in page
    long = [row for row in newest if " n 512 " not in row["cell"]]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for name, digits, words in (
        (
            "rows",
            2,
            "entropy, peaks and log-sum-exps take {} to {} times PyTorch's fastest forward",
        ),
        ("everything", 1, "everything but the top keys {} to {} times"),
        ("top", 1, "the top 8 of each query {} to {} times"),
        ("training", 2, "everything but the top keys takes {} to {} times one that sees nothing"),
    ):
        told = [f"{end(row[name] for row in long):.{digits}f}" for end in (min, max)]
        assert words.format(*told) in readme, (name, told)


def test_the_backward_passes_are_the_run_it_names():
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    lines = (ROOT / "benchmarks/results/gpu.jsonl").read_text(encoding="utf-8").splitlines()
    named = re.search(r"`benchmarks/gpu.py passes`, commit (\w+)", page)
    assert named
    rows = [row for row in map(json.loads, lines) if row["what"] == "passes"]
    newest = {row["cell"]: row for row in rows if row["commit"] == named[1]}
    shown = re.findall(r"^\| (\d+) \| (\S+; alone .+) \|$", page, re.MULTILINE)
    assert len(shown) == 4
    kinds = [f"d {width} n {{}} {kind}" for width in (64, 128) for kind in ("full", "causal")]
    for length, numbers in shown:
        for kind, text in zip(kinds, numbers.split(" | "), strict=True):
            row = newest[kind.format(length)]
            assert text == f"{row['backward']:.2f}; alone {row['bare']:.2f}", row["cell"]


def test_what_biases_cost_is_the_newest_run():
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    lines = (ROOT / "benchmarks/results/gpu.jsonl").read_text(encoding="utf-8").splitlines()
    newest = {(row["what"], row["cell"]): row for row in map(json.loads, lines)}
    row = newest["relative", "n 4096 d 64"]
    assert (
        f"| forward {row['forward_ms']:.2f} ms, {row['faster']:.1f}x as fast as a bias of n x n "
        f"numbers; backward {row['backward_ms']:.2f} ms, {row['faster_backward']:.1f}x as fast |"
    ) in page
    for cell, name in (
        ("Window(1024)", "Window(1024)"),
        ("Segments of 1024", "Segments of 1024"),
        ("Alibi", "Alibi"),
        ("T5 buckets, table gradient", "T5's buckets, with the gradient of their table"),
    ):
        row = newest["structure", cell]
        shown = re.search(rf"^\| {re.escape(name)} \| (.+) \|$", page, re.MULTILINE)
        assert shown, name
        told = [float(text) for text in re.findall(r"[\d.]+", shown[1])]
        kept = [row[key] for key in ("forward_ms", "backward_ms", "faster", "faster_backward")]
        for text, number in zip(told, kept, strict=True):
            assert abs(text - number) <= 0.006 * number, (name, text, number)
