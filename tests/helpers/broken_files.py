"""Checkpoints broken on purpose: each is an intact one with a change at a place that is parsed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import torch

from helpers import sentencepiece_files as pieces
from regard import GPT2, GPT2Config, Tokenizer
from regard.checkpoints.files import CONFIG
from regard.checkpoints.tensors import INDEX, WEIGHTS, write

VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 3, 7, 2**31, 2**63, 10**30, 1e308, -0.5, float("nan"),
    float("inf"), "", "relu", "../../etc/passwd", "/etc/passwd", "\ud800", "a" * 5000, [], [1], {},
    {"a": 1}, [[]], [-1], [2**62, 2**62],
]  # fmt: skip
SHARDS: list[Any] = [
    "../model-00001-of-00003.safetensors", "/etc/passwd", "/dev/zero", "..", ".", "", "\0",
    "model-00009-of-00003.safetensors", "config.json", "\ud800.safetensors", "a/b.safetensors",
    "a\\b.safetensors", "~/x.safetensors", "pipe.safetensors", None, 3, [], {},
    "model-00001-of-00003.safetensors", "x" * 300 + ".safetensors",
]  # fmt: skip


def good(folder: Path, *, sharded: bool) -> None:
    """A small checkpoint that loads."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocabulary=12, length=8, dim=4, depth=2, heads=2, begin_token=None, end_token=None
    )
    model = GPT2(config)
    tensors = model.keys(config).save(model.state_dict())
    write(folder, model.write_config(), tensors, shard_bytes=600 if sharded else 2**30)
    assert (folder / INDEX).exists() == sharded


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    length = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def joined(header: str | bytes, data: bytes) -> bytes:
    text = header if isinstance(header, bytes) else header.encode(errors="surrogatepass")
    return len(text).to_bytes(8, "little") + text + data


def weights(raw: bytes, rng: random.Random) -> bytes:
    """A safetensors file with one error."""
    header, data = split(raw)
    keys = [key for key in header if key != "__metadata__"]
    key = rng.choice(keys)
    entry = header[key]
    kind = rng.randrange(12)
    if kind == 0:
        return rng.choice([0, 1, 2**20, 2**40, 2**63, len(raw)]).to_bytes(8, "little") + raw[8:]
    if kind == 1:
        entry[rng.choice(["dtype", "shape", "data_offsets", "more"])] = rng.choice(VALUES)
    elif kind == 2:
        del entry[rng.choice(list(entry))]
    elif kind == 3:
        entry["data_offsets"][rng.randrange(2)] += rng.choice([-(2**40), -4, -1, 1, 4, 2**40])
    elif kind == 4:
        entry["shape"] = [size * rng.choice([0, 1, 2, 2**40]) for size in entry["shape"]]
    elif kind == 5:
        entry["dtype"] = rng.choice(["F64", "F32", "F16", "BF16", "I32", "U8", "BOOL", "F8_E4M3"])
    elif kind == 6:
        header[rng.choice(["", "x", "transformer.", "\ud800", "h.0"])] = header.pop(key)
    elif kind == 7:
        text = json.dumps(header)
        return joined(text[:-1] + f", {json.dumps(key)}: {json.dumps(entry)}}}", data)
    elif kind == 8:
        cut = rng.randrange(len(raw))
        return raw[:cut] if rng.random() < 0.5 else raw + bytes(cut)
    elif kind == 9:
        text = bytearray(json.dumps(header).encode())
        for _ in range(rng.randrange(1, 4)):
            text[rng.randrange(len(text))] = rng.randrange(256)
        return joined(bytes(text), data)
    elif kind == 10:
        depth = rng.choice([10, 3000, 100_000])
        return joined('{"x":' * depth + "1" + "}" * depth, data)
    else:
        return joined(rng.choice(["[]", "1", "null", '"x"', "", "{", "9" * 5000]), data)
    return joined(json.dumps(header), data)


def index(raw: bytes, rng: random.Random) -> bytes:
    """An index with one error."""
    value = json.loads(raw)
    places = value["weight_map"]
    key = rng.choice(list(places))
    kind = rng.randrange(6)
    if kind == 0:
        places[key] = rng.choice(SHARDS)
    elif kind == 1:
        del places[key]
    elif kind == 2:
        places[rng.choice(["x", "transformer.x", ""])] = rng.choice([*places.values(), *SHARDS])
    elif kind == 3:
        value["weight_map"] = rng.choice(VALUES)
    elif kind == 4:
        text = bytearray(raw)
        text[rng.randrange(len(text))] = rng.randrange(256)
        return bytes(text)
    else:
        return raw[: rng.randrange(len(raw))]
    return json.dumps(value).encode()


def config(raw: bytes, rng: random.Random) -> bytes:
    """A config with one value wrong or unusual."""
    value = json.loads(raw)
    key = rng.choice(list(value))
    kind = rng.randrange(5)
    if kind <= 1:
        value[key] = rng.choice(VALUES)
    elif kind == 2:
        del value[key]
    elif kind == 3:
        text = bytearray(raw)
        text[rng.randrange(len(text))] = rng.randrange(256)
        return bytes(text)
    else:
        value = rng.choice([value, [value], {**value, "n_layer": rng.choice(VALUES)}])
    return json.dumps(value).encode()


def broken(source: Path, target: Path, rng: random.Random) -> str:
    """Copy a good checkpoint, break one file, and return the name of this file."""
    shutil.copytree(source, target)
    files = [file.name for file in target.iterdir() if file.name.endswith(".safetensors")]
    choices = [*rng.sample(files, 1), CONFIG]
    if (target / INDEX).exists():
        choices.append(INDEX)
    name = rng.choice(choices)
    change = {CONFIG: config, INDEX: index}.get(name, weights)
    file = target / name
    file.write_bytes(change(file.read_bytes(), rng))
    return name


# -------------------------------------------------------------------------------------- tokenizers


def tokenizers(folder: Path) -> list[Path]:
    """Folders of small tokenizers that load, one for every format that regard reads."""
    lines = ["the cat sat on the mat.", "there is a hat on that cat."] * 20
    for name, text in {
        "bpe": Tokenizer.train_bpe(lines, size=270),
        "wordpiece": Tokenizer.train_wordpiece(lines, size=60),
        "unigram": Tokenizer.train_unigram(lines, size=40),
    }.items():
        text.save(folder / name)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "cat", "##s", "on", "m", "##at"]
    made: dict[str, dict[str, bytes]] = {
        "bert": {
            "vocab.txt": "\n".join(words).encode(),
            "tokenizer_config.json": b'{"do_lower_case": false}',
        },
        "gpt2": {
            "vocab.json": json.dumps(
                {t: n for n, t in enumerate([*"thecam", "th", "at"])}
            ).encode(),
            "merges.txt": b"#version: 0.2\nt h\na t\n",
        },
        "t5": {"spiece.model": pieces.model(pieces.unigrams())},
        "merged": {"tokenizer.model": pieces.model(pieces.unigrams(), 2)},
    }
    for name, files in made.items():
        (folder / name).mkdir()
        for file, raw in files.items():
            (folder / name / file).write_bytes(raw)
    (folder / "marian").mkdir()
    pieces.marian(folder / "marian")
    (folder / "marian-two").mkdir()
    pieces.marian_of_two(folder / "marian-two")
    return sorted(folder.iterdir())


def broken_tokenizer(sources: list[Path], target: Path, rng: random.Random) -> str:
    """Copy one of the good tokenizers, break one file, and return the path of this file."""
    source = rng.choice(sources)
    shutil.copytree(source, target)
    file = rng.choice(sorted(target.iterdir()))
    raw = file.read_bytes()
    if rng.random() < 0.4:
        raw = scratched(raw, rng)
    elif file.suffix == ".json":
        raw = json.dumps(grafted(json.loads(raw), rng)).encode()
    elif file.suffix in (".model", ".spm"):
        raw = repieced(rng)
    else:
        lines = raw.split(b"\n")
        lines[rng.randrange(len(lines))] = rng.choice(
            [b"", b" ", b"a b c", b"the", b"\xff", b"x" * 5000]
        )
        raw = b"\n".join(lines)
    file.write_bytes(raw)
    return f"{source.name}/{file.name}"


def scratched(raw: bytes, rng: random.Random) -> bytes:
    """The bytes after a few random changes, deletions or insertions."""
    changed = bytearray(raw)
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(changed))
        kind = rng.randrange(4)
        if kind == 0:
            changed[at] = rng.randrange(256)
        elif kind == 1:
            del changed[at : at + rng.randrange(1, 30)]
        elif kind == 2:
            changed[at:at] = rng.choice(
                [b"[", b"{", b"null", b"-1", b"9" * 30, b'"', b"\xff", b","]
            )
        else:
            del changed[at:]
        if not changed:
            return b""
    return bytes(changed)


def grafted(value: Any, rng: random.Random) -> Any:
    """A JSON value in which one part is replaced, deleted or repeated."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.05:
        return rng.choice(VALUES)
    key: Any = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
    kind = rng.random()
    if kind < 0.1:
        del value[key]
    elif kind < 0.15 and isinstance(value, list):
        value.append(value[key])
    else:
        value[key] = grafted(value[key], rng)
    return value


def repieced(rng: random.Random) -> bytes:
    """A SentencePiece model with well-formed fields and unusual values."""
    listed = pieces.unigrams()
    at = rng.randrange(len(listed))
    text, score, kind = listed[at]
    change = rng.randrange(5)
    if change == 0:
        text = rng.choice(["", "▁", "<unk>", "\ud800", "é" * 300, "a b", "\0"])
    elif change == 1:
        score = rng.choice([float("nan"), float("inf"), -float("inf"), 1e38, -1e38, 5.0])
    elif change == 2:
        kind = rng.choice([0, 1, 2, 3, 4, 5, 6, 7, 2**40])
    listed[at] = (text, score, kind)
    if change == 3:
        del listed[rng.randrange(len(listed)) :]
    raw = pieces.model(listed, rng.choice([1, 1, 1, 1, 2, 2, 3, 4, 9]))
    if change == 4:
        raw += pieces.field(3, pieces.field(2, rng.randbytes(rng.choice([0, 1, 4, 8, 400]))))
    return raw


__all__ = ["WEIGHTS", "broken", "broken_tokenizer", "good", "joined", "split", "tokenizers"]
