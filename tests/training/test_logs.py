"""What a run leaves to look at: a picture, and a log that TensorBoard reads."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

from helpers.training_data import recipe_of, write_data
from regard.pictures.charts import draw, ticks
from regard.training.curves import panels
from regard.training.recipe import parse_recipe
from regard.training.run import train
from regard.training.tensorboard import Events, crc32c

SVG = "{http://www.w3.org/2000/svg}"


def records(file: Path) -> Iterator[bytes]:
    """The records of a file, their checksums proven."""
    data = file.read_bytes()
    while data:
        (length,) = struct.unpack("<Q", data[:8])
        for covered, at in ((data[:8], 8), (data[12 : 12 + length], 12 + length)):
            (masked,) = struct.unpack("<I", data[at : at + 4])
            turned = (masked - 0xA282EAD8) & 0xFFFFFFFF
            assert (turned >> 17 | turned << 15) & 0xFFFFFFFF == crc32c(covered)
        yield data[12 : 12 + length]
        data = data[16 + length :]


def fields(message: bytes) -> Iterator[tuple[int, bytes | float | int]]:
    """The fields of a protocol buffer, in order."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(message):
        tag = varint()
        number, wire = tag >> 3, tag & 7
        if wire == 0:
            yield number, varint()
            continue
        size = {1: 8, 5: 4}.get(wire) or varint()
        part = message[at : at + size]
        at += size
        form = {1: "<d", 5: "<f"}.get(wire)
        yield number, struct.unpack(form, part)[0] if form else part


def scalars(file: Path) -> dict[tuple[str, int], float]:
    """What TensorBoard would show: the value of each name at each step."""
    found = {}
    for event in records(file):
        parts = dict(fields(event))
        for _, value in fields(bytes(parts.get(5, b""))):  # type: ignore[arg-type]
            name, number = dict(fields(value)).values()  # type: ignore[arg-type]
            found[name.decode(), parts[2]] = number  # type: ignore[union-attr]
    return found  # type: ignore[return-value]


def test_events_hold_every_number_of_the_log_at_its_step(tmp_path: Path) -> None:
    with Events(tmp_path) as events:
        events.add({"data": "train", "bytes": 7})  # of no step
        events.add({"step": 300, "loss": 2.5, "gradient": None, "rate": 0.125})
        events.add({"step": 2**40, "attention": {"a.b": {"entropy": [1.5, 0.25]}}})
        events.add({"step": 9, "resumed": "step-9"})
    (file,) = tmp_path.iterdir()
    assert dict(fields(next(records(file))))[3] == b"brain.Event:2"
    assert scalars(file) == {
        ("loss", 300): 2.5,
        ("rate", 300): 0.125,
        ("attention/a.b/entropy/0", 2**40): 1.5,
        ("attention/a.b/entropy/1", 2**40): 0.25,
    }


def test_a_run_leaves_its_picture_and_its_events(tmp_path: Path) -> None:
    write_data(tmp_path)
    raw = recipe_of(tmp_path) | {"tensorboard": True}
    result = train(parse_recipe(raw))
    rows = [json.loads(line) for line in (result.folder / "log.jsonl").read_text().splitlines()]
    (file,) = (result.folder / "tensorboard").iterdir()
    found = scalars(file)
    for row in rows:
        if "gradient" in row:
            assert abs(found["loss", row["step"]] - row["loss"]) < 1e-6
    assert {("scores/loss", 6), ("scores/perplexity", 12)} <= found.keys()
    picture = ElementTree.parse(result.folder / "run.svg").getroot()
    words = [text.text for text in picture.iter(f"{SVG}text")]
    for name in ("loss", "training", "held out", "perplexity", "learning rate", "step"):
        assert name in words
    assert len(list(picture.iter(f"{SVG}circle"))) == 4  # two evaluations, two scores


def test_steps_taken_twice_are_drawn_once_as_they_were_last() -> None:
    rows = [
        {"step": 1, "loss": 9.0, "gradient": 1.0, "rate": 0.1},
        {"step": 2, "loss": 8.0, "gradient": 1.0, "rate": 0.1},
        {"step": 1, "resumed": "step-1"},
        {"step": 2, "loss": 7.0, "gradient": None, "rate": 0.1},
        {"step": 2, "scores": {"loss": 6.5, "bleu": float("nan")}},
    ]
    found = panels(rows)
    assert found["loss"] == {"training": {1: 9.0, 2: 7.0}, "held out": {2: 6.5}}
    assert list(found) == ["loss", "learning rate", "norm of the gradient"]
    draw("<&>", found)  # the rate is the same at all steps
    assert panels([]) == {}
    ElementTree.fromstring(draw("nothing", {}))


def test_ticks_are_few_and_round() -> None:
    assert ticks(0.0012, 0.0061, 4) == [0.002, 0.004, 0.006]
    for low, high in ((0, 1), (-3, 1e9), (5.0001, 5.0002), (1e-12, 2e-12)):
        found = ticks(low, high, 5)
        assert 1 <= len(found) <= 5
        assert all(low - 1e-9 * abs(low) <= tick <= high * (1 + 1e-9) for tick in found)
