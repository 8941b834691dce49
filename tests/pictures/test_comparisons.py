"""Pictures of several panels, and comparisons of two pictures."""

from __future__ import annotations

import math
from xml.etree import ElementTree

import pytest
import torch

from regard import InputError
from regard.pictures import figures
from regard.pictures.colours import LEVELS, level
from regard.pictures.figures import Picture

FIRST = [[1.0, 0.0], [0.25, 0.75]]
SECOND = [[0.5, 0.5], [0.25, 0.75]]
WORDS = ["the", "cat"]


def of_words(weights: list[list[float]]) -> Picture:
    return figures.weight_map(weights, WORDS, WORDS)


def test_two_maps_stand_beside_their_difference_in_the_same_colours() -> None:
    drawing = figures.compare(of_words(FIRST), of_words(SECOND), names=("a", "b")).drawing
    one, other, difference = drawing.parts
    assert [part.title for part in drawing.parts] == ["a", "b", "b less a"]
    assert one.scale == other.scale == (0, 1)
    assert difference.values == ((-0.5, 0.5), (0.0, 0.0))
    assert difference.signed
    assert difference.scale == (-0.5, 0.5)


def test_a_difference_that_is_nothing_is_drawn_as_nothing() -> None:
    same = figures.compare(of_words(FIRST), of_words(FIRST), names=("a", "a again"))
    difference = same.drawing.parts[2]
    assert difference.signed
    assert LEVELS // 2 - 1 <= level(0.0, *difference.scale) <= LEVELS // 2  # the middle


def test_a_difference_shows_its_sign_without_colours_and_without_numbers() -> None:
    size = 30
    more, less = torch.zeros(2, size, size)
    more[0, 0], less[0, 1] = 0.9, 0.9
    names = [f"w{i}" for i in range(size)]
    maps = (figures.weight_map(weights, names, names) for weights in (more, less))
    picture = figures.compare(*maps, names=("a", "b"))
    lines = picture.text(width=80, color="none").splitlines()
    difference = lines[lines.index("b less a") :]
    first = next(line for line in difference if line.lstrip().startswith("w0 "))
    assert first.split("w0 ")[1].rstrip() == "99@@"
    assert any("[987654321 .:-=+*#%@]" in line for line in lines)


def test_labels_that_differ_are_both_written() -> None:
    other = figures.weight_map(SECOND, WORDS, ["the", "dog"])
    drawing = figures.compare(of_words(FIRST), other, names=("a", "b")).drawing
    assert drawing.parts[2].columns.labels == ("the", "cat/dog")


def test_of_several_panels_the_differences_are_drawn() -> None:
    def overview(shift: float) -> Picture:
        return figures.panels(
            "Heads",
            [figures.head_grid(torch.eye(2) + shift, "nats", title=name) for name in ("a", "b")],
        )

    drawing = figures.compare(overview(0), overview(0.5), names=("x", "y")).drawing
    assert [part.title for part in drawing.parts] == ["a", "b"]
    assert all(value == 0.5 for part in drawing.parts for row in part.values for value in row)
    assert "y less x" in drawing.caption


def test_panels_have_a_legend_each_in_every_form() -> None:
    grids = [
        figures.head_grid([[0.1, 0.9]], "nats", title="Entropy"),
        figures.head_grid([[3.0, 40.0]], "tokens", title="Distance"),
    ]
    picture = figures.panels("Heads", grids, caption="Two measures.")
    plain = picture.text(width=80, color="none")
    assert plain.count("[ .:-=+*#%@]") == 2
    assert "Two measures." in plain
    assert "layer down, head across" in plain
    assert plain.count("layer down") == 1
    texts = [e.text for e in ElementTree.fromstring(picture.svg()).iter() if e.tag.endswith("text")]
    for expected in ("Entropy", "Distance", "nats", "tokens", "Two measures."):
        assert expected in texts
    page = picture.html()
    assert page.count("<svg") == 1
    assert page.count("<table>") == 2


def test_panels_take_numbers_where_a_screen_has_room_and_shades_where_not() -> None:
    def drawing_of(layers: int, width: int) -> str:
        values = torch.linspace(0.1, 0.9, layers * 12).view(layers, 12)
        grids = [figures.head_grid(values, "nats", title=f"Grid {n}") for n in range(6)]
        return figures.panels("Heads", grids).text(width=width, color="none")

    assert ".10" in drawing_of(2, 80)
    assert ".10" not in drawing_of(24, 80)
    assert len(drawing_of(24, 80).splitlines()) < 24 * 6


BARS = figures.top_keys([0.5, 0.5], WORDS, word="cat")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (figures.weight_map([[0.5]], ["a"], ["a"]), "2 x 2 and 1 x 1"),
        (BARS, "two maps"),
        (figures.pooled_map(FIRST, 10, 10), "two pictures of one kind"),
    ],
)
def test_what_cannot_be_compared_is_refused(other: Picture, message: str) -> None:
    with pytest.raises(InputError, match=message):
        figures.compare(of_words(FIRST), other, names=("a", "b"))


@pytest.mark.parametrize(("parts", "message"), [([], "at least one"), ([BARS], "maps and grids")])
def test_panels_are_of_cells(parts: list[Picture], message: str) -> None:
    with pytest.raises(InputError, match=message):
        figures.panels("Panels", parts)


def test_a_scale_that_begins_near_nothing_begins_at_nothing() -> None:
    drawing = of_words([[1e-7, 0.6], [0.3, 0.5]]).drawing
    assert drawing.scale == (0.0, 0.6)
    assert math.isclose(drawing.extremes[0], 1e-7)


@pytest.mark.parametrize("width", [40, 44, 52, 60])
def test_long_names_leave_room_in_a_narrow_terminal(width: int) -> None:
    names = ["remembered", "everything"]
    one, two = (figures.weight_map([[1.0, 0.0], w], names, names) for w in ([0.5, 0.5], [0.1, 0.9]))
    drawing_of = figures.compare(one, two, names=("one", "two")).text(width=width, color="none")
    assert max(map(len, drawing_of.splitlines())) <= width
