"""Pictures show their numbers, fit the terminal or page, and escape their labels."""

from __future__ import annotations

import base64
import math
import re
import struct
import sys
import zlib
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard import InputError
from regard.pictures import figures
from regard.pictures.colours import LEVELS, level, nearest_of_256, ramp, ramp_of_256, roles
from regard.pictures.figures import Picture
from regard.pictures.record import Cells, printable, shorten, width_of
from regard.pictures.vector import FontWarning

SVG = "{http://www.w3.org/2000/svg}"
WORDS = ["The", "cat", "sat", "on", "the", "mat", "because", "it", "was", "very", "tired", "."]
HOSTILE = [
    "<script>alert(1)</script>", "a&b", '"quoted"', "\x1b[31mred", "\n", "\u202eright", "]]>",
]  # fmt: skip
ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def causal(length: int, seed: int = 0) -> Tensor:
    scores = 2 * torch.randn(length, length, generator=torch.Generator().manual_seed(seed))
    return scores.masked_fill(torch.ones(length, length).triu(1).bool(), -math.inf).softmax(-1)


def several(seed: int = 3) -> Picture:
    """Six grids in one picture, as an overview has."""
    generator = torch.Generator().manual_seed(seed)
    grids = [
        figures.head_grid(torch.rand(6, 12, generator=generator) * 10**n, "nats", title=f"Grid {n}")
        for n in range(-3, 3)
    ]
    return figures.panels("Six grids", grids, caption="What they are.")


@cache
def every_kind() -> dict[str, Picture]:
    wide = causal(150)
    signed = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    holes = torch.rand(3, 4, generator=torch.Generator().manual_seed(2))
    holes[2, 3] = math.nan
    return {
        "weights": figures.weight_map(causal(12), WORDS, WORDS, title="Layer 3, head 5"),
        "sink": figures.weight_map(causal(12), WORDS, WORDS, without_first=True),
        "many": figures.weight_map(wide, [f"w{i}" for i in range(150)], ["w"] * 150),
        "hostile": figures.weight_map(causal(7), HOSTILE, HOSTILE, title="<b>&\x1b[0m"),
        "wide letters": figures.weight_map(
            causal(3), ["日本語", "é̂tude", "x"], ["日本語", "b", "c"]
        ),
        "pooled": figures.pooled_map(wide, 100_000, 100_000),
        "panels": several(),
        "comparison": figures.compare(
            figures.weight_map(causal(12), WORDS, WORDS),
            figures.weight_map(causal(12, seed=5), WORDS, [*WORDS[:-1], "!"]),
            names=("head 1", "head 2"),
        ),
        "long comparison": figures.compare(
            figures.pooled_map(wide, 150, 150),
            figures.pooled_map(causal(150, 3), 150, 150),
            names=("a", "b"),
        ),
        "many panels compared": figures.compare(several(), several(4), names=("one", "other")),
        "part": figures.pooled_map(causal(20), 200, 200, first_query=5000, first_key=5000),
        "grid": figures.head_grid(torch.rand(12, 16) * 4, "nats", title="Entropy"),
        "large grid": figures.head_grid(torch.rand(80, 64) * 400, "positions", title="Distance"),
        "difference": figures.head_grid(signed, "nats", title="Entropy, trained minus random"),
        "holes": figures.head_grid(holes, "weight", title="Fewer heads"),
        "top": figures.top_keys(causal(12)[8], WORDS, word="was"),
        "alignment": figures.alignment(causal(9), WORDS[:9], WORDS[3:], caption="Layer 5"),
    }


KINDS = list(every_kind())
LONG = pytest.param("long comparison", marks=pytest.mark.slow)


def parsed(picture: Picture) -> ElementTree.Element:
    return ElementTree.fromstring(picture.svg())


def texts(root: ElementTree.Element) -> list[str]:
    return [element.text or "" for element in root.iter(f"{SVG}text")]


def tips(root: ElementTree.Element) -> dict[str, float]:
    """What cells say of themselves: whose they are, and their number."""
    actual = {}
    for box in root.iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None and title.text:
            name, _, note = title.text.rpartition(": ")
            actual[name] = float(note.split()[0])
    return actual


# Numbers ---------------------------------------------------------------------------------------


def test_the_numbers_of_the_svg_are_the_data() -> None:
    weights = causal(12)
    labels = [f"{word}{i}" for i, word in enumerate(WORDS)]
    actual = tips(parsed(figures.weight_map(weights, labels, labels)))
    expected = {
        f"query {query}, key {key}": weights[q, k].item()
        for q, query in enumerate(labels)
        for k, key in enumerate(labels)
    }
    assert actual == pytest.approx(expected, rel=1e-5, abs=1e-9)


def test_the_numbers_of_the_plain_text_are_the_data() -> None:
    weights = causal(5)
    text = figures.weight_map(weights, WORDS[:5], WORDS[:5]).text(width=80, color="none")
    rows = [line.split() for line in text.splitlines()[3:8]]
    assert [row[0] for row in rows] == WORDS[:5]
    for row, expected in zip(rows, weights.tolist(), strict=True):
        shown = [float("0" if cell == "." else cell) for cell in row[1:]]
        assert shown == pytest.approx(expected, abs=0.005)


@pytest.mark.parametrize("color", ["truecolor", "256"])
def test_colour_changes_nothing_but_colour(color: str) -> None:
    for name in ("weights", "grid", "alignment", "difference"):
        picture = every_kind()[name]
        coloured = ESCAPES.sub("", picture.text(width=120, color=color))  # type: ignore[arg-type]
        plain = picture.text(width=120, color="none")
        cells = [[line.split() for line in text.splitlines()[3:9]] for text in (coloured, plain)]
        assert cells[0] == cells[1]


@pytest.mark.parametrize("name", ["weights", "grid", "difference", "alignment", "pooled", "part"])
def test_the_legend_holds_the_ends_of_the_colours(name: str) -> None:
    picture = every_kind()[name]
    drawing = picture.drawing
    low, high = drawing.scale
    words = texts(parsed(picture))
    assert f"{low + 0.0:.3g}" in words
    assert f"{high:.3g}" in words
    plain = picture.text(color="none")
    assert re.search(rf"^{low + 0.0:.3g} \[.+\] {high:.3g} .*{drawing.unit}", plain, re.MULTILINE)


def test_the_scale_is_that_of_the_data() -> None:
    def scale(values: object) -> tuple[float, float]:
        return figures.head_grid(values, "x", title="t").drawing.scale

    assert scale([[0.5, 2.0], [1.0, 1.5]]) == (0.5, 2.0)
    assert scale([[-1.0, 0.25]]) == (-1.0, 1.0)
    assert scale([[3.0, math.nan]]) == (3.0, 3.0)


def test_a_few_towering_numbers_do_not_hide_the_rest_and_are_told() -> None:
    values = torch.full((40, 40), 0.01)
    values[0, 0] = 1.0
    values[1:, 1:] += 0.01 * torch.rand(39, 39, generator=torch.Generator().manual_seed(0))
    picture = figures.pooled_map(values, 4000, 4000)
    assert picture.drawing.scale[1] < 0.021
    for text in (picture.text(color="none"), picture.svg()):
        assert "or more, up to 1 of an average" in text


def test_what_is_left_out_is_said_with_its_share() -> None:
    weights = torch.tensor([[0.9, 0.1], [0.5, 0.5]])
    picture = figures.weight_map(weights, ["a", "b"], ["<s>", "b"], without_first=True)
    note = "The first key, '<s>', is left out: it takes 70.0% of the weight on average."
    assert note in picture.text(width=120, color="none")
    assert note in " ".join(texts(parsed(picture)))
    assert tips(parsed(picture)) == pytest.approx({"query a, key b": 0.1, "query b, key b": 0.5})

    pooled = figures.pooled_map(weights, 100, 100, without_first=True)
    assert "keys 0 to 49, is left out: it takes 70.0%" in pooled.text(width=120, color="none")
    bars = figures.top_keys([0.6, 0.3, 0.1], ["<s>", "b", "c"], word="c", without_first=True)
    note = (
        "2 of 3 keys hold 40.0% of the weight. The first key, '<s>', is left out: it takes 60.0%."
    )
    assert note in bars.text(width=120, color="none")


def test_bars_are_the_largest_weights_in_order() -> None:
    row = [0.1, 0.4, 0.05, 0.25, 0.2]
    picture = figures.top_keys(row, ["a", "b", "c", "d", "b"], word="x", count=3)
    lines = picture.text(width=60, color="none").splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["b", "d", "b"]
    assert [line.split()[-1] for line in lines[1:4]] == ["0.4", "0.25", "0.2"]
    assert "(1)" in lines[1]  # the two b have different labels
    assert "(4)" in lines[3]
    assert tips(parsed(picture)) == {"b (1)": 0.4, "d": 0.25, "b (4)": 0.2}
    boxes = [box for box in parsed(picture).iter(f"{SVG}rect") if box.get("class") == "bar"]
    widths = [float(box.get("width", "")) for box in boxes]
    assert [width / widths[0] for width in widths] == pytest.approx([1, 0.625, 0.5], abs=1e-3)


def test_the_best_source_of_each_target_is_marked() -> None:
    weights = [[0.7, 0.2, 0.1], [0.1, 0.3, 0.6]]
    picture = figures.alignment(weights, ["the", "cat", "sat"], ["die", "saß"])
    lines = picture.text(width=80, color="none").splitlines()
    assert lines[3].split() == ["die", "*.70", ".20", ".10"]
    assert lines[4].split() == ["saß", ".10", ".30", "*.60"]
    outlined = [b for b in parsed(picture).iter(f"{SVG}rect") if "outlined" in b.get("class", "")]
    note = [box.findtext(f"{SVG}title") for box in outlined]
    assert note == ["target die, source the: 0.7 weight", "target saß, source sat: 0.6 weight"]


def test_an_image_holds_the_shade_of_every_cell() -> None:
    values = causal(100)
    values[3, 50] = math.nan
    picture = figures.pooled_map(values, 1000, 1000)
    drawing = picture.drawing
    image = next(parsed(picture).iter(f"{SVG}image"))
    data = base64.b64decode((image.get("href") or "").partition("base64,")[2])
    width, height = struct.unpack(">II", data[16:24])
    assert (width, height) == (100, 100)
    at = data.index(b"IDAT")
    size = struct.unpack(">I", data[at - 4 : at])[0]
    raw = zlib.decompress(data[at + 4 : at + 4 + size])
    pixels = [raw[r * 101 + 1 : (r + 1) * 101] for r in range(100)]
    for r, row in enumerate(drawing.values):
        for c, value in enumerate(row):
            shade = LEVELS - 1 if math.isnan(value) else level(value, *drawing.scale)
            assert pixels[r][c] == (shade if math.isnan(value) else min(shade, LEVELS - 2))


def test_pooling_for_a_narrow_terminal_keeps_the_largest() -> None:
    values = torch.zeros(200, 200)
    values[150, 60] = 1.0
    lines = figures.pooled_map(values, 200, 200).text(width=60, color="none").splitlines()
    assert sum(line.count("@") for line in lines if "[" not in line) == 1
    assert "Each cell shows the largest of up to" in lines[-1]


# Where it goes ---------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [40, 80, 120])
@pytest.mark.parametrize("color", ["truecolor", "256", "none"])
@pytest.mark.parametrize("name", [LONG if name == "long comparison" else name for name in KINDS])
def test_lines_fit_the_terminal(name: str, color: str, width: int) -> None:
    text = every_kind()[name].text(width=width, color=color)  # type: ignore[arg-type]
    assert max(width_of(ESCAPES.sub("", line)) for line in text.splitlines()) <= width
    assert text.endswith("\n")
    if color == "none":
        assert "\x1b" not in text
    else:
        assert "\x1b[" in text
        assert "\x1b" not in ESCAPES.sub("", text)
        assert ("8;2;" in text) == (color == "truecolor")


@pytest.mark.parametrize("name", KINDS)
def test_plain_drawing_is_ascii_but_for_the_labels(name: str) -> None:
    text = every_kind()[name].text(width=80, color="none")
    assert set(re.findall(r"[^\x00-\x7f]", text)) <= set("日本語é\u0302")


@pytest.mark.parametrize("name", KINDS)
def test_svg_is_xml_and_stays_within_its_page(name: str) -> None:
    root = parsed(every_kind()[name])
    width, height = (float(root.get(side, "")) for side in ("width", "height"))
    for box in root.iter(f"{SVG}rect"):
        x, y, w, h = (float(box.get(key, "0")) for key in ("x", "y", "width", "height"))
        assert 0 <= x <= x + w <= width + 0.5
        assert 0 <= y <= y + h <= height + 0.5
    for text in root.iter(f"{SVG}text"):
        x, y, size = (float(text.get(key, "")) for key in ("x", "y", "font-size"))
        reach = 0.602 * size * width_of(text.text or "")
        turned = text.get("transform") or ""
        if "-45" in turned:
            assert x + 0.71 * reach <= width
            assert y - 0.71 * reach >= 0
        elif not turned and "mono" in (text.get("class") or ""):
            left = x - {"start": 0, "middle": reach / 2, "end": reach}[text.get("text-anchor", "")]
            assert 0 <= left <= left + reach <= width
        assert 0 <= y <= height


@pytest.mark.parametrize("name", KINDS)
def test_svg_and_html_need_no_network(name: str) -> None:
    picture = every_kind()[name]
    for text in (picture.svg(), picture.html()):
        rest = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        rest = re.sub(r'"data:image/png;base64,[^"]*"', "", rest)
        assert not re.search(r"https?:|//[a-z]|@import|url\(|<script|<link|src=", rest)
        assert "prefers-color-scheme:dark" in text


def test_labels_that_are_too_long_or_too_many_give_way() -> None:
    long = ["short", "internationalization-of-everything"]
    root = parsed(figures.weight_map([[0.5, 0.5], [0.1, 0.9]], long, long))
    assert "internationaliz…" in texts(root)
    assert "query short, key internationalization-of-everything" in tips(root)
    many = texts(parsed(every_kind()["many"]))
    shown = [text for text in many if re.fullmatch(r"w\d+", text)]
    assert shown[:2] == ["w0", "w4"]
    assert len(shown) < 50


def test_a_page_of_several_pictures_has_all_of_them_and_their_numbers() -> None:
    kinds = every_kind()
    page = figures.page("Two of them", [kinds["grid"], kinds["top"]])
    assert page.count("<svg") == page.count("</svg>") == 2
    assert page.count("<table>") == 2

    class Reader(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.tags: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.tags.append(tag)
            assert not [name for name, _ in attrs if name.startswith("on")]

    reader = Reader()
    reader.feed(page)
    assert reader.tags.count("figure") == 2
    assert f"<td>{kinds['grid'].drawing.values[3][7]:.6g}</td>" in page


# What must not get through ---------------------------------------------------------------------


def test_tokens_are_text_everywhere() -> None:
    picture = every_kind()["hostile"]
    for text in (picture.svg(), picture.html()):
        assert "&lt;script&gt;" in text
        assert not re.search("<script|<b>|\x1b|\u202e", text)
    parsed(picture)
    plain = picture.text(width=120, color="none")
    assert "\\x1b[31mred" in plain
    assert not re.search("\x1b|\u202e", plain)


def test_a_caption_may_hold_anything() -> None:
    parsed(figures.top_keys([0.6, 0.4], ["a", "b"], word="a", caption="\x1b[31mhi"))


@pytest.mark.slow
@settings(max_examples=60)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=4), st.text(max_size=20))
def test_any_text_is_a_label(labels: list[str], title: str) -> None:
    picture = figures.weight_map([[0.5] * len(labels)] * len(labels), labels, labels, title=title)
    parsed(picture)
    plain = picture.text(width=60, color="none")
    assert all(width_of(line) <= 60 for line in plain.split("\n"))
    assert "\x1b" not in plain


def test_printable_and_shorten() -> None:
    assert printable("a\tb\x07é日\u2028\ud800") == "a\\tb\\x07é日\\u2028\\ud800"
    assert shorten("日本語", 5) == "日本…"
    assert shorten("日本語", 4) == "日…"
    assert shorten("word", 4) == "word"
    assert shorten("words", 4, "..") == "wo.."


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: figures.weight_map(torch.rand(1, 2, 2), ["a"], ["b"]), r"\[0, 3\]"),
        (lambda: figures.weight_map(torch.rand(2), ["a"], ["b"]), "needs a table"),
        (lambda: figures.weight_map([[0.5], [0.1, 0.2]], ["a", "b"], ["c"]), "one length"),
        (lambda: figures.weight_map([[0.5]], ["a", "b"], ["c"]), "needs 1 labels.*2 labels"),
        (lambda: figures.weight_map([[0.5]], "a", ["c"]), "'a'"),
        (lambda: figures.weight_map([], [], []), "rows of numbers"),
        (lambda: figures.head_grid([[math.nan]], "x", title="t"), "at least one finite number"),
        (lambda: figures.head_grid([[math.inf, 1]], "x", title="t"), "infinite"),
        (lambda: figures.pooled_map([[0.5, 0.5]], 1, 1), "query and key per cell"),
        (lambda: figures.top_keys([-0.1, 0.2], ["a", "b"], word="a"), "0 or more"),
        (lambda: figures.top_keys([1.0], ["a"], word="a", without_first=True), "no key to draw"),
        (lambda: figures.weight_map([[1.0]], ["a"], ["a"], without_first=True), "one column"),
        (lambda: every_kind()["grid"].text(width=10), "40 columns"),
        (lambda: every_kind()["grid"].text(color="red"), "'truecolor', '256' or 'none'"),
    ],
)
def test_what_means_nothing_is_refused(call: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call()  # type: ignore[operator]


# Files -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_ending_chooses_the_kind(tmp_path: Path) -> None:
    picture = every_kind()["weights"]
    for ending, start in {
        "svg": b"<svg ", "html": b"<!doctype html>", "png": b"\x89PNG", "txt": b"Layer 3",
    }.items():  # fmt: skip
        path = tmp_path / f"picture.{ending}"
        path.write_bytes(b"older")
        picture.save(path)
        assert path.read_bytes().startswith(start)
    assert len(list(tmp_path.iterdir())) == 4  # and nothing beside them
    with pytest.raises(InputError, match=r"'picture.gif'.*'.gif' is unknown.*\.png"):
        picture.save(tmp_path / "picture.gif")


def test_a_write_that_fails_leaves_the_older_file_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "picture.svg"
    path.write_text("older")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        every_kind()["weights"].save(path)
    assert path.read_text() == "older"
    assert [entry.name for entry in tmp_path.iterdir()] == ["picture.svg"]


@pytest.mark.slow
@pytest.mark.parametrize("name", [kind for kind in KINDS if kind != "wide letters"])
def test_png_has_the_size_of_the_svg_and_its_colours(name: str, tmp_path: Path) -> None:
    from PIL import Image

    picture = every_kind()[name]
    root = parsed(picture)
    for dark in (False, True):
        path = tmp_path / "picture.png"
        picture.png(path, dark=dark)
        with Image.open(path) as image:
            for measured, side in zip(image.size, ("width", "height"), strict=True):
                assert abs(measured - 2 * float(root.get(side, ""))) <= 2
            painted = image.convert("RGB")
        assert painted.getpixel((0, 0)) == roles(dark)["paper"]
        colours = {colour for _, colour in painted.getcolors(2**24) or []}
        assert roles(dark)["ink"] in colours
        drawing = picture.drawing
        if isinstance(drawing, Cells):
            palette = ramp(dark=dark, signed=drawing.signed)
            strongest = level(drawing.extremes[1], *drawing.scale)
            assert palette[strongest] in colours


@pytest.mark.slow
def test_letters_that_no_font_has_are_told_once(tmp_path: Path) -> None:
    picture = figures.top_keys([0.6, 0.4], ["\ue123\ue124", "\ue125"], word="a")
    with pytest.warns(FontWarning) as caught:
        picture.png(tmp_path / "picture.png")
    assert len(caught) == 1


def test_without_matplotlib_a_png_is_refused_and_the_rest_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    picture = every_kind()["weights"]
    picture.save(tmp_path / "picture.svg")
    with pytest.raises(InputError, match=r"regard\[pictures\]"):
        picture.save(tmp_path / "picture.png")
    assert not (tmp_path / "picture.png").exists()


# Colours ---------------------------------------------------------------------------------------


def lightness(colour: tuple[int, ...]) -> float:
    """OKLab's, by the formulas of https://bottosson.github.io/posts/oklab/."""
    r, g, b = (
        c / 255 / 12.92 if c / 255 <= 0.04045 else ((c / 255 + 0.055) / 1.055) ** 2.4
        for c in colour
    )
    long = 0.4122214708 * r + 0.5363325363 * g + 0.0514459929 * b
    medium = 0.2119034982 * r + 0.6806995451 * g + 0.1073969566 * b
    short = 0.0883024619 * r + 0.2817188376 * g + 0.6299787005 * b
    roots = [part ** (1 / 3) for part in (long, medium, short)]
    return 0.2104542553 * roots[0] + 0.7936177850 * roots[1] - 0.0040720468 * roots[2]


@pytest.mark.parametrize("dark", [False, True])
def test_equal_steps_of_the_data_are_equal_steps_of_lightness(dark: bool) -> None:
    shades = [lightness(colour) for colour in ramp(dark=dark, signed=False)]
    least, most = shades[0], shades[-1]
    for index, shade in enumerate(shades):
        assert shade == pytest.approx(least + (most - least) * index / (LEVELS - 1), abs=0.01)
    assert abs(most - least) > 0.65
    both = [lightness(colour) for colour in ramp(dark=dark, signed=True)]
    for index in range(LEVELS // 2):  # as far from 0 is as strong, on either side
        assert both[index] == pytest.approx(both[LEVELS - 1 - index], abs=0.02)


def test_the_256_colours_rise_with_the_data() -> None:
    def rgb(code: int) -> tuple[int, ...]:
        if code >= 232:
            return (8 + 10 * (code - 232),) * 3
        steps = (0, 95, 135, 175, 215, 255)
        return steps[(code - 16) // 36], steps[(code - 16) // 6 % 6], steps[(code - 16) % 6]

    for dark in (False, True):
        strip = list(dict.fromkeys(ramp_of_256(dark=dark, signed=False)))
        shades = [lightness(rgb(code)) for code in strip]
        assert shades == sorted(shades, reverse=not dark)
    assert rgb(nearest_of_256((94, 176, 250))) == (95, 175, 255)


def test_where_a_picture_cannot_go_is_said(tmp_path: Path) -> None:
    picture = figures.weight_map([[1.0]], ["a"], ["a"])
    (tmp_path / "folder.svg").mkdir()
    for save in (picture.save, picture.png):
        with pytest.raises(InputError, match=r"folder\.svg' is a folder"):
            save(tmp_path / "folder.svg")
        with pytest.raises(InputError, match=r"There is no folder .*none' to write a\.png to"):
            save(tmp_path / "none" / "a.png")
